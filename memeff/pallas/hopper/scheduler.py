"""Assign tiles to thread blocks, in an order that shares the L2 cache and balances the work."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.masking import MaskInputs
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.tile_ranges import TileList, TileRange, keys_seen, queries_seeing
from memeff.problem import Problem


class CallSizes(NamedTuple):
    B: int
    T: int
    S: int
    K: int
    G: int


class TileOrder(NamedTuple):
    """Of all tiles of all heads: the heads of a `section` tile by tile, then those of the next; but the last `rest` tiles of
    each, the short ones in causal order, when all others are done.
    """

    section: int = 1
    rest: int = 0


L2 = 32 * 2**20  # bytes that stay in the cache of 50 MiB that H100 and H200 have
BALANCED = 0.98  # of the time that blocks have, what they work


def work_item(count: int, tiles: int, order: TileOrder, late: bool, index) -> tuple[Any, Any]:
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


def cache_order(count: int, bytes_read: int) -> TileOrder:
    """As many heads together as fit into the cache, if each reads so many bytes: for blocks that begin when others end."""
    return TileOrder(
        max(n for n in range(1, count + 1) if count % n == 0 and (n == 1 or n * bytes_read <= L2))
    )


def balanced_order(count: int, times: np.ndarray, blocks: int) -> TileOrder:
    """With which `blocks` that stay have equally much to do; of those, the one with the fewest heads together, which share
    what they read. `times` of the tiles of a head, in the order of `place`; blocks take them there and back.
    """

    def worked(section: int, rest: int) -> float:
        tiles = times.size - rest
        load = np.concatenate(
            [
                np.tile(np.repeat(times[:tiles], section), count // section),
                np.repeat(times[tiles:], count),
            ]
        )
        turn, block = np.divmod(np.arange(load.size), blocks)
        found = np.bincount(np.where(turn % 2 == 1, blocks - 1 - block, block), load, blocks)
        return found.mean() / found.max()

    best = 0.0, TileOrder()
    for section in (n for n in range(1, min(count, 64) + 1) if count % n == 0):
        for rest in sorted({times.size * n // 16 for n in range(16)}):
            best = max(
                best, (worked(section, rest), TileOrder(section, rest)), key=lambda found: found[0]
            )
            if best[0] >= BALANCED:
                return best[1]
    return best[1]


def ends(shape: CallSizes, scalars: Scalars, keys: int) -> tuple[tuple[Any, Any], MaskInputs]:
    """How many queries and keys there are, and who sees whom where tiles have `keys` keys."""
    q_end = shape.T if scalars.q_lengths is None else jnp.minimum(scalars.q_lengths, shape.T)
    kv_end = shape.S if scalars.kv_lengths is None else jnp.minimum(scalars.kv_lengths, shape.S)
    hides = scalars.kv_lengths is not None or shape.S % keys != 0
    return (q_end, kv_end), MaskInputs(
        scalars.q_offset, scalars.q_lengths, kv_end if hides else None
    )


class QueryWork(NamedTuple):
    b: Array
    n: Array  # query head
    k: Array  # key head
    row: Array  # the first query
    sight: MaskInputs
    visits: TileRange | TileList
    scalars: Scalars
    # so many of the first visits, of which `count` queries from `first` on see nothing
    hidden: Callable[[Any, int], Any]


def find_query_work(
    problem: Problem,
    shape: CallSizes,
    scalars: Scalars,
    rows: int,
    keys: int,
    order: TileOrder,
    index,
) -> QueryWork:
    """Of the `index`-th tile of `rows` queries; heads of a group, which share keys, are neighbours."""
    late = problem.right is not None
    head, tile = work_item(shape.B * shape.K * shape.G, -(-shape.T // rows), order, late, index)
    b, n = lax.div(head, jnp.int32(shape.K * shape.G)), lax.rem(head, jnp.int32(shape.K * shape.G))
    scalars = scalars.of(b)
    all_ends, sight = ends(shape, scalars, keys)
    row = tile * rows
    # Rows behind the last query see what they like: nobody stores them.
    offset = problem.q_offset if scalars.q_offset is None else scalars.q_offset
    seen = lambda first, last: keys_seen(
        problem, offset, first, jnp.minimum(last, shape.T - 1), all_ends, keys
    )
    visits = seen(row, row + rows - 1)
    if scalars.q_segments is not None:
        visits = visits.within(scalars.first[tile], scalars.behind[tile], scalars.alone[tile], keys)
    visits = _of_mask(problem, scalars, tile, visits)
    if (
        problem.score_fn is not None
        and problem.right is None
        and isinstance(visits, TileRange)
        and problem.mask_fn is None
    ):
        visits = visits.nearest_first(row + rows // 2 + offset, keys)
    may = (
        visits
        if keys < rows and scalars.q_segments is None and isinstance(visits, TileRange)
        else None
    )
    hidden = lambda first, count: (
        may.hidden(seen(first, first + count - 1)) if may is not None else 0
    )
    return QueryWork(b, n, lax.div(n, jnp.int32(shape.G)), row, sight, visits, scalars, hidden)


def _of_mask(problem: Problem, scalars: Scalars, own, visits: TileRange) -> TileRange | TileList:
    if scalars.listed is not None:
        return TileList.of(scalars.listed, own)
    return visits if problem.mask_fn is None else visits.all_masked()


def some_whole(problem: Problem, scalars: Scalars) -> bool:
    """May there be tiles without masks?"""
    return problem.mask_fn is None or scalars.listed is not None


class KeyWork(NamedTuple):
    b: Array
    k: Array
    col: Array  # the first key
    sight: MaskInputs
    visits: TileRange | TileList  # of one query head
    scalars: Scalars


def find_key_work(
    problem: Problem,
    shape: CallSizes,
    scalars: Scalars,
    cols: int,
    queries: int,
    order: TileOrder,
    index,
) -> KeyWork:
    """Of the `index`-th tile of `cols` keys."""
    head, tile = work_item(shape.B * shape.K, -(-shape.S // cols), order, False, index)
    b, k = lax.div(head, jnp.int32(shape.K)), lax.rem(head, jnp.int32(shape.K))
    scalars = scalars.of(b)
    all_ends, sight = ends(shape, scalars, 1)  # keys behind the last are not stored
    # rows that only pad the last tile of queries see nothing: NaN in a key would reach its dk and
    # dv
    if shape.T % queries:
        sight = sight._replace(q_lengths=all_ends[0])
    col = tile * cols
    last = jnp.minimum(col + cols, shape.S) - 1
    offset = problem.q_offset if scalars.q_offset is None else scalars.q_offset
    visits = queries_seeing(problem, offset, col, last, all_ends, queries)
    if scalars.q_segments is not None:
        visits = visits.within(
            scalars.first[tile], scalars.behind[tile], scalars.alone[tile], queries
        )
    visits = _of_mask(problem, scalars, tile, visits)
    return KeyWork(b, k, col, sight, visits, scalars)
