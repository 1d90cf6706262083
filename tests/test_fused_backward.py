"""The keyword `backward`: which form of the kernels' backward runs, and what it takes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import watch_dispatch
from test_dispatch import OLD

import memeff
from memeff import dot_product_attention
from memeff.device import pretend_device

needs_kernels = pytest.mark.skipif(OLD, reason="kernels need jax 0.11")


@needs_kernels
def test_the_form_of_the_backward_is_what_is_asked_for():
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    wide = jax.ShapeDtypeStruct((1, 256, 2, 192), jnp.bfloat16)

    def first_sentence(**kwargs):
        return memeff.explain(x, x, x, **kwargs).split(".")[0]

    def gradient_bytes(**kwargs):
        return memeff.plan(x, x, x, device="H200", **kwargs).gradient_bytes

    with pretend_device("gpu", "9.0"):
        assert "fused into one" in memeff.explain(x, x, x, backward="fused")
        assert "fused" not in first_sentence(backward="split")
        assert first_sentence(backward="split") == first_sentence()
        error = 'backward="fused" supports heads of up to 128, and this call has H=192'
        with pytest.raises(NotImplementedError, match=error):
            memeff.explain(wide, wide, wide, backward="fused")
        sums = 4 * 256 * 2 * 64
        assert gradient_bytes(backward="fused") == gradient_bytes() + sums
    x = jnp.ones((1, 5, 2, 3))
    split = dot_product_attention(x, x, x, backward="split")
    assert (split == dot_product_attention(x, x, x)).all()


LONG = (2, 8192, 16, 128)  # forward + gradient, causal, H200: 563 TFLOP/s in one kernel, 489 in two


def choose_backward(query, key, **kwargs):
    """Return the schedule and the implementation that a Hopper GPU runs a call of shapes with."""
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (query, key, key)]

    def attend(*arrays):
        return dot_product_attention(*arrays, **kwargs)

    with pretend_device("gpu", "9.0"), watch_dispatch() as calls:
        jax.eval_shape(attend, *arrays)
    chosen, _ = calls[0]
    return chosen.schedule, chosen.name


@needs_kernels
@pytest.mark.parametrize(
    "query, key, how, fused",
    [
        (LONG, LONG, {"is_causal": True}, True),
        (LONG, LONG, {"is_causal": True, "implementation": "pallas"}, True),
        (LONG, LONG, {"is_causal": True, "implementation": "xla"}, False),
        (LONG, LONG, {"is_causal": True, "memory_limit": "140MB"}, True),
        # 134 MB for the sums, 2 for rows
        (LONG, LONG, {"is_causal": True, "memory_limit": "130MB"}, False),
        ((4, 4096, 16, 128), (4, 4096, 16, 128), {}, True),
        # 2,048 keys a query: 3 % slower
        ((1, 4096, 16, 128), (1, 4096, 16, 128), {"is_causal": True}, False),
        ((8, 4096, 8, 64), (8, 4096, 8, 64), {}, True),
        ((1, 4096, 4, 128), (1, 4096, 4, 128), {}, True),  # 2^26 logits
        ((1, 4096, 3, 128), (1, 4096, 3, 128), {}, False),  # not measured
        ((2, 8192, 16, 128), (2, 8192, 4, 128), {"is_causal": True}, True),  # 512 blocks
        # 256 blocks: 7 % slower
        ((2, 8192, 16, 128), (2, 8192, 2, 128), {"is_causal": True}, False),
        ((2, 8192, 16, 64), (2, 8192, 2, 64), {"is_causal": True}, True),
        ((2, 8192, 16, 128), (2, 8192, 2, 128), {}, True),
        ((1, 4096, 16, 128), (1, 32768, 16, 128), {}, True),
        (LONG, LONG, {"is_causal": True, "logits_soft_cap": 20.0}, True),
        ((2, 8192, 32, 64), (2, 8192, 32, 64), {"logits_soft_cap": 20.0}, False),  # not faster
        # not measured; or windows, where little is gained
        ((1, 8192, 32, 128), (1, 32768, 32, 128), {"is_causal": True}, False),
        ((2, 8192, 16, 96), (2, 8192, 16, 96), {"is_causal": True}, False),
        ((2, 8192, 16, 256), (2, 8192, 16, 256), {"is_causal": True}, False),
        (LONG, LONG, {"is_causal": True, "q_offset": 1}, False),
        (LONG, LONG, {"local_window_size": (4095, 0)}, False),
        (LONG, LONG, {"local_window_size": (None, 4)}, False),
        (LONG, LONG, {"key_value_seq_lengths": np.full(2, 8000, np.int32)}, False),
        (LONG, LONG, {"query_seq_lengths": np.full(2, 8000, np.int32)}, False),
        (LONG, LONG, {"q_offset": np.zeros(2, np.int32), "is_causal": True}, False),
        (LONG, LONG, {"query_segment_ids": np.zeros((2, 8192), np.int32)}, False),
        (LONG, LONG, {"mask": np.ones((2, 1, 1, 8192), bool)}, False),
        # no kernel runs these: refused if asked for "fused", not if for "fastest"
        (LONG, LONG, {"chunk_size": 512}, False),
        (LONG, LONG, {"bias": np.zeros((1, 1, 1, 8192), jnp.bfloat16)}, False),
    ],
)
def test_the_fastest_backward_is_fused_where_that_was_measured_to_be_faster(query, key, how, fused):
    """A call that is not fused runs as it does without the argument."""
    schedule, name = choose_backward(query, key, **how, backward="fastest")
    usual, usual_name = choose_backward(query, key, **how)
    assert schedule == dataclasses.replace(usual, fused_backward=fused)
    assert name == usual_name
    assert not usual.fused_backward


@needs_kernels
def test_explain_says_why_the_other_implementations_cannot_run_the_call_as_asked():
    x = jax.ShapeDtypeStruct((1, 8191, 16, 72), jnp.bfloat16)

    def reason_against(name, **kwargs):
        lines = memeff.explain(x, x, x, **kwargs).splitlines()
        return next(line for line in lines if line.startswith(f'"{name}": '))

    with pretend_device("gpu", "9.0"):
        for name in ("xla", "reference"):
            assert reason_against(name, backward="fused").endswith('support backward="fused".')
        assert "do not support chunk_size" in reason_against("pallas", chunk_size=128)
        limited = reason_against("pallas", memory_limit="100MiB")
        assert limited == '"pallas": the kernels need more than memory_limit.'
        with pytest.raises(ValueError, match="in kernels. Raise the limit.* or omit `backward`"):
            memeff.explain(x, x, x, memory_limit="100MiB", backward="fused")


@needs_kernels
def test_the_fastest_backward_is_told_and_planned():
    x = jax.ShapeDtypeStruct(LONG, jnp.bfloat16)

    def gradient_bytes(**kwargs):
        return memeff.plan(x, x, x, device="H200", is_causal=True, **kwargs).gradient_bytes

    with pretend_device("gpu", "9.0"):
        assert "fused into one" in memeff.explain(x, x, x, is_causal=True, backward="fastest")
    sums = 4 * 2 * 8192 * 16 * 128
    assert gradient_bytes(backward="fastest") == gradient_bytes() + sums
    assert gradient_bytes(backward="fused") == gradient_bytes() + sums


def test_the_fastest_backward_runs_where_there_are_no_kernels():
    x = jnp.ones((1, 5, 2, 3))
    for implementation in (None, "xla", "reference"):
        fastest = dot_product_attention(x, x, x, backward="fastest", implementation=implementation)
        usual = dot_product_attention(x, x, x, implementation=implementation)
        assert (fastest == usual).all()
