"""Assign tiles to thread blocks, in an order that shares the L2 cache and balances the work."""

import heapq
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.masking import MaskInputs
from memeff.pallas.hopper.persistent import persistent_blocks
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.tile_ranges import TileList, TileRange, keys_seen, queries_seeing
from memeff.problem import Problem


class CallSizes(NamedTuple):
    """The sizes of one call, without padding."""

    B: int
    T: int
    S: int
    K: int
    G: int
    parts: int = 1  # of each group of query heads, if a kernel of keys computes them apart

    def with_parts(self, parts: int) -> "CallSizes":
        """Return the sizes where each part of a group counts as a group, with a K of its own."""
        return self._replace(K=self.K * parts, G=self.G // parts, parts=parts)


class KeyBlocks(NamedTuple):
    """The thread blocks of a kernel that computes dk and dv."""

    keys: int  # of each
    at_once: int = 1  # blocks that share a multiprocessor


class TileOrder(NamedTuple):
    """Order of work items: heads in groups of `section`, tile-major inside a group.

    The last `rest` tiles of every head run at the end. In causal order these are the short ones.
    """

    section: int = 1
    rest: int = 0


# Blocks stay while an item visits at most 2,000 positions on average. Starting new blocks costs
# less with longer items, and balances work that is not known before.
MAX_PERSISTENT_POSITIONS = 2000
L2_BYTES = 32 * 2**20  # bytes that stay in the L2 cache of H100 and H200, which has 50 MiB
BALANCED = 0.98  # mean work of the thread blocks, relative to the most, that is good enough
LARGEST_SECTION = 64  # heads


def work_item(count: int, tiles: int, order: TileOrder, late: bool, index) -> tuple[Any, Any]:
    """Return the head, of `count`, and the tile, of `tiles`, of work item `index`.

    If `late`, the last tile comes first.
    """
    section = jnp.int32(order.section)
    rest = jnp.int32(order.rest)
    done = count * (tiles - order.rest)
    item = lax.div(index, section)
    head_in_section = lax.rem(index, section)
    section_index = lax.div(item, tiles - rest)
    tile = lax.rem(item, tiles - rest)
    head = section_index * section + head_in_section
    if order.rest:
        rest_index = index - done
        head = jnp.where(rest_index < 0, head, lax.rem(rest_index, jnp.int32(count)))
        rest_tile = tiles - rest + lax.div(rest_index, jnp.int32(count))
        tile = jnp.where(rest_index < 0, tile, rest_tile)
    return head, tiles - 1 - tile if late else tile


def shares_bias(scalars: Scalars, B: int) -> bool:
    """Return True if the B batch entries share one bias of pairs."""
    return scalars.bias is not None and scalars.bias.shape[0] < B


def times_unknown(scalars: Scalars) -> bool:
    """Return True if arrays say how many tiles an item visits: lengths, or segments."""
    return any(x is not None for x in (scalars.q_lengths, scalars.kv_lengths, scalars.q_segments))


def order_for_bias(order: TileOrder, scalars: Scalars, B: int) -> TileOrder:
    """Return an order in which batch entries that share a bias do the same tile in turn.

    A tile of the bias is then in the L2 cache for all but the first of them.
    """
    return TileOrder(B) if order == TileOrder() and shares_bias(scalars, B) else order


def _batch_and_head(index, B: int, heads: int, scalars: Scalars) -> tuple[Any, Any]:
    """Return the batch entry and the head, of `heads`, of the head `index` of the whole call."""
    if shares_bias(scalars, B):
        return lax.rem(index, jnp.int32(B)), lax.div(index, jnp.int32(B))
    return lax.div(index, jnp.int32(heads)), lax.rem(index, jnp.int32(heads))


def cache_order(count: int, bytes_read: int) -> TileOrder:
    """Return the order with the largest section whose heads, of `bytes_read` each, fit into L2.

    This suits thread blocks that each do one item and begin when others end.
    """
    section = 1
    for n in range(1, count + 1):
        if count % n == 0 and n * bytes_read <= L2_BYTES:
            section = n
    return TileOrder(section)


def balanced_order(count: int, times: np.ndarray, blocks: int) -> TileOrder:
    """Return an order in which `blocks` persistent thread blocks have equally much to do.

    `times` are those of the tiles of one head, in the order of `work_item`. Small sections are
    tried first, because the tiles of one head read the same keys.
    """
    largest = min(count, LARGEST_SECTION)
    sections = [n for n in range(1, largest + 1) if count % n == 0]
    rests = sorted({times.size * n // 16 for n in range(16)})
    best = TileOrder()
    best_balance = 0.0
    for section, rest in itertools.product(sections, rests):
        order = TileOrder(section, rest)
        balance = _balance(count, times, blocks, order)
        if balance > best_balance:
            best = order
            best_balance = balance
        if best_balance >= BALANCED:
            break
    return best


def persistent_order(problem: Problem, heads: int, times: np.ndarray) -> tuple[int, TileOrder]:
    """Return the number of thread blocks that stay, and the order of the items of `heads`.

    `times` are those of the items of one head.
    """
    blocks = persistent_blocks(heads * times.size)
    order = TileOrder() if problem.right is None else balanced_order(heads, times, blocks)
    return blocks, order


def _balance(count: int, times: np.ndarray, blocks: int, order: TileOrder) -> float:
    """Return the mean work of thread blocks relative to the most, in boustrophedon order."""
    tiles = times.size - order.rest
    early = np.tile(np.repeat(times[:tiles], order.section), count // order.section)
    late = np.repeat(times[tiles:], count)
    load = np.concatenate([early, late])
    turn, block = np.divmod(np.arange(load.size), blocks)
    block = np.where(turn % 2 == 1, blocks - 1 - block, block)
    work = np.bincount(block, load, blocks)
    return work.mean() / work.max()


def finish_time(times: np.ndarray, blocks: int) -> float:
    """Return when the last item ends, of which each begins in turn when a block is free."""
    ends = [0.0] * blocks
    for time in times:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


def ends_and_mask(
    sizes: CallSizes, scalars: Scalars, keys: int
) -> tuple[tuple[Any, Any], MaskInputs]:
    """Return the numbers of queries and keys, and what masks pairs in tiles of `keys` keys."""
    q_end = sizes.T
    if scalars.q_lengths is not None:
        q_end = jnp.minimum(scalars.q_lengths, sizes.T)
    kv_end = sizes.S
    if scalars.kv_lengths is not None:
        kv_end = jnp.minimum(scalars.kv_lengths, sizes.S)
    hides_keys = scalars.kv_lengths is not None or sizes.S % keys != 0
    masked_from = kv_end if hides_keys else None
    mask_inputs = MaskInputs(scalars.q_offset, scalars.q_lengths, masked_from)
    return (q_end, kv_end), mask_inputs


class Sources(NamedTuple):
    """The batch entries of the arrays from which a work item is copied."""

    query: Array
    key: Array
    value: Array

    @classmethod
    def of(cls, scalars: Scalars, b) -> "Sources":
        """Return those of batch entry b of the call, which `scalars` belong to."""
        if scalars.query_entries is None:
            return cls(b, b, b)
        return cls(scalars.query_entries, scalars.key_entries, scalars.value_entries)


class QueryWork(NamedTuple):
    """A tile of queries of one head, and the tiles of keys that it visits."""

    b: Array
    source: Sources
    n: Array  # query head
    k: Array  # key head
    row: Array  # first query
    mask_inputs: MaskInputs
    visits: TileRange | TileList
    scalars: Scalars
    # (first, count) -> number of the first visits that the `count` queries from `first` do not see
    count_hidden_visits: Callable[[Any, int], Any]


def find_query_work(
    problem: Problem,
    sizes: CallSizes,
    scalars: Scalars,
    rows: int,
    keys: int,
    order: TileOrder,
    index,
) -> QueryWork:
    """Return the work item `index`, a tile of `rows` queries that visits tiles of `keys` keys.

    The heads of a group are neighbours, because they share keys.
    """
    late = problem.right is not None
    N = sizes.K * sizes.G
    tile_count = -(-sizes.T // rows)
    head, tile = work_item(sizes.B * N, tile_count, order, late, index)
    b, n = _batch_and_head(head, sizes.B, N, scalars)
    scalars = scalars.of(b)
    ends, mask_inputs = ends_and_mask(sizes, scalars, keys)
    row = tile * rows
    offset = problem.q_offset if scalars.q_offset is None else scalars.q_offset

    def keys_seen_by(first, last) -> TileRange:
        # Rows behind the last query may see anything, because nobody stores them.
        last = jnp.minimum(last, sizes.T - 1)
        return keys_seen(problem, offset, first, last, ends, keys)

    window = keys_seen_by(row, row + rows - 1)
    visits = _without_hidden_tiles(problem, scalars, tile, window, keys)
    is_range = isinstance(visits, TileRange)
    has_scores = problem.score_fn is not None or scalars.has_bias
    if is_range and has_scores and problem.mask_fn is None:
        if problem.right is None:
            middle = row + rows // 2 + offset
            visits = visits.nearest_first(middle, keys)

    def count_hidden_visits(first, count: int):
        if keys >= rows or scalars.q_segments is not None:
            return 0
        if not isinstance(visits, TileRange):
            return 0
        return visits.count_hidden(keys_seen_by(first, first + count - 1))

    k = lax.div(n, jnp.int32(sizes.G))
    source = Sources.of(scalars, b)
    return QueryWork(b, source, n, k, row, mask_inputs, visits, scalars, count_hidden_visits)


def _without_hidden_tiles(
    problem: Problem,
    scalars: Scalars,
    tile,
    window: TileRange,
    size: int,
) -> TileRange | TileList:
    """Return the `window`'s tiles, of `size`, that segments and mask_fn leave to `tile`."""
    visits = window
    if scalars.q_segments is not None:
        visible = (scalars.visible_from[tile], scalars.visible_to[tile])
        visits = visits.within(visible, scalars.one_segment[tile], size)
    if scalars.tile_table is not None:
        return TileList.of(scalars.tile_table, tile)
    return visits if problem.mask_fn is None else visits.all_masked()


def may_have_unmasked_tiles(problem: Problem, scalars: Scalars) -> bool:
    """Return whether there may be tiles without masks."""
    return problem.mask_fn is None or scalars.tile_table is not None


class KeyWork(NamedTuple):
    """A tile of keys of one head, and the tiles of queries that see it."""

    b: Array
    source: Sources
    k: Array  # group of query heads, or a part of one
    key_head: Array
    col: Array  # first key
    mask_inputs: MaskInputs
    visits: TileRange | TileList  # of one query head
    scalars: Scalars


def find_key_work(
    problem: Problem,
    sizes: CallSizes,
    scalars: Scalars,
    cols: int,
    queries: int,
    order: TileOrder,
    index,
) -> KeyWork:
    """Return the work item `index`: `cols` keys, and tiles of `queries` queries that see them."""
    tile_count = -(-sizes.S // cols)
    head, tile = work_item(sizes.B * sizes.K, tile_count, order, False, index)
    b, k = _batch_and_head(head, sizes.B, sizes.K, scalars)
    scalars = scalars.of(b)
    # Keys behind the last need no mask, because nobody stores them.
    ends, mask_inputs = ends_and_mask(sizes, scalars, 1)
    # Rows that only pad the last tile of queries must see nothing: NaN in a key would reach its dk
    # and dv.
    if sizes.T % queries:
        mask_inputs = mask_inputs._replace(q_lengths=ends[0])
    col = tile * cols
    last = jnp.minimum(col + cols, sizes.S) - 1
    offset = problem.q_offset if scalars.q_offset is None else scalars.q_offset
    window = queries_seeing(problem, offset, col, last, ends, queries)
    visits = _without_hidden_tiles(problem, scalars, tile, window, queries)
    key_head = lax.div(k, jnp.int32(sizes.parts)) if sizes.parts > 1 else k
    return KeyWork(b, Sources.of(scalars, b), k, key_head, col, mask_inputs, visits, scalars)
