"""Report what attention was found in a program, and what was left and why."""

from __future__ import annotations

import dataclasses

from memeff.rewrite.scope import Scope
from memeff.rewrite.versions import source_line


@dataclasses.dataclass(frozen=True)
class Place:
    """Attention that a program writes out."""

    source: str  # "file:line" of the program
    reason: str | None  # why it is left as it is; None: it is replaced
    found: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """What `memeff.find_attention` found. Its `str` is a table."""

    places: tuple[Place, ...]

    @property
    def replaced(self) -> tuple[Place, ...]:
        """Return the places that are replaced."""
        return tuple(x for x in self.places if x.reason is None)

    @property
    def left(self) -> tuple[Place, ...]:
        """Return the places that are left as they are."""
        return tuple(x for x in self.places if x.reason is not None)

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} replaced, {len(self.left)} left"]
        for place in self.places:
            state = "replaced" if place.reason is None else f"left: {place.reason}"
            lines.append(f"{place.source}: {state} {place.found}")
        return "\n".join(lines)


def make_report(scope: Scope) -> Report:
    """Return the report of a scope and of those within it."""
    return Report(tuple(_places(scope)))


def _places(scope: Scope) -> list[Place]:
    places = []
    for replacement in scope.replaced.values():
        recipe = replacement.recipe
        B, N, T, S = recipe.sizes
        parts = [f"B={B} N={N} T={T} S={S}"]
        for name in ("window", "q_offset", "soft_cap", "segments", "mask", "mask_table", "mask_fn",
                     "bias", "bias_table", "score_fn", "empty_rows", "scale"):
            value = getattr(recipe, name)
            if value not in (None, 0, (None, None)):
                parts.append(name if not isinstance(value, (str, float, tuple)) else f"{name}={value}")
        places.append(Place(source_line(replacement.match.second.eqn), None, " ".join(parts)))
    for left in scope.left:
        places.append(Place(source_line(left.equation.eqn), left.reason))
    for inner in scope.inner.values():
        for x in inner:
            places.extend(_places(x))
    return places
