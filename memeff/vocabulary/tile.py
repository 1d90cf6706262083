"""Define the logits and probabilities of one tile of t tokens and c words."""

import dataclasses
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from memeff.problem import sum_dtype
from memeff.softmax import Lse

# labels that are no word
ABSENT = -2  # a word of another device, or no word at all; its logit counts as 0
IGNORED = -3  # the token takes part in nothing


class Inputs(NamedTuple):
    """The arrays that have gradients, or one thing for each of them, such as a tangent."""

    x: Any  # T H, or T and other dims of tokens, then H
    kernel: Any  # H V
    bias: Any  # V, -inf hides a word; None: no bias
    soft_cap: Any  # scalar; None: no cap, or a static one


class Sums(NamedTuple):
    """The results of the forward for each token, [T], or their tangents or cotangents."""

    lse: Any  # an `Lse`, -inf where no word is visible; tangents and cotangents are arrays
    hit: Any  # logit of the label
    total: Any = None  # sum of the logits of visible words; None: not wanted


@dataclasses.dataclass(frozen=True)
class Settings:
    """The static choices of a call."""

    soft_cap: float | None  # None: no cap, or an array
    has_ignored: bool  # may a label be `IGNORED`?
    wants_total: bool
    tile: tuple[int, int]  # t and c, at most
    calls_at_once: int  # under vmap
    precision: Any
    kernels: ModuleType | None = None  # of a family, which compute the logits; None: plain JAX


class Tokens(NamedTuple):
    """The tokens of a tile. Those that are not visible are ignored, or are also in another tile."""

    x: Array  # t h, 0 where not visible
    labels: Array  # t, `ABSENT` where not visible
    visible: Array | None  # t; None: all are


class Words(NamedTuple):
    """The words of a tile. Those that are not visible are hidden, or are also in another tile."""

    kernel: Array  # h c, 0 where not visible
    bias: Array | None  # c, 0 where not visible
    soft_cap: Array | None
    numbers: Array  # c, -1 where in another tile too
    visible: Array | None  # c; None: all are

    @property
    def terms(self) -> tuple[Array | None, Array | None]:
        """Return bias and soft cap."""
        return self.bias, self.soft_cap


def tokens_of_tile(
    settings: Settings, x: Array, labels: Array, rows: Array, overlap: bool
) -> Tokens:
    """Return the tokens at positions `rows` [t], -1 where in another tile too (if `overlap`).

    Tokens that are not visible are zeroed, because 0 * NaN is NaN.
    """
    if not (overlap or settings.has_ignored):
        return Tokens(x, labels, None)
    rows = rows.reshape(-1, *[1] * (labels.ndim - 1))
    visible = (rows >= 0) & (labels != IGNORED)
    x = jnp.where(visible[..., None], x, 0)
    return Tokens(x, jnp.where(visible, labels, ABSENT), visible)


def words_of_tile(
    kernel: Array, bias: Array | None, soft_cap: Array | None, numbers: Array, overlap: bool
) -> Words:
    """Return the words with these `numbers` [c], -1 where in another tile too (if `overlap`).

    Words that are not visible are zeroed, because 0 * NaN is NaN.
    """
    if bias is None and not overlap:
        return Words(kernel, bias, soft_cap, numbers, None)
    visible = numbers >= 0
    if bias is not None:
        visible &= bias != -jnp.inf
        bias = jnp.where(visible, bias, 0)
    return Words(jnp.where(visible, kernel, 0), bias, soft_cap, numbers, visible)


def visible_pairs(tokens: Tokens, words: Words) -> Array | None:
    """Return True where token and word are visible, [t, c], [t, 1] or [1, c]; None: everywhere."""
    rows = None if tokens.visible is None else jnp.expand_dims(tokens.visible, -1)
    columns = None if words.visible is None else _along_words(words.visible, tokens)
    if rows is None or columns is None:
        return columns if rows is None else rows
    return rows & columns


def _along_words(x: Array, tokens: Tokens) -> Array:
    """Return x [c] with a dim of size 1 for each dim of tokens before."""
    return x.reshape(*[1] * tokens.labels.ndim, -1)


def logits(settings: Settings, raw: Array, terms, keep: Array | None) -> Array:
    """Return s [t, c], (2), from raw and (bias, soft cap); -inf where `keep` is False."""
    bias, cap = terms
    s = raw if bias is None else raw + jnp.broadcast_to(bias.astype(raw.dtype), raw.shape)
    cap = settings.soft_cap if cap is None else cap.astype(raw.dtype)
    if cap is not None:
        s = cap * jnp.tanh(s / cap)
    return s if keep is None else jnp.where(keep, s, -jnp.inf)


def probabilities(s: Array, lse: Lse, keep: Array | None) -> Array:
    """Return p [t, c], (4), and 0 where `keep` is False, also where lse is -inf."""
    assert lse.low is not None
    shifted = (s - lse.high[..., None]) - lse.low[..., None]
    return jnp.exp(shifted if keep is None else jnp.where(keep, shifted, -jnp.inf))


def only_labels(tokens: Tokens, words: Words, x: Array) -> Array:
    """Return [t, c]: x, of that shape or [t, 1], at the labels and 0 elsewhere."""
    return jnp.where(tokens.labels[..., None] == _along_words(words.numbers, tokens), x, 0)


def label_logits(tokens: Tokens, words: Words, s: Array) -> Array:
    """Return the entries of s [t, c] at the labels, [t], and 0 for labels of other tiles.

    Unlike the sum of `only_labels`, it reads one entry of each row.
    """
    c = len(words.numbers)
    start = words.numbers[-1] - (c - 1)  # the last word is in no tile before
    column = jnp.clip(tokens.labels - start, 0, c - 1)
    entries = jnp.take_along_axis(s, column[..., None], -1, mode="promise_in_bounds")[..., 0]
    return jnp.where(words.numbers[column] == tokens.labels, entries, 0)


def only_visible(keep: Array | None, x: Array) -> Array:
    """Return x [t, c] with 0 where `keep` is False."""
    return x if keep is None else jnp.where(keep, x, 0)


def dot(settings: Settings, spec: str, x: Array, y: Array) -> Array:
    """Return the product `spec` of two arrays of one dtype, in the dtype of sums."""
    dtype = sum_dtype(x.dtype)
    return jnp.einsum(spec, x, y, preferred_element_type=dtype, precision=settings.precision)
