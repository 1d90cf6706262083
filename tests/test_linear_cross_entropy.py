"""The loss of a large vocabulary: numbers and derivatives against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_as_good, few
from jax.test_util import check_grads
from loss_cases import (
    CASES,
    CHUNK,
    EVERYTHING,
    HIDDEN,
    IGNORE,
    PAIRED,
    PAIRS,
    H,
    T,
    V,
    both_ways,
    case,
    draw,
    f32,
    oracle,
    ours,
    plain,
    results,
    truth_of,
)
from small_calls import assert_close, assert_same

from memeff import linear_cross_entropy

# ---- numbers


def assert_case(name: str, dtype: str, names: tuple[str, ...]):
    """Compare all results of a case with the oracle, by the law of tolerance."""
    truth = truth_of(name, dtype)
    actual = results(names, dtype)[name]
    baseline = results(names, dtype, "plain")[name]
    assert actual["loss"].dtype == actual["lse"].dtype == f32
    assert actual["x"].dtype == actual["kernel"].dtype == jnp.dtype(dtype)
    for what, x in actual.items():
        of_rows = what in ("loss", "lse")
        assert_as_good(x, [baseline[what]], truth[what], f32 if of_rows else dtype, what)


# A few pairs have the other options.
SLOW_PAIRS = tuple(x for x in PAIRS if x not in ("hidden&ignore", "smoothing&z_loss"))
SLOW = PAIRED + SLOW_PAIRS
FAST = tuple(name for name in CASES if name not in SLOW)


@pytest.mark.parametrize("name", few(CASES, FAST))
def test_float32(name):
    assert_case(name, "float32", FAST if name in FAST else SLOW)


HALF = ("plain", "smoothing", EVERYTHING)


@pytest.mark.parametrize("dtype", few(["bfloat16", "float16"], ["bfloat16"]))
@pytest.mark.parametrize("name", HALF)
def test_half_precision(name, dtype):
    assert_case(name, dtype, HALF)


@pytest.mark.parametrize("name", ("plain", EVERYTHING))
def test_float64(name):
    truth = truth_of(name, "float64")
    for what, x in results(("plain", EVERYTHING), "float64")[name].items():
        assert x.dtype == np.float64
        largest = max(1, np.abs(truth[what]).max())
        np.testing.assert_allclose(x, truth[what], rtol=0, atol=1e-12 * largest, err_msg=what)


def test_small_cotangents_in_float16():
    """float16 holds nothing below 6e-8, and the mean over a million tokens divides by as many."""
    x, kernel, labels, cotangents, _, _ = case("plain", "float16")
    small = [1e-6 * y for y in cotangents]
    actual = jax.jit(functools.partial(both_ways, ours({})))(x, kernel, labels, small, {})
    truth = oracle(x, kernel, labels, small)
    for what in ("x", "kernel"):
        error = np.abs(np.float64(actual[what]) - truth[what]).max()
        assert error <= 2.0**-24, what  # half a step of the smallest numbers, twice


@pytest.mark.parametrize("size", few([1e2, 1e4], [1e4]))
def test_large_logits(size):
    """Where one word takes nearly all, the loss and the gradients are as exact as plain ones."""
    rng = np.random.default_rng(1)
    x, kernel, labels, _, *cotangents = draw()
    x *= size / np.abs(x @ kernel).max()
    best = (x @ kernel).argmax(1)
    labels = np.where(rng.random(T) < 0.5, best, labels).astype(np.int32)
    args = (x.astype(f32), kernel.astype(f32), labels, [y.astype(f32) for y in cotangents])
    truth = oracle(*args)
    actual = jax.jit(functools.partial(both_ways, ours({})))(*args, {})
    baseline = jax.jit(functools.partial(both_ways, plain))(*args, {})
    for what, x in actual.items():
        assert_as_good(x, [baseline[what]], truth[what], f32, what)
    np.testing.assert_allclose(actual["loss"], baseline["loss"], rtol=1e-5, atol=size * 2e-7)


def test_large_logits_that_are_exact():
    """Loss and probabilities lose no bits to the size of lse, which all logits have in common."""
    rng = np.random.default_rng(6)
    x, kernel = (rng.integers(-4, 5, shape) / 4 for shape in ((T, H), (H, V)))
    x[:, 0] = 128
    kernel[0] = 128
    _, _, labels, _, *cotangents = draw()
    args = (x.astype(f32), kernel.astype(f32), labels, [y.astype(f32) for y in cotangents])
    truth = oracle(*args)
    actual = jax.jit(functools.partial(both_ways, ours({})))(*args, {})
    # lse is near 16384, where the next float is 0.002 away
    np.testing.assert_allclose(actual["loss"], truth["loss"], rtol=2e-6)
    x = args[0].astype(np.float64)
    p = jax.jit(jax.grad(lambda b: ours({})(*args[:3], bias=b)[1].sum()))(np.zeros(V, f32))
    s = x @ kernel
    e = np.exp(s - s.max(1, keepdims=True))
    np.testing.assert_allclose(p, (e / e.sum(1, keepdims=True)).sum(0), rtol=2e-6)


def test_chunk_sizes_agree():
    x, kernel, labels, cotangents, arrays, static = case(EVERYTHING, "float32")
    sizes = [(1, 60), (60, 1), 8, (36, 52), 1000, (16, 1000)]

    @jax.jit
    def run(*args):
        return {str(size): both_ways(ours(static, size), *args) for size in sizes}

    results = run(x, kernel, labels, cotangents, arrays)
    assert_same(results, dict.fromkeys(results, results["(1, 60)"]), 4e-6)


# ---- tokens and words that take no part


def test_nan_in_ignored_tokens_and_hidden_words_reaches_nothing():
    name = "hidden&ignore"
    x, kernel, labels, cotangents, arrays, static = case(name, "float32")
    x = np.where((labels == IGNORE)[:, None], np.nan, x)
    kernel = kernel.copy()
    kernel[:, HIDDEN] = np.nan
    actual = jax.jit(functools.partial(both_ways, ours(static)))(
        x, kernel, labels, cotangents, arrays
    )
    for what, y in results(FAST, "float32")[name].items():
        np.testing.assert_allclose(actual[what], y, rtol=0, atol=4e-6, err_msg=what)
    assert not np.any(actual["x"][labels == IGNORE])
    assert not np.any(actual["loss"][labels == IGNORE])
    assert not np.any(actual["lse"][labels == IGNORE])
    assert not np.any(actual["kernel"][:, HIDDEN])


def test_a_hidden_label_has_an_infinite_loss():
    x, kernel, labels, cotangents, arrays, _ = case("hidden", "float32")
    labels = labels.copy()
    labels[3] = HIDDEN[1]
    actual = jax.jit(functools.partial(both_ways, ours({})))(x, kernel, labels, cotangents, arrays)
    assert actual["loss"][3] == np.inf
    finite = np.arange(T) != 3
    assert np.all(np.isfinite(actual["loss"][finite]))
    for what in ("lse", "x", "kernel", "bias"):
        assert np.all(np.isfinite(actual[what])), what


@pytest.mark.parametrize("static", [{}, {"z_loss": 0.1, "label_smoothing": 0.1}], ids=str)
def test_without_a_visible_word_the_loss_is_infinite(static):
    x, kernel, labels, cotangents, arrays, _ = case("hidden", "float32")
    arrays = arrays | {"bias": np.full(V, -np.inf, np.float32)}
    actual = jax.jit(functools.partial(both_ways, ours(static)))(
        x, kernel, labels, cotangents, arrays
    )
    assert np.all(actual["loss"] == np.inf)
    assert np.all(actual["lse"] == -np.inf)
    for what in ("x", "kernel", "bias"):
        assert not np.any(actual[what]), what


@pytest.mark.parametrize("wrong", [-1, V, V + 5, 2**31 - 1])
def test_labels_out_of_range(wrong):
    """Known labels raise an error. Traced ones make the loss and the gradients NaN."""
    x, kernel, labels, _, _, _ = case("plain", "float32")
    labels = labels.copy()
    labels[3] = wrong
    message = rf"labels must lie between 0 and V - 1 = 52; got {wrong}\. Pass ignore_label"
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(x, kernel, labels)
    if wrong != -1:
        return

    @jax.jit
    def run(labels):
        def call(x, kernel):
            return linear_cross_entropy(x, kernel, labels, chunk_size=CHUNK)

        loss, pull = jax.vjp(call, x, kernel)
        return loss, *pull(jnp.ones_like(loss))

    loss, dx, dkernel = run(labels)
    np.testing.assert_array_equal(np.isnan(loss), np.arange(T) == 3)
    np.testing.assert_array_equal(np.isnan(dx).all(1), np.arange(T) == 3)
    assert np.isnan(dkernel).all()
    ignoring = linear_cross_entropy(x, kernel, labels, ignore_label=wrong)
    assert ignoring[3] == 0


@pytest.mark.parametrize(
    "dtype",
    few([np.int8, np.uint8, np.uint32, np.int64, np.uint64], [np.int8, np.uint32, np.uint64]),
)
def test_dtypes_of_labels(dtype):
    """Numbers that do not fit in the labels' dtype, or in 32 bits, make no label another one."""
    x, kernel, labels, _, _, _ = case("plain", "float32")
    wide = np.concatenate([kernel] * 5, 1)  # V = 265 fits in no int8
    with jax.enable_x64(np.dtype(dtype).itemsize == 8):
        loss = linear_cross_entropy(x, wide, labels.astype(dtype), chunk_size=100)
        np.testing.assert_allclose(loss, linear_cross_entropy(x, wide, labels), atol=2e-6)
        if np.dtype(dtype).itemsize < 4 or dtype == np.int64:
            return
        traced = jax.jit(linear_cross_entropy)
        far = np.full(T, np.iinfo(dtype).max, dtype)
        assert np.isnan(traced(x, wide, far)).all()


# ---- derivatives


def grow(function):
    """Return the function that appends derivatives to a loss: a tangent, and second orders."""

    def run(x, kernel, arrays, labels, cotangents, directions):
        def call(x, kernel, arrays):
            return function(x, kernel, labels, **arrays)

        def gradients(*args):
            _, pull = jax.vjp(call, *args)
            return pull(tuple(cotangents))

        args = (x, kernel, arrays)
        _, tangents = jax.jvp(call, args, directions)
        _, forward_over_reverse = jax.jvp(gradients, args, directions)
        _, pull = jax.vjp(gradients, *args)

        def tangent(*args):
            return jax.jvp(call, args, directions)[1]

        _, pull_tangent = jax.vjp(tangent, *args)
        return {
            "tangents": tangents,
            "forward over reverse": forward_over_reverse,
            "reverse over reverse": pull(directions),
            "reverse over forward": pull_tangent(tuple(cotangents)),
        }

    return jax.jit(run)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        pytest.param("ignore&smoothing", marks=pytest.mark.slow),
        pytest.param(EVERYTHING, marks=pytest.mark.once),
    ],
)
def test_every_mode_to_the_second_order(name):
    x, kernel, labels, cotangents, arrays, static = case(name)
    rng = np.random.default_rng(2)
    args = (x, kernel, arrays)
    directions = jax.tree.map(lambda y: rng.standard_normal(y.shape), args)
    with jax.enable_x64(True):
        rest = (labels, cotangents, directions)
        actual = grow(ours(static))(*args, *rest)
        wanted = grow(functools.partial(plain, **static))(*args, *rest)
    assert_same(actual, wanted, 1e-12)


def test_transposed_gradient_is_the_tangent():
    x, kernel, labels, _, arrays, static = case("ignore&smoothing")
    args = jax.tree.map(f32, (x, kernel, arrays))
    directions = jax.tree.map(jnp.cos, args)

    def losses(x, kernel, arrays):
        return linear_cross_entropy(x, kernel, labels, return_lse=True, **arrays, **static)

    outputs, tangents = jax.jvp(losses, args, directions)
    _, pull = jax.vjp(losses, *args)
    (transposed,) = jax.linear_transpose(pull, outputs)(directions)
    assert_close(transposed, tangents, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_numerical_derivatives_and_hessian():
    """Finite differences, and jacfwd over grad, of a tiny loss."""
    rng = np.random.default_rng(3)
    x, kernel = rng.standard_normal((2, 3)), rng.standard_normal((3, 4))
    bias, cap = rng.standard_normal(4), np.array(1.7)
    labels = np.array([3, 1])
    options = dict(label_smoothing=0.1, z_loss=0.2)

    def call(x, kernel, bias, cap):
        loss, lse = linear_cross_entropy(
            x,
            kernel,
            labels,
            bias=bias,
            logits_soft_cap=cap,
            chunk_size=(1, 3),
            return_lse=True,
            **options,
        )
        return loss @ np.array([0.3, -1.1]) + lse @ np.array([0.7, 0.4])

    def plain_call(x, kernel, bias, cap):
        loss, lse = plain(x, kernel, labels, bias, cap, **options)
        return loss @ np.array([0.3, -1.1]) + lse @ np.array([0.7, 0.4])

    with jax.enable_x64(True):
        check_grads(jax.jit(call), (x, kernel, bias, cap), 1, ["fwd", "rev"], 1e-6, 1e-6)
        hessian, wanted = (
            jax.jit(jax.jacfwd(jax.grad(f, (0, 1, 3)), (0, 1, 3)))(x, kernel, bias, cap)
            for f in (call, plain_call)
        )
        assert_close(hessian, wanted, rtol=0, atol=1e-12)


def test_second_order_in_bfloat16_multiplies_in_float32():
    x, kernel, labels, cotangents, _, _ = case("plain", "bfloat16")
    rng = np.random.default_rng(4)
    directions = [rng.standard_normal(y.shape).astype(jnp.bfloat16) for y in (x, kernel)]

    @functools.partial(jax.jit, static_argnums=0)
    def second(function, x, kernel, dx, dkernel, cotangents):
        def gradients(x, kernel):
            _, pull = jax.vjp(lambda x, k: function(x, k, labels), x, kernel)
            return pull(tuple(cotangents))

        return jax.jvp(gradients, (x, kernel), (dx, dkernel))[1]

    args = (x, kernel, *directions, cotangents)
    actual = second(ours({}), *args)
    baseline = second(plain, *args)
    with jax.enable_x64(True):
        truth = second(plain, *jax.tree.map(np.float64, args))
    for y, z, w in zip(actual, baseline, truth, strict=True):
        assert_as_good(y, [z], w, "bfloat16")
