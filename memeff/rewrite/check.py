"""Compare a function with its rewritten form on given arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memeff.rewrite.scope import Scope
from memeff.units import format_bytes

LARGEST = 2**32  # bytes of the logits of one attention that the comparison may compute
# The largest difference, relative to the largest number of an array, that counts as rounding of a
# whole model. A wrong mask changes results by much more.
LIMITS = {"float64": 1e-9, "float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}

Function = Callable[..., Any]


def check_size(scope: Scope) -> None:
    """Refuse a comparison whose original computes too many logits."""
    for part in scope.scopes:
        for replacement in part.replaced.values():
            size = math.prod(replacement.recipe.sizes) * 4
            if size > LARGEST:
                raise ValueError(
                    f"check=True runs the original too, whose logits take {format_bytes(size)} in "
                    "one place. Check on shorter arguments; the rewriting is the same for each "
                    "length."
                )


def compare(original: Function, rewritten: Function, arrays: Sequence[Any]) -> None:
    """Raise if results or gradients of two functions of `arrays` differ by more than rounding."""
    before = jax.jit(_results_and_gradients(original))(arrays)
    after = jax.jit(_results_and_gradients(rewritten))(arrays)
    for name, first, second in zip(("result", "gradient"), before, after, strict=True):
        for number, (x, y) in enumerate(zip(first, second, strict=True)):
            _compare(f"{name} {number}", np.asarray(x), np.asarray(y))


def _results_and_gradients(f: Function) -> Function:
    """Return a function of arrays that gives the results of f and gradients for random cotangents."""

    def call(arrays):
        is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]

        def of_floats(floats):
            rest = iter(floats)
            return jax.tree.leaves(
                f(*(next(rest) if flag else x for x, flag in zip(arrays, is_float, strict=True)))
            )

        floats = [x for x, flag in zip(arrays, is_float, strict=True) if flag]
        results, pull = jax.vjp(of_floats, floats)
        cotangents = []
        for number, x in enumerate(results):
            if jnp.issubdtype(x.dtype, jnp.floating):
                key = jax.random.key(number)
                cotangents.append(jax.random.normal(key, x.shape, x.dtype))
            else:
                cotangents.append(np.zeros(x.shape, jax.dtypes.float0))
        (gradients,) = pull(cotangents)
        return results, gradients

    return call


def _compare(name: str, before: np.ndarray, after: np.ndarray) -> None:
    """Raise if two arrays differ by more than rounding."""
    limit = LIMITS.get(str(before.dtype))
    if limit is None:
        if not (before == after).all():
            raise AssertionError(f"check=True: {name} differs, and it is {before.dtype}.")
        return
    before = before.astype(np.float64)
    after = after.astype(np.float64)
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0, np.abs(before - after))
    finite = np.abs(before[np.isfinite(before)])
    largest = finite.max(initial=0)
    worst = np.where(np.isnan(error), np.inf, error).max(initial=0)
    if worst > limit * largest:
        raise AssertionError(
            f"check=True: {name} of shape {before.shape} differs from the original by {worst:.3g}; "
            f"its largest number is {largest:.3g}. Please report the program."
        )
