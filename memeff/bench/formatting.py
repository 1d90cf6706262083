"""Numbers, tables and progress bars as people read them."""

import importlib
import importlib.util
from collections.abc import Iterable, Sequence

from memeff.units import format_bytes as three_digits

BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
COUNTS = ("", "k", "M", "G", "T", "P")


def human(count: float | None, units: Sequence[str] = BYTES, base: int = 1024) -> str:
    """Format a number with three digits and a unit; None becomes "-"."""
    if count is None:
        return "-"
    return three_digits(count, units, base)


def count_per_second(count: float | None) -> str:
    """Format a rate with three digits and a decimal prefix."""
    return human(count, COUNTS, 1000)


def tokens(length: int) -> str:
    """Format a number of tokens; k and M are 2^10 and 2^20."""
    if length % 1024:
        return str(length)
    return human(length, ("", "k", "M")).replace(" ", "")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a GitHub table whose columns are aligned on the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * (width - 1) + ":" for width in widths]
    lines = []
    for line in (header, rule, *rows):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def progress(items: Sequence, label: str) -> Iterable:
    """Iterate over `items`, with a progress bar where tqdm is installed and a terminal is there."""
    if importlib.util.find_spec("tqdm") is None:
        return items
    show_on_terminals_only = None
    tqdm = importlib.import_module("tqdm").tqdm
    return tqdm(items, desc=label, disable=show_on_terminals_only, leave=False)
