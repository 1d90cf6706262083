"""The loss of a large vocabulary on eight CPU devices (see conftest.py)."""

import functools
import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from loss_cases import HIDDEN, IGNORE, H, T, draw, f32
from sharded import assert_near, collectives, mesh_of

from memeff import linear_cross_entropy
from memeff.vocabulary import loops

TYPES = [AxisType.Auto, AxisType.Explicit]
WORDS = 64  # over 8 or 4 devices
SHARDED_CHUNK = (7, 5)


def of_devices(axis, x, kernel, bias, labels, cotangents):
    """Return loss, lse and gradients, with words sharded over `axis`, or None."""

    def call(x, kernel, bias):
        return linear_cross_entropy(
            x,
            kernel,
            labels,
            bias=bias,
            vocab_axis=axis,
            chunk_size=SHARDED_CHUNK,
            label_smoothing=0.1,
            z_loss=0.1,
            ignore_label=IGNORE,
            return_lse=True,
        )

    results, pull = jax.vjp(call, x, kernel, bias)
    return *results, *pull(tuple(cotangents))


def second_of_devices(axis, x, kernel, bias, labels, cotangents):
    """Return tangents of the gradients along the operands, and the transpose at the operands."""

    def gradients(x, kernel, bias):
        return of_devices(axis, x, kernel, bias, labels, cotangents)[2:]

    args = (x, kernel, bias)
    direction = (x, kernel, jnp.where(bias == -jnp.inf, 0, bias))
    _, tangents = jax.jvp(gradients, args, direction)
    _, pull = jax.vjp(gradients, *args)
    return *tangents, *pull(direction)


def sharded_args():
    x, kernel, labels, bias, *cotangents = draw(WORDS, (4, T))
    labels[0, :5] = IGNORE
    bias[list(HIDDEN)] = -np.inf
    floats = (x, kernel, bias, *cotangents)
    x, kernel, bias, *cotangents = (y.astype(f32) for y in floats)
    return x, kernel, bias, labels, tuple(cotangents)


@functools.cache
def one_device(function):
    run = jax.jit(functools.partial(function, None))
    return jax.tree.map(np.asarray, run(*sharded_args()))


def placed(mesh, specs, args):
    """Return the arguments on the mesh."""

    def put(spec, x):
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, specs, args, is_leaf=lambda x: isinstance(x, P))


ROWS = P("d")
SPECS = (ROWS, P(None, "v"), P("v"), ROWS, (ROWS, ROWS))
GRADIENT_SPECS = (ROWS, P(None, "v"), P("v"))


@pytest.mark.parametrize(
    "devices, axis_type",
    few(
        itertools.product([(1, 8), (2, 4)], TYPES),
        [((1, 8), AxisType.Explicit), ((2, 4), AxisType.Auto)],
    ),
)
def test_words_sharded_over_devices(devices, axis_type):
    """Loss, lse and gradients inside shard_map are those of one device."""
    mesh = mesh_of(axis_type, d=devices[0], v=devices[1])
    run = jax.shard_map(
        functools.partial(of_devices, "v"),
        mesh=mesh,
        in_specs=SPECS,
        out_specs=(ROWS, ROWS, *GRADIENT_SPECS),
    )
    args = placed(mesh, SPECS, sharded_args())
    program = jax.jit(run).lower(*args).compile()
    assert_near(program(*args), one_device(of_devices), 2e-6)
    assert all("all-reduce" in line for line in collectives(program.as_text()))


@pytest.mark.parametrize("axis_type", few(TYPES, [AxisType.Explicit]))
def test_shard_map_over_the_axis_of_words_alone(axis_type):
    """Tokens are sharded over the other axis of the mesh, and gradients are taken inside."""
    mesh = mesh_of(axis_type, d=2, v=4)
    over_words = jax.tree.map(lambda spec: P(*(x if x == "v" else None for x in spec)), SPECS)
    dx, dkernel, dbias = GRADIENT_SPECS
    with jax.set_mesh(mesh):
        run = jax.shard_map(
            functools.partial(of_devices, "v"),
            in_specs=over_words,
            out_specs=(P(), P(), P(), dkernel, dbias),
            axis_names={"v"},
        )
        results = jax.jit(run)(*placed(mesh, SPECS, sharded_args()))
    assert_near(results, one_device(of_devices), 2e-6)


def test_second_order_with_words_sharded_over_devices():
    mesh = mesh_of(AxisType.Auto, d=2, v=4)
    run = jax.shard_map(
        functools.partial(second_of_devices, "v"),
        mesh=mesh,
        in_specs=SPECS,
        out_specs=GRADIENT_SPECS * 2,
    )
    actual = jax.jit(run)(*placed(mesh, SPECS, sharded_args()))
    assert_near(actual, one_device(second_of_devices), 1e-5)


def test_no_tokens_with_words_sharded_over_devices():
    """Types say over which devices an array without numbers varies."""
    x, kernel, labels, *_ = draw(WORDS, (0,))
    specs = (P(), P(None, "v"))

    def gradients(x, kernel):
        loss = functools.partial(linear_cross_entropy, labels=labels, vocab_axis="v")
        return jax.grad(lambda x, kernel: loss(x, kernel).sum(), (0, 1))(x, kernel)

    run = jax.shard_map(
        gradients, mesh=mesh_of(AxisType.Auto, v=8), in_specs=specs, out_specs=specs
    )
    args = x.astype(f32), kernel.astype(f32)
    for found, like in zip(jax.jit(run)(*args), args, strict=True):
        assert found.shape == like.shape and not np.any(found)


@pytest.mark.parametrize("check", few([True, False], [True]))
def test_gradient_outside_of_shard_map(check):
    mesh = mesh_of(AxisType.Auto, d=2, v=4)
    x, kernel, bias, labels, cotangents = placed(mesh, SPECS, sharded_args())

    def call(x, kernel, bias):
        def on_device(x, kernel, bias, labels):
            return linear_cross_entropy(
                x,
                kernel,
                labels,
                bias=bias,
                vocab_axis="v",
                chunk_size=SHARDED_CHUNK,
                label_smoothing=0.1,
                z_loss=0.1,
                ignore_label=IGNORE,
                return_lse=True,
            )

        run = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=SPECS[:4],
            out_specs=(ROWS, ROWS),
            check_vma=check,
        )
        return run(x, kernel, bias, labels)

    @jax.jit
    def run(x, kernel, bias):
        results, pull = jax.vjp(call, x, kernel, bias)
        return *results, *pull(cotangents)

    assert_near(run(x, kernel, bias), one_device(of_devices), 2e-6)


@pytest.mark.parametrize("axis_type", TYPES)
def test_sharded_tokens_without_shard_map(axis_type, monkeypatch):
    """Tokens stay where they are: only the gradients of kernel and bias are added up."""
    monkeypatch.setattr(f"{__name__}.SHARDED_CHUNK", None)
    mesh = mesh_of(axis_type, d=4)
    specs = (ROWS, P(), P(), ROWS, (ROWS, ROWS))
    args = placed(mesh, specs, sharded_args())
    run = jax.jit(functools.partial(of_devices, None)).lower(*args).compile()
    results = run(*args)
    assert_near(results, one_device(of_devices), 5e-6)
    for x in results[:3]:
        assert x.sharding.shard_shape(x.shape)[0] == 1
    lines = collectives(run.as_text())
    assert lines and all("all-reduce" in line for line in lines)
    (line,) = lines
    assert f"f32[{H},{WORDS}]" in line


@pytest.mark.parametrize(
    "function, axis_type",
    few(
        itertools.product([of_devices, second_of_devices], TYPES),
        [(of_devices, AxisType.Auto)],
    ),
)
def test_tokens_that_are_sharded_in_two_dims_stay_where_they_are(function, axis_type, monkeypatch):
    """A batch over some devices, and each of its sequences over others."""
    monkeypatch.setattr(f"{__name__}.SHARDED_CHUNK", None)
    x, kernel, bias, labels, cotangents = sharded_args()
    x, labels, *cotangents = (y[:, :36] for y in (x, labels, *cotangents))
    args = x, kernel, bias, labels, tuple(cotangents)
    run = jax.jit(functools.partial(function, None))
    rows = P("d", "s")
    on_mesh = placed(mesh_of(axis_type, d=2, s=2), (rows, P(), P(), rows, (rows, rows)), args)
    program = run.lower(*on_mesh).compile()
    results = program(*on_mesh)
    assert_near(results, jax.tree.map(np.asarray, run(*args)), 5e-6)
    dx = results[2] if function is of_devices else results[0]
    assert dx.sharding.shard_shape(x.shape)[:2] == (2, 18)
    lines = collectives(program.as_text())
    assert lines and all("all-reduce" in line for line in lines)


def test_tiles_of_sharded_tokens(monkeypatch):
    """A tile has all tokens where they may be sharded, and fewer words instead."""
    monkeypatch.setattr(loops, "may_be_sharded", lambda: True)
    assert jax.device_count() == 8
    V = 32_000
    assert loops.choose_tile((None, None), 1000, V) == ((1024, 1024), 1)
    assert loops.choose_tile((None, None), 8192, V) == ((8192, 1024), 1)
    assert loops.choose_tile((None, None), 12_000, V) == ((12_000, 640), 1)
    assert loops.choose_tile((None, None), 2**20, V) == ((2**20, 512), 1)
    assert loops.choose_tile((7, None), 8192, V) == ((7, 1024), 146)


def test_a_replicated_kernel_is_refused_with_vocab_axis():
    mesh = mesh_of(AxisType.Auto, v=8)
    run = jax.shard_map(
        functools.partial(linear_cross_entropy, vocab_axis="v"),
        mesh=mesh,
        in_specs=(P(), P(), P()),
        out_specs=P(),
    )
    message = r"kernel is the same on all devices of vocab_axis='v'\. .* P\(None, 'v'\), or omit"
    with pytest.raises(ValueError, match=message):
        run(np.ones((5, 8), f32), np.ones((8, 9), f32), np.zeros(5, np.int32))


# ---- sums and means


def mean_and_gradients(x, kernel, labels, weights):
    """Return the weighted mean and its gradients."""

    def mean(x, kernel, weights):
        return linear_cross_entropy(
            x, kernel, labels, weights=weights, reduction="mean", ignore_label=IGNORE
        )

    value, gradients = jax.value_and_grad(mean, (0, 1, 2))(x, kernel, weights)
    return value, *gradients


def sum_and_gradients(x, kernel, labels, weights):
    """Return the sum over the tokens of all devices, each with its own, and its gradients."""

    def total(x, kernel, weights):
        options = dict(weights=weights, reduction="sum", ignore_label=IGNORE)
        return jax.lax.psum(linear_cross_entropy(x, kernel, labels, **options), "d")

    value, gradients = jax.value_and_grad(total, (0, 1, 2))(x, kernel, weights)
    return value, *gradients


def reduced_args():
    x, kernel, _, labels, (weights, _) = sharded_args()
    labels = labels[:, :36]
    weights = np.where(labels == IGNORE, 0, np.abs(weights[:, :36]))
    return x[:, :36], kernel, labels, weights / weights.sum()


@functools.cache
def reduced_on_one_device():
    """Return mean and gradients from the losses of tokens."""

    def mean(x, kernel, weights):
        losses = linear_cross_entropy(x, kernel, labels, ignore_label=IGNORE)
        return (losses * weights).sum() / jnp.where(labels == IGNORE, 0, weights).sum()

    x, kernel, labels, weights = reduced_args()
    value, gradients = jax.jit(jax.value_and_grad(mean, (0, 1, 2)))(x, kernel, weights)
    return jax.tree.map(np.asarray, (value, *gradients))


@pytest.mark.parametrize("axis_type", few(TYPES, [AxisType.Auto]))
def test_means_of_sharded_tokens(axis_type):
    mesh = mesh_of(axis_type, d=4)
    args = placed(mesh, (ROWS, P(), ROWS, ROWS), reduced_args())
    assert_near(jax.jit(mean_and_gradients)(*args), reduced_on_one_device(), 2e-6)


def test_means_without_jit_on_a_mesh_that_is_not_set():
    x, kernel, labels, weights = reduced_args()
    mesh = mesh_of(AxisType.Explicit, d=4)
    on_mesh = placed(mesh, (ROWS, P(), ROWS, ROWS), (x, kernel, labels, weights))

    def mean(labels, weights):
        return linear_cross_entropy(
            *on_mesh[:2], labels, weights=weights, reduction="mean", ignore_label=IGNORE
        )

    wanted = reduced_on_one_device()[:1]
    assert_near([mean(*on_mesh[2:])], wanted, 2e-6)
    assert_near([mean(labels, weights)], wanted, 2e-6)
    ones = linear_cross_entropy(*on_mesh[:3], reduction="mean", ignore_label=IGNORE)
    assert_near([mean(labels, np.ones_like(weights))], [np.asarray(ones)], 2e-6)


@pytest.mark.parametrize("axis_type", few(TYPES, [AxisType.Auto]))
def test_sums_inside_shard_map(axis_type, monkeypatch):
    """Each device makes the gradient of its own sum in one pass, as on a GPU."""
    door = importlib.import_module("memeff.linear_cross_entropy")
    monkeypatch.setattr(door, "one_pass_is_faster", lambda: True)
    mesh = mesh_of(axis_type, d=4)
    specs = (ROWS, P(), ROWS, ROWS)
    run = jax.shard_map(
        sum_and_gradients, mesh=mesh, in_specs=specs, out_specs=(P(), ROWS, P(), ROWS)
    )
    args = placed(mesh, specs, reduced_args())
    program = jax.jit(run)
    assert program.lower(*args).as_text().count("stablehlo.dot_general") == 3
    value, dx, dkernel, _ = program(*args)
    wanted, wanted_dx, wanted_dkernel, _ = reduced_on_one_device()
    assert_near((value, dx, dkernel), (wanted, wanted_dx, wanted_dkernel), 2e-6)
