"""Calls of the Hopper kernels that read their batch entries from anywhere in larger arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from gpu_calls import skip_without_kernels
from hopper_cases import bf16, f32, interpreted, needs_kernels
from hopper_stand_ins import accept_all_calls

from memeff.pallas.hopper import implementation
from memeff.pallas.hopper.fused import row_deltas
from memeff.pallas.hopper.layout import pad_operand
from memeff.pallas.hopper.parts import count_parts
from memeff.problem import Entries, Operands, Problem, Schedule
from memeff.softmax import Lse

pytestmark = needs_kernels
ENTRIES = Entries(*map(jnp.int32, ([1, 0, 1], [2, 2, 0], [2, 1, 0])))
RESULTS = "out", "lse", "dq", "dk", "dv"


def arrays_of(count: int, tokens: int, heads: int, seed: int, dtype=bf16, H: int = 64):
    """Return random numbers [count, tokens, heads, H]."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(count, tokens, heads, H)), dtype)


def of_rows(x):
    """Return x [B, T, N, D] as rows [B, K, G, T, D] of one key head."""
    return x.transpose(0, 2, 1, 3)[:, None]


def results(problem, schedule, operands, rows):
    """Return out and lse of a call, and its gradients from out, lse and cotangents in `rows`."""
    out, lse = implementation.forward(problem, schedule, operands)
    dq, dk, dv, _ = implementation.backward(problem, schedule, operands, *rows)
    assert (dv is None) == (schedule.joined_gradients and not schedule.fused_backward)
    if dv is None:
        dk, dv = jnp.split(dk, 2, axis=2)
    return out, lse.high, dq, dk, dv


def both_ways(T: int, S: int, H: int, fused: bool):
    """Return the results of a call whose arrays hold the entries, and of one that names them.

    In the second, the gradient of the keys is computed first, and kept in one array.
    """
    query = arrays_of(2, T, 2, 0, H=H)
    keys = arrays_of(3, S, 1, 1, H=H), arrays_of(3, S, 1, 2, H=H)
    out, dout = (of_rows(arrays_of(2, T, 2, seed, H=H)) for seed in (3, 4))
    lse, dlse = (arrays_of(2, T, 2, seed, f32)[..., 0].swapaxes(1, 2)[:, None] for seed in (5, 6))
    rows = out, Lse(lse + 4, None), dout, dlse
    problem = Problem(right=0, q_offset=S - T, scale=0.1)
    schedule = Schedule(fused_backward=fused)
    in_order = dataclasses.replace(schedule, keys_first=True, joined_gradients=True)

    @jax.jit
    def both(operands, rows):
        def take(x, entries):
            return jax.tree.map(lambda x: x[entries], x)

        query = ENTRIES.query
        copied = Operands(*map(take, operands[:3], ENTRIES))
        in_place = operands._replace(entries=ENTRIES)
        expected = results(problem, schedule, copied, take(rows, query))
        return expected, results(problem, in_order, in_place, rows)

    return jax.tree.map(np.asarray, both(Operands(query, *keys), rows))


def assert_same(expected, found, fused: bool):
    """Check that the bits are the same.

    The fused backward adds dq in any order, so its numbers may round to their neighbours.
    """
    for name, x, y in zip(RESULTS, expected, found, strict=True):
        assert np.abs(x.astype(f32)).max() > 0.01, name
        if fused and name == "dq":
            np.testing.assert_allclose(y.astype(f32), x.astype(f32), rtol=2**-7, atol=1e-3)
        else:
            np.testing.assert_array_equal(y, x, err_msg=name)


@pytest.mark.parametrize("fused", few((False, True), (False,)))
def test_entries_are_those_of_a_copy(fused):
    with interpreted():
        assert_same(*both_ways(72, 72, 64, fused), fused)


@pytest.mark.slow
def test_divided_groups_whose_gradients_are_joined(monkeypatch):
    monkeypatch.setattr("memeff.pallas.hopper.backward_key.group_parts", lambda sizes, *_: sizes.G)
    with interpreted():
        assert_same(*both_ways(80, 72, 64, False), False)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("H", [32, 40, 64, 128])
def test_entries_on_a_gpu(H, fused):
    skip_without_kernels()
    assert_same(*both_ways(1000, 1500, H, fused), fused)


@pytest.mark.parametrize("D, dtype", [(24, bf16), (64, bf16), (40, f32), (128, f32)])
def test_deltas_of_rows(D, dtype):
    """Heads below 64 are read in place, and numbers in float32 have two parts."""
    T = 72
    out, dout = (arrays_of(2, T, 3, seed, dtype, D) for seed in (0, 1))
    dlse = arrays_of(2, T, 3, 2, f32)[..., 0].swapaxes(1, 2)
    width = -(-D // 64) * 64
    padded = jnp.pad(dlse, [(0, 0), (0, 0), (0, 128 - T)])
    with interpreted():
        arrays = pad_operand(out, width), pad_operand(dout, width)
        found = row_deltas((T, T), *arrays, padded, count_parts(dtype))
    products = np.asarray(out, np.float64) * np.asarray(dout, np.float64)
    expected = dlse - products.sum(axis=-1).swapaxes(1, 2)
    np.testing.assert_allclose(found[..., :T], expected, atol=2e-4)


def copy_first(problem, lengths, arrays, scalars, want_lse, tiling, carried):
    """Stand in for the forward kernel: return the query plus the first row of its value entry."""
    query, _, value = arrays
    first = value[scalars.value_entries, :1]
    return (query[scalars.query_entries] + first,), None


def test_vmap_moves_entries(monkeypatch):
    """Each call of a vmap reads its own arrays, mapped or shared."""
    from memeff.pallas.hopper import calls

    monkeypatch.setattr(calls, "attend", copy_first)
    accept_all_calls(monkeypatch)
    monkeypatch.setattr("memeff.pallas.partitioning.may_be_sharded", lambda: False)
    query = arrays_of(4, 64, 1, 0).reshape(2, 2, 64, 1, 64)
    key = arrays_of(3, 64, 1, 1)

    def call(query):
        operands = Operands(query, key, key, entries=ENTRIES)
        out, _ = implementation.forward(Problem(), Schedule(), operands, None)
        return out[:, 0, 0]

    expected = query[:, :, :, 0][:, ENTRIES.query] + key[:, :1, 0][ENTRIES.value]
    np.testing.assert_array_equal(jax.vmap(call)(query), expected)
