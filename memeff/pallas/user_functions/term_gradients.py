"""Gradients of the terms of the logits from the cotangents that the kernel of dq sums."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import reshard

from memeff.logits import wide_terms, with_ratio
from memeff.pallas.user_functions import calls
from memeff.problem import LogitParams, Operands, Problem
from memeff.sharding import sharding_of_sum

# Dims of B K G T over which the cotangents of per-head and per-query numbers are summed.
SUMMED_DIMS = {"head_numbers": 3, "query_numbers": (1, 2)}


def gradients_of_terms(
    problem: Problem,
    operands: Operands,
    on_tiles: Problem,
    sums: Sequence[Array],
    extra_pass: Callable[[], Sequence[Array]],
) -> LogitParams:
    """Return the gradients of the scale, the soft cap and the float params of `score_fn`.

    `sums` [B, K, G, T] are in the order of `backward_common.term_list`. `extra_pass` returns the
    cotangents that the kernels do not sum. XLA drops that pass if nobody reads them.
    """
    params = operands.logit_params
    arrays = wide_terms(LogitParams(scale=params.scale, soft_cap=params.soft_cap), jnp.float32)
    read, pull = jax.vjp(functools.partial(with_ratio, problem), arrays)
    numbers, structure = jax.tree.flatten(read)
    count = len(numbers)
    (terms,) = pull(jax.tree.unflatten(structure, [x.sum() for x in sums[:count]]))
    return terms._replace(
        score=_score_gradients(problem, operands, on_tiles, sums[count:], extra_pass)
    )


def _score_gradients(
    problem: Problem,
    operands: Operands,
    on_tiles: Problem,
    sums: Sequence[Array],
    extra_pass: Callable[[], Sequence[Array]],
) -> tuple[Array, ...]:
    """Return the gradients of the float params of `score_fn`, given sums of its numbers'."""
    if problem.score_fn is None:
        return ()

    def numbers_of(floats):
        terms = operands.logit_params._replace(score=floats)
        return calls.differentiable_numbers(problem, operands._replace(logit_params=terms))

    def lay_like(x, number):
        sharding = sharding_of_sum(number)
        return x if sharding is None else reshard(x, sharding)

    numbers, pull = jax.vjp(numbers_of, operands.logit_params.score)
    score_fn: Any = on_tiles.score_fn
    cotangents = []
    for x, (axis, _) in zip(sums, score_fn.kernel_gradients, strict=True):
        cotangents.append(x.sum(SUMMED_DIMS[axis]))
    if calls.needs_extra_pass(problem, operands):
        cotangents += extra_pass()
    (score,) = pull(tuple(map(lay_like, cotangents, numbers)))
    return score
