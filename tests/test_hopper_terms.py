"""A scale and a soft cap that are arrays in the Hopper kernels: against the oracle, interpreted."""

import functools

import jax
import numpy as np
import oracle
import pytest
from conftest import (
    assert_result,
    assert_truth,
    cotangents,
    few,
    oracle_arguments,
    plain_call,
    true_call,
)
from hopper_cases import (
    assert_close,
    bf16,
    draw,
    f32,
    forward,
    i32,
    interpreted,
    needs_kernels,
    run_kernels,
    small,
)

from memeff import dot_product_attention, scores

pytestmark = needs_kernels

number = functools.partial(np.array, dtype=f32)  # np.float32 would count as a Python number
# Sizes, and keyword arguments.
CASES = {
    "scale": (small(T=70, S=100, G=2), dict(scale=number(-0.3))),
    "scale, 128": (
        small(B=2, T=140, S=130, H=128, D=100),
        dict(scale=number(0.2), is_causal=True, key_value_seq_lengths=i32([130, 40])),
    ),
    "scale 0": (small(T=70, S=70), dict(scale=number(0))),
    "soft cap": (small(T=70, S=140), dict(logits_soft_cap=number(1.5))),
    "both": (
        small(T=140, S=140, G=2, H=128, D=128),
        dict(scale=number(0.2), logits_soft_cap=number(2), local_window_size=(60, 10)),
    ),
    "both, with a bias": (
        small(B=2, T=70, S=90),
        dict(
            scale=number(0.2),
            logits_soft_cap=number(2),
            bias=np.random.default_rng(6).standard_normal((1, 1, 70, 90)).astype(f32),
        ),
    ),
}


@pytest.mark.parametrize("name", few(CASES, ("scale",)))
def test_values(name):
    z, kwargs = CASES[name]
    args = draw(bf16, z)
    result = run_kernels(args, kwargs)
    truth = true_call(args, kwargs, "bfloat16")
    plain = plain_call(args, kwargs, "bfloat16")
    dout, dlse = cotangents(args, bf16)
    words = oracle_arguments(args, kwargs, "bfloat16")
    sizes = oracle.scalar_sizes(*args, **words, dout=dout, dlse=dlse)
    assert_result(result, plain, truth, "bfloat16", name, sizes)


@pytest.mark.slow
def test_float16():
    args = draw(np.float16, small(T=70, S=140))
    kwargs = dict(scale=number(0.3), logits_soft_cap=number(1.5))
    assert_truth(run_kernels(args, kwargs, "float16"), "float16", args, kwargs, "float16")


@pytest.mark.slow
def test_beside_a_score_fn():
    """Gradients of the scale, the soft cap and the params of score_fn are the chunked path's."""
    args = draw(bf16, small(B=2, T=70, S=100, K=2))
    slopes = np.array([0.1, -0.3], f32)

    def gradients(implementation):
        def total(scale, cap, slopes):
            out = dot_product_attention(
                *args,
                scale=scale,
                logits_soft_cap=cap,
                score_fn=scores.alibi(slopes),
                implementation=implementation,
            )
            return (out * args[0]).astype(f32).sum()

        return jax.jit(jax.grad(total, (0, 1, 2)))(f32(0.2), f32(2), slopes)

    with interpreted():
        results = gradients("pallas")
    for x, y in zip(results, gradients("xla"), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3)


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
