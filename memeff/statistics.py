"""What rows and keys do, beside out: entropy, largest logit, expected distance, and how much each key receives.

Of a row with probabilities p = exp(s - lse): entropy = - sum p (s - lse), distance = sum p |q_pos - k_pos|. In the forward
they are gathered in the pass that gives out; their derivatives, of every order, are those of sums over tiles (tiles.py).
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from memeff import xla
from memeff.differentiation import Forward, derivative_along
from memeff.problem import SEES_NOTHING, Lse, Operands, Problem, log_sum_exp
from memeff.rules import call
from memeff.sharding import vary_alike
from memeff.tangent import OfTile, as_inputs
from memeff.tile import Tile, distances, logits, probabilities
from memeff.tiles import Dims, Where, tile_sum


class Statistics(NamedTuple):
    """Of each query, [*B, T, N] in float32 (float64 for float64); of one that sees no key 0, for lse and largest -inf."""

    out: Array  # [*B, T, N, D], as `dot_product_attention` gives it
    lse: Array
    entropy: Array  # nats, from 0 (one key takes all) to log S (all take the same)
    largest: Array  # logit
    distance: Array  # tokens, the mean of |q_pos - k_pos|


@dataclasses.dataclass(frozen=True)
class Measured:
    """out [B, K, G, T, D], lse, entropy, largest and distance [B, K, G, T]."""

    problem: Problem

    def __call__(self, operands: Operands) -> tuple[Array, ...]:
        rows, below, distance = xla.measured(self.problem, operands)
        out, lse = xla.divided(operands, rows, log_sum_exp)
        l = jnp.where(rows.l == 0, 1, rows.l)
        entropy = jnp.maximum(jnp.log(l) - below / l, 0)  # rounding alone would make it negative
        return out, lse.high, entropy, rows.m, distance / l

    def jvp(self, primals, tangents):
        found = call(self, *primals)
        return found, derivative_along(lambda operands: self._from_lse(operands, found[3]), primals, tangents)

    def _from_lse(self, operands: Operands, largest: Array) -> tuple[Array, ...]:
        """The same, to be differentiated; `largest` tells where the largest logit is."""
        out, lse = call(Forward(xla, self.problem, "caller"), operands)
        how, inputs, arrays = as_inputs(self.problem, operands, lse, False)
        rows = Dims("bnt", len(inputs))
        found = tile_sum(
            _OfRows(**vars(how)),
            xla.walk_over(self.problem, operands),
            (*inputs, rows),
            (rows,) * 4,
            0,
            *arrays,
            lax.collapse(lax.stop_gradient(largest), 1, 3),
        )
        entropy, distance, of_largest, count = (x.reshape(largest.shape) for x in found)
        return out, lse.high, entropy, of_largest / jnp.maximum(lax.stop_gradient(count), 1), distance


def measured(problem: Problem, operands: Operands) -> tuple[Array, ...]:
    """out [B, K, G, T, D], lse, entropy, largest and distance [B, K, G, T]."""
    return call(Measured(problem), vary_alike(operands))


def key_mass(problem: Problem, operands: Operands) -> Array:
    """The sum of the probabilities of each key, over all queries: B K G S."""
    operands = vary_alike(operands)
    _, lse = call(Forward(xla, problem, "caller"), operands)
    how, inputs, arrays = as_inputs(problem, operands, lse, False)
    (B, _, K, G, _), S = operands.query.shape, operands.key.shape[1]
    like = jnp.zeros_like(operands.key[..., 0].swapaxes(1, 2))[:, :, None] + jnp.zeros((G, 1), operands.key.dtype)
    dims = Dims("bns", len(inputs))
    walk = xla.walk_over(problem, operands)
    (found,) = tile_sum(_OfKeys(**vars(how)), walk, (*inputs, dims), (dims,), 0, *arrays, lax.collapse(like, 1, 3))
    return found.reshape(B, K, G, S)


@dataclasses.dataclass(frozen=True)
class _OfRows(OfTile):
    def __call__(self, where: Where, *parts: Array) -> tuple[Array, ...]:
        tile, lse = self.tile(where, parts)
        s, p = _seen(self.problem, tile, lse)
        largest = parts[-1].reshape(lse.high.shape)[..., None]
        close = 8 * jnp.finfo(s.dtype).eps * jnp.abs(largest)  # by what another order of the same sum may differ
        hit = (s >= largest - close) & (lse.high != SEES_NOTHING)[..., None]
        hit = hit if tile.keep is None else hit & tile.keep
        found = -p * (s - lse.high[..., None]), p * distances(self.problem, tile), jnp.where(hit, s, 0), hit
        return tuple(lax.collapse(x.sum(-1, dtype=p.dtype), 1, 3) for x in found)


@dataclasses.dataclass(frozen=True)
class _OfKeys(OfTile):
    def __call__(self, where: Where, *parts: Array) -> tuple[Array]:
        tile, lse = self.tile(where, parts)
        _, p = _seen(self.problem, tile, lse)
        return (lax.collapse(p.sum(3), 1, 3),)


def _seen(problem: Problem, tile: Tile, lse: Lse) -> tuple[Array, Array]:
    """Logits, 0 where nobody sees, and probabilities."""
    _, s, _ = logits(problem, tile)
    p = probabilities(s, lse, tile.keep)
    return s if tile.keep is None else jnp.where(tile.keep, s, 0), p
