"""Define functions of one pair of tokens as plain data, and the steps of which they are made.

Such a function is a `score_fn` or a `mask_fn` of memeff, or a bias. Equal functions of equal layers
compare equal, so JAX traces their call once.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memeff.problem import sum_dtype
from memeff.sharding import vary_together

BATCH, HEAD, QUERY, KEY = range(4)  # the four numbers that memeff gives a function of pairs

Step = tuple[Any, ...]  # a function of this module, and its arguments after `state`


@dataclasses.dataclass(frozen=True)
class ElementFunction:
    """A function of one pair: steps, each computed from the results of earlier ones.

    An argument that names a step is its number. Causal order, query - key >= 0, has the steps

      (position, QUERY, 0, 1, 0)        # 0
      (position, KEY, 0, 1, 0)          # 1
      (affine, ((0, 1), (1, -1)), 0)    # 2: 1 * query + -1 * key + 0
      (apply, at_least_zero, 2)         # 3: the result
    """

    steps: tuple[Step, ...]
    kind: str  # "score", "mask" or "bias"

    def __call__(self, *arguments: Any) -> Any:
        """Compute the element; the arguments are those of a score_fn or of a mask_fn."""
        *pair, leaves = arguments
        score = pair[0] if self.kind == "score" else None
        state = State([], pair[-4:], score, leaves)
        for function, *rest in self.steps:
            state.done.append(function(state, *rest))
        result = state.done[-1]
        if self.kind == "mask":
            return jnp.asarray(result, bool)
        return result if score is None else result.astype(score.dtype)

    def uses(self) -> tuple[bool, ...]:
        """Return which of the four numbers the steps read."""
        read = {step[1] for step in self.steps if step[0] is position}
        return tuple(which in read for which in range(4))


@dataclasses.dataclass(frozen=True)
class State:
    """The values that a step may read."""

    done: list[Any]  # the results of the steps before
    positions: Any  # batch entry, head, query and key
    score: Any  # the product of query and key; None in a mask or a bias
    leaves: Any  # arrays of the program


# ---- Steps


def position(state: State, which: int, subtract: int, divisor: int, modulus: int) -> Any:
    """Return the position along one of the axes that one of the four numbers counts together."""
    x = state.positions[which]
    x = x - subtract if subtract else x
    x = x // divisor if divisor > 1 else x
    return x % modulus if modulus else x


def affine(state: State, terms: tuple[tuple[int, int], ...], constant: int) -> Any:
    """Return a sum of (step, factor), and a constant."""
    total: Any = None
    for step, factor in terms:
        term = state.done[step] if factor == 1 else state.done[step] * factor
        total = term if total is None else total + term
    if total is None:
        return jnp.int32(constant)
    return total + constant if constant else total


def number(state: State, value: Any, dtype: str) -> Any:
    """Return a known number."""
    return jnp.asarray(np.asarray(value, dtype))


def score(state: State, dtype: str) -> Any:
    """Return the product of query and key."""
    return state.score.astype(dtype)


def leaf(state: State, param: int, steps: tuple[int, ...], dtype: str) -> Any:
    """Return the element of an array of the program at the index that the steps give."""
    array = state.leaves[param]
    element = array[tuple(state.done[step] for step in steps)] if steps else array.reshape(())
    return element.astype(dtype)  # `memeff.audit` gives params in float64


def cast(state: State, step: int, dtype: str) -> Any:
    """Return the result of a step in another dtype."""
    return jnp.asarray(state.done[step], dtype)


def times(state: State, step: int, factor: float) -> Any:
    """Return the result of a step times a factor."""
    x = state.done[step]
    return x * jnp.asarray(factor, x.dtype)


def choose(state: State, step: int, yes: Any, no: Any, dtype: str) -> Any:
    """Return one of two numbers, by the result of a step."""
    yes, no = (jnp.asarray(np.asarray(x, dtype)) for x in (yes, no))
    return jnp.where(state.done[step], yes, no)


def bind(state: State, primitive: Any, params: tuple[Any, ...], steps: tuple[int, ...]) -> Any:
    """Return the result of an element-wise equation of the program."""
    operands = vary_together([state.done[step] for step in steps])
    return primitive.bind(*operands, **dict(params))


def apply(state: State, function: Callable[..., Any], *steps: int) -> Any:
    """Return a function of the results of steps: one of those below, or one of `operator`."""
    return function(*(state.done[step] for step in steps))


# ---- Functions of the results of steps


def at_least_zero(x: jax.Array) -> jax.Array:
    return x >= 0


def is_zero(x: jax.Array) -> jax.Array:
    return x == 0


def all_true(*conditions: jax.Array) -> jax.Array:
    return functools.reduce(operator.and_, conditions)


def any_true(*conditions: jax.Array) -> jax.Array:
    return functools.reduce(operator.or_, conditions)


def wide_sum(*terms: jax.Array) -> jax.Array:
    """Return the sum of terms, in float64 if one of them has it, else in float32."""
    wide = any(sum_dtype(x.dtype) == jnp.float64 for x in terms)
    dtype = jnp.float64 if wide else jnp.float32  # strict promotion would refuse result_type
    return functools.reduce(operator.add, [x.astype(dtype) for x in terms])


def raised(x: jax.Array) -> jax.Array:
    """Return x, where finite numbers near its dtype's lowest are half of that. The gradient is x's.

    memeff takes a bias of the lowest number for hidden. All terms beside a bias are raised as it
    is, because a row that sees no key compares the numbers by which different masks hide.
    """
    lowest = float(jnp.finfo(x.dtype).min) / 2
    return x + lax.stop_gradient(jnp.where(jnp.isneginf(x), 0, jnp.maximum(x, lowest) - x))


def rounded(x: jax.Array) -> jax.Array:
    """Return x, a product, rounded: XLA would subtract the maximum before it rounds the product.

    A row that sees no key has products like -1e9 alone. The rounding of such a number is as large
    as other logits, and the maximum is rounded. The gradient is that of x.
    """
    lowest = float(jnp.finfo(x.dtype).min)
    return x + lax.stop_gradient(jnp.where(jnp.isinf(x), 0, jnp.maximum(x, lowest) - x))


def tabulate(function: ElementFunction, sizes: Iterable[int], leaves: Any) -> jax.Array:
    """Return the results of a function without scores for all its batch entries, heads and pairs.

    The result is [B|1, N|1, T|1, S|1]: a dim on which the function does not depend has size 1.
    """
    uses = function.uses()
    grids = []
    for size, used in zip(sizes, uses, strict=True):
        grids.append(jnp.arange(size, dtype=jnp.int32) if used else jnp.zeros(1, jnp.int32))

    def mapped(*positions: jax.Array) -> jax.Array:
        return function(*positions, leaves)

    for which in reversed(range(4)):
        axes: list[int | None] = [None] * 4
        axes[which] = 0
        mapped = jax.vmap(mapped, tuple(axes))
    return mapped(*grids)
