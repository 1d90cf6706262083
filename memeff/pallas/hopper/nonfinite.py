"""Keep NaN and Inf of values that a row does not see out of its result: 0 times NaN is NaN."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.fragments import reduce_rows
from memeff.pallas.hopper.mosaic import (
    COL,
    ROW,
    WGMMA,
    Barrier,
    Ref,
    any_of,
    broadcast_vector,
    plgpu,
    sync,
)
from memeff.pallas.hopper.persistent import ROWS
from memeff.pallas.hopper.score_tile import ScoreTile
from memeff.pallas.hopper.threads import mark_columns


class _Patches(NamedTuple):
    """A tile of values [c, D] in shared memory, in patches of 64 x 64."""

    values: Ref
    cols: range  # the first columns of the patches

    @property
    def rows(self) -> range:
        """Return the first rows of the patches."""
        return range(0, self.values.shape[0], ROWS)

    def at(self, row: int, col: int) -> Ref:
        """Return a patch."""
        return self.values.at[row : row + ROWS, col : col + ROWS]

    def load(self, row: int, col: int):
        """Return a patch in float32."""
        return plgpu.load(self.at(row, col), layout=WGMMA).astype(jnp.float32)

    def is_bad(self, row: int, col: int):
        """Return 1 where a number of a patch is not finite, and else 0."""
        return jnp.where(jnp.abs(self.load(row, col)) < jnp.inf, 0.0, 1.0)

    def find_bad_keys(self, bad_keys_s: Ref) -> None:
        """Set `bad_keys_s` [c] to 1 for each row that has a bad number, and else to 0."""
        for row in self.rows:
            bad_keys = [self.is_bad(row, col).max(axis=1) for col in self.cols]
            bad_keys_s[row : row + ROWS] = functools.reduce(jnp.maximum, bad_keys)

    def clean(self, commit: Callable[[], None]) -> None:
        """Replace each bad number by 0, and `commit` that."""
        for row in self.rows:
            for col in self.cols:
                clean_values = jnp.where(self.is_bad(row, col) > 0, 0.0, self.load(row, col))
                self.at(row, col)[...] = clean_values.astype(self.values.dtype)
        commit()


def _queries_seeing(bad_keys_s: Ref, tile: ScoreTile, sums_s: Ref | None = None):
    """Return 1 for each query of the tile that sees a bad key, and else 0.

    Where queries are along the columns of the tile, `sums_s` is this warpgroup's memory for maxima.
    """
    keys_dim = 1 - tile.query_dim
    bad_keys = plgpu.load(bad_keys_s, layout=(ROW, COL)[keys_dim])
    seen = jnp.where(tile.mask(), broadcast_vector(bad_keys, tile.shape, keys_dim), 0.0)
    return seen.max(axis=1) if tile.query_dim == 0 else reduce_rows(seen, "max", sums_s)


def _with_nan(o, sees_bad, bad_columns_s: Ref, query_dim: int = 0):
    """Return o with NaN for queries, along `query_dim`, that see a bad value, in its column."""
    value_dim = 1 - query_dim
    # those of the first part, which is not finite where one is
    columns = bad_columns_s.at[: o.shape[value_dim]]
    bad_columns = plgpu.load(columns, layout=(ROW, COL)[value_dim])
    bad_columns = broadcast_vector(bad_columns, o.shape, value_dim)
    is_nan = bad_columns * broadcast_vector(sees_bad, o.shape, query_dim) > 0
    return jnp.where(is_nan, jnp.nan, o)


def clean_values(values: Ref, o, tile: ScoreTile, warpgroup, shared: tuple[Ref, Ref, Barrier]):
    """Replace NaN and Inf in `values` [c, D], which all consumers read, by 0.

    Return o with NaN in the rows that see such a value, in its column. `shared` is memory for the
    bad keys [c] of this warpgroup, for the bad columns [D], and a barrier of all consumers.
    """
    bad_keys_s, bad_columns_s, all_consumers = shared
    patches = _Patches(values, range(0, values.shape[1], ROWS))
    patches.find_bad_keys(bad_keys_s)

    def clean(o):
        sees_bad = _queries_seeing(bad_keys_s, tile)
        sync(all_consumers)

        @pl.when(warpgroup == 0)  # one alone, because sums over rows share their memory
        def _write():
            for col in patches.cols:
                bad_columns = [patches.is_bad(row, col).max(axis=0) for row in patches.rows]
                bad_columns_s[col : col + ROWS] = functools.reduce(jnp.maximum, bad_columns)
            patches.clean(plgpu.commit_smem)

        sync(all_consumers)
        return _with_nan(o, sees_bad, bad_columns_s)

    return lax.cond(any_of(bad_keys_s), clean, lambda o: o, o)


def clean_own_values(
    values: Ref,
    o,
    tile: ScoreTile,
    shared: tuple[Ref, Ref],
    commit: Callable[[], None] = plgpu.commit_smem,
    sums_s: Ref | None = None,
    heads: int = 1,
):
    """Apply `clean_values` to values that no other warpgroup reads, of one or more `heads`.

    `commit` makes stores to shared memory visible to products. `shared` is memory for the bad keys
    [c] and the bad columns [D]. Nothing is summed over rows in Pallas's own memory, because
    warpgroups would share it: where queries are along the columns of `tile` and of o, `sums_s`
    serves instead.
    """
    bad_keys_s, bad_columns_s = shared

    def clean(patches: _Patches, o):
        sees_bad = _queries_seeing(bad_keys_s, tile, sums_s)
        zeros = jnp.zeros(bad_columns_s.shape, jnp.float32)
        bad_columns_s[...] = plgpu.layout_cast(zeros, COL)
        for col in patches.cols:
            for row in patches.rows:
                mark_columns(bad_columns_s.at[col : col + ROWS], patches.is_bad(row, col))
        patches.clean(commit)
        return _with_nan(o, sees_bad, bad_columns_s, tile.query_dim)

    width = values.shape[1] // heads
    for first in range(0, values.shape[1], width):
        patches = _Patches(values, range(first, first + width, ROWS))
        patches.find_bad_keys(bad_keys_s)
        of_head = functools.partial(clean, patches)
        o = lax.cond(any_of(bad_keys_s), of_head, lambda o: o, o)
    return o
