"""Compute the gradient of the query on Hopper, by steps (1) to (4) of `backward_common`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.backward_common import (
    Gradient,
    Tiling,
    choose_blocks,
    copy_tiles,
    count_term_gradients,
    float16_lift,
    not_finite,
    optional_slot,
    query_rings,
    row_sums,
    scale_sums,
    skip_tile,
    token_vectors,
    undo_lift,
    wait_for_slot,
)
from memeff.pallas.hopper.bias import bias_tiles, copy_bias
from memeff.pallas.hopper.mosaic import (
    ROW,
    accumulators,
    broadcast_vector,
    full_tile,
    head_rows,
    interpreter_staging,
    plgpu,
    tile_ref,
    whole_width,
)
from memeff.pallas.hopper.nonfinite import clean_shared
from memeff.pallas.hopper.parts import (
    factors_of,
    multiply_parts,
    parts_of,
    products,
    split_tile,
    store_tile,
    transposed,
)
from memeff.pallas.hopper.persistent import ROWS, IfBad, Roles, WorkState, run_persistent_kernel
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import (
    CallSizes,
    QueryWork,
    find_query_work,
    may_have_unmasked_tiles,
    order_for_bias,
)
from memeff.pallas.hopper.score_tile import (
    HeadNumbers,
    ScoreTile,
    TokenVectors,
    barrier_arrivals,
    copy_token_vectors,
    head_number_refs,
    scratch_shapes,
)
from memeff.pallas.hopper.tile_ranges import tiles_visited, with_lists
from memeff.problem import Problem


class QueryScratch(NamedTuple):
    """Shared memory and barriers of the kernel, in the order of their addresses."""

    all_warpgroups: Any  # barrier: the computing warpgroups and the one that copies
    bias_s: Any  # [stages, item_size, tile_size], if it is of pairs
    computing: Any  # barrier: the computing warpgroups
    do_s: Any  # like q_s
    failed_s: Any  # [warpgroups, 64]: flags of rows
    k_s: Any  # [stages, tile_size, H]
    k_ready: Any
    k_used: Any
    token_vectors: TokenVectors
    out_s: Any  # like q_s; dq at the end, which without `out` is in q_s
    item_ready: Any
    item_used: Any
    q_s: Any  # [items * warpgroups, 64, H]
    rows_s: Any  # [2, items * warpgroups, 64]: lse, then sums; dlse or nothing, then delta
    stage: Any  # for `multiply` in the interpreter
    v_s: Any  # [stages, tile_size, D]
    v_ready: Any
    v_used: Any


def query_gradient(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: tuple[Array | None, ...],
    row_terms: Array | None,
    scalars: Scalars,
    tiling: Tiling,
    if_bad: IfBad | None = None,
) -> tuple[Array, ...]:
    """Return dq [B, T, N, H], delta [B, N, T''], and like delta one sum for each term's gradient.

    `arrays`: query, key, value, out and dout, padded as in `forward.attend`, and lse (in bits)
    [B, N, T']. `row_terms` [B, N, T'] is the cotangent of lse. If out is None, it is delta, which
    is not returned then. `lengths`: T and S without padding. The sums over keys are those of
    cotangents of the scale, the soft cap and `score_fn`'s inputs.
    """
    query, _, value, out, _, _ = arrays
    assert query is not None and value is not None
    _, padded_T, N, H = query.shape
    B = scalars.batch_size(query)
    _, _, K, D = value.shape
    T, S = lengths
    shape = CallSizes(B, T, S, K, N // K)
    scalars = with_ranges(scalars, lengths, tiling.item_size)
    scalars = with_lists(problem, scalars, lengths, (tiling.item_size, tiling.tile_size))

    visited = tiles_visited(problem, lengths, tiling.item_size, tiling.tile_size)
    bytes_read = max(1, S * (H + D) * 2 // shape.G)
    blocks, order = choose_blocks(problem, scalars, visited, tiling.tile_size, B * N, bytes_read)
    order = order_for_bias(order, scalars, B)

    def roles(operands: Any, outputs: tuple, scratch: QueryScratch) -> Roles:
        array_refs, row_terms_ref, scalar_refs = operands
        find_work = functools.partial(
            find_query_work, problem, shape, scalar_refs, tiling.item_size, tiling.tile_size, order
        )
        has_row_terms = row_terms is not None
        compute = functools.partial(_compute, problem, tiling, outputs, has_row_terms, scratch)
        copy = functools.partial(_copy, tiling, (*array_refs, row_terms_ref), scratch)
        return Roles(find_work, compute, copy, query_rings(tiling, scratch))

    # Rows of whole work items, because stores to a vector are bounded by its array, not by its
    # head.
    rows = visited.size * tiling.item_size
    sums = count_term_gradients(problem, scalars)
    types = [
        jax.ShapeDtypeStruct((B, padded_T, N, H), query.dtype),
        *[jax.ShapeDtypeStruct((B, N, rows), jnp.float32)] * ((out is not None) + sums),
    ]
    row_arrays = sum(x is not None for x in (*arrays[3:], row_terms))
    scratch = _scratch_types(
        (whole_width(H), whole_width(D)), query.dtype, out is not None, row_arrays, scalars, tiling
    )
    return run_persistent_kernel(
        "memeff_dq",
        problem,
        (arrays, row_terms, scalars),
        types,
        scratch,
        roles,
        items=B * N * visited.size,
        blocks=blocks,
        consumers=tiling.warpgroups,
        if_bad=if_bad,
    )


def _scratch_types(
    head_dims: tuple[int, int],
    dtype,
    has_out: bool,
    row_arrays: int,
    scalars: Scalars,
    tiling: Tiling,
) -> QueryScratch:
    """Return the types of shared memory and barriers. A warpgroup's queries have `row_arrays`."""
    H, D = head_dims
    groups, keys, stages = tiling[:3]
    _, value_stages = tiling.both_stages
    slots = tiling.items * groups
    query_vectors, key_vectors = barrier_arrivals(scalars)
    return QueryScratch(
        all_warpgroups=plgpu.Barrier(num_arrivals=groups + 1),
        bias_s=bias_tiles(scalars, stages, tiling.item_size, keys),
        computing=plgpu.Barrier(num_arrivals=groups),
        do_s=tile_ref(slots, ROWS, D, dtype),
        failed_s=plgpu.SMEM((groups, ROWS), jnp.float32),
        k_s=tile_ref(stages, keys, H, dtype),
        k_ready=plgpu.Barrier(
            num_arrivals=1 + key_vectors + (scalars.bias is not None), num_barriers=stages
        ),
        k_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        out_s=tile_ref(slots, ROWS, D, dtype) if has_out else None,
        item_ready=plgpu.Barrier(num_arrivals=1 + row_arrays + query_vectors, num_barriers=slots),
        item_used=plgpu.Barrier(num_arrivals=groups, num_barriers=tiling.items),
        q_s=tile_ref(slots, ROWS, H, dtype),
        rows_s=plgpu.SMEM((2, slots, ROWS), jnp.float32),
        stage=interpreter_staging(groups, ROWS, keys, dtype).get("stage"),
        v_s=tile_ref(value_stages, keys, D, dtype),
        v_ready=plgpu.Barrier(num_barriers=value_stages),
        v_used=plgpu.Barrier(num_arrivals=groups, num_barriers=value_stages),
        **scratch_shapes(scalars, (slots, ROWS), (stages, keys)),
    )


def _copy(
    tiling: Tiling,
    arrays: tuple,
    scratch: QueryScratch,
    work: QueryWork,
    state: WorkState,
) -> tuple[Array, Array]:
    """Copy the queries of each warpgroup, and keys and values once for all warpgroups."""
    query_ref, key_ref, value_ref, out_ref, dout_ref, lse_ref, row_terms_ref = arrays
    query_vectors, key_vectors = scratch.token_vectors
    count = work.visits.total
    item = lax.rem(state.items_done, jnp.int32(tiling.items))

    def copy_queries(group):
        rows = pl.ds(work.row + group * ROWS, ROWS)
        slot = item * tiling.warpgroups + group
        ready = scratch.item_ready.at[slot]

        def copy_tile(ref, tile_s):
            tile = head_rows(ref, work.source.query, rows, work.n)
            plgpu.copy_gmem_to_smem(tile, tile_s.at[slot], ready)

        def copy_vector(ref, vector_s):
            vector = ref.at[work.source.query, work.n, rows]
            plgpu.copy_gmem_to_smem(vector, vector_s.at[slot], ready)

        if out_ref is not None:
            copy_tile(out_ref, scratch.out_s)
        copy_tile(dout_ref, scratch.do_s)
        copy_tile(query_ref, scratch.q_s)
        copy_vector(lse_ref, scratch.rows_s.at[0])
        if row_terms_ref is not None:
            copy_vector(row_terms_ref, scratch.rows_s.at[1])
        copy_token_vectors(work.scalars.by_query, rows, query_vectors, slot, ready)

    def copy_item():
        wait_for_slot(scratch.item_used, item, state.items_done >= tiling.items)
        for group in range(tiling.warpgroups):
            copy_queries(group)

    key_stages, value_stages = tiling.both_stages

    def copy_keys(n):
        visit = state.tiles_visited + n
        slot = lax.rem(visit, jnp.int32(key_stages))
        cols = pl.ds(work.visits.tile(n) * tiling.tile_size, tiling.tile_size)
        k_ready = scratch.k_ready.at[slot]
        wait_for_slot(scratch.k_used, slot, visit >= key_stages)
        key = head_rows(key_ref, work.source.key, cols, work.k)
        plgpu.copy_gmem_to_smem(key, scratch.k_s.at[slot], k_ready)
        copy_token_vectors(work.scalars.by_key, cols, key_vectors, slot, k_ready)
        item_rows = pl.ds(work.row, tiling.item_size)
        copy_bias(work.scalars, work.n, item_rows, cols, scratch.bias_s, slot, k_ready)
        slot = lax.rem(visit, jnp.int32(value_stages))
        wait_for_slot(scratch.v_used, slot, visit >= value_stages)
        v_ready = scratch.v_ready.at[slot]
        value = head_rows(value_ref, work.source.value, cols, work.k)
        plgpu.copy_gmem_to_smem(value, scratch.v_s.at[slot], v_ready)

    return copy_tiles(copy_item, copy_keys, state, count, tiling)


def _compute(
    problem: Problem,
    tiling: Tiling,
    outputs: tuple,
    has_row_terms: bool,
    scratch: QueryScratch,
    group,
    work: QueryWork,
    state: WorkState,
) -> tuple[Array, Array]:
    """Compute dq, delta and the sums over keys of one warpgroup's queries."""
    has_out = scratch.out_s is not None
    dq_ref, *sum_refs = outputs
    gradient = Gradient(problem, work.scalars.logit_terms, wants_terms=True)
    rows = pl.ds(work.row + group * ROWS, ROWS)
    item = lax.rem(state.items_done, jnp.int32(tiling.items))
    slot = item * tiling.warpgroups + group
    numbers = head_number_refs(work.scalars, work.n)
    lse, delta = _load_rows(tiling, has_row_terms, scratch, slot, state)
    if has_out:
        delta_ref, *sum_refs = sum_refs
        delta_s = scratch.rows_s.at[1, slot]
        delta_s[...] = delta
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(delta_s, delta_ref.at[work.b, work.n, rows])  # for dk and dv

    visits = _Visits(
        problem, tiling, scratch, gradient, group, work, state, slot, numbers, lse, delta
    )
    q = scratch.q_s.at[slot]
    visit_all = functools.partial(visits.visit_all, 0 if gradient.linear else len(sum_refs))
    dq, sums = accumulators(visit_all, (ROWS, q.shape[-1] // tiling.parts))
    if gradient.linear:
        sums = [scale_sums(q, dq, tiling.parts) for _ in sum_refs]
    dtype = scratch.q_s.dtype
    dq = undo_lift(dq * gradient.slope, dtype, state)
    sums = [undo_lift(x, dtype, state) for x in sums]
    failed = not_finite(scratch.failed_s.at[group], state, dq)

    stored = scratch.out_s.at[slot] if has_out else q
    store_tile(stored, dq, tiling.parts)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stored, head_rows(dq_ref, work.b, rows, work.n))
    sum_s = scratch.rows_s.at[0, slot]  # the place of lse
    for ref, x in zip(sum_refs, sums, strict=True):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sum_s[...] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sum_s, ref.at[work.b, work.n, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(scratch.item_used.at[item])
    return work.visits.total, failed


def _load_rows(
    tiling: Tiling, has_row_terms: bool, scratch: QueryScratch, slot, state: WorkState
) -> tuple[Array, Any]:
    """Wait for the queries in `slot`, and return their lse and delta, [64] each."""
    plgpu.barrier_wait(scratch.item_ready.at[slot])
    delta: Any = plgpu.load(scratch.rows_s.at[1, slot], layout=ROW) if has_row_terms else None
    if scratch.out_s is not None:
        product = row_sums(scratch.out_s.at[slot], scratch.do_s.at[slot], tiling.parts)
        delta = -product if delta is None else delta - product
    lse = plgpu.load(scratch.rows_s.at[0, slot], layout=ROW)
    if not state.first_round:
        lse = lse + float16_lift(scratch.q_s.dtype)
    return lse, delta


class _Visits(NamedTuple):
    """The tiles of keys that one warpgroup's queries visit."""

    problem: Problem
    tiling: Tiling
    scratch: QueryScratch
    gradient: Gradient
    group: Any
    work: QueryWork
    state: WorkState
    query_slot: Any
    numbers: HeadNumbers
    lse: Array  # of a row, as delta
    delta: Array

    def visit_all(self, sum_count: int, dq) -> tuple[Array, tuple[Array, ...]]:
        """Add all visits to dq; return it and `sum_count` sums over keys, [64] each."""
        work, first_round = self.work, self.state.first_round
        first_row = work.row + self.group * ROWS
        masked = work.visits.masked
        hidden = work.count_hidden_visits(first_row, ROWS) if first_round else 0
        pl.loop(0, hidden)(self._skip)
        sums = (full_tile((ROWS,), 0.0),) * sum_count
        visit_masked = functools.partial(self._visit, dq, True)
        if not first_round:
            sums = lax.fori_loop(0, work.visits.total, visit_masked, sums)
        else:
            sums = lax.fori_loop(hidden, masked, visit_masked, sums)
            if may_have_unmasked_tiles(self.problem, work.scalars):
                visit = functools.partial(self._visit, dq, False)
                sums = lax.fori_loop(masked, work.visits.total, visit, sums)
        return plgpu.wgmma_accumulator_load(dq, wait_n=0), sums

    def _slots(self, n) -> tuple[Array, Array]:
        """Return the slots of the keys and of the values of the n-th tile."""
        visit = self.state.tiles_visited + n
        key_stages, value_stages = self.tiling.both_stages
        return lax.rem(visit, jnp.int32(key_stages)), lax.rem(visit, jnp.int32(value_stages))

    def _skip(self, n) -> None:
        """Pass over the n-th tile, of which these queries see nothing."""
        skip_tile(self.scratch, *self._slots(n))

    def _visit(self, dq, masked: bool, n, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        """Do (1) to (4) for the n-th tile: add to dq, and return the sums with its parts."""
        scratch, parts = self.scratch, self.tiling.parts
        slot, value_slot = self._slots(n)
        k = scratch.k_s.at[slot]
        plgpu.barrier_wait(scratch.k_ready.at[slot])
        if masked and not self.state.first_round:  # (1) and (4) read the keys
            clean_shared(k, self.group, scratch.computing)
        tile = self._tile(n, slot)
        keep = tile.mask() if masked else None
        q = factors_of(scratch.q_s.at[self.query_slot], parts)
        do = factors_of(scratch.do_s.at[self.query_slot], parts)
        k_parts = parts_of(k, parts)
        v_parts = parts_of(scratch.v_s.at[value_slot], parts)
        stage = optional_slot(scratch.stage, self.group)

        def multiply(raw, dp):
            multiply_parts(raw, q, transposed(k_parts))  # (1)
            finish_dp = self.gradient.start_dp(dp, broadcast_vector(self.delta, tile.shape))
            plgpu.barrier_wait(scratch.v_ready.at[value_slot])
            multiply_parts(dp, do, transposed(v_parts))
            raw = plgpu.wgmma_accumulator_load(raw, wait_n=products(parts))
            lse = broadcast_vector(self.lse, tile.shape)
            p, cotangents = self.gradient.probabilities(raw, lse, tile, keep)  # (2)
            dp = finish_dp(p, plgpu.wgmma_accumulator_load(dp, wait_n=0))
            plgpu.barrier_arrive(scratch.v_used.at[value_slot])
            d_raw, d_terms = cotangents(p, dp)  # (3)
            d_raw = split_tile(d_raw, scratch.q_s.dtype, parts)
            multiply_parts(dq, d_raw, k_parts, stage)  # (4)
            plgpu.wgmma_wait(0)
            return tuple(total + x.sum(axis=1) for total, x in zip(sums, d_terms, strict=True))

        sums = accumulators(multiply, tile.shape, tile.shape)
        plgpu.barrier_arrive(scratch.k_used.at[slot])
        return sums

    def _tile(self, n, slot) -> ScoreTile:
        """Return the n-th tile, whose keys are in `slot`."""
        work, scratch, tile_size = self.work, self.scratch, self.tiling.tile_size
        first = work.row + self.group * ROWS, work.visits.tile(n) * tile_size
        vectors = token_vectors(scratch.token_vectors, self.query_slot, slot)
        shape = ROWS, tile_size
        inputs = work.mask_inputs, work.scalars, self.numbers, vectors
        tile = ScoreTile(self.problem, shape, first, *inputs)
        bias_rows = pl.ds(self.group * ROWS, ROWS)
        tile = tile.with_loads_started()
        return tile.with_bias(work.n, optional_slot(scratch.bias_s, (slot, bias_rows)))
