"""Measure each row's entropy, largest logit and mean distance, and each key's mass.

For a row with probabilities p = exp(s - lse):
  entropy = - sum p (s - lse)    mean distance = sum p |q_pos - k_pos|
The forward sums them in the pass that gives out. Their derivatives of every order are those of sums
over tiles (autodiff/tile_sum.py).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Unpack

import jax.numpy as jnp
from jax import Array, export, lax
from jax.typing import ArrayLike

from memeff import sharding
from memeff.arguments import Arguments, AttentionKwargs
from memeff.attention_ad import Forward, tangent_of
from memeff.autodiff.primitives import call
from memeff.autodiff.tile_sum import DimNames, TileLocation, TileSum
from memeff.call import prepare, to_public_rows
from memeff.chunked import row_sums
from memeff.chunked.forward import forward_with_statistics
from memeff.chunked.schedule import tile_grid
from memeff.chunked.tangent import TileFunction, tile_sum_inputs
from memeff.chunked.tile import Tile, distances, probabilities, tile_logits
from memeff.diagnostics.bind import chunked_arguments
from memeff.implementations import Chosen
from memeff.inputs import to_array
from memeff.problem import Operands, Problem, split_axis
from memeff.query_positions import nan_without_params
from memeff.sharding import vary_together
from memeff.softmax import LSE_OF_EMPTY_ROW, Lse, log_sum_exp


class Statistics(NamedTuple):
    """The result of `memeff.attention_statistics`: out, and measures [*B, T, N] of each query.

    The measures are float32, or float64 for float64 operands. A query that sees no key has lse and
    max_logit -inf, and entropy and mean_distance 0.

    Attributes:
      out: [*B, T, N, D], as `dot_product_attention` returns it.
      lse: the log-sum-exp of the row's logits, in nats.
      entropy: of the row's probabilities, in nats: from 0 (one key takes all) to log S (all keys
        take the same).
      max_logit: the row's largest logit, in nats.
      mean_distance: the mean of |q_pos - k_pos| under the row's probabilities, in tokens.
    """

    out: Array
    lse: Array
    entropy: Array
    max_logit: Array
    mean_distance: Array


export.register_namedtuple_serialization(Statistics, serialized_name="memeff.Statistics")


@dataclasses.dataclass(frozen=True)
class RowStatistics:
    """The function from operands to the results of `row_statistics`."""

    chosen: Chosen

    def __call__(self, operands: Operands) -> tuple[Array, ...]:
        problem, schedule, _ = self.chosen
        sums, sum_below, sum_distance = forward_with_statistics(problem, schedule, operands)
        out, lse = row_sums.divide_sums(schedule, operands, sums, log_sum_exp)
        l = jnp.where(sums.l == 0, 1, sums.l)
        entropy = jnp.log(l) - sum_below / l
        entropy = jnp.maximum(entropy, 0)  # rounding alone would make it negative
        max_logit = jnp.where(jnp.isnan(l), jnp.nan, sums.m)  # XLA's maximum may overlook NaN
        return out, lse.high, entropy, max_logit, sum_distance / l

    def jvp(self, primals, tangents):
        """Return the statistics and their tangents."""
        statistics = call(self, *primals)
        max_logit = statistics[3]

        def differentiable(operands):
            return self._from_lse(operands, max_logit)

        return statistics, tangent_of(differentiable, primals, tangents)

    def _from_lse(self, operands: Operands, max_logit: Array) -> tuple[Array, ...]:
        """Return the statistics as sums over tiles, which can be differentiated.

        `max_logit` finds the largest logits.
        """
        problem, schedule, _ = self.chosen
        out, lse = call(Forward(self.chosen, "caller"), operands)
        function, inputs, arrays = tile_sum_inputs(problem, operands, lse, False)
        rows = DimNames("bnt", len(inputs))
        f = _RowSumsOfTile(**vars(function))
        grid = tile_grid(problem, schedule, operands)
        sums = TileSum(f, grid, (*inputs, rows), totals=(rows,) * 4, linear=0)
        results = sums(*arrays, lax.collapse(lax.stop_gradient(max_logit), 1, 3))
        entropy, distance, sum_of_largest, count = (x.reshape(max_logit.shape) for x in results)
        count = jnp.where(jnp.isnan(max_logit), jnp.nan, jnp.maximum(count, 1))
        mean_of_largest = sum_of_largest / lax.stop_gradient(count)
        return out, lse.high, entropy, mean_of_largest, distance


def row_statistics(chosen: Chosen, operands: Operands) -> tuple[Array, ...]:
    """Return out [B, K, G, T, D] and lse, entropy, max_logit, mean_distance [B, K, G, T]."""
    results = call(RowStatistics(chosen), vary_together(operands))
    return nan_without_params(chosen.problem, operands, results)


def sum_probabilities_by_key(chosen: Chosen, operands: Operands) -> Array:
    """Return the sum of each key's probabilities over all queries, [B, K, G, S]."""
    operands = vary_together(operands)
    problem, schedule, _ = chosen
    _, lse = call(Forward(chosen, "caller"), operands)
    function, inputs, arrays = tile_sum_inputs(problem, operands, lse, False)
    shape = operands.shape
    keys = jnp.zeros_like(operands.key[..., 0].swapaxes(1, 2))[:, :, None]  # B K 1 S
    # B K G S, sharded as the keys are
    keys = keys + jnp.zeros((1, 1, shape.G, 1), operands.key.dtype)
    dims = DimNames("bns", len(inputs))
    f = _KeySumsOfTile(**vars(function))
    grid = tile_grid(problem, schedule, operands)
    (mass,) = TileSum(f, grid, (*inputs, dims), totals=(dims,), linear=0)(
        *arrays, lax.collapse(keys, 1, 3)
    )
    return nan_without_params(problem, operands, split_axis(mass, 1, shape.K))


@dataclasses.dataclass(frozen=True)
class _RowSumsOfTile(TileFunction):
    """The sums of one tile for each query: entropy, distance, largest logits, and their number."""

    def __call__(self, where: TileLocation, *parts: Array) -> tuple[Array, ...]:
        tile, lse = self.tile(where, parts)
        raw, s, p = _logits_and_probabilities(self.problem, tile, lse)
        max_logit = parts[-1].reshape(lse.high.shape)[..., None]
        # The same sum in another order may differ by so much, also where its terms cancel.
        terms = tile.operands.logit_params
        size = jnp.abs(raw * (self.problem.scale if terms.scale is None else terms.scale))
        if terms.bias is not None:
            size += jnp.abs(terms.bias)
        close = 8 * jnp.finfo(s.dtype).eps * (jnp.abs(max_logit) + size)
        is_largest = ~(s < max_logit - close)  # also NaN, which then reaches the gradient
        is_largest &= (lse.high != LSE_OF_EMPTY_ROW)[..., None]
        if tile.keep is not None:
            is_largest = is_largest & tile.keep
        entropy = -p * (s - lse.high[..., None])
        distance = p * distances(self.problem, tile)
        sums = []
        for x in (entropy, distance, jnp.where(is_largest, s, 0), is_largest):
            row_sums_of_x = x.sum(-1, dtype=p.dtype)
            sums.append(lax.collapse(row_sums_of_x, 1, 3))  # B N t
        return tuple(sums)


@dataclasses.dataclass(frozen=True)
class _KeySumsOfTile(TileFunction):
    """The sum of one tile's probabilities for each key."""

    def __call__(self, where: TileLocation, *parts: Array) -> tuple[Array]:
        tile, lse = self.tile(where, parts)
        *_, p = _logits_and_probabilities(self.problem, tile, lse)
        return (lax.collapse(p.sum(3), 1, 3),)


def _logits_and_probabilities(problem: Problem, tile: Tile, lse: Lse) -> tuple[Array, Array, Array]:
    """Return the products of a tile [B, K, G, t, c], its logits, and its probabilities.

    Logits of hidden pairs are 0.
    """
    raw, s, _ = tile_logits(problem, tile)
    p = probabilities(s, lse, tile.keep)
    if tile.keep is not None:
        s = jnp.where(tile.keep, s, 0)
    return raw, s, p


def attention_statistics(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    **kwargs: Unpack[AttentionKwargs],
) -> Statistics:
    """Return out and lse, and each row's entropy, largest logit and mean distance.

    The chunked path computes all of them in one pass over the logits, in linear memory. They are
    differentiable in every order. Entropy and distance use the probabilities before dropout. If
    several logits equal the largest one up to rounding, they share its gradient.

    Args: those of `dot_product_attention` without implementation, backward, return_residual and
      sinks.

    Returns: `memeff.Statistics`: out [*B, T, N, D]; lse, entropy (nats), max_logit, mean_distance
      (tokens) [*B, T, N].

    Raises: as the call itself does; TypeError for an argument that is not one of those.

    Example:
      >>> x = jnp.ones((1, 4, 1, 8))
      >>> print(attention_statistics(x, x, x, is_causal=True).mean_distance[0, :, 0])
      [0.  0.5 1.  1.5]
    """
    arguments = chunked_arguments("attention_statistics", query, key, value, bias, mask, **kwargs)
    return _run_statistics(arguments)


def _run_statistics(arguments: Arguments, chosen: Chosen | None = None) -> Statistics:
    """Return the statistics of a call, in the tiles `chosen`, or in those that dispatch chooses."""
    call = prepare(arguments, _run_statistics, chosen)
    out, *rows = sharding.on_mesh_of_operands(row_statistics, (call.chosen,), call.operands)
    public_rows = [to_public_rows(call.shape, x, arguments.query) for x in rows]
    public_out = sharding.unfold(call.shape, out, arguments.query)
    return Statistics(public_out, *public_rows)


def key_mass(
    query: ArrayLike,
    key: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    **kwargs: Unpack[AttentionKwargs],
) -> Array:
    """Return the sum of each key's probabilities over all queries, [*B, S, N].

    The result is float32 (float64 for float64), and differentiable in every order. The chunked path
    computes it in linear memory, in one pass for lse and one for the sums.

    Args: those of `dot_product_attention` without value, implementation, backward, return_residual
      and sinks.

    Raises: as `dot_product_attention`; TypeError for an argument that is not one of those.

    Example:
      >>> x = jnp.ones((1, 4, 1, 8))
      >>> print(key_mass(x, x)[0, :, 0])
      [1. 1. 1. 1.]
    """
    key = to_array("key", key)
    # its size does not matter
    value = sharding.without_idle_axes(key)[..., :1] if key.ndim else key
    return _run_key_mass(chunked_arguments("key_mass", query, key, value, bias, mask, **kwargs))


def _run_key_mass(arguments: Arguments, chosen: Chosen | None = None) -> Array:
    """Return the mass of each key, in the tiles `chosen`, or in those that dispatch chooses."""
    call = prepare(arguments, _run_key_mass, chosen)
    mass = sharding.on_mesh_of_operands(sum_probabilities_by_key, (call.chosen,), call.operands)
    return sharding.unfold(call.shape, mass, arguments.query)
