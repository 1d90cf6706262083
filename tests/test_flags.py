"""Check attention under JAX's flags: strict promotion, debug_nans, leak checks, x64; and integers.

FLAGGED names small calls of most arguments. `_flagged` runs one of them and its gradient.
"""

import functools
import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from flax import nnx
from small_calls import assert_same, f32, inputs

import memeff
import memeff.nn
from memeff import dot_product_attention

slow = pytest.mark.slow


def _int32(numbers):
    return np.array(numbers, np.int32)


def _segments(dtype):
    query_ids = np.repeat([[0, 1]], 13, 0).T
    return dict(
        query_segment_ids=query_ids.astype(dtype), key_value_segment_ids=np.ones((2, 17), dtype)
    )


_dropout = dict(dropout_rng=np.array([0, 1], np.uint32), dropout_rate=0.5)
FLAGGED = {
    "full": {},
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(3, 2)),
    "lengths": dict(key_value_seq_lengths=_int32([0, 9]), query_seq_lengths=_int32([5, 13])),
    "offset": dict(q_offset=_int32([0, -4]), is_causal=True),
    "bias": dict(bias=np.zeros((4, 13, 17), f32)),
    "mask": dict(mask=np.tri(13, 17, -1, dtype=bool)),
    "segments": _segments(np.int32),
    "small segments": _segments(np.int8),
    "soft cap": dict(logits_soft_cap=3.0),
    "scalars": dict(logits_soft_cap=np.float32(3), scale=np.float32(0.3)),
    "arrays": dict(logits_soft_cap=np.array(3, f32), scale=np.array(0.3, f32)),
    "shared dropout": _dropout,
    "dropout": dict(_dropout, broadcast_dropout=False),
    "shared mix32 dropout": dict(_dropout, dropout_bits="mix32"),
    "mix32 dropout": dict(_dropout, dropout_bits="mix32", broadcast_dropout=False),
    "functions": dict(
        q_offset=_int32([2, 3]),
        score_fn=lambda score, *_: 2 * score,
        mask_fn=lambda batch, head, q_pos, k_pos, params: q_pos != k_pos,
    ),
}
# in these calls some row sees no key
SEES_NOTHING = ("lengths", "offset", "mask", "segments", "small segments")


def _as_jax(x):
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _flagged(kwargs, dtype=f32, residual=True, **extra):
    """Return the results of a call, (out, lse) or out alone, and the gradients of their sum."""
    arrays = {name: _as_jax(x) for name, x in kwargs.items()}

    def call(*args):
        return dot_product_attention(
            *args, **arrays, **extra, chunk_size=(4, 6), return_residual=residual
        )

    result, pull = jax.vjp(call, *inputs(dtype=dtype))
    return result, pull(jax.tree.map(jnp.ones_like, result))


# ---- promotion


# bfloat16 differs from the float32 of sums and lse, so it meets every promotion that there is
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", few(["float32", "bfloat16", "float16"], ["bfloat16"]))
@pytest.mark.parametrize("name", FLAGGED)
def test_strict_promotion(name, dtype, implementation):
    """Forward and gradient promote neither dtypes nor ranks without saying so."""
    run = functools.partial(_flagged, FLAGGED[name], dtype, implementation=implementation)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        (out, lse), grads = jax.eval_shape(run)
    assert out.dtype == dtype
    assert lse.dtype == f32
    assert [g.dtype for g in grads] == [dtype] * 3


def _bf16(x):
    return jnp.asarray(x, jnp.bfloat16)


def test_strict_promotion_of_the_two_bfloat16_terms():
    """Bias, scale and cap may have the dtype of the model."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        terms = dict(bias=_bf16(np.zeros((4, 1, 17))), scale=_bf16(0.3), logits_soft_cap=_bf16(3.0))
        run = functools.partial(_flagged, terms, jnp.bfloat16)
        (out, _), _ = jax.eval_shape(run)
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=slow)])
def test_strict_promotion_of_second_derivatives(dtype):
    x = tuple(jnp.asarray(part) for part in inputs(dtype=dtype))
    gradient = jax.grad(lambda *x: dot_product_attention(*x, is_causal=True).sum(), (0, 1, 2))
    with jax.numpy_dtype_promotion("strict"):
        _, tangents = jax.jit(lambda *x: jax.jvp(gradient, x, x)).lower(*x).out_info
    assert [x.dtype for x in tangents] == [dtype] * 3


def _tangents_with_sinks(x):
    sinks = jnp.ones(2)
    gradient = jax.grad(lambda sinks: dot_product_attention(x, x, x, sinks=sinks).sum())
    return jax.jvp(gradient, (sinks,), (sinks,))


def _statistics_and_tangents(x):
    def call(x, sinks):
        out, _ = dot_product_attention(x, x, x, sinks=sinks, return_residual=True)
        return out, memeff.attention_statistics(x, x, x), memeff.key_mass(x, x)

    primals = x, jnp.ones(2)
    return jax.jvp(call, primals, primals)


def _merged(x):
    def call(x):
        part = dot_product_attention(x, x, x, return_residual=True)
        return memeff.merge(part, part)

    return jax.jvp(call, (x,), (x,))


def _ring(x):
    cache = memeff.KVCache.zeros(2, 9, 2, 4, x.dtype, window=3).append(x, x, [5, 4])
    return cache.truncate([3, 4]).attend(x[:, :1])


def _pages(x):
    cache = memeff.PagedKVCache.zeros(6, 2, 2, 4, jnp.int8, batch=2, pages_per_sequence=3)
    cache = cache.with_sequences([[0, 1, 4], [2, 3, 5]], [0, 0]).append(x, x)
    return cache.keep_drafts(3, [[0, 2], [1, 2]], [1, 2]).attend(x[:, :1])


def _flax_cache(x):
    layer = memeff.nn.nnx.MultiHeadAttention(2, 4, decode=True, dtype=x.dtype, rngs=nnx.Rngs(0))
    layer.init_cache((2, 9, 4))
    layer.cache_index = nnx.Cache(jnp.array([5, 3], jnp.int32))
    return layer(x[:, :, 0])


def _gradient_of_pages(x):
    table = jnp.array([[0], [1]], jnp.int32)
    lengths = jnp.array([5, 3], jnp.int32)

    def loss(x):
        return memeff.paged_attention(x, x, x, table, lengths).sum()

    return jax.grad(loss)(x)


def _loss(x):
    loss = functools.partial(memeff.linear_cross_entropy, bias=jnp.ones(8), reduction="mean")
    return jax.grad(loss)(x, jnp.ones((4, 8), x.dtype), jnp.zeros((2, 5, 2), jnp.int32))


FUNCTIONS = [
    _tangents_with_sinks,
    _statistics_and_tangents,
    _merged,
    _ring,
    _pages,
    _gradient_of_pages,
    _flax_cache,
    _loss,
    lambda x: memeff.attention_statistics(x, x, x, q_offset=jnp.array([1, 2])),
    lambda x: memeff.key_mass(x, x, mask_fn=memeff.masks.causal()),
    lambda x: memeff.block_mask(memeff.masks.causal(), 5, block_size=2) and x,
]


@pytest.mark.parametrize(
    "dtype, x64",
    few(
        itertools.product(["float32", "bfloat16"], [False, True]),
        [("float32", False), ("bfloat16", True)],
    ),
)
@pytest.mark.parametrize("i", range(len(FUNCTIONS)))
def test_no_function_promotes(i, dtype, x64):
    """With x64 neither: then jnp.arange has 64 bits, and lengths and positions have 32."""
    strict = jax.numpy_dtype_promotion("strict")
    with strict, jax.numpy_rank_promotion("raise"), jax.enable_x64(x64):
        jax.eval_shape(FUNCTIONS[i], jnp.ones((2, 5, 2, 4), dtype))


def test_strict_promotion_keeps_refusing_what_the_user_mixes():
    q, k, v = inputs()
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(TypeError, match="key is bfloat16 and query is float32"),
    ):
        dot_product_attention(q, _bf16(k), v)


# ---- debug flags and leaks


DEBUG_FLAGS = itertools.product(
    ["causal", "lengths", "mask", "full", "offset"],
    ["jax_debug_nans", "jax_debug_infs"],
    [False, True],
)
FAST_DEBUG_FLAGS = [  # each flag with and without jit, where rows see nothing
    ("causal", "jax_debug_nans", False),
    ("lengths", "jax_debug_nans", True),
    ("lengths", "jax_debug_infs", False),
    ("mask", "jax_debug_nans", False),
    ("mask", "jax_debug_infs", True),
]


@pytest.mark.parametrize("name, flag, jit", few(DEBUG_FLAGS, FAST_DEBUG_FLAGS))
def test_debug_flags(name, flag, jit):
    """The output and its gradients raise no alarm, even where rows see nothing.

    The lse of such a row is -inf: the only exception.
    """
    residual = flag == "jax_debug_nans" or name not in SEES_NOTHING
    run = functools.partial(_flagged, FLAGGED[name], residual=residual)
    with jax.debug_nans(flag == "jax_debug_nans"), jax.debug_infs(flag == "jax_debug_infs"):
        _, grads = jax.jit(run)() if jit else run()
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize(
    "name", few(["lengths", "functions", "causal", "bias", "dropout"], ["lengths", "functions"])
)
def test_no_tracer_leaks(name):
    run = functools.partial(_flagged, FLAGGED[name])
    gc.freeze()  # each of JAX's searches would visit all that other tests left
    try:
        with jax.checking_leaks():
            _, grads = jax.jit(run)()
    finally:
        gc.unfreeze()
    assert all(np.isfinite(g).all() for g in grads)


# ---- 64 bits


WITHOUT_DROPOUT = [name for name in FLAGGED if "dropout" not in name]


DTYPES = ["float64", "float32", "bfloat16"]
FAST_X64 = [("bias", "float64"), ("lengths", "float32"), ("arrays", "float32")]


@pytest.mark.parametrize("name, dtype", few(itertools.product(WITHOUT_DROPOUT, DTYPES), FAST_X64))
def test_x64_changes_no_dtype_and_no_number(name, dtype):
    """Results have the dtypes of the inputs with x64 on.

    Inputs of 32 bits and less also give the same numbers as with x64 off.
    """
    run = functools.partial(_flagged, FLAGGED[name], dtype)
    with jax.enable_x64(True):
        (out, lse), grads = jax.jit(run)()
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == "float64" else f32)
    assert [g.dtype for g in grads] == [dtype] * 3
    eps = 4e-3 if dtype == "bfloat16" else 1e-5
    if dtype != "float64":
        expected = jax.jit(run)()
        assert_same(((out, lse), grads), expected, eps)


def _in_64_bits(x):
    is_integer = getattr(x, "dtype", None) in (np.int32, np.int8)
    return x.astype(np.int64) if is_integer else x


@pytest.mark.parametrize(
    "name, x64",
    few(
        itertools.product(["bias", "lengths", "segments", "arrays"], [False, True]),
        [("bias", False), ("lengths", True)],
    ),
)
def test_x64_takes_64_bit_operands(name, x64):
    """Integers and terms of 64 bits (NumPy's own) serve as well."""
    kwargs = {n: _in_64_bits(x) for n, x in FLAGGED[name].items()}
    call = functools.partial(dot_product_attention, **kwargs, chunk_size=(4, 6))
    with jax.enable_x64(x64):
        out, pull = jax.vjp(call, *inputs())
        grads = pull(out)
    assert out.dtype == f32
    assert all(np.isfinite(g).all() for g in grads)


# ---- integers of every width


@pytest.mark.parametrize(
    "number",
    [np.int64(2**31), np.uint32(2**32 - 1), np.uint8(255), np.int64(-(2**40)), np.int8(-100)],
)
def test_traced_lengths_and_offsets_of_every_width(number):
    """A length above S counts as S and one below 0 as 0; an offset keeps its sign."""
    with jax.enable_x64(number.dtype.itemsize == 8):
        x = jax.random.normal(jax.random.key(0), (1, 9, 2, 4), f32)
        call = functools.partial(dot_product_attention, x, x, x)

        @jax.jit
        def run(n):
            return (
                call(key_value_seq_lengths=n),
                call(query_seq_lengths=n),
                call(is_causal=True, q_offset=n),
                call(),
            )

        *results, full = run(np.asarray([number]))
        expected = full if number > 0 else jnp.zeros_like(full)
        for actual in results:
            assert_same(actual, expected)


def test_segment_ids_that_would_wrap_are_refused():
    x = jnp.ones((1, 4, 2, 8))
    ids = np.zeros((1, 4), np.uint32)
    signed_ids = ids.astype(np.int32)

    def call(query_ids, key_ids):
        return dot_product_attention(
            x, x, x, query_segment_ids=query_ids, key_value_segment_ids=key_ids
        )

    assert_same(call(ids, signed_ids), call(ids, ids))  # known, and small
    assert_same(jax.jit(lambda: call(ids, signed_ids))(), call(ids, ids))  # constants are known too
    empty = np.zeros((1, 0), np.uint32)
    assert dot_product_attention(
        x[:, :0], x, x, query_segment_ids=empty, key_value_segment_ids=signed_ids
    ).shape == (1, 0, 2, 8)
    for dtype in (jnp.float32, jnp.int8):  # keys in 8 bits are checked before they are traced
        cache = memeff.KVCache.zeros(1, 4, 2, 8, dtype).append(x, x)
        out = cache.attend(x, query_segment_ids=ids, key_value_segment_ids=signed_ids)
        assert_same(out, cache.attend(x))
    refusal = "query_segment_ids is uint32 .* would wrap its largest numbers. Cast both"
    with pytest.raises(TypeError, match=refusal):
        jax.jit(call)(ids, signed_ids)
