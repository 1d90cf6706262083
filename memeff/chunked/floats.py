"""Round, and split floats into mantissa and exponent."""

import jax
import jax.numpy as jnp
from jax import Array, lax


def round_to(x: Array, dtype) -> Array:
    """To `dtype`, for good: XLA may take back a mere astype where what follows is wider (xla_allow_excess_precision)."""
    return lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant).astype(dtype)


def split_exponent(x: Array) -> tuple[Array, Array]:
    """f in [1, 2), NaN or Inf, and a power of two; x = f * power, float32. (XLA gathers frexp on an Explicit mesh.)"""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    f, power = (
        lax.bitcast_convert_type(b, x.dtype)
        for b in (bits & 0x7FFFFF | 0x3F800000, bits & 0x7F800000)
    )
    return jnp.where(jnp.isfinite(x), f, x), power


@jax.custom_batching.custom_vmap
def all_true(ok: Array) -> Array:
    return ok.all()


@all_true.def_vmap
def _all_true_in_batch(size, batched, ok):
    del size, batched
    return all_true(ok), False  # one answer for the whole batch: the cond stays a cond


def power_of_two(x: Array) -> Array:
    """The largest at most x > 0; 1 where that is not finite."""
    return jnp.where(jnp.isfinite(x), jnp.clip(split_exponent(x)[1], 2.0**-100, 2.0**100), 1)
