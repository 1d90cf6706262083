"""The machine that the figures belong to: its name, its versions, its cores and its memory."""

import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

import memeff


def machine() -> dict[str, Any]:
    """Return the device and the versions that a measurement depends on."""
    return {
        "device": device_name(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "memeff": memeff.__version__,
    }


def device_name() -> str:
    """Return the name of JAX's first device; of a CPU the model and the number of cores."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    return f"{cpu_model()}, {cores()} cores"


def cpu_model() -> str:
    """Return the CPU's model as Linux names it, elsewhere its architecture."""
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        model = re.search("model name.*: (.*)", cpu_info.read_text())
        if model:
            return model[1]
    return platform.machine()


def cores() -> int:
    """Return the number of cores that this process may use; `taskset` restricts them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device_bytes() -> float:
    """Return the memory of the device, or 3/4 of the machine's where the CPU is the device."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    if not hasattr(os, "sysconf"):
        return float("inf")
    return 0.75 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
