"""Residuals that the forward saves for the backward, and the logits that both compute from them."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes
from conftest import few
from jax.ad_checkpoint import print_saved_residuals

import memeff
from memeff import dot_product_attention

pytestmark = pytest.mark.once

f32 = np.float32


def test_backward_saves_operands_out_and_lse(capsys):
    """The backward gets no probabilities, no maxima and no copy of the keys for each head."""
    z = Sizes()
    q = jnp.ones((z.B, z.T, z.N, z.H))
    k = jnp.ones((z.B, z.S, z.K, z.H))
    v = jnp.ones((z.B, z.S, z.K, z.D))
    bias = jnp.ones((z.N, 1, z.S))
    lengths = jnp.array([z.S, 7])

    def call(q, k, v, bias):
        return dot_product_attention(q, k, v, bias, is_causal=True, key_value_seq_lengths=lengths)

    print_saved_residuals(call, q, k, v, bias)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    out_size = z.B * z.T * z.N * z.D
    lse_size = z.B * z.T * z.N
    # lse is two floats
    allowed = [q.size, k.size, v.size, bias.size, out_size, lse_size, lse_size, lengths.size]
    for line in lines:
        dims = re.match(r"\w+\[([\d,]+)\]", line)[1]
        size = math.prod(map(int, dims.split(",")))
        assert size in allowed, f"{size} elements are saved:\n" + "\n".join(lines)
        allowed.remove(size)


@pytest.mark.parametrize("return_residual", [False, True])
def test_inference_keeps_no_lse(return_residual):
    """The compiled forward returns lse only to a caller who asks, also outside jit."""
    q = jax.ShapeDtypeStruct((1, 37, 2, 5), f32)

    def call(q):
        return dot_product_attention(q, q, q, is_causal=True, return_residual=return_residual)

    calls = []
    for equation in jax.make_jaxpr(call)(q).eqns:
        name = equation.primitive.name
        if "jit" in name or "memeff" in name:
            calls.append(equation)
    assert calls
    shapes = [x.aval.shape for equation in calls for x in equation.outvars]
    lse_size = 37 * 2
    returned_lse = [shape for shape in shapes if shape and math.prod(shape) == lse_size]
    assert bool(returned_lse) == return_residual


LOGITS = ({}, dict(logits_soft_cap=3.0), dict(scale=0.37), dict(precision="highest"))
EACH_DTYPE = [*itertools.product(("float32", "bfloat16", "float16"), LOGITS)]
FAST = [*EACH_DTYPE[:6], EACH_DTYPE[8]]  # only the first two in bfloat16, the first in float16


@pytest.mark.parametrize("dtype, extra", few(EACH_DTYPE, FAST), ids=str)
def test_logits_are_identical_in_both_directions(dtype, extra):
    """Forward and backward compute the same bits of each logit.

    Each query sees one key. Then lse is its logit, exp(s - lse) is 1, and p is the gradient of lse
    by bias.
    """
    T = 96
    N = 3
    rng = np.random.default_rng(0)
    shape = (1, T, N, 40)
    q, k, v = (jnp.asarray(3 * rng.standard_normal(shape), dtype) for _ in range(3))
    mask = np.eye(T, dtype=bool)[rng.permutation(T)]

    def lse_by_bias(bias):
        _, lse = dot_product_attention(
            q, k, v, bias, mask, return_residual=True, chunk_size=(32, 48), **extra
        )
        return lse

    lse, pull = jax.vjp(lse_by_bias, jnp.zeros((N, T, T), f32))
    (p,) = pull(jnp.ones_like(lse))
    p = np.asarray(p)
    assert np.all(p[:, ~mask] == 0)
    np.testing.assert_array_equal(p[:, mask], 1)  # mask has one key in each row


def test_residual_names_are_public():
    assert memeff.RESIDUAL_NAMES == tuple(dict.fromkeys(memeff.RESIDUAL_NAMES))
    assert len(memeff.RESIDUAL_NAMES) == 2
