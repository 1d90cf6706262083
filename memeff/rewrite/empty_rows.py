"""Keep the meaning of rows that see no key when masks are named.

To name a mask is to pass it as an argument of memeff. That is allowed only if rows that see no key
keep their meaning:

- Some key is proved to be visible in each row (causal order, windows, a segment's own token).
- All masks replace hidden logits by the same number, so that such a row of the program gives the
  mean of all values, or NaN if that number is -inf. memeff then puts the same into these rows.
  (Where the program makes 0 of NaN, or sets rows to 0 whose logits are all -inf, they are 0, as in
  memeff. This does not hold beside dropout, because such a row then is the mean of some values.)

Otherwise two forms are compiled: masks are named for calls in which every row sees a key, and a
call in which some row does not computes all logits as numbers. The same is done if a mask is
applied after a bias or a score function. These may be lower than the number that hides, such as a
mask that was added before, and then the hidden keys get the probability.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from memeff.rewrite.axes import NoMatch, known_number
from memeff.rewrite.pairs import conjuncts, formula_letters, no_row_is_empty
from memeff.rewrite.random_bits import is_random
from memeff.rewrite.reader import Reader
from memeff.rewrite.recognise import Match
from memeff.rewrite.symbols import Choice, Formula, Known, Number, both
from memeff.rewrite.terms import (
    HIDDEN,
    LARGEST_SHIFT,
    MEAN,
    NAN,
    ZERO,
    BiasTerm,
    Core,
    Layers,
    Logits,
    MaskTerm,
    Scaling,
)


def with_meaning_of_empty_rows(match: Match, layers: Layers) -> Logits:
    """Return the logits in the form that keeps the meaning of rows that see no key."""
    condition = layers.condition
    may_be_low = _may_be_low(layers.biases, layers.inner)
    if condition == Known(True):
        return layers.logits(condition)
    lows = [x.low for x in layers.masks if math.isfinite(x.low)]
    meaning = _meaning_of_empty_rows(layers)
    if meaning == MEAN and any(is_random(x) for x in match.softmax.outside.shown):
        meaning = None  # dropout drops some of the values
    if not lows or not may_be_low:
        if no_row_is_empty(match, condition):
            return layers.logits(condition)
        if match.softmax.loses_log and meaning != NAN:
            raise NoMatch(
                "exp(s - logsumexp(s)) gives the sum of the values in rows that see no key"
            )
        if meaning is not None:
            return layers.logits(condition, meaning)
    exact = _without_masks(layers)
    if not match.over_pairs(formula_letters(condition)):
        return exact
    # exp of the distance of a hidden logit to one above `lowest` is 0
    lowest = max(lows, default=-math.inf) / 2
    return dataclasses.replace(
        layers.logits(condition), exact=exact, lowest=lowest, low=_replacing_low(layers)
    )


def check_logarithm(match: Match, logits: Logits) -> None:
    """Refuse a bias or a score beside which the logarithm of the sum may be lost."""
    if match.softmax.loses_log and _may_be_low(logits.biases, logits.inner):
        raise NoMatch(
            "exp(s - logsumexp(s)) loses the logarithm where a bias or a score is very low"
        )


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


def with_zeros(match: Match, layers: Layers, shown: Formula) -> Logits:
    """Return the logits if probabilities of pairs that are not `shown` are 0, or are not summed.

    Take a row that sees no key. Before zeros are set, its probabilities are NaN if all logits are
    -inf or if no exponential is summed, and finite otherwise. If the zeros hide all that the masks
    hide, the row becomes 0, as in memeff. But only a selection makes 0 of NaN: where(visible, p, 0)
    does, and p * visible does not.
    """
    before = _parts([layers.condition])
    after = _parts([shown])
    summed = _parts(match.softmax.shown_in_sum)
    _check_zeros(match, before, after, summed)
    lows = {x.low for x in layers.masks}
    outside = match.softmax.outside
    replaces_nan = outside.nan_is_zero or outside.sum_is_guarded
    may_be_low = _may_be_low(layers.biases, layers.inner)
    if may_be_low and any(math.isfinite(x) for x in lows):
        raise NoMatch(
            "a mask after the softmax, and a bias or a score that may be as low as the mask"
        )
    if may_be_low and summed and replaces_nan:
        # 0 / 0 of rows whose visible logits are far below the maximum of all
        raise NoMatch(
            "NaN becomes 0, and a bias or a score may be so low that no exponential is left"
        )
    condition = both(shown, layers.condition)
    if no_row_is_empty(match, condition):
        return layers.logits(condition)
    if before <= after:
        selected = _parts(x for x in outside.selected if not is_random(x))
        is_multiplied = not all(is_random(x) for x in outside.multiplied)
        replaces_nan |= outside.empty_is_zero and not summed
        is_nan = bool(summed) or lows == {-math.inf}
        is_finite = not summed and -math.inf not in lows
        if is_nan and not (selected or is_multiplied or replaces_nan):
            return layers.logits(condition, NAN)
        if (is_finite or replaces_nan or after <= selected) and not may_be_low:
            return layers.logits(condition, ZERO)
    raise NoMatch(
        "masks before and after the softmax give different results to rows that see no key"
    )


def _check_zeros(
    match: Match, before: set[Formula], after: set[Formula], summed: set[Formula]
) -> None:
    """Refuse zeros `after` the softmax of keys that its sum counts.

    The conditions `before` are those of masks of the logits, and `summed` those of its terms.
    """
    if before | after == before | summed:
        return
    if any(not formula_letters(x) & set(match.keys) for x in after - before - summed):
        raise NoMatch("whole rows of the probabilities are set to 0 by a selection")
    raise NoMatch("a mask after the softmax hides other keys than the mask before it")


def _parts(formulas: Iterable[Formula]) -> set[Formula]:
    """Return the conditions that must all be true."""
    return set(conjuncts(both(*formulas)))


def with_sink(match: Match, layers: Layers, shown: Formula) -> Logits:
    """Return the logits beside a sink, which leaves 0 to rows that see no key, as in memeff."""
    assert match.softmax.sink is not None
    number = known_number(match.softmax.sink[0])
    if number is not None and not number * match.softmax.base > HIDDEN:
        raise NoMatch(f"a column of {number:g} beside the logits is no sink, because it hides")
    condition = layers.condition
    if not _parts([shown]) <= _parts([condition]):
        raise NoMatch("a mask after the softmax hides other keys than the mask before it")
    return layers.logits(condition)


def _without_masks(layers: Layers) -> Logits:
    """Return the logits with added masks as biases.

    A mask that replaces logits, and all that is within it, becomes a score function.
    """
    biases: list[BiasTerm] = []
    for layer in layers.ordered:
        if isinstance(layer.term, BiasTerm):
            biases.append(layer.term)
        elif layer.as_bias is not None:
            biases.append(layer.as_bias)
        else:
            return Logits(Known(True), None, tuple(biases), layer.outside)
    return Logits(Known(True), None, tuple(biases), layers.inner)


def _replacing_low(layers: Layers) -> float | None:
    """Return the number that masks outside all biases put in the place of hidden logits."""
    masks = layers.masks
    are_outside = all(isinstance(x.term, MaskTerm) for x in layers.ordered[: len(masks)])
    lows = {x.low for x in masks}
    if not are_outside or len(lows) != 1 or any(x.is_added for x in masks):
        return None
    return lows.pop()


def _meaning_of_empty_rows(layers: Layers) -> str | None:
    """Return MEAN or NAN if all rows that see no key give the same; None if they may differ."""
    lows = {x.low for x in layers.masks}
    if len(lows) != 1:
        return None
    (low,) = lows
    if low == -math.inf:
        return NAN
    if layers.biases:
        return None  # a bias may hide keys too, and a row may then see hidden keys alone
    # A mask that is added leaves the derivative of such a row with respect to the logits.
    return None if any(x.is_added for x in layers.masks) else MEAN
