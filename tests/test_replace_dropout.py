"""`memeff.replace_attention` keeps the bits of dropout, or leaves it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import results_and_gradients
from jax import lax
from replaced_checks import assert_replaced, find, qkv, qkv_of_one_head, replace
from small_calls import assert_close


def test_dropout_has_the_same_bits():
    def attend(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        keep = jax.random.bernoulli(key, 0.7, weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.7, 0), v)

    def shared(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        keep = jax.random.bernoulli(key, 0.7, (1, 1, *weights.shape[2:]))
        weights = weights * (keep.astype(weights.dtype) / 0.7)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    key = jax.random.key(3)
    for f in (attend, shared):
        assert_replaced(f, key, *qkv(), atol=1e-5)

    def other_order(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->btns", q, k))
        keep = jax.random.bernoulli(key, 0.7, weights.shape)
        return jnp.einsum("btns,bsnh->btnh", jnp.where(keep, weights / 0.7, 0), v)

    assert "another order of axes" in find(other_order, key, *qkv()).left[0].reason

    def of_keys(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        keep = jax.random.bernoulli(key, 0.7, (*weights.shape[:2], 1, weights.shape[3]))
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.7, 0), v)

    assert "are shared by other axes" in find(of_keys, key, *qkv()).left[0].reason

    def inverse(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        drop = jax.random.bernoulli(key, 0.3, weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(drop, 0, weights / 0.7), v)

    assert "is not one jax.random.bernoulli" in find(inverse, key, *qkv()).left[0].reason

    def of_float32(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        keep = jax.random.bernoulli(key, jnp.float32(0.7), weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.7, 0), v)

    def rows_cut(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        keep = jax.random.bernoulli(key, 0.7, weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.7, 0)[:, :, 1:], v)

    def sink_dropped(key, q, k, v):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k)
        weights = jax.nn.softmax(jnp.pad(logits, [(0, 0)] * 3 + [(0, 1)]))
        keep = jax.random.bernoulli(key, 0.7, weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.7, 0)[..., :-1], v)

    for f in (rows_cut, sink_dropped):
        assert "for more rows or columns than are used" in find(f, key, *qkv()).left[0].reason

    with jax.enable_x64(True):
        assert "with the bits of float32 under x64" in find(of_float32, key, *qkv()).left[0].reason


def uniform_of(key, shape, difference, shift):
    """Return the equations of jax.random.uniform, with a difference and a shift of your own."""
    bits = shift(jax.random.bits(key, shape), jnp.full(shape, 9, "uint32")) | np.uint32(0x3F800000)
    floats = difference(lax.bitcast_convert_type(bits, jnp.float32), 1.0)
    return jnp.maximum(0.0, floats * 1.0 + 0.0)


SHIFT = lax.shift_right_logical


@pytest.mark.parametrize(
    "difference, shift, keep_rate, reason",
    [
        (lax.sub, SHIFT, 0.7, None),
        (lambda x, y: y - x, SHIFT, 0.7, "is not one jax.random.bernoulli"),
        (lax.sub, lambda x, y: SHIFT(y, x), 0.7, "is not one jax.random.bernoulli"),
        (lax.sub, SHIFT, 0.0, "keeps 0 of the probabilities"),
        (lax.sub, SHIFT, 1.5, "keeps 1.5 of the probabilities"),
        (lax.sub, SHIFT, np.nan, "keeps nan of the probabilities"),
    ],
)
def test_dropout_that_is_almost_a_bernoulli(difference, shift, keep_rate, reason):
    def attend(key, x):
        weights = jax.nn.softmax(x @ x.T)
        keep = uniform_of(key, weights.shape, difference, shift) < keep_rate
        return jnp.where(keep, weights, 0) @ x

    report = find(attend, jax.random.key(0), qkv_of_one_head()[0])
    assert len(report.replaced) == (reason is None)
    assert reason is None or reason in report.left[0].reason


def test_rows_that_see_no_key_beside_dropout():
    """Dropout leaves some of the values to a row that sees no key, and not the mean of all."""
    q, k, v = (jnp.concatenate([x, -x]) for x in qkv())
    visible = jnp.arange(k.shape[1]) < jnp.array([[k.shape[1]], [0]])
    visible_rows = jnp.arange(q.shape[1]) < jnp.array([[q.shape[1]], [0]])
    of_keys = visible[:, None, None]
    of_pairs = of_keys & visible_rows[:, None, :, None]

    def attend(q, k, v):
        outs = []
        for mask, low in ((of_keys, -1e9), (of_pairs, float(jnp.finfo(q.dtype).min))):
            logits = jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", q, k), low)
            keep = jax.random.bernoulli(jax.random.key(3), 0.7, logits.shape)
            weights = jnp.where(keep, jax.nn.softmax(logits) / 0.7, 0)
            outs.append(jnp.einsum("bnts,bsnh->btnh", weights, v))
        return outs

    assert len(find(attend, q, k, v).replaced) == 2
    arrays = {"q": q, "k": k, "v": v}
    actual, expected = (
        jax.jit(results_and_gradients(lambda arrays, f=f: f(**arrays)))(arrays)
        for f in (replace(attend), attend)
    )
    assert_close(actual, expected, atol=1e-5)
