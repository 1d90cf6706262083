"""Find the tiles that a thread block visits, and their order: masked tiles come first.

The tiles of queries that see keys are the mirror image of the tiles of keys that queries see.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.masking import key_range
from memeff.pallas.hopper.scalars import Scalars
from memeff.problem import Problem


class TileRange(NamedTuple):
    """A range of tiles; those with a hidden pair lie at its ends and are visited first."""

    first: Array  # first tile
    end: Array  # behind the last tile
    masked_left: Array  # number of masked tiles that begin the range
    masked_right: Array  # number of masked tiles that end it
    # True if each row that sees a key sees one in the masked tiles on the right
    right_covers_rows: Array
    near: Array | None = None  # tile without a mask that is visited first; None: the last one

    def within(self, visible, one_segment, size: int) -> "TileRange":
        """Keep the tiles, of `size` positions, that hold some from `visible[0]` to `visible[1]`.

        All of them are masked, unless the tokens that see them have `one_segment`.
        """
        start, stop = visible
        first = jnp.maximum(self.first, lax.div(start, jnp.int32(size)))
        end = jnp.minimum(self.end, _tiles(stop, size))
        end = jnp.maximum(first, end)
        whole_first = self.first + self.masked_left
        whole_first = jnp.maximum(whole_first, _tiles(start, size))
        whole_first = jnp.clip(whole_first, first, end)
        whole_end = self.end - self.masked_right
        whole_end = jnp.minimum(whole_end, lax.div(stop, jnp.int32(size)))
        whole_end = jnp.clip(whole_end, whole_first, end)
        whole_first = jnp.where(one_segment > 0, whole_first, first)
        whole_end = jnp.where(one_segment > 0, whole_end, first)
        return TileRange(first, end, whole_first - first, end - whole_end, jnp.bool_(False))

    def all_masked(self) -> "TileRange":
        """Mark every tile as masked. Tiles are visited from the last to the first."""
        return self._replace(
            masked_left=jnp.int32(0), masked_right=self.total, right_covers_rows=jnp.bool_(False)
        )

    def nearest_first(self, position, size: int) -> "TileRange":
        """Begin the tiles without a mask, of `size`, with the one nearest to `position`."""
        tile = lax.div(jnp.maximum(position, 0), jnp.int32(size))
        whole_first = self.first + self.masked_left
        whole_last = self.end - self.masked_right - 1
        near = jnp.clip(tile, whole_first, whole_last)
        return self._replace(near=near, right_covers_rows=jnp.bool_(False))

    def with_first_masked(self) -> "TileRange":
        """Mark the first tile as masked, so that it is visited before those without a mask."""
        whole = self.total - self.masked_right
        return self._replace(masked_left=jnp.maximum(self.masked_left, jnp.minimum(whole, 1)))

    def count_hidden(self, part: "TileRange") -> Array:
        """Return how many of the first visits lie outside `part`, the range of some of the rows."""
        outside = jnp.clip(self.end - part.end, 0, self.masked_right)
        return jnp.where(part.end <= part.first, self.masked, outside)

    @property
    def total(self) -> Array:
        """The number of tiles."""
        return self.end - self.first

    @property
    def masked(self) -> Array:
        """The number of masked tiles."""
        return self.masked_left + self.masked_right

    def tile(self, n: Array) -> Array:
        """Return the n-th tile to visit.

        Masked tiles on the right come first, from the last one, then masked tiles on the left, then
        tiles without a mask, from the last one or from `near` downwards.
        """
        whole = self.end - 1 - (n - self.masked_left)
        if self.near is not None:
            whole = self.near - (n - self.masked)
            is_below = whole < self.first + self.masked_left
            from_end = whole + self.total - self.masked
            whole = jnp.where(is_below, from_end, whole)
        is_right = n < self.masked_right
        right = self.end - 1 - n
        is_masked = n < self.masked
        left = self.first + n - self.masked_right
        return jnp.where(is_right, right, jnp.where(is_masked, left, whole))


class TileList(NamedTuple):
    """The tiles that a block mask leaves, instead of a `TileRange`; masked tiles come first."""

    table: Any  # see `_table`
    start: Array
    masked: Array
    total: Array

    @classmethod
    def of(cls, table, tile) -> "TileList":
        """Return the list of `tile`."""
        start, masked, total = (table[3 * tile + i] for i in range(3))
        return cls(table, start, masked, total)

    @property
    def masked_right(self) -> Array:
        """0, because masked tiles are not known to lie on the right."""
        return jnp.int32(0)

    @property
    def right_covers_rows(self) -> Array:
        """False, because a row may see no key in the masked tiles."""
        return jnp.bool_(False)

    def tile(self, n: Array) -> Array:
        """Return the n-th tile to visit."""
        return self.table[self.start + n]


LARGEST_TABLE = 2**24  # numbers; with a larger table every tile would be masked instead


def with_lists(
    problem: Problem,
    scalars: Scalars,
    lengths,
    sides: tuple[int, int],
    keys: bool = False,
) -> Scalars:
    """Add the lists of tiles that a block mask leaves to each tile of queries, or of `keys`.

    `sides` are the rows and columns of a tile. Without a block mask return `scalars`.
    """
    if problem.blocks is None:
        return scalars
    any_visible, all_visible = problem.blocks.visible_tiles(*sides)
    T, S = lengths
    t, c = sides
    row = np.arange(0, T, t)[:, None]
    col = np.arange(0, S, c)
    last_row = np.minimum(row + t, T) - 1
    last_col = np.minimum(col + c, S) - 1
    some_from, some_to, all_from, all_to = key_range(problem, problem.q_offset, row, last_row)
    if some_from is not None:
        any_visible = any_visible & (some_from <= last_col)
        all_visible = all_visible & (all_from <= col)
    if some_to is not None:
        any_visible = any_visible & (col < some_to)
        all_visible = all_visible & (last_col < all_to)
    # Visited positions that only pad a tile are hidden. Blocks know no lengths and no segments.
    is_full = row + t <= T if keys else col + c <= S
    all_visible = all_visible & is_full
    unknown_to_blocks = scalars.q_lengths, scalars.kv_lengths, scalars.q_segments
    if any(x is not None for x in unknown_to_blocks):
        all_visible = np.zeros_like(all_visible)
    if keys:
        any_visible = any_visible.T
        all_visible = all_visible.T
    return scalars._replace(tile_table=_table(any_visible, all_visible))


def _table(any_visible: np.ndarray, all_visible: np.ndarray) -> Array | None:
    """Return the lists of visible tiles [tiles, visited] as one int32 array; None if too long.

    For each tile it has the start of its list, the number of masked tiles in it, and its length.
    Then the lists follow, masked tiles first.
    """
    masked = any_visible & ~all_visible
    whole = any_visible & all_visible
    counts = any_visible.sum(1)
    head_size = 3 * len(any_visible)
    if head_size + counts.sum() > LARGEST_TABLE:
        return None
    starts = head_size + np.cumsum(counts) - counts
    head = np.stack([starts, masked.sum(1), counts], 1)
    parts = [head.ravel()]
    for masked_tiles, whole_tiles in zip(masked, whole, strict=True):
        parts.append(np.flatnonzero(masked_tiles))
        parts.append(np.flatnonzero(whole_tiles))
    table = np.concatenate(parts).astype(np.int32)
    # `custom_partitioning` refuses a constant that is not inside of a jit of its own
    return jax.jit(lambda: jnp.asarray(table))()


def keys_seen(problem: Problem, offset, first, last, ends, size: int) -> TileRange:
    """Return the tiles of `size` keys that queries `first` to `last` see.

    `ends` are the numbers of queries and keys.
    """
    window = key_range(problem, offset, first, last)
    return _tile_range(window, first, last, ends, size)


def queries_seeing(problem: Problem, offset, first, last, ends, size: int) -> TileRange:
    """Return the tiles of `size` queries that see keys `first` to `last`: the window mirrored."""
    q_end, kv_end = ends
    window = key_range(_mirrored(problem), -offset, first, last)
    return _tile_range(window, first, last, (kv_end, q_end), size)


def _mirrored(problem: Problem) -> Problem:
    """Return the problem in which queries and keys have changed places."""
    return dataclasses.replace(
        problem, left=problem.right, right=problem.left, q_offset=-problem.q_offset
    )


def tiles_visited(
    problem: Problem,
    lengths: tuple[int, int],
    item_size: int,
    size: int,
    keys: bool = False,
) -> np.ndarray:
    """Return how many tiles of `size` keys a tile of `item_size` queries visits, the last first.

    With `keys`, return how many tiles of queries each tile of keys visits, the first tile first.
    Only the window counts, because arrays of offsets, lengths and segments are not known yet.
    """
    length, visited_length = lengths
    if keys:
        problem = _mirrored(problem)
        visited_length, length = lengths
    item_count = -(-length // item_size)
    first = np.arange(item_count) * item_size + problem.q_offset
    start = np.zeros_like(first)
    if problem.left is not None:
        start = np.clip(first - problem.left, 0, visited_length)
    end = np.full_like(first, visited_length)
    if problem.right is not None:
        end = np.clip(first + item_size + problem.right, 0, visited_length)
    first_tile = start // size
    end_tile = -(-end // size)
    counts = np.maximum(end_tile - first_tile, 0)
    return counts if keys else counts[::-1]


def _tile_range(window, first, last, ends, size: int) -> TileRange:
    """Return the tiles of `size` in `window`, the result of `key_range` of `first` to `last`.

    `ends` are the numbers of positions on the side of `first`, and on the visited side.
    """
    some_from, some_to, all_from, all_to = window
    own_end = jnp.asarray(ends[0], jnp.int32)
    end = jnp.asarray(ends[1], jnp.int32)
    zero = jnp.int32(0)

    def clip(position, default):
        return default if position is None else jnp.clip(position, 0, end)

    low = lax.div(clip(some_from, zero), jnp.int32(size))
    high = _tiles(clip(some_to, end), size)
    sees_any = (first < own_end) & (clip(some_from, zero) < end)
    high = jnp.where(sees_any, jnp.maximum(low, high), low)
    whole_low = _tiles(clip(all_from, zero), size)
    whole_low = jnp.clip(whole_low, low, high)
    all_to = clip(all_to, end)
    whole_high = lax.div(all_to, jnp.int32(size))
    whole_high = jnp.clip(whole_high, whole_low, high)
    # If `last` is behind the end, all tiles are masked.
    whole_low = jnp.where(last >= own_end, low, whole_low)
    whole_high = jnp.where(last >= own_end, low, whole_high)
    return TileRange(low, high, whole_low - low, high - whole_high, all_to > whole_high * size)


def _tiles(length, size: int) -> Array:
    """Return how many tiles of `size` hold `length` positions."""
    return lax.div(length + (size - 1), jnp.int32(size))
