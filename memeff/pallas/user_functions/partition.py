"""Split a user's function of scalars: what XLA computes before a kernel, and what the kernel computes on its tiles.

The function's jaxpr, its calls inlined, is a list of steps. Each depends on some of score, batch, head, q_pos and k_pos:
  on batch and head at most: a number for each head, made before and read as a scalar
  besides on one of q_pos and k_pos: made on the tile if that is cheap, else before, as a vector that travels with its tokens
  besides on q_pos - k_pos alone: made on the tile if it can be, else before, for each head and each difference there is
  on others: made on the tile, if it is element-wise and Mosaic lowers it; nothing else can be
Nothing here knows of Mosaic. What the kernel computes is the same steps, bound to tiles in the place of scalars.
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
COMPARES = {"eq", "ge", "gt", "le", "lt", "ne"}
LINEAR = {
    "add",
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "neg",
    "reshape",
    "squeeze",
    "stop_gradient",
    "sub",
}
MOST_VECTORS = 16  # numbers for tokens that travel with tiles: each takes 1 KiB of shared memory
# numbers for differences: of each a thread holds as many registers as half a tile
MOST_DIFFERENCES = 4
SIDE = 128  # tokens; all tiles' sides divide it
READS = {"dynamic_slice", "gather"}  # a number of an array


class Numbers(NamedTuple):
    """What is made before: for each head B K G, for each query B T, for each key B S, for each head and difference of rows
    and columns B K G X (see `behind`); in float32 and int32.
    """

    of_heads: tuple[Any, ...] = ()
    of_queries: tuple[Any, ...] = ()
    of_keys: tuple[Any, ...] = ()
    of_differences: tuple[Any, ...] = ()


class PartitionedFunction(NamedTuple):
    """A function taken apart."""

    whole: FlatJaxpr
    before: Numbers  # names
    # names of those that are floats and made of params that are: they have gradients,
    moving: tuple[int, ...]
    # of which the kernel for dq sums the cotangents, and of which it does not
    walked: tuple[int, ...]
    steps: tuple[Eqn, ...]  # of the tile
    reason: str | None  # why it cannot be; None: it can


def partition_function(
    name: str, given: TracedFunction, params: tuple[Array, ...]
) -> PartitionedFunction:
    """Of a function (`name`: score_fn or mask_fn) and all its params, floats in float32."""
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in params]
    of_pair = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    arguments = ARGUMENTS if name == "score_fn" else ARGUMENTS[1:]
    score = [jax.ShapeDtypeStruct((), jnp.float32)] if name == "score_fn" else []

    def of_leaves(pair, leaves):
        return given.fn(*pair, jax.tree.unflatten(given.structure, leaves))

    whole = flatten_jaxpr(of_leaves, [*score, *of_pair], like)
    return _partition(name, whole, dict(zip(whole.inputs, arguments, strict=False)))


class _Facts(NamedTuple):
    """Of each name."""

    of: dict[int, frozenset[str]]  # on what it depends
    cheap: dict[int, bool]  # can it be made on a tile with no thought?
    can: dict[int, bool]  # or at all, of what is made before?
    moves: dict[int, bool]  # is it a float, made of params that are?
    # is it made of numbers in the function's text alone? A compiler knows those.
    fixed: dict[int, bool]

    def before(self, x: int) -> bool:
        """Has it to be made before?"""
        side = _side(self.of[x])
        if self.can[x] and (self.fixed[x] or side == "of_differences"):
            return False
        return (
            side == "of_heads"
            or side is not None
            and not self.cheap[x]
            and not ("head" in self.of[x] and self.can[x])
        )


def _facts(whole: FlatJaxpr, arguments: dict[int, str]) -> _Facts:
    is_float = lambda x: jnp.issubdtype(whole.types[x].dtype, jnp.floating)
    of = {x: frozenset([arguments[x]] if x in arguments else []) for x in whole.inputs}
    cheap = {x: x in arguments for x in whole.inputs}
    can, moves = dict(cheap), {x: x not in arguments and is_float(x) for x in whole.inputs}
    fixed = dict.fromkeys(whole.inputs, False)
    slopes = {
        x: (int(arguments.get(x) == "q_pos"), int(arguments.get(x) == "k_pos"))
        for x in whole.inputs
    }
    for step in whole.steps:
        inputs = _names(step)
        depends = frozenset().union(*(of[x] for x in inputs))
        for x in step.outputs:
            if (found := _linear(step, whole.types, of, slopes)) is not None:
                slopes[x] = found
                if found[0] == -found[1] != 0:
                    depends = depends - {"q_pos", "k_pos"} | {"difference"}
        lowers, first = why_not_lowered(step, whole.types) is None, _side(depends) == "of_heads"
        moving = step.primitive.name != "stop_gradient" and any(moves[x] for x in inputs)
        for x in step.outputs:
            of[x], fixed[x] = depends, all(fixed[y] for y in inputs)
            cheap[x] = (
                first or lowers and step.primitive.name in CHEAP and all(cheap[y] for y in inputs)
            )
            can[x] = (
                first
                and not fixed[x]
                or lowers
                and all(can[y] or "head" not in of[y] for y in inputs)
            )
            moves[x] = moving and is_float(x)
    return _Facts(of, cheap, can, moves, fixed)


def _linear(step: Eqn, types, of, slopes: dict[int, tuple[int, int]]) -> tuple[int, int] | None:
    """How many times q_pos and k_pos the step's result is, or what it compares with 0, but for what depends on neither.

    None: not known.
    """
    names, name = _names(step), step.primitive.name
    known = all(
        x in slopes if of[x] & {"q_pos", "k_pos"} else _side(of[x]) == "of_heads" for x in names
    )
    dtypes = {
        jnp.dtype(types[x].dtype).name for x in (*names, *(step.outputs if name in LINEAR else ()))
    }
    exact = dtypes <= {"int32", "float32"}
    if name not in LINEAR | COMPARES or not (known and exact):
        return None
    parts = [(0, 0) if isinstance(x, Const) else slopes.get(x, (0, 0)) for x in step.inputs]
    signs = (-1,) if name == "neg" else (1, -1) if name in COMPARES | {"sub"} else (1,) * len(parts)
    q, k = (sum(sign * part[n] for sign, part in zip(signs, parts, strict=True)) for n in range(2))
    return q, k


def _names(step: Eqn) -> list[int]:
    return [x for x in step.inputs if not isinstance(x, Const)]


def _partition(name: str, whole: FlatJaxpr, arguments: dict[int, str]) -> PartitionedFunction:
    facts = _facts(whole, arguments)
    wanted, tile, reason = {x for x in whole.outputs if not isinstance(x, Const)}, [], None
    for step in reversed(whole.steps):
        if wanted & set(step.outputs) and not any(map(facts.before, step.outputs)):
            tile.append(step)
            wanted |= set(_names(step))
            if (cannot := why_not_lowered(step, whole.types)) is not None:
                what = (
                    "the score"
                    if "score" in facts.of[step.outputs[0]]
                    else "query and key positions together"
                )
                reads = step.primitive.name in READS
                reason = (
                    f"read no array at {what}" if reads else f"cannot compute {cannot} of {what}"
                )
                reason = f"its kernels {reason} ({name})"
    made: dict[str, list[int]] = {side: [] for side in Numbers._fields}
    for x in sorted(filter(facts.before, wanted)):
        side = _side(facts.of[x]) or ""
        made[side].append(x)
        reason = reason or _cannot_travel(name, side, whole.types[x], "head" in facts.of[x])
    numbers = Numbers(*map(tuple, made.values()))
    moves = lambda parts: tuple(x for x in sum(parts, ()) if name == "score_fn" and facts.moves[x])
    return PartitionedFunction(
        whole, numbers, moves(numbers[:2]), moves(numbers[2:]), tuple(reversed(tile)), reason
    )


def _side(depends: frozenset[str]) -> str | None:
    """Of what there is a number for each; None: of pairs."""
    by = depends - {"batch", "head"}
    sides = {"q_pos": "of_queries", "k_pos": "of_keys", "difference": "of_differences"}
    return "of_heads" if not by else sides.get(next(iter(by))) if len(by) == 1 else None


def _cannot_travel(name: str, side: str, like, of_head: bool) -> str | None:
    tokens = {"of_queries": "query", "of_keys": "key"}.get(side)
    if like.shape != ():
        return f"its kernels read numbers, and {name} makes arrays of shape {like.shape} for a pair"
    if jnp.dtype(like.dtype).name not in NUMBERS | {"bool"}:
        return f"its kernels compute functions in float32 and int32, and {name} has {like.dtype}"
    if tokens and of_head:
        return f"its kernels read numbers of {name} for each {tokens}, and not for each {tokens} and head"
    return None
