"""Values and gradients of the Hopper kernels, against the oracle, by the law of tolerance.

The kernels run in Mosaic's interpreter. It plays warpgroups, barriers and copies, and finds races.
"""

import numpy as np
import pytest
from conftest import assert_truth, few
from hopper_cases import (
    CASES,
    FUSED,
    assert_case,
    bf16,
    draw,
    i32,
    needs_kernels,
    not_finite_products,
    run_kernels,
    small,
)

pytestmark = needs_kernels

# ---- forward and gradient

# The interpreter takes ten seconds for each, most of them to compile.
FAST = ("128", "keys masked, padded", "sinks")


@pytest.mark.parametrize("name", few(CASES, FAST))
def test_values(name):
    z, kwargs = CASES[name]
    args = draw(bf16, z)
    assert_case(run_kernels(args, kwargs), name, args, kwargs, "bfloat16")


@pytest.mark.slow
def test_float16():
    args = draw(np.float16, small(T=130, S=130))
    kwargs = dict(is_causal=True)
    result = run_kernels(args, kwargs, "float16")
    assert_truth(result, "float16", args, kwargs, "float16")


def test_gradient_of_wide_heads_is_taken_by_the_chunked_path():
    args = draw(bf16, small(T=70, S=90, H=192, D=130))
    assert_truth(run_kernels(args, {}), "192", args, {}, "bfloat16")


# ---- the gradient in one kernel


@pytest.mark.parametrize("name", few(FUSED, ("one block",)))
def test_fused_gradient(name):
    z, kwargs, one_block = FUSED[name]
    args = draw(bf16, z)
    result = run_kernels(args, kwargs | {"backward": "fused"}, detect_races=one_block)
    assert_truth(result, name, args, kwargs, "bfloat16")


@not_finite_products
@pytest.mark.parametrize("hidden", few(("keys", "queries"), ("keys",)))
def test_fused_gradient_is_done_again_where_what_is_hidden_is_not_finite(hidden):
    """The gradient has the bits of the two kernels, which compute it again."""
    args = draw(bf16, small(T=100, S=200))
    kwargs = dict(key_value_seq_lengths=i32([150]), query_seq_lengths=i32([90]))
    clean = run_kernels(args, kwargs | {"backward": "split"}, detect_races=False)
    query, key, value = (x.copy() for x in args)
    if hidden == "keys":
        key[:, 150:] = np.nan
        value[:, 150:] = np.nan
    else:
        query[:, 90:] = np.nan
    fused = kwargs | {"backward": "fused"}
    dirty = run_kernels((query, key, value), fused, detect_races=False)
    for name, grad in clean.grads.items():
        np.testing.assert_array_equal(grad, dirty.grads[name], err_msg=name)
