"""Scores and masks that the bench can put into its calls (`--with`): as memeff takes them, as one array, and their truth."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memeff import block_mask, masks, scores
from memeff.user_functions import Mask, PairIndices, Score, trace_function

WINDOW, DOCUMENTS, CAP, BUCKETS = 1024, 8, 30.0, 32
NAMES = ("plain", "alibi", "t5", "softcap", "window", "documents")


@functools.cache
def function(name: str, heads: int, length: int) -> Score | Mask | None:
    """A window of 1,024 tokens; 8 documents of the same size; a cap of 30; 32 buckets; slopes as in the paper of ALiBi."""
    with jax.ensure_compile_time_eval():
        match name:
            case "alibi":
                return scores.alibi(scores.alibi_slopes(heads))
            case "t5":
                return scores.t5(
                    jnp.asarray(
                        np.random.default_rng(4).standard_normal((BUCKETS, heads)), jnp.float32
                    )
                )
            case "softcap":
                return scores.soft_cap(CAP)
            case "window":
                return masks.sliding_window(WINDOW - 1)
            case "documents":
                return masks.documents(jnp.arange(length) * DOCUMENTS // length)
    return None


@functools.cache
def arguments(name: str, heads: int, length: int) -> dict[str, Any]:
    """Of `dot_product_attention`; masks as block masks, whose hidden tiles are skipped."""
    own = function(name, heads, length)
    if isinstance(own, Mask):
        with jax.ensure_compile_time_eval():
            return {"mask_fn": block_mask(own, length)}
    return {} if own is None else {"score_fn": own}


def as_array(name: str, heads: int, length: int, dtype: str):
    """What gives the same to an attention that takes arrays: their name, and a function that makes one [1, N|1, S, S]."""
    if name == "softcap":
        raise NotImplementedError("no array is a soft cap")
    own = function(name, heads, length)
    of_heads, at = jnp.arange(heads, dtype=jnp.int32), jnp.arange(length, dtype=jnp.int32)
    if isinstance(own, Mask):
        return "mask", lambda: _of_pairs(own, None, of_heads[:1], at, at)[:, :, 0]
    zeros = lambda: jnp.zeros((1, heads, 1, length, length), jnp.float32)
    return "bias", lambda: _of_pairs(own, zeros(), of_heads, at, at)[:, :, 0].astype(dtype)


def _of_pairs(own: Any, score: jax.Array | None, heads, q_pos, k_pos) -> jax.Array:
    """b n 1 t c; of a mask, with what it does not depend on as 1."""
    kind = "mask_fn" if score is None else "score_fn"
    call, floats, rest = trace_function(
        kind, own, None, jnp.float32 if score is None else score.dtype, {}
    )
    batch = jnp.arange(1 if score is None else score.shape[0], dtype=jnp.int32)
    return call(score, PairIndices(batch, heads[:, None], q_pos, k_pos, (), ()), floats, rest)


def logits(
    name: str, heads: int, length: int, s: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """What the softmax gets of scores s [..., t, S] of the last head and queries at `rows`, and its derivative; float64."""
    own = function(name, heads, length)
    if own is None:
        return s, np.ones_like(s)
    at = (
        jnp.array([heads - 1], jnp.int32),
        jnp.asarray(rows, jnp.int32),
        jnp.arange(length, dtype=jnp.int32),
    )
    with jax.enable_x64(True):
        if isinstance(own, Mask):
            return np.where(_of_pairs(own, None, *at)[0, 0, 0], s, -np.inf), np.ones_like(s)
        score = jnp.asarray(s).reshape(-1, 1, 1, *s.shape[-2:])
        found = jax.jvp(lambda score: _of_pairs(own, score, *at), (score,), (jnp.ones_like(score),))
        found, slope = (np.asarray(x).reshape(s.shape) for x in found)
    return found, slope
