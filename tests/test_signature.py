"""The signature is that of jax.nn and more: same calls, same results; types, help, public names."""

import functools
import inspect
import itertools
import pydoc
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memeff
from memeff import dot_product_attention
from memeff.arguments import Arguments, AttentionKwargs

f32 = np.float32

# ---- a superset of jax.nn


def positional_names(parameters):
    """Return the names of the parameters that can be passed by position."""
    return [name for name, x in parameters.items() if x.kind is not x.KEYWORD_ONLY]


def test_the_signature_continues_that_of_jax_nn():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(dot_product_attention).parameters
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name
    assert positional_names(ours) == positional_names(theirs)


CHOICES = {  # bias and mask: a shape, or int for an array of integers
    "bias": (None, (2, 4, 19, 23), (1, 4, 1, 23), (19, 23), int),
    "mask": (None, (2, 1, 19, 23), (1, 4, 19, 1), (23,)),
    "scale": (None, 0.3, "array"),
    "is_causal": (False, True),
    "query_seq_lengths": (None, np.array([19, 7], np.int32)),
    "key_value_seq_lengths": (None, np.array([4, 23], np.int32)),
    "local_window_size": (None, 3, (5, 2)),
    "implementation": (None, "xla"),
    "return_residual": (False, True),
    "dims": (4, 3, "3 and 4"),  # of query, and of key and value
    "dtype": ("float32", "bfloat16"),
}


def pairs_of(call):
    """Return all pairs of items of a call {name: index of the choice}."""
    return set(itertools.combinations(call.items(), 2))


def draw_call(rng):
    """Draw a call {name: index of the choice}."""
    return {name: int(rng.integers(len(options))) for name, options in CHOICES.items()}


def combinations():
    """Return calls {name: choice}, few of them, in which every pair of choices occurs."""
    missing = set()
    for a, b in itertools.combinations(CHOICES, 2):
        for i, j in itertools.product(range(len(CHOICES[a])), range(len(CHOICES[b]))):
            missing.add(((a, i), (b, j)))
    rng = np.random.default_rng(0)
    calls = []
    while missing:
        drawn = [draw_call(rng) for _ in range(60)]
        best = max(drawn, key=lambda call: len(pairs_of(call) & missing))
        if pairs_of(best) & missing:
            calls.append({name: CHOICES[name][i] for name, i in best.items()})
            missing -= pairs_of(best)
    return calls


def second_entry(x):
    """Return the part of an array that belongs to the second batch entry."""
    return x[1:2] if np.shape(x)[:1] == (2,) else x


def draw_inputs(call, rng):
    """Return (query, key, value), other arrays by name, and the static arguments of a call."""
    static = dict(call)
    dims = static.pop("dims")
    dtype = jnp.dtype(static.pop("dtype"))
    shapes = (2, 19, 4, 6), (2, 23, 2, 6), (2, 23, 2, 6)
    args = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    arrays = {}
    bias = static.pop("bias")
    if bias is int:
        arrays["bias"] = rng.integers(-2, 3, (1, 4, 19, 23))
    elif bias is not None:
        arrays["bias"] = rng.standard_normal(bias).astype(f32)
    mask = static.pop("mask")
    if mask is not None:
        arrays["mask"] = rng.random(mask) < 0.7
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        lengths = static.pop(name)
        if lengths is not None:
            arrays[name] = lengths
    if static["scale"] == "array":
        del static["scale"]
        arrays["scale"] = np.array(0.7, f32)
    if dims != 4:
        args = [x[1] for x in args]
        arrays = {name: second_entry(x) for name, x in arrays.items()}
    if dims == "3 and 4":
        args[1:] = [x[None] for x in args[1:]]
    return args, arrays, static


@functools.cache
def run_combinations():
    """Return (static arguments, inputs, results) of all combinations, compiled together.

    A result is (memeff's, jax.nn's, lse).
    """
    statics = []
    inputs = []
    for i, call in enumerate(combinations()):
        args, arrays, static = draw_inputs(call, np.random.default_rng(i))
        statics.append(static)
        inputs.append((args, arrays))

    @jax.jit
    def run(inputs):
        results = []
        for static, (args, arrays) in zip(statics, inputs, strict=True):
            ours = dot_product_attention(*args, **arrays, **static)
            theirs = jax.nn.dot_product_attention(*args, **arrays, **static)
            with_lse = static | {"return_residual": True}
            _, lse = dot_product_attention(*args, **arrays, **with_lse)
            results.append((ours, theirs, lse))
        return results

    return statics, inputs, jax.device_get(run(inputs))


@pytest.mark.once
def test_every_combination_of_jax_nns_arguments_gives_jax_nns_result():
    statics, inputs, results = run_combinations()
    assert len(statics) >= 20
    for static, (args, arrays), (ours, theirs, lse) in zip(statics, inputs, results, strict=True):
        # jax.nn gives the mean of value to rows that see nothing; memeff gives 0
        sees_a_key = lse > -np.inf
        if not static["return_residual"]:
            ours = (ours,)
            theirs = (theirs,)
        tolerances = (2e-2, 5e-2) if args[0].dtype == jnp.bfloat16 else (4e-6, 1e-5)  # out, lse
        call = f"{static} {jax.tree.map(np.shape, arrays)}"
        for x, y, eps in zip(ours, theirs, tolerances, strict=False):
            x = np.asarray(x, f32)
            y = np.asarray(y, f32)
            assert x.shape == y.shape, call
            np.testing.assert_allclose(
                x[sees_a_key], y[sees_a_key], rtol=eps, atol=eps, err_msg=call
            )
        assert ours[0].dtype == theirs[0].dtype


# ---- types, help, public names


def test_the_types_of_the_signature_are_those_of_the_overloads():
    """The types agree wherever they stand.

    help() shows the signature. Functions that hand a call on use Arguments and AttentionKwargs.
    """
    hints = typing.get_type_hints(dot_product_attention)
    parameters = inspect.signature(dot_product_attention).parameters
    overloads = typing.get_overloads(dot_product_attention)
    assert overloads
    assert list(parameters) == list(hints)[:-1]  # the last hint is that of the result
    # Flax's hooks are in no overload, so that a type checker refuses them.
    hooks = {"deterministic", "dtype", "module"}
    keywords = typing.get_type_hints(AttentionKwargs)
    for overload in overloads:
        named = typing.get_type_hints(overload)
        assert named.keys() - {"kwargs"} | keywords.keys() == hints.keys() - hooks
        defaults = inspect.signature(overload).parameters
        for name in named.keys() - {"kwargs", "return", "return_residual"}:
            assert named[name] == hints[name], name
            assert defaults[name].default == parameters[name].default
    assert keywords.items() <= hints.items()
    arguments = typing.get_type_hints(Arguments)
    assert arguments.keys() == parameters.keys() - hooks
    for name, default in Arguments._field_defaults.items():
        assert default == parameters[name].default, name
    assert arguments.items() <= hints.items()


def test_help_shows_types():
    text = pydoc.render_doc(dot_product_attention, renderer=pydoc.plaintext)
    assert "mask: 'ArrayLike | None' = None" in text
    assert "-> 'Array | tuple[Array, Array]'" in text


def test_help_names_each_attribute_of_a_public_class():
    for name in memeff.__all__:
        kind = getattr(memeff, name)
        if not inspect.isclass(kind):
            continue
        fields = getattr(kind, "__dataclass_fields__", getattr(kind, "_fields", ()))
        for field in fields:
            assert re.search(rf"\b{field}\b", inspect.getdoc(kind) or ""), (name, field)


def test_the_public_names():
    assert sorted(memeff.__all__) == sorted(set(memeff.__all__))
    assert "dot_product_attention" in memeff.__all__
    assert all(hasattr(memeff, name) for name in memeff.__all__)
