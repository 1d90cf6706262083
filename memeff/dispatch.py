"""Who can run a call, in which tiles and in what memory, and why not. Knows what measurements chose."""

import contextlib
import contextvars
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from memeff import compiling, memory, pallas, reference, xla
from memeff.arguments import Shape, bytes_of, human
from memeff.problem import Device, Operands, Problem
from memeff.rules import largest_divisor as _divisor
from memeff.sharding import may_be_sharded

IMPLEMENTATIONS = ("xla", "reference", "pallas")


MODULES = {"xla": xla, "reference": reference, "pallas": pallas}


class Chosen(NamedTuple):
    """How a call runs."""

    problem: Problem  # with its tiles
    module: ModuleType  # the implementation, forward and backward together


# Of a choice, on a device that is here: what forward and gradient take, as XLA says.
Compiled = Callable[[Chosen, jax.Device], tuple[int, int]]


def select_implementation(
    problem: Problem,
    operands: Operands,
    requested: str | None,
    chunks: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    compiled: Compiled | None = None,
) -> Chosen:
    """The implementation that runs this call, and the problem with its tiles.

    Refuses a request that cannot be met. `chunks` and `limit` are the call's `chunk_size` and `memory_limit` in bytes.
    """
    fused, fastest = problem.backward == "fused", problem.backward == "fastest"
    if fastest:
        problem = dataclasses.replace(problem, backward=None)
    choose = functools.partial(_choose_tiles, operands=operands, requested=chunks, limit=limit, compiled=compiled)
    name = requested or ("pallas" if fused else None)
    if name is None:
        against = why_not("pallas", problem, operands, chunks)
        kernels = against is None and pallas.slower(problem, operands) is None
        name = "pallas" if kernels and choose(problem, implementation="pallas")[0] is not None else "xla"
        expected = operands.query.dtype.itemsize == 2 and chunks == (None, None) and _watching.get() is None
        if against is not None and expected and pallas.for_device(device(operands.query)) is None:
            _tell(against)
    reason = why_not(name, problem, operands, chunks)
    if reason is not None:
        cure = 'Use implementation=None to let memeff choose, or "xla", which always runs.'
        cure = "Leave backward away." if fused else cure
        asked = f'implementation="{name}"' if requested else 'backward="fused"'
        raise NotImplementedError(f"{asked} cannot run this call: {reason}. {cure}")
    if fastest and name == "pallas" and pallas.fused_is_faster(problem, operands):
        one = dataclasses.replace(problem, backward="fused")
        problem = one if choose(one, implementation="pallas")[0] is not None else problem
    problem = choose_tiles(problem, operands, chunks, limit, name, compiled)
    if (calls := _watching.get()) is not None:
        calls.append((problem, operands, name))
    return Chosen(problem, MODULES[name])


_watching: contextvars.ContextVar[list | None] = contextvars.ContextVar("memeff_watching", default=None)
_device: contextvars.ContextVar[Device | None] = contextvars.ContextVar("memeff_device", default=None)


@contextlib.contextmanager
def watch() -> Iterator[list[tuple[Problem, Operands, str]]]:
    """The calls that are dispatched meanwhile in this thread: problem, operands (perhaps tracers), implementation."""
    token = _watching.set(calls := [])
    try:
        yield calls
    finally:
        _watching.reset(token)


@contextlib.contextmanager
def as_if_on(name: str | None, capability: str | None = None) -> Iterator[None]:
    """As if there were one device, of this platform ("cpu", "gpu", "tpu"; None: as it is) and CUDA compute capability."""
    token = _device.set(None if name is None else Device(name, capability))
    try:
        yield
    finally:
        _device.reset(token)


def device(query: Any = None) -> Device:
    """Where calls run; this one, where `query` lies somewhere already."""
    if (given := _device.get()) is not None:
        return given
    first = jax.devices()[0]
    here = jax.config.jax_default_device or first  # type: ignore
    if isinstance(query, jax.Array) and not isinstance(query, Tracer):
        here = next(iter(query.devices()))
    if not isinstance(here, jax.Device) or here.platform == first.platform:
        return Device(jax.default_backend(), getattr(first, "compute_capability", None))
    return Device(here.platform, getattr(here, "compute_capability", None))


def platform() -> str:
    return device().platform


def _tell(reason: str) -> None:
    """Once for each reason: that something faster than what runs was there."""
    if reason not in _told:
        _told.add(reason)
        warnings.warn(f'memeff: kernels are for this device, but implementation="xla" runs: {reason}.', stacklevel=6)


_told: set[str] = set()


def reasons(problem: Problem, operands: Operands, chosen: str) -> str:
    """What runs a call that left the choice to memeff, how, and why every other implementation does not."""
    (B, T, K, G, _), S = operands.query.shape, operands.key.shape[1]
    how = pallas.how if chosen == "pallas" else xla.how
    lines = [f'"{chosen}" runs this call on {platform()}: {how(problem, operands)}.']
    by_name = {
        "reference": f"could, if asked for by name, in quadratic memory ({B * K * G} x {T} x {S} logits)",
        "xla": "could, if asked for by name: slower here",
        "pallas": f"could, if asked for by name: {pallas.slower(problem, operands)}",
    }
    others = (name for name in IMPLEMENTATIONS if name != chosen)
    lines += [f'"{name}": {why_not(name, problem, operands) or by_name[name]}.' for name in others]
    return "\n".join(lines)


def why_not(
    name: str, problem: Problem, operands: Operands, chunks: tuple[int | None, int | None] = (None, None)
) -> str | None:
    """None if the implementation `name` can run this call, else the reason."""
    match name:
        case "xla":
            return xla.why_not(problem, operands)
        case "reference":
            return reference.why_not(problem, operands)
        case "pallas":
            own_tiles = None if chunks == (None, None) else "kernels have their own tiles, and this call gives chunk_size"
            return pallas.why_not(problem, operands, device(operands.query)) or own_tiles
        case "cudnn":
            return "memeff does not hand over to cuDNN (jax.nn.dot_product_attention does)"
    raise ValueError(f"implementation={name!r} is not known: use None or one of {', '.join(map(repr, IMPLEMENTATIONS))}.")


# ---- tiles


memory_limit_of_program = jax.make_user_context(None)  # jit knows of it: another limit, another trace


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
    return memory_limit_of_program(bytes_of("memory_limit", limit))


class Tiles(NamedTuple):
    """What `Problem` says of the walk, under the same names."""

    chunk_size: tuple[int, int]
    fixed_chunk_size: tuple[int, int] | None = None
    block: tuple[int, int] | None = None
    fused_chunk_size: tuple[int, int] | None = None
    joined: int = 0
    together: bool = False
    at_once: int | None = None


# On GPUs each step costs launches, and slices of what it reads and adds to, so tiles are large: 2^27 logits of the heads
# that are walked together where they leave a product in 16 bits, half of that in general (H200, bfloat16, H = 128, 2 x
# 8192: forward + gradient 7 to 9 % longer with 2^26). Without a window a forward tile is wide and a backward tile high, and
# 8 heads at a time were as fast as all 32, in two thirds of the memory. Under a window tiles have an eighth of the keys,
# which wastes less on a stair, and whole ones are joined; heads go together until a tile has a sixteenth of their logits
# (half of the heads took 14 % longer); masked tiles are larger where heads are few (1 x 4096, 8 heads: 8 %).
GPU_LOGITS = 2**27
GPU_TILE = (2048, 1024)
GPU_LONG = 8192
GPU_SIDES = (1024, 2048)
GPU_ROWS = 128  # with fewer for a key, passes over keys and values for a bound and a check show (decoding: 1.8 times longer)
# On CPUs a tile should stay in the caches: 2^20 logits of as many heads as that allows. 512 a side where a window leaves a
# stair of tiles to mask, else 1024, were fastest or within 8 % of it (two cores, float32 and bfloat16, T = 1024 to 4096,
# 8 and 32 heads of 64 and 128, K = 1, 2, 8; forward and gradient; a side of 256 to 2048, 2^18 to 2^23 logits).
CPU_LOGITS = 2**20
CPU_SIDES = {"windowed": (512, 512), "full": (1024, 1024)}
LEAST_SIDE = 64  # smaller tiles save nothing beside what is as long as the sequence
HALVINGS = 16  # down to that


# An estimate is taken at its word where so many times as much, and a MiB, keeps to the limit: of random calls of every
# feature XLA reported up to 1.9 times the estimate, of tiny ones (some KiB) up to 2.6 times (tests/test_memory_limit.py).
FAR = 4
SMALL = 2**20
HIGH = 1.25  # an estimate that is so many times above the limit may still be too high
CALLER_MARGIN = 4096  # bytes; XLA keeps a few scalars more where the caller's program holds a table as a constant


def choose_tiles(
    problem: Problem,
    operands: Operands,
    requested: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    implementation: str | None = None,
    compiled: Compiled | None = None,
) -> Problem:
    """`problem` with the tiles that are fastest, or else with the largest that keep forward and gradient within `limit`."""
    chosen, needed, smallest = _choose_tiles(problem, operands, requested, limit, implementation, compiled)
    if chosen is not None:
        return chosen
    kernels = implementation == "pallas" and pallas.backward_is_kernel(operands)
    how, cure = "in tiles of {} x {} logits".format(*smallest.chunk_size), "split the batch or the heads"
    if implementation == "reference" or kernels:
        how, cure = "in kernels" if kernels else "at once", "leave implementation away"
    elif requested != (None, None):
        cure = "leave chunk_size away"
    raise ValueError(
        f"memory_limit={limit} ({human(limit or 0)}): forward and gradient of this call need up to {needed} bytes "
        f"({human(needed)}) beyond inputs and outputs, {how}. Raise the limit to that, or {cure}."
    )


def _choose_tiles(
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
    shape = Shape((B,), T, S, K * G, K, H, D)
    known = all(isinstance(n, int) for n in (B, T, S))
    plain = known and xla.can_bound(problem, operands)
    chunked = implementation in (None, "xla")

    def tiled(halvings: int) -> Problem:
        tiles = tile_sizes(shape, operands.query.dtype, requested, problem.windowed, plain, halvings)
        tiles = tiles._replace(at_once=_calls_at_once(shape, tiles, limit) if known and chunked else None)
        return dataclasses.replace(problem, **tiles._asdict())

    if limit is None:
        return (fastest := tiled(0)), 0, fastest
    if not known:
        raise ValueError(f"memory_limit wants sizes that are known, and here B={B}, T={T}, S={S}: give chunk_size instead.")
    in_tiles = implementation != "reference" and not (implementation == "pallas" and pallas.backward_is_kernel(operands))
    options = [*dict.fromkeys(tiled(halvings) for halvings in range(HALVINGS if in_tiles else 1))]
    estimate = lambda option: max(temp_bytes(option, operands, implementation))
    here = compiling.on_hand(device(operands.query))
    if compiled is None or here is None:
        margin = lambda option: 1 if not in_tiles else memory.margin(option, operands, platform())
        needed = [math.ceil(margin(option) * estimate(option)) for option in options]
        fits = (option for option, bytes_ in zip(options, needed, strict=True) if bytes_ <= limit)
        return next(fits, None), min(needed), options[-1]
    needed, seen, doubt = 0, 1.0, HIGH
    for option in options:
        about = seen * estimate(option)
        if FAR * about + SMALL <= limit:
            return option, 0, option
        if about <= doubt * limit or option is options[-1]:
            needed = max(compiled(Chosen(option, MODULES[implementation or "xla"]), here)) + CALLER_MARGIN
            if needed <= limit:
                return option, needed, option
            seen, doubt = seen * needed / max(1, about), 1  # the next ones are likely as far off
    return None, needed, options[-1]


def temp_bytes(problem: Problem, operands: Operands, implementation: str | None) -> tuple[int, int]:
    """Temporary memory of a forward for inference, and of forward and gradient in one call."""
    if implementation == "reference":
        return memory.plain_bytes(operands, platform())
    chunked = memory.temp_bytes(problem, operands, platform())
    if implementation != "pallas":
        return chunked
    forward, gradient = pallas.temp_bytes(problem, operands)
    return forward, gradient if pallas.backward_is_kernel(operands) else max(gradient, chunked[1])


def tile_sizes(
    shape: Shape, dtype: Any, requested: tuple[int | None, int | None], windowed: bool, plain: bool, halvings: int = 0
) -> Tiles:
    """As requested or by default, at most the sequence; with 2^halvings times fewer logits than were fastest.

    Heads are walked in blocks where it is certain that they are not sharded. The fixed reference is None where it does not
    pay: on CPUs it takes a tenth off the time of a float32 call and nothing off another's, and that is not worth the word
    that devices would exchange for its check.
    """
    B, T, S, K, G = shape.B, shape.T, shape.S, shape.K, max(1, shape.G)
    in_blocks = _device.get() is not None or not may_be_sharded()
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

    match platform():
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
                long, across = (long, across // 2) if across > 256 or long <= 1024 else (long // 2, across)
            return Tiles(general, fit((across, long)), block, fit((long, across) if T > across else (across, long)))
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


def _calls_at_once(shape: Shape, tiles: Tiles, limit: int | None) -> int | None:
    """Return how many calls under vmap work at the same time: as many as have the logits that were fastest in one call.

    One, if a memory limit holds, because it speaks of one call. None, all of them, where the mapped axis may be
    sharded, because a loop over it would gather it.
    """
    budget = {"cpu": CPU_LOGITS, "gpu": GPU_LOGITS}.get(platform())
    if budget is None or (_device.get() is None and may_be_sharded()):
        return None
    if limit is not None:
        return 1
    b, k = tiles.block or (shape.B, shape.K)
    logits = b * k * max(1, shape.G) * math.prod(tiles.chunk_size)
    return max(1, budget // max(1, logits))
