"""Compute attention of few queries to a long cache of keys on Hopper, at the speed of its memory.

The heads of a group read the same keys. So the T queries of the G heads of a group are the rows i
of one tile of 64, and each key and value is read once. Persistent thread blocks take splits of the
keys (decode_work.py; Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding"). A producer copies tiles of
keys j, where they lie, into rings of two consumers. These compute in base 2, each for heads or for
tiles of its own:
  (1) raw = q_i k_j'                     (3) m' = max(m, rowmax s);  a = 2^(m - m')
  (2) s   = logits_from_dots(raw)        (4) l = a l + rowsum 2^(s - m');  o = a o + 2^(s - m') v_j
They store m, l and o of a split as a partial result p, and count it. A fourth warpgroup waits until
all splits of a row are counted, and merges them in the order of the keys:
  (5) w_p = 2^(m_p - max m);  l = sum_p w_p l_p;  out = sum_p w_p o_p / l;  lse = max m + log2 l
Each count is reached, because all thread blocks are on the device at once, and consumers wait for
no merge. Values that some row does not see are cleaned of NaN and Inf before (4), because 0 times
NaN is NaN. Keys may lie in pages: then the producer copies each tile from where the page table
says.
Where rows are few, and with numbers of 8 bits, keys and values are first factors
(decode_keys_first.py).
"""

import functools
import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from memeff.logits import allow_approx_math
from memeff.pallas.hopper.decode_compute import (
    DecodeScratch,
    Partials,
    SplitLoop,
    decode_scratch,
    merge_rows,
)
from memeff.pallas.hopper.decode_keys_first import KeysFirstLoop
from memeff.pallas.hopper.decode_work import (
    ROWS,
    Cache,
    DecodeItem,
    DecodeSizes,
    KeyPlace,
    find_keys,
    for_each_item,
    place_of_copy,
    visits_of,
)
from memeff.pallas.hopper.mosaic import (
    Ref,
    count_up,
    global_counters,
    interpreting,
    plgpu,
    set_registers,
    wait_for_count,
    warp_specialized_kernel,
)
from memeff.pallas.hopper.persistent import drain, persistent_blocks
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.score_tile import copy_token_vectors
from memeff.pallas.hopper.threads import store_vector
from memeff.problem import Problem

# Registers of a thread of a consumer, of the merging warpgroup and of the producer. A thread block
# has 512 threads, which begin with 128 each.
REGISTERS = 192, 72, 56
REGISTERS_OF_KEYS_FIRST = 184, 80, 64
REGISTERS_OF_PAGES = 200, 64, 48
REGISTERS_OF_8_BITS = 208, 64, 32
FIRST_REGISTERS = 128


class Consumer(NamedTuple):
    """A warpgroup that computes."""

    problem: Problem
    sizes: DecodeSizes
    query_ref: Ref  # [B, K, R', H], or [B, K, 2, R', H] of integers
    row_scales_ref: Ref  # [B, K, R'], or None
    scratch: DecodeScratch
    partials: Partials
    counters: Ref  # [B * K]
    number: Array

    def do(self, item: DecodeItem, next_item: DecodeItem, is_last, state):
        """Compute and store this consumer's part of an item.

        `state` is the number of tiles that it has visited before, and whether the item is its
        first. Return the next state.
        """
        done, is_first = state
        sizes = self.sizes
        visits = visits_of(sizes, item, self.number)
        pl.when(is_first)(functools.partial(self._copy_queries, item))
        plgpu.barrier_wait(self.scratch.q_ready.at[self.number])
        loop_type = KeysFirstLoop if sizes.keys_first else SplitLoop
        loop = loop_type(self.problem, sizes, self.scratch, self.number, item, visits, done)
        results = loop.run()
        # beside what follows
        pl.when(~is_last)(functools.partial(self._copy_queries, next_item))
        part = item.split * visits.step + visits.turn
        for k, result in zip(visits.heads, results, strict=True):
            loop.store(self.partials.of(item.b, k), part, *result)
        for k in visits.heads:
            count_up(self.counters, item.b * sizes.call.K + k)
        return done + visits.total, jnp.bool_(False)

    def _copy_queries(self, item: DecodeItem) -> None:
        """Copy the queries of an item, and the vectors of its rows."""
        scratch = self.scratch
        scalars = item.keys.scalars
        ready = scratch.q_ready.at[self.number]
        rows = pl.ds(item.row, ROWS)
        copy_token_vectors(scalars.by_query, rows, scratch.query_vectors, self.number, ready)
        for n, k in enumerate(visits_of(self.sizes, item, self.number).heads):
            slot = self.number * self.sizes.heads_of_consumer + n
            places = pl.ds(item.row, self.sizes.rows_of_item)
            if self.row_scales_ref is None:
                queries = self.query_ref.at[item.b, k, places]
                plgpu.copy_gmem_to_smem(queries, scratch.q_s.at[slot], ready)
            else:
                for digit in range(2):
                    queries = self.query_ref.at[item.b, k, digit, places]
                    plgpu.copy_gmem_to_smem(queries, scratch.q_s.at[2 * slot + digit], ready)
                scales = self.row_scales_ref.at[item.b, k, rows]
                plgpu.copy_gmem_to_smem(scales, scratch.row_scales_s.at[slot], ready)
            for ref, shared in zip(scalars.head_numbers, scratch.head_numbers, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[k, rows], shared.at[slot], ready)


class Producer(NamedTuple):
    """The warpgroup that copies keys and values into the consumers' slots."""

    sizes: DecodeSizes
    cache: Cache  # refs
    scratch: DecodeScratch

    def do(self, item: DecodeItem, _next_item: DecodeItem, _is_last, done):
        """Copy the keys and values of an item.

        `done` are the numbers of tiles that were copied before, for each consumer. Return the new
        ones.
        """
        all_visits = [visits_of(self.sizes, item, n) for n in range(self.sizes.consumers)]
        rounds = functools.reduce(jnp.maximum, (visits.total for visits in all_visits))

        def copy(n, consumer: int):
            visits = all_visits[consumer]
            tile = visits.tile(n)
            places = []
            for copy in range(self.sizes.copies):
                places.append(place_of_copy(self.sizes, item.keys, tile, copy))
            slot = self._free_slot(consumer, done[consumer] + n)
            self._copy_tile(visits.heads, places, slot)
            size = self.sizes.tile
            copy_token_vectors(
                item.keys.scalars.by_key,
                pl.ds(tile * size, size),
                self.scratch.key_vectors,
                slot,
                self.scratch.ready.at[slot],
            )

        @pl.loop(0, rounds)
        def _copy_tiles(n):
            for consumer, visits in enumerate(all_visits):
                pl.when(n < visits.total)(functools.partial(copy, n, consumer))

        return tuple(old + visits.total for old, visits in zip(done, all_visits, strict=True))

    def drain(self, done) -> None:
        """Wait until all slots are used."""
        stages = self.scratch.stages
        for consumer, count in enumerate(done):
            drain(count, stages, (self.scratch.used,), consumer * stages)

    def _free_slot(self, consumer: int, number):
        """Return the slot of a consumer's tile, numbered from its first, once it is free."""
        stages = self.scratch.stages
        slot = consumer * stages + lax.rem(number, jnp.int32(stages))
        used = self.scratch.used.at[slot]
        pl.when(number >= stages)(lambda: plgpu.barrier_wait(used))
        return slot

    def _copy_tile(self, heads, places: list[KeyPlace], slot) -> None:
        """Copy the keys and values at `places`, and their scales, to `slot`."""
        scratch = self.scratch
        size = self.sizes.keys_of_copy
        ready = scratch.ready.at[slot]
        for copy, place in enumerate(places):
            tokens = pl.ds(place.first, size)
            in_tile = pl.ds(copy * size, size)
            for n, k in enumerate(heads):
                slot_of_head = slot * self.sizes.heads_of_consumer + n
                for ref, shared in zip(self.cache[:2], (scratch.k_s, scratch.v_s), strict=True):
                    source = ref.at[place.entry, tokens, k]
                    plgpu.copy_gmem_to_smem(source, shared.at[slot_of_head, in_tile], ready)
                for ref, shared in zip(self.cache[2:], scratch.scales_s, strict=False):
                    source = ref.at[place.entry, k, tokens]
                    plgpu.copy_gmem_to_smem(source, shared.at[slot_of_head, in_tile], ready)


class Merger(NamedTuple):
    """The warpgroup that merges partial results."""

    problem: Problem
    sizes: DecodeSizes
    scalars: Scalars  # refs
    partials: Partials
    counters: Ref  # [B * K]

    def merge(self, index, store: Callable[[tuple[Array, Array, Array], Array, Array], None]):
        """Wait for the partial results of some rows of a key head, merge and `store` them.

        `index` is the number of the merge. `store` takes the batch entry, the query and the head,
        and their out and lse [D].
        """
        sizes = self.sizes
        call = sizes.call
        head = lax.div(index, jnp.int32(sizes.merges_of_head))
        first = lax.rem(index, jnp.int32(sizes.merges_of_head)) * sizes.rows_merged
        b = lax.div(head, jnp.int32(call.K))
        k = lax.rem(head, jnp.int32(call.K))
        # The last rows of a head may be merged twice.
        rows = [jnp.minimum(first + n, sizes.rows - 1) for n in range(sizes.rows_merged)]
        keys = find_keys(self.problem, sizes, self.scalars, b)
        wait_for_count(self.counters, head, keys.split_count * (sizes.turns * sizes.row_tiles))
        sinks = [self._sink_of(keys.scalars.sinks, k, row) for row in rows]
        results = merge_rows(sizes, self.partials.of(b, k), keys, rows, sinks)
        for row, (out, lse) in zip(rows, results, strict=True):
            head_of_group = lax.div(row, jnp.int32(call.T))
            store((b, lax.rem(row, jnp.int32(call.T)), k * call.G + head_of_group), out, lse)

    def _sink_of(self, sinks: Ref | None, k, row) -> Array | None:
        """Return the sink of a row of key head k, or None if there are no `sinks` [N]."""
        if sinks is None:
            return None
        return sinks[k * self.sizes.call.G + lax.div(row, jnp.int32(self.sizes.call.T))]


class DecodeKernel(NamedTuple):
    """One call of the decode kernel."""

    problem: Problem
    sizes: DecodeSizes
    cache: Cache  # arrays
    scalars: Scalars  # arrays
    row_scales: Array | None  # [B, K, R''], where the query is split into integers
    dtype: DTypeLike  # of the query, and of p in products
    want_lse: bool

    def run(self, query: Array, out_dtype) -> tuple[Array, Array | None]:
        """Return out [B, T, N, D] and lse [B, T, N], or None for lse.

        The query is [B, K, R', H], or with `row_scales` what `split_query` returned. R' is the
        number of rows of `sizes`, or more: a multiple of 8 if it is above 8. H and D are multiples
        of 64, and S of 8.
        """
        D = self.sizes.own_dims(self.cache.value.shape[-1])
        partials = self._partial_types(D)
        results = self._result_types(D, out_dtype)
        scalars = jax.tree.leaves(self.scalars)
        inputs = (query, *jax.tree.leaves((self.row_scales, self.cache)), *scalars)
        blocks = persistent_blocks(max(self.sizes.most_items, self.sizes.merges))
        scratch = decode_scratch(self.scalars, self.sizes, self.cache, self.dtype)
        compile_kernel = functools.partial(
            warp_specialized_kernel, blocks=blocks, approx_math=allow_approx_math(self.problem)
        )
        if interpreting():  # it has no counters
            body = functools.partial(self._split_warpgroups, blocks, None)
            kernel = compile_kernel(
                body, "memeff_decode", partials, {"scratch": scratch}, warpgroups=3
            )
            filled = kernel(*inputs)
            body = functools.partial(self._merge_warpgroup, blocks)
            kernel = compile_kernel(body, "memeff_merge", results, {}, warpgroups=1)
            arrays = kernel(*filled, *scalars)
        else:
            body = functools.partial(self._all_warpgroups, blocks)
            kernel = compile_kernel(
                body, "memeff_decode", (*results, *partials), {"scratch": scratch}, warpgroups=4
            )
            arrays = kernel(*inputs)
        return arrays[0], arrays[1][..., 0] if self.want_lse else None

    @property
    def _registers(self) -> tuple[int, int, int]:
        """Return the registers of a thread of consumer, merging warpgroup and producer."""
        if self.cache.has_scales:
            return REGISTERS_OF_8_BITS
        if self.sizes.keys_first:
            return REGISTERS_OF_KEYS_FIRST
        return REGISTERS if self.sizes.pages is None else REGISTERS_OF_PAGES

    def _partial_types(self, D: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the types of `Partials`."""
        call = self.sizes.call
        shape = call.B, call.K, self.sizes.parts
        rows = self.sizes.row_tiles * ROWS
        return (
            jax.ShapeDtypeStruct((*shape, self.sizes.rows_stored, D), jnp.float32),
            jax.ShapeDtypeStruct((*shape, rows), jnp.float32),
            jax.ShapeDtypeStruct((*shape, rows), jnp.float32),
        )

    def _result_types(self, D: int, out_dtype) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the types of out and lse [B, T, N, D], the latter D times the same."""
        call = self.sizes.call
        shape = call.B, call.T, call.K * call.G, D
        out = jax.ShapeDtypeStruct(shape, out_dtype)
        return (out, jax.ShapeDtypeStruct(shape, jnp.float32)) if self.want_lse else (out,)

    def _all_warpgroups(self, blocks: int, *refs, scratch: DecodeScratch):
        """Run one warpgroup of the kernel on a GPU."""
        results = len(self._result_types(1, jnp.float32))
        scalars = len(jax.tree.leaves(self.scalars))
        inputs = 1 + len(jax.tree.leaves((self.row_scales, self.cache))) + scalars
        input_refs = refs[:inputs]
        result_refs = refs[inputs : inputs + results]
        partial_refs = refs[inputs + results :]
        call = self.sizes.call
        counters = global_counters(call.B * call.K)
        self._split_warpgroups(blocks, counters, *input_refs, *partial_refs, scratch=scratch)

        @pl.when(lax.axis_index("warpgroup") == self.sizes.consumers + 1)
        def _merge():
            set_registers(self._registers[1], FIRST_REGISTERS)
            refs = *partial_refs, *input_refs[inputs - scalars :], *result_refs
            self._merge_warpgroup(blocks, *refs, counters=counters)

    def _split_warpgroups(self, blocks: int, counters, *refs, scratch: DecodeScratch):
        """Run a consumer or the producer."""
        remaining_refs = iter(refs)
        query_ref = next(remaining_refs)
        row_scales_ref = None if self.row_scales is None else next(remaining_refs)
        cache = jax.tree.map(lambda _: next(remaining_refs), self.cache)
        scalars = self.scalars.like(remaining_refs)
        partials = Partials(*remaining_refs)
        warpgroup = lax.axis_index("warpgroup")
        for_items = functools.partial(
            for_each_item, self.problem, self.sizes, scalars, blocks, lax.axis_index("block")
        )
        zero = jnp.int32(0)

        @pl.when(warpgroup < self.sizes.consumers)
        def _consume():
            set_registers(self._registers[0], FIRST_REGISTERS)
            consumer = Consumer(
                self.problem,
                self.sizes,
                query_ref,
                row_scales_ref,
                scratch,
                partials,
                counters,
                warpgroup,
            )
            for_items(consumer.do, (zero, jnp.bool_(True)))

        @pl.when(warpgroup == self.sizes.consumers)
        def _produce():
            set_registers(self._registers[2], FIRST_REGISTERS)
            producer = Producer(self.sizes, cache, scratch)
            producer.drain(for_items(producer.do, (zero,) * self.sizes.consumers))

    def _merge_warpgroup(self, blocks: int, *refs, counters=None):
        """Do every `blocks`-th merge of partial results."""
        remaining_refs = iter(refs)
        partials = Partials(*itertools.islice(remaining_refs, 3))
        scalars = self.scalars.like(remaining_refs)
        out_ref, *lse_refs = remaining_refs
        merger = Merger(self.problem, self.sizes, scalars, partials, counters)
        block = lax.axis_index("block")
        count = lax.div(self.sizes.merges - block + (blocks - 1), jnp.int32(blocks))

        def store(place, out, lse):
            store_vector(out_ref.at[place], out.astype(out_ref.dtype))
            for lse_ref in lse_refs:
                lse_ref[place] = lse

        @pl.loop(0, count)
        def _merge(n):
            merger.merge(block + n * blocks, store)
