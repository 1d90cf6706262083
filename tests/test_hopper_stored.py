"""The decode kernel reads keys in pages and in 8 bits.

The checks also run on a GPU (test_gpu_hopper_decode.py). Here the kernel runs in Mosaic's
interpreter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes
from conftest import Result, assert_result, few, plain_call, true_call
from decode_cases import PAGED, filled, in_pages
from hopper_cases import (
    assert_equal_bits,
    bf16,
    draw,
    f32,
    i32,
    interpreted,
    kernels,
    lowered,
    needs_kernels,
    not_finite,
)

import memeff
from memeff import KVCache, PagedKVCache
from memeff.device import pretend_device

pytestmark = needs_kernels

EIGHT_BITS = ("int8", "float8_e4m3fn")


def kernel(function, *args, **options):
    """Return what `function` returns, with lse, from the kernels; on any device."""
    call = functools.partial(
        function, **options, implementation="pallas", return_residual=True, is_causal=True
    )
    return jax.tree.map(np.asarray, jax.jit(call)(*args))


# ---- pages


def assert_pages_have_the_bits_of_arrays(name: str) -> None:
    z, lengths, options, page = PAGED[name]
    query, key, value = draw(bf16, z)
    arrays = filled(lengths, z.T) | options
    pools, table = in_pages(page, lengths, key, value)
    paged = kernel(memeff.paged_attention, query, *pools, table, i32(lengths), **options)
    del arrays["is_causal"]
    whole = kernel(memeff.dot_product_attention, query, key, value, **arrays)
    assert_equal_bits(paged, whole)


@not_finite
@pytest.mark.parametrize("name", few(PAGED, ("pages of 64", "pages of 24")))
def test_pages_have_the_bits_of_arrays(name):
    with interpreted():
        assert_pages_have_the_bits_of_arrays(name)


def assert_missing_pages_give_nan() -> None:
    """Rows that see a token of a page that does not exist are NaN, and no others."""
    z = Sizes(B=5, T=2, S=640, K=2, G=1, H=64, D=64)
    query, key, value = draw(bf16, z)
    lengths = i32([640, 640, 640, 321, 640])
    pools, table = in_pages(32, lengths, key, value)
    window = dict(local_window_size=(320, 0))  # queries 638 and 639 see keys from 318 and 319
    right = kernel(memeff.paged_attention, query, *pools, table, lengths, **window)
    table[0, 5] = -1  # keys 160 to 191, which nobody sees
    table[1, 9] = len(pools[0])  # keys 288 to 319, of which each query sees one or two
    table[2, 19] = 2**30  # the newest keys, of which the first query sees all but one
    table[3, 10] = -2  # key 320, which only the last query sees
    table[4, 13] = -1  # in a tile that needs no masks
    out, lse = kernel(memeff.paged_attention, query, *pools, table, lengths, **window)
    is_nan = np.zeros((5, 2), bool)
    is_nan[[1, 2, 4]] = True
    is_nan[3, 1] = True
    np.testing.assert_array_equal(np.isnan(lse), np.repeat(is_nan[..., None], 2, 2))
    np.testing.assert_array_equal(np.isnan(f32(out)).all(-1), np.isnan(lse))
    expected = [np.where(np.isnan(lse), 0, right[1])]
    assert_equal_bits([np.where(np.isnan(lse), 0, lse)], expected)


@not_finite
def test_missing_pages_give_nan():
    with interpreted():
        assert_missing_pages_give_nan()


# ---- 8 bits


def quantised(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return x [B, S, K, H] in 8 bits, and its scales [B, S, K]; computed without memeff."""
    x = np.asarray(x, f32)
    if dtype == "int8":
        scales = np.abs(x).max(-1) / 127
        return np.round(x / scales[..., None]).astype(np.int8), scales
    scales = np.abs(x).max(-1) / 448
    return (x / scales[..., None]).astype(jnp.float8_e4m3fn), scales


def filled_cache(stored: list, lengths) -> KVCache:
    """Return the cache of 8 bits that has `stored`, the arrays of keys and those of values.

    Behind the lengths, numbers are NaN where the dtype has them, and so are all scales.
    """
    arrays = []
    for numbers, scales in stored:
        B, S = scales.shape[:2]
        hidden = np.arange(S) >= np.reshape(lengths, (-1, 1))
        bad = 100 if numbers.dtype == np.int8 else np.nan
        numbers = np.where(hidden[..., None, None], np.asarray(bad, numbers.dtype), numbers)
        scales = np.where(hidden[..., None], f32(np.nan), scales).swapaxes(1, 2)
        arrays.append((jnp.asarray(numbers), jnp.asarray(scales)))
    (key, key_scale), (value, value_scale) = arrays
    return KVCache(key, value, jnp.asarray(lengths), key_scale, value_scale)


def paged(cache: KVCache, page: int) -> PagedKVCache:
    """Return the same cache in shuffled pages."""
    B, S = cache.key.shape[:2]
    table = np.random.default_rng(page).permutation(B * S // page).reshape(B, -1)

    def pages_of(x, dim: int):
        x = np.asarray(x)
        x = x.reshape(*x.shape[:dim], -1, page, *x.shape[dim + 1 :])
        x = np.moveaxis(x, dim, 1)
        pool = np.zeros_like(x.reshape(-1, *x.shape[2:]))
        pool[table] = x
        return jnp.asarray(pool)

    return PagedKVCache(
        pages_of(cache.key, 1),
        pages_of(cache.value, 1),
        jnp.asarray(table, jnp.int32),
        cache.lengths,
        pages_of(cache.key_scale, 2),
        pages_of(cache.value_scale, 2),
    )


STORED = {
    "int8": (Sizes(B=3, T=2, S=648, K=2, G=2, H=64, D=64), [648, 300, 0], {}, "int8"),
    "int8, wide": (
        Sizes(B=2, T=1, S=600, K=2, G=3, H=128, D=64),
        [64, 599],
        dict(logits_soft_cap=2.0, sinks=np.linspace(-1, 1, 6, dtype=f32)),
        "int8",
    ),
    "float8": (
        Sizes(B=2, T=3, S=600, K=1, G=2, H=128, D=128),
        [580, 3],
        dict(local_window_size=(300, 0)),
        "float8_e4m3fn",
    ),
    "float8, keys masked": (
        Sizes(B=2, T=2, S=328, K=2, G=2, H=128, D=128),
        [328, 100],
        dict(mask=np.arange(328)[None, None, None] % 7 < np.reshape([3, 5], (2, 1, 1, 1))),
        "float8_e4m3fn",
    ),
    "int8, 12 rows": (
        Sizes(B=1, T=4, S=328, K=2, G=3, H=128, D=128),
        [328],
        {},
        "int8",
    ),
    "int8, 40 rows": (
        Sizes(B=1, T=8, S=328, K=1, G=5, H=64, D=64),
        [300],
        {},
        "int8",
    ),
    "float8, four heads": (
        Sizes(B=1, T=1, S=328, K=4, G=1, H=64, D=64),
        [327],
        {},
        "float8_e4m3fn",
    ),
}


def attend(cache, query, **options):
    """Return out and lse of a cache."""
    return cache.attend(query, **options)


def assert_8_bits_are_right(name: str) -> None:
    """Compare with the oracle, which reads the dequantised numbers in float64."""
    z, lengths, options, dtype = STORED[name]
    query, key, value = draw(bf16, z)
    stored = [quantised(x, dtype) for x in (key, value)]
    out, lse = kernel(attend, filled_cache(stored, i32(lengths)), query, **options)
    known = filled(lengths, z.T) | options
    exact = [f32(numbers) * scales[..., None] for numbers, scales in stored]
    truth = true_call((query, *exact), known, "bfloat16")
    plain = plain_call((query, *(x.astype(bf16) for x in exact)), known, "bfloat16")
    assert_result(Result(out, lse, {}), plain, truth, "bfloat16", name)


@not_finite
@pytest.mark.parametrize("name", few(STORED, ("int8", "float8")))
def test_8_bits(name):
    with interpreted():
        assert_8_bits_are_right(name)


def test_query_in_integers():
    """Rows are given back to 2^-16 of their largest number, and NaN where one is not finite."""
    from memeff.pallas.hopper.fragments import split_query

    rows = np.random.default_rng(0).standard_normal((8, 64)).astype(f32)
    rows[1] *= 1e-30
    rows[2] = 0
    rows[3, 5] = np.inf
    rows[4, 6] = np.nan
    rows[5, 7] = -1e30
    digits, scales = jax.jit(split_query)(rows)
    assert digits.dtype == jnp.int8
    high, low = np.asarray(digits, np.float64)
    with np.errstate(invalid="ignore"):
        found = (256 * high + low) * np.float64(scales)[:, None]
    np.testing.assert_array_equal(np.isnan(found).all(1), ~np.isfinite(rows).all(1))
    good = np.isfinite(rows).all(1)
    error = np.abs(found - rows)[good]
    assert (error <= 2.0**-15.9 * np.abs(rows[good]).max(1, keepdims=True)).all()


def assert_pages_of_8_bits_have_the_bits_of_arrays(dtype: str) -> None:
    z = Sizes(B=2, T=2, S=640, K=2, G=2, H=64, D=128)
    query, key, value = draw(bf16, z)
    cache = filled_cache([quantised(x, dtype) for x in (key, value)], i32([640, 100]))
    expected = kernel(attend, cache, query)
    for page in (32, 64):
        assert_equal_bits(kernel(attend, paged(cache, page), query), expected)


@not_finite
@pytest.mark.parametrize("dtype", few(EIGHT_BITS, ()))
def test_pages_of_8_bits_have_the_bits_of_arrays(dtype):
    with interpreted():
        assert_pages_of_8_bits_have_the_bits_of_arrays(dtype)


def assert_nan_of_8_bits_reaches_the_rows_that_see_it() -> None:
    """A token whose value scale is NaN makes rows NaN that see it, and its key scale as well."""
    z = Sizes(B=2, T=4, S=256, K=1, G=2, H=64, D=64)
    query, key, value = draw(bf16, z)
    cache = filled_cache([quantised(x, "int8") for x in (key, value)], i32([256, 200]))
    out, lse = kernel(attend, cache, query)
    assert cache.key_scale is not None
    assert cache.value_scale is not None
    bad = KVCache(
        *(cache.key, cache.value, cache.lengths),
        cache.key_scale.at[1, 0, 198].set(np.nan),  # the third query sees token 198
        cache.value_scale.at[0, 0, 254].set(np.inf),
    )
    bad_out, bad_lse = kernel(attend, bad, query)
    sees = np.zeros((2, 4), bool)
    sees[:, 2:] = True
    np.testing.assert_array_equal(
        np.isfinite(f32(bad_out)).all(-1), ~np.repeat(sees[..., None], 2, 2)
    )
    assert_equal_bits(bad_out[:, :2], out[:, :2])
    assert_equal_bits((bad_lse[0], bad_lse[1, :2]), (lse[0], lse[1, :2]))


@not_finite
def test_nan_of_8_bits_reaches_the_rows_that_see_it():
    with interpreted():
        assert_nan_of_8_bits_reaches_the_rows_that_see_it()


# ---- transformations and choice


@pytest.mark.slow
def test_derivatives_are_those_of_arrays():
    z, lengths, options, page = PAGED["pages of 64"]
    query, key, value = draw(bf16, z)
    pools, table = in_pages(page, [z.S] * z.B, key, value)
    pools = [np.where(np.isnan(f32(x)), 0, x).astype(bf16) for x in pools]
    dout = draw(bf16, z)[0]

    def of_pages(query, key_pages, value_pages):
        pages = key_pages, value_pages, table, i32(lengths)
        return memeff.paged_attention(query, *pages, is_causal=True, implementation="pallas")

    def of_arrays(query, key, value):
        return memeff.dot_product_attention(
            query, key, value, **filled(lengths, z.T), implementation="pallas"
        )

    with interpreted():
        out, pull = jax.vjp(of_pages, query, *pools)
        dq, *d_pools = pull(dout)
        expected, pull = jax.vjp(of_arrays, query, key, value)
        expected_dq, *d_arrays = pull(dout)
    assert_equal_bits((out, dq), (expected, expected_dq))
    for x, y in zip(d_pools, d_arrays, strict=True):
        assert_equal_bits(x[table].reshape(y.shape), y)


@pytest.mark.slow
def test_vmap_over_sequences_and_over_pools():
    z = Sizes(B=1, T=1, S=192, K=2, G=1, H=64, D=64)
    query, key, value = (np.stack([x, x[..., ::-1]]) for x in draw(bf16, z))
    both = [in_pages(64, [192], k, v) for k, v in zip(key, value, strict=True)]
    lengths = i32([[192], [130]])
    pools = [np.stack(x) for x in zip(*(pools for pools, _ in both), strict=True)]
    table = np.stack([table for _, table in both])

    def call(query, key_pages, value_pages, table, lengths):
        return memeff.paged_attention(
            query, key_pages, value_pages, table, lengths, implementation="pallas"
        )

    with interpreted():
        apart = jax.jit(jax.vmap(call))(query, *pools, table, lengths)
        one_pool = jax.jit(jax.vmap(call, (0, None, None, 0, 0)))
        shared = one_pool(query, *(x[0] for x in pools), table, lengths)
        for n in range(2):
            alone = jax.jit(call)(query[n], *(x[n] for x in pools), table[n], lengths[n])
            assert_equal_bits(apart[n], alone)
            alone = jax.jit(call)(query[n], *(x[0] for x in pools), table[n], lengths[n])
            assert_equal_bits(shared[n], alone)


def shapes_of(cache_type, page: int | None, dtype, T: int = 1, capacity: int = 8192):
    """Return the shapes of a query and of a cache of 2 sequences, 8 query and 4 key heads."""
    query = jax.ShapeDtypeStruct((2, T, 8, 128), bf16)
    if page is None:
        return query, jax.eval_shape(lambda: cache_type.zeros(2, capacity, 4, 128, dtype))
    pages = dict(batch=2, pages_per_sequence=capacity // page)
    count = 2 * capacity // page
    return query, jax.eval_shape(lambda: cache_type.zeros(count, page, 4, 128, dtype, **pages))


def attend_by_choice(query, cache):
    """Return out, from the implementation that memeff chooses."""
    return cache.attend(query)


@pytest.mark.parametrize(
    "page, dtype", [(None, "int8"), (None, "float8_e4m3fn"), (16, bf16), (64, "int8")]
)
def test_the_call_is_one_kernel(page, dtype):
    cache_type = KVCache if page is None else PagedKVCache
    text = lowered(attend_by_choice, *shapes_of(cache_type, page, dtype))
    assert kernels(text) == 1


@pytest.mark.parametrize(
    "page, dtype, T, reason",
    [
        (12, bf16, 1, "pages whose size is a multiple of 8 tokens, and this call has pages of 12"),
        (16, "int8", 1, "pages of 8 bits whose size is a multiple of 32 tokens"),
        (64, bf16, 70, "decoding alone, and their decode kernel supports up to 128 rows"),
    ],
)
def test_the_reason_for_the_chunked_path(page, dtype, T, reason):
    query, cache = shapes_of(PagedKVCache, page, dtype, T, capacity=page * 16)

    def call(query, cache, implementation):
        return cache.attend(query, implementation=implementation)

    with pretend_device("gpu", "9.0"):
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(functools.partial(call, implementation="pallas"), query, cache)
        with pytest.warns(UserWarning, match=reason):
            jax.eval_shape(functools.partial(call, implementation=None), query, cache)
