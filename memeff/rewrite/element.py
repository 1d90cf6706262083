"""Find how the program computes one element of an array, as an `ElementFunction`.

The element is computed from positions, known numbers, and the arrays at which its equations begin.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from memeff.rewrite import element_function
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
from memeff.rewrite.element_function import (
    QUERY,
    ElementFunction,
    Step,
    all_true,
    any_true,
    at_least_zero,
    is_zero,
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

    def apply(self, function: Callable[..., Any], *steps: int) -> int:
        """Add the step of a function of the results of steps."""
        return self.add(element_function.apply, function, *steps)

    def scaled(self, step: int, factor: float) -> int:
        """Return the step times a factor."""
        return step if factor == 1 else self.add(element_function.times, step, factor)

    def letter(self, letter: Letter) -> int:
        """Return the step of the position along a letter."""
        for which, group in enumerate(self.roles.groups):
            if letter not in group:
                continue
            after = group[group.index(letter) + 1 :]
            divisor = count_positions(after)
            modulus = 0 if group[0] is letter else letter.size
            subtract = self.q_offset if which == QUERY else 0
            return self.add(element_function.position, which, subtract, divisor, modulus)
        raise NoMatch("an axis is neither of the batch, nor of heads, queries or keys")

    def affine(self, affine: Affine) -> int:
        """Return the step of an affine function of positions."""
        terms = []
        for letter, coefficient in affine.coefficients:
            terms.append((self.letter(letter), coefficient))
        return self.add(element_function.affine, tuple(terms), affine.constant)

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
            return self.add(element_function.number, _hashable(number), str(value.dtype))
        if value is self.dots:
            if index != expand_all(self.dots_index):
                raise NoMatch("the logits of one pair depend on those of another pair")
            return self.add(element_function.score, str(value.dtype))
        if (value.constant is not None or value.op in JOINS) and self._over_pairs(index):
            symbol = self._reader.read(value, index)
            if isinstance(symbol, Choice):
                numbers = _hashable(symbol.yes), _hashable(symbol.no)
                condition = self.formula(symbol.condition)
                return self.add(element_function.choose, condition, *numbers, str(value.dtype))
        computed = self.depends is not None and self.depends(value)
        if not computed and self._is_leaf(value, index):
            return self.leaf(value, index)
        equation = value.maker
        inputs = sources(equation, index) if equation is not None else None
        if equation is not None and value.op == "iota":
            step = self.position(index[equation.params["dimension"]])
            return self.add(element_function.cast, step, str(value.dtype))
        count = running_count(equation, index) if equation and value.op == "cumsum" else None
        if count is not None:
            return self.add(element_function.cast, self.affine(count), str(value.dtype))
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
        params = tuple(sorted(params.items()))
        return self.add(element_function.bind, equation.eqn.primitive, params, steps)

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
            steps.append(self.position(() if size == 1 else dim))
        number = self.leaves.index(value)
        return self.add(element_function.leaf, number, tuple(steps), str(value.dtype))

    def formula(self, formula: Formula) -> int:
        """Return the step of a formula."""
        if isinstance(formula, Known):
            return self.add(element_function.number, formula.value, "bool")
        if isinstance(formula, AtLeastZero):
            return self.apply(at_least_zero, self.affine(formula.affine))
        if isinstance(formula, IsZero):
            return self.apply(is_zero, self.affine(formula.affine))
        if isinstance(formula, Leaf):
            return self.element(*formula.element)
        if isinstance(formula, SameIds):
            first, second = self.element(*formula.first), self.element(*formula.second)
            return self.apply(operator.eq, first, second)
        if isinstance(formula, Not):
            return self.apply(operator.invert, self.formula(formula.part))
        steps = [self.formula(x) for x in formula.parts]
        return self.apply(all_true if isinstance(formula, And) else any_true, *steps)


def _hashable(number: Any) -> Any:
    """Return a NumPy number as Python's, and NaN as one object, which tuples take for equal."""
    number = np.asarray(number)
    if number.dtype == bool:
        return bool(number)
    if np.issubdtype(number.dtype, np.integer):
        return int(number)
    number = float(number)
    return math.nan if math.isnan(number) else number
