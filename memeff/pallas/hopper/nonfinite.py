"""Keep NaN and Inf of values that a row does not see out of its result: 0 times NaN is NaN."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.mosaic import (
    COL,
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


def clean_values(values: Ref, o, tile: ScoreTile, warpgroup, shared: tuple[Ref, Ref, Barrier]):
    """Replace NaN and Inf in `values` [c, D], which all consumers read, by 0.

    Return o with NaN in the rows that see such a value, in its column. `shared` is memory for the
    bad keys [c] of this warpgroup, for the bad columns [D], and a barrier of all consumers.
    """
    bad_keys_s, bad_columns_s, all_consumers = shared
    rows = range(0, values.shape[0], ROWS)
    cols = range(0, values.shape[1], ROWS)

    def patch(row, col):
        """Return 64 x 64 of the values."""
        return values.at[row : row + ROWS, col : col + ROWS]

    def load(row, col):
        return plgpu.load(patch(row, col), layout=WGMMA).astype(jnp.float32)

    def is_bad(row, col):
        return jnp.where(jnp.abs(load(row, col)) < jnp.inf, 0.0, 1.0)

    for row in rows:
        bad_keys = [is_bad(row, col).max(axis=1) for col in cols]
        bad_keys_s[row : row + ROWS] = functools.reduce(jnp.maximum, bad_keys)

    def clean(o):
        bad_keys = broadcast_vector(plgpu.load(bad_keys_s, layout=COL), tile.shape, 1)
        sees_bad = jnp.where(tile.mask(), bad_keys, 0.0).max(axis=1)
        sync(all_consumers)

        @pl.when(warpgroup == 0)  # one alone, because sums over rows share their memory
        def _write():
            for col in cols:
                bad_columns = [is_bad(row, col).max(axis=0) for row in rows]
                bad_columns_s[col : col + ROWS] = functools.reduce(jnp.maximum, bad_columns)
            for row in rows:
                for col in cols:
                    clean_values = jnp.where(is_bad(row, col) > 0, 0.0, load(row, col))
                    patch(row, col)[...] = clean_values.astype(values.dtype)
            plgpu.commit_smem()

        sync(all_consumers)
        bad_columns = broadcast_vector(plgpu.load(bad_columns_s, layout=COL), o.shape, 1)
        is_nan = bad_columns * broadcast_vector(sees_bad, o.shape) > 0
        return jnp.where(is_nan, jnp.nan, o)

    return lax.cond(any_of(bad_keys_s), clean, lambda o: o, o)
