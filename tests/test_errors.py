"""Wrong calls are cured by one sentence, right ones are jax.nn's; every keyword does something."""
# ruff: noqa: E501  (a wrong call and its message are one row)

import ast
import functools
import inspect
import itertools
import pathlib
import pydoc
import re
import subprocess
import sys
import typing
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import AWKWARD, CASES, qkv
from conftest import run_calls
from test_function_errors import WRONG as WRONG_FUNCTIONS

import memeff
from memeff import dot_product_attention, warn
from memeff.arguments import Arguments, AttentionKwargs

# ---- wrong calls. q, k, v are [2, 5, 4, 8], [2, 7, 2, 8], [2, 7, 2, 6] unless the call says
# otherwise.

f32, i32 = np.float32, np.int32
ones = lambda *shape, dtype=f32: np.ones(shape, dtype)
rng_key = np.array([0, 1], np.uint32)
rate = {"dropout_rate": 0.5}

WRONG = [
    # query, key, value
    (
        {"query": ones(5, 8)},
        ValueError,
        r"query must have shape \[\*B, T, N, H\] with at least 3 dims; got \(5, 8\)",
    ),
    (
        {"key": ones(7, 8)},
        ValueError,
        r"key must have shape \[\*B, S, K, H\] with at least 3 dims; got \(7, 8\)",
    ),
    ({"value": ones(6)}, ValueError, r"value must have shape \[\*B, S, K, H\] .*; got \(6,\)"),
    ({"query": None}, TypeError, r"query must be an array, got None"),
    ({"key": "keys"}, TypeError, r"key must be an array, got str 'keys'"),
    ({"value": {"a": 1}}, TypeError, r"value must be an array, got dict"),
    ({"value": [[1.0], [1.0, 2.0]]}, TypeError, r"value must be an array, got list"),
    (
        {"query": ones(2, 5, 4, 8, dtype=i32)},
        TypeError,
        r"query must be a floating-point array, got int32\. Cast it",
    ),
    (
        {"value": ones(2, 7, 2, 6, dtype=bool)},
        TypeError,
        r"value must be a floating-point array, got bool",
    ),
    (
        {"key": ones(2, 7, 2, 8, dtype=np.complex64)},
        TypeError,
        r"key must be a floating-point array, got complex64",
    ),
    (
        {"key": ones(2, 7, 2, 8, dtype=np.float16)},
        TypeError,
        r"key is float16 and query is float32: .* one dtype\. Cast one",
    ),
    (
        {"value": jnp.ones((2, 7, 2, 6), jnp.bfloat16)},
        TypeError,
        r"value is bfloat16 and query is float32",
    ),
    (
        {n: jnp.ones((1, 3, 1, 2), jnp.float8_e4m3fn) for n in ("query", "key", "value")},
        TypeError,
        r"query is float8_e4m3fn: supported are bfloat16, .*Cast it",
    ),
    (
        {"key": ones(3, 7, 2, 8)},
        ValueError,
        r"key must have shape \(2, S, K, H=8\), with the leading dims of query; got \(3, 7, 2, 8\)",
    ),
    (
        {"key": ones(7, 2, 8)},
        ValueError,
        r"key must have shape \(2, S, K, H=8\), with the leading dims of query; got \(7, 2, 8\)",
    ),
    (
        {"key": ones(2, 7, 2, 9)},
        ValueError,
        r"key must have the head size of query, H=8; got 9 \(shape \(2, 7, 2, 9\)\)",
    ),
    (
        {"value": ones(2, 6, 2, 6)},
        ValueError,
        r"value must have shape \(2, S=7, K=2, D\), like key; got \(2, 6, 2, 6\)",
    ),
    (
        {"value": ones(2, 7, 4, 6)},
        ValueError,
        r"value must have shape \(2, S=7, K=2, D\), like key; got \(2, 7, 4, 6\)",
    ),
    (
        {"query": ones(2, 5, 3, 8)},
        ValueError,
        r"query has 3 heads and key has 2: query heads \(N\) must be a multiple of key heads \(K\)",
    ),
    (
        {"key": ones(2, 7, 0, 8), "value": ones(2, 7, 0, 6)},
        ValueError,
        r"query has 4 heads and key has 0: query heads",
    ),
    (
        {"query": ones(2, 5, 4, 0), "key": ones(2, 7, 2, 0)},
        ValueError,
        r"query has head size H=0: .*Use H >= 1",
    ),
    # bias and mask
    (
        {"bias": ones(2, 4, 5, 8)},
        ValueError,
        r"bias must be broadcastable to \(2, N=4, T=5, S=7\); got \(2, 4, 5, 8\)",
    ),
    (
        {"bias": ones(2, 2, 5, 7)},
        ValueError,
        r"bias must be broadcastable to \(2, N=4, T=5, S=7\); got \(2, 2, 5, 7\)",
    ),
    (
        {"bias": ones(3, 1, 1, 1, 1)},
        ValueError,
        r"bias must be broadcastable to .*; got \(3, 1, 1, 1, 1\)",
    ),
    (
        {"bias": ones(5, 7, dtype=bool)},
        TypeError,
        r"bias must be floating point .*, got bool\. Pass a boolean one as mask=",
    ),
    (
        {"bias": ones(5, 7, dtype=np.complex64)},
        TypeError,
        r"bias must be floating point .*, got complex64\. Cast it",
    ),
    (
        {"mask": ones(5, 6, dtype=bool)},
        ValueError,
        r"mask must be broadcastable to \(2, N=4, T=5, S=7\); got \(5, 6\)",
    ),
    (
        {"mask": ones(2, 7, dtype=bool)},
        ValueError,
        r"mask must be broadcastable to .*; got \(2, 7\)",
    ),
    (
        {"mask": ones(5, 7)},
        TypeError,
        r"mask must be boolean \(True = may attend\), got float32\. Pass an additive term as bias=",
    ),
    (
        {"mask": ones(5, 7, dtype=i32)},
        TypeError,
        r"mask must be boolean .*, got int32\. .*mask != 0",
    ),
    ({"mask": "causal"}, TypeError, r"mask must be an array, got str 'causal'"),
    # scale and soft cap
    ({"scale": "big"}, TypeError, r"scale must be a number or a scalar array, got str 'big'"),
    ({"scale": True}, TypeError, r"scale must be a number or a scalar array, got bool True"),
    ({"scale": float("nan")}, ValueError, r"scale=nan: it must be finite"),
    (
        {"scale": ones(4)},
        ValueError,
        r"scale must be a number or a scalar array, got shape \(4,\)\. Scale query per head",
    ),
    ({"scale": np.array(1j)}, TypeError, r"scale must be floating point, got an array of complex"),
    (
        {"logits_soft_cap": 0},
        ValueError,
        r"logits_soft_cap=0: a cap must be > 0; use None for no cap",
    ),
    ({"logits_soft_cap": -5.0}, ValueError, r"logits_soft_cap=-5: a cap must be > 0; use None"),
    ({"logits_soft_cap": np.inf}, ValueError, r"logits_soft_cap=inf: it must be finite"),
    (
        {"logits_soft_cap": [30.0]},
        TypeError,
        r"logits_soft_cap must be a number or a scalar array, got list",
    ),
    # positions
    ({"is_causal": 1}, TypeError, r"is_causal must be True or False .*, got int 1"),
    ({"is_causal": "yes"}, TypeError, r"is_causal must be True or False .*, got str 'yes'"),
    (
        {"is_causal": jnp.array(True)},
        TypeError,
        r"is_causal must be True or False \(it is fixed while tracing\)",
    ),
    (
        {"local_window_size": (1, 2, 3)},
        ValueError,
        r"local_window_size=\(1, 2, 3\): give \(left, right\), or one int",
    ),
    (
        {"local_window_size": (-1, 0)},
        ValueError,
        r"local_window_size=\(-1, 0\): sides count tokens and must be >= 0; use None for an unb",
    ),
    (
        {"local_window_size": -4},
        ValueError,
        r"local_window_size=-4: sides count tokens and must be >= 0",
    ),
    (
        {"local_window_size": 2.5},
        TypeError,
        r"local_window_size=2\.5: sides are ints \(tokens\) or None, got float 2\.5",
    ),
    (
        {"local_window_size": (True, 1)},
        TypeError,
        r"local_window_size=\(True, 1\): sides are ints .*, got bool True",
    ),
    ({"q_offset": 1.5}, TypeError, r"q_offset must be integers, got float"),
    (
        {"q_offset": "a"},
        TypeError,
        r"q_offset must be an int or integers \[\*B\] \(positions\), got str",
    ),
    (
        {"q_offset": None},
        TypeError,
        r"q_offset must be an int or integers \[\*B\] \(positions\), got None",
    ),
    (
        {"q_offset": ones(3, dtype=i32)},
        ValueError,
        r"q_offset must have the leading dims of query, \(2,\); got shape \(3,\)",
    ),
    (
        {"q_offset": 2**29},
        ValueError,
        r"q_offset=536870912: positions must lie between -536870911 and 536870911",
    ),
    (
        {"q_offset": np.array([0, -(2**31) + 5])},
        ValueError,
        r"q_offset=-2147483643: positions must lie",
    ),
    (
        {"query_seq_lengths": np.array([5, 6])},
        ValueError,
        r"query_seq_lengths must lie between 0 and T=5; got 5 to 6",
    ),
    (
        {"key_value_seq_lengths": np.array([-1, 7])},
        ValueError,
        r"key_value_seq_lengths must lie between 0 and S=7; got -1 to 7",
    ),
    (
        {"key_value_seq_lengths": 8},
        ValueError,
        r"key_value_seq_lengths must lie between 0 and S=7; got 8 to 8",
    ),
    ({"query_seq_lengths": ones(2)}, TypeError, r"query_seq_lengths must be integers, got float32"),
    (
        {"key_value_seq_lengths": ones(3, dtype=i32)},
        ValueError,
        r"key_value_seq_lengths must have the leading dims of query, \(2,\)",
    ),
    (
        {"key_value_seq_lengths": ones(2, 7, dtype=bool)},
        TypeError,
        r"key_value_seq_lengths must be integers, got bool",
    ),
    # segments
    (
        {"query_segment_ids": ones(2, 5, dtype=i32)},
        ValueError,
        r"query_segment_ids came without key_value_segment_ids, and T=5 is not S=7",
    ),
    (
        {"key_value_segment_ids": ones(2, 7, dtype=i32)},
        ValueError,
        r"key_value_segment_ids came without query_segment_ids: pass both",
    ),
    (
        {
            "query_segment_ids": ones(2, 7, dtype=i32),
            "key_value_segment_ids": ones(2, 7, dtype=i32),
        },
        ValueError,
        r"query_segment_ids must have shape \(2, T=5\); got \(2, 7\)",
    ),
    (
        {
            "query_segment_ids": ones(2, 5, dtype=i32),
            "key_value_segment_ids": ones(3, 7, dtype=i32),
        },
        ValueError,
        r"key_value_segment_ids must have shape \(2, S=7\); got \(3, 7\)",
    ),
    (
        {"query_segment_ids": ones(2, 5), "key_value_segment_ids": ones(2, 7, dtype=i32)},
        TypeError,
        r"query_segment_ids must be integers, got float32",
    ),
    # how
    (
        {"implementation": "pallas"},
        NotImplementedError,
        r'implementation="pallas" cannot run this call: .*\. Use implementation=None .*"xla", which always runs',
    ),
    (
        {"implementation": "cudnn"},
        NotImplementedError,
        r'implementation="cudnn" cannot run this call: .*jax\.nn',
    ),
    (
        {"backward": "both"},
        ValueError,
        r"backward='both' must be None, \"split\", \"fused\" or \"fastest\"",
    ),
    (
        {"backward": "fused"},
        NotImplementedError,
        r'backward="fused" cannot run this call: .*\. Omit `backward`',
    ),
    (
        {"backward": "fused", "implementation": "xla"},
        NotImplementedError,
        r'"xla" cannot run this call: only the kernels support backward="fused"\. Omit',
    ),
    (
        {"implementation": "flash"},
        ValueError,
        r"implementation='flash' is not known: use None or one of 'xla', 'reference', 'pallas'",
    ),
    (
        {"chunk_size": 0},
        ValueError,
        r"chunk_size=0: sides count tokens and must be >= 1; use None for the default",
    ),
    (
        {"chunk_size": (128, -1)},
        ValueError,
        r"chunk_size=\(128, -1\): sides count tokens and must be >= 1",
    ),
    (
        {"chunk_size": (1, 2, 3)},
        ValueError,
        r"chunk_size=\(1, 2, 3\): give \(query, key\) in tokens, or one int for both",
    ),
    (
        {"chunk_size": 64.0},
        TypeError,
        r"chunk_size=64\.0: sides are ints \(tokens\), got float 64\.0",
    ),
    (
        {"precision": "very"},
        ValueError,
        r"precision='very' must be None, \"default\", \"high\", \"highest\", a jax\.lax\.Precision",
    ),
    ({"precision": {"a": 1}}, ValueError, r"precision=\{'a': 1\} must be None"),
    # dropout
    (
        rate,
        ValueError,
        r"dropout_rate=0\.5 came without dropout_rng: pass a key, or omit dropout_rate",
    ),
    (
        {"dropout_rate": 1.0, "dropout_rng": rng_key},
        ValueError,
        r"dropout_rate=1: .* must lie in \[0, 1\)",
    ),
    ({"dropout_rate": -0.1}, ValueError, r"dropout_rate=-0\.1: .* must lie in \[0, 1\)"),
    ({"dropout_rate": float("nan")}, ValueError, r"dropout_rate=nan: .* must lie in \[0, 1\)"),
    ({"dropout_rate": "0.5"}, TypeError, r"dropout_rate must be a number .*, got str '0\.5'"),
    (
        {"dropout_rate": jnp.float32(0.5), "dropout_rng": rng_key},
        TypeError,
        r"dropout_rate must be a number \(it is fixed while tracing\)",
    ),
    (
        {"dropout_rng": 0, **rate},
        TypeError,
        r"dropout_rng must be one key of jax\.random\.key or PRNGKey, got int32 of shape \(\)",
    ),
    (
        {"dropout_rng": ones(3, 2, dtype=np.uint32), **rate},
        TypeError,
        r"dropout_rng must be one key .*, got uint32 of shape \(3, 2\)",
    ),
    (
        {"dropout_rng": jax.random.split(jax.random.key(0), 3), **rate},
        TypeError,
        r"dropout_rng must be one key .* of shape \(3, 2\)",
    ),
    (
        {"dropout_rng": jax.random.key(0, impl="rbg"), **rate},
        NotImplementedError,
        r"dropout_rng is a key of .*rbg.*threefry2x32\. Make it with",
    ),
    (
        {"broadcast_dropout": None},
        TypeError,
        r"broadcast_dropout must be True or False .*, got None",
    ),
    # Flax's hooks
    (
        {"deterministic": True},
        TypeError,
        r"deterministic= is a hook of Flax's modules, .*: give the modules attention_fn=memeff\.nn\.attention_fn",
    ),
    (
        {"deterministic": False, "dtype": None, "module": None},
        TypeError,
        r"deterministic= is a hook of Flax's modules",
    ),
    ({"dtype": "bfloat16"}, TypeError, r"dtype= is a hook of Flax's modules, .*cast arrays before"),
    (
        {"module": object()},
        TypeError,
        r"module= is a hook of Flax's modules, .*memeff\.nn\.attention_fn",
    ),
]


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_wrong_calls_are_cured_by_their_message(i):
    kwargs, kind, message = WRONG[i]
    call = {"query": ones(2, 5, 4, 8), "key": ones(2, 7, 2, 8), "value": ones(2, 7, 2, 6)} | kwargs
    with pytest.raises(kind, match=message) as e:
        jax.eval_shape(lambda: dot_product_attention(**call))
    assert type(e.value) is kind
    text = str(e.value)
    assert any(name in text for name in kwargs), "the argument as the user typed it"
    assert len(text) < 300 and "\n" not in text, "one sentence, two at most"


def test_enough_wrong_calls():
    assert len(WRONG) >= 40
    named = {name for kwargs, *_ in WRONG for name in kwargs}
    cannot_be_wrong = {"return_residual"}
    elsewhere = {"memory_limit"} | {name for kwargs, *_ in WRONG_FUNCTIONS for name in kwargs}
    assert named | cannot_be_wrong | elsewhere == set(
        inspect.signature(dot_product_attention).parameters
    )


@pytest.mark.parametrize("name", ["is_causal", "broadcast_dropout"])
def test_a_traced_choice_is_refused(name):
    args = qkv(np.random.default_rng(0), f32, AWKWARD)
    with pytest.raises(TypeError, match=rf"{name} must be True or False.*got a traced value"):
        jax.jit(lambda x: dot_product_attention(*args, **{name: x}))(True)


def test_traced_lengths_and_offsets_need_no_value():
    """They cannot be checked, and count as at most S."""
    args = qkv(np.random.default_rng(0), f32, AWKWARD)
    long = jax.jit(
        lambda n: dot_product_attention(*args, key_value_seq_lengths=n, query_seq_lengths=n)
    )(np.array([99, 1000]))
    np.testing.assert_allclose(long, dot_product_attention(*args), atol=2e-6)
    none = jax.jit(lambda n: dot_product_attention(*args, key_value_seq_lengths=n))(
        np.array([-3, -1])
    )
    assert np.all(none == 0)


# ---- large dense masks


@pytest.mark.parametrize(
    ("name", "dtype", "instead"),
    [
        ("mask", bool, "is_causal, local_window_size, key_value_seq_lengths or segment ids"),
        ("bias", jnp.bfloat16, "local_window_size, is_causal or segment ids"),
    ],
)
def test_a_large_dense_array_warns_once_and_names_what_replaces_it(
    name, dtype, instead, monkeypatch
):
    monkeypatch.setattr(warn, "_warned", set())
    x = jax.ShapeDtypeStruct((1, 32_768, 4, 64), jnp.bfloat16)
    dense = jax.ShapeDtypeStruct((1, 1, 32_768, 32_768), dtype)
    trace = lambda dense: jax.eval_shape(
        lambda q, dense: dot_product_attention(q, q, q, **{name: dense}), x, dense
    )
    with pytest.warns(
        UserWarning,
        match=rf"{name} of shape \(1, 1, 32768, 32768\) takes .* MiB.*: say it with {instead}",
    ) as record:
        trace(dense)
    assert len(record) == 1 and record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(dense)
        warn._warned.clear()
        trace(jax.ShapeDtypeStruct((1, 4, 1, 32_768), dtype))
        trace(jax.ShapeDtypeStruct((32_768, 32_768), dtype).update(shape=(32_768, 1)))


# ---- a superset of jax.nn


def test_the_signature_continues_that_of_jax_nn():
    theirs, ours = (
        inspect.signature(f).parameters
        for f in (jax.nn.dot_product_attention, dot_product_attention)
    )
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    positional = [n for n, p in ours.items() if p.kind is not p.KEYWORD_ONLY]
    assert positional == [n for n, p in theirs.items() if p.kind is not p.KEYWORD_ONLY]


CHOICES = {
    "bias": (None, (2, 4, 19, 23), (1, 4, 1, 23), (19, 23), int),
    "mask": (None, (2, 1, 19, 23), (1, 4, 19, 1), (23,)),
    "scale": (None, 0.3, "array"),
    "is_causal": (False, True),
    "query_seq_lengths": (None, np.array([19, 7], i32)),
    "key_value_seq_lengths": (None, np.array([4, 23], i32)),
    "local_window_size": (None, 3, (5, 2)),
    "implementation": (None, "xla"),
    "return_residual": (False, True),
    "dims": (4, 3, "3 and 4"),
    "dtype": ("float32", "bfloat16"),
}


def _combinations():
    """Every pair of choices, in few calls."""
    names = list(CHOICES)
    left = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(range(len(CHOICES[a])), range(len(CHOICES[b])))
    }
    rng, calls = np.random.default_rng(0), []
    while left:
        drawn = [{n: int(rng.integers(len(CHOICES[n]))) for n in names} for _ in range(60)]
        pairs = [set(itertools.combinations(call.items(), 2)) & left for call in drawn]
        best = max(range(60), key=lambda i: len(pairs[i]))
        if pairs[best]:
            calls.append({n: CHOICES[n][i] for n, i in drawn[best].items()})
            left -= pairs[best]
    return calls


@functools.cache
def _superset():
    """(ours, theirs, rows that see something) of every combination, compiled together."""
    statics, inputs = [], []
    for i, choice in enumerate(_combinations()):
        rng, choice = np.random.default_rng(i), dict(choice)
        dims, dtype, three = choice.pop("dims"), jnp.dtype(choice.pop("dtype")), slice(None)
        args = [
            rng.standard_normal((2, n, h, 6)).astype(dtype) for n, h in ((19, 4), (23, 2), (23, 2))
        ]
        arrays = {}
        for name in ("bias", "mask"):
            if (shape := choice.pop(name)) is int:
                arrays[name] = rng.integers(-2, 3, (1, 4, 19, 23))
            elif shape is not None:
                arrays[name] = (
                    rng.standard_normal(shape).astype(f32)
                    if name == "bias"
                    else rng.random(shape) < 0.7
                )
        for name in ("query_seq_lengths", "key_value_seq_lengths"):
            if (lengths := choice.pop(name)) is not None:
                arrays[name] = lengths
        if choice["scale"] == "array":
            arrays["scale"] = np.array(choice.pop("scale") and 0.7, f32)
        if dims != 4:
            three = slice(1, 2)
            args = [x[1] for x in args]
            arrays = {n: x if np.shape(x)[:1] != (2,) else x[three] for n, x in arrays.items()}
            if dims == "3 and 4":
                args[1:] = [x[None] for x in args[1:]]
        statics.append(choice)
        inputs.append((args, arrays))

    def run(inputs):
        of = []
        for static, (args, arrays) in zip(statics, inputs, strict=True):
            both = [
                f(*args, **arrays, **static)
                for f in (dot_product_attention, jax.nn.dot_product_attention)
            ]
            of.append(
                (
                    *both,
                    dot_product_attention(*args, **arrays, **static | {"return_residual": True})[1],
                )
            )
        return of

    return statics, inputs, jax.device_get(jax.jit(run)(inputs))


def test_every_combination_of_jax_nns_arguments_gives_jax_nns_result():
    statics, inputs, results = _superset()
    assert len(statics) >= 20
    for static, (args, arrays), (ours, theirs, lse) in zip(statics, inputs, results, strict=True):
        # jax.nn gives the mean of value to rows that see nothing; memeff gives 0
        some, dtype = lse > -np.inf, args[0].dtype
        if not static["return_residual"]:
            ours, theirs = (ours,), (theirs,)
        for x, y, eps in zip(
            ours, theirs, (2e-2, 5e-2) if dtype == jnp.bfloat16 else (4e-6, 1e-5), strict=False
        ):
            x, y, what = (
                np.asarray(x, f32),
                np.asarray(y, f32),
                f"{static} {jax.tree.map(np.shape, arrays)}",
            )
            assert x.shape == y.shape, what
            np.testing.assert_allclose(x[some], y[some], rtol=eps, atol=eps, err_msg=what)
        assert ours[0].dtype == theirs[0].dtype


def test_the_types_of_the_signature_are_those_of_the_overloads():
    """The signature is for help(); Arguments and AttentionKwargs are for functions that hand a call on."""
    hints = typing.get_type_hints(dot_product_attention)
    parameters = inspect.signature(dot_product_attention).parameters
    overloads = typing.get_overloads(dot_product_attention)
    assert overloads and list(parameters) == [*hints][:-1]
    flaxes = {
        "deterministic",
        "dtype",
        "module",
    }  # in no overload, so that a type checker refuses them
    keywords = typing.get_type_hints(AttentionKwargs)
    for overload in overloads:
        named = typing.get_type_hints(overload)
        assert named.keys() - {"kwargs"} | keywords.keys() == hints.keys() - flaxes
        defaults = inspect.signature(overload).parameters
        for name in named.keys() - {"kwargs", "return", "return_residual"}:
            assert named[name] == hints[name], name
            assert defaults[name].default == parameters[name].default
    assert keywords.items() <= hints.items()
    arguments = typing.get_type_hints(Arguments)
    assert arguments.keys() == parameters.keys() - flaxes
    for name, default in Arguments._field_defaults.items():
        assert default == parameters[name].default, name
    assert arguments.items() <= hints.items()


def test_help_shows_types():
    text = pydoc.render_doc(dot_product_attention, renderer=pydoc.plaintext)
    assert "mask: 'ArrayLike | None' = None" in text and "-> 'Array | tuple[Array, Array]'" in text


# ---- every keyword does something

CHANGES = {
    "bias": {"bias": np.linspace(-2, 2, 53, dtype=f32)},
    "mask": {"mask": np.arange(53) % 3 > 0},
    "scale": {"scale": 0.2},
    "is_causal": {"is_causal": True},
    "query_seq_lengths": {"query_seq_lengths": np.array([9, 20])},
    "key_value_seq_lengths": {"key_value_seq_lengths": np.array([9, 20])},
    "local_window_size": {"local_window_size": 4},
    "logits_soft_cap": {"logits_soft_cap": 0.5},
    "query_segment_ids": {
        "query_segment_ids": np.arange(37)[None] // 9,
        "key_value_segment_ids": np.zeros((1, 53), int),
    },
    "key_value_segment_ids": {
        "query_segment_ids": np.zeros((1, 37), int),
        "key_value_segment_ids": np.arange(53)[None] // 9,
    },
    "dropout_rng": {"dropout_rate": 0.5, "dropout_rng": np.array([0, 1], np.uint32)},
    "dropout_rate": {"dropout_rate": 0.4, "dropout_rng": np.array([0, 0], np.uint32)},
    "broadcast_dropout": {
        "dropout_rate": 0.5,
        "dropout_rng": np.array([0, 0], np.uint32),
        "broadcast_dropout": False,
    },
    "q_offset": {"is_causal": True, "q_offset": 3},
    "score_fn": {"score_fn": lambda s, b, h, i, j, p: s + 0.1 * j},
    "score_params": {"score_fn": lambda s, b, h, i, j, p: s * p, "score_params": 2.0},
    "mask_fn": {"mask_fn": lambda b, h, i, j, p: j % 3 > 0},
    "mask_params": {"mask_fn": lambda b, h, i, j, p: j % p > 0, "mask_params": 3},
    "sinks": {"sinks": np.ones(6, f32)},
    "qk_transform": {"qk_transform": lambda x, i, which, p: x * 2},
    "qk_transform_params": {
        "qk_transform": lambda x, i, which, p: x * p,
        "qk_transform_params": np.float32(2),
    },
}
AGAINST = {
    "score_params": {"score_fn": lambda s, b, h, i, j, p: s * p, "score_params": 1.0},
    "mask_params": {"mask_fn": lambda b, h, i, j, p: j % p > 0, "mask_params": 4},
    "qk_transform_params": {
        "qk_transform": lambda x, i, which, p: x * p,
        "qk_transform_params": np.float32(1),
    },
    "q_offset": {"is_causal": True},
    "dropout_rng": {"dropout_rate": 0.5, "dropout_rng": np.array([0, 0], np.uint32)},
    "dropout_rate": {"dropout_rate": 0.5, "dropout_rng": np.array([0, 0], np.uint32)},
    "broadcast_dropout": {"dropout_rate": 0.5, "dropout_rng": np.array([0, 0], np.uint32)},
    "query_segment_ids": {
        "query_segment_ids": np.zeros((1, 37), int),
        "key_value_segment_ids": np.zeros((1, 53), int),
    },
    "key_value_segment_ids": {
        "query_segment_ids": np.zeros((1, 37), int),
        "key_value_segment_ids": np.zeros((1, 53), int),
    },
}
ELSEWHERE = {  # changes no number; the test that shows what it does
    "return_residual": "test_keywords_that_change_no_number",
    "chunk_size": "test_keywords_that_change_no_number",
    "memory_limit": "test_plan.py",
    "precision": "test_keywords_that_change_no_number",
    "implementation": "test_keywords_that_change_no_number",
    "backward": "test_dispatch.py",
    "deterministic": "test_wrong_calls_are_cured_by_their_message",
    "dtype": "test_wrong_calls_are_cured_by_their_message",
    "module": "test_wrong_calls_are_cured_by_their_message",
}


def test_every_keyword_changes_the_result():
    parameters = list(inspect.signature(dot_product_attention).parameters)[3:]
    assert set(parameters) == set(CHANGES) | set(ELSEWHERE)
    args = CASES["plain"].inputs()[0]
    call = lambda kwargs: dot_product_attention(*args, **kwargs).astype(f32)
    outs = jax.jit(lambda: {n: (call(CHANGES[n]), call(AGAINST.get(n, {}))) for n in CHANGES})()
    for name, (with_, without) in outs.items():
        assert np.abs(with_ - without).max() > 1e-3, name


def test_keywords_that_change_no_number():
    args = CASES["plain"].inputs()[0]
    program = lambda **kwargs: (
        jax.jit(lambda *x: dot_product_attention(*x, **kwargs)).lower(*args).as_text()
    )
    plain = program()
    assert program(chunk_size=16) != plain and program(chunk_size=(16, 8)) != program(
        chunk_size=(8, 16)
    )
    assert "HIGHEST" in program(precision="highest") and "HIGHEST" not in plain
    assert program(implementation="reference") != plain == program(implementation="xla")
    out, lse = dot_product_attention(*args, return_residual=True)
    assert out.shape == (2, 37, 6, 11) and lse.shape == (2, 37, 6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtypes_of_results(dtype):
    with jax.enable_x64(dtype == "float64"):
        args = tuple(
            jnp.asarray(x) for x in qkv(np.random.default_rng(0), jnp.dtype(dtype), AWKWARD)
        )
        bias = jnp.zeros((53,), jnp.float32)
        out, lse = dot_product_attention(*args, bias, return_residual=True)
        grads = jax.grad(
            lambda *x: dot_product_attention(*x).astype(jnp.float32).sum(), (0, 1, 2, 3)
        )(*args, bias)
    assert out.dtype == jnp.dtype(dtype) and lse.dtype == (
        np.float64 if dtype == "float64" else f32
    )
    assert [x.dtype for x in grads] == [*[jnp.dtype(dtype)] * 3, f32]


def test_python_lists_are_arrays():
    args = CASES["one_key"].inputs()[0]
    as_lists = dot_product_attention(*(x.tolist() for x in args), key_value_seq_lengths=[1, 0])
    np.testing.assert_array_equal(
        as_lists, dot_product_attention(*args, key_value_seq_lengths=np.array([1, 0]))
    )


def test_segment_ids_of_mixed_kinds():
    """Of the query alone where T = S; int8 against uint32; one row for the whole batch."""
    args = CASES["square_causal"].inputs()[0]
    ids = np.arange(41) // 10
    plain = dot_product_attention(*args, query_segment_ids=np.stack([ids, ids]))
    for q, k in (
        (ids.astype(np.int8), ids.astype(np.uint32)),
        (ids[None], None),
        (ids.tolist(), None),
    ):
        out = dot_product_attention(*args, query_segment_ids=q, key_value_segment_ids=k)
        np.testing.assert_array_equal(out, plain)


def test_the_public_names():
    assert (
        sorted(memeff.__all__) == sorted(set(memeff.__all__))
        and "dot_product_attention" in memeff.__all__
    )
    assert all(hasattr(memeff, name) for name in memeff.__all__)


# ---- the oracle is independent


def test_the_oracle_imports_numpy_only():
    tree = ast.parse((pathlib.Path(__file__).parent / "oracle.py").read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported - sys.stdlib_module_names == {"numpy"}
    assert not re.search(r"__import__|importlib", ast.unparse(tree))


def test_the_oracle_runs_without_jax():
    code = "import sys, oracle; assert not {'jax', 'memeff', 'jaxlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=pathlib.Path(__file__).parent, check=True)


def test_the_oracle_derives_itself():
    """Its hand-made gradients against finite differences of its own forward."""
    import oracle

    rng = np.random.default_rng(0)
    args = [
        rng.standard_normal(shape)
        for shape in ((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 3), (2, 1, 4))
    ]
    kwargs = {
        "is_causal": True,
        "q_offset": 1,
        "kept": rng.random((3, 4)) < 0.7,
        "dropout_rate": 0.3,
    }
    dout, dlse, scalars = (
        rng.standard_normal((1, 3, 2, 3)),
        rng.standard_normal((1, 3, 2)),
        {"scale": 0.8, "logits_soft_cap": 1.3},
    )

    def loss(query, key, value, bias, scale, logits_soft_cap):
        out, lse = oracle.attention(
            query, key, value, bias, scale=scale, logits_soft_cap=logits_soft_cap, **kwargs
        )
        return (out * dout).sum() + (lse * dlse).sum()

    point = [*args, *map(np.array, scalars.values())]
    grads = oracle.gradients(*args, **scalars, **kwargs, dout=dout, dlse=dlse)
    for i, name in enumerate(("query", "key", "value", "bias", "scale", "logits_soft_cap")):
        for at in np.ndindex(point[i].shape):
            step = np.zeros_like(point[i], dtype=float)
            step[at] = 1e-6
            up, down = (
                loss(*(x + sign * step if i == j else x for j, x in enumerate(point)))
                for sign in (1, -1)
            )
            np.testing.assert_allclose(
                np.asarray(grads[name])[at], (up - down) / 2e-6, atol=1e-8, err_msg=name
            )


def test_run_calls_gives_the_names_back():
    args, kwargs = CASES["one_key"].inputs()
    assert set(run_calls({"a": (args, kwargs)})["a"].grads) == {"query", "key", "value", "bias"}
