"""Tables of results in GitHub's Markdown, from the rows of one or more runs."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from memeff.bench.cases import Row, call_title, case_of_row
from memeff.bench.formatting import count_per_second, human, markdown, tokens
from memeff.bench.hard_paths import HardResults

TIMED_MODES = ("forward", "forward + gradient")  # of losses, arguments and devices


def memory_markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Return a table with a line for each length.

    The columns are the inputs, then for each call the bytes of every implementation. "~" marks
    extrapolated bytes. `columns` selects columns by their header.
    """
    names = unique(row["implementation"] for row in rows)
    calls = unique(call_title(row) for row in rows)
    has_ratio = {"jax.nn", "memeff"}.issubset(names)
    header = ["tokens", "query, key, value"]
    for call in calls:
        header += [f"{call}: {names[0]}", *names[1:]]
        if has_ratio:
            header.append("times less")

    rows_by_cell = {}
    for row in rows:
        rows_by_cell[row["length"], call_title(row), row["implementation"]] = row
    sizes = unique((row["length"], row["input_bytes"]) for row in rows)
    lines = []
    for length, input_bytes in sizes:
        line = [tokens(length), human(input_bytes)]
        for call in calls:
            rows_by_name = {}
            for name in names:
                row = rows_by_cell.get((length, call, name), {})
                rows_by_name[name] = row
                line.append(row.get("note") or temp_memory(row))
            if has_ratio:
                line.append(times_less(rows_by_name["jax.nn"], rows_by_name["memeff"]))
        lines.append(line)
    return selected_markdown(header, lines, columns or header)


def temp_memory(row: Row) -> str:
    """Return the temporary bytes of a result, with "~" if they are extrapolated."""
    about = "~" if row.get("extrapolated") else ""
    return about + human(row.get("temp_bytes"))


def times_less(plain: Row, linear: Row) -> str:
    """Return how many times less temporary memory `linear` takes than `plain`."""
    if not plain.get("temp_bytes") or not linear.get("temp_bytes"):
        return "-"
    ratio = plain["temp_bytes"] / linear["temp_bytes"]
    return f"{ratio:,.0f}" if ratio > 99.5 else f"{ratio:.2g}"


def speed_markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Return a table with a line for each row; `columns` selects from SPEED_COLUMNS.

    By default the device and the sizes of a call have no column. Key and value bytes and tokens
    have one where a row has its own number of queries, and the peak where a device reported one.
    """
    if columns is None:
        columns = [name for name in SPEED_COLUMNS if name not in SHARED_COLUMNS]
        if not any(row.get("query_length") for row in rows):
            columns.remove("key and value B/s")
            columns.remove("tokens/s")
        if not any(row.get("peak_bytes") for row in rows):
            columns.remove("peak")
    return rows_markdown(rows, columns, SPEED_COLUMNS)


def rows_markdown(
    rows: Sequence[Row], columns: Sequence[str], cells: dict[str, Callable[[Row], str]]
) -> str:
    """Return a table with a line for each row; `cells` has the function of each column's cells."""
    lines = []
    for row in rows:
        lines.append([cells[name](row) for name in columns])
    return markdown(columns, lines)


def milliseconds(row: Row) -> str:
    """Return the median and the least time in milliseconds, or the note why there is none."""
    if not row["seconds"]:
        return row["note"]
    median = 1e3 * row["seconds"]
    least = 1e3 * row["seconds_min"]
    return f"{median:.4g} ({least:.4g})"


def flops_per_second(row: Row) -> str:
    """Return the rate of the operations that count, as measured or from the stored time."""
    if row.get("flops_per_second"):
        return count_per_second(row["flops_per_second"])
    flops = case_of_row(row).flops
    if not row["seconds"] or not flops:
        return "-"
    return count_per_second(flops / row["seconds"])


def key_value_bytes_per_second(row: Row) -> str:
    """Return the rate at which keys and values are read, each once."""
    if not row["seconds"]:
        return "-"
    return count_per_second(case_of_row(row).key_value_bytes / row["seconds"])


def tokens_per_second(row: Row) -> str:
    """Return how many queries a second one layer answers, in all sequences together."""
    if not row["seconds"]:
        return "-"
    case = case_of_row(row)
    return count_per_second(case.batch * case.queries / row["seconds"])


def speed_ratio(row: Row) -> str:
    """Return how many times as fast as jax.nn the implementation is."""
    ratio = row["speed_against_jax_nn"]
    return f"{ratio:.2f}" if ratio else "-"


def relative_error(row: Row) -> str:
    """Return the error against float64 with one digit."""
    return f"{row['error']:.0e}" if row["error"] else "-"


# Columns of what all rows of a table have in common, if its description does not ask for them.
SHARED_COLUMNS = ("device", "sequences", "queries", "heads")
SPEED_COLUMNS: dict[str, Callable[[Row], str]] = {
    "device": lambda row: row["device"],
    "sequences": lambda row: str(row["batch"]),
    "queries": lambda row: str(row["query_length"] or row["length"]),
    "heads": lambda row: f"{row['heads']}:{row['kv_heads']} of {row['head_dim']}",
    "tokens": lambda row: tokens(row["length"]),
    "call": call_title,
    "implementation": lambda row: row["implementation"],
    "ms (least)": milliseconds,
    "FLOP/s": flops_per_second,
    "key and value B/s": key_value_bytes_per_second,
    "tokens/s": tokens_per_second,
    "x jax.nn": speed_ratio,
    "temporary": lambda row: human(row["temp_bytes"]),
    "peak": lambda row: human(row["peak_bytes"]),
    "error": relative_error,
}


def selected_markdown(
    header: Sequence[str], lines: Sequence[Sequence[str]], columns: Sequence[str]
) -> str:
    """Return a table of the columns whose header is in `columns`, in the order of `header`."""
    for title in columns:
        if title not in header:
            raise KeyError(title)
    kept = [index for index, title in enumerate(header) if title in columns]

    def select(cells):
        return [cells[index] for index in kept]

    return markdown(select(header), [select(line) for line in lines])


def unique(values: Iterable[Any]) -> list[Any]:
    """Return the values without repetitions, in their first order."""
    return list(dict.fromkeys(values))


def losses_markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Return a table with a line for each H and implementation, and columns for each length."""
    lengths = sorted({row["tokens"] for row in rows})
    header = ["H", "implementation"]
    header += [f"{tokens(n)}: {what}" for n in lengths for what in ("ms", "memory")]
    lines: dict[Any, list[str]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        key = row["features"], row["implementation"]
        lines.setdefault(key, [f"{row['features']:,}", row["implementation"]])
        lines[key] += [times(row), human(row.get(f"{TIMED_MODES[1]}: temp_bytes"))]
    return selected_markdown(header, list(lines.values()), columns or header)


def both_modes(row: Row, field: str, cell: Callable[[Any], str]) -> str:
    """Return the cell of a figure, forward / forward and gradient; "-" for what is not known."""
    figures = [row.get(f"{mode}: {field}") for mode in TIMED_MODES]
    return " / ".join("-" if x is None else cell(x) for x in figures)


def times(row: Row) -> str:
    """Return the milliseconds of both modes, or the note why there are none."""
    if not any(f"{mode}: seconds" in row for mode in TIMED_MODES):
        return row.get("note", "-")
    return both_modes(row, "seconds", lambda seconds: f"{1e3 * seconds:.3g}")


def arguments_markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Return a table with a line for each case, and a column for each implementation."""
    names = unique(row["implementation"] for row in rows)
    header = ["B, T, N, H", "with", *(f"{name}, ms" for name in names), "temporary MB"]
    lines: dict[Any, Row] = {}
    for row in rows:
        *sizes, extra = (row[field] for field in ("B", "T", "N", "H", "extra"))
        line = lines.setdefault((*sizes, extra), {"with": extra, "temporary MB": []})
        line["B, T, N, H"] = ", ".join(f"{size:,}" for size in sizes)
        line[f"{row['implementation']}, ms"] = "fails" if "note" in row else times(row)
        count = row.get(f"{TIMED_MODES[1]}: temp_bytes")
        line["temporary MB"].append("-" if count is None else f"{count / 1e6:.0f}")
    for line in lines.values():
        line["temporary MB"] = ", ".join(line["temporary MB"])
    return cells_markdown(list(lines.values()), columns or header)


def devices_markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Return a table with a line for each length and implementation, on many devices."""
    if columns is None:
        columns = list(DEVICES_COLUMNS)
        fields = set().union(*rows)
        if not any(f"{mode}: share of own" in fields for mode in TIMED_MODES):
            columns.remove("share of own")
    return rows_markdown(rows, columns, DEVICES_COLUMNS)


def shares(row: Row, field: str) -> str:
    """Return the shares of both modes in percent."""
    return both_modes(row, field, lambda share: f"{100 * share:.0f} %")


DEVICES_COLUMNS: dict[str, Callable[[Row], str]] = {
    "devices": lambda row: str(row["devices"]),
    "tokens of each": lambda row: tokens(row["tokens"]),
    "heads": lambda row: f"{row['heads']}:{row['kv_heads']} of {row['head_dim']}",
    "call": lambda row: row["implementation"],
    "ms": times,
    "share of one device": functools.partial(shares, field="share"),
    "share of own": functools.partial(shares, field="share of own"),
    "temporary": functools.partial(both_modes, field="temp_bytes", cell=human),
    "error": lambda row: f"{row['error']:.0e}" if "error" in row else "-",
}


def cells_markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Return a table of cells as they are; a row without a column has an empty cell there."""
    header = columns or unique(column for row in rows for column in row)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        cells = [row.get(column, "") for column in header]
        lines.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|")
    return "\n".join(lines)


ALLOWED = 1.5  # times plain attention's error; a larger ratio is bold


def hard_markdown(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """Return a table for each machine; of repeated calls the latest counts."""
    parts = []
    for device, jax_version in unique((row["device"], row["jax"]) for row in rows):
        latest = {}
        for row in rows:
            if (row["device"], row["jax"]) == (device, jax_version):
                call = {name: row[name] for name in ("case", "dtype", "path")}
                errors = {array: hard_cell(row[array]) for array in HardResults._fields}
                latest[tuple(call.values())] = call | errors
        parts.append(f"{device}, jax {jax_version}:")
        parts.append(cells_markdown(list(latest.values()), columns))
    return "\n\n".join(parts)


def hard_cell(errors: dict[str, float | None]) -> str:
    """Return the ratio of two errors; bold where it is more than is allowed."""
    error = errors["error"]
    plain = errors["plain"]
    if errors["largest"] is None:
        return "-"
    if error is None:
        return "not finite, as plain" if plain is None else "**not finite**"
    if plain is None:
        return "plain: not finite"
    if plain == 0:
        return hard_cell_in_roundings(error, errors["rounding"])
    ratio = error / plain
    if ratio <= ALLOWED:
        return f"{ratio:.2f}"
    saved = errors["saved"]
    ratio_to_saved = f" ({error / saved:.2g})" if saved else ""
    return f"**{ratio:.3g}**{ratio_to_saved}"


def hard_cell_in_roundings(error: float, rounding: float | None) -> str:
    """Return the error in roundings of the largest entry; bold where it is more than one."""
    assert rounding is not None
    if error == 0:
        return "0"
    roundings = f"{error / rounding:.2g} ulp"
    return roundings if error <= rounding else f"**{roundings}**"
