"""Parts of a ring that run as one call of kernels, which read chunks of tokens in place.

The chunked path stands in for the kernels, on copies of what they would read.
"""

import jax
import numpy as np
import pytest
from sequences import D, H, assert_near, both_modes, gradients, make_call, run_sharded, run_whole

from memeff.chunked import implementation as chunked
from memeff.sequence.implementation import Sharded

CHUNK = (5, 4)
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_device():
    """Override the fixture of conftest.py, because these tests have eight devices."""


class ReadsInPlace:
    """Stand in for kernels: an implementation whose calls name their batch entries."""

    calls = 0

    @staticmethod
    def reads_entries(problem, operands) -> bool:
        return True

    @classmethod
    def forward(cls, problem, schedule, operands, lse_for):
        cls.calls += 1
        return chunked.forward(problem, schedule, copy_entries(operands), lse_for)

    @classmethod
    def backward(cls, problem, schedule, operands, *rows):
        cls.calls += 1
        of_queries = jax.tree.map(lambda x: x[operands.entries.query], rows)
        return chunked.backward(problem, schedule, copy_entries(operands), *of_queries)


def copy_entries(operands):
    """Return the operands with a copy of each batch entry that the call reads."""
    arrays = (x[entry] for x, entry in zip(operands[:3], operands.entries, strict=True))
    query, key, value = arrays
    return operands._replace(query=query, key=key, value=value, entries=None)


@pytest.fixture
def kernels(monkeypatch):
    """Let every part run on the stand-in, and return it."""
    choose = Sharded.choose

    def choose_stand_in(self, parts, here):
        chosen, here = choose(self, parts, here)
        if here.entries is None:  # of a tangent
            return chosen, here
        return chosen._replace(module=ReadsInPlace), here

    monkeypatch.setattr(Sharded, "choose", choose_stand_in)
    monkeypatch.setattr(ReadsInPlace, "calls", 0)
    jax.clear_caches()  # of calls that were traced without the stand-in
    yield ReadsInPlace
    jax.clear_caches()


@pytest.mark.parametrize(
    "kind, devices",
    [
        ("causal, segments, sinks", 3),
        pytest.param("causal", 2, marks=slow),
        pytest.param("causal, soft cap", 8, marks=slow),
    ],
    ids=["segments", "two", "eight"],
)
def test_numbers_of_one_device(kind, devices, kernels):
    """Out, lse, and every gradient; tangents, which run part by part."""
    call = make_call(kind, devices)
    rng = np.random.default_rng(1)
    call.arrays["value"] = rng.standard_normal(call.arrays["key"].shape).astype(np.float32)
    compute = gradients if devices == 3 else both_modes
    expected = run_whole(call, compute, chunk_size=CHUNK)
    assert kernels.calls == 0 and D != H
    found = run_sharded(call, compute, devices, "zigzag", "ring", chunk_size=CHUNK)
    assert_near(found, expected, devices)
    assert kernels.calls >= 4  # stops of one part and of two, forward and backward


def test_values_of_another_size_run_in_parts(kernels):
    """Keys and values of different sizes do not stack."""
    call = make_call("causal", 2)
    found = run_sharded(call, gradients, 2, "zigzag", "ring", chunk_size=CHUNK)
    assert_near(found, run_whole(call, gradients, chunk_size=CHUNK), 2)
    assert kernels.calls == 0
