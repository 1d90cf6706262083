"""Evaluate the program of a scope with its replacements."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from memeff.rewrite.graph import Call, Equation, Value
from memeff.rewrite.recipe import run_recipe
from memeff.rewrite.scope import Scope
from memeff.rewrite.translate import Replacement
from memeff.rewrite.versions import scan_counts

Reading = Callable[[Value], Any]


def evaluate(scope: Scope, arguments: Sequence[Any], outer: Reading | None = None) -> list[Any]:
    """Compute the results of a scope with its replacements.

    `outer` returns the arrays of the values of enclosing scopes.
    """
    return _Evaluation(scope, arguments, outer).results()


class _Evaluation:
    """The arrays of one evaluation."""

    def __init__(self, scope: Scope, arguments: Sequence[Any], outer: Reading | None):
        self.scope = scope
        self.outer = outer
        self.arrays = dict(zip(scope.graph.inputs, arguments, strict=True))
        self._run(scope.graph.items)

    def results(self) -> list[Any]:
        results = []
        for value in self.scope.graph.results:
            result = self.read(value)
            if isinstance(result, np.ndarray) and getattr(value.aval, "weak_type", False):
                result = result.item()  # a number that stands in the program
            results.append(result)
        return results

    def read(self, value: Value) -> Any:
        """Return the array of a value."""
        if value in self.arrays:
            return self.arrays[value]
        if value.constant is not None:
            return value.constant
        assert self.outer is not None
        return self.outer(value)

    def _run(self, items: Sequence[Equation | Call]) -> None:
        scope = self.scope
        waiting: list[Equation | Call] = []  # to be computed together, as the program wrote them
        for item in items:
            is_needed = item.eqn.effects or not scope.live.isdisjoint(item.outputs)
            if isinstance(item, Call) and (
                item in scope.touched or self._lacks_inputs(item, waiting)
            ):
                self._bind(waiting)
                self._run(item.items)
            elif not is_needed:
                continue
            elif isinstance(item, Equation) and (item in scope.replaced or scope.changes(item)):
                self._bind(waiting)
                self._replace(item)
            else:
                waiting.append(item)
                continue
            waiting = []
        self._bind(waiting)

    def _lacks_inputs(self, call: Call, waiting: list[Equation | Call]) -> bool:
        """Return True if an input of a call is neither computed nor waiting."""
        missing = {x for x in call.inputs if x.constant is None and x not in self.arrays}
        return bool(missing.difference(*(x.outputs for x in waiting)))

    def _replace(self, equation: Equation) -> None:
        """Compute an equation that is replaced, or in whose bodies something is."""
        scope = self.scope
        if equation in scope.replaced:
            terms = [self._run_replacement(x) for x in scope.replaced[equation]]
            self.arrays[equation.outputs[0]] = functools.reduce(operator.add, terms)
        else:
            inputs = [self.read(x) for x in equation.inputs]
            results = _run_bodies(equation.eqn, scope.inner[equation], inputs, self.read)
            self.arrays.update(zip(equation.outputs, results, strict=True))

    def _run_replacement(self, replacement: Replacement) -> Any:
        inputs = [self.read(x) for x in replacement.inputs]
        if self.scope.record is not None:
            self.scope.record(replacement, inputs)
        return run_recipe(replacement.recipe, inputs)

    def _bind(self, items: list[Equation | Call]) -> None:
        """Compute the outputs of equations of one jaxpr as the program wrote them."""
        values = {}
        outputs = {}
        for item in items:
            for variable, value in zip(item.eqn.invars, item.inputs, strict=True):
                if not isinstance(variable, Literal) and variable not in outputs:
                    values[variable] = self.read(value)
            for variable, value in zip(item.eqn.outvars, item.outputs, strict=True):
                if not isinstance(variable, DropVar):
                    outputs[variable] = value
        equations = [x.eqn for x in items]
        effects = frozenset().union(*(x.effects for x in equations))
        info = self.scope.jaxpr.jaxpr.debug_info.with_unknown_names()
        alone = Jaxpr((), list(values), list(outputs), equations, effects, info)
        results = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*values.values())
        self.arrays.update(zip(outputs.values(), results, strict=True))


def _run_bodies(
    eqn: JaxprEqn, scopes: list[Scope], inputs: list[Any], outer: Reading
) -> Sequence[Any]:
    """Run an equation with the replacements in its bodies."""

    def function(scope):
        return lambda *arguments: tuple(evaluate(scope, arguments, outer))

    params = eqn.params
    name = eqn.primitive.name
    if name == "scan":
        return _scan(eqn, scopes[0], inputs, outer)
    if name == "while":
        return _while(eqn, scopes, inputs, outer)
    if name == "cond":
        branches = [function(x) for x in scopes]
        platforms = params.get("branches_platforms")
        if platforms is None:
            return lax.switch(inputs[0], branches, *inputs[1:])
        of_platform = {}  # a branch may compile on its own platform alone
        for names, branch in zip(platforms, branches, strict=True):
            of_platform.update(dict.fromkeys(names or ("default",), branch))
        return lax.platform_dependent(*inputs[1:], **of_platform)
    if name == "shard_map":
        mapped = jax.shard_map(
            function(scopes[0]),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            axis_names=set(params["newly_manual_axes"]),
            check_vma=params["check_vma"],
        )
        return mapped(*inputs)
    if name == "jit":
        shardings = {key: params[key] for key in ("in_shardings", "out_shardings")}
        return jax.jit(function(scopes[0]), **shardings)(*inputs)
    remat = jax.checkpoint(
        function(scopes[0]), prevent_cse=params["prevent_cse"], policy=params["policy"]
    )
    return remat(*inputs)


def _scan(eqn: JaxprEqn, scope: Scope, inputs: list[Any], outer: Reading) -> Sequence[Any]:
    constants, carried = scan_counts(eqn)
    fixed = inputs[:constants]
    first = inputs[constants : constants + carried]

    def step(carry, slices):
        results = evaluate(scope, [*fixed, *carry, *slices], outer)
        return results[:carried], results[carried:]

    params = eqn.params
    carry, stacked = lax.scan(
        step,
        first,
        inputs[constants + carried :],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


def _while(eqn: JaxprEqn, scopes: list[Scope], inputs: list[Any], outer: Reading) -> Sequence[Any]:
    condition, body = scopes
    of_condition = eqn.params["cond_nconsts"]
    of_body = of_condition + eqn.params["body_nconsts"]

    def goes_on(carry):
        (result,) = evaluate(condition, [*inputs[:of_condition], *carry], outer)
        return result

    def step(carry):
        results = evaluate(body, [*inputs[of_condition:of_body], *carry], outer)
        if condition.graph.results[0].shape == ():
            return results
        # a vmapped loop: entries that have stopped stay as they are until all have
        mapped = goes_on(carry)
        chosen = []
        for new, old in zip(results, carry, strict=True):
            goes = lax.expand_dims(mapped, range(mapped.ndim, old.ndim))
            chosen.append(jnp.where(goes, new, old))
        return chosen

    return lax.while_loop(lambda carry: goes_on(carry).any(), step, inputs[of_body:])
