"""Memory: the temporary bytes of a compiled call, and the measured peak of a running one."""

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Sequence
from typing import Any

import jax

from memeff.bench.calls import Run, attempt, call_bytes, compiled, extra_array_bytes, ran_out
from memeff.bench.cases import Case, Row, case_row
from memeff.bench.formatting import progress
from memeff.bench.implementations import is_torch

MIB = 2**20


def memory_table(
    lengths: Sequence[int], cases: Sequence[Case], names: Sequence[str] = ("jax.nn", "memeff")
) -> list[Row]:
    """Find the temporary bytes for every length, case and implementation.

    It compiles, and allocates nothing. The cases' own lengths are ignored.

    Returns:
      One row each: the fields of `Case`, `implementation`, `input_bytes`, `temp_bytes`,
      `extrapolated` (see `too_large`) and `note` (the reason where there are no bytes).

    Example:
      >>> [row["temp_bytes"] for row in memory_table([1024, 2048], [Case(0)], ["jax.nn"])]
      [67108864, 268435456]
    """
    calls = []
    for length, case, name in itertools.product(lengths, cases, names):
        calls.append((name, dataclasses.replace(case, length=length)))
    return [memory_row(name, case) for name, case in progress(calls, "compiling")]


def memory_row(name: str, case: Case) -> Row:
    """Return the row of `memory_table` for one implementation and case."""
    temporary, note = attempt(temp_bytes, name, case)
    return case_row(name, case) | {
        "input_bytes": case.input_bytes,
        "temp_bytes": temporary,
        "extrapolated": too_large(name, case),
        "note": note,
    }


@functools.cache
def too_large(name: str, case: Case) -> bool:
    """Return True if the case is too large to compile.

    A GPU needs the memory even for that, because XLA tries kernels on arrays of the size.
    """
    _, note = attempt(compiled, name, case)
    return ran_out(note)


def temp_bytes(name: str, case: Case) -> int:
    """Return the temporary bytes of the compiled call, beyond inputs and outputs.

    The array that replaces a score or a mask is counted, because only this implementation needs
    it. Where the case is too large to compile, the growth of shorter ones is continued.
    """
    if too_large(name, case):
        half = temp_bytes(name, dataclasses.replace(case, length=case.length // 2))
        quarter = temp_bytes(name, dataclasses.replace(case, length=case.length // 4))
        return half * half // quarter
    memory: Any = compiled(name, case).memory_analysis()
    return memory.temp_size_in_bytes + extra_array_bytes(name, case)


def run_and_watch(name: str, case: Case, run: Run) -> tuple[tuple, int | None]:
    """Return a call's result, and its measured bytes beyond the inputs at their peak.

    The outputs count. None stands for the bytes where the device does not report them.

    A device reports one maximum since its start, which compiling may have raised, because XLA
    tries kernels on arrays. So memory is held until the call must raise that maximum.
    """
    if is_torch(name):
        return run_and_watch_torch(run)
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        return run.result(), None
    unused = stats["peak_bytes_in_use"] - stats["bytes_in_use"] - call_bytes(name, case)
    held_mib = max(0, unused) // MIB + 2  # at least 1 MiB more than is unused
    held = jax.numpy.zeros((held_mib, MIB), "uint8")
    held.block_until_ready()
    before = device.memory_stats()
    result = run.result()
    peak = device.memory_stats()["peak_bytes_in_use"]
    if peak <= before["peak_bytes_in_use"]:
        return result, None
    return result, peak - before["bytes_in_use"]


def run_and_watch_torch(run: Run) -> tuple[tuple, int | None]:
    """Return the result and the peak bytes that PyTorch reports; the inputs belong to JAX."""
    cuda = importlib.import_module("torch").cuda
    if not cuda.is_available():
        return run.result(), None
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    result = run.result()
    return result, cuda.max_memory_allocated() - before
