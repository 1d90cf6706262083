"""`python -m memeff.bench losses`: measure the loss of a large vocabulary beside other packages.

Two calls are measured: the mean of the losses of all tokens, and that mean with its gradient with
respect to the hidden states and the kernel. Times are medians of samples taken in turns. Temporary
bytes are those that XLA reports. A call that does not fit into the device's memory has a note.

  memeff             the losses of tokens, averaged: the least memory
  memeff:chunked     the same without kernels
  memeff:mean        reduction="mean": the gradient is made together with the loss
  optax, optax:16    softmax_cross_entropy_with_integer_labels, of float32 or 16-bit logits
  tokamax            linear_softmax_cross_entropy_loss
  jla, jla:xla       linear_cross_entropy of jax-linear-attention, with kernels and without
  jla:objective      linear_cross_entropy_objective of jax-linear-attention
"""

import argparse
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import memeff
from memeff.bench.cases import Row
from memeff.bench.device import device_bytes
from memeff.bench.options import add_dtype, add_measuring_options, add_size, new_parser
from memeff.bench.programs import (
    check_known,
    compile_all,
    measuring_command,
    record_table,
    timed_rows,
)
from memeff.bench.tables import TIMED_MODES

SECONDS_PER_SAMPLE = 0.05
STANDARD = ("memeff", "memeff:mean", "optax", "optax:16", "tokamax", "jla", "jla:objective")


class LossCase(NamedTuple):
    """The sizes of a call."""

    tokens: int
    words: int
    features: int
    dtype: str

    def shapes(self, name: str) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes of hidden states, kernel and labels in implementation `name`."""
        kernel = (self.features, self.words)
        if name.startswith("jla"):
            kernel = kernel[::-1]
        return [
            jax.ShapeDtypeStruct((self.tokens, self.features), self.dtype),
            jax.ShapeDtypeStruct(kernel, self.dtype),
            jax.ShapeDtypeStruct((self.tokens,), jnp.int32),
        ]


def memeff_mean(x, kernel, labels, chunk_size=None):
    """Return the mean of memeff's losses of tokens."""
    return memeff.linear_cross_entropy(x, kernel, labels, chunk_size=chunk_size).mean()


def optax_mean(x, kernel, labels, dtype=None):
    """Return the mean of optax's losses of logits in `dtype`; None: in that of x."""
    optax = importlib.import_module("optax")
    logits = jnp.dot(x, kernel, preferred_element_type=dtype)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def tokamax_mean(x, kernel, labels):
    """Return tokamax's mean loss."""
    tokamax = importlib.import_module("tokamax")
    return tokamax.linear_softmax_cross_entropy_loss(x, labels, kernel, reduction="mean")


def jla_mean(x, kernel, labels, impl="auto"):
    """Return jax-linear-attention's mean loss."""
    losses = importlib.import_module("jla.ops.cross_entropy")
    return losses.linear_cross_entropy(x, kernel, labels, impl=impl).loss_sum / len(labels)


def jla_objective(x, kernel, labels):
    """Return the mean of jax-linear-attention's objective."""
    losses = importlib.import_module("jla.ops.cross_entropy")
    return losses.linear_cross_entropy_objective(x, kernel, labels).objective_sum / len(labels)


# From hidden states, kernel and labels to the mean loss.
MEANS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "memeff": memeff_mean,
    "memeff:chunked": partial(memeff_mean, chunk_size=(8192, 8192)),  # the default's on a GPU
    "memeff:mean": partial(memeff.linear_cross_entropy, reduction="mean"),
    "optax": partial(optax_mean, dtype=jnp.float32),
    "optax:16": optax_mean,
    "tokamax": tokamax_mean,
    "jla": jla_mean,
    "jla:xla": partial(jla_mean, impl="xla"),
    "jla:objective": jla_objective,
}


def compiled(name: str, case: LossCase, mode: str) -> jax.stages.Compiled:
    """Compile a call from its shapes."""
    check_known(name, MEANS)
    call = MEANS[name]
    if mode != "forward":
        call = jax.value_and_grad(call, (0, 1))
    return jax.jit(call).lower(*case.shapes(name)).compile()


def arrays_of(case: LossCase) -> list[Array]:
    """Return normal hidden states, a kernel that gives logits of size 2, and labels."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel, labels = case.shapes("memeff")

    @jax.jit
    def draw():
        return (
            jax.random.normal(keys[0], x.shape, x.dtype),
            2 * case.features**-0.5 * jax.random.normal(keys[1], kernel.shape, kernel.dtype),
            jax.random.randint(keys[2], labels.shape, 0, case.words, jnp.int32),
        )

    return list(draw())


def modes_of(name: str) -> tuple[str, ...]:
    """Return the modes that differ from those of another implementation in the table."""
    only_gradient = name in ("memeff:mean", "jla:objective")
    return TIMED_MODES[1:] if only_gradient else TIMED_MODES


def plain_bytes(name: str, case: LossCase) -> int:
    """Return the bytes of logits and their gradient, which packages without tiles keep."""
    itemsize = {"optax": 4, "optax:16": 2, "tokamax": 2}.get(name, 0)
    return 2 * itemsize * case.tokens * case.words


def loss_rows(
    cases: Sequence[LossCase], names: Sequence[str], rounds: int, jobs: int
) -> Iterator[Row]:
    """Yield a row for each case and implementation; `jobs` programs are compiled at a time."""
    calls = [(name, *call) for name in names for call in itertools.product(cases, modes_of(name))]
    limit = device_bytes()

    def compile_if_it_fits(name, case, mode):
        if plain_bytes(name, case) > limit:
            return "out of memory"
        return compiled(name, case, mode)

    def loss_of(name, mode, result):
        loss = result if mode == TIMED_MODES[0] else result[0]
        return {f"{mode}: loss": float(loss)}

    programs = compile_all(compile_if_it_fits, calls, jobs)
    for case in cases:
        x, kernel, labels = arrays_of(case)
        arrays = {False: (x, kernel, labels), True: (x, kernel.T, labels)}

        def inputs(name, arrays=arrays):
            return arrays[name.startswith("jla")]

        rows, _ = timed_rows(
            case, programs, inputs, loss_of, rounds=rounds, at_least=SECONDS_PER_SAMPLE
        )
        yield from rows.values()


def main(arguments: Sequence[str]) -> None:
    """Run the command line."""
    options = parse(arguments)
    command = measuring_command(["losses", *arguments])
    cases = []
    for features in options.features:
        for length in options.tokens:
            cases.append(LossCase(length, options.words, features, options.dtype))
    rows = loss_rows(cases, options.implementation, options.rounds, options.jobs)
    record_table(rows, command, options.save, "losses")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser("losses", __doc__)
    add_size(parser, "--tokens", "T", "tokens", [8192])
    add_size(parser, "--features", "H", "size of a hidden state", [1024])
    add_size(parser, "--words", "V", "size of the vocabulary", 131_072)
    add_dtype(parser, "bfloat16")
    add_measuring_options(parser, STANDARD, rounds=3)
    return parser.parse_args(arguments)
