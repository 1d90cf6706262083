"""Functions of the user for the Hopper kernels, and the same functions in NumPy.

alibi(slopes)                         # keyword arguments of a call
alibi_bias(slopes, b, n, i, j)        # what its score adds to the logits of pairs b, n, i, j
alibi_slopes(b, n, i, j)              # derivatives of that by each number of `slopes`
prefix_mask(b, n, i, j)               # True for pairs that the mask of prefix(()) leaves
"""

import functools

import jax.numpy as jnp
import numpy as np
from hopper_cases import f32, i32

from memeff import masks, scores
from memeff.user_functions import Mask, Score

# ---- derivatives by params


def by_head(slope):
    """Return the derivatives by the numbers of an array [N]."""

    def slopes(b, n, i, j):
        of_pairs = slope(b, n, i, j)
        return np.stack([np.where(n == head, of_pairs, 0.0) for head in range(n.max() + 1)])

    return slopes


def by_entry(index, shape):
    """Return the derivatives by an array, of which each pair adds the entry `index(n, i, j)`."""

    def slopes(b, n, i, j):
        entries = np.broadcast_arrays(*index(n, i, j))
        flat = np.ravel_multi_index(entries, shape)
        return np.stack([(flat == entry).astype(f32) for entry in range(np.prod(shape))])

    return slopes


# ---- scores: ALiBi, and functions of positions and numbers


def sorted_ids(B: int, length: int, seed: int = 0) -> np.ndarray:
    """Return ids of 4 segments, in order."""
    return np.sort(np.random.default_rng(seed).integers(0, 4, (B, length))).astype(np.int32)


def alibi(slopes):
    return dict(score_fn=scores.alibi(slopes))


def alibi_bias(slopes, b, n, i, j):
    return -slopes[n] * np.abs(i - j)


@by_head
def alibi_slopes(b, n, i, j):
    return -np.abs(i - j)


def by_side(_):
    def score(s, b, h, i, j, p):
        return jnp.where(i > j, s + 0.7 * (i - j), s - (j - i) / (h + 3))

    return dict(score_fn=score)


def by_side_bias(_, b, n, i, j):
    return np.where(i > j, 0.7 * (i - j), (i - j) / (n + 3))


KEY_NUMBERS = np.random.default_rng(2).integers(-3, 3, (2, 520)).astype(np.int32)


def key_numbers(_):
    def score(s, b, h, i, j, p):
        return s + p[b, j] * 0.3

    return dict(score_fn=Score(score, KEY_NUMBERS))


def key_numbers_bias(_, b, n, i, j):
    return KEY_NUMBERS[b, j] * 0.3


QUERY_PARAMS = np.random.default_rng(3).standard_normal(90).astype(f32)


def query_params(numbers):
    def score(s, b, h, i, j, p):
        return s + p[i] * jnp.sin(0.1 * j)

    return dict(score_fn=score, score_params=numbers)


def query_params_bias(numbers, b, n, i, j):
    return numbers[i] * np.sin(0.1 * j)


def query_params_slopes(b, n, i, j):
    factor = np.sin(0.1 * j)
    return np.stack([np.where(i == q, factor, 0.0) for q in range(90)])


KEY_PARAMS = np.random.default_rng(5).standard_normal(130).astype(f32)


def key_params(numbers):
    def score(s, b, h, i, j, p):
        return s + p[j] * (1 + jnp.sin(0.1 * i))

    return dict(score_fn=score, score_params=numbers)


def key_params_bias(numbers, b, n, i, j):
    return numbers[j] * (1 + np.sin(0.1 * i))


def key_params_slopes(b, n, i, j):
    factor = 1 + np.sin(0.1 * i)
    return np.stack([np.where(j == k, factor, 0.0) for k in range(130)])


# ---- scores: T5, and functions of differences of positions

TABLE = np.random.default_rng(4).standard_normal((32, 4)).astype(f32)


def t5_at(n, i, j, bidirectional=True):
    """Return the entry of T5's table for each pair: one of 32 buckets, and the head.

    Buckets reach up to 100 tokens, because then no growing bucket has a bound near a whole number.
    """
    exact = 8 if bidirectional else 16
    distance = np.abs(i - j) if bidirectional else np.maximum(i - j, 0)
    growth = np.log(np.maximum(distance, exact) / exact) / np.log(100 / exact)
    far = exact + (growth * exact).astype(int)
    bucket = np.where(distance < exact, distance, np.minimum(far, 2 * exact - 1))
    return bucket + np.where(bidirectional & (j > i), 16, 0), n


t5_causal_at = functools.partial(t5_at, bidirectional=False)


def t5(table):
    return dict(score_fn=scores.t5(table, max_distance=100))


def t5_bias(table, b, n, i, j):
    return table[t5_at(n, i, j)]


def t5_causal(table):
    return dict(score_fn=scores.t5(table, bidirectional=False, max_distance=100))


def t5_causal_bias(table, b, n, i, j):
    return table[t5_causal_at(n, i, j)]


Q_IDS = sorted_ids(2, 130)
KV_IDS = sorted_ids(2, 130, 1)
ODD = np.random.default_rng(6).integers(0, 2, (2, 219)).astype(bool)  # of each j - i


def differences(params):
    def score(s, b, h, i, j, p):
        return s + p[5] * (0.02 * (i - j)) + (h + 1) * p[jnp.clip(i - j + 3, 0, 5)]

    def odd(b, h, i, j, p):
        return p[b, j - i + 89]

    mask = masks.documents(Q_IDS[:, :90], KV_IDS) | Mask(odd, ODD)
    return dict(score_fn=score, score_params=params, mask_fn=mask)


def differences_bias(p, b, n, i, j):
    return p[5] * 0.02 * (i - j) + (n + 1) * p[np.clip(i - j + 3, 0, 5)]


def differences_mask(b, n, i, j):
    return (Q_IDS[b, i] == KV_IDS[b, j]) | ODD[b, j - i + 89]


def differences_slopes(b, n, i, j):
    entry = np.clip(i - j + 3, 0, 5)
    slopes = [(n + 1) * (entry == x) for x in range(6)]
    slopes[5] = slopes[5] + 0.02 * (i - j)
    return np.stack(slopes)


# ---- masks


def documents(_):
    return dict(mask_fn=masks.documents(Q_IDS, KV_IDS))


def documents_mask(b, n, i, j):
    return Q_IDS[b, i] == KV_IDS[b, j]


def prefix(_):
    return dict(mask_fn=masks.causal() | masks.prefix(i32([7, 100])))


def prefix_mask(b, n, i, j):
    return (j <= i) | (j < np.array([7, 100])[b])


def composed(_):
    near = masks.sliding_window(40) & ~masks.dilated(3)
    far = masks.block_causal(50) & masks.dilated(7)
    return dict(mask_fn=near | far)


def composed_mask(b, n, i, j):
    near = (i - 40 <= j) & (j <= i) & ((i - j) % 3 != 0)
    far = (j // 50 <= i // 50) & ((i - j) % 7 == 0)
    return near | far


def heads(_):
    def mask(b, h, i, j, p):
        return (j % (h + 2) == 1) & ((i < 69) | (h > 0))

    return dict(mask_fn=mask)


def heads_mask(b, n, i, j):
    return (j % (n + 2) == 1) & ((i < 69) | (n > 0))


def every_second(_):
    return dict(mask_fn=masks.dilated(2))


def every_second_mask(b, n, i, j):
    return (i - j) % 2 == 0


# ---- both

QUERY_NUMBERS = i32([[0, 1, 2], [3, 4, 5]])
KEY_SEEN = KEY_NUMBERS % 3 > 0


def everything(slopes):
    def cycle(s, b, h, i, j, p):
        return s + p[b, i % 3] * h

    def mask(b, h, i, j, p):
        return p[b, j] | (j > i)

    score_fn = scores.alibi(slopes).then(Score(cycle, QUERY_NUMBERS))
    return dict(score_fn=score_fn, mask_fn=Mask(mask, KEY_SEEN))


def everything_bias(slopes, b, n, i, j):
    return -slopes[n] * np.abs(i - j) + QUERY_NUMBERS[b, i % 3] * n


def everything_mask(b, n, i, j):
    return KEY_SEEN[b, j] | (j > i)


# ---- functions of tests that have no case


def no_functions(_):
    return {}


def soft_cap(cap):
    return dict(score_fn=scores.soft_cap(cap))


def mask_of_keys(seen: np.ndarray) -> Mask:
    """Return a mask that hides the keys where `seen` [S] is False."""
    return Mask(lambda b, h, i, j, p: p[j], seen)
