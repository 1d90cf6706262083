"""Copy tiles to shared memory and multiply them, by instructions that each GPU since Ampere has.

Copies are `cp.async`, which zero what lies outside of an array. Products are `mma`, and `ldmatrix`
reads their factors. Mosaic's own copies are TMA on Hopper and demand whole tiles before it, its own
loads would hold all of a factor in registers, and its own products took half of the time in which
Python lowers a kernel. The interpreter copies by TMA, so that it finds races, and multiplies whole
arrays.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from memeff.pallas.hopper.mosaic import (
    FLOATS,
    SHARED,
    WGMMA,
    Barrier,
    Ref,
    head_rows,
    interpret_params,
    interpreting,
    plgpu,
)
from memeff.pallas.hopper.threads import CHUNK_BYTES, ROW_BYTES, WARPGROUP, Lanes

CHUNK = 8  # 16-bit numbers that one instruction loads for a lane
STEP = 16  # columns of the first factor that one instruction multiplies
SWIZZLED = 64  # 16-bit numbers in these


def kernel(
    body: Callable, name: str, out: list, scratch: dict, blocks: int, approx_math: bool = True
) -> Callable:
    """Return `body` as a kernel of `blocks` thread blocks of one warpgroup each."""
    return plgpu.kernel(
        body,
        out_type=tuple(out),
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=name,
        interpret=interpret_params(),
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math,
            reduction_scratch_bytes=2048,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )


def ready_barrier(arrivals: int = 1, count: int = 1) -> Barrier:
    """Return the type of `count` barriers for copies. Only the interpreter needs them."""
    if not interpreting():
        return None
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def copy_tile(source: Ref, b, row, n, shared: Ref, ready: Barrier) -> None:
    """Start to copy the vectors of head n from `row` on to `shared` [rows, H'], 64 | H'.

    `source` is [B, T, N, H], 8 | H. What lies behind T or H becomes 0.
    """
    if interpreting():
        _copy_interpreted(head_rows(source, b, pl.ds(row, shared.shape[0]), n), shared, ready)
    else:
        _copy(source.at[b, :, n], row, 0, shared)


def copy_pairs(source: Ref, row, col, shared: Ref, ready: Barrier) -> None:
    """Start to copy numbers of pairs, from `row` and `col` on, to `shared` [rows, cols].

    `source` is [T, S]; its rows begin at multiples of 16 bytes. What lies behind T or S becomes 0.
    """
    if interpreting():
        rows, cols = shared.shape
        _copy_interpreted(source.at[pl.ds(row, rows), pl.ds(col, cols)], shared, ready)
    else:
        _copy(source, row, col, shared)


def store_tile(shared: Ref, target: Ref, b, row, n) -> None:
    """Store `shared` [rows, H'] to head n of `target` [B, T, N, H] from `row` on, up to T and H."""
    if interpreting():
        _store_interpreted(shared, head_rows(target, b, pl.ds(row, shared.shape[0]), n))
    else:
        _store(target.at[b, :, n], row, 0, shared)


def store_pairs(shared: Ref, target: Ref, row, col) -> None:
    """Store `shared` [rows, cols] to `target` [T, S] from `row` and `col` on, up to T and S."""
    if interpreting():
        rows, cols = shared.shape
        _store_interpreted(shared, target.at[pl.ds(row, rows), pl.ds(col, cols)])
    else:
        _store(target, row, col, shared)


def _copy_interpreted(source: Ref, shared: Ref, ready: Barrier) -> None:
    plgpu.commit_smem()  # its search for races asks for this fence after reads
    plgpu.copy_gmem_to_smem(source, shared, ready)


def _store_interpreted(shared: Ref, target: Ref) -> None:
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared, target)
    plgpu.wait_smem_to_gmem(0)


def _copy(source: Ref, row, col, shared: Ref) -> None:
    """Start to copy a part of `source` [T, S]. What lies behind T or S becomes 0."""

    def copy(lanes: Lanes, pointer, place, is_inside):
        size = lanes.arith.select(is_inside, lanes.constant(CHUNK_BYTES), lanes.constant(0))
        modifier = lanes.nvvm.LoadCacheModifierKind.CG
        lanes.nvvm.cp_async_shared_global(place, pointer, CHUNK_BYTES, modifier, cp_size=size)

    def finish(lanes: Lanes):
        lanes.nvvm.cp_async_commit_group()

    _for_each_chunk(source, row, col, shared, copy, finish)


def _store(target: Ref, row, col, shared: Ref) -> None:
    """Store `shared` to a part of `target` [T, S], up to T and S."""

    def store(lanes: Lanes, pointer, place, is_inside):
        kind = lanes.ir.VectorType.get((4,), lanes.i32)
        branch = lanes.scf.IfOp(is_inside)
        with lanes.ir.InsertionPoint(branch.then_block):
            lanes.llvm.store(lanes.llvm.load(kind, place), pointer)
            lanes.scf.yield_([])

    _for_each_chunk(target, row, col, shared, store, lambda lanes: None)


def _for_each_chunk(ref: Ref, row, col, shared: Ref, visit: Callable, finish: Callable) -> None:
    """Call `visit(lanes, pointer, place, is_inside)` for each chunk that a thread moves.

    `pointer` is in global memory, in `ref` [T, S] from `row` and `col` on. `place` is in shared
    memory.
    """
    rows, cols = shared.shape
    T, S = ref.shape
    itemsize = jnp.dtype(ref.dtype).itemsize
    chunk_size = CHUNK_BYTES // itemsize
    chunks = cols // chunk_size
    rows_at_once = WARPGROUP // chunks
    shared_type = plgpu.RefType(SHARED if itemsize == 2 else FLOATS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), shared_type, WGMMA, WGMMA))
    def move(_, ref, shared, row, col):
        lanes = Lanes()
        arith = lanes.arith
        row, col = (x.registers.item() for x in (row, col))
        lanes.utils.warpgroup_barrier()  # all have read, or written, the tile
        first, chunk = lanes.divmod(lanes.thread, chunks)
        row = lanes.add(row, first)
        (stride, _), _ = lanes.ir.MemRefType(ref.type).get_strides_and_offset()

        def wide(x):
            return arith.extui(lanes.i64, x)

        start = arith.muli(wide(row), arith.constant(lanes.i64, stride * itemsize))
        col = lanes.add(col, lanes.times(chunk, chunk_size))
        start = arith.addi(start, wide(lanes.times(col, itemsize)))
        base = lanes.llvm.addrspacecast(
            lanes.llvm.PointerType.get(address_space=1), lanes.utils.memref_ptr(ref)
        )
        base = lanes.at(base, start)
        tile, chunk_in_tile = lanes.divmod(chunk, ROW_BYTES // CHUNK_BYTES)
        eight, row_in_eight = lanes.divmod(first, 8)
        offset = lanes.chunk_offset(row_in_eight, chunk_in_tile)
        tile = lanes.add(lanes.times(eight, cols * itemsize // ROW_BYTES), tile)
        offset = lanes.add(offset, lanes.times(tile, 8 * ROW_BYTES))
        place = lanes.at(lanes.utils.memref_ptr(shared), offset)
        less = arith.CmpIPredicate.ult
        col_is_inside = arith.cmpi(less, col, lanes.constant(S))
        for further in range(0, rows, rows_at_once):
            last = lanes.add(row, lanes.constant(further))
            is_inside = arith.cmpi(less, last, lanes.constant(T))
            is_inside = arith.andi(is_inside, col_is_inside)
            visit(
                lanes,
                lanes.at(base, further * stride * itemsize),
                lanes.at(place, further * cols * itemsize),
                is_inside,
            )
        finish(lanes)

    move(ref, shared, *(jnp.asarray(x, jnp.int32) for x in (row, col)))


def wait_for_copies(ready: Barrier) -> None:
    """Wait until all copies that began have ended, for all threads."""
    if interpreting():
        plgpu.barrier_wait(ready)
        return

    @plgpu.inline_mgpu()
    def wait(_):
        lanes = Lanes()
        lanes.nvvm.cp_async_wait_group(0)
        lanes.utils.warpgroup_barrier()

    wait()


def sync_threads() -> None:
    """Wait until all threads have come here, and see what they stored to shared memory."""
    if interpreting():
        return

    @plgpu.inline_mgpu()
    def sync(_):
        Lanes().utils.warpgroup_barrier()

    sync()


def add_product_to_sums(x: Ref, y: Ref, sums: Ref) -> None:
    """Add x' y to `sums` [m n // 128, 128] in float32 in global memory.

    x [k, m] and y [k, n] are in shared memory. A row of `sums` has one number of each thread, so
    that a warp adds to 128 neighbouring bytes. The order of such sums is not fixed.
    """
    (k, m), n = x.shape, y.shape[1]
    if interpreting():
        part = jnp.dot(x[...].T, y[...], preferred_element_type=jnp.float32)
        part = part.reshape(m // 64, 4, 2, 8, n // 8, 4, 2)
        sums[...] = sums[...] + part.transpose(0, 4, 2, 6, 1, 3, 5).reshape(sums.shape)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SHARED), plgpu.RefType(SHARED), plgpu.RefType()))
    def add(_, x, y, sums):
        lanes = Lanes()
        llvm = lanes.llvm
        space = llvm.PointerType.get(address_space=1)
        place = llvm.addrspacecast(space, lanes.utils.memref_ptr(sums))
        place = lanes.at(place, lanes.times(lanes.thread, 4))
        x_matrices, y_matrices = _Matrices(lanes, x), _Matrices(lanes, y)
        add_product = _Mma(lanes, y_matrices.dtype)
        zero = lanes.arith.constant(lanes.f32, 0.0)
        firsts = [x_matrices.first_factor(col, m, True) for col in range(0, k, STEP)]
        for start in range(0, n, 2 * CHUNK):
            totals = {tile: [zero] * 4 for tile in np.ndindex(m // 64, 2)}
            for step, first in enumerate(firsts):
                second = y_matrices.second_factor(step * STEP, start, False)
                for tile, right in totals:
                    factors = first[tile], second[2 * right : 2 * right + 2]
                    totals[tile, right] = add_product(totals[tile, right], *factors)
            for (tile, right), total in totals.items():
                column = tile * (n // CHUNK) + start // CHUNK + right
                for n_th, number in enumerate(total):
                    row = lanes.at(place, (4 * column + n_th) * 4 * WARPGROUP)
                    llvm.inline_asm(
                        lanes.ir.Type.parse("!llvm.void"),
                        [row, number],
                        "red.relaxed.gpu.global.add.f32 [$0], $1;",
                        "l,f",
                        has_side_effects=True,
                    )

    add(x, y, sums)


def products_of_sums(sums: Array, n: int) -> Array:
    """Return the transposed products [..., n, m] of `sums`, as `add_product_to_sums` adds them."""
    *outer, numbers, _ = sums.shape
    m = numbers * WARPGROUP // n
    axes = "tile column low pair warp row lane".split()
    sizes = m // 64, n // 8, 2, 2, 4, 8, 4
    order = [axes.index(x) for x in "column lane pair tile warp low row".split()]
    first = len(outer)
    x = sums.reshape(*outer, *sizes).transpose(*range(first), *(first + i for i in order))
    return x.reshape(*outer, n, m)


def multiply(total: Array, x: Any, y: Ref, transposed: bool = False) -> Array:
    """Return total + x y, or total + x y' if `transposed`.

    x [64 m, k] is in registers or in shared memory, y [k, n] or [n, k] in shared memory.
    """
    in_registers = isinstance(x, jax.Array)
    if interpreting():
        factors = x if in_registers else x[...], y[...].T if transposed else y[...]
        return total + jnp.dot(*factors, preferred_element_type=jnp.float32)
    kind = WGMMA if in_registers else plgpu.RefType(SHARED)
    result = plgpu.ShapeDtypeStruct(total.shape, total.dtype, layout=WGMMA)
    k = x.shape[1]
    rows, n = total.shape

    @plgpu.inline_mgpu(arg_types=(WGMMA, kind, plgpu.RefType(SHARED)), return_type=result)
    def product(_, total, x, y):
        lanes = Lanes()
        read_first = _from_registers(lanes, x) if in_registers else _Matrices(lanes, x).first_factor
        y_matrices = _Matrices(lanes, y)
        add_product = _Mma(lanes, y_matrices.dtype)
        sums = _numbers_of_tiles(lanes, total)
        for col in range(0, k, STEP):
            first = read_first(col, rows)
            for start in range(0, n, 2 * CHUNK):
                second = y_matrices.second_factor(col, start, transposed)
                for m in range(rows // 64):
                    for right in range(2):
                        place = m, start // CHUNK + right
                        factors = first[m], second[2 * right : 2 * right + 2]
                        sums[place] = add_product(sums[place], *factors)
        return _from_numbers_of_tiles(lanes, sums, total)

    return product(total, x, y)


class _Mma:
    """The instruction that adds a product of 16 x 16 and 16 x 8 numbers to four of a lane's."""

    def __init__(self, lanes: Lanes, dtype: Any):
        self.lanes = lanes
        self.results = lanes.llvm.StructType.get_literal([lanes.f32] * 4)
        places = ("{$0,$1,$2,$3}", "{$4,$5,$6,$7}", "{$8,$9}", "{$10,$11,$12,$13}")
        name = f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32"
        self.text = f"{name} {', '.join(places)};"
        self.kinds = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)

    def __call__(self, total: list, first: list, second: list) -> list:
        """Return total + first second."""
        llvm = self.lanes.llvm
        operands = [*first, *second, *total]
        sums = llvm.inline_asm(
            self.results, operands, self.text, self.kinds, has_side_effects=False
        )
        return [llvm.extractvalue(self.lanes.f32, sums, [n]) for n in range(4)]


def _place(m: int, column: int, low: int) -> tuple[int, ...]:
    """Return the place of a register in an array in Mosaic's layout.

    Of a tile of 64 x 8 numbers a lane has two registers of two numbers, `low` being 0 or 1.
    """
    return m, column, 0, 0, low, 0, 0, 0, 0


def _numbers_of_tiles(lanes: Lanes, x: Any) -> dict[tuple[int, int], list]:
    """Return the four numbers of each tile of x, by its row and column of tiles."""
    numbers = {}
    for m, column in np.ndindex(*x.registers.shape[:2]):
        four = []
        for low in range(2):
            pair = x.registers[_place(m, column, low)]
            four += [lanes.llvm.extractelement(pair, lanes.constant(n)) for n in range(2)]
        numbers[m, column] = four
    return numbers


def _from_numbers_of_tiles(lanes: Lanes, numbers: dict[tuple[int, int], list], like: Any) -> Any:
    """Return an array with these numbers in the place of those of `like`."""
    registers = np.empty_like(like.registers)
    undefined = lanes.llvm.mlir_undef(lanes.ir.VectorType.get((2,), lanes.f32))
    for (m, column), four in numbers.items():
        for low in range(2):
            pair = undefined
            for n in range(2):
                pair = lanes.llvm.insertelement(pair, four[2 * low + n], lanes.constant(n))
            registers[_place(m, column, low)] = pair
    return lanes.mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=None)


def _from_registers(lanes: Lanes, x: Any) -> Callable:
    """Return a function that returns 16 columns of `x`, a tile in registers, as first factor."""

    def read(col: int, rows: int) -> list:
        factors = []
        for m in range(rows // 64):
            places = [_place(m, col // CHUNK + right, low) for right, low in np.ndindex(2, 2)]
            factors.append([lanes.utils.bitcast(x.registers[i], lanes.i32) for i in places])
        return factors

    return read


class _Matrices:
    """Reads of a tile in shared memory by `ldmatrix`, which brings 8 x 8 numbers to a warp."""

    def __init__(self, lanes: Lanes, ref: Any):
        self.lanes = lanes
        self.base = lanes.utils.memref_ptr(ref)
        kind = lanes.ir.MemRefType(ref.type)
        self.dtype = kind.element_type
        self.width = kind.shape[1]  # in tiles of 64 columns
        lane = lanes.divmod(lanes.thread, 32)[1]
        eighth, self.row = lanes.divmod(lane, 8)
        self.high, self.low = lanes.divmod(eighth, 2)  # of the four matrices that are read at once

    def _place(self, further, chunk):
        """Return a lane's offset: its row, `further` tiles of 8 rows down, and a chunk, 0 or 1."""
        lanes = self.lanes
        offset = lanes.chunk_offset(self.row, chunk)
        return lanes.add(offset, lanes.times(further, self.width * 8 * ROW_BYTES))

    def _read(self, place, row: int, col: int, transposed: bool) -> list:
        """Return four registers from `place`, `row` rows down and `col` columns to the right."""
        lanes = self.lanes
        side, in_side = divmod(col, SWIZZLED)
        place = lanes.arith.xori(place, lanes.constant(2 * in_side))
        tile = row // 8 * self.width + side
        pointer = lanes.at(self.base, place, tile * 8 * ROW_BYTES)
        order = lanes.nvvm.MMALayout.col if transposed else lanes.nvvm.MMALayout.row
        shape = lanes.ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>")
        kind = lanes.nvvm.LdStMatrixEltType.B16
        four = lanes.nvvm.ldmatrix(pointer, layout=order, num=4, shape=shape, elt_type=kind)
        return [lanes.llvm.extractvalue(lanes.i32, four, [n]) for n in range(4)]

    def first_factor(self, col: int, rows: int, transposed: bool = False) -> list:
        """Return four registers of 16 columns for each 64 of the rows.

        If `transposed`, the tile has these columns as rows.
        """
        lanes = self.lanes
        warp = lanes.divmod(lanes.thread, 32)[0]
        if transposed:
            place = self._place(self.high, lanes.add(self.low, lanes.times(warp, 2)))
            return [self._read(place, col, row, True) for row in range(0, rows, 64)]
        place = self._place(lanes.add(self.low, lanes.times(warp, 2)), self.high)
        return [self._read(place, row, col, False) for row in range(0, rows, 64)]

    def second_factor(self, row: int, col: int, transposed: bool) -> list:
        """Return rows `row` to `row` + 16 and as many columns, of the transpose if `transposed`.

        The first two registers are of the first 8 columns.
        """
        if transposed:
            return self._read(self._place(self.high, self.low), col, row, False)
        return self._read(self._place(self.low, self.high), row, col, True)
