"""Define `replace_attention` and `find_attention`, the public functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from memeff.rewrite.report import Report, make_report
from memeff.rewrite.scope import Scope, Search, evaluate

# Below this many logits for each head, plain attention takes less memory than memeff's tiles.
MIN_LOGITS = 128 * 128


def replace_attention(
    f: Callable[..., Any],
    *,
    strict: bool = False,
    check: bool = False,
    min_logits: int = MIN_LOGITS,
) -> Callable[..., Any]:
    """Return f with the attention that it writes out computed by `dot_product_attention`."""

    @functools.wraps(f)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        arrays, static = _split((args, kwargs))
        return run(static, arrays)

    @functools.partial(jax.jit, static_argnums=0)
    def run(static: _Static, arrays: list[Any]) -> Any:
        scope, structure = _search(f, static, arrays, min_logits)
        if strict and not scope.is_changed:
            raise ValueError(str(make_report(scope)))
        return jax.tree.unflatten(structure, evaluate(scope, arrays))

    return replaced


def find_attention(
    f: Callable[..., Any], *args: Any, min_logits: int = MIN_LOGITS, **kwargs: Any
) -> Report:
    """Return what `replace_attention` would replace in f, and what it would leave and why."""
    arrays, static = _split((args, kwargs))
    scope, _ = _search(f, static, arrays, min_logits)
    return make_report(scope)


class _Static:
    """The arguments that are not arrays, and the structure of all arguments."""

    def __init__(self, structure: Any, leaves: tuple[Any, ...], is_array: tuple[bool, ...]):
        self.structure = structure
        self.leaves = leaves
        self.is_array = is_array

    def _key(self) -> Any:
        kinds = tuple(type(x) for x in self.leaves)  # because 1 == True == 1.0
        return self.structure, self.leaves, kinds, self.is_array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Static) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def join(self, arrays: Any) -> Any:
        """Return the arguments with these arrays."""
        arrays = iter(arrays)
        rest = iter(self.leaves)
        leaves = [next(arrays if flag else rest) for flag in self.is_array]
        return jax.tree.unflatten(self.structure, leaves)


def _split(arguments: Any) -> tuple[list[Any], _Static]:
    """Separate arrays, which are traced, from numbers and other objects of Python, which are not."""
    leaves, structure = jax.tree.flatten(arguments)
    is_array = tuple(isinstance(x, jax.Array | np.ndarray | np.generic) or _is_shape(x) for x in leaves)
    arrays = [x for x, flag in zip(leaves, is_array, strict=True) if flag]
    rest = tuple(x for x, flag in zip(leaves, is_array, strict=True) if not flag)
    return arrays, _Static(structure, rest, is_array)


def _is_shape(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _search(
    f: Callable[..., Any], static: _Static, arrays: list[Any], min_logits: int
) -> tuple[Scope, Any]:
    """Trace f and search it. Return its scope and the structure of its results."""

    def call(*arrays):
        args, kwargs = static.join(arrays)
        return f(*args, **kwargs)

    jaxpr, shapes = jax.make_jaxpr(call, return_shape=True)(*arrays)
    closed: ClosedJaxpr = jaxpr
    return Search(min_logits).scope(closed), jax.tree.structure(shapes)
