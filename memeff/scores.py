"""Ready-made scores: biases by position and scales by head, with params that can learn.

Each is a `memeff.Score`, a pytree of its arrays: `jax.grad` can differentiate with respect to it.

>>> import memeff
>>> x = jnp.ones((1, 5, 2, 4))
>>> score = alibi(jnp.array([0.5, 0.25]))
>>> memeff.dot_product_attention(x, x, x, score_fn=score, is_causal=True).shape
(1, 5, 2, 4)
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from memeff.inputs import check_bool, check_size, known_values, to_array
from memeff.user_functions import Score, with_sizes


def alibi(slopes: ArrayLike) -> Score:
    """Return the score minus slopes[head] * |q_pos - k_pos|, with slopes [N].

    Source: Press, Smith & Lewis 2022 (arXiv:2108.12409). `alibi_slopes` gives the paper's slopes.
    """
    return Score(_alibi, _numbers("slopes", slopes, "N"))


def _numbers(name: str, x: ArrayLike, *dims: str) -> Array:
    """Return real numbers with these dims."""
    x = to_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating) and not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be real numbers, got {x.dtype}.")
    if x.ndim != len(dims):
        raise ValueError(f"{name} must have shape [{', '.join(dims)}]; got {x.shape}.")
    return x


def _one_per_head(params):
    return {"N": params.shape[0]}


@with_sizes(_one_per_head)
def _alibi(score, batch, head, q_pos, k_pos, slopes):
    # In the score's dtype: 16 bits round distances beyond 256 (2,048), and float16 ends at 65,504.
    distance = jnp.abs(q_pos - k_pos).astype(score.dtype)
    return score - slopes[head].astype(score.dtype) * distance


def alibi_slopes(heads: int) -> Array:
    """Return the ALiBi paper's slopes [N]: 2^(-8 n / N) for n = 1 to N, if N is a power of 2.

    For other N they are the slopes of the next lower power of 2, followed by every other slope of
    the next higher one.
    """
    heads = check_size("heads", heads)
    lower = 2 ** int(math.log2(heads))

    def geometric(n):
        return [2 ** (-8 * i / n) for i in range(1, n + 1)]

    every_other = geometric(2 * lower)[::2]
    return jnp.array(geometric(lower) + every_other[: heads - lower])


def t5(table: ArrayLike, *, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """Return the score plus table[bucket of k_pos - q_pos, head], with table [buckets, N].

    Half of the buckets are one token wide. The width of the rest grows logarithmically up to
    `max_distance` tokens.
    Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.1.
    """
    table = _numbers("table", table, "buckets", "N")
    check_bool("bidirectional", bidirectional)
    score = _T5(table.shape[0], bool(bidirectional), check_size("max_distance", max_distance))
    if score.exact < 1:
        least = 4 if bidirectional else 2
        raise ValueError(f"table has {score.buckets} buckets: it must have at least {least}.")
    if score.max_distance <= score.exact:
        raise ValueError(
            f"max_distance={max_distance}: distances up to {score.exact} have buckets of their "
            "own, so it must be larger."
        )
    return Score(score, table)


@dataclasses.dataclass(frozen=True)
class _T5:
    buckets: int
    bidirectional: bool
    max_distance: int

    def sizes(self, table):
        return {"N": table.shape[1]}

    @property
    def exact(self) -> int:
        """Return how many buckets of each direction are one token wide."""
        return (self.buckets // 2 if self.bidirectional else self.buckets) // 2

    def __call__(self, score, batch, head, q_pos, k_pos, table):
        away = k_pos - q_pos
        buckets = self.buckets
        start = 0
        if self.bidirectional:
            buckets //= 2
            start = jnp.where(away > 0, buckets, 0)
            away = jnp.abs(away)
        else:
            away = jnp.maximum(-away, 0)
        exact = self.exact
        ratio = jnp.maximum(away, 1).astype(jnp.float32) / exact
        part = jnp.log(ratio) / math.log(self.max_distance / exact)  # 0 at exact, 1 at max_distance
        far = exact + (part * (buckets - exact)).astype(jnp.int32)
        bucket = start + jnp.where(away < exact, away, jnp.minimum(far, buckets - 1))
        return score + table.astype(score.dtype)[bucket, head]


def relative(table: ArrayLike) -> Score:
    """Return the score plus table[head, k_pos - q_pos + L], with table [N, 2 L + 1].

    Distances beyond L count as L.
    Source: Shaw, Uszkoreit & Vaswani 2018 (arXiv:1803.02155), with one number for each distance and
    head instead of a vector.
    """
    table = _numbers("table", table, "N", "2 L + 1")
    if table.shape[1] % 2 == 0:
        raise ValueError(f"table must have shape [N, 2 L + 1], an odd number; got {table.shape}.")
    return Score(_relative, table)


@with_sizes(_one_per_head)
def _relative(score, batch, head, q_pos, k_pos, table):
    reach = (table.shape[1] - 1) // 2
    distance = jnp.clip(k_pos - q_pos, -reach, reach)
    return score + table.astype(score.dtype)[head, distance + reach]


def soft_cap(cap: ArrayLike) -> Score:
    """Return cap * tanh(score / cap), with one cap, or one for each head [N]."""
    array = to_array("cap", cap)
    array = _numbers("cap", array, *["N"] * bool(array.ndim))
    known = known_values(cap)  # of what came: under jit, `array` is traced
    if known is not None:
        wrong = known[~((known >= jnp.finfo(jnp.float32).tiny) & (known < math.inf))]
        if wrong.size:
            raise ValueError(f"cap must be > 0 and finite; got {wrong[0]:g}.")
    return Score(_soft_cap, array)


def _soft_cap_sizes(cap):
    return {"N": cap.shape[0]} if cap.ndim else {}


@with_sizes(_soft_cap_sizes)
def _soft_cap(score, batch, head, q_pos, k_pos, cap):
    if cap.ndim:
        cap = cap[head]
    cap = cap.astype(score.dtype)
    return cap * jnp.tanh(score * (1 / cap))


def head_temperature(scale: ArrayLike) -> Score:
    """Return the score times scale[head], with scale [N]."""
    return Score(_head_temperature, _numbers("scale", scale, "N"))


@with_sizes(_one_per_head)
def _head_temperature(score, batch, head, q_pos, k_pos, scale):
    return score * scale[head].astype(score.dtype)
