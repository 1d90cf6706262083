"""Compute Flax's dropout mask from coordinates, one tile at a time."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.problem import Operands, Problem


def head_numbers(like: Array, K: int, first=(0, 0)) -> Array:
    """b N + n of each query head, laid out as `like` [B, K, G] is, which begins with batch entry and key head `first`."""
    zero = jnp.zeros_like(like, jnp.uint32)
    b, k, g = (lax.broadcasted_iota(jnp.uint32, like.shape, dim) for dim in range(3))
    b, k = (x + jnp.uint32(x0) for x, x0 in zip((b, k), first, strict=True))
    return zero + ((b * K + k) * like.shape[2] + g)


def dropout_keep_mask(
    problem: Problem,
    operands: Operands,
    head: Array,
    lengths: tuple[int, int],
    rows: Array,
    cols: Array,
) -> Array:
    """The keep-mask of a tile, 1|B 1|K 1|G t c, a function of coordinates alone: the same for any chunking.

    It is `jax.random.bernoulli(key, 1 - rate, [B, N, T, S])` (or [T, S], shared) with threefry's partitionable counters,
    which are flat indices: what Flax draws for the same key. `head` are the tile's `number_heads`, `lengths` T and S.
    """
    assert problem.dropout is not None and operands.dropout_key is not None
    T, S = lengths
    if problem.dropout.shared:
        head = jnp.zeros((1, 1, 1), jnp.uint32)
    high, low = _multiply_add(head[..., None], T, rows.astype(jnp.uint32))
    high, low = high[..., None] * jnp.uint32(S), low[..., None]
    carry, low = _multiply_add(low, S, cols.astype(jnp.uint32))
    return _uniform_below(operands.dropout_key, high + carry, low, 1.0 - problem.dropout.rate)


def _multiply_add(x: Array, size: int, y: Array) -> tuple[Array, Array]:
    """x * size + y as 64 bits in two uint32 (x64 may be off), from 16-bit halves; `size` < 2^32."""
    x, y = jnp.broadcast_arrays(x, y)
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    s1, s0 = jnp.uint32(size >> 16), jnp.uint32(size & 0xFFFF)
    x1, x0 = x >> half, x & mask
    middle = x1 * s0 + ((x0 * s0) >> half)  # at most 2^32 - 1
    middle0 = (middle & mask) + x0 * s1
    high = x1 * s1 + (middle >> half) + (middle0 >> half)
    low = x * jnp.uint32(size)
    total = low + y
    return high + (total < low).astype(jnp.uint32), total


def _uniform_below(key: Array, high: Array, low: Array, p: float) -> Array:
    """bernoulli(p) at the 64-bit counters (high, low), bit for bit as `jax.random.bernoulli` at those flat indices."""
    from jax.extend.random import threefry2x32_p

    high, low = jnp.broadcast_arrays(high, low)
    # sharded as `high` is, or XLA gathers `high`
    k = key[0] + jnp.zeros_like(high), key[1] + jnp.zeros_like(high)
    bits1, bits2 = threefry2x32_p.bind(*k, high, low)
    if jax.dtypes.canonicalize_dtype(float) == jnp.float64:  # bernoulli then draws float64
        bits = (bits1.astype(jnp.uint64) << jnp.uint64(32)) | bits2.astype(jnp.uint64)
        unit = (
            lax.bitcast_convert_type(
                (bits >> jnp.uint64(12)) | jnp.uint64(0x3FF << 52), jnp.float64
            )
            - 1.0
        )
    else:
        bits = bits1 ^ bits2
        unit = lax.bitcast_convert_type(
            (bits >> jnp.uint32(9)) | jnp.uint32(0x3F800000), jnp.float32
        ) - jnp.float32(1)
    return unit < jnp.asarray(p, unit.dtype)
