"""Define `PagedKVCache`: keys and values of sequences that own pages of one pool."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jax.typing import ArrayLike

from memeff.decoding.cache import OWN
from memeff.decoding.paged import MOST_TOKENS, leading_pages, paged_attention
from memeff.decoding.storage import (
    LOST,
    Places,
    check_counts,
    check_fields,
    check_kept,
    check_not_lost,
    check_queries,
    check_room,
    check_tokens,
    check_whole_pool,
    empty_arrays,
    extended,
    intact,
    keep_drafts,
    truncated,
    write_new,
)
from memeff.inputs import INT32_MAX, check_integers, check_size, known_values, to_int32
from memeff.query_positions import nan_where
from memeff.shape import ceil_div
from memeff.stored import page_places

NO_PAGE = "Give it more pages (memeff.PageAllocator.extend), and pass the new page_table."
DROPPED = "Those without room were dropped: truncate it to its room, then append them again."


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["key_pages", "value_pages", "page_table", "lengths", "key_scales", "value_scales"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """Keys and values of sequences that own pages of one pool; a pytree.

    `append` and `attend` work as in `memeff.KVCache`. `memeff.PageAllocator`, on the host, records
    which sequence owns which page:

    >>> allocator = memeff.PageAllocator(pages=8, page_size=4)
    >>> cache = PagedKVCache.zeros(8, 4, 2, 16, batch=1, pages_per_sequence=3)
    >>> allocator.add("a")
    >>> copies = allocator.extend("a", 5)  # makes room for 5 tokens
    >>> cache = cache.with_sequences(allocator.table(["a"], 3), [0])
    >>> x = jnp.ones((1, 5, 2, 16))
    >>> cache = cache.append(x, x)
    >>> cache.attend(x).shape
    (1, 5, 2, 16)

    **A full cache** is one whose page_table has no page for a new token. As in `memeff.KVCache`,
    that is an error where it is known, and gives NaN under jit.

    Attributes:
      key_pages, value_pages: [pages, page, K, H] and [pages, page, K, D].
      page_table: [B, n], int32, -1 beyond the end of a sequence.
      lengths: [B], int32, tokens that each sequence has read.
      key_scales, value_scales: [pages, K, page], float32, of pages of 8 bits; else None.
    """

    key_pages: Array
    value_pages: Array
    page_table: Array
    lengths: Array
    key_scales: Array | None = None
    value_scales: Array | None = None

    @classmethod
    def zeros(
        cls,
        pages: int,
        page_size: int,
        key_heads: int,
        head_size: int,
        dtype: Any = jnp.float32,
        *,
        batch: int,
        pages_per_sequence: int,
        value_size: int | None = None,
    ) -> PagedKVCache:
        """Return a cache of empty pages that nobody owns yet.

        Args:
          pages: the number of pages in the pool that all sequences share.
          page_size: tokens of a page, 1 to 256.
          key_heads: key and value heads, K.
          head_size: of keys, H.
          dtype: of the pages, as in `memeff.KVCache.zeros`.
          batch: sequences, B.
          pages_per_sequence: columns of page_table, n.
          value_size: of values, D. Default: `head_size`.

        Raises:
          ValueError: if a size is too small, or a page too large.
          TypeError: if `dtype` cannot be cached.
        """
        pages = check_size("pages", pages)
        page = check_size("page_size", page_size)
        if page > MOST_TOKENS:
            raise ValueError(f"page_size={page}: a page has 1 to {MOST_TOKENS} tokens.")
        B = check_size("batch", batch, 0)
        n = check_size("pages_per_sequence", pages_per_sequence)
        slots = pages, page
        key, value, *scales = empty_arrays(slots, key_heads, head_size, value_size, dtype)
        table = jnp.full((B, n), -1, jnp.int32)
        return cls(key, value, table, jnp.zeros((B,), jnp.int32), *scales)

    @property
    def page_size(self) -> int:
        """Return the number of tokens in a page."""
        return self.key_pages.shape[-3]

    @property
    def room(self) -> Array:
        """Return the number of tokens [B] for which each sequence has pages."""
        return self.page_size * leading_pages(self.page_table)

    @property
    def overflowed(self) -> Array:
        """Return which sequences [B] lack a page for a token, or gave up more than they had."""
        return (self.lengths < 0) | (self.lengths > self.room)

    def check(self) -> None:
        """Raise a ValueError if a sequence has `overflowed`. Inside jit this does nothing."""
        self._check_fields()
        check_not_lost(self.lengths, "tokens that had no page, or ")
        check_room(self.lengths, self.room, DROPPED)

    def with_sequences(self, page_table: ArrayLike, lengths: ArrayLike) -> PagedKVCache:
        """Return a cache of the same pages with another page_table [B, n] and lengths [B].

        In this way sequences are added, removed, forked and moved in the batch without a copy.

        Under jit a sequence that overflowed, and keeps its pages and its length, counts as
        overflowed from then on, in any row. So does one whose new length is negative, and one of
        the same length that joins the batch and has the last page of one that overflowed.

        Raises: ValueError if shapes disagree, a page is known not to exist, or a sequence is known
          to have `overflowed`: truncate it first.
        """
        self.check()
        table = to_int32(check_integers("page_table", page_table))
        lengths = check_integers("lengths", lengths)
        if table.ndim != 2 or lengths.shape != table.shape[:1]:
            raise ValueError(
                f"page_table must have shape [B, n] and lengths [B]; got {table.shape} and "
                f"{lengths.shape}."
            )
        negative = lengths < 0
        lengths = check_kept(lengths, table.shape[0])
        if known_values(self.overflowed) is None:  # otherwise no sequence overflowed
            kept = self._kept_in(table, lengths)
            lengths = jnp.where(lengths > kept, LOST + kept, lengths)
        lengths = jnp.where(negative, LOST, lengths)
        known = known_values(table)
        pages = self.key_pages.shape[0]
        if known is not None and known.max() >= pages:
            raise ValueError(
                f"page_table names page {known.max()}, and the cache has pages 0 to {pages - 1}. "
                "Pass -1 beyond the end of a sequence."
            )
        cache = dataclasses.replace(self, page_table=table, lengths=lengths)
        check_room(lengths, cache.room, NO_PAGE)
        return cache

    def copy_pages(self, sources: ArrayLike, targets: ArrayLike) -> PagedKVCache:
        """Return the cache with pages `sources` [n] copied over pages `targets` [n].

        `PageAllocator.extend` returns the pairs to copy before a sequence writes into a page that
        it shares. The result is as if they were copied one after the other. A pair of -1 copies
        nothing, so that the number of pairs can be the same in each step of a jitted function.

        Raises: ValueError if shapes disagree, or a pair is known to name a page that is not there;
          under jit a target then becomes NaN.
        """
        sources = check_integers("sources", sources)
        targets = check_integers("targets", targets)
        if sources.ndim != 1 or sources.shape != targets.shape:
            raise ValueError(
                f"sources and targets must both have shape [n]; got {sources.shape} and "
                f"{targets.shape}."
            )
        pages = self.key_pages.shape[0]
        known_sources = known_values(sources)
        known_targets = known_values(targets)
        if known_sources is not None and known_targets is not None:
            for pair in zip(known_sources, known_targets, strict=True):
                if max(pair) >= pages or (min(pair) < 0 and pair[1] >= 0):
                    raise ValueError(
                        f"copy_pages got {pair[0]} to copy over {pair[1]}, and the cache has pages "
                        f"0 to {pages - 1}. A pair of -1 copies nothing."
                    )
        check_whole_pool(sources, targets, self.key_pages, self.value_pages)
        sources, targets = _at_once(to_int32(sources), to_int32(targets))
        skipped = targets < 0  # they read page 0, because NaN would alarm jax.debug_nans
        sources = jnp.where(skipped, 0, jnp.where(sources < 0, pages, sources))
        targets = jnp.where(skipped, pages, targets)

        def copy(x: Array | None) -> Array | None:
            if x is None:
                return None
            return x.at[targets].set(x.at[sources].get(mode="fill"), mode="drop")

        return self._replace_arrays([copy(x) for x in self._arrays()], self.lengths)

    def append(
        self, key: ArrayLike, value: ArrayLike, counts: ArrayLike | None = None
    ) -> PagedKVCache:
        """Return the cache with T more tokens of each sequence, as `memeff.KVCache.append`.

        Raises:
          ValueError: if shapes disagree, or a sequence has no page for a token, or two sequences
            would write into one page, where that is known.
          TypeError: if dtypes disagree.
        """
        self._check_fields()
        pages = self.key_pages, self.value_pages
        key, value = check_tokens(key, value, pages, self.lengths.shape[0])
        counts = check_counts(counts, *key.shape[:2])
        lengths = extended(self.lengths, counts)
        check_room(lengths, self.room, NO_PAGE)
        self._check_writes(lengths)
        return write_new(self, key, value, counts, lengths)

    def attend(
        self,
        query: ArrayLike,
        *,
        counts: ArrayLike | None = None,
        is_causal: bool = True,
        return_residual: bool = False,
        **options: Any,
    ) -> Array | tuple[Array, Array]:
        """Attend from the T newest tokens to all that are cached, as `memeff.KVCache.attend`."""
        self.check()
        for name in (*OWN, *(field.name for field in dataclasses.fields(self))):
            if name in options:
                raise ValueError(f"{name} comes from the cache: omit it.")
        valid = check_queries(query, counts, self.lengths)
        call: dict[str, Any] = dict(
            q_offset=self.lengths - valid,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
            query_seq_lengths=None if counts is None else valid,
            is_causal=is_causal,
            return_residual=return_residual,
            **options,
        )
        lengths = jnp.minimum(self.lengths, self.room)
        results = paged_attention(
            query, self.key_pages, self.value_pages, self.page_table, lengths, **call
        )
        return nan_where(self.overflowed, results)

    def truncate(self, lengths: ArrayLike) -> PagedKVCache:
        """Return the cache without the tokens from `lengths` [B] on, such as rejected drafts."""
        self._check_fields()
        return dataclasses.replace(self, lengths=truncated(self.lengths, lengths))

    def keep_drafts(self, T: ArrayLike, path: ArrayLike, counts: ArrayLike) -> PagedKVCache:
        """Return the cache with some of the T newest tokens, as `memeff.KVCache.keep_drafts`."""
        kept, before = keep_drafts(self, T, path, counts)
        dataclasses.replace(self, lengths=before)._check_writes(kept.lengths)
        return kept

    def _kept_in(self, table: Array, lengths: Array) -> Array:
        """Return how many tokens each row [C] of another page_table still has; a large number: all.

        A row continues a sequence that overflowed if it has that sequence's page of the first token
        that was lost, or the page before tokens that were dropped, and their length. A row whose
        last page is also that of a sequence which did not overflow has all of its tokens.
        """
        check_whole_pool(self.page_table, self.lengths, table, lengths)
        old = to_int32(self.lengths)[None]  # [1, B]
        new = lengths[:, None]  # [C, 1]
        is_lost = old < 0
        kept = jnp.where(is_lost, intact(old), self.room[None])  # [1, B]
        column = jnp.where(is_lost, kept, kept - 1) // self.page_size
        page = _pages_at(self.page_table, column.T).T  # [1, B]
        row, old_row = (jnp.arange(x.shape[0], dtype=jnp.int32) for x in (lengths, self.lengths))
        is_same = row[:, None] == old_row[None]
        is_same = jnp.where(page < 0, is_same, _pages_at(table, column) == page)  # [C, B]
        is_same &= jnp.where(is_lost, new > kept, new == old)
        column = (new - 1) // self.page_size
        is_whole = _pages_at(self.page_table, column.T).T == _pages_at(table, column)  # [C, B]
        is_whole &= ~self.overflowed[None] & (old >= new)
        is_same &= self.overflowed[None] & ~is_whole.any(axis=1, keepdims=True)
        return jnp.where(is_same, kept, INT32_MAX).min(axis=1, initial=INT32_MAX)

    def _check_fields(self) -> None:
        """Refuse fields that do not fit each other."""
        names = "key_pages", "value_pages", "key_scales", "value_scales"
        check_fields(self, names, paged=True)

    def _check_writes(self, lengths: Array) -> None:
        """Refuse to write tokens up to `lengths` [B] into a page that another sequence has, too."""
        known = [known_values(x) for x in (self.page_table, self.lengths, lengths)]
        table, before, after = known
        if table is None or before is None or after is None:
            return
        owners = np.bincount(table[table >= 0].ravel(), minlength=len(self.key_pages))
        for b in np.flatnonzero(after > before):
            first = before[b] // self.page_size
            end = ceil_div(after[b], self.page_size)
            shared = [page for page in table[b, first:end] if owners[page] > 1]
            if shared:
                raise ValueError(
                    f"sequence {b} would write into page {shared[0]}, which another sequence has, "
                    "too. Copy it first: memeff.PageAllocator.extend says which pages, and "
                    "copy_pages copies them."
                )

    def _places(self, positions: Array, valid: Array) -> Places:
        """Return where tokens at `positions` [B, T] lie; those that are not `valid` lie outside."""
        n = self.page_table.shape[1]
        column = positions // self.page_size
        valid = valid & (positions >= 0) & (positions < self.room[:, None])
        pages = jnp.take_along_axis(self.page_table, jnp.clip(column, 0, n - 1), axis=1)
        return page_places(jnp.where(valid, pages, -1), positions, self.key_pages)

    def _arrays(self) -> list[Array | None]:
        """Return the arrays that hold a number of each token; NumPy's become JAX's."""
        arrays = [self.key_pages, self.value_pages, self.key_scales, self.value_scales]
        return [None if x is None else jnp.asarray(x) for x in arrays]

    def _replace_arrays(self, arrays: list[Any], lengths: Array) -> PagedKVCache:
        """Return the cache with other arrays."""
        key, value, key_scales, value_scales = arrays
        return PagedKVCache(key, value, self.page_table, lengths, key_scales, value_scales)


export.register_pytree_node_serialization(
    PagedKVCache,
    serialized_name="memeff.PagedKVCache",
    serialize_auxdata=lambda aux: b"",  # all fields are arrays
    deserialize_auxdata=lambda data: (),
)


def _pages_at(table: Array, columns: Array) -> Array:
    """Return the pages [A, X] of a table [A, n] in `columns` [A, X] or [1, X]; -1 outside of it."""
    n = table.shape[1]
    padded = jnp.pad(table, ((0, 0), (0, 1)), constant_values=-1)
    inside = jnp.where((columns < 0) | (columns > n), n, columns)
    return jnp.take_along_axis(padded, inside, axis=1)


def _at_once(sources: Array, targets: Array) -> tuple[Array, Array]:
    """Return pairs [n] of pages that, copied at once, do what the given ones do in their order."""
    n = len(sources)
    pair = jnp.arange(n, dtype=jnp.int32)
    earlier = pair[None] < pair[:, None]  # [n, n]: row i has the pairs before pair i
    writes = (sources[:, None] == targets[None]) & (targets[None] >= 0) & earlier
    origin = jnp.where(writes, pair[None], -1).max(axis=1, initial=-1)  # the last that wrote it
    origin = jnp.where(origin < 0, pair, origin)
    for _ in range(n.bit_length()):
        origin = origin[origin]
    overwritten = ((targets[:, None] == targets[None]) & earlier.T).any(axis=1)
    return sources[origin], jnp.where(overwritten, -1, targets)
