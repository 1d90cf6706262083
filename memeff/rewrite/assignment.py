"""Assign each part of the logits to the argument of memeff that says it best.

Bounds on the distance of key and query become causal order or a window, equal ids segments, arrays
with an element for each pair a mask or a bias. Of the letters that are neither queries nor keys,
those of heads are chosen so that such arrays stay broadcast.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from memeff.rewrite.arrange import smallest
from memeff.rewrite.axes import Element, Letter, NoMatch, count_positions
from memeff.rewrite.element import Builder, Roles
from memeff.rewrite.pairs import Pairs, conjuncts, formula_letters, query_letters, tighter
from memeff.rewrite.reader import letters_of
from memeff.rewrite.recognise import Match
from memeff.rewrite.symbols import Formula, Leaf, Not, SameIds
from memeff.rewrite.terms import BiasTerm, Logits


@dataclasses.dataclass
class Condition:
    """The condition of a mask, by the arguments of memeff that say its parts."""

    low: int | None = None
    high: int | None = None
    segments: SameIds | None = None
    dense: Formula | None = None  # a part that is an array with an element for each pair
    small: list[Formula] = dataclasses.field(default_factory=list)  # parts of queries or of keys
    rest: list[Formula] = dataclasses.field(default_factory=list)


class Assignment:
    """The arguments of one match, whose logits are known, and the roles of its letters."""

    def __init__(self, match: Match, logits: Logits, roles: Roles | None):
        self.match = match
        self.query = query_letters(match)
        self.default = self._roles_without_choice()
        self.condition = self._sort(logits.condition)
        self.biases = list(logits.biases)
        self.dense_bias = self._take_dense_bias()
        self.roles = self._roles() if roles is None else roles
        self._leave_segments_of_heads()
        self.q_offset, self.window = _window(self.condition.low, self.condition.high)

    # ---- Sorting

    def _sort(self, formula: Formula) -> Condition:
        """Sort the parts of a condition by the argument that says each of them best."""
        pairs = Pairs(self.match)
        condition = Condition()
        for part in conjuncts(formula):
            bounds = pairs.bounds(part)
            letters = formula_letters(part)
            if bounds is not None:
                least, most = bounds
                condition.low = tighter(max, condition.low, least)
                condition.high = tighter(min, condition.high, most)
            elif not self.default.over_pairs(letters):
                condition.small.append(part)
            elif condition.segments is None and self._are_segments(part):
                assert isinstance(part, SameIds)
                condition.segments = part
            elif condition.dense is None and self._is_dense(part):
                condition.dense = part
            else:
                condition.rest.append(part)
        if condition.dense is not None:
            condition.rest.extend(condition.small)
            condition.small = []
            return condition
        of_keys = [x for x in condition.small if set(formula_letters(x)) & set(self.match.keys)]
        of_queries = [x for x in condition.small if set(formula_letters(x)) & set(self.query)]
        if of_keys and of_queries:  # one table of both would have T x S elements
            condition.rest.extend(of_queries)
            condition.small = [x for x in condition.small if x not in of_queries]
        return condition

    def _are_segments(self, part: Formula) -> bool:
        """Return True for ids of queries that are compared with ids of keys."""
        if not isinstance(part, SameIds):
            return False
        heads = set(self.default.heads)
        sides = [letters_of(*x) for x in (part.first, part.second)]
        if any(heads & side for side in sides):
            return False
        of_query = [bool(side & set(self.query)) for side in sides]
        of_keys = [bool(side & set(self.match.keys)) for side in sides]
        return of_query in ([True, False], [False, True]) and of_keys == of_query[::-1]

    def _leave_segments_of_heads(self) -> None:
        """Leave segments that differ from head to head to a `mask_fn`, once heads are chosen."""
        segments = self.condition.segments
        if segments is not None and formula_letters(segments) & set(self.roles.heads):
            self.condition.rest.append(segments)
            self.condition.segments = None

    def _is_dense(self, part: Formula) -> bool:
        """Return True for an array of the program that has an element for each pair."""
        leaf = part.part if isinstance(part, Not) else part
        if not isinstance(leaf, Leaf):
            return False
        return self._is_array_of_pairs(leaf.element)

    def _is_array_of_pairs(self, element: Element) -> bool:
        """Return True for an element of an array that must exist, with an element for each pair.

        One that is larger than the arrays of pairs from which it is computed need not exist.
        """
        builder = Builder(self.default)
        builder.element(*element)
        read = sum(math.prod(x.shape) for x in builder.of_pairs)
        return 0 < math.prod(smallest(element)[0].shape) <= read

    def _take_dense_bias(self) -> BiasTerm | None:
        """Take the first bias that is an array with an element for each pair."""
        for bias in self.biases:
            is_over_pairs = self.default.over_pairs(letters_of(*bias.element))
            if is_over_pairs and self._is_array_of_pairs(bias.element):
                self.biases.remove(bias)
                return bias
        return None

    # ---- Roles of letters

    def _roles_without_choice(self) -> Roles:
        query_only = self.match.query_only
        groups = tuple(x for x in query_only if x not in self.query)
        batch = tuple(x for x in self.match.letters if x not in (*query_only, *self.match.keys))
        return Roles(batch[:-1], (*batch[-1:], *groups), self.query, self.match.keys)

    def _letters_of_sink(
        self, batch: tuple[Letter, ...], groups: tuple[Letter, ...]
    ) -> set[Letter]:
        """Return the letters of the sink, which must be those of heads."""
        element = self.match.softmax.sink
        letters = set() if element is None else set(letters_of(*element))
        if not letters <= {*batch, *groups}:
            raise NoMatch("a sink that differs from query to query")
        return letters

    def _roles(self) -> Roles:
        """Choose the letters of heads so that arrays of T x S stay broadcast where possible."""
        default = self.default
        groups = tuple(x for x in default.heads if x in self.match.query_only)
        batch = tuple(x for x in (*default.batch, *default.heads) if x not in groups)
        dense = []
        if self.dense_bias is not None:
            dense.append(set(letters_of(*self.dense_bias.element)))
        if self.condition.dense is not None:
            dense.append(set(formula_letters(self.condition.dense)))
        sink = self._letters_of_sink(batch, groups)
        best = default
        least = math.inf
        for count in range(len(batch) + 1):
            for heads in itertools.combinations(batch, count):
                if not sink <= {*heads, *groups}:
                    continue
                leads = tuple(x for x in batch if x not in heads)
                roles = Roles(leads, (*heads, *groups), self.query, self.match.keys)
                copies = sum(_copies(roles, letters) for letters in dense)
                # one axis of heads is the usual form
                cost = copies + (0 if heads == batch[-1:] else 0.5) + 0.01 * abs(count - 1)
                if cost < least:
                    best, least = roles, cost
        return best


def _window(low: int | None, high: int | None) -> tuple[int, tuple[int | None, int | None]]:
    """Return q_offset and (left, right) for low <= key - query <= high.

    left and right are not negative.
    """
    if low is not None and high is not None and low > high:
        raise NoMatch("its mask hides all keys from all queries")
    q_offset = 0
    if high is not None and (high < 0 or low is None):
        q_offset = high
    elif low is not None and low > 0:
        q_offset = low
    left = None if low is None else q_offset - low
    right = None if high is None else high - q_offset
    return q_offset, (left, right)


def _copies(roles: Roles, letters: set[Letter]) -> float:
    """Return how many times an array of pairs must be repeated: 0 if it stays broadcast."""
    copies = 1
    for group in (roles.batch, roles.heads):
        present = [x for x in group if x in letters]
        if present:
            copies *= count_positions(x for x in group if x not in letters)
    return copies - 1
