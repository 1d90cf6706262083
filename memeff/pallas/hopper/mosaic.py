"""Wrap the parts of Pallas' Mosaic GPU backend that the Hopper kernels use.

JAX versions and Mosaic's layouts are known to this file alone. It also fills a gap of Mosaic's
interpreter, a CPU that plays a GPU's warpgroups, barriers and copies and finds races: a product
whose first factor is in registers stages that factor in shared memory, which only the interpreter
allocates.
"""

import contextlib
import contextvars
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.shape import round_up

# Untyped, because the module differs between versions of JAX.
plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
Ref: TypeAlias = Any  # a view of shared or global memory
Barrier: TypeAlias = Any  # one barrier, or an array of them

WGMMA = plgpu.Layout.WGMMA  # of a tile of at least 64 rows in registers, as a product leaves it
ROW = WGMMA.reduce(1)  # of a vector with one number for each row of such a tile
COL = WGMMA.reduce(0)  # of a vector with one number for each column
SHARED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # 16-bit tiles, for products
FLOATS = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)  # 32-bit tiles

_interpreter: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "memeff_interpreter", default=None
)


@contextlib.contextmanager
def interpreted(detect_races: bool = True) -> Iterator[None]:
    """Run the kernels that are traced inside this context in the interpreter, on any device."""
    token = _interpreter.set(plgpu.InterpretGPUParams(detect_races=detect_races))
    try:
        yield
    finally:
        _interpreter.reset(token)


def interpreting() -> bool:
    """Return True inside `interpreted`."""
    return _interpreter.get() is not None


def interpret_params() -> Any:
    """Return what Pallas takes as `interpret`."""
    return _interpreter.get() or False


def warp_specialized_kernel(
    body: Callable,
    name: str,
    out: Sequence,
    scratch: dict,
    blocks: int,
    warpgroups: int,
    approx_math: bool = True,
    barriers: bool = True,
    sums_over_rows: bool = False,
    cluster: int = 1,
):
    """Return `body` as a kernel of `blocks` thread blocks of `warpgroups` warpgroups each.

    `cluster` thread blocks, which divide `blocks`, run at the same time and can share what they
    copy: `copy_to_cluster`. "block" is then the index of the cluster, and "in_cluster" the index
    within it.
    `sums_over_rows` reserves 2 KiB of shared memory for sums and maxima along a tile's columns.
    `barriers` lets Pallas place its own around each store to shared memory and before each load of
    stored values. Without them, a thread must synchronize its warpgroup before it reads values that
    other threads stored.
    """
    return plgpu.kernel(
        body,
        out_type=tuple(out),
        scratch_types=scratch,
        grid=(blocks // cluster,),
        grid_names=("block",),
        cluster=(cluster,) if cluster > 1 else (),
        cluster_names=("in_cluster",) if cluster > 1 else (),
        num_threads=warpgroups,
        thread_name="warpgroup",
        kernel_name=name,
        interpret=interpret_params(),
        compiler_params=plgpu.CompilerParams(
            approx_math=approx_math,
            unsafe_no_auto_barriers=not barriers,
            reduction_scratch_bytes=2048 if sums_over_rows else 0,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
    )


def copy_to_cluster(source: Ref, target: Ref, ready: Barrier, cluster: int) -> None:
    """Copy `source` in global memory to `target` in each thread block of a cluster.

    All of its blocks call this. Each then copies its part to all of them. `ready` is complete in a
    block when all parts are there.
    """
    plgpu.copy_gmem_to_smem(
        source, target, ready, collective_axes="in_cluster" if cluster > 1 else None
    )


def cluster_barriers(cluster: int, arrivals: int, count: int) -> Barrier:
    """Return the type of `count` barriers that wait for `arrivals` in each block of a cluster.

    A warpgroup that arrives does so in all blocks of the cluster.
    """
    if cluster == 1:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
    return plgpu.ClusterBarrier(
        collective_axes=("in_cluster",), num_arrivals=arrivals, num_barriers=count
    )


def set_registers(count: int, default: int) -> None:
    """Set the registers of each thread of this warpgroup, which had `default` at first."""
    plgpu.set_max_registers(count, action="increase" if count > default else "decrease")


def take_registers(warpgroups: int, computes: bool) -> None:
    """Set the registers of each thread of a consumer (`computes`), or of the producer.

    A thread block has `warpgroups` consumers and one producer, which share 65,536 registers.
    """
    consumer, producer = {1: (240, 40), 2: (240, 24), 3: (160, 32)}[warpgroups]
    plgpu.set_max_registers(
        consumer if computes else producer, action="increase" if computes else "decrease"
    )


def multiprocessors() -> int:
    """Return how many multiprocessors the device has; where it has none, those of an H200."""
    return getattr(jax.devices()[0], "core_count", None) or 132


def tile_ref(count: int, rows: int, cols: int, dtype):
    """Return the type of `count` tiles [rows, cols] in shared memory.

    Tiles of 16-bit numbers are laid out for products.
    """
    transforms = eight_bit_tiling(cols) if jnp.dtype(dtype).itemsize == 1 else SHARED
    return plgpu.SMEM((count, rows, cols), dtype, transforms=transforms)


def eight_bit_tiling(cols: int) -> tuple[Any, Any]:
    """Return how tiles of 8-bit numbers of up to 128 columns lie in shared memory."""
    return plgpu.TilingTransform((8, cols)), plgpu.SwizzleTransform(cols)


def whole_width(dim: int) -> int:
    """Return a head dim, rounded up to the 64 columns of a tile in shared memory."""
    return round_up(dim, 64)


def head_rows(ref: Ref, b, rows, n, width: int = 0) -> Ref:
    """Return the vectors of head n at `rows`, from `ref` [B, T, N, H] in global memory, for a copy.

    H counts as `width`, or if that is 0 as a multiple of 64. A copy to shared memory fills the rest
    with zeros, and a copy to global memory leaves it out.
    """
    width = width or whole_width(ref.shape[-1])
    if ref.shape[-1] == width:
        return ref.at[b, rows, n]
    zero = lax.axis_index("block") * 0  # static bounds would be checked
    return ref.at[b, rows, n, pl.ds(zero, width)]


def interpreter_staging(count: int, rows: int, cols: int, dtype) -> dict:
    """Return the scratch for first factors of `multiply` in the interpreter; none on a GPU."""
    return {"stage": tile_ref(count, rows, cols, dtype)} if interpreting() else {}


def accumulators(body: Callable, *shapes: tuple[int, int], dtype=jnp.float32) -> Any:
    """Return `body(*accumulators)`, where the accumulators start at zero."""
    return pl.run_scoped(body, *(plgpu.ACC(shape, dtype) for shape in shapes))


def multiply(total, x, y, stage=None) -> None:
    """Start total += x y.

    y is in shared memory, and x is there or in registers. The interpreter copies such an x to
    `stage`.
    """
    if stage is not None and interpreting():
        stage[...] = x
        plgpu.commit_smem()
        x = stage
    plgpu.wgmma(total, x, y)


def init_accumulator(total, value: Array) -> Callable[[Array], Array]:
    """Set `total` to `value` before any product is added to it.

    Apply the returned function to the final content of `total`: it adds `value` in the interpreter,
    whose accumulators always start at zero, and changes nothing on a GPU.
    """
    if interpreting():
        return lambda result: result + value
    total[...] = value
    return lambda result: result


def hide_from_cse(x):
    """Hide x from common-subexpression elimination.

    Values derived from the result are recomputed, instead of held in registers since their first
    use.
    """
    return lax.optimization_barrier(x)


def full_tile(shape: tuple[int, ...], value: float) -> Array:
    """Return a tile [rows, cols], or a vector of its rows [rows], that is `value` everywhere."""
    layout = WGMMA if len(shape) == 2 else ROW
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def broadcast_vector(x: Array, shape: tuple[int, int], dim: int = 0) -> Array:
    """Repeat a vector along `dim` over the other dim of a tile of `shape`."""
    return lax.broadcast_in_dim(x, shape, [dim])


def positions(first, shape: tuple[int, int], dim: int) -> Array:
    """Return a tile of `shape` that counts first, first + 1, ... along `dim`."""
    return first + plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=WGMMA)


def diagonal_values(ref, first, shape: tuple[int, int], dim: int) -> Array:
    """Return a tile of `shape` that is constant along diagonals, from `ref` [X] in global memory.

    The entry with position x along `dim` and y along the other dim is ref[first + x - y]. A thread
    therefore holds two distinct values for every 8 columns, and two more.
    """
    if interpreting():
        offset = shape[1 - dim] - 1
        x = lax.broadcasted_iota(jnp.int32, shape, dim)
        y = lax.broadcasted_iota(jnp.int32, shape, 1 - dim)
        return ref[pl.ds(first - offset, sum(shape) - 1)][x - y + offset]
    result = plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA), return_type=result)
    def load(_, ref, first):
        mgpu, ir, arith, memref, vector, _ = mlir_modules()
        layout = mgpu.WGMMA_LAYOUT
        index = ir.IndexType.get()
        row, col = next(iter(layout.thread_idxs(shape)))  # of the thread's first entry
        x, y = (row, col) if dim == 0 else (col, row)
        first = arith.index_cast(index, first.registers.item())
        start = arith.addi(first, arith.subi(x, y))
        strides = layout.tiling.tile_strides((shape[1], 1))
        registers = np.empty(layout.registers_shape(shape), object)
        loaded = {}  # by distance from `start`

        def load_once(distance):
            if distance not in loaded:
                place = arith.addi(start, arith.constant(index, distance))
                loaded[distance] = memref.load(ref, [place])
            return loaded[distance]

        for n in np.ndindex(registers.shape):
            row, col = divmod(int(np.dot(n, strides)), shape[1])
            pair = [load_once(row - c if dim == 0 else c - row) for c in (col, col + 1)]
            registers[n] = vector.from_elements(ir.VectorType.get((2,), pair[0].type), pair)
        signed = True if jnp.issubdtype(result.dtype, jnp.integer) else None
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)

    return load(ref, first)


def mlir_modules() -> tuple[Any, ...]:
    """Return the modules in which code for single threads is written."""
    dialects = "jax.extend.mlir.dialects"
    names = (
        "jax.experimental.mosaic.gpu",
        "jax.extend.mlir.ir",
        f"{dialects}.arith",
        f"{dialects}.memref",
        f"{dialects}.vector",
        f"{dialects}.scf",
    )
    return tuple(map(importlib.import_module, names))


def largest_of(ref) -> Array:
    """Return the largest number of the vector `ref` in shared memory, in all threads."""
    return plgpu.load(ref, layout=COL).max()


def sync(barrier) -> None:
    """Wait until all warpgroups that share `barrier` have come here."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def release_read(barrier) -> None:
    """Arrive at `barrier` after reads of shared memory that the next copy will write over.

    The barrier orders them. The interpreter's search for races asks for a fence as well.
    """
    if interpreting():
        plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def global_counters(count: int) -> Ref:
    """Return `count` counters in global memory, which are 0 when the kernel starts.

    The interpreter has none.
    """
    return None if interpreting() else pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))


def count_up(counters: Ref, n) -> None:
    """Add 1 to counter n after all that this warpgroup wrote to global memory."""
    if counters is not None:
        plgpu.semaphore_signal(counters.at[n], memory_scope="gpu")


def wait_for_count(counters: Ref, n, count) -> None:
    """Wait until counter n is at least `count`, and see all that was written before."""
    if counters is not None:
        plgpu.semaphore_wait(counters.at[n], count, decrement=False, memory_scope="gpu")


def add_to(shared, total, spare=None) -> None:
    """Start total += shared, in float32 in global memory. The order of such sums is not fixed.

    The interpreter needs `spare`, a tile in shared memory and its barrier, to read the old total.
    """
    if spare is None:
        plgpu.copy_smem_to_gmem(shared, total, reduction_op="add")
        return
    old, ready = spare
    plgpu.copy_gmem_to_smem(total, old, ready)
    plgpu.barrier_wait(ready)
    shared[...] = shared[...] + old[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared, total)
