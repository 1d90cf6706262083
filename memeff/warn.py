"""Warn the user once for each cause, at the line outside memeff that made the call."""

import sys
import warnings

_warned: set[str] = set()


def warn_once(cause: str, message: str) -> None:
    """Warn with `message`, unless this process has already warned of `cause`."""
    if cause in _warned:
        return
    _warned.add(cause)
    stacklevel = 2  # the caller of this function
    frame = sys._getframe(1)
    while frame is not None and _is_memeffs(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(message, stacklevel=stacklevel)


def _is_memeffs(module: str) -> bool:
    return module == "memeff" or module.startswith("memeff.")
