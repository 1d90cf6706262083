"""Compute attention one visible tile of queries i and keys j at a time, with a running maximum of each row.

(Rabe & Staats 2021, section 2; Dao 2023, algorithm 1):
  (1) raw = q_i k_j'                     (3) m' = max(m, rowmax s);  a = exp(m - m')
  (2) s   = logits_from_dots(raw)        (4) l = a l + rowsum exp(s - m');  o = a o + exp(s - m') v_j
  at the end: out = o / l, lse = m + log l
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.chunked.eligible import fixed_max_applies, uses_gpu_fusion
from memeff.chunked.export import has_symbolic_lengths, pad_lengths
from memeff.chunked.fixed_max import (
    fixed_max_forward,
    log_sum_exp_wide,
    rows_seeing_nonfinite,
    sums_in_range,
)
from memeff.chunked.floats import all_true
from memeff.chunked.loop import run_by_blocks, visit_tiles
from memeff.chunked.row_sums import RowSums, empty_rows, normalise, put_rows, slice_rows, where_rows
from memeff.chunked.tile import Tile, distances, row_max, tile_logits, weighted_values
from memeff.problem import Operands, Problem, check_sizes_known
from memeff.softmax import Lse, LseFor, log_sum_exp


def forward(problem: Problem, operands: Operands, lse_for: LseFor = "caller") -> tuple[Array, Lse]:
    """out [B, K, G, T, D] in the query's dtype, lse [B, K, G, T]."""
    if has_symbolic_lengths(operands):
        rows = normalise(
            operands, online_forward(problem, pad_lengths(problem, operands)), log_sum_exp
        )
        return jax.tree.map(lambda x: lax.slice_in_dim(x, 0, operands.query.shape[1], axis=3), rows)
    if not fixed_max_applies(problem, operands):
        return normalise(operands, online_forward(problem, operands), log_sum_exp)
    if problem.block and uses_gpu_fusion(problem, operands):
        o, l = empty_rows(operands)
        call = functools.partial(forward, dataclasses.replace(problem, block=None), lse_for=lse_for)
        return run_by_blocks(
            problem, operands, call, (), 1, (o.astype(operands.query.dtype), Lse(l, l))
        )
    rows = fixed_max_forward(problem, operands, lse_for)
    stands = sums_in_range(problem, operands, rows) & ~rows_seeing_nonfinite(problem, operands)

    def again(state):
        return state[0] | True, online_forward(problem, operands, state[1], stands)

    # A loop that runs once or never, for it writes over what does not stand; a cond would hold
    # both.
    _, rows = lax.while_loop(lambda state: ~state[0], again, (all_true(stands), rows))
    return normalise(operands, rows, log_sum_exp_wide)


def online_forward(
    problem: Problem, operands: Operands, rows: RowSums | None = None, stands: Array | None = None
) -> RowSums:
    """Steps (1) to (4), for every call. Of `rows`, those that stand are left as they are."""
    o, l = empty_rows(operands)
    before = RowSums(l - jnp.inf, l, l, o)
    if rows is not None and stands is not None:
        before = jax.tree.map(functools.partial(where_rows, stands), rows, before)

    def step(carry, tile):
        old = tuple(slice_rows(x, tile) for x in carry)
        old = lax.optimization_barrier(old)  # else XLA copies all of m
        raw, s, _ = tile_logits(problem, tile)
        new, _ = online_softmax_step(problem, tile, raw, s, old)
        if stands is not None:
            new = jax.tree.map(functools.partial(where_rows, slice_rows(stands, tile)), old, new)
        return tuple(put_rows(x, y, tile) for x, y in zip(carry, new, strict=True))

    m, l, o = visit_tiles(problem, operands, (), step)((before.m, before.l, before.o))
    return RowSums(m, l, l if stands is None else jnp.where(stands, before.weight, l), o)


def forward_with_statistics(problem: Problem, operands: Operands) -> tuple[RowSums, Array, Array]:
    """The same, and of each row sum p (s - m) and sum p |q_pos - k_pos|, B K G T."""
    check_sizes_known(operands, "memeff.attention_statistics")
    o, l = empty_rows(operands)

    def step(carry, tile):
        m_old, l_old, o_old, e_old, d_old = (slice_rows(x, tile) for x in carry)
        raw, s, _ = tile_logits(problem, tile)
        s = lax.optimization_barrier(s)  # else p and s - m are of logits that differ by a rounding
        (m_new, l_new, o_new), (shift, a, p) = online_softmax_step(
            problem, tile, raw, s, (m_old, l_old, o_old)
        )
        fall = jnp.where(l_old == 0, 0, m_old - shift)  # of what was gathered before
        below = jnp.where(s == -jnp.inf, 0, s - shift[..., None])
        e_new = a * (e_old + fall * l_old) + (p * below).sum(-1)
        d_new = a * d_old + (p * distances(problem, tile)).sum(-1)
        return tuple(
            put_rows(x, y, tile)
            for x, y in zip(carry, (m_new, l_new, o_new, e_new, d_new), strict=True)
        )

    m, l, o, e, d = visit_tiles(problem, operands, (), step)((l - jnp.inf, l, o, l, l))
    return RowSums(m, l, l, o), e, d


def online_softmax_step(problem: Problem, tile: Tile, raw: Array, s: Array, old):
    """(3) and (4) of a tile: m, l and o, and what is taken from s, what o before is multiplied with, and p."""
    m_old, l_old, o_old = old
    m_new = jnp.maximum(m_old, row_max(problem, tile, raw, s))  # (3)
    shift = jnp.where(m_new == -jnp.inf, 0, m_new) if tile.keep is not None else m_new
    a = jnp.exp(m_old - shift)
    p = jnp.exp(s - shift[..., None])
    l_new = a * l_old + p.sum(-1)  # (4)
    o_new = a[..., None] * o_old + weighted_values(problem, tile, p, o_old.dtype)
    return (m_new, l_new, o_new), (shift, a, p)
