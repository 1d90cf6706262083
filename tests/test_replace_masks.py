"""`memeff.replace_attention` reads masks as formulas of positions, segments and numbers of keys."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import S, T, make_arrays
from jax import lax
from replaced_checks import assert_replaced, find, qkv, qkv_of_one_head, replace, run_replaced
from small_calls import temp_bytes

import memeff
from memeff.rewrite.axes import known_number, new_index
from memeff.rewrite.element import Builder, Roles
from memeff.rewrite.element_function import tabulate
from memeff.rewrite.graph import Graph
from memeff.rewrite.reader import Reader
from memeff.rewrite.symbols import Choice


@pytest.mark.parametrize("first, last, is_left", [(0, -1, True), (3, 1, True), (-9, -9, False)])
def test_a_window_without_keys(first, last, is_left):
    """Key - query from 3 to 1 hides all keys, as no window of memeff does; -9 is in no row."""
    q, k, v = qkv(8)

    def attend(q):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k)
        distance = jnp.arange(8) - jnp.arange(8)[:, None]
        logits = jnp.where((first <= distance) & (distance <= last), logits, -1e9)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)

    report = find(attend, q)
    assert bool(report.left) == is_left and bool(report.replaced) != is_left
    assert ("hides all keys from all queries" in str(report)) == is_left
    out, expected = jax.jit(lambda q: (replace(attend)(q), attend(q)))(q)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint8"])
def test_positions_that_their_dtype_does_not_hold(dtype):
    """Above 256, bfloat16 rounds positions and 8 bits count from 0 again."""
    q, k, v = qkv_of_one_head(300)

    def attend(q, k, v):
        positions = lax.iota(dtype, 300)
        logits = jnp.where(positions[:, None] == positions, q @ k.T, -1e9)
        return jax.nn.softmax(logits) @ v

    expected = attend(q, k, v)
    assert jnp.abs(expected - v).max() > 0.1  # some query sees another key than its own
    np.testing.assert_allclose(run_replaced(attend, q, k, v), expected, atol=1e-5)


NUMBERS = np.arange(600)


@pytest.mark.parametrize(
    "rows, columns, words",
    [
        (NUMBERS[3:11, None], NUMBERS[:9], "causal from position 3"),
        (NUMBERS[3:11, None].astype("int16"), NUMBERS[None, :9].astype("int8"), "causal"),
        (NUMBERS[8:0:-1, None], NUMBERS[:9], "mask_fn"),
        (NUMBERS[3:11, None], NUMBERS[:9] ** 2, "mask_fn"),
        (NUMBERS[250:258, None], NUMBERS[250:259].astype("uint8"), "mask_fn"),
    ],
)
def test_positions_that_are_constants(rows, columns, words):
    def attend(q, k, v):
        visible = jnp.greater_equal(rows, columns).reshape(8, 9)
        return jax.nn.softmax(jnp.where(visible, q @ k.T, -1e9)) @ v

    x = qkv_of_one_head()[0]
    arrays = x[:8], x[1:10], x[2:11]
    (place,) = find(attend, *arrays).replaced
    assert words in str(place)
    assert_replaced(attend, *arrays)


LARGE_NUMBERS = (np.inf, -np.inf, np.nan, 3e9, -3.7, 2.5)


def test_numbers_that_a_cast_to_integers_cannot_hold_are_those_of_xla():
    """A window of an infinite number of tokens is no window."""

    def cast(zero):
        numbers = [zero + x for x in LARGE_NUMBERS]
        return [[x.astype(dtype) for x in numbers] for dtype in ("int32", "uint32", "int8")]

    jaxpr = jax.make_jaxpr(lambda: cast(lax.full((), 0.0) * 1))()
    read = [known_number(x) for x in Graph(jaxpr, ()).results]
    np.testing.assert_array_equal(read, jax.tree.leaves(jax.jit(cast)(jnp.float32(0))))

    def attend(x):
        window = jnp.exp(jnp.full((), 100.0)).astype(jnp.int32)
        distance = jnp.arange(16)[:, None] - jnp.arange(16)
        return jax.nn.softmax(jnp.where(distance < window, x @ x.T, -jnp.inf)) @ x

    x = qkv_of_one_head()[0]
    assert_replaced(attend, x)


@pytest.mark.parametrize("bias_dims, words", [("a1nts", "mask_fn"), ("11nts", "segments")])
def test_segments_that_differ_along_an_axis_that_becomes_heads(bias_dims, words):
    """The bias chooses the axes of heads, and segments are ids of batch entries alone."""
    sizes = dict(zip("abnts", (2, 3, 2, 8, 8), strict=True))
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 3, 2, 8, 4)).astype("float32")
    bias = rng.normal(size=[sizes.get(x, 1) for x in bias_dims]).astype("float32")
    ids = np.sort(rng.integers(0, 3, (2, 3, 1, 8)))

    def attend(q, k, v, bias, ids):
        same = ids[..., :, None] == ids[..., None, :]
        s = jnp.einsum("abnth,abnsh->abnts", q, k) + bias
        weights = jax.nn.softmax(jnp.where(same, s, -jnp.inf))
        return jnp.einsum("abnts,abnsh->abnth", weights, v)

    arrays = q, k, v, bias, ids
    assert words in str(find(attend, *arrays).replaced)
    assert_replaced(attend, *arrays, atol=1e-5)


def low_of_float32(s, visible):
    return jnp.where(visible, s.astype(jnp.float32), jnp.finfo("float32").min).astype("bfloat16")


def low_in_float16(s, visible):
    return jnp.where(visible, s, -1e30).astype("float16")


def added_in_float16(s, visible):
    return (s + jnp.where(visible, 0, -1e9)).astype("float16")


@pytest.mark.parametrize("logits", [low_of_float32, low_in_float16, added_in_float16])
def test_a_mask_that_a_cast_makes_infinite(logits):
    q, k, v = qkv_of_one_head()
    visible = jnp.tril(jnp.ones((16, 16), bool), -1)  # query 0 sees no key

    def attend(q, k, v, visible):
        return jax.nn.softmax(logits(q @ k.T, visible)).astype(v.dtype) @ v

    expected = attend(q, k, v, visible)
    assert jnp.isnan(expected[0]).all() and not jnp.isnan(expected[1:]).any()
    out = run_replaced(attend, q, k, v, visible)
    np.testing.assert_allclose(out, expected, atol=3e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_in_the_place_of_hidden_logits(dtype):
    q, k, v = qkv_of_one_head(dtype=dtype)

    def attend(q, k, v):
        visible = jnp.arange(16)[:, None] != 3
        return jax.nn.softmax(jnp.where(visible, q @ k.T, jnp.nan)) @ v

    isnan = np.isnan(run_replaced(attend, q, k, v))
    assert (isnan == np.isnan(jax.jit(attend)(q, k, v))).all() and isnan.any() and not isnan.all()


def attend_without_padding(x, ids):
    """Hide padding (id 0) among the queries and among the keys, as packed batches do."""
    is_word = ids > 0
    visible = is_word[:, None] & is_word[None, :] & jnp.tril(jnp.ones((len(ids),) * 2, bool))
    logits = jnp.where(visible, x @ x.T / 3, -1e9)
    return jax.nn.softmax(logits) @ x


def test_padding_of_queries_and_keys_makes_no_array_of_pairs():
    replaced = memeff.replace_attention(attend_without_padding, strict=True)

    def temp(length):
        x = jax.ShapeDtypeStruct((length, 8), jnp.float32)
        ids = jax.ShapeDtypeStruct((length,), jnp.int32)
        return temp_bytes(jax.grad(lambda x, ids: replaced(x, ids).sum()), (x, ids))

    assert temp(8192) <= 2.2 * temp(4096)
    x = np.random.default_rng(0).standard_normal((200, 8))
    x = x.astype(np.float32)
    ids = np.arange(200, dtype=np.int32) % 7 * (np.arange(200) > 5)  # the first rows see no key
    expected = attend_without_padding(x, ids)
    np.testing.assert_allclose(replaced(x, ids), expected, atol=1e-5)


def causal_mask(rows, columns):
    return jnp.arange(rows)[:, None] >= jnp.arange(columns)


def joined_mask():
    return jnp.concatenate([jnp.ones((T, 2), bool), causal_mask(T, S - 2)], 1)


def joined_constants():
    return jnp.concatenate([np.ones((T, 2), bool), np.tril(np.ones((T, S - 2), bool))], 1)


def strided_mask():
    return jnp.concatenate([jnp.zeros((3, S), bool), causal_mask(2 * T, S)], 0)[1 : 2 * T + 1 : 2]


def blocks_of_numbers():
    numbers = [jnp.ones((T, 2)), jnp.where(causal_mask(T, S - 2), 1.0, 0.0)]
    rows = [jnp.concatenate(x, 1) for x in (numbers, numbers[::-1])]
    return jnp.concatenate(rows, 0)[1 : T + 1] > 0


def padded_mask():
    return jnp.pad(causal_mask(T - 1, S - 2), ((1, 0), (1, 1)), constant_values=True)


def cut_mask():
    return lax.pad(causal_mask(T, S - 2), True, ((0, 0, 0), (-1, 3, 0)))


def joined_rows_of_data():
    return jnp.concatenate([jnp.ones((T, 2), bool), jnp.cumsum(causal_mask(T, S - 2), 1) > 3], 1)


def running_counts(s):
    ones = jnp.ones((T, S), jnp.int32)
    return s - 0.3 * jnp.abs(jnp.cumsum(ones, 0) - lax.cumsum(ones, 1, reverse=True))


def padded_bias(s):
    return s + jnp.pad(jnp.zeros((T, 2)), ((0, 0), (3, S - 5)), constant_values=-1.0)


def masked_by(make_mask):
    return lambda s: jnp.where(make_mask(), s, -1e9)


MASKS_OF_PARTS = (joined_mask, joined_constants, strided_mask, blocks_of_numbers, padded_mask)
LOGITS_OF_POSITIONS = [*map(masked_by, MASKS_OF_PARTS), running_counts, padded_bias]
LOGITS_OF_ARRAYS = [masked_by(cut_mask), masked_by(joined_rows_of_data)]


def test_masks_and_biases_of_parts_and_counts_take_no_array_of_pairs():
    """Parts of masks that are joined or padded, and running counts in a bias, are positions."""

    def attend(forms, arrays):
        results = []
        for n, form in enumerate(forms):
            s = form(jnp.einsum("btnh,bsnh->bnts", (n + 1) * arrays["q"], arrays["k"]))
            results.append(jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(s), arrays["v"]))
        return results

    arrays = make_arrays()
    for place in find(functools.partial(attend, LOGITS_OF_POSITIONS), arrays).replaced:
        assert re.search("mask_fn|score_fn", str(place)) and not place.pair_arrays, place
    for place in find(functools.partial(attend, LOGITS_OF_ARRAYS), arrays).replaced:
        assert "an array as mask" in str(place), place
    program = functools.partial(attend, LOGITS_OF_POSITIONS + LOGITS_OF_ARRAYS)
    assert_replaced(program, arrays, atol=1e-5)


def test_a_mask_of_parts_that_a_loop_receives_takes_no_array_of_pairs():
    def model(x, weights):
        rows = jnp.arange(len(x))
        mask = jnp.concatenate([jnp.ones((len(x), 2), bool), rows[:, None] >= rows], 1)

        def layer(x, w):
            keys = jnp.concatenate([x[:2], x])
            logits = jnp.where(mask, (x @ w) @ keys.T, -1e9)
            return jax.nn.softmax(logits) @ keys, None

        return lax.scan(layer, x, weights)[0]

    x = jax.ShapeDtypeStruct((24, 4), jnp.float32)
    (place,) = find(model, x, jax.ShapeDtypeStruct((2, 4, 4), jnp.float32)).replaced
    assert "mask_fn" in str(place) and not place.pair_arrays, place


MASKS_OF_POSITIONS = [
    lambda rows, columns: -(rows - columns) <= 0,
    lambda rows, columns: 2 * columns > 2 * rows - 3,
    lambda rows, columns: 2 >= jnp.abs(rows - columns),
    lambda rows, columns: rows == columns + 1,
    lambda rows, columns: rows != columns,
    lambda rows, columns: jnp.where(rows // 9 == 0, columns < rows, False),
]
TWO_CONDITIONS = [
    lambda a, b: a & ~b,
    lambda a, b: ~a | b,
    lambda a, b: (a ^ True) & b,
    lambda a, b: jnp.where(a, b, True),
    lambda a, b: jnp.where(a | b, 0.0, -1e9),
    lambda a, b: jnp.where(a, jnp.where(b, 0.0, -1e9), 0.0),
    lambda a, b: jnp.where(a, 0.0, jnp.where(b, -1e9, 0.0)),
    lambda a, b: jnp.where(a, jnp.where(b, -1e9, 0.0), -1e9),
    lambda a, b: (1 - a.astype(jnp.float32) * b) * -1e9,
    lambda a, b: jnp.minimum(1.0 - a, b) * -1e9,
]


def test_masks_are_read_as_formulas():
    def masks(of_keys):
        rows = jnp.arange(5)[:, None]
        columns = jnp.arange(7)
        results = [hide(rows, columns) for hide in MASKS_OF_POSITIONS]
        results.append(lax.dynamic_slice_in_dim(jnp.arange(9), 2, 7) <= rows)
        results.extend(combine(rows >= columns, of_keys) for combine in TWO_CONDITIONS)
        return results

    of_keys = jnp.arange(7) % 3 != 1
    graph = Graph(jax.make_jaxpr(masks)(of_keys), [None])
    symbols = []
    functions = []
    for value in graph.results:
        roles = Roles((), (), *new_index(value.shape))
        symbol = Reader().read(value, (roles.query, roles.keys))
        assert isinstance(symbol, Choice)
        builder = Builder(roles)
        builder.formula(symbol.condition)
        assert builder.leaves in ([], graph.inputs)
        symbols.append(symbol)
        functions.append(builder.function("mask"))

    @jax.jit
    def evaluate(of_keys):
        return [tabulate(f, (1, 1, 5, 7), [of_keys])[0, 0] for f in functions], masks(of_keys)

    for symbol, condition, expected in zip(symbols, *evaluate(of_keys), strict=True):
        np.testing.assert_array_equal(np.where(condition, symbol.yes, symbol.no), expected)
