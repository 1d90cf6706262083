"""Recognise a softmax over the keys, whatever follows it before the second product.

This is step (2) of recognise.py. From the operand of the second product inward:

  (a) Take off factors, zeros and selections, until the rest is (b), (c) or (d) of softmax.py.
"""

from __future__ import annotations

import dataclasses

from memeff.rewrite.axes import (
    ELEMENTWISE,
    MOVES,
    Element,
    Index,
    Letter,
    NoAttention,
    NoMatch,
    chain,
    known_number,
    operands_of,
    values_before,
)
from memeff.rewrite.graph import Value
from memeff.rewrite.no_key import RowTest, read_test_of_logits, read_test_of_sum
from memeff.rewrite.softmax import (
    MOST_STEPS,
    Outside,
    Softmax,
    softmax_of_exponentials,
    softmax_of_quotient,
    subtracts_finite_maximum,
)
from memeff.rewrite.softmax_sums import (
    depends,
    exponent,
    factors_of,
    is_outer_product,
    reciprocal,
    selected_rows,
    unguarded,
    zeroed,
    zeroed_product,
)

NEAR = 100  # values before a product among which its exponential is sought


def may_be_softmax(value: Value) -> bool:
    """Return True if an exponential is among the few equations before a value."""

    def is_mapped(x: Value) -> bool:
        return x.op in ELEMENTWISE | MOVES or is_outer_product(x)

    return any(x.op in ("exp", "exp2", "pow") for x in values_before(value, NEAR, is_mapped))


def find_softmax(value: Value, index: Index, keys: tuple[Letter, ...]) -> Softmax:
    """Return the softmax over `keys` that a value is, up to what `Outside` can say."""
    softmax = _find_softmax(value, index, keys)
    return dataclasses.replace(softmax, outside=_with_empty_rows(softmax, keys))


def _with_empty_rows(softmax: Softmax, keys: tuple[Letter, ...]) -> Outside:
    """Return what follows a softmax, with `empty_is_zero` in the place of selections that say it.

    Such a selection tests the logits, as in where(isneginf(max(s)), 0, p). The factors within it
    must be known numbers, because 0 times NaN or infinity is NaN.
    """
    outside = softmax.outside
    factors = []
    for operation, element in reversed(outside.factors):  # the innermost first
        test = None
        if operation in ("keep", "drop"):
            test = _test_of_rows(element, softmax, keys)
        if test is not None and all(known_number(x[0]) is not None for _, x in factors):
            sets_zero = operation == "drop"  # the result of the test in rows that become 0
            if test.if_hidden == sets_zero:
                nan_is_zero = outside.nan_is_zero or test.if_nan == sets_zero
                outside = dataclasses.replace(outside, empty_is_zero=True, nan_is_zero=nan_is_zero)
                continue
        factors.insert(0, (operation, element))
    return dataclasses.replace(outside, factors=tuple(factors))


def _test_of_rows(rows: Element, softmax: Softmax, keys: tuple[Letter, ...]) -> RowTest | None:
    """Return what a condition of rows is if all logits are -inf, and if one of them is NaN.

    Return None if it is not the opposite for all other rows.
    """
    test = read_test_of_logits(rows, softmax.logits, keys)
    if test is not None or softmax.fraction is None or softmax.shown_in_sum:
        return test
    test = read_test_of_sum(rows, softmax.fraction[1])
    if test is None or subtracts_finite_maximum(softmax, keys):
        return test
    return RowTest(test.if_nan, test.if_nan)  # -inf - -inf is NaN, so the sum is NaN and not 0


def _find_softmax(value: Value, index: Index, keys: tuple[Letter, ...]) -> Softmax:
    """Return the softmax over `keys` with all selections of rows: (a)."""
    outside = Outside()
    for _ in range(MOST_STEPS):
        element = chain(value, index)[-1]
        softmax = _as_softmax(element, keys, outside)
        if softmax is not None:
            return softmax
        (value, index), outside = _without_operation(element, keys, outside)
    raise _stop(value)


def _as_softmax(element: Element, keys: tuple[Letter, ...], outside: Outside) -> Softmax | None:
    """Return the softmax that an element is, without an operation that follows: (b), (c) or (d)."""
    if exponent(element) is not None:
        return softmax_of_exponentials(element, keys, outside)
    value, index = element
    if value.op == "div":
        numerator, denominator = operands_of(value, index)
        if not depends(denominator, keys):
            return softmax_of_quotient(numerator, denominator, keys, outside)
        if exponent(chain(*numerator)[-1]) is None:
            raise NoAttention("a quotient")
        raise NoMatch(
            "exponentials are divided by something that depends on the keys, as where "
            "the product sums over another axis than the softmax"
        )
    if _is_product(value):
        factor, rest = _factor_and_rest(element, keys)
        total = reciprocal(factor)
        return None if total is None else softmax_of_quotient(rest, total, keys, outside)
    return None


def _without_operation(
    element: Element, keys: tuple[Letter, ...], outside: Outside
) -> tuple[Element, Outside]:
    """Take the last operation off an element. Return what it was applied to, and `outside` with it.

    It is a factor of rows, a factor that is 0 or one number, or a selection.
    """
    value, index = element
    if value.op == "div":
        numerator, denominator = operands_of(value, index)
        return numerator, outside.times("div", denominator)
    if _is_product(value):
        factor, rest = _factor_and_rest(element, keys)
        if not depends(factor, keys):
            return rest, outside.times("mul", factor)
        inner, formula, number = zeroed_product(factor, rest)
        return inner, outside.multiplying(formula, number)
    if value.op != "select_n":
        raise _stop(value)
    guarded = unguarded(value, index)
    if guarded is not None:
        inner, is_nan = guarded
        nan_is_zero = outside.nan_is_zero or is_nan
        return inner, dataclasses.replace(outside, nan_is_zero=nan_is_zero, is_guarded=True)
    selection = selected_rows(value, index, keys)
    if selection is not None:
        inner, operation, rows = selection
        return inner, outside.selecting_rows(operation, rows)
    inner, formula, _ = zeroed(value, index)
    return inner, outside.selecting(formula)


def _is_product(value: Value) -> bool:
    """Return True for a product of two arrays that sums nothing."""
    return value.op == "mul" or is_outer_product(value)


def _factor_and_rest(product: Element, keys: tuple[Letter, ...]) -> tuple[Element, Element]:
    """Return the factors of a product, first the one that does not depend on the keys, if any."""
    first, second = factors_of(*product)
    return (second, first) if depends(first, keys) else (first, second)


def _stop(value: Value) -> NoAttention:
    """Return the reason why a search ends at a value."""
    stop = f"`{value.op}`" if value.op else "an input"
    return NoAttention(f"the search stops at {stop}")
