"""Who can run a call, and why not. Knows the implementations and the tile sizes that measurements chose."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from memeff import reference, xla
from memeff.problem import Operands, Problem
from memeff.sharding import may_be_sharded

IMPLEMENTATIONS = ("xla", "reference", "pallas")


def select_implementation(problem: Problem, operands: Operands, requested: str | None) -> ModuleType:
    """The module that runs this call; forward and backward together. Refuses a request that cannot be met."""
    name = requested or "xla"
    reason = why_not(name, problem, operands)
    if reason is not None:
        raise NotImplementedError(
            f'implementation="{name}" cannot run this call: {reason}. '
            'Use implementation=None to let memeff choose, or "xla", which always runs.'
        )
    return {"xla": xla, "reference": reference}[name]


def why_not(name: str, problem: Problem, operands: Operands) -> str | None:
    """None if the implementation `name` can run this call, else the reason."""
    match name:
        case "xla":
            return xla.why_not(problem, operands)
        case "reference":
            return reference.why_not(problem, operands)
        case "pallas":
            return "this version of memeff has no kernels yet"
        case "cudnn":
            return "memeff does not hand over to cuDNN (jax.nn.dot_product_attention does)"
    raise ValueError(f"implementation={name!r} is not known: use None or one of {', '.join(map(repr, IMPLEMENTATIONS))}.")


# Rows and columns of a tile, and of a forward tile with a fixed reference. On GPUs each step costs launches, so tiles are
# large: of those that stay below a fifteenth of plain attention's memory, these were fastest (H200, 2 x 8192 x 16 x 128,
# bfloat16, 512 to 4096 a side). On CPUs, 512 x 512 was fastest or within 9 % of it, causal and full, forward and gradient
# (two cores, float32, T = 2048 and 8192, 8 heads of 64, 256 to 1024 a side).
TILES = {"gpu": ((2048, 1024), (2048, 2048)), "cpu": ((512, 512), (512, 512))}


def tile_sizes(
    lengths: tuple[Any, Any], dtype: Any, requested: tuple[int | None, int | None]
) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """The general tile and that of the fixed reference, for (T, S): as requested or by default, at most the sequence.

    None for the fixed reference where it does not pay: on CPUs it takes a tenth off the time of a float32 call and nothing
    off another's, and that is not worth the word that devices would exchange for its check.
    """

    def fit(size: int, n: Any) -> int:  # a symbolic length (jax.export) may turn out shorter than the tile: xla.py pads it
        return max(1, min(size, n)) if isinstance(n, int) else size

    (t, c), (T, S) = requested, lengths
    on_gpu = jax.default_backend() == "gpu"
    general, fixed = ((fit(t or rows, T), fit(c or cols, S)) for rows, cols in TILES["gpu" if on_gpu else "cpu"])
    return general, fixed if on_gpu or (dtype == jnp.float32 and not may_be_sharded()) else None
