"""The tangent's Hopper kernel on a GPU: against the oracle, and bits that repeat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_hopper_functions
import test_hopper_tangent as jvps
from cases import Sizes, qkv
from gpu_calls import HOPPER, skip_without_kernels

import memeff

pytestmark = pytest.mark.gpu


def draw(dtype, sizes: Sizes):
    """Return query, key, value, and their tangents."""
    args = qkv(np.random.default_rng(0), dtype, sizes)
    return args, jvps.directions(args)


def assert_right(args, along, kwargs, dtype, name):
    """Check the tangents of out and lse along `along` by the law."""
    _, tangents = jvps.jvp(args, along, kwargs)
    jvps.assert_right(tangents, args, along, kwargs, dtype, name)


@pytest.mark.parametrize("name", [name for name, (sizes, _) in HOPPER.items() if sizes.H <= 128])
def test_hopper_jvp(name):
    skip_without_kernels()
    sizes, kwargs = HOPPER[name]
    args, along = draw(jnp.bfloat16, sizes)
    assert_right(args, along, kwargs, "bfloat16", name)


@pytest.mark.parametrize("name", test_hopper_functions.CASES)
def test_hopper_jvp_of_functions_of_the_users(name):
    skip_without_kernels()
    jvps.assert_function(name)


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("moving", jvps.SUBSETS)
def test_hopper_jvp_of_what_moves(moving, H):
    skip_without_kernels()
    args, directions = draw(jnp.float16, Sizes(B=2, T=300, S=500, K=2, G=2, H=H, D=H))
    along = []
    for name, tangent in zip(("query", "key", "value"), directions, strict=True):
        along.append(tangent if name in moving.split() else None)
    assert_right(args, along, dict(is_causal=True, q_offset=150), "float16", moving)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("H", [64, 128])
def test_hopper_jvp_of_what_a_row_has_in_common(H, causal):
    """Tangents are right although all keys move along one direction, far more than each alone."""
    skip_without_kernels()
    sizes = Sizes(B=1, T=700, S=700, K=2, G=2, H=H, D=H)
    args, (dq, dk, dv) = draw(jnp.bfloat16, sizes)
    dk = (dk + 40 * dk[:, :1]).astype(dk.dtype)
    assert_right(args, (dq, dk, dv), dict(is_causal=causal), "bfloat16", "common")


@pytest.mark.parametrize("H", [64, 128])
def test_hopper_jvp_is_deterministic_and_blind(H):
    """100 runs are equal in bits, beside another product; and NaN that nobody sees changes none."""
    skip_without_kernels()
    sizes = Sizes(B=2, T=900, S=1000, K=2, G=2, H=H, D=H)
    (q, k, v), (dq, dk, dv) = draw(jnp.bfloat16, sizes)
    attend = functools.partial(
        memeff.dot_product_attention,
        key_value_seq_lengths=np.array([850, 600], np.int32),
        is_causal=True,
        q_offset=100,
        implementation="pallas",
        return_residual=True,
    )
    both = jax.jit(functools.partial(jax.jvp, attend))
    busy = jax.jit(lambda x: x @ x)
    hidden = [x.copy() for x in (k, dk, v, dv)]
    for x in hidden:
        x[0, 850:] = np.nan
        x[1, 600:] = np.nan
    first = jax.tree.map(np.asarray, both((q, k, v), (dq, dk, dv)))
    for n in range(100):
        busy(jnp.ones((2048, 2048)))
        if n == 99:
            k, dk, v, dv = hidden
        results = both((q, k, v), (dq, dk, dv))
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(results), strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("name", jvps.TRANSFORMED)
def test_hopper_jvp_under_transformations(name):
    """Results are as the chunked path has them."""
    skip_without_kernels()
    args, along = draw(jnp.bfloat16, Sizes(B=2, T=200, S=200, K=2, G=2, H=64, D=64))

    def results(implementation):
        leaves = jax.tree.leaves(jvps.transformed(name, implementation)(args, along))
        return [np.asarray(x, np.float32) for x in leaves]

    for x, y in zip(results("pallas"), results("xla"), strict=True):
        np.testing.assert_allclose(x, y, atol=0.03 * np.abs(y).max())
