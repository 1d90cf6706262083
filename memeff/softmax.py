"""Combine what the softmax of a row needs: its log-sum-exp, its sink, and the row sums of its gradient."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# lse of a row that sees no key, inside memeff: finite, and exp(s - it) is 0. At the door it is
# -inf.
SEES_NOTHING = float(np.finfo(np.float32).max)
# Who will read lse: nobody (inference), our own backward, or the caller, to whom it must be as good
# as float32.
LseFor = Literal["gradient", "caller"] | None


class Lse(NamedTuple):
    """log-sum-exp of rows, B K G T, as the unevaluated sum of two floats.

    One would err by 6e-8 |lse|, and all probabilities that the backward recomputes from it by that factor.
    """

    high: Array  # lse itself; SEES_NOTHING for a row without a key
    low: Array | None  # None: 0


def log_sum_exp(m: Array, l: Array) -> Lse:
    """m + log l."""
    high = m + jnp.log(l)
    return Lse(high, (m - high) + jnp.log(l))


def sink_weights(m: Array, l: Array, sinks: Array) -> tuple[Array, Array]:
    """Return what multiplies the sums of a row and what divides them, where a sink takes its share of the softmax.

    `l` [B, K, G, T] is the row sum of exp(s - m) over the keys. With top = max(m, sink), the row sum with the
    sink is l exp(m - top) + exp(sink - top), which neither overflows nor loses the larger of the two.
    """
    empty, sink = l == 0, sinks.astype(l.dtype)[..., None]  # k g 1
    m = jnp.where(empty, 0, m)  # -inf where a row sees no key
    sink = jnp.where(empty, 0, sink)  # it may be NaN
    top = lax.stop_gradient(jnp.maximum(m, sink))
    share = jnp.exp(m - top)
    return share, jnp.where(empty, 1, l) * share + jnp.exp(sink - top)


def lse_with_sinks(lse: Lse, sinks: Array) -> tuple[Lse, Array]:
    """Return the log-sum-exp [B, K, G, T] of the keys and the sink of a row, and the probability of the sink.

    A row that sees no key keeps `SEES_NOTHING`, and its sink has probability 0, because it gives nothing to anybody.
    """
    sink, empty = sinks.astype(lse.high.dtype)[..., None], lse.high == SEES_NOTHING
    keys, sink = jnp.where(empty, 0, lse.high), jnp.where(empty, 0, sink)
    high = jnp.logaddexp(keys, sink)
    more = jnp.log1p(jnp.exp(-jnp.abs(keys - sink)))
    low = lax.stop_gradient((jnp.maximum(keys, sink) - high) + more)  # what rounding took from high
    if lse.low is not None:
        low += lse.low * jax.nn.sigmoid(keys - sink)
    p = jnp.exp((sink - high) - low)
    total = Lse(jnp.where(empty, SEES_NOTHING, high), jnp.where(empty, 0, low))
    return total, jnp.where(empty, 0, p)


def row_dots(out: Array, dout: Array, dtype) -> Array:
    """Return rowsum(dout * out), B K G T, of arrays B K G T D; in the layout in which they came, so that none is copied."""
    out, dout = (x.transpose(0, 3, 1, 2, 4).astype(dtype) for x in (out, dout))  # b t k g d
    return (out * dout).sum(-1).transpose(0, 2, 3, 1)
