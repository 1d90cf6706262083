"""Call the Ampere kernels."""

import jax
from jax import Array, lax

from memeff.device import current_device
from memeff.pallas.ampere.forward import Tiling, attend
from memeff.pallas.hopper.layout import (
    DIMS,
    dims_of,
    head_dim_to_read,
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
from memeff.problem import Operands, Problem
from memeff.softmax import Lse, LseFor

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
