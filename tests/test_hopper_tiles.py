"""The tiles that the Hopper kernels visit, their order, and the work of each block.

Tiles are compared with pictures of all pairs.
"""

import types

import numpy as np
import pytest
from hopper_cases import needs_kernels

import memeff
from memeff import masks
from memeff.masking import MaskInputs, mask_pairs
from memeff.problem import Problem

pytestmark = needs_kernels


def picture(problem, inputs: MaskInputs, T: int, S: int) -> np.ndarray:
    """Return True [T, S] where the query of a row may attend to the key of a column."""
    rows = np.arange(T)[:, None]
    cols = np.arange(S)[None]
    return np.asarray(mask_pairs(problem, inputs, rows, cols))


def row_tiles(seen: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut the rows of a picture into tiles of `size`."""
    return [seen[start : start + size] for start in range(0, len(seen), size)]


def column_tiles(rows: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut the columns of some rows of a picture into tiles of `size`."""
    return [tile.T for tile in row_tiles(rows.T, size)]


def tiles_with_pairs(tiles) -> list[int]:
    return [j for j, tile in enumerate(tiles) if tile.any()]


def is_wholly_seen(tile, size: int) -> bool:
    """Return True if the tile is whole and all its pairs are visible, so that it needs no mask."""
    return tile.shape[1] == size and tile.all()


def visiting_order(visits, total=None) -> list[int]:
    total = visits.total if total is None else total
    return [int(visits.tile(n)) for n in range(int(total))]


# ---- windows and lengths

WINDOWS = [  # left, right, offset
    (None, None, 0),
    (None, 0, 0),
    (None, 0, 7),
    (None, 0, -6),
    (3, 2, 0),
    (0, 0, 1),
    (4, None, 2),
    (None, 9, -3),
]
ROWS = 5  # tokens whose visits are asked for together


@pytest.mark.parametrize("size", [4, 6])
def test_visits_are_what_the_picture_has(size):
    """Visits contain each tile with a visible pair once.

    Masked tiles come first, and all pairs of later tiles are visible.
    """
    from memeff.pallas.hopper import tile_ranges

    T = 19
    S = 23
    for left, right, offset in WINDOWS:
        problem = Problem(left=left, right=right, q_offset=offset)
        for kv_end, q_end in ((S, T), (11, T), (S, 8), (0, T)):
            seen = picture(problem, MaskInputs(q_lengths=q_end, kv_lengths=kv_end), T, S)
            ends = q_end, kv_end
            check_visits(tile_ranges.keys_seen, problem, ends, seen, size)
            check_visits(tile_ranges.queries_seeing, problem, ends, seen.T, size)


def check_visits(range_of, problem, ends, seen, size):
    """Check the tiles, of `size` columns of `seen`, that `range_of` gives for each tile of rows."""
    from memeff.pallas.hopper import tile_ranges

    offset = problem.q_offset
    for n, rows in enumerate(row_tiles(seen, ROWS)):
        first = n * ROWS
        last = first + len(rows) - 1
        visits = range_of(problem, offset, first, last, ends, size)
        order = visiting_order(visits)
        tiles = column_tiles(rows, size)
        low = int(visits.first)
        high = int(visits.end)
        assert sorted(order) == list(range(low, high))
        assert set(tiles_with_pairs(tiles)) <= set(order)
        for j in order[int(visits.masked) :]:
            assert is_wholly_seen(tiles[j], size)
        check_nearest_first(visits, first + 2 + offset, size)
        for row in range(first, last + 1):
            visits_of_row = range_of(problem, offset, row, row, ends, size)
            hidden = int(visits.count_hidden(visits_of_row))
            assert 0 <= hidden <= visits.masked
            for j in order[:hidden]:
                assert not tiles[j][row - first].any()
        if (
            visits.right_covers_rows
            and visits.masked_right > 0
            and range_of is tile_ranges.keys_seen
        ):
            first_right = int(visits.end - visits.masked_right)
            sees_right = rows[:, first_right * size :].any(1)
            assert (sees_right | ~rows.any(1)).all()


def check_nearest_first(visits, position, size):
    """Check that the first tile without a mask is the nearest to `position`."""
    masked = int(visits.masked)
    order = visiting_order(visits)
    near_order = visiting_order(visits.nearest_first(position, size), visits.total)
    assert near_order[:masked] == order[:masked]
    assert sorted(near_order) == sorted(order)
    nearest = position // size
    distances = [abs(j - nearest) for j in near_order[masked:]]
    assert distances == [] or distances[0] == min(distances)


# ---- segments and block masks


def sorted_ids(seed: int, length: int) -> np.ndarray:
    ids = np.random.default_rng(seed).integers(0, 3, length)
    return np.sort(ids).astype(np.int32)


@pytest.mark.parametrize("keys", [False, True], ids=["by queries", "by keys"])
def test_visits_of_segments_in_order(keys):
    """Visits contain each tile with a visible pair once.

    All pairs of a tile without a mask are visible. Long segments have such tiles.
    """
    from memeff.pallas.hopper import tile_ranges
    from memeff.pallas.hopper.scalars import Scalars, with_ranges

    T = 40
    S = 44
    size = 4
    q_ids = sorted_ids(0, T)
    kv_ids = sorted_ids(1, S)
    scalars = Scalars(q_segments=q_ids[None], kv_segments=kv_ids[None])
    scalars = with_ranges(scalars, (T, S), ROWS, keys)
    range_of = tile_ranges.queries_seeing if keys else tile_ranges.keys_seen
    without_masks = 0
    for left, right, offset in [(None, None, 0), (None, 0, 4), (9, 2, 0)]:
        problem = Problem(left=left, right=right, q_offset=offset)
        inputs = MaskInputs(q_segments=q_ids[:, None], kv_segments=kv_ids[None])
        seen = picture(problem, inputs, T, S)
        if keys:
            seen = seen.T
        for i, rows in enumerate(row_tiles(seen, ROWS)):
            first = i * ROWS
            last = first + len(rows) - 1
            visits = range_of(problem, offset, first, last, (T, S), size)
            visible = scalars.visible_from[0, i], scalars.visible_to[0, i]
            visits = visits.within(visible, scalars.one_segment[0, i], size)
            order = visiting_order(visits)
            tiles = column_tiles(rows, size)
            assert set(tiles_with_pairs(tiles)) <= set(order)
            assert len(set(order)) == len(order)
            for j in order[int(visits.masked) :]:
                assert is_wholly_seen(tiles[j], size)
                without_masks += 1
    assert without_masks > 20


@pytest.mark.parametrize("window", [{}, dict(left=90), dict(right=0)], ids=str)
def test_tables_list_what_is_seen(window):
    """Lists contain each tile with a visible pair once, for tiles of queries and of keys.

    Tiles without a mask come last, and all their pairs are visible.
    """
    from memeff.pallas.hopper import tile_ranges
    from memeff.pallas.hopper.scalars import Scalars

    T = 300
    S = 410
    sides = 64, 128
    q_documents = np.repeat([0, 1], [200, 100])
    kv_documents = np.repeat([0, 1], [280, 130])
    mask = masks.documents(q_documents, kv_documents)
    block = memeff.block_mask(mask, T, S, block_size=16)
    problem = Problem(blocks=block.blocks, **window)
    i, j = np.ogrid[:T, :S]
    seen = (i >= 200) == (j >= 280)
    if problem.left is not None:
        seen &= i - problem.left <= j
    if problem.right is not None:
        seen &= j <= i + problem.right
    whole_tiles = 0
    for keys in (False, True):
        scalars = tile_ranges.with_lists(problem, Scalars(), (T, S), sides, keys)
        table = np.asarray(scalars.tile_table)
        pairs = seen.T if keys else seen
        row_side, col_side = reversed(sides) if keys else sides
        for n, rows in enumerate(row_tiles(pairs, row_side)):
            visits = tile_ranges.TileList.of(table, n)
            order = visiting_order(visits)
            tiles = column_tiles(rows, col_side)
            assert sorted(order) == tiles_with_pairs(tiles)
            for m in order[int(visits.masked) :]:
                assert is_wholly_seen(tiles[m], col_side)
                whole_tiles += 1
    assert whole_tiles > 1


# ---- the work of each block


@pytest.mark.parametrize(
    "T, heads", [(512, 512), (2048, 128), (4096, 64), (8192, 32), (16384, 16), (32768, 8), (700, 6)]
)
def test_blocks_that_stay_have_equally_much_to_do(T, heads):
    """Blocks share causal work evenly, although late tiles of queries take longer.

    The last tile takes as many times longer than the first as there are tiles.
    """
    from memeff.pallas.hopper import scheduler, tile_ranges

    blocks = 132
    tiles = -(-T // 128)
    visited = tile_ranges.tiles_visited(Problem(right=0), (T, T), 128, 128)
    np.testing.assert_array_equal(visited, np.arange(tiles, 0, -1))
    order = scheduler.balanced_order(heads, 1 + visited, blocks)
    index = np.arange(heads * tiles)
    work_items = np.stack(scheduler.work_item(heads, tiles, order, True, index))
    assert len(np.unique(work_items, axis=1).T) == heads * tiles
    _, tile = work_items
    turn, block = np.divmod(index, blocks)
    block = np.where(turn % 2, blocks - 1 - block, block)  # every second turn runs backwards
    load = np.bincount(block, 2 + tile)
    least_share = 0.969 if heads * tiles > blocks else 0
    assert load.mean() >= least_share * load.max()


@pytest.mark.parametrize(
    "B, T, K, G, has_segments, parts",
    [
        (1, 8192, 1, 8, False, 4),  # 64 tiles, the first of which does a 32nd of the work
        (1, 8192, 1, 1, False, 1),
        (2, 8192, 8, 4, False, 1),
        (1, 32768, 2, 4, False, 1),
        (1, 32768, 2, 4, True, 2),  # a tile of two segments takes 2.5 times as long
        (1, 131072, 1, 8, True, 1),
    ],
)
def test_query_heads_of_a_group_are_divided_where_key_heads_are_few(
    B, T, K, G, has_segments, parts
):
    from memeff.pallas.hopper import backward_common, scheduler

    sizes = scheduler.CallSizes(B, T, T, K, G)
    key_blocks = scheduler.KeyBlocks(128)
    args = sizes, Problem(right=0), key_blocks, has_segments
    assert backward_common.group_parts(*args) == parts
    divided = sizes.with_parts(parts)
    assert (divided.K, divided.G) == (K * parts, G // parts)


@pytest.mark.parametrize(
    "T, has_segments, right, blocks_stay",
    [
        (8192, False, 0, True),
        (8192, True, 0, False),
        (1024, True, 0, True),
        (8192, True, None, False),
    ],
)
def test_forward_has_a_block_for_each_tile_where_segments_decide_the_work(
    T, has_segments, right, blocks_stay
):
    from memeff.pallas.hopper import forward, tile_ranges

    problem = Problem(right=right)
    visited = tile_ranges.tiles_visited(problem, (T, T), 128, 128)
    ids = np.zeros((1, T)) if has_segments else None
    scalars = types.SimpleNamespace(q_lengths=None, kv_lengths=None, q_segments=ids)
    blocks, _ = forward.choose_blocks(problem, scalars, visited, 128, 32, T * 512)
    assert blocks == (132 if blocks_stay else 32 * T // 128)


def test_blocks_that_are_free_begin_the_next_item():
    from memeff.pallas.hopper import scheduler

    assert scheduler.finish_time(np.array([3.0, 1, 1, 1, 2]), 2) == 5
    assert scheduler.finish_time(np.array([]), 3) == 0
