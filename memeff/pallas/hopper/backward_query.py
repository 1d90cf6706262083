"""Compute the gradient of the query on Hopper."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.backward_common import (
    Gradient,
    Tiling,
    choose_blocks,
    clean_operands,
    copy_tiles,
    count_score_gradients,
    float16_lift,
    not_finite,
    row_sums,
    undo_lift,
)
from memeff.pallas.hopper.mosaic import (
    ROW,
    accumulators,
    broadcast_vector,
    full_tile,
    init_accumulator,
    interpreter_staging,
    multiply,
    plgpu,
    take_registers,
    tile_ref,
    warp_specialized_kernel,
)
from memeff.pallas.hopper.persistent import (
    ROWS,
    PersistentLoop,
    WorkState,
    run_with_retries,
    skip_item,
)
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import CallSizes, QueryWork, find_query_work, some_whole
from memeff.pallas.hopper.score_tile import (
    ScoreTile,
    allow_approx_math,
    barrier_arrivals,
    copy_token_vectors,
    head_number_refs,
    scratch_shapes,
)
from memeff.pallas.hopper.tile_ranges import tiles_visited, with_lists
from memeff.problem import Problem


def query_gradient(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: tuple[Array, ...],
    dlse: Array | None,
    scalars: Scalars,
    tiling: Tiling,
) -> tuple[Array, ...]:
    """dq [B, T, N, H], and delta [B, N, T''], from query, key, value, out, dout in the layout of the door; lse (in bits) and
    dlse are B N T'. Sizes as in `hopper_forward.attend`. Then, like delta, sums over keys of cotangents of what moves
    `score_fn`.
    """
    query, key, value, out, _, lse = arrays
    (B, _, N, H), (_, _, K, D), dtype, (T, S) = query.shape, value.shape, query.dtype, lengths
    shape = CallSizes(B, T, S, K, N // K)
    groups, keys, stages = tiling.warpgroups, tiling.others, tiling.stages
    scalars = with_lists(
        problem, with_ranges(scalars, lengths, tiling.own), lengths, (tiling.own, keys)
    )
    given, (of_query, of_key) = jax.tree.leaves((dlse, scalars)), barrier_arrivals(scalars)
    moving = count_score_gradients(problem)
    outs = 2 + moving

    total = B * N * -(-T // tiling.own)
    visited = tiles_visited(problem, lengths, tiling.own, keys)
    blocks, order = choose_blocks(
        problem, scalars, visited, keys, B * N, max(1, S * (H + D) * 2 // shape.G)
    )

    def body(*refs, **scratch):
        of = iter(refs[6:-outs])
        dlse_ref = None if dlse is None else next(of)
        values = scalars.like(of)
        group, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        find = lambda index: find_query_work(problem, shape, values, tiling.own, keys, order, index)
        items = lambda do: PersistentLoop(
            total, blocks, block, lambda index, turn: do(find(index), turn)
        )

        @pl.when(group < groups)
        def _():
            take_registers(tiling.warpgroups, computes=True)
            compute = lambda *at: _compute_queries(
                problem, tiling, refs[-outs:], dlse is not None, group, *at, **scratch
            )
            run_with_retries(items(compute), True, scratch["failed_s"], scratch["all_done"])

        @pl.when(group == groups)
        def _():
            take_registers(tiling.warpgroups, computes=False)
            copy = lambda *at: _copy_for_queries(tiling, (*refs[:6], dlse_ref), *at, **scratch)
            rings = (
                (stages, True, (scratch["k_used"], scratch["v_used"])),
                (tiling.items, False, (scratch["own_used"],)),
            )
            run_with_retries(items(copy), False, scratch["failed_s"], scratch["all_done"], rings)

    scratch = dict(
        q_s=tile_ref(tiling.items * groups, ROWS, H, dtype),
        do_s=tile_ref(tiling.items * groups, ROWS, D, dtype),
        out_s=tile_ref(tiling.items * groups, ROWS, D, dtype),
        k_s=tile_ref(stages, keys, H, dtype),
        v_s=tile_ref(stages, keys, D, dtype),
        rows_s=plgpu.SMEM((2, tiling.items * groups, ROWS), jnp.float32),
        failed_s=plgpu.SMEM((groups, ROWS), jnp.float32),
        own_there=plgpu.Barrier(
            num_arrivals=4 + (dlse is not None) + of_query, num_barriers=tiling.items * groups
        ),
        own_used=plgpu.Barrier(num_arrivals=groups, num_barriers=tiling.items),
        k_there=plgpu.Barrier(num_arrivals=1 + of_key, num_barriers=stages),
        v_there=plgpu.Barrier(num_barriers=stages),
        k_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        all_here=plgpu.Barrier(num_arrivals=groups),
        all_done=plgpu.Barrier(num_arrivals=groups + 1),
        **scratch_shapes(scalars, (tiling.items * groups, ROWS), (stages, keys)),
        **interpreter_staging(groups, ROWS, keys, dtype),
    )
    if moving:
        scratch["sums_s"] = plgpu.SMEM((moving, groups, ROWS), jnp.float32)
    # Rows of whole blocks: what is stored of a vector is bounded by its array, not by its head.
    rows = -(-T // tiling.own) * tiling.own
    types = [
        jax.ShapeDtypeStruct(query.shape, dtype),
        *[jax.ShapeDtypeStruct((B, N, rows), jnp.float32)] * (1 + moving),
    ]
    kernel = warp_specialized_kernel(
        body, "memeff_dq", types, scratch, blocks, groups + 1, allow_approx_math(problem)
    )
    return tuple(kernel(*arrays, *given))


def _copy_for_queries(
    tiling,
    arrays,
    here: QueryWork,
    turn: WorkState,
    *,
    q_s,
    do_s,
    out_s,
    k_s,
    v_s,
    rows_s,
    own_there,
    own_used,
    k_there,
    v_there,
    k_used,
    v_used,
    marks,
    **_,
):
    """Of queries what each warpgroup has, keys and values once for all."""
    query_ref, key_ref, value_ref, out_ref, dout_ref, lse_ref, dlse_ref = arrays
    stages, count, y = (
        tiling.stages,
        here.visits.total,
        lax.rem(turn.items, jnp.int32(tiling.items)),
    )

    def own():
        pl.when(turn.items >= tiling.items)(lambda: plgpu.barrier_wait(own_used.at[y]))
        for group in range(tiling.warpgroups):
            rows, mine = pl.ds(here.row + group * ROWS, ROWS), y * tiling.warpgroups + group
            pairs = [
                (ref.at[here.b, rows, here.n], to)
                for ref, to in ((out_ref, out_s), (dout_ref, do_s), (query_ref, q_s))
            ]
            pairs += [(lse_ref.at[here.b, here.n, rows], rows_s.at[0])]
            if dlse_ref is not None:
                pairs += [(dlse_ref.at[here.b, here.n, rows], rows_s.at[1])]
            pairs += [
                (ref.at[rows], to) for ref, to in zip(here.scalars.by_query, marks[0], strict=True)
            ]
            for of, to in pairs:
                plgpu.copy_gmem_to_smem(of, to.at[mine], own_there.at[mine])

    def others(n):
        at = turn.visits + n
        x, rows = (
            lax.rem(at, jnp.int32(stages)),
            pl.ds(here.visits.tile(n) * tiling.others, tiling.others),
        )
        for ref, shared, there, used in (
            (key_ref, k_s, k_there, k_used),
            (value_ref, v_s, v_there, v_used),
        ):
            pl.when(at >= stages)(lambda used=used: plgpu.barrier_wait(used.at[x]))
            plgpu.copy_gmem_to_smem(ref.at[here.b, rows, here.k], shared.at[x], there.at[x])
            if ref is key_ref:
                copy_token_vectors(here.scalars.by_key, rows, marks[1], x, there.at[x])

    return copy_tiles(own, others, turn, count, tiling)


def _compute_queries(
    problem,
    tiling,
    out,
    has_dlse,
    group,
    here: QueryWork,
    turn: WorkState,
    *,
    q_s,
    do_s,
    out_s,
    k_s,
    v_s,
    rows_s,
    own_there,
    own_used,
    k_there,
    v_there,
    k_used,
    v_used,
    all_here,
    failed_s,
    marks,
    stage=None,
    sums_s: Any = None,
    **_,
):
    dq_ref, delta_ref, *sums_refs = out
    gradient, shape, dtype = Gradient(problem), (ROWS, tiling.others), q_s.dtype
    rows, count, y = (
        pl.ds(here.row + group * ROWS, ROWS),
        here.visits.total,
        lax.rem(turn.items, jnp.int32(tiling.items)),
    )
    mine = y * tiling.warpgroups + group
    q, o, do = q_s.at[mine], out_s.at[mine], do_s.at[mine]
    lse_s, delta_s = rows_s.at[0, mine], rows_s.at[1, mine]
    numbers = head_number_refs(here.scalars, here.n)

    def step(n, masked, lse, delta, dq, sums):
        x = lax.rem(turn.visits + n, jnp.int32(tiling.stages))
        plgpu.barrier_wait(k_there.at[x])
        if masked and not turn.first:
            clean_operands(
                k_s.at[x], lambda x, _: jnp.abs(x) < jnp.inf, failed_s.at[group], group, all_here
            )
        first = here.row + group * ROWS, here.visits.tile(n) * tiling.others
        of_tile = tuple(ref.at[mine] for ref in marks[0]), tuple(ref.at[x] for ref in marks[1])
        pairs = ScoreTile(problem, shape, first, here.sight, here.scalars, numbers, of_tile).early()
        keep = pairs.seen() if masked else None

        def products(raw, dp):
            plgpu.wgmma(raw, q, k_s.at[x].T)  # (1)
            whole = init_accumulator(dp, broadcast_vector(delta, shape))
            plgpu.barrier_wait(v_there.at[x])
            plgpu.wgmma(dp, do, v_s.at[x].T)
            p, draw = gradient.probabilities(  # (2)
                plgpu.wgmma_accumulator_load(raw, wait_n=1),
                broadcast_vector(lse, shape),
                pairs,
                keep,
            )
            d = whole(plgpu.wgmma_accumulator_load(dp, wait_n=0))
            plgpu.barrier_arrive(v_used.at[x])
            of_raw, of_terms = draw(p, d)
            multiply(dq, of_raw.astype(dtype), k_s.at[x], stage and stage.at[group])  # (3) (4)
            plgpu.wgmma_wait(0)
            return tuple(total + x.sum(axis=1) for total, x in zip(sums, of_terms, strict=True))

        sums = accumulators(products, shape, shape)
        plgpu.barrier_arrive(k_used.at[x])
        return sums

    plgpu.barrier_wait(own_there.at[mine])
    delta = -row_sums(o, do)  # and dlse, which the other kernel wants, too
    delta = delta + plgpu.load(delta_s, layout=ROW) if has_dlse else delta
    lse = plgpu.load(lse_s, layout=ROW)
    lse = lse if turn.first else lse + float16_lift(dtype)
    delta_s[...] = delta
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(delta_s, delta_ref.at[here.b, here.n, rows])

    def pass_one(n):
        skip_item(
            (k_there, k_used),
            (v_there, v_used),
            at=lax.rem(turn.visits + n, jnp.int32(tiling.stages)),
        )

    def walk(dq):
        masked = here.visits.masked
        hidden = here.hidden(here.row + group * ROWS, ROWS) if turn.first else 0
        pl.loop(0, hidden)(pass_one)
        parts = (
            ((hidden, masked, True), (masked, count, False)) if turn.first else ((0, count, True),)
        )
        sums = (full_tile((ROWS,), 0.0),) * len(sums_refs)
        for first, last, hides in parts:
            one = lambda n, sums, hides=hides: step(n, hides, lse, delta, dq, sums)
            sums = (
                lax.fori_loop(first, last, one, sums)
                if hides or some_whole(problem, here.scalars)
                else sums
            )
        return plgpu.wgmma_accumulator_load(dq, wait_n=0), sums

    dq, sums = accumulators(walk, (ROWS, q.shape[-1]))
    dq, *sums = (undo_lift(x, dtype, turn) for x in (dq * gradient.slope, *sums))
    failed = not_finite(failed_s.at[group], turn, dq)
    o[...] = dq.astype(dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o, dq_ref.at[here.b, rows, here.n])
    for i, (ref, x) in enumerate(zip(sums_refs, sums, strict=True)):
        sums_s[i, group] = x
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums_s.at[i, group], ref.at[here.b, here.n, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(own_used.at[y])
    return count, failed
