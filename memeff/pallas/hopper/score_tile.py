"""The pairs of a tile in a kernel: where they are, who sees whom, and their logits. Hides where functions have arrays from.

A tile has queries along one dim and keys along the other, either way round: what belongs to them is a tile here, too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from memeff.logits import logits_base2
from memeff.masking import MaskInputs, mask_pairs, query_positions
from memeff.pallas.hopper.mosaic import (
    COL,
    ROW,
    broadcast_vector,
    diagonal_values,
    plgpu,
    positions,
)
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.user_functions.partition import Numbers
from memeff.pallas.user_functions.tile_function import TileFunction
from memeff.problem import LogitParams, Problem
from memeff.user_functions import PairIndices

# in shared memory, of queries and of keys; as `by_query` and `by_key`
TokenVectors = tuple[Sequence[Any], Sequence[Any]]


def barrier_arrivals(scalars: Scalars) -> tuple[int, int]:
    """Copies of what belongs to a tile of queries, and of keys."""
    return len(scalars.by_query), len(scalars.by_key)


def scratch_shapes(
    scalars: Scalars, queries: tuple[int, int], keys: tuple[int, int]
) -> dict[str, TokenVectors]:
    """Shared memory for it."""
    of = lambda arrays, shape: tuple(plgpu.SMEM(shape, x.dtype) for x in arrays)
    return {"marks": (of(scalars.by_query, queries), of(scalars.by_key, keys))}


def copy_token_vectors(vectors: Sequence[Any], at, shared: Sequence[Any], slot, there) -> None:
    """Of the tokens `at`."""
    for ref, to in zip(vectors, shared, strict=True):
        plgpu.copy_gmem_to_smem(ref.at[at], to.at[slot], there)


def allow_approx_math(problem: Problem) -> bool:
    """May exponentials be rough? Of what bends logits, and is made anew from them in the backward, they may not."""
    score_fn: Any = problem.score_fn
    return problem.soft_cap is None and not (score_fn is not None and score_fn.curved)


class HeadNumbers(NamedTuple):
    """What functions have for a query head."""

    numbers: tuple[Array, ...] = ()
    differences: tuple[Any, ...] = ()  # in global memory


def head_number_refs(scalars: Scalars, n) -> HeadNumbers:
    """Numbers are read before a loop, for they would be read again in each step."""
    return HeadNumbers(
        tuple(ref[n] for ref in scalars.of_heads),
        tuple(ref.at[n] for ref in scalars.of_differences),
    )


class ScoreTile(NamedTuple):
    """`marks`: of this tile's queries and keys. `query_dim`: along which queries are."""

    problem: Problem  # functions in it are OnTiles
    shape: tuple[int, int]
    first: tuple[Any, Any]  # query and key
    sight: MaskInputs
    scalars: Scalars
    of_head: HeadNumbers
    marks: TokenVectors
    query_dim: int = 0
    differences: dict[int, Array] = {}  # tiles of those that are read

    @property
    def rows(self) -> Array:
        return positions(self.first[0], self.shape, self.query_dim)

    @property
    def cols(self) -> Array:
        return positions(self.first[1], self.shape, 1 - self.query_dim)

    def _mark(self, side: int, n: int) -> Array:
        """The n-th of queries (0) or of keys."""
        dim = self.query_dim if side == 0 else 1 - self.query_dim
        return broadcast_vector(
            plgpu.load(self.marks[side][n], layout=(ROW, COL)[dim]), self.shape, dim
        )

    def early(self) -> "ScoreTile":
        """With what logits need of global memory on its way: to be called before the products that it is to come beside."""
        score_fn: Any = self.problem.score_fn
        if score_fn is None:
            return self
        return self._replace(
            differences={n: self._difference(score_fn, n) for n in score_fn.indices.of_differences}
        )

    def _difference(self, function: TileFunction, n: int) -> Array:
        """Of each pair the n-th."""
        if n in self.differences:
            return self.differences[n]
        first = self.first[0] - self.first[1] + function.behind
        return diagonal_values(self.of_head.differences[n], first, self.shape, self.query_dim)

    def _made(self, function: TileFunction) -> tuple[Array, ...]:
        """All that was made for this function before."""
        behind = lambda vectors, of: len(vectors) - len(of)
        skip = (
            behind(self.scalars.by_query, self.scalars.of_queries),
            behind(self.scalars.by_key, self.scalars.of_keys),
        )
        numbers = Numbers(
            tuple(self.of_head.numbers[n] for n in function.indices.of_heads),
            tuple(self._mark(0, skip[0] + n) for n in function.indices.of_queries),
            tuple(self._mark(1, skip[1] + n) for n in function.indices.of_keys),
            tuple(self._difference(function, n) for n in function.indices.of_differences),
        )
        return sum(numbers, ())

    def places(self, function: Any) -> PairIndices | None:
        """For `function`, score_fn or mask_fn."""
        if function is None:
            return None
        q_pos, none = query_positions(self.problem, self.sight.q_offset, self.rows), jnp.int32(0)
        made = self._made(function)
        return PairIndices(none, none, q_pos, self.cols, of_score=made, of_mask=made)

    def terms(self) -> LogitParams:
        """What has a gradient, as tiles, each of whose numbers gets its own."""
        score_fn: Any = self.problem.score_fn
        if score_fn is None or not score_fn.moving:
            return LogitParams()
        by_name = dict(zip(sum(score_fn.apart.before, ()), self._made(score_fn), strict=True))
        wide = lambda x: x if x.shape == self.shape else lax.broadcast(x, self.shape)
        return LogitParams(score=tuple(wide(by_name[x]) for x in score_fn.apart.moving))

    def seen(self) -> Array:
        """Who sees whom."""
        sight, mask_fn = self.sight, self.problem.mask_fn
        if self.scalars.q_segments is not None:
            sight = sight._replace(q_segments=self._mark(0, 0), kv_segments=self._mark(1, 0))
        if mask_fn is not None:
            at = self.places(mask_fn)
            assert at is not None
            sight = sight._replace(mask=mask_fn(None, at, (), at.of_mask))
        return mask_pairs(self.problem, sight, self.rows, self.cols)

    def logits(self, raw: Array, keep: Array | None) -> Array:
        """In bits."""
        return logits_base2(
            self.problem, raw, LogitParams(), keep, self.places(self.problem.score_fn)
        )
