"""`memeff.nn.attention_fn` takes every keyword, mask and dtype that Flax's modules pass."""

import ast
import functools
import inspect
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import raising
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from flax_cases import (
    LINEN,
    MASK,
    NNX,
    QKV,
    X,
    Y,
    assert_close,
    assert_equal,
    build,
    family,
    nnx_layer,
    quadratic,
)
from small_calls import Wrapped

import memeff
from memeff import nn
from memeff.arguments import AttentionOptions
from memeff.nn import options


def linen_keywords():
    """Return the names of the keywords that Linen's attention passes, from its source."""
    source = textwrap.dedent(inspect.getsource(LINEN[1].__call__))
    names = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        makes_dict = isinstance(node.func, ast.Name) and node.func.id == "dict"
        if makes_dict or "attention_fn" in ast.unparse(node.func):
            names.update(keyword.arg for keyword in node.keywords)
    return names


def test_every_keyword_that_flax_passes_is_ours():
    names = inspect.signature(nn.attention_fn).parameters
    passed = linen_keywords()
    assert {"mask", "dropout_rng", "deterministic", "module", "force_fp32_for_softmax"} <= passed
    # Linen silently drops a keyword that the signature does not name
    assert passed - {None} <= set(names)

    recorded = {}

    def record(query, key, value, **keywords):
        recorded.update(keywords)
        return query

    nnx_layer(NNX[1], attention_fn=record)(X)
    known = {*names, *AttentionOptions.__annotations__}
    assert {"mask", "dropout_rng", "deterministic", "module", "is_causal"} <= set(recorded) <= known


def with_mask(mask):
    """Call attention_fn with a mask."""
    return nn.attention_fn(*QKV, mask=mask)


def with_mask_inside_jit(mask):
    """Call attention_fn inside jit, with a mask that is a constant there."""
    return jax.jit(functools.partial(nn.attention_fn, mask=mask))(*QKV)


def test_masks_of_attention_fn_are_flaxes():
    """Nonzero means may attend, in any dtype.

    A mask that looks additive is refused where its values are known.
    """
    plain = with_mask(MASK)
    for mask in (MASK.astype(np.float32), MASK.astype(np.int32) * 7, MASK.astype(np.float16) * 3):
        assert_close(with_mask(mask), plain)
        assert_close(jax.jit(nn.attention_fn)(*QKV, mask=mask), plain)
    expected = flax_linen.dot_product_attention(*QKV, mask=MASK)
    assert_close(with_mask(MASK.astype(np.float32)), expected)
    additive = np.where(MASK, 0, -1e9).astype(np.float32)
    refused = (
        additive,
        jnp.asarray(additive),
        additive.astype(np.int32),
        0.5 * MASK,
        np.where(MASK, 1.0, np.nan),
    )
    message = r"mask is \w+ with values that are negative .* Pass .* as bias="
    for mask in refused:
        for call in (with_mask, with_mask_inside_jit):
            with pytest.raises(TypeError, match=message):
                call(mask)
    assert_close(nn.attention_fn(*QKV, additive), plain)  # as a bias
    assert_close(with_mask(MASK.astype(int).tolist()), plain)
    assert_close(with_mask(Wrapped(jnp.asarray(MASK, int))), plain)
    with pytest.raises(TypeError, match="mask must be boolean .* got complex64"):
        with_mask(MASK.astype(np.complex64))


def test_no_hook_of_attention_fn_changes_what_mask_means():
    for deterministic in (True, False):
        with pytest.raises(TypeError, match="looks additive"):
            nn.attention_fn(*QKV, mask=np.where(MASK, 0, -1e9), deterministic=deterministic)


def test_dtypes_of_attention_fn_are_flaxes():
    """Dtypes are promoted as Flax promotes them: a float32 decode cache meets bfloat16 queries.

    jax.nn refuses such a call, as does memeff outside Flax.
    """
    query, key, value = QKV
    half = [x.astype(jnp.bfloat16) for x in QKV]
    rounded_query = half[0].astype(np.float32)
    assert_close(nn.attention_fn(half[0], key, value), nn.attention_fn(rounded_query, key, value))
    assert_equal(nn.attention_fn(*QKV, dtype=jnp.bfloat16), nn.attention_fn(*half))

    def total(query):
        out = nn.attention_fn(query, key, value, dtype=jnp.bfloat16)
        return out.astype(np.float32).sum()

    assert jax.grad(total)(query).dtype == np.float32
    small = key.astype(jnp.float8_e5m2)
    actual = nn.attention_fn(query, small, value, dtype=np.float32)
    assert_equal(actual, nn.attention_fn(query, small.astype(np.float32), value))
    with pytest.raises(TypeError, match="key is float32 and query is bfloat16"):
        memeff.dot_product_attention(half[0], key, value)


WRONG_HOOKS = raising(
    ValueError,
    ({"deterministic": True, "dropout_rate": 1.0}, "dropout_rate=1: it must lie in"),
    ({"dropout_rate": 0.5}, "dropout_rate=0.5 came without dropout_rng"),
)
WRONG_HOOKS += raising(
    TypeError,
    ({"dtype": 3}, "dtype must be a dtype such as jnp.float32, got int 3"),
    (
        {"query": jax.random.split(jax.random.key(0), 8).reshape(1, 2, 2, 2)},
        "query must be a floating-point array, got key<fry>",
    ),
    ({"key": 1j * QKV[1]}, "key must be a floating-point array, got complex64"),
    (
        {"key": 1j * QKV[1], "dtype": np.float32},
        "key must be a floating-point array, got complex64",
    ),
    (
        {"value": QKV[2].astype(jnp.float8_e5m2)},
        "value is float8_e5m2: supported are bfloat16, .*Cast it",
    ),
    ({"key": QKV[1].astype(jnp.int4)}, "key must be a floating-point array, got int4"),
    ({"dtype": jnp.float32(1)}, r"dtype must be a dtype .*, got Array\(1"),
    ({"dtype": "int32"}, "dtype must be a floating-point dtype, got int32"),
    ({"mask": "causal"}, "mask must be an array, got str 'causal'"),
    ({"deterministic": 1}, "deterministic must be True or False .*, got int 1"),
    ({"chunk_sise": 2}, "unexpected keyword argument 'chunk_sise'"),
)
WRONG_HOOKS += raising(
    NotImplementedError,
    ({"module": object()}, r"sow_weights=True asks for .*, \(2, 4, 7, 9\) or 0\.0 MiB"),
    ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum is not supported"),
    ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum is not supported"),
)


def test_hooks_of_attention_fn():
    key = jax.random.key(0)
    plain = memeff.dot_product_attention(*QKV)
    dropout = {"dropout_rng": key, "dropout_rate": 0.5}
    assert_equal(nn.attention_fn(*QKV, **dropout, deterministic=True), plain)
    assert_equal(nn.attention_fn(*QKV, dropout_rate=0.5, deterministic=True), plain)
    dropped = nn.attention_fn(*QKV, **dropout)
    assert_equal(dropped, memeff.dot_product_attention(*QKV, **dropout))
    assert_close(dropped, flax_linen.dot_product_attention(*QKV, **dropout), 4e-6)
    half = [x.astype(jnp.bfloat16) for x in QKV]
    plain_half = memeff.dot_product_attention(*half)
    for force in (True, False):  # no softmax here is less precise than Flax's with True
        assert_equal(nn.attention_fn(*half, force_fp32_for_softmax=force), plain_half)
    window = memeff.dot_product_attention(*QKV, local_window_size=1)
    assert_equal(nn.attention_fn(*QKV, local_window_size=1), window)
    for kwargs, kind, message in WRONG_HOOKS:
        with pytest.raises(kind, match=message):
            nn.attention_fn(**dict(zip(("query", "key", "value"), QKV, strict=True)) | kwargs)


CURE = (
    r"deterministic= is a hook of Flax's modules"
    r".*give the modules attention_fn=memeff\.nn\.attention_fn"
)


@family
def test_without_its_hooks_the_cure_is_named(ours, flaxes):
    """Flax's modules refuse `memeff.dot_product_attention` itself, and the error names the cure.

    Linen passes only what a signature names; NNX passes everything.
    """
    without_hooks = (
        memeff.dot_product_attention,
        functools.partial(memeff.dot_product_attention, chunk_size=2),
    )
    for fn in without_hooks:
        for cls in (ours, flaxes):
            params, run = build(cls, X)
            _, cured = build(cls, X, attention_fn=nn.attention_fn)
            assert_close(cured(params, X), run(params, X))
            for deterministic in (True, False):
                call = {"deterministic": deterministic}
                with pytest.raises(TypeError, match=CURE):
                    _, wrong = build(cls, X, attention_fn=fn, dropout_rate=0.5, call=call)
                    wrong(params, X, **call)


@family
def test_an_attention_fn_of_the_user_is_used(ours, flaxes):
    calls = []

    def users_attention(query, key, value, mask=None, **keywords):
        calls.append(keywords)
        return quadratic(query, key, value, mask)

    params, run = build(flaxes, X, Y)
    _, users_run = build(ours, X, Y, attention_fn=users_attention)
    calls.clear()
    assert_close(users_run(params, X, Y, mask=MASK), run(params, X, Y, mask=MASK))
    assert len(calls) == 1
    assert calls[0]["deterministic"] is True


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_weights_that_an_attention_fn_of_the_user_sows_stay_in_the_module():
    """Also where memeff's module binds keywords to it, or appends to the cache itself."""

    def users_attention(query, key, value, *, logits_soft_cap=None, q_offset=None, **keywords):
        del logits_soft_cap, q_offset
        return flax_nnx.dot_product_attention(query, key, value, **keywords)

    def weights_in(module):
        sown = flax_nnx.to_pure_dict(flax_nnx.state(module, flax_nnx.Intermediate))
        return sown["attention_weights"]

    def sown(cls, **constructor):
        module = nnx_layer(cls, attention_fn=users_attention, **constructor)
        module.init_cache(X.shape)
        for _ in range(2):
            module(X[:, :1], sow_weights=True, decode=True)
        module(X, sow_weights=True)
        return weights_in(module)

    ours, flaxes = NNX
    expected = sown(flaxes)
    assert len(expected) == 3
    for constructor in ({}, {"logits_soft_cap": 1.0}):
        assert_close(sown(ours, **constructor), expected)
    module = nnx_layer(ours, attention_fn=users_attention)
    module.init_cache(X.shape)
    module(X[:, :2], sow_weights=True, decode=True)
    (weights,) = weights_in(module)
    assert weights.shape[-2:] == (2, X.shape[1])


def test_bind_names_what_it_passes():
    seen = {}

    def record(**keywords):
        seen.update(keywords)

    required = {"mask": 1, "bias": None, "is_causal": False}
    options.bind(record, required, {"dtype": None})()
    assert seen == {"mask": 1, "dtype": None}
    assert options.bind(quadratic, {"mask": None}, {}) is quadratic
