"""`memeff.replace_attention` where biases or scores are as low as hidden logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from replaced_checks import find, qkv_of_one_head, replace, result_and_gradients, run_replaced
from small_calls import assert_close


def test_a_number_between_two_masks_counts_in_rows_that_see_no_key():
    """A row that sees no key attends to the keys that only the inner mask hides."""

    def attend(q, k, v, length):
        s = jnp.where(jnp.arange(len(k)) < length, q @ k.T, -1e9) + 1000
        visible = jnp.arange(len(q))[:, None] >= jnp.arange(len(k))
        return jax.nn.softmax(jnp.where(visible, s, -1e9)) @ v

    arrays = qkv_of_one_head()
    run_both = jax.jit(lambda *x: (replace(attend, strict=True)(*x), attend(*x)))
    for length in (0, 3):
        out, expected = run_both(*arrays, jnp.int32(length))
        np.testing.assert_allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize("sink", [False, True])
def test_infinite_scores_of_whole_rows(sink):
    """Such a row is NaN, and 0 beside a sink."""

    def attend(q, k, v, temperature):
        s = jnp.where(jnp.arange(len(q))[:, None] > jnp.arange(len(k)), q @ k.T, -jnp.inf)
        s = jnp.pad(s / temperature, ((0, 0), (1, 0)))
        return (jax.nn.softmax(s)[:, 1:] if sink else jax.nn.softmax(s[:, 1:])) @ v

    arrays = *qkv_of_one_head(), jnp.float32(1.3)
    expected = jax.jit(attend)(*arrays)
    assert jnp.isnan(expected[0]).all() != sink
    np.testing.assert_allclose(jax.jit(replace(attend))(*arrays), expected, atol=1e-6)


def mask_replaces(s, visible, low):
    return jnp.where(visible, s, low)


def mask_is_added(s, visible, low):
    return s + jnp.where(visible, 0, low)


@pytest.mark.parametrize(
    "low", few([-1e9, -1e30, float(np.finfo(np.float32).min)], [-1e9, float(np.finfo("f").min)])
)
@pytest.mark.parametrize("hide", [mask_replaces, mask_is_added])
def test_a_temperature_of_masked_logits(hide, low):
    """The logits of a row that sees no key are products, whose rounding exceeds other logits."""

    def attend(q, k, v, temperature, visible):
        return jax.nn.softmax(hide(q @ k.T, visible, low) / temperature) @ v

    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(16, 4)).astype(np.float32) for _ in range(3)]
    visible = np.ones((16, 16), bool)
    visible[3] = False
    dout = rng.normal(size=(16, 4)).astype(np.float32)

    def call(f):
        def both(temperature):
            out, pull = jax.vjp(lambda *x: f(*x, temperature, visible), *arrays)
            return [out, *pull(dout)]

        return jax.jit(both)(jnp.float32(1.3))

    assert_close(call(replace(attend, strict=True)), call(attend), rtol=0, atol=1e-5)


def test_a_mask_added_in_16_bits_leaves_the_logits_of_rows_that_see_no_key():
    """The program rounds such logits to the mask's number, and gives the mean of the values."""
    q, k, v = qkv_of_one_head(dtype="bfloat16")

    def attend(q, k, v, hidden):
        return jax.nn.softmax(q @ k.T + hidden * jnp.asarray(-1e4, q.dtype)) @ v

    out = run_replaced(attend, q, k, v, jnp.ones((1, len(k)), q.dtype)).astype(jnp.float32)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    np.testing.assert_allclose(out, jax.nn.softmax(q @ k.T) @ v, atol=0.02)


def bias_within(s, bias, visible):
    return jnp.where(visible, s + bias, -1e9)


def bias_outside(s, bias, visible):
    return jnp.where(visible, s, -1e9) + bias


def infinity_outside(s, bias, visible):
    return jnp.where(visible, s + bias, -jnp.inf)


def score_within(s, bias, visible):
    return jnp.where(visible, jnp.where(bias < 0, -jnp.inf, s) * jnp.cosh(bias[0]), -1e9)


SLOW_HIDDEN_TWICE = [
    (bias_outside, False),
    (infinity_outside, False),
    (bias_outside, True),
    (infinity_outside, True),
    (score_within, True),
]
HIDDEN_TWICE = [
    (bias_within, False),
    (bias_within, True),
    (score_within, False),
    *[pytest.param(*x, marks=pytest.mark.slow) for x in SLOW_HIDDEN_TWICE],
]


@pytest.mark.parametrize("logits,of_pairs", HIDDEN_TWICE)
def test_a_bias_may_hide_keys_below_those_that_a_mask_hides(logits, of_pairs):
    """Padding on the left is added to the logits, and causal order replaces them."""

    def attend(q, k, v, bias):
        s = q @ k.T
        visible = jnp.tril(jnp.ones(s.shape, bool))
        return jax.nn.softmax(logits(s, bias, visible)) @ v

    def with_gradients(f):
        loss = lambda *arrays: ((jnp.sin(f(*arrays)) * jnp.arange(4)).sum(), f(*arrays))
        return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))

    arrays = qkv_of_one_head()
    T = len(arrays[0])
    run = with_gradients(attend)
    run_replaced = with_gradients(replace(attend, strict=True))
    for low in (-jnp.inf, float(jnp.finfo(jnp.float32).min), -1e9, -1e4, 0.0):
        bias = np.where(np.arange(T) < 3, np.float32(low), np.float32(0))
        if of_pairs:
            bias = np.where(np.arange(T)[:, None] % 5, bias, np.float32(0.1))
        expected, out = run(*arrays, bias)
        gradients, replaced_out = run_replaced(*arrays, bias)
        np.testing.assert_allclose(replaced_out, out, atol=1e-6, err_msg=f"{low}")
        for x, y in zip(gradients, expected, strict=True):
            is_finite = np.isfinite(y)
            np.testing.assert_allclose(x[is_finite], y[is_finite], atol=1e-5, err_msg=f"{low}")


def keys_added(s, pairs, keys, low):
    return s + pairs + keys


def keys_of_bools(s, pairs, keys, low):
    return s + jnp.where(pairs < 0, low, 0) + jnp.where(keys < 0, low, 0)


def causal_replaced(s, pairs, keys, low):
    return jnp.where(jnp.tril(jnp.ones(s.shape, bool)), s, low) + pairs


@pytest.mark.parametrize(
    "logits", few([keys_added, keys_of_bools, causal_replaced], [keys_of_bools, causal_replaced])
)
def test_two_masks_of_the_lowest_number_beside_each_other(logits):
    """In a row that sees no key, keys that either mask hides have equal logits."""

    def attend(q, k, v, pairs, keys, low):
        return jax.nn.softmax(logits(q @ k.T, pairs, keys, low)) @ v

    with jax.enable_x64(True):
        arrays = qkv_of_one_head(dtype="float64")
        T = len(arrays[0])
        for share in (1, 0.7):  # programs also write 0.7 of the lowest number
            low = share * float(jnp.finfo(jnp.float64).min)
            pairs = np.where((np.arange(T)[:, None] + np.arange(T)) % 3 == 1, 0.0, low)
            keys = np.where(np.arange(T) % 3 == 0, 0.0, low)
            run = functools.partial(attend, low=low)
            before = result_and_gradients(run, (*arrays, pairs, keys))
            after = result_and_gradients(replace(run, strict=True), (*arrays, pairs, keys))
            assert_close(after, before, atol=1e-12)


def test_a_bias_within_a_mask_before_zeros_is_left():
    def attend(q, k, v, bias):
        s = q @ k.T
        visible = jnp.tril(jnp.ones(s.shape, bool))
        p = jax.nn.softmax(jnp.where(visible, s + bias, -1e9))
        return jnp.where(visible, p, 0) @ v

    arrays = qkv_of_one_head()
    bias = jnp.zeros(len(arrays[0]))
    assert "may be as low as the mask" in find(attend, *arrays, bias).left[0].reason


@pytest.mark.parametrize("zeros", [False, True])
def test_a_bias_beside_the_logarithm_of_the_sum_is_left(zeros):
    def attend(q, k, v, bias):
        s = q @ k.T + bias
        visible = jnp.tril(jnp.ones(s.shape, bool))
        if zeros:
            s = jnp.where(visible, s, -jnp.inf)
        p = jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True))
        return jnp.where(visible, p, 0) @ v if zeros else p @ v

    arrays = qkv_of_one_head()
    bias = jnp.zeros(len(arrays[0]))
    assert "loses the logarithm" in find(attend, *arrays, bias).left[0].reason
