"""Pad lengths that `jax.export` leaves symbolic by one tile, so that a whole tile always fits.

`q_lengths` and `kv_lengths` hide the padding.
"""

import jax.numpy as jnp
from jax import Array

from memeff.problem import Operands, map_operands


def pad_lengths(chunk_size: tuple[int, int], operands: Operands) -> Operands:
    """Pad symbolic lengths by one tile, and bound the lengths of all batch entries by T and S."""
    B, T = operands.query.shape[:2]
    S = operands.key.shape[1]
    t, c = chunk_size

    def bound(lengths: Array | None, total) -> Array:
        if lengths is None:
            return jnp.broadcast_to(jnp.asarray(total, jnp.int32), (B,))
        return jnp.minimum(lengths, total)

    def pad(x: Array, dims: str) -> Array:
        for letter, size in (("t", t), ("s", c)):
            if letter in dims:
                x = pad_axis(x, dims.index(letter), size)
        return x

    return map_operands(pad, operands)._replace(
        q_lengths=bound(operands.q_lengths, T), kv_lengths=bound(operands.kv_lengths, S)
    )


def pad_axis(x: Array, axis: int, size: int) -> Array:
    """Pad `axis` of `x` by `size` zeros at its end if its length is symbolic."""
    if isinstance(x.shape[axis], int):
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (0, size)
    return jnp.pad(x, width)
