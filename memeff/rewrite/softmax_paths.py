"""Find each product that a softmax of another product reaches, whether it can be replaced or not.

The search of recognise.py goes backward from the second product, and stops at what it does not
know. This search goes forward and finds every such product, so that the report names all of them.
Each array has marks:

  (1) PRODUCT: it is computed from a product of two arrays. A new product has this mark alone.
  (2) EXPONENTIAL: it is an exponential of (1), up to factors, selections, casts and moves.
  (3) SUM: exponentials (2) were summed for it.

A second product takes an array with (2) and (3), which is a fraction e / sum(e) or exp(s - lse), in
any spelling. Or it takes an array with (2), and its result is divided by one with (3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from memeff.rewrite.axes import ELEMENTWISE, MOVES
from memeff.rewrite.versions import CALLS, CUSTOM_DERIVATIVES, carried_outputs, flows_of

PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot_general", "ragged_dot"}
SUMS = {"reduce_sum", "reduce_max", "cumsum", "psum", "psum_invariant", "psum2"}
EXPONENTIALS = {"exp", "exp2", "expm1"}
# Element-wise functions whose result is no exponential where their argument is one.
OTHERS = {"log", "log1p", "tanh", "sin", "cos", "tan", "logistic", "erf", "erfc", "rsqrt"}
# Functions whose result is an exponential where all their arguments are, or do not matter.
TOGETHER = {"add", "sub", "max", "min", "select_n", "clamp", "concatenate", "add_any"}

UNKNOWN = "a softmax meets what is not understood before the second product"
IN_CUSTOM_DERIVATIVE = (
    "it is in a function with a derivative of its own, or passes one; "
    "that derivative is its author's"
)
AS_SUM = "the product with the values is written as a multiplication and a sum: write an einsum"


@dataclasses.dataclass(frozen=True)
class _Marks:
    """The marks of an array."""

    product: bool = False
    exponential: bool = False
    sum: bool = False
    # Probabilities that were repeated along an axis, perhaps to be multiplied with values there.
    repeated: bool = False
    # equations since the first product that the search stops at
    passed: frozenset[str] = frozenset()
    of_products: frozenset[int] = frozenset()  # products of exponentials, not yet divided

    def __bool__(self) -> bool:
        return self != NOTHING

    @property
    def is_softmax(self) -> bool:
        return self.exponential and self.sum

    def joined(self, other: _Marks) -> _Marks:
        """Return the marks of either."""
        return _Marks(
            self.product or other.product,
            self.exponential or other.exponential,
            self.sum or other.sum,
            self.repeated or other.repeated,
            self.passed | other.passed,
            self.of_products | other.of_products,
        )

    def passing(self, name: str) -> _Marks:
        """Return the marks behind an equation at which the search stops."""
        return dataclasses.replace(self, passed=self.passed | {name}) if self else self


NOTHING = _Marks()


class SoftmaxPaths:
    """The second products of a program, and why each is left if nothing else says it."""

    def __init__(self, jaxpr: ClosedJaxpr):
        self._reasons: dict[int, str] = {}
        self._known: dict[Any, list[_Marks]] = {}
        self._run(jaxpr, [NOTHING] * len(jaxpr.jaxpr.invars))

    def reason(self, eqn: JaxprEqn) -> str | None:
        """Return why a product is left, as far as its path says; None if no softmax reaches it."""
        return self._reasons.get(id(eqn))

    def within(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """Return the products that a softmax reaches in the bodies of an equation, at any depth."""
        products = []
        for jaxpr, _ in flows_of(eqn):
            for inner in jaxpr.jaxpr.eqns:
                if id(inner) in self._reasons:
                    products.append(inner)
                products.extend(self.within(inner))
        return products

    def _run(self, jaxpr: ClosedJaxpr, inputs: Sequence[_Marks]) -> list[_Marks]:
        """Return the marks of the results of a jaxpr."""
        key = id(jaxpr.jaxpr), tuple(inputs)
        if key not in self._known:
            marks = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
            makers: dict[Any, JaxprEqn] = {}
            for eqn in jaxpr.jaxpr.eqns:
                operands = [_read(marks, x) for x in eqn.invars]
                outputs = self._equation(eqn, operands, makers)
                for variable, x in zip(eqn.outvars, outputs, strict=True):
                    marks[variable] = x if _is_inexact(variable.aval) else NOTHING
                    makers[variable] = eqn
            self._known[key] = [_read(marks, x) for x in jaxpr.jaxpr.outvars]
        return self._known[key]

    def _equation(
        self, eqn: JaxprEqn, operands: list[_Marks], makers: dict[Any, JaxprEqn]
    ) -> list[_Marks]:
        """Return the marks of the results of an equation."""
        name = eqn.primitive.name
        if flows_of(eqn):
            return self._bodies(eqn, operands)
        if not any(operands) and name not in PRODUCTS and name != "reduce_sum":
            return [NOTHING] * len(eqn.outvars)
        if name in PRODUCTS and not _is_outer(eqn):
            return [self._product(eqn, operands)]
        joined = NOTHING
        for x in operands:
            joined = joined.joined(x)
        if name == "reduce_sum" and _is_sum_of_products(eqn, makers):
            if joined.is_softmax and joined.repeated:
                self._add(eqn, joined.passed, AS_SUM)
            joined = dataclasses.replace(joined, product=True)
        if name in ("div", "mul") and any(x.sum for x in operands):
            for number in joined.of_products:
                self._reasons.setdefault(number, UNKNOWN)
        return [_mapped(eqn, operands, joined)] * len(eqn.outvars)

    def _product(self, eqn: JaxprEqn, operands: list[_Marks]) -> _Marks:
        """Return the marks of a product, and note it if a softmax reaches it."""
        of_products: frozenset[int] = frozenset()
        is_sum = False
        for x in operands:
            if x.is_softmax:
                self._add(eqn, x.passed, UNKNOWN)
            elif x.exponential:
                of_products = frozenset({id(eqn)})
                is_sum = True
        return _Marks(product=True, sum=is_sum, of_products=of_products)

    def _add(self, eqn: JaxprEqn, passed: frozenset[str], reason: str) -> None:
        """Note a second product."""
        if CUSTOM_DERIVATIVES & passed:
            reason = IN_CUSTOM_DERIVATIVE
        elif passed:
            reason = f"{UNKNOWN}: between them stands {', '.join(f'`{x}`' for x in sorted(passed))}"
        self._reasons.setdefault(id(eqn), reason)

    def _bodies(self, eqn: JaxprEqn, operands: list[_Marks]) -> list[_Marks]:
        """Return the marks of the results of an equation with bodies."""
        name = eqn.primitive.name
        is_plain = name in CALLS
        if not is_plain:
            operands = [x.passing(name) for x in operands]
        results = [NOTHING] * len(eqn.outvars)
        for jaxpr, first in flows_of(eqn):
            inputs = operands[first:]
            while True:
                outputs = self._run(jaxpr, inputs)
                results = [x.joined(y) for x, y in zip(results, outputs, strict=True)]
                carried = carried_outputs(eqn)
                before = inputs
                inputs = list(inputs)
                for position, output in carried:
                    inputs[position] = inputs[position].joined(outputs[output].passing(name))
                if inputs == before:
                    break
        return results if is_plain else [x.passing(name) for x in results]


def _mapped(eqn: JaxprEqn, operands: list[_Marks], joined: _Marks) -> _Marks:
    """Return the marks of the result of an equation without bodies, which is no product."""
    name = eqn.primitive.name
    exponential = joined.exponential
    if name in ("reduce_sum", "cumsum", "concatenate") and joined.is_softmax:
        return joined.passing(name)  # perhaps of heads
    if name in SUMS:
        is_sum = joined.sum or exponential
        return dataclasses.replace(joined, sum=is_sum, exponential=False, repeated=False)
    if name in EXPONENTIALS:
        exponential = exponential or joined.product
    elif name == "pow":
        exponential = operands[0].exponential or operands[1].product
    elif name == "div":
        exponential = operands[0].exponential
        only_below = SUMS - operands[0].passed  # `match` names a division by a sum
        joined = dataclasses.replace(joined, passed=joined.passed - only_below)
    elif name in TOGETHER:
        exponential = exponential and all(x.exponential or not x.product for x in operands)
    elif name in OTHERS:
        exponential = False
    elif name not in ELEMENTWISE | MOVES and name != "dot_general":
        joined = joined.passing(name)
    repeated = joined.repeated or name in ("mul", "broadcast_in_dim") and _repeats(eqn, operands)
    return dataclasses.replace(joined, exponential=exponential, repeated=repeated)


def _repeats(eqn: JaxprEqn, operands: list[_Marks]) -> bool:
    """Return True if probabilities are repeated along an axis."""
    after = _longer_than_one(eqn.outvars[0].aval)
    pairs = zip(eqn.invars, operands, strict=True)
    return any(x.is_softmax and _longer_than_one(v.aval) != after for v, x in pairs)


def _is_outer(eqn: JaxprEqn) -> bool:
    """Return True for a product of two arrays that sums nothing."""
    return eqn.primitive.name == "dot_general" and not eqn.params["dimension_numbers"][0][0]


def _is_sum_of_products(eqn: JaxprEqn, makers: dict[Any, JaxprEqn]) -> bool:
    """Return True for the sum of a multiplication of two arrays."""
    (summed,) = eqn.invars
    maker: JaxprEqn | None = None if isinstance(summed, Literal) else makers.get(summed)
    while maker is not None and maker.primitive.name == "convert_element_type":
        (summed,) = maker.invars
        maker = None if isinstance(summed, Literal) else makers.get(summed)
    if maker is None or maker.primitive.name != "mul":
        return False
    first, second = maker.invars
    return (
        first is not second and not isinstance(first, Literal) and not isinstance(second, Literal)
    )


def _longer_than_one(aval: Any) -> list[Any]:
    """Return the sizes of the dims of more than one element."""
    return [size for size in aval.shape if size != 1]


def _read(marks: dict[Any, _Marks], atom: Any) -> _Marks:
    return NOTHING if isinstance(atom, Literal) else marks.get(atom, NOTHING)


def _is_inexact(aval: Any) -> bool:
    """Return True for an array of real or complex floats."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, np.inexact)
