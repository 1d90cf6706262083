"""`memeff.replace_attention` in programs of 16 bits and of several dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replaced_checks import find, qkv, qkv_of_one_head, replace, run_replaced


def test_narrow_floats():
    q, k, v = qkv(dtype="bfloat16")

    def attend(q, k, v):
        wide = [x.astype(jnp.float32) for x in (q, k)]
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", *wide) / 2)
        return jnp.einsum("bnts,bsnh->btnh", weights.astype(v.dtype), v)

    out = replace(attend, strict=True)(q, k, v)
    assert out.dtype == jnp.bfloat16
    error = np.abs(np.float32(out) - np.float32(attend(q, k, v))).max()
    assert error < 2e-2
    assert "bfloat16" in str(find(attend, q, k, v))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_precision_that_is_the_default_of_its_operands(dtype):
    """jax.nn asks for products of 16 bits that are added in float32, of the first product alone."""
    arrays = qkv(dtype=dtype)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    out = run_replaced(attend, *arrays)
    error = np.abs(np.float32(out) - np.float32(attend(*arrays))).max()
    assert out.dtype == dtype and error < 2e-2

    def high(q, k, v):
        s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    assert "have different precisions" in find(high, *arrays).left[0].reason


def test_a_sum_of_terms_of_16_bits_under_strict_promotion():
    def attend(q, k, v, bias):
        s = jnp.einsum("btnh,bsnh->bnts", q, k) + bias[None, None, None]
        s = jnp.where(s > 3, s, jnp.bfloat16(1)) + bias[None, None, None]
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    with jax.numpy_dtype_promotion("strict"):
        new = replace(attend, strict=True)
        bias = jnp.ones(16, jnp.bfloat16)
        assert jax.eval_shape(new, *qkv(dtype="bfloat16"), bias).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_of_16_bits_beside_a_score_function_are_not_rounded(dtype):
    """XLA rounds none of these logits on a CPU, so rounding would add to the error."""

    def attend(q, k, v):
        distance = jnp.abs(jnp.arange(len(q))[:, None] - jnp.arange(len(k))) / 4
        s = q @ k.T - distance.astype(q.dtype)
        return jax.nn.softmax(s.astype(v.dtype)) @ v

    arrays = qkv_of_one_head()
    q, k = (x.astype(dtype) for x in arrays[:2])
    report = find(attend, q, k, arrays[2])
    assert "score_fn" in str(report.replaced[0])
    out = run_replaced(attend, q, k, arrays[2])
    with jax.enable_x64(True):
        truth = attend(*(jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, arrays[2])))
    np.testing.assert_allclose(out, truth, atol=2e-6)
