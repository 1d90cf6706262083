"""Cut the operands to one tile, and write the results of a tile back into whole arrays."""

import jax
import numpy as np
from jax import Array, lax

from memeff.autodiff.tile_sum import positions
from memeff.chunked.tile import Tile
from memeff.masking import mask_tile, pair_indices
from memeff.problem import LogitParams, Operands, Problem
from memeff.slicing import add_slice, slice_dims, slice_optional


def pin_layout(x: Array, dim: int = 2) -> Array:
    """With the dims from `dim` on in their order, which alone a merged dim can have.

    Else XLA brings whole arrays, outside the loop, into the order that it wants of a part. (A layout constraint would do,
    but cannot be exported.)
    """
    return lax.optimization_barrier(lax.collapse(x, dim)).reshape(x.shape)


def cut_tile(
    operands: Operands,
    flat: tuple[Array, ...],
    rows: tuple[Array, ...],
    lengths: tuple[int, int],
    problem: Problem,
    masked: bool,
    first,
    i,
    j,
) -> Tile:
    """Slices of everything for the tile at query `i` and key `j` of the block that begins with batch entry and key head
    `first`; `flat` are B T N ..., the query first, `rows` B K G T|T D. Mask and bias are B|1 N|1 T|1 S|1.
    """
    t, c = problem.chunk_size
    B, _, K, G, _ = operands.query.shape
    b, k = problem.block or (B, K)
    row, at_rows = positions(i, t, lengths[0])
    col, at_cols = positions(j, c, lengths[1])
    batch, heads = (first[0], b), (first[1], k)

    def spread(x):
        x = slice_dims(x, {0: batch, 1: (row, t), 2: (first[1] * G, k * G)})
        return x.reshape(b, t, k, G, x.shape[-1]).transpose(0, 2, 3, 1, 4)  # b k g t h|d

    def both(x):
        if x is None:
            return None
        x = slice_dims(x, {0: batch, 1: (first[1] * G, k * G), 2: (row, t), 3: (col, c)})
        return x.reshape(x.shape[0], *((k, G) if x.shape[1] > 1 else (1, 1)), *x.shape[2:])

    query, *wide = map(spread, flat)
    here = slice_batch(operands, first[0], b)
    here = here._replace(
        query=query,
        key=slice_dims(operands.key, {0: batch, 1: (col, c), 2: heads}).swapaxes(1, 2),
        value=slice_dims(operands.value, {0: batch, 1: (col, c), 2: heads}).swapaxes(1, 2),
        mask=both(operands.mask),
        terms=operands.terms._replace(bias=both(operands.terms.bias)),
        q_segments=slice_optional(here.q_segments, {1: (row, t)}),
        kv_segments=slice_optional(here.kv_segments, {1: (col, c)}),
    )
    cut = [slice_dims(x, {0: batch, 1: heads, 3: (row, t)}) for x in rows]
    narrow, wide = tuple(x for x in cut if x.ndim == 4), (*wide, *(x for x in cut if x.ndim == 5))
    at = pair_indices(problem, here, query[..., 0, 0], first, at_rows, at_cols)
    keep = mask_tile(problem, here, at_rows, at_cols, at) if masked else None
    return Tile(here, narrow, wide, (at_rows, at_cols), at, keep, first, row, col, (K, *lengths))


def add_logit_params(total: LogitParams, part: LogitParams, tile: Tile) -> LogitParams:
    bias = None
    if total.bias is not None and part.bias is not None:
        bias = add_slice(total.bias, part.bias, (*tile.first, 0, tile.row, tile.col))
    pairs = zip(total[:2], part[:2], strict=True)
    scale, soft_cap = (None if a is None or b is None else a + b.astype(a.dtype) for a, b in pairs)
    score, transform = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total[3:5], part[3:5])
    return LogitParams(scale, soft_cap, bias, score, transform)


def slice_batch(operands: Operands, first, size: int) -> Operands:
    """With what belongs to a batch entry, but for query, key and value, cut to some entries."""
    names = "q_lengths", "kv_lengths", "q_offset", "q_segments", "kv_segments"
    return operands._replace(
        **{name: slice_optional(getattr(operands, name), {0: (first, size)}) for name in names}
    )


def slice_shared(
    operands: Operands,
    flat: tuple[Array, ...],
    rows: tuple[Array, ...],
    size: tuple[int, int],
    starts: np.ndarray,
):
    """What `cut_tile` slices, cut to the queries, or the keys, that all tiles of a list share: once, not in each step."""
    (row, col), (same_rows, same_cols) = starts[0].tolist(), (starts == starts[0]).all(0)
    if same_rows:
        row = min(row, flat[0].shape[1] - size[0])
        flat = tuple(lax.slice_in_dim(x, row, row + size[0], axis=1) for x in flat)
        rows = tuple(lax.slice_in_dim(x, row, row + size[0], axis=3) for x in rows)
    if same_cols:
        col = min(col, operands.key.shape[1] - size[1])
        key, value = (lax.slice_in_dim(x, col, col + size[1], axis=1) for x in operands[1:3])
        operands = operands._replace(key=key, value=value)
    return operands, flat, rows
