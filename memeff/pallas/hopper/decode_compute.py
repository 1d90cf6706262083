"""Compute the partial results of a split, and merge those of a row, in the decode kernel.

decode.py has the algorithm, whose steps are numbered here as well.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from memeff.logits import LOG2_E
from memeff.pallas.hopper.decode_work import (
    ROWS,
    Cache,
    DecodeItem,
    DecodeSizes,
    KeysOfSequence,
    Visits,
    has_missing_page,
    place_of_copy,
)
from memeff.pallas.hopper.fragments import SCRATCH_OF_COLUMNS
from memeff.pallas.hopper.mosaic import (
    COL,
    ROW,
    Barrier,
    Ref,
    accumulators,
    broadcast_vector,
    full_tile,
    hide_from_cse,
    init_accumulator,
    interpreter_staging,
    multiply,
    plgpu,
    positions,
    tile_ref,
)
from memeff.pallas.hopper.nonfinite import clean_own_values
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.score_tile import (
    HeadNumbers,
    ScoreTile,
    TokenVectors,
    barrier_arrivals,
    scratch_shapes,
)
from memeff.pallas.hopper.threads import drop_parts, load_columns, store_rows
from memeff.problem import Problem
from memeff.softmax import LSE_OF_EMPTY_ROW

STAGES = 3  # slots of a consumer for tiles of keys and values
COLUMNS_SUMMED_AT_ONCE = 32  # at most, with keys as first factors


class DecodeScratch(NamedTuple):
    """Shared memory of a thread block. Each consumer has a ring of slots of its own."""

    q_s: Ref  # [consumers * heads, 64, H], heads of a consumer; twice as many of integers
    q_ready: Barrier  # for queries and their vectors
    query_vectors: tuple[Ref, ...]  # [consumers, 64]
    head_numbers: tuple[Ref, ...]  # [consumers * heads, 64], for each row the number of its head
    k_s: Ref  # [consumers * stages * heads, c, H]
    v_s: Ref  # [consumers * stages * heads, c, D]
    ready: Barrier  # for a slot of keys and values
    used: Barrier
    key_vectors: tuple[Ref, ...]  # [consumers * stages, c], with the keys
    bad_keys_s: Ref  # [consumers, c] above 0 where a row of a tile of values is not finite
    bad_columns_s: Ref  # [consumers, D] above 0 where a column of it is not
    # With keys as first factors:
    row_scales_s: Ref = None  # of queries in integers, [consumers * heads, 64]
    scales_s: tuple[Ref, ...] = ()  # of numbers of 8 bits, [consumers * stages * heads, c]
    p_s: Ref = None  # [consumers, rows, c]
    sums_s: Ref = None  # [consumers, X], for sums and maxima along the keys of a tile
    # In the interpreter, first factors that are in registers on a GPU:
    stage: Ref = None  # [consumers, 64, c], or of a cache of 8 bits as large as its tiles

    @property
    def stages(self) -> int:
        """Return the number of slots of a consumer."""
        return self.ready.shape[0] // self.q_ready.shape[0]


def decode_scratch(
    scalars: Scalars, sizes: DecodeSizes, cache: Cache, dtype: DTypeLike
) -> DecodeScratch:
    """Return the types of a thread block's shared memory; `dtype` is that of the query."""
    consumers = sizes.consumers
    rows = sizes.rows_of_item
    H, D = cache.key.shape[-1], cache.value.shape[-1]
    has_vectors = bool(scalars.by_query or scalars.by_key or scalars.head_numbers)
    is_full = has_vectors and not cache.has_scales  # vectors need shared memory
    slots = consumers * (STAGES - is_full)
    heads = sizes.heads_of_consumer
    copies = (4 if cache.has_scales else 2) * heads * sizes.copies
    rest = interpreter_staging(consumers, ROWS, sizes.tile, dtype)
    split = sizes.splits_query
    copies_of_query = 3 if split else 1  # two digits and the scales
    if sizes.keys_first:
        rest = keys_first_scratch(sizes, slots if cache.has_scales else 0, (H, D), dtype)
    query_numbers, key_numbers = barrier_arrivals(scalars)
    vectors = scratch_shapes(scalars, (consumers, ROWS), (slots, sizes.tile))  # copies are aligned
    query_vectors, key_vectors = vectors["token_vectors"]
    head_numbers = scalars.head_numbers
    return DecodeScratch(
        q_s=tile_ref(
            consumers * heads * (1 + split), rows, sizes.own_dims(H), jnp.int8 if split else dtype
        ),
        q_ready=plgpu.Barrier(
            num_arrivals=heads * (copies_of_query + len(head_numbers)) + query_numbers,
            num_barriers=consumers,
        ),
        query_vectors=tuple(query_vectors),
        head_numbers=tuple(plgpu.SMEM((consumers * heads, ROWS), x.dtype) for x in head_numbers),
        k_s=tile_ref(slots * heads, sizes.tile, H, cache.key.dtype),
        v_s=tile_ref(slots * heads, sizes.tile, D, cache.value.dtype),
        ready=plgpu.Barrier(num_arrivals=copies + key_numbers, num_barriers=slots),
        used=plgpu.Barrier(num_barriers=slots),
        key_vectors=tuple(key_vectors),
        bad_keys_s=plgpu.SMEM((consumers, sizes.tile), jnp.float32),
        bad_columns_s=plgpu.SMEM((consumers, D), jnp.float32),
        row_scales_s=plgpu.SMEM((consumers * heads, ROWS), jnp.float32) if split else None,
        **rest,
    )


def keys_first_scratch(
    sizes: DecodeSizes, slots: int, dims: tuple[int, int], dtype: DTypeLike
) -> dict[str, Any]:
    """Return the types of what keys as first factors need besides, for heads of `dims` H and D.

    `slots` is the number of slots with scales, 0 for numbers of 16 bits.
    """
    consumers, rows, tile = sizes.consumers, sizes.rows_of_item, sizes.tile
    summed = min(rows // 8, COLUMNS_SUMMED_AT_ONCE // 8)
    scales = plgpu.SMEM((slots * sizes.heads_of_consumer, tile), jnp.float32)
    scratch = {
        "scales_s": (scales, scales) if slots else (),
        "p_s": tile_ref(consumers, rows, tile, dtype),
        "sums_s": plgpu.SMEM((consumers, summed * SCRATCH_OF_COLUMNS), jnp.float32),
    }
    first_factors = max(tile, dims[1]), max(tile, dims[0])  # [c, H] and [D, c]
    return scratch | (interpreter_staging(consumers, *first_factors, dtype) if slots else {})


class Partials(NamedTuple):
    """The partial results of all rows, in float32 in global memory.

    P is the number of partial results for each row of a whole cache. R is the number of rows if
    that is at most 64. Else it is R', the number of rows in whole tiles of 64.
    """

    o: Ref  # [B, K, P, R, D], not divided by l
    m: Ref  # [B, K, P, R']
    l: Ref  # [B, K, P, R']

    def of(self, b, k) -> "Partials":
        """Return those of one key head."""
        return Partials(*(ref.at[b, k] for ref in self))


class SplitLoop(NamedTuple):
    """The loop of one consumer over its tiles of the keys of an item.

    m and l are [64], o is [64, D], and raw, s and p of a tile are [64, c], all for each key head.
    """

    problem: Problem
    sizes: DecodeSizes
    scratch: DecodeScratch
    consumer: Array
    item: DecodeItem
    visits: Visits
    first_visit: Array  # visits of this consumer in the items before

    @property
    def query_dim(self) -> int:
        """Return the dim of a tile of logits along which queries are."""
        return 0

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Return the shape of a tile of logits."""
        rows, cols = self.sizes.rows_of_item, self.sizes.tile
        return (rows, cols) if self.query_dim == 0 else (cols, rows)

    def run(self):
        """Return m, l and o of this consumer's tiles, for each of its key heads."""
        start = (self._start(),) * self.sizes.heads_of_consumer
        if self.sizes.pages is None:
            step = functools.partial(self._step, misses_page=None)
            return lax.fori_loop(0, self.visits.total, step, start)
        start = self._misses_page(0), start
        return lax.fori_loop(0, self.visits.total, self._step_in_pages, start)[1]

    def _start(self) -> tuple[Array, Array, Array]:
        """Return m, l and o before the first tile."""
        m = full_tile((ROWS,), -jnp.inf)
        l = full_tile((ROWS,), 0.0)
        o = full_tile((ROWS, self.scratch.v_s.shape[-1]), 0.0)
        return m, l, o

    def store(self, partials: Partials, part, m: Array, l: Array, o: Array) -> None:
        """Store a partial result of the item's rows; `partials` are those of one key head."""
        rows = pl.ds(self.item.row, ROWS)
        stored = min(ROWS, partials.o.shape[1])
        store_rows(partials.o.at[part, pl.ds(self.item.row, stored)], o)
        partials.m[part, rows] = m
        partials.l[part, rows] = l

    def _misses_page(self, n) -> Array:
        """Return True if some keys of the n-th tile lie in a page that does not exist."""
        return has_missing_page(self.sizes, self.item.keys, self.visits.tile(n))

    def _step_in_pages(self, n, state):
        """Do `_step`, and look up the pages of the next tile beside it."""
        misses_page, heads = state
        next_misses_page = self._misses_page(n + 1)
        return next_misses_page, self._step(n, heads, misses_page)

    def _step(self, n, heads, misses_page):
        """Return m, l and o of each key head after the n-th tile of this consumer."""
        scratch = self.scratch
        slot = lax.rem(self.first_visit + n, jnp.int32(self.scratch.stages))
        slot = self.consumer * self.scratch.stages + slot
        plgpu.barrier_wait(scratch.ready.at[slot])
        is_masked = self.item.keys.is_masked(self.visits.tile(n))
        if misses_page is not None:
            is_masked |= misses_page
        results = tuple(
            self._visit(n, slot, head, is_masked, rows) for head, rows in enumerate(heads)
        )
        plgpu.barrier_arrive(scratch.used.at[slot])
        return results

    def _visit(self, n, slot, head: int, is_masked, rows: tuple[Array, Array, Array]):
        """Return m, l and o of one key head after the n-th tile, in `slot`."""
        m, l, o = rows
        scratch = self.scratch
        q = scratch.q_s.at[self.consumer * self.sizes.heads_of_consumer + head]
        place = slot * self.sizes.heads_of_consumer + head
        keys = scratch.k_s.at[place]
        values = scratch.v_s.at[place]
        tile_number = self.visits.tile(n)
        tile = self._score_tile(tile_number, slot, head)

        def dot_products(raw):
            plgpu.wgmma(raw, q, keys.T)  # (1)
            return plgpu.wgmma_accumulator_load(raw, wait_n=0)

        raw = accumulators(dot_products, self.tile_shape)

        def masked(raw, o):
            bad_keys_s = scratch.bad_keys_s.at[self.consumer]
            bad_columns_s = scratch.bad_columns_s.at[self.consumer]
            o = clean_own_values(values, o, tile, (bad_keys_s, bad_columns_s))
            if self.sizes.pages is not None:
                raw = raw + self._nan_of_missing_pages(tile_number)
            return tile.logits(raw, tile.mask()), o

        def whole(raw, o):
            return tile.logits(raw, None), o

        s, o = lax.cond(is_masked, masked, whole, raw, o)  # (2)
        m_new = jnp.maximum(m, s.max(axis=1))  # (3)
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        a = jnp.exp2(m - shift)
        p = jnp.exp2(s - broadcast_vector(shift, self.tile_shape))
        l = a * l + p.sum(axis=1)  # (4)
        o = o * broadcast_vector(a, o.shape)
        p = p.astype(scratch.q_s.dtype)

        def add_values(total):
            finish = init_accumulator(total, o)
            stage = scratch.stage and scratch.stage.at[self.consumer]
            multiply(total, p, values, stage)
            return finish(plgpu.wgmma_accumulator_load(total, wait_n=0))

        return m_new, l, accumulators(add_values, o.shape)

    def _nan_of_missing_pages(self, tile_number) -> Array:
        """Return a tile that is NaN where the key's page does not exist, and else 0."""
        sizes = self.sizes
        keys = positions(0, self.tile_shape, 1 - self.query_dim)
        total = jnp.zeros(self.tile_shape, jnp.float32)
        for n in range(sizes.copies):
            exists = place_of_copy(sizes, self.item.keys, tile_number, n).exists
            is_here = lax.div(keys, jnp.int32(sizes.keys_of_copy)) == n
            total = jnp.where(is_here, jnp.where(exists, 0.0, jnp.nan), total)
        return total

    def _score_tile(self, tile_number, slot, head: int) -> ScoreTile:
        """Return the positions, masks and functions of a tile of one key head."""
        item = self.item
        scalars = item.keys.scalars
        scratch = self.scratch
        place = self.consumer * self.sizes.heads_of_consumer + head
        numbers = []
        rows = pl.ds(0, self.sizes.rows_of_item)
        for ref in scratch.head_numbers:
            number = plgpu.load(ref.at[place, rows], layout=(ROW, COL)[self.query_dim])
            numbers.append(broadcast_vector(number, self.tile_shape, self.query_dim))
        query_vectors = tuple(ref.at[self.consumer, rows] for ref in scratch.query_vectors)
        key_vectors = tuple(ref.at[slot] for ref in scratch.key_vectors)
        # Positions of rows that differ from item to item are made anew in each tile.
        first_row = hide_from_cse(item.row) if self.sizes.row_tiles > 1 else jnp.int32(0)
        vectors: TokenVectors = (query_vectors, key_vectors)
        return ScoreTile(
            self.problem,
            self.tile_shape,
            (first_row, tile_number * self.sizes.tile),
            item.keys.mask_inputs,
            scalars,
            HeadNumbers(tuple(numbers)),
            vectors,
            self.query_dim,
            row_period=self.sizes.call.T,
        )


def merge_rows(
    sizes: DecodeSizes,
    partials: Partials,
    keys: KeysOfSequence,
    rows: Sequence[Array],
    sinks: Sequence[Array | None],
) -> list[tuple[Array, Array]]:
    """Return out and lse of each row from its partial results, in the order of the keys (5).

    Both are vectors [D]; lse is everywhere the same. `sinks` are those of the rows.
    """
    D = partials.o.shape[-1]
    at_once = sizes.merged_at_once
    shape = D, at_once
    first_part = keys.first_split * sizes.turns
    end_part = keys.end_split * sizes.turns
    ends = lax.div(end_part + (at_once - 1), jnp.int32(at_once))

    def add_parts(first, loaded, carry):
        m, l, o = carry
        m_parts, l_parts, o_parts = loaded
        part = positions(first, shape, 1)
        is_filled = (part >= first_part) & (part < end_part)
        m_parts = jnp.where(is_filled, m_parts, -jnp.inf)
        m_new = jnp.maximum(m, m_parts.max(axis=1))
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        a = jnp.exp2(m - shift)
        w = jnp.exp2(m_parts - broadcast_vector(shift, shape))
        l = a * l + jnp.where(is_filled, w * l_parts, 0.0).sum(axis=1)
        o = a * o + jnp.where(is_filled, w * o_parts, 0.0).sum(axis=1)
        return m_new, l, o

    def step(n, carries):
        first = n * at_once
        # All loads come first: each takes longer than the sums.
        loaded = [
            [
                load_columns(ref, first, end_part, row, shape)
                for ref in (partials.m, partials.l, partials.o)
            ]
            for row in rows
        ]
        return [add_parts(first, *x) for x in zip(loaded, carries, strict=True)]

    zeros = full_tile((D,), 0.0)
    carries = [(full_tile((D,), -jnp.inf), zeros, zeros) for _ in rows]
    start = lax.div(first_part, jnp.int32(at_once))
    carries = lax.fori_loop(start, ends, step, carries)

    @pl.loop(start, ends)
    def _drop(n):
        for row in rows:
            drop_parts(partials.o, n * at_once, end_part, row, at_once)

    return [_finish_row(m, l, o, sink) for (m, l, o), sink in zip(carries, sinks, strict=True)]


def _finish_row(m: Array, l: Array, o: Array, sink: Array | None) -> tuple[Array, Array]:
    """Return out and lse [D] of a row from its merged m, l and o."""
    sees_nothing = l == 0
    lse = jnp.where(sees_nothing, LSE_OF_EMPTY_ROW, (m + jnp.log2(l)) * (1 / LOG2_E))
    l = jnp.where(sees_nothing, 1.0, l)
    if sink is None:
        return o / l, lse
    sink = lax.broadcast(sink, l.shape)
    m = jnp.where(m == -jnp.inf, 0.0, m)
    top = jnp.maximum(m, sink)
    share = jnp.exp2(m - top)
    return o * (share / (l * share + jnp.exp2(sink - top))), lse
