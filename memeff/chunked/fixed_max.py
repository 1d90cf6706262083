"""Run the forward with a precomputed bound on each row's maximum, and find the rows where it fails."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.chunked.floats import round_to, split_exponent
from memeff.chunked.loop import visit_tiles
from memeff.chunked.row_sums import RowSums, empty_rows, put_rows, slice_rows
from memeff.chunked.tile import dot, tile_logits, zero_nonfinite
from memeff.masking import key_range
from memeff.problem import Operands, Problem, accumulator_dtype
from memeff.softmax import Lse, LseFor


def fixed_max_forward(problem: Problem, operands: Operands, lse_for: LseFor) -> RowSums:
    """(3) with m fixed beforehand: what no logit of the row can exceed by 69 nats. So exp can go into the epilogue of (1),
    and nothing is rescaled. Rows that see a value that is not finite are wrong.

    On GPUs l is the sum of p as it is multiplied, rounded to 16 bits, unless the caller wants lse: all probabilities that
    the backward makes from it are then wrong by one factor for each row, within 2^-9, as each of them is once it is rounded.
    """
    assert problem.fixed_chunk_size is not None
    problem = dataclasses.replace(problem, chunk_size=problem.fixed_chunk_size)
    D, dtype = operands.value.shape[-1], operands.value.dtype
    m = max_bound(problem, operands)
    on_gpu = problem.fused_chunk_size is not None
    if on_gpu:
        operands = operands._replace(value=zero_nonfinite(operands.value, True))
    rounded = lse_for is None or (on_gpu and lse_for == "gradient")
    with_ones = on_gpu and rounded  # the sum of p from p [v 1]: no pass over p
    if with_ones:
        operands = operands._replace(
            value=jnp.pad(operands.value, [(0, 0)] * 3 + [(0, 8)], constant_values=1)
        )
    o, l = empty_rows(operands)

    def step(carry, tile):
        _, s, _ = tile_logits(problem, tile, apart=not rounded)
        p = jnp.exp(s - tile.rows[0][..., None])
        if rounded:  # in the product's epilogue: 6 bytes a logit instead of 12
            p = multiplied = p.astype(dtype)
        else:
            multiplied = round_to(p, dtype)
        v = zero_nonfinite(tile.here.value, tile.keep is not None and not on_gpu)
        part = [dot("bkgtc,bkcd->bkgtd", multiplied, v, problem, o.dtype)]
        part += [] if with_ones else [x.sum(-1, dtype=l.dtype) for x in (p, multiplied)]
        return tuple(
            put_rows(x, slice_rows(x, tile) + y, tile) for x, y in zip(carry, part, strict=True)
        )

    start = (o,) if with_ones else (o, l, l)
    o, *sums = visit_tiles(problem, operands, (m,), step, beside=rounded, along=1)(start)
    # What is multiplied is divided by its own sum, for a row may hold a single p, and that one need
    # not be 1.
    l, weight = sums or (o[..., D],) * 2
    return RowSums(m, l, weight, o[..., :D])


def rows_seeing_nonfinite(problem: Problem, operands: Operands) -> Array:
    """Which rows, B K 1 T|1, see a value that is not finite; a tile of plain logits knows only the window."""
    bad = ~jnp.isfinite(operands.value).all(-1)  # b s k
    T, S = operands.query.shape[1], operands.key.shape[1]
    lo, hi, _, _ = key_range(problem, problem.q_offset, np.arange(T), np.arange(T))
    before = jnp.pad(jnp.cumsum(bad, axis=1, dtype=jnp.int32), ((0, 0), (1, 0), (0, 0)))
    lo, hi = (
        np.zeros(1, int) if lo is None else np.clip(lo, 0, S),
        np.full(1, S) if hi is None else np.clip(hi, 0, S),
    )
    seen = jnp.take(before, hi, axis=1) - jnp.take(before, lo, axis=1)  # b t|1 k
    return (seen > 0).swapaxes(1, 2)[:, :, None]


def max_bound(problem: Problem, operands: Operands) -> Array:
    """m [B, K, G, T]: |logit| <= scale |q_i| max_j |k_j| (Cauchy-Schwarz), less 69 nats, so that p stays below 2^100."""
    q, k = (
        jnp.sqrt(jnp.square(x.astype(accumulator_dtype(operands))).sum(-1)) for x in operands[:2]
    )
    return jnp.maximum(
        abs(problem.scale) * q.transpose(0, 2, 3, 1) * largest_visible(problem, operands, k) - 69.0,
        0,
    )


def largest_visible(problem: Problem, operands: Operands, x: Array) -> Array:
    """The largest x [B, S, K] of the keys from the first that any row sees to the last that this row sees, B K 1 T|1.

    So a hidden key changes no bit.
    """
    T, S = operands.query.shape[1], operands.key.shape[1]
    start, end, _, _ = key_range(problem, problem.q_offset, np.arange(T), np.arange(T))
    start = 0 if start is None else int(np.clip(start[0], 0, S - 1))
    x = lax.cummax(x[:, start:], axis=1)
    x = x[:, -1:] if end is None else jnp.take(x, np.clip(end, start + 1, S) - 1 - start, axis=1)
    return x.swapaxes(1, 2)[:, :, None]


def sums_in_range(problem: Problem, operands: Operands, rows: RowSums) -> Array:
    """Return for which rows, B K G T, nothing was flushed or overflowed that the result can show.

    Each of the S probabilities p = exp(s - m), and each product p v, is flushed to 0 below 2^-126. So l lacks at most
    S 2^-126, and o at most S 2^-126 max(1, |v|). Neither shows in float32 where it is below 2^-24 of l, and of the
    mean |o| of the row. Where p or p v overflowed, l or o is not finite.
    """
    S = operands.key.shape[1]
    lost = S * 2.0 ** (24 - 126)
    v = jnp.abs(operands.value.astype(rows.o.dtype))
    v = largest_visible(problem, operands, jnp.where(v < jnp.inf, v, 0).max(-1, initial=0))
    # at most the largest; XLA:CPU's max may drop NaN, a sum does not
    o = jnp.abs(rows.o).sum(-1) / max(1, rows.o.shape[-1])
    kept = (o >= lost * jnp.maximum(v, 1)) | (v == 0)
    return (rows.l >= lost) & (rows.l < 2.0**125) & kept & (o < jnp.inf)


def log_sum_exp_wide(m: Array, l: Array) -> Lse:
    """m + log l where l may be 2^100: log l as e log 2 + log f (l = f 2^e), for log l alone is rounded to 4e-6 there."""
    f, power = split_exponent(l)
    e = (lax.bitcast_convert_type(power, jnp.int32) >> 23).astype(l.dtype) - 127
    step = e * 0.693359375  # log 2 in 9 bits, so that the product is exact
    high = m + step
    back = high - m
    # log 2 = 0.693359375 - 2.1219444e-4
    rest = ((m - (high - back)) + (step - back)) + (e * -2.12194440e-4 + jnp.log(f))
    return Lse(high + rest, (high - (high + rest)) + rest)
