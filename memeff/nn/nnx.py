"""Add memeff's attention and its options to Flax NNX's attention module."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array

from memeff.arguments import Strategy
from memeff.block_mask import BlockMask
from memeff.nn import cache
from memeff.nn.attention_fn import attention_fn, is_memeff
from memeff.nn.options import (
    bind,
    check_functions,
    check_head_size,
    check_heads,
    check_no_cache,
    check_options,
    check_sequence,
    sequence_options,
    without_blocks,
)
from memeff.sequence.keywords import SequenceOptions
from memeff.sequence.layout import Layout
from memeff.user_functions import Mask, Score, Transform


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`flax.nnx.MultiHeadAttention` in memory that grows linearly with the sequence.

    This subclass calls Flax's `__call__`, with the same arguments, parameters, initial values,
    dropout masks and decode cache. Differences:

    * A query that sees no key (by `mask`) gives 0 before the output projection, where Flax gives
      the mean of the values.
    * `sow_weights=True` is refused with the size that the weights would need.
    * `is_causal=True` and `decode=True` work together, because the cache is causal by itself (Flax
      0.12.8 saw one key).
    * With `decode=True` a call may bring more than one token: a whole prompt in one call. More
      tokens than the cache holds are refused where the index is known. Under jit, as in Flax, the
      last entries are overwritten.
    * `cache_index` may be replaced by one number for each sequence, an `nnx.Cache` of [*B], such as
      the lengths of prompts that were padded in one call. The next tokens of each sequence then
      follow its own last token. A sequence that would grow beyond the cache is refused where the
      index is known, and gives NaN under jit.

    Args beyond Flax's:
      is_causal: True: row i sees keys up to i. The `is_causal` of a call takes precedence.
      local_window_size: (left, right) in tokens, both sides inclusive; None is no bound, and an int
        means both sides.
      logits_soft_cap: c > 0: logits become c * tanh(logits / c).
      score_fn, mask_fn, qk_transform: as in `memeff.dot_product_attention`: functions without
        params, or a `memeff.Score`, `Mask` (or `memeff.block_mask`) and `Transform`. Their arrays
        become `nnx.Variable`s, which do not learn.
      score_init, qk_transform_init: functions (key) -> `memeff.Score` or `Transform`, in place of
        score_fn and qk_transform. The arrays of the result are the `nnx.Param`s in
        `layer.score_fn.params` and `layer.qk_transform.params`.
      sinks_init: initializer (key, shape, dtype) of the `nnx.Param` `layer.sinks` [N]: for each
        head a logit that takes probability and adds nothing to the output. None: no sinks.
      sequence_axis, sequence_layout, context_parallel, batch_axis, head_axis: as in
        `memeff.dot_product_attention`, for arrays that are sharded over devices. `decode=True`
        is refused with sequence_axis.
      attention_fn: default `memeff.nn.attention_fn`; use `functools.partial` of it to fix
        chunk_size and other keywords.

    Example:
      >>> import jax.numpy as jnp
      >>> options = dict(decode=False, rngs=nnx.Rngs(0))
      >>> layer = MultiHeadAttention(4, 8, num_kv_heads=2, local_window_size=(3, 0), **options)
      >>> layer(jnp.ones((2, 7, 8)), is_causal=True).shape
      (2, 7, 8)

      Slopes that learn, and rotary embeddings:

      >>> from memeff import scores, transforms
      >>> def slopes(key):
      ...     return scores.alibi(scores.alibi_slopes(4))
      >>> rotary = transforms.rotary()
      >>> layer = MultiHeadAttention(4, 8, score_init=slopes, qk_transform=rotary, **options)
      >>> def loss(layer):
      ...     return layer(jnp.ones((2, 7, 8)), is_causal=True).sum()
      >>> gradient = nnx.grad(loss)(layer)
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
        sequence_axis: str | tuple[str, str] | None = None,
        sequence_layout: Layout = "contiguous",
        context_parallel: Strategy | None = None,
        batch_axis: str | tuple[str, ...] | None = None,
        head_axis: str | tuple[str, ...] | None = None,
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
        options = SequenceOptions(
            sequence_axis, sequence_layout, context_parallel, batch_axis, head_axis
        )
        check_sequence(attention_fn, options, flax.get("decode"))
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
        if isinstance(local_window_size, list):
            self.local_window_size = tuple(local_window_size)
        else:
            self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.score_fn = _with_variables(score_fn, score_init, rngs)
        self.mask_fn = _with_variables(mask_fn)
        self.qk_transform = _with_variables(qk_transform, qk_transform_init, rngs)
        sinks = None
        if sinks_init is not None:
            sinks = nnx.Param(sinks_init(rngs.params(), (num_heads,), self.param_dtype))
        self.sinks = nnx.data(sinks)
        self.sequence_axis = sequence_axis
        self.sequence_layout = sequence_layout
        self.context_parallel = context_parallel
        self.batch_axis = batch_axis
        self.head_axis = head_axis

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
        """Return [*B, T, out_features] from inputs_q [*B, T, F], inputs_k and inputs_v [*B, S, F'].

        The arguments are Flax's.
        """
        decode = self.decode if decode is None else decode
        is_causal = self.is_causal if is_causal is None else is_causal
        check_no_cache(sequence_options(self), decode)
        functions = {
            "score_fn": self.score_fn,
            "mask_fn": without_blocks(self.mask_fn) if decode else self.mask_fn,
            "qk_transform": self.qk_transform,
            "sinks": self.sinks,
        }
        functions = jax.tree.map(_value, functions, is_leaf=lambda x: isinstance(x, nnx.Variable))
        needs_positions = {"local_window_size": self.local_window_size, **functions}
        required: dict[str, Any] = {
            "logits_soft_cap": self.logits_soft_cap,
            **needs_positions,
            **sequence_options(self).keywords(),
        }
        optional: dict[str, Any] = {}
        appends = decode and self.cache_index is not None and self._appends_itself(inputs_q)
        # The one new row has this position; Flax's mask hides the entries that are not written yet.
        if decode and self.cache_index is not None:
            is_required = appends or any(x is not None for x in needs_positions.values())
            keywords = required if is_required else optional
            keywords["q_offset"] = self.cache_index[...]
        attention = bind(self.attention_fn, required, optional)
        if appends:
            attention = functools.partial(self._attend_to_cache, attention)
            decode = False  # for Flax, which appends one token only
            is_causal = False
        module = self
        if attention is not self.attention_fn:
            # A copy that shares variables and submodules, so that `self` keeps its attention_fn.
            module = copy.copy(self)
            vars(module)["attention_fn"] = functools.partial(_attend_for, self, attention)
        return nnx.MultiHeadAttention.__call__(
            module,
            inputs_q,
            inputs_k,
            inputs_v,
            decode=decode,
            is_causal=is_causal and not decode,
            **flax,
        )

    def _appends_itself(self, inputs_q: Array) -> bool:
        """Return whether memeff appends to the cache.

        Flax does it for an `attention_fn` of the user, if it can: one token, at one index.
        """
        assert self.cache_index is not None
        flax_can = inputs_q.shape[-2] == 1 and self.cache_index[...].ndim == 0
        return is_memeff(self.attention_fn) or not flax_can

    def _attend_to_cache(
        self,
        attention: Callable[..., Array],
        query: Array,
        key: Array,
        value: Array,
        **keywords: Any,
    ) -> Array:
        """Append key and value to the cache, and attend to all that it holds."""
        index, keys, values = self.cache_index, self.cached_key, self.cached_value
        assert index is not None and keys is not None and values is not None
        start = index[...]
        key, value = cache.append((keys[...], values[...]), query, (key, value), start)
        keys[...] = key
        values[...] = value
        index[...] = start + query.shape[-3]
        keywords["is_causal"] = True  # it hides the entries that are not written yet
        out = attention(query, key.astype(query.dtype), value.astype(query.dtype), **keywords)
        return cache.nan_where_full(out, start, key.shape[-3])


def _attend_for(
    owner: nnx.Module, attention: Callable[..., Array], /, *arrays: Array, **keywords: Any
) -> Array:
    """Call an attention that may sow its weights: into `owner`, not into the copy of it."""
    if keywords.get("module") is not None:
        keywords["module"] = owner
    return attention(*arrays, **keywords)


def _with_variables(function: Any, init: Any = None, rngs: Any = None) -> Any:
    """Return a user function whose arrays, if any, are `nnx.Variable`s without a gradient.

    With `init`, return the Score or Transform that it makes, whose arrays are `nnx.Param`s.
    """
    if init is not None:
        return nnx.data(jax.tree.map(nnx.Param, init(rngs.params())))
    if isinstance(function, Score | Mask | BlockMask | Transform):
        return nnx.data(jax.tree.map(nnx.Variable, function))
    return function


def _value(x: Any) -> Any:
    """Return the array of a variable, or else x itself."""
    return x[...] if isinstance(x, nnx.Variable) else x
