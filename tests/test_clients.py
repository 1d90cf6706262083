"""Models of other packages, adopted as their users would. `make clients` installs the packages and runs this.

Each client is a function of (params, x) that returns outputs and gradients. It runs three times: with memeff, as the package
has it in float32, and with attention written out in float64, which is the truth. The law of tolerance compares them.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_as_good, watch_dispatch

from memeff import dot_product_attention, switch_jax_nn, tile_sizes

os.environ["KERAS_BACKEND"] = "jax"

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # the packages' own
    pytest.mark.filterwarnings("error:.*(memeff|switch_jax_nn)"),
]

B, T, WIDTH, HEADS = 2, 37, 24, 4
MIB = 2**20


class Client(NamedTuple):
    """A model, and how memeff gets into it."""

    function: Callable[[Any, Any], Any]
    params: Any
    x: Any  # [B, T, ...]
    context: Callable[[Callable | None], contextlib.AbstractContextManager] = lambda _: (
        contextlib.nullcontext()
    )


def written_out(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, implementation=None
):
    """Compute attention by its definition, in the dtype of the query throughout."""
    del implementation
    key, value = (jnp.repeat(x, query.shape[-2] // x.shape[-2], axis=-2) for x in (key, value))
    logits = jnp.einsum("...tnh,...snh->...nts", query, key)
    logits = logits * (query.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits if bias is None else logits + bias
    if is_causal:
        logits = jnp.where(jnp.tril(jnp.ones(logits.shape[-2:], bool)), logits, -jnp.inf)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    return jnp.einsum("...nts,...snh->...tnh", jax.nn.softmax(logits), value)


def tokens(dtype, batch=B, length=T, width=WIDTH):
    return np.random.default_rng(0).standard_normal((batch, length, width)).astype(dtype)


def cast(tree, dtype):
    return jax.tree.map(lambda x: np.asarray(x).astype(dtype), tree)


def with_gradients(model):
    """Return the outputs of `model(params, x)` and their gradients by params and x, for uneven cotangents."""

    def run(params, x):
        moves_x = jnp.issubdtype(x.dtype, jnp.floating)

        def weighted(params, x):
            out = model(params, x)
            return (
                out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
            ).sum(), out

        gradient = jax.value_and_grad(weighted, (0, 1) if moves_x else 0, has_aux=True)
        (_, out), gradients = gradient(params, x)
        return out, gradients

    return run


# ---- how memeff gets in


@contextlib.contextmanager
def in_jax_nn(attention):
    """Replace jax.nn's attention: by memeff's switch, or by hand."""
    if attention is dot_product_attention:
        with switch_jax_nn(strict=True) as calls:
            yield calls
    else:
        with pytest.MonkeyPatch.context() as patch:
            if attention is not None:
                patch.setattr(jax.nn, "dot_product_attention", attention)
            yield


@contextlib.contextmanager
def in_equinox(attention):
    """Replace the function that Equinox maps over heads."""

    def of_one_head(query, key_, value, mask=None, dropout=None, *, key=None, inference=None):
        return dot_product_attention(query[:, None], key_[:, None], value[:, None], mask=mask)[:, 0]

    with pytest.MonkeyPatch.context() as patch:
        if attention is dot_product_attention:
            patch.setattr("equinox.nn._attention.dot_product_attention", of_one_head)
        yield


# ---- clients: functions of a dtype, and of attention (None: the package's own)


def keras_heads(dtype, attention):
    keras = pytest.importorskip("keras")
    layer = keras.layers.MultiHeadAttention(HEADS, 6, dtype=dtype)
    return keras_layer(layer, dtype, lambda x: dict(use_causal_mask=True))


def keras_grouped_heads(dtype, attention):
    keras = pytest.importorskip("keras")

    def padding(x):
        lengths = jnp.array([x.shape[1], 20])[:, None, None]
        return dict(
            attention_mask=jnp.broadcast_to(
                jnp.arange(x.shape[1]) < lengths, (B, x.shape[1], x.shape[1])
            )
        )

    return keras_layer(keras.layers.GroupQueryAttention(6, HEADS, 2, dtype=dtype), dtype, padding)


def keras_layer(layer, dtype, arguments):
    layer.build((B, T, WIDTH), (B, T, WIDTH))
    params, state = keras_variables(layer, dtype)

    def model(params, x):
        return layer.stateless_call(params, state, x, x, **arguments(x))[0]

    return Client(with_gradients(model), params, tokens(dtype), in_jax_nn)


def keras_variables(model, dtype):
    """Return numbers for what is trained, larger than Keras draws them so that softmax is far from even, and the rest."""
    rng = np.random.default_rng(1)
    params = [0.3 * rng.standard_normal(v.shape).astype(dtype) for v in model.trainable_variables]
    return params, [np.asarray(v) for v in model.non_trainable_variables]


def keras_hub_llama(dtype, attention):
    hub = pytest.importorskip("keras_hub")
    model = hub.models.LlamaBackbone(
        vocabulary_size=50,
        num_layers=2,
        num_query_heads=HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=32,
        num_key_value_heads=2,
        dtype=dtype,
    )
    params, state = keras_variables(model, dtype)

    def run(params, ids):
        given = {"token_ids": ids, "padding_mask": jnp.ones_like(ids)}
        return model.stateless_call(params, state, given)[0]

    ids = np.random.default_rng(0).integers(0, 50, (B, T)).astype(np.int32)
    return Client(with_gradients(run), params, ids, in_jax_nn)


def equinox_layer(dtype, make):
    eqx = pytest.importorskip("equinox")
    layer = make(eqx)(num_heads=HEADS, query_size=WIDTH, key=jax.random.key(0))
    layer = jax.tree.map(lambda x: 3 * x if eqx.is_array(x) else x, layer)  # softmax far from even
    params, static = eqx.partition(layer, eqx.is_array)

    def model(params, x):
        layer = eqx.combine(params, static)
        return jax.vmap(lambda x: layer(x, x, x))(x)

    return Client(with_gradients(model), cast(params, dtype), tokens(dtype))


def equinox_heads_mapped(dtype, attention):
    """Equinox's own module, whose heads and examples are both axes of a vmap."""
    return equinox_layer(dtype, lambda eqx: eqx.nn.MultiheadAttention)._replace(context=in_equinox)


def equinox_subclass(dtype, attention):
    """A module with Equinox's projections, and heads as memeff takes them."""

    def make(eqx):
        class Attention(eqx.nn.MultiheadAttention):
            def __call__(self, query, key_, value):
                projected = zip(
                    (self.query_proj, self.key_proj, self.value_proj),
                    (query, key_, value),
                    strict=True,
                )
                heads = (self._project(projection, x) for projection, x in projected)
                return jax.vmap(self.output_proj)(attention(*heads).reshape(query.shape[0], -1))

        return eqx.nn.MultiheadAttention if attention is None else Attention

    return equinox_layer(dtype, make)


def haiku_subclass(dtype, attention):
    hk = pytest.importorskip("haiku")

    class Attention(hk.MultiHeadAttention):
        def __call__(self, query, key, value, mask=None):
            q = self._linear_projection(query, self.key_size, "query")
            k = self._linear_projection(key, self.key_size, "key")
            v = self._linear_projection(value, self.value_size, "value")
            out = attention(q, k, v, mask=mask)
            out = out.reshape(*query.shape[:-1], -1)
            return hk.Linear(
                self.model_size, w_init=self.w_init, with_bias=self.with_bias, b_init=self.b_init
            )(out)

    def two_layers(x, kind=hk.MultiHeadAttention if attention is None else Attention):
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
        for name in ("first", "second"):
            init = hk.initializers.VarianceScaling(2.0)
            x = x + kind(HEADS, 6, w_init=init, model_size=WIDTH, name=name)(x, x, x, mask=causal)
        return x

    model = hk.without_apply_rng(hk.transform(two_layers))
    params = model.init(jax.random.key(0), tokens(np.float32), hk.MultiHeadAttention)
    return Client(with_gradients(model.apply), cast(params, dtype), tokens(dtype))


def block(attention):
    """Return a layer of attention for packages that are none of layers: (params, x [..., T, WIDTH]) -> the same shape."""

    def layer(params, x):
        q, k, v = (jnp.einsum("...td,dnh->...tnh", x, params[name]) for name in "qkv")
        out = (attention or jax.nn.dot_product_attention)(q, k, v, is_causal=True)
        return x + jnp.einsum("...tnh,nhd->...td", jnp.tanh(out), params["o"])

    return layer


def block_params(dtype):
    rng = np.random.default_rng(1)
    params = {name: rng.standard_normal((WIDTH, HEADS, 6)) * 0.3 for name in "qkv"}
    return cast(params | {"o": rng.standard_normal((HEADS, 6, WIDTH)) * 0.3}, dtype)


def jax_privacy_clipped(dtype, attention, **how):
    clipping = pytest.importorskip("jax_privacy.clipping")

    def loss(params, x):
        return (block(attention)(params, x) ** 2).mean()

    run = clipping.clipped_grad(
        loss, l2_clip_norm=0.02, return_values=True, return_grad_norms=True, **how
    )

    def gradients(params, x):
        clipped, each = run(params, x)
        return clipped, each.values, each.grad_norms

    return Client(gradients, block_params(dtype), tokens(dtype, batch=6))


def jax_privacy_microbatches(dtype, attention):
    return jax_privacy_clipped(dtype, attention, microbatch_size=2)


def diffrax_solved(adjoint: str):
    def make(dtype, attention):
        diffrax = pytest.importorskip("diffrax")
        term = diffrax.ODETerm(lambda t, x, params: block(attention)(params, x) * jnp.cos(t) - x)

        def solve(params, x):
            mode = getattr(diffrax, adjoint)()
            found = diffrax.diffeqsolve(
                term, diffrax.Heun(), 0.0, 1.0, 0.25, x, params, adjoint=mode, max_steps=8
            )
            return found.ys[0]

        def forward(params, x):
            return jax.jvp(solve, (params, x), jax.tree.map(jnp.cos, (params, x)))

        return Client(
            forward if adjoint == "ForwardMode" else with_gradients(solve),
            block_params(dtype),
            tokens(dtype),
        )

    return make


# with the number of calls that memeff runs in one trace; None: the package traces as often as it
# likes
CLIENTS = {
    "keras MultiHeadAttention": (keras_heads, 1),
    "keras GroupedQueryAttention": (keras_grouped_heads, 1),
    "keras-hub Llama": (keras_hub_llama, 2),
    "equinox, heads mapped": (equinox_heads_mapped, 1),
    "equinox, subclass": (equinox_subclass, 1),
    "haiku": (haiku_subclass, 2),
    "jax-privacy": (jax_privacy_clipped, 1),
    "jax-privacy, microbatches": (jax_privacy_microbatches, None),
    "diffrax ForwardMode": (diffrax_solved("ForwardMode"), None),
    "diffrax RecursiveCheckpointAdjoint": (diffrax_solved("RecursiveCheckpointAdjoint"), None),
    "diffrax DirectAdjoint": (diffrax_solved("DirectAdjoint"), None),
    "diffrax BacksolveAdjoint": (diffrax_solved("BacksolveAdjoint"), None),
}


@pytest.fixture
def small_tiles(monkeypatch):
    """Let the few tokens of these tests take several tiles."""
    monkeypatch.setattr(tile_sizes, "CPU_SIDES", {"windowed": (16, 16), "full": (16, 16)})


@pytest.mark.parametrize("name", CLIENTS)
def test_outputs_and_gradients(small_tiles, name):
    make, expected_calls = CLIENTS[name]

    def run(dtype, attention):
        client = make(dtype, attention)
        with client.context(attention) as switched:
            found = jax.jit(client.function)(client.params, client.x)
        return jax.tree.leaves(jax.tree.map(np.asarray, found)), switched

    with watch_dispatch() as calls:
        actual, switched = run("float32", dot_product_attention)
    assert calls if expected_calls is None else len(calls) == expected_calls
    assert switched is None or len(switched) == expected_calls
    with watch_dispatch() as calls:
        plain, _ = run("float32", None)
        with jax.enable_x64(True):
            truth, _ = run("float64", written_out)
    assert not calls  # the baselines are not memeff
    # A gradient may cancel to 0, as that of a bias of all keys does. Its terms are as large as
    # another gradient.
    size = max(np.abs(x).max() for x in truth)
    for n, x in enumerate(truth):
        assert x.dtype == np.float64
        assert_as_good(actual[n], [plain[n]], x, "float32", f"{name}: result {n}", size)


@pytest.mark.parametrize("name", CLIENTS)
def test_memory(name):
    make, _ = CLIENTS[name]

    def temp_bytes(attention):
        client = make("float32", attention)
        shape = (client.x.shape[0], 2048, *client.x.shape[2:])
        with client.context(attention):
            program = (
                jax.jit(client.function)
                .lower(client.params, jax.ShapeDtypeStruct(shape, client.x.dtype))
                .compile()
            )
        return program.memory_analysis().temp_size_in_bytes

    ours, plain = temp_bytes(dot_product_attention), temp_bytes(None)
    print(f"{name}: {ours / MIB:.0f} MiB, {plain / MIB:.0f} MiB without memeff")
    assert ours <= plain / 3, f"{ours / MIB:.0f} MiB, {plain / MIB:.0f} MiB without memeff"


def test_optax_lbfgs(small_tiles):
    """Ten steps with a line search, whose loops and branches hold the value and the gradient; in float64, step by step."""
    optax = pytest.importorskip("optax")

    def minimise(attention):
        params, x = block_params(np.float64), tokens(np.float64)
        optimiser = optax.lbfgs()

        def loss(params):
            return ((block(attention)(params, x) - jnp.roll(x, 1, axis=1)) ** 2).mean()

        value_and_grad = optax.value_and_grad_from_state(loss)

        def step(carry, _):
            params, state = carry
            value, gradient = value_and_grad(params, state=state)
            updates, state = optimiser.update(
                gradient, state, params, value=value, grad=gradient, value_fn=loss
            )
            return (optax.apply_updates(params, updates), state), value

        (params, _), values = jax.lax.scan(step, (params, optimiser.init(params)), length=10)
        return values, params

    with jax.enable_x64(True):
        (values, params), expected = (
            jax.jit(minimise, static_argnums=0)(f) for f in (dot_product_attention, written_out)
        )
        assert values[-1] < 0.8 * values[0]
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9),
            (values, params),
            expected,
        )


@pytest.mark.parametrize("name", ["equinox, subclass", "haiku"])
def test_switch_says_what_it_cannot_reach(monkeypatch, name):
    """Modules that write attention out, inside the switch."""
    # as in a process in which no switch has run anything
    monkeypatch.setattr("memeff.switch._ran", set())
    make, _ = CLIENTS[name]
    client = make("float32", None)
    with pytest.raises(
        ValueError, match="memeff ran nothing, because nothing called jax.nn.dot_product_attention"
    ):
        with switch_jax_nn(strict=True):
            jax.eval_shape(client.function, client.params, client.x)
