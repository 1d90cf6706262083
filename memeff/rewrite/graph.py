"""Hold a jaxpr as a graph of values, in which the bodies of plain calls are inlined.

An inlined call keeps its own equation, so that a program that nobody changed inside runs as it was
written (`jax.jit` stays `jax.jit`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, JaxprEqn, Literal

from memeff.rewrite.versions import body_of, can_inline

DEEPEST = 20  # equations through which two values are compared


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array of the program: its type, the equation that makes it, or its known numbers."""

    aval: Any
    maker: Equation | None = None
    constant: Any = None  # an array or a number; None: not known
    known: list[Any] = dataclasses.field(default_factory=list)  # what `axes.known_number` found
    is_closed: bool = False  # what `axes.is_closed` found

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def op(self) -> str:
        """Return the name of the primitive that makes this value; "" for inputs and constants."""
        return "" if self.maker is None else self.maker.eqn.primitive.name


@dataclasses.dataclass(eq=False, slots=True)
class Equation:
    """One equation, between values of the graph."""

    eqn: JaxprEqn
    inputs: list[Value]
    outputs: list[Value]
    graph: Graph
    number: int  # its place in the order of the graph
    calls: tuple[Call, ...] = ()  # the inlined calls in which it stands, the outermost first
    in_program: bool = True  # False: of one term of a sum, see distribute.py

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """An inlined call: its equation, and the equations and calls of its body."""

    eqn: JaxprEqn
    inputs: list[Value]
    outputs: list[Value]
    items: list[Equation | Call] = dataclasses.field(default_factory=list)


class Graph:
    """The values and equations of one jaxpr.

    `outer` are the values of an enclosing graph that inputs of this one equal, or None. Then what
    an input is made of can be read, such as a mask that a scan receives.
    """

    def __init__(self, jaxpr: ClosedJaxpr, outer: Sequence[Value | None]):
        self.first_equal: dict[Any, Value] = {}  # by how it is computed
        self.found_equal: dict[tuple[Value, int], Value] = {}  # what `first_equal` returned
        self.equations: list[Equation] = []  # of all calls, in the order of the program
        self.inputs = []
        for variable, value in zip(jaxpr.jaxpr.invars, outer, strict=True):
            self.inputs.append(Value(variable.aval) if value is None else value)
        self.items, self.results = self._inline(jaxpr, self.inputs, ())
        self.consumers: dict[Value, list[Equation]] = {}
        for equation in self.equations:
            for value in equation.inputs:
                self.consumers.setdefault(value, []).append(equation)

    def _inline(
        self, jaxpr: ClosedJaxpr, inputs: Sequence[Value], calls: tuple[Call, ...]
    ) -> tuple[list[Equation | Call], list[Value]]:
        """Add the equations of a jaxpr. Return them in their calls, and the jaxpr's results."""
        values = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
        for variable, constant in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
            values[variable] = Value(variable.aval, constant=constant)

        def read(atom):
            if isinstance(atom, Literal):
                aval: Any = atom.aval
                return Value(aval, constant=np.asarray(atom.val, aval.dtype))
            return values[atom]

        items: list[Equation | Call] = []
        for eqn in jaxpr.jaxpr.eqns:
            arguments = [read(x) for x in eqn.invars]
            if can_inline(eqn):
                call = Call(eqn, arguments, [])
                call.items, call.outputs = self._inline(body_of(eqn), arguments, (*calls, call))
                items.append(call)
                outputs = call.outputs
            else:
                equation = Equation(eqn, arguments, [], self, len(self.equations), calls)
                equation.outputs = [Value(x.aval, equation) for x in eqn.outvars]
                self.equations.append(equation)
                items.append(equation)
                outputs = equation.outputs
            for variable, value in zip(eqn.outvars, outputs, strict=True):
                if not isinstance(variable, DropVar):
                    values[variable] = value
        return items, [read(x) for x in jaxpr.jaxpr.outvars]


def first_equal(value: Value, depth: int = 0) -> Value:
    """Return the first value of its graph that is computed in the same way from the same values."""
    maker = value.maker
    if maker is None or len(maker.outputs) != 1 or maker.eqn.effects or depth > DEEPEST:
        return value
    if not maker.in_program:
        return value
    found = maker.graph.found_equal
    if (value, depth) not in found:
        found[value, depth] = _first_equal(value, maker, depth)
    return found[value, depth]


def _first_equal(value: Value, maker: Equation, depth: int) -> Value:
    """Return the first value that `maker` and equal equations compute."""
    inputs = []
    for x in maker.inputs:
        if x.constant is not None and x.aval.shape == ():
            inputs.append((str(x.dtype), str(x.constant)))
        else:
            inputs.append(first_equal(x, depth + 1))
    params = tuple(sorted(maker.params.items()))
    key = maker.eqn.primitive, params, tuple(inputs)
    try:
        return maker.graph.first_equal.setdefault(key, value)
    except TypeError:  # params that are not hashable
        return value
