"""Orders of tokens over devices: to_zigzag, from_zigzag, sequence_positions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memeff
from memeff.sequence.layout import LAYOUTS, chunk_start, layout_order, natural_order, stride_of

pytestmark = pytest.mark.once
slow = pytest.mark.slow


def test_picture():
    assert memeff.sequence_positions(12, 2).tolist() == [0, 1, 2, 9, 10, 11, 3, 4, 5, 6, 7, 8]
    assert memeff.sequence_positions(6, 3, "contiguous").tolist() == [0, 1, 2, 3, 4, 5]
    assert memeff.sequence_positions(6, 3, "striped").tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("devices", few([1, 2, 3, 5, 8], [1, 3]))
def test_there_and_back(devices):
    T = 6 * devices
    more = np.broadcast_to(np.arange(4, dtype=np.float32), (3, T, 4))
    tree = {"tokens": np.arange(2 * T).reshape(2, T), "more": [jnp.asarray(more)]}
    moved = memeff.to_zigzag(tree, devices)
    order = memeff.sequence_positions(T, devices)
    np.testing.assert_array_equal(moved["tokens"], tree["tokens"][:, order])
    assert isinstance(moved["tokens"], np.ndarray)
    back = memeff.from_zigzag(moved, devices)
    np.testing.assert_array_equal(back["tokens"], tree["tokens"])
    np.testing.assert_array_equal(back["more"][0], tree["more"][0])
    last = memeff.to_zigzag(tree["tokens"], devices, axis=-1)
    np.testing.assert_array_equal(last, moved["tokens"])
    for xp in (np, jnp):  # no sequence, and sequences without tokens
        assert memeff.to_zigzag(xp.ones((0, T)), devices).shape == (0, T)
        assert memeff.from_zigzag(xp.ones((2, 0)), devices).shape == (2, 0)


def sharded(array, devices, kind):
    """Return an array whose dim 1 so many devices share."""
    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(kind,), devices=jax.devices()[:devices])
    return jax.device_put(array, NamedSharding(mesh, P(None, "seq")))


KINDS = [AxisType.Auto, AxisType.Explicit]


@pytest.mark.parametrize(
    "devices, kind",
    few(itertools.product([1, 2, 3, 8], KINDS), [(1, KINDS[0]), (3, KINDS[0]), (3, KINDS[1])]),
)
def test_a_sharded_array_stays_sharded(devices, kind):
    tokens = np.arange(2 * 48 * 3).reshape(2, 48, 3).astype(np.float32)
    array = sharded(tokens, devices, kind)
    for move in (memeff.to_zigzag, memeff.from_zigzag):
        functions = [functools.partial(move, devices=devices)]
        if kind == AxisType.Explicit:  # the type tells under jit, too
            functions.append(jax.jit(functions[0]))
        for function in functions:
            moved = function(array)
            np.testing.assert_array_equal(moved, move(tokens, devices))
            assert moved.sharding.shard_shape(moved.shape) == (2, 48 // devices, 3)
        with jax.set_mesh(array.sharding.mesh):
            loss = lambda x, move=move: jnp.sum(move(x, devices) ** 2) / 2
            gradient = jax.jit(jax.grad(loss))(array)
        np.testing.assert_array_equal(gradient, tokens)


def test_a_sharded_array_is_not_gathered():
    array = sharded(np.ones((1, 1 << 16, 1), np.float32), 8, AxisType.Explicit)
    for move in (memeff.to_zigzag, memeff.from_zigzag):
        program = jax.jit(functools.partial(move, devices=8)).lower(array).compile()
        text = program.as_text()
        assert text.count("collective-permute(") == 2
        assert "all-gather" not in text and "all-reduce" not in text
        assert program.memory_analysis().temp_size_in_bytes < 3 * array.nbytes / 8


JAX_IS_OLD = jax.__version__.startswith("0.10.")
BOTH_KINDS = list(itertools.product(KINDS, repeat=2))
MIXED_KINDS = BOTH_KINDS[1:3]


@pytest.mark.parametrize(
    "kinds", [pytest.param(x, marks=[] if x in MIXED_KINDS else slow) for x in BOTH_KINDS]
)
def test_an_array_on_more_devices_than_the_zigzag_has(kinds):
    """The type of an array on a mesh with axes of both kinds names only some of its axes."""
    mesh = jax.make_mesh((2, 4), ("ring", "heads"), axis_types=kinds)
    tokens = np.arange(2 * 48 * 3).reshape(2, 48, 3)
    array = jax.device_put(tokens, NamedSharding(mesh, P(None, ("ring", "heads"))))
    for move in (memeff.to_zigzag, memeff.from_zigzag):
        for devices in (2, 8):
            moved = move(array, devices)
            np.testing.assert_array_equal(moved, move(tokens, devices))
            # From JAX 0.11 on, jit gathers a result over the Auto axis of (Auto, Explicit).
            gathers = kinds == (AxisType.Auto, AxisType.Explicit) and not JAX_IS_OLD
            if set(kinds) == {AxisType.Explicit} or devices == 8 and not gathers:
                assert moved.sharding.shard_shape(moved.shape) == (2, 6, 3)


@pytest.mark.parametrize("devices", few([1, 2, 3, 8], [3]))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_positions_agree_with_chunks(layout, devices):
    """The two definitions of a layout: the order of all tokens, and where a chunk begins."""
    T = 4 * devices
    positions = memeff.sequence_positions(T, devices, layout)
    chunks = 2 if layout == "zigzag" else 1
    length = T // devices // chunks
    found = []
    for device in range(devices):
        for chunk in range(chunks):
            first = chunk_start(layout, devices, device, chunk, length)
            found.extend(first + stride_of(layout, devices) * i for i in range(length))
    assert found == positions.tolist()
    x = jnp.asarray(positions)[None]
    np.testing.assert_array_equal(natural_order(x, layout, devices, 1)[0], np.arange(T))
    np.testing.assert_array_equal(layout_order(jnp.arange(T), layout, devices, 0), positions)


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: memeff.to_zigzag(np.ones((1, 6)), 2), ValueError, "pad to 8 tokens"),
        (lambda: memeff.to_zigzag({"x": np.ones(8)}, 2), ValueError, r"tree\['x'\].* no axis 1"),
        (lambda: memeff.sequence_positions(8, 0), ValueError, "devices=0"),
        (lambda: memeff.sequence_positions(8, 2.0), TypeError, "devices must be an int"),
        (lambda: memeff.sequence_positions(-8, 2), ValueError, "length=-8: it must be at least 0"),
        (lambda: memeff.sequence_positions("8", 2), TypeError, "length must be an int, got str"),
        (lambda: memeff.sequence_positions(8, 2, np.ones(2)), ValueError, "layout=.* not known"),
        (lambda: memeff.to_zigzag({"x": "y"}, 2), TypeError, r"tree\['x'\] must be an array"),
        (lambda: memeff.to_zigzag(np.ones(8), 2, 0.0), TypeError, "axis must be an int, got float"),
        (lambda: memeff.from_zigzag(np.ones(8), True, 0), TypeError, "devices must be an int"),
        (lambda: memeff.from_zigzag(np.ones((1, 8)), 2, True), TypeError, "axis must be an int"),
        (lambda: memeff.sequence_positions(8, 2, "spiral"), ValueError, "'spiral' is not known"),
        (lambda: memeff.sequence_positions(9, 2, "striped"), ValueError, "pad to 10 tokens"),
    ],
)
def test_wrong_calls(call, error, text):
    with pytest.raises(error, match=text):
        call()
