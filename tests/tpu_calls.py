"""Run calls in the TPU kernels, in Pallas' interpreter.

results = run_kernels({"causal": CASES["causal"].inputs()})     # compiled as one program
with kernels(side=128): ...                                     # small tiles
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from cases import CASES
from conftest import Result, run_calls

from memeff.device import pretend_device
from memeff.pallas.tpu import splash, tables


@contextlib.contextmanager
def kernels(side: int | None = None) -> Iterator[None]:
    """Let calls run as on a TPU, in tiles of `side` tokens if it is given."""
    with pytest.MonkeyPatch.context() as patch, pretend_device("tpu"), splash.interpreted():
        if side is not None:
            patch.setattr(tables, "SIDES", (side,))
        yield


def run_kernels(calls: dict[str, tuple], dtype="float32", side=None) -> dict[str, Result]:
    """Run `calls` {name: (args, kwargs)} in the kernels, and return their results by name."""
    calls = {name: (args, without_chunks(kwargs)) for name, (args, kwargs) in calls.items()}
    with kernels(side):
        return run_calls(calls, dtype, implementation="pallas")


def without_chunks(kwargs: dict) -> dict:
    """Return the arguments without `chunk_size`, because the kernels choose their own tiles."""
    return {name: x for name, x in kwargs.items() if name != "chunk_size"}


def inputs(name: str, dtype: Any = "float32") -> tuple:
    """Return the arguments of a named case."""
    args, kwargs = CASES[name].inputs(dtype)
    return args, without_chunks(kwargs)
