"""Bind the arguments of a diagnostic function as a call of `dot_product_attention`.

The call is prepared, and does not run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from memeff import compiling, sharding
from memeff.arguments import Arguments, bind_arguments
from memeff.call import Call, ShardedCall, prepare, prepare_sharded, run_attention
from memeff.inputs import check_numpy

_DECIDED = {"implementation", "backward", "return_residual"}  # by the diagnostic function


def chunked_arguments(name: str, *arrays: Any, **kwargs: Any) -> Arguments:
    """Return the arguments of a call of the chunked path on one device, without sinks."""
    _refuse(name, kwargs, {*_DECIDED, "sinks"})
    arguments = exact_arguments(name, *arrays, **kwargs)
    refuse_sharded(name, arguments)
    return arguments


def exact_arguments(name: str, *arrays: Any, **kwargs: Any) -> Arguments:
    """Return the arguments of a call of the chunked path, for the public function `name`.

    Refuse arguments that it does not take.
    """
    _refuse(name, kwargs, _DECIDED)
    return bind_arguments(name, *arrays, implementation="xla", **kwargs)


def _refuse(name: str, kwargs: dict[str, Any], names: set[str]) -> None:
    """Refuse arguments of these names."""
    refused = names & kwargs.keys()
    if refused:
        raise TypeError(f"memeff.{name} does not take {', '.join(sorted(refused))}. Omit it.")


def prepare_shapes(name: str, arguments: Arguments) -> Call:
    """Return the call that memeff would choose, with shapes in place of its arrays.

    Nothing is computed.
    """
    if arguments.implementation is not None:
        raise TypeError(f"memeff.{name} says what memeff would choose. Omit `implementation`.")

    def prepare_call(arguments: Arguments) -> Call:
        return prepare(arguments, run_attention, warn=False)

    call = _with_shapes(prepare_call, arguments)
    arrays: Any = (arguments.query, arguments.key, arguments.value)
    # Shapes do not tell on which devices arrays lie.
    if all(isinstance(x, jax.Array) for x in arrays):
        sharding.check_layout(*arrays, sequence=False)
    return call


def prepare_sharded_shapes(arguments: Arguments, axes: tuple[str, ...]) -> ShardedCall:
    """Return the call of a sharded sequence, with shapes in place of its arrays."""
    return _with_shapes(functools.partial(prepare_sharded, axes=axes), arguments)


def refuse_sharded(name: str, arguments: Arguments) -> None:
    """Refuse a sequence that is sharded over devices; a type may name an axis of one device."""
    query = sharding.without_idle_axes(arguments.query)
    if sharding.sequence_axes(arguments.sequence_axis, query):
        raise NotImplementedError(
            f"memeff.{name} does not support a sequence that is sharded over devices. Omit "
            "`sequence_axis`, and pass the arrays of one device."
        )


def _with_shapes(prepare_call: Callable[[Arguments], Any], arguments: Arguments) -> Any:
    """Return `prepare_call(arguments)` with shapes in place of its operands."""
    for path, leaf in jax.tree.leaves_with_path(arguments._asdict()):
        if isinstance(leaf, np.ndarray):
            check_numpy(path[0].key, leaf)
    floats, rest, join, _ = compiling.split_arguments(arguments)
    calls = []

    def trace(*arrays):
        call = prepare_call(join(*arrays))
        calls.append(call)
        return call.operands

    shapes = jax.eval_shape(trace, floats, rest)
    return calls[0]._replace(operands=shapes)
