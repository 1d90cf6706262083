"""Cotangents of the precomputed numbers of a score_fn that no kernel sums: of keys and differences.

They take one more pass of the chunked path, from out and lse of a kernel. In it, the precomputed
numbers stand for the user's function. A tile reads a window w of a vector of differences, and
spreads it along its diagonals:
  tile[r, c] = w[r - c + C - 1]    for a tile with C columns
Its rows are w reversed, each shifted by one against the next. The transpose sums diagonals.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from memeff.chunked import implementation as chunked
from memeff.pallas.user_functions import calls, tile_function
from memeff.pallas.user_functions.partition import Numbers, PartitionedFunction
from memeff.problem import Operands, Problem, Schedule
from memeff.sharding import vary_together
from memeff.slicing import slice_dims
from memeff.softmax import Lse
from memeff.user_functions import PairIndices


def extra_cotangents(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    out: Array,
    lse: Lse,
    dout: Array,
    dlse: Array | None,
) -> Sequence[Array]:
    """Return the cotangents of score_fn's numbers in `needs_extra_pass`, in their order."""
    partition, numbers = calls.score_numbers(problem, operands)
    floats = tuple(numbers.pop(x) for x in partition.needs_extra_pass)
    shape = operands.shape
    offset = problem.q_offset if operands.q_offset is None else operands.q_offset
    offset = jnp.broadcast_to(offset, (shape.B,)).astype(jnp.int32)
    function: Any = ChunkedFunction(partition, shape.G, calls.diagonal_offset(shape.S))
    problem = dataclasses.replace(problem, score_fn=function)
    terms = operands.logit_params._replace(score=floats)
    rest = (offset, *numbers.values())
    operands = operands._replace(logit_params=terms, score_nonfloat_params=rest)
    gradients = chunked.logit_param_gradients(problem, schedule, operands, out, lse, dout, dlse)
    return gradients.score


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkedFunction:
    """A score_fn as the chunked path calls it: on its tiles, from precomputed numbers."""

    partition: PartitionedFunction
    G: int
    diagonal_offset: int

    def __call__(self, score: Array, indices: PairIndices, floats, rest) -> Array:
        """Return the new score [B, K, G, t, c].

        `floats` are the numbers in `needs_extra_pass`. `rest` is the offset of each batch entry,
        and then the other numbers.
        """
        shape = score.shape
        b, k, _, t, c = shape
        offset, *numbers = rest
        q_pos = indices.q_pos
        if q_pos.ndim == 1:
            q_pos = q_pos[None]  # 1 t
        first_batch = indices.batch[0]
        # counted from the last row, because the first may be hidden
        first_row = q_pos[0, -1] - (t - 1) - offset[first_batch]
        first_col = indices.k_pos[-1] - (c - 1)
        first_difference = first_row - first_col - (c - 1) + self.diagonal_offset
        first_head = indices.head[0, 0] // self.G
        batch = first_batch, b
        rows = first_row, t
        cols = first_col, c
        heads = {0: batch, 1: (first_head, k)}
        window = heads | {3: (first_difference, t + c - 1)}

        def on_tile(axis, x):
            """Return a tile's part of a number, with dims that broadcast to B K G t c."""
            if axis == "head_numbers":
                return slice_dims(x, heads)[..., None, None]
            if axis == "query_numbers":
                return slice_dims(x, {0: batch, 1: rows})[:, None, None, :, None]
            if axis == "key_numbers":
                return slice_dims(x, {0: batch, 1: cols})[:, None, None, None]
            return spread_diagonals(slice_dims(x, window), t, c)

        axes = {}
        for axis in Numbers._fields:
            axes |= dict.fromkeys(getattr(self.partition.names_by_axis, axis), axis)
        needs_extra_pass = self.partition.needs_extra_pass
        other_names = [x for x in self.partition.precomputed if x not in needs_extra_pass]
        names = (*needs_extra_pass, *other_names)
        jaxpr = self.partition.jaxpr
        env = {}
        for x, number in zip(names, (*floats, *numbers), strict=True):
            tile = jnp.broadcast_to(on_tile(axes[x], number), shape)
            env[x] = tile_function.to_tile(tile, jaxpr.types[x].dtype, shape)
        q_tile = jnp.broadcast_to(q_pos[:, None, None, :, None], shape)
        k_tile = jnp.broadcast_to(indices.k_pos, shape)
        score_name, q_name, k_name = tile_function.pair_inputs(jaxpr, True)
        env |= {score_name: score, q_name: q_tile, k_name: k_tile}

        def match_types(values):
            return vary_together(values, score)

        return tile_function.run_tile_eqns(self.partition, env, shape, match_types)


def spread_diagonals(w: Array, t: int, c: int) -> Array:
    """Spread w [..., t + c - 1] along the diagonals of a tile [..., t, c]."""
    width = t + c - 1
    lead = w.shape[:-1]
    padding = [(0, 0)] * len(lead) + [(0, 1)]
    row = jnp.pad(w[..., ::-1], padding)  # ... t+c
    rows = jnp.broadcast_to(row[..., None, :], (*lead, t, width + 1))
    # In rows of length `width`, each begins one entry later than the one above.
    flat = lax.collapse(rows, len(lead))
    start = t - 1
    flat = lax.slice_in_dim(flat, start, start + t * width, axis=-1)
    rows = flat.reshape(*lead, t, width)
    return rows[..., :c]
