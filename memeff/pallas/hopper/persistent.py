"""Run a persistent kernel: its thread blocks stay and take work items until none are left.

A work item is a tile of queries, or of keys, together with all tiles that it visits. In each thread
block the consumer warpgroups compute, and one more warpgroup, the producer, copies operands into
shared memory:
  round 1: every item once
  round 2: the items of which a row failed, one by one, with values cleaned of NaN and Inf
A kernel may have two more rounds, which compute in another way (forward.py):
  round 3: in place of round 2 where cleaning cannot mend a row, without cleaning
  round 4: after round 2 or 3 if a row failed again, with cleaning
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.logits import allow_approx_math
from memeff.pallas.hopper.mosaic import (
    Barrier,
    Ref,
    largest_of,
    multiprocessors,
    plgpu,
    sync,
    take_registers,
    warp_specialized_kernel,
)
from memeff.problem import Problem

ROWS = 64  # of an item, for each consumer warpgroup
BITS = 12  # items n, n + BITS, ... share two bits; so few that a float32 holds all bits
# How an item failed: 0 if it did not, 1 if round 2 cannot mend it, or else this.
NEEDS_ROUND_2 = 1 + 2**BITS


def persistent_blocks(items: int) -> int:
    """Return how many thread blocks there are: one a multiprocessor, at most one an item."""
    return min(items, multiprocessors())


class WorkState(NamedTuple):
    """The round that an item is in, and what the thread block has done before it."""

    first_round: bool
    round: Any  # 1, or a scalar of the rounds from 2 on
    items_done: Any  # items done before, in all rounds
    tiles_visited: Any  # tiles that these items visited


class PersistentLoop(NamedTuple):
    """The items of one thread block.

    Thread blocks take one item each in their own order, then in reverse order, and so on. That
    balances the work because long items come first.
    """

    total: int  # items of the kernel
    blocks: int
    block: Array  # index of this thread block
    wanted: Any  # 1, or 0 if no item is to be done
    # (index of an item, WorkState) -> (tiles visited, how it failed)
    do: Callable[..., tuple[Array, Array]]

    @property
    def item_count(self) -> Array:
        """Return the number of items of this thread block."""
        whole = self.total // self.blocks
        has_one_more = self._position(whole) < self.total - whole * self.blocks
        return self.wanted * (whole + has_one_more.astype(jnp.int32))

    def _position(self, n) -> Array:
        """Return the position of this block's n-th item among the n-th items of all blocks."""
        odd = lax.rem(jnp.int32(n), jnp.int32(2)) == 1
        return jnp.where(odd, self.blocks - 1 - self.block, self.block)

    def __call__(self, n, state: WorkState):
        """Do the n-th item of this thread block."""
        return self.do(n * self.blocks + self._position(n), state)


class IfBad(NamedTuple):
    """Results of another kernel, which a kernel computes again, in place, if they are bad."""

    is_bad: Array  # [1] of 1 or 0
    results: tuple[Array, ...]


class Ring(NamedTuple):
    """Slots of shared memory that the producer fills in turn."""

    slots: int
    of_visits: bool  # one slot for each visited tile, or for each item
    used: Sequence[Barrier]  # where consumers report that they have read a slot


class Roles(NamedTuple):
    """The work of the warpgroups of a thread block.

    `consume` and `produce` do their part of an item. They return how many tiles it visits, and how
    it failed in the rows of this warpgroup: 0, 1 or NEEDS_ROUND_2.
    """

    find_work: Callable[[Any], Any]  # from the index of an item to its description
    consume: Callable[[Any, Any, WorkState], tuple[Array, Array]]  # of (warpgroup, work, state)
    produce: Callable[[Any, WorkState], tuple[Array, Array]]  # of (work, state)
    rings: Sequence[Ring]


def run_persistent_kernel(
    name: str,
    problem: Problem,
    operands: Any,
    results: Sequence[jax.ShapeDtypeStruct],
    scratch: Any,
    roles: Callable[[Any, tuple[Ref, ...], Any], Roles],
    *,
    items: int,
    blocks: int,
    consumers: int,
    sums_over_rows: bool = False,
    rounds: int = 2,
    if_bad: IfBad | None = None,
) -> tuple[Array, ...]:
    """Run a persistent kernel over `operands`, a pytree of arrays, and return its results.

    With `if_bad` its results stand for the first ones of the kernel, which does nothing if they are
    good. The host starts it without knowing which they are, so it need not wait for that.
    `scratch` has the types of shared memory, with the `failed_s` and the `all_warpgroups` of
    `run_with_retries`. `roles(operand_refs, result_refs, scratch)` returns those in a thread block.
    """
    arrays, structure = jax.tree.flatten((operands, if_bad and if_bad.is_bad))

    def body(*refs, scratch: Any):
        operand_refs, is_bad_ref = jax.tree.unflatten(structure, refs[: len(arrays)])
        wanted = 1 if is_bad_ref is None else is_bad_ref[0]
        parts = roles(operand_refs, refs[len(arrays) :], scratch)
        meeting = scratch.failed_s, scratch.all_warpgroups
        warpgroup = lax.axis_index("warpgroup")
        block = lax.axis_index("block")

        def loop(do) -> PersistentLoop:
            def do_item(index, state):
                return do(parts.find_work(index), state)

            return PersistentLoop(items, blocks, block, wanted, do_item)

        @pl.when(warpgroup < consumers)
        def _consumer():
            take_registers(consumers, computes=True)
            do = functools.partial(parts.consume, warpgroup)
            run_with_retries(loop(do), True, *meeting, rounds=rounds)

        @pl.when(warpgroup == consumers)
        def _producer():
            take_registers(consumers, computes=False)
            run_with_retries(loop(parts.produce), False, *meeting, parts.rings, rounds)

    kernel = warp_specialized_kernel(
        body,
        name,
        [] if if_bad else results,
        {"scratch": scratch},
        blocks,
        consumers + 1,
        allow_approx_math(problem),
        sums_over_rows=sums_over_rows,
    )
    if if_bad is None:
        return tuple(kernel(*arrays))
    others = [lax.empty(x.shape, x.dtype) for x in results[len(if_bad.results) :]]
    return tuple(pl.run_state(lambda refs: kernel(*arrays, *refs))((*if_bad.results, *others)))


def run_with_retries(
    items: PersistentLoop,
    computes: bool,
    failed_s: Ref,
    all_done: Barrier,
    rings: Sequence = (),
    rounds: int = 2,
) -> None:
    """Do all items of a thread block, and those with a failed row once or twice more.

    `failed_s` [consumers, 64] is above 0 where a row failed. All warpgroups meet at `all_done`.
    `rings` are those of the producer (not `computes`). Round 1 is a loop of its own, because the
    compiler then sees that its bounds are the same for all threads.
    """
    count = items.item_count

    def bit(n):
        return lax.shift_left(jnp.int32(1), lax.rem(n, jnp.int32(BITS)))

    def do_item(n, state):
        done, visits, failures = state
        more, failed = items(n, WorkState(True, 1, done, visits))
        return done + 1, visits + more, failures | failed * bit(n)

    def of_all_consumers(flags):
        """Return the bits that some consumer has set in its `flags`."""
        if computes:
            failed_s[lax.axis_index("warpgroup"), 0] = flags.astype(jnp.float32)
        sync(all_done)
        all_flags = (failed_s[n, 0].astype(jnp.int32) for n in range(failed_s.shape[0]))
        flags = functools.reduce(jnp.bitwise_or, all_flags)
        sync(all_done)  # all have read them
        return flags

    done, visits, failures = lax.fori_loop(0, count, do_item, (jnp.int32(0),) * 3)
    if computes:
        plgpu.wait_smem_to_gmem(0)  # because the next rounds write to the same places
    failures = of_all_consumers(failures)

    def next_failed(n):
        """Return the index of the first failed item from n on."""

        def has_passed(n):
            return (n < count) & (failures & bit(n) == 0)

        return lax.while_loop(has_passed, lambda n: n + 1, n)

    def first_redo(n):
        """Return the first failed item from n on, and its next round."""
        n = next_failed(n)
        needs_round_2 = failures & lax.shift_left(bit(n), jnp.int32(BITS)) != 0
        return n, jnp.where(needs_round_2 | (rounds == 2), 2, 3)

    def redo_item(state):
        n, round, done, visits = state
        more, failed = items(n, WorkState(False, round, done, visits))
        failed = of_all_consumers(failed)
        once_more = (round < rounds) & (failed > 0)
        n, round = lax.cond(once_more, lambda: (n, jnp.int32(4)), lambda: first_redo(n + 1))
        return n, round, done + 1, visits + more

    start = lax.cond(failures > 0, lambda: first_redo(jnp.int32(0)), lambda: (count, jnp.int32(2)))
    _, _, done, visits = lax.while_loop(
        lambda state: state[0] < count, redo_item, (*start, done, visits)
    )
    if not computes:
        for slots, of_visits, used in rings:
            drain(visits if of_visits else done, slots, used)


def any_failed(failed_s: Ref, rows: Array) -> Array:
    """Store `rows`, above 0 where a row failed, to `failed_s`. Return 1 if a row failed."""
    return (largest_failure(failed_s, rows) > 0).astype(jnp.int32)


def largest_failure(failed_s: Ref, rows: Array) -> Array:
    """Store `rows`, above 0 where a row failed, to `failed_s`. Return the largest."""
    failed_s[...] = rows
    return largest_of(failed_s)


def skip_item(*rings, slot) -> None:
    """Wait for `slot` of each ring (ready, used), and release it unread.

    A consumer without work in a tile must still wait, because a barrier does not count an arrival
    before its copy begins.
    """
    for ready, used in rings:
        plgpu.barrier_wait(ready.at[slot])
        plgpu.barrier_arrive(used.at[slot])


def drain(total, slots: int, used: Sequence[Barrier], first_slot: int = 0) -> None:
    """Wait until the last of `total` filled slots are used: no barrier may end in an open phase.

    The slots are numbered from `first_slot` on.
    """

    @pl.loop(jnp.maximum(total - slots, 0), total)
    def _(n):
        for barrier in used:
            plgpu.barrier_wait(barrier.at[first_slot + lax.rem(n, jnp.int32(slots))])
