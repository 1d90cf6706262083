"""Keep NaN and Inf from the rows and keys that do not see them: in the kernels 0 times NaN is NaN.

Bad numbers are replaced by 0. Only if there are some, one more run of a kernel finds who sees them:
all its logits are 0, and its values or its cotangents are 1 where a number is bad. Who sees one gets
NaN. This needs neither another implementation nor T x S numbers.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from memeff.pallas.tpu.splash import Kernels
from memeff.softmax import LSE_OF_EMPTY_ROW

NARROW = 8  # head dim of a run that finds rows or keys only


class GradientArrays(NamedTuple):
    """What the kernels of the gradient read, padded."""

    query: Array  # B N T' H, scaled
    key: Array  # B K S' H
    value: Array  # B K S' D
    lse: Array  # B N T'
    dout: Array  # B N T' D
    delta: Array  # B N T'


def forward(kernels: Kernels, arrays: tuple[Array, ...], segments: Any, want_lse: bool):
    """Return what `Kernels.forward` returns, with NaN where a row sees one in that column."""
    query, key, value = arrays
    bad = _is_bad(value)
    clean_value = jnp.where(bad, 0, value)
    out, lse = kernels.forward((query, key, clean_value), segments, want_lse)

    def with_nan(out):
        zeros = jnp.zeros_like(query), jnp.zeros_like(key), bad.astype(value.dtype)
        sees_bad, _ = kernels.forward(zeros, segments, want_lse)
        return jnp.where(sees_bad > 0, jnp.nan, out)

    return lax.cond(bad.any(), with_nan, _same, out), lse


def backward(
    kernels: Kernels, arrays: GradientArrays, segments: Any
) -> tuple[Array, Array, Array]:
    """Return padded dq, dk and dv, with NaN in the rows that see a bad number or hold one.

    The keys that such a row sees have NaN, too.
    """
    query, key, value, lse, dout, delta = arrays
    bad_rows = _is_bad(query).any(-1) | _is_bad(dout).any(-1) | _is_bad(lse) | _is_bad(delta)
    bad_keys = _is_bad(key).any(-1) | _is_bad(value).any(-1)

    def add_rows_that_see(bad_rows):
        seen = _narrow(bad_keys, value.dtype)
        sees_bad, _ = kernels.forward((_zeros_like(query), _zeros_like(key), seen), segments, True)
        return bad_rows | ((sees_bad > 0).any(-1) & (lse != LSE_OF_EMPTY_ROW))

    bad_rows = lax.cond(bad_keys.any(), add_rows_that_see, _same, bad_rows)
    cleaned = GradientArrays(
        jnp.where(bad_rows[..., None], 0, query),
        jnp.where(_is_bad(key), 0, key),
        jnp.where(_is_bad(value), 0, value),
        jnp.where(bad_rows, LSE_OF_EMPTY_ROW, lse),
        jnp.where(bad_rows[..., None], 0, dout),
        jnp.where(bad_rows, 0, delta),
    )
    dq = kernels.query_gradient(cleaned, segments)
    dk, dv = kernels.key_gradient(cleaned, segments)

    def with_nan(gradients):
        dq, dk, dv = gradients
        zero_rows = jnp.zeros_like(lse)
        run = GradientArrays(
            _zeros_like(query),
            _zeros_like(key),
            _zeros_like(value),
            jnp.where(bad_rows, zero_rows, LSE_OF_EMPTY_ROW),
            _narrow(bad_rows, dout.dtype),
            zero_rows,
        )
        _, seen = kernels.key_gradient(run, segments)
        is_seen = (seen > 0).any(-1, keepdims=True)
        return (
            jnp.where(bad_rows[..., None], jnp.nan, dq),
            jnp.where(is_seen, jnp.nan, dk),
            jnp.where(is_seen, jnp.nan, dv),
        )

    return lax.cond(bad_rows.any(), with_nan, _same, (dq, dk, dv))


def _is_bad(x: Array) -> Array:
    """Return True where a number is NaN or infinite."""
    return ~jnp.isfinite(x)


def _narrow(marks: Array, dtype: Any) -> Array:
    """Return marks [B, N, T'] as 0 and 1, [B, N, T', NARROW]."""
    return jnp.broadcast_to(marks[..., None], (*marks.shape, NARROW)).astype(dtype)


def _zeros_like(x: Array) -> Array:
    """Return zeros [B, N, T', NARROW] for an array [B, N, T', H]."""
    return jnp.zeros((*x.shape[:-1], NARROW), x.dtype)


def _same(x: Any) -> Any:
    """Return x."""
    return x
