"""What a block does that stays: item after item, and once more those of which a row failed.

An item is a tile of queries, or of keys, with all that it sees.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.mosaic import any_of, multiprocessors, plgpu, sync

ROWS = 64  # of an item, of each warpgroup that computes
BITS = 16  # items n, n + BITS, ... are done again together; few enough for a float32


def persistent_blocks(items: int) -> int:
    return min(items, multiprocessors())


class WorkState(NamedTuple):
    """One item that is done."""

    first: bool  # or done again, for a row of it failed
    online: Any  # done a third time: in the forward, all its keys with a running maximum
    items: Any  # that were done before
    visits: Any  # and tiles that they visited


class PersistentLoop(NamedTuple):
    """What one of `blocks` does of `total` items: there and back, for those that take longest come first."""

    total: int
    blocks: int
    block: Array
    # (an item's index, Turn): tiles visited, and 1 if a row failed
    do: Callable[..., tuple[Array, Array]]

    @property
    def mine(self) -> Array:
        whole = self.total // self.blocks
        return whole + (self._place(whole) < self.total - whole * self.blocks).astype(jnp.int32)

    def _place(self, n) -> Array:
        return jnp.where(
            lax.rem(jnp.int32(n), jnp.int32(2)) == 1, self.blocks - 1 - self.block, self.block
        )

    def __call__(self, n, turn: WorkState):
        return self.do(n * self.blocks + self._place(n), turn)


def any_failed(failed_s, rows: Array) -> Array:
    """1 if one of `rows` is above 0, which `failed_s` then holds."""
    failed_s[...] = rows
    return any_of(failed_s).astype(jnp.int32)


def run_with_retries(
    items: PersistentLoop,
    computes: bool,
    failed_s,
    all_done,
    rings: Sequence = (),
    still: Callable | None = None,
) -> None:
    """All items of a block. Then those of which a row failed, once more; and again, if a row of them is `still()` failing.

    `failed_s`: of each warpgroup that computes its rows that failed. `all_done`: where all meet, and the one that copies.
    `rings`: for that one, (stages, of visits or of items, the barriers for which it waits). The first round is a loop of its
    own, for which the compiler sees that all threads do the same.
    """
    count, bit = items.mine, lambda n: lax.shift_left(jnp.int32(1), lax.rem(n, jnp.int32(BITS)))

    def one(n, state):
        done, visits, failures = state
        more, failed = items(n, WorkState(True, False, done, visits))
        return done + 1, visits + more, failures | failed * bit(n)

    done, visits, failures = lax.fori_loop(0, count, one, (jnp.int32(0),) * 3)
    if computes:
        failed_s[lax.axis_index("warpgroup"), 0] = failures.astype(jnp.float32)
        plgpu.wait_smem_to_gmem(0)  # what is done again is written again
    sync(all_done)
    of_groups = (failed_s[group, 0].astype(jnp.int32) for group in range(failed_s.shape[0]))
    failures = functools.reduce(jnp.bitwise_or, of_groups)
    sync(all_done)  # all have read them
    next_failed = lambda n: lax.while_loop(
        lambda n: (n < count) & (failures & bit(n) == 0), lambda n: n + 1, n
    )

    def again(state):
        n, online, done, visits = state
        more, _ = items(n, WorkState(False, online, done, visits))
        sync(all_done)
        once_more = jnp.bool_(False) if still is None else ~online & still()
        sync(all_done)
        n = lax.cond(once_more, lambda: n, lambda: next_failed(n + 1))
        return n, once_more, done + 1, visits + more

    first = lax.cond(failures > 0, lambda: next_failed(jnp.int32(0)), lambda: count)
    _, _, done, visits = lax.while_loop(
        lambda state: state[0] < count, again, (first, jnp.bool_(False), done, visits)
    )
    if not computes:
        for stages, of_visits, barriers in rings:
            drain(visits if of_visits else done, stages, barriers)


def skip_item(*rings, at) -> None:
    """What a warpgroup has no part in, it only waits for: a barrier counts no arrival for a copy that has not begun."""
    for there, used in rings:
        plgpu.barrier_wait(there.at[at])
        plgpu.barrier_arrive(used.at[at])


def drain(total, stages: int, barriers) -> None:
    """Waits for what was used last: else a barrier would end with an open phase."""

    @pl.loop(jnp.maximum(total - stages, 0), total)
    def _(n):
        for barrier in barriers:
            plgpu.barrier_wait(barrier.at[lax.rem(n, jnp.int32(stages))])
