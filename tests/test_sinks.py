"""A sink is one more column of the softmax, without a key.

Every implementation computes its numbers and derivatives.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import few
from jax.test_util import check_grads
from small_calls import assert_close, temp_bytes

from memeff import dot_product_attention

B = 2
T = 19
S = 23
N = 4
K = 2
H = 8
D = 5
NAMES = ("query", "key", "value", "sinks")
IMPLEMENTATIONS = ("xla", "reference")


def draw(rng, dtype=np.float64):
    """Return query, key, value and sinks."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, D), (N,)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def call(q, k, v, sinks, **kwargs):
    """Return out and lse."""
    return dot_product_attention(
        q, k, v, sinks=sinks, return_residual=True, chunk_size=(8, 12), **kwargs
    )


@pytest.mark.parametrize("implementation", few(IMPLEMENTATIONS, ["xla"]))
@pytest.mark.once
def test_every_derivative_of_sinks(implementation):
    """Derivatives of both modes and of two orders agree with differences, through out and lse.

    This holds also where the sink equals the lse of the keys.
    """
    with jax.enable_x64(True):
        q, k, v, sinks = draw(np.random.default_rng(0))
        f = jax.jit(functools.partial(call, implementation=implementation, is_causal=True))
        tie = jnp.zeros_like(q), k, v, jnp.zeros(N)  # row 0 sees one key, of logit 0
        check_grads(f, (q, k, v, sinks), order=1, rtol=1e-6)
        check_grads(f, tie, order=1, rtol=1e-6)
        check_grads(f, (q, k, v, sinks), order=2, rtol=1e-5)


DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@pytest.mark.parametrize(
    "implementation, dtype",
    few(
        itertools.product(IMPLEMENTATIONS, DTYPES),
        [*itertools.product(["xla"], DTYPES), ("reference", jnp.float32)],
    ),
)
@pytest.mark.once
def test_extreme_sinks(implementation, dtype):
    """A sink of -inf is no sink, and a sink far above the logits takes all.

    Neither makes NaN of a row that sees no key.
    """
    q, k, v, _ = draw(np.random.default_rng(1), dtype)
    sinks = jnp.array([-np.inf, -3e4, 3e4, 0.5], dtype)
    lengths = jnp.array([S, 0])
    dout = jnp.ones((B, T, N, D), dtype)
    dlse = jnp.ones((B, T, N))
    f = functools.partial(call, key_value_seq_lengths=lengths, implementation=implementation)

    @jax.jit
    def run(q, k, v, sinks):
        (out, lse), pull = jax.vjp(f, q, k, v, sinks)
        grads = pull((dout, dlse))
        lse_grads = pull((0 * dout, dlse))
        (_, lse_without), pull = jax.vjp(functools.partial(f, sinks=None), q, k, v)
        lse_grads_without = pull((0 * dout, dlse))
        return (out, lse, grads), (lse_grads, lse_without, lse_grads_without)

    with_sinks, comparison = jax.tree.map(np.float64, run(q, k, v, sinks))
    out, lse, grads = with_sinks
    lse_grads, lse_without, lse_grads_without = comparison
    arguments = dict(sinks=sinks, key_value_seq_lengths=lengths)
    true_out, true_lse = oracle.attention(q, k, v, **arguments)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out, true_out, atol=tolerance)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(lse, lse_without)  # of the keys alone
    assert (out[1] == 0).all()
    assert np.isneginf(lse[1]).all()
    assert (out[0, :, 2] == 0).all()
    true_grads = oracle.gradients(q, k, v, **arguments, dout=dout, dlse=dlse)
    for name, x in zip(NAMES, grads, strict=True):
        np.testing.assert_allclose(x, true_grads[name], atol=20 * tolerance, err_msg=name)
    # lse does not depend on the sink, however large
    assert_close(lse_grads[:3], lse_grads_without, atol=tolerance)


def _column(q, k, v, sinks):
    """Return attention in the dtype of q, with the sinks written out as a column of logits."""
    q = q.reshape(B, T, K, N // K, H)
    s = jnp.einsum("btkgh,bskh->bkgts", q, k).astype(jnp.float32) * H**-0.5
    column = sinks.astype(jnp.float32).reshape(K, -1, 1, 1)
    column = jnp.broadcast_to(column, (*s.shape[:-1], 1))
    p = jax.nn.softmax(jnp.concatenate([s, column], -1), -1)
    p = p[..., :-1].astype(q.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, N, D)


def _out(*args):
    out, _ = call(*args)
    return out


@functools.partial(jax.jit, static_argnums=0)
def _out_and_gradients(f, args, dout):
    out, pull = jax.vjp(f, *args)
    return out, *pull(dout)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.once
def test_errors_of_sinks_are_those_of_plain_attention(dtype):
    """Out and all gradients err no more than plain attention in the same dtype, over many draws.

    Plain attention writes out the sinks as a column of logits.
    """
    squares = {_out: np.zeros(5), _column: np.zeros(5)}
    for seed in range(12):
        rng = np.random.default_rng(seed)
        args = draw(rng, dtype)
        q, k, v, sinks = args
        dout = jnp.asarray(rng.standard_normal((B, T, N, D)), dtype)
        dlse = np.zeros((B, T, N))
        true_grads = oracle.gradients(q, k, v, sinks=sinks, dout=dout, dlse=dlse)
        true_out, _ = oracle.attention(q, k, v, sinks=sinks)
        truth = [true_out, *(true_grads[name] for name in NAMES)]
        for f, square in squares.items():
            results = _out_and_gradients(f, args, dout)
            for n, (x, y) in enumerate(zip(results, truth, strict=True)):
                error = np.float64(x) - y
                square[n] += np.mean(error**2)
    ratio = np.sqrt(squares[_out] / squares[_column])
    assert (ratio < 1.3).all(), ratio


@pytest.mark.parametrize("gradient", few([False, True], [True]))
def test_sinks_take_no_memory(gradient):
    """A compiled call with sinks takes a few rows more than one without."""
    x = jax.ShapeDtypeStruct((1, 4096, 4, 64), jnp.float32)
    sinks = jax.ShapeDtypeStruct((4,), jnp.float32)

    def with_sinks(q, k, v, sinks):
        return dot_product_attention(q, k, v, sinks=sinks).sum()

    def without_sinks(q, k, v, sinks):
        return dot_product_attention(q, k, v).sum()

    more, fewer = (
        temp_bytes(jax.grad(f, (0, 1, 2, 3)) if gradient else f, (x, x, x, sinks))
        for f in (with_sinks, without_sinks)
    )
    rows = 4 * 4 * 4096
    assert more <= fewer + 8 * rows
