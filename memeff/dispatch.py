"""Who can run a call, and why not, also in words. Knows the implementations and the tile sizes that measurements chose."""

import contextlib
import contextvars
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memeff import reference, xla
from memeff.arguments import Shape
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
    if (calls := _watching.get()) is not None:
        calls.append((problem, operands, name))
    return {"xla": xla, "reference": reference}[name]


_watching: contextvars.ContextVar[list | None] = contextvars.ContextVar("memeff_watching", default=None)


@contextlib.contextmanager
def watch() -> Iterator[list[tuple[Problem, Operands, str]]]:
    """The calls that are dispatched meanwhile in this thread: problem, operands (perhaps tracers), implementation."""
    token = _watching.set(calls := [])
    try:
        yield calls
    finally:
        _watching.reset(token)


def reasons(problem: Problem, operands: Operands, chosen: str) -> str:
    """What runs a call that left the choice to memeff, how, and why every other implementation does not."""
    (B, T, K, G, _), S = operands.query.shape, operands.key.shape[1]
    lines = [f'"{chosen}" runs this call on {jax.default_backend()}: {xla.how(problem, operands)}.']
    in_memory = f"could, if asked for by name, in quadratic memory ({B * K * G} x {T} x {S} logits)"
    others = (name for name in IMPLEMENTATIONS if name != chosen)
    lines += [f'"{name}": {why_not(name, problem, operands) or in_memory}.' for name in others]
    return "\n".join(lines)


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


class Tiles(NamedTuple):
    """What `Problem` says of the walk, under the same names."""

    chunk_size: tuple[int, int]
    fixed_chunk_size: tuple[int, int] | None
    block: tuple[int, int] | None


# On GPUs each step costs launches, so tiles are large: of those that stay below a fifteenth of plain attention's memory,
# these rows and columns were fastest (H200, 2 x 8192 x 16 x 128, bfloat16, 512 to 4096 a side), of a tile in general and of
# a forward tile with a fixed reference.
GPU_TILES = ((2048, 1024), (2048, 2048))
# On CPUs a tile should stay in the caches: 2^20 logits of as many heads as that allows. 512 a side where a window leaves a
# stair of tiles to mask, else 1024, were fastest or within 8 % of it (two cores, float32 and bfloat16, T = 1024 to 4096,
# 8 and 32 heads of 64 and 128, K = 1, 2, 8; forward and gradient; a side of 256 to 2048, 2^18 to 2^23 logits).
CPU_LOGITS = 2**20
CPU_SIDES = {"windowed": 512, "full": 1024}


def tile_sizes(shape: Shape, dtype: Any, requested: tuple[int | None, int | None], windowed: bool) -> Tiles:
    """As requested or by default, at most the sequence.

    Heads are walked in blocks where it is certain that they are not sharded. The fixed reference is None where it does not
    pay: on CPUs it takes a tenth off the time of a float32 call and nothing off another's, and that is not worth the word
    that devices would exchange for its check.
    """
    B, T, S, K, G = shape.B, shape.T, shape.S, shape.K, max(1, shape.G)

    def fit(rows: int, cols: int) -> tuple[int, int]:  # a symbolic length (jax.export) may be shorter: xla.py pads it
        sizes = zip((requested[0] or rows, requested[1] or cols), (T, S), strict=True)
        t, c = (max(1, min(size, n)) if isinstance(n, int) else size for size, n in sizes)
        return t, c

    if (backend := jax.default_backend()) == "gpu":
        general, fixed = (fit(*tile) for tile in GPU_TILES)
        return Tiles(general, fixed, None)
    if backend != "cpu" or may_be_sharded():
        return Tiles(fit(512, 512), None, None)
    side = CPU_SIDES["windowed" if windowed else "full"]
    cols = fit(side, side)[1]
    t, c = fit(min(side, max(128, CPU_LOGITS // (G * cols))), side)
    block = None
    if isinstance(B, int) and B * K > 0:
        heads = max(1, CPU_LOGITS // (G * t * c))
        k = _divisor(K, heads)
        block = _divisor(B, heads // K) if k == K else 1, k
    return Tiles((t, c), (t, c) if dtype == jnp.float32 else None, block)


def _divisor(n: int, limit: int) -> int:
    """The largest divisor of `n` up to `limit`."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)
