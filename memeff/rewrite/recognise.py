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

import dataclasses
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
    letters_in,
    maker_of,
    new_index,
    sources,
)
from memeff.rewrite.graph import Equation, Graph, Value
from memeff.rewrite.softmax import (
    MOST_STEPS,
    NO_SOFTMAX,
    Softmax,
    division_after,
    find_softmax,
    may_be_softmax,
)

ONE_KEY = "the product with the values has one key only, so nothing is gained"
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
    def precision(self) -> Any:
        """Return the precision of both products."""
        return _precision(self.first)

    @property
    def query_only(self) -> tuple[Letter, ...]:
        """Return the letters that neither key nor value has."""
        shared = set(letters_in(self.key.index)) | set(letters_in(self.value.index))
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
            found = _match_letters(graph, second, side, before)
        except NoMatch:
            if expand_all(index) == before:
                raise
        else:
            if expand_all(index) == before:
                return found


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
    first = maker_of(dots[0])
    if _precision(first) != _precision(second):
        raise NoMatch("the two products have different precisions")
    query, key = _operands_of_first(first, dots[1], keys)
    letters = tuple(letters_in(index))
    return Match(first, second, *result, dots, softmax, query, key, value, letters, keys, columns)


# ---- (3) The products


def _precision(product: Equation) -> Any:
    """Return the precision of a product; None for the default, also if it is spelled out."""
    precision = product.params["precision"]
    dtypes = tuple(str(x.dtype) for x in product.inputs)
    if precision == _DEFAULT or dtypes == _DEFAULT_OF.get(precision):
        return None
    return precision


def _find_product(logits: Element, keys: tuple[Letter, ...], value_operand: Operand) -> Element:
    """Return the product of query and key from which the logits are computed.

    Of several, it is the last whose query has an axis that neither key nor value has. A bias may be
    a product too, of buckets of distances and a table, or of the query and vectors for each pair.
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
                products.append((has_queries, maker_of(value).number, (value, index)))
            except NoMatch as reason:
                reasons.append(str(reason))
            continue
        if value.maker is None:
            continue
        inputs = sources(value.maker, index)
        if inputs is None:
            ends.append(f"`{value.op}`")
        waiting.extend(inputs or [])
    if products:
        return max(products, key=lambda x: x[:2])[2]
    if reasons:
        raise NoMatch(reasons[0])
    where = f": the search stops at {', '.join(dict.fromkeys(ends))}" if ends else ""
    raise NoMatch(f"the logits are not made of a product of two arrays{where}")


def _operands_of_first(
    first: Equation, index: Index, keys: tuple[Letter, ...]
) -> tuple[Operand, Operand]:
    """Return query and key of the first product, whose result is read at `index`."""
    contracted, batch = first.params["dimension_numbers"]
    slices = [dim for dim in index if isinstance(dim, Slice)]
    if set(letters_in(slices)) & set(keys):
        raise NoMatch("a slice of the keys is used")
    if not all(is_float(x.dtype) for x in (*first.inputs, first.outputs[0])):
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
                own.extend(letters_in([index[position]]))
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
