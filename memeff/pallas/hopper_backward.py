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
In float16, which holds nothing below 2^-24, ds of many keys would be lost where dq is not: lse comes smaller by `lift`, so
that p and ds are 2^8 times as large, which the end takes back. Where that makes ds too large for float16, its sums are not
finite, and the tile is done again, as it is then without lift.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.blocks import ROWS, Items, Turn, any_failed, blocks_for, pass_by, rounds
from memeff.pallas.mosaic import (
    COL,
    ROW,
    WGMMA,
    accumulators,
    apart,
    begin,
    call,
    full,
    meet,
    multiply,
    plgpu,
    positions,
    spread,
    stage,
    take_registers,
    tile,
)
from memeff.pallas.pairs import Marks, Pairs, arrivals, copy_marks, of_head, room, roughly
from memeff.pallas.walk import (
    KeysPlace,
    Order,
    Place,
    Scalars,
    Shape,
    balanced_order,
    cached_order,
    find_keys,
    find_place,
    some_whole,
    tiles_visited,
    with_lists,
    with_ranges,
)
from memeff.problem import LOG2_E, SEES_NOTHING, Problem, Terms, finish, finish_in_bits

STAYS = 2000  # positions an item visits at most where blocks stay in causal order; of longer ones, beginnings cost less
BEGINS = 2  # tiles that could be visited while a block goes from one item to the next


def lift(dtype) -> float:
    """Return how many bits larger p and ds are in products than they are."""
    return 8.0 if dtype == jnp.float16 else 0.0


def lowered(x: Array, dtype, turn: "Turn | None" = None) -> Array:
    """Return a sum of them as it is without `lift`, which what is done again has not."""
    up = lift(dtype) if turn is None or turn.first else 0.0
    return x * 2.0**-up if up else x


class Tiling(NamedTuple):
    warpgroups: int  # that compute, 64 rows each
    others: int  # keys, or queries, of a tile that is visited
    stages: int
    items: int  # tiles of its own that a block has on their way or in use

    @property
    def own(self) -> int:
        return self.warpgroups * ROWS


class Gradient(NamedTuple):
    """(2) and (3) of a problem, the same in both kernels."""

    problem: Problem

    @property
    def linear(self) -> bool:
        """Is draw = slope ds?"""
        return self.problem.soft_cap is None and self.problem.score_fn is None

    @property
    def slope(self) -> Array:
        if not self.linear:
            return jnp.float32(1)
        _, pull = jax.vjp(lambda raw: finish(self.problem, raw, Terms(), None), jnp.float32(0))
        return pull(jnp.float32(1))[0]

    def probabilities(self, raw: Array, lse: Array, pairs: Pairs, keep: Array | None):
        """p, and what makes draw (but for its slope) and cotangents of `pairs.terms()` of dp + delta; `lse` is as raw."""
        at = pairs.places(self.problem.score_fn)
        s, pull = jax.vjp(lambda raw, terms: finish_in_bits(self.problem, raw, terms, keep, at), raw, pairs.terms())
        p = jnp.exp2(s - lse)

        def draw(p, dp):
            ds, of_terms = p * dp, Terms()
            if not self.linear:
                ds, of_terms = pull(ds * (1 / LOG2_E))
            hide = lambda x: x if keep is None else jnp.where(keep, x, 0.0)
            return hide(ds), tuple(map(hide, of_terms.score))

        return p, draw


def moving_of(problem: Problem) -> int:
    """How much of what moves `score_fn` has a gradient."""
    score_fn: Any = problem.score_fn
    return 0 if score_fn is None else len(score_fn.moving)


def not_finite(failed_s, turn: Turn, *sums) -> Array:
    """1 if, in the first round, some row of these sums is not finite."""
    if not turn.first:
        return jnp.int32(0)
    bad = [jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0).max(axis=1) for x in sums]
    return any_failed(failed_s, functools.reduce(jnp.maximum, bad))


def blocks_in_order(
    problem: Problem, scalars: Scalars, visited: np.ndarray, size: int, heads: int, bytes_read: int
) -> tuple[int, Order]:
    """How many there are, and in which order they do the items of `heads`, each of which reads so many bytes."""
    items, causal = heads * visited.size, problem.right is not None
    unknown = any(x is not None for x in (scalars.q_lengths, scalars.kv_lengths, scalars.q_segments))  # how long items take
    if unknown or causal and visited.mean() * size > STAYS:
        return items, cached_order(heads, bytes_read) if causal else Order()
    return blocks_for(items), balanced_order(heads, BEGINS + visited, blocks_for(items)) if causal else Order()


def copies(own: Callable[[], None], others: Callable[[Any], None], turn: Turn, count: Array, tiling: Tiling):
    """Of what an item of queries has, and of the `count` tiles that it visits; what `Items.do` returns.

    Where there is room for one item only, keys come before the next one: they need not wait until the last one is stored.
    """
    begun = jnp.where(turn.items > 0, jnp.minimum(count, tiling.stages), 0) if tiling.items == 1 else 0
    pl.loop(0, begun)(others)
    own()
    pl.loop(begun, count)(others)
    return count, jnp.int32(0)


# ---- dq


def queries(
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
    shape = Shape(B, T, S, K, N // K)
    groups, keys, stages = tiling.warpgroups, tiling.others, tiling.stages
    scalars = with_lists(problem, with_ranges(scalars, lengths, tiling.own), lengths, (tiling.own, keys))
    given, (of_query, of_key) = jax.tree.leaves((dlse, scalars)), arrivals(scalars)
    moving = moving_of(problem)
    outs = 2 + moving

    total = B * N * -(-T // tiling.own)
    visited = tiles_visited(problem, lengths, tiling.own, keys)
    blocks, order = blocks_in_order(problem, scalars, visited, keys, B * N, max(1, S * (H + D) * 2 // shape.G))

    def body(*refs, **scratch):
        of = iter(refs[6:-outs])
        dlse_ref = None if dlse is None else next(of)
        values = scalars.like(of)
        group, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        find = lambda index: find_place(problem, shape, values, tiling.own, keys, order, index)
        items = lambda do: Items(total, blocks, block, lambda index, turn: do(find(index), turn))

        @pl.when(group < groups)
        def _():
            take_registers(tiling.warpgroups, computes=True)
            compute = lambda *at: _compute_queries(problem, tiling, refs[-outs:], dlse is not None, group, *at, **scratch)
            rounds(items(compute), True, scratch["failed_s"], scratch["all_done"])

        @pl.when(group == groups)
        def _():
            take_registers(tiling.warpgroups, computes=False)
            copy = lambda *at: _copy_for_queries(tiling, (*refs[:6], dlse_ref), *at, **scratch)
            rings = (stages, True, (scratch["k_used"], scratch["v_used"])), (tiling.items, False, (scratch["own_used"],))
            rounds(items(copy), False, scratch["failed_s"], scratch["all_done"], rings)

    scratch = dict(
        q_s=tile(tiling.items * groups, ROWS, H, dtype),
        do_s=tile(tiling.items * groups, ROWS, D, dtype),
        out_s=tile(tiling.items * groups, ROWS, D, dtype),
        k_s=tile(stages, keys, H, dtype),
        v_s=tile(stages, keys, D, dtype),
        rows_s=plgpu.SMEM((2, tiling.items * groups, ROWS), jnp.float32),
        failed_s=plgpu.SMEM((groups, ROWS), jnp.float32),
        own_there=plgpu.Barrier(num_arrivals=4 + (dlse is not None) + of_query, num_barriers=tiling.items * groups),
        own_used=plgpu.Barrier(num_arrivals=groups, num_barriers=tiling.items),
        k_there=plgpu.Barrier(num_arrivals=1 + of_key, num_barriers=stages),
        v_there=plgpu.Barrier(num_barriers=stages),
        k_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        all_here=plgpu.Barrier(num_arrivals=groups),
        all_done=plgpu.Barrier(num_arrivals=groups + 1),
        **room(scalars, (tiling.items * groups, ROWS), (stages, keys)),
        **stage(groups, ROWS, keys, dtype),
    )
    if moving:
        scratch["sums_s"] = plgpu.SMEM((moving, groups, ROWS), jnp.float32)
    # Rows of whole blocks: what is stored of a vector is bounded by its array, not by its head.
    rows = -(-T // tiling.own) * tiling.own
    types = [jax.ShapeDtypeStruct(query.shape, dtype), *[jax.ShapeDtypeStruct((B, N, rows), jnp.float32)] * (1 + moving)]
    kernel = call(body, "memeff_dq", types, scratch, blocks, groups + 1, roughly(problem))
    return tuple(kernel(*arrays, *given))


def _copy_for_queries(
    tiling, arrays, here: Place, turn: Turn, *, q_s, do_s, out_s, k_s, v_s, rows_s, own_there, own_used,
    k_there, v_there, k_used, v_used, marks, **_,
):  # fmt: skip
    """Of queries what each warpgroup has, keys and values once for all."""
    query_ref, key_ref, value_ref, out_ref, dout_ref, lse_ref, dlse_ref = arrays
    stages, count, y = tiling.stages, here.visits.total, lax.rem(turn.items, jnp.int32(tiling.items))

    def own():
        pl.when(turn.items >= tiling.items)(lambda: plgpu.barrier_wait(own_used.at[y]))
        for group in range(tiling.warpgroups):
            rows, mine = pl.ds(here.row + group * ROWS, ROWS), y * tiling.warpgroups + group
            pairs = [
                (ref.at[here.b, rows, here.n], to) for ref, to in ((out_ref, out_s), (dout_ref, do_s), (query_ref, q_s))
            ]
            pairs += [(lse_ref.at[here.b, here.n, rows], rows_s.at[0])]
            if dlse_ref is not None:
                pairs += [(dlse_ref.at[here.b, here.n, rows], rows_s.at[1])]
            pairs += [(ref.at[rows], to) for ref, to in zip(here.scalars.by_query, marks[0], strict=True)]
            for of, to in pairs:
                plgpu.copy_gmem_to_smem(of, to.at[mine], own_there.at[mine])

    def others(n):
        at = turn.visits + n
        x, rows = lax.rem(at, jnp.int32(stages)), pl.ds(here.visits.tile(n) * tiling.others, tiling.others)
        for ref, shared, there, used in ((key_ref, k_s, k_there, k_used), (value_ref, v_s, v_there, v_used)):
            pl.when(at >= stages)(lambda used=used: plgpu.barrier_wait(used.at[x]))
            plgpu.copy_gmem_to_smem(ref.at[here.b, rows, here.k], shared.at[x], there.at[x])
            if ref is key_ref:
                copy_marks(here.scalars.by_key, rows, marks[1], x, there.at[x])

    return copies(own, others, turn, count, tiling)


def _compute_queries(
    problem, tiling, out, has_dlse, group, here: Place, turn: Turn, *, q_s, do_s, out_s, k_s, v_s, rows_s, own_there,
    own_used, k_there, v_there, k_used, v_used, all_here, failed_s, marks, stage=None, sums_s: Any = None, **_,
):  # fmt: skip
    dq_ref, delta_ref, *sums_refs = out
    gradient, shape, dtype = Gradient(problem), (ROWS, tiling.others), q_s.dtype
    rows, count, y = pl.ds(here.row + group * ROWS, ROWS), here.visits.total, lax.rem(turn.items, jnp.int32(tiling.items))
    mine = y * tiling.warpgroups + group
    q, o, do = q_s.at[mine], out_s.at[mine], do_s.at[mine]
    lse_s, delta_s = rows_s.at[0, mine], rows_s.at[1, mine]
    numbers = of_head(here.scalars, here.n)

    def step(n, masked, lse, delta, dq, sums):
        x = lax.rem(turn.visits + n, jnp.int32(tiling.stages))
        plgpu.barrier_wait(k_there.at[x])
        if masked and not turn.first:
            _clean(k_s.at[x], lambda x, _: jnp.abs(x) < jnp.inf, failed_s.at[group], group, all_here)
        first = here.row + group * ROWS, here.visits.tile(n) * tiling.others
        of_tile = tuple(ref.at[mine] for ref in marks[0]), tuple(ref.at[x] for ref in marks[1])
        pairs = Pairs(problem, shape, first, here.sight, here.scalars, numbers, of_tile).early()
        keep = pairs.seen() if masked else None

        def products(raw, dp):
            plgpu.wgmma(raw, q, k_s.at[x].T)  # (1)
            whole = begin(dp, spread(delta, shape))
            plgpu.barrier_wait(v_there.at[x])
            plgpu.wgmma(dp, do, v_s.at[x].T)
            p, draw = gradient.probabilities(  # (2)
                plgpu.wgmma_accumulator_load(raw, wait_n=1), spread(lse, shape), pairs, keep
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
    lse = lse if turn.first else lse + lift(dtype)
    delta_s[...] = delta
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(delta_s, delta_ref.at[here.b, here.n, rows])

    def pass_one(n):
        pass_by((k_there, k_used), (v_there, v_used), at=lax.rem(turn.visits + n, jnp.int32(tiling.stages)))

    def walk(dq):
        masked = here.visits.masked
        hidden = here.hidden(here.row + group * ROWS, ROWS) if turn.first else 0
        pl.loop(0, hidden)(pass_one)
        parts = ((hidden, masked, True), (masked, count, False)) if turn.first else ((0, count, True),)
        sums = (full((ROWS,), 0.0),) * len(sums_refs)
        for first, last, hides in parts:
            one = lambda n, sums, hides=hides: step(n, hides, lse, delta, dq, sums)
            sums = lax.fori_loop(first, last, one, sums) if hides or some_whole(problem, here.scalars) else sums
        return plgpu.wgmma_accumulator_load(dq, wait_n=0), sums

    dq, sums = accumulators(walk, (ROWS, q.shape[-1]))
    dq, *sums = (lowered(x, dtype, turn) for x in (dq * gradient.slope, *sums))
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


def row_sums(x, y) -> Array:
    """Of x times y, tiles in shared memory."""
    x, y = (plgpu.load(ref, layout=WGMMA).astype(jnp.float32) for ref in (x, y))
    return (x * y).sum(axis=1)


def _clean(shared, good, failed_s, group, all_here) -> None:
    """Zeros where the tile `shared`, which all warpgroups read, is not `good`; 64 x 64 numbers at a time."""
    rows, cols = (n // ROWS for n in shared.shape)

    def part(n, _):
        at = (
            pl.multiple_of(lax.div(n, jnp.int32(cols)) * ROWS, ROWS),
            pl.multiple_of(lax.rem(n, jnp.int32(cols)) * ROWS, ROWS),
        )
        here = shared.at[pl.ds(at[0], ROWS), pl.ds(at[1], ROWS)]
        load = lambda: plgpu.load(here, layout=WGMMA).astype(jnp.float32)
        bad = jnp.where(good(load(), at[0]), 0.0, 1.0).max(axis=1)

        @pl.when(any_failed(failed_s, bad) > 0)
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
    assert lse.shape[-1] % others == 0 and others == ROWS
    scalars = with_ranges(scalars, lengths, tiling.own, keys=True)
    scalars = with_lists(problem, scalars, lengths, (others, tiling.own), keys=True)
    given, (of_query, of_key) = jax.tree.leaves(scalars), arrivals(scalars)

    total = B * K * -(-S // tiling.own)
    visited = shape.G * tiles_visited(problem, lengths, tiling.own, others, keys=True)
    blocks, order = blocks_in_order(problem, scalars, visited, others, B * K, T * shape.G * (H + D) * 2)

    def body(*refs, rows_s, **scratch):
        at = dict(lse_s=(0, stages), delta_s=(stages, stages), failed_s=(2 * stages, groups))
        scratch |= {name: rows_s.at[pl.ds(*part)] for name, part in at.items()}
        values = scalars.like(iter(refs[6:-2]))
        group, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        find = lambda index: find_keys(problem, shape, values, tiling.own, others, order, index)
        items = lambda do: Items(total, blocks, block, lambda index, turn: do(find(index), turn))

        @pl.when(group < groups)
        def _():
            take_registers(tiling.warpgroups, computes=True)
            compute = lambda *at: _compute_keys(problem, shape, tiling, refs[-2:], group, *at, **scratch)
            rounds(items(compute), True, scratch["failed_s"], scratch["all_done"])

        @pl.when(group == groups)
        def _():
            take_registers(tiling.warpgroups, computes=False)
            copy = lambda *at: _copy_for_keys(shape, tiling, refs[:6], *at, **scratch)
            rings = (stages, True, (scratch["used"],)), (tiling.items, False, (scratch["own_used"],))
            rounds(items(copy), False, scratch["failed_s"], scratch["all_done"], rings)

    scratch = dict(
        k_s=tile(tiling.items * groups, ROWS, H, dtype),
        v_s=tile(tiling.items * groups, ROWS, D, dtype),
        q_s=tile(stages, others, H, dtype),
        do_s=tile(stages, others, D, dtype),
        rows_s=plgpu.SMEM((2 * stages + groups, ROWS), jnp.float32),  # each array begins at a multiple of 1 KiB
        own_there=plgpu.Barrier(num_arrivals=2 + of_key, num_barriers=tiling.items * groups),
        own_used=plgpu.Barrier(num_arrivals=groups, num_barriers=tiling.items),
        q_there=plgpu.Barrier(num_arrivals=2 + of_query, num_barriers=stages),
        do_there=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        all_here=plgpu.Barrier(num_arrivals=groups),
        all_done=plgpu.Barrier(num_arrivals=groups + 1),
        **room(scalars, (stages, others), (tiling.items * groups, ROWS)),
        **stage(groups, ROWS, others, dtype),
    )
    out = [jax.ShapeDtypeStruct(x.shape, dtype) for x in (key, value)]
    return call(body, "memeff_dkdv", out, scratch, blocks, groups + 1, roughly(problem))(*arrays, *given)


def transposed(problem: Problem, here: KeysPlace, tiling: Tiling, n, group, numbers, marks: Marks) -> Pairs:
    """Of warpgroup `group`'s keys and of the n-th tile of queries that is visited."""
    first = here.visits.tile(n) * tiling.others, here.col + group * ROWS
    return Pairs(problem, (ROWS, tiling.others), first, here.sight, here.scalars, numbers, marks, query_dim=1)


def existing(x: Array, shape: Shape, here: KeysPlace, group) -> Array:
    """Return dk or dv of warpgroup `group`'s keys, with 0 for what only pads the last tile: its p may overflow."""
    if shape.S % ROWS == 0:
        return x
    return jnp.where(positions(here.col + group * ROWS, (ROWS, x.shape[1]), 0) < shape.S, x, 0.0)


def copy_queries(shape, tiling, arrays, here, visits, *, q_s, do_s, lse_s, delta_s, q_there, do_there, used, marks, **_):
    """Of all heads that share the keys; after `visits` of other tiles."""
    query_ref, dout_ref, lse_ref, delta_ref = arrays
    stages, count = tiling.stages, here.visits.total

    def one(g, n):
        at, head = visits + g * count + n, here.k * shape.G + g
        x, rows = lax.rem(at, jnp.int32(stages)), pl.ds(here.visits.tile(n) * tiling.others, tiling.others)
        pl.when(at >= stages)(lambda: plgpu.barrier_wait(used.at[x]))
        plgpu.copy_gmem_to_smem(query_ref.at[here.b, rows, head], q_s.at[x], q_there.at[x])
        plgpu.copy_gmem_to_smem(lse_ref.at[here.b, head, rows], lse_s.at[x], q_there.at[x])
        copy_marks(here.scalars.by_query, rows, marks[0], x, q_there.at[x])
        plgpu.copy_gmem_to_smem(dout_ref.at[here.b, rows, head], do_s.at[x], do_there.at[x])
        plgpu.copy_gmem_to_smem(delta_ref.at[here.b, head, rows], delta_s.at[x], do_there.at[x])

    pl.loop(0, shape.G)(lambda g: pl.loop(0, count)(lambda n: one(g, n)))
    return shape.G * count


def _copy_for_keys(shape, tiling, arrays, here: KeysPlace, turn: Turn, *, k_s, v_s, own_there, own_used, marks, **scratch):
    query_ref, key_ref, value_ref, *of_rows = arrays
    y = lax.rem(turn.items, jnp.int32(tiling.items))
    pl.when(turn.items >= tiling.items)(lambda: plgpu.barrier_wait(own_used.at[y]))
    for group in range(tiling.warpgroups):
        cols, mine = pl.ds(here.col + group * ROWS, ROWS), y * tiling.warpgroups + group
        for ref, to in ((key_ref, k_s), (value_ref, v_s)):
            plgpu.copy_gmem_to_smem(ref.at[here.b, cols, here.k], to.at[mine], own_there.at[mine])
        copy_marks(here.scalars.by_key, cols, marks[1], mine, own_there.at[mine])
    count = copy_queries(shape, tiling, (query_ref, *of_rows), here, turn.visits, marks=marks, **scratch)
    return count, jnp.int32(0)


def _compute_keys(
    problem, shape, tiling, out, group, here: KeysPlace, turn: Turn, *, k_s, v_s, q_s, do_s, lse_s, delta_s, failed_s,
    own_there, own_used, q_there, do_there, used, all_here, marks, stage=None, **_,
):  # fmt: skip
    dk_ref, dv_ref = out
    gradient, sides, dtype = Gradient(problem), (ROWS, tiling.others), k_s.dtype
    y = lax.rem(turn.items, jnp.int32(tiling.items)) * tiling.warpgroups
    cols = pl.ds(here.col + group * ROWS, ROWS)
    masked, count = here.visits.masked, apart(jnp.int32(here.visits.total))
    row = lambda ref: spread(plgpu.load(ref, layout=COL), sides, 1)
    lse_row = lambda x: row(lse_s.at[x]) if turn.first else row(lse_s.at[x]) + lift(dtype)
    small = tiling.others == ROWS  # then registers are left

    def clean(x):
        """Queries that see nothing may hold anything, and so may their cotangents."""
        q, do = q_s.at[x], do_s.at[x]
        lse = lambda first: spread(plgpu.load(lse_s.at[x, pl.ds(first, ROWS)], layout=ROW), (ROWS, ROWS))
        _clean(q, lambda x, _: jnp.abs(x) < jnp.inf, failed_s.at[group], group, all_here)
        _clean(
            do, lambda x, first: (jnp.abs(x) < jnp.inf) | (lse(first) < SEES_NOTHING), failed_s.at[group], group, all_here
        )

    def step(start, n, hides, numbers, dk, dv):
        x = lax.rem(start + n, jnp.int32(tiling.stages))
        q, do = q_s.at[x], do_s.at[x]
        plgpu.barrier_wait(q_there.at[x])
        # In a kernel's first loop ptxas waits for raw before it begins dp; in the second, dp may begin while raw runs.
        late = tiling.warpgroups == 2 and not hides and problem.right is not None
        if not late:
            plgpu.barrier_wait(do_there.at[x])
        if hides and not turn.first:
            clean(x)
        of_tile = tuple(ref.at[x] for ref in marks[0]), tuple(ref.at[y + group] for ref in marks[1])
        pairs = transposed(problem, here, tiling, n, group, numbers, of_tile).early()
        keep = pairs.seen() if hides else None
        mine = y + (apart(group) if small else group)
        k, v = k_s.at[mine], v_s.at[mine]
        early = lse_row(x) if small else None  # before products, which keep shared memory busy

        def products(raw, dp):
            whole = None if late else begin(dp, row(delta_s.at[x]))
            plgpu.wgmma(raw, k, q.T)  # (5)
            if whole is None:
                plgpu.barrier_wait(do_there.at[x])
                whole = begin(dp, row(delta_s.at[x]))
            plgpu.wgmma(dp, v, do.T)
            s = plgpu.wgmma_accumulator_load(raw, wait_n=1)
            p, draw = gradient.probabilities(s, lse_row(x) if early is None else early, pairs, keep)  # (6)
            multiply(dv, p.astype(dtype), do, stage and stage.at[group])
            d = whole(plgpu.wgmma_accumulator_load(dp, wait_n=1))  # while dv runs
            multiply(dk, draw(p, d)[0].astype(dtype), q, stage and stage.at[group])
            plgpu.wgmma_wait(0)

        accumulators(products, sides, sides)
        plgpu.barrier_arrive(used.at[x])

    plgpu.barrier_wait(own_there.at[y + group])

    def walk(dk, dv):
        def head(g, _):
            start, numbers = turn.visits + g * count, of_head(here.scalars, here.k * shape.G + g)
            parts = ((0, masked, True), (masked, count, False)) if turn.first else ((0, count, True),)
            for first, last, hides in parts:
                one = lambda n, _, hides=hides: step(start, n, hides, numbers, dk, dv)
                lax.fori_loop(first, last, one, None) if hides or some_whole(problem, here.scalars) else None

        lax.fori_loop(0, shape.G, head, None)
        return plgpu.wgmma_accumulator_load(dk, wait_n=0), plgpu.wgmma_accumulator_load(dv, wait_n=0)

    dk, dv = accumulators(walk, (ROWS, k_s.shape[-1]), (ROWS, v_s.shape[-1]))
    failed = not_finite(failed_s.at[group], turn, *(existing(x, shape, here, group) for x in (dk, dv)))
    k, v = k_s.at[y + group], v_s.at[y + group]
    k[...] = lowered(dk * gradient.slope, dtype, turn).astype(dtype)
    v[...] = lowered(dv, dtype, turn).astype(dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(k, dk_ref.at[here.b, cols, here.k])
    plgpu.copy_smem_to_gmem(v, dv_ref.at[here.b, cols, here.k])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(own_used.at[lax.rem(turn.items, jnp.int32(tiling.items))])
    return shape.G * count, failed
