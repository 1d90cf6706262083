"""The Flax modules of memeff are Flax's: parameters, outputs, dtypes, checkpoints, gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from flax import serialization
from flax_cases import (
    FAMILIES,
    LINEN,
    MASK,
    NNX,
    B,
    F,
    N,
    T,
    X,
    Y,
    assert_close,
    assert_equal,
    build,
    equations,
    family,
    init_linen_model,
    largest_difference,
    linen_loss,
    linen_model,
    nnx_layer,
    nnx_loss,
    nnx_model,
    uniform,
)

from memeff import nn

ALIAS = (nn.linen.MultiHeadAttention, flax_linen.MultiHeadAttention)


# ---- parameters and outputs


SIZES = ({}, {"qkv_features": 12, "out_features": 5})
DENSE = ({}, {"use_bias": False, "normalize_qk": True})
ONES = jax.nn.initializers.ones
INITS = (
    {},
    {"kernel_init": uniform, "out_kernel_init": ONES, "bias_init": uniform, "out_bias_init": ONES},
)
DROPS = ({}, {"dropout_rate": 0.4}, {"dropout_rate": 0.4, "broadcast_dropout": False})


CONSTRUCTORS = []
for sizes, dense, inits, drops in itertools.product(SIZES, DENSE, INITS, DROPS):
    CONSTRUCTORS.append(sizes | dense | inits | drops)
assert len(CONSTRUCTORS) == 24


EACH = [(*classes, number) for classes in (LINEN, NNX) for number in range(24)]
SOME = [case for case in EACH if case[-1] in (5, 10, 18)]  # each value and each mask


@pytest.mark.parametrize("ours, flaxes, number", [*few(EACH, SOME), (*ALIAS, 23)])
def test_parameters_and_outputs_are_flaxes(ours, flaxes, number):
    constructor = dict(CONSTRUCTORS[number])
    if ours is NNX[0] and "qkv_features" in constructor:
        constructor["num_kv_heads"] = 2
    masks = (None, MASK.astype(np.float32), MASK)
    call = {"deterministic": False, "mask": masks[number % 3]}
    params, run = build(ours, X, Y, call=call, **constructor)
    flax_params, flax_run = build(flaxes, X, Y, call=call, **constructor)
    assert_equal(params, flax_params)
    out = run(flax_params, X, Y, **call)
    flax_out = flax_run(params, X, Y, **call)
    assert out.shape == flax_out.shape
    assert_close(out, flax_out)
    if "dropout_rate" in constructor:
        call["deterministic"] = True
        assert largest_difference(out, run(params, X, Y, **call)) > 1e-3


@family
def test_dtypes_are_flaxes(ours, flaxes):
    params, run = build(ours, X, Y, dtype=jnp.bfloat16)
    _, flax_run = build(flaxes, X, Y, dtype=jnp.bfloat16)
    out = jax.jit(run)(params, X, Y, mask=MASK)
    flax_out = jax.jit(flax_run)(params, X, Y, mask=MASK)
    assert_close(out, flax_out, 0.03)

    def shapes(cls):
        def half_params():
            params, _ = build(cls, X, Y, param_dtype=jnp.float16)
            return params

        return jax.eval_shape(half_params)

    assert shapes(ours) == shapes(flaxes)
    assert shapes(ours)["query"]["bias"].dtype == jnp.float16


def test_checkpoints_load_in_the_other():
    ours, flaxes = LINEN
    params, run = build(ours, X, Y, kernel_init=uniform)
    flax_params, flax_run = build(flaxes, X, Y, kernel_init=ONES)
    loaded = serialization.from_bytes(flax_params, serialization.to_bytes(params))
    assert_close(flax_run(loaded, X, Y), run(params, X, Y))

    ours, flaxes = NNX
    assert ours.__mro__[1] is flaxes
    module = nnx_layer(ours, num_kv_heads=2, kernel_init=uniform)
    flax_module = nnx_layer(flaxes, num_kv_heads=2, kernel_init=ONES)
    flax_nnx.update(flax_module, flax_nnx.state(module))
    assert_close(flax_module(X, Y), module(X, Y))


def test_partitioned_initialisers_are_kept():
    named = flax_linen.with_partitioning(uniform, (None, "heads", None))
    ours, flaxes = LINEN
    variables = ours(num_heads=N, kernel_init=named).init(jax.random.key(0), X)
    flax_variables = flaxes(num_heads=N, kernel_init=named).init(jax.random.key(0), X)
    assert_equal(variables, flax_variables)
    specs = flax_linen.get_partition_spec(variables)["params"]
    assert specs["key"]["kernel"] == jax.sharding.PartitionSpec(None, "heads", None)
    module = nnx_layer(NNX[0], kernel_init=flax_nnx.with_metadata(uniform, note="heads"))
    assert module.value.kernel.get_metadata()["note"] == "heads"


def test_captures_by_class_are_flaxes():
    """Such a filter captures the output, and no method or function of memeff's own."""

    def captured(cls, **constructor):
        module = cls(num_heads=N, decode=True, **constructor)
        variables = module.init(jax.random.key(0), X)

        def is_attention(part, _):
            return isinstance(part, flax_linen.MultiHeadDotProductAttention)

        apply = functools.partial(module.apply, capture_intermediates=is_attention)
        _, written = jax.jit(functools.partial(apply, mutable=["cache"]))(variables, X[:, :1])
        return jax.tree.map(jnp.shape, written["intermediates"])

    ours, flaxes = LINEN
    assert captured(ours, mask_fn=lambda *pair: pair[2] >= pair[3]) == captured(flaxes)


# ---- where memeff's modules differ from Flax's


def test_rows_that_see_nothing_are_zero():
    """A row that sees no key gives the bias of the output; Flax gives it the mean of all values."""
    for ours, flaxes in FAMILIES.values():
        params, run = build(ours, X, Y)
        _, flax_run = build(flaxes, X, Y)
        params["out"]["bias"] = np.arange(F, dtype=np.float32)
        mask = MASK & (np.arange(T) != 2)[:, None]
        out = np.asarray(run(params, X, Y, mask=mask))
        mean = np.asarray(flax_run(params, X, Y, mask=mask))
        assert_equal(out[:, 2], np.broadcast_to(params["out"]["bias"], (B, F)))
        assert_close(np.delete(out, 2, 1), np.delete(mean, 2, 1))
        assert largest_difference(out[:, 2], mean[:, 2]) > 1e-3


def test_sow_weights_is_refused_with_its_size():
    message = r"sow_weights=True .* \(2, 4, 7, 9\) or 0\.0 MiB .* Use Flax's own"
    for ours, _ in FAMILIES.values():
        params, run = build(ours, X, Y)
        with pytest.raises(NotImplementedError, match=message):
            run(params, X, Y, sow_weights=True)


# ---- gradients and transformations


def test_linen_gradients_are_flaxes_under_scan_and_remat():
    model = linen_model(LINEN[1])
    our_model = linen_model(LINEN[0])
    variables = init_linen_model(model)
    step = jax.jit(jax.value_and_grad(linen_loss, argnums=1), static_argnums=0)
    expected = step(model, variables)
    assert_close(step(our_model, variables), expected, 1e-5)
    with nn.switch_linen() as switched:
        traced = equations(functools.partial(linen_loss, model), variables)
    assert traced == equations(functools.partial(linen_loss, our_model), variables)
    assert set(switched) == {"attention"}


def test_nnx_gradients_are_flaxes_under_scan_and_remat():
    def step(model):
        value, gradient = flax_nnx.jit(flax_nnx.value_and_grad(nnx_loss))(model, X)
        return value, flax_nnx.to_pure_dict(gradient)

    def switched_model():
        model = nnx_model(NNX[1])
        assert nn.switch_nnx(model) == ["attention"]
        return model

    def our_loss(x):
        return nnx_loss(nnx_model(NNX[0]), x)

    def switched_loss(x):
        return nnx_loss(switched_model(), x)

    expected = step(nnx_model(NNX[1]))
    assert_close(step(nnx_model(NNX[0])), expected, 1e-5)
    model = switched_model()
    assert model.attention.attention_fn is nn.attention_fn
    assert equations(our_loss, X) == equations(switched_loss, X)
    graph, state = flax_nnx.split(model)
    assert flax_nnx.merge(graph, state).attention.attention_fn is nn.attention_fn
    assert nn.switch_nnx(model) == []  # once more changes nothing and is no error
