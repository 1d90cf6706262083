"""Hold the arrays that the kernels read besides query, key and value."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from memeff.problem import LogitParams

OF_BATCH = (
    "q_offset",
    "q_lengths",
    "kv_lengths",
    "query_entries",
    "key_entries",
    "value_entries",
    "scale",
    "soft_cap",
    "ratio",
)


class Scalars(NamedTuple):
    """Offsets, lengths, segments, sinks, the bias and precomputed arrays of user functions.

    None or () stands for what a call does not have. In a kernel the fields are refs. T' and S' are
    T and S, padded to whole tiles.
    """

    q_offset: Array | None = None  # [B], int32
    q_lengths: Array | None = None  # [B], int32
    kv_lengths: Array | None = None  # [B], int32
    # Batch entries that the call reads, see `problem.Entries`
    query_entries: Any = None  # [B], int32
    key_entries: Any = None  # [B], int32
    value_entries: Any = None  # [B], int32
    # Where they are arrays, in nats, the same for all batch entries, see `logits.with_ratio`:
    scale: Any = None  # [B], float32
    soft_cap: Any = None  # [B], float32
    ratio: Any = None  # [B], float32
    q_segments: Any = None  # [B, T'], int32
    kv_segments: Any = None  # [B, S'], int32
    # Random words of dropout, int32, see `dropout.mix32_keep`:
    query_dropout: tuple[Any, ...] = ()  # two of [B, T']
    key_dropout: tuple[Any, ...] = ()  # one of [B, S']
    head_dropout: tuple[Any, ...] = ()  # two of [B, N]; none if all heads share one mask
    # Of user functions, int32 or float32, see user_functions/partition.py:
    head_numbers: tuple[Any, ...] = ()  # [B, N]
    query_numbers: tuple[Any, ...] = ()  # [B, T']
    key_numbers: tuple[Any, ...] = ()  # [B, S']
    difference_numbers: tuple[Any, ...] = ()  # [B, N, X], X differences of positions
    sinks: Any = None  # [B, N], float32, in base 2; only the forward reads them
    # The bias, in nats, has at most one of three forms:
    bias: Any = None  # [B|1, N|1, T", S"], a number for each pair; see `bias.padded_lengths`
    query_bias: Any = None  # [B, N, T'], float32, a number for each query
    key_bias: Any = None  # [B, N, S'], float32, a number for each key
    # The range of each tile, see `with_ranges`:
    visible_from: Any = None  # [B, tiles], int32
    visible_to: Any = None  # [B, tiles], int32
    one_segment: Any = None  # [B, tiles], 0 or 1
    tile_table: Any = None  # tiles that a block mask leaves, for all batch entries and heads
    page_table: Any = None  # [B, n], int32, the pages of each sequence's keys; only decoding has it

    def of(self, b) -> "Scalars":
        """Return batch entry b of refs: values of the fields [B], and refs of the rest."""

        def entry(name: str, ref):
            if ref is None or name == "tile_table":
                return ref
            if name in OF_BATCH:
                return ref[b]
            if name == "bias":
                return ref.at[b if ref.shape[0] > 1 else 0]
            return jax.tree.map(lambda x: x.at[b], ref)

        entries: dict[str, Any] = {name: entry(name, ref) for name, ref in self._asdict().items()}
        return Scalars(**entries)

    def batch_size(self, query: Array) -> int:
        """Return the number of batch entries of the call, from its query [B, T, N, H]."""
        return query.shape[0] if self.query_entries is None else self.query_entries.shape[0]

    def like(self, refs: Iterator) -> "Scalars":
        """Return the next of `refs` in the place of these arrays."""
        return jax.tree.map(lambda _: next(refs), self)

    @property
    def logit_terms(self) -> LogitParams:
        """Return the scale and the soft cap of a batch entry, as `logits_from_dots` takes them."""
        return LogitParams(scale=self.scale, soft_cap=self.soft_cap, ratio=self.ratio)

    @property
    def has_bias(self) -> bool:
        """Return True if the call has a bias, of any form."""
        return any(x is not None for x in (self.bias, self.query_bias, self.key_bias))

    @property
    def by_query(self) -> tuple[Any, ...]:
        """Return the vectors of queries: segments, words of dropout, and numbers of functions."""
        segments = () if self.q_segments is None else (self.q_segments,)
        return (*segments, *self.query_dropout, *self.query_numbers)

    @property
    def by_key(self) -> tuple[Any, ...]:
        """Return the vectors of keys: segments, words of dropout, and numbers of functions."""
        segments = () if self.kv_segments is None else (self.kv_segments,)
        return (*segments, *self.key_dropout, *self.key_numbers)


def with_ranges(
    scalars: Scalars, lengths: tuple[int, int], size: int, keys: bool = False
) -> Scalars:
    """Add the range of keys whose segments each tile of `size` queries meets.

    With `keys`, add ranges of queries for tiles of keys. The range is from `visible_from` to
    `visible_to`, excluded. It holds all tokens unless segments are in order. `one_segment` is 1 if
    the tile has one segment and sees all of its range.
    """
    if scalars.q_segments is None or scalars.kv_segments is None:
        return scalars
    tile_segments = scalars.q_segments[:, : lengths[0]]  # B T
    visited = scalars.kv_segments[:, : lengths[1]]  # B S
    if keys:
        tile_segments, visited = visited, tile_segments
    padding = -tile_segments.shape[1] % size
    tile_segments = jnp.pad(tile_segments, [(0, 0), (0, padding)], mode="edge")
    tile_segments = tile_segments.reshape(tile_segments.shape[0], -1, size)  # B tiles size
    lowest = tile_segments.min(axis=2)  # B tiles
    highest = tile_segments.max(axis=2)
    in_order = (visited[:, 1:] >= visited[:, :-1]).all(axis=1, keepdims=True)

    def count(which: Array) -> Array:
        return which.sum(axis=2, dtype=jnp.int32)

    visible_from = jnp.where(in_order, count(visited[:, None] < lowest[..., None]), 0)
    not_behind = count(visited[:, None] <= highest[..., None])
    visible_to = jnp.where(in_order, not_behind, visited.shape[1])
    one_segment = (in_order & (lowest == highest)).astype(jnp.int32)
    return scalars._replace(
        visible_from=visible_from, visible_to=visible_to, one_segment=one_segment
    )
