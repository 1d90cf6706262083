"""Decide which calls the Ampere kernels can run.

Each reason is a clause that stands behind "because": no capital letter, no period.
"""

import contextlib
import contextvars
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from memeff.device import Device
from memeff.pallas.hopper.capability import unsupported_by_fused, unsupported_option
from memeff.pallas.reasons import too_few_queries, unsupported_sizes
from memeff.pallas.user_functions import calls
from memeff.problem import Operands, Problem
from memeff.stored import StoredKeys

LARGEST_HEAD = 128
OLDEST_JAX = (0, 11, 2)  # that was tried

_chosen: contextvars.ContextVar[bool] = contextvars.ContextVar("memeff_ampere", default=False)


@contextlib.contextmanager
def chosen() -> Iterator[None]:
    """Choose these kernels on Hopper GPUs, too, where tests check and time them."""
    token = _chosen.set(True)
    try:
        yield
    finally:
        _chosen.reset(token)


def for_device(device: Device) -> str | None:
    """Return why the kernels do not run on `device`; None if they do."""
    if device.platform != "gpu":
        return f"the Ampere kernels need an NVIDIA GPU, and this device is a {device.platform}"
    # Other makers' GPUs have names there.
    numbers = re.fullmatch(r"(\d+)\.\d+", device.capability or "")
    if numbers is None or int(numbers[1]) < 8:
        return (
            "the Ampere kernels need a GPU of compute capability 8.0 or more, and this one has "
            f"{device.capability}"
        )
    if jax.__version_info__ < OLDEST_JAX:
        return f"the Ampere kernels need jax 0.11.2 or later, and this is jax {jax.__version__}"
    if device.capability == "9.0" and not _chosen.get():
        return "the Ampere kernels are for GPUs that have none of their own, as Hopper GPUs have"
    return None


def why_not(
    problem: Problem, operands: Operands, device: Device, fused: bool = False
) -> str | None:
    """Return why the kernels cannot run a call; None if they can."""
    return (
        for_device(device)
        or _unsupported_shape(operands)
        or unsupported_option(problem, operands, "Ampere")
        or (unsupported_by_fused(problem, operands) if fused else None)
        or calls.why_not(problem, operands)
    )


def _unsupported_shape(operands: Operands) -> str | None:
    """Return a reason if the kernels do not support the lengths, the dtype or the head dims."""
    if isinstance(operands.key, StoredKeys):
        return "the Ampere kernels do not read keys that are stored in pages or in 8 bits"
    dtype = operands.query.dtype
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"the Ampere kernels support bfloat16 and float16, and this call has {dtype}"
    return unsupported_sizes(operands, "Ampere", LARGEST_HEAD)


def slower(problem: Problem, operands: Operands) -> str | None:
    """Return why the chunked path is expected to be faster; None if it is not."""
    return too_few_queries(operands, "Ampere")


def backward_is_kernel(operands: Operands) -> bool:
    """Return True: kernels compute the gradient of every call that they run."""
    return True


def fused_is_faster(problem: Problem, operands: Operands) -> bool:
    """Return False: on the GPUs that these kernels are for, nobody has timed them."""
    return False
