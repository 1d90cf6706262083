"""Recognise what is done to exponentials: factors, zeros, and their sum over the keys."""

from __future__ import annotations

import math
from typing import Any

from memeff.rewrite.axes import (
    Element,
    Index,
    Letter,
    NoAttention,
    NoMatch,
    Slice,
    chain,
    expand_all,
    is_cast,
    is_float,
    known_number,
    letters_in,
    maker_of,
    new_index,
    operands_of,
)
from memeff.rewrite.graph import Equation, Value
from memeff.rewrite.reader import Reader, letters_of
from memeff.rewrite.symbols import Choice, Formula, Number, Opaque, as_formula, negate


def exponent(element: Element) -> tuple[Element, float] | None:
    """Return x and log(b) if an element is b ** x; None if it is no exponential."""
    value, index = element
    if value.op in ("exp", "exp2"):
        return operands_of(value, index)[0], 1.0 if value.op == "exp" else math.log(2)
    if value.op == "pow":
        base, power = operands_of(value, index)
        number = known_number(base[0])
        if number is not None and is_float(base[0].dtype) and 0 < number < math.inf:
            return power, math.log(float(number))
    return None


def depends(element: Element, letters: tuple[Letter, ...]) -> bool:
    return bool(letters_of(*element) & set(letters))


def is_outer_product(value: Value) -> bool:
    """Return True for a product of two arrays that sums nothing, as einsum writes it."""
    if value.op != "dot_general":
        return False
    (contracted, _) = maker_of(value).params["dimension_numbers"]
    return not contracted[0] and is_float(value.dtype)


def factors_of(value: Value, index: Index) -> list[Element]:
    """Return the two elements whose product an element is."""
    if value.op == "mul":
        return operands_of(value, index)
    return factors_of_product(maker_of(value), index, ())


def factors_of_product(product: Equation, index: Index, summed: Index) -> list[Element]:
    """Return the two factors of a product, whose result is read at `index`.

    `summed` are the dims over which it is a sum.
    """
    contracted, batch = product.params["dimension_numbers"]
    position = len(batch[0])
    factors = []
    for side, x in enumerate(product.inputs):
        dims: list[Any] = [None] * len(x.shape)
        for d, dim in zip(contracted[side], summed, strict=True):
            dims[d] = dim
        for number, d in enumerate(batch[side]):
            dims[d] = index[number]
        for d, dim in enumerate(dims):
            if dim is None:
                dims[d] = index[position]
                position += 1
        factors.append((x, tuple(dims)))
    return factors


def is_zeroing(value: Value) -> bool:
    """Return True for an equation that may set some elements to 0 and keep the others."""
    return value.op in ("select_n", "mul")


def zeroed(value: Value, index: Index) -> tuple[Element, Formula, float]:
    """Return x, the condition and the number of `condition ? x * number : 0`."""
    if value.op == "mul":
        return zeroed_product(*operands_of(value, index))
    which, *cases = operands_of(value, index)
    if len(cases) != 2:
        raise NoAttention("a selection")
    if_false, if_true = cases
    symbol = Reader().read(*which)
    if isinstance(symbol, Choice | Opaque | Number) and which[0].dtype == bool:
        if known_number(if_false[0]) == 0:
            return if_true, as_formula(symbol), 1.0
        if known_number(if_true[0]) == 0:
            return if_false, negate(as_formula(symbol)), 1.0
    raise NoAttention("a selection")


def selected_rows(
    value: Value, index: Index, keys: tuple[Letter, ...]
) -> tuple[Element, str, Element] | None:
    """Return x, "keep" or "drop", and for which rows, of a selection that sets the rest to 0.

    A row is all keys of one query. Return None for a selection that differs within a row.
    """
    which, *cases = operands_of(value, index)
    if len(cases) != 2 or which[0].dtype != bool or depends(which, keys):
        return None
    if_false, if_true = cases
    if known_number(if_false[0]) == 0:
        return if_true, "keep", which
    return (if_false, "drop", which) if known_number(if_true[0]) == 0 else None


def unguarded(value: Value, index: Index) -> tuple[Element, bool] | None:
    """Return x and True of a selection that replaces NaN in x by 0, and None of other selections.

    Return x and False of a selection that replaces infinity: no probability is infinite.
    """
    which, *cases = operands_of(value, index)
    if len(cases) != 2 or which[0].op not in ("ne", "eq"):
        return None
    kept, replaced = cases
    first, second = (x for x, _ in operands_of(*which))
    if kept[0] is not first:
        return None
    if which[0].op == "ne" and first is second and known_number(replaced[0]) == 0:
        return kept, True
    number = known_number(second)
    is_infinite = which[0].op == "eq" and number is not None and math.isinf(number)
    return (kept, False) if is_infinite else None


def zeroed_product(first: Element, second: Element) -> tuple[Element, Formula, float]:
    """Return x, the condition and the number of x * (condition ? number : 0)."""
    for factor, other in ((first, second), (second, first)):
        symbol = Reader().read(*factor)
        if not isinstance(symbol, Choice):
            continue
        yes, no = float(symbol.yes), float(symbol.no)
        if no == 0:
            return other, symbol.condition, yes
        if yes == 0:
            return other, negate(symbol.condition), no
    raise NoAttention("a multiplication by an array that is not only 0 and one number")


def reciprocal(element: Element) -> Element | None:
    """Return x if the element is 1 / x."""
    value, index = chain(*element)[-1]
    if value.op == "div":
        numerator, denominator = operands_of(value, index)
        return denominator if known_number(numerator[0]) == 1 else None
    if value.op == "integer_pow" and maker_of(value).params["y"] == -1:
        return operands_of(value, index)[0]
    return None


def shown_in_sum(
    total: Element, terms: list[Element], keys: tuple[Letter, ...]
) -> tuple[Formula, ...] | None:
    """Return which terms are summed: (a,) for where(a, e, 0).sum(), and () for e.sum().

    Return None if `total` is no sum of the terms over the keys. `terms` are forms of the same
    terms, some of which may have zeros. Terms with zeros are found first, so that their zeros count
    for both.
    """
    value, index = chain(*total)[-1]
    if value.op != "reduce_sum":
        return None
    equation = maker_of(value)
    summed = equation.inputs[0]
    axes = equation.params["axes"]
    zeros: list[Value] = []
    while True:
        for term, term_index in terms:
            if term is summed and sums_keys(term_index, axes, index, keys):
                elements = [(x, term_index) for x in zeros]
                return _all_shown([*elements, *_zeros_within(term, term_index)])
        if is_cast(summed):
            summed = maker_of(summed).inputs[0]
        elif is_zeroing(summed):
            zeros.append(summed)
            try:
                (summed, _), _, _ = zeroed(summed, new_index(summed.shape))
            except NoMatch:
                return None
        else:
            return None


def _all_shown(zeros: list[Element]) -> tuple[Formula, ...] | None:
    """Return the conditions under which terms are not set to 0; None if they get a factor too."""
    formulas = []
    for element in zeros:
        _, formula, number = zeroed(*element)
        if number != 1:
            return None
        formulas.append(formula)
    return tuple(formulas)


def _zeros_within(value: Value, index: Index) -> list[Element]:
    """Return the elements that set zeros in a term, from outside to the exponential."""
    elements = []
    value, index = chain(value, index)[-1]
    while is_zeroing(value):
        elements.append((value, index))
        element, _, _ = zeroed(value, index)
        value, index = chain(*element)[-1]
    return elements


def sums_keys(term: Index, axes: Any, total: Index, keys: tuple[Letter, ...]) -> bool:
    """Return True if a sum over `axes` of terms at an index is over all keys, and nothing else."""
    if any(isinstance(term[d], Slice) for d in axes):
        return False
    over = letters_in(term[d] for d in axes)
    kept = tuple(dim for d, dim in enumerate(term) if d not in axes)
    same_rows = expand_all(kept) == expand_all(total)
    return same_rows and len(over) == len(keys) and set(over) == set(keys)
