"""Test the fused backward (memeff/chunked/gpu_fusion.py and backward.py), forced on a CPU.

GPUs take it for plain logits. In bfloat16 it goes through float16 (half precision), and a check
makes it exact for every input. test_fused_tiles.py tests how it cuts a call into tiles and blocks.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_as_good, few
from small_calls import assert_bits

from memeff.chunked import fixed_max, gpu_fusion, row_sums
from memeff.chunked import implementation as chunked
from memeff.problem import Operands, Problem, Schedule

pytestmark = pytest.mark.once

B, T, S, K, G, H, D = 2, 70, 90, 2, 2, 16, 11

FAR = (  # float16 does not serve
    "one row of dout 2^-40 beside others",
    "one value 10^9 beside others",
    "values from 1 to 2^-15",
)
NEAR = (
    "ordinary",
    "rows of dout from 1 to 2^-20",
    "tiny dout",
    "huge dout",
    "rows of dout that are 0",
    "values from 1 to 2^-6",
    "a value that is 0",
    "logits of 10^3",
)


def draw(name: str, dtype=jnp.bfloat16):
    """Return query, key, value and dout with the named property.

    Their shapes are [B, T, N, H], [B, S, K, H], [B, S, K, D] and [B, K, G, T, D].
    """
    rng = np.random.default_rng(3)
    q = rng.standard_normal((B, T, K * G, H))
    k = rng.standard_normal((B, S, K, H))
    v = rng.standard_normal((B, S, K, D))
    dout = rng.standard_normal((B, K, G, T, D))
    match name:
        case "rows of dout from 1 to 2^-20":
            dout *= 2.0 ** -rng.integers(0, 21, (B, K, G, T, 1))
        case "tiny dout":
            dout *= 1e-20
        case "huge dout":
            dout *= 1e20
        case "rows of dout that are 0":
            dout[:, :, :, ::3] = 0
        case "values from 1 to 2^-6":
            v *= 2.0 ** -rng.integers(0, 7, (B, S, K, 1))
        case "values from 1 to 2^-15":
            v *= 2.0 ** -rng.integers(0, 16, (B, S, K, 1))
        case "a value that is 0":
            v[1, 7] = 0
        case "logits of 10^3":
            q *= 20
            k *= 12
        case "one row of dout 2^-40 beside others":
            dout[0, :, :, -1] *= 2.0**-40  # in causal order only this row sees the last key
        case "one value 10^9 beside others":
            v[1, 3] *= 1e9
        case "ordinary":
            pass
    return [jnp.asarray(x, dtype) for x in (q, k, v, dout)]


PROBLEMS = {
    "full": Problem(scale=H**-0.5),
    "causal": Problem(scale=H**-0.5, right=0, q_offset=S - T),
    "window": Problem(scale=H**-0.5, left=30, right=10, q_offset=3),
}
PROBLEMS["causal merged"] = PROBLEMS["causal"]


def make_schedule(pattern: str, fused: bool = True) -> Schedule:
    return Schedule(
        chunk_size=(24, 32),
        fixed_max_chunk_size=(16, 16),
        gpu_fused_chunk_size=(16, 16) if fused else None,
        max_merged_logits=4096 if pattern == "causal merged" else 0,
    )


@functools.cache
def gradients(pattern: str, fused: bool, block=None):
    """Return a compiled function from (q, k, v, dout) to their gradients, fused or step by step.

    The forward is that of training. If fused, lse comes from the sums of rounded p, as on a GPU.
    """

    def run(q, k, v, dout):
        p = PROBLEMS[pattern]
        schedule = dataclasses.replace(make_schedule(pattern, fused), head_block=block)
        operands = Operands(q, k, v)
        forward = chunked.forward(p, schedule, operands, "gradient")
        return chunked.backward(p, schedule, operands, *forward, dout, None)[:3]

    return jax.jit(run)


@functools.cache
def compiled_forward(p: Problem, schedule: Schedule, lse_for: str = "caller"):
    """Return the forward of a problem, compiled once for all draws."""
    return jax.jit(lambda operands: chunked.forward(p, schedule, operands, lse_for))


@functools.cache
def compiled_check(pattern: str):
    """Return the compiled check: whether float16 serves (q, k, v, dout)."""

    def run(q, k, v, dout):
        p = PROBLEMS[pattern]
        operands = Operands(q, k, v)
        out, _ = chunked.forward(p, make_schedule(pattern), operands)
        delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
        dout = dout.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, D)
        bounds = gpu_fusion.row_bounds(p, make_schedule(pattern), operands, delta, dout)
        return gpu_fusion.fp16_scales(operands, bounds, dout).in_range.all()

    return jax.jit(run)


def true_gradients(pattern: str, q, k, v, dout):
    """Return the oracle's gradients of query, key and value, in their shapes."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    p = PROBLEMS[pattern]
    grads = oracle.gradients(
        q,
        k,
        v,
        scale=H**-0.5,
        q_offset=p.q_offset,
        local_window_size=(p.left, p.right),
        dout=np.moveaxis(dout, 3, 1).reshape(B, T, K * G, D),
        dlse=np.zeros((B, T, K * G)),
    )
    return grads["query"], grads["key"], grads["value"]


PAIRS = itertools.product(("full", "causal merged", "causal", "window"), ("bfloat16", "float32"))
FAST = ("causal merged", "bfloat16"), ("full", "float32")


@pytest.mark.parametrize(("pattern", "dtype"), few(PAIRS, FAST))
def test_fused_is_as_good(pattern, dtype):
    """The fused gradient is as good as the gradient step by step, the baseline here.

    In bfloat16 its intermediate numbers keep 11 bits, in float32 all.
    """
    names = [*NEAR, *FAR]
    # XLA:CPU rounds scale * raw - lse once here, twice elsewhere; for GPUs see test_gpu.py.
    if dtype == "float32":
        names.remove("logits of 10^3")
    for name in names:
        arrays = draw(name, dtype)
        if dtype != "float32":
            serves = bool(compiled_check(pattern)(*arrays))
            assert serves == (name in NEAR), name
        fused = gradients(pattern, True)(*arrays)
        general = gradients(pattern, False)(*arrays)
        truth = true_gradients(pattern, *arrays)
        for what, x, base, exact in zip(("dq", "dk", "dv"), fused, general, truth, strict=True):
            # dout is scaled by up to 1e20, and the law is about numbers near 1.
            size = max(np.abs(exact).max(), 1e-30)
            baselines = [np.float64(base) / size]
            assert_as_good(np.float64(x) / size, baselines, exact / size, dtype, f"{name}: {what}")


@pytest.mark.parametrize("name", ["ordinary", "logits of 10^3"])
def test_lse_for_the_gradient_is_as_good_as_a_probability(name):
    """The lse for the gradient errs by 2^-9 at most in bfloat16, and lse for the caller is exact.

    The error is largest where one key has all the probability.
    """
    q, k, v, _ = draw(name)
    operands = Operands(q, k, v)
    p = PROBLEMS["full"]
    _, exact = compiled_forward(p, make_schedule("full", False))(operands)
    _, for_caller = compiled_forward(p, make_schedule("full"))(operands)
    _, for_gradient = compiled_forward(p, make_schedule("full"), "gradient")(operands)
    np.testing.assert_allclose(for_caller.high, exact.high, rtol=1e-6, atol=1e-6)
    # The bound is the logarithm of 1 + 2^-9, and float32's rounding.
    assert abs(for_gradient.high - exact.high).max() <= 2.0**-9 * 1.01


# ---- numbers that float16 cannot hold


@functools.cache
def forward_and_backward(pattern: str):
    """Return the compiled forward, and the compiled backward by whether it is fused.

    Operands are arguments, not constants, so that all draws share the programs.
    """

    @jax.jit
    def forward(q, k, v):
        operands = Operands(q, k, v)
        return chunked.forward(PROBLEMS[pattern], make_schedule(pattern), operands, "gradient")

    def backward(fused, q, k, v, results, dout):
        schedule = make_schedule(pattern, fused)
        operands = Operands(q, k, v)
        return chunked.backward(PROBLEMS[pattern], schedule, operands, *results, dout, None)

    backwards = {fused: jax.jit(functools.partial(backward, fused)) for fused in (True, False)}
    return forward, backwards


@pytest.mark.parametrize("pattern", few(["full", "causal merged"], ["causal merged"]))
@pytest.mark.parametrize("name", FAR)
def test_what_float16_cannot_hold_goes_the_general_way(name, pattern):
    q, k, v, dout = draw(name)
    forward, backwards = forward_and_backward(pattern)
    results = forward(q, k, v)
    fused, general = (backwards[x](q, k, v, results, dout) for x in (True, False))
    assert_bits(fused, general)


@pytest.mark.slow
def test_the_check_is_needed(monkeypatch):
    """The last key would get no gradient at all without the check.

    Only one row sees it, and that row of dout is 2^-40 as large as the other rows.
    """
    arrays = draw(FAR[0])
    expected = gradients("causal", False)(*arrays)[2][0, -1]
    assert jnp.abs(expected).min() > 0
    monkeypatch.setattr("memeff.chunked.backward.all_true", lambda ok: True)
    p = PROBLEMS["causal"]
    schedule = make_schedule("causal")
    operands = Operands(*arrays[:3])
    sums, _ = fixed_max.fixed_max_forward(p, schedule, operands, "gradient")
    forward = row_sums.divide_sums(schedule, operands, sums, fixed_max.log_sum_exp_wide)
    unchecked = chunked.backward(p, schedule, operands, *forward, arrays[3], None)
    assert jnp.abs(unchecked.value[0, -1]).max() == 0


@pytest.mark.parametrize("number", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["query", "key", "value", "dout"])
def test_what_is_not_finite_reaches_the_same_gradients(which, number):
    """NaN and inf reach the same gradients in the fused backward as step by step.

    dv is compared only where no lse is NaN. If lse of a row is NaN, p of the row is NaN for all
    keys of a masked tile.
    """
    q, k, v, dout = draw("ordinary")
    match which:
        case "query":
            q = q.at[1, 20, 1, 3].set(number)
        case "key":
            k = k.at[1, 60, 0, 3].set(number)
        case "value":
            v = v.at[1, 7, 0, 2].set(number)
        case "dout":
            dout = dout.at[1, 0, 1, 20, 3].set(number)
    fused = gradients("causal merged", True)(q, k, v, dout)
    general = gradients("causal merged", False)(q, k, v, dout)
    compared = 3 if which in ("value", "dout") else 2
    for x, y in list(zip(fused, general, strict=True))[:compared]:
        np.testing.assert_array_equal(jnp.isfinite(x), jnp.isfinite(y))


def test_hidden_values_change_no_bit():
    """Values of keys that no row sees change no bit: neither a bound nor the check reads them."""
    q, k, v, dout = draw("ordinary")
    p = dataclasses.replace(PROBLEMS["causal"], q_offset=0)  # keys from T on are hidden
    schedule = make_schedule("causal")

    @jax.jit
    def run(v):
        operands = Operands(q, k, v)
        forward = chunked.forward(p, schedule, operands)
        return chunked.backward(p, schedule, operands, *forward, dout, None)[:3]

    for number in (1e30, np.nan, np.inf):
        changed = v.at[:, T:].set(number)
        assert_bits(run(v), run(changed))


def test_under_vmap_one_answer_for_the_batch():
    """The check gives one answer for the whole batch under vmap, so that `cond` stays a branch."""
    arrays = [jnp.stack([a, b]) for a, b in zip(draw("ordinary"), draw(FAR[0]), strict=True)]
    mapped = jax.jit(jax.vmap(gradients("causal merged", True)))
    jaxpr = str(jax.make_jaxpr(mapped)(*arrays))
    assert "cond[" in jaxpr
    results = mapped(*arrays)
    for n in (0, 1):
        general = gradients("causal merged", False)(*(x[n] for x in arrays))
        for x, y in zip(results, general, strict=True):
            np.testing.assert_allclose(np.float32(x[n]), np.float32(y), atol=0.05)
