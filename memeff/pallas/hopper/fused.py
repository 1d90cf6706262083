"""Compute all gradients in one kernel of five products a tile on Hopper (sm_90a).

Steps (5) and (6) of `backward_common` on the 128 keys j of a thread block, 64 for each of its two
computing warpgroups; and one visit later, when d_raw of both warpgroups is in shared memory:
  (7) part = d_raw_i k_j, of which each warpgroup computes a half
  (8) dq_i += part, in float32 in global memory
Thread blocks add in any order, so the bits of dq differ from run to run. The sums of dq take 4
bytes a number. Hidden NaN and Inf are not cleaned here: if a result is not finite, the two kernels
of `backward_query` and `backward_key` do the whole call again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.logits import allow_approx_math
from memeff.pallas.hopper.backward_common import (
    Gradient,
    Tiling,
    group_parts,
    optional_slot,
    row_sums,
    token_vectors,
    transposed_tile,
    undo_lift,
)
from memeff.pallas.hopper.backward_key import (
    arrays_of_parts,
    copy_queries,
    store_gradients,
    sum_parts,
)
from memeff.pallas.hopper.mosaic import (
    COL,
    FLOATS,
    ROW,
    WGMMA,
    accumulators,
    add_to,
    broadcast_vector,
    head_rows,
    hide_from_cse,
    init_accumulator,
    interpreter_staging,
    interpreting,
    multiply,
    plgpu,
    sync,
    take_registers,
    tile_ref,
    warp_specialized_kernel,
    whole_width,
)
from memeff.pallas.hopper.persistent import ROWS, drain
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import (
    CallSizes,
    KeyBlocks,
    KeyWork,
    TileOrder,
    cache_order,
    find_key_work,
)
from memeff.pallas.hopper.score_tile import (
    HeadNumbers,
    TokenVectors,
    barrier_arrivals,
    copy_token_vectors,
    scratch_shapes,
)
from memeff.problem import Problem

GROUPS = 2  # computing warpgroups
PART = 64  # rows and columns of (7)
D_RAW_STAGES = 2  # tiles of d_raw: one is written while the previous one is multiplied


class FusedScratch(NamedTuple):
    """Shared memory and barriers of the kernel, in the order of their addresses."""

    computing: Any  # barrier: the computing warpgroups
    bad_s: Any  # [2, 128]: NaN for keys that are not finite; for keys, dk or dv
    delta_s: Any  # [stages, tile_size]
    do_s: Any  # [stages, tile_size, H]
    do_ready: Any
    d_raw_s: Any  # [D_RAW_STAGES, 128, tile_size]
    d_raw_ready: Any
    k_s: Any  # [1, 128, H]; dk at the end
    kv_ready: Any
    lse_s: Any  # [stages, tile_size]
    token_vectors: TokenVectors
    old: Any  # for `add_to` in the interpreter: memory like part_s, and a barrier
    part_s: Any  # [2, PART, PART]
    q_s: Any  # [stages, tile_size, H]
    q_ready: Any
    stage: Any  # for `multiply` in the interpreter
    used: Any  # tiles of query and dout
    v_s: Any  # [1, 128, H]; dv at the end


def fused_gradients(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: tuple[Array, ...],
    scalars: Scalars,
    tiling: Tiling,
) -> tuple[Array, Array, Array, Array]:
    """Return dq (float32, without slope and with lift), dk and dv, and numbers [blocks, 128].

    A number is NaN if some result is not finite; hidden NaN and Inf may then have reached dq.
    `arrays`: query, key, value and dout, padded as in `forward.attend`, and lse (in bits) and delta
    [B, N, T']. `lengths`: T and S without padding.
    """
    query, key, value, _, lse, _ = arrays
    _, _, N, H = query.shape
    B = scalars.batch_size(query)
    _, _, K, D = value.shape
    T, S = lengths
    shape = CallSizes(B, T, S, K, N // K)
    has_segments = scalars.q_segments is not None
    key_blocks = KeyBlocks(tiling.item_size)
    shape = shape.with_parts(group_parts(shape, problem, key_blocks, has_segments))
    assert D == H and tiling.warpgroups == GROUPS and tiling.tile_size * H == GROUPS * PART * PART
    assert lse.shape[-1] % tiling.tile_size == 0
    scalars = with_ranges(scalars, lengths, tiling.item_size, keys=True)
    operands, structure = jax.tree.flatten((arrays, scalars))
    blocks = B * shape.K * -(-S // tiling.item_size)
    order = TileOrder()
    if problem.right is not None:
        order = cache_order(B * shape.K, T * shape.G * (H + D) * 2)

    def body(*refs, scratch: FusedScratch):
        array_refs, scalar_refs = jax.tree.unflatten(structure, refs[: len(operands)])
        query_ref, key_ref, value_ref, *row_refs = array_refs
        outputs = refs[len(operands) :]
        group = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        find_work = functools.partial(
            find_key_work, problem, shape, scalar_refs, tiling.item_size, tiling.tile_size, order
        )

        @pl.when(group < GROUPS)
        def _():
            take_registers(GROUPS, computes=True)
            work_at_end = find_work(hide_from_cse(block))
            works = find_work(block), work_at_end
            _compute(
                problem, shape, tiling, (key_ref, value_ref), outputs, scratch, works, block, group
            )

        @pl.when(group == GROUPS)
        def _():
            take_registers(GROUPS, computes=False)
            work = find_work(block)
            count = copy_queries(shape, tiling, (query_ref, *row_refs), scratch, work, 0)
            drain(count, tiling.stages, [scratch.used])

    # Without Pallas' barriers: products and copies read stored memory after `commit_smem`, and
    # loads after `sync`.
    kernel = warp_specialized_kernel(
        body,
        "memeff_fused",
        (),
        {"scratch": _scratch_types(H, query.dtype, scalars, tiling)},
        blocks,
        GROUPS + 1,
        allow_approx_math(problem),
        barriers=False,
    )
    of_keys = B, key.shape[1], shape.K, H
    results = (
        jnp.zeros((B, *query.shape[1:]), jnp.float32),
        lax.empty((blocks, tiling.item_size), jnp.float32),
        *(lax.empty(of_keys, query.dtype) for _ in range(2 * arrays_of_parts(shape.parts))),
    )
    dq, bad, *key_gradients = pl.run_state(lambda refs: kernel(*operands, *refs))(results)
    dk, dv = (sum_parts(shape.parts, key_gradients[n::2], query.dtype) for n in range(2))
    return dq, dk, dv, bad


def _scratch_types(H: int, dtype, scalars: Scalars, tiling: Tiling) -> FusedScratch:
    """Return the types of the kernel's shared memory and barriers."""
    queries, stages = tiling[1:3]
    query_vectors, key_vectors = barrier_arrivals(scalars)
    parts = plgpu.SMEM((GROUPS, PART, PART), jnp.float32, transforms=FLOATS)
    return FusedScratch(
        computing=plgpu.Barrier(num_arrivals=GROUPS),
        bad_s=plgpu.SMEM((2, GROUPS * ROWS), jnp.float32),
        delta_s=plgpu.SMEM((stages, queries), jnp.float32),
        do_s=tile_ref(stages, queries, H, dtype),
        do_ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        d_raw_s=tile_ref(D_RAW_STAGES, tiling.item_size, queries, dtype),
        d_raw_ready=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=D_RAW_STAGES),
        k_s=tile_ref(1, tiling.item_size, H, dtype),
        kv_ready=plgpu.Barrier(num_arrivals=2 + key_vectors, num_barriers=GROUPS),
        lse_s=plgpu.SMEM((stages, queries), jnp.float32),
        old=(parts, plgpu.Barrier(num_barriers=GROUPS)) if interpreting() else None,
        part_s=parts,
        q_s=tile_ref(stages, queries, H, dtype),
        q_ready=plgpu.Barrier(num_arrivals=2 + query_vectors, num_barriers=stages),
        stage=interpreter_staging(GROUPS, ROWS, queries, dtype).get("stage"),
        used=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
        v_s=tile_ref(1, tiling.item_size, H, dtype),
        **scratch_shapes(scalars, (stages, queries), (GROUPS, ROWS)),
    )


class QueryGradient(NamedTuple):
    """Steps (7) and (8), which add one warpgroup's half of the products d_raw k to dq."""

    shape: CallSizes
    tiling: Tiling
    scratch: FusedScratch
    work: KeyWork
    visits: Array  # tiles that each head visits
    dq_ref: Any
    old: Any  # of this warpgroup

    @property
    def halves_columns(self) -> bool:
        """Return True if a warpgroup computes half the columns of (7), and not half the rows."""
        return self.tiling.tile_size == PART

    def start(self, part, visit, group) -> None:
        """Start (7) of the visit."""
        half = pl.ds(group * PART, PART)
        stage = lax.rem(visit, jnp.int32(D_RAW_STAGES))
        k = self.scratch.k_s.at[0]
        d_raw = self.scratch.d_raw_s.at[stage]
        plgpu.barrier_wait(self.scratch.d_raw_ready.at[stage])
        if self.halves_columns:
            plgpu.wgmma(part, d_raw.T, k.at[:, half])
        else:
            plgpu.wgmma(part, d_raw.at[:, half].T, k)

    def add(self, part: Array, g, n, d_raw_ready, group) -> None:
        """Start (8) of the visit before the n-th of head g. Arrive at `d_raw_ready` if given."""
        work = self.work
        previous = jnp.where(n > 0, n, self.visits) - 1
        first = work.visits.tile(previous) * self.tiling.tile_size
        head = work.k * self.shape.G + g
        head = jnp.where(n > 0, head, head - 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.scratch.part_s[group] = part
        plgpu.commit_smem()
        if d_raw_ready is not None:
            plgpu.barrier_arrive(d_raw_ready)
        part_s = self.scratch.part_s.at[group]
        if self.halves_columns:
            cols = pl.ds(group * PART, PART)
            total = self.dq_ref.at[work.b, pl.ds(first, PART), head, cols]
        else:
            total = self.dq_ref.at[work.b, pl.ds(first + group * PART, PART), head]
        add_to(part_s, total, self.old)


def _compute(
    problem: Problem,
    shape: CallSizes,
    tiling: Tiling,
    arrays: tuple,
    outputs: tuple,
    scratch: FusedScratch,
    works: tuple[KeyWork, KeyWork],
    block,
    group,
) -> None:
    """Compute dk and dv of one warpgroup's keys, and their part of dq.

    `works`: the same work twice. The second is hidden from common-subexpression elimination, so
    that no registers hold it until the end.
    """
    key_ref, value_ref = arrays
    dq_ref, bad_ref, *key_refs = outputs
    work, work_at_end = works
    dtype = key_ref.dtype
    gradient = Gradient(problem, work.scalars.logit_terms)
    group_rows = pl.ds(group * ROWS, ROWS)
    k = scratch.k_s.at[0, group_rows]
    v = scratch.v_s.at[0, group_rows]
    masked = work.visits.masked
    count = work.visits.total
    old = None if scratch.old is None else tuple(x.at[group] for x in scratch.old)
    query_gradient = QueryGradient(shape, tiling, scratch, work, count, dq_ref, old)
    visits = _Visits(problem, gradient, query_gradient, group, group_rows, masked)
    _load_keys(arrays, scratch, work, group, group_rows)
    dk, dv = accumulators(visits.visit_all, (ROWS, k.shape[-1]), (ROWS, v.shape[-1]))

    @pl.when(count > 0)
    def _():
        def last_part(part):
            query_gradient.start(part, count * shape.G - 1, group)
            part = plgpu.wgmma_accumulator_load(part, wait_n=0)
            query_gradient.add(part, shape.G, 0, None, group)

        accumulators(last_part, (PART, PART))

    # Keys that only pad the tile count here, because d_raw that overflowed there makes dq NaN:
    # Inf times a key of 0.
    bad = plgpu.load(scratch.bad_s.at[0, group_rows], layout=ROW)
    scratch.bad_s[1, group_rows] = bad + nan_if_bad(dk) + nan_if_bad(dv)
    sync(scratch.computing)  # the other warpgroup has read these keys
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch.bad_s.at[1, group_rows], bad_ref.at[block, group_rows])
    end = work_at_end
    gradients = undo_lift(dk * gradient.slope, dtype), undo_lift(dv, dtype)
    places = [_of_keys(ref, end.b, end, end.k, group) for ref in key_refs]
    store_gradients((k, v), gradients, zip(places[::2], places[1::2], strict=True), 1)


class _Visits(NamedTuple):
    """The tiles of queries that one warpgroup's keys visit: steps (5) to (8)."""

    problem: Problem
    gradient: Gradient
    query_gradient: QueryGradient
    group: Any
    group_rows: Any
    masked: Array  # visits of a head that need a mask

    def visit_all(self, dk, dv) -> tuple[Array, Array]:
        """Visit the tiles of all heads, and return dk and dv."""
        count = self.query_gradient.visits

        def visit_head(g, _):
            start = jnp.where(g == 0, 1, 0)
            whole_start = jnp.maximum(start, self.masked)
            visit = functools.partial(self._visit, g, (dk, dv))
            lax.fori_loop(start, self.masked, functools.partial(visit, True, False), None)
            lax.fori_loop(whole_start, count, functools.partial(visit, False, False), None)

        first_visit = functools.partial(self._visit, 0, (dk, dv), True, True)
        lax.fori_loop(0, jnp.minimum(count, 1), first_visit, None)
        lax.fori_loop(0, self.query_gradient.shape.G, visit_head, None)
        dk_sum = plgpu.wgmma_accumulator_load(dk, wait_n=0)
        dv_sum = plgpu.wgmma_accumulator_load(dv, wait_n=0)
        return dk_sum, dv_sum

    def _visit(self, g, accumulated, hides: bool, first: bool, n, _) -> None:
        """Visit the n-th tile of head g. The `first` visit of all finds no d_raw before its own."""
        gradient, query_gradient, group = self.gradient, self.query_gradient, self.group
        tiling = query_gradient.tiling
        scratch = query_gradient.scratch
        work = query_gradient.work
        dk, dv = accumulated
        tile_shape = ROWS, tiling.tile_size
        visit = g * query_gradient.visits + n
        slot = lax.rem(visit, jnp.int32(tiling.stages))
        d_raw_stage = lax.rem(visit, jnp.int32(D_RAW_STAGES))
        stage = optional_slot(scratch.stage, group)
        q = scratch.q_s.at[slot]
        do = scratch.do_s.at[slot]
        d_raw_ready = scratch.d_raw_ready.at[d_raw_stage]
        plgpu.barrier_wait(scratch.q_ready.at[slot])
        vectors = token_vectors(scratch.token_vectors, slot, group)
        tile = transposed_tile(self.problem, work, tiling, n, group, HeadNumbers(), vectors)
        keep = tile.mask() if hides else None
        opaque_group = hide_from_cse(group)
        k = scratch.k_s.at[0, pl.ds(opaque_group * ROWS, ROWS)]
        v = scratch.v_s.at[0, pl.ds(opaque_group * ROWS, ROWS)]

        def by_query(vector_s):
            return broadcast_vector(plgpu.load(vector_s, layout=COL), tile_shape, 1)

        # Small tiles leave registers to load lse before the products, which keep shared memory
        # busy.
        early_lse = by_query(scratch.lse_s.at[slot]) if tiling.tile_size == PART else None
        plgpu.barrier_wait(scratch.do_ready.at[slot])

        def products(raw, dp):
            add_delta = init_accumulator(dp, by_query(scratch.delta_s.at[slot]))
            plgpu.wgmma(raw, k, q.T)  # (5)
            plgpu.wgmma(dp, v, do.T)
            raw = plgpu.wgmma_accumulator_load(raw, wait_n=1)
            lse = by_query(scratch.lse_s.at[slot]) if early_lse is None else early_lse
            p, cotangents = gradient.probabilities(raw, lse, tile, keep)  # (6)
            multiply(dv, p.astype(q.dtype), do, stage)
            dp = add_delta(plgpu.wgmma_accumulator_load(dp, wait_n=1))  # while dv runs
            d_raw, _ = cotangents(p, dp)
            d_raw = d_raw.astype(q.dtype)

            def multiply_and_store():
                multiply(dk, d_raw, q, stage)
                scratch.d_raw_s[d_raw_stage, self.group_rows] = d_raw

            def with_part(part):
                query_gradient.start(part, visit - 1, opaque_group)
                multiply_and_store()
                part = plgpu.wgmma_accumulator_load(part, wait_n=1)  # while dk runs
                # Arrive only now: (7) has read the previous tile of d_raw, which the other
                # warpgroup overwrites next.
                query_gradient.add(part, g, n, d_raw_ready, opaque_group)

            if first:
                multiply_and_store()
                plgpu.commit_smem()
                plgpu.barrier_arrive(d_raw_ready)
            else:
                accumulators(with_part, (PART, PART))
            plgpu.wgmma_wait(0)

        accumulators(products, tile_shape, tile_shape)
        plgpu.barrier_arrive(scratch.used.at[slot])


def _of_keys(ref, b, work: KeyWork, head, group):
    """Return the rows of batch entry `b` and of `head` of `ref` with warpgroup `group`'s keys."""
    return ref.at[b, pl.ds(work.col + group * ROWS, ROWS), head]


def _load_keys(arrays: tuple, scratch: FusedScratch, work: KeyWork, group, rows) -> None:
    """Copy warpgroup `group`'s keys and values, wait for both warpgroups', and note bad keys."""
    key_ref, value_ref = arrays
    _, key_vectors = scratch.token_vectors
    ready = scratch.kv_ready.at[group]
    k = scratch.k_s.at[0, rows]
    key = _of_keys(key_ref, work.source.key, work, work.key_head, group)
    value = _of_keys(value_ref, work.source.value, work, work.key_head, group)
    plgpu.copy_gmem_to_smem(key, k, ready)
    plgpu.copy_gmem_to_smem(value, scratch.v_s.at[0, rows], ready)
    cols = pl.ds(work.col + group * ROWS, ROWS)
    copy_token_vectors(work.scalars.by_key, cols, key_vectors, group, ready)
    plgpu.barrier_wait(ready)
    # In (7) 0 times NaN is NaN.
    scratch.bad_s[0, rows] = nan_if_bad(plgpu.load(k, layout=WGMMA).astype(jnp.float32))
    sync(scratch.computing)  # (7) reads both warpgroups' keys


def nan_if_bad(x: Array) -> Array:
    """Return NaN for each row that is not finite, and 0 for other rows."""
    return (x * 0.0).sum(axis=1)


class DeltaScratch(NamedTuple):
    """Shared memory and barriers of the kernel of delta, in the order of their addresses."""

    delta_s: Any  # [2, 64]; dlse before
    do_s: Any  # [2, 64, D]
    out_s: Any  # [2, 64, D]
    ready: Any


def row_deltas(
    lengths: tuple[int, int], out: Array, dout: Array, dlse: Array | None, parts: int
) -> Array:
    """Return dlse - rowsum(dout * out), [B, N, T'].

    `out` and `dout` are [B, T, N, D], padded as in `forward.attend`. Each of their numbers has
    `parts` parts (parts.py). T' is the next multiple of 128.
    """
    B, _, N, D = out.shape
    block_rows = GROUPS * ROWS
    tiles = -(-lengths[0] // block_rows)

    def body(out_ref, dout_ref, *refs, scratch: DeltaScratch):
        group = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        head = lax.div(block, jnp.int32(tiles))
        tile = lax.rem(block, jnp.int32(tiles))
        b = lax.div(head, jnp.int32(N))
        n = lax.rem(head, jnp.int32(N))
        rows = pl.ds(tile * block_rows + group * ROWS, ROWS)
        out_s, do_s, delta_s = (x.at[group] for x in (scratch.out_s, scratch.do_s, scratch.delta_s))
        ready = scratch.ready.at[group]
        plgpu.copy_gmem_to_smem(head_rows(out_ref, b, rows, n), out_s, ready)
        plgpu.copy_gmem_to_smem(head_rows(dout_ref, b, rows, n), do_s, ready)
        if dlse is not None:
            plgpu.copy_gmem_to_smem(refs[0].at[b, n, rows], delta_s, ready)
        plgpu.barrier_wait(ready)
        delta = -row_sums(out_s, do_s, parts)
        if dlse is not None:
            delta = delta + plgpu.load(delta_s, layout=ROW)
        delta_s[...] = delta
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(delta_s, refs[-1].at[b, n, rows])
        plgpu.wait_smem_to_gmem(0)

    operands = jax.tree.leaves((out, dout, dlse))
    scratch = DeltaScratch(
        delta_s=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        do_s=tile_ref(GROUPS, ROWS, whole_width(D), out.dtype),
        out_s=tile_ref(GROUPS, ROWS, whole_width(D), out.dtype),
        ready=plgpu.Barrier(num_arrivals=len(operands), num_barriers=GROUPS),
    )
    types = [jax.ShapeDtypeStruct((B, N, tiles * block_rows), jnp.float32)]
    kernel = warp_specialized_kernel(
        body, "memeff_delta", types, {"scratch": scratch}, B * N * tiles, GROUPS
    )
    return kernel(*operands)[0]
