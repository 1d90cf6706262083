"""Hold the sums that the forward gathers for each query, and divide them at the end."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from memeff.chunked.tile import Tile
from memeff.problem import Operands, accumulator_dtype
from memeff.slicing import slice_dims, write_slice
from memeff.softmax import SEES_NOTHING, Lse, sink_weights


class RowSums(NamedTuple):
    """What the forward gathers for each query, B K G T, from p = exp(logit - m)."""

    m: Array
    l: Array  # sum of p
    weight: Array  # and of p as it is multiplied with the values
    o: Array  # sum of p v; B K G T D


def normalise(operands: Operands, rows: RowSums, log_sum_exp) -> tuple[Array, Lse]:
    empty = rows.l == 0
    l, weight, o = jnp.where(empty, 1, rows.l), jnp.where(empty, 1, rows.weight), rows.o
    if operands.terms.sinks is not None:
        share, weight = sink_weights(rows.m, rows.weight, operands.terms.sinks)
        o = o * share[..., None]
    out = (o / weight[..., None]).astype(operands.query.dtype)
    return out, log_sum_exp(jnp.where(empty, SEES_NOTHING, rows.m), l)


def slice_rows(x: Array, tile: Tile) -> Array:
    """The tile's part of x [B, K, G, T, ...]."""
    b, k, _, t = tile.here.query.shape[:4]
    return slice_dims(x, {0: (tile.first[0], b), 1: (tile.first[1], k), 3: (tile.row, t)})


def where_rows(which: Array, x: Array, y: Array) -> Array:
    return jnp.where(which if x.ndim == which.ndim else which[..., None], x, y)


def put_rows(x: Array, rows: Array, tile: Tile) -> Array:
    return write_slice(x, rows, (*tile.first, 0, tile.row, 0))


def empty_rows(operands: Operands) -> tuple[Array, Array]:
    """o and l before any key, made from an input so that they are sharded as it is."""
    # b k g t
    l = jnp.zeros_like(operands.query[..., 0].transpose(0, 2, 3, 1), accumulator_dtype(operands))
    return l[..., None] + jnp.zeros((1, 1, 1, 1, operands.value.shape[-1]), l.dtype), l
