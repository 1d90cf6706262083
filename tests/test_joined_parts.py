"""Parts of a ring that run as one call of kernels, which read chunks of tokens in place, and calls
without lse.

The chunked path stands in for the kernels, on copies of what they would read.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ml_dtypes import bfloat16
from sequences import (
    D,
    H,
    assert_near,
    both_modes,
    gradients,
    make_call,
    mesh_of,
    run_sharded,
    run_whole,
)

from memeff.chunked import implementation as chunked
from memeff.sequence import ring
from memeff.sequence.implementation import Sharded
from memeff.sequence.messages import ALIGNMENT, Parcel, open_parcels, pass_on
from memeff.sequence.parts import Chunk, Shards
from memeff.sequence.terms import Term, shorten
from memeff.softmax import Lse, merge_partial

CHUNK = (5, 4)
pytestmark = pytest.mark.eight_devices
slow = pytest.mark.slow


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
        ("causal", 2, False),
        pytest.param("causal", 2, True, marks=slow),
        pytest.param("causal, soft cap", 8, False, marks=slow),
    ],
    ids=["segments", "two", "two, fused", "eight"],
    indirect=["kernels"],
)
def test_numbers_of_one_device(kind, devices, kernels, monkeypatch):
    """Out, lse, and every gradient; tangents, which run part by part."""
    if devices == 2:  # as in 16 bits, where a sum would take more bytes than its terms
        monkeypatch.setattr(ring, "shorten", lambda terms: terms)
    call = make_call(kind, devices)
    rng = np.random.default_rng(1)
    call.arrays["value"] = rng.standard_normal(call.arrays["key"].shape).astype(np.float32)
    compute = both_modes if devices == 8 else gradients
    expected = run_whole(call, compute, chunk_size=CHUNK)
    assert kernels.calls == 0 and D != H
    found = run_sharded(call, compute, devices, "zigzag", "ring", chunk_size=CHUNK)
    assert_near(found, expected, devices)
    assert kernels.calls >= 4  # steps of one part and of two, forward and backward


@pytest.mark.slow
def test_values_of_another_size_run_in_parts(kernels):
    """Keys and values of different sizes do not stack."""
    call = make_call("causal", 2)
    found = run_sharded(call, gradients, 2, "zigzag", "ring", chunk_size=CHUNK)
    assert_near(found, run_whole(call, gradients, chunk_size=CHUNK), 2)
    assert kernels.calls == 0


def test_a_parcel_keeps_all_bits():
    """Arrays of several dtypes and of odd sizes, sent on once, and again with another first one."""
    rng = np.random.default_rng(0)
    dtypes = (np.float32, bfloat16), (bfloat16, np.int32, bfloat16), (np.float64, np.int8)
    shapes = (3, 2), (7,), ()
    send_on = functools.partial(pass_on, Shards("seq", "contiguous"), True)

    def send(tree, other):
        parcel, sent = send_on(tree, 1)
        assert isinstance(parcel, Parcel)
        arrived = open_parcels(parcel)
        renewed = [other, *arrived[1:]]
        parcel, sent_on = send_on(renewed, 1, came=parcel, renewed=1)
        return sent, arrived, sent_on, open_parcels(parcel)

    for group in dtypes:
        raw = [rng.bytes(3 * 6 * 8) for _ in group]
        tree = [
            np.frombuffer(x, dtype)[: 3 * math.prod(shape)].reshape(3, *shape)
            for x, dtype, shape in zip(raw, group, shapes, strict=False)
        ]
        other = tree[0][::-1]
        run = jax.shard_map(send, mesh=mesh_of(3), in_specs=P("seq"), out_specs=P("seq"))
        with jax.enable_x64(True):
            found = jax.jit(run)(tree, other)
        sent_on = [other, *(np.roll(x, 1, axis=0) for x in tree[1:])]
        moved = [[np.roll(x, 1, axis=0) for x in arrays] for arrays in (tree, sent_on)]
        expected = tree, moved[0], sent_on, moved[1]
        for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            assert np.asarray(y).tobytes() == np.asarray(x).tobytes()


def test_arrays_of_a_parcel_are_where_kernels_can_read_them():
    """XLA lets kernels read their part of a message in place, but they refuse some addresses."""
    arrays = np.ones((3, 5), bfloat16), np.int32([[1], [2], [3]]), np.ones((3, 2, 64), bfloat16)

    def send(tree):
        parcel, _ = pass_on(Shards("seq", "contiguous"), True, tree, 1)
        return open_parcels(parcel)

    run = jax.shard_map(send, mesh=mesh_of(3), in_specs=P("seq"), out_specs=P("seq"))
    text = jax.jit(run).lower(arrays).as_text()
    starts = [int(x) for x in re.findall(r"stablehlo.slice %\S+ \[(\d+):\d+\]", text)]
    assert len(starts) >= len(arrays) and any(starts)
    assert all(2 * start % ALIGNMENT == 0 for start in starts), starts


def test_terms_with_the_fewest_bytes():
    """Two halves in bfloat16 have half the bytes of their sum in float32."""
    values = jnp.arange(8, dtype=jnp.bfloat16).reshape(2, 2, 2)  # two parts of two tokens
    late = Term((Chunk(1, 2), Chunk(jnp.int32(0), 2)), values)
    (kept,) = shorten([late])
    assert kept is late
    halves = [Term((Chunk(number, 2),), values[:1]) for number in range(2)]
    assert shorten(halves) == halves
    (summed,) = shorten([late, late])
    assert summed.value.dtype == jnp.float32
    np.testing.assert_array_equal(summed.value[0, :, 0], [8, 12, 0, 4])
    assert shorten([]) == []


class ComputesNoLseForNobody:
    """Stand in for kernels, which return no lse where nobody reads it."""

    asked: list = []

    @classmethod
    def forward(cls, problem, schedule, operands, lse_for):
        cls.asked.append(lse_for)
        out, lse = chunked.forward(problem, schedule, operands, lse_for)
        return out, lse if lse_for else None

    backward = chunked.backward


@slow
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
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
