"""Partial results of the Hopper kernels: out as two arrays, to merge with that of other keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_cases import (
    assert_partial_out_is_not_rounded,
    bf16,
    draw,
    f32,
    interpreted,
    needs_kernels,
    small,
)

from memeff.pallas.hopper import implementation
from memeff.problem import Operands, Problem, Schedule

pytestmark = needs_kernels


def test_partial_out_is_not_rounded_to_16_bits():
    assert_partial_out_is_not_rounded(implementation, "9.0")


def attention(query, key, value):
    """Return out [B, T, N, D] and lse [B, N, T] of one key head, in float64."""
    logits = np.einsum("btnh,bsh->bnts", query, key[:, :, 0]) * query.shape[-1] ** -0.5
    lse = np.log(np.exp(logits).sum(-1))
    return np.einsum("bnts,bsd->btnd", np.exp(logits - lse[..., None]), value[:, :, 0]), lse


@pytest.mark.parametrize(
    "redone, dtype",
    [(False, bf16), (True, bf16), (False, f32)],
    ids=["once", "redone", "float32"],
)
def test_carried_results_are_not_rounded(redone, dtype):
    """Keys in three calls: a part of them, none or all for some entries, and the rest.

    The batch entries see 128, 0 and 128 keys, then 60, 0 and 0, then 260, 40 and 0. With `redone`,
    one key is so large that its tile is done again.
    """
    query, key, value = draw(f32, small(B=3, T=70, S=448))
    key = np.array(key)
    if redone:
        key[0, 350] = 40 * query[0, 5, 0]
    rounded = [jnp.asarray(x, dtype) for x in (query, key, value)]
    counts = [(0, 128, [128, 0, 128]), (128, 60, [60, 0, 0]), (188, 260, [260, 40, 0])]

    @jax.jit
    def run(query, key, value):
        carried = None
        for n, (first, size, lengths) in enumerate(counts):
            keys = (x[:, first : first + size] for x in (key, value))
            operands = Operands(query, *keys, kv_lengths=jnp.int32(lengths))
            problem = Problem(scale=query.shape[-1] ** -0.5)
            last = n == len(counts) - 1
            out, lse = implementation.forward(
                problem, Schedule(partial_out=not last), operands, "caller", carried
            )
            carried = out, lse.high
        return out, lse.high

    with interpreted():
        out, lse = jax.tree.map(np.asarray, run(*rounded))
    out = out[:, 0].transpose(0, 2, 1, 3).astype(np.float64)  # b t n d
    for b in range(3):
        seen = np.concatenate([np.arange(n) + first for first, _, n in with_entry(counts, b)])
        one = [np.asarray(x, np.float64)[b : b + 1] for x in rounded]
        one[1:] = (x[:, seen] for x in one[1:])
        expected, expected_lse = attention(*one)
        np.testing.assert_allclose(lse[b, 0], expected_lse[0], rtol=1e-6, atol=2e-5)
        # p and out are rounded to 8 bits, or to 16; nothing is between the calls
        scale = np.abs(one[2]).max()
        error = np.abs(out[b] - expected[0]).max() / scale
        assert error < (2.0**-8 if dtype == bf16 else 2.0**-14), error


def with_entry(counts, b):
    """Return (first key, size, keys seen) of each call for batch entry b."""
    return [(first, size, lengths[b]) for first, size, lengths in counts]
