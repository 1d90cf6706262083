"""`memeff.replace_attention` in loops, branches, calls and meshes, and in long programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import SingleDeviceSharding
from replaced_checks import (
    find,
    plain,
    qkv,
    qkv_of_one_head,
    replace,
    result_and_gradients,
    run_replaced,
)
from small_calls import assert_close, temp_bytes

import memeff
from memeff.rewrite import axes
from memeff.rewrite.scope import Search


def test_branches_of_platforms():
    """A branch for other devices may not compile here."""

    def for_tpu(q, k, v):
        return pl.pallas_call(lambda q, o: None, out_shape=q)(q)

    def attend(q, k, v):
        return lax.platform_dependent(q, k, v, tpu=for_tpu, default=plain)

    out = run_replaced(attend, *qkv())
    np.testing.assert_allclose(out, jax.jit(plain)(*qkv()), atol=1e-6)


def test_jax_checks_the_programs_of_replaced_attention():
    """The parts of a program that are left as written have names of no other program."""
    with jax.enable_checks(True):
        actual = result_and_gradients(replace(plain, strict=True), qkv())
    expected = result_and_gradients(plain, qkv())
    assert_close(actual, expected, atol=1e-5)


def test_shard_map():
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("batch")
    attend = jax.shard_map(plain, mesh=mesh, in_specs=spec, out_specs=spec)
    assert "causal" in str(find(attend, *qkv()))
    out = run_replaced(attend, *qkv())
    np.testing.assert_allclose(out, jax.jit(plain)(*qkv()), atol=1e-6)


def test_shard_map_with_positions_of_devices():
    """A mask compares positions that vary over devices with others that do not."""
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec(None, "seq")

    def attend(q, k, v):
        k, v = (lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
        positions = lax.axis_index("seq") * q.shape[1] + jnp.arange(q.shape[1])
        visible = positions[:, None] >= jnp.arange(k.shape[1])
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(visible, logits, -1e9))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)
    out = run_replaced(sharded, *qkv())
    np.testing.assert_allclose(out, jax.jit(plain)(*qkv()), atol=1e-6)


def test_numbers_among_the_results_keep_their_weak_type():
    out, number = replace(lambda *arrays: (plain(*arrays), 2.0), strict=True)(*qkv())
    assert number.weak_type and (number * out.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_arrays_of_weak_type_among_the_results():
    """They are closed over: an array, and a number that an outer jit traces."""
    array = jax.jit(lambda: lax.broadcast(2.0, (3,)))()
    assert array.weak_type

    @jax.jit
    def run(number):
        return replace(lambda *arrays: (plain(*arrays), array, number))(*qkv())[1:]

    array_out, number_out = run(2.0)
    assert array_out.weak_type and array_out.shape == (3,)
    assert number_out.weak_type and number_out == 2


def layers(count):
    """Return a function of count layers, written out one after the other."""

    def model(x, weights):
        for w in weights:
            q, k, v = jnp.split((x @ w).reshape(1, -1, 2, 12), 3, -1)
            x = x + plain(q, k, v).reshape(x.shape)
        return x

    weights = [jnp.ones((8, 24))] * count
    return model, jnp.ones((256, 8)), weights


def test_cost_of_tracing():
    """Each equation is visited once, and the call of equal layers is traced once."""
    model, x, weights = layers(24)
    jaxpr = jax.make_jaxpr(model)(x, weights)
    search = Search(jaxpr, 0)
    scope = search.scope(jaxpr)
    assert len(scope.replaced) == 24
    assert len({r.recipe for r in scope.replacements}) == 1
    assert search.visited == len(scope.graph.equations)

    def body(x, w):
        return model(x, [w]), None

    def scanned(x, weights):
        x, _ = lax.scan(body, x, jnp.stack(weights))
        return lax.scan(body, x, jnp.stack(weights))[0]

    twice = jax.make_jaxpr(scanned)(x, weights)
    search = Search(twice, 0)
    search.scope(twice)
    single = jax.make_jaxpr(lambda x, w: lax.scan(body, x, jnp.stack(w))[0])(x, weights)
    once = Search(single, 0)
    once.scope(single)
    assert search.visited < 1.9 * once.visited


STEPS = {  # of x, which a program repeats where it computes the array of this name
    "scale": lambda x: x * jnp.sin(x),
    "logits": lambda x: x * jnp.sin(x),
    "sum of logits": lambda x: x + x,
    "bias": lambda x: x * jnp.sin(x),
    "positions": lambda x: x + x % 7,
    "mask": lambda x: x | ~x & jnp.roll(x, 1, 0),
    "mask of positions": lambda x: x | ~x & (lax.iota("int32", 16) < 3),
    "maximum": lambda x: jnp.maximum(x, x * 0.9),
    "sum": lambda x: x * jnp.sin(x),
    "logarithm": lambda x: x + x,
}


def repeating(name, times):
    """Return attention that applies a step to one of its arrays many times, one after the other."""

    def repeat(where, x):
        for _ in range(times if where == name else 0):
            x = STEPS[where](x)
        return x

    def attend(q, k, v):
        distance = repeat("positions", jnp.arange(16)[:, None] - jnp.arange(16))
        visible = repeat("mask", repeat("mask of positions", distance >= 0))
        s = repeat("sum of logits", repeat("logits", q @ k.T)) * repeat("scale", q[0, 0])
        s = s + repeat("bias", distance * 0.1)
        s = jnp.where(visible, s, -1e9)
        if name == "logarithm":
            return jnp.exp(s - repeat("logarithm", jax.nn.logsumexp(s, -1, keepdims=True))) @ v
        e = jnp.exp(s - repeat("maximum", s.max(-1, keepdims=True)))
        total = repeat("sum", e.sum(-1, keepdims=True))
        return e / jnp.where(total == 0, 1, total) @ v

    return attend


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("times", [40, 400])
def test_programs_that_use_a_value_twice_or_are_long_are_searched(name, times):
    """A search that followed each use would visit 2^40 values, and recursion ends at 1,000."""
    jaxpr = jax.make_jaxpr(repeating(name, times))(*qkv_of_one_head())
    scope = Search(jaxpr, 0).scope(jaxpr)
    assert scope.replaced or scope.left


def test_the_search_of_a_chain_visits_each_equation_a_few_times(monkeypatch):
    visited = []

    def counted(value, known_number=axes.known_number):
        visited.append(value)
        return known_number(value)

    monkeypatch.setattr(axes, "known_number", counted)
    counts = []
    for length in (100, 200):

        def attend(x, length=length):
            rows = jnp.arange(16.0)[:, None]
            for n in range(length):
                rows = rows + jnp.float32(n)
            return jax.nn.softmax(jnp.where(jnp.arange(16) < rows, x @ x.T, -1e9)) @ x

        visited.clear()
        assert find(attend, qkv_of_one_head()[0]).replaced
        counts.append(len(visited))
    assert counts[1] < 2.2 * counts[0]


@pytest.mark.once
def test_memory_grows_with_the_length():
    def temp(length):
        model, x, weights = layers(2)
        x = jax.ShapeDtypeStruct((length, 8), x.dtype)
        loss = lambda x, w: memeff.replace_attention(model, strict=True)(x, w).sum()
        return temp_bytes(jax.grad(loss), (x, weights))

    assert temp(8192) <= 2.2 * temp(4096)


def test_loops_of_unknown_length_branches_and_jit_with_shardings():
    """A product in the condition of a loop is one in its body, too."""

    def attend(q, k, v):
        return jax.nn.softmax(q @ k.T / 2) @ v

    def loop(q, k, v):
        def goes_on(carry):
            return (jnp.abs(attend(carry[1], k, v)).max() > 1e-2) & (carry[0] < 3)

        return lax.while_loop(goes_on, lambda c: (c[0] + 1, attend(c[1], k, v)), (0, q))[1]

    def program(q, k, v, branch):
        attend_on_device = jax.jit(attend, out_shardings=SingleDeviceSharding(jax.devices()[0]))
        branches = [attend, loop, lambda q, k, v: attend_on_device(2 * q, k, v)]
        return lax.switch(branch, branches, q, k, v)

    arrays = qkv_of_one_head()
    report = find(program, *arrays, jnp.int32(0))
    assert (len(report.replaced), report.left) == (4, ())
    run = replace(program, strict=True)
    for branch in (1, 2):
        expected = jax.jit(program)(*arrays, jnp.int32(branch))
        np.testing.assert_allclose(run(*arrays, jnp.int32(branch)), expected, atol=1e-6)


def test_a_vmapped_loop_whose_entries_stop_one_after_the_other():
    def attend(x, times):
        def goes_on(carry):
            return carry[0] < times

        def step(carry):
            return carry[0] + 1, jax.nn.softmax(carry[1] @ x.T) @ x

        return lax.while_loop(goes_on, step, (0, x))

    arrays = jnp.stack(qkv_of_one_head()[:2]), jnp.array([3, 1])
    mapped = jax.vmap(attend)
    for actual, expected in zip(
        run_replaced(mapped, *arrays), jax.jit(mapped)(*arrays), strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=1e-6)
