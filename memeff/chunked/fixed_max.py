"""Run the forward with a precomputed bound on each row's maximum, and find where it fails."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.chunked.floats import round_to, split_exponent
from memeff.chunked.loop import visit_tiles
from memeff.chunked.row_sums import RowSums, add_rows, empty_rows
from memeff.chunked.tile import dot, tile_logits, zero_nonfinite
from memeff.masking import key_range
from memeff.problem import Operands, Problem, Schedule, accumulator_dtype, split_axis
from memeff.softmax import Lse, LseFor


def fixed_max_forward(
    problem: Problem, schedule: Schedule, operands: Operands, lse_for: LseFor
) -> RowSums:
    """Compute the row sums with m from `max_bound` in place of a running maximum.

    So XLA can put exp into the epilogue of (1), and nothing is rescaled. A row that sees a value
    that is not finite comes out wrong.

    On GPUs l sums p after it is rounded to 16 bits for its product, unless the caller wants lse.
    Then all probabilities that the backward computes for a row are wrong by one factor, within
    2^-9. The rounding of each probability errs as much.
    """
    assert schedule.fixed_max_chunk_size is not None
    schedule = dataclasses.replace(schedule, chunk_size=schedule.fixed_max_chunk_size)
    D = operands.value.shape[-1]
    dtype = operands.value.dtype
    m = max_bound(problem, operands)
    on_gpu = schedule.gpu_fused_chunk_size is not None
    if on_gpu:
        operands = operands._replace(value=zero_nonfinite(operands.value, True))
    rounded = lse_for is None or (on_gpu and lse_for == "gradient")
    with_ones = on_gpu and rounded  # the sum of p from p [v 1]: no pass over p
    if with_ones:
        ones = [(0, 0), (0, 0), (0, 0), (0, 8)]
        operands = operands._replace(value=jnp.pad(operands.value, ones, constant_values=1))
    o, l = empty_rows(operands)

    def step(sums, tile):
        _, s, _ = tile_logits(problem, tile, materialize_raw=not rounded)
        p = jnp.exp(s - tile.row_scalars[0][..., None])
        if rounded:  # in the product's epilogue: 6 bytes a logit instead of 12
            p = p.astype(dtype)
            multiplied = p
        else:
            multiplied = round_to(p, dtype)
        v = zero_nonfinite(tile.operands.value, tile.keep is not None and not on_gpu)
        parts = (dot("bkgtc,bkcd->bkgtd", multiplied, v, problem, o.dtype),)
        if not with_ones:
            parts += (p.sum(-1, dtype=l.dtype),)
            parts += (multiplied.sum(-1, dtype=l.dtype),)
        return add_rows(sums, parts, tile)

    visit = visit_tiles(problem, schedule, operands, (m,), step, prefetch_rows=rounded, long_axis=1)
    # o is divided by the sum of the rounded p. A row may hold a single p, and it need not be 1.
    if with_ones:
        (o,) = visit((o,))
        l = weight = o[..., D]
    else:
        o, l, weight = visit((o, l, l))
    return RowSums(m, l, weight, o[..., :D])


def rows_seeing_nonfinite(problem: Problem, operands: Operands) -> Array:
    """Return which rows [B, K, 1, T|1] see a value that is not finite.

    Only the window is considered, because plain logits have no other mask.
    """
    bad = ~jnp.isfinite(operands.value).all(-1)  # b s k
    S = operands.shape.S
    start, end = _visible_range(problem, operands)
    start = np.zeros(1, int) if start is None else np.clip(start, 0, S)  # t|1
    end = np.full(1, S) if end is None else np.clip(end, 0, S)  # t|1
    count = jnp.cumsum(bad, axis=1, dtype=jnp.int32)
    count = jnp.pad(count, ((0, 0), (1, 0), (0, 0)))  # b s+1 k: bad keys before each
    before_end = jnp.take(count, end, axis=1)
    before_start = jnp.take(count, start, axis=1)
    seen = before_end - before_start  # b t|1 k
    return (seen > 0).swapaxes(1, 2)[:, :, None]


def _visible_range(problem: Problem, operands: Operands):
    """Return the first key that each row's window shows, and the one behind its last, both [T].

    None stands for a side without a bound. Keys may lie outside of 0 to S - 1.
    """
    rows = np.arange(operands.shape.T)
    start, end, _, _ = key_range(problem, problem.q_offset, rows, rows)
    return start, end


def max_bound(problem: Problem, operands: Operands) -> Array:
    """Return m [B, K, G, T], which no logit of the row exceeds by more than 69 nats.

    By Cauchy-Schwarz |logit| <= scale |q_i| max_j |k_j|. m is 69 nats less, so p is below 2^100.
    """
    dtype = accumulator_dtype(operands)
    q_norm = _norm(operands.query.astype(dtype))  # b t n
    q_norm = split_axis(q_norm, 2, operands.shape.K)  # b t k g
    k_norm = _norm(operands.key.astype(dtype))  # b s k
    bound = abs(problem.scale) * q_norm.transpose(0, 2, 3, 1)  # b k g t
    bound = bound * largest_visible(problem, operands, k_norm)
    return jnp.maximum(bound - 69.0, 0)


def _norm(x: Array) -> Array:
    """Return the Euclidean norm of x over its last dim."""
    return jnp.sqrt(jnp.square(x).sum(-1))


def largest_visible(problem: Problem, operands: Operands, x: Array) -> Array:
    """Return for each row [B, K, 1, T|1] the largest x [B, S, K] of visible keys.

    These are the keys from the first that any row sees to the last that this row sees. So a key
    that is hidden from all rows changes no bit.
    """
    S = operands.shape.S
    start, end = _visible_range(problem, operands)
    start = 0 if start is None else int(np.clip(start[0], 0, S - 1))
    x = lax.cummax(x[:, start:], axis=1)
    if end is None:
        x = x[:, -1:]
    else:
        last = np.clip(end, start + 1, S) - 1
        x = jnp.take(x, last - start, axis=1)  # b t k
    return x.swapaxes(1, 2)[:, :, None]


def sums_in_range(problem: Problem, operands: Operands, rows: RowSums) -> Array:
    """Return the rows [B, K, G, T] in which no flushed or overflowed number shows in the result.

    Each of the S probabilities p = exp(s - m), and each product p v, is flushed to 0 below 2^-126.
    So l lacks at most S 2^-126, and o at most S 2^-126 max(1, |v|). Neither shows in float32 where
    it is below 2^-24 of l, and of the mean |o| of the row. Where p or p v overflowed, l or o is
    not finite.
    """
    _, S, _, D = operands.value.shape
    lost = S * 2.0 ** (24 - 126)
    v = jnp.abs(operands.value.astype(rows.o.dtype))
    v = jnp.where(v < jnp.inf, v, 0).max(-1, initial=0)  # b s k
    v = largest_visible(problem, operands, v)  # b k 1 t|1
    # The mean is at most the largest. XLA:CPU's max may drop NaN, a sum does not.
    o = jnp.abs(rows.o).sum(-1) / max(1, D)  # b k g t
    kept = (o >= lost * jnp.maximum(v, 1)) | (v == 0)
    return (rows.l >= lost) & (rows.l < 2.0**125) & kept & (o < jnp.inf)


def log_sum_exp_wide(m: Array, l: Array) -> Lse:
    """Return m + log l [B, K, G, T] for l up to 2^100.

    With l = f 2^e, log l is e log 2 + log f, because log l alone is rounded to 4e-6 there.
    """
    f, power = split_exponent(l)
    exponent_bits = lax.bitcast_convert_type(power, jnp.int32) >> 23
    e = exponent_bits.astype(l.dtype) - 127
    coarse = e * 0.693359375  # log 2 in 9 bits, so that the product is exact
    high = m + coarse
    added = high - m
    rest = (m - (high - added)) + (coarse - added)  # what rounding took from high
    # log 2 = 0.693359375 - 2.1219444e-4
    rest = rest + (e * -2.12194440e-4 + jnp.log(f))
    return Lse(high + rest, (high - (high + rest)) + rest)
