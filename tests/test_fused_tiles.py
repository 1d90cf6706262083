"""Test how the fused backward cuts a call: into blocks, over devices, and into merged tiles.

A block is a part of the batch and of the key heads (memeff/chunked/loop.py). A merged tile is a
rectangle of several whole tiles (memeff/chunked/schedule.py).
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_calls import assert_close
from test_halves import PROBLEMS, G, K, compiled_forward, draw, gradients, make_schedule

from memeff import dot_product_attention, tile_sizes
from memeff.chunked.schedule import tile_groups, tiles_by_mask
from memeff.problem import LogitParams, Operands, Problem, Schedule

pytestmark = pytest.mark.once


def new_causal_call():
    """Return a function from (q, k, v, dout) to out and gradients.

    The function is new, because traces depend on the tiles that a test sets.
    """

    def call(q, k, v, dout):
        attend = functools.partial(dot_product_attention, is_causal=True)
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    return call


# ---- blocks and devices


@pytest.mark.parametrize(
    "dtype, pattern, block",
    [
        ("bfloat16", "causal merged", (2, 1)),
        pytest.param("bfloat16", "full", (1, 1), marks=pytest.mark.slow),
        pytest.param("float32", "causal merged", (1, 2), marks=pytest.mark.slow),
        pytest.param("bfloat16", "window", (1, 1), marks=pytest.mark.slow),
        pytest.param("float32", "full", (2, 1), marks=pytest.mark.slow),
    ],
)
def test_block_by_block(dtype, pattern, block):
    """Blocks give the results of the whole call, also with sinks."""
    atol = 2e-2 if dtype == "bfloat16" else 1e-5
    arrays = draw("ordinary", dtype)
    whole = gradients(pattern, True)(*arrays)
    assert_close(gradients(pattern, True, block)(*arrays), whole, atol=atol)
    sinks = jnp.linspace(-1.0, 3.0, K * G)
    operands = Operands(*arrays[:3], LogitParams(sinks=sinks))
    schedule = make_schedule(pattern)
    in_blocks = dataclasses.replace(schedule, head_block=block)
    by_blocks = compiled_forward(PROBLEMS[pattern], in_blocks)(operands)
    whole = compiled_forward(PROBLEMS[pattern], schedule)(operands)
    assert_close(by_blocks, whole, atol=atol)


@pytest.mark.slow
def test_blocks_under_shard_map(monkeypatch):
    """Each device visits blocks under shard_map, and the results have the bits of one device."""
    schedule = Schedule((16, 16), (16, 16), (16, 16), max_merged_logits=2048, head_block=(1, 1))
    monkeypatch.setattr(tile_sizes, "default_schedule", lambda *args: schedule)
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(AxisType.Explicit,) * 2)
    spec = PartitionSpec("batch", None, "heads")
    whole = jax.random.normal(jax.random.key(0), (4, 4, 70, 2, 16), jnp.bfloat16)
    call = new_causal_call()
    expected = jax.jit(call)(*whole)
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x in whole]
        results = jax.jit(jax.shard_map(call, in_specs=spec, out_specs=spec))(*arrays)
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.float32(x), np.float32(y))


@pytest.mark.parametrize("types", few([AxisType.Auto, AxisType.Explicit], [AxisType.Explicit]))
def test_sharded_batch_and_heads_are_not_gathered(types, monkeypatch):
    """Devices exchange only the answers to two checks, over the two axes of the mesh."""
    schedule = Schedule((16, 16), (16, 16), (16, 16), max_merged_logits=2048)
    monkeypatch.setattr(tile_sizes, "default_schedule", lambda *args: schedule)
    mesh = jax.make_mesh((4, 2), ("batch", "heads"), axis_types=(types, types))
    spec = PartitionSpec("batch", None, "heads")
    whole = [jax.random.normal(jax.random.key(i), (8, 70, 4, 16), jnp.bfloat16) for i in range(4)]
    call = jax.jit(new_causal_call())
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x in whole]
        program = call.lower(*arrays).compile()
        results = program(*arrays)
    text = program.as_text()
    assert not re.search("all-gather|all-to-all|collective-permute", text)
    exchanged = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    scalars = ", ".join(shapes.strip("()") for shapes in exchanged).split(", ")
    assert len(scalars) == 4, exchanged
    assert all(re.match(r"(pred|s32|u32|s8|u8)\[\]", scalar) for scalar in scalars), exchanged
    assert_close(results, call(*whole), atol=0.05)


# ---- merged tiles


@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("most", [1, 2048, 10_000, 2**30])
@pytest.mark.parametrize(
    "left, right, offset", [(None, 0, 0), (None, 0, 37), (40, 0, 0), (None, None, 0), (20, 200, -3)]
)
def test_merged_tiles_cover_what_tiles_cover_once(left, right, offset, most, along):
    """Merged tiles cover each pair of the visible tiles once, and have at most `most` pairs.

    A few whole tiles may go with the masked ones.
    """
    T = 350
    S = 307
    p = Problem(left=left, right=right, q_offset=offset)
    schedule = Schedule((32, 32), max_merged_logits=most)
    operands = Operands(
        jax.ShapeDtypeStruct((1, T, 1, 8), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, S, 1, 8), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, S, 1, 8), jnp.bfloat16),
    )
    # Each counts how often a pair is covered, by whether the tile is masked.
    covered = {True: np.zeros((T, S), int), False: np.zeros((T, S), int)}
    expected = {True: np.zeros((T, S), int), False: np.zeros((T, S), int)}
    largest = 0
    for (masked, t, c), starts in tile_groups(p, schedule, operands, along):
        inside = max(starts[:, 0]) + t <= T and max(starts[:, 1]) + c <= S
        assert masked or inside
        for i, j in starts:
            covered[masked][i : i + t, j : j + c] += 1
        largest = max(largest, 0 if masked else t * c)
    tiles = tiles_by_mask(p, (32, 32), operands)
    for pairs, masked in zip(tiles, (False, True), strict=True):
        for i, j in pairs * 32:
            expected[masked][i : i + 32, j : j + 32] += 1
    np.testing.assert_array_equal(covered[True] + covered[False], expected[True] + expected[False])
    assert np.all(covered[False] <= expected[False])
    assert largest <= max(most, 32 * 32)
