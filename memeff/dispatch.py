"""Choose the implementation that runs a call, and explain why each other one does not."""

import dataclasses

from memeff import pallas
from memeff.chunked import implementation as chunked
from memeff.device import current_device, current_platform
from memeff.implementations import IMPLEMENTATIONS, Chosen, Compiled, module_for, why_not
from memeff.problem import Operands, Problem
from memeff.tile_sizes import choose_tiles, try_tiles
from memeff.warn import warn_once


def choose_implementation(
    problem: Problem,
    operands: Operands,
    requested: str | None,
    chunks: tuple[int | None, int | None] = (None, None),
    limit: int | None = None,
    compiled: Compiled | None = None,
    *,
    warn: bool = True,
) -> Chosen:
    """Return the implementation that runs this call, and the problem with its tiles.

    `chunks` and `limit` are the call's `chunk_size` and its `memory_limit` in bytes.

    Raises: NotImplementedError if the `requested` implementation or backward cannot run the call.
    """
    device = current_device(operands.query)
    fused = problem.backward == "fused"
    fastest = problem.backward == "fastest"
    if fastest:
        problem = dataclasses.replace(problem, backward=None)
    name = requested or ("pallas" if fused else None)
    if name is None:
        name = _fastest_implementation(problem, operands, chunks, limit, compiled, warn)
    reason = why_not(name, problem, operands, chunks)
    if reason is not None:
        asked = f'implementation="{name}"' if requested else 'backward="fused"'
        cure = 'Use implementation=None to let memeff choose, or "xla", which always runs.'
        if fused:
            cure = "Omit `backward`."
        raise NotImplementedError(f"{asked} cannot run this call: {reason}. {cure}")
    if fastest and name == "pallas":
        if pallas.family_for(device).fused_is_faster(problem, operands):
            in_one = dataclasses.replace(problem, backward="fused")
            if _kernels_fit(in_one, operands, chunks, limit, compiled):
                problem = in_one
    problem = choose_tiles(problem, operands, chunks, limit, name, compiled)
    return Chosen(problem, module_for(name, device))


def _fastest_implementation(problem, operands, chunks, limit, compiled, warn: bool) -> str:
    """Return "pallas" if kernels can run this call, are faster and keep to `limit`; else "xla", and `warn`."""
    device = current_device(operands.query)
    family = pallas.family_for(device)
    reason = why_not("pallas", problem, operands, chunks)
    if reason is None:
        if family.slower(problem, operands) is not None:
            return "xla"
        return "pallas" if _kernels_fit(problem, operands, chunks, limit, compiled) else "xla"
    half = operands.query.dtype.itemsize == 2
    kernels_expected = half and chunks == (None, None) and family.for_device(device) is None
    if kernels_expected and warn:
        warn_once(
            reason,
            'memeff: using the chunked path (implementation="xla") instead of the GPU\'s kernels, '
            f"because {reason}.",
        )
    return "xla"


def _kernels_fit(problem, operands, chunks, limit, compiled) -> bool:
    """Return True if the kernels keep to the memory limit."""
    tiled, _, _ = try_tiles(problem, operands, chunks, limit, "pallas", compiled)
    return tiled is not None


def explain_choice(problem: Problem, operands: Operands, chosen: str) -> str:
    """Return in words what runs a call, and why every other implementation does not."""
    (B, T, K, G, _), S = operands.query.shape, operands.key.shape[1]
    family = pallas.family_for(current_device(operands.query))
    describe = family.describe if chosen == "pallas" else chunked.describe
    lines = [f'"{chosen}" runs this call on {current_platform()}: {describe(problem, operands)}.']
    drawbacks = {
        "reference": f"needs quadratic memory ({B * K * G} x {T} x {S} logits)",
        "xla": "slower for this call",
        "pallas": family.slower(problem, operands),
    }
    for name in IMPLEMENTATIONS:
        if name == chosen:
            continue
        reason = why_not(name, problem, operands)
        if reason is None:
            reason = f'available with implementation="{name}"; {drawbacks[name]}'
        lines.append(f'"{name}": {reason}.')
    return "\n".join(lines)
