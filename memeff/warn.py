"""Warn the user at the line of the program that made the call."""

import sys
import warnings

_LIBRARIES = ("memeff", "contextlib", "flax", "jax")  # their lines are not the user's
_warned: set[str] = set()


def warn(message: str) -> None:
    """Warn with `message` at the nearest line outside memeff and the libraries that call it."""
    stacklevel = 2  # the caller of this function
    frame = sys._getframe(1)
    while frame is not None:
        package, _, _ = frame.f_globals.get("__name__", "").partition(".")
        if package not in _LIBRARIES:
            break
        frame = frame.f_back
        stacklevel += 1
    warnings.warn(message, stacklevel=stacklevel)


def warn_once(cause: str, message: str) -> None:
    """Warn with `message`, unless this process has already warned of `cause`."""
    if cause not in _warned:
        _warned.add(cause)
        warn(message)
