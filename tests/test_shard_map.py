"""Calls under jax.shard_map on eight CPU devices: each device runs its own call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded import (
    BOTH,
    CHUNK,
    EACH_MESH,
    FAST_KINDS,
    KINDS,
    MESHES,
    B,
    arrays,
    assert_near,
    both_ways,
    collectives,
    each_mesh_and_kind,
    expected,
    mesh_context,
    mesh_of,
    put,
    second_order,
    specs_of,
)
from small_calls import assert_close

from memeff import dot_product_attention
from memeff.autodiff import primitives

pytestmark = pytest.mark.eight_devices


def shard_mapped(function, mesh, is_set, in_specs, out_specs, args):
    """Return the function, compiled under shard_map with its checks on, and placed arguments."""

    def is_spec(x):
        return isinstance(x, P)

    def place(spec, x):
        return put(mesh, x, spec)

    args = jax.tree.map(place, in_specs, args, is_leaf=is_spec)
    with mesh_context(mesh, is_set):
        run = jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True
        )
        return jax.jit(run).lower(*args).compile(), args


def specs_of_call(extra, spec):
    """Return the specs of the arguments of `both_ways`."""
    return (spec, spec, spec, spec, P(*spec[:3]), specs_of(extra, spec[0]))


@pytest.mark.once
@each_mesh_and_kind(["causal", "shared bias", "lengths"], [("Auto, set", "causal")])
def test_second_order_in_shard_map(kind, axis_type, is_set):
    axes, spec = MESHES["batch" if kind == "shared bias" else "batch and heads"]
    static, extra = KINDS[kind]
    run, args = shard_mapped(
        functools.partial(second_order, static),
        mesh_of(axis_type, **axes),
        is_set,
        specs_of_call(extra, spec),
        (spec,) * 6,
        (*arrays(), extra),
    )
    assert not collectives(run.as_text())
    assert_near(run(*args), expected(kind, function=second_order), 2e-5)


@each_mesh_and_kind(
    [x for x in KINDS if x != "functions"],  # slopes of all heads: refused
    [*(("Auto, set", x) for x in FAST_KINDS), ("Explicit", "lengths")],
)
def test_shard_map(kind, axis_type, is_set):
    """Nothing at all is sent, not even the bounds, because each device runs its own call."""
    has_all_heads = kind in ("shared bias", "dropout", "sinks")  # and cannot be cut
    axes, spec = MESHES["batch" if has_all_heads else "batch and heads"]
    static, extra = KINDS[kind]
    run, args = shard_mapped(
        functools.partial(both_ways, static),
        mesh_of(axis_type, **axes),
        is_set,
        specs_of_call(extra, spec),
        (spec, P(*spec[:3]), spec, spec, spec),
        (*arrays(), extra),
    )
    results = run(*args)
    assert not collectives(run.as_text())
    wanted = expected(kind)
    if kind == "dropout":  # by coordinates within the device: there, the batch entry is the first
        results = [np.asarray(x)[:1] for x in results]
        wanted = [x[:1] for x in wanted]
    assert_near(results, wanted)


NAMED = dict(batch_axis="x", head_axis="y")


@each_mesh_and_kind(
    ["dropout", "functions", "causal"], [("Auto, set", "dropout"), ("Explicit", "functions")]
)
def test_names_of_axes_count_batch_and_heads_in_the_whole_call(kind, axis_type, is_set):
    axes, spec = MESHES["batch and heads"]
    static, extra = KINDS[kind]
    run, args = shard_mapped(
        functools.partial(both_ways, static | NAMED),
        mesh_of(axis_type, **axes),
        is_set,
        specs_of_call(extra, spec),
        (spec, P(*spec[:3]), spec, spec, spec),
        (*arrays(), extra),
    )
    assert not collectives(run.as_text())
    assert_near(run(*args), expected(kind))


def test_names_of_axes_that_do_not_shard_the_query():
    q, k, v = arrays()[:3]
    mesh = mesh_of(AxisType.Auto, x=4, y=2)
    specs = P("x"), P("x"), P("x")
    attend = jax.shard_map(
        functools.partial(dot_product_attention, **NAMED),
        mesh=mesh,
        in_specs=specs,
        out_specs=P("x"),
    )
    with pytest.raises(ValueError, match="query is the same on all devices of head_axis='y'"):
        attend(q, k, v)


@EACH_MESH
def test_shard_map_sums_gradients_of_what_is_shared(axis_type, is_set):
    """Gradients of arguments that all devices share are the sums over devices.

    These are keys, values, bias, scale and soft cap.
    """
    q, k, v, dout, _ = arrays(K=1)
    bias = KINDS["shared bias"][1]["bias"][:1]
    args = (q, k[:1], v[:1], bias, np.float32(0.3), np.float32(1.5), dout)

    def gradients(batch, q, k, v, bias, scale, cap, dout):
        """Return the gradients of a call whose whole batch has the keys and values."""

        def call(q, k, v, bias, scale, cap):
            return dot_product_attention(
                q, k, v, bias, scale=scale, logits_soft_cap=cap, is_causal=True, chunk_size=CHUNK
            )

        k = jnp.repeat(k, batch, 0)
        v = jnp.repeat(v, batch, 0)
        _, pull = jax.vjp(call, q, k, v, bias, scale, cap)
        dq, dk, dv, *rest = pull(dout)
        return [dq, dk.sum(0, keepdims=True), dv.sum(0, keepdims=True), *rest]

    wanted = jax.jit(functools.partial(gradients, B))(*args)
    shared = [P()] * 5
    run, args = shard_mapped(
        functools.partial(gradients, B // 4),
        mesh_of(axis_type, x=4, y=2),
        is_set,
        (BOTH, *shared, BOTH),
        [BOTH, *shared],
        args,
    )
    assert_near(run(*args), [np.asarray(x) for x in wanted], 1e-5)
    assert all("all-reduce" in line for line in collectives(run.as_text()))


def test_calls_of_a_vmap_sum_the_gradient_of_a_bias_that_they_and_the_devices_share(monkeypatch):
    """The calls run one after the other, so their sums are the carry of a loop over calls."""
    loops = []
    sum_in_groups = primitives._sum_in_groups

    def spy(*args):
        loops.append(args)
        return sum_in_groups(*args)

    monkeypatch.setattr(primitives, "_sum_in_groups", spy)
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 6, 2, 512, 2, 4)).astype(np.float32)
    bias = rng.standard_normal((1, 2, 512, 512)).astype(np.float32)

    def gradients(q, k, v, bias, dout, implementation="xla"):
        def calls(q, k, v, bias):
            attend = functools.partial(dot_product_attention, implementation=implementation)
            return jax.vmap(lambda *args: attend(*args, bias))(q, k, v)

        return jax.vjp(calls, q, k, v, bias)[1](dout)

    calls = P(None, "x")
    specs = calls, calls, calls, P(), calls
    args = q, k, v, bias, dout
    run, placed = shard_mapped(
        gradients, mesh_of(AxisType.Explicit, x=2), True, specs, specs[:4], args
    )
    assert loops
    wanted = jax.jit(functools.partial(gradients, implementation="reference"))(*args)
    assert_near(run(*placed), [np.asarray(x) for x in wanted], 2e-6)


def test_shard_map_without_check():
    axes, spec = MESHES["batch"]

    def causal(q, k, v):
        return dot_product_attention(q, k, v, is_causal=True, chunk_size=CHUNK)

    run = jax.shard_map(
        causal,
        mesh=mesh_of(AxisType.Auto, **axes),
        in_specs=(spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    assert_near([jax.jit(run)(*arrays()[:3])], expected("causal")[:1])


def test_no_queries_in_second_order():
    """Types say over which devices an array without numbers varies, in each order."""
    q, k, v, dout, _ = arrays()
    args = q[:, :0], k, v
    specs = (P("x"),) * 3

    def attend(*args):
        return dot_product_attention(*args, is_causal=True)

    attend = jax.shard_map(
        attend, mesh=mesh_of(AxisType.Auto, x=8), in_specs=specs, out_specs=P("x")
    )

    @jax.jit
    def second_order(*args):
        def gradients(*args):
            return jax.vjp(attend, *args)[1](dout[:, :0])

        found, pull = jax.vjp(gradients, *args)
        return pull(found)

    for found, like in zip(second_order(*args), args, strict=True):
        assert found.shape == like.shape and not np.any(found)


def test_the_form_for_gpus_sums_gradients_of_what_is_shared(monkeypatch):
    """They are those of one device in the form for CPUs, in float64.

    Terms of the gradient of `scale` cancel, so in float32 that form errs more than 1e-5 itself.
    """
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    spec = P("x", None, "y", None)
    x = np.sin(np.arange(2 * 128 * 2 * 16, dtype=np.float32)).reshape(2, 128, 2, 16)
    terms = {
        "scale": np.float32(0.3),
        "logits_soft_cap": np.float32(2.0),
        "bias": np.cos(np.arange(128 * 128, dtype=np.float32)).reshape(1, 1, 128, 128),
    }

    def attend(query, key, value, terms):
        call = functools.partial(dot_product_attention, query, key, value, chunk_size=64)
        return sum(call(**{name: x}) for name, x in terms.items())

    specs = spec, spec, spec, P()
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec)

    def gradients(attend, x, terms):
        def loss(terms, query, key, value):
            return (attend(query, key, value, terms) * np.cos(x)).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(terms, x, x, x)

    with jax.enable_x64(True):
        expected = gradients(attend, *jax.tree.map(np.float64, (x, terms)))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    with jax.set_mesh(mesh):
        found = gradients(sharded, x, terms)
    assert_close(found, expected, rtol=1e-5, atol=1e-5)
