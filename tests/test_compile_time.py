"""Compilation takes the same time for any length, and happens once for calls of one shape."""

import time

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from test_memory import KINDS, MIB, call, compiled, cost, f32, gradient

from memeff import dot_product_attention
from memeff.slicing import slice_dims, write_slice


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compile_time_at_64k_is_that_at_4k(kind):
    cost(kind, "gradient", 1024)  # pays what only a first compilation costs
    _, short = cost(kind, "gradient", 4096)
    _, long = cost(kind, "gradient", 65536)
    assert long <= 1.5 * short + 0.5, f"4k: {short:.2f} s, 64k: {long:.2f} s"


def test_a_million_tokens_compile():
    forward, shapes = call(2**20, is_causal=True)
    start = time.process_time()
    program = compiled(gradient(forward), shapes)
    seconds = time.process_time() - start
    temp = program.memory_analysis().temp_size_in_bytes
    assert seconds < 30, f"{seconds:.1f} s"
    assert temp < 12 * 1024 * MIB, f"{temp / MIB:.0f} MiB"


def test_a_slice_is_one_equation():
    """Of JAX's own slices, each dim has three more, for starts counted from the end."""

    def cut_and_write(x, start):
        part = slice_dims(x, {1: (start, 2), 2: (0, 3)})
        return write_slice(x, part, (0, start, 0))

    jaxpr = jax.make_jaxpr(cut_and_write)(np.zeros((2, 5, 4), f32), np.int32(1))
    names = [equation.primitive.name for equation in jaxpr.eqns]
    assert names == ["dynamic_slice", "dynamic_update_slice"]


@pytest.fixture
def compilations():
    """Collect the seconds of each compilation in a list, as they happen."""
    durations = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            durations.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield durations
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("lengths", [False, True])
def test_five_calls_compile_once(compilations, lengths):
    """Calls that differ only in their numbers compile once, outside jit too."""
    rng = np.random.default_rng(0)
    extra = [dict(key_value_seq_lengths=jnp.array([i, 3])) if lengths else {} for i in range(5)]
    inputs = [jnp.asarray(rng.standard_normal((2, 19, 3, 4)), f32) for _ in range(5)]

    @jax.grad
    def grad(x, extra):
        return dot_product_attention(x, x, x, **extra, is_causal=True).sum()

    jax.block_until_ready(grad(inputs[0], extra[0]))
    assert compilations
    compilations.clear()
    for x, kwargs in zip(inputs[1:], extra[1:], strict=True):
        jax.block_until_ready(grad(x, kwargs))
    assert not compilations, f"{len(compilations)} more"
