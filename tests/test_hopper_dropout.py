"""Dropout in the Hopper kernels, interpreted: the pairs of the chunked path, and its gradients."""

import functools

import jax
import numpy as np
import pytest
from conftest import few
from hopper_cases import assert_kernels, bf16, draw, f32, i32, needs_kernels, run_kernels, small
from small_calls import assert_close

from memeff import dot_product_attention

pytestmark = needs_kernels

DROPOUT = {
    "dropout_rng": np.array([5, 1 << 31], np.uint32),
    "dropout_rate": 0.4,
    "dropout_bits": "mix32",
}
EACH = DROPOUT | {"broadcast_dropout": False}
# Sizes, and keyword arguments.
CASES = {
    "each": (small(B=2, T=70, S=140, K=2, G=2), EACH),
    "shared": (small(B=2, T=130, S=300, K=2), DROPOUT),
    "128, causal": (small(B=2, T=150, S=140, H=128, D=100), EACH | dict(is_causal=True)),
    "segments": (
        small(T=140, S=140, G=2),
        EACH | dict(query_segment_ids=i32([[0] * 60 + [1] * 80])),
    ),
    "bias": (
        small(B=2, T=70, S=130, K=2),
        EACH | dict(bias=np.random.default_rng(6).standard_normal((1, 2, 70, 130)).astype(f32)),
    ),
    "sinks": (small(T=70, S=70, K=2), EACH | dict(sinks=np.array([1.0, -2.0], f32))),
}


@pytest.mark.parametrize("name", few(CASES, ("each",)))
def test_values(name):
    assert_kernels(name, CASES[name])


@pytest.mark.slow
def test_float16():
    assert_kernels("float16", (small(T=70, S=140), EACH), "float16")


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_kernels_drop_the_pairs_that_the_chunked_path_drops(rate):
    """Values that are unit vectors show each probability."""
    z = small(B=2, T=70, S=64, K=2)
    query, key, _ = draw(bf16, z)
    value = np.broadcast_to(np.eye(64)[None, :, None], (2, 64, 2, 64)).astype(bf16)
    kwargs = EACH | dict(dropout_rate=rate)
    kernels = run_kernels((query, key, value), kwargs)
    chunked = jax.jit(functools.partial(dot_product_attention, **kwargs, implementation="xla"))
    expected = chunked(query, key, value)
    np.testing.assert_array_equal(kernels.out == 0, np.asarray(expected) == 0)
    assert_close(kernels.out, expected, atol=0.02)


@pytest.mark.slow
def test_gradient_of_wide_heads_draws_the_same_pairs():
    assert_kernels("192", (small(T=70, S=90, H=192, D=130), EACH))
