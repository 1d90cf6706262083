"""Choose tile sizes: what measurements found fastest, or the largest within a memory limit."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from memeff import compiling, memory_model, pallas
from memeff.autodiff.primitives import largest_divisor
from memeff.chunked import eligible, few_queries
from memeff.device import current_device, current_platform, is_pretended
from memeff.implementations import Chosen, Compiled, Request, module_for
from memeff.logits import logits_plain
from memeff.problem import Operands, Problem, Schedule
from memeff.shape import CallShape
from memeff.sharding import may_be_sharded
from memeff.units import format_bytes, parse_bytes

# a user context, so that jit traces again under another limit
memory_limit_of_program = jax.make_user_context(None)


def memory_limit(limit: int | str | None):
    """Return a context in which each call of `dot_product_attention` keeps within `limit`.

    A call's own `memory_limit` takes precedence.

    Args:
      limit: bytes, or a text such as "512MiB" or "2GB", of the temporary memory of one call,
        forward and gradient, beyond its inputs and outputs. None: no limit.

    Raises: TypeError or ValueError if `limit` is none of these.

    Example:
      >>> x = jnp.ones((1, 1024, 2, 64))
      >>> with memory_limit("64MiB"):
      ...     dot_product_attention(x, x, x).shape
      (1, 1024, 2, 64)
    """
    return memory_limit_of_program(parse_bytes("memory_limit", limit))


# On GPUs each step costs launches, and slices of the arrays that it reads and adds to, so tiles are
# large: 2^27 logits of all heads in a tile if they leave a product in 16 bits, half of that in
# general (H200, bfloat16, H = 128, 2 x 8192: forward + gradient 7 to 9 % longer with 2^26). Without
# a window a forward tile is wide and a backward tile high, and 8 heads at a time were as fast as
# all 32, in two thirds of the memory. Under a window tiles have an eighth of the keys, which wastes
# less on a stair, and unmasked tiles are merged; all heads form one tile until that has a sixteenth
# of their logits (half of the heads took 14 % longer); masked tiles are larger where heads are few
# (1 x 4096, 8 heads: 8 %).
GPU_LOGITS = 2**27
GPU_TILE = (2048, 1024)
GPU_LONG = 8192
GPU_SIDES = (1024, 2048)
# with fewer query rows for a key, the passes over keys and values for a bound and a check show
# (decoding: 1.8 times longer)
GPU_ROWS = 128
# On CPUs a tile should stay in the caches: 2^20 logits of as many heads as that allows. 512 a side
# where a window leaves a stair of tiles to mask, else 1024, were fastest or within 8 % of it (two
# cores, float32 and bfloat16, T = 1024 to 4096, 8 and 32 heads of 64 and 128, K = 1, 2, 8; forward
# and gradient; a side of 256 to 2048, 2^18 to 2^23 logits).
CPU_LOGITS = 2**20
CPU_SIDES = {"windowed": (512, 512), "full": (1024, 1024)}
# Bits of dropout that heads share are drawn for each tile, and cost 13 times as much as a logit. So
# such a tile has more heads, and fewer logits of each; 256 a side were fastest (two cores, float32,
# 2 x 2048, 4 heads of 16: forward 0.6 s before, 0.1 s so; 16 heads of 64: 2.9 and 0.7 s).
SHARED_BITS_SIDE = 256
LEAST_SIDE = 64  # smaller tiles save nothing beside arrays as long as the sequence
HALVINGS = 16  # down to LEAST_SIDE
# An estimate decides alone if SAFE times as much, and SMALL bytes, keep to the limit: of random
# calls of every feature XLA reported up to 1.9 times the estimate, of tiny ones (some KiB) up to
# 2.6 times (tests/test_memory_limit.py).
SAFE = 4
SMALL = 2**20
HIGH = 1.25  # an estimate that is so many times above the limit may still be too high
# bytes; XLA keeps a few scalars more where the caller's program holds a table as a constant
CALLER_MARGIN = 4096


def choose_schedule(
    problem: Problem,
    operands: Operands,
    request: Request,
    implementation: str | None = None,
    compiled: Compiled | None = None,
) -> Schedule:
    """Return the fastest schedule or, under a memory limit, that with the largest tiles within it.

    The limit is for forward and gradient of the call. `request.backward` is "fused" or counts as
    "split".

    Raises: ValueError if nothing keeps to the limit.
    """
    chosen, needed, smallest = try_schedules(problem, operands, request, implementation, compiled)
    if chosen is not None:
        return chosen
    t, c = smallest.chunk_size
    limit = request.memory_limit
    where = f"in tiles of {t} x {c} logits"
    cure = "split the batch or the heads"
    if request.chunk_size != (None, None):
        cure = "omit `chunk_size`"
    kernels = _gradient_in_kernels(operands, implementation)
    if kernels or implementation == "reference":
        where = "in kernels" if kernels else "at once"
        if request.backward == "fused":
            cure = "omit `backward`"
        elif request.implementation is not None:
            cure = "omit `implementation`"
    raise ValueError(
        f"memory_limit={limit} ({format_bytes(limit or 0)}): forward and gradient of this call "
        f"need up to {needed} bytes ({format_bytes(needed)}) beyond inputs and outputs, {where}. "
        f"Raise the limit to that, or {cure}."
    )


def try_schedules(
    problem: Problem,
    operands: Operands,
    request: Request,
    implementation: str | None,
    compiled: Compiled | None,
) -> tuple[Schedule | None, int, Schedule]:
    """Return the choice, the bytes that an error names, and the schedule with the smallest tiles.

    The choice is None if nothing keeps to the limit. Far below the limit an estimate decides. Near
    it the call is compiled, and XLA decides. If nobody can compile it, because the device is not
    here, the estimate decides with a margin.
    """
    shape = operands.shape
    known = shape.sizes_known
    bounded = known and eligible.max_can_be_bounded(problem, operands)
    plain = bounded and logits_plain(problem, operands)
    chunked = implementation in (None, "xla")
    limit = request.memory_limit

    def with_tiles(halvings: int) -> Schedule:
        dtype = operands.query.dtype
        schedule = default_schedule(
            shape, dtype, request.chunk_size, problem.has_window, bounded, halvings, plain
        )
        if problem.dropout is not None and problem.dropout.shared and known and chunked:
            schedule = _sharing_bits(schedule, shape, request.chunk_size)
        calls_at_once = _calls_at_once(shape, schedule, limit) if known and chunked else None
        return dataclasses.replace(
            schedule, calls_at_once=calls_at_once, fused_backward=request.backward == "fused"
        )

    if limit is None:
        fastest = with_tiles(0)
        return fastest, 0, fastest
    if not known:
        raise ValueError(
            f"memory_limit does not support sizes that jax.export leaves symbolic (B={shape.B}, "
            f"T={shape.T}, S={shape.S}). Pass chunk_size instead."
        )
    has_tiles = implementation != "reference" and not _gradient_in_kernels(operands, implementation)
    options = [with_tiles(halvings) for halvings in range(HALVINGS if has_tiles else 1)]
    options = list(dict.fromkeys(options))

    def estimate(option: Schedule) -> int:
        return max(temp_bytes(problem, option, operands, implementation))

    device = current_device(operands.query)
    local_device = compiling.local_device_like(device)
    if compiled is None or local_device is None:

        def estimate_with_margin(option: Schedule) -> int:
            margin = 1
            if has_tiles:
                platform = current_platform()
                margin = memory_model.safety_margin(problem, option, operands, platform)
            return math.ceil(margin * estimate(option))

        return _first_estimated_within(options, limit, estimate_with_margin)
    module = module_for(implementation or "xla", device)

    def compiled_bytes(option: Schedule) -> int:
        return max(compiled(Chosen(problem, option, module), local_device)) + CALLER_MARGIN

    return _first_within(options, limit, estimate, compiled_bytes)


def _first_estimated_within(
    options: Sequence[Schedule], limit: int, estimate: Callable[[Schedule], int]
) -> tuple[Schedule | None, int, Schedule]:
    """Return the first option estimated within `limit`, and what else `try_schedules` returns."""
    needed = []
    for option in options:
        needed.append(estimate(option))
        if needed[-1] <= limit:
            return option, needed[-1], options[-1]
    return None, min(needed), options[-1]


def _first_within(
    options: Sequence[Schedule],
    limit: int,
    estimate: Callable[[Schedule], int],
    compiled_bytes: Callable[[Schedule], int],
) -> tuple[Schedule | None, int, Schedule]:
    """Return the first option within `limit`, and what else `try_schedules` returns.

    Options whose estimates are hopeless are not compiled, except the last.
    """
    needed = 0
    correction = 1.0  # compiled bytes over estimated bytes, of the options so far
    doubt = HIGH
    for option in options:
        expected = correction * estimate(option)
        if SAFE * expected + SMALL <= limit:
            return option, 0, option
        if expected <= doubt * limit or option is options[-1]:
            needed = compiled_bytes(option)
            if needed <= limit:
                return option, needed, option
            # the next ones are likely as far off
            correction = correction * needed / max(1, expected)
            doubt = 1
    return None, needed, options[-1]


def _gradient_in_kernels(operands: Operands, implementation: str | None) -> bool:
    """Return True if the gradient runs in kernels, which choose their own tiles."""
    family = pallas.family_for(current_device(operands.query))
    return implementation == "pallas" and family.backward_is_kernel(operands)


def temp_bytes(
    problem: Problem, schedule: Schedule, operands: Operands, implementation: str | None
) -> tuple[int, int]:
    """Return the temporary bytes of inference, and of forward and gradient in one call."""
    if implementation == "reference":
        return memory_model.quadratic_bytes(operands, current_platform())
    chunked = memory_model.temp_bytes(problem, schedule, operands, current_platform())
    if implementation != "pallas":
        return chunked
    family = pallas.family_for(current_device(operands.query))
    forward, gradient = family.temp_bytes(problem, schedule, operands)
    return forward, gradient if family.backward_is_kernel(operands) else max(gradient, chunked[1])


def default_schedule(
    shape: CallShape,
    dtype: Any,
    requested: tuple[int | None, int | None],
    windowed: bool,
    bounded: bool,
    halvings: int = 0,
    plain: bool = True,
) -> Schedule:
    """Return the schedule with the requested or else the fastest tiles.

    They are at most as large as the call.

    Tiles have 2^halvings times fewer logits than the fastest ones. `bounded`: each row's maximum
    can be bounded beforehand. `plain`: see `logits_plain`. If heads may be sharded, tiles take all
    heads, and on CPUs no maximum is bounded, because the devices would have to exchange a word to
    check the bounds.
    """
    in_blocks = not _heads_may_be_sharded()
    match current_platform():
        case "gpu" if not shape.sizes_known:
            tile = _fit(GPU_TILE, requested, shape)
            return Schedule(tile, tile, tile)
        case "gpu":
            return _gpu_tiles(shape, requested, windowed, bounded, plain, halvings, in_blocks)
        case "cpu" if in_blocks:
            return _cpu_tiles(shape, dtype, requested, windowed, halvings)
    return Schedule(_fit(_shrink((512, 512), 512 * 512 >> halvings), requested, shape))


def _heads_may_be_sharded() -> bool:
    """Return True if the real devices, not a pretended one, may share batch entries and heads."""
    return not is_pretended() and may_be_sharded()


def _gpu_tiles(
    shape: CallShape,
    requested: tuple[int | None, int | None],
    windowed: bool,
    bounded: bool,
    plain: bool,
    halvings: int,
    in_blocks: bool,
) -> Schedule:
    """Return the schedule for a GPU."""
    T, S = shape.T, shape.S
    G = max(1, shape.G)
    heads = max(1, shape.B * shape.K * G)
    rows = min(GPU_TILE[0], T)
    tile = (rows, math.prod(GPU_TILE) // max(1, rows))  # few rows: more columns
    if not bounded or G * T < GPU_ROWS:
        logits = (GPU_LOGITS >> halvings) // 2 // heads
        split = None
        # a tile that the user chose is one of the loop
        if in_blocks and halvings == 0 and requested == (None, None):
            split = few_queries.split_length(shape)
        return Schedule(_fit(_shrink(tile, logits), requested, shape), split_keys=split)
    stair = windowed and 8 * T > S
    block = _gpu_block(shape, stair, halvings) if in_blocks and plain else None
    if block is not None:
        heads = block[0] * block[1] * G
    logits = max(LEAST_SIDE**2, (GPU_LOGITS >> (halvings + 1) // 2) // heads)
    masked = _fit(_shrink(tile, logits // (4 if plain else 2)), requested, shape)
    if requested != (None, None):
        return Schedule(masked, masked, masked, head_block=block)
    if stair:
        square = _fit(_gpu_square(S, heads, logits), requested, shape)
        return Schedule(masked, square, square, logits, block)
    long, across = _gpu_oblong(T, S, logits)
    wide = _fit((across, long), requested, shape)
    high = _fit((long, across), requested, shape)
    return Schedule(masked, wide, high if T > across else wide, head_block=block)


def _gpu_block(shape: CallShape, stair: bool, halvings: int) -> tuple[int, int] | None:
    """Return the batch entries and key heads of a tile on a GPU; None: all."""
    B, K = shape.B, shape.K
    G = max(1, shape.G)
    pairs = shape.T * shape.S
    head_logits = min(max(pairs // (16 if stair else 4), 2**20), 2**24, max(1, pairs))
    most_heads = max(1, (GPU_LOGITS // head_logits) >> halvings // 2)
    if max(1, B * K * G) <= most_heads:
        return None
    k = largest_divisor(K, max(1, most_heads // (B * G)))
    return largest_divisor(B, max(1, most_heads // (k * G))), k


def _gpu_square(S: int, heads: int, logits: int) -> tuple[int, int]:
    """Return the sides of an unmasked tile under a window, before it is merged with others."""
    least, most = GPU_SIDES
    side = min(max(S // 8 // 128 * 128, least), most)
    while side * side * heads < GPU_LOGITS // 4 and 4 * side <= S:
        side *= 2
    side, _ = _shrink((side, side), logits)
    return side, side


def _gpu_oblong(T: int, S: int, logits: int) -> tuple[int, int]:
    """Return the long and the short side of an unmasked tile without a window."""
    long = min(max(S, T), GPU_LONG)
    across = min(T, 2048)
    long = max(long, min(S, logits // max(1, across)))
    while long * across > logits and (long, across) != (LEAST_SIDE, LEAST_SIDE):
        if across > 256 or long <= 1024:
            across //= 2
        else:
            long //= 2
    return long, across


def _cpu_tiles(
    shape: CallShape,
    dtype: Any,
    requested: tuple[int | None, int | None],
    windowed: bool,
    halvings: int,
) -> Schedule:
    """Return the schedule for a CPU.

    The bound on each row's maximum is for float32 only, and for several tiles. It takes a tenth off
    the time of such a call and nothing off others. A single tile runs up to a third faster with its
    true maximum, and compiles in half of the time.
    """
    B, S, K = shape.B, shape.S, shape.K
    G = max(1, shape.G)
    rows, cols = CPU_SIDES["windowed" if windowed else "full"]
    logits = CPU_LOGITS >> halvings
    if shape.sizes_known:  # fewer rows for the many heads of a group
        rows = min(rows, max(128, logits // (G * max(1, min(cols, S)))))
    tile = _fit(_shrink((rows, cols), logits), requested, shape)
    block = None
    if isinstance(B, int) and B * K > 0:
        block = _cpu_block(shape, logits // math.prod(tile))
    is_single = tile == (shape.T, shape.S)
    fixed_max = tile if dtype == jnp.float32 and not is_single else None
    return Schedule(tile, fixed_max, head_block=block, one_pass_jvp=shape.sizes_known)


def _cpu_block(shape: CallShape, heads: int) -> tuple[int, int]:
    """Return the batch entries and key heads of a tile that has at most so many query heads."""
    key_heads = max(1, heads // max(1, shape.G))
    k = largest_divisor(shape.K, key_heads)
    return largest_divisor(shape.B, key_heads // shape.K) if k == shape.K else 1, k


def _sharing_bits(
    schedule: Schedule, shape: CallShape, requested: tuple[int | None, int | None]
) -> Schedule:
    """Return a schedule for a CPU whose tiles have more heads, because they share drawn bits.

    XLA draws the bits of a single tile once, before the loop over heads.
    """
    t, c = schedule.chunk_size
    is_single = t >= shape.T and c >= shape.S
    if current_platform() != "cpu" or requested != (None, None):
        return schedule
    if schedule.head_block is None or is_single:
        return schedule
    b, k = schedule.head_block
    G = max(1, shape.G)
    logits = b * k * G * t * c  # as the schedule had them
    heads = shape.B * shape.K * G
    tile = _shrink((t, c), max(SHARED_BITS_SIDE**2, logits // heads))
    return dataclasses.replace(
        schedule,
        chunk_size=tile,
        fixed_max_chunk_size=tile if schedule.fixed_max_chunk_size else None,
        head_block=_cpu_block(shape, logits // math.prod(tile)),
    )


def _shrink(sides: tuple[int, int], logits: int) -> tuple[int, int]:
    """Halve the longer side until the tile has at most `logits` or is as small as LEAST_SIDE."""
    rows, cols = sides
    while rows * cols > logits and max(rows, cols) > LEAST_SIDE:
        if rows >= cols:
            rows //= 2
        else:
            cols //= 2
    return rows, cols


def _fit(
    sides: tuple[int, int], requested: tuple[int | None, int | None], shape: CallShape
) -> tuple[int, int]:
    """Return the requested sides, or else `sides`, at most as long as the sequences."""
    t = requested[0] or sides[0]
    c = requested[1] or sides[1]
    # a symbolic length (jax.export) may be shorter: chunked/export.py pads it
    if isinstance(shape.T, int):
        t = max(1, min(t, shape.T))
    if isinstance(shape.S, int):
        c = max(1, min(c, shape.S))
    return t, c


def _calls_at_once(shape: CallShape, schedule: Schedule, limit: int | None) -> int | None:
    """Return how many calls under vmap run at the same time: as fill the fastest tile of one call.

    Under a memory limit it is one call, because the limit is for one call. It is None (all) if the
    mapped axis may be sharded, because a loop over it would gather it.
    """
    budget = {"cpu": CPU_LOGITS, "gpu": GPU_LOGITS}.get(current_platform())
    if budget is None or _heads_may_be_sharded():
        return None
    if limit is not None:
        return 1
    b, k = schedule.heads_of_tile(shape.B, shape.K)
    logits = b * k * max(1, shape.G) * math.prod(schedule.chunk_size)
    return max(1, budget // max(1, logits))
