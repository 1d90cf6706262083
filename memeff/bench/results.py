"""Results in files: docs/benchmarks/NAME.jsonl holds the figures of the documentation's table NAME.

Each line is a JSON object. The first describes the table, the others are results:

    {"table": "speed"}
    {"date": ..., "device": ..., "python": ..., "jax": ..., "memeff": ..., "command": ...,
     "implementation": "memeff", "length": 4096, ..., "seconds": 0.1022, ...}

Sizes of memory are in bytes and times in seconds. FLOP/s and "times less" are computed from them;
"flops_per_second" is stored only where a result lacks the digits for that. `speed_against_jax_nn`
is measured, because it compares the two within each turn. The description has these fields:

- "table": "memory", "speed", "losses", "arguments", "devices" or "hard" for the tables of the
  bench. "cells" for a table that this bench cannot measure: its results are the lines of the table,
  {header: cell}, and the description says where they are from.
- "columns" (optional): the headers of the columns to show.
- "rows_from" (optional): a list of selections from other files, instead of results. A selection is
  {"name": NAME, "where": {field: [values]}, "set": {field: value}}: it takes the results whose
  fields have one of the values, in the order of the values, and replaces the fields in "set".

A new measurement replaces the results: `python -m memeff.bench speed ... --save
docs/benchmarks/NAME.jsonl`. For a table of several runs, append the lines of the later ones, which
`--json` writes for speed and memory, and the other commands print. Then `python -m memeff.bench
report` rewrites the pages.
"""

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from memeff.bench.cases import Row
from memeff.bench.device import machine
from memeff.bench.tables import (
    arguments_markdown,
    cells_markdown,
    devices_markdown,
    hard_markdown,
    losses_markdown,
    memory_markdown,
    speed_markdown,
)

FOLDER = Path("docs/benchmarks")
DERIVED_FIGURES = ("flops_per_second", "bytes_per_second")  # computed again from seconds
SAVED_DIGITS = 6


class ResultsError(ValueError):
    """A file of results that cannot be read or does not fit its description."""


class Results(NamedTuple):
    """The contents of one file: its description, and the rows of its table."""

    description: dict[str, Any]
    rows: list[Row]


def measurement(row: Row, command: str) -> Row:
    """Return a result with what it belongs to: the date, the machine and the command."""
    today = datetime.date.today().isoformat()
    return {"date": today, **machine(), "command": command, **row}


def description_to_keep(path: Path, kind: str) -> dict[str, Any]:
    """Return the description of the results in a file, or a new one if there is no file.

    Raises:
      ResultsError: the file has another kind of table, or takes its rows from other files.
    """
    if not path.exists():
        return {"table": kind}
    description = read_lines(path)[0]
    if description["table"] != kind:
        raise ResultsError(f"{path} describes no table of {kind}: choose another file.")
    if "rows_from" in description:
        raise ResultsError(f"{path} takes its rows from other files: save to those.")
    return description


def save_results(path: Path, description: dict[str, Any], rows: Iterable[Row]) -> None:
    """Write a description and results to a file, in the place of what it had."""
    records = [description, *map(shortened, rows)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def shortened(row: Row) -> Row:
    """Return a row as it is saved and printed: without derived figures, and with rounded ones."""
    record = {}
    for field, value in row.items():
        if field in DERIVED_FIGURES:
            continue
        if isinstance(value, float):
            value = float(f"{value:.{SAVED_DIGITS}g}")
        record[field] = value
    return record


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file; the first must describe a table."""
    lines = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ResultsError(f"{path}, line {number} is no JSON: {error}") from error
    if not lines or lines[0].get("table") not in TO_MARKDOWN:
        kinds = ", ".join(f'{{"table": "{kind}"}}' for kind in TO_MARKDOWN)
        raise ResultsError(f"{path} must begin with one of {kinds}.")
    return lines


def read_results(folder: Path, name: str) -> Results:
    """Return the contents of NAME.jsonl, with the rows that it takes from other files."""
    path = folder / f"{name}.jsonl"
    if not path.exists():
        raise ResultsError(f"{path} does not exist.")
    description, *rows = read_lines(path)
    for selection in description.get("rows_from", ()):
        rows += select_rows(folder, selection)
    if not rows:
        raise ResultsError(f"{path} has no results.")
    return Results(description, rows)


def select_rows(folder: Path, selection: dict[str, Any]) -> list[Row]:
    """Return the rows that a selection takes from another file."""
    name = selection["name"]
    rows = read_results(folder, name).rows
    for field, values in selection.get("where", {}).items():
        selected = []
        for value in values:
            matching = [row for row in rows if row.get(field) == value]
            if not matching:
                raise ResultsError(f"{name}.jsonl lacks a {field} of {values}.")
            selected += matching
        rows = selected
    replaced = selection.get("set", {})
    return [row | replaced for row in rows]


def results_markdown(results: Results) -> str:
    """Return the table of a file of results.

    Raises:
      ResultsError: a result lacks a field, or the table lacks a column.
    """
    columns = results.description.get("columns")
    to_markdown = TO_MARKDOWN[results.description["table"]]
    try:
        return to_markdown(results.rows, columns)
    except KeyError as error:
        raise ResultsError(f"no result or column has the name {error}.") from error


TO_MARKDOWN = {
    "memory": memory_markdown,
    "speed": speed_markdown,
    "losses": losses_markdown,
    "arguments": arguments_markdown,
    "devices": devices_markdown,
    "hard": hard_markdown,
    "cells": cells_markdown,
}
