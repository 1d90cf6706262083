"""Bias and mask in every shape that broadcasts."""

import functools
import itertools

import numpy as np
import pytest
from cases import Sizes, qkv
from conftest import assert_truth, few, run_calls

pytestmark = pytest.mark.once

f32 = np.float32
PATTERNS = list(itertools.product((True, False), repeat=4))
SMALL = Sizes(B=2, T=11, S=13, K=3, G=2, H=3, D=4)
FULL = (SMALL.B, SMALL.N, SMALL.T, SMALL.S)
FEWER_DIMS = (FULL[1:], FULL[2:], FULL[3:], (), (SMALL.N, 1, 1), (1, SMALL.S), (SMALL.T, 1))
BATCH_SHAPES = (  # leading dims, and the shape of a bias
    ((), (6, 11, 13)),
    ((3, 2), (3, 1, 1, 11, 13)),
    ((3, 2), (2, 6, 1, 13)),
)


def _shape(pattern):
    """Return the full shape with 1 where the pattern is False."""
    return tuple(size if keep else 1 for size, keep in zip(FULL, pattern, strict=True))


def _broadcast_shapes():
    """Return the shapes of a bias and of a mask, by name. Their patterns differ."""
    shapes = {}
    for i, pattern in enumerate(PATTERNS):
        bias = _shape(pattern)
        mask = _shape(PATTERNS[(5 * i + 3) % 16])
        shapes[str(bias)] = bias, mask
    for i, bias in enumerate(FEWER_DIMS):
        mask = FEWER_DIMS[(2 * i + 1) % len(FEWER_DIMS)]
        shapes[str(bias)] = bias, mask
    shapes["more dims"] = (1, *FULL), (1, 1, 1, *FULL[2:])
    return shapes


def _broadcast_calls():
    calls = {}
    for i, (name, (bias, mask)) in enumerate(_broadcast_shapes().items()):
        rng = np.random.default_rng(i)
        kwargs = {
            "bias": rng.standard_normal(bias).astype(f32),
            "mask": rng.random(mask) < 0.7,
            "chunk_size": (4, 5),
        }
        calls[name] = qkv(rng, f32, SMALL), kwargs
    for leads, bias in BATCH_SHAPES:
        rng = np.random.default_rng(len(calls))
        z = SMALL._replace(B=int(np.prod(leads)), leads=leads)
        kwargs = {
            "bias": rng.standard_normal(bias).astype(f32),
            "mask": rng.random(bias[-2:]) < 0.7,
        }
        calls[f"{leads} {bias}"] = qkv(rng, f32, z), kwargs
    return calls


BROADCAST = _broadcast_calls()


@functools.cache
def _run_broadcast(third: int):
    """Return the results of every third call, compiled as one program."""
    names = list(BROADCAST)[third::3]
    return run_calls({name: BROADCAST[name] for name in names})


# One third, because that is one program. In it each dim of a bias is full, and is 1.
FAST = list(BROADCAST)[1::3]


@pytest.mark.parametrize("name", few(BROADCAST, FAST))
def test_bias_and_mask_of_every_broadcast_pattern(name):
    args, kwargs = BROADCAST[name]
    third = list(BROADCAST).index(name) % 3
    result = _run_broadcast(third)[name]
    assert result.grads["bias"].shape == kwargs["bias"].shape
    assert_truth(result, name, args, kwargs)
