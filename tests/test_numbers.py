"""Numbers: out, lse and every gradient against the oracle."""

import functools

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
    cotangents,
    in_group,
    plain_call,
    run_calls,
    run_cases,
    true_call,
    true_case,
)
from jax.test_util import check_grads
from small_calls import assert_same

from memeff import dot_product_attention, tile_sizes

f32 = np.float32

# These tuples are the fast set; the slow set has the whole table. In float32 the fast set leaves
# out static twins of arrays, the shapes of bias and mask that test_broadcast.py has, what
# test_in_blocks has, the chunks of test_chunk_sizes_agree, arguments that are in several mixes, and
# sizes between others. The mixes take turns between float32 and float64.
ELSEWHERE = ("bias_full", "mask_heads", "scale", "soft_cap", "precision")
ELSEWHERE += ("key_lengths", "q_offset_array", "segments", "mask_dense", "bias_hides")
ELSEWHERE += ("dropout_each", "chunk_divides", "chunk_too_large", "one_row_chunks")
ELSEWHERE += ("one_column_chunks", "bias_row", "query_lengths", "window", "window_left", "sinks")
ELSEWHERE += ("one_key", "many_rows", "no_leads", "square_causal")
FLOAT32 = tuple(name for name in SINGLES if name not in ELSEWHERE) + MIXES[1::2]
BFLOAT16 = ("plain", "causal", "bias_hides", "soft_cap_array", "everything")
FLOAT16 = ("causal", "scale_array")
HALF = [*(("bfloat16", name) for name in BFLOAT16), *(("float16", name) for name in FLOAT16)]
FLOAT64 = ("plain", "three_leads", "bias_hides", "soft_cap_array", "everything", *MIXES[::2])
REFERENCE = ("three_leads", "bias_hides", "everything", *MIXES[1::4])


# ---- the law of tolerance


def test_the_law_tells_another_rounding_from_a_larger_error():
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(10_000)
    plain = 1e-3 * rng.standard_normal(10_000)
    error = 1e-3 * rng.standard_normal(10_000)
    one_large_error = error.copy()
    one_large_error[7] = 4 * np.abs(plain).max()
    baselines = [truth + plain]
    assert_as_good(truth + 1.4 * error, baselines, truth, "float32")
    for wrong in (1.6 * error, one_large_error):
        with pytest.raises(AssertionError, match="of the error is"):
            assert_as_good(truth + wrong, baselines, truth, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_baseline_is_jax_nn(dtype):
    """Plain attention, with which the law compares, errs at most 1.2 times as much as jax.nn.

    It also knows arguments that jax.nn lacks.
    """
    kwargs = {"is_causal": True}
    args = qkv(np.random.default_rng(0), jnp.dtype(dtype), Sizes(T=97, S=97, H=16, D=16))
    dout, _ = cotangents(args, dtype)

    @jax.jit
    def out_and_gradients(*args):
        out, pull = jax.vjp(functools.partial(jax.nn.dot_product_attention, **kwargs), *args)
        return out, pull(dout)

    out, grads = out_and_gradients(*args)
    truth = true_call(args, kwargs, dtype, dlse=False)
    plain, _ = plain_call(args, kwargs, dtype, dlse=False)
    assert _largest_error(plain.out, truth.out) <= 1.2 * _largest_error(out, truth.out), "out"
    for name, grad in zip(("query", "key", "value"), grads, strict=True):
        error_of_jax = _largest_error(grad, truth.grads[name])
        assert _largest_error(plain.grads[name], truth.grads[name]) <= 1.2 * error_of_jax, name


def _largest_error(x, truth):
    return np.abs(np.asarray(x, np.float64) - truth).max()


# ---- the table of cases


@pytest.mark.parametrize("name", FLOAT32)
@pytest.mark.once
def test_float32(name):
    results = run_cases(in_group(name, FLOAT32), "float32")
    assert_case(results[name], name, "float32")


@pytest.mark.parametrize(("dtype", "name"), HALF)
def test_half_precision(dtype, name):
    results = run_cases(BFLOAT16 if dtype == "bfloat16" else FLOAT16, dtype)
    assert_case(results[name], name, dtype)


BLOCKS = (
    "key_lengths",
    "q_offset_array",
    "segments",
    "mask_dense",
    "bias_hides",
    "dropout_each",
    "everything",
)


@pytest.mark.once
@pytest.mark.parametrize("name", BLOCKS)
def test_in_blocks(monkeypatch, name):
    """Blocks of one batch entry and one key head give right numbers.

    The default tiles would hold all of so few heads at a time.
    """
    monkeypatch.setattr(tile_sizes, "CPU_LOGITS", 1)
    results = run_cases(BLOCKS, "float32", chunk_size=(16, 24))
    assert_case(results[name], name, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SINGLES + MIXES if name not in BLOCKS])
def test_every_case_in_blocks(monkeypatch, name):
    monkeypatch.setattr(tile_sizes, "CPU_LOGITS", 1)
    group = in_group(name, SINGLES + MIXES)
    results = run_cases(group, "float32", chunk_size=(8, 20))
    assert_case(results[name], name, "float32")


@pytest.mark.parametrize("name", REFERENCE)
def test_reference(name):
    results = run_cases(REFERENCE, "float32", implementation="reference")
    assert_case(results[name], name, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_every_case(name, dtype, implementation):
    group = in_group(name, tuple(CASES))
    results = run_cases(group, dtype, implementation=implementation)
    assert_case(results[name], name, dtype)


# ---- float64


@pytest.mark.parametrize("name", FLOAT64)
def test_float64(name):
    actual = run_cases(FLOAT64, "float64")[name]
    truth = true_case(name, "float64")
    assert actual.out.dtype == actual.lse.dtype == np.float64
    assert_same([actual.out, actual.lse], [truth.out, truth.lse], 1e-13)
    assert_same(actual.grads, {name: truth.grads[name] for name in actual.grads}, 1e-12)


def test_numerical_derivative():
    """Every gradient at once, through out and lse together, agrees with finite differences.

    Finite differences rely on no formula.
    """
    z = Sizes(B=1, T=3, S=4, K=1, G=2, H=2, D=3)

    @jax.jit
    def call(q, k, v, bias, scale, cap):
        return dot_product_attention(
            q,
            k,
            v,
            bias,
            scale=scale,
            logits_soft_cap=cap,
            is_causal=True,
            chunk_size=2,
            return_residual=True,
        )

    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v = map(jnp.asarray, qkv(rng, np.float64, z))
        bias = rng.standard_normal((2, 3, 4))
        args = [q, k, v, bias, jnp.float64(0.7), jnp.float64(1.5)]
        check_grads(call, args, order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


# ---- lse


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_recomputed_probabilities_sum_to_one(dtype):
    """The probabilities that the backward recomputes sum to 1 in each row.

    With dlse = 1 and dout = 0, their sum is the gradient of a bias per row.
    """
    z = Sizes()
    query, key, value = qkv(np.random.default_rng(1), f32, z)
    grouped = query.reshape(z.B, z.T, z.K, z.G, z.H)
    logits = np.einsum("btkgh,bskh->bkgts", grouped, key) / np.sqrt(z.H)
    bias = np.zeros((z.B, z.N, z.T, 1), f32)
    for largest in (5.0, 40.0, 160.0, 640.0):
        scaled = query * (largest / np.abs(logits).max())
        args = [x.astype(dtype) for x in (scaled, key, value)]
        sums = np.asarray(_row_sums(*args, bias))
        assert np.abs(sums - 1).max() <= 1e-5 * max(1, largest)


@jax.jit
def _row_sums(query, key, value, bias):
    def loss(bias):
        _, lse = dot_product_attention(
            query, key, value, bias, chunk_size=(16, 24), return_residual=True
        )
        return lse.sum()

    return jax.grad(loss)(bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.once
def test_lse_is_float32_natural_and_right(dtype):
    groups = {"float32": in_group("causal", FLOAT32), "bfloat16": BFLOAT16, "float16": FLOAT16}
    lse = run_cases(groups[dtype], dtype)["causal"].lse
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, true_case("causal", dtype).lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loss_on_lse_alone(dtype):
    args, kwargs = CASES["bias_full"].inputs(np.dtype(dtype))
    query, key, value = args
    bias = kwargs["bias"]
    dlse = np.random.default_rng(3).standard_normal(query.shape[:-1]).astype(dtype)
    no_dout = np.zeros((*dlse.shape, value.shape[-1]))
    truth = oracle.gradients(query, key, value, bias, dout=no_dout, dlse=dlse)

    def loss(query, key, bias):
        _, lse = dot_product_attention(
            query, key, value, bias, chunk_size=(16, 24), return_residual=True
        )
        return (lse * dlse).sum()

    with jax.enable_x64(dtype == "float64"):
        grads = jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, bias)
    for name, grad in zip(("query", "key", "bias"), grads, strict=True):
        atol = 3 * EPS[dtype] * np.abs(truth[name]).max()
        np.testing.assert_allclose(grad, truth[name], rtol=0, atol=atol, err_msg=name)
        assert np.abs(grad).max() > 0.01


def test_inference_and_residual_agree():
    """A call without return_residual returns the same out as one with it."""
    args, kwargs = CASES["everything"].inputs()
    static, arrays = split(kwargs)

    @jax.jit
    def both(args, arrays):
        call = functools.partial(dot_product_attention, *args, **arrays, **static)
        return call(), call(return_residual=True)

    out, (out_with_lse, _) = both(args, arrays)
    np.testing.assert_array_equal(out, out_with_lse)


# ---- choices that must not matter


def test_invariances():
    """A bias per row, and the order of keys, queries, heads and batch entries, change no result.

    The output stays between the smallest and the largest value.
    """
    args, _ = CASES["plain"].inputs()
    query, key, value = args
    rng = np.random.default_rng(6)
    bias = rng.standard_normal((2, 6, 37, 53)).astype(f32)

    @jax.jit
    def call(q, k, v, bias):
        return dot_product_attention(q, k, v, bias, chunk_size=(16, 24), return_residual=True)

    out, lse = call(query, key, value, bias)
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=4e-6)

    row = rng.standard_normal((2, 6, 37, 1)).astype(f32) * 10
    out_row, lse_row = call(query, key, value, bias + row)
    close(out_row, out)
    close(lse_row, lse + row[..., 0].transpose(0, 2, 1), atol=2e-5)

    low = np.repeat(value.min(1), 2, axis=1)[:, None]  # b 1 n d
    high = np.repeat(value.max(1), 2, axis=1)[:, None]
    assert np.all(out >= low - 1e-6)
    assert np.all(out <= high + 1e-6)

    keys = rng.permutation(53)
    permuted, _ = call(query, key[:, keys], value[:, keys], bias[..., keys])
    close(permuted, out)
    rows = rng.permutation(37)
    permuted, _ = call(query[:, rows], key, value, bias[:, :, rows])
    close(permuted, out[:, rows])
    permuted, _ = call(query[::-1], key[::-1], value[::-1], bias[::-1])
    close(permuted, out[::-1])
    heads = np.array([2, 0, 1])
    groups = (heads[:, None] * 2 + np.arange(2)).ravel()
    permuted, _ = call(query[:, :, groups], key[:, :, heads], value[:, :, heads], bias[:, groups])
    close(permuted, out[:, :, groups])


def test_chunk_sizes_agree():
    args, kwargs = CASES["causal&window&soft_cap&segments"].inputs()
    kwargs["bias"] = np.random.default_rng(7).standard_normal((6, 37, 53)).astype(f32)
    sizes = [(1, 1), (7, 13), (37, 53), (36, 52), (1000, 1000), (1, 53), (37, 1), None]
    results = run_calls({str(c): (args, kwargs | {"chunk_size": c}) for c in sizes})
    assert_same(results, dict.fromkeys(results, results["(1, 1)"]), 4e-6)


# ---- arguments without a gradient


def test_integer_arguments_have_float0_gradients():
    args, kwargs = CASES["everything"].inputs()
    static, arrays = split(kwargs)
    integers = {n: x for n, x in arrays.items() if not np.issubdtype(x.dtype, np.inexact)}
    floats = {n: x for n, x in arrays.items() if n not in integers}
    assert set(integers) >= {
        "mask",
        "q_offset",
        "query_seq_lengths",
        "key_value_segment_ids",
        "dropout_rng",
    }

    def loss(integers):
        return dot_product_attention(*args, **integers, **floats, **static).sum()

    grads = jax.jit(jax.grad(loss, allow_int=True))(integers)
    for name, grad in grads.items():
        assert grad.dtype == jax.dtypes.float0, name
        assert grad.shape == integers[name].shape, name
