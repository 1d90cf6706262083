"""Read jaxprs in the same way on every supported version of JAX."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

CALLS = ("jit", "closed_call")  # equations that only name their body
CUSTOM_DERIVATIVES = frozenset({"custom_jvp_call", "custom_vjp_call"})
REMAT = "remat2"  # jax.checkpoint
_JAX_FILES = os.path.dirname(jax.__file__) + os.sep
_THIS_LIBRARY = os.path.dirname(os.path.dirname(__file__)) + os.sep


def closed(jaxpr: Any) -> ClosedJaxpr:
    """Return a jaxpr with its constants, which JAX 0.10 leaves out where there are none."""
    return jaxpr if hasattr(jaxpr, "consts") else ClosedJaxpr(jaxpr, ())


def body_of(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return the jaxpr that a call, a scan, a remat or a shard_map runs."""
    params = eqn.params
    return closed(params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"])


def can_inline(eqn: JaxprEqn) -> bool:
    """Return True if an equation means the same as the equations of its body.

    A `jit` with shardings does not, nor does a function with a derivative of its own, except JAX's
    softmax and logsumexp, whose derivative is the true one. A remat of probabilities is inlined,
    because memeff computes them again anyway.
    """
    name = eqn.primitive.name
    if name == "custom_jvp_call":
        body = body_of(eqn).jaxpr
        names = {x.primitive.name for x in body.eqns}
        return {"exp", "reduce_sum"} <= names and _defined_by_jax(body)
    if name == REMAT:
        return _is_softmax(body_of(eqn).jaxpr)
    if name not in CALLS:
        return False
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    options = eqn.params.get("compiler_options_kvs", ())
    return not options and all(type(x).__name__ == "UnspecifiedValue" for x in shardings)


def _is_softmax(jaxpr: Jaxpr) -> bool:
    """Return True for the equations of a softmax, with at most one product."""
    names = [x.primitive.name for x in _equations_of_calls(jaxpr)]
    return {"exp", "reduce_sum"} <= set(names) and names.count("dot_general") <= 1


def _equations_of_calls(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Visit the equations of a jaxpr and of its calls."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in (*CALLS, *CUSTOM_DERIVATIVES):
            yield from _equations_of_calls(body_of(eqn).jaxpr)
        else:
            yield eqn


def _defined_by_jax(jaxpr: Jaxpr) -> bool:
    """Return True if the function that was traced to `jaxpr` stands in a file of JAX."""
    info = getattr(jaxpr.debug_info, "func_src_info", None) or ""
    return f" at {_JAX_FILES}" in info


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Return how many constants and carried arrays a scan has; they are its first inputs."""
    params = eqn.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)


def is_derivative(eqn: JaxprEqn) -> bool:
    """Return True for an equation that a derivative inside the program has made."""
    name_stack = str(eqn.source_info.name_stack)
    return "jvp(" in name_stack or "transpose(" in name_stack


def is_transposed(eqn: JaxprEqn) -> bool:
    """Return True for an equation of the backward pass of a gradient inside the program."""
    return "transpose(" in str(eqn.source_info.name_stack)


def source_line(eqn: JaxprEqn) -> str:
    """Return "file:line" of the program, outside JAX and this library, that made an equation."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return "?"
    for frame in traceback.frames:
        if not frame.file_name.startswith((_JAX_FILES, _THIS_LIBRARY)):
            return f"{frame.file_name}:{frame.line_num}"
    return "?"


class Body(NamedTuple):
    """A jaxpr within an equation, and the inputs of the equation that it receives unchanged."""

    jaxpr: ClosedJaxpr
    inputs: tuple[int | None, ...]  # for each input of the jaxpr; None: it is made by a loop


def bodies_of(eqn: JaxprEqn) -> list[Body]:
    """Return the jaxprs in which attention is replaced; none where that could change a derivative.

    The derivative of a `custom_vjp` or `custom_jvp` function is its author's. The body of a
    shard_map sees parts of its inputs.
    """
    name = eqn.primitive.name
    params = eqn.params
    everything = tuple(range(len(eqn.invars)))
    if name in (REMAT, "jit"):
        return [Body(body_of(eqn), everything)]
    if name == "shard_map":
        return [Body(body_of(eqn), (None,) * len(everything))]
    if name == "scan":
        constants, _ = scan_counts(eqn)
        changing = (None,) * (len(everything) - constants)
        return [Body(body_of(eqn), (*everything[:constants], *changing))]
    if name == "while":
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        carry = (None,) * (len(everything) - second)
        return [
            Body(closed(params["cond_jaxpr"]), (*everything[:first], *carry)),
            Body(closed(params["body_jaxpr"]), (*everything[first:second], *carry)),
        ]
    if name == "cond":
        return [Body(closed(x), everything[1:]) for x in params["branches"]]
    return []


def flows_of(eqn: JaxprEqn) -> list[tuple[ClosedJaxpr, int]]:
    """Return the jaxprs through which arrays flow, with the number of the input that enters first.

    The inputs of the equation from there on are those of the jaxpr, one by one.
    """
    name = eqn.primitive.name
    if name == "while":
        return [(closed(eqn.params["body_jaxpr"]), eqn.params["cond_nconsts"])]
    if name == "cond":
        return [(closed(x), 1) for x in eqn.params["branches"]]
    if name in (*CALLS, REMAT, *CUSTOM_DERIVATIVES, "scan", "shard_map"):
        return [(body_of(eqn), 0)]
    flows = []  # of equations in which nothing is replaced, such as composite
    if name.startswith("memeff_"):  # a call of this library
        return flows
    sizes = len(eqn.invars), len(eqn.outvars)
    for x in eqn.params.values():
        body = getattr(x, "jaxpr", x)
        if isinstance(body, Jaxpr) and (len(body.invars), len(body.outvars)) == sizes:
            flows.append((closed(x), 0))
    return flows


def carried_outputs(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """Return which input of the body of a loop is which of its outputs, one iteration later."""
    name = eqn.primitive.name
    if name == "while":
        first = eqn.params["body_nconsts"]
        return [(first + n, n) for n in range(len(eqn.outvars))]
    if name == "scan":
        constants, carried = scan_counts(eqn)
        return [(constants + n, n) for n in range(carried)]
    return []
