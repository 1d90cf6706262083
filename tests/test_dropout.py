"""Dropout keeps the pairs that Flax keeps, for any chunk size and at any position."""

import functools
import itertools
import math

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from baselines import mix32, threefry
from cases import CASES
from conftest import few

from memeff import dot_product_attention
from memeff.dropout import dropout_keep_mask
from memeff.problem import Dropout, Operands, Problem

f32 = np.float32


@pytest.mark.parametrize(
    "x64, shared",
    few(itertools.product([False, True], repeat=2), [(False, False), (True, True)]),
)
def test_dropout_is_flax_linens(shared, x64):
    with jax.enable_x64(x64):
        key = jax.random.key(5) if x64 else jax.random.PRNGKey(5)
        rng = np.random.default_rng(9)
        args = [rng.standard_normal((2, 3, size, 4, 5)).astype(f32) for size in (37, 53, 53)]
        kwargs = {"dropout_rng": key, "dropout_rate": 0.3, "broadcast_dropout": shared}
        actual = dot_product_attention(*args, **kwargs, chunk_size=(16, 24))
        expected = flax.linen.dot_product_attention(*args, **kwargs)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=4e-6)


def _kept(rate, chunk_size=None, **kwargs):
    """Return what dropout leaves of equal probabilities, times S; [B, T, N, S]."""
    B = 2
    T = 61
    S = 97
    N = 3
    unit_vectors = np.eye(S, dtype=f32)[None, :, None]
    attend = functools.partial(
        dot_product_attention, dropout_rate=rate, chunk_size=chunk_size, **kwargs
    )
    out = jax.jit(attend)(
        np.zeros((B, T, N, 1), f32),
        np.zeros((B, S, N, 1), f32),
        np.broadcast_to(unit_vectors, (B, S, N, S)),
        dropout_rng=jax.random.key(7),
    )
    return np.asarray(out) * S


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_stated_fraction(rate, shared):
    kept = _kept(rate, broadcast_dropout=shared)
    values = np.unique(kept.round(4))
    np.testing.assert_allclose(values, [0, 1 / (1 - rate)], atol=1e-3)
    draws = kept[0, :, 0] if shared else kept
    fraction = (draws > 0).mean()
    sigma = math.sqrt(rate * (1 - rate) / draws.size)
    assert abs(fraction - (1 - rate)) < 4 * sigma
    assert (kept == kept[:1, :, :1]).all() == shared


@pytest.mark.parametrize("chunk_size", [(8, 16), *few([[61, 1], 1000], [])])
def test_dropout_is_the_same_for_any_chunk_size(chunk_size):
    kept = _kept(0.5, chunk_size, broadcast_dropout=False)
    expected = _kept(0.5, broadcast_dropout=False)
    np.testing.assert_array_equal(kept > 0, expected > 0)


def test_the_gradient_draws_the_bits_of_a_tile_twice():
    """The forward draws them, and the backward draws them once for its two uses."""
    x = jnp.ones((1, 32, 2, 4))

    def call(x, key):
        out = dot_product_attention(x, x, x, dropout_rng=key, dropout_rate=0.5, chunk_size=(16, 16))
        return out.sum()

    jaxpr = jax.make_jaxpr(jax.grad(call))(x, jax.random.key(0))
    assert str(jaxpr).count("threefry2x32") == 2


@pytest.mark.parametrize("impl", few(["rbg", "unsafe_rbg"], ["rbg"]))
def test_mix32_takes_keys_of_any_generator(impl):
    """The common choice on TPUs is rbg, and Linen passes such a key as four words."""

    def kept(key):
        x = jnp.ones((1, 64, 1, 1))
        values = jnp.eye(64)[None, :, None]
        options = dict(dropout_rng=key, dropout_rate=0.25, dropout_bits="mix32", chunk_size=16)
        return jax.jit(lambda: dot_product_attention(x, x, values, **options) > 0)()

    of_key = kept(jax.random.key(3, impl=impl))
    with jax.default_prng_impl(impl):
        of_words = kept(jax.random.PRNGKey(3))
    np.testing.assert_array_equal(of_key, of_words)
    assert abs(of_key.mean() - 0.75) < 0.04
    assert (of_key != kept(jax.random.key(4, impl=impl))).mean() > 0.3


def test_dropout_only_where_asked():
    args, _ = CASES["plain"].inputs()
    call = functools.partial(dot_product_attention, *args)
    plain = call()
    np.testing.assert_array_equal(plain, call(dropout_rng=jax.random.key(0)))
    dropped = call(dropout_rng=jax.random.key(0), dropout_rate=0.5)
    assert np.abs(dropped - plain).max() > 0.1
    with_another_key = call(dropout_rng=jax.random.key(1), dropout_rate=0.5)
    assert np.abs(with_another_key - dropped).max() > 0.1


def test_dropout_counts_past_32_bits():
    """Flat indices above 2^32 give the bits of whole numbers and of threefry written out in NumPy.

    The positions include the largest of 16 bits and the first above them.
    """
    B = 2
    K = 3
    G = 5
    T = 70_001
    S = 1_050_007
    rows = np.array([0, 1, 65_535, 70_000])
    cols = np.array([0, 65_536, 1_050_006])
    heads = np.arange(B * K * G, dtype=object).reshape(B, K, G, 1, 1)
    flat = (heads * T + rows.astype(object)[:, None]) * S + cols.astype(object)
    assert flat.max() > 2**40
    low = (flat % 2**32).astype(np.uint32)
    high = ((flat >> 32) % 2**32).astype(np.uint32)
    key = np.array([12, 2**32 - 5], np.uint32)
    bits = np.bitwise_xor(*threefry(key, high, low))
    unit = (bits >> 9) / np.float64(2**23)

    x = jnp.zeros((1, 1, 1, 1))
    operands = Operands(x, x, x, dropout_key=jnp.asarray(key))
    problem = Problem(dropout=Dropout(0.5, False))
    like = jnp.zeros((B, K, G))
    sizes = K * G, T, S
    positions = jnp.asarray(rows), jnp.asarray(cols)
    kept = dropout_keep_mask(problem, operands, like, (0, 0), sizes, *positions)
    np.testing.assert_array_equal(kept, unit < 0.5)


# ---- mix32


def test_mix32_is_what_numpy_computes():
    """The mask of all heads, by any tiles and at any position, is that written out in NumPy."""
    key = np.array([12, 2**32 - 5], np.uint32)
    B, K, G, T, S = 2, 3, 2, 61, 97
    expected = mix32(key, 0.7, (B, K, G, T, S))
    x = jnp.zeros((1, 1, 1, 1))
    operands = Operands(x, x, x, dropout_key=jnp.asarray(key))
    problem = Problem(dropout=Dropout(0.3, False, "mix32"))
    like = jnp.zeros((1, 2, G))
    rows = jnp.arange(20, 60, 3)
    cols = jnp.arange(96, 3, -5)
    kept = dropout_keep_mask(problem, operands, like, (1, 1), (K * G, T, S), rows, cols)
    part = expected[1:, 1:][..., rows[:, None], cols]
    np.testing.assert_array_equal(kept, part)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_mix32_is_random(rate):
    """Rows, columns, heads and the whole matrix are as independent draws are.

    The largest singular value of a matrix of N x M independent numbers of variance 1 is about
    sqrt(N) + sqrt(M), and the smallest one sqrt(M) - sqrt(N). Rows or columns that depend on each
    other move them. All bounds are beyond 4 sigma, and the key is fixed.
    """
    T, S = 512, 1024
    kept = mix32(np.array([3, 4], np.uint32), 1 - rate, (4, T, S))
    deviation = np.sqrt(rate * (1 - rate))
    x = (kept - (1 - rate)) / deviation
    assert abs(x.mean()) * np.sqrt(x.size) < 4
    assert abs((x.mean(2) ** 2).mean() * S - 1) < 4 * np.sqrt(2 / (4 * T))  # rows
    assert abs((x.mean(1) ** 2).mean() * T - 1) < 4 * np.sqrt(2 / (4 * S))  # columns
    pairs = np.einsum("nts,mts->nm", x, x) / np.sqrt(T * S)  # heads
    assert np.abs(pairs[~np.eye(4, dtype=bool)]).max() < 4
    sizes = np.linalg.svd(x[0], compute_uv=False)
    assert sizes[0] < 1.04 * (np.sqrt(T) + np.sqrt(S))
    assert sizes[-1] > 0.9 * (np.sqrt(S) - np.sqrt(T))
