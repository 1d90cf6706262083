"""Run the forward with a precomputed bound on each row's maximum, and find where it fails."""

import dataclasses
import functools
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.chunked.floats import all_true, round_to, split_exponent
from memeff.chunked.loop import visit_tiles
from memeff.chunked.row_sums import RowSums, add_rows, empty_rows, slice_rows, write_rows
from memeff.chunked.schedule import has_elementwise_mask
from memeff.chunked.tile import (
    dot,
    kept_by_dropout,
    positive_where_visible,
    tile_logits,
    zero_nonfinite,
)
from memeff.logits import logits_from_dots
from memeff.masking import key_range, mask_tile
from memeff.problem import (
    Operands,
    Problem,
    Schedule,
    accumulator_dtype,
    map_operands,
    split_axis,
    split_heads,
)
from memeff.shape import ceil_div
from memeff.softmax import Lse, LseFor

SAMPLES = 64  # keys
UNSEEN_MAX = -60.0  # nats, so that logits from -60 to 25 need no second attempt


def fixed_max_forward(
    problem: Problem, schedule: Schedule, operands: Operands, lse_for: LseFor
) -> tuple[RowSums, Array]:
    """Compute the row sums with m from `max_bound` in place of a running maximum.

    XLA can then put exp into the epilogue of (1), and nothing is rescaled. Also return which rows
    [B, K, G, T] are right.

    On GPUs l sums p after it is rounded to 16 bits for its product, unless the caller wants lse.
    Then all probabilities that the backward computes for a row are wrong by one factor, within
    2^-9. The rounding of each probability errs as much.
    """
    assert schedule.fixed_max_chunk_size is not None
    schedule = dataclasses.replace(schedule, chunk_size=schedule.fixed_max_chunk_size)
    from_sample = operands.logit_params.bias is not None
    m, check = _max_and_check(problem, schedule, operands)
    D = operands.value.shape[-1]
    dtype = operands.value.dtype
    on_gpu = schedule.gpu_fused_chunk_size is not None
    if on_gpu:
        operands = operands._replace(value=zero_nonfinite(operands.value, True))
    rounded = lse_for is None or (on_gpu and lse_for == "gradient")
    drops = problem.dropout is not None
    ones_sum_p = on_gpu and rounded and not drops  # the sum of p from p [v 1]: no pass over p
    with_ones = ones_sum_p or drops
    if with_ones:
        ones = [(0, 0), (0, 0), (0, 0), (0, 8)]
        operands = operands._replace(value=jnp.pad(operands.value, ones, constant_values=1))
    o, l = empty_rows(operands)

    def step(sums, tile):
        _, s, _ = tile_logits(problem, tile, materialize_raw=from_sample or not rounded)
        p = jnp.exp(s - tile.row_scalars[0][..., None])
        if from_sample:
            p = positive_where_visible(p, tile.keep)
        if rounded:  # in the product's epilogue: 6 bytes a logit instead of 12
            p = p.astype(dtype)
            weights = p
        else:
            weights = round_to(p, dtype)
        v = zero_nonfinite(tile.operands.value, tile.keep is not None and not on_gpu)
        kept = kept_by_dropout(problem, tile)
        dropped = weights if kept is None else jnp.where(kept, weights, 0)
        parts = (dot("bkgtc,bkcd->bkgtd", dropped, v, problem, o.dtype),)
        if not ones_sum_p:
            parts += (p.sum(-1, dtype=l.dtype),)
            parts += (weights.sum(-1, dtype=l.dtype),)
        return add_rows(sums, parts, tile)

    # A bias is read where p is computed, which takes less time than a copy of its tile.
    ahead = rounded and not from_sample
    visit = visit_tiles(
        problem, schedule, operands, (m,), step, (), ahead, long_axis=None if from_sample else 1
    )
    # o is divided by the sum of the rounded p. A row may hold a single p, and it need not be 1.
    if ones_sum_p:
        (o,) = visit((o,))
        l = weight = o[..., D]
    else:
        o, l, weight = visit((o, l, l))
    kept_sum = o[..., D] if drops else l
    rows = RowSums(m, l, weight, o[..., :D])
    valid = check(rows, kept_sum)
    if problem.dropout is not None:
        rows = rows._replace(o=rows.o / (1 - problem.dropout.rate))
    return rows, valid


def _max_and_check(
    problem: Problem, schedule: Schedule, operands: Operands
) -> tuple[Array, Callable[[RowSums, Array], Array]]:
    """Return m [B, K, G, T], and the function that finds the right rows.

    The function takes the row sums, and l without what dropout drops.
    """
    if operands.logit_params.bias is not None:
        m = sampled_max(problem, operands)
        unseen = ~rows_seeing_nonfinite(problem, schedule, operands)
        return m, functools.partial(_sampled_rows_in_range, unseen)
    # The sum bounds the largest |v|. For a max that keeps NaN, XLA:CPU would store all |v|.
    v = jnp.abs(operands.value.astype(accumulator_dtype(operands))).sum(-1)  # b s k
    of_keys = _inf_for_nan(_key_norm(operands)), _inf_for_nan(v)
    k_norm, v = largest_seen(problem, schedule, operands, of_keys)
    m = max_bound(problem, operands, k_norm)
    return m, functools.partial(_bounded_rows_in_range, operands, k_norm, v)


def sampled_max(problem: Problem, operands: Operands) -> Array:
    """Return m [B, K, G, T], the largest logit of a row at SAMPLES of the keys that it sees.

    The true maximum is no smaller, so l is at least 1 but for rounding. For rows that see no key of
    the sample, m is UNSEEN_MAX.
    """
    S = operands.shape.S
    stride = ceil_div(S, SAMPLES)

    def sample(x: Array, dims: str) -> Array:
        axis = dims.find("s")
        if axis < 0 or x.shape[axis] != S:
            return x
        return lax.slice_in_dim(x, 0, S, stride, axis)

    sampled = split_heads(map_operands(sample, operands), operands.shape.K)
    rows = jnp.arange(operands.shape.T, dtype=jnp.int32)
    cols = jnp.arange(0, S, stride, dtype=jnp.int32)
    keep = mask_tile(problem, sampled, rows, cols)
    raw = dot("bkgth,bkch->bkgtc", *sampled[:2], problem, accumulator_dtype(operands))
    m = logits_from_dots(problem, raw, sampled.logit_params, keep).max(-1)
    return jnp.where(m == -jnp.inf, UNSEEN_MAX, m)


def _sampled_rows_in_range(candidates: Array, rows: RowSums, kept_sum: Array) -> Array:
    """Return which of the `candidates` [B, K, G, T] are right with m from `sampled_max`.

    l is at least 1 but for rounding, and then no probability is flushed to 0 that a running maximum
    would keep. Where p or p v overflowed, l or o is not finite. l is 0 only for rows that see no
    key, because of `positive_where_visible`.
    """
    del kept_sum  # a row may stand also where dropout drops all its keys
    finite = (rows.l < 2.0**125) & jnp.isfinite(rows.o).all(-1)
    return candidates & finite & ((rows.l >= 0.5) | (rows.l == 0))


def rows_seeing_nonfinite(problem: Problem, schedule: Schedule, operands: Operands) -> Array:
    """Return the rows [B, K, G, T] that see a value that is not finite."""
    bad = ~jnp.isfinite(operands.value).all(-1)  # b s k
    _, l = empty_rows(operands)

    def look():
        (worst,) = largest_seen(problem, schedule, operands, (bad.astype(l.dtype),))
        return worst > 0

    return lax.cond(all_true(~bad), lambda: l > 0, look)


def max_bound(problem: Problem, operands: Operands, k_norm: Array) -> Array:
    """Return m [B, K, G, T], which no logit of the row exceeds by more than 69 nats.

    `k_norm` is the largest |k_j| of the keys that a row sees, -inf if it sees none. By
    Cauchy-Schwarz |logit| <= scale |q_i| |k_j|. m is 69 nats less, so p is below 2^100.
    """
    dtype = accumulator_dtype(operands)
    q_norm = _norm(operands.query.astype(dtype))  # b t n
    q_norm = split_axis(q_norm, 2, operands.shape.K)  # b t k g
    params = operands.logit_params
    scale = problem.scale if params.scale is None else params.scale.astype(dtype)
    bound = abs(scale) * q_norm.transpose(0, 2, 3, 1)  # b k g t
    bound = bound * k_norm
    cap = problem.soft_cap if params.soft_cap is None else params.soft_cap.astype(dtype)
    if cap is not None:
        bound = jnp.minimum(bound, abs(cap))
    # The query of a row that sees no key may be NaN.
    return jnp.where(k_norm == -jnp.inf, 0, jnp.maximum(bound - 69.0, 0))


def _norm(x: Array) -> Array:
    """Return the Euclidean norm of x over its last dim."""
    return jnp.sqrt(jnp.square(x).sum(-1))


def _key_norm(operands: Operands) -> Array:
    """Return the norm of each key [B, S, K]."""
    return _norm(operands.key.astype(accumulator_dtype(operands)))


def _inf_for_nan(x: Array) -> Array:
    """Return x with Inf in place of NaN, which XLA:CPU's max may drop."""
    return jnp.where(jnp.isnan(x), jnp.inf, x)


def largest_seen(
    problem: Problem, schedule: Schedule, operands: Operands, of_keys: tuple[Array, ...]
) -> list[Array]:
    """Return for each row the largest of the numbers `of_keys` [B, S, K] of the keys that it sees.

    There is one result [B, K, G|1, T|1] for each array of `of_keys`. It is -inf for a row that sees
    no key.
    """
    if not has_elementwise_mask(problem, operands):
        return [_largest_in_window(problem, operands, x) for x in of_keys]
    _, l = empty_rows(operands)
    least = l - jnp.inf
    in_place_of_values = operands._replace(value=jnp.stack(of_keys, axis=-1))

    def step(largest, tile):
        keys = jnp.moveaxis(tile.operands.value, -1, 0)[:, :, :, None, None]  # n b k 1 1 c
        seen = [x if tile.keep is None else jnp.where(tile.keep, x, -jnp.inf) for x in keys]
        old = [slice_rows(x, tile) for x in largest]
        new = [jnp.maximum(x, y.max(-1)) for x, y in zip(old, seen, strict=True)]
        return write_rows(largest, tuple(new), tile)

    visit = visit_tiles(problem, schedule, in_place_of_values, (), step)
    return list(visit((least,) * len(of_keys)))


def _largest_in_window(problem: Problem, operands: Operands, x: Array) -> Array:
    """Return for each row [B, K, 1, T|1] the largest x [B, S, K] of the keys in its window.

    These are the keys from the first that any row sees to the last that this row sees. So a key
    that is hidden from all rows changes no bit.
    """
    S = operands.shape.S
    rows = np.arange(operands.shape.T)
    start, end, _, _ = key_range(problem, problem.q_offset, rows, rows)
    start = 0 if start is None else int(np.clip(start[0], 0, S - 1))
    x = lax.cummax(x[:, start:], axis=1)
    if end is None:
        x = x[:, -1:]
    else:
        last = np.clip(end, start + 1, S) - 1
        x = jnp.take(x, last - start, axis=1)  # b t k
    return x.swapaxes(1, 2)[:, :, None]


def _bounded_rows_in_range(
    operands: Operands, k_norm: Array, v: Array, rows: RowSums, kept_sum: Array
) -> Array:
    """Return the rows [B, K, G, T] that are right with m from `max_bound`.

    No flushed or overflowed number shows in their result.

    Each of the S probabilities p = exp(s - m), and each product p v, is flushed to 0 below 2^-126.
    So l lacks at most S 2^-126, and o at most S 2^-126 max(1, |v|). Neither shows in float32 where
    it is below 2^-24 of l, and of the mean |o| of the row. Where p or p v overflowed, l or o is
    not finite. `v` is the largest |v| that the row sees, Inf if one is not finite. `kept_sum` is l
    without what dropout drops; if that is all, o is 0.
    """
    _, S, _, D = operands.value.shape
    lost = S * 2.0 ** (24 - 126)
    # The mean is at most the largest. XLA:CPU's max may drop NaN, a sum does not.
    o = jnp.abs(rows.o).sum(-1) / max(1, D)  # b k g t
    kept = (o >= lost * jnp.maximum(v, 1)) | (v == 0) | (kept_sum == 0)
    in_range = (rows.l >= lost) & (rows.l < 2.0**125) & kept & (o < jnp.inf) & (v < jnp.inf)
    return in_range | (k_norm == -jnp.inf)


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
