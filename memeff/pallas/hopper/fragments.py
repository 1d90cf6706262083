"""Read tiles of 8-bit numbers as first factors of products, in registers, thread by thread.

A product's first factor may be in registers, so numbers of 8 bits need not be converted in shared
memory. Each thread reads words of 4 neighbours, in the places that its lane has in the product. So
a first factor's columns or rows come in another order than they are stored:

- those of keys [c, H] have their columns permuted as `permute_dims` permutes the queries';
- those of transposed values [D, c] have their rows permuted as `permute_rows` says.

Keys in int8 may stay as they are: `split_query` makes integers of queries.

The other functions serve products whose rows are keys: maxima and sums along them, a second factor
from registers, and the store of a transposed result. The interpreter computes the same from whole
arrays.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from memeff.pallas.hopper.mosaic import (
    COL,
    SHARED,
    WGMMA,
    Ref,
    broadcast_vector,
    eight_bit_tiling,
    interpreting,
    mlir_modules,
    plgpu,
)
from memeff.pallas.hopper.threads import KeptStores, entries_of

STEP = 16  # columns of the first factor that one instruction multiplies
ROWS_OF_WARP = 16
SCRATCH_OF_COLUMNS = 256  # numbers that `reduce_rows` needs for 8 columns


def permute_dims(x: Array) -> Array:
    """Return x [..., H] with its last dim in the order of the columns of `load_keys`.

    Of 16 neighbours, a thread holds 4 in the columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    """
    shape = x.shape
    x = x.reshape(*shape[:-1], shape[-1] // STEP, 4, 2, 2)
    return x.swapaxes(-2, -3).reshape(shape)


def split_query(x: Array) -> tuple[Array, Array]:
    """Return rows x [..., R, H] as integers of 8 bits [..., 2, R, H], and scales [..., R].

    x is nearly scale (256 n_0 + n_1), to 2^-16 of the largest number of its row. A row that is not
    finite has integers of 0 and a scale that is not finite, so that products are NaN.
    """
    x = x.astype(jnp.float32)
    scales = jnp.abs(x).max(-1) * (1 / (127 * 256))
    steps = jnp.where((scales > 0) & (scales < jnp.inf), scales, jnp.inf)
    whole = jnp.nan_to_num(jnp.round(x / steps[..., None])).astype(jnp.int32)
    high = (whole + 128) >> 8
    digits = jnp.stack([high, whole - (high << 8)], -3)
    return digits.astype(jnp.int8), scales


def permute_rows(x: Array) -> Array:
    """Return x [D, c] with its rows in the order of those of `load_values`.

    Of D / 32 neighbours, which a thread holds, each pair belongs to one instruction, 8 rows apart.
    """
    pairs = x.shape[0] // 64
    in_parts = x.reshape(4, 8, pairs, 2, -1)  # warp, lane, instruction, one of its two rows
    return in_parts.transpose(2, 0, 3, 1, 4).reshape(x.shape)


def sort_rows(x: Array) -> Array:
    """Return x [D, c] with its rows in order again; undo `permute_rows`."""
    pairs = x.shape[0] // 64
    in_parts = x.reshape(pairs, 4, 2, 8, -1)
    return in_parts.transpose(1, 3, 0, 2, 4).reshape(x.shape)


def load_keys(ref: Ref, dtype) -> Array:
    """Return a tile of keys [c, H] of 8 bits in `dtype`, its columns permuted."""
    shape = ref.shape
    if interpreting():
        return permute_dims(ref[...].astype(dtype))

    def load(words: "_Words", widen: Callable) -> dict[tuple[int, int], Any]:
        arith, width = words.arith, shape[1]
        lane, four, warp = words.lane, words.four, words.warp
        row = arith.addi(lane, arith.muli(warp, words.constant(ROWS_OF_WARP)))
        start = arith.addi(
            arith.muli(row, words.constant(width)), arith.muli(four, words.constant(4))
        )
        chunk = words.swizzle(lane, width)
        registers = {}
        for col in range(0, width, STEP):
            place = arith.addi(start, arith.xori(chunk, words.constant(col)))
            for first_row in range(0, shape[0], 8):
                if first_row % 64 >= ROWS_OF_WARP:  # of another warp
                    continue
                word = words.load(place, first_row * width, 4)
                registers[first_row, col] = widen(word, 0)
                registers[first_row, col + 8] = widen(word, 1)
        return registers

    return _load_registers(ref, dtype, shape, load)


def load_values(ref: Ref, dtype) -> Array:
    """Return a tile of values [c, D] of 8 bits in `dtype`, transposed, its rows permuted."""
    c, D = ref.shape
    if interpreting():
        return permute_rows(ref[...].astype(dtype).T)

    def load(words: "_Words", widen: Callable) -> dict[tuple[int, int], Any]:
        arith = words.arith
        size = D // 32
        dim = arith.muli(
            arith.addi(words.lane, arith.muli(words.warp, words.constant(8))),
            words.constant(size),
        )
        places = []
        for n in range(2):  # the two keys of a register
            key = arith.addi(arith.muli(words.four, words.constant(2)), words.constant(n))
            place = arith.xori(dim, words.swizzle(key, D))
            places.append(arith.addi(place, arith.muli(key, words.constant(D))))
        registers = {}
        for key in range(0, c, 8):
            pair = [words.load(place, key * D, size) for place in places]
            for n in range(size // 2):
                both = words.interleave(pair[0], pair[1], 2 * n)
                registers[64 * n, key] = widen(both, 0)
                registers[64 * n + 8, key] = widen(both, 1)
        return registers

    return _load_registers(ref, dtype, (D, c), load)


class _Words:
    """Reads of words of shared memory by a thread, and its place in the warpgroup."""

    def __init__(self, ref):
        self.mgpu, self.ir, self.arith, _, self.vector, _ = mlir_modules()
        self.utils = self.mgpu.utils
        self.i32 = self.ir.IntegerType.get_signless(32)
        self.base = self.utils.memref_ptr(ref)
        thread = self.utils.thread_idx()
        in_warpgroup = self.arith.remui(thread, self.constant(128))
        in_warp = self.arith.remui(thread, self.constant(32))
        self.warp = self.arith.divui(in_warpgroup, self.constant(32))
        self.lane = self.arith.divui(in_warp, self.constant(4))  # row of 8 of a product's fragment
        self.four = self.arith.remui(in_warp, self.constant(4))  # its pair of columns

    def constant(self, x: int):
        """Return an integer."""
        return self.arith.constant(self.i32, x)

    def swizzle(self, row, width: int):
        """Return what a byte's place in `row`, of `width` bytes, is combined with by xor."""
        row = self.arith.remui(row, self.constant(8))
        line = self.arith.divui(row, self.constant(128 // width))
        return self.arith.muli(line, self.constant(16))

    def load(self, place, offset: int, size: int):
        """Return `size` bytes, 2 or 4, from `place` plus `offset` on, in a word."""
        utils = self.utils
        i8 = self.ir.IntegerType.get_signless(8)
        kind = self.ir.IntegerType.get_signless(8 * size)
        pointer = utils.getelementptr(self.base, [place], i8)
        pointer = utils.getelementptr(pointer, [offset], i8)
        word = utils.llvm.load(kind, pointer)
        return word if size == 4 else self.arith.extui(self.i32, word)

    def interleave(self, x, y, first: int):
        """Return the bytes x[first], y[first], x[first + 1], y[first + 1]."""
        low, high = first, first + 1
        order = low | (4 + low) << 4 | high << 8 | (4 + high) << 12
        return self.utils.inline_ptx(
            f"prmt.b32 $0, $1, $2, {order:#x};", x, y, result_types=self.i32
        )

    def widen_int8(self, word, half: int):
        """Return two of a word's 4 integers, the first or the last, as bfloat16.

        A byte below the exponent 0x43 reads as 128 plus its lower 7 bits, and its sign doubles the
        128 (as Mosaic converts them).
        """
        order = 0x4342 if half else 0x4140
        return self.utils.inline_ptx(
            "{ .reg .b32 x, y, z;"
            f" prmt.b32 x, $1, 0x43, {order:#x};"
            " and.b32 y, x, 0xff7fff7f;"
            " and.b32 z, x, 0xff80ff80;"
            " sub.bf16x2 $0, y, z; }",
            word,
            result_types=self.i32,
        )

    def widen_float8(self, word, half: int):
        """Return two of a word's 4 numbers in float8_e4m3fn, the first or the last, as bfloat16."""
        part = "high" if half else "low"
        return self.utils.inline_ptx(
            "{ .reg .b16 low, high, x, y; .reg .b32 pair; .reg .f32 a, b;"
            " mov.b32 {low, high}, $1;"
            f" cvt.rn.f16x2.e4m3x2 pair, {part};"
            " mov.b32 {x, y}, pair;"
            " cvt.f32.f16 a, x;"
            " cvt.f32.f16 b, y;"
            " cvt.rn.bf16x2.f32 $0, b, a; }",
            word,
            result_types=self.i32,
        )


def _load_registers(ref: Ref, dtype, shape: tuple[int, int], load: Callable) -> Array:
    """Return the tile of `shape` whose registers `load` returns, by their row and column."""
    assert dtype == jnp.bfloat16
    is_int8 = ref.dtype == jnp.int8
    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(eight_bit_tiling(ref.shape[1])),), return_type=result
    )
    def read(_, ref):
        words = _Words(ref)
        mgpu, ir, vector = words.mgpu, words.ir, words.vector
        widen = words.widen_int8 if is_int8 else words.widen_float8
        loaded = load(words, widen)
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape(shape), object)
        for register, row, col in entries_of(layout, shape).pairs:
            one = vector.from_elements(ir.VectorType.get((1,), words.i32), [loaded[row, col]])
            pair = ir.VectorType.get((2,), ir.BF16Type.get())
            registers[register] = vector.bitcast(pair, one)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return read(ref)


def store_transposed(ref: Ref, tile: Array) -> None:
    """Store `tile` [c, N] of 16 bits to `ref` [N, c] in shared memory, a factor of a product.

    `plgpu.commit_smem` must follow.
    """
    if interpreting():
        ref[...] = tile.T
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SHARED), WGMMA))
    def store(_, ref, tile):
        _mgpu, ir, arith, memref, vector, _scf = mlir_modules()
        index = ir.IndexType.get()

        def constant(x: int):
            return arith.constant(index, x)

        entries = entries_of(tile.layout, tile.shape)
        in_patch = arith.divui(entries.row, constant(8))  # a thread's first row is below 64
        byte_row = arith.remui(entries.row, constant(8))
        for register, row, col in entries.pairs:
            for n in range(2):
                target_row = arith.addi(entries.col, constant(n))  # below 8
                chunk = arith.addi(in_patch, constant(row % 64 // 8))
                chunk = arith.xori(chunk, target_row)
                target_col = arith.addi(arith.muli(chunk, constant(8)), byte_row)
                number = vector.extract(tile.registers[register], [], [n])
                where = [constant(col // 8), constant(row // 64), target_row, target_col]
                memref.store(number, ref, where)

    store(ref, tile)


def reduce_rows(tile: Array, kind: str, scratch: Ref) -> Array:
    """Return the maximum ("max") or the sum ("add") along the rows of a tile, for each column.

    `scratch` is float32, in shared memory of this warpgroup alone.
    """
    if interpreting():
        return tile.max(axis=0) if kind == "max" else tile.sum(axis=0)
    result = plgpu.ShapeDtypeStruct(tile.shape[1:], jnp.float32, layout=COL)

    @plgpu.inline_mgpu(arg_types=(WGMMA, plgpu.RefType()), return_type=result)
    def reduce(_, tile, scratch):
        return tile.reduce(kind, 0, scratch)

    return reduce(tile, scratch)


def store_columns(
    ref: Ref, tile: Array, permuted: bool = False, columns_of_first: int | None = None
) -> None:
    """Store the first columns of `tile` [D, N] to `ref` [R, D] in global memory, R of them.

    With `columns_of_first`, `ref` is [R, D / 2]: so many columns are stored with their first D / 2
    rows, and the others with their last ones.
    If `permuted`, rows of the tile are in the order of `load_values`. The L2 cache keeps what is
    stored, see `KeptStores`.
    """
    count = ref.shape[0]
    D = tile.shape[0]
    if interpreting():
        rows = (sort_rows(tile) if permuted else tile).T[:count]
        if columns_of_first is not None:
            is_first = jnp.arange(count)[:, None] < columns_of_first
            rows = jnp.where(is_first, rows[:, : D // 2], rows[:, D // 2 :])
        ref[...] = rows
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(_, ref, tile):
        _mgpu, ir, arith, _memref, vector, scf = mlir_modules()
        index = ir.IndexType.get()

        def constant(x: int):
            return arith.constant(index, x)

        entries = entries_of(tile.layout, tile.shape)
        size = D // 32
        warp = arith.divui(entries.row, constant(ROWS_OF_WARP))
        lane = arith.remui(entries.row, constant(8))
        dim = arith.addi(lane, arith.muli(warp, constant(8)))
        dim = arith.muli(dim, constant(size))
        by_place = {(row, col): register for register, row, col in entries.pairs}
        rows = [64 * m + 8 * h for m in range(size // 2) for h in range(2)]
        kept = KeptStores(ref)
        for first_col in range(0, tile.shape[1], 8):
            for n in range(2):
                col = arith.addi(entries.col, constant(first_col + n))
                is_inside = arith.cmpi(arith.CmpIPredicate.ult, col, constant(count))
                numbers = []
                for row in rows:
                    register = tile.registers[by_place[row, first_col]]
                    numbers.append(vector.extract(register, [], [n]))
                if columns_of_first is not None:
                    is_first = arith.cmpi(arith.CmpIPredicate.ult, col, constant(columns_of_first))
                    half = len(rows) // 2
                    pairs = zip(numbers[:half], numbers[half:], strict=True)
                    numbers = [arith.select(is_first, *pair) for pair in pairs]
                branch = scf.IfOp(is_inside)
                with ir.InsertionPoint(branch.then_block):
                    pointer = kept.pointer([col, dim if permuted else entries.row])
                    if permuted:
                        kept.store(numbers, pointer)
                    else:
                        for row, number in zip(rows, numbers, strict=False):
                            kept.store([number], pointer, row)
                    scf.yield_([])

    store(ref, tile)


def store_of_columns(ref: Ref, x: Array) -> None:
    """Store a vector with one number for each column of a tile, [N], to `ref` [N] in global memory.

    Pallas of jax 0.12 stores no vectors of less than 128 bytes there.
    """
    if interpreting():
        ref[...] = x
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(_, ref, tile):
        _mgpu, ir, arith, _memref, vector, scf = mlir_modules()
        index = ir.IndexType.get()
        entries = entries_of(tile.layout, tile.shape)
        zero = arith.constant(index, 0)
        branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, entries.row, zero))
        with ir.InsertionPoint(branch.then_block):
            for register, row_offset, col_offset in entries.pairs:
                if row_offset == 0:
                    col = arith.addi(entries.col, arith.constant(index, col_offset))
                    vector.store(tile.registers[register], ref, [col])
            scf.yield_([])

    store(ref, broadcast_vector(x, (64, x.shape[0]), 1))


def full_columns(count: int, value: float) -> Array:
    """Return a vector with one number for each column of a tile, `value` everywhere."""
    return plgpu.layout_cast(jnp.full((count,), value, jnp.float32), COL)
