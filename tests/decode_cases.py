"""Named calls of the decode kernel: few queries, and a cache of which a part is filled.

The same calls run in the interpreter (test_hopper_decode.py) and on a GPU.
"""

import numpy as np
from cases import Sizes
from hopper_cases import f32, i32

import memeff
from memeff import masks, scores

SPLIT = 512  # keys of a split of a cache of up to 16,384 keys


def filled(lengths, T: int = 1) -> dict:
    """Return the arguments of T queries at the end of caches that are filled to `lengths`."""
    lengths = i32(lengths)
    return dict(is_causal=True, q_offset=lengths - T, key_value_seq_lengths=lengths)


IDS = np.sort(np.random.default_rng(1).integers(0, 4, (2, 1040))).astype(np.int32)
SLOPES = np.array([0.5, 0.1, 0.02, 0.0], f32)


def tree_of_drafts(batch, head, q_pos, k_pos, first):
    """Let drafts see the cache before position `first`, and their own ancestors: 0 1 2, and 0 3."""
    last_branch = q_pos == first + 3
    hidden = last_branch & (k_pos > first) & (k_pos < first + 3)
    return (k_pos <= q_pos) & ~hidden


# Sizes and keyword arguments. Two key heads share an item where there are two, and four of 64.
CASES = {
    "ragged": (Sizes(B=4, T=1, S=1200, K=2, G=2, H=64, D=64), filled([0, 1, 640, 1200])),
    "drafts": (
        Sizes(B=2, T=5, S=1056, K=1, G=3, H=128, D=128),
        filled([1003, 6], T=5)
        | dict(logits_soft_cap=3.0, sinks=np.array([1.5, -np.inf, 200], f32)),
    ),
    "four heads": (Sizes(B=2, T=2, S=704, K=4, G=2, H=64, D=64), filled([704, 511], T=2)),
    "three heads": (Sizes(B=2, T=1, S=704, K=3, G=1, H=64, D=128), filled([703, 64])),
    "window": (
        Sizes(B=2, T=3, S=2000, K=2, G=2, H=128, D=64),
        dict(local_window_size=(700, 0), q_offset=i32([1900, 20])),
    ),
    "window, both sides": (
        Sizes(B=1, T=7, S=1600, K=1, G=1, H=64, D=64),
        dict(local_window_size=(40, 600), q_offset=500, scale=-0.2),
    ),
    "all keys": (Sizes(B=1, T=3, S=600, K=1, G=4, H=64, D=64), {}),
    "two tiles of rows": (Sizes(B=2, T=20, S=600, K=1, G=5, H=64, D=64), filled([600, 333], T=20)),
    "queries end": (
        Sizes(B=3, T=4, S=600, K=1, G=2, H=64, D=64),
        dict(query_seq_lengths=i32([4, 2, 0]), is_causal=True, q_offset=i32([300, 500, 100])),
    ),
    "keys masked": (
        Sizes(B=2, T=2, S=1304, K=1, G=2, H=128, D=64),
        dict(mask=np.stack([np.arange(1304) >= 900, np.arange(1304) % 7 < 3])[:, None, None]),
    ),
    "queries masked": (
        Sizes(B=1, T=3, S=304, K=2, G=1, H=64, D=64),
        dict(mask=np.array([True, False, True])[:, None]),
    ),
    "segments": (
        Sizes(B=2, T=4, S=1040, K=1, G=2, H=64, D=64),
        dict(query_segment_ids=i32([[0, 1, 2, 9]] * 2), key_value_segment_ids=IDS),
    ),
}


def positions(T: int, S: int, offset) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of queries [B, 1, T, 1] and of keys [S]."""
    offset = np.reshape(offset, (-1, 1, 1, 1))
    return offset + np.arange(T)[:, None], np.arange(S)


def alibi_bias() -> np.ndarray:
    """Return what the score of "alibi" adds."""
    q_pos, k_pos = positions(3, 1040, [997, 67])
    return -SLOPES[:, None, None] * np.abs(q_pos - k_pos).astype(f32)


# Calls with functions: sizes, keyword arguments, and what the oracle takes instead of the function.
FUNCTIONS = {
    "alibi": (
        Sizes(B=2, T=3, S=1040, K=2, G=2, H=64, D=64),
        filled([1000, 70], T=3) | dict(score_fn=scores.alibi(SLOPES)),
        dict(bias=alibi_bias()),
    ),
    "documents": (
        Sizes(B=2, T=3, S=1040, K=1, G=3, H=64, D=64),
        dict(mask_fn=masks.documents(IDS[:, 500:503], IDS)),
        dict(mask=(IDS[:, 500:503, None] == IDS[:, None])[:, None]),
    ),
    "tree of drafts": (
        Sizes(B=1, T=4, S=1040, K=1, G=2, H=128, D=128),
        dict(mask_fn=memeff.Mask(tree_of_drafts, np.int32(1030)), q_offset=1030),
        dict(mask=tree_of_drafts(0, 0, *positions(4, 1040, 1030), 1030)),
    ),
}

# Calls of which the keys also lie in pages: sizes, lengths, options, tokens of a page.
PAGED = {
    "pages of 64": (Sizes(B=2, T=2, S=704, K=2, G=2, H=64, D=64), [700, 300], {}, 64),
    "pages of 24": (Sizes(B=2, T=1, S=600, K=1, G=3, H=64, D=128), [600, 77], {}, 24),
    "pages of 8": (
        Sizes(B=1, T=3, S=600, K=2, G=1, H=128, D=128),
        [590],
        dict(local_window_size=(200, 0), logits_soft_cap=3.0),
        8,
    ),
    "pages of 256": (
        Sizes(B=3, T=1, S=1024, K=4, G=2, H=64, D=64),
        [1024, 0, 513],
        dict(sinks=np.linspace(-1, 1, 8, dtype=f32)),
        256,
    ),
}


def in_pages(page: int, lengths, *arrays: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Return `arrays` [B, S, ...] in shuffled pages, and their table.

    Pages that nobody has are NaN, and so are tokens behind a sequence's end.
    """
    B, S = arrays[0].shape[:2]
    n = S // page
    table = np.random.default_rng(page).permutation(B * n + 3)[: B * n].reshape(B, n)
    hidden = np.arange(S) >= np.reshape(lengths, (-1, 1))
    pools = []
    for x in arrays:
        pool = np.full((B * n + 3, page, *x.shape[2:]), np.nan, x.dtype)
        visible = np.where(np.expand_dims(hidden, (2, 3)), np.nan, x).astype(x.dtype)
        pool[table] = visible.reshape(B, n, page, *x.shape[2:])
        pools.append(pool)
    return pools, np.where(np.arange(n) * page < np.reshape(lengths, (-1, 1)), i32(table), -1)
