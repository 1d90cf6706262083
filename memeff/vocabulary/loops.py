"""Visit all tiles, in the forward and in the gradient."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from memeff.autodiff.tile_sum import positions
from memeff.chunked.floats import lift_float16
from memeff.device import current_platform
from memeff.problem import sum_dtype
from memeff.sharding import may_be_sharded, vary_together
from memeff.slicing import add_slice, slice_dims, write_slice
from memeff.softmax import Lse, log_sum_exp
from memeff.vocabulary.tile import (
    Inputs,
    Settings,
    Sums,
    Tokens,
    Words,
    dot,
    label_logits,
    logits,
    only_labels,
    only_visible,
    probabilities,
    tokens_of_tile,
    visible_pairs,
    words_of_tile,
)

# Tokens and words of a tile, at most.
#
# Of ten sizes from 2^23 to 2^26 logits this was the fastest (H200, bfloat16, 32,768 tokens, 131,072
# words, H = 1,024 and 4,096; half as many words took 8 and 6 % longer): a step of the forward has
# nine kernels beside its product, and one of the gradient adds [t, H] to dx and [H, c] to dk.
# 2^26 logits take 256 MiB, and 128 MiB more for d_raw in 16 bits. Where kernels compute d_raw, it
# is all that a tile takes; 16,384 tokens were 1 % faster for H = 4,096 and 4 % slower for 1,024.
GPU_TILE = (8192, 8192)
# As for attention: 2^20 logits stay in the caches. It was within 4 % of the fastest of nine sizes
# from 2^18 to 2^23 logits (two cores, float32 and bfloat16, 2,048 tokens, 32,000 words, H = 512).
CPU_TILE = (1024, 1024)
LEAST_WORDS = 512  # narrower tiles would add to dx too often


def choose_tile(
    chunk_size: tuple[int | None, int | None], tokens: int, words: int
) -> tuple[tuple[int, int], int]:
    """Return the sides of a tile, at most, and how many calls under vmap run at the same time.

    `chunk_size` are sides that the user chose, or None.
    """
    t, c = CPU_TILE if current_platform() == "cpu" else GPU_TILE
    most_logits = t * c
    if may_be_sharded() and tokens > t:
        # XLA would gather a slice along a dim that is sharded, so a tile has all tokens.
        t = tokens
        c = max(LEAST_WORDS, min(c, most_logits * jax.device_count() // t // 128 * 128))
    t = chunk_size[0] or t
    c = chunk_size[1] or c
    logits_of_call = max(1, min(t, tokens) * min(c, words))
    return (t, c), max(1, most_logits // logits_of_call)


def tile_sides(inputs: Inputs, most: tuple[int, int]) -> tuple[int, int]:
    """Return t and c, at most `most`, for tiles of nearly the same size.

    The last tile overlaps the one before, so it should need few tokens or words of that. Sides that
    are multiples of 128, which GPUs multiply fastest, stay multiples of 128.
    """
    sides = []
    if inputs.x.ndim > 2:  # tokens in several dims are one tile
        most = max(1, inputs.x.shape[0]), most[1]
    for size, limit in zip((inputs.x.shape[0], inputs.kernel.shape[1]), most, strict=True):
        unit = math.gcd(limit, 128)
        count = max(1, math.ceil(size / limit))
        side = math.ceil(size / count / unit) * unit
        sides.append(min(side, size))
    return sides[0], sides[1]


class Tiles(NamedTuple):
    """The arrays of a call, to be cut into tiles of t tokens and c words.

    Tokens in several dims are cut along the first of these.
    """

    settings: Settings
    inputs: Inputs
    labels: Array
    t: int
    c: int

    def fold_tokens(self, step: Callable, carry: Any) -> Any:
        """Return the carry after `step(carry, start, tokens)` of each tile of tokens.

        A tile that would end behind the last token starts earlier.
        """
        T = len(self.labels)

        def visit(carry, first):
            start, rows = positions(first, self.t, T)
            x, labels = self.of_tokens((self.inputs.x, self.labels), start)
            overlap = T % self.t != 0
            return step(carry, start, tokens_of_tile(self.settings, x, labels, rows, overlap)), None

        return _scan(visit, carry, T, self.t)

    def fold_words(self, step: Callable, carry: Any) -> Any:
        """Return the carry after `step(carry, start, words)` of each tile of words."""
        _, kernel, bias, cap = self.inputs
        V = kernel.shape[1]

        def visit(carry, first):
            start, numbers = positions(first, self.c, V)
            k = slice_dims(kernel, {1: (start, self.c)})
            b = None if bias is None else slice_dims(bias, {0: (start, self.c)})
            return step(carry, start, words_of_tile(k, b, cap, numbers, V % self.c != 0)), None

        return _scan(visit, carry, V, self.c)

    def of_tokens(self, arrays: Any, start) -> Any:
        """Return the rows of arrays [T, ...] that belong to the tile of tokens at `start`."""
        return jax.tree.map(lambda x: slice_dims(x, {0: (start, self.t)}), arrays)


def _scan(visit: Callable, carry: Any, size: int, side: int) -> Any:
    """Return the carry after a visit of each tile along a dim; there is none if its size is 0."""
    if size == 0:
        return carry
    return lax.scan(visit, carry, np.arange(0, size, side, dtype=np.int32))[0]


@functools.partial(jax.jit, static_argnums=0)
def forward(settings: Settings, inputs: Inputs, labels: Array) -> Sums:
    """Return the sums of all tokens: (1) to (3)."""
    if settings.kernels is not None:
        m, l, hit, total = settings.kernels.sums(settings, inputs, labels)
        return Sums(lse_of_sums(m, l), hit, total)
    tiles = Tiles(settings, inputs, labels, *tile_sides(inputs, settings.tile))
    zeros = vary_together(jnp.zeros_like(labels, sum_dtype(inputs.x.dtype)), (inputs, labels))

    # words outside, because XLA copies a tile of the kernel: once for all tokens
    def visit_words(rows, _, words: Words):
        def visit_tokens(rows, start, tokens: Tokens):
            raw = dot(settings, "...h,hc->...c", tokens.x, words.kernel)  # (1)
            new = online_step(settings, tokens, words, raw, tiles.of_tokens(rows, start))
            starts = start, *[0] * (tokens.labels.ndim - 1)
            return [write_slice(x, part, starts) for x, part in zip(rows, new, strict=True)]

        return tiles.fold_tokens(visit_tokens, rows)

    start = [zeros - jnp.inf, zeros, zeros, zeros]  # m, l, hit, total
    m, l, hit, total = tiles.fold_words(visit_words, start)
    return Sums(lse_of_sums(m, l), hit, total if settings.wants_total else None)


def online_step(
    settings: Settings, tokens: Tokens, words: Words, raw: Array, rows: Sequence[Array]
) -> list[Array]:
    """Return m, l, hit and total, each [t], after one more tile of words, from its raw."""
    m, l, hit, total = rows
    keep = visible_pairs(tokens, words)
    s = logits(settings, raw, words.terms, keep)  # (2)
    new_m = jnp.maximum(m, s.max(-1))  # (3)
    shift = jnp.where(new_m == -jnp.inf, 0, new_m)
    l = l * jnp.exp(m - shift) + jnp.exp(s - shift[..., None]).sum(-1)
    hit = hit + label_logits(tokens, words, s)
    if settings.wants_total:
        total = total + only_visible(keep, s).sum(-1)
    return [new_m, l, hit, total]


def lse_of_sums(m: Array, l: Array) -> Lse:
    """Return m + log l in two floats; -inf where l is 0."""
    empty = l == 0
    lse = log_sum_exp(jnp.where(empty, 0, m), jnp.where(empty, 1, l))
    return Lse(jnp.where(empty, -jnp.inf, lse.high), lse.low)


@functools.partial(jax.jit, static_argnums=0)
def backward(settings: Settings, inputs: Inputs, labels: Array, lse: Lse, dsums: Sums) -> Inputs:
    """Return the gradients of the inputs, in their dtypes: (1), (2), (4) to (6)."""
    kernels = settings.kernels if inputs.bias is None else None
    tiles = Tiles(settings, inputs, labels, *tile_sides(inputs, settings.tile))
    # from dlse: otherwise XLA:CPU makes zeros before the forward, and keeps them through it
    zero, _ = lax.optimization_barrier((jnp.zeros((), lse.high.dtype), dsums.lse))

    def zeros(x: Array, dtype=lse.high.dtype) -> Array:
        return vary_together(jnp.zeros_like(x, dtype), lse) + zero.astype(dtype)

    # Words outside: dk of one tile is summed up in float32 and stored once, in the kernel's dtype.
    # So only dx takes a float32 array of its whole size; the other order needs [H, V] of those. One
    # loop gives both gradients, because a second one would repeat a product and the exponentials.
    def visit_words(gradients: Inputs, start, words: Words):
        def visit_tokens(sums, row, tokens: Tokens):
            dx, dk, dterms = sums
            rows = tiles.of_tokens((lse, dsums), row)
            if kernels is not None:
                d_raw = kernels.cotangents(settings, tokens, words, *rows)
                more_dterms = None, None
            else:
                raw = dot(settings, "...h,hc->...c", tokens.x, words.kernel)  # (1)
                d_raw, more_dterms = transpose_logits(settings, tokens, words, raw, *rows)
            every = tuple(range(d_raw.ndim))
            d_raw, lift = lift_float16(d_raw, tokens.x.dtype, every)
            d_raw = lax.optimization_barrier(d_raw)  # computed once, for two products
            more_dx = dot(settings, "...c,hc->...h", d_raw, words.kernel)  # (6)
            more_dk = jnp.tensordot(  # a reshape to t would gather sharded tokens
                tokens.x,
                d_raw,
                (every[:-1], every[:-1]),
                precision=settings.precision,
                preferred_element_type=lse.high.dtype,
            )
            if lift is not None:
                more_dx = more_dx / lift
                more_dk = more_dk / lift.reshape(1, 1)
            dterms = jax.tree.map(jnp.add, dterms, more_dterms)
            return add_slice(dx, more_dx, (row, *[0] * (dx.ndim - 1))), dk + more_dk, dterms

        dx, dkernel, dbias, dcap = gradients
        sums = (dx, zeros(words.kernel), jax.tree.map(zeros, words.terms))
        dx, dk, (more_dbias, more_dcap) = tiles.fold_tokens(visit_tokens, sums)
        dkernel = add_slice(dkernel, dk, (0, start))  # it adds 0 to words of the tile before
        if dbias is not None:
            dbias = add_slice(dbias, more_dbias, (start,))
        if dcap is not None:
            dcap = dcap + more_dcap
        return Inputs(dx, dkernel, dbias, dcap)

    x, kernel, *terms = inputs
    start = Inputs(zeros(x), zeros(kernel, kernel.dtype), *jax.tree.map(zeros, terms))
    gradients = tiles.fold_words(visit_words, start)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs)


def transpose_logits(
    settings: Settings, tokens: Tokens, words: Words, raw: Array, lse: Lse, dsums: Sums
) -> tuple[Array, tuple[Array | None, Array | None]]:
    """Return d_raw [t, c] and the tile's (dbias, dcap), in the dtype of the logits."""
    keep = visible_pairs(tokens, words)

    def logits_of(raw, terms):
        return logits(settings, raw, terms, keep)

    terms = jax.tree.map(lambda x: x.astype(raw.dtype), words.terms)
    s, pull = jax.vjp(logits_of, raw, terms)  # (2)
    ds = probabilities(s, lse, keep) * dsums.lse[..., None]  # (4) (5)
    ds = ds + only_labels(tokens, words, dsums.hit[..., None])
    if dsums.total is not None:
        ds = ds + dsums.total[..., None]
    return pull(ds)
