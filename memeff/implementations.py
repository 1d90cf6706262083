"""Name the implementations of attention, and ask each why it cannot run a call."""

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax

from memeff import pallas, reference
from memeff.chunked import implementation as chunked
from memeff.device import Device, current_device
from memeff.inputs import check_choice
from memeff.problem import Operands, Problem, Schedule
from memeff.stored import StoredKeys

IMPLEMENTATIONS = ("xla", "reference", "pallas")


def module_for(name: str, device: Device) -> ModuleType:
    """Return the module of implementation `name`; "pallas" is the kernel family for `device`."""
    if name == "pallas":
        return pallas.family_for(device)
    return {"xla": chunked, "reference": reference}[name]


class Request(NamedTuple):
    """The user's wishes for how a call runs; memeff chooses where they are None."""

    implementation: str | None = None
    backward: str | None = None  # kernels of the gradient: "split" (also None), "fused", "fastest"
    chunk_size: tuple[int | None, int | None] = (None, None)  # tokens
    memory_limit: int | None = None  # bytes


NO_REQUEST = Request()


class Chosen(NamedTuple):
    """The way in which a call runs."""

    problem: Problem
    schedule: Schedule
    module: ModuleType  # the implementation, forward and backward together

    @property
    def name(self) -> str:
        """The name of the implementation, as the argument `implementation` takes it."""
        names: dict[ModuleType, str] = {chunked: "xla", reference: "reference"}
        return names.get(self.module, "pallas")


# Compile a choice for a local device: temporary bytes of forward and gradient, as XLA reports them
Compiled = Callable[[Chosen, jax.Device], tuple[int, int]]


def why_not(
    name: str, problem: Problem, operands: Operands, request: Request = NO_REQUEST
) -> str | None:
    """Return None if implementation `name` can run this call, or else the reason in words."""
    if name == "cudnn":
        return "memeff does not call cuDNN (jax.nn.dot_product_attention does)"
    check_choice("implementation", name, IMPLEMENTATIONS, optional=True)
    fused = request.backward == "fused"
    if name == "pallas":
        device = current_device(operands.query)
        reason = pallas.family_for(device).why_not(problem, operands, device, fused)
        if reason is None and request.chunk_size != (None, None):
            return "the kernels choose their own tiles and do not support chunk_size"
        if reason is None and _has_64_bits(operands):
            return "the kernels do not support arrays of 64 bits: cast them to 32"
        return reason
    if fused:
        return 'only the kernels support backward="fused"'
    if name == "reference" and isinstance(operands.key, StoredKeys):
        return "it does not read keys that are stored in pages or in 8 bits"
    return None


def _has_64_bits(operands: Operands) -> bool:
    """Return True if an array has numbers of 64 bits; kernels check params of functions anyway."""
    arrays = operands._replace(mask_params=(), score_nonfloat_params=(), dropout_key=None)
    return any(x.dtype.itemsize == 8 for x in jax.tree.leaves(arrays))
