"""Attention for Flax, Linen and NNX: modules with memeff inside, and switches for existing models.

`memeff.nn.linen` has `MultiHeadDotProductAttention` and `MultiHeadAttention`, and `memeff.nn.nnx`
has `MultiHeadAttention`. They are subclasses of Flax's modules under the same names, with Flax's
parameters, initial values, checkpoints and decode cache. They add:

* `is_causal`, `num_kv_heads` (NNX has it already), `local_window_size` and `logits_soft_cap`.
* `score_fn`, `mask_fn` and `qk_transform`: functions of the user, whose params do not learn.
* `score_init`, `qk_transform_init` and `sinks_init`: their arrays are parameters of the module.
* `sequence_axis`, `sequence_layout` and `context_parallel`, for a sequence that is sharded over
  devices. The switches below take them too.

One line switches a model that exists already:

  `with switch_linen():`    Linen's attention modules called inside compute with memeff
  `switch_nnx(model)`       NNX's attention modules in `model` compute with memeff from now on
  `with switch_jax_nn():`   calls of `jax.nn.dot_product_attention` inside compute with memeff, also
                            those of NNX without dropout; it is `memeff.switch_jax_nn`, which needs
                            no Flax

Flax's own modules also take `attention_fn=memeff.nn.attention_fn`, which is
`memeff.dot_product_attention` with Flax's hooks.

`blockwise(f, x, chunk_size)` applies a feed-forward network, or any module or function that treats
each token by itself, to one chunk of tokens after the other. The hidden activations of only one
chunk then exist at a time, also in the gradient.

Differences from Flax: a query that sees no key gives 0, where Flax gives the mean of the values.
`sow_weights=True` is refused, because memeff never stores the weights. The softmax is always in
float32 or better.
"""

try:
    import flax as _  # noqa: F401
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        "memeff.nn needs Flax, which is not installed: pip install 'memeff[flax]'."
    ) from e

from memeff.nn import linen, nnx
from memeff.nn.attention_fn import attention_fn
from memeff.nn.blockwise import blockwise
from memeff.nn.switch import switch_linen, switch_nnx
from memeff.switch import switch_jax_nn

__all__ = [
    "attention_fn",
    "blockwise",
    "linen",
    "nnx",
    "switch_jax_nn",
    "switch_linen",
    "switch_nnx",
]
