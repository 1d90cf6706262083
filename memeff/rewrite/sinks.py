"""Recognise a sink: a logit z beside those of the keys, to which no value belongs.

A program joins a column to the logits, takes the softmax, and drops the column again:
softmax(concatenate([s, z]))[..., :-1]. Or it adds exp(z) to the sum, as in e / (1 + sum(e)).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from memeff.rewrite.axes import (
    Dim,
    Element,
    Index,
    Letter,
    NoMatch,
    Slice,
    chain,
    count_positions,
    expand,
    is_float,
    is_same,
    known_number,
    letters_in,
    maker_of,
    operands_of,
)
from memeff.rewrite.graph import Value
from memeff.rewrite.softmax_sums import exponent


@dataclasses.dataclass(frozen=True)
class Column:
    """A dim that holds the keys and one more column."""

    keys: Dim
    is_first: bool  # the column is the first one, or the last
    letter: Letter  # of the keys and the column
    index: Index  # of the whole array


def find_column(index: Index, keys: tuple[Letter, ...]) -> Column | None:
    """Return the column that `index` leaves out of an array; None if it does not leave out one."""
    of_keys = [d for d, dim in enumerate(index) if set(letters_in([dim])) & set(keys)]
    if len(of_keys) != 1:
        return None
    (d,) = of_keys
    cut = index[d]
    if not isinstance(cut, Slice) or isinstance(cut.inner, Slice):
        return None
    if cut.stride != 1 or expand(cut.inner) != keys:
        return None
    if cut.start > 1 or cut.size != count_positions(keys) + 1:
        return None
    letter = Letter(cut.size)
    whole = (*index[:d], (letter,), *index[d + 1 :])
    return Column(keys, cut.start == 1, letter, whole)


def split_column(logits: Element, column: Column) -> tuple[Element, Element]:
    """Return the logits of the keys, and the sink, of logits with a column."""
    value, index = chain(*logits)[-1]
    if value.op not in ("concatenate", "pad") or (column.letter,) not in index:
        raise NoMatch("a column of the probabilities is left out, and is not joined to the logits")
    d = index.index((column.letter,))
    equation = maker_of(value)

    def at(dim: Dim) -> Index:
        return (*index[:d], dim, *index[d + 1 :])

    if value.op == "pad":
        before = int(column.is_first)
        wanted = [(0, 0, 0)] * len(index)
        wanted[d] = (before, 1 - before, 0)
        if [*equation.params["padding_config"]] != wanted:
            raise NoMatch("the logits are padded with more than one column")
        inner, sink = equation.inputs
        return (inner, at(column.keys)), (sink, ())
    parts = equation.inputs[::-1] if column.is_first else equation.inputs
    if len(parts) != 2 or equation.params["dimension"] != d or parts[1].shape[d] != 1:
        raise NoMatch("the logits are joined with parts other than one column")
    inner, sink = parts
    return (inner, at(column.keys)), (sink, at(()))


def sink_of(extra: Element, base: float, shift: Element | None) -> Element | None:
    """Return z of exp(base * (z - shift)), which is added to a sum of exp(base * (s - shift)).

    Without a shift it may be a number. Return None where it is neither.
    """
    value, index = chain(*extra)[-1]
    number = known_number(value)
    if shift is None and number is not None and is_float(value.dtype) and 0 < number < math.inf:
        return _constant(math.log(float(number)) / base, value), ()
    exponential = exponent((value, index))
    if exponential is None or exponential[1] != base:
        return None
    power, index = chain(*exponential[0])[-1]
    if shift is None:
        return power, index
    if power.op == "neg" and is_same(operands_of(power, index)[0], shift):
        return _constant(0.0, power), ()
    if power.op == "sub":
        sink, subtracted = operands_of(power, index)
        if is_same(subtracted, shift):
            return sink
    return None


def _constant(number: float, like: Value) -> Value:
    """Return a scalar of a known number."""
    return Value(jax.typeof(np.zeros((), like.dtype)), constant=np.asarray(number, like.dtype))
