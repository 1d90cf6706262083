"""Flax NNX's attention module with memeff inside. Hides how positions reach the attention when it decodes from a cache."""

import copy
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array

from memeff.block_mask import BlockMask
from memeff.nn.attention_fn import attention_fn
from memeff.nn.options import (
    bind,
    check_functions,
    check_head_size,
    check_heads,
    check_options,
    without_blocks,
)
from memeff.user_functions import Mask, Score, Transform


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
      score_fn, mask_fn, qk_transform: as `memeff.dot_product_attention` takes them, functions without params or a
        `memeff.Score`, `Mask` (or a `memeff.block_mask`) and `Transform`, whose arrays do not learn: `nnx.Variable`s.
      score_init, qk_transform_init: (key) -> `memeff.Score` or `Transform`, in the place of score_fn and qk_transform: the
        arrays of what it returns are `nnx.Param`s, in `layer.score_fn.params` and `layer.qk_transform.params`.
      sinks_init: (key, shape, dtype), an initializer of Flax's: a logit for each head that takes probability and gives
        nothing is the `nnx.Param` `layer.sinks`. None: none.
      attention_fn: default `memeff.nn.attention_fn`; `functools.partial` of it fixes chunk_size and the like.

    Example:
      >>> import jax.numpy as jnp
      >>> layer = MultiHeadAttention(4, 8, num_kv_heads=2, local_window_size=(3, 0), decode=False, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 7, 8)), is_causal=True).shape
      (2, 7, 8)

      Slopes that learn, and rotary embeddings:

      >>> from memeff import scores, transforms
      >>> of = dict(score_init=lambda key: scores.alibi(scores.alibi_slopes(4)), qk_transform=transforms.rotary())
      >>> layer = MultiHeadAttention(4, 8, **of, decode=False, rngs=nnx.Rngs(0))
      >>> gradient = nnx.grad(lambda layer: layer(jnp.ones((2, 7, 8)), is_causal=True).sum())(layer)
      >>> layer.score_fn.params.shape, gradient["score_fn"]["params"].shape
      ((4,), (4,))
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
        attention_fn: Callable[..., Array] = attention_fn,
        is_causal: bool = False,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        score_fn: Callable[..., Any] | Score | None = None,
        score_init: Callable[[Array], Score] | None = None,
        mask_fn: Callable[..., Any] | Mask | BlockMask | None = None,
        qk_transform: Callable[..., Any] | Transform | None = None,
        qk_transform_init: Callable[[Array], Transform] | None = None,
        sinks_init: Callable[..., Array] | None = None,
        rngs: nnx.Rngs,
        **flax: Any,  # Flax's own keywords, which differ from version to version
    ):
        check_heads(num_heads, num_kv_heads)
        check_head_size(num_heads, qkv_features, in_features)
        check_options(attention_fn, dropout_rate, is_causal, local_window_size, logits_soft_cap)
        check_functions(
            attention_fn,
            (score_fn, score_init),
            (qk_transform, qk_transform_init),
            mask_fn,
            sinks_init,
        )
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
        self.local_window_size = (
            tuple(local_window_size) if isinstance(local_window_size, list) else local_window_size
        )
        self.logits_soft_cap = logits_soft_cap
        self.score_fn = (
            _kept(score_fn) if score_init is None else _learnt(score_init(rngs.params()))
        )
        self.mask_fn = _kept(mask_fn)
        self.qk_transform = (
            _kept(qk_transform)
            if qk_transform_init is None
            else _learnt(qk_transform_init(rngs.params()))
        )
        self.sinks = nnx.data(
            sinks_init and nnx.Param(sinks_init(rngs.params(), (num_heads,), self.param_dtype))
        )

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
        mask_fn = without_blocks(self.mask_fn) if decode else self.mask_fn
        functions = {
            "score_fn": self.score_fn,
            "mask_fn": mask_fn,
            "qk_transform": self.qk_transform,
            "sinks": self.sinks,
        }
        of_positions = {
            "local_window_size": self.local_window_size,
            **jax.tree.map(_value, functions, is_leaf=_is_variable),
        }
        said: dict[str, Any] = {"logits_soft_cap": self.logits_soft_cap, **of_positions}
        quiet: dict[str, Any] = {}
        # the one row stands here; Flax's mask hides what is not written yet
        if decode and self.cache_index is not None:
            needed = any(x is not None for x in of_positions.values())
            (said if needed else quiet)["q_offset"] = self.cache_index[...]
        attention = bind(self.attention_fn, said, quiet)
        view = self
        # the same variables and submodules; `self` is not touched
        if attention is not self.attention_fn:
            view = copy.copy(self)
            vars(view)["attention_fn"] = attention
        return nnx.MultiHeadAttention.__call__(
            view,
            inputs_q,
            inputs_k,
            inputs_v,
            decode=decode,
            is_causal=is_causal and not decode,
            **flax,
        )


def _learnt(made: Any) -> Any:
    """A pytree of `nnx.Param`s."""
    return nnx.data(jax.tree.map(nnx.Param, made))


def _kept(given: Any) -> Any:
    """A pytree of variables that no gradient is taken of; or the function, as it came."""
    is_tree = isinstance(given, Score | Mask | BlockMask | Transform)
    return nnx.data(jax.tree.map(nnx.Variable, given)) if is_tree else given


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _value(x: Any) -> Any:
    return x[...] if isinstance(x, nnx.Variable) else x
