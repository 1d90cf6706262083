"""Define the truth of each of FlexAttention's public examples, in the order of the page's table.

The examples stand in docs/scores-and-masks.md. A truth is typed here a second time: the mask pair
by pair, and of a score the bias that it adds to the scaled logit. The oracle's gradient of that
bias gives the gradient of the params by the chain rule.
"""

import bisect
from typing import Any, NamedTuple

import numpy as np

B = 2
N = 6
K = 3
H = 5
D = 11
R = 4  # rotary dims of latent attention, and frequencies

# T, S
CROSS = (37, 53)
SELF = (41, 41)
PIXELS = (35, 35)
NOISED_AND_CLEAN = (36, 36)

# ---- arrays of the examples, drawn in this order

_rng = np.random.default_rng(0)


def _normal(*shape):
    return _rng.standard_normal(shape)


def _runs(values, lengths):
    """Return each of the values as often as its length says."""
    return np.repeat(values, lengths)


def _places(ids):
    """Return the place of each token in its document."""
    ids = list(ids)
    return [j - ids.index(document) for j, document in enumerate(ids)]


TABLE = _normal(N, 2 * 9 + 1)
BUCKETS = _normal(32, N)
SLOPES = _rng.random(N)
CAP = np.float64(0.7)
Q_ROPE = _normal(B, N, CROSS[0], R)
K_ROPE = _normal(B, CROSS[1], R)
FREQUENCIES = _rng.random(R)
FAR = _normal(N, 6)
DISTANCE = _rng.integers(0, 6, (B, *CROSS), np.int32)
LENGTHS = np.array([5, 19])
# the last 5 belongs to the first document
IDS = np.stack([_runs([0, 1, 2, 3], [11, 1, 22, 7]), _runs([5, 0, 5], [17, 17, 7])])
PREFIX_OF = np.where((IDS == 0) & [[False], [True]], 5, -1)
PREFIX_OF = np.where((IDS == 1) | (IDS == 2), 0, PREFIX_OF)
PLACE = np.stack([_places(ids) for ids in IDS])
WIDTHS = np.array([0, 1, 3, 7, 20, 50])
LAST_IMAGE = np.stack([_runs([-1, 0, 1, 2], [4, 9, 9, 15]), _runs([0, 2], [20, 17])])
IMAGE_OF_PATCH = _runs([0, 1, 2], [18, 18, 17])
SPANS = np.stack([_runs([-1, 0, -1, 1], [9, 13, 2, 17]), _runs([0, -1], [3, 38])])

ARRAYS: dict[str, Any] = dict(  # by their names in the page's table
    table=TABLE,
    buckets=BUCKETS,
    slopes=SLOPES,
    cap=CAP,
    q_rope=Q_ROPE,
    k_rope=K_ROPE,
    frequencies=FREQUENCIES,
    graph=dict(far=FAR, distance=DISTANCE),
    lengths=LENGTHS,
    ids=IDS,
    prefix_of=PREFIX_OF,
    place=PLACE,
    widths=WIDTHS,
    last_image=LAST_IMAGE,
    image_of_patch=IMAGE_OF_PATCH,
    spans=SPANS,
)

# ---- biases of a pair, and gradients of their params from dbias [B, N, T, S]


def no_bias(b, n, i, j):
    return 0.0


def distance_bias(b, n, i, j):
    return i - j


def _sum_to_table(table, index_of, dbias):
    """Return the gradient of a table whose entry `index_of(n, i, j)` is added to each logit."""
    gradient = np.zeros(table.shape)
    for b, n, i, j in np.ndindex(dbias.shape):
        gradient[index_of(n, i, j)] += dbias[b, n, i, j]
    return gradient


def shaw_index(n, i, j):
    return n, max(-9, min(9, j - i)) + 9


def shaw_bias(b, n, i, j):
    return TABLE[shaw_index(n, i, j)]


def shaw_gradient(dbias, grads):
    return _sum_to_table(TABLE, shaw_index, dbias)


# Bucket n begins at distance T5_STARTS[n]. From 8 on, 8 buckets reach up to 128: 8 * 16^(k / 8).
T5_STARTS = [*range(8), 8, 12, 16, 23, 32, 46, 64]


def t5_index(n, i, j):
    bucket = bisect.bisect_right(T5_STARTS, abs(i - j)) - 1
    return bucket + (16 if j > i else 0), n


def t5_bias(b, n, i, j):
    return BUCKETS[t5_index(n, i, j)]


def t5_gradient(dbias, grads):
    return _sum_to_table(BUCKETS, t5_index, dbias)


def alibi_bias(b, n, i, j):
    return -SLOPES[n] * abs(i - j)


def alibi_gradient(dbias, grads):
    T, S = dbias.shape[2:]
    distance = np.abs(np.arange(T)[:, None] - np.arange(S))
    return -(dbias * distance).sum((0, 2, 3))


def cap_gradient(dbias, grads):
    return grads["logits_soft_cap"]


def cap_and_alibi_gradient(dbias, grads):
    return cap_gradient(dbias, grads), alibi_gradient(dbias, grads)


def rope_bias(b, n, i, j):
    return Q_ROPE[b, n, i] @ K_ROPE[b, j]


def rope_gradient(dbias, grads):
    dq_rope = np.einsum("bnts,bsr->bntr", dbias, K_ROPE)
    dk_rope = np.einsum("bnts,bntr->bsr", dbias, Q_ROPE)
    return dq_rope, dk_rope


def sandwich_bias(b, n, i, j):
    return np.cos((i - j) * FREQUENCIES).sum() / (8 * (n + 1) / N)


def sandwich_gradient(dbias, grads):
    T, S = CROSS
    distance = np.arange(T)[:, None, None] - np.arange(S)[:, None]  # t s 1
    dcos = -np.sin(distance * FREQUENCIES) * distance
    weights = N / (8 * np.arange(1, N + 1))
    return np.einsum("bnts,tsr,n->r", dbias, dcos, weights)


def graph_bias(b, n, i, j):
    return FAR[n, DISTANCE[b, i, j]]


def graph_gradient(dbias, grads):
    gradient = np.zeros(FAR.shape)
    for n, distance in np.ndindex(FAR.shape):
        gradient[n, distance] = dbias[:, n][distance == DISTANCE].sum()
    return gradient


# ---- masks of a pair


def sees_all(b, n, i, j):
    return True


def causal(b, n, i, j):
    return j <= i


def anti_causal(b, n, i, j):
    return j >= i


def sliding_window(b, n, i, j):
    return i - 7 <= j <= i


def dilated_window(b, n, i, j):
    return i - j in (0, 3, 6, 9, 12)


def window_and_strides(b, n, i, j):
    return 0 <= i - j <= 3 or (i >= j and (i - j) % 5 == 0)


def global_tokens_and_window(b, n, i, j):
    return min(i, j) < 2 or abs(i - j) <= 4


def prefix_lm(b, n, i, j):
    return j <= i or j < LENGTHS[b]


def documents(b, n, i, j):
    return IDS[b, i] == IDS[b, j]


def causal_documents(b, n, i, j):
    return documents(b, n, i, j) and j <= i


def prefix_in_each_document(b, n, i, j):
    return documents(b, n, i, j) and (j <= i or PLACE[b, j] < 3)


def answers_to_a_shared_prompt(b, n, i, j):
    return PREFIX_OF[b, i] == IDS[b, j] or causal_documents(b, n, i, j)


def chunks(b, n, i, j):
    return i - i % 8 <= j <= i


def causal_frames(b, n, i, j):
    return j < i - i % 8 + 8


def block_diffusion(b, n, i, j):
    """Return whether a token sees a token, in blocks of 4 places (the last of 2).

    18 noised tokens stand before 18 clean ones.
    """
    query_is_clean, query_place = divmod(i, 18)
    key_is_clean, key_place = divmod(j, 18)
    query_block = query_place // 4
    key_block = key_place // 4
    if query_is_clean:
        return bool(key_is_clean) and key_block <= query_block
    if key_is_clean:
        return key_block < query_block
    return key_block == query_block


def window_for_each_head(b, n, i, j):
    return abs(i - j) <= WIDTHS[n]


def _is_near(query, key, pixels):
    """Return whether `key` is one of the three nearest to `query` in a row of pixels.

    For a query at an end of the row these are the three pixels at that end.
    """
    first = min(max(query - 1, 0), pixels - 3)
    return first <= key < first + 3


def neighbourhood(b, n, i, j):
    query_row, query_column = divmod(i, 7)
    key_row, key_column = divmod(j, 7)
    return _is_near(query_row, key_row, 5) and _is_near(query_column, key_column, 7)


def text_to_its_last_image(b, n, i, j):
    return LAST_IMAGE[b, i] == IMAGE_OF_PATCH[j]


def images_inside_text(b, n, i, j):
    return j <= i or (SPANS[b, i] == SPANS[b, j] and SPANS[b, i] != -1)


# ---- the table


class Truth(NamedTuple):
    """Sizes (T, S) of an example, functions of the pair (b, n, i, j), and a gradient."""

    size: tuple[int, int] = SELF
    sees: Any = sees_all
    bias: Any = no_bias
    gradient: Any = None  # of the params, from dbias [B, N, T, S] and the oracle's gradients
    cap: float | None = None


TRUTHS = [
    Truth(CROSS),
    Truth(CROSS, bias=distance_bias),
    Truth(CROSS, bias=shaw_bias, gradient=shaw_gradient),
    Truth(CROSS, bias=t5_bias, gradient=t5_gradient),
    Truth(CROSS, bias=alibi_bias, gradient=alibi_gradient),
    Truth(CROSS, gradient=cap_gradient, cap=CAP),
    Truth(CROSS, bias=alibi_bias, gradient=cap_and_alibi_gradient, cap=CAP),
    Truth(CROSS, bias=rope_bias, gradient=rope_gradient),
    Truth(CROSS, bias=sandwich_bias, gradient=sandwich_gradient),
    Truth(CROSS, bias=graph_bias, gradient=graph_gradient),
    Truth(sees=causal),
    Truth(sees=anti_causal),
    Truth(sees=sliding_window),
    Truth(sees=dilated_window),
    Truth(sees=window_and_strides),
    Truth(sees=global_tokens_and_window),
    Truth(sees=prefix_lm),
    Truth(sees=documents),
    Truth(sees=causal_documents, bias=alibi_bias, gradient=alibi_gradient),
    Truth(sees=prefix_in_each_document),
    Truth(sees=answers_to_a_shared_prompt),
    Truth(sees=chunks),
    Truth(sees=causal_frames),
    Truth(NOISED_AND_CLEAN, sees=block_diffusion),
    Truth(sees=window_for_each_head),
    Truth(PIXELS, sees=neighbourhood),
    Truth(CROSS, sees=text_to_its_last_image),
    Truth(sees=images_inside_text),
]
