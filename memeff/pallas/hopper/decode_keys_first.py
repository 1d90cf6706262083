"""Compute partial results of the decode kernel with keys and values as first factors.

A first factor of a product has 64 rows. With queries as first factors, most of these are padding
where there are few. So keys and values are first factors here, and queries and probabilities second
ones, and a tile has as many columns as there are rows, in eights. Numbers of 8 bits become numbers
of 16 in registers, and there they can only be first factors. Keys in int8 stay as they are where
rows are few: a query is then nearly u (256 n_0 + n_1), with integers n of 8 bits (`split_query`),
and (1) is u f_j (256 k_j n_0' + k_j n_1'), whose sums are exact in int32. With tiles [c, rows], and
scales f of keys and g of values (1 for numbers of 16 bits), the steps of decode.py are:
  (1) raw = k_j q_i' * f_j               (3) m' = max(m, colmax s);  a = 2^(m - m')
  (2) s   = logits_from_dots(raw)        (4) p = 2^(s - m');  l = a l + p;  o = a o + v_j' (g_j p)
Here l is a tile, which is summed along the keys once, at the end, and o is [D, rows].

Two neighbouring key heads of 64 are joined where rows are few: their dims are neighbours in memory,
and are read as those of one head of 128. A row takes raw from the half of the dims that its head
has, and the other half of its o is not stored.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.decode_compute import Partials, SplitLoop
from memeff.pallas.hopper.fragments import (
    full_columns,
    load_keys,
    load_values,
    reduce_rows,
    store_columns,
    store_of_columns,
    store_transposed,
)
from memeff.pallas.hopper.mosaic import (
    COL,
    ROW,
    Ref,
    accumulators,
    broadcast_vector,
    full_tile,
    init_accumulator,
    multiply,
    plgpu,
    positions,
)
from memeff.pallas.hopper.nonfinite import clean_own_values
from memeff.pallas.hopper.score_tile import ScoreTile


class KeysFirstLoop(SplitLoop):
    """The loop of one consumer over its tiles of keys, which are first factors."""

    @property
    def has_scales(self) -> bool:
        """Return whether keys and values are numbers of 8 bits with scales."""
        return bool(self.scratch.scales_s)

    @property
    def query_dim(self) -> int:
        """Return 1, because queries are along the columns of a tile."""
        return 1

    def store(self, partials: Partials, part, m: Array, l: Array, o: Array) -> None:
        """Store a partial result of the item's rows; `partials` are those of one key head."""
        rows = self.sizes.rows_of_item
        stored = min(rows, partials.o.shape[1])
        ref = partials.o.at[part, pl.ds(self.item.row, stored)]
        rows_of_first = self.sizes.rows // 2 if self.sizes.joined else None
        store_columns(ref, o, self.has_scales, rows_of_first)
        places = pl.ds(self.item.row, rows)
        store_of_columns(partials.m.at[part, places], m)
        store_of_columns(partials.l.at[part, places], self._reduce(l, "add"))

    def _start(self) -> tuple[Array, Array, Array]:
        """Return m [rows], l [c, rows] and o [D, rows] before the first tile."""
        m = full_columns(self.sizes.rows_of_item, -jnp.inf)
        l = full_tile(self.tile_shape, 0.0)
        o = full_tile((self.scratch.v_s.shape[-1], self.sizes.rows_of_item), 0.0)
        return m, l, o

    def _reduce(self, tile: Array, kind: str) -> Array:
        """Return the maximum or the sum of a tile along its keys."""
        scratch = self.scratch.sums_s.at[self.consumer]
        return reduce_rows(tile, kind, scratch)

    def _visit(self, n, slot, head: int, is_masked, rows: tuple[Array, Array, Array]):
        """Return m, l and o of one key head after the n-th tile, in `slot`."""
        m, l, o = rows
        query_place = self.consumer * self.sizes.heads_of_consumer + head
        place = slot * self.sizes.heads_of_consumer + head
        values_ref = self.scratch.v_s.at[place]
        tile_number = self.visits.tile(n)
        tile = self._score_tile(tile_number, slot, head)
        if self.sizes.splits_query:
            raw, loaded = self._integer_products(query_place, place)
        else:
            raw, loaded = self._products(query_place, place)
        if self.has_scales:
            raw = raw * self._scales(0, place)

        def masked(raw, o, loaded):
            if self.sizes.pages is not None:
                raw = raw + self._nan_of_missing_pages(tile_number)
            if loaded:
                o, *loaded = self._clean_loaded(o, loaded[0], tile)
            else:
                o = self._clean_shared(o, values_ref, tile)
            return tile.logits(raw, tile.mask()), o, tuple(loaded)

        def whole(raw, o, loaded):
            return tile.logits(raw, None), o, loaded

        s, o, loaded = lax.cond(is_masked, masked, whole, raw, o, loaded)  # (2)
        m_new = jnp.maximum(m, self._reduce(s, "max"))  # (3)
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        a = jnp.exp2(m - shift)
        p = jnp.exp2(s - broadcast_vector(shift, self.tile_shape, 1))  # (4)
        l = l * broadcast_vector(a, self.tile_shape, 1) + p
        o = o * broadcast_vector(a, o.shape, 1)
        if not self.has_scales:
            return m_new, l, self._add_product(o, values_ref.T, p)
        # scales of keys that a row does not see may be NaN
        p = p * jnp.where(s == -jnp.inf, 0.0, self._scales(1, place))
        return m_new, l, self._add_product(o, loaded[0], p)

    def _products(self, query_place, place) -> tuple[Array, tuple[Array, ...]]:
        """Return the products (1) of a tile, and its values if they have 8 bits, in registers."""
        scratch = self.scratch
        q = scratch.q_s.at[query_place]
        keys_ref = scratch.k_s.at[place]
        dtype = scratch.p_s.dtype
        keys = load_keys(keys_ref, dtype) if self.has_scales else keys_ref

        def multiply_tile(raw):
            self._multiply(raw, keys, q.T)
            # Values of 8 bits are loaded while the product runs.
            loaded = (load_values(scratch.v_s.at[place], dtype),) if self.has_scales else ()
            return plgpu.wgmma_accumulator_load(raw, wait_n=0), loaded

        def multiply_joined(first, second):
            """Multiply two joined heads, of which each has half of the dims."""
            self._multiply(first, keys_ref.at[:, : q.shape[1]], q.T)
            self._multiply(second, keys_ref.at[:, q.shape[1] :], q.T)
            second = plgpu.wgmma_accumulator_load(second, wait_n=0)
            first = plgpu.wgmma_accumulator_load(first, wait_n=0)
            row = positions(0, self.tile_shape, 1)
            return jnp.where(row < self.sizes.rows // 2, first, second), ()

        if self.sizes.joined:
            return accumulators(multiply_joined, self.tile_shape, self.tile_shape)
        return accumulators(multiply_tile, self.tile_shape)

    def _integer_products(self, query_place, place) -> tuple[Array, tuple[Array, ...]]:
        """Do the same with a query that is split into two integers of 8 bits and a scale."""
        scratch = self.scratch
        keys_ref = scratch.k_s.at[place]

        def multiply_digits(high, low):
            plgpu.wgmma(high, keys_ref, scratch.q_s.at[2 * query_place].T)
            plgpu.wgmma(low, keys_ref, scratch.q_s.at[2 * query_place + 1].T)
            loaded = (load_values(scratch.v_s.at[place], scratch.p_s.dtype),)
            low = plgpu.wgmma_accumulator_load(low, wait_n=0)
            high = plgpu.wgmma_accumulator_load(high, wait_n=0)
            scales_ref = scratch.row_scales_s.at[query_place, pl.ds(0, self.tile_shape[1])]
            scales = plgpu.load(scales_ref, layout=COL)
            raw = (high * 256 + low).astype(jnp.float32)
            return raw * broadcast_vector(scales, self.tile_shape, 1), loaded

        shapes = self.tile_shape, self.tile_shape
        return accumulators(multiply_digits, *shapes, dtype=jnp.int32)

    def _scales(self, n: int, place) -> Array:
        """Return the scales of keys (n = 0) or values (n = 1) as a tile."""
        scales = plgpu.load(self.scratch.scales_s[n].at[place], layout=ROW)
        return broadcast_vector(scales, self.tile_shape)

    def _add_product(self, o: Array, values: Array | Ref, p: Array) -> Array:
        """Return o + values p, for values [D, c]; p is rounded to the dtype of the query."""
        p_s = self.scratch.p_s.at[self.consumer]
        store_transposed(p_s, p.astype(p_s.dtype))
        plgpu.commit_smem()

        def add(total):
            finish = init_accumulator(total, o)
            self._multiply(total, values, p_s.T)
            return finish(plgpu.wgmma_accumulator_load(total, wait_n=0))

        rows, cols = o.shape
        return accumulators(add, (rows, cols))

    def _clean_shared(self, o: Array, values: Ref, tile: ScoreTile) -> Array:
        """Replace NaN in `values` [c, D] by 0; return o with NaN in its column if a row sees it."""
        scratch = self.scratch
        shared = scratch.bad_keys_s.at[self.consumer], scratch.bad_columns_s.at[self.consumer]
        sums_s = scratch.sums_s.at[self.consumer]
        heads = 2 if self.sizes.joined else 1
        return clean_own_values(values, o, tile, shared, sums_s=sums_s, heads=heads)

    def _clean_loaded(self, o: Array, values: Array, tile: ScoreTile) -> tuple[Array, Array]:
        """Do the same with `values` [D, c] in registers.

        Integers are finite.
        """
        if not jnp.issubdtype(self.scratch.v_s.dtype, jnp.floating):
            return o, values
        is_finite = jnp.abs(values.astype(jnp.float32)) < jnp.inf
        bad = jnp.where(is_finite, 0.0, 1.0).astype(values.dtype)
        seen = jnp.where(tile.mask(), 1.0, 0.0)
        rows, cols = o.shape
        counts = self._add_product(full_tile((rows, cols), 0.0), bad, seen)
        values = jnp.where(is_finite, values.astype(jnp.float32), 0.0).astype(values.dtype)
        return jnp.where(counts > 0, jnp.nan, o), values

    def _multiply(self, total, x: Array | Ref, y) -> None:
        """Start total += x y, where x is in registers or in shared memory, and y in the latter."""
        stage = self.scratch.stage
        if stage is not None:
            stage = stage.at[self.consumer, pl.ds(0, x.shape[0]), pl.ds(0, x.shape[1])]
        multiply(total, x, y, stage)
