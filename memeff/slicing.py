"""Slice and update arrays along named dims."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def slice_dims(x: Array, cuts: dict[int, tuple[Any, int]]) -> Array:
    """Return `x` sliced by `cuts`, {dim: (start, size)}; broadcast dims (size 1) stay whole."""
    cuts = {dim: cut for dim, cut in cuts.items() if x.shape[dim] not in (1, cut[1])}
    if not cuts:
        return x
    starts = []
    sizes = []
    for dim, whole in enumerate(x.shape):
        start, size = cuts.get(dim, (0, whole))
        starts.append(jnp.int32(start))
        sizes.append(size)
    return lax.dynamic_slice(x, starts, sizes)


def slice_letters(x: Array, dims: str, cuts: dict[str, tuple[Any, int]]) -> Array:
    """Return `x`, whose dims have the letters `dims`, sliced by `cuts`, {letter: (start, size)}."""
    axes = enumerate(dims)
    return slice_dims(x, {axis: cuts[letter] for axis, letter in axes if letter in cuts})


def write_slice(x: Array, part: Array, starts) -> Array:
    """Write `part` into `x` at `starts`; the start is 0 in broadcast dims (size 1)."""
    indices = []
    for start, size in zip(starts, x.shape, strict=False):
        indices.append(jnp.int32(0 if size == 1 else start))
    return lax.dynamic_update_slice(x, part, indices)


def add_slice(total: Array, part: Array, starts) -> Array:
    """Add `part` to `total` at `starts`, in the dtype of `total`."""
    old = slice_dims(total, dict(enumerate(zip(starts, part.shape, strict=False))))
    return write_slice(total, old + part.astype(total.dtype), starts)
