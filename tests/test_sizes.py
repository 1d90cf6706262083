"""Numbers at awkward lengths and head sizes, against the oracle."""

import functools

import numpy as np
import pytest
from cases import Sizes, qkv
from conftest import assert_truth, few, run_calls

pytestmark = pytest.mark.once

LENGTHS = (1, 2, 3, 17, 97, 128, 257, 1000, 1025)
HEAD_SIZES = (1, 3, 8, 40, 59, 64, 72, 96, 128, 256)
HEADS = ((1, 1), (4, 4), (4, 2), (6, 1))  # N, K


def _sized(i: int, T: int, S: int, H: int):
    """Return the name of the i-th call of a grid, and the call.

    D, heads, mask and chunks take turns.
    """
    N, K = HEADS[i % 4]
    D = (5, H, 24, 1)[i % 4]
    z = Sizes(B=1 + i % 2, T=T, S=S, K=K, G=N // K, H=H, D=D)
    kwargs = {
        "is_causal": i % 3 == 0,
        "chunk_size": (None, (128, 96), 200)[i % 3],
    }
    args = qkv(np.random.default_rng(i), np.float32, z)
    return f"sizes{z}", (args, kwargs)


def _sample():
    """Return calls that have every length and head size once, each with another partner."""
    calls = []
    for i, H in enumerate(HEAD_SIZES):
        T = LENGTHS[i % 9]
        S = LENGTHS[(4 * i + 3 + i // 9) % 9]
        calls.append(_sized(i, T, S, H))
    return dict(calls)


SAMPLE = _sample()


@functools.cache
def _run_each_second(first):
    return run_calls({name: SAMPLE[name] for name in list(SAMPLE)[first::2]})


@pytest.mark.parametrize("i", few(range(10), range(0, 10, 2)))
def test_sizes(i):
    name = list(SAMPLE)[i]
    assert_truth(_run_each_second(i % 2)[name], name, *SAMPLE[name])


@pytest.mark.slow
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("S", LENGTHS)
def test_all_sizes(T, S):
    offset = LENGTHS.index(T) + LENGTHS.index(S)
    calls = dict(_sized(offset + i, T, S, H) for i, H in enumerate(HEAD_SIZES))
    results = run_calls(calls)
    for name, call in calls.items():
        assert_truth(results[name], name, *call)
