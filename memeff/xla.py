"""Chunked attention in plain JAX: one tile of logits at a time, on any device. Hides the walk over tiles.

Forward, for each visible tile of queries i and keys j (Rabe & Staats 2021, section 2; Dao 2023, algorithm 1):
  (1) raw = q_i k_j'              (3) m' = max(m, rowmax s);  a = exp(m - m')
  (2) s   = finish(raw)           (4) l = a l + rowsum exp(s - m');  o = a o + exp(s - m') v_j
  at the end: out = o / l, lse = m + log l
Backward, from lse (Dao 2023, algorithm 2), with delta = rowsum(dout * out) - dlse:
  (5) p  = exp(s - lse), s from (1) and (2)        dv_j += p' dout_i
  (6) ds = p * (dout_i v_j' - delta)               draw, dterms = (2) transposed at ds
  (7) dq_i += draw k_j;  dk_j += draw' q_i
One walk gives all three: of two, one for dq and one for dk and dv, each would make p and draw (H200, bfloat16, 2^27 logits:
460 us of the walk's 790), to save a pass over sums (50 us).
Tiles that the window hides are never visited: a list made while tracing, or, where lengths or offsets are arrays, bounds
computed as it runs. The last tile of a row or column starts early so that it fits (slices that overhang are clamped without
a word); what it has in common with its neighbour gets position -1, which `visible` hides.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.problem import (
    SEES_NOTHING,
    Gradients,
    Lse,
    LseFor,
    Operands,
    Problem,
    Terms,
    accumulator_dtype,
    check_sizes_known,
    finish,
    log_sum_exp,
    only_kernels_fuse,
    part_of,
    places,
    row_dots,
    sink_weights,
    tile_range,
    transformed,
    visible,
)
from memeff.tile import Tile, back_through, distances, dot, drop, finite, logits, probabilities, row_max, values
from memeff.tiles import Walk, positions


def why_not(problem: Problem, operands: Operands) -> str | None:
    del operands
    return only_kernels_fuse(problem)  # else every call, every device


def how(problem: Problem, operands: Operands) -> str:
    """The walk in words."""
    fixed = reference_serves(problem, operands)
    walks = {"": problem.fixed_chunk_size if fixed else None, "in the gradient ": None}
    if wants_fused(problem, operands):
        walks["in the gradient "] = problem.fused_chunk_size
    told = {}
    for along, (name, special) in zip((1, 0), walks.items(), strict=True):
        t, c = special or problem.chunk_size
        this = dataclasses.replace(problem, chunk_size=(t, c))
        visited, total = count_tiles(this, operands)
        those = f"tiles of {t} x {c} logits, visited between bounds that are found as it runs"
        if visited is not None:
            those = f"tiles of {t} x {c} logits, {visited} of {total} visited"
            sizes = [size[1:] for size, _ in _pieces(this, operands, along if special else None)]
            rows, cols = max(sizes, key=math.prod, default=(t, c))
            those += f", joined to {rows} x {cols}" if rows * cols > t * c else ""
        told.setdefault(those, name)
    B, _, K, G, _ = operands.query.shape
    b, k = problem.block or (B, K)
    form = "a fixed row reference, checked" if fixed else "a running maximum"
    walk = "; ".join(name + those for those, name in told.items())
    return f"{walk}; {b * k * G} of {B * K * G} heads at a time; softmax with {form}"


def forward(problem: Problem, operands: Operands, lse_for: LseFor = "caller") -> tuple[Array, Lse]:
    """out [B, K, G, T, D] in the query's dtype, lse [B, K, G, T]."""
    if _symbolic(operands):
        rows = divided(operands, _online(problem, _padded(problem, operands)), log_sum_exp)
        return jax.tree.map(lambda x: lax.slice_in_dim(x, 0, operands.query.shape[1], axis=3), rows)
    if not reference_serves(problem, operands):
        return divided(operands, _online(problem, operands), log_sum_exp)
    if problem.block and wants_fused(problem, operands):
        o, l = empty_rows(operands)
        call = functools.partial(forward, dataclasses.replace(problem, block=None), lse_for=lse_for)
        return _block_by_block(problem, operands, call, (), 1, (o.astype(operands.query.dtype), Lse(l, l)))
    rows = _fixed(problem, operands, lse_for)
    stands = _stands(problem, operands, rows) & ~_sees_bad_value(problem, operands)

    def again(state):
        return state[0] | True, _online(problem, operands, state[1], stands)

    # A loop that runs once or never, for it writes over what does not stand; a cond would hold both.
    _, rows = lax.while_loop(lambda state: ~state[0], again, (_everywhere(stands), rows))
    return divided(operands, rows, _log_sum_exp_wide)


def _block_by_block(problem: Problem, operands: Operands, call, like_out, heads: int, found):
    """`call(operands, *like_out)` for one `problem.block` after the other: what is as long as the sequence exists for one.

    `like_out`: arrays B K ...; `heads`: the dim of the key heads in what is `found`, which is written over.
    """
    assert problem.block is not None
    b, k = problem.block

    def step(first, found):
        def cut(x, dim):
            return _as_it_is(part_of(x, {0: (first[0], b), dim: (first[1], k)}))

        sinks = _part(operands.terms.sinks, {0: (first[1], k)})
        here = Operands(cut(operands.query, 2), cut(operands.key, 2), cut(operands.value, 2), Terms(sinks=sinks))
        here = call(here, *jax.tree.map(lambda x: cut(x, 1), like_out))
        starts = [first[0], *[0] * (heads - 1), first[1]]
        put = lambda x, y: _write(x, _as_it_is(y.astype(x.dtype)), starts + [0] * (x.ndim - len(starts)))
        return jax.tree.map(put, found, here)

    return _each_block(problem, operands, step, found)


def _as_it_is(x: Array, dim: int = 2) -> Array:
    """With the dims from `dim` on in their order, which alone a merged dim can have.

    Else XLA brings whole arrays, outside the loop, into the order that it wants of a part. (A layout constraint would do,
    but cannot be exported.)
    """
    return lax.optimization_barrier(lax.collapse(x, dim)).reshape(x.shape)


class Rows(NamedTuple):
    """What the forward gathers for each query, B K G T, from p = exp(logit - m)."""

    m: Array
    l: Array  # sum of p
    weight: Array  # and of p as it is multiplied with the values
    o: Array  # sum of p v; B K G T D


def divided(operands: Operands, rows: Rows, log_sum_exp) -> tuple[Array, Lse]:
    empty = rows.l == 0
    l, weight, o = jnp.where(empty, 1, rows.l), jnp.where(empty, 1, rows.weight), rows.o
    if operands.terms.sinks is not None:
        share, weight = sink_weights(rows.m, rows.weight, operands.terms.sinks)
        o = o * share[..., None]
    out = (o / weight[..., None]).astype(operands.query.dtype)
    return out, log_sum_exp(jnp.where(empty, SEES_NOTHING, rows.m), l)


def _online(problem: Problem, operands: Operands, rows: Rows | None = None, stands: Array | None = None) -> Rows:
    """Steps (1) to (4), for every call. Of `rows`, those that stand are left as they are."""
    o, l = empty_rows(operands)
    before = Rows(l - jnp.inf, l, l, o)
    if rows is not None and stands is not None:
        before = jax.tree.map(functools.partial(_where_rows, stands), rows, before)

    def step(carry, tile):
        old = tuple(_rows_of(x, tile) for x in carry)
        old = lax.optimization_barrier(old)  # else XLA copies all of m
        raw, s, _ = logits(problem, tile)
        new, _ = online(problem, tile, raw, s, old)
        if stands is not None:
            new = jax.tree.map(functools.partial(_where_rows, _rows_of(stands, tile)), old, new)
        return tuple(_put(x, y, tile) for x, y in zip(carry, new, strict=True))

    m, l, o = _visit(problem, operands, (), step)((before.m, before.l, before.o))
    return Rows(m, l, l if stands is None else jnp.where(stands, before.weight, l), o)


def measured(problem: Problem, operands: Operands) -> tuple[Rows, Array, Array]:
    """The same, and of each row sum p (s - m) and sum p |q_pos - k_pos|, B K G T."""
    check_sizes_known(operands, "memeff.attention_statistics")
    o, l = empty_rows(operands)

    def step(carry, tile):
        m_old, l_old, o_old, e_old, d_old = (_rows_of(x, tile) for x in carry)
        raw, s, _ = logits(problem, tile)
        s = lax.optimization_barrier(s)  # else p and s - m are of logits that differ by a rounding
        (m_new, l_new, o_new), (shift, a, p) = online(problem, tile, raw, s, (m_old, l_old, o_old))
        fall = jnp.where(l_old == 0, 0, m_old - shift)  # of what was gathered before
        below = jnp.where(s == -jnp.inf, 0, s - shift[..., None])
        e_new = a * (e_old + fall * l_old) + (p * below).sum(-1)
        d_new = a * d_old + (p * distances(problem, tile)).sum(-1)
        return tuple(_put(x, y, tile) for x, y in zip(carry, (m_new, l_new, o_new, e_new, d_new), strict=True))

    m, l, o, e, d = _visit(problem, operands, (), step)((l - jnp.inf, l, o, l, l))
    return Rows(m, l, l, o), e, d


def online(problem: Problem, tile: Tile, raw: Array, s: Array, old):
    """(3) and (4) of a tile: m, l and o, and what is taken from s, what o before is multiplied with, and p."""
    m_old, l_old, o_old = old
    m_new = jnp.maximum(m_old, row_max(problem, tile, raw, s))  # (3)
    shift = jnp.where(m_new == -jnp.inf, 0, m_new) if tile.keep is not None else m_new
    a = jnp.exp(m_old - shift)
    p = jnp.exp(s - shift[..., None])
    l_new = a * l_old + p.sum(-1)  # (4)
    o_new = a[..., None] * o_old + values(problem, tile, p, o_old.dtype)
    return (m_new, l_new, o_new), (shift, a, p)


def _fixed(problem: Problem, operands: Operands, lse_for: LseFor) -> Rows:
    """(3) with m fixed beforehand: what no logit of the row can exceed by 69 nats. So exp can go into the epilogue of (1),
    and nothing is rescaled. Rows that see a value that is not finite are wrong.

    On GPUs l is the sum of p as it is multiplied, rounded to 16 bits, unless the caller wants lse: all probabilities that
    the backward makes from it are then wrong by one factor for each row, within 2^-9, as each of them is once it is rounded.
    """
    assert problem.fixed_chunk_size is not None
    problem = dataclasses.replace(problem, chunk_size=problem.fixed_chunk_size)
    D, dtype = operands.value.shape[-1], operands.value.dtype
    m = _reference(problem, operands)
    on_gpu = problem.fused_chunk_size is not None
    if on_gpu:
        operands = operands._replace(value=finite(operands.value, True))
    rounded = lse_for is None or (on_gpu and lse_for == "gradient")
    with_ones = on_gpu and rounded  # the sum of p from p [v 1]: no pass over p
    if with_ones:
        operands = operands._replace(value=jnp.pad(operands.value, [(0, 0)] * 3 + [(0, 8)], constant_values=1))
    o, l = empty_rows(operands)

    def step(carry, tile):
        _, s, _ = logits(problem, tile, apart=not rounded)
        p = jnp.exp(s - tile.rows[0][..., None])
        if rounded:  # in the product's epilogue: 6 bytes a logit instead of 12
            p = multiplied = p.astype(dtype)
        else:
            multiplied = _round(p, dtype)
        v = finite(tile.here.value, tile.keep is not None and not on_gpu)
        part = [dot("bkgtc,bkcd->bkgtd", multiplied, v, problem, o.dtype)]
        part += [] if with_ones else [x.sum(-1, dtype=l.dtype) for x in (p, multiplied)]
        return tuple(_put(x, _rows_of(x, tile) + y, tile) for x, y in zip(carry, part, strict=True))

    start = (o,) if with_ones else (o, l, l)
    o, *sums = _visit(problem, operands, (m,), step, beside=rounded, along=1)(start)
    # What is multiplied is divided by its own sum, for a row may hold a single p, and that one need not be 1.
    l, weight = sums or (o[..., D],) * 2
    return Rows(m, l, weight, o[..., :D])


def _sees_bad_value(problem: Problem, operands: Operands) -> Array:
    """Which rows, B K 1 T|1, see a value that is not finite; a tile of plain logits knows only the window."""
    bad = ~jnp.isfinite(operands.value).all(-1)  # b s k
    T, S = operands.query.shape[1], operands.key.shape[1]
    lo, hi, _, _ = tile_range(problem, problem.q_offset, np.arange(T), np.arange(T))
    before = jnp.pad(jnp.cumsum(bad, axis=1, dtype=jnp.int32), ((0, 0), (1, 0), (0, 0)))
    lo, hi = np.zeros(1, int) if lo is None else np.clip(lo, 0, S), np.full(1, S) if hi is None else np.clip(hi, 0, S)
    seen = jnp.take(before, hi, axis=1) - jnp.take(before, lo, axis=1)  # b t|1 k
    return (seen > 0).swapaxes(1, 2)[:, :, None]


def _round(x: Array, dtype) -> Array:
    """To `dtype`, for good: XLA may take back a mere astype where what follows is wider (xla_allow_excess_precision)."""
    return lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant).astype(dtype)


def reference_serves(problem: Problem, operands: Operands) -> bool:
    """Where it is wanted and can be had."""
    return problem.fixed_chunk_size is not None and can_bound(problem, operands)


def can_bound(problem: Problem, operands: Operands) -> bool:
    """Can a row's logits be bounded beforehand? With 8 bits of exponent, plain logits, and a key for every row."""
    terms = operands.terms._replace(sinks=None)
    extras = (*problem.extras, *jax.tree.leaves(terms), operands.mask, operands.q_segments)
    plain = all(x is None for x in extras) and not _bounded(operands)
    wide = operands.query.dtype in (jnp.bfloat16, jnp.float32)
    T, S = operands.query.shape[1], operands.key.shape[1]
    if not (plain and wide and T > 0):
        return False
    ends = np.array([0, T - 1])  # if one of them sees a key, so do the rows between
    lo, hi, _, _ = tile_range(problem, problem.q_offset, ends, ends)
    lo, hi = 0 if lo is None else np.maximum(lo, 0), S if hi is None else np.minimum(hi, S)
    return bool(np.all(lo < hi))


def _reference(problem: Problem, operands: Operands) -> Array:
    """m [B, K, G, T]: |logit| <= scale |q_i| max_j |k_j| (Cauchy-Schwarz), less 69 nats, so that p stays below 2^100."""
    q, k = (jnp.sqrt(jnp.square(x.astype(accumulator_dtype(operands))).sum(-1)) for x in operands[:2])
    return jnp.maximum(abs(problem.scale) * q.transpose(0, 2, 3, 1) * _largest_seen(problem, operands, k) - 69.0, 0)


def _largest_seen(problem: Problem, operands: Operands, x: Array) -> Array:
    """The largest x [B, S, K] of the keys from the first that any row sees to the last that this row sees, B K 1 T|1.

    So a hidden key changes no bit.
    """
    T, S = operands.query.shape[1], operands.key.shape[1]
    start, end, _, _ = tile_range(problem, problem.q_offset, np.arange(T), np.arange(T))
    start = 0 if start is None else int(np.clip(start[0], 0, S - 1))
    x = lax.cummax(x[:, start:], axis=1)
    x = x[:, -1:] if end is None else jnp.take(x, np.clip(end, start + 1, S) - 1 - start, axis=1)
    return x.swapaxes(1, 2)[:, :, None]


def _stands(problem: Problem, operands: Operands, rows: Rows) -> Array:
    """Return for which rows, B K G T, nothing was flushed or overflowed that the result can show.

    Each of the S probabilities p = exp(s - m), and each product p v, is flushed to 0 below 2^-126. So l lacks at most
    S 2^-126, and o at most S 2^-126 max(1, |v|). Neither shows in float32 where it is below 2^-24 of l, and of the
    mean |o| of the row. Where p or p v overflowed, l or o is not finite.
    """
    S = operands.key.shape[1]
    lost = S * 2.0 ** (24 - 126)
    v = jnp.abs(operands.value.astype(rows.o.dtype))
    v = _largest_seen(problem, operands, jnp.where(v < jnp.inf, v, 0).max(-1, initial=0))
    o = jnp.abs(rows.o).sum(-1) / max(1, rows.o.shape[-1])  # at most the largest; XLA:CPU's max may drop NaN, a sum does not
    kept = (o >= lost * jnp.maximum(v, 1)) | (v == 0)
    return (rows.l >= lost) & (rows.l < 2.0**125) & kept & (o < jnp.inf)


def _log_sum_exp_wide(m: Array, l: Array) -> Lse:
    """m + log l where l may be 2^100: log l as e log 2 + log f (l = f 2^e), for log l alone is rounded to 4e-6 there."""
    f, power = _split(l)
    e = (lax.bitcast_convert_type(power, jnp.int32) >> 23).astype(l.dtype) - 127
    step = e * 0.693359375  # log 2 in 9 bits, so that the product is exact
    high = m + step
    back = high - m
    rest = ((m - (high - back)) + (step - back)) + (e * -2.12194440e-4 + jnp.log(f))  # log 2 = 0.693359375 - 2.1219444e-4
    return Lse(high + rest, (high - (high + rest)) + rest)


def _split(x: Array) -> tuple[Array, Array]:
    """f in [1, 2), NaN or Inf, and a power of two; x = f * power, float32. (XLA gathers frexp on an Explicit mesh.)"""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    f, power = (lax.bitcast_convert_type(b, x.dtype) for b in (bits & 0x7FFFFF | 0x3F800000, bits & 0x7F800000))
    return jnp.where(jnp.isfinite(x), f, x), power


@jax.custom_batching.custom_vmap
def _everywhere(ok: Array) -> Array:
    return ok.all()


@_everywhere.def_vmap
def _everywhere_in_batch(size, batched, ok):
    del size, batched
    return _everywhere(ok), False  # one answer for the whole batch: the cond stays a cond


def backward(problem: Problem, operands: Operands, out: Array, lse: Lse, dout: Array, dlse: Array | None) -> Gradients:
    """Gradients from `out`, `dout` [B, K, G, T, D] and `lse`, `dlse` [B, K, G, T] (None: no cotangent)."""
    if _symbolic(operands):
        t, like = problem.chunk_size[0], Gradients(*operands[:3], operands.terms)
        rows = jax.tree.map(lambda x: _longer(x, 3, t), (out, lse, dout, dlse))
        gradients = _backward(problem, _padded(problem, operands), *rows)
        return jax.tree.map(lambda g, x: lax.slice(g, (0,) * g.ndim, x.shape), gradients, like)
    if problem.block and wants_fused(problem, operands):
        call = functools.partial(_backward, dataclasses.replace(problem, block=None))
        query, key, value = map(jnp.zeros_like, operands[:3])
        zeros = Gradients(query, key, value, Terms())
        return _block_by_block(problem, operands, call, (out, lse, dout, dlse), 2, zeros)
    return _backward(problem, operands, out, lse, dout, dlse)


def gradient_of_terms(problem: Problem, operands: Operands, out: Array, lse: Lse, dout: Array, dlse: Array | None) -> Terms:
    """Gradients of terms alone, from the same: two products a tile instead of five."""
    return _backward(problem, operands, out, lse, dout, dlse, only_terms=True)


def _backward(
    problem: Problem, operands: Operands, out: Array, lse: Lse, dout: Array, dlse: Array | None, only_terms: bool = False
) -> Any:
    """Steps (5) to (7)."""
    dtype = accumulator_dtype(operands)
    lse = lse if lse.low is not None else Lse(lse.high, jnp.zeros_like(lse.high))
    delta = row_dots(out, dout, dtype)
    dout = dout.transpose(0, 3, 1, 2, 4)  # b t k g d, as it came: nothing is copied
    delta = delta if dlse is None else delta - dlse
    walk = functools.partial(_walk_back, problem, operands, lse, delta, dout, only_terms=only_terms)
    if not wants_fused(problem, operands):
        return walk(False)()
    if operands.query.dtype == jnp.float32:
        return walk(True)()
    halves = _halves(problem, operands, delta, dout)
    return lax.cond(_everywhere(halves.serve), walk(True, halves), walk(False))


class Halves(NamedTuple):
    """What (5) and (6) are scaled by, powers of two, where they leave the epilogues of their products in float16."""

    dout: Array  # B K G T D, as the products want it; scaled by `column` so that its largest entry is below 2^16
    column: Array  # B K D
    row: Array  # B K G T, such that draw / p times it is below 2^4
    serve: Array  # B K, of which the rows and keys are large enough for float16's exponents

    P = 2.0**11  # scales p


def _halves(problem: Problem, operands: Operands, delta: Array, dout: Array) -> Halves:
    """11 bits, three more than bfloat16 has, are kept of what is not far below its bound: 2^29 times for dout, 2^25 for p,
    2^18 for draw / p. So float16 serves if no row of dout is smaller than that beside others, and no value 2^10 times
    smaller than another (draw / p is some 2^4 times smaller than its bound anyway).
    """
    size, v = (abs(x.astype(delta.dtype)) for x in (dout, operands.value))
    v = jnp.where(jnp.isfinite(v), v, 0).max(-1)  # b s k
    largest = size.sum(-1).transpose(0, 2, 3, 1) * _largest_seen(problem, operands, v)
    bound = abs(problem.scale) * (largest + abs(delta))  # b k g t
    row = _power_of_two(2.0**4 / bound)
    peak = size.max((1, 3), where=jnp.isfinite(size), initial=0)  # b k d
    column = _power_of_two(2.0**15 / peak)
    half = (dout.astype(delta.dtype) * column[:, None, :, None]).astype(jnp.float16)
    rows = ~(abs(half).max(-1) < 2.0**-14) | (size.max(-1) == 0)  # b t k g
    # A power of two that stopped at 2^100 or 2^-100 did not bring what it scales into float16's range.
    rows &= ~_out_of_range(bound * row, 2.0**4).transpose(0, 3, 1, 2)
    rows &= ~_out_of_range(peak * column, 2.0**15).any(-1)[:, None, :, None]
    T, S = operands.query.shape[1], operands.key.shape[1]
    first, end, _, _ = tile_range(problem, problem.q_offset, 0, T - 1)
    v = v[:, max(0, first or 0) : S if end is None else min(S, end)]
    keys = (v >= v.max(1, keepdims=True) * 2.0**-10) | (v == 0)
    return Halves(_as_it_is(half.transpose(0, 2, 3, 1, 4), 3), column, row, rows.all((1, 3)) & keys.all(1))


def _out_of_range(x: Array, top: float) -> Array:
    return (x > top) | ((x < top / 2) & (x > 0))


def wants_fused(problem: Problem, operands: Operands) -> bool:
    """On GPUs, with plain logits."""
    return problem.fused_chunk_size is not None and reference_serves(problem, operands)


def _walk_back(
    problem: Problem,
    operands: Operands,
    lse: Lse,
    delta: Array,
    dout: Array,
    fused: bool,
    halves: Halves | None = None,
    only_terms: bool = False,
) -> Callable[[], Any]:
    """Step by step, or `fused`: p is made one step ahead, so that draw can go into the epilogue of dout v'."""
    dtype, rows, like_rows = delta.dtype, (delta,), ()
    if fused:
        assert problem.fused_chunk_size is not None
        problem = dataclasses.replace(problem, chunk_size=problem.fused_chunk_size)
        # Once for all tiles: who sees one of these that is not finite is NaN by lse or out.
        query, key, value = (finite(x, True) for x in operands[:3])
        operands = operands._replace(query=query, key=key, value=value)
    else:
        assert lse.low is not None
        rows = (delta, lse.high, lse.low)
    if halves:
        down = (1 / (halves.row * Halves.P)).astype(operands.query.dtype)
        rows, like_rows = (delta, halves.row, down), (halves.dout,)
    # Zeros that wait for delta: XLA:CPU would make them before the forward, and keep them through it.
    zero, delta = lax.optimization_barrier((jnp.zeros((), dtype), delta))

    def of_tile(tile, high, low):  # (5)
        _, s, pull = logits(problem, tile, apart=not fused)
        return probabilities(s, Lse(high, low), tile.keep), pull

    def ahead(tile):
        p, _ = of_tile(tile, *tile.rows)
        return (p * Halves.P).astype(jnp.float16) if halves else p

    def step(grads, tile) -> Any:
        v = tile.here.value
        q, k = transformed(problem, tile.here, *tile.at)
        (delta, *others), (do, *half) = tile.rows, tile.wide
        masked = tile.keep is not None and not fused
        if masked:  # what a row that sees nothing brings along must not meet a 0 of p
            do = jnp.where(others[0][..., None] == SEES_NOTHING, 0, do)
        p, pull = (tile.ahead, None) if fused else of_tile(tile, *others)
        lift = None  # a fused walk has no float16 operands
        dp = dot("bkgtd,bkcd->bkgtc", do, finite(v, masked), problem, dtype)
        if pull is None:  # (6), where (2) transposed is linear in ds and the same for all logits
            up, down = (x[..., None] for x in others) if halves else (1, 1)
            _, pull = jax.vjp(lambda raw: finish(problem, raw, Terms(), None), jnp.zeros_like(dp))
            (draw,), dterms = pull((dp - delta[..., None]) * up), Terms()
            draw = (p * draw.astype(p.dtype)).astype(q.dtype) * down
            if tile.keep is not None:  # at the end, for p of a row whose lse is NaN is NaN for all keys
                draw = jnp.where(tile.keep, draw, 0)
        else:
            dp = drop(problem, tile, lax.optimization_barrier(dp))
            draw, dterms = pull(p * (dp - delta[..., None]))
            draw, lift = _lifted(draw, q.dtype)
        if only_terms:
            return _add_terms(grads, dterms, tile)
        if halves:
            column = part_of(halves.column, {0: (tile.first[0], q.shape[0]), 1: (tile.first[1], q.shape[1])})
            dv = dot("bkgtd,bkgtc->bkdc", half[0], p, problem, dtype, grads.value) / (column * Halves.P)[..., None]
        else:
            dropped = drop(problem, tile, p).astype(v.dtype)
            dv = dot("bkgtd,bkgtc->bkdc", do, dropped, problem, dtype, grads.value)
        dq = dot("bkgtc,bkch->bkgth", draw, finite(k, masked), problem, dtype)  # (7)
        dk = dot("bkgth,bkgtc->bkhc", finite(q, masked), draw, problem, dtype, grads.key)
        if lift is not None:
            dq, dk = dq / lift[:, :, None, None, None], dk / lift[:, :, None, None]
        if problem.qk_transform is not None:
            dq, dk, dterms = back_through(problem, tile, dq, dk, dterms)
        return Gradients(
            _add(grads.query, dq, (*tile.first, 0, tile.row, 0)),
            _add(grads.key, dk, (*tile.first, 0, tile.col)),
            _add(grads.value, dv, (*tile.first, 0, tile.col)),
            _add_terms(grads.terms, dterms, tile),
        )

    how: dict[str, Any] = {"ahead": (tuple(lse), ahead), "along": 0} if fused else {}
    visit = _visit(problem, operands, (*rows, *like_rows), step, (dout,), **how)

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
        return Gradients(query.transpose(0, 3, 1, 2, 4), key.transpose(0, 3, 1, 2), value.transpose(0, 3, 1, 2), terms)

    return walk


def _lifted(draw: Array, dtype) -> tuple[Array, Array | None]:
    """Return draw [b, k, g, t, c] in `dtype`, and the factor [b, k] by which float16 entries were multiplied, else None.

    The factor is a power of two that brings the largest entry near 2^14, because float16 holds nothing below 2^-24.
    Divide the products with draw by it.
    """
    if dtype != jnp.float16:
        return draw.astype(dtype), None
    lift = _power_of_two(2.0**14 / jnp.where(jnp.isfinite(draw), abs(draw), 0).max((2, 3, 4)))
    return (draw * lift[:, :, None, None, None]).astype(dtype), lift


def _power_of_two(x: Array) -> Array:
    """The largest at most x > 0; 1 where that is not finite."""
    return jnp.where(jnp.isfinite(x), jnp.clip(_split(x)[1], 2.0**-100, 2.0**100), 1)


def cut_tile(
    operands: Operands,
    flat: tuple[Array, ...],
    rows: tuple[Array, ...],
    lengths: tuple[int, int],
    problem: Problem,
    masked: bool,
    first,
    i,
    j,
) -> Tile:
    """Slices of everything for the tile at query `i` and key `j` of the block that begins with batch entry and key head
    `first`; `flat` are B T N ..., the query first, `rows` B K G T|T D. Mask and bias are B|1 N|1 T|1 S|1.
    """
    t, c = problem.chunk_size
    B, _, K, G, _ = operands.query.shape
    b, k = problem.block or (B, K)
    row, at_rows = positions(i, t, lengths[0])
    col, at_cols = positions(j, c, lengths[1])
    batch, heads = (first[0], b), (first[1], k)

    def spread(x):
        x = part_of(x, {0: batch, 1: (row, t), 2: (first[1] * G, k * G)})
        return x.reshape(b, t, k, G, x.shape[-1]).transpose(0, 2, 3, 1, 4)  # b k g t h|d

    def both(x):
        if x is None:
            return None
        x = part_of(x, {0: batch, 1: (first[1] * G, k * G), 2: (row, t), 3: (col, c)})
        return x.reshape(x.shape[0], *((k, G) if x.shape[1] > 1 else (1, 1)), *x.shape[2:])

    query, *wide = map(spread, flat)
    here = _block(operands, first[0], b)
    here = here._replace(
        query=query,
        key=part_of(operands.key, {0: batch, 1: (col, c), 2: heads}).swapaxes(1, 2),
        value=part_of(operands.value, {0: batch, 1: (col, c), 2: heads}).swapaxes(1, 2),
        mask=both(operands.mask),
        terms=operands.terms._replace(bias=both(operands.terms.bias)),
        q_segments=_part(here.q_segments, {1: (row, t)}),
        kv_segments=_part(here.kv_segments, {1: (col, c)}),
    )
    cut = [part_of(x, {0: batch, 1: heads, 3: (row, t)}) for x in rows]
    narrow, wide = tuple(x for x in cut if x.ndim == 4), (*wide, *(x for x in cut if x.ndim == 5))
    at = places(problem, here, query[..., 0, 0], first, at_rows, at_cols)
    keep = visible(problem, here, at_rows, at_cols, at) if masked else None
    return Tile(here, narrow, wide, (at_rows, at_cols), at, keep, first, row, col, (K, *lengths))


def _rows_of(x: Array, tile: Tile) -> Array:
    """The tile's part of x [B, K, G, T, ...]."""
    b, k, _, t = tile.here.query.shape[:4]
    return part_of(x, {0: (tile.first[0], b), 1: (tile.first[1], k), 3: (tile.row, t)})


def _where_rows(which: Array, x: Array, y: Array) -> Array:
    return jnp.where(which if x.ndim == which.ndim else which[..., None], x, y)


def _put(x: Array, rows: Array, tile: Tile) -> Array:
    return _write(x, rows, (*tile.first, 0, tile.row, 0))


def _write(x: Array, part: Array, starts) -> Array:
    """`part` at `starts`, 0 in broadcast dims."""
    starts = (0 if size == 1 else start for start, size in zip(starts, x.shape, strict=False))
    return lax.dynamic_update_slice(x, part, [jnp.int32(start) for start in starts])


def _add(total: Array, part: Array, starts) -> Array:
    old = part_of(total, dict(enumerate(zip(starts, part.shape, strict=False))))
    return _write(total, old + part.astype(total.dtype), starts)


def _add_terms(total: Terms, part: Terms, tile: Tile) -> Terms:
    bias = None
    if total.bias is not None and part.bias is not None:
        bias = _add(total.bias, part.bias, (*tile.first, 0, tile.row, tile.col))
    pairs = zip(total[:2], part[:2], strict=True)
    scale, soft_cap = (None if a is None or b is None else a + b.astype(a.dtype) for a, b in pairs)
    score, transform = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total[3:5], part[3:5])
    return Terms(scale, soft_cap, bias, score, transform)


def empty_rows(operands: Operands) -> tuple[Array, Array]:
    """o and l before any key, made from an input so that they are sharded as it is."""
    l = jnp.zeros_like(operands.query[..., 0].transpose(0, 2, 3, 1), accumulator_dtype(operands))  # b k g t
    return l[..., None] + jnp.zeros((1, 1, 1, 1, operands.value.shape[-1]), l.dtype), l


# ---- symbolic lengths (jax.export): padded by one tile, so that a tile always fits; lengths hide what was added


def _symbolic(operands: Operands) -> bool:
    return not (isinstance(operands.query.shape[1], int) and isinstance(operands.key.shape[1], int))


def _padded(problem: Problem, operands: Operands) -> Operands:
    B, T, S = *operands.query.shape[:2], operands.key.shape[1]
    t, c = problem.chunk_size

    def lengths(given, n):
        return jnp.broadcast_to(jnp.asarray(n, jnp.int32), (B,)) if given is None else jnp.minimum(given, n)

    def both(x):
        return None if x is None else _longer(_longer(x, -2, t), -1, c)

    return operands._replace(
        query=_longer(operands.query, 1, t),
        key=_longer(operands.key, 1, c),
        value=_longer(operands.value, 1, c),
        terms=operands.terms._replace(bias=both(operands.terms.bias)),
        mask=both(operands.mask),
        q_lengths=lengths(operands.q_lengths, T),
        kv_lengths=lengths(operands.kv_lengths, S),
        q_segments=_longer(operands.q_segments, 1, t),
        kv_segments=_longer(operands.kv_segments, 1, c),
    )


def _longer(x: Array | None, axis: int, size: int) -> Array | None:
    if x is None or isinstance(x.shape[axis], int):
        return x
    width = [(0, 0)] * x.ndim
    width[axis] = (0, size)
    return jnp.pad(x, width)


# ---- the walk


def _visit(
    problem: Problem,
    operands: Operands,
    rows: tuple[Array, ...],
    step,
    like_query=(),
    beside=False,
    ahead=None,
    along=None,
) -> Callable[[Any], Any]:
    """A function that folds `step(carry, tile)` over the tiles that may see something, one `problem.block` after the other.

    What is sliced along with the queries: `rows`, B K G T or B K G T D, and `like_query`, B T K G D. XLA:GPU fuses what
    follows a product into it only if its other inputs are parameters of the loop, not slices, nor another product. So, with
    `beside`, what a step puts beside a product (`rows` B K G T, who sees whom) is made in the step before. So is, with
    `ahead` = (rows, make), `make` of a tile that has those rows. `along`: are large tiles rather high (0) or wide (1)?
    """
    if 0 in (*operands.query.shape[:4], operands.key.shape[1]):
        return lambda carry: carry  # nothing to see, or nobody to see it
    # With one dim of heads, which they had at the door: for G = 1, XLA:CPU would copy them into a layout of its own.
    flat = tuple(lax.collapse(x, 2, 4) for x in (operands.query, *like_query))
    mask, bias = (None if x is None else lax.collapse(x, 1, 3) for x in (operands.mask, operands.terms.bias))
    with_flat = operands._replace(mask=mask, terms=operands.terms._replace(bias=bias))
    lengths = operands.query.shape[1], operands.key.shape[1]
    pieces = () if _bounded(operands) else _pieces(problem, operands, along)
    B, _, K = operands.query.shape[:3]
    b, k = problem.block or (B, K)

    def block(first):
        if _bounded(operands):
            at = lambda carry, i, j: step(carry, cut_tile(with_flat, flat, rows, lengths, problem, True, first, i, j))
            return functools.partial(_visit_bounded, problem, _block(operands, first[0], b), at)

        def fetching(rows, masked, size, starts):
            here = _cut(with_flat, flat, rows, size, starts) if problem.joined else (with_flat, flat, rows)
            return functools.partial(cut_tile, *here, lengths, dataclasses.replace(problem, chunk_size=size), masked, first)

        lists = []
        for (masked, *size), starts in pieces:
            fetch = functools.partial(fetching, masked=masked, size=tuple(size), starts=starts)
            lists.append(_visit_listed(fetch(rows), step, starts, beside, ahead and (fetch(ahead[0]), ahead[1])))
        return lambda carry: functools.reduce(lambda carry, visit: visit(carry), lists, carry)

    if (b, k) == (B, K):
        return block((0, 0))
    return functools.partial(_each_block, problem, operands, lambda first, carry: block(first)(carry))


def _each_block(problem: Problem, operands: Operands, step, carry):
    """Folds `step((batch entry, key head), carry)` over where the blocks begin."""
    assert problem.block is not None
    B, _, K = operands.query.shape[:3]
    b, k = problem.block
    at = lambda n, carry: step((n // (K // k) * b, n % (K // k) * k), carry)
    return lax.fori_loop(jnp.int32(0), jnp.int32(B // b * (K // k)), at, carry)


def _block(operands: Operands, first, size: int) -> Operands:
    """With what belongs to a batch entry, but for query, key and value, cut to some entries."""
    names = "q_lengths", "kv_lengths", "q_offset", "q_segments", "kv_segments"
    return operands._replace(**{name: _part(getattr(operands, name), {0: (first, size)}) for name in names})


def _part(x: Array | None, cuts: dict[int, tuple[Any, int]]) -> Array | None:
    return None if x is None else part_of(x, cuts)


def _cut(operands: Operands, flat: tuple[Array, ...], rows: tuple[Array, ...], size: tuple[int, int], starts: np.ndarray):
    """What `cut_tile` slices, cut to the queries, or the keys, that all tiles of a list share: once, not in each step."""
    (row, col), (same_rows, same_cols) = starts[0].tolist(), (starts == starts[0]).all(0)
    if same_rows:
        row = min(row, flat[0].shape[1] - size[0])
        flat = tuple(lax.slice_in_dim(x, row, row + size[0], axis=1) for x in flat)
        rows = tuple(lax.slice_in_dim(x, row, row + size[0], axis=3) for x in rows)
    if same_cols:
        col = min(col, operands.key.shape[1] - size[1])
        key, value = (lax.slice_in_dim(x, col, col + size[1], axis=1) for x in operands[1:3])
        operands = operands._replace(key=key, value=value)
    return operands, flat, rows


def _visit_listed(fetch, step, pairs: np.ndarray, beside: bool, ahead):
    if not beside and ahead is None:
        return lambda carry: lax.scan(lambda carry, ij: (step(carry, fetch(*ij)), None), carry, pairs)[0]

    def aside(fetch, ij):
        tile = fetch(*ij)
        return tile.rows, tile.keep

    def known(fetch, ij, aside):
        rows, keep = aside
        return fetch(*ij)._replace(rows=rows, keep=keep)

    n = len(pairs)
    here, following, after = (pairs[np.minimum(np.arange(n) + further, n - 1)] for further in range(3))
    if ahead is None:

        def one_ahead(state, of):
            carry, now = state
            here, following = of
            return (step(carry, known(fetch, here, now)), aside(fetch, following)), None

        start = aside(fetch, here[0])
        return lambda carry: lax.scan(one_ahead, (carry, start), (here, following))[0][0]
    fetch_ahead, make = ahead

    def two_ahead(state, of):
        carry, now, then, made = state
        here, following, after = of
        carry = step(carry, known(fetch, here, now)._replace(ahead=made))
        tile = known(fetch_ahead, following, then)
        # Only now, so that it takes the place of what was made before.
        carry, key = lax.optimization_barrier((carry, tile.here.key))
        made = make(tile._replace(here=tile.here._replace(key=key)))
        return (carry, aside(fetch, following), aside(fetch_ahead, after), made), None

    first, start = known(fetch_ahead, here[0], aside(fetch_ahead, here[0])), aside(fetch, here[0])
    then = aside(fetch_ahead, following[0])
    return lambda carry: lax.scan(two_ahead, (carry, start, then, make(first)), (here, following, after))[0][0]


def _pieces(problem: Problem, operands: Operands, along: int | None):
    """[((masked, rows, columns), where each starts [n, 2])]: the tiles by size, masked ones last.

    Where `problem.joined` allows, whole tiles that form a larger square are one (each step costs launches, and slices of
    what it reads and adds to), cut across `along` to so many logits, and into two at least: XLA unrolls a loop of one step.
    Lists are few, for each makes its first probabilities on its own: a few whole tiles that are left go with the masked.
    """
    whole, edge = tiles(problem, operands)
    found, area, cut = [], math.prod(problem.chunk_size), 1 - (along or 0)
    if problem.joined and along is not None and len(whole):
        counts = whole.max(0) + 1
        left = np.zeros(counts, bool)
        left[tuple(whole.T)] = True
        n = 2 ** max(0, math.ceil(math.log2(problem.joined / area) / 2))
        while True:
            size = [n * side for side in problem.chunk_size]
            squares, _ = tiles(dataclasses.replace(problem, chunk_size=tuple(size)), operands)
            squares = squares[left[tuple(n * squares.T)]]
            if len(squares) or n == 1:
                break
            n //= 2
        starts, thinnest = squares * size, min(128, problem.chunk_size[cut])
        while size[cut] % 2 == 0 and size[cut] > thinnest and math.prod(size) > problem.joined:
            size, starts = _halved(size, starts, cut)
        if n > 1 or len(squares) > len(edge):
            taken = np.zeros(-(-counts // n), bool)
            taken[tuple(squares.T)] = True
            left &= ~taken.repeat(n, 0).repeat(n, 1)[: counts[0], : counts[1]]
            found.append((False, size, starts))
            whole = np.argwhere(left)
        if len(whole) <= len(edge):
            whole, edge = whole[:0], np.concatenate([whole, edge])
    found += [(masked, problem.chunk_size, at * problem.chunk_size) for masked, at in ((False, whole), (True, edge))]
    pieces = []
    for masked, size, starts in found:
        if along is not None and len(starts) == 1 and size[cut] % 2 == 0:
            size, starts = _halved(size, starts, cut)
        if len(starts):
            pieces.append(((masked, *size), starts.astype(np.int32)))
    return pieces


def _halved(size, starts: np.ndarray, dim: int) -> tuple[list[int], np.ndarray]:
    """Tiles of half that size along `dim`, twice as many."""
    size = [n // 2 if at == dim else n for at, n in enumerate(size)]
    return size, np.concatenate([starts, starts + np.eye(2, dtype=int)[dim] * size[dim]])


def _spans(problem: Problem, lengths: tuple[int, int]):
    """For each row of tiles: the first that is visited and the one behind the last, and keys that all its queries see."""
    T, S = lengths
    t, c = problem.chunk_size
    first = np.arange(-(-T // t)) * t
    some_from, some_to, all_from, all_to = (
        None if x is None else np.asarray(x)
        for x in tile_range(problem, problem.q_offset, first, np.minimum(first + t, T) - 1)
    )
    nothing, everything = np.zeros(len(first), int), np.full(len(first), S)
    lo = nothing if some_from is None else np.where(some_from >= S, -(-S // c), np.maximum(some_from, 0) // c)
    hi = -(-np.clip(everything if some_to is None else some_to, 0, S) // c)
    return lo, hi, nothing if all_from is None else all_from, everything if all_to is None else all_to


def tiles(problem: Problem, operands: Operands, skip: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (i, j) of tiles whose every query sees every key, and of the others that see something (all, if not `skip`)."""
    return _tiles(problem, (operands.query.shape[1], operands.key.shape[1]), elementwise(problem, operands), skip)


def elementwise(problem: Problem, operands: Operands) -> bool:
    """Is who sees whom told by element, not by the window alone?"""
    mask_fn = None if problem.blocks else problem.mask_fn
    return any(x is not None for x in (mask_fn, operands.mask, operands.q_segments, operands.terms.bias))


def _tiles(problem: Problem, lengths: tuple[int, int], elementwise: bool, skip: bool = True):
    T, S = lengths
    t, c = problem.chunk_size
    n, k = -(-T // t), -(-S // c)
    lo, hi, all_from, all_to = _spans(problem, lengths)
    full_lo, full_hi = -(-np.clip(all_from, 0, S) // c), np.clip(all_to, 0, S) // c
    some, every = (np.ones((n, k), bool),) * 2 if problem.blocks is None else problem.blocks.of_tiles(t, c)
    whole, edge, hidden = ([np.zeros((0, 2), int)] for _ in range(3))
    for a in range(n):
        fits = (a + 1) * t <= T and not elementwise
        js = np.arange(lo[a], hi[a]) if skip else np.arange(k)
        seen = (js >= lo[a]) & (js < hi[a]) & some[a, js]
        full = seen & every[a, js] & (js >= full_lo[a]) & (js < full_hi[a]) & ((js + 1) * c <= S) & fits
        for kind, which in ((whole, full), (edge, seen & ~full), (hidden, ~seen & (not skip))):
            kind.append(np.stack([np.full(which.sum(), a), js[which]], -1))
    whole, edge = np.concatenate(whole), np.concatenate(edge + hidden)
    return whole.astype(np.int32), edge.astype(np.int32)


def walk_over(problem: Problem, operands: Operands) -> Walk:
    """Over the same tiles, for sums. Lengths and offsets that are arrays hide, and bound nothing."""
    check_sizes_known(operands, "What is neither the call nor its gradient (a jvp, a second derivative, key_mass)")
    (B, T, K, G, _), S = operands.query.shape, operands.key.shape[1]
    if operands.q_offset is not None:
        problem = dataclasses.replace(problem, left=None, right=None)
    masked = elementwise(problem, operands) or _bounded(operands)
    return Walk(_lists, problem, B, K, G, (T, S), masked, accumulator_dtype(operands))


def _lists(walk: Walk) -> list[tuple[bool, np.ndarray]]:
    return list(zip((False, True), _tiles(walk.problem, walk.lengths, walk.elementwise), strict=True))


def count_tiles(problem: Problem, operands: Operands) -> tuple[int | None, int]:
    """Tiles of rows and columns that are visited (None: known only as it runs), and all there are (0: length unknown)."""
    if _symbolic(operands):
        return None, 0
    (t, c), T, S = problem.chunk_size, operands.query.shape[1], operands.key.shape[1]
    lo, hi, _, _ = _spans(problem, (T, S))
    visited = None if _bounded(operands) else int(np.maximum(hi - lo, 0).sum())
    if visited is not None and problem.blocks is not None:
        visited = sum(map(len, tiles(problem, operands)))
    return visited, -(-T // t) * -(-S // c)


def _bounded(operands: Operands) -> bool:
    return any(x is not None for x in (operands.q_offset, operands.q_lengths, operands.kv_lengths))


def _visit_bounded(problem: Problem, operands: Operands, step, carry):
    """The same where lengths or offsets are arrays: for each query tile, key tiles between bounds computed as it runs."""
    T, S = operands.query.shape[1], operands.key.shape[1]
    t, c = problem.chunk_size
    offset = jnp.int32(problem.q_offset) if operands.q_offset is None else operands.q_offset
    q_end = jnp.int32(T) if operands.q_lengths is None else jnp.minimum(operands.q_lengths, T)
    kv_end = jnp.int32(S) if operands.kv_lengths is None else jnp.minimum(operands.kv_lengths, S)

    def row(i, carry):
        some_from, some_to, _, _ = tile_range(problem, offset, i * t, jnp.minimum(i * t + t, T) - 1)
        first = jnp.int32(0) if some_from is None else jnp.clip(some_from, 0, kv_end)
        end = kv_end if some_to is None else jnp.clip(some_to, 0, kv_end)
        some = (first < end) & (i * t < q_end)  # of a batch entry; the loop spans them all
        lo = jnp.where(some, first, S).min() // c
        hi = (jnp.where(some, end, 0).max() + c - 1) // c
        return lax.fori_loop(lo.astype(jnp.int32), hi.astype(jnp.int32), lambda j, x: step(x, i * t, j * c), carry)

    n = (jnp.max(q_end, initial=0) + t - 1) // t
    return lax.fori_loop(jnp.int32(0), n.astype(jnp.int32), row, carry)
