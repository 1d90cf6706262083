"""Define what the logits are made of: masks, biases, and the scaled product or a score."""

from __future__ import annotations

import dataclasses
import math

from memeff.rewrite.axes import Element
from memeff.rewrite.symbols import Formula, both

# A logit of this or less hides its key, because exp(s - m) of it is 0 beside any logit of a model.
# Programs write -1e9 or less; log(2) of it is what exp2 leaves.
HIDDEN = -0.6e9
MEAN = "mean"  # a row that sees no key gives the mean of all values
NAN = "nan"
ZERO = "zero"
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
    whole: Element  # what the program adds at once: a sum of which `element` is a term


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The product becomes cap(factor * scale * product), with the traced scalars of `scales`."""

    factor: float
    scales: tuple[tuple[str, Element], ...] = ()  # "mul" or "div", and one number of all pairs
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
    empty_rows: str | None  # what rows give that see no key; None: no row is empty
    biases: tuple[BiasTerm, ...]
    inner: Scaling | Core
    exact: Logits | None = None  # those to use if some row sees no key above `lowest`
    lowest: float = -math.inf
    low: float | None = None  # the number that replaces hidden logits, with their biases
    dropout: Formula | None = None  # under which a probability is kept


@dataclasses.dataclass(frozen=True)
class Layer:
    """A term, and the logits within it, times a factor."""

    term: MaskTerm | BiasTerm
    outside: Core  # the logits with this term
    as_bias: BiasTerm | None = None  # the same term as a bias, if it is added


@dataclasses.dataclass(frozen=True)
class Layers:
    """The terms of the logits, the outermost first, and what is within all of them."""

    ordered: list[Layer]
    inner: Scaling | Core

    @property
    def masks(self) -> list[MaskTerm]:
        """Return the masks among the terms."""
        return [x.term for x in self.ordered if isinstance(x.term, MaskTerm)]

    @property
    def biases(self) -> tuple[BiasTerm, ...]:
        """Return the biases among the terms."""
        return tuple(x.term for x in self.ordered if isinstance(x.term, BiasTerm))

    @property
    def condition(self) -> Formula:
        """Return the condition under which no mask hides a key."""
        return both(*(x.condition for x in self.masks))

    def logits(self, condition: Formula, empty_rows: str | None = None) -> Logits:
        """Return the logits with one mask for all, or without one if it is always true."""
        return Logits(condition, empty_rows, self.biases, self.inner)
