"""Scale and soft cap: as numbers and as arrays, zero and negative, and of every kind."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import CASES
from conftest import assert_truth, run_call, run_calls

from memeff import dot_product_attention

pytestmark = pytest.mark.once


@pytest.mark.slow
def test_scale_and_soft_cap_static_and_traced_agree():
    args, _ = CASES["causal"].inputs()
    values = (
        ("scale", 0.3),
        ("scale", -1.5),
        ("scale", 0.0),
        ("logits_soft_cap", 0.5),
        ("logits_soft_cap", 30.0),
    )
    calls = {}
    for name, x in values:
        traced = np.array(x, np.float32)
        calls[f"{name}={x}"] = args, {name: x, "chunk_size": 24}
        calls[f"{name}={x} traced"] = args, {name: traced, "chunk_size": 24}
    results = run_calls(calls)
    for name, result in results.items():
        assert_truth(result, name, *calls[name])
        if name.endswith(" traced"):
            static = results[name.removesuffix(" traced")]
            np.testing.assert_allclose(result.out, static.out, rtol=0, atol=2e-6)
    _, _, value = args
    mean = np.repeat(value.mean(1), 2, axis=1)[:, None]
    out = results["scale=0.0"].out
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=2e-6)


@pytest.mark.parametrize(
    "scale", [2, np.int32(2), np.float64(2), jnp.int32(2), jnp.asarray(2), np.array(2)]
)
def test_scale_of_every_kind(scale):
    args, _ = CASES["one_key"].inputs()

    def lse(scale):
        _, lse = dot_product_attention(*args, scale=scale, return_residual=True)
        return lse

    # an array runs another form of the forward than a number
    is_array = isinstance(scale, (jax.Array, np.ndarray))
    np.testing.assert_array_equal(lse(scale), lse(jnp.float32(2) if is_array else 2.0))
    np.testing.assert_allclose(lse(scale), lse(2.0), rtol=0, atol=2e-6)


@pytest.mark.parametrize("scale", [-0.2, np.float32(-0.2)], ids=["number", "array"])
def test_negative_scale_of_large_logits(scale):
    """A negative scale gives right numbers, although the largest logit has the smallest product.

    If the maximum were taken of the products, exp would overflow.
    """
    (query, key, value), _ = CASES["plain"].inputs()
    args = (12 * query, 12 * key, value)
    kwargs = {"chunk_size": (16, 24), "scale": scale}
    result = run_call(args, kwargs)
    assert result.lse.max() > 150
    assert_truth(result, "negative scale", args, kwargs)


def test_gradients_in_16_bits_are_rounded_once():
    """That of a scale, of a soft cap and of a bias of keys is a sum over 256 tiles, in float32."""
    rng = np.random.default_rng(3)

    def normal(*shape):
        return rng.standard_normal(shape).astype(ml_dtypes.bfloat16)

    arrays = [normal(2, 128, 2, 8) for _ in range(3)]
    terms = normal(1, 2, 1, 128), np.array([0.3, 2], ml_dtypes.bfloat16)

    def weighted(terms, query, key, value, chunk_size):
        bias, (scale, cap) = terms
        more = dict(scale=scale, logits_soft_cap=cap, chunk_size=chunk_size)
        return (dot_product_attention(query, key, value, bias, **more) * value).sum()

    gradient = jax.jit(jax.grad(weighted), static_argnums=4)
    found = gradient(terms, *arrays, (8, 8))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64), (terms, *arrays))
        true = jax.tree.map(np.asarray, gradient(*wide, None))

    def error(x, truth):
        return np.sqrt(np.mean((np.asarray(x, np.float64) - truth) ** 2))

    for x, truth in zip(found, true, strict=True):
        half = 2.0**-8 * np.abs(truth).max() if x.size == 2 else 0  # of the last place
        assert error(x, truth) <= 1.05 * max(error(truth.astype(ml_dtypes.bfloat16), truth), half)
