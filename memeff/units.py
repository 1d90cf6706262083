"""Read and write sizes in bytes."""

import numbers
import operator
import re
from collections.abc import Sequence
from typing import Any

from memeff.inputs import kind_of, text_of

UNITS = {"": 1, "B": 1} | {f"{p}iB": 2 ** (10 * n) for n, p in enumerate("KMGTP", 1)}
UNITS |= {f"{p}B": 1000**n for n, p in enumerate("kMGTP", 1)}
LARGEST = 2**63 - 1  # bytes


def parse_bytes(name: str, size: Any) -> int | None:
    """Return the bytes that `size` says: None, an int, or a text such as "512MiB".

    `name` names it in an error.
    """
    if size is None:
        return None
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*)\s*([A-Za-z]*)\s*", size)
        if not match or match[2] not in UNITS:
            raise ValueError(
                f'{name}={size!r}: write bytes as "512MiB" or "2GB" '
                "(B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)."
            )
        size = int(min(float(match[1]) * UNITS[match[2]], LARGEST + 1))
    if isinstance(size, bool) or not isinstance(size, numbers.Integral):
        raise TypeError(
            f'{name} must be bytes, an int or a text such as "512MiB", got {kind_of(size)}.'
        )
    if size <= 0:
        raise ValueError(f"{name}={text_of(size)}: bytes must be > 0; use None for no limit.")
    bytes_ = operator.index(size)
    if bytes_ > LARGEST:
        raise ValueError(f"{name} is more than 2^63 bytes: make it smaller, or omit it.")
    return bytes_


def format_bytes(
    count: float, units: Sequence[str] = ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), base: int = 1024
) -> str:
    """Return a count in three digits and a unit."""
    power = min(len(units) - 1, next(n for n in range(99) if count < 999.5 * base**n))
    return f"{count / base**power:.3g} {units[power]}".strip()
