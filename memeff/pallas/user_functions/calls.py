"""Evaluate the precomputed numbers of a call's functions, and bind the functions to tiles."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from memeff.logits import approximates_cap
from memeff.masking import query_positions
from memeff.pallas.user_functions.jaxpr import needed_eqns, run_eqns, why_not_lowered
from memeff.pallas.user_functions.partition import (
    MOST_DIFFERENCES,
    MOST_VECTORS,
    SIDE,
    Numbers,
    PartitionedFunction,
    dtype_in_kernels,
    partition_function,
)
from memeff.pallas.user_functions.tile_function import TileFunction, slope_jaxpr
from memeff.problem import Operands, Problem, split_axis
from memeff.shape import round_up
from memeff.user_functions import TracedFunction, merge_leaves


def why_not(problem: Problem, operands: Operands) -> str | None:
    """Return why kernels cannot run the functions of this call; None if they can."""
    vectors = 0
    differences = 0
    for name, partition in _partitioned(problem, operands).items():
        if partition.reason is not None:
            return partition.reason
        names = partition.names_by_axis
        vectors += len(names.query_numbers) + len(names.key_numbers)
        differences += len(names.difference_numbers)
        if name != "score_fn":
            continue
        slopes = slope_jaxpr(partition)
        for eqn in slopes.eqns:
            unsupported = why_not_lowered(eqn, slopes.types)
            if unsupported is not None:
                return (
                    f"the GPU kernels cannot compute {unsupported}, "
                    "which the gradient of score_fn needs"
                )
    if vectors > MOST_VECTORS:
        return (
            f"the GPU kernels support {MOST_VECTORS} numbers for each token, "
            f"and these functions need {vectors}"
        )
    if differences > MOST_DIFFERENCES:
        return (
            f"the GPU kernels support {MOST_DIFFERENCES} numbers for each difference of "
            f"positions, and these functions need {differences}"
        )
    return None


def count_numbers(problem: Problem, operands: Operands) -> tuple[tuple[int, int], int, int]:
    """Count the precomputed numbers of a call's functions.

    Returns: ((numbers for each query, numbers for each key), numbers for each head and difference,
    sums of cotangents that the kernel for dq returns).
    """
    queries = keys = differences = sums = 0
    for partition in _partitioned(problem, operands).values():
        names = partition.names_by_axis
        queries += len(names.query_numbers)
        keys += len(names.key_numbers)
        differences += len(names.difference_numbers)
        sums += len(partition.kernel_gradients)
    return (queries, keys), differences, sums


def needs_extra_pass(problem: Problem, operands: Operands) -> bool:
    """Return True if score_fn has differentiable numbers whose cotangents no kernel sums."""
    partition = _partitioned(problem, operands).get("score_fn")
    return partition is not None and bool(partition.needs_extra_pass)


def _functions(
    problem: Problem, operands: Operands
) -> dict[str, tuple[TracedFunction, tuple[Array, ...]]]:
    """Return {name: (function, leaves of its params)}."""
    functions = {}
    score_fn = problem.score_fn
    if score_fn is not None:
        floats = operands.logit_params.score
        leaves = merge_leaves(score_fn.is_float, floats, operands.score_nonfloat_params)
        functions["score_fn"] = score_fn, tuple(leaves)
    mask_fn = problem.mask_fn
    if mask_fn is not None:
        count = sum(mask_fn.is_float)
        floats = operands.mask_params[:count]
        leaves = merge_leaves(mask_fn.is_float, floats, operands.mask_params[count:])
        functions["mask_fn"] = mask_fn, tuple(leaves)
    return functions


def _partitioned(problem: Problem, operands: Operands) -> dict[str, PartitionedFunction]:
    """Return the call's functions partitioned, by name."""
    partitions = {}
    for name, (function, params) in _functions(problem, operands).items():
        partitions[name] = partition_function(name, function, params)
    return partitions


def precomputed_numbers(problem: Problem, operands: Operands) -> Numbers:
    """Evaluate the precomputed numbers of all functions, those of score_fn first."""
    total = Numbers()
    for name, (function, params) in _functions(problem, operands).items():
        partition = partition_function(name, function, params)
        numbers = _evaluate_numbers(partition, params, problem, operands)
        total = Numbers(*(old + new for old, new in zip(total, numbers, strict=True)))
    return total


def score_numbers(
    problem: Problem, operands: Operands
) -> tuple[PartitionedFunction, dict[int, Array]]:
    """Return score_fn partitioned, and its precomputed numbers by name."""
    function, params = _functions(problem, operands)["score_fn"]
    partition = partition_function("score_fn", function, params)
    numbers = sum(_evaluate_numbers(partition, params, problem, operands), ())
    return partition, dict(zip(partition.precomputed, numbers, strict=True))


def differentiable_numbers(problem: Problem, operands: Operands) -> tuple[Array, ...]:
    """Return score_fn's numbers in `kernel_gradients`, then those in `needs_extra_pass`."""
    partition, numbers = score_numbers(problem, operands)
    names = (*partition.kernel_gradients, *partition.needs_extra_pass)
    return tuple(numbers[x] for x in names)


def _evaluate_numbers(
    partition: PartitionedFunction, params, problem: Problem, operands: Operands
) -> Numbers:
    """Run the equations of the precomputed numbers for each head, query, key and difference."""
    (B,), T, S, N, K, _, _ = operands.shape
    positions = jnp.arange(max(B, N, T, S), dtype=jnp.int32)
    batch = positions[:B]
    head = split_axis(positions[:N], 0, K)
    each_batch = jnp.zeros((B, 1), jnp.int32)
    offset = None if operands.q_offset is None else operands.q_offset[:, None]
    q_pos = query_positions(problem, offset, positions[None, :T]) + each_batch  # B T
    k_pos = positions[None, :S] + each_batch  # B S
    difference_count = round_up(T, SIDE) + round_up(S, SIDE)
    differences = jnp.arange(difference_count, dtype=jnp.int32) - diagonal_offset(S)
    differences = query_positions(problem, offset, differences)  # X, or B|1 X

    jaxpr = partition.jaxpr
    first_param = len(jaxpr.inputs) - len(params)
    index_inputs = jaxpr.inputs[first_param - 4 : first_param]  # batch, head, q_pos, k_pos
    params = [x.astype(dtype_in_kernels(x)) for x in params]
    known: dict[int, Any] = dict(zip(jaxpr.inputs[first_param:], params, strict=True))
    names = partition.names_by_axis
    unused = jnp.int32(0)

    def compute(names, *indices):
        env = dict(known)
        env |= zip(index_inputs, indices, strict=True)
        env = run_eqns(needed_eqns(jaxpr.eqns, names), env)
        numbers = (env[x] for x in names)  # in the dtypes that kernels read
        return tuple(x if x.dtype == jnp.float32 else x.astype(jnp.int32) for x in numbers)

    def of_head(b, n):
        return compute(names.head_numbers, b, n, unused, unused)

    def of_query(b, i):
        return compute(names.query_numbers, b, unused, i, unused)

    def of_key(b, j):
        return compute(names.key_numbers, b, unused, unused, j)

    def of_difference(b, n, x):
        # k_pos is 0, so q_pos is the difference
        return compute(names.difference_numbers, b, n, x, unused)

    head_numbers = jax.vmap(of_head, (None, 0))
    head_numbers = jax.vmap(head_numbers, (None, 0))
    head_numbers = jax.vmap(head_numbers, (0, None))
    query_numbers = jax.vmap(jax.vmap(of_query, (None, 0)))
    key_numbers = jax.vmap(jax.vmap(of_key, (None, 0)))
    difference_numbers = jax.vmap(of_difference, (None, None, 0))
    difference_numbers = jax.vmap(difference_numbers, (None, 0, None))
    difference_numbers = jax.vmap(difference_numbers, (None, 0, None))
    difference_axis = None if offset is None else 0
    difference_numbers = jax.vmap(difference_numbers, (0, None, difference_axis))
    if offset is not None:
        differences = differences + each_batch  # B X
    return Numbers(
        head_numbers(batch, head),
        query_numbers(batch, q_pos),
        key_numbers(batch, k_pos),
        difference_numbers(batch, head, differences),
    )


def diagonal_offset(S: int) -> int:
    """Return the index of 0 among the differences of rows and columns.

    The differences begin with the lowest in any tile.
    """
    return round_up(S, SIDE) - 1


def tile_functions(
    problem: Problem, operands: Operands, slopes: Literal["score", "all"] | None = None
) -> Problem:
    """Return `problem` with its functions and its soft cap as kernels run them.

    `slopes` adds score_fn's derivatives: by the score alone, or also by differentiable numbers.
    """
    functions = {}
    starts = [0] * len(Numbers._fields)
    for name, partition in _partitioned(problem, operands).items():
        assert partition.reason is None
        ends = []
        for start, names in zip(starts, partition.names_by_axis, strict=True):
            ends.append(start + len(names))
        ranges = map(range, starts, ends)
        indices = Numbers(*map(tuple, ranges))
        starts = ends
        if slopes != "all":
            partition = partition._replace(kernel_gradients=())
        with_slopes = name == "score_fn" and slopes is not None
        functions[name] = TileFunction(
            partition,
            indices,
            diagonal_offset(operands.key.shape[1]),
            slope_jaxpr(partition) if with_slopes else None,
        )
    approximates = approximates_cap(problem, operands)
    return dataclasses.replace(problem, approximates_cap=approximates, **functions)
