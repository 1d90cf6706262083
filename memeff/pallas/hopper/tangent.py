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
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.backward_common import (
    Tiling,
    choose_blocks,
    copy_tiles,
    query_rings,
    wait_for_slot,
)
from memeff.pallas.hopper.mosaic import (
    interpreter_staging,
    plgpu,
    tile_ref,
)
from memeff.pallas.hopper.persistent import ROWS, Roles, WorkState, run_persistent_kernel
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import (
    CallSizes,
    QueryWork,
    find_query_work,
)
from memeff.pallas.hopper.score_tile import (
    barrier_arrivals,
    copy_token_vectors,
    scratch_shapes,
)
from memeff.pallas.hopper.tangent_compute import TangentArrays, TangentScratch, compute_item
from memeff.pallas.hopper.tile_ranges import tiles_visited, with_lists
from memeff.problem import Problem


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

    visited = tiles_visited(problem, lengths, tiling.item_size, tiling.tile_size)
    bytes_read = S * H * 2 * (_count(arrays.keys) + _count(arrays.values))
    blocks, order = choose_blocks(
        problem, scalars, visited, tiling.tile_size, B * N, max(1, bytes_read // shape.G)
    )

    def roles(operands: Any, outputs: tuple, scratch: TangentScratch) -> Roles:
        array_refs, scalar_refs = operands
        find_work = functools.partial(
            find_query_work, problem, shape, scalar_refs, tiling.item_size, tiling.tile_size, order
        )
        compute = functools.partial(
            compute_item, problem, tiling, with_sink, (array_refs, outputs), scratch
        )
        copy = functools.partial(_copy, tiling, array_refs, scratch)
        return Roles(find_work, compute, copy, query_rings(tiling, scratch))

    # Rows of whole work items, because stores to a vector are bounded by its array, not by its
    # head.
    rows = visited.size * tiling.item_size
    types = (
        jax.ShapeDtypeStruct(arrays.query.shape, arrays.query.dtype),
        jax.ShapeDtypeStruct((B, N, rows), jnp.float32),
    )
    dout, dlse = run_persistent_kernel(
        "memeff_tangent",
        problem,
        (arrays, scalars),
        types,
        _scratch_types(arrays, scalars, tiling),
        roles,
        items=B * N * visited.size,
        blocks=blocks,
        consumers=tiling.warpgroups,
        sums_over_rows=True,
    )
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
        bad_keys_s=plgpu.SMEM((keys,), jnp.float32),
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
