"""Forward on Hopper (sm_90a): a block does tile after tile of queries, and visits the tiles of keys that each sees.

For each computing warpgroup, which owns 64 queries i (Dao 2023, algorithm 1; logits in bits, that is times log2 e):
  masked tiles first, and the first whole one where a row has seen nothing yet, with a running maximum:
  (1) raw = q_i k_j'                (3) m' = max(m, rowmax s);  a = 2^(m - m')
  (2) s   = finish(raw)             (4) l = a l + rowsum 2^(s - m');  o = a o + 2^(s - m') v_j
  then all other tiles with m as it stands: softmax does not change with its reference, so nothing is rescaled and o stays
  in one accumulator, while q_i k_{j+1}' runs beside the exponentials of tile j:
  (5) p = 2^(s - m);  l = l + rowsum p;  o = o + p v_j
  at the end: out = o / l, lse = (m + log2 l) / log2 e; with a sink out = o / (l + 2^(sink - m))
  A row whose l left the range of float32 in (5) (some later logit exceeds m by 60 bits and more), whose o is not finite,
  or whose m is -inf before (5), is done again at the block's end: with what nobody sees cleaned of NaN and Inf, which
  changes no bit of the others; and if it fails still, by (1) to (4) for all its tiles, and only its own result is replaced.
Why a row that stands has lost nothing: m is one of its own logits, so l >= 1, and each p is at least the probability that
the softmax gives. What p loses where it is rounded to 16 bits (below 2^-126; in float16 below 2^-24) plain attention loses,
too: of the row at most S 2^-126. What is larger than float32 or float16 holds (p > 2^16, o > 2^128) makes o infinite or NaN,
and the row fails. In bfloat16 the last round takes m 20 bits above the largest logit, so that l <= 1 for S <= 2^20: o is
then no larger than the largest value, however large that is.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.logits import LOG2_E
from memeff.pallas.hopper.mosaic import (
    COL,
    ROW,
    WGMMA,
    accumulators,
    any_of,
    broadcast_vector,
    full_tile,
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
from memeff.pallas.hopper.persistent import (
    ROWS,
    PersistentLoop,
    WorkState,
    any_failed,
    persistent_blocks,
    run_with_retries,
    skip_item,
)
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import (
    CallSizes,
    QueryWork,
    TileOrder,
    balanced_order,
    find_query_work,
    some_whole,
)
from memeff.pallas.hopper.score_tile import (
    HeadNumbers,
    ScoreTile,
    allow_approx_math,
    barrier_arrivals,
    copy_token_vectors,
    head_number_refs,
    scratch_shapes,
)
from memeff.pallas.hopper.tile_ranges import TileRange, tiles_visited, with_lists
from memeff.problem import Problem
from memeff.softmax import SEES_NOTHING

ROOM = 20.0  # bits above the largest logit, for the sums of S <= 2^20 of the largest values


class Tiling(NamedTuple):
    warpgroups: int  # that compute
    keys: int  # of a tile
    stages: int  # tiles of keys, and of values, on their way or in use
    queries: int  # tiles of queries on their way or in use

    @property
    def rows(self) -> int:
        return self.warpgroups * ROWS


def attend(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: tuple[Array, ...],
    scalars: Scalars,
    want_lse: bool,
    tiling: Tiling,
) -> tuple[Array, Array | None]:
    """out [B, T, N, H] and lse [B, N, T'], T' the next multiple of a block's rows, from B T N H, B S K H and B S K H.

    H, here that of values as well, is a multiple of 64, the dims of T and S are of 8; `lengths`: how many there really are.
    """
    query, key, value = arrays
    (B, rows, N, H), (_, _, K, D), dtype, (T, S) = query.shape, value.shape, query.dtype, lengths
    shape = CallSizes(B, T, S, K, N // K)
    tiles = -(-T // tiling.rows)
    groups, keys, stages = tiling.warpgroups, tiling.keys, tiling.stages
    scalars = with_lists(
        problem, with_ranges(scalars, lengths, tiling.rows), lengths, (tiling.rows, keys)
    )
    given, (of_query, of_key) = jax.tree.leaves(scalars), barrier_arrivals(scalars)
    out = [jax.ShapeDtypeStruct((B, rows, N, D), dtype)]
    if want_lse:
        out.append(jax.ShapeDtypeStruct((B, N, tiles * tiling.rows), jnp.float32))
    total = B * N * tiles
    blocks = persistent_blocks(total)
    times = 1 + tiles_visited(problem, lengths, tiling.rows, keys)
    order = TileOrder() if problem.right is None else balanced_order(B * N, times, blocks)

    def body(query_ref, key_ref, value_ref, *refs, failed_s, all_done, **scratch):
        of = iter(refs)
        values = scalars.like(of)
        arrays, outs = (query_ref, key_ref, value_ref), (*of, None)[:2]
        group, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        find = lambda index: find_query_work(
            problem, shape, values, tiling.rows, keys, order, index
        )
        items = lambda do: PersistentLoop(
            total, blocks, block, lambda index, turn: do(find(index), turn)
        )
        still = lambda: functools.reduce(
            jnp.logical_or, (any_of(failed_s.at[group]) for group in range(groups))
        )

        @pl.when(group < groups)
        def _():
            take_registers(tiling.warpgroups, computes=True)
            compute = Compute(problem, tiling, arrays, outs, group, failed_s.at[group], **scratch)
            run_with_retries(items(compute.item), True, failed_s, all_done, still=still)

        @pl.when(group == groups)
        def _():
            take_registers(tiling.warpgroups, computes=False)
            rings = (
                (stages, True, (scratch["k_used"], scratch["v_used"])),
                (tiling.queries, False, (scratch["q_used"],)),
            )
            copy = functools.partial(_copy, tiling, arrays, **scratch)
            run_with_retries(items(copy), False, failed_s, all_done, rings, still)

    scratch = dict(
        q_s=tile_ref(tiling.queries * groups, ROWS, H, dtype),
        k_s=tile_ref(stages, keys, H, dtype),
        v_s=tile_ref(stages, keys, D, dtype),
        rows_s=plgpu.SMEM((4, groups * ROWS), jnp.float32),
        failed_s=plgpu.SMEM((groups, ROWS), jnp.float32),
        columns_s=plgpu.SMEM((D,), jnp.float32),
        keys_s=plgpu.SMEM((groups, keys), jnp.float32),
        q_there=plgpu.Barrier(num_arrivals=groups * (1 + of_query), num_barriers=tiling.queries),
        q_used=plgpu.Barrier(num_arrivals=groups, num_barriers=tiling.queries),
        k_there=plgpu.Barrier(num_barriers=stages),
        v_there=plgpu.Barrier(num_arrivals=1 + of_key, num_barriers=stages),
        k_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        old_there=plgpu.Barrier(num_barriers=groups),
        all_here=plgpu.Barrier(num_arrivals=groups),
        all_done=plgpu.Barrier(num_arrivals=groups + 1),
        **scratch_shapes(scalars, (tiling.queries * groups, ROWS), (stages, keys)),
        **interpreter_staging(groups, ROWS, keys, dtype),
    )
    kernel = warp_specialized_kernel(
        body,
        "memeff_forward",
        out,
        scratch,
        blocks,
        groups + 1,
        allow_approx_math(problem),
        sums_over_rows=True,
    )
    found = kernel(query, key, value, *given)
    return found[0], found[1] if want_lse else None


def _copy(
    tiling: Tiling,
    arrays,
    here: QueryWork,
    turn: WorkState,
    *,
    q_s,
    k_s,
    v_s,
    q_there,
    q_used,
    k_there,
    v_there,
    k_used,
    v_used,
    marks,
    **_,
):
    """Queries for each warpgroup, keys and values once for all."""
    query_ref, key_ref, value_ref = arrays
    count, y = here.visits.total, lax.rem(turn.items, jnp.int32(tiling.queries))
    pl.when(turn.items >= tiling.queries)(lambda: plgpu.barrier_wait(q_used.at[y]))
    for group in range(tiling.warpgroups):
        rows, to = pl.ds(here.row + group * ROWS, ROWS), q_s.at[y * tiling.warpgroups + group]
        plgpu.copy_gmem_to_smem(query_ref.at[here.b, rows, here.n], to, q_there.at[y])
        copy_token_vectors(
            here.scalars.by_query, rows, marks[0], y * tiling.warpgroups + group, q_there.at[y]
        )

    @pl.loop(0, count)
    def _(n):
        x, cols = (
            lax.rem(turn.visits + n, jnp.int32(tiling.stages)),
            pl.ds(here.visits.tile(n) * tiling.keys, tiling.keys),
        )
        for ref, shared, there, used in (
            (key_ref, k_s, k_there, k_used),
            (value_ref, v_s, v_there, v_used),
        ):
            pl.when(turn.visits + n >= tiling.stages)(
                lambda used=used: plgpu.barrier_wait(used.at[x])
            )
            plgpu.copy_gmem_to_smem(ref.at[here.b, cols, here.k], shared.at[x], there.at[x])
        # with values, for `cleaned` wants them, too
        copy_token_vectors(here.scalars.by_key, cols, marks[1], x, v_there.at[x])

    return count, jnp.int32(0)


class Compute(NamedTuple):
    """What a computing warpgroup has for all its tiles."""

    problem: Problem
    tiling: Tiling
    arrays: Any
    out: Any
    group: Array
    failed_s: Any  # of each row
    q_s: Any
    k_s: Any
    v_s: Any
    rows_s: Any  # of each row, if it is done again, m, l, failed; lse
    columns_s: Any
    keys_s: Any
    q_there: Any
    q_used: Any
    k_there: Any
    v_there: Any
    k_used: Any
    v_used: Any
    old_there: Any
    all_here: Any
    marks: Any
    stage: Any = None

    def row_s(self, n: int):
        return self.rows_s.at[n, pl.ds(self.group * ROWS, ROWS)]

    def item(self, here: QueryWork, turn: WorkState):
        """One tile of queries, stored."""
        query_ref, _, value_ref = self.arrays
        (out_ref, lse_ref), D = self.out, value_ref.shape[-1]
        y, rows = (
            lax.rem(turn.items, jnp.int32(self.tiling.queries)),
            pl.ds(here.row + self.group * ROWS, ROWS),
        )
        mine = self.q_s.at[y * self.tiling.warpgroups + self.group]
        o_s, of_out = mine, out_ref.at[here.b, rows, here.n]  # queries make room for out
        plgpu.barrier_wait(self.q_there.at[y])
        m, l, o, bad = Walk(self, here, turn, mine, D, head_number_refs(here.scalars, here.n)).all()

        def only_failed():
            plgpu.copy_gmem_to_smem(of_out, o_s, self.old_there.at[self.group])
            plgpu.barrier_wait(self.old_there.at[self.group])
            old = [plgpu.load(self.row_s(i), layout=ROW) for i in range(3)]
            was_bad = old[2] > 0
            first = plgpu.load(o_s, layout=WGMMA).astype(jnp.float32)
            return (
                jnp.where(was_bad, m, old[0]),
                jnp.where(was_bad, l, old[1]),
                jnp.where(broadcast_vector(old[2], o.shape) > 0, o, first),
            )

        if not turn.first:
            m, l, o = lax.cond(turn.online, only_failed, lambda: (m, l, o))

            @pl.when(~turn.online)
            def _():
                for i, x in enumerate((m, l, bad)):
                    self.row_s(i)[...] = x

        failed = any_failed(self.failed_s, bad)
        o_s[...] = o.astype(self.q_s.dtype)
        if lse_ref is not None:
            self.row_s(3)[...] = jnp.where(l == 0, SEES_NOTHING, (m + jnp.log2(l)) * (1 / LOG2_E))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s, of_out)
        if lse_ref is not None:
            plgpu.copy_smem_to_gmem(self.row_s(3), lse_ref.at[here.b, here.n, rows])
        plgpu.wait_smem_to_gmem(0, wait_read_only=turn.first)  # what is done again may read out
        plgpu.barrier_arrive(self.q_used.at[y])
        return here.visits.total, failed


class Walk(NamedTuple):
    """One warpgroup's way over the tiles of keys of a tile of queries."""

    has: Compute
    here: QueryWork
    turn: WorkState
    q: Any
    D: int
    of_head: HeadNumbers

    @property
    def shape(self):
        return ROWS, self.has.tiling.keys

    def slot(self, n):
        return lax.rem(self.turn.visits + n, jnp.int32(self.has.tiling.stages))

    @property
    def fixes(self) -> bool:
        """Has (5) a part? Not where no tile is whole. A score of the user's, too, may fall with the distance: then the first
        tiles give good references only if they are the nearest.
        """
        problem, visits = self.has.problem, self.here.visits
        near = (
            problem.score_fn is None or problem.right is not None or isinstance(visits, TileRange)
        )
        return some_whole(problem, self.here.scalars) and near

    def pairs(self, n) -> ScoreTile:
        has, here = self.has, self.here
        first = here.row + has.group * ROWS, here.visits.tile(n) * has.tiling.keys
        y = lax.rem(self.turn.items, jnp.int32(has.tiling.queries)) * has.tiling.warpgroups
        marks = (
            tuple(x.at[y + has.group] for x in has.marks[0]),
            tuple(x.at[self.slot(n)] for x in has.marks[1]),
        )
        return ScoreTile(
            has.problem, self.shape, first, here.sight, here.scalars, self.of_head, marks
        )

    def all(self):
        """m, l, o = out, and 1 for each row that failed."""
        visits = self.here.visits
        first = jnp.minimum(
            visits.masked + jnp.where(visits.covers & (visits.right > 0), 0, 1), visits.total
        )
        first = first if self.fixes else visits.total
        nothing = (
            full_tile((ROWS,), -jnp.inf),
            full_tile((ROWS,), 0.0),
            full_tile((ROWS, self.D), 0.0),
        )
        if not self.turn.first:  # the same numbers in the same order, or all with a running maximum
            first = jnp.where(self.turn.online, visits.total, first)
            again = lambda n, state: self.again(n, first, *state)
            early = first if interpreting() else visits.total
            m, l, o = lax.fori_loop(0, early, again, nothing)
            # it adds what (5) begins with at the end (see `begin`), so here, too, for the same bits
            if interpreting():
                m, l, late = lax.fori_loop(
                    early, visits.total, again, (m, l, full_tile((ROWS, self.D), 0.0))
                )
                o = o + late
        else:
            hidden = self.here.hidden(self.here.row + self.has.group * ROWS, ROWS)
            pl.loop(0, hidden)(self.pass_by)
            m, l, o = lax.fori_loop(hidden, first, self.online, nothing)
            r = jnp.where(m == -jnp.inf, 0.0, m)

            def rest(total):
                whole = init_accumulator(total, o)
                l_all = lax.cond(
                    first < visits.total, lambda l: self.fixed(total, first, r, l), lambda l: l, l
                )
                return l_all, whole(plgpu.wgmma_accumulator_load(total, wait_n=0))

            if self.fixes:
                l, o = accumulators(rest, o.shape)
        bad = jnp.maximum(
            jnp.where(l < 2.0**60, 0.0, 1.0), jnp.where(jnp.abs(o) < jnp.inf, 0.0, 1.0).max(axis=1)
        )
        if self.fixes:  # then 0 stood in for m, which is no logit of the row
            bad = jnp.where((m == -jnp.inf) & (first < visits.total), 1.0, bad)
        return m, l, o * broadcast_vector(self.divisor(m, l), o.shape), bad

    def divisor(self, m, l):
        """Return 1 / l; with a sink 1 / (l + 2^(sink - m)), in a form that a sink far above m does not overflow."""
        l, sinks = jnp.where(l == 0, 1.0, l), self.here.scalars.sinks
        if sinks is None:
            return 1 / l
        sink = lax.broadcast(sinks[self.here.n], l.shape)
        m = jnp.where(m == -jnp.inf, 0.0, m)
        top = jnp.maximum(m, sink)
        share = jnp.exp2(m - top)
        return share / (l * share + jnp.exp2(sink - top))

    def pass_by(self, n):
        has, x = self.has, self.slot(n)
        skip_item((has.k_there, has.k_used), (has.v_there, has.v_used), at=x)

    def logits(self, n):
        """(1), alone."""
        x = self.slot(n)
        plgpu.barrier_wait(self.has.k_there.at[x])

        def body(raw):
            plgpu.wgmma(raw, self.q, self.has.k_s.at[x].T)
            return plgpu.wgmma_accumulator_load(raw, wait_n=0)

        raw = accumulators(body, self.shape)
        plgpu.barrier_arrive(self.has.k_used.at[x])
        return raw

    def online(self, n, state):
        """(1) to (4)."""
        has, x, pairs, (m, l, o) = self.has, self.slot(n), self.pairs(n).early(), state
        raw = self.logits(n)
        there = lambda: plgpu.barrier_wait(has.v_there.at[x])
        if has.marks[1]:  # which come with values
            there()
        p, m, l, o = self.moved(pairs, raw, m, l, o)
        if not has.marks[1]:
            there()
        return m, l, self.weighed(o, p, n)

    def moved(self, pairs: ScoreTile, raw, m, l, o):
        """p of (4), and m, l and o for it."""
        s = pairs.logits(raw, pairs.seen())  # (2)
        top = s.max(axis=1)
        if not self.turn.first and self.has.v_s.dtype == jnp.bfloat16:
            top = top + jnp.where(self.turn.online, ROOM, 0.0)
        m_new = jnp.maximum(m, top)  # (3)
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        a = jnp.exp2(m - shift)
        p = jnp.exp2(s - broadcast_vector(shift, self.shape))
        l = a * l + p.sum(axis=1)  # (4)
        return p.astype(self.has.v_s.dtype), m_new, l, o * broadcast_vector(a, o.shape)

    def again(self, n, first, m, l, o):
        """(1) to (4) up to visit `first`, from there (5); what nobody sees is cleaned."""
        pairs, raw = self.pairs(n), self.logits(n)
        plgpu.barrier_wait(self.has.v_there.at[self.slot(n)])

        def stands(m, l, o):
            p, l = self.probabilities(pairs, raw, jnp.where(m == -jnp.inf, 0.0, m), l)
            return p, m, l, o

        moved = functools.partial(self.moved, pairs, raw)
        p, m, l, o = lax.cond(n < first, moved, stands, m, l, o) if self.fixes else moved(m, l, o)
        return m, l, self.weighed(self.cleaned(o, n), p, n)

    def probabilities(self, pairs: ScoreTile, raw, r, l):
        p = jnp.exp2(pairs.logits(raw, None) - broadcast_vector(r, self.shape))
        return p.astype(self.has.v_s.dtype), l + p.sum(axis=1)

    def weighed(self, o, p, n):
        """o + p v, when v is there."""

        def product(total):
            whole = init_accumulator(total, o)
            self.add(total, p, self.slot(n))
            return whole(plgpu.wgmma_accumulator_load(total, wait_n=0))

        o = accumulators(product, o.shape)
        plgpu.barrier_arrive(self.has.v_used.at[self.slot(n)])
        return o

    def add(self, total, p, x):
        multiply(total, p, self.has.v_s.at[x], self.has.stage and self.has.stage.at[self.has.group])

    def cleaned(self, o, n):
        has = self.has
        room = has.keys_s.at[has.group], has.columns_s, has.all_here
        return cleaned(has.v_s.at[self.slot(n)], o, self.pairs(n), has.group, room)

    def fixed(self, total, first, r, l):
        """(5) for the visits from `first` on, one at least."""
        has, count = self.has, self.here.visits.total
        # it reads what comes with values
        scored = bool(has.marks[1]) and has.problem.score_fn is not None
        there = lambda n: plgpu.barrier_wait(has.v_there.at[self.slot(n)])

        def logits(n, then):
            x, pairs = self.slot(n), self.pairs(n).early()
            plgpu.barrier_wait(has.k_there.at[x])

            def body(raw):
                plgpu.wgmma(raw, self.q, has.k_s.at[x].T)
                s = then(raw)
                plgpu.barrier_arrive(has.k_used.at[x])
                return s

            return pairs, accumulators(body, self.shape)

        def weigh(p, n):
            if not scored:
                there(n)
            self.add(total, p, self.slot(n))

        def probabilities(n, made, l):
            pairs, raw = made
            if scored:
                there(n)
            return self.probabilities(pairs, raw, r, l)

        def step(n, state):
            p, l = state

            def then(raw):
                weigh(p, n)
                return plgpu.wgmma_accumulator_load(raw, wait_n=1)

            p, l = probabilities(n + 1, logits(n + 1, then), l)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(has.v_used.at[self.slot(n)])
            return p, l

        made = logits(first, lambda raw: plgpu.wgmma_accumulator_load(raw, wait_n=0))
        p, l = probabilities(first, made, l)
        p, l = lax.fori_loop(first, count - 1, step, (p, l))
        weigh(p, count - 1)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(has.v_used.at[self.slot(count - 1)])
        return l


def cleaned(v, o, pairs: ScoreTile, group, room):
    """o, if v, a tile that all warpgroups read, is finite. 0 times NaN is NaN: values that are not finite become 0, and NaN
    for the rows that see them, in their columns.
    """
    (keys_s, columns_s, all_here), D = room, v.shape[1]
    parts = [(i * ROWS, j * ROWS) for i in range(v.shape[0] // ROWS) for j in range(D // ROWS)]
    at = lambda i, j: v.at[i : i + ROWS, j : j + ROWS]
    load = lambda *ij: plgpu.load(at(*ij), layout=WGMMA).astype(jnp.float32)
    bad = lambda *ij: jnp.where(jnp.abs(load(*ij)) < jnp.inf, 0.0, 1.0)
    for i in range(0, v.shape[0], ROWS):
        rows = [bad(*ij).max(axis=1) for ij in parts if ij[0] == i]
        keys_s[i : i + ROWS] = functools.reduce(jnp.maximum, rows)

    def marks(o):
        bad_keys = broadcast_vector(plgpu.load(keys_s, layout=COL), pairs.shape, 1)
        sees_bad = jnp.where(pairs.seen(), bad_keys, 0.0).max(axis=1)
        sync(all_here)

        @pl.when(group == 0)  # one alone: sums over rows share their memory
        def _():
            for j in range(0, D, ROWS):
                columns = [bad(*ij).max(axis=0) for ij in parts if ij[1] == j]
                columns_s[j : j + ROWS] = functools.reduce(jnp.maximum, columns)
            for ij in parts:
                at(*ij)[...] = jnp.where(bad(*ij) > 0, 0.0, load(*ij)).astype(v.dtype)
            plgpu.commit_smem()

        sync(all_here)
        columns = broadcast_vector(plgpu.load(columns_s, layout=COL), o.shape, 1)
        return jnp.where(columns * broadcast_vector(sees_bad, o.shape) > 0, jnp.nan, o)

    return lax.cond(any_of(keys_s), marks, lambda o: o, o)
