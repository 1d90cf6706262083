"""Find the attention of a jaxpr and of the jaxprs within it.

A scope is one jaxpr: that of the program, or the body of a scan, a loop, a branch, a remat or a
shard_map. Each distinct jaxpr is searched once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import AxisType

from memeff.rewrite.axes import NoAttention, NoMatch, count_positions, is_made_of_less, letters_in
from memeff.rewrite.distribute import Term, match_terms
from memeff.rewrite.graph import Call, Equation, Graph, Value
from memeff.rewrite.pairs import ONE_QUERY, query_letters
from memeff.rewrite.recognise import ONE_KEY, Match, match
from memeff.rewrite.softmax import NO_SOFTMAX
from memeff.rewrite.softmax_paths import IN_CUSTOM_DERIVATIVE, UNKNOWN, SoftmaxPaths
from memeff.rewrite.translate import Replacement, translate
from memeff.rewrite.versions import (
    CUSTOM_DERIVATIVES,
    bodies_of,
    is_derivative,
    is_transposed,
    source_line,
)

IN_DERIVATIVE = (
    "the program takes its derivative, which needs the probabilities: "
    "replace attention before, as in jax.grad(replace_attention(f))"
)
MADE_BY_DERIVATIVE = (
    "a derivative that the program takes makes this softmax, as the gradient of a logsumexp: "
    "write the softmax and its product instead"
)
NO_SIZES = "an axis has no known size, or none of its positions"
Record = Callable[[Replacement, list[Any]], None]


@dataclasses.dataclass(frozen=True)
class Left:
    """A softmax between two products that is left as it is, and why."""

    eqn: JaxprEqn  # the second product
    reason: str
    has_derivative: bool = False  # a derivative is taken inside the program


class Search:
    """Search jaxprs, each once."""

    def __init__(self, jaxpr: ClosedJaxpr, min_logits: int, record: Record | None = None):
        self.paths = SoftmaxPaths(jaxpr)
        self.min_logits = min_logits
        self.record = record  # receives each replacement and its arrays when they are computed
        self.visited = 0  # equations
        self.in_derivatives: set[str] = set()  # lines of products that are left for a derivative
        self._scopes: dict[Any, Scope] = {}

    def scope(
        self,
        jaxpr: ClosedJaxpr,
        outer: Sequence[Value | None] = (),
        in_derivative: bool = False,
        in_gradient: bool = False,
    ) -> Scope:
        """Return the scope of a jaxpr.

        `outer` are values of another scope that its inputs equal. `in_derivative`: its equation was
        made by a derivative, `in_gradient`: by the backward pass of one.
        """
        outer = tuple(outer) or (None,) * len(jaxpr.jaxpr.invars)
        key = id(jaxpr.jaxpr), outer, in_derivative, in_gradient
        if key not in self._scopes:
            self._scopes[key] = Scope(jaxpr, outer, self, in_derivative, in_gradient)
        return self._scopes[key]


class Scope:
    """The equations of one jaxpr, what replaces some of them, and the scopes within it."""

    def __init__(
        self,
        jaxpr: ClosedJaxpr,
        outer: Sequence[Value | None],
        search: Search,
        in_derivative: bool,
        in_gradient: bool,
    ):
        self.in_derivative = in_derivative
        self.in_gradient = in_gradient
        self.record = search.record
        self.jaxpr = jaxpr  # kept alive, because scopes are found by its identity
        self.graph = Graph(jaxpr, outer)
        self.left: list[Left] = []
        # by the equation whose result is the sum of what replaces it, one for each term
        self.replaced: dict[Equation, tuple[Replacement, ...]] = {}
        self.inner: dict[Equation, list[Scope]] = {}
        search.visited += len(self.graph.equations)
        for equation in self.graph.equations:
            self._search(equation, search)
        self.live = self._drop_useless()
        self.touched = self._touched_calls()

    @property
    def scopes(self) -> Iterator[Scope]:
        """Visit this scope and those within it; a scope that runs twice is visited twice."""
        yield self
        for inner in self.inner.values():
            for scope in inner:
                yield from scope.scopes

    @property
    def replacements(self) -> Iterator[Replacement]:
        """Visit the replacements of this scope."""
        for terms in self.replaced.values():
            yield from terms

    @property
    def is_changed(self) -> bool:
        """Return True if something is replaced here or in an inner scope."""
        return bool(self.replaced) or any(self.changes(x) for x in self.inner)

    def changes(self, equation: Equation) -> bool:
        """Return True if something is replaced in the bodies of an equation."""
        return any(x.is_changed for x in self.inner.get(equation, ()))

    # ---- Finding

    def _search(self, equation: Equation, search: Search) -> None:
        """Search an equation: a product, or one with bodies."""
        eqn = equation.eqn
        makers = (equation, *equation.calls)
        in_derivative = self.in_derivative or any(is_derivative(x.eqn) for x in makers)
        in_gradient = self.in_gradient or any(is_transposed(x.eqn) for x in makers)
        unknown = search.paths.reason(eqn)  # of a second product: why it is left if nothing else is
        if eqn.primitive.name == "dot_general":
            unknown = self._find(equation, search, in_derivative, in_gradient)
        elif in_gradient:
            unknown = None
        scopes = []
        for body in bodies_of(eqn):
            values = [None if n is None else equation.inputs[n] for n in body.inputs]
            known = [x if x is not None and is_made_of_less(x) else None for x in values]
            scopes.append(search.scope(body.jaxpr, known, in_derivative, in_gradient))
        if scopes:
            self.inner[equation] = scopes
        elif not in_derivative:
            name = eqn.primitive.name
            reason = f"it is in `{name}`, whose equations are not searched"
            if name in CUSTOM_DERIVATIVES:
                reason = IN_CUSTOM_DERIVATIVE
            self.left.extend(Left(inner, reason) for inner in search.paths.within(eqn))
        if unknown is None:
            return
        if in_derivative:
            if source_line(eqn) in search.in_derivatives:
                return
            search.in_derivatives.add(source_line(eqn))
            unknown = MADE_BY_DERIVATIVE if in_gradient else IN_DERIVATIVE
        self.left.append(Left(eqn, unknown))

    def _find(
        self, second: Equation, search: Search, in_derivative: bool, in_gradient: bool
    ) -> str | None:
        """Add the replacement of a product, or the reasons why it is left.

        Return the reason if it is left and none was added. None: there is nothing to say. Most
        products of a backward pass take no softmax, but the cotangent of one.
        """
        unknown = search.paths.reason(second.eqn)
        shapes = [x.shape for x in (*second.inputs, *second.outputs)]
        if not all(isinstance(size, int) and size for shape in shapes for size in shape):
            return unknown and NO_SIZES
        reasons = []
        for side in (0, 1):
            try:
                if unknown is None:  # no sum of softmaxes
                    terms = [Term(1, match(self.graph, second, side))]
                else:
                    terms = match_terms(self.graph, second, side)
                if in_gradient and source_line(second.eqn) not in search.in_derivatives:
                    return MADE_BY_DERIVATIVE
                if in_derivative:
                    search.in_derivatives.add(source_line(second.eqn))
                    self.left.append(Left(second.eqn, IN_DERIVATIVE, has_derivative=True))
                    return None
                replacements = tuple(self._replacement(x, search.min_logits) for x in terms)
            except NoAttention as reason:
                if unknown is not None and str(reason) == ONE_KEY:
                    unknown = ONE_KEY
                elif unknown == UNKNOWN and str(reason) != NO_SOFTMAX:
                    unknown = f"{UNKNOWN}: {reason}"
            except NoMatch as reason:
                reasons.append(str(reason))
            else:
                replaced = terms[0].match.result.maker  # of one term: perhaps a division after it
                assert replaced is not None
                self.replaced[replaced if replaced.in_program else second] = replacements
                return None
        if in_derivative:
            known = None if in_gradient else unknown
            return reasons[0] if reasons else known
        self.left.extend(Left(second.eqn, reason) for reason in reasons)
        return None if reasons else unknown

    def _replacement(self, term: Term, min_logits: int) -> Replacement:
        """Return what replaces a term."""
        _check_gain(term.match, min_logits)
        _check_sharding(term.match)
        replacement = translate(term.match, with_equations=self.record is not None)
        if any(x.maker is not None and not x.maker.in_program for x in replacement.inputs):
            raise NoMatch("a mask or a factor is made of the probabilities")
        recipe = dataclasses.replace(
            replacement.recipe, factor=term.sign * replacement.recipe.factor
        )
        return dataclasses.replace(replacement, recipe=recipe)

    def _drop_useless(self) -> set[Value]:
        """Undo replacements whose logits something else needs; return the values it needs."""
        by_product: dict[Value, list[Equation]] = {}
        for equation, terms in self.replaced.items():
            for product in dict.fromkeys(x.match.dots[0] for x in terms):
                by_product.setdefault(product, []).append(equation)
        for equations in by_product.values():
            if len(equations) > 1:
                for equation in equations:
                    self._leave(equation, "another product uses the same logits or probabilities")
        while True:
            live = self._live_values()
            useless = [x for x, terms in self.replaced.items() if _are_needed(terms, live)]
            if not useless:
                return live
            users = [_user_of(self, x, live) for x in useless]
            for equation, user in zip(useless, users, strict=True):
                self._leave(equation, f"the logits or probabilities are {user}")

    def _leave(self, equation: Equation, reason: str) -> None:
        """Undo a replacement, unless it is undone already."""
        terms = self.replaced.pop(equation, ())
        self.left.extend(Left(x.match.second.eqn, reason) for x in terms[:1])

    def _live_values(self) -> set[Value]:
        """Return the values that the results need when all replacements are made."""
        live = set(self.graph.results)
        for equation in reversed(self.graph.equations):
            if not equation.eqn.effects and live.isdisjoint(equation.outputs):
                continue
            if equation in self.replaced:
                live.update(*(x.inputs for x in self.replaced[equation]))
            else:
                live.update(equation.inputs)
            for scope in self.inner.get(equation, ()):
                live.update(scope.outer_values)
        return live

    @property
    def outer_values(self) -> set[Value]:
        """Return the values of enclosing scopes that replacements read."""
        values: set[Value] = set()
        for replacement in self.replacements:
            values.update(replacement.inputs)
        for scopes in self.inner.values():
            values.update(*(x.outer_values for x in scopes))
        return {x for x in values if not self._is_own(x)}

    def _is_own(self, value: Value) -> bool:
        """Return True for constants, inputs and values made in this scope."""
        if value.constant is not None or value in self.graph.inputs:
            return True
        return value.maker is not None and value.maker.graph is self.graph

    def _touched_calls(self) -> set[Call]:
        """Return the inlined calls that cannot run as they are written."""
        touched: set[Call] = set()
        for equation in self.graph.equations:
            if equation in self.replaced or self.changes(equation):
                touched.update(equation.calls)
        for replacement in self.replacements:
            for value in replacement.inputs:
                calls: tuple[Call, ...] = ()
                if value.maker is not None and value.maker.graph is self.graph:
                    calls = value.maker.calls
                touched.update(x for x in calls if value not in x.outputs)
        return touched


def _are_needed(terms: Sequence[Replacement], live: set[Value]) -> bool:
    """Return True if the logits of a term are among the values that something else needs."""
    return any(x.match.dots[0] in live for x in terms)


def _check_gain(candidate: Match, min_logits: int) -> None:
    """Refuse attention whose logits are small, or sums of nothing."""
    if any(0 in x.query.value.shape for x in candidate.products):
        raise NoMatch(NO_SIZES)
    S = count_positions(candidate.keys)
    T = count_positions(query_letters(candidate)) if candidate.query_only else 1
    if T == 1:
        with_keys = set(letters_in(candidate.value.index)) | set(candidate.keys)
        if any(x.size > 1 for x in candidate.letters if x not in with_keys):
            raise NoMatch("the keys of the first product differ from query to query")
        raise NoMatch(ONE_QUERY)
    if T * S < min_logits:
        raise NoMatch(
            f"T x S = {T} x {S} is less than min_logits={min_logits}, so there is little to gain"
        )


def _check_sharding(candidate: Match) -> None:
    """Refuse arrays on a mesh with Explicit axes, whose merged axes would need a sharding."""
    operands = [y for x in candidate.products for y in (x.query, x.key)]
    for operand in (*operands, candidate.value):
        sharding = operand.value.aval.sharding
        if AxisType.Explicit in sharding.mesh.axis_types and any(sharding.spec):
            raise NoMatch("its arrays are sharded over Explicit axes of a mesh")


def _user_of(scope: Scope, equation: Equation, live: set[Value]) -> str:
    """Return in words what else uses the logits or the probabilities of a replaced equation."""
    terms = [x.match for x in scope.replaced[equation]]
    needed = next(x for x in terms if x.dots[0] in live)
    inside = {needed.dots[0]}
    between = []
    for x in _equations_before(equation, needed.first):
        if not inside.isdisjoint(x.inputs):
            inside.update(x.outputs)
            between.append(x)
    if not inside.isdisjoint(scope.graph.results):
        return "returned"
    for x in reversed(scope.graph.equations):
        is_live = not live.isdisjoint(x.outputs) or x.eqn.effects
        if not is_live or x in scope.replaced or x is needed.second or x in between:
            continue
        if not inside.isdisjoint(x.inputs):
            return f"used by `{x.eqn.primitive.name}` at {source_line(x.eqn)}"
    for x in between:
        if not live.isdisjoint(x.outputs):
            return f"used by `{x.eqn.primitive.name}` at {source_line(x.eqn)}"
    for x, others in scope.replaced.items():
        if x is not equation and any(not inside.isdisjoint(y.inputs) for y in others):
            return f"used by another product at {source_line(others[0].match.second.eqn)}"
    return "used elsewhere"


def _equations_before(last: Equation, first: Equation) -> list[Equation]:
    """Return, in their order, the equations from `first` on that `last` depends on."""
    equations = []
    values = set(last.inputs)
    for x in reversed(last.graph.equations[first.number : last.number]):
        if not values.isdisjoint(x.outputs):
            values.update(x.inputs)
            equations.append(x)
    return equations[::-1]
