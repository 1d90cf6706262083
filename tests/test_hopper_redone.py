"""Rows and tiles that the Hopper kernels compute again, and numbers that nobody sees.

The early tiles give a row the fixed maximum of its softmax. A row in which this maximum fails is
done again, with a running maximum. The kernels run in Mosaic's interpreter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_result, cotangents, plain_call, true_call
from hopper_cases import (
    CASES,
    NOTHING_HIDDEN,
    RESULTS,
    assert_equal_bits,
    bf16,
    draw,
    forward,
    forward_and_gradients,
    i32,
    needs_kernels,
    not_finite,
    not_finite_products,
    position_arguments,
    run_kernels,
    small,
    unseen_filled,
)

pytestmark = needs_kernels

# ---- rows whose fixed maximum fails


@pytest.mark.parametrize(
    "where", [400, pytest.param(3, marks=pytest.mark.slow)], ids=["late", "early"]
)
def test_a_key_that_dwarfs_the_others(where):
    """A key far larger than all others makes its rows one-hot.

    The sums of these rows overflow because their fixed maximum is older than the key, or all else
    vanishes beside the key. Their dq is a difference of large terms that cancel only where out
    equals a value, bit for bit. In plain attention it does, because the largest p is 1. Here dq is
    off by p's rounding where the fixed maximum was kept (see docs/limits.md).
    """
    query, key, value = draw(bf16, small(T=128, S=512))
    key[:, where] *= bf16(200)
    args = query, key, value
    result = run_kernels(args, {})
    truth = true_call(args, {}, "bfloat16")
    plain = plain_call(args, {}, "bfloat16")
    expected = truth.grads["query"]
    worst = max(np.abs(x.grads["query"] - expected).max() for x in plain)
    dq = result.grads.pop("query")
    assert np.abs(dq - expected).max() <= 8 * worst
    assert_result(result, plain, truth, "bfloat16", "far")


def assert_only_later_rows_change(before, after):
    """Check that rows up to 80 have the same bits, and that later ones are finite and differ."""
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[:, :80], new[:, :80])
        assert np.isfinite(new).all()
        assert (old[:, 80:] != new[:, 80:]).any()


def test_a_row_that_fails_changes_no_bit_of_another():
    """Causality holds in bits: the last keys change no row of the tile that does not see them."""
    query, key, value = draw(bf16, small(T=128, S=512))
    causal = functools.partial(forward, is_causal=True, q_offset=384 - 64)
    before = causal((query, key, value))
    key[:, 400] *= bf16(300)  # row 80 and later ones see it
    assert_only_later_rows_change(before, causal((query, key, value)))


@not_finite_products
def test_rows_that_fail_leave_the_others_as_they_were():
    """A key that only 48 of 128 rows feel, after their maximum is fixed, changes only these rows.

    Their sums overflow. Several tiles follow the first, as in the test below.
    """
    query, key, value = draw(bf16, small(T=128, S=640))
    query[:, :80, :, 0] = 0
    query[:, 80:, :, 0] = 1
    before = forward((query, key, value))
    key[:, 100, :, 0] = 3000
    assert_only_later_rows_change(before, forward((query, key, value)))


@pytest.mark.parametrize(
    "dtype, bits", [(bf16, 80), (bf16, 200), (np.float16, 40)], ids=["80", "200", "float16"]
)
def test_a_row_whose_maximum_is_too_small_takes_the_third_round_alone(dtype, bits, monkeypatch):
    """A logit 80 bits above the maximum needs no other round, and one 200 bits above it the third.

    Rounds two and four would store zeros here, and every one NaN for 80 bits.
    """
    from memeff.pallas.hopper.forward_compute import KeyTileLoop

    redo_step = KeyTileLoop._redo_step

    def mark(self, *args):
        m, l, o = redo_step(self, *args)
        if bits == 80:
            return m, l, o + np.nan
        third = self.state.round == 3
        return m, jnp.where(third, l, jnp.ones_like(l)), jnp.where(third, o, jnp.zeros_like(o))

    monkeypatch.setattr(KeyTileLoop, "_redo_step", mark)
    query, key, value = draw(dtype, small(T=bits, S=384))  # jit keeps a program for each shape
    query[..., 0] = 1
    key[:, 200, :, 0] = bits * np.log(2) * np.sqrt(query.shape[-1])
    out, lse = forward((query, key, value))
    heads = out.shape[2] // value.shape[2]
    expected = np.repeat(value[:, 200:201], heads, 2).repeat(bits, 1)
    np.testing.assert_allclose(out, expected, rtol=2.0**-7 if bits == 80 else 0)
    assert (lse > (bits - 20) * np.log(2)).all()


@pytest.fixture
def nan_if_redone(monkeypatch):
    """Put NaN into rows that are computed again."""
    from memeff.pallas.hopper.forward_compute import KeyTileLoop

    redo_step = KeyTileLoop._redo_step

    def mark(self, *args):
        m, l, o = redo_step(self, *args)
        return m, l, o + np.nan

    monkeypatch.setattr(KeyTileLoop, "_redo_step", mark)


@pytest.mark.parametrize("lengths", [{}, {"query_seq_lengths": i32([230])}], ids=["", "length"])
def test_rows_behind_the_last_query_do_not_fail(lengths, monkeypatch, nan_if_redone):
    """Two warpgroups of the last tile have no query, and nothing is done again."""
    from memeff.pallas.hopper import calls

    monkeypatch.setattr(calls, "forward_tiling", lambda *_: calls.Tiling(3, 128, 3, 2))
    T = 256 if not lengths else 230
    out, _ = forward(draw(bf16, small(T=T, S=T)), is_causal=True, **lengths)
    assert np.isfinite(out).all()


def test_an_attention_sink_in_float16_is_not_done_again(nan_if_redone):
    """The first key may have logits far beyond float16's range for exponentials."""
    query, key, value = draw(np.float16, small(T=530, S=530))
    query[..., 0] = 1
    key[:, 0, :, 0] = 40 * np.sqrt(query.shape[-1])
    out, _ = forward((query, key, value), is_causal=True)
    expected = np.repeat(value[:, :1], out.shape[2] // value.shape[2], 2).repeat(530, 1)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-3)


# ---- numbers that nobody sees


@not_finite_products
def test_what_nobody_sees_changes_no_bit_of_rows_whose_maximum_fails():
    """Hidden NaN changes no bit of rows whose maximum is too small: the fourth round cleans it.

    All 128 rows of the tile are such, because others would ask for the second round.
    """
    query, key, value = draw(bf16, small(T=128, S=640))
    query[..., 0] = 1
    key[:, 100, :, 0] = 3000
    shorter = functools.partial(forward, key_value_seq_lengths=i32([600]))
    clean = shorter((query, key, value))
    value[:, 600:] = np.nan
    assert_equal_bits(shorter((query, key, value)), clean)


@not_finite_products
def test_a_visible_nan_stays_in_its_column_where_the_maximum_fails():
    """Other columns are those of a call without NaN."""
    query, key, value = draw(bf16, small(T=112, S=512))
    query[..., 0] = 1
    key[:, 100, :, 0] = 3000
    clean, _ = forward((query, key, value))
    value[:, 300, :, 5] = np.nan
    out, _ = forward((query, key, value))
    assert np.isnan(out[..., 5]).all()
    np.testing.assert_array_equal(np.delete(out, 5, -1), np.delete(clean, 5, -1))


@not_finite_products
def test_what_nobody_sees_changes_no_bit_of_tiles_without_masks():
    """Hidden NaN in a tile with masks changes no bit, although all rows are done again.

    Several tiles follow the first. The interpreter cannot begin their sum with earlier results, so
    it adds these at the end, in both rounds.
    """
    query, key, value = draw(bf16, small(T=128, S=640))
    shorter = functools.partial(forward, key_value_seq_lengths=i32([600]))
    clean = shorter((query, key, value))
    value[:, 600:] = np.nan
    assert_equal_bits(shorter((query, key, value)), clean)


FAST = (("129", "split"), ("keys behind the last query", "fused"))


def cases_with_backward():
    """Return parameters: each case that hides tokens, with each form of its gradient."""
    parameters = []
    for name in CASES:
        if name in NOTHING_HIDDEN:
            continue
        for backward in ("split", "fused"):
            marks = () if (name, backward) in FAST else pytest.mark.slow
            parameters.append(pytest.param(name, backward, marks=marks))
    return parameters


@not_finite
@pytest.mark.parametrize("name, backward", cases_with_backward())
def test_what_nobody_sees_changes_no_bit(name, backward, monkeypatch):
    """Hidden numbers in keys, values, queries and cotangents change no bit of any result.

    The fused form is done again, as two kernels, which are those of the clean call where that
    divides no groups. The interpreter takes its sums of dq for races.
    """
    z, kwargs = CASES[name]
    if backward == "fused" and z.G > 1:
        for kernel in ("backward_key", "fused"):
            patched = f"memeff.pallas.hopper.{kernel}.group_parts"
            monkeypatch.setattr(patched, lambda *_: 1)
        jax.clear_caches()  # another test may have traced this call
    args = draw(bf16, z)
    cotangent = cotangents(args, "bfloat16")
    seen = oracle.seen_by(*args[:2], **position_arguments(kwargs))
    dirty_args, dirty_cotangent, has_hidden = unseen_filled(args, seen, cotangent)
    assert has_hidden
    detect_races = backward == "split"
    clean = run_kernels(
        args, kwargs | {"backward": "split"}, cotangent=cotangent, detect_races=detect_races
    )
    dirty = run_kernels(
        dirty_args,
        kwargs | {"backward": backward},
        cotangent=dirty_cotangent,
        detect_races=detect_races,
    )
    assert_equal_bits(dirty, clean)


@pytest.mark.slow
def test_a_tile_that_fails_is_done_again_among_more_than_a_block_can_tell_apart():
    """Only results that see the NaN change, although tiles 5 and 17 of one block share bits.

    Both of these tiles are done again.
    """
    query, key, value = draw(bf16, small(T=60, S=60, K=20))
    dout, dlse = cotangents((query, key, value), "bfloat16")
    dirty_key = key.copy()
    dirty_key[:, 59, 17] = np.nan

    def run(key):
        kwargs = dict(is_causal=True)
        return forward_and_gradients((query, key, value), kwargs, dout, dlse, multiprocessors=1)

    for name, old, new in zip(RESULTS, run(key), run(dirty_key), strict=True):
        np.testing.assert_array_equal(np.delete(old, 17, 2), np.delete(new, 17, 2), err_msg=name)
        if name in ("out", "lse", "dq"):
            np.testing.assert_array_equal(old[:, :59], new[:, :59], err_msg=name)
            assert np.isnan(new[:, 59, 17]).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it_in_its_column():
    query, key, value = draw(bf16, small(T=200, S=200))
    value[:, 150, :, 5] = np.nan
    out, lse = forward((query, key, value), is_causal=True)
    expected = np.zeros(out.shape, bool)
    expected[:, 150:, :, 5] = True
    np.testing.assert_array_equal(np.isnan(out), expected)
    assert np.isfinite(lse).all()
