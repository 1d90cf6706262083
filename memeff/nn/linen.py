"""Add memeff's attention, grouped heads and a cache for whole prompts to Flax Linen's modules."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen
from jax import Array

from memeff.arguments import Strategy
from memeff.block_mask import BlockMask
from memeff.nn import cache
from memeff.nn.attention_fn import attention_fn
from memeff.nn.options import (
    bind,
    check_functions,
    check_head_size,
    check_heads,
    check_options,
    check_sequence,
    evaluate_init,
    sequence_keywords,
    sequence_options,
    without_blocks,
)
from memeff.sequence.layout import Layout
from memeff.user_functions import Mask, Score, Transform


class MultiHeadDotProductAttention(linen.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` in memory that grows linearly with the sequence.

    This subclass has every attribute of Flax's module, and the same parameters, initial values,
    dropout masks and decode cache. It has its own `__call__`, because Flax's gives keys and values
    as many heads as queries. Differences:

    * A query that sees no key (by `mask`) gives 0 before the output projection, where Flax gives
      the mean of the values.
    * `sow_weights=True` is refused with the size that the weights would need.
    * With `decode=True` a call may bring more than one token: a whole prompt in one call, then
      token by token. Each row sees what it would see in the full causal forward. More tokens than
      the cache holds are refused where the index is known. Under jit, as in Flax, the last entries
      are overwritten.
    * The variable "cache_index" may be replaced by one number for each sequence, [*B], such as the
      lengths of prompts that were padded in one call. The next tokens of each sequence then follow
      its own last token. A sequence that would grow beyond the cache is refused where the index is
      known, and gives NaN under jit.

    Attributes beyond Flax's:
      num_kv_heads: number of key and value heads, K, a divisor of `num_heads`, N. None: N. Query
        head n reads key head n // (N // K).
      is_causal: True: row i sees keys up to i. A decode cache is always causal.
      local_window_size: (left, right) in tokens, both sides inclusive; None is no bound, and an int
        means both sides.
      logits_soft_cap: c > 0: logits become c * tanh(logits / c).
      score_fn, mask_fn, qk_transform: as in `memeff.dot_product_attention`: functions without
        params, or a `memeff.Score`, `Mask` (or `memeff.block_mask`) and `Transform`, whose arrays
        are constants that do not learn. Arrays cannot be hashed, and a module that has some cannot
        either: under `linen.jit` close over the arrays, or pass score_init.
      score_init, qk_transform_init: functions (key) -> `memeff.Score` or `Transform`, in place of
        score_fn and qk_transform. The arrays of the result are the parameters "score_params" and
        "qk_transform_params".
      sinks_init: initializer (key, shape, dtype) of the parameter "sinks" [N]: for each head a
        logit that takes probability and adds nothing to the output. None: no sinks.
      sequence_axis, sequence_layout, context_parallel, batch_axis, head_axis: as in
        `memeff.dot_product_attention`, for arrays that are sharded over devices. `decode=True`
        is refused with sequence_axis. `init` needs no mesh: outside of one it makes the parameters
        on one device, from any length.
      attention_fn: default `memeff.nn.attention_fn`; use `functools.partial` of it to fix
        chunk_size and other keywords.

    Example:
      >>> import jax
      >>> layer = MultiHeadDotProductAttention(
      ...     num_heads=4, num_kv_heads=2, is_causal=True, local_window_size=(3, 0)
      ... )
      >>> x = jnp.ones((2, 7, 8))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x).shape, variables["params"]["key"]["kernel"].shape
      ((2, 7, 8), (8, 2, 2))

      Slopes that learn, and rotary embeddings:

      >>> from memeff import scores, transforms
      >>> def slopes(key):
      ...     return scores.alibi(scores.alibi_slopes(4))
      >>> layer = MultiHeadDotProductAttention(
      ...     num_heads=4, score_init=slopes, qk_transform=transforms.rotary()
      ... )
      >>> print(layer.init(jax.random.key(0), x)["params"]["score_params"])
      [0.25       0.0625     0.015625   0.00390625]
    """

    attention_fn: Callable[..., Array] = attention_fn
    num_kv_heads: int | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    score_fn: Callable[..., Any] | Score | None = None
    score_init: Callable[[Array], Score] | None = None
    mask_fn: Callable[..., Any] | Mask | BlockMask | None = None
    qk_transform: Callable[..., Any] | Transform | None = None
    qk_transform_init: Callable[[Array], Transform] | None = None
    sinks_init: Callable[..., Array] | None = None
    sequence_axis: str | tuple[str, str] | None = None
    sequence_layout: Layout = "contiguous"
    context_parallel: Strategy | None = None
    batch_axis: str | tuple[str, ...] | None = None
    head_axis: str | tuple[str, ...] | None = None

    def __post_init__(self):
        check_heads(self.num_heads, self.num_kv_heads)
        if self.qkv_features is not None:
            check_head_size(self.num_heads, self.qkv_features, 0)
        check_options(
            self.attention_fn,
            self.dropout_rate,
            self.is_causal,
            self.local_window_size,
            self.logits_soft_cap,
        )
        check_functions(
            self.attention_fn,
            (self.score_fn, self.score_init),
            (self.qk_transform, self.qk_transform_init),
            self.mask_fn,
            self.sinks_init,
        )
        check_sequence(self.attention_fn, sequence_options(self), self.decode)
        super().__post_init__()

    @linen.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        inputs_kv: Array | None = None,
        mask: Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
    ) -> Array:
        """Return [*B, T, out_features] from inputs_q [*B, T, F], inputs_k and inputs_v [*B, S, F'].

        The arguments are Flax's.
        """
        inputs_k, inputs_v = _keys_and_values(inputs_q, inputs_k, inputs_v, inputs_kv)
        query, key, value = self._project(inputs_q, inputs_k, inputs_v)
        position = None
        if self.decode:
            key, value, position = self._update_cache(query, key, value)
        drops = self.dropout_rate > 0 and not linen.merge_param(
            "deterministic", self.deterministic, deterministic
        )
        if drops and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        attention = bind(
            self.attention_fn,
            required=dict(
                mask=mask,
                dropout_rng=dropout_rng if drops else None,
                module=self if sow_weights else None,
                # With a cache causal order hides the entries that are not written yet.
                is_causal=self.is_causal or position is not None,
                q_offset=position,
                **self._function_keywords(decodes=position is not None),
                **sequence_keywords(sequence_options(self), query, self.is_initializing()),
            ),
            optional=dict(
                dropout_rate=self.dropout_rate,
                broadcast_dropout=self.broadcast_dropout,
                deterministic=not drops,
                dtype=self.dtype,
                precision=self.precision,
                force_fp32_for_softmax=self.force_fp32_for_softmax,
            ),
        )
        project_out = linen.DenseGeneral(
            self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            use_bias=self.use_bias,
            precision=self.precision,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )
        out = attention(query, key, value)
        if position is not None:
            out = cache.nan_where_full(out, position, key.shape[-3])
        return project_out(out)

    @linen.nowrap
    def _project(
        self, inputs_q: Array, inputs_k: Array, inputs_v: Array
    ) -> tuple[Array, Array, Array]:
        """Return query [*B, T, N, H], key and value [*B, S, K, H], normalised if Flax does so."""
        N = self.num_heads
        K = check_heads(N, self.num_kv_heads)
        H = check_head_size(N, self.qkv_features, inputs_q.shape[-1])
        common: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        project = functools.partial(
            linen.DenseGeneral,
            use_bias=self.use_bias,
            precision=self.precision,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
            **common,
        )
        query = project((N, H), name="query")(inputs_q)
        key = project((K, H), name="key")(inputs_k)
        value = project((K, H), name="value")(inputs_v)
        if self.normalize_qk:
            query = linen.LayerNorm(use_bias=False, name="query_ln", **common)(query)
            key = linen.LayerNorm(use_bias=False, name="key_ln", **common)(key)
        return query, key, value

    @linen.nowrap
    def _function_keywords(self, decodes: bool) -> dict[str, Any]:
        """Create the parameters of the attributes; return their keywords of `attention_fn`."""
        qk_einsum = self.qk_attn_weights_einsum_cls
        value_einsum = self.attn_weights_value_einsum_cls
        score_fn = self._learned("score_fn", Score, self.score_init)
        transform = self._learned("qk_transform", Transform, self.qk_transform_init)
        sinks = None
        if self.sinks_init is not None:
            sinks = self.param("sinks", self.sinks_init, (self.num_heads,), self.param_dtype)
        return dict(
            qk_attn_weights_einsum=qk_einsum and qk_einsum(),
            attn_weights_value_einsum=value_einsum and value_einsum(),
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            score_fn=self.score_fn if score_fn is None else score_fn,
            mask_fn=without_blocks(self.mask_fn) if decodes else self.mask_fn,
            qk_transform=self.qk_transform if transform is None else transform,
            sinks=sinks,
        )

    @linen.nowrap
    def _learned(self, name: str, kind: type, init: Callable[[Array], Any] | None) -> Any:
        """Return what `init` makes, with its arrays as parameters; None if `init` is None."""
        if init is None:
            return None
        params = self.param(f"{name.removesuffix('_fn')}_params", lambda key: init(key).params)
        return dataclasses.replace(evaluate_init(name, kind, init), params=params)

    @linen.nowrap
    def _update_cache(
        self, query: Array, key: Array, value: Array
    ) -> tuple[Array, Array, Array | None]:
        """Write key and value [*B, T, K, H] into the cache.

        Return all keys and values [*B, S, K, H], and the position of the first new one. In `init`
        return the arguments and None.
        """
        exists = self.has_variable("cache", "cached_key")
        keys = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        values = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
        if not exists:
            return key, value, None
        start = index.value
        cached = keys.value, values.value
        keys.value, values.value = cache.append(cached, query, (key, value), start)
        index.value = start + key.shape[-3]
        return keys.value, values.value, start


class MultiHeadAttention(MultiHeadDotProductAttention, linen.MultiHeadAttention):
    """`MultiHeadDotProductAttention` under another name that Flax's parameter trees may hold.

    Example:
      >>> import jax
      >>> x = jnp.ones((2, 7, 8))
      >>> layer = MultiHeadAttention(num_heads=2, logits_soft_cap=30.0)
      >>> layer.init_with_output(jax.random.key(0), x)[0].shape
      (2, 7, 8)
    """


def _keys_and_values(inputs_q, inputs_k, inputs_v, inputs_kv) -> tuple[Array, Array]:
    """Return the inputs of keys and of values; by default they are the inputs of the queries."""
    if inputs_kv is not None:
        if inputs_k is not None or inputs_v is not None:
            raise ValueError(
                "inputs_kv came with inputs_k or inputs_v: pass inputs_k and inputs_v, or "
                "inputs_kv alone."
            )
        return inputs_kv, inputs_kv
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "inputs_v came without inputs_k: pass both, or inputs_k alone if they are the same."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    return inputs_k, inputs_k if inputs_v is None else inputs_v
