"""Choose power-of-two scales with which XLA:GPU can fuse the gradient's products in float16."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from memeff.chunked.fixed_max import largest_visible
from memeff.chunked.floats import power_of_two
from memeff.chunked.slicing import pin_layout
from memeff.masking import key_range
from memeff.problem import Operands, Problem


class Fp16Scales(NamedTuple):
    """What (5) and (6) are scaled by, powers of two, where they leave the epilogues of their products in float16."""

    # B K G T D, as the products want it; scaled by `column` so that its largest entry is below 2^16
    dout: Array
    column: Array  # B K D
    row: Array  # B K G T, such that draw / p times it is below 2^4
    serve: Array  # B K, of which the rows and keys are large enough for float16's exponents

    P = 2.0**11  # scales p


def fp16_scales(problem: Problem, operands: Operands, delta: Array, dout: Array) -> Fp16Scales:
    """11 bits, three more than bfloat16 has, are kept of what is not far below its bound: 2^29 times for dout, 2^25 for p,
    2^18 for draw / p. So float16 serves if no row of dout is smaller than that beside others, and no value 2^10 times
    smaller than another (draw / p is some 2^4 times smaller than its bound anyway).
    """
    size, v = (abs(x.astype(delta.dtype)) for x in (dout, operands.value))
    v = jnp.where(jnp.isfinite(v), v, 0).max(-1)  # b s k
    largest = size.sum(-1).transpose(0, 2, 3, 1) * largest_visible(problem, operands, v)
    bound = abs(problem.scale) * (largest + abs(delta))  # b k g t
    row = power_of_two(2.0**4 / bound)
    peak = size.max((1, 3), where=jnp.isfinite(size), initial=0)  # b k d
    column = power_of_two(2.0**15 / peak)
    half = (dout.astype(delta.dtype) * column[:, None, :, None]).astype(jnp.float16)
    rows = ~(abs(half).max(-1) < 2.0**-14) | (size.max(-1) == 0)  # b t k g
    # A power of two that stopped at 2^100 or 2^-100 did not bring what it scales into float16's
    # range.
    rows &= ~_out_of_range(bound * row, 2.0**4).transpose(0, 3, 1, 2)
    rows &= ~_out_of_range(peak * column, 2.0**15).any(-1)[:, None, :, None]
    T, S = operands.query.shape[1], operands.key.shape[1]
    first, end, _, _ = key_range(problem, problem.q_offset, 0, T - 1)
    v = v[:, max(0, first or 0) : S if end is None else min(S, end)]
    keys = (v >= v.max(1, keepdims=True) * 2.0**-10) | (v == 0)
    return Fp16Scales(
        pin_layout(half.transpose(0, 2, 3, 1, 4), 3), column, row, rows.all((1, 3)) & keys.all(1)
    )


def _out_of_range(x: Array, top: float) -> Array:
    return (x > top) | ((x < top / 2) & (x > 0))
