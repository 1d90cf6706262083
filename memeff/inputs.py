"""Check one argument: an array, a number, a size, a flag, a name or a dtype.

Name the kind of what came.
"""

import math
import numbers
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

INT32_MAX = 2**31 - 1


def check_bool(name: str, flag) -> None:
    """Refuse a flag that is not True or False."""
    if not isinstance(flag, bool | np.bool_):
        raise TypeError(
            f"{name} must be True or False (it is fixed while tracing), got {kind_of(flag)}."
        )


def check_choice(name: str, x: Any, choices: Iterable[str], *, optional: bool = False) -> None:
    """Refuse what is none of the names `choices`; with `optional`, None is allowed too."""
    if (optional and x is None) or (isinstance(x, str) and x in choices):
        return
    names = ("None or " if optional else "") + "one of " + ", ".join(map(repr, choices))
    raise ValueError(f"{name}={text_of(x)} is not known: use {names}.")


def check_int(name: str, x: Any, note: str = "") -> int:
    """Return x as Python's int. In an error `note` follows the words "an int"."""
    if isinstance(x, bool) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{name} must be an int{note}, got {kind_of(x)}.")
    return operator.index(x)


def check_size(name: str, size: Any, least: int = 1) -> int:
    """Return a size as an int of at least `least`."""
    size = check_int(name, size)
    if size < least:
        raise ValueError(f"{name}={text_of(size)}: it must be at least {least}.")
    if size > INT32_MAX:
        raise ValueError(f"{name}={text_of(size)}: it must fit in 32 bits.")
    return size


def check_sides(
    name: str, x: Any, pair: str, unit: str, *, least: int, cure: str, optional: bool = False
) -> tuple[Any, Any]:
    """Return both sides of a pair of ints; one int stands for both.

    With `optional`, a side may be None. In errors `pair` and `unit` say what the sides are, and
    `cure` what to do about one that is less than `least`.
    """
    sides = tuple(x) if isinstance(x, tuple | list) else (x, x)
    given = f"{name}={text_of(x)}"
    if len(sides) != 2:
        raise ValueError(f"{given}: give {pair}, or one int for both sides.")
    for side in sides:
        if optional and side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, numbers.Integral):
            raise TypeError(
                f"{given}: sides are ints ({unit}){' or None' * optional}, got {kind_of(side)}. "
                f"Pass {pair}, or one int for both sides."
            )
        if side < least:
            raise ValueError(f"{given}: sides count {unit} and must be >= {least}; {cure}.")
    return sides


def refuse_symbolic(what: str, **sizes: Any) -> None:
    """Raise an error that names `what` if jax.export leaves one of the sizes symbolic."""
    if all(isinstance(size, int) for size in sizes.values()):
        return
    text = ", ".join(f"{name}={size}" for name, size in sizes.items())
    raise NotImplementedError(
        f"{what} does not support sizes that jax.export leaves symbolic ({text}). Use sizes that "
        "are numbers."
    )


def check_number(name: str, x: Any, end: float = math.inf) -> float:
    """Return x as a float if it is a number from 0 to below `end`."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real) or hasattr(x, "aval"):
        raise TypeError(f"{name} must be a number (it is fixed while tracing), got {kind_of(x)}.")
    number = to_float(name, x)
    if not 0 <= number < end:
        raise ValueError(f"{name}={number:g}: it must lie in [0, {end:g}).")
    return number


def to_float(name: str, x: Any) -> float:
    """Return a number as a float; refuse an int that is too large for one."""
    try:
        return float(x)
    except OverflowError as e:
        raise ValueError(f"{name} is an int beyond the largest float: make it smaller.") from e


def check_dtype(dtype: Any) -> Any:
    """Return the argument `dtype` as a dtype."""
    is_array = isinstance(dtype, jax.Array | np.ndarray | np.generic)
    try:
        if dtype is not None and not is_array:  # NumPy's None is float64
            return jnp.dtype(dtype)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"dtype must be a dtype such as jnp.float32, got {kind_of(dtype)}.")


def to_array(name: str, x) -> Array:
    """Return `x` as an array; `name` names it in an error.

    Integers that do not fit are refused, because JAX wraps those of NumPy silently.
    """
    if isinstance(x, jax.Array):
        return x
    if x is None or isinstance(x, str | dict | set) or callable(x):
        raise TypeError(f"{name} must be an array, got {kind_of(x)}.")
    try:
        array = jnp.asarray(x)
    except OverflowError as e:
        raise ValueError(_does_not_fit(name, jax.dtypes.canonicalize_dtype(np.int64))) from e
    except (TypeError, ValueError) as e:
        raise TypeError(_not_an_array(name, x)) from e
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "iu" and x.size:
        limits = np.iinfo(array.dtype)
        if int(x.min()) < limits.min or int(x.max()) > limits.max:
            raise ValueError(_does_not_fit(name, array.dtype))
    return array


def unwrapped(x: Any) -> Any:
    """Return the array inside an object that JAX, but not NumPy, takes for an array."""
    to_jax = getattr(x, "__jax_array__", None)  # traced arrays have None
    return x if to_jax is None else to_jax()


def check_numpy(name: str, x: np.ndarray) -> None:
    """Refuse what `to_array` refuses, without a copy of the floats."""
    is_integer = np.issubdtype(x.dtype, np.integer)
    to_array(name, x if is_integer else x[(slice(1),) * x.ndim])


def _not_an_array(name: str, x: Any) -> str:
    if isinstance(x, np.ma.MaskedArray):
        return (
            f"{name} is a masked array, which JAX does not support. Pass what its `filled` gives."
        )
    if isinstance(x, np.ndarray):
        return f"{name} has dtype {x.dtype}, which JAX does not support. Cast it."
    return f"{name} must be an array, got {kind_of(x)}."


def _does_not_fit(name: str, dtype: Any) -> str:
    return (
        f"{name} has integers that do not fit in {dtype}: make them smaller, or enable "
        "jax_enable_x64."
    )


def check_floats(name: str, x) -> Array:
    """Return `x` as an array of floats."""
    x = to_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be a floating-point array, got {x.dtype}. Cast it.")
    return x


def check_wide_floats(name: str, x) -> Array:
    """Return `x` as an array of floats in which attention computes: of 16 bits or more."""
    x = check_floats(name, x)
    if jnp.finfo(x.dtype).bits < 16:
        raise TypeError(
            f"{name} is {x.dtype}: supported are bfloat16, float16, float32 and float64. Cast it "
            "first."
        )
    return x


def check_integers(name: str, x) -> Array:
    """Return `x` as an array of integers; JAX takes an empty list for floats."""
    array = to_array(name, x)
    if array.size == 0 and isinstance(x, list | tuple):
        array = array.astype(jnp.int32)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}.")
    return array


def to_int32(x: Array, least: int = -INT32_MAX - 1, most: int = INT32_MAX) -> Array:
    """Return integers as int32, first clipped to `least` and `most`, so that none wraps."""
    limits = jnp.iinfo(x.dtype)
    return jnp.clip(x, max(least, int(limits.min)), min(most, int(limits.max))).astype(jnp.int32)


def known_values(x) -> np.ndarray | None:
    """Return the values of an array, or None if it is None, traced or on another machine."""
    x = unwrapped(x)
    for leaf in jax.tree.leaves(x):
        if isinstance(leaf, Tracer) or not getattr(leaf, "is_fully_addressable", True):
            return None
    values = np.asarray(x)
    return values if values.size else None


def text_of(x) -> str:
    """Return `x` as one short line for an error; an array as its shape and dtype."""
    if isinstance(x, Tracer):
        return f"<traced {x.aval}>"
    if isinstance(x, jax.Array | np.ndarray) and x.ndim:
        kind = "Array" if isinstance(x, jax.Array) else type(x).__name__
        return f"{kind}(shape={x.shape}, dtype={x.dtype})"
    try:
        text = " ".join(repr(x).split())
    except ValueError:  # Python prints no int of more than 4300 digits
        return f"<{type(x).__name__}, too long to print>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def kind_of(x) -> str:
    """Describe `x` for an error: its type and value, or its traced type."""
    if isinstance(x, Tracer):
        return f"a traced value ({x.aval})"
    kind = "Array" if isinstance(x, jax.Array) else type(x).__name__
    text = text_of(x)
    names_its_type = x is None or text.startswith((f"{kind}(", "<"))
    return text if names_its_type else f"{kind} {text}"
