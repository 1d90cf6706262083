"""Cut the work of one device into parts: one chunk of its queries against one chunk of keys.

A part is a call of its own, of consecutive queries and keys. Its window and lengths count within
the part. `Origin` gives functions and dropout the positions of the whole call.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.problem import Entries, LogitParams, Operands, Problem, map_operands
from memeff.sequence.layout import Layout, chunk_start, stride_of
from memeff.slicing import add_slice, slice_dims, write_slice


@dataclasses.dataclass(frozen=True)
class Shards:
    """The sharding of a sequence: the axis of the mesh, and the layout."""

    axis: str
    layout: Layout

    @property
    def devices(self) -> int:
        """Return the number of devices along the axis."""
        return lax.axis_size(self.axis)

    @property
    def rank(self) -> Array:
        """Return the number of this device along the axis, int32."""
        return lax.axis_index(self.axis)

    def start(self, device, chunk: "Chunk", length: int):
        """Return the position of the first token of a device's chunk of `length` tokens."""
        return chunk_start(self.layout, self.devices, device, chunk.number, length)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One of `count` equal chunks of the tokens that a device holds."""

    number: Any = 0  # an int or an int32 array
    count: int = 1

    def pick(self, x: Array, dim: int) -> Array:
        """Return the chunk of x along `dim`."""
        if self.count == 1:
            return x
        size = x.shape[dim] // self.count
        return slice_dims(x, {dim: (self.number * size, size)})

    def put(self, x: Array, part: Array, dim: int) -> Array:
        """Return x with `part` in the place of the chunk."""
        if self.count == 1:
            return part
        starts: list[Any] = [0] * x.ndim
        starts[dim] = self.number * part.shape[dim]
        return write_slice(x, part, starts)

    def add(self, x: Array, part: Array, dim: int) -> Array:
        """Return x with `part` added to the chunk."""
        return self.put(x, self.pick(x, dim) + part.astype(x.dtype), dim)


class Part(NamedTuple):
    """A chunk of this device's queries, and a chunk of the keys that it has received."""

    problem: Problem  # with the offset of the whole call
    rows: Chunk
    cols: Chunk
    first_query: Any  # position of the first query, an int or an int32 array
    first_key: Any  # position of the first key
    distance: int | None  # first_query - first_key if it is the same on all devices, else None
    column: Any = None  # where the keys begin in the columns of a bias; None: they are all columns


class Keys(NamedTuple):
    """The arrays that belong to keys. Devices send them to each other."""

    key: Array  # B S K H
    value: Any  # B S K D; None in `stack_keys`
    kv_segments: Array | None  # B S


def keys_of(operands: Operands) -> Keys:
    """Return the arrays, or their tangents, that belong to the keys."""
    return Keys(operands.key, operands.value, operands.kv_segments)


def cut_part(part: Part, operands: Operands, keys: Keys, size: int) -> Operands:
    """Return the operands, or their tangents, of a part of `size` keys.

    `operands` are those of this device, and `keys` are the keys that it has received.
    """

    def cut(x: Array, dims: str) -> Array:
        if "t" in dims and x.shape[dims.index("t")] > 1:
            x = part.rows.pick(x, dims.index("t"))
        if dims == "bnts" and part.column is not None:
            x = slice_dims(x, {3: (part.column, size)})
        return x

    def pick(x: Array | None) -> Array | None:
        return None if x is None else part.cols.pick(x, 1)

    cut_operands = map_operands(cut, operands._replace(key=None, value=None, kv_segments=None))
    return cut_operands._replace(
        key=pick(keys.key), value=pick(keys.value), kv_segments=pick(keys.kv_segments)
    )


def split_tokens(x: Array, count: int) -> Array:
    """Return x [B, T, ...] as [n B, T/n, ...], each of n = `count` chunks a batch entry."""
    B, T = x.shape[:2]
    return x.reshape(count * B, T // count, *x.shape[2:])


def halve_rows(x: Array) -> Array:
    """Return rows x [B, K, G, T, ...] as [2 B, K, G, T/2, ...]."""
    B, K, G, T = x.shape[:4]
    x = jnp.moveaxis(x, 3, 1)  # b t k g, as it is stored
    x = x.reshape(2 * B, T // 2, K, G, *x.shape[4:])
    return jnp.moveaxis(x, 1, 3)


def join_halves(x: Array) -> Array:
    """Return rows x [2 B, K, G, T/2, ...] of `halve_rows` as [B, K, G, T, ...]."""
    B, K, G, T = x.shape[:4]
    x = jnp.moveaxis(x, 3, 1)  # b t k g, as it is stored
    x = x.reshape(B // 2, 2 * T, K, G, *x.shape[4:])
    return jnp.moveaxis(x, 1, 3)


def stack_keys(keys: Keys) -> Keys:
    """Return keys and values as one array `key` [2 B, S, K, H], the keys first."""
    halves = [split_tokens(x, 2) for x in (keys.key, keys.value)]
    both = jnp.concatenate(halves)  # as halves, XLA copies them in half the time
    B, *rest = keys.key.shape
    return keys._replace(key=both.reshape(2 * B, *rest), value=None)


def join_parts(parts: tuple[Part, ...], operands: Operands, keys: Keys) -> Operands:
    """Return the operands of parts, whose chunks have one size, as one call.

    Its batch entries are those of the first part, then those of the second, and so on. The kernels
    read them in place, from `stack_keys`. `operands` have no arrays but query, key, value and
    segments.
    """
    B = operands.query.shape[0]
    count = parts[0].rows.count
    split = functools.partial(split_tokens, count=count)

    def entries(chunks: list[Chunk]) -> Array:
        firsts = count * jnp.arange(B, dtype=jnp.int32)
        return jnp.concatenate([firsts + chunk.number for chunk in chunks])

    of_queries = entries([part.rows for part in parts])
    of_keys = entries([part.cols for part in parts])
    q_segments = operands.q_segments
    kv_segments = keys.kv_segments
    if q_segments is not None and kv_segments is not None:
        q_segments = split(q_segments)[of_queries]
        kv_segments = split(kv_segments)[of_keys]
    both = split(keys.key)
    return operands._replace(
        query=split(operands.query),
        key=both,
        value=both,
        q_segments=q_segments,
        kv_segments=kv_segments,
        entries=Entries(of_queries, of_keys, of_keys + count * B),
    )


def join_rows(parts: tuple[Part, ...], operands: Operands, keys: Keys) -> Operands:
    """Return the operands of all parts of a causal zigzag's step as a call of all rows and keys.

    A batch entry of the call is one chunk of queries, early or late, and all keys that the device
    has received. `count_keys_seen` says how many of these keys it sees. The work on the device's
    own keys is one part with whole batch entries.
    """
    B, T = operands.query.shape[:2]
    count = len(parts)
    entries = jnp.repeat(jnp.arange(B, dtype=jnp.int32), count)
    q_segments = operands.q_segments
    kv_segments = keys.kv_segments
    if q_segments is not None and kv_segments is not None:
        q_segments = split_tokens(q_segments, count)
        kv_segments = kv_segments[entries]
    return operands._replace(
        query=split_tokens(operands.query, count),
        key=keys.key,
        value=keys.key,
        q_segments=q_segments,
        kv_segments=kv_segments,
        entries=Entries(jnp.arange(count * B, dtype=jnp.int32), entries, entries + B),
    )


def count_keys_seen(parts: tuple[Part, ...], operands: Operands) -> Array:
    """Return how many keys each batch entry of `join_rows` sees, [2 B]: none, half of them or all.

    The parts are late queries against early keys, and two chunks of the same number.
    """
    _, same = parts
    chunks = jnp.stack([1 - same.rows.number, 1 + same.rows.number])  # of early and late queries
    B, S = operands.key.shape[0] // 2, operands.key.shape[1]
    return jnp.tile(chunks * (S // 2), B)


def place_part(shards: Shards, part: Part, operands: Operands) -> tuple[Problem, Operands]:
    """Return a part's problem, and its operands with lengths, offset and origin."""
    problem = part.problem
    stride = stride_of(shards.layout, shards.devices)
    T = operands.query.shape[1]
    S = operands.key.shape[1]
    offset = operands.q_offset
    if offset is None:
        offset = jnp.full((1,), problem.q_offset, jnp.int32)
    origin = None
    if problem.names_positions:
        assert operands.origin is not None
        origin = operands.origin._replace(
            first_query=jnp.asarray(part.first_query, jnp.int32),
            first_key=jnp.asarray(part.first_key, jnp.int32),
            q_offset=offset,
        )
    if problem.has_window:
        problem, offset = _window_of_part(problem, part, operands.q_offset, stride)
    else:
        problem, offset = dataclasses.replace(problem, q_offset=0), None

    def within(lengths: Array | None, first, size: int) -> Array | None:
        """Return how many of `size` positions from `first` on lie below `lengths`."""
        if lengths is None:
            return None
        return jnp.clip(-((first - lengths) // stride), 0, size).astype(jnp.int32)

    return problem, operands._replace(
        q_lengths=within(operands.q_lengths, part.first_query, T),
        kv_lengths=within(operands.kv_lengths, part.first_key, S),
        q_offset=offset,
        origin=origin,
    )


def _window_of_part(
    problem: Problem, part: Part, q_offset: Array | None, stride: int
) -> tuple[Problem, Array | None]:
    """Return a problem whose window counts within the part, and its offset if that is an array."""
    is_static = q_offset is None and part.distance is not None
    offset: Any = problem.q_offset if q_offset is None else q_offset
    offset = offset + (part.distance if is_static else part.first_query - part.first_key)
    if stride > 1:  # there is no left side, so the last visible key decides
        offset = (offset + problem.right) // stride
        problem = dataclasses.replace(problem, right=0)
    if is_static:
        return dataclasses.replace(problem, q_offset=offset), None
    problem = dataclasses.replace(problem, q_offset=0)
    return problem, jnp.reshape(offset, (-1,)).astype(jnp.int32)


def add_logit_params(part: Part, total: LogitParams, new: LogitParams) -> LogitParams:
    """Add the gradients of a part's logit params to those of this device."""
    bias = None
    if total.bias is not None and new.bias is not None:
        t, c = new.bias.shape[2:]
        row = part.rows.number * t
        column = 0 if part.column is None else part.column
        starts = [0, 0, row if total.bias.shape[2] > t else 0, column]
        if total.bias.shape[3] == c:
            starts[3] = 0
        bias = add_slice(total.bias, new.bias, starts)
    rest = jax.tree.map(jnp.add, total._replace(bias=None), new._replace(bias=None))
    return rest._replace(bias=bias)
