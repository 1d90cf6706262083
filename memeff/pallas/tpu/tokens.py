"""Reduce lengths, masks of tokens and segments to what the TPU kernels read: segment ids."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from memeff.problem import Operands


class Tokens(NamedTuple):
    """Arrays that hide queries, keys, or pairs of different segments; None hides nothing."""

    q_segments: Array | None = None  # B T, int32
    kv_segments: Array | None = None  # B S, int32
    hidden_rows: Array | None = None  # B T, boolean
    hidden_keys: Array | None = None  # B S, boolean

    @property
    def dims(self) -> tuple[str, ...]:
        """Return the letters of the dims of the arrays that are not None."""
        letters = ("bt", "bs", "bt", "bs")
        return tuple(dims for dims, x in zip(letters, self, strict=True) if x is not None)


def tokens_of(operands: Operands) -> Tokens:
    """Return what hides tokens of a call; the mask, if any, is of queries or of keys."""
    B, T, S = operands.shape.B, operands.shape.T, operands.shape.S
    hidden_rows = _behind(operands.q_lengths, B, T)
    hidden_keys = _behind(operands.kv_lengths, B, S)
    if operands.mask is not None:
        mask = operands.mask[:, 0]  # B|1 T|1 S|1
        if mask.shape[2] == 1:
            hidden_rows = _either(hidden_rows, jnp.broadcast_to(~mask[:, :, 0], (B, T)))
        else:
            hidden_keys = _either(hidden_keys, jnp.broadcast_to(~mask[:, 0], (B, S)))
    q_segments, kv_segments = operands.q_segments, operands.kv_segments
    if hidden_keys is not None:
        if q_segments is None or kv_segments is None:
            q_segments = jnp.zeros((B, T), jnp.int32)
            kv_segments = hidden_keys.astype(jnp.int32)
        else:
            kv_segments = jnp.where(hidden_keys, _unused_ids(q_segments)[:, None], kv_segments)
    return Tokens(q_segments, kv_segments, hidden_rows, hidden_keys)


def _behind(lengths: Array | None, B: int, size: int) -> Array | None:
    """Return True, [B, size], for the tokens behind `lengths` [B]; None without lengths."""
    if lengths is None:
        return None
    return jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32) >= lengths[:, None], (B, size))


def _either(x: Array | None, y: Array) -> Array:
    """Return where `x`, which may be None, or `y` is True."""
    return y if x is None else x | y


def _unused_ids(ids: Array) -> Array:
    """Return an id for each batch entry, [B], that is not among its ids [B, T].

    One of 0 to T is not.
    """
    B, T = ids.shape
    beyond = T + 1  # ids that are none of 0 to T
    index = jnp.where((ids < 0) | (ids > T), beyond, ids)
    batch = jnp.arange(B)[:, None]
    is_used = jnp.zeros((B, T + 2), bool).at[batch, index].set(True)
    return is_used[:, : T + 1].argmin(1).astype(ids.dtype)
