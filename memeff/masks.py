"""Ready-made masks.

Each is a `memeff.Mask`: combine them with `&`, `|` and `~`. `memeff.block_mask` finds the tiles
that a mask hides, so that calls skip them.

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
import numpy as np
from jax.typing import ArrayLike

from memeff.inputs import check_integers, check_size, known_values, to_int32
from memeff.masking import window_pairs
from memeff.user_functions import Mask, with_sizes
from memeff.validate import check_window


def causal() -> Mask:
    """Show each query the keys up to its own position."""
    return Mask(_causal)


def _causal(batch, head, q_pos, k_pos, params):
    return k_pos <= q_pos


def sliding_window(left: int | None, right: int | None = 0) -> Mask:
    """Show the keys from q_pos - left to q_pos + right, both included; None is no bound."""
    return Mask(_Window(*check_window((left, right), name="(left, right)")))


@dataclasses.dataclass(frozen=True)
class _Window:
    left: int | None
    right: int | None

    def __call__(self, batch, head, q_pos, k_pos, params):
        return window_pairs(self.left, self.right, q_pos, k_pos)


def prefix(length: ArrayLike) -> Mask:
    """Show the keys before position `length`, a number or [B].

    `causal() | prefix(n)` is the mask of a prefix language model.
    """
    return Mask(_prefix, _positions("length", length))


def _prefix_sizes(length):
    return {"B": length.shape[0]} if length.ndim else {}


@with_sizes(_prefix_sizes)
def _prefix(batch, head, q_pos, k_pos, length):
    return k_pos < (length[batch] if length.ndim else length)


def documents(query_ids: ArrayLike, key_ids: ArrayLike | None = None) -> Mask:
    """Show the keys whose document id is the query's.

    Args:
      query_ids: [T] or [B, T], by position.
      key_ids: [S] or [B, S], by position; `query_ids` if omitted.

    With `q_offset`, a query's id is read at its position among the keys, so `query_ids` needs an id
    for each of these positions. Too few ids are refused where the positions are known. Under jit
    they give NaN for the sequence.
    """
    query_ids = _integers("query_ids", query_ids, "[T] or [B, T]", (1, 2))
    if key_ids is None:
        key_ids = query_ids
    key_ids = _integers("key_ids", key_ids, "[S] or [B, S]", (1, 2))
    return Mask(_documents, (query_ids, key_ids))


def _documents_sizes(ids):
    query_ids, key_ids = ids
    batch = _batch_size("documents", query_ids=(query_ids, 1), key_ids=(key_ids, 1))
    return {"Q": query_ids.shape[-1], "S": key_ids.shape[-1]} | batch


@with_sizes(_documents_sizes)
def _documents(batch, head, q_pos, k_pos, ids):
    query_ids, key_ids = ids
    query_id = query_ids[batch, q_pos] if query_ids.ndim == 2 else query_ids[q_pos]
    key_id = key_ids[batch, k_pos] if key_ids.ndim == 2 else key_ids[k_pos]
    return query_id == key_id


def dilated(step: int) -> Mask:
    """Show every `step`-th key, counted from the query's position."""
    return Mask(_Dilated(check_size("step", step)))


@dataclasses.dataclass(frozen=True)
class _Dilated:
    step: int

    def __call__(self, batch, head, q_pos, k_pos, params):
        return (q_pos - k_pos) % self.step == 0


def block_causal(size: int) -> Mask:
    """Show the keys of the query's own block of `size` tokens and of earlier blocks."""
    return Mask(_BlockCausal(check_size("size", size)))


@dataclasses.dataclass(frozen=True)
class _BlockCausal:
    size: int

    def __call__(self, batch, head, q_pos, k_pos, params):
        return k_pos // self.size <= q_pos // self.size


def tree(ancestors: ArrayLike, start: ArrayLike) -> Mask:
    """Show each of up to 32 drafts all keys before the drafts, its ancestors, and itself.

    Speculative decoding with a tree of drafts appends all of them and verifies them in one call.
    Drafts may be in any order in which each comes after its parent. Positions are places among the
    keys, not depths, so a window or a score by positions suits a chain of drafts alone.

    Args:
      ancestors: [B, T] or [T], integers: bit j is set where draft j is an ancestor of the draft.
        `ancestors_of` makes them from parents.
      start: the position of draft 0 among the keys, a number or [B], such as cache.lengths - T.

    >>> parents = [[-1, 0, 0, 1]]  # 1 and 2 follow 0, and 3 follows 1
    >>> import memeff
    >>> x = jnp.ones((1, 6, 1, 2))
    >>> mask = tree(ancestors_of(parents), start=2)
    >>> memeff.dot_product_attention(x[:, :4], x, x, q_offset=2, mask_fn=mask).shape
    (1, 4, 1, 2)
    """
    bits = _drafts("ancestors", ancestors)
    return Mask(_tree, (bits.astype(jnp.uint32), _positions("start", start)))


MOST_DRAFTS = 32


def _tree_sizes(params):
    bits, start = params
    return {"T": bits.shape[-1]} | _batch_size("tree", ancestors=(bits, 1), start=(start, 0))


@with_sizes(_tree_sizes)
def _tree(batch, head, q_pos, k_pos, params):
    bits, start = params
    if start.ndim:
        start = start[batch]
    query_draft = q_pos - start
    key_draft = k_pos - start
    query_index = jnp.clip(query_draft, 0, bits.shape[-1] - 1)
    own_bits = bits[batch, query_index] if bits.ndim == 2 else bits[query_index]
    bit = jnp.clip(key_draft, 0, MOST_DRAFTS - 1).astype(jnp.uint32)
    is_ancestor = ((own_bits >> bit) & jnp.uint32(1)) == jnp.uint32(1)
    is_ancestor &= (key_draft >= 0) & (key_draft < MOST_DRAFTS)
    return (key_draft < 0) | (key_draft == query_draft) | is_ancestor


def ancestors_of(parents: ArrayLike) -> jax.Array:
    """Return the ancestors [B, T], uint32, that `tree` takes, from the parent of each draft.

    Args:
      parents: [B, T], integers: the draft that each draft follows, or -1 where it follows the last
        token before the drafts. A parent comes before its children. Any other number is refused
        where it is known, and counts as -1 under jit.

    >>> ancestors_of([[-1, 0, 0, 1]]).tolist()
    [[0, 1, 1, 3]]
    """
    parents = _drafts("parents", parents)
    known = known_values(parents)
    T = parents.shape[-1]
    if known is not None and (known >= np.arange(T)).any():
        *row, draft = np.argwhere(known >= np.arange(T))[0]
        raise ValueError(
            f"ancestors_of: draft {draft} has parent {known[*row, draft]}, and a parent comes "
            "before its children. Order the drafts by depth."
        )
    if known is not None and known.min() < -1:
        raise ValueError(
            f"parents must name drafts from 0 on, or be -1 where there is none; got {known.min()}."
        )
    if T == 0:
        return jnp.zeros(parents.shape, jnp.uint32)
    columns = []
    for i in range(T):
        parent = parents[..., i]
        parent_bits = jnp.zeros(parent.shape, jnp.uint32)
        for j, bits in enumerate(columns):
            parent_bits = jnp.where(parent == j, bits | jnp.uint32(1 << j), parent_bits)
        columns.append(parent_bits)
    return jnp.stack(columns, axis=-1)


def _batch_size(name: str, **arrays: tuple[jax.Array, int]) -> dict[str, int]:
    """Return {"B": size} if an array, given with the number of its other dims, has a batch dim."""
    batches = {x.shape[0] for x, dims in arrays.values() if x.ndim == dims + 1}
    if len(batches) > 1:
        shapes = " and ".join(f"{array} of shape {x.shape}" for array, (x, _) in arrays.items())
        raise ValueError(f"masks.{name} got {shapes}: their batch sizes must be equal.")
    return {"B": batches.pop()} if batches else {}


def _integers(name: str, x: ArrayLike, shape: str, ndims: tuple[int, ...]) -> jax.Array:
    """Return integers whose values stay known inside jit, because `block_mask` reads them."""
    with jax.ensure_compile_time_eval():
        x = check_integers(name, x)
    if x.ndim not in ndims:
        raise ValueError(f"{name} must have shape {shape}; got {x.shape}.")
    return x


def _positions(name: str, x: ArrayLike) -> jax.Array:
    """Return a number or [B] as int32, the dtype of positions."""
    x = _integers(name, x, "() or [B]", (0, 1))
    with jax.ensure_compile_time_eval():
        return x if x.dtype == jnp.int32 else to_int32(x)


def _drafts(name: str, x: ArrayLike) -> jax.Array:
    """Return a number of each of up to 32 drafts."""
    x = _integers(name, x, "[B, T] or [T]", (1, 2))
    if x.shape[-1] > MOST_DRAFTS:
        raise ValueError(
            f"{name} has {x.shape[-1]} drafts, and a tree has at most {MOST_DRAFTS}: propose fewer."
        )
    return x
