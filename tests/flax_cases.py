"""Flax's attention modules and memeff's, their inputs, and functions to build and compare them.

parameters, run = build(nn.linen.MultiHeadDotProductAttention, X, Y, is_causal=True)
assert_close(run(parameters, X, Y), expected)
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx

from memeff import nn

B = 2
T = 7
S = 9
N = 4
F = 8  # features of the inputs
LINEN = (nn.linen.MultiHeadDotProductAttention, flax_linen.MultiHeadDotProductAttention)
NNX = (nn.nnx.MultiHeadAttention, flax_nnx.MultiHeadAttention)
FAMILIES = {"linen": LINEN, "nnx": NNX}
family = pytest.mark.parametrize("ours, flaxes", FAMILIES.values(), ids=FAMILIES)

rng = np.random.default_rng(0)
# NumPy: eager slices need no compiler
X = rng.standard_normal((B, T, F)).astype(np.float32)
Y = rng.standard_normal((B, S, F)).astype(np.float32)
MASK = (rng.random((B, 1, T, S)) < 0.7) | (np.arange(S) == 0)
SELF_MASK = (rng.random((B, 1, T, T)) < 0.7) | np.eye(T, dtype=bool)
# arguments of an attention_fn, [B, T, N, 2] and [B, S, N, 2]
QKV = [rng.standard_normal((B, length, N, 2)).astype(np.float32) for length in (T, S, S)]


def uniform(key, shape, dtype=jnp.float32, **flax_arguments):
    """Initialise with numbers that give biases and large logits too."""
    return jax.random.uniform(key, shape, dtype, -1, 1)


def build(cls, *inputs, call=None, **constructor):
    """Return a module's parameters as a plain dict, and run(parameters, *inputs, **call)."""
    if issubclass(cls, flax_linen.Module):
        return _build_linen(cls, inputs, call or {}, constructor)
    return _build_nnx(cls, constructor)


def _build_linen(cls, inputs, call, constructor):
    module = cls(num_heads=N, **constructor)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = module.init(keys, *inputs, **call)

    def run(params, *inputs, **call):
        keys = {"dropout": jax.random.key(2)}
        return module.apply({"params": params}, *inputs, rngs=keys, **call)

    return variables["params"], run


def _build_nnx(cls, constructor):
    module = cls(N, F, rngs=flax_nnx.Rngs(0), decode=False, **constructor)
    graph, params, rest = flax_nnx.split(module, flax_nnx.Param, ...)

    def run(params, *inputs, **call):
        _, state, _ = flax_nnx.split(module, flax_nnx.Param, ...)
        flax_nnx.replace_by_pure_dict(state, params)
        copy = flax_nnx.merge(graph, state, rest, copy=True)
        return copy(*inputs, **call)

    return flax_nnx.to_pure_dict(params), run


def assert_close(actual, expected, tolerance=2e-6):
    """Compare two trees, within `tolerance` of the largest number that is expected, or of 1."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert jax.tree.map(jnp.result_type, actual) == jax.tree.map(jnp.result_type, expected)
    expected = [np.asarray(x, np.float64) for x in jax.tree.leaves(expected)]
    largest = max(np.abs(x).max() for x in expected)
    allowed = tolerance * max(1, largest)
    for x, y in zip(jax.tree.leaves(actual), expected, strict=True):
        x = np.asarray(x, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=allowed)


def assert_equal(actual, expected):
    """Compare two trees number by number."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def largest_difference(x, y):
    """Return the largest absolute difference of two arrays."""
    return np.abs(np.asarray(x) - y).max()


def quadratic(query, key, value, mask=None, *, logits_soft_cap=None, **flax_arguments):
    """Compute attention by its formula; an attention_fn with a soft cap."""
    groups = query.shape[-2] // key.shape[-2]
    key = jnp.repeat(key, groups, -2)
    value = jnp.repeat(value, groups, -2)
    s = jnp.einsum("...qhd,...khd->...hqk", query, key) / query.shape[-1] ** 0.5
    if logits_soft_cap is not None:
        s = logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(s), value)


def nnx_layer(cls, **constructor):
    """Return an NNX attention module that does not decode."""
    return cls(N, F, decode=False, rngs=flax_nnx.Rngs(0), **constructor)


# ---- models of two blocks


DROPPING = {
    "dropout_rate": 0.2,
    "deterministic": False,
    "broadcast_dropout": False,
    "kernel_init": uniform,
}


class LinenBlock(flax_linen.Module):
    """Attention with dropout under nn.remat, added to its input."""

    attention: Callable[..., Any] = LINEN[1]

    @flax_linen.compact
    def __call__(self, x, mask):
        attention = flax_linen.remat(self.attention)(num_heads=N, **DROPPING, name="attention")
        return x + attention(x, mask=mask), None


def linen_model(attention):
    """Stack two blocks under nn.scan."""
    split = {
        "variable_axes": {"params": 0},
        "split_rngs": {"params": True, "dropout": True},
        "in_axes": flax_linen.broadcast,
    }
    return flax_linen.scan(LinenBlock, **split, length=2)(attention)


def init_linen_model(model):
    """Return the variables of a model that `linen_model` made."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return model.init(keys, X, SELF_MASK)


def linen_loss(model, variables):
    """Return the sum of the squares of a Linen model's outputs."""
    keys = {"dropout": jax.random.key(3)}
    out, _ = model.apply(variables, X, SELF_MASK, rngs=keys)
    return (out**2).sum()


class NnxBlock(flax_nnx.Module):
    """Attention with dropout under nnx.remat, added to its input."""

    def __init__(self, attention, rngs):
        self.attention = attention(N, F, **DROPPING, decode=False, rngs=rngs)

    def __call__(self, x, mask):
        @flax_nnx.remat
        def attend(attention, x):
            return attention(x, mask=mask)

        return x + attend(self.attention, x)


def nnx_model(attention):
    """Stack two blocks, for `nnx_forward`."""

    @flax_nnx.vmap
    def blocks(rngs):
        return NnxBlock(attention, rngs)

    return blocks(flax_nnx.Rngs(0).split(2))


def nnx_forward(model, x, mask):
    """Apply the blocks of `nnx_model` one after the other, by nnx.scan."""

    def apply(x, block):
        return block(x, mask)

    scan = flax_nnx.scan(apply, in_axes=(flax_nnx.Carry, 0), out_axes=flax_nnx.Carry)
    return scan(x, model)


def nnx_loss(model, x):
    """Return the sum of the squares of an NNX model's outputs."""
    return (nnx_forward(model, x, SELF_MASK) ** 2).sum()


def equations(f, *inputs):
    """Return what JAX traces, as text without the addresses of functions."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(*inputs)))
