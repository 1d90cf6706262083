"""`python -m memeff.bench hard`: memeff's errors on hard inputs, over those of plain attention.

A cell is the largest error of memeff in an array, divided by the largest error of plain attention
in that array. Nothing is added to either. Where plain attention errs nowhere, a cell is memeff's
error in roundings of the largest entry ("0.5 ulp"). Errors are those against float64. Plain
attention is the quadratic computation in the call's own dtype on the same device, step for step as
`jax.nn` has it: logits and softmax in float32, probabilities rounded for their product, gradients
by JAX.

Where a cell is more than is allowed, a second ratio follows in brackets. It compares memeff with
plain attention whose gradient starts from out and lse as stored, because every gradient in linear
memory starts from them. Where terms of p (dp - rowsum(dout out)) cancel, the rounding of out shows.
"""

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from memeff.bench.cases import Row
from memeff.bench.device import machine
from memeff.bench.hard_inputs import CASES, H, HardCase, HardInputs, S, T
from memeff.bench.hard_paths import (
    FUSED,
    KERNELS,
    PLAIN,
    SAVED,
    HardResults,
    exact,
    memeff_paths,
    run_path,
)
from memeff.bench.options import new_parser, output_file

ARRAYS = HardResults._fields
ALLOWED = 1.5  # times plain attention's error; a larger ratio is bold

PAGE_HEADER = f"""\
<!-- Written by `python -m memeff.bench hard --report docs/hard_cases.jsonl docs/hard_cases.md`. -->
# Hard cases

Each number is the largest error of memeff divided by that of plain attention in the same dtype, \
both against float64. Calls
have T = {T} queries and S = {S:,} keys of one head of {H}, unless the case names other sizes.

- Bold: more than {ALLOWED}, or not finite.
- In brackets: divided by the error of plain attention whose gradient starts from the stored out \
and lse, as every gradient
  in linear memory does.
- "ulp": plain attention has no error, and memeff errs by so many roundings of the largest entry.
- "-": the dtype cannot hold the true number."""


def main(arguments: Sequence[str]) -> None:
    """Run the command line: measure and print the table, or write a page from earlier results."""
    options = parse(arguments)
    if options.report:
        source, target = map(Path, options.report)
        write_page(source, target)
        return
    about = machine()
    rows = []
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(options.json, "a")) if options.json else None
        for row in hard_table(options.only or list(CASES), memeff_paths()):
            rows.append(about | row)
            if file is not None:
                print(json.dumps(rows[-1]), file=file, flush=True)
    print(hard_markdown(rows))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser("hard", __doc__)
    add = parser.add_argument
    add(
        "--only",
        nargs="+",
        choices=CASES,
        metavar="CASE",
        help="measure only these cases (default: all): " + "; ".join(CASES),
    )
    add("--json", type=output_file, metavar="FILE", help="append a JSON line for each row")
    add(
        "--report",
        nargs=2,
        metavar=("JSON", "MARKDOWN"),
        help="run nothing: write a table from JSON lines",
    )
    return parser.parse_args(arguments)


# Measuring


def hard_table(names: Sequence[str], paths: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each case, dtype and path as soon as it is measured."""
    for name in names:
        case = CASES[name]
        for dtype in case.dtypes:
            for path, errors in case_errors(case, dtype, paths):
                row = {"table": "hard", "case": name, "dtype": dtype, "path": path}
                yield row | errors


def case_errors(
    case: HardCase, dtype: str, paths: Sequence[str]
) -> Iterator[tuple[str, dict[str, Row]]]:
    """Yield each path with the errors of its arrays, for one case in one dtype."""
    inputs = rounded_inputs(case.make(np.random.default_rng(0)), dtype)
    truth = exact(inputs)
    plain = run_path(PLAIN, inputs)
    saved = run_path(SAVED, inputs)
    for path in paths:
        if dtype == "float32" and path in (KERNELS, FUSED):
            continue  # they take 16-bit arrays
        results = run_path(path, inputs)
        errors = {}
        for index, array in enumerate(ARRAYS):
            errors[array] = array_errors(
                results[index], plain[index], saved[index], truth[index], dtype
            )
        yield path, errors


def rounded_inputs(inputs: HardInputs, dtype: str) -> HardInputs:
    """Round all arrays to `dtype`, and dlse to float32, which lse has."""
    rounded = {name: array.astype(jnp.dtype(dtype)) for name, array in inputs._asdict().items()}
    rounded["dlse"] = inputs.dlse.astype(np.float32)
    return HardInputs(**rounded)


def array_errors(
    result: np.ndarray,
    plain: np.ndarray,
    saved: np.ndarray,
    truth: np.ndarray,
    dtype: str,
) -> dict[str, float | None]:
    """Return the largest errors of memeff, of plain attention, and of that from saved results.

    "rounding" is one rounding of the largest exact entry, and "largest" is that entry. An error of
    a result that is not finite is None. So is an entry that the dtype cannot hold.
    """
    is_lse = truth.ndim == 1
    limits = jnp.finfo(jnp.float32 if is_lse else dtype)
    largest = float(np.abs(truth).max())
    can_be_held = largest == 0 or float(limits.tiny) <= largest <= float(limits.max)
    return {
        "error": largest_error(result, truth),
        "plain": largest_error(plain, truth),
        "saved": largest_error(saved, truth),
        "rounding": max(float(limits.eps) * largest, float(limits.smallest_subnormal)),
        "largest": largest if can_be_held else None,
    }


def largest_error(result: np.ndarray, truth: np.ndarray) -> float | None:
    """Return the largest absolute error; None where the result is not finite."""
    wide = np.asarray(result, np.float64)
    if not np.isfinite(wide).all():
        return None
    return float(np.abs(wide - truth).max())


# The table and the page


def hard_markdown(rows: Sequence[Row]) -> str:
    """Return a table for each machine; of repeated calls the latest counts."""
    parts = []
    for device, jax_version in dict.fromkeys((row["device"], row["jax"]) for row in rows):
        latest = {}
        for row in rows:
            if (row["device"], row["jax"]) == (device, jax_version):
                latest[row["case"], row["dtype"], row["path"]] = row
        lines = [["case", "dtype", "path", *ARRAYS], ["---"] * 3 + ["---:"] * len(ARRAYS)]
        for call, row in latest.items():
            lines.append([*call, *(cell(row[array]) for array in ARRAYS)])
        parts.append(f"{device}, jax {jax_version}:")
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(parts)


def cell(errors: dict[str, float | None]) -> str:
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
        return cell_in_roundings(error, errors["rounding"])
    ratio = error / plain
    if ratio <= ALLOWED:
        return f"{ratio:.2f}"
    saved = errors["saved"]
    ratio_to_saved = f" ({error / saved:.2g})" if saved else ""
    return f"**{ratio:.3g}**{ratio_to_saved}"


def cell_in_roundings(error: float, rounding: float | None) -> str:
    """Return the error in roundings of the largest entry; bold where it is more than one."""
    assert rounding is not None
    if error == 0:
        return "0"
    roundings = f"{error / rounding:.2g} ulp"
    return roundings if error <= rounding else f"**{roundings}**"


def write_page(source: Path, target: Path) -> None:
    """Write the Markdown page `target` from the JSON lines of `source`."""
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    target.write_text(f"{PAGE_HEADER}\n\n{hard_markdown(rows)}\n")
