"""Numbers that nobody sees, and tangents that are not finite, in the tangent's Hopper kernel.

The kernel runs in Mosaic's interpreter.
"""

import numpy as np
import oracle
import pytest
from conftest import cotangents
from hopper_cases import (
    NOTHING_HIDDEN,
    assert_equal_bits,
    bf16,
    draw,
    f32,
    i32,
    needs_kernels,
    not_finite,
    position_arguments,
    small,
    unseen_filled,
)
from hopper_user_functions import mask_of_keys
from test_hopper_tangent import (
    CASES,
    assert_right,
    directions,
    interpreted,
    interpreted_tangents,
    jvp,
)

from memeff import scores
from memeff.pallas.hopper import tangent_compute

pytestmark = [needs_kernels, not_finite]
slow = pytest.mark.slow


def assert_dirt_changes_no_bit(args, along, dirty_args, dirty_along, kwargs, **functions):
    """Check that dirty arguments and tangents give the results of clean ones, bit for bit."""
    with interpreted():
        clean = jvp(args, along, kwargs, **functions)
        dirty = jvp(dirty_args, dirty_along, kwargs, **functions)
    assert_equal_bits(dirty, clean)


def hide(arrays, hidden, bad):
    """Return copies, with the number `bad` in hidden tokens."""
    copies = [x.copy() for x in arrays]
    for x in copies:
        x[hidden] = bf16(bad)
    return copies


@slow
@pytest.mark.parametrize("name", [n for n in CASES if n not in (*NOTHING_HIDDEN, "full")])
def test_what_nobody_sees_changes_no_bit_of_any_case(name):
    """Hidden numbers in keys, values, queries and their tangents change no bit."""
    z, kwargs = CASES[name]
    args = draw(bf16, z)
    along = directions(args)
    seen = oracle.seen_by(*args[:2], **position_arguments(kwargs))
    cotangent = cotangents(args, bf16)
    dirty_args, _, has_hidden = unseen_filled(args, seen, cotangent)
    assert has_hidden
    dirty_along = unseen_filled(along, seen, cotangent)[0]
    assert_dirt_changes_no_bit(args, along, dirty_args, dirty_along, kwargs)


@pytest.mark.parametrize(
    "bad", [np.nan, pytest.param(np.inf, marks=slow), pytest.param(3e38, marks=slow)]
)
def test_what_nobody_sees_changes_no_bit(bad):
    args = draw(bf16, small(T=60, S=200))
    along = directions(args)
    kwargs = dict(
        query_seq_lengths=i32([50]),
        key_value_seq_lengths=i32([145]),
        is_causal=True,
        q_offset=120,
    )
    query, key, value = args
    dq, dk, dv = along
    key, dk, value, dv = hide((key, dk, value, dv), np.s_[:, 145:], bad)
    query, dq = hide((query, dq), np.s_[:, 50:], bad)
    assert_dirt_changes_no_bit(args, along, (query, key, value), (dq, dk, dv), kwargs)


@slow
def test_what_a_mask_hides_changes_no_bit():
    hidden = np.isin(np.arange(200), [3, 77, 78, 150, 199])
    score_fn = scores.alibi(np.array([0.1], f32))
    mask_fn = mask_of_keys(~hidden)
    args = draw(bf16, small(T=70, S=200))
    along = directions(args)
    query, key, value = args
    dq, dk, dv = along
    key, dk, value, dv = hide((key, dk, value, dv), np.s_[:, hidden], np.nan)
    dirty_args = query, key, value
    dirty_along = dq, dk, dv
    assert_dirt_changes_no_bit(
        args, along, dirty_args, dirty_along, {}, score_fn=score_fn, mask_fn=mask_fn
    )


def test_what_nobody_sees_in_the_second_round_as_a_gpu_runs_it(monkeypatch):
    """Hidden NaN reaches no result where each tile of the second round has its own accumulator.

    A GPU begins this accumulator with the sum so far. The interpreter would add the sum at the end,
    which rounds differently. So it has a second round of its own, and other tests compare its bits.
    """
    monkeypatch.setattr(tangent_compute, "interpreting", lambda: False)
    args = draw(bf16, small(T=60, S=400))
    along = directions(args)
    # Each query sees tiles with a mask, and others without one between them.
    kwargs = dict(
        key_value_seq_lengths=i32([380]),
        local_window_size=(300, 0),
        q_offset=330,
    )
    query, key, value = args
    dq, dk, dv = along
    key, dk, value, dv = hide((key, dk, value, dv), np.s_[:, 380:], np.nan)
    tangents = interpreted_tangents((query, key, value), (dq, dk, dv), kwargs)
    assert_right(tangents, args, along, kwargs, "bfloat16", "second round")


@slow
@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_a_tangent_that_is_not_finite_reaches_who_sees_it(what):
    args = draw(bf16, small(T=200, S=200))
    along = directions(args)
    names = ["query", "key", "value"]
    along[names.index(what)][:, 150, :, 5] = np.nan
    dout, dlse = map(np.isnan, interpreted_tangents(args, along, dict(is_causal=True)))
    rows = {"query": np.s_[:, 150:151], "key": np.s_[:, 150:], "value": np.s_[:, 150:, :, 5]}
    expected = np.zeros(dout.shape, bool)
    expected[rows[what]] = True
    np.testing.assert_array_equal(dout, expected)
    np.testing.assert_array_equal(dlse, expected[..., 0])
