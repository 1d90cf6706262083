"""Compute sampled rows of attention by the equations of the program, one pair at a time.

A recipe names what the program does: causal order, a window, a bias. Here no name is used. The
program's own equations compute each logit from its dot product, with positions in place of `iota`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from memeff.rewrite.recipe import PairFunction, Recipe


@dataclasses.dataclass(frozen=True)
class Equations:
    """The program's equations for one pair."""

    logits: PairFunction
    shown: PairFunction | None  # the probabilities of other pairs are set to 0
    summed: PairFunction | None  # the exponentials of other pairs are not summed
    factor: float  # of the product of query and key


def compute_rows(
    recipe: Recipe, equations: Equations, inputs: list[Array], samples: Sequence[Array]
) -> Array:
    """Return rows of the output, [n, D], where `samples` are batch entries, queries and heads [n].

    Dropout and factors of the output are left out. Arrays are float64 where JAX has it.
    """
    B, N, T, S = recipe.sizes
    wide = jnp.result_type(float)
    query, key, value = (x.astype(wide) for x in recipe.operands(inputs))
    query = query.reshape(B, T, N, -1)
    key = key.reshape(B, S, -1, key.shape[-1])
    value = value.reshape(B, S, -1, value.shape[-1])
    group = N // key.shape[2]
    columns = jnp.arange(S)
    sinks = recipe.sinks(inputs)

    def each_pair(function: PairFunction, *arguments) -> Array:
        """Return the results of a function for the keys of one row, [S]."""
        leaves = [inputs[n] for n in function.numbers]
        axes = [None if jnp.ndim(x) == 0 else 0 for x in arguments]
        return jax.vmap(lambda *pair: function.function(*pair, leaves), axes)(*arguments)

    def row(sample):
        b, t, n = sample
        dots = equations.factor * (key[b, :, n // group] @ query[b, t, n])
        position = t + recipe.q_offset  # the functions subtract it, as those of a recipe do
        s = each_pair(equations.logits, dots, b, n, position, columns)
        highest = jnp.maximum(s.max(), sinks[n])
        rest = jnp.exp(sinks[n] - highest)
        e = jnp.exp(s - highest)
        total = e
        if equations.summed is not None:
            total = jnp.where(each_pair(equations.summed, b, n, position, columns), e, 0)
        p = e / (total.sum() + rest)
        if recipe.nan_is_zero:
            p = jnp.where(jnp.isnan(p), 0, p)
        if recipe.empty_rows_are_zero:
            p = jnp.where(jnp.isneginf(highest), 0, p)
        if equations.shown is not None:
            p = jnp.where(each_pair(equations.shown, b, n, position, columns), p, 0)
        return p @ value[b, :, n // group]

    return jax.lax.map(row, tuple(samples))
