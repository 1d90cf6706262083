"""Decide whether a call can bound each row's maximum beforehand, and fuse its gradient on GPUs."""

import jax.numpy as jnp
import numpy as np

from memeff.chunked.schedule import has_array_bounds
from memeff.logits import logits_plain
from memeff.masking import key_range
from memeff.problem import Operands, Problem, Schedule


def fixed_max_applies(problem: Problem, schedule: Schedule, operands: Operands) -> bool:
    """Return whether the forward with a bound on each row's maximum is enabled and possible."""
    return schedule.fixed_max_chunk_size is not None and max_can_be_bounded(problem, operands)


def max_can_be_bounded(problem: Problem, operands: Operands) -> bool:
    """Return whether the logits of each row can be bounded before they are computed.

    This takes plain logits, a dtype with 8 bits of exponent, and a key for every row.
    """
    if not logits_plain(problem, operands) or has_array_bounds(problem, operands):
        return False
    if operands.query.dtype not in (jnp.bfloat16, jnp.float32):
        return False
    T = operands.query.shape[1]
    S = operands.key.shape[1]
    if T == 0:
        return False
    ends = np.array([0, T - 1])  # if both see a key, so do the rows between them
    start, end, _, _ = key_range(problem, problem.q_offset, ends, ends)
    start = 0 if start is None else np.maximum(start, 0)
    end = S if end is None else np.minimum(end, S)
    return bool(np.all(start < end))


def uses_gpu_fusion(problem: Problem, schedule: Schedule, operands: Operands) -> bool:
    """Return whether the gradient is fused into its products: on GPUs, with plain logits."""
    fused = schedule.gpu_fused_chunk_size is not None
    return fused and fixed_max_applies(problem, schedule, operands)
