"""Pallas' Mosaic GPU backend as the kernels speak to it. Hides versions, layouts, and its interpreter.

The interpreter (a CPU that plays a GPU's warpgroups, barriers and copies, and finds races) lacks products whose first factor
is in registers: there it goes through shared memory, which is allocated for that only.
"""

import contextlib
import contextvars
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

# untyped: it differs between versions
plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
WGMMA = plgpu.Layout.WGMMA  # of a tile, 64 rows and more, that a product made
ROW, COL = WGMMA.reduce(1), WGMMA.reduce(0)  # of what belongs to its rows, to its columns
# 16-bit tiles, as products read them
SHARED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
FLOATS = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)  # 32-bit tiles

_interpreter: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "memeff_interpreter", default=None
)


@contextlib.contextmanager
def interpreted(detect_races: bool = True) -> Iterator[None]:
    """Kernels that are traced meanwhile run in the interpreter, on any device."""
    token = _interpreter.set(plgpu.InterpretGPUParams(detect_races=detect_races))
    try:
        yield
    finally:
        _interpreter.reset(token)


def interpreting() -> bool:
    return _interpreter.get() is not None


def warp_specialized_kernel(
    body: Callable,
    name: str,
    out: Sequence,
    scratch: dict,
    grid: int,
    threads: int,
    approximate: bool = True,
    barriers: bool = True,
    sums_over_rows: bool = False,
):
    """The kernel `body`, in `grid` blocks of `threads` warpgroups. `sums_over_rows`, or maxima, have 2 KiB of shared memory.

    `barriers`: Pallas' own around each store to shared memory, and before each load of what is stored. Without them a
    thread that reads what others of its warpgroup stored must meet them first.
    """
    return plgpu.kernel(
        body,
        out_type=tuple(out),
        scratch_types=scratch,
        grid=(grid,),
        grid_names=("block",),
        num_threads=threads,
        thread_name="warpgroup",
        kernel_name=name,
        interpret=_interpreter.get() or False,
        compiler_params=plgpu.CompilerParams(
            approx_math=approximate,
            unsafe_no_auto_barriers=not barriers,
            reduction_scratch_bytes=2048 if sums_over_rows else 0,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )


def take_registers(warpgroups: int, computes: bool) -> None:
    """Of the 65,536 that are there: for each thread of `warpgroups` that compute, or of the one more that copies."""
    for_one, for_copies = {1: (240, 40), 2: (240, 24), 3: (160, 32)}[warpgroups]
    plgpu.set_max_registers(
        for_one if computes else for_copies, action="increase" if computes else "decrease"
    )


def multiprocessors() -> int:
    """Of the device, or of an H200 where there is none."""
    return getattr(jax.devices()[0], "core_count", None) or 132


def tile_ref(count: int, rows: int, cols: int, dtype):
    """`count` tiles in shared memory."""
    return plgpu.SMEM((count, rows, cols), dtype, transforms=SHARED)


def interpreter_staging(count: int, rows: int, cols: int, dtype) -> dict:
    """Where the interpreter puts the first factors of `multiply`."""
    return {"stage": tile_ref(count, rows, cols, dtype)} if interpreting() else {}


def accumulators(body: Callable, *shapes: tuple[int, int]) -> Any:
    """`body(*accumulators)`, float32, zeros at first."""
    return pl.run_scoped(body, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def multiply(total, x, y, stage=None) -> None:
    """Starts total += x y. y is in shared memory, x there or in registers (`stage` is given: for the interpreter)."""
    if stage is not None and interpreting():
        stage[...] = x
        plgpu.commit_smem()
        x = stage
    plgpu.wgmma(total, x, y)


def init_accumulator(total, value: Array) -> Callable[[Array], Array]:
    """total = value, before a product into it is started. What it returns is to be applied to what is read at the end: the
    interpreter begins with zeros.
    """
    if interpreting():
        return lambda found: found + value
    total[...] = value
    return lambda found: found


def hide_from_cse(x):
    """x, which the compiler takes for another: what is made of it is made there, and not kept in registers until then."""
    return lax.optimization_barrier(x)


def full_tile(shape: tuple[int, ...], value: float) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), WGMMA if len(shape) == 2 else ROW)


def broadcast_vector(x: Array, shape: tuple[int, int], dim: int = 0) -> Array:
    """A vector along `dim` of a tile, repeated."""
    return lax.broadcast_in_dim(x, shape, [dim])


def positions(first, shape: tuple[int, int], dim: int) -> Array:
    """first, first + 1, ... along `dim`."""
    return first + plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=WGMMA)


def diagonal_values(ref, first, shape: tuple[int, int], dim: int) -> Array:
    """A tile whose numbers are those of the vector `ref`, in global memory, at `first` plus the position along `dim` minus
    the one along the other: the same along each diagonal, so a thread has two of them for each 8 columns, and two more.
    """
    if interpreting():
        below = shape[1 - dim] - 1
        along, across = (lax.broadcasted_iota(jnp.int32, shape, x) for x in (dim, 1 - dim))
        return ref[pl.ds(first - below, sum(shape) - 1)][along - across + below]
    result = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA), return_type=result)
    def load(_, ref, first):
        mgpu, ir, arith, memref, vector = _mlir()
        layout, index = mgpu.WGMMA_LAYOUT, ir.IndexType.get()
        add = lambda x, n: arith.addi(x, arith.constant(index, n))
        row, col = next(iter(layout.thread_idxs(shape)))
        along, across = (row, col) if dim == 0 else (col, row)
        start = arith.addi(
            arith.index_cast(index, first.registers.item()), arith.subi(along, across)
        )
        sides = layout.tiling.tile_strides((shape[1], 1))
        loaded, registers = {}, np.empty(layout.registers_shape(shape), object)

        def at(n):
            if n not in loaded:
                loaded[n] = memref.load(ref, [add(start, n)])
            return loaded[n]

        for n in np.ndindex(registers.shape):
            row, col = divmod(int(np.dot(n, sides)), shape[1])
            pair = [at(row - c if dim == 0 else c - row) for c in (col, col + 1)]
            registers[n] = vector.from_elements(ir.VectorType.get((2,), pair[0].type), pair)
        signed = True if jnp.issubdtype(result.dtype, jnp.integer) else None
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)

    return load(ref, first)


def _mlir() -> tuple[Any, ...]:
    """What code for single threads is made of."""
    dialects = "jax.extend.mlir.dialects"
    names = (
        "jax.experimental.mosaic.gpu",
        "jax.extend.mlir.ir",
        *(f"{dialects}.{x}" for x in ("arith", "memref", "vector")),
    )
    return tuple(map(importlib.import_module, names))


def any_of(ref) -> Array:
    """Is some number of this vector in shared memory above 0? The same answer for all threads."""
    return plgpu.load(ref, layout=COL).max() > 0


def sync(barrier) -> None:
    """All warpgroups that share `barrier` wait for each other."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def add_to(shared, total, spare=None) -> None:
    """Starts total += shared, of float32 in global memory, in no fixed order; by way of `spare` in the interpreter."""
    if spare is None:
        plgpu.copy_smem_to_gmem(shared, total, reduction_op="add")
        return
    old, there = spare
    plgpu.copy_gmem_to_smem(total, old, there)
    plgpu.barrier_wait(there)
    shared[...] = shared[...] + old[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared, total)
