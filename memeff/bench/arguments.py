"""`python -m memeff.bench arguments`: time calls with a bias, a dense mask, dropout and others.

The table has milliseconds of the forward / forward + gradient, and the temporary bytes of the
latter, as XLA reports them. The gradient includes that of the bias, if there is one. Times are
medians of samples taken in turns.

  memeff         dot_product_attention; dropout with dropout_bits="mix32"
  memeff:xla     the same with implementation="xla", the chunked path
  memeff:pallas  the same with implementation="pallas", the kernels for this GPU
  memeff:ampere  the same with the kernels for GPUs since Ampere, which a Hopper GPU runs as well
  jax.nn         jax.nn.dot_product_attention from XLA
  jax.nn:cudnn   the same with implementation="cudnn"

jax.nn has neither dropout nor arrays for a scale or a soft cap.
"""

import argparse
import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import memeff
from memeff.bench.cases import Row
from memeff.bench.options import add_measuring_options, new_parser
from memeff.bench.programs import (
    check_known,
    compile_all,
    measuring_command,
    record_table,
    timed_rows,
)
from memeff.bench.tables import TIMED_MODES
from memeff.pallas.ampere import capability

SECONDS_PER_SAMPLE = 0.02
STANDARD = ("memeff", "memeff:xla", "jax.nn", "jax.nn:cudnn")
NAMES = (*STANDARD, "memeff:pallas", "memeff:ampere")
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


def constants_of(name: str, case: ArgumentCase) -> dict[str, Any]:
    """Return the keywords that a program of implementation `name` is compiled with."""
    library, _, variant = name.partition(":")
    if library == "jax.nn":
        return {"implementation": variant or "xla"}
    keywords: dict[str, Any] = {
        "implementation": "pallas" if variant == "ampere" else variant or None
    }
    if case.extra in ("dropout", "threefry"):
        bits = "mix32" if case.extra == "dropout" else "threefry"
        drops = dict(dropout_rng=jax.random.key(2), dropout_rate=0.1, dropout_bits=bits)
        keywords |= drops | dict(broadcast_dropout=False)
    return keywords


def has_argument(name: str, case: ArgumentCase) -> bool:
    """Return whether implementation `name` has the argument of the case."""
    return not name.startswith("jax.nn") or case.extra in ("plain", "bias", "mask")


def family(name: str) -> contextlib.AbstractContextManager:
    """Return the context in which implementation `name` takes its kernels."""
    return capability.chosen() if name == "memeff:ampere" else contextlib.nullcontext()


def compiled(name: str, case: ArgumentCase, mode: str) -> jax.stages.Compiled:
    """Compile a call from its shapes."""
    check_known(name, NAMES)
    library = jax.nn if name.startswith("jax.nn") else memeff
    attend = functools.partial(library.dot_product_attention, **constants_of(name, case))

    def run(mask, dout, arrays):
        def forward(arrays):
            return attend(**mask, **arrays)

        if mode == TIMED_MODES[0]:
            return forward(arrays)
        out, pull = jax.vjp(forward, arrays)
        return out, pull(dout)

    inputs = inputs_of(jax.eval_shape(functools.partial(arrays_of, case)))
    with family(name):
        return jax.jit(run).lower(*inputs).compile()


def inputs_of(arrays: dict[str, Any]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return the inputs of a call: its mask as a keyword, if it has one, dout, and other arrays."""
    moved = dict(arrays)
    dout = moved.pop("dout")
    mask = {"mask": moved.pop("mask")} if "mask" in moved else {}
    return mask, dout, moved


def argument_rows(
    cases: Sequence[ArgumentCase], names: Sequence[str], rounds: int, jobs: int
) -> Iterator[Row]:
    """Yield a row for each case and implementation; `jobs` programs are compiled at a time."""
    calls = []
    for case in cases:
        names_of_case = [name for name in names if has_argument(name, case)]
        calls += itertools.product(names_of_case, [case], TIMED_MODES)
    programs = compile_all(compiled, calls, jobs)
    for case in cases:
        arrays = inputs_of(arrays_of(case))

        def inputs(name, arrays=arrays):
            return arrays

        rows, _ = timed_rows(case, programs, inputs, rounds=rounds, at_least=SECONDS_PER_SAMPLE)
        yield from rows.values()


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    options = parse(arguments)
    command = measuring_command(["arguments", *arguments])
    cases = [CASES[name] for name in options.case]
    rows = argument_rows(cases, options.implementation, options.rounds, options.jobs)
    record_table(rows, command, options.save, "arguments")


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
