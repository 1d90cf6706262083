"""Keep the results of the parts of a device's work, and combine them late, in few passes.

A part gives rows of out, or of a gradient, for one chunk of the device's tokens: a term. To add
each term to an array of all tokens at once would read and write that array for every part. So terms
are kept, in their dtypes and as the kernels wrote them. Later XLA reads each of them once, in one
pass that pads every term to all tokens, and writes their sum. Slices and joined chunks would be
passes of their own. Terms are combined earlier if they would take much memory.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.problem import sum_dtype
from memeff.sequence.parts import Chunk
from memeff.softmax import LSE_OF_EMPTY_ROW, Lse, merge_partial

# Two devices in causal order have three terms, which wait to the end. With more devices the memory
# of a device must not grow, and at lengths that fill it the passes take no share of the time.
MOST_WAITING = 3
MOST_WAITING_BYTES = 2**30


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Term:
    """The results of parts, each for a chunk of the tokens of a device."""

    chunks: tuple[Chunk, ...]  # of each part, all of one size
    value: Any  # a pytree of arrays; their batch entries are those of the first part, and so on
    distance: int = 0  # of the ring's step that gave it

    def tree_flatten(self):
        """Return the arrays; a number of a chunk that is an int stays one."""
        numbers = [chunk.number for chunk in self.chunks]
        traced = [None if isinstance(number, int) else number for number in numbers]
        static = tuple(number if isinstance(number, int) else None for number in numbers)
        return (self.value, traced), (static, self.chunks[0].count, self.distance)

    @classmethod
    def tree_unflatten(cls, static, arrays):
        """Return the term of these arrays."""
        value, traced = arrays
        known, count, distance = static
        numbers = [x if n is None else n for n, x in zip(known, traced, strict=True)]
        return cls(tuple(Chunk(number, count) for number in numbers), value, distance)


Combine = Callable[[list[tuple[Any, Array | None]]], Any]


def combine_terms(combine: Combine, terms: list[Term], dim: int) -> Any:
    """Return the terms combined to arrays of all tokens, which are along `dim` of each array.

    `combine` gets (value, mask) of each term, placed among zeros for the other tokens. The mask
    [tokens] is True at the term's tokens; None: at all of them.
    """
    placed = []
    for term in terms:
        numbers = [chunk.number for chunk in term.chunks]
        static = all(isinstance(number, int) for number in numbers)
        if static and numbers == list(range(term.chunks[0].count)):
            placed.append((jax.tree.map(functools.partial(_join, term, dim), term.value), None))
            continue
        for n, chunk in enumerate(term.chunks):
            value = jax.tree.map(functools.partial(_entries_of_part, term, n), term.value)
            mask = _place_mask(chunk, jax.tree.leaves(value)[0].shape[dim])
            placed.append((jax.tree.map(functools.partial(_place, chunk, dim), value), mask))
    return combine(placed)


def _join(term: Term, dim: int, x: Array) -> Array:
    """Return x, the numbers of all chunks in order, as those of all tokens."""
    parts = len(term.chunks)
    x = x.reshape(parts, x.shape[0] // parts, *x.shape[1:])
    return lax.collapse(jnp.moveaxis(x, 0, dim), dim, dim + 2)


def _entries_of_part(term: Term, n: int, x: Array) -> Array:
    """Return the batch entries of the n-th part."""
    B = x.shape[0] // len(term.chunks)
    return x[n * B : (n + 1) * B]


def _place(chunk: Chunk, dim: int, x: Array) -> Array:
    """Return x, the numbers of a chunk, among zeros for the other chunks.

    It is padding, which XLA fuses with the sum that follows.
    """
    if chunk.count == 1:
        return x
    padded = []
    for number in range(chunk.count):
        sides = [(0, 0, 0)] * x.ndim
        size = x.shape[dim]
        sides[dim] = number * size, (chunk.count - 1 - number) * size, 0
        padded.append(functools.partial(lax.pad, x, jnp.zeros((), x.dtype), sides))
    if isinstance(chunk.number, int):
        return padded[chunk.number]()
    assert chunk.count == 2
    return jnp.where(chunk.number == 0, padded[0](), padded[1]())


def _place_mask(chunk: Chunk, size: int) -> Array | None:
    """Return True at the chunk's tokens, of `size` in a chunk; None if these are all."""
    if chunk.count == 1:
        return None
    return jnp.arange(chunk.count * size, dtype=jnp.int32) // size == chunk.number


def waiting_bytes(terms: list[Term]) -> int:
    """Return the bytes of all terms."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(terms))


def add_term(combine: Combine, terms: list[Term], new: Term, dim: int) -> list[Term]:
    """Return terms with a new one, combined if they would hold too much memory."""
    terms = [*terms, new]
    if len(terms) <= MOST_WAITING and waiting_bytes(terms) <= MOST_WAITING_BYTES:
        return terms
    return [Term((Chunk(),), combine_terms(combine, terms, dim))]


def shorten(terms: list[Term]) -> list[Term]:
    """Return these terms or their sum, whichever takes fewer bytes in a message."""
    if not terms:
        return terms
    total = [Term((Chunk(),), sum_terms(terms))]
    return terms if waiting_bytes(terms) < waiting_bytes(total) else total


def sum_terms(terms: list[Term]) -> Any:
    """Return the sum of gradients [B, tokens, ...] as arrays of all tokens, in float32 or float64.

    A chunk without a term is 0.
    """
    return combine_terms(add_values, terms, 1)


def add_values(values: list[tuple[Any, Array | None]]) -> Any:
    """Return the sum of pytrees of arrays, in float32 or float64."""
    widened = []
    for value, _ in values:  # 0 at the other tokens
        value = jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype)), value)
        widened.append(value)
    return jax.tree.map(lambda *arrays: functools.reduce(operator.add, arrays), *widened)


def merge_values(values: list[tuple[Any, Array | None]]) -> tuple[tuple[Array, ...], Lse]:
    """Return (out, lse) of all keys from those of parts, each of some of the keys.

    `out` [B, K, G, t, D] is a tuple of arrays, whose sum it is. lse is [B, K, G, t].
    """
    if len(values) == 1 and values[0][1] is None:
        return values[0][0]
    outs, lses = [], []
    for (out, lse), mask in values:
        widened = [x.astype(lse.high.dtype) for x in out]
        outs.append(functools.reduce(operator.add, widened))
        high = lse.high if mask is None else jnp.where(mask, lse.high, LSE_OF_EMPTY_ROW)
        lses.append(Lse(high, lse.low))
    out, lse = merge_partial(outs, lses)
    return (out,), lse
