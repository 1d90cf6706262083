"""What a mask hides, found once before anything runs, so that its tiles are skipped. Hides who sees which block."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from memeff.user_functions import Mask, PairIndices, TracedFunction, trace_function

PAIRS = 2**24  # that are evaluated at a time


@dataclasses.dataclass(frozen=True, eq=False)
class VisibleBlocks:
    """Of which blocks of `size` x `size` pairs some may attend, in some batch entry and head, and all in all; [n, m]."""

    size: int
    lengths: tuple[int, int]
    some: np.ndarray
    every: np.ndarray
    batch: int | None = None  # B and N of the mask, None where it does not depend on them
    heads: int | None = None

    @functools.cached_property
    def _key(self):
        return (
            self.size,
            self.lengths,
            self.batch,
            self.heads,
            self.some.tobytes(),
            self.every.tobytes(),
        )

    def __eq__(self, other):
        return isinstance(other, VisibleBlocks) and (self is other or self._key == other._key)

    def __hash__(self):
        return hash(self._key)

    def of_tiles(self, t: int, c: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of tiles of t x c: of which some pair may attend, and of which all in their blocks."""
        (T, S), size = self.lengths, self.size

        def ends(total, side):
            first = np.arange(0, total, side)
            return first // size, -(-np.minimum(first + side, total) // size)

        (a0, a1), (b0, b1) = ends(T, t), ends(S, c)

        def count(x):
            x = np.pad(x.astype(np.int64).cumsum(0).cumsum(1), ((1, 0), (1, 0)))
            return x[a1][:, b1] - x[a0][:, b1] - x[a1][:, b0] + x[a0][:, b0]

        return count(self.some) > 0, count(self.every) == (a1 - a0)[:, None] * (b1 - b0)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class BlockMask:
    """A mask and the blocks that it hides; what `memeff.block_mask` makes, and `mask_fn` takes.

    Its `str` is a picture: # all of a block may attend, + some, . none.
    """

    mask: Mask
    blocks: VisibleBlocks

    @property
    def sparsity(self) -> float:
        """Which part of all blocks is hidden."""
        return 1 - float(self.blocks.some.mean()) if self.blocks.some.size else 0.0

    def __str__(self) -> str:
        some = self.blocks.some
        (T, S), size = self.blocks.lengths, self.blocks.size
        side = max(1, -(-max(some.shape) // 64)) * size  # of what a sign stands for
        shade = np.add(*(x.astype(int) for x in self.blocks.of_tiles(side, side)))
        rows = ["".join(".+#"[x] for x in row) for row in shade]
        told = f"block mask of {T} x {S} tokens in blocks of {size}: {int(some.sum())} of {some.size} visited "
        told += f"({int((some & ~self.blocks.every).sum())} of them with a mask), {100 * self.sparsity:.1f} % hidden"
        return "\n".join([told, *rows])

    def plot(self, ax: Any = None) -> Any:
        """The picture, on matplotlib axes: dark all, light some, white none."""
        import matplotlib.pyplot as plt

        ax = plt.gca() if ax is None else ax
        (T, S), shade = self.blocks.lengths, self.blocks.some.astype(int) + self.blocks.every
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
    """Finds once what a mask hides: `dot_product_attention(..., mask_fn=block_mask(...))` skips those tiles.

    A tile is visited where some batch entry and head sees something in it, and needs no mask where all see everything.

    Args:
      mask_fn: a `memeff.Mask`, or a function (batch, head, q_pos, k_pos, params) -> bool.
      query_length, key_length: T and S, tokens; the first alone serves both. Positions begin at 0.
      params: of the function; known numbers, for what is skipped is fixed while tracing.
      batch, heads: B and N, where the mask depends on them.
      block_size: tokens; tiles are made of blocks, so smaller ones say more and take longer to find.

    Raises: ValueError where params are traced, TypeError where the function cannot be a mask.

    Example:
      >>> from memeff import masks
      >>> print(block_mask(masks.sliding_window(100), 512, block_size=128).sparsity)
      0.5625
    """
    T, S = query_length, query_length if key_length is None else key_length
    if isinstance(mask_fn, Mask):
        mask_fn, params = (mask_fn.fn, mask_fn.params) if params is None else (mask_fn, params)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(params)):
        cure = "call it outside jit, or with NumPy arrays"
        raise ValueError(
            f"block_mask: params are traced, and what is skipped must be known before: {cure}."
        )
    given, *of_mask = trace_function(
        "mask_fn", mask_fn, params, jnp.float32, {"B": batch, "N": heads, "T": T, "S": S}
    )
    b, n = batch if given.uses[0] else 1, heads if given.uses[1] else 1
    across, down = -(-S // block_size), -(-T // block_size)
    rows = max(1, min(down, PAIRS // max(1, b * n * block_size * S)))  # of blocks
    found = [np.zeros((2, 0, across), bool)]
    for first in range(0, down, rows):
        with jax.ensure_compile_time_eval():
            found.append(np.stack(_find(given, of_mask, (b, n), (T, S), block_size, rows, first)))
    some, every = np.concatenate(found, 1)[:, :down]
    of = [size if uses else None for size, uses in zip((batch, heads), given.uses, strict=False)]
    return BlockMask(Mask(mask_fn, params), VisibleBlocks(block_size, (T, S), some, every, *of))


@functools.partial(jax.jit, static_argnums=(0, 2, 3, 4, 5))
def _find(given: TracedFunction, of_mask, sizes, lengths, size: int, rows: int, first):
    (b, n), (T, S) = sizes, lengths
    across = -(-S // size)
    q_pos, k_pos = first * size + jnp.arange(rows * size), jnp.arange(across * size)
    at = PairIndices(jnp.arange(b), jnp.arange(n)[:, None], q_pos, k_pos, (), ())
    may = given(None, at, *of_mask)  # b n 1 t c, or 1
    inside = (q_pos < T)[:, None] & (k_pos < S)
    cut = lambda x: jnp.broadcast_to(x, (b, n, 1, *inside.shape)).reshape(
        b, n, rows, size, across, size
    )
    return cut(may & inside).any((0, 1, 3, 5)), cut(may | ~inside).all((0, 1, 3, 5))
