"""Compute attention by its quadratic definition, as short as the formula, differentiated by JAX.

(1) raw = q k'   (2) s = logits_from_dots(raw)   (3) lse = log sum exp s   (4) out = exp(s - lse) v
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from memeff.dropout import dropout_keep_mask
from memeff.logits import logits_from_dots, transform_query_key
from memeff.masking import mask_tile, pair_indices
from memeff.problem import Operands, Problem, Schedule, accumulator_dtype, split_heads
from memeff.softmax import LSE_OF_EMPTY_ROW, Lse, LseFor, log_sum_exp, sink_weights


def forward(
    problem: Problem, schedule: Schedule, operands: Operands, lse_for: LseFor = "caller"
) -> tuple[Array, Lse]:
    """Return out [B, K, G, T, D] in the query's dtype and lse [B, K, G, T].

    JAX differentiates it to any order, in both modes.
    """
    del schedule, lse_for
    shape = operands.shape
    T = shape.T
    S = shape.S
    operands = split_heads(operands, shape.K)  # one tile
    rows = jnp.arange(T, dtype=jnp.int32)
    cols = jnp.arange(S, dtype=jnp.int32)
    dtype = accumulator_dtype(operands)
    query, key = transform_query_key(problem, operands, rows, cols)
    like = query[:, :, :, 0, 0] if T else query.sum((3, 4))  # b k g
    indices = pair_indices(problem, operands, like, (0, 0), rows, cols)
    keep = mask_tile(problem, operands, rows, cols, indices)
    keep = jnp.broadcast_to(keep, (shape.B, shape.K, shape.G, T, S))
    query, key, value = _zero_unseen(query, key, operands.value, keep)
    product = functools.partial(
        jnp.einsum, preferred_element_type=dtype, precision=problem.precision
    )
    raw = _dots(product, query, key)  # (1)
    s = logits_from_dots(problem, raw, operands.logit_params, keep, indices)  # (2)
    m = jax.lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf))
    m = jnp.where(m == -jnp.inf, 0, m)  # so that exp(s - m) is 0, not NaN, in rows without a key
    e = jnp.exp(s - m[..., None])
    l = e.sum(-1)  # b k g t
    empty = l == 0
    l = jnp.where(empty, 1, l)
    lse = log_sum_exp(jnp.where(empty, LSE_OF_EMPTY_ROW, m), l)  # (3)
    p = e / l[..., None]
    if operands.logit_params.sinks is not None:
        share, total = sink_weights(m, jnp.where(empty, 0, l), operands.logit_params.sinks)
        p = e * (share / total)[..., None]
    p = jnp.where(keep, p, 0)  # also in a row that is NaN
    if problem.dropout is not None:
        like = query.max((3, 4), initial=0)
        sizes = shape.N, T, S
        kept = dropout_keep_mask(problem, operands, like, (0, 0), sizes, rows, cols)
        p = jnp.where(kept, p / (1.0 - problem.dropout.rate), 0)
    bad = ~jnp.isfinite(value)
    keep = jnp.where(keep, jnp.ones_like(p), 0)  # sharded as p is
    sees_bad = product("bkgts,bksd->bkgtd", keep, bad.astype(dtype)) > 0  # b k g t d
    # NaN only for the rows that see the bad value, and for their derivatives
    nan = jax.lax.stop_gradient(jnp.where(sees_bad, jnp.nan, 0).astype(dtype))
    p = _scale_tangent(p, 1 + nan.sum(-1, keepdims=True))
    p = p.astype(value.dtype)
    out = product("bkgts,bksd->bkgtd", p, _zero_nonfinite(value)) + nan  # (4)
    out = jnp.where(empty[..., None], 0, out)  # an empty row's cotangent does not count
    return out.astype(query.dtype), lse


def _zero_unseen(query: Array, key: Array, value: Array, keep: Array):
    """Zero queries that see no key, and keys and values that no query sees: 0 * NaN is NaN."""
    seen = keep.any((2, 3))[..., None]  # b k s 1
    key = jnp.where(seen, key, 0)
    value = jnp.where(seen, value, 0)
    sees = keep.any(-1)[..., None]  # b k g t 1
    return jnp.where(sees, query, 0), key, value


def _dots(product: Callable[..., Array], query: Array, key: Array) -> Array:
    """Return q k', [B, K, G, T, S], whose derivatives never multiply NaN of q or k by 0."""

    dots = functools.partial(product, "bkgth,bksh->bkgts")
    finite = dots(_zero_nonfinite(query), _zero_nonfinite(key))
    raw = dots(query, key)
    # where a product of finite numbers overflows both are Inf, and Inf - Inf is NaN
    return finite + jax.lax.stop_gradient(jnp.where(raw == finite, 0, raw - finite))


@jax.custom_jvp
def _zero_nonfinite(x: Array) -> Array:
    """Return x with 0 for NaN and Inf, and leave its tangent."""
    return jnp.where(jnp.isfinite(x), x, 0)


@_zero_nonfinite.defjvp
def _(primals, tangents):
    return _zero_nonfinite(*primals), tangents[0]


@jax.custom_jvp
def _scale_tangent(x: Array, factor: Array) -> Array:
    """Return x, and multiply its tangent by `factor`."""
    # Under vmap JAX expects that the result is mapped wherever its tangent is.
    return jnp.where(jnp.isnan(factor), x, x)


@_scale_tangent.defjvp
def _(primals, tangents):
    x, factor = primals
    return x, tangents[0] * factor
