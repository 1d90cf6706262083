"""Recognise a softmax over the keys, once what follows it is taken off (softmax_search.py: (a)).

With e = base ** (s - shift), where the shift is the same for all keys, it is one of

  (b) e / total or e * (1 / total), where total is the sum of e over the keys.
  (c) exp(s - lse), where lse is the logarithm of such a sum.
  (d) e alone, if the result of the second product is divided by the sum.

The sum may also have the exponential of a sink: see sinks.py.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import NamedTuple

from memeff.rewrite.axes import (
    ELEMENTWISE,
    MOVES,
    RESHAPES,
    Element,
    Index,
    Letter,
    NoAttention,
    NoMatch,
    chain,
    fit,
    is_cast,
    is_nonzero,
    known_number,
    maker_of,
    operands_of,
    origin,
    regroup,
    take_factor,
    values_before,
)
from memeff.rewrite.graph import Equation, Graph, Value
from memeff.rewrite.no_key import (
    MOST_EQUATIONS,
    guarded_sum,
    subtracts_maximum,
)
from memeff.rewrite.sinks import Column, find_column, sink_of, split_column
from memeff.rewrite.softmax_sums import (
    depends,
    exponent,
    is_zeroing,
    reciprocal,
    shown_in_sum,
    sums_keys,
    zeroed,
)
from memeff.rewrite.symbols import Formula

MOST_STEPS = 400  # equations between the two products of attention
NO_SOFTMAX = "no softmax"
GUARDED_SUM = "a small sum is replaced, and perhaps not only in rows that see no key"


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Logits `s`, whose softmax the probabilities are, and what follows the softmax."""

    logits: Element
    base: float  # e = base ** s, given as log(base)
    outside: Outside
    shown_in_sum: tuple[Formula, ...] = ()  # only pairs for which these are true are summed
    # e, if the division follows the second product, and the letters over which it is summed
    unnormalised: tuple[Element, tuple[Letter, ...]] | None = None
    # The logarithm of the sum is added to the maximum. Beside a maximum of -1e9 it is lost, so a
    # row that sees no key gives the sum of the values instead of their mean.
    loses_log: bool = False
    sink: Element | None = None  # a logit beside those of the keys
    fraction: tuple[Element, Element] | None = None  # e and sum(e), where e has no zeros


@dataclasses.dataclass(frozen=True)
class Outside:
    """The operations between the softmax and the second product."""

    # From the outermost inward: ("mul" or "div", a factor of each row), or a condition of rows with
    # "keep" (rows for which it is false are set to 0) or "drop" (rows for which it is true are).
    factors: tuple[tuple[str, Element], ...] = ()
    shown: tuple[Formula, ...] = ()  # other probabilities are set to 0
    number: float = 1.0  # by which probabilities are multiplied
    selected: tuple[Formula, ...] = ()  # those of `shown` that also make 0 of NaN
    multiplied: tuple[Formula, ...] = ()  # those that are factors, of which XLA may make selections
    nan_is_zero: bool = False  # probabilities that are NaN are set to 0
    is_guarded: bool = False  # probabilities that are NaN or infinite are replaced
    empty_is_zero: bool = False  # rows whose logits are all -inf are 0
    sum_is_guarded: bool = False  # rows whose exponentials are all 0 are 0

    def times(self, operation: str, element: Element) -> Outside:
        """Return this with one more factor."""
        if self.is_guarded and not is_nonzero(known_number(element[0])):
            raise NoMatch("NaN or infinity is replaced after a factor that may make it")
        return dataclasses.replace(self, factors=(*self.factors, (operation, element)))

    def selecting_rows(self, operation: str, rows: Element) -> Outside:
        """Return this with one more selection of rows: "keep" or "drop"."""
        return dataclasses.replace(self, factors=(*self.factors, (operation, rows)))

    def showing(self, formula: Formula, number: float) -> Outside:
        """Return this with one more condition and a number."""
        shown = (*self.shown, formula)
        return dataclasses.replace(self, shown=shown, number=self.number * number)

    def multiplying(self, formula: Formula, number: float) -> Outside:
        """Return this with one more condition, by which probabilities are multiplied."""
        shown = self.showing(formula, number)
        return dataclasses.replace(shown, multiplied=(*self.multiplied, formula))

    def selecting(self, formula: Formula) -> Outside:
        """Return this with one more condition, whose selection follows the division."""
        return dataclasses.replace(self.showing(formula, 1.0), selected=(*self.selected, formula))


def softmax_of_quotient(
    numerator: Element, denominator: Element, keys: tuple[Letter, ...], outside: Outside
) -> Softmax | None:
    """Return the softmax that a quotient is; None if it divides by something else than the sum."""
    total = guarded_sum(denominator)
    if total is not None:
        softmax = softmax_of_quotient(numerator, total, keys, outside)
        return None if softmax is None else _with_guarded_sum(softmax, denominator, keys)
    forms = chain(*numerator)
    while is_zeroing(forms[-1][0]):
        try:
            terms, formula, number = zeroed(*forms[-1])
        except NoAttention:
            break
        outside = outside.showing(formula, number)
        forms.extend(chain(*terms))
    column = find_column(forms[-1][1], keys)
    if column is not None:
        return _with_column(forms[-1][0], denominator, column, outside)
    shown = shown_in_sum(denominator, forms, keys)
    if shown is None:
        return _with_added_sink(forms[-1], denominator, keys, outside)
    if exponent(forms[-1]) is None:
        raise NoAttention("a quotient by a sum")
    softmax = _softmax_of_terms(forms[-1], keys, outside)
    fraction = forms[-1], denominator
    return dataclasses.replace(softmax, shown_in_sum=shown, fraction=fraction)


def _with_guarded_sum(softmax: Softmax, guard: Element, keys: tuple[Letter, ...]) -> Softmax:
    """Return a softmax whose sum is replaced if it is 0, or too small, as `guard` does.

    Such a row sees no key, because the maximum has an exponential of 1, unless the maximum is that
    of a hidden key. If the maximum of -inf is not replaced, the sum is NaN, and stays NaN.
    """
    is_finite = subtracts_finite_maximum(softmax, keys)
    may_be_small = not is_finite or chain(*guard)[-1][0].op == "max"
    if softmax.shown_in_sum and may_be_small:
        raise NoMatch(GUARDED_SUM)
    outside = dataclasses.replace(
        softmax.outside, empty_is_zero=is_finite, sum_is_guarded=is_finite
    )
    return dataclasses.replace(softmax, outside=outside)


def subtracts_finite_maximum(softmax: Softmax, keys: tuple[Letter, ...]) -> bool:
    """Return True if a finite number is subtracted from logits that are all -inf.

    Refuse programs that subtract something else than the maximum from other logits.
    """
    is_finite = None
    if softmax.fraction is not None:
        exponential = exponent(softmax.fraction[0])
        assert exponential is not None
        _, shifts = _shifts(exponential[0], keys)
        if len(shifts) == 1:
            is_finite = subtracts_maximum(shifts[0].element, softmax.logits, keys)
    if is_finite is None:
        raise NoMatch(GUARDED_SUM)
    return is_finite


def _with_column(
    terms: Value, denominator: Element, column: Column, outside: Outside
) -> Softmax | None:
    """Return the softmax of keys and a sink whose exponentials are `terms`; None if it is none."""
    whole = terms, column.index
    if exponent(whole) is None or shown_in_sum(denominator, [whole], (column.letter,)) != ():
        return None
    return _without_column(_softmax_of_terms(whole, (column.letter,), outside), column)


def _without_column(softmax: Softmax, column: Column) -> Softmax:
    """Return a softmax of keys and one more column as that of the keys beside a sink."""
    logits, sink = split_column(softmax.logits, column)
    return dataclasses.replace(softmax, logits=logits, sink=sink)


def _with_added_sink(
    terms: Element, denominator: Element, keys: tuple[Letter, ...], outside: Outside
) -> Softmax | None:
    """Return the softmax of a quotient by a sum and exp(sink); None if it is none."""
    total, index = chain(*denominator)[-1]
    exponential = exponent(terms)
    if total.op != "add" or exponential is None:
        return None
    power, base = exponential
    for part, extra in itertools.permutations(operands_of(total, index)):
        if shown_in_sum(part, [terms], keys) != ():
            continue
        logits, shifts = _shifts(power, keys)
        softmax = _softmax_of_terms(terms, keys, outside)
        if chain(*softmax.logits)[-1] != logits or softmax.base != base or len(shifts) > 1:
            return None
        sink = sink_of(extra, base, shifts[0].element if shifts else None)
        return None if sink is None else dataclasses.replace(softmax, sink=sink)
    return None


def _softmax_of_terms(terms: Element, keys: tuple[Letter, ...], outside: Outside) -> Softmax:
    """Return the softmax of which `terms` are the exponentials."""
    exponential = exponent(terms)
    assert exponential is not None
    power, base = exponential
    logits, factor = _without_shift(power, keys)
    return Softmax(logits, base * factor, outside)


def softmax_of_exponentials(terms: Element, keys: tuple[Letter, ...], outside: Outside) -> Softmax:
    """Return the softmax of exponentials that no sum divides before the product: (c) or (d)."""
    column = find_column(terms[1], keys)
    if column is not None:
        whole = terms[0], column.index
        return _without_column(softmax_of_exponentials(whole, (column.letter,), outside), column)
    exponential = exponent(terms)
    assert exponential is not None
    power, base = exponential
    logits, shifts = _shifts(power, keys)
    logs = [shift for shift in shifts if chain(*shift.element)[-1][0].op == "log"]
    if not logs:
        return _unnormalised(terms, keys, outside)
    if base != 1 or len(logs) != 1:
        raise NoAttention("exponentials")
    (log,) = logs
    rest = [shift.element for shift in shifts if shift is not log]
    total = chain(*operands_of(*chain(*log.element)[-1])[0])[-1]
    if _is_sum_of(total, logits, rest, keys):
        return Softmax(logits, 1.0, outside, loses_log=log.is_added)
    if total[0].op == "add" and len(rest) <= 1:
        for part, extra in itertools.permutations(operands_of(*total)):
            if _is_sum_of(part, logits, rest, keys):
                sink = sink_of(extra, base, rest[0] if rest else None)
                if sink is not None:
                    return Softmax(logits, 1.0, outside, sink=sink)
    raise NoMatch("exp(s - x) where x is not the logarithm of the sum of exp(s) over the keys")


def _unnormalised(terms: Element, keys: tuple[Letter, ...], outside: Outside) -> Softmax:
    """Return the softmax of exponentials whose division must follow the second product: (d)."""
    if outside.nan_is_zero:
        raise NoMatch("NaN becomes 0 in the exponentials, but not in their sum")
    if any(operation in ("keep", "drop") for operation, _ in outside.factors):
        raise NoMatch("whole rows of the exponentials are set to 0 by a selection")
    # The division follows the selections, and makes NaN of 0 / 0.
    softmax = _softmax_of_terms(terms, keys, dataclasses.replace(outside, selected=()))
    return dataclasses.replace(softmax, unnormalised=(terms, keys))


class Shift(NamedTuple):
    """A term that is subtracted from the logits and does not depend on the keys."""

    element: Element
    is_added: bool  # to another shift, before both are subtracted


def _shifts(element: Element, keys: tuple[Letter, ...]) -> tuple[Element, list[Shift]]:
    """Return s of s - a - (b + c), and the shifts a, b and c.

    The shifts keep their casts, because exp makes the rounding of a maximum large.
    """
    shifts: list[Shift] = []
    element = chain(*element)[-1]
    while element[0].op == "sub":
        logits, subtracted = operands_of(*element)
        if depends(subtracted, keys):
            break
        waiting = [Shift(subtracted, is_added=False)]
        while waiting:
            shift = waiting.pop()
            if len(shifts) + len(waiting) > MOST_STEPS:
                raise NoMatch(f"a sum of more than {MOST_STEPS} terms is subtracted from logits")
            value, index = chain(*shift.element)[-1]
            if value.op == "add":
                waiting.extend(Shift(x, is_added=True) for x in operands_of(value, index))
            else:
                shifts.append(shift)
        element = chain(*logits)[-1]
    return element, shifts


def _is_sum_of(
    total: Element, logits: Element, shifts: list[Element], keys: tuple[Letter, ...]
) -> bool:
    """Return True for sum(exp(s - a)) over the keys, where `shifts` are a."""
    value, index = chain(*total)[-1]
    if value.op == "abs":
        value, index = chain(*operands_of(value, index)[0])[-1]
    if value.op != "reduce_sum":
        return False
    axes = maker_of(value).params["axes"]
    summed = maker_of(value).inputs[0]
    while is_cast(summed):
        summed = maker_of(summed).inputs[0]
    if summed.op != "exp":
        return False
    term = maker_of(summed).inputs[0]
    subtracted = []
    while term is not logits[0] and (is_cast(term) or term.op == "sub"):
        if term.op == "sub":
            subtracted.append(operands_of(term, logits[1])[1])
        term = maker_of(term).inputs[0]
    if term is not logits[0] or not sums_keys(logits[1], axes, index, keys):
        return False
    return collections.Counter(map(origin, subtracted)) == collections.Counter(map(origin, shifts))


def division_after(graph: Graph, result: Element, softmax: Softmax) -> tuple[Element, Softmax]:
    """Return the quotient of the second product by the sum of the exponentials: (d).

    The sum may have the exponential of a sink, which the softmax that is returned has then too.
    """
    value, index = result
    for _ in range(MOST_STEPS):
        consumers = graph.consumers.get(value, [])
        if len(consumers) != 1:
            break
        (equation,) = consumers
        moved = _index_after_move(equation, index)
        if moved is None:
            total = _divisor(equation, value, index)
            divided = None if total is None else _with_division(softmax, total)
            if divided is None:
                break
            return (equation.outputs[0], index), divided
        value, index = equation.outputs[0], moved
    raise NoMatch("exponentials are not divided by their sum over the keys, or not by that alone")


def _index_after_move(equation: Equation, index: Index) -> Index | None:
    """Return the index that an element has after a cast or a move; None for other equations."""
    output = equation.outputs[0]
    if is_cast(output):
        return index
    if output.op == "transpose":
        return tuple(index[d] for d in equation.params["permutation"])
    return regroup(index, output.shape) if output.op in RESHAPES else None


def _divisor(equation: Equation, value: Value, index: Index) -> Element | None:
    """Return x if an equation computes value / x or value * (1 / x); None for other equations."""
    name = equation.eqn.primitive.name
    if name not in ("div", "mul") or equation.outputs[0].shape != value.shape:
        return None
    factors = [(x, fit(index, x)) for x in equation.inputs if x is not value]
    if not factors:
        return None
    if name == "mul":
        return reciprocal(factors[0])
    return factors[0] if equation.inputs[0] is value else None


def _with_division(softmax: Softmax, total: Element) -> Softmax | None:
    """Return the softmax of exponentials divided by `total`; None if that is not their sum."""
    assert softmax.unnormalised is not None
    terms, keys = softmax.unnormalised
    guarded = guarded_sum(total)
    shown = shown_in_sum(guarded or total, chain(*terms), keys)
    if shown is None:
        if softmax.sink is not None:
            return None
        return _with_added_sink(terms, total, keys, softmax.outside)
    softmax = dataclasses.replace(softmax, shown_in_sum=shown)
    if guarded is None:
        return softmax
    softmax = dataclasses.replace(softmax, fraction=(chain(*terms)[-1], guarded))
    return _with_guarded_sum(softmax, total, keys)


def _without_shift(element: Element, keys: tuple[Letter, ...]) -> tuple[Element, float]:
    """Return s and c of c * (s - m), where m is made of a maximum and is the same for all keys."""
    logits = element
    factor = 1.0
    product = 1.0
    while True:
        value, index = chain(*element)[-1]
        multiple = take_factor((value, index), product)
        if multiple is not None:
            element, product = multiple
            continue
        if value.op != "sub":
            return logits, factor
        inner, shift = operands_of(value, index)
        if depends(shift, keys) or not _made_of_maximum(shift[0]):
            return logits, factor
        logits = element = inner
        factor = product


def _made_of_maximum(value: Value) -> bool:
    """Return True if a value is computed from a maximum by few element-wise equations."""

    def is_mapped(x: Value) -> bool:
        return x.op in ELEMENTWISE | MOVES

    return any(x.op == "reduce_max" for x in values_before(value, MOST_EQUATIONS, is_mapped))
