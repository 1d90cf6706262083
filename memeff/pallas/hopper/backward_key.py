"""Compute the gradients of key and value on Hopper, by steps (5) and (6) of `backward_common`."""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from memeff.pallas.hopper.backward_common import (
    Gradient,
    Tiling,
    choose_blocks,
    float16_lift,
    group_parts,
    not_finite,
    optional_slot,
    token_vectors,
    transposed_tile,
    undo_lift,
    wait_for_slot,
    zero_padding,
)
from memeff.pallas.hopper.bias import bias_tiles, copy_bias
from memeff.pallas.hopper.mosaic import (
    COL,
    Ref,
    accumulators,
    broadcast_vector,
    head_rows,
    hide_from_cse,
    interpreter_staging,
    plgpu,
    tile_ref,
    whole_width,
)
from memeff.pallas.hopper.nonfinite import clean_shared
from memeff.pallas.hopper.parts import (
    factors_of,
    first_columns,
    merge_array,
    multiply_parts,
    parts_of,
    products,
    rounding_rest,
    split_tile,
    store_tile,
    transposed,
)
from memeff.pallas.hopper.persistent import (
    ROWS,
    IfBad,
    Ring,
    Roles,
    WorkState,
    run_persistent_kernel,
)
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import (
    CallSizes,
    KeyBlocks,
    KeyWork,
    find_key_work,
    may_have_unmasked_tiles,
    order_for_bias,
)
from memeff.pallas.hopper.score_tile import (
    HeadNumbers,
    ScoreTile,
    TokenVectors,
    barrier_arrivals,
    copy_token_vectors,
    head_number_refs,
    scratch_shapes,
)
from memeff.pallas.hopper.tile_ranges import tiles_visited, with_lists
from memeff.problem import Problem

TILE = ROWS, ROWS  # of keys and queries
# What a kernel computes. For heads beyond 128 the sums of both do not fit in registers together.
Wanted = Literal["both", "dk", "dv"]


class KeyScratch(NamedTuple):
    """Shared memory and barriers of the kernel, in the order of their addresses."""

    all_warpgroups: Any  # barrier: the computing warpgroups and the one that copies
    bias_s: Any  # [stages, 64, item_size], if it is of pairs
    computing: Any  # barrier: the computing warpgroups
    do_s: Any  # [stages, 64, D]
    do_ready: Any
    do_used: Any  # tiles of dout, if these are used before those of query
    k_s: Any  # [items * warpgroups, 64, H]; dk at the end, or dv if alone
    token_vectors: TokenVectors
    item_ready: Any
    item_used: Any
    q_s: Any  # [stages, 64, H]
    q_ready: Any
    rows_s: (
        Any  # [2 * stages + warpgroups, 64]; one array, because each begins at a multiple of 1 KiB
    )
    stage: Any  # for `multiply` in the interpreter
    used: Any  # tiles of query and dout
    v_s: Any  # like k_s, but D; dv at the end; None if dv is wanted alone

    @property
    def lse_s(self):
        """Return lse of the visited queries [stages, 64]."""
        return self.rows_s.at[pl.ds(0, self.q_s.shape[0])]

    @property
    def delta_s(self):
        """Return delta of the visited queries [stages, 64]."""
        stages = self.q_s.shape[0]
        return self.rows_s.at[pl.ds(stages, stages)]

    @property
    def failed_s(self):
        """Return the flags of failed rows [warpgroups, 64]."""
        stages = self.q_s.shape[0]
        return self.rows_s.at[pl.ds(2 * stages, self.rows_s.shape[0] - 2 * stages)]


def key_value_gradient(
    problem: Problem,
    lengths: tuple[int, int],
    arrays: tuple[Array, ...],
    scalars: Scalars,
    tiling: Tiling,
    wanted: Wanted = "both",
    joined: bool = False,
    if_bad: IfBad | None = None,
) -> tuple[Array, ...]:
    """Return dk [B, S, K, H] and dv [B, S, K, D], or one of them, in the dtype of the call.

    With `joined` they are one array [B, S, 2 K, H]: the heads of dv follow those of dk.
    `arrays`: query, key, value and dout, padded as in `forward.attend`, and lse (in bits) and delta
    [B, N, T']. `lengths`: T and S without padding.
    """
    query, key, value, _, lse, _ = arrays
    _, _, N, H = query.shape
    B = scalars.batch_size(query)
    _, _, K, D = value.shape
    T, S = lengths
    has_segments = scalars.q_segments is not None
    # A step has registers left for lse only because its tiles have 64 queries.
    assert tiling.tile_size == ROWS and lse.shape[-1] % ROWS == 0
    scalars = with_ranges(scalars, lengths, tiling.item_size, keys=True)
    scalars = with_lists(problem, scalars, lengths, (ROWS, tiling.item_size), keys=True)

    tiles = tiles_visited(problem, lengths, tiling.item_size, ROWS, keys=True)
    shape = CallSizes(B, T, S, K, N // K)
    key_blocks = KeyBlocks(tiling.item_size)
    if if_bad is None:
        shape = shape.with_parts(group_parts(shape, problem, key_blocks, has_segments))
    bytes_read = T * shape.G * (H + D) * 2
    heads = B * shape.K
    blocks, order = choose_blocks(problem, scalars, shape.G * tiles, ROWS, heads, bytes_read)
    order = order_for_bias(order, scalars, B)

    def roles(operands: Any, refs: tuple[Ref, ...], scratch: KeyScratch) -> Roles:
        array_refs, scalar_refs = operands
        outputs = [[(ref, 0) for ref in refs[n : n + count]] for n in range(0, len(refs), count)]
        if joined:
            outputs = [[(refs[0], 0), (refs[0], K)]]
        find_work = functools.partial(
            find_key_work, problem, shape, scalar_refs, tiling.item_size, ROWS, order
        )
        compute = functools.partial(_compute, problem, shape, tiling, wanted, outputs, scratch)
        copy = functools.partial(_copy, shape, tiling, array_refs, scratch)
        rings = [
            Ring(tiling.stages, True, (scratch.used,)),
            Ring(tiling.items, False, (scratch.item_used,)),
        ]
        if scratch.do_used is not None:
            rings.append(Ring(tiling.second_stages, True, (scratch.do_used,)))
        return Roles(find_work, compute, copy, rings)

    widths = {"both": (H, D), "dk": (H,), "dv": (D,)}[wanted]
    shapes = [(B, key.shape[1], shape.K, width) for width in widths]
    join_later = joined and shape.parts > 1
    joined = joined and not join_later
    if joined:
        assert H == D
        shapes = [(B, key.shape[1], 2 * K, H)]
    count = len(shapes)
    is_rounded = tiling.parts == 1
    if is_rounded:
        shapes *= arrays_of_parts(shape.parts)
    types = [jax.ShapeDtypeStruct(x, query.dtype) for x in shapes]
    head_dims = whole_width(H), whole_width(D)
    stored = run_persistent_kernel(
        "memeff_dkdv" if wanted == "both" else f"memeff_{wanted}",
        problem,
        (arrays, scalars),
        types,
        _scratch_types(head_dims, query.dtype, scalars, tiling, wanted),
        roles,
        items=heads * tiles.size,
        blocks=blocks,
        consumers=tiling.warpgroups,
        if_bad=if_bad,
    )
    dtype = query.dtype if is_rounded else jnp.float32
    stored = [merge_array(x, dtype) for x in stored]
    results = [sum_parts(shape.parts, stored[n::count], dtype) for n in range(count)]
    return (jnp.concatenate(results, axis=2),) if join_later else tuple(results)


def arrays_of_parts(parts: int) -> int:
    """Return in how many arrays of 16 bits a gradient is stored, by the parts of a group.

    With several parts, the second array takes what the rounding of the first leaves out, so that
    only the sum of the parts is rounded.
    """
    return 2 if parts > 1 else 1


def sum_parts(parts: int, arrays: Sequence[Array], dtype: DTypeLike) -> Array:
    """Return the sum over the parts of each group, which `arrays` hold together, in `dtype`."""
    if parts == 1:
        return arrays[0]
    total = functools.reduce(operator.add, [x.astype(jnp.float32) for x in arrays])
    B, S, _, width = total.shape
    return total.reshape(B, S, -1, parts, width).sum(3).astype(dtype)


def store_gradients(
    tiles: Sequence[Ref], gradients: Sequence[Array], places: Iterable[Sequence[Ref]], parts: int
) -> None:
    """Store the rows of gradients to their places in each of `arrays_of_parts`, by their tiles."""
    for n, refs in enumerate(places):
        for tile_s, x in zip(tiles, gradients, strict=True):
            x = rounding_rest(x, tile_s.dtype) if n else x
            store_tile(first_columns(tile_s, parts * x.shape[-1]), x, parts)
        plgpu.commit_smem()
        for tile_s, ref in zip(tiles, refs, strict=True):
            plgpu.copy_smem_to_gmem(tile_s, ref)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _scratch_types(
    head_dims: tuple[int, int], dtype, scalars: Scalars, tiling: Tiling, wanted: Wanted
) -> KeyScratch:
    """Return the types of the kernel's shared memory and barriers."""
    H, D = head_dims
    groups, queries, stages = tiling[:3]
    do_stages = tiling.both_stages[1]
    slots = tiling.items * groups
    needs_value = wanted != "dv"
    do_used: Any = None
    if tiling.second_stages:
        do_used = plgpu.Barrier(num_arrivals=groups, num_barriers=do_stages)
    query_vectors, key_vectors = barrier_arrivals(scalars)
    return KeyScratch(
        all_warpgroups=plgpu.Barrier(num_arrivals=groups + 1),
        bias_s=bias_tiles(scalars, stages, queries, tiling.item_size),
        computing=plgpu.Barrier(num_arrivals=groups),
        do_s=tile_ref(do_stages, queries, D, dtype),
        do_ready=plgpu.Barrier(num_arrivals=2, num_barriers=do_stages),
        do_used=do_used,
        k_s=tile_ref(slots, ROWS, H, dtype),
        item_ready=plgpu.Barrier(num_arrivals=1 + needs_value + key_vectors, num_barriers=slots),
        item_used=plgpu.Barrier(num_arrivals=groups, num_barriers=tiling.items),
        q_s=tile_ref(stages, queries, H, dtype),
        q_ready=plgpu.Barrier(
            num_arrivals=2 + query_vectors + (scalars.bias is not None), num_barriers=stages
        ),
        rows_s=plgpu.SMEM((2 * stages + groups, ROWS), jnp.float32),
        stage=interpreter_staging(groups, ROWS, queries, dtype).get("stage"),
        used=plgpu.Barrier(num_arrivals=groups, num_barriers=stages),
        v_s=tile_ref(slots, ROWS, D, dtype) if needs_value else None,
        **scratch_shapes(scalars, (stages, queries), (slots, ROWS)),
    )


def copy_queries(
    shape: CallSizes,
    tiling: Tiling,
    arrays: tuple,
    scratch: Any,
    work: KeyWork,
    visits,
) -> Array:
    """Copy the visited queries of all heads that share the keys. Return the number of tiles.

    `arrays`: refs of query, dout, lse and delta. `visits`: tiles that were copied before.
    """
    query_ref, dout_ref, lse_ref, delta_ref = arrays
    query_vectors, _ = scratch.token_vectors
    bias_s = getattr(scratch, "bias_s", None)  # the fused kernel has no bias
    do_used: Any = getattr(scratch, "do_used", None)
    count = work.visits.total
    do_stages = tiling.both_stages[1]

    def copy_tile(g, n):
        visit = visits + g * count + n
        head = work.k * shape.G + g
        slot = lax.rem(visit, jnp.int32(tiling.stages))
        rows = pl.ds(work.visits.tile(n) * tiling.tile_size, tiling.tile_size)
        q_ready = scratch.q_ready.at[slot]
        tokens = work.source.query, rows, head
        vector = work.source.query, head, rows
        wait_for_slot(scratch.used, slot, visit >= tiling.stages)
        plgpu.copy_gmem_to_smem(head_rows(query_ref, *tokens), scratch.q_s.at[slot], q_ready)
        plgpu.copy_gmem_to_smem(lse_ref.at[vector], scratch.lse_s.at[slot], q_ready)
        copy_token_vectors(work.scalars.by_query, rows, query_vectors, slot, q_ready)
        if bias_s is not None:
            cols = pl.ds(work.col, tiling.item_size)
            copy_bias(work.scalars, head, rows, cols, bias_s, slot, q_ready)
        do_slot = lax.rem(visit, jnp.int32(do_stages))
        do_ready = scratch.do_ready.at[do_slot]
        if do_used is not None:
            wait_for_slot(do_used, do_slot, visit >= do_stages)
        plgpu.copy_gmem_to_smem(head_rows(dout_ref, *tokens), scratch.do_s.at[do_slot], do_ready)
        delta = delta_ref.at[work.b, head, rows]
        plgpu.copy_gmem_to_smem(delta, scratch.delta_s.at[slot], do_ready)

    @pl.loop(0, shape.G)
    def _(g):
        pl.loop(0, count)(functools.partial(copy_tile, g))

    return shape.G * count


def _copy(
    shape: CallSizes,
    tiling: Tiling,
    arrays: tuple,
    scratch: KeyScratch,
    work: KeyWork,
    state: WorkState,
) -> tuple[Array, Array]:
    """Copy the keys and values of each warpgroup, and the visited queries once for all."""
    query_ref, key_ref, value_ref, *row_refs = arrays
    _, key_vectors = scratch.token_vectors
    item = lax.rem(state.items_done, jnp.int32(tiling.items))
    wait_for_slot(scratch.item_used, item, state.items_done >= tiling.items)
    for group in range(tiling.warpgroups):
        cols = pl.ds(work.col + group * ROWS, ROWS)
        slot = item * tiling.warpgroups + group
        ready = scratch.item_ready.at[slot]
        key = head_rows(key_ref, work.source.key, cols, work.key_head)
        plgpu.copy_gmem_to_smem(key, scratch.k_s.at[slot], ready)
        if scratch.v_s is not None:
            value = head_rows(value_ref, work.source.value, cols, work.key_head)
            plgpu.copy_gmem_to_smem(value, scratch.v_s.at[slot], ready)
        copy_token_vectors(work.scalars.by_key, cols, key_vectors, slot, ready)
    visits = state.tiles_visited
    count = copy_queries(shape, tiling, (query_ref, *row_refs), scratch, work, visits)
    return count, jnp.int32(0)


def _compute(
    problem: Problem,
    shape: CallSizes,
    tiling: Tiling,
    wanted: Wanted,
    outputs: Sequence[Sequence[tuple[Ref, int]]],
    scratch: KeyScratch,
    group,
    work: KeyWork,
    state: WorkState,
) -> tuple[Array, Array]:
    """Compute dk and dv of one warpgroup's keys, or one of them.

    `outputs`: for each, its array and the head in it of group 0. A second such list has the arrays
    for what rounding takes.
    """
    gradient = Gradient(problem, work.scalars.logit_terms)
    dtype = scratch.k_s.dtype
    parts = tiling.parts
    group_slot = lax.rem(state.items_done, jnp.int32(tiling.items)) * tiling.warpgroups
    cols = pl.ds(work.col + group * ROWS, ROWS)
    masked = work.visits.masked
    count = hide_from_cse(jnp.int32(work.visits.total))
    bias_cols = pl.ds(group * ROWS, ROWS)
    places = group_slot, bias_cols
    visits = _Visits(
        problem, shape, tiling, scratch, gradient, group, work, state, masked, count, *places
    )
    plgpu.barrier_wait(scratch.item_ready.at[group_slot + group])
    k = scratch.k_s.at[group_slot + group]
    v = optional_slot(scratch.v_s, group_slot + group)
    slopes = {"dk": gradient.slope, "dv": gradient.inverse_keep_rate}
    names = ("dk", "dv") if wanted == "both" else (wanted,)
    stored = (k, v) if wanted == "both" else (k,)
    widths = {"dk": k.shape[-1], "dv": scratch.do_s.shape[-1]}
    visit_all = functools.partial(visits.visit_all, wanted)
    sums = accumulators(visit_all, *[(ROWS, widths[name] // parts) for name in names])
    without_padding = [zero_padding(x, shape, work, group) for x in sums]
    failed = not_finite(scratch.failed_s.at[group], state, *without_padding)
    sums = [undo_lift(x * slopes[name], dtype, state) for name, x in zip(names, sums, strict=True)]
    places = [
        [
            head_rows(ref, work.b, cols, first_head + work.k, tile_s.shape[-1])
            for tile_s, (ref, first_head) in zip(stored, refs, strict=True)
        ]
        for refs in outputs
    ]
    store_gradients(stored, sums, places, parts)
    plgpu.barrier_arrive(scratch.item_used.at[lax.rem(state.items_done, jnp.int32(tiling.items))])
    return shape.G * count, failed


class _Visits(NamedTuple):
    """The tiles of queries that one warpgroup's keys visit."""

    problem: Problem
    shape: CallSizes
    tiling: Tiling
    scratch: KeyScratch
    gradient: Gradient
    group: Any
    work: KeyWork
    state: WorkState
    masked: Array  # visits of a head that need a mask
    visits_of_head: Array
    group_slot: Any  # of the first warpgroup's keys
    bias_cols: Any  # this warpgroup's keys in a tile of the bias

    def visit_all(self, wanted: Wanted, *sums) -> list[Array]:
        """Visit the tiles of all heads, and return dk and dv, or one of them."""
        work = self.work
        dk, dv = {"both": sums, "dk": (*sums, None), "dv": (None, *sums)}[wanted]

        def visit_head(g, _):
            start = self.state.tiles_visited + g * self.visits_of_head
            head = work.k * self.shape.G + g
            numbers = head_number_refs(work.scalars, head)
            visit = functools.partial(self._visit, start, head, numbers, (dk, dv))
            if not self.state.first_round:
                lax.fori_loop(0, self.visits_of_head, functools.partial(visit, True), None)
                return
            lax.fori_loop(0, self.masked, functools.partial(visit, True), None)
            if may_have_unmasked_tiles(self.problem, work.scalars):
                lax.fori_loop(
                    self.masked, self.visits_of_head, functools.partial(visit, False), None
                )

        lax.fori_loop(0, self.shape.G, visit_head, None)
        return [plgpu.wgmma_accumulator_load(x, wait_n=0) for x in sums]

    def _visit(self, start, head, numbers: HeadNumbers, sums, hides: bool, n, _) -> None:
        """Do (5) and (6) for the n-th tile of a head, after `start` tiles: add to dk and dv."""
        scratch, tiling, gradient = self.scratch, self.tiling, self.gradient
        dtype = scratch.k_s.dtype
        parts = tiling.parts
        dk, dv = sums
        slot = lax.rem(start + n, jnp.int32(tiling.stages))
        do_slot = lax.rem(start + n, jnp.int32(tiling.both_stages[1]))
        stage = optional_slot(scratch.stage, self.group)
        plgpu.barrier_wait(scratch.q_ready.at[slot])
        # In a kernel's first loop ptxas waits for raw before it begins dp; in the second, dp may
        # begin while raw runs.
        late = tiling.warpgroups == 2 and not hides and self.problem.right is not None
        if not late:
            plgpu.barrier_wait(scratch.do_ready.at[do_slot])
        if hides and not self.state.first_round:
            self._clean(slot, do_slot)
        tile = self._tile(head, numbers, n, slot)
        keep = tile.mask() if hides else None
        key_slot = self.group_slot + hide_from_cse(self.group)
        k = scratch.k_s.at[key_slot]
        v = optional_slot(scratch.v_s, key_slot)
        lse = _by_query(scratch.lse_s.at[slot])  # before products, which keep shared memory busy
        if not self.state.first_round:
            lse = lse + float16_lift(dtype)
        q_parts = parts_of(scratch.q_s.at[slot], parts)
        do_parts = parts_of(scratch.do_s.at[do_slot], parts)

        def start_dp(dp):
            return gradient.start_dp(dp, _by_query(scratch.delta_s.at[slot]))

        def multiply_tiles(raw, dp=None):
            """Add a tile's part of dk and dv. Without `dp`, only dv is wanted."""
            finish_dp: Any = start_dp(dp) if dp is not None and not late else None
            multiply_parts(raw, factors_of(k, parts), transposed(q_parts))  # (5)
            if late:
                plgpu.barrier_wait(scratch.do_ready.at[do_slot])
            if dp is not None:
                finish_dp = finish_dp or start_dp(dp)
                multiply_parts(dp, factors_of(v, parts), transposed(do_parts))
            raw = plgpu.wgmma_accumulator_load(raw, wait_n=0 if dp is None else products(parts))
            p, cotangents = gradient.probabilities(raw, lse, tile, keep)  # (6)
            if dv is not None:
                multiply_parts(dv, split_tile(gradient.kept(p), dtype, parts), do_parts, stage)
            if dk is not None:
                running = 0 if dv is None else products(parts)  # while dv runs
                dp = finish_dp(p, plgpu.wgmma_accumulator_load(dp, wait_n=running))
                if scratch.do_used is not None:
                    plgpu.barrier_arrive(scratch.do_used.at[do_slot])
                d_raw, _ = cotangents(p, dp)
                multiply_parts(dk, split_tile(d_raw, dtype, parts), q_parts, stage)
            plgpu.wgmma_wait(0)

        accumulators(multiply_tiles, *[TILE] * (1 if dk is None else 2))
        plgpu.barrier_arrive(scratch.used.at[slot])

    def _clean(self, slot, do_slot) -> None:
        """Clean query and dout: where queries see nothing, they may hold anything."""
        scratch = self.scratch
        clean = functools.partial(clean_shared, warpgroup=self.group, barrier=scratch.computing)
        clean(scratch.q_s.at[slot])
        clean(scratch.do_s.at[do_slot], lse_s=scratch.lse_s.at[slot])

    def _tile(self, head, numbers: HeadNumbers, n, slot) -> ScoreTile:
        """Return the n-th tile of a head, whose queries are in `slot`."""
        scratch = self.scratch
        vectors = token_vectors(scratch.token_vectors, slot, self.group_slot + self.group)
        tile = transposed_tile(
            self.problem, self.work, self.tiling, n, self.group, numbers, vectors
        )
        bias_s = optional_slot(scratch.bias_s, (slot, slice(None), self.bias_cols))
        return tile.with_loads_started().with_bias(head, bias_s)


def _by_query(vector_s) -> Array:
    """Return a tile of numbers of queries, which are its columns."""
    return broadcast_vector(plgpu.load(vector_s, layout=COL), TILE, 1)
