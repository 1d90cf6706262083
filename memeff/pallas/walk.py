"""Which tiles a block visits, and in which order: masked ones first. Hides that keys over queries is the mirror image."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.problem import Problem, Sight, tile_range


class Visits(NamedTuple):
    """Of `size` positions each; tiles of which some pair is hidden come first."""

    low: Array  # the first tile
    high: Array  # behind the last
    left: Array  # so many masked ones begin the range,
    right: Array  # and so many end it
    covers: Array  # does each row that sees something see some of the last masked ones?
    near: Array | None = None  # of those without a mask the one that comes first, before what is on its left; None: the last

    def within(self, first, behind, alone, size: int) -> "Visits":
        """Of tiles of `size`, those from position `first` to `behind`; all with masks, unless what sees them is `alone`."""
        low = jnp.maximum(self.low, lax.div(first, jnp.int32(size)))
        high = jnp.maximum(low, jnp.minimum(self.high, _up(behind, size)))
        whole_low = jnp.clip(jnp.maximum(self.low + self.left, _up(first, size)), low, high)
        whole_high = jnp.clip(jnp.minimum(self.high - self.right, lax.div(behind, jnp.int32(size))), whole_low, high)
        whole_low, whole_high = (jnp.where(alone > 0, x, low) for x in (whole_low, whole_high))
        return Visits(low, high, whole_low - low, high - whole_high, jnp.bool_(False))

    def all_masked(self) -> "Visits":
        """With a mask of which no more is known: from the last, for queries before it see the others."""
        return self._replace(left=jnp.int32(0), right=self.total, covers=jnp.bool_(False))

    def nearest_first(self, position, size: int) -> "Visits":
        """Of those without a mask, the one of `size` that has `position`, or is the next to it."""
        of_position = lax.div(jnp.maximum(position, 0), jnp.int32(size))
        near = jnp.clip(of_position, self.low + self.left, self.high - self.right - 1)
        return self._replace(near=near, covers=jnp.bool_(False))

    def hidden(self, part: "Visits") -> Array:
        """So many of the first visits `part`, of some of these rows, does not see."""
        none = jnp.where(part.high <= part.low, self.masked, jnp.clip(self.high - part.high, 0, self.masked))
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
        return jnp.where(n < self.right, self.high - 1 - n, jnp.where(n < self.masked, self.low + n - self.right, whole))


class Listed(NamedTuple):
    """Tiles that a block mask leaves, one by one, in the place of `Visits`: masked ones first, too."""

    table: Any  # of `with_lists`
    start: Array
    masked: Array
    total: Array

    @classmethod
    def of(cls, table, own) -> "Listed":
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


def with_lists(problem: Problem, scalars: "Scalars", lengths, sides: tuple[int, int], keys: bool = False) -> "Scalars":
    """With the tiles of `sides` that each tile of queries (or of `keys`) visits, if there is a block mask."""
    if problem.blocks is None:
        return scalars
    some, every = problem.blocks.of_tiles(*sides)
    (T, S), (t, c) = lengths, sides
    row, col = np.arange(0, T, t)[:, None], np.arange(0, S, c)
    last, end = np.minimum(row + t, T) - 1, np.minimum(col + c, S) - 1
    some_from, some_to, all_from, all_to = tile_range(problem, problem.q_offset, row, last)
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
    lists = [np.concatenate([np.flatnonzero(x & ~y), np.flatnonzero(x & y)]) for x, y in zip(some, every, strict=True)]
    counts = np.array([len(x) for x in lists], np.int64)
    if 3 * len(lists) + counts.sum() > LARGEST_TABLE:
        return None
    starts = 3 * len(lists) + np.cumsum(counts) - counts
    head = np.stack([starts, (some & ~every).sum(1), counts], 1)
    return jnp.asarray(np.concatenate([head.ravel(), *lists]).astype(np.int32))


def keys_seen(problem: Problem, offset, first, last, ends, size: int) -> Visits:
    """Tiles of keys that queries `first` to `last` see; `ends`: how many queries and keys there are."""
    return _visits(tile_range(problem, offset, first, last), first, last, ends, size)


def queries_seeing(problem: Problem, offset, first, last, ends, size: int) -> Visits:
    """Tiles of queries that see keys `first` to `last`: the window mirrored."""
    q_end, kv_end = ends
    return _visits(tile_range(_mirrored(problem), -offset, first, last), first, last, (kv_end, q_end), size)


def _mirrored(problem: Problem) -> Problem:
    return dataclasses.replace(problem, left=problem.right, right=problem.left, q_offset=-problem.q_offset)


def tiles_visited(problem: Problem, lengths: tuple[int, int], own: int, size: int, keys: bool = False) -> np.ndarray:
    """Of `size` keys by each tile of `own` queries, the last first; or of queries by each tile of keys, the first first. As
    far as it is known before offsets, lengths and segments are.
    """
    (length, other), problem = (lengths[::-1], _mirrored(problem)) if keys else (lengths, problem)
    first = np.arange(-(-length // own)) * own + problem.q_offset
    start = np.zeros_like(first) if problem.left is None else first - problem.left
    end = np.full_like(first, other) if problem.right is None else first + own + problem.right
    found = np.maximum(-(-np.clip(end, 0, other) // size) - np.clip(start, 0, other) // size, 0)
    return found if keys else found[::-1]


def _visits(window, first, last, ends, size: int) -> Visits:
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
    return Visits(low, high, whole_low - low, high - whole_high, until > whole_high * size)


def _up(x, size: int) -> Array:
    """How many tiles hold `x`."""
    return lax.div(x + (size - 1), jnp.int32(size))


class Scalars(NamedTuple):
    """int32 arrays [B], and of tokens [B, T'] and [B, S']; or what a block has of them. None where the call has none.

    Of functions of the user's (see hoisted.py), in int32 and float32: [B, N], [B, T'], [B, S'] and [B, N, X].
    """

    q_offset: Array | None = None
    q_lengths: Array | None = None
    kv_lengths: Array | None = None
    q_segments: Any = None
    kv_segments: Any = None
    of_heads: tuple[Any, ...] = ()
    of_queries: tuple[Any, ...] = ()
    of_keys: tuple[Any, ...] = ()
    of_differences: tuple[Any, ...] = ()
    sinks: Any = None  # [B, N], float32, in bits; only the forward has them
    first: Any = None  # [B, blocks], of `with_ranges`
    behind: Any = None
    alone: Any = None
    listed: Any = None  # of `with_lists`, one for all batch entries and heads

    def of(self, b) -> "Scalars":
        """Of refs: the entries of batch b, and refs of its tokens, heads and blocks."""
        of_batch = "q_offset", "q_lengths", "kv_lengths"
        pick = lambda name, x: x[b] if name in of_batch else x if name == "listed" else jax.tree.map(lambda x: x.at[b], x)
        found: dict[str, Any] = {name: x if x is None else pick(name, x) for name, x in self._asdict().items()}
        return Scalars(**found)

    def like(self, refs: Iterator) -> "Scalars":
        """The next of these in the place of arrays."""
        return jax.tree.map(lambda _: next(refs), self)

    @property
    def by_query(self) -> tuple[Any, ...]:
        """What belongs to queries, segments first."""
        return self.of_queries if self.q_segments is None else (self.q_segments, *self.of_queries)

    @property
    def by_key(self) -> tuple[Any, ...]:
        return self.of_keys if self.kv_segments is None else (self.kv_segments, *self.of_keys)


def with_ranges(scalars: Scalars, lengths: tuple[int, int], size: int, keys: bool = False) -> Scalars:
    """Where segments are in order, what a block of `size` queries (or `keys`) may see lies from `first` to `behind`; if its
    own are `alone`, of one segment, they see all of that.
    """
    if scalars.q_segments is None or scalars.kv_segments is None:
        return scalars
    sides = [scalars.q_segments[:, : lengths[0]], scalars.kv_segments[:, : lengths[1]]]
    own, other = reversed(sides) if keys else sides
    own = jnp.pad(own, [(0, 0), (0, -own.shape[1] % size)], mode="edge").reshape(own.shape[0], -1, size)
    lowest, highest = own.min(axis=2), own.max(axis=2)
    count = lambda which: which.sum(axis=2, dtype=jnp.int32)
    in_order = (other[:, 1:] >= other[:, :-1]).all(axis=1, keepdims=True)
    first = jnp.where(in_order, count(other[:, None] < lowest[..., None]), 0)
    behind = jnp.where(in_order, count(other[:, None] <= highest[..., None]), other.shape[1])
    return scalars._replace(first=first, behind=behind, alone=(in_order & (lowest == highest)).astype(jnp.int32))


class Shape(NamedTuple):
    B: int
    T: int
    S: int
    K: int
    G: int


class Order(NamedTuple):
    """Of all tiles of all heads: the heads of a `section` tile by tile, then those of the next; but the last `rest` tiles of
    each, the short ones in causal order, when all others are done.
    """

    section: int = 1
    rest: int = 0


L2 = 32 * 2**20  # bytes that stay in the cache of 50 MiB that H100 and H200 have
BALANCED = 0.98  # of the time that blocks have, what they work


def place(count: int, tiles: int, order: Order, late: bool, index) -> tuple[Any, Any]:
    """Which of `count` heads, and which of its `tiles`, is done at `index`; the first is the last if `late`."""
    section, rest = (jnp.int32(n) for n in order)
    done = count * (tiles - order.rest)
    of_section, head = lax.div(index, section), lax.rem(index, section)
    of_section, tile = lax.div(of_section, tiles - rest), lax.rem(of_section, tiles - rest)
    head = of_section * section + head
    if order.rest:
        behind = index - done
        head = jnp.where(behind < 0, head, lax.rem(behind, jnp.int32(count)))
        tile = jnp.where(behind < 0, tile, tiles - rest + lax.div(behind, jnp.int32(count)))
    return head, tiles - 1 - tile if late else tile


def cached_order(count: int, bytes_read: int) -> Order:
    """As many heads together as fit into the cache, if each reads so many bytes: for blocks that begin when others end."""
    return Order(max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or n * bytes_read <= L2)))


def balanced_order(count: int, times: np.ndarray, blocks: int) -> Order:
    """With which `blocks` that stay have equally much to do; of those, the one with the fewest heads together, which share
    what they read. `times` of the tiles of a head, in the order of `place`; blocks take them there and back.
    """

    def worked(section: int, rest: int) -> float:
        tiles = times.size - rest
        load = np.concatenate(
            [np.tile(np.repeat(times[:tiles], section), count // section), np.repeat(times[tiles:], count)]
        )
        turn, block = np.divmod(np.arange(load.size), blocks)
        found = np.bincount(np.where(turn % 2 == 1, blocks - 1 - block, block), load, blocks)
        return found.mean() / found.max()

    best = 0.0, Order()
    for section in (n for n in range(1, min(count, 64) + 1) if count % n == 0):
        for rest in sorted({times.size * n // 16 for n in range(16)}):
            best = max(best, (worked(section, rest), Order(section, rest)), key=lambda found: found[0])
            if best[0] >= BALANCED:
                return best[1]
    return best[1]


def ends(shape: Shape, scalars: Scalars, keys: int) -> tuple[tuple[Any, Any], Sight]:
    """How many queries and keys there are, and who sees whom where tiles have `keys` keys."""
    q_end = shape.T if scalars.q_lengths is None else jnp.minimum(scalars.q_lengths, shape.T)
    kv_end = shape.S if scalars.kv_lengths is None else jnp.minimum(scalars.kv_lengths, shape.S)
    hides = scalars.kv_lengths is not None or shape.S % keys != 0
    return (q_end, kv_end), Sight(scalars.q_offset, scalars.q_lengths, kv_end if hides else None)


class Place(NamedTuple):
    b: Array
    n: Array  # query head
    k: Array  # key head
    row: Array  # the first query
    sight: Sight
    visits: Visits | Listed
    scalars: Scalars
    hidden: Callable[[Any, int], Any]  # so many of the first visits, of which `count` queries from `first` on see nothing


def find_place(problem: Problem, shape: Shape, scalars: Scalars, rows: int, keys: int, order: Order, index) -> Place:
    """Of the `index`-th tile of `rows` queries; heads of a group, which share keys, are neighbours."""
    late = problem.right is not None
    head, tile = place(shape.B * shape.K * shape.G, -(-shape.T // rows), order, late, index)
    b, n = lax.div(head, jnp.int32(shape.K * shape.G)), lax.rem(head, jnp.int32(shape.K * shape.G))
    scalars = scalars.of(b)
    all_ends, sight = ends(shape, scalars, keys)
    row = tile * rows
    # Rows behind the last query see what they like: nobody stores them.
    offset = problem.q_offset if scalars.q_offset is None else scalars.q_offset
    seen = lambda first, last: keys_seen(problem, offset, first, jnp.minimum(last, shape.T - 1), all_ends, keys)
    visits = seen(row, row + rows - 1)
    if scalars.q_segments is not None:
        visits = visits.within(scalars.first[tile], scalars.behind[tile], scalars.alone[tile], keys)
    visits = _of_mask(problem, scalars, tile, visits)
    if problem.score_fn is not None and problem.right is None and isinstance(visits, Visits) and problem.mask_fn is None:
        visits = visits.nearest_first(row + rows // 2 + offset, keys)
    may = visits if keys < rows and scalars.q_segments is None and isinstance(visits, Visits) else None
    hidden = lambda first, count: may.hidden(seen(first, first + count - 1)) if may is not None else 0
    return Place(b, n, lax.div(n, jnp.int32(shape.G)), row, sight, visits, scalars, hidden)


def _of_mask(problem: Problem, scalars: Scalars, own, visits: Visits) -> Visits | Listed:
    if scalars.listed is not None:
        return Listed.of(scalars.listed, own)
    return visits if problem.mask_fn is None else visits.all_masked()


def some_whole(problem: Problem, scalars: Scalars) -> bool:
    """May there be tiles without masks?"""
    return problem.mask_fn is None or scalars.listed is not None


class KeysPlace(NamedTuple):
    b: Array
    k: Array
    col: Array  # the first key
    sight: Sight
    visits: Visits | Listed  # of one query head
    scalars: Scalars


def find_keys(problem: Problem, shape: Shape, scalars: Scalars, cols: int, queries: int, order: Order, index) -> KeysPlace:
    """Of the `index`-th tile of `cols` keys."""
    head, tile = place(shape.B * shape.K, -(-shape.S // cols), order, False, index)
    b, k = lax.div(head, jnp.int32(shape.K)), lax.rem(head, jnp.int32(shape.K))
    scalars = scalars.of(b)
    all_ends, sight = ends(shape, scalars, 1)  # keys behind the last are not stored
    if shape.T % queries:  # rows that only pad the last tile of queries see nothing: NaN in a key would reach its dk and dv
        sight = sight._replace(q_lengths=all_ends[0])
    col = tile * cols
    last = jnp.minimum(col + cols, shape.S) - 1
    offset = problem.q_offset if scalars.q_offset is None else scalars.q_offset
    visits = queries_seeing(problem, offset, col, last, all_ends, queries)
    if scalars.q_segments is not None:
        visits = visits.within(scalars.first[tile], scalars.behind[tile], scalars.alone[tile], queries)
    visits = _of_mask(problem, scalars, tile, visits)
    return KeysPlace(b, k, col, sight, visits, scalars)
