"""Share the steps of the backward kernels on Hopper (sm_90a), one for dq and one for dk and dv.

No gradient is summed across thread blocks, so two runs give the same bits. A tile takes seven
products. Logits and lse are in bits here (times log2 e).

dq: a thread block owns queries i, 64 for each computing warpgroup, and visits the tiles of keys j
that they see (Dao 2023, algorithm 2):
  (1) raw = q_i k_j';  dp = do_i v_j'      (3) ds = p (dp + delta_i);  d_raw = (2) transposed at ds
  (2) p = 2^(logits(raw) - lse_i)          (4) dq_i += d_raw k_j
dk and dv: a thread block owns keys j and visits queries i of all heads that share the keys. Its
tiles are transposed, because p and d_raw then leave their products in the layout in which the next
products take them from registers:
  (5) raw' = k_j q_i';  dp' = v_j do_i'
  (6) p', d_raw' as in (2), (3);  dv_j += p' do_i;  dk_j += d_raw' q_i
If d_raw is ds times a number, that number is applied at the end. In masked tiles d_raw is 0 where
`keep` is False. Operands of two products are cleaned of hidden NaN and Inf, because 0 times NaN is
NaN.
Float16 holds nothing below 2^-24, so ds of a row with many keys would be lost although its dq is
not. The caller lowers lse by `float16_lift`; p and ds are then 2^8 times as large, and the sums are
divided by 2^8 at the end. If that makes ds too large for float16, sums are not finite, and the work
item is done again without lift.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from memeff.logits import LOG2_E, logits_base2, logits_from_dots, logits_linear
from memeff.pallas.hopper.mosaic import init_accumulator, multiprocessors, plgpu, positions
from memeff.pallas.hopper.parts import load_tile
from memeff.pallas.hopper.persistent import (
    ROWS,
    Ring,
    WorkState,
    any_failed,
    skip_item,
)
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.scheduler import (
    MAX_PERSISTENT_POSITIONS,
    CallSizes,
    KeyBlocks,
    KeyWork,
    TileOrder,
    cache_order,
    finish_time,
    persistent_order,
    times_unknown,
)
from memeff.pallas.hopper.score_tile import HeadNumbers, ScoreTile, TokenVectors
from memeff.pallas.hopper.tile_ranges import tiles_visited
from memeff.problem import LogitParams, Problem

ITEM_START_TILES = 2  # tiles that a block could visit while it goes from one item to the next
START_OF_PART = 6  # the same where results are stored in two arrays
SUMMED_TOKENS = 2900  # whose partial dk and dv XLA adds up in the time of one visit
MASKED_VISIT = 2.9  # how much longer a visit takes in a tile of keys of two segments
BUSY_VISIT = 1.3  # how much longer a visit takes where all multiprocessors are busy
WORTHWHILE = 0.9  # of the time of fewer parts


def float16_lift(dtype) -> float:
    """Return how many bits larger p and ds are in products than their values."""
    return 8.0 if dtype == jnp.float16 else 0.0


def undo_lift(x: Array, dtype, state: WorkState | None = None) -> Array:
    """Divide a sum of p or ds by the lift. Items that are done again have none."""
    lift = float16_lift(dtype) if state is None or state.first_round else 0.0
    return x * 2.0**-lift if lift else x


class Tiling(NamedTuple):
    """Tile sizes of a kernel, in positions, and the number of tiles in shared memory."""

    warpgroups: int  # that compute, 64 rows each
    tile_size: int  # positions of a visited tile
    stages: int  # visited tiles that are being copied or in use
    items: int  # work items that are being copied or in use
    parts: int = 1  # of each number, see parts.py
    # stages of values in the kernel for dq, of dout in that for dk; 0: those of keys, of queries
    second_stages: int = 0

    @property
    def both_stages(self) -> tuple[int, int]:
        """Return the stages of visited keys and values, or of visited queries and dout."""
        return self.stages, self.second_stages or self.stages

    @property
    def item_size(self) -> int:
        """Return how many positions a work item owns."""
        return self.warpgroups * ROWS


class Gradient(NamedTuple):
    """Steps (2) and (3) for a problem, the same in all kernels."""

    problem: Problem
    terms: LogitParams  # `Scalars.logit_terms`
    wants_terms: bool = False  # cotangents of the terms, too

    @property
    def linear(self) -> bool:
        """Return True if d_raw = slope ds."""
        return logits_linear(self.problem)

    @property
    def slope(self) -> Array:
        """Return the factor that `probabilities` leaves out of d_raw."""
        if not self.linear:
            return jnp.float32(1)

        def logits(raw):
            return logits_from_dots(self.problem, raw, self.terms, None)

        _, pull = jax.vjp(logits, jnp.float32(0))
        return pull(jnp.float32(1))[0]

    @property
    def inverse_keep_rate(self) -> float:
        """Return the factor of what dropout keeps."""
        return 1.0 if self.problem.dropout is None else 1 / (1 - self.problem.dropout.rate)

    def signed(self, p: Array, tile: ScoreTile) -> Array:
        """Return p, with a minus where dropout drops the pair, so that no register holds that."""
        return p if self.problem.dropout is None else jnp.where(tile.kept(), p, -p)

    def kept(self, p: Array) -> Array:
        """Return the probabilities that dropout keeps, without its factor, from `signed` p."""
        return p if self.problem.dropout is None else jnp.maximum(p, 0.0)

    def start_dp(self, dp, delta: Array) -> Callable[[Array, Array], Array]:
        """Start the accumulator `dp`, before its product.

        Return a function that takes `signed` p and the product, and returns dp + delta.
        """
        if self.problem.dropout is None:
            finish = init_accumulator(dp, delta)
            return lambda _, product: finish(product)

        return lambda p, product: self.drop(p, product, delta)

    def drop(self, p: Array, product: Array, delta: Array) -> Array:
        """Return dp + delta from `signed` p and the product, where dropout drops pairs."""
        return jnp.where(p > 0.0, product * self.inverse_keep_rate, 0.0) + delta

    def cotangent_of_logits(self, p: Array, dp: Array) -> Array:
        """Return ds of (3), from `signed` p and dp + delta."""
        return (p if self.problem.dropout is None else jnp.abs(p)) * dp

    def probabilities(
        self,
        raw: Array,
        lse: Array,
        tile: ScoreTile,
        keep: Array | None,
    ) -> tuple[Array, Callable]:
        """Return `signed` p and a function of it and dp + delta, all of one shape.

        The function returns d_raw without its slope, and the cotangents of
        `tile.differentiable_values()` in the order of `term_list`; none if logits are linear.
        """
        indices = tile.pair_indices(self.problem.score_fn)

        def logits(raw, values):
            present = {name: x for name, x in values._asdict().items() if x is not None}
            terms = tile.terms._replace(**present)  # the cotangent of the bias is ds
            return logits_base2(self.problem, raw, terms, keep, indices, differentiable=True)

        values = tile.differentiable_values()
        if self.linear or not self.wants_terms:
            values = LogitParams(score=values.score)
        s, pull = jax.vjp(logits, raw, values)
        p = jnp.exp2(s - lse)

        def select(x):
            return x if keep is None else jnp.where(keep, x, 0.0)

        # Multiply p by the slope of the logits at once, because both would take two registers.
        sloped = None
        if not (self.linear or self.problem.dropout or term_list(values)):
            sloped, _ = pull(p * (1 / LOG2_E))

        def cotangents(p, dp):
            if sloped is not None:
                return select(sloped * dp), ()
            ds = self.cotangent_of_logits(p, dp)
            if self.linear:
                return select(ds), ()
            d_raw, d_values = pull(ds * (1 / LOG2_E))
            return select(d_raw), tuple(map(select, term_list(d_values)))

        return self.signed(p, tile), cotangents


def term_list(terms: LogitParams) -> list[Array]:
    """Return what there is of scale, soft cap, their ratio and the values of score_fn."""
    return jax.tree.leaves((terms.scale, terms.soft_cap, terms.ratio, terms.score))


def count_term_gradients(problem: Problem, scalars: Scalars) -> int:
    """Return the number of terms of the logits whose gradients the kernel of dq sums.

    These are the scale and the soft cap, if they are arrays, and inputs of `score_fn`.
    """
    score_fn: Any = problem.score_fn
    of_score = 0 if score_fn is None else len(score_fn.kernel_gradients)
    return len(jax.tree.leaves(scalars.logit_terms)) + of_score


def not_finite(failed_s, state: WorkState, *sums) -> Array:
    """Return 1 if, in the first round, some row of `sums` is not finite."""
    if not state.first_round:
        return jnp.int32(0)
    bad_rows = [jnp.where(is_finite(x), 0.0, 1.0).max(axis=1) for x in sums]
    return any_failed(failed_s, functools.reduce(jnp.maximum, bad_rows))


def is_finite(x: Array, _=None) -> Array:
    """Return True where x is neither NaN nor infinite."""
    return jnp.abs(x) < jnp.inf


def choose_blocks(
    problem: Problem,
    scalars: Scalars,
    visited: np.ndarray,
    size: int,
    heads: int,
    bytes_read: int,
) -> tuple[int, TileOrder]:
    """Return the number of thread blocks and their order of the items of `heads`.

    `visited`: tiles of `size` positions that each item of a head visits. `bytes_read`: by a head.
    """
    items = heads * visited.size
    causal = problem.right is not None
    if times_unknown(scalars) or causal and visited.mean() * size > MAX_PERSISTENT_POSITIONS:
        return items, cache_order(heads, bytes_read) if causal else TileOrder()
    return persistent_order(problem, heads, ITEM_START_TILES + visited)


def group_parts(
    sizes: CallSizes, problem: Problem, key_blocks: KeyBlocks, has_segments: bool
) -> int:
    """Return into how many parts a kernel of keys divides the query heads of each key head.

    A tile of keys visits the queries of all heads of its group. With few key heads, one such item
    can take longer than all others take on the other multiprocessors. A part of a group is an item
    of its own, but its dk and dv take memory, and are added up later.
    """
    visited = tiles_visited(problem, (sizes.T, sizes.S), key_blocks.keys, ROWS, keys=True)
    blocks = key_blocks.at_once * multiprocessors()
    items = sizes.B * sizes.K
    slowest = MASKED_VISIT if has_segments else 1.0
    fair_share = items * sizes.G * visited.sum() / blocks
    if slowest * sizes.G * visited.max(initial=0) <= fair_share / 8:
        return 1

    def time(parts: int) -> float:
        start = ITEM_START_TILES if parts == 1 else START_OF_PART
        times = start + visited * (sizes.G / parts)
        slowest_item = slowest * times.max(initial=0)
        times = np.repeat(times, items * parts)  # in causal order the long ones come first
        end = max(finish_time(times, blocks), BUSY_VISIT * times.sum() / blocks, slowest_item)
        return end if parts == 1 else end + items * parts * sizes.S / SUMMED_TOKENS

    times = {parts: time(parts) for parts in range(1, sizes.G + 1) if sizes.G % parts == 0}
    good_enough = min(times.values()) / WORTHWHILE
    return next(parts for parts, x in times.items() if x <= good_enough)


def optional_slot(ref, index) -> Any:
    """Return a slot of `ref`, or None if there is no `ref`."""
    return None if ref is None else ref.at[index]


def query_rings(tiling: Tiling, scratch: Any) -> Sequence[Ring]:
    """Return the `rings` of `run_with_retries` where items are queries that visit keys."""
    key_stages, value_stages = tiling.both_stages
    keys = Ring(key_stages, True, (scratch.k_used,))
    values = Ring(value_stages, True, (scratch.v_used,))
    items = Ring(tiling.items, False, (scratch.item_used,))
    return keys, values, items


def skip_tile(scratch: Any, key_slot, value_slot) -> None:
    """Wait for the keys and values of a tile that no row sees, and give them back."""
    skip_item((scratch.k_ready, scratch.k_used), slot=key_slot)
    skip_item((scratch.v_ready, scratch.v_used), slot=value_slot)


def wait_for_slot(used, slot, reused) -> None:
    """Wait until the last tile in `slot` has been used, if the slot is `reused`."""

    @pl.when(reused)
    def _():
        plgpu.barrier_wait(used.at[slot])


def copy_tiles(
    copy_item: Callable[[], None],
    copy_visited: Callable[[Any], None],
    state: WorkState,
    count: Array,
    tiling: Tiling,
) -> tuple[Array, Array]:
    """Copy an item of queries and the `count` tiles that it visits. Return `count` and 0.

    With room for one item only, the first visited tiles are copied before the item, because they
    need not wait until the previous item is stored.
    """
    early = 0
    if tiling.items == 1:
        free = min(tiling.both_stages)
        early = jnp.where(state.items_done > 0, jnp.minimum(count, free), 0)
    pl.loop(0, early)(copy_visited)
    copy_item()
    pl.loop(early, count)(copy_visited)
    return count, jnp.int32(0)


def scale_sums(q_s, dq: Array, parts: int) -> Array:
    """Return the cotangent of the scale, summed over the keys of each row, where logits are linear.

    It is the sum of ds raw over keys. With raw = q_i k_j' and `dq`, the sum of ds k_j, that is
    q_i dq. Where a row sees nothing, its query may be NaN.
    """
    q = load_tile(q_s, parts)
    return jnp.where(dq == 0.0, 0.0, q * dq).sum(axis=1)


def row_sums(x_s, y_s, parts: int) -> Array:
    """Return the sum of x y for each row of two tiles in shared memory."""
    return (load_tile(x_s, parts) * load_tile(y_s, parts)).sum(axis=1)


def token_vectors(slots: TokenVectors, query_slot, key_slot) -> TokenVectors:
    """Return the token vectors of one tile of queries and one tile of keys."""
    by_query, by_key = slots
    return tuple(x.at[query_slot] for x in by_query), tuple(x.at[key_slot] for x in by_key)


def transposed_tile(
    problem: Problem,
    work: KeyWork,
    tiling: Tiling,
    n,
    group,
    numbers: HeadNumbers,
    vectors: TokenVectors,
) -> ScoreTile:
    """Return the tile of warpgroup `group`'s keys and the n-th visited tile of queries."""
    first = work.visits.tile(n) * tiling.tile_size, work.col + group * ROWS
    shape = ROWS, tiling.tile_size
    return ScoreTile(
        problem, shape, first, work.mask_inputs, work.scalars, numbers, vectors, query_dim=1
    )


def zero_padding(x: Array, shape: CallSizes, work: KeyWork, group) -> Array:
    """Zero the rows of dk or dv of keys that only pad the last tile: their p may overflow."""
    if shape.S % ROWS == 0:
        return x
    return jnp.where(positions(work.col + group * ROWS, (ROWS, x.shape[1]), 0) < shape.S, x, 0.0)
