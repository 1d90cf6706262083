"""Choose the sizes of tiles: what measurements found fastest, or the largest that keep to a memory limit."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memeff import compiling, memory_model, pallas
from memeff.autodiff.primitives import largest_divisor as _divisor
from memeff.chunked import eligible
from memeff.device import _pretended, current_device, current_platform
from memeff.implementations import Chosen, Compiled, module_for
from memeff.problem import Operands, Problem
from memeff.shape import CallShape
from memeff.sharding import may_be_sharded
from memeff.units import format_bytes, parse_bytes

# jit knows of it: another limit, another trace
memory_limit_of_program = jax.make_user_context(None)


def memory_limit(limit: int | str | None):
    """A context in which every `dot_product_attention` keeps within `limit`, unless the call has its own.

    Args:
      limit: bytes, or a text such as "512MiB" or "2GB", of the temporary memory of one call, forward and gradient, beyond
        its inputs and outputs. None: no limit.

    Raises: TypeError and ValueError where `limit` is neither.

    Example:
      >>> x = jnp.ones((1, 2048, 8, 64))
      >>> with memory_limit("16MiB"):
      ...     dot_product_attention(x, x, x).shape
      (1, 2048, 8, 64)
    """
    return memory_limit_of_program(parse_bytes("memory_limit", limit))


class Tiles(NamedTuple):
    """What `Problem` says of the walk, under the same names."""

    chunk_size: tuple[int, int]
    fixed_chunk_size: tuple[int, int] | None = None
    block: tuple[int, int] | None = None
    fused_chunk_size: tuple[int, int] | None = None
    joined: int = 0
    together: bool = False
    at_once: int | None = None


# On GPUs each step costs launches, and slices of what it reads and adds to, so tiles are large:
# 2^27 logits of the heads that are walked together where they leave a product in 16 bits, half of
# that in general (H200, bfloat16, H = 128, 2 x 8192: forward + gradient 7 to 9 % longer with 2^26).
# Without a window a forward tile is wide and a backward tile high, and 8 heads at a time were as
# fast as all 32, in two thirds of the memory. Under a window tiles have an eighth of the keys,
# which wastes less on a stair, and whole ones are joined; heads go together until a tile has a
# sixteenth of their logits (half of the heads took 14 % longer); masked tiles are larger where
# heads are few (1 x 4096, 8 heads: 8 %).
GPU_LOGITS = 2**27
GPU_TILE = (2048, 1024)
GPU_LONG = 8192
GPU_SIDES = (1024, 2048)
# with fewer for a key, passes over keys and values for a bound and a check show (decoding: 1.8
# times longer)
GPU_ROWS = 128
# On CPUs a tile should stay in the caches: 2^20 logits of as many heads as that allows. 512 a side
# where a window leaves a stair of tiles to mask, else 1024, were fastest or within 8 % of it (two
# cores, float32 and bfloat16, T = 1024 to 4096, 8 and 32 heads of 64 and 128, K = 1, 2, 8; forward
# and gradient; a side of 256 to 2048, 2^18 to 2^23 logits).
CPU_LOGITS = 2**20
CPU_SIDES = {"windowed": (512, 512), "full": (1024, 1024)}
LEAST_SIDE = 64  # smaller tiles save nothing beside what is as long as the sequence
HALVINGS = 16  # down to that
# An estimate is taken at its word where so many times as much, and a MiB, keeps to the limit: of
# random calls of every feature XLA reported up to 1.9 times the estimate, of tiny ones (some KiB)
# up to 2.6 times (tests/test_memory_limit.py).
FAR = 4
SMALL = 2**20
HIGH = 1.25  # an estimate that is so many times above the limit may still be too high
# bytes; XLA keeps a few scalars more where the caller's program holds a table as a constant
CALLER_MARGIN = 4096


def choose_tiles(
    problem: Problem,
    operands: Operands,
    requested: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    implementation: str | None = None,
    compiled: Compiled | None = None,
) -> Problem:
    """`problem` with the tiles that are fastest, or else with the largest that keep forward and gradient within `limit`."""
    chosen, needed, smallest = try_tiles(
        problem, operands, requested, limit, implementation, compiled
    )
    if chosen is not None:
        return chosen
    kernels = _gradient_in_kernels(operands, implementation)
    how, cure = (
        "in tiles of {} x {} logits".format(*smallest.chunk_size),
        "split the batch or the heads",
    )
    if implementation == "reference" or kernels:
        how, cure = "in kernels" if kernels else "at once", "leave implementation away"
    elif requested != (None, None):
        cure = "leave chunk_size away"
    raise ValueError(
        f"memory_limit={limit} ({format_bytes(limit or 0)}): forward and gradient of this call need up to {needed} bytes "
        f"({format_bytes(needed)}) beyond inputs and outputs, {how}. Raise the limit to that, or {cure}."
    )


def try_tiles(
    problem: Problem,
    operands: Operands,
    requested: tuple[int | None, int | None],
    limit: int | None,
    implementation: str | None,
    compiled: Compiled | None,
) -> tuple[Problem | None, int, Problem]:
    """Return the choice (None: nothing keeps to the limit), the bytes that a refusal names, and the smallest tiles.

    Far below the limit an estimate decides. Near it the call is compiled, and XLA decides. Where nobody can compile it (for
    a device that is not here), the estimate decides with a margin.
    """
    (B, T, K, G, H), (_, S, _, D) = operands.query.shape, operands.value.shape
    shape = CallShape((B,), T, S, K * G, K, H, D)
    known = all(isinstance(n, int) for n in (B, T, S))
    plain = known and eligible.max_can_be_bounded(problem, operands)
    chunked = implementation in (None, "xla")

    def tiled(halvings: int) -> Problem:
        tiles = default_tiles(
            shape, operands.query.dtype, requested, problem.windowed, plain, halvings
        )
        tiles = tiles._replace(
            at_once=_calls_at_once(shape, tiles, limit) if known and chunked else None
        )
        return dataclasses.replace(problem, **tiles._asdict())

    if limit is None:
        return (fastest := tiled(0)), 0, fastest
    if not known:
        raise ValueError(
            f"memory_limit wants sizes that are known, and here B={B}, T={T}, S={S}: give chunk_size instead."
        )
    in_tiles = implementation != "reference" and not (
        _gradient_in_kernels(operands, implementation)
    )
    options = [*dict.fromkeys(tiled(halvings) for halvings in range(HALVINGS if in_tiles else 1))]
    estimate = lambda option: max(temp_bytes(option, operands, implementation))
    here = compiling.local_device_like(current_device(operands.query))
    if compiled is None or here is None:
        margin = lambda option: (
            1 if not in_tiles else memory_model.safety_margin(option, operands, current_platform())
        )
        needed = [math.ceil(margin(option) * estimate(option)) for option in options]
        fits = (option for option, bytes_ in zip(options, needed, strict=True) if bytes_ <= limit)
        return next(fits, None), min(needed), options[-1]
    needed, seen, doubt = 0, 1.0, HIGH
    for option in options:
        about = seen * estimate(option)
        if FAR * about + SMALL <= limit:
            return option, 0, option
        if about <= doubt * limit or option is options[-1]:
            needed = (
                max(
                    compiled(
                        Chosen(
                            option,
                            module_for(implementation or "xla", current_device(operands.query)),
                        ),
                        here,
                    )
                )
                + CALLER_MARGIN
            )
            if needed <= limit:
                return option, needed, option
            seen, doubt = seen * needed / max(1, about), 1  # the next ones are likely as far off
    return None, needed, options[-1]


def _gradient_in_kernels(operands: Operands, implementation: str | None) -> bool:
    """Return True if the gradient runs in kernels, which choose their own tiles."""
    family = pallas.family_for(current_device(operands.query))
    return implementation == "pallas" and family.backward_is_kernel(operands)


def temp_bytes(problem: Problem, operands: Operands, implementation: str | None) -> tuple[int, int]:
    """Temporary memory of a forward for inference, and of forward and gradient in one call."""
    if implementation == "reference":
        return memory_model.quadratic_bytes(operands, current_platform())
    chunked = memory_model.temp_bytes(problem, operands, current_platform())
    if implementation != "pallas":
        return chunked
    family = pallas.family_for(current_device(operands.query))
    forward, gradient = family.temp_bytes(problem, operands)
    return forward, gradient if family.backward_is_kernel(operands) else max(gradient, chunked[1])


def default_tiles(
    shape: CallShape,
    dtype: Any,
    requested: tuple[int | None, int | None],
    windowed: bool,
    plain: bool,
    halvings: int = 0,
) -> Tiles:
    """As requested or by default, at most the sequence; with 2^halvings times fewer logits than were fastest.

    Heads are walked in blocks where it is certain that they are not sharded. The fixed reference is None where it does not
    pay: on CPUs it takes a tenth off the time of a float32 call and nothing off another's, and that is not worth the word
    that devices would exchange for its check.
    """
    B, T, S, K, G = shape.B, shape.T, shape.S, shape.K, max(1, shape.G)
    in_blocks = _pretended.get() is not None or not may_be_sharded()
    known = all(isinstance(n, int) for n in (B, T, S))

    def shrunk(sides: tuple[int, int], logits: int) -> tuple[int, int]:
        rows, cols = sides
        while rows * cols > logits and max(rows, cols) > LEAST_SIDE:
            rows, cols = (rows // 2, cols) if rows >= cols else (rows, cols // 2)
        return rows, cols

    def fit(sides: tuple[int, int]) -> tuple[int, int]:
        sizes = zip((requested[0] or sides[0], requested[1] or sides[1]), (T, S), strict=True)
        t, c = (max(1, min(size, n)) if isinstance(n, int) else size for size, n in sizes)
        return t, c  # a symbolic length (jax.export) may be shorter: xla.py pads it

    match current_platform():
        case "gpu":
            if not known:
                general = fit(GPU_TILE)
                return Tiles(general, general, None, general)
            heads, block = max(1, B * K * G), None
            rows = min(GPU_TILE[0], T)  # where there are few, more columns
            wide = rows, math.prod(GPU_TILE) // max(1, rows)
            if not plain or G * T < GPU_ROWS:
                return Tiles(fit(shrunk(wide, (GPU_LOGITS >> halvings) // 2 // heads)))
            stair = windowed and 8 * T > S
            if in_blocks:
                of_head = min(max(T * S // (16 if stair else 4), 2**20), 2**24, max(1, T * S))
                most = max(1, (GPU_LOGITS // of_head) >> halvings // 2)
                if heads > most:
                    k = _divisor(K, max(1, most // (B * G)))
                    block = _divisor(B, max(1, most // (k * G))), k
                    heads = block[0] * k * G
            logits = max(LEAST_SIDE**2, (GPU_LOGITS >> (halvings + 1) // 2) // heads)
            general = fit(shrunk(wide, logits // 4))
            if requested != (None, None):
                return Tiles(general, general, block, general)
            if stair:
                low, high = GPU_SIDES
                side = min(max(S // 8 // 128 * 128, low), high)
                while side * side * heads < GPU_LOGITS // 4 and 4 * side <= S:
                    side *= 2
                side, _ = shrunk((side, side), logits)
                return Tiles(general, fit((side, side)), block, fit((side, side)), joined=logits)
            long, across = min(max(S, T), GPU_LONG), min(T, 2048)
            long = max(long, min(S, logits // max(1, across)))
            while long * across > logits and (long, across) != (LEAST_SIDE, LEAST_SIDE):
                long, across = (
                    (long, across // 2) if across > 256 or long <= 1024 else (long // 2, across)
                )
            return Tiles(
                general,
                fit((across, long)),
                block,
                fit((long, across) if T > across else (across, long)),
            )
        case "cpu" if in_blocks:
            rows, cols = CPU_SIDES["windowed" if windowed else "full"]
            logits = CPU_LOGITS >> halvings
            if known:  # fewer rows for the many heads of a group
                rows = min(rows, max(128, logits // (G * max(1, min(cols, S)))))
            t, c = tile = fit(shrunk((rows, cols), logits))
            block = None
            if isinstance(B, int) and B * K > 0:
                heads = max(1, logits // (G * t * c))
                k = _divisor(K, heads)
                block = _divisor(B, heads // K) if k == K else 1, k
            return Tiles(tile, tile if dtype == jnp.float32 else None, block, together=known)
    return Tiles(fit(shrunk((512, 512), 512 * 512 >> halvings)))


def _calls_at_once(shape: CallShape, tiles: Tiles, limit: int | None) -> int | None:
    """Return how many calls under vmap work at the same time: as many as have the logits that were fastest in one call.

    One, if a memory limit holds, because it speaks of one call. None, all of them, where the mapped axis may be
    sharded, because a loop over it would gather it.
    """
    budget = {"cpu": CPU_LOGITS, "gpu": GPU_LOGITS}.get(current_platform())
    if budget is None or (_pretended.get() is None and may_be_sharded()):
        return None
    if limit is not None:
        return 1
    b, k = tiles.block or (shape.B, shape.K)
    logits = b * k * max(1, shape.G) * math.prod(tiles.chunk_size)
    return max(1, budget // max(1, logits))
