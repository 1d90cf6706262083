"""Compute element-wise equations of symbols: sums of positions, comparisons, logic, selections."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from memeff.rewrite.numbers import compute
from memeff.rewrite.symbols import (
    Affine,
    AtLeastZero,
    Choice,
    Distance,
    Formula,
    IsZero,
    Known,
    Leaf,
    Number,
    Opaque,
    SameIds,
    Symbol,
    as_formula,
    both,
    either,
    has_more_parts,
    negate,
)

MOST_PARTS = 400  # of a condition: a program that uses one twice makes a formula twice as large


def combine(equation: Any, symbols: list[Any]) -> Symbol | None:
    """Return the result of an elementwise equation for symbols, or None where it is unknown."""
    symbol = _combine(equation, symbols)
    is_large = isinstance(symbol, Choice) and has_more_parts(symbol.condition, MOST_PARTS)
    return None if is_large else symbol


def _combine(equation: Any, symbols: list[Any]) -> Symbol | None:
    name = equation.eqn.primitive.name
    dtype = equation.outputs[0].dtype
    if name in ("copy", "stop_gradient"):
        return symbols[0]
    if name == "select_n":
        selected = select(symbols)
        if selected is not None:
            return selected
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
        if dtype == np.bool_:
            return _compare("ne", symbols[0])
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
        return result if is_exact(result, dtype) else None
    if name in ("ge", "gt", "le", "lt", "eq", "ne"):
        return _compare(name, symbols[0].plus(symbols[1], -1))
    return None


def is_exact(affine: Affine, dtype: Any) -> bool:
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
    return Choice(decide(formula), positive, not positive)


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
    inside = both(decide(above), decide(below))
    return Choice(inside, name in ("le", "lt"), name in ("gt", "ge"))


def decide(formula: Formula) -> Formula:
    """Return a comparison as known where all positions agree."""
    assert isinstance(formula, AtLeastZero | IsZero)
    low, high = formula.affine.bounds()
    if isinstance(formula, AtLeastZero):
        if low >= 0 or high < 0:
            return Known(low >= 0)
    elif low > 0 or high < 0:
        return Known(False)
    return formula


def select(symbols: list[Any]) -> Symbol | None:
    """Return `select_n(which, if_false, if_true)` where `which` is known, or of two numbers."""
    if len(symbols) != 3:
        return None
    which, if_false, if_true = (_as_choice(x) for x in symbols)
    if isinstance(which, Number) and which.value.dtype == bool:
        return if_true if which.value else if_false
    if not isinstance(which, Choice):
        return None
    condition = as_formula(which)
    numbers = []
    for symbol in (if_true, if_false):
        if not isinstance(symbol, Choice | Number):
            return None
        for number in _numbers(symbol):
            if number not in numbers:
                numbers.append(number)
    if len(numbers) > 2 or any(x != x for x in numbers):  # NaN equals no number
        return None
    first = numbers[0]
    yes = both(condition, _is_number(if_true, first))
    no = both(negate(condition), _is_number(if_false, first))
    return Choice(either(yes, no), first, numbers[-1])


def _numbers(symbol: Choice | Number) -> list[Any]:
    return [symbol.value] if isinstance(symbol, Number) else [symbol.yes, symbol.no]


def _is_number(symbol: Choice | Number, number: Any) -> Formula:
    """Return the condition under which a symbol is `number`."""
    if isinstance(symbol, Number):
        return Known(bool(symbol.value == number))
    if symbol.yes == symbol.no:
        return Known(bool(symbol.yes == number))
    return symbol.condition if symbol.yes == number else negate(symbol.condition)


def _of_choices(eqn: Any, symbols: list[Any]) -> Symbol | None:
    """Return an operation on choices, if its result is again one of two numbers."""
    choices = list(dict.fromkeys(x for x in symbols if isinstance(x, Choice)))
    if len(choices) not in (1, 2):
        return None
    results = {}  # by the branches that the choices take
    for branches in itertools.product((True, False), repeat=len(choices)):
        taken = dict(zip(choices, branches, strict=True))
        numbers = []
        for symbol in symbols:
            if isinstance(symbol, Number):
                numbers.append(symbol.value)
            else:
                numbers.append(symbol.yes if taken[symbol] else symbol.no)
        results[branches] = compute(eqn, [np.asarray(x)[()] for x in numbers])
        if results[branches] is None:
            return None
    for branches, result in results.items():
        other, *rest = [x for key, x in results.items() if key != branches]
        if all(x == other for x in rest):  # these branches alone differ, or none
            if result == other:
                return Number(result)
            parts = []
            for choice, is_taken in zip(choices, branches, strict=True):
                parts.append(choice.condition if is_taken else negate(choice.condition))
            return Choice(both(*parts), result, other)
    return None
