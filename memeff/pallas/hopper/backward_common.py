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

from memeff.logits import LOG2_E, logits_base2, logits_from_dots
from memeff.pallas.hopper.mosaic import WGMMA, plgpu, positions, sync
from memeff.pallas.hopper.persistent import ROWS, WorkState, any_failed, persistent_blocks
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.scheduler import (
    CallSizes,
    KeyWork,
    TileOrder,
    balanced_order,
    cache_order,
)
from memeff.pallas.hopper.score_tile import ScoreTile, TokenVectors
from memeff.problem import LogitParams, Problem

# positions an item visits at most where blocks stay in causal order; of longer ones, beginnings
# cost less
STAYS = 2000
BEGINS = 2  # tiles that could be visited while a block goes from one item to the next


def float16_lift(dtype) -> float:
    """Return how many bits larger p and ds are in products than they are."""
    return 8.0 if dtype == jnp.float16 else 0.0


def undo_lift(x: Array, dtype, turn: "WorkState | None" = None) -> Array:
    """Return a sum of them as it is without `lift`, which what is done again has not."""
    up = float16_lift(dtype) if turn is None or turn.first else 0.0
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
        _, pull = jax.vjp(
            lambda raw: logits_from_dots(self.problem, raw, LogitParams(), None), jnp.float32(0)
        )
        return pull(jnp.float32(1))[0]

    def probabilities(self, raw: Array, lse: Array, pairs: ScoreTile, keep: Array | None):
        """p, and what makes draw (but for its slope) and cotangents of `pairs.terms()` of dp + delta; `lse` is as raw."""
        at = pairs.places(self.problem.score_fn)
        s, pull = jax.vjp(
            lambda raw, terms: logits_base2(self.problem, raw, terms, keep, at), raw, pairs.terms()
        )
        p = jnp.exp2(s - lse)

        def draw(p, dp):
            ds, of_terms = p * dp, LogitParams()
            if not self.linear:
                ds, of_terms = pull(ds * (1 / LOG2_E))
            hide = lambda x: x if keep is None else jnp.where(keep, x, 0.0)
            return hide(ds), tuple(map(hide, of_terms.score))

        return p, draw


def count_score_gradients(problem: Problem) -> int:
    """How much of what moves `score_fn` has a gradient."""
    score_fn: Any = problem.score_fn
    return 0 if score_fn is None else len(score_fn.moving)


def not_finite(failed_s, turn: WorkState, *sums) -> Array:
    """1 if, in the first round, some row of these sums is not finite."""
    if not turn.first:
        return jnp.int32(0)
    bad = [jnp.where(jnp.abs(x) < jnp.inf, 0.0, 1.0).max(axis=1) for x in sums]
    return any_failed(failed_s, functools.reduce(jnp.maximum, bad))


def choose_blocks(
    problem: Problem, scalars: Scalars, visited: np.ndarray, size: int, heads: int, bytes_read: int
) -> tuple[int, TileOrder]:
    """How many there are, and in which order they do the items of `heads`, each of which reads so many bytes."""
    items, causal = heads * visited.size, problem.right is not None
    # how long items take
    unknown = any(
        x is not None for x in (scalars.q_lengths, scalars.kv_lengths, scalars.q_segments)
    )
    if unknown or causal and visited.mean() * size > STAYS:
        return items, cache_order(heads, bytes_read) if causal else TileOrder()
    return persistent_blocks(items), balanced_order(
        heads, BEGINS + visited, persistent_blocks(items)
    ) if causal else TileOrder()


def copy_tiles(
    own: Callable[[], None],
    others: Callable[[Any], None],
    turn: WorkState,
    count: Array,
    tiling: Tiling,
):
    """Of what an item of queries has, and of the `count` tiles that it visits; what `Items.do` returns.

    Where there is room for one item only, keys come before the next one: they need not wait until the last one is stored.
    """
    begun = (
        jnp.where(turn.items > 0, jnp.minimum(count, tiling.stages), 0) if tiling.items == 1 else 0
    )
    pl.loop(0, begun)(others)
    own()
    pl.loop(begun, count)(others)
    return count, jnp.int32(0)


def row_sums(x, y) -> Array:
    """Of x times y, tiles in shared memory."""
    x, y = (plgpu.load(ref, layout=WGMMA).astype(jnp.float32) for ref in (x, y))
    return (x * y).sum(axis=1)


def clean_operands(shared, good, failed_s, group, all_here) -> None:
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
            sync(all_here)

            @pl.when(group == 0)
            def _():
                here[...] = jnp.where(good(load(), at[0]), load(), 0.0).astype(shared.dtype)
                plgpu.commit_smem()

            sync(all_here)

    lax.fori_loop(0, rows * cols, part, None)


def transposed(
    problem: Problem, here: KeyWork, tiling: Tiling, n, group, numbers, marks: TokenVectors
) -> ScoreTile:
    """Of warpgroup `group`'s keys and of the n-th tile of queries that is visited."""
    first = here.visits.tile(n) * tiling.others, here.col + group * ROWS
    return ScoreTile(
        problem, (ROWS, tiling.others), first, here.sight, here.scalars, numbers, marks, query_dim=1
    )


def existing(x: Array, shape: CallSizes, here: KeyWork, group) -> Array:
    """Return dk or dv of warpgroup `group`'s keys, with 0 for what only pads the last tile: its p may overflow."""
    if shape.S % ROWS == 0:
        return x
    return jnp.where(positions(here.col + group * ROWS, (ROWS, x.shape[1]), 0) < shape.S, x, 0.0)
