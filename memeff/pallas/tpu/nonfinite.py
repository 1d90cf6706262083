"""Keep NaN and Inf from the rows and keys that do not see them: in the kernels 0 times NaN is NaN.

Bad numbers are replaced. If there are some among the values, one more run of the forward finds the
rows that see them: all its logits are 0, and its values are 1 where a number is bad. The gradient
needs no such run. Nothing here needs another implementation or T x S numbers.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from memeff.pallas.tpu.splash import Kernels

# With these exp(s - lse) and (dp - delta) p are inf for a visible pair, and 0 for HIDDEN_LOGIT.
LSE_OF_BAD_ROW = -1e38
DELTA_OF_BAD_ROW = -1e38


class GradientArrays(NamedTuple):
    """The arrays that the kernels of the gradient read, padded."""

    query: Array  # B N T' H
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


def backward(kernels: Kernels, arrays: GradientArrays, segments: Any) -> tuple[Array, Array, Array]:
    """Return padded dq, dk and dv, with NaN in the rows that see a bad number or hold one.

    The keys that such a row sees have NaN, too: its p and ds are infinite where it sees a key and 0
    elsewhere, and its query and dout are 1. A row that sees a bad number has a bad lse or delta.
    """
    query, key, value, lse, dout, delta = arrays
    bad_rows = _is_bad(query).any(-1) | _is_bad(dout).any(-1) | _is_bad(lse) | _is_bad(delta)
    bad = bad_rows[..., None]
    cleaned = GradientArrays(
        jnp.where(bad, 1, query),
        jnp.nan_to_num(key, nan=0),  # an infinite key keeps the sign of its logits
        jnp.where(_is_bad(value), 0, value),
        jnp.where(bad_rows, LSE_OF_BAD_ROW, lse),
        jnp.where(bad, 1, dout),
        jnp.where(bad_rows, DELTA_OF_BAD_ROW, delta),
    )
    dq = kernels.query_gradient(cleaned, segments)
    dk, dv = kernels.key_gradient(cleaned, segments)
    is_seen = bad_rows.any() & _is_bad(dv).any(-1, keepdims=True)
    return (
        jnp.where(bad, jnp.nan, dq),
        jnp.where(is_seen, jnp.nan, dk),
        jnp.where(is_seen, jnp.nan, dv),
    )


def _is_bad(x: Array) -> Array:
    """Return True where a number is NaN or infinite."""
    return ~jnp.isfinite(x)


def _same(x: Any) -> Any:
    """Return x."""
    return x
