"""Compute the gradient of the bias on Hopper, from lse and delta of the other kernels.

  (1) raw = q_i k_j';  dp = do_i v_j'      (3) ds = p (dp + delta_i), 0 where hidden
  (2) p = 2^(logits(raw) - lse_i)          (4) dbias += ds
A work item owns one part of the gradient (bias_work.py) and visits the tiles of pairs that it is a
sum of, always in the same order: two runs give the same bits, and nothing else is stored.
Nothing is multiplied by ds, so NaN and Inf of hidden pairs need not be cleaned: (3) drops them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.backward_common import (
    Gradient,
    float16_lift,
    token_vectors,
    wait_for_slot,
)
from memeff.pallas.hopper.bias import bias_tiles, copy_bias
from memeff.pallas.hopper.bias_work import BiasParts, BiasVisit, BiasWork, SharedBias
from memeff.pallas.hopper.mosaic import (
    ROW,
    Barrier,
    Ref,
    accumulators,
    broadcast_vector,
    full_tile,
    head_rows,
    plgpu,
    release_read,
    tile_ref,
    whole_width,
)
from memeff.pallas.hopper.persistent import (
    ROWS,
    Ring,
    Roles,
    WorkState,
    persistent_blocks,
    run_persistent_kernel,
)
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.scheduler import CallSizes
from memeff.pallas.hopper.score_tile import (
    ScoreTile,
    TokenVectors,
    barrier_arrivals,
    copy_token_vectors,
    head_number_refs,
    scratch_shapes,
)
from memeff.problem import Problem


class Tiling(NamedTuple):
    """Tile sizes of the kernel, and the number of tiles in shared memory."""

    warpgroups: int  # that compute, 64 queries each
    keys: int
    stages: int  # visits that are being copied or in use
    items: int  # tiles of the bias that are being copied, in use or stored

    @property
    def rows(self) -> int:
        """Return the number of queries of a tile."""
        return self.warpgroups * ROWS


class BiasScratch(NamedTuple):
    """Shared memory and barriers of the kernel, in the order of their addresses."""

    all_warpgroups: Barrier
    bias_s: Ref  # [items, t, c] of a bias of pairs; its gradient at the end
    bias_ready: Barrier
    bias_used: Barrier
    do_s: Ref  # [stages, t, D]
    failed_s: Ref  # [warpgroups, 64]: always 0 here
    k_s: Ref  # [stages, c, H]
    q_s: Ref  # [stages, t, H]
    token_vectors: TokenVectors
    ready: Barrier  # of a visit
    rows_s: Ref  # [2 * stages, t]: lse, delta
    sums_s: Ref  # [t] or [c]: the gradient of a bias of queries or of keys
    used: Barrier
    v_s: Ref  # [stages, c, D]


def bias_gradient(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: tuple[Array, ...],
    scalars: Scalars,
    shared: SharedBias,
    tiling: Tiling,
) -> Array:
    """Return the gradient of the bias.

    It is like `scalars.bias`, but with one entry of a dim that is `shared`; or like `query_bias` or
    `key_bias`, padded to whole tiles. `arrays`: query, key, value and dout, padded as in
    `forward.attend`, and lse (in bits) and delta [B, N, T']. `lengths`: T and S without padding.
    """
    query, key, value = arrays[:3]
    B, _, N, H = query.shape
    _, _, K, D = value.shape
    T, S = lengths
    sizes = CallSizes(B, T, S, K, N // K)
    parts = BiasParts.of(sizes, scalars, shared, (tiling.rows, tiling.keys))
    items = math.prod(parts.item_dims)

    def roles(operands: Any, outputs: tuple, scratch: BiasScratch) -> Roles:
        array_refs, scalar_refs = operands
        (gradient_ref,) = outputs
        rings = [Ring(tiling.stages, True, (scratch.used,))]
        if scratch.bias_s is not None:
            rings.append(Ring(tiling.items, False, (scratch.bias_used,)))
        return Roles(
            functools.partial(parts.find_work, problem, sizes, scalar_refs),
            functools.partial(_compute, problem, tiling, gradient_ref, scratch),
            functools.partial(_copy, tiling, array_refs, scalar_refs, scratch),
            rings,
        )

    (gradient,) = run_persistent_kernel(
        "memeff_dbias",
        problem,
        (arrays, scalars),
        [parts.result],
        _scratch_types((whole_width(H), whole_width(D)), query.dtype, scalars, tiling),
        roles,
        items=items,
        blocks=persistent_blocks(items),
        consumers=tiling.warpgroups,
        sums_over_rows=scalars.key_bias is not None,
    )
    return gradient


def _scratch_types(
    head_dims: tuple[int, int], dtype, scalars: Scalars, tiling: Tiling
) -> BiasScratch:
    """Return the types of the kernel's shared memory and barriers."""
    H, D = head_dims
    groups, keys, stages, items = tiling
    rows = tiling.rows
    query_vectors, key_vectors = barrier_arrivals(scalars)
    bias_s = bias_tiles(scalars, items, rows, keys)
    sums_s = bias_ready = bias_used = None
    if bias_s is not None:
        bias_ready = plgpu.Barrier(num_barriers=items)
        bias_used = plgpu.Barrier(num_arrivals=groups, num_barriers=items)
    else:
        length = keys if scalars.query_bias is None else rows
        sums_s = plgpu.SMEM((length,), jnp.float32)
    return BiasScratch(
        all_warpgroups=plgpu.Barrier(num_arrivals=groups + 1),
        bias_s=bias_s,
        bias_ready=bias_ready,
        bias_used=bias_used,
        do_s=tile_ref(stages, rows, D, dtype),
        failed_s=plgpu.SMEM((groups, ROWS), jnp.float32),
        k_s=tile_ref(stages, keys, H, dtype),
        q_s=tile_ref(stages, rows, H, dtype),
        ready=plgpu.Barrier(num_arrivals=6 + query_vectors + key_vectors, num_barriers=stages),
        rows_s=plgpu.SMEM((2 * stages, rows), jnp.float32),
        sums_s=sums_s,
        used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_s=tile_ref(stages, keys, D, dtype),
        **scratch_shapes(scalars, (stages, rows), (stages, keys)),
    )


def _for_visible(work: BiasWork, state: WorkState, do: Callable, carry):
    """Apply `do(slot number, visit, carry)` to the visible visits of an item.

    Return the number of visible visits, and the last carry.
    """

    def step(r, loop_state):
        done, carry = loop_state
        visit = work.visit(r)

        def do_visit(done, carry):
            return done + 1, do(state.tiles_visited + done, visit, carry)

        return lax.cond(visit.is_visible, do_visit, lambda *state: state, done, carry)

    return lax.fori_loop(0, work.most_visits, step, (jnp.int32(0), carry))


def _copy(
    tiling: Tiling,
    arrays: tuple,
    scalars: Scalars,
    scratch: BiasScratch,
    work: BiasWork,
    state: WorkState,
) -> tuple[Array, Array]:
    """Copy the bias of an item, and the operands of each visible visit."""
    query_ref, key_ref, value_ref, dout_ref, lse_ref, delta_ref = arrays
    query_vectors_s, key_vectors_s = scratch.token_vectors
    if scratch.bias_s is not None:
        b, n, i, j = work.place
        item = lax.rem(state.items_done, jnp.int32(tiling.items))
        wait_for_slot(scratch.bias_used, item, state.items_done >= tiling.items)
        rows = pl.ds(i * tiling.rows, tiling.rows)
        cols = pl.ds(j * tiling.keys, tiling.keys)
        ready = scratch.bias_ready.at[item]
        copy_bias(scalars.of(b), n, rows, cols, scratch.bias_s, item, ready)

    def copy_visit(number, visit: BiasVisit, carry):
        slot = lax.rem(number, jnp.int32(tiling.stages))
        ready = scratch.ready.at[slot]
        rows = pl.ds(visit.row, tiling.rows)
        cols = pl.ds(visit.col, tiling.keys)
        wait_for_slot(scratch.used, slot, number >= tiling.stages)
        for ref, shared in ((query_ref, scratch.q_s), (dout_ref, scratch.do_s)):
            source = head_rows(ref, visit.b, rows, visit.n)
            plgpu.copy_gmem_to_smem(source, shared.at[slot], ready)
        for ref, shared in ((key_ref, scratch.k_s), (value_ref, scratch.v_s)):
            source = head_rows(ref, visit.b, cols, visit.k)
            plgpu.copy_gmem_to_smem(source, shared.at[slot], ready)
        for part, ref in enumerate((lse_ref, delta_ref)):
            shared = scratch.rows_s.at[part * tiling.stages + slot]
            plgpu.copy_gmem_to_smem(ref.at[visit.b, visit.n, rows], shared, ready)
        copy_token_vectors(visit.scalars.by_query, rows, query_vectors_s, slot, ready)
        copy_token_vectors(visit.scalars.by_key, cols, key_vectors_s, slot, ready)
        return carry

    count, _ = _for_visible(work, state, copy_visit, jnp.int32(0))
    return count, jnp.int32(0)


def _compute(
    problem: Problem,
    tiling: Tiling,
    gradient_ref: Ref,
    scratch: BiasScratch,
    group,
    work: BiasWork,
    state: WorkState,
) -> tuple[Array, Array]:
    """Compute one warpgroup's rows of an item."""
    shape = ROWS, tiling.keys
    own_rows = pl.ds(group * ROWS, ROWS)
    item = lax.rem(state.items_done, jnp.int32(tiling.items))
    bias_s = None
    if scratch.bias_s is not None:
        bias_s = scratch.bias_s.at[item, own_rows]
        plgpu.barrier_wait(scratch.bias_ready.at[item])

    def add_visit(number, visit: BiasVisit, total):
        slot = lax.rem(number, jnp.int32(tiling.stages))
        plgpu.barrier_wait(scratch.ready.at[slot])
        query_slots, key_vectors = token_vectors(scratch.token_vectors, slot, slot)
        query_vectors = tuple(x.at[own_rows] for x in query_slots)
        first = visit.row + group * ROWS, visit.col
        numbers = head_number_refs(visit.scalars, visit.n)
        vectors = query_vectors, key_vectors
        tile = ScoreTile(problem, shape, first, visit.mask_inputs, visit.scalars, numbers, vectors)
        tile = tile.with_loads_started().with_bias(visit.n, bias_s)
        keep = tile.mask()
        gradient = Gradient(problem, visit.scalars.logit_terms)
        lse = plgpu.load(scratch.rows_s.at[slot, own_rows], layout=ROW)
        lse = lse + float16_lift(scratch.q_s.dtype)
        delta = plgpu.load(scratch.rows_s.at[tiling.stages + slot, own_rows], layout=ROW)

        def products(raw, dp):
            finish_dp = gradient.start_dp(dp, broadcast_vector(delta, shape))
            plgpu.wgmma(raw, scratch.q_s.at[slot, own_rows], scratch.k_s.at[slot].T)  # (1)
            plgpu.wgmma(dp, scratch.do_s.at[slot, own_rows], scratch.v_s.at[slot].T)
            raw = plgpu.wgmma_accumulator_load(raw, wait_n=1)
            s = tile.logits(raw, keep)  # (2)
            p = gradient.signed(jnp.exp2(s - broadcast_vector(lse, shape)), tile)
            dp = finish_dp(p, plgpu.wgmma_accumulator_load(dp, wait_n=0))
            return jnp.where(keep, gradient.cotangent_of_logits(p, dp), 0.0)  # (3)

        ds = accumulators(products, shape, shape)
        release_read(scratch.used.at[slot])
        return total + ds  # (4)

    count, total = _for_visible(work, state, add_visit, full_tile(shape, 0.0))
    _store(tiling, gradient_ref, scratch, group, work, item, total)
    return count, jnp.int32(0)


def _store(
    tiling: Tiling,
    gradient_ref: Ref,
    scratch: BiasScratch,
    group,
    work: BiasWork,
    item,
    total: Array,
) -> None:
    """Store one warpgroup's part of the gradient of an item."""
    b, n, i, j = work.place
    rows = pl.ds(i * tiling.rows + group * ROWS, ROWS)
    cols = pl.ds(j * tiling.keys, tiling.keys)
    if work.form == "pairs":
        shared = scratch.bias_s.at[item, pl.ds(group * ROWS, ROWS)]
        part = gradient_ref.at[b, n, rows, cols]
        shared[...] = total.astype(shared.dtype)
    elif work.form == "queries":
        shared = scratch.sums_s.at[pl.ds(group * ROWS, ROWS)]
        part = gradient_ref.at[b, n, rows]
        shared[...] = total.sum(axis=1)
    else:
        shared = scratch.sums_s
        part = gradient_ref.at[b, n, cols]
        shared[...] = total.sum(axis=0)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared, part)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if work.form == "pairs":
        plgpu.barrier_arrive(scratch.bias_used.at[item])
