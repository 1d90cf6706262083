"""The ends of the range in the Hopper kernels, in Mosaic's interpreter.

Sums with a fixed maximum, or numbers in 16 bits, overflow or flush there.
"""

import functools

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import cotangents
from hopper_cases import (
    RESULTS,
    bf16,
    draw,
    f32,
    forward,
    forward_and_gradients,
    i32,
    needs_kernels,
    not_finite,
    small,
)

from memeff import dot_product_attention
from memeff.user_functions import Score

pytestmark = [needs_kernels, not_finite]


def test_a_row_that_sees_no_logit_in_its_first_tiles_is_done_again():
    """A score of -inf hides the first keys of some rows, which then have no maximum.

    Later logits of these rows lie 400 bits below 0.
    """
    # four tiles without masks, of which the first is the nearest
    args = draw(bf16, small(T=64, S=512))

    def score(s, b, h, i, j, p):
        hidden = (j < 260) & (i % 2 == 0)
        return jnp.where(hidden, -jnp.inf, s - 277.0)

    score_fn = Score(score)
    out, lse = forward(args, score_fn=score_fn)
    plain, plain_lse = dot_product_attention(
        *args, score_fn=score_fn, return_residual=True, implementation="reference"
    )
    np.testing.assert_allclose(f32(out), f32(plain), atol=8e-3)
    np.testing.assert_allclose(lse, plain_lse, rtol=1e-6)


@pytest.mark.parametrize(
    "size", [3e38, *(pytest.param(x, marks=pytest.mark.slow) for x in (1e30, 1e-30))]
)
def test_equal_keys_have_their_value(size):
    """The value may be so large that float32 does not hold the sum over keys."""
    query, key, value = draw(bf16, small(T=64, S=450))
    key[:] = 4
    value[:] = size
    out, lse = forward((query, key, value))
    expected = np.broadcast_to(value[:, :1], out.shape)
    np.testing.assert_array_equal(f32(out), f32(expected))
    assert np.isfinite(lse).all()


def test_keys_far_below_a_sink_count():
    """Keys 18.5 nats below a key whose value is 0 count, because there are 449.

    Another key is long, and orthogonal to every query.
    """
    query, key, value = draw(bf16, small(T=64, S=451))
    query[..., :2] = [1, 0]
    query[..., 2:] = 0
    key[..., :2] = 0
    key[:, 0] = 0
    key[:, -1] = 0
    key[:, 0, :, 0] = 148
    key[:, -1, :, 1] = 4096
    value[:, 0] = 0
    value[:, 1:] = np.abs(value[:, 1:])
    out, lse = forward((query, key, value))
    p = np.exp(-18.5)
    total = value.astype(np.float64).sum(1, keepdims=True)
    true = p * total / (1 + 450 * p)
    true_lse = 18.5 + np.log1p(450 * p)
    np.testing.assert_allclose(f32(out), np.broadcast_to(true, out.shape), rtol=2.0**-8)
    np.testing.assert_allclose(lse, true_lse, rtol=2e-7)


@pytest.mark.slow
def test_powers_of_two_in_values_and_cotangents_pass_through():
    """Values times 2^-100 and cotangents times 2^100 give the same bits, forward and backward."""
    query, key, value = draw(bf16, small(T=70, S=140))
    dout, dlse = cotangents((query, key, value), "bfloat16", dlse=False)
    run = functools.partial(
        forward_and_gradients, kwargs=dict(is_causal=True, query_seq_lengths=i32([66]))
    )

    def scaled(x, power):
        return (x.astype(f32) * f32(2.0) ** power).astype(bf16)

    base = run((query, key, value), dout=dout, dlse=dlse)
    other = run((query, key, scaled(value, -100)), dout=scaled(dout, 100), dlse=dlse)
    powers = (-100, 0, 0, 0, 100)
    for name, power, old, new in zip(RESULTS, powers, base, other, strict=True):
        np.testing.assert_array_equal(old * f32(2.0) ** power, new, err_msg=name)


# of values, and of keys over queries
SIZES = [(2.0**-14, 16), pytest.param(2.0**5, 1, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size, keys", SIZES, ids=["small", "large"])
def test_ds_in_float16(size, keys):
    """Gradients are right where float16 rounds ds much, or cannot hold it.

    Of small values, float16 holds ds in a few bits, and dq in all. Of large values, float16 does
    not hold the larger number that stands in for ds, and all is done again.
    """
    args = draw(np.float16, small(T=64, S=200))
    query, key, value = args
    query = query * np.float16(1 / keys)
    key = key * np.float16(keys)
    value = value * np.float16(size)
    dout, dlse = cotangents(args, np.float16, dlse=False)
    dout = dout * np.float16(max(1, size))
    _, _, *grads = forward_and_gradients((query, key, value), {}, dout, dlse)
    expected = oracle.gradients(query, key, value, dout=dout, dlse=dlse)
    held = ("query",) if keys > 1 else ("query", "key", "value")
    for name, x in zip(held, grads, strict=False):
        true = expected[name]
        error = np.linalg.norm(x - true) / np.linalg.norm(true)
        assert error < 2e-3, (name, error)


def test_keys_that_pad_a_tile_make_no_nan_of_a_fused_dq():
    """In float16, p of a key of zeros that only pads a tile may overflow, and dq has no NaN.

    It overflows in rows whose lse is far below 0.
    """
    query, key, value = draw(np.float16, small(T=64, S=70))
    query[:] = np.abs(query)
    key[:] = -np.abs(key)
    dout, dlse = cotangents((query, key, value), np.float16)
    args = query * np.float16(8), key, value
    fused = forward_and_gradients(args, dict(backward="fused"), dout, dlse)
    split = forward_and_gradients(args, dict(backward="split"), dout, dlse)
    _, lse, *_ = split
    assert (lse < -12).all()
    for name, x, y in zip(RESULTS, fused, split, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)
