"""What rows and keys do, beside out: entropy, largest logit, expected distance, and how much each key receives.

Of a row with probabilities p = exp(s - lse): entropy = - sum p (s - lse), distance = sum p |q_pos - k_pos|. In the forward
they are gathered in the pass that gives out; their derivatives, of every order, are those of sums over tiles (tiles.py).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from memeff import implementations, sharding
from memeff.attention_ad import Forward, tangent_of
from memeff.autodiff.primitives import call
from memeff.autodiff.tile_sum import DimNames, TileLocation, tile_sum
from memeff.call import prepare, to_public_rows
from memeff.chunked import implementation as chunked
from memeff.chunked import row_sums, schedule
from memeff.chunked.forward import forward_with_statistics
from memeff.chunked.tangent import TileFunction, tile_sum_inputs
from memeff.chunked.tile import Tile, distances, probabilities, tile_logits
from memeff.diagnostics.arguments import bind_chunked_arguments
from memeff.problem import Operands, Problem
from memeff.shape import unfold
from memeff.sharding import vary_together
from memeff.softmax import SEES_NOTHING, Lse, log_sum_exp


class Statistics(NamedTuple):
    """Of each query, [*B, T, N] in float32 (float64 for float64); of one that sees no key 0, for lse and largest -inf."""

    out: Array  # [*B, T, N, D], as `dot_product_attention` gives it
    lse: Array
    entropy: Array  # nats, from 0 (one key takes all) to log S (all take the same)
    largest: Array  # logit
    distance: Array  # tokens, the mean of |q_pos - k_pos|


@dataclasses.dataclass(frozen=True)
class RowStatistics:
    """out [B, K, G, T, D], lse, entropy, largest and distance [B, K, G, T]."""

    problem: Problem

    def __call__(self, operands: Operands) -> tuple[Array, ...]:
        rows, below, distance = forward_with_statistics(self.problem, operands)
        out, lse = row_sums.normalise(operands, rows, log_sum_exp)
        l = jnp.where(rows.l == 0, 1, rows.l)
        entropy = jnp.maximum(jnp.log(l) - below / l, 0)  # rounding alone would make it negative
        return out, lse.high, entropy, rows.m, distance / l

    def jvp(self, primals, tangents):
        found = call(self, *primals)
        return found, tangent_of(
            lambda operands: self._from_lse(operands, found[3]), primals, tangents
        )

    def _from_lse(self, operands: Operands, largest: Array) -> tuple[Array, ...]:
        """The same, to be differentiated; `largest` tells where the largest logit is."""
        out, lse = call(Forward(chunked, self.problem, "caller"), operands)
        how, inputs, arrays = tile_sum_inputs(self.problem, operands, lse, False)
        rows = DimNames("bnt", len(inputs))
        found = tile_sum(
            _OfRows(**vars(how)),
            schedule.tile_grid(self.problem, operands),
            (*inputs, rows),
            (rows,) * 4,
            0,
            *arrays,
            lax.collapse(lax.stop_gradient(largest), 1, 3),
        )
        entropy, distance, of_largest, count = (x.reshape(largest.shape) for x in found)
        return (
            out,
            lse.high,
            entropy,
            of_largest / jnp.maximum(lax.stop_gradient(count), 1),
            distance,
        )


def row_statistics(problem: Problem, operands: Operands) -> tuple[Array, ...]:
    """out [B, K, G, T, D], lse, entropy, largest and distance [B, K, G, T]."""
    return call(RowStatistics(problem), vary_together(operands))


def sum_probabilities_by_key(problem: Problem, operands: Operands) -> Array:
    """The sum of the probabilities of each key, over all queries: B K G S."""
    operands = vary_together(operands)
    _, lse = call(Forward(chunked, problem, "caller"), operands)
    how, inputs, arrays = tile_sum_inputs(problem, operands, lse, False)
    (B, _, K, G, _), S = operands.query.shape, operands.key.shape[1]
    like = jnp.zeros_like(operands.key[..., 0].swapaxes(1, 2))[:, :, None] + jnp.zeros(
        (G, 1), operands.key.dtype
    )
    dims = DimNames("bns", len(inputs))
    walk = schedule.tile_grid(problem, operands)
    (found,) = tile_sum(
        _OfKeys(**vars(how)), walk, (*inputs, dims), (dims,), 0, *arrays, lax.collapse(like, 1, 3)
    )
    return found.reshape(B, K, G, S)


@dataclasses.dataclass(frozen=True)
class _OfRows(TileFunction):
    def __call__(self, where: TileLocation, *parts: Array) -> tuple[Array, ...]:
        tile, lse = self.tile(where, parts)
        s, p = _seen(self.problem, tile, lse)
        largest = parts[-1].reshape(lse.high.shape)[..., None]
        # by what another order of the same sum may differ
        close = 8 * jnp.finfo(s.dtype).eps * jnp.abs(largest)
        hit = (s >= largest - close) & (lse.high != SEES_NOTHING)[..., None]
        hit = hit if tile.keep is None else hit & tile.keep
        found = (
            -p * (s - lse.high[..., None]),
            p * distances(self.problem, tile),
            jnp.where(hit, s, 0),
            hit,
        )
        return tuple(lax.collapse(x.sum(-1, dtype=p.dtype), 1, 3) for x in found)


@dataclasses.dataclass(frozen=True)
class _OfKeys(TileFunction):
    def __call__(self, where: TileLocation, *parts: Array) -> tuple[Array]:
        tile, lse = self.tile(where, parts)
        _, p = _seen(self.problem, tile, lse)
        return (lax.collapse(p.sum(3), 1, 3),)


def _seen(problem: Problem, tile: Tile, lse: Lse) -> tuple[Array, Array]:
    """Logits, 0 where nobody sees, and probabilities."""
    _, s, _ = tile_logits(problem, tile)
    p = probabilities(s, lse, tile.keep)
    return s if tile.keep is None else jnp.where(tile.keep, s, 0), p


def attention_statistics(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    **how: Any,
) -> Statistics:
    """out and lse as `dot_product_attention`, and of each row its entropy, largest logit and expected distance.

    In one pass over the logits and in linear memory, by the chunked path; differentiable in every order. Of probabilities
    before dropout. The gradient of the largest logit is shared by those that equal it to rounding.

    Args: those of `dot_product_attention` but implementation, backward, return_residual and sinks.

    Returns: `memeff.Statistics`: out [*B, T, N, D]; lse, entropy (nats), largest, distance (tokens) [*B, T, N].

    Raises: as the call itself does; TypeError for an argument that is not one of those.

    Example:
      >>> x = jnp.ones((1, 4, 1, 8))
      >>> print(attention_statistics(x, x, x, is_causal=True).distance[0, :, 0])
      [0.  0.5 1.  1.5]
    """
    return _run_statistics(
        bind_chunked_arguments("attention_statistics", query, key, value, bias, mask, how)
    )


def _run_statistics(
    given: Mapping[str, Any], chosen: implementations.Chosen | None = None
) -> Statistics:
    call = prepare(given, _run_statistics, chosen)
    out, *rows = sharding.on_their_mesh(row_statistics, (call.problem,), call.operands)
    return Statistics(unfold(call.shape, out), *(to_public_rows(call, x) for x in rows))


def key_mass(
    query: ArrayLike,
    key: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    **how: Any,
) -> Array:
    """How much each key receives: the sum of its probabilities over all queries, [*B, S, N] in float32 (float64).

    In linear memory, by the chunked path: one pass for lse, one for the sums; differentiable in every order.

    Args: those of `dot_product_attention` but value, implementation, backward, return_residual and sinks.

    Raises: as `dot_product_attention`; TypeError for an argument that is not one of those.

    Example:
      >>> x = jnp.ones((1, 4, 1, 8))
      >>> print(key_mass(x, x)[0, :, 0])
      [1. 1. 1. 1.]
    """
    return _run_key_mass(
        bind_chunked_arguments("key_mass", query, key, jnp.asarray(key)[..., :1], bias, mask, how)
    )


def _run_key_mass(given: Mapping[str, Any], chosen: implementations.Chosen | None = None) -> Array:
    call = prepare(given, _run_key_mass, chosen)
    found = sharding.on_their_mesh(sum_probabilities_by_key, (call.problem,), call.operands)
    return unfold(call.shape, found)
