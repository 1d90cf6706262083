"""Compute the gradients of key and value on Hopper."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.backward_common import (
    Gradient,
    Tiling,
    choose_blocks,
    clean_operands,
    existing,
    float16_lift,
    not_finite,
    transposed,
    undo_lift,
)
from memeff.pallas.hopper.mosaic import (
    COL,
    ROW,
    accumulators,
    broadcast_vector,
    hide_from_cse,
    init_accumulator,
    interpreter_staging,
    multiply,
    plgpu,
    take_registers,
    tile_ref,
    warp_specialized_kernel,
)
from memeff.pallas.hopper.persistent import ROWS, PersistentLoop, WorkState, run_with_retries
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import CallSizes, KeyWork, find_key_work, some_whole
from memeff.pallas.hopper.score_tile import (
    allow_approx_math,
    barrier_arrivals,
    copy_token_vectors,
    head_number_refs,
    scratch_shapes,
)
from memeff.pallas.hopper.tile_ranges import tiles_visited, with_lists
from memeff.problem import Problem
from memeff.softmax import SEES_NOTHING


def key_value_gradient(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: tuple[Array, ...],
    scalars: Scalars,
    tiling: Tiling,
) -> tuple[Array, Array]:
    """dk [B, S, K, H] and dv [B, S, K, D], from the same."""
    query, key, value, dout, lse, _ = arrays
    (B, _, N, H), (_, _, K, D), dtype, (T, S) = query.shape, value.shape, query.dtype, lengths
    shape = CallSizes(B, T, S, K, N // K)
    groups, others, stages = tiling.warpgroups, tiling.others, tiling.stages
    assert lse.shape[-1] % others == 0 and others == ROWS
    scalars = with_ranges(scalars, lengths, tiling.own, keys=True)
    scalars = with_lists(problem, scalars, lengths, (others, tiling.own), keys=True)
    given, (of_query, of_key) = jax.tree.leaves(scalars), barrier_arrivals(scalars)

    total = B * K * -(-S // tiling.own)
    visited = shape.G * tiles_visited(problem, lengths, tiling.own, others, keys=True)
    blocks, order = choose_blocks(
        problem, scalars, visited, others, B * K, T * shape.G * (H + D) * 2
    )

    def body(*refs, rows_s, **scratch):
        at = dict(lse_s=(0, stages), delta_s=(stages, stages), failed_s=(2 * stages, groups))
        scratch |= {name: rows_s.at[pl.ds(*part)] for name, part in at.items()}
        values = scalars.like(iter(refs[6:-2]))
        group, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        find = lambda index: find_key_work(problem, shape, values, tiling.own, others, order, index)
        items = lambda do: PersistentLoop(
            total, blocks, block, lambda index, turn: do(find(index), turn)
        )

        @pl.when(group < groups)
        def _():
            take_registers(tiling.warpgroups, computes=True)
            compute = lambda *at: _compute_keys(
                problem, shape, tiling, refs[-2:], group, *at, **scratch
            )
            run_with_retries(items(compute), True, scratch["failed_s"], scratch["all_done"])

        @pl.when(group == groups)
        def _():
            take_registers(tiling.warpgroups, computes=False)
            copy = lambda *at: _copy_for_keys(shape, tiling, refs[:6], *at, **scratch)
            rings = (
                (stages, True, (scratch["used"],)),
                (tiling.items, False, (scratch["own_used"],)),
            )
            run_with_retries(items(copy), False, scratch["failed_s"], scratch["all_done"], rings)

    scratch = dict(
        k_s=tile_ref(tiling.items * groups, ROWS, H, dtype),
        v_s=tile_ref(tiling.items * groups, ROWS, D, dtype),
        q_s=tile_ref(stages, others, H, dtype),
        do_s=tile_ref(stages, others, D, dtype),
        # each array begins at a multiple of 1 KiB
        rows_s=plgpu.SMEM((2 * stages + groups, ROWS), jnp.float32),
        own_there=plgpu.Barrier(num_arrivals=2 + of_key, num_barriers=tiling.items * groups),
        own_used=plgpu.Barrier(num_arrivals=groups, num_barriers=tiling.items),
        q_there=plgpu.Barrier(num_arrivals=2 + of_query, num_barriers=stages),
        do_there=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        all_here=plgpu.Barrier(num_arrivals=groups),
        all_done=plgpu.Barrier(num_arrivals=groups + 1),
        **scratch_shapes(scalars, (stages, others), (tiling.items * groups, ROWS)),
        **interpreter_staging(groups, ROWS, others, dtype),
    )
    out = [jax.ShapeDtypeStruct(x.shape, dtype) for x in (key, value)]
    return warp_specialized_kernel(
        body, "memeff_dkdv", out, scratch, blocks, groups + 1, allow_approx_math(problem)
    )(*arrays, *given)


def copy_queries(
    shape,
    tiling,
    arrays,
    here,
    visits,
    *,
    q_s,
    do_s,
    lse_s,
    delta_s,
    q_there,
    do_there,
    used,
    marks,
    **_,
):
    """Of all heads that share the keys; after `visits` of other tiles."""
    query_ref, dout_ref, lse_ref, delta_ref = arrays
    stages, count = tiling.stages, here.visits.total

    def one(g, n):
        at, head = visits + g * count + n, here.k * shape.G + g
        x, rows = (
            lax.rem(at, jnp.int32(stages)),
            pl.ds(here.visits.tile(n) * tiling.others, tiling.others),
        )
        pl.when(at >= stages)(lambda: plgpu.barrier_wait(used.at[x]))
        plgpu.copy_gmem_to_smem(query_ref.at[here.b, rows, head], q_s.at[x], q_there.at[x])
        plgpu.copy_gmem_to_smem(lse_ref.at[here.b, head, rows], lse_s.at[x], q_there.at[x])
        copy_token_vectors(here.scalars.by_query, rows, marks[0], x, q_there.at[x])
        plgpu.copy_gmem_to_smem(dout_ref.at[here.b, rows, head], do_s.at[x], do_there.at[x])
        plgpu.copy_gmem_to_smem(delta_ref.at[here.b, head, rows], delta_s.at[x], do_there.at[x])

    pl.loop(0, shape.G)(lambda g: pl.loop(0, count)(lambda n: one(g, n)))
    return shape.G * count


def _copy_for_keys(
    shape,
    tiling,
    arrays,
    here: KeyWork,
    turn: WorkState,
    *,
    k_s,
    v_s,
    own_there,
    own_used,
    marks,
    **scratch,
):
    query_ref, key_ref, value_ref, *of_rows = arrays
    y = lax.rem(turn.items, jnp.int32(tiling.items))
    pl.when(turn.items >= tiling.items)(lambda: plgpu.barrier_wait(own_used.at[y]))
    for group in range(tiling.warpgroups):
        cols, mine = pl.ds(here.col + group * ROWS, ROWS), y * tiling.warpgroups + group
        for ref, to in ((key_ref, k_s), (value_ref, v_s)):
            plgpu.copy_gmem_to_smem(ref.at[here.b, cols, here.k], to.at[mine], own_there.at[mine])
        copy_token_vectors(here.scalars.by_key, cols, marks[1], mine, own_there.at[mine])
    count = copy_queries(
        shape, tiling, (query_ref, *of_rows), here, turn.visits, marks=marks, **scratch
    )
    return count, jnp.int32(0)


def _compute_keys(
    problem,
    shape,
    tiling,
    out,
    group,
    here: KeyWork,
    turn: WorkState,
    *,
    k_s,
    v_s,
    q_s,
    do_s,
    lse_s,
    delta_s,
    failed_s,
    own_there,
    own_used,
    q_there,
    do_there,
    used,
    all_here,
    marks,
    stage=None,
    **_,
):
    dk_ref, dv_ref = out
    gradient, sides, dtype = Gradient(problem), (ROWS, tiling.others), k_s.dtype
    y = lax.rem(turn.items, jnp.int32(tiling.items)) * tiling.warpgroups
    cols = pl.ds(here.col + group * ROWS, ROWS)
    masked, count = here.visits.masked, hide_from_cse(jnp.int32(here.visits.total))
    row = lambda ref: broadcast_vector(plgpu.load(ref, layout=COL), sides, 1)
    lse_row = lambda x: row(lse_s.at[x]) if turn.first else row(lse_s.at[x]) + float16_lift(dtype)
    small = tiling.others == ROWS  # then registers are left

    def clean(x):
        """Queries that see nothing may hold anything, and so may their cotangents."""
        q, do = q_s.at[x], do_s.at[x]
        lse = lambda first: broadcast_vector(
            plgpu.load(lse_s.at[x, pl.ds(first, ROWS)], layout=ROW), (ROWS, ROWS)
        )
        clean_operands(q, lambda x, _: jnp.abs(x) < jnp.inf, failed_s.at[group], group, all_here)
        clean_operands(
            do,
            lambda x, first: (jnp.abs(x) < jnp.inf) | (lse(first) < SEES_NOTHING),
            failed_s.at[group],
            group,
            all_here,
        )

    def step(start, n, hides, numbers, dk, dv):
        x = lax.rem(start + n, jnp.int32(tiling.stages))
        q, do = q_s.at[x], do_s.at[x]
        plgpu.barrier_wait(q_there.at[x])
        # In a kernel's first loop ptxas waits for raw before it begins dp; in the second, dp may
        # begin while raw runs.
        late = tiling.warpgroups == 2 and not hides and problem.right is not None
        if not late:
            plgpu.barrier_wait(do_there.at[x])
        if hides and not turn.first:
            clean(x)
        of_tile = tuple(ref.at[x] for ref in marks[0]), tuple(ref.at[y + group] for ref in marks[1])
        pairs = transposed(problem, here, tiling, n, group, numbers, of_tile).early()
        keep = pairs.seen() if hides else None
        mine = y + (hide_from_cse(group) if small else group)
        k, v = k_s.at[mine], v_s.at[mine]
        early = lse_row(x) if small else None  # before products, which keep shared memory busy

        def products(raw, dp):
            whole = None if late else init_accumulator(dp, row(delta_s.at[x]))
            plgpu.wgmma(raw, k, q.T)  # (5)
            if whole is None:
                plgpu.barrier_wait(do_there.at[x])
                whole = init_accumulator(dp, row(delta_s.at[x]))
            plgpu.wgmma(dp, v, do.T)
            s = plgpu.wgmma_accumulator_load(raw, wait_n=1)
            # (6)
            p, draw = gradient.probabilities(s, lse_row(x) if early is None else early, pairs, keep)
            multiply(dv, p.astype(dtype), do, stage and stage.at[group])
            d = whole(plgpu.wgmma_accumulator_load(dp, wait_n=1))  # while dv runs
            multiply(dk, draw(p, d)[0].astype(dtype), q, stage and stage.at[group])
            plgpu.wgmma_wait(0)

        accumulators(products, sides, sides)
        plgpu.barrier_arrive(used.at[x])

    plgpu.barrier_wait(own_there.at[y + group])

    def walk(dk, dv):
        def head(g, _):
            start, numbers = (
                turn.visits + g * count,
                head_number_refs(here.scalars, here.k * shape.G + g),
            )
            parts = (
                ((0, masked, True), (masked, count, False)) if turn.first else ((0, count, True),)
            )
            for first, last, hides in parts:
                one = lambda n, _, hides=hides: step(start, n, hides, numbers, dk, dv)
                lax.fori_loop(first, last, one, None) if hides or some_whole(
                    problem, here.scalars
                ) else None

        lax.fori_loop(0, shape.G, head, None)
        return plgpu.wgmma_accumulator_load(dk, wait_n=0), plgpu.wgmma_accumulator_load(
            dv, wait_n=0
        )

    dk, dv = accumulators(walk, (ROWS, k_s.shape[-1]), (ROWS, v_s.shape[-1]))
    failed = not_finite(
        failed_s.at[group], turn, *(existing(x, shape, here, group) for x in (dk, dv))
    )
    k, v = k_s.at[y + group], v_s.at[y + group]
    k[...] = undo_lift(dk * gradient.slope, dtype, turn).astype(dtype)
    v[...] = undo_lift(dv, dtype, turn).astype(dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(k, dk_ref.at[here.b, cols, here.k])
    plgpu.copy_smem_to_gmem(v, dv_ref.at[here.b, cols, here.k])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(own_used.at[lax.rem(turn.items, jnp.int32(tiling.items))])
    return shape.G * count, failed
