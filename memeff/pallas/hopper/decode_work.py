"""Split the keys of each sequence into pieces of a fixed length, and hand them to thread blocks.

A piece has `keys_of_split(S)` keys, a function of the capacity S alone, and begins at a multiple of
that. So the sums of a row, and their order, do not depend on the batch that it is in. A work item
is one piece of some key heads of one sequence, for 64 rows of each. Items are found from the
lengths on the device: pieces that nobody sees are no items.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from memeff.masking import MaskInputs
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.scheduler import CallSizes, ends_and_mask
from memeff.pallas.hopper.tile_ranges import TileRange, keys_seen
from memeff.problem import Problem
from memeff.shape import round_up

ROWS = 64  # of an item: the rows of a product's first factor
MERGED_AT_ONCE = 32  # partial results, at most
CONSUMERS = 2
TILE_BYTES = 16384  # of keys, or of values, for one consumer
LARGEST_WIDTH = 128  # of heads
MOST_ROWS_OF_KEYS_FIRST = 32  # of keys of 16 bits: with 64, shared memory is too small
# Of keys in int8, because registers spill with more (and there shared memory is too small):
MOST_ROWS_OF_INTEGERS = 16  # of a query that is split into integers
ROWS_WITH_LONG_TILES = 8  # tiles have twice as many keys as those of 16 bits


def keys_of_split(S: int) -> int:
    """Return the keys of a split for a cache of S keys.

    A split should be long, because each writes a partial result, and so short that one sequence
    fills all multiprocessors. With more than 16k keys a cache has 17 to 32 splits, so with 8 key
    heads, two for each item, one sequence has up to 128 items. Splits of 4096 keys are long enough,
    so caches of more than 128k keys have more splits.
    """
    return min(4096, max(512, 2 ** ((S - 1).bit_length() - 5)))


class Pages(NamedTuple):
    """The pages in which keys and values lie."""

    number: int
    size: int  # tokens


class Cache(NamedTuple):
    """Keys and values in global memory, in pages [P, page, ...] if the sizes have `pages`."""

    key: Any  # [B, S, K, H]
    value: Any  # [B, S, K, D]
    key_scales: Any = None  # [B, K, S], float32, of numbers of 8 bits
    value_scales: Any = None

    @property
    def has_scales(self) -> bool:
        """Return whether keys and values are numbers of 8 bits with scales."""
        return self.key_scales is not None

    def with_heads(self, K: int) -> "Cache":
        """Return arrays with K key heads, each of them one or more neighbouring heads."""
        key, value = (x.reshape(*x.shape[:2], K, -1) for x in (self.key, self.value))
        return self._replace(key=key, value=value)


class DecodeSizes(NamedTuple):
    """The sizes of a call, and of its pieces."""

    call: CallSizes
    tile: int  # keys of a tile
    consumers: int  # warpgroups
    heads: int  # key heads of an item, which consumers visit at the same time
    pages: Pages | None = None  # None: all keys of a sequence are neighbours in memory
    keys_first: bool = False  # keys and values are first factors of products, queries are second
    joined: bool = False  # two key heads of 64 are one of 128 here, whose group is twice as large
    splits_query: bool = False  # into integers (`split_query`), as keys are integers of 8 bits

    @staticmethod
    def of(
        call: CallSizes, H: int, D: int, pages: Pages | None, key_dtype: DTypeLike
    ) -> "DecodeSizes":
        """Return the fastest sizes for these head dims; keys of 8 bits have scales.

        Neighbouring heads are neighbours in memory, and memory is fast where 512 bytes or more are
        read at the same time (H200, 8 x 32k keys, 8 heads of 128: 3.9 TB/s with one head of an
        item, 4.2 with two), and each copy reads 256 neighbouring bytes (H100, 8 heads of 64: 2.97
        TB/s where two are joined, 2.8 where they are not).
        """
        rows = call.G * call.T
        has_scales = jnp.dtype(key_dtype).itemsize == 1
        has_integers = key_dtype == jnp.int8
        joined = H == D == 64 and not has_scales and call.K % 2 == 0
        joined = joined and 2 * rows <= MOST_ROWS_OF_KEYS_FIRST
        if joined:
            call = call._replace(K=call.K // 2, G=2 * call.G)
        width = LARGEST_WIDTH if joined else max(H, D)
        heads = CONSUMERS * (LARGEST_WIDTH // width)
        while call.K % heads:
            heads //= 2
        bytes_of_number = 1 if has_integers and rows <= ROWS_WITH_LONG_TILES else 2
        tile = TILE_BYTES // (bytes_of_number * width * max(1, heads // CONSUMERS))
        few_rows = call.G * call.T <= MOST_ROWS_OF_KEYS_FIRST
        keys_first = has_scales or (few_rows and width == LARGEST_WIDTH)  # else registers spill
        splits_query = has_integers and rows <= MOST_ROWS_OF_INTEGERS
        return DecodeSizes(call, tile, CONSUMERS, heads, pages, keys_first, joined, splits_query)

    @property
    def keys_of_copy(self) -> int:
        """Return how many keys of a tile lie in one page, wherever the tile begins."""
        return self.tile if self.pages is None else math.gcd(self.tile, self.pages.size)

    @property
    def copies(self) -> int:
        """Return the number of copies that bring a tile to shared memory."""
        return self.tile // self.keys_of_copy

    def own_dims(self, width: int) -> int:
        """Return the dims of a head in tiles of keys or values of this width."""
        return width // 2 if self.joined else width

    @property
    def heads_of_consumer(self) -> int:
        """Return the key heads of an item that one consumer computes."""
        return max(1, self.heads // self.consumers)

    @property
    def turns(self) -> int:
        """Return how many consumers share a key head. They visit its tiles in turn."""
        return max(1, self.consumers // self.heads)

    @property
    def rows(self) -> int:
        """Return the rows of a key head: the heads of its group, times the queries."""
        return self.call.G * self.call.T

    @property
    def rows_of_item(self) -> int:
        """Return the rows that an item computes: 64, or of second factors as few as there are."""
        return min(ROWS, round_up(self.rows, 8)) if self.keys_first else ROWS

    @property
    def row_tiles(self) -> int:
        """Return the number of items that these rows need."""
        return -(-self.rows // ROWS)

    @property
    def rows_stored(self) -> int:
        """Return the rows of a partial result: whole tiles, if there are several."""
        return self.rows if self.row_tiles == 1 else self.row_tiles * ROWS

    @property
    def tiles_of_split(self) -> int:
        """Return the number of tiles of keys in a split."""
        return keys_of_split(self.call.S) // self.tile

    @property
    def splits(self) -> int:
        """Return the number of splits of a whole cache."""
        return -(-self.call.S // keys_of_split(self.call.S))

    @property
    def merged_at_once(self) -> int:
        """Return the number of partial results that are merged at once."""
        return min(MERGED_AT_ONCE, round_up(self.splits * self.turns, 8))

    @property
    def parts(self) -> int:
        """Return the number of places for partial results of each row of a whole cache."""
        at_once = self.merged_at_once
        return round_up(self.splits * self.turns, at_once)

    @property
    def items_of_split(self) -> int:
        """Return the number of items of each split of a sequence."""
        return self.call.K // self.heads * self.row_tiles

    @property
    def most_items(self) -> int:
        """Return the number of items of full caches."""
        return self.call.B * self.items_of_split * self.splits

    @property
    def rows_merged(self) -> int:
        """Return the rows of a key head that are merged together: several if splits are few."""
        return min(self.rows, MERGED_AT_ONCE // self.merged_at_once)

    @property
    def merges_of_head(self) -> int:
        """Return the number of merges for the rows of a key head."""
        return -(-self.rows // self.rows_merged)

    @property
    def merges(self) -> int:
        """Return the number of merges of all key heads."""
        return self.call.B * self.call.K * self.merges_of_head


class KeysOfSequence(NamedTuple):
    """The keys that the queries of one batch entry see."""

    b: Array
    tiles: TileRange
    first_split: Array
    end_split: Array
    mask_inputs: MaskInputs
    scalars: Scalars

    @property
    def split_count(self) -> Array:
        """Return the number of splits that hold such keys."""
        return self.end_split - self.first_split

    def is_masked(self, tile) -> Array:
        """Return True if a query may not attend to some key of `tile`."""
        tiles = self.tiles
        whole = (tile >= tiles.first + tiles.masked_left) & (tile < tiles.end - tiles.masked_right)
        return ~whole


def find_keys(problem: Problem, sizes: DecodeSizes, scalars: Scalars, b) -> KeysOfSequence:
    """Return what the queries of batch entry b see."""
    call = sizes.call
    scalars = scalars.of(b)
    ends, mask_inputs = ends_and_mask(call, scalars, sizes.tile)
    offset = problem.q_offset if scalars.q_offset is None else scalars.q_offset
    tiles = keys_seen(problem, offset, jnp.int32(0), call.T - 1, ends, sizes.tile)
    if problem.mask_fn is not None or scalars.q_segments is not None:
        tiles = tiles.all_masked()
    in_split = jnp.int32(sizes.tiles_of_split)
    first = lax.div(tiles.first, in_split)
    end = lax.div(tiles.end + (sizes.tiles_of_split - 1), in_split)
    end = jnp.where(tiles.end > tiles.first, end, first)
    return KeysOfSequence(b, tiles, first, end, mask_inputs, scalars)


class DecodeItem(NamedTuple):
    """A split of the keys of neighbouring key heads, for 64 rows of each."""

    keys: KeysOfSequence
    k: Array  # first key head
    split: Array
    row: Array  # first row
    first: Array  # tile of keys
    end: Array

    @property
    def b(self) -> Array:
        """Return the batch entry."""
        return self.keys.b


class Visits(NamedTuple):
    """The tiles of an item that one consumer visits."""

    heads: tuple[Array, ...]  # key heads
    first: Array  # tile of keys
    step: int  # from a tile to the next
    total: Array
    turn: Array  # of the consumers that share the key head

    def tile(self, n) -> Array:
        """Return the n-th tile."""
        return self.first + n * self.step


def visits_of(sizes: DecodeSizes, item: DecodeItem, consumer) -> Visits:
    """Return the tiles of an item that `consumer` visits.

    Which consumer visits a tile does not depend on where the item begins, so that a row's sums are
    the same in any call.
    """
    turns = jnp.int32(sizes.turns)
    groups = sizes.heads // sizes.heads_of_consumer
    k = item.k + lax.rem(jnp.int32(consumer), jnp.int32(groups)) * sizes.heads_of_consumer
    turn = lax.div(jnp.int32(consumer), jnp.int32(groups))
    # The first tile of the item whose number has the remainder `turn`.
    first = item.first + lax.rem(turn + turns - lax.rem(item.first, turns), turns)
    total = lax.div(jnp.maximum(item.end - first + turns - 1, 0), turns)
    heads = tuple(k + n for n in range(sizes.heads_of_consumer))
    return Visits(heads, first, sizes.turns, total, turn)


class KeyPlace(NamedTuple):
    """The place, in key and value, of keys that are copied together."""

    entry: Any  # along their first dim: a batch entry or a page
    first: Any  # token of that entry
    exists: Any = True  # whether there is such a page; else `entry` is some other one


def place_of_copy(sizes: DecodeSizes, keys: KeysOfSequence, tile, n: int) -> KeyPlace:
    """Return where the keys lie that the n-th copy of a tile brings.

    Behind the last page of a sequence it lies anywhere, because nothing sees it.
    """
    token = tile * sizes.tile + n * sizes.keys_of_copy
    if sizes.pages is None:
        return KeyPlace(keys.b, token)
    count, size = sizes.pages
    table = keys.scalars.page_table
    number = jnp.minimum(lax.div(token, jnp.int32(size)), table.shape[0] - 1)
    page = table[number]
    exists = (page >= 0) & (page < count)
    return KeyPlace(jnp.clip(page, 0, count - 1), lax.rem(token, jnp.int32(size)), exists)


def has_missing_page(sizes: DecodeSizes, keys: KeysOfSequence, tile) -> Array:
    """Return True if some keys of a tile lie in a page that does not exist."""
    exists = jnp.bool_(True)
    for n in range(sizes.copies):
        exists &= place_of_copy(sizes, keys, tile, n).exists
    return ~exists


def for_each_item(
    problem: Problem,
    sizes: DecodeSizes,
    scalars: Scalars,
    blocks: int,
    block,
    do: Callable[[DecodeItem, DecodeItem, Array, Any], Any],
    state: Any,
) -> Any:
    """Apply `state = do(item, next_item, is_last, state)` to each `blocks`-th item from `block` on.

    Heads come first, then splits, then sequences: neighbouring blocks read neighbouring memory.
    The next item means nothing if `is_last`.
    """
    call = sizes.call
    items_of_split = jnp.int32(sizes.items_of_split)

    def keys_of(b) -> KeysOfSequence:
        return find_keys(problem, sizes, scalars, jnp.minimum(b, call.B - 1))

    def skip_sequences(index, b, before):
        """Return the sequence that has item `index`, and the number of items before it."""

        def items_of(b):
            return keys_of(b).split_count * items_of_split

        def is_behind(carry):
            b, before, count = carry
            return (b < call.B) & (index - before >= count)

        def step(carry):
            b, before, count = carry
            return b + 1, before + count, items_of(b + 1)

        b, before, _ = lax.while_loop(is_behind, step, (b, before, items_of(b)))
        return b, before

    def item_at(index, b, before) -> DecodeItem:
        keys = keys_of(b)
        split = keys.first_split + lax.div(index - before, items_of_split)
        rest = lax.rem(index - before, items_of_split)
        k = lax.div(rest, jnp.int32(sizes.row_tiles)) * sizes.heads
        row = lax.rem(rest, jnp.int32(sizes.row_tiles)) * ROWS
        first = jnp.maximum(keys.tiles.first, split * sizes.tiles_of_split)
        end = jnp.minimum(keys.tiles.end, (split + 1) * sizes.tiles_of_split)
        return DecodeItem(keys, k, split, row, first, end)

    def has_item(carry):
        _, b, _, _ = carry
        return b < call.B

    def step(carry):
        index, b, before, state = carry
        item = item_at(index, b, before)
        index = index + blocks
        b, before = skip_sequences(index, b, before)
        state = do(item, item_at(index, b, before), b >= call.B, state)
        return index, b, before, state

    zero = jnp.int32(0)
    b, before = skip_sequences(block, zero, zero)
    return lax.while_loop(has_item, step, (block, b, before, state))[-1]
