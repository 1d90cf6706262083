"""Compute the log-sum-exp of a vocabulary's logits and the logits of labels, tile by tile.

It is attention with a key for each word and without values. The rows of x are T tokens, the columns
of the kernel V words, and a tile has t tokens and c words. Of one tile, with a dot for tangents:
  (1) raw = x k                         (4) p = exp(s - lse)
  (2) s = cap(raw + bias)               (5) ds = p dlse + [word = label] dhit + dtotal
  (3) m' = max(m, rowmax s)                 d_raw, dbias, dcap = (2) transposed at ds
      l = l exp(m - m') + rowsum exp(s - m')
      hit += s of the label             (6) dx_i += d_raw k_j';  dk_j += x_i' d_raw
      total += rowsum s
  at the end: lse = m + log l
(3) is the forward, (4) to (6) the gradient, which starts from lse. The tangent of lse is the row sum
of p ds, where ds is (2) along the tangents. `tile_sum` adds it up, and makes the derivatives of
every order from it.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from memeff.attention_ad import RESIDUAL_NAMES, tangent_of
from memeff.autodiff.primitives import call
from memeff.autodiff.tile_sum import DimNames, TileGrid, TileLocation, positions, tile_sum
from memeff.chunked.floats import lift_float16
from memeff.sharding import vary_together
from memeff.slicing import add_slice, slice_dims, write_slice
from memeff.softmax import Lse, log_sum_exp

# labels that are no word
ABSENT = -2  # of another device's words; its logit is 0
IGNORED = -3  # the token takes part in nothing


class Inputs(NamedTuple):
    """The arrays that have gradients."""

    x: Array  # T H
    kernel: Array  # H V
    bias: Array | None  # V; a word of -inf is hidden
    soft_cap: Array | None  # scalar


class Sums(NamedTuple):
    """What the forward returns for each token, [T], or the tangents or cotangents of it."""

    lse: Any  # an `Lse`, or its tangent; -inf where no word is visible
    hit: Any  # logit of the label; 0 if that is absent
    total: Any = None  # sum of the logits of all visible words; None: not wanted


@dataclasses.dataclass(frozen=True)
class Settings:
    """The static choices of a call."""

    soft_cap: float | None  # None: there is none, or it is an array
    has_ignored: bool  # may a label be `IGNORED`?
    wants_total: bool
    forward_tile: tuple[int, int]  # t and c, at most
    gradient_tile: tuple[int, int]
    calls_at_once: int  # under vmap
    precision: Any


# ---- one tile


class Tokens(NamedTuple):
    """The tokens of a tile."""

    x: Array  # t h
    labels: Array  # t, `ABSENT` where not visible
    visible: Array | None  # t, False where ignored, or in the tile before as well; None: all True


class Words(NamedTuple):
    """The words of a tile."""

    kernel: Array  # h c
    bias: Array | None  # c
    soft_cap: Array | None
    numbers: Array  # c, -1 where the tile before has the word already
    visible: Array | None  # c, False where hidden, or in the tile before as well; None: all True


def _tokens(settings: Settings, x: Array, labels: Array, rows: Array, overlap: bool) -> Tokens:
    """Return the tokens of a tile. NaN in an ignored token is zeroed, because 0 * NaN is NaN."""
    if not (overlap or settings.has_ignored):
        return Tokens(x, labels, None)
    visible = (rows >= 0) & (labels != IGNORED)
    labels = jnp.where(visible, labels, ABSENT)
    return Tokens(jnp.where(visible[:, None], x, 0), labels, visible)


def _words(kernel: Array, bias: Array | None, cap: Array | None, numbers: Array, overlap: bool):
    """Return the words of a tile. NaN in a hidden word is zeroed, because 0 * NaN is NaN."""
    if not (overlap or bias is not None):
        return Words(kernel, bias, cap, numbers, None)
    visible = numbers >= 0
    if bias is not None:
        visible &= bias != -jnp.inf
        bias = jnp.where(visible, bias, 0)
    return Words(jnp.where(visible, kernel, 0), bias, cap, numbers, visible)


def _keep(tokens: Tokens, words: Words) -> Array | None:
    """Return True where token and word are both visible, t c, t 1 or 1 c; None: everywhere."""
    if words.visible is None:
        return None if tokens.visible is None else tokens.visible[:, None]
    if tokens.visible is None:
        return words.visible[None]
    return tokens.visible[:, None] & words.visible


def _logits(settings: Settings, raw: Array, bias, cap, keep: Array | None) -> Array:
    """Return s [t, c] from raw: (2), and -inf where `keep` is False."""
    s = raw if bias is None else raw + bias.astype(raw.dtype)
    cap = settings.soft_cap if cap is None else cap.astype(raw.dtype)
    if cap is not None:
        s = cap * jnp.tanh(s / cap)
    return s if keep is None else jnp.where(keep, s, -jnp.inf)


def _probabilities(s: Array, lse: Lse, keep: Array | None) -> Array:
    """Return p [t, c], and 0 where `keep` is False, also where lse is -inf."""
    shifted = (s - lse.high[:, None]) - lse.low[:, None]
    if keep is not None:
        shifted = jnp.where(keep, shifted, -jnp.inf)
    return jnp.exp(shifted)


def _of_label(tokens: Tokens, words: Words, x: Array) -> Array:
    """Return the entries of x [t, c] that belong to labels, and 0 elsewhere."""
    return jnp.where(tokens.labels[:, None] == words.numbers, x, 0)


def _of_visible(keep: Array | None, x: Array) -> Array:
    """Return the entries of x [t, c] that are visible, and 0 elsewhere."""
    return x if keep is None else jnp.where(keep, x, 0)


def _dot(settings: Settings, spec: str, x: Array, y: Array) -> Array:
    """Return the product `spec` in float32, or in float64."""
    dtype = accumulator_dtype(x.dtype)
    return jnp.einsum(spec, x, y, preferred_element_type=dtype, precision=settings.precision)


def accumulator_dtype(dtype):
    """Return the dtype of logits and sums: float32, or float64."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


# ---- all tiles


class Tiles(NamedTuple):
    """Cuts the arrays of a call into tiles of t tokens and c words."""

    settings: Settings
    inputs: Inputs
    labels: Array
    sides: tuple[int, int]

    @staticmethod
    def of(settings: Settings, inputs: Inputs, labels: Array, most: tuple[int, int]) -> "Tiles":
        """Return tiles with sides of at most `most`."""
        return Tiles(settings, inputs, labels, _sides(inputs, most))

    def starts(self, dim: int) -> np.ndarray:
        """Return the first tokens (0) or words (1) of all tiles."""
        size = self.inputs.x.shape[0] if dim == 0 else self.inputs.kernel.shape[1]
        return np.arange(0, size, self.sides[dim] or 1, dtype=np.int32)

    def words(self, first) -> tuple[Array, Words]:
        """Return the start of the tile of words at `first`, moved so that it fits, and the words."""
        _, kernel, bias, cap = self.inputs
        V = kernel.shape[1]
        c = self.sides[1]
        start, numbers = positions(first, c, V)
        kernel = slice_dims(kernel, {1: (start, c)})
        bias = None if bias is None else slice_dims(bias, {0: (start, c)})
        return start, _words(kernel, bias, cap, numbers, V % c != 0)

    def tokens(self, first) -> tuple[Array, Tokens]:
        """Return the start of the tile of tokens at `first`, and the tokens."""
        T = self.inputs.x.shape[0]
        t = self.sides[0]
        start, rows = positions(first, t, T)
        x = self.of_tokens(self.inputs.x, start)
        labels = self.of_tokens(self.labels, start)
        return start, _tokens(self.settings, x, labels, rows, T % t != 0)

    def of_tokens(self, x: Any, start) -> Any:
        """Return the rows of the tile of tokens at `start`, of arrays [T, ...]."""
        return jax.tree.map(lambda x: slice_dims(x, {0: (start, self.sides[0])}), x)


def _sides(inputs: Inputs, most: tuple[int, int]) -> tuple[int, int]:
    """Return the sides t and c of tiles that hardly overlap, at most `most`.

    Multiples of 128, which products on GPUs need, stay such.
    """
    sides = []
    for size, limit in zip((inputs.x.shape[0], inputs.kernel.shape[1]), most, strict=True):
        unit = math.gcd(limit, 128)
        count = max(1, math.ceil(size / limit))
        side = math.ceil(size / count / unit) * unit
        sides.append(min(side, size))
    return sides[0], sides[1]


def _fold(step, carry, starts: np.ndarray):
    """Return the carry after `step` at each start; without any, `step` need not be traceable."""
    return lax.scan(step, carry, starts)[0] if len(starts) else carry


def forward(settings: Settings, inputs: Inputs, labels: Array) -> Sums:
    """Return the sums of all tokens: (1) to (3)."""
    tiles = Tiles.of(settings, inputs, labels, settings.forward_tile)
    zeros = jnp.zeros_like(labels, accumulator_dtype(inputs.x.dtype))
    rows = (zeros - jnp.inf, zeros, zeros, zeros)  # m, l, hit, total

    # words outside, so that a tile of the kernel is cut (XLA copies it) once for all tokens
    def visit_words(rows, first):
        _, words = tiles.words(first)

        def visit_tokens(rows, first):
            start, tokens = tiles.tokens(first)
            old = tiles.of_tokens(rows, start)
            new = _online_step(settings, tokens, words, old)
            rows = (write_slice(x, part, (start,)) for x, part in zip(rows, new, strict=True))
            return tuple(rows), None

        return _fold(visit_tokens, rows, tiles.starts(0)), None

    rows = vary_together(rows, (inputs, labels))
    m, l, hit, total = _fold(visit_words, rows, tiles.starts(1))
    return Sums(lse_of_sums(m, l), hit, total if settings.wants_total else None)


def _online_step(settings: Settings, tokens: Tokens, words: Words, rows):
    """Return m, l, hit and total [t] after one more tile of words: (1) to (3)."""
    m, l, hit, total = rows
    keep = _keep(tokens, words)
    raw = _dot(settings, "th,hc->tc", tokens.x, words.kernel)  # (1)
    s = _logits(settings, raw, words.bias, words.soft_cap, keep)  # (2)
    new_m = jnp.maximum(m, s.max(1, initial=-jnp.inf))  # (3)
    shift = jnp.where(new_m == -jnp.inf, 0, new_m)
    l = l * jnp.exp(m - shift) + jnp.exp(s - shift[:, None]).sum(1)
    hit += _of_label(tokens, words, s).sum(1)
    if settings.wants_total:
        total += _of_visible(keep, s).sum(1)
    return new_m, l, hit, total


def lse_of_sums(m: Array, l: Array) -> Lse:
    """Return m + log l in two floats; -inf where l is 0."""
    empty = l == 0
    lse = log_sum_exp(jnp.where(empty, 0, m), jnp.where(empty, 1, l))
    return Lse(jnp.where(empty, -jnp.inf, lse.high), lse.low)


def backward(settings: Settings, inputs: Inputs, labels: Array, lse: Lse, dsums: Sums) -> Inputs:
    """Return the gradients of the inputs, in their dtypes, from cotangents of the sums."""
    tiles = Tiles.of(settings, inputs, labels, settings.gradient_tile)
    dtype = lse.high.dtype
    # Made from dlse. Otherwise XLA:CPU makes zeros before the forward, and keeps them through it.
    zero, _ = lax.optimization_barrier((jnp.zeros((), dtype), dsums.lse))

    def zeros(x, dtype=dtype):
        return None if x is None else vary_together(jnp.zeros_like(x, dtype), lse) + zero.astype(dtype)

    # Words outside: dk of one tile is summed up in float32 and stored in the kernel's dtype, so that
    # only dx needs a float32 array of its whole size. One loop serves both, because p costs a product.
    def visit_words(gradients, first):
        start, words = tiles.words(first)
        terms = (words.bias, words.soft_cap)

        def visit_tokens(sums, first):
            dx, dk, dterms = sums
            row, tokens = tiles.tokens(first)
            rows = tiles.of_tokens((lse, dsums), row)
            d_raw, d_terms = _logit_cotangents(settings, tokens, words, *rows)
            d_raw, lift = lift_float16(d_raw, tokens.x.dtype, (0, 1))
            dx_part = _dot(settings, "tc,hc->th", d_raw, words.kernel)  # (6)
            dk_part = _dot(settings, "th,tc->hc", tokens.x, d_raw)
            if lift is not None:
                dx_part = dx_part / lift
                dk_part = dk_part / lift
            dterms = jax.tree.map(jnp.add, dterms, d_terms)
            return (add_slice(dx, dx_part, (row, 0)), dk + dk_part, dterms), None

        dx, dkernel, dbias, dcap = gradients
        sums = (dx, zeros(words.kernel), jax.tree.map(zeros, terms))
        dx, dk, (db, dc) = _fold(visit_tokens, sums, tiles.starts(0))
        dkernel = add_slice(dkernel, dk, (0, start))  # 0 where the tile before has the word
        if dbias is not None:
            dbias = add_slice(dbias, db, (start,))
        if dcap is not None:
            dcap = dcap + dc
        return Inputs(dx, dkernel, dbias, dcap), None

    x, kernel, bias, cap = inputs
    gradients = Inputs(zeros(x), zeros(kernel, kernel.dtype), zeros(bias), zeros(cap))
    gradients = _fold(visit_words, gradients, tiles.starts(1))
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs)


def _logit_cotangents(settings: Settings, tokens: Tokens, words: Words, lse: Lse, dsums: Sums):
    """Return d_raw [t, c] and the tile's (dbias, dcap): (1), (2), (4) and (5)."""
    keep = _keep(tokens, words)
    terms = (words.bias, words.soft_cap)
    raw = _dot(settings, "th,hc->tc", tokens.x, words.kernel)  # (1)
    s, pull = jax.vjp(lambda raw, terms: _logits(settings, raw, *terms, keep), raw, terms)
    ds = _probabilities(s, lse, keep) * dsums.lse[:, None]  # (4) (5)
    ds += _of_label(tokens, words, dsums.hit[:, None])
    if dsums.total is not None:
        ds += dsums.total[:, None]
    d_raw, dterms = pull(ds)
    dtype = raw.dtype
    return d_raw, jax.tree.map(lambda x: x.astype(dtype), dterms)


# ---- the tangent


DIMS = Inputs(x="th", kernel="hs", bias="s", soft_cap="")  # letters of autodiff/tile_sum.py


def tangent(
    settings: Settings, known, tangents: Inputs, narrow: bool = True
) -> Sums:
    """Return the tangents of the sums, linear in `tangents`; a tangent that is None is 0.

    `narrow`: multiply 16-bit operands as they are; otherwise multiply in float32.
    """
    inputs, labels, lse = known
    arrays, structure = jax.tree.flatten(inputs)
    active, tangent_structure = jax.tree.flatten(tangents)
    letters = [dims for dims, x in zip(DIMS, inputs, strict=True) if x is not None]
    letters += ["t", "t", "t"]  # labels, high, low
    dims = [DimNames(x, n) for n, x in enumerate(letters)]
    dims += [dims[n] for n, x in enumerate(structure.flatten_up_to(tangents)) if x is not None]
    T, V = inputs.x.shape[0], inputs.kernel.shape[1]
    grid = TileGrid(
        lists=_all_tiles,
        problem=None,
        chunk_size=_sides(inputs, settings.gradient_tile),
        head_block=(1, 1),
        heads=(1, 1, 1),
        lengths=(T, V),
        elementwise=False,
        dtype=lse.high.dtype,
    )
    labels_index = len(arrays)
    totals = (DimNames("t", labels_index),) * (2 + settings.wants_total)
    f = TileTangent(settings, (T, V), structure, tangent_structure, narrow)
    return Sums(*tile_sum(f, grid, tuple(dims), totals, len(active), *arrays, labels, *lse, *active))


def _all_tiles(grid: TileGrid) -> list[tuple[bool, np.ndarray]]:
    """Return the indices [n, 2] of all tiles."""
    counts = (math.ceil(n / side) for n, side in zip(grid.lengths, grid.chunk_size, strict=True))
    return [(True, np.argwhere(np.ones(tuple(counts), bool)))]


@dataclasses.dataclass(frozen=True)
class TileTangent:
    """A tile's part of the tangents of lse, hit and total, linear in the last parts."""

    settings: Settings
    sizes: tuple[int, int]  # T, V
    structure: Any  # of the inputs
    tangent_structure: Any
    narrow: bool

    def __call__(self, location: TileLocation, *parts) -> tuple[Array, ...]:
        """Return the sums over the words of the tile, each [t]."""
        settings = self.settings
        count = self.structure.num_leaves
        inputs = self._inputs(self.structure, parts[:count])
        labels, high, low = parts[count : count + 3]
        tangents = self._inputs(self.tangent_structure, parts[count + 3 :])
        t_overlap, c_overlap = (n % len(x) != 0 for n, x in zip(self.sizes, location[1:3]))
        tokens = _tokens(settings, inputs.x, labels, location.rows, t_overlap)
        words = _words(inputs.kernel, inputs.bias, inputs.soft_cap, location.cols, c_overlap)
        keep = _keep(tokens, words)
        dx, dk, *dterms = tangents
        dx = _zero_hidden(dx, tokens.visible, 1)
        dk = _zero_hidden(dk, words.visible, 0)
        raw = _dot(settings, "th,hc->tc", tokens.x, words.kernel)  # (1)
        factors = [(dx, words.kernel), (tokens.x, dk)]
        factors = [pair for pair in factors if not any(x is None for x in pair)]
        d_raw = jnp.zeros_like(raw)
        if factors:  # one product
            left, right = zip(*factors, strict=True)
            left = jnp.concatenate(left, 1)
            right = jnp.concatenate(right, 0)
            d_raw = _dot(settings, "th,hc->tc", left, right)
        terms = (words.bias, words.soft_cap)
        dterms = tuple(map(_or_zeros, terms, dterms))
        s, ds = jax.jvp(
            lambda raw, terms: _logits(settings, raw, *terms, keep), (raw, terms), (d_raw, dterms)
        )
        p = _probabilities(s, Lse(high, low), keep)  # (4)
        sums = ((p * ds).sum(1), _of_label(tokens, words, ds).sum(1))
        return (*sums, _of_visible(keep, ds).sum(1)) if settings.wants_total else sums

    def _inputs(self, structure, parts) -> Inputs:
        """Return the parts as inputs; those that `structure` lacks are None."""
        inputs: Inputs = jax.tree.unflatten(structure, parts)
        if self.narrow:
            return inputs
        return jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), inputs)


def _zero_hidden(dx: Array | None, visible: Array | None, dim: int) -> Array | None:
    """Return the tangent without the entries of hidden tokens (dim 1 added) or words (dim 0)."""
    if dx is None or visible is None:
        return dx
    return jnp.where(jnp.expand_dims(visible, dim), dx, 0)


def _or_zeros(x: Array | None, dx: Array | None) -> Array | None:
    """Return the tangent `dx` of `x`, as zeros if only the tangent is None."""
    return jnp.zeros_like(x) if dx is None and x is not None else dx


# ---- derivatives


@dataclasses.dataclass(frozen=True)
class Forward:
    """The function from inputs and labels to the sums."""

    settings: Settings

    def __call__(self, inputs, labels):
        return _jitted_forward(self.settings, inputs, labels)

    def calls_at_once(self, *_):
        """Return how many calls under vmap run at the same time."""
        return self.settings.calls_at_once

    def in_batch(self, size, axes, inputs, labels):
        """Return the sums of all calls as those of one, if only tokens are mapped.

        Otherwise the gradient of the kernel would take its memory for each call.
        """
        input_axes, label_axis = axes
        if input_axes.x is None or any(axis is not None for axis in input_axes[1:]):
            return None
        if label_axis is None:
            labels = jnp.broadcast_to(labels, (size, *labels.shape))
        inputs = inputs._replace(x=lax.collapse(inputs.x, 0, 2))
        limit = max(1, self.settings.calls_at_once // size)
        forward = Forward(dataclasses.replace(self.settings, calls_at_once=limit))
        sums = call(forward, inputs, labels.reshape(-1))
        return jax.tree.map(lambda x: x.reshape(labels.shape), sums)

    def jvp(self, primals, tangents):
        """Return the sums and their tangents."""
        inputs, labels = primals
        sums = call(self, inputs, labels)
        lse = jax.tree.map(lambda x: checkpoint_name(x, RESIDUAL_NAMES[1]), sums.lse)
        sums = sums._replace(lse=lse)
        dsums = call(Tangent(self.settings), (inputs, labels, lse), tangents[0])
        return sums, dsums._replace(lse=Lse(dsums.lse, jnp.zeros_like(lse.low)))


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The function from tangents of the inputs to those of lse, hit and total; it is linear."""

    settings: Settings

    def __call__(self, known, tangents, narrow=True):
        return tangent(self.settings, known, tangents, narrow)

    def calls_at_once(self, *_):
        """Return how many calls under vmap run at the same time."""
        return self.settings.calls_at_once

    def jvp(self, primals, tangents):
        """Return the tangents, and the tangents of these."""
        differentiable = functools.partial(self, narrow=False)
        return call(self, *primals), tangent_of(differentiable, primals, tangents)

    def transposed(self, args, cotangents):
        """Return cotangents of the inputs' tangents, from those of lse, hit and total."""
        known, tangents = args
        zeros = jnp.zeros_like(known[2].high)
        dsums = Sums(*(zeros if x is None else x for x in cotangents))
        gradients = call(Backward(self.settings), *known, dsums)
        return Inputs(*(None if x is None else g for x, g in zip(tangents, gradients, strict=True)))


@dataclasses.dataclass(frozen=True)
class Backward:
    """The function from cotangents of the sums to gradients of the inputs."""

    settings: Settings

    def __call__(self, inputs, labels, lse, dsums):
        return _jitted_backward(self.settings, inputs, labels, lse, dsums)

    def calls_at_once(self, *_):
        """Return how many calls under vmap run at the same time."""
        return self.settings.calls_at_once

    def jvp(self, primals, tangents):
        """Return the gradients, and their tangents as those of the transposed `Tangent`."""

        def transposed(inputs, labels, lse, dsums):
            def sums(tangents):
                return tangent(self.settings, (inputs, labels, lse), tangents, narrow=False)

            (gradients,) = jax.linear_transpose(sums, inputs)(dsums)
            return gradients

        return call(self, *primals), tangent_of(transposed, primals, tangents)


_jitted_forward = jax.jit(forward, static_argnums=0)
_jitted_backward = jax.jit(backward, static_argnums=0)
