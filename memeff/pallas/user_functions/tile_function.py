"""Run the part of a user's function that a kernel computes on its tiles."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.pallas.user_functions.jaxpr import (
    NONLINEAR,
    Const,
    Eqn,
    FlatJaxpr,
    flatten_jaxpr,
    is_bool,
    read_tile,
    run_eqns,
    run_eqns_on_tiles,
)
from memeff.pallas.user_functions.partition import Numbers, PartitionedFunction
from memeff.user_functions import PairIndices


@dataclasses.dataclass(frozen=True, eq=False)
class TileFunction:
    """A `TracedFunction` as kernels call it: on tiles, from precomputed numbers."""

    partition: PartitionedFunction
    indices: Numbers  # of its numbers among those of all functions of the call
    diagonal_offset: int  # `calls.diagonal_offset(S)`
    slopes: FlatJaxpr | None = None  # value and derivatives; None: without derivatives

    @property
    def kernel_gradients(self) -> tuple[tuple[str, int], ...]:
        """Return (axis, index) of each differentiable number."""
        where = {}
        for axis in Numbers._fields:
            names = getattr(self.partition.names_by_axis, axis)
            indices = getattr(self.indices, axis)
            for x, index in zip(names, indices, strict=True):
                where[x] = (axis, index)
        return tuple(where[x] for x in self.partition.kernel_gradients)

    @property
    def is_nonlinear(self) -> bool:
        """Return True if the function has operations that a kernel could approximate."""
        has_nonlinear = _has_nonlinear(self.partition.tile_eqns, self.partition.jaxpr.types)
        if self.slopes is None:
            return has_nonlinear
        return has_nonlinear or _has_nonlinear(self.slopes.eqns, self.slopes.types)

    def __call__(self, score: Array | None, indices: PairIndices, floats, rest) -> Array:
        """Return the new score, or the mask if `score` is None.

        `rest` holds all precomputed numbers, and `floats` the differentiable ones as tiles.
        Positions in `indices` are tiles.
        """
        jaxpr = self.partition.jaxpr
        shape = indices.q_pos.shape
        env = {}
        for x, number in zip(self.partition.precomputed, rest, strict=True):
            env[x] = to_tile(number, jaxpr.types[x].dtype, shape)
        env |= dict(zip(self.partition.kernel_gradients, floats, strict=False))
        pair = [] if score is None else [score]
        pair += [indices.q_pos, indices.k_pos]
        env |= dict(zip(pair_inputs(jaxpr, score is not None), pair, strict=True))
        if self.slopes is None:
            return run_tile_eqns(self.partition, env, shape)
        return run_slope_jaxpr(self, env, shape)


def _has_nonlinear(eqns: tuple[Eqn, ...], types: dict[int, Any]) -> bool:
    """Return True if one of `eqns` is nonlinear, or a quotient of floats."""

    def is_quotient(eqn: Eqn) -> bool:
        dtype = types[eqn.outputs[0]].dtype
        return eqn.primitive.name == "div" and jnp.issubdtype(dtype, jnp.floating)

    return any(eqn.primitive.name in NONLINEAR or is_quotient(eqn) for eqn in eqns)


def run_tile_eqns(
    partition: PartitionedFunction, env: dict[int, Array], shape, *match_types: Callable
) -> Array:
    """Return the result of the equations of the tile."""
    env = run_eqns_on_tiles(partition.tile_eqns, env, shape, *match_types)
    (output,) = partition.jaxpr.outputs
    return read_tile(output, env, shape)


def pair_inputs(jaxpr: FlatJaxpr, scored: bool) -> tuple[int, ...]:
    """Return the names of score (if `scored`), q_pos and k_pos."""
    if scored:
        return (jaxpr.inputs[0], *jaxpr.inputs[3:5])
    return jaxpr.inputs[2:4]


def to_tile(x: Array, dtype, shape) -> Array:
    """Return a precomputed number, or a tile of them, as a tile of `dtype`."""
    if x.shape != shape:
        x = lax.broadcast(x, shape)
    if is_bool(dtype):  # stored as int32
        return lax.ne(x, lax.full(shape, 0, x.dtype))
    return lax.convert_element_type(x, dtype)


def known_inputs(partition: PartitionedFunction) -> tuple[int, ...]:
    """Return the names known before the tile's equations run, the differentiable ones first."""
    first = partition.jaxpr.inputs[0], *partition.kernel_gradients
    more = (*pair_inputs(partition.jaxpr, True), *partition.precomputed)
    return *first, *(x for x in more if x not in first)


def slope_jaxpr(partition: PartitionedFunction) -> FlatJaxpr:
    """Return the equations of a score's value and of its derivatives on tiles.

    The derivatives are by the score and by each differentiable number. They are taken of scalars,
    because Mosaic does not lower what JAX makes of tiles (sums of cotangents, `add_any`).
    """
    names = known_inputs(partition)
    count = 1 + len(partition.kernel_gradients)
    (output,) = partition.jaxpr.outputs

    def value_and_slopes(*values):
        def value(*differentiable):
            inputs = (*differentiable, *values[count:])
            env = dict(zip(names, inputs, strict=True))
            env = run_eqns(partition.tile_eqns, env)
            if isinstance(output, Const):
                return jnp.asarray(output.value, output.dtype)
            return env[output]

        y, pull = jax.vjp(value, *values[:count])
        return y, *pull(jnp.ones_like(y))

    types = partition.jaxpr.types
    like = [jax.ShapeDtypeStruct((), types[x].dtype) for x in names]
    return flatten_jaxpr(value_and_slopes, *like)


def run_slope_jaxpr(function: TileFunction, env: dict[int, Array], shape) -> Array:
    """Return the new score, with a jvp that uses the slopes."""
    slopes = function.slopes
    assert slopes is not None
    names = known_inputs(function.partition)
    count = 1 + len(function.partition.kernel_gradients)
    # These are no arguments of `value`, because Mosaic lowers no tangents of integers.
    rest = [env[x] for x in names[count:]]

    def value_and_slopes(differentiable):
        inputs = dict(zip(slopes.inputs, (*differentiable, *rest), strict=True))
        results = run_eqns_on_tiles(slopes.eqns, inputs, shape)
        return [read_tile(x, results, shape) for x in slopes.outputs]

    @jax.custom_jvp
    def value(*differentiable):
        return value_and_slopes(differentiable)[0]

    @value.defjvp
    def _(primals, tangents):
        y, *derivatives = value_and_slopes(primals)
        products = (lax.mul(x, dx) for x, dx in zip(derivatives, tangents, strict=True))
        return y, functools.reduce(lax.add, products)

    return value(*(env[x] for x in names[:count]))
