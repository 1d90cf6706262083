"""FlexAttention's public examples, as docs/scores-and-masks.md writes them, against the oracle: out, lse, every gradient.

float64. The truth is typed here a second time: masks pair by pair, and of scores the bias that they add to the scaled logit,
whose gradient in the oracle gives that of the params by the chain rule.
"""

import functools
import math
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import few

import memeff
from memeff import Mask, Score, masks, scores

PAGE = (pathlib.Path(__file__).parents[1] / "docs/scores-and-masks.md").read_text()
B, N, K, H, D, R = 2, 6, 3, 5, 11, 4
CROSS, SELF, PIXELS = (37, 53), (41, 41), (35, 35)  # T, S
NOISED_AND_CLEAN = (36, 36)

rng = np.random.default_rng(0)
normal = lambda *shape: rng.standard_normal(shape)
# the last 5 is the first's
ids = np.stack([np.repeat([0, 1, 2, 3], [11, 1, 22, 7]), np.repeat([5, 0, 5], [17, 17, 7])])
ARRAYS: dict[str, Any] = dict(
    table=normal(N, 2 * 9 + 1),
    buckets=normal(32, N),
    slopes=rng.random(N),
    cap=np.float64(0.7),
    q_rope=normal(B, N, CROSS[0], R),
    k_rope=normal(B, CROSS[1], R),
    frequencies=rng.random(R),
    graph=dict(far=normal(N, 6), distance=rng.integers(0, 6, (B, *CROSS), np.int32)),
    lengths=np.array([5, 19]),
    ids=ids,
    prefix_of=np.where(
        (ids == 1) | (ids == 2), 0, np.where((ids == 0) & ([[False], [True]]), 5, -1)
    ),
    place=np.stack([[j - list(row).index(row[j]) for j in range(41)] for row in ids]),
    widths=np.array([0, 1, 3, 7, 20, 50]),
    last_image=np.stack([np.repeat([-1, 0, 1, 2], [4, 9, 9, 15]), np.repeat([0, 2], [20, 17])]),
    image_of_patch=np.repeat([0, 1, 2], [18, 18, 17]),
    spans=np.stack([np.repeat([-1, 0, -1, 1], [9, 13, 2, 17]), np.repeat([0, -1], [3, 38])]),
)
T5_BUCKETS = (
    {0: 0}
    | {n: n for n in range(1, 8)}
    | dict.fromkeys(range(8, 12), 8)
    | dict.fromkeys(range(12, 16), 9)
)
T5_BUCKETS |= (
    dict.fromkeys(range(16, 23), 10)
    | dict.fromkeys(range(23, 32), 11)
    | dict.fromkeys(range(32, 46), 12)
)
T5_BUCKETS |= dict.fromkeys(range(46, 64), 13)  # from 8 on, of 8 more up to 128: 8 * 16^(k / 8)


class Truth(NamedTuple):
    size: tuple[int, int] = SELF
    sees: Any = lambda b, n, i, j: True
    bias: Any = lambda b, n, i, j: 0.0
    pull: Any = None  # from dbias [B, N, T, S] and the oracle's gradients to those of the params
    cap: str | None = None


def to_table(where):
    """Of params that are added at the index `where` of (n, i, j)."""

    def pull(name, dbias, _):
        found = np.zeros(ARRAYS[name].shape)
        for b, n, i, j in np.ndindex(dbias.shape):
            found[where(n, i, j)] += dbias[b, n, i, j]
        return found

    return pull


def t5_at(n, i, j):
    return T5_BUCKETS[abs(i - j)] + (16 if j > i else 0), n


def shaw_at(n, i, j):
    return n, max(-9, min(9, j - i)) + 9


def of_slopes(dbias, _):
    T, S = dbias.shape[2:]
    return -(dbias * np.abs(np.arange(T)[:, None] - np.arange(S))).sum((0, 2, 3))


def of_frequencies(dbias, _):
    away = np.arange(CROSS[0])[:, None] - np.arange(CROSS[1])
    turn = -np.sin(away[..., None] * ARRAYS["frequencies"]) * away[..., None]
    return np.einsum("bnts,tsr,n->r", dbias, turn, N / (8 * np.arange(1, N + 1)))


def of_graph(dbias, _):
    distance = ARRAYS["graph"]["distance"]
    return np.stack([[dbias[:, n][distance == x].sum() for x in range(6)] for n in range(N)])


def of_rope(dbias, _):
    q, k = ARRAYS["q_rope"], ARRAYS["k_rope"]
    return np.einsum("bnts,bsr->bntr", dbias, k), np.einsum("bnts,bntr->bsr", dbias, q)


of = ARRAYS
same = lambda name: lambda b, n, i, j: of[name][b, i] == of[name][b, j]
alibi = lambda b, n, i, j: -of["slopes"][n] * abs(i - j)
TRUTHS = [  # in the order of the table
    Truth(CROSS),
    Truth(CROSS, bias=lambda b, n, i, j: i - j),
    Truth(
        CROSS,
        bias=lambda b, n, i, j: of["table"][shaw_at(n, i, j)],
        pull=functools.partial(to_table(shaw_at), "table"),
    ),
    Truth(
        CROSS,
        bias=lambda b, n, i, j: of["buckets"][t5_at(n, i, j)],
        pull=functools.partial(to_table(t5_at), "buckets"),
    ),
    Truth(CROSS, bias=alibi, pull=of_slopes),
    Truth(CROSS, pull=lambda dbias, grads: grads["logits_soft_cap"], cap="cap"),
    Truth(
        CROSS,
        bias=alibi,
        pull=lambda dbias, grads: (grads["logits_soft_cap"], of_slopes(dbias, grads)),
        cap="cap",
    ),
    Truth(CROSS, bias=lambda b, n, i, j: of["q_rope"][b, n, i] @ of["k_rope"][b, j], pull=of_rope),
    Truth(
        CROSS,
        bias=lambda b, n, i, j: np.cos((i - j) * of["frequencies"]).sum() / (8 * (n + 1) / N),
        pull=of_frequencies,
    ),
    Truth(
        CROSS,
        bias=lambda b, n, i, j: of["graph"]["far"][n, of["graph"]["distance"][b, i, j]],
        pull=of_graph,
    ),
    Truth(sees=lambda b, n, i, j: j <= i),
    Truth(sees=lambda b, n, i, j: j >= i),
    Truth(sees=lambda b, n, i, j: i - 7 <= j <= i),
    Truth(sees=lambda b, n, i, j: i - j in (0, 3, 6, 9, 12)),
    Truth(sees=lambda b, n, i, j: 0 <= i - j <= 3 or (i >= j and (i - j) % 5 == 0)),
    Truth(sees=lambda b, n, i, j: min(i, j) < 2 or abs(i - j) <= 4),
    Truth(sees=lambda b, n, i, j: j <= i or j < of["lengths"][b]),
    Truth(sees=same("ids")),
    Truth(sees=lambda b, n, i, j: same("ids")(b, n, i, j) and j <= i, bias=alibi, pull=of_slopes),
    Truth(sees=lambda b, n, i, j: same("ids")(b, n, i, j) and (j <= i or of["place"][b, j] < 3)),
    Truth(
        sees=lambda b, n, i, j: (
            of["prefix_of"][b, i] == ids[b, j] or (ids[b, i] == ids[b, j] and j <= i)
        )
    ),
    Truth(sees=lambda b, n, i, j: i - i % 8 <= j <= i),
    Truth(sees=lambda b, n, i, j: j < i - i % 8 + 8),
    Truth(NOISED_AND_CLEAN, sees=lambda b, n, i, j: diffuses(divmod(i, 18), divmod(j, 18))),
    Truth(sees=lambda b, n, i, j: abs(i - j) <= (0, 1, 3, 7, 20, 50)[n]),
    Truth(
        PIXELS,
        sees=lambda b, n, i, j: all(
            near(*x) for x in zip(divmod(i, 7), divmod(j, 7), (5, 7), strict=True)
        ),
    ),
    Truth(CROSS, sees=lambda b, n, i, j: of["last_image"][b, i] == of["image_of_patch"][j]),
    Truth(sees=lambda b, n, i, j: j <= i or same("spans")(b, n, i, j) and of["spans"][b, i] != -1),
]


def near(at, key, pixels):
    """Is `key` one of the three nearest to `at` in a row of pixels? Where that is at an end, of the three at that end."""
    first = min(max(at - 1, 0), pixels - 3)
    return first <= key < first + 3


def diffuses(query, key):
    """(0, place) of a noised token, (1, place) of a clean one, in blocks of 4 places (the last of 2)."""
    (clean, place), (key_clean, key_place) = query, key
    block, key_block = place // 4, key_place // 4
    if clean:
        return bool(key_clean) and key_block <= block
    return key_block < block if key_clean else key_block == block


def rows():
    """(name, code, whether params learn) of the page's table."""
    _, section = PAGE.split("## FlexAttention's examples", 1)
    found = re.findall(r"^\| (.+?) \| `(.+)` \| (yes)? ?\|$", section.split("\n## ")[0], re.M)
    return [(name, code.replace(r"\|", "|"), learns == "yes") for name, code, learns in found]


ROWS = rows()


def test_every_row_has_a_truth():
    assert len(ROWS) == len(TRUTHS) == 28
    assert [learns for _, _, learns in ROWS] == [truth.pull is not None for truth in TRUTHS]


def given(number: int) -> tuple[Any, Any]:
    """score_fn and mask_fn of the row's line, as pytrees or None."""
    names = dict(
        Mask=Mask,
        Score=Score,
        masks=masks,
        scores=scores,
        jnp=jnp,
        **jax.tree.map(jnp.asarray, ARRAYS),
    )
    found = eval(f"dict({ROWS[number][1]})", names)
    assert found.keys() <= {"score_fn", "mask_fn"}
    score, mask = (found.get(name) for name in ("score_fn", "mask_fn"))
    return (
        score if score is None or isinstance(score, Score) else Score(score),
        mask if mask is None or isinstance(mask, Mask) else Mask(mask),
    )


def operands(size):
    """query, key, value, dout and dlse."""
    rng = np.random.default_rng(size[0])
    T, S = size
    return tuple(
        rng.standard_normal(x)
        for x in ((B, T, N, H), (B, S, K, H), (B, S, K, D), (B, T, N, D), (B, T, N))
    )


def attend(args, score, mask):
    """out, lse; and their gradients to query, key, value and the score."""
    *qkv, dout, dlse = args
    how = dict(mask_fn=mask, return_residual=True, chunk_size=16)
    found, pull = jax.vjp(
        lambda score, *qkv: memeff.dot_product_attention(*qkv, score_fn=score, **how), score, *qkv
    )
    of_score, *of_qkv = pull((dout, dlse))
    return found, of_qkv, [x for x in jax.tree.leaves(of_score) if x.dtype != jax.dtypes.float0]


def computed(number: int):
    """With the mask, with its block mask or None, and that; in one program, for compiling is what takes time."""
    with jax.enable_x64(True):
        (score, mask), (T, S) = given(number), TRUTHS[number].size
        block = (
            None if mask is None else memeff.block_mask(mask, T, S, batch=B, heads=N, block_size=8)
        )

        both = [mask] if block is None else [mask, block]
        run = jax.jit(lambda args, score, both: [attend(args, score, mask) for mask in both])
        found = jax.tree.map(np.asarray, run(operands((T, S)), score, both))
    return found[0], None if block is None else found[1], block


FAST = (2, 3, 6, 7, 9, 13, 15, 16, 18, 22, 23, 24, 25, 26)  # what has no like among the others


@pytest.mark.parametrize(
    "number", few(range(len(TRUTHS)), FAST), ids=[re.split(",| \\[", name)[0] for name, *_ in ROWS]
)
def test_example(number):
    truth = TRUTHS[number]
    T, S = truth.size
    seen, bias = np.zeros((B, N, T, S), bool), np.zeros((B, N, T, S))
    for at in np.ndindex(seen.shape):
        seen[at], bias[at] = truth.sees(*at), truth.bias(*at)
    *qkv, dout, dlse = operands(truth.size)
    how = dict(bias=bias, mask=seen, logits_soft_cap=truth.cap and ARRAYS[truth.cap])
    grads = oracle.gradients(*qkv, dout=dout, dlse=dlse, **how)
    params = [] if truth.pull is None else jax.tree.leaves(truth.pull(grads["bias"], grads))
    expected = oracle.attention(*qkv, **how), [grads[n] for n in ("query", "key", "value")], params
    actual, in_blocks, block = computed(number)
    assert_close(actual, expected)
    assert (block is None) == (in_blocks is None) == seen.all()
    if block is not None:
        assert_close(in_blocks, actual)
        some = [
            seen[:, :, i : i + 8, j : j + 8].any() for i in range(0, T, 8) for j in range(0, S, 8)
        ]
        assert math.isclose(block.sparsity, 1 - np.mean(some))


def assert_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        size = np.abs(y, where=np.isfinite(y), out=np.zeros(np.shape(y))).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12 * max(1, size))
