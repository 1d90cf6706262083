"""`memeff.replace_attention` with biases: shifted positions, arrays of few dims, images."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from replaced_checks import (
    assert_replaced,
    assert_same,
    find,
    qkv_of_one_head,
    replace,
    result_and_gradients,
)
from small_calls import assert_close, temp_bytes

import memeff


def test_bias_of_shifted_distances():
    """Transformer-XL shifts rows by a padded reshape, which no index follows."""
    q, k, v = qkv_of_one_head()

    def attend(q, k, v):
        T, H = q.shape
        distances = jnp.sin(jnp.arange(2 * T)[:, None] * (1 + jnp.arange(H)))
        shifted = jnp.pad(q @ distances.T, ((0, 0), (1, 0))).reshape(2 * T + 1, T)[1:]
        return jax.nn.softmax(q @ k.T + shifted.reshape(T, 2 * T)[:, :T]) @ v

    assert "an array as bias" in str(find(attend, q, k, v))
    assert_replaced(attend, q, k, v, atol=1e-5)


def added(s, bias, visible):
    return s + (bias + jnp.where(visible, 0, -1e9))


def replacing(s, bias, visible):
    return jnp.where(visible, s + bias, -1e9)


@pytest.mark.once
@pytest.mark.parametrize("logits,most", [(added, 3), (replacing, 4)])
def test_memory_of_a_bias_of_pairs_beside_a_mask(logits, most):
    """The call for a bias that hides all a row sees shares the bias and its gradient."""
    N, T = 4, 2048

    def attend(q, k, v, table):
        positions = jnp.arange(T)
        bias = table[:, abs(positions[:, None] - positions) // 64]
        visible = positions[:, None] >= positions
        weights = jax.nn.softmax(logits(jnp.einsum("tnh,snh->nts", q, k), bias, visible))
        return jnp.einsum("nts,snh->tnh", weights, v)

    x = jax.ShapeDtypeStruct((T, N, 8), jnp.float32)
    table = jax.ShapeDtypeStruct((N, T // 64), jnp.float32)
    (place,) = memeff.find_attention(attend, x, x, x, table).replaced
    assert place.pair_arrays == (("bias", N * T * T * 4),)
    replaced = memeff.replace_attention(attend, strict=True)
    gradient = jax.grad(lambda *arrays: (replaced(*arrays) ** 2).sum(), (0, 1, 2, 3))
    assert temp_bytes(gradient, (x, x, x, table)) < most * N * T * T * 4


def gates(s, x):
    return s + x["rows"] + x["columns"]


def difference_of_sums(s, x):
    return s + ((1e4 + x["rows"]) - (1e4 + x["columns"]))


def causal_gates(s, x):
    return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s + x["rows"] - x["columns"], -1e9)


def gate_and_padding(s, x):
    return s + x["rows"] + jnp.where(x["columns"] < 1, 0, -1e9)


def pairs_and_padding(s, x):
    return s + jnp.where(x["columns"][:, :1] < 1, x["pairs"], -1e9)


def pairs_and_factor(s, x):
    return s + x["pairs"] * x["rows"][:, :1]


def pairs_and_segments(s, x):
    ids = x["ids"]
    visible = (ids[:, :, None] == ids[:, None])[:, None] & jnp.tril(jnp.ones(s.shape[-2:], bool))
    return jnp.where(visible, s + x["pairs"], -1e9)


def compared_pairs(s, x):
    return jnp.where(x["pairs"] > x["columns"][:, :1], s, -1e9)


OTHER_DIMS = (
    gates,
    difference_of_sums,
    causal_gates,
    gate_and_padding,
    pairs_and_padding,
    pairs_and_factor,
    pairs_and_segments,
    compared_pairs,
)


def attend_with_other_dims(functions, arrays, ids):
    """Return the results of functions of logits by name."""
    results = {}
    for logits in functions:
        x = {**arrays[logits.__name__], "ids": ids}
        weights = jax.nn.softmax(logits(jnp.einsum("btnh,bsnh->bnts", x["q"], x["k"]), x))
        results[logits.__name__] = jnp.einsum("bnts,bsnh->btnh", weights, x["v"])
    return results


def shapes_of_other_dims(T):
    B, N = 2, 3
    tokens = {name: (B, T, N, 4) for name in "qkv"}
    return {**tokens, "rows": (B, N, T, 1), "columns": (B, N, 1, T), "pairs": (1, N, T, T)}


def test_terms_of_other_dims_are_not_added_up_in_an_array_of_all():
    """Terms of [B, N, T, 1], [B, N, 1, S] and [1, N, T, S] stay apart."""
    T = 2048  # more than a tile
    shapes = shapes_of_other_dims(T)
    x = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    arrays = {logits.__name__: x for logits in OTHER_DIMS}
    ids = jax.ShapeDtypeStruct((2, T), jnp.int32)
    attend = functools.partial(attend_with_other_dims, OTHER_DIMS)
    assert len(find(attend, arrays, ids).replaced) == len(OTHER_DIMS)
    loss = lambda *arrays: sum(map(jnp.sum, replace(attend)(*arrays).values()))
    text = str(jax.make_jaxpr(jax.grad(loss))(arrays, ids))
    assert f"[1,3,{T},{T}]" in text
    assert f"[2,3,{T},{T}]" not in text


@pytest.mark.parametrize("logits", few(OTHER_DIMS, [difference_of_sums]), ids=lambda f: f.__name__)
def test_terms_of_other_dims_have_the_numbers_of_the_program(logits):
    rng = np.random.default_rng(0)
    shapes = shapes_of_other_dims(12)
    x = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    ids = jnp.asarray(rng.integers(0, 3, (2, 12)), jnp.int32)

    def attend(x):
        return attend_with_other_dims([logits], {logits.__name__: x}, ids)[logits.__name__]

    actual = result_and_gradients(replace(attend, strict=True), [x])
    expected = result_and_gradients(attend, [x])
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 * max(1, np.abs(y).max()))


@pytest.mark.parametrize("T, S", few([(6, 8), (9, 6), (8, 8)], [(6, 8)]))
def test_positions_shifted_by_a_reshape_that_mixes_axes(T, S):
    """Transformer-XL shifts its term of positions: it pads a column, and reshapes T x (S + 1)."""

    def attend(q, k, v, positions):
        moved = jnp.pad(q @ positions.T, ((0, 0), (1, 0))).reshape(S + 1, T)[1:].reshape(T, S)
        visible = jnp.tril(jnp.ones((T, S), bool), S - T)
        return jax.nn.softmax(jnp.where(visible, q @ k.T + moved, -1e30)) @ v

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        q, k, v, positions = (jnp.asarray(rng.normal(size=(n, 4))) for n in (T, S, S, S))
        arrays = {"q": q, "k": k, "v": v, "positions": positions}
        assert_same(lambda arrays: attend(**arrays), arrays)


def test_rows_and_columns_of_images_merged_behind_the_product():
    """Logits of [rows, columns, rows, columns] get biases of rows and of columns, as in SAM."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 5, 6)).astype(np.float32)
    of_rows = rng.standard_normal((4, 5, 4, 1)).astype(np.float32)

    def attend(q, k, v, of_rows):
        s = jnp.einsum("bxyh,buwh->bxyuw", q, k) + of_rows
        return jax.nn.softmax(s.reshape(2, 20, 20)) @ v.reshape(2, 20, 6)

    places = find(attend, q, k, v, of_rows).replaced
    assert [x.sizes for x in places] == [(1, 2, 20, 20)] and not places[0].pair_arrays
    replaced = replace(attend, strict=True)
    expected = jax.jit(attend)(q, k, v, of_rows)
    np.testing.assert_allclose(replaced(q, k, v, of_rows), expected, atol=1e-6)
    gradients = []
    for function in (replaced, attend):
        loss = lambda *args, function=function: jnp.sin(function(*args)).sum()
        gradients.append(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, of_rows))
    assert_close(*gradients, atol=1e-5)


def attend_over_rows_and_columns(x, rows, columns, visible):
    """Attention of an image, [rows, columns, N, H], with vectors for distances, and padded rows."""
    s = jnp.einsum("xynh,uwnh->nxyuw", x, x) / 2
    s += jnp.einsum("xynh,xuh->nxyu", x, rows)[..., None]
    s += jnp.einsum("xynh,ywh->nxyw", x, columns)[..., None, :]
    s = jnp.where(visible[:, None], s, -1e9)
    p = jax.nn.softmax(s.reshape(*s.shape[:3], -1)).reshape(s.shape)
    return jnp.einsum("nxyuw,uwnh->xynh", p, x)


def arrays_of_image(height, width):
    rng = np.random.default_rng(0)
    shapes = [(height, width, 2, 4), (height, height, 4), (width, width, 4)]
    arrays = [jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes]
    return [*arrays, jnp.arange(height) < height - 1]


def test_distances_of_rows_and_of_columns():
    arrays = arrays_of_image(4, 5)
    (place,) = find(attend_over_rows_and_columns, *arrays).replaced
    assert place.sizes[2:] == (20, 20) and not place.pair_arrays, place

    def loss(f, *arrays):
        return jnp.sin(f(*arrays, arrays_of_image(4, 5)[-1])).sum()

    gradients = []
    for f in (replace(attend_over_rows_and_columns, strict=True), attend_over_rows_and_columns):
        gradient = jax.value_and_grad(functools.partial(loss, f), (0, 1, 2))
        gradients.append(jax.jit(gradient)(*arrays[:3]))
    assert_close(*gradients, atol=1e-4)


def test_rows_and_columns_take_no_array_of_pairs():
    def temp(height):
        *arrays, visible = arrays_of_image(height, 64)
        replaced = memeff.replace_attention(attend_over_rows_and_columns, strict=True)
        loss = lambda *arrays: replaced(*arrays, visible).sum()
        return temp_bytes(jax.grad(loss, (0, 1, 2)), arrays)

    assert temp(64) <= 2.2 * temp(32)
