"""Compute attention one visible tile of queries i and keys j at a time, with a running row maximum.

(Rabe & Staats 2021, section 2; Dao 2023, algorithm 1):
  (1) raw = q_i k_j'                     (3) m' = max(m, rowmax s);  a = exp(m - m')
  (2) s   = logits_from_dots(raw)        (4) p = exp(s - m');  l = a l + rowsum p;  o = a o + p v_j
  at the end: out = o / l, lse = m + log l

Where the maximum can be bounded beforehand, fixed_max.py runs first. Then this loop redoes the rows
in which the bound failed. Few queries on a GPU take few_queries.py in the same way.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.chunked.eligible import fixed_max_applies, one_tile_with_bias, runs_by_blocks
from memeff.chunked.export import pad_lengths
from memeff.chunked.few_queries import (
    few_queries_forward,
    finite_rows,
    for_loop,
    read_by_gathers,
    reads_in_place,
)
from memeff.chunked.fixed_max import fixed_max_forward, log_sum_exp_wide
from memeff.chunked.floats import all_true, apply_unless
from memeff.chunked.loop import run_by_blocks, visit_tiles
from memeff.chunked.row_sums import (
    RowSums,
    divide_sums,
    empty_rows,
    select_rows,
    slice_rows,
    write_rows,
)
from memeff.chunked.tile import Tile, distances, row_max, tile_logits, weighted_values
from memeff.problem import Operands, Problem, Schedule, check_sizes_known, out_dtype
from memeff.softmax import Lse, LseFor, log_sum_exp
from memeff.stored import StoredKeys


def forward(
    problem: Problem, schedule: Schedule, operands: Operands, lse_for: LseFor = "caller"
) -> tuple[Array, Lse]:
    """Return out [B, K, G, T, D] and lse [B, K, G, T]."""
    if not operands.shape.lengths_known:
        padded_operands = pad_lengths(schedule.chunk_size, operands)
        sums = online_forward(problem, schedule, padded_operands)
        padded = divide_sums(schedule, operands, sums, log_sum_exp)
        T = operands.query.shape[1]
        return jax.tree.map(lambda x: lax.slice_in_dim(x, 0, T, axis=3), padded)
    if reads_in_place(problem, schedule, operands):
        rows = few_queries_forward(problem, schedule, operands)
        loop = for_loop(schedule, operands)
        rows = _redo_rows(problem, loop, read_by_gathers(operands), rows, finite_rows(rows))
        return divide_sums(schedule, operands, rows, log_sum_exp)
    if isinstance(operands.key, StoredKeys):
        schedule = for_loop(schedule, operands)
    fixed_max = fixed_max_applies(problem, schedule, operands)
    if fixed_max and one_tile_with_bias(schedule, operands):
        schedule = dataclasses.replace(schedule, chunk_size=(operands.shape.T, operands.shape.S))
        fixed_max = False
    if not fixed_max:
        sums = online_forward(problem, schedule, operands)
        return divide_sums(schedule, operands, sums, log_sum_exp)
    if runs_by_blocks(problem, schedule, operands):
        o, l = empty_rows(operands)
        whole = dataclasses.replace(schedule, head_block=None)
        call = functools.partial(forward, problem, whole, lse_for=lse_for)
        results = o.astype(out_dtype(schedule, operands)), Lse(l, l)
        return run_by_blocks(schedule, operands, call, (), 1, results)
    rows, valid = fixed_max_forward(problem, schedule, operands, lse_for)
    rows = _redo_rows(problem, schedule, operands, rows, valid)
    return divide_sums(schedule, operands, rows, log_sum_exp_wide)


def _redo_rows(
    problem: Problem, schedule: Schedule, operands: Operands, rows: RowSums, valid: Array
) -> RowSums:
    """Return `rows`, with those that are not `valid` [B, K, G, T] computed again."""

    def redo(rows: RowSums) -> RowSums:
        return online_forward(problem, schedule, operands, rows, valid)

    return apply_unless(all_true(valid), redo, rows)


def online_forward(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    rows: RowSums | None = None,
    valid: Array | None = None,
) -> RowSums:
    """Run steps (1) to (4) over all visible tiles, for any call.

    Given `rows` and `valid` [B, K, G, T], leave the valid rows as they are.
    """
    o, l = empty_rows(operands)
    start = RowSums(l - jnp.inf, l, l, o)
    if rows is not None and valid is not None:
        start = jax.tree.map(functools.partial(select_rows, valid), rows, start)

    def step(sums, tile):
        old = tuple(slice_rows(x, tile) for x in sums)
        old = lax.optimization_barrier(old)  # else XLA copies all of m
        raw, s, _ = tile_logits(problem, tile)
        new, _ = online_softmax_step(problem, tile, raw, s, old)
        if valid is not None:
            keep_valid = functools.partial(select_rows, slice_rows(valid, tile))
            new = jax.tree.map(keep_valid, old, new)
        return write_rows(sums, new, tile)

    visit = visit_tiles(problem, schedule, operands, (), step)
    m, l, o = visit((start.m, start.l, start.o))
    weight = l if valid is None else jnp.where(valid, start.weight, l)
    return RowSums(m, l, weight, o)


def forward_with_statistics(
    problem: Problem, schedule: Schedule, operands: Operands
) -> tuple[RowSums, Array, Array]:
    """Return the row sums, and sum p (s - m) and sum p |q_pos - k_pos| of each row [B, K, G, T]."""
    check_sizes_known(operands, "memeff.attention_statistics")
    o, l = empty_rows(operands)

    def step(sums, tile):
        m_old, l_old, o_old, e_old, d_old = (slice_rows(x, tile) for x in sums)
        raw, s, _ = tile_logits(problem, tile)
        s = lax.optimization_barrier(s)  # else p and s - m are of logits that differ by a rounding
        old = m_old, l_old, o_old
        new, (shift, a, p) = online_softmax_step(problem, tile, raw, s, old)
        fall = jnp.where(l_old == 0, 0, m_old - shift)  # of s - m in the tiles before
        below = jnp.where(s == -jnp.inf, 0, s - shift[..., None])
        e_new = a * (e_old + fall * l_old) + (p * below).sum(-1)
        d_new = a * d_old + (p * distances(problem, tile)).sum(-1)
        return write_rows(sums, (*new, e_new, d_new), tile)

    visit = visit_tiles(problem, schedule, operands, (), step)
    m, l, o, e, d = visit((l - jnp.inf, l, o, l, l))
    return RowSums(m, l, l, o), e, d


def online_softmax_step(
    problem: Problem,
    tile: Tile,
    raw: Array,
    s: Array,
    old: tuple[Array, Array, Array],
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    """Do (3) and (4) for a tile, with `old` = (m, l, o). Return the new (m, l, o), and (m', a, p).

    m' is 0 in place of -inf, where a row has seen no key yet.
    """
    m_old, l_old, o_old = old
    m_new = jnp.maximum(m_old, row_max(problem, tile, raw, s))  # (3)
    shift = m_new
    if tile.keep is not None or problem.score_fn is not None:  # a score may be -inf
        shift = jnp.where(m_new == -jnp.inf, 0, m_new)
    a = jnp.exp(m_old - shift)
    p = jnp.exp(s - shift[..., None])
    l_new = a * l_old + p.sum(-1)  # (4)
    o_new = a[..., None] * o_old + weighted_values(problem, tile, p, o_old.dtype)
    return (m_new, l_new, o_new), (shift, a, p)
