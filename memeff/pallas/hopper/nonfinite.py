"""Keep NaN and Inf of values that a row does not see out of its result: 0 times NaN is NaN."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.pallas.hopper.fragments import reduce_rows
from memeff.pallas.hopper.mosaic import (
    COL,
    ROW,
    SHARED,
    Barrier,
    Ref,
    broadcast_vector,
    interpreting,
    largest_of,
    plgpu,
    sync,
)
from memeff.pallas.hopper.score_tile import ScoreTile
from memeff.pallas.hopper.threads import CHUNK_BYTES, Lanes
from memeff.softmax import LSE_OF_EMPTY_ROW

# Two vectors [c] and [D] of a tile [c, D]: 1 for rows, and for columns, that had NaN or Inf
Marks = tuple[Ref, Ref]
PATCH = 64  # columns of 16 bits that are neighbours in shared memory


def clean_tile(
    tile: Ref,
    marks: Marks | None = None,
    lse_s: Ref | None = None,
    patches: range | None = None,
) -> None:
    """Replace NaN and Inf in `tile` [c, D], of 16 bits in shared memory, by 0.

    `marks` become 0 for all other rows and columns. If `lse_s` [c] is given, only rows that see no
    key are cleaned. `patches` are the patches of columns that are cleaned; None: all of them. All
    threads of the warpgroup see the results.
    """
    rows, cols = tile.shape
    patches = patches or range(cols // PATCH)
    if interpreting():
        part = tile.at[:, pl.ds(patches.start * PATCH, len(patches) * PATCH)]
        x = part[...].astype(jnp.float32)
        bad = ~(jnp.abs(x) < jnp.inf)
        if lse_s is not None:
            bad &= (lse_s[...] >= LSE_OF_EMPTY_ROW)[:, None]
        part[...] = jnp.where(bad, 0.0, x).astype(tile.dtype)
        if marks is not None:
            marks[0][...] = bad.any(axis=1).astype(jnp.float32)
            outside = patches.start * PATCH, cols - patches.stop * PATCH
            marks[1][...] = jnp.pad(bad.any(axis=0).astype(jnp.float32), outside)
        return
    vectors = [x for x in (lse_s, *(marks or ())) if x is not None]
    exponent = 0x7F80 if tile.dtype == jnp.bfloat16 else 0x7C00

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SHARED), *[plgpu.RefType()] * len(vectors)))
    def clean(_, tile, *vectors):
        lse = None if lse_s is None else vectors[0]
        mark_refs = vectors[lse_s is not None :]
        _Cleaner(Lanes(), tile, mark_refs, lse, cols, patches, exponent).run(rows)

    clean(tile, *vectors)


class _Cleaner(NamedTuple):
    """The part of `clean_tile` that one thread does: every 128th chunk of 8 numbers."""

    lanes: Lanes
    tile: Any
    marks: Sequence[Any]  # refs, or none
    lse: Any  # a ref, or None
    cols: int
    patches: range
    exponent: int  # a number whose exponent has all bits set, as that of NaN and Inf

    def run(self, rows: int) -> None:
        """Clean the tile of so many rows."""
        lanes = self.lanes
        lanes.utils.warpgroup_barrier()  # all have read the tile and the marks
        for ref in self.marks:
            lanes.for_each(ref.type.shape[0], functools.partial(self._store, 0.0, ref))
        lanes.utils.warpgroup_barrier()
        lanes.for_each(rows * len(self.patches) * 8, self._clean_chunk)
        lanes.utils.warpgroup_barrier()

    def _store(self, x: float, ref, n) -> None:
        """Store x to ref[n]."""
        lanes = self.lanes
        n = lanes.arith.index_cast(lanes.ir.IndexType.get(), n)
        lanes.utils.memref.store(lanes.arith.constant(lanes.f32, x), ref, [n])

    def _clean_chunk(self, n) -> None:
        """Clean the n-th chunk. In memory the chunks of 8 rows of a patch follow each other."""
        lanes = self.lanes
        block, in_block = lanes.divmod(n, 64)
        eight, patch = lanes.divmod(block, len(self.patches))
        patch = lanes.add(patch, lanes.constant(self.patches.start))
        block = lanes.add(lanes.times(eight, self.cols // PATCH), patch)
        offset = lanes.add(lanes.times(block, 64), in_block)
        base = lanes.utils.memref_ptr(self.tile)
        place = lanes.at(base, lanes.times(offset, CHUNK_BYTES))
        words = lanes.llvm.load(lanes.ir.VectorType.get((4,), lanes.i32), place)
        row_in_eight, chunk = lanes.divmod(in_block, 8)
        row = lanes.add(lanes.times(eight, 8), row_in_eight)
        chunk = lanes.arith.xori(chunk, row_in_eight)
        col = lanes.add(lanes.times(patch, PATCH), lanes.times(chunk, 8))
        clean = functools.partial(self._clean_numbers, words, place, row, col)
        lanes.when(self._has_bad(words), clean)

    def _has_bad(self, words) -> Any:
        """Return whether the exponent of some number has all bits set.

        Adding 1 to such an exponent sets the highest bit of the number.
        """
        lanes = self.lanes
        arith = lanes.arith
        lowest = self.exponent & -self.exponent
        total = lanes.constant(0)
        for n in range(4):
            word = lanes.vector.extract(words, [], [n])
            word = arith.andi(word, lanes.constant(self.exponent * 0x10001))
            word = lanes.add(word, lanes.constant(lowest * 0x10001))
            total = arith.ori(total, word)
        total = arith.andi(total, lanes.constant(-0x7FFF8000))
        return arith.cmpi(arith.CmpIPredicate.ne, total, lanes.constant(0))

    def _clean_numbers(self, words, place, row, col) -> None:
        """Zero the bad numbers of a chunk of `row` from `col` on, and mark them."""
        lanes = self.lanes
        arith, ir, vector = lanes.arith, lanes.ir, lanes.vector
        kind = ir.VectorType.get((8,), ir.IntegerType.get_signless(16))

        def splat(x: int):
            element = ir.IntegerAttr.get(kind.element_type, x)
            return arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, element))

        numbers = vector.bitcast(kind, words)
        full = arith.andi(numbers, splat(self.exponent))
        bad = arith.cmpi(arith.CmpIPredicate.eq, full, splat(self.exponent))
        if self.lse is not None:
            limit = arith.constant(lanes.f32, LSE_OF_EMPTY_ROW)
            lse = lanes.utils.memref.load(self.lse, [arith.index_cast(ir.IndexType.get(), row)])
            is_empty = arith.cmpf(arith.CmpFPredicate.UGE, lse, limit)
            bad = arith.andi(bad, vector.broadcast(bad.type, is_empty))
        lanes.llvm.store(arith.select(bad, splat(0), numbers), place)

        def mark(n: int):
            self._store(1.0, self.marks[0], row)
            self._store(1.0, self.marks[1], lanes.add(col, lanes.constant(n)))

        for n in range(8 if self.marks else 0):
            lanes.when(vector.extract(bad, [], [n]), functools.partial(mark, n))


def clean_shared(operand: Ref, warpgroup, barrier: Barrier, **how) -> None:
    """Apply `clean_tile` to a tile that all computing warpgroups read; they meet at `barrier`."""
    sync(barrier)

    @pl.when(warpgroup == 0)
    def _clean():
        clean_tile(operand, **how)
        plgpu.commit_smem()

    sync(barrier)


def clean_values(
    values: Ref, o: Array, tile: ScoreTile, warpgroup, marks: Marks, barrier: Barrier
) -> Array:
    """Replace NaN and Inf in `values` [c, D], which all computing warpgroups read, by 0.

    Return o with NaN in the rows that see such a value, in its column.
    """
    clean_shared(values, warpgroup, barrier, marks=marks)
    return _with_nan(o, tile, marks)


def clean_own_values(
    values: Ref,
    o: Array,
    tile: ScoreTile,
    marks: Marks,
    commit: Callable[[], None] = plgpu.commit_smem,
    sums_s: Ref | None = None,
    heads: int = 1,
) -> Array:
    """Apply `clean_values` to values that no other warpgroup reads, of one or more `heads`.

    `commit` makes stores to shared memory visible to products. Where queries are along the columns
    of `tile` and of o, `sums_s` is this warpgroup's memory for maxima.
    """
    patches = values.shape[1] // PATCH // heads
    for head in range(heads):
        clean_tile(values, marks, patches=range(head * patches, (head + 1) * patches))
        o = _with_nan(o, tile, marks, sums_s)
    commit()
    return o


def _with_nan(o: Array, tile: ScoreTile, marks: Marks, sums_s: Ref | None = None) -> Array:
    """Return o with NaN for queries of the tile that see a marked key, in its marked columns."""
    bad_keys_s, bad_columns_s = marks
    query_dim, keys_dim = tile.query_dim, 1 - tile.query_dim

    def add_nan(o):
        bad_keys = plgpu.load(bad_keys_s, layout=(ROW, COL)[keys_dim])
        seen = jnp.where(tile.mask(), broadcast_vector(bad_keys, tile.shape, keys_dim), 0.0)
        sees_bad = seen.max(axis=1) if query_dim == 0 else reduce_rows(seen, "max", sums_s)
        # those of the first part, which is not finite where one is
        columns = bad_columns_s.at[: o.shape[keys_dim]]
        bad_columns = plgpu.load(columns, layout=(ROW, COL)[keys_dim])
        bad_columns = broadcast_vector(bad_columns, o.shape, keys_dim)
        is_nan = bad_columns * broadcast_vector(sees_bad, o.shape, query_dim) > 0
        return jnp.where(is_nan, jnp.nan, o)

    return lax.cond(largest_of(bad_keys_s) > 0, add_nan, lambda o: o, o)
