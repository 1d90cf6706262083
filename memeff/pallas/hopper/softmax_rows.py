"""Update and finish the rows of a softmax whose logits come tile by tile, in base 2.

m is the running maximum of a row, l the running sum of 2^(s - m).
"""

import jax.numpy as jnp
from jax import Array, lax

from memeff.logits import LOG2_E
from memeff.pallas.hopper.mosaic import broadcast_vector
from memeff.softmax import LSE_OF_EMPTY_ROW


def add_tile(s: Array, m: Array, l: Array, headroom: Array | None = None):
    """Return p = 2^(s - m'), the new m and l, and the factor a of what was summed before.

    m' is `headroom` above the largest logit.
    """
    top = s.max(axis=1)
    if headroom is not None:
        top = top + headroom
    m_new = jnp.maximum(m, top)
    shift = jnp.where(m_new == -jnp.inf, 0.0, m_new)
    a = jnp.exp2(m - shift)
    p = jnp.exp2(s - broadcast_vector(shift, (s.shape[0], s.shape[1])))
    return p, m_new, a * l + p.sum(axis=1), a


def inverse_sum(m: Array, l: Array, sink: Array | None) -> Array:
    """Return 1 / l, or 1 / (l + 2^(sink - m)) without overflow if sink is far above m."""
    l = jnp.where(l == 0, 1.0, l)
    if sink is None:
        return 1 / l
    sink = lax.broadcast(sink, l.shape)
    m = jnp.where(m == -jnp.inf, 0.0, m)
    top = jnp.maximum(m, sink)
    share = jnp.exp2(m - top)
    return share / (l * share + jnp.exp2(sink - top))


def lse_of_rows(m: Array, l: Array) -> Array:
    """Return lse in nats."""
    lse = (m + jnp.log2(l)) * (1 / LOG2_E)
    return jnp.where(l == 0, LSE_OF_EMPTY_ROW, lse)
