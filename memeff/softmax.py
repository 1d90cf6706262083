"""Combine the parts of a row's softmax: its log-sum-exp, its sink, and its gradient's row sums."""

import functools
import operator
from collections.abc import Sequence
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


def merge_rows(
    outs: Sequence[Array], logs: Sequence[Array], lows: Sequence[Array | None]
) -> tuple[Array, Array, Array]:
    """Return out, m and l of all keys from those of the parts, each of some of the keys.

    `logs` [..., T] + `lows` are the parts' log-sum-exps, -inf for a row that sees none of a part's
    keys. `outs` [..., T, D] are their outputs. The log-sum-exp of all keys is m + log l.
    l is 0 where a row sees no key at all; m is 0 there.
    """
    m = functools.reduce(jnp.maximum, logs)
    m = lax.stop_gradient(jnp.where(m == -jnp.inf, 0, m))
    shares = []
    for log, low in zip(logs, lows, strict=True):
        shifted = log - m
        shares.append(jnp.exp(shifted if low is None else shifted + low))
    l = functools.reduce(operator.add, shares)
    divisor = jnp.where(l == 0, 1, l)
    total = None
    for out, share in zip(outs, shares, strict=True):
        weight = (share / divisor)[..., None]
        out = jnp.where(weight == 0, 0, out.astype(m.dtype))  # 0 * NaN is NaN
        total = weight * out if total is None else total + weight * out
    assert total is not None
    return total, m, l


def merge_partial(outs: Sequence[Array], lses: Sequence[Lse]) -> tuple[Array, Lse]:
    """Return out [B, K, G, T, D] and lse [B, K, G, T] of all keys from those of the parts."""
    logs = [jnp.where(lse.high == LSE_OF_EMPTY_ROW, -jnp.inf, lse.high) for lse in lses]
    out, m, l = merge_rows(outs, logs, [lse.low for lse in lses])
    empty = l == 0
    lse = log_sum_exp(jnp.where(empty, LSE_OF_EMPTY_ROW, m), jnp.where(empty, 1, l))
    return out, lse


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
    """Return sinks [N] as [1, K, G, 1], in the dtype of rows [B, K, G, T]."""
    _, K, G, _ = rows.shape
    return sinks.astype(rows.dtype).reshape(1, K, G, 1)


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
    # In this order: where the second factor is broadcast along d and the first under vmap, XLA:CPU
    # of jaxlib 0.10.2 reads memory that is not theirs.
    dots = (dout * out).sum(-1)  # b t k g
    return dots.transpose(0, 2, 3, 1)
