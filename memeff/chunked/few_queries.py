"""Attend from few queries to many keys on a GPU, in two products that read both in place.

Decoding is bound by reading keys and values once. With the rows r = k g t of all heads,
  (1) raw = Q k'    for each batch entry, where row r of Q [r, K H] has its query in the columns of
                    its own key head and 0 elsewhere
  (2) s, m, p, l    as in forward.py, of all keys at once
  (3) o = p v       for each batch entry and each split of the keys, added up in the order of the
                    splits; row r takes the columns of its own key head
A product for each key head would do K times less work. But its keys lie K H numbers apart, so XLA
copies all of them to its layout first. On an H200 the work hides behind the reading while there are
at most 256 rows.

With a cache in 8 bits the products read the 8-bit numbers. The scales of keys are factors of raw,
and those of values are factors of p.

The splits depend on S alone. A NaN or Inf that a row does not see may make it NaN here, because 0 *
NaN is NaN. forward.py computes such rows again.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from memeff.chunked.row_sums import RowSums
from memeff.chunked.slicing import TileSize, TileSources, cut_tile
from memeff.chunked.tile import apply_dropout, kept_by_dropout
from memeff.logits import logits_from_dots
from memeff.problem import Operands, Problem, Schedule, accumulator_dtype
from memeff.shape import CallShape
from memeff.stored import StoredKeys

SPLIT = 2048  # keys of a split at most
LEAST_SPLIT = 256  # and at least: with fewer the sums of the splits cost as much as the keys
STEP = 64  # keys from one possible split to the next
MOST_ROWS = 256  # queries of all heads


def split_length(shape: CallShape) -> int | None:
    """Return how many keys a split has, a divisor of S; None if the loop of tiles serves better."""
    if not 0 < shape.T * shape.N <= MOST_ROWS:
        return None
    for length in range(SPLIT, LEAST_SPLIT - 1, -STEP):
        if shape.S and shape.S % length == 0:
            return length
    return None


def reads_in_place(problem: Problem, schedule: Schedule, operands: Operands) -> bool:
    """Return whether this forward runs: if enabled, for keys without pages and transforms."""
    if schedule.split_keys is None or problem.qk_transform is not None:
        return False
    return not _in_pages(operands)


def _in_pages(operands: Operands) -> bool:
    """Return whether keys lie in pages."""
    return isinstance(operands.key, StoredKeys) and operands.key.table is not None


def for_loop(schedule: Schedule, operands: Operands) -> Schedule:
    """Return the schedule of the loop over tiles that runs instead, or that redoes rows.

    That loop copies the keys of a tile, so its tiles are shorter.
    """
    if schedule.split_keys is None:
        return schedule
    rows, _ = schedule.chunk_size
    cols = schedule.split_keys if _in_pages(operands) else LEAST_SPLIT
    return dataclasses.replace(schedule, chunk_size=(rows, cols))


def read_by_gathers(operands: Operands) -> Operands:
    """Return operands whose keys and values are read by gathers.

    Otherwise XLA transposes all of them before the loop that redoes rows, even if it never runs.
    """
    key, value = (
        x if isinstance(x, StoredKeys) else StoredKeys(x, None, None, x.dtype.name)
        for x in operands[1:3]
    )
    as_operands: Any = operands._replace
    return as_operands(key=key, value=value)


def few_queries_forward(problem: Problem, schedule: Schedule, operands: Operands) -> RowSums:
    """Return the sums of all rows; those that are not finite may be wrong."""
    assert schedule.split_keys is not None
    shape = operands.shape
    B, G = shape.B, shape.G
    _, T, S, _, K, H, D = shape
    n = S // schedule.split_keys
    dtype = accumulator_dtype(operands)
    sources = TileSources(operands, (), (), (T, S))
    tile = cut_tile(problem, sources, TileSize(B, K, T, S), True, (0, 0), 0, 0)
    product = functools.partial(
        jnp.einsum, preferred_element_type=dtype, precision=problem.precision
    )
    rows = _in_own_columns(tile.operands.query).reshape(B, K * G * T, K * H)
    key, key_scale = _numbers_and_scale(operands.key)
    value, value_scale = _numbers_and_scale(operands.value)
    raw = product("brx,bsx->brs", rows, key.reshape(B, S, K * H).astype(rows.dtype))  # (1)
    raw = raw.reshape(B, K, G, T, S) * key_scale
    s = logits_from_dots(problem, raw, tile.operands.logit_params, tile.keep, tile.indices)  # (2)
    m = s.max(-1)
    shift = jnp.where(m == -jnp.inf, 0, m)
    p = jnp.exp(s - shift[..., None])
    l = p.reshape(B, K, G, T, n, -1).sum(-1).sum(-1)
    p = apply_dropout(problem, kept_by_dropout(problem, tile), p)
    p = (p * value_scale).astype(rows.dtype)
    p = p.reshape(B, K * G * T, n, -1)
    v = value.reshape(B, n, -1, K * D).astype(rows.dtype)
    o = product("brnc,bncx->bnrx", p, v)  # (3)
    o = _own_columns(o.reshape(B, n, K, G * T, K, D)).sum(1)
    return RowSums(m, l, l, o.reshape(B, K, G, T, D))


def _numbers_and_scale(x: Array | StoredKeys) -> tuple[Array, Any]:
    """Return the numbers [B, S, K, H] of keys or values, and their factor: 1 or [B, K, 1, 1, S]."""
    if not isinstance(x, StoredKeys):
        return x, 1
    assert x.scales is not None
    return x.values, x.scales[:, :, None, None]


def finite_rows(rows: RowSums) -> Array:
    """Return which rows [B, K, G, T] are finite: no hidden NaN or Inf has reached them."""
    return jnp.isfinite(rows.o).all(-1) & jnp.isfinite(rows.l)


def _in_own_columns(query: Array) -> Array:
    """Return [B, K, G, T, K, H] with query [B, K, G, T, H] where both K agree, and 0 elsewhere."""
    K = query.shape[1]
    same_head = jnp.eye(K, dtype=bool)[:, None, None, :, None]
    return jnp.where(same_head, query[:, :, :, :, None], jnp.zeros((), query.dtype))


def _own_columns(o: Array) -> Array:
    """Return [B, n, K, r, D], of o [B, n, K, r, K, D] where both K agree."""
    K = o.shape[2]
    same_head = jnp.eye(K, dtype=bool)[:, None, :, None]
    return jnp.where(same_head, o, 0).sum(4)
