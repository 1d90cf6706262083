"""Ready-made masks, `memeff.Mask`: `&`, `|` and `~` make others of them, `memeff.block_mask` skips what they hide.

>>> import memeff
>>> x = jnp.ones((1, 8, 2, 4))
>>> mask = causal() & (sliding_window(2) | prefix(3))
>>> print(memeff.block_mask(mask, 8, block_size=1))
block mask of 8 x 8 tokens in blocks of 1: 33 of 64 visited (0 of them with a mask), 48.4 % hidden
#.......
##......
###.....
####....
#####...
######..
###.###.
###..###
>>> memeff.dot_product_attention(x, x, x, mask_fn=mask).shape
(1, 8, 2, 4)
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from memeff.user_functions import Mask, with_sizes


def causal() -> Mask:
    """Keys up to the query's position."""
    return Mask(_causal)


def _causal(batch, head, q_pos, k_pos, params):
    return k_pos <= q_pos


def sliding_window(left: int | None, right: int | None = 0) -> Mask:
    """Keys from q_pos - left to q_pos + right, both included; None: no bound."""
    return Mask(_Window(left, right))


@dataclasses.dataclass(frozen=True)
class _Window:
    left: int | None
    right: int | None

    def __call__(self, batch, head, q_pos, k_pos, params):
        near = q_pos == q_pos
        if self.left is not None:
            near &= q_pos - self.left <= k_pos
        if self.right is not None:
            near &= k_pos <= q_pos + self.right
        return near


def prefix(length: ArrayLike) -> Mask:
    """Keys before `length`, a number or [B]: `causal() | prefix(n)` is a prefix language model."""
    return Mask(_prefix, _array(length))


@with_sizes(lambda length: {"B": length.shape[0]} if length.ndim else {})
def _prefix(batch, head, q_pos, k_pos, length):
    return k_pos < (length[batch] if length.ndim else length)


def documents(query_ids: ArrayLike, key_ids: ArrayLike | None = None) -> Mask:
    """Keys of the query's own document: ids [T] or [B, T] and [S] or [B, S], by position; the first alone serves both.

    With `q_offset`, a query's id is read at its position among the keys. Give `query_ids` an id for each such position.
    """
    query_ids = _array(query_ids)
    return Mask(_documents, (query_ids, query_ids if key_ids is None else _array(key_ids)))


def _sizes(ids):
    batch = {x.shape[0] for x in ids if x.ndim == 2}
    if len(batch) > 1:
        raise ValueError(
            f"masks.documents has ids of queries {ids[0].shape} and of keys {ids[1].shape}: give one batch."
        )
    sizes = {"T": ids[0].shape[-1], "S": ids[1].shape[-1]}
    return sizes | {"B": batch.pop()} if batch else sizes


@with_sizes(_sizes)
def _documents(batch, head, q_pos, k_pos, ids):
    of = lambda ids, at: ids[batch, at] if ids.ndim == 2 else ids[at]
    return of(ids[0], q_pos) == of(ids[1], k_pos)


def dilated(step: int) -> Mask:
    """Every `step`-th key, counted from the query."""
    return Mask(_Dilated(step))


@dataclasses.dataclass(frozen=True)
class _Dilated:
    step: int

    def __call__(self, batch, head, q_pos, k_pos, params):
        return (q_pos - k_pos) % self.step == 0


def block_causal(size: int) -> Mask:
    """Keys of the query's own block of `size` tokens and of those before it."""
    return Mask(_BlockCausal(size))


@dataclasses.dataclass(frozen=True)
class _BlockCausal:
    size: int

    def __call__(self, batch, head, q_pos, k_pos, params):
        return k_pos // self.size <= q_pos // self.size


def _array(x: ArrayLike) -> jax.Array:
    """Numbers that are known stay so inside jit: `block_mask` reads them."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray(x)
