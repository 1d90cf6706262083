"""Cotangents of what a score_fn has for each key, or each difference of positions, over whose pairs no kernel sums.

One more walk of the chunked path makes them, from out and lse of a kernel, with what was made before in the place of the
user's function. Of a vector of differences a tile reads a window, w, and spreads it along its diagonals:
  tile_rc = w_(r - c + C - 1)      as rows of w backwards, each shifted by one against the next; the transpose sums diagonals
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from memeff.chunked import implementation as chunked
from memeff.pallas.user_functions import calls, tile_function
from memeff.pallas.user_functions.partition import Numbers, PartitionedFunction
from memeff.problem import Operands, Problem
from memeff.sharding import vary_together
from memeff.slicing import slice_dims
from memeff.softmax import Lse
from memeff.user_functions import PairIndices


def extra_cotangents(
    problem: Problem, operands: Operands, out: Array, lse: Lse, dout: Array, dlse: Array | None
) -> Sequence[Array]:
    """Of the numbers of score_fn that are `walked` (see `Apart`), in their order and shapes."""
    apart, found = calls.score_numbers(problem, operands)
    by_name: dict[int, Array] = dict(zip(sum(apart.before, ()), sum(found, ()), strict=True))
    floats = tuple(by_name.pop(x) for x in apart.walked)
    (B, _, _, G, _), S = operands.query.shape, operands.key.shape[1]
    offset = jnp.broadcast_to(
        problem.q_offset if operands.q_offset is None else operands.q_offset, (B,)
    )
    function: Any = ChunkedFunction(apart, G, calls.diagonal_offset(S))
    problem = dataclasses.replace(problem, score_fn=function)
    terms = operands.terms._replace(score=floats)
    operands = operands._replace(
        terms=terms, score_rest=(offset.astype(jnp.int32), *by_name.values())
    )
    return chunked.logit_param_gradients(problem, operands, out, lse, dout, dlse).score


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkedFunction:
    """In the place of a `Given`: the same function, of the chunked path's tiles, by what was made before."""

    apart: PartitionedFunction
    G: int
    behind: int

    def __call__(self, score: Array, at: PairIndices, floats, rest) -> Array:
        """`floats`: of `apart.walked`; `rest`: the offset of each batch entry, and the other numbers."""
        shape, (offset, *others) = score.shape, rest
        b, k, _, t, c = shape
        q_pos = at.q_pos if at.q_pos.ndim == 2 else at.q_pos[None]
        batch = at.batch[0], b
        rows = q_pos[0, -1] - (t - 1) - offset[batch[0]], t  # the first may be hidden
        cols = at.k_pos[-1] - (c - 1), c
        window = rows[0] - cols[0] - (c - 1) + self.behind, t + c - 1
        heads = {0: batch, 1: (at.head[0, 0] // self.G, k)}
        part: dict[str, Any] = {
            "of_heads": lambda x: slice_dims(x, heads)[..., None, None],
            "of_queries": lambda x: slice_dims(x, {0: batch, 1: rows})[:, None, None, :, None],
            "of_keys": lambda x: slice_dims(x, {0: batch, 1: cols})[:, None, None, None],
            "of_differences": lambda x: spread(slice_dims(x, heads | {3: window}), t, c),
        }
        apart, types = self.apart, self.apart.whole.types
        names = [x for x in sum(apart.before, ()) if x not in apart.walked]
        given = dict(zip((*apart.walked, *names), (*floats, *others), strict=True))
        side = {x: side for side in Numbers._fields for x in getattr(apart.before, side)}
        wide = lambda x: jnp.broadcast_to(x, shape)
        env = {
            x: tile_function.loaded(wide(part[side[x]](y)), types[x].dtype, shape)
            for x, y in given.items()
        }
        pair = score, wide(q_pos[:, None, None, :, None]), wide(at.k_pos)
        env |= dict(zip(tile_function.of_pair(apart.whole, True), pair, strict=True))
        return tile_function.result(apart, env, shape, lambda values: vary_together(values, score))


def spread(w: Array, t: int, c: int) -> Array:
    """w [..., t + c - 1] along the diagonals of [..., t, c]."""
    width, lead = t + c, w.shape[:-1]
    rows = jnp.broadcast_to(
        jnp.pad(w[..., ::-1], [(0, 0)] * len(lead) + [(0, 1)])[..., None, :], (*lead, t, width)
    )
    flat = lax.slice_in_dim(lax.collapse(rows, len(lead)), t - 1, t - 1 + t * (width - 1), axis=-1)
    return flat.reshape(*lead, t, width - 1)[..., :c]
