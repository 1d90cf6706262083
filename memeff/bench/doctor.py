"""Check every implementation against float64 on the machine at hand (`--doctor`)."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from memeff.bench.calls import attempt, prepare
from memeff.bench.cases import MASKS, Case, Row, case_row, input_arrays
from memeff.bench.formatting import markdown, progress
from memeff.bench.tables import unique
from memeff.bench.truth import exact_attention, largest_relative_error

NAMES = ("memeff", "memeff:128", "reference", "jax.nn", "jax.nn:cudnn", "tokamax", "torch")
ALLOWED_ERROR = {"float32": 1e-5, "bfloat16": 3e-2}
VERDICTS = ("pass", "cannot run", "fail")  # from good to bad
SMALL = Case(0, batch=2, heads=4, kv_heads=2, head_dim=32, mode="gradient")
CASES = [  # two dtypes, both masks, one query and 300
    dataclasses.replace(SMALL, length=length, dtype=dtype, mask=mask)
    for dtype, mask, length in itertools.product(ALLOWED_ERROR, MASKS, (1, 300))
]


def check_implementations(names: Sequence[str] = NAMES, cases: Sequence[Case] = CASES) -> list[Row]:
    """Compare out, dq, dk and dv of every implementation and case with float64.

    Returns:
      One row each: the fields of `Case`, `implementation`, `error` (the largest, relative to the
      largest exact entry or 1), `verdict` (one of VERDICTS) and `note`.
    """
    calls = [(name, case) for name in names for case in cases]
    rows = []
    with jax.default_matmul_precision("highest"):  # else a GPU's float32 products have 10 bits
        for name, case in progress(calls, "checking"):
            error, note = attempt(largest_error, name, case)
            figures = {"error": error, "verdict": verdict(error, case.dtype), "note": note}
            rows.append(case_row(name, case) | figures)
    return rows


def largest_error(name: str, case: Case) -> float:
    """Return the largest error of out, dq, dk and dv, relative to the largest entry or 1."""
    results = prepare(name, case).result()
    truth = exact_attention(input_arrays(case), case, np.arange(case.length))
    errors = []
    for result, expected in zip(results, truth[1:5], strict=True):
        errors.append(largest_relative_error(result, expected, least=1.0))
    return max(errors)


def verdict(error: float | None, dtype: str) -> str:
    """Return the verdict on an error; None means that the case could not run."""
    if error is None:
        return "cannot run"
    return "pass" if error <= ALLOWED_ERROR[dtype] else "fail"


def doctor_markdown(rows: Sequence[Row]) -> str:
    """Return a table with a line for each implementation: its worst case in each dtype."""
    dtypes = unique(row["dtype"] for row in rows)
    lines = []
    for name in unique(row["implementation"] for row in rows):
        name_rows = [row for row in rows if row["implementation"] == name]
        line = [name]
        for dtype in dtypes:
            line.append(summary([row for row in name_rows if row["dtype"] == dtype]))
        lines.append(line)
    return markdown(["implementation", *dtypes], lines)


def summary(rows: Sequence[Row]) -> str:
    """Return the worst verdict, with the largest error or the reason why there is none."""
    worst = max(rows, key=lambda row: VERDICTS.index(row["verdict"]))
    verdict = worst["verdict"]
    errors = [row["error"] for row in rows if row["error"] is not None]
    if not errors:
        return f"{verdict}: {worst['note']}"
    return f"{verdict} ({max(errors):.0e})"
