"""Numbers: out, lse and every gradient against the oracle."""

import functools
import itertools
import math

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES, MIXES, SINGLES, Sizes, qkv, split
from conftest import (
    EPS,
    assert_as_good,
    assert_case,
    assert_truth,
    cotangents,
    few,
    in_group,
    plain_call,
    run_call,
    run_calls,
    run_cases,
    true_call,
    true_case,
)
from jax.test_util import check_grads

from memeff import dot_product_attention, tile_sizes
from memeff.dropout import dropout_keep_mask, head_numbers
from memeff.problem import Dropout, Operands, Problem

# what the fast set runs; the rest of the table is in the slow one
# static twins, and what test_masks.py broadcasts
ELSEWHERE = ("bias_full", "mask_heads", "scale", "soft_cap", "precision")
# the others in float64
FLOAT32 = tuple(name for name in SINGLES if name not in ELSEWHERE) + MIXES[1::2]
BFLOAT16 = (
    "plain",
    "one_token",
    "causal",
    "bias_hides",
    "mask_dense",
    "soft_cap_array",
    "segments",
    "everything",
)
FLOAT16 = ("causal", "scale_array", "dropout_each")
FLOAT64 = ("plain", "three_leads", "bias_hides", "soft_cap_array", "everything", *MIXES[::2])
REFERENCE = ("plain", "three_leads", "head_97", "bias_hides", "everything", *MIXES[1::2])


# ---- the law of tolerance


def test_the_law_tells_another_rounding_from_a_larger_error():
    rng = np.random.default_rng(0)
    truth, plain, other = (size * rng.standard_normal(10_000) for size in (1, 1e-3, 1e-3))
    far = other.copy()
    far[7] = 4 * np.abs(plain).max()
    assert_as_good(truth + 1.4 * other, [truth + plain], truth, "float32")
    for wrong in (1.6 * other, far):
        with pytest.raises(AssertionError, match="of the error is"):
            assert_as_good(truth + wrong, [truth + plain], truth, "float32")


@pytest.mark.parametrize("name", FLOAT32)
def test_float32(name):
    assert_case(run_cases(in_group(name, FLOAT32), "float32")[name], name, "float32")


@pytest.mark.parametrize(
    ("dtype", "name"), [*(("bfloat16", n) for n in BFLOAT16), *(("float16", n) for n in FLOAT16)]
)
def test_half_precision(dtype, name):
    assert_case(run_cases(BFLOAT16 if dtype == "bfloat16" else FLOAT16, dtype)[name], name, dtype)


BLOCKS = (
    "causal",
    "key_lengths",
    "q_offset_array",
    "segments",
    "mask_dense",
    "bias_hides",
    "dropout_each",
    "everything",
    MIXES[0],
)


@pytest.mark.parametrize("name", BLOCKS)
def test_in_blocks(monkeypatch, name):
    """One batch entry and one key head at a time, which the default tiles would not do for so few."""
    monkeypatch.setattr(tile_sizes, "CPU_LOGITS", 1)
    assert_case(run_cases(BLOCKS, "float32", chunk_size=(16, 24))[name], name, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SINGLES + MIXES if name not in BLOCKS])
def test_every_case_in_blocks(monkeypatch, name):
    monkeypatch.setattr(tile_sizes, "CPU_LOGITS", 1)
    among = in_group(name, SINGLES + MIXES)
    assert_case(run_cases(among, "float32", chunk_size=(8, 20))[name], name, "float32")


@pytest.mark.parametrize("name", REFERENCE)
def test_reference(name):
    assert_case(run_cases(REFERENCE, "float32", implementation="reference")[name], name, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_every_case(name, dtype, implementation):
    assert_case(
        run_cases(in_group(name, tuple(CASES)), dtype, implementation=implementation)[name],
        name,
        dtype,
    )


LENGTHS = (1, 2, 3, 17, 97, 128, 257, 1000, 1025)
HEAD_SIZES = (1, 3, 8, 40, 59, 64, 72, 96, 128, 256)
HEADS = ((1, 1), (4, 4), (4, 2), (6, 1))  # N, K


def _sized(i: int, T: int, S: int, H: int):
    """The i-th call of a grid: D, heads, mask and chunks take turns."""
    N, K = HEADS[i % 4]
    D = (5, H, 24, 1)[i % 4]
    z = Sizes(B=1 + i % 2, T=T, S=S, K=K, G=N // K, H=H, D=D)
    kwargs = {"is_causal": i % 3 == 0, "chunk_size": (None, (128, 96), 200)[i % 3]}
    return f"sizes{z}", qkv(np.random.default_rng(i), np.float32, z), kwargs


# every length and head size once, each with another partner
SAMPLE = [
    _sized(i, LENGTHS[i % 9], LENGTHS[(4 * i + 3 + i // 9) % 9], HEAD_SIZES[i]) for i in range(10)
]


@pytest.mark.parametrize("i", range(10))
def test_sizes(i):
    name, args, kwargs = SAMPLE[i]
    assert_truth(_run_sample()[name], name, args, kwargs)


@functools.cache
def _run_sample():
    return run_calls({name: (args, kwargs) for name, args, kwargs in SAMPLE})


@pytest.mark.slow
@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("S", LENGTHS)
def test_all_sizes(T, S):
    offset = LENGTHS.index(T) + LENGTHS.index(S)
    calls = [_sized(offset + i, T, S, H) for i, H in enumerate(HEAD_SIZES)]
    results = run_calls({name: (args, kwargs) for name, args, kwargs in calls})
    for name, args, kwargs in calls:
        assert_truth(results[name], name, args, kwargs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_baseline_is_jax_nn(dtype):
    """The law compares with a plain computation that also knows what jax.nn lacks. Where both can, it errs no more."""
    args, kwargs = (
        qkv(np.random.default_rng(0), jnp.dtype(dtype), Sizes(T=97, S=97, H=16, D=16)),
        {"is_causal": True},
    )
    out, pull = jax.vjp(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True), *args)
    grads = pull(cotangents(args, dtype)[0])
    truth, (ours, _) = (f(args, kwargs, dtype, dlse=False) for f in (true_call, plain_call))
    of = [("out", out, ours.out, truth.out)]
    of += [
        (n, x, ours.grads[n], truth.grads[n])
        for n, x in zip(("query", "key", "value"), grads, strict=True)
    ]
    for what, theirs, mine, exact in of:
        theirs, mine = (np.abs(np.asarray(x, np.float64) - exact).max() for x in (theirs, mine))
        assert mine <= 1.2 * theirs, what


# ---- float64


@pytest.mark.parametrize("name", FLOAT64)
def test_float64(name):
    actual, truth = run_cases(FLOAT64, "float64")[name], true_case(name, "float64")
    assert actual.out.dtype == actual.lse.dtype == np.float64
    for what, x, y, eps in (
        ("out", actual.out, truth.out, 1e-13),
        ("lse", actual.lse, truth.lse, 1e-13),
        *((f"d{n}", grad, truth.grads[n], 1e-12) for n, grad in actual.grads.items()),
    ):
        np.testing.assert_allclose(
            x, y, rtol=0, atol=eps * max(1, np.abs(y[np.isfinite(y)]).max(initial=0)), err_msg=what
        )


def test_numerical_derivative():
    """Every gradient at once, out and lse together, against finite differences: the formulas of nobody."""
    z = Sizes(B=1, T=3, S=4, K=1, G=2, H=2, D=3)
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        args = [
            *map(jnp.asarray, qkv(rng, np.float64, z)),
            rng.standard_normal((2, 3, 4)),
            jnp.float64(0.7),
            jnp.float64(1.5),
        ]

        def call(q, k, v, bias, scale, cap):
            kwargs = {"scale": scale, "logits_soft_cap": cap, "is_causal": True, "chunk_size": 2}
            return dot_product_attention(q, k, v, bias, **kwargs, return_residual=True)

        check_grads(jax.jit(call), args, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


# ---- lse


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_recomputed_probabilities_sum_to_one(dtype):
    """With dlse = 1 and dout = 0, the gradient of a bias per row is the sum of the probabilities that the backward makes."""
    z = Sizes()
    for largest in (5.0, 40.0, 160.0, 640.0):
        query, key, value = qkv(np.random.default_rng(1), np.float32, z)
        logits = np.einsum(
            "btkgh,bskh->bkgts", query.reshape(z.B, z.T, z.K, z.G, z.H), key
        ) / np.sqrt(z.H)
        args = [
            (x * c).astype(dtype)
            for x, c in ((query, largest / np.abs(logits).max()), (key, 1), (value, 1))
        ]
        sums = _row_sums(*args, np.zeros((z.B, z.N, z.T, 1), np.float32))
        assert np.abs(np.asarray(sums) - 1).max() <= 1e-5 * max(1, largest)


@jax.jit
def _row_sums(query, key, value, bias):
    lse = lambda bias: dot_product_attention(
        query, key, value, bias, chunk_size=(16, 24), return_residual=True
    )[1]
    return jax.grad(lambda bias: lse(bias).sum())(bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_lse_is_float32_natural_and_right(dtype):
    names = {"float32": in_group("causal", FLOAT32), "bfloat16": BFLOAT16, "float16": FLOAT16}[
        dtype
    ]
    lse = run_cases(names, dtype)["causal"].lse
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, true_case("causal", dtype).lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loss_on_lse_alone(dtype):
    args, kwargs = CASES["bias_full"].inputs(np.dtype(dtype))
    dlse = np.random.default_rng(3).standard_normal(args[0].shape[:-1]).astype(dtype)
    truth = oracle.gradients(
        *args, kwargs["bias"], dout=np.zeros((*dlse.shape, args[2].shape[-1])), dlse=dlse
    )
    with jax.enable_x64(dtype == "float64"):
        lse = lambda q, k, bias: dot_product_attention(
            q, k, args[2], bias, chunk_size=(16, 24), return_residual=True
        )[1]
        loss = lambda *args: (lse(*args) * dlse).sum()
        grads = jax.jit(jax.grad(loss, (0, 1, 2)))(*args[:2], kwargs["bias"])
    for name, grad in zip(("query", "key", "bias"), grads, strict=True):
        np.testing.assert_allclose(
            grad, truth[name], rtol=0, atol=3 * EPS[dtype] * np.abs(truth[name]).max(), err_msg=name
        )
        assert np.abs(grad).max() > 0.01


def test_inference_and_residual_agree():
    """Without return_residual, out is the same out."""
    args, kwargs = CASES["everything"].inputs()
    out = dot_product_attention(*args, **kwargs)
    np.testing.assert_array_equal(
        out, dot_product_attention(*args, **kwargs, return_residual=True)[0]
    )


# ---- inputs that are not Gaussian


DRAWS = 24  # of two batch entries each: what decides in the wildest of these are a few rows of each


def _real(kind: str, dtype):
    rng = np.random.default_rng(4)
    query, key, value = qkv(rng, np.float64, Sizes(B=2 * DRAWS, T=53, S=53))
    match kind:
        case "outlier channel":
            query[..., 2] *= 30
            key[..., 2] *= 30
        case "sink token":
            key[:, 0] = 8 * query.reshape(-1, 53, 3, 2, 5).mean((1, 3))
            value[:, 0] = 0.01
        case "constant 1000":
            query, key, value = (np.full_like(x, 1000) for x in (query, key, value))
        case "equal keys":
            key[:] = key[:, :1]
        case "one-hot rows":
            query, key = (np.eye(5)[rng.integers(0, 5, x.shape[:-1])] * 40 for x in (query, key))
        case "tiny logits":
            query, key = query * 1e-4, key * 1e-4
        case "large values":
            value *= 1e3
        case "offset":
            query, key, value = query + 3, key - 7, value + 100
        case "logits of 1e4":
            query, key = query * 50, key * 50
        case "negative logits":  # every lse far below -88.7, where exp underflows in float32
            query, key = np.abs(query) * 30 + 10, -np.abs(key) * 30 - 10
        case "half overflows":  # products above 65,504
            query, key = query * 150 + 150, key * 150 + 100
    return tuple(x.astype(dtype) for x in (query, key, value))


KINDS = (
    "outlier channel",
    "sink token",
    "constant 1000",
    "equal keys",
    "one-hot rows",
    "tiny logits",
    "large values",
    "offset",
    "logits of 1e4",
    "negative logits",
    "half overflows",
)


# Of float16 those near the ends of its range; bfloat16 has the other kinds in 16 bits.
IN_FLOAT16 = ("half overflows", "constant 1000", "logits of 1e4", "tiny logits", "large values")
FAST_KINDS = [
    *itertools.product(("float32", "bfloat16"), KINDS),
    *itertools.product(("float16",), IN_FLOAT16),
]


@pytest.mark.parametrize(
    "dtype, kind", few(itertools.product(("float32", "bfloat16", "float16"), KINDS), FAST_KINDS)
)
def test_real_looking_inputs(kind, dtype):
    args, kwargs = _real(kind, jnp.dtype(dtype)), {"is_causal": True, "chunk_size": (16, 24)}
    if kind in ("half overflows", "constant 1000"):
        kwargs["scale"] = 2.0**-20  # the products overflow float16, the logits do not
    assert_truth(run_call(args, kwargs, dtype), kind, args, kwargs, dtype)


@pytest.mark.parametrize("scale", [-0.2, np.float32(-0.2)], ids=["number", "array"])
def test_negative_scale_of_large_logits(scale):
    """The largest logit is that of the smallest product: exp overflows if it is taken from the largest."""
    (query, key, value), _ = CASES["plain"].inputs()
    args, kwargs = (12 * query, 12 * key, value), {"chunk_size": (16, 24), "scale": scale}
    result = run_call(args, kwargs)
    assert result.lse.max() > 150
    assert_truth(result, "negative scale", args, kwargs)


def test_logits_of_two_million():
    """Constant 1000, default scale: a logit is known to its rounding, 0.1 nats, so p is hardly known; out and lse are."""
    args, kwargs = _real("constant 1000", np.float32), {"is_causal": True, "chunk_size": (16, 24)}
    result, truth = run_call(args, kwargs), true_call(args, kwargs)
    np.testing.assert_allclose(result.out, truth.out, rtol=2e-6)
    np.testing.assert_allclose(result.lse, truth.lse, rtol=1e-6)
    assert all(np.isfinite(x).all() for x in result.grads.values())


def test_very_negative_lse_at_every_length():
    """pytorch#196678: rows with lse < -88.7 lost their gradient at some lengths; here at all from 1 to 128."""
    z = Sizes(B=128, T=3, S=128, K=1, G=1, H=2, D=3)
    query, key, value = qkv(np.random.default_rng(5), np.float32, z)
    args = (np.abs(query) * 4 + 12, -np.abs(key) * 4 - 12, value)
    kwargs = {"key_value_seq_lengths": np.arange(1, 129, dtype=np.int32), "chunk_size": (2, 48)}
    result = run_call(args, kwargs)
    assert result.lse.max() < -88.7
    assert_truth(result, "lengths", args, kwargs)


# ---- what must not matter


def test_invariances():
    args, _ = CASES["plain"].inputs()
    query, key, value = args
    rng = np.random.default_rng(6)
    bias = rng.standard_normal((2, 6, 37, 53)).astype(np.float32)
    call = jax.jit(
        lambda q, k, v, b: dot_product_attention(
            q, k, v, b, chunk_size=(16, 24), return_residual=True
        )
    )
    out, lse = call(query, key, value, bias)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=4e-6)

    row = rng.standard_normal((2, 6, 37, 1)).astype(np.float32) * 10
    out_row, lse_row = call(query, key, value, bias + row)
    close(out_row, out)
    close(lse_row, lse + row[..., 0].transpose(0, 2, 1), atol=2e-5)

    low, high = value.min(1), value.max(1)  # b k d
    low, high = (np.repeat(x, 2, axis=1)[:, None] for x in (low, high))
    assert np.all(out >= low - 1e-6) and np.all(out <= high + 1e-6)

    keys = rng.permutation(53)
    close(call(query, key[:, keys], value[:, keys], bias[..., keys])[0], out)
    rows = rng.permutation(37)
    close(call(query[:, rows], key, value, bias[:, :, rows])[0], out[:, rows])
    close(call(query[::-1], key[::-1], value[::-1], bias[::-1])[0], out[::-1])
    heads = np.array([2, 0, 1])
    groups = (heads[:, None] * 2 + np.arange(2)).ravel()
    close(
        call(query[:, :, groups], key[:, :, heads], value[:, :, heads], bias[:, groups])[0],
        out[:, :, groups],
    )


# ---- chunk sizes


def test_chunk_sizes_agree():
    args, kwargs = CASES["causal&window&soft_cap&segments"].inputs()
    kwargs["bias"] = np.random.default_rng(7).standard_normal((6, 37, 53)).astype(np.float32)
    sizes = [
        (1, 1),
        (7, 13),
        (64, 128),
        (37, 53),
        (36, 52),
        (1000, 1000),
        8,
        (1, 53),
        (37, 1),
        None,
    ]
    results = run_calls({str(c): (args, kwargs | {"chunk_size": c}) for c in sizes})
    first, *rest = results.values()
    for size, result in zip(sizes[1:], rest, strict=True):
        for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(result), strict=True):
            np.testing.assert_allclose(
                y, x, rtol=0, atol=4e-6 * max(1, np.abs(x[np.isfinite(x)]).max()), err_msg=str(size)
            )


# ---- scale and soft cap


def test_scale_and_soft_cap_static_and_traced_agree():
    args, _ = CASES["causal"].inputs()
    values = (
        ("scale", 0.3),
        ("scale", -1.5),
        ("scale", 0.0),
        ("logits_soft_cap", 0.5),
        ("logits_soft_cap", 30.0),
    )
    calls = {f"{name}={x}": (args, {name: x, "chunk_size": 24}) for name, x in values}
    calls |= {
        f"{name}={x} traced": (args, {name: np.array(x, np.float32), "chunk_size": 24})
        for name, x in values
    }
    results = run_calls(calls)
    for name, result in results.items():
        assert_truth(result, name, *calls[name])
        if name.endswith(" traced"):
            other = results[name.removesuffix(" traced")]
            np.testing.assert_allclose(result.out, other.out, rtol=0, atol=2e-6)
    mean = np.repeat(args[2].mean(1), 2, axis=1)[:, None]
    np.testing.assert_allclose(
        results["scale=0.0"].out, np.broadcast_to(mean, results["scale=0.0"].out.shape), atol=2e-6
    )


@pytest.mark.parametrize(
    "scale", [2, np.int32(2), np.float64(2), jnp.int32(2), jnp.asarray(2), np.array(2)]
)
def test_scale_of_every_kind(scale):
    args, _ = CASES["one_key"].inputs()
    lse = lambda scale: dot_product_attention(*args, scale=scale, return_residual=True)[1]
    # it runs another form of the forward than a number
    of_array = isinstance(scale, (jax.Array, np.ndarray))
    np.testing.assert_array_equal(lse(scale), lse(jnp.float32(2) if of_array else 2.0))
    np.testing.assert_allclose(lse(scale), lse(2.0), rtol=0, atol=2e-6)


# ---- what has no gradient


def test_integer_arguments_have_float0_gradients():
    args, kwargs = CASES["everything"].inputs()
    static, arrays = split(kwargs)
    whole = {n: x for n, x in arrays.items() if not np.issubdtype(x.dtype, np.inexact)}
    assert set(whole) >= {
        "mask",
        "q_offset",
        "query_seq_lengths",
        "key_value_segment_ids",
        "dropout_rng",
    }
    rest = {n: x for n, x in arrays.items() if n not in whole}
    loss = lambda whole: dot_product_attention(*args, **whole, **rest, **static).sum()
    for name, grad in jax.grad(loss, allow_int=True)(whole).items():
        assert grad.dtype == jax.dtypes.float0 and grad.shape == whole[name].shape, name


# ---- dropout


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("x64", [False, True])
def test_dropout_is_flax_linens(shared, x64):
    with jax.enable_x64(x64):
        key = jax.random.key(5) if x64 else jax.random.PRNGKey(5)
        rng = np.random.default_rng(9)
        args = [rng.standard_normal((2, 3, size, 4, 5)).astype(np.float32) for size in (37, 53, 53)]
        kwargs = {"dropout_rng": key, "dropout_rate": 0.3, "broadcast_dropout": shared}
        ours = dot_product_attention(*args, **kwargs, chunk_size=(16, 24))
        theirs = flax.linen.dot_product_attention(*args, **kwargs)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=4e-6)


def _kept(rate, chunk_size=None, T=61, S=97, **kwargs):
    """[B, T, N, S]: what dropout leaves of equal probabilities, times S."""
    zeros = jnp.zeros((2, T, 3, 1))
    value = jnp.broadcast_to(jnp.eye(S)[None, :, None], (2, S, 3, S))
    rng = jax.random.key(7)
    out = dot_product_attention(
        zeros,
        jnp.zeros((2, S, 3, 1)),
        value,
        dropout_rng=rng,
        dropout_rate=rate,
        chunk_size=chunk_size,
        **kwargs,
    )
    return np.asarray(out) * S


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_stated_fraction(rate, shared):
    kept = _kept(rate, broadcast_dropout=shared)
    values = np.unique(kept.round(4))
    np.testing.assert_allclose(values, [0, 1 / (1 - rate)], atol=1e-3)
    draws = kept[0, :, 0] if shared else kept
    fraction, sigma = (draws > 0).mean(), math.sqrt(rate * (1 - rate) / draws.size)
    assert abs(fraction - (1 - rate)) < 4 * sigma
    assert (kept == kept[:1, :, :1]).all() == shared


@pytest.mark.parametrize("chunk_size", [(8, 16), (61, 1), 1000])
def test_dropout_is_the_same_for_any_chunk_size(chunk_size):
    np.testing.assert_array_equal(
        _kept(0.5, chunk_size, broadcast_dropout=False) > 0, _kept(0.5, broadcast_dropout=False) > 0
    )


def test_dropout_only_where_asked():
    args, _ = CASES["plain"].inputs()
    plain = dot_product_attention(*args)
    same = functools.partial(np.testing.assert_array_equal, plain)
    same(dot_product_attention(*args, dropout_rng=jax.random.key(0)))
    drawn = dot_product_attention(*args, dropout_rng=jax.random.key(0), dropout_rate=0.5)
    assert np.abs(drawn - plain).max() > 0.1
    assert (
        np.abs(
            dot_product_attention(*args, dropout_rng=jax.random.key(1), dropout_rate=0.5) - drawn
        ).max()
        > 0.1
    )


def test_dropout_counts_past_32_bits():
    """Flat indices above 2^32, 16-bit halves and all, against whole numbers and threefry written out in NumPy."""
    B, K, G, T, S = 2, 3, 5, 70_001, 1_050_007
    rows, cols = np.array([0, 1, 65_535, 70_000]), np.array([0, 65_536, 1_050_006])
    heads = np.arange(B * K * G, dtype=object).reshape(B, K, G, 1, 1)
    flat = (heads * T + rows.astype(object)[:, None]) * S + cols.astype(object)
    assert flat.max() > 2**40
    low, high = ((flat >> shift) % 2**32 for shift in (0, 32))
    bits = np.bitwise_xor(
        *_threefry(
            np.array([12, 2**32 - 5], np.uint32), high.astype(np.uint32), low.astype(np.uint32)
        )
    )
    unit = (bits >> 9) / np.float64(2**23)
    operands = Operands(
        *[jnp.zeros((1, 1, 1, 1, 1))] * 3, dropout_key=jnp.array([12, 2**32 - 5], jnp.uint32)
    )
    dropped = Problem(dropout=Dropout(0.5, False))
    head = head_numbers(jnp.zeros((B, K, G)), K)
    kept = dropout_keep_mask(dropped, operands, head, (T, S), jnp.asarray(rows), jnp.asarray(cols))
    np.testing.assert_array_equal(kept, unit < 0.5)


def _threefry(key, x0, x1):
    """Threefry-2x32, 20 rounds (Salmon et al. 2011)."""
    keys = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for i in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))) ^ x0
        x0, x1 = x0 + keys[(i + 1) % 3], x1 + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x0, x1
