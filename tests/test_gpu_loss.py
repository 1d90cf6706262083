"""The loss of a large vocabulary on a Hopper GPU, against the oracle, by the law of tolerance."""

import functools

import jax
import numpy as np
import pytest
from gpu_calls import skip_without_kernels
from hopper_loss_cases import EVERYTHING, case, kernels_of
from loss_cases import both_ways
from test_hopper_loss import (
    assert_right,
    ours,
    truth_and_baseline,
    weighted,
    weighted_with_gradients,
)

from memeff.vocabulary import loops, objective

pytestmark = pytest.mark.gpu
SIZES = (1000, 512, 4160)  # T, H, V
NAMES = ("plain", "ignore&smoothing", "ignore&z_loss", "smoothing&cap", "hidden", EVERYTHING)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Let a call have several tiles and blocks, of which the last overlap."""
    skip_without_kernels()
    monkeypatch.setattr(loops, "GPU_TILE", (384, 1536))
    monkeypatch.setattr(objective, "block_tokens", lambda *_: 384)


@pytest.mark.parametrize("name", NAMES)
def test_losses_of_tokens(name):
    x, kernel, labels, cotangents, arrays, static = case(name, SIZES)
    truth, baseline = truth_and_baseline(name, x, kernel, labels, cotangents, arrays, static)
    run = functools.partial(both_ways, ours(static))
    assert "sum" in kernels_of(run, x, kernel, labels, cotangents, arrays)
    actual = jax.jit(run)(x, kernel, labels, cotangents, arrays)
    assert_right(jax.tree.map(np.asarray, actual), truth, baseline)


@pytest.mark.parametrize("name", NAMES)
def test_weighted_sums(name):
    x, kernel, labels, (weights, zeros), arrays, static = case(name, SIZES)
    cotangents = weights, 0 * zeros
    truth, baseline = truth_and_baseline(name, x, kernel, labels, cotangents, arrays, static)
    run = jax.jit(weighted_with_gradients(static, labels, weights))
    actual = jax.tree.map(np.asarray, run(x, kernel, arrays))
    for results in (truth, baseline):
        results["value"] = np.sum(np.asarray(results["loss"], np.float64) * weights)
    assert_right(actual, truth, baseline)


def test_the_last_tile_of_a_cluster_may_be_empty(monkeypatch):
    """The second thread block of the last cluster has no tokens: there are 17 tiles of them."""
    T, H, V = 17 * 128, 512, 4160
    monkeypatch.setattr(loops, "GPU_TILE", (T, V))
    monkeypatch.setattr(objective, "block_tokens", lambda *_: T)
    x, kernel, labels, (weights, zeros), arrays, static = case("plain", (T, H, V))
    truth, baseline = truth_and_baseline("plain", x, kernel, labels, (weights, zeros), {}, {})
    run = jax.jit(functools.partial(both_ways, ours({})))
    actual = jax.tree.map(np.asarray, run(x, kernel, labels, (weights, zeros), {}))
    assert_right(actual, truth, baseline)
    run = jax.jit(weighted_with_gradients({}, labels, weights))
    actual = jax.tree.map(np.asarray, run(x, kernel, {}))
    truth, baseline = truth_and_baseline("plain", x, kernel, labels, (weights, 0 * zeros), {}, {})
    for results in (truth, baseline):
        results["value"] = np.sum(np.asarray(results["loss"], np.float64) * weights)
    assert_right(actual, truth, baseline)


def test_bits_repeat():
    x, kernel, labels, (weights, _), _, _ = case("plain", SIZES)
    run = jax.jit(jax.value_and_grad(weighted({}), (0, 1)))
    first = jax.tree.map(np.asarray, run(x, kernel, labels, weights))
    for _ in range(100):
        again = jax.tree.map(np.asarray, run(x, kernel, labels, weights))
        jax.tree.map(np.testing.assert_array_equal, again, first)
