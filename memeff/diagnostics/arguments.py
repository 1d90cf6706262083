"""Bind the arguments of a diagnostic function as a call of `dot_product_attention`."""

from __future__ import annotations

import inspect
from typing import Any

import jax

from memeff import compiling, dispatch
from memeff.attention import dot_product_attention
from memeff.problem import Operands, Problem


def bind_chunked_arguments(
    name: str, query, key, value, bias, mask, how: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of the chunked path, by name."""
    others = {"implementation", "backward", "return_residual", "sinks"}
    if not_taken := sorted(others & how.keys()):
        raise TypeError(f"memeff.{name} does not take {', '.join(not_taken)}: leave it away.")
    bound = inspect.signature(dot_product_attention).bind(
        query, key, value, bias, mask, implementation="xla", **how
    )
    bound.apply_defaults()
    return bound.arguments


def dispatched_call(name: str, given: dict[str, Any]) -> tuple[Problem, Operands, str]:
    """What dispatch sees of a call (of arrays only shapes), and the implementation that it chooses."""
    if "implementation" in given:
        raise TypeError(
            f"memeff.{name} tells what memeff would choose: leave implementation= away."
        )
    floats, rest, join, _ = compiling.split_arguments(given)
    with dispatch.watch() as calls:
        jax.eval_shape(lambda *arrays: dot_product_attention(**join(*arrays)), floats, rest)
    return calls[0]
