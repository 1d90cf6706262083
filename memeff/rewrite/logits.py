"""Take the logits apart: masks, biases, scale and soft cap around the product, or a score function.

The walk goes from the logits s inward to the product. What cannot be named stays a score function,
which computes exactly what the program computes. A mask may be named only if rows that see no key
keep their meaning:

- Some key is proved to be visible in each row (causal order, windows, a segment's own token).
- All masks replace hidden logits by the same number, so that such a row of the program gives the
  mean of all values, or NaN if that number is -inf. memeff then puts the same into these rows.

Otherwise masks are named for calls in which every row sees a key, and a call in which some row does
not computes all logits as numbers. So it is where a bias or a score function stands within a mask:
it may be lower than the number that hides, as a mask that was added before, and then the hidden
keys are those that count.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from memeff.rewrite.axes import (
    MOVES,
    Element,
    Index,
    Letter,
    NoMatch,
    is_cast,
    known_number,
    sources,
)
from memeff.rewrite.graph import Equation, Value
from memeff.rewrite.random_bits import is_random
from memeff.rewrite.recognise import Match
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
    Number,
    Opaque,
    Or,
    Reader,
    SameIds,
    as_formula,
    both,
    letters_of,
    negate,
)

# A logit of this or less hides its key, because exp(s - m) of it is 0 beside any logit of a model.
# Programs write -1e9 or less; log(2) of it is what exp2 leaves.
HIDDEN = -0.6e9
MEAN = "mean"  # a row that sees no key gives the mean of all values
NAN = "nan"
LARGEST_SHIFT = 1e4  # a constant of all logits that changes them by rounding alone


@dataclasses.dataclass(frozen=True)
class MaskTerm:
    """A condition under which a key is visible, and the number that hides the others."""

    condition: Formula
    low: float
    is_added: bool  # the number is added, and does not replace the logit


@dataclasses.dataclass(frozen=True)
class BiasTerm:
    """An element that is added to the logits, times a factor."""

    element: Element
    factor: float


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The product becomes cap(factor * scale * product), with the traced scalars of `scales`."""

    factor: float
    scales: tuple[tuple[str, Value], ...] = ()  # "mul" or "div", and a scalar
    soft_cap: float | None = None


@dataclasses.dataclass(frozen=True)
class Core:
    """An element of the logits that a score function computes from the product, times a factor."""

    element: Element
    factor: float


@dataclasses.dataclass(frozen=True)
class Logits:
    """The logits in memeff's terms."""

    condition: Formula  # under which a key is visible
    empty_rows: str | None  # MEAN or NAN: what rows give that see no key; None: no row is empty
    biases: tuple[BiasTerm, ...]
    inner: Scaling | Core
    exact: Logits | None = None  # those to use if some row sees no key above `lowest`
    lowest: float = -math.inf
    dropout: Formula | None = None  # under which a probability is kept


@dataclasses.dataclass(frozen=True)
class _Layer:
    """A term, and the logits within it, times a factor."""

    term: MaskTerm | BiasTerm
    outside: Core  # the logits with this term
    as_bias: BiasTerm | None = None  # the same term as a bias, if it is added


class Dependence:
    """Say which values are computed from a product."""

    def __init__(self, first: Equation):
        self.first = first
        self._known: dict[Value, bool] = {first.outputs[0]: True}

    def __call__(self, value: Value) -> bool:
        waiting = [value]
        while waiting:
            x = waiting[-1]
            if x in self._known:
                waiting.pop()
                continue
            maker = x.maker
            if (
                maker is None
                or maker.graph is not self.first.graph
                or maker.number < self.first.number
            ):
                self._known[x] = False
                continue
            unknown = [y for y in maker.inputs if y not in self._known]
            if unknown:
                waiting.extend(unknown)
            else:
                self._known[x] = any(self._known[y] for y in maker.inputs)
        return self._known[value]


def take_apart(match: Match, reader: Reader, depends: Dependence) -> Logits:
    """Return the logits of a match in memeff's terms."""
    layers, inner = _Walk(match, reader, depends).layers()
    softmax = match.softmax
    dropout = [x for x in softmax.outside.shown if is_random(x)]
    shown = [x for x in softmax.outside.shown if x not in dropout]
    if len(dropout) > 1:
        raise NoMatch("dropout of the probabilities, twice")
    if shown or softmax.shown_in_sum:
        logits = _with_zeros(match, layers, inner, both(*shown))
    else:
        logits = _with_meaning_of_empty_rows(match, layers, inner)
    if not dropout:
        return logits
    exact = logits.exact
    if exact is not None:
        exact = dataclasses.replace(exact, dropout=dropout[0])
    return dataclasses.replace(logits, exact=exact, dropout=dropout[0])


class _Walk:
    """Walk from the logits inward to the product."""

    def __init__(self, match: Match, reader: Reader, depends: Dependence):
        self.match = match
        self.reader = reader
        self.depends = depends
        self.value, self.index = match.softmax.logits
        self.factor = match.softmax.base
        self.found: list[_Layer] = []

    def layers(self) -> tuple[list[_Layer], Scaling | Core]:
        """Return the terms, the outermost first, and what is within them."""
        while True:
            here = Core((self.value, self.index), self.factor)
            scaling = self._scaling(here)
            if scaling is not None:
                return self.found, scaling
            if not self._step():
                return self.found, here

    def _step(self) -> bool:
        """Take one term or one move off. Return False where none can be taken."""
        value = self.value
        equation = value.maker
        inputs = None if equation is None else sources(equation, self.index)
        if equation is None or inputs is None:
            return False
        if is_cast(value) or value.op in MOVES:
            self.value, self.index = inputs[0]
            return True
        inner = [x for x in inputs if self.depends(x[0])]
        if len(inner) != 1:
            return False
        others = [x for x in inputs if not self.depends(x[0])]
        if value.op == "select_n" and len(inputs) == 3 and inner[0] is not inputs[0]:
            return self._mask(inputs, inner[0])
        if value.op in ("add", "sub"):
            return self._bias(value, inputs, inner[0], others[0])
        if value.op == "neg":
            return self._enter(inner[0], -self.factor)
        if value.op in ("mul", "div"):
            number = known_number(others[0][0])
            if number is not None and np.isfinite(number) and (value.op == "mul" or number):
                if value.op == "mul":
                    return self._enter(inner[0], self.factor * float(number))
                if inner[0] is inputs[0]:
                    return self._enter(inner[0], self.factor / float(number))
        return False

    def _enter(self, element: Element, factor: float) -> bool:
        self.value, self.index = element
        self.factor = factor
        return True

    def _mask(self, inputs: list[Element], inner: Element) -> bool:
        """Take a selection between the logits and a number off."""
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
        self.found.append(_Layer(MaskTerm(condition, low, False), outside))
        return self._enter(inner, self.factor)

    def _hides(self, low: float, value: Value) -> bool:
        """Return True if a logit of this number hides its key."""
        if str(value.dtype) == "float16":  # its lowest number is -65504
            return low <= -6e4
        return low <= HIDDEN

    def _bias(self, value: Value, inputs: list[Element], inner: Element, other: Element) -> bool:
        """Take a term that is added off."""
        outside = Core((self.value, self.index), self.factor)
        factor = self.factor
        inner_factor = self.factor
        if value.op == "sub":
            if inner is inputs[0]:
                factor = -factor
            else:
                inner_factor = -inner_factor
        for part, sign in self._parts(other):
            term = self._term(part, sign * factor)
            if term is not None:
                self.found.append(_Layer(term, outside, BiasTerm(part, sign * factor)))
        return self._enter(inner, inner_factor)

    def _parts(self, element: Element) -> list[tuple[Element, int]]:
        """Return the terms of a sum over pairs, with their signs."""
        value, index = element
        while is_cast(value) or value.op in MOVES and value.op not in ("slice", "dynamic_slice"):
            assert value.maker is not None
            inputs = sources(value.maker, index)
            if inputs is None:
                break
            value, index = inputs[0]
        if value.op not in ("add", "sub") or not self.match.over_pairs(letters_of(value, index)):
            return [(element, 1)]
        assert value.maker is not None
        inputs = sources(value.maker, index)
        assert inputs is not None
        parts = []
        for position, x in enumerate(inputs):
            outer_sign = -1 if value.op == "sub" and position else 1
            for part, sign in self._parts(x):
                parts.append((part, outer_sign * sign))
        return parts

    def _term(self, element: Element, factor: float) -> MaskTerm | BiasTerm | None:
        """Return a term that is added as a mask or a bias; None if it changes nothing."""
        symbol = self.reader.read(*element)
        if isinstance(symbol, Number):
            if abs(float(symbol.value) * factor) <= LARGEST_SHIFT:
                return None
            return BiasTerm(element, factor)
        if isinstance(symbol, Choice):
            yes = float(symbol.yes) * factor
            no = float(symbol.no) * factor
            if yes == 0 and self._hides(no, element[0]):
                return MaskTerm(symbol.condition, no, True)
            if no == 0 and self._hides(yes, element[0]):
                return MaskTerm(negate(symbol.condition), yes, True)
        return BiasTerm(element, factor)

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
        assert value.maker is not None
        inputs = sources(value.maker, index)
        assert inputs is not None
        inside = self._scale_of(Core(inputs[0], factor))
        if inside is None or inside[2][0] is not self.match.dots[0]:
            return None
        return Scaling(inside[0], inside[1], soft_cap=factor)

    def _scale_of(self, core: Core) -> Any:
        """Return the factor, the traced scalars and the element that a core multiplies."""
        value, index = core.element
        factor = core.factor
        scales: list[tuple[str, Value]] = []
        while value is not self.match.dots[0] and value.maker is not None:
            inputs = sources(value.maker, index)
            if inputs is None:
                return None
            if is_cast(value) or value.op in MOVES:
                value, index = inputs[0]
                continue
            if value.op == "neg":
                factor = -factor
                value, index = inputs[0]
                continue
            inner = [x for x in inputs if self.depends(x[0])]
            if value.op not in ("mul", "div") or len(inner) != 1:
                break
            (other,) = [x for x in inputs if x is not inner[0]]
            number = known_number(other[0])
            if value.op == "div" and inner[0] is not inputs[0]:
                return None
            if number is not None and np.isfinite(number) and (number or value.op == "mul"):
                factor = factor * float(number) if value.op == "mul" else factor / float(number)
            elif not letters_of(*other):
                scales.append((value.op, other[0]))
            else:
                break
            value, index = inner[0]
        return factor, tuple(scales), (value, index)


# ---- Rows that see no key


def _with_meaning_of_empty_rows(
    match: Match, layers: list[_Layer], inner: Scaling | Core
) -> Logits:
    """Return the logits in the form that keeps the meaning of rows that see no key."""
    masks = [x.term for x in layers if isinstance(x.term, MaskTerm)]
    biases = tuple(x.term for x in layers if isinstance(x.term, BiasTerm))
    condition = both(*(x.condition for x in masks))
    may_be_low = _may_be_low(biases, inner)
    if match.softmax.loses_log and may_be_low:
        raise NoMatch(
            "exp(s - logsumexp(s)) loses the logarithm where a bias or a score is very low"
        )
    if condition == Known(True):
        return Logits(condition, None, biases, inner)
    lows = [x.low for x in masks if math.isfinite(x.low)]
    meaning = _meaning_of_empty_rows(layers)
    if not lows or not may_be_low:
        if no_row_is_empty(match, condition):
            return Logits(condition, None, biases, inner)
        if match.softmax.loses_log and meaning != NAN:
            raise NoMatch(
                "exp(s - logsumexp(s)) gives the sum of the values in rows that see no key"
            )
        if meaning is not None:
            return Logits(condition, meaning, biases, inner)
    exact = _without_masks(layers, inner)
    if not match.over_pairs(formula_letters(condition)):
        return exact
    # exp of the distance of a hidden logit to one above `lowest` is 0
    lowest = max(lows, default=-math.inf) / 2
    return Logits(condition, None, biases, inner, exact, lowest)


def _may_be_low(biases: tuple[BiasTerm, ...], inner: Scaling | Core) -> bool:
    """Return True if it is not proved that no bias or score hides keys."""
    return isinstance(inner, Core) or not all(_is_small(x) for x in biases)


def _is_small(bias: BiasTerm) -> bool:
    """Return True for a bias of known numbers that hide no key."""
    symbol = Reader().read(*bias.element)
    numbers = []
    if isinstance(symbol, Choice):
        numbers = [symbol.yes, symbol.no]
    elif isinstance(symbol, Number):
        numbers = [symbol.value]
    return bool(numbers) and all(abs(float(x) * bias.factor) <= LARGEST_SHIFT for x in numbers)


def _with_zeros(
    match: Match, layers: list[_Layer], inner: Scaling | Core, shown: Formula
) -> Logits:
    """Return the logits where probabilities of hidden pairs are set to 0.

    A row that sees no key then gives 0, as in memeff, if all that hides keys also sets zeros. But
    its probabilities are NaN where all its logits are -inf, or where zeros are summed, and only a
    selection makes 0 of NaN.
    """
    masks = [x.term for x in layers if isinstance(x.term, MaskTerm)]
    biases = tuple(x.term for x in layers if isinstance(x.term, BiasTerm))
    before = set(conjuncts(both(*(x.condition for x in masks))))
    after = set(conjuncts(shown))
    summed = set(conjuncts(both(*match.softmax.shown_in_sum)))
    if before | after != before | summed:
        raise NoMatch("a mask after the softmax hides other keys than the mask before it")
    condition = both(shown, *before)
    lows = {x.low for x in masks}
    may_be_low = _may_be_low(biases, inner)
    if may_be_low and any(math.isfinite(x) for x in lows):
        raise NoMatch("a mask after the softmax, where a bias or a score may be as low as the mask")
    if no_row_is_empty(match, condition):
        return Logits(condition, None, biases, inner)
    outside = match.softmax.outside
    selected = set(conjuncts(both(*(x for x in outside.selected if not is_random(x)))))
    is_nan = bool(summed) or lows == {-math.inf}
    is_zero = after <= selected or not summed and -math.inf not in lows
    is_multiplied = not all(is_random(x) for x in outside.multiplied)
    if before <= after and is_nan and not selected and not is_multiplied:
        return Logits(condition, NAN, biases, inner)
    if before <= after and is_zero and not may_be_low:
        return Logits(condition, None, biases, inner)
    raise NoMatch("rows that see no key are 0, or are not, by masks before and after the softmax")


def _without_masks(layers: list[_Layer], inner: Scaling | Core) -> Logits:
    """Return the logits with added masks as biases.

    A mask that replaces logits, and all that is within it, becomes a score function.
    """
    biases: list[BiasTerm] = []
    for layer in layers:
        if isinstance(layer.term, BiasTerm):
            biases.append(layer.term)
        elif layer.as_bias is not None:
            biases.append(layer.as_bias)
        else:
            return Logits(Known(True), None, tuple(biases), layer.outside)
    return Logits(Known(True), None, tuple(biases), inner)


def _meaning_of_empty_rows(layers: list[_Layer]) -> str | None:
    """Return MEAN or NAN if all rows that see no key give the same; None if they may differ."""
    masks = [x.term for x in layers if isinstance(x.term, MaskTerm)]
    lows = {x.low for x in masks}
    if len(lows) != 1:
        return None
    (low,) = lows
    if low == -math.inf:
        return NAN
    if any(isinstance(x.term, BiasTerm) for x in layers):
        return None  # a bias may hide keys too, and a row may then see hidden keys alone
    # A mask that is added leaves the derivative of such a row with respect to the logits.
    return None if any(x.is_added for x in masks) else MEAN


def conjuncts(formula: Formula) -> tuple[Formula, ...]:
    """Return the parts that must all be true."""
    if isinstance(formula, And):
        return formula.parts
    return () if formula == Known(True) else (formula,)


def no_row_is_empty(match: Match, condition: Formula) -> bool:
    """Return True if it is proved that each query sees some key."""
    pairs = Pairs(match)
    low: int | None = None
    high: int | None = None
    only_bounds = True
    shows_diagonal = pairs.T <= pairs.S
    for part in conjuncts(condition):
        bounds = pairs.bounds(part)
        if bounds is None:
            only_bounds = False
            shows_diagonal &= pairs.same_ids_on_diagonal(part)
            continue
        least, most = bounds
        if least is not None:
            low = least if low is None else max(low, least)
        if most is not None:
            high = most if high is None else min(high, most)
    if shows_diagonal and (low or 0) <= 0 <= (0 if high is None else high):
        return True
    first_fits = high is None or high >= 0  # row 0 sees key 0 or a later one
    last_fits = low is None or pairs.T - 1 + low <= pairs.S - 1
    in_order = low is None or high is None or low <= high
    return only_bounds and first_fits and last_fits and in_order


class Pairs:
    """The positions of queries and keys, and what a formula says of them."""

    def __init__(self, match: Match):
        self.query = query_letters(match)
        self.keys = match.keys
        self.T = math.prod(x.size for x in self.query)
        self.S = math.prod(x.size for x in self.keys)
        # T - S
        difference = _positions(self.query).plus(_positions(self.keys), -1)
        self._difference = dict(difference.coefficients)

    def bounds(self, formula: Formula) -> tuple[int | None, int | None] | None:
        """Return (low, high) if the formula says low <= key - query <= high; None if it does not.

        A bound that is None does not exist.
        """
        if isinstance(formula, AtLeastZero | IsZero):
            affine = formula.affine
            terms = dict(affine.coefficients)
            k = affine.constant
            if terms == self._difference:  # query - key + k
                return (k if isinstance(formula, IsZero) else None), k
            if terms == {letter: -c for letter, c in self._difference.items()}:
                return -k, (-k if isinstance(formula, IsZero) else None)
        return None

    def same_ids_on_diagonal(self, formula: Formula) -> bool:
        """Return True if a comparison of ids is true for a query and the key at its position."""
        if not isinstance(formula, SameIds) or self.T != self.S:
            return False
        if len(self.query) != 1 or len(self.keys) != 1:
            return False
        first, second = formula.first, formula.second
        if first.value is not second.value:
            return False
        swap = {self.keys[0]: self.query[0]}
        return _renamed(first.index, swap) == _renamed(second.index, swap)


def _renamed(index: Index, names: dict[Letter, Letter]) -> Any:
    """Return an index with other letters."""
    return tuple(
        tuple(names.get(x, x) for x in dim) if isinstance(dim, tuple) else dim for dim in index
    )


def _positions(letters: tuple[Letter, ...]) -> Affine:
    """Return the position that letters count together."""
    terms = []
    stride = 1
    for letter in reversed(letters):
        terms.append((letter, stride))
        stride *= letter.size
    return Affine(tuple(terms), 0)


def query_letters(match: Match) -> tuple[Letter, ...]:
    """Return the letters of T: of those that only the query has, the longest."""
    candidates = match.query_only
    if not candidates:
        raise NoMatch("one query only, so the logits are no larger than the keys")
    longest = max(x.size for x in candidates)
    last = [x for x in candidates if x.size == longest][-1]
    return (last,)


def formula_letters(formula: Formula) -> set[Letter]:
    """Return the letters on which a formula depends."""
    if isinstance(formula, Leaf):
        return letters_of(formula.element.value, formula.element.index)
    if isinstance(formula, SameIds):
        elements: list[Opaque] = [formula.first, formula.second]
        return set().union(*(letters_of(x.value, x.index) for x in elements))
    if isinstance(formula, Not):
        return formula_letters(formula.part)
    if isinstance(formula, And | Or):
        return set().union(*(formula_letters(x) for x in formula.parts))
    affine = getattr(formula, "affine", None)
    return set() if affine is None else {letter for letter, _ in affine.coefficients}
