"""What a call will take, before it runs: memory, products, tiles, and how long its sequence may become."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax

from memeff import compiling, dispatch, memory, pallas, xla
from memeff.arguments import human
from memeff.problem import Device, Operands, Problem

# what they are, and bytes of memory as the makers state them
DEVICES = {
    "cpu": (Device("cpu"), None),
    "gpu": (Device("gpu"), None),
    "tpu": (Device("tpu"), None),
    "A100": (Device("gpu", "8.0"), 80 * 10**9),
    "H100": (Device("gpu", "9.0"), 80 * 10**9),
    "H200": (Device("gpu", "9.0"), 141 * 10**9),
    "B200": (Device("gpu", "10.0"), 180 * 10**9),
}


# Of 72 random calls of every feature (tests/drawn.py; CPU, jax 0.10.2) XLA reported 0.36 to 2.53 times the estimate, of 60
# of them 0.59 to 1.6 times; above a MiB at most 1.85 times.
ABOUT = "Bytes are estimates, mostly between half and twice what is compiled; compile=True makes memeff's exact."
EXACT = "memeff's bytes are those of the compiled call; the others and the lengths are estimates."


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `memeff.plan` finds. Its `str` is a table.

    Bytes are temporary: beyond inputs and outputs, at the highest point of the call. Outputs of a gradient are the forward's
    results and the gradients by everything that is a float; its inputs are the arguments and cotangents. Where `compiled`,
    bytes are what XLA reports, else estimates; those of plain attention, and `longest`, are always estimates.
    Floating point operations are those of the products of one forward, and of one gradient without it, on the tiles that
    are visited; where the walk's bounds are found as it runs, `tiles_visited` is None and all tiles count.
    """

    implementation: str
    platform: str  # "cpu", "gpu", "tpu"
    chunk_size: tuple[int, int]  # rows and columns of a tile (on GPUs a forward may take larger ones: see the text)
    forward_bytes: int
    gradient_bytes: int  # of forward and gradient in one call
    compiled: bool  # are these two what XLA reports, or estimates?
    flops: int
    gradient_flops: int
    tiles_visited: int | None  # tiles of rows and columns, the same for all heads
    tiles_total: int
    plain_forward_bytes: int  # about what plain attention holds: T x S logits and probabilities
    plain_gradient_bytes: int
    memory: int | None  # bytes of the device, where they are known
    longest: int | None  # T whose forward and gradient fit into it, with inputs and outputs
    plain_longest: int | None
    how: str

    def __str__(self) -> str:
        flops = (human(x, ("", "k", "M", "G", "T", "P", "E"), 1000) for x in (self.flops, self.flops + self.gradient_flops))
        rows = [
            ("temporary memory", "forward", "forward + gradient"),
            ("memeff" if self.compiled else "memeff, about", human(self.forward_bytes), human(self.gradient_bytes)),
            ("plain attention, about", human(self.plain_forward_bytes), human(self.plain_gradient_bytes)),
            ("floating point operations", *flops),
        ]
        lines = [f"{a:26}{b:>12}{c:>22}" for a, b, c in rows]
        if self.memory is not None:
            lines.append(
                f"In {human(self.memory)} fits the gradient of up to about {self.longest} tokens, "
                f"of {self.plain_longest} with plain attention."
            )
        lines.append(EXACT if self.compiled else ABOUT)
        return "\n".join([f'"{self.implementation}" on {self.platform}: {self.how}', *lines])


def check_device(device: Any) -> tuple[Device, int | None]:
    """What it is, and its memory in bytes where that is known, of None (JAX's default), a name or a `jax.Device`."""
    if isinstance(device, str):
        for name, found in DEVICES.items():
            if name.lower() == device.lower():
                return found
        raise ValueError(f"device={device!r} is not known: use one of {', '.join(DEVICES)}, or a jax.Device.")
    device = jax.devices()[0] if device is None else device
    if not isinstance(device, jax.Device):
        raise TypeError(f"device must be one of {', '.join(DEVICES)}, or a jax.Device, got {type(device).__name__}.")
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform  # of one that is described, and not here
    found = Device(platform, getattr(device, "compute_capability", None))
    stats = device.memory_stats() if device in jax.devices() else None
    if stats and "bytes_limit" in stats:
        return found, stats["bytes_limit"]
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        return found, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found, None


def compiles_for(device: Any, found: Device) -> Any:
    """Return the device for which a plan is compiled, of what `check_device` took and found; refuse where there is none."""
    target = device if isinstance(device, jax.Device) else compiling.on_hand(found)
    if target is None:
        raise ValueError(
            f"device={device!r} is not here, and compile=True wants one for which this process can compile: leave compile "
            "away for estimates, or pass device=jax.experimental.topologies.get_topology_desc(...).devices[0]."
        )
    return target


def make(
    problem: Problem, operands: Operands, name: str, device_bytes: int | None, compiled: tuple[int, int] | None = None
) -> Plan:
    """Of what dispatch chose, on `dispatch.platform()`; of `operands` only shapes and dtypes are read.

    `compiled`: bytes of forward and gradient, where they are known.
    """
    (B, T, K, G, H), (_, S, _, D), platform = operands.query.shape, operands.value.shape, dispatch.platform()
    kernels = name == "pallas"
    if kernels:
        problem = dataclasses.replace(problem, chunk_size=pallas.tile(problem, operands))
    visited, total = xla.count_tiles(problem, operands)
    t, c = problem.chunk_size
    logits = B * K * G * min(T * S, t * c * (total if visited is None else visited))
    forward, gradient = compiled or dispatch.temp_bytes(problem, operands, name)
    plain_forward, plain_gradient = memory.plain_bytes(operands, platform)

    def chunked(there: Operands) -> tuple[int, int]:
        return dispatch.temp_bytes(dispatch.choose_tiles(problem, there), there, name)

    def longest(temp_bytes: Callable[[Operands], tuple[int, int]]) -> int | None:
        if T == 0 or device_bytes is None:
            return None
        room = device_bytes
        return _largest(lambda n: memory.held_bytes(there := _at(operands, n)) + max(temp_bytes(there)) <= room)

    return Plan(
        implementation=name,
        platform=platform,
        chunk_size=problem.chunk_size,
        forward_bytes=forward,
        gradient_bytes=gradient,
        compiled=compiled is not None,
        flops=2 * (H + D) * logits,
        gradient_flops=2 * (3 * H + 2 * D) * logits,
        tiles_visited=visited,
        tiles_total=total,
        plain_forward_bytes=plain_forward,
        plain_gradient_bytes=plain_gradient,
        memory=device_bytes,
        longest=longest(chunked),
        plain_longest=longest(lambda there: memory.plain_bytes(there, platform)),
        how=pallas.how(problem, operands) if kernels else xla.how(problem, operands),
    )


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest length that fits, below 2^30; 0 if none does."""
    low, high = 0, 2**30
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _at(operands: Operands, T: int) -> Operands:
    """Shapes of the same call at another length, S in proportion."""
    S = max(1, T * operands.key.shape[1] // operands.query.shape[1])
    along = {"query": {1: T}, "key": {1: S}, "value": {1: S}, "q_segments": {1: T}, "kv_segments": {1: S}}
    both = {3: T, 4: S}

    def resize(x, sizes):
        if x is None:
            return None
        shape = (size if size == 1 else sizes.get(n, size) for n, size in enumerate(x.shape))
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    there = operands._replace(**{name: resize(getattr(operands, name), sizes) for name, sizes in along.items()})
    return there._replace(mask=resize(there.mask, both), terms=there.terms._replace(bias=resize(there.terms.bias, both)))
