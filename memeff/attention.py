"""Define `dot_product_attention`, the public function."""

from __future__ import annotations  # help() then shows ArrayLike and not the nine types that it is

from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

from jax import Array, lax
from jax.typing import ArrayLike

from memeff.arguments import (
    Arguments,
    AttentionKwargs,
    Backward,
    DropoutBits,
    Implementation,
    Strategy,
)
from memeff.block_mask import BlockMask
from memeff.call import run_attention
from memeff.sequence.layout import Layout
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
    sequence_axis: str | tuple[str, str] | None = None,
    sequence_layout: Layout = "contiguous",
    context_parallel: Strategy | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
    precision: lax.PrecisionLike = None,
    dropout_rng: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    dropout_bits: DropoutBits = "threefry",
    deterministic: None = None,
    dtype: None = None,
    module: None = None,
) -> Array | tuple[Array, Array]:
    r"""Compute exact attention, `softmax(cap(scale * query key^T) + bias) value`, in linear memory.

    It takes all arguments of `jax.nn.dot_product_attention`, and more. Give
    `memeff.nn.attention_fn` to modules of Flax instead.

    Memory: O(T + S) beyond inputs and outputs, for the forward and for the gradient. A `bias` or a
    dense `mask` costs its own size.

    Derivatives: in both modes, of every order, in linear memory, with respect to query, key, value,
    sinks, the float params of functions, and bias, scale and logits_soft_cap as arrays.

    Args:
      query: [*B, T, N, H], float, with any number of leading dims.
      key: [*B, S, K, H], in the dtype of `query`. N must be a multiple of K; query head n reads key
        head n // (N // K).
      value: [*B, S, K, D], in the dtype of `query`. D may differ from H.
      bias: broadcastable to [*B, N, T, S], float. It is added to the logits. A pair is hidden where
        the bias is -inf or the lowest finite number of its dtype.
      mask: broadcastable to [*B, N, T, S], boolean; True = may attend.
      scale: the factor of the dot products, a number or a scalar array. Default: 1 / sqrt(H).
      is_causal: hide the keys after position i + q_offset from query row i (top-left aligned, as
        jax.nn).
      query_seq_lengths: [*B], integers, in tokens. Rows from this length on give 0.
      key_value_seq_lengths: [*B], integers, in tokens. Keys from this length on are hidden. Lengths
        that jit traces cannot be checked, and count as at most S.
      local_window_size: (left, right), tokens that a query sees before and after its own position,
        both included. None is no bound, and an int stands for both sides. With `is_causal` the
        smaller right holds.
      implementation: "xla" (chunked, any device), "reference" (quadratic memory) or "pallas"
        (kernels for GPUs and TPUs). Default: memeff chooses, and `memeff.explain` says why.
      backward: how kernels compute the gradient. "split" (default) runs one kernel for the query's
        gradient and one for the others, and two runs give the same bits. "fused" runs one kernel
        with five products a tile instead of seven. It adds up the query's gradient in an order that
        differs from run to run, in a float32 array of its size. "fastest" is "fused" where that was
        measured to be faster and fits in `memory_limit`, and "split" elsewhere.
      return_residual: also return lse.
      logits_soft_cap: c > 0. Logits become c * tanh(logits / c), before bias and mask.
      query_segment_ids, key_value_segment_ids: [*B, T] and [*B, S], integers. A query sees only the
        keys of its own segment. If T = S, the first serves for both.
      q_offset: the position of query row 0 among the keys, for `is_causal` and windows: an int, or
        integers [*B].
      score_fn: (score, batch, head, q_pos, k_pos, params) -> score, a function of scalars in JAX.
        It gets the logit of one pair after scale and soft cap, and four int32 numbers: the batch
        entry (all leading dims are counted together), the query head, and the positions of query
        and key, as for windows. Or a `memeff.Score`, such as those of `memeff.scores`.
      score_params: a pytree of arrays, the params of `score_fn`. Floats have gradients.
      mask_fn: (batch, head, q_pos, k_pos, params) -> bool, True = may attend. Or a `memeff.Mask`,
        such as those of `memeff.masks`; `&`, `|` and `~` combine them. Or a `memeff.block_mask` of
        such a mask, whose hidden blocks are skipped.
      mask_params: a pytree of arrays, the params of `mask_fn`. They have no gradients.
      sinks: [N], float, in nats: for each head one more logit in the softmax, like that of a key
        whose value is 0. lse does not include it. A sink of -inf has no effect.
      qk_transform: (x, position, which, params) -> x, applied to each row x [H] of query and key,
        such as rotary embeddings. `which` is "query" or "key". Each tile computes it again, also in
        the backward, so no transformed copy is stored. Or a `memeff.Transform`, such as those of
        `memeff.transforms`.
      qk_transform_params: a pytree of arrays, the params of `qk_transform`. Floats have gradients.
      chunk_size: rows and columns, in tokens, of the tile of logits that exists at a time; an int
        stands for both. Default: the fastest measured (memeff/tile_sizes.py).
      memory_limit: bytes, or a text such as "512MiB", that forward and gradient may take beyond
        inputs and outputs. Tiles become smaller until the call fits. If it cannot fit, the error
        names a limit that suffices. A call near its limit is compiled while it is traced, because
        XLA then reports its memory. `memeff.memory_limit` sets a limit for many calls.
      sequence_axis: the axis of a mesh over which the sequence is sharded: query along T, key and
        value along S. Inside `jax.shard_map` over that axis the arrays are those of one device,
        but lengths, positions and the columns of a bias or mask are those of the whole sequence.
        Elsewhere the arrays are whole, and memeff enters shard_map. Of two axes the first is a
        ring, and the second all-to-all. Default: on an Explicit mesh the axis in the type of
        `query`, else none.
      sequence_layout: the order of the tokens over the devices: "contiguous", "zigzag" (see
        `memeff.to_zigzag`; causal attention then gives all devices the same work) or "striped". Of
        two axes it is the order over the devices of the first. Rows and columns of a bias or mask
        have that order too; positions and lengths do not.
      context_parallel: "ring" (devices send keys to each other; least memory), "all_gather" (all
        keys on every device; the bits of one device) or "all_to_all" (each device computes some of
        the heads). Default: memeff chooses, and `memeff.explain` says why.
      batch_axis, head_axis: the mesh axes over which the first leading dim and the heads are
        sharded, one name or several. Inside `jax.shard_map` over these axes, functions and dropout
        then count batch entries and heads in the whole call. With `sequence_axis` outside of
        shard_map, memeff enters shard_map over these axes too. In other calls omit both.
      precision: of the products, as in `jax.lax.dot_general`.
      dropout_rng: a key of `jax.random`, required if dropout_rate > 0. The same key gives the same
        mask for any chunk_size.
      dropout_rate: the chance, in [0, 1), that a probability is dropped. The others are divided by
        1 - dropout_rate.
      broadcast_dropout: use one mask for all batch entries and heads, as Flax does by default.
      dropout_bits: the generator. "threefry" draws Flax's mask for the same key. "mix32" draws
        another mask with a tenth of the instructions, and is the only one that GPU kernels support.
        Both compute the bits of a pair from its batch entry, head, query and key alone.
      deterministic, dtype, module: must be None. Flax's modules pass them, and need
        `memeff.nn.attention_fn`.

    Returns:
      out [*B, T, N, D] in the dtype of `query`; rows that see no key are 0. With `return_residual`
      also lse [*B, T, N], the natural logarithm of the sum of exp(logits), in float32 (float64 for
      float64), differentiable; -inf for rows that see no key.

    Raises:
      ValueError: if shapes or values disagree, or `memory_limit` is too low.
      TypeError: if an argument has the wrong dtype or kind.
      NotImplementedError: if the requested `implementation` or `backward` cannot run the call.

    Example:
      >>> x = jnp.ones((2, 7, 4, 8))
      >>> dot_product_attention(x, x, x, local_window_size=(2, 0)).shape
      (2, 7, 4, 8)

    Source: Rabe & Staats 2021 (arXiv:2112.05682), section 2; Dao 2023 (arXiv:2307.08691),
    section 3.1.
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
        dropout_bits=dropout_bits,
        sequence_axis=sequence_axis,
        sequence_layout=sequence_layout,
        context_parallel=context_parallel,
        batch_axis=batch_axis,
        head_axis=head_axis,
    )
    return run_attention(arguments)
