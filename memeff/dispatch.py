"""Choose the implementation that runs a call, and explain why each other one does not."""

import dataclasses
import functools
import warnings

from memeff import pallas
from memeff.chunked import implementation as chunked
from memeff.device import current_device, current_platform
from memeff.implementations import IMPLEMENTATIONS, Chosen, Compiled, module_for, why_not
from memeff.problem import Operands, Problem
from memeff.tile_sizes import choose_tiles, try_tiles


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
    """The implementation that runs this call, and the problem with its tiles.

    Refuses a request that cannot be met. `chunks` and `limit` are the call's `chunk_size` and `memory_limit` in bytes.
    """
    device = current_device(operands.query)
    family = pallas.family_for(device)
    fused, fastest = problem.backward == "fused", problem.backward == "fastest"
    if fastest:
        problem = dataclasses.replace(problem, backward=None)
    choose = functools.partial(
        try_tiles, operands=operands, requested=chunks, limit=limit, compiled=compiled
    )
    name = requested or ("pallas" if fused else None)
    if name is None:
        against = why_not("pallas", problem, operands, chunks)
        kernels = against is None and family.slower(problem, operands) is None
        name = (
            "pallas"
            if kernels and choose(problem, implementation="pallas")[0] is not None
            else "xla"
        )
        expected = operands.query.dtype.itemsize == 2 and chunks == (None, None) and warn
        if against is not None and expected and family.for_device(device) is None:
            _warn_once(against)
    reason = why_not(name, problem, operands, chunks)
    if reason is not None:
        cure = 'Use implementation=None to let memeff choose, or "xla", which always runs.'
        cure = "Leave backward away." if fused else cure
        asked = f'implementation="{name}"' if requested else 'backward="fused"'
        raise NotImplementedError(f"{asked} cannot run this call: {reason}. {cure}")
    if fastest and name == "pallas" and family.fused_is_faster(problem, operands):
        one = dataclasses.replace(problem, backward="fused")
        problem = one if choose(one, implementation="pallas")[0] is not None else problem
    problem = choose_tiles(problem, operands, chunks, limit, name, compiled)
    return Chosen(problem, module_for(name, device))


def _warn_once(reason: str) -> None:
    """Once for each reason: that something faster than what runs was there."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f'memeff: kernels are for this device, but implementation="xla" runs: {reason}.',
            stacklevel=6,
        )


_warned: set[str] = set()


def explain_choice(problem: Problem, operands: Operands, chosen: str) -> str:
    """What runs a call that left the choice to memeff, how, and why every other implementation does not."""
    (B, T, K, G, _), S = operands.query.shape, operands.key.shape[1]
    family = pallas.family_for(current_device(operands.query))
    how = family.describe if chosen == "pallas" else chunked.describe
    lines = [f'"{chosen}" runs this call on {current_platform()}: {how(problem, operands)}.']
    by_name = {
        "reference": f"could, if asked for by name, in quadratic memory ({B * K * G} x {T} x {S} logits)",
        "xla": "could, if asked for by name: slower here",
        "pallas": f"could, if asked for by name: {family.slower(problem, operands)}",
    }
    others = (name for name in IMPLEMENTATIONS if name != chosen)
    lines += [f'"{name}": {why_not(name, problem, operands) or by_name[name]}.' for name in others]
    return "\n".join(lines)
