"""Sums over tiles, closed under differentiation and vmap: every order in the memory of its arrays and of one tile.

A sum adds up what a function f makes of each tile that may see something. f is told where the tile lies, and gets the parts
of the inputs there; what it returns is added to the totals there:
  (1) parts = inputs cut to the tile     (2) found = f(where, *parts)     (3) totals at the tile += found
Its derivative is the sum of f's derivative. Its transpose cuts the cotangents of (3) and adds up what (1) transposed gives:
the sum of f's transpose. So nothing of a tile is ever saved, in no order, and JAX never differentiates a loop.

Dims are letters: b batch, n query heads, k key heads, t queries, s keys are cut (but where they are broadcast, of size 1);
others, and those of vmap in capitals, are whole.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from memeff.autodiff.primitives import batched
from memeff.problem import Problem
from memeff.sharding import vary_together
from memeff.slicing import slice_dims

CUT = "bnkts"


class DimNames(NamedTuple):
    """What an input or a total is."""

    letters: str
    # the input whose zeros, laid out over devices as it is, those of this one are made of
    like: int
    more: tuple[int, ...] = ()  # sizes of the last letters, which that input does not have


class TileLocation(NamedTuple):
    """Where a tile lies."""

    first: tuple[Any, Any]  # batch entry and key head
    rows: Array  # absolute positions t, -1 where a tile overhangs
    cols: Array  # c
    cuts: dict[str, tuple[Any, int]]  # start and size of each letter that is cut
    masked: bool  # may a query here not see a key?


@dataclasses.dataclass(frozen=True)
class TileGrid:
    """Which tiles there are."""

    lists: Callable[["TileGrid"], list[tuple[bool, np.ndarray]]]  # masked?, [n, 2] i, j
    problem: Problem  # tiles are of its chunk_size, and of its block of heads
    batch: int
    key_heads: int
    group: int  # query heads of a key head
    lengths: tuple[int, int]  # T, S
    elementwise: bool  # masks are known by their elements only
    dtype: Any  # of totals

    def starts(self) -> list[tuple[bool, np.ndarray]]:
        """[masked?, [n, 4] batch entry, key head, query, key]."""
        if 0 in (self.batch, self.key_heads, self.group, *self.lengths):
            return []
        b, k = self.block
        first = np.mgrid[0 : self.batch : b, 0 : self.key_heads : k].reshape(2, -1).T  # n 2
        found = []
        for masked, tiles in self.lists(self):
            at = tiles * self.problem.chunk_size
            pairs = np.concatenate([first.repeat(len(at), 0), np.tile(at, (len(first), 1))], 1)
            found.append((masked, pairs.astype(np.int32)))
        return [(masked, pairs) for masked, pairs in found if len(pairs)]

    @property
    def block(self) -> tuple[int, int]:
        return self.problem.block or (self.batch, self.key_heads)

    def where(self, start, masked: bool) -> TileLocation:
        (b, k), (T, S) = self.block, self.lengths
        batch, head, row, col = start
        t, c = (min(size, n) for size, n in zip(self.problem.chunk_size, self.lengths, strict=True))
        row, rows = positions(row, t, T)
        col, cols = positions(col, c, S)
        cuts = {
            "b": (batch, b),
            "k": (head, k),
            "n": (head * self.group, k * self.group),
            "t": (row, t),
            "s": (col, c),
        }
        return TileLocation((batch, head), rows, cols, cuts, masked)


def positions(first, size: int, total: int):
    """Where the tile at `first` starts, so that it fits, and its positions, -1 where the tile before has them already."""
    first = jnp.int32(first)
    start = jnp.minimum(first, total - size)
    at = start + lax.iota(jnp.int32, size)
    return start, jnp.where(at >= first, at, -1)


TileFn = Callable[..., tuple[Array, ...]]


def tile_sum(
    f: TileFn,
    walk: TileGrid,
    inputs: tuple[DimNames, ...],
    totals: tuple[DimNames, ...],
    linear: int,
    *arrays,
) -> list[Array]:
    """Totals in `walk.dtype`, of f(where, *parts), which is linear in the last `linear` inputs, together."""
    return _sum.bind(*arrays, f=f, walk=walk, inputs=inputs, totals=totals, linear=linear)


def _walked(*arrays, f: TileFn, walk: TileGrid, inputs, totals, linear) -> tuple[Array, ...]:
    del linear
    start = tuple(_zeros(total, walk.dtype, inputs, arrays) for total in totals)
    # (2)
    return fold(
        lambda where, old, parts: map(jnp.add, old, f(where, *parts)),
        walk,
        inputs,
        totals,
        start,
        arrays,
    )


def fold(
    step, walk: TileGrid, inputs: tuple[DimNames, ...], totals: tuple[DimNames, ...], start, arrays
) -> tuple[Array, ...]:
    """From `start`, the totals that `step(where, old, parts)` makes at one tile after the other of those `old` there.

    Not to be differentiated by JAX, which would save all of them: of what is a sum, `tile_sum` is closed.
    """
    found = vary_together(start, arrays)
    for masked, starts in walk.starts():

        def one(found, start, masked=masked):
            where = walk.where(start, masked)
            # (1)
            parts = [
                slice_dims(x, _cuts(dims, where)) for x, dims in zip(arrays, inputs, strict=True)
            ]
            old = [slice_dims(x, _cuts(dims, where)) for x, dims in zip(found, totals, strict=True)]
            # (3)
            return tuple(
                map(functools.partial(_put, where), totals, found, step(where, old, parts))
            ), None

        found, _ = lax.scan(one, found, starts)
    return found


def _cuts(dims: DimNames, where: TileLocation) -> dict[int, tuple[Any, int]]:
    return {at: where.cuts[letter] for at, letter in enumerate(dims.letters) if letter in CUT}


def _put(where: TileLocation, dims: DimNames, total: Array, part: Array) -> Array:
    cuts = _cuts(dims, where)
    starts = [
        jnp.int32(cuts[at][0] if at in cuts and size > 1 else 0)
        for at, size in enumerate(total.shape)
    ]
    return lax.dynamic_update_slice(total, part.astype(total.dtype), starts)


def _zeros(dims: DimNames, dtype, inputs: tuple[DimNames, ...], arrays) -> Array:
    like, letters, sizes = arrays[dims.like], inputs[dims.like].letters, {}
    for those, x in zip(inputs, arrays, strict=False):  # sizes of what vmap has added
        sizes |= {
            letter: size
            for letter, size in zip(those.letters, x.shape, strict=True)
            if letter.isupper()
        }
    sizes |= dict(zip(letters, like.shape, strict=True))
    sizes |= dict(zip(dims.letters[len(dims.letters) - len(dims.more) :], dims.more, strict=True))
    shape = tuple(sizes[letter] for letter in dims.letters)
    return lax.broadcast_in_dim(
        jnp.zeros_like(like, dtype), shape, [dims.letters.index(x) for x in letters]
    )


# ---- f's derivative, its transpose, and f of several


@dataclasses.dataclass(frozen=True)
class Tangent:
    """Of f's inputs, and then of tangents of those in `moving`."""

    f: TileFn
    moving: tuple[int, ...]

    def __call__(self, where, *parts):
        primals, tangents = parts[: -len(self.moving)], parts[-len(self.moving) :]

        def along(*moving):
            at = dict(zip(self.moving, moving, strict=True))
            return self.f(where, *(at.get(n, x) for n, x in enumerate(primals)))

        return jax.jvp(along, tuple(primals[n] for n in self.moving), tuple(tangents))[1]


@dataclasses.dataclass(frozen=True)
class Transposed:
    """Of f's inputs but those of which are the cotangents that it gives, and then of f's cotangents (not of all)."""

    f: TileFn
    of: tuple[int, ...]
    what: tuple[tuple[DimNames, Any], ...]  # those are, and their dtypes
    inputs: tuple[DimNames, ...]  # the others
    given: tuple[int, ...]

    def __call__(self, where, *parts):
        known, cotangents = parts[: -len(self.given)], parts[-len(self.given) :]

        def forward(*unknown):
            at, rest = dict(zip(self.of, unknown, strict=True)), iter(known)
            found = self.f(
                where, *(at[n] if n in at else next(rest) for n in range(len(at) + len(known)))
            )
            return tuple(found[n] for n in self.given)

        zeros = vary_together(
            [_zeros(dims, dtype, self.inputs, known) for dims, dtype in self.what], parts
        )
        found, pull = jax.vjp(forward, *zeros)
        return pull(tuple(c.astype(x.dtype) for c, x in zip(cotangents, found, strict=True)))


@dataclasses.dataclass(frozen=True)
class Mapped:
    f: TileFn
    axes: tuple[int | None, ...]

    def __call__(self, where, *parts):
        return jax.vmap(functools.partial(self.f, where), in_axes=self.axes)(*parts)


# ---- JAX's rules


def _jvp(primals, tangents, *, f, walk, inputs, totals, linear):
    fixed = len(primals) - linear
    params: dict[str, Any] = dict(walk=walk, totals=totals)
    found = _sum.bind(*primals, f=f, inputs=inputs, linear=linear, **params)
    moving = tuple(n for n, x in enumerate(tangents) if type(x) is not ad.Zero)
    if moving[0] >= fixed:
        along = map(ad.instantiate_zeros, tangents[fixed:])
        return found, _sum.bind(
            *primals[:fixed], *along, f=f, inputs=inputs, linear=linear, **params
        )
    along, dims = [tangents[n] for n in moving], tuple(inputs[n] for n in moving)
    return found, _sum.bind(
        *primals, *along, f=Tangent(f, moving), inputs=inputs + dims, linear=len(moving), **params
    )


def _transpose(cotangents, *args, f, walk, inputs, totals, linear):
    of = tuple(n for n, x in enumerate(args) if ad.is_undefined_primal(x))
    given = tuple(n for n, x in enumerate(cotangents) if type(x) is not ad.Zero)
    what = tuple((inputs[n], args[n].aval.dtype) for n in of)
    known = tuple(n for n in range(len(args)) if n not in of)
    others = tuple(inputs[n] for n in known)
    back = _sum.bind(
        *(args[n] for n in known),
        *(cotangents[n] for n in given),
        f=Transposed(f, of, what, others, given),
        walk=walk,
        inputs=others + tuple(totals[n] for n in given),
        totals=tuple(inputs[n] for n in of),
        linear=len(given),
    )
    found: list[Any] = [None] * len(args)
    for n, x in zip(of, back, strict=True):
        found[n] = x.astype(args[n].aval.dtype)
    return found


def _batch(axis_data, arrays, axes, *, f, walk, inputs, totals, linear):
    if all(axis is None for axis in axes):
        found = _sum.bind(*arrays, f=f, walk=walk, inputs=inputs, totals=totals, linear=linear)
        return found, [None] * len(found)
    used = "".join(dims.letters for dims in inputs)
    new = next(chr(n) for n in range(ord("A"), ord("Z") + 1) if chr(n) not in used)
    arrays, axes = batched(axis_data, arrays, axes, len(arrays) - linear)
    there = lambda dims: dims._replace(letters=new + dims.letters)
    inputs = tuple(
        dims if axis is None else there(dims) for dims, axis in zip(inputs, axes, strict=True)
    )
    totals = tuple(map(there, totals))
    found = _sum.bind(
        *arrays, f=Mapped(f, axes), walk=walk, inputs=inputs, totals=totals, linear=linear
    )
    return found, [0] * len(found)


@functools.lru_cache
def _jitted(**params):
    return jax.jit(functools.partial(_walked, **params))


@functools.lru_cache
def _types(*avals, **params):
    return jax.make_jaxpr(functools.partial(_walked, **params))(*avals).out_avals


_sum = Primitive("memeff_tile_sum")
_sum.multiple_results = True
_sum.def_impl(lambda *arrays, **params: list(_jitted(**params)(*arrays)))
_sum.def_abstract_eval(lambda *avals, **params: _types(*avals, **params))
mlir.register_lowering(_sum, mlir.lower_fun(_walked, multiple_results=True))
ad.primitive_jvps[_sum] = _jvp
ad.primitive_transposes[_sum] = _transpose
batching.fancy_primitive_batchers[_sum] = _batch
