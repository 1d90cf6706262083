"""Translate a match into a recipe: a call of memeff and the arrays that it takes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from memeff.problem import sum_dtype
from memeff.rewrite import element_function
from memeff.rewrite.arrange import arrange, reduced, smallest, without_cast
from memeff.rewrite.assignment import Assignment
from memeff.rewrite.axes import Element, NoMatch, Slice, expand, expand_all, letters_in
from memeff.rewrite.element import Builder, Roles
from memeff.rewrite.element_function import (
    ElementFunction,
    all_true,
    raised,
    rounded,
    wide_sum,
)
from memeff.rewrite.empty_rows import check_logarithm
from memeff.rewrite.graph import Value
from memeff.rewrite.logits import Dependence, is_product_of_more, take_apart
from memeff.rewrite.pairs import conjuncts, formula_letters, no_row_is_empty
from memeff.rewrite.random_bits import Bernoulli, find_bernoulli, is_random
from memeff.rewrite.reader import Reader, letters_of
from memeff.rewrite.recipe import Argument, Arrangement, Dropout, PairFunction, Recipe
from memeff.rewrite.recognise import Match, Operand, Product
from memeff.rewrite.rows import Equations
from memeff.rewrite.symbols import Formula, Leaf, Not
from memeff.rewrite.terms import NAN, ZERO, BiasTerm, Core, Logits, Scaling


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A recipe, and the values of the program that are its inputs."""

    match: Match
    recipe: Recipe
    inputs: tuple[Value, ...]
    pair_arrays: tuple[tuple[str, Value], ...]  # arrays that have an element for each pair
    equations: Equations | None = None  # of the program, to check the recipe


def translate(match: Match, *, with_equations: bool) -> Replacement:
    """Return the call that computes what a match computes."""
    depends = Dependence(match.first, match.second)
    logits = take_apart(match, Reader(), depends)  # splits letters where a reshape does
    whole = match
    match = _expanded(match)
    if match != whole:
        logits = take_apart(match, Reader(), depends)
    inputs = _Inputs()
    translation = _Translation(match, depends, logits, inputs)
    recipe = translation.recipe()
    check_logarithm(match, logits)
    if logits.exact is not None:
        has_only_bias = recipe.bias is not None and recipe.score_fn is None
        bias_decides = has_only_bias and no_row_is_empty(match, logits.condition)
        if bias_decides and logits.low is not None and translation.bias_has_all_dims():
            exact = translation.filled_recipe(recipe, logits.low)
        else:
            roles = translation.roles  # both calls return [*leads, T, N, D]
            exact = _Translation(match, depends, logits.exact, inputs, roles).recipe()
        recipe = dataclasses.replace(
            recipe, if_some_row_is_empty=exact, lowest=logits.lowest, bias_decides=bias_decides
        )
    equations = translation.equations() if with_equations else None
    return Replacement(match, recipe, tuple(inputs.values), tuple(inputs.of_pairs), equations)


def _expanded(match: Match) -> Match:
    """Return the match with the parts of its letters."""

    def operand(x: Operand) -> Operand:
        return Operand(x.value, expand_all(x.index))

    def product(x: Product) -> Product:
        return dataclasses.replace(x, query=operand(x.query), key=operand(x.key))

    return dataclasses.replace(
        match,
        result_index=expand_all(match.result_index),
        dots=(match.dots[0], expand_all(match.dots[1])),
        products=tuple(product(x) for x in match.products),
        value=operand(match.value),
        dims=expand_all(match.dims),
        keys=expand(match.keys),
        columns=expand(match.columns),
    )


@dataclasses.dataclass
class _Inputs:
    """The values of the program that a replacement reads."""

    values: list[Value] = dataclasses.field(default_factory=list)
    of_pairs: list[tuple[str, Value]] = dataclasses.field(default_factory=list)

    def add_pairs(self, name: str, value: Value) -> None:
        """Note an array with an element for each pair, once for all that may read it."""
        if all(value is not x for _, x in self.of_pairs):
            self.of_pairs.append((name, value))


class _Translation:
    """The translation of one match, whose logits are known."""

    def __init__(
        self,
        match: Match,
        depends: Dependence,
        logits: Logits,
        inputs: _Inputs,
        roles: Roles | None = None,
    ):
        self.match = match
        self.depends = depends
        self.logits = logits
        self.inputs = inputs
        assignment = Assignment(match, logits, roles)
        self.query = assignment.query
        self.condition = assignment.condition
        self.biases = assignment.biases
        self.dense_bias = assignment.dense_bias
        self.roles = assignment.roles
        self.window = assignment.window
        self.q_offset = assignment.q_offset

    def recipe(self) -> Recipe:
        """Return the recipe."""
        match = self.match
        queries, keys, value, dtype = self._operands()
        scaling = self.logits.inner if isinstance(self.logits.inner, Scaling) else Scaling(1.0)
        mask, is_hidden = self._dense_mask()
        score_fn, bias, bias_table = self._score()
        may_be_empty = any(x is not None for x in (bias, bias_table, score_fn))
        empty_rows = self.logits.empty_rows
        sink = self._sink()
        if empty_rows is None and may_be_empty and sink is None:
            empty_rows = NAN  # of a bias or a score that is -inf for all visible keys
        outside = match.softmax.outside
        nan_is_zero = outside.nan_is_zero
        if empty_rows == ZERO or empty_rows == NAN and (nan_is_zero or outside.empty_is_zero):
            empty_rows = None
        return Recipe(
            queries=queries,
            keys=keys,
            value=value,
            dtype=dtype,
            sizes=self.roles.sizes,
            leads=tuple(x.size for x in self.roles.batch),
            scale=scaling.factor * match.products[0].factor,
            scales=tuple((op, self._reduced(x, ())) for op, x in scaling.scales),
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
            nan_is_zero=nan_is_zero,
            sink=sink,
            factors=self._factors(),
            factor=self._factor(),
            dropout=self._dropout(),
            precision=match.precision,
            out=self._out(),
            out_dtype=str(match.result.dtype),
        )

    def bias_has_all_dims(self) -> bool:
        """Return True if the bias keeps its size where hidden logits replace parts of it."""
        assert self.dense_bias is not None
        return formula_letters(self.logits.condition) <= letters_of(*self.dense_bias.element)

    def filled_recipe(self, recipe: Recipe, low: float) -> Recipe:
        """Return the recipe with `low` for hidden logits, without a mask."""
        visible = self._of_formulas(list(conjuncts(self.logits.condition)), 0)
        return dataclasses.replace(
            recipe,
            window=(None, None),
            q_offset=0,
            segments=None,
            mask=None,
            mask_table=None,
            mask_fn=None,
            visible=visible,
            low=low,
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
            self.match.products[0].factor,
        )

    def _number(self, value: Value) -> int:
        """Return the number of a value among the inputs."""
        values = self.inputs.values
        if value not in values:
            values.append(value)
        return values.index(value)

    def _argument(
        self, element: Element, form: tuple[Any, ...], factor: float = 1.0, *, is_full: bool = True
    ) -> Argument:
        """Return an array of the program, with dims of the letters in `form`, as an argument."""
        value, index = element
        return Argument(self._number(value), arrange(index, form, is_full=is_full), factor)

    def _reduced(
        self, element: Element, form: tuple[Any, ...], factor: float = 1.0, *, is_full: bool = True
    ) -> Argument:
        """Return the smallest array of an element, which depends on letters in `form` alone."""
        return self._argument(reduced(element, form), form, factor, is_full=is_full)

    @property
    def _leads(self) -> tuple[Any, ...]:
        """Return a dim for each letter of batch entries."""
        return tuple((x,) for x in self.roles.batch)

    def _operands(self) -> tuple[tuple[Argument, ...], tuple[Argument, ...], Argument, str]:
        """Return the vectors of queries and keys, the values, and the dtype of the call."""
        match = self.match
        roles = self.roles
        groups = tuple(x for x in roles.heads if x in match.query_only)
        heads = tuple(x for x in roles.heads if x not in groups)
        out = match.result.dtype
        dtypes = [out]

        def argument(operand: Operand, form: tuple[Any, ...], factor: float = 1.0) -> Argument:
            operand = without_cast(operand, out)
            dtypes.append(operand.value.dtype)
            return self._argument((operand.value, operand.index), form, factor)

        queries = []
        keys = []
        for x in match.products:
            hidden = tuple(y for y in letters_in(x.key.index) if y not in match.letters)
            ratio = x.factor / match.products[0].factor
            query_form = (*self._leads, self.query, (*heads, *groups), hidden)
            queries.append(argument(x.query, query_form, ratio))
            keys.append(argument(x.key, (*self._leads, match.keys, heads, hidden)))
        value = argument(match.value, (*self._leads, match.keys, heads, match.columns))
        return tuple(queries), tuple(keys), value, str(jnp.result_type(*dtypes))

    def _out(self) -> Arrangement:
        """Return how the output of memeff becomes the result of the replaced equations."""
        index = (*self._leads, self.query, self.roles.heads, self.match.columns)
        return arrange(index, self.match.result_index, is_full=True)

    def _factors(self) -> tuple[tuple[str, Argument], ...]:
        """Return what the output is multiplied with or divided by, and which rows are kept."""
        form = (*self._leads, self.query, self.roles.heads, ())
        factors = self.match.softmax.outside.factors
        return tuple((op, self._reduced(x, form, is_full=False)) for op, x in factors)

    def _sink(self) -> Argument | None:
        """Return the sinks [N], to be multiplied as the logits are."""
        softmax = self.match.softmax
        if softmax.sink is None:
            return None
        return self._reduced(softmax.sink, (self.roles.heads,), softmax.base)

    def _bernoulli(self) -> Bernoulli | None:
        formula = self.logits.dropout
        return None if formula is None else find_bernoulli(formula)

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
        index = formula.element.dims
        if any(isinstance(dim, Slice) for dim in index):
            raise NoMatch(
                "the bits of its dropout are drawn for more rows or columns than are used"
            )
        order = letters_in(index)
        pairs = [*self.query, *self.match.keys]
        is_shared = order == pairs
        everything = [*self.roles.batch, *self.roles.heads, *pairs]
        if not is_shared and set(order) < set(everything):
            raise NoMatch("the bits of its dropout are shared by other axes than all but T and S")
        if not is_shared and order != everything:
            raise NoMatch("the bits of its dropout are drawn in another order of axes")
        return Dropout(self._number(bernoulli.key), 1 - bernoulli.keep_rate, is_shared)

    def _segments(self) -> tuple[Argument, Argument] | None:
        part = self.condition.segments
        if part is None:
            return None
        of_query, of_keys = part.first, part.second
        if set(self.query) & letters_of(*of_keys):
            of_query, of_keys = of_keys, of_query
        return (
            self._reduced(of_query, (*self._leads, self.query)),
            self._reduced(of_keys, (*self._leads, self.match.keys)),
        )

    def _pair_form(self) -> tuple[Any, ...]:
        """Return the letters of the dims of a mask or a bias."""
        return (*self._leads, self.roles.heads, self.query, self.match.keys)

    def _dense_mask(self) -> tuple[Argument | None, bool]:
        """Return the mask that is an array of pairs, and whether it is True where hidden."""
        part = self.condition.dense
        if part is None:
            return None, False
        leaf = part.part if isinstance(part, Not) else part
        assert isinstance(leaf, Leaf)
        element = smallest(leaf.element)
        self.inputs.add_pairs("mask", element[0])
        argument = self._argument(element, self._pair_form(), is_full=False)
        return argument, isinstance(part, Not)

    def _score(self) -> tuple[PairFunction | None, Argument | None, PairFunction | None]:
        """Return the score function, a bias of pairs, and a small bias that is computed once."""
        dense = None
        if self.dense_bias is not None:
            element = smallest(self.dense_bias.element)
            self.inputs.add_pairs("bias", element[0])
            factor = self.dense_bias.factor
            dense = self._argument(element, self._pair_form(), factor, is_full=False)
        inner = self.logits.inner
        if dense is None and isinstance(inner, Scaling) and self._are_small(self.biases):
            return None, None, self._of_biases(None, self.biases)
        core = inner if isinstance(inner, Core) else None
        if core is None and not self.biases:
            return None, dense, None
        core = core or Core(self.match.dots, 1.0)
        return self._of_biases(core, self.biases, are_raised=dense is not None), dense, None

    def _are_small(self, biases: list[BiasTerm]) -> bool:
        """Return True if there is a bias, and their sum has no element for each pair."""
        letters = set().union(*(letters_of(*x.element) for x in biases))
        return bool(biases) and not self.roles.over_pairs(letters)

    def _of_biases(
        self, core: Core | None, biases: list[BiasTerm], *, are_raised: bool = False
    ) -> PairFunction:
        """Return the function of a core and of biases; without a core, of the biases alone.

        `are_raised`: beside a bias that is an argument, each term is raised as that is.
        """
        builder = Builder(self.roles, self.q_offset if core is not None else 0)
        steps = []
        if core is not None:
            builder.dots, builder.dots_index = self.match.dots
            builder.depends = self.depends
            if core.element == self.match.dots:
                wide = jnp.dtype(sum_dtype(self.match.dots[0].dtype))  # logits are not rounded
                step = builder.add(element_function.score, str(wide))
            else:
                step = builder.element(*core.element)
            step = builder.scaled(step, core.factor)
            is_product = is_product_of_more(core, self.match.dots[0], self.depends)
            steps.append(builder.apply(rounded, step) if is_product else step)
        # the innermost first, as the program adds them: beside -1e9 each order rounds differently,
        # and a difference of large sums is exact only if it is taken before it is added
        by_whole: dict[Element, list[int]] = {}
        for x in reversed(biases):
            step = builder.scaled(builder.element(*x.element), x.factor)
            by_whole.setdefault(x.whole, []).insert(0, step)
        for terms in by_whole.values():
            steps.append(terms[0] if len(terms) == 1 else builder.apply(wide_sum, *terms))
        if are_raised:
            steps = [builder.apply(raised, x) for x in steps]
        builder.apply(wide_sum, *steps)
        return self._pair_function(builder, "score" if core is not None else "bias")

    def _of_formulas(self, formulas: list[Formula], q_offset: int) -> PairFunction | None:
        """Return the function that is True where all formulas are."""
        if not formulas:
            return None
        builder = Builder(self.roles, q_offset)
        builder.apply(all_true, *(builder.formula(x) for x in formulas))
        return self._pair_function(builder, "mask")

    def _pair_function(self, builder: Builder, kind: str) -> PairFunction:
        function: ElementFunction = builder.function(kind)
        for value in builder.of_pairs:
            self.inputs.add_pairs("mask" if value.dtype == bool else "bias", value)
        return PairFunction(function, tuple(self._number(x) for x in builder.leaves))
