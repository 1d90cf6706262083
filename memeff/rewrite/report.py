"""Report what attention was found in a program, and what was left and why."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import jax

from memeff.diagnostics.plan import plan
from memeff.rewrite.recipe import Recipe
from memeff.rewrite.scope import Scope
from memeff.rewrite.translate import Replacement
from memeff.rewrite.versions import source_line
from memeff.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Place:
    """Attention that a program writes out: a softmax between two products.

    Bytes are temporary, of forward and gradient of this attention alone. They are `memeff.plan`'s
    estimates: nothing is compiled.
    """

    source: str  # "file:line" of the second product, in the program or in a library
    reason: str | None  # why it is left as it is; None: it is replaced
    sizes: tuple[int, int, int, int] | None = None  # B, N, T, S
    found: tuple[str, ...] = ()  # what memeff's call says: "causal", "bias", ...
    bytes_before: int | None = None
    bytes_after: int | None = None
    # arrays of the program with an element for each pair that the call still reads: name and bytes
    pair_arrays: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.source}\n  left: {self.reason}"
        assert self.sizes is not None
        B, N, T, S = self.sizes
        lines = [f"{self.source}\n  B={B} N={N} T={T} S={S}: {', '.join(self.found)}"]
        if self.bytes_before is not None and self.bytes_after is not None:
            before = format_bytes(self.bytes_before)
            lines.append(f"  temporary memory about {before} -> {format_bytes(self.bytes_after)}")
        for name, size in self.pair_arrays:
            lines.append(f"  a T x S array of the program stays: {name}, {format_bytes(size)}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `memeff.find_attention`. Its `str` is a table."""

    places: tuple[Place, ...]  # a place in a function that is called twice appears twice

    @property
    def replaced(self) -> tuple[Place, ...]:
        """Return the places that are replaced."""
        return tuple(x for x in self.places if x.reason is None)

    @property
    def left(self) -> tuple[Place, ...]:
        """Return the places that are left as they are."""
        return tuple(x for x in self.places if x.reason is not None)

    def __str__(self) -> str:
        if not self.places:
            return NOTHING
        lines = [f"attention: {len(self.replaced)} replaced, {len(self.left)} left as written"]
        for place, count in collections.Counter(self.places).items():
            times = f"{count} times " if count > 1 else ""
            lines.append(f"{times}{place}")
        if self.replaced:
            lines.append(ABOUT_BYTES)
        return "\n".join(lines)


ABOUT_BYTES = (
    "Bytes are the temporary memory of forward and gradient of one attention alone: estimates by "
    "memeff.plan, mostly between half and twice what XLA allocates."
)


NOTHING = (
    "no attention found: there is no softmax between two products of arrays. Attention that a "
    "kernel or an exported function computes is not visible."
)


def make_report(scope: Scope) -> Report:
    """Return the report of a scope and of those within it."""
    places = []
    known: dict[Any, Place] = {}
    for part in scope.scopes:
        for replacement in part.replacements:
            source = source_line(replacement.match.second.eqn)
            key = source, replacement.recipe
            if key not in known:
                known[key] = _describe(source, replacement)
            places.append(known[key])
        for left in part.left:
            places.append(Place(source_line(left.eqn), left.reason))
    return Report(tuple(places))


def _describe(source: str, replacement: Replacement) -> Place:
    """Return the place of a replacement."""
    recipe = replacement.recipe
    before, after = _bytes(replacement)
    arrays = []
    for name, value in replacement.pair_arrays:
        arrays.append((name, math.prod(value.shape) * value.dtype.itemsize))
    return Place(source, None, recipe.sizes, tuple(_words(recipe)), before, after, tuple(arrays))


def _bytes(replacement: Replacement) -> tuple[int, int]:
    """Return the temporary bytes of forward and gradient before and after, as `plan` estimates."""
    recipe = replacement.recipe
    results = []

    def call(*inputs):
        query, key, value = recipe.operands(list(inputs))
        results.append(plan(query, key, value, **recipe.keywords(list(inputs))))
        return query

    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in replacement.inputs]
    jax.eval_shape(call, *shapes)
    (estimate,) = results
    return estimate.plain_gradient_bytes, estimate.gradient_bytes


def _words(recipe: Recipe) -> list[str]:
    """Return what the call of a recipe says, in words."""
    words = []
    if len(recipe.queries) > 1:
        words.append(f"a sum of {len(recipe.queries)} products")
    left, right = recipe.window
    offset = f" from position {recipe.q_offset}" if recipe.q_offset else ""
    if (left, right) == (None, 0):
        words.append(f"causal{offset}")
    elif recipe.window != (None, None):
        words.append(f"window ({left}, {right}){offset}")
    names = {
        "segments": "segments",
        "mask": "an array as mask",
        "mask_table": "mask of queries or keys",
        "mask_fn": "mask_fn",
        "bias": "an array as bias",
        "bias_table": "bias of queries or keys",
        "score_fn": "score_fn",
        "sink": "sinks",
        "dropout": "dropout",
        "if_some_row_is_empty": "all logits as numbers if some row sees no key",
    }
    words.extend(text for name, text in names.items() if getattr(recipe, name) is not None)
    if recipe.empty_rows == "mean":
        words.append("rows that see no key give the mean of the values")
    if recipe.soft_cap is not None:
        words.append(f"soft cap {recipe.soft_cap:g}")
    words.append("traced scale" if recipe.scales else f"scale {recipe.scale:.6g}")
    words.append(recipe.dtype)
    return words
