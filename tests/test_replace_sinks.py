"""`memeff.replace_attention` with sinks: columns beside the logits, numbers added to the sum."""

import jax
import jax.numpy as jnp
import pytest
from replaced_checks import assert_replaced, find, qkv_of_one_head, replace, result_and_gradients
from small_calls import assert_close


def test_sinks_of_other_bases():
    """exp2 of logits and of their sink, in a column and in a sum, and 2 in a sum."""

    def joined(q, k, v, sink):
        s = jnp.concatenate([q @ k.T, jnp.broadcast_to(sink, (len(q), 1))], -1)
        e = jnp.exp2(s - s.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True))[:, :-1] @ v

    def added(q, k, v, sink):
        s = q @ k.T
        highest = jnp.maximum(s.max(-1, keepdims=True), sink)
        e = jnp.exp2(s - highest)
        return (e / (e.sum(-1, keepdims=True) + jnp.exp2(sink - highest))) @ v

    def number(q, k, v, sink):
        e = jnp.exp2(q @ k.T)
        return (e / (2 + e.sum(-1, keepdims=True))) @ v

    arrays = [*qkv_of_one_head(), jnp.float32(1.5)]
    for attend in (joined, added, number):
        assert_replaced(attend, *arrays)


def column_dropped_before_the_product(s, v, sink):
    """As MaxText does: the division follows the product."""
    s = jnp.concatenate([s, jnp.broadcast_to(sink, (len(s), 1))], -1)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e[:, :-1] @ v / e.sum(-1, keepdims=True)


def column_of_log_softmax(s, v, sink):
    s = jnp.concatenate([jnp.broadcast_to(sink, (len(s), 1)), s], -1)
    return jnp.exp(jax.nn.log_softmax(s))[:, 1:] @ v


def added_after_the_product(s, v, sink):
    highest = jnp.maximum(s.max(-1, keepdims=True), sink)
    e = jnp.exp(s - highest)
    return e @ v / (e.sum(-1, keepdims=True) + jnp.exp(sink - highest))


def one_added_after_the_product(s, v, sink):
    e = jnp.exp(s)
    return e @ v * (1 / (1 + e.sum(-1, keepdims=True))) * sink


SINKS_AND_DIVISIONS = (
    column_dropped_before_the_product,
    column_of_log_softmax,
    added_after_the_product,
    one_added_after_the_product,
)


@pytest.mark.parametrize("average", SINKS_AND_DIVISIONS)
def test_a_sink_beside_exponentials_that_no_sum_divides_before_the_product(average):
    def attend(q, k, v, sink):
        visible = jnp.arange(len(k)) > jnp.arange(len(q))[:, None]  # not one in the last row
        return average(jnp.where(visible, q @ k.T, -1e9), v, sink)

    arrays = [*qkv_of_one_head(), jnp.float32(0.5)]
    (place,) = find(attend, *arrays).places
    assert "sinks" in place.found
    actual = result_and_gradients(replace(attend, strict=True), arrays)
    expected = result_and_gradients(attend, arrays)
    assert_close(actual, expected, atol=1e-5)


def sum_without_the_column(e):
    return e[:, :-1].sum(-1, keepdims=True)


def sum_of_half_the_column(e):
    return e.sum(-1, keepdims=True) - e[:, -1:] / 2


@pytest.mark.parametrize("is_everywhere", [True, False])
def test_a_maximum_that_is_rounded_in_one_place_alone_is_left(is_everywhere):
    """exp makes a factor of the rounding, which the softmax and its sink or its sum must share."""

    def attend(q, k, v, z):
        def parts(number):
            s = (q + number) @ k.T
            m = s.max(-1, keepdims=True)
            rounded = m.astype(jnp.bfloat16).astype(m.dtype)
            m = rounded if is_everywhere else m
            e = jnp.exp(s - m)
            return s, m, rounded, e, e.sum(-1, keepdims=True)

        _, _, rounded, e, total = parts(1)
        added = e / (total + jnp.exp(z - rounded))
        s, m, rounded, e, total = parts(2)
        in_log = jnp.exp(s - jnp.log(total + jnp.exp(z - rounded)) - m)
        s, m, rounded, e, total = parts(3)
        summed = jnp.exp(s - (jnp.log(total) + rounded))
        return [p @ v for p in (added, in_log, summed)]

    arrays = (*qkv_of_one_head(), jnp.float32(2))
    report = find(attend, *arrays)
    assert (len(report.replaced), len(report.left)) == ((3, 0) if is_everywhere else (0, 3))
    results = jax.jit(replace(attend))(*arrays)
    assert_close(results, jax.jit(attend)(*arrays), atol=1e-5)


@pytest.mark.parametrize("total", [sum_without_the_column, sum_of_half_the_column])
def test_a_column_that_the_division_after_the_product_lacks_is_left(total):
    def attend(q, k, v):
        s = jnp.concatenate([q @ k.T, jnp.ones((len(q), 1))], -1)
        e = jnp.exp(s)
        return e[:, :-1] @ v / total(e)

    (place,) = find(attend, *qkv_of_one_head()).places
    assert place.reason is not None and "not divided by their sum" in place.reason


def test_a_number_added_to_the_logits_counts_beside_a_sink():
    """Without a sink, a number that is added to all logits changes nothing."""

    def joined(q, k, v, sink):
        s = jnp.concatenate([q @ k.T + 3, jnp.broadcast_to(sink, (len(q), 1))], -1)
        return jax.nn.softmax(s)[:, :-1] @ v

    def number(q, k, v, sink):
        e = jnp.exp(q @ k.T + sink + 3)
        return (e / (1 + e.sum(-1, keepdims=True))) @ v

    arrays = [*qkv_of_one_head(), jnp.float32(1.5)]
    for attend in (joined, number):
        assert_replaced(attend, *arrays)
