"""Check the statistics of attention and the mass of keys, and their derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memeff

pytestmark = pytest.mark.once

f32 = np.float32


def test_entropy_is_not_negative():
    """The entropy is not below 0, also where one key takes all.

    The largest logits are so large that they are rounded to tens.
    """
    for size in (10, 1000):
        x = size * jax.random.normal(jax.random.key(size), (1, 97, 2, 8))
        entropy = memeff.attention_statistics(x, x, x, chunk_size=32).entropy
        assert (entropy >= 0).all()
        assert size < 1000 or entropy.min() < 1e-6


# ---- against NumPy


CAUSAL = dict(is_causal=True, q_offset=-2)


def _plain_statistics(q, k, v):
    """Compute the statistics and the key mass of one head: q [T, H], k [S, H], v [S, D].

    It is causal with an offset of -2.
    """
    T, H = q.shape
    S = len(k)
    position = np.arange(T)[:, None] - 2
    seen = np.arange(S) <= position  # the first rows see nothing
    raw = q @ k.T
    s = np.where(seen, raw / np.sqrt(H), -np.inf)
    some = seen.any(-1, keepdims=True)
    m = np.where(some, s.max(-1, keepdims=True), 0)
    e = np.exp(s - m)
    l = np.where(some, e.sum(-1, keepdims=True), 1)
    p = e / l
    lse = m + np.log(l)
    log_p = np.where(seen, s - lse, 0)
    distance = np.abs(position - np.arange(S))
    return (
        p @ v,
        np.where(some, lse, -np.inf)[:, 0],
        -(p * log_p).sum(-1),  # entropy
        np.where(some, m, -np.inf)[:, 0],  # largest logit
        (p * distance).sum(-1),
        p.sum(0),  # key mass
    )


def _one_head(x):
    """Return the only head of x [1, T|S, 1, ...]."""
    return x[0, :, 0]


def _draw(rng, T, S):
    """Return query, key and value of one head."""
    shapes = (1, T, 1, 5), (1, S, 1, 5), (1, S, 1, 4)
    return [rng.standard_normal(shape) for shape in shapes]


def test_key_mass_takes_no_value():
    x = jnp.ones((1, 4, 1, 8))
    with pytest.raises(TypeError, match="key_mass got an unexpected keyword argument: value"):
        memeff.key_mass(x, x, **{"value": x})


def test_statistics_and_key_mass():
    rng = np.random.default_rng(0)
    args = [3 * x for x in _draw(rng, 23, 31)]
    q, k, _ = args
    options = CAUSAL | dict(chunk_size=(8, 12))
    statistics = functools.partial(memeff.attention_statistics, **options)
    with jax.enable_x64(True):
        actual = [*jax.jit(statistics)(*args), memeff.key_mass(q, k, **options)]
    expected = _plain_statistics(*map(_one_head, args))
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(_one_head(np.asarray(x)), y, atol=1e-12)


@pytest.mark.slow
def test_statistics_differentiate():
    """Compare derivatives with differences: of NumPy's values, and of the first derivative."""
    rng = np.random.default_rng(1)
    args = _draw(rng, 9, 11)
    along = _draw(rng, 9, 11)
    weights = [rng.standard_normal(size) for size in ((9, 4), 9, 9, 9, 9, 11)]

    def move(step):
        return [x + step * dx for x, dx in zip(args, along, strict=True)]

    def weighted_sum(statistics, numpy):
        total = 0
        for weight, x in zip(weights, statistics, strict=True):
            finite = numpy.where(numpy.isfinite(x), x, 0)
            total += (weight * finite).sum()
        return total

    def loss(q, k, v):
        options = CAUSAL | dict(chunk_size=(4, 5))
        statistics = memeff.attention_statistics(q, k, v, **options)
        mass = memeff.key_mass(q, k, **options)
        return weighted_sum(map(_one_head, [*statistics, mass]), jnp)

    def plain_loss(step):
        args = map(_one_head, move(step))
        return weighted_sum(_plain_statistics(*args), np)

    def loss_at(step):
        return loss(*move(step))

    def tangent_and_gradients(q, k, v):
        _, tangent = jax.jvp(loss, (q, k, v), tuple(along))
        return tangent, jax.grad(loss, (0, 1, 2))(q, k, v)

    with jax.enable_x64(True):
        results = jax.jit(tangent_and_gradients)(*args)
        tangent, grads = jax.tree.map(np.asarray, results)
        slope = jax.jit(jax.grad(loss_at))
        second = float(jax.jit(jax.grad(slope))(0.0))
        bend = float(slope(1e-4) - slope(-1e-4)) / 2e-4
    near_difference = plain_loss(1e-3) - plain_loss(-1e-3)
    far_difference = plain_loss(2e-3) - plain_loss(-2e-3)
    numeric = (8 * near_difference - far_difference) / 12e-3
    from_gradients = sum((g * dx).sum() for g, dx in zip(grads, along, strict=True))
    assert abs(tangent - numeric) <= 1e-8 * abs(numeric)
    assert abs(from_gradients - numeric) <= 1e-8 * abs(numeric)
    assert abs(second - bend) <= 1e-6 * max(1, abs(bend))


# ---- the gradient of the largest logit


def _gradient_of_max_logit(q, k):
    """Return the gradient of the largest logits to the keys."""

    def loss(k):
        return memeff.attention_statistics(q, k, k, scale=1.0).max_logit.sum()

    return jax.grad(loss)(k)


def test_the_gradient_of_the_largest_logit_is_shared_by_what_rounding_may_part():
    """A logit one rounding below the largest shares its gradient.

    The walk finds the largest logit in one order of sums and looks for it in another.
    """
    q = jnp.ones((1, 1, 1, 1), f32)
    k = jnp.array([1 - 2**-23, 0.5, 1], f32).reshape(1, 3, 1, 1)
    gradient = _gradient_of_max_logit(q, k)
    np.testing.assert_array_equal(gradient.ravel(), [0.5, 0, 0.5])


def test_the_gradient_of_the_largest_logit_is_shared():
    """Equal keys share the gradient."""
    q = jnp.ones((1, 1, 1, 3))
    k = jnp.ones((1, 4, 1, 3)).at[:, 2].set(0)
    gradient = _gradient_of_max_logit(q, k)
    np.testing.assert_allclose(gradient[0, :, 0, 0], [1 / 3, 1 / 3, 0, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("name", ["causal", "mask"])
def test_what_nobody_sees_reaches_no_derivative(name):
    """NaN in hidden queries and keys changes no gradient of the statistics and of the key mass."""
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((2, n, 2, 8), f32) for n in (40, 33, 33))
    kwargs = {"key_value_seq_lengths": np.array([21, 30]), "query_seq_lengths": np.array([35, 11])}
    if name == "mask":
        kwargs["mask"] = rng.random((2, 1, 40, 33)) < 0.5
    else:
        kwargs["is_causal"] = True

    def total(q, k):
        rows = memeff.attention_statistics(q, k, v, chunk_size=16, **kwargs)[2:]
        rows = sum(jnp.where(jnp.isfinite(x), x, 0).sum() for x in rows)
        return rows + (memeff.key_mass(q, k, chunk_size=16, **kwargs) ** 2).sum()

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))
    clean = gradients(q, k)
    for b in range(2):
        k[b, kwargs["key_value_seq_lengths"][b] :] = np.nan
        q[b, kwargs["query_seq_lengths"][b] :] = np.nan
    for x, expected in zip(gradients(q, k), clean, strict=True):
        np.testing.assert_array_equal(x, expected)


def test_nan_reaches_the_largest_logit_of_a_row_and_its_tangent():
    rng = np.random.default_rng(6)
    for T, S in ((4, 4), (40, 33)):
        q, k, v = (rng.standard_normal((1, n, 2, 3)) for n in (T, S, S))
        q[0, 2, 1, 0] = np.nan

        def largest(q, k, v):
            return memeff.attention_statistics(q, k, v, local_window_size=(9, 9)).max_logit

        with jax.enable_x64(True):
            directions = q * 0 + 1, k, v
            results = jax.jit(functools.partial(jax.jvp, largest))((q, k, v), directions)
        for x in results:
            np.testing.assert_array_equal(np.argwhere(np.isnan(x)), [[0, 2, 1]])


def test_the_largest_logit_has_a_gradient_where_its_terms_cancel():
    """Without XLA's optimizations the two passes over the logits round differently."""
    rng = np.random.default_rng(7)
    q, k = (rng.standard_normal((1, n, 2, 8), f32) for n in (800, 40))
    bias = 3 * rng.standard_normal((1, 2, 800, 40), f32)
    alibi = memeff.scores.alibi(np.array([0.3, 0.1], f32))

    def largest(q, k, bias):
        kwargs = dict(score_fn=alibi, q_offset=20, chunk_size=16)
        return memeff.attention_statistics(q, k, k, bias, **kwargs).max_logit.sum()

    options = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    gradient = jax.jit(jax.grad(largest, argnums=2), compiler_options=options)(q, k, bias)
    np.testing.assert_allclose(gradient.sum(-1), 1, rtol=1e-6)
