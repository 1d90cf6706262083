"""Combine the parts of a row's softmax: its log-sum-exp, its sink, and its gradient's row sums."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# lse, inside memeff, of a row that sees no key: it is finite, and exp(s - lse) is 0. The public API
# returns -inf instead.
LSE_OF_EMPTY_ROW = float(np.finfo(np.float32).max)
# The reader of lse: nobody (inference), our own backward, or the caller, who needs float32 accuracy
LseFor = Literal["gradient", "caller"] | None


class Lse(NamedTuple):
    """Log-sum-exp of rows, [B, K, G, T], as the unevaluated sum of two floats.

    One float would err by 6e-8 |lse|, and so would, relatively, all probabilities that the backward
    recomputes from it.
    """

    high: Array  # lse itself; LSE_OF_EMPTY_ROW for a row without a key
    low: Array | None  # None: 0


def log_sum_exp(m: Array, l: Array) -> Lse:
    """Return m + log(l) from the maximum `m` and the sum `l` of rows, both [B, K, G, T]."""
    high = m + jnp.log(l)
    return Lse(high, (m - high) + jnp.log(l))


def sink_weights(m: Array, l: Array, sinks: Array) -> tuple[Array, Array]:
    """Return the factor and the divisor of a row's sums if a sink takes part in its softmax.

    `l` [B, K, G, T] is the row sum of exp(s - m) over the keys. With top = max(m, sink), the row
    sum with the sink is l exp(m - top) + exp(sink - top). This neither overflows nor loses the
    larger of the two.
    """
    empty = l == 0
    sink = spread_sinks(sinks, l)
    m = jnp.where(empty, 0, m)  # -inf where a row sees no key
    sink = jnp.where(empty, 0, sink)  # it may be NaN
    top = lax.stop_gradient(jnp.maximum(m, sink))
    share = jnp.exp(m - top)
    keys = jnp.where(empty, 1, l) * share
    return share, keys + jnp.exp(sink - top)


def spread_sinks(sinks: Array, rows: Array) -> Array:
    """Return sinks [N] as [K, G, 1], in the dtype of rows [B, K, G, T]."""
    _, K, G, _ = rows.shape
    return sinks.astype(rows.dtype).reshape(K, G, 1)


def lse_with_sinks(lse: Lse, sinks: Array) -> tuple[Lse, Array]:
    """Return a row's log-sum-exp over keys and sink, and the sink's probability, [B, K, G, T].

    A row that sees no key keeps `LSE_OF_EMPTY_ROW`. Its sink has probability 0, because it takes
    nothing from any key.
    """
    sink = spread_sinks(sinks, lse.high)
    empty = lse.high == LSE_OF_EMPTY_ROW
    keys = jnp.where(empty, 0, lse.high)
    sink = jnp.where(empty, 0, sink)  # b k g t
    high = jnp.logaddexp(keys, sink)
    more = jnp.log1p(jnp.exp(-jnp.abs(keys - sink)))
    low = (jnp.maximum(keys, sink) - high) + more  # rounding error of high
    low = lax.stop_gradient(low)
    if lse.low is not None:
        low += lse.low * jax.nn.sigmoid(keys - sink)
    p = jnp.exp((sink - high) - low)
    high = jnp.where(empty, LSE_OF_EMPTY_ROW, high)
    low = jnp.where(empty, 0, low)
    p = jnp.where(empty, 0, p)
    return Lse(high, low), p


def row_dots(out: Array, dout: Array, dtype) -> Array:
    """Return rowsum(dout * out), [B, K, G, T], of two arrays [B, K, G, T, D].

    The product has the layout in which the arrays are stored, so that neither is copied.
    """
    out = out.transpose(0, 3, 1, 2, 4).astype(dtype)  # b t k g d
    dout = dout.transpose(0, 3, 1, 2, 4).astype(dtype)  # b t k g d
    dots = (out * dout).sum(-1)  # b t k g
    return dots.transpose(0, 2, 3, 1)
