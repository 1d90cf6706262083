"""Take the logits apart: masks, biases, scale and soft cap around the product, or a score function.

The walk goes from the logits s inward to the product. What cannot be named stays a score function,
which computes exactly what the program computes. Then empty_rows.py finds the form that keeps the
meaning of rows that see no key.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from memeff.rewrite.axes import (
    Element,
    NoMatch,
    is_move,
    known_number,
    maker_of,
    operands_of,
    sources,
    take_factor,
)
from memeff.rewrite.empty_rows import with_meaning_of_empty_rows, with_sink, with_zeros
from memeff.rewrite.graph import Equation, Value
from memeff.rewrite.random_bits import is_random
from memeff.rewrite.reader import Reader, letters_of
from memeff.rewrite.recognise import Match
from memeff.rewrite.symbols import Choice, Number, as_formula, both, negate
from memeff.rewrite.terms import (
    HIDDEN,
    LARGEST_SHIFT,
    BiasTerm,
    Core,
    Layer,
    Layers,
    Logits,
    MaskTerm,
    Scaling,
)


class Dependence:
    """Say which values, between two products, are computed from the first."""

    def __init__(self, first: Equation, second: Equation):
        self._values = set(first.outputs)
        end = second.number if second.graph is first.graph else None
        for equation in first.graph.equations[first.number : end]:
            if not self._values.isdisjoint(equation.inputs):
                self._values.update(equation.outputs)

    def __call__(self, value: Value) -> bool:
        return value in self._values


def take_apart(match: Match, reader: Reader, depends: Dependence) -> Logits:
    """Return the logits of a match in memeff's terms."""
    layers = _Walk(match, reader, depends).layers()
    softmax = match.softmax
    dropout = [x for x in softmax.outside.shown if is_random(x)]
    shown = [x for x in softmax.outside.shown if x not in dropout]
    if len(dropout) > 1:
        raise NoMatch("dropout of the probabilities, twice")
    if softmax.sink is not None:
        logits = with_sink(match, layers, both(*shown))
    elif shown or softmax.shown_in_sum:
        logits = with_zeros(match, layers, both(*shown))
    else:
        logits = with_meaning_of_empty_rows(match, layers)
    if not dropout:
        return logits
    exact = logits.exact
    if exact is not None:
        exact = dataclasses.replace(exact, dropout=dropout[0])
    return dataclasses.replace(logits, exact=exact, dropout=dropout[0])


def is_product_of_more(core: Core, dots: Value, depends: Dependence) -> bool:
    """Return True if a core multiplies more than the product: perhaps a number that hides."""
    value = core.element[0]
    is_product = core.factor != 1
    while value is not dots:
        inputs = [x for x in maker_of(value).inputs if depends(x)]
        is_product |= value.op in ("mul", "div")
        if len(inputs) != 1 or not (is_move(value) or value.op in ("mul", "div", "neg")):
            return is_product
        (value,) = inputs
    return False


class _Walk:
    """Walk from the logits inward to the product."""

    def __init__(self, match: Match, reader: Reader, depends: Dependence):
        self.match = match
        self.reader = reader
        self.depends = depends
        self.value, self.index = match.softmax.logits
        self.factor = match.softmax.base
        self.casts: list[tuple[Any, float]] = []  # dtypes outside, with the factor outside of each
        self.taken: list[Layer] = []

    def layers(self) -> Layers:
        """Return the terms, the outermost first, and what is within them."""
        while True:
            core = Core((self.value, self.index), self.factor)
            scaling = self._scaling(core)
            if scaling is not None:
                return Layers(self.taken, scaling)
            if not self._step():
                return Layers(self.taken, core)

    def _step(self) -> bool:
        """Take off one equation: a term, a factor or a move. Return False if none can be."""
        value = self.value
        equation = value.maker
        inputs = None if equation is None else sources(equation, self.index)
        if equation is None or inputs is None:
            return False
        if is_move(value):
            self.casts.append((value.dtype, self.factor))
            self.value, self.index = inputs[0]
            return True
        inner = [x for x in inputs if self.depends(x[0])]
        if len(inner) != 1:
            return False
        independent = [x for x in inputs if not self.depends(x[0])]
        if value.op == "select_n" and len(inputs) == 3 and inner[0] is not inputs[0]:
            return self._mask(inputs, inner[0])
        if value.op in ("add", "sub"):
            return self._bias(value, inputs, inner[0], independent[0])
        if value.op == "neg":
            return self._enter(inner[0], -self.factor)
        multiple = take_factor((value, self.index), self.factor)
        return multiple is not None and self._enter(*multiple)

    def _enter(self, element: Element, factor: float) -> bool:
        self.value, self.index = element
        self.factor = factor
        return True

    def _mask(self, inputs: list[Element], inner: Element) -> bool:
        """Take off a selection between the logits and a number."""
        which, if_false, if_true = inputs
        other = if_false if inner is if_true else if_true
        number = known_number(other[0])
        if number is None or which[0].dtype != bool:
            return False
        low = float(number) * self.factor
        symbol = self.reader.read(*which)
        if not self._hides(low, other[0]) or symbol is None:
            return False
        condition = as_formula(symbol)
        if inner is if_false:
            condition = negate(condition)
        outside = Core((self.value, self.index), self.factor)
        self.taken.append(Layer(MaskTerm(condition, self._after_casts(low), False), outside))
        return self._enter(inner, self.factor)

    def _hides(self, low: float, value: Value) -> bool:
        """Return True if a logit of this number hides its key."""
        if str(value.dtype) == "float16":  # its lowest number is -65504
            return low <= -6e4
        return low <= HIDDEN

    def _after_casts(self, low: float) -> float:
        """Return a number that hides as the casts outside leave it: -inf if one cannot hold it."""
        for dtype, factor in self.casts:
            with np.errstate(over="ignore"):
                if np.isinf(np.asarray(low / factor).astype(dtype)):
                    return -np.inf
        return low

    def _bias(self, value: Value, inputs: list[Element], inner: Element, other: Element) -> bool:
        """Take off the terms that an equation adds to the logits, or subtracts from them."""
        outside = Core((self.value, self.index), self.factor)
        factor = self.factor
        inner_factor = self.factor
        if value.op == "sub":
            if inner is inputs[0]:
                factor = -factor
            else:
                inner_factor = -inner_factor
        for part, sign in self._parts(other):
            bias = BiasTerm(part, sign * factor, other)
            term = self._term(bias)
            if term is not None:
                self.taken.append(Layer(term, outside, bias))
        return self._enter(inner, inner_factor)

    def _parts(self, element: Element) -> list[tuple[Element, int]]:
        """Return the terms of a sum over pairs, with their signs."""
        value, index = element
        while is_move(value) and value.op not in ("slice", "dynamic_slice"):
            inputs = sources(maker_of(value), index)
            if inputs is None:
                break
            value, index = inputs[0]
        if value.op not in ("add", "sub") or not self.match.over_pairs(letters_of(value, index)):
            return [(element, 1)]
        parts = []
        for position, x in enumerate(operands_of(value, index)):
            outer_sign = -1 if value.op == "sub" and position else 1
            for part, sign in self._parts(x):
                parts.append((part, outer_sign * sign))
        return parts

    def _term(self, bias: BiasTerm) -> MaskTerm | BiasTerm | None:
        """Return a term that is added as a mask or a bias; None if it changes nothing."""
        element, factor = bias.element, bias.factor
        symbol = self.reader.read(*element)
        if isinstance(symbol, Number):
            number = float(symbol.value) * factor
            # A sink is no part of the logits, so a number that is added to these counts beside it.
            largest = LARGEST_SHIFT if self.match.softmax.sink is None else 0
            if abs(number) > largest:
                return bias
            self._lower_masks(number)
            return None
        if isinstance(symbol, Choice):
            yes = float(symbol.yes) * factor
            no = float(symbol.no) * factor
            if yes == 0 and self._hides(no, element[0]):
                return MaskTerm(symbol.condition, self._after_casts(no), True)
            if no == 0 and self._hides(yes, element[0]):
                return MaskTerm(negate(symbol.condition), self._after_casts(yes), True)
        return bias

    def _lower_masks(self, number: float) -> None:
        """Lower what the masks outside put in, because logits within them lack this number."""
        for n, layer in enumerate(self.taken):
            term = layer.term
            if isinstance(term, MaskTerm) and not term.is_added:
                term = dataclasses.replace(term, low=term.low - number)
                self.taken[n] = dataclasses.replace(layer, term=term)

    def _scaling(self, core: Core) -> Scaling | None:
        """Return the scale and soft cap if nothing else is left of the logits."""
        chain = self._scale_of(core)
        if chain is None:
            return None
        factor, scales, (value, index) = chain
        if value is self.match.dots[0]:
            return Scaling(factor, scales)
        if value.op != "tanh" or scales or factor <= 0:
            return None
        inside = self._scale_of(Core(operands_of(value, index)[0], factor))
        if inside is None or inside[2][0] is not self.match.dots[0]:
            return None
        return Scaling(inside[0], inside[1], soft_cap=factor)

    def _scale_of(self, core: Core) -> Any:
        """Return the factor, the traced scalars and the element that a core multiplies."""
        value, index = core.element
        factor = core.factor
        scales: list[tuple[str, Element]] = []
        while value is not self.match.dots[0] and value.maker is not None:
            inputs = sources(value.maker, index)
            if inputs is None:
                return None
            if is_move(value):
                value, index = inputs[0]
                continue
            if value.op == "neg":
                factor = -factor
                value, index = inputs[0]
                continue
            multiple = take_factor((value, index), factor)
            if multiple is not None:
                (value, index), factor = multiple
                continue
            inner = [x for x in inputs if self.depends(x[0])]
            if value.op not in ("mul", "div") or len(inner) != 1:
                break
            (other,) = [x for x in inputs if x is not inner[0]]
            if value.op == "div" and inner[0] is not inputs[0]:
                return None
            if letters_of(*other):
                break
            scales.append((value.op, other))
            value, index = inner[0]
        return factor, tuple(scales), (value, index)
