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
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from memeff.bench.cases import Row
from memeff.bench.hard_inputs import CASES, HardCase, HardInputs
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
from memeff.bench.options import add_save, new_parser
from memeff.bench.programs import measuring_command, record_table


def main(arguments: Sequence[str]) -> None:
    """Run the command line: measure, and print the table."""
    options = parse(arguments)
    command = measuring_command(["hard", *arguments])
    rows = hard_table(options.only or list(CASES), memeff_paths())
    record_table(rows, command, options.save, "hard")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser("hard", __doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=CASES,
        metavar="CASE",
        help="measure only these cases (default: all): " + "; ".join(CASES),
    )
    add_save(parser)
    return parser.parse_args(arguments)


def hard_table(names: Sequence[str], paths: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each case, dtype and path as soon as it is measured."""
    for name in names:
        case = CASES[name]
        for dtype in case.dtypes:
            for path, errors in case_errors(case, dtype, paths):
                yield {"case": name, "dtype": dtype, "path": path} | errors


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
        for index, array in enumerate(HardResults._fields):
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
    result: np.ndarray, plain: np.ndarray, saved: np.ndarray, truth: np.ndarray, dtype: str
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
