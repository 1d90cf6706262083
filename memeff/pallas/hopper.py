"""Attention on Hopper (H100, H200) by Pallas' Mosaic GPU kernels: what they can run, and arrays as they want them.

Forward: `hopper_forward`. Backward: `hopper_backward`, after delta = rowsum(dout * out) - dlse. Head dims are padded to
multiples of 64; above 128 the chunked path takes the gradient, from this out and lse.
"""

import jax.numpy as jnp
from jax import Array

from memeff.pallas import hopper_backward, hopper_forward
from memeff.pallas.walk import Scalars
from memeff.problem import LOG2_E, Gradients, Lse, LseFor, Operands, Problem, Terms

MULTIPLE = 64  # of head dims


def how(problem: Problem, operands: Operands) -> str:
    """The kernels in words."""
    tiling = forward_tiling(operands)
    return f"Hopper kernels, tiles of {tiling.rows} x {tiling.keys} logits"


def forward_tiling(operands: Operands) -> hopper_forward.Tiling:
    """Fastest on an H200 (bfloat16, 8192 tokens) at head dims 64 and 128."""
    largest = max(map(_padded_dim, (operands.query.shape[-1], operands.value.shape[-1])))
    if largest == 64:
        return hopper_forward.Tiling(3, 128, 3)
    return hopper_forward.Tiling(2, 128, 2) if largest == 128 else hopper_forward.Tiling(2, 64, 2)


def backward_tilings(operands: Operands) -> tuple[hopper_backward.Tiling, hopper_backward.Tiling]:
    """For dq, and for dk and dv."""
    largest = max(map(_padded_dim, (operands.query.shape[-1], operands.value.shape[-1])))
    if largest == 64:
        return hopper_backward.Tiling(2, 128, 3), hopper_backward.Tiling(2, 64, 4)
    return hopper_backward.Tiling(2, 128, 2), hopper_backward.Tiling(2, 64, 2)


def _padded_dim(size: int) -> int:
    return -(-size // MULTIPLE) * MULTIPLE


def _padded(x: Array) -> Array:
    more = _padded_dim(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def _scalars(operands: Operands) -> Scalars:
    B = operands.query.shape[0]
    given = operands.q_offset, operands.q_lengths, operands.kv_lengths
    return Scalars(*(None if x is None else jnp.broadcast_to(x, (B,)) for x in given))


def forward(problem: Problem, operands: Operands, lse_for: LseFor = "caller") -> tuple[Array, Lse | None]:
    """out [B, K, G, T, D] in the query's dtype, lse [B, K, G, T]."""
    (B, T, K, G, H), D = operands.query.shape, operands.value.shape[-1]
    query, key, value = (_padded(x) for x in (operands.query.reshape(B, T, K * G, H), operands.key, operands.value))
    out, lse = hopper_forward.attend(
        problem, query, key, value, _scalars(operands), lse_for is not None, forward_tiling(operands)
    )
    out = out[..., :D].reshape(B, T, K, G, D).transpose(0, 2, 3, 1, 4)
    return out, None if lse is None else Lse(lse[..., :T].reshape(B, K, G, T), None)


def backward(problem: Problem, operands: Operands, out: Array, lse: Lse, dout: Array, dlse: Array | None) -> Gradients:
    """Gradients from `out`, `dout` [B, K, G, T, D] and `lse`, `dlse` [B, K, G, T] (None: no cotangent)."""
    (B, T, K, G, H), D = operands.query.shape, operands.value.shape[-1]
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
    delta = delta if dlse is None else delta - dlse
    rows = [x.reshape(B, K * G, T) for x in (lse.high * LOG2_E, delta)]
    rows = [jnp.pad(x, [(0, 0), (0, 0), (0, -T % 128)]) for x in rows]
    dout = dout.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, D)
    arrays = operands.query.reshape(B, T, K * G, H), operands.key, operands.value, dout
    arrays = *(_padded(x) for x in arrays), *rows
    tilings, scalars = backward_tilings(operands), _scalars(operands)
    dq = hopper_backward.queries(problem, arrays, scalars, tilings[0])[..., :H].reshape(operands.query.shape)
    dk, dv = hopper_backward.keys(problem, arrays, scalars, tilings[1])
    return Gradients(dq, dk[..., :H], dv[..., :D], Terms())
