"""Calls on a mesh that only their arrays know, as jax.make_mesh gives it without jax.set_mesh."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from jax.sharding import PartitionSpec as P
from sharded import (
    AUTO,
    BOTH,
    CHUNK,
    EXPLICIT,
    KINDS,
    MESHES,
    N,
    S,
    T,
    arrays,
    assert_near,
    assert_sharded_as,
    both_ways,
    expected,
    f32,
    mesh_context,
    mesh_of,
    put,
    put_extra,
    second_order,
)

import memeff
from memeff import dot_product_attention

pytestmark = pytest.mark.eight_devices


@pytest.mark.parametrize("implementation", few(["xla", "reference"], ["xla"]))
def test_mesh_that_is_not_set(implementation):
    """The smallest example works as most would write it: eager and jitted, forward and gradient."""
    mesh = jax.make_mesh((4,), ("data",))
    args = tuple(put(mesh, x, P("data")) for x in arrays())
    static = dict(is_causal=True, implementation=implementation)
    run = functools.partial(both_ways, static, extra={})
    for call in (run, jax.jit(run)):
        results = call(*args)
        assert_near(results, expected("causal"))
        assert_sharded_as(results, args)


def explicit_mesh(kind):
    """Return a mesh, and on it the arguments of `both_ways`, sharded over batch and heads."""
    axes, spec = MESHES["batch and heads"]
    mesh = mesh_of(EXPLICIT, **axes)
    args = [put(mesh, x, P(*spec[: x.ndim])) for x in arrays()]
    _, extra = KINDS[kind]
    return mesh, (*args, put_extra(mesh, extra, spec[0]))


def result_specs(function, *args) -> list[tuple]:
    """Return the specs of the results' types, which are known without a compilation."""
    specs = []
    for x in jax.tree.leaves(jax.eval_shape(function, *args)):
        spec = tuple(x.sharding.spec)
        specs.append(spec + (None,) * (x.ndim - len(spec)))
    return specs


LIKE_LSE = tuple(BOTH)[:3]
LIKE_QUERY = tuple(BOTH)
STACKED = (None, *BOTH)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_every_kind_has_types_on_a_mesh_that_is_not_set(implementation):
    """Out and lse are typed as the query is, and gradients as what they belong to.

    The calls are traced, not compiled.
    """
    for kind, (static, _) in KINDS.items():
        _, args = explicit_mesh(kind)
        static = {**static, "implementation": implementation}
        specs = result_specs(functools.partial(both_ways, static), *args)
        assert specs == [LIKE_QUERY, LIKE_LSE, LIKE_QUERY, LIKE_QUERY, LIKE_QUERY], kind


# ---- functions around a call


def _lse_alone(q, k, v):
    """Return the gradient of lse, which has no cotangent for out, nor any for value."""

    def lse(q, k):
        _, lse = dot_product_attention(q, k, v, chunk_size=CHUNK, return_residual=True)
        return lse

    _, pull = jax.vjp(lse, q, k)
    return pull(lse(q, k))


def _mixed_second(q, k, v):
    def out(q, k, v):
        return dot_product_attention(q, k, v, chunk_size=CHUNK)

    def to_value(q):
        _, pull = jax.vjp(functools.partial(out, q, k), v)
        return pull(out(q, k, v))[0]

    _, pull = jax.vjp(to_value, q)
    return pull(v)


def _statistics(q, k, v):
    def call(*args):
        return tuple(memeff.attention_statistics(*args, is_causal=True, chunk_size=CHUNK))

    statistics, pull = jax.vjp(call, q, k, v)
    return *statistics, *pull(statistics)


def _key_mass(q, k, v):
    def call(q, k):
        return memeff.key_mass(q, k, chunk_size=CHUNK)

    mass, pull = jax.vjp(call, q, k)
    return mass, *pull(mass)


def _over_queries(q, k, v):
    def call(q):
        return dot_product_attention(q, k, v, is_causal=True, chunk_size=CHUNK)

    out, pull = jax.vjp(jax.vmap(call), jnp.stack([q, 2 * q]))
    return out, pull(out)


def _arrays_without_a_mesh(q, k, v):
    rng = np.random.default_rng(2)
    bias = rng.standard_normal((N, 1, S)).astype(f32)
    mask = rng.random((1, 1, T, S)) < 0.7
    sinks = np.ones(N, f32)

    def call(q, bias, sinks):
        return dot_product_attention(q, k, v, bias, mask, sinks=sinks, chunk_size=CHUNK)

    out, pull = jax.vjp(call, q, jnp.asarray(bias), jnp.asarray(sinks))
    return out, *pull(out)


RESULT_SPECS = {
    _lse_alone: [LIKE_QUERY, LIKE_QUERY],
    _mixed_second: [LIKE_QUERY],
    _statistics: [LIKE_QUERY, *[LIKE_LSE] * 4, *[LIKE_QUERY] * 3],
    _key_mass: [LIKE_LSE, LIKE_QUERY, LIKE_QUERY],
    _over_queries: [STACKED, STACKED],
}


def test_other_functions_have_types_on_a_mesh_that_is_not_set():
    _, args = explicit_mesh("plain")
    for function, wanted in RESULT_SPECS.items():
        assert result_specs(function, *args[:3]) == wanted, function.__name__


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("function", [*RESULT_SPECS, _arrays_without_a_mesh])
def test_other_functions_have_the_numbers_of_one_device(function, jit):
    _, args = explicit_mesh("plain")
    wanted = jax.tree.leaves(jax.jit(function)(*arrays()[:3]))
    run = jax.jit(function) if jit else function
    results = jax.tree.leaves(run(*args[:3]))
    assert_near(results, [np.asarray(x) for x in wanted], 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("function", [both_ways, second_order])
@pytest.mark.parametrize("kind", KINDS)
def test_eager_calls(kind, function):
    """Calls without jit around them have the numbers of one device, on a mesh that is not set."""
    _, args = explicit_mesh(kind)
    static, _ = KINDS[kind]
    results = function(static, *args)
    assert_near(results, expected(kind, function=function), 2e-5)


# ---- other meshes, and memeff's other functions


@pytest.mark.slow
@pytest.mark.parametrize("is_set", [True, False], ids=["set", "not set"])
@pytest.mark.parametrize(
    "axis_types", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)], ids=["Explicit, Auto", "Auto, Explicit"]
)
def test_mesh_of_both_types(axis_types, is_set):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=axis_types)
    args = tuple(put(mesh, x, P(*BOTH[: x.ndim])) for x in arrays())
    with mesh_context(mesh, is_set):
        results = jax.jit(functools.partial(both_ways, dict(is_causal=True), extra={}))(*args)
    assert_near(results, expected("causal"))
    assert_sharded_as(results, args)


@pytest.mark.slow
def test_mesh_of_one_device():
    mesh = jax.make_mesh((1,), ("x",))
    args = tuple(put(mesh, x, P("x")) for x in arrays())
    results = jax.jit(functools.partial(both_ways, dict(is_causal=True), extra={}))(*args)
    assert_near(results, expected("causal"))


@pytest.mark.slow
@pytest.mark.parametrize("is_set", [True, False], ids=["set", "not set"])
def test_audit(is_set):
    mesh, (q, k, v, *_) = explicit_mesh("plain")
    with mesh_context(mesh, is_set):
        assert memeff.audit("xla", q, k, v, is_causal=True, samples=4).ok


def test_modules_and_switches_on_a_mesh_that_is_not_set():
    linen = pytest.importorskip("flax.linen")
    nnx = pytest.importorskip("flax.nnx")
    from memeff import nn

    mesh = jax.make_mesh((4,), ("data",))
    whole = np.random.default_rng(0).standard_normal((4, 9, 8)).astype(f32)
    sharded = put(mesh, whole, P("data"))

    def of_linen(module, switch=contextlib.nullcontext):
        params = jax.jit(module.init)(jax.random.key(0), whole)
        with switch():
            return [module.apply(params, x) for x in (sharded, whole)]

    def of_nnx(package, switch=None):
        module = package.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
        if switch is not None:
            switch(module)
        return [module(x) for x in (sharded, whole)]

    def of_jax_nn(x):
        heads = x.reshape(4, 9, 2, 4)
        return jax.nn.dot_product_attention(heads, heads, heads)

    with nn.switch_jax_nn() as calls:
        by_switch = [of_jax_nn(x) for x in (sharded, whole)]
    assert len(calls) == 2
    results = {
        "linen": of_linen(nn.linen.MultiHeadDotProductAttention(num_heads=2)),
        "switch_linen": of_linen(linen.MultiHeadDotProductAttention(num_heads=2), nn.switch_linen),
        "nnx": of_nnx(nn.nnx),
        "switch_nnx": of_nnx(nnx, nn.switch_nnx),
        "switch_jax_nn": by_switch,
    }
    for name, (actual, wanted) in results.items():
        assert actual.sharding.spec[0] == "data", name
        assert_near([actual], [np.asarray(wanted)])
