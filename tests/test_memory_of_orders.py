"""Measure the memory of derivatives of every order, and of the user's functions.

Nothing runs: the compiler reports the bytes of each program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from test_memory import KINDS, MIB, _kinds, call, compiled, gradient, quadratic

import memeff
from memeff import dot_product_attention, masks, scores, transforms

pytestmark = pytest.mark.once

slow = pytest.mark.slow
f32 = np.float32


def orders(forward):
    """Return programs by order, for a call as `test_memory.call` makes it.

    The query, key and value also serve as cotangents and directions.
    """

    def tangent(q, k, v, arrays):
        f = functools.partial(forward, arrays=arrays)
        return jax.jvp(f, (q, k, v), (q, k, v))

    def gradient(q, k, v, arrays):
        f = functools.partial(forward, arrays=arrays)
        _, pull = jax.vjp(f, q, k, v)
        return pull(q)

    def tangent_of_gradient(q, k, v, arrays):
        f = functools.partial(gradient, arrays=arrays)
        return jax.jvp(f, (q, k, v), (q, k, v))[1]

    def gradient_of_gradient(q, k, v, arrays):
        f = functools.partial(gradient, arrays=arrays)
        _, pull = jax.vjp(f, q, k, v)
        return pull((q, k, v))

    return {
        "jvp": tangent,
        "hvp": tangent_of_gradient,
        "grad of grad": gradient_of_gradient,
    }


def temporary_bytes(program) -> int:
    """Return the bytes that a compiled program takes beyond inputs and outputs."""
    return program.memory_analysis().temp_size_in_bytes


def assert_linear(once: int, twice: int):
    """Check the bytes of a program, and of the same with twice the tokens."""
    words = f"{once / MIB:.1f} MiB, twice the tokens {twice / MIB:.1f} MiB"
    assert twice <= 2.15 * once, words


# ---- orders


@functools.cache
def program(kind, order, T, N=4):
    forward, shapes = call(T, **_kinds(T, N)[kind], N=N)
    return compiled(orders(forward)[order], shapes)


LIMITS = [("jvp", 30), ("hvp", 60), ("grad of grad", 140)]


@pytest.mark.parametrize("order, limit", few(LIMITS, [("jvp", 30), ("grad of grad", 140)]))
def test_memory_of_one_head_at_32k(order, limit):
    size = temporary_bytes(program("causal", order, 32768, 1)) / MIB
    assert size <= limit, f"{size:.1f} MiB"


@pytest.mark.parametrize("kind", few(KINDS, ["causal"]))
@pytest.mark.parametrize("order", few(["jvp", "hvp", "grad of grad"], ["hvp"]))
def test_memory_of_orders_grows_with_the_sequence(kind, order):
    once = temporary_bytes(program(kind, order, 16384))
    twice = temporary_bytes(program(kind, order, 32768))
    assert_linear(once, twice)
    arrays = quadratic(program(kind, order, 16384).as_text(), 16384)
    assert not arrays, arrays


# ---- functions of the user


def packed(T):
    return masks.causal() & masks.documents(np.arange(T) // 3000)


def function_arguments(kind, T):
    """Return the arguments named `kind`, one of FUNCTIONS, for T tokens and 2 heads."""
    match kind:
        case "score":
            score = scores.alibi(jnp.ones(2)).then(scores.t5(jnp.ones((32, 2), f32)))
            return dict(score_fn=score, is_causal=True)
        case "mask":
            return dict(mask_fn=packed(T))
        case "block mask":
            return dict(mask_fn=memeff.block_mask(packed(T), T))
        case "transform":
            return dict(qk_transform=transforms.rotary(), is_causal=True)
        case "sinks":
            return dict(sinks=jnp.ones(2), is_causal=True)
    raise ValueError(kind)


FUNCTIONS = ["score", "mask", "block mask", "transform", "sinks"]


@functools.cache
def function_program(kind, order, T):
    forward, shapes = call(T, N=2, **function_arguments(kind, T))
    by_order = {"gradient": gradient(forward)} | orders(forward)
    return compiled(by_order[order], shapes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("order", ["gradient", "grad of grad"])
def test_memory_of_functions_grows_with_the_sequence(kind, order):
    T = 8192 if kind == "block mask" else 16384  # blocks are computed pair by pair
    once = temporary_bytes(function_program(kind, order, T))
    twice = temporary_bytes(function_program(kind, order, 2 * T))
    assert_linear(once, twice)
    assert not quadratic(function_program(kind, order, T).as_text(), T)


def test_gradient_of_a_table_costs_its_own_size():
    """The T5 table of 32 heads has 1,024 numbers, and its pairs are 2^29."""

    def loss(x, table):
        score = scores.t5(table)
        return dot_product_attention(x, x, x, score_fn=score, is_causal=True).sum()

    x = jax.ShapeDtypeStruct((1, 4096, 32, 8), f32)
    table = jax.ShapeDtypeStruct((32, 32), f32)
    size = temporary_bytes(compiled(jax.grad(loss, 1), (x, table))) / MIB
    assert size <= 64, f"{size:.1f} MiB"
