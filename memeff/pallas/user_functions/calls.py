"""Evaluate the precomputed numbers of a call's functions, and bind the rest to tiles."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from memeff.masking import query_positions
from memeff.pallas.user_functions.jaxpr import needed_eqns, run_eqns, why_not_lowered
from memeff.pallas.user_functions.partition import (
    ARGUMENTS,
    MOST_DIFFERENCES,
    MOST_VECTORS,
    SIDE,
    Numbers,
    PartitionedFunction,
    partition_function,
)
from memeff.pallas.user_functions.tile_function import TileFunction, slope_jaxpr
from memeff.problem import Operands, Problem
from memeff.user_functions import TracedFunction


def why_not(problem: Problem, operands: Operands) -> str | None:
    """Why kernels cannot run the functions of this call; None: they can."""
    vectors = differences = 0
    for name, (given, params) in _functions(problem, operands).items():
        apart = partition_function(name, given, params)
        if apart.reason is not None:
            return apart.reason
        vectors += len(apart.before.of_queries) + len(apart.before.of_keys)
        differences += len(apart.before.of_differences)
        if name == "score_fn":
            slopes = slope_jaxpr(apart)
            for step in slopes.steps:
                if (cannot := why_not_lowered(step, slopes.types)) is not None:
                    return (
                        f"its kernels cannot compute {cannot}, which the gradient of score_fn needs"
                    )
    if vectors > MOST_VECTORS:
        return f"its kernels have room for {MOST_VECTORS} numbers for each token, and these functions have {vectors}"
    if differences > MOST_DIFFERENCES:
        room = f"{MOST_DIFFERENCES} numbers for each difference of positions"
        return f"its kernels have room for {room}, and these functions have {differences}"
    return None


def count_numbers(problem: Problem, operands: Operands) -> tuple[tuple[int, int], int, int]:
    """Of how many there is a number for each query, and for each key; for each difference and head; and how many sums of
    cotangents.
    """
    found = [partition_function(name, *of) for name, of in _functions(problem, operands).items()]
    total = lambda of: sum(map(of, found))
    of_tokens = total(lambda x: len(x.before.of_queries)), total(lambda x: len(x.before.of_keys))
    return of_tokens, total(lambda x: len(x.before.of_differences)), total(lambda x: len(x.moving))


def needs_extra_pass(problem: Problem, operands: Operands) -> bool:
    """Has score_fn numbers that move, and of which kernels do not sum the cotangents?"""
    given = _functions(problem, operands).get("score_fn")
    return given is not None and bool(partition_function("score_fn", *given).walked)


def _functions(
    problem: Problem, operands: Operands
) -> dict[str, tuple[TracedFunction, tuple[Array, ...]]]:
    """{name: function and all its params}, floats in float32."""
    floats = sum(problem.mask_fn.floats) if problem.mask_fn is not None else 0
    masks = operands.mask_params[:floats], operands.mask_params[floats:]
    given = {
        "score_fn": (problem.score_fn, (operands.terms.score, operands.score_rest)),
        "mask_fn": (problem.mask_fn, masks),
    }
    found = {}
    for name, (fn, params) in given.items():
        if fn is not None:
            both = iter(params[0]), iter(params[1])
            leaves = (next(both[0 if is_float else 1]) for is_float in fn.floats)
            narrow = lambda x: (
                _astype(x, jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
            )
            found[name] = fn, tuple(map(narrow, leaves))
    return found


def _astype(x, dtype):
    """Of arrays, and of their shapes."""
    return (
        jax.ShapeDtypeStruct(x.shape, dtype)
        if isinstance(x, jax.ShapeDtypeStruct)
        else x.astype(dtype)
    )


def precomputed_numbers(problem: Problem, operands: Operands) -> Numbers:
    """What is made before, of both functions, that of score_fn first."""
    found = []
    for name, (given, params) in _functions(problem, operands).items():
        found.append(_numbers(partition_function(name, given, params), params, problem, operands))
    return Numbers(*(sum(x, ()) for x in zip(*found, strict=True))) if found else Numbers()


def score_numbers(problem: Problem, operands: Operands) -> tuple[PartitionedFunction, Numbers]:
    """score_fn taken apart, and what is made before of it."""
    given, params = _functions(problem, operands)["score_fn"]
    apart = partition_function("score_fn", given, params)
    return apart, _numbers(apart, params, problem, operands)


def differentiable_numbers(problem: Problem, operands: Operands) -> tuple[Array, ...]:
    """Of those of score_fn, what has a gradient: in the order of `OnTiles.moving`, then what is `walked`."""
    apart, found = score_numbers(problem, operands)
    by_name: dict[int, Array] = dict(zip(sum(apart.before, ()), sum(found, ()), strict=True))
    return tuple(by_name[x] for x in (*apart.moving, *apart.walked))


def _numbers(apart: PartitionedFunction, params, problem: Problem, operands: Operands) -> Numbers:
    (B, T, K, G, _), S = operands.query.shape, operands.key.shape[1]
    first = jnp.arange(max(B, K * G, T, S), dtype=jnp.int32)
    batch, head, each = first[:B], first[: K * G].reshape(K, G), jnp.zeros((B, 1), jnp.int32)
    offset = None if operands.q_offset is None else operands.q_offset[:, None]
    q_pos, k_pos = query_positions(problem, offset, first[None, :T]) + each, first[None, :S] + each
    # X, or B|1 X
    differences = query_positions(
        problem, offset, jnp.arange(_up(T) + _up(S), dtype=jnp.int32) - diagonal_offset(S)
    )

    def made(names, batch, head, q_pos, k_pos):
        pair = dict(zip(ARGUMENTS[1:], (batch, head, q_pos, k_pos), strict=True))
        count = len(apart.whole.inputs) - len(params)
        env: dict[int, Any] = dict(zip(apart.whole.inputs[count:], params, strict=True))
        env |= {
            x: pair[at]
            for x, at in zip(apart.whole.inputs[:count], ARGUMENTS[-count:], strict=True)
            if at in pair
        }
        env = run_eqns(needed_eqns(apart.whole.steps, names), env)
        return tuple(_stored(env[x]) for x in names)

    none = jnp.int32(0)
    of_head = jax.vmap(
        jax.vmap(lambda b, n: made(apart.before.of_heads, b, n, none, none), (None, 0)), (None, 0)
    )
    of_head = jax.vmap(of_head, (0, None))
    of_query = jax.vmap(
        jax.vmap(lambda b, i: made(apart.before.of_queries, b, none, i, none), (None, 0))
    )
    of_key = jax.vmap(
        jax.vmap(lambda b, j: made(apart.before.of_keys, b, none, none, j), (None, 0))
    )
    of_difference = jax.vmap(
        lambda b, n, x: made(apart.before.of_differences, b, n, x, none), (None, None, 0)
    )
    of_difference = jax.vmap(jax.vmap(of_difference, (None, 0, None)), (None, 0, None))
    of_difference = jax.vmap(of_difference, (0, None, None if offset is None else 0))
    differences = differences if offset is None else differences + each
    return Numbers(
        of_head(batch, head),
        of_query(batch, q_pos),
        of_key(batch, k_pos),
        of_difference(batch, head, differences),
    )


def diagonal_offset(S: int) -> int:
    """The index of 0 among the differences of rows and columns, which begin with the lowest that a tile has."""
    return _up(S) - 1


def _up(length: int) -> int:
    return -(-length // SIDE) * SIDE


def _stored(x: Array) -> Array:
    return x if x.dtype == jnp.float32 else x.astype(jnp.int32)


def tile_functions(
    problem: Problem, operands: Operands, slopes: Literal["score", "all"] | None = None
) -> Problem:
    """`problem` with its functions as kernels run them; with the score's derivative, by score alone or by params as well."""
    found, counts, none = {}, [0] * len(Numbers._fields), diagonal_offset(operands.key.shape[1])
    for name, (given, params) in _functions(problem, operands).items():
        apart = partition_function(name, given, params)
        assert apart.reason is None
        indices = Numbers(
            *(tuple(range(n, n + len(x))) for n, x in zip(counts, apart.before, strict=True))
        )
        counts = [n + len(x) for n, x in zip(counts, apart.before, strict=True)]
        if name == "score_fn" and slopes is not None:
            apart = apart if slopes == "all" else apart._replace(moving=())
            found[name] = TileFunction(apart, indices, none, slope_jaxpr(apart))
        else:
            found[name] = TileFunction(apart._replace(moving=()), indices, none)
    return dataclasses.replace(problem, **found)
