"""Collect the functions of the chunked implementation, in plain JAX, and describe it in words."""

import dataclasses
import math

from memeff.chunked.backward import backward, logit_param_gradients
from memeff.chunked.eligible import fixed_max_applies, one_tile_with_bias, uses_gpu_fusion
from memeff.chunked.few_queries import reads_in_place
from memeff.chunked.fixed_max import SAMPLES
from memeff.chunked.forward import forward
from memeff.chunked.schedule import count_tiles, tile_groups
from memeff.chunked.tangent import tangent
from memeff.problem import Operands, Problem, Schedule

__all__ = ["backward", "describe", "forward", "logit_param_gradients", "tangent"]


def describe(problem: Problem, schedule: Schedule, operands: Operands) -> str:
    """Describe the tiles, the heads at a time and the softmax of a call, in words for users."""
    fixed = fixed_max_applies(problem, schedule, operands)
    fused = uses_gpu_fusion(problem, schedule, operands)
    forward_size = schedule.fixed_max_chunk_size if fixed else None
    gradient_size = schedule.gpu_fused_chunk_size if fused else None
    tiles = _describe_tiles(problem, schedule, operands, forward_size, 1)
    gradient = _describe_tiles(problem, schedule, operands, gradient_size, 0)
    if gradient != tiles:
        tiles += f"; in the gradient {gradient}"
    shape = operands.shape
    if reads_in_place(problem, schedule, operands):
        return (
            f"few queries: keys are read in place, in splits of {schedule.split_keys}, all "
            f"{shape.B * shape.N} heads at a time; in the gradient {gradient}"
        )
    b, k = schedule.heads_of_tile(shape.B, shape.K)
    softmax = "a running maximum"
    if fixed and not one_tile_with_bias(schedule, operands):
        softmax = "a precomputed bound on each row's maximum; rows where it fails are redone"
        if operands.logit_params.bias is not None:
            softmax = f"each row's maximum at {SAMPLES} keys; rows where it fails are redone"
    return (
        f"{tiles}; {b * k * shape.G} of {shape.B * shape.N} heads at a time; softmax with {softmax}"
    )


def _describe_tiles(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    size: tuple[int, int] | None,
    long_axis: int,
) -> str:
    """Describe tiles of `size`, merged along a dim; None: of the default size, never merged."""
    t, c = size or schedule.chunk_size
    schedule = dataclasses.replace(schedule, chunk_size=(t, c))
    visited, total = count_tiles(problem, (t, c), operands)
    if visited is None:
        return f"tiles of {t} x {c} logits, visited between bounds that are computed at run time"
    text = f"tiles of {t} x {c} logits, {visited} of {total} visited"
    groups = tile_groups(problem, schedule, operands, long_axis if size else None)
    sizes = [(rows, cols) for (_, rows, cols), _ in groups]
    rows, cols = max(sizes, key=math.prod, default=(t, c))
    if rows * cols > t * c:
        text += f", merged into tiles of up to {rows} x {cols}"
    return text
