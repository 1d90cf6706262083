"""Decide which tiles of logits are visited, in which groups, from shapes and static masks.

Tiles that the window hides are never visited. The last tile of a row or column starts early so that
it fits, because XLA silently moves slices that would reach beyond an array. Positions that it
shares with its neighbour are set to -1, which `mask_tile` hides.
"""

import dataclasses
import math

import numpy as np

from memeff.autodiff.tile_sum import TileGrid
from memeff.masking import key_range
from memeff.problem import Operands, Problem, Schedule, accumulator_dtype, check_sizes_known
from memeff.shape import ceil_div


def tile_groups(problem: Problem, schedule: Schedule, operands: Operands, long_axis: int | None):
    """Return ((masked, rows, columns), starts [n, 2]) of each group of tiles, masked ones last.

    Where `schedule.max_merged_logits` allows, whole tiles that form a larger square become one
    tile, because each step costs launches and slices. `long_axis` (0: rows, 1: columns) is the
    longer axis of such a tile. A group then has two tiles at least, because XLA unrolls a loop of
    one step.

    Few groups are best, because each computes its first probabilities before its loop. So whole
    tiles that are left over join the masked ones, unless they are more.
    """
    tile = schedule.chunk_size
    whole, edge = tiles_by_mask(problem, tile, operands)
    groups = []
    if schedule.max_merged_logits and long_axis is not None and len(whole):
        size, starts, whole = _merge_tiles(
            problem, schedule, operands, whole, len(edge), 1 - long_axis
        )
        groups.append((False, size, starts))
        if len(whole) <= len(edge):
            edge = np.concatenate([whole, edge])
            whole = whole[:0]
    groups.append((False, tile, whole * tile))
    groups.append((True, tile, edge * tile))
    pieces = []
    for masked, size, starts in groups:
        if long_axis is not None and len(starts) == 1:
            cut_axis = 1 - long_axis
            if size[cut_axis] % 2 == 0:
                size, starts = _halve_tiles(size, starts, cut_axis)
        if len(starts):
            key = (masked, *size)
            pieces.append((key, starts.astype(np.int32)))
    return pieces


def _merge_tiles(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    whole: np.ndarray,
    masked_count: int,
    cut_axis: int,
) -> tuple[tuple[int, int], np.ndarray, np.ndarray]:
    """Return the size and starts [n, 2] of merged tiles, and indices [n, 2] of tiles left over.

    A merged tile is a square of n x n tiles, cut across `cut_axis` to
    `schedule.max_merged_logits`.
    """
    t, c = schedule.chunk_size
    most = schedule.max_merged_logits
    rows, cols = whole.max(0) + 1
    remaining = np.zeros((rows, cols), bool)  # by indices of tiles
    remaining[tuple(whole.T)] = True

    def whole_squares(n: int) -> np.ndarray:
        indices, _ = tiles_by_mask(problem, (n * t, n * c), operands)
        i, j = n * indices.T  # the square's first tile
        return indices[remaining[i, j]]

    doublings = math.ceil(math.log2(most / (t * c)) / 2)  # of a tile's sides
    n = 2 ** max(0, doublings)
    squares = whole_squares(n)
    while not len(squares) and n > 1:
        n //= 2
        squares = whole_squares(n)
    if n == 1 and len(squares) <= masked_count:
        return (t, c), whole[:0], whole
    merged = np.zeros((ceil_div(rows, n), ceil_div(cols, n)), bool)  # by indices of squares
    merged[tuple(squares.T)] = True
    remaining &= ~merged.repeat(n, 0).repeat(n, 1)[:rows, :cols]
    size = (n * t, n * c)
    starts = squares * size
    thinnest = min(128, schedule.chunk_size[cut_axis])
    while math.prod(size) > most:
        side = size[cut_axis]
        if side <= thinnest or side % 2 == 1:
            break
        size, starts = _halve_tiles(size, starts, cut_axis)
    return size, starts, np.argwhere(remaining)


def _halve_tiles(
    size: tuple[int, int], starts: np.ndarray, axis: int
) -> tuple[tuple[int, int], np.ndarray]:
    """Cut each tile into two along `axis`. First come all first halves, then all second ones."""
    half = list(size)
    half[axis] //= 2
    second = starts.copy()
    second[:, axis] += half[axis]
    t, c = half
    return (t, c), np.concatenate([starts, second])


def tile_spans(
    problem: Problem, chunk_size: tuple[int, int], lengths: tuple[int, int]
) -> tuple[np.ndarray, ...]:
    """Return first and end of the key tiles that a row of tiles visits, and of those it sees fully.

    Each of the four arrays has one index per row of tiles [ceil(T / t)]. The window alone decides.
    """
    T, S = lengths
    t, c = chunk_size
    rows = np.arange(0, T, t)
    last_rows = np.minimum(rows + t, T) - 1
    bounds = key_range(problem, problem.q_offset, rows, last_rows)

    def clip(bound, unbounded: int) -> np.ndarray:
        if bound is None:
            return np.full(len(rows), unbounded)
        return np.clip(bound, 0, S)

    some_from, some_to, all_from, all_to = map(clip, bounds, (0, S, 0, S))  # keys
    first = np.where(some_from < S, some_from // c, ceil_div(S, c))
    end = ceil_div(some_to, c)
    full_first = ceil_div(all_from, c)
    full_end = all_to // c
    return first, end, full_first, full_end


def tiles_by_mask(
    problem: Problem, chunk_size: tuple[int, int], operands: Operands
) -> tuple[np.ndarray, np.ndarray]:
    """Return indices (i, j) [n, 2] of the tiles that need no mask, and of those that need one.

    A tile needs none if it has full size and each of its queries sees each of its keys. Tiles in
    which no query sees any key are left out.
    """
    shape = operands.shape
    elementwise = has_elementwise_mask(problem, operands)
    return _tiles_by_mask(problem, chunk_size, (shape.T, shape.S), elementwise)


def has_elementwise_mask(problem: Problem, operands: Operands) -> bool:
    """Return True if more than the window and known blocks decides who may attend to whom."""
    mask_fn = None if problem.blocks else problem.mask_fn
    masks = (mask_fn, operands.mask, operands.q_segments, operands.logit_params.bias)
    return any(x is not None for x in masks)


def _tiles_by_mask(
    problem: Problem,
    chunk_size: tuple[int, int],
    lengths: tuple[int, int],
    elementwise: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the result of `tiles_by_mask` for lengths (T, S)."""
    T, S = lengths
    t, c = chunk_size
    j = np.arange(ceil_div(S, c))
    spans = np.stack(tile_spans(problem, chunk_size, lengths))
    first, end, full_first, full_end = spans[..., None]  # each [ceil(T / t), 1]
    seen = (first <= j) & (j < end)  # by indices of tiles
    full = (full_first <= j) & (j < full_end)
    if problem.blocks is not None:
        any_visible, all_visible = problem.blocks.visible_tiles(t, c)
        seen &= any_visible
        full &= all_visible
    full &= seen & (not elementwise)
    full[T // t :] = False  # the last row of tiles overhangs
    whole = np.argwhere(full)
    edge = np.argwhere(seen & ~full)
    return whole.astype(np.int32), edge.astype(np.int32)


def tile_grid(problem: Problem, schedule: Schedule, operands: Operands) -> TileGrid:
    """Return the grid of the same tiles for `TileSum`.

    Lengths and offsets that are arrays make every tile masked and bound no list of tiles.
    """
    check_sizes_known(
        operands, "A derivative other than the gradient (a jvp, a second derivative), or key_mass,"
    )
    shape = operands.shape
    masked = has_elementwise_mask(problem, operands) or has_array_bounds(problem, operands)
    if operands.q_offset is not None:
        problem = dataclasses.replace(problem, left=None, right=None)
    return TileGrid(
        _lists_of_tiles,
        problem,
        schedule.chunk_size,
        schedule.heads_of_tile(shape.B, shape.K),
        (shape.B, shape.K, shape.G),
        (shape.T, shape.S),
        masked,
        accumulator_dtype(operands),
    )


def _lists_of_tiles(grid: TileGrid) -> list[tuple[bool, np.ndarray]]:
    """Return (masked, indices [n, 2]) of tiles without a mask, then of those with one."""
    assert grid.problem is not None
    whole, edge = _tiles_by_mask(grid.problem, grid.chunk_size, grid.lengths, grid.elementwise)
    return [(False, whole), (True, edge)]


def count_tiles(
    problem: Problem, chunk_size: tuple[int, int], operands: Operands
) -> tuple[int | None, int]:
    """Return how many tiles of a head are visited, and how many there are.

    The first is None where lengths or offsets are arrays; the second is 0 where a length is
    symbolic.
    """
    shape = operands.shape
    if not shape.lengths_known:
        return None, 0
    t, c = chunk_size
    down = ceil_div(shape.T, t)
    across = ceil_div(shape.S, c)
    total = down * across
    if has_array_bounds(problem, operands):
        return None, total
    if problem.blocks is not None:
        whole, edge = tiles_by_mask(problem, chunk_size, operands)
        return len(whole) + len(edge), total
    first, end, _, _ = tile_spans(problem, chunk_size, (shape.T, shape.S))
    visited = np.maximum(end - first, 0)
    return int(visited.sum()), total


def has_array_bounds(problem: Problem, operands: Operands) -> bool:
    """Return True if lengths or offsets are arrays, so that the visited tiles are not known yet."""
    offset = operands.q_offset if problem.has_window else None
    bounds = offset, operands.q_lengths, operands.kv_lengths
    return any(x is not None for x in bounds)
