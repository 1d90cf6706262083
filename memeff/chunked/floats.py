"""Round floats, split them into mantissa and exponent, and reduce flags to one answer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def round_to(x: Array, dtype) -> Array:
    """Round x to `dtype` so that XLA keeps the rounding.

    XLA may undo a mere astype if wider arithmetic follows (xla_allow_excess_precision).
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)


def split_exponent(x: Array) -> tuple[Array, Array]:
    """Split x (float32) into f in [1, 2) and a power of two, x = f * power; NaN and Inf stay in f.

    It works on bits, because XLA gathers the operand of frexp on a mesh with Explicit axes.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    mantissa_bits = bits & 0x7FFFFF | 0x3F800000  # with the exponent of 1
    exponent_bits = bits & 0x7F800000
    f = lax.bitcast_convert_type(mantissa_bits, x.dtype)
    power = lax.bitcast_convert_type(exponent_bits, x.dtype)
    return jnp.where(jnp.isfinite(x), f, x), power


@jax.custom_batching.custom_vmap
def all_true(ok: Array) -> Array:
    """Return whether all of `ok` is True, under vmap as one answer for the whole batch."""
    return ok.all()


@all_true.def_vmap
def _all_true_in_batch(size, batched, ok):
    """Reduce over the batch too, because a cond on the answer then stays a cond."""
    del size, batched
    return all_true(ok), False


def apply_unless(done: Array, f: Callable[[Any], Any], x: Any) -> Any:
    """Return f(x), or x if `done`, a scalar, is True.

    This loop runs once or never. It writes over x, where a cond would hold x and the result.
    """

    def run(state):
        done, x = state
        return done | True, f(x)

    _, x = lax.while_loop(lambda state: ~state[0], run, (done, x))
    return x


def power_of_two(x: Array) -> Array:
    """Return the largest power of two up to x > 0, from 2^-100 to 2^100; 1 if x is not finite."""
    finite = jnp.isfinite(x)
    _, power = split_exponent(x)
    return jnp.where(finite, jnp.clip(power, 2.0**-100, 2.0**100), 1)


def lift_float16(x: Array, dtype, axes: tuple[int, ...]) -> tuple[Array, Array | None]:
    """Return x in `dtype`, and the factor that float16 is multiplied by; None for other dtypes.

    The factor is a power of two that brings the largest entry along `axes` near 2^14, because
    float16 holds nothing below 2^-24. It keeps these axes, of size 1. Divide products with x by it.
    """
    if dtype != jnp.float16:
        return x.astype(dtype), None
    size = jnp.where(jnp.isfinite(x), abs(x), 0)
    lift = power_of_two(2.0**14 / size.max(axes, keepdims=True))
    return (x * lift).astype(dtype), lift
