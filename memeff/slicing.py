"""Slice and update arrays along named dims."""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def slice_dims(x: Array, cuts: dict[int, tuple[Any, int]]) -> Array:
    """`x` sliced, {dim: (start, size)}, but for dims in which it is broadcast (size 1)."""
    cuts = {dim: cut for dim, cut in cuts.items() if x.shape[dim] not in (1, cut[1])}
    starts = [jnp.int32(cuts[dim][0] if dim in cuts else 0) for dim in range(x.ndim)]
    sizes = [cuts[dim][1] if dim in cuts else size for dim, size in enumerate(x.shape)]
    return lax.dynamic_slice(x, starts, sizes) if cuts else x


def write_slice(x: Array, part: Array, starts) -> Array:
    """`part` at `starts`, 0 in broadcast dims."""
    starts = (0 if size == 1 else start for start, size in zip(starts, x.shape, strict=False))
    return lax.dynamic_update_slice(x, part, [jnp.int32(start) for start in starts])


def add_slice(total: Array, part: Array, starts) -> Array:
    old = slice_dims(total, dict(enumerate(zip(starts, part.shape, strict=False))))
    return write_slice(total, old + part.astype(total.dtype), starts)


def slice_optional(x: Array | None, cuts: dict[int, tuple[Any, int]]) -> Array | None:
    return None if x is None else slice_dims(x, cuts)
