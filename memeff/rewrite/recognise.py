"""Recognise attention between two products: softmax(logits of query and key) times value.

The algorithm, from the second product backward:

  (1) Each axis of the probabilities gets a letter. The contracted ones are the keys (S).
  (2) The probabilities must be e / sum(e) over S with e = exp(s - m), or exp(s - lse). The shift m
      does not depend on S. Factors that do not depend on S move to the output.
  (3) Follow s through element-wise equations to a product of two arrays. The operand whose free
      axes are S is the key, the other one the query.
  (4) Axes that only the query has are T (the longest) and grouped heads. Axes of key or value are
      batch entries and heads.
"""

from __future__ import annotations

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
    known_number,
    letters_in,
    new_index,
    sources,
)
from memeff.rewrite.graph import Equation, Value
from memeff.rewrite.symbols import letters_of

MOST_STEPS = 400  # equations between the two products of attention
Element = tuple[Value, Index]


class NoAttention(NoMatch):
    """The operand of a product is not a softmax, so there is nothing to report."""


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Logits `s`, whose softmax the probabilities are, and what follows the softmax."""

    logits: Element
    base: float  # e = base ** s, given as log(base)
    factors: tuple[tuple[str, Element], ...] = ()  # "mul" or "div", and what does not depend on S


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


def match(second: Equation, side: int) -> Match:
    """Return the attention whose second product has its probabilities as the operand `side`."""
    (contracted, batch) = second.params["dimension_numbers"]
    probabilities = second.inputs[side]
    index = new_index(probabilities.shape)
    keys = tuple(letters_in(index[d] for d in contracted[side]))
    if not keys:
        raise NoAttention("a product of size 1")
    softmax = find_softmax(probabilities, index, keys)
    while True:
        before = expand_all(index)
        keys = tuple(letters_in(index[d] for d in contracted[side]))
        softmax = find_softmax(probabilities, expand_all(index), keys)
        dots = _find_product(softmax.logits, keys)
        if expand_all(index) == before:
            break
    first = _maker(dots[0])
    query, key = _operands_of_first(first, dots[1], keys)
    value, columns = _value_operand(second, side, index)
    result_index = _result_index(second, side, index, value)
    return Match(
        first,
        second,
        second.outputs[0],
        result_index,
        dots,
        softmax,
        query,
        key,
        value,
        tuple(letters_in(index)),
        keys,
        columns,
    )


# ---- (2) The softmax


def find_softmax(value: Value, index: Index, keys: tuple[Letter, ...]) -> Softmax:
    """Return the softmax over `keys` that a value is, up to factors that do not depend on them."""
    factors: list[tuple[str, Element]] = []
    for _ in range(MOST_STEPS):
        value, index = chain(value, index)[-1]
        if value.op == "div":
            numerator, denominator = _inputs(value, index)
            if _depends(denominator, keys):
                raise NoAttention("a quotient")
            if not _is_sum(denominator, numerator, keys):
                factors.append(("div", denominator))
                value, index = numerator
                continue
            return _of_exponential(numerator, keys, tuple(factors))
        if value.op == "mul":
            inputs = _inputs(value, index)
            constant = [x for x in inputs if not _depends(x, keys)]
            if len(constant) != 1:
                _refuse_product(inputs, keys)
            (other,) = [x for x in inputs if x is not constant[0]]
            total = _reciprocal(constant[0])
            if total is not None and _is_sum(total, other, keys):
                return _of_exponential(other, keys, tuple(factors))
            factors.append(("mul", constant[0]))
            value, index = other
            continue
        break
    raise NoAttention("no softmax")


def _inputs(value: Value, index: Index) -> list[Element]:
    """Return the operands of an elementwise equation."""
    inputs = sources(_maker(value), index)
    assert inputs is not None
    return inputs


def _depends(element: Element, letters: tuple[Letter, ...]) -> bool:
    return bool(letters_of(*element) & set(letters))


def _refuse_product(inputs: list[Element], keys: tuple[Letter, ...]) -> None:
    """Raise for probabilities that are multiplied by an array along the keys."""
    for element in inputs:
        try:
            find_softmax(*element, keys)
        except NoAttention:
            continue
        raise NoMatch("the probabilities are multiplied by an array along the keys (dropout?)")
    raise NoAttention("a product of two arrays")


def _reciprocal(element: Element) -> Element | None:
    """Return x if the element is 1 / x."""
    value, index = chain(*element)[-1]
    if value.op == "div":
        numerator, denominator = _inputs(value, index)
        return denominator if known_number(numerator[0]) == 1 else None
    if value.op == "integer_pow" and _maker(value).params["y"] == -1:
        return _inputs(value, index)[0]
    return None


def _is_sum(total: Element, terms: Element, keys: tuple[Letter, ...]) -> bool:
    """Return True if `total` is the sum of `terms` over all keys and over nothing else."""
    value, index = chain(*total)[-1]
    if value.op != "reduce_sum":
        return False
    equation = _maker(value)
    summed = equation.inputs[0]
    while is_cast(summed):
        summed = _maker(summed).inputs[0]
    axes = equation.params["axes"]
    for term, term_index in chain(*terms):
        if term is not summed:
            continue
        if any(isinstance(dim, Slice) for dim in term_index):
            return False
        over = letters_in(term_index[d] for d in axes)
        kept = tuple(dim for d, dim in enumerate(term_index) if d not in axes)
        same_rows = expand_all(kept) == expand_all(index)
        return same_rows and len(over) == len(keys) and set(over) == set(keys)
    return False


def _of_exponential(
    terms: Element, keys: tuple[Letter, ...], factors: tuple[tuple[str, Element], ...]
) -> Softmax:
    """Return the softmax of which `terms` are the exponentials."""
    value, index = chain(*terms)[-1]
    if value.op not in ("exp", "exp2"):
        raise NoAttention("a quotient by a sum")
    base = 1.0 if value.op == "exp" else math.log(2)
    logits = _without_shift(_inputs(value, index)[0], keys)
    return Softmax(logits, base, factors)


def _without_shift(element: Element, keys: tuple[Letter, ...]) -> Element:
    """Return s of s - m, where m is made of a maximum and is the same for all keys."""
    while True:
        value, index = chain(*element)[-1]
        if value.op != "sub":
            return element
        logits, shift = _inputs(value, index)
        if _depends(shift, keys) or not _made_of_maximum(shift[0]):
            return element
        element = logits


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


