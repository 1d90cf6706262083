"""Multiply float32 numbers on Hopper as sums of two bfloat16 numbers, their parts.

  x = x1 + x2: x1 is x, rounded (p and ds: cut off); x2 is the rest, rounded; 2^-16 of x is lost
  x y = x1 y1 + x1 y2 + x2 y1; x2 y2 is left out, at most 2^-15 of |x| |y|
Products in TF32 take the place of one float32 product in JAX on a GPU. They lose 2^-11 of each
factor, run at half the speed of bfloat16 and read no transposed tile; these three run at a third of
it. Parts have the range of float32.
A tile [rows, H] has its parts side by side, [rows, 2 H]. Numbers of 16 bits have one part.
"""

import functools
import operator

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from memeff.pallas.hopper.mosaic import WGMMA, Ref, multiply, plgpu

# The parts of x and of y in each product, by the number of parts. The largest comes last.
PAIRS = {1: ((0, 0),), 2: ((1, 0), (0, 1), (0, 0))}


def count_parts(dtype: DTypeLike) -> int:
    """Return how many parts a number has in the kernels."""
    return 2 if dtype == jnp.float32 else 1


def products(parts: int) -> int:
    """Return how many products `multiply_parts` starts."""
    return len(PAIRS[parts])


def split_array(x: Array) -> Array:
    """Return x [..., H] as the kernels read it: [..., 2 H] in bfloat16 if x is in float32."""
    if count_parts(x.dtype) == 1:
        return x
    largest = float(jnp.finfo(jnp.bfloat16).max)  # rounding up from here would be infinite
    # XLA may leave out a conversion to bfloat16 and back, but not this.
    rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    rounded = jnp.where(jnp.isfinite(x), jnp.clip(rounded, -largest, largest), x)
    rest = jnp.where(jnp.isfinite(x), x - rounded, 0.0)
    return jnp.concatenate([rounded, rest], axis=-1).astype(jnp.bfloat16)


def merge_array(x: Array, dtype: DTypeLike) -> Array:
    """Return the array that a kernel has stored as x, in `dtype`."""
    if count_parts(dtype) == 1:
        return x
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    return first + second


def parts_of(tile: Ref, parts: int) -> tuple[Ref, ...]:
    """Return the parts of a tile [rows, parts H] in shared memory."""
    if parts == 1:
        return (tile,)
    width = tile.shape[-1] // parts
    return tuple(tile.at[:, pl.ds(n * width, width)] for n in range(parts))


def first_columns(tile: Ref, count: int) -> Ref:
    """Return the first columns of a tile [rows, cols]."""
    return tile if tile.shape[-1] == count else tile.at[:, pl.ds(0, count)]


def transposed(parts: tuple[Ref, ...]) -> tuple[Ref, ...]:
    """Return each part transposed."""
    return tuple(part.T for part in parts)


def factors_of(tile: Ref, parts: int) -> tuple[Ref, ...]:
    """Return the first factor of each product of a tile in shared memory."""
    of_tile = parts_of(tile, parts)
    return tuple(of_tile[n] for n, _ in PAIRS[parts])


def split_tile(x: Array, dtype: DTypeLike, parts: int) -> tuple[Array, ...]:
    """Return the first factor of each product of a tile in registers.

    If x is not finite, neither is the sum of products.
    """
    if parts == 1:
        return (x.astype(dtype),)
    bits = lax.bitcast_convert_type(x, jnp.int32)
    cut = lax.bitcast_convert_type(bits & ~0xFFFF, jnp.float32)
    first = cut.astype(dtype)
    rest = (x - cut).astype(dtype)
    # Two products that read the same registers run one after the other. So this is a copy.
    return lax.optimization_barrier((rest, lax.optimization_barrier(first), first))


def rounding_rest(x: Array, dtype: DTypeLike) -> Array:
    """Return what rounding to `dtype` takes from x, in `dtype`; 0 where it gives no number."""
    rounded = x.astype(dtype).astype(x.dtype)
    return jnp.where(jnp.abs(rounded) < jnp.inf, x - rounded, 0.0).astype(dtype)


def multiply_parts(total, factors, ys, stage=None) -> None:
    """Start total += x y, from the first factors of its products and the parts of y.

    `multiply` says where they are. The products end in order.
    """
    for x, (_, n) in zip(factors, PAIRS[len(ys)], strict=True):
        multiply(total, x, ys[n], stage)


def load_tile(tile: Ref, parts: int) -> Array:
    """Return a tile [rows, parts H] in shared memory as numbers [rows, H] in float32."""
    loads = [plgpu.load(part, layout=WGMMA).astype(jnp.float32) for part in parts_of(tile, parts)]
    return functools.reduce(operator.add, loads)


def store_tile(tile: Ref, x: Array, parts: int) -> None:
    """Store x [rows, H] to a tile [rows, parts H] in shared memory."""
    first, *rest = parts_of(tile, parts)
    first[...] = x.astype(tile.dtype)
    for part in rest:
        part[...] = rounding_rest(x, tile.dtype)
