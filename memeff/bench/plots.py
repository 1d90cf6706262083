"""Pictures of the tables: figures of matplotlib, and bars made of text."""

import math
from collections.abc import Sequence

from memeff.bench.calls import ran_out
from memeff.bench.cases import Row, call_title
from memeff.bench.formatting import BYTES, COUNTS, human, tokens
from memeff.bench.tables import TIMED_MODES, temp_memory, unique

# The label of the y axis, its units, and the base of their powers.
AXES = {
    "temp_bytes": ("temporary memory", BYTES, 1024),
    "peak_bytes": ("measured memory beyond the inputs", BYTES, 1024),
    "seconds": ("seconds a call", ("",), 1000),
    "flops_per_second": ("FLOP/s", COUNTS, 1000),
}
LARGE_GPU_BYTES = 80 * 2**30


def figure(rows: Sequence[Row], field: str):
    """Return a matplotlib figure of `field`, a key of AXES, against length.

    Each call has a panel. Where an implementation ran out of memory, a cross stands above the
    first length at which it did.
    """
    from matplotlib.figure import Figure

    calls = unique(call_title(row) for row in rows)
    width = 1 + 4.5 * len(calls)
    drawing = Figure(figsize=(width, 4.5), layout="constrained")
    (panels,) = drawing.subplots(1, len(calls), sharey=True, squeeze=False)
    for panel, call in zip(panels, calls, strict=True):
        call_rows = [row for row in rows if call_title(row) == call]
        draw_lines(panel, call_rows, field)
        if field == "temp_bytes":
            draw_scale(panel, call_rows)
        label_axes(panel, call, field)
    label, _, _ = AXES[field]
    drawing.axes[0].set_ylabel(label)
    return drawing


def devices_figure(rows: Sequence[Row]):
    """Return a matplotlib figure of shares of one device's rate against the number of devices.

    There is a column for each number of heads and of tokens, and a line of panels for each mode.
    An implementation has the same colour in all panels; the legend stands in one.
    """
    from matplotlib.figure import Figure

    calls = unique((row["heads"], row["kv_heads"], row["tokens"]) for row in rows)
    names = unique(row["implementation"] for row in rows if f"{TIMED_MODES[0]}: share" in row)
    drawing = Figure(figsize=(1 + 3.2 * len(calls), 6.5), layout="constrained")
    grid = drawing.subplots(len(TIMED_MODES), len(calls), sharex=True, sharey=True, squeeze=False)
    for panels, mode in zip(grid, TIMED_MODES, strict=True):
        for panel, call in zip(panels, calls, strict=True):
            heads, kv_heads, length = call
            shares: dict[str, dict[int, float]] = {}
            for row in rows:
                share = row.get(f"{mode}: share")
                if share and (row["heads"], row["kv_heads"], row["tokens"]) == call:
                    shares.setdefault(row["implementation"], {1: 1.0})[row["devices"]] = share
            for color, name in enumerate(names):
                points = sorted(shares.get(name, {}).items())
                values = [100 * share for _, share in points]
                panel.plot([n for n, _ in points], values, f"o-C{color}", label=name)
            title = f"{mode}, {tokens(length)} tokens of each\n{heads}:{kv_heads} heads"
            panel.set_title(title, fontsize="medium")
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda count, _: f"{count:.0f}")
            panel.set_ylim(0, 108)
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("% of one device's rate")
    for panel in grid[-1]:
        panel.set_xlabel("devices")
    grid[0][-1].legend(fontsize="small")
    return drawing


def save_figure(drawing, path: str) -> None:
    """Write a figure; the same figure gives the same file."""
    import matplotlib

    no_date = {"Date": None} if path.endswith(".svg") else None
    with matplotlib.rc_context({"svg.hashsalt": "memeff"}):
        drawing.savefig(path, metadata=no_date)


def draw_lines(panel, rows: Sequence[Row], field: str) -> None:
    """Draw a line for each implementation that has figures, and its cross."""
    names = {row["implementation"] for row in rows if row[field]}
    for name in sorted(names):
        points = []
        too_long = []
        for row in rows:
            if row["implementation"] != name:
                continue
            if row[field]:
                points.append((row["length"], row[field]))
            if ran_out(row.get("note")):
                too_long.append(row["length"])
        label = name
        if too_long:
            label += f": out of memory at {tokens(min(too_long))}"
        width = 2.5 if name == "memeff" else 1.5
        lengths, values = zip(*sorted(points), strict=True)
        (line,) = panel.plot(lengths, values, "o-", label=label, linewidth=width)
        if too_long:
            color = line.get_color()
            upper_edge = panel.get_xaxis_transform()
            panel.plot(min(too_long), 0.97, "X", color=color, transform=upper_edge)


def draw_scale(panel, rows: Sequence[Row]) -> None:
    """Draw the size of the inputs and the memory of a large GPU, for comparison."""
    sizes = {(row["length"], row["input_bytes"]) for row in rows}
    lengths, input_bytes = zip(*sorted(sizes), strict=True)
    label = "query, key and value themselves"
    panel.plot(lengths, input_bytes, color="grey", linestyle="--", label=label)
    label = "the memory of an 80 GiB GPU"
    panel.axhline(LARGE_GPU_BYTES, color="grey", linestyle=":", label=label)


def label_axes(panel, title: str, field: str) -> None:
    """Make both axes logarithmic, and label them."""
    _, units, base = AXES[field]
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2 if base == 1024 else 10)
    panel.xaxis.set_major_formatter(lambda length, _: tokens(int(length)))
    if field != "seconds":
        panel.yaxis.set_major_formatter(lambda value, _: human(value, units, base))
    panel.set(title=title, xlabel="tokens")
    panel.grid(alpha=0.3)
    panel.legend()


def chart(rows: Sequence[Row]) -> str:
    """Return bars of temporary memory against length as text: a # for each doubling from 1 MiB on.

    They show the last call of the table. Unlike a picture, text shows wherever a README is shown.
    """
    call = call_title(rows[-1])
    lines = [f"temporary memory, {call}; each # doubles it, from 1 MiB on", ""]
    for row in rows:
        if call_title(row) != call or not row["temp_bytes"]:
            continue
        mebibytes = row["temp_bytes"] / 2**20
        doublings = round(math.log2(mebibytes))
        bar = "#" * max(1, doublings + 1)
        length = tokens(row["length"])
        lines.append(f"{length:>4} {row['implementation']:<8}{bar} {temp_memory(row)}")
    return "\n".join(lines)
