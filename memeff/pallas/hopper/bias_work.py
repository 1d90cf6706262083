"""Find the tiles of pairs that a part of the gradient of the bias is a sum of.

Bias of pairs: a part is a tile of queries i and keys j. It is the sum over this tile of each batch
entry and each head that share the bias.
Bias of queries: a part is of queries of one head, and is the sum over all keys.
Bias of keys: a part is of keys of one head, and is the sum over all queries.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.scheduler import CallSizes, ends_and_mask
from memeff.pallas.hopper.tile_ranges import keys_seen
from memeff.problem import Problem
from memeff.shape import CallShape


class SharedBias(NamedTuple):
    """The dims of a bias of pairs over which its gradient is a sum."""

    by_batch: bool  # all batch entries share one bias
    by_heads: bool

    @classmethod
    def of(cls, bias: Array, shape: CallShape) -> "SharedBias":
        """Return the dims of size 1 of a bias [B|1, N|1, T, S] that the call has more of."""
        return cls(bias.shape[0] == 1 and shape.B > 1, bias.shape[1] == 1 and shape.N > 1)


class BiasVisit(NamedTuple):
    """A tile of pairs."""

    b: Any
    n: Any
    k: Any
    row: Any  # first query
    col: Any  # first key
    is_visible: Any
    mask_inputs: Any
    scalars: Scalars


class BiasWork(NamedTuple):
    """A part of the gradient, and how to find the tiles that it is a sum of."""

    place: tuple[Any, Any, Any, Any]  # batch entry, head, tile of queries, tile of keys
    form: str  # of the bias: "pairs", "queries" or "keys"
    most_visits: int  # tiles that may have a visible pair
    visit: Callable[[Any], BiasVisit]


class BiasParts(NamedTuple):
    """The parts of the gradient. Dims: batch, heads, tiles of queries, tiles of keys."""

    form: str
    item_dims: tuple[int, int, int, int]
    visited_dims: tuple[int, int, int, int]  # of the tiles that a part is a sum of
    tile: tuple[int, int]  # queries and keys
    result: jax.ShapeDtypeStruct

    @classmethod
    def of(
        cls, sizes: CallSizes, scalars: Scalars, shared: SharedBias, tile: tuple[int, int]
    ) -> "BiasParts":
        """Return the parts of the gradient for the form of the bias."""
        B = sizes.B
        N = sizes.K * sizes.G
        rows = -(-sizes.T // tile[0])
        cols = -(-sizes.S // tile[1])
        if scalars.bias is not None:
            entries = 1 if shared.by_batch else B
            heads = 1 if shared.by_heads else N
            result = (entries, heads, *scalars.bias.shape[2:])
            visited = B // entries, N // heads, 1, 1
            result = jax.ShapeDtypeStruct(result, scalars.bias.dtype)
            return cls("pairs", (entries, heads, rows, cols), visited, tile, result)
        if scalars.query_bias is not None:
            result = jax.ShapeDtypeStruct((B, N, rows * tile[0]), jnp.float32)
            return cls("queries", (B, N, rows, 1), (1, 1, 1, cols), tile, result)
        result = jax.ShapeDtypeStruct((B, N, cols * tile[1]), jnp.float32)
        return cls("keys", (B, N, 1, cols), (1, 1, rows, 1), tile, result)

    def find_work(self, problem: Problem, sizes: CallSizes, scalars: Scalars, index) -> BiasWork:
        """Return part `index`."""
        place = _unravel(index, self.item_dims)
        visit = functools.partial(self._find_visit, problem, sizes, scalars, place)
        return BiasWork(place, self.form, math.prod(self.visited_dims), visit)

    def _find_visit(
        self, problem: Problem, sizes: CallSizes, scalars: Scalars, place: tuple, r
    ) -> BiasVisit:
        """Return visit r of the part at `place`."""
        visited = _unravel(jnp.asarray(r, jnp.int32), self.visited_dims)
        b, n, i, j = (first + further for first, further in zip(place, visited, strict=True))
        scalars = scalars.of(b)
        rows, cols = self.tile
        row = i * rows
        ends, mask_inputs = ends_and_mask(sizes, scalars, cols)
        if sizes.T % rows:
            mask_inputs = mask_inputs._replace(q_lengths=ends[0])
        offset = problem.q_offset if scalars.q_offset is None else scalars.q_offset
        last = jnp.minimum(row + rows, sizes.T) - 1
        seen = keys_seen(problem, offset, row, last, ends, cols)
        is_visible = (seen.first <= j) & (j < seen.end)
        k = lax.div(n, jnp.int32(sizes.G))
        return BiasVisit(b, n, k, row, j * cols, is_visible, mask_inputs, scalars)


def _unravel(index, dims: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the indices of entry `index` of an array with `dims`."""
    indices = []
    for size in reversed(dims):
        indices.append(lax.rem(index, jnp.int32(size)))
        index = lax.div(index, jnp.int32(size))
    return tuple(reversed(indices))
