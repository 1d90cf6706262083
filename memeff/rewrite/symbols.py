"""Read what one element of an array is, as a symbol of the positions along its axes.

A mask that a program makes of `iota`, comparisons and logical operations becomes a formula, in
which a comparison of positions is `AtLeastZero` of an affine function. A bias of 0 and of a very
negative number becomes a `Choice` between two numbers. Whatever is not understood is `Opaque`: an
array and the index at which it is read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from memeff.rewrite.axes import (
    ELEMENTWISE,
    Index,
    Letter,
    NoMatch,
    Slice,
    expand,
    expand_all,
    known_number,
    letters_in,
    sources,
)
from memeff.rewrite.graph import Equation, Value, first_equal
from memeff.rewrite.numbers import as_numpy, compute

MOST_VALUES = 400  # that are followed to find on which axes a value depends
DEEPEST = 100  # equations, one made of the other, through which a symbol is read
LARGEST_CONSTANT = 2**28  # elements of a constant mask that is compared with a band


@dataclasses.dataclass(frozen=True)
class Affine:
    """An integer that is affine in positions: a sum of coefficient * position, and a constant."""

    coefficients: tuple[tuple[Letter, int], ...]
    constant: int

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        """Return this plus, or with sign -1 minus, the other."""
        total = dict(self.coefficients)
        for letter, coefficient in other.coefficients:
            total[letter] = total.get(letter, 0) + sign * coefficient
        terms = tuple((letter, c) for letter, c in total.items() if c)
        return Affine(terms, self.constant + sign * other.constant)

    def times(self, factor: int) -> Affine:
        """Return this times a factor."""
        terms = tuple((letter, c * factor) for letter, c in self.coefficients if factor)
        return Affine(terms, self.constant * factor)

    def bounds(self) -> tuple[int, int]:
        """Return the least and the largest value over all positions."""
        ends = [c * (letter.size - 1) for letter, c in self.coefficients]
        low = self.constant + sum(min(x, 0) for x in ends)
        return low, self.constant + sum(max(x, 0) for x in ends)


@dataclasses.dataclass(frozen=True)
class Distance:
    """The absolute value of an affine integer."""

    affine: Affine


@dataclasses.dataclass(frozen=True)
class Opaque:
    """An element of an array of which nothing more is known."""

    value: Value
    index: Index


@dataclasses.dataclass(frozen=True)
class Number:
    """A known number."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of two known numbers."""

    condition: Formula
    yes: Any
    no: Any


@dataclasses.dataclass(frozen=True)
class Known:
    """A formula that is always true, or always false."""

    value: bool


@dataclasses.dataclass(frozen=True)
class AtLeastZero:
    """Affine >= 0."""

    affine: Affine


@dataclasses.dataclass(frozen=True)
class IsZero:
    """Affine == 0."""

    affine: Affine


@dataclasses.dataclass(frozen=True)
class SameIds:
    """Two integers, elements of two arrays, are equal."""

    first: Opaque
    second: Opaque


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A boolean element of an array."""

    element: Opaque


@dataclasses.dataclass(frozen=True)
class Not:
    part: Formula


@dataclasses.dataclass(frozen=True)
class And:
    parts: tuple[Formula, ...]


@dataclasses.dataclass(frozen=True)
class Or:
    parts: tuple[Formula, ...]


Formula = Known | AtLeastZero | IsZero | SameIds | Leaf | Not | And | Or
Symbol = Affine | Distance | Opaque | Number | Choice


def negate(formula: Formula) -> Formula:
    """Return the formula that is true where this one is false."""
    if isinstance(formula, Known):
        return Known(not formula.value)
    if isinstance(formula, AtLeastZero):
        return AtLeastZero(formula.affine.times(-1).plus(Affine((), -1)))
    if isinstance(formula, Not):
        return formula.part
    if isinstance(formula, And):
        return Or(tuple(negate(x) for x in formula.parts))
    if isinstance(formula, Or):
        return And(tuple(negate(x) for x in formula.parts))
    return Not(formula)


def both(*formulas: Formula) -> Formula:
    """Return the conjunction, without parts that are known."""
    parts: list[Formula] = []
    for formula in formulas:
        if isinstance(formula, Known):
            if not formula.value:
                return formula
        elif isinstance(formula, And):
            parts.extend(formula.parts)
        else:
            parts.append(formula)
    parts = list(dict.fromkeys(parts))
    if not parts:
        return Known(True)
    return parts[0] if len(parts) == 1 else And(tuple(parts))


def either(*formulas: Formula) -> Formula:
    """Return the disjunction, without parts that are known."""
    return negate(both(*(negate(x) for x in formulas)))


def as_formula(symbol: Symbol) -> Formula:
    """Return the formula that a boolean symbol is."""
    if isinstance(symbol, Number):
        return Known(bool(symbol.value))
    if isinstance(symbol, Choice):
        yes = both(symbol.condition, Known(bool(symbol.yes)))
        no = both(negate(symbol.condition), Known(bool(symbol.no)))
        return either(yes, no) if symbol.yes and symbol.no else (yes if symbol.yes else no)
    assert isinstance(symbol, Opaque)
    return Leaf(symbol)


class Reader:
    """Read symbols, and remember those that were read."""

    def __init__(self):
        self._known: dict[Any, Symbol] = {}
        self._depth = 0

    def read(self, value: Value, index: Index) -> Symbol:
        """Return what the element of `value` at `index` is."""
        index = expand_all(index)
        key = id(value), index
        if key in self._known:
            return self._known[key]
        if self._depth >= DEEPEST:
            return Opaque(value, index)
        self._depth += 1
        self._known[key] = self._read(value, index)
        self._depth -= 1
        return self._known[key]

    def _read(self, value: Value, index: Index) -> Symbol:
        number = known_number(value)
        if number is not None:
            return Number(number)
        opaque = Opaque(first_equal(value), index)
        equation = value.maker
        if value.constant is not None:
            return self._band(value.constant, index) or opaque
        if equation is None:
            return opaque
        if value.op == "iota":
            return self._position(index[equation.params["dimension"]])
        if value.op == "cumsum":
            return self._running_count(equation, index) or opaque
        try:
            inputs = sources(equation, index)
        except NoMatch:
            return opaque
        if inputs is None:
            return opaque
        if value.op not in ELEMENTWISE:
            symbol = self.read(*inputs[0])
            is_slice = value.op in ("slice", "dynamic_slice")
            return opaque if is_slice and isinstance(symbol, Opaque) else symbol
        symbols = [self.read(*source) for source in inputs]
        return _combine(equation, symbols) or opaque

    def _running_count(self, equation: Equation, index: Index) -> Affine | None:
        """Return a running sum of equal integers, as some programs count positions."""
        (summed,) = equation.inputs
        number = known_number(summed)
        if number is None or not np.isfinite(number) or number != int(number):
            return None
        axis = equation.params["axis"]
        position = self._position(index[axis]).plus(Affine((), 1))
        if equation.params["reverse"]:
            position = Affine((), summed.shape[axis] + 1).plus(position, -1)
        total = position.times(int(number))
        return total if _is_exact(total, summed.dtype) else None

    def _band(self, constant: Any, index: Index) -> Choice | None:
        """Return an array of two numbers as a choice, if one of them fills a band of diagonals."""
        array = as_numpy(constant)
        dims = [d for d, dim in enumerate(index) if letters_in([dim])]
        if array is None or len(dims) != 2 or array.size > LARGEST_CONSTANT:
            return None
        for d, dim in enumerate(index):
            if isinstance(dim, Slice) and not isinstance(dim.inner, Slice):
                count = math.prod(x.size for x in dim.inner)
                array = array.take(dim.start + dim.stride * np.arange(count), axis=d)
            elif isinstance(dim, Slice):
                return None
        array = array.reshape([array.shape[d] for d in dims])
        yes = array.max()
        no = array.min()
        if not ((array == yes) | (array == no)).all():
            return None
        inner = [x.inner if isinstance(x, Slice) else x for x in (index[d] for d in dims)]
        rows, columns = (self._position(x) for x in inner)
        for visible, first, second in ((array == yes, yes, no), (array == no, no, yes)):
            band = _band_of(visible)
            if band is None:
                continue
            low, high = band
            distance = columns.plus(rows, -1)
            above = AtLeastZero(distance.plus(Affine((), -low)))
            below = AtLeastZero(distance.times(-1).plus(Affine((), high)))
            return Choice(both(_decide(above), _decide(below)), first, second)
        return None

    def _position(self, dim: Any) -> Affine:
        """Return the position along a dim."""
        if isinstance(dim, Slice):
            return self._position(dim.inner).times(dim.stride).plus(Affine((), dim.start))
        terms = []
        stride = 1
        for letter in reversed(expand(dim)):
            terms.append((letter, stride))
            stride *= letter.size
        return Affine(tuple(terms), 0)


def _band_of(visible: np.ndarray) -> tuple[int, int] | None:
    """Return (low, high) if [T, S] is True where low <= column - row <= high, else None."""
    T, S = visible.shape
    if not visible.any():
        return None
    rows, columns = visible.nonzero()
    distances = columns - rows
    low = int(distances.min())
    high = int(distances.max())
    everywhere = np.arange(S) - np.arange(T)[:, None]
    band = (everywhere >= low) & (everywhere <= high)
    return (low, high) if (band == visible).all() else None


def _combine(equation: Any, symbols: list[Any]) -> Symbol | None:
    """Return the result of an elementwise equation for symbols, or None where it is unknown."""
    name = equation.eqn.primitive.name
    dtype = equation.outputs[0].dtype
    if name in ("copy", "stop_gradient"):
        return symbols[0]
    if name == "select_n":
        return _select(symbols, dtype)
    if np.issubdtype(dtype, np.bool_) and name in ("and", "or", "not", "xor"):
        return _logic(name, [as_formula(x) for x in symbols])
    if name == "abs" and isinstance(symbols[0], Affine):
        return Distance(symbols[0])
    affine = [_as_affine(x) for x in symbols]
    if any(isinstance(x, Distance) for x in symbols):
        return _compare_distance(name, symbols, affine)
    if all(x is not None for x in affine):
        result = _arithmetic(name, affine, dtype)
        if result is not None:
            return result
    if name in ("eq", "ne") and all(isinstance(x, Opaque) for x in symbols):
        if np.issubdtype(equation.inputs[0].dtype, np.integer):
            same: Formula = SameIds(*symbols)
            return Choice(same, name == "eq", name != "eq")
    symbols = [_as_choice(x) for x in symbols]
    if all(isinstance(x, Choice | Number) for x in symbols):
        return _of_choices(equation.eqn, symbols)
    return None


def _as_choice(symbol: Any) -> Any:
    """Return an unknown boolean as a choice, so that numbers made of it are choices too."""
    if isinstance(symbol, Opaque) and symbol.value.dtype == bool:
        return Choice(Leaf(symbol), np.True_, np.False_)
    return symbol


def _as_affine(symbol: Symbol) -> Affine | None:
    if isinstance(symbol, Affine):
        return symbol
    if isinstance(symbol, Number) and symbol.value.dtype != bool:
        if np.isfinite(symbol.value) and symbol.value == int(symbol.value):
            return Affine((), int(symbol.value))
    return None


def _arithmetic(name: str, symbols: list[Any], dtype: Any) -> Symbol | None:
    """Return sums, products with numbers and comparisons of affine positions."""
    result: Affine | None = None
    if name == "convert_element_type":
        result = symbols[0]
    elif name == "neg":
        result = symbols[0].times(-1)
    elif name in ("add", "sub"):
        result = symbols[0].plus(symbols[1], 1 if name == "add" else -1)
    elif name == "mul" and any(not x.coefficients for x in symbols):
        first, second = symbols
        result = first.times(second.constant) if not second.coefficients else None
        result = second.times(first.constant) if not first.coefficients else result
    if result is not None:
        return result if _is_exact(result, dtype) else None
    if name in ("ge", "gt", "le", "lt", "eq", "ne"):
        return _compare(name, symbols[0].plus(symbols[1], -1))
    return None


def _is_exact(affine: Affine, dtype: Any) -> bool:
    """Return True if the dtype holds each value of an affine function of positions."""
    low, high = affine.bounds()
    if np.issubdtype(dtype, np.integer):
        info = np.iinfo(dtype)
        return info.min <= low and high <= info.max
    largest = {"float64": 2**53, "float32": 2**24, "float16": 2**11, "bfloat16": 2**8}
    return max(abs(low), abs(high)) <= largest.get(str(dtype), 0)


def _compare(name: str, difference: Affine) -> Choice:
    """Return the comparison of a difference with 0."""
    formula: Formula
    if name in ("eq", "ne"):
        formula = IsZero(difference)
    elif name in ("ge", "lt"):
        formula = AtLeastZero(difference)
    else:
        formula = AtLeastZero(difference.plus(Affine((), -1)))
    positive = name in ("ge", "gt", "eq")
    return Choice(_decide(formula), positive, not positive)


def _compare_distance(name: str, symbols: list[Any], affine: list[Any]) -> Choice | None:
    """Return the comparison of a distance with a number."""
    if name not in ("ge", "gt", "le", "lt") or len(symbols) != 2:
        return None
    reverse = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}
    distance, limit = symbols[0], affine[1]
    if isinstance(symbols[1], Distance):
        distance, limit, name = symbols[1], affine[0], reverse[name]
    if not isinstance(distance, Distance) or limit is None or limit.coefficients:
        return None
    most = Affine((), limit.constant - (name in ("lt", "ge")))
    above = AtLeastZero(most.plus(distance.affine))
    below = AtLeastZero(most.plus(distance.affine, -1))
    inside = both(_decide(above), _decide(below))
    return Choice(inside, name in ("le", "lt"), name in ("gt", "ge"))


def _decide(formula: Formula) -> Formula:
    """Return a comparison as known where all positions agree."""
    assert isinstance(formula, AtLeastZero | IsZero)
    low, high = formula.affine.bounds()
    if isinstance(formula, AtLeastZero):
        if low >= 0 or high < 0:
            return Known(low >= 0)
    elif low > 0 or high < 0:
        return Known(False)
    return formula


def _logic(name: str, formulas: list[Formula]) -> Choice:
    if name == "not":
        result = negate(formulas[0])
    elif name == "and":
        result = both(*formulas)
    elif name == "or":
        result = either(*formulas)
    else:
        first, second = formulas
        result = either(both(first, negate(second)), both(negate(first), second))
    return Choice(result, True, False)


def _select(symbols: list[Any], dtype: Any) -> Symbol | None:
    """Return `select_n(which, if_false, if_true)` of symbols."""
    if len(symbols) != 3:
        return None
    which, if_false, if_true = symbols
    if isinstance(which, Number) and which.value.dtype == bool:
        return if_true if which.value else if_false
    if not isinstance(which, Choice | Opaque):
        return None
    if isinstance(which, Opaque) and which.value.dtype != bool:
        return None
    condition = as_formula(which)
    if np.issubdtype(dtype, np.bool_):
        yes = both(condition, as_formula(if_true))
        no = both(negate(condition), as_formula(if_false))
        return Choice(either(yes, no), True, False)
    if isinstance(if_true, Number) and isinstance(if_false, Number):
        return Choice(condition, if_true.value, if_false.value)
    if isinstance(if_false, Choice) and isinstance(if_true, Number):
        condition = negate(condition)
        if_false, if_true = if_true, if_false
    if isinstance(if_true, Choice) and isinstance(if_false, Number):
        if if_false.value == if_true.no:
            return Choice(both(condition, if_true.condition), if_true.yes, if_true.no)
        if if_false.value == if_true.yes:
            hidden = both(condition, negate(if_true.condition))
            return Choice(negate(hidden), if_true.yes, if_true.no)
    return None


def _of_choices(eqn: Any, symbols: list[Any]) -> Symbol | None:
    """Return an operation on choices, if its result is again one of two numbers."""
    choices = list(dict.fromkeys(x for x in symbols if isinstance(x, Choice)))
    if len(choices) not in (1, 2):
        return None

    def result(*branches: bool) -> Any:
        """Return the result where the choices take these branches."""
        taken = dict(zip(choices, branches, strict=True))
        numbers = []
        for symbol in symbols:
            if isinstance(symbol, Number):
                numbers.append(symbol.value)
            else:
                numbers.append(symbol.yes if taken[symbol] else symbol.no)
        return compute(eqn, [np.asarray(x)[()] for x in numbers])

    if len(choices) == 1:
        yes = result(True)
        no = result(False)
        if yes is None:
            return None
        return Number(yes) if yes == no else Choice(choices[0].condition, yes, no)
    first, second = (x.condition for x in choices)
    table = [result(True, True), result(True, False), result(False, True), result(False, False)]
    if table[0] is None:
        return None
    yes, mixed, mixed_too, no = table
    if mixed == mixed_too == no:
        return Choice(both(first, second), yes, no)
    if mixed == mixed_too == yes:
        return Choice(either(first, second), yes, no)
    return None


def letters_of(value: Value, index: Index) -> set[Letter]:
    """Return the letters on which the element of `value` at `index` depends, or a few more."""
    found: set[Letter] = set()
    seen: set[Any] = set()
    waiting = [(value, expand_all(index))]
    while waiting:
        value, index = waiting.pop()
        if (value, index) in seen or known_number(value) is not None:
            continue
        seen.add((value, index))
        if value.op == "iota":
            assert value.maker is not None
            index = (index[value.maker.params["dimension"]],)
        elif value.maker is not None and len(seen) < MOST_VALUES:
            try:
                inputs = sources(value.maker, index)
            except NoMatch:
                inputs = None
            if inputs is not None:
                waiting.extend((x, expand_all(at)) for x, at in inputs)
                continue
        found.update(letters_in(index))
    return found
