"""`memeff.replace_attention` keeps the meaning of rows that see no key: 0, NaN or a mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replaced_checks import assert_replaced, find, qkv_of_one_head, replace, run_replaced


def zeros_among_exponentials(s, visible):
    e = jnp.where(visible, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    return e / e.sum(-1, keepdims=True)


def zeros_before_and_after(s, visible):
    return jnp.where(visible, zeros_among_exponentials(s, visible), 0)


def zeros_after_infinity(s, visible):
    return jnp.where(visible, jax.nn.softmax(jnp.where(visible, s, -jnp.inf)), 0)


def zeros_of_jax(s, visible):
    return jax.nn.softmax(s, where=jnp.broadcast_to(visible, s.shape))


def weigh(probabilities, s, visible, v):
    return probabilities(s, visible) @ v


def zeros_before_the_division(s, visible, v):
    s = jnp.where(visible, s, -jnp.inf)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (jnp.where(visible, e, 0) @ v) / e.sum(-1, keepdims=True)


def zeros_before_the_division_of_numbers(s, visible, v):
    e = jnp.exp(jnp.where(visible, s, -jnp.inf))
    return (jnp.where(visible, e, 0) @ v) / e.sum(-1, keepdims=True)


def zeros_in_product_and_sum(s, visible, v):
    e = jnp.where(visible, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    return (e @ v) / e.sum(-1, keepdims=True)


# a program: what it gives in rows that see no key
ZEROS = {
    functools.partial(weigh, zeros_among_exponentials): np.nan,
    functools.partial(weigh, zeros_before_and_after): 0,
    functools.partial(weigh, zeros_after_infinity): 0,
    functools.partial(weigh, zeros_of_jax): 0,
    zeros_before_the_division: np.nan,
    zeros_before_the_division_of_numbers: np.nan,
    zeros_in_product_and_sum: np.nan,
}


@pytest.mark.parametrize("average", ZEROS)
def test_rows_of_zeros_are_zero_or_nan_as_in_the_program(average):
    """0 / 0 is NaN, and a selection after it makes it 0."""

    def attend(q, k, v, length):
        return average(q @ k.T, jnp.arange(len(k)) < length, v)

    run_both = jax.jit(lambda *x: (replace(attend, strict=True)(*x), attend(*x)))
    for length in (0, 5):
        out, expected = run_both(*qkv_of_one_head(), jnp.int32(length))
        if not length:
            np.testing.assert_array_equal(expected, ZEROS[average])
        np.testing.assert_allclose(out, expected, atol=1e-6)


# Probabilities in which rows are set to 0, in every order among other factors. `sees` is true for
# rows that see a key, and each of the first two is all that makes 0 of NaN.
ROWS_SET_TO_ZERO = (
    lambda p, sees, rows, count: jnp.where(sees, p, 0),
    lambda p, sees, rows, count: jnp.where(~sees, 0, p / count),
    lambda p, sees, rows, count: jnp.where(rows, jnp.nan_to_num(p), 0),
    lambda p, sees, rows, count: jnp.nan_to_num(jnp.where(rows, p, 0)),
    lambda p, sees, rows, count: jnp.where(rows, jnp.where(sees, p, 0) * 2, 0),
    lambda p, sees, rows, count: jnp.where(sees, p, 0) - jnp.where(rows, p, 0) / 2,
    lambda p, sees, rows, count: jnp.where(sees, p, 0) / count,  # 0 / 0 is NaN
)


@pytest.mark.parametrize("low", [-np.inf, -1e9])
def test_rows_are_set_to_zero_by_selections_after_the_softmax(low):
    visible = np.random.default_rng(3).random((16, 16)) < 0.5
    visible[2] = False

    def attend(q, k, v, visible):
        sees = visible.any(-1, keepdims=True)
        rows = jnp.arange(len(q))[:, None] % 3 > 0
        count = visible.sum(-1, keepdims=True)
        results = []
        for change in ROWS_SET_TO_ZERO:
            p = jax.nn.softmax(jnp.where(visible, q @ k.T, low))
            results.append(change(p, sees, rows, count) @ v)
        return jnp.stack(results)

    arrays = *qkv_of_one_head(), jnp.asarray(visible)
    assert not find(attend, *arrays).left
    out = assert_replaced(attend, *arrays, atol=2e-6)
    assert not out[:2, 2].any() and jnp.isnan(out[-1, 2]).all()


def finite_maximum(s):
    highest = s.max(-1, keepdims=True)
    return jnp.where(jnp.isneginf(highest), 0, highest)


def exponentials(s, highest):
    e = jnp.exp(s - highest)
    return e, e.sum(-1, keepdims=True)


def quotient_where_the_sum_is_not_0(s):
    e, total = exponentials(s, finite_maximum(s))
    return jnp.where(total == 0, 0, e / total)


def quotient_by_a_guarded_sum(s, guard=lambda total: jnp.where(total > 0, total, 1)):
    e, total = exponentials(s, finite_maximum(s))
    return e / guard(total)


def guarded_sum_of_nan(s):
    """Subtract -inf from -inf, so that the sum is NaN and not 0."""
    e, total = exponentials(s, s.max(-1, keepdims=True))
    return e / jnp.where(total == 0, 1, total)


# Probabilities of rows whose logits are all -inf are 0, as the logits or their sum tell.
EMPTY_ROWS_BY_LOGITS = (
    lambda s: jnp.where(~jnp.any(~(s == -jnp.inf), -1, keepdims=True), 0, jax.nn.softmax(s)),
    lambda s: jnp.where(jnp.isinf(s).all(-1, keepdims=True), 0, jax.nn.softmax(s) * 2),
    lambda s: jnp.where(s.max(-1, keepdims=True) > -jnp.inf, jax.nn.softmax(s), 0),
    lambda s: jnp.where(jnp.isneginf(s.max(-1, keepdims=True)), 0, jax.nn.softmax(s)) / 3,
    quotient_where_the_sum_is_not_0,
    quotient_by_a_guarded_sum,
    functools.partial(quotient_by_a_guarded_sum, guard=lambda total: jnp.maximum(total, 1e-9)),
    guarded_sum_of_nan,
)


@pytest.mark.parametrize("low", [-np.inf, -1e9])
def test_rows_are_empty_as_the_logits_tell(low):
    visible = np.random.default_rng(3).random((16, 16)) < 0.5
    visible[2] = False

    def attend(q, k, v, visible, bias):
        def logits():
            return jnp.where(visible, q @ k.T + bias, low)

        s = logits()
        e, total = exponentials(s, finite_maximum(s))
        late = e @ v / jnp.where(total == 0, 1, total)
        return jnp.stack([late, *(weigh(logits()) @ v for weigh in EMPTY_ROWS_BY_LOGITS)])

    arrays = *qkv_of_one_head(), jnp.asarray(visible), jnp.zeros(16).at[3].set(-jnp.inf)
    assert not find(attend, *arrays).left
    out = assert_replaced(attend, *arrays, atol=2e-6)
    if low == -np.inf:
        assert not out[:-1, 2].any() and jnp.isnan(out[-1, 2]).all()
    else:
        np.testing.assert_allclose(out[0, 2], arrays[2].mean(0), atol=1e-6)


def test_rows_that_are_empty_as_the_logits_tell_are_checked():
    visible = jnp.tril(jnp.ones((16, 16), bool), -1)

    def attend(q, k, v):
        return quotient_by_a_guarded_sum(jnp.where(visible, q @ k.T, -jnp.inf)) @ v

    out = replace(attend, check=True)(*qkv_of_one_head())
    assert not out[0].any() and not jnp.isnan(out).any()


def test_a_row_of_nan_is_0_where_a_test_of_its_logits_is_false_for_nan():
    def zero(s):
        return jnp.where(s.max(-1, keepdims=True) > -jnp.inf, jax.nn.softmax(s), 0)

    def nan(s):
        return jnp.where(s.max(-1, keepdims=True) == -jnp.inf, 0, jax.nn.softmax(s))

    def attend(q, k, v):
        return jnp.stack([zero(q @ k.T) @ v, nan(q @ k.T) @ v])

    q, k, v = qkv_of_one_head()
    q = q.at[3].set(jnp.nan)
    out = assert_replaced(attend, q, k, v)
    assert not out[0, 3].any() and jnp.isnan(out[1, 3]).all()


def no_maximum(s):
    e, total = exponentials(s, 0.0)
    return e / jnp.where(total == 0, 1, total)


def maximum_of_all_rows(s):
    e, total = exponentials(s, finite_maximum(s).max())
    return e / jnp.maximum(total, 1e-3)


def clamped_maximum(s):
    e, total = exponentials(s, jnp.maximum(s.max(-1, keepdims=True), -1e20))
    return jnp.where(total > 0, e / total, 0)


def sum_of_visible_keys(s):
    visible = jnp.tril(jnp.ones(s.shape, bool))
    e = jnp.where(visible, jnp.exp(s - finite_maximum(s)), 0)
    return e / jnp.maximum(e.sum(-1, keepdims=True), 1e-9)


GUARDED = "perhaps not only in rows that see no key"
USED = "the logits or probabilities are used by"
OTHER_TESTS_OF_LOGITS = (
    (no_maximum, GUARDED),
    (maximum_of_all_rows, GUARDED),
    (clamped_maximum, GUARDED),
    (sum_of_visible_keys, GUARDED),
    (lambda s: jnp.where((s == -jnp.inf).all(-1, keepdims=True), jax.nn.softmax(s), 0), USED),
    (lambda s: jnp.where((s > -5).any(-1, keepdims=True), jax.nn.softmax(s), 0), USED),
    (lambda s: jnp.where((s > -jnp.inf).all(-1, keepdims=True), jax.nn.softmax(s), 0), USED),
    (lambda s: jnp.where(jnp.isfinite(s).any(-1, keepdims=True), jax.nn.softmax(s), 0), USED),
    (lambda s: jnp.where((s == -jnp.inf).all(0)[:, None], 0, jax.nn.softmax(s)), USED),
)


def test_other_tests_of_logits_are_left():
    for weigh, reason in OTHER_TESTS_OF_LOGITS:
        left = find(lambda q, k, v: weigh(q @ k.T) @ v, *qkv_of_one_head()).left  # noqa: B023
        assert len(left) == 1 and reason in left[0].reason


def zeros_by_selection(p, visible):
    return jnp.where(visible, p, 0)


def zeros_by_multiplication(p, visible):
    return p * visible


@pytest.mark.parametrize("zeros", [zeros_by_selection, zeros_by_multiplication])
@pytest.mark.parametrize("bias", [-1e4, 0.5])
def test_rows_of_zeros_beside_a_small_bias_are_zero(zeros, bias):
    def attend(q, k, v, length):
        columns = jnp.arange(len(k))
        visible = columns < length
        s = q @ k.T + jnp.where(columns % 3 == 0, bias, 0)
        return zeros(jax.nn.softmax(jnp.where(visible, s, -1e9)), visible) @ v

    arrays = qkv_of_one_head()
    run_both = jax.jit(lambda *x: (replace(attend, strict=True)(*x), attend(*x)))
    for length in (0, 5):
        out, expected = run_both(*arrays, jnp.int32(length))
        np.testing.assert_allclose(out, expected, atol=1e-6)


@pytest.mark.parametrize("low", [-1e9, -np.inf])
def test_rows_of_nan_are_zero_where_the_program_makes_0_of_nan(low):
    def attend(q, k, v):
        logits = jnp.where(jnp.arange(len(k)) < 5, q @ k.T, low)
        return jnp.nan_to_num(jax.nn.softmax(logits)) @ v

    q, k, v = qkv_of_one_head()
    q = q.at[3].set(jnp.nan)
    out = run_replaced(attend, q, k, v)
    assert not out[3].any()
    np.testing.assert_allclose(out, jax.jit(attend)(q, k, v), atol=1e-6)


def test_zeros_by_multiplication_after_nan_are_left():
    """XLA may make a selection of NaN * 0, so the program itself gives NaN or 0."""

    def attend(q, k, v, length):
        visible = jnp.arange(len(k)) < length
        return (zeros_among_exponentials(q @ k.T, visible) * visible) @ v

    arrays = qkv_of_one_head()
    (place,) = find(attend, *arrays, jnp.int32(3)).left
    assert (
        "masks before and after the softmax give different results to rows that see no key"
        in str(place)
    )


def test_a_bias_where_no_exponential_is_left_is_0():
    def attend(q, k, v, bias):
        s = q @ k.T + bias
        e = jnp.exp(s - s.max(-1, keepdims=True)) * jnp.tril(jnp.ones(s.shape))
        return jnp.nan_to_num(e / e.sum(-1, keepdims=True)) @ v

    arrays = qkv_of_one_head()
    padding = jnp.zeros(len(arrays[0])).at[:2].set(-1e30)
    np.testing.assert_array_equal(jax.jit(replace(attend))(*arrays, padding)[:2], 0)
    assert "no exponential is left" in find(attend, *arrays, padding).left[0].reason
