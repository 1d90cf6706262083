"""Give memeff's attention the hooks and the habits that Flax's attention modules expect."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import promote_dtype
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from memeff import inputs
from memeff.arguments import AttentionOptions
from memeff.attention import dot_product_attention


def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    **options: Unpack[AttentionOptions],
) -> Array:
    """Compute exact attention in linear memory for an attention module of Flax, Linen or NNX.

    It adds to `memeff.dot_product_attention` what Flax's `dot_product_attention` has: hooks,
    promotion of dtypes, and masks that are not boolean. Use `functools.partial` of it to fix
    chunk_size and other keywords.

    Args:
      query, key, value, bias: as in `memeff.dot_product_attention`; dtypes that differ are
        promoted.
      mask: broadcastable to [*B, N, T, S]. Nonzero = may attend, as in Flax. An additive mask (0
        and -1e9) would mean the opposite, so values that are negative or not whole numbers are
        refused where they are known. Under jit they are not known, and mean what they mean to Flax.
        Pass additive terms as `bias`.
      dropout_rng, dropout_rate, broadcast_dropout: as in Flax, with Flax's mask for the same key.
      deterministic: if True, drop nothing.
      dtype: cast query, key and value to it first.
      precision: of the products, as `jax.lax.dot_general` takes it.
      module: Flax's request to sow the attention weights. Refused, because they are never stored.
      force_fp32_for_softmax: True and Flax's default, False, are the same here, because the softmax
        is always in float32 (float64 for float64).
      qk_attn_weights_einsum, attn_weights_value_einsum: Flax's hooks for quantised products.
        Refused.
      options: keywords of `memeff.dot_product_attention`, such as dropout_bits="mix32" for dropout
        in kernels, whose mask is not Flax's.

    Returns:
      [*B, T, N, D] in `dtype`, or in the promoted one. A query that sees no key gives 0, where Flax
      gives the mean of the values.

    Raises:
      NotImplementedError: `module` or an einsum hook is given.
      TypeError, ValueError: as in `memeff.dot_product_attention`.

    Example:
      >>> from flax import nnx
      >>> options = dict(attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0))
      >>> nnx.MultiHeadAttention(2, 8, **options)(jnp.ones((1, 7, 8))).shape
      (1, 7, 8)
    """
    del force_fp32_for_softmax
    if dtype is not None:
        checked_dtype = inputs.check_dtype(dtype)
        if not jnp.issubdtype(checked_dtype, jnp.floating):
            raise TypeError(f"dtype must be a floating-point dtype, got {checked_dtype.name}.")
    named = {"query": query, "key": key, "value": value}
    arrays = [inputs.to_array(name, x) for name, x in named.items()]
    for name, x in zip(named, arrays, strict=True):
        _check_operand(name, x, dtype)
    query, key, value = promote_dtype(*arrays, dtype=dtype)
    _refuse_weights(query, key, module)
    for name, hook in (
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if hook is not None:
            raise NotImplementedError(
                f"{name} is not supported, because memeff computes its products tile by tile. Omit "
                "it."
            )
    inputs.check_bool("deterministic", deterministic)
    dropout_rate = inputs.check_number("dropout_rate", dropout_rate, 1)
    return dot_product_attention(
        query,
        key,
        value,
        bias,
        _as_boolean(mask),
        dropout_rng=dropout_rng,
        dropout_rate=0.0 if deterministic else dropout_rate,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        **options,
    )


def is_memeff(function: Callable[..., Array]) -> bool:
    """Return whether an attention_fn is memeff's, perhaps with keywords bound."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function) is attention_fn


def _check_operand(name: str, x: Array, dtype: DTypeLike | None) -> None:
    """Refuse an array that becomes no float, by a cast to `dtype` or else by promotion."""
    if x.dtype == bool:
        return
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    if is_integer and (dtype is not None or jnp.iinfo(x.dtype).bits >= 8):
        return
    if dtype is None:  # JAX promotes no numbers below 8 bits, and no floats of 8 bits
        inputs.check_wide_floats(name, x)
    else:
        inputs.check_floats(name, x)


def _refuse_weights(query: ArrayLike, key: ArrayLike, module: Any) -> None:
    """Raise if Flax's `module` asks for the attention weights, and name their size."""
    if module is None:
        return
    *batch, T, N, _ = jnp.shape(query)
    shape = (*batch, N, T, jnp.shape(key)[-3])
    mib = math.prod(shape) * 4 / 2**20
    raise NotImplementedError(
        f"sow_weights=True asks for the attention weights, {shape} or {mib:.1f} MiB in float32, "
        "and memeff never stores them. Use Flax's own module for this call, at a length where "
        "they fit."
    )


def _as_boolean(mask: ArrayLike | None) -> ArrayLike | None:
    """Convert Flax's mask to a boolean one: nonzero = may attend."""
    if mask is None:
        return None
    inputs.to_array("mask", mask)  # refuses what is none; known values are read below
    array = inputs.unwrapped(mask)
    array = array if hasattr(array, "dtype") else np.asarray(array)
    dtype = jnp.result_type(array)
    if not jnp.issubdtype(dtype, jnp.floating) and not jnp.issubdtype(dtype, jnp.integer):
        return array  # boolean, or of a dtype that dot_product_attention refuses
    if not isinstance(array, Tracer) and _looks_additive(array):
        raise TypeError(
            f"mask is {dtype} with values that are negative or not whole numbers: it looks "
            "additive, but to Flax every nonzero value means may attend. Pass an additive term as "
            "bias=, or a boolean mask (True = may attend)."
        )
    return jnp.asarray(array) != 0


def _looks_additive(mask: ArrayLike) -> bool:
    """Return whether a known mask has values that are negative, NaN or not whole numbers."""
    with jax.ensure_compile_time_eval():
        mask = jnp.asarray(mask)
        wrong = mask < 0
        if jnp.issubdtype(mask.dtype, jnp.floating):
            wrong |= mask != jnp.floor(mask)
        return bool(jnp.any(wrong))
