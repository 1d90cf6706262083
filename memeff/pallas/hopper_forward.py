"""Forward on Hopper (sm_90a): one block for a tile of queries, which visits the tiles of keys that it sees.

For each computing warpgroup, which owns 64 queries i (Dao 2023, algorithm 1; logits in bits, that is times log2 e):
  masked tiles first, and the first whole one where a row has seen nothing yet, with a running maximum:
  (1) raw = q_i k_j'                (3) m' = max(m, rowmax s);  a = 2^(m - m')
  (2) s   = finish(raw)             (4) l = a l + rowsum 2^(s - m');  o = a o + 2^(s - m') v_j
  then all other tiles with m as it stands: softmax does not change with its reference, so nothing is rescaled and o stays
  in one accumulator, while q_i k_{j+1}' runs beside the exponentials of tile j:
  (5) p = 2^(s - m);  l = l + rowsum p;  o = o + p v_j
  at the end: out = o / l, lse = (m + log2 l) / log2 e
  A row whose l left the range of float32 in (5) (some later logit exceeds m by 60 bits and more), or whose o is not finite,
  does (1) to (4) for all its tiles again, and only its own result is replaced.
"""

from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.mosaic import (
    COL,
    WGMMA,
    accumulators,
    any_of,
    begin,
    call,
    full,
    meet,
    multiply,
    positions,
    spread,
    stage,
    tile,
)
from memeff.pallas.walk import Scalars, Shape, Visits, ends, keys_seen, place
from memeff.problem import LOG2_E, SEES_NOTHING, Problem, Sight, Terms, finish, in_bits, sees

ROWS = 64  # queries of a warpgroup
PIECE = 64  # keys of a masked step


class Tiling(NamedTuple):
    warpgroups: int  # that compute
    keys: int  # of a tile
    stages: int  # tiles of keys, and of values, on their way or in use

    @property
    def rows(self) -> int:
        return self.warpgroups * ROWS

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that computes, and of one that copies; 65,536 are there for all."""
        return {1: (240, 40), 2: (240, 24), 3: (160, 32)}[self.warpgroups]


def attend(
    problem: Problem, query: Array, key: Array, value: Array, scalars: Scalars, want_lse: bool, tiling: Tiling
) -> tuple[Array, Array | None]:
    """out [B, T, N, D] and lse [B, N, T'], T' the next multiple of a block's rows, from B T N H, B S K H and B S K D.

    H and D are multiples of 64.
    """
    (B, T, N, H), (_, S, K, D), dtype = query.shape, value.shape, query.dtype
    shape = Shape(B, T, S, K, N // K)
    blocks = -(-T // tiling.rows)
    groups, keys, stages, dtype = tiling.warpgroups, tiling.keys, tiling.stages, query.dtype
    given = [x for x in scalars if x is not None]
    out = [jax.ShapeDtypeStruct((B, T, N, D), dtype)]
    if want_lse:
        out.append(jax.ShapeDtypeStruct((B, N, blocks * tiling.rows), jnp.float32))

    def body(query_ref, key_ref, value_ref, *refs, **scratch):
        of = iter(refs)
        values = Scalars(*(None if x is None else next(of) for x in scalars))
        _block(problem, shape, tiling, (query_ref, key_ref, value_ref), values, (*of, None)[:2], **scratch)

    scratch = dict(
        q_s=tile(groups, ROWS, max(H, D), dtype),
        k_s=tile(stages, keys, H, dtype),
        v_s=tile(stages, keys, D, dtype),
        columns_s=plgpu.SMEM((D,), jnp.float32),
        lse_s=plgpu.SMEM((groups, ROWS), jnp.float32),
        bad_s=plgpu.SMEM((2, groups * ROWS), jnp.float32),
        q_there=plgpu.Barrier(num_barriers=groups),
        k_there=plgpu.Barrier(num_barriers=stages),
        v_there=plgpu.Barrier(num_barriers=stages),
        k_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        all_here=plgpu.Barrier(num_arrivals=groups),
        all_done=plgpu.Barrier(num_arrivals=groups),
        **stage(groups, ROWS, max(keys, PIECE), dtype),
    )
    name = "memeff_forward"
    found = call(body, name, out, scratch, B * N * blocks, groups + 1, problem.soft_cap is None)(query, key, value, *given)
    return found[0], found[1] if want_lse else None


def _block(problem, shape, tiling, arrays, scalars, out, **scratch):
    """Finds its place, and parts into warpgroups that compute and one that copies."""
    group = lax.axis_index("warpgroup")
    bytes_read = shape.S * (arrays[1].shape[-1] + arrays[2].shape[-1]) * 2 // shape.G
    here = find_place(problem, shape, scalars, tiling.rows, tiling.keys, max(1, bytes_read))

    @pl.when(group < tiling.warpgroups)
    def _():
        plgpu.set_max_registers(tiling.registers[0], action="increase")
        _compute(problem, tiling, arrays, out, here, group, **scratch)

    @pl.when(group == tiling.warpgroups)
    def _():
        plgpu.set_max_registers(tiling.registers[1], action="decrease")
        _copy(tiling, arrays, here, **scratch)


class Place(NamedTuple):
    b: Array
    n: Array  # query head
    k: Array  # key head
    row: Array  # the first query
    sight: Sight
    visits: Visits


def find_place(problem: Problem, shape: Shape, scalars: Scalars, rows: int, keys: int, bytes_read: int) -> Place:
    """Of a block that owns `rows` queries; heads of a group, which share keys, are neighbours."""
    head, tile = place(shape.B * shape.K * shape.G, -(-shape.T // rows), bytes_read, False, problem.right is not None)
    b, n = lax.div(head, jnp.int32(shape.K * shape.G)), lax.rem(head, jnp.int32(shape.K * shape.G))
    scalars = Scalars(*(None if x is None else x[b] for x in scalars))
    all_ends, sight = ends(shape, scalars, keys)
    row = tile * rows
    # Rows behind the last query see what they like: nobody stores them.
    last = jnp.minimum(row + rows, shape.T) - 1
    offset = problem.q_offset if scalars.q_offset is None else scalars.q_offset
    visits = keys_seen(problem, offset, row, last, all_ends, keys, False)
    return Place(b, n, lax.div(n, jnp.int32(shape.G)), row, sight, visits)


def _copy(tiling: Tiling, arrays, here: Place, k_s, v_s, bad_s, k_there, v_there, k_used, v_used, all_done, **_):
    """Keys and values, once for all warpgroups, and once more where a row must be done again."""
    _, key_ref, value_ref = arrays
    stages, count = tiling.stages, here.visits.count

    def fetch(start):
        @pl.loop(0, count)
        def _(n):
            x, rows = lax.rem(start + n, jnp.int32(stages)), pl.ds(here.visits.tile(n) * tiling.keys, tiling.keys)
            for ref, shared, there, used in ((key_ref, k_s, k_there, k_used), (value_ref, v_s, v_there, v_used)):
                pl.when(start + n >= stages)(lambda used=used: plgpu.barrier_wait(used.at[x]))
                plgpu.copy_gmem_to_smem(ref.at[here.b, rows, here.k], shared.at[x], there.at[x])

    fetch(jnp.int32(0))
    plgpu.barrier_wait(all_done)
    again = any_of(bad_s.at[1])
    pl.when(again)(lambda: fetch(count))
    total = jnp.where(again, 2 * count, count)

    @pl.loop(jnp.maximum(total - stages, 0), total)
    def _(n):
        for used in (k_used, v_used):
            plgpu.barrier_wait(used.at[lax.rem(n, jnp.int32(stages))])


def _compute(problem, tiling, arrays, out, here, group, *, q_s, lse_s, bad_s, q_there, all_done, **scratch):
    query_ref, _, value_ref = arrays
    out_ref, lse_ref = out
    H, D, dtype = query_ref.shape[-1], value_ref.shape[-1], query_ref.dtype
    rows = pl.ds(here.row + group * ROWS, ROWS)
    q, o_s = q_s.at[group, :, :H], q_s.at[group, :, :D]
    of_query, of_out = query_ref.at[here.b, rows, here.n], out_ref.at[here.b, rows, here.n]

    def load(of, to):
        plgpu.copy_gmem_to_smem(of, to, q_there.at[group])
        plgpu.barrier_wait(q_there.at[group])

    def store(m, l, o):
        o_s[...] = o.astype(dtype)
        if lse_ref is not None:
            lse_s[group] = jnp.where(l == 0, SEES_NOTHING, (m + jnp.log2(l)) * (1 / LOG2_E))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s, of_out)
        if lse_ref is not None:
            plgpu.copy_smem_to_gmem(lse_s.at[group], lse_ref.at[here.b, here.n, rows])
        plgpu.wait_smem_to_gmem(0)

    walk = Walk(problem, tiling, here, group, q, bad_s, **scratch)
    load(of_query, q)
    m, l, o, bad = walk.fast()
    bad_s[1, pl.ds(group * ROWS, ROWS)] = bad
    plgpu.barrier_arrive(all_done)
    store(m, l, o)
    plgpu.barrier_wait(all_done)

    @pl.when(any_of(bad_s.at[1]))
    def _():
        load(of_query, q)
        visits = here.visits
        m2, l2, o2 = walk.online(0, visits.count, visits.count, walk.nothing())
        l2, o2 = _divided(l2, o2)
        load(of_out, o_s)
        first = plgpu.load(o_s, layout=WGMMA).astype(jnp.float32)
        store(jnp.where(bad > 0, m2, m), jnp.where(bad > 0, l2, l), jnp.where(spread(bad, o2.shape) > 0, o2, first))


def _divided(l, o):
    return l, o * spread(1 / jnp.where(l == 0, 1.0, l), o.shape)


class Walk(NamedTuple):
    """One warpgroup's way over the tiles."""

    problem: Problem
    tiling: Tiling
    here: Place
    group: Array
    q: object
    bad_s: object
    k_s: object
    v_s: object
    k_there: object
    v_there: object
    k_used: object
    v_used: object
    all_here: object
    columns_s: object
    stage: object = None

    @property
    def shape(self):
        return ROWS, self.tiling.keys

    def nothing(self):
        return full((ROWS,), -jnp.inf), full((ROWS,), 0.0), full((ROWS, self.D), 0.0)

    @property
    def D(self) -> int:
        return self.v_s.shape[-1]

    def slot(self, n):
        return lax.rem(n, jnp.int32(self.tiling.stages))

    def finish(self, raw, keep=None):
        """(2), in bits."""
        return finish(in_bits(self.problem), raw, Terms(), keep)

    def online(self, first, last, start, state):
        """(1) to (4) for the visits `first` to `last`, PIECE keys at a time; `start`: tiles that the ring has had before."""
        pieces = self.tiling.keys // PIECE

        def step(n, state):
            x, col = self.slot(start + n), self.here.visits.tile(n) * self.tiling.keys
            plgpu.barrier_wait(self.k_there.at[x])
            plgpu.barrier_wait(self.v_there.at[x])

            def piece(c, state):
                first = pl.multiple_of((pieces - 1 - c) * PIECE, PIECE)
                part = pl.ds(first, PIECE)
                return self.piece(self.k_s.at[x, part], self.v_s.at[x, part], col + first, state)

            state = lax.fori_loop(0, pieces, piece, state)
            plgpu.barrier_arrive(self.k_used.at[x])
            plgpu.barrier_arrive(self.v_used.at[x])
            return state

        return lax.fori_loop(first, last, step, state)

    def piece(self, k, v, col, state):
        m, l, o = state
        shape = ROWS, PIECE

        def logits(raw):
            plgpu.wgmma(raw, self.q, k.T)
            return plgpu.wgmma_accumulator_load(raw, wait_n=0)

        raw = accumulators(logits, shape)  # (1)
        keep = sees(
            self.problem,
            self.here.sight,
            positions(self.here.row + self.group * ROWS, shape, 0),
            positions(col, shape, 1),
        )
        s = self.finish(raw, keep)  # (2)
        m_new = jnp.maximum(m, s.max(axis=1))  # (3)
        shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        a = jnp.exp2(m - shift)
        p = jnp.exp2(s - spread(shift, shape))
        l = a * l + p.sum(axis=1)  # (4)
        o = o * spread(a, o.shape)
        o = self.marked(o, keep, v)

        def product(total):
            whole = begin(total, o)
            self.weigh(total, p.astype(v.dtype), v)
            return whole(plgpu.wgmma_accumulator_load(total, wait_n=0))

        return m_new, l, accumulators(product, o.shape)

    def weigh(self, total, p, v):
        multiply(total, p, v, self.stage and self.stage.at[self.group, :, : p.shape[1]])

    def marked(self, o, keep, v):
        """NaN where a row sees a value that is not finite, in its columns; and such values become 0 in `v`, which all
        warpgroups share, for 0 times NaN is NaN.
        """
        bad = lambda: jnp.where(jnp.abs(plgpu.load(v, layout=WGMMA).astype(jnp.float32)) < jnp.inf, 0.0, 1.0)
        mine = self.bad_s.at[0, pl.ds(self.group * ROWS, ROWS)]
        mine[...] = bad().max(axis=1)

        def marks(o):
            bad_keys = spread(plgpu.load(mine, layout=COL), keep.shape, 1)
            sees_bad = jnp.where(keep, bad_keys, 0.0).max(axis=1)
            meet(self.all_here)

            @pl.when(self.group == 0)  # one alone: sums over rows share their memory
            def _():
                self.columns_s[...] = bad().max(axis=0)
                v[...] = jnp.where(bad() > 0, 0.0, plgpu.load(v, layout=WGMMA).astype(jnp.float32)).astype(v.dtype)
                plgpu.commit_smem()

            meet(self.all_here)
            columns = spread(plgpu.load(self.columns_s, layout=COL), o.shape, 1)
            return jnp.where(columns * spread(sees_bad, o.shape) > 0, jnp.nan, o)

        return lax.cond(any_of(mine), marks, lambda o: o, o)

    def fast(self):
        visits = self.here.visits
        count = visits.count
        online = jnp.minimum(visits.masked + jnp.where(visits.covers & (visits.right > 0), 0, 1), count)
        m, l, o = self.online(0, online, 0, self.nothing())
        r = jnp.where(m == -jnp.inf, 0.0, m)

        def rest(total):
            whole = begin(total, o)
            l_all = lax.cond(online < count, lambda l: self.fixed(total, online, count, r, l), lambda l: l, l)
            return l_all, whole(plgpu.wgmma_accumulator_load(total, wait_n=0))

        l, o = accumulators(rest, o.shape)
        bad = jnp.where(l < 2.0**60, 0.0, 1.0)
        bad = jnp.maximum(bad, jnp.where(jnp.abs(o) < 3e38, 0.0, 1.0).max(axis=1))
        l, o = _divided(l, o)
        return m, l, o, bad

    def fixed(self, total, first, count, r, l):
        """(5) for the visits from `first` on, one at least."""

        def logits(n, then):
            x = self.slot(n)
            plgpu.barrier_wait(self.k_there.at[x])

            def body(raw):
                plgpu.wgmma(raw, self.q, self.k_s.at[x].T)
                s = then(raw)
                plgpu.barrier_arrive(self.k_used.at[x])
                return s

            return accumulators(body, self.shape)

        def probabilities(raw, l):
            p = jnp.exp2(self.finish(raw) - spread(r, self.shape))
            return p.astype(self.v_s.dtype), l + p.sum(axis=1)

        def add(p, n):
            x = self.slot(n)
            plgpu.barrier_wait(self.v_there.at[x])
            self.weigh(total, p, self.v_s.at[x])

        def step(n, state):
            p, l = state

            def then(raw):
                add(p, n)
                return plgpu.wgmma_accumulator_load(raw, wait_n=1)

            p, l = probabilities(logits(n + 1, then), l)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.v_used.at[self.slot(n)])
            return p, l

        p, l = probabilities(logits(first, lambda raw: plgpu.wgmma_accumulator_load(raw, wait_n=0)), l)
        p, l = lax.fori_loop(first, count - 1, step, (p, l))
        add(p, count - 1)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.v_used.at[self.slot(count - 1)])
        return l
