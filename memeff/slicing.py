"""Slice and update arrays along named dims.

No start is negative. JAX would add three equations for each dim of a slice to count negative ones
from the end, and tracing and compiling them would take longer than the slices.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.device import current_platform

OLD_JAX = jax.__version_info__ < (0, 11)


def slice_dims(x: Array, cuts: dict[int, tuple[Any, int]]) -> Array:
    """Return `x` sliced by `cuts`, {dim: (start, size)}; broadcast dims (size 1) stay whole."""
    starts = [_as_index(0)] * x.ndim
    sizes = list(x.shape)
    for dim, (start, size) in cuts.items():
        if x.shape[dim] not in (1, size):
            starts[dim] = _as_index(start)
            sizes[dim] = size
    if sizes == list(x.shape):
        return x
    if OLD_JAX and x.dtype == jnp.bfloat16 and current_platform() == "cpu":
        # XLA slices it in float32. In a loop it would convert all of x before the first step.
        x, _ = lax.optimization_barrier((x, starts))
    return lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def slice_letters(x: Array, dims: str, cuts: dict[str, tuple[Any, int]]) -> Array:
    """Return `x`, whose dims have the letters `dims`, sliced by `cuts`, {letter: (start, size)}."""
    by_dim = {}
    for dim, letter in enumerate(dims):
        if letter in cuts:
            by_dim[dim] = cuts[letter]
    return slice_dims(x, by_dim)


def write_slice(x: Array, part: Array, starts) -> Array:
    """Write `part` into `x` at `starts`; the start is 0 in broadcast dims (size 1)."""
    indices = []
    for start, size in zip(starts, x.shape, strict=False):
        if size == 1:
            start = 0
        indices.append(_as_index(start))
    return lax.dynamic_update_slice(x, part, indices, allow_negative_indices=False)


def add_slice(total: Array, part: Array, starts) -> Array:
    """Add `part` to `total` at `starts`, in the dtype of `total`."""
    cuts = zip(starts, part.shape, strict=False)
    old = slice_dims(total, dict(enumerate(cuts)))
    new = old + part.astype(total.dtype)
    return write_slice(total, new, starts)


def _as_index(start: Any) -> Any:
    """Return a start as an int32 scalar, a constant where it is a number."""
    is_number = isinstance(start, int | np.integer)
    return np.array(start, np.int32) if is_number else jnp.int32(start)
