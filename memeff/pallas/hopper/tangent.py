"""Compute the tangent of attention on Hopper (sm_90a) from lse, with five products a tile.

dq, dk and dv are tangents here. Logits and lse are in bits (times log2 e), tangents of logits in
nats. A thread block owns queries i, 64 for each computing warpgroup, and visits their keys j:
  (1) raw = q_i k_j';  d_raw = dq_i k_j' + q_i dk_j'
  (2) s = logits(raw);  ds = derivative of the logits along d_raw
  (3) p = 2^(s - lse_i);  w = p (ds - c_i);  r_i += rowsum w
  (4) u_i += p dv_j + w v_j
  at the end: dout = u - r out, dlse = r / l + c, where l_i = rowsum p
This holds for every c if p sums to 1. With a sink in lse, p sums to l < 1, and
dout = u - (r - c (1 - l)) out. Without a sink l differs from 1 because lse is rounded, by some
2^-24 |lse|. For dlse that is too much where r and c nearly cancel.
Products round w to 16 bits. A part of ds that is the same for a whole row does not change dout, but
would take up those bits. So c is the mean of ds, weighted by p, over the first tile in which the
row sees something: a masked tile, or the first tile without a mask. One loop finds c.
Operands that do not move have no products. If u is not finite, the item is done again as in the
forward, because 0 times NaN is NaN.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.logits import LOG2_E, allow_approx_math, logits_base2
from memeff.pallas.hopper.backward_common import (
    Gradient,
    Tiling,
    choose_blocks,
    copy_tiles,
    not_finite,
    optional_slot,
    query_rings,
    skip_tile,
    wait_for_slot,
)
from memeff.pallas.hopper.mosaic import (
    ROW,
    WGMMA,
    accumulators,
    broadcast_vector,
    full_tile,
    init_accumulator,
    interpreter_staging,
    multiply,
    plgpu,
    tile_ref,
    warp_specialized_kernel,
)
from memeff.pallas.hopper.nonfinite import clean_values
from memeff.pallas.hopper.persistent import ROWS, WorkState, run_warp_specialized
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import (
    CallSizes,
    QueryWork,
    find_query_work,
    may_have_unmasked_tiles,
)
from memeff.pallas.hopper.score_tile import (
    ScoreTile,
    TokenVectors,
    barrier_arrivals,
    copy_token_vectors,
    head_number_refs,
    scratch_shapes,
)
from memeff.pallas.hopper.tile_ranges import tiles_visited, with_lists
from memeff.problem import LogitParams, Problem


class TangentArrays(NamedTuple):
    """Operands and their tangents, padded as in `forward.attend`; or refs of them.

    None: the kernel does not read the array, or the operand does not move.
    """

    query: Any
    key: Any
    lse: Any  # [B, N, T'], in bits
    value: Any  # value and out only where logits move
    out: Any
    dq: Any
    dk: Any
    dv: Any

    @property
    def queries(self) -> tuple[Any, Any]:
        """Return the arrays of which each warpgroup reads its queries."""
        return self.query, self.dq

    @property
    def keys(self) -> tuple[Any, Any]:
        """Return the arrays of keys."""
        return self.key, self.dk

    @property
    def values(self) -> tuple[Any, Any]:
        """Return the arrays of values."""
        return self.value, self.dv


class TangentScratch(NamedTuple):
    """Shared memory and barriers of the kernel, in the order of their addresses."""

    all_warpgroups: Any  # barrier: the computing warpgroups and the one that copies
    computing: Any  # barrier: the computing warpgroups
    bad_columns_s: Any  # [H]
    bad_keys_s: Any  # [warpgroups, tile_size]
    failed_s: Any  # [warpgroups, 64]: flags of rows
    k_ready: Any
    k_used: Any
    keys_s: tuple[Any, ...]  # [stages, tile_size, H] of each of `TangentArrays.keys`
    lse_s: Any  # [items * warpgroups, 64]; dlse at the end
    token_vectors: TokenVectors
    out_ready: Any
    queries_s: tuple[Any, ...]  # [items * warpgroups, 64, H] of each of `TangentArrays.queries`
    item_ready: Any
    item_used: Any
    stage: Any  # for `multiply` in the interpreter
    v_ready: Any
    v_used: Any
    values_s: tuple[Any, ...]  # like keys_s


def tangents(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: TangentArrays,
    scalars: Scalars,
    tiling: Tiling,
    with_sink: bool = False,
) -> tuple[Array, Array]:
    """Return dout [B, T, N, H] and dlse [B, N, T''].

    `lengths`: T and S without padding. `with_sink`: lse includes a sink; dlse is then of no use.
    """
    B, _, N, H = arrays.query.shape
    K = arrays.key.shape[2]
    T, S = lengths
    shape = CallSizes(B, T, S, K, N // K)
    scalars = with_ranges(scalars, lengths, tiling.item_size)
    scalars = with_lists(problem, scalars, lengths, (tiling.item_size, tiling.tile_size))
    operands, structure = jax.tree.flatten((arrays, scalars))

    visited = tiles_visited(problem, lengths, tiling.item_size, tiling.tile_size)
    bytes_read = S * H * 2 * (_count(arrays.keys) + _count(arrays.values))
    blocks, order = choose_blocks(
        problem, scalars, visited, tiling.tile_size, B * N, max(1, bytes_read // shape.G)
    )

    def body(*refs, scratch: TangentScratch):
        array_refs, scalar_refs = jax.tree.unflatten(structure, refs[: len(operands)])
        outputs = refs[len(operands) :]
        find_work = functools.partial(
            find_query_work, problem, shape, scalar_refs, tiling.item_size, tiling.tile_size, order
        )
        compute = functools.partial(
            _compute, problem, tiling, with_sink, (array_refs, outputs), scratch
        )
        copy = functools.partial(_copy, tiling, array_refs, scratch)
        rings = query_rings(tiling, scratch)
        run_warp_specialized(
            find_work,
            compute,
            copy,
            items=B * N * visited.size,
            blocks=blocks,
            failed_s=scratch.failed_s,
            all_done=scratch.all_warpgroups,
            rings=rings,
        )

    # Rows of whole work items, because stores to a vector are bounded by its array, not by its
    # head.
    rows = visited.size * tiling.item_size
    types = (
        jax.ShapeDtypeStruct(arrays.query.shape, arrays.query.dtype),
        jax.ShapeDtypeStruct((B, N, rows), jnp.float32),
    )
    kernel = warp_specialized_kernel(
        body,
        "memeff_tangent",
        types,
        {"scratch": _scratch_types(arrays, scalars, tiling)},
        blocks,
        tiling.warpgroups + 1,
        allow_approx_math(problem),
        sums_over_rows=True,
    )
    dout, dlse = kernel(*operands)
    return dout, dlse


def _count(arrays: tuple) -> int:
    """Return how many arrays are not None."""
    return sum(x is not None for x in arrays)


def _scratch_types(arrays: TangentArrays, scalars: Scalars, tiling: Tiling) -> TangentScratch:
    """Return the types of the kernel's shared memory and barriers."""
    H = arrays.query.shape[-1]
    dtype = arrays.query.dtype
    groups, keys, stages = tiling[:3]
    slots = tiling.items * groups
    query_vectors, key_vectors = barrier_arrivals(scalars)

    def tiles(operands, count: int, rows: int):
        tile = tile_ref(count, rows, H, dtype)
        return tuple(None if x is None else tile for x in operands)

    query_copies = _count(arrays.queries) + 1 + query_vectors  # 1: lse
    key_copies = _count(arrays.keys) + key_vectors
    value_copies = _count(arrays.values)
    return TangentScratch(
        all_warpgroups=plgpu.Barrier(num_arrivals=groups + 1),
        computing=plgpu.Barrier(num_arrivals=groups),
        bad_columns_s=plgpu.SMEM((H,), jnp.float32),
        bad_keys_s=plgpu.SMEM((groups, keys), jnp.float32),
        failed_s=plgpu.SMEM((groups, ROWS), jnp.float32),
        k_ready=plgpu.Barrier(num_arrivals=key_copies, num_barriers=stages),
        k_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        keys_s=tiles(arrays.keys, stages, keys),
        lse_s=plgpu.SMEM((slots, ROWS), jnp.float32),
        out_ready=plgpu.Barrier(num_barriers=groups),
        queries_s=tiles(arrays.queries, slots, ROWS),
        item_ready=plgpu.Barrier(num_arrivals=query_copies, num_barriers=slots),
        item_used=plgpu.Barrier(num_arrivals=groups, num_barriers=tiling.items),
        stage=interpreter_staging(groups, ROWS, keys, dtype).get("stage"),
        v_ready=plgpu.Barrier(num_arrivals=value_copies, num_barriers=stages),
        v_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        values_s=tiles(arrays.values, stages, keys),
        **scratch_shapes(scalars, (slots, ROWS), (stages, keys)),
    )


def _copy(
    tiling: Tiling,
    arrays: TangentArrays,
    scratch: TangentScratch,
    work: QueryWork,
    state: WorkState,
) -> tuple[Array, Array]:
    """Copy the queries of each warpgroup, and keys and values once for all warpgroups."""
    query_vectors, key_vectors = scratch.token_vectors
    count = work.visits.total
    item = lax.rem(state.items_done, jnp.int32(tiling.items))

    def copy_tiles_of(refs, tiles_s, tokens, slot, ready):
        for ref, tile_s in zip(refs, tiles_s, strict=True):
            if ref is not None:
                plgpu.copy_gmem_to_smem(ref.at[tokens], tile_s.at[slot], ready)

    def copy_item():
        wait_for_slot(scratch.item_used, item, state.items_done >= tiling.items)
        for group in range(tiling.warpgroups):
            rows = pl.ds(work.row + group * ROWS, ROWS)
            slot = item * tiling.warpgroups + group
            ready = scratch.item_ready.at[slot]
            tokens = work.b, rows, work.n
            copy_tiles_of(arrays.queries, scratch.queries_s, tokens, slot, ready)
            lse = arrays.lse.at[work.b, work.n, rows]
            plgpu.copy_gmem_to_smem(lse, scratch.lse_s.at[slot], ready)
            copy_token_vectors(work.scalars.by_query, rows, query_vectors, slot, ready)

    def copy_keys(n):
        visit = state.tiles_visited + n
        slot = lax.rem(visit, jnp.int32(tiling.stages))
        cols = pl.ds(work.visits.tile(n) * tiling.tile_size, tiling.tile_size)
        tokens = work.b, cols, work.k
        k_ready = scratch.k_ready.at[slot]
        wait_for_slot(scratch.k_used, slot, visit >= tiling.stages)
        copy_tiles_of(arrays.keys, scratch.keys_s, tokens, slot, k_ready)
        copy_token_vectors(work.scalars.by_key, cols, key_vectors, slot, k_ready)
        wait_for_slot(scratch.v_used, slot, visit >= tiling.stages)
        copy_tiles_of(arrays.values, scratch.values_s, tokens, slot, scratch.v_ready.at[slot])

    return copy_tiles(copy_item, copy_keys, state, count, tiling)


class RowState(NamedTuple):
    """Sums of each row: r, c and l, the sum of p."""

    r: Array
    c: Array
    l: Array


def logits_and_tangent(
    problem: Problem, raw: Array, tile: ScoreTile, keep: Array | None
) -> tuple[Array, Callable[[Array], Array]]:
    """Do (2): return s in bits, and the function that makes ds in nats from d_raw."""
    gradient = Gradient(problem)
    if gradient.linear:

        def scaled(d_raw):
            ds = d_raw * gradient.slope
            return ds if keep is None else jnp.where(keep, ds, 0.0)

        return tile.logits(raw, keep), scaled
    indices = tile.pair_indices(problem.score_fn)

    def logits(raw):
        return logits_base2(problem, raw, LogitParams(), keep, indices)

    s, push = jax.linearize(logits, raw)
    return s, lambda d_raw: push(d_raw * (1 / LOG2_E))


def accumulate_on(u: Array, steps: Callable) -> tuple[Any, Array]:
    """Return the result of `steps(accumulator)`, and u plus what the steps add."""

    def run_steps(total):
        add_u = init_accumulator(total, u)
        result = steps(total)
        return result, add_u(plgpu.wgmma_accumulator_load(total, wait_n=0))

    rows, cols = u.shape
    return accumulators(run_steps, (rows, cols))


def _compute(
    problem: Problem,
    tiling: Tiling,
    with_sink: bool,
    refs: tuple[TangentArrays, tuple],
    scratch: TangentScratch,
    group,
    work: QueryWork,
    state: WorkState,
) -> tuple[Array, Array]:
    """Compute dout and dlse of one warpgroup's queries."""
    arrays, (dout_ref, dlse_ref) = refs
    query_s, _ = scratch.queries_s
    dtype = query_s.dtype
    shape = ROWS, tiling.tile_size
    u_shape = ROWS, query_s.shape[-1]
    rows = pl.ds(work.row + group * ROWS, ROWS)
    count = work.visits.total
    item = lax.rem(state.items_done, jnp.int32(tiling.items))
    item_slot = item * tiling.warpgroups + group
    q, dq = (optional_slot(x, item_slot) for x in scratch.queries_s)
    stage = optional_slot(scratch.stage, group)
    numbers = head_number_refs(work.scalars, work.n)

    def slot_of(n):
        return lax.rem(state.tiles_visited + n, jnp.int32(tiling.stages))

    def score_tile(n):
        by_query, by_key = scratch.token_vectors
        first = work.row + group * ROWS, work.visits.tile(n) * tiling.tile_size
        query_vectors = tuple(x.at[item_slot] for x in by_query)
        key_vectors = tuple(x.at[slot_of(n)] for x in by_key)
        vectors = query_vectors, key_vectors
        return ScoreTile(problem, shape, first, work.mask_inputs, work.scalars, numbers, vectors)

    def step(n, hides, sums: RowState, u):
        slot = slot_of(n)
        tile = score_tile(n).with_loads_started()
        waits = state.first_round or not hides  # `clean_step` has waited before
        k, dk, v, dv = (optional_slot(x, slot) for x in (*scratch.keys_s, *scratch.values_s))
        if waits:
            plgpu.barrier_wait(scratch.k_ready.at[slot])
        keep = tile.mask() if hides else None
        factors = [(x, y) for x, y in ((dq, k), (q, dk)) if x is not None and y is not None]

        def products(raw, d_raw=None):
            plgpu.wgmma(raw, q, k.T)  # (1)
            for x, y in factors:
                plgpu.wgmma(d_raw, x, y.T)
            raw = plgpu.wgmma_accumulator_load(raw, wait_n=len(factors))
            s, push = logits_and_tangent(problem, raw, tile, keep)  # (2)
            p = jnp.exp2(s - broadcast_vector(lse, shape))  # (3)
            if waits:
                plgpu.barrier_wait(scratch.v_ready.at[slot])
            if dv is not None:
                multiply(u, p.astype(dtype), dv, stage)  # (4)
            if d_raw is None:
                return sums
            r, c, l = sums
            ds = push(plgpu.wgmma_accumulator_load(d_raw, wait_n=int(dv is not None)))
            l_tile = p.sum(axis=1)
            if hides:
                has_c = l > 0
                mean = (p * ds).sum(axis=1) / jnp.where(l_tile > 0, l_tile, 1.0)
                c = jnp.where(has_c, c, mean)
            w = p * (ds - broadcast_vector(c, shape))
            multiply(u, w.astype(dtype), v, stage)  # (4)
            return RowState(r + w.sum(axis=1), c, l + l_tile)

        sums = accumulators(products, shape, *[shape] * bool(factors))
        plgpu.barrier_arrive(scratch.k_used.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch.v_used.at[slot])
        return sums

    def clean_step(n, carry):
        """Do a step with cleaned values; u is kept apart because NaN may come into it."""
        sums, u = carry
        plgpu.barrier_wait(scratch.k_ready.at[slot_of(n)])
        plgpu.barrier_wait(scratch.v_ready.at[slot_of(n)])
        room = scratch.bad_keys_s.at[group], scratch.bad_columns_s, scratch.computing
        for values_s in scratch.values_s:
            if values_s is not None:
                u = clean_values(values_s.at[slot_of(n)], u, score_tile(n), group, room)
        return accumulate_on(u, functools.partial(step, n, True, sums))

    def skip(n):
        skip_tile(scratch, slot_of(n))

    plgpu.barrier_wait(scratch.item_ready.at[item_slot])
    lse = plgpu.load(scratch.lse_s.at[item_slot], layout=ROW)
    visits = work.visits
    whole = may_have_unmasked_tiles(problem, work.scalars)
    c_end = count  # visits before c_end find c
    if whole:
        masked = visits.masked
        uncovered = jnp.where(visits.right_covers_rows & (visits.masked_right > 0), 0, 1)
        c_end = jnp.minimum(masked + uncovered, count)
    zeros = RowState(*[full_tile((ROWS,), 0.0)] * 3)

    def visit_whole(sums, u):
        """Visit the tiles without masks, in which every row sees what is not finite."""
        if not whole:
            return sums
        return lax.fori_loop(c_end, count, lambda n, sums: step(n, False, sums, u), sums)

    def visit_tiles(u):
        hidden = work.count_hidden_visits(work.row + group * ROWS, ROWS)
        pl.loop(0, hidden)(skip)
        sums = lax.fori_loop(hidden, c_end, lambda n, sums: step(n, True, sums, u), zeros)
        return visit_whole(sums, u), plgpu.wgmma_accumulator_load(u, wait_n=0)

    if state.first_round:
        sums, u = accumulators(visit_tiles, u_shape)
    else:
        sums, u = lax.fori_loop(0, c_end, clean_step, (zeros, full_tile(u_shape, 0.0)))
        sums, u = accumulate_on(u, functools.partial(visit_whole, sums))
    r, c, l = sums
    failed = not_finite(scratch.failed_s.at[group], state, u)
    if arrays.out is not None:  # in the place of the query
        out_ready = scratch.out_ready.at[group]
        plgpu.copy_gmem_to_smem(arrays.out.at[work.b, rows, work.n], q, out_ready)
        plgpu.barrier_wait(out_ready)
        mean = r - c * (1 - l) if with_sink else r
        u = u - broadcast_vector(mean, u_shape) * plgpu.load(q, layout=WGMMA).astype(jnp.float32)
    q[...] = u.astype(dtype)
    r_of_lse = r if with_sink else r / jnp.where(l == 0, 1.0, l)
    scratch.lse_s[item_slot] = r_of_lse + c
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, dout_ref.at[work.b, rows, work.n])
    dlse_s = scratch.lse_s.at[item_slot]
    plgpu.copy_smem_to_gmem(dlse_s, dlse_ref.at[work.b, work.n, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(scratch.item_used.at[item])
    return count, failed
