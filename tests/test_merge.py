"""`memeff.merge`: attention over parts of the keys, combined, is attention over all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_calls import assert_same

import memeff
from memeff import dot_product_attention

B, T, S, N, H, D = 2, 7, 13, 3, 5, 4
PARTITIONS = ((5, 8), (1, 0, 4, 8))
RNG = np.random.default_rng(0)
Q, K, V, DOUT = (
    RNG.standard_normal((B, n, N, d)).astype(np.float32)
    for n, d in ((T, H), (S, H), (S, D), (T, D))
)
DLSE = RNG.standard_normal((B, T, N)).astype(np.float32)
LENGTHS = np.array([3, 11], np.int32)


def whole(q, k, v, sinks=None):
    return dot_product_attention(
        q, k, v, key_value_seq_lengths=LENGTHS, sinks=sinks, return_residual=True
    )


def in_parts(sizes, q, k, v):
    parts = []
    first = 0
    for size in sizes:
        cut = slice(first, first + size)
        lengths = jnp.clip(LENGTHS - first, 0, size)
        parts.append(
            dot_product_attention(
                *(q, k[:, cut], v[:, cut]), key_value_seq_lengths=lengths, return_residual=True
            )
        )
        first += size
    return memeff.merge(*parts)


def all_orders(attend, q, k, v):
    """Return results, gradients, and tangents of the gradients."""

    def gradients(q, k, v):
        results, pull = jax.vjp(attend, q, k, v)
        return *results, *pull((DOUT, DLSE))

    return jax.jvp(gradients, (q, k, v), (k[:, :T] + q, k, v))


@functools.cache
def of_every_partition():
    """Return the results of one call, and those of each partition; one program."""

    def run(q, k, v):
        parts = [all_orders(functools.partial(in_parts, sizes), q, k, v) for sizes in PARTITIONS]
        return all_orders(whole, q, k, v), parts

    return jax.tree.map(np.asarray, jax.jit(run)(Q, K, V))


@pytest.mark.once
@pytest.mark.parametrize(
    "n", range(len(PARTITIONS)), ids=lambda n: "+".join(map(str, PARTITIONS[n]))
)
def test_any_partition(n):
    """Out, lse, gradients and tangents of gradients, with parts that a row sees nothing of."""
    expected, found = of_every_partition()
    assert_same(found[n], expected, 1e-5)


def test_rows_that_see_nothing():
    out = jnp.full((1, 2, 1, 3), jnp.nan)
    none = jnp.full((1, 2, 1), -jnp.inf)
    some = jnp.array([[[0.5], [-jnp.inf]]])
    value = jnp.ones((1, 2, 1, 3))

    def merged(x, lse):
        return memeff.merge((out, none), (x, lse))

    (found, lse), pull = jax.vjp(merged, value, some)
    np.testing.assert_array_equal(found[0, :, 0], [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(lse[0, :, 0], [0.5, -jnp.inf])
    dx, dlse = pull((value, jnp.ones_like(lse)))
    np.testing.assert_array_equal(dx[0, :, 0], [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(dlse[0, :, 0], [1, 0])


def test_sinks_are_applied_to_the_merged_result():
    """lse leaves sinks out, so a part that had them would weigh too much in the merge."""
    sinks = np.array([-0.5, 0.3, 1.2], np.float32)
    out, lse = in_parts((5, 8), Q, K, V)
    found = out * jax.nn.sigmoid(lse - sinks)[..., None]
    expected, _ = whole(Q, K, V, sinks=sinks)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_precision():
    """Sums are float32: 64 parts in bfloat16 err as much as their own rounding."""
    out = jnp.asarray(RNG.standard_normal((64, 1, 5, 2, 3)), jnp.bfloat16)
    lse = jnp.asarray(RNG.standard_normal((64, 1, 5, 2)) + 1000, jnp.float32)
    found, total = memeff.merge(*zip(out, lse, strict=True))
    wide = np.asarray(lse, np.float64)
    weights = np.exp(wide - wide.max(0))
    expected = (np.asarray(out, np.float64) * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    assert found.dtype == jnp.bfloat16
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(total, np.log(weights.sum(0)) + wide.max(0), rtol=1e-7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes_under_strict_promotion(dtype):
    """lse in few bits is widened also where JAX promotes nothing by itself."""
    out = jnp.ones((1, 2, 3, 4), dtype)
    lse = jnp.zeros((1, 2, 3), dtype)
    with jax.numpy_dtype_promotion("strict"):
        for other in (lse, lse.astype(jnp.float32)):
            merged, total = memeff.merge((out, lse), (out, other))
            assert (merged.dtype, total.dtype) == (out.dtype, jnp.float32)
        other_out = out.astype("float16" if dtype == "float32" else "float32")
        words = f'outs of {dtype}, {other_out.dtype}, and .* is "strict": cast them to one dtype'
        with pytest.raises(TypeError, match=words):
            memeff.merge((out, lse), (other_out, lse))
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_allclose(total, np.log(2), rtol=1e-6)


def test_sums_are_float64_if_any_array_is():
    """An out in float64 is not rounded to float32 because its lse is narrower."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        out = jnp.asarray(RNG.standard_normal((2, 1, 2, 3, 4)))
        lse = jnp.asarray(RNG.standard_normal((2, 1, 2, 3)), jnp.float32)
        for log in (lse, lse.astype(jnp.float64)):
            merged, total = memeff.merge(*zip(out, log, strict=True))
            weights = np.exp(np.asarray(log, np.float64))
            expected = (weights[..., None] * out).sum(0) / weights.sum(0)[..., None]
            assert (merged.dtype, total.dtype) == (jnp.float64, jnp.float64)
            np.testing.assert_allclose(merged, expected, rtol=1e-13, atol=1e-15)
            np.testing.assert_allclose(total, np.log(weights.sum(0)), rtol=1e-13, atol=1e-15)
        (merged, _), pull = jax.vjp(lambda x: memeff.merge((x, lse[0])), out[0])
        assert pull((merged, jnp.zeros_like(lse[0], jnp.float64)))[0].dtype == jnp.float64


@pytest.mark.parametrize(
    "parts, error, text",
    [
        ((), ValueError, "no parts"),
        (
            (np.ones((1, 2, 3, 4)),),
            TypeError,
            r"part 0 of merge must be a pair \(out, lse\).*; got ndarray\(shape=\(1, 2, 3, 4\)",
        ),
        (((np.ones((3, 4)), np.ones(3)),), ValueError, r"out of part 0 must have .* got \(3, 4\)"),
        (((np.ones((1, 2, 3, 4)), np.ones((1, 2))),), ValueError, "without its last dim"),
        (((np.ones((1, 2, 3, 4), int), np.ones((1, 2, 3))),), TypeError, "must be a floating"),
        (
            ((jnp.ones((1, 2, 3, 4), jnp.float8_e4m3fn), np.ones((1, 2, 3), np.float32)),),
            TypeError,
            "out of part 0 is float8_e4m3fn: supported are bfloat16, .* Cast it",
        ),
        (
            (
                (np.ones((1, 2, 3, 4)), np.ones((1, 2, 3))),
                (np.ones((1, 5, 3, 4)), np.ones((1, 5, 3))),
            ),
            ValueError,
            "part 1 of merge has out",
        ),
    ],
)
def test_wrong_parts(parts, error, text):
    with pytest.raises(error, match=text):
        memeff.merge(*parts)
