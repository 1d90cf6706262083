"""A kernel call under vmap and over devices. Hides that batches become one, and how each kind of mesh is told who has what.

Batch and heads of a call are independent of each other, so each device runs its own part, without a word to another but for
sums over query heads that share their keys. What else is sharded is gathered first (XLA says so to the partitioner).
"""

from collections.abc import Callable

import jax
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from memeff.pallas.hopper.mosaic import interpreting
from memeff.sharding import may_be_sharded, vary_together

FREE = "bkg"  # dims that may be sharded: batch, key heads, query heads of one


def partitioned(call: Callable, dims_in: tuple[str, ...], dims_out: tuple[str, ...]) -> Callable:
    """`call(*arrays)`, a tuple of arrays; of each, its dims in letters, the batch `b` first. The first has all of FREE."""

    @custom_vmap
    def run(*arrays):
        return _partition_over_devices(call, dims_in, dims_out, arrays)

    @run.def_vmap
    def _(size, batched, *arrays):
        def fold(x, given):
            x = x if given else lax.broadcast(x, (size,))
            return lax.collapse(x, 0, 2)

        found = run(*map(fold, arrays, batched))
        return tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in found), (
            True,
        ) * len(dims_out)

    return run


def _partition_over_devices(
    call: Callable, dims_in, dims_out, arrays: tuple[Array, ...]
) -> tuple[Array, ...]:
    if not may_be_sharded() or interpreting():
        # what a kernel returns has no type of shard_map's
        return vary_together(call(*arrays), arrays)
    mesh = jax.typeof(arrays[0]).sharding.mesh
    if AxisType.Explicit in mesh.axis_types:
        axes = _axes(jax.typeof(arrays[0]).sharding.spec, dims_in[0])
        specs = lambda dims: tuple(P(*(axes.get(dim) for dim in x)) for x in dims)
        whole = jax.shard_map(
            _summed(call, dims_out, axes),
            mesh=mesh,
            in_specs=specs(dims_in),
            out_specs=specs(dims_out),
            check_vma=False,
        )
        return whole(
            *(
                reshard(x, NamedSharding(mesh, spec))
                for x, spec in zip(arrays, specs(dims_in), strict=True)
            )
        )

    @custom_partitioning
    def run(*arrays):
        return call(*arrays)

    def partition(mesh, shapes, results):
        axes = _axes(shapes[0].sharding.spec, dims_in[0])
        of = lambda dims: tuple(NamedSharding(mesh, P(*(axes.get(dim) for dim in x))) for x in dims)
        return mesh, _summed(call, dims_out, axes), of(dims_out), of(dims_in)

    def infer(mesh, shapes, results):
        axes = _axes(shapes[0].sharding.spec, dims_in[0])
        return tuple(NamedSharding(mesh, P(*(axes.get(dim) for dim in x))) for x in dims_out)

    letters = dict.fromkeys("".join(dims_in + dims_out))
    spaced = lambda dims: ", ".join(" ".join(x) for x in dims)
    run.def_partition(
        partition,
        infer,
        sharding_rule=f"{spaced(dims_in)} -> {spaced(dims_out)}",
        need_replication_factors=tuple(x for x in letters if x not in FREE),
    )
    return run(*arrays)


def _axes(spec, dims: str) -> dict[str, str | tuple[str, ...]]:
    """Mesh axes of the dims that stay sharded."""
    spec = (*spec, *[None] * (len(dims) - len(spec)))
    return {
        dim: axis for dim, axis in zip(dims, spec, strict=True) if axis is not None and dim in FREE
    }


def _summed(call: Callable, dims_out, axes) -> Callable:
    """What has no dim of query heads is a sum over them."""
    over = axes.get("g")

    def run(*arrays):
        found = call(*arrays)
        if over is None:
            return found
        return tuple(
            x if "g" in dims else lax.psum(x, over) for x, dims in zip(found, dims_out, strict=True)
        )

    return run
