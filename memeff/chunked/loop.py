"""Fold a step over the visible tiles: a scan over a static list, or a loop between bounds computed at run time."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.chunked.schedule import has_traced_bounds, tile_groups
from memeff.chunked.slicing import cut_tile, pin_layout, slice_batch, slice_shared
from memeff.masking import key_range
from memeff.problem import LogitParams, Operands, Problem
from memeff.slicing import slice_dims, slice_optional, write_slice


def run_by_blocks(problem: Problem, operands: Operands, call, like_out, heads: int, found):
    """`call(operands, *like_out)` for one `problem.block` after the other: what is as long as the sequence exists for one.

    `like_out`: arrays B K ...; `heads`: the dim of the key heads in what is `found`, which is written over.
    """
    assert problem.block is not None
    b, k = problem.block

    def step(first, found):
        def cut(x, dim):
            return pin_layout(slice_dims(x, {0: (first[0], b), dim: (first[1], k)}))

        sinks = slice_optional(operands.terms.sinks, {0: (first[1], k)})
        here = Operands(
            cut(operands.query, 2),
            cut(operands.key, 2),
            cut(operands.value, 2),
            LogitParams(sinks=sinks),
        )
        here = call(here, *jax.tree.map(lambda x: cut(x, 1), like_out))
        starts = [first[0], *[0] * (heads - 1), first[1]]
        put = lambda x, y: write_slice(
            x, pin_layout(y.astype(x.dtype)), starts + [0] * (x.ndim - len(starts))
        )
        return jax.tree.map(put, found, here)

    return visit_blocks(problem, operands, step, found)


def visit_tiles(
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
    # With one dim of heads, which they had at the door: for G = 1, XLA:CPU would copy them into a
    # layout of its own.
    flat = tuple(lax.collapse(x, 2, 4) for x in (operands.query, *like_query))
    mask, bias = (
        None if x is None else lax.collapse(x, 1, 3) for x in (operands.mask, operands.terms.bias)
    )
    with_flat = operands._replace(mask=mask, terms=operands.terms._replace(bias=bias))
    lengths = operands.query.shape[1], operands.key.shape[1]
    pieces = () if has_traced_bounds(operands) else tile_groups(problem, operands, along)
    B, _, K = operands.query.shape[:3]
    b, k = problem.block or (B, K)

    def block(first):
        if has_traced_bounds(operands):
            at = lambda carry, i, j: step(
                carry, cut_tile(with_flat, flat, rows, lengths, problem, True, first, i, j)
            )
            return functools.partial(
                _visit_between_bounds, problem, slice_batch(operands, first[0], b), at
            )

        def fetching(rows, masked, size, starts):
            here = (
                slice_shared(with_flat, flat, rows, size, starts)
                if problem.joined
                else (with_flat, flat, rows)
            )
            return functools.partial(
                cut_tile,
                *here,
                lengths,
                dataclasses.replace(problem, chunk_size=size),
                masked,
                first,
            )

        lists = []
        for (masked, *size), starts in pieces:
            fetch = functools.partial(fetching, masked=masked, size=tuple(size), starts=starts)
            lists.append(
                _visit_list(
                    fetch(rows), step, starts, beside, ahead and (fetch(ahead[0]), ahead[1])
                )
            )
        return lambda carry: functools.reduce(lambda carry, visit: visit(carry), lists, carry)

    if (b, k) == (B, K):
        return block((0, 0))
    return functools.partial(
        visit_blocks, problem, operands, lambda first, carry: block(first)(carry)
    )


def visit_blocks(problem: Problem, operands: Operands, step, carry):
    """Folds `step((batch entry, key head), carry)` over where the blocks begin."""
    assert problem.block is not None
    B, _, K = operands.query.shape[:3]
    b, k = problem.block
    at = lambda n, carry: step((n // (K // k) * b, n % (K // k) * k), carry)
    return lax.fori_loop(jnp.int32(0), jnp.int32(B // b * (K // k)), at, carry)


def _visit_list(fetch, step, pairs: np.ndarray, beside: bool, ahead):
    if not beside and ahead is None:
        return lambda carry: lax.scan(
            lambda carry, ij: (step(carry, fetch(*ij)), None), carry, pairs
        )[0]

    def aside(fetch, ij):
        tile = fetch(*ij)
        return tile.rows, tile.keep

    def known(fetch, ij, aside):
        rows, keep = aside
        return fetch(*ij)._replace(rows=rows, keep=keep)

    n = len(pairs)
    here, following, after = (
        pairs[np.minimum(np.arange(n) + further, n - 1)] for further in range(3)
    )
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
    return lambda carry: lax.scan(
        two_ahead, (carry, start, then, make(first)), (here, following, after)
    )[0][0]


def _visit_between_bounds(problem: Problem, operands: Operands, step, carry):
    """The same where lengths or offsets are arrays: for each query tile, key tiles between bounds computed as it runs."""
    T, S = operands.query.shape[1], operands.key.shape[1]
    t, c = problem.chunk_size
    offset = jnp.int32(problem.q_offset) if operands.q_offset is None else operands.q_offset
    q_end = jnp.int32(T) if operands.q_lengths is None else jnp.minimum(operands.q_lengths, T)
    kv_end = jnp.int32(S) if operands.kv_lengths is None else jnp.minimum(operands.kv_lengths, S)

    def row(i, carry):
        some_from, some_to, _, _ = key_range(problem, offset, i * t, jnp.minimum(i * t + t, T) - 1)
        first = jnp.int32(0) if some_from is None else jnp.clip(some_from, 0, kv_end)
        end = kv_end if some_to is None else jnp.clip(some_to, 0, kv_end)
        some = (first < end) & (i * t < q_end)  # of a batch entry; the loop spans them all
        lo = jnp.where(some, first, S).min() // c
        hi = (jnp.where(some, end, 0).max() + c - 1) // c
        return lax.fori_loop(
            lo.astype(jnp.int32), hi.astype(jnp.int32), lambda j, x: step(x, i * t, j * c), carry
        )

    n = (jnp.max(q_end, initial=0) + t - 1) // t
    return lax.fori_loop(jnp.int32(0), n.astype(jnp.int32), row, carry)
