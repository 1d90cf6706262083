"""Flax modules with memeff inside, against Flax's own; what Flax lacks, against dense masks; switches of whole models."""

import ast
import functools
import inspect
import itertools
import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from flax import serialization

import memeff
from memeff import masks, nn, scores, transforms
from memeff.arguments import AttentionOptions
from memeff.nn import options, switch

B, T, S, N, F = 2, 7, 9, 4, 8
LINEN = (nn.linen.MultiHeadDotProductAttention, flax_linen.MultiHeadDotProductAttention)
ALIAS = (nn.linen.MultiHeadAttention, flax_linen.MultiHeadAttention)
NNX = (nn.nnx.MultiHeadAttention, flax_nnx.MultiHeadAttention)
FAMILIES = {"linen": LINEN, "nnx": NNX}
family = pytest.mark.parametrize("ours, flaxes", FAMILIES.values(), ids=FAMILIES)

rng = np.random.default_rng(0)
# NumPy: eager slices need no compiler
X, Y = (rng.standard_normal((B, length, F)).astype(np.float32) for length in (T, S))
MASK = (rng.random((B, 1, T, S)) < 0.7) | (np.arange(S) == 0)
SELF_MASK = (rng.random((B, 1, T, T)) < 0.7) | np.eye(T, dtype=bool)


def uniform(key, shape, dtype=jnp.float32, **of_flax):
    """An initialiser that gives biases and large logits too."""
    return jax.random.uniform(key, shape, dtype, -1, 1)


def build(cls, *inputs, call=None, **constructor):
    """Parameters as a plain dict, and run(parameters, *inputs, **call)."""
    if issubclass(cls, flax_linen.Module):
        module = cls(num_heads=N, **constructor)
        params = module.init(
            {"params": jax.random.key(0), "dropout": jax.random.key(1)}, *inputs, **(call or {})
        )["params"]

        def run(params, *inputs, **call):
            return module.apply(
                {"params": params}, *inputs, rngs={"dropout": jax.random.key(2)}, **call
            )
    else:
        module = cls(N, F, rngs=flax_nnx.Rngs(0), decode=False, **constructor)
        graph, params, rest = flax_nnx.split(module, flax_nnx.Param, ...)
        params = flax_nnx.to_pure_dict(params)

        def run(params, *inputs, **call):
            state = flax_nnx.split(module, flax_nnx.Param, ...)[1]
            flax_nnx.replace_by_pure_dict(state, params)
            return flax_nnx.merge(graph, state, rest, copy=True)(*inputs, **call)

    return params, run


def close(a, b, tolerance=2e-6):
    """Within `tolerance` of the largest number there is, or of 1."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert jax.tree.map(jnp.result_type, a) == jax.tree.map(jnp.result_type, b)
    a, b = ([np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (a, b))
    allowed = tolerance * max(1, *(np.abs(y).max() for y in b))
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=allowed)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def dense_mask(length, is_causal=False, local_window_size=None):
    """By loops, for T = S = length."""
    left, right = local_window_size or (None, None)
    see = np.ones((length, length), bool)
    for i, j in itertools.product(range(length), repeat=2):
        see[i, j] = not (
            (is_causal and j > i)
            or (left is not None and j < i - left)
            or (right is not None and j > i + right)
        )
    return see[None, None]


def quadratic(query, key, value, mask=None, *, logits_soft_cap=None, **of_flax):
    """An attention_fn with a soft cap, as short as the formula."""
    key, value = (jnp.repeat(x, query.shape[-2] // x.shape[-2], -2) for x in (key, value))
    s = jnp.einsum("...qhd,...khd->...hqk", query, key) / query.shape[-1] ** 0.5
    s = s if logits_soft_cap is None else logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    s = s if mask is None else jnp.where(mask, s, -jnp.inf)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(s), value)


# ---- the same as Flax's


SIZES = ({}, {"qkv_features": 12, "out_features": 5})
DENSE = ({}, {"use_bias": False, "normalize_qk": True})
ONES = jax.nn.initializers.ones
INITS = (
    {},
    {"kernel_init": uniform, "out_kernel_init": ONES, "bias_init": uniform, "out_bias_init": ONES},
)
DROPS = ({}, {"dropout_rate": 0.4}, {"dropout_rate": 0.4, "broadcast_dropout": False})


CONSTRUCTORS = [
    functools.reduce(lambda a, b: a | b, choice)
    for choice in itertools.product(SIZES, DENSE, INITS, DROPS)
]
assert len(CONSTRUCTORS) == 24


EACH = [(*of, i) for of in (LINEN, NNX) for i in range(24)]
SOME = [(*of, i) for *of, i in EACH if i % 5 == 0 or i == 23]


@pytest.mark.parametrize("ours, flaxes, number", [*few(EACH, SOME), (*ALIAS, 23)])
def test_parameters_and_outputs_are_flaxes(ours, flaxes, number):
    constructor = dict(CONSTRUCTORS[number])
    if ours is NNX[0] and "qkv_features" in constructor:
        constructor["num_kv_heads"] = 2
    inputs, call = (
        (X, Y),
        {"deterministic": False, "mask": (None, MASK.astype(np.float32), MASK)[number % 3]},
    )
    params, run = build(ours, *inputs, call=call, **constructor)
    params_of_flax, run_flax = build(flaxes, *inputs, call=call, **constructor)
    same(params, params_of_flax)
    out, out_of_flax = run(params_of_flax, *inputs, **call), run_flax(params, *inputs, **call)
    assert out.shape == out_of_flax.shape
    close(out, out_of_flax)
    if "dropout_rate" in constructor:
        assert (
            np.abs(np.asarray(out) - run(params, *inputs, **(call | {"deterministic": True}))).max()
            > 1e-3
        )


@family
def test_dtypes_are_flaxes(ours, flaxes):
    params, run = build(ours, X, Y, dtype=jnp.bfloat16)
    run_flax = build(flaxes, X, Y, dtype=jnp.bfloat16)[1]
    close(*(jax.jit(f)(params, X, Y, mask=MASK) for f in (run, run_flax)), 0.03)
    shapes = [
        jax.eval_shape(lambda cls=cls: build(cls, X, Y, param_dtype=jnp.float16)[0])
        for cls in (ours, flaxes)
    ]
    assert shapes[0] == shapes[1] and shapes[0]["query"]["bias"].dtype == jnp.float16


def test_checkpoints_load_in_the_other():
    (ours, flaxes), inputs = LINEN, (X, Y)
    params, run = build(ours, *inputs, kernel_init=uniform)
    other, run_flax = build(flaxes, *inputs, kernel_init=jax.nn.initializers.ones)
    loaded = serialization.from_bytes(other, serialization.to_bytes(params))
    close(run_flax(loaded, *inputs), run(params, *inputs))

    ours, flaxes = (
        cls(N, F, num_kv_heads=2, decode=False, kernel_init=init, rngs=flax_nnx.Rngs(0))
        for cls, init in zip(NNX, (uniform, jax.nn.initializers.ones), strict=True)
    )
    assert nn.nnx.MultiHeadAttention.__mro__[1] is flax_nnx.MultiHeadAttention
    flax_nnx.update(flaxes, flax_nnx.state(ours))
    close(flaxes(X, Y), ours(X, Y))


def test_partitioned_initialisers_are_kept():
    named = flax_linen.with_partitioning(uniform, (None, "heads", None))
    trees = [cls(num_heads=N, kernel_init=named).init(jax.random.key(0), X) for cls in LINEN]
    same(*trees)
    assert flax_linen.get_partition_spec(trees[0])["params"]["key"][
        "kernel"
    ] == jax.sharding.PartitionSpec(None, "heads", None)
    module = NNX[0](
        N,
        F,
        kernel_init=flax_nnx.with_metadata(uniform, note="heads"),
        decode=False,
        rngs=flax_nnx.Rngs(0),
    )
    assert module.value.kernel.get_metadata()["note"] == "heads"


def test_every_keyword_that_flax_passes_is_ours():
    names = inspect.signature(nn.attention_fn).parameters
    source = textwrap.dedent(inspect.getsource(LINEN[1].__call__))
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    passed = {
        keyword.arg
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == "dict"
        or "attention_fn" in ast.unparse(call.func)
        for keyword in call.keywords
    }
    assert {"mask", "dropout_rng", "deterministic", "module", "force_fp32_for_softmax"} <= passed
    # Linen drops without a word what the signature does not name
    assert passed - {None} <= set(names)

    recorded = {}

    def record(query, key, value, **keywords):
        recorded.update(keywords)
        return query

    NNX[1](N, F, attention_fn=record, decode=False, rngs=flax_nnx.Rngs(0))(X)
    known = {*names, *AttentionOptions.__annotations__}
    assert {"mask", "dropout_rng", "deterministic", "module", "is_causal"} <= set(recorded) <= known


QKV = [rng.standard_normal((B, length, N, 2)).astype(np.float32) for length in (T, S, S)]


def test_masks_of_attention_fn_are_flaxes():
    """Nonzero = may attend, of any dtype; what looks additive is refused where it is known."""
    plain = nn.attention_fn(*QKV, mask=MASK)
    for mask in (MASK.astype(np.float32), MASK.astype(np.int32) * 7, MASK.astype(np.float16) * 3):
        close(nn.attention_fn(*QKV, mask=mask), plain)
        close(jax.jit(nn.attention_fn)(*QKV, mask=mask), plain)
    close(
        nn.attention_fn(*QKV, mask=MASK.astype(np.float32)),
        flax_linen.dot_product_attention(*QKV, mask=MASK),
    )
    additive = np.where(MASK, 0, -1e9).astype(np.float32)
    inside_jit = lambda mask: jax.jit(lambda *qkv: nn.attention_fn(*qkv, mask=mask))(*QKV)
    for mask in (
        additive,
        jnp.asarray(additive),
        additive.astype(np.int32),
        0.5 * MASK,
        np.where(MASK, 1.0, np.nan),
    ):
        for call in (lambda mask: nn.attention_fn(*QKV, mask=mask), inside_jit):
            with pytest.raises(
                TypeError, match=r"mask is \w+ with values that are negative .* Pass .* as bias="
            ):
                call(mask)
    close(nn.attention_fn(*QKV, additive), plain)  # as a bias
    close(nn.attention_fn(*QKV, mask=MASK.astype(int).tolist()), plain)
    with pytest.raises(TypeError, match="mask must be boolean .* got complex64"):
        nn.attention_fn(*QKV, mask=MASK.astype(np.complex64))


def test_no_hook_of_attention_fn_changes_what_mask_means():
    for deterministic in (True, False):
        with pytest.raises(TypeError, match="looks additive"):
            nn.attention_fn(*QKV, mask=np.where(MASK, 0, -1e9), deterministic=deterministic)


def test_dtypes_of_attention_fn_are_flaxes():
    """A float32 decode cache meets bfloat16 queries: Flax promotes; jax.nn refuses, as does memeff outside Flax."""
    query, key, value = QKV
    half = [x.astype(jnp.bfloat16) for x in QKV]
    close(
        nn.attention_fn(half[0], key, value),
        nn.attention_fn(half[0].astype(np.float32), key, value),
    )
    same(nn.attention_fn(*QKV, dtype=jnp.bfloat16), nn.attention_fn(*half))
    gradient = jax.grad(
        lambda q: nn.attention_fn(q, key, value, dtype=jnp.bfloat16).astype(np.float32).sum()
    )(query)
    assert gradient.dtype == np.float32
    with pytest.raises(TypeError, match="key is float32 and query is bfloat16"):
        memeff.dot_product_attention(half[0], key, value)


def test_hooks_of_attention_fn():
    key = jax.random.key(0)
    plain = memeff.dot_product_attention(*QKV)
    same(nn.attention_fn(*QKV, dropout_rng=key, dropout_rate=0.5, deterministic=True), plain)
    same(nn.attention_fn(*QKV, dropout_rate=0.5, deterministic=True), plain)
    drawn = nn.attention_fn(*QKV, dropout_rng=key, dropout_rate=0.5)
    same(drawn, memeff.dot_product_attention(*QKV, dropout_rng=key, dropout_rate=0.5))
    close(drawn, flax_linen.dot_product_attention(*QKV, dropout_rng=key, dropout_rate=0.5), 4e-6)
    half = [x.astype(jnp.bfloat16) for x in QKV]
    for force in (True, False):  # no softmax here is less precise than Flax's with True
        same(
            nn.attention_fn(*half, force_fp32_for_softmax=force),
            memeff.dot_product_attention(*half),
        )
    same(
        nn.attention_fn(*QKV, local_window_size=1),
        memeff.dot_product_attention(*QKV, local_window_size=1),
    )
    wrong = [
        ({"deterministic": 1}, TypeError, "deterministic must be True or False .*, got int 1"),
        ({"deterministic": True, "dropout_rate": 1.0}, ValueError, "dropout_rate=1: the chance"),
        ({"dropout_rate": 0.5}, ValueError, "dropout_rate=0.5 came without dropout_rng"),
        (
            {"module": object()},
            NotImplementedError,
            r"sow_weights=True asks for .*, \(2, 4, 7, 9\) or 0\.0 MiB",
        ),
        (
            {"qk_attn_weights_einsum": jnp.einsum},
            NotImplementedError,
            "qk_attn_weights_einsum is not supported",
        ),
        (
            {"attn_weights_value_einsum": jnp.einsum},
            NotImplementedError,
            "attn_weights_value_einsum is not supported",
        ),
        ({"chunk_sise": 2}, TypeError, "unexpected keyword argument 'chunk_sise'"),
    ]
    for kwargs, kind, message in wrong:
        with pytest.raises(kind, match=message):
            nn.attention_fn(*QKV, **kwargs)


@family
def test_without_its_hooks_the_cure_is_named(ours, flaxes):
    """Flax's modules with `memeff.dot_product_attention`: Linen passes only what a signature names, NNX all."""
    cure = r"deterministic= is a hook of Flax's modules.*give the modules attention_fn=memeff\.nn\.attention_fn"
    for fn in (
        memeff.dot_product_attention,
        functools.partial(memeff.dot_product_attention, chunk_size=2),
    ):
        for cls in (ours, flaxes):
            params, run = build(cls, X)
            wrong = build(cls, X, attention_fn=nn.attention_fn)[1]
            close(wrong(params, X), run(params, X))
            for deterministic in (True, False):
                with pytest.raises(TypeError, match=cure):
                    of = dict(attention_fn=fn, dropout_rate=0.5)
                    build(cls, X, **of, call={"deterministic": deterministic})[1](
                        params, X, deterministic=deterministic
                    )


@family
def test_an_attention_fn_of_the_user_is_used(ours, flaxes):
    calls = []

    def own(query, key, value, mask=None, **of_flax):
        calls.append(of_flax)
        return quadratic(query, key, value, mask)

    params, run = build(flaxes, X, Y)
    own_run = build(ours, X, Y, attention_fn=own)[1]
    calls.clear()
    close(own_run(params, X, Y, mask=MASK), run(params, X, Y, mask=MASK))
    assert len(calls) == 1 and calls[0]["deterministic"] is True


# ---- what Flax lacks


OPTIONS = {
    "is_causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "window, one number": {"local_window_size": 1},
    "cap": {"logits_soft_cap": 0.2},
    "grouped": {"num_kv_heads": 2},
    "all": {
        "is_causal": True,
        "local_window_size": (3, None),
        "logits_soft_cap": 0.3,
        "num_kv_heads": 1,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@family
def test_options(ours, flaxes, name):
    constructor, mask = (
        dict(OPTIONS[name]),
        (rng.random((B, N, T, T)) < 0.8) | np.eye(T, dtype=bool),
    )
    params, run = build(ours, X, **constructor, kernel_init=uniform)
    out = run(params, X, mask=mask)
    plain = build(ours, X, kernel_init=uniform)
    assert np.abs(np.asarray(out) - plain[1](plain[0], X, mask=mask)).max() > 1e-3

    K = constructor.pop("num_kv_heads", N)
    window = constructor.pop("local_window_size", None)
    window = (window, window) if isinstance(window, int) else window
    mask = mask & dense_mask(T, constructor.pop("is_causal", False), window)
    heads = {"num_kv_heads": K} if ours is NNX[0] else {}
    # Flax's has as many key heads as query heads: give it each of ours N / K times
    if ours is LINEN[0]:
        params = {
            name: jax.tree.map(lambda x: np.repeat(x, N // K, -2), of)
            if name in ("key", "value")
            else of
            for name, of in params.items()
        }
    oracle = build(flaxes, X, attention_fn=functools.partial(quadratic, **constructor), **heads)[1]
    close(out, oracle(params, X, mask=mask))


def test_is_causal_of_an_nnx_call_takes_precedence():
    module = NNX[0](N, F, is_causal=True, decode=False, kernel_init=uniform, rngs=flax_nnx.Rngs(0))
    full = NNX[1](N, F, decode=False, kernel_init=uniform, rngs=flax_nnx.Rngs(0))(X)
    close(module(X, is_causal=False), full)
    assert np.abs(np.asarray(module(X)) - full).max() > 1e-3


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
        "score_init": lambda key: scores.alibi(scores.alibi_slopes(N)),
        "mask_fn": memeff.block_mask(
            masks.causal() & ~masks.dilated(3) | masks.sliding_window(1), T
        ),
        "qk_transform": transforms.rotary(),
        "sinks_init": jax.nn.initializers.ones,
        "num_kv_heads": 2,
    },
}


@pytest.mark.parametrize("name", ["plain", "all", "functions"])
def test_decoding_equals_the_full_forward_linen(name):
    constructor = dict(num_heads=N, kernel_init=uniform, **DECODING[name])
    module = LINEN[0](decode=True, **constructor)
    variables = module.init(jax.random.key(0), X)
    params, empty = {"params": variables["params"]}, variables["cache"]
    full = LINEN[0](**(constructor | {"is_causal": True})).apply(params, X)

    @jax.jit
    def step(cache, tokens):
        out, changed = module.apply({**params, "cache": cache}, tokens, mutable=["cache"])
        return changed["cache"], out

    def decode(lengths, step=step):
        cache, outs = empty, []
        for at, length in zip(np.cumsum((0, *lengths)), lengths, strict=False):
            cache, out = step(cache, X[:, at : at + length])
            outs.append(out)
        return cache, np.concatenate(outs, 1)

    cache, out = decode([1] * T)
    close(out, full)
    if name != "plain":
        close(decode([6, 1])[1], full)  # a prompt at once, then token by token
    if name == "plain":  # Flax's own decoding, with its cache
        flaxes = LINEN[1](decode=True, **constructor)
        same(empty, flaxes.init(jax.random.key(0), X)["cache"])

        @jax.jit
        def own(cache, tokens):
            out, changed = flaxes.apply({**params, "cache": cache}, tokens, mutable=["cache"])
            return changed["cache"], out

        cache_of_flax, out_of_flax = decode([1] * T, own)
        close((cache, out), (cache_of_flax, out_of_flax))
        with pytest.raises(
            ValueError, match="the cache of 7 tokens holds 7 and 1 came: init with longer inputs"
        ):
            module.apply({**params, "cache": cache}, X[:, :1], mutable=["cache"])
        with pytest.raises(
            ValueError, match=r"keys \(1, 1, 4, 2\), and the cache holds \(2, 7, 4, 2\)"
        ):
            module.apply({**params, "cache": empty}, X[:1, :1], mutable=["cache"])


@pytest.mark.parametrize("name", [*DECODING, "window in attention_fn"])
def test_decoding_equals_the_full_forward_nnx(name):
    if name in DECODING:
        constructor = dict(DECODING[name])
    else:
        constructor = {"attention_fn": functools.partial(nn.attention_fn, local_window_size=(2, 0))}
    module = NNX[0](N, F, decode=True, kernel_init=uniform, rngs=flax_nnx.Rngs(0), **constructor)
    full = module(X, decode=False, is_causal=True)
    module.init_cache(X.shape)
    step = flax_nnx.jit(lambda module, token: module(token, is_causal=True))
    close(np.concatenate([step(module, X[:, t : t + 1]) for t in range(T)], 1), full)
    assert module.cache_index[...] == T and "q_offset" not in str(module.attention_fn)


# ---- functions of the user's own, and sinks


H = F // N
HALF = jax.nn.initializers.constant(0.5)
# every kind of tree that params may be: an array, a tuple with a None in it, a dictionary
LEARNT = {
    "score_init": lambda key: scores.alibi(scores.alibi_slopes(N)).then(scores.soft_cap(2.0)),
    "qk_transform_init": lambda key: transforms.rms_norm(*jnp.array([[1.0] * H, [2.0] * H])).then(
        transforms.rotary()
    ),
    "sinks_init": HALF,
}
DOCUMENT = np.array([0, 0, 0, 1, 1, 1, 1])
SAME_DOCUMENT = masks.documents(DOCUMENT) | masks.prefix(2)
SEEN = (DOCUMENT[:, None] == DOCUMENT) | (np.arange(T) < 2)
NAMES = {
    "score_init": ("score_fn", "score_params"),
    "qk_transform_init": ("qk_transform", "qk_transform_params"),
}


def learnt_params(ours, params):
    """(slopes, cap), scales by name, sinks; the same tree without them."""
    params = dict(params)
    if ours is LINEN[0]:
        return (
            params.pop("score_params"),
            params.pop("qk_transform_params")[0],
            params.pop("sinks"),
            params,
        )
    score, transform = (params.pop(name)["params"] for name in ("score_fn", "qk_transform"))
    return (score[0], score[1]), transform[0], params.pop("sinks"), params


def by_hand(query, key, value, mask=None, *, score, scales, sinks, **of_flax):
    """ALiBi, a soft cap, normalised and rotated queries and keys, sinks; as short as the formulas."""
    at = np.arange(T)

    def turned(x, scale):
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale
        angle = at[:, None, None] * 10000.0 ** (-np.arange(H // 2) / (H // 2))
        a, b = x[..., : H // 2], x[..., H // 2 :]
        return jnp.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
        )

    s = (
        jnp.einsum("bqhd,bkhd->bhqk", turned(query, scales["query"]), turned(key, scales["key"]))
        / H**0.5
    )
    s = s - score[0][:, None, None] * np.abs(at[:, None] - at)
    s = jnp.where(mask, score[1] * jnp.tanh(s / score[1]), -jnp.inf)
    s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))], -1)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s)[..., :-1], value)


@family
def test_what_learns_is_a_parameter_with_its_gradient(ours, flaxes):
    mask = SELF_MASK & SEEN
    params, run = build(ours, X, kernel_init=uniform, mask_fn=SAME_DOCUMENT, **LEARNT)
    score, scales, sinks, plain = learnt_params(ours, params)
    expected_params, _ = build(flaxes, X, kernel_init=uniform)
    same(plain, expected_params)
    close(score, (scores.alibi_slopes(N), jnp.float32(2)))
    close((scales, sinks), ({"query": jnp.ones(H), "key": 2 * jnp.ones(H)}, jnp.full(N, 0.5)))

    def expected(params):
        score, scales, sinks, plain = learnt_params(ours, params)
        attention_fn = functools.partial(by_hand, score=score, scales=scales, sinks=sinks)
        return build(flaxes, X, attention_fn=attention_fn, call={"mask": mask})[1](
            plain, X, mask=mask
        )

    ct = rng.standard_normal(X.shape).astype(np.float32)
    both = lambda run: jax.jit(
        lambda params: (run(params), jax.grad(lambda p: (run(p) * ct).sum())(params))
    )(params)
    found, truth = both(lambda params: run(params, X, mask=SELF_MASK)), both(expected)
    close(found, truth, 1e-5)
    assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(learnt_params(ours, found[1])[:3]))


def test_one_offset_for_a_whole_batch_reaches_every_function():
    """A cache tells a position that is an array, the same for all batch entries."""
    x = rng.standard_normal((B, T, N, H)).astype(np.float32)
    of = dict(score_fn=ALIBI, mask_fn=masks.sliding_window(2), qk_transform=transforms.rotary())
    offsets = (3, jnp.int32(3), jnp.full(B, 3))
    first, *others = (
        memeff.dot_product_attention(x, x, x, q_offset=offset, **of) for offset in offsets
    )
    assert np.abs(first - memeff.dot_product_attention(x, x, x, **of)).max() > 1e-3
    for other in others:
        close(other, first)


@family
def test_what_is_given_whole_is_constant(ours, flaxes):
    """The same numbers as what learns, and Flax's parameters alone; functions without params, and a block mask, too."""
    fixed = {NAMES[name][0]: init(None) for name, init in LEARNT.items() if name in NAMES}
    params, run = build(
        ours,
        X,
        kernel_init=uniform,
        mask_fn=memeff.block_mask(SAME_DOCUMENT, T, block_size=2),
        **fixed,
    )
    same(params, build(flaxes, X, kernel_init=uniform)[0])
    learns = {name: init for name, init in LEARNT.items() if name in NAMES}
    other, run_other = build(ours, X, kernel_init=uniform, mask_fn=SAME_DOCUMENT, **learns)
    close(run(params, X), run_other(other, X))
    functions = {
        "score_fn": lambda score, batch, head, q_pos, k_pos, params: score * (1 + head),
        "mask_fn": lambda batch, head, q_pos, k_pos, params: k_pos <= q_pos + head,
        "qk_transform": lambda x, position, which, params: x * (2 if which == "query" else 1),
    }
    out = build(ours, X, kernel_init=uniform, **functions)[1](params, X)
    each = np.broadcast_to(
        np.arange(T)[:, None] + np.arange(N)[:, None, None] >= np.arange(T), (B, N, T, T)
    )
    scaled = lambda q, k, v, mask=None, **of_flax: quadratic(
        q * (2 * (1 + np.arange(N)))[:, None], k, v, mask
    )
    close(out, build(flaxes, X, kernel_init=uniform, attention_fn=scaled)[1](params, X, mask=each))


def test_linen_modules_with_what_learns_can_be_hashed_saved_and_stacked():
    module = LINEN[0](num_heads=N, **LEARNT)
    assert hash(module) == hash(LINEN[0](num_heads=N, **LEARNT)) and module == LINEN[0](
        num_heads=N, **LEARNT
    )
    params = module.init(jax.random.key(0), X)
    loaded = serialization.from_bytes(
        jax.tree.map(jnp.zeros_like, params), serialization.to_bytes(params)
    )
    same(loaded, params)

    attention = functools.partial(LINEN[0], **LEARNT)
    model = linen_model(attention)
    variables = model.init(
        {"params": jax.random.key(0), "dropout": jax.random.key(1)}, X, SELF_MASK
    )
    assert variables["params"]["attention"]["sinks"].shape == (2, N)

    def loss(variables):
        return (
            model.apply(variables, X, SELF_MASK, rngs={"dropout": jax.random.key(3)})[0] ** 2
        ).sum()

    gradient = jax.jit(jax.grad(loss))(variables)["params"]["attention"]
    assert all(
        np.abs(x).reshape(2, -1).max(1).min() > 0 for x in jax.tree.leaves(gradient["score_params"])
    )


def test_nnx_modules_with_what_learns_can_be_split_trained_and_stacked():
    attention = functools.partial(NNX[0], **LEARNT, mask_fn=SAME_DOCUMENT)
    model = nnx_model(attention)
    assert model.attention.sinks.shape == (2, N)
    gradient = flax_nnx.jit(
        flax_nnx.grad(lambda model: (nnx_forward(model, X, SELF_MASK) ** 2).sum())
    )(model)
    slopes = gradient["attention"]["score_fn"]["params"][0]
    assert np.abs(slopes[...]).max(1).min() > 0

    module = attention(N, F, decode=False, rngs=flax_nnx.Rngs(0))
    graph, params, rest = flax_nnx.split(module, flax_nnx.Param, ...)
    assert {"score_fn", "qk_transform", "sinks"} <= set(params) and set(rest) == {"mask_fn"}
    before, again = module(X), flax_nnx.merge(graph, params, rest, copy=True)
    flax_nnx.update(module, jax.tree.map(lambda x: x + 1, params))
    assert np.abs(np.asarray(before) - module(X)).max() > 1e-3
    close(again(X), before)


def test_rows_that_see_nothing_are_zero():
    for ours, flaxes in FAMILIES.values():
        params, _ = build(ours, X, Y)
        params["out"]["bias"] = np.arange(F, dtype=np.float32)
        mask = MASK & (np.arange(T) != 2)[:, None]
        out, mean = (
            np.asarray(build(cls, X, Y)[1](params, X, Y, mask=mask)) for cls in (ours, flaxes)
        )
        same(out[:, 2], np.broadcast_to(params["out"]["bias"], (B, F)))
        close(np.delete(out, 2, 1), np.delete(mean, 2, 1))
        assert np.abs(out[:, 2] - mean[:, 2]).max() > 1e-3


def test_sow_weights_is_refused_with_its_size():
    for ours, _ in FAMILIES.values():
        params, run = build(ours, X, Y)
        with pytest.raises(
            NotImplementedError,
            match=r"sow_weights=True .* \(2, 4, 7, 9\) or 0\.0 MiB .* Use Flax's own",
        ):
            run(params, X, Y, sow_weights=True)


@family
def test_no_array_of_length_squared(ours, flaxes):
    del flaxes
    length = 1024
    x = jax.ShapeDtypeStruct((1, length, F), jnp.float32)
    of = dict(dropout_rate=0.1, deterministic=False)

    params, run = build(ours, X, **of, is_causal=True, local_window_size=(700, 0), num_kv_heads=2)
    gradient = jax.grad(lambda params, x: run(params, x).sum())

    def second_largest_dim(f, *inputs):
        shapes = re.findall(r"\w+\[([\d,]+)\]", jax.jit(f).lower(*inputs).compile().as_text())
        return max(sorted(map(int, shape.split(",")))[-2] for shape in shapes if "," in shape)

    assert second_largest_dim(gradient, params, x) < length
    assert second_largest_dim(lambda x: x[0] @ x[0].T, x) == length  # the measure measures


# ---- wrong values


ALIBI = scores.alibi([1.0] * 4)
WRONG = [  # what the core refuses is quoted no further than the argument: test_errors has the rest
    ({"num_heads": 0}, ValueError, "num_heads=0 must be at least 1"),
    ({"num_heads": 2.0}, TypeError, "num_heads=2.0 must be an int"),
    (
        {"num_kv_heads": 3},
        ValueError,
        "num_heads=4 is not a multiple of num_kv_heads=3: use one of 1, 2, 4",
    ),
    ({"num_kv_heads": 0}, ValueError, "num_kv_heads=0 must be at least 1"),
    ({"num_kv_heads": "2"}, TypeError, "num_kv_heads='2' must be an int"),
    ({"qkv_features": 10}, ValueError, "qkv_features=10 does not divide into num_heads=4 heads"),
    ({"qkv_features": True}, TypeError, "qkv_features=True must be an int"),
    ({"is_causal": 1}, TypeError, "is_causal must be"),
    ({"local_window_size": (-1, 0)}, ValueError, "local_window_size=(-1, 0)"),
    ({"local_window_size": (1, 2, 3)}, ValueError, "local_window_size=(1, 2, 3)"),
    ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap=0"),
    ({"logits_soft_cap": "30"}, TypeError, "logits_soft_cap"),
    (
        {"logits_soft_cap": jnp.ones(())},
        TypeError,
        "logits_soft_cap must be a number in a module, got an array",
    ),
    ({"dropout_rate": 1.0}, ValueError, "dropout_rate=1"),
    (
        {"attention_fn": None},
        TypeError,
        "attention_fn=None must be a function like memeff.nn.attention_fn",
    ),
    (
        {"attention_fn": flax_nnx.dot_product_attention, "local_window_size": 3},
        ValueError,
        "attention_fn=dot_product_attention does not take local_window_size, which is needed here",
    ),
    (
        {"score_fn": 3},
        TypeError,
        "score_fn must be a function (score, batch, head, q_pos, k_pos, params), got int",
    ),
    (
        {"score_fn": lambda score: score},
        TypeError,
        "score_fn must be hashable and take (score, batch,",
    ),
    (
        {"mask_fn": scores.alibi([1.0])},
        TypeError,
        "mask_fn must be hashable and take (batch, head,",
    ),
    (
        {"mask_fn": lambda *at: at[3]},
        TypeError,
        "mask_fn is called with scalars, for one pair, and must return one bool",
    ),
    (
        {"qk_transform": lambda x, position: x},
        TypeError,
        "qk_transform must be hashable and take (x, position, which,",
    ),
    (
        {"score_fn": ALIBI, "score_init": lambda key: ALIBI},
        ValueError,
        "score_init and score_fn were both given: pass score_init, which learns, or score_fn",
    ),
    (
        {"score_init": ALIBI},
        TypeError,
        "score_init must be a function of a key that returns a memeff.Score, got Score: write lambda key: ...",
    ),
    (
        {"score_init": lambda key: jnp.ones(4)},
        TypeError,
        "score_init must be a function of a key that returns a memeff.Score; it returned",
    ),
    (
        {"qk_transform_init": lambda key: transforms.rotary()},
        TypeError,
        "qk_transform_init must return a memeff.Transform whose arrays are floats, to learn; got none",
    ),
    (
        {"score_init": lambda key: scores.t5(jnp.ones((4, 4), int))},
        TypeError,
        "score_init must return a memeff.Score whose arrays are floats, to learn; got int32[4, 4]",
    ),
    (
        {"sinks_init": True},
        TypeError,
        "sinks_init must be an initializer (key, shape, dtype), such as",
    ),
    (
        {"attention_fn": flax_nnx.dot_product_attention, "sinks_init": jax.nn.initializers.zeros},
        ValueError,
        "attention_fn=dot_product_attention does not take sinks, which is needed here",
    ),
]


@family
def test_wrong_constructor_values(ours, flaxes):
    del flaxes
    rest = {} if ours is LINEN[0] else {"in_features": F, "rngs": flax_nnx.Rngs(0)}
    for wrong, error, message in WRONG:
        with pytest.raises(error, match=re.escape(message)):
            ours(**({"num_heads": 4} | rest | wrong))


def test_wrong_linen_calls():
    layer = LINEN[0](num_heads=4)
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="inputs_v came without inputs_k"):
        layer.init(key, X, None, Y)
    with pytest.raises(ValueError, match="inputs_kv came with inputs_k or inputs_v"):
        layer.init(key, X, Y, inputs_kv=Y)
    with pytest.raises(
        ValueError, match=r"qkv_features=6 \(the inputs' features\) does not divide"
    ):
        layer.init(key, X[..., :6])
    with pytest.raises(ValueError, match="does not take mask"):  # Flax would drop it without a word
        LINEN[0](num_heads=4, attention_fn=lambda query, key, value: query).init(key, X, mask=MASK)
    same(layer.init_with_output(key, X, inputs_kv=Y), layer.init_with_output(key, X, Y))


def test_bind_names_what_it_passes():
    seen = {}
    options.bind(
        lambda **keywords: seen.update(keywords),
        {"mask": 1, "bias": None, "is_causal": False},
        {"dtype": None},
    )()
    assert seen == {"mask": 1, "dtype": None}
    assert options.bind(quadratic, {"mask": None}, {}) is quadratic


# ---- gradients and transformations

DROPPING = {
    "dropout_rate": 0.2,
    "deterministic": False,
    "broadcast_dropout": False,
    "kernel_init": uniform,
}


class LinenBlock(flax_linen.Module):
    attention: Callable[..., Any] = LINEN[1]

    @flax_linen.compact
    def __call__(self, x, mask):
        attention = flax_linen.remat(self.attention)(num_heads=N, **DROPPING, name="attention")
        return x + attention(x, mask=mask), None


def linen_model(attention):
    """Two blocks under nn.scan, the attention of each under nn.remat."""
    split = {
        "variable_axes": {"params": 0},
        "split_rngs": {"params": True, "dropout": True},
        "in_axes": flax_linen.broadcast,
    }
    return flax_linen.scan(LinenBlock, **split, length=2)(attention)


class NnxBlock(flax_nnx.Module):
    def __init__(self, attention, rngs):
        self.attention = attention(N, F, **DROPPING, decode=False, rngs=rngs)

    def __call__(self, x, mask):
        return x + flax_nnx.remat(lambda attention, x: attention(x, mask=mask))(self.attention, x)


def nnx_model(attention):
    """Two blocks stacked, for `nnx_forward`."""
    return flax_nnx.vmap(lambda rngs: NnxBlock(attention, rngs))(flax_nnx.Rngs(0).split(2))


def nnx_forward(model, x, mask):
    return flax_nnx.scan(
        lambda x, block: block(x, mask), in_axes=(flax_nnx.Carry, 0), out_axes=flax_nnx.Carry
    )(x, model)


# row 3 sees nothing: 0 from memeff, the mean of values from Flax
BLIND = SELF_MASK & (np.arange(T) != 3)[:, None]


def equations(f, *inputs):
    """What JAX traced, without the addresses of functions."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*inputs)))


def test_linen_gradients_are_flaxes_under_scan_and_remat():
    model = linen_model(LINEN[1])
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = model.init(keys, X, SELF_MASK)

    def loss(model, variables):
        return (
            model.apply(variables, X, SELF_MASK, rngs={"dropout": jax.random.key(3)})[0] ** 2
        ).sum()

    step = jax.jit(jax.value_and_grad(loss, argnums=1), static_argnums=0)
    expected = step(model, variables)
    close(step(linen_model(LINEN[0]), variables), expected, 1e-5)
    with nn.switch_linen() as switched:
        traced = equations(functools.partial(loss, model), variables)
    assert traced == equations(functools.partial(loss, linen_model(LINEN[0])), variables)
    assert set(switched) == {"attention"}


def test_nnx_gradients_are_flaxes_under_scan_and_remat():
    def loss(model, x):
        return (nnx_forward(model, x, SELF_MASK) ** 2).sum()

    def step(model):
        value, gradient = flax_nnx.jit(flax_nnx.value_and_grad(loss))(model, X)
        return value, flax_nnx.to_pure_dict(gradient)

    expected = step(nnx_model(NNX[1]))
    close(step(nnx_model(NNX[0])), expected, 1e-5)

    def switched_model():
        model = nnx_model(NNX[1])
        assert nn.switch_nnx(model) == ["attention"]
        return model

    model = switched_model()
    assert model.attention.attention_fn is nn.attention_fn
    assert equations(lambda x: loss(nnx_model(NNX[0]), x), X) == equations(
        lambda x: loss(switched_model(), x), X
    )
    graph, state = flax_nnx.split(model)
    assert flax_nnx.merge(graph, state).attention.attention_fn is nn.attention_fn
    assert nn.switch_nnx(model) == []  # once more changes nothing and is no error


# ---- switches


def test_a_jitted_function_follows_the_linen_switch():
    model = LINEN[1](num_heads=N)
    variables = model.init(jax.random.key(0), X)
    jitted = jax.jit(lambda mask: model.apply(variables, X, mask=mask))
    run = lambda mask: np.asarray(jitted(mask))
    before = run(BLIND)
    assert np.abs(before[:, 3]).max() > 1e-3
    for times in range(2):  # `run` is traced again inside, once
        with nn.switch_linen() as switched:
            inside = run(BLIND)
        assert len(switched) == (times == 0)
        assert np.abs(inside[:, 3]).max() == 0  # memeff's answer for a row that sees nothing
        close(np.delete(inside, 3, 1), np.delete(before, 3, 1))
        same(run(BLIND), before)


def test_an_attention_fn_chosen_on_purpose_is_kept():
    model = LINEN[1](num_heads=N, attention_fn=quadratic)
    variables = model.init(jax.random.key(0), X)
    with (
        nn.switch_linen() as switched,
        pytest.warns(UserWarning, match="keeps its own attention_fn"),
    ):
        jax.eval_shape(model.apply, variables, X)
    assert switched == []
    with nn.switch_linen() as switched:  # memeff's own and Flax's other modules: no warning
        ours = LINEN[0](num_heads=N, attention_fn=functools.partial(nn.attention_fn, chunk_size=2))
        jax.eval_shape(ours.apply, variables, X)
        jax.eval_shape(flax_linen.Dense(3).init, jax.random.key(0), X)
    assert switched == []

    first, second = (
        NNX[1](N, F, decode=False, attention_fn=fn, rngs=flax_nnx.Rngs(0))
        for fn in (quadratic, NNX_DEFAULT)
    )
    with pytest.warns(UserWarning, match="'0' keeps its own attention_fn"):
        assert nn.switch_nnx(flax_nnx.List([first, second])) == ["1"]
    assert first.attention_fn is quadratic and second.attention_fn is nn.attention_fn
    with (
        pytest.warns(UserWarning),
        pytest.raises(ValueError, match="none without an attention_fn of its own"),
    ):
        nn.switch_nnx(first)


NNX_DEFAULT = flax_nnx.dot_product_attention


def test_nothing_to_switch_is_an_error():
    with pytest.raises(
        ValueError, match=r"no nnx.MultiHeadAttention to switch \(none at all\): .* switch_jax_nn"
    ):
        nn.switch_nnx(flax_nnx.Linear(2, 3, rngs=flax_nnx.Rngs(0)))
    with pytest.raises(
        TypeError, match="must be an nnx.Module, got MultiHeadDotProductAttention: use switch_linen"
    ):
        nn.switch_nnx(LINEN[1](num_heads=N))  # pyright: ignore[reportArgumentType]


class WritesAttentionOut(flax_linen.Module):
    @flax_linen.compact
    def __call__(self, x):
        q, k, v = (flax_linen.Dense(F)(x) for _ in range(3))
        return jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v


class IgnoresItsAttentionFn(LINEN[1]):
    def __call__(self, x):
        return x


NONE_SWITCHED = r"switch_linen: no module was switched, because "


def trace(module, x=X):
    jax.eval_shape(lambda: module.init(jax.random.key(0), x))


@pytest.fixture
def nothing_switched_before(monkeypatch):
    monkeypatch.setattr(switch, "_switched_before", threading.Event())


@pytest.mark.usefixtures("nothing_switched_before")
def test_no_linen_module_switched_warns_or_raises():
    other = r"the model calls no linen\.MultiHeadDotProductAttention .* attention_fn \(it calls {}\)\. If it writes"
    for module, reason in (
        (WritesAttentionOut(), other.format("WritesAttentionOut")),
        (IgnoresItsAttentionFn(num_heads=N), other.format("IgnoresItsAttentionFn")),
        (None, r"no module of Linen was called inside\. For NNX use switch_nnx"),
    ):
        with (
            pytest.warns(UserWarning, match=NONE_SWITCHED + reason) as record,
            nn.switch_linen() as switched,
        ):
            module and trace(module)
        assert switched == [] and len(record) == 1 and record[0].filename == __file__
        with pytest.raises(ValueError, match=NONE_SWITCHED + reason), nn.switch_linen(strict=True):
            module and trace(module)
    keeps = LINEN[1](num_heads=N, attention_fn=quadratic)  # one warning says it already
    with pytest.warns(UserWarning, match="keeps its own attention_fn") as record, nn.switch_linen():
        trace(keeps)
    assert len(record) == 1
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="keeps its own attention_fn"):
        with nn.switch_linen(strict=True):
            trace(keeps)


@pytest.mark.usefixtures("nothing_switched_before")
def test_where_linen_computes_with_memeff_nothing_is_told():
    for strict in (False, True):
        with nn.switch_linen(strict=strict) as switched, nn.switch_linen(strict=strict) as inner:
            trace(LINEN[1](num_heads=N))
        assert switched + inner == ["(root)"]
        with nn.switch_linen(strict=strict) as switched:
            trace(LINEN[0](num_heads=N))
        assert switched == []
        with pytest.raises(ZeroDivisionError), nn.switch_linen(strict=strict):
            1 / 0  # noqa: B018


@pytest.mark.usefixtures("nothing_switched_before")
def test_linen_modules_from_jits_cache_are_not_taken_for_none():
    model = LINEN[1](num_heads=N)
    jitted = jax.jit(lambda: model.init_with_output(jax.random.key(0), X)[0])
    for times in range(3):
        with nn.switch_linen(strict=True) as switched:
            jitted()
        assert len(switched) == (times == 0)
    with pytest.warns(UserWarning, match="compiled in an earlier switch compute with memeff"):
        with nn.switch_linen(strict=True):  # nobody can know
            trace(WritesAttentionOut())


# ---- the package


def test_memeff_needs_no_flax_and_memeff_nn_says_so():
    code = """
import sys, memeff
assert not any(name.split(".")[0] == "flax" for name in sys.modules)
sys.modules["flax"] = None  # as if it were not installed
try:
    import memeff.nn
except ModuleNotFoundError as e:
    assert "pip install 'memeff[flax]'" in str(e), e
else:
    raise AssertionError("memeff.nn came without flax")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
