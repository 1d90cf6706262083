"""The Hopper kernels of the loss, in Mosaic's interpreter, against the oracle and by the law."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_as_good
from hopper_cases import needs_kernels, not_finite_products
from hopper_loss_cases import EVERYTHING, IGNORE, OPTIONS, H, T, V, case, interpreted, kernels_of
from loss_cases import both_ways, oracle, plain

from memeff import linear_cross_entropy
from memeff.device import Device, pretend_device

pytestmark = [needs_kernels, not_finite_products]
slow = pytest.mark.slow
f32 = np.float32
PAIRS = ("ignore&smoothing", "smoothing&cap", "ignore&z_loss", "hidden&smoothing")


def slow_cases(*names: str, without: tuple[str, ...]):
    """Return the other cases, for the slow set."""
    return [pytest.param(name, marks=slow) for name in names if name not in without]


def ours(static):
    """Return the losses of tokens."""
    return functools.partial(linear_cross_entropy, **static, return_lse=True)


def weighted(static):
    """Return the weighted sum of the losses, whose gradient is made together with it."""

    def call(x, kernel, labels, weights, **arrays):
        return linear_cross_entropy(
            x, kernel, labels, weights=weights, reduction="sum", **arrays, **static
        )

    return call


def weighted_with_gradients(static, labels, weights):
    """Return the function of x, kernel and arrays that gives the weighted sum and its gradients."""

    def run(x, kernel, arrays):
        def call(x, kernel, arrays):
            return weighted(static)(x, kernel, labels, weights, **arrays)

        value, pull = jax.vjp(call, x, kernel, arrays)
        dx, dkernel, darrays = pull(jnp.ones_like(value))
        return {"value": value, "x": dx, "kernel": dkernel, **darrays}

    return run


def truth_and_baseline(name, x, kernel, labels, cotangents, arrays, static):
    """Return the oracle's results, and plain ones in the same dtype; ignored tokens hold 0."""
    clean = np.where((labels == IGNORE)[:, None], 0, x).astype(x.dtype)
    truth = oracle(clean, kernel, labels, cotangents, **arrays, **static)
    run = jax.jit(functools.partial(both_ways, functools.partial(plain, **static)))
    return truth, run(clean, kernel, labels, cotangents, arrays)


def assert_right(actual, truth, baseline):
    """Compare each result by the law."""
    for what, y in actual.items():
        dtype = f32 if what in ("loss", "lse", "value") else "bfloat16"
        assert_as_good(y, [baseline[what]], truth[what], dtype, what)


@pytest.mark.parametrize(
    "name", ["plain", EVERYTHING, *slow_cases(*OPTIONS, *PAIRS, without=("plain",))]
)
def test_losses_of_tokens_and_their_gradient(name):
    x, kernel, labels, cotangents, arrays, static = case(name)
    truth, baseline = truth_and_baseline(name, x, kernel, labels, cotangents, arrays, static)
    run = functools.partial(both_ways, ours(static))
    with interpreted():
        wanted = {"sum"} if arrays else {"sum", "cotangent"}
        assert kernels_of(run, x, kernel, labels, cotangents, arrays) == wanted
        actual = jax.jit(run)(x, kernel, labels, cotangents, arrays)
        actual = jax.tree.map(np.asarray, actual)
    assert_right(actual, truth, baseline)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "ignore&smoothing",
        *slow_cases(*OPTIONS, *PAIRS, EVERYTHING, without=("plain", "ignore&smoothing")),
    ],
)
def test_weighted_sums_and_their_gradient(name):
    x, kernel, labels, (weights, zeros), arrays, static = case(name)
    cotangents = weights, 0 * zeros
    truth, baseline = truth_and_baseline(name, x, kernel, labels, cotangents, arrays, static)
    run = weighted_with_gradients(static, labels, weights)
    keeps = not arrays and "logits_soft_cap" not in static
    with interpreted(detect_races=keeps):
        wanted = {"probability"} if keeps else set()
        assert kernels_of(run, x, kernel, arrays) == wanted
        actual = jax.tree.map(np.asarray, jax.jit(run)(x, kernel, arrays))
    for results in (truth, baseline):
        results["value"] = np.sum(np.asarray(results["loss"], np.float64) * weights)
    assert_right(actual, truth, baseline)


def test_probabilities_in_16_bits():
    """Numbers from 0 to 1 lose one part in 1,024 at most, down to the smallest of float32."""
    from memeff.pallas.hopper.vocabulary import logit_tiles

    rng = np.random.default_rng(0)
    p = np.exp2(-126 * rng.random(10_000)).astype(f32)
    p[:4] = 0, 1, np.nextafter(f32(1), f32(0)), 2.0**-126
    q = logit_tiles.decode_probabilities(logit_tiles.encode_probabilities(jnp.asarray(p)))
    np.testing.assert_allclose(q, p, rtol=2.0**-10, atol=0)
    np.testing.assert_array_equal(q[:4], [0, 1, 1, 2.0**-126])


def test_large_logits():
    """Tiles whose largest logits differ by 80, and a row whose first words have no probability."""
    x, kernel, labels, cotangents, _, _ = case("plain")
    kernel = kernel.copy()
    kernel[:, 256:] = 40 * kernel[:, 256:]
    truth, baseline = truth_and_baseline("", x, kernel, labels, cotangents, {}, {})
    with interpreted():
        run = functools.partial(both_ways, ours({}))
        actual = jax.jit(run)(x, kernel, labels, cotangents, {})
        actual = jax.tree.map(np.asarray, actual)
        total = jax.jit(jax.grad(weighted({}), (0, 1)))(x, kernel, labels, cotangents[0])
        total = jax.tree.map(np.asarray, total)
    assert_right(actual, truth, baseline)
    cotangents = cotangents[0], 0 * cotangents[1]
    truth, baseline = truth_and_baseline("", x, kernel, labels, cotangents, {}, {})
    assert_right({"x": total[0], "kernel": total[1]}, truth, baseline)


def test_grids_visit_every_tile_once():
    from memeff.pallas.hopper.vocabulary.logit_tiles import choose_grid

    for tokens, words, blocks in [(1, 64, 3), (5000, 3000, 132), (300, 70_000, 7)]:
        grid = choose_grid(tokens, words, blocks)
        items = [tuple(map(int, grid.item(jnp.int32(n)))) for n in range(grid.items)]
        first_tiles = range(0, grid.token_tiles, grid.cluster)
        assert sorted(items) == [(t, r) for t in first_tiles for r in range(grid.runs)]
        assert (grid.runs - 1) * grid.run < grid.word_tiles <= grid.runs * grid.run


# ---- which calls


HOPPER = Device("gpu", "9.0")


def why_not(device=HOPPER, dtype=jnp.bfloat16, shape=(T, H, V), **changes):
    """Return why the kernels cannot run a call."""
    from memeff.pallas.hopper.vocabulary import implementation
    from memeff.vocabulary.tile import Inputs

    tokens, features, words = shape
    x = jax.ShapeDtypeStruct((tokens, features), dtype)
    kernel = jax.ShapeDtypeStruct((features, words), dtype)
    inputs = Inputs(x, kernel, None, changes.get("soft_cap"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementation, "may_be_sharded", lambda: changes.get("sharded", False))
        return implementation.why_not(inputs, changes.get("precision"), device)


def test_the_chunked_path_takes_what_kernels_cannot():
    assert why_not() is None
    reasons = [
        (why_not(Device("cpu")), "need a GPU or a TPU"),
        (why_not(Device("gpu", "8.0")), "compute capability 9.0"),
        (why_not(dtype=f32), "support bfloat16, and this call has float32"),
        (why_not(shape=(T, 72, V)), "multiples of 64, and this call has H=72"),
        (why_not(shape=(T, H, 50_257)), "V=50257"),
        (why_not(shape=(8, H, V)), "mostly empty with 8 tokens"),
        (why_not(soft_cap=jnp.float32(3)), "as a number, not as an array"),
        (why_not(precision="highest"), "no `precision`"),
        (why_not(sharded=True), "on one device, or inside jax.shard_map"),
    ]
    for reason, part in reasons:
        assert reason is not None and part in reason


def test_a_chunk_size_and_float32_run_without_kernels():
    x, kernel, labels, *_ = case("plain")
    with interpreted(detect_races=False):
        chunked = functools.partial(linear_cross_entropy, chunk_size=64)
        assert kernels_of(chunked, x, kernel, labels) == set()
        assert kernels_of(linear_cross_entropy, x.astype(f32), kernel.astype(f32), labels) == set()
        assert kernels_of(linear_cross_entropy, x, kernel, labels) == {"sum"}


@pytest.mark.parametrize("options", [{}, {"reduction": "mean"}], ids=["losses", "mean"])
def test_kernels_are_lowered_with_x64(options, monkeypatch):
    from memeff.pallas.hopper.vocabulary import implementation

    monkeypatch.setattr(implementation, "may_be_sharded", lambda: False)
    x, kernel = jnp.ones((128, 64), jnp.bfloat16), jnp.ones((64, 512), jnp.bfloat16)
    labels = np.arange(128)

    def loss(x, kernel):
        return linear_cross_entropy(x, kernel, labels, **options).sum()

    with pretend_device("gpu", "9.0"), jax.enable_x64(True):
        traced = jax.jit(jax.value_and_grad(loss, (0, 1))).trace(x, kernel)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_vmap_calls_the_kernels_one_after_the_other():
    """Over x as one call with more tokens, and over kernels one by one."""
    x, kernel, labels, *_ = case("plain")
    kernels = np.stack([kernel, -kernel])

    def losses(x, kernel):
        return linear_cross_entropy(x, kernel, labels)

    with interpreted():
        of_x = jax.vmap(losses, (0, None))(np.stack([x, -x]), kernel)
        of_kernels = jax.vmap(losses, (None, 0))(x, kernels)
        one, other = losses(x, kernel), losses(x, -kernel)
        of_x, of_kernels, one, other = jax.tree.map(np.asarray, (of_x, of_kernels, one, other))
    np.testing.assert_allclose(of_x, [one, other], rtol=2e-6)
    np.testing.assert_allclose(of_kernels, [one, other], rtol=2e-6)


def test_second_order_comes_from_the_chunked_path():
    x, kernel, labels, *_ = case("plain")

    def mean(x, kernel):
        return linear_cross_entropy(x, kernel, labels, reduction="mean")

    def chunked(x, kernel):
        return linear_cross_entropy(x, kernel, labels, reduction="mean", chunk_size=64)

    def second(function):
        return jax.jvp(jax.grad(function, (0, 1)), (x, kernel), (x, kernel))[1]

    with interpreted():
        actual = jax.tree.map(np.asarray, jax.jit(functools.partial(second, mean))())
        wanted = jax.tree.map(np.asarray, jax.jit(functools.partial(second, chunked))())
    for y, z in zip(actual, wanted, strict=True):
        atol = 2.0**-8 * np.abs(f32(z)).max()
        np.testing.assert_allclose(f32(y), f32(z), rtol=2.0**-7, atol=atol)  # a step of bfloat16
