"""Pad lengths that `jax.export` leaves symbolic by one tile, so that a whole tile always fits; lengths hide the padding."""

import jax.numpy as jnp
from jax import Array

from memeff.problem import Operands, Problem


def has_symbolic_lengths(operands: Operands) -> bool:
    return not (isinstance(operands.query.shape[1], int) and isinstance(operands.key.shape[1], int))


def pad_lengths(problem: Problem, operands: Operands) -> Operands:
    B, T, S = *operands.query.shape[:2], operands.key.shape[1]
    t, c = problem.chunk_size

    def lengths(given, n):
        return (
            jnp.broadcast_to(jnp.asarray(n, jnp.int32), (B,))
            if given is None
            else jnp.minimum(given, n)
        )

    def both(x):
        return None if x is None else pad_axis(pad_axis(x, -2, t), -1, c)

    return operands._replace(
        query=pad_axis(operands.query, 1, t),
        key=pad_axis(operands.key, 1, c),
        value=pad_axis(operands.value, 1, c),
        terms=operands.terms._replace(bias=both(operands.terms.bias)),
        mask=both(operands.mask),
        q_lengths=lengths(operands.q_lengths, T),
        kv_lengths=lengths(operands.kv_lengths, S),
        q_segments=pad_axis(operands.q_segments, 1, t),
        kv_segments=pad_axis(operands.kv_segments, 1, c),
    )


def pad_axis(x: Array | None, axis: int, size: int) -> Array | None:
    if x is None or isinstance(x.shape[axis], int):
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (0, size)
    return jnp.pad(x, width)
