"""Hold the sums that the forward gathers for each query, and divide them at the end."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from memeff.chunked.tile import Tile
from memeff.problem import Operands, accumulator_dtype
from memeff.slicing import add_slice, slice_dims, write_slice
from memeff.softmax import SEES_NOTHING, Lse, sink_weights


class RowSums(NamedTuple):
    """Sums over the keys of each query, from p = exp(s - m)."""

    m: Array  # B K G T, running maximum, or its fixed bound
    l: Array  # B K G T, sum of p
    weight: Array  # B K G T, sum of p in the precision in which it multiplies the values
    o: Array  # B K G T D, sum of p v


def normalise(
    operands: Operands, rows: RowSums, log_sum_exp: Callable[[Array, Array], Lse]
) -> tuple[Array, Lse]:
    """Return out [B, K, G, T, D] in the query's dtype, and lse = `log_sum_exp(m, l)` [B, K, G, T]."""
    empty = rows.l == 0
    l = jnp.where(empty, 1, rows.l)
    weight = jnp.where(empty, 1, rows.weight)
    o = rows.o
    if operands.terms.sinks is not None:
        share, weight = sink_weights(rows.m, rows.weight, operands.terms.sinks)
        o = o * share[..., None]
    out = (o / weight[..., None]).astype(operands.query.dtype)
    return out, log_sum_exp(jnp.where(empty, SEES_NOTHING, rows.m), l)


def empty_rows(operands: Operands) -> tuple[Array, Array]:
    """Return o [B, K, G, T, D] and l [B, K, G, T] of zeros, sharded as the query that they come from."""
    query = operands.query[..., 0].transpose(0, 2, 3, 1)  # b k g t
    l = jnp.zeros_like(query, accumulator_dtype(operands))
    return l[..., None] + jnp.zeros((1, 1, 1, 1, operands.value.shape[-1]), l.dtype), l


def slice_rows(x: Array, tile: Tile) -> Array:
    """Return the tile's part of x [B, K, G, T, ...]."""
    b, k, _, t = tile.here.query.shape[:4]
    return slice_dims(x, {0: (tile.first[0], b), 1: (tile.first[1], k), 3: (tile.row, t)})


def write_rows(x: Array, part: Array, tile: Tile) -> Array:
    """Write `part` over the tile's part of x [B, K, G, T, ...]."""
    return write_slice(x, part, (*tile.first, 0, tile.row, 0))


def add_rows(x: Array, part: Array, tile: Tile) -> Array:
    """Add `part` to the tile's part of x [B, K, G, T, ...]."""
    return add_slice(x, part, (*tile.first, 0, tile.row, 0))


def select_rows(which: Array, x: Array, y: Array) -> Array:
    """Take x [B, K, G, T] or [B, K, G, T, D] in the rows where `which` [B, K, G, T] is True, else y."""
    return jnp.where(which if x.ndim == which.ndim else which[..., None], x, y)
