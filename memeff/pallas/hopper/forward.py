"""Compute attention on Hopper (sm_90a) in a persistent kernel whose work items are query tiles.

Each consumer warpgroup owns 64 queries i of a tile, and visits the tiles of keys j that the tile's
queries see (Dao 2023, algorithm 1). Logits are in base 2, that is multiplied by log2 e.
  Tiles with masks come first, in float16 also the first tile; and one without where these may leave
  a row without a logit; with a bias, as many as it takes until each row has one. They move a
  running maximum m:
  (1) raw = q_i k_j'                     (3) m' = max(m, rowmax s);  a = 2^(m - m')
  (2) s   = logits_from_dots(raw)        (4) l = a l + rowsum 2^(s - m');  o = a o + 2^(s - m') v_j
  The other tiles keep m, because softmax does not depend on what is subtracted from its logits.
  So nothing is rescaled, o stays in one accumulator, and q_i k_{j+1}' runs beside tile j's exp2:
  (5) p = 2^(s - m);  l = l + rowsum p;  o = o + p v_j
  At the end out = o / l, lse = (m + log2 l) / log2 e; with a sink, out = o / (l + 2^(sink - m)).
A row fails if its l exceeds 2^100 in (5), because a later logit exceeds m by as many bits, if its o
is not finite, or if its m is -inf before (5). Its tile is then done again at the end of the thread
block: if an o is not finite, as before, with NaN and Inf removed where nobody sees them; and by (1)
to (4) alone if a row fails again or its m was too small, for the latter without removing any unless
an o is then not finite. Rows that did not fail keep their results.
A row that passes has lost nothing. Its m is one of its logits, so l >= 1, and each p is at least
the softmax probability. Rounded to 16 bits, p loses what is below 2^-126 (in float16, 2^-24), as in
plain attention: of a row at most S 2^-126. Numbers above the range of float32 or float16 (p > 2^16,
o > 2^128) make o infinite or NaN, and the row fails. In bfloat16 the last round takes m 20 bits
above the largest logit. Then l <= 1 for S <= 2^20, and o is at most the largest value.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.bias import copy_bias
from memeff.pallas.hopper.forward_compute import ForwardKernel
from memeff.pallas.hopper.forward_memory import (
    Carried,
    ForwardScratch,
    Tiling,
    forward_scratch,
)
from memeff.pallas.hopper.mosaic import (
    Ref,
    head_rows,
    plgpu,
    whole_width,
)
from memeff.pallas.hopper.persistent import (
    ROWS,
    Ring,
    Roles,
    WorkState,
    run_persistent_kernel,
)
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import (
    MAX_PERSISTENT_POSITIONS,
    CallSizes,
    QueryWork,
    TileOrder,
    cache_order,
    find_query_work,
    order_for_bias,
    persistent_order,
    times_unknown,
)
from memeff.pallas.hopper.score_tile import copy_token_vectors
from memeff.pallas.hopper.tile_ranges import TileRange, tiles_visited, with_lists
from memeff.problem import Problem


def attend(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: tuple[Array, ...],
    scalars: Scalars,
    want_lse: bool,
    tiling: Tiling,
    carried: Carried | None = None,
) -> tuple[tuple[Array, ...], Array | None]:
    """Return out [B, T, N, D] in the dtype of the query, and lse [B, N, T'].

    With `tiling.out_in_parts` out is the sum of two arrays, otherwise there is one.
    `arrays` are query [B, T, N, H], key [B, S, K, H] and value [B, S, K, D]. H and D are multiples
    of 64, or of 8 if both are smaller. The arrays are padded to multiples of 8 tokens; `lengths`
    are T and S without padding. T' is T rounded up to a multiple of `tiling.rows`; lse is None
    unless `want_lse`. With `carried`, out and lse are those of its keys too; H equals D then.
    """
    query, key, value = arrays
    _, padded_T, N, H = query.shape
    B = scalars.batch_size(query)
    K, D = value.shape[2:]
    T, S = lengths
    sizes = CallSizes(B, T, S, K, N // K)
    width = whole_width(H), whole_width(D)
    tiles = -(-T // tiling.rows)
    items = B * N * tiles
    visited = tiles_visited(problem, lengths, tiling.rows, tiling.keys)
    bytes_read = max(1, S * (H + D) * 2 // sizes.G)
    blocks, order = choose_blocks(problem, scalars, visited, tiling.keys, B * N, bytes_read)
    order = order_for_bias(order, scalars, B)
    scalars = with_ranges(scalars, lengths, tiling.rows)
    scalars = with_lists(problem, scalars, lengths, (tiling.rows, tiling.keys))
    out_parts = 2 if tiling.out_in_parts else 1
    results = [jax.ShapeDtypeStruct((B, padded_T, N, D), query.dtype)] * out_parts
    if want_lse:
        results.append(jax.ShapeDtypeStruct((B, N, tiles * tiling.rows), jnp.float32))

    def roles(operands: Any, result_refs: tuple[Ref, ...], scratch: ForwardScratch) -> Roles:
        array_refs, scalar_refs, carried_refs = operands
        query_ref, _, value_ref = array_refs
        outputs = result_refs[:out_parts], result_refs[-1] if want_lse else None

        def consume(warpgroup, work: QueryWork, state: WorkState):
            results = *outputs, carried_refs
            kernel = ForwardKernel(
                problem, tiling, T, query_ref, value_ref, *results, scratch, warpgroup
            )
            return kernel.run_item(work, state)

        find = functools.partial(
            find_query_work, problem, sizes, scalar_refs, tiling.rows, tiling.keys, order
        )

        def find_work(index):
            work = find(index)
            if query.dtype == jnp.float16 and isinstance(work.visits, TileRange):
                # In many models all queries see a key there whose logits are far above the others.
                work = work._replace(visits=work.visits.with_first_masked())
            return work

        return Roles(
            find_work,
            consume,
            functools.partial(_copy_operands, tiling, array_refs, scratch),
            rings=(
                Ring(tiling.stages, True, (scratch.k_used, scratch.v_used)),
                Ring(tiling.queries, False, (scratch.q_used,)),
            ),
        )

    outputs = run_persistent_kernel(
        "memeff_forward",
        problem,
        (arrays, scalars, carried),
        results,
        forward_scratch(scalars, tiling, *width, query.dtype),
        roles,
        items=items,
        blocks=blocks,
        consumers=tiling.warpgroups,
        sums_over_rows=True,
        rounds=4,
    )
    return outputs[:out_parts], outputs[-1] if want_lse else None


def choose_blocks(
    problem: Problem,
    scalars: Scalars,
    visited: np.ndarray,
    size: int,
    heads: int,
    bytes_read: int,
) -> tuple[int, TileOrder]:
    """Return the number of thread blocks and the order of the items of `heads`.

    `visited`: tiles of `size` keys that each item of a head visits. `bytes_read`: by a head.
    """
    items = heads * visited.size
    if times_unknown(scalars) and visited.mean() * size > MAX_PERSISTENT_POSITIONS:
        return items, cache_order(heads, bytes_read)
    # one more for what an item costs besides its visits
    return persistent_order(problem, heads, 1 + visited)


def _copy_operands(
    tiling: Tiling,
    operands: tuple[Ref, Ref, Ref],
    scratch: ForwardScratch,
    work: QueryWork,
    state: WorkState,
) -> tuple[Array, Array]:
    """Copy the queries of a work item for each consumer, and its keys and values for all consumers.

    Return how many tiles of keys it visits, and 0 because the producer has no rows that could fail.
    """
    query_ref, key_ref, value_ref = operands
    query_vectors_s, key_vectors_s = scratch.token_vectors
    count = work.visits.total
    slot = lax.rem(state.items_done, jnp.int32(tiling.queries))
    pl.when(state.items_done >= tiling.queries)(lambda: plgpu.barrier_wait(scratch.q_used.at[slot]))
    for warpgroup in range(tiling.warpgroups):
        rows = pl.ds(work.row + warpgroup * ROWS, ROWS)
        ready = scratch.q_ready.at[slot]
        shared = scratch.q_s.at[slot * tiling.warpgroups + warpgroup]
        query = head_rows(query_ref, work.source.query, rows, work.n)
        plgpu.copy_gmem_to_smem(query, shared, ready)
        vector_slot = slot * tiling.warpgroups + warpgroup
        copy_token_vectors(work.scalars.by_query, rows, query_vectors_s, vector_slot, ready)

    @pl.loop(0, count)
    def _copy_visit(n):
        slot = lax.rem(state.tiles_visited + n, jnp.int32(tiling.stages))
        cols = pl.ds(work.visits.tile(n) * tiling.keys, tiling.keys)

        def copy_tile(ref, b, shared, ready, used):
            is_refill = state.tiles_visited + n >= tiling.stages
            pl.when(is_refill)(lambda: plgpu.barrier_wait(used.at[slot]))
            source = head_rows(ref, b, cols, work.k)
            plgpu.copy_gmem_to_smem(source, shared.at[slot], ready.at[slot])

        copy_tile(key_ref, work.source.key, scratch.k_s, scratch.k_ready, scratch.k_used)
        copy_tile(value_ref, work.source.value, scratch.v_s, scratch.v_ready, scratch.v_used)
        # Vectors of keys and the bias come with the values, because `clean_values` reads all.
        ready = scratch.v_ready.at[slot]
        copy_token_vectors(work.scalars.by_key, cols, key_vectors_s, slot, ready)
        rows = pl.ds(work.row, tiling.rows)
        copy_bias(work.scalars, work.n, rows, cols, scratch.bias_s, slot, ready)

    return count, jnp.int32(0)
