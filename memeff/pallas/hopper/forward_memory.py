"""Describe the tiles of the forward kernel and their shared memory."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from memeff.pallas.hopper.bias import bias_tiles
from memeff.pallas.hopper.mosaic import Barrier, Ref, interpreter_staging, plgpu, tile_ref
from memeff.pallas.hopper.persistent import ROWS
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.score_tile import TokenVectors, barrier_arrivals, scratch_shapes


class Tiling(NamedTuple):
    """Sizes of the forward's tiles, and how many of them are in shared memory."""

    warpgroups: int  # consumers
    keys: int  # of a tile
    stages: int  # slots for tiles of keys, and of values
    queries: int  # slots for tiles of queries
    # out is stored in two 16-bit parts, whose sum has 16 bits of fraction in bfloat16
    out_in_parts: bool = False
    parts: int = 1  # of each number, see parts.py

    @property
    def rows(self) -> int:
        """Return the number of queries of a tile, of all consumers."""
        return self.warpgroups * ROWS


class Carried(NamedTuple):
    """Results for the same queries at other keys, which the results of this call include.

    Batch entries are those of the call, not those of the query.
    """

    out: tuple[Any, ...]  # arrays [B, T, N, D], whose sum it is
    lse: Any  # [B, N, T'], float32


class ForwardScratch(NamedTuple):
    """Shared memory of a thread block, in the order in which it is allocated.

    A barrier `*_ready` is for copies into a slot, `*_used` for the consumers that have read it.
    """

    all_warpgroups: Barrier
    all_consumers: Barrier
    bad_columns_s: Ref  # [D] above 0 where a column of a tile of values is not finite
    failed_s: Ref  # [warpgroups, 64] above 0 where a row failed
    k_s: Ref  # [stages, c, H]
    k_ready: Barrier
    k_used: Barrier
    bad_keys_s: Ref  # [c] above 0 where a row of a tile of values is not finite
    token_vectors: TokenVectors  # of queries, which come with q; of keys, which come with v
    bias_s: Ref | None  # [stages, t, c], if it is of pairs; a tile comes with v
    old_out_ready: Barrier
    q_s: Ref  # [queries * warpgroups, 64, H]; out takes the place of q
    q_ready: Barrier
    q_used: Barrier
    lse_s: Ref  # [t]
    v_s: Ref  # [stages, c, D]
    v_ready: Barrier
    v_used: Barrier
    stage: Ref = None  # [warpgroups, 64, c], in the interpreter alone


def forward_scratch(scalars: Scalars, tiling: Tiling, H: int, D: int, dtype) -> ForwardScratch:
    """Return the types of a thread block's shared memory."""
    consumers = tiling.warpgroups
    stages = tiling.stages
    keys = tiling.keys
    slots = tiling.queries * consumers
    query_numbers, key_numbers = barrier_arrivals(scalars)
    vectors = scratch_shapes(scalars, (slots, ROWS), (stages, keys))
    return ForwardScratch(
        all_warpgroups=plgpu.Barrier(num_arrivals=consumers + 1),
        all_consumers=plgpu.Barrier(num_arrivals=consumers),
        bad_columns_s=plgpu.SMEM((D,), jnp.float32),
        failed_s=plgpu.SMEM((consumers, ROWS), jnp.float32),
        k_s=tile_ref(stages, keys, H, dtype),
        k_ready=plgpu.Barrier(num_barriers=stages),
        k_used=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        bad_keys_s=plgpu.SMEM((keys,), jnp.float32),
        token_vectors=vectors["token_vectors"],
        bias_s=bias_tiles(scalars, stages, tiling.rows, keys),
        old_out_ready=plgpu.Barrier(num_barriers=consumers),
        q_s=tile_ref(slots, ROWS, H, dtype),
        q_ready=plgpu.Barrier(
            num_arrivals=consumers * (1 + query_numbers), num_barriers=tiling.queries
        ),
        q_used=plgpu.Barrier(num_arrivals=consumers, num_barriers=tiling.queries),
        lse_s=plgpu.SMEM((consumers * ROWS,), jnp.float32),
        v_s=tile_ref(stages, keys, D, dtype),
        v_ready=plgpu.Barrier(
            num_arrivals=1 + key_numbers + (scalars.bias is not None), num_barriers=stages
        ),
        v_used=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        **interpreter_staging(consumers, ROWS, keys, dtype),
    )
