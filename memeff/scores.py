"""Ready-made scores: positions that learn. Each is a `memeff.Score`, a pytree of its arrays: differentiate it as it stands.

>>> import memeff
>>> x = jnp.ones((1, 5, 2, 4))
>>> memeff.dot_product_attention(x, x, x, score_fn=alibi(jnp.array([0.5, 0.25])), is_causal=True).shape
(1, 5, 2, 4)
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from memeff.user_functions import Score, with_sizes


def alibi(slopes: ArrayLike) -> Score:
    """score - slopes[head] * |q_pos - k_pos|, slopes [N].

    Source: Press, Smith & Lewis 2022 (arXiv:2108.12409); `alibi_slopes` are theirs.
    """
    return Score(_alibi, jnp.asarray(slopes))


@with_sizes(lambda slopes: {"N": slopes.shape[0]})
def _alibi(score, batch, head, q_pos, k_pos, slopes):
    return score - (slopes[head] * jnp.abs(q_pos - k_pos)).astype(score.dtype)


def alibi_slopes(heads: int) -> Array:
    """[N], 2^(-8 n / N) for n = 1 to N; where N is no power of 2, those of the one below and every other above."""
    whole = 2 ** int(math.log2(heads))
    of = lambda n: [2 ** (-8 * i / n) for i in range(1, n + 1)]
    return jnp.array(of(whole) + of(2 * whole)[::2][: heads - whole])


def t5(table: ArrayLike, *, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """score + table[bucket of k_pos - q_pos, head], table [buckets, N].

    Half of the buckets count tokens, the others grow with their logarithm up to `max_distance`.
    Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.1.
    """
    table = jnp.asarray(table)
    return Score(_T5(table.shape[0], bidirectional, max_distance), table)


@dataclasses.dataclass(frozen=True)
class _T5:
    buckets: int
    bidirectional: bool
    max_distance: int

    def sizes(self, table):
        return {"N": table.shape[1]}

    def __call__(self, score, batch, head, q_pos, k_pos, table):
        away, buckets, start = k_pos - q_pos, self.buckets, 0
        if self.bidirectional:
            buckets //= 2
            start = jnp.where(away > 0, buckets, 0)
            away = jnp.abs(away)
        else:
            away = jnp.maximum(-away, 0)
        exact = buckets // 2
        far = jnp.log(jnp.maximum(away, 1).astype(jnp.float32) / exact) / math.log(
            self.max_distance / exact
        )
        far = exact + (far * (buckets - exact)).astype(jnp.int32)
        bucket = start + jnp.where(away < exact, away, jnp.minimum(far, buckets - 1))
        return score + table[bucket, head].astype(score.dtype)


def relative(table: ArrayLike) -> Score:
    """score + table[head, k_pos - q_pos + L], table [N, 2 L + 1]: distances beyond L count as L.

    Source: Shaw, Uszkoreit & Vaswani 2018 (arXiv:1803.02155), a number in the place of a vector.
    """
    return Score(_relative, jnp.asarray(table))


@with_sizes(lambda table: {"N": table.shape[0]})
def _relative(score, batch, head, q_pos, k_pos, table):
    reach = (table.shape[1] - 1) // 2
    return score + table[head, jnp.clip(k_pos - q_pos, -reach, reach) + reach].astype(score.dtype)


def soft_cap(cap: ArrayLike) -> Score:
    """cap * tanh(score / cap), a number or [N], one for each head."""
    return Score(_soft_cap, jnp.asarray(cap))


@with_sizes(lambda cap: {"N": cap.shape[0]} if cap.ndim else {})
def _soft_cap(score, batch, head, q_pos, k_pos, cap):
    cap = (cap[head] if cap.ndim else cap).astype(score.dtype)
    return cap * jnp.tanh(score * (1 / cap))


def head_temperature(scale: ArrayLike) -> Score:
    """score * scale[head], scale [N]: a temperature for each head."""
    return Score(_of_head, jnp.asarray(scale))


@with_sizes(lambda scale: {"N": scale.shape[0]})
def _of_head(score, batch, head, q_pos, k_pos, scale):
    return score * scale[head].astype(score.dtype)
