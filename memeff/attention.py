"""Define `dot_product_attention`, the public function."""

from __future__ import annotations  # help() then shows ArrayLike and not the nine types that it is

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

from jax import Array, lax
from jax.typing import ArrayLike

from memeff.arguments import Arguments, AttentionKwargs, Backward, Implementation
from memeff.block_mask import BlockMask
from memeff.call import run_attention
from memeff.user_functions import Mask, Score, Transform
from memeff.validate_options import check_flax_hooks


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = ...,
    **kwargs: Unpack[AttentionKwargs],
) -> Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **kwargs: Unpack[AttentionKwargs],
) -> tuple[Array, Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Implementation | None = None,
    backward: Backward | None = None,
    return_residual: bool = False,
    logits_soft_cap: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    q_offset: ArrayLike = 0,
    score_fn: Callable[..., Any] | Score | None = None,
    score_params: Any = None,
    mask_fn: Callable[..., Any] | Mask | BlockMask | None = None,
    mask_params: Any = None,
    sinks: ArrayLike | None = None,
    qk_transform: Callable[..., Any] | Transform | None = None,
    qk_transform_params: Any = None,
    chunk_size: int | tuple[int, int] | None = None,
    memory_limit: int | str | None = None,
    precision: lax.PrecisionLike = None,
    dropout_rng: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: None = None,
    dtype: None = None,
    module: None = None,
) -> Array | tuple[Array, Array]:
    r"""Exact attention, `softmax(cap(scale * query key^T) + bias) value`, without ever storing the T x S matrix.

    A superset of `jax.nn.dot_product_attention`. Flax's modules take `memeff.nn.attention_fn`.
    Memory: O(T + S) beyond inputs and outputs, forward and gradient; a `bias` or dense `mask` costs its own size.
    Differentiable in both modes and to every order, in linear memory: by query, key, value, params of functions, sinks,
    and by bias, scale and logits_soft_cap where they are arrays.

    Args:
      query: [*B, T, N, H], float. Leading dims may be none or many.
      key: [*B, S, K, H], same dtype as `query`. N must be a multiple of K; query head n reads key head n // (N // K).
      value: [*B, S, K, D], same dtype as `query`. D need not be H.
      bias: broadcastable to [*B, N, T, S], float, added to the logits. -inf, or the lowest finite number of its dtype,
        hides the key as a mask would.
      mask: broadcastable to [*B, N, T, S], boolean, True = may attend.
      scale: multiplies the dot products; a number or a scalar array. Default 1 / sqrt(H).
      is_causal: query row i sees keys up to position i + q_offset (top-left aligned, as jax.nn).
      query_seq_lengths: [*B], integers, tokens: rows past it give 0.
      key_value_seq_lengths: [*B], integers, tokens: keys past it are seen by nobody. Traced lengths cannot be checked
        and count as at most S.
      local_window_size: (left, right) in tokens, None for no bound, both sides inclusive; an int means both. With
        `is_causal` the smaller right holds.
      implementation: None (memeff chooses), "xla" (chunked, any device), "reference" (quadratic), "pallas" (kernels for
        Hopper GPUs; `memeff.explain` says which calls they run).
      backward: of kernels. "split", the default: a kernel for the query's gradient and one for those of key and value;
        bits repeat. "fused": one kernel, five products a tile instead of seven; the query's gradient is added up in
        an order that differs from run to run, in a float32 array as large as itself. The gradients are equally exact.
        "fastest": fused where that was measured to be faster and fits in memory_limit, else split; never refused.
      return_residual: also return lse.
      logits_soft_cap: c > 0: logits become c * tanh(logits / c), before bias and mask.
      query_segment_ids, key_value_segment_ids: [*B, T] and [*B, S], integers: a query sees the keys of its own segment.
        The first alone serves both where T = S.
      q_offset: int, or integers [*B]: the position of query row 0 among the keys, for `is_causal` and windows.
      score_fn: (score, batch, head, q_pos, k_pos, params) -> score, of JAX's functions: for scalars, the logit of one pair
        after scale and soft cap, and int32 numbers (positions as in windows, `batch` of all leading dims together). Or a
        `memeff.Score`, as those of `memeff.scores`.
      score_params: a pytree of arrays for it; floats get their gradients, in their own shapes.
      mask_fn: (batch, head, q_pos, k_pos, params) -> bool, True = may attend. Or a `memeff.Mask`, as those of
        `memeff.masks`, which `&`, `|` and `~` combine; or a `memeff.block_mask` of one, whose hidden tiles are skipped.
      mask_params: a pytree of arrays for it, without gradients.
      sinks: [N], float, nats: a logit for each head that takes part in the softmax and has no value, as one more key whose
        value is 0. lse is that of the keys alone. -inf is no sink.
      qk_transform: (x, position, which, params) -> x, of one row x [H] of a query or key (`which`, "query" or "key") at its
        position: rotary embeddings, normalisation. Done for each tile and again in the backward, so that no transformed copy
        is stored. Or a `memeff.Transform`, as those of `memeff.transforms`.
      qk_transform_params: a pytree of arrays for it; floats get their gradients.
      chunk_size: rows and columns of the tile of logits that exists at a time, an int or (query, key). Default: by a
        measurement, see `memeff.dispatch`.
      memory_limit: bytes, or a text such as "512MiB": what forward and gradient may take beyond inputs and outputs, with
        smaller tiles than the default where need be; what does not fit is refused, with a figure that does. A call near
        its limit is compiled while it is traced, once for all calls like it, to ask XLA. `memeff.memory_limit` sets it
        for many calls.
      precision: of the products, as `jax.lax.dot_general` takes it.
      dropout_rng: a key of `jax.random`, wanted where dropout_rate > 0. For the same key the mask is Flax's: a
        function of coordinates, so of no chunk size.
      dropout_rate: the chance, in [0, 1), that a probability is dropped. The others are divided by 1 - dropout_rate.
      broadcast_dropout: one mask for all batch entries and heads, as Flax's default. False: a mask for each.
      deterministic, dtype, module: not taken. Flax's modules pass them: give those `memeff.nn.attention_fn`.

    Returns:
      [*B, T, N, D] in the dtype of `query`; rows that see no key are 0. With `return_residual`, also
      lse [*B, T, N], float32 (float64 for float64), natural log; -inf for rows that see no key; differentiable.

    Raises:
      ValueError: shapes or values disagree, or `memory_limit` is too low. The message names the argument, what came and
        what was expected.
      TypeError: a dtype or a kind is wrong.
      NotImplementedError: a legal call that the requested `implementation` cannot run; the message says why.

    Example:
      >>> x = jnp.ones((2, 7, 4, 8))
      >>> dot_product_attention(x, x, x, local_window_size=(2, 0)).shape
      (2, 7, 4, 8)

    Source: Rabe & Staats 2021 (arXiv:2112.05682), section 2; Dao 2023 (arXiv:2307.08691), section 3.1.
    """
    check_flax_hooks(deterministic=deterministic, dtype=dtype, module=module)
    arguments = Arguments(
        query=query,
        key=key,
        value=value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        backward=backward,
        return_residual=return_residual,
        logits_soft_cap=logits_soft_cap,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        q_offset=q_offset,
        score_fn=score_fn,
        score_params=score_params,
        mask_fn=mask_fn,
        mask_params=mask_params,
        sinks=sinks,
        qk_transform=qk_transform,
        qk_transform_params=qk_transform_params,
        chunk_size=chunk_size,
        memory_limit=memory_limit,
        precision=precision,
        dropout_rng=dropout_rng,
        dropout_rate=dropout_rate,
        broadcast_dropout=broadcast_dropout,
    )
    return run_attention(arguments)
