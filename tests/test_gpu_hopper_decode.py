"""The decode kernel on a GPU: against the oracle, bits that repeat, and one kernel that merges."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_hopper_decode
import test_hopper_stored
from cases import Sizes
from decode_cases import CASES, FUNCTIONS, PAGED, filled
from gpu_calls import normal_arrays, skip_without_kernels
from hopper_cases import assert_equal_bits, bf16

import memeff

pytestmark = pytest.mark.gpu

LONG = Sizes(B=5, T=2, S=32768, K=8, G=4, H=128, D=128)
LENGTHS = [32768, 2, 1025, 20000, 31744]


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    skip_without_kernels()
    test_hopper_decode.assert_right(name, bf16, *CASES[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    skip_without_kernels()
    test_hopper_decode.assert_right(name, bf16, *FUNCTIONS[name])


def long_call():
    """Return query, key and value of a long cache, and the arguments of its lengths."""
    z = LONG
    shapes = [(z.B, z.T, z.K * z.G, z.H), (z.B, z.S, z.K, z.H), (z.B, z.S, z.K, z.D)]
    return normal_arrays(*shapes), arrays_of(LENGTHS, z.T)


def arrays_of(lengths, T):
    """Return the arguments that are arrays, of T queries at the end of caches of these lengths."""
    arguments = filled(lengths, T)
    return {name: jnp.asarray(x) for name, x in arguments.items() if name != "is_causal"}


@functools.partial(jax.jit, static_argnames="implementation")
def attend(args, arrays, implementation=None):
    """Return out and lse of a causal call."""
    return memeff.dot_product_attention(
        *args, **arrays, is_causal=True, implementation=implementation, return_residual=True
    )


def test_a_long_cache_is_as_the_chunked_path_has_it():
    skip_without_kernels()
    args, arrays = long_call()
    out, lse = attend(args, arrays)
    truth, true_lse = attend([x.astype(jnp.float32) for x in args], arrays, "xla")
    np.testing.assert_allclose(out.astype(jnp.float32), truth, atol=0.02)
    np.testing.assert_allclose(lse, true_lse, atol=1e-5)


def test_bits_repeat_in_every_run_and_in_every_batch():
    """The merge may wait for any thread block, in any order, and adds in the order of the keys."""
    skip_without_kernels()
    args, arrays = long_call()
    first = attend(args, arrays)
    for _ in range(100):
        assert_equal_bits(attend(args, arrays), first)
    for b in range(LONG.B):
        alone = attend([x[b : b + 1] for x in args], {n: x[b : b + 1] for n, x in arrays.items()})
        assert_equal_bits(alone, jax.tree.map(lambda x, b=b: x[b : b + 1], first))


@pytest.mark.parametrize(
    "H, G, T", [(128, 1, 5), (128, 4, 3), (128, 4, 8), (128, 8, 4), (64, 8, 2), (64, 4, 4)]
)
def test_drafts_have_the_bits_of_single_tokens(H, G, T):
    """Row t of T queries is the row of a call with that query alone.

    That holds up to 32 rows of 128, and 16 of 64.
    """
    skip_without_kernels()
    B, S, K = 2, 2048, 4
    query, key, value = normal_arrays((B, T, K * G, H), (B, S, K, H), (B, S, K, H))
    ends = jnp.array([2043, 1027])
    together = attend((query, key, value), arrays_of(ends, T))
    for t in range(T):
        row = query[:, t : t + 1], key, value
        alone = attend(row, arrays_of(ends - T + 1 + t, 1))
        assert_equal_bits(alone, jax.tree.map(lambda x, t=t: x[:, t : t + 1], together))


def test_nan_behind_the_lengths_changes_no_bit():
    skip_without_kernels()
    (query, key, value), arrays = long_call()
    behind = jnp.arange(LONG.S)[:, None, None] >= jnp.reshape(jnp.array(LENGTHS), (-1, 1, 1, 1))
    dirty = [jnp.where(behind, jnp.nan, x).astype(x.dtype) for x in (key, value)]
    assert_equal_bits(attend((query, *dirty), arrays), attend((query, key, value), arrays))


# ---- pages and 8 bits


@pytest.mark.parametrize("name", PAGED)
def test_pages_have_the_bits_of_arrays(name):
    skip_without_kernels()
    test_hopper_stored.assert_pages_have_the_bits_of_arrays(name)


def test_missing_pages_give_nan():
    skip_without_kernels()
    test_hopper_stored.assert_missing_pages_give_nan()


@pytest.mark.parametrize("name", test_hopper_stored.STORED)
def test_8_bits(name):
    skip_without_kernels()
    test_hopper_stored.assert_8_bits_are_right(name)


@pytest.mark.parametrize("dtype", test_hopper_stored.EIGHT_BITS)
def test_pages_of_8_bits_have_the_bits_of_arrays(dtype):
    skip_without_kernels()
    test_hopper_stored.assert_pages_of_8_bits_have_the_bits_of_arrays(dtype)


def test_nan_of_8_bits_reaches_the_rows_that_see_it():
    skip_without_kernels()
    test_hopper_stored.assert_nan_of_8_bits_reaches_the_rows_that_see_it()


@pytest.mark.parametrize("page", [16, 64])
def test_a_long_cache_in_pages_has_the_bits_of_arrays(page):
    """Pages lie in any order, and each run has the same bits."""
    skip_without_kernels()
    (query, key, value), arrays = long_call()
    lengths = arrays["key_value_seq_lengths"]
    n = LONG.S // page
    table = jax.random.permutation(jax.random.key(0), LONG.B * n).reshape(LONG.B, n)
    pools = []
    for x in (key, value):
        pages = x.reshape(LONG.B, n, page, LONG.K, -1)
        pools.append(jnp.zeros_like(pages.reshape(-1, *pages.shape[2:])).at[table].set(pages))

    @jax.jit
    def call():
        return memeff.paged_attention(
            query, *pools, table, lengths, is_causal=True, return_residual=True
        )

    expected = attend((query, key, value), arrays)
    for _ in range(20):
        assert_equal_bits(call(), expected)
