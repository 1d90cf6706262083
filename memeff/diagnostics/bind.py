"""Bind the arguments of a diagnostic function as a call of `dot_product_attention`.

The call is prepared, and does not run.
"""

from __future__ import annotations

from typing import Any

import jax

from memeff import compiling
from memeff.arguments import Arguments
from memeff.call import Call, prepare, run_attention


def chunked_arguments(name: str, *arrays: Any, **kwargs: Any) -> Arguments:
    """Return the arguments of a call of the chunked path, for the public function `name`.

    Refuse arguments that it does not take.
    """
    refused = {"implementation", "backward", "return_residual", "sinks"} & kwargs.keys()
    if refused:
        raise TypeError(f"memeff.{name} does not take {', '.join(sorted(refused))}. Omit it.")
    return bind_arguments(name, *arrays, implementation="xla", **kwargs)


def bind_arguments(name: str, *arrays: Any, **kwargs: Any) -> Arguments:
    """Return the arguments of a call, for the public function `name`; refuse other keywords."""
    unknown = kwargs.keys() - set(Arguments._fields)
    if unknown:
        words = ", ".join(sorted(unknown))
        raise TypeError(f"memeff.{name} got an unexpected keyword argument: {words}.")
    return Arguments(*arrays, **kwargs)


def prepare_shapes(name: str, arguments: Arguments) -> Call:
    """Return the call that memeff would choose, with shapes in place of its arrays.

    Nothing is computed.
    """
    if arguments.implementation is not None:
        raise TypeError(f"memeff.{name} tells what memeff would choose. Omit `implementation`.")
    floats, rest, join, _ = compiling.split_arguments(arguments)
    calls = []

    def trace(*arrays):
        call = prepare(join(*arrays), run_attention, warn=False)
        calls.append(call)
        return call.operands

    shapes = jax.eval_shape(trace, floats, rest)
    return calls[0]._replace(operands=shapes)
