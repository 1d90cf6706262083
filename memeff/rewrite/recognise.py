"""Recognise attention between two products: softmax(logits of query and key) times value.

The algorithm, from the second product backward:

  (1) Each axis of the probabilities gets a letter. The contracted ones are the keys (S).
  (2) The probabilities must be e / sum(e) over S with e = exp(s - m), or exp(s - lse). The shift m
      does not depend on S. The division may follow the second product. Factors that do not depend
      on S move to the output. What sets probabilities to 0 is a mask, or dropout.
  (3) Follow s through element-wise equations to a product of two arrays. The operand whose free
      axes are S is the key, the other one the query. A sum of such products, as in DeepSeek's
      attention, is one product of longer vectors.
  (4) Axes that only the query has are T (the longest) and grouped heads. Axes of key or value are
      batch entries and heads. If queries and keys have rows and columns, as of images, T has both.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax import lax

from memeff.rewrite.axes import (
    Element,
    Index,
    Letter,
    NoAttention,
    NoMatch,
    Slice,
    expand_all,
    is_float,
    is_move,
    letters_in,
    maker_of,
    new_index,
    sources,
    take_factor,
)
from memeff.rewrite.graph import Equation, Graph, Value
from memeff.rewrite.softmax import MOST_STEPS, NO_SOFTMAX, Softmax, division_after
from memeff.rewrite.softmax_search import find_softmax, may_be_softmax
from memeff.rewrite.softmax_sums import factors_of_product, is_outer_product

ONE_KEY = "the product with the values has one key only, so nothing is gained"
MOST_PRODUCTS = 16  # of a sum
_DEFAULT = (lax.Precision.DEFAULT, lax.Precision.DEFAULT)
# Algorithms that are the default for operands of these dtypes; jax.nn asks for them.
_DEFAULT_OF = {
    lax.DotAlgorithmPreset.BF16_BF16_F32: ("bfloat16", "bfloat16"),
    lax.DotAlgorithmPreset.F16_F16_F32: ("float16", "float16"),
}


@dataclasses.dataclass(frozen=True)
class Operand:
    """An operand of a product, with the letters of its dims; those of H and D are its own."""

    value: Value
    index: Index


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of query and key, times a factor."""

    equation: Equation
    query: Operand
    key: Operand
    factor: float


@dataclasses.dataclass(frozen=True)
class Match:
    """Two products and the softmax between them."""

    first: Equation  # the first product, or the sum of several
    second: Equation
    result: Value  # what is replaced: the second product, or the quotient after it
    result_index: Index
    dots: Element  # the result of `first`, at the index of the probabilities
    softmax: Softmax
    products: tuple[Product, ...]  # of which `dots` is the sum
    value: Operand
    dims: Index  # of the probabilities
    keys: tuple[Letter, ...]
    columns: tuple[Letter, ...]  # D

    def over_pairs(self, letters: Any) -> bool:
        """Return True if letters of queries and of keys are among `letters`."""
        return bool(set(letters) & set(self.keys)) and bool(set(letters) & set(self.query_only))

    @property
    def precision(self) -> Any:
        """Return the precision of all products."""
        return _precision(self.second)

    @property
    def letters(self) -> tuple[Letter, ...]:
        """Return the letters of the probabilities, in their order."""
        return tuple(letters_in(self.dims))

    @property
    def query_only(self) -> tuple[Letter, ...]:
        """Return the letters that neither key nor value has."""
        shared = set(letters_in(self.value.index))
        shared.update(*(letters_in(x.key.index) for x in self.products))
        return tuple(x for x in self.letters if x not in shared)


def match(graph: Graph, second: Equation, side: int) -> Match:
    """Return the attention whose second product has its probabilities as the operand `side`."""
    (contracted, _) = second.params["dimension_numbers"]
    probabilities = second.inputs[side]
    index = new_index(probabilities.shape)
    if not may_be_softmax(probabilities):
        raise NoAttention(NO_SOFTMAX)
    if not letters_in(index[d] for d in contracted[side]):
        raise NoAttention(ONE_KEY)
    while True:  # until no reshape splits a letter any more
        before = expand_all(index)
        try:
            attention = _match_letters(graph, second, side, before)
        except NoMatch:
            if expand_all(index) == before:
                raise
        else:
            if expand_all(index) == before:
                return attention


def _match_letters(graph: Graph, second: Equation, side: int, index: Index) -> Match:
    """Return the attention of probabilities at an index, whose letters reshapes may split."""
    (contracted, _) = second.params["dimension_numbers"]
    keys = tuple(letters_in(index[d] for d in contracted[side]))
    softmax = find_softmax(second.inputs[side], index, keys)
    value, columns = _value_operand(second, side, index)
    dots = _find_product(softmax.logits, keys, value)
    result = second.outputs[0], _result_index(second, side, index, value)
    if softmax.unnormalised is not None:
        result, softmax = division_after(graph, result, softmax)
    products = tuple(_products_of(dots, keys))
    if any(_precision(x.equation) != _precision(second) for x in products):
        raise NoMatch("the two products have different precisions")
    first = maker_of(dots[0])
    return Match(first, second, *result, dots, softmax, products, value, index, keys, columns)


# ---- (3) The products


def _precision(product: Equation) -> Any:
    """Return the precision of a product; None for the default, also if it is spelled out."""
    precision = product.params["precision"]
    dtypes = tuple(str(x.dtype) for x in product.inputs)
    if precision == _DEFAULT or dtypes == _DEFAULT_OF.get(precision):
        return None
    return precision


def _find_product(logits: Element, keys: tuple[Letter, ...], value_operand: Operand) -> Element:
    """Return the product of query and key from which the logits are computed, or a sum of several.

    If they are no such sum, it is one whose query has an axis that neither key nor value has: the
    largest, because the others stay arrays, and the last of these. A bias may be a product too, of
    buckets of distances and a table, or of the query and vectors for each pair.
    """
    waiting = [logits]
    seen: set[Any] = set()
    reasons = []
    products = []
    ends = []  # equations at which the search stops
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
                query, key = _operands_of_first(maker_of(value), index, keys)
                shared = {*letters_in(key.index), *letters_in(value_operand.index)}
                has_queries = not shared.issuperset(letters_in(query.index))
                products.append((has_queries, (value, index)))
            except NoMatch as reason:
                reasons.append(str(reason))
            continue
        if value.maker is None:
            continue
        if value.op in ("add", "sub"):
            terms = _products_of((value, index), keys)
            if _are_one_product(terms, value_operand):
                products.append((True, (value, index)))
                continue
        inputs = sources(value.maker, index)
        if inputs is None:
            ends.append(f"`{value.op}`")
        waiting.extend(inputs or [])
    if products:
        return max(products, key=lambda x: (x[0], *_size_and_number(x[1][0])))[1]
    if reasons:
        raise NoMatch(reasons[0])
    where = f": the search stops at {', '.join(dict.fromkeys(ends))}" if ends else ""
    raise NoMatch(f"the logits are not made of a product of two arrays{where}")


def _size_and_number(value: Value) -> tuple[int, int]:
    """Return how many elements a value has, and the number of its equation."""
    return math.prod(value.shape), maker_of(value).number


def _products_of(element: Element, keys: tuple[Letter, ...]) -> list[Product]:
    """Return the products of which an element is the sum; an empty list if it is no such sum."""
    products: list[Product] = []
    waiting = [(element, 1.0)]
    while waiting:
        (value, index), factor = waiting.pop()
        inputs = None if value.maker is None else sources(value.maker, index)
        multiple = take_factor((value, index), factor)
        if value.op == "dot_general":
            equation = maker_of(value)
            try:
                products.append(
                    Product(equation, *_operands_of_first(equation, index, keys), factor)
                )
            except NoMatch:
                return []
        elif inputs is not None and is_move(value):
            waiting.append((inputs[0], factor))
        elif inputs is not None and value.op == "neg":
            waiting.append((inputs[0], -factor))
        elif inputs is not None and value.op in ("add", "sub"):
            waiting.append((inputs[1], -factor if value.op == "sub" else factor))
            waiting.append((inputs[0], factor))
        elif multiple is not None:
            waiting.append(multiple)
        else:
            return []
        if len(products) + len(waiting) > MOST_PRODUCTS:
            return []
    return products


def _are_one_product(products: list[Product], value: Operand) -> bool:
    """Return True if a sum of products is one product of joined vectors.

    The longest axis of the queries alone must be in each query and in no key. The vectors of
    queries are multiplied by powers of two, which is exact.
    """
    if len(products) < 2:
        return False
    shared = set(letters_in(value.index))
    query_alone = []
    for x in products:
        ratio = x.factor / products[0].factor
        is_exact = abs(math.frexp(ratio)[0]) == 0.5
        same_precision = _precision(x.equation) == _precision(products[0].equation)
        if not is_exact or not same_precision or is_outer_product(x.equation.outputs[0]):
            return False
        query_alone.append(set(letters_in(x.query.index)) - set(letters_in(x.key.index)) - shared)
    letters = set().union(*query_alone)
    most = max((x.size for x in letters), default=0)
    longest = {x for x in letters if x.size == most}
    return bool(longest) and all(longest <= x for x in query_alone)


def _operands_of_first(
    first: Equation, index: Index, keys: tuple[Letter, ...]
) -> tuple[Operand, Operand]:
    """Return query and key of the first product, whose result is read at `index`."""
    slices = [dim for dim in index if isinstance(dim, Slice)]
    if set(letters_in(slices)) & set(keys):
        raise NoMatch("a slice of the keys is used")
    if not all(is_float(x.dtype) for x in (*first.inputs, first.outputs[0])):
        raise NoMatch(f"a product of {first.inputs[0].dtype} and {first.inputs[1].dtype}")
    index = expand_all(index)
    letters = letters_in(index)
    if len(set(letters)) != len(letters):
        raise NoMatch("a diagonal of the logits is used")
    (contracted, _), _ = first.params["dimension_numbers"]
    hidden = new_index([first.inputs[0].shape[d] for d in contracted])
    operands = [Operand(*x) for x in factors_of_product(first, index, hidden)]
    of_both = [set(letters_in(x.index)) for x in operands]
    free = [of_both[0] - of_both[1], of_both[1] - of_both[0]]
    for side in (0, 1):
        if set(keys) <= free[side]:
            return operands[1 - side], operands[side]
    if any(set(keys) & x for x in free):
        raise NoMatch("the softmax is over axes of both operands of the first product")
    raise NoMatch("the softmax is over an axis that is not one of the keys alone")


def _value_operand(second: Equation, side: int, index: Index) -> tuple[Operand, tuple[Letter, ...]]:
    """Return the value with its letters, and those of D."""
    contracted, batch = second.params["dimension_numbers"]
    value = second.inputs[1 - side]
    if not is_float(value.dtype) or not is_float(second.outputs[0].dtype):
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
