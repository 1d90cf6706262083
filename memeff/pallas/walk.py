"""Which tiles a block visits, and in which order: the masked ones first. The same for queries over keys and for keys over queries."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from memeff.problem import Problem, tile_range


class Visits(NamedTuple):
    """Of `size` positions each; tiles of which some pair is hidden come first."""

    low: Array  # the first tile
    high: Array  # behind the last
    left: Array  # so many masked ones begin the range,
    right: Array  # and so many end it
    covers: Array  # does each row that sees something see some of the last masked ones?

    @property
    def count(self) -> Array:
        return self.high - self.low

    @property
    def masked(self) -> Array:
        return self.left + self.right

    def tile(self, n: Array) -> Array:
        """The n-th that is visited: from the right what is masked there, then from the left, then from the right all others."""
        whole = self.high - 1 - (n - self.left)
        return jnp.where(n < self.right, self.high - 1 - n, jnp.where(n < self.masked, self.low + n - self.right, whole))


def keys_seen(problem: Problem, offset, first, last, ends, size: int, elementwise: bool) -> Visits:
    """Tiles of keys that queries `first` to `last` see; `ends`: how many queries and keys there are."""
    some_from, some_to, all_from, all_to = tile_range(problem, offset, first, last)
    return _visits((some_from, some_to, all_from, all_to), first, last, ends, size, elementwise)


def queries_seeing(problem: Problem, offset, first, last, ends, size: int, elementwise: bool) -> Visits:
    """Tiles of queries that see keys `first` to `last`: the window mirrored."""
    mirrored = dataclasses.replace(problem, left=problem.right, right=problem.left)
    q_end, kv_end = ends
    return _visits(tile_range(mirrored, -offset, first, last), first, last, (kv_end, q_end), size, elementwise)


def _visits(window, first, last, ends, size: int, elementwise: bool) -> Visits:
    some_from, some_to, all_from, all_to = window
    own_end, end = (jnp.asarray(x, jnp.int32) for x in ends)
    clip = lambda x, default: default if x is None else jnp.clip(x, 0, end)
    zero = jnp.int32(0)
    tiles = lambda x: lax.div(x + (size - 1), jnp.int32(size))
    low, high = lax.div(clip(some_from, zero), jnp.int32(size)), tiles(clip(some_to, end))
    high = jnp.where(first < own_end, jnp.maximum(low, high), low)
    whole_low = jnp.clip(tiles(clip(all_from, zero)), low, high)
    until = clip(all_to, end)
    whole_high = jnp.clip(lax.div(until, jnp.int32(size)), whole_low, high)
    nothing_whole = (last >= own_end) | elementwise
    whole_low, whole_high = (jnp.where(nothing_whole, low, x) for x in (whole_low, whole_high))
    return Visits(low, high, whole_low - low, high - whole_high, until > whole_high * size)
