"""Backward on Hopper (sm_90a) in two kernels, one for dq and one for dk and dv, so that nothing is added up across blocks
and the bits repeat. Seven products a tile; logits in bits (times log2 e), as is lse here.

dq: a block owns queries i, 64 for each computing warpgroup, and visits the tiles of keys j that they see (Dao 2023, alg. 2):
  (1) raw = q_i k_j'; dp = do_i v_j'      (3) ds = p (dp + delta_i);  draw = finish transposed at ds
  (2) p = 2^(finish(raw) - lse_i)         (4) dq_i += draw k_j
dk and dv: a block owns keys j and visits queries i, of all heads that share the keys, on transposed tiles, so that p and
draw come out of their products in the layout in which the next ones take them from registers:
  (5) raw' = k_j q_i'; dp' = v_j do_i'    (6) p', draw' as in (2), (3);  dv_j += p' do_i;  dk_j += draw' q_i
Where draw is ds times a number, that number waits for the end. In masked tiles draw is selected, and what is read twice is
cleaned of NaN and Inf that nobody sees (0 times NaN is NaN).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper_forward import ROWS, Place, drain, find_place
from memeff.pallas.mosaic import (
    COL,
    ROW,
    WGMMA,
    accumulators,
    any_of,
    apart,
    begin,
    call,
    meet,
    multiply,
    plgpu,
    positions,
    spread,
    stage,
    take_registers,
    tile,
)
from memeff.pallas.walk import Scalars, Shape, Visits, cached_section, ends, place, queries_seeing, with_ranges
from memeff.problem import LOG2_E, SEES_NOTHING, Problem, Sight, Terms, finish, in_bits, sees


class Tiling(NamedTuple):
    warpgroups: int  # that compute, 64 rows each
    others: int  # keys, or queries, of a tile that is visited
    stages: int

    @property
    def own(self) -> int:
        return self.warpgroups * ROWS


class Gradient(NamedTuple):
    """(2) and (3) of a problem, the same in both kernels."""

    problem: Problem

    @property
    def linear(self) -> bool:
        """Is draw = slope ds?"""
        return self.problem.soft_cap is None

    @property
    def slope(self) -> Array:
        _, pull = jax.vjp(lambda raw: finish(self.problem, raw, Terms(), None), jnp.float32(0))
        return pull(jnp.float32(1))[0] if self.linear else jnp.float32(1)

    def probabilities(self, raw: Array, lse: Array, keep: Array | None):
        """p, and what makes draw (but for its slope) of dp + delta; `lse` is as `raw` is."""
        s, pull = jax.vjp(lambda raw: finish(in_bits(self.problem), raw, Terms(), keep), raw)
        p = jnp.exp2(s - lse)

        def draw(p, dp):
            ds = p * dp
            if not self.linear:
                (ds,) = pull(ds * (1 / LOG2_E))
            return ds if keep is None else jnp.where(keep, ds, 0.0)

        return p, draw


def _attempts(attempt, tiling: "Tiling", rings: tuple[str, ...], scratch: dict) -> None:
    """`attempt(careful, block, warpgroup)`; and once more, carefully, if some row of the block is not finite.

    Careful is: what nobody sees is cleaned of NaN and Inf. It changes no bit of what is finite without. `rings`: the
    barriers for which the warpgroup that copies waits; its attempts return how many tiles they took.
    """
    all_done, bad_s = scratch["all_done"], scratch["bad_s"]
    here = lax.axis_index("block"), lax.axis_index("warpgroup")
    count = attempt(False, *here)
    if not rings:
        plgpu.barrier_arrive(all_done)
    plgpu.barrier_wait(all_done)
    again = any_of(bad_s.at[0])
    pl.when(again)(lambda: (attempt(True, *map(apart, here)), None)[1])
    if rings:
        drain(jnp.where(again, 2 * count, count), tiling.stages, [scratch[name] for name in rings])


def _note_bad(bad_s, group, *sums) -> None:
    """For the first attempt: which of this warpgroup's rows are not finite."""
    bad = [jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0).max(axis=1) for x in sums]
    bad_s[0, pl.ds(group * ROWS, ROWS)] = functools.reduce(jnp.maximum, bad)


# ---- dq


def queries(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: tuple[Array, ...],
    dlse: Array | None,
    scalars: Scalars,
    tiling: Tiling,
) -> tuple[Array, Array]:
    """dq [B, T, N, H], and delta [B, N, T''], from query, key, value, out, dout in the layout of the door; lse (in bits) and
    dlse are B N T'. Sizes as in `hopper_forward.attend`.
    """
    query, key, value, out, _, lse = arrays
    (B, _, N, H), (_, _, K, D), dtype, (T, S) = query.shape, value.shape, query.dtype, lengths
    shape = Shape(B, T, S, K, N // K)
    groups, keys, stages = tiling.warpgroups, tiling.others, tiling.stages
    scalars = with_ranges(scalars, lengths, tiling.own)
    given = [x for x in (dlse, *scalars) if x is not None]
    marked = scalars.q_segments is not None

    def body(*refs, **scratch):
        of = iter(refs[6:-2])
        dlse_ref = None if dlse is None else next(of)
        values = Scalars(*(None if x is None else next(of) for x in scalars))
        heads, bytes_read = B * N, max(1, S * (H + D) * 2 // shape.G)
        section = 1 if problem.right is None else cached_section(heads, bytes_read)
        find = lambda index: find_place(problem, shape, values, tiling.own, keys, section, index)
        group = lax.axis_index("warpgroup")

        @pl.when(group < groups)
        def _():
            take_registers(tiling.warpgroups, computes=True)
            _attempts(
                lambda careful, at, group: _compute_queries(
                    problem, tiling, (*refs[:6], dlse_ref), refs[-2:], find(at), group, careful, **scratch
                ),
                tiling,
                (),
                scratch,
            )

        @pl.when(group == groups)
        def _():
            take_registers(tiling.warpgroups, computes=False)
            copy = lambda careful, at, _: _copy_keys(tiling, refs[1:3], find(at), careful, **scratch)
            _attempts(copy, tiling, ("k_used", "v_used"), scratch)

    scratch = dict(
        q_s=tile(groups, ROWS, H, dtype),
        do_s=tile(groups, ROWS, D, dtype),
        k_s=tile(stages, keys, H, dtype),
        v_s=tile(stages, keys, D, dtype),
        rows_s=plgpu.SMEM((2, groups, ROWS), jnp.float32),
        bad_s=plgpu.SMEM((2, groups * ROWS), jnp.float32),
        q_there=plgpu.Barrier(num_barriers=groups),
        rows_there=plgpu.Barrier(num_arrivals=3 + (dlse is not None) + marked, num_barriers=groups),
        k_there=plgpu.Barrier(num_arrivals=1 + marked, num_barriers=stages),
        v_there=plgpu.Barrier(num_barriers=stages),
        k_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        all_here=plgpu.Barrier(num_arrivals=groups),
        all_done=plgpu.Barrier(num_arrivals=groups),
        **stage(groups, ROWS, keys, dtype),
    )
    if marked:
        scratch["marks"] = plgpu.SMEM((groups, ROWS), jnp.int32), plgpu.SMEM((stages, keys), jnp.int32)
    tiles = -(-T // tiling.own)
    # Rows of whole blocks: what is stored of a vector is bounded by its array, not by its head.
    types = [jax.ShapeDtypeStruct(query.shape, dtype), jax.ShapeDtypeStruct((B, N, tiles * tiling.own), jnp.float32)]
    blocks = B * N * tiles
    kernel = call(body, "memeff_dq", types, scratch, blocks, groups + 1, problem.soft_cap is None)
    dq, delta = kernel(*arrays, *given)
    return dq, delta


def _copy_keys(tiling, arrays, here, careful, *, k_s, v_s, k_there, v_there, k_used, v_used, marks=None, **_):
    key_ref, value_ref = arrays
    stages, count = tiling.stages, here.visits.total
    start = count if careful else 0

    @pl.loop(start, start + count)
    def _(n):
        x = lax.rem(n, jnp.int32(stages))
        rows = pl.ds(here.visits.tile(n - start) * tiling.others, tiling.others)
        for ref, shared, there, used in ((key_ref, k_s, k_there, k_used), (value_ref, v_s, v_there, v_used)):
            pl.when(n >= stages)(lambda used=used: plgpu.barrier_wait(used.at[x]))
            plgpu.copy_gmem_to_smem(ref.at[here.b, rows, here.k], shared.at[x], there.at[x])
            if marks is not None and ref is key_ref:
                plgpu.copy_gmem_to_smem(here.scalars.kv_segments.at[rows], marks[1].at[x], there.at[x])

    return count


def _compute_queries(
    problem, tiling, arrays, out, here: Place, group, careful, *, q_s, do_s, k_s, v_s, rows_s, bad_s,
    q_there, rows_there, k_there, v_there, k_used, v_used, all_here, stage=None, marks=None, **_,
):  # fmt: skip
    query_ref, _, _, out_ref, dout_ref, lse_ref, dlse_ref = arrays
    dq_ref, delta_ref = out
    gradient, shape, dtype = Gradient(problem), (ROWS, tiling.others), query_ref.dtype
    rows, count = pl.ds(here.row + group * ROWS, ROWS), here.visits.total
    q, o, do = q_s.at[group], q_s.at[group], do_s.at[group]
    lse_s, delta_s = rows_s.at[0, group], rows_s.at[1, group]
    slot = lambda n: lax.rem(n, jnp.int32(tiling.stages))

    def load(*pairs, there):
        for of, to in pairs:
            plgpu.copy_gmem_to_smem(of, to, there.at[group])
        plgpu.barrier_wait(there.at[group])

    def of_rows():
        """delta = dlse - rowsum(dout * out), which the other kernel wants, too."""
        pairs = [(out_ref.at[here.b, rows, here.n], o), (dout_ref.at[here.b, rows, here.n], do)]
        pairs += [(lse_ref.at[here.b, here.n, rows], lse_s)]
        if dlse_ref is not None:
            pairs += [(dlse_ref.at[here.b, here.n, rows], delta_s)]
        if marks is not None:
            pairs += [(here.scalars.q_segments.at[rows], marks[0].at[group])]
        load(*pairs, there=rows_there)
        delta = -row_sums(o, do)
        delta = delta if dlse_ref is None else delta + plgpu.load(delta_s, layout=ROW)
        delta_s[...] = delta
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(delta_s, delta_ref.at[here.b, here.n, rows])

    def step(n, masked, lse, delta, dq):
        x = slot(count + n if careful else n)
        keep = None
        plgpu.barrier_wait(k_there.at[x])
        if masked:
            if careful:
                _clean(k_s.at[x], lambda x, _: jnp.abs(x) < jnp.inf, bad_s.at[1, pl.ds(group * ROWS, ROWS)], group, all_here)

            at = positions(here.row + group * ROWS, shape, 0), positions(here.visits.tile(n) * tiling.others, shape, 1)
            sight = here.sight
            if marks is not None:
                of_queries, of_keys = (
                    plgpu.load(of, layout=way) for of, way in ((marks[0].at[group], ROW), (marks[1].at[x], COL))
                )
                sight = sight._replace(q_segments=spread(of_queries, shape), kv_segments=spread(of_keys, shape, 1))
            keep = sees(problem, sight, *at)

        def products(raw, dp):
            plgpu.wgmma(raw, q, k_s.at[x].T)  # (1)
            whole = begin(dp, spread(delta, shape))
            plgpu.barrier_wait(v_there.at[x])
            plgpu.wgmma(dp, do, v_s.at[x].T)
            p, draw = gradient.probabilities(  # (2)
                plgpu.wgmma_accumulator_load(raw, wait_n=1), spread(lse, shape), keep
            )
            d = whole(plgpu.wgmma_accumulator_load(dp, wait_n=0))
            plgpu.barrier_arrive(v_used.at[x])
            multiply(dq, draw(p, d).astype(dtype), k_s.at[x], stage and stage.at[group])  # (3) (4)
            plgpu.wgmma_wait(0)

        accumulators(products, shape, shape)
        plgpu.barrier_arrive(k_used.at[x])

    if not careful:
        of_rows()
    lse, delta = (plgpu.load(x, layout=ROW) for x in (lse_s, delta_s))
    load((query_ref.at[here.b, rows, here.n], q), there=q_there)

    def walk(dq):
        masked = here.visits.masked
        parts = ((0, count, True),) if careful else ((0, masked, True), (masked, count, False))
        for first, last, hides in parts:
            lax.fori_loop(first, last, lambda n, _, hides=hides: step(n, hides, lse, delta, dq), None)
        return plgpu.wgmma_accumulator_load(dq, wait_n=0)

    dq = accumulators(walk, (ROWS, q.shape[-1])) * gradient.slope
    if not careful:
        _note_bad(bad_s, group, dq)
    q[...] = dq.astype(dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, dq_ref.at[here.b, rows, here.n])
    plgpu.wait_smem_to_gmem(0)


def row_sums(x, y) -> Array:
    """Of x times y, tiles in shared memory."""
    x, y = (plgpu.load(ref, layout=WGMMA).astype(jnp.float32) for ref in (x, y))
    return (x * y).sum(axis=1)


def _clean(shared, good, bad_s, group, all_here) -> None:
    """Zeros where the tile `shared`, which all warpgroups read, is not `good`; 64 x 64 numbers at a time."""
    rows, cols = (n // ROWS for n in shared.shape)

    def part(n, _):
        at = (
            pl.multiple_of(lax.div(n, jnp.int32(cols)) * ROWS, ROWS),
            pl.multiple_of(lax.rem(n, jnp.int32(cols)) * ROWS, ROWS),
        )
        here = shared.at[pl.ds(at[0], ROWS), pl.ds(at[1], ROWS)]
        load = lambda: plgpu.load(here, layout=WGMMA).astype(jnp.float32)
        bad_s[...] = jnp.where(good(load(), at[0]), 0.0, 1.0).max(axis=1)

        @pl.when(any_of(bad_s))
        def _():
            meet(all_here)

            @pl.when(group == 0)
            def _():
                here[...] = jnp.where(good(load(), at[0]), load(), 0.0).astype(shared.dtype)
                plgpu.commit_smem()

            meet(all_here)

    lax.fori_loop(0, rows * cols, part, None)


# ---- dk and dv


def keys(
    problem: Problem, lengths: tuple[int, int], arrays: tuple[Array, ...], scalars: Scalars, tiling: Tiling
) -> tuple[Array, Array]:
    """dk [B, S, K, H] and dv [B, S, K, D], from the same."""
    query, key, value, dout, lse, _ = arrays
    (B, _, N, H), (_, _, K, D), dtype, (T, S) = query.shape, value.shape, query.dtype, lengths
    shape = Shape(B, T, S, K, N // K)
    groups, others, stages = tiling.warpgroups, tiling.others, tiling.stages
    assert lse.shape[-1] % others == 0
    scalars = with_ranges(scalars, lengths, tiling.own, keys=True)
    given = [x for x in scalars if x is not None]
    marked = scalars.q_segments is not None

    def body(*refs, **scratch):
        of = iter(refs[6:-2])
        values = Scalars(*(None if x is None else next(of) for x in scalars))
        section = section_of_keys(problem, shape, T * shape.G * (H + D) * 2)
        find = lambda index: find_keys(problem, shape, values, tiling, section, index)
        group = lax.axis_index("warpgroup")

        @pl.when(group < groups)
        def _():
            take_registers(tiling.warpgroups, computes=True)
            compute = lambda careful, at, group: _compute_keys(
                problem, shape, tiling, refs[1:3], refs[-2:], find(at), group, careful, **scratch
            )
            _attempts(compute, tiling, (), scratch)

        @pl.when(group == groups)
        def _():
            take_registers(tiling.warpgroups, computes=False)
            arrays = refs[0], *refs[3:6]
            copy = lambda careful, at, _: copy_queries(shape, tiling, arrays, find(at), careful, **scratch)
            _attempts(copy, tiling, ("used",), scratch)

    scratch = dict(
        k_s=tile(groups, ROWS, H, dtype),
        v_s=tile(groups, ROWS, D, dtype),
        q_s=tile(stages, others, H, dtype),
        do_s=tile(stages, others, D, dtype),
        lse_s=plgpu.SMEM((stages, others), jnp.float32),
        delta_s=plgpu.SMEM((stages, others), jnp.float32),
        bad_s=plgpu.SMEM((2, groups * ROWS), jnp.float32),
        kv_there=plgpu.Barrier(num_arrivals=2 + marked, num_barriers=groups),
        q_there=plgpu.Barrier(num_arrivals=2 + marked, num_barriers=stages),
        do_there=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        all_here=plgpu.Barrier(num_arrivals=groups),
        all_done=plgpu.Barrier(num_arrivals=groups),
        **stage(groups, ROWS, others, dtype),
    )
    if marked:
        scratch["marks"] = plgpu.SMEM((stages, others), jnp.int32), plgpu.SMEM((groups, ROWS), jnp.int32)
    out = [jax.ShapeDtypeStruct(x.shape, dtype) for x in (key, value)]
    blocks = B * K * -(-S // tiling.own)
    return call(body, "memeff_dkdv", out, scratch, blocks, groups + 1, problem.soft_cap is None)(*arrays, *given)


class KeysPlace(NamedTuple):
    b: Array
    k: Array
    col: Array  # the first key
    sight: Sight
    visits: Visits  # of one query head
    scalars: Scalars


def section_of_keys(problem: Problem, shape: Shape, bytes_read: int) -> int:
    """Where early keys are seen by more queries, theirs come first, of as many heads as fit into the cache."""
    return 1 if problem.right is None else cached_section(shape.B * shape.K, bytes_read)


def find_keys(problem: Problem, shape: Shape, scalars: Scalars, tiling: Tiling, section: int, index) -> KeysPlace:
    head, tile = place(shape.B * shape.K, -(-shape.S // tiling.own), section, False, index)
    b, k = lax.div(head, jnp.int32(shape.K)), lax.rem(head, jnp.int32(shape.K))
    scalars = scalars.of(b)
    all_ends, sight = ends(shape, scalars, 1)  # keys behind the last are not stored
    col = tile * tiling.own
    last = jnp.minimum(col + tiling.own, shape.S) - 1
    offset = problem.q_offset if scalars.q_offset is None else scalars.q_offset
    visits = queries_seeing(problem, offset, col, last, all_ends, tiling.others)
    if scalars.q_segments is not None:
        visits = visits.within(scalars.first[tile], scalars.behind[tile], scalars.alone[tile], tiling.others)
    return KeysPlace(b, k, col, sight, visits, scalars)


def sight_of_keys(sight: Sight, marks, x, group, sides) -> Sight:
    """With the segments of a transposed tile: queries' of slot `x`, keys' of warpgroup `group`."""
    of_queries, of_keys = plgpu.load(marks[0].at[x], layout=COL), plgpu.load(marks[1].at[group], layout=ROW)
    return sight._replace(q_segments=spread(of_queries, sides, 1), kv_segments=spread(of_keys, sides))


def copy_queries(
    shape, tiling, arrays, here, careful, *, q_s, do_s, lse_s, delta_s, q_there, do_there, used, marks=None, **_
):
    query_ref, dout_ref, lse_ref, delta_ref = arrays
    stages, count = tiling.stages, here.visits.total
    of_all = shape.G * count
    start = of_all if careful else 0

    def one(g, n):
        at, head = start + g * count + n, here.k * shape.G + g
        x, rows = lax.rem(at, jnp.int32(stages)), pl.ds(here.visits.tile(n) * tiling.others, tiling.others)
        pl.when(at >= stages)(lambda: plgpu.barrier_wait(used.at[x]))
        plgpu.copy_gmem_to_smem(query_ref.at[here.b, rows, head], q_s.at[x], q_there.at[x])
        plgpu.copy_gmem_to_smem(lse_ref.at[here.b, head, rows], lse_s.at[x], q_there.at[x])
        if marks is not None:
            plgpu.copy_gmem_to_smem(here.scalars.q_segments.at[rows], marks[0].at[x], q_there.at[x])
        plgpu.copy_gmem_to_smem(dout_ref.at[here.b, rows, head], do_s.at[x], do_there.at[x])
        plgpu.copy_gmem_to_smem(delta_ref.at[here.b, head, rows], delta_s.at[x], do_there.at[x])

    pl.loop(0, shape.G)(lambda g: pl.loop(0, count)(lambda n: one(g, n)))
    return of_all


def _compute_keys(
    problem, shape, tiling, arrays, out, here: KeysPlace, group, careful, *, k_s, v_s, q_s, do_s, lse_s, delta_s, bad_s,
    kv_there, q_there, do_there, used, all_here, stage=None, marks=None, **_,
):  # fmt: skip
    key_ref, value_ref = arrays
    dk_ref, dv_ref = out
    gradient, sides, dtype = Gradient(problem), (ROWS, tiling.others), key_ref.dtype
    cols, k, v = pl.ds(here.col + group * ROWS, ROWS), k_s.at[group], v_s.at[group]
    masked, count = here.visits.masked, here.visits.total
    row = lambda ref: spread(plgpu.load(ref, layout=COL), sides, 1)
    small = tiling.others == ROWS  # then registers are left

    def clean(x):
        """Queries that see nothing may hold anything, and so may their cotangents."""
        q, do, mine = q_s.at[x], do_s.at[x], bad_s.at[1, pl.ds(group * ROWS, ROWS)]
        lse = lambda first: spread(plgpu.load(lse_s.at[x, pl.ds(first, ROWS)], layout=ROW), (ROWS, ROWS))
        _clean(q, lambda x, _: jnp.abs(x) < jnp.inf, mine, group, all_here)
        _clean(do, lambda x, first: (jnp.abs(x) < jnp.inf) | (lse(first) < SEES_NOTHING), mine, group, all_here)

    def step(start, n, hides, dk, dv):
        x = lax.rem(start + n, jnp.int32(tiling.stages))
        q, do, keep = q_s.at[x], do_s.at[x], None
        plgpu.barrier_wait(q_there.at[x])
        if hides:
            plgpu.barrier_wait(do_there.at[x])
            if careful:
                clean(x)
            rows = positions(here.visits.tile(n) * tiling.others, sides, 1)
            sight = here.sight if marks is None else sight_of_keys(here.sight, marks, x, group, sides)
            keep = sees(problem, sight, rows, positions(here.col + group * ROWS, sides, 0))
        mine = apart(group) if small else group
        k, v = k_s.at[mine], v_s.at[mine]
        early = row(lse_s.at[x]) if small else None  # before products, which keep shared memory busy

        def products(raw, dp):
            plgpu.wgmma(raw, k, q.T)  # (5)
            if not hides:
                plgpu.barrier_wait(do_there.at[x])
            whole = begin(dp, row(delta_s.at[x]))
            plgpu.wgmma(dp, v, do.T)
            s = plgpu.wgmma_accumulator_load(raw, wait_n=1)
            p, draw = gradient.probabilities(s, row(lse_s.at[x]) if early is None else early, keep)  # (6)
            multiply(dv, p.astype(dtype), do, stage and stage.at[group])
            d = whole(plgpu.wgmma_accumulator_load(dp, wait_n=1))  # while dv runs
            multiply(dk, draw(p, d).astype(dtype), q, stage and stage.at[group])
            plgpu.wgmma_wait(0)

        accumulators(products, sides, sides)
        plgpu.barrier_arrive(used.at[x])

    for ref, to in ((key_ref, k), (value_ref, v)):
        plgpu.copy_gmem_to_smem(ref.at[here.b, cols, here.k], to, kv_there.at[group])
    if marks is not None:
        plgpu.copy_gmem_to_smem(here.scalars.kv_segments.at[cols], marks[1].at[group], kv_there.at[group])
    plgpu.barrier_wait(kv_there.at[group])

    def walk(dk, dv):
        def head(g, _):
            start = (g + shape.G if careful else g) * count
            parts = ((0, count, True),) if careful else ((0, masked, True), (masked, count, False))
            for first, last, hides in parts:
                lax.fori_loop(first, last, lambda n, _, hides=hides: step(start, n, hides, dk, dv), None)

        lax.fori_loop(0, shape.G, head, None)
        return plgpu.wgmma_accumulator_load(dk, wait_n=0), plgpu.wgmma_accumulator_load(dv, wait_n=0)

    dk, dv = accumulators(walk, (ROWS, k.shape[-1]), (ROWS, v.shape[-1]))
    if not careful:
        _note_bad(bad_s, group, dk, dv)
    k[...] = (dk * gradient.slope).astype(dtype)
    v[...] = dv.astype(dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(k, dk_ref.at[here.b, cols, here.k])
    plgpu.copy_smem_to_gmem(v, dv_ref.at[here.b, cols, here.k])
    plgpu.wait_smem_to_gmem(0)
