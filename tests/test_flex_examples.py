"""Compare FlexAttention's public examples with the oracle: out, lse and every gradient in float64.

The examples are read from the table of docs/scores-and-masks.md. flex_truths.py types each of them
a second time.
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
from flex_truths import ARRAYS, TRUTHS, B, D, H, K, N
from small_calls import assert_same

import memeff
from memeff import Mask, Score, masks, scores

PAGE = (pathlib.Path(__file__).parents[1] / "docs/scores-and-masks.md").read_text()


class Row(NamedTuple):
    """A line of the page's table."""

    name: str
    code: str
    learns: bool  # whether the params learn


def read_rows() -> list[Row]:
    _, section = PAGE.split("## FlexAttention's examples", 1)
    section, *_ = section.split("\n## ")
    rows = []
    for name, code, learns in re.findall(r"^\| (.+?) \| `(.+)` \| (yes)? ?\|$", section, re.M):
        rows.append(Row(name, code.replace(r"\|", "|"), learns == "yes"))
    return rows


ROWS = read_rows()


def test_every_row_has_a_truth():
    assert len(ROWS) == len(TRUTHS) == 28
    assert [row.learns for row in ROWS] == [truth.gradient is not None for truth in TRUTHS]


# ---- running an example


def read_functions(number: int) -> tuple[Any, Any]:
    """Return score_fn and mask_fn of a row's code, as pytrees or None."""
    names = dict(Mask=Mask, Score=Score, masks=masks, scores=scores, jnp=jnp)
    names |= jax.tree.map(jnp.asarray, ARRAYS)
    arguments = eval(f"dict({ROWS[number].code})", names)
    assert arguments.keys() <= {"score_fn", "mask_fn"}
    score = arguments.get("score_fn")
    mask = arguments.get("mask_fn")
    if score is not None and not isinstance(score, Score):
        score = Score(score)
    if mask is not None and not isinstance(mask, Mask):
        mask = Mask(mask)
    return score, mask


def operands(size):
    """Return query, key, value, dout and dlse."""
    T, S = size
    rng = np.random.default_rng(T)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, D), (B, T, N, D), (B, T, N)
    return tuple(rng.standard_normal(shape) for shape in shapes)


def attend(args, score, mask):
    """Return (out, lse), the gradients of query, key and value, and those of the score's params."""
    q, k, v, dout, dlse = args
    attention = functools.partial(
        memeff.dot_product_attention, mask_fn=mask, return_residual=True, chunk_size=16
    )

    def call(score, q, k, v):
        return attention(q, k, v, score_fn=score)

    out_and_lse, pull = jax.vjp(call, score, q, k, v)
    score_grads, *qkv_grads = pull((dout, dlse))
    params = [x for x in jax.tree.leaves(score_grads) if x.dtype != jax.dtypes.float0]
    return out_and_lse, qkv_grads, params


def run_example(number: int):
    """Return the results with the mask, the results with its block mask, and the block mask.

    The last two are None without a mask. One program computes both results, because compiling is
    what takes time.
    """
    T, S = TRUTHS[number].size
    with jax.enable_x64(True):
        score, mask = read_functions(number)
        block = None
        both_masks = [mask]
        if mask is not None:
            block = memeff.block_mask(mask, T, S, batch=B, heads=N, block_size=8)
            both_masks.append(block)

        @jax.jit
        def run(args, score, both_masks):
            return [attend(args, score, mask) for mask in both_masks]

        results = run(operands((T, S)), score, both_masks)
        results = jax.tree.map(np.asarray, results)
    in_blocks = None if block is None else results[1]
    return results[0], in_blocks, block


# ---- the truth


def masks_and_biases(truth):
    """Return who sees whom, and the biases, both [B, N, T, S]."""
    seen = np.zeros((B, N, *truth.size), bool)
    bias = np.zeros(seen.shape)
    for pair in np.ndindex(seen.shape):
        seen[pair] = truth.sees(*pair)
        bias[pair] = truth.bias(*pair)
    return seen, bias


def expected_results(truth, seen, bias):
    """Return what `attend` returns, from the oracle."""
    q, k, v, dout, dlse = operands(truth.size)
    options = dict(bias=bias, mask=seen, logits_soft_cap=truth.cap)
    out_and_lse = oracle.attention(q, k, v, **options)
    grads = oracle.gradients(q, k, v, dout=dout, dlse=dlse, **options)
    qkv_grads = [grads["query"], grads["key"], grads["value"]]
    params = []
    if truth.gradient is not None:
        params = jax.tree.leaves(truth.gradient(grads["bias"], grads))
    return out_and_lse, qkv_grads, params


def hidden_share(seen) -> float:
    """Return the share of tiles of 8 x 8 in which no pair is seen in any batch entry and head."""
    T, S = seen.shape[2:]
    hidden = []
    for i in range(0, T, 8):
        for j in range(0, S, 8):
            hidden.append(not seen[:, :, i : i + 8, j : j + 8].any())
    return np.mean(hidden)


FAST = (
    2,
    3,
    7,
    9,
    15,
    18,
    22,
    23,
    24,
    26,
)  # no two are of one kind; other tests have simpler kinds
IDS = [re.split(",| \\[", row.name)[0] for row in ROWS]


@pytest.mark.parametrize("number", few(range(len(TRUTHS)), FAST), ids=IDS)
@pytest.mark.once
def test_example(number):
    truth = TRUTHS[number]
    seen, bias = masks_and_biases(truth)
    expected = expected_results(truth, seen, bias)
    actual, in_blocks, block = run_example(number)
    assert_same(actual, expected, 1e-12)
    assert (block is None) == (in_blocks is None) == seen.all()
    if block is not None:
        assert_same(in_blocks, actual, 1e-12)
        assert math.isclose(block.sparsity, hidden_share(seen))
