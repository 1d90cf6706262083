"""Compile the programs of a table side by side, and record its results."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from memeff.bench.cases import Row
from memeff.bench.results import description_to_keep, measurement, save_results, shortened


def compile_all(
    compile_call: Callable[..., Any], calls: Sequence[tuple], jobs: int
) -> dict[tuple, Any]:
    """Return `compile_call(*call)` of each call, or the error in words; `jobs` run at a time."""

    def attempt(call: tuple) -> Any:
        try:
            return compile_call(*call)
        except Exception as error:  # noqa: BLE001
            return first_line(f"{type(error).__name__}: {error}")

    with ThreadPoolExecutor(jobs) as pool:
        return dict(zip(calls, pool.map(attempt, calls), strict=True))


def first_line(error: object) -> str:
    """Return the beginning of an error, as the note of a row."""
    return str(error).splitlines()[0][:200]


def record_rows(rows: Iterable[Row], command: str, path: str | None, table: str) -> list[Row]:
    """Print each result as it comes, and return all as they are saved.

    Write them to `path`, if it is given, as results of `table`.
    """
    records = []
    description = description_to_keep(Path(path), table) if path else {}
    for row in rows:
        records.append(measurement(row, command))
        print(json.dumps(records[-1]), flush=True)
    if path:
        save_results(Path(path), description, records)
    return [shortened(record) for record in records]


def measuring_command(arguments: Sequence[str]) -> str:
    """Return the command line of the bench without the options that only say where to write."""
    command = f"python -m memeff.bench {shlex.join(arguments)}"
    return re.sub(r" --(?:json|plot|save)[ =](?:'[^']*'|\S+)", "", command)
