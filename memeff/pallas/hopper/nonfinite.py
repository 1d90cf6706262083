"""Keep NaN and Inf of values that a row does not see out of its result: 0 times NaN is NaN."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.fragments import reduce_rows
from memeff.pallas.hopper.mosaic import (
    COL,
    ROW,
    Barrier,
    Ref,
    any_of,
    broadcast_vector,
    plgpu,
    sync,
)
from memeff.pallas.hopper.score_tile import ScoreTile
from memeff.pallas.hopper.threads import clean_tile

Marks = tuple[
    Ref, Ref
]  # of a tile of values [c, D]: 1 for keys [c], and columns [D], with NaN or Inf


def clean_shared(operand: Ref, warpgroup, barrier: Barrier, **how) -> None:
    """Apply `clean_tile` to a tile that all computing warpgroups read; they meet at `barrier`."""
    sync(barrier)

    @pl.when(warpgroup == 0)
    def _clean():
        clean_tile(operand, **how)
        plgpu.commit_smem()

    sync(barrier)


def clean_values(
    values: Ref, o: Array, tile: ScoreTile, warpgroup, marks: Marks, barrier: Barrier
) -> Array:
    """Replace NaN and Inf in `values` [c, D], which all computing warpgroups read, by 0.

    Return o with NaN in the rows that see such a value, in its column.
    """
    clean_shared(values, warpgroup, barrier, marks=marks)
    return _with_nan(o, tile, marks)


def clean_own_values(
    values: Ref,
    o: Array,
    tile: ScoreTile,
    marks: Marks,
    commit: Callable[[], None] = plgpu.commit_smem,
    sums_s: Ref | None = None,
    heads: int = 1,
) -> Array:
    """Apply `clean_values` to values that no other warpgroup reads, of one or more `heads`.

    `commit` makes stores to shared memory visible to products. Where queries are along the columns
    of `tile` and of o, `sums_s` is this warpgroup's memory for maxima.
    """
    patches = values.shape[1] // 64 // heads
    for head in range(heads):
        clean_tile(values, marks, patches=range(head * patches, (head + 1) * patches))
        o = _with_nan(o, tile, marks, sums_s)
    commit()
    return o


def _with_nan(o: Array, tile: ScoreTile, marks: Marks, sums_s: Ref | None = None) -> Array:
    """Return o with NaN for queries of the tile that see a marked key, in its marked columns."""
    bad_keys_s, bad_columns_s = marks
    query_dim, keys_dim = tile.query_dim, 1 - tile.query_dim

    def add_nan(o):
        bad_keys = plgpu.load(bad_keys_s, layout=(ROW, COL)[keys_dim])
        seen = jnp.where(tile.mask(), broadcast_vector(bad_keys, tile.shape, keys_dim), 0.0)
        sees_bad = seen.max(axis=1) if query_dim == 0 else reduce_rows(seen, "max", sums_s)
        # those of the first part, which is not finite where one is
        columns = bad_columns_s.at[: o.shape[keys_dim]]
        bad_columns = plgpu.load(columns, layout=(ROW, COL)[keys_dim])
        bad_columns = broadcast_vector(bad_columns, o.shape, keys_dim)
        is_nan = bad_columns * broadcast_vector(sees_bad, o.shape, query_dim) > 0
        return jnp.where(is_nan, jnp.nan, o)

    return lax.cond(any_of(bad_keys_s), add_nan, lambda o: o, o)
