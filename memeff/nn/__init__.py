"""Attention for Flax, Linen and NNX: modules with memeff inside, and switches for models that exist already.

`memeff.nn.linen` has `MultiHeadDotProductAttention` and `MultiHeadAttention`, `memeff.nn.nnx` has `MultiHeadAttention`:
subclasses of Flax's own under the same names. Parameters, their initial values, checkpoints and the decode cache are Flax's.
New are `is_causal`, `num_kv_heads` (NNX has it already), `local_window_size` and `logits_soft_cap`; and scores, masks and
transforms of your own, with sinks: `score_fn`, `mask_fn` and `qk_transform` as they are, `score_init`, `qk_transform_init`
and `sinks_init` for those whose arrays are to be parameters of the module and learn.

A model that exists already is switched in two lines:

  `with switch_linen():`    Linen's attention modules called inside compute with memeff
  `switch_nnx(model)`       NNX's attention modules in `model` compute with memeff from now on
  `with switch_jax_nn():`   whatever calls `jax.nn.dot_product_attention` inside (also NNX, where nothing is dropped);
                            it is `memeff.switch_jax_nn`, which needs no Flax

Or hand `memeff.nn.attention_fn` to Flax's modules as `attention_fn=`: `memeff.dot_product_attention` with Flax's hooks.

What differs from Flax: a query that sees no key gives 0, where Flax gives the mean of the values; `sow_weights=True` is
refused, since the weights are what memeff never stores; the softmax is always in float32 or better.
"""

try:
    import flax as _  # noqa: F401
except ModuleNotFoundError as e:
    raise ModuleNotFoundError(
        "memeff.nn needs Flax, which is not installed: pip install 'memeff[flax]'."
    ) from e

from memeff.nn import linen, nnx
from memeff.nn.attention_fn import attention_fn
from memeff.nn.switch import switch_linen, switch_nnx
from memeff.switch import switch_jax_nn

__all__ = ["attention_fn", "linen", "nnx", "switch_jax_nn", "switch_linen", "switch_nnx"]
