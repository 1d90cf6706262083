"""Run a kernel call under vmap and over devices.

vmap adds its dim to the batch. Batch entries and heads of a call are independent of each other, so
each device runs its own part and exchanges nothing, except for sums over the query heads that share
a key head. Arrays that are sharded along any other dim are gathered first.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from memeff.sharding import may_be_sharded, vary_together

SHARED_BATCH = "u"
FREE = "bkg"  # dims that may be sharded: batch, key heads, query heads that share a key head


def entries_of(n: int) -> str:
    """Return the dims of an array [b] that holds numbers of batch entries of array `n`."""
    return f"b@{n}"


def partitioned(call: Callable, dims_in: tuple[str, ...], dims_out: tuple[str, ...]) -> Callable:
    """Return `call` as a function for vmap and for any mesh.

    It maps arrays to a tuple of arrays. `dims_in` and `dims_out` have a letter for each dim of each
    array, the batch `b` first. The first array has all dims of FREE, and its sharding decides. If
    all batch entries share an array, its first letter is SHARED_BATCH. Under vmap it stays shared
    if it is the same for all calls. Results are computed call by call if one of them has this
    letter, or if an array with neither `b` nor SHARED_BATCH differs between the calls.
    """

    @custom_vmap
    def run(*arrays):
        return _partition_over_devices(in_32_bits(call), dims_in, dims_out, arrays)

    @run.def_vmap
    def _fold_into_batch(size, batched, *arrays):
        every = (True,) * len(dims_out)
        pairs = zip(batched, dims_in, strict=True)
        pools_differ = any(x and "b" not in dims and not is_shared(dims) for x, dims in pairs)
        if pools_differ or any(map(is_shared, dims_out)):

            def run_one(n: Array) -> tuple[Array, ...]:
                pairs = zip(arrays, batched, strict=True)
                return run(*(x[n] if is_batched else x for x, is_batched in pairs))

            return lax.map(run_one, jnp.arange(size)), every
        fold = functools.partial(_fold, size, batched, arrays)
        folded, folded_dims = zip(*map(fold, range(len(arrays)), dims_in), strict=True)
        results = partitioned(call, folded_dims, dims_out)(*folded)
        unfolded = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results)
        return unfolded, every

    return run


def in_32_bits(call: Callable) -> Callable:
    """Return `call` traced as without `jax_enable_x64`, so that Python's numbers have 32 bits."""

    def call_in_32_bits(*arrays):
        with jax.enable_x64(False):
            return call(*arrays)

    return call_in_32_bits


def is_shared(dims: str) -> bool:
    """Return whether all batch entries share one array with these dims."""
    return dims.startswith(SHARED_BATCH)


def _fold(
    size: int, batched: Sequence[bool], arrays: Sequence[Array], n: int, dims: str
) -> tuple[Array, str]:
    """Return array n of `size` calls of vmap as an array of one call, and its dims.

    Its batch entries, those of each call behind those of the call before, take the place of both
    dims. What all entries and all calls share stays as it is.
    """
    x = arrays[n]
    if not batched[n]:
        if "b" not in dims:
            return x, dims
        x = lax.broadcast(x, (size,))
    if is_shared(dims):
        B = arrays[0].shape[1 if batched[0] else 0]
        x = jnp.broadcast_to(x, (size, B, *x.shape[2:]))
        dims = "b" + dims[1:]
    _, *sources = dims.split("@")
    for source in map(int, sources):
        entries = arrays[source].shape[1 if batched[source] else 0]
        x += entries * lax.broadcasted_iota(x.dtype, x.shape, 0)
    return lax.collapse(x, 0, 2), dims


def _partition_over_devices(
    call: Callable, dims_in: tuple[str, ...], dims_out: tuple[str, ...], arrays: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Run `call` on each device's part of the arrays."""
    if not may_be_sharded() or _mosaic_interprets():
        # Results of kernels lack the type that shard_map gives to arrays that vary over devices.
        return vary_together(call(*arrays), arrays)
    assert not any("@" in dims for dims in dims_in)  # another device may have these entries
    first = jax.typeof(arrays[0]).sharding
    if AxisType.Explicit in first.mesh.axis_types:
        return _run_explicit(call, dims_in, dims_out, arrays)
    return _run_automatic(call, dims_in, dims_out, arrays)


def _mosaic_interprets() -> bool:
    """Return whether Hopper kernels run in Mosaic's interpreter; do not import Mosaic for this."""
    mosaic = sys.modules.get("memeff.pallas.hopper.mosaic")
    return mosaic is not None and mosaic.interpreting()


def _run_explicit(call: Callable, dims_in, dims_out, arrays: tuple[Array, ...]):
    """Run `call` under shard_map, for a mesh with explicit axes."""
    sharding = jax.typeof(arrays[0]).sharding
    axes = _axes(sharding.spec, dims_in[0])
    specs_in = _specs(dims_in, axes)
    run = jax.shard_map(
        _sum_over_devices(call, dims_out, axes),
        mesh=sharding.mesh,
        in_specs=specs_in,
        out_specs=_specs(dims_out, axes),
        check_vma=False,
    )
    shardings = [NamedSharding(sharding.mesh, spec) for spec in specs_in]
    return run(*map(reshard, arrays, shardings))


def _run_automatic(call: Callable, dims_in, dims_out, arrays: tuple[Array, ...]):
    """Run `call` with a rule for XLA's partitioner, which chooses the sharding."""

    @custom_partitioning
    def run(*arrays):
        return call(*arrays)

    def partition(mesh, shapes, results):
        axes = _axes(shapes[0].sharding.spec, dims_in[0])
        local_call = _sum_over_devices(call, dims_out, axes)
        shardings_out = _shardings(mesh, dims_out, axes)
        shardings_in = _shardings(mesh, dims_in, axes)
        return mesh, local_call, shardings_out, shardings_in

    def infer_sharding(mesh, shapes, results):
        axes = _axes(shapes[0].sharding.spec, dims_in[0])
        return _shardings(mesh, dims_out, axes)

    letters = dict.fromkeys("".join(dims_in + dims_out))
    gathered = tuple(x for x in letters if x not in FREE)
    run.def_partition(
        partition,
        infer_sharding,
        sharding_rule=f"{_spaced(dims_in)} -> {_spaced(dims_out)}",
        need_replication_factors=gathered,
    )
    return run(*arrays)


def _axes(spec, dims: str) -> dict[str, str | tuple[str, ...]]:
    """Return the mesh axes of the dims that stay sharded."""
    omitted = [None] * (len(dims) - len(spec))
    axes = {}
    for dim, axis in zip(dims, (*spec, *omitted), strict=True):
        if axis is not None and dim in FREE:
            axes[dim] = axis
    return axes


def _specs(arrays_dims: tuple[str, ...], axes: dict) -> tuple[P, ...]:
    """Return a PartitionSpec for each array."""
    return tuple(P(*map(axes.get, dims)) for dims in arrays_dims)


def _shardings(mesh, arrays_dims: tuple[str, ...], axes: dict) -> tuple[NamedSharding, ...]:
    """Return a sharding for each array."""
    return tuple(NamedSharding(mesh, spec) for spec in _specs(arrays_dims, axes))


def _spaced(arrays_dims: tuple[str, ...]) -> str:
    """Return dims as a sharding rule has them, such as "b t k g h, b s k h"."""
    return ", ".join(map(" ".join, arrays_dims))


def _sum_over_devices(call: Callable, dims_out: tuple[str, ...], axes: dict) -> Callable:
    """Return `call`. It sums each result over the devices that share it.

    A result is shared along the dims of FREE that it does not have.
    """

    def run(*arrays):
        totals = []
        for x, dims in zip(call(*arrays), dims_out, strict=True):
            shared = [axes[letter] for letter in FREE if letter in axes and letter not in dims]
            totals.append(lax.psum(x, tuple(_flatten_axes(shared))) if shared else x)
        return tuple(totals)

    return run


def _flatten_axes(axes: Sequence[str | tuple[str, ...]]) -> Iterator[str]:
    """Return the names of mesh axes, of which some dims have several."""
    for axis in axes:
        yield from (axis,) if isinstance(axis, str) else axis
