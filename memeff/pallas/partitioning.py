"""Run a kernel call under vmap and over devices.

vmap adds its dim to the batch. Batch entries and heads of a call are independent of each other, so
each device runs its own part and exchanges nothing, except for sums over the query heads that share
a key head. Arrays that are sharded along any other dim are gathered first.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from memeff.pallas.hopper.mosaic import interpreting
from memeff.sharding import may_be_sharded, vary_together

FREE = "bkg"  # dims that may be sharded: batch, key heads, query heads that share a key head


def entries_of(n: int) -> str:
    """Return the dims of an array [b] that holds numbers of batch entries of array `n`."""
    return f"b@{n}"


def partitioned(call: Callable, dims_in: tuple[str, ...], dims_out: tuple[str, ...]) -> Callable:
    """Return `call` as a function for vmap and for any mesh.

    It maps arrays to a tuple of arrays. `dims_in` and `dims_out` have a letter for each dim of each
    array, the batch `b` first. Arrays without `b` belong to all batch entries. The first array has
    all dims of FREE, and its sharding decides.
    """
    has_batch = ["b" in dims for dims in dims_in]

    @custom_vmap
    def run(*arrays):
        return _partition_over_devices(call, dims_in, dims_out, arrays)

    @run.def_vmap
    def _fold_into_batch(size, batched, *arrays):
        if any(is_batched and not b for is_batched, b in zip(batched, has_batch, strict=True)):
            return _map_one_by_one(size, batched, arrays), (True,) * len(dims_out)

        def fold(x, is_batched, dims):
            if "b" not in dims:
                return x
            x = x if is_batched else lax.broadcast(x, (size,))
            _, *of = dims.split("@")
            for n in map(int, of):  # the entries of each call of the vmap lie behind each other
                entries = arrays[n].shape[1 if batched[n] else 0]
                x += entries * lax.broadcasted_iota(x.dtype, x.shape, 0)
            return lax.collapse(x, 0, 2)

        results = run(*map(fold, arrays, batched, dims_in))
        unfolded = tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results)
        return unfolded, (True,) * len(dims_out)

    def _map_one_by_one(size, batched, arrays):
        """Return the stacked results of one call after another."""

        def step(_, n):
            pairs = zip(arrays, batched, strict=True)
            return None, run(*(x[n] if is_batched else x for x, is_batched in pairs))

        return lax.scan(step, None, jnp.arange(size))[1]

    return run


def _partition_over_devices(
    call: Callable, dims_in: tuple[str, ...], dims_out: tuple[str, ...], arrays: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Run `call` on each device's part of the arrays."""
    if not may_be_sharded() or interpreting():
        # Results of kernels lack the type that shard_map gives to arrays that vary over devices.
        return vary_together(call(*arrays), arrays)
    assert not any("@" in dims for dims in dims_in)  # another device may have these entries
    first = jax.typeof(arrays[0]).sharding
    if AxisType.Explicit in first.mesh.axis_types:
        return _run_explicit(call, dims_in, dims_out, arrays)
    return _run_automatic(call, dims_in, dims_out, arrays)


def _run_explicit(call: Callable, dims_in, dims_out, arrays: tuple[Array, ...]):
    """Run `call` under shard_map, for a mesh with explicit axes."""
    sharding = jax.typeof(arrays[0]).sharding
    axes = _axes(sharding.spec, dims_in[0])
    specs_in = _specs(dims_in, axes)
    run = jax.shard_map(
        _sum_over_query_heads(call, dims_out, axes),
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
        local_call = _sum_over_query_heads(call, dims_out, axes)
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


def _sum_over_query_heads(call: Callable, dims_out: tuple[str, ...], axes: dict) -> Callable:
    """Return `call`. It sums results without dim `g` over devices that share a key head."""
    over = axes.get("g")

    def run(*arrays):
        results = call(*arrays)
        if over is None:
            return results
        totals = []
        for x, dims in zip(results, dims_out, strict=True):
            totals.append(x if "g" in dims else lax.psum(x, over))
        return tuple(totals)

    return run
