"""The tangent on Hopper (sm_90a), from lse: five products a tile, two of which are the forward's. With dq, dk, dv for the
tangents of the operands; logits in bits (times log2 e), as is lse here, but their tangents in nats.

A block owns queries i, 64 for each computing warpgroup, and visits the tiles of keys j that they see:
  (1) raw = q_i k_j';  draw = dq_i k_j' + q_i dk_j'      (3) p = 2^(s - lse_i);  w = p (ds - c_i);  r_i += rowsum w
  (2) s = finish(raw);  ds = its derivative along draw   (4) u_i += p dv_j + w v_j
  at the end: dout = u - r out, dlse = r + c
That holds for every c, where p sums to 1; with a sink in lse it sums to l < 1, and dout = u - (r - c (1 - l)) out.
w is rounded to 16 bits for its product, and what p ds has in common for a whole row, which leaves dout alone, would take
those: so c is the mean of ds by p over the first tile of which the row sees something, which is among those with masks, or
else the first one after them; these two kinds are walked in one loop, where c is found.
What does not move has no products. 0 times NaN is NaN: if u is not finite it is made again, as out is in the forward.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.logits import LOG2_E, logits_base2
from memeff.pallas.hopper.backward_common import (
    Gradient,
    Tiling,
    choose_blocks,
    copy_tiles,
    not_finite,
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
    take_registers,
    tile_ref,
    warp_specialized_kernel,
)
from memeff.pallas.hopper.nonfinite import cleaned
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
from memeff.problem import LogitParams, Problem


class Arrays(NamedTuple):
    """In the layout of the door, lse (in bits) B N T'; or what a block has of them. None: not read, or it does not move."""

    query: Any
    key: Any
    lse: Any
    value: Any  # this and out, where logits move
    out: Any
    dq: Any
    dk: Any
    dv: Any


def tangents(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: Arrays,
    scalars: Scalars,
    tiling: Tiling,
    shared: bool = False,
) -> tuple[Array, Array]:
    """dout [B, T, N, H], and dlse [B, N, T'']. Sizes as in `hopper_forward.attend`. `shared`: lse has a sink in it; dlse is
    then of no use.
    """
    (B, _, N, H), K, dtype, (T, S) = (
        arrays.query.shape,
        arrays.key.shape[2],
        arrays.query.dtype,
        lengths,
    )
    shape = CallSizes(B, T, S, K, N // K)
    groups, keys, stages = tiling.warpgroups, tiling.others, tiling.stages
    scalars = with_lists(
        problem, with_ranges(scalars, lengths, tiling.own), lengths, (tiling.own, keys)
    )
    given, structure = jax.tree.flatten((arrays, scalars))
    of_query, of_key = barrier_arrivals(scalars)
    own, of_keys, of_values = ("query", "dq"), ("key", "dk"), ("value", "dv")
    count = lambda names: sum(getattr(arrays, name) is not None for name in names)

    total = B * N * -(-T // tiling.own)
    visited = tiles_visited(problem, lengths, tiling.own, keys)
    read = S * H * 2 * (count(of_keys) + count(of_values))
    blocks, order = choose_blocks(problem, scalars, visited, keys, B * N, max(1, read // shape.G))

    def body(*refs, **scratch):
        has, values = jax.tree.unflatten(structure, refs[: len(given)])
        group, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        find = lambda index: find_query_work(problem, shape, values, tiling.own, keys, order, index)
        items = lambda do: PersistentLoop(
            total, blocks, block, lambda index, turn: do(find(index), turn)
        )

        @pl.when(group < groups)
        def _():
            take_registers(groups, computes=True)
            compute = lambda *at: _compute(
                problem, tiling, shared, has, refs[-2:], group, *at, **scratch
            )
            run_with_retries(items(compute), True, scratch["failed_s"], scratch["all_done"])

        @pl.when(group == groups)
        def _():
            take_registers(groups, computes=False)
            copy = lambda *at: _copy(tiling, has, *at, **scratch)
            rings = (
                (stages, True, (scratch["k_used"], scratch["v_used"])),
                (tiling.items, False, (scratch["own_used"],)),
            )
            run_with_retries(items(copy), False, scratch["failed_s"], scratch["all_done"], rings)

    def tiles(names, many: int, rows: int):
        return tuple(
            None if getattr(arrays, name) is None else tile_ref(many, rows, H, dtype)
            for name in names
        )

    scratch = dict(
        own_s=tiles(own, tiling.items * groups, ROWS),
        keys_s=tiles(of_keys, stages, keys),
        values_s=tiles(of_values, stages, keys),
        lse_s=plgpu.SMEM((tiling.items * groups, ROWS), jnp.float32),
        failed_s=plgpu.SMEM((groups, ROWS), jnp.float32),
        bad_keys_s=plgpu.SMEM((groups, keys), jnp.float32),
        bad_columns_s=plgpu.SMEM((H,), jnp.float32),
        own_there=plgpu.Barrier(
            num_arrivals=count(own) + 1 + of_query, num_barriers=tiling.items * groups
        ),
        own_used=plgpu.Barrier(num_arrivals=groups, num_barriers=tiling.items),
        k_there=plgpu.Barrier(num_arrivals=count(of_keys) + of_key, num_barriers=stages),
        v_there=plgpu.Barrier(num_arrivals=count(of_values), num_barriers=stages),
        k_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        out_there=plgpu.Barrier(num_barriers=groups),
        all_here=plgpu.Barrier(num_arrivals=groups),
        all_done=plgpu.Barrier(num_arrivals=groups + 1),
        **scratch_shapes(scalars, (tiling.items * groups, ROWS), (stages, keys)),
        **interpreter_staging(groups, ROWS, keys, dtype),
    )
    # Rows of whole blocks: what is stored of a vector is bounded by its array, not by its head.
    rows = -(-T // tiling.own) * tiling.own
    types = (
        jax.ShapeDtypeStruct(arrays.query.shape, dtype),
        jax.ShapeDtypeStruct((B, N, rows), jnp.float32),
    )
    kernel = warp_specialized_kernel(
        body,
        "memeff_tangent",
        types,
        scratch,
        blocks,
        groups + 1,
        allow_approx_math(problem),
        sums_over_rows=True,
    )
    dout, dlse = kernel(*given)
    return dout, dlse


def _copy(
    tiling,
    arrays: Arrays,
    here: QueryWork,
    turn: WorkState,
    *,
    own_s,
    keys_s,
    values_s,
    lse_s,
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
    stages, count, y = (
        tiling.stages,
        here.visits.total,
        lax.rem(turn.items, jnp.int32(tiling.items)),
    )

    def copy(pairs, at, slot, there):
        for ref, shared in pairs:
            if ref is not None:
                plgpu.copy_gmem_to_smem(ref.at[at], shared.at[slot], there.at[slot])

    def own():
        pl.when(turn.items >= tiling.items)(lambda: plgpu.barrier_wait(own_used.at[y]))
        for group in range(tiling.warpgroups):
            rows, mine = pl.ds(here.row + group * ROWS, ROWS), y * tiling.warpgroups + group
            copy(
                zip((arrays.query, arrays.dq), own_s, strict=True),
                (here.b, rows, here.n),
                mine,
                own_there,
            )
            copy([(arrays.lse, lse_s)], (here.b, here.n, rows), mine, own_there)
            copy_token_vectors(here.scalars.by_query, rows, marks[0], mine, own_there.at[mine])

    def others(n):
        at = turn.visits + n
        x, rows = (
            lax.rem(at, jnp.int32(stages)),
            pl.ds(here.visits.tile(n) * tiling.others, tiling.others),
        )
        pl.when(at >= stages)(lambda: plgpu.barrier_wait(k_used.at[x]))
        copy(zip((arrays.key, arrays.dk), keys_s, strict=True), (here.b, rows, here.k), x, k_there)
        copy_token_vectors(here.scalars.by_key, rows, marks[1], x, k_there.at[x])
        pl.when(at >= stages)(lambda: plgpu.barrier_wait(v_used.at[x]))
        copy(
            zip((arrays.value, arrays.dv), values_s, strict=True),
            (here.b, rows, here.k),
            x,
            v_there,
        )

    return copy_tiles(own, others, turn, count, tiling)


class State(NamedTuple):
    """Of each row: r and c, and the sum of p: of tiles in which c is found, or, if lse is `shared`, of all."""

    r: Array
    c: Array
    l: Array


def logits(
    problem: Problem, raw: Array, pairs: ScoreTile, keep: Array | None
) -> tuple[Array, Callable[[Array], Array]]:
    """(2): s, in bits, and what makes ds, in nats, of draw."""
    gradient = Gradient(problem)
    if gradient.linear:
        hide = lambda ds: ds if keep is None else jnp.where(keep, ds, 0.0)
        return pairs.logits(raw, keep), lambda draw: hide(draw * gradient.slope)
    at = pairs.places(problem.score_fn)
    s, along = jax.linearize(lambda raw: logits_base2(problem, raw, LogitParams(), keep, at), raw)
    return s, lambda draw: along(draw * (1 / LOG2_E))


def _compute(
    problem,
    tiling,
    shared,
    arrays: Arrays,
    results,
    group,
    here: QueryWork,
    turn: WorkState,
    *,
    own_s,
    keys_s,
    values_s,
    lse_s,
    failed_s,
    bad_keys_s,
    bad_columns_s,
    own_there,
    own_used,
    k_there,
    v_there,
    k_used,
    v_used,
    out_there,
    all_here,
    marks,
    stage=None,
    **_,
):
    dout_ref, dlse_ref = results
    at: Any = lambda ref, i: None if ref is None else ref.at[i]
    shape, wide, dtype = (ROWS, tiling.others), (ROWS, own_s[0].shape[-1]), own_s[0].dtype
    rows, count, y = (
        pl.ds(here.row + group * ROWS, ROWS),
        here.visits.total,
        lax.rem(turn.items, jnp.int32(tiling.items)),
    )
    mine = y * tiling.warpgroups + group
    q, dq = (at(ref, mine) for ref in own_s)
    numbers, slot = (
        head_number_refs(here.scalars, here.n),
        lambda n: lax.rem(turn.visits + n, jnp.int32(tiling.stages)),
    )

    def pairs_of(n):
        first = here.row + group * ROWS, here.visits.tile(n) * tiling.others
        of_tile = (
            tuple(ref.at[mine] for ref in marks[0]),
            tuple(ref.at[slot(n)] for ref in marks[1]),
        )
        return ScoreTile(problem, shape, first, here.sight, here.scalars, numbers, of_tile)

    def step(n, hides, state: State, u):
        x, pairs, waits = slot(n), pairs_of(n).early(), turn.first or not hides
        k, dk, v, dv = (at(ref, x) for ref in (*keys_s, *values_s))
        if waits:
            plgpu.barrier_wait(k_there.at[x])
        keep = pairs.seen() if hides else None
        sides = [(a, b) for a, b in ((dq, k), (q, dk)) if a is not None and b is not None]

        def products(raw, *draws):
            plgpu.wgmma(raw, q, k.T)  # (1)
            for a, b in sides:
                plgpu.wgmma(*draws, a, b.T)
            # (2)
            s, along = logits(
                problem, plgpu.wgmma_accumulator_load(raw, wait_n=len(sides)), pairs, keep
            )
            p = jnp.exp2(s - broadcast_vector(lse, shape))  # (3)
            if waits:
                plgpu.barrier_wait(v_there.at[x])
            if dv is not None:
                multiply(u, p.astype(dtype), dv, stage and stage.at[group])  # (4)
            if not sides:
                return state
            r, c, l = state
            ds = along(plgpu.wgmma_accumulator_load(*draws, wait_n=int(dv is not None)))
            if hides:
                l_more = p.sum(axis=1)
                c = jnp.where(l > 0, c, (p * ds).sum(axis=1) / jnp.where(l_more > 0, l_more, 1.0))
                l = l + l_more
            elif shared:
                l = l + p.sum(axis=1)
            w = p * (ds - broadcast_vector(c, shape))
            multiply(u, w.astype(dtype), v, stage and stage.at[group])  # (4)
            return State(r + w.sum(axis=1), c, l)

        state = accumulators(products, shape, *[shape] * bool(sides))
        plgpu.barrier_arrive(k_used.at[x])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(v_used.at[x])
        return state

    def again(n, state, u):
        """With u as it is, for NaN may come into it."""
        for there in (k_there, v_there):
            plgpu.barrier_wait(there.at[slot(n)])
        for ref in filter(None, values_s):
            u = cleaned(
                ref.at[slot(n)],
                u,
                pairs_of(n),
                group,
                (bad_keys_s.at[group], bad_columns_s, all_here),
            )
        return from_there(u, lambda total: step(n, True, state, total))

    def from_there(u, body):
        """What `body` returns, and u with what it added."""

        def more(total):
            whole = init_accumulator(total, u)
            found = body(total)
            return found, whole(plgpu.wgmma_accumulator_load(total, wait_n=0))

        return accumulators(more, wide)

    def pass_one(n):
        skip_item((k_there, k_used), (v_there, v_used), at=slot(n))

    plgpu.barrier_wait(own_there.at[mine])
    lse = plgpu.load(lse_s.at[mine], layout=ROW)
    visits, whole = here.visits, some_whole(problem, here.scalars)
    first = (
        jnp.minimum(visits.masked + jnp.where(visits.covers & (visits.right > 0), 0, 1), count)
        if whole
        else count
    )
    nothing = State(*[full_tile((ROWS,), 0.0)] * 3)

    def others(state, u):
        """Where all rows see what is not finite."""
        if not whole:
            return state
        return lax.fori_loop(first, count, lambda n, state: step(n, False, state, u), state)

    def walk(u):
        hidden = here.hidden(here.row + group * ROWS, ROWS)
        pl.loop(0, hidden)(pass_one)
        state = lax.fori_loop(hidden, first, lambda n, state: step(n, True, state, u), nothing)
        return others(state, u), plgpu.wgmma_accumulator_load(u, wait_n=0)

    if turn.first:
        state, u = accumulators(walk, wide)
    else:
        state, u = lax.fori_loop(
            0, first, lambda n, of: again(n, *of), (nothing, full_tile(wide, 0.0))
        )
        state, u = from_there(u, functools.partial(others, state))
    r, c, l = state
    failed = not_finite(failed_s.at[group], turn, u)
    if arrays.out is not None:  # into the place of queries
        plgpu.copy_gmem_to_smem(arrays.out.at[here.b, rows, here.n], q, out_there.at[group])
        plgpu.barrier_wait(out_there.at[group])
        mean = r - c * (1 - l) if shared else r
        u = u - broadcast_vector(mean, wide) * plgpu.load(q, layout=WGMMA).astype(jnp.float32)
    q[...] = u.astype(dtype)
    lse_s[mine] = r + c
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, dout_ref.at[here.b, rows, here.n])
    plgpu.copy_smem_to_gmem(lse_s.at[mine], dlse_ref.at[here.b, here.n, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(own_used.at[y])
    return count, failed
