"""The contract: `dot_product_attention`, its arguments in the user's words and the walk from them to an implementation."""

from collections.abc import Callable
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from memeff import arguments, dispatch, planning, sharding
from memeff.blocks import BlockMask
from memeff.differentiation import attend
from memeff.functions import Mask, Score, Transform
from memeff.problem import SEES_NOTHING, Operands, Problem

Implementation = Literal["xla", "reference", "pallas"]
Backward = Literal["split", "fused", "fastest"]


@overload
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
    return_residual: Literal[False] = ...,
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
    deterministic: bool | None = None,
    dtype: DTypeLike | None = None,
    module: Any = None,
    force_fp32_for_softmax: bool = True,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
) -> Array: ...


@overload
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
    return_residual: Literal[True],
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
    deterministic: bool | None = None,
    dtype: DTypeLike | None = None,
    module: Any = None,
    force_fp32_for_softmax: bool = True,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
) -> tuple[Array, Array]: ...


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    implementation=None,
    backward=None,
    return_residual=False,
    logits_soft_cap=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    q_offset: ArrayLike = 0,
    score_fn=None,
    score_params=None,
    mask_fn=None,
    mask_params=None,
    sinks=None,
    qk_transform=None,
    qk_transform_params=None,
    chunk_size=None,
    memory_limit=None,
    precision=None,
    dropout_rng=None,
    dropout_rate=0.0,
    broadcast_dropout=True,
    deterministic=None,
    dtype=None,
    module=None,
    force_fp32_for_softmax=True,
    qk_attn_weights_einsum=None,
    attn_weights_value_einsum=None,
):
    r"""Exact attention, `softmax(cap(scale * query key^T) + bias) value`, without ever storing the T x S matrix.

    A superset of `jax.nn.dot_product_attention`, and an `attention_fn` for Flax (Linen and NNX).
    Memory: O(T + S) beyond inputs and outputs, forward and gradient; a `bias` or dense `mask` costs its own size.
    Gradients go to query, key, value, and to bias, scale and logits_soft_cap where they are arrays.

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
      sinks: [N], float: a logit for each head that takes probability and gives nothing (lse is then without it).
      qk_transform: (x, position, which, params) -> x, of one row x [H] of a query or key (`which`, "query" or "key") at its
        position: rotary embeddings, normalisation. Done for each tile and again in the backward, so that no transformed copy
        is stored. Or a `memeff.Transform`, as those of `memeff.transforms`.
      qk_transform_params: a pytree of arrays for it; floats get their gradients.
      chunk_size: rows and columns of the tile of logits that exists at a time, an int or (query, key). Default: by a
        measurement, see `memeff.dispatch`.
      memory_limit: bytes, or a text such as "512MiB": what forward and gradient may take beyond inputs and outputs, with
        smaller tiles than the default where need be; what does not fit is refused. `memeff.memory_limit` sets it for many
        calls.
      precision: of the products, as `jax.lax.dot_general` takes it.
      dropout_rng, dropout_rate, broadcast_dropout, deterministic: as in Flax, and for the same key the same mask as
        Flax's: a function of coordinates, so of no chunk size. Drops where the rate is > 0 and not `deterministic`.
      dtype: cast query, key and value to it first, as Flax does.
      module: Flax's request to sow attention weights: refused, they are what is never stored.
      force_fp32_for_softmax: always so here.
      qk_attn_weights_einsum, attn_weights_value_einsum: Flax's hooks for quantised products: refused.

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
    del force_fp32_for_softmax  # softmax is in float32 at least
    arguments.check_flax_hooks(query, key, module, qk_attn_weights_einsum, attn_weights_value_einsum)
    from_flax = deterministic is not None  # Linen and NNX always pass it: their dtype and mask habits then hold
    query, key, value = arguments.check_arrays(query, key, value, dtype, from_flax)
    sharding.check_layout(query, key, value)
    shape = arguments.Shape.of(query, key, value)
    terms, static_terms = arguments.check_terms(shape, bias, scale, logits_soft_cap)
    offset, static_offset = arguments.check_offset(shape, q_offset)
    left, right = arguments.check_window(local_window_size, is_causal)
    q_segments, kv_segments = arguments.check_segments(shape, query_segment_ids, key_value_segment_ids)
    accumulator = jnp.promote_types(query.dtype, jnp.float32)
    score_given, score_floats, score_rest = arguments.check_function("score_fn", score_fn, score_params, accumulator)
    blocks, mask_fn = arguments.check_blocks(shape, mask_fn, q_offset)
    mask_given, *of_mask = arguments.check_function("mask_fn", mask_fn, mask_params, accumulator)
    transform, *of_transform = arguments.check_transform(qk_transform, qk_transform_params, query)
    sinks = arguments.check_sinks(shape, sinks)
    dropout, dropout_key = arguments.check_dropout(dropout_rng, dropout_rate, broadcast_dropout, deterministic)
    problem = Problem(
        left=left,
        right=right,
        q_offset=static_offset,
        scale=static_terms[0],
        soft_cap=static_terms[1],
        dropout=dropout,
        precision=arguments.check_precision(precision),
        score_fn=score_given,
        mask_fn=mask_given,
        blocks=blocks,
        qk_transform=transform,
        backward=arguments.check_backward(backward),
    )
    operands = Operands(
        *arguments.fold(shape, query, key, value),
        terms=terms._replace(score=score_floats, transform=of_transform[0]),
        mask=arguments.check_mask(shape, mask, from_flax),
        q_lengths=arguments.check_lengths(shape, "query_seq_lengths", query_seq_lengths, "T", shape.T),
        kv_lengths=arguments.check_lengths(shape, "key_value_seq_lengths", key_value_seq_lengths, "S", shape.S),
        q_offset=offset,
        q_segments=q_segments,
        kv_segments=kv_segments,
        dropout_key=dropout_key,
        score_rest=score_rest,
        transform_rest=of_transform[1],
        mask_params=jax.tree.map(lax.stop_gradient, tuple(x for kind in of_mask for x in kind)),
    )
    operands = sharding.like_query(operands)
    limit = arguments.bytes_of("memory_limit", memory_limit) or dispatch.memory_limit_of_program.value
    chunks = arguments.check_chunk_size(chunk_size)
    problem, module = dispatch.select_implementation(problem, operands, implementation, chunks, limit)
    out, lse = attend(module, problem, bool(return_residual) or sinks is not None, operands)
    out = arguments.unfold(shape, out)
    if lse is None:
        return out
    lse = arguments.unfold(shape, lse)
    lse = jnp.where(lse == SEES_NOTHING, -jnp.inf, lse)
    if sinks is not None:  # which leave out / (out + sink's probability)
        out = out * jax.nn.sigmoid(lse - sinks)[..., None].astype(out.dtype)
    return (out, lse) if return_residual else out


def explain(query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **how: Any) -> str:
    """Which implementation runs this call of `dot_product_attention`, how, and why each other one does not.

    Nothing is computed.

    Args: those of `dot_product_attention` but `implementation`; for any array also a `jax.ShapeDtypeStruct`.

    Raises: as the call itself does.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
      >>> "of 64 visited" in explain(x, x, x, is_causal=True)
      True
    """
    return dispatch.reasons(*_dispatched("explain", dict(query=query, key=key, value=value, bias=bias, mask=mask, **how)))


def plan(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    device: Any = None,
    memory: Any = None,
    **how: Any,
) -> planning.Plan:
    """What this call of `dot_product_attention` will take: memory, floating point operations, tiles; print it for a table.

    Nothing is computed or allocated. Bytes are what XLA will report of the compiled call: on CPUs within a tenth for long
    sequences, on GPUs mostly within a fifth; on TPUs they are told by the rule for GPUs, which nobody has checked there.

    Args: those of `dot_product_attention` but `implementation`; for any array also a `jax.ShapeDtypeStruct`. And:
      device: a name of `memeff.planning.DEVICES` ("cpu", "gpu", "H200"), or a `jax.Device`. Default: JAX's first.
      memory: bytes, or a text such as "80GiB", in which the longest sequence is to fit. Default: the device's, where known.

    Raises: as the call itself does; ValueError for a device that is not known.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
      >>> plan(x, x, x, is_causal=True, device="cpu").tiles_visited
      36
    """
    on, has = planning.check_device(device)
    with dispatch.as_if_on(*on):
        call = _dispatched("plan", dict(query=query, key=key, value=value, bias=bias, mask=mask, **how))
        return planning.make(*call, arguments.bytes_of("memory", memory) or has)


def _dispatched(name: str, given: dict[str, Any]) -> tuple[Problem, Operands, str]:
    """What dispatch sees of a call (of arrays only shapes), and the implementation that it chooses."""
    if "implementation" in given:
        raise TypeError(f"memeff.{name} tells what memeff would choose: leave implementation= away.")
    arrays = {n: x for n, x in given.items() if isinstance(x, jax.ShapeDtypeStruct) or getattr(x, "ndim", 0) > 0}
    static = {n: x for n, x in given.items() if n not in arrays}
    with dispatch.watch() as calls:
        jax.eval_shape(lambda arrays: dot_product_attention(**arrays, **static), arrays)
    return calls[0]
