"""Describe one replaced attention as plain data, and run it.

A recipe names no array of the program, so equal layers have equal recipes, and JAX traces the call
of each recipe once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.attention import dot_product_attention
from memeff.problem import sum_dtype
from memeff.rewrite.element_function import ElementFunction, raised, tabulate


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Bring an array into another shape: slice, split axes, transpose, broadcast, merge axes."""

    slices: tuple[tuple[int, int, int] | None, ...]  # of each dim: start, stride, count
    split: tuple[int, ...]
    order: tuple[int, ...]
    with_ones: tuple[int, ...]  # axes that the array lacks have size 1
    broadcast: tuple[int, ...]
    merged: tuple[int, ...]

    def __call__(self, x: Array) -> Array:
        for d, cut in enumerate(self.slices):
            if cut is not None:
                start, stride, count = cut
                x = lax.slice_in_dim(x, start, start + stride * (count - 1) + 1, stride, d)
        x = x.reshape(self.split).transpose(self.order).reshape(self.with_ones)
        if self.broadcast != self.with_ones and jnp.issubdtype(x.dtype, jnp.floating):
            # the gradient of what is repeated is a sum
            wide = x.astype(sum_dtype(x.dtype))
            x = jnp.broadcast_to(wide, self.broadcast).astype(x.dtype)
        return jnp.broadcast_to(x, self.broadcast).reshape(self.merged)


@dataclasses.dataclass(frozen=True)
class Argument:
    """An array of the program: its number among the inputs, and how it is arranged."""

    number: int
    arrangement: Arrangement
    factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class PairFunction:
    """A function of pairs, and the numbers of the inputs that are its params."""

    function: ElementFunction
    numbers: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of the probabilities."""

    key_number: int  # of the key among the inputs
    rate: float
    is_shared: bool  # one mask for all batch entries and heads


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A call of `dot_product_attention` in place of equations of a program."""

    queries: tuple[Argument, ...]  # [*leads, T, N, H], to be joined along H
    keys: tuple[Argument, ...]  # [*leads, S, K, H], to be joined along H
    value: Argument  # [*leads, S, K, D]
    dtype: str  # of the call
    sizes: tuple[int, int, int, int]  # B, N, T, S
    leads: tuple[int, ...]
    scale: float
    scales: tuple[tuple[str, Argument], ...]  # "mul" or "div" by a scalar
    soft_cap: float | None
    window: tuple[int | None, int | None]
    q_offset: int
    segments: tuple[Argument, Argument] | None
    mask: Argument | None  # an array of the program, True = may attend
    mask_is_hidden: bool  # True = may not attend
    mask_table: PairFunction | None  # a small mask that is computed once
    mask_fn: PairFunction | None
    bias: Argument | None
    bias_table: PairFunction | None  # a small bias that is computed once
    score_fn: PairFunction | None
    empty_rows: str | None  # "mean" of all values, or "nan"; None: 0, or no row is empty
    nan_is_zero: bool  # a row with a NaN among its logits gives 0
    sink: Argument | None  # [N]
    # what to run if some row sees no key with a logit above `lowest`
    if_some_row_is_empty: Recipe | None = dataclasses.field(default=None, kw_only=True)
    lowest: float = dataclasses.field(default=-math.inf, kw_only=True)
    # whether no row is empty unless some bias is at most `lowest`
    bias_decides: bool = dataclasses.field(default=False, kw_only=True)
    # where this is false, the logit is `low`
    visible: PairFunction | None = dataclasses.field(default=None, kw_only=True)
    low: float = dataclasses.field(default=-math.inf, kw_only=True)
    # of the output, the outermost first: "mul" or "div" by one column, or rows to "keep" or "drop"
    factors: tuple[tuple[str, Argument], ...]
    factor: float  # of the output
    dropout: Dropout | None
    precision: Any
    out: Arrangement
    out_dtype: str

    @property
    def empty_rows_are_zero(self) -> bool:
        """Return True if a row whose logits are all -inf gives 0, or if there is none."""
        last = self.if_some_row_is_empty or self
        return last.empty_rows is None

    def keywords(self, inputs: list[Array], bias: Array | None = None) -> dict[str, Any]:
        """Return the arguments of the call besides query, key and value.

        `bias` is that of the recipe, if it is computed already.
        """
        keywords: dict[str, Any] = {"scale": self._scale(inputs), "precision": self.precision}
        left, right = self.window
        if (left, right) == (None, 0):
            keywords["is_causal"] = True
        elif self.window != (None, None):
            keywords["local_window_size"] = self.window
        if self.q_offset:
            keywords["q_offset"] = self.q_offset
        if self.soft_cap is not None:
            keywords["logits_soft_cap"] = self.soft_cap
        if self.segments is not None:
            query_ids, key_ids = (self.array(x, inputs) for x in self.segments)
            keywords["query_segment_ids"] = query_ids
            keywords["key_value_segment_ids"] = key_ids
        if self.dropout is not None:
            keywords["dropout_rng"] = inputs[self.dropout.key_number]
            keywords["dropout_rate"] = self.dropout.rate
            keywords["broadcast_dropout"] = self.dropout.is_shared
        mask = self._mask(inputs)
        if mask is not None:
            keywords["mask"] = mask
        if self.sink is not None:
            keywords["sinks"] = self.sinks(inputs)
        bias = self._bias(inputs) if bias is None else bias
        if bias is not None:
            keywords["bias"] = bias
        if self.visible is not None and bias is not None:
            low = max(self.low, float(jnp.finfo(bias.dtype).min) / 2)  # below, memeff hides the key
            keywords["bias"] = jnp.where(self._table(self.visible, inputs), bias, low)
            keywords["score_fn"] = _ScoreOfVisible(self.visible.function)
            keywords["score_params"] = [inputs[n] for n in self.visible.numbers]
        for name, pair_function in (("score", self.score_fn), ("mask", self.mask_fn)):
            if pair_function is not None:
                keywords[f"{name}_fn"] = pair_function.function
                keywords[f"{name}_params"] = [inputs[n] for n in pair_function.numbers]
        return keywords

    def operands(self, inputs: list[Array]) -> list[Array]:
        """Return query, key and value as the call takes them."""
        operands = []
        for arguments in (self.queries, self.keys, (self.value,)):
            parts = []
            for x in arguments:
                part = self.array(x, inputs).astype(self.dtype)
                parts.append(part if x.factor == 1 else part * x.factor)
            operands.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts, -1))
        return operands

    def sinks(self, inputs: list[Array]) -> Array:
        """Return the sinks [N]; without a sink, -inf."""
        if self.sink is None:
            return jnp.full(self.sizes[1], -jnp.inf)
        return self.array(self.sink, inputs) * self.sink.factor

    def array(self, argument: Argument, inputs: list[Array]) -> Array:
        return argument.arrangement(inputs[argument.number])

    def _scale(self, inputs: list[Array]) -> Any:
        scale: Any = self.scale
        for operation, argument in self.scales:
            x = self.array(argument, inputs).astype(sum_dtype(self.dtype))
            scale = scale * x if operation == "mul" else scale / x
        return scale

    def _table(self, pair_function: PairFunction, inputs: list[Array]) -> Array:
        """Return the results of a function of positions, [*leads|1, N|1, T|1, S|1]."""
        leaves = [inputs[n] for n in pair_function.numbers]
        table = tabulate(pair_function.function, self.sizes, leaves)
        if table.shape[0] == 1:
            leads = (1,) * len(self.leads)
        else:
            leads = self.leads
        return table.reshape(*leads, *table.shape[1:])

    def _mask(self, inputs: list[Array]) -> Array | None:
        mask = None
        if self.mask is not None:
            mask = self.array(self.mask, inputs)
            mask = ~mask if self.mask_is_hidden else mask
        if self.mask_table is not None:
            mask = self._table(self.mask_table, inputs)
        return mask

    def _bias(self, inputs: list[Array]) -> Array | None:
        """Return the bias. Its finite numbers must not count as hidden, as they do in memeff."""
        if self.bias is not None:
            bias = self.array(self.bias, inputs)
            bias = bias if self.bias.factor == 1 else bias * self.bias.factor
        elif self.bias_table is not None:
            bias = self._table(self.bias_table, inputs)
        else:
            return None
        return raised(bias)


@dataclasses.dataclass(frozen=True)
class _ScoreOfVisible:
    """A score_fn: the score of visible pairs, and 0 of hidden ones."""

    visible: ElementFunction

    def __call__(self, score: Array, *pair: Any) -> Array:
        return jnp.where(self.visible(*pair), score, 0)


@functools.partial(jax.jit, static_argnums=0)
def run_recipe(recipe: Recipe, inputs: list[Array]) -> Array:
    """Return what the replaced equations would return."""
    out = attend(recipe, inputs)
    out = out.astype(sum_dtype(out.dtype))  # the gradient of a factor is a sum of many products
    out = out if recipe.factor == 1 else out * recipe.factor
    for operation, argument in reversed(recipe.factors):
        factor = recipe.array(argument, inputs)
        if operation in ("keep", "drop"):
            out = jnp.where(factor == (operation == "keep"), out, 0)
        elif operation == "mul":
            out = out * factor.astype(out.dtype)
        else:
            out = out / factor.astype(out.dtype)
    return recipe.out(out).astype(recipe.out_dtype)


def attend(recipe: Recipe, inputs: list[Array], bias: Array | None = None) -> Array:
    """Return the output of attention, [*leads, T, N, D].

    `bias` is that of the recipe, if it is computed already.
    """
    query, key, value = recipe.operands(inputs)
    keywords = recipe.keywords(inputs, bias)
    exact = recipe.if_some_row_is_empty
    if exact is not None and recipe.bias_decides:
        # Both calls in one branch: after a call the backward would hold two gradients of the bias.
        bias = keywords["bias"]
        assert bias is not None
        shared = bias if exact.bias == recipe.bias else None
        return lax.cond(
            (bias <= recipe.lowest).any(),
            lambda: attend(exact, inputs, shared),
            lambda: _call(recipe, query, key, value, keywords)[0],
        )
    out, lse = _call(recipe, query, key, value, keywords)
    if exact is not None:
        is_empty = (lse <= recipe.lowest).any()
        return lax.cond(is_empty, lambda: attend(exact, inputs), lambda: out)
    if recipe.empty_rows is None:
        return out
    other = _of_empty_rows(recipe, value)
    out_or_other = jnp.where(jnp.isneginf(lse)[..., None], other, out.astype(other.dtype))
    return out_or_other.astype(out.dtype)


def _call(
    recipe: Recipe, query: Array, key: Array, value: Array, keywords: dict[str, Any]
) -> tuple[Array, Any]:
    """Return out and lse of the call; lse is None if the recipe does not need it."""
    needs_lse = recipe.empty_rows or recipe.nan_is_zero or recipe.if_some_row_is_empty
    if not needs_lse:
        return dot_product_attention(query, key, value, **keywords), None
    out, lse = dot_product_attention(query, key, value, return_residual=True, **keywords)
    if recipe.nan_is_zero:
        out = jnp.where(jnp.isnan(lse)[..., None], 0, out)
    return out, lse


def _of_empty_rows(recipe: Recipe, value: Array) -> Array:
    """Return what the program gives in rows that see no key: NaN, or the mean [*leads, 1, N, D].

    The mean is wide, because its gradient is a sum over rows.
    """
    wide = value.astype(sum_dtype(value.dtype))
    if recipe.empty_rows == "nan":
        return jnp.full((), jnp.nan, wide.dtype)
    _, N, _, _ = recipe.sizes
    mean = wide.mean(-3, keepdims=True)
    return jnp.repeat(mean, N // value.shape[-2], axis=-2)
