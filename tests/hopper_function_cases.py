"""Named calls of the Hopper kernels with the functions of hopper_user_functions.py.

The oracle knows biases and masks. So what a score adds is a bias for it, with its chain rule.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import hopper_user_functions as user
import jax
import numpy as np
from cases import Sizes
from conftest import cotangents
from hopper_cases import bf16, f32, i32, interpreted, small

from memeff import dot_product_attention, masks


class Case(NamedTuple):
    """A call. Its functions in NumPy take b, n, i, j of all pairs (see `pairs`)."""

    z: Sizes
    functions: Callable  # from params to keyword arguments of the call
    bias: Callable | None = None  # from params, b, n, i, j: what the score adds
    mask: Callable | None = None
    params: Any = ()  # floats
    slopes: Callable | None = None  # derivatives of the bias by each param: [params, B, N, T, S]
    kwargs: dict[str, Any] = {}
    dtype: Any = bf16


# ---- running


def pairs(case: Case) -> list[np.ndarray]:
    """Return b, n, i and j of all pairs, [B, N, T, S]; i counts among the keys."""
    z = case.z
    offset = np.broadcast_to(case.kwargs.get("q_offset", 0), (z.B,))
    b, n, i, j = np.ogrid[: z.B, : z.N, : z.T, : z.S]
    return np.broadcast_arrays(b, n, i + offset[:, None, None, None], j)


def call(case: Case, implementation, params, *args):
    """Return out and lse."""
    return dot_product_attention(
        *args,
        **case.functions(params),
        **case.kwargs,
        implementation=implementation,
        return_residual=True,
    )


def differentiated(case: Case, args, cotangent=None):
    """Return (out, lse), and gradients of params, query, key and value."""
    if cotangent is None:
        cotangent = cotangents(args, case.dtype)

    @jax.jit
    def both(params, args):
        results, pull = jax.vjp(functools.partial(call, case, "pallas"), params, *args)
        return results, pull(cotangent)

    return jax.tree.map(np.asarray, both(case.params, args))


def run(case: Case, args):
    """Return what `differentiated` does, from the interpreter."""
    with interpreted():
        return differentiated(case, args)


# ---- the cases

CASES = {
    "alibi": Case(
        small(T=100, S=150, K=2, G=2),
        functions=user.alibi,
        bias=user.alibi_bias,
        params=np.linspace(0.02, 0.3, 4).astype(f32),
        slopes=user.alibi_slopes,
        kwargs=dict(is_causal=True),
    ),
    "alibi, 128, float16": Case(
        small(T=130, S=130, H=128, D=100),
        functions=user.alibi,
        bias=user.alibi_bias,
        params=np.array([0.1], np.float16),
        slopes=user.alibi_slopes,
        dtype=np.float16,
    ),
    "of pairs, offsets": Case(  # also keys past the last query, where the score is large
        small(B=2, T=70, S=200),
        functions=user.by_side,
        bias=user.by_side_bias,
        kwargs=dict(is_causal=True, q_offset=i32([-20, 61])),
    ),
    "numbers of keys": Case(  # they come with values, also where no tile has a mask
        small(T=70, S=520),
        functions=user.key_numbers,
        bias=user.key_numbers_bias,
        kwargs=dict(local_window_size=(None, 500)),
    ),
    "numbers of queries": Case(
        small(B=1, T=90, S=130, G=2),
        functions=user.query_params,
        bias=user.query_params_bias,
        params=user.QUERY_PARAMS,
        slopes=user.query_params_slopes,
        kwargs=dict(local_window_size=(30, 40)),
    ),
    "t5": Case(  # tiles lie on both sides of the first tile that is visited
        small(T=70, S=400, G=2),
        functions=user.t5,
        bias=user.t5_bias,
        params=user.TABLE[:, :2],
        slopes=user.by_entry(user.t5_at, (32, 2)),
        kwargs=dict(q_offset=150),
    ),
    "t5, causal, offsets": Case(
        small(B=2, T=130, S=300, K=2, G=2, H=100, D=128),
        functions=user.t5_causal,
        bias=user.t5_causal_bias,
        params=user.TABLE.astype(bf16),
        slopes=user.by_entry(user.t5_causal_at, (32, 4)),
        kwargs=dict(is_causal=True, q_offset=i32([-20, 161])),
    ),
    # params that the kernel for dq sums as well, and one mask that is read at them
    "differences, masked": Case(
        small(B=2, T=90, S=130, G=2),
        functions=user.differences,
        bias=user.differences_bias,
        mask=user.differences_mask,
        params=user.TABLE[0, :1] * np.arange(1, 7, dtype=f32),
        slopes=user.differences_slopes,
    ),
    "numbers of keys that learn": Case(
        small(T=70, S=130),
        functions=user.key_params,
        bias=user.key_params_bias,
        params=user.KEY_PARAMS,
        slopes=user.key_params_slopes,
        kwargs=dict(is_causal=True, q_offset=60),
    ),
    "documents": Case(small(B=2, T=130, S=130), functions=user.documents, mask=user.documents_mask),
    "prefix": Case(small(B=2, T=70, S=140), functions=user.prefix, mask=user.prefix_mask),
    "composed": Case(
        small(T=140, S=200, H=128, D=128), functions=user.composed, mask=user.composed_mask
    ),
    # the last row of the first head sees nothing
    "of heads": Case(small(T=70, S=130, G=2), functions=user.heads, mask=user.heads_mask),
    "everything": Case(
        small(B=2, T=70, S=280, G=3, H=40, D=8),
        functions=user.everything,
        bias=user.everything_bias,
        mask=user.everything_mask,
        params=np.array([0.02, 0.1, 0.3], f32),
        slopes=user.alibi_slopes,
        kwargs=dict(
            local_window_size=(100, 30),
            q_offset=i32([0, 40]),
            key_value_seq_lengths=i32([280, 111]),
            query_seq_lengths=i32([70, 9]),
            logits_soft_cap=4.0,
            scale=0.2,
        ),
    ),
    "segments": Case(
        small(T=130, S=130),
        functions=user.every_second,
        mask=user.every_second_mask,
        kwargs=dict(query_segment_ids=user.sorted_ids(1, 130, 5), is_causal=True),
    ),
}

# Block masks, keyword arguments, and sizes. Some tiles are whole; with lengths none are.
BLOCKED = {
    "documents": (masks.documents(np.repeat([0, 1], [330, 190])), {}, small(T=520, S=520)),
    "causal, 128": (
        masks.causal() & masks.documents(np.repeat([0, 1], [330, 70])),
        {},
        small(T=400, S=400, H=128, D=128),
    ),
    "lengths, window": (
        masks.causal() | masks.prefix(100),
        dict(key_value_seq_lengths=i32([250, 0]), local_window_size=(150, None)),
        small(B=2, T=140, S=300),
    ),
}
