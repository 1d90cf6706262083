"""Compute the gradient of the bias on GPUs since Ampere, from lse and delta.

Steps (1) to (4) are those of `hopper.backward_bias`. A thread block owns one part of the gradient
(hopper/bias_work.py), 64 queries, 64 keys or a tile of both, and visits the tiles of pairs that it
is a sum of, always in the same order. The next tiles are copied beside the products of one where
shared memory has two places for them.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.logits import allow_approx_math
from memeff.pallas.ampere.backward import ROWS, Arrays, dp_with_delta
from memeff.pallas.ampere.mosaic import (
    copy_pairs,
    copy_tile,
    kernel,
    multiply,
    ready_barrier,
    store_pairs,
    wait_for_copies,
)
from memeff.pallas.hopper.backward_common import Gradient, float16_lift, optional_slot
from memeff.pallas.hopper.bias import bias_tiles, head_bias
from memeff.pallas.hopper.bias_work import BiasParts, BiasVisit, BiasWork, SharedBias
from memeff.pallas.hopper.mosaic import (
    ROW,
    Barrier,
    Ref,
    broadcast_vector,
    full_tile,
    plgpu,
    tile_ref,
    whole_width,
)
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.scheduler import CallSizes
from memeff.pallas.hopper.score_tile import ScoreTile, head_number_refs
from memeff.problem import Problem

TILE = ROWS, ROWS


class Scratch(NamedTuple):
    """Shared memory of a thread block. The barriers are in the interpreter alone."""

    bias_s: Ref | None  # [1, 64, 64] of a bias of pairs; its gradient at the end
    queries_s: tuple[Ref, Ref]  # query and dout, [stages, 64, H] and [stages, 64, D]
    keys_s: tuple[Ref, Ref]  # key and value, of the same shapes
    bias_ready: Barrier
    ready: Barrier  # of a visit


def bias_gradient(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: Arrays,
    scalars: Scalars,
    shared: SharedBias,
    stages: int,
) -> Array:
    """Return the gradient of the bias.

    It is like `scalars.bias`, but with one entry of a dim that is `shared`; or like `query_bias` or
    `key_bias`, padded to whole tiles. `lengths`: T and S without padding. `stages`: visited tiles
    in shared memory at most.
    """
    B, _, N, H = arrays.query.shape
    K, D = arrays.value.shape[2:]
    T, S = lengths
    sizes = CallSizes(B, T, S, K, N // K)
    parts = BiasParts.of(sizes, scalars, shared, TILE)
    operands, structure = jax.tree.flatten((arrays, scalars))

    def body(*refs, scratch: Scratch):
        array_refs, scalar_refs = jax.tree.unflatten(structure, refs[: len(operands)])
        work = parts.find_work(problem, sizes, scalar_refs, lax.axis_index("block"))
        BiasTile(problem, array_refs, scalar_refs, scratch, work).run(refs[len(operands)])

    stages = min(stages, math.prod(parts.visited_dims))
    call = kernel(
        body,
        "memeff_ampere_dbias",
        [parts.result],
        {"scratch": scratch_types(H, D, arrays.query.dtype, stages, scalars)},
        math.prod(parts.item_dims),
        allow_approx_math(problem),
    )
    return call(*operands)[0]


def scratch_types(H: int, D: int, dtype, stages: int, scalars: Scalars) -> Scratch:
    """Return the types of a thread block's shared memory."""
    tiles = [tile_ref(stages, ROWS, whole_width(width), dtype) for width in (H, D)]
    bias_s = bias_tiles(scalars, 1, *TILE)
    return Scratch(
        bias_s=bias_s,
        queries_s=(tiles[0], tiles[1]),
        keys_s=(tiles[0], tiles[1]),
        bias_ready=None if bias_s is None else ready_barrier(),
        ready=ready_barrier(arrivals=4, count=stages),
    )


class BiasTile(NamedTuple):
    """A part of the gradient, which a thread block computes."""

    problem: Problem
    arrays: Arrays
    scalars: Scalars
    scratch: Scratch
    work: BiasWork

    def run(self, gradient_ref: Ref) -> None:
        """Compute and store the part."""
        first = self._next_visible(jnp.int32(0))
        is_visible = first < self.work.most_visits
        total = lax.cond(is_visible, self._sum, lambda _: full_tile(TILE, 0.0), first)
        b, n, i, j = self.work.place
        row, col = i * ROWS, j * ROWS
        if self.work.form == "pairs":
            tiles: Any = self.scratch.bias_s
            shared = tiles.at[0]
            shared[...] = total.astype(shared.dtype)
            store_pairs(shared, gradient_ref.at[b, n], row, col)
        elif self.work.form == "queries":
            gradient_ref[b, n, pl.ds(row, ROWS)] = total.sum(axis=1)
        else:
            gradient_ref[b, n, pl.ds(col, ROWS)] = total.sum(axis=0)

    def _next_visible(self, r):
        """Return the first visit from r on that has a visible pair; `most_visits` without one."""
        count = jnp.int32(self.work.most_visits)

        def goes_on(r):
            visit = self.work.visit(jnp.minimum(r, count - 1))
            return (r < count) & (visit.is_visible ^ True)  # kernels know no "not"

        return lax.while_loop(goes_on, lambda r: r + 1, r)

    def _sum(self, first) -> Array:
        """Return the sum of ds over the visible visits, of which `first` is the first."""
        scratch = self.scratch
        count = jnp.int32(self.work.most_visits)
        stages = jnp.int32(scratch.keys_s[0].shape[0])
        if scratch.bias_s is not None:
            b, n, i, j = self.work.place
            bias = head_bias(self.scalars.of(b), n)
            copy_pairs(bias, i * ROWS, j * ROWS, scratch.bias_s.at[0], scratch.bias_ready)
        self._copy(jnp.int32(0), first)
        if scratch.bias_s is not None:
            wait_for_copies(scratch.bias_ready)

        def step(state):
            done, r, total = state
            slot = lax.rem(done, stages)
            wait_for_copies(optional_slot(scratch.ready, slot))
            after = self._next_visible(r + 1)
            copy_next = functools.partial(self._copy, lax.rem(done + 1, stages), after)
            if scratch.keys_s[0].shape[0] > 1:
                pl.when(after < count)(copy_next)
            total = total + self._cotangent(self.work.visit(r), slot)  # (4)
            if scratch.keys_s[0].shape[0] == 1:
                pl.when(after < count)(copy_next)
            return done + 1, after, total

        state = jnp.int32(0), first, full_tile(TILE, 0.0)
        return lax.while_loop(lambda state: state[1] < count, step, state)[2]

    def _copy(self, slot, r) -> None:
        """Start to copy the tiles of visit r to `slot`."""
        visit = self.work.visit(r)
        arrays = self.arrays
        ready = optional_slot(self.scratch.ready, slot)
        for ref, shared in zip((arrays.query, arrays.dout), self.scratch.queries_s, strict=True):
            copy_tile(ref, visit.b, visit.row, visit.n, shared.at[slot], ready)
        for ref, shared in zip((arrays.key, arrays.value), self.scratch.keys_s, strict=True):
            copy_tile(ref, visit.b, visit.col, visit.k, shared.at[slot], ready)

    def _cotangent(self, visit: BiasVisit, slot) -> Array:
        """Return ds of a visit."""
        scratch = self.scratch
        q_s, do_s = (x.at[slot] for x in scratch.queries_s)
        k_s, v_s = (x.at[slot] for x in scratch.keys_s)
        gradient = Gradient(self.problem, visit.scalars.logit_terms)
        numbers = head_number_refs(visit.scalars, visit.n)
        first = visit.row, visit.col
        tile = ScoreTile.in_global_memory(self.problem, visit, first, TILE, numbers)

        def of_rows(ref: Ref) -> Array:
            part = ref.at[visit.b, visit.n, pl.ds(visit.row, ROWS)]
            return plgpu.load(part, layout=ROW, optimized=False)

        lse = broadcast_vector(of_rows(self.arrays.lse) + float16_lift(q_s.dtype), TILE)
        raw = multiply(full_tile(TILE, 0.0), q_s, k_s, transposed=True)  # (1)
        tile = tile.with_bias(visit.n, optional_slot(scratch.bias_s, 0))
        keep = tile.mask()
        p = gradient.signed(jnp.exp2(tile.logits(raw, keep) - lse), tile)  # (2)
        delta = broadcast_vector(of_rows(self.arrays.delta), TILE)
        dp = dp_with_delta(gradient, p, delta, do_s, v_s)
        return jnp.where(keep, gradient.cotangent_of_logits(p, dp), 0.0)  # (3)
