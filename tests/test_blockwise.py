"""`memeff.nn.blockwise`: numbers, derivatives, modules, memory and devices."""

import functools
import itertools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from flax import errors, linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharded import collectives, mesh_context, mesh_of, put
from small_calls import assert_same, temp_bytes

from memeff import sharding
from memeff.nn import blockwise

pytestmark = pytest.mark.once

f32 = np.float32
B, T, C, F = 2, 11, 5, 12
CHUNKS = (1, 4, 10, 50)  # no rest; a rest of 3; a rest of 1 after one chunk; one chunk


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(f32)


X = draw(B, T, C)
WEIGHTS = {"up": draw(C, F, seed=1), "down": draw(F, C, seed=2) / F, "bias": draw(C, seed=3)}


def feed_forward(x, up, down, bias):
    return jnp.tanh(x @ up) @ down + bias


def close(weights):
    """Return a feed-forward function that closes over its weights."""

    def closed(x):
        return feed_forward(x, **weights)

    return closed


def assert_near(actual, wanted, eps=1e-6):
    """Check the arrays of two trees by `assert_same`."""
    assert_same(jax.tree.leaves(actual), jax.tree.leaves(wanted), eps)


def value_and_gradients(function, *args):
    """Return the results, and the gradients along random cotangents."""
    results, pull = jax.vjp(function, *args)
    leaves, treedef = jax.tree.flatten(results)
    cotangents = [draw(*leaf.shape, seed=i).astype(leaf.dtype) for i, leaf in enumerate(leaves)]
    return results, pull(jax.tree.unflatten(treedef, cotangents))


@pytest.fixture(params=few(["neighbours", "apart"], ["neighbours"]))
def way(request, monkeypatch):
    """Cut chunks as where JAX has one device, and as where arrays may be sharded.

    In the fast set `test_meshes` cuts them in the second way.
    """
    monkeypatch.setattr(sharding, "may_be_sharded", lambda: request.param == "apart")


@pytest.fixture
def one_device_only(monkeypatch):
    monkeypatch.setattr(sharding, "may_be_sharded", lambda: False)


# ---- functions


def tree_function(x):
    """Take ids and vectors of tokens; return a tree whose arrays have fewer and more dims."""
    vectors = x["vectors"] * x["ids"][..., None]
    outer = vectors[..., :, None] * vectors[..., None, :]
    return {"sum": (vectors**2).sum(-1), "outer": outer, "even": x["ids"] % 2 == 0}


def calls(apply):
    """Return the results of many calls by name, where `apply(f, x, **options)` is a call."""
    results = {}
    short = [jnp.asarray(X[:, :t]) for t in (0, 1, 7)]

    def along_axis(x):
        return {"x": x["x"] @ jnp.eye(3, dtype=f32), "first": x["x"][..., 0]}

    for c in CHUNKS:

        def network(x, weights, c=c):
            return apply(close(weights), x, c)

        results[f"closure {c}"] = value_and_gradients(network, X, WEIGHTS)
        tree = {"ids": np.arange(B * T).reshape(B, T), "vectors": X}

        def of_tree(vectors, c=c, tree=tree):
            floats = apply(tree_function, tree | {"vectors": vectors}, c, axis=1)
            return floats["sum"], floats["outer"]

        results[f"tree {c}"] = value_and_gradients(of_tree, X)
        results[f"even {c}"] = apply(tree_function, tree, c, axis=1)["even"]
        results[f"no batch {c}"] = apply(close(WEIGHTS), X[0], c)

    def partial_network(x, weights):
        return apply(functools.partial(feed_forward, **weights), x, 4, axis=1)

    results["partial"] = value_and_gradients(partial_network, X, WEIGHTS)
    for x in short:
        results[f"{x.shape[1]} tokens"] = apply(close(WEIGHTS), x, 3)
    results["first dim"] = apply(along_axis, {"x": draw(7, 2, 3)}, 2, axis=0)
    return results


@functools.cache
def expected_calls():
    def apply(f, x, c, axis=-2):
        del c, axis
        return f(x)

    return jax.jit(functools.partial(calls, apply))()


def test_functions(way):
    """Every length and chunk gives the numbers of f(x), in every kind of tree."""
    actual = jax.jit(functools.partial(calls, blockwise))()
    for name, wanted in expected_calls().items():
        assert_near(actual[name], wanted)


def test_dtypes_are_kept(one_device_only):
    def types(x):
        return value_and_gradients(functools.partial(blockwise, jnp.sin, chunk_size=4), x)

    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        y, (dx,) = jax.eval_shape(types, jax.ShapeDtypeStruct(X.shape, dtype))
        assert y.dtype == dx.dtype == dtype
    with jax.enable_x64(True):
        y = jax.eval_shape(types, jax.ShapeDtypeStruct(X.shape, jnp.float64))[0]
        assert y.dtype == jnp.float64


def test_transforms(one_device_only):
    """Compare vmap, scan, remat, jvp, and second orders both ways with those of f(x)."""
    layers = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w, -w]), WEIGHTS)
    tangents = (draw(B, T, C, seed=8), jax.tree.map(jnp.ones_like, WEIGHTS))

    def run(chunk_size):
        def network(x, weights):
            if chunk_size is None:
                return feed_forward(x, **weights)
            return blockwise(close(weights), x, chunk_size)

        def loss(x, weights):
            return (network(x, weights) ** 3).sum()

        def through_layers(x, layers):
            def layer(x, weights):
                return x + network(x, weights), None

            return jax.lax.scan(jax.checkpoint(layer), x, layers)[0]

        gradient = jax.grad(loss, (0, 1))
        _, pull = jax.vjp(gradient, X, WEIGHTS)
        return {
            "jvp": jax.jvp(network, (X, WEIGHTS), tangents),
            "layers": value_and_gradients(through_layers, X, layers),
            "examples": jax.vmap(network, (1, None))(X[:, None], WEIGHTS),
            "weights": jax.vmap(network, (None, 0))(X, layers),
            "gradient of examples": jax.vmap(gradient, (0, None))(X, WEIGHTS),
            "tangent of the gradient": jax.jvp(gradient, (X, WEIGHTS), tangents),
            "transposed gradient": pull(gradient(X, WEIGHTS)),
        }

    actual = jax.jit(run, static_argnums=0)(4)
    for name, wanted in jax.jit(run, static_argnums=0)(None).items():
        assert_near(actual[name], wanted, 3e-6)


# ---- Linen


class Network(linen.Module):
    """A feed-forward network with dropout, as models have it."""

    rate: float = 0.0
    writes: str = ""

    @linen.compact
    def __call__(self, x, deterministic=True):
        hidden = jnp.tanh(linen.Dense(F)(x))
        if self.writes == "norm":
            hidden = linen.BatchNorm(use_running_average=False)(hidden)
        if self.writes == "sow":
            self.sow("losses", "size", hidden.sum())
        hidden = linen.Dropout(self.rate, deterministic=deterministic)(hidden)
        return linen.Dense(C)(hidden)


class Compact(linen.Module):
    """A model that makes the network inline, in one of the ways of Linen."""

    kind: str
    chunk_size: int | None = None
    rate: float = 0.0

    @linen.compact
    def __call__(self, x):
        x = linen.Dense(C)(x)
        if self.kind == "sequential":
            f = linen.Sequential([linen.Dense(F), jnp.tanh, linen.Dense(C)])
        elif self.kind == "partial":
            f = functools.partial(Network(self.rate), deterministic=False)
        else:
            f = Network(writes=self.kind)
        y = f(x) if self.chunk_size is None else blockwise(f, x, self.chunk_size)
        return linen.Dense(C)(x + y)


class Setup(linen.Module):
    """A model whose network is a method, and uses a module that another part uses as well."""

    chunk_size: int | None = None

    def setup(self):
        self.up = linen.Dense(F)
        self.down = linen.Dense(C)
        self.shared = linen.Dense(C)

    def network(self, x):
        return self.down(jnp.tanh(self.up(self.shared(x))))

    def __call__(self, x):
        c = self.chunk_size
        y = self.network(x) if c is None else blockwise(self.network, x, c)
        return self.shared(x) + y


class Layers(linen.Module):
    """Three layers under Linen's scan."""

    chunk_size: int | None = None

    @linen.compact
    def __call__(self, x):
        def layer(module, x, _):
            return module(x), None

        scan = linen.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scan(Compact("", self.chunk_size), x, None)[0]


LINEN = {
    "sequential": functools.partial(Compact, "sequential"),
    "partial": functools.partial(Compact, "partial"),
    "method": Setup,
    "layers": Layers,
}


@pytest.mark.parametrize("name", few(LINEN, ["method", "layers"]))
def test_linen(name):
    """Parameters at init are equal in bits, and values and gradients equal those of f(x)."""

    def run(chunk_size):
        model = LINEN[name](chunk_size=chunk_size)
        variables = model.init(jax.random.key(3), X)
        return variables, value_and_gradients(model.apply, variables, X)

    variables, actual = jax.jit(run, static_argnums=0)(4)
    expected_variables, expected = jax.jit(run, static_argnums=0)(None)
    jax.tree.map(np.testing.assert_array_equal, variables, expected_variables)
    assert_near(actual, expected, 2e-6)


class Dropped(linen.Module):
    @linen.compact
    def __call__(self, x, chunk_size=4):
        dropout = linen.Dropout(0.5, deterministic=False)
        return blockwise(dropout, x, chunk_size), blockwise(dropout, x, chunk_size)


class SelfDropped(linen.Module):
    """A model that draws in a method of its own, and makes a parameter after that."""

    chunk_size: int | None

    def drop(self, x):
        keep = jax.random.bernoulli(self.make_rng("dropout"), 0.5, x.shape)
        return jnp.where(keep, x, 0)

    @linen.compact
    def __call__(self, x):
        y = self.drop(x) if self.chunk_size is None else blockwise(self.drop, x, self.chunk_size)
        return y * self.param("scale", jax.random.normal, (C,))


def assert_drawn_anew(y, dy_dx, c):
    """Check masks of dropout on ones [1, T, 64] in chunks of c tokens."""
    assert set(np.unique(y)) == {0, 2}
    assert 0.4 < np.mean(y == 0) < 0.6
    rows = {tuple(row) for row in np.asarray(y[0])}
    assert len(rows) == y.shape[1], f"tokens in chunks of {c} repeat their masks"
    np.testing.assert_array_equal(y, dy_dx)  # the backward draws the same numbers


def test_dropout_of_linen(way):
    ones = jnp.ones((1, T, 64))

    def apply(x):
        return Dropped().apply({}, x, rngs={"dropout": jax.random.key(5)})

    (first, second), pull = jax.vjp(jax.jit(apply), ones)
    (gradient,) = pull((ones, jnp.zeros_like(ones)))
    assert_drawn_anew(first, gradient, 4)
    (gradient,) = pull((jnp.zeros_like(ones), ones))
    assert_drawn_anew(second, gradient, 4)
    assert np.any(first != second)


def test_dropout_at_init_changes_no_parameter(one_device_only):
    """Without a stream of its own, dropout draws from that of the parameters."""

    def init(chunk_size):
        return SelfDropped(chunk_size).init(jax.random.key(3), X)

    jax.tree.map(np.testing.assert_array_equal, jax.jit(init, static_argnums=0)(4), init(None))


@pytest.mark.parametrize("writes", ["norm", "sow"])
@pytest.mark.parametrize("chunk_size", [4, 50])
def test_linen_modules_that_write_are_refused(writes, chunk_size):
    collections = ["batch_stats", "losses"]
    variables = Compact(writes).init(jax.random.key(0), X)
    variables.pop("losses", None)
    model = Compact(writes, chunk_size)
    with pytest.raises(
        ValueError, match="f writes a variable or an attribute .* Move what writes it out of f"
    ):
        model.apply(variables, X, mutable=collections)


def test_capture_intermediates():
    """Captures inside the network are refused, and a filter leaves them out."""
    model = Compact("sequential", 4)
    variables = model.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="give capture_intermediates a filter"):
        model.apply(variables, X, capture_intermediates=True)

    def of_last_layer(module, method):
        return module.name == "Dense_3" and method == "__call__"

    y, captured = model.apply(variables, X, capture_intermediates=of_last_layer)
    (kept,) = captured["intermediates"]["Dense_3"]["__call__"]
    np.testing.assert_array_equal(kept, y)


class Closure(linen.Module):
    @linen.compact
    def __call__(self, x):
        network = Network()

        def closure(x):
            return network(x)

        return blockwise(closure, x, 4)


class Inline(linen.Module):
    @linen.compact
    def __call__(self, x):
        def make_and_call(x):
            return linen.Dense(C)(x)

        return blockwise(make_and_call, x, 4)


@pytest.mark.parametrize("model", [Closure, Inline])
def test_a_function_that_hides_a_linen_module_is_refused(model):
    with pytest.raises(ValueError, match="f calls .*, a module of Linen, and is no module itself"):
        model().init(jax.random.key(0), X)


def test_a_bound_apply_is_a_function():
    """`module.apply` with its variables is a function, also with a jit inside."""
    variables = Network().init(jax.random.key(0), X)
    for apply in (Network().apply, jax.jit(Network().apply)):
        actual = blockwise(functools.partial(apply, variables), X, 4)
        assert_near(actual, Network().apply(variables, X))


# ---- NNX


class NnxNetwork(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        self.up = nnx.Linear(C, F, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.down = nnx.Linear(F, C, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(jnp.tanh(self.up(x))))

    def scaled(self, x, scale):
        return scale * self(x)


def nnx_callables(network):
    """Return what users give to blockwise, each of which is the network."""

    def closure(x):
        return network(x)

    return {
        "module": network,
        "method": functools.partial(network.scaled, scale=1.0),
        "closure": closure,
    }


def test_nnx():
    """Values and gradients of a module, a method and a closure equal those of f(x)."""
    graph, params, others = nnx.split(NnxNetwork(nnx.Rngs(0)), nnx.Param, ...)

    def run(chunked):
        def network(params, x, name):
            f = nnx_callables(nnx.merge(graph, params, others))[name]
            return blockwise(f, x, 4) if chunked else f(x)

        names = ("module", "method", "closure")
        calls = [functools.partial(network, name=name) for name in names]
        return [value_and_gradients(call, params, X) for call in calls]

    assert_near(jax.jit(run, static_argnums=0)(True), jax.jit(run, static_argnums=0)(False))


def test_nnx_transforms_and_shared_modules():
    """It works under nnx.jit and nnx.grad, and with one module at two places of f."""
    network = NnxNetwork(nnx.Rngs(0))
    network.tied = network.up

    def loss(network, chunked):
        y = blockwise(network, X, 4) if chunked else network(X)
        return (y**3).sum()

    gradient = nnx.jit(nnx.grad(loss), static_argnames="chunked")
    assert_near(gradient(network, chunked=True), gradient(network, chunked=False))


def test_dropout_of_nnx(one_device_only):
    """Chunks draw anew, the backward draws the same, and counts advance as in one call."""
    ones = jnp.ones((1, T, 64))
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    graph, state = nnx.split(dropout)

    @jax.jit
    def apply(x, state):
        copy = nnx.merge(graph, state)
        results = blockwise(copy, x, 4), blockwise(copy, x, 4)
        return results, nnx.state(copy, nnx.RngCount)

    def differentiable(x):
        return apply(x, state)

    (first, second), pull, counts = jax.vjp(differentiable, ones, has_aux=True)
    (gradient,) = pull((ones, jnp.zeros_like(ones)))
    assert_drawn_anew(first, gradient, 4)
    assert np.any(first != second)
    assert jax.tree.leaves(counts) == [2]
    np.testing.assert_array_equal(blockwise(dropout, ones, 4), first)
    np.testing.assert_array_equal(blockwise(dropout, ones, 4), second)


class Counter(nnx.Module):
    def __init__(self):
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.calls[...] += 1
        return x


class AttributeWriter(nnx.Module):
    """A module that writes plain attributes, which are no variables."""

    def __init__(self, written):
        self.written = written
        self.calls = 0
        self.first = None
        self.list = nnx.List([0])

    @functools.cached_property
    def cached(self):
        return 1

    def __call__(self, x):
        if self.written == "calls":
            self.calls += 1
        elif self.written == "first":
            self.first = x
        elif self.written == "list.0":
            self.list[0] = 1
        elif self.written == "same":
            self.calls = 0
        return x * self.cached


def nnx_closure(network):
    def closure(x):
        return network(x)

    return closure


def test_transforms_inside_of_nnx_modules():
    """Those of NNX write every variable, with the value that it has."""
    linear = nnx.Linear(C, C, rngs=nnx.Rngs(0))

    class Layer(nnx.Module):
        def __init__(self, transform):
            self.linear = linear
            self.apply = transform(nnx.Linear.__call__)

        def __call__(self, x):
            return self.apply(self.linear, x)

    for transform in (jax.jit, jax.checkpoint):
        assert_near(blockwise(Layer(transform), X, 4), linear(X))
    for transform in (nnx.jit, nnx.remat):
        layer = Layer(transform)
        for f in (layer, functools.partial(layer.apply, linear)):
            with pytest.raises(ValueError, match="use jax.jit and jax.checkpoint in f"):
                blockwise(f, X, 4)


@pytest.mark.parametrize("chunk_size", [4, 50])
def test_nnx_modules_that_write_are_refused(chunk_size):
    norm = nnx.BatchNorm(C, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=re.escape("f writes a variable or an attribute (mean)")):
        blockwise(norm, X, chunk_size)
    with pytest.raises(ValueError, match=re.escape("f writes a variable or an attribute (calls)")):
        blockwise(Counter(), X, chunk_size)
    for written in ("calls", "first", "list.0"):
        with pytest.raises(ValueError, match=re.escape(f"or an attribute ({written})")):
            blockwise(AttributeWriter(written), X, chunk_size)
    for kept in ("same", "cached"):
        assert_near(blockwise(AttributeWriter(kept), X, chunk_size), X)
    norm.eval()
    assert_near(blockwise(norm, X, chunk_size), norm(X))
    network = NnxNetwork(nnx.Rngs(0), rate=0.5)
    with pytest.raises(ValueError, match="closes over .* Give blockwise the module itself"):
        blockwise(nnx_closure(network), X, chunk_size)
    network.eval()
    assert_near(blockwise(nnx_closure(network), X, chunk_size), network(X))


# ---- memory


def residual_sizes(f, x) -> list[int]:
    """Return the sizes of the arrays that the backward of f keeps."""

    def residuals(x):
        return jax.tree.leaves(jax.vjp(f, x)[1])

    return [leaf.size for leaf in jax.eval_shape(residuals, x)]


def networks(features: int, hidden: int):
    """Return {name: (call with chunks, weights)} of a function, a Linen and an NNX module."""
    shapes = (features, hidden), (hidden, features)
    up, down = (jax.ShapeDtypeStruct(shape, f32) for shape in shapes)

    def function(weights, x, c):
        def closure(x):
            return jnp.tanh(x @ weights[0]) @ weights[1]

        return blockwise(closure, x, c)

    class Model(linen.Module):
        c: int

        @linen.compact
        def __call__(self, x):
            up = linen.Dense(hidden, use_bias=False)
            down = linen.Dense(features, use_bias=False)
            return blockwise(linen.Sequential([up, jnp.tanh, down]), x, self.c)

    def linen_network(weights, x, c):
        params = {"Dense_0": {"kernel": weights[0]}, "Dense_1": {"kernel": weights[1]}}
        return Model(c).apply({"params": params}, x)

    def nnx_network(weights, x, c):
        rngs = nnx.Rngs(0)
        up = nnx.Linear(features, hidden, use_bias=False, rngs=rngs)
        down = nnx.Linear(hidden, features, use_bias=False, rngs=rngs)
        model = nnx.Sequential(up, jnp.tanh, down)
        up.kernel[...] = weights[0]
        down.kernel[...] = weights[1]
        return blockwise(model, x, c)

    return (up, down), {"function": function, "linen": linen_network, "nnx": nnx_network}


@pytest.mark.parametrize("name", ["function", "linen", "nnx"])
@pytest.mark.parametrize("chunk_size", [96, 128, 1000])
def test_no_hidden_activations_are_kept(name, chunk_size, one_device_only):
    """The backward keeps x, the weights and no other array; with a loop, a rest, and one call."""
    weights, calls = networks(8, 64)
    x = jax.ShapeDtypeStruct((2, 512, 8), f32)

    def call(weights_and_x):
        return calls[name](*weights_and_x, chunk_size)

    assert max(residual_sizes(call, (weights, x))) <= 2 * 512 * 8

    def plain(weights_and_x):
        (up, down), x = weights_and_x
        return jnp.tanh(x @ up) @ down

    assert max(residual_sizes(plain, (weights, x))) == 2 * 512 * 64  # so that the test can fail


def gradient_temp_bytes(call, weights, B, T, features, c) -> int:
    """Return the temporary bytes of the result and all gradients, compiled."""
    x = jax.ShapeDtypeStruct((B, T, features), f32)

    def run(weights, x, dy):
        y, pull = jax.vjp(functools.partial(call, c=c), weights, x)
        return y, pull(dy)

    return temp_bytes(run, (weights, x, x))


@pytest.mark.parametrize("name", ["function", "linen", "nnx"])
@pytest.mark.parametrize("batch", few([1, 4], [4]))
def test_memory_of_the_gradient_grows_by_inputs_and_outputs_alone(name, batch, one_device_only):
    """For each token the gradient takes a few numbers per feature, and no hidden activation."""
    weights, calls = networks(16, 1024)
    short, long = (
        gradient_temp_bytes(calls[name], weights, batch, T, 16, 64) for T in (1024, 2048)
    )
    bytes_of_x = 4 * batch * 1024 * 16
    assert long - short <= 4 * bytes_of_x
    hidden_of_chunk = 4 * batch * 64 * 1024
    assert long <= 8 * hidden_of_chunk  # without chunks 32 for each array of activations


@pytest.mark.parametrize("name", ["function", "linen", "nnx"])
def test_a_gradient_of_a_gradient_keeps_no_hidden_activations(name, one_device_only):
    weights, calls = networks(16, 1024)
    x = jax.ShapeDtypeStruct((1, 2048, 16), f32)

    def gradient(f):
        return jax.grad(lambda args: sum((y**2).sum() for y in jax.tree.leaves(f(args))))

    def call(weights_and_x):
        return calls[name](*weights_and_x, 64)

    hidden = 4 * 2048 * 1024
    assert temp_bytes(gradient(gradient(call)), [(weights, x)]) <= hidden / 2


@pytest.mark.parametrize("name", ["function", "linen", "nnx"])
def test_one_chunk_takes_the_memory_of_checkpoint(name, one_device_only):
    """Four layers take what they take with jax.checkpoint, which XLA:CPU undoes in jaxlib 0.10."""
    weights, calls = networks(16, 1024)

    @jax.checkpoint
    def network(weights, x):
        return jnp.tanh(x @ weights[0]) @ weights[1]

    def layers(weights, x, c):
        for _ in range(4):
            x = network(weights, x) if c is None else calls[name](weights, x, c)
        return x

    size = gradient_temp_bytes(layers, weights, 1, 256, 16, 1000)
    assert size <= 1.05 * gradient_temp_bytes(layers, weights, 1, 256, 16, None)


@pytest.mark.parametrize("name", ["function", "linen", "nnx"])
def test_gradients_of_weights_are_added_up_in_one_place(name, one_device_only):
    """With 32 chunks the gradient takes the weights' bytes a few times, not once per chunk."""
    weights, calls = networks(256, 512)
    size = gradient_temp_bytes(calls[name], weights, 1, 256, 256, 8)
    assert size <= 5 * (2 * 4 * 256 * 512)


# ---- devices

TOKENS = 64
ARRAYS = (draw(8, TOKENS, C), draw(8, TOKENS, C, seed=4), WEIGHTS)
SPECS = {"batch": P("x", None, None), "tokens": P(None, "x", None)}


def sharded_run(x, dy, weights):
    """Return the result and its gradients, in chunks of 16 tokens."""

    def call(x, weights):
        return blockwise(functools.partial(feed_forward, **weights), x, 16)

    y, pull = jax.vjp(call, x, weights)
    return y, pull(dy)


@functools.cache
def expected_run():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "may_be_sharded", lambda: False)
        return jax.jit(sharded_run)(*ARRAYS)


def place(mesh, spec):
    """Return the arguments on the mesh."""
    x, dy, weights = ARRAYS
    return put(mesh, x, spec), put(mesh, dy, spec), put(mesh, weights, P())


MESHES = itertools.product([True, False], [AxisType.Auto, AxisType.Explicit], SPECS)
FAST_MESHES = [  # each pair of values
    (True, AxisType.Auto, "batch"),
    (True, AxisType.Explicit, "tokens"),
    (False, AxisType.Auto, "tokens"),
    (False, AxisType.Explicit, "batch"),
]


@pytest.mark.parametrize("is_set, axis_type, where", few(MESHES, FAST_MESHES))
def test_meshes(where, axis_type, is_set):
    """Nothing is sent but sums of the weights' gradients, and results lie as x does."""
    mesh = mesh_of(axis_type, x=8)
    args = place(mesh, SPECS[where])
    with mesh_context(mesh, is_set):
        program = jax.jit(sharded_run).lower(*args).compile()
        results = program(*args)
    assert_near(results, expected_run(), 3e-6)
    lines = collectives(program.as_text())
    assert lines and all(" all-reduce(" in line for line in lines), "\n".join(lines)
    y, (dx, _) = results
    shard_shape = args[0].sharding.shard_shape(args[0].shape)
    assert y.sharding.shard_shape(y.shape) == shard_shape
    assert dx.sharding.shard_shape(dx.shape) == shard_shape


class Shared(linen.Module):
    @linen.compact
    def __call__(self, x):
        return blockwise(linen.Dense(C), x, 2)


@pytest.mark.parametrize("kind", ["partial", "linen", "nnx"])
@pytest.mark.parametrize("where", SPECS)
def test_shard_map(kind, where):
    """Values and gradients are right, and gradients of weights are summed once, after the loop."""
    mesh = mesh_of(AxisType.Auto, x=8)
    weights = {"kernel": draw(C, C), "bias": draw(C)}

    def linear(x, kernel, bias):
        return x @ kernel + bias

    def call(x, weights):
        if kind == "partial":
            return blockwise(functools.partial(linear, **weights), x, 2)
        if kind == "linen":
            return Shared().apply({"params": {"Dense_0": weights}}, x)
        model = nnx.Linear(C, C, rngs=nnx.Rngs(0))
        nnx.update(model, nnx.State(weights))
        return blockwise(model, x, 2)

    def run(x, dy, weights):
        y, pull = jax.vjp(call, x, weights)
        return y, *pull(dy)

    spec = SPECS[where]
    specs = dict(in_specs=(spec, spec, P()), out_specs=(spec, spec, P()))
    x, dy = ARRAYS[:2]
    program = jax.jit(jax.shard_map(run, mesh=mesh, **specs)).lower(x, dy, weights).compile()
    y, pull = jax.vjp(lambda x, weights: linear(x, **weights), x, weights)
    assert_near(program(x, dy, weights), (y, *pull(dy)), 3e-6)
    lines = collectives(program.as_text())
    assert lines and all(" all-reduce(" in line for line in lines), "\n".join(lines)
    assert not any("while" in line for line in op_names(program.as_text(), "all-reduce"))


def op_names(text: str, operation: str) -> list[str]:
    """Return the names that JAX gave to each use of an operation in HLO."""
    names = re.findall(rf'^.* {operation}\(.*op_name="([^"]*)"', text, re.M)
    assert names
    return names


# ---- errors


def fewer_tokens(x):
    return x[..., 1:, :]


def no_tokens(x):
    return x.sum()


WRONG = {
    "an int": (TypeError, "f must be a module or a function, got int 3", (3, X, 4), {}),
    "class": (TypeError, r"f is Dense, a class .* of it: Dense\(...\)", (linen.Dense, X, 4), {}),
    "class of NNX": (TypeError, "f is Linear, a class of modules", (nnx.Linear, X, 4), {}),
    "zero": (ValueError, "chunk_size=0 counts tokens and must be at least 1", (jnp.sin, X, 0), {}),
    "half": (TypeError, "chunk_size must be an int .* got float 2.5", (jnp.sin, X, 2.5), {}),
    "true": (TypeError, "chunk_size must be an int .* got bool True", (jnp.sin, X, True), {}),
    "axis": (TypeError, "axis must be an int .* got None", (jnp.sin, X, 4), {"axis": None}),
    "vector": (ValueError, r"shape \(5,\), which has no dim -2", (jnp.sin, X[0, 0], 4), {}),
    "text": (TypeError, "x must be an array, got str", (jnp.sin, {"a": X, "b": "x"}, 4), {}),
    "nothing": (ValueError, "x holds no array", (jnp.sin, {}, 4), {}),
    "lengths": (ValueError, "differ in number or in place", (jnp.sin, (X, X[:, 1:]), 4), {}),
    "places": (ValueError, "Count axis from the first dim", (jnp.sin, (X, X[..., 0]), 4), {}),
    "fewer": (ValueError, r"chunk of 4 tokens \(dim 1\) it returned", (fewer_tokens, X, 4), {}),
    "none": (ValueError, r"returned an array of shape \(\)", (no_tokens, X, 50), {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    kind, message, args, options = WRONG[name]
    with pytest.raises(kind, match=message):
        blockwise(*args, **options)


def test_integers_of_numpy(one_device_only):
    y = blockwise(jnp.sin, X, np.int64(4), axis=np.int32(1))
    assert_near(y, np.sin(X))


def test_error_on_an_explicit_mesh_that_shards_tokens():
    mesh = mesh_of(AxisType.Explicit, x=8)
    x = put(mesh, ARRAYS[0], SPECS["tokens"])
    for chunk_size in (4, 24):
        with pytest.raises(ValueError, match="it must be a multiple of 8 and divide T"):
            blockwise(jnp.sin, x, chunk_size)
    assert_near(blockwise(jnp.sin, x, 1000), np.sin(ARRAYS[0]))


def test_errors_of_modules_without_a_parent_and_of_symbolic_lengths():
    with pytest.raises(errors.CallCompactUnboundModuleError):
        blockwise(Network(), X, 4)
    (t,) = jax.export.symbolic_shape("t")
    x = jax.ShapeDtypeStruct((B, t, C), f32)
    with pytest.raises(NotImplementedError, match="leaves symbolic"):
        jax.export.export(jax.jit(functools.partial(blockwise, jnp.sin, chunk_size=4)))(x)
