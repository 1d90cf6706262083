"""Values and gradients of the Hopper kernels, against the oracle, by the law of tolerance.

The kernels run in Mosaic's interpreter. It plays warpgroups, barriers and copies, and finds races.
"""

import functools

import jax
import numpy as np
import pytest
from conftest import few
from hopper_cases import (
    CASES,
    DIVIDED,
    FUSED,
    assert_case,
    assert_fused_gradient_stays,
    assert_kernels,
    bf16,
    draw,
    f32,
    i32,
    kernels,
    lowered,
    needs_kernels,
    not_finite_products,
    run_kernels,
    small,
)

from memeff import dot_product_attention
from memeff.pallas.hopper import calls

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
@pytest.mark.parametrize("name", ["segments", "lengths", "segments, long"])
def test_forward_with_a_thread_block_for_each_tile(name, monkeypatch):
    monkeypatch.setattr("memeff.pallas.hopper.forward.MAX_PERSISTENT_POSITIONS", 0)
    z, kwargs = CASES[name]
    args = draw(bf16, z._replace(D=z.D - 8))  # a shape of its own, as programs are kept
    assert_case(run_kernels(args, kwargs), name, args, kwargs, "bfloat16")


@pytest.mark.slow
def test_float16():
    assert_kernels("float16", (small(T=130, S=130), dict(is_causal=True)), "float16")


# Heads beyond 128: dq, dk and dv have a kernel each. Values may have fewer columns than keys.
WIDE = {
    "256": (small(T=130, S=90, H=256, D=256), dict(is_causal=True)),
    "192, values of 128": (
        small(T=140, S=200, G=2, H=192, D=128),
        dict(local_window_size=(50, 20), q_offset=30, logits_soft_cap=5.0),
    ),
    "values of more": (
        small(T=100, S=150, H=160, D=256),
        dict(logits_soft_cap=5.0, key_value_seq_lengths=i32([140]), query_seq_lengths=i32([90])),
    ),
    "segments": (
        small(T=140, S=140, H=256, D=100),
        dict(
            query_segment_ids=i32([np.arange(140) // 60]),
            key_value_segment_ids=i32([np.arange(140) // 60]),
        ),
    ),
    "terms": (
        small(T=70, S=100, K=2, H=250, D=128),
        dict(scale=f32(0.3), logits_soft_cap=f32(4), sinks=np.array([0.5, -1], f32)),
    ),
}


@pytest.mark.parametrize("name", few(WIDE, ("192, values of 128",)))
def test_gradient_of_wide_heads(name):
    assert_kernels(name, WIDE[name])


@pytest.mark.slow
@not_finite_products
@pytest.mark.parametrize(("H", "D"), [(192, 192), (192, 64), (256, 128)])
def test_wide_heads_are_done_again_where_what_is_hidden_is_not_finite(H, D):
    args = draw(bf16, small(T=140, S=200, H=H, D=D))
    kwargs = dict(key_value_seq_lengths=i32([150]), query_seq_lengths=i32([130]))
    clean = run_kernels(args, kwargs)
    query, key, value = (x.copy() for x in args)
    key[:, 150:] = np.nan
    value[:, 150:] = np.inf
    query[:, 130:] = np.nan
    dirty = run_kernels((query, key, value), kwargs)
    np.testing.assert_array_equal(clean.out, dirty.out)
    for name, grad in clean.grads.items():
        np.testing.assert_array_equal(grad, dirty.grads[name], err_msg=name)


@pytest.mark.slow
def test_gradient_of_wide_heads_with_a_bias_is_taken_by_the_chunked_path():
    kwargs = dict(bias=np.linspace(-1, 1, 70 * 90).reshape(1, 1, 70, 90).astype(f32))
    assert_kernels("192", (small(T=70, S=90, H=192, D=130), kwargs))


@pytest.mark.parametrize("name", few(DIVIDED, ("64", "64, fused")))
def test_gradient_of_divided_groups(name, monkeypatch):
    for kernel in ("backward_key", "fused"):
        patched = f"memeff.pallas.hopper.{kernel}.group_parts"
        monkeypatch.setattr(patched, lambda sizes, *_: sizes.G)
    *call, backward = DIVIDED[name]
    assert_kernels(name, call, detect_races=backward == "split", backward=backward)


# ---- the gradient in one kernel


@pytest.mark.parametrize("name", few(FUSED, ("one block",)))
def test_fused_gradient(name):
    *call, one_block = FUSED[name]
    assert_kernels(name, call, detect_races=one_block, backward="fused")


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


def test_fused_gradient_stays_where_it_is_finite(monkeypatch):
    assert_fused_gradient_stays(monkeypatch, calls, "9.0")


def test_the_host_does_not_decide_whether_the_fused_gradient_is_done_again():
    def gradient(query, key, value):
        attend = functools.partial(dot_product_attention, implementation="pallas", backward="fused")
        return jax.vjp(attend, query, key, value)[1](query)

    x = jax.ShapeDtypeStruct((1, 256, 2, 64), bf16)
    text = lowered(gradient, x, x, x)
    assert kernels(text) == 5  # the forward, delta, the fused kernel and those of the other form
    assert "stablehlo.while" not in text and "stablehlo.case" not in text
