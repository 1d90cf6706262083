"""Measure models of others as they are and with `memeff.replace_attention`; write the results.

    python tests/replaced_results.py --save docs/benchmarks/models-of-others.jsonl
    python -m memeff.bench report

The first line needs the packages of `make clients`. Memory is what XLA allocates beside the
arguments and results of a compiled gradient at 4,096 tokens. Speed is that of a compiled forward
pass at 2,048 tokens: the best of several runs, in turns with the model as it is.
"""

import argparse
import datetime
import importlib.metadata
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replaced_models import MODELS
from small_calls import temp_bytes

import memeff
from memeff.bench.device import machine
from memeff.bench.results import read_lines, save_results

MEMORY_TOKENS = 4096
SPEED_TOKENS = 2048
MIB = 2**20
PACKAGES = """flax equinox dm-haiku keras keras-hub levanter haliax transformers gemma google-tunix
    penzai equimo ablanx attnax""".split()


def with_gradients(function):
    """Return a function that returns the results of `function` and the gradients of its arguments.

    Results are weighted unevenly. Integers among the arguments have no gradient.
    """

    def weighted(*args):
        results = function(*args)
        total = 0.0
        for result in jax.tree.leaves(results):
            cotangent = jnp.cos(1.7 * (jnp.arange(result.size) % 97).astype(result.dtype))
            total = total + (result * cotangent.reshape(result.shape)).sum()
        return total, results

    def run(*args):
        every = tuple(range(len(args)))
        gradient = jax.grad(weighted, every, has_aux=True, allow_int=True)
        gradients, results = gradient(*args)
        moving = [x for x in jax.tree.leaves(gradients) if x.dtype != jax.dtypes.float0]
        return results, moving

    return run


def gradient_bytes(function, args) -> int:
    """Return the bytes that XLA allocates for the gradient, beside its arguments and results."""
    return temp_bytes(with_gradients(function), args)


def largest_error(actual, expected) -> float:
    """Return the largest error of any array over the largest number of that array.

    The gradient of a bias of all keys is 0 up to rounding. Such an array is not divided by its own
    rounding errors but by the typical size of the arrays, here their median.
    """
    expected = [np.asarray(x) for x in jax.tree.leaves(expected)]
    actual = [np.asarray(x) for x in jax.tree.leaves(actual)]
    sizes = [np.abs(x).max() for x in expected]
    typical = np.median(sizes)
    errors = []
    for x, y, size in zip(actual, expected, sizes, strict=True):
        assert x.shape == y.shape
        assert x.dtype == y.dtype
        is_rounding = size < 1e-5 * typical
        errors.append(np.abs(x - y).max() / (typical if is_rounding else size))
    return float(np.max(errors))  # NaN if one is NaN


def best_seconds(functions, args) -> list[float]:
    """Return the shortest time of each compiled function, in six turns."""
    compiled = [jax.jit(function).lower(*args).compile() for function in functions]
    best = [float("inf")] * len(compiled)
    for _ in range(6):
        for n, run in enumerate(compiled):
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            best[n] = min(best[n], time.perf_counter() - start)
    return best


def row_of(name: str) -> dict[str, str]:
    """Return the table's row of a model."""
    model = MODELS[name]
    function, args = model.make(MEMORY_TOKENS)
    report = memeff.find_attention(function, *args)
    before = gradient_bytes(function, args) / MIB
    after = gradient_bytes(memeff.replace_attention(function), args) / MIB
    function, args = model.make(SPEED_TOKENS)
    plain, ours = best_seconds([function, memeff.replace_attention(function)], args)
    stays = [model.left, model.quadratic and f"T x S: {model.quadratic}"]
    return {
        "model": name,
        "the line": f"`{model.line}`",
        "places": str(len(report.replaced)),
        "MiB before": f"{before:,.0f}",
        "MiB after": f"{after:,.0f}",
        "times as fast": f"{plain / ours:.1f}",
        "what stays": "; ".join(filter(None, stays)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="replace the rows of these models"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = {}
    if options.save and options.save.exists():
        rows = {row["model"]: row for row in read_lines(options.save)[1:]}
    for name in options.only:
        try:
            rows[name] = row_of(name)
        except pytest.skip.Exception as reason:
            sys.exit(f"{name}: {reason}")
        print(json.dumps(rows[name]), flush=True)
        if options.save:
            ordered = [rows[name] for name in MODELS if name in rows]
            save_results(options.save, description(), ordered)


def description() -> dict[str, Any]:
    """Return the first line of the results: what they belong to."""
    return {
        "table": "cells",
        "date": datetime.date.today().isoformat(),
        **machine(),
        "command": "python tests/replaced_results.py",
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


if __name__ == "__main__":
    main()
