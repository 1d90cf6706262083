"""Compute attention on GPUs since Ampere. Each thread block has one tile of queries i.

It visits the tiles of keys j that its queries see (Dao 2023, algorithm 1), those with masks first.
Logits are in base 2, that is multiplied by log2 e.
  (1) raw = q_i k_j'                     (3) m' = max(m, rowmax s);  a = 2^(m - m')
  (2) s   = logits_from_dots(raw)        (4) l = a l + rowsum 2^(s - m');  o = a o + 2^(s - m') v_j
At the end out = o / l, lse = (m + log2 l) / log2 e; with a sink, out = o / (l + 2^(sink - m)).
v_j and a tile of the bias are copied beside (1), and k_{j+1} beside (2) to (4). Other thread blocks
of the multiprocessor compute while one waits. If a number of o is not finite, all tiles are visited
once more, with NaN and Inf removed where nobody sees them; that changes no bit of the other rows.
"""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.logits import allow_approx_math
from memeff.pallas.ampere.mosaic import (
    copy_pairs,
    copy_tile,
    kernel,
    multiply,
    ready_barrier,
    store_tile,
    sync_threads,
    wait_for_copies,
)
from memeff.pallas.hopper.bias import bias_tiles, head_bias
from memeff.pallas.hopper.mosaic import (
    Barrier,
    Ref,
    broadcast_vector,
    full_tile,
    plgpu,
    tile_ref,
    whole_width,
)
from memeff.pallas.hopper.nonfinite import clean_own_values
from memeff.pallas.hopper.parts import rounding_rest
from memeff.pallas.hopper.persistent import any_failed
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import (
    CallSizes,
    QueryWork,
    TileOrder,
    cache_order,
    find_query_work,
    may_have_unmasked_tiles,
    order_for_bias,
)
from memeff.pallas.hopper.score_tile import HeadNumbers, ScoreTile, head_number_refs
from memeff.pallas.hopper.softmax_rows import add_tile, inverse_sum, lse_of_rows
from memeff.pallas.hopper.tile_ranges import with_lists
from memeff.problem import Problem


class Tiling(NamedTuple):
    """Sizes of the forward's tiles."""

    rows: int
    keys: int


class Scratch(NamedTuple):
    """Shared memory of a thread block. Barriers are in the interpreter alone."""

    q_s: Ref  # [t, H]; out takes the place of q
    k_s: Ref  # [c, H]
    v_s: Ref  # [c, D]
    bias_s: Ref | None  # [t, c] of a bias of pairs
    bad_keys_s: Ref  # [c] above 0 where a row of v is not finite
    bad_columns_s: Ref  # [D]
    failed_s: Ref  # [t] above 0 where a row of o is not finite
    q_ready: Barrier
    k_ready: Barrier
    v_ready: Barrier


def attend(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: tuple[Array, ...],
    scalars: Scalars,
    want_lse: bool,
    tiling: Tiling,
    out_count: int = 1,
) -> tuple[tuple[Array, ...], Array | None]:
    """Return out [B, T, N, D] in the dtype of the query, and lse [B, N, T'].

    out is the sum of `out_count` arrays; the second has what rounding took from the first.
    `arrays` are query [B, T, N, H], key [B, S, K, H] and value [B, S, K, D]; H and D are multiples
    of 8, and equal if one exceeds 64. T' is T rounded up to a multiple of `tiling.rows`; lse is
    None unless `want_lse`.
    """
    query, key, value = arrays
    _, _, N, H = query.shape
    B = scalars.batch_size(query)
    K, D = value.shape[2:]
    T, S = lengths
    sizes = CallSizes(B, T, S, K, N // K)
    tiles = -(-T // tiling.rows)
    order = TileOrder()
    if problem.right is not None:
        order = cache_order(B * N, S * (H + D) * key.dtype.itemsize // (N // K))
    order = order_for_bias(order, scalars, B)
    scalars = with_ranges(scalars, lengths, tiling.rows)
    scalars = with_lists(problem, scalars, lengths, tiling)
    results = [jax.ShapeDtypeStruct((B, *query.shape[1:3], D), query.dtype)] * out_count
    if want_lse:
        results.append(jax.ShapeDtypeStruct((B, N, tiles * tiling.rows), jnp.float32))

    def body(query_ref, key_ref, value_ref, *refs, scratch: Scratch):
        remaining_refs = iter(refs)
        block_scalars = scalars.like(remaining_refs)
        work = find_query_work(
            problem, sizes, block_scalars, *tiling, order, lax.axis_index("block")
        )
        head_numbers = head_number_refs(work.scalars, work.n)
        operands = query_ref, key_ref, value_ref
        tile = QueryTile(problem, tiling, operands, scratch, work, head_numbers)
        out_refs = tuple(itertools.islice(remaining_refs, out_count))
        tile.run(out_refs, next(remaining_refs, None))

    call = kernel(
        body,
        "memeff_ampere_forward",
        results,
        {"scratch": forward_scratch(tiling, H, D, query.dtype, scalars)},
        B * N * tiles,
        allow_approx_math(problem),
    )
    outputs = call(query, key, value, *jax.tree.leaves(scalars))
    return tuple(outputs[:out_count]), outputs[-1] if want_lse else None


def forward_scratch(tiling: Tiling, H: int, D: int, dtype, scalars: Scalars) -> Scratch:
    """Return the types of a thread block's shared memory."""
    width = whole_width(H)
    bias_s = bias_tiles(scalars, 1, *tiling)
    assert width == whole_width(D)  # because out takes the place of q
    return Scratch(
        q_s=tile_ref(1, tiling.rows, width, dtype),
        k_s=tile_ref(1, tiling.keys, width, dtype),
        v_s=tile_ref(1, tiling.keys, width, dtype),
        bias_s=bias_s,
        bad_keys_s=plgpu.SMEM((tiling.keys,), jnp.float32),
        bad_columns_s=plgpu.SMEM((width,), jnp.float32),
        failed_s=plgpu.SMEM((tiling.rows,), jnp.float32),
        q_ready=ready_barrier(),
        k_ready=ready_barrier(),
        v_ready=ready_barrier(arrivals=1 if bias_s is None else 2),
    )


class QueryTile(NamedTuple):
    """A tile of queries of one head. m and l are [t], o is [t, D]; raw, s and p are [t, c]."""

    problem: Problem
    tiling: Tiling
    operands: tuple[Ref, Ref, Ref]  # query, key and value in global memory
    scratch: Scratch
    work: QueryWork
    head_numbers: HeadNumbers

    def run(self, out_refs: tuple[Ref, ...], lse_ref: Ref | None) -> None:
        """Compute and store the tile."""
        work = self.work
        scratch = self.scratch
        source = work.source
        q_s = scratch.q_s.at[0]
        copy_tile(self.operands[0], source.query, work.row, work.n, q_s, scratch.q_ready)
        pl.when(work.visits.total > 0)(lambda: self._copy_keys(0))
        wait_for_copies(scratch.q_ready)
        m, l, o = self._visit_tiles(clean=False)
        failed = jnp.where(jnp.abs(o) < jnp.inf, 0.0, 1.0).max(axis=1)

        def once_more(*_):
            self._copy_keys(0)
            return self._visit_tiles(clean=True)

        any_row_failed = any_failed(scratch.failed_s, failed) > 0
        m, l, o = lax.cond(any_row_failed, once_more, lambda *state: state, m, l, o)
        sinks = work.scalars.sinks
        weight = inverse_sum(m, l, None if sinks is None else sinks[work.n])
        if self.problem.dropout is not None:
            weight = weight * (1 / (1 - self.problem.dropout.rate))
        o = o * broadcast_vector(weight, o.shape)
        q_s[...] = o.astype(q_s.dtype)
        store_tile(q_s, out_refs[0], work.b, work.row, work.n)
        for rest_ref in out_refs[1:]:
            sync_threads()  # all have stored their part of q_s
            q_s[...] = rounding_rest(o, q_s.dtype)
            store_tile(q_s, rest_ref, work.b, work.row, work.n)
        if lse_ref is not None:
            rows = pl.ds(work.row, self.tiling.rows)
            lse_ref[work.b, work.n, rows] = lse_of_rows(m, l)

    def _copy_keys(self, n) -> None:
        """Start to copy the keys of visit n."""
        work = self.work
        col = work.visits.tile(jnp.int32(n)) * self.tiling.keys
        scratch = self.scratch
        copy_tile(
            self.operands[1], work.source.key, col, work.k, scratch.k_s.at[0], scratch.k_ready
        )

    def _visit_tiles(self, clean: bool):
        """Return m, l and o after all visits. With `clean`, clean values of NaN and Inf."""
        visits = self.work.visits
        shape = self.tiling.rows, self.scratch.v_s.shape[-1]
        rows = full_tile(shape[:1], -jnp.inf), full_tile(shape[:1], 0.0)
        state = *rows, full_tile(shape, 0.0)
        # A bias may hide values of any tile.
        clean_all = clean and self.work.scalars.has_bias
        if clean_all or not may_have_unmasked_tiles(self.problem, self.work.scalars):
            return lax.fori_loop(0, visits.total, self._step(True, clean), state)
        state = lax.fori_loop(0, visits.masked, self._step(True, clean), state)
        # Not with masks, though these tiles are done again: a GPU fuses products and sums otherwise
        # where a select stands between. With a bias, one stands in each tile.
        return lax.fori_loop(visits.masked, visits.total, self._step(False), state)

    def _step(self, masked: bool, clean: bool = False):
        """Return the function that updates m, l and o by visit n."""
        scratch = self.scratch
        work = self.work
        k_s = scratch.k_s.at[0]
        v_s = scratch.v_s.at[0]
        q_s = scratch.q_s.at[0]
        bias_s = None if scratch.bias_s is None else scratch.bias_s.at[0]

        def step(n, state):
            m, l, o = state
            wait_for_copies(scratch.k_ready)
            col = work.visits.tile(n) * self.tiling.keys
            first = work.row, col
            tile = ScoreTile.in_global_memory(
                self.problem, work, first, self.tiling, self.head_numbers
            )
            copy_tile(self.operands[2], work.source.value, col, work.k, v_s, scratch.v_ready)
            if bias_s is not None:
                bias = head_bias(work.scalars, work.n)
                copy_pairs(bias, work.row, col, bias_s, scratch.v_ready)
            raw = multiply(full_tile(self.tiling, 0.0), q_s, k_s, transposed=True)  # (1)
            wait_for_copies(scratch.v_ready)
            pl.when(n + 1 < work.visits.total)(lambda: self._copy_keys(n + 1))
            tile = tile.with_bias(work.n, bias_s)
            s = tile.logits(raw, tile.mask() if masked else tile.bias_mask())  # (2)
            p, m, l, a = add_tile(s, m, l)  # (3), (4)
            o = o * broadcast_vector(a, o.shape)
            if self.problem.dropout is not None:
                p = jnp.where(tile.kept(), p, 0.0)
            if clean:
                bad = scratch.bad_keys_s, scratch.bad_columns_s
                o = clean_own_values(v_s, o, tile, bad, lambda: None)
            return m, l, multiply(o, p.astype(v_s.dtype), v_s)

        return step
