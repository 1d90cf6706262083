"""Compile the programs of a table side by side, time them in turns, and record the results."""

import json
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import jax

from memeff.bench.calls import program_run
from memeff.bench.cases import Row
from memeff.bench.formatting import progress
from memeff.bench.results import (
    TO_MARKDOWN,
    ResultsError,
    description_to_keep,
    measurement,
    save_results,
    shortened,
)
from memeff.bench.speed import measure
from memeff.bench.tables import TIMED_MODES


def check_known(name: str, names: Iterable[str]) -> None:
    """Refuse the name of an implementation that a table does not have, because it is misspelt."""
    if name not in names:
        raise ValueError(f"implementation {name!r} is not known: use one of {', '.join(names)}.")


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
        futures = [pool.submit(attempt, call) for call in calls]
        programs = [future.result() for future in progress(futures, "compiling")]
    return dict(zip(calls, programs, strict=True))


def first_line(error: object) -> str:
    """Return the beginning of an error, as the note of a row."""
    return str(error).splitlines()[0][:200]


def timed_rows(
    case: Any,
    programs: Mapping[tuple, Any],
    inputs: Callable[[str], Sequence[Any]],
    figures: Callable[[str, str, Any], Row] | None = None,
    *,
    rounds: int,
    at_least: float,
) -> tuple[dict[str, Row], dict[str, dict[str, list[float]]]]:
    """Time the programs of a case in turns; return a row by implementation, and samples by mode.

    `programs` has those of `compile_all` by (implementation, case, mode). `inputs(name)` are the
    arguments of an implementation, and `figures(name, mode, result)` more fields of its row.
    """
    own = {(name, mode): x for (name, other, mode), x in programs.items() if other == case}
    rows: dict[str, Row] = {name: {"implementation": name, **case._asdict()} for name, _ in own}
    samples = {}
    for mode in TIMED_MODES:
        runs = {}
        for name, row in rows.items():
            program = own.get((name, mode))
            if isinstance(program, str):
                row["note"] = program
            if program is None or isinstance(program, str):
                continue
            row[f"{mode}: temp_bytes"] = program.memory_analysis().temp_size_in_bytes
            run = program_run(program, inputs(name))
            try:
                result = run.call()
                row |= figures(name, mode, result) if figures else {}
                runs[name] = run
            except jax.errors.JaxRuntimeError as error:
                row["note"] = first_line(error)
        samples[mode] = measure(runs, rounds, at_least)
        for name, seconds in samples[mode].items():
            rows[name][f"{mode}: seconds"] = statistics.median(seconds)
    return rows, samples


def record_table(
    rows: Iterable[Row], command: str, path: str | None, table: str, file: TextIO | None = None
) -> list[Row]:
    """Write each result to `file` (None: print it) as it comes, then print the table.

    Save the results to `path`, if it is given, as those of `table`. Return them with all digits.
    """
    records = []
    description = description_for(path, table)
    for row in rows:
        records.append(measurement(row, command))
        print(json.dumps(records[-1]), file=file, flush=True)
    if path:
        save_results(Path(path), description, records)
    print(TO_MARKDOWN[table]([shortened(record) for record in records]))
    return records


def description_for(path: str | None, table: str) -> dict[str, Any]:
    """Return the description with which `--save` writes; exit where the file has another table."""
    try:
        return description_to_keep(Path(path), table) if path else {}
    except ResultsError as error:
        sys.exit(str(error))


def measuring_command(arguments: Sequence[str]) -> str:
    """Return the command line of the bench without the options that only say where to write."""
    command = f"python -m memeff.bench {shlex.join(arguments)}"
    return re.sub(r" --(?:json|plot|save)[ =](?:'[^']*'|\S+)", "", command)
