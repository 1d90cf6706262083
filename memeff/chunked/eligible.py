"""Decide whether a call can use a fixed bound on each row's maximum, and the fused gradient on GPUs."""

import jax
import jax.numpy as jnp
import numpy as np

from memeff.chunked.schedule import has_traced_bounds
from memeff.masking import key_range
from memeff.problem import Operands, Problem


def fixed_max_applies(problem: Problem, operands: Operands) -> bool:
    """Where it is wanted and can be had."""
    return problem.fixed_chunk_size is not None and max_can_be_bounded(problem, operands)


def max_can_be_bounded(problem: Problem, operands: Operands) -> bool:
    """Can a row's logits be bounded beforehand? With 8 bits of exponent, plain logits, and a key for every row."""
    terms = operands.terms._replace(sinks=None)
    extras = (*problem.extras, *jax.tree.leaves(terms), operands.mask, operands.q_segments)
    plain = all(x is None for x in extras) and not has_traced_bounds(operands)
    wide = operands.query.dtype in (jnp.bfloat16, jnp.float32)
    T, S = operands.query.shape[1], operands.key.shape[1]
    if not (plain and wide and T > 0):
        return False
    ends = np.array([0, T - 1])  # if one of them sees a key, so do the rows between
    lo, hi, _, _ = key_range(problem, problem.q_offset, ends, ends)
    lo, hi = 0 if lo is None else np.maximum(lo, 0), S if hi is None else np.minimum(hi, S)
    return bool(np.all(lo < hi))


def uses_gpu_fusion(problem: Problem, operands: Operands) -> bool:
    """On GPUs, with plain logits."""
    return problem.fused_chunk_size is not None and fixed_max_applies(problem, operands)
