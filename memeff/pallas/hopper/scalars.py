"""Hold the numbers that the kernels read besides query, key and value."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Scalars(NamedTuple):
    """int32 arrays [B], and of tokens [B, T'] and [B, S']; or what a block has of them. None where the call has none.

    Of functions of the user's (see hoisted.py), in int32 and float32: [B, N], [B, T'], [B, S'] and [B, N, X].
    """

    q_offset: Array | None = None
    q_lengths: Array | None = None
    kv_lengths: Array | None = None
    q_segments: Any = None
    kv_segments: Any = None
    of_heads: tuple[Any, ...] = ()
    of_queries: tuple[Any, ...] = ()
    of_keys: tuple[Any, ...] = ()
    of_differences: tuple[Any, ...] = ()
    sinks: Any = None  # [B, N], float32, in bits; only the forward has them
    first: Any = None  # [B, blocks], of `with_ranges`
    behind: Any = None
    alone: Any = None
    listed: Any = None  # of `with_lists`, one for all batch entries and heads

    def of(self, b) -> "Scalars":
        """Of refs: the entries of batch b, and refs of its tokens, heads and blocks."""
        of_batch = "q_offset", "q_lengths", "kv_lengths"
        pick = lambda name, x: (
            x[b]
            if name in of_batch
            else x
            if name == "listed"
            else jax.tree.map(lambda x: x.at[b], x)
        )
        found: dict[str, Any] = {
            name: x if x is None else pick(name, x) for name, x in self._asdict().items()
        }
        return Scalars(**found)

    def like(self, refs: Iterator) -> "Scalars":
        """The next of these in the place of arrays."""
        return jax.tree.map(lambda _: next(refs), self)

    @property
    def by_query(self) -> tuple[Any, ...]:
        """What belongs to queries, segments first."""
        return self.of_queries if self.q_segments is None else (self.q_segments, *self.of_queries)

    @property
    def by_key(self) -> tuple[Any, ...]:
        return self.of_keys if self.kv_segments is None else (self.kv_segments, *self.of_keys)


def with_ranges(
    scalars: Scalars, lengths: tuple[int, int], size: int, keys: bool = False
) -> Scalars:
    """Where segments are in order, what a block of `size` queries (or `keys`) may see lies from `first` to `behind`; if its
    own are `alone`, of one segment, they see all of that.
    """
    if scalars.q_segments is None or scalars.kv_segments is None:
        return scalars
    sides = [scalars.q_segments[:, : lengths[0]], scalars.kv_segments[:, : lengths[1]]]
    own, other = reversed(sides) if keys else sides
    own = jnp.pad(own, [(0, 0), (0, -own.shape[1] % size)], mode="edge").reshape(
        own.shape[0], -1, size
    )
    lowest, highest = own.min(axis=2), own.max(axis=2)
    count = lambda which: which.sum(axis=2, dtype=jnp.int32)
    in_order = (other[:, 1:] >= other[:, :-1]).all(axis=1, keepdims=True)
    first = jnp.where(in_order, count(other[:, None] < lowest[..., None]), 0)
    behind = jnp.where(in_order, count(other[:, None] <= highest[..., None]), other.shape[1])
    return scalars._replace(
        first=first, behind=behind, alone=(in_order & (lowest == highest)).astype(jnp.int32)
    )
