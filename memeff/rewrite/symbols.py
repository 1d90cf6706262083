"""Define symbols, which are what one element of an array is, and formulas of positions.

A mask that a program makes of `iota`, comparisons and logical operations becomes a formula, in
which a comparison of positions is `AtLeastZero` of an affine function. A bias of 0 and of a very
negative number becomes a `Choice` between two numbers. Whatever is not understood is `Opaque`: an
array and the index at which it is read.

symbol_operations.py computes with symbols, and reader.py reads them out of a program.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from memeff.rewrite.axes import Index, Letter, NoMatch
from memeff.rewrite.graph import Value


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


class Opaque(NamedTuple):
    """An element of an array that is not understood."""

    value: Value
    dims: Index  # the index at which it is read


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


def has_more_parts(formula: Formula, most: int) -> bool:
    """Return True if a formula has more than `most` parts, which are formulas themselves."""
    waiting = [formula]
    for _ in range(most):
        if not waiting:
            return False
        formula = waiting.pop()
        if isinstance(formula, Not):
            waiting.append(formula.part)
        elif isinstance(formula, And | Or):
            waiting.extend(formula.parts)
    return bool(waiting)


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


def move(symbol: Any, positions: dict[Letter, Affine]) -> Any:
    """Return a symbol, or a formula, with positions in the place of letters."""
    if any(letter.parts for letter in positions):
        raise NoMatch("a position within a part of an axis is not affine")
    if isinstance(symbol, Affine):
        total = Affine((), symbol.constant)
        for letter, coefficient in symbol.coefficients:
            position = positions.get(letter, Affine(((letter, 1),), 0))
            total = total.plus(position.times(coefficient))
        return total
    if isinstance(symbol, Distance | AtLeastZero | IsZero):
        return type(symbol)(move(symbol.affine, positions))
    if isinstance(symbol, Choice):
        return Choice(move(symbol.condition, positions), symbol.yes, symbol.no)
    if isinstance(symbol, Not):
        return Not(move(symbol.part, positions))
    if isinstance(symbol, And | Or):
        return type(symbol)(tuple(move(x, positions) for x in symbol.parts))
    if positions and not isinstance(symbol, Known | Number):
        raise NoMatch("an array is read at positions within a part of an axis")
    return symbol
