"""Read and write tiles thread by thread, where Pallas has no operation for it.

A tile [rows, cols] is in registers in the layout of a product: each thread holds pairs of
neighbours in a row. The interpreter computes the same from whole arrays.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from memeff.pallas.hopper.mosaic import (
    WGMMA,
    Ref,
    broadcast_vector,
    interpreting,
    mlir_modules,
    plgpu,
)

NARROWEST = 8  # columns of a tile
LINE = 32  # float32 numbers of a line of the L2 cache
WARPGROUP = 128  # threads
CHUNK_BYTES = 16  # that one instruction copies, or loads for a thread
ROW_BYTES = 128  # of a tile in shared memory, whose chunks are permuted by its row modulo 8


class Lanes:
    """A thread's place in its warpgroup, and its arithmetic."""

    def __init__(self):
        self.mgpu, self.ir, self.arith, _, self.vector, self.scf = mlir_modules()
        self.utils = self.mgpu.utils
        self.nvvm = self.utils.nvvm
        self.llvm = self.utils.llvm
        self.i32 = self.ir.IntegerType.get_signless(32)
        self.i64 = self.ir.IntegerType.get_signless(64)
        self.i8 = self.ir.IntegerType.get_signless(8)
        self.f32 = self.ir.F32Type.get()
        self.thread = self.arith.remui(self.utils.thread_idx(), self.constant(WARPGROUP))

    def constant(self, x: int):
        """Return an integer."""
        return self.arith.constant(self.i32, x)

    def add(self, x, y):
        """Return x + y."""
        return self.arith.addi(x, y)

    def times(self, x, n: int):
        """Return x * n."""
        return self.arith.muli(x, self.constant(n))

    def divmod(self, x, n: int):
        """Return x // n and x % n."""
        return self.arith.divui(x, self.constant(n)), self.arith.remui(x, self.constant(n))

    def at(self, pointer, *offsets):
        """Return a pointer so many bytes further."""
        for offset in offsets:
            pointer = self.utils.getelementptr(pointer, [offset], self.i8)
        return pointer

    def when(self, condition, do: Callable[[], None]) -> None:
        """Do something where `condition` is true."""
        branch = self.scf.IfOp(condition)
        with self.ir.InsertionPoint(branch.then_block):
            do()
            self.scf.yield_([])

    def for_each(self, count: int, do: Callable[[Any], None]) -> None:
        """Do something with each number below `count`. The threads of the warpgroup share them."""
        loop = self.scf.ForOp(self.thread, self.constant(count), self.constant(WARPGROUP))
        with self.ir.InsertionPoint(loop.body):
            do(loop.induction_variable)
            self.scf.yield_([])

    def chunk_offset(self, row, chunk):
        """Return the bytes before a chunk of row below 8 of a tile in shared memory."""
        swizzled = self.arith.xori(self.arith.remui(row, self.constant(8)), chunk)
        return self.add(self.times(row, ROW_BYTES), self.times(swizzled, CHUNK_BYTES))


class Entries(NamedTuple):
    """The entries of a tile that a thread holds, in pairs."""

    row: Any  # of the thread's first pair, an index
    col: Any
    pairs: list[tuple[tuple[int, ...], int, int]]  # (register, rows further, columns further)


def entries_of(layout, shape: tuple[int, int]) -> Entries:
    """Return the entries that a thread holds of a tile of `shape`."""
    row, col = next(iter(layout.thread_idxs(shape)))
    strides = layout.tiling.tile_strides((shape[1], 1))
    pairs = []
    for register in np.ndindex(*layout.registers_shape(shape)):
        row_offset, col_offset = divmod(int(np.dot(register, strides)), shape[1])
        pairs.append((register, row_offset, col_offset))
    return Entries(row, col, pairs)


class KeptStores:
    """Stores of float32 numbers to `ref` in global memory, which the L2 cache keeps if it can.

    They are for results that the same kernel soon reads and drops (`drop_parts`): then nothing is
    written to memory.
    """

    def __init__(self, ref):
        mgpu, self.ir, self.arith, _memref, self.vector, _scf = mlir_modules()
        self.utils = mgpu.utils
        self.i64 = self.ir.IntegerType.get_signless(64)
        self.base = self.utils.memref_ptr(ref)
        self.strides, _ = self.ir.MemRefType(ref.type).get_strides_and_offset()
        self.policy = self.utils.inline_ptx(
            "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", result_types=self.i64
        )

    def pointer(self, place):
        """Return a pointer to the number at the indices `place`."""
        constant, index = self.arith.constant, self.ir.IndexType.get()
        total = constant(index, 0)
        for n, stride in zip(place, self.strides, strict=True):
            total = self.arith.addi(total, self.arith.muli(n, constant(index, stride)))
        total = self.arith.index_cast(self.i64, total)
        return self.utils.getelementptr(self.base, [total], self.ir.F32Type.get())

    def store(self, numbers, pointer, offset: int = 0) -> None:
        """Store 1, 2 or 4 neighbours, the first of them `offset` numbers behind `pointer`."""
        count = len(numbers)
        kind = "f32" if count == 1 else f"v{count}.f32"
        operands = ", ".join(f"${n + 1}" for n in range(count))
        self.utils.inline_ptx(
            f"st.global.L2::cache_hint.{kind} [$0 + {4 * offset}], {{{operands}}}, ${count + 1};",
            pointer,
            *numbers,
            self.policy,
        )


def store_rows(ref: Ref, tile: Array) -> None:
    """Store the first rows of `tile` [64, D] to `ref` [R, D] in global memory, R of them.

    The L2 cache keeps them, see `KeptStores`.
    """
    count, _ = ref.shape
    if interpreting():
        ref[...] = tile[:count]
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(_, ref, tile):
        _mgpu, ir, arith, _memref, vector, scf = mlir_modules()

        def constant(x: int):
            return arith.constant(ir.IndexType.get(), x)

        entries = entries_of(tile.layout, tile.shape)
        kept = KeptStores(ref)
        for row_offset in sorted({row for _, row, _ in entries.pairs}):
            row = arith.addi(entries.row, constant(row_offset))
            is_inside = arith.cmpi(arith.CmpIPredicate.ult, row, constant(count))
            branch = scf.IfOp(is_inside)
            with ir.InsertionPoint(branch.then_block):
                pointer = kept.pointer([row, entries.col])
                for register, further, col_offset in entries.pairs:
                    if further == row_offset:
                        pair = tile.registers[register]
                        numbers = [vector.extract(pair, [], [n]) for n in range(2)]
                        kept.store(numbers, pointer, col_offset)
                scf.yield_([])

    store(ref, tile)


def store_vector(ref: Ref, x: Array) -> None:
    """Store a vector with one number for each row of a tile, [D], to `ref` [D] in global memory.

    Pallas stores no vectors of 16-bit numbers there.
    """
    if interpreting():
        ref[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(_, ref, tile):
        _mgpu, ir, arith, memref, vector, scf = mlir_modules()

        def constant(x: int):
            return arith.constant(ir.IndexType.get(), x)

        entries = entries_of(tile.layout, tile.shape)
        is_first = arith.cmpi(arith.CmpIPredicate.eq, entries.col, constant(0))
        branch = scf.IfOp(is_first)
        with ir.InsertionPoint(branch.then_block):
            for register, row_offset, _col in entries.pairs:
                row = arith.addi(entries.row, constant(row_offset))
                number = vector.extract(tile.registers[register], [], [0])
                memref.store(number, ref, [row])
            scf.yield_([])

    store(ref, broadcast_vector(x, (x.shape[0], NARROWEST)))


def load_columns(ref: Ref, first, end, place, shape: tuple[int, int]) -> Array:
    """Return a tile [rows, cols] of `ref` [P, R, rows]: its column j is ref[first + j, place].

    Columns of parts from `end` on hold numbers that mean nothing. All rows are the same if `ref` is
    [P, R]. `ref` is float32, in global memory.
    """
    if interpreting():
        rows = ref[pl.ds(first, shape[1])]  # [cols, R, rows] or [cols, R]
        columns = jax.lax.dynamic_index_in_dim(rows, place, 1, keepdims=False)
        return columns.T if columns.ndim == 2 else jnp.broadcast_to(columns, shape)
    result = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=WGMMA)
    by_row = len(ref.shape) == 3

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, WGMMA, WGMMA), return_type=result)
    def load(_, ref, first, last, place):
        mgpu, ir, arith, memref, vector, _scf = mlir_modules()
        layout = mgpu.WGMMA_LAYOUT
        index = ir.IndexType.get()

        def constant(x: int):
            return arith.constant(index, x)

        place = arith.index_cast(index, place.registers.item())
        first = arith.index_cast(index, first.registers.item())
        last = arith.index_cast(index, last.registers.item())
        entries = entries_of(layout, shape)
        start = arith.addi(first, entries.col)
        registers = np.empty(layout.registers_shape(shape), object)
        loaded = {}
        for register, row_offset, col_offset in entries.pairs:
            pair = []
            for col in (col_offset, col_offset + 1):
                key = row_offset if by_row else 0, col
                if key not in loaded:
                    part = arith.minsi(arith.addi(start, constant(col)), last)
                    where = [part, place]
                    if by_row:
                        where.append(arith.addi(entries.row, constant(row_offset)))
                    loaded[key] = memref.load(ref, where)
                pair.append(loaded[key])
            registers[register] = vector.from_elements(ir.VectorType.get((2,), pair[0].type), pair)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(ref, first, end - 1, place)


def drop_parts(ref: Ref, first, end, place, count: int) -> None:
    """Drop ref[first : first + count, place] from the L2 cache, before it writes them to memory.

    Later reads find any numbers there. Parts from `end` on are not dropped, because they were not
    written. `ref` [P, R, D] is float32, in global memory. All threads of the warpgroup have read
    the parts.
    """
    if interpreting():
        return
    lines = ref.shape[2] // LINE

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, WGMMA, WGMMA))
    def drop(_, ref, first, end, place):
        mgpu, ir, arith, _memref, _vector, scf = mlir_modules()
        index = ir.IndexType.get()

        def constant(x: int):
            return arith.constant(index, x)

        mgpu.utils.warpgroup_barrier()
        thread = arith.index_cast(index, mgpu.utils.thread_idx())
        thread = arith.remui(thread, constant(WARPGROUP))
        part = arith.divui(thread, constant(lines))
        number = arith.muli(arith.remui(thread, constant(lines)), constant(LINE))
        first = arith.index_cast(index, first.registers.item())
        end = arith.index_cast(index, end.registers.item())
        place = arith.index_cast(index, place.registers.item())
        kept = KeptStores(ref)
        for start in range(0, count, WARPGROUP // lines):
            own = arith.addi(part, constant(start))
            is_inside = arith.cmpi(arith.CmpIPredicate.ult, own, constant(count))
            own = arith.addi(first, own)
            is_there = arith.cmpi(arith.CmpIPredicate.ult, own, end)
            branch = scf.IfOp(arith.andi(is_inside, is_there))
            with ir.InsertionPoint(branch.then_block):
                pointer = kept.pointer([own, place, number])
                mgpu.utils.inline_ptx("discard.global.L2 [$0], 128;", pointer)
                scf.yield_([])

    drop(ref, first, end, place)
