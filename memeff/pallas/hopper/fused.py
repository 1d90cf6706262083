"""Backward on Hopper (sm_90a) in one kernel of five products: what makes dk and dv makes dq as well.

As (5) and (6) of `hopper_backward` say, on 128 keys j of a block, 64 for each of its two warpgroups; and
  (7) part = draw_i k_j, one step later, when both warpgroups' draw is in shared memory: each makes a half
  (8) dq_i += part, in float32 in global memory
Blocks add as they come, so the bits of dq differ from run to run, and its sums take 4 bytes a number. What nobody sees is
not cleaned of NaN and Inf: where something was not finite, the two kernels do all again.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.backward_common import Gradient, Tiling, row_sums, transposed, undo_lift
from memeff.pallas.hopper.backward_key import copy_queries
from memeff.pallas.hopper.mosaic import (
    COL,
    FLOATS,
    ROW,
    WGMMA,
    accumulators,
    add_to,
    broadcast_vector,
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
)
from memeff.pallas.hopper.persistent import ROWS, drain
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import CallSizes, KeyWork, TileOrder, cache_order, find_key_work
from memeff.pallas.hopper.score_tile import (
    HeadNumbers,
    allow_approx_math,
    barrier_arrivals,
    copy_token_vectors,
    scratch_shapes,
)
from memeff.problem import Problem

GROUPS = 2
PART = 64  # rows and columns of (7)
DRAWS = 2  # tiles of draw: one is written while the one before is multiplied


def gradients(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: tuple[Array, ...],
    scalars: Scalars,
    tiling: Tiling,
) -> tuple[Array, Array, Array, Array]:
    """dq (but for its slope and `lift`) in float32, dk and dv in the layout of the door; and numbers, of which one is NaN if
    something was not finite. Then NaN and Inf that nobody sees may have come into dq.

    Of query, key, value, dout, and, B N T', lse (in bits) and delta; sizes as in `hopper_forward.attend`.
    """
    query, key, value, _, lse, _ = arrays
    (B, _, N, H), (_, _, K, D), dtype, (T, S) = query.shape, value.shape, query.dtype, lengths
    shape = CallSizes(B, T, S, K, N // K)
    assert D == H and tiling.warpgroups == GROUPS and tiling.others * H == GROUPS * PART * PART
    assert lse.shape[-1] % tiling.others == 0
    scalars = with_ranges(scalars, lengths, tiling.own, keys=True)
    given, (of_query, of_key) = jax.tree.leaves(scalars), barrier_arrivals(scalars)
    blocks = B * K * -(-S // tiling.own)

    def body(*refs, **scratch):
        values = scalars.like(iter(refs[6 : 6 + len(given)]))
        group, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        order = (
            TileOrder() if problem.right is None else cache_order(B * K, T * shape.G * (H + D) * 2)
        )
        find = lambda index: find_key_work(
            problem, shape, values, tiling.own, tiling.others, order, index
        )

        @pl.when(group < GROUPS)
        def _():
            take_registers(GROUPS, computes=True)
            at_end = find(hide_from_cse(block))
            _compute(
                problem,
                shape,
                tiling,
                refs[1:3],
                refs[-4:],
                find(block),
                at_end,
                block,
                group,
                **scratch,
            )

        @pl.when(group == GROUPS)
        def _():
            take_registers(GROUPS, computes=False)
            count = copy_queries(shape, tiling, (refs[0], *refs[3:6]), find(block), 0, **scratch)
            drain(count, tiling.stages, [scratch["used"]])

    others, stages = tiling.others, tiling.stages
    scratch = dict(
        k_s=tile_ref(1, tiling.own, H, dtype),
        v_s=tile_ref(1, tiling.own, H, dtype),
        q_s=tile_ref(stages, others, H, dtype),
        do_s=tile_ref(stages, others, H, dtype),
        lse_s=plgpu.SMEM((stages, others), jnp.float32),
        delta_s=plgpu.SMEM((stages, others), jnp.float32),
        draw_s=tile_ref(DRAWS, tiling.own, others, dtype),
        part_s=plgpu.SMEM((GROUPS, PART, PART), jnp.float32, transforms=FLOATS),
        bad_s=plgpu.SMEM((2, GROUPS * ROWS), jnp.float32),  # of the keys; and of all
        kv_there=plgpu.Barrier(num_arrivals=2 + of_key, num_barriers=GROUPS),
        q_there=plgpu.Barrier(num_arrivals=2 + of_query, num_barriers=stages),
        do_there=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        used=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
        draw_there=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=DRAWS),
        all_here=plgpu.Barrier(num_arrivals=GROUPS),
        **scratch_shapes(scalars, (stages, others), (GROUPS, ROWS)),
        **interpreter_staging(GROUPS, ROWS, others, dtype),
    )
    if interpreting():  # for `add_to`
        old_s = plgpu.SMEM((GROUPS, PART, PART), jnp.float32, transforms=FLOATS)
        scratch["old"] = old_s, plgpu.Barrier(num_barriers=GROUPS)
    # No barriers of Pallas': what is stored here is read by products and copies, after
    # `commit_smem`, or after `meet`.
    kernel = warp_specialized_kernel(
        body,
        "memeff_fused",
        (),
        scratch,
        blocks,
        GROUPS + 1,
        allow_approx_math(problem),
        barriers=False,
    )
    results = (
        jnp.zeros(query.shape, jnp.float32),
        lax.empty(key.shape, dtype),
        lax.empty(value.shape, dtype),
    )
    results += (lax.empty((blocks, tiling.own), jnp.float32),)
    return pl.run_state(lambda refs: kernel(*arrays, *given, *refs))(results)


def _compute(
    problem,
    shape,
    tiling,
    arrays,
    out,
    here: KeyWork,
    at_end: KeyWork,
    block,
    group,
    *,
    k_s,
    v_s,
    q_s,
    do_s,
    lse_s,
    delta_s,
    draw_s,
    part_s,
    bad_s,
    kv_there,
    q_there,
    do_there,
    used,
    draw_there,
    all_here,
    marks,
    stage=None,
    old=None,
):
    (key_ref, value_ref), (dq_ref, dk_ref, dv_ref, bad_ref) = arrays, out
    gradient, sides, dtype = Gradient(problem), (ROWS, tiling.others), key_ref.dtype
    mine = pl.ds(group * ROWS, ROWS)
    k, v = k_s.at[0, mine], v_s.at[0, mine]
    masked, count = here.visits.masked, here.visits.total
    row = lambda ref: broadcast_vector(plgpu.load(ref, layout=COL), sides, 1)
    to_stage, spare = stage and stage.at[group], old and tuple(x.at[group] for x in old)
    of_keys = lambda here, ref: ref.at[here.b, pl.ds(here.col + group * ROWS, ROWS), here.k]
    wide = tiling.others == PART  # a half of (7) is half the columns, or half the rows

    def start_part(part, at, group=group):
        """(7) of the visit `at`."""
        half = pl.ds(group * PART, PART)
        y, all_k = lax.rem(at, jnp.int32(DRAWS)), k_s.at[0]
        plgpu.barrier_wait(draw_there.at[y])
        if wide:
            plgpu.wgmma(part, draw_s.at[y].T, all_k.at[:, half])
        else:
            plgpu.wgmma(part, draw_s.at[y].at[:, half].T, all_k)

    def give(part, g, n, there=None, group=group):
        """(8) of the visit before the n-th of head g."""
        first, head = (
            here.visits.tile(jnp.where(n > 0, n, count) - 1) * tiling.others,
            here.k * shape.G + g,
        )
        head = jnp.where(n > 0, head, head - 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        part_s[group] = part
        plgpu.commit_smem()
        if there is not None:
            plgpu.barrier_arrive(there)
        if wide:
            add_to(
                part_s.at[group],
                dq_ref.at[here.b, pl.ds(first, PART), head, pl.ds(group * PART, PART)],
                spare,
            )
        else:
            add_to(
                part_s.at[group], dq_ref.at[here.b, pl.ds(first + group * PART, PART), head], spare
            )

    def step(g, n, hides, first, dk, dv):
        at = g * count + n
        x, y = lax.rem(at, jnp.int32(tiling.stages)), lax.rem(at, jnp.int32(DRAWS))
        q, do = q_s.at[x], do_s.at[x]
        plgpu.barrier_wait(q_there.at[x])
        of_tile = tuple(ref.at[x] for ref in marks[0]), tuple(ref.at[group] for ref in marks[1])
        pairs = transposed(problem, here, tiling, n, group, HeadNumbers(), of_tile)
        keep = pairs.seen() if hides else None
        opaque = hide_from_cse(group)
        k, v = k_s.at[0, pl.ds(opaque * ROWS, ROWS)], v_s.at[0, pl.ds(opaque * ROWS, ROWS)]
        early = row(lse_s.at[x]) if wide else None
        plgpu.barrier_wait(do_there.at[x])

        def products(raw, dp):
            whole = init_accumulator(dp, row(delta_s.at[x]))
            plgpu.wgmma(raw, k, q.T)  # (5)
            plgpu.wgmma(dp, v, do.T)
            s = plgpu.wgmma_accumulator_load(raw, wait_n=1)
            # (6)
            p, draw = gradient.probabilities(
                s, row(lse_s.at[x]) if early is None else early, pairs, keep
            )
            multiply(dv, p.astype(dtype), do, to_stage)
            d, _ = draw(p, whole(plgpu.wgmma_accumulator_load(dp, wait_n=1)))  # while dv runs
            d = d.astype(dtype)

            def rest():
                multiply(dk, d, q, to_stage)
                draw_s[y, mine] = d

            def with_part(part):
                start_part(part, at - 1, opaque)
                rest()
                found = plgpu.wgmma_accumulator_load(part, wait_n=1)  # while dk runs
                # Only now: (7) has read the other tile of draw, which the other warpgroup writes
                # next.
                give(found, g, n, draw_there.at[y], opaque)

            if first:
                rest()
                plgpu.commit_smem()
                plgpu.barrier_arrive(draw_there.at[y])
            else:
                accumulators(with_part, (PART, PART))
            plgpu.wgmma_wait(0)

        accumulators(products, sides, sides)
        plgpu.barrier_arrive(used.at[x])

    for ref, to in ((key_ref, k), (value_ref, v)):
        plgpu.copy_gmem_to_smem(of_keys(here, ref), to, kv_there.at[group])
    copy_token_vectors(
        here.scalars.by_key,
        pl.ds(here.col + group * ROWS, ROWS),
        marks[1],
        group,
        kv_there.at[group],
    )
    plgpu.barrier_wait(kv_there.at[group])
    # in (7) nothing times NaN is NaN
    bad_s[0, mine] = nan_if_bad(plgpu.load(k, layout=WGMMA).astype(jnp.float32))
    sync(all_here)  # (7) reads both warpgroups' keys

    def walk(dk, dv):
        def head(g, _):
            begun = jnp.where(g == 0, 1, 0)
            for first, last, hides in (
                (begun, masked, True),
                (jnp.maximum(begun, masked), count, False),
            ):
                body = lambda n, _, hides=hides: step(g, n, hides, False, dk, dv)
                lax.fori_loop(first, last, body, None)

        lax.fori_loop(0, jnp.minimum(count, 1), lambda n, _: step(0, n, True, True, dk, dv), None)
        lax.fori_loop(0, shape.G, head, None)
        return plgpu.wgmma_accumulator_load(dk, wait_n=0), plgpu.wgmma_accumulator_load(
            dv, wait_n=0
        )

    dk, dv = accumulators(walk, (ROWS, k.shape[-1]), (ROWS, v.shape[-1]))

    @pl.when(count > 0)
    def _():
        def flush(part):
            start_part(part, count * shape.G - 1)
            give(plgpu.wgmma_accumulator_load(part, wait_n=0), shape.G, 0)

        accumulators(flush, (PART, PART))

    # Keys that only pad the tile count here, because draw that overflowed there makes NaN of dq:
    # Inf times a key of 0.
    bad_s[1, mine] = functools.reduce(
        jnp.add, map(nan_if_bad, (dk, dv)), plgpu.load(bad_s.at[0, mine], layout=ROW)
    )
    sync(all_here)  # nobody reads my keys any more
    k[...] = undo_lift(dk * gradient.slope, dtype).astype(dtype)
    v[...] = undo_lift(dv, dtype).astype(dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(k, of_keys(at_end, dk_ref))
    plgpu.copy_smem_to_gmem(v, of_keys(at_end, dv_ref))
    plgpu.copy_smem_to_gmem(bad_s.at[1, mine], bad_ref.at[block, mine])
    plgpu.wait_smem_to_gmem(0)


def nan_if_bad(x: Array) -> Array:
    """Of each row: NaN if a number is not finite, else 0."""
    return (x * 0.0).sum(axis=1)


def deltas(lengths: tuple[int, int], out: Array, dout: Array, dlse: Array | None) -> Array:
    """dlse - rowsum(dout * out), B N T', of arrays in the layout of the door; T' is the next multiple of 128."""
    (B, _, N, D), dtype, own = out.shape, out.dtype, GROUPS * ROWS
    tiles = -(-lengths[0] // own)

    def body(*refs, out_s, do_s, delta_s, there):
        (out_ref, dout_ref), group, block = (
            refs[:2],
            lax.axis_index("warpgroup"),
            lax.axis_index("block"),
        )
        head, at = lax.div(block, jnp.int32(tiles)), lax.rem(block, jnp.int32(tiles))
        b, n, rows = (
            lax.div(head, jnp.int32(N)),
            lax.rem(head, jnp.int32(N)),
            pl.ds(at * own + group * ROWS, ROWS),
        )
        pairs = [
            (out_ref.at[b, rows, n], out_s.at[group]),
            (dout_ref.at[b, rows, n], do_s.at[group]),
        ]
        if dlse is not None:
            pairs += [(refs[2].at[b, n, rows], delta_s.at[group])]
        for of, to in pairs:
            plgpu.copy_gmem_to_smem(of, to, there.at[group])
        plgpu.barrier_wait(there.at[group])
        delta = -row_sums(out_s.at[group], do_s.at[group])
        if dlse is not None:
            delta = delta + plgpu.load(delta_s.at[group], layout=ROW)
        delta_s[group] = delta
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(delta_s.at[group], refs[-1].at[b, n, rows])
        plgpu.wait_smem_to_gmem(0)

    scratch = dict(
        out_s=tile_ref(GROUPS, ROWS, D, dtype),
        do_s=tile_ref(GROUPS, ROWS, D, dtype),
        delta_s=plgpu.SMEM((GROUPS, ROWS), jnp.float32),
        there=plgpu.Barrier(num_arrivals=2 if dlse is None else 3, num_barriers=GROUPS),
    )
    types = [jax.ShapeDtypeStruct((B, N, tiles * own), jnp.float32)]
    given = [x for x in (out, dout, dlse) if x is not None]
    return warp_specialized_kernel(body, "memeff_delta", types, scratch, B * N * tiles, GROUPS)(
        *given
    )[0]
