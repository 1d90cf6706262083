"""A sink is one more column of the softmax, without a key: the same numbers and derivatives, in every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.test_util import check_grads

from memeff import dot_product_attention

B, T, S, N, K, H, D = 2, 19, 23, 4, 2, 8, 5
IMPLEMENTATIONS = ("xla", "reference")


def draw(rng, dtype=np.float64, keys=S):
    shapes = (B, T, N, H), (B, keys, K, H), (B, keys, K, D), (N,)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


def call(q, k, v, sinks, **how):
    return dot_product_attention(
        q, k, v, sinks=sinks, return_residual=True, chunk_size=(8, 12), **how
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_derivative_of_sinks(implementation):
    """Both modes and two orders, through out and lse; also where the sink equals the lse of the keys."""
    with jax.enable_x64(True):
        q, k, v, sinks = draw(np.random.default_rng(0))
        f = functools.partial(call, implementation=implementation, is_causal=True)
        tie = jnp.zeros_like(q), k, v, jnp.zeros(N)  # row 0 sees one key, of logit 0
        for args in ((q, k, v, sinks), tie):
            check_grads(jax.jit(f), args, order=1, rtol=1e-6)
        check_grads(jax.jit(f), (q, k, v, sinks), order=2, rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_extreme_sinks(implementation, dtype):
    """-inf is no sink, one far above takes all, and neither makes NaN of a row that sees no key."""
    q, k, v, _ = draw(np.random.default_rng(1), dtype)
    sinks = jnp.array([-np.inf, -3e4, 3e4, 0.5], dtype)
    lengths = jnp.array([S, 0])
    dout, dlse = jnp.ones((B, T, N, D), dtype), jnp.ones((B, T, N))

    @jax.jit
    def run(q, k, v, sinks):
        f = functools.partial(call, key_value_seq_lengths=lengths, implementation=implementation)
        (out, lse), pull = jax.vjp(f, q, k, v, sinks)
        (_, without), pull_without = jax.vjp(functools.partial(f, sinks=None), q, k, v)
        of_lse = pull((0 * dout, dlse)), pull_without((0 * dout, dlse))
        return out, lse, pull((dout, dlse)), of_lse, without

    out, lse, grads, (of_lse, of_lse_without), without = jax.tree.map(
        np.float64, run(q, k, v, sinks)
    )
    arguments = dict(sinks=sinks, key_value_seq_lengths=lengths)
    true_out, true_lse = oracle.attention(q, k, v, **arguments)
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out, true_out, atol=tolerance)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(lse, without)  # of the keys alone
    assert (out[1] == 0).all() and np.isneginf(lse[1]).all() and (out[0, :, 2] == 0).all()
    true = oracle.gradients(q, k, v, **arguments, dout=dout, dlse=dlse)
    for name, x in zip(("query", "key", "value", "sinks"), grads, strict=True):
        np.testing.assert_allclose(x, true[name], atol=20 * tolerance, err_msg=name)
    # lse does not depend on the sink, however large
    for x, y in zip(of_lse, of_lse_without, strict=False):
        np.testing.assert_allclose(x, y, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_errors_of_sinks_are_those_of_plain_attention(dtype):
    """Over many draws, out and all gradients err no more than a column that is written out, in the same dtype."""

    def column(q, k, v, sinks):
        s = (
            jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, N // K, H), k).astype(jnp.float32)
            * H**-0.5
        )
        more = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(K, -1, 1, 1), (*s.shape[:-1], 1))
        p = jax.nn.softmax(jnp.concatenate([s, more], -1), -1)[..., :-1].astype(q.dtype)
        return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, N, D)

    ours = lambda *args: call(*args)[0]

    @jax.jit
    def both(args, dout):
        def run(f):
            out, pull = jax.vjp(f, *args)
            return out, *pull(dout)

        return run(ours), run(column)

    square = np.zeros((2, 5))
    for seed in range(12):
        rng = np.random.default_rng(seed)
        args = draw(rng, dtype)
        dout = jnp.asarray(rng.standard_normal((B, T, N, D)), dtype)
        true = oracle.gradients(*args[:3], sinks=args[3], dout=dout, dlse=np.zeros((B, T, N)))
        out, _ = oracle.attention(*args[:3], sinks=args[3])
        true = [out, *(true[name] for name in ("query", "key", "value", "sinks"))]
        for i, found in enumerate(both(args, dout)):
            errors = (np.float64(x) - y for x, y in zip(found, true, strict=True))
            square[i] += [np.mean(x**2) for x in errors]
    ratio = np.sqrt(square[0] / square[1])
    assert (ratio < 1.3).all(), ratio


@pytest.mark.parametrize("gradient", [False, True])
def test_sinks_take_no_memory(gradient):
    """Compiled: a few rows more than without."""
    shapes = (1, 4096, 4, 64), (1, 4096, 4, 64), (1, 4096, 4, 64), (4,)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]

    def temp(with_sinks):
        def f(q, k, v, sinks):
            return (
                dot_product_attention(q, k, v, sinks=sinks if with_sinks else None)
                .astype(jnp.float32)
                .sum()
            )

        run = jax.grad(f, (0, 1, 2, 3)) if gradient else f
        return jax.jit(run).lower(*args).compile().memory_analysis().temp_size_in_bytes

    rows = 4 * 4 * 4096
    assert temp(True) <= temp(False) + 8 * rows
