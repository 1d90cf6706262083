"""Convert one argument to an array, and name the kind of what came."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer


def check_bool(name: str, flag) -> None:
    """Refuse a flag that is not True or False."""
    if not isinstance(flag, bool | np.bool_):
        raise TypeError(
            f"{name} must be True or False (it is fixed while tracing), got {kind_of(flag)}."
        )


def to_array(name: str, x) -> Array:
    """Return `x` as an array; `name` names it in an error."""
    if isinstance(x, jax.Array):
        return x
    if x is None or isinstance(x, str | dict | set) or callable(x):
        raise TypeError(f"{name} must be an array, got {kind_of(x)}.")
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError) as e:
        raise TypeError(f"{name} must be an array, got {kind_of(x)}.") from e


def kind_of(x) -> str:
    """Describe `x` for an error: its type and value, or its traced type."""
    if isinstance(x, Tracer):
        return f"a traced value ({x.aval})"
    return "None" if x is None else f"{type(x).__name__} {x!r}"[:80]
