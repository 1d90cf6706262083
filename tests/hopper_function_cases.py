"""Named calls of the Hopper kernels with functions of the user, and these functions in NumPy.

The oracle knows biases and masks. So what a score adds is a bias for it, with its chain rule.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from cases import Sizes
from conftest import cotangents
from hopper_cases import bf16, f32, i32, interpreted, small

from memeff import dot_product_attention, masks, scores
from memeff.user_functions import Mask, Score


class Case(NamedTuple):
    """A call. Its functions in NumPy take b, n, i, j of all pairs (see `pairs`)."""

    z: Sizes
    functions: Callable  # from params to keyword arguments of the call
    bias: Callable | None = None  # from params, b, n, i, j: what the score adds
    mask: Callable | None = None
    params: Any = ()  # floats
    slopes: Callable | None = None  # derivatives of the bias by each param: [params, B, N, T, S]
    kwargs: dict[str, Any] = {}
    dtype: Any = bf16


# ---- running


def pairs(case: Case) -> list[np.ndarray]:
    """Return b, n, i and j of all pairs, [B, N, T, S]; i counts among the keys."""
    z = case.z
    offset = np.broadcast_to(case.kwargs.get("q_offset", 0), (z.B,))
    b, n, i, j = np.ogrid[: z.B, : z.N, : z.T, : z.S]
    return np.broadcast_arrays(b, n, i + offset[:, None, None, None], j)


def call(case: Case, implementation, params, *args):
    """Return out and lse."""
    return dot_product_attention(
        *args,
        **case.functions(params),
        **case.kwargs,
        implementation=implementation,
        return_residual=True,
    )


def differentiated(case: Case, args, cotangent=None):
    """Return (out, lse), and gradients of params, query, key and value."""
    if cotangent is None:
        cotangent = cotangents(args, case.dtype)

    @jax.jit
    def both(params, args):
        results, pull = jax.vjp(functools.partial(call, case, "pallas"), params, *args)
        return results, pull(cotangent)

    return jax.tree.map(np.asarray, both(case.params, args))


def run(case: Case, args):
    """Return what `differentiated` does, from the interpreter."""
    with interpreted():
        return differentiated(case, args)


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
    return dict(score_fn=Score(lambda s, b, h, i, j, p: s + p[b, j] * 0.3, KEY_NUMBERS))


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
    return np.stack([np.where(i == q, np.sin(0.1 * j), 0.0) for q in range(90)])


KEY_PARAMS = np.random.default_rng(5).standard_normal(130).astype(f32)


def key_params(numbers):
    def score(s, b, h, i, j, p):
        return s + p[j] * (1 + jnp.sin(0.1 * i))

    return dict(score_fn=score, score_params=numbers)


def key_params_bias(numbers, b, n, i, j):
    return numbers[j] * (1 + np.sin(0.1 * i))


def key_params_slopes(b, n, i, j):
    return np.stack([np.where(j == k, 1 + np.sin(0.1 * i), 0.0) for k in range(130)])


# ---- scores: T5, and functions of differences of positions

TABLE = np.random.default_rng(4).standard_normal((32, 4)).astype(f32)


def t5_at(n, i, j, bidirectional=True):
    """Return the entry of T5's table for each pair: one of 32 buckets, and the head.

    Buckets grow up to 100 tokens, because then no bound of one lies near a whole number.
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

    odd = Mask(lambda b, h, i, j, p: p[b, j - i + 89], ODD)
    mask = masks.documents(Q_IDS[:, :90], KV_IDS) | odd
    return dict(score_fn=score, score_params=params, mask_fn=mask)


def differences_bias(p, b, n, i, j):
    return p[5] * 0.02 * (i - j) + (n + 1) * p[np.clip(i - j + 3, 0, 5)]


def differences_mask(b, n, i, j):
    return (Q_IDS[b, i] == KV_IDS[b, j]) | ODD[b, j - i + 89]


def differences_slopes(b, n, i, j):
    entry = np.clip(i - j + 3, 0, 5)
    return np.stack([(n + 1) * (entry == x) + (x == 5) * 0.02 * (i - j) for x in range(6)])


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


def everything(slopes):
    cycle = Score(lambda s, b, h, i, j, p: s + p[b, i % 3] * h, QUERY_NUMBERS)
    mask = Mask(lambda b, h, i, j, p: p[b, j] | (j > i), KEY_NUMBERS % 3 > 0)
    return dict(score_fn=scores.alibi(slopes).then(cycle), mask_fn=mask)


def everything_bias(slopes, b, n, i, j):
    return -slopes[n] * np.abs(i - j) + QUERY_NUMBERS[b, i % 3] * n


def everything_mask(b, n, i, j):
    return (KEY_NUMBERS % 3 > 0)[b, j] | (j > i)


# ---- the cases

CASES = {
    "alibi": Case(
        small(T=100, S=150, K=2, G=2),
        alibi,
        alibi_bias,
        params=np.linspace(0.02, 0.3, 4).astype(f32),
        slopes=alibi_slopes,
        kwargs=dict(is_causal=True),
    ),
    "alibi, 128, float16": Case(
        small(T=130, S=130, H=128, D=100),
        alibi,
        alibi_bias,
        params=np.array([0.1], np.float16),
        slopes=alibi_slopes,
        dtype=np.float16,
    ),
    "of pairs, offsets": Case(  # also keys past the last query, where the score is large
        small(B=2, T=70, S=200),
        by_side,
        by_side_bias,
        kwargs=dict(is_causal=True, q_offset=i32([-20, 61])),
    ),
    "numbers of keys": Case(  # they come with values, also where no tile has a mask
        small(T=70, S=520),
        key_numbers,
        key_numbers_bias,
        kwargs=dict(local_window_size=(None, 500)),
    ),
    "numbers of queries": Case(
        small(B=1, T=90, S=130, G=2),
        query_params,
        query_params_bias,
        params=QUERY_PARAMS,
        slopes=query_params_slopes,
        kwargs=dict(local_window_size=(30, 40)),
    ),
    "t5": Case(  # tiles lie on both sides of the first tile that is visited
        small(T=70, S=400, G=2),
        t5,
        t5_bias,
        params=TABLE[:, :2],
        slopes=by_entry(t5_at, (32, 2)),
        kwargs=dict(q_offset=150),
    ),
    "t5, causal, offsets": Case(
        small(B=2, T=130, S=300, K=2, G=2, H=100, D=128),
        t5_causal,
        t5_causal_bias,
        params=TABLE.astype(bf16),
        slopes=by_entry(t5_causal_at, (32, 4)),
        kwargs=dict(is_causal=True, q_offset=i32([-20, 161])),
    ),
    # params that the kernel for dq sums as well, and one mask that is read at them
    "differences, masked": Case(
        small(B=2, T=90, S=130, G=2),
        differences,
        differences_bias,
        differences_mask,
        params=TABLE[0, :1] * np.arange(1, 7, dtype=f32),
        slopes=differences_slopes,
    ),
    "numbers of keys that learn": Case(
        small(T=70, S=130),
        key_params,
        key_params_bias,
        params=KEY_PARAMS,
        slopes=key_params_slopes,
        kwargs=dict(is_causal=True, q_offset=60),
    ),
    "documents": Case(small(B=2, T=130, S=130), documents, mask=documents_mask),
    "prefix": Case(small(B=2, T=70, S=140), prefix, mask=prefix_mask),
    "composed": Case(small(T=140, S=200, H=128, D=128), composed, mask=composed_mask),
    # the last row of the first head sees nothing
    "of heads": Case(small(T=70, S=130, G=2), heads, mask=heads_mask),
    "everything": Case(
        small(B=2, T=70, S=280, G=3, H=40, D=8),
        everything,
        everything_bias,
        everything_mask,
        params=np.array([0.02, 0.1, 0.3], f32),
        slopes=alibi_slopes,
        kwargs=dict(
            local_window_size=(100, 30),
            q_offset=i32([0, 40]),
            key_value_seq_lengths=i32([280, 111]),
            query_seq_lengths=i32([70, 9]),
            logits_soft_cap=4.0,
            scale=0.2,
        ),
    ),
    "segments": Case(
        small(T=130, S=130),
        every_second,
        mask=every_second_mask,
        kwargs=dict(query_segment_ids=sorted_ids(1, 130, 5), is_causal=True),
    ),
}

# Block masks, keyword arguments, and sizes. Some tiles are whole; with lengths none are.
BLOCKED = {
    "documents": (masks.documents(np.repeat([0, 1], [330, 190])), {}, small(T=520, S=520)),
    "causal, 128": (
        masks.causal() & masks.documents(np.repeat([0, 1], [330, 70])),
        {},
        small(T=400, S=400, H=128, D=128),
    ),
    "lengths, window": (
        masks.causal() | masks.prefix(100),
        dict(key_value_seq_lengths=i32([250, 0]), local_window_size=(150, None)),
        small(B=2, T=140, S=300),
    ),
}
