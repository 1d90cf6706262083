"""Sum a function over tiles, with derivatives of every order and vmap, in linear memory.

A sum evaluates a function f on each tile in which some query sees some key, and adds up the
results. Besides its arrays, it holds what f needs for one tile.
  (1) parts = inputs cut to the tile
  (2) results = f(location, *parts)
  (3) totals at the tile += results
Its derivative is the sum of f's derivative. Its transpose is the sum of f's transpose, which cuts
the cotangents of the totals and adds to those of the inputs. So no order saves anything of a tile,
and JAX never differentiates a loop.

Dims are letters. Tiles cut b (batch), n (query heads), k (key heads), t (queries) and s (keys),
except where a dim is broadcast (size 1). Other letters, and the capitals that vmap adds, are whole.
"""

import dataclasses
import functools
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from memeff.autodiff.primitives import mapped_axis_first, none_mapped, nonzero, pick, put_at
from memeff.problem import Problem
from memeff.sharding import vary_together
from memeff.slicing import slice_letters, write_slice


class DimNames(NamedTuple):
    """The dims of an input or a total."""

    letters: str
    like: int  # index of the input whose sharding this array copies
    extra_sizes: tuple[int, ...] = ()  # sizes of the last letters, if that input lacks them


class TileLocation(NamedTuple):
    """The position of a tile."""

    first: tuple[Any, Any]  # batch entry and key head
    rows: Array  # absolute positions t, -1 where the tile before has them already
    cols: Array  # absolute positions c
    cuts: dict[str, tuple[Any, int]]  # start and size of each letter that tiles cut
    masked: bool  # may a query here not see a key?


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """The tiles that a sum visits."""

    lists: Callable[["TileGrid"], list[tuple[bool, np.ndarray]]]  # masked?, indices i, j [n, 2]
    problem: Problem | None  # for `lists`
    chunk_size: tuple[int, int]  # rows and columns of a tile
    head_block: tuple[int, int]  # batch entries and key heads of a tile
    heads: tuple[int, int, int]  # B, K, G
    lengths: tuple[int, int]  # T, S
    elementwise: bool  # does more than the window and known blocks hide pairs?
    dtype: Any  # of totals

    def starts(self) -> list[tuple[bool, np.ndarray]]:
        """Return (masked, starts [n, 4]) of lists of tiles: batch entry, key head, query, key."""
        if 0 in (*self.heads, *self.lengths):
            return []
        B, K, _ = self.heads
        b, k = self.head_block
        if not isinstance(b, int):  # a batch that jax.export leaves symbolic is in one tile
            B = b = 1
        heads = np.mgrid[0:B:b, 0:K:k].reshape(2, -1).T  # n 2
        lists = []
        for masked, indices in self.lists(self):
            tiles = indices * self.chunk_size
            heads_of_tiles = heads.repeat(len(tiles), 0)
            tiles_of_heads = np.tile(tiles, (len(heads), 1))
            starts = np.concatenate([heads_of_tiles, tiles_of_heads], axis=1)
            if len(starts):
                lists.append((masked, starts.astype(np.int32)))
        return lists

    def locate(self, start, masked: bool) -> TileLocation:
        """Return the location of the tile at `start` [4], moved so that it fits."""
        t, c = map(min, self.chunk_size, self.lengths)
        _, _, G = self.heads
        return locate(start, (*self.head_block, t, c), G, self.lengths, masked)


def locate(
    start, size: tuple[int, int, int, int], G: int, lengths: tuple[int, int], masked: bool
) -> TileLocation:
    """Return the location of a tile of `size` at `start`, moved so that it fits.

    Both count batch entries, key heads, queries and keys. `lengths` are T and S.
    """
    batch, head, row, col = start
    b, k, t, c = size
    row, rows = positions(row, t, lengths[0])
    col, cols = positions(col, c, lengths[1])
    cuts = {"b": (batch, b), "n": (head * G, k * G), "k": (head, k), "t": (row, t), "s": (col, c)}
    return TileLocation((batch, head), rows, cols, cuts, masked)


def positions(first, size: int, total: int) -> tuple[Array, Array]:
    """Return where the tile at `first` starts, so that it fits, and its positions [size].

    A position is -1 where the tile before has it already.
    """
    first = jnp.int32(first)
    start = jnp.minimum(first, total - size)
    position = start + lax.iota(jnp.int32, size)
    return start, jnp.where(position >= first, position, -1)


TileFn = Callable[..., tuple[Array, ...]]  # location, *parts -> results


@dataclasses.dataclass(frozen=True)
class TileSum:
    """A sum of f(location, *parts) over the tiles of `grid`, as a function of arrays."""

    f: TileFn  # linear in the last `linear` inputs together
    grid: TileGrid
    inputs: tuple[DimNames, ...]
    totals: tuple[DimNames, ...]  # in `grid.dtype`
    linear: int

    def __call__(self, *arrays) -> list[Array]:
        """Return the totals; JAX differentiates and maps this call by the rules below."""
        return _sum.bind(*arrays, tile_sum=self)

    def run(self, *arrays) -> tuple[Array, ...]:
        """Compute the totals tile by tile."""

        def add(location, old, parts):
            new = self.f(location, *parts)
            return [x + y.astype(x.dtype) for x, y in zip(old, new, strict=True)]  # (2)

        start = [_zeros(total, self.grid.dtype, self.inputs, arrays) for total in self.totals]
        return fold(add, self.grid, self.inputs, self.totals, tuple(start), arrays)


def fold(
    step,
    grid: TileGrid,
    inputs: tuple[DimNames, ...],
    totals: tuple[DimNames, ...],
    start,
    arrays,
) -> tuple[Array, ...]:
    """Update the totals `start` by `step(location, old, parts)` at one tile after the other.

    `step` returns the new totals at the tile. JAX must not differentiate this, because it would
    save the totals of each step; sums go through `TileSum`.
    """
    results = vary_together(start, arrays)
    for masked, starts in grid.starts():

        def visit(results, start, masked=masked):
            location = grid.locate(start, masked)
            parts = _cut(inputs, arrays, location)  # (1)
            old = _cut(totals, results, location)
            new = step(location, old, parts)
            write = functools.partial(_write, location)
            return tuple(map(write, totals, results, new)), None  # (3)

        results, _ = lax.scan(visit, results, starts)
    return results


def _cut(dims: tuple[DimNames, ...], arrays, location: TileLocation) -> list[Array]:
    """Return the parts of arrays at a tile."""
    parts = []
    for names, x in zip(dims, arrays, strict=True):
        parts.append(slice_letters(x, names.letters, location.cuts))
    return parts


def _write(location: TileLocation, dims: DimNames, total: Array, part: Array) -> Array:
    """Return `total` with `part` at a tile."""
    starts = []
    for letter in dims.letters:
        start, _ = location.cuts.get(letter, (0, None))
        starts.append(start)
    return write_slice(total, part.astype(total.dtype), starts)


def _zeros(dims: DimNames, dtype, inputs: tuple[DimNames, ...], arrays) -> Array:
    """Return zeros with `dims`, sharded like the input `dims.like`."""
    like = arrays[dims.like]
    like_letters = inputs[dims.like].letters
    sizes = {}
    for names, x in zip(inputs, arrays, strict=False):
        for letter, size in zip(names.letters, x.shape, strict=True):
            if letter.isupper():  # a dim that vmap added
                sizes[letter] = size
    sizes.update(zip(like_letters, like.shape, strict=True))
    extra_letters = dims.letters[len(dims.letters) - len(dims.extra_sizes) :]
    sizes.update(zip(extra_letters, dims.extra_sizes, strict=True))
    shape = tuple(sizes[letter] for letter in dims.letters)
    axes = [dims.letters.index(letter) for letter in like_letters]
    return lax.broadcast_in_dim(jnp.zeros_like(like, dtype), shape, axes)


# ---- the derivative of f, its transpose, and f under vmap


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The tangent of f: a function of f's inputs, then of the tangents of those in `active`."""

    f: TileFn
    active: tuple[int, ...]

    def __call__(self, location, *parts):
        """Return the tangents of f's results."""
        count = len(self.active)
        primals = parts[:-count]
        tangents = parts[-count:]

        def f_of_active(*active):
            return self.f(location, *put_at(primals, self.active, active))

        _, tangents_out = jax.jvp(f_of_active, pick(primals, self.active), tangents)
        return tangents_out


@dataclasses.dataclass(frozen=True)
class Transposed:
    """The transpose of f: a function of f's other inputs, then of cotangents of f's results."""

    f: TileFn
    unknown: tuple[int, ...]  # inputs of f whose cotangents it returns, in ascending order
    unknown_types: tuple[tuple[DimNames, Any], ...]  # dims and dtype of each
    inputs: tuple[DimNames, ...]  # the other inputs
    with_cotangent: tuple[int, ...]  # results of f that have a cotangent

    def __call__(self, location, *parts):
        """Return the cotangents of f's inputs in `unknown`."""
        count = len(self.with_cotangent)
        known = parts[:-count]
        cotangents = parts[-count:]

        def f_of_unknown(*unknown):
            inputs = list(known)
            for n, x in zip(self.unknown, unknown, strict=True):
                inputs.insert(n, x)
            return pick(self.f(location, *inputs), self.with_cotangent)

        zeros = [_zeros(dims, dtype, self.inputs, known) for dims, dtype in self.unknown_types]
        results, pull = jax.vjp(f_of_unknown, *vary_together(zeros, parts))
        result_cotangents = []
        for cotangent, x in zip(cotangents, results, strict=True):
            result_cotangents.append(cotangent.astype(x.dtype))
        return pull(tuple(result_cotangents))


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A vmap of f over `axes` of its parts."""

    f: TileFn
    axes: tuple[int | None, ...]

    def __call__(self, location, *parts):
        """Return f's results with the mapped axis first."""
        f = functools.partial(self.f, location)
        return jax.vmap(f, in_axes=self.axes)(*parts)


# ---- the rules of the primitive


def _jvp(primals, tangents, *, tile_sum: TileSum):
    """Return the totals, and their tangents as another sum."""
    results = tile_sum(*primals)
    active = nonzero(tangents)
    fixed = len(primals) - tile_sum.linear
    if active[0] >= fixed:  # in linear inputs, f is its own tangent
        tangents = map(ad.instantiate_zeros, tangents[fixed:])
        return results, tile_sum(*primals[:fixed], *tangents)
    tangent_sum = dataclasses.replace(
        tile_sum,
        f=Tangent(tile_sum.f, active),
        inputs=tile_sum.inputs + pick(tile_sum.inputs, active),
        linear=len(active),
    )
    return results, tangent_sum(*primals, *pick(tangents, active))


def _transpose(cotangents, *args, tile_sum: TileSum):
    """Return the cotangents of the inputs that are not known, as another sum."""
    inputs = tile_sum.inputs
    unknown = tuple(n for n, x in enumerate(args) if ad.is_undefined_primal(x))
    known = tuple(n for n in range(len(args)) if n not in unknown)
    with_cotangent = nonzero(cotangents)
    unknown_types = tuple((inputs[n], args[n].aval.dtype) for n in unknown)
    known_inputs = pick(inputs, known)
    transposed = TileSum(
        f=Transposed(tile_sum.f, unknown, unknown_types, known_inputs, with_cotangent),
        grid=tile_sum.grid,
        inputs=known_inputs + pick(tile_sum.totals, with_cotangent),
        totals=pick(inputs, unknown),
        linear=len(with_cotangent),
    )
    sums = transposed(*pick(args, known), *pick(cotangents, with_cotangent))
    results: list[Any] = [None] * len(args)
    for n, x in zip(unknown, sums, strict=True):
        results[n] = x.astype(args[n].aval.dtype)
    return results


def _batch(axis_data, arrays, axes, *, tile_sum: TileSum):
    """Return the totals under vmap, as a sum over arrays with one more dim, a capital letter."""
    if none_mapped(axes):
        results = tile_sum(*arrays)
        return results, [None] * len(results)
    used = "".join(dims.letters for dims in tile_sum.inputs)
    letter = next(x for x in string.ascii_uppercase if x not in used)
    arrays, axes = mapped_axis_first(arrays, axes)

    def add_letter(dims: DimNames, axis: int | None = 0) -> DimNames:
        return dims if axis is None else dims._replace(letters=letter + dims.letters)

    mapped_sum = dataclasses.replace(
        tile_sum,
        f=Mapped(tile_sum.f, axes),
        inputs=tuple(map(add_letter, tile_sum.inputs, axes)),
        totals=tuple(map(add_letter, tile_sum.totals)),
    )
    results = mapped_sum(*arrays)
    return results, [0] * len(results)


@functools.lru_cache
def _jitted(tile_sum: TileSum):
    """Return a compiled sum."""
    return jax.jit(tile_sum.run)


def _run_compiled(*arrays, tile_sum: TileSum) -> list[Array]:
    """Compute a sum outside of any trace."""
    return list(_jitted(tile_sum)(*arrays))


def _lowered(*arrays, tile_sum: TileSum) -> tuple[Array, ...]:
    """Trace a sum for compilation."""
    return tile_sum.run(*arrays)


@functools.lru_cache
def _types(*avals, tile_sum: TileSum):
    """Return the types of the totals."""
    return jax.make_jaxpr(tile_sum.run)(*avals).out_avals


_sum = Primitive("memeff_tile_sum")
_sum.multiple_results = True
_sum.def_impl(_run_compiled)
_sum.def_abstract_eval(_types)
mlir.register_lowering(_sum, mlir.lower_fun(_lowered, multiple_results=True))
ad.primitive_jvps[_sum] = _jvp
ad.primitive_transposes[_sum] = _transpose
batching.fancy_primitive_batchers[_sum] = _batch
