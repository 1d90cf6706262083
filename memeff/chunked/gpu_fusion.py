"""Choose power-of-two scales with which XLA:GPU can fuse the gradient's products in float16.

This serves bfloat16 where no kernel runs: other GPUs, heads above 128, JAX before 0.11. On an H100
(1 x 8192, 16 heads, bfloat16) forward and gradient took 7.1 ms (H = 64, causal), 11.1 ms (H = 128,
full) and 12.0 ms (H = 256, causal); fused without float16 9.5, 14.7 and 14.8 ms; step by step 9.6,
17.5 and 14.1 ms. In float32 the fused loop took 20.7 ms (H = 128, full), step by step 27.9 ms.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from memeff.chunked.fixed_max import largest_seen
from memeff.chunked.floats import power_of_two
from memeff.chunked.slicing import pin_layout
from memeff.problem import Operands, Problem, Schedule, split_axis


class Fp16Scales(NamedTuple):
    """Power-of-two scales that let p and ds / p of (5) and (6) be stored as float16."""

    dout: Array  # B K G T D, float16: dout times `column`, laid out for its product
    column: Array  # B K D, brings the largest entry of a column of dout below 2^16
    row: Array  # B K G T, brings ds / p below 2^4
    in_range: Array  # B K, True where rows and keys are large enough for float16's exponents

    P = 2.0**11  # scales p


class RowBounds(NamedTuple):
    """Bounds on the numbers of a row in the gradient."""

    values: tuple[Array, Array]  # B K G|1 T|1, the largest and the smallest |v| above 0 it sees
    ds_by_p: Array  # B K G T, of |ds / p|


def row_bounds(
    problem: Problem, schedule: Schedule, operands: Operands, delta: Array, dout: Array
) -> RowBounds:
    """Bound the numbers of each row, for `delta` [B, K, G, T] and `dout` [B, T, N, D]."""
    v = abs(operands.value.astype(delta.dtype))
    v = jnp.where(jnp.isfinite(v), v, 0).max(-1)  # b s k
    minus_v = -jnp.where(v == 0, jnp.inf, v)
    most, minus_least = largest_seen(problem, schedule, operands, (v, minus_v))
    most = jnp.maximum(most, 0)  # of a row that sees no key it is -inf
    size = abs(split_axis(dout.astype(delta.dtype), 2, operands.shape.K))
    row_size = size.sum(-1).transpose(0, 2, 3, 1)  # b k g t
    if problem.dropout is not None:
        row_size = row_size / (1 - problem.dropout.rate)
    return RowBounds((most, -minus_least), row_size * most + abs(delta))


def fp16_scales(operands: Operands, bounds: RowBounds, dout: Array) -> Fp16Scales:
    """Return the scales for `dout` [B, T, N, D].

    float16 keeps 11 bits, three more than bfloat16, of a number that is not far below its bound:
    2^29 times for dout, 2^25 for p, 2^18 for ds / p. So it serves if no row of dout is that much
    smaller than another, and no value 2^10 times smaller than another. (ds / p is some 2^4 times
    smaller than its bound anyway.)
    """
    bound = bounds.ds_by_p
    dtype = bound.dtype
    dout = split_axis(dout, 2, operands.shape.K)  # b t k g d
    size = abs(dout.astype(dtype))
    row = power_of_two(2.0**4 / bound)
    peak = size.max((1, 3), where=jnp.isfinite(size), initial=0)  # b k d
    column = power_of_two(2.0**15 / peak)
    scaled = dout.astype(dtype) * column[:, None, :, None]
    scaled = scaled.astype(jnp.float16)  # b t k g d
    tiny = abs(scaled).max(-1) < 2.0**-14
    rows = ~tiny | (size.max(-1) == 0)  # b t k g
    # A power of two that was clipped to 2^100 or 2^-100 leaves its product out of float16's range.
    outside = _out_of_range(bound * row, 2.0**4)  # b k g t
    rows &= ~outside.transpose(0, 3, 1, 2)
    outside = _out_of_range(peak * column, 2.0**15).any(-1)  # b k
    rows &= ~outside[:, None, :, None]
    most, least = bounds.values
    values = least.min((2, 3)) >= 2.0**-10 * most.max((2, 3))  # b k
    scaled = pin_layout(scaled.transpose(0, 2, 3, 1, 4), 3)  # b k g t d
    return Fp16Scales(scaled, column, row, rows.all((1, 3)) & values)


def _out_of_range(x: Array, top: float) -> Array:
    """Return whether x is above `top`, or below half of it and not 0."""
    return (x > top) | ((x < top / 2) & (x > 0))
