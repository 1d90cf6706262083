"""Keep what the parts of a device's work find, and combine it late, in few passes over memory.

A part finds rows of out, or of a gradient, for one chunk of the device's tokens. Adding each to an
array of all tokens at once would read and write that array for every part. So terms wait, in the
dtypes in which they came, and XLA reads each of them once. They are combined early where they would
hold much memory.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from memeff.sequence.parts import Chunk
from memeff.softmax import LSE_OF_EMPTY_ROW, Lse, merge_partial

# The fifth part combines them: two devices in causal order have five. With more devices the memory
# of a device must not grow, and at lengths that fill it the passes take no share of the time.
MOST_WAITING = 4
MOST_WAITING_BYTES = 2**30


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class Term:
    """What one part found for a chunk of the tokens of a device."""

    chunk: Chunk
    value: Any  # a pytree of arrays

    def tree_flatten(self):
        """Return the arrays; a number of the chunk that is an int stays one."""
        number = self.chunk.number
        if isinstance(number, int):
            return (self.value,), (number, self.chunk.count)
        return (self.value, number), (None, self.chunk.count)

    @classmethod
    def tree_unflatten(cls, static, arrays):
        """Return the term of these arrays."""
        number, count = static
        if number is None:
            value, number = arrays
        else:
            (value,) = arrays
        return cls(Chunk(number, count), value)


Combine = Callable[[list[tuple[Any, Array | None]]], Any]


def combine_terms(combine: Combine, terms: list[Term], dim: int) -> list[Term]:
    """Return one term for each chunk of the tokens.

    `combine` gets (value, mask) of all terms that may be of a chunk. The mask is None, or a scalar
    that is True if the term is of this chunk. The tokens lie along `dim` of each array.
    """
    count = max(term.chunk.count for term in terms)
    combined = []
    for number in range(count):
        of_chunk: list[tuple[Any, Array | None]] = []
        for term in terms:
            chunk, value = term.chunk, term.value
            if chunk.count < count:
                pick = functools.partial(Chunk(number, count).pick, dim=dim)
                of_chunk.append((jax.tree.map(pick, value), None))
            elif not isinstance(chunk.number, int):
                of_chunk.append((value, chunk.number == number))
            elif chunk.number == number:
                of_chunk.append((value, None))
        if of_chunk:
            combined.append(Term(Chunk(number, count), combine(of_chunk)))
    return combined


def join_terms(terms: list[Term], dim: int) -> Any:
    """Return the arrays of all tokens from one term for each chunk, in order."""
    first = terms[0]
    assert len(terms) == first.chunk.count
    if first.chunk.count == 1:
        return first.value
    values = [term.value for term in terms]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays, dim), *values)


def waiting_bytes(terms: list[Term]) -> int:
    """Return the bytes of all terms."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(terms))


def add_term(combine: Combine, terms: list[Term], new: Term, dim: int) -> list[Term]:
    """Return terms with a new one, combined if they would hold too much memory."""
    terms = [*terms, new]
    if len(terms) <= MOST_WAITING and waiting_bytes(terms) <= MOST_WAITING_BYTES:
        return terms
    return combine_terms(combine, terms, dim)


def sum_terms(terms: list[Term], dim: int) -> Any:
    """Return the sum of terms as arrays of all tokens, in float32 or float64.

    A chunk without a term is 0.
    """
    count = max(term.chunk.count for term in terms)
    sums = {term.chunk.number: term for term in combine_terms(add_values, terms, dim)}
    zeros = jax.tree.map(jnp.zeros_like, next(iter(sums.values())).value)
    chunks = [Chunk(number, count) for number in range(count)]
    return join_terms([sums.get(chunk.number, Term(chunk, zeros)) for chunk in chunks], dim)


def add_values(values: list[tuple[Any, Array | None]]) -> Any:
    """Return the sum of pytrees of arrays, in float32 or float64."""
    widened = []
    for value, mask in values:
        value = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), value)
        if mask is not None:
            value = jax.tree.map(functools.partial(_where, mask), value)
        widened.append(value)
    return jax.tree.map(lambda *arrays: functools.reduce(operator.add, arrays), *widened)


def _where(mask: Array, x: Array) -> Array:
    """Return x where the scalar `mask` is True, and 0 elsewhere."""
    return jnp.where(mask, x, 0)


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
