"""Parts of a ring that run as one call of kernels, which read chunks of tokens in place, and calls
without lse.

The chunked path stands in for the kernels, on copies of what they would read.
"""

import dataclasses

import jax
import numpy as np
import pytest
from sequences import D, H, assert_near, both_modes, gradients, make_call, run_sharded, run_whole

from memeff.chunked import implementation as chunked
from memeff.sequence.implementation import Sharded
from memeff.softmax import Lse, merge_partial

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
    def forward(cls, problem, schedule, operands, lse_for, carried=None):
        cls.calls += 1
        out, lse = chunked.forward(problem, schedule, copy_entries(operands), lse_for)
        if carried is None:
            return out, lse
        (before,), lse_before = carried
        return merge_partial([before, out], [Lse(lse_before, None), lse])

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
def kernels(monkeypatch, request):
    """Let every part run on the stand-in, and return it.

    Its parameter is True if the stand-in computes all gradients of a part at once.
    """
    choose = Sharded.choose

    def choose_stand_in(self, parts, here):
        chosen, here = choose(self, parts, here)
        if here.entries is None:  # of a tangent
            return chosen, here
        fused = getattr(request, "param", False)
        schedule = dataclasses.replace(chosen.schedule, fused_backward=fused)
        return chosen._replace(module=ReadsInPlace, schedule=schedule), here

    monkeypatch.setattr(Sharded, "choose", choose_stand_in)
    monkeypatch.setattr(ReadsInPlace, "calls", 0)
    jax.clear_caches()  # of calls that were traced without the stand-in
    yield ReadsInPlace
    jax.clear_caches()


@pytest.mark.parametrize(
    "kind, devices, kernels",
    [
        ("causal, segments, sinks", 3, False),
        pytest.param("causal", 2, True, marks=slow),
        pytest.param("causal, soft cap", 8, False, marks=slow),
    ],
    ids=["segments", "two, fused", "eight"],
    indirect=["kernels"],
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


class ComputesNoLseForNobody:
    """Stand in for kernels, which return no lse where nobody reads it."""

    asked: list = []

    @classmethod
    def forward(cls, problem, schedule, operands, lse_for):
        cls.asked.append(lse_for)
        out, lse = chunked.forward(problem, schedule, operands, lse_for)
        return out, lse if lse_for else None

    backward = chunked.backward


@pytest.mark.parametrize("strategy", [pytest.param("ring", marks=slow), "all_gather"])
def test_out_alone(strategy, monkeypatch):
    """Out and its gradient where nobody reads lse, but for the gradient."""
    choose = Sharded.choose

    def choose_stand_in(self, parts, here):
        chosen, here = choose(self, parts, here)
        return chosen._replace(module=ComputesNoLseForNobody), here

    def out_and_gradient(attend, arrays, cotangents, tangents):
        def out_of(query):
            return attend(**arrays | {"query": query}, return_residual=False)

        out, pull = jax.vjp(out_of, arrays["query"])
        return {"out": out_of(arrays["query"]), "d query": pull(cotangents["out"])[0]}

    monkeypatch.setattr(Sharded, "choose", choose_stand_in)
    monkeypatch.setattr(ComputesNoLseForNobody, "asked", [])
    jax.clear_caches()
    call = make_call("causal", 2)
    found = run_sharded(call, out_and_gradient, 2, "zigzag", strategy, chunk_size=CHUNK)
    jax.clear_caches()
    assert_near(found, run_whole(call, out_and_gradient, chunk_size=CHUNK), 2)
    assert (None in ComputesNoLseForNobody.asked) == (strategy == "all_gather")
