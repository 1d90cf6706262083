"""Hold the sums that the forward gathers for each query, and divide them at the end."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from memeff.chunked.tile import Tile
from memeff.order import orders_by_condition, zero_after
from memeff.problem import Operands, Schedule, accumulator_dtype, out_dtype, split_axis
from memeff.slicing import add_slice, slice_dims, write_slice
from memeff.softmax import LSE_OF_EMPTY_ROW, Lse, sink_weights

Arrays = tuple[Array, ...]


class RowSums(NamedTuple):
    """Sums over the keys of each query, from p = exp(s - m)."""

    m: Array  # B K G T, running maximum, or its fixed bound
    l: Array  # B K G T, sum of p
    weight: Array  # B K G T, sum of p in the precision in which it multiplies the values
    o: Array  # B K G T D, sum of p v


def divide_sums(
    schedule: Schedule,
    operands: Operands,
    rows: RowSums,
    log_sum_exp: Callable[[Array, Array], Lse],
) -> tuple[Array, Lse]:
    """Divide the sums: return out [B, K, G, T, D] and lse [B, K, G, T].

    `log_sum_exp` computes lse = m + log l from m and l.
    """
    empty = rows.l == 0
    l = jnp.where(empty, 1, rows.l)
    weight = jnp.where(empty, 1, rows.weight)
    o = rows.o
    sinks = operands.logit_params.sinks
    if sinks is not None:
        share, weight = sink_weights(rows.m, rows.weight, sinks)
        o = o * share[..., None]
    out = o / weight[..., None]
    out = out.astype(out_dtype(schedule, operands))
    m = jnp.where(empty, LSE_OF_EMPTY_ROW, rows.m)
    return out, log_sum_exp(m, l)


def empty_rows(operands: Operands) -> tuple[Array, Array]:
    """Return o [B, K, G, T, D] and l [B, K, G, T] of zeros, sharded as the query."""
    shape = operands.shape
    query = split_axis(operands.query[..., 0], 2, shape.K)  # b t k g
    query = query.transpose(0, 2, 3, 1)  # b k g t
    dtype = accumulator_dtype(operands)
    l = jnp.zeros_like(query, dtype)
    if orders_by_condition():
        l = l + zero_after(query, dtype)
    o = l[..., None] + jnp.zeros((1, 1, 1, 1, shape.D), l.dtype)
    return o, l


def slice_rows(x: Array, tile: Tile) -> Array:
    """Return the tile's part of x [B, K, G, T, ...]."""
    b, k, _, t = tile.operands.query.shape[:4]
    batch, head = tile.head_start
    cuts = {0: (batch, b), 1: (head, k), 3: (tile.row_start, t)}
    return slice_dims(x, cuts)


def write_rows(arrays: Arrays, parts: Arrays, tile: Tile) -> Arrays:
    """Write each of `parts` over the tile's part of its array [B, K, G, T, ...]."""
    starts = _row_starts(tile)
    pairs = zip(arrays, parts, strict=True)
    return tuple(write_slice(x, part, starts) for x, part in pairs)


def add_rows(arrays: Arrays, parts: Arrays, tile: Tile) -> Arrays:
    """Add each of `parts` to the tile's part of its array [B, K, G, T, ...]."""
    starts = _row_starts(tile)
    pairs = zip(arrays, parts, strict=True)
    return tuple(add_slice(x, part, starts) for x, part in pairs)


def _row_starts(tile: Tile) -> tuple[Any, ...]:
    """Return where the tile's part of an array [B, K, G, T, ...] starts."""
    b, k = tile.head_start
    return b, k, 0, tile.row_start, 0


def select_rows(which: Array, x: Array, y: Array) -> Array:
    """Take rows of x [B, K, G, T, ...] where `which` [B, K, G, T] is True, and of y elsewhere."""
    if x.ndim > which.ndim:
        which = which[..., None]
    return jnp.where(which, x, y)
