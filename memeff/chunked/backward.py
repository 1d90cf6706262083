"""Compute the gradients of attention from its log-sum-exp, one visible tile at a time.

(Dao 2023, algorithm 2.) With s from (1), (2) of forward.py and delta = rowsum(dout * out) - dlse:
  (5) p  = exp(s - lse)                  dv_j += p' dout_i
  (6) ds = p * (dout_i v_j' - delta)     d_raw, d_params = (2) transposed at ds
  (7) dq_i += d_raw k_j;  dk_j += d_raw' q_i
One loop gives all three. Two loops, one for dq and one for dk and dv, would each compute p and
d_raw (H200, bfloat16, 2^27 logits: 460 us of the loop's 790), to save a pass over sums (50 us).

`_general_loop` serves every call. For linear logits on GPUs, `_fused_loop` has (5) and (6) in the
epilogues of their products; 16-bit operands go through float16 there if their range allows it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.chunked.eligible import one_tile_with_bias, runs_by_blocks, uses_gpu_fusion
from memeff.chunked.export import pad_axis, pad_lengths
from memeff.chunked.floats import all_true, apply_unless, lift_float16
from memeff.chunked.gpu_fusion import Fp16Scales, RowBounds, fp16_scales, row_bounds
from memeff.chunked.loop import Fold, Prefetch, run_by_blocks, visit_tiles
from memeff.chunked.schedule import has_elementwise_mask
from memeff.chunked.slicing import add_logit_params
from memeff.chunked.tile import (
    Tile,
    apply_dropout,
    dot,
    kept_by_dropout,
    positive_where_visible,
    probabilities,
    tile_logits,
    transform_back,
    zero_nonfinite,
)
from memeff.logits import logits_from_dots, transform_query_key, wide_terms
from memeff.order import zero_after
from memeff.problem import (
    Gradients,
    LogitParams,
    Operands,
    Problem,
    Schedule,
    accumulator_dtype,
    split_axis,
)
from memeff.sharding import may_be_sharded, vary_like
from memeff.slicing import add_slice, slice_dims
from memeff.softmax import LSE_OF_EMPTY_ROW, Lse, row_dots


class RowInputs(NamedTuple):
    """The numbers of each query that the loops read besides the operands."""

    high: Array  # B K G T, lse is high + low
    low: Array
    delta: Array  # B K G T
    dout: Array  # B T N D


def backward(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    out: Array,
    lse: Lse,
    dout: Array,
    dlse: Array | None,
) -> Gradients:
    """Return the gradients of `operands`.

    `out` and `dout` are [B, K, G, T, D], `lse` and `dlse` [B, K, G, T]. If nothing depends on lse,
    `dlse` is None.
    """
    if not operands.shape.lengths_known:
        t, _ = schedule.chunk_size
        rows = jax.tree.map(lambda x: pad_axis(x, 3, t), (out, lse, dout, dlse))
        padded_operands = pad_lengths(schedule.chunk_size, operands)
        padded = _backward(problem, schedule, padded_operands, *rows)
        inputs = Gradients(*operands[:3], operands.logit_params)
        return jax.tree.map(lambda g, x: lax.slice(g, (0,) * g.ndim, x.shape), padded, inputs)
    if runs_by_blocks(problem, schedule, operands):
        whole = dataclasses.replace(schedule, head_block=None)
        call = functools.partial(_backward, problem, whole)
        query, key, value = map(jnp.zeros_like, operands[:3])
        results = Gradients(query, key, value, LogitParams())
        return run_by_blocks(schedule, operands, call, (out, lse, dout, dlse), 2, results)
    return _backward(problem, schedule, operands, out, lse, dout, dlse)


def logit_param_gradients(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    out: Array,
    lse: Lse,
    dout: Array,
    dlse: Array | None,
) -> LogitParams:
    """Return the gradients of `logit_params` alone: two products a tile instead of five."""
    rows = _row_inputs(operands, out, lse, dout, dlse)
    visit = _general_loop(problem, schedule, operands, rows, only_terms=True)
    return visit(_zeros(operands.logit_params, zero_after(rows.delta, rows.delta.dtype)))


def _backward(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    out: Array,
    lse: Lse,
    dout: Array,
    dlse: Array | None,
) -> Gradients:
    """Run steps (5) to (7) in the loop that suits the call."""
    rows = _row_inputs(operands, out, lse, dout, dlse)
    zero = zero_after(rows.delta, rows.delta.dtype)

    def general() -> Gradients:
        visit = _general_loop(problem, schedule, operands, rows)
        return _sum_tiles(visit, operands, zero)

    if not uses_gpu_fusion(problem, schedule, operands):
        return general()
    if has_elementwise_mask(problem, operands):
        rows = _zero_empty_rows(rows)
    if operands.logit_params.bias is not None:
        return _backward_with_bias(problem, schedule, operands, rows)
    if operands.query.dtype == jnp.float32:
        return _fused_loop(problem, schedule, operands, rows)()
    bounds = row_bounds(problem, schedule, operands, rows.delta, rows.dout)
    scales = fp16_scales(operands, bounds, rows.dout)
    in_range = all_true(scales.in_range)
    fused = _fused_loop(problem, schedule, operands, rows, scales)
    return lax.cond(in_range, fused, general)


def _backward_with_bias(
    problem: Problem, schedule: Schedule, operands: Operands, rows: RowInputs
) -> Gradients:
    """Run the fused loop for all rows whose ds is finite, then the general loop for the others.

    The fused loop hides a pair by p = 0 alone, so the other factor of ds must be finite.
    """
    high, _, delta, dout = rows
    zero = zero_after(delta, delta.dtype)
    bias = _start_of_bias(problem, schedule, operands, zero)
    if one_tile_with_bias(schedule, operands):  # hides pairs by a mask, because it fuses nothing
        fused = _fused_loop_with_bias(problem, schedule, operands, rows)
        return _sum_tiles(fused, operands, zero, bias)
    v = abs(zero_nonfinite(operands.value, True)).max((1, 3)).astype(delta.dtype)  # b k
    v = v[..., None, None]
    size = split_axis(abs(dout.astype(delta.dtype)).sum(-1), 2, operands.shape.K)
    size = size.transpose(0, 2, 3, 1)  # b k g t
    finite = jnp.isfinite(delta) & jnp.isfinite(high) & (size * v < 2.0**100)
    scales = None
    if operands.query.dtype == jnp.bfloat16:
        finite_rows = _keep_rows(rows, finite)
        keys = abs(zero_nonfinite(operands.value, True)).max(-1).astype(delta.dtype)  # b s k
        least = jnp.where(keys == 0, jnp.inf, keys).min(1)
        kept = 1 if problem.dropout is None else 1 - problem.dropout.rate
        ds_by_p = jnp.where(finite, size / kept * v, 0) + abs(finite_rows.delta)
        bounds = RowBounds((v, least[..., None, None]), ds_by_p)
        scales = fp16_scales(operands, bounds, finite_rows.dout)
        in_range = scales.in_range[..., None, None]  # b k 1 1
        finite &= in_range
        scales = scales._replace(dout=jnp.where(in_range[..., None], scales.dout, 0))
    fused = _fused_loop_with_bias(problem, schedule, operands, _keep_rows(rows, finite), scales)
    general = _general_loop(problem, schedule, operands, _keep_rows(rows, ~finite))

    def visit(gradients: Gradients) -> Gradients:
        return apply_unless(all_true(finite), general, fused(gradients))

    return _sum_tiles(visit, operands, zero, bias)


def _keep_rows(rows: RowInputs, which: Array) -> RowInputs:
    """Return the rows `which` [B, K, G, T], and the others as rows that see no key."""
    of_tokens = lax.collapse(which.transpose(0, 3, 1, 2), 2)[..., None]  # b t n 1
    return RowInputs(
        jnp.where(which, rows.high, LSE_OF_EMPTY_ROW),
        jnp.where(which, rows.low, 0),
        jnp.where(which, rows.delta, 0),
        jnp.where(of_tokens, rows.dout, 0),
    )


def _writes_bias(problem: Problem, schedule: Schedule, operands: Operands) -> bool:
    """Return whether every entry of the bias gets its gradient from exactly one tile."""
    bias = operands.logit_params.bias
    assert bias is not None and schedule.gpu_fused_chunk_size is not None
    T, S = operands.shape.T, operands.shape.S
    t, c = schedule.gpu_fused_chunk_size
    all_tiles = not problem.has_window and problem.blocks is None and schedule.head_block is None
    return all_tiles and bias.shape[2:] == (T, S) and T % t == 0 and S % c == 0


def _start_of_bias(
    problem: Problem, schedule: Schedule, operands: Operands, zero: Array
) -> Array | None:
    """Return what the gradient of the bias begins with; None for zeros in the dtype of `zero`."""
    bias = operands.logit_params.bias
    assert bias is not None
    if schedule.head_block or bias.shape[2:] != (operands.shape.T, operands.shape.S):
        return None  # several tiles add to an entry
    if _writes_bias(problem, schedule, operands) and not may_be_sharded():
        return vary_like(lax.empty(bias.shape, bias.dtype), zero)
    return _zeros(bias, zero).astype(bias.dtype)


def _zero_empty_rows(rows: RowInputs) -> RowInputs:
    """Zero delta and dout of rows that see no key, because they may be NaN."""
    empty = rows.high == LSE_OF_EMPTY_ROW  # b k g t
    delta = jnp.where(empty, 0, rows.delta)
    empty = lax.collapse(empty.transpose(0, 3, 1, 2), 2)  # b t n
    return rows._replace(delta=delta, dout=jnp.where(empty[..., None], 0, rows.dout))


def _row_inputs(
    operands: Operands, out: Array, lse: Lse, dout: Array, dlse: Array | None
) -> RowInputs:
    """Return the inputs of the loops, from what `backward` receives."""
    low = jnp.zeros_like(lse.high) if lse.low is None else lse.low
    delta = row_dots(out, dout, accumulator_dtype(operands))
    # in the layout in which it is stored, so that nothing is copied
    dout = lax.collapse(dout.transpose(0, 3, 1, 2, 4), 2, 4)  # b t n d
    if dlse is not None:
        delta = delta - dlse
    return RowInputs(lse.high, low, delta, dout)


def _general_loop(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    rows: RowInputs,
    only_terms: bool = False,
) -> Fold:
    """Return a function that adds the gradients of any call to those given, step by step.

    With `only_terms` these are of the logit params, a `LogitParams` instead of `Gradients`.
    """
    dtype = rows.delta.dtype

    def step(gradients, tile) -> Any:
        v = tile.operands.value
        q, k = transform_query_key(problem, tile.operands, *tile.positions)
        delta, high, low = tile.row_scalars  # b k g t
        (do,) = tile.row_vectors  # b k g t d
        masked = tile.keep is not None
        if masked:  # dout of a row that sees nothing may be NaN, and p is 0 there
            do = jnp.where(high[..., None] == LSE_OF_EMPTY_ROW, 0, do)
        _, s, transpose_logits = tile_logits(problem, tile)
        p = probabilities(s, Lse(high, low), tile.keep)  # (5) b k g t c
        dp = dot("bkgtd,bkcd->bkgtc", do, zero_nonfinite(v, masked), problem, dtype)
        kept = kept_by_dropout(problem, tile)
        dp = apply_dropout(problem, kept, lax.optimization_barrier(dp))
        d_raw, d_params = transpose_logits(p * (dp - delta[..., None]))  # (6)
        d_raw, lift = lift_float16(d_raw, q.dtype, (2, 3, 4))  # lift is b k 1 1 1
        if only_terms:
            return add_logit_params(gradients, d_params, tile)
        p = apply_dropout(problem, kept, p).astype(v.dtype)
        dv = dot("bkgtd,bkgtc->bkdc", do, p, problem, dtype, gradients.value)  # (5)
        dq = dot("bkgtc,bkch->bkgth", d_raw, zero_nonfinite(k, masked), problem, dtype)  # (7)
        q = zero_nonfinite(q, masked)
        dk = dot("bkgth,bkgtc->bkhc", q, d_raw, problem, dtype, gradients.key)
        if lift is not None:
            dq = dq / lift
            dk = dk / lift[..., 0]
        if problem.qk_transform is not None:
            dq, dk, d_params = transform_back(problem, tile, dq, dk, d_params)
        return _add_tile(gradients, Gradients(dq, dk, dv, d_params), tile)

    row_scalars = rows.delta, rows.high, rows.low
    return visit_tiles(problem, schedule, operands, row_scalars, step, (rows.dout,))


def _fused_loop_with_bias(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    rows: RowInputs,
    scales: Fp16Scales | None = None,
) -> Fold:
    """Return a function that adds the gradients of linear logits with a bias to those given.

    XLA:GPU adds no bias in the epilogue of a product. So q k' is stored, p is computed from it one
    step ahead, and ds in the epilogue of dout v'. ds is the gradient of the bias as well. A hidden
    pair has p = 0, so ds / p must be finite there.

    A single tile fuses nothing there: ds is computed in float32, and a mask makes it 0.
    """
    single = one_tile_with_bias(schedule, operands)
    write_bias = _writes_bias(problem, schedule, operands)
    schedule, operands = _for_fused_loop(schedule, operands)
    dtype = rows.delta.dtype
    factor = _derivative_of_linear_logits(problem, operands, dtype)

    def probabilities_ahead(tile):  # (5)
        _, s, _ = tile_logits(problem, tile)
        p = probabilities(s, Lse(*tile.row_scalars), None)
        p = positive_where_visible(p, tile.keep)
        if scales is None:
            p = p.astype(operands.query.dtype)
        else:
            p = (p * Fp16Scales.P).astype(jnp.float16)
        return lax.optimization_barrier(p)  # else a single tile keeps q k' until dout v' is there

    def step(gradients, tile):
        q, k = tile.operands[:2]
        p = tile.prefetched  # b k g t c
        ds_by_p, unscale = _fused_ds_by_p(problem, tile, dtype)
        narrow = dtype if single else p.dtype  # in an epilogue, 16 bits are fused only with 16
        ds = (p.astype(narrow) * ds_by_p.astype(narrow)).astype(q.dtype) * unscale
        if single:
            ds = jnp.where(p == 0, 0, ds)
        dv = _fused_dv(problem, tile, scales, gradients.value)
        if problem.dropout is not None:
            dv = dv / (1 - problem.dropout.rate)
        dq = factor * dot("bkgtc,bkch->bkgth", ds, k, problem, dtype)  # (7)
        dk = factor * dot("bkgth,bkgtc->bkhc", q, ds, problem, dtype, gradients.key)

        def logits(terms):
            return logits_from_dots(problem, jnp.zeros_like(ds_by_p), terms, None)

        _, transpose_logits = jax.vjp(logits, wide_terms(tile.operands.logit_params, dtype))
        (d_params,) = transpose_logits(ds.astype(dtype))
        return _add_tile(gradients, Gradients(dq, dk, dv, d_params), tile, write_bias)

    row_arrays = _fused_rows(rows.delta, scales, operands.query.dtype)
    ahead = Prefetch((rows.high, rows.low), probabilities_ahead, with_mask=False)
    return visit_tiles(problem, schedule, operands, row_arrays, step, (rows.dout,), prefetch=ahead)


def _derivative_of_linear_logits(problem: Problem, operands: Operands, dtype) -> Array:
    """Return the derivative of linear logits by raw, a scalar that all pairs share."""
    scale = operands.logit_params.scale

    def linear_logits(raw):
        return logits_from_dots(problem, raw, LogitParams(scale=scale), None)

    # at raw = 0 because the derivative of linear logits is the same everywhere
    _, factor = jax.jvp(linear_logits, (jnp.zeros((), dtype),), (jnp.ones((), dtype),))
    return factor


def _fused_loop(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    rows: RowInputs,
    scales: Fp16Scales | None = None,
) -> Callable[[], Gradients]:
    """Return a function that computes the gradients of linear logits, to be fused by XLA:GPU.

    p is computed one step ahead, so that ds can go into the epilogue of dout v'. With `scales`,
    p and ds / p leave the epilogues as float16.
    """
    schedule, operands = _for_fused_loop(schedule, operands)
    dtype = rows.delta.dtype
    row_arrays = _fused_rows(rows.delta, scales, operands.query.dtype)
    zero = zero_after(rows.delta, rows.delta.dtype)
    params = operands.logit_params

    def probabilities_ahead(tile):  # (5)
        _, s, _ = tile_logits(problem, tile, materialize_raw=False)
        p = probabilities(s, Lse(*tile.row_scalars), tile.keep)
        return p if scales is None else (p * Fp16Scales.P).astype(jnp.float16)

    def step(gradients, tile):
        q, k = tile.operands[:2]
        p = tile.prefetched  # b k g t c
        ds_by_p, unscale = _fused_ds_by_p(problem, tile, dtype)
        ds = (p * ds_by_p.astype(p.dtype)).astype(q.dtype) * unscale
        if tile.keep is not None:  # last, because p is NaN for all keys where lse is NaN
            ds = jnp.where(tile.keep, ds, 0)
        dv = _fused_dv(problem, tile, scales, gradients.value)
        dq = dot("bkgtc,bkch->bkgth", ds, k, problem, dtype)  # (7), without the scale
        dk = dot("bkgth,bkgtc->bkhc", q, ds, problem, dtype, gradients.key)
        d_scale = None if params.scale is None else jnp.zeros((), dtype)  # comes at the end
        return _add_tile(gradients, Gradients(dq, dk, dv, LogitParams(scale=d_scale)), tile)

    ahead = Prefetch((rows.high, rows.low), probabilities_ahead)
    visit = visit_tiles(
        problem, schedule, operands, row_arrays, step, (rows.dout,), prefetch=ahead, long_axis=0
    )

    def run() -> Gradients:
        gradients = _sum_tiles(visit, operands, zero)
        factor = _derivative_of_linear_logits(problem, operands, dtype)
        if params.scale is not None:
            products = operands.query.astype(dtype) * gradients.query
            d_scale = jnp.where(gradients.query == 0, 0, products).sum()  # 0 * NaN is NaN
            d_params = gradients.logit_params._replace(scale=d_scale)
            gradients = gradients._replace(logit_params=d_params)
        if problem.dropout is not None:
            gradients = gradients._replace(value=gradients.value / (1 - problem.dropout.rate))
        return gradients._replace(query=gradients.query * factor, key=gradients.key * factor)

    return run


def _for_fused_loop(schedule: Schedule, operands: Operands) -> tuple[Schedule, Operands]:
    """Return the schedule with the tiles of a fused loop, and operands without NaN and Inf.

    They become 0 once for all tiles, because a row that sees one is NaN through its lse or out.
    """
    assert schedule.gpu_fused_chunk_size is not None
    schedule = dataclasses.replace(schedule, chunk_size=schedule.gpu_fused_chunk_size)
    query, key, value = (zero_nonfinite(x, True) for x in operands[:3])
    return schedule, operands._replace(query=query, key=key, value=value)


def _fused_rows(delta: Array, scales: Fp16Scales | None, dtype) -> tuple[Array, ...]:
    """Return the rows of a fused loop: delta, and what scales a row to float16 and back."""
    if scales is None:
        return (delta,)
    unscale = (1 / (scales.row * Fp16Scales.P)).astype(dtype)
    return delta, scales.row, unscale, scales.dout


def _fused_ds_by_p(problem: Problem, tile: Tile, dtype) -> tuple[Array, Array | int]:
    """Return ds / p [b, k, g, t, c] of step (6) in the scale of its row, and the scale back."""
    delta, *factors = tile.row_scalars  # b k g t
    scale, unscale = (x[..., None] for x in factors) if factors else (1, 1)
    dp = dot("bkgtd,bkcd->bkgtc", tile.row_vectors[0], tile.operands.value, problem, dtype)
    dp = apply_dropout(problem, tile.kept, dp)
    return (dp - delta[..., None]) * scale, unscale


def _fused_dv(problem: Problem, tile: Tile, scales: Fp16Scales | None, like: Array) -> Array:
    """Return dv [b, k, d, c] of the prefetched p; `like` is the sum over tiles.

    Probabilities that dropout drops count as 0. With `scales`, p and dout are float16, and dv is
    scaled back.
    """
    p = tile.prefetched
    assert p is not None
    if tile.kept is not None:
        p = jnp.where(tile.kept, p, 0)
    if scales is None:
        p = p.astype(tile.operands.value.dtype)
        return dot("bkgtd,bkgtc->bkdc", tile.row_vectors[0], p, problem, like.dtype, like)
    batch, head = tile.head_start
    b, k = p.shape[:2]
    column = slice_dims(scales.column, {0: (batch, b), 1: (head, k)})  # b k d
    dv = dot("bkgtd,bkgtc->bkdc", tile.row_vectors[1], p, problem, like.dtype, like)
    return dv / (column * Fp16Scales.P)[..., None]


def _sum_tiles(
    visit: Fold, operands: Operands, zero: Array, bias: Array | None = None
) -> Gradients:
    """Visit all tiles, beginning with gradients of 0, and restore the layout of `operands`.

    Given `bias`, the gradient of the bias begins with it.
    """
    terms = _zeros(operands.logit_params._replace(bias=None), zero)
    if bias is None:
        bias = _zeros(operands.logit_params.bias, zero)
    terms = terms._replace(bias=bias)
    query = split_axis(operands.query, 2, operands.shape.K)
    zeros = Gradients(
        _zeros(query.transpose(0, 2, 3, 1, 4), zero),  # b k g t h
        _zeros(operands.key.transpose(0, 2, 3, 1), zero),  # b k h s
        _zeros(operands.value.transpose(0, 2, 3, 1), zero),  # b k d s
        terms,
    )
    query, key, value, terms = visit(zeros)
    return Gradients(
        lax.collapse(query.transpose(0, 3, 1, 2, 4), 2, 4),
        key.transpose(0, 3, 1, 2),
        value.transpose(0, 3, 1, 2),
        terms,
    )


def _add_tile(
    gradients: Gradients, parts: Gradients, tile: Tile, write_bias: bool = False
) -> Gradients:
    """Add dq [b, k, g, t, h], dk [b, k, h, c], dv [b, k, d, c] and logit params of one tile."""
    return Gradients(
        add_slice(gradients.query, parts.query, (*tile.head_start, 0, tile.row_start, 0)),
        add_slice(gradients.key, parts.key, (*tile.head_start, 0, tile.col_start)),
        add_slice(gradients.value, parts.value, (*tile.head_start, 0, tile.col_start)),
        add_logit_params(gradients.logit_params, parts.logit_params, tile, write_bias),
    )


def _zeros(arrays: Any, zero: Array) -> Any:
    """Return a tree of zeros like `arrays`, in the dtype of `zero` and made from it."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, zero.dtype) + zero, arrays)
