"""Compute the gradients of attention from its log-sum-exp, one visible tile at a time (Dao 2023, algorithm 2).

With s from (1) and (2) of forward.py and delta = rowsum(dout * out) - dlse:
  (5) p  = exp(s - lse)                  dv_j += p' dout_i
  (6) ds = p * (dout_i v_j' - delta)     d_raw, dparams = (2) transposed at ds
  (7) dq_i += d_raw k_j;  dk_j += d_raw' q_i
One loop gives all three. Two loops, one for dq and one for dk and dv, would each compute p and d_raw (H200, bfloat16, 2^27
logits: 460 us of the loop's 790), to save a pass over sums (50 us).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.chunked.eligible import uses_gpu_fusion
from memeff.chunked.export import has_symbolic_lengths, pad_axis, pad_lengths
from memeff.chunked.floats import all_true, power_of_two
from memeff.chunked.gpu_fusion import Fp16Scales, fp16_scales
from memeff.chunked.loop import run_by_blocks, visit_tiles
from memeff.chunked.slicing import add_logit_params
from memeff.chunked.tile import (
    apply_dropout,
    dot,
    probabilities,
    tile_logits,
    transform_back,
    zero_nonfinite,
)
from memeff.logits import logits_from_dots, transform_query_key
from memeff.problem import Gradients, LogitParams, Operands, Problem, accumulator_dtype
from memeff.slicing import add_slice, slice_dims
from memeff.softmax import SEES_NOTHING, Lse, row_dots


def backward(
    problem: Problem, operands: Operands, out: Array, lse: Lse, dout: Array, dlse: Array | None
) -> Gradients:
    """Gradients from `out`, `dout` [B, K, G, T, D] and `lse`, `dlse` [B, K, G, T] (None: no cotangent)."""
    if has_symbolic_lengths(operands):
        t, like = problem.chunk_size[0], Gradients(*operands[:3], operands.terms)
        rows = jax.tree.map(lambda x: pad_axis(x, 3, t), (out, lse, dout, dlse))
        gradients = _backward(problem, pad_lengths(problem, operands), *rows)
        return jax.tree.map(lambda g, x: lax.slice(g, (0,) * g.ndim, x.shape), gradients, like)
    if problem.block and uses_gpu_fusion(problem, operands):
        call = functools.partial(_backward, dataclasses.replace(problem, block=None))
        query, key, value = map(jnp.zeros_like, operands[:3])
        zeros = Gradients(query, key, value, LogitParams())
        return run_by_blocks(problem, operands, call, (out, lse, dout, dlse), 2, zeros)
    return _backward(problem, operands, out, lse, dout, dlse)


def logit_param_gradients(
    problem: Problem, operands: Operands, out: Array, lse: Lse, dout: Array, dlse: Array | None
) -> LogitParams:
    """Gradients of terms alone, from the same: two products a tile instead of five."""
    return _backward(problem, operands, out, lse, dout, dlse, only_terms=True)


def _backward(
    problem: Problem,
    operands: Operands,
    out: Array,
    lse: Lse,
    dout: Array,
    dlse: Array | None,
    only_terms: bool = False,
) -> Any:
    """Steps (5) to (7)."""
    dtype = accumulator_dtype(operands)
    lse = lse if lse.low is not None else Lse(lse.high, jnp.zeros_like(lse.high))
    delta = row_dots(out, dout, dtype)
    dout = dout.transpose(0, 3, 1, 2, 4)  # b t k g d, as it came: nothing is copied
    delta = delta if dlse is None else delta - dlse
    walk = functools.partial(
        _backward_loop, problem, operands, lse, delta, dout, only_terms=only_terms
    )
    if not uses_gpu_fusion(problem, operands):
        return walk(False)()
    if operands.query.dtype == jnp.float32:
        return walk(True)()
    halves = fp16_scales(problem, operands, delta, dout)
    return lax.cond(all_true(halves.serve), walk(True, halves), walk(False))


def _backward_loop(
    problem: Problem,
    operands: Operands,
    lse: Lse,
    delta: Array,
    dout: Array,
    fused: bool,
    halves: Fp16Scales | None = None,
    only_terms: bool = False,
) -> Callable[[], Any]:
    """Step by step, or `fused`: p is made one step ahead, so that draw can go into the epilogue of dout v'."""
    dtype, rows, like_rows = delta.dtype, (delta,), ()
    if fused:
        assert problem.fused_chunk_size is not None
        problem = dataclasses.replace(problem, chunk_size=problem.fused_chunk_size)
        # Once for all tiles: who sees one of these that is not finite is NaN by lse or out.
        query, key, value = (zero_nonfinite(x, True) for x in operands[:3])
        operands = operands._replace(query=query, key=key, value=value)
    else:
        assert lse.low is not None
        rows = (delta, lse.high, lse.low)
    if halves:
        down = (1 / (halves.row * Fp16Scales.P)).astype(operands.query.dtype)
        rows, like_rows = (delta, halves.row, down), (halves.dout,)
    # Zeros that wait for delta: XLA:CPU would make them before the forward, and keep them through
    # it.
    zero, delta = lax.optimization_barrier((jnp.zeros((), dtype), delta))

    def of_tile(tile, high, low):  # (5)
        _, s, pull = tile_logits(problem, tile, apart=not fused)
        return probabilities(s, Lse(high, low), tile.keep), pull

    def ahead(tile):
        p, _ = of_tile(tile, *tile.rows)
        return (p * Fp16Scales.P).astype(jnp.float16) if halves else p

    def step(grads, tile) -> Any:
        v = tile.here.value
        q, k = transform_query_key(problem, tile.here, *tile.at)
        (delta, *others), (do, *half) = tile.rows, tile.wide
        masked = tile.keep is not None and not fused
        if masked:  # what a row that sees nothing brings along must not meet a 0 of p
            do = jnp.where(others[0][..., None] == SEES_NOTHING, 0, do)
        p, pull = (tile.ahead, None) if fused else of_tile(tile, *others)
        lift = None  # a fused walk has no float16 operands
        dp = dot("bkgtd,bkcd->bkgtc", do, zero_nonfinite(v, masked), problem, dtype)
        if pull is None:  # (6), where (2) transposed is linear in ds and the same for all logits
            up, down = (x[..., None] for x in others) if halves else (1, 1)
            _, pull = jax.vjp(
                lambda raw: logits_from_dots(problem, raw, LogitParams(), None), jnp.zeros_like(dp)
            )
            (draw,), dterms = pull((dp - delta[..., None]) * up), LogitParams()
            draw = (p * draw.astype(p.dtype)).astype(q.dtype) * down
            # at the end, for p of a row whose lse is NaN is NaN for all keys
            if tile.keep is not None:
                draw = jnp.where(tile.keep, draw, 0)
        else:
            dp = apply_dropout(problem, tile, lax.optimization_barrier(dp))
            draw, dterms = pull(p * (dp - delta[..., None]))
            draw, lift = _lift_float16(draw, q.dtype)
        if only_terms:
            return add_logit_params(grads, dterms, tile)
        if halves:
            column = slice_dims(
                halves.column, {0: (tile.first[0], q.shape[0]), 1: (tile.first[1], q.shape[1])}
            )
            dv = (
                dot("bkgtd,bkgtc->bkdc", half[0], p, problem, dtype, grads.value)
                / (column * Fp16Scales.P)[..., None]
            )
        else:
            dropped = apply_dropout(problem, tile, p).astype(v.dtype)
            dv = dot("bkgtd,bkgtc->bkdc", do, dropped, problem, dtype, grads.value)
        dq = dot("bkgtc,bkch->bkgth", draw, zero_nonfinite(k, masked), problem, dtype)  # (7)
        dk = dot("bkgth,bkgtc->bkhc", zero_nonfinite(q, masked), draw, problem, dtype, grads.key)
        if lift is not None:
            dq, dk = dq / lift[:, :, None, None, None], dk / lift[:, :, None, None]
        if problem.qk_transform is not None:
            dq, dk, dterms = transform_back(problem, tile, dq, dk, dterms)
        return Gradients(
            add_slice(grads.query, dq, (*tile.first, 0, tile.row, 0)),
            add_slice(grads.key, dk, (*tile.first, 0, tile.col)),
            add_slice(grads.value, dv, (*tile.first, 0, tile.col)),
            add_logit_params(grads.terms, dterms, tile),
        )

    how: dict[str, Any] = {"ahead": (tuple(lse), ahead), "along": 0} if fused else {}
    visit = visit_tiles(problem, operands, (*rows, *like_rows), step, (dout,), **how)

    def walk():
        terms = jax.tree.map(lambda x: jnp.zeros_like(x, dtype) + zero, operands.terms)
        if only_terms:
            return visit(terms)
        zeros = Gradients(
            jnp.zeros_like(operands.query.transpose(0, 2, 3, 1, 4), dtype) + zero,
            jnp.zeros_like(operands.key.transpose(0, 2, 3, 1), dtype) + zero,
            jnp.zeros_like(operands.value.transpose(0, 2, 3, 1), dtype) + zero,
            terms,
        )
        query, key, value, terms = visit(zeros)
        return Gradients(
            query.transpose(0, 3, 1, 2, 4),
            key.transpose(0, 3, 1, 2),
            value.transpose(0, 3, 1, 2),
            terms,
        )

    return walk


def _lift_float16(draw: Array, dtype) -> tuple[Array, Array | None]:
    """Return draw [b, k, g, t, c] in `dtype`, and the factor [b, k] by which float16 entries were multiplied, else None.

    The factor is a power of two that brings the largest entry near 2^14, because float16 holds nothing below 2^-24.
    Divide the products with draw by it.
    """
    if dtype != jnp.float16:
        return draw.astype(dtype), None
    lift = power_of_two(2.0**14 / jnp.where(jnp.isfinite(draw), abs(draw), 0).max((2, 3, 4)))
    return (draw * lift[:, :, None, None, None]).astype(dtype), lift
