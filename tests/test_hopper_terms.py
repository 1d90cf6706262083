"""A scale and a soft cap that are arrays in the Hopper kernels: against the oracle, interpreted."""

import functools

import jax
import numpy as np
import pytest
from conftest import few
from hopper_cases import (
    assert_kernels,
    bf16,
    draw,
    f32,
    forward,
    interpreted,
    needs_kernels,
    run_kernels,
    small,
)
from small_calls import assert_close
from term_cases import CASES, assert_case, assert_score_gradients, number

from memeff import dot_product_attention

pytestmark = needs_kernels


@pytest.mark.parametrize("name", few(CASES, ("scale",)))
def test_values(name):
    assert_case(name, run_kernels)


@pytest.mark.slow
def test_float16():
    kwargs = dict(scale=number(0.3), logits_soft_cap=number(1.5))
    assert_kernels("float16", (small(T=70, S=140), kwargs), "float16")


@pytest.mark.slow
def test_beside_a_score_fn():
    assert_score_gradients("alibi", bf16, 5e-4, interpreted)


@pytest.mark.slow
def test_vmap():
    """Calls under vmap have their own scale and its own gradient."""
    args = draw(bf16, small(B=2, T=70, S=100))
    scales = np.array([0.2, -0.4], f32)

    def gradient(scale, query, key, value):
        def total(scale):
            call = functools.partial(dot_product_attention, implementation="pallas")
            return call(query, key, value, scale=scale).astype(f32).sum()

        return jax.grad(total)(scale)

    with interpreted(detect_races=False):
        mapped = jax.jit(jax.vmap(gradient))(scales, *(x[:, None] for x in args))
        one = jax.jit(gradient)
        single = [one(scales[n], *(x[n : n + 1] for x in args)) for n in range(2)]
    np.testing.assert_array_equal(mapped, np.stack(single))


@pytest.mark.slow
def test_decode_kernel():
    """The decode kernel reads a scale and a soft cap of arrays, and has the bits of numbers."""
    args = draw(bf16, small(B=2, T=4, S=256))
    arrays = forward(args, scale=number(0.25), logits_soft_cap=number(2))
    numbers = forward(args, scale=0.25, logits_soft_cap=2.0)
    assert_close(arrays, numbers, atol=1e-6)
    assert abs(f32(arrays[0]) - f32(forward(args, scale=0.3, logits_soft_cap=2.0)[0])).max() > 0.01
