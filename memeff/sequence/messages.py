"""Send pytrees of arrays to another device of a ring, several arrays in one message.

XLA:GPU sends one message at a time, and a message of several arrays costs no more than one of as
many bytes. So arrays of any dtypes are joined to a `Parcel`, and taken out again where they are
read.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.sequence.parts import Shards

ALIGNMENT = 256  # bytes; the kernels for GPUs refuse an array that begins elsewhere


def send_both(
    shards: Shards, pack: bool, ahead: Any, behind: Any, came: Any = None
) -> tuple[Any, Any]:
    """Send (keys, by how many devices) `ahead`, and `behind` them (values, by how many devices).

    Both are in one message if they go to the same device, because XLA:GPU sends one message at a
    time. Return what arrives from other devices, for `open_parcels`, and the keys as they are
    stored in the message. `came` is the message that brought the keys.
    """
    keys, hops = ahead
    values, back = behind
    if hops == back or not values or keys is None:
        hops = hops if keys is not None else back
        renewed = len(jax.tree.leaves(values))
        sent, (_, keys) = pass_on(shards, pack, (values, keys), hops, came, renewed)
        return sent, keys
    sent, keys = pass_on(shards, pack, keys, hops)
    return (pass_on(shards, pack, values, back)[0], sent), keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parcel:
    """A pytree of arrays in one message. They are taken out late, so that they are not copied.

    Each array begins at a multiple of ALIGNMENT bytes, so that a kernel can read it in place.
    """

    message: Array
    shapes: tuple[jax.ShapeDtypeStruct, ...] = dataclasses.field(metadata={"static": True})
    structure: Any = dataclasses.field(metadata={"static": True})

    def open(self) -> Any:
        """Return the pytree."""
        word = self.message.dtype.itemsize
        arrays = []
        start = 0
        for x in self.shapes:
            count = x.size * x.dtype.itemsize // word
            part = lax.slice_in_dim(self.message, start, start + count)
            start += count + _gap(count, word)
            if part.dtype != x.dtype:
                part = lax.bitcast_convert_type(_in_rows(part, 8 * x.dtype.itemsize), x.dtype)
            arrays.append(part.reshape(x.shape))
        return jax.tree.unflatten(self.structure, arrays)

    def replace_start(self, words: list[Array]) -> "Parcel":
        """Return the parcel with other words in place of those of its first arrays."""
        if not words:
            return self
        message = lax.dynamic_update_slice(self.message, jnp.concatenate(words), (0,))
        return dataclasses.replace(self, message=message)


def open_parcels(tree: Any) -> Any:
    """Return a pytree in which each parcel is replaced by its contents."""

    def is_parcel(x):
        return isinstance(x, Parcel)

    return jax.tree.map(lambda x: x.open() if is_parcel(x) else x, tree, is_leaf=is_parcel)


def pass_on(
    shards: Shards, pack: bool, tree: Any, hops: int, came: Any = None, renewed: int = 0
) -> tuple[Any, Any]:
    """Send a pytree of arrays `hops` devices ahead; with `pack`, several arrays as a parcel.

    Return what arrives, and the pytree as it is stored in the message. If `came` is a parcel of
    such a pytree in which only the first `renewed` arrays have changed, only these are overwritten
    in it.
    """
    arrays, structure = jax.tree.flatten(tree)
    P = shards.devices
    if not arrays or hops == 0:
        return tree, tree
    route = [(i, (i + hops) % P) for i in range(P)]
    send = functools.partial(lax.ppermute, axis_name=shards.axis, perm=route)
    if len(arrays) == 1 or not pack:  # bits have no derivative
        return jax.tree.unflatten(structure, [send(x) for x in arrays]), tree
    flat = [x.ravel() for x in arrays]
    words = flat
    if len({x.dtype for x in arrays}) > 1:
        bits = word_bits(flat)
        words = [lax.bitcast_convert_type(_in_rows(x, bits), f"uint{bits}") for x in flat]
        words = [x.ravel() for x in words]
    words = [_fill(x) for x in words]
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)
    if isinstance(came, Parcel) and (came.shapes, came.structure) == (shapes, structure):
        parcel = came.replace_start(words[:renewed])
    else:
        parcel = Parcel(jnp.concatenate(words), shapes, structure)
    parcel = lax.optimization_barrier(parcel)  # else XLA reads what the message is made of
    return dataclasses.replace(parcel, message=send(parcel.message)), parcel.open()


def _gap(count: int, word: int) -> int:
    """Return how many words of so many bytes lie between `count` words and the next array."""
    return -count % (ALIGNMENT // word)


def _fill(words: Array) -> Array:
    """Return the words of an array with zeros up to where the next array begins."""
    gap = _gap(words.size, words.dtype.itemsize)
    if not gap:
        return words
    return jnp.concatenate([words, jnp.zeros_like(words, shape=(gap,))])


def word_bits(arrays: list[Array]) -> int:
    """Return the bits of a message's words: if possible, as many as most of its numbers have.

    If the numbers of an array are words, XLA reads it from the message in the pass that needs it.
    """
    bytes_of: dict[int, int] = {}
    for x in arrays:
        size = x.dtype.itemsize
        bytes_of[size] = bytes_of.get(size, 0) + x.size * size
    most = max(bytes_of, key=bytes_of.__getitem__)
    return 8 * math.gcd(most, *(x.size * x.dtype.itemsize for x in arrays))


def _in_rows(x: Array, bits: int) -> Array:
    """Return numbers x [n] in rows that have one word of `bits` each."""
    count = bits // (8 * x.dtype.itemsize)
    return x.reshape(-1, count) if count > 1 else x
