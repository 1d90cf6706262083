"""Pad lengths that `jax.export` leaves symbolic by one tile, so that a whole tile always fits.

`q_lengths` and `kv_lengths` hide the padding.
"""

import jax.numpy as jnp
from jax import Array

from memeff.problem import Operands


def has_symbolic_lengths(operands: Operands) -> bool:
    """Return True if `jax.export` leaves T or S symbolic."""
    return not (isinstance(operands.query.shape[1], int) and isinstance(operands.key.shape[1], int))


def pad_lengths(chunk_size: tuple[int, int], operands: Operands) -> Operands:
    """Pad symbolic lengths by one tile, and bound the lengths of all batch entries by T and S."""
    B, T = operands.query.shape[:2]
    S = operands.key.shape[1]
    t, c = chunk_size

    def bound(lengths: Array | None, total) -> Array:
        if lengths is None:
            return jnp.broadcast_to(jnp.asarray(total, jnp.int32), (B,))
        return jnp.minimum(lengths, total)

    def pad_pairs(x: Array | None) -> Array | None:
        if x is None:
            return None
        return pad_axis(pad_axis(x, -2, t), -1, c)  # B|1 K|1 G|1 T+t|1 S+c|1

    return operands._replace(
        query=pad_axis(operands.query, 1, t),
        key=pad_axis(operands.key, 1, c),
        value=pad_axis(operands.value, 1, c),
        logit_params=operands.logit_params._replace(bias=pad_pairs(operands.logit_params.bias)),
        mask=pad_pairs(operands.mask),
        q_lengths=bound(operands.q_lengths, T),
        kv_lengths=bound(operands.kv_lengths, S),
        q_segments=pad_axis(operands.q_segments, 1, t),
        kv_segments=pad_axis(operands.kv_segments, 1, c),
    )


def pad_axis(x: Array | None, axis: int, size: int) -> Array | None:
    """Pad `axis` of `x` by `size` zeros at its end if its length is symbolic."""
    if x is None or isinstance(x.shape[axis], int):
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (0, size)
    return jnp.pad(x, width)
