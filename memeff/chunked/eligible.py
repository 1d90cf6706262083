"""Decide whether a call can bound each row's maximum beforehand, and fuse its gradient on GPUs."""

import jax.numpy as jnp
import numpy as np

from memeff.chunked.schedule import has_array_bounds, has_elementwise_mask
from memeff.logits import logits_linear, logits_plain
from memeff.masking import key_range
from memeff.problem import Operands, Problem, Schedule


def fixed_max_applies(problem: Problem, schedule: Schedule, operands: Operands) -> bool:
    """Return whether the forward with a bound on each row's maximum is enabled and possible.

    On CPUs it is for plain logits only.
    """
    on_gpu = schedule.gpu_fused_chunk_size is not None
    if schedule.fixed_max_chunk_size is None or not (on_gpu or logits_plain(problem, operands)):
        return False
    return max_can_be_bounded(problem, operands)


def max_can_be_bounded(problem: Problem, operands: Operands) -> bool:
    """Return whether the logits of each row can be bounded before they are computed.

    The call must have no functions of the user, and a dtype with 8 bits of exponent. Either every
    row must see a key, or arrays hide pairs, which `largest_seen` reads. With a bias, the logits of
    some keys take the place of a bound.
    """
    functions = problem.score_fn, problem.mask_fn, problem.qk_transform
    if any(f is not None for f in functions):
        return False
    if has_array_bounds(problem, operands):
        return False
    if operands.query.dtype not in (jnp.bfloat16, jnp.float32):
        return False
    T = operands.query.shape[1]
    S = operands.key.shape[1]
    D = operands.value.shape[-1]
    if T == 0 or not isinstance(D, int):  # jax.export may leave D symbolic
        return False
    if has_elementwise_mask(problem, operands):
        return S > 0
    ends = np.array([0, T - 1])  # if both see a key, so do the rows between them
    start, end, _, _ = key_range(problem, problem.q_offset, ends, ends)
    start = 0 if start is None else np.maximum(start, 0)
    end = S if end is None else np.minimum(end, S)
    return bool(np.all(start < end))


def one_tile_with_bias(schedule: Schedule, operands: Operands) -> bool:
    """Return whether a call with a bias is one tile of the forward with a precomputed maximum.

    To compute the true maximum of one tile is faster than a sample, a check, and rows that are
    redone.
    """
    size = schedule.fixed_max_chunk_size
    same = size == schedule.gpu_fused_chunk_size == (operands.shape.T, operands.shape.S)
    return same and operands.logit_params.bias is not None


def uses_gpu_fusion(problem: Problem, schedule: Schedule, operands: Operands) -> bool:
    """Return whether the gradient is fused into its products: on GPUs, with linear logits."""
    fused = schedule.gpu_fused_chunk_size is not None
    params = operands.logit_params
    linear = logits_linear(problem) and params.soft_cap is None
    if params.bias is not None and params.scale is not None:
        return False
    return fused and linear and fixed_max_applies(problem, schedule, operands)


def runs_by_blocks(problem: Problem, schedule: Schedule, operands: Operands) -> bool:
    """Return whether whole loops run for one block of heads after the other: on GPUs, if plain.

    Otherwise a block would copy its part of arrays T x S.
    """
    plain = schedule.head_block is not None and logits_plain(problem, operands)
    return plain and uses_gpu_fusion(problem, schedule, operands)
