"""Compute one element of an array from positions and from the arrays at which its equations begin.

The result is a `score_fn` or a `mask_fn` of memeff. It is plain data, so that equal functions of
equal layers compare equal, and JAX traces their call once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from memeff.problem import sum_dtype
from memeff.rewrite.axes import (
    ELEMENTWISE,
    JOINS,
    MOVES,
    Element,
    Index,
    Letter,
    NoMatch,
    count_positions,
    expand_all,
    is_closed,
    known_number,
    letters_in,
    sources,
)
from memeff.rewrite.graph import Value
from memeff.rewrite.reader import Reader, position_along, running_count
from memeff.rewrite.symbols import (
    Affine,
    And,
    AtLeastZero,
    Choice,
    Formula,
    IsZero,
    Known,
    Leaf,
    Not,
    SameIds,
)
from memeff.sharding import vary_together

BATCH, HEAD, QUERY, KEY = range(4)  # the four numbers that memeff gives a function of pairs
MOST_STEPS = 500  # more equations than this are not the elements of a mask or a bias
FACTOR_FIRST = " (multiply logits by an array before their maximum is subtracted, not after)"


@dataclasses.dataclass(frozen=True)
class Roles:
    """Say what each letter counts: batch entries, heads, queries or keys; the slowest first."""

    batch: tuple[Letter, ...]
    heads: tuple[Letter, ...]
    query: tuple[Letter, ...]
    keys: tuple[Letter, ...]

    @property
    def groups(self) -> tuple[tuple[Letter, ...], ...]:
        """Return the letters of batch entries, heads, queries and keys."""
        return self.batch, self.heads, self.query, self.keys

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return B, N, T and S."""
        B, N, T, S = map(count_positions, self.groups)
        return B, N, T, S

    def over_pairs(self, letters: Iterable[Letter]) -> bool:
        """Return True if letters of queries and of keys are among `letters`."""
        letters = set(letters)
        return not letters.isdisjoint(self.query) and not letters.isdisjoint(self.keys)


Step = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ElementFunction:
    """A function of one pair: steps, each computed from the results of earlier ones.

    A step is a kind and its arguments: ("position", which of the four numbers, what to subtract,
    divisor, modulus), ("affine", ((step, factor), ...), constant), ("number", number, dtype),
    ("cast", step, dtype), ("leaf", param, steps of its index, dtype), ("score", dtype),
    ("op", primitive, params, steps), ("all", steps), ("any", steps), ("not", step),
    ("equal", step, step), ("positive", step), ("zero", step), ("sum", steps),
    ("times", step, factor), ("raised", step), ("rounded", step),
    ("choice", step, number, number, dtype).
    """

    steps: tuple[Step, ...]
    kind: str  # "score", "mask" or "bias"

    def __call__(self, *arguments: Any) -> Any:
        """Compute the element; the arguments are those of a score_fn or of a mask_fn."""
        *pair, leaves = arguments
        score = pair[0] if self.kind == "score" else None
        positions = pair[-4:]
        done: list[Any] = []
        for kind, *rest in self.steps:
            done.append(_STEPS[kind](_State(done, positions, score, leaves), *rest))
        result = done[-1]
        if self.kind == "mask":
            return jnp.asarray(result, bool)
        return result if score is None else result.astype(score.dtype)

    def uses(self) -> tuple[bool, ...]:
        """Return which of the four numbers the steps read."""
        read = {step[1] for step in self.steps if step[0] == "position"}
        return tuple(which in read for which in range(4))


@dataclasses.dataclass(frozen=True)
class _State:
    """The values that a step may read."""

    done: list[Any]
    positions: Any
    score: Any
    leaves: Any


def _position(state, which, subtract, divisor, modulus):
    x = state.positions[which]
    x = x - subtract if subtract else x
    x = x // divisor if divisor > 1 else x
    return x % modulus if modulus else x


def _affine(state, terms, constant):
    total: Any = None
    for step, factor in terms:
        term = state.done[step] if factor == 1 else state.done[step] * factor
        total = term if total is None else total + term
    if total is None:
        return jnp.int32(constant)
    return total + constant if constant else total


def _leaf(state, param, steps, dtype):
    leaf = state.leaves[param]
    element = leaf[tuple(state.done[step] for step in steps)] if steps else leaf.reshape(())
    return element.astype(dtype)  # `memeff.audit` gives params in float64


def _op(state, primitive, params, steps):
    operands = vary_together([state.done[step] for step in steps])
    return primitive.bind(*operands, **dict(params))


def _sum(state, steps):
    terms = [state.done[step] for step in steps]
    wide = any(sum_dtype(x.dtype) == jnp.float64 for x in terms)
    dtype = jnp.float64 if wide else jnp.float32  # strict promotion would refuse result_type
    return functools.reduce(operator.add, [x.astype(dtype) for x in terms])


def _times(state, step, factor):
    x = state.done[step]
    return x * jnp.asarray(factor, x.dtype)


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


def _choice(state, step, yes, no, dtype):
    yes, no = (jnp.asarray(np.asarray(x, dtype)) for x in (yes, no))
    return jnp.where(state.done[step], yes, no)


def _all(state, steps):
    return functools.reduce(operator.and_, [state.done[step] for step in steps])


def _any(state, steps):
    return functools.reduce(operator.or_, [state.done[step] for step in steps])


_STEPS = {
    "position": _position,
    "affine": _affine,
    "number": lambda state, number, dtype: jnp.asarray(np.asarray(number, dtype)),
    "cast": lambda state, step, dtype: jnp.asarray(state.done[step], dtype),
    "leaf": _leaf,
    "score": lambda state, dtype: state.score.astype(dtype),
    "op": _op,
    "sum": _sum,
    "times": _times,
    "raised": lambda state, step: raised(state.done[step]),
    "rounded": lambda state, step: rounded(state.done[step]),
    "choice": _choice,
    "all": _all,
    "any": _any,
    "not": lambda state, step: ~state.done[step],
    "equal": lambda state, first, second: state.done[first] == state.done[second],
    "positive": lambda state, step: state.done[step] >= 0,
    "zero": lambda state, step: state.done[step] == 0,
}


class Builder:
    """Collect the steps of an element, and the arrays that it reads.

    `dots` is the product that a score stands for, at `dots_index`; None in a mask.
    """

    def __init__(self, roles: Roles, q_offset: int = 0):
        self.roles = roles
        self.q_offset = q_offset
        self.steps: list[Step] = []
        self.leaves: list[Value] = []
        self.dots: Value | None = None
        self.dots_index: Index = ()
        self.depends: Any = None  # value -> bool: is it computed from the dots?
        self.of_pairs: list[Value] = []  # those of `leaves` that have an element for each pair
        self._known: dict[Any, int] = {}  # by step
        self._elements: dict[Any, int] = {}  # by value and index
        self._reader = Reader()

    def function(self, kind: str) -> ElementFunction:
        """Return the function whose result is the last step."""
        return ElementFunction(tuple(self.steps), kind)

    def add(self, *step: Any) -> int:
        """Add a step, or find the same one, and return its number."""
        if step not in self._known:
            if len(self.steps) >= MOST_STEPS:
                raise NoMatch(f"more than {MOST_STEPS} operations make a mask or a bias")
            self.steps.append(step)
            self._known[step] = len(self.steps) - 1
        return self._known[step]

    def scaled(self, step: int, factor: float) -> int:
        """Return the step times a factor."""
        return step if factor == 1 else self.add("times", step, factor)

    def letter(self, letter: Letter) -> int:
        """Return the step of the position along a letter."""
        for which, group in enumerate(self.roles.groups):
            if letter not in group:
                continue
            after = group[group.index(letter) + 1 :]
            divisor = count_positions(after)
            modulus = 0 if group[0] is letter else letter.size
            subtract = self.q_offset if which == QUERY else 0
            return self.add("position", which, subtract, divisor, modulus)
        raise NoMatch("an axis is neither of the batch, nor of heads, queries or keys")

    def affine(self, affine: Affine) -> int:
        """Return the step of an affine function of positions."""
        terms = []
        for letter, coefficient in affine.coefficients:
            terms.append((self.letter(letter), coefficient))
        return self.add("affine", tuple(terms), affine.constant)

    def position(self, dim: Any) -> int:
        """Return the step of the position along a dim."""
        return self.affine(position_along(dim))

    def element(self, value: Value, index: Index) -> int:
        """Return the step of the element of `value` at `index`."""
        element = value, expand_all(index)
        waiting = [element]
        while waiting:
            step = self._step(*waiting[-1])
            if isinstance(step, int):
                self._elements[waiting.pop()] = step
            else:
                waiting.extend(step[::-1])  # the first operand is on top
        return self._elements[element]

    def _step(self, value: Value, index: Index) -> int | list[Element]:
        """Return the step of an element, or the elements whose steps are needed before."""
        if (value, index) in self._elements:
            return self._elements[value, index]
        number = known_number(value)
        if number is not None:
            return self.add("number", _hashable(number), str(value.dtype))
        if value is self.dots:
            if index != expand_all(self.dots_index):
                raise NoMatch("the logits of one pair depend on those of another pair")
            return self.add("score", str(value.dtype))
        if (value.constant is not None or value.op in JOINS) and self._over_pairs(index):
            symbol = self._reader.read(value, index)
            if isinstance(symbol, Choice):
                numbers = _hashable(symbol.yes), _hashable(symbol.no)
                return self.add(
                    "choice", self.formula(symbol.condition), *numbers, str(value.dtype)
                )
        computed = self.depends is not None and self.depends(value)
        if not computed and self._is_leaf(value, index):
            return self.leaf(value, index)
        equation = value.maker
        inputs = sources(equation, index) if equation is not None else None
        if equation is not None and value.op == "iota":
            step = self.position(index[equation.params["dimension"]])
            return self.add("cast", step, str(value.dtype))
        count = running_count(equation, index) if equation and value.op == "cumsum" else None
        if count is not None:
            return self.add("cast", self.affine(count), str(value.dtype))
        if equation is None or inputs is None:
            if computed:
                raise NoMatch(
                    f"the logits pass through `{value.op}`, so a logit depends on other pairs"
                    f"{FACTOR_FIRST if value.op == 'reduce_max' else ''}"
                )
            return self.leaf(value, index)
        elements = [(x, expand_all(x_index)) for x, x_index in inputs]
        missing = [x for x in elements if x not in self._elements]
        if missing:
            return missing
        steps = tuple(self._elements[x] for x in elements)
        if value.op not in ELEMENTWISE:
            return steps[0]
        params = dict(equation.params)
        if "sharding" in params:
            params["sharding"] = None
        return self.add("op", equation.eqn.primitive, tuple(sorted(params.items())), steps)

    def _is_leaf(self, value: Value, index: Index) -> bool:
        """Return True for an array that is best computed once, and not for each pair."""
        if value.op in MOVES or self._over_pairs(index):
            return False
        return not is_closed(value)

    def _over_pairs(self, index: Index) -> bool:
        """Return True if an index has letters of queries and of keys."""
        return self.roles.over_pairs(letters_in(index))

    def leaf(self, value: Value, index: Index) -> int:
        """Return the step that reads an element of an array."""
        if value not in self.leaves:
            self.leaves.append(value)
        # an array of rows, beside columns, is smaller
        has_all = {*self.roles.query, *self.roles.keys} <= set(letters_in(index))
        if value not in self.of_pairs and has_all:
            self.of_pairs.append(value)
        steps = []
        for dim, size in zip(index, value.shape, strict=True):
            steps.append(self.add("affine", (), 0) if size == 1 else self.position(dim))
        return self.add("leaf", self.leaves.index(value), tuple(steps), str(value.dtype))

    def formula(self, formula: Formula) -> int:
        """Return the step of a formula."""
        if isinstance(formula, Known):
            return self.add("number", formula.value, "bool")
        if isinstance(formula, AtLeastZero):
            return self.add("positive", self.affine(formula.affine))
        if isinstance(formula, IsZero):
            return self.add("zero", self.affine(formula.affine))
        if isinstance(formula, Leaf):
            return self.element(*formula.element)
        if isinstance(formula, SameIds):
            first, second = self.element(*formula.first), self.element(*formula.second)
            return self.add("equal", first, second)
        if isinstance(formula, Not):
            return self.add("not", self.formula(formula.part))
        steps = tuple(self.formula(x) for x in formula.parts)
        return self.add("all" if isinstance(formula, And) else "any", steps)


def _hashable(number: Any) -> Any:
    """Return a NumPy number as Python's, and NaN as one object, which tuples take for equal."""
    number = np.asarray(number)
    if number.dtype == bool:
        return bool(number)
    if np.issubdtype(number.dtype, np.integer):
        return int(number)
    number = float(number)
    return math.nan if math.isnan(number) else number


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
