"""Exchange heads for tokens: each device computes some heads of the whole sequence.

An all-to-all before attention gives every device all tokens of N / P heads, and one after it gives
the tokens back (Jacobs et al. 2023, arXiv:2309.14509). JAX differentiates both.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.problem import Operands, accumulator_dtype, map_operands
from memeff.sequence.layout import layout_order, natural_order
from memeff.sequence.parts import Shards

Attend = Callable[[Operands], tuple[Array, Array | None]]  # to out [B, K, G, T, D] and lse


def why_not_exchange(devices: int, N: int, K: int) -> str | None:
    """Return None if heads can be exchanged for tokens, or else the reason in words."""
    if N % devices:
        return f"{devices} devices do not divide N={N} query heads"
    if K and (N // K) % _copies(devices, K):
        return f"{devices} devices can share neither K={K} key heads nor copies of them"
    return None


def _copies(devices: int, K: int) -> int:
    """Return how many copies of each key head are needed so that the devices can share them."""
    return math.lcm(devices, K) // K


def exchange(shards: Shards, attend: Attend, operands: Operands) -> tuple[Array, Array | None]:
    """Return `attend` of the operands of one device, computed for its heads of the whole sequence.

    `shards.layout` is the order of all tokens over the devices.
    """
    axis = shards.axis
    P = shards.devices
    shape = operands.shape
    copies = _copies(P, shape.K)

    def swap(x: Array, heads: int, tokens: int) -> Array:
        return lax.all_to_all(x, axis, split_axis=heads, concat_axis=tokens, tiled=True)

    def own_heads(x: Array, dim: int) -> Array:
        size = x.shape[dim] // P
        return lax.dynamic_slice_in_dim(x, shards.rank * size, size, dim)

    def all_tokens(x: Array, dim: int) -> Array:
        return lax.all_gather(x, axis, axis=dim, tiled=True)

    def in_order(x: Array, dim: int) -> Array:
        return natural_order(x, shards.layout, P, dim)

    def repeat_heads(x: Array) -> Array:
        if copies == 1:
            return x
        wide = x.astype(accumulator_dtype(operands))  # JAX sums gradients of copies in this dtype
        return jnp.repeat(wide, copies, axis=2).astype(x.dtype)

    def convert(x: Array, dims: str) -> Array:
        match dims:
            case "btnh":
                return in_order(swap(x, 2, 1), 1)
            case "bskh" | "bskd":
                return in_order(swap(repeat_heads(x), 2, 1), 1)
            case "bt" | "bs":
                return in_order(all_tokens(x, 1), 1)
            case "n":
                return own_heads(x, 0)
            case "bnts":
                return pairs(x)
        return x

    def pairs(x: Array) -> Array:
        _, N, T, S = x.shape
        if N > 1 and T > 1:
            x = swap(x, 1, 2)
        elif N > 1:
            x = own_heads(x, 1)
        elif T > 1:
            x = all_tokens(x, 2)
        x = in_order(x, 2) if T > 1 else x
        return in_order(x, 3) if S > 1 else x

    exchanged = map_operands(convert, operands)
    if operands.origin is not None:
        first = operands.origin.first_head + shards.rank * (shape.N // P)
        exchanged = exchanged._replace(origin=operands.origin._replace(first_head=first))
    out, lse = attend(exchanged)

    def back(x: Array) -> Array:
        """Return x [B, K/P, G, T, ...] of some heads and all tokens as [B, K, G, T/P, ...]."""
        x = lax.collapse(x, 1, 3)  # b n/P t
        x = swap(layout_order(x, shards.layout, P, 2), 2, 1)
        return x.reshape(x.shape[0], shape.K, shape.G, *x.shape[2:])

    return jax.tree.map(back, (out, lse))
