"""Tell on which device calls run, and pretend another one."""

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.core import Tracer

# XLA's flag for messages between the GPUs of one process that their copy engines carry. NCCL's
# kernel, the default, takes multiprocessors from the work beside a message.
COPIED_MESSAGES = "--xla_gpu_collective_permute_mode=peer"


class Device(NamedTuple):
    """The kind of device that runs a call."""

    platform: str  # "cpu", "gpu", "tpu"
    capability: str | None = None  # of a CUDA GPU, such as "9.0"; None: another kind, or unknown


_pretended: contextvars.ContextVar[Device | None] = contextvars.ContextVar(
    "memeff_device", default=None
)


@contextlib.contextmanager
def pretend_device(name: str | None, capability: str | None = None) -> Iterator[None]:
    """Choose as if there were one device, of platform `name` and CUDA compute `capability`.

    `name` is "cpu", "gpu" or "tpu", or None for the real devices.
    """
    token = _pretended.set(None if name is None else Device(name, capability))
    try:
        yield
    finally:
        _pretended.reset(token)


def is_pretended() -> bool:
    """Return True inside `pretend_device`."""
    return _pretended.get() is not None


@contextlib.contextmanager
def device_of(query: Any) -> Iterator[None]:
    """Choose as for the device of `query`, if it is an array on another kind than the default."""
    device = current_device(query)
    if device == current_device():
        yield
        return
    with pretend_device(*device):
        yield


def current_device(query: Any = None) -> Device:
    """Return the device on which calls run, or that of `query` if it is a concrete array."""
    pretended = _pretended.get()
    if pretended is not None:
        return pretended
    default = jax.devices()[0]
    device = jax.config.jax_default_device or default  # type: ignore
    if isinstance(query, jax.Array) and not isinstance(query, Tracer):
        device = next(iter(query.devices()))
    if not isinstance(device, jax.Device) or device.platform == default.platform:
        return Device(jax.default_backend(), getattr(default, "compute_capability", None))
    return Device(device.platform, getattr(device, "compute_capability", None))


def copies_messages() -> bool:
    """Return True if the environment sets COPIED_MESSAGES, or the same flag to another value."""
    return COPIED_MESSAGES.partition("=")[0] in os.environ.get("XLA_FLAGS", "")


def set_copied_messages() -> None:
    """Set COPIED_MESSAGES in the environment of this program, which must not have used JAX yet."""
    if not copies_messages():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COPIED_MESSAGES}".strip()


def current_platform() -> str:
    """Return the platform on which calls run: "cpu", "gpu" or "tpu"."""
    return current_device().platform
