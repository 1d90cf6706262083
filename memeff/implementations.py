"""Name the implementations of attention, and ask each why it cannot run a call."""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax

from memeff import pallas, reference
from memeff.chunked import implementation as chunked
from memeff.device import Device, current_device
from memeff.problem import Operands, Problem

IMPLEMENTATIONS = ("xla", "reference", "pallas")


def module_for(name: str, device: Device) -> ModuleType:
    """Return the implementation `name`; of kernels, the family for `device`."""
    if name == "pallas":
        return pallas.family_for(device)
    return {"xla": chunked, "reference": reference}[name]


class Chosen(NamedTuple):
    """How a call runs."""

    problem: Problem  # with its tiles
    module: ModuleType  # the implementation, forward and backward together

    @property
    def name(self) -> str:
        """The name of the implementation, as the argument `implementation` takes it."""
        names: dict[ModuleType, str] = {chunked: "xla", reference: "reference"}
        return names.get(self.module, "pallas")


# Of a choice, on a device that is here: what forward and gradient take, as XLA says.
Compiled = Callable[[Chosen, jax.Device], tuple[int, int]]


def why_not(
    name: str,
    problem: Problem,
    operands: Operands,
    chunks: tuple[int | None, int | None] = (None, None),
) -> str | None:
    """None if the implementation `name` can run this call, else the reason."""
    match name:
        case "xla" | "reference":
            return (
                'backward="fused" is a form that only kernels have'
                if problem.backward == "fused"
                else None
            )
        case "pallas":
            own_tiles = (
                None
                if chunks == (None, None)
                else "kernels have their own tiles, and this call gives chunk_size"
            )
            device = current_device(operands.query)
            return pallas.family_for(device).why_not(problem, operands, device) or own_tiles
        case "cudnn":
            return "memeff does not hand over to cuDNN (jax.nn.dot_product_attention does)"
    raise ValueError(
        f"implementation={name!r} is not known: use None or one of {', '.join(map(repr, IMPLEMENTATIONS))}."
    )
