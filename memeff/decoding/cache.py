"""Define `KVCache`: the keys and values of the tokens that a model has read."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import Array, export
from jax.typing import ArrayLike

from memeff.arguments import Arguments, CachedOptions, bind_arguments
from memeff.attention import dot_product_attention
from memeff.block_mask import BlockMask
from memeff.decoding.attend import attend_stored
from memeff.decoding.ring import lengths_of_whole, ring_mask, ring_score
from memeff.decoding.storage import (
    LOST,
    Places,
    check_counts,
    check_fields,
    check_not_lost,
    check_queries,
    check_room,
    check_tokens,
    empty_arrays,
    extended,
    keep_drafts,
    lacks_positions,
    query_length,
    truncated,
    write_new,
)
from memeff.inputs import check_bool, check_size, known_values, refuse_symbolic
from memeff.query_positions import nan_where
from memeff.sequence.batch_and_heads import batch_and_heads_of, check_inside
from memeff.stored import StoredKeys
from memeff.user_functions import check_pair_function

# arguments of dot_product_attention that the cache itself gives
OWN = ("key", "value", "q_offset", "key_value_seq_lengths", "query_seq_lengths")
FUNCTIONS_CURE = ", or write it as a mask_fn or score_fn, which get positions."
TRANSFORM_CURE = ", and apply rotary embeddings before append and attend."
# Arguments that name keys by their slots, so that a ring would read them at wrong positions, each
# with what follows "Omit it" in the error.
BY_SLOT = {
    **dict.fromkeys(("bias", "mask"), FUNCTIONS_CURE),
    **dict.fromkeys(("query_segment_ids", "key_value_segment_ids"), FUNCTIONS_CURE),
    **dict.fromkeys(("qk_transform", "qk_transform_params"), TRANSFORM_CURE),
    "local_window_size": ": the window is the cache's.",
    "sequence_axis": ".",
}
CURE = "Make it with a larger capacity, or with `window` where attention has one."


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key", "value", "lengths", "key_scale", "value_scale", "most_read"],
    meta_fields=["window"],
)
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The keys and values of the tokens that each of B sequences has read; a pytree.

    `append` adds tokens, and `attend` attends to all of them. Both work under jit, scan, vmap and
    grad. Where the cache is donated to jit or carried by scan, XLA writes in place:

    >>> cache = KVCache.zeros(2, 16, 4, 8)
    >>> x = jnp.ones((2, 3, 4, 8))
    >>> cache = cache.append(x, x)
    >>> cache.attend(x).shape, cache.lengths.tolist()
    ((2, 3, 4, 8), [3, 3])

    `attend` calls `dot_product_attention(query, cache.key, cache.value, is_causal=True,
    q_offset=cache.lengths - T, key_value_seq_lengths=cache.lengths)`.

    With a `window` the cache is a ring: token n lies in slot n % capacity, and new tokens replace
    those that no query sees any more.

    **A full cache.** `append` raises an error if lengths are known. Under jit they are not known.
    Then tokens beyond the capacity are dropped, and nothing is overwritten. `lengths` still counts
    these tokens, `overflowed` is True, and `attend` gives NaN for the sequence. Call `check`
    outside jit to raise the error.

    Attributes:
      key, value: [B, capacity, K, H] and [B, capacity, K, D].
      lengths: [B], int32, tokens that each sequence has read.
      key_scale, value_scale: [B, K, capacity], float32, if key and value are int8 or float8_e4m3fn;
        else None.
      window: of a ring, the number of tokens before its own that a query sees; None: no ring.
      most_read: of a ring, the largest `lengths` [B] so far, int32; None if they never shrank.
    """

    key: Array
    value: Array
    lengths: Array
    key_scale: Array | None = None
    value_scale: Array | None = None
    window: int | None = None
    most_read: Array | None = None

    @classmethod
    def zeros(
        cls,
        batch: int,
        capacity: int,
        key_heads: int,
        head_size: int,
        dtype: Any = jnp.float32,
        *,
        value_size: int | None = None,
        window: int | None = None,
    ) -> KVCache:
        """Return an empty cache.

        Args:
          batch: sequences, B.
          capacity: the number of tokens that each sequence can hold.
          key_heads: key and value heads, K.
          head_size: of keys, H.
          dtype: of key and value. int8 and float8_e4m3fn take half the memory of bfloat16; each
            token and head then has a scale in float32.
          value_size: of values, D. Default: `head_size`.
          window: make a ring for `local_window_size=(window, 0)`. The capacity must be at least
            window + T for T tokens in one call.

        Raises:
          ValueError: if a size is too small.
          TypeError: if `dtype` cannot be cached.

        Example:
          >>> KVCache.zeros(2, 1024, 4, 64, jnp.bfloat16).key.shape
          (2, 1024, 4, 64)
        """
        batch = check_size("batch", batch, 0)
        capacity = check_size("capacity", capacity)
        if window is not None and capacity <= check_size("window", window, 0):
            raise ValueError(
                f"capacity={capacity} and window={window}: a ring needs room for the window and "
                "the query's own token, window + 1, and one more for each further token of a call."
            )
        slots = batch, capacity
        key, value, *scales = empty_arrays(slots, key_heads, head_size, value_size, dtype)
        lengths = jnp.zeros((batch,), jnp.int32)
        most_read = None if window is None else jnp.zeros((batch,), jnp.int32)
        return cls(key, value, lengths, *scales, window=window, most_read=most_read)

    @property
    def capacity(self) -> int:
        """Return the number of tokens that each sequence can hold."""
        return self.key.shape[-3]

    @property
    def overflowed(self) -> Array:
        """Return which sequences [B] brought more tokens than fit, or gave up more than they had.

        A ring takes any number of tokens, and can give up only the newest ones (see `truncate`).
        """
        lost = self.lengths < 0
        return lost if self.window is not None else lost | (self.lengths > self.capacity)

    def check(self) -> None:
        """Raise a ValueError if a sequence has `overflowed`. Inside jit this does nothing."""
        self._check_fields()
        if self.window is None:
            check_not_lost(self.lengths)
            check_room(self.lengths, self.capacity, CURE)
            return
        check_not_lost(
            self.lengths,
            f"more than capacity - window = {self.capacity - self.window} tokens of a ring, which "
            "newer ones had replaced (a larger capacity keeps more), or ",
        )

    def append(self, key: ArrayLike, value: ArrayLike, counts: ArrayLike | None = None) -> KVCache:
        """Return the cache with T more tokens of each sequence.

        Args:
          key: [B, T, K, H], in the dtype of the cache (any float if that has 8 bits).
          value: [B, T, K, D].
          counts: [B], integers from 0 to T, or one for all: each sequence gets the first counts[b]
            of its T tokens, as for prompts of different lengths. Booleans: each sequence gets all T
            tokens or none. Default: all. Traced numbers below 0 count as 0, and above T as T.

        Raises:
          ValueError: if shapes disagree, or the cache is full and lengths are known.
          TypeError: if dtypes disagree.
        """
        self._check_fields()
        key, value = check_tokens(key, value, (self.key, self.value), self.lengths.shape[0])
        T = key.shape[1]
        counts = check_counts(counts, *key.shape[:2])
        self._check_ring_sizes(T)
        if self.window is not None and T > self.capacity:
            raise ValueError(
                f"T={T} tokens came for a ring of {self.capacity} slots: append at most "
                f"{self.capacity - self.window} at a time."
            )
        lengths = extended(self.lengths, counts)
        if self.window is None:
            check_room(lengths, self.capacity, CURE)
        return write_new(self, key, value, counts, lengths)

    @overload
    def attend(
        self,
        query: ArrayLike,
        *,
        counts: ArrayLike | None = ...,
        is_causal: bool = ...,
        return_residual: Literal[False] = ...,
        **options: Unpack[CachedOptions],
    ) -> Array: ...

    @overload
    def attend(
        self,
        query: ArrayLike,
        *,
        counts: ArrayLike | None = ...,
        is_causal: bool = ...,
        return_residual: Literal[True],
        **options: Unpack[CachedOptions],
    ) -> tuple[Array, Array]: ...

    def attend(
        self,
        query: ArrayLike,
        *,
        counts: ArrayLike | None = None,
        is_causal: bool = True,
        return_residual: bool = False,
        **options: Any,
    ) -> Array | tuple[Array, Array]:
        """Attend from the T newest tokens to all cached tokens. Append these T before.

        Args:
          query: [B, T, N, H]. Row i of sequence b is token lengths[b] - counts[b] + i.
          counts: [B], the `counts` of `append`: rows from counts[b] on give 0. Default: T.
          is_causal: hide keys behind each row's own token. False shows all cached tokens.
          return_residual: also return lse.
          options: other keywords of `dot_product_attention`. q_offset and lengths are the cache's.
            A ring takes its window from the cache; score_fn and mask_fn get positions, not slots.

        Returns:
          out [B, T, N, D] and, with `return_residual`, lse [B, T, N], as `dot_product_attention`.
          Under jit out is NaN for a sequence that overflowed, that has more tokens than a
          ready-made mask has ids for, or whose queries see tokens that a ring no longer has (see
          `truncate`). If under jit a sequence has fewer than T tokens, its last row is that of its
          newest token, and its first rows are 0, unless is_causal=False.

        Raises:
          ValueError: if shapes disagree, the cache is known to have overflowed or to have fewer
            tokens than queries, a ring has too few slots for T queries, or it is known to have
            replaced tokens that they see.
          NotImplementedError: if an option does not work with a ring or with 8 bits.
        """
        self.check()
        for name in OWN:
            if name in options:
                raise ValueError(f"{name} comes from the cache: omit it.")
        arguments = bind_arguments(
            "KVCache.attend",
            query,
            self.key,
            self.value,
            is_causal=is_causal,
            return_residual=return_residual,
            **options,
        )
        valid = check_queries(query, counts, self.lengths)
        if counts is not None:
            arguments = arguments._replace(query_seq_lengths=valid)
        arguments = arguments._replace(
            q_offset=self.lengths - valid,
            key_value_seq_lengths=jnp.minimum(self.lengths, self.capacity),
        )
        wrong = self.overflowed
        if self.window is not None:
            wrong |= lacks_positions(options, self.lengths)
            arguments = self._on_ring(arguments, query_length(query))
            wrong |= self._lacks_window(valid)
        if self.key_scale is None:
            call: dict[str, Any] = arguments._asdict()
            results = dot_product_attention(**call)
        else:
            dtype_name = jnp.result_type(query).name
            key = StoredKeys(self.key, self.key_scale, None, dtype_name)
            value = StoredKeys(self.value, self.value_scale, None, dtype_name)
            results = attend_stored(arguments, key, value)
        return nan_where(wrong, results)

    def truncate(self, lengths: ArrayLike) -> KVCache:
        """Return the cache without the tokens from `lengths` [B] on, such as rejected drafts.

        One number holds for all sequences. A length of 0 empties a row of the batch for a new
        sequence, also if the old one had `overflowed`.

        A ring that has wrapped around cannot bring back tokens that newer ones replaced. So it
        gives up at most the newest capacity - window of the tokens that it ever read, or all of
        them. It then attends only from tokens whose window it still has: that of the next token,
        and perhaps earlier ones. To ask for more is refused where lengths are known. Under jit
        `attend` gives NaN for the sequence, and one that gave up too many counts as overflowed.

        Raises: ValueError if lengths are negative, or a ring would have to give up too many.
        """
        self._check_fields()
        kept = truncated(self.lengths, lengths)
        return self._without_lost(dataclasses.replace(self, lengths=kept), kept)

    def keep_drafts(self, T: ArrayLike, path: ArrayLike, counts: ArrayLike) -> KVCache:
        """Return the cache with some of the T newest tokens, in the order of `path`, and no others.

        Args:
          T: number of drafts, the tokens that were appended last, or one number for each sequence,
            [B]. It is 0 for a sequence that got none.
          path: [B, n], integers from 0 to T - 1: the drafts to keep, in their new order.
          counts: [B]: how many of the n entries of `path` are valid, or one number for all.

        Under jit a sequence that had `overflowed` keeps all its tokens, and still counts as
        overflowed. A sequence counts as overflowed from then on if it has fewer than T tokens, or
        if `path` names a draft outside 0 to T - 1. An unused row, with no tokens and a count of 0,
        stays empty. A ring cannot give up more tokens than in `truncate`.

        Raises: ValueError if shapes or known values disagree, the cache is known to have
          overflowed, or a ring would have to give up too many.

        Example:
          >>> x = jnp.arange(4.0).reshape(1, 4, 1, 1)
          >>> cache = KVCache.zeros(1, 6, 1, 1).append(x, x)
          >>> kept = cache.keep_drafts(3, [[0, 2]], [2])  # of tokens 1, 2, 3
          >>> kept.lengths.tolist(), kept.key[0, :3, 0, 0].tolist()
          ([3], [0.0, 1.0, 3.0])
        """
        return self._without_lost(*keep_drafts(self, T, path, counts))

    def _without_lost(self, shorter: KVCache, first: Array) -> KVCache:
        """Return a `shorter` cache, in which sequences of a ring have lost what was replaced.

        They need the window before their next token, and had to read tokens from `first` [B] on.
        """
        if self.window is not None:
            is_new = shorter.lengths == 0  # it needs none of the tokens that it had
            lost = ~is_new & self._has_replaced(jnp.minimum(first, shorter.lengths - self.window))
            lengths = jnp.where(lost, LOST, shorter.lengths)
            most_read = jnp.where(is_new, 0, self._most_read())
            shorter = dataclasses.replace(shorter, lengths=lengths, most_read=most_read)
        shorter.check()
        return shorter

    def _check_fields(self) -> None:
        """Refuse fields that do not fit each other."""
        check_fields(self, ("key", "value", "key_scale", "value_scale"), paged=False)
        if self.window is not None:
            check_size("window", self.window, 0)

    def _check_ring_sizes(self, T: Any) -> None:
        """Refuse sizes of a ring that jax.export leaves symbolic, because they are compared."""
        if self.window is not None:
            refuse_symbolic("A ring", capacity=self.capacity, T=T)

    def _most_read(self) -> Array:
        """Return the largest lengths [B] of a ring so far."""
        return self.lengths if self.most_read is None else self.most_read

    def _has_replaced(self, positions: Array) -> Array:
        """Return whether newer tokens replaced those at `positions` [B] of a ring."""
        return self._most_read() - jnp.maximum(positions, 0) > self.capacity

    def _lacks_window(self, counts: Array) -> Array:
        """Return which sequences [B] of a ring lack tokens that their `counts` [B] queries see.

        Newer tokens replaced these before the newer ones were removed. Refuse such sequences where
        lengths are known.
        """
        assert self.window is not None
        lacking = self._has_replaced(self.lengths - counts - self.window)
        known = known_values(lacking)
        if known is not None and known.any():
            raise ValueError(
                f"query has tokens of sequence {known.argmax()} that see tokens which the ring "
                "replaced before truncate or keep_drafts removed the newer ones. Attend from "
                "tokens that were appended since then, or make the ring with a larger capacity: "
                "the window, the tokens to remove, and T."
            )
        return lacking

    def _on_ring(self, arguments: Arguments, T: int) -> Arguments:
        """Return the arguments of a call whose keys lie in the slots of a ring."""
        window = self.window
        assert window is not None
        self._check_ring_sizes(T)
        if window + T > self.capacity:
            raise ValueError(
                f"T={T} queries at a time need capacity >= window + T = {window + T} slots, and "
                f"the ring has {self.capacity}: newer tokens would have replaced some that the "
                "first queries see."
            )
        for name, cure in BY_SLOT.items():
            if getattr(arguments, name) is not None:
                raise NotImplementedError(
                    f"a ring does not support {name}, because its keys do not lie in order. Omit "
                    f"it{cure}"
                )
        check_bool("is_causal", arguments.is_causal)
        if not arguments.is_causal:
            raise NotImplementedError("a ring does not support is_causal=False. Omit it.")
        rest: Any = arguments.mask_fn
        if isinstance(rest, BlockMask):
            rest = rest.mask
        axes = batch_and_heads_of(arguments)
        parts = check_inside(axes)
        N = jnp.shape(arguments.query)[2]
        # S is left out, because positions go on behind the last slot.
        sizes = {"B": parts.batch * self.lengths.shape[0], "N": parts.heads * N, "T": T}
        mask = check_pair_function("mask_fn", rest, arguments.mask_params, sizes)
        score = check_pair_function("score_fn", arguments.score_fn, arguments.score_params, sizes)
        lengths = lengths_of_whole(self.lengths, axes.batch, parts.batch)
        return arguments._replace(
            is_causal=False,
            mask_fn=ring_mask(lengths, self.capacity, window, mask),
            mask_params=None,
            score_fn=None if score is None else ring_score(score, lengths, self.capacity),
            score_params=None,
        )

    def _places(self, positions: Array, valid: Array) -> Places:
        """Return where tokens at `positions` [B, T] lie; those that are not `valid` lie outside."""
        slots = positions if self.window is None else positions % self.capacity
        valid = valid & (positions >= 0)  # a negative index would count from the end
        return (jnp.where(valid, slots, self.capacity),)

    def _arrays(self) -> list[Array | None]:
        """Return the arrays that hold a number of each token."""
        return [self.key, self.value, self.key_scale, self.value_scale]

    def _replace_arrays(self, arrays: list[Any], lengths: Array) -> KVCache:
        """Return the cache with other arrays."""
        key, value, key_scale, value_scale = arrays
        most_read = self.most_read
        if most_read is not None:
            most_read = jnp.maximum(most_read, lengths)
        return KVCache(key, value, lengths, key_scale, value_scale, self.window, most_read)


def _to_bytes(aux: tuple[int | None]) -> bytes:
    """Return what is no array of a cache, its window, as bytes."""
    (window,) = aux
    return b"" if window is None else b"%d" % window


def _from_bytes(data: bytes) -> tuple[int | None]:
    """Return the window that `_to_bytes` wrote."""
    return (int(data) if data else None,)


export.register_pytree_node_serialization(
    KVCache,
    serialized_name="memeff.KVCache",
    serialize_auxdata=_to_bytes,
    deserialize_auxdata=_from_bytes,
)
