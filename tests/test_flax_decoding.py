"""Decoding with a cache gives what the full forward gives, in memeff's Flax modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from flax import linen
from flax import nnx as flax_nnx
from flax_cases import LINEN, NNX, F, N, T, X, assert_close, assert_equal, uniform

import memeff
from memeff import masks, nn, scores, transforms


def alibi_init(key):
    return scores.alibi(scores.alibi_slopes(N))


DECODING = {
    "plain": {},
    "window": {"local_window_size": (2, None)},
    "Flax's attention_fn": {"attention_fn": flax_nnx.dot_product_attention},
    "all": {
        "local_window_size": (3, 1),
        "logits_soft_cap": 0.3,
        "num_kv_heads": 2,
        "normalize_qk": True,
        "is_causal": True,
    },
    "functions": {
        "score_init": alibi_init,
        "mask_fn": memeff.block_mask(
            masks.causal() & ~masks.dilated(3) | masks.sliding_window(1), T
        ),
        "qk_transform": transforms.rotary(),
        "sinks_init": jax.nn.initializers.ones,
        "num_kv_heads": 2,
    },
}


def linen_step(module, params):
    """Return a jitted function of (cache, tokens) that returns the next cache and the outputs."""

    @jax.jit
    def step(cache, tokens):
        out, changed = module.apply({**params, "cache": cache}, tokens, mutable=["cache"])
        return changed["cache"], out

    return step


def decode(step, cache, lengths):
    """Feed the tokens of X in pieces of the given lengths, and return the cache and all outputs."""
    outs = []
    start = 0
    for length in lengths:
        cache, out = step(cache, X[:, start : start + length])
        outs.append(out)
        start += length
    return cache, np.concatenate(outs, 1)


@pytest.mark.parametrize("name", few(["plain", "all", "functions"], ["plain", "all"]))
def test_decoding_equals_the_full_forward_linen(name):
    constructor = dict(num_heads=N, kernel_init=uniform, **DECODING[name])
    module = LINEN[0](decode=True, **constructor)
    variables = module.init(jax.random.key(0), X)
    params = {"params": variables["params"]}
    empty = variables["cache"]
    full = LINEN[0](**(constructor | {"is_causal": True})).apply(params, X)

    step = linen_step(module, params)
    one_by_one = [1] * T
    cache, out = decode(step, empty, one_by_one)
    assert_close(out, full)
    if name != "plain":
        _, out = decode(step, empty, [6, 1])
        assert_close(out, full)  # a prompt at once, then token by token
        return

    flaxes = LINEN[1](decode=True, **constructor)
    assert_equal(empty, flaxes.init(jax.random.key(0), X)["cache"])
    flax_result = decode(linen_step(flaxes, params), empty, one_by_one)
    assert_close((cache, out), flax_result)
    message = "the cache has room for 7 tokens and holds 7, and 1 more came. Make it"
    with pytest.raises(ValueError, match=message):
        module.apply({**params, "cache": cache}, X[:, :1], mutable=["cache"])
    message = r"keys of shape \(1, 1, 4, 2\), and the cache has \(2, 7, 4, 2\)"
    with pytest.raises(ValueError, match=message):
        module.apply({**params, "cache": empty}, X[:1, :1], mutable=["cache"])


@pytest.mark.parametrize(
    "name",
    few(
        [*DECODING, "window in attention_fn"],
        ["Flax's attention_fn", "functions", "window in attention_fn"],
    ),
)
def test_decoding_equals_the_full_forward_nnx(name):
    if name in DECODING:
        constructor = dict(DECODING[name])
    else:
        constructor = {"attention_fn": functools.partial(nn.attention_fn, local_window_size=(2, 0))}
    module = NNX[0](N, F, decode=True, kernel_init=uniform, rngs=flax_nnx.Rngs(0), **constructor)
    full = module(X, decode=False, is_causal=True)
    module.init_cache(X.shape)

    @flax_nnx.jit
    def step(module, token):
        return module(token, is_causal=True)

    outs = [step(module, X[:, t : t + 1]) for t in range(T)]
    assert_close(np.concatenate(outs, 1), full)
    assert module.cache_index[...] == T
    assert "q_offset" not in str(module.attention_fn)


# ---- prompts of several tokens, and a position for each sequence

PROMPTS = np.array([2, 4])  # tokens of a padded prompt of 4; then both go on with X[:, 4:]
OPTIONS = {"window": DECODING["window"], "functions": DECODING["functions"]}


def rows_of(b):
    """Return the tokens of X that sequence b has: its prompt, and what follows."""
    return [*range(PROMPTS[b]), *range(4, T)]


def linen_decoder(**constructor):
    """Return decode(tokens, lengths or None) of a Linen module, and its full causal forward."""
    constructor = dict(num_heads=N, kernel_init=uniform, **constructor)
    module = LINEN[0](decode=True, **constructor)
    variables = module.init(jax.random.key(0), X)
    params = {"params": variables["params"]}
    step = linen_step(module, params)
    state = {"cache": variables["cache"]}

    def decode(tokens, lengths=None):
        if lengths is not None:
            state["cache"] = state["cache"] | {"cache_index": jnp.asarray(lengths, jnp.int32)}
        state["cache"], out = step(state["cache"], tokens)
        return out

    causal = LINEN[0](**(constructor | {"is_causal": True}))
    return decode, jax.jit(functools.partial(causal.apply, params))


def nnx_decoder(**constructor):
    """Return the same of an NNX module."""
    module = NNX[0](N, F, decode=True, kernel_init=uniform, rngs=flax_nnx.Rngs(0), **constructor)
    module.init_cache(X.shape)
    step = flax_nnx.jit(lambda module, tokens: module(tokens))

    def decode(tokens, lengths=None):
        if lengths is not None:
            module.cache_index = flax_nnx.Cache(jnp.asarray(lengths, jnp.int32))
        return step(module, tokens)

    full = flax_nnx.jit(lambda module, tokens: module(tokens, decode=False, is_causal=True))
    return decode, functools.partial(full, module)


@pytest.mark.parametrize(
    "make, name",
    [
        (nnx_decoder, "functions"),
        pytest.param(linen_decoder, "window", marks=pytest.mark.slow),
        pytest.param(linen_decoder, "functions", marks=pytest.mark.slow),
        pytest.param(nnx_decoder, "window", marks=pytest.mark.slow),
    ],
)
def test_prompts_of_different_lengths_in_one_call(make, name):
    constructor = dict(OPTIONS[name])
    if name == "functions":  # a block mask has positions of T tokens, and sequences have 5 and 7
        constructor["mask_fn"] = masks.causal() & ~masks.dilated(3) | masks.sliding_window(1)
    decode, full = make(**constructor)
    prompt = decode(X[:, :4])
    outs = [decode(X[:, 4:6], PROMPTS), decode(X[:, 6:])]
    for b in range(2):
        rows = rows_of(b)
        expected = full(X[b : b + 1, rows])
        count = PROMPTS[b]
        actual = np.concatenate([prompt[b, :count], *(out[b] for out in outs)])
        assert_close(actual[None], expected)


@pytest.mark.slow
@pytest.mark.parametrize("make", [linen_decoder, nnx_decoder])
def test_a_sequence_outside_the_cache_gives_nan_under_jit(make):
    decode, _ = make()
    decode(X)
    for first in (T - 1, -1):
        out = decode(X[:, :2], [first, T - 2])
        assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


def test_wrong_indices_are_refused():
    module = NNX[0](N, F, decode=True, rngs=flax_nnx.Rngs(0))
    module.init_cache(X.shape)
    module.cache_index = flax_nnx.Cache(jnp.array([T, 0]))
    with pytest.raises(ValueError, match="holds 7, and 1 more came"):
        module(X[:, :1])
    module.cache_index = flax_nnx.Cache(jnp.array([0, -1]))
    with pytest.raises(ValueError, match="cache_index is -1. It must be at least 0"):
        module(X[:, :1])
    module.cache_index = flax_nnx.Cache(jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"cache_index has shape \(3,\)\. It must be one number"):
        module(X[:, :1])
    module.cache_index = flax_nnx.Cache(jnp.zeros(2, jnp.uint8))
    with pytest.raises(TypeError, match="cache_index is uint8, which cannot count all tokens"):
        module(X[:, :1])
    module.cache_index = flax_nnx.Cache(jnp.int32(0))
    with pytest.raises(ValueError, match="Pass inputs with 1 to 7 tokens"):
        module(np.concatenate([X, X], 1))
    module.attention_fn = flax_nnx.dot_product_attention
    with pytest.raises(ValueError, match="does not take q_offset, which is needed here"):
        module(X[:, :2])


@pytest.mark.parametrize("layer", ["NNX", "Linen", "NNX with a window"])
def test_an_attention_fn_that_hands_all_keywords_to_flax_is_refused_in_words(layer):
    """It takes any keyword, and Flax's function knows none of memeff's."""

    flaxes = linen if layer == "Linen" else flax_nnx

    def attention(*arrays, **keywords):
        return flaxes.dot_product_attention(*arrays, **keywords)

    name = {"NNX": "q_offset", "Linen": "is_causal", "NNX with a window": "local_window_size"}[
        layer
    ]
    message = f"attention takes any keyword, and hands {name} to a function that does not take it"
    if layer == "Linen":
        module = LINEN[0](N, decode=True, attention_fn=attention)
        variables = module.init(jax.random.key(0), X)
        with pytest.raises(TypeError, match=message):
            module.apply(variables, X[:, :1], mutable=["cache"])
        return
    window = (2, None) if "window" in layer else None
    module = NNX[0](
        *(N, F),
        decode=True,
        attention_fn=attention,
        local_window_size=window,
        rngs=flax_nnx.Rngs(0),
    )
    module.init_cache(X.shape)
    with pytest.raises(TypeError, match=message):
        module(X[:, :1])


def test_a_cache_may_have_another_dtype_than_its_tokens():
    module = NNX[0](N, F, decode=True, kernel_init=uniform, rngs=flax_nnx.Rngs(0))
    full = module(X, decode=False, is_causal=True)
    for lengths in ([1] * T, [T - 1, 1]):
        module.init_cache(X.shape, jnp.bfloat16)
        pieces = np.split(X, np.cumsum(lengths)[:-1], axis=1)
        out = np.concatenate([module(piece) for piece in pieces], 1)
        np.testing.assert_allclose(out, full, atol=0.02)
        assert module.cached_key.dtype == jnp.bfloat16


def test_a_full_cache_refuses_one_more_token():
    module = NNX[0](N, F, decode=True, rngs=flax_nnx.Rngs(0))
    module.init_cache(X.shape)
    module(X)
    with pytest.raises(ValueError, match="has room for 7 tokens and holds 7, and 1 more came"):
        module(X[:, :1])


@pytest.mark.parametrize(("queries", "keys"), [(2, 1), (1, 2), (2, 3)])
def test_queries_and_keys_of_different_lengths_are_refused(queries, keys):
    """The cache has one position for both."""
    module = NNX[0](N, F, decode=True, rngs=flax_nnx.Rngs(0))
    module.init_cache(X.shape)
    message = r"decode: inputs give queries .* and keys .*\. Both must have the same tokens"
    with pytest.raises(ValueError, match=message):
        module(X[:, :queries], X[:, :keys])
    assert module.cache_index[...] == 0
    linen = LINEN[0](N, decode=True)
    variables = linen.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=message):
        linen.apply(variables, X[:, :queries], X[:, :keys], mutable=["cache"])
