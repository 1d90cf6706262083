"""Choose the tiles of the TPU kernels, and list those in which a pair may be visible.

The lists follow from the window alone. They are computed where the kernels run, from the numbers of
the blocks: arrays of NumPy would be constants, which JAX's custom_partitioning refuses.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from memeff.masking import key_range
from memeff.problem import Problem
from memeff.shape import ceil_div, round_up

# No TPU was here to time them. JAX's users take 512 x 512; 128 is the width of a vector register.
SIDES = (512, 256, 128)
MOST_PADDING = 8  # a side is taken that pads less than one of so many tokens, or else the smallest


class Table(NamedTuple):
    """The blocks that a kernel visits for each of its own blocks, [own blocks, steps].

    Entries that are not visible name a block that is copied without being read.
    """

    blocks: Array  # numbers of the blocks
    is_visible: Array  # int8, 1 or 0


class Visits(NamedTuple):
    """The visits of the kernels whose own blocks are of queries; `mirrored`, those of keys."""

    problem: Problem  # only its window is read
    lengths: tuple[int, int]  # tokens of the own and of the visited sequence
    tile: tuple[int, int]  # sides of a tile, in the same order

    def mirrored(self) -> "Visits":
        """Return the visits from the other sequence: what a key is to a query, that is to it."""
        problem = self.problem
        window = dataclasses.replace(
            problem, left=problem.right, right=problem.left, q_offset=-problem.q_offset
        )
        T, S = self.lengths
        t, c = self.tile
        return Visits(window, (S, T), (c, t))

    def ranges(self, xp: Any = np) -> tuple[Any, Any]:
        """Return the first visible block for each own block, and their count.

        `xp` is NumPy, or jax.numpy in a trace.
        """
        T, S = self.lengths
        t, c = self.tile
        first = xp.arange(0, T, t)
        last = xp.minimum(first + t, T) - 1
        start, end, _, _ = key_range(self.problem, self.problem.q_offset, first, last)
        start = xp.zeros_like(first) if start is None else start
        start = xp.clip(start, 0, S)
        end = xp.full_like(first, S) if end is None else end
        end = xp.clip(end, start, S)
        block = xp.minimum(start // c, (S - 1) // c)
        return block, xp.where(end > start, ceil_div(end, c) - block, 0)

    def steps(self) -> int | None:
        """Return the most blocks that an own block visits; None if each visits all."""
        _, count = self.ranges()
        blocks = ceil_div(self.lengths[1], self.tile[1])
        return None if count.min() == blocks else max(1, int(count.max()))

    def table(self, prefetch: bool) -> Table | None:
        """Return the blocks to visit; None if each own block visits all.

        Steps behind the last visible block name that block. With `prefetch` they name the first
        one of the next own block, whose copy then runs beside a computation.
        """
        steps = self.steps()
        if steps is None:
            return None
        first, count = self.ranges(jnp)
        step = jnp.arange(steps)
        is_visible = step < count[:, None]
        beyond = first + jnp.maximum(count, 1) - 1
        if prefetch:
            beyond = jnp.append(first[1:], first[-1])
        blocks = jnp.where(is_visible, first[:, None] + step, beyond[:, None])
        most = self.lengths[1] // self.tile[1]
        # They lie in scalar memory, of which there is little.
        dtype = next(x for x in (jnp.int8, jnp.int16, jnp.int32) if most <= jnp.iinfo(x).max)
        return Table(blocks.astype(dtype), is_visible.astype(jnp.int8))


def choose_side(length: int) -> int:
    """Return the side of a tile along a sequence of `length` tokens."""
    least = round_up(length, SIDES[-1])
    for side in SIDES:
        if MOST_PADDING * (round_up(length, side) - least) <= length:
            return side
    return SIDES[-1]


def tile_shape(T: int, S: int) -> tuple[int, int]:
    """Return the rows and columns of a tile."""
    return choose_side(T), choose_side(S)
