"""Call the Ampere kernels."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.device import current_device
from memeff.logits import LOG2_E
from memeff.pallas.ampere.backward import Arrays, gradients
from memeff.pallas.ampere.forward import Tiling, attend
from memeff.pallas.hopper.backward_common import count_term_gradients, float16_lift
from memeff.pallas.hopper.layout import (
    DIMS,
    dims_of,
    fold_heads,
    head_dim_to_read,
    pad_rows,
    pad_scalars,
    pad_tokens,
    padded_width,
    replace_mask,
    scalars_of,
    split_query,
    unfold_heads,
)
from memeff.pallas.partitioning import partitioned
from memeff.pallas.user_functions import calls
from memeff.problem import Gradients, LogitParams, Operands, Problem
from memeff.softmax import Lse, LseFor, row_dots

# Compute capabilities whose multiprocessors have 160 KiB of shared memory or more, for two thread
# blocks of the larger tiles. The others, such as 8.6, 8.9 and 12.0, have 100 KiB.
LARGE_SHARED_MEMORY = ("8.0", "8.7", "9.0", "10.0", "10.3", "11.0")


def forward_tiling(operands: Operands) -> Tiling:
    """Return the tiling of the forward."""
    return tiling_for(padded_width(operands))


def tiling_for(width: int) -> Tiling:
    """Return the tiling of the forward for a padded head dim. None was timed."""
    is_large = current_device().capability in LARGE_SHARED_MEMORY
    return Tiling(128 if is_large or width <= 64 else 64, 64)


def describe(operands: Operands) -> str:
    """Return a phrase that names the kernels and their tiles."""
    rows, keys = forward_tiling(operands)
    return f"Ampere kernels, tiles of {rows} x {keys} logits, compiled for, never timed on this GPU"


def forward(
    problem: Problem, operands: Operands, lse_for: LseFor = "caller"
) -> tuple[Array, Lse | None]:
    """Return out [B, K, G, T, D], and lse [B, K, G, T] if wanted."""
    operands = replace_mask(operands)
    scalars = scalars_of(problem, operands)
    leaves, structure = jax.tree.flatten(scalars)
    on_tiles = calls.tile_functions(problem, operands)
    want_lse = lse_for is not None
    tiling = forward_tiling(operands)

    def call(query, key, value, *leaves):
        B, T, K, G, _ = query.shape
        arrays = lax.collapse(query, 2, 4), key, value
        width = padded_width(operands)
        arrays = tuple(pad_tokens(x, head_dim_to_read(x.shape[-1], width)) for x in arrays)
        lengths = T, key.shape[1]
        padded_scalars = pad_scalars(jax.tree.unflatten(structure, leaves))
        out, lse = attend(on_tiles, lengths, arrays, padded_scalars, want_lse, tiling)
        out = unfold_heads(out, (B, T, K, G), value.shape[-1])
        return (out,) if lse is None else (out, lse[..., :T].reshape(B, K, G, T))

    dims_out = ("bkgtd", "bkgt") if want_lse else ("bkgtd",)
    run = partitioned(call, (*DIMS, *dims_of(scalars)), dims_out)
    out, *lses = run(*split_query(operands, operands.shape.K), *leaves)
    return out, Lse(lses[0], None) if want_lse else None


def why_not_backward(problem: Problem, operands: Operands) -> str | None:
    """Return why the kernels cannot compute the gradient of a call that they run; None if they can.

    They sum no cotangents of the terms of the logits.
    """
    on_tiles = calls.tile_functions(problem, operands, "all")
    scalars = scalars_of(problem, replace_mask(operands))
    if count_term_gradients(on_tiles, scalars) or calls.needs_extra_pass(problem, operands):
        return "their gradient does not support arrays in the logits"
    return None


def backward(
    problem: Problem,
    operands: Operands,
    out: Array,
    lse: Lse,
    dout: Array,
    dlse: Array | None,
) -> Gradients:
    """Return gradients from `out`, `dout` [B, K, G, T, D] and `lse`, `dlse` [B, K, G, T].

    `dlse` is None if lse has no cotangent.
    """
    operands = replace_mask(operands)
    scalars = scalars_of(problem, operands)
    leaves, structure = jax.tree.flatten(scalars)
    on_tiles = calls.tile_functions(problem, operands)
    delta = -row_dots(out, dout, jnp.float32)
    if dlse is not None:
        delta = delta + dlse
    lse_bits = lse.high * LOG2_E - float16_lift(operands.query.dtype)
    width = padded_width(operands)
    stages = 2 if width <= 64 or current_device().capability in LARGE_SHARED_MEMORY else 1

    def call(query, key, value, dout, lse, delta, *leaves):
        _, T, K, G, H = query.shape
        B, S, _, D = value.shape
        arrays = lax.collapse(query, 2, 4), key, value, fold_heads(dout)
        arrays = (pad_tokens(x, head_dim_to_read(x.shape[-1], width)) for x in arrays)
        inputs = Arrays(*arrays, pad_rows(lse), pad_rows(delta))
        padded_scalars = pad_scalars(jax.tree.unflatten(structure, leaves))
        dq, dk, dv = gradients(on_tiles, (T, S), inputs, padded_scalars, stages)
        dq = dq[:, :T, :, :H].reshape(B, T, K, G, H)
        return dq, dk[:, :S, :, :H], dv[:, :S, :, :D]

    run = partitioned(call, (*DIMS, "bkgtd", "bkgt", "bkgt", *dims_of(scalars)), DIMS)
    arrays = split_query(operands, operands.shape.K)
    dq, dk, dv = run(*arrays, dout, lse_bits, delta, *leaves)
    return Gradients(lax.collapse(dq, 2, 4), dk, dv, LogitParams())
