"""Compute the gradient of attention on GPUs since Ampere, in two kernels as on Hopper.

Steps (1) to (6) are those of `hopper.backward_common`. A thread block owns 64 or 128 queries and
visits the tiles of keys that they see, for dq; or it owns 64 keys and visits queries, for dk and
dv. Registers have room for an owned tile of 64 queries and its cotangents. The next tile is copied
beside the products of one where shared memory has two places for it. If a sum is not finite, all
tiles are visited once more, without lift and with NaN and Inf removed from operands of two
products.

In the gradient in one kernel (`fused_gradients`) the owner of keys adds d_raw k to dq, in float32
in global memory. It does so one visit later, beside dp, when d_raw is in shared memory.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.logits import allow_approx_math
from memeff.pallas.ampere.mosaic import (
    add_product_to_sums,
    copy_pairs,
    copy_tile,
    kernel,
    multiply,
    products_of_sums,
    ready_barrier,
    store_tile,
    wait_for_copies,
)
from memeff.pallas.hopper.backward_common import (
    Gradient,
    count_term_gradients,
    float16_lift,
    group_parts,
    is_finite,
    optional_slot,
    scale_sums,
)
from memeff.pallas.hopper.backward_key import arrays_of_parts, sum_parts
from memeff.pallas.hopper.bias import bias_tiles, head_bias
from memeff.pallas.hopper.mosaic import (
    COL,
    ROW,
    WGMMA,
    Barrier,
    Ref,
    broadcast_vector,
    full_tile,
    plgpu,
    tile_ref,
    whole_width,
)
from memeff.pallas.hopper.nonfinite import clean_tile
from memeff.pallas.hopper.parts import rounding_rest
from memeff.pallas.hopper.persistent import IfBad, any_failed
from memeff.pallas.hopper.scalars import Scalars, with_ranges
from memeff.pallas.hopper.scheduler import (
    CallSizes,
    KeyBlocks,
    KeyWork,
    QueryWork,
    cache_order,
    find_key_work,
    find_query_work,
    may_have_unmasked_tiles,
    order_for_bias,
)
from memeff.pallas.hopper.score_tile import HeadNumbers, ScoreTile, head_number_refs
from memeff.pallas.hopper.threads import WARPGROUP
from memeff.pallas.hopper.tile_ranges import with_lists
from memeff.problem import Problem
from memeff.shape import round_up

ROWS = 64  # of a tile, but for owned queries
KEY_BLOCKS = KeyBlocks(ROWS, at_once=2)  # one, where shared memory is too small for two


class Tiling(NamedTuple):
    """The number of visited tiles in shared memory, and of queries that a thread block owns."""

    stages: int
    query_rows: int


class Arrays(NamedTuple):
    """The arrays that both kernels read. In a kernel the fields are refs."""

    query: Any  # [B, T, N, H]
    key: Any  # [B, S, K, H]
    value: Any  # [B, S, K, D]
    dout: Any  # [B, T, N, D]
    lse: Any  # [B, N, T'], in bits, minus float16's lift
    delta: Any  # [B, N, T'], dlse minus the row sum of dout * out


class Scratch(NamedTuple):
    """Shared memory of a thread block, of H and D numbers a token.

    Owned tiles are of queries and dout, or of keys and values; visited tiles are the others. The
    barriers are in the interpreter alone.
    """

    owned_s: tuple[Ref, Ref]  # [1, t, H] and [1, t, D]; gradients take their places
    visited_s: tuple[Ref, Ref]  # [stages, 64, H] and [stages, 64, D]
    bias_s: Ref | None  # [stages, queries, 64] of a bias of pairs
    d_raw_s: Any  # [1, keys, 64] of a tile, in the gradient in one kernel
    failed_s: Ref  # [t] above 0 where a row is not finite
    owned_ready: Barrier
    visited_ready: Barrier


class GradientCall(NamedTuple):
    """What a kernel of the gradient computes, from which arrays, and in which tiles."""

    problem: Problem
    lengths: tuple[int, int]  # T, S unpadded
    arrays: Arrays
    scalars: Scalars
    tiling: Tiling


def query_gradient(call: GradientCall, if_bad: IfBad | None = None) -> tuple[Array, ...]:
    """Return dq in the shape of query, and one sum [B, N, T''] for each term's gradient.

    The sums over keys are those of cotangents of the scale, the soft cap and `score_fn`'s inputs.
    With `if_bad` there are none.
    """
    return _run("memeff_ampere_dq", False, call, if_bad=if_bad)


def key_value_gradient(call: GradientCall, if_bad: IfBad | None = None) -> tuple[Array, ...]:
    """Return dk and dv in the shapes of key and value."""
    return _run("memeff_ampere_dkdv", True, call, if_bad=if_bad)


def fused_gradients(call: GradientCall) -> tuple[Array, ...]:
    """Return dq, in float32 and without slope and with lift, dk and dv, from one kernel.

    They have the shapes of query, key and value. Thread blocks add to dq in any order, so its bits
    differ from run to run. Hidden NaN and Inf are not cleaned, and may have reached all of them.
    """
    B, T, N, H = call.arrays.query.shape
    tiles = -(-T // ROWS)
    numbers = ROWS * whole_width(H) // WARPGROUP
    sums = jnp.zeros((B, N, tiles, numbers, WARPGROUP), jnp.float32)
    dk, dv, sums = _run("memeff_ampere_fused", True, call, sums)
    dq = jnp.moveaxis(products_of_sums(sums, ROWS), 1, 3)  # [B, tiles, 64, N, H']
    return lax.collapse(dq, 1, 3)[:, :T, :, :H], dk, dv


def _run(
    name: str,
    of_keys: bool,
    call: GradientCall,
    sums: Array | None = None,
    if_bad: IfBad | None = None,
) -> tuple[Array, ...]:
    """Run the kernel for dk and dv (`of_keys`), which may add dq to `sums`, or that for dq.

    With `if_bad` it writes over the results in it, or does nothing if these are good.
    """
    problem, lengths, arrays, scalars, tiling = call
    query, key, value, *_ = arrays
    B, _, N, H = query.shape
    K, D = value.shape[2:]
    T, S = lengths
    sizes = CallSizes(B, T, S, K, N // K)
    owned = ROWS if of_keys else tiling.query_rows
    if of_keys and if_bad is None:
        has_segments = scalars.q_segments is not None
        sizes = sizes.with_parts(group_parts(sizes, problem, KEY_BLOCKS, has_segments))
    heads = B * (sizes.K if of_keys else N)
    items = heads * -(-(S if of_keys else T) // owned)
    bytes_read = (T * sizes.G if of_keys else S // sizes.G) * (H + D) * query.dtype.itemsize
    order = cache_order(heads, max(1, bytes_read))
    order = order_for_bias(order, scalars, B)
    scalars = with_ranges(scalars, lengths, owned, keys=of_keys)
    tile = (ROWS, owned) if of_keys else (owned, ROWS)
    scalars = with_lists(problem, scalars, lengths, tile, keys=of_keys)
    operands, structure = jax.tree.flatten((arrays, scalars, if_bad and if_bad.is_bad))
    find_work = find_key_work if of_keys else find_query_work

    def body(*refs, scratch: Scratch):
        *inputs, is_bad_ref = jax.tree.unflatten(structure, refs[: len(operands)])
        compute = functools.partial(compute_tile, *inputs, refs[len(operands) :], scratch)
        if is_bad_ref is None:
            compute()
        else:
            pl.when(is_bad_ref[0] > 0)(compute)

    def compute_tile(array_refs, scalar_refs, outputs, scratch: Scratch) -> None:
        index = lax.axis_index("block")
        work: Any = find_work(problem, sizes, scalar_refs, *tile, order, index)
        inputs = problem, sizes, array_refs, scratch, work
        if of_keys:
            KeyTile(*inputs).run(outputs[:count], *outputs[count:])
        else:
            QueryTile(*inputs).run(*outputs)

    shapes = [query.shape]
    if of_keys:
        shapes = [(B, x.shape[1], sizes.K, x.shape[3]) for x in (key, value)]
        shapes *= arrays_of_parts(sizes.parts)
    count = len(shapes)
    types = [jax.ShapeDtypeStruct(x, query.dtype) for x in shapes]
    scratch = scratch_types(H, D, query.dtype, tiling.stages, tile, scalars, sums is not None)
    run = functools.partial(kernel, body, name)
    more = {"scratch": scratch}, items, allow_approx_math(problem)
    state = if_bad.results if if_bad else ()
    if sums is not None:
        state = *(lax.empty(x.shape, x.dtype) for x in types), sums
    if state:
        stored = pl.run_state(lambda refs: run([], *more)(*operands, *refs))(state)
    else:
        if not of_keys:
            row_sums = jax.ShapeDtypeStruct((B, N, round_up(T, owned)), jnp.float32)
            types += [row_sums] * count_term_gradients(problem, scalars)
        stored = run(types, *more)(*operands)
    if not of_keys:
        return tuple(stored)
    dk, dv = (sum_parts(sizes.parts, stored[n:count:2], query.dtype) for n in range(2))
    return dk, dv, *stored[count:]


def scratch_types(
    H: int,
    D: int,
    dtype,
    stages: int,
    tile: tuple[int, int],
    scalars: Scalars,
    has_sums: bool = False,
) -> Scratch:
    """Return the types of a thread block's shared memory.

    `tile`: queries and keys of a tile. `has_sums`: the kernel adds to sums of dq.
    """
    H, D = whole_width(H), whole_width(D)
    owned = max(tile)
    bias_s = bias_tiles(scalars, stages, *tile)
    return Scratch(
        owned_s=(tile_ref(1, owned, H, dtype), tile_ref(1, owned, D, dtype)),
        visited_s=(tile_ref(stages, ROWS, H, dtype), tile_ref(stages, ROWS, D, dtype)),
        bias_s=bias_s,
        d_raw_s=tile_ref(1, owned, ROWS, dtype) if has_sums else None,
        failed_s=plgpu.SMEM((owned,), jnp.float32),
        owned_ready=ready_barrier(arrivals=2),
        visited_ready=ready_barrier(arrivals=2 if bias_s is None else 3, count=stages),
    )


class _Pipeline(NamedTuple):
    """Copies of the visited tiles, each beside the products of the one before if there is room."""

    scratch: Scratch
    total: Array
    copy: Callable[[Any, Any], None]  # (visit, slot)

    @property
    def stages(self) -> int:
        """Return how many visited tiles are in shared memory."""
        return self.scratch.visited_s[0].shape[0]

    def begin(self) -> None:
        """Start to copy the first tile if there is one."""
        if self.stages > 1:
            pl.when(self.total > 0)(lambda: self._start(jnp.int32(0)))

    def next(self, n) -> tuple[Ref, Ref, Ref | None]:
        """Wait for the tiles of visit n, and return them: two of tokens, and one of the bias."""
        if self.stages == 1:
            self._start(n)
        slot = self._slot(n)
        ready = self.scratch.visited_ready
        wait_for_copies(None if ready is None else ready.at[slot])
        if self.stages > 1:
            pl.when(n + 1 < self.total)(lambda: self._start(n + 1))
        first, second = self.scratch.visited_s
        return first.at[slot], second.at[slot], optional_slot(self.scratch.bias_s, slot)

    def _start(self, n) -> None:
        self.copy(n, self._slot(n))

    def _slot(self, n):
        return lax.rem(n, jnp.int32(self.stages))


def _copy_pair(refs: tuple[Ref, Ref], place: tuple, shared: tuple[Ref, Ref], slot, ready) -> None:
    """Start to copy the tiles at `place` (batch entry, token, head) of two arrays to `slot`."""
    b, token, head = place
    for ref, target in zip(refs, shared, strict=True):
        copy_tile(ref, b, token, head, target.at[slot], ready)


def _copy_bias(scalars: Scalars, n, first: tuple[Any, Any], bias_s: Any, ready: Barrier) -> None:
    """Start to copy a tile of the bias of head n, if it is of pairs. `first`: query and key."""
    if bias_s is not None:
        copy_pairs(head_bias(scalars, n), *first, bias_s, ready)


class _QueryRows(NamedTuple):
    """What a thread block reads once of its queries, for all visits."""

    q: Any  # [t, H], in registers if there is room, else in shared memory
    do: Any  # [t, D]
    lse: Array  # [t]
    delta: Array  # [t]
    numbers: HeadNumbers


class QueryTile(NamedTuple):
    """A tile of queries of one head, whose dq and sums over keys a thread block computes."""

    problem: Problem
    sizes: CallSizes
    arrays: Arrays
    scratch: Scratch
    work: QueryWork
    redo: bool = False  # clean keys, and do without lift

    @property
    def shape(self) -> tuple[int, int]:
        """Return the queries and keys of a tile."""
        return self.scratch.owned_s[0].shape[1], ROWS

    def run(self, dq_ref: Ref, *sums_refs: Ref) -> None:
        """Compute and store dq and the sums."""
        work = self.work
        scratch = self.scratch
        place = work.source.query, work.row, work.n
        operands = self.arrays.query, self.arrays.dout
        _copy_pair(operands, place, scratch.owned_s, 0, scratch.owned_ready)
        wait_for_copies(scratch.owned_ready)
        numbers = head_number_refs(work.scalars, work.n)
        count = len(sums_refs)
        dq, *sums = self._gradients(numbers, count)
        failed = any_failed(scratch.failed_s, _bad_rows(dq)) > 0
        redo = functools.partial(self._replace(redo=True)._gradients, numbers, count)
        dq, *sums = lax.cond(failed, lambda *_: redo(), lambda *x: x, dq, *sums)
        q_s = scratch.owned_s[0].at[0]
        q_s[...] = dq.astype(q_s.dtype)
        store_tile(q_s, dq_ref, work.b, work.row, work.n)
        for ref, x in zip(sums_refs, sums, strict=True):
            ref[work.b, work.n, pl.ds(work.row, len(x))] = x

    def _gradients(self, numbers: HeadNumbers, count: int) -> tuple[Array, ...]:
        """Return dq and `count` sums, from visits of all tiles."""
        work = self.work
        q_s = self.scratch.owned_s[0].at[0]
        gradient = Gradient(self.problem, work.scalars.logit_terms, wants_terms=True)
        queries = self._load_queries(numbers)
        pipeline = _Pipeline(self.scratch, work.visits.total, self._copy)
        step = functools.partial(self._step, gradient, queries, pipeline)
        pipeline.begin()
        zero = full_tile(self.shape[:1], 0.0)
        start = full_tile(q_s.shape, 0.0), *[zero] * (0 if gradient.linear else count)
        dq, *sums = _masked_first(self.problem, work, step, start, self.redo)
        if gradient.linear:
            sums = [scale_sums(q_s, dq, 1)] * count
        undo = 1.0 if self.redo else 2.0 ** -float16_lift(q_s.dtype)
        return dq * gradient.slope * undo, *(x * undo for x in sums)

    def _load_queries(self, numbers: HeadNumbers) -> _QueryRows:
        """Return the queries and their cotangents. Where these fit into registers, load them."""
        work = self.work
        shape = self.shape
        q, do = (x.at[0] for x in self.scratch.owned_s)
        lift = float16_lift(q.dtype)
        if shape == (ROWS, ROWS):
            q, do = (plgpu.load(x, layout=WGMMA) for x in (q, do))
        rows = pl.ds(work.row, shape[0])

        def of_rows(ref):
            vector = ref.at[work.source.query, work.n, rows]
            return plgpu.load(vector, layout=ROW, optimized=False)

        lse, delta = of_rows(self.arrays.lse), of_rows(self.arrays.delta)
        return _QueryRows(q, do, lse + lift if self.redo else lse, delta, numbers)

    def _copy(self, n, slot) -> None:
        """Start to copy the keys of visit n, and a tile of the bias, to `slot`."""
        work = self.work
        scratch = self.scratch
        col = work.visits.tile(n) * ROWS
        place = work.source.key, col, work.k
        ready = optional_slot(scratch.visited_ready, slot)
        operands = self.arrays.key, self.arrays.value
        _copy_pair(operands, place, scratch.visited_s, slot, ready)
        bias_s = optional_slot(scratch.bias_s, slot)
        _copy_bias(work.scalars, work.n, (work.row, col), bias_s, ready)

    def _step(
        self,
        gradient: Gradient,
        queries: _QueryRows,
        pipeline: _Pipeline,
        masked: bool,
        n,
        state: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        """Return dq and the sums after visit n."""
        work = self.work
        shape = self.shape
        dq, *sums = state
        k_s, v_s, bias_s = pipeline.next(n)
        if self.redo:
            clean_tile(k_s)
        first = work.row, work.visits.tile(n) * ROWS
        tile = ScoreTile.in_global_memory(self.problem, work, first, shape, queries.numbers)
        raw = multiply(full_tile(shape, 0.0), queries.q, k_s, transposed=True)  # (1)
        tile = tile.with_bias(work.n, bias_s)
        keep = tile.mask() if masked else None
        lse = broadcast_vector(queries.lse, shape)
        p, cotangents = gradient.probabilities(raw, lse, tile, keep)
        delta = broadcast_vector(queries.delta, shape)
        d_raw, d_terms = cotangents(p, dp_with_delta(gradient, p, delta, queries.do, v_s))
        dq = multiply(dq, d_raw.astype(k_s.dtype), k_s)  # (2), (3), (4)
        return dq, *(x + y.sum(axis=1) for x, y in zip(sums, d_terms, strict=True))


class KeyTile(NamedTuple):
    """A tile of keys of one head, whose dk and dv a thread block computes."""

    problem: Problem
    sizes: CallSizes
    arrays: Arrays
    scratch: Scratch
    work: KeyWork

    def run(self, outputs: Sequence[Ref], sums_ref: Ref | None = None) -> None:
        """Compute dk and dv, and store them to `outputs`, which are those of `arrays_of_parts`.

        With `sums_ref`, add to the sums of dq, and leave it to the caller to look for bad results.
        """
        work = self.work
        scratch = self.scratch
        place = work.source.key, work.col, work.key_head
        operands = self.arrays.key, self.arrays.value
        _copy_pair(operands, place, scratch.owned_s, 0, scratch.owned_ready)
        wait_for_copies(scratch.owned_ready)
        dk, dv = self._gradients(sums_ref)
        if sums_ref is None:
            bad_rows = jnp.maximum(_bad_rows(dk), _bad_rows(dv))
            failed = any_failed(scratch.failed_s, bad_rows) > 0
            redo = functools.partial(self._gradients, redo=True)
            dk, dv = lax.cond(failed, lambda *_: redo(), lambda *x: x, dk, dv)
        for n, ref in enumerate(outputs):
            shared, x = scratch.owned_s[n % 2], (dk, dv)[n % 2]
            shared[0] = x.astype(shared.dtype) if n < 2 else rounding_rest(x, shared.dtype)
            store_tile(shared.at[0], ref, work.b, work.col, work.k)

    def _gradients(self, sums_ref: Any = None, redo: bool = False) -> tuple[Array, Array]:
        """Return dk and dv."""
        gradient = Gradient(self.problem, self.work.scalars.logit_terms)
        return _KeyVisits(*self, gradient, self.work.visits.total, sums_ref, redo).gradients()


class _KeyVisits(NamedTuple):
    """The visits of a tile of keys to the tiles of queries, of one head after the other."""

    problem: Problem
    sizes: CallSizes
    arrays: Arrays
    scratch: Scratch
    work: KeyWork
    gradient: Gradient
    total: Array  # visits of each head
    sums_ref: Any  # of dq, to which the gradient in one kernel adds; None in the other kernels
    redo: bool  # clean queries and dout, and do without lift

    @property
    def heads(self) -> Array:
        """Return the number of query heads that share a key head, int32."""
        return jnp.int32(self.sizes.G)

    def gradients(self) -> tuple[Array, Array]:
        """Return dk and dv, after all visits."""
        scratch = self.scratch
        gradient = self.gradient
        pipeline = _Pipeline(scratch, self.total * self.heads, self._copy)

        def visit_head(g, sums):
            step = functools.partial(self._step, pipeline, g)
            return _masked_first(self.problem, self.work, step, sums, self.redo)

        pipeline.begin()
        if self.sums_ref is not None:
            zeros = full_tile((ROWS, ROWS), 0.0)
            scratch.d_raw_s[0] = zeros.astype(scratch.d_raw_s.dtype)
        sums = tuple(full_tile((ROWS, x.shape[-1]), 0.0) for x in scratch.owned_s)
        dk, dv = lax.fori_loop(0, self.sizes.G, visit_head, sums)
        if self.sums_ref is not None:
            pl.when(pipeline.total > 0)(lambda: self._add_previous(pipeline.total))
        undo = 1.0 if self.redo else 2.0 ** -float16_lift(self.arrays.query.dtype)
        return dk * gradient.slope * undo, dv * gradient.inverse_keep_rate * undo

    def _head(self, visit) -> Array:
        """Return the query head of a visit."""
        return self.work.k * self.heads + lax.div(visit, jnp.maximum(self.total, 1))

    def _first_row(self, visit) -> Array:
        """Return the first query of a visit."""
        return self.work.visits.tile(lax.rem(visit, jnp.maximum(self.total, 1))) * ROWS

    def _copy(self, visit, slot) -> None:
        """Start to copy the queries of a visit, and a tile of the bias, to `slot`."""
        work = self.work
        scratch = self.scratch
        row, n = self._first_row(visit), self._head(visit)
        place = work.source.query, row, n
        ready = optional_slot(scratch.visited_ready, slot)
        operands = self.arrays.query, self.arrays.dout
        _copy_pair(operands, place, scratch.visited_s, slot, ready)
        _copy_bias(work.scalars, n, (row, work.col), optional_slot(scratch.bias_s, slot), ready)

    def _add_previous(self, visit) -> None:
        """Add d_raw' k of the visit before to dq. Before the first d_raw is 0."""
        previous = jnp.maximum(visit - 1, 0)
        head = self._head(previous)
        tile = lax.div(self._first_row(previous), jnp.int32(ROWS))
        sums = self.sums_ref.at[self.work.b, head, tile]
        add_product_to_sums(self.scratch.owned_s[0].at[0], self.scratch.d_raw_s.at[0], sums)

    def _step(
        self, pipeline: _Pipeline, g, masked: bool, n, sums: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Return dk and dv after the n-th visit of query head g of the group."""
        work = self.work
        gradient = self.gradient
        arrays = self.arrays
        k_s, v_s = (x.at[0] for x in self.scratch.owned_s)
        shape = ROWS, ROWS
        dk, dv = sums
        visit = g * self.total + n
        q_s, do_s, bias_s = pipeline.next(visit)
        head = work.k * self.heads + g
        row = work.visits.tile(n) * ROWS
        rows = work.source.query, head, pl.ds(row, ROWS)

        def vector(ref):
            return plgpu.load(ref.at[rows], layout=COL, optimized=False)

        if self.redo:
            clean_tile(q_s)
            clean_tile(do_s, lse_s=arrays.lse.at[rows])
        numbers = head_number_refs(work.scalars, head)
        first = row, work.col
        tile = ScoreTile.in_global_memory(self.problem, work, first, shape, numbers, 1)
        lse = vector(arrays.lse) + (float16_lift(k_s.dtype) if self.redo else 0.0)
        raw = multiply(full_tile(shape, 0.0), k_s, q_s, transposed=True)  # (5)
        tile = tile.with_bias(head, bias_s)
        keep = tile.mask() if masked else None
        p, cotangents = gradient.probabilities(raw, broadcast_vector(lse, shape, 1), tile, keep)
        dv = multiply(dv, gradient.kept(p).astype(v_s.dtype), do_s)  # (6)
        if self.sums_ref is not None:
            self._add_previous(visit)
        delta = broadcast_vector(vector(arrays.delta), shape, 1)
        d_raw, _ = cotangents(p, dp_with_delta(gradient, p, delta, v_s, do_s))
        d_raw = d_raw.astype(k_s.dtype)
        dk = multiply(dk, d_raw, q_s)
        if self.sums_ref is not None:
            self.scratch.d_raw_s[0] = d_raw
        return dk, dv


def _bad_rows(x: Array) -> Array:
    """Return 1 for each row of x that has a number that is not finite, and else 0."""
    return jnp.where(is_finite(x), 0.0, 1.0).max(axis=1)


def dp_with_delta(gradient: Gradient, p: Array, delta: Array, x: Any, y: Ref) -> Array:
    """Return dp + delta, where dp is x y'."""
    if gradient.problem.dropout is None:
        return multiply(delta, x, y, transposed=True)
    product = multiply(full_tile(p.shape, 0.0), x, y, transposed=True)
    return gradient.drop(p, product, delta)


def _masked_first(problem: Problem, work: Any, step: Callable, sums: Any, redo: bool) -> Any:
    """Return the sums after all visits by `step(masked, n, sums)`, the masked ones first."""
    visits = work.visits
    if redo or not may_have_unmasked_tiles(problem, work.scalars):
        return lax.fori_loop(0, visits.total, functools.partial(step, True), sums)
    sums = lax.fori_loop(0, visits.masked, functools.partial(step, True), sums)
    return lax.fori_loop(visits.masked, visits.total, functools.partial(step, False), sums)
