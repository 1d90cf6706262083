"""Hidden values reach nothing, and a visible NaN reaches exactly the queries that see it."""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES
from conftest import cotangents, few, run_call
from small_calls import assert_bits, assert_close
from test_masks import IMPLEMENTATIONS, S, T, _leaves

from memeff import dot_product_attention

pytestmark = pytest.mark.once

f32 = np.float32

# ---- what nobody sees may hold anything

GARBAGE = (np.nan, np.inf, -np.inf, 1e38)


class Hidden(NamedTuple):
    """Keyword arguments of a call, and the positions that they hide."""

    kwargs: dict[str, Any]
    rows: np.ndarray  # [B, T]: True where a query sees no key
    keys: np.ndarray  # [B, S]: True where no query sees a key


def _hidden_calls() -> dict[str, Hidden]:
    rows = np.arange(T)[None].repeat(2, 0)
    keys = np.arange(S)[None].repeat(2, 0)
    no_row = rows < 0
    dead_rows = [2, 20]
    dead_keys = [1, 16, 29, 30, 52]
    is_dead_row = np.isin(rows, dead_rows)
    is_dead_key = np.isin(keys, dead_keys)
    bias = np.random.default_rng(1).standard_normal((2, 6, T, S)).astype(f32)
    bias_that_hides = bias.copy()
    bias_that_hides[..., dead_keys] = -np.inf
    bias_that_hides[:, :, dead_rows, :] = np.finfo(f32).min
    mask = np.ones((2, 1, T, S), bool)
    mask[..., dead_keys] = False
    mask[:, :, dead_rows, :] = False
    lengths = {
        "query_seq_lengths": np.array([20, 35]),
        "key_value_seq_lengths": np.array([30, 17]),
    }
    segments = {
        "query_segment_ids": np.where(rows < 30, rows // 9, -1),
        "key_value_segment_ids": np.where(keys < 40, keys // 11, -2),
    }
    window = {"local_window_size": (3, 2), "q_offset": 10}
    offset = {"is_causal": True, "q_offset": np.array([-4, 3])}
    return {
        "lengths": Hidden(
            lengths | {"bias": bias},
            rows >= np.array([[20], [35]]),
            keys >= np.array([[30], [17]]),
        ),
        "mask": Hidden({"mask": mask, "bias": bias}, is_dead_row, is_dead_key),
        "bias": Hidden({"bias": bias_that_hides}, is_dead_row, is_dead_key),
        "segments": Hidden(segments, rows >= 30, keys >= 44),
        "causal": Hidden({"is_causal": True}, no_row, keys >= T),
        "window": Hidden(window, no_row, (keys < 7) | (keys > 48)),
        "offset": Hidden(offset, rows + [[-4], [3]] < 0, keys > [[32], [39]]),
    }


HIDDEN = _hidden_calls()
FAST_HIDDEN = [("xla", name) for name in HIDDEN if name != "causal"]
FAST_HIDDEN += [("reference", "mask")]


def _fill(x, where, garbage):
    """Return x [B, T or S, ...] with garbage at the positions where `where` [B, T or S] is True."""
    where = where.reshape(*where.shape, *(1,) * (x.ndim - 2))
    return np.where(where, garbage, x).astype(x.dtype)


def _run_filled(hidden: Hidden, kwargs, garbage):
    """Run the call with garbage in all that is hidden, cotangents too."""
    kwargs = dict(kwargs)
    if "mask" in kwargs:  # a bias is hidden where the mask hides
        kwargs["bias"] = np.where(kwargs["mask"], kwargs["bias"], f32(garbage))
    args, _ = CASES["plain"].inputs()
    query, key, value = args
    dout, dlse = cotangents(args)
    return run_call(
        (
            _fill(query, hidden.rows, garbage),
            _fill(key, hidden.keys, garbage),
            _fill(value, hidden.keys, garbage),
        ),
        kwargs,
        cotangent=(_fill(dout, hidden.rows, garbage), _fill(dlse, hidden.rows, garbage)),
    )


@pytest.mark.parametrize(
    "implementation, name", few(itertools.product(IMPLEMENTATIONS, HIDDEN), FAST_HIDDEN)
)
def test_hidden_garbage_changes_no_bit(name, implementation):
    hidden = HIDDEN[name]
    kwargs = hidden.kwargs | {
        "implementation": implementation,
        "chunk_size": (16, 24),
        "logits_soft_cap": np.array(5.0, np.float32),
    }
    clean = _run_filled(hidden, kwargs, 0)
    assert np.all(clean.out[hidden.rows] == 0)
    assert np.all(clean.lse[hidden.rows] == -np.inf)
    assert all(np.isfinite(x).all() for x in clean.grads.values())
    assert np.all(clean.grads["query"][hidden.rows] == 0)
    assert np.all(clean.grads["key"][hidden.keys] == 0)
    assert np.all(clean.grads["value"][hidden.keys] == 0)
    for garbage in GARBAGE:
        dirty = _run_filled(hidden, kwargs, garbage)
        for what, x, y in _leaves(clean, dirty):
            np.testing.assert_array_equal(y, x, err_msg=f"{garbage} changed {what}")


@pytest.mark.parametrize("implementation", few(IMPLEMENTATIONS, ["xla"]))
def test_hidden_nan_reaches_no_params_of_a_transform(implementation):
    """NaN in hidden queries and keys changes no first or second gradient of the params."""
    (query, key, value), _ = CASES["plain"].inputs()
    kwargs = SEEN["lengths"] | {"implementation": implementation, "chunk_size": (16, 24)}
    scale = np.linspace(0.5, 1.5, query.shape[-1], dtype=f32)

    def loss(scale, query, key):
        out = dot_product_attention(
            query,
            key,
            value,
            qk_transform=lambda x, position, which, scale: x * jnp.sin(scale * position),
            qk_transform_params=scale,
            **kwargs,
        )
        return (out**2).sum()

    @jax.jit
    def gradients(scale, query, key):
        first, pull = jax.vjp(jax.grad(loss), scale, query, key)
        return first, pull(scale)

    clean = gradients(scale, query, key)
    for b in range(2):
        query[b, kwargs["query_seq_lengths"][b] :] = np.nan
        key[b, kwargs["key_value_seq_lengths"][b] :] = np.nan
    dirty = gradients(scale, query, key)
    assert_bits(dirty, clean)


# ---- what somebody sees, reaches who sees it

EIGHTS = np.tile(np.arange(64) // 8, (2, 1))  # segments of eight tokens
SEEN = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (6, 3)},
    "mask": {"mask": np.random.default_rng(2).random((2, 6, T, S)) < 0.5},
    "segments": {"query_segment_ids": EIGHTS[:, :T], "key_value_segment_ids": EIGHTS[:, :S]},
    "lengths": {
        "query_seq_lengths": np.array([20, 37]),
        "key_value_seq_lengths": np.array([53, 27]),
    },
}

# The quadratic definition has no tiles to skip, so two kinds are enough: by position, by element.
FAST_SEEN = [("xla", name) for name in SEEN]
FAST_SEEN += [("reference", "window"), ("reference", "mask")]
EACH_SEEN = list(itertools.product(IMPLEMENTATIONS, SEEN))


# The next test covers the same kinds, with gradients.
@pytest.mark.parametrize(
    "implementation, name", few(EACH_SEEN, [("xla", "mask"), ("reference", "window")])
)
def test_nan_reaches_exactly_the_rows_that_see_it(name, implementation):
    kwargs = SEEN[name] | {"implementation": implementation, "chunk_size": (16, 24)}
    args, _ = CASES["plain"].inputs()
    query, key, value = args
    j = 25
    seen = oracle.seen_by(query, key, **SEEN[name])  # b n t s
    for what in ("key", "value", "both"):
        dirty_key = key.copy()
        dirty_value = value.copy()
        if what != "value":
            dirty_key[0, j, 1] = np.nan  # read by heads 2 and 3
        if what != "key":
            dirty_value[0, j, 1, 4] = np.nan
        out = dot_product_attention(query, dirty_key, dirty_value, **kwargs)
        is_nan = np.isnan(np.asarray(out))
        rows = is_nan.any(-1)  # b t n
        expected = np.zeros_like(rows)
        expected[0, :, 2:4] = seen[0, 2:4, :, j].T
        np.testing.assert_array_equal(rows, expected, err_msg=what)
        if what == "key":  # NaN in every element of a row
            assert rows.sum() * 11 == is_nan.sum()


@pytest.mark.parametrize("implementation, name", few(EACH_SEEN, FAST_SEEN))
def test_nan_in_each_operand_reaches_what_sees_it(name, implementation):
    """NaN reaches the rows that see it, the keys that such a row sees, and nothing else.

    This holds in out, lse and every gradient.
    """
    kwargs = SEEN[name] | {"implementation": implementation, "chunk_size": (16, 24)}
    (query, key, value), _ = CASES["plain"].inputs()
    seen = oracle.seen_by(query, key, **SEEN[name])  # b n t s
    B, N, T, S = seen.shape
    clean = {
        "query": query,
        "key": key,
        "value": value,
        "bias": np.zeros((B, N, T, S), f32),
        "sinks": np.zeros(N, f32),
    }
    i = 19
    j = 16
    n = 3
    k = 1
    places = {  # of the NaN in each operand
        "query": (0, i, n, 2),
        "key": (0, j, k, 1),
        "value": (0, j, k, 4),
        "bias": (0, n, i, j),
        "sinks": n,
    }
    group = slice(2 * k, 2 * k + 2)
    rows = {what: np.zeros((B, N, T), bool) for what in clean}  # where out is NaN
    rows["query"][0, n, i] = seen[0, n, i].any()
    rows["key"][0, group] = seen[0, group, :, j]
    rows["value"][0, group] = seen[0, group, :, j]
    rows["bias"][0, n, i] = seen[0, n, i, j]
    rows["sinks"][:, n] = seen[:, n].any(-1)
    for what, place in places.items():
        dirty = {name: x.copy() for name, x in clean.items()}
        dirty[what][place] = np.nan
        args = tuple(dirty.pop(name) for name in ("query", "key", "value"))
        result = run_call(args, kwargs | dirty)
        actual = {"out": result.out, "lse": result.lse, **result.grads}
        expected = _expected_nan(what, rows[what], seen)
        for name, x in actual.items():
            is_nan = np.isnan(x)
            if is_nan.ndim > expected[name].ndim:
                is_nan = is_nan.any(-1)
            np.testing.assert_array_equal(is_nan, expected[name], err_msg=f"NaN in {what}: {name}")


def _expected_nan(what: str, rows: np.ndarray, seen: np.ndarray) -> dict[str, np.ndarray]:
    """Return where NaN is, without dims of features, if NaN in `what` makes `rows` of out NaN.

    `rows` is [B, N, T], `seen` [B, N, T, S].
    """
    B, N, _, S = seen.shape
    pairs = rows[..., None] & seen  # b n t s
    keys = pairs.any(2).reshape(B, N // 2, 2, S)  # b k g s
    keys = keys.any(2).swapaxes(1, 2)  # b s k
    rows = rows.swapaxes(1, 2)  # b t n
    return {
        "out": rows,
        "lse": np.zeros_like(rows) if what in ("value", "sinks") else rows,
        "query": rows,
        "key": keys,
        "value": np.zeros_like(keys) if what == "value" else keys,
        "bias": pairs,
        "sinks": rows.any((0, 1)),
    }


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_product_that_overflows_to_minus_infinity_takes_nothing(implementation):
    """The other keys share the probability, although query and keys are finite."""
    query = np.full((1, 1, 1, 2), 2e38, f32)
    key = np.array([-0.5, -1.5, -0.5], f32).reshape(1, 3, 1, 1) * np.ones(2, f32)
    value = np.array([1, 5, 2], f32).reshape(1, 3, 1, 1)

    def attend(value):
        return dot_product_attention(query, key, value, scale=0.5, implementation=implementation)

    out, pull = jax.vjp(attend, value)
    assert out.item() == 1.5
    np.testing.assert_array_equal(pull(out)[0].ravel(), [0.75, 0, 0.75])


def _jvp(f, primals, tangents):
    return jax.jit(lambda x, dx: jax.jvp(f, x, dx))(primals, tangents)


def _linearize(f, primals, tangents):
    results, tangent = jax.linearize(f, *primals)
    return results, tangent(*tangents)


@pytest.mark.parametrize(
    "name, forward_mode",
    few(
        itertools.product(["causal", "mask"], [_jvp, _linearize]),
        [("causal", _linearize), ("mask", _jvp)],
    ),
)
def test_forward_mode_sees_nan_and_infinite_logits(name, forward_mode):
    """A visible NaN stays in forward mode, and a logit of -inf hides the pair from tangents."""
    (query, key, value), _ = CASES["plain"].inputs()
    tangents = tuple(np.random.default_rng(3).standard_normal(x.shape, f32) for x in (query, key))
    query[..., 1] = abs(query[..., 1])
    j = 16

    def run(x, **kwargs):
        def f(query, key):
            return dot_product_attention(
                query, key, value, return_residual=True, chunk_size=(16, 24), **kwargs
            )

        results = forward_mode(f, (query, x), tangents)
        return [np.asarray(y) for y in jax.tree.leaves(results)]  # out, lse, and their tangents

    seen = oracle.seen_by(query, key, **SEEN[name])  # b n t s
    dirty = key.copy()
    dirty[:, j, :, 1] = np.nan
    sees = seen[..., j].swapaxes(1, 2)  # b t n
    for x in run(dirty, **SEEN[name]):
        is_nan = np.isnan(x) if x.ndim == 3 else np.isnan(x).all(-1)
        np.testing.assert_array_equal(is_nan, sees)
    dirty[:, j, :, 1] = -np.inf
    seen[..., j] = False
    assert_close(run(dirty, **SEEN[name]), run(key, mask=seen), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_entry_that_is_nan_has_a_gradient_of_its_own(implementation):
    """A visible NaN in query or key has the gradient NaN; in value it has that of any number."""
    clean, _ = CASES["plain"].inputs()
    kwargs = SEEN["window"] | {"implementation": implementation, "chunk_size": (16, 24)}
    expected = run_call(clean, kwargs).grads["value"]
    for what, name in enumerate(("query", "key", "value")):
        args = [x.copy() for x in clean]
        args[what][0, 19, 1, 2] = np.nan
        gradient = run_call(tuple(args), kwargs).grads[name]
        if name == "value":
            np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)
        else:
            assert np.isnan(gradient[0, 19, 1]).all()


# ---- causality, in bits

CAUSAL = (
    "square_causal",
    "causal&window&soft_cap&segments",
    "scale_array&causal&key_lengths&sinks",
    "scale_array&causal&query_lengths&dropout_each",
    "bias_row&mask_dense&scale_array&causal",
    "q_offset",
    "everything",
)


@pytest.mark.parametrize("name", few(CAUSAL, CAUSAL[2::2]))
def test_causality_in_bits(name):
    """Results of the queries before t do not depend on the keys at t and after."""
    args, kwargs = CASES[name].inputs()
    query, key, value = args
    t = 17
    offset = np.reshape(kwargs.get("q_offset", 0), (-1, 1))
    future = np.arange(key.shape[1]) >= t + offset
    future = np.broadcast_to(future, key.shape[:2])  # b s
    dout, dlse = cotangents(args)
    dout[:, t:] = 0  # a loss on out[:t] and lse[:t] alone
    dlse[:, t:] = 0
    rng = np.random.default_rng(3)

    def with_another_future(x):
        drawn = rng.standard_normal(x.shape) * 7
        return np.where(future[..., None, None], drawn, x).astype(f32)

    def run():
        changed = query, with_another_future(key), with_another_future(value)
        return run_call(changed, kwargs, cotangent=(dout, dlse))

    first = run()
    second = run()
    np.testing.assert_array_equal(first.out[:, :t], second.out[:, :t])
    np.testing.assert_array_equal(first.lse[:, :t], second.lse[:, :t])
    np.testing.assert_array_equal(first.grads["query"][:, :t], second.grads["query"][:, :t])
    assert np.all(first.grads["key"][future] == 0)
    assert np.all(first.grads["value"][future] == 0)
    assert np.any(first.grads["key"][~future] != 0)
    assert future.any()
