"""Distribute a product over a sum of softmaxes: (a - b) @ v = a @ v - b @ v.

Differential attention subtracts two softmaxes before it multiplies them with the values, and other
programs mix local with global attention. Each term of such a sum is attention of its own:

  (1) From the probabilities backward, follow equations that are linear in them to a sum.
  (2) Apply these equations to each of its two terms, and the product to each result. The new
    equations are in no program and are never run. They exist only for `match` to read.
  (3) Repeat this for terms that are sums.

Every term must be attention that can be replaced. Otherwise the product is left as it is written.
"""

from __future__ import annotations

import dataclasses

from memeff.rewrite.axes import NoAttention, is_move, maker_of
from memeff.rewrite.graph import Equation, Graph, Value
from memeff.rewrite.recognise import Match, match
from memeff.rewrite.softmax_search import may_be_softmax
from memeff.rewrite.softmax_sums import is_outer_product

MOST_TERMS = 16  # a sum that is added to itself n times would have 2^n
OTHER_TERM = "it is added to what is no softmax, or subtracted"


@dataclasses.dataclass(frozen=True)
class Term:
    """Attention that is added to the result of a product, or subtracted from it."""

    sign: int  # 1 or -1
    match: Match


def match_terms(graph: Graph, second: Equation, side: int) -> list[Term]:
    """Return the attention of each term of the probabilities, the operand `side` of a product."""
    probabilities = second.inputs[side]
    try:
        return [Term(1, match(graph, second, side))]
    except NoAttention:
        values = _terms_of(probabilities)
        if values == [(1, probabilities)]:
            raise
    terms = []
    for sign, value in values:
        terms.append(Term(sign, match(graph, _applied(second, side, value), side)))
    return terms


def _terms_of(value: Value) -> list[tuple[int, Value]]:
    """Return the terms of which a value is the sum, each with its sign."""
    terms = []
    waiting = [(1, value)]
    while waiting:
        sign, value = waiting.pop(0)
        parts = _parts_of(value)
        if parts:
            waiting = [(sign * x, part) for x, part in parts] + waiting
        else:
            terms.append((sign, value))
        if len(terms) + len(waiting) > MOST_TERMS:
            raise NoAttention(f"a sum of more than {MOST_TERMS} terms")
    return terms


def _parts_of(value: Value) -> list[tuple[int, Value]]:
    """Return the two terms of a sum, or what is negated, with their signs; otherwise nothing."""
    path = []  # linear equations after the sum, and which operand of each is linear
    while value.op not in ("add", "sub", "neg"):
        side = _linear_operand(value)
        if side is None:
            return []
        path.append((maker_of(value), side))
        value = maker_of(value).inputs[side]
    inputs = maker_of(value).inputs
    are_softmaxes = [may_be_softmax(x) for x in inputs]
    if not any(are_softmaxes):
        return []
    if not all(are_softmaxes):
        raise NoAttention(OTHER_TERM)
    signs = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}[value.op]
    parts = []
    for sign, part in zip(signs, inputs, strict=True):
        for equation, side in reversed(path):
            part = _applied(equation, side, part).outputs[0]
        parts.append((sign, part))
    return parts


def _linear_operand(value: Value) -> int | None:
    """Return which operand holds the probabilities that a value is linear in, None if none does."""
    if is_move(value) or value.op == "div":
        return 0
    if value.op in ("mul", "select_n") or is_outer_product(value):
        sides = [n for n, x in enumerate(maker_of(value).inputs) if may_be_softmax(x)]
        return sides[0] if len(sides) == 1 else None
    return None


def _applied(equation: Equation, side: int, value: Value) -> Equation:
    """Return the equation with another value as the operand `side`."""
    inputs = [*equation.inputs]
    inputs[side] = value
    term = dataclasses.replace(equation, inputs=inputs, outputs=[], in_program=False)
    term.outputs = [Value(x.aval, term) for x in equation.outputs]
    return term
