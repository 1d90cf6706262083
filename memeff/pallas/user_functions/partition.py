"""Partition a user's function of scalars into what XLA precomputes and what tiles compute.

The function's jaxpr, its calls inlined, is a list of equations. Each depends on some of score,
batch, head, q_pos and k_pos:
  (1) on batch and head at most: a number for each head, precomputed and read as a scalar
  (2) also on one of q_pos and k_pos: computed on the tile if that is cheap, else precomputed as a
      vector that is copied with its tokens
  (3) also on q_pos - k_pos alone: computed on the tile if possible, else precomputed for each head
      and each difference
  (4) on anything else: computed on the tile, if Mosaic lowers it; otherwise the kernels cannot run
This file does not import Mosaic. The kernel runs the same equations on tiles instead of scalars.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from memeff.pallas.user_functions.jaxpr import (
    CHEAP,
    NUMBERS,
    Const,
    Eqn,
    FlatJaxpr,
    flatten_jaxpr,
    why_not_lowered,
)
from memeff.user_functions import TracedFunction

ARGUMENTS = "score", "batch", "head", "q_pos", "k_pos"
POSITIONS = {"q_pos", "k_pos"}
COMPARES = {"eq", "ge", "gt", "le", "lt", "ne"}
LINEAR = frozenset(
    "add broadcast_in_dim convert_element_type copy neg reshape squeeze stop_gradient sub".split()
)
MOST_VECTORS = 16  # vectors that are copied with their tokens: each takes 1 KiB of shared memory
# vectors of differences: for each, a thread holds as many registers as for half a tile
MOST_DIFFERENCES = 4
SIDE = 128  # tokens; a multiple of the sides of all tiles
READS = {"dynamic_slice", "gather"}  # primitives that read an array at computed indices


class Numbers(NamedTuple):
    """Precomputed arrays of functions, float32 or int32, by the axis that they vary along.

    X runs over the differences of rows and columns; 0 is at `calls.diagonal_offset`.
    """

    head_numbers: tuple[Any, ...] = ()  # B K G
    query_numbers: tuple[Any, ...] = ()  # B T
    key_numbers: tuple[Any, ...] = ()  # B S
    difference_numbers: tuple[Any, ...] = ()  # B K G X


class PartitionedFunction(NamedTuple):
    """A function's jaxpr, its precomputed names, and the equations that remain for tiles."""

    jaxpr: FlatJaxpr
    names_by_axis: Numbers  # names of the precomputed numbers
    # Precomputed floats that depend on float params have gradients.
    kernel_gradients: tuple[int, ...]  # their cotangents are summed by the kernel for dq
    needs_extra_pass: tuple[int, ...]  # their cotangents are not summed by any kernel
    tile_eqns: tuple[Eqn, ...]
    reason: str | None  # why kernels cannot run the function; None if they can

    @property
    def precomputed(self) -> tuple[int, ...]:
        """Return the names of all precomputed numbers."""
        return sum(self.names_by_axis, ())


def partition_function(
    name: str, function: TracedFunction, params: tuple[Array, ...]
) -> PartitionedFunction:
    """Partition a function (`name`: score_fn or mask_fn); `params` are all its leaves in order.

    Only their types are read, so kernels can call this where no other array may be closed over.
    """
    like = [jax.ShapeDtypeStruct(x.shape, dtype_in_kernels(x)) for x in params]
    pair = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    arguments = ARGUMENTS[1:]
    if name == "score_fn":
        pair = [jax.ShapeDtypeStruct((), jnp.float32), *pair]
        arguments = ARGUMENTS

    def call(pair, leaves):
        return function.fn(*pair, jax.tree.unflatten(function.structure, leaves))

    jaxpr = flatten_jaxpr(call, pair, like)
    return _partition(name, jaxpr, dict(zip(jaxpr.inputs, arguments, strict=False)))


def dtype_in_kernels(x: Array) -> Any:
    """Return the dtype in which kernels compute with a param: float32 for floats."""
    return jnp.dtype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype


class _Facts(NamedTuple):
    """Properties of a name that decide where it is computed."""

    depends_on: frozenset[str]  # ARGUMENTS, or "difference" for q_pos - k_pos
    cheap: bool  # is it worth computing on each tile again?
    computable: bool  # can a tile compute it, or read it as a number of a head?
    differentiable: bool  # is it a float that depends on float params?
    constant: bool  # does it depend on nothing but literals, which a compiler folds?
    slopes: tuple[int, int] | None  # by q_pos and k_pos; None: unknown

    @property
    def precomputed(self) -> bool:
        """Return True if XLA has to compute the value before the kernel."""
        axis = _axis(self.depends_on)
        if self.computable and (self.constant or axis == "difference_numbers"):
            return False
        if axis == "head_numbers":
            return True
        if axis is None or self.cheap:
            return False
        return not ("head" in self.depends_on and self.computable)


def _axis(depends_on: frozenset[str]) -> str | None:
    """Return the field of `Numbers` for a value with these dependencies; None for pairs."""
    position = depends_on - {"batch", "head"}
    if not position:
        return "head_numbers"
    if len(position) > 1:
        return None
    axes = {"q_pos": "query_numbers", "k_pos": "key_numbers", "difference": "difference_numbers"}
    return axes.get(*position)


def _collect_facts(jaxpr: FlatJaxpr, arguments: dict[int, str]) -> dict[int, _Facts]:
    """Return the facts of each name, in the order of the equations."""

    def is_float(x):
        return jnp.issubdtype(jaxpr.types[x].dtype, jnp.floating)

    facts = {}
    for x in jaxpr.inputs:
        argument = arguments.get(x)
        facts[x] = _Facts(
            depends_on=frozenset([argument] if argument else []),
            cheap=argument is not None,
            computable=argument is not None,
            differentiable=argument is None and is_float(x),
            constant=False,
            slopes=(int(argument == "q_pos"), int(argument == "k_pos")),
        )
    for eqn in jaxpr.eqns:
        inputs = [facts[x] for x in eqn.input_names]
        depends_on = frozenset().union(*(x.depends_on for x in inputs))
        slopes = _position_slopes(eqn, jaxpr.types, facts)
        if slopes is not None and slopes[0] == -slopes[1] != 0:
            depends_on = depends_on - POSITIONS | {"difference"}
        per_head = _axis(depends_on) == "head_numbers"
        lowered = why_not_lowered(eqn, jaxpr.types) is None
        constant = all(x.constant for x in inputs)
        cheap = lowered and eqn.primitive.name in CHEAP and all(x.cheap for x in inputs)
        on_tile = lowered and all(x.computable or "head" not in x.depends_on for x in inputs)
        differentiable = any(x.differentiable for x in inputs)
        differentiable &= eqn.primitive.name != "stop_gradient"
        for x in eqn.outputs:
            facts[x] = _Facts(
                depends_on=depends_on,
                cheap=per_head or cheap,
                computable=per_head and not constant or on_tile,
                differentiable=differentiable and is_float(x),
                constant=constant,
                slopes=slopes,
            )
    return facts


def _position_slopes(eqn: Eqn, types, facts: dict[int, _Facts]) -> tuple[int, int] | None:
    """Return the slopes by q_pos and k_pos of a linear result, or of a comparison's difference.

    None: they are not known.
    """
    name = eqn.primitive.name
    if name not in LINEAR | COMPARES:
        return None
    for x in eqn.input_names:
        depends_on = facts[x].depends_on
        by_position = depends_on & POSITIONS
        if by_position and facts[x].slopes is None:
            return None
        if not by_position and _axis(depends_on) != "head_numbers":
            return None
    rounded = (*eqn.input_names, *(eqn.outputs if name in LINEAR else ()))
    if not {jnp.dtype(types[x].dtype).name for x in rounded} <= {"int32", "float32"}:
        return None
    signs = [1] * len(eqn.inputs)
    if name == "neg":
        signs = [-1]
    elif name in COMPARES | {"sub"}:
        signs = [1, -1]
    q_slope = 0
    k_slope = 0
    for sign, x in zip(signs, eqn.inputs, strict=True):
        slopes = None if isinstance(x, Const) else facts[x].slopes
        if slopes is not None:
            q_slope += sign * slopes[0]
            k_slope += sign * slopes[1]
    return q_slope, k_slope


def _partition(name: str, jaxpr: FlatJaxpr, arguments: dict[int, str]) -> PartitionedFunction:
    """Choose backwards from the outputs which equations run on tiles."""
    facts = _collect_facts(jaxpr, arguments)
    needed = {x for x in jaxpr.outputs if not isinstance(x, Const)}
    tile_eqns = []
    reason = None
    for eqn in reversed(jaxpr.eqns):
        precomputed = any(facts[x].precomputed for x in eqn.outputs)
        if precomputed or not needed & set(eqn.outputs):
            continue
        tile_eqns.append(eqn)
        needed |= set(eqn.input_names)
        unsupported = why_not_lowered(eqn, jaxpr.types)
        if unsupported is not None:
            scored = "score" in facts[eqn.outputs[0]].depends_on
            operand = "the score" if scored else "query and key positions together"
            cannot = f"cannot compute {unsupported} of {operand}"
            if eqn.primitive.name in READS:
                cannot = f"cannot read an array at {operand}"
            reason = f"the GPU kernels {cannot} ({name})"
    by_axis: dict[str, list[int]] = {axis: [] for axis in Numbers._fields}
    for x in sorted(x for x in needed if facts[x].precomputed):
        depends_on = facts[x].depends_on
        axis = _axis(depends_on)
        assert axis is not None  # values of pairs are never precomputed
        by_axis[axis].append(x)
        reason = reason or _why_not_precomputed(name, axis, jaxpr.types[x], "head" in depends_on)
    names_by_axis = Numbers(*map(tuple, by_axis.values()))

    def differentiable(names):
        return tuple(x for x in names if name == "score_fn" and facts[x].differentiable)

    return PartitionedFunction(
        jaxpr=jaxpr,
        names_by_axis=names_by_axis,
        kernel_gradients=differentiable(names_by_axis.head_numbers + names_by_axis.query_numbers),
        needs_extra_pass=differentiable(
            names_by_axis.key_numbers + names_by_axis.difference_numbers
        ),
        tile_eqns=tuple(reversed(tile_eqns)),
        reason=reason,
    )


def _why_not_precomputed(name: str, axis: str, like, per_head: bool) -> str | None:
    """Return why kernels cannot read a value such as `like` for each index of an axis, or None."""
    if like.shape != ():
        return (
            f"the GPU kernels read numbers, but {name} makes arrays of shape {like.shape} "
            "for each pair"
        )
    if jnp.dtype(like.dtype).name not in NUMBERS | {"bool"}:
        return (
            f"the GPU kernels compute functions in float32 and int32, but {name} uses {like.dtype}"
        )
    token = {"query_numbers": "query", "key_numbers": "key"}.get(axis)
    if token and per_head:
        return (
            f"the GPU kernels read numbers of {name} for each {token}, "
            f"and not for each {token} and head"
        )
    return None
