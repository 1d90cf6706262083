"""Find the tiles that a thread block visits, and their order: masked ones first.

Tiles of queries that see keys are the mirror image of tiles of keys that queries see.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.masking import key_range
from memeff.pallas.hopper.scalars import Scalars
from memeff.problem import Problem


class TileRange(NamedTuple):
    """Of `size` positions each; tiles of which some pair is hidden come first."""

    low: Array  # the first tile
    high: Array  # behind the last
    left: Array  # so many masked ones begin the range,
    right: Array  # and so many end it
    covers: Array  # does each row that sees something see some of the last masked ones?
    # of those without a mask the one that comes first, before what is on its left; None: the last
    near: Array | None = None

    def within(self, first, behind, alone, size: int) -> "TileRange":
        """Of tiles of `size`, those from position `first` to `behind`; all with masks, unless what sees them is `alone`."""
        low = jnp.maximum(self.low, lax.div(first, jnp.int32(size)))
        high = jnp.maximum(low, jnp.minimum(self.high, _up(behind, size)))
        whole_low = jnp.clip(jnp.maximum(self.low + self.left, _up(first, size)), low, high)
        whole_high = jnp.clip(
            jnp.minimum(self.high - self.right, lax.div(behind, jnp.int32(size))), whole_low, high
        )
        whole_low, whole_high = (jnp.where(alone > 0, x, low) for x in (whole_low, whole_high))
        return TileRange(low, high, whole_low - low, high - whole_high, jnp.bool_(False))

    def all_masked(self) -> "TileRange":
        """With a mask of which no more is known: from the last, for queries before it see the others."""
        return self._replace(left=jnp.int32(0), right=self.total, covers=jnp.bool_(False))

    def nearest_first(self, position, size: int) -> "TileRange":
        """Of those without a mask, the one of `size` that has `position`, or is the next to it."""
        of_position = lax.div(jnp.maximum(position, 0), jnp.int32(size))
        near = jnp.clip(of_position, self.low + self.left, self.high - self.right - 1)
        return self._replace(near=near, covers=jnp.bool_(False))

    def hidden(self, part: "TileRange") -> Array:
        """So many of the first visits `part`, of some of these rows, does not see."""
        none = jnp.where(
            part.high <= part.low, self.masked, jnp.clip(self.high - part.high, 0, self.masked)
        )
        return jnp.where(self.left > 0, 0, none)

    @property
    def total(self) -> Array:
        return self.high - self.low

    @property
    def masked(self) -> Array:
        return self.left + self.right

    def tile(self, n: Array) -> Array:
        """The n-th that is visited: what is masked on the right, from there, then on the left, then the others."""
        whole = self.high - 1 - (n - self.left)
        if self.near is not None:
            whole = self.near - (n - self.masked)
            whole = jnp.where(whole < self.low + self.left, whole + self.total - self.masked, whole)
        return jnp.where(
            n < self.right,
            self.high - 1 - n,
            jnp.where(n < self.masked, self.low + n - self.right, whole),
        )


class TileList(NamedTuple):
    """Tiles that a block mask leaves, one by one, in the place of `Visits`: masked ones first, too."""

    table: Any  # of `with_lists`
    start: Array
    masked: Array
    total: Array

    @classmethod
    def of(cls, table, own) -> "TileList":
        return cls(table, *(table[3 * own + i] for i in range(3)))

    @property
    def right(self) -> Array:
        return jnp.int32(0)

    @property
    def covers(self) -> Array:
        return jnp.bool_(False)

    def tile(self, n: Array) -> Array:
        return self.table[self.start + n]


LARGEST_TABLE = 2**24  # numbers; of more tiles the mask alone decides


def with_lists(
    problem: Problem, scalars: "Scalars", lengths, sides: tuple[int, int], keys: bool = False
) -> "Scalars":
    """With the tiles of `sides` that each tile of queries (or of `keys`) visits, if there is a block mask."""
    if problem.blocks is None:
        return scalars
    some, every = problem.blocks.of_tiles(*sides)
    (T, S), (t, c) = lengths, sides
    row, col = np.arange(0, T, t)[:, None], np.arange(0, S, c)
    last, end = np.minimum(row + t, T) - 1, np.minimum(col + c, S) - 1
    some_from, some_to, all_from, all_to = key_range(problem, problem.q_offset, row, last)
    if some_from is not None:
        some, every = some & (some_from <= end), every & (all_from <= col)
    if some_to is not None:
        some, every = some & (col < some_to), every & (end < all_to)
    # Behind the end of what is visited nothing is seen; nor do blocks know of lengths and segments.
    every = every & ((row + t <= T) if keys else (col + c <= S))
    if any(x is not None for x in (scalars.q_lengths, scalars.kv_lengths, scalars.q_segments)):
        every = np.zeros_like(every)
    return scalars._replace(listed=_table(some, every, keys))


def _table(some: np.ndarray, every: np.ndarray, keys: bool) -> Array | None:
    """For each tile where its list begins, how many of it are masked, and how many there are; then the lists."""
    some, every = (x.T if keys else x for x in (some, every))
    lists = [
        np.concatenate([np.flatnonzero(x & ~y), np.flatnonzero(x & y)])
        for x, y in zip(some, every, strict=True)
    ]
    counts = np.array([len(x) for x in lists], np.int64)
    if 3 * len(lists) + counts.sum() > LARGEST_TABLE:
        return None
    starts = 3 * len(lists) + np.cumsum(counts) - counts
    head = np.stack([starts, (some & ~every).sum(1), counts], 1)
    return jnp.asarray(np.concatenate([head.ravel(), *lists]).astype(np.int32))


def keys_seen(problem: Problem, offset, first, last, ends, size: int) -> TileRange:
    """Tiles of keys that queries `first` to `last` see; `ends`: how many queries and keys there are."""
    return _visits(key_range(problem, offset, first, last), first, last, ends, size)


def queries_seeing(problem: Problem, offset, first, last, ends, size: int) -> TileRange:
    """Tiles of queries that see keys `first` to `last`: the window mirrored."""
    q_end, kv_end = ends
    return _visits(
        key_range(_mirrored(problem), -offset, first, last), first, last, (kv_end, q_end), size
    )


def _mirrored(problem: Problem) -> Problem:
    return dataclasses.replace(
        problem, left=problem.right, right=problem.left, q_offset=-problem.q_offset
    )


def tiles_visited(
    problem: Problem, lengths: tuple[int, int], own: int, size: int, keys: bool = False
) -> np.ndarray:
    """Of `size` keys by each tile of `own` queries, the last first; or of queries by each tile of keys, the first first. As
    far as it is known before offsets, lengths and segments are.
    """
    (length, other), problem = (lengths[::-1], _mirrored(problem)) if keys else (lengths, problem)
    first = np.arange(-(-length // own)) * own + problem.q_offset
    start = np.zeros_like(first) if problem.left is None else first - problem.left
    end = np.full_like(first, other) if problem.right is None else first + own + problem.right
    found = np.maximum(-(-np.clip(end, 0, other) // size) - np.clip(start, 0, other) // size, 0)
    return found if keys else found[::-1]


def _visits(window, first, last, ends, size: int) -> TileRange:
    some_from, some_to, all_from, all_to = window
    own_end, end = (jnp.asarray(x, jnp.int32) for x in ends)
    clip = lambda x, default: default if x is None else jnp.clip(x, 0, end)
    zero = jnp.int32(0)
    low, high = lax.div(clip(some_from, zero), jnp.int32(size)), _up(clip(some_to, end), size)
    high = jnp.where((first < own_end) & (clip(some_from, zero) < end), jnp.maximum(low, high), low)
    whole_low = jnp.clip(_up(clip(all_from, zero), size), low, high)
    until = clip(all_to, end)
    whole_high = jnp.clip(lax.div(until, jnp.int32(size)), whole_low, high)
    whole_low, whole_high = (jnp.where(last >= own_end, low, x) for x in (whole_low, whole_high))
    return TileRange(low, high, whole_low - low, high - whole_high, until > whole_high * size)


def _up(x, size: int) -> Array:
    """How many tiles hold `x`."""
    return lax.div(x + (size - 1), jnp.int32(size))
