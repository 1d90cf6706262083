"""Map the slots of a ring buffer to the positions of the tokens that they hold."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from memeff.user_functions import Mask, Score


def position_in_slot(slot: Any, length: Any, capacity: int) -> Any:
    """Return the position of the newest of `length` tokens in `slot`; negative if it holds none."""
    newest = length - 1
    return newest - (newest - slot) % capacity


def lengths_of_whole(lengths: Array, axes: tuple[str, ...], devices: int) -> Array:
    """Return an array by batch index that has a device's `lengths` [B] at its own indices.

    `axes` are those of shard_map over whose `devices` the batch is sharded; () is none.
    """
    if not axes:
        return lengths
    B = lengths.shape[0]
    whole = jnp.zeros(devices * B, lengths.dtype)
    return lax.dynamic_update_slice_in_dim(whole, lengths, lax.axis_index(axes) * B, axis=0)


def ring_mask(lengths: Array, capacity: int, left: int, rest: Mask | None) -> Mask:
    """Show a query the `left` tokens before it and itself, in a ring of `capacity` slots.

    `rest` is a mask by positions that also holds.
    """
    mask = Mask(_RingWindow(capacity, left), lengths)
    return mask if rest is None else mask & Mask(_OnRing(rest.fn, capacity), (rest.params, lengths))


def ring_score(score: Score, lengths: Array, capacity: int) -> Score:
    """Return a score by slots from one by positions."""
    return Score(_OnRing(score.fn, capacity), (score.params, lengths))


@dataclasses.dataclass(frozen=True)
class _RingWindow:
    capacity: int
    left: int

    def __call__(self, batch, head, q_pos, k_pos, lengths):
        position = position_in_slot(k_pos, lengths[batch], self.capacity)
        return (position >= 0) & (q_pos - self.left <= position) & (position <= q_pos)


@dataclasses.dataclass(frozen=True)
class _OnRing:
    """A score_fn or mask_fn that receives the position of a token instead of its slot."""

    fn: Callable[..., Any]
    capacity: int

    def __call__(self, *arguments):
        *before, batch, head, q_pos, k_pos, (params, lengths) = arguments
        position = position_in_slot(k_pos, lengths[batch], self.capacity)
        return self.fn(*before, batch, head, q_pos, position, params)
