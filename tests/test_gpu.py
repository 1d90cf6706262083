"""Tests on a GPU: every case against the oracle, the fixed reference, and several GPUs.

The fixed reference is tested where it serves, and bits must repeat beside other work.
test_gpu_hopper.py, test_gpu_hopper_tangent.py and test_gpu_long.py have more. All run with

    python -m pytest -m gpu
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SINGLES
from conftest import assert_as_good, assert_case, run_cases
from gpu_calls import normal_arrays, skip_without_kernels
from jax.sharding import AxisType, NamedSharding

import memeff
from memeff.chunked import implementation as chunked
from memeff.problem import Operands, Problem, Schedule

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cases(dtype):
    # float32 products in float32, here and in the plain computation
    with jax.default_matmul_precision("highest"):
        for name, result in run_cases(SINGLES, dtype).items():
            assert_case(result, name, dtype)


@pytest.mark.parametrize("length", [4096 - 3, 4096 + 5])
@pytest.mark.parametrize("causal", [False, True])
def test_sampled_rows_at_default_tiles(length, causal):
    """64 rows of out and lse are right at lengths that no tile divides.

    The call has bfloat16 and grouped heads. The rows are computed again in float64.
    """
    args = normal_arrays(*[(1, length, heads, 128) for heads in (4, 2, 2)])
    attend = functools.partial(memeff.dot_product_attention, is_causal=causal, return_residual=True)
    results = jax.jit(attend)(*args)
    rows = np.random.default_rng(0).choice(length, 64, replace=False)
    q, k, v, out, lse = (np.asarray(x, np.float64)[0] for x in (*args, *results))
    for n in range(4):
        s = q[rows, n] @ k[:, n // 2].T / np.sqrt(128)
        if causal:
            s = np.where(np.arange(length) <= rows[:, None], s, -np.inf)
        m = s.max(-1, keepdims=True)
        e = np.exp(s - m)
        l = e.sum(-1, keepdims=True)
        true_out = e @ v[:, n // 2] / l
        true_lse = (m + np.log(l))[:, 0]
        np.testing.assert_allclose(lse[rows, n], true_lse, atol=1e-5)
        # out is rounded to 8 bits, and so is every probability before its product
        np.testing.assert_allclose(out[rows, n], true_out, atol=2.0**-8 * abs(v).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 10, 30])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_is_as_good_as_step_by_step(causal, size, dtype):
    """The fused gradient errs at most 1.5 times as much as the general one.

    Its cotangents leave their product's epilogue, after a forward that sums rounded probabilities.
    Logits go up to some `size` squared.
    """
    B, T, K, H = 1, 2048, 2, 64
    q, k, v, dout = normal_arrays(
        (B, T, K, H), (B, T, K, H), (B, T, K, H), (B, K, 1, T, H), dtype=jnp.float32
    )
    arrays = [x.astype(dtype) for x in (q * size, k * size, v, dout)]
    problem = Problem(right=0 if causal else None, scale=H**-0.5, precision="highest")
    general = Schedule((512, 512))
    fused = Schedule((512, 512), (512, 512), (512, 512))

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(schedule, q, k, v, dout):
        operands = Operands(q, k, v)
        out, lse = chunked.forward(problem, schedule, operands, "gradient")
        return chunked.backward(problem, schedule, operands, out, lse, dout, None)[:3]

    q, k, v, dout = (np.asarray(x, np.float64) for x in arrays)
    dout = dout[:, :, 0]
    s = np.einsum("btkh,bskh->bkts", q, k) * H**-0.5
    if causal:
        seen = np.tril(np.ones((T, T), bool))
        s = np.where(seen, s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bktd,bskd->bkts", dout, v)
    delta = (p * dp).sum(-1, keepdims=True)
    ds = p * (dp - delta) * H**-0.5
    true = (
        np.einsum("bkts,bskh->btkh", ds, k),
        np.einsum("bkts,btkh->bskh", ds, q),
        np.einsum("bkts,bktd->bskd", p, dout),
    )
    actual = gradients(fused, *arrays)
    baselines = gradients(general, *arrays)
    for name, x, baseline, exact in zip("qkv", actual, baselines, true, strict=True):
        assert_as_good(x, [baseline], exact, dtype, f"d{name}")


def test_250_runs_beside_other_work_are_equal_in_bits():
    q, k, v, do = normal_arrays(*[(1, 2048, 4, 64)] * 4)
    other = jax.random.normal(jax.random.key(9), (2048, 2048))
    busy = jax.jit(lambda x: x @ x)

    @jax.jit
    def both(q, k, v, do):
        attend = functools.partial(memeff.dot_product_attention, is_causal=True)
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(do)

    first = jax.tree.map(np.asarray, both(q, k, v, do))
    for _ in range(250):
        busy(other)
        for a, b in zip(first, both(q, k, v, do), strict=True):
            assert (a == np.asarray(b)).all()


def test_fall_back_runs_on_the_gpu():
    """The result is right where a key makes the bound useless, and the same in vmap.

    The key is one that the queries do not feel.
    """
    q, k, v = normal_arrays(*[(1, 700, 2, 64)] * 3, dtype=jnp.float32)
    q = q.at[..., 0].set(0)
    k = k.at[:, 5].set(0)
    k = k.at[:, 5, :, 0].set(1e5)

    def attend(q):
        return memeff.dot_product_attention(q, k, v)

    with jax.default_matmul_precision("highest"):
        out = attend(q)
        mapped = jax.vmap(attend)(jnp.stack([q, q]))
        true = memeff.dot_product_attention(q, k, v, implementation="reference")
    np.testing.assert_allclose(out, true, atol=2e-6)
    np.testing.assert_allclose(mapped[1], true, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("limit", [None, "256MiB"])
def test_plan_and_limit(causal, limit):
    """Planned bytes are right to a factor of two, and a limit is kept."""
    x = jax.ShapeDtypeStruct((1, 8192, 8, 128), jnp.bfloat16)
    attend = functools.partial(memeff.dot_product_attention, is_causal=causal, memory_limit=limit)
    plan = memeff.plan(x, x, x, is_causal=causal, memory_limit=limit)

    def gradient(q, k, v, dout):
        _, pull = jax.vjp(attend, q, k, v)
        return pull(dout)

    forward_program = jax.jit(attend).lower(x, x, x)
    gradient_program = jax.jit(gradient).lower(x, x, x, x)
    for planned, lowered in (
        (plan.forward_bytes, forward_program),
        (plan.gradient_bytes, gradient_program),
    ):
        taken = lowered.compile().memory_analysis().temp_size_in_bytes
        # kernels: nothing for a forward, and XLA has 24 bytes
        assert 0.5 * (taken - 64) <= planned <= 2 * taken
        assert limit is None or taken <= 256 * 2**20


def test_what_float16_cannot_hold_goes_the_general_way():
    """Values have right gradients if only queries with tiny cotangents see them.

    The cotangents of these queries are 2^-40 of those of earlier queries.
    """
    q, k, v, dout = normal_arrays(*[(1, 2048, 2, 64)] * 4)
    tiny = dout.at[:, 1024:].multiply(2.0**-40)

    @jax.jit
    def gradients(dout):
        attend = functools.partial(memeff.dot_product_attention, is_causal=True)
        _, pull = jax.vjp(attend, q, k, v)
        return pull(dout)

    def late_dv(dout):
        _, _, dv = gradients(dout)
        return np.asarray(dv[:, 1024:], np.float32)

    expected = late_dv(dout)
    np.testing.assert_allclose(late_dv(tiny) * 2.0**40, expected, atol=0.02 * abs(expected).max())


# ---- several GPUs


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("count", [2, 4])
def test_gpus_equal_one(count, axis_type, implementation):
    """Out and gradients are those of one device, and lie where the query does.

    Batch is sharded over devices, then heads.
    """
    if jax.device_count() < count:
        there = "is 1" if jax.device_count() == 1 else f"are {jax.device_count()}"
        pytest.skip(f"wants {count} GPUs, and here {there}")
    if implementation == "pallas":
        skip_without_kernels()
    args = normal_arrays(*[(4, 1000, n, 64) for n in (8, 4, 4, 8)])
    query, key, value, _ = args
    attend = functools.partial(
        memeff.dot_product_attention, is_causal=True, implementation=implementation
    )

    @jax.jit
    def both(q, k, v, do):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(do)

    alone = jax.tree.map(np.asarray, both(*args))
    mesh = jax.make_mesh((count,), ("x",), axis_types=(getattr(AxisType, axis_type),))
    # see the limits in README.md
    gathered = implementation == "xla" and axis_type == "Auto"
    for spec in (jax.P("x"), jax.P(None, None, "x")):
        sharding = NamedSharding(mesh, spec)
        with jax.set_mesh(mesh):
            placed = [jax.device_put(x, sharding) for x in args]
            together = both(*placed)
        for x, y, like in zip(together, alone, (query, query, key, value), strict=True):
            assert x.shape == like.shape
            assert gathered or x.sharding.is_equivalent_to(placed[0].sharding, 4)
            if implementation == "pallas":
                np.testing.assert_array_equal(np.asarray(x), y)
            else:  # tiles differ
                single = np.asarray(x, np.float32)
                np.testing.assert_allclose(single, np.asarray(y, np.float32), atol=0.03)
