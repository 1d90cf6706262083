"""Choose the implementation that runs a call, and explain why each other one does not."""

from memeff import pallas
from memeff.chunked import implementation as chunked
from memeff.device import current_device, current_platform
from memeff.implementations import (
    IMPLEMENTATIONS,
    Chosen,
    Compiled,
    Request,
    module_for,
    why_not,
)
from memeff.problem import Operands, Problem
from memeff.tile_sizes import choose_schedule, try_schedules
from memeff.warn import warn_once


def choose_implementation(
    problem: Problem,
    operands: Operands,
    request: Request,
    compiled: Compiled | None = None,
    *,
    warn: bool = True,
) -> Chosen:
    """Return the implementation that runs this call, and its schedule.

    Raises: NotImplementedError if the requested implementation or backward cannot run the call.
    """
    device = current_device(operands.query)
    fused = request.backward == "fused"
    name = "pallas" if fused and request.implementation is None else request.implementation
    if name is None:
        name = _fastest_implementation(problem, operands, request, compiled, warn)
    reason = why_not(name, problem, operands, request)
    if reason is not None:
        asked = f'implementation="{name}"' if request.implementation else 'backward="fused"'
        cure = 'Use implementation=None to let memeff choose, or "xla", which always runs.'
        if fused:
            cure = "Omit `backward`."
        raise NotImplementedError(f"{asked} cannot run this call: {reason}. {cure}")
    if request.backward == "fastest" and name == "pallas":
        if pallas.family_for(device).fused_is_faster(problem, operands):
            in_one = request._replace(backward="fused")
            schedule, _, _ = try_schedules(problem, operands, in_one, "pallas", compiled)
            if schedule is not None:
                request = in_one
    schedule = choose_schedule(problem, operands, request, name, compiled)
    return Chosen(problem, schedule, module_for(name, device))


def _fastest_implementation(
    problem: Problem,
    operands: Operands,
    request: Request,
    compiled: Compiled | None,
    warn: bool,
) -> str:
    """Return "pallas" if kernels can run the call, are faster and keep to the limit; else "xla".

    With `warn`, warn once if kernels for this device do not support the call.
    """
    device = current_device(operands.query)
    family = pallas.family_for(device)
    reason = why_not("pallas", problem, operands, request)
    if reason is None:
        if family.slower(problem, operands) is not None:
            return "xla"
        tiles, kernel_bytes, _ = try_schedules(problem, operands, request, "pallas", compiled)
        if tiles is not None:
            return "pallas"
        tiles, chunked_bytes, _ = try_schedules(problem, operands, request, "xla", compiled)
        # if neither keeps to the limit, the error names the lower one that suffices
        return "pallas" if tiles is None and kernel_bytes < chunked_bytes else "xla"
    half = operands.query.dtype.itemsize == 2
    default_tiles = request.chunk_size == (None, None)
    if half and default_tiles and family.for_device(device) is None and warn:
        warn_once(
            reason,
            'memeff: using the chunked path (implementation="xla") instead of the '
            f"{device.platform.upper()}'s kernels, "
            f"because {reason}.",
        )
    return "xla"


def explain_choice(chosen: Chosen, operands: Operands, request: Request) -> str:
    """Explain in words what runs a call, and why every other implementation does not."""
    problem = chosen.problem
    shape = operands.shape
    family = pallas.family_for(current_device(operands.query))
    describe = family.describe if chosen.name == "pallas" else chunked.describe
    description = describe(problem, chosen.schedule, operands)
    lines = [f'"{chosen.name}" runs this call on {current_platform()}: {description}.']
    drawbacks: dict[str, str | None] = {
        "reference": f"needs quadratic memory ({shape.B * shape.N} x {shape.T} x {shape.S} logits)",
        "xla": "expected to be slower",
    }
    for name in IMPLEMENTATIONS:
        if name == chosen.name:
            continue
        reason = why_not(name, problem, operands, request)
        if reason is None and name == "pallas":
            drawbacks[name] = family.slower(problem, operands)
            if drawbacks[name] is None:
                reason = "the kernels need more than memory_limit"
        if reason is None:
            reason = f'available with implementation="{name}"; {drawbacks[name]}'
        lines.append(f'"{name}": {reason}.')
    return "\n".join(lines)
