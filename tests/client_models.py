"""Models of other packages, as their users would adopt memeff in them; see test_clients.py.

Each client is a function of (params, x) that returns outputs and gradients. What makes it takes a
dtype and an attention: memeff's, `written_out`, or None for the package's own.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memeff import dot_product_attention, switch_jax_nn

os.environ["KERAS_BACKEND"] = "jax"

B = 2
T = 37
WIDTH = 24
HEADS = 4


def no_context(attention):
    """Enter nothing: the model calls `attention` itself."""
    return contextlib.nullcontext()


class Client(NamedTuple):
    """A model, and the context in which it computes with an attention."""

    function: Callable[[Any, Any], Any]
    params: Any
    x: Any  # [B, T, ...]
    context: Callable[[Callable | None], contextlib.AbstractContextManager] = no_context


def written_out(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, implementation=None
):
    """Compute attention by its definition, in the dtype of the query throughout."""
    del implementation
    groups = query.shape[-2] // key.shape[-2]
    key = jnp.repeat(key, groups, axis=-2)
    value = jnp.repeat(value, groups, axis=-2)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    logits = scale * jnp.einsum("...tnh,...snh->...nts", query, key)
    if bias is not None:
        logits = logits + bias
    if is_causal:
        causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))
        logits = jnp.where(causal, logits, -jnp.inf)
    if mask is not None:
        logits = jnp.where(mask, logits, -jnp.inf)
    return jnp.einsum("...nts,...snh->...tnh", jax.nn.softmax(logits), value)


def tokens(dtype, batch=B):
    rng = np.random.default_rng(0)
    return rng.standard_normal((batch, T, WIDTH)).astype(dtype)


def cast(tree, dtype):
    return jax.tree.map(lambda x: np.asarray(x).astype(dtype), tree)


def with_gradients(model):
    """Return a function of (params, x) that returns the model's outputs and gradients.

    Gradients are taken by params and x, with uneven cotangents.
    """

    def weighted(params, x):
        out = model(params, x)
        cotangent = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return (out * cotangent).sum(), out

    def run(params, x):
        moves_x = jnp.issubdtype(x.dtype, jnp.floating)
        arguments = (0, 1) if moves_x else 0
        gradient = jax.value_and_grad(weighted, arguments, has_aux=True)
        (_, out), gradients = gradient(params, x)
        return out, gradients

    return run


# ---- contexts in which a package computes with memeff


@contextlib.contextmanager
def in_jax_nn(attention):
    """Replace jax.nn's attention: the switch puts memeff there, a patch any other function."""
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

    def attend_one_head(query, key_, value, mask=None, dropout=None, *, key=None, inference=None):
        out = dot_product_attention(query[:, None], key_[:, None], value[:, None], mask=mask)
        return out[:, 0]

    with pytest.MonkeyPatch.context() as patch:
        if attention is dot_product_attention:
            patch.setattr("equinox.nn._attention.dot_product_attention", attend_one_head)
        yield


# ---- clients: functions of a dtype and an attention


def keras_heads(dtype, attention):
    keras = pytest.importorskip("keras")
    layer = keras.layers.MultiHeadAttention(HEADS, 6, dtype=dtype)

    def causal(x):
        return {"use_causal_mask": True}

    return keras_layer(layer, dtype, causal)


def keras_grouped_heads(dtype, attention):
    keras = pytest.importorskip("keras")
    layer = keras.layers.GroupQueryAttention(6, HEADS, 2, dtype=dtype)

    def padding(x):
        length = x.shape[1]
        lengths = jnp.array([length, 20])[:, None, None]
        mask = jnp.broadcast_to(jnp.arange(length) < lengths, (B, length, length))
        return {"attention_mask": mask}

    return keras_layer(layer, dtype, padding)


def keras_layer(layer, dtype, arguments):
    """Return the client of a Keras layer; `arguments(x)` are keywords of its call."""
    layer.build((B, T, WIDTH), (B, T, WIDTH))
    params, state = keras_variables(layer, dtype)

    def model(params, x):
        return layer.stateless_call(params, state, x, x, **arguments(x))[0]

    return Client(with_gradients(model), params, tokens(dtype), in_jax_nn)


def keras_variables(model, dtype):
    """Return values of the trainable variables and of the others.

    Trainable values are larger than Keras draws them, so that softmax is far from even.
    """
    rng = np.random.default_rng(1)
    params = []
    for variable in model.trainable_variables:
        params.append(0.3 * rng.standard_normal(variable.shape).astype(dtype))
    state = [np.asarray(variable) for variable in model.non_trainable_variables]
    return params, state


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
        inputs = {"token_ids": ids, "padding_mask": jnp.ones_like(ids)}
        return model.stateless_call(params, state, inputs)[0]

    ids = np.random.default_rng(0).integers(0, 50, (B, T)).astype(np.int32)
    return Client(with_gradients(run), params, ids, in_jax_nn)


def equinox_layer(dtype, attention_class):
    """Return the client of an Equinox attention class."""
    eqx = pytest.importorskip("equinox")
    layer = attention_class(num_heads=HEADS, query_size=WIDTH, key=jax.random.key(0))
    params, static = eqx.partition(layer, eqx.is_array)
    params = jax.tree.map(lambda x: 3 * x, params)  # softmax far from even

    def model(params, x):
        layer = eqx.combine(params, static)
        return jax.vmap(lambda x: layer(x, x, x))(x)

    return Client(with_gradients(model), cast(params, dtype), tokens(dtype))


def equinox_heads_mapped(dtype, attention):
    """Return Equinox's own module, whose heads and examples are both axes of a vmap."""
    eqx = pytest.importorskip("equinox")
    client = equinox_layer(dtype, eqx.nn.MultiheadAttention)
    return client._replace(context=in_equinox)


def equinox_subclass(dtype, attention):
    """Return a module with Equinox's projections, and heads as memeff takes them."""
    eqx = pytest.importorskip("equinox")

    class Attention(eqx.nn.MultiheadAttention):
        def __call__(self, query, key_, value):
            q = self._project(self.query_proj, query)
            k = self._project(self.key_proj, key_)
            v = self._project(self.value_proj, value)
            out = attention(q, k, v).reshape(query.shape[0], -1)
            return jax.vmap(self.output_proj)(out)

    attention_class = eqx.nn.MultiheadAttention if attention is None else Attention
    return equinox_layer(dtype, attention_class)


def haiku_subclass(dtype, attention):
    hk = pytest.importorskip("haiku")

    class Attention(hk.MultiHeadAttention):
        def __call__(self, query, key, value, mask=None):
            q = self._linear_projection(query, self.key_size, "query")
            k = self._linear_projection(key, self.key_size, "key")
            v = self._linear_projection(value, self.value_size, "value")
            out = attention(q, k, v, mask=mask)
            out = out.reshape(*query.shape[:-1], -1)
            project = hk.Linear(
                self.model_size, w_init=self.w_init, with_bias=self.with_bias, b_init=self.b_init
            )
            return project(out)

    attention_class = hk.MultiHeadAttention if attention is None else Attention

    def two_layers(x, attention_class=attention_class):
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
        for name in ("first", "second"):
            init = hk.initializers.VarianceScaling(2.0)
            layer = attention_class(HEADS, 6, w_init=init, model_size=WIDTH, name=name)
            x = x + layer(x, x, x, mask=causal)
        return x

    model = hk.without_apply_rng(hk.transform(two_layers))
    params = model.init(jax.random.key(0), tokens(np.float32), hk.MultiHeadAttention)
    return Client(with_gradients(model.apply), cast(params, dtype), tokens(dtype))


def block(attention):
    """Return layer(params, x [..., T, WIDTH]), of the shape of x, for packages without layers."""
    attention = attention or jax.nn.dot_product_attention

    def layer(params, x):
        q, k, v = (jnp.einsum("...td,dnh->...tnh", x, params[name]) for name in "qkv")
        out = attention(q, k, v, is_causal=True)
        return x + jnp.einsum("...tnh,nhd->...td", jnp.tanh(out), params["o"])

    return layer


def block_params(dtype):
    rng = np.random.default_rng(1)
    params = {name: rng.standard_normal((WIDTH, HEADS, 6)) * 0.3 for name in "qkv"}
    params["o"] = rng.standard_normal((HEADS, 6, WIDTH)) * 0.3
    return cast(params, dtype)


def jax_privacy_clipped(dtype, attention, **options):
    clipping = pytest.importorskip("jax_privacy.clipping")

    def loss(params, x):
        return (block(attention)(params, x) ** 2).mean()

    run = clipping.clipped_grad(
        loss, l2_clip_norm=0.02, return_values=True, return_grad_norms=True, **options
    )

    def gradients(params, x):
        clipped, per_example = run(params, x)
        return clipped, per_example.values, per_example.grad_norms

    return Client(gradients, block_params(dtype), tokens(dtype, batch=6))


def jax_privacy_microbatches(dtype, attention):
    return jax_privacy_clipped(dtype, attention, microbatch_size=2)


def diffrax_solved(adjoint: str):
    """Return the client that solves an equation of attention, differentiated by an adjoint."""

    def make_client(dtype, attention):
        diffrax = pytest.importorskip("diffrax")

        def velocity(t, x, params):
            return block(attention)(params, x) * jnp.cos(t) - x

        term = diffrax.ODETerm(velocity)

        def solve(params, x):
            mode = getattr(diffrax, adjoint)()
            solution = diffrax.diffeqsolve(
                term, diffrax.Heun(), 0.0, 1.0, 0.25, x, params, adjoint=mode, max_steps=8
            )
            return solution.ys[0]

        def forward_mode(params, x):
            tangents = jax.tree.map(jnp.cos, (params, x))
            return jax.jvp(solve, (params, x), tangents)

        function = forward_mode if adjoint == "ForwardMode" else with_gradients(solve)
        return Client(function, block_params(dtype), tokens(dtype))

    return make_client


# the function that makes the client, and the number of calls that memeff runs in one trace;
# None: the package traces as often as it likes
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
