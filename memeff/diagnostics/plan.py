"""What a call will take, before it runs: memory, products, tiles, and how long its sequence may become."""

import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any

import jax

from memeff import compiling, dispatch, implementations, memory_model, pallas, tile_sizes
from memeff.attention import dot_product_attention
from memeff.call import run_attention
from memeff.chunked import schedule
from memeff.chunked.implementation import describe
from memeff.device import Device, current_device, current_platform, pretend_device
from memeff.diagnostics.arguments import dispatched_call
from memeff.problem import Operands, Problem
from memeff.units import format_bytes, parse_bytes

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


# Of 72 random calls of every feature (tests/drawn.py; CPU, jax 0.10.2) XLA reported 0.36 to 2.53
# times the estimate, of 60 of them 0.59 to 1.6 times; above a MiB at most 1.85 times.
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
    # rows and columns of a tile (on GPUs a forward may take larger ones: see the text)
    chunk_size: tuple[int, int]
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
        flops = (
            format_bytes(x, ("", "k", "M", "G", "T", "P", "E"), 1000)
            for x in (self.flops, self.flops + self.gradient_flops)
        )
        rows = [
            ("temporary memory", "forward", "forward + gradient"),
            (
                "memeff" if self.compiled else "memeff, about",
                format_bytes(self.forward_bytes),
                format_bytes(self.gradient_bytes),
            ),
            (
                "plain attention, about",
                format_bytes(self.plain_forward_bytes),
                format_bytes(self.plain_gradient_bytes),
            ),
            ("floating point operations", *flops),
        ]
        lines = [f"{a:26}{b:>12}{c:>22}" for a, b, c in rows]
        if self.memory is not None:
            lines.append(
                f"In {format_bytes(self.memory)} fits the gradient of up to about {self.longest} tokens, "
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
        raise ValueError(
            f"device={device!r} is not known: use one of {', '.join(DEVICES)}, or a jax.Device."
        )
    device = jax.devices()[0] if device is None else device
    if not isinstance(device, jax.Device):
        raise TypeError(
            f"device must be one of {', '.join(DEVICES)}, or a jax.Device, got {type(device).__name__}."
        )
    # of one that is described, and not here
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    found = Device(platform, getattr(device, "compute_capability", None))
    stats = device.memory_stats() if device in jax.devices() else None
    if stats and "bytes_limit" in stats:
        return found, stats["bytes_limit"]
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        return found, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return found, None


def compile_target(device: Any, found: Device) -> Any:
    """Return the device for which a plan is compiled, of what `check_device` took and found; refuse where there is none."""
    target = device if isinstance(device, jax.Device) else compiling.local_device_like(found)
    if target is None:
        raise ValueError(
            f"device={device!r} is not here, and compile=True wants one for which this process can compile: leave compile "
            "away for estimates, or pass device=jax.experimental.topologies.get_topology_desc(...).devices[0]."
        )
    return target


def make_plan(
    problem: Problem,
    operands: Operands,
    name: str,
    device_bytes: int | None,
    compiled: tuple[int, int] | None = None,
) -> Plan:
    """Of what dispatch chose, on `dispatch.platform()`; of `operands` only shapes and dtypes are read.

    `compiled`: bytes of forward and gradient, where they are known.
    """
    (B, T, K, G, H), (_, S, _, D), platform = (
        operands.query.shape,
        operands.value.shape,
        current_platform(),
    )
    kernels = name == "pallas"
    family = pallas.family_for(current_device(operands.query))
    if kernels:
        problem = dataclasses.replace(problem, chunk_size=family.tile_shape(problem, operands))
    visited, total = schedule.count_tiles(problem, operands)
    t, c = problem.chunk_size
    logits = B * K * G * min(T * S, t * c * (total if visited is None else visited))
    forward, gradient = compiled or tile_sizes.temp_bytes(problem, operands, name)
    plain_forward, plain_gradient = memory_model.quadratic_bytes(operands, platform)

    def chunked(there: Operands) -> tuple[int, int]:
        return tile_sizes.temp_bytes(tile_sizes.choose_tiles(problem, there), there, name)

    def longest(temp_bytes: Callable[[Operands], tuple[int, int]]) -> int | None:
        if T == 0 or device_bytes is None:
            return None
        room = device_bytes
        return _largest(
            lambda n: (
                memory_model.input_output_bytes(there := _at(operands, n)) + max(temp_bytes(there))
                <= room
            )
        )

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
        plain_longest=longest(lambda there: memory_model.quadratic_bytes(there, platform)),
        how=family.describe(problem, operands) if kernels else describe(problem, operands),
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
    along = {
        "query": {1: T},
        "key": {1: S},
        "value": {1: S},
        "q_segments": {1: T},
        "kv_segments": {1: S},
    }
    both = {3: T, 4: S}

    def resize(x, sizes):
        if x is None:
            return None
        shape = (size if size == 1 else sizes.get(n, size) for n, size in enumerate(x.shape))
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

    there = operands._replace(
        **{name: resize(getattr(operands, name), sizes) for name, sizes in along.items()}
    )
    return there._replace(
        mask=resize(there.mask, both),
        terms=there.terms._replace(bias=resize(there.terms.bias, both)),
    )


def explain(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, **how: Any
) -> str:
    """Which implementation runs this call of `dot_product_attention`, how, and why each other one does not.

    Nothing is computed.

    Args: those of `dot_product_attention` but `implementation`; for any array also a `jax.ShapeDtypeStruct`.

    Raises: as the call itself does.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
      >>> "of 64 visited" in explain(x, x, x, is_causal=True)
      True
    """
    return dispatch.explain_choice(
        *dispatched_call(
            "explain", dict(query=query, key=key, value=value, bias=bias, mask=mask, **how)
        )
    )


def plan(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    device: Any = None,
    memory: Any = None,
    compile: bool = False,
    **how: Any,
) -> Plan:
    """What this call of `dot_product_attention` will take: memory, floating point operations, tiles; print it for a table.

    Nothing is computed or allocated. Bytes are estimates, for most calls between half and twice what XLA reports once
    the call is compiled; on TPUs they are told by the rule for GPUs, which nobody has checked there. With `compile` the
    call is compiled, and bytes are what XLA reports.

    Args: those of `dot_product_attention` but `implementation`; for any array also a `jax.ShapeDtypeStruct`. And:
      device: a name of `memeff.planning.DEVICES` ("cpu", "gpu", "H200"), or a `jax.Device`, also one that is described alone
        (of `jax.experimental.topologies`). Default: JAX's first.
      memory: bytes, or a text such as "80GiB", in which the longest sequence is to fit. Default: the device's, where known.
      compile: compile forward and gradient, some seconds; the device must be here, or described.

    Raises: as the call itself does; ValueError for a device that is not known, or for which nothing can be compiled here.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
      >>> plan(x, x, x, is_causal=True, device="cpu").tiles_visited
      36
    """
    on, has = check_device(device)
    given = dict(query=query, key=key, value=value, bias=bias, mask=mask, **how)
    with pretend_device(*on):
        chosen = dispatched_call("plan", given)
        found = _bytes_as_compiled(given, chosen, device, on) if compile else None
        return make_plan(*chosen, parse_bytes("memory", memory) or has, found)


def _bytes_as_compiled(
    given: dict[str, Any], chosen: tuple[Problem, Operands, str], device: Any, on: Device
):
    """What XLA says of a call that `_dispatched` found."""
    problem, _, name = chosen
    bound = inspect.signature(dot_product_attention).bind(**given)
    bound.apply_defaults()
    target = compile_target(device, on)
    return compiling.temp_bytes(
        run_attention,
        bound.arguments,
        implementations.Chosen(problem, implementations.module_for(name, on)),
        target,
    )
