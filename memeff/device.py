"""Say on which device calls run, or pretend one."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.core import Tracer


class Device(NamedTuple):
    """What runs a call."""

    platform: str  # "cpu", "gpu", "tpu"
    capability: str | None = None  # of a CUDA GPU, "9.0"; None: another kind, or not known


_pretended: contextvars.ContextVar[Device | None] = contextvars.ContextVar(
    "memeff_device", default=None
)


@contextlib.contextmanager
def pretend_device(name: str | None, capability: str | None = None) -> Iterator[None]:
    """As if there were one device, of this platform ("cpu", "gpu", "tpu"; None: as it is) and CUDA compute capability."""
    token = _pretended.set(None if name is None else Device(name, capability))
    try:
        yield
    finally:
        _pretended.reset(token)


def current_device(query: Any = None) -> Device:
    """Where calls run; this one, where `query` lies somewhere already."""
    if (given := _pretended.get()) is not None:
        return given
    first = jax.devices()[0]
    here = jax.config.jax_default_device or first  # type: ignore
    if isinstance(query, jax.Array) and not isinstance(query, Tracer):
        here = next(iter(query.devices()))
    if not isinstance(here, jax.Device) or here.platform == first.platform:
        return Device(jax.default_backend(), getattr(first, "compute_capability", None))
    return Device(here.platform, getattr(here, "compute_capability", None))


def current_platform() -> str:
    return current_device().platform
