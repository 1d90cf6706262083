"""Calls whose scale and soft cap are arrays, and their comparison with the oracle."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from conftest import assert_result, cotangents, oracle_arguments, plain_call, true_call
from hopper_cases import bf16, draw, f32, i32, small

import memeff

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


def assert_case(name, run_kernels):
    """Compare `run_kernels(args, kwargs)` with the oracle, gradients of the numbers included."""
    z, kwargs = CASES[name]
    args = draw(bf16, z)
    result = run_kernels(args, kwargs)
    truth = true_call(args, kwargs, "bfloat16")
    plain = plain_call(args, kwargs, "bfloat16")
    dout, dlse = cotangents(args, bf16)
    words = oracle_arguments(args, kwargs, "bfloat16")
    sizes = oracle.scalar_sizes(*args, **words, dout=dout, dlse=dlse)
    assert_result(result, plain, truth, "bfloat16", name, sizes)


def assert_score_gradients(score_fn, dtype, tolerance, on_kernels=contextlib.nullcontext):
    """Compare gradients of the kernels with those of the chunked path.

    They are those of scale, soft cap, `score_fn`'s params, query, key and value. The kernels run in
    the context `on_kernels()`. `tolerance` is relative to the largest number of each gradient.
    """
    args = draw(dtype, small(B=2, T=70, S=100, K=2))
    params = {
        "alibi": np.array([0.1, -0.3], f32),
        "t5": np.random.default_rng(3).standard_normal((8, 2)).astype(f32),
    }[score_fn]

    def gradients(implementation):
        def total(scale, cap, params, query, key, value):
            out = memeff.dot_product_attention(
                *(query, key, value),
                scale=scale,
                logits_soft_cap=cap,
                score_fn=getattr(memeff.scores, score_fn)(params),
                implementation=implementation,
            )
            return (out * args[0]).astype(jnp.float32).sum()

        return jax.jit(jax.grad(total, range(6)))(f32(0.2), f32(2), params, *args)

    with on_kernels():
        results = gradients("pallas")
    for x, y in zip(results, gradients("xla"), strict=True):
        x, y = f32(x), f32(y)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * abs(y).max())
