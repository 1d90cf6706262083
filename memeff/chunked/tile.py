"""One tile of logits: its products, its logits and their derivative, in plain JAX. Everybody who walks over tiles has these.

Queries are at B K G t H, keys at B K c H, values at B K c D; logits and what is made of them at B K G t c.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.dropout import dropout_keep_mask, head_numbers
from memeff.logits import logits_from_dots, transform_query_key
from memeff.masking import query_positions
from memeff.problem import LogitParams, Operands, Problem, accumulator_dtype
from memeff.sharding import sharding_of_sum
from memeff.softmax import Lse
from memeff.user_functions import PairIndices


class Tile(NamedTuple):
    here: Operands  # sliced to the tile; query B K G t H, key B K c H, value B K c D
    rows: tuple[Array, ...]  # slices B K G t of what the walk was given for each row
    wide: tuple[Array, ...]  # and B K G t D, those like the query first
    # absolute positions t and c, -1 for what the tile before has already done
    at: tuple[Array, Array]
    places: PairIndices | None
    keep: Array | None  # who sees whom; None: all
    first: tuple[Any, Any]  # where the slices start: batch entry and key head,
    row: Array
    col: Array
    of: tuple[int, int, int]  # K, T and S of the whole
    ahead: Array | None = None  # what was made of this tile in the step before


def tile_logits(problem: Problem, tile: Tile, apart: bool = True):
    """(1) and (2) of a tile: raw, s, and the transpose of (2), ds -> draw, dterms.

    `apart`: what follows is not fused into the product. XLA:GPU then makes all that is wanted of it in one kernel.
    """
    q, k = transform_query_key(problem, tile.here, *tile.at)
    raw = dot("bkgth,bkch->bkgtc", q, k, problem, accumulator_dtype(tile.here))
    if apart:
        raw = lax.optimization_barrier(raw)
    s, pull = jax.vjp(
        lambda raw, terms: logits_from_dots(problem, raw, terms, tile.keep, tile.places),
        raw,
        tile.here.terms,
    )
    return raw, s, pull


def transform_back(
    problem: Problem, tile: Tile, dq: Array, dk: Array, dterms: LogitParams
) -> tuple[Array, Array, LogitParams]:
    """Cotangents of what the products took, dq B K G t H and dk B K H c, back through `transformed`."""

    def forward(q, k, terms):
        return transform_query_key(
            problem, tile.here._replace(query=q, key=k, terms=terms), *tile.at
        )

    wide = lambda x: x.astype(dq.dtype)
    _, pull = jax.vjp(forward, *map(wide, tile.here[:2]), tile.here.terms)
    dq, dk, more = pull((dq, dk.swapaxes(2, 3)))
    transform = jax.tree.map(lambda x, y: x + y, dterms.transform, more.transform)
    return dq, dk.swapaxes(2, 3), dterms._replace(transform=transform)


def probabilities(s: Array, lse: Lse, keep: Array | None) -> Array:
    """Return p = exp(s - lse), B K G t c; 0 where `keep` hides the pair, also where lse is NaN."""
    below = s - lse.high[..., None]
    below = below if lse.low is None else below - lse.low[..., None]
    return jnp.exp(below if keep is None else jnp.where(keep, below, -jnp.inf))


def row_max(problem: Problem, tile: Tile, raw: Array, s: Array) -> Array:
    """max s, B K G t; where (2) does not decrease in raw, of its largest raw, so that XLA:CPU need not store s for it."""
    falls = tile.here.terms.scale is not None or problem.scale < 0 or problem.score_fn is not None
    if tile.keep is not None or falls:  # a bias makes all tiles masked
        return s.max(-1)
    # with a dim G = 1 it would copy raw
    raw = raw[:, :, 0].max(-1)[:, :, None] if raw.shape[2] == 1 else raw.max(-1)
    return logits_from_dots(problem, raw[..., None], tile.here.terms, None)[..., 0]


def weighted_values(problem: Problem, tile: Tile, p: Array, dtype) -> Array:
    """p v, B K G t D. A value that is not finite makes NaN of the rows that see it, in its columns, and no others."""
    v, keep = tile.here.value, tile.keep
    p = apply_dropout(problem, tile, p).astype(v.dtype)
    if keep is None:
        return dot("bkgtc,bkcd->bkgtd", p, v, problem, dtype)
    bad = ~jnp.isfinite(v)
    bad_key = bad.any(-1)  # b k c
    if keep.shape[:3] == (1, 1, 1):  # a small product instead of a pass over the tile of every head
        sees_bad = (
            jnp.einsum("tc,bkc->bkt", keep[0, 0, 0].astype(dtype), bad_key.astype(dtype)) > 0
        )[:, :, None]
    else:
        sees_bad = (keep & bad_key[:, :, None, None, :]).any(-1)  # b k g t
    o = dot("bkgtc,bkcd->bkgtd", p, zero_nonfinite(v, True), problem, dtype)
    return jnp.where(sees_bad[..., None] & bad.any(2)[:, :, None, None, :], jnp.nan, o)


def dot(spec: str, x: Array, y: Array, problem: Problem, dtype, like: Array | None = None) -> Array:
    """A product of tiles; `like`: what it is added to, which says how a sum over sharded heads is laid out.

    The heads of a group become rows of one matrix (r = g t), in the forward and in the backward: so XLA:CPU neither
    transposes nor copies a tile, and, unless it is very small, multiplies it in the same way in a batch of any size.
    """
    g, t = x.shape[2:4]  # x is b k g t ...
    names = spec.replace("gt", "r")
    x, y = (lax.collapse(z, 2, 4) if z.ndim == 5 else z for z in (x, y))
    z = jnp.einsum(
        names,
        x,
        y,
        preferred_element_type=dtype,
        precision=problem.precision,
        out_sharding=sharding_of_sum(like),
    )
    return z.reshape(*z.shape[:2], g, t, -1) if "r" in names.split("->")[1] else z


def zero_nonfinite(x: Array, masked: bool) -> Array:
    """0 for NaN and Inf where the other factor may be the 0 of a hidden pair; who does see them is NaN by lse or out."""
    return jnp.where(jnp.isfinite(x), x, 0) if masked else x


def apply_dropout(problem: Problem, tile: Tile, x: Array) -> Array:
    if problem.dropout is None:
        return x
    head = head_numbers(tile.here.query.max((3, 4), initial=0), tile.of[0], tile.first)
    kept = dropout_keep_mask(problem, tile.here, head, tile.of[1:], *tile.at)
    return jnp.where(kept, x / (1.0 - problem.dropout.rate), 0)


def distances(problem: Problem, tile: Tile) -> Array:
    """|q_pos - k_pos|, B|1 1 1 t c."""
    rows, cols = tile.at
    offset = tile.here.q_offset
    q_pos = query_positions(problem, None if offset is None else offset[:, None], rows)
    away = jnp.abs(q_pos[..., :, None] - cols).astype(accumulator_dtype(tile.here))
    return away.reshape(-1, 1, 1, *away.shape[-2:])
