"""Compute with single known numbers in NumPy, because JAX would compile each operation."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn


def _divide(x: Any, y: Any) -> Any:
    if np.issubdtype(x.dtype, np.integer):
        return np.trunc(x / y) if y else None
    return x / y


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divide,
    "neg": operator.neg,
    "max": np.maximum,
    "min": np.minimum,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "exp": np.exp,
    "log": np.log,
    "pow": np.power,
    "abs": np.abs,
    "square": np.square,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "not": np.invert,
    "is_finite": np.isfinite,
    "select_n": lambda which, *cases: cases[int(which)],
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
    "stop_gradient": lambda x: x,
}


def compute(eqn: JaxprEqn, inputs: list[Any]) -> Any:
    """Return the result of an elementwise equation for NumPy scalars; None where it is unknown."""
    name = eqn.primitive.name
    aval: Any = eqn.outvars[0].aval
    with np.errstate(all="ignore"):
        if name == "integer_pow":
            result = inputs[0] ** inputs[0].dtype.type(eqn.params["y"])
        elif name in _FUNCTIONS:
            result = _FUNCTIONS[name](*inputs)
        else:
            return None
        return None if result is None else _cast(np.asarray(result)[()], aval.dtype)


def _cast(number: Any, dtype: Any) -> Any:
    """Return a number in another dtype, as XLA casts it. NumPy wraps floats beyond an integer."""
    if np.issubdtype(dtype, np.integer) and not np.issubdtype(number.dtype, np.integer):
        info = np.iinfo(dtype)
        if np.isnan(number):
            number = np.asarray(0)
        elif not info.min <= float(number) <= info.max:
            number = np.asarray(info.max if number > 0 else info.min)
    return number.astype(dtype)[()]


def as_numpy(x: Any) -> np.ndarray | None:
    """Return the values of a constant, or None where they are traced or elsewhere."""
    if isinstance(x, Tracer) or not getattr(x, "is_fully_addressable", True):
        return None
    dtype = getattr(x, "dtype", None)
    if dtype is not None and not isinstance(dtype, np.dtype):  # that of random keys
        return None
    return np.asarray(x)
