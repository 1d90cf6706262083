"""Register the forward with JAX's differentiation, in both modes and every order.

As in attention_ad.py: the forward has a rule for its tangent, and the tangent one for its
transpose, the gradient of loops.py. Orders beyond that come from `TileSum`.
"""

import dataclasses
import functools
import math
import string
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from memeff.attention_ad import RESIDUAL_NAMES, tangent_of
from memeff.autodiff.primitives import call, or_zeros
from memeff.autodiff.tile_sum import DimNames, TileGrid, TileLocation, TileSum
from memeff.problem import sum_dtype
from memeff.softmax import Lse
from memeff.vocabulary.loops import backward, forward, tile_sides
from memeff.vocabulary.tile import (
    Inputs,
    Settings,
    Sums,
    dot,
    logits,
    only_labels,
    only_visible,
    probabilities,
    tokens_of_tile,
    visible_pairs,
    words_of_tile,
)


@dataclasses.dataclass(frozen=True)
class Function:
    """A function with these settings."""

    settings: Settings

    def calls_at_once(self, *_):
        """Return how many calls under vmap run at the same time."""
        return self.settings.calls_at_once


class Forward(Function):
    """The function from inputs and labels [T] to the sums."""

    def __call__(self, inputs: Inputs, labels: Array) -> Sums:
        return forward(self.settings, inputs, labels)

    def jvp(self, primals, tangents):
        """Return the sums and their tangents."""
        inputs, labels = primals
        sums = call(self, inputs, labels)
        lse = jax.tree.map(lambda x: checkpoint_name(x, RESIDUAL_NAMES[1]), sums.lse)
        dsums = call(Tangent(self.settings), (inputs, labels, lse), tangents[0])
        dlse = Lse(dsums.lse, jnp.zeros_like(lse.low))
        return sums._replace(lse=lse), dsums._replace(lse=dlse)

    def in_batch(self, size, axes, inputs, labels):
        """Return the sums under vmap as those of one call with more tokens, if only x is mapped.

        Otherwise each call would have a gradient of the kernel of its own, before they are added.
        """
        input_axes, label_axis = axes
        if input_axes.x is None or any(axis is not None for axis in input_axes[1:]):
            return None
        if label_axis is None:
            labels = jnp.broadcast_to(labels, (size, *labels.shape))
        inputs = inputs._replace(x=inputs.x.reshape(-1, inputs.x.shape[-1]))
        calls_at_once = max(1, self.settings.calls_at_once // size)
        settings = dataclasses.replace(self.settings, calls_at_once=calls_at_once)
        sums = call(Forward(settings), inputs, labels.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(labels.shape), sums)


class Tangent(Function):
    """The function from tangents of the inputs to those of the sums; it is linear."""

    def __call__(self, known, tangents: Inputs) -> Sums:
        return tangent(self.settings, known, tangents)

    def jvp(self, primals, tangents):
        """Return the tangents, and the tangents of these."""
        differentiable = functools.partial(tangent, self.settings, narrow=False)
        return call(self, *primals), tangent_of(differentiable, primals, tangents)

    def transposed(self, args, cotangents):
        """Return cotangents of the inputs' tangents, from those of the sums."""
        known, tangents = args
        zeros = jnp.zeros_like(known[2].high)
        dsums = Sums(*(zeros if x is None else x for x in cotangents))
        gradients = call(Backward(self.settings), known, dsums)
        return [g for x, g in zip(tangents, gradients, strict=True) if x is not None]


class Backward(Function):
    """The function from cotangents of the sums to gradients of the inputs; it is linear."""

    def __call__(self, known, dsums: Sums) -> Inputs:
        return backward(self.settings, *known, dsums)

    def jvp(self, primals, tangents):
        """Return the gradients, and their tangents as those of the transposed `Tangent`."""

        def transposed(known, dsums):
            sums = functools.partial(tangent, self.settings, known, narrow=False)
            (gradients,) = jax.linear_transpose(sums, known[0])(dsums)
            return gradients

        return call(self, *primals), tangent_of(transposed, primals, tangents)

    def transposed(self, args, cotangents):
        """Return cotangents of those of the sums, from cotangents of the gradients."""
        known, _ = args
        tangents = jax.tree.unflatten(jax.tree.structure(known[0]), cotangents)
        return call(Tangent(self.settings), known, tangents)


# letters of autodiff/tile_sum.py, where the columns are called s
DIMS = Inputs(x="th", kernel="hs", bias="s", soft_cap="")


def tangent(settings: Settings, known, tangents: Inputs, narrow: bool = True) -> Sums:
    """Return the tangents of the sums, linear in `tangents`; a tangent that is None is 0.

    `known` are inputs, labels and lse. `narrow`: multiply 16-bit operands as they are; otherwise
    multiply in float32.
    """
    inputs, labels, lse = known
    arrays, structure = jax.tree.flatten(inputs)
    active, tangent_structure = jax.tree.flatten(tangents)
    others = [x for x in string.ascii_lowercase if x not in "bnktsh"]  # a tile cuts none of these
    of_tokens = "t" + "".join(others[: labels.ndim - 1])
    letters = [dims for dims, x in zip(DIMS, inputs, strict=True) if x is not None]
    letters[0] = of_tokens + "h"
    letters += [of_tokens] * 3  # labels, high, low
    dims = [DimNames(x, n) for n, x in enumerate(letters)]
    dims += [dims[n] for n, x in enumerate(structure.flatten_up_to(tangents)) if x is not None]
    grid = TileGrid(
        lists=_all_tiles,
        problem=None,
        chunk_size=tile_sides(inputs, settings.tile),
        head_block=(1, 1),
        heads=(1, 1, 1),
        lengths=(len(labels), inputs.kernel.shape[1]),
        elementwise=False,
        dtype=lse.high.dtype,
    )
    totals = [dims[len(arrays)]] * (2 + settings.wants_total)  # like labels
    f = TileTangent(settings, structure, tangent_structure, narrow)
    tile_sum = TileSum(f, grid, tuple(dims), tuple(totals), len(active))
    return Sums(*tile_sum(*arrays, labels, *lse, *active))


def _all_tiles(grid: TileGrid) -> list[tuple[bool, np.ndarray]]:
    """Return the indices [n, 2] of all tiles."""
    counts = [math.ceil(n / side) for n, side in zip(grid.lengths, grid.chunk_size, strict=True)]
    return [(True, np.argwhere(np.ones(counts, bool)))]


@dataclasses.dataclass(frozen=True)
class TileTangent:
    """A tile's part of the tangents of the sums, linear in the last parts."""

    settings: Settings
    structure: Any  # of the inputs
    tangent_structure: Any
    narrow: bool

    def __call__(self, location: TileLocation, *parts: Array) -> tuple[Array, ...]:
        """Return the sums over the words of the tile, each [t]."""
        settings = self.settings
        count = self.structure.num_leaves
        inputs = self._inputs(self.structure, parts[:count])
        labels, high, low = parts[count : count + 3]
        tangents = self._inputs(self.tangent_structure, parts[count + 3 :])
        tokens = tokens_of_tile(settings, inputs.x, labels, location.rows, True)
        words = words_of_tile(*inputs[1:], location.cols, True)
        assert tokens.visible is not None and words.visible is not None  # as tiles may overlap
        keep = visible_pairs(tokens, words)
        raw = dot(settings, "...h,hc->...c", tokens.x, words.kernel)  # (1)
        factors = []
        if tangents.x is not None:
            factors.append((jnp.where(tokens.visible[..., None], tangents.x, 0), words.kernel))
        if tangents.kernel is not None:
            factors.append((tokens.x, jnp.where(words.visible, tangents.kernel, 0)))
        d_raw = jnp.zeros_like(raw)
        if factors:  # as one product
            left, right = zip(*factors, strict=True)
            left = jnp.concatenate(left, -1)
            right = jnp.concatenate(right, 0)
            d_raw = dot(settings, "...h,hc->...c", left, right)

        def logits_of(raw, terms):
            return logits(settings, raw, terms, keep)

        dterms = jax.tree.map(or_zeros, words.terms, tuple(tangents[2:]))
        s, ds = jax.jvp(logits_of, (raw, words.terms), (d_raw, dterms))  # (2)
        p = probabilities(s, Lse(high, low), keep)  # (4)
        sums = [(p * ds).sum(-1), only_labels(tokens, words, ds).sum(-1)]
        if settings.wants_total:
            sums.append(only_visible(keep, ds).sum(-1))
        return tuple(sums)

    def _inputs(self, structure, parts) -> Inputs:
        """Return the parts as inputs; those that `structure` lacks are None."""
        inputs: Inputs = jax.tree.unflatten(structure, parts)
        if self.narrow:
            return inputs
        return jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype)), inputs)
