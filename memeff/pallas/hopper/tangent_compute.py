"""Compute one work item of the tangent on Hopper: steps (1) to (4) of tangent.py for 64 queries."""

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
    not_finite,
    optional_slot,
    skip_tile,
)
from memeff.pallas.hopper.mosaic import (
    ROW,
    WGMMA,
    accumulators,
    broadcast_vector,
    full_tile,
    init_accumulator,
    interpreting,
    multiply,
    plgpu,
)
from memeff.pallas.hopper.nonfinite import clean_values
from memeff.pallas.hopper.persistent import ROWS, WorkState
from memeff.pallas.hopper.scheduler import (
    QueryWork,
    may_have_unmasked_tiles,
)
from memeff.pallas.hopper.score_tile import (
    ScoreTile,
    TokenVectors,
    head_number_refs,
)
from memeff.problem import Problem


class TangentArrays(NamedTuple):
    """Operands and their tangents, padded as in `forward.attend`; or refs of them.

    None: the kernel does not read the array, or the operand does not move.
    """

    query: Any
    key: Any
    lse: Any  # [B, N, T'], in bits
    value: Any  # value and out only where logits move
    out: Any
    dq: Any
    dk: Any
    dv: Any

    @property
    def queries(self) -> tuple[Any, Any]:
        """Return the arrays of which each warpgroup reads its queries."""
        return self.query, self.dq

    @property
    def keys(self) -> tuple[Any, Any]:
        """Return the arrays of keys."""
        return self.key, self.dk

    @property
    def values(self) -> tuple[Any, Any]:
        """Return the arrays of values."""
        return self.value, self.dv


class TangentScratch(NamedTuple):
    """Shared memory and barriers of the kernel, in the order of their addresses."""

    all_warpgroups: Any  # barrier: the computing warpgroups and the one that copies
    computing: Any  # barrier: the computing warpgroups
    bad_columns_s: Any  # [H]
    bad_keys_s: Any  # [warpgroups, tile_size]
    failed_s: Any  # [warpgroups, 64]: flags of rows
    k_ready: Any
    k_used: Any
    keys_s: tuple[Any, ...]  # [stages, tile_size, H] of each of `TangentArrays.keys`
    lse_s: Any  # [items * warpgroups, 64]; dlse at the end
    token_vectors: TokenVectors
    out_ready: Any
    queries_s: tuple[Any, ...]  # [items * warpgroups, 64, H] of each of `TangentArrays.queries`
    item_ready: Any
    item_used: Any
    stage: Any  # for `multiply` in the interpreter
    v_ready: Any
    v_used: Any
    values_s: tuple[Any, ...]  # like keys_s


class RowState(NamedTuple):
    """Sums of each row: r, c and l, the sum of p."""

    r: Array
    c: Array
    l: Array


def logits_and_tangent(
    problem: Problem, raw: Array, tile: ScoreTile, keep: Array | None
) -> tuple[Array, Callable[[Array], Array]]:
    """Do (2): return s in bits, and the function that makes ds in nats from d_raw."""
    gradient = Gradient(problem, tile.scalars.logit_terms)
    if gradient.linear:

        def scaled(d_raw):
            ds = d_raw * gradient.slope
            return ds if keep is None else jnp.where(keep, ds, 0.0)

        return tile.logits(raw, keep), scaled
    indices = tile.pair_indices(problem.score_fn)

    def logits(raw):
        return logits_base2(problem, raw, tile.terms, keep, indices, differentiable=True)

    s, push = jax.linearize(logits, raw)
    return s, lambda d_raw: push(d_raw * (1 / LOG2_E))


def accumulate_on(u: Array, steps: Callable, item_total=None) -> tuple[Any, Array]:
    """Return the result of `steps(accumulator)`, and u plus what the steps add.

    If there is an accumulator `item_total` of the whole item, the steps add to it, and u stays.
    """
    if item_total is not None:
        return steps(item_total), u

    def run_steps(total):
        add_u = init_accumulator(total, u)
        result = steps(total)
        return result, add_u(plgpu.wgmma_accumulator_load(total, wait_n=0))

    rows, cols = u.shape
    return accumulators(run_steps, (rows, cols))


def compute_item(
    problem: Problem,
    tiling: Tiling,
    with_sink: bool,
    refs: tuple[TangentArrays, tuple],
    scratch: TangentScratch,
    group,
    work: QueryWork,
    state: WorkState,
) -> tuple[Array, Array]:
    """Compute dout and dlse of one warpgroup's queries."""
    arrays, (dout_ref, dlse_ref) = refs
    query_s, _ = scratch.queries_s
    dtype = query_s.dtype
    shape = ROWS, tiling.tile_size
    u_shape = ROWS, query_s.shape[-1]
    rows = pl.ds(work.row + group * ROWS, ROWS)
    count = work.visits.total
    item = lax.rem(state.items_done, jnp.int32(tiling.items))
    item_slot = item * tiling.warpgroups + group
    q, dq = (optional_slot(x, item_slot) for x in scratch.queries_s)
    stage = optional_slot(scratch.stage, group)
    numbers = head_number_refs(work.scalars, work.n)

    def slot_of(n):
        return lax.rem(state.tiles_visited + n, jnp.int32(tiling.stages))

    def score_tile(n):
        by_query, by_key = scratch.token_vectors
        first = work.row + group * ROWS, work.visits.tile(n) * tiling.tile_size
        query_vectors = tuple(x.at[item_slot] for x in by_query)
        key_vectors = tuple(x.at[slot_of(n)] for x in by_key)
        vectors = query_vectors, key_vectors
        return ScoreTile(problem, shape, first, work.mask_inputs, work.scalars, numbers, vectors)

    def step(n, hides, sums: RowState, u):
        slot = slot_of(n)
        tile = score_tile(n).with_loads_started()
        waits = state.first_round or not hides  # `clean_step` has waited before
        k, dk, v, dv = (optional_slot(x, slot) for x in (*scratch.keys_s, *scratch.values_s))
        if waits:
            plgpu.barrier_wait(scratch.k_ready.at[slot])
        keep = tile.mask() if hides else None
        factors = [(x, y) for x, y in ((dq, k), (q, dk)) if x is not None and y is not None]

        def products(raw, d_raw=None):
            plgpu.wgmma(raw, q, k.T)  # (1)
            for x, y in factors:
                plgpu.wgmma(d_raw, x, y.T)
            raw = plgpu.wgmma_accumulator_load(raw, wait_n=len(factors))
            s, push = logits_and_tangent(problem, raw, tile, keep)  # (2)
            p = jnp.exp2(s - broadcast_vector(lse, shape))  # (3)
            if waits:
                plgpu.barrier_wait(scratch.v_ready.at[slot])
            if dv is not None:
                multiply(u, p.astype(dtype), dv, stage)  # (4)
            if d_raw is None:
                return sums
            r, c, l = sums
            ds = push(plgpu.wgmma_accumulator_load(d_raw, wait_n=int(dv is not None)))
            l_tile = p.sum(axis=1)
            if hides:
                has_c = l > 0
                mean = (p * ds).sum(axis=1) / jnp.where(l_tile > 0, l_tile, 1.0)
                c = jnp.where(has_c, c, mean)
            w = p * (ds - broadcast_vector(c, shape))
            multiply(u, w.astype(dtype), v, stage)  # (4)
            return RowState(r + w.sum(axis=1), c, l + l_tile)

        sums = accumulators(products, shape, *[shape] * bool(factors))
        plgpu.barrier_arrive(scratch.k_used.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch.v_used.at[slot])
        return sums

    def clean_step(item_total, n, carry):
        """Do a step with cleaned values; u is kept apart because NaN may come into it."""
        sums, u = carry
        plgpu.barrier_wait(scratch.k_ready.at[slot_of(n)])
        plgpu.barrier_wait(scratch.v_ready.at[slot_of(n)])
        room = scratch.bad_keys_s.at[group], scratch.bad_columns_s, scratch.computing
        for values_s in scratch.values_s:
            if values_s is not None:
                u = clean_values(values_s.at[slot_of(n)], u, score_tile(n), group, room)
        return accumulate_on(u, functools.partial(step, n, True, sums), item_total)

    def skip(n):
        skip_tile(scratch, slot_of(n), slot_of(n))

    plgpu.barrier_wait(scratch.item_ready.at[item_slot])
    lse = plgpu.load(scratch.lse_s.at[item_slot], layout=ROW)
    visits = work.visits
    whole = may_have_unmasked_tiles(problem, work.scalars)
    c_end = count  # visits before c_end find c
    if whole:
        masked = visits.masked
        uncovered = jnp.where(visits.right_covers_rows & (visits.masked_right > 0), 0, 1)
        c_end = jnp.minimum(masked + uncovered, count)
    zeros = RowState(*[full_tile((ROWS,), 0.0)] * 3)

    def visit_whole(sums, u):
        """Visit the tiles without masks, in which every row sees what is not finite."""
        if not whole:
            return sums
        return lax.fori_loop(c_end, count, lambda n, sums: step(n, False, sums, u), sums)

    def visit_tiles(u):
        hidden = work.count_hidden_visits(work.row + group * ROWS, ROWS)
        pl.loop(0, hidden)(skip)
        sums = lax.fori_loop(hidden, c_end, lambda n, sums: step(n, True, sums, u), zeros)
        return visit_whole(sums, u), plgpu.wgmma_accumulator_load(u, wait_n=0)

    def revisit_tiles(item_total=None):
        """Visit all tiles once more, with cleaned values."""
        cleaned = functools.partial(clean_step, item_total)
        sums, u = lax.fori_loop(0, c_end, cleaned, (zeros, full_tile(u_shape, 0.0)))
        return accumulate_on(u, functools.partial(visit_whole, sums), item_total)

    def revisit_in_interpreter(item_total):
        """Add the products of all tiles in the order of the first round, for the same bits.

        The interpreter cannot begin a sum with u, see `init_accumulator`. So u only collects NaN
        until the end.
        """
        sums, u = revisit_tiles(item_total)
        return sums, u + plgpu.wgmma_accumulator_load(item_total, wait_n=0)

    if state.first_round:
        sums, u = accumulators(visit_tiles, u_shape)
    elif interpreting():
        sums, u = accumulators(revisit_in_interpreter, u_shape)
    else:
        sums, u = revisit_tiles()
    r, c, l = sums
    failed = not_finite(scratch.failed_s.at[group], state, u)
    if arrays.out is not None:  # in the place of the query
        out_ready = scratch.out_ready.at[group]
        plgpu.copy_gmem_to_smem(arrays.out.at[work.b, rows, work.n], q, out_ready)
        plgpu.barrier_wait(out_ready)
        mean = r - c * (1 - l) if with_sink else r
        u = u - broadcast_vector(mean, u_shape) * plgpu.load(q, layout=WGMMA).astype(jnp.float32)
    q[...] = u.astype(dtype)
    r_of_lse = r if with_sink else r / jnp.where(l == 0, 1.0, l)
    scratch.lse_s[item_slot] = r_of_lse + c
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, dout_ref.at[work.b, rows, work.n])
    dlse_s = scratch.lse_s.at[item_slot]
    plgpu.copy_smem_to_gmem(dlse_s, dlse_ref.at[work.b, work.n, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(scratch.item_used.at[item])
    return count, failed
