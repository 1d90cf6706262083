"""Fold a step over the visible tiles.

The fold is a scan over a static list of tiles, or a loop between bounds computed at run time.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.chunked.schedule import has_array_bounds, tile_groups
from memeff.chunked.slicing import (
    TileSize,
    TileSources,
    cut_tile,
    pin_layout,
    slice_batch,
    slice_shared,
)
from memeff.chunked.tile import Tile, kept_by_dropout
from memeff.masking import key_range
from memeff.problem import LogitParams, Operands, Problem, Schedule
from memeff.slicing import slice_dims, write_slice

Fold = Callable[[Any], Any]  # carry -> carry
CutTile = Callable[..., Tile]  # i, j -> tile


class Prefetch(NamedTuple):
    """A function whose result for a tile is computed in the step before, and its inputs."""

    rows: tuple[Any, ...]  # B K G T, the `row_scalars` of the tile that `make` gets
    make: Callable[[Tile], Array]  # computes Tile.prefetched, with a product of its own
    # True: compute the mask a step ahead, too; False: visit the last tile after the loop
    with_mask: bool = True


def run_by_blocks(
    schedule: Schedule,
    operands: Operands,
    function,
    like_out,
    head_axis: int,
    results,
):
    """Write `function(operands, *like_out)` of each `schedule.head_block` into `results`.

    Arrays as long as the sequence then exist for one block at a time. `like_out`: arrays
    [B, K, ...]; `head_axis`: the axis of heads in `results`.
    """
    assert schedule.head_block is not None
    b, k = schedule.head_block

    def step(first, results):
        batch, head = first

        def heads(x: Array, axis: int) -> tuple[Any, int]:
            """Return the start and the size of the block at an axis of key or query heads."""
            heads_of_key = x.shape[axis] // operands.key.shape[2]
            return head * heads_of_key, k * heads_of_key

        def cut(x: Array, head_axis: int) -> Array:
            return pin_layout(slice_dims(x, {0: (batch, b), head_axis: heads(x, head_axis)}))

        sinks = operands.logit_params.sinks
        if sinks is not None:
            sinks = slice_dims(sinks, {0: heads(sinks, 0)})
        block = Operands(
            cut(operands.query, 2),
            cut(operands.key, 2),
            cut(operands.value, 2),
            LogitParams(sinks=sinks),
        )
        parts = function(block, *jax.tree.map(lambda x: cut(x, 1), like_out))

        def write(x: Array, part: Array) -> Array:
            part = pin_layout(part.astype(x.dtype))
            start, _ = heads(x, head_axis)
            starts = [batch, *[0] * (head_axis - 1), start, *[0] * (x.ndim - head_axis - 1)]
            return write_slice(x, part, starts)

        return jax.tree.map(write, results, parts)

    return visit_blocks(schedule, operands, step, results)


def visit_tiles(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    rows: tuple[Array, ...],
    step: Callable[[Any, Tile], Any],
    like_query: tuple[Array, ...] = (),
    prefetch_rows: bool = False,
    prefetch: Prefetch | None = None,
    long_axis: int | None = None,
) -> Fold:
    """Return a function that folds `step(carry, tile)` over the tiles that may see something.

    It visits one `schedule.head_block` after the other. A tile gets its slices of `rows` (B K G T
    or B K G T D) and of `like_query` (B T N D). `long_axis`: whether large tiles are rather high
    (0) or wide (1).

    XLA:GPU fuses the consumers of a product into it only if their other inputs are parameters of
    the loop, neither slices nor another product. So, with `prefetch_rows`, compute the inputs that
    a step combines with a product (`rows` B K G T, mask, dropout) in the step before. With
    `prefetch`, also compute `prefetch.make(tile)` in the step before.
    """
    B, T, S, K = operands.shape.B, operands.shape.T, operands.shape.S, operands.shape.K
    if 0 in (B, T, S, K, operands.shape.G):
        return lambda carry: carry  # there is no key, or no query
    traced_bounds = has_array_bounds(problem, operands)
    groups = () if traced_bounds else tile_groups(problem, schedule, operands, long_axis)
    b, k = schedule.heads_of_tile(B, K)

    def cutter(first, rows, masked: bool, size: TileSize, starts: np.ndarray) -> CutTile:
        sources = TileSources(operands, like_query, rows, (T, S))
        if schedule.max_merged_logits:
            sources = slice_shared(sources, size, starts)
        return functools.partial(cut_tile, problem, sources, size, masked, first)

    def fold_of_group(first, masked: bool, size: TileSize, starts: np.ndarray) -> Fold:
        cut = cutter(first, rows, masked, size, starts)
        if prefetch is not None:
            cut_ahead = cutter(first, prefetch.rows, masked, size, starts)
            return _fold_two_ahead(problem, cut, step, starts, cut_ahead, prefetch)
        if prefetch_rows:
            return _fold_one_ahead(problem, cut, step, starts)
        return _fold_in_order(cut, step, starts)

    def fold_of_block(first) -> Fold:
        """Return the fold over the tiles of the block at batch entry and key head `first`."""
        if traced_bounds:
            size = TileSize(b, k, *schedule.chunk_size)
            sources = TileSources(operands, like_query, rows, (T, S))
            cut = functools.partial(cut_tile, problem, sources, size, True, first)
            block = slice_batch(operands, first[0], b)
            return functools.partial(
                _visit_between_bounds, problem, schedule.chunk_size, block, cut, step
            )
        folds = [
            fold_of_group(first, masked, TileSize(b, k, t, c), starts)
            for (masked, t, c), starts in groups
        ]

        def fold(carry):
            for fold_group in folds:
                carry = fold_group(carry)
            return carry

        return fold

    if (b, k) == (B, K):
        return fold_of_block((0, 0))

    def step_block(first, carry):
        return fold_of_block(first)(carry)

    return functools.partial(visit_blocks, schedule, operands, step_block)


def visit_blocks(schedule: Schedule, operands: Operands, step, carry):
    """Fold `step((batch entry, key head), carry)` over the starts of the blocks."""
    assert schedule.head_block is not None
    b, k = schedule.head_block
    B = operands.shape.B
    K = operands.shape.K

    def body(n, carry):
        return step((n // (K // k) * b, n % (K // k) * k), carry)

    return lax.fori_loop(jnp.int32(0), jnp.int32(B // b * (K // k)), body, carry)


def _fold_in_order(cut: CutTile, step, starts: np.ndarray) -> Fold:
    """Return a fold over the tiles at `starts` [n, 2] that cuts each tile in its own step."""

    def body(carry, start):
        return step(carry, cut(*start)), None

    return lambda carry: lax.scan(body, carry, starts)[0]


class SideInputs(NamedTuple):
    """The arrays that a step combines with a product, computed a step or more before."""

    rows: tuple[Array, ...]
    keep: Array | None
    kept: Array | None  # by dropout


def _side_inputs(problem: Problem, cut: CutTile, start, with_mask: bool = True) -> SideInputs:
    """Compute the side inputs of a tile."""
    tile = cut(*start)
    keep = tile.keep if with_mask else None
    return SideInputs(tile.row_scalars, keep, kept_by_dropout(problem, tile))


def _cut_with(cut: CutTile, start, inputs: SideInputs) -> Tile:
    """Cut a tile whose side inputs are known from an earlier step."""
    tile = cut(*start)
    keep = tile.keep if inputs.keep is None else inputs.keep
    return tile._replace(row_scalars=inputs.rows, keep=keep, kept=inputs.kept)


def _shifted(starts: np.ndarray, steps: int) -> np.ndarray:
    """Return, for each tile, the start of the tile `steps` later; the last tile repeats."""
    n = len(starts)
    return starts[np.minimum(np.arange(n) + steps, n - 1)]


def _fold_one_ahead(problem: Problem, cut: CutTile, step, starts: np.ndarray) -> Fold:
    """Return a fold that computes the side inputs of a tile in the step before."""

    def body(state, start):
        carry, prepared = state
        this, following = start
        carry = step(carry, _cut_with(cut, this, prepared))
        return (carry, _side_inputs(problem, cut, following)), None

    prepared = _side_inputs(problem, cut, starts[0])

    def fold(carry):
        (carry, _), _ = lax.scan(body, (carry, prepared), (starts, _shifted(starts, 1)))
        return carry

    return fold


class Pipeline(NamedTuple):
    """What the step of a tile has of the steps before."""

    side: SideInputs  # of the tile
    side_of_make: SideInputs  # the side inputs of `make` for the next tile
    made: Array  # make(tile)


def _fold_two_ahead(
    problem: Problem,
    cut: CutTile,
    step,
    starts: np.ndarray,
    cut_ahead: CutTile,
    prefetch: Prefetch,
) -> Fold:
    """Return a fold that also computes `prefetch.make(tile)` in the step before.

    `make` has a product with side inputs of its own, so these are computed two steps before. The
    step of tile n reads its `Pipeline`, and computes for later steps:

      side inputs of tile n + 1
      make(tile n + 1), from the side inputs of `make` that the step of tile n - 1 computed
      side inputs of `make` for tile n + 2

    A loop over all tiles makes the last tile twice. It does not without `prefetch.with_mask`,
    because then the last tile is visited after the loop.
    """
    _, make, with_mask = prefetch
    side_inputs = functools.partial(_side_inputs, problem, with_mask=with_mask)

    def visit(carry, start, pipeline: Pipeline):
        tile = _cut_with(cut, start, pipeline.side)
        return step(carry, tile._replace(prefetched=pipeline.made))

    def body(state, start):
        carry, pipeline = state
        this, following, after = start
        carry = visit(carry, this, pipeline)
        tile = _cut_with(cut_ahead, following, pipeline.side_of_make)
        # Only now, so that the new result takes the memory of the old one.
        carry, key = lax.optimization_barrier((carry, tile.operands.key))
        made = make(tile._replace(operands=tile.operands._replace(key=key)))
        side = side_inputs(cut, following)
        return (carry, Pipeline(side, side_inputs(cut_ahead, after), made)), None

    later = _shifted(starts, 1)
    first_tile = _cut_with(cut_ahead, starts[0], side_inputs(cut_ahead, starts[0]))
    side = side_inputs(cut, starts[0])
    side_of_make = side_inputs(cut_ahead, later[0])

    def fold(carry):
        state = carry, Pipeline(side, side_of_make, make(first_tile))
        tiles = starts, later, _shifted(starts, 2)
        if with_mask:
            return lax.scan(body, state, tiles)[0][0]
        (carry, pipeline), _ = lax.scan(body, state, tuple(x[:-1] for x in tiles))
        return visit(carry, starts[-1], pipeline)

    return fold


def _visit_between_bounds(
    problem: Problem,
    chunk_size: tuple[int, int],
    operands: Operands,
    cut: CutTile,
    step,
    carry,
):
    """Fold `step(carry, tile)` over key tiles between bounds that lengths and offsets give.

    The bounds of a row of tiles span the keys that its queries see in any batch entry.
    """
    T = operands.query.shape[1]
    S = operands.key.shape[1]
    t, c = chunk_size
    offset = jnp.int32(problem.q_offset) if operands.q_offset is None else operands.q_offset
    q_end = jnp.int32(T) if operands.q_lengths is None else jnp.minimum(operands.q_lengths, T)
    kv_end = jnp.int32(S) if operands.kv_lengths is None else jnp.minimum(operands.kv_lengths, S)

    def visit_row(i, carry):
        some_from, some_to, _, _ = key_range(problem, offset, i * t, jnp.minimum(i * t + t, T) - 1)
        first = jnp.int32(0) if some_from is None else jnp.clip(some_from, 0, kv_end)  # b|1
        end = kv_end if some_to is None else jnp.clip(some_to, 0, kv_end)
        visible = (first < end) & (i * t < q_end)
        first_tile = jnp.where(visible, first, S).min() // c
        end_tile = (jnp.where(visible, end, 0).max() + c - 1) // c

        def visit_tile(j, carry):
            return step(carry, cut(i * t, j * c))

        return lax.fori_loop(
            first_tile.astype(jnp.int32), end_tile.astype(jnp.int32), visit_tile, carry
        )

    row_count = (jnp.max(q_end, initial=0) + t - 1) // t
    return lax.fori_loop(jnp.int32(0), row_count.astype(jnp.int32), visit_row, carry)
