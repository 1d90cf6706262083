"""`python -m memeff.bench arguments`: time calls with a bias, a dense mask, dropout and others.

The table has milliseconds of the forward / forward + gradient, and the temporary bytes of the
latter, as XLA reports them. The gradient includes that of the bias, if there is one. Times are
medians of samples taken in turns.

  memeff         dot_product_attention; dropout with dropout_bits="mix32"
  memeff:xla     the same with implementation="xla", the chunked path
  memeff:ampere  the same with the kernels for GPUs since Ampere, which a Hopper GPU runs as well
  jax.nn         jax.nn.dot_product_attention from XLA
  jax.nn:cudnn   the same with implementation="cudnn"

jax.nn has no dropout.
"""

import argparse
import contextlib
import functools
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import memeff
from memeff.bench.calls import Run, program_run
from memeff.bench.cases import Row
from memeff.bench.options import add_measuring_options, new_parser
from memeff.bench.programs import compile_all, measuring_command
from memeff.bench.results import description_to_keep, measurement, save_results
from memeff.bench.speed import measure
from memeff.pallas.ampere import capability

SECONDS_PER_SAMPLE = 0.02
STANDARD = ("memeff", "memeff:xla", "jax.nn", "jax.nn:cudnn")
EXTRAS = ("plain", "bias", "mask", "dropout", "threefry", "scale", "soft cap")


class ArgumentCase(NamedTuple):
    """The sizes of a call, bfloat16 throughout, and the argument that it has."""

    B: int
    T: int
    N: int
    H: int
    extra: str


# Triangle attention and pair bias of structure models, and two sizes of language models.
BIASES = [
    ArgumentCase(64, 512, 4, 32, "bias"),
    ArgumentCase(1, 2048, 4, 32, "bias"),
    ArgumentCase(2, 4096, 16, 64, "bias"),
    ArgumentCase(1, 8192, 8, 128, "bias"),
]
OTHERS = [ArgumentCase(2, 4096, 16, 64, extra) for extra in EXTRAS if extra != "bias"]
OTHERS += [ArgumentCase(1, 8192, 8, 128, extra) for extra in ("plain", "dropout")]
CASES = {" ".join(map(str, case)): case for case in (*BIASES, *OTHERS)}


def arrays_of(case: ArgumentCase) -> dict[str, Array]:
    """Return query, key, value, dout and the case's own array, from normal and uniform numbers."""
    keys = jax.random.split(jax.random.key(0), 5)
    shape = case.B, case.T, case.N, case.H
    arrays = {
        name: jax.random.normal(key, shape, jnp.bfloat16)
        for name, key in zip(("query", "key", "value", "dout"), keys, strict=False)
    }
    if case.extra == "bias":
        bias_shape = 1, case.N, case.T, case.T
        arrays["bias"] = jax.random.normal(keys[4], bias_shape, jnp.bfloat16)
    if case.extra == "scale":
        arrays["scale"] = jnp.float32(case.H**-0.5)
    if case.extra == "soft cap":
        arrays["logits_soft_cap"] = jnp.float32(20)
    if case.extra == "mask":
        arrays["mask"] = jax.random.uniform(keys[4], (1, 1, case.T, case.T)) < 0.9
    return arrays


def constants_of(case: ArgumentCase, name: str) -> dict[str, Any] | None:
    """Return the keywords that a program is compiled with; None if `name` lacks one of them."""
    library, _, variant = name.partition(":")
    implementation = "pallas" if variant == "ampere" else variant or None
    keywords: dict[str, Any] = {"implementation": implementation}
    if library == "jax.nn":
        keywords["implementation"] = variant or "xla"
    if library == "jax.nn" and case.extra not in ("plain", "bias", "mask"):
        return None
    if case.extra in ("dropout", "threefry"):
        bits = "mix32" if case.extra == "dropout" else "threefry"
        drops = dict(dropout_rng=jax.random.key(2), dropout_rate=0.1, dropout_bits=bits)
        keywords |= drops | dict(broadcast_dropout=False)
    return keywords


def family(name: str) -> contextlib.AbstractContextManager:
    """Return the context in which implementation `name` takes its kernels."""
    return capability.chosen() if name == "memeff:ampere" else contextlib.nullcontext()


def compiled_calls(case: ArgumentCase, name: str) -> list[Any]:
    """Return the compiled forward, and forward with gradient; none if `name` lacks the argument."""
    library = jax.nn if name.startswith("jax.nn") else memeff
    keywords = constants_of(case, name)
    if keywords is None:
        return []
    attend = functools.partial(library.dot_product_attention, **keywords)

    def forward(constants, arrays):
        return attend(**constants, **arrays)

    def with_gradient(constants, dout, arrays):
        out, pull = jax.vjp(functools.partial(forward, constants), arrays)
        return out, pull(dout)

    inputs = inputs_of(jax.eval_shape(functools.partial(arrays_of, case)))
    with family(name):
        return [
            jax.jit(function).lower(*x).compile()
            for function, x in zip((forward, with_gradient), inputs, strict=True)
        ]


def inputs_of(arrays: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the inputs of the forward, and of forward with gradient."""
    moved = dict(arrays)
    dout = moved.pop("dout")
    constants = {"mask": moved.pop("mask")} if "mask" in moved else {}
    return (constants, moved), (constants, dout, moved)


def argument_rows(
    cases: Sequence[ArgumentCase], names: Sequence[str], rounds: int, jobs: int
) -> Iterator[list[Row]]:
    """Yield the rows of each case; `jobs` programs are compiled at a time."""
    calls = list(itertools.product(cases, names))

    def compile_one(case, name):
        print("compiling", name, *case, file=sys.stderr, flush=True)
        return compiled_calls(case, name)

    programs = compile_all(compile_one, calls, jobs)
    for case in cases:
        yield _rows_of_case(case, {name: programs[case, name] for name in names}, rounds)


def _rows_of_case(
    case: ArgumentCase, programs: dict[str, list[Any] | str], rounds: int
) -> list[Row]:
    """Return a row for each implementation that has the argument of the case."""
    inputs = inputs_of(arrays_of(case))
    rows = {}
    runs: list[dict[str, Run]] = [{}, {}]
    for name, pair in programs.items():
        row: Row = {"implementation": name, **case._asdict()}
        if isinstance(pair, str):
            rows[name] = row | {"note": pair}
            continue
        if not pair:
            continue
        for part, program, x in zip(runs, pair, inputs, strict=True):
            part[name] = program_run(program, x)
        memory: Any = pair[1].memory_analysis()
        rows[name] = row | {"temp_bytes": memory.temp_size_in_bytes}
    for mode, part in zip(("forward", "gradient"), runs, strict=True):
        for name, samples in measure(part, rounds, SECONDS_PER_SAMPLE).items():
            rows[name][f"{mode}: seconds"] = statistics.median(samples)
    return list(rows.values())


def cells(case: ArgumentCase, rows: Sequence[Row]) -> Row:
    """Return the line of the table: milliseconds of forward / forward + gradient."""

    def times(row: Row) -> str:
        if "note" in row:
            return "fails"
        return " / ".join(
            f"{1e3 * row[f'{mode}: seconds']:.3g}" for mode in ("forward", "gradient")
        )

    line = {"B, T, N, H": f"{case.B}, {case.T:,}, {case.N}, {case.H}", "with": case.extra}
    line |= {f"{row['implementation']}, ms": times(row) for row in rows}
    memory = [f"{row['temp_bytes'] / 1e6:.0f}" if "temp_bytes" in row else "-" for row in rows]
    return line | {"temporary MB": ", ".join(memory)}


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    options = parse(arguments)
    command = measuring_command(["arguments", *arguments])
    lines = []
    cases = [CASES[name] for name in options.case]
    results = argument_rows(cases, options.implementation, options.rounds, options.jobs)
    for case, rows in zip(cases, results, strict=True):
        for row in rows:
            print(json.dumps(row), flush=True)
        lines.append(cells(case, rows))
    if options.save:
        path = Path(options.save)
        description = description_to_keep(path, "cells") | measurement({}, command)
        save_results(path, description, lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser("arguments", __doc__)
    parser.add_argument(
        "--case",
        nargs="+",
        default=list(CASES),
        choices=list(CASES),
        metavar="CASE",
        help='"B T N H argument" (default: all): ' + ", ".join(f'"{name}"' for name in CASES),
    )
    add_measuring_options(parser, STANDARD, rounds=5)
    return parser.parse_args(arguments)
