"""Flax's modules, and switched models, compute the same with a sequence over two CPU devices."""

import functools
import re

import jax
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from flax_cases import LINEN, NNX, B, F, N, assert_equal, build, family, nnx_layer, uniform
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memeff
from memeff import nn, switch, transforms
from memeff.nn import switch as flax_switch

pytestmark = [pytest.mark.once, pytest.mark.eight_devices]
slow = pytest.mark.slow

DEVICES = 2
T = 16
ROWS = P(None, "seq")
ZIGZAG = {"sequence_axis": "seq", "sequence_layout": "zigzag"}
rng = np.random.default_rng(0)
X = rng.standard_normal((B, T, F)).astype(np.float32)
DOUT = rng.standard_normal((B, T, F)).astype(np.float32)


def make_mesh(kind=AxisType.Auto) -> Mesh:
    return Mesh(np.array(jax.devices()[:DEVICES]), ("seq",), axis_types=(kind,))


def put(mesh, x, spec=ROWS):
    """Place the arrays of a pytree on a mesh."""
    return jax.device_put(x, NamedSharding(mesh, spec))


def zigzag(*arrays):
    """Reorder tokens along dim 1."""
    return memeff.to_zigzag(arrays, DEVICES)


def differentiate(run, params, x, dout):
    """Return the output, and the gradients of parameters and inputs."""
    out, pull = jax.vjp(run, params, x)
    return out, *pull(dout)


def assert_near(actual, expected):
    """Compare two trees, array by array, within 2e-6 of the largest number of the array."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        y = np.asarray(y)
        np.testing.assert_allclose(np.asarray(x), y, rtol=0, atol=2e-6 * np.abs(y).max())


# ---- modules

MODULE = {
    "is_causal": True,
    "num_kv_heads": 2,
    "qk_transform": transforms.rotary(),  # which needs positions
    "kernel_init": uniform,
    "bias_init": uniform,
}


@functools.cache
def one_device_results(ours):
    """Return the parameters of a module, and the results of `differentiate` without a mesh."""
    params, run = build(ours, X, **MODULE)
    return params, jax.jit(functools.partial(differentiate, run))(params, X, DOUT)


def back(results):
    """Return results with their tokens in their own order."""
    out, dparams, dx = results
    out, dx = memeff.from_zigzag((out, dx), DEVICES)
    return out, dparams, dx


linen_fast = pytest.mark.parametrize(
    "ours, flaxes", [pytest.param(*LINEN, id="linen"), pytest.param(*NNX, id="nnx", marks=slow)]
)


@linen_fast
def test_a_module_under_set_mesh(ours, flaxes):
    """Run zigzag inside jit on an Auto mesh, by the strategy that memeff chooses."""
    del flaxes
    params, expected = one_device_results(ours)
    sharded_params, run = build(ours, X, **MODULE, **ZIGZAG)  # made without a mesh
    assert_equal(sharded_params, params)
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        inputs = put(mesh, zigzag(X, DOUT))
        results = jax.jit(functools.partial(differentiate, run))(put(mesh, params, P()), *inputs)
    assert results[0].sharding.is_equivalent_to(NamedSharding(mesh, ROWS), 3)
    assert_near(back(results), expected)


@linen_fast
def test_a_module_inside_shard_map(ours, flaxes):
    del flaxes
    params, expected = one_device_results(ours)
    _, run = build(ours, X, **MODULE, **ZIGZAG, context_parallel="ring")
    sharded = jax.shard_map(run, mesh=make_mesh(), in_specs=(P(), ROWS), out_specs=ROWS)
    results = jax.jit(functools.partial(differentiate, sharded))(params, *zigzag(X, DOUT))
    assert_near(back(results), expected)


@linen_fast
def test_a_module_on_an_explicit_mesh(ours, flaxes):
    """The type of the inputs says along which axis the sequence is sharded."""
    del flaxes
    params, expected = one_device_results(ours)
    _, run = build(ours, X, **MODULE)
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        inputs = put(mesh, (X, DOUT))
        results = jax.jit(functools.partial(differentiate, run))(put(mesh, params, P()), *inputs)
    assert jax.typeof(results[0]).sharding.spec == P(None, "seq", None)
    assert_near(results, expected)


COLLECTIVES = {"ring": "ppermute", "all_gather": "all_gather", "all_to_all": "all_to_all"}


@family
def test_a_module_hands_on_its_strategy(ours, flaxes):
    del flaxes
    for strategy in COLLECTIVES:
        params, run = build(ours, X, sequence_axis="seq", context_parallel=strategy)
        with jax.set_mesh(make_mesh()):
            traced = str(jax.make_jaxpr(run)(params, X))
        names = {name for name, primitive in COLLECTIVES.items() if primitive in traced}
        assert names == {strategy}


def test_linen_init_needs_no_mesh_and_takes_any_length():
    layer = LINEN[0](num_heads=N, **ZIGZAG)
    expected = LINEN[0](num_heads=N).init(jax.random.key(0), X)
    assert_equal(layer.init(jax.random.key(0), X[:, :3]), expected)
    with jax.set_mesh(make_mesh()):  # on the mesh, `init` shards as `apply` does
        traced = str(jax.make_jaxpr(layer.init)(jax.random.key(0), X))
    assert "ppermute" in traced or "all_gather" in traced or "all_to_all" in traced
    inside = jax.shard_map(layer.init, mesh=make_mesh(), in_specs=P(), out_specs=P())
    traced = jax.eval_shape(inside, jax.random.key(0), X[:, :3])  # the same tokens everywhere
    assert jax.tree.map(np.shape, traced) == jax.tree.map(np.shape, expected)
    with pytest.raises(ValueError, match="sequence_axis='seq' is no axis of a mesh here"):
        jax.eval_shape(layer.apply, expected, X)


WRONG = (
    ({"sequence_axis": 3}, TypeError, "sequence_axis must be the name of a mesh axis, or two"),
    ({"sequence_layout": "snake"}, ValueError, "sequence_layout='snake' is not known: use one of"),
    ({"context_parallel": "star"}, ValueError, "context_parallel='star' is not known: use None or"),
)
NO_CACHE = (
    "sequence_axis='seq' does not support decode=True, because a cache grows token by token on one "
    "device. Omit sequence_axis in the module that decodes: it has the same parameters."
)
WRONG_OF_MODULES = (
    *WRONG,
    ({"sequence_axis": "seq", "decode": True}, NotImplementedError, NO_CACHE),
    (
        {"sequence_axis": "seq", "attention_fn": flax_nnx.dot_product_attention},
        ValueError,
        "attention_fn=dot_product_attention does not take sequence_axis, which is needed here",
    ),
)


@family
def test_wrong_values_are_refused_when_a_module_is_made(ours, flaxes):
    del flaxes
    constructor = {"num_heads": N}
    if ours is NNX[0]:
        constructor |= {"in_features": F, "rngs": flax_nnx.Rngs(0)}
    for wrong, error, message in WRONG_OF_MODULES:
        with pytest.raises(error, match=re.escape(message)):
            ours(**(constructor | wrong))


def test_nnx_refuses_a_cache_where_decode_comes_later():
    layer = nnx_layer(NNX[0], sequence_axis="seq")
    with pytest.raises(NotImplementedError, match=re.escape(NO_CACHE)):
        layer(X, decode=True)
    layer.sequence_axis = None
    layer.init_cache(X.shape)
    assert layer(X[:, :1], decode=True).shape == (B, 1, F)


# ---- switches


@pytest.fixture(autouse=True)
def nothing_switched_before(monkeypatch):
    """Let each test run as in a process in which no switch has run anything."""
    monkeypatch.setattr(switch, "_ran", set())
    monkeypatch.setattr(flax_switch, "_switched_before", set())


MASK = np.tri(T, dtype=bool)[None, None]
ORDER = memeff.sequence_positions(T, DEVICES, "zigzag")
MASK_IN_ZIGZAG = MASK[:, :, ORDER][:, :, :, ORDER]


class TwoLayers(flax_linen.Module):
    """Somebody else's model: one layer of Flax's own, and one of memeff's."""

    @flax_linen.compact
    def __call__(self, x, mask):
        x = x + LINEN[1](num_heads=N, name="theirs")(x, mask=mask)
        return x + LINEN[0](num_heads=N, is_causal=True, name="ours")(x)


@pytest.mark.slow
def test_switch_linen():
    model = TwoLayers()
    variables = model.init(jax.random.key(0), X, MASK)
    expected = jax.jit(model.apply)(variables, X, MASK)
    run = jax.jit(model.apply)
    mesh = make_mesh()
    with jax.set_mesh(mesh):
        (x,) = put(mesh, zigzag(X))
        arguments = put(mesh, variables, P()), x, MASK_IN_ZIGZAG
        with nn.switch_linen() as switched:  # no sharded sequence: another key of jit's cache
            run.trace(*arguments)
        assert switched == ["theirs"]
        for traced in (["theirs", "ours"], []):
            with nn.switch_linen(strict=True, **ZIGZAG) as switched:
                out = run(*arguments)
            assert switched == traced
    assert_near(memeff.from_zigzag(out, DEVICES), expected)
    with nn.switch_linen(**ZIGZAG) as switched:
        assert_equal(model.init(jax.random.key(0), X[:, :1], MASK[..., :1, :1]), variables)


def test_the_innermost_switch_linen_decides():
    model = LINEN[1](num_heads=N)
    variables = model.init(jax.random.key(0), X)
    with jax.set_mesh(make_mesh()):
        ring = ZIGZAG | {"context_parallel": "ring"}
        for outer, inner in ((ring, {}), ({}, ring)):
            with nn.switch_linen(**outer) as paths, nn.switch_linen(**inner) as inner_paths:
                traced = str(jax.make_jaxpr(model.apply)(variables, X))
            assert (paths, inner_paths) == ([], ["(root)"])
            assert ("ppermute" in traced) == (inner is ring)


def test_switch_nnx():
    theirs = nnx_layer(NNX[1])
    chosen = nnx_layer(NNX[1], attention_fn=functools.partial(nn.attention_fn, chunk_size=8))
    own = nnx_layer(NNX[0], sequence_axis="other")
    model = flax_nnx.List([theirs, chosen, own])
    assert nn.switch_nnx(model, **ZIGZAG) == ["0", "1"]
    assert chosen.attention_fn.keywords == {"chunk_size": 8, **ZIGZAG}
    again = nnx_layer(NNX[1])
    nn.switch_nnx(again, **ZIGZAG)
    assert again.attention_fn is theirs.attention_fn  # so that nnx.jit sees equal modules

    @flax_nnx.jit
    def run(layer, x):
        return layer(x, is_causal=True)

    mesh = make_mesh()
    with jax.set_mesh(mesh):
        out = run(theirs, *put(mesh, zigzag(X)))
    assert_near(memeff.from_zigzag(out, DEVICES), run(nnx_layer(NNX[1]), X))


QKV = [rng.standard_normal((B, T, heads, 5)).astype(np.float32) for heads in (4, 2, 2)]
LENGTHS = {"query_seq_lengths": np.array([T, 99], np.int32), "is_causal": True}


def attend(query, key, value):
    """Call JAX's function, as somebody else's model does, with known lengths of whole sequences."""
    return jax.nn.dot_product_attention(query, key, value, **LENGTHS)


def test_switch_jax_nn():
    """The same function runs whole and inside shard_map; lengths beyond T count as T."""
    expected = jax.jit(attend)(*QKV)
    mesh = make_mesh()
    inside = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=ROWS, out_specs=ROWS))
    outside = jax.jit(attend)
    with jax.set_mesh(mesh):
        inputs = put(mesh, zigzag(*QKV))
        with memeff.switch_jax_nn() as calls:  # no sharded sequence: another key of jit's cache
            outside.trace(*inputs)
        assert calls == [(B, T, 4, 5)]
        for traced in (1, 0):
            with memeff.switch_jax_nn(strict=True, **ZIGZAG) as calls:
                outs = inside(*inputs), outside(*inputs)
            assert calls == [(B, T // DEVICES, 4, 5), (B, T, 4, 5)][: 2 * traced]
        with memeff.switch_jax_nn(**ZIGZAG, context_parallel="ring"):
            assert "ppermute" in str(jax.make_jaxpr(attend)(*inputs))
    for out in outs:
        assert_near(memeff.from_zigzag(out, DEVICES), expected)


def test_switches_refuse_wrong_values():
    caching = nnx_layer(NNX[1])
    caching.decode = True
    for wrong, error, message in WRONG:
        for make in (memeff.switch_jax_nn, nn.switch_linen):
            with pytest.raises(error, match=re.escape(message)), make(**wrong):
                raise AssertionError("inside")
        with pytest.raises(error, match=re.escape(message)):
            nn.switch_nnx(caching, **wrong)
    assert not switch._inside
    with pytest.raises(NotImplementedError, match=re.escape(NO_CACHE)):
        nn.switch_nnx(flax_nnx.List([nnx_layer(NNX[1]), caching]), sequence_axis="seq")
    assert caching.attention_fn is flax_nnx.dot_product_attention
    decoder = LINEN[1](num_heads=N, decode=True)
    with pytest.raises(NotImplementedError, match=re.escape(NO_CACHE)):
        with nn.switch_linen(sequence_axis="seq"):
            jax.eval_shape(decoder.init, jax.random.key(0), X)
