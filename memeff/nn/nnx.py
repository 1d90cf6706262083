"""Flax NNX's attention module with memeff inside. Hides how positions reach the attention when it decodes from a cache."""

import copy
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax import Array

from memeff.attention import dot_product_attention
from memeff.nn.options import bind, check_head_size, check_heads, check_options


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` in memory that grows with the sequence, not with its square.

    A subclass that calls Flax's own: the same arguments, parameters, initial values, dropout masks and decode cache.
    Where it differs:

    * A query that sees no key (by `mask`) gives 0 before the output projection; Flax gives the mean of the values.
    * `sow_weights=True` is refused with the size that the weights would need.
    * `is_causal=True` and `decode=True` may be asked for together: the cache is causal by itself (Flax 0.12.8 saw one key).

    Args beyond Flax's:
      is_causal: row i sees keys up to i; the `is_causal` of a call, where given, takes precedence.
      local_window_size: (left, right) in tokens, None for no bound, both sides inclusive; an int means both.
      logits_soft_cap: c > 0: logits become c * tanh(logits / c).
      attention_fn: default `memeff.dot_product_attention`; `functools.partial` of it fixes chunk_size and the like.

    Example:
      >>> import jax.numpy as jnp
      >>> layer = MultiHeadAttention(4, 8, num_kv_heads=2, local_window_size=(3, 0), decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 7, 8)), is_causal=True).shape
      (2, 7, 8)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dropout_rate: float = 0.0,
        attention_fn: Callable[..., Array] = dot_product_attention,
        is_causal: bool = False,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        rngs: nnx.Rngs,
        **flax: Any,  # Flax's own keywords, which differ from version to version
    ):
        check_heads(num_heads, num_kv_heads)
        check_head_size(num_heads, qkv_features, in_features)
        check_options(attention_fn, dropout_rate, is_causal, local_window_size, logits_soft_cap)
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            dropout_rate=dropout_rate,
            attention_fn=attention_fn,
            rngs=rngs,
            **flax,
        )
        self.is_causal = is_causal
        self.local_window_size = tuple(local_window_size) if isinstance(local_window_size, list) else local_window_size
        self.logits_soft_cap = logits_soft_cap

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        decode: bool | None = None,
        is_causal: bool | None = None,
        **flax: Any,  # Flax's own keywords, which differ from version to version
    ) -> Array:
        """[*B, T, out_features] from inputs_q [*B, T, F], inputs_k and inputs_v [*B, S, F']; arguments as in Flax."""
        decode = self.decode if decode is None else decode
        is_causal = self.is_causal if is_causal is None else is_causal
        said: dict[str, Any] = {"local_window_size": self.local_window_size, "logits_soft_cap": self.logits_soft_cap}
        quiet: dict[str, Any] = {}
        if decode and self.cache_index is not None:  # the one row stands here; Flax's mask hides what is not written yet
            (quiet if self.local_window_size is None else said)["q_offset"] = self.cache_index[...]
        attention = bind(self.attention_fn, said, quiet)
        view = self
        if attention is not self.attention_fn:  # the same variables and submodules; `self` is not touched
            view = copy.copy(self)
            vars(view)["attention_fn"] = attention
        return nnx.MultiHeadAttention.__call__(
            view, inputs_q, inputs_k, inputs_v, decode=decode, is_causal=is_causal and not decode, **flax
        )
