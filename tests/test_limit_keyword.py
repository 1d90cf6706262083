"""The keyword `memory_limit` and `memeff.memory_limit`: smaller tiles, refusals, wrong limits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import watch_dispatch

import memeff
from memeff import dot_product_attention

pytestmark = pytest.mark.once

X = jax.ShapeDtypeStruct((1, 4096, 8, 64), np.float32)


def least_limit(query, key, value, **kwargs):
    """Return the limit that a refusal names, in bytes."""
    with pytest.raises(ValueError, match="memory_limit=1 ") as raised:
        memeff.plan(query, key, value, **kwargs, memory_limit=1)
    return int(re.search(r"need up to (\d+) bytes", str(raised.value))[1])


# ---- a limit is kept, or refused


def test_what_cannot_fit_is_refused_with_the_figure_that_would():
    lowest = least_limit(X, X, X, is_causal=True)
    error = r"in tiles of 64 x 64 logits. Raise the limit to that, or split the batch or the"
    with pytest.raises(ValueError, match=error):
        memeff.plan(X, X, X, is_causal=True, memory_limit=lowest - 1)
    assert memeff.plan(X, X, X, is_causal=True, memory_limit=lowest).gradient_bytes > 0


def test_a_limit_above_the_default_changes_nothing():
    assert memeff.plan(X, X, X, memory_limit="1GiB") == memeff.plan(X, X, X)


@pytest.mark.slow
def test_tiles_shrink_with_the_limit():
    x = jax.ShapeDtypeStruct((1, 300, 8, 64), np.float32)  # so short that tiles are most of it
    top = memeff.plan(x, x, x, compile=True).gradient_bytes
    lowest = least_limit(x, x, x)
    limits = top, (top + lowest) // 2, lowest
    plans = [memeff.plan(x, x, x, memory_limit=limit, compile=True) for limit in limits]
    taken = [max(plan.forward_bytes, plan.gradient_bytes) for plan in plans]
    for bytes_, limit in zip(taken, limits, strict=True):
        assert bytes_ <= limit
    assert taken == sorted(taken, reverse=True)
    assert taken[-1] < taken[0] / 2
    assert plans[0].chunk_size == memeff.plan(x, x, x).chunk_size
    assert plans[0].chunk_size != plans[2].chunk_size


def test_chunk_size_is_kept_and_refused_over_the_limit():
    assert memeff.plan(X, X, X, chunk_size=(96, 160), memory_limit="1GiB").chunk_size == (96, 160)
    error = "in tiles of 2048 x 2048 logits. Raise the limit to that, or omit `chunk_size`"
    with pytest.raises(ValueError, match=error):
        memeff.plan(X, X, X, chunk_size=2048, memory_limit="24MiB")


def test_a_quadratic_call_is_held_to_the_limit_too():
    x = jax.ShapeDtypeStruct((1, 512, 8, 16), np.float32)

    def trace(memory_limit):
        attend = functools.partial(
            dot_product_attention, implementation="reference", memory_limit=memory_limit
        )
        jax.eval_shape(attend, x, x, x)

    error = "beyond inputs and outputs, at once. Raise the limit to that, or omit `implementation`"
    with pytest.raises(ValueError, match=error):
        trace("4MiB")
    trace("400MiB")


@pytest.mark.slow
def test_the_same_numbers_within_any_limit():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 700, 4, 16)) for i in range(3))

    def grads(memory_limit):
        def loss(q, k, v):
            out = dot_product_attention(q, k, v, is_causal=True, memory_limit=memory_limit)
            return (out**2).sum()

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    unlimited = grads(None)
    limited = grads(least_limit(q, k, v, is_causal=True))
    for x, y in zip(unlimited, limited, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


# ---- a limit for the whole program


@pytest.mark.slow
def test_a_limit_for_the_whole_program_retraces_what_jit_keeps():
    chosen = []
    x = jnp.ones((1, 300, 2, 16))

    @jax.jit
    def f(x):
        with watch_dispatch() as calls:
            out = dot_product_attention(x, x, x)
        choice, _ = calls[0]
        chosen.append(choice.schedule.chunk_size)
        return out

    f(x)
    with memeff.memory_limit(least_limit(x, x, x)):
        f(x)
        f(x)
        with memeff.memory_limit("1GiB"):
            f(x)
    f(x)
    assert chosen == [(300, 300), (64, 64), (300, 300)]  # three traces of five calls


def test_a_call_s_own_limit_counts_before_the_program_s():
    with memeff.memory_limit(1):
        assert memeff.plan(X, X, X, memory_limit="1GiB").chunk_size == (1024, 1024)
        with pytest.raises(ValueError, match="memory_limit=1 "), memeff.memory_limit("1 B"):
            memeff.plan(X, X, X)
        with memeff.memory_limit(None):
            memeff.plan(X, X, X)


# ---- values of a limit


@pytest.mark.parametrize(
    "text, bytes_", [("512MiB", 2**29), ("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("7", 7), (9, 9)]
)
def test_bytes_in_words(text, bytes_):
    assert memeff.plan(X, X, X, device="cpu", memory=text).memory == bytes_


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        ("512 miles", ValueError, 'memory_limit=\'512 miles\': write bytes as "512MiB" or "2GB"'),
        ("-1MiB", ValueError, "write bytes as"),
        ("9" * 400, ValueError, r"memory_limit is more than 2\^63 bytes: make it smaller"),
        (0, ValueError, "memory_limit=0: bytes must be > 0; use None for no limit"),
        (
            1.5,
            TypeError,
            "memory_limit must be bytes, an int or a text such as .512MiB., got float 1.5",
        ),
        (True, TypeError, "memory_limit must be bytes"),
    ],
)
def test_wrong_limits(wrong, error, words):
    x = jnp.ones((1, 5, 1, 4))
    with pytest.raises(error, match=words):
        dot_product_attention(x, x, x, memory_limit=wrong)
    with pytest.raises(error, match=words):
        memeff.memory_limit(wrong)


def test_a_limit_wants_known_lengths():
    T, S = jax.export.symbolic_shape("T, S")
    query = jax.ShapeDtypeStruct((1, T, 2, 8), np.float32)
    key = jax.ShapeDtypeStruct((1, S, 2, 8), np.float32)
    error = r"memory_limit does not support sizes .* symbolic \(B=1, T=T, S=S\)\. Pass chunk_size"
    attend = functools.partial(dot_product_attention, memory_limit="1GiB")
    with pytest.raises(ValueError, match=error):
        jax.eval_shape(attend, query, key, key)
