"""Compute one tile of logits in plain JAX: its products, its logits, and their derivative.

Queries are B K G t H, keys B K c H, values B K c D. Logits and all that has their shape are
B K G t c.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.dropout import dropout_keep_mask
from memeff.logits import (
    logits_from_dots,
    logits_increasing,
    transform_query_key,
    wide_terms,
)
from memeff.masking import as_column, query_positions
from memeff.problem import LogitParams, Operands, Problem, accumulator_dtype
from memeff.sharding import sharding_of_sum
from memeff.softmax import Lse
from memeff.user_functions import PairIndices


class Tile(NamedTuple):
    """The slices of one tile, and its position."""

    operands: Operands  # sliced to the tile, in the layout of `problem.split_heads`
    row_scalars: tuple[Array, ...]  # slices B K G t of the caller's arrays
    # slices B K G t D of the caller's arrays, those like the query first
    row_vectors: tuple[Array, ...]
    # absolute positions t and c, -1 where another tile has them already
    positions: tuple[Array, Array]
    indices: PairIndices | None  # for functions of the user
    keep: Array | None  # True = may attend; None: all may
    head_start: tuple[Any, Any]  # start of the slices: batch entry and key head
    row_start: Array  # start of the slices: query
    col_start: Array  # start of the slices: key
    sizes: tuple[int, int, int]  # K, T and S of the whole arrays
    prefetched: Array | None = None  # computed of this tile in the step before
    kept: Array | None = None  # pairs that dropout keeps, if computed in the step before


def tile_logits(problem: Problem, tile: Tile, materialize_raw: bool = True):
    """Return raw, s, and the transpose of (2), which takes ds to d_raw and the params' cotangents.

    `materialize_raw`: store the product before its consumers, which XLA:GPU then puts in one
    kernel.
    """
    q, k = transform_query_key(problem, tile.operands, *tile.positions)
    raw = raw_product(problem, tile, q, k)  # (1)
    if materialize_raw:
        raw = lax.optimization_barrier(raw)

    def logits(raw: Array, terms: LogitParams) -> Array:
        return logits_from_dots(problem, raw, terms, tile.keep, tile.indices)

    s, pull = jax.vjp(logits, raw, wide_terms(tile.operands.logit_params, raw.dtype))  # (2)
    return raw, s, pull


def raw_product(problem: Problem, tile: Tile, q: Array, k: Array) -> Array:
    """Return (1), the product of transformed queries and keys.

    NaN and Inf reach it, so that rows that see them become NaN. In its derivatives they count as 0
    in masked tiles, because 0 * NaN is NaN also for a hidden pair.
    """

    masked = tile.keep is not None
    dtype = accumulator_dtype(tile.operands)

    # Neither function closes over an array of `tile`: that would be a leaked tracer.
    @jax.custom_jvp
    def product(q, k):
        return dot("bkgth,bkch->bkgtc", q, k, problem, dtype)

    @product.defjvp
    def _(primals, tangents):
        raw = product(*primals)
        tangent = functools.partial(raw_tangent, problem, masked, dtype, raw, *primals)
        dq, dk = tangents
        return raw, tangent(dq, None) + tangent(None, dk)  # JAX transposes no product of both

    return product(q, k)


def raw_tangent(
    problem: Problem,
    masked: bool,
    dtype: Any,
    raw: Array,
    q: Array,
    k: Array,
    dq: Array | None,
    dk: Array | None,
) -> Array:
    """Return the tangent of (1), as one product. A tangent that is None is 0."""
    factors = []
    if dq is not None:
        factors.append((dq, zero_nonfinite(k, masked)))
    if dk is not None:
        factors.append((zero_nonfinite(q, masked), dk))
    if not factors:
        return jnp.zeros_like(raw)
    left, right = (jnp.concatenate(x, -1) for x in zip(*factors, strict=True))
    return dot("bkgth,bkch->bkgtc", left, right, problem, dtype)


def transform_vectors(
    problem: Problem, tile: Tile, q: Array, k: Array, terms: LogitParams
) -> tuple[Array, Array]:
    """Return the queries q and the keys k of a tile after `qk_transform` with params in `terms`."""
    operands = tile.operands._replace(query=q, key=k, logit_params=terms)
    return transform_query_key(problem, operands, *tile.positions)


def transform_back(
    problem: Problem,
    tile: Tile,
    dq: Array,
    dk: Array,
    dterms: LogitParams,
) -> tuple[Array, Array, LogitParams]:
    """Pull cotangents of transformed queries (B K G t H) and keys (B K H c) back through it.

    Return those of the tile's queries and keys, and `dterms` with those of the transform's params.
    """
    q = tile.operands.query.astype(dq.dtype)
    k = tile.operands.key.astype(dq.dtype)
    transform = functools.partial(transform_vectors, problem, tile)
    _, pull = jax.vjp(transform, q, k, tile.operands.logit_params)
    dq, dk, more = pull((dq, dk.swapaxes(2, 3)))
    params = jax.tree.map(lambda x, y: x + y, dterms.transform, more.transform)
    return dq, dk.swapaxes(2, 3), dterms._replace(transform=params)


def probabilities(s: Array, lse: Lse, keep: Array | None) -> Array:
    """Return p = exp(s - lse), B K G t c; 0 where `keep` hides the pair, also where lse is NaN."""
    shifted = s - lse.high[..., None]
    if lse.low is not None:
        shifted = shifted - lse.low[..., None]
    if keep is not None:
        shifted = jnp.where(keep, shifted, -jnp.inf)
    return jnp.exp(shifted)


LEAST_P = 2.0**-126


def positive_where_visible(p: Array, keep: Array | None) -> Array:
    """Return p, B K G t c, with 0 for hidden pairs and at least LEAST_P for visible ones.

    So later code knows from p alone which pairs are hidden.
    """
    p = jnp.maximum(p, LEAST_P)
    return p if keep is None else jnp.where(keep, p, 0)


def row_max(problem: Problem, tile: Tile, raw: Array, s: Array) -> Array:
    """Return the row maximum of s, B K G t.

    Where (2) is increasing, compute it from the maximum of raw, so that XLA:CPU need not store s.
    """
    terms = tile.operands.logit_params
    # A tile with a bias has a mask, too.
    if tile.keep is not None or not logits_increasing(problem, terms):
        return s.max(-1)
    if raw.shape[2] == 1:  # XLA:CPU would copy raw for a dim G = 1
        raw = raw[:, :, 0].max(-1)[:, :, None]
    else:
        raw = raw.max(-1)  # b k g t
    s = logits_from_dots(problem, raw[..., None], terms, None)  # b k g t 1
    return s[..., 0]


def weighted_values(problem: Problem, tile: Tile, p: Array, dtype) -> Array:
    """Return p v, B K G t D, after dropout.

    Rows that may attend to a value that is not finite become NaN in its column, and in those of the
    tile's other values that are not finite. No other entry does.
    """
    v = tile.operands.value
    keep = tile.keep
    p = apply_dropout(problem, kept_by_dropout(problem, tile), p).astype(v.dtype)
    if keep is None:
        return dot("bkgtc,bkcd->bkgtd", p, v, problem, dtype)
    bad = ~jnp.isfinite(v)
    bad_key = bad.any(-1)  # b k c
    if keep.shape[:3] == (1, 1, 1):  # a small product, not a pass over the tile of every head
        sees_key = keep[0, 0, 0].astype(dtype)  # t c
        bad_count = jnp.einsum("tc,bkc->bkt", sees_key, bad_key.astype(dtype))
        sees_bad = (bad_count > 0)[:, :, None]  # b k 1 t
    else:
        sees_bad = (keep & bad_key[:, :, None, None, :]).any(-1)  # b k g t
    o = dot("bkgtc,bkcd->bkgtd", p, zero_nonfinite(v, True), problem, dtype)
    becomes_nan = sees_bad[..., None] & bad.any(2)[:, :, None, None, :]  # b k g t d
    return jnp.where(becomes_nan, jnp.nan, o)


def dot(spec: str, x: Array, y: Array, problem: Problem, dtype, like: Array | None = None) -> Array:
    """Return the product `spec` of two tiles, laid out over devices as `like`, if given.

    `like` is the total that the product is added to. The heads of a group become rows of one
    matrix (r = g t). So XLA:CPU neither transposes nor copies a tile and, unless it is very small,
    multiplies it in the same way in a batch of any size.
    """
    g, t = x.shape[2:4]  # x is b k g t ...
    names = spec.replace("gt", "r")
    x = lax.collapse(x, 2, 4)  # b k r ...
    if y.ndim == 5:
        y = lax.collapse(y, 2, 4)
    z = jnp.einsum(
        names,
        x,
        y,
        preferred_element_type=dtype,
        precision=problem.precision,
        out_sharding=sharding_of_sum(like),
    )
    _, result_names = names.split("->")
    if "r" not in result_names:
        return z
    b, k = z.shape[:2]
    return z.reshape(b, k, g, t, -1)


def zero_nonfinite(x: Array, masked: bool) -> Array:
    """Zero NaN and Inf in masked tiles, because 0 * NaN is NaN.

    Rows that may attend to them become NaN through lse or out.
    """
    return jnp.where(jnp.isfinite(x), x, 0) if masked else x


def kept_by_dropout(problem: Problem, tile: Tile) -> Array | None:
    """Return the pairs that dropout keeps, 1|B 1|K 1|G t c; None without dropout."""
    if problem.dropout is None or tile.kept is not None:
        return tile.kept
    K, T, S = tile.sizes
    like = tile.operands.query.max((3, 4), initial=0)  # b k g, with the sharding of the heads
    sizes = K * like.shape[2], T, S
    kept = dropout_keep_mask(problem, tile.operands, like, tile.head_start, sizes, *tile.positions)
    # Stored before its consumers. XLA:CPU would draw the bits in the loops of each consumer, for
    # each head again: shared bits, 2 x 4 heads, 2k tokens, 540 ms; so 60.
    return lax.optimization_barrier(kept)


def apply_dropout(problem: Problem, kept: Array | None, x: Array) -> Array:
    """Drop entries of x [B, K, G, t, c], and scale the kept ones, with the call's dropout."""
    if problem.dropout is None:
        return x
    assert kept is not None
    return jnp.where(kept, x / (1.0 - problem.dropout.rate), 0)


def distances(problem: Problem, tile: Tile) -> Array:
    """Return |q_pos - k_pos|, B|1 1 1 t c."""
    rows, cols = tile.positions
    offset = as_column(tile.operands.q_offset)
    q_pos = query_positions(problem, offset, rows[None])  # b|1 t
    distance = jnp.abs(q_pos[..., None] - cols[None, None])
    distance = distance.astype(accumulator_dtype(tile.operands))
    t, c = distance.shape[-2:]
    return distance.reshape(-1, 1, 1, t, c)
