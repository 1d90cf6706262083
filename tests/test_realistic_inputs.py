"""Numbers for inputs that are not Gaussian: outliers, sink tokens, tiny and large logits."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes, qkv
from conftest import assert_truth, few, run_call, true_call

f32 = np.float32
DRAWS = 24  # of two batch entries each, because few rows of each decide in the wildest kinds


def _inputs(kind: str, dtype):
    """Return query, key and value of a kind."""
    rng = np.random.default_rng(4)
    query, key, value = qkv(rng, np.float64, Sizes(B=2 * DRAWS, T=37, S=37))
    match kind:
        case "outlier channel":
            query[..., 2] *= 30
            key[..., 2] *= 30
        case "sink token":
            key[:, 0] = 8 * query.reshape(-1, 37, 3, 2, 5).mean((1, 3))
            value[:, 0] = 0.01
        case "constant 1000":
            query[:] = 1000
            key[:] = 1000
            value[:] = 1000
        case "equal keys":
            key[:] = key[:, :1]
        case "one-hot rows":
            query = np.eye(5)[rng.integers(0, 5, query.shape[:-1])] * 40
            key = np.eye(5)[rng.integers(0, 5, key.shape[:-1])] * 40
        case "tiny logits":
            query *= 1e-4
            key *= 1e-4
        case "large values":
            value *= 1e3
        case "offset":
            query += 3
            key -= 7
            value += 100
        case "logits of 1e4":
            query *= 50
            key *= 50
        case "negative logits":  # every lse far below -88.7, where exp underflows in float32
            query = np.abs(query) * 30 + 10
            key = -np.abs(key) * 30 - 10
        case "half overflows":  # products above 65,504
            query = query * 150 + 150
            key = key * 150 + 100
    return tuple(x.astype(dtype) for x in (query, key, value))


KINDS = (
    "outlier channel",
    "sink token",
    "constant 1000",
    "equal keys",
    "one-hot rows",
    "tiny logits",
    "large values",
    "offset",
    "logits of 1e4",
    "negative logits",
    "half overflows",
)
# Kinds near the ends of float16's range; bfloat16 has the other kinds in 16 bits.
IN_FLOAT16 = ("half overflows", "constant 1000", "logits of 1e4", "tiny logits", "large values")
FAST = [
    *itertools.product(("float32", "bfloat16"), KINDS),
    *itertools.product(("float16",), IN_FLOAT16),
]


@pytest.mark.parametrize(
    "dtype, kind", few(itertools.product(("float32", "bfloat16", "float16"), KINDS), FAST)
)
@pytest.mark.once
def test_real_looking_inputs(kind, dtype):
    args = _inputs(kind, jnp.dtype(dtype))
    kwargs = {"is_causal": True, "chunk_size": (16, 24)}
    if kind in ("half overflows", "constant 1000"):
        kwargs["scale"] = 2.0**-20  # the products overflow float16, the logits do not
    assert_truth(run_call(args, kwargs, dtype), kind, args, kwargs, dtype)


def test_logits_of_two_million():
    """Logits of two million, from inputs of 1000 and the default scale, give the right out and lse.

    A logit is known to its rounding, 0.1 nats. Therefore p is hardly known.
    """
    args = _inputs("constant 1000", f32)
    kwargs = {"is_causal": True, "chunk_size": (16, 24)}
    result = run_call(args, kwargs)
    truth = true_call(args, kwargs)
    np.testing.assert_allclose(result.out, truth.out, rtol=2e-6)
    np.testing.assert_allclose(result.lse, truth.lse, rtol=1e-6)
    assert all(np.isfinite(x).all() for x in result.grads.values())


def test_very_negative_lse_at_every_length():
    """Rows with lse < -88.7 keep their gradient at every length from 1 to 128.

    In pytorch#196678 such rows lost it at some lengths.
    """
    z = Sizes(B=128, T=3, S=128, K=1, G=1, H=2, D=3)
    query, key, value = qkv(np.random.default_rng(5), f32, z)
    args = (np.abs(query) * 4 + 12, -np.abs(key) * 4 - 12, value)
    lengths = np.arange(1, 129, dtype=np.int32)
    kwargs = {"key_value_seq_lengths": lengths, "chunk_size": (2, 48)}
    result = run_call(args, kwargs)
    assert result.lse.max() < -88.7
    assert_truth(result, "lengths", args, kwargs)
