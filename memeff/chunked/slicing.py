"""Cut the operands to one tile, and write the results of a tile back into whole arrays."""

from typing import NamedTuple

import jax
import numpy as np
from jax import Array, lax

from memeff.autodiff.tile_sum import TileLocation, locate
from memeff.chunked.tile import Tile
from memeff.masking import mask_tile, pair_indices
from memeff.problem import LogitParams, Operands, Problem, map_operands, split_axis, split_heads
from memeff.slicing import add_slice, slice_dims, slice_letters, write_slice
from memeff.stored import StoredKeys


def pin_layout(x: Array, dim: int = 2) -> Array:
    """Pin the layout from `dim` on by merging and splitting those dims.

    Otherwise XLA transposes the whole array outside the loop, to the layout that it prefers for a
    slice. (A layout constraint would do, but cannot be exported.)
    """
    return lax.optimization_barrier(lax.collapse(x, dim)).reshape(x.shape)


class TileSources(NamedTuple):
    """The arrays that tiles are cut from."""

    operands: Operands
    like_query: tuple[Array, ...]  # B T N D
    rows: tuple[Array, ...]  # B K G T or B K G T D
    lengths: tuple[int, int]  # T and S of the whole arrays


class TileSize(NamedTuple):
    """The batch entries, key heads, rows and columns of a tile."""

    b: int
    k: int
    t: int
    c: int


def cut_tile(
    problem: Problem,
    sources: TileSources,
    size: TileSize,
    masked: bool,
    first,
    i,
    j,
) -> Tile:
    """Return the tile at query `i` and key `j` of the block at batch entry and key head `first`."""
    operands, like_query, rows, lengths = sources
    location = locate((*first, i, j), size, operands.shape.G, lengths, masked)
    cuts = location.cuts

    def cut(x: Array | StoredKeys, dims: str) -> Array:
        return x.cut(cuts) if isinstance(x, StoredKeys) else slice_letters(x, dims, cuts)

    tile_operands = split_heads(map_operands(cut, operands), size.k)
    query_vectors = [
        split_axis(cut(x, "btnd"), 2, size.k).transpose(0, 2, 3, 1, 4) for x in like_query
    ]
    row_slices = [cut(x, "bkgtd"[: x.ndim]) for x in rows]
    tile = make_tile(problem, location, tile_operands, (operands.shape.K, *lengths))
    return tile._replace(
        row_scalars=tuple(x for x in row_slices if x.ndim == 4),  # b k g t
        row_vectors=(*query_vectors, *(x for x in row_slices if x.ndim == 5)),  # b k g t d
    )


def make_tile(
    problem: Problem, location: TileLocation, operands: Operands, sizes: tuple[int, int, int]
) -> Tile:
    """Return the tile of operands that are cut and in the layout of `split_heads`.

    `sizes` are K, T and S of the whole arrays.
    """
    positions = location.rows, location.cols
    like = operands.query[..., 0, 0]  # b k g
    indices = pair_indices(problem, operands, like, location.first, *positions)
    return Tile(
        operands=operands,
        row_scalars=(),
        row_vectors=(),
        positions=positions,
        indices=indices,
        keep=mask_tile(problem, operands, *positions, indices) if location.masked else None,
        head_start=location.first,
        row_start=location.cuts["t"][0],
        col_start=location.cuts["s"][0],
        sizes=sizes,
    )


def add_logit_params(
    total: LogitParams, part: LogitParams, tile: Tile, write_bias: bool = False
) -> LogitParams:
    """Add the cotangents of a tile's parameters to their totals; None where either is None.

    `write_bias`: write that of the bias over the total, which holds nothing yet.
    """

    def add(x: Array, y: Array) -> Array:
        return x + y.astype(x.dtype)

    def add_optional(x: Array | None, y: Array | None) -> Array | None:
        return None if x is None or y is None else add(x, y)

    bias = None
    if total.bias is not None and part.bias is not None:
        batch, head = tile.head_start
        B, K, G, t, c = part.bias.shape
        start = (batch, head * G, tile.row_start, tile.col_start)
        cotangent = part.bias.reshape(B, K * G, t, c)
        if write_bias:
            bias = write_slice(total.bias, cotangent.astype(total.bias.dtype), start)
        else:
            bias = add_slice(total.bias, cotangent, start)
    return LogitParams(
        scale=add_optional(total.scale, part.scale),
        soft_cap=add_optional(total.soft_cap, part.soft_cap),
        bias=bias,
        score=jax.tree.map(add, total.score, part.score),
        transform=jax.tree.map(add, total.transform, part.transform),
    )


def slice_batch(operands: Operands, first, size: int) -> Operands:
    """Slice the lengths, offsets and segments of `size` batch entries from `first` on."""

    def cut(x: Array, dims: str) -> Array:
        return slice_dims(x, {0: (first, size)}) if dims in ("b", "bt", "bs") else x

    return map_operands(cut, operands)


def slice_shared(sources: TileSources, size: TileSize, starts: np.ndarray) -> TileSources:
    """Cut arrays to the queries, or the keys, that all tiles at `starts` [n, 2] share.

    `cut_tile` then need not slice these in each step.
    """
    operands, like_query, rows, lengths = sources
    row, col = starts[0].tolist()
    same_rows, same_cols = (starts == starts[0]).all(0)
    if same_rows:
        row = min(row, operands.query.shape[1] - size.t)
        query, *like_query = (
            lax.slice_in_dim(x, row, row + size.t, axis=1) for x in (operands.query, *like_query)
        )
        operands = operands._replace(query=query)
        rows = tuple(lax.slice_in_dim(x, row, row + size.t, axis=3) for x in rows)
    if same_cols:
        col = min(col, operands.key.shape[1] - size.c)
        key = lax.slice_in_dim(operands.key, col, col + size.c, axis=1)
        value = lax.slice_in_dim(operands.value, col, col + size.c, axis=1)
        operands = operands._replace(key=key, value=value)
    return TileSources(operands, tuple(like_query), rows, lengths)
