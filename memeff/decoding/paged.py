"""Define `paged_attention`, attention to keys and values that lie in pages."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from memeff.arguments import CachedOptions, bind_arguments
from memeff.decoding.attend import attend_stored, seen_tokens
from memeff.decoding.storage import EIGHT_BITS, check_scales
from memeff.inputs import check_integers, known_values, refuse_symbolic, to_array, to_int32
from memeff.problem import Problem
from memeff.shape import CallShape
from memeff.stored import StoredKeys
from memeff.validate import check_head_size, check_lengths, check_offset, check_window

MOST_TOKENS = 256  # of a page


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    q_offset: ArrayLike | None = ...,
    key_scales: ArrayLike | None = ...,
    value_scales: ArrayLike | None = ...,
    return_residual: Literal[False] = ...,
    **options: Unpack[CachedOptions],
) -> Array: ...


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    q_offset: ArrayLike | None = ...,
    key_scales: ArrayLike | None = ...,
    value_scales: ArrayLike | None = ...,
    return_residual: Literal[True],
    **options: Unpack[CachedOptions],
) -> tuple[Array, Array]: ...


def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    *,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    q_offset: ArrayLike | None = None,
    key_scales: ArrayLike | None = None,
    value_scales: ArrayLike | None = None,
    return_residual: bool = False,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """Compute `dot_product_attention` of keys and values that lie in pages.

    Pages may lie in any order, and sequences may share them. The result has the same bits as the
    call with these keys and values in arrays [B, n * page, K, H], if both run in the decode kernel,
    or both on the chunked path.

    Memory: that of one tile beyond inputs and outputs. A derivative reads the pages of all
    sequences into arrays [B, n * page, K, H] first.

    Args:
      query: [B, T, N, H], float.
      key_pages: [pages, page, K, H], in the dtype of `query`, with 1 to 256 tokens in a page. Also
        int8 or float8_e4m3fn with `key_scales`.
      value_pages: [pages, page, K, D].
      page_table: [B, n], integers: the pages of each sequence in the order of its tokens, and -1
        beyond its end. Pages that causal order or a window hides from all queries may be -1, too.
        Any other token without a page is refused where that is known, and gives NaN under jit.
      lengths: [B], integers: the tokens of each sequence, up to n * page. More are refused where
        that is known, and count as n * page under jit.
      is_causal, query_seq_lengths: as in `dot_product_attention`.
      q_offset: the position of query row 0 of each sequence, an int or [B]. Default: lengths - T,
        so that the queries are the newest tokens.
      key_scales, value_scales: [pages, K, page], float32: factors of pages of 8 bits.
      return_residual: also return lse.
      options: other keywords of `dot_product_attention`, such as `local_window_size`,
        `logits_soft_cap`, `sinks`, `score_fn` and `mask_fn`. Key positions are those of tokens in
        their sequence. sequence_axis and implementation="reference" are refused.

    Returns:
      out [B, T, N, D] in the dtype of `query`. With `return_residual` also lse [B, T, N], as
      `dot_product_attention`.

    Raises:
      ValueError: if shapes or known values disagree.
      TypeError: if an argument has the wrong dtype or kind.
      NotImplementedError: if an option does not support pages.

    Example:
      >>> q = jnp.ones((2, 1, 4, 8))
      >>> pages = jnp.ones((5, 16, 2, 8))
      >>> paged_attention(q, pages, pages, [[3, 0], [1, -1]], [20, 7], is_causal=True).shape
      (2, 1, 4, 8)

    Source: Kwon et al. 2023 (arXiv:2309.06180), section 4.1.
    """
    query = to_array("query", query)
    if query.ndim != 4:
        raise ValueError(f"query must have shape [B, T, N, H]; got {query.shape}.")
    check_head_size(query.shape[-1])
    if "key_value_seq_lengths" in options:
        raise ValueError("key_value_seq_lengths is the argument `lengths` here: omit it.")
    for name in ("key", "value"):
        if name in options:
            raise ValueError(f"{name} is the argument `{name}_pages` here: omit it.")
    scales = key_scales, value_scales
    key, value = _stored(query, (key_pages, value_pages), scales, page_table)
    lengths = check_integers("lengths", lengths)
    if lengths.shape != query.shape[:1]:
        raise ValueError(f"lengths must have shape (B={query.shape[0]},); got {lengths.shape}.")
    shape = CallShape.of(query, key, value)
    check_lengths(shape, "lengths", lengths, "n * page", shape.S)
    rows = check_lengths(shape, "query_seq_lengths", query_seq_lengths, "T", shape.T)
    if q_offset is None:
        # in int32, because the difference of unsigned numbers would wrap
        q_offset = jnp.minimum(to_int32(lengths), shape.S) - shape.T
    offset, static_offset = check_offset(shape, q_offset)
    window = check_window(options.get("local_window_size"), is_causal)
    rows = shape.T if rows is None else rows
    offset = static_offset if offset is None else offset
    _check_pages(key, _known_seen_tokens(window, lengths, offset, rows))
    arguments = bind_arguments(
        "paged_attention",
        query,
        None,
        None,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=lengths,
        q_offset=q_offset,
        return_residual=return_residual,
        **options,
    )
    return attend_stored(arguments, key, value)


def _stored(query: Array, pages: Any, scales: Any, table: Any) -> tuple[StoredKeys, StoredKeys]:
    """Return checked keys and values."""
    table = to_int32(check_integers("page_table", table))
    if table.ndim != 2 or table.shape[0] != query.shape[0]:
        raise ValueError(
            f"page_table must have shape (B={query.shape[0]}, pages of a sequence); got "
            f"{table.shape}."
        )
    both = []
    first_shape = None
    for name, x, factors in zip(("key", "value"), pages, scales, strict=True):
        x = to_array(f"{name}_pages", x)
        if x.ndim != 4:
            size = "H" if name == "key" else "D"
            raise ValueError(
                f"{name}_pages must have shape [pages, page, K, {size}]; got {x.shape}."
            )
        refuse_symbolic(f"{name}_pages", page=x.shape[1])
        if x.shape[0] == 0:
            raise ValueError(f"{name}_pages has no page (shape {x.shape}): pass at least one.")
        if not 1 <= x.shape[1] <= MOST_TOKENS:
            raise ValueError(
                f"{name}_pages has pages of {x.shape[1]} tokens (shape {x.shape}): a page has 1 to "
                f"{MOST_TOKENS}."
            )
        first_shape = first_shape or x.shape[:3]
        if x.shape[:3] != first_shape:
            pages, page, K = first_shape
            raise ValueError(
                f"value_pages must have shape (pages={pages}, page={page}, K={K}, D), like "
                f"key_pages; got {x.shape}."
            )
        eight_bits = x.dtype.name in EIGHT_BITS
        if eight_bits != (factors is not None):
            need = "needs" if eight_bits else "does not take"
            raise ValueError(f"{name}_pages is {x.dtype}, which {need} {name}_scales.")
        if not eight_bits and x.dtype != query.dtype:
            raise TypeError(
                f"{name}_pages is {x.dtype} and query is {query.dtype}: cast one of them."
            )
        if factors is not None:
            factors = to_array(f"{name}_scales", factors)
            pages, page, K, _ = x.shape
            if factors.shape != (pages, K, page):
                raise ValueError(
                    f"{name}_scales must have shape {(pages, K, page)}, [pages, K, page]; got "
                    f"{factors.shape}."
                )
            check_scales(f"{name}_scales", factors)
        both.append(StoredKeys(x, factors, table, query.dtype.name))
    return both[0], both[1]


def _check_pages(key: StoredKeys, seen: tuple[Any, Any] | None) -> None:
    """Refuse pages that do not exist, and `seen` tokens without a page, where known."""
    assert key.table is not None
    count, page = key.values.shape[:2]
    table = known_values(key.table)
    if table is None:
        return
    if table.max() >= count:
        raise ValueError(
            f"page_table names page {table.max()}, and key_pages has {count}: pages are numbered "
            "from 0, and -1 stands beyond the end of a sequence."
        )
    if seen is None:
        return
    start, end = (x[:, None] for x in seen)
    first = page * np.arange(table.shape[1])  # token of each page
    lacking = np.argwhere((table < 0) & (first < end) & (start < first + page))
    if len(lacking):
        b, n = lacking[0]
        raise ValueError(
            f"lengths: queries of sequence {b} see tokens {start[b, 0]} to {end[b, 0] - 1}, and "
            f"its row of page_table names no page for token {max(n * page, start[b, 0])}. Name a "
            "page for each token that a query sees."
        )


def _known_seen_tokens(
    window: tuple[int | None, int | None], lengths: Array, q_offset: Any, rows: Any
) -> tuple[Any, Any] | None:
    """Return `seen_tokens`, or None if an array that it needs is not known."""
    known, offset, rows = (known_values(x) for x in (lengths, q_offset, rows))
    if known is None or rows is None or (offset is None and window != (None, None)):
        return None
    start, end = seen_tokens(Problem(left=window[0], right=window[1]), known, offset, rows)
    return np.maximum(start, 0), end


def leading_pages(table: Any) -> Any:
    """Return how many pages each row of `table` [B, n] names before its first -1."""
    numpy = np if isinstance(table, np.ndarray) else jnp
    n = table.shape[1]
    return numpy.where(table < 0, numpy.arange(n, dtype=np.int32), n).min(axis=1, initial=n)
