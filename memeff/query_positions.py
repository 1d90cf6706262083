"""Refuse queries at positions for which a mask has no params. Under jit give NaN for them.

JAX reads the last entry of an array for an index beyond its end, and counts a negative index from
the end.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from memeff.inputs import known_values
from memeff.problem import Operands, Problem
from memeff.user_functions import COUNTED, positions_held


def check_query_positions(
    mask: tuple[Any, Any], q_offset: Any, T: Any, lengths: Any, right: int | None
) -> int | None:
    """Return for how many positions of queries a mask has params, or None if all queries have some.

    `mask` is mask_fn and mask_params. `T` is the number of queries in the whole call, `lengths` how
    many of these are valid or None, and `right` the right side of the window.

    Raises: ValueError if a query is known to have no params.
    """
    count = positions_held(*mask, "Q")
    if count is None:
        return None
    first = known_values(q_offset)
    if first is None:
        return count
    if first.min() < 0 and _may_see_keys_before_0(right):
        raise ValueError(
            f"mask_fn has params for query positions from 0 on, and q_offset is {first.min()}. "
            "Pass q_offset >= 0, or is_causal=True: then a query before position 0 sees no key."
        )
    rows = T if lengths is None else known_values(lengths)
    if rows is None or not isinstance(T, int):
        return count
    end = int((first.astype(np.int64) + rows).max())  # a sum of 8 bits would wrap
    if end > count:
        raise ValueError(
            f"mask_fn has params for Q={count} {COUNTED['Q']}, but this call has Q={end}."
        )
    return None


def nan_without_params(problem: Problem, operands: Operands, results: Any) -> Any:
    """Return the results [B, ...], with NaN for sequences that have a query without params."""
    count = problem.mask_positions
    if count is None:
        return results
    T = operands.shape.T if problem.whole is None else problem.whole.T
    rows = T if operands.q_lengths is None else operands.q_lengths
    first = problem.q_offset if operands.q_offset is None else operands.q_offset
    lacking = first + rows > count
    if _may_see_keys_before_0(problem.right):
        lacking |= first < 0
    return nan_where(jnp.broadcast_to(lacking, operands.shape.B), results)


def _may_see_keys_before_0(right: int | None) -> bool:
    """Return True if a query at a negative position may see a key, whose position is at least 0."""
    return right is None or right > 0


def nan_where(wrong: Array, results: Any) -> Any:
    """Return the results [B, ...] with NaN for sequences that are `wrong` [B]."""

    def mark(x: Array) -> Array:
        return jnp.where(wrong.reshape(-1, *[1] * (x.ndim - 1)), jnp.nan, x)

    return jax.tree.map(mark, results)
