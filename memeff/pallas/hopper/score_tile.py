"""Compute masks and logits of a tile of query-key pairs in registers.

A tile has queries along one dim and keys along the other, either way round. Numbers of queries or
of keys become tiles, too, each repeated along the other dim. User functions read their precomputed
arrays here: a number for each head from global memory, a vector for each query and each key from
shared memory, and one of each head's position differences from global memory.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.dropout import QueryWords, mix32_keep, words_of_head
from memeff.logits import logits_base2
from memeff.masking import MaskInputs, bias_hides, mask_pairs, query_positions
from memeff.pallas.hopper.bias import load_bias
from memeff.pallas.hopper.mosaic import (
    COL,
    ROW,
    Barrier,
    Ref,
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

# Vectors in shared memory, of queries and of keys, in the order of `Scalars.by_query` and `by_key`.
TokenVectors = tuple[Sequence[Ref], Sequence[Ref]]


def barrier_arrivals(scalars: Scalars) -> tuple[int, int]:
    """Return how many token vectors are copied for a tile of queries, and for a tile of keys."""
    return len(scalars.by_query), len(scalars.by_key)


def scratch_shapes(
    scalars: Scalars, queries: tuple[int, int], keys: tuple[int, int]
) -> dict[str, TokenVectors]:
    """Return the types of token vectors in shared memory. `queries`, `keys` are [slots, tokens]."""

    def vectors(arrays, shape: tuple[int, int]):
        return tuple(plgpu.SMEM(shape, x.dtype) for x in arrays)

    return {"token_vectors": (vectors(scalars.by_query, queries), vectors(scalars.by_key, keys))}


def copy_token_vectors(
    vectors: Sequence[Ref],
    tokens,
    shared: Sequence[Ref],
    slot,
    ready: Barrier,
) -> None:
    """Copy the entries of `vectors` at `tokens` to `slot` of shared memory."""
    for source, target in zip(vectors, shared, strict=True):
        plgpu.copy_gmem_to_smem(source.at[tokens], target.at[slot], ready)


class HeadNumbers(NamedTuple):
    """The precomputed arrays of user functions, and of dropout, that belong to one query head."""

    numbers: tuple[Array, ...] = ()  # of the head
    differences: tuple[Ref, ...] = ()  # vectors in global memory, of position differences
    dropout: tuple[Array, ...] = ()  # words of the head; none if all heads share one mask


def head_number_refs(scalars: Scalars, n) -> HeadNumbers:
    """Return the arrays of query head n. Call this before a loop, because it reads numbers."""
    numbers = tuple(ref[n] for ref in scalars.head_numbers)
    differences = tuple(ref.at[n] for ref in scalars.difference_numbers)
    return HeadNumbers(numbers, differences, tuple(ref[n] for ref in scalars.head_dropout))


class ScoreTile(NamedTuple):
    """A tile of query-key pairs: their positions, masks and logits."""

    problem: Problem  # its score_fn and mask_fn are TileFunctions
    shape: tuple[int, int]
    first: tuple[Any, Any]  # positions of the first query and of the first key
    mask_inputs: MaskInputs
    scalars: Scalars
    head: HeadNumbers
    token_vectors: TokenVectors  # of this tile
    query_dim: int = 0  # along which queries are
    loaded: dict[int, Array] = {}  # tiles of position differences, by their index
    bias: Array | None = None  # of the tile, in its own dtype; None: the call has none
    # Row r is the query r modulo `row_period`, of one head after the other; None: of one head.
    row_period: int | None = None
    vectors_are_shared: bool = True  # token vectors are in shared memory, not in global memory

    @classmethod
    def in_global_memory(
        cls,
        problem: Problem,
        work: Any,
        first: tuple[Any, Any],
        shape: tuple[int, int],
        head: HeadNumbers,
        query_dim: int = 0,
    ) -> "ScoreTile":
        """Return the tile of `first` query and key, whose token vectors stay in global memory.

        Its loads are started.
        """
        scalars = work.scalars
        sizes = shape if query_dim == 0 else shape[::-1]
        row, col = (pl.ds(x, size) for x, size in zip(first, sizes, strict=True))
        by_query = tuple(x.at[row] for x in scalars.by_query)
        vectors = by_query, tuple(x.at[col] for x in scalars.by_key)
        tile = cls(problem, shape, first, work.mask_inputs, scalars, head, vectors, query_dim)
        return tile._replace(vectors_are_shared=False).with_loads_started()

    @property
    def terms(self) -> LogitParams:
        """Return the scale, soft cap and bias of the tile, as `logits_from_dots` takes them."""
        return self.scalars.logit_terms._replace(bias=self.bias)

    @property
    def rows(self) -> Array:
        """Return the queries' positions as a tile."""
        rows = positions(self.first[0], self.shape, self.query_dim)
        return rows if self.row_period is None else lax.rem(rows, jnp.int32(self.row_period))

    @property
    def cols(self) -> Array:
        """Return the keys' positions as a tile."""
        return positions(self.first[1], self.shape, 1 - self.query_dim)

    def with_loads_started(self) -> "ScoreTile":
        """Start to load the position differences of score_fn.

        Call this before the products beside which the loads are to arrive.
        """
        score_fn: Any = self.problem.score_fn
        if score_fn is None:
            return self
        indices = score_fn.indices.difference_numbers
        return self._replace(loaded={n: self._difference(score_fn, n) for n in indices})

    def with_bias(self, n, shared: Ref | None) -> "ScoreTile":
        """Load the bias of head n. `shared` is the tile [queries, keys] of a bias of pairs."""
        dim = self.query_dim
        bias = load_bias(self.scalars, n, self.first, self.shape, dim, shared)
        return self._replace(bias=bias)

    def mask(self) -> Array:
        """Return True where the query may attend to the key."""
        inputs = self.mask_inputs._replace(bias=self.bias)
        mask_fn = self.problem.mask_fn
        if self.scalars.q_segments is not None:
            q_segments = self._query_numbers(0)
            inputs = inputs._replace(q_segments=q_segments, kv_segments=self._key_numbers(0))
        if mask_fn is not None:
            indices = self.pair_indices(mask_fn)
            assert indices is not None
            inputs = inputs._replace(mask=mask_fn(None, indices, (), indices.mask_params))
        return mask_pairs(self.problem, inputs, self.rows, self.cols)

    def bias_mask(self) -> Array | None:
        """Return True where the bias does not hide the key; None without a bias.

        This is the mask of a tile whose pairs are all visible but for the bias.
        """
        return None if self.bias is None else bias_hides(self.bias) ^ True

    def logits(self, raw: Array, keep: Array | None) -> Array:
        """Return logits in base 2 from dot products, -inf where not `keep`."""
        indices = self.pair_indices(self.problem.score_fn)
        return logits_base2(self.problem, raw, self.terms, keep, indices)

    def kept(self) -> Array:
        """Return True where dropout keeps the pair."""
        dim = self.query_dim
        first = int(self.scalars.q_segments is not None)
        by_query, by_key = self.token_vectors
        words = QueryWords(*(self._load_vector(x, dim) for x in by_query[first:][:2]))
        head = QueryWords(*self.head.dropout) if self.head.dropout else None
        words = words_of_head(words, head)
        tiles = QueryWords(*(broadcast_vector(x, self.shape, dim) for x in words))
        dropout = self.problem.dropout
        assert dropout is not None
        return mix32_keep(dropout, tiles, self._token_tile(by_key[first], 1 - dim))

    def pair_indices(self, function: Any) -> PairIndices | None:
        """Return the indices and precomputed values that `function`, score_fn or mask_fn, reads."""
        if function is None:
            return None
        q_pos = query_positions(self.problem, self.mask_inputs.q_offset, self.rows)
        unused = jnp.int32(0)  # batch and head
        values = self._precomputed(function)
        return PairIndices(
            unused, unused, q_pos, self.cols, score_params=values, mask_params=values
        )

    def differentiable_values(self) -> LogitParams:
        """Return what a logit depends on as tiles, so that each pair has a cotangent.

        These are the scale and the soft cap, if they are arrays, and score_fn's values.
        """

        def tile(x: Array) -> Array:
            return x if x.shape == self.shape else lax.broadcast(x, self.shape)

        tiles = jax.tree.map(tile, self.scalars.logit_terms)
        score_fn: Any = self.problem.score_fn
        if score_fn is None or not score_fn.kernel_gradients:
            return tiles
        names = sum(score_fn.partition.names_by_axis, ())
        values = dict(zip(names, self._precomputed(score_fn), strict=True))
        score = tuple(tile(values[name]) for name in score_fn.partition.kernel_gradients)
        return tiles._replace(score=score)

    def _precomputed(self, function: TileFunction) -> tuple[Array, ...]:
        """Return all precomputed values of `function`: scalars for the head, tiles for all else."""
        scalars = self.scalars
        indices = function.indices
        # Segments come first among the token vectors.
        skip_queries = len(scalars.by_query) - len(scalars.query_numbers)
        skip_keys = len(scalars.by_key) - len(scalars.key_numbers)
        values = Numbers(
            tuple(self.head.numbers[n] for n in indices.head_numbers),
            tuple(self._query_numbers(skip_queries + n) for n in indices.query_numbers),
            tuple(self._key_numbers(skip_keys + n) for n in indices.key_numbers),
            tuple(self._difference(function, n) for n in indices.difference_numbers),
        )
        return sum(values, ())

    def _query_numbers(self, n: int) -> Array:
        """Return the n-th vector of queries as a tile."""
        return self._token_tile(self.token_vectors[0][n], self.query_dim)

    def _key_numbers(self, n: int) -> Array:
        """Return the n-th vector of keys as a tile."""
        return self._token_tile(self.token_vectors[1][n], 1 - self.query_dim)

    def _token_tile(self, vector: Ref, dim: int) -> Array:
        """Load a vector along `dim`, and repeat it along the other one."""
        return broadcast_vector(self._load_vector(vector, dim), self.shape, dim)

    def _load_vector(self, vector: Ref, dim: int) -> Array:
        """Load a vector along `dim`."""
        return plgpu.load(vector, layout=(ROW, COL)[dim], optimized=self.vectors_are_shared)

    def _difference(self, function: TileFunction, n: int) -> Array:
        """Return the n-th vector of position differences as a tile."""
        if n in self.loaded:
            return self.loaded[n]
        first = self.first[0] - self.first[1] + function.diagonal_offset
        return diagonal_values(self.head.differences[n], first, self.shape, self.query_dim)
