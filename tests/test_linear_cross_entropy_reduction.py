"""Sums and means of losses, whose gradient is made together with them."""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_as_good, few
from loss_cases import (
    CASES,
    CHUNK,
    EVERYTHING,
    HIDDEN,
    IGNORE,
    PAIRS,
    T,
    V,
    case,
    draw,
    f32,
    oracle,
    plain,
)
from small_calls import assert_close, assert_same, temp_bytes

from memeff import linear_cross_entropy
from memeff.vocabulary import loops, objective

pytestmark = pytest.mark.once

WEIGHTS = np.random.default_rng(8).standard_normal(T)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """Let calls be as where JAX has one device, which makes the gradient in one pass."""
    door = importlib.import_module("memeff.linear_cross_entropy")
    monkeypatch.setattr(door, "one_pass_is_faster", lambda: True)
    for module in (door, loops):
        monkeypatch.setattr(module, "may_be_sharded", lambda: False)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, one_device):
    """Let a call have three blocks of tokens, of which the last two overlap."""
    with monkeypatch.context() as patch:
        patch.setattr(objective, "block_tokens", lambda *_: 16)
        yield patch


def value_and_gradients(loss_fn, x, kernel, labels, weights, arrays):
    """Return the weighted sum of the losses and its gradients by name."""

    def call(x, kernel, weights, arrays):
        return loss_fn(x, kernel, labels, weights, **arrays)

    value, pull = jax.vjp(call, x, kernel, weights, arrays)
    dx, dkernel, dweights, darrays = pull(jnp.ones_like(value))
    return {"value": value, "x": dx, "kernel": dkernel, "weights": dweights, **darrays}


def ours(static, reduction="sum"):
    """Return the function that is tested."""

    def call(x, kernel, labels, weights, **arrays):
        return linear_cross_entropy(
            x, kernel, labels, weights=weights, reduction=reduction, **arrays, **static
        )

    return call


def plain_sum(static):
    """Return the same from all logits."""

    def call(x, kernel, labels, weights, **arrays):
        return (plain(x, kernel, labels, **arrays, **static)[0] * weights).sum()

    return call


@functools.cache
def results(names, dtype, function):
    """Return {case: results by name}, compiled as one program."""

    def run(inputs):
        found = {}
        for name, arrays in inputs.items():
            found[name] = value_and_gradients(function(case(name, dtype)[5]), *arrays)
        return found

    inputs = {}
    for name in names:
        x, kernel, labels, (wide, _), arrays, _ = case(name, dtype)
        inputs[name] = x, kernel, labels, WEIGHTS.astype(wide.dtype), arrays
    with jax.enable_x64(dtype == "float64"):
        return jax.tree.map(np.asarray, jax.jit(run)(inputs))


def assert_case(name, dtype, names):
    """Compare all results of a case with the oracle, by the law of tolerance."""
    x, kernel, labels, _, arrays, static = case(name, dtype)
    weights = np.float64(f32(WEIGHTS))
    truth = oracle(x, kernel, labels, (weights, 0 * weights), **arrays, **static)
    truth["weights"] = truth.pop("loss")
    truth["value"] = weights @ truth["weights"]
    size = np.abs(weights * truth["weights"]).sum()
    del truth["lse"]
    actual = results(names, dtype, ours)[name]
    baseline = results(names, dtype, plain_sum)[name]
    assert actual.keys() == baseline.keys()
    for what, y in actual.items():
        of_rows = what in ("value", "weights")
        size_of_terms = size if what == "value" else 0.0
        kind = f32 if of_rows else dtype
        assert_as_good(y, [baseline[what]], truth[what], kind, what, size_of_terms)


# EVERYTHING has all that the pairs have.
FAST = tuple(name for name in CASES if name not in PAIRS)


@pytest.mark.parametrize("name", few(CASES, FAST))
def test_float32(name):
    assert_case(name, "float32", FAST if name in FAST else PAIRS)


HALF = ("plain", "smoothing", EVERYTHING)


@pytest.mark.parametrize("dtype", few(["bfloat16", "float16"], ["bfloat16"]))
@pytest.mark.parametrize("name", HALF)
def test_half_precision(name, dtype):
    assert_case(name, dtype, HALF)


def test_the_mean_leaves_ignored_tokens_out():
    x, kernel, labels, _, arrays, static = case("ignore", "float32")
    counts = labels != IGNORE
    weights = np.abs(WEIGHTS).astype(f32)

    @jax.jit
    def run(x, kernel, weights):
        losses = linear_cross_entropy(x, kernel, labels, **static)
        mean = ours(static, "mean")
        return (
            losses,
            linear_cross_entropy(x, kernel, labels, reduction="mean", **static),
            mean(x, kernel, labels, weights),
            mean(x, kernel, labels, 0 * weights),
            jax.grad(mean)(x, kernel, labels, 0 * weights),
            linear_cross_entropy(x, kernel, labels, reduction="sum", **static),
            # the same by way of the losses of tokens
            linear_cross_entropy(
                x, kernel, labels, reduction="mean", weights=weights, chunk_size=CHUNK, **static
            ),
        )

    losses, mean, weighted, nothing, no_gradient, total, chunked = run(x, kernel, weights)
    np.testing.assert_allclose(mean, losses.sum() / counts.sum(), rtol=2e-6)
    wanted = (losses * weights).sum() / weights[counts].sum()
    np.testing.assert_allclose(weighted, wanted, rtol=2e-6)
    np.testing.assert_allclose(chunked, wanted, rtol=2e-6)
    np.testing.assert_allclose(total, losses.sum(), rtol=2e-6)
    assert nothing == 0
    assert not np.any(no_gradient)


@pytest.mark.parametrize(
    "reduction, chunk_size",
    few(itertools.product(["sum", "mean"], [None, CHUNK]), [("sum", None), ("mean", CHUNK)]),
)
def test_an_infinite_loss_of_weight_0_adds_nothing(reduction, chunk_size):
    x, kernel, labels, _, arrays, _ = case("hidden", "float32")
    labels = labels.copy()
    labels[3] = HIDDEN[1]
    weights = np.abs(WEIGHTS).astype(f32)
    weights[3] = 0
    rest = np.arange(T) != 3

    @jax.jit
    def run(x, kernel, weights):
        loss = ours({"chunk_size": chunk_size}, reduction)
        call = functools.partial(loss, **arrays)
        gradient = jax.value_and_grad(call, (0, 1, 3))
        batch = jax.vmap(call, (None, None, None, 0))(x, kernel, labels, weights[None])
        return (
            gradient(x, kernel, labels, weights),
            gradient(x[rest], kernel, labels[rest], weights[rest]),
            gradient(x, kernel, labels, 0 * weights),
            batch[0],
        )

    (value, found), (wanted, without), (nothing, of_nothing), batched = run(x, kernel, weights)
    np.testing.assert_allclose([value, batched], wanted, rtol=2e-6)
    assert not np.any(found[0][3])
    assert_close((found[0][rest], found[1], found[2][rest]), without, rtol=0, atol=4e-6)
    assert nothing == 0
    assert not np.any(of_nothing[0]) and not np.any(of_nothing[1])
    assert np.all(np.isfinite(of_nothing[2]))


def test_nan_in_ignored_tokens_reaches_nothing_and_wrong_labels_give_nan():
    x, kernel, labels, _, _, static = case("ignore", "float32")
    bad = np.where((labels == IGNORE)[:, None], np.nan, x)

    @jax.jit
    def run(x, labels):
        return jax.value_and_grad(ours(static), (0, 1))(x, kernel, labels, np.ones(T, f32))

    value, (dx, dkernel) = run(bad, labels)
    wanted, (wanted_dx, wanted_dkernel) = run(x, labels)
    assert value == wanted
    np.testing.assert_array_equal(dx, wanted_dx)
    np.testing.assert_array_equal(dkernel, wanted_dkernel)
    assert not np.any(dx[labels == IGNORE])
    wrong = labels.copy()
    wrong[20] = V
    value, (dx, dkernel) = run(x, wrong)
    assert np.isnan(value)
    np.testing.assert_array_equal(np.isnan(dx).all(1), np.arange(T) == 20)
    assert np.isnan(dkernel).all()


def grow(loss_fn):
    """Return the function that appends derivatives to a sum, to the second order."""

    def run(x, kernel, weights, arrays, labels, directions):
        def call(*args):
            x, kernel, weights, arrays = args
            return 1.5 * loss_fn(x, kernel, labels, weights, **arrays)

        args = x, kernel, weights, arrays

        def gradients(*args):
            return jax.grad(call, (0, 1, 2, 3))(*args)

        def tangent(*args):
            return jax.jvp(call, args, directions)[1]

        _, pull = jax.vjp(gradients, *args)
        return {
            "tangent": tangent(*args),
            "tangent of the tangent": jax.jvp(tangent, args, directions)[1],
            "forward over reverse": jax.jvp(gradients, args, directions)[1],
            "reverse over reverse": pull(directions),
            "reverse over forward": jax.grad(tangent, (0, 1, 2, 3))(*args),
        }

    return jax.jit(run)


@pytest.mark.parametrize("name", ["plain", pytest.param(EVERYTHING, marks=pytest.mark.slow)])
def test_every_mode_to_the_second_order(name):
    x, kernel, labels, _, arrays, static = case(name)
    rng = np.random.default_rng(2)
    args = (x, kernel, WEIGHTS, arrays)
    directions = jax.tree.map(lambda y: rng.standard_normal(y.shape), args)
    with jax.enable_x64(True):
        actual = grow(ours(static))(*args, labels, directions)
        wanted = grow(plain_sum(static))(*args, labels, directions)
    assert_same(actual, wanted, 1e-12)


def test_vmap_scan_and_remat():
    x, kernel, labels, _, *_ = draw(leads=(3, T))
    x, kernel = x.astype(f32), kernel.astype(f32)

    def mean(x, kernel, labels):
        return linear_cross_entropy(x, kernel, labels, reduction="mean")

    def scanned(x, kernel, labels):
        def body(_, row):
            return None, mean(row[0], kernel, row[1])

        return jax.lax.scan(body, None, (x, labels))[1].mean()

    ways = {
        "one call": mean,
        "vmap": lambda x, kernel, labels: jax.vmap(mean, (0, None, 0))(x, kernel, labels).mean(),
        "scan": scanned,
        "remat": jax.checkpoint(mean),
        "chunks": functools.partial(linear_cross_entropy, reduction="mean", chunk_size=CHUNK),
    }

    @jax.jit
    def run(*args):
        found = {name: jax.value_and_grad(way, (0, 1))(*args) for name, way in ways.items()}
        each = jax.vmap(jax.value_and_grad(mean, (0, 1)), (0, None, 0))(*args)
        found["vmap of gradients"] = jax.tree.map(lambda y: y.mean(0), each)
        value, (dx, dkernel) = found["vmap of gradients"]
        found["vmap of gradients"] = value, (each[1][0] / 3, dkernel)
        return found

    found = run(x, kernel, labels)
    first = found.pop("one call")
    for name, result in found.items():
        assert_close(result, first, rtol=0, atol=2e-6, err_msg=name)


def products(function, *args) -> int:
    """Return how many products a program has."""
    return jax.jit(function).lower(*args).as_text().count("stablehlo.dot_general")


def test_three_products_and_none_too_many(monkeypatch):
    x, kernel, labels, *_ = case("plain", "float32")

    def mean(x, kernel):
        return linear_cross_entropy(x, kernel, labels, reduction="mean")

    assert products(mean, x, kernel) == 1
    assert products(jax.grad(mean, (0, 1)), x, kernel) == 3
    assert products(jax.value_and_grad(mean, (0, 1)), x, kernel) == 3
    assert products(jax.grad(mean, 0), x, kernel) == 2
    assert products(jax.grad(mean, 1), x, kernel) == 2
    door = importlib.import_module("memeff.linear_cross_entropy")
    monkeypatch.setattr(door, "one_pass_is_faster", objective.one_pass_is_faster)
    assert products(jax.grad(lambda x, k: mean(x, k), (0, 1)), x, kernel) == 4  # on a CPU


def test_memory_is_a_block_of_logits_and_a_gradient_of_the_kernel(small_blocks):
    small_blocks.undo()
    tokens, words, features = 16_384, 32_000, 64

    def mean(x, kernel, labels):
        return linear_cross_entropy(x, kernel, labels, reduction="mean")

    shapes = (
        jax.ShapeDtypeStruct((tokens, features), f32),
        jax.ShapeDtypeStruct((features, words), f32),
        jax.ShapeDtypeStruct((tokens,), np.int32),
    )
    t = objective.block_tokens(tokens, words, False)
    assert t * words <= objective.GPU_LOGITS
    found = temp_bytes(jax.value_and_grad(mean, (0, 1)), shapes)
    block = 4 * t * words
    rest = 4 * features * (2 * words + 3 * tokens)
    assert found <= 2 * block + rest
    assert 2 * block <= 4 * tokens * words  # that the logits would take


def test_memory_under_vmap_is_that_of_the_losses_of_tokens():
    """No gradient of the kernel for each mapped call."""

    def mean(x, kernel, labels):
        def one(x, labels):
            return linear_cross_entropy(x, kernel, labels, reduction="mean")

        return jax.vmap(one)(x, labels).mean()

    shapes = (
        jax.ShapeDtypeStruct((64, 64, 64), f32),
        jax.ShapeDtypeStruct((64, 32_000), f32),
        jax.ShapeDtypeStruct((64, 64), np.int32),
    )
    assert temp_bytes(jax.grad(mean, (0, 1)), shapes) < 4 * 64 * 32_000 * 4
