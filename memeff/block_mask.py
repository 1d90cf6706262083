"""Evaluate a mask once, before a call runs, so that tiles without any visible pair are skipped."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from memeff.inputs import check_size
from memeff.shape import ceil_div
from memeff.user_functions import (
    Mask,
    PairIndices,
    TracedFunction,
    check_pair_function,
    trace_function,
)

PAIRS_AT_A_TIME = 2**24  # evaluated in one jitted step


@dataclasses.dataclass(frozen=True, eq=False)
class VisibleBlocks:
    """Boolean grids [n, m] over blocks of `size` x `size` pairs: partly visible, fully visible."""

    size: int
    lengths: tuple[int, int]  # T, S
    any_visible: np.ndarray  # a pair is visible in some batch entry and head
    all_visible: np.ndarray  # all pairs are visible in all batch entries and heads
    batch: int | None = None  # B of the mask; None where it does not depend on the batch entry
    heads: int | None = None  # N of the mask; None where it does not depend on the head

    @functools.cached_property
    def _key(self):
        return (
            self.size,
            self.lengths,
            self.batch,
            self.heads,
            self.any_visible.tobytes(),
            self.all_visible.tobytes(),
        )

    def __eq__(self, other):
        return isinstance(other, VisibleBlocks) and (self is other or self._key == other._key)

    def __hash__(self):
        return hash(self._key)

    def visible_tiles(self, t: int, c: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which tiles of t x c have a visible block, and which have visible blocks alone."""
        T, S = self.lengths
        row_starts, row_ends = self._block_ranges(T, t)
        col_starts, col_ends = self._block_ranges(S, c)

        def count(blocks):
            """Count the blocks of each tile that are True, by differences of prefix sums."""
            sums = blocks.astype(np.int64).cumsum(0).cumsum(1)
            sums = np.pad(sums, ((1, 0), (1, 0)))
            rows = sums[row_ends] - sums[row_starts]
            return rows[:, col_ends] - rows[:, col_starts]

        total = (row_ends - row_starts)[:, None] * (col_ends - col_starts)
        return count(self.any_visible) > 0, count(self.all_visible) == total

    def _block_ranges(self, length: int, side: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the first block and the end of the blocks of each tile along one dim."""
        starts = np.arange(0, length, side)
        ends = np.minimum(starts + side, length)
        return starts // self.size, ceil_div(ends, self.size)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """A mask and the blocks that it hides: the result of `memeff.block_mask`, passed as `mask_fn`.

    Its `str` is a picture of up to 64 x 64 characters: `#` where all pairs are visible, `+` where
    some are, `.` where none is.
    """

    mask: Mask
    blocks: VisibleBlocks

    @property
    def sparsity(self) -> float:
        """Return the share of blocks that are wholly hidden, from 0 to 1."""
        return 1 - float(self.blocks.any_visible.mean()) if self.blocks.any_visible.size else 0.0

    def __str__(self) -> str:
        blocks = self.blocks
        T, S = blocks.lengths
        visited = int(blocks.any_visible.sum())
        masked = int((blocks.any_visible & ~blocks.all_visible).sum())
        title = (
            f"block mask of {T} x {S} tokens in blocks of {blocks.size}: "
            f"{visited} of {blocks.any_visible.size} visited ({masked} of them with a mask), "
            f"{100 * self.sparsity:.1f} % hidden"
        )
        blocks_of_sign = max(1, ceil_div(max(blocks.any_visible.shape), 64))
        side = blocks_of_sign * blocks.size
        any_visible, all_visible = blocks.visible_tiles(side, side)
        shade = any_visible.astype(int) + all_visible
        signs = np.array([".", "+", "#"])[shade]
        return "\n".join([title, *map("".join, signs)])

    def plot(self, ax: Any = None) -> Any:
        """Draw the blocks on matplotlib axes: dark if all pairs are visible, light if some are."""
        import matplotlib.pyplot as plt

        ax = plt.gca() if ax is None else ax
        T, S = self.blocks.lengths
        shade = self.blocks.any_visible.astype(int) + self.blocks.all_visible
        ax.imshow(shade, cmap="Blues", vmin=0, vmax=2, extent=(0, S, T, 0), interpolation="nearest")
        ax.set(xlabel="key", ylabel="query", title=f"{100 * self.sparsity:.0f} % hidden")
        return ax

    def tree_flatten(self):
        return (self.mask,), self.blocks

    @classmethod
    def tree_unflatten(cls, blocks, children):
        return cls(children[0], blocks)


def block_mask(
    mask_fn: Any,
    query_length: int,
    key_length: int | None = None,
    *,
    params: Any = None,
    batch: int = 1,
    heads: int = 1,
    block_size: int = 128,
) -> BlockMask:
    """Evaluate a mask once, so that attention skips the tiles that it hides.

    Pass the result as `mask_fn`. A tile is skipped if no pair in it is visible, in any batch entry
    and head. The mask is not applied to a tile whose pairs are all visible in all of them.

    Args:
      mask_fn: a `memeff.Mask`, or a function (batch, head, q_pos, k_pos, params) -> bool.
      query_length, key_length: T and S in tokens; S is T if omitted. Positions begin at 0.
      params: params of `mask_fn`. They must be known numbers, not traced, because the tiles to skip
        are fixed while tracing.
      batch, heads: B and N, if the mask depends on them.
      block_size: side of a block in tokens. With smaller blocks more can be skipped, and this
        function takes longer.

    Returns: a `BlockMask` for calls with these T and S.

    Raises: ValueError if params are traced, TypeError if the function cannot be a mask.

    Example:
      >>> from memeff import masks
      >>> print(block_mask(masks.sliding_window(100), 512, block_size=128).sparsity)
      0.5625
    """
    T = check_size("query_length", query_length, 0)
    S = T if key_length is None else check_size("key_length", key_length, 0)
    batch = check_size("batch", batch, 0)
    heads = check_size("heads", heads, 0)
    block_size = check_size("block_size", block_size)
    fn: Any = mask_fn
    if isinstance(mask_fn, Mask) and params is None:
        fn = mask_fn.fn
        params = mask_fn.params
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
        raise ValueError(
            "block_mask: params are traced, but the tiles to skip must be known while tracing. "
            "Call it outside jit, or pass NumPy arrays."
        )
    sizes = {"B": batch, "N": heads, "T": T, "Q": T, "S": S}
    across = ceil_div(S, block_size)
    down = ceil_div(T, block_size)
    if 0 in (batch, heads, T, S) and callable(fn):  # no pair, and JAX does not index empty params
        mask = check_pair_function("mask_fn", fn, params, sizes)
        hidden = np.zeros((down, across), bool)
        made_for = {"batch": None if batch else 0, "heads": None if heads else 0}
        return BlockMask(mask, VisibleBlocks(block_size, (T, S), hidden, hidden, **made_for))
    function, *leaves = trace_function("mask_fn", fn, params, jnp.float32, sizes)
    uses_batch, uses_head, *_ = function.uses
    b = batch if uses_batch else 1
    n = heads if uses_head else 1
    rows = max(1, min(down, PAIRS_AT_A_TIME // max(1, b * n * block_size * S)))  # of blocks
    parts = [np.zeros((2, 0, across), bool)]
    for first in range(0, down, rows):
        with jax.ensure_compile_time_eval():
            part = _visible_blocks(function, leaves, (b, n), (T, S), block_size, rows, first)
            parts.append(np.stack(part))
    any_visible, all_visible = np.concatenate(parts, 1)[:, :down]
    blocks = VisibleBlocks(
        block_size,
        (T, S),
        any_visible,
        all_visible,
        batch=batch if uses_batch else None,
        heads=heads if uses_head else None,
    )
    return BlockMask(Mask(fn, params), blocks)


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4, 5))
def _visible_blocks(function: TracedFunction, leaves, heads, lengths, size: int, rows: int, first):
    """Return any_visible and all_visible [rows, m] of the `rows` of blocks from `first` on.

    `heads` is (B, N).
    """
    b, n = heads
    T, S = lengths
    across = ceil_div(S, size)
    arange = functools.partial(jnp.arange, dtype=jnp.int32)  # as in a tile, also with x64
    q_pos = jnp.int32(first * size) + arange(rows * size)
    k_pos = arange(across * size)
    indices = PairIndices(arange(b), arange(n)[:, None], q_pos, k_pos, (), ())
    visible = function(None, indices, *leaves)  # b|1 n|1 1 t|1 c|1
    inside = ((q_pos < T)[:, None] & (k_pos < S)[None])[None, None, None]

    def in_blocks(pairs):
        pairs = jnp.broadcast_to(pairs, (b, n, 1, *inside.shape[-2:]))
        return pairs.reshape(b, n, rows, size, across, size)

    any_visible = in_blocks(visible & inside).any((0, 1, 3, 5))
    all_visible = in_blocks(visible | ~inside).all((0, 1, 3, 5))
    return any_visible, all_visible
