"""Compute attention of one tile of queries in a consumer warpgroup of the forward kernel.

forward.py has the algorithm, whose steps (1) to (5) are numbered here as well.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.logits import LOG2_E
from memeff.pallas.hopper.forward_memory import Carried, ForwardScratch, Tiling
from memeff.pallas.hopper.mosaic import (
    ROW,
    Ref,
    accumulators,
    broadcast_vector,
    full_tile,
    head_rows,
    init_accumulator,
    interpreting,
    plgpu,
    positions,
)
from memeff.pallas.hopper.nonfinite import clean_values
from memeff.pallas.hopper.parts import (
    factors_of,
    first_columns,
    load_tile,
    multiply_parts,
    parts_of,
    products,
    rounding_rest,
    split_tile,
    store_tile,
    transposed,
)
from memeff.pallas.hopper.persistent import (
    NEEDS_ROUND_2,
    ROWS,
    WorkState,
    any_failed,
    largest_failure,
    skip_item,
)
from memeff.pallas.hopper.scheduler import QueryWork, may_have_unmasked_tiles
from memeff.pallas.hopper.score_tile import HeadNumbers, ScoreTile, head_number_refs
from memeff.pallas.hopper.softmax_rows import add_tile, inverse_sum, lse_of_rows
from memeff.pallas.hopper.threads import NARROWEST
from memeff.pallas.hopper.tile_ranges import TileRange
from memeff.problem import Problem
from memeff.softmax import LSE_OF_EMPTY_ROW

HEADROOM = 20.0  # bits above the largest logit, for the sums of S <= 2^20 of the largest values
# A row whose l exceeds this in (5) is done again. Keys count as 0 beside a sink 126 bits above m,
# which is right as long as l is far below 2^126.
LARGEST_SUM = 2.0**100
# How a row failed, from which the next round of its tile follows:
MAX_FAILED = 1.0  # its m was too small, or none of its logits
VALUES_FAILED = 2.0  # a value that is not finite met it; perhaps it sees none


class ForwardKernel(NamedTuple):
    """A consumer warpgroup, which computes 64 rows of each tile of queries."""

    problem: Problem
    tiling: Tiling
    length: int  # T without padding
    query_ref: Ref  # [B, T, N, H]
    value_ref: Ref  # [B, S, K, D]
    out_refs: tuple[Ref, ...]  # out, and what its rounding took from it if that is stored
    lse_ref: Ref | None  # [B, N, T']
    carried: Carried | None  # refs
    scratch: ForwardScratch
    warpgroup: Array

    def run_item(self, work: QueryWork, state: WorkState) -> tuple[Array, Array]:
        """Compute and store a tile of queries. Return the tiles visited, and how a row failed."""
        scratch = self.scratch
        slot = lax.rem(state.items_done, jnp.int32(self.tiling.queries))
        rows = pl.ds(work.row + self.warpgroup * ROWS, ROWS)
        q_slot = slot * self.tiling.warpgroups + self.warpgroup
        q = scratch.q_s.at[q_slot]
        out_s = self._out_columns(q)
        out = head_rows(self.out_refs[0], work.b, rows, work.n, q.shape[-1])
        plgpu.barrier_wait(scratch.q_ready.at[slot])
        head_numbers = head_number_refs(work.scalars, work.n)
        loop = KeyTileLoop(self, work, state, q, head_numbers)
        m, l, o, failed = loop.run()
        if self.carried is not None:
            m, l, o = self._merge_carried(self.carried, work, rows, q, m, l, o)
        lse, stored_lse = None, None
        if self.lse_ref is not None:
            lse, stored_lse = lse_of_rows(m, l), self.lse_ref.at[work.b, work.n, rows]
        if self.carried is None and not state.first_round:
            lse, o = self._keep_passed_rows(state, q, (stored_lse, out), lse, o)
        worst = largest_failure(scratch.failed_s.at[self.warpgroup], failed)
        item_failed = jnp.where(
            worst == VALUES_FAILED, NEEDS_ROUND_2, (worst > 0).astype(jnp.int32)
        )
        store_tile(out_s, o, self.tiling.parts)
        if lse is not None:
            self._row_vector[...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, out)
        if lse is not None:
            plgpu.copy_smem_to_gmem(self._row_vector, stored_lse)
        for low_ref in self.out_refs[1:]:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_s[...] = rounding_rest(o, q.dtype)
            plgpu.commit_smem()
            low = head_rows(low_ref, work.b, rows, work.n, q.shape[-1])
            plgpu.copy_smem_to_gmem(q, low)
        # The next round may read out, so it must have been written by then.
        plgpu.wait_smem_to_gmem(0, wait_read_only=state.first_round)
        plgpu.barrier_arrive(scratch.q_used.at[slot])
        return work.visits.total, item_failed

    def _out_columns(self, q: Ref) -> Ref:
        """Return the columns of a tile of queries that out takes."""
        return first_columns(q, self.scratch.v_s.shape[-1])

    @property
    def _row_vector(self) -> Ref:
        """Return this warpgroup's part of `lse_s`."""
        return self.scratch.lse_s.at[pl.ds(self.warpgroup * ROWS, ROWS)]

    def _merge_carried(self, carried: Carried, work: QueryWork, rows, q: Ref, m, l, o):
        """Return m, l and o of these keys and of the carried ones together, in any round."""
        ready = self.scratch.old_out_ready.at[self.warpgroup]
        plgpu.commit_smem()  # all of the warpgroup have read q
        plgpu.copy_gmem_to_smem(carried.lse.at[work.b, work.n, rows], self._row_vector, ready)
        plgpu.barrier_wait(ready)
        lse = plgpu.load(self._row_vector, layout=ROW)
        logs = [m + jnp.log2(l), jnp.where(lse == LSE_OF_EMPTY_ROW, -jnp.inf, lse * LOG2_E)]
        top = jnp.maximum(*logs)
        top = jnp.where(top == -jnp.inf, 0.0, top)
        shares = [jnp.exp2(log - top) for log in logs]
        l = shares[0] + shares[1]
        inverse = 1 / jnp.where(l == 0, 1.0, l)
        weights = [broadcast_vector(share * inverse, o.shape) for share in shares]

        def add(total, weight, x):
            return total + jnp.where(weight == 0, 0.0, weight * x)  # 0 * NaN is NaN

        total = add(0.0, weights[0], o)
        for part in carried.out:
            tile = head_rows(part, work.b, rows, work.n, q.shape[-1])
            plgpu.copy_gmem_to_smem(tile, q, ready)
            plgpu.barrier_wait(ready)
            total = add(total, weights[1], load_tile(self._out_columns(q), self.tiling.parts))
            plgpu.commit_smem()
        return top, l, total

    def _keep_passed_rows(self, state: WorkState, q: Ref, stored: tuple[Ref | None, Ref], lse, o):
        """From round 3 on, return the stored lse and out of rows that had not failed.

        Out of those that had is NaN (see `KeyTileLoop.run`). Round 2 returns lse and o.
        """
        stored_lse, stored_out = stored
        ready = self.scratch.old_out_ready.at[self.warpgroup]

        def keep():
            plgpu.commit_smem()  # all of the warpgroup have read q
            plgpu.copy_gmem_to_smem(stored_out, q, ready)
            plgpu.barrier_wait(ready)
            old_o = load_tile(self._out_columns(q), self.tiling.parts)
            had_failed = jnp.where(jnp.abs(old_o) < jnp.inf, 0.0, 1.0).max(axis=1)
            new_o = jnp.where(broadcast_vector(had_failed, o.shape) > 0, o, old_o)
            if lse is None:
                return None, new_o
            plgpu.copy_gmem_to_smem(stored_lse, self._row_vector, ready)
            plgpu.barrier_wait(ready)
            old_lse = plgpu.load(self._row_vector, layout=ROW)
            return jnp.where(had_failed > 0, lse, old_lse), new_o

        return lax.cond(state.round > 2, keep, lambda: (lse, o))


class KeyTileLoop(NamedTuple):
    """The loop of one warpgroup over the tiles of keys that its 64 queries visit, for one head.

    m and l are [64], o is [64, D], and raw, s and p of a visit are [64, c].
    """

    kernel: ForwardKernel
    work: QueryWork
    state: WorkState
    q: Ref  # [64, H]
    head_numbers: HeadNumbers

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Return the shape of this warpgroup's tile of logits."""
        return ROWS, self.kernel.tiling.keys

    @property
    def out_shape(self) -> tuple[int, int]:
        """Return the shape of o."""
        return ROWS, self.kernel.scratch.v_s.shape[-1] // self.kernel.tiling.parts

    @property
    def first_row(self) -> Array:
        """Return the first query of this warpgroup."""
        return self.work.row + self.kernel.warpgroup * ROWS

    @property
    def has_fixed_max(self) -> bool:
        """Return True if tiles without masks are visited by (5).

        They are not if a score_fn or a bias is present and the nearest tiles do not come first:
        scores may fall with the distance, so that m of other tiles would be too small.
        """
        problem = self.kernel.problem
        nearest_first = (
            (problem.score_fn is None and not self.work.scalars.has_bias)
            or problem.right is not None
            or isinstance(self.work.visits, TileRange)
        )
        return may_have_unmasked_tiles(problem, self.work.scalars) and nearest_first

    def run(self):
        """Return m, l, o = out, and for each row how it failed, or 0.

        Out of rows that failed is NaN, but not in round 4, which is their last.
        """
        visits = self.work.visits
        masked = visits.masked
        masks_suffice = visits.right_covers_rows & (visits.masked_right > 0)
        unmasked = jnp.where(masks_suffice, 0, 1)  # tiles without a mask that a first m needs
        first_fixed = jnp.minimum(masked + unmasked, visits.total)
        if not self.has_fixed_max:
            first_fixed = visits.total
        m = full_tile((ROWS,), -jnp.inf)
        l = full_tile((ROWS,), 0.0)
        o = full_tile(self.out_shape, 0.0)
        if self.state.first_round:
            first_fixed, m, l, o = self._first_round(first_fixed, m, l, o)
        else:  # the same numbers in the same order, or all with a running maximum
            first_fixed = jnp.where(self.state.round > 2, visits.total, first_fixed)
            m, l, o = self._next_round(first_fixed, m, l, o)
        failed = jnp.where(jnp.abs(o) < jnp.inf, 0.0, VALUES_FAILED).max(axis=1)
        if self.kernel.scratch.v_s.dtype == jnp.float16:  # in which p is infinite above 2^16
            failed = jnp.where(l < 2.0**16, failed, jnp.minimum(failed, MAX_FAILED))
        failed = jnp.where(l < LARGEST_SUM, failed, MAX_FAILED)
        if self.has_fixed_max:  # where m is -inf, (5) took 0 instead, which is no logit of the row
            took_0 = (m == -jnp.inf) & (first_fixed < visits.total)
            failed = jnp.where(took_0, self._is_query(), failed)
        sinks = self.work.scalars.sinks
        weight = inverse_sum(m, l, None if sinks is None else sinks[self.work.n])
        if self.kernel.problem.dropout is not None:
            weight = weight * (1 / (1 - self.kernel.problem.dropout.rate))
        lost = failed
        if not self.state.first_round:
            lost = failed * jnp.where(self.state.round == 4, 0.0, 1.0)
        weight = jnp.where(lost > 0, jnp.nan, weight)
        out = o * broadcast_vector(weight, o.shape)
        return m, l, out, failed

    def _is_query(self) -> Array:
        """Return MAX_FAILED for rows that hold a query, and 0 behind the last one, [64]."""
        # A tile, because JAX finds no layout for a vector of positions.
        rows = positions(self.first_row, (ROWS, NARROWEST), 0)
        return jnp.where(rows < self.kernel.length, MAX_FAILED, 0.0).max(axis=1)

    def _first_round(self, first_fixed, m, l, o):
        """Visit the tiles before `first_fixed` by (1) to (4), the rest by (5).

        Return the first tile that took (5), and m, l and o.
        """
        visits = self.work.visits
        hidden = self.work.count_hidden_visits(self.first_row, ROWS)
        pl.loop(0, hidden)(self._skip)
        first_fixed, m, l, o = self._online_loop(hidden, first_fixed, m, l, o)
        fixed_max = jnp.where(m == -jnp.inf, 0.0, m)

        def fixed_part(total):
            finish = init_accumulator(total, o)

            def visit_rest(l):
                return self._fixed_max_loop(total, first_fixed, fixed_max, l)

            new_l = lax.cond(first_fixed < visits.total, visit_rest, lambda l: l, l)
            new_o = finish(plgpu.wgmma_accumulator_load(total, wait_n=0))
            return new_l, new_o

        if self.has_fixed_max:
            l, o = accumulators(fixed_part, o.shape)
        return first_fixed, m, l, o

    def _online_loop(self, first, first_fixed, m, l, o):
        """Visit the tiles from `first` to `first_fixed` by (1) to (4), or longer with a bias.

        Return the first tile that is not visited, and m, l and o.
        """
        if not self.work.scalars.has_bias:
            m, l, o = lax.fori_loop(first, first_fixed, self._online_step, (m, l, o))
            return first_fixed, m, l, o

        def goes_on(state):
            n, is_online, *_ = state
            return (n < self.work.visits.total) & is_online

        def step(state):
            n, _, *rows = state
            rows = self._online_step(n, rows)
            return n + 1, self._is_online(n + 1, first_fixed, rows[0]), *rows

        first = jnp.asarray(first, jnp.int32)
        state = first, self._is_online(first, first_fixed, m), m, l, o
        n, _, m, l, o = lax.while_loop(goes_on, step, state)
        return n, m, l, o

    def _is_online(self, n, first_fixed, m):
        """Return True if visit n takes (1) to (4): with a bias, until each row has a logit."""
        if not self.work.scalars.has_bias:
            return n < first_fixed
        failed_s = self.kernel.scratch.failed_s.at[self.kernel.warpgroup]
        lacks_logit = any_failed(failed_s, jnp.where(m == -jnp.inf, 1.0, 0.0)) > 0
        return (n < first_fixed) | lacks_logit

    def _next_round(self, first_fixed, m, l, o):
        """Visit all tiles once more, but for round 3 with values cleaned of NaN and Inf."""
        total = self.work.visits.total

        def step(n, carry):
            return self._redo_step(n, first_fixed, *carry)

        # The interpreter adds o behind (5), see `init_accumulator`: do the same, for the same bits.
        # With a bias, later tiles may still move m.
        in_two_parts = interpreting() and not self.work.scalars.has_bias
        end = first_fixed if in_two_parts else total
        m, l, o = lax.fori_loop(0, end, step, (m, l, o))
        if in_two_parts:
            zeros = full_tile(self.out_shape, 0.0)
            m, l, fixed_o = lax.fori_loop(end, total, step, (m, l, zeros))
            o = o + fixed_o
        return m, l, o

    def _slot(self, n):
        """Return the slot of keys and values of visit n."""
        return lax.rem(self.state.tiles_visited + n, jnp.int32(self.kernel.tiling.stages))

    def _wait_for_values(self, n):
        """Wait until the values of visit n are in shared memory."""
        plgpu.barrier_wait(self.kernel.scratch.v_ready.at[self._slot(n)])

    def _score_tile(self, n) -> ScoreTile:
        """Return the positions, masks and functions of the tile of visit n."""
        kernel = self.kernel
        work = self.work
        row = self.first_row
        col = work.visits.tile(n) * kernel.tiling.keys
        slot = lax.rem(self.state.items_done, jnp.int32(kernel.tiling.queries))
        first_slot = slot * kernel.tiling.warpgroups
        query_numbers, key_numbers = kernel.scratch.token_vectors
        query_vectors = tuple(ref.at[first_slot + kernel.warpgroup] for ref in query_numbers)
        key_vectors = tuple(ref.at[self._slot(n)] for ref in key_numbers)
        return ScoreTile(
            kernel.problem,
            self.tile_shape,
            (row, col),
            work.mask_inputs,
            work.scalars,
            self.head_numbers,
            (query_vectors, key_vectors),
        )

    def _with_bias(self, tile: ScoreTile, n) -> ScoreTile:
        """Load the bias of visit n, which must be in shared memory if it is of pairs."""
        bias_s = self.kernel.scratch.bias_s
        if bias_s is not None:
            bias_s = bias_s.at[self._slot(n), pl.ds(self.kernel.warpgroup * ROWS, ROWS)]
        return tile.with_bias(self.work.n, bias_s)

    def _skip(self, n):
        """Release the keys and values of visit n unread."""
        scratch = self.kernel.scratch
        keys = scratch.k_ready, scratch.k_used
        values = scratch.v_ready, scratch.v_used
        skip_item(keys, values, slot=self._slot(n))

    def _dot_products(self, n) -> Array:
        """Return raw of visit n."""
        scratch = self.kernel.scratch
        slot = self._slot(n)
        plgpu.barrier_wait(scratch.k_ready.at[slot])

        def product(raw):
            self._start_dot_products(raw, slot)
            return plgpu.wgmma_accumulator_load(raw, wait_n=0)

        raw = accumulators(product, self.tile_shape)
        plgpu.barrier_arrive(scratch.k_used.at[slot])
        return raw

    def _start_dot_products(self, raw, slot):
        """Start (1) with the keys in `slot`."""
        parts = self.kernel.tiling.parts
        keys = parts_of(self.kernel.scratch.k_s.at[slot], parts)
        multiply_parts(raw, factors_of(self.q, parts), transposed(keys))

    def _online_step(self, n, carry):
        """Return m, l and o after visit n, by (1) to (4)."""
        scratch = self.kernel.scratch
        slot = self._slot(n)
        tile = self._score_tile(n).with_loads_started()
        raw = self._dot_products(n)
        # Vectors of keys and the bias are copied with the values.
        comes_with_values = bool(scratch.token_vectors[1]) or scratch.bias_s is not None
        if comes_with_values:
            plgpu.barrier_wait(scratch.v_ready.at[slot])
        tile = self._with_bias(tile, n)
        p, m, l, o = self._move_max(tile, raw, *carry)
        if not comes_with_values:
            plgpu.barrier_wait(scratch.v_ready.at[slot])
        return m, l, self._add_values(o, p, n)

    def _move_max(self, tile: ScoreTile, raw, m, l, o):
        """Apply (2) to (4), but for the product. Return p of (4), and the new m, l and a o."""
        dtype = self.kernel.scratch.v_s.dtype
        s = tile.logits(raw, tile.mask())  # (2)
        headroom = None
        if not self.state.first_round and dtype == jnp.bfloat16:
            headroom = jnp.where(self.state.round > 2, HEADROOM, 0.0)
        p, m, l, a = add_tile(s, m, l, headroom)  # (3), (4)
        o = o * broadcast_vector(a, o.shape)
        return self._rounded(self._drop(tile, p)), m, l, o

    def _redo_step(self, n, first_fixed, m, l, o):
        """Return m, l and o after visit n, by (1) to (4), or from `first_fixed` on by (5)."""
        tile = self._score_tile(n)
        raw = self._dot_products(n)
        self._wait_for_values(n)
        tile = self._with_bias(tile, n)

        def keep_max(m, l, o):
            fixed_max = jnp.where(m == -jnp.inf, 0.0, m)
            p, l = self._probabilities(tile, raw, fixed_max, l)
            return p, m, l, o

        move_max = functools.partial(self._move_max, tile, raw)
        if self.has_fixed_max:
            is_online = self._is_online(n, first_fixed, m)
            p, m, l, o = lax.cond(is_online, move_max, keep_max, m, l, o)
        else:
            p, m, l, o = move_max(m, l, o)
        clean = functools.partial(self._clean_values, n=n)
        o = lax.cond(self.state.round == 3, lambda o: o, clean, o)
        return m, l, self._add_values(o, p, n)

    def _probabilities(self, tile: ScoreTile, raw, fixed_max, l):
        """Return p and l of (5)."""
        s = tile.logits(raw, None)
        p = jnp.exp2(s - broadcast_vector(fixed_max, self.tile_shape))
        l = l + p.sum(axis=1)
        return self._rounded(self._drop(tile, p)), l

    def _rounded(self, p):
        """Return p as it is kept until its product. Two parts take more registers than p."""
        return p if self.kernel.tiling.parts == 2 else p.astype(self.kernel.scratch.v_s.dtype)

    def _split(self, p):
        """Return the first factors of p v."""
        return split_tile(p, self.kernel.scratch.v_s.dtype, self.kernel.tiling.parts)

    def _drop(self, tile: ScoreTile, p):
        """Return p with zeros where dropout drops a pair; `run` scales the rest."""
        if self.kernel.problem.dropout is None:
            return p
        # LLVM would move the choice behind the conversion to 16 bits, and products would then run
        # one after the other.
        return lax.optimization_barrier(jnp.where(tile.kept(), p, 0.0))

    def _add_values(self, o, p, n):
        """Return o + p v, with v of visit n in shared memory."""

        factors = self._split(p)

        def product(total):
            finish = init_accumulator(total, o)
            self._start_product(total, factors, n)
            return finish(plgpu.wgmma_accumulator_load(total, wait_n=0))

        o = accumulators(product, o.shape)
        plgpu.barrier_arrive(self.kernel.scratch.v_used.at[self._slot(n)])
        return o

    def _start_product(self, total, factors, n):
        """Start total += p v, from the first factors of p and with v of visit n."""
        scratch = self.kernel.scratch
        stage = scratch.stage and scratch.stage.at[self.kernel.warpgroup]
        values = parts_of(scratch.v_s.at[self._slot(n)], self.kernel.tiling.parts)
        multiply_parts(total, factors, values, stage)

    def _clean_values(self, o, n):
        """Clean the values of visit n of NaN and Inf. Return o with NaN in rows that see them."""
        scratch = self.kernel.scratch
        marks = scratch.bad_keys_s, scratch.bad_columns_s
        values = scratch.v_s.at[self._slot(n)]
        # A tile of its own: registers that held another one until here would be spilled.
        tile = self._with_bias(self._score_tile(n), n)
        return clean_values(values, o, tile, self.kernel.warpgroup, marks, scratch.all_consumers)

    def _fixed_max_loop(self, total, first_fixed, fixed_max, l):
        """Apply (5) to visit `first_fixed` and all later ones, at least one. Return l.

        `total` is the accumulator of o.
        """
        kernel = self.kernel
        scratch = kernel.scratch
        count = self.work.visits.total
        # A score_fn and dropout read vectors of keys. They and the bias are copied with the values.
        problem = kernel.problem
        reads_vectors = problem.score_fn is not None or problem.dropout is not None
        needs_vectors = bool(scratch.token_vectors[1]) and reads_vectors
        needs_vectors = needs_vectors or scratch.bias_s is not None

        def dot_products(n, load: Callable[[Any], Any]):
            """Start (1) of visit n. Return its tile, and `load` of the accumulator."""
            slot = self._slot(n)
            tile = self._score_tile(n).with_loads_started()
            plgpu.barrier_wait(scratch.k_ready.at[slot])

            def product(raw):
                self._start_dot_products(raw, slot)
                result = load(raw)
                plgpu.barrier_arrive(scratch.k_used.at[slot])
                return result

            return tile, accumulators(product, self.tile_shape)

        def start_values(factors, n):
            if not needs_vectors:
                self._wait_for_values(n)
            self._start_product(total, factors, n)

        def finish_values(n):
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch.v_used.at[self._slot(n)])

        def probabilities(n, tile, raw, l):
            if needs_vectors:
                self._wait_for_values(n)
            tile = self._with_bias(tile, n)
            return self._probabilities(tile, raw, fixed_max, l)

        def step(n, carry):
            """Multiply p and v of visit n, and compute p of visit n + 1."""
            p, l = carry
            factors = self._split(p)  # before a product runs that would have to end first

            def load(raw):
                start_values(factors, n)
                return plgpu.wgmma_accumulator_load(raw, wait_n=products(kernel.tiling.parts))

            p, l = probabilities(n + 1, *dot_products(n + 1, load), l)
            finish_values(n)
            return p, l

        def load_first(raw):
            return plgpu.wgmma_accumulator_load(raw, wait_n=0)

        tile, raw = dot_products(first_fixed, load_first)
        p, l = probabilities(first_fixed, tile, raw, l)
        p, l = lax.fori_loop(first_fixed, count - 1, step, (p, l))
        start_values(self._split(p), count - 1)
        finish_values(count - 1)
        return l
