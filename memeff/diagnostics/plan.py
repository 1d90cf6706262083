"""Say what a call will cost before it runs.

That is memory, floating point operations, tiles, and the longest sequence that fits.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Unpack

import jax

from memeff import compiling, dispatch, memory_model, pallas, sharding, tile_sizes
from memeff.arguments import AttentionKwargs
from memeff.call import request_of, run_attention
from memeff.chunked.schedule import count_tiles
from memeff.device import Device, current_device, current_platform, device_of, pretend_device
from memeff.diagnostics.bind import (
    bind_arguments,
    prepare_shapes,
    prepare_sharded_shapes,
    refuse_sharded,
)
from memeff.implementations import Chosen, Request, module_for
from memeff.inputs import check_bool, kind_of, refuse_symbolic, text_of
from memeff.problem import Operands, map_operands
from memeff.sequence.choose import explain_plan
from memeff.units import format_bytes, parse_bytes

# Each device with its memory in bytes, as its maker states it.
DEVICES = {
    "cpu": (Device("cpu"), None),
    "gpu": (Device("gpu"), None),
    "tpu": (Device("tpu"), None),
    "A100": (Device("gpu", "8.0"), 80 * 10**9),
    "H100": (Device("gpu", "9.0"), 80 * 10**9),
    "H200": (Device("gpu", "9.0"), 141 * 10**9),
    "B200": (Device("gpu", "10.0"), 180 * 10**9),
    "v4": (Device("tpu"), 32 * 10**9),
    "v5e": (Device("tpu"), 16 * 10**9),
    "v5p": (Device("tpu"), 95 * 10**9),
    "v6e": (Device("tpu"), 32 * 10**9),
}

# Of 72 random calls of every feature (tests/drawn.py; CPU, jax 0.10.2) XLA reported 0.36 to 2.53
# times the estimate, of 60 of them 0.59 to 1.6 times; above a MiB at most 1.85 times.
ABOUT = (
    "Bytes are estimates, mostly between half and twice what XLA reports; compile=True gives what "
    "XLA reports for memeff."
)
EXACT = "memeff's bytes are those of the compiled call; the others and the lengths are estimates."


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cost of a call, as `memeff.plan` returns it. Its `str` is a table.

    Bytes are temporary memory at the peak of the call, beyond inputs and outputs. The inputs of a
    gradient are the arguments and the cotangents. Its outputs are the results of the forward and
    the gradients of every float.

    Attributes:
      implementation: "xla", "pallas" or "reference".
      platform: "cpu", "gpu" or "tpu".
      chunk_size: rows and columns of a tile; `how` names larger tiles of a forward on GPUs.
      forward_bytes: bytes of the forward.
      gradient_bytes: bytes of forward and gradient in one call.
      compiled: True if XLA reported these two; False if they are estimates.
      flops: floating point operations of the products of one forward, on the visited tiles.
      gradient_flops: those of one gradient without the forward.
      tiles_visited: tiles that are visited, the same for all heads; None if bounds are known only
        at run time, and then all tiles count.
      tiles_total: all tiles of rows and columns.
      plain_forward_bytes, plain_gradient_bytes: an estimate for plain attention, which stores T x S
        logits.
      memory: bytes of the device, or those that were passed as `memory`; None if not known.
      longest: an estimate of the largest T whose forward and gradient fit into `memory`, with
        inputs and outputs.
      plain_longest: the same for plain attention.
      how: how the implementation runs the call, in words.
    """

    implementation: str
    platform: str
    chunk_size: tuple[int, int]
    forward_bytes: int
    gradient_bytes: int
    compiled: bool
    flops: int
    gradient_flops: int
    tiles_visited: int | None
    tiles_total: int
    plain_forward_bytes: int
    plain_gradient_bytes: int
    memory: int | None
    longest: int | None
    plain_longest: int | None
    how: str

    def __str__(self) -> str:
        def flops(count: int) -> str:
            return format_bytes(count, ("", "k", "M", "G", "T", "P", "E"), 1000)

        def line(title: str, forward: str, both: str) -> str:
            return f"{title:26}{forward:>12}{both:>22}"

        ours = "memeff" if self.compiled else "memeff, about"
        plain = "plain attention, about"
        plain_bytes = self.plain_forward_bytes, self.plain_gradient_bytes
        both_flops = self.flops + self.gradient_flops
        lines = [
            f'"{self.implementation}" on {self.platform}: {self.how}',
            line("temporary memory", "forward", "forward + gradient"),
            line(ours, format_bytes(self.forward_bytes), format_bytes(self.gradient_bytes)),
            line(plain, *map(format_bytes, plain_bytes)),
            line("floating point operations", flops(self.flops), flops(both_flops)),
        ]
        if self.memory is not None and self.longest is not None:
            lines.append(
                f"{format_bytes(self.memory)} hold the gradient of up to about {self.longest} "
                f"tokens; with plain attention, of {self.plain_longest}."
            )
        lines.append(EXACT if self.compiled else ABOUT)
        return "\n".join(lines)


def check_device(device: Any, query: Any) -> tuple[Device, int | None]:
    """Return the device that the user means, and its memory in bytes where it is known.

    The user gives None (where a call with `query` would run), a name or a `jax.Device`.
    """
    if isinstance(device, str):
        by_name = {name.lower(): row for name, row in DEVICES.items()}
        if device.lower() in by_name:
            return by_name[device.lower()]
        raise ValueError(
            f"device={text_of(device)} is not known: use one of {', '.join(DEVICES)}, or a "
            "jax.Device."
        )
    if device is None:
        default = current_device(query)
        device = compiling.local_device_like(default)
        if device is None:  # a test pretends it
            return default, None
    if not isinstance(device, jax.Device):
        raise TypeError(
            f"device must be one of {', '.join(DEVICES)}, or a jax.Device, got {kind_of(device)}."
        )
    # A device that is only described calls its platform "cuda" or "rocm".
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    known_device = Device(platform, getattr(device, "compute_capability", None))
    stats = device.memory_stats() if device in jax.devices() else None
    if stats and "bytes_limit" in stats:
        return known_device, stats["bytes_limit"]
    if device.platform == "cpu" and hasattr(os, "sysconf"):
        return known_device, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return known_device, None


def compile_target(device: Any, planned_device: Device) -> Any:
    """Return the device for which to compile.

    `device` is the argument, and `planned_device` what `check_device` made of it.
    """
    if isinstance(device, jax.Device):
        return device
    target = compiling.local_device_like(planned_device)
    if target is None:
        raise ValueError(
            f"device={text_of(device)} is not present, and compile=True needs a device for which "
            "this process can compile. Omit `compile` for estimates, or pass "
            "device=jax.experimental.topologies.get_topology_desc(...).devices[0]."
        )
    return target


def make_plan(
    chosen: Chosen,
    operands: Operands,
    device_bytes: int | None,
    compiled: tuple[int, int] | None = None,
) -> Plan:
    """Plan a call that dispatch has chosen, on the current device.

    Of `operands` only shapes and dtypes are read.

    `compiled`: bytes of the forward, and of forward and gradient, if XLA has reported them.
    """
    shape = operands.shape
    platform = current_platform()
    device = current_device(operands.query)
    problem, schedule, _ = chosen
    name = chosen.name
    if name == "pallas":
        family = pallas.family_for(device)
        schedule = dataclasses.replace(schedule, chunk_size=family.tile_shape(problem, operands))
    visited, total = count_tiles(problem, schedule.chunk_size, operands)
    t, c = schedule.chunk_size
    logits = shape.B * shape.N
    logits *= min(shape.T * shape.S, t * c * (total if visited is None else visited))
    forward, gradient = compiled or tile_sizes.temp_bytes(problem, schedule, operands, name)
    plain_forward, plain_gradient = memory_model.quadratic_bytes(operands, platform)

    def chunked_bytes(operands: Operands) -> tuple[int, int]:
        backward = "fused" if schedule.fused_backward else None
        resized = tile_sizes.choose_schedule(problem, operands, Request(backward=backward))
        return tile_sizes.temp_bytes(problem, resized, operands, name)

    def plain_bytes(operands: Operands) -> tuple[int, int]:
        return memory_model.quadratic_bytes(operands, platform)

    return Plan(
        implementation=name,
        platform=platform,
        chunk_size=schedule.chunk_size,
        forward_bytes=forward,
        gradient_bytes=gradient,
        compiled=compiled is not None,
        flops=2 * (shape.H + shape.D) * logits,
        gradient_flops=2 * (3 * shape.H + 2 * shape.D) * logits,
        tiles_visited=visited,
        tiles_total=total,
        plain_forward_bytes=plain_forward,
        plain_gradient_bytes=plain_gradient,
        memory=device_bytes,
        longest=_longest(operands, device_bytes, chunked_bytes),
        plain_longest=_longest(operands, device_bytes, plain_bytes),
        how=module_for("pallas" if name == "pallas" else "xla", device).describe(
            problem, schedule, operands
        ),
    )


def _longest(
    operands: Operands, device_bytes: int | None, temp_bytes: Callable[[Operands], tuple[int, int]]
) -> int | None:
    """Return the longest T below 2^30 that fits into the device, 0 if none does.

    Its inputs, outputs and temporary bytes count.
    """
    if operands.query.shape[1] == 0 or device_bytes is None:
        return None
    longest = 0
    too_long = 2**30
    while too_long - longest > 1:
        length = (longest + too_long) // 2
        resized = _resize(operands, length)
        if memory_model.input_output_bytes(resized) + max(temp_bytes(resized)) <= device_bytes:
            longest = length
        else:
            too_long = length
    return longest


def _resize(operands: Operands, T: int) -> Operands:
    """Return the shapes of the same call at T query tokens, with S in proportion."""
    S = max(1, T * operands.key.shape[1] // operands.query.shape[1])
    lengths = {"t": T, "s": S}

    def resize(x: Any, dims: str) -> jax.ShapeDtypeStruct:
        sizes = zip(dims, x.shape, strict=True)
        shape = tuple(size if size == 1 else lengths.get(dim, size) for dim, size in sizes)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return map_operands(resize, operands)


def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    **kwargs: Unpack[AttentionKwargs],
) -> str:
    """Explain which implementation runs this call and how, and why each other one does not.

    Nothing is computed. For a program that computes products and softmax itself,
    `memeff.find_attention` says what `memeff.replace_attention` would replace.

    Args: those of `dot_product_attention` without `implementation`. An array may be a
      `jax.ShapeDtypeStruct`.

    Raises: as the call itself does.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
      >>> "of 64 visited" in explain(x, x, x, is_causal=True)
      True
    """
    arguments = bind_arguments("explain", query, key, value, bias, mask, **kwargs)
    axes = sharding.sequence_axes(arguments.sequence_axis, arguments.query)
    if axes:
        call = prepare_sharded_shapes(arguments, axes)
        chosen = arguments.context_parallel is None
        return explain_plan(call.plan, call.sizes, call.problem, call.operands, chosen)
    with device_of(arguments.query):
        call = prepare_shapes("explain", arguments)
        return dispatch.explain_choice(call.chosen, call.operands, request_of(arguments))


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
    **kwargs: Unpack[AttentionKwargs],
) -> Plan:
    """Plan a call of `dot_product_attention`: its memory, floating point operations and tiles.

    Nothing is computed or allocated. Bytes are estimates, for most calls between half and twice
    what XLA reports once the call is compiled. On TPUs that holds for calls of the TPU kernels from
    16k tokens on; the estimate for the chunked path is that for GPUs. With `compile` the call is
    compiled, and the bytes are those that XLA reports.

    Args: those of `dot_product_attention` without `implementation`. An array may be a
      `jax.ShapeDtypeStruct`. And:
      device: a name of `memeff.diagnostics.plan.DEVICES` ("cpu", "gpu", "H200"), or a `jax.Device`,
        also one that is only described (by `jax.experimental.topologies`). Default: the device on
        which the call would run.
      memory: bytes, or a text such as "80GiB", into which the longest sequence must fit. Default:
        the memory of the device, where it is known.
      compile: compile forward and gradient, which takes some seconds. The device must be present or
        described.

    Returns: a `Plan`. Print it for a table.

    Raises: as the call itself does; ValueError for an unknown device, or one for which this process
      cannot compile.

    Example:
      >>> import jax
      >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.float32)
      >>> plan(x, x, x, is_causal=True, device="cpu").tiles_visited
      36
    """
    check_bool("compile", compile)
    planned_device, device_bytes = check_device(device, query)
    arguments = bind_arguments("plan", query, key, value, bias, mask, **kwargs)
    refuse_sharded("plan", arguments)
    device_context = device_of(query) if device is None else pretend_device(*planned_device)
    with device_context:
        call = prepare_shapes("plan", arguments)
        shape = call.operands.shape
        refuse_symbolic("memeff.plan", B=shape.B, T=shape.T, S=shape.S)
        compiled = None
        if compile:
            target = compile_target(device, planned_device)
            compiled = compiling.temp_bytes(run_attention, arguments, call.chosen, target)
        device_bytes = parse_bytes("memory", memory) or device_bytes
        return make_plan(call.chosen, call.operands, device_bytes, compiled)
