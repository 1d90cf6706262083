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
    token_vectors,
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
    HeadNumbers,
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
    bad_keys_s: Any  # [tile_size]
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
    rows = pl.ds(work.row + group * ROWS, ROWS)
    item = lax.rem(state.items_done, jnp.int32(tiling.items))
    slot = item * tiling.warpgroups + group
    q = scratch.queries_s[0].at[slot]
    lse_s = scratch.lse_s.at[slot]
    numbers = head_number_refs(work.scalars, work.n)
    plgpu.barrier_wait(scratch.item_ready.at[slot])
    lse = plgpu.load(lse_s, layout=ROW)
    c_end = _visits_that_find_c(problem, work)
    visits = _Visits(problem, tiling, scratch, group, work, state, slot, numbers, lse, c_end)
    (r, c, l), u = visits.visit_all()
    failed = not_finite(scratch.failed_s.at[group], state, u)
    if arrays.out is not None:  # in the place of the query
        out_ready = scratch.out_ready.at[group]
        plgpu.copy_gmem_to_smem(arrays.out.at[work.b, rows, work.n], q, out_ready)
        plgpu.barrier_wait(out_ready)
        mean = r - c * (1 - l) if with_sink else r
        mean = broadcast_vector(mean, (ROWS, q.shape[-1]))
        u = u - mean * plgpu.load(q, layout=WGMMA).astype(jnp.float32)
    q[...] = u.astype(q.dtype)
    r_of_lse = r if with_sink else r / jnp.where(l == 0, 1.0, l)
    lse_s[...] = r_of_lse + c
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q, dout_ref.at[work.b, rows, work.n])
    plgpu.copy_smem_to_gmem(lse_s, dlse_ref.at[work.b, work.n, rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(scratch.item_used.at[item])
    return work.visits.total, failed


def _visits_that_find_c(problem: Problem, work: QueryWork):
    """Return how many visits, the first ones, find c and have masks."""
    visits = work.visits
    if not may_have_unmasked_tiles(problem, work.scalars):
        return visits.total
    masked = visits.masked
    uncovered = jnp.where(visits.right_covers_rows & (visits.masked_right > 0), 0, 1)
    return jnp.minimum(masked + uncovered, visits.total)


class _Visits(NamedTuple):
    """The tiles of keys that one warpgroup's queries visit."""

    problem: Problem
    tiling: Tiling
    scratch: TangentScratch
    group: Any
    work: QueryWork
    state: WorkState
    query_slot: Any
    numbers: HeadNumbers
    lse: Array
    c_end: Any  # visits before it find c

    def visit_all(self) -> tuple[RowState, Array]:
        """Return the sums of all visits and u, by the way of this round."""
        zeros = RowState(*[full_tile((ROWS,), 0.0)] * 3)
        u_shape = ROWS, self.scratch.queries_s[0].shape[-1]
        if self.state.first_round:
            return accumulators(functools.partial(self._visit_tiles, zeros), u_shape)
        if interpreting():
            return accumulators(functools.partial(self._revisit_in_interpreter, zeros), u_shape)
        return self._revisit_tiles(zeros)

    def _visit_tiles(self, zeros: RowState, u) -> tuple[RowState, Array]:
        """Visit all tiles."""
        hidden = self.work.count_hidden_visits(self.work.row + self.group * ROWS, ROWS)
        pl.loop(0, hidden)(self._skip)
        sums = lax.fori_loop(hidden, self.c_end, functools.partial(self._step, u, True), zeros)
        return self._visit_whole(sums, u), plgpu.wgmma_accumulator_load(u, wait_n=0)

    def _visit_whole(self, sums: RowState, u) -> RowState:
        """Visit the tiles without masks, in which every row sees what is not finite."""
        if not may_have_unmasked_tiles(self.problem, self.work.scalars):
            return sums
        step = functools.partial(self._step, u, False)
        return lax.fori_loop(self.c_end, self.work.visits.total, step, sums)

    def _revisit_tiles(self, zeros: RowState, item_total=None) -> tuple[RowState, Array]:
        """Visit all tiles once more, with cleaned values."""
        start = zeros, full_tile((ROWS, self.scratch.queries_s[0].shape[-1]), 0.0)
        clean_step = functools.partial(self._clean_step, item_total)
        sums, u = lax.fori_loop(0, self.c_end, clean_step, start)
        return accumulate_on(u, functools.partial(self._visit_whole, sums), item_total)

    def _revisit_in_interpreter(self, zeros: RowState, item_total) -> tuple[RowState, Array]:
        """Add the products of all tiles in the order of the first round, for the same bits.

        The interpreter cannot begin a sum with u, see `init_accumulator`. So u only collects NaN
        until the end.
        """
        sums, u = self._revisit_tiles(zeros, item_total)
        return sums, u + plgpu.wgmma_accumulator_load(item_total, wait_n=0)

    def _slot(self, n) -> Array:
        """Return the slot of the keys and values of the n-th tile."""
        return lax.rem(self.state.tiles_visited + n, jnp.int32(self.tiling.stages))

    def _skip(self, n) -> None:
        """Pass over the n-th tile, of which these queries see nothing."""
        skip_tile(self.scratch, self._slot(n), self._slot(n))

    def _tile(self, n) -> ScoreTile:
        """Return the n-th tile."""
        work, tile_size = self.work, self.tiling.tile_size
        first = work.row + self.group * ROWS, work.visits.tile(n) * tile_size
        vectors = token_vectors(self.scratch.token_vectors, self.query_slot, self._slot(n))
        shape = ROWS, tile_size
        inputs = work.mask_inputs, work.scalars, self.numbers, vectors
        return ScoreTile(self.problem, shape, first, *inputs)

    def _clean_step(self, item_total, n, carry) -> tuple[RowState, Array]:
        """Do a step with cleaned values; u is kept apart because NaN may come into it."""
        sums, u = carry
        scratch, group = self.scratch, self.group
        plgpu.barrier_wait(scratch.k_ready.at[self._slot(n)])
        plgpu.barrier_wait(scratch.v_ready.at[self._slot(n)])
        room = group, (scratch.bad_keys_s, scratch.bad_columns_s), scratch.computing
        for values_s in scratch.values_s:
            if values_s is not None:
                u = clean_values(values_s.at[self._slot(n)], u, self._tile(n), *room)
        return accumulate_on(u, lambda total: self._step(total, True, n, sums), item_total)

    def _step(self, u, hides: bool, n, sums: RowState) -> RowState:
        """Do (1) to (4) for the n-th tile: add to u, and return the sums with its parts."""
        scratch = self.scratch
        slot = self._slot(n)
        tile = self._tile(n).with_loads_started()
        waits = self.state.first_round or not hides  # `_clean_step` has waited before
        q, dq = (optional_slot(x, self.query_slot) for x in scratch.queries_s)
        k, dk, v, dv = (optional_slot(x, slot) for x in (*scratch.keys_s, *scratch.values_s))
        stage = optional_slot(scratch.stage, self.group)
        if waits:
            plgpu.barrier_wait(scratch.k_ready.at[slot])
        keep = tile.mask() if hides else None
        factors = [(x, y) for x, y in ((dq, k), (q, dk)) if x is not None and y is not None]

        def products(raw, d_raw=None):
            plgpu.wgmma(raw, q, k.T)  # (1)
            for x, y in factors:
                plgpu.wgmma(d_raw, x, y.T)
            raw = plgpu.wgmma_accumulator_load(raw, wait_n=len(factors))
            s, push = logits_and_tangent(self.problem, raw, tile, keep)  # (2)
            p = jnp.exp2(s - broadcast_vector(self.lse, tile.shape))  # (3)
            if waits:
                plgpu.barrier_wait(scratch.v_ready.at[slot])
            if dv is not None:
                multiply(u, p.astype(q.dtype), dv, stage)  # (4)
            if d_raw is None:
                return sums
            r, c, l = sums
            ds = push(plgpu.wgmma_accumulator_load(d_raw, wait_n=int(dv is not None)))
            l_tile = p.sum(axis=1)
            if hides:
                has_c = l > 0
                mean = (p * ds).sum(axis=1) / jnp.where(l_tile > 0, l_tile, 1.0)
                c = jnp.where(has_c, c, mean)
            w = p * (ds - broadcast_vector(c, tile.shape))
            multiply(u, w.astype(q.dtype), v, stage)  # (4)
            return RowState(r + w.sum(axis=1), c, l + l_tile)

        sums = accumulators(products, tile.shape, *[tile.shape] * bool(factors))
        plgpu.barrier_arrive(scratch.k_used.at[slot])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch.v_used.at[slot])
        return sums
