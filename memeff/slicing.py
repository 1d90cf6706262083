"""Slice and update arrays along named dims."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def slice_dims(x: Array, cuts: dict[int, tuple[Any, int]]) -> Array:
    """Return `x` sliced by `cuts`, {dim: (start, size)}; broadcast dims (size 1) stay whole."""
    starts = [jnp.int32(0)] * x.ndim
    sizes = list(x.shape)
    for dim, (start, size) in cuts.items():
        if x.shape[dim] not in (1, size):
            starts[dim] = jnp.int32(start)
            sizes[dim] = size
    if sizes == list(x.shape):
        return x
    return lax.dynamic_slice(x, starts, sizes)


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
        indices.append(jnp.int32(start))
    return lax.dynamic_update_slice(x, part, indices)


def add_slice(total: Array, part: Array, starts) -> Array:
    """Add `part` to `total` at `starts`, in the dtype of `total`."""
    cuts = zip(starts, part.shape, strict=False)
    old = slice_dims(total, dict(enumerate(cuts)))
    new = old + part.astype(total.dtype)
    return write_slice(total, new, starts)
