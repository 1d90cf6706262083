"""`python -m memeff.bench TABLE`: measure memeff beside other implementations of attention.

  speed      milliseconds, FLOP/s, temporary bytes and the error against float64; on GPUs also the
             measured peak of memory
  memory     temporary bytes of the compiled call. Nothing is allocated, so any length works
  --decode   speed of one query of each sequence against many keys: bytes of keys and values read
             in a second, and tokens of one layer in a second. --implementation then also takes
             caches of memeff: memeff:cache (lengths are arrays), memeff:pages64, memeff:int8 (its
             bytes are counted in --dtype)
  --doctor   check small cases of every implementation against float64, on this machine. The exit
             code is 1 if one fails

These tables have options of their own, which `python -m memeff.bench TABLE --help` lists:

  hard       errors on inputs for which exact results are hard, over those of plain attention
  losses     milliseconds and temporary bytes of the loss of a large vocabulary
  arguments  milliseconds of calls with a bias, a mask, dropout, a scale or a soft cap as arrays
  devices    milliseconds, share of one device's rate and temporary bytes of a causal call whose
             sequence is sharded over all devices
  report     write the tables of README.md and docs/*.md from docs/benchmarks/*.jsonl

The tables of memory and speed are Markdown, under a line that names device, versions and command.
Times are medians of samples. The implementations are measured in turns, so that a slow moment of
the machine slows all of them. Ratios are medians of the ratios within a turn. FLOPs are 4 B N T S H
for the forward, 3.5 times that for forward + gradient, 3 times for a jvp; half of these for causal
calls. With --json each line is written as soon as it is measured, so a crash loses no earlier line.
"""

import argparse
import itertools
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from memeff.bench import arguments as arguments_bench
from memeff.bench import devices, doctor, hard, losses, report
from memeff.bench.cases import Case, Row
from memeff.bench.device import machine
from memeff.bench.memory import memory_table
from memeff.bench.options import parse
from memeff.bench.plots import chart, figure, save_figure
from memeff.bench.programs import measuring_command, record_table
from memeff.bench.speed import speed_table

COMMANDS = {
    "hard": hard,
    "losses": losses,
    "arguments": arguments_bench,
    "devices": devices,
    "report": report,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = arguments[0] if arguments else None
    if command in COMMANDS:
        COMMANDS[command].main(arguments[1:])
        return
    options = parse(arguments, description=__doc__)
    if options.doctor:
        run_doctor(options.implementation or doctor.NAMES)
    else:
        run_table(options, arguments)


def run_doctor(names: Sequence[str]) -> None:
    """Print the doctor's table; exit with 1 if an implementation fails."""
    rows = doctor.check_implementations(names)
    print(machine_text(), "out, dq, dk, dv against float64 (largest error):\n")
    print(doctor.doctor_markdown(rows))
    sys.exit(any(row["verdict"] == "fail" for row in rows))


def run_table(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Measure, print and store the table of memory or of speed."""
    print(machine_text(), f"`python -m memeff.bench {shlex.join(arguments)}`:")
    print(sizes_text(options) + "\n")
    command = measuring_command(arguments)
    with open(options.json or os.devnull, "a") as file:
        rows = record_table(measured_rows(options), command, options.save, options.table, file)
    if options.plot:
        draw(rows, options)


def measured_rows(options: argparse.Namespace) -> Iterable[Row]:
    """Return the rows of the table that the options ask for; those of speed come one by one."""
    cases = asked_cases(options)
    if options.table == "speed":
        return speed_table(cases, options.implementation, rounds=options.rounds)
    calls = [case for case in cases if case.length == options.length[0]]
    return memory_table(options.length, calls, options.implementation or ("jax.nn", "memeff"))


def asked_cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases that the options ask for, in the order of the table."""
    names = ("batch", "heads", "kv_heads", "head_dim", "dtype", "query_length")
    shared = {name: getattr(options, name) for name in names}
    choices = itertools.product(options.length, options.mask, options.mode, options.extra)
    cases = []
    for length, mask, mode, extra in choices:
        cases.append(Case(length=length, mask=mask, mode=mode, extra=extra, **shared))
    return cases


def machine_text() -> str:
    """Return the machine as the first words of a table's heading."""
    return " ".join(f"{name} {value}," for name, value in machine().items())


def sizes_text(options: argparse.Namespace) -> str:
    """Return the sizes that all calls of the table share."""
    sizes = f"B={options.batch} N={options.heads} K={options.kv_heads} H={options.head_dim}"
    if options.query_length:
        sizes = f"T={options.query_length} {sizes}"
    return f"{sizes} {options.dtype}"


def draw(rows: Sequence[Row], options: argparse.Namespace) -> None:
    """Write the picture that `--plot` asks for; the same rows give the same file."""
    if options.plot.endswith(".txt"):
        Path(options.plot).write_text(chart(rows) + "\n")
        return
    field = "temp_bytes" if options.table == "memory" else "flops_per_second"
    save_figure(figure(rows, field), options.plot)


if __name__ == "__main__":
    main()
