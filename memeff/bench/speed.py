"""Speed: the time of a call, measured in turns with the other implementations."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import jax

from memeff.bench import caches
from memeff.bench.calls import Run, attempt, prepare
from memeff.bench.cases import Case, Row, case_row
from memeff.bench.formatting import progress
from memeff.bench.implementations import STANDARD, is_torch, why_not
from memeff.bench.memory import run_and_watch, temp_bytes
from memeff.bench.truth import error_of

SECONDS_PER_SAMPLE = 0.25
CALLS_PER_SAMPLE = 1000  # at most


def speed_table(
    cases: Sequence[Case], names: Sequence[str] | None = None, *, rounds: int = 7
) -> Iterator[Row]:
    """Measure time, bytes and error of every implementation, one case after the other.

    Yields:
      One row each: the fields of `Case`, `implementation`, `seconds` (median), `seconds_min`,
      `flops_per_second`, `bytes_per_second` (keys and values in the case's dtype, read once),
      `speed_against_jax_nn`,
      `error` (see `error_of`), `temp_bytes`, `peak_bytes` (see `run_and_watch`), and `note` (the
      reason where it could not run). What was not found is None.
    """
    if not names:
        decodes = all(case.query_length and case.mode == "forward" for case in cases)
        standard = (*STANDARD, *caches.STANDARD) if decodes else STANDARD
        names = [name for name in standard if why_not(name, cases[0].dtype) is None]
    for case in progress(cases, "timing"):
        yield from speed_rows(case, names, rounds)


def speed_rows(case: Case, names: Sequence[str], rounds: int) -> list[Row]:
    """Return the rows of `speed_table` for one case. Its arrays are freed before the next case."""
    runs = {}
    first_figures = {}
    notes = {}
    for name in names:
        first, notes[name] = attempt(first_call, name, case)
        if first is not None:
            runs[name], first_figures[name] = first
    samples = measure(runs, rounds)
    unknown = {"error": None, "temp_bytes": None, "peak_bytes": None}
    rows = []
    for name in names:
        times = time_figures(case, samples.get(name, []), samples.get("jax.nn", []))
        figures = first_figures.get(name, unknown)
        rows.append(case_row(name, case) | times | figures | {"note": notes[name]})
    return rows


def first_call(name: str, case: Case) -> tuple[Run, Row]:
    """Call once; return the run that can now be timed, with the error and the bytes found."""
    run = prepare(name, case)
    result, peak = run_and_watch(name, case, run)
    figures = {
        "error": error_of(result, case),
        "temp_bytes": None if is_torch(name) else temp_bytes(name, case),
        "peak_bytes": peak,
    }
    return run, figures


def time_figures(case: Case, samples: Sequence[float], jax_nn_samples: Sequence[float]) -> Row:
    """Return the figures of one implementation's samples, in seconds a call.

    The ratio to jax.nn is the median of the ratios within a turn, because a slow moment of the
    machine then slows both.
    """
    figures: Row = {
        "seconds": None,
        "seconds_min": None,
        "flops_per_second": None,
        "bytes_per_second": None,
        "speed_against_jax_nn": None,
    }
    if not samples:
        return figures
    seconds = statistics.median(samples)
    figures["seconds"] = seconds
    figures["seconds_min"] = min(samples)
    if case.flops:
        figures["flops_per_second"] = case.flops / seconds
    figures["bytes_per_second"] = case.key_value_bytes / seconds
    if jax_nn_samples:
        turns = zip(jax_nn_samples, samples, strict=True)
        figures["speed_against_jax_nn"] = statistics.median(plain / ours for plain, ours in turns)
    return figures


def measure(
    runs: Mapping[str, Run], rounds: int, at_least: float = SECONDS_PER_SAMPLE
) -> dict[str, list[float]]:
    """Return `rounds` samples of each run, in seconds a call, taken in turns.

    A sample is as many calls as fill `at_least` seconds.
    """
    calls = {}
    for name, run in runs.items():
        calls[name] = min(CALLS_PER_SAMPLE, 1 + int(at_least / seconds_per_call(run, 1)))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name].append(settled_seconds(run, calls[name]))
    return samples


def settled_seconds(run: Run, calls: int) -> float:
    """Time `calls` calls after as many that do not count.

    The run before may have left cold caches, and pages that are yet to be mapped.
    """
    seconds_per_call(run, calls)
    return seconds_per_call(run, calls)


def seconds_per_call(run: Run, calls: int) -> float:
    """Time `calls` calls, and return the seconds of one.

    On a GPU the calls queue up, which hides their launches. A CPU would run them side by side.
    """
    wait_for_each = jax.default_backend() == "cpu"
    result = ()
    start = time.perf_counter()
    for _ in range(calls):
        result = run.call()
        if wait_for_each:
            run.wait(result)
    run.wait(result)
    return (time.perf_counter() - start) / calls
