"""Calls on eight CPU devices (see conftest.py), and what holds for them. This module has no test.

run, args = program("causal", AxisType.Auto, True, "batch")    # compiled, and placed on the mesh
results = run(*args)
assert_near(results, expected("causal"))    # the numbers of one device
assert_sharded_as(results, args)
assert_silent(run.as_text(), "causal")      # nothing is sent between devices
"""

import contextlib
import functools
import itertools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_calls import assert_same

import memeff
from memeff import dot_product_attention, masks, scores, transforms

f32 = np.float32
B, T, S, N, H, D = 8, 37, 41, 8, 3, 5
CHUNK = (8, 12)


# ---- calls


def _draw():
    """Return {kind: (static, extra)}, keyword arguments that are static and that are arrays."""
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((N, 1, S)).astype(f32)
    segments = {
        "query_segment_ids": np.sort(rng.integers(0, 3, (B, T))).astype(np.int32),
        "key_value_segment_ids": np.sort(rng.integers(0, 3, (B, S))).astype(np.int32),
    }
    mask = rng.random((B, 1, T, S)) < 0.7
    sinks = rng.standard_normal(N).astype(f32)
    functions = dict(
        score_fn=scores.alibi(np.linspace(0.1, 0.4, N, dtype=f32)),
        mask_fn=masks.causal() & ~masks.dilated(3),
        qk_transform=transforms.rms_norm(np.ones(H, f32), np.full(H, 2, f32)),
    )
    block_mask = memeff.block_mask(masks.causal() & ~masks.dilated(3), T, S)
    lengths = np.arange(3, 3 + 5 * B, 5).astype(np.int32)
    return {
        "plain": ({}, {}),
        "causal": (dict(is_causal=True), {}),
        "window": (dict(local_window_size=(9, 4)), {}),
        "segments": ({}, segments),
        "mask of each": ({}, dict(mask=mask)),
        "scale array": ({}, dict(scale=np.array(0.3, f32))),
        "shared bias": ({}, dict(bias=bias)),
        "dropout": (
            dict(dropout_rate=0.3, broadcast_dropout=False),
            dict(dropout_rng=np.array([1, 2], np.uint32)),
        ),
        "functions": (functions, {}),
        "lengths": ({}, dict(key_value_seq_lengths=lengths)),
        "offset": (dict(is_causal=True), dict(q_offset=np.arange(B).astype(np.int32))),
        "sinks": (dict(is_causal=True), dict(sinks=sinks)),
        "block mask": (dict(mask_fn=block_mask), {}),
    }


KINDS = _draw()
# leading dim B
BATCHED = (
    "query_segment_ids",
    "key_value_segment_ids",
    "mask",
    "key_value_seq_lengths",
    "q_offset",
)


def arrays(K=N):
    """Return query, key, value and the cotangents of out and lse."""
    rng = np.random.default_rng(1)
    shapes = {
        "query": (B, T, N, H),
        "key": (B, S, K, H),
        "value": (B, S, K, D),
        "dout": (B, T, N, D),
        "dlse": (B, T, N),
    }
    return tuple(rng.standard_normal(shape).astype(f32) for shape in shapes.values())


def both_ways(static, q, k, v, dout, dlse, extra):
    """Return out, lse, dq, dk and dv."""

    def call(q, k, v):
        return dot_product_attention(
            q, k, v, **static, **extra, chunk_size=CHUNK, return_residual=True
        )

    results, pull = jax.vjp(call, q, k, v)
    return *results, *pull((dout, dlse))


def second_order(static, q, k, v, dout, dlse, extra):
    """Return tangents of the gradients along the operands, and the transpose at the operands."""

    def gradients(q, k, v):
        return both_ways(static, q, k, v, dout, dlse, extra)[2:]

    _, tangents = jax.jvp(gradients, (q, k, v), (q, k, v))
    _, pull = jax.vjp(gradients, q, k, v)
    return *tangents, *pull((q, k, v))


@functools.cache
def expected(kind: str, K: int = N, function=both_ways):
    """Return the results of one device."""
    static, extra = KINDS[kind]
    run = jax.jit(functools.partial(function, static))
    return jax.tree.map(np.asarray, run(*arrays(K), extra))


# ---- meshes

BATCH = P("x", None, None, None)
BOTH = P("x", None, "y", None)
MESHES = {
    "batch": (dict(x=8), BATCH),
    "batch and heads": (dict(x=4, y=2), BOTH),
    "heads": (dict(y=8), P(None, None, "y", None)),
}


def mesh_of(axis_type, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes))


def mesh_context(mesh, is_set: bool):
    """Return `jax.set_mesh`, or a context that does nothing: then arrays alone know their mesh."""
    return jax.set_mesh(mesh) if is_set else contextlib.nullcontext()


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def specs_of(extra, batch_axis):
    """Return the specs of array arguments by name."""
    specs = {}
    for name, x in extra.items():
        rest = [None] * (x.ndim - 1)
        specs[name] = P(batch_axis, *rest) if name in BATCHED else P()
    return specs


def put_extra(mesh, extra, batch_axis):
    """Place array arguments, given by name, on the mesh."""
    specs = specs_of(extra, batch_axis)
    return {name: put(mesh, x, specs[name]) for name, x in extra.items()}


def program(kind, axis_type, is_set, where, K=N, spec_kv=None, function=both_ways):
    """Return the compiled function, and its arguments placed on the mesh `MESHES[where]`."""
    axes, spec = MESHES[where]
    spec_kv = spec if spec_kv is None else spec_kv
    mesh = mesh_of(axis_type, **axes)
    static, extra = KINDS[kind]
    specs = (spec, spec_kv, spec_kv, spec, P(*spec[:3]))
    placed = [put(mesh, x, spec) for x, spec in zip(arrays(K), specs, strict=True)]
    args = (*placed, put_extra(mesh, extra, spec[0]))
    run = jax.jit(functools.partial(function, static))
    with mesh_context(mesh, is_set):
        return run.lower(*args).compile(), args


# ---- what holds for sharded calls


def assert_near(actual, wanted, eps=5e-6):
    """Check several arrays by `assert_same`."""
    assert_same([*actual], [*wanted], eps)


def devices_by_dim(x) -> list[float]:
    """Return over how many devices each of the first three dims is sharded."""
    shape = x.shape[:3]
    shard_shape = x.sharding.shard_shape(x.shape)[:3]
    return [size / part for size, part in zip(shape, shard_shape, strict=True)]


def assert_sharded_as(results, args):
    """Check that out and lse are sharded as query, and gradients as their operands."""
    q, k, v = args[:3]
    for x, like in zip(results, (q, q, q, k, v), strict=True):
        assert devices_by_dim(x) == devices_by_dim(like), f"{x.sharding} is not as {like.sharding}"


COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "collective-permute",
    "all-to-all",
    "reduce-scatter",
    "collective-broadcast",
)


def collectives(text: str) -> list[str]:
    """Return the lines of HLO that send to other devices."""
    names = "|".join(COLLECTIVES)
    lines = re.findall(rf"^.*= .*\b(?:{names})(?:-start)?\(.*$", text, re.M)
    return [line.strip()[:120] for line in lines]


SCALAR_MAX = ("lengths", "offset")  # bounds of the walk are shared by the batch: one int32 each


def assert_silent(text: str, kind: str):
    """Check that a program sends nothing to other devices, but for `SCALAR_MAX`."""
    lines = collectives(text)
    if kind in SCALAR_MAX:
        lines = [line for line in lines if not re.search(r"= s32\[\] all-reduce\(", line)]
    assert not lines, "\n".join(lines)


# ---- parameters of the tests

slow = pytest.mark.slow
AUTO = AxisType.Auto
EXPLICIT = AxisType.Explicit
ALL_WAYS = {
    "Auto, set": (AUTO, True),
    "Auto": (AUTO, False),
    "Explicit, set": (EXPLICIT, True),
    "Explicit": (EXPLICIT, False),
}
FAST_WAYS = ("Auto, set", "Explicit")
FAST_KINDS = ("causal", "shared bias", "dropout", "lengths", "functions")


def way_param(name: str):
    """Return a parameter (axis_type, is_set)."""
    return pytest.param(*ALL_WAYS[name], id=name, marks=[] if name in FAST_WAYS else slow)


# Equations are traced within the mesh in either case, so one case of each kind of mesh is fast.
EACH_MESH = pytest.mark.parametrize("axis_type, is_set", [way_param(name) for name in ALL_WAYS])


def each_mesh_and_kind(kinds, fast):
    """Return the mark of a test of every way and kind; only the pairs in `fast` are fast."""
    params = []
    for way, kind in itertools.product(ALL_WAYS, kinds):
        marks = [] if (way, kind) in fast else slow
        params.append(pytest.param(*ALL_WAYS[way], kind, id=f"{way}-{kind}", marks=marks))
    return pytest.mark.parametrize("axis_type, is_set, kind", params)
