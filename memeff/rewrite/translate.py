"""Translate a match into a recipe: a call of memeff and the arrays that it takes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax.numpy as jnp

from memeff.rewrite.axes import (
    Element,
    Index,
    Letter,
    NoMatch,
    Slice,
    chain,
    expand,
    expand_all,
    is_cast,
    letters_in,
)
from memeff.rewrite.element import Builder, ElementFunction, Roles
from memeff.rewrite.graph import Value
from memeff.rewrite.logits import (
    NAN,
    BiasTerm,
    Core,
    Dependence,
    Logits,
    Pairs,
    Scaling,
    conjuncts,
    formula_letters,
    query_letters,
    take_apart,
)
from memeff.rewrite.random_bits import Bernoulli, find_bernoulli, is_random
from memeff.rewrite.recipe import Argument, Arrangement, Dropout, PairFunction, Recipe
from memeff.rewrite.recognise import Match, Operand
from memeff.rewrite.rows import Equations
from memeff.rewrite.symbols import Formula, Known, Leaf, Not, Reader, SameIds, letters_of


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A recipe, and the values of the program that are its inputs."""

    match: Match
    recipe: Recipe
    inputs: tuple[Value, ...]
    pair_arrays: tuple[tuple[str, Value], ...]  # arrays that have an element for each pair
    equations: Equations | None = None  # of the program, to check the recipe


def translate(match: Match, *, with_equations: bool = False) -> Replacement:
    """Return the call that computes what a match computes."""
    reader = Reader()
    depends = Dependence(match.first)
    take_apart(match, reader, depends)  # splits letters where a reshape does
    match = _expanded(match)
    logits = take_apart(match, Reader(), depends)
    inputs = _Inputs()
    translation = _Translation(match, depends, logits, inputs)
    recipe = translation.recipe()
    if logits.exact is not None:
        exact = _Translation(match, depends, logits.exact, inputs).recipe()
        recipe = dataclasses.replace(recipe, if_some_row_is_empty=exact, lowest=logits.lowest)
    equations = translation.equations() if with_equations else None
    return Replacement(match, recipe, tuple(inputs.values), tuple(inputs.of_pairs), equations)


def _expanded(match: Match) -> Match:
    """Return the match with the parts of its letters."""

    def operand(x: Operand) -> Operand:
        return Operand(x.value, expand_all(x.index))

    return dataclasses.replace(
        match,
        result_index=expand_all(match.result_index),
        dots=(match.dots[0], expand_all(match.dots[1])),
        query=operand(match.query),
        key=operand(match.key),
        value=operand(match.value),
        letters=expand(match.letters),
        keys=expand(match.keys),
        columns=expand(match.columns),
    )


@dataclasses.dataclass
class _Condition:
    """The condition of a mask, by the arguments of memeff that say its parts."""

    low: int | None = None
    high: int | None = None
    segments: SameIds | None = None
    dense: Formula | None = None  # a part that is an array with an element for each pair
    small: list[Formula] = dataclasses.field(default_factory=list)  # parts of queries or of keys
    rest: list[Formula] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Inputs:
    """The values of the program that a replacement reads."""

    values: list[Value] = dataclasses.field(default_factory=list)
    of_pairs: list[tuple[str, Value]] = dataclasses.field(default_factory=list)


class _Translation:
    """The translation of one match, whose logits are known."""

    def __init__(self, match: Match, depends: Dependence, logits: Logits, inputs: _Inputs):
        self.match = match
        self.depends = depends
        self.logits = logits
        self.inputs = inputs
        self.query = query_letters(match)
        self.condition = self._sort(self.logits.condition)
        self.biases = list(self.logits.biases)
        self.dense_bias = self._take_dense_bias()
        self.roles = self._roles()
        low, high = self.condition.low, self.condition.high
        self.q_offset, self.window = _window(low, high)

    # ---- Sorting

    def _sort(self, formula: Formula) -> _Condition:
        """Sort the parts of a condition by the argument that says each of them best."""
        pairs = Pairs(self.match)
        condition = _Condition()
        for part in conjuncts(formula):
            bounds = pairs.bounds(part)
            letters = formula_letters(part)
            if bounds is not None:
                least, most = bounds
                condition.low = _tighter(max, condition.low, least)
                condition.high = _tighter(min, condition.high, most)
            elif not (set(letters) & set(self.query) and set(letters) & set(self.match.keys)):
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
        heads = set(self._roles_without_choice().heads)
        sides = [set(letters_of(x.value, x.index)) for x in (part.first, part.second)]
        if any(heads & side for side in sides):
            return False
        of_query = [bool(side & set(self.query)) for side in sides]
        of_keys = [bool(side & set(self.match.keys)) for side in sides]
        return of_query in ([True, False], [False, True]) and of_keys == of_query[::-1]

    def _is_dense(self, part: Formula) -> bool:
        """Return True for an array of the program that has an element for each pair."""
        leaf = part.part if isinstance(part, Not) else part
        if not isinstance(leaf, Leaf):
            return False
        return self._reads_pairs((leaf.element.value, leaf.element.index))

    def _reads_pairs(self, element: Element) -> bool:
        """Return True if an element is computed from an array with an element for each pair."""
        builder = Builder(self._roles_without_choice())
        builder.element(*element)
        return builder.reads_pairs

    def _take_dense_bias(self) -> BiasTerm | None:
        """Take the first bias that is an array with an element for each pair."""
        for bias in self.biases:
            letters = letters_of(*bias.element)
            over_pairs = set(letters) & set(self.query) and set(letters) & set(self.match.keys)
            if over_pairs and self._reads_pairs(bias.element):
                self.biases.remove(bias)
                return bias
        return None

    # ---- Roles of letters

    def _roles_without_choice(self) -> Roles:
        query_only = self.match.query_only
        groups = tuple(x for x in query_only if x not in self.query)
        batch = tuple(x for x in self.match.letters if x not in (*query_only, *self.match.keys))
        return Roles(batch[:-1], (*batch[-1:], *groups), self.query, self.match.keys)

    def _roles(self) -> Roles:
        """Choose the letters of heads so that arrays of T x S stay broadcast where possible."""
        default = self._roles_without_choice()
        groups = tuple(x for x in default.heads if x in self.match.query_only)
        batch = tuple(x for x in (*default.batch, *default.heads) if x not in groups)
        dense = []
        if self.dense_bias is not None:
            dense.append(set(letters_of(*self.dense_bias.element)))
        if self.condition.dense is not None:
            dense.append(set(formula_letters(self.condition.dense)))
        best = default
        least = math.inf
        for count in range(len(batch) + 1):
            for heads in itertools.combinations(batch, count):
                leads = tuple(x for x in batch if x not in heads)
                roles = Roles(leads, (*heads, *groups), self.query, self.match.keys)
                copies = sum(_copies(roles, letters) for letters in dense)
                # one axis of heads is the usual form
                cost = copies + (0 if heads == batch[-1:] else 0.5) + 0.01 * abs(count - 1)
                if cost < least:
                    best, least = roles, cost
        return best

    # ---- The recipe

    def recipe(self) -> Recipe:
        """Return the recipe."""
        match = self.match
        query, key, value, dtype = self._operands()
        scaling = self.logits.inner if isinstance(self.logits.inner, Scaling) else Scaling(1.0)
        mask, is_hidden = self._dense_mask()
        score_fn, bias, bias_table = self._score()
        has_mask = self.logits.condition != Known(True)
        may_be_empty = bias is not None or bias_table is not None or score_fn and has_mask
        empty_rows = self.logits.empty_rows
        if empty_rows is None and may_be_empty:
            empty_rows = NAN  # of a bias or a score that is -inf for all visible keys
        return Recipe(
            query=query,
            key=key,
            value=value,
            dtype=dtype,
            sizes=self.roles.sizes,
            leads=tuple(x.size for x in self.roles.batch),
            scale=scaling.factor,
            scales=tuple((op, self._scalar(x)) for op, x in scaling.scales),
            soft_cap=scaling.soft_cap,
            window=self.window,
            q_offset=self.q_offset,
            segments=self._segments(),
            mask=mask,
            mask_is_hidden=is_hidden,
            mask_table=self._of_formulas(self.condition.small, 0),
            mask_fn=self._of_formulas(self.condition.rest, self.q_offset),
            bias=bias,
            bias_table=bias_table,
            score_fn=score_fn,
            empty_rows=empty_rows,
            factors=self._factors(),
            factor=self._factor(),
            dropout=self._dropout(),
            precision=match.first.params["precision"],
            out=self._out(),
            out_dtype=str(match.result.dtype),
        )

    def equations(self) -> Equations:
        """Return what the program computes of each pair, with no part of it named."""
        softmax = self.match.softmax
        core = Core(softmax.logits, softmax.base)
        shown = [x for x in softmax.outside.shown if not is_random(x)]
        return Equations(
            self._of_biases(core, []),
            self._of_formulas(shown, self.q_offset),
            self._of_formulas(list(softmax.shown_in_sum), self.q_offset),
        )

    def _number(self, value: Value) -> int:
        """Return the number of a value among the inputs."""
        values = self.inputs.values
        if value not in values:
            values.append(value)
        return values.index(value)

    def _scalar(self, value: Value) -> int:
        elements = chain(value, ((),) * len(value.shape))
        return self._number(min((x for x, _ in elements), key=lambda x: math.prod(x.shape)))

    def _operands(self) -> tuple[Argument, Argument, Argument, str]:
        """Return query, key and value, and the dtype of the call."""
        match = self.match
        roles = self.roles
        groups = tuple(x for x in roles.heads if x in match.query_only)
        heads = tuple(x for x in roles.heads if x not in groups)
        lead = tuple((x,) for x in roles.batch)
        hidden = tuple(x for x in letters_in(match.key.index) if x not in _known(match))
        out = match.result.dtype
        operands = []
        for operand in (match.query, match.key, match.value):
            operands.append(_without_cast(operand, out))
        dtype = jnp.result_type(*(x.value.dtype for x in operands), out)
        forms = (
            (*lead, self.query, (*heads, *groups), hidden),
            (*lead, match.keys, heads, hidden),
            (*lead, match.keys, heads, match.columns),
        )
        arguments = []
        for operand, form in zip(operands, forms, strict=True):
            arrangement = arrange(operand.index, form, is_full=True)
            arguments.append(Argument(self._number(operand.value), arrangement))
        query, key, value = arguments
        return query, key, value, str(dtype)

    def _out(self) -> Arrangement:
        """Return how the output of memeff becomes the result of the replaced equations."""
        roles = self.roles
        index = (*((x,) for x in roles.batch), self.query, roles.heads, self.match.columns)
        return arrange(index, self.match.result_index, is_full=True)

    def _factors(self) -> tuple[tuple[str, Argument], ...]:
        """Return what the output is multiplied with or divided by."""
        form = (*((x,) for x in self.roles.batch), self.query, self.roles.heads, ())
        factors = []
        for operation, element in self.match.softmax.outside.factors:
            value, index = _smallest(element)
            arrangement = arrange(index, form, is_full=False)
            factors.append((operation, Argument(self._number(value), arrangement)))
        return tuple(factors)

    def _bernoulli(self) -> Bernoulli | None:
        formula = self.logits.dropout
        return find_bernoulli(formula.element.value) if isinstance(formula, Leaf) else None

    def _factor(self) -> float:
        """Return the number by which the output is multiplied; memeff divides by the keep rate."""
        bernoulli = self._bernoulli()
        keep_rate = 1.0 if bernoulli is None else bernoulli.keep_rate
        return self.match.softmax.outside.number * keep_rate

    def _dropout(self) -> Dropout | None:
        """Return the dropout, if its bits have the order in which memeff draws them."""
        formula = self.logits.dropout
        bernoulli = self._bernoulli()
        if bernoulli is None or not isinstance(formula, Leaf):
            return None
        order = letters_in(formula.element.index)
        pairs = [*self.query, *self.match.keys]
        is_shared = order == pairs
        if not is_shared and order != [*self.roles.batch, *self.roles.heads, *pairs]:
            raise NoMatch("the bits of its dropout are drawn in another order of axes")
        return Dropout(self._number(bernoulli.key), 1 - bernoulli.keep_rate, is_shared)

    def _segments(self) -> tuple[Argument, Argument] | None:
        part = self.condition.segments
        if part is None:
            return None
        elements = [(part.first.value, part.first.index), (part.second.value, part.second.index)]
        if set(self.query) & letters_of(*elements[1]):
            elements.reverse()
        arguments = []
        for element, last in zip(elements, (self.query, self.match.keys), strict=True):
            value, index = _smallest(element)
            form = (*((x,) for x in self.roles.batch), last)
            arguments.append(Argument(self._number(value), arrange(index, form, is_full=True)))
        return arguments[0], arguments[1]

    def _pair_form(self) -> tuple[Any, ...]:
        """Return the letters of the dims of a mask or a bias."""
        lead = tuple((x,) for x in self.roles.batch)
        return (*lead, self.roles.heads, self.query, self.match.keys)

    def _dense_mask(self) -> tuple[Argument | None, bool]:
        """Return the mask that is an array of pairs, and whether it is True where hidden."""
        part = self.condition.dense
        if part is None:
            return None, False
        leaf = part.part if isinstance(part, Not) else part
        assert isinstance(leaf, Leaf)
        value, index = _smallest((leaf.element.value, leaf.element.index))
        self.inputs.of_pairs.append(("mask", value))
        argument = Argument(self._number(value), arrange(index, self._pair_form(), is_full=False))
        return argument, isinstance(part, Not)

    def _score(self) -> tuple[PairFunction | None, Argument | None, PairFunction | None]:
        """Return the score function, a bias of pairs, and a small bias that is computed once."""
        dense = None
        if self.dense_bias is not None:
            value, index = _smallest(self.dense_bias.element)
            self.inputs.of_pairs.append(("bias", value))
            arrangement = arrange(index, self._pair_form(), is_full=False)
            dense = Argument(self._number(value), arrangement, self.dense_bias.factor)
        inner = self.logits.inner
        if dense is None and isinstance(inner, Scaling) and self._are_small(self.biases):
            return None, None, self._of_biases(None, self.biases)
        core = inner if isinstance(inner, Core) else None
        if core is None and not self.biases:
            return None, dense, None
        return self._of_biases(core or _plain(self.match), self.biases), dense, None

    def _are_small(self, biases: list[BiasTerm]) -> bool:
        """Return True if there is a bias, and none has an element for each pair."""
        keys = set(self.match.keys)
        for bias in biases:
            letters = letters_of(*bias.element)
            if letters & keys and letters & set(self.query):
                return False
        return bool(biases)

    def _of_biases(self, core: Core | None, biases: list[BiasTerm]) -> PairFunction:
        """Return the function of a core and of biases; without a core, of the biases alone."""
        builder = Builder(self.roles, self.q_offset if core is not None else 0)
        terms = []
        if core is not None:
            builder.dots, builder.dots_index = self.match.dots
            builder.depends = self.depends
            terms.append((core.element, core.factor))
        # the innermost first, as the program adds them: beside -1e9 each order rounds differently
        terms.extend((x.element, x.factor) for x in reversed(biases))
        steps = [builder.scaled(builder.element(*x), factor) for x, factor in terms]
        builder.add("sum", tuple(steps))
        return self._pair_function(builder, "score" if core is not None else "bias")

    def _of_formulas(self, formulas: list[Formula], q_offset: int) -> PairFunction | None:
        """Return the function that is True where all formulas are."""
        if not formulas:
            return None
        builder = Builder(self.roles, q_offset)
        builder.add("all", tuple(builder.formula(x) for x in formulas))
        return self._pair_function(builder, "mask")

    def _pair_function(self, builder: Builder, kind: str) -> PairFunction:
        function: ElementFunction = builder.function(kind)
        return PairFunction(function, tuple(self._number(x) for x in builder.leaves))


def _plain(match: Match) -> Core:
    """Return the product itself."""
    return Core(match.dots, 1.0)


def _known(match: Match) -> set[Letter]:
    """Return the letters of the probabilities."""
    return set(match.letters)


def _tighter(choose: Any, bound: int | None, other: int | None) -> int | None:
    """Return the bound that hides more; None is no bound."""
    if bound is None or other is None:
        return other if bound is None else bound
    return choose(bound, other)


def _window(low: int | None, high: int | None) -> tuple[int, tuple[int | None, int | None]]:
    """Return q_offset and (left, right), which must not be negative, for low <= key - query <= high."""
    q_offset = 0
    if high is not None and (high < 0 or low is None):
        q_offset = high
    elif low is not None and low > 0:
        q_offset = low
    left = None if low is None else q_offset - low
    right = None if high is None else high - q_offset
    return q_offset, (left, right)


def _without_cast(operand: Operand, result_dtype: Any) -> Operand:
    """Return an operand as it was before a cast that lost nothing, if the result is as narrow."""
    value = operand.value
    if not is_cast(value) or value.maker is None:
        return operand
    narrow = value.maker.inputs[0]
    if narrow.dtype == result_dtype and jnp.promote_types(narrow.dtype, value.dtype) == value.dtype:
        return Operand(narrow, operand.index)
    return operand


def _smallest(element: Element) -> Element:
    """Return the smallest array from which an element differs by moves alone."""
    candidates = []
    for value, index in chain(*element):
        if str(value.dtype) != str(element[0].dtype):
            break
        candidates.append((value, index))
    return min(candidates, key=lambda x: math.prod(x[0].shape))


def _copies(roles: Roles, letters: set[Letter]) -> float:
    """Return how many times an array of pairs must be repeated: 0 if it stays broadcast."""
    copies = 1
    for group in (roles.batch, roles.heads):
        present = [x for x in group if x in letters]
        if present:
            copies *= math.prod(x.size for x in group if x not in letters)
    return copies - 1


def arrange(index: Index, form: tuple[Any, ...], *, is_full: bool) -> Arrangement:
    """Return how an array, read at `index`, gets dims of the letters in `form`.

    A letter that the array lacks is broadcast. Without `is_full`, a dim of which the array has no
    letter has size 1.
    """
    slices = []
    split: list[Letter] = []
    for dim in index:
        if isinstance(dim, Slice):
            inner = dim.inner
            if isinstance(inner, Slice):
                raise NoMatch("a slice of a slice of a mask or a bias")
            count = math.prod(x.size for x in inner)
            slices.append((dim.start, dim.stride, count))
            split.extend(expand(inner))
        else:
            slices.append(None)
            split.extend(expand(dim))
    wanted = [letter for dim in form for letter in expand(dim)]
    if len(set(split)) != len(split) or not set(split) <= set(wanted):
        raise NoMatch("an array is read along axes that attention does not have")
    order = [split.index(x) for x in wanted if x in split]
    with_ones = []
    broadcast = []
    merged = []
    for dim in form:
        letters = expand(dim)
        keep = is_full or any(x in split for x in letters)
        for x in letters:
            with_ones.append(x.size if x in split else 1)
            broadcast.append(x.size if keep else 1)
        merged.append(math.prod(x.size for x in letters) if keep else 1)
    return Arrangement(
        tuple(slices),
        tuple(x.size for x in split),
        tuple(order),
        tuple(with_ones),
        tuple(broadcast),
        tuple(merged),
    )
