"""Memory that a bias, its gradient and a mask cost."""

import math
import re

import jax
import numpy as np
import pytest
from conftest import few
from small_calls import temp_bytes
from test_memory import call, compiled, f32, gradient, mib

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 2048, 2048),
        (8, 1, 2048),
        pytest.param((2048,), marks=pytest.mark.slow),
        pytest.param((8, 2048, 1), marks=pytest.mark.slow),
    ],
)
def test_gradient_of_bias_costs_its_own_size(shape):
    """The gradient for bias costs its own size, at most once again for a copy, and two tiles.

    The cost is measured beyond the same call without a gradient for bias.
    """
    T = 2048
    bias = jax.ShapeDtypeStruct(shape, f32)
    forward, shapes = call(T, is_causal=True, bias=bias, H=16)

    def without(q, k, v, arrays):
        def fixed(q, k, v):
            return forward(q, k, v, arrays)

        _, pull = jax.vjp(fixed, q, k, v)
        return pull(q)

    def temp_and_output_bytes(function):
        account = compiled(function, shapes).memory_analysis()
        return account.temp_size_in_bytes + account.output_size_in_bytes

    more = temp_and_output_bytes(gradient(forward)) - temp_and_output_bytes(without)
    tile = 8 * 512 * 512 * 4  # all heads: a sixteenth of what N T S would take
    bias_bytes = math.prod(shape) * 4
    assert more <= 2 * bias_bytes + 2 * tile, f"{mib(more)} for {mib(bias_bytes)} of bias"


@pytest.mark.parametrize("B, N, K", few([(1, 8, 8), (2, 8, 8), (1, 8, 4)], [(2, 8, 8), (1, 8, 4)]))
def test_bias_and_mask_are_not_copied(B, N, K):
    T = 2048
    arrays = {
        "bias": jax.ShapeDtypeStruct((N, T, T), f32),
        "mask": jax.ShapeDtypeStruct((B, N, T, T), bool),
    }
    for name, x in arrays.items():
        temp = temp_bytes(*call(T, N=N, K=K, B=B, **{name: x}))
        size = x.size * x.dtype.itemsize
        assert temp <= size / 2, f"{name} has {mib(size)}, the call takes {mib(temp)} more"


def test_mask_causes_no_gradient_buffer():
    """A dense boolean mask causes no array of its shape in any other dtype.

    Beyond a call without it, a gradient takes at most 1.25 times the mask's own size.
    """
    T = 2053
    mask = jax.ShapeDtypeStruct((1, 1, T, T), np.bool_)
    forward, shapes = call(T, mask=mask, H=16, N=2)
    program = compiled(gradient(forward), shapes)
    arrays = re.findall(r"\b(pred|[suf]\d+|bf16)\[([\d,]+)\]", program.as_text())
    dtypes = {dtype for dtype, dims in arrays if dims.count(str(T)) >= 2}
    assert dtypes == {"pred"}, dtypes
    plain, plain_shapes = call(T, H=16, N=2)
    more = program.memory_analysis().temp_size_in_bytes
    more -= temp_bytes(gradient(plain), plain_shapes)
    assert more <= 1.25 * T * T, f"{mib(more)} for {mib(T * T)} of mask"
