"""Read formulas as bounds on the distance of a key to a query, and prove that rows see a key."""

from __future__ import annotations

from typing import Any

from memeff.rewrite.axes import Index, Letter, NoMatch, count_positions, letters_in
from memeff.rewrite.reader import letters_of, position_along
from memeff.rewrite.recognise import Match
from memeff.rewrite.symbols import And, AtLeastZero, Formula, IsZero, Known, Leaf, Not, Or, SameIds

ONE_QUERY = "one query only, so the logits are no larger than the keys"


class Pairs:
    """The positions of queries and keys, and what a formula says of them."""

    def __init__(self, match: Match):
        self.query = query_letters(match)
        self.keys = match.keys
        self.T = count_positions(self.query)
        self.S = count_positions(self.keys)
        # T - S
        difference = position_along(self.query).plus(position_along(self.keys), -1)
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
        return _renamed(first.dims, swap) == _renamed(second.dims, swap)


def _renamed(index: Index, names: dict[Letter, Letter]) -> Any:
    """Return an index with other letters; slices keep theirs."""

    def rename(dim: Any) -> Any:
        return tuple(names.get(x, x) for x in dim) if isinstance(dim, tuple) else dim

    return tuple(map(rename, index))


def query_letters(match: Match) -> tuple[Letter, ...]:
    """Return the letters of T: of those that only the query has, the longest.

    If the keys have several letters, as rows and columns, those of the same sizes belong to T too,
    and those that share a dim of the probabilities with the longest.
    """
    candidates = match.query_only
    if not candidates:
        raise NoMatch(ONE_QUERY)
    longest = max(x.size for x in candidates)
    last = [x for x in candidates if x.size == longest][-1]
    if len(match.keys) == 1:
        return (last,)
    (dim,) = (dim for dim in match.dims if last in letters_in([dim]))
    sizes = [x.size for x in match.keys]
    return tuple(x for x in candidates if x in letters_in([dim]) or x.size in sizes)


def formula_letters(formula: Formula) -> set[Letter]:
    """Return the letters on which a formula depends."""
    if isinstance(formula, Leaf):
        return letters_of(*formula.element)
    if isinstance(formula, SameIds):
        return letters_of(*formula.first) | letters_of(*formula.second)
    if isinstance(formula, Not):
        return formula_letters(formula.part)
    if isinstance(formula, And | Or):
        return set().union(*(formula_letters(x) for x in formula.parts))
    affine = getattr(formula, "affine", None)
    return set() if affine is None else {letter for letter, _ in affine.coefficients}


def conjuncts(formula: Formula) -> tuple[Formula, ...]:
    """Return the parts that must all be true."""
    if isinstance(formula, And):
        return formula.parts
    return () if formula == Known(True) else (formula,)


def tighter(choose: Any, bound: int | None, other: int | None) -> int | None:
    """Return the bound that hides more, by `choose` = max or min; None is no bound."""
    if bound is None or other is None:
        return other if bound is None else bound
    return choose(bound, other)


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
        low = tighter(max, low, least)
        high = tighter(min, high, most)
    if shows_diagonal and (low or 0) <= 0 <= (0 if high is None else high):
        return True
    first_fits = high is None or high >= 0  # row 0 sees key 0 or a later one
    last_fits = low is None or pairs.T - 1 + low <= pairs.S - 1
    in_order = low is None or high is None or low <= high
    return only_bounds and first_fits and last_fits and in_order
