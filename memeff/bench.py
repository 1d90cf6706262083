"""`python -m memeff.bench`: attention's time and memory beside what a user would pick instead. Hides how each is measured.

  memory   temporary bytes of the compiled call, for lengths that no machine could run: nothing is allocated
  speed    milliseconds and FLOP/s, the same bytes, on GPUs the measured peak, and the error against float64
           (--decode: one query against many keys, and the bytes a second at which it reads them)
  hard     errors on inputs that are hard to be exact on, over those of plain attention (its own arguments: hard --help)

  --doctor is every implementation right on this machine? A few small cases of each against float64; exit code 1 if not

Both tables are GitHub's Markdown under a line that names device, versions and command; the README's are this output.
FLOPs: 4 B N T S H forward, 3.5 times that for forward + gradient, 3 times for a jvp, half for causal. Times are medians of
samples taken in turns, so that a slow moment of the machine hits everybody; ratios are medians of the ratios within a turn.
JSON lines are written as rows come, so that what ends a process takes no other figure with it.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import memeff
from memeff import bench_extras, bench_hard
from memeff.units import format_bytes as three_digits

MASKS, MODES = ("causal", "full"), ("forward", "gradient")
ORDERS = ("jvp", "hvp", "grad-of-grad")
# of the matrices of a tile; what more orders need is not agreed on
PRODUCTS = {"forward": 2, "gradient": 7, "jvp": 6}
TITLES = {"forward": "forward", "gradient": "forward + gradient"} | {
    order: order.replace("-", " ") for order in ORDERS
}
BYTES, COUNTS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), ("", "k", "M", "G", "T", "P")
# what is not installed is left out
STANDARD = ("memeff", "jax.nn:cudnn", "tokamax:xla_chunked", "torch", "jax.nn")
NAMES = "memeff[:CHUNK|:IMPLEMENTATION|:fused|:fastest][@MEMORY], jax.nn[:cudnn], reference, torch, tokamax[:IMPLEMENTATION]"
Row = dict[str, Any]  # one line of JSON: a Case, `implementation`, and what was found


@dataclasses.dataclass(frozen=True)
class Case:
    """One call to measure. mode "gradient" is forward + gradient, from a random cotangent; "jvp" out and its tangent; "hvp"
    the gradient and its tangent; "grad-of-grad" the gradient of the gradient's product with a direction.

    S = length, and T = query_length, or as many as keys: fewer queries are the last, which causally see all before them.
    """

    length: int
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    dtype: str = "float32"
    mask: str = "causal"
    mode: str = "forward"
    query_length: int | None = None
    extra: str = "plain"  # a score or a mask of bench_extras

    @property
    def queries(self) -> int:
        return self.query_length or self.length

    @property
    def flops(self) -> float | None:
        """None where nobody says how many count."""
        hidden = self.queries // 2 if self.mask == "causal" else 0  # keys a query, on average
        product = (
            2 * self.batch * self.heads * self.queries * (self.length - hidden) * self.head_dim
        )
        products = PRODUCTS.get(self.mode) if self.extra not in ("window", "documents") else None
        return products and products * product

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of query, key, value, and the cotangent of out."""
        query = self.batch, self.queries, self.heads, self.head_dim
        key = self.batch, self.length, self.kv_heads, self.head_dim
        return query, key, key, query

    @property
    def input_bytes(self) -> int:
        """Of query, key and value."""
        return bytes_of(self.shapes[:3], self.dtype)


def bytes_of(shapes: Iterable[tuple[int, ...]], dtype: str) -> int:
    return sum(map(math.prod, shapes)) * jax.numpy.dtype(dtype).itemsize


# ---- the implementations


def why_not(name: str, dtype: str) -> str | None:
    """None if `name` can run here, else the reason; an unknown name is a ValueError."""
    library, _, variant = name.partition(":")
    if library in ("torch", "tokamax") and importlib.util.find_spec(library) is None:
        return f"{library} is not installed"
    if variant == "cudnn" and (
        jax.default_backend() != "gpu" or dtype not in ("bfloat16", "float16")
    ):
        return "cuDNN needs an NVIDIA GPU and a 16-bit dtype"
    try:
        if name != "torch":
            attention(name)
    except ImportError as error:
        return f"{library} does not import: {error}"
    return None


def attention(name: str) -> Callable[..., Any]:
    """The JAX function behind `name`, of query, key, value and what `causality` tells."""
    if own := re.fullmatch(r"memeff(?::(?:(\d+)|(xla|pallas|fused|fastest)))?(?:@([\w.]+))?", name):
        chunk, implementation, memory = (int(x) if x and x.isdecimal() else x for x in own.groups())
        own = {"memory_limit": memory} if memory else {}
        own |= {
            "backward"
            if implementation in ("fused", "fastest")
            else "implementation": implementation
        }
        return functools.partial(memeff.dot_product_attention, chunk_size=chunk, **own)
    library, _, variant = name.partition(":")
    match library:
        case "jax.nn" if variant in ("", "xla", "cudnn"):
            return functools.partial(jax.nn.dot_product_attention, implementation=variant or "xla")  # type: ignore
        case "reference" if not variant:
            return functools.partial(memeff.dot_product_attention, implementation="reference")
        case "tokamax":
            return functools.partial(
                importlib.import_module(library).dot_product_attention,
                implementation=variant or None,
            )
    raise ValueError(f"implementation {name!r} is not known: use {NAMES}.")


def extra_arguments(name: str, case: Case) -> Row:
    """The score or the mask of a case, as memeff takes it; {} for others, whose array (`extra_array`) is an input."""
    own = case.extra != "plain" and name.startswith(("memeff", "reference"))
    return bench_extras.arguments(case.extra, case.heads, case.length) if own else {}


def extra_array(name: str, case: Case) -> tuple[str, Callable] | None:
    """Of what takes no function: the name of the argument, and what makes it. None: none is needed."""
    if case.extra == "plain" or name.startswith(("memeff", "reference")):
        return None
    if not name.startswith("jax.nn"):
        raise NotImplementedError("the bench gives it neither scores nor masks")
    return bench_extras.as_array(case.extra, case.heads, case.length, case.dtype)


def causality(name: str, case: Case) -> Row:
    """The arguments by which `name` hides from the last `queries` positions what comes after them."""
    first = case.length - case.queries
    if first and case.mask == "causal":
        if name.startswith(("memeff", "reference")):
            return {"is_causal": True, "q_offset": first}
        if case.queries > 1:
            raise NotImplementedError("its causal queries are the first, and these are the last")
        return {"is_causal": False}  # the last query of all sees every key
    return {"is_causal": case.mask == "causal"}


@functools.cache
def compiled(name: str, case: Case) -> jax.stages.Compiled:
    """(out,), or (out, dq, dk, dv), or more, of query, key, value and the cotangent; compiled from shapes alone."""
    logits = (
        0 if name.startswith("memeff") else case.batch * case.heads * case.queries * case.length
    )
    if logits >= 2**39 and jax.default_backend() == "cpu":
        raise MemoryError(
            "out of memory: 2^39 logits, whose softmax kills XLA (SIGFPE in jax 0.12, compiling for a CPU)"
        )
    given, extra = causality(name, case) | extra_arguments(name, case), extra_array(name, case)

    def call(query, key, value, dout, *array):
        at = query, key, value  # and directions
        attend = functools.partial(
            attention(name), **given, **({extra[0]: array[0]} if extra else {})
        )
        gradient = lambda *at: jax.vjp(attend, *at)[1](dout)
        match case.mode:
            case "forward":
                return (attend(*at),)
            case "jvp":
                return jax.jvp(attend, at, at)
            case "hvp":
                return jax.jvp(gradient, at, at)
            case "grad-of-grad":
                return jax.vjp(gradient, *at)[1](at)
        out, pull = jax.vjp(attend, *at)
        return out, *pull(dout)

    shapes = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in case.shapes]
    shapes += [jax.eval_shape(extra[1])] if extra else []
    return jax.jit(call).lower(*shapes).compile()


class Run(NamedTuple):
    """A call with its inputs: `call()` starts it and gives out (dq, dk, dv) in B T N H, `wait` ends it."""

    call: Callable[[], tuple]
    wait: Callable[[tuple], Any]

    def result(self) -> tuple:
        result = self.call()
        self.wait(result)
        return result


# the inputs of one case, so that its implementations share them
HELD: dict[tuple, tuple[jax.Array, ...]] = {}


def inputs(shapes: tuple[tuple[int, ...], ...], dtype: str) -> tuple[jax.Array, ...]:
    """Query, key, value and the cotangent of out."""

    def drawn(seed: int, shape: tuple[int, ...]) -> np.ndarray:
        return (
            np.random.default_rng(seed)
            .standard_normal(shape, np.float32)
            .astype(jax.numpy.dtype(dtype))
        )

    if (shapes, dtype) not in HELD:
        # and drawn on the host: holes in a device's memory would make a call take more than it asks
        # for
        HELD.clear()
        with ThreadPoolExecutor() as pool:
            arrays = tuple(map(jax.device_put, pool.map(drawn, range(4), shapes)))
        HELD[shapes, dtype] = jax.block_until_ready(arrays)
    return HELD[shapes, dtype]


def prepare(name: str, case: Case) -> Run:
    if reason := why_not(name, case.dtype):
        raise NotImplementedError(reason)
    arrays = inputs(case.shapes, case.dtype)
    if name == "torch":
        return prepare_torch(case, arrays)
    run, have = compiled(name, case), device_bytes()
    need = bytes_of(case.shapes, case.dtype) + call_bytes(name, case)
    if need > have:  # said, not tried: a CPU's system kills what asks for too much
        raise MemoryError(f"out of memory: needs {human(need)} of {human(have)}")
    if (extra := extra_array(name, case)) is not None:
        arrays = (*arrays, jax.block_until_ready(jax.jit(extra[1])()))
    return Run(lambda: run(*arrays), jax.block_until_ready)


def prepare_torch(case: Case, arrays: Sequence[jax.Array]) -> Run:
    if case.extra != "plain" or case.mode not in MODES:
        raise NotImplementedError("the bench asks it for plain calls, forward and gradient, alone")
    torch = importlib.import_module("torch")
    torch.set_num_threads(cores())  # as many as XLA takes
    # torch wants B N T H
    query, key, value, dout = (torch.from_dlpack(x).transpose(1, 2) for x in arrays)
    primals = [x.detach().requires_grad_(case.mode == "gradient") for x in (query, key, value)]
    options = causality("torch", case) | {"enable_gqa": case.heads != case.kv_heads}

    def call():
        out = torch.nn.functional.scaled_dot_product_attention(*primals, **options)
        gradients = torch.autograd.grad(out, primals, dout) if case.mode == "gradient" else ()
        return tuple(x.detach().transpose(1, 2) for x in (out, *gradients))

    return Run(call, lambda _: torch.cuda.synchronize() if query.is_cuda else None)


# ---- memory


def memory_table(
    lengths: Sequence[int], cases: Sequence[Case], names: Sequence[str] = ("jax.nn", "memeff")
) -> list[Row]:
    """Temporary bytes for every length, each of `cases` (whose own length is not read) and implementation.

    One row each: the fields of `Case`, `implementation`, `input_bytes`, `temp_bytes`, `extrapolated` (see `too_large`),
    `note` (why there are no bytes). Compiles, and allocates nothing.

    Example:
      >>> [row["temp_bytes"] for row in memory_table([1024, 2048], [Case(0)], ["jax.nn"])]
      [67108864, 268435456]
    """
    cells = [
        (name, dataclasses.replace(case, length=length))
        for length in lengths
        for case in cases
        for name in names
    ]
    rows = []
    for name, case in progress(cells, "compiling"):
        need, note = attempt(temp_bytes, name, case)
        found = {
            "input_bytes": case.input_bytes,
            "temp_bytes": need,
            "extrapolated": too_large(name, case),
            "note": note,
        }
        rows.append(describe(name, case) | found)
    return rows


@functools.cache
def too_large(name: str, case: Case) -> bool:
    """Is it too large to compile? A GPU needs the memory even for that: it tries kernels on arrays of the size."""
    return ran_out(attempt(compiled, name, case)[1])


def ran_out(note: str | None) -> bool:
    return (note or "").startswith("out of memory")


def temp_bytes(name: str, case: Case) -> int:
    """Temporary bytes of the compiled call, beyond inputs and outputs, and those of `extra_array`, which only this
    implementation needs; of what is too large, by the growth up to there.
    """
    if too_large(name, case):
        half, quarter = (
            temp_bytes(name, dataclasses.replace(case, length=case.length // n)) for n in (2, 4)
        )
        return half * half // quarter
    memory: Any = compiled(name, case).memory_analysis()
    return memory.temp_size_in_bytes + extra_bytes(name, case)


def extra_bytes(name: str, case: Case) -> int:
    extra = extra_array(name, case)
    made = extra and jax.eval_shape(extra[1])
    return made.size * made.dtype.itemsize if made else 0


def call_bytes(name: str, case: Case) -> int:
    """Temporary bytes and outputs: what the call takes at least."""
    memory: Any = compiled(name, case).memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes + extra_bytes(name, case)


def device_bytes() -> float:
    """The memory of the device, or 3/4 of the machine's where the CPU is the device."""
    stats = jax.devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return (
        0.75 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if hasattr(os, "sysconf")
        else float("inf")
    )


def watched(name: str, case: Case, run: Run) -> tuple[tuple, int | None]:
    """A call's result, and the measured bytes beyond its inputs, outputs included, at its highest point.

    A device keeps one maximum for all time, of compiling too, which tries kernels on arrays. So memory is held until the
    least that the call takes must raise that maximum. None where a device tells nothing.
    """
    if name == "torch":
        return watched_torch(run)
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" not in stats:
        return run.result(), None
    room = stats["peak_bytes_in_use"] - stats["bytes_in_use"] - call_bytes(name, case)
    # above the room by 1 MiB or more
    ballast = jax.numpy.zeros((max(0, room) // 2**20 + 2, 2**20), "uint8")
    ballast.block_until_ready()
    before, result = device.memory_stats(), run.result()
    peak = device.memory_stats()["peak_bytes_in_use"]
    return result, peak - before["bytes_in_use"] if peak > before["peak_bytes_in_use"] else None


def watched_torch(run: Run) -> tuple[tuple, int | None]:
    """torch counts its own; the inputs are JAX's."""
    cuda = importlib.import_module("torch").cuda
    if not cuda.is_available():
        return run.result(), None
    cuda.reset_peak_memory_stats()
    before, result = cuda.memory_allocated(), run.result()
    return result, cuda.max_memory_allocated() - before


# ---- speed


def speed_table(
    cases: Sequence[Case], names: Sequence[str] | None = None, *, rounds: int = 7
) -> Iterator[Row]:
    """Time, FLOP/s, bytes and error of every implementation for every case, a case at a time.

    One row each: the fields of `Case`, `implementation`, `seconds` (median), `seconds_min`, `flops_per_second`,
    `bytes_per_second` (keys and values, read once), `speed_against_jax_nn`, `error` (see `error_of`), `temp_bytes`,
    `peak_bytes` (see `watched`), `note` (why it could not run); None where nothing was found.
    """
    names = names or [name for name in STANDARD if why_not(name, cases[0].dtype) is None]
    for case in progress(cases, "timing"):
        yield from speed_rows(case, names, rounds)


def speed_rows(case: Case, names: Sequence[str], rounds: int) -> list[Row]:
    """`speed_table` of one case, whose arrays go before the next one's come."""
    tried, rows = {name: attempt(first_call, name, case) for name in names}, []
    samples = measure({name: found[0] for name, (found, _) in tried.items() if found}, rounds)
    for name, (found, note) in tried.items():
        took = samples.get(name, [])
        seconds = statistics.median(took) if took else None
        turns = list(zip(samples.get("jax.nn", []), took, strict=False))
        times = {
            "seconds": seconds,
            "seconds_min": min(took, default=None),
            "flops_per_second": case.flops / seconds if seconds and case.flops else None,
            "bytes_per_second": bytes_of(case.shapes[1:3], case.dtype) / seconds
            if seconds
            else None,
            "speed_against_jax_nn": statistics.median(plain / own for plain, own in turns)
            if turns
            else None,
        }
        bytes_and_error = (
            found[1] if found else dict.fromkeys(("error", "temp_bytes", "peak_bytes"))
        )
        rows.append(describe(name, case) | times | bytes_and_error | {"note": note})
    return rows


def first_call(name: str, case: Case) -> tuple[Run, Row]:
    """What is then ready to be timed, and what its first call tells."""
    run = prepare(name, case)
    result, peak = watched(name, case, run)
    temporary = None if name == "torch" else temp_bytes(name, case)
    return run, {"error": error_of(result, case), "temp_bytes": temporary, "peak_bytes": peak}


def describe(name: str, case: Case) -> Row:
    return {"implementation": name, **dataclasses.asdict(case)}


def call_of(row: Row) -> str:
    """A row's call in words; also of rows that an earlier version wrote."""
    extra = row.get("extra", "plain")
    return f"{row['mask']} {TITLES[row['mode']]}" + (f", {extra}" if extra != "plain" else "")


def attempt(function: Callable, *args) -> tuple[Any, str | None]:
    """The result, or why there is none in one line: what a guest cannot do is an entry in the table, not its end."""
    try:
        return function(*args), None
    except Exception as error:  # each library has a class of its own for running out of memory
        text = " ".join(str(error).split())
        full = (
            "RESOURCE_EXHAUSTED" in text
            or "out of memory" in text
            and not isinstance(error, MemoryError)
        )
        return None, "out of memory" if full else text[:100] or type(error).__name__


def measure(runs: dict[str, Run], rounds: int, at_least: float = 0.25) -> dict[str, list[float]]:
    """Seconds a call, `rounds` samples of each, in turns; a sample is as many calls as fill `at_least` seconds."""
    calls = {name: min(1000, 1 + int(at_least / timed(run, 1))) for name, run in runs.items()}
    turns = [{name: settled(run, calls[name]) for name, run in runs.items()} for _ in range(rounds)]
    return {name: [turn[name] for turn in turns] for name in runs}


def settled(run: Run, calls: int) -> float:
    """`timed`, after as many calls that do not count: another's gigabytes leave cold caches and pages yet to be mapped."""
    timed(run, calls)
    return timed(run, calls)


def timed(run: Run, calls: int) -> float:
    """Seconds a call. On a GPU the calls queue up, which hides their launches; a CPU would run them side by side."""
    apart = jax.default_backend() == "cpu"
    result, start = (), time.perf_counter()
    for _ in range(calls):
        result = run.call()
        if apart:
            run.wait(result)
    run.wait(result)
    return (time.perf_counter() - start) / calls


def error_of(result: tuple, case: Case) -> float | None:
    """Largest error of 32 rows of the last head against float64, divided by the largest exact entry: of out, and of dq or of
    the tangent. None: of what the gradient's derivatives are nothing is known here.
    """
    rows = np.unique(np.linspace(0, case.queries - 1, 32).astype(int))
    query, key, value, dout = inputs(case.shapes, case.dtype)
    sample = query[-1:, rows, -1:], key[-1:, :, -1:], value[-1:, :, -1:], dout[-1:, rows, -1:]
    out, dq, _, _, tangent = exact(sample, case, case.length - case.queries + rows)
    found, truth = {"hvp": (result[0], [dq]), "jvp": (result, [out, tangent])}.get(
        case.mode, (result, [out, dq])
    )
    if case.mode == "grad-of-grad":
        return None
    sampled = (as_float64(x[-1:, rows, -1:]) for x in found[: len(truth)])
    return max(
        float(np.abs(x - e).max() / np.abs(e).max()) for x, e in zip(sampled, truth, strict=False)
    )


# ---- is it right here?

DOCTOR_NAMES = ("memeff", "memeff:128", "reference", "jax.nn", "jax.nn:cudnn", "tokamax", "torch")
DOCTOR_CASES = tuple(
    Case(length, batch=2, heads=4, kv_heads=2, head_dim=32, dtype=dtype, mask=mask, mode="gradient")
    for dtype in ("float32", "bfloat16")
    for mask in MASKS
    for length in (1, 300)
)
DOCTOR_ALLOWS = {"float32": 1e-5, "bfloat16": 3e-2}


def doctor(names: Sequence[str] = DOCTOR_NAMES, cases: Sequence[Case] = DOCTOR_CASES) -> list[Row]:
    """out, dq, dk and dv of every implementation for every case against float64. Nobody's failure ends the table.

    One row each: the fields of `Case`, `implementation`, `error` (largest, relative to the largest exact entry or 1),
    `verdict` ("pass", "fail", or "cannot run"), `note`.
    """
    rows = []
    with jax.default_matmul_precision("highest"):  # else a GPU's float32 products have 10 bits
        for name, case in progress([(name, case) for name in names for case in cases], "checking"):
            error, note = attempt(doctor_error, name, case)
            verdict = (
                "cannot run"
                if error is None
                else "pass"
                if error <= DOCTOR_ALLOWS[case.dtype]
                else "fail"
            )
            rows.append(describe(name, case) | {"error": error, "verdict": verdict, "note": note})
    return rows


def doctor_error(name: str, case: Case) -> float:
    found = prepare(name, case).result()
    truth = exact(inputs(case.shapes, case.dtype), case, np.arange(case.length))[:4]
    pairs = zip(found, truth, strict=True)
    return max(float(np.abs(as_float64(x) - y).max() / max(1.0, np.abs(y).max())) for x, y in pairs)


def exact(arrays: Sequence[Any], case: Case, rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """out, dq, dk, dv in float64, of query, key, value and the cotangent of out, and the tangent of out along those; `rows`:
    positions of the queries.
    """
    q, k, v, do = (as_float64(x).swapaxes(1, 2) for x in arrays)  # B N T H
    heads = k.shape
    k, v = (x.repeat(q.shape[1] // heads[1], 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    plain = scale * q @ k.mT
    s, slope = bench_extras.logits(case.extra, case.heads, case.length, plain, rows)
    if case.mask == "causal":
        s = np.where(np.arange(s.shape[-1]) <= rows[:, None], s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out, dp = p @ v, do @ v.mT
    ds = scale * slope * p * (dp - (p * dp).sum(-1, keepdims=True))
    dk, dv = (x.reshape(*heads[:2], -1, *heads[2:]).sum(2) for x in (ds.mT @ q, p.mT @ do))
    w = p * slope * 2 * plain
    return tuple(
        x.swapaxes(1, 2)
        for x in (out, ds @ k, dk, dv, w @ v + out - w.sum(-1, keepdims=True) * out)
    )


def as_float64(x: Any) -> np.ndarray:
    return np.asarray(x.double().cpu() if hasattr(x, "cpu") else x, np.float64)


def doctor_markdown(rows: Sequence[Row]) -> str:
    """A line for each implementation, with the worst error in each dtype."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    lines = []
    for name in dict.fromkeys(row["implementation"] for row in rows):
        lines.append([name])
        for dtype in dtypes:
            own = [row for row in rows if (row["implementation"], row["dtype"]) == (name, dtype)]
            worst = max(own, key=lambda row: ("pass", "cannot run", "fail").index(row["verdict"]))
            error = max((row["error"] for row in own if row["error"] is not None), default=None)
            lines[-1].append(
                f"{worst['verdict']}: {worst['note']}"
                if error is None
                else f"{worst['verdict']} ({error:.0e})"
            )
    return markdown(["implementation", *dtypes], lines)


# ---- what people see


def progress(things: Sequence, label: str) -> Iterable:
    if importlib.util.find_spec("tqdm") is None:
        return things
    # None: on terminals only
    return importlib.import_module("tqdm").tqdm(things, desc=label, disable=None, leave=False)


def human(count: float | None, units: Sequence[str] = BYTES, base: int = 1024) -> str:
    return "-" if count is None else three_digits(count, units, base)


def tokens(length: int) -> str:
    return human(length, ("", "k", "M")).replace(" ", "") if length % 1024 == 0 else str(length)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = header, ["-" * (width - 1) + ":" for width in widths], *rows
    return "\n".join("| " + " | ".join(map(str.rjust, line, widths)) + " |" for line in lines)


def memory_markdown(rows: Sequence[Row]) -> str:
    """A line a length: the inputs, then for each mask and mode the bytes of every implementation (~: extrapolated)."""
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    kinds = list(dict.fromkeys(call_of(row) for row in rows))
    found = {(row["length"], call_of(row), row["implementation"]): row for row in rows}
    ratio = ["times less"] if {"jax.nn", "memeff"} <= set(names) else []
    header, lines = ["tokens", "query, key, value"], []
    for kind in kinds:
        header += [f"{kind}: {names[0]}", *names[1:], *ratio]
    for length, size in dict.fromkeys((row["length"], row["input_bytes"]) for row in rows):
        lines.append([tokens(length), human(size)])
        for kind in kinds:
            cells = [found.get((length, kind, name), {}) for name in names]
            told = [cell.get("note") or human(cell.get("temp_bytes")) for cell in cells]
            lines[-1] += [
                ("~" if cell.get("extrapolated") else "") + text
                for cell, text in zip(cells, told, strict=True)
            ]
            if ratio:
                plain, own = (
                    found[length, kind, name]["temp_bytes"] for name in ("jax.nn", "memeff")
                )
                lines[-1].append(
                    f"{plain / own:,.0f}" if plain > 99.5 * own else f"{plain / own:.2g}"
                )
    return markdown(header, lines)


def speed_markdown(rows: Sequence[Row]) -> str:
    """A line a row. Bytes a second where fewer queries than keys were asked for, peaks where a device told any."""
    some = {field: any(row[field] for row in rows) for field in ("query_length", "peak_bytes")}
    header = ["tokens", "call", "implementation", "ms (least)", "FLOP/s"]
    header += ["key and value B/s"] * some["query_length"] + ["x jax.nn", "temporary"]
    header += ["peak"] * some["peak_bytes"] + ["error"]
    lines = []
    for row in rows:
        took, ratio, error = row["seconds"], row["speed_against_jax_nn"], row["error"]
        lines.append([tokens(row["length"]), call_of(row), row["implementation"]])
        lines[-1] += [f"{1e3 * took:.4g} ({1e3 * row['seconds_min']:.4g})" if took else row["note"]]
        lines[-1] += [human(row["flops_per_second"], COUNTS, 1000)]
        lines[-1] += [human(row["bytes_per_second"], COUNTS, 1000)] * some["query_length"]
        lines[-1] += [f"{ratio:.2f}" if ratio else "-", human(row["temp_bytes"])]
        lines[-1] += [human(row["peak_bytes"])] * some["peak_bytes"] + [
            f"{error:.0e}" if error else "-"
        ]
    return markdown(header, lines)


LABELS = {
    "temp_bytes": ("temporary memory", BYTES, 1024),
    "peak_bytes": ("measured memory beyond the inputs", BYTES, 1024),
    "seconds": ("seconds a call", ("",), 1000),
    "flops_per_second": ("FLOP/s", COUNTS, 1000),
}


def figure(rows: Sequence[Row], field: str):
    """A matplotlib Figure: `field` (a key of LABELS) against length, a panel a mask and mode.

    What ran out of memory has a cross above the first length at which it did.
    """
    from matplotlib.figure import Figure

    heading, units, base = LABELS[field]
    kinds = list(dict.fromkeys(call_of(row) for row in rows))
    drawing = Figure(figsize=(1 + 4.5 * len(kinds), 4.5), layout="constrained")
    for panel, kind in zip(
        drawing.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True
    ):
        here = [row for row in rows if call_of(row) == kind]
        for name in sorted({row["implementation"] for row in here if row[field]}):
            own = [row for row in here if row["implementation"] == name]
            found = sorted((row["length"], row[field]) for row in own if row[field])
            full = sorted(row["length"] for row in own if ran_out(row.get("note")))[:1]
            label = name + "".join(f": out of memory at {tokens(length)}" for length in full)
            (line,) = panel.plot(
                *zip(*found, strict=True),
                "o-",
                label=label,
                linewidth=2.5 if name == "memeff" else 1.5,
            )
            for length in full:
                panel.plot(
                    length, 0.97, "X", color=line.get_color(), transform=panel.get_xaxis_transform()
                )
        if field == "temp_bytes":
            sizes = sorted({(row["length"], row["input_bytes"]) for row in here})
            panel.plot(
                *zip(*sizes, strict=True),
                color="grey",
                linestyle="--",
                label="query, key and value themselves",
            )
            panel.axhline(
                80 * 2**30, color="grey", linestyle=":", label="the memory of an 80 GiB GPU"
            )
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2 if base == 1024 else 10)
        panel.xaxis.set_major_formatter(lambda x, _: tokens(int(x)))
        if field != "seconds":
            panel.yaxis.set_major_formatter(lambda y, _: human(y, units, base))
        panel.set(title=kind, xlabel="tokens")
        panel.grid(alpha=0.3)
        panel.legend()
    drawing.axes[0].set_ylabel(heading)
    return drawing


def chart(rows: Sequence[Row]) -> str:
    """Return bars of temporary memory against length as text: a # for each doubling from 1 MiB on.

    For the last call of the table. Unlike a picture, text shows wherever a README is shown.
    """
    kind = call_of(rows[-1])
    lines = [f"temporary memory, {kind}; each # doubles it, from 1 MiB on", ""]
    for row in rows:
        if call_of(row) != kind or not row["temp_bytes"]:
            continue
        mib = row["temp_bytes"] / 2**20
        bar = "#" * max(1, round(math.log2(mib)) + 1)
        about = "~" if row.get("extrapolated") else ""
        size = about + human(row["temp_bytes"])
        lines.append(f"{tokens(row['length']):>4} {row['implementation']:<8}{bar} {size}")
    return "\n".join(lines)


def machine() -> Row:
    """What the figures belong to."""
    device, cpu = jax.devices()[0].device_kind, Path("/proc/cpuinfo")
    if jax.default_backend() == "cpu":
        model = re.search("model name.*: (.*)", cpu.read_text()) if cpu.exists() else None
        device = f"{model[1] if model else platform.machine()}, {cores()} cores"
    return {
        "device": device,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "memeff": memeff.__version__,
    }


def cores() -> int:
    """That this process may use (`taskset` restricts them)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["hard"]:
        return bench_hard.main(arguments[1:], machine)
    options = parse(arguments)
    if options.doctor:
        rows = doctor(options.implementation or DOCTOR_NAMES)
        print(
            *(f"{key} {value}," for key, value in machine().items()),
            "out, dq, dk, dv against float64 (largest error):\n",
        )
        print(doctor_markdown(rows))
        sys.exit(any(row["verdict"] == "fail" for row in rows))
    queries = options.query_length
    cases = [
        Case(*sizes, options.dtype, mask, mode, queries, extra)
        for sizes in (
            (n, options.batch, options.heads, options.kv_heads, options.head_dim)
            for n in options.length
        )
        for mask in options.mask
        for mode in options.mode
        for extra in options.extra
    ]
    if options.table == "memory":
        kinds = [case for case in cases if case.length == options.length[0]]
        found = memory_table(options.length, kinds, options.implementation or ("jax.nn", "memeff"))
    else:
        found = speed_table(cases, options.implementation, rounds=options.rounds)
    about, rows = machine(), []
    with open(options.json or os.devnull, "a") as file:
        for row in found:
            rows.append(row)
            print(json.dumps(about | row), file=file, flush=True)
    print(
        *(f"{key} {value}," for key, value in about.items()),
        f"`python -m memeff.bench {shlex.join(arguments)}`:",
    )
    sizes = f"B={options.batch} N={options.heads} K={options.kv_heads} H={options.head_dim} {options.dtype}"
    print(f"T={queries} {sizes}\n" if queries else f"{sizes}\n")
    print(memory_markdown(rows) if options.table == "memory" else speed_markdown(rows))
    if options.plot and options.plot.endswith(".txt"):
        Path(options.plot).write_text(chart(rows) + "\n")
    elif options.plot:
        import matplotlib

        with matplotlib.rc_context({"svg.hashsalt": "memeff"}):  # the same rows, the same file
            drawing = figure(
                rows, "temp_bytes" if options.table == "memory" else "flops_per_second"
            )
            drawing.savefig(
                options.plot, metadata={"Date": None} if options.plot.endswith(".svg") else None
            )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m memeff.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("table", nargs="?", default="speed", help="speed (the default) or memory")
    add(
        "--doctor",
        action="store_true",
        help="check every implementation against float64 on this machine",
    )
    add(
        "--length",
        nargs="+",
        type=size,
        metavar="S",
        help="keys, in tokens; k and M are 2^10 and 2^20",
    )
    add(
        "--query-length", type=size, metavar="T", help="queries, at the last positions (default: S)"
    )
    add(
        "--decode",
        action="store_true",
        help="--query-length 1 --mode forward --mask causal, which hides nothing then",
    )
    add("--batch", type=size, default=1, metavar="B")
    add("--heads", type=size, default=8, metavar="N", help="query heads")
    add("--kv-heads", type=size, metavar="K", help="key/value heads (default: N)")
    add("--head-dim", type=size, default=64, metavar="H")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--mask", nargs="+", choices=MASKS, help="speed: both; memory: causal")
    add(
        "--mode",
        nargs="+",
        choices=MODES + ORDERS,
        help="the first two; gradient is forward + gradient, hvp forward over reverse, directions are the arrays themselves",
    )
    add(
        "--with",
        dest="extra",
        nargs="+",
        choices=bench_extras.NAMES,
        default=("plain",),
        help="a score or a mask",
    )
    add("--implementation", nargs="+", metavar="NAME", help=NAMES)
    add("--rounds", type=size, default=7, help="samples of each time")
    add("--json", metavar="FILE", help="append a JSON line for each row")
    add(
        "--plot",
        metavar="FILE",
        help="draw against length: memory, or FLOP/s; FILE.txt: bars of text, of memory",
    )
    options = parser.parse_args(arguments)
    if options.table not in ("speed", "memory"):
        parser.error(f"table {options.table!r} is not known: use speed or memory.")
    memory = options.table == "memory"
    if (options.plot or "").endswith(".txt") and not memory:
        parser.error("--plot FILE.txt draws memory: use the table memory, or a picture.")
    if options.query_length and set(options.extra) != {"plain"}:
        parser.error("--with wants as many queries as keys: leave --query-length away.")
    options.length = options.length or [
        2**n for n in (range(10, 21, 2) if memory else (10, 11, 12))
    ]
    options.mask = options.mask or (MASKS[:1] if memory or options.decode else MASKS)
    options.mode = options.mode or (MODES[:1] if options.decode else MODES)
    options.query_length = 1 if options.decode else options.query_length
    options.kv_heads = options.kv_heads or options.heads
    if options.heads % options.kv_heads:
        parser.error(
            f"--heads {options.heads} must be a multiple of --kv-heads {options.kv_heads}."
        )
    if (options.query_length or 0) > min(options.length):
        parser.error(
            f"--query-length {options.query_length} must be at most --length {min(options.length)}."
        )
    for name in options.implementation or ():
        try:
            reason = why_not(name, options.dtype)
        except ValueError as error:
            parser.error(str(error))
        if memory and (reason or name == "torch"):
            parser.error(
                f"--implementation {name}: {reason or 'torch has no compiled memory to tell'}."
            )
    return options


def size(text: str) -> int:
    number, factor = (
        (text[:-1], {"k": 2**10, "M": 2**20}[text[-1]]) if text[-1:] in ("k", "M") else (text, 1)
    )
    if not number.isdecimal() or int(number) == 0:
        raise argparse.ArgumentTypeError(
            f"expected a whole number above 0, such as 4096 or 64k, got {text!r}"
        )
    return int(number) * factor


if __name__ == "__main__":
    main()
