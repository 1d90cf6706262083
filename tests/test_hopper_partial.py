"""Partial results of the Hopper kernels: out as two arrays, to merge with that of other keys."""

import jax
import jax.numpy as jnp
import numpy as np
from hopper_cases import bf16, draw, f32, interpreted, needs_kernels, small

from memeff.pallas.hopper import implementation
from memeff.problem import Operands, Problem, Schedule

pytestmark = needs_kernels


def test_partial_out_is_not_rounded_to_16_bits():
    """It differs from out by what rounding takes: half of the last place at most."""
    args = draw(bf16, small(T=70, S=130))
    operands = Operands(*map(jnp.asarray, args))
    problem = Problem(right=0, q_offset=60, scale=args[0].shape[-1] ** -0.5)

    @jax.jit
    def both(operands):
        run = implementation.forward
        whole, _ = run(problem, Schedule(), operands)
        return whole, *run(problem, Schedule(partial_out=True), operands)

    with interpreted():
        whole, (high, low), lse = jax.tree.map(np.asarray, both(operands))
    np.testing.assert_array_equal(high, whole)
    partial = high.astype(f32) + low.astype(f32)
    assert np.isfinite(lse.high).all()
    taken = np.abs(partial - whole.astype(f32))
    assert (taken > 0).mean() > 0.9
    assert (taken <= 1.01 * 2.0**-8 * np.abs(partial)).all()  # half of the last place
