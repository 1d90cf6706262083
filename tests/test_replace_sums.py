"""`memeff.replace_attention` of sums, differences and slices of softmaxes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from replaced_checks import find, qkv, replace, result_and_gradients
from small_calls import assert_close, temp_bytes

import memeff


def logits_of(q, k, visible=None):
    """Return logits [B, N, T, S]; those that are not visible are -1e9."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / 2
    return s if visible is None else jnp.where(visible, s, -1e9)


def average(p, v):
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def distances(q, k):
    return jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])


def differential(q, k, v, x):
    """Subtract two causal softmaxes, with one number for each head."""
    visible = distances(q, k) >= 0
    p = jax.nn.softmax(logits_of(q, k, visible))
    lam = jnp.exp(x[:2]) - jnp.exp(x[2:]) + 0.8
    return average(p - lam[:, None, None] * jax.nn.softmax(logits_of(k, q, visible)), v)


def differential_layers(q, k, v, x):
    """Subtract with a scalar array that a scan over layers receives."""

    def layer(y, lam):
        p = jax.nn.softmax(logits_of(y, k)) - lam * jax.nn.softmax(logits_of(y, q))
        return y + average(p, v), None

    return lax.scan(layer, q, x)[0]


def mixture(q, k, v, x):
    """Mix global with local attention of the same logits, with a gate for each query."""
    s = logits_of(q, k)
    near = jnp.where(abs(distances(q, k)) < 4, s, -1e9)
    gate = jax.nn.sigmoid(jnp.einsum("btnh,h->bnt", q, x))[..., None]
    return average(gate * jax.nn.softmax(s) + (1 - gate) * jax.nn.softmax(near), v)


def differential_of_one_softmax(q, k, v, x):
    """Subtract every second head of one softmax from the head before it."""
    bias = x[:2, None, None] * distances(q, k)
    p = jax.nn.softmax(jnp.where(distances(q, k) >= 0, logits_of(q, k) + bias, -jnp.inf))
    p = p.reshape(1, 1, 2, *p.shape[2:])
    return average(p[:, :, 0] - x[3] * p[:, :, 1], v[:, :, :1])


def nested_sum(q, k, v, x):
    """Add three softmaxes in vmap, with signs and factors outside."""

    def attend(q, k, v, factor):
        terms = [jax.nn.softmax(s) for s in (q @ k.T, q @ v.T, k @ q.T)]
        return (-(terms[0] - (terms[1] - 0.5 * terms[2])) * factor / 3) @ v

    return jax.vmap(attend, in_axes=(1, 1, 1, 0), out_axes=1)(q[0], k[0], v[0], x[:2])


def hidden_difference(q, k, v, x):
    """Drop probabilities of the difference, so that both terms draw the same bits."""
    p = jax.nn.softmax(logits_of(q, k)) - 0.3 * jax.nn.softmax(logits_of(k, q))
    keep = jax.random.bernoulli(jax.random.key(0), jnp.float32(0.9), p.shape)
    return average(jnp.where(keep, p / 0.9, 0), v)


SUMS = {
    differential: 2,
    differential_layers: 2,
    mixture: 2,
    differential_of_one_softmax: 2,
    nested_sum: 3,
}


@pytest.mark.parametrize("program", SUMS, ids=lambda f: f.__name__)
def test_sums_of_softmaxes(program):
    with jax.enable_x64(True):
        arrays = [*qkv(dtype="float64"), jnp.asarray([0.3, -0.8, 0.5, 1.0])]
        report = find(program, *arrays)
        assert len(report.replaced) == SUMS[program] and not report.left, report
        assert all("test_replace_sums.py" in place.source for place in report.replaced)
        before = result_and_gradients(program, arrays)
        after = result_and_gradients(replace(program, strict=True), arrays)
        for x, y in zip(before, after, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(y, x, rtol=0, atol=1e-12 * max(1, abs(x).max()))


def some_heads(p, v):
    return average(p[:, 1:], v[:, :, 1:])


def heads_of_pairs(p, v):
    """Take the second head of each pair."""
    p = p.reshape(1, 2, 2, *p.shape[2:])[:, :, 1]
    return average(p, v[:, :, 1::2])


def last_pair_of_heads(p, v):
    p = p.reshape(1, 2, 2, *p.shape[2:])[:, 1]
    return average(p, v[:, :, 2:])


def some_queries(p, v):
    return average(p[:, :, 1:12:3], v)


def some_keys(p, v):
    return average(p[..., :9], v[:, :9])


SLICES = {
    some_heads: "causal",
    heads_of_pairs: "causal",
    last_pair_of_heads: "causal",
    some_queries: "mask_fn",
    some_keys: "a slice of the keys is used",
}


@pytest.mark.parametrize("program", SLICES, ids=lambda f: f.__name__)
def test_slices_of_probabilities(program):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 16, 4, 4)), jnp.float32) for _ in range(3))

    def attend(q, k, v):
        return program(jax.nn.softmax(logits_of(q, k, distances(q, k) >= 0)), v)

    (place,) = find(attend, q, k, v).places
    assert SLICES[program] in str(place)
    before = result_and_gradients(attend, (q, k, v))
    after = result_and_gradients(replace(attend), (q, k, v))
    assert_close(after, before, rtol=0, atol=1e-5)


def test_a_sum_of_softmaxes_is_checked_and_differentiated_forward():
    arrays = [*qkv(), jnp.asarray([0.3, -0.8, 0.5, 1.0])]
    replace(mixture, check=True)(*arrays)
    directions = tuple(np.cos(x) for x in arrays)

    def tangents(f):
        return jax.jit(lambda *args: jax.jvp(f, args, directions))(*arrays)

    for program in (mixture, hidden_difference):
        after = tangents(replace(program, strict=True))
        assert_close(after, tangents(program), rtol=0, atol=1e-5)


def test_a_difference_in_bfloat16_is_as_exact_as_the_program():
    arrays = [*qkv(64), jnp.asarray([0.3, -0.8, 0.5, 1.0])]
    narrow = [np.asarray(x).astype(jnp.bfloat16) for x in arrays]
    truth = jax.jit(differential)(*(x.astype(np.float32) for x in narrow))
    errors = []
    for f in (differential, replace(differential, strict=True)):
        out = jax.jit(f)(*narrow)
        assert out.dtype == jnp.bfloat16
        errors.append(np.sqrt(((np.asarray(out, np.float32) - truth) ** 2).mean()))
    assert errors[1] <= 1.5 * errors[0]


def test_a_sum_of_softmaxes_takes_no_array_of_pairs():
    f = memeff.replace_attention(differential, strict=True)

    def temp(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32)
        numbers = jax.ShapeDtypeStruct((4,), jnp.float32)
        gradient = jax.grad(lambda *arrays: f(*arrays).sum(), (0, 1, 2, 3))
        return temp_bytes(gradient, (x, x, x, numbers))

    assert temp(8192) <= 2.2 * temp(4096)


def with_identity(q, k, v, x):
    return average(jax.nn.softmax(logits_of(q, k)) + jnp.eye(q.shape[1]), v)


def with_square(q, k, v, x):
    return average(jax.nn.softmax(logits_of(q, k)) - jax.nn.softmax(logits_of(k, q)) ** 2, v)


def with_constant_logits(q, k, v, x):
    fixed = jax.nn.softmax(jnp.exp(-abs(distances(q, k)) / x[0]))
    return average(jax.nn.softmax(logits_of(q, k)) + fixed, v)


def sum_returned(q, k, v, x):
    p = jax.nn.softmax(logits_of(q, k)) - jax.nn.softmax(logits_of(k, q))
    return average(p, v), p


def term_returned(q, k, v, x):
    p = jax.nn.softmax(logits_of(q, k))
    return average(jax.nn.softmax(logits_of(k, q)) - p, v), p


def divided_by_sum(q, k, v, x):
    p = jax.nn.softmax(logits_of(q, k)) - 0.3 * jax.nn.softmax(logits_of(k, q))
    return average(p / p.sum(-1, keepdims=True), v)


def one_denominator(q, k, v, x):
    e = jnp.exp(logits_of(q, k)) + jnp.exp(logits_of(k, q))
    return average(e / e.sum(-1, keepdims=True), v)


def doubled(q, k, v, x):
    p = jax.nn.softmax(logits_of(q, k))
    for _ in range(5):
        p = p + p
    return average(p, v)


SUMS_LEFT = {
    with_identity: "added to what is no softmax",
    with_square: "the search stops at `integer_pow`",
    with_constant_logits: "not made of a product",
    sum_returned: "are returned",
    term_returned: "are returned",
    divided_by_sum: "are used by `div`",
    one_denominator: "not divided by their sum",
    doubled: "more than 16 terms",
}


@pytest.mark.parametrize("program", SUMS_LEFT, ids=lambda f: f.__name__)
def test_sums_that_are_left(program):
    """One term that cannot be replaced leaves all as they are written."""
    arrays = [*qkv(), jnp.asarray([0.3, -0.8, 0.5, 1.0])]
    report = find(program, *arrays)
    (place,) = report.left
    assert not report.replaced and SUMS_LEFT[program] in place.reason, report
    assert "test_replace_sums.py" in place.source
    products = []
    both = (program, replace(program))
    for f in both:
        products.append(str(jax.make_jaxpr(f)(*arrays)).count("dot_general"))
    assert products[0] == products[1]
    results = jax.jit(lambda *x: [jax.tree.leaves(f(*x)) for f in both])(*arrays)
    assert_close(*results, rtol=0, atol=1e-6)
