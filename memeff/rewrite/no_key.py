"""Recognise how a program asks its own numbers whether a row sees a key.

All logits of a row that sees no key may be -inf. A program that tests this, as PyTorch's
`_safe_softmax` does, sets the probabilities of such a row to 0 afterwards. Or it replaces the sum
of its exponentials, which is 0 if the maximum that is subtracted is finite.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from memeff.rewrite.axes import (
    ELEMENTWISE,
    Element,
    Letter,
    chain,
    count_positions,
    is_nonzero,
    is_same,
    known_number,
    maker_of,
    operands_of,
)
from memeff.rewrite.numbers import compute

_TESTS = frozenset("eq ne ge gt le lt abs and or not is_finite".split())
HIDDEN_VISIBLE_NAN = (-math.inf, 0.0, math.nan)  # samples of a logit
ZERO_MORE_NAN = (0.0, 1.0, math.nan)  # samples of a sum of exponentials
MOST_EQUATIONS = 24  # between a maximum and what is subtracted


@dataclasses.dataclass(frozen=True)
class Test:
    """A test of one element, such as x > 0, and what it gives for each sample of x."""

    tested: Element
    results: tuple[Any, ...]


class RowTest(NamedTuple):
    """The results of a condition of rows that is true for rows that see no key, or false for them.

    It is the opposite for all other rows, except perhaps for rows with NaN.
    """

    if_hidden: bool  # in rows that see no key
    if_nan: bool


def read_test_of_logits(rows: Element, logits: Element, keys: tuple[Letter, ...]) -> RowTest | None:
    """Return the results of a condition that tests whether all logits of a row are -inf.

    Return None for other conditions. Examples: isneginf(max(s)), not any(s > -inf).
    """
    value, index = chain(*rows)[-1]
    if value.op == "not":
        inner = read_test_of_logits(operands_of(value, index)[0], logits, keys)
        return None if inner is None else RowTest(not inner.if_hidden, not inner.if_nan)
    if value.op in ("reduce_or", "reduce_and"):
        test = _test_of(_over_keys((value, index), keys), HIDDEN_VISIBLE_NAN, math.inf)
        if test is None or not is_same(test.tested, logits):
            return None
        hidden, visible, nan = test.results
        if hidden == visible or visible != nan or hidden != (value.op == "reduce_and"):
            return None  # NaN is visible, because only some logits of a row may be NaN
        return RowTest(hidden, visible)
    test = _test_of((value, index), HIDDEN_VISIBLE_NAN, math.inf)
    if test is None or not is_maximum(test.tested, logits, keys):
        return None
    hidden, visible, nan = test.results
    return None if hidden == visible else RowTest(hidden, nan)


def read_test_of_sum(rows: Element, total: Element) -> RowTest | None:
    """Return the results of a condition that tests whether a sum of exponentials is 0.

    Return None for other conditions.
    """
    test = _test_of(rows, ZERO_MORE_NAN, 0.0)
    if test is None or not is_same(test.tested, total):
        return None
    zero, more, nan = test.results
    return None if zero == more else RowTest(zero, nan)


def guarded_sum(total: Element) -> Element | None:
    """Return x of `x > 0 ? x : number`, if the number is not 0, or of max(x, number below 1).

    Return None for other elements. x is the sum of exponentials of which the largest is 1.
    """
    value, index = chain(*total)[-1]
    if value.op == "max":
        for x, other in itertools.permutations(operands_of(value, index)):
            number = known_number(other[0])
            if number is not None and 0 < number < 1:
                return x
    if value.op != "select_n":
        return None
    which, *cases = operands_of(value, index)
    test = _test_of(which, ZERO_MORE_NAN, 0.0)
    if test is None or len(cases) != 2 or test.results[0] == test.results[1]:
        return None
    of_empty, of_others = (chain(*cases[int(x)])[-1] for x in test.results[:2])
    is_number = is_nonzero(known_number(of_empty[0]))
    return of_others if is_number and is_same(of_others, test.tested) else None


def subtracts_maximum(shift: Element, logits: Element, keys: tuple[Letter, ...]) -> bool | None:
    """Return True for the maximum of the logits, with a finite number in the place of -inf.

    Return False for the maximum as it is, and None for all else.
    """
    of_empty, *of_others = (
        _with_maximum(shift, logits, keys, x, {}) for x in (-math.inf, -1e30, -1e9, 0.0, 1e9)
    )
    if of_empty is None or of_others != [-1e30, -1e9, 0.0, 1e9]:
        return None
    return math.isfinite(of_empty)


def is_maximum(element: Element, logits: Element, keys: tuple[Letter, ...]) -> bool:
    """Return True for the maximum of logits over the keys."""
    value, index = chain(*element)[-1]
    while value.op == "max" and known_number(maker_of(value).inputs[0]) == -math.inf:
        value, index = chain(*operands_of(value, index)[1])[-1]
    return value.op == "reduce_max" and is_same(_over_keys((value, index), keys), logits)


def _with_maximum(
    element: Element,
    logits: Element,
    keys: tuple[Letter, ...],
    number: float,
    known: dict[Element, Any],
) -> Any:
    """Return an element as a number where the maximum of the logits is `number`.

    `known` are numbers of elements from which it is computed.
    """
    value, index = element = chain(*element)[-1]
    if is_maximum(element, logits, keys):
        return np.asarray(number, value.dtype)[()]
    of_all = known_number(value)
    if of_all is not None:
        return of_all
    if element in known:
        return known[element]
    if value.maker is None or value.op not in ELEMENTWISE or len(known) > MOST_EQUATIONS:
        return None
    known[element] = None
    inputs = [_with_maximum(x, logits, keys, number, known) for x in operands_of(value, index)]
    if all(x is not None for x in inputs):
        known[element] = compute(maker_of(value).eqn, inputs)
    return known[element]


def _over_keys(reduction: Element, keys: tuple[Letter, ...]) -> Element | None:
    """Return the element that a reduction over the keys reduces; None for other axes."""
    value, index = reduction
    equation = maker_of(value)
    axes = equation.params["axes"]
    summed = equation.inputs[0]
    sizes = [summed.shape[d] for d in axes]
    dims = [keys] if len(axes) == 1 else [(x,) for x in keys]
    if sizes != [count_positions(x) for x in dims]:
        return None
    rest = iter(index)
    whole = [dims[axes.index(d)] if d in axes else next(rest) for d in range(len(summed.shape))]
    return summed, tuple(whole)


def _test_of(element: Element | None, samples: Sequence[float], bound: float) -> Test | None:
    """Return a test whose numbers are `bound` or its negative, and what it gives for samples."""
    if element is None:
        return None
    value, index = chain(*element)[-1]
    if value.op not in _TESTS:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return None
        return Test((value, index), tuple(np.asarray(x, value.dtype)[()] for x in samples))
    tested = None
    arguments = []
    for x in operands_of(value, index):
        number = known_number(x[0])
        if number is not None:
            if abs(number) != bound:
                return None
            arguments.append([number] * len(samples))
            continue
        test = _test_of(x, samples, bound)
        if test is None or tested is not None and not is_same(test.tested, tested):
            return None
        tested = test.tested
        arguments.append(test.results)
    if tested is None:
        return None
    equation = maker_of(value).eqn
    results = [compute(equation, list(x)) for x in zip(*arguments, strict=True)]
    return Test(tested, tuple(results))
