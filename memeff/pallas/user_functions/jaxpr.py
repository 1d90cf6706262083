"""Functions of scalars as lists of steps, and which steps Mosaic lowers on tiles. Hides jaxprs.

Nothing here knows of Mosaic itself: on tiles run the same primitives, bound to tiles in the place of scalars.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint"}

# What Mosaic lowers on tiles of these (jax 0.11 and 0.12: each was tried), or `_rewritten` puts
# otherwise.
NUMBERS = {"float32", "int32", "uint32"}
NARROW = {"bfloat16", "float16"}  # to round to and back
CHEAP = {
    "abs",
    "add",
    "add_any",
    "and",
    "broadcast_in_dim",
    "clamp",
    "convert_element_type",
    "copy",
    "eq",
    "ge",
    "gt",
    "le",
    "lt",
    "max",
    "min",
    "mul",
    "ne",
    "neg",
    "not",
    "one_minus_square",
    "or",
    "reduce_sum",
    "reshape",
    "reshard",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "square",
    "squeeze",
    "stop_gradient",
    "sub",
    "xor",
}
# that have a rough form, too
NONLINEAR = {"cos", "exp", "exp2", "log", "log2", "logistic", "rsqrt", "sin", "sqrt", "tanh"}
LOWERED = CHEAP | NONLINEAR | {"div", "integer_pow", "rem", "round", "sign"}


class Const(NamedTuple):
    """A number, or a closed-over array."""

    value: Any
    dtype: Any


class Eqn(NamedTuple):
    primitive: Any
    params: dict[str, Any]
    inputs: tuple[int | Const, ...]
    outputs: tuple[int, ...]

    def __call__(self, *values) -> list[Any]:
        found = self.primitive.bind(*values, **self.primitive.get_bind_params(self.params))
        return list(found) if self.primitive.multiple_results else [found]


class FlatJaxpr(NamedTuple):
    """Steps that make `outputs` of `inputs`, names of which `types` tells the types."""

    steps: tuple[Eqn, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Const, ...]
    types: dict[int, Any]


def flatten_jaxpr(f, *like) -> FlatJaxpr:
    """The steps of f, of scalars and arrays."""
    traced = jax.make_jaxpr(f)(*like)
    types: dict[int, Any] = {}
    steps: list[Eqn] = []

    def named(x) -> int:
        types[len(types)] = x.aval
        return len(types) - 1

    def inline(jaxpr: Any, consts, names) -> list[int | Const]:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, names, strict=True))
        env |= {
            x: Const(value, x.aval.dtype) for x, value in zip(jaxpr.constvars, consts, strict=True)
        }
        of = lambda x: _literal(x) if isinstance(x, core.Literal) else env[x]
        for eqn in jaxpr.eqns:
            inputs, inner = (
                [of(x) for x in eqn.invars],
                eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")),
            )
            if eqn.primitive.name in CALLS:
                closed = isinstance(inner, core.ClosedJaxpr)
                found = inline(
                    inner.jaxpr if closed else inner, inner.consts if closed else (), inputs
                )
            else:
                found = [named(x) for x in eqn.outvars]
                steps.append(Eqn(eqn.primitive, eqn.params, tuple(inputs), tuple(found)))
            env |= zip(eqn.outvars, found, strict=True)
        return [of(x) for x in jaxpr.outvars]

    inputs = [named(x) for x in traced.jaxpr.invars]
    outputs = inline(traced.jaxpr, traced.consts, inputs)
    return FlatJaxpr(tuple(steps), tuple(inputs), tuple(outputs), types)


def _literal(x: Any) -> Const:
    return Const(x.val, x.aval.dtype)


def needed_eqns(steps: Iterable[Eqn], wanted: Iterable[Any]) -> list[Eqn]:
    """Of these steps, in their order, those that `wanted` depends on."""
    wanted, found = set(wanted), []
    for step in reversed(list(steps)):
        if wanted & set(step.outputs):
            wanted |= {x for x in step.inputs if not isinstance(x, Const)}
            found.append(step)
    return found[::-1]


def run_eqns(steps: Iterable[Eqn], env: dict[int, Any]) -> dict[int, Any]:
    """The steps, of scalars."""
    env = dict(env)
    for step in steps:
        values = (x.value if isinstance(x, Const) else env[x] for x in step.inputs)
        env |= zip(step.outputs, step(*values), strict=True)
    return env


# ---- on tiles


def run_eqns_on_tiles(
    steps: Iterable[Eqn],
    env: dict[int, Array],
    shape: tuple[int, ...],
    alike: Callable = lambda values: values,
) -> dict[int, Array]:
    """The steps, of tiles. Numbers become tiles, too: a compiler tells that all of one are the same. `alike`: makes types
    agree.
    """
    env = dict(env)
    for step in steps:
        values = [
            as_tile(x.value, x.dtype, shape) if isinstance(x, Const) else env[x]
            for x in step.inputs
        ]
        values = alike(values)
        (env[step.outputs[0]],) = _rewritten(step, values) or step(*values)
    return env


def as_tile(x, dtype, shape) -> Array:
    return lax.full(shape, x, dtype) if np.ndim(x) == 0 else x


def _rewritten(step: Eqn, values: list[Array]) -> list[Array] | None:
    """What Mosaic has no rule for on tiles, by what it has; None: it has one."""
    x, *rest = values
    full = lambda value: lax.full(x.shape, value, x.dtype)
    match step.primitive.name:
        case "add_any":
            return [lax.add(x, *rest)]
        # of a scalar
        case (
            "broadcast_in_dim"
            | "copy"
            | "reduce_sum"
            | "reshape"
            | "reshard"
            | "squeeze"
            | "stop_gradient"
        ):
            return [x]
        case "not" if is_bool(x.dtype):
            return [lax.bitwise_xor(x, full(True))]
        case "convert_element_type" if is_bool(step.params["new_dtype"]):
            return [x if is_bool(x.dtype) else lax.ne(x, full(0))]
        case "convert_element_type":
            return [lax.convert_element_type(x, step.params["new_dtype"])]
        case "integer_pow":
            y = step.params["y"]
            power = full(1) if y == 0 else x if abs(y) == 1 else lax.integer_pow(x, abs(y))
            return [power if y >= 0 else lax.div(full(1), power)]
    return None


def is_bool(dtype) -> bool:
    return jnp.dtype(dtype) == jnp.dtype(bool)


def why_not_lowered(step: Eqn, types: dict[int, Any]) -> str | None:
    """What of this step Mosaic does not lower on tiles; None: it lowers it."""
    of = lambda x: x.dtype if isinstance(x, Const) else types[x].dtype
    dtypes = [jnp.dtype(of(x)).name for x in (*step.inputs, *step.outputs)]
    name = step.primitive.name
    scalars = all(
        np.ndim(x.value) == 0 if isinstance(x, Const) else types[x].shape == () for x in step.inputs
    )
    lowered = name in LOWERED and scalars and all(types[x].shape == () for x in step.outputs)
    lowered &= name != "select_n" or dtypes[0] == "bool"
    lowered &= name != "rem" or dtypes[0] != "float32"
    if not lowered:
        return f"`{name}`"
    known = NUMBERS | {"bool"} | (NARROW if name == "convert_element_type" else set())
    return next((f"`{name}` in {dtype}" for dtype in dtypes if dtype not in known), None)
