"""Scores and masks of the random calls of kernel_cases.py, each as memeff has it and in NumPy.

b, n, i, j are the indices of all pairs; i is the position of the query among the keys.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from cases import Sizes
from hopper_user_functions import alibi_bias, t5_bias

import memeff
from memeff import masks, scores

# ---- scores; in NumPy as the bias that they add

BUCKETS = 32


def alibi_params(rng, z: Sizes):
    return rng.uniform(0.002, 0.3, z.N).astype(np.float32)


def alibi_score(params):
    return scores.alibi(params)


def t5_params(rng, z: Sizes):
    return rng.standard_normal((BUCKETS, z.N)).astype(np.float32)


def t5_score(params):
    return scores.t5(params, max_distance=100)


def keys_params(rng, z: Sizes):
    return rng.standard_normal((z.B, z.S)).astype(np.float32)


def keys_score(params):
    def add_param_of_key(s, b, h, i, j, params):
        return s + 0.3 * jax.lax.stop_gradient(params)[b, j]

    return memeff.Score(add_param_of_key, params)


def keys_bias(params, b, n, i, j):
    return 0.3 * params[b, j] + 0 * i


def pairs_score(params):
    def subtract_distance(s, b, h, i, j, _):
        return s - jnp.where(i > j, 0.02 * (i - j), (j - i) * 0.1 / (h + 3))

    return memeff.Score(subtract_distance, params)


def pairs_bias(params, b, n, i, j):
    return -np.where(i > j, 0.02 * (i - j), (j - i) * 0.1 / (n + 3))


# The order of SCORES and MASKS decides what a seed draws.
SCORES: dict[str, Callable] = {
    "alibi": alibi_score,
    "t5": t5_score,
    "keys": keys_score,
    "pairs": pairs_score,
}
PARAMS: dict[str, Callable] = {"alibi": alibi_params, "t5": t5_params, "keys": keys_params}
BIASES: dict[str, Callable] = {
    "alibi": alibi_bias,
    "t5": t5_bias,
    "keys": keys_bias,
    "pairs": pairs_bias,
}


# ---- masks; `row` is the index of the query

PREFIX = 90
WINDOW = 200
LONGEST = 8000  # tokens of a drawn call, at most
DOCUMENTS = np.arange(LONGEST) // 190


def documents_mask(z: Sizes):
    return masks.documents(DOCUMENTS[: z.T], DOCUMENTS[: z.S])


def documents_seen(row, n, i, j):
    return DOCUMENTS[row] == DOCUMENTS[j]


def prefix_mask(z: Sizes):
    return masks.causal() | masks.prefix(PREFIX)


def prefix_seen(row, n, i, j):
    return (j <= i) | (j < PREFIX)


def dilated_mask(z: Sizes):
    return masks.dilated(3) & masks.sliding_window(WINDOW, WINDOW)


def dilated_seen(row, n, i, j):
    return ((i - j) % 3 == 0) & (np.abs(i - j) <= WINDOW)


def heads_mask(z: Sizes):
    def keys_of_head(b, h, i, j, _):
        return j % (h + 2) != 1

    return keys_of_head


def heads_seen(row, n, i, j):
    return j % (n + 2) != 1


def blocks_mask(z: Sizes):
    return _block_mask(z.T, z.S)


@functools.cache
def _block_mask(T: int, S: int):
    documents = masks.documents(DOCUMENTS[:T], DOCUMENTS[:S])
    mask = masks.causal() & documents | masks.prefix(PREFIX // 3)
    return memeff.block_mask(mask, T, S, block_size=64)


def blocks_seen(row, n, i, j):
    return (j <= i) & (DOCUMENTS[row] == DOCUMENTS[j]) | (j < PREFIX // 3)


MASKS: dict[str, Callable] = {
    "documents": documents_mask,
    "prefix": prefix_mask,
    "dilated": dilated_mask,
    "heads": heads_mask,
    "blocks": blocks_mask,
}
SEEN: dict[str, Callable] = {
    "documents": documents_seen,
    "prefix": prefix_seen,
    "dilated": dilated_seen,
    "heads": heads_seen,
    "blocks": blocks_seen,
}
PAIR_MASKS = [name for name in MASKS if name != "blocks"]
# An offset leads outside of the ids of documents.
OFFSET_MASKS = [name for name in PAIR_MASKS if name != "documents"]
