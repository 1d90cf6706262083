"""The scores and masks that the bench can add to its calls (`--with`).

memeff takes them as functions, other attentions as one array. For the comparison with float64 they
are also applied to logits in NumPy's precision.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import memeff
from memeff import Mask, Score, masks, scores

NAMES = ("plain", "alibi", "t5", "softcap", "window", "documents")
WINDOW = 1024  # tokens
DOCUMENTS = 8  # of the same size
SOFT_CAP = 30.0
T5_BUCKETS = 32


@functools.cache
def extra_function(name: str, heads: int, length: int) -> Score | Mask | None:
    """Return the score or the mask called `name`; None for "plain"."""
    with jax.ensure_compile_time_eval():
        match name:
            case "alibi":
                return scores.alibi(scores.alibi_slopes(heads))
            case "t5":
                table = np.random.default_rng(4).standard_normal((T5_BUCKETS, heads))
                return scores.t5(jnp.asarray(table, jnp.float32))
            case "softcap":
                return scores.soft_cap(SOFT_CAP)
            case "window":
                return masks.sliding_window(WINDOW - 1)
            case "documents":
                return masks.documents(jnp.arange(length) * DOCUMENTS // length)
    return None


@functools.cache
def extra_arguments(name: str, heads: int, length: int) -> dict[str, Any]:
    """Return the arguments of memeff's attention.

    A mask becomes a block mask, so that hidden tiles are skipped.
    """
    function = extra_function(name, heads, length)
    if function is None:
        return {}
    if isinstance(function, Score):
        return {"score_fn": function}
    with jax.ensure_compile_time_eval():
        return {"mask_fn": memeff.block_mask(function, length)}


def extra_as_array(
    name: str, heads: int, length: int, dtype: str
) -> tuple[str, Callable[[], Array]]:
    """Return the name of an array argument with the same effect, and a function that makes it."""
    match extra_function(name, heads, length):
        case Mask() as mask:
            return "mask", functools.partial(mask_array, mask, length)
        case Score() as score if name != "softcap":
            return "bias", functools.partial(bias_array, score, heads, length, dtype)
    raise NotImplementedError("no array can express a soft cap")


def mask_array(mask: Mask, length: int) -> Array:
    """Evaluate a mask that is the same for all heads: [1, 1, S, S]."""
    positions = indices(length)
    return apply_mask(mask, indices(1), positions, positions)[None]


def bias_array(score: Score, heads: int, length: int, dtype: str) -> Array:
    """Evaluate a score that adds to the logits: [1, N, S, S]."""
    zeros = jnp.zeros((1, heads, length, length), jnp.float32)
    positions = indices(length)
    bias = apply_score(score, zeros, indices(heads), positions, positions)
    return bias.astype(dtype)


def indices(size: int) -> Array:
    """Return the numbers 0 to size - 1 in int32."""
    return jnp.arange(size, dtype=jnp.int32)


def apply_mask(mask: Mask, heads: Array, rows: Array, cols: Array) -> Array:
    """Return where heads [N] let queries at `rows` [T] see keys at `cols` [S].

    The result is boolean [N, T, S].
    """

    def one_pair(head: Array, row: Array, col: Array) -> Array:
        return mask.fn(jnp.int32(0), head, row, col, mask.params)

    keys = jax.vmap(one_pair, (None, None, 0))
    queries = jax.vmap(keys, (None, 0, None))
    return jax.vmap(queries, (0, None, None))(heads, rows, cols)


def apply_score(score: Score, logits: Array, heads: Array, rows: Array, cols: Array) -> Array:
    """Return the new logits of logits [B, N, T, S], of heads [N], queries [T] and keys [S]."""

    def one_pair(logit: Array, head: Array, row: Array, col: Array) -> Array:
        return score.fn(logit, jnp.int32(0), head, row, col, score.params)

    keys = jax.vmap(one_pair, (0, None, None, 0))
    queries = jax.vmap(keys, (0, None, 0, None))
    all_heads = jax.vmap(queries, (0, 0, None, None))
    return jax.vmap(all_heads, (0, None, None, None))(logits, heads, rows, cols)


def extra_logits(
    name: str, heads: int, length: int, logits: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits that the softmax gets, and their derivative by `logits`, in float64.

    `logits` [..., T, S] are those of the last head and of queries at the positions `rows` [T].
    """
    function = extra_function(name, heads, length)
    if function is None:
        return logits, np.ones_like(logits)
    last_head = jnp.array([heads - 1], jnp.int32)
    queries = jnp.asarray(rows, jnp.int32)
    keys = indices(length)
    with jax.enable_x64(True):
        if isinstance(function, Mask):
            keep = apply_mask(function, last_head, queries, keys)[0]
            return np.where(keep, logits, -np.inf), np.ones_like(logits)

        def new_logits(flat: Array) -> Array:
            return apply_score(function, flat, last_head, queries, keys)

        T, S = logits.shape[-2:]
        flat = jnp.asarray(logits).reshape(-1, 1, T, S)
        changed, slope = jax.jvp(new_logits, (flat,), (jnp.ones_like(flat),))
        changed = np.asarray(changed).reshape(logits.shape)
        slope = np.asarray(slope).reshape(logits.shape)
        return changed, slope
