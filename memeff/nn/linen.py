"""Flax Linen's attention modules with memeff inside. Hides the projections, grouped, and the decode cache."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen
from jax import Array, lax
from jax.core import Tracer

from memeff.block_mask import BlockMask
from memeff.nn.attention_fn import attention_fn
from memeff.nn.options import (
    bind,
    check_functions,
    check_head_size,
    check_heads,
    check_options,
    made,
    without_blocks,
)
from memeff.user_functions import Mask, Score, Transform


class MultiHeadDotProductAttention(linen.MultiHeadDotProductAttention):
    """`flax.linen.MultiHeadDotProductAttention` in memory that grows with the sequence, not with its square.

    A subclass: every attribute of Flax's, the same parameters, initial values, dropout masks and decode cache. The call is
    memeff's own, since Flax's gives keys and values as many heads as queries. Where it differs:

    * A query that sees no key (by `mask`) gives 0 before the output projection; Flax gives the mean of the values.
    * `sow_weights=True` is refused with the size that the weights would need.
    * With `decode=True` a call may bring more than one token: a whole prompt in one call, then token by token. Each row sees
      what it would see in the full causal forward. More tokens than the cache holds are refused where the index is known;
      under jit, as in Flax, the last entries are overwritten.

    Attributes beyond Flax's:
      num_kv_heads: heads of keys and values, a divisor of `num_heads`; None: as many. Query head n reads n // (N // K).
      is_causal: row i sees keys up to i. Always so with a decode cache.
      local_window_size: (left, right) in tokens, None for no bound, both sides inclusive; an int means both.
      logits_soft_cap: c > 0: logits become c * tanh(logits / c).
      score_fn, mask_fn, qk_transform: as `memeff.dot_product_attention` takes them, functions without params or a
        `memeff.Score`, `Mask` (or a `memeff.block_mask`) and `Transform`, whose arrays are constants: they do not learn.
        (Arrays have no hash, so that neither has the module: under `linen.jit`, close over them, or give score_init.)
      score_init, qk_transform_init: (key) -> `memeff.Score` or `Transform`, in the place of score_fn and qk_transform: the
        arrays of what it returns are parameters, "score_params" and "qk_transform_params".
      sinks_init: (key, shape, dtype), an initializer of Flax's: a logit for each head that takes probability and gives
        nothing is the parameter "sinks". None: none.
      attention_fn: default `memeff.nn.attention_fn`; `functools.partial` of it fixes chunk_size and the like.

    Example:
      >>> import jax
      >>> layer = MultiHeadDotProductAttention(num_heads=4, num_kv_heads=2, is_causal=True, local_window_size=(3, 0))
      >>> x = jnp.ones((2, 7, 8))
      >>> variables = layer.init(jax.random.key(0), x)
      >>> layer.apply(variables, x).shape, variables["params"]["key"]["kernel"].shape
      ((2, 7, 8), (8, 2, 2))

      Slopes that learn, and rotary embeddings:

      >>> from memeff import scores, transforms
      >>> slopes = lambda key: scores.alibi(scores.alibi_slopes(4))
      >>> layer = MultiHeadDotProductAttention(num_heads=4, score_init=slopes, qk_transform=transforms.rotary())
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
        score, transform = (
            (self.score_fn, self.score_init),
            (self.qk_transform, self.qk_transform_init),
        )
        check_functions(self.attention_fn, score, transform, self.mask_fn, self.sinks_init)
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
        """[*B, T, out_features] from inputs_q [*B, T, F], inputs_k and inputs_v [*B, S, F']; arguments as in Flax."""
        inputs_k, inputs_v = _keys_and_values(inputs_q, inputs_k, inputs_v, inputs_kv)
        K = check_heads(self.num_heads, self.num_kv_heads)
        H = check_head_size(self.num_heads, self.qkv_features, inputs_q.shape[-1])
        common: dict[str, Any] = dict(dtype=self.dtype, param_dtype=self.param_dtype)
        dense = functools.partial(
            linen.DenseGeneral, use_bias=self.use_bias, precision=self.precision, **common
        )
        project = functools.partial(
            dense,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
        )
        query = project((self.num_heads, H), name="query")(inputs_q)
        key = project((K, H), name="key")(inputs_k)
        value = project((K, H), name="value")(inputs_v)
        if self.normalize_qk:
            query = linen.LayerNorm(use_bias=False, name="query_ln", **common)(query)
            key = linen.LayerNorm(use_bias=False, name="key_ln", **common)(key)
        key, value, position = (
            self._remember(query, key, value) if self.decode else (key, value, None)
        )

        drops = self.dropout_rate > 0 and not linen.merge_param(
            "deterministic", self.deterministic, deterministic
        )
        if drops and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        attention = bind(
            self.attention_fn,
            said=dict(
                mask=mask,
                dropout_rng=dropout_rng if drops else None,
                module=self if sow_weights else None,
                qk_attn_weights_einsum=self.qk_attn_weights_einsum_cls
                and self.qk_attn_weights_einsum_cls(),
                attn_weights_value_einsum=self.attn_weights_value_einsum_cls
                and self.attn_weights_value_einsum_cls(),
                # what is not written yet lies ahead
                is_causal=self.is_causal or position is not None,
                q_offset=position,
                local_window_size=self.local_window_size,
                logits_soft_cap=self.logits_soft_cap,
                score_fn=self._learnt("score_fn", Score, self.score_init) or self.score_fn,
                mask_fn=self.mask_fn if position is None else without_blocks(self.mask_fn),
                qk_transform=self._learnt("qk_transform", Transform, self.qk_transform_init)
                or self.qk_transform,
                sinks=self.sinks_init
                and self.param("sinks", self.sinks_init, (self.num_heads,), self.param_dtype),
            ),
            quiet=dict(
                dropout_rate=self.dropout_rate,
                broadcast_dropout=self.broadcast_dropout,
                deterministic=not drops,
                dtype=self.dtype,
                precision=self.precision,
                force_fp32_for_softmax=self.force_fp32_for_softmax,
            ),
        )
        return dense(
            self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )(attention(query, key, value))

    def _learnt(self, name: str, kind: type, init: Callable[[Array], Any] | None) -> Any:
        """What `init` makes, its arrays parameters; None for None."""
        if init is None:
            return None
        params = self.param(f"{name.removesuffix('_fn')}_params", lambda key: init(key).params)
        return dataclasses.replace(made(name, kind, init), params=params)

    def _remember(
        self, query: Array, key: Array, value: Array
    ) -> tuple[Array, Array, Array | None]:
        """All keys and values, the new ones written behind the old; the position of the first new one, None in `init`."""
        there = self.has_variable("cache", "cached_key")
        keys = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        values = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
        if not there:
            return key, value, None
        *batch, T, K, H = key.shape
        *cached, S, _, _ = keys.value.shape
        if keys.value.shape != (*batch, S, K, H) or query.shape[:-2] != key.shape[:-2] or T > S:
            raise ValueError(
                f"decode: inputs give queries {query.shape} and keys {key.shape}, and the cache holds {keys.value.shape}: "
                f"both must bring the same 1 to {S} tokens, for the leading dims {tuple(cached)} that init saw."
            )
        start = index.value
        if not isinstance(start, Tracer) and start.ndim == 0 and start + T > S:
            raise ValueError(
                f"decode: the cache of {S} tokens holds {start} and {T} came: init with longer inputs."
            )
        keys.value = lax.dynamic_update_slice_in_dim(
            keys.value, key.astype(keys.value.dtype), start, key.ndim - 3
        )
        values.value = lax.dynamic_update_slice_in_dim(
            values.value, value.astype(values.value.dtype), start, value.ndim - 3
        )
        index.value = start + T
        return keys.value, values.value, start


class MultiHeadAttention(MultiHeadDotProductAttention, linen.MultiHeadAttention):
    """`flax.linen.MultiHeadAttention`: `MultiHeadDotProductAttention` under the name that Flax's parameter trees may hold.

    Example:
      >>> import jax
      >>> x = jnp.ones((2, 7, 8))
      >>> layer = MultiHeadAttention(num_heads=2, logits_soft_cap=30.0)
      >>> layer.init_with_output(jax.random.key(0), x)[0].shape
      (2, 7, 8)
    """


def _keys_and_values(inputs_q, inputs_k, inputs_v, inputs_kv) -> tuple[Array, Array]:
    """What Flax takes for keys and values: its own inputs, or those of the queries."""
    if inputs_kv is not None:
        if inputs_k is not None or inputs_v is not None:
            raise ValueError(
                "inputs_kv came with inputs_k or inputs_v: pass inputs_k and inputs_v, or inputs_kv alone."
            )
        return inputs_kv, inputs_kv
    if inputs_k is None and inputs_v is not None:
        raise ValueError(
            "inputs_v came without inputs_k: pass both, or inputs_k alone if they are the same."
        )
    inputs_k = inputs_q if inputs_k is None else inputs_k
    return inputs_k, inputs_k if inputs_v is None else inputs_v
