"""The quadratic definition, as short as the formula, differentiated by JAX. It hides nothing; it is the truth.

(1) raw = q k'   (2) s = finish(raw)   (3) lse = log sum exp s   (4) out = exp(s - lse) v
"""

import jax
import jax.numpy as jnp
from jax import Array

from memeff.dropout import dropout_keep_mask, head_numbers
from memeff.logits import logits_from_dots, transform_query_key
from memeff.masking import mask_tile, pair_indices
from memeff.problem import Operands, Problem, accumulator_dtype
from memeff.softmax import SEES_NOTHING, Lse, LseFor, log_sum_exp, sink_weights


def forward(problem: Problem, operands: Operands, lse_for: LseFor = "caller") -> tuple[Array, Lse]:
    """out [B, K, G, T, D] in the query's dtype and lse [B, K, G, T]; differentiable by JAX, to any order, in both modes."""
    del lse_for
    query, key, value = operands[:3]
    (B, T, K, G, _), S = query.shape, key.shape[1]
    rows, cols = jnp.arange(T, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32)
    dtype = accumulator_dtype(operands)
    laid_out = operands._replace(query=query.transpose(0, 2, 3, 1, 4), key=key.swapaxes(1, 2))
    query, key = transform_query_key(problem, laid_out, rows, cols)
    query, key = query.transpose(0, 3, 1, 2, 4), key.swapaxes(1, 2)
    at = pair_indices(
        problem, operands, query[:, 0, :, :, 0] if T else query.sum((1, 4)), (0, 0), rows, cols
    )
    keep = jnp.broadcast_to(mask_tile(problem, operands, rows, cols, at), (B, K, G, T, S))
    # 0 * NaN is NaN: what nobody sees, and who sees nothing, counts as 0
    seen = keep.any((2, 3)).swapaxes(1, 2)[..., None]  # b s k 1
    key, value = jnp.where(seen, key, 0), jnp.where(seen, value, 0)
    query = jnp.where(keep.any(-1).transpose(0, 3, 1, 2)[..., None], query, 0)  # b t k g 1
    raw = _pairs(problem, query, key, dtype)  # (1)
    s = logits_from_dots(problem, raw, operands.terms, keep, at)  # (2)
    m = jax.lax.stop_gradient(jnp.max(s, axis=-1, initial=-jnp.inf))
    m = jnp.where(m == -jnp.inf, 0, m)  # so that exp(s - m) is 0, not NaN, in rows that see nothing
    e = jnp.exp(s - m[..., None])
    l = e.sum(-1)
    empty = l == 0
    l = jnp.where(empty, 1, l)
    lse = log_sum_exp(jnp.where(empty, SEES_NOTHING, m), l)  # (3)
    p = e / l[..., None]
    if operands.terms.sinks is not None:
        share, total = sink_weights(m, jnp.where(empty, 0, l), operands.terms.sinks)
        p = e * (share / total)[..., None]
    p = jnp.where(keep, p, 0)  # also in a row that is NaN
    if problem.dropout is not None:
        head = head_numbers(query.max((1, 4), initial=0), K)
        kept = dropout_keep_mask(problem, operands, head, (T, S), rows, cols)
        p = jnp.where(kept, p / (1.0 - problem.dropout.rate), 0)
    bad = ~jnp.isfinite(value)
    keep = jnp.where(keep, jnp.ones_like(p), 0)  # sharded as p is
    sees_bad = _mix(problem, keep, bad.astype(dtype), dtype) > 0  # b k g t d
    # For the rows that see it alone, and their derivatives:
    nan = jax.lax.stop_gradient(jnp.where(sees_bad, jnp.nan, 0).astype(dtype))
    p = _times_in_tangent(p, 1 + nan.sum(-1, keepdims=True))
    out = _mix(problem, p.astype(value.dtype), jnp.where(bad, 0, value), dtype) + nan  # (4)
    out = jnp.where(empty[..., None], 0, out)  # an empty row's cotangent does not count
    return out.astype(query.dtype), lse


def _mix(problem: Problem, p: Array, v: Array, dtype) -> Array:
    return jnp.einsum(
        "bkgts,bskd->bkgtd", p, v, preferred_element_type=dtype, precision=problem.precision
    )


def _pairs(problem: Problem, query: Array, key: Array, dtype) -> Array:
    """Return q k', B K G T S; in its derivatives NaN of a query or key reaches nothing by a product with 0."""

    def product(query, key):
        return jnp.einsum(
            "btkgh,bskh->bkgts",
            query,
            key,
            preferred_element_type=dtype,
            precision=problem.precision,
        )

    finite = product(*(jnp.where(jnp.isfinite(x), x, 0) for x in (query, key)))
    return finite + jax.lax.stop_gradient(product(query, key) - finite)


@jax.custom_jvp
def _times_in_tangent(x: Array, factor: Array) -> Array:
    """Return x, whose tangent is multiplied by `factor`."""
    del factor
    return x


@_times_in_tangent.defjvp
def _(primals, tangents):
    x, factor = primals
    return x, tangents[0] * factor
