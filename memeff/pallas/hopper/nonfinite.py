"""Keep NaN and Inf of values that a row does not see out of its result: 0 times NaN is NaN."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

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
    """Patches of 64 x 64 in a tile of values [c, D] in shared memory.

    A loop over patches compiles in less time than code for each patch, but takes registers from
    other loops. So `clean` alone loops.
    """

    values: Ref
    first_col: Any  # the number of the first patch along the columns of the tile
    cols: int  # patches along the columns

    @property
    def rows(self) -> int:
        """Return the number of patches along the rows."""
        return self.values.shape[0] // ROWS

    def at(self, row, col) -> Ref:
        """Return a patch."""
        return self.values.at[_part(row), _part(self.first_col + col)]

    def load(self, row, col):
        """Return a patch in float32."""
        return plgpu.load(self.at(row, col), layout=WGMMA).astype(jnp.float32)

    def find_bad_keys(self, bad_keys_s: Ref) -> None:
        """Set `bad_keys_s` [c] to 1 for each row that has a bad number, and else to 0."""
        for row in range(self.rows):
            bad = [_is_bad(self.load(row, col)).max(axis=1) for col in range(self.cols)]
            bad_keys_s[_part(row)] = functools.reduce(jnp.maximum, bad)

    def clean(self, bad_columns_s: Ref, commit: Callable[[], None]) -> None:
        """Replace each bad number by 0, and `commit` that.

        Set `bad_columns_s`, of at least D numbers, to 1 for each column that had one, and else 0.
        """
        zeros = jnp.zeros(bad_columns_s.shape, jnp.float32)
        bad_columns_s[...] = plgpu.layout_cast(zeros, COL)

        @pl.loop(0, self.rows * self.cols)
        def _patch(n):
            row = lax.div(n, jnp.int32(self.cols))
            col = lax.rem(n, jnp.int32(self.cols))
            columns = bad_columns_s.at[_part(self.first_col + col)]
            mark_columns(columns, _is_bad(self.load(row, col)))
            x = self.load(row, col)  # once more, because registers are few
            self.at(row, col)[...] = jnp.where(_is_bad(x) > 0, 0.0, x).astype(self.values.dtype)

        commit()


def _is_bad(x):
    """Return 1 where x is not finite, and else 0."""
    return jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0)


def _part(n):
    """Return the positions of part n of 64."""
    first = n * ROWS
    return pl.ds(first if isinstance(first, int) else pl.multiple_of(first, ROWS), ROWS)


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
    patches = _Patches(values, 0, values.shape[1] // ROWS)
    patches.find_bad_keys(bad_keys_s)

    def clean(o):
        sees_bad = _queries_seeing(bad_keys_s, tile)
        sync(all_consumers)
        pl.when(warpgroup == 0)(lambda: patches.clean(bad_columns_s, plgpu.commit_smem))
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
    [c] and the bad columns [D]. Where queries are along the columns of `tile` and of o, `sums_s` is
    memory for maxima.
    """
    bad_keys_s, bad_columns_s = shared

    cols = values.shape[1] // ROWS // heads

    def clean_head(head, o):
        patches = _Patches(values, head * cols, cols)
        patches.find_bad_keys(bad_keys_s)

        def clean(o):
            sees_bad = _queries_seeing(bad_keys_s, tile, sums_s)
            patches.clean(bad_columns_s, commit)
            return _with_nan(o, sees_bad, bad_columns_s, tile.query_dim)

        return lax.cond(any_of(bad_keys_s), clean, lambda o: o, o)

    return lax.fori_loop(0, heads, clean_head, o)
