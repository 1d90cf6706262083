"""Flatten functions of scalars to lists of jaxpr equations, and run the equations on tiles.

This file does not import Mosaic: on tiles it binds the same primitives, to tiles instead of
scalars, and rewrites the few that Mosaic does not lower.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core

CALLS = {"jit", "closed_call", "remat2"}  # remat2 is jax.checkpoint

# Dtypes and primitives that Mosaic lowers on tiles (each was tried with jax 0.11 and 0.12), or that
# `_rewrite` expresses by others.
NUMBERS = {"float32", "int32", "uint32"}
NARROW = {"bfloat16", "float16"}  # a score_fn may round to these and back
# They change no tile, because each entry of a tile stands for a scalar.
UNCHANGED = frozenset(
    "broadcast_in_dim copy reduce_sum reshape reshard squeeze stop_gradient".split()
)
CHEAP = UNCHANGED | frozenset(
    "abs add add_any and clamp convert_element_type eq ge gt le lt max min mul ne neg not "
    "one_minus_square or select_n shift_left shift_right_arithmetic shift_right_logical square sub "
    "xor".split()
)
# primitives that also have an approximate form on GPUs
NONLINEAR = {"cos", "exp", "exp2", "log", "log2", "logistic", "rsqrt", "sin", "sqrt", "tanh"}
LOWERED = CHEAP | NONLINEAR | {"div", "integer_pow", "rem", "round", "sign"}


class Const(NamedTuple):
    """A constant operand of an equation: a number or a closed-over array."""

    value: Any
    dtype: Any


class Eqn(NamedTuple):
    """A jaxpr equation whose variables are named by numbers."""

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[int | Const, ...]
    outputs: tuple[int, ...]

    def __call__(self, *values) -> list[Any]:
        """Bind the primitive to `values` and return its results."""
        results = self.primitive.bind(*values, **self.primitive.get_bind_params(self.params))
        return list(results) if self.primitive.multiple_results else [results]

    @property
    def input_names(self) -> list[int]:
        """Return the names of the inputs that are no constants."""
        return [x for x in self.inputs if not isinstance(x, Const)]


class FlatJaxpr(NamedTuple):
    """Equations that compute `outputs` from `inputs`; `types` gives the aval of each name."""

    eqns: tuple[Eqn, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | Const, ...]
    types: dict[int, Any]


def flatten_jaxpr(f, *like) -> FlatJaxpr:
    """Trace f with arguments such as `like`, and inline the calls in its jaxpr."""
    traced = jax.make_jaxpr(f)(*like)
    types: dict[int, Any] = {}
    eqns: list[Eqn] = []

    def new_name(x) -> int:
        types[len(types)] = x.aval
        return len(types) - 1

    def inline(jaxpr: Any, consts, arguments) -> list[int | Const]:
        env: dict[Any, Any] = dict(zip(jaxpr.invars, arguments, strict=True))
        for x, value in zip(jaxpr.constvars, consts, strict=True):
            env[x] = Const(value, x.aval.dtype)

        def read(x) -> int | Const:
            return _literal(x) if isinstance(x, core.Literal) else env[x]

        for eqn in jaxpr.eqns:
            inputs = [read(x) for x in eqn.invars]
            if eqn.primitive.name in CALLS:
                inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
                if isinstance(inner, core.ClosedJaxpr):
                    results = inline(inner.jaxpr, inner.consts, inputs)
                else:
                    results = inline(inner, (), inputs)
            else:
                results = [new_name(x) for x in eqn.outvars]
                eqns.append(Eqn(eqn.primitive, eqn.params, tuple(inputs), tuple(results)))
            env |= zip(eqn.outvars, results, strict=True)
        return [read(x) for x in jaxpr.outvars]

    inputs = [new_name(x) for x in traced.jaxpr.invars]
    outputs = inline(traced.jaxpr, traced.consts, inputs)
    return FlatJaxpr(tuple(eqns), tuple(inputs), tuple(outputs), types)


def _literal(x: Any) -> Const:
    """Return the constant of a literal in a jaxpr."""
    return Const(x.val, x.aval.dtype)


def needed_eqns(eqns: Iterable[Eqn], outputs: Iterable[int]) -> list[Eqn]:
    """Return the equations on which `outputs` depend, in their order."""
    needed = set(outputs)
    kept = []
    for eqn in reversed(list(eqns)):
        if needed & set(eqn.outputs):
            needed |= set(eqn.input_names)
            kept.append(eqn)
    return kept[::-1]


def run_eqns(eqns: Iterable[Eqn], env: dict[int, Any]) -> dict[int, Any]:
    """Run the equations on scalars: return `env` with the values of their outputs."""
    env = dict(env)
    for eqn in eqns:
        values = (x.value if isinstance(x, Const) else env[x] for x in eqn.inputs)
        env |= zip(eqn.outputs, eqn(*values), strict=True)
    return env


# ---- on tiles


def _unchanged(values: list[Array]) -> list[Array]:
    return values


def run_eqns_on_tiles(
    eqns: Iterable[Eqn],
    env: dict[int, Array],
    shape: tuple[int, ...],
    match_types: Callable[[list[Array]], list[Array]] = _unchanged,
) -> dict[int, Array]:
    """Run the equations on tiles: return `env` with the tiles of their outputs.

    Constants become tiles too, because a compiler knows that their entries are equal.
    `match_types` makes the types of an equation's inputs agree.
    """
    env = dict(env)
    for eqn in eqns:
        values = match_types([read_tile(x, env, shape) for x in eqn.inputs])
        (env[eqn.outputs[0]],) = _rewrite(eqn, values) or eqn(*values)
    return env


def read_tile(x: int | Const, env: dict[int, Array], shape: tuple[int, ...]) -> Array:
    """Return the tile of a name or a constant."""
    if not isinstance(x, Const):
        return env[x]
    return lax.full(shape, x.value, x.dtype) if np.ndim(x.value) == 0 else x.value


def _rewrite(eqn: Eqn, values: list[Array]) -> list[Array] | None:
    """Return the result of an equation that Mosaic cannot lower as it is; None if it can."""
    x, *rest = values

    def full(value):
        return lax.full(x.shape, value, x.dtype)

    match eqn.primitive.name:
        case "add_any":
            return [lax.add(x, *rest)]
        case name if name in UNCHANGED:
            return [x]
        case "not" if is_bool(x.dtype):
            return [lax.bitwise_xor(x, full(True))]
        case "convert_element_type" if is_bool(eqn.params["new_dtype"]):
            return [x if is_bool(x.dtype) else lax.ne(x, full(0))]
        case "convert_element_type":
            return [lax.convert_element_type(x, eqn.params["new_dtype"])]
        case "integer_pow":
            y = eqn.params["y"]
            if y == 0:
                return [full(1)]
            power = x if abs(y) == 1 else lax.integer_pow(x, abs(y))
            return [power if y > 0 else lax.div(full(1), power)]
    return None


def is_bool(dtype) -> bool:
    """Return True if `dtype` is bool."""
    return jnp.dtype(dtype) == jnp.dtype(bool)


def why_not_lowered(eqn: Eqn, types: dict[int, Any]) -> str | None:
    """Return which part of an equation Mosaic does not lower on tiles; None if it lowers it."""
    name = eqn.primitive.name
    names = (*eqn.input_names, *eqn.outputs)
    scalars = all(np.ndim(x.value) == 0 for x in eqn.inputs if isinstance(x, Const))
    scalars &= all(types[x].shape == () for x in names)
    dtypes = [
        jnp.dtype(x.dtype if isinstance(x, Const) else types[x].dtype).name
        for x in (*eqn.inputs, *eqn.outputs)
    ]
    lowered = name in LOWERED and scalars
    lowered &= name != "select_n" or dtypes[0] == "bool"
    lowered &= name != "rem" or dtypes[0] != "float32"
    if not lowered:
        return f"`{name}`"
    known = NUMBERS | {"bool"} | (NARROW if name == "convert_element_type" else set())
    for dtype in dtypes:
        if dtype not in known:
            return f"`{name}` in {dtype}"
    return None
