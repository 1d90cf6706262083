"""Decide which tiles of logits are visited, in which groups, from shapes and masks that are known while tracing.

Tiles that the window hides are never visited. The last tile of a row or column starts early so that it fits, because XLA
clamps slices that overhang without a word. Positions that it shares with its neighbour are -1, which `mask_tile` hides.
"""

import dataclasses
import math

import numpy as np

from memeff.autodiff.tile_sum import TileGrid
from memeff.chunked.export import has_symbolic_lengths
from memeff.masking import key_range
from memeff.problem import Operands, Problem, accumulator_dtype, check_sizes_known


def tile_groups(problem: Problem, operands: Operands, along: int | None):
    """[((masked, rows, columns), where each starts [n, 2])]: the tiles by size, masked ones last.

    Where `problem.joined` allows, whole tiles that form a larger square are one (each step costs launches, and slices of
    what it reads and adds to), cut across `along` to so many logits, and into two at least: XLA unrolls a loop of one step.
    Lists are few, for each makes its first probabilities on its own: a few whole tiles that are left go with the masked.
    """
    whole, edge = tiles_by_mask(problem, operands)
    found, area, cut = [], math.prod(problem.chunk_size), 1 - (along or 0)
    if problem.joined and along is not None and len(whole):
        counts = whole.max(0) + 1
        left = np.zeros(counts, bool)
        left[tuple(whole.T)] = True
        n = 2 ** max(0, math.ceil(math.log2(problem.joined / area) / 2))
        while True:
            size = [n * side for side in problem.chunk_size]
            squares, _ = tiles_by_mask(
                dataclasses.replace(problem, chunk_size=tuple(size)), operands
            )
            squares = squares[left[tuple(n * squares.T)]]
            if len(squares) or n == 1:
                break
            n //= 2
        starts, thinnest = squares * size, min(128, problem.chunk_size[cut])
        while size[cut] % 2 == 0 and size[cut] > thinnest and math.prod(size) > problem.joined:
            size, starts = _halve_tiles(size, starts, cut)
        if n > 1 or len(squares) > len(edge):
            taken = np.zeros(-(-counts // n), bool)
            taken[tuple(squares.T)] = True
            left &= ~taken.repeat(n, 0).repeat(n, 1)[: counts[0], : counts[1]]
            found.append((False, size, starts))
            whole = np.argwhere(left)
        if len(whole) <= len(edge):
            whole, edge = whole[:0], np.concatenate([whole, edge])
    found += [
        (masked, problem.chunk_size, at * problem.chunk_size)
        for masked, at in ((False, whole), (True, edge))
    ]
    pieces = []
    for masked, size, starts in found:
        if along is not None and len(starts) == 1 and size[cut] % 2 == 0:
            size, starts = _halve_tiles(size, starts, cut)
        if len(starts):
            pieces.append(((masked, *size), starts.astype(np.int32)))
    return pieces


def _halve_tiles(size, starts: np.ndarray, dim: int) -> tuple[list[int], np.ndarray]:
    """Tiles of half that size along `dim`, twice as many."""
    size = [n // 2 if at == dim else n for at, n in enumerate(size)]
    return size, np.concatenate([starts, starts + np.eye(2, dtype=int)[dim] * size[dim]])


def key_spans(problem: Problem, lengths: tuple[int, int]):
    """For each row of tiles: the first that is visited and the one behind the last, and keys that all its queries see."""
    T, S = lengths
    t, c = problem.chunk_size
    first = np.arange(-(-T // t)) * t
    some_from, some_to, all_from, all_to = (
        None if x is None else np.asarray(x)
        for x in key_range(problem, problem.q_offset, first, np.minimum(first + t, T) - 1)
    )
    nothing, everything = np.zeros(len(first), int), np.full(len(first), S)
    lo = (
        nothing
        if some_from is None
        else np.where(some_from >= S, -(-S // c), np.maximum(some_from, 0) // c)
    )
    hi = -(-np.clip(everything if some_to is None else some_to, 0, S) // c)
    return (
        lo,
        hi,
        nothing if all_from is None else all_from,
        everything if all_to is None else all_to,
    )


def tiles_by_mask(
    problem: Problem, operands: Operands, skip: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (i, j) of tiles whose every query sees every key, and of the others that see something (all, if not `skip`)."""
    return _tiles_by_mask(
        problem,
        (operands.query.shape[1], operands.key.shape[1]),
        has_elementwise_mask(problem, operands),
        skip,
    )


def has_elementwise_mask(problem: Problem, operands: Operands) -> bool:
    """Is who sees whom told by element, not by the window alone?"""
    mask_fn = None if problem.blocks else problem.mask_fn
    return any(
        x is not None for x in (mask_fn, operands.mask, operands.q_segments, operands.terms.bias)
    )


def _tiles_by_mask(
    problem: Problem, lengths: tuple[int, int], elementwise: bool, skip: bool = True
):
    T, S = lengths
    t, c = problem.chunk_size
    n, k = -(-T // t), -(-S // c)
    lo, hi, all_from, all_to = key_spans(problem, lengths)
    full_lo, full_hi = -(-np.clip(all_from, 0, S) // c), np.clip(all_to, 0, S) // c
    some, every = (
        (np.ones((n, k), bool),) * 2 if problem.blocks is None else problem.blocks.of_tiles(t, c)
    )
    whole, edge, hidden = ([np.zeros((0, 2), int)] for _ in range(3))
    for a in range(n):
        fits = (a + 1) * t <= T and not elementwise
        js = np.arange(lo[a], hi[a]) if skip else np.arange(k)
        seen = (js >= lo[a]) & (js < hi[a]) & some[a, js]
        full = (
            seen
            & every[a, js]
            & (js >= full_lo[a])
            & (js < full_hi[a])
            & ((js + 1) * c <= S)
            & fits
        )
        for kind, which in ((whole, full), (edge, seen & ~full), (hidden, ~seen & (not skip))):
            kind.append(np.stack([np.full(which.sum(), a), js[which]], -1))
    whole, edge = np.concatenate(whole), np.concatenate(edge + hidden)
    return whole.astype(np.int32), edge.astype(np.int32)


def tile_grid(problem: Problem, operands: Operands) -> TileGrid:
    """Over the same tiles, for sums. Lengths and offsets that are arrays hide, and bound nothing."""
    check_sizes_known(
        operands, "What is neither the call nor its gradient (a jvp, a second derivative, key_mass)"
    )
    (B, T, K, G, _), S = operands.query.shape, operands.key.shape[1]
    if operands.q_offset is not None:
        problem = dataclasses.replace(problem, left=None, right=None)
    masked = has_elementwise_mask(problem, operands) or has_traced_bounds(operands)
    return TileGrid(_lists_of_tiles, problem, B, K, G, (T, S), masked, accumulator_dtype(operands))


def _lists_of_tiles(walk: TileGrid) -> list[tuple[bool, np.ndarray]]:
    return list(
        zip(
            (False, True), _tiles_by_mask(walk.problem, walk.lengths, walk.elementwise), strict=True
        )
    )


def count_tiles(problem: Problem, operands: Operands) -> tuple[int | None, int]:
    """Tiles of rows and columns that are visited (None: known only as it runs), and all there are (0: length unknown)."""
    if has_symbolic_lengths(operands):
        return None, 0
    (t, c), T, S = problem.chunk_size, operands.query.shape[1], operands.key.shape[1]
    lo, hi, _, _ = key_spans(problem, (T, S))
    visited = None if has_traced_bounds(operands) else int(np.maximum(hi - lo, 0).sum())
    if visited is not None and problem.blocks is not None:
        visited = sum(map(len, tiles_by_mask(problem, operands)))
    return visited, -(-T // t) * -(-S // c)


def has_traced_bounds(operands: Operands) -> bool:
    return any(x is not None for x in (operands.q_offset, operands.q_lengths, operands.kv_lengths))
