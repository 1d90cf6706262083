"""Recognise attention between two products: softmax(logits of query and key) times value.

The algorithm, from the second product backward:

  (1) Each axis of the probabilities gets a letter. The contracted ones are the keys (S).
  (2) The probabilities must be e / sum(e) over S with e = exp(s - m), or exp(s - lse). The shift m
      does not depend on S. The division may follow the second product. Factors that do not depend
      on S move to the output. What sets probabilities to 0 is a mask, or dropout.
  (3) Follow s through element-wise equations to a product of two arrays. The operand whose free
      axes are S is the key, the other one the query.
  (4) Axes that only the query has are T (the longest) and grouped heads. Axes of key or value are
      batch entries and heads.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

from memeff.rewrite.axes import (
    ELEMENTWISE,
    MOVES,
    Index,
    Letter,
    NoMatch,
    Slice,
    expand_all,
    fit,
    known_number,
    letters_in,
    new_index,
    regroup,
    sources,
)
from memeff.rewrite.graph import Equation, Graph, Value
from memeff.rewrite.symbols import (
    Choice,
    Formula,
    Number,
    Opaque,
    Reader,
    as_formula,
    letters_of,
    negate,
)

NEAR = 100  # values before a product among which its exponential is sought
MOST_STEPS = 400  # equations between the two products of attention
NO_SOFTMAX = "no softmax"
Element = tuple[Value, Index]


class NoAttention(NoMatch):
    """The operand of a product is not a softmax, so there is nothing to report."""


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Logits `s`, whose softmax the probabilities are, and what follows the softmax."""

    logits: Element
    base: float  # e = base ** s, given as log(base)
    outside: Outside
    shown_in_sum: tuple[Formula, ...] = ()  # only pairs for which these are true are summed
    unnormalised: Element | None = None  # e, if the division follows the second product
    # The logarithm of the sum is added to the maximum. Beside a maximum of -1e9 it is lost, so a
    # row that sees no key gives the sum of the values instead of their mean.
    loses_log: bool = False


@dataclasses.dataclass(frozen=True)
class Outside:
    """What stands between the softmax and the second product."""

    factors: tuple[tuple[str, Element], ...] = ()  # "mul" or "div", and what does not depend on S
    shown: tuple[Formula, ...] = ()  # other probabilities are set to 0
    number: float = 1.0  # by which probabilities are multiplied
    selected: tuple[Formula, ...] = ()  # those of `shown` that also make a 0 of NaN
    multiplied: tuple[Formula, ...] = ()  # those that may or may not, as XLA likes

    def times(self, operation: str, element: Element) -> Outside:
        """Return this with one more factor."""
        return dataclasses.replace(self, factors=(*self.factors, (operation, element)))

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


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a product, with the letters of its dims; those of H and D are its own."""

    value: Value
    index: Index


@dataclasses.dataclass(frozen=True)
class Match:
    """Two products and the softmax between them."""

    first: Equation
    second: Equation
    result: Value  # what is replaced: the second product, or the quotient after it
    result_index: Index
    dots: Element  # the first product, at the index of the probabilities
    softmax: Softmax
    query: Operand
    key: Operand
    value: Operand
    letters: tuple[Letter, ...]  # of the probabilities, in their order
    keys: tuple[Letter, ...]
    columns: tuple[Letter, ...]  # D

    def over_pairs(self, letters: Any) -> bool:
        """Return True if letters of queries and of keys are among `letters`."""
        return bool(set(letters) & set(self.keys)) and bool(set(letters) & set(self.query_only))

    @property
    def query_only(self) -> tuple[Letter, ...]:
        """Return the letters that neither key nor value has."""
        shared = set(letters_in(self.key.index)) | set(letters_in(self.value.index))
        return tuple(x for x in self.letters if x not in shared)


def is_cast(value: Value) -> bool:
    """Return True for a conversion between floats, or a copy."""
    if value.op == "copy":
        return True
    if value.op != "convert_element_type":
        return False
    assert value.maker is not None
    return _is_float(value.dtype) and _is_float(value.maker.inputs[0].dtype)


def _is_float(dtype: Any) -> bool:
    return str(dtype) in ("float64", "float32", "float16", "bfloat16")


def chain(value: Value, index: Index) -> list[Element]:
    """Return a value and those from which it differs by conversions and moves of elements."""
    elements = [(value, index)]
    while is_cast(value) or value.op in MOVES:
        inputs = sources(_maker(value), index)
        if inputs is None:
            break
        value, index = inputs[0]
        elements.append((value, index))
    return elements


def _maker(value: Value) -> Equation:
    assert value.maker is not None
    return value.maker


def match(graph: Graph, second: Equation, side: int) -> Match:
    """Return the attention whose second product has its probabilities as the operand `side`."""
    (contracted, _) = second.params["dimension_numbers"]
    probabilities = second.inputs[side]
    index = new_index(probabilities.shape)
    if not letters_in(index[d] for d in contracted[side]) or not _may_be_softmax(probabilities):
        raise NoAttention(NO_SOFTMAX)
    while True:  # until no reshape splits a letter any more
        before = expand_all(index)
        keys = tuple(letters_in(index[d] for d in contracted[side]))
        softmax = find_softmax(probabilities, before, keys)
        dots = _find_product(softmax.logits, keys)
        value, columns = _value_operand(second, side, index)
        result = second.outputs[0], _result_index(second, side, index, value)
        if softmax.unnormalised is not None:
            result = _division_after(graph, result, softmax.unnormalised, keys)
        if expand_all(index) == before:
            break
    first = _maker(dots[0])
    if first.params["precision"] != second.params["precision"]:
        raise NoMatch("the two products have different precisions")
    query, key = _operands_of_first(first, dots[1], keys)
    letters = tuple(letters_in(index))
    return Match(first, second, *result, dots, softmax, query, key, value, letters, keys, columns)


def _may_be_softmax(value: Value) -> bool:
    """Return True if an exponential is among the few equations before a value."""
    waiting = collections.deque([value])
    for _ in range(NEAR):
        if not waiting:
            return False
        value = waiting.popleft()
        if value.op in ("exp", "exp2"):
            return True
        is_mapped = value.op in ELEMENTWISE | MOVES or is_outer_product(value)
        if value.maker is not None and is_mapped:
            waiting.extend(value.maker.inputs)
    return False


# ---- (2) The softmax


def find_softmax(value: Value, index: Index, keys: tuple[Letter, ...]) -> Softmax:
    """Return the softmax over `keys` that a value is, up to what `Outside` can say."""
    outside = Outside()
    for _ in range(MOST_STEPS):
        value, index = chain(value, index)[-1]
        if value.op in ("exp", "exp2"):
            return _of_exponential((value, index), keys, outside)
        if value.op == "div":
            numerator, denominator = _inputs(value, index)
            if _depends(denominator, keys):
                if chain(*numerator)[-1][0].op == "exp":
                    raise NoMatch("exponentials are divided by something that depends on the keys")
                raise NoAttention("a quotient")
            softmax = _of_quotient(numerator, denominator, keys, outside)
            if softmax is not None:
                return softmax
            outside = outside.times("div", denominator)
            value, index = numerator
        elif value.op == "mul" or is_outer_product(value):
            first, second = _factors(value, index)
            if _depends(first, keys):
                first, second = second, first
            total = _reciprocal(first)
            softmax = None
            if total is not None:
                softmax = _of_quotient(second, total, keys, outside)
            if softmax is not None:
                return softmax
            if not _depends(first, keys):
                outside = outside.times("mul", first)
                value, index = second
                continue
            (value, index), formula, number = _zeroed_product(first, second)
            outside = outside.multiplying(formula, number)
        elif value.op == "select_n":
            element, formula = _zeroed(value, index)
            value, index = element
            outside = outside.selecting(formula)
        else:
            break
    raise NoAttention(NO_SOFTMAX)


def is_outer_product(value: Value) -> bool:
    """Return True for a product of two arrays that sums nothing, as einsum writes it."""
    if value.op != "dot_general":
        return False
    (contracted, _) = _maker(value).params["dimension_numbers"]
    return not contracted[0] and _is_float(value.dtype)


def _factors(value: Value, index: Index) -> list[Element]:
    """Return the two elements whose product an element is."""
    if value.op == "mul":
        return _inputs(value, index)
    equation = _maker(value)
    (_, batch) = equation.params["dimension_numbers"]
    position = len(batch[0])
    factors = []
    for side, x in enumerate(equation.inputs):
        dims: list[Any] = [None] * len(x.shape)
        for number, d in enumerate(batch[side]):
            dims[d] = index[number]
        for d, dim in enumerate(dims):
            if dim is None:
                dims[d] = index[position]
                position += 1
        factors.append((x, tuple(dims)))
    return factors


def _zeroed(value: Value, index: Index) -> tuple[Element, Formula]:
    """Return x and the condition of select(condition, x, 0)."""
    inputs = _inputs(value, index)
    if len(inputs) != 3:
        raise NoAttention("a selection of many")
    which, if_false, if_true = inputs
    symbol = Reader().read(*which)
    if isinstance(symbol, Choice | Opaque | Number) and which[0].dtype == bool:
        if known_number(if_false[0]) == 0:
            return if_true, as_formula(symbol)
        if known_number(if_true[0]) == 0:
            return if_false, negate(as_formula(symbol))
    raise NoAttention("a selection")


def _zeroed_product(first: Element, second: Element) -> tuple[Element, Formula, float]:
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
    raise NoAttention("a product of two arrays")


def _inputs(value: Value, index: Index) -> list[Element]:
    """Return the operands of an elementwise equation."""
    inputs = sources(_maker(value), index)
    assert inputs is not None
    return inputs


def _depends(element: Element, letters: tuple[Letter, ...]) -> bool:
    return bool(letters_of(*element) & set(letters))


def _reciprocal(element: Element) -> Element | None:
    """Return x if the element is 1 / x."""
    value, index = chain(*element)[-1]
    if value.op == "div":
        numerator, denominator = _inputs(value, index)
        return denominator if known_number(numerator[0]) == 1 else None
    if value.op == "integer_pow" and _maker(value).params["y"] == -1:
        return _inputs(value, index)[0]
    return None


def _of_quotient(
    numerator: Element, denominator: Element, keys: tuple[Letter, ...], outside: Outside
) -> Softmax | None:
    """Return the softmax that a quotient is; None if it divides by something else than the sum."""
    terms = chain(*numerator)[-1]
    while terms[0].op == "select_n":
        terms, formula = _zeroed(*terms)
        outside = outside.showing(formula, 1.0)
        terms = chain(*terms)[-1]
    shown = _shown_in_sum(denominator, [*chain(*numerator), *chain(*terms)], keys)
    if shown is None:
        return None
    if terms[0].op not in ("exp", "exp2"):
        raise NoAttention("a quotient by a sum")
    return dataclasses.replace(_of_terms(terms, keys, outside), shown_in_sum=shown)


def _shown_in_sum(
    total: Element, terms: list[Element], keys: tuple[Letter, ...]
) -> tuple[Formula, ...] | None:
    """Return which terms are summed if `total` is their sum over the keys; None if it is not.

    `terms` are forms of the same terms, some of which may have zeros. Terms with zeros are found
    first, so that their zeros count for both.
    """
    value, index = chain(*total)[-1]
    if value.op != "reduce_sum":
        return None
    equation = _maker(value)
    summed = equation.inputs[0]
    axes = equation.params["axes"]
    zeros: list[Value] = []
    while True:
        for term, term_index in terms:
            if term is summed and _sums_keys(term_index, axes, index, keys):
                formulas = [_zeroed(x, term_index)[1] for x in zeros]
                formulas += _zeros_within(term, term_index)
                return tuple(formulas)
        if is_cast(summed):
            summed = _maker(summed).inputs[0]
        elif summed.op == "select_n":
            zeros.append(summed)
            cases = [x for x in _maker(summed).inputs[1:] if known_number(x) is None]
            if len(cases) != 1:
                return None
            summed = cases[0]
        else:
            return None


def _zeros_within(value: Value, index: Index) -> list[Formula]:
    """Return the conditions of the selections with 0 that make a term."""
    formulas = []
    value, index = chain(value, index)[-1]
    while value.op == "select_n":
        element, formula = _zeroed(value, index)
        formulas.append(formula)
        value, index = chain(*element)[-1]
    return formulas


def _sums_keys(term: Index, axes: Any, total: Index, keys: tuple[Letter, ...]) -> bool:
    """Return True if a sum over `axes` of terms at an index is over all keys, and nothing else."""
    if any(isinstance(dim, Slice) for dim in term):
        return False
    over = letters_in(term[d] for d in axes)
    kept = tuple(dim for d, dim in enumerate(term) if d not in axes)
    same_rows = expand_all(kept) == expand_all(total)
    return same_rows and len(over) == len(keys) and set(over) == set(keys)


def _of_terms(terms: Element, keys: tuple[Letter, ...], outside: Outside) -> Softmax:
    """Return the softmax of which `terms` are the exponentials."""
    value, index = terms
    base = 1.0 if value.op == "exp" else math.log(2)
    logits, factor = _without_shift(_inputs(value, index)[0], keys)
    return Softmax(logits, base * factor, outside)


def _of_exponential(terms: Element, keys: tuple[Letter, ...], outside: Outside) -> Softmax:
    """Return the softmax of exponentials that no sum divides before the second product."""
    value, index = terms
    logits, shifts = _shifts(_inputs(value, index)[0], keys)
    logs = [x for x, _ in shifts if x[0].op == "log"]
    if not logs:
        softmax = _of_terms(terms, keys, outside)
        return dataclasses.replace(softmax, unnormalised=terms)
    if value.op != "exp" or len(logs) != 1:
        raise NoAttention("exponentials")
    others = [x[0] for x, _ in shifts if x[0] is not logs[0][0]]
    (is_added,) = [flag for x, flag in shifts if x is logs[0]]
    if not _is_log_of_sum(logs[0], logits, others, keys):
        raise NoMatch("exp(s - x) where x is not the logarithm of the sum of exp(s) over the keys")
    return Softmax(logits, 1.0, outside, loses_log=is_added)


def _shifts(
    element: Element, keys: tuple[Letter, ...]
) -> tuple[Element, list[tuple[Element, bool]]]:
    """Return s of s - a - (b + c), and a, b and c, which do not depend on the keys.

    Each of these comes with a flag: was it part of a sum?
    """
    shifts: list[tuple[Element, bool]] = []
    element = chain(*element)[-1]
    while element[0].op == "sub":
        logits, shift = _inputs(*element)
        if _depends(shift, keys):
            break
        waiting = [(shift, False)]
        while waiting:
            part, is_added = waiting.pop()
            value, index = chain(*part)[-1]
            if value.op == "add":
                waiting.extend((x, True) for x in _inputs(value, index))
            else:
                shifts.append(((value, index), is_added))
        element = chain(*logits)[-1]
    return element, shifts


def _is_log_of_sum(
    log: Element, logits: Element, others: list[Value], keys: tuple[Letter, ...]
) -> bool:
    """Return True if log(sum(exp(s - a))) + a is subtracted from s, where `others` are a."""
    value, index = chain(*_inputs(*log)[0])[-1]
    if value.op == "abs":
        value, index = chain(*_inputs(value, index)[0])[-1]
    if value.op != "reduce_sum":
        return False
    axes = _maker(value).params["axes"]
    summed = _maker(value).inputs[0]
    while is_cast(summed):
        summed = _maker(summed).inputs[0]
    if summed.op != "exp":
        return False
    term = _maker(summed).inputs[0]
    shifts = []
    while term is not logits[0] and (is_cast(term) or term.op == "sub"):
        if term.op == "sub":
            shift = _maker(term).inputs[1]
            while shift.op in ("broadcast_in_dim", "reshape"):
                shift = _maker(shift).inputs[0]
            shifts.append(shift)
        term = _maker(term).inputs[0]
    same_shifts = sorted(map(id, shifts)) == sorted(map(id, others))
    return term is logits[0] and same_shifts and _sums_keys(logits[1], axes, index, keys)


def _division_after(
    graph: Graph, result: Element, terms: Element, keys: tuple[Letter, ...]
) -> Element:
    """Return the quotient of the second product by the sum of the exponentials."""
    value, index = result
    for _ in range(MOST_STEPS):
        consumers = graph.consumers.get(value, [])
        if len(consumers) != 1:
            break
        (equation,) = consumers
        output = equation.outputs[0]
        name = equation.eqn.primitive.name
        if is_cast(output):
            value = output
        elif name == "transpose":
            index = tuple(index[d] for d in equation.params["permutation"])
            value = output
        elif name in ("reshape", "squeeze", "expand_dims"):
            index = regroup(index, output.shape)
            value = output
        elif name in ("div", "mul"):
            inputs = [(x, fit(index, x)) for x in equation.inputs]
            others = [x for x in inputs if x[0] is not value]
            if name == "div" and inputs[0][0] is value and others:
                total = others[0]
            else:
                total = _reciprocal(others[0]) if name == "mul" and others else None
            if total is not None and _shown_in_sum(total, chain(*terms), keys) == ():
                return output, index
            break
        else:
            break
    raise NoMatch("exponentials are not divided by their sum over the keys, and nothing else")


def _without_shift(element: Element, keys: tuple[Letter, ...]) -> tuple[Element, float]:
    """Return s and c of c * (s - m), where m is made of a maximum and is the same for all keys."""
    logits = element
    factor = 1.0
    product = 1.0
    while True:
        value, index = chain(*element)[-1]
        if value.op == "sub":
            inner, shift = _inputs(value, index)
            if _depends(shift, keys) or not _made_of_maximum(shift[0]):
                return logits, factor
            logits = element = inner
            factor = product
        elif value.op in ("mul", "div"):
            inner, other = _inputs(value, index)
            if value.op == "mul" and known_number(other[0]) is None:
                inner, other = other, inner
            number = known_number(other[0])
            if number is None or not math.isfinite(number) or number == 0:
                return logits, factor
            product = product * float(number) if value.op == "mul" else product / float(number)
            element = inner
        else:
            return logits, factor


def _made_of_maximum(value: Value) -> bool:
    """Return True if a value is computed from a maximum by few element-wise equations."""
    waiting = [value]
    for _ in range(24):
        if not waiting:
            return False
        value = waiting.pop()
        if value.op == "reduce_max":
            return True
        if value.maker is not None and value.op in ELEMENTWISE | MOVES:
            waiting.extend(value.maker.inputs)
    return False


# ---- (3) The products


def _find_product(logits: Element, keys: tuple[Letter, ...]) -> Element:
    """Return the product of query and key from which the logits are computed."""
    waiting = [logits]
    seen: set[Any] = set()
    reasons = []
    products = []
    while waiting:
        value, index = waiting.pop(0)
        index = expand_all(index)
        if (value, index) in seen or not set(keys) & set(letters_in(index)):
            continue
        seen.add((value, index))
        if len(seen) > MOST_STEPS:
            raise NoMatch(f"more than {MOST_STEPS} equations lie between the two products")
        if value.op == "dot_general":
            try:
                _operands_of_first(_maker(value), index, keys)
                products.append((value, index))
            except NoMatch as reason:
                reasons.append(str(reason))
            continue
        if value.maker is None:
            continue
        try:
            waiting.extend(sources(value.maker, index) or [])
        except NoMatch as reason:
            reasons.append(str(reason))
    if products:
        return max(products, key=lambda x: _maker(x[0]).number)
    raise NoMatch(reasons[0] if reasons else "the logits are not made of a product of two arrays")


def _operands_of_first(
    first: Equation, index: Index, keys: tuple[Letter, ...]
) -> tuple[Operand, Operand]:
    """Return query and key of the first product, whose result is read at `index`."""
    contracted, batch = first.params["dimension_numbers"]
    if any(isinstance(dim, Slice) for dim in index):
        raise NoMatch("a slice of the logits is used")
    if not all(_is_float(x.dtype) for x in (*first.inputs, first.outputs[0])):
        raise NoMatch(f"a product of {first.inputs[0].dtype} and {first.inputs[1].dtype}")
    index = expand_all(index)
    letters = letters_in(index)
    if len(set(letters)) != len(letters):
        raise NoMatch("a diagonal of the logits is used")
    hidden = [Letter(first.inputs[0].shape[d]) for d in contracted[0]]
    operands = []
    free = []
    position = len(batch[0])
    for side, value in enumerate(first.inputs):
        dims: list[Any] = [None] * len(value.shape)
        for d, letter in zip(contracted[side], hidden, strict=True):
            dims[d] = (letter,) if letter.size != 1 else ()
        for number, d in enumerate(batch[side]):
            dims[d] = index[number]
        own = []
        for d, dim in enumerate(dims):
            if dim is None:
                dims[d] = index[position]
                own.extend(index[position])
                position += 1
        operands.append(Operand(value, tuple(dims)))
        free.append(own)
    for side in (0, 1):
        if set(keys) <= set(free[side]):
            return operands[1 - side], operands[side]
    if any(set(keys) & set(x) for x in free):
        raise NoMatch("the softmax is over axes of both operands of the first product")
    raise NoMatch("the softmax is over an axis that is not one of the keys alone")


def _value_operand(second: Equation, side: int, index: Index) -> tuple[Operand, tuple[Letter, ...]]:
    """Return the value with its letters, and those of D."""
    contracted, batch = second.params["dimension_numbers"]
    value = second.inputs[1 - side]
    if not _is_float(value.dtype) or not _is_float(second.outputs[0].dtype):
        raise NoMatch(f"a value of {value.dtype}")
    dims: list[Any] = [None] * len(value.shape)
    pairs = [*zip(batch[1 - side], batch[side], strict=True)]
    pairs += zip(contracted[1 - side], contracted[side], strict=True)
    for d, other in pairs:
        dims[d] = index[other]
    columns = []
    for d, dim in enumerate(dims):
        if dim is None:
            dims[d] = new_index(value.shape[d : d + 1])[0]
            columns.extend(dims[d])
    return Operand(value, expand_all(tuple(dims))), tuple(columns)


def _result_index(second: Equation, side: int, index: Index, value: Operand) -> Index:
    """Return the letters of the dims of the second product."""
    contracted, batch = second.params["dimension_numbers"]
    indices = [index, value.index] if side == 0 else [value.index, index]
    dims = [index[d] for d in batch[side]]
    for number, x in enumerate(second.inputs):
        used = (*batch[number], *contracted[number])
        dims.extend(indices[number][d] for d in range(len(x.shape)) if d not in used)
    return expand_all(tuple(dims))
