"""Support sharded operands: check layouts, lay small operands out like the query, and match types.

Auto meshes need only the check, because XLA lays out everything after the query. Explicit meshes
and shard_map give each array a type that says how it is sharded.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from memeff.inputs import text_of
from memeff.problem import OPERAND_DIMS, Operands, map_operands
from memeff.shape import CallShape


def check_layout(query: Array, key: Array, value: Array, sequence: bool) -> None:
    """Raise an error if a known layout shards the sequence, or the heads in an unsupported way.

    It may shard the sequence if `sequence` is True.

    On an Explicit mesh the devices that share the query heads must divide the number of key heads.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        dim = x.ndim - 3
        devices = _devices(x, dim)
        if devices > 1 and not sequence:
            raise NotImplementedError(
                f"{name} is sharded along the sequence (dim {dim}) over {devices} devices. Pass "
                "sequence_axis, the name of the mesh axis, to keep it sharded. Or gather the "
                "sequence first with jax.device_put or jax.sharding.reshard."
            )
        devices = 1 if sequence else explicit_devices(x, x.ndim - 1)
        if devices > 1:
            raise NotImplementedError(
                f"{name} is sharded along its last dim over {devices} devices of an Explicit mesh. "
                "Shard batch or heads instead, by jax.sharding.reshard, or use an Auto mesh."
            )
    devices = explicit_devices(query, query.ndim - 2)
    K = key.shape[-2]
    N = query.shape[-2]
    if K not in (1, N) and K % devices:
        raise ValueError(
            f"query heads are sharded over {devices} devices of an Explicit mesh and key has {K} "
            f"heads, which {devices} does not divide. Use shard_map or an Auto mesh, or repeat the "
            "key heads."
        )


def sequence_axes(sequence_axis: Any, query: Any) -> tuple[str, ...]:
    """Return the mesh axes over which the sequence is sharded, or () if it is not.

    They are `sequence_axis`, or else those of the query's type on an Explicit mesh.
    """
    if sequence_axis is None:
        if not isinstance(query, jax.Array | Tracer) or query.ndim < 3 or not _explicit(query):
            return ()
        sequence_axis = jax.typeof(query).sharding.spec[query.ndim - 3]
        if sequence_axis is None:
            return ()
    axes = sequence_axis if isinstance(sequence_axis, tuple) else (sequence_axis,)
    if not all(isinstance(axis, str) for axis in axes) or len(axes) not in (1, 2):
        raise TypeError(
            "sequence_axis must be the name of a mesh axis, or two names, got "
            f"{text_of(sequence_axis)}."
        )
    return axes


def shared_by(x: Array, dim: int, devices: int) -> NamedSharding | None:
    """Return the sharding of x if it is known and `devices` devices share `dim`, or else None.

    It is known outside jit, and under jit if all axes of the mesh are Explicit: then the type has
    it.
    """
    sharding = _sharding_of(x)
    if devices == 1 or _devices(x, dim) != devices or not isinstance(sharding, NamedSharding):
        return None
    known = not isinstance(x, Tracer) or set(sharding.mesh.axis_types) == {AxisType.Explicit}
    return sharding if known else None


def with_whole_dim(function: Callable[[Array], Array], x: Array, dim: int) -> Array:
    """Return function(x), computed with `dim` of x and of the result whole on an Explicit mesh."""
    sharding: Any = jax.typeof(x).sharding
    spec = sharding.spec
    if not _explicit(x) or spec[dim] is None:
        return function(x)
    whole = PartitionSpec(*spec[:dim], None, *spec[dim + 1 :])
    return reshard(function(reshard(x, NamedSharding(sharding.mesh, whole))), sharding)


def _sharding_of(x: Any) -> Any:
    """Return the sharding of an array, or of its type under jit; None without one."""
    if isinstance(x, Tracer):
        return jax.typeof(x).sharding
    return getattr(x, "sharding", None)


def may_be_sharded() -> bool:
    """Return True if arrays may be laid out over several devices.

    They cannot inside a shard_map over all axes of its mesh.
    """
    return jax.device_count() > 1 and not all_axes_manual()


def all_axes_manual() -> bool:
    """Return True inside a shard_map over all axes of its mesh."""
    return set(jax.sharding.get_abstract_mesh().axis_types) == {AxisType.Manual}


def without_idle_axes(x: Any) -> Any:
    """Return x without the axes of one device that its type has on an Explicit mesh.

    They shard nothing, but a reshape of a dim of size 1 loses them, or moves them to another dim.
    """
    if not isinstance(x, jax.Array) or not _explicit(x):
        return x
    sharding = jax.typeof(x).sharding
    spec = _spec_of_several(x)
    return x if spec == sharding.spec else reshard(x, NamedSharding(sharding.mesh, spec))


def fold_leads(shape: CallShape, x: Array) -> Array:
    """Fold the leading dims of x into one B, which their axes of an Explicit mesh shard."""
    count = len(shape.leads)
    if count == 1:
        return x
    folded = (shape.B, *x.shape[count:])
    axes = [axis for dim in range(count) for axis in explicit_axes(x, dim)]
    return _reshape(x, folded, (tuple(axes) or None, *jax.typeof(x).sharding.spec[count:]))


def unfold(shape: CallShape, x: Array, query: Any) -> Array:
    """Return x [B, K, G, T, ...], a result, as [*B, T, N, ...].

    On an Explicit mesh it gets the axes of the leading dims of `query`, and those of one device
    that `query` has in other dims.
    """
    x = jnp.moveaxis(x, 3, 1)
    x = x.reshape(*x.shape[:2], shape.N, *x.shape[4:])
    count = len(shape.leads)
    if not isinstance(query, jax.Array) or not _explicit(query) or not _explicit(x):
        return x if count == 1 else x.reshape(*shape.leads, *x.shape[1:])
    of_several = _spec_of_several(query)
    if count != 1:
        axes = [axis for dim in range(count) for axis in explicit_axes(query, dim)]
        leads = of_several[:count] if tuple(axes) == explicit_axes(x, 0) else (None,) * count
        spec = *leads, *jax.typeof(x).sharding.spec[1:]
        x = _reshape(x, (*shape.leads, *x.shape[1:]), spec)
    sharding = jax.typeof(x).sharding
    spec = list(sharding.spec)
    rows = zip(jax.typeof(query).sharding.spec, of_several, strict=True)
    for n, (axes, axes_of_several) in enumerate(list(rows)[:-1]):
        if spec[n] == axes_of_several:
            spec[n] = axes
    spec = PartitionSpec(*spec)
    return x if spec == sharding.spec else reshard(x, NamedSharding(sharding.mesh, spec))


def _reshape(x: Array, shape: tuple, spec: tuple) -> Array:
    """Return x in another shape, and on an Explicit mesh with this spec."""
    if not _explicit(x):
        return x.reshape(shape)
    sharding = NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec(*spec))
    return lax.reshape(x, shape, out_sharding=sharding)


def _spec_of_several(x: Array) -> PartitionSpec:
    """Return the spec of the type of x on an Explicit mesh without axes of one device."""
    dims = (explicit_axes(x, n) for n in range(x.ndim))
    return PartitionSpec(*(axes if len(axes) > 1 else next(iter(axes), None) for axes in dims))


def _like_query(operands: Operands) -> Operands:
    """Lay bias, mask and sinks out over batch, heads and rows like the query, on an Explicit mesh.

    Otherwise XLA gathers their tiles. Offsets and lengths [B] follow the batch, as positions do.
    """
    if not _explicit(operands.query):
        return operands
    query_dims = OPERAND_DIMS["query"]
    query_sharding = jax.typeof(operands.query).sharding
    axes = dict(zip(query_dims, query_sharding.spec, strict=True))

    def shard(x, dims: str):
        if ("n" not in dims and dims != "b") or dims == query_dims:
            return x
        spec = []
        for dim, size in zip(dims, x.shape, strict=True):
            spec.append(axes[dim] if dim in "bnt" and size > 1 else None)
        return reshard(x, NamedSharding(query_sharding.mesh, PartitionSpec(*spec)))

    return map_operands(shard, operands)


def mesh_of(x: Any) -> Any:
    """Return the mesh on which an array lies, if its type or the array itself tells, else None."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.axis_names:
        return mesh
    if isinstance(x, Tracer) or not isinstance(getattr(x, "sharding", None), NamedSharding):
        return None
    return x.sharding.mesh


def on_mesh_of_operands(f: Callable, static: tuple, operands: Operands) -> Any:
    """Return f(*static, operands), traced within the mesh of the operands' types.

    A mesh that `jax.set_mesh` has set takes precedence. Without a mesh, new arrays (also those of
    `jnp.zeros_like`) have none, and from JAX 0.11 on a product or a slice refuses to combine them
    with sharded arrays. Equations remember the mesh within which they were traced, so derivatives
    and vmap have it too. A mesh known by its type alone needs `jax.jit`, because it has no devices.
    """
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands))
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return f(*static, _like_query(operands))
    return _on_mesh(f, static, mesh, operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _on_mesh(f: Callable, static: tuple, mesh: AbstractMesh, operands: Operands) -> Any:
    """Return f(*static, operands), traced within `mesh`."""
    with jax.sharding.use_abstract_mesh(mesh):
        return f(*static, _like_query(operands))


def with_auto_axes(f: Callable, static: tuple, arrays: tuple, like: Array) -> Any:
    """Return f(*static, *arrays), partitioned by XLA where an array is on an Explicit mesh.

    The results have the shape of `like` without its last dim, and there its sharding.
    """
    meshes = [jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays) if _explicit(x)]
    if not meshes:
        return f(*static, *arrays)
    spec = jax.typeof(like).sharding.spec[:-1] if _explicit(like) else ()
    return _with_auto_axes(f, static, meshes[0], PartitionSpec(*spec), arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _with_auto_axes(
    f: Callable, static: tuple, mesh: AbstractMesh, spec: PartitionSpec, arrays: tuple
) -> Any:
    """Return f(*static, *arrays), traced within `mesh`, with results that have this `spec`."""
    with jax.sharding.use_abstract_mesh(mesh):
        f = functools.partial(f, *static)
        types = zip(mesh.axis_names, mesh.axis_types, strict=True)
        axes = tuple(name for name, axis_type in types if axis_type == AxisType.Explicit)
        return jax.sharding.auto_axes(f, axes=axes, out_sharding=NamedSharding(mesh, spec))(*arrays)


def on_explicit_mesh(arrays: Any) -> bool:
    """Return True if the type of some array of the tree has axes of an Explicit mesh."""
    return any(_explicit(x) for x in jax.tree.leaves(arrays))


def shard_like(x: Array, like: Array) -> Array:
    """Return x in the layout of `like` if that is on an Explicit mesh, else x unchanged."""
    if not _explicit(like):
        return x
    return reshard(x, jax.typeof(like).sharding)


def on_auto_mesh(arrays: Any) -> Any:
    """Return the same arrays, on the same devices, without the types of an Explicit mesh.

    It works on concrete arrays only, so not inside `jax.jit`.
    """

    def put(x):
        if not (isinstance(x.sharding, NamedSharding) and _explicit(x)):
            return x
        return jax.device_put(x, NamedSharding(auto_mesh(x.sharding.mesh), x.sharding.spec))

    return jax.tree.map(put, arrays)


def auto_mesh(mesh: Any) -> Mesh:
    """Return a mesh of the same devices and axes in which all axes are Auto."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return Mesh(np.asarray(mesh.devices), mesh.axis_names, axis_types=types)


def vary_together(operands: Any, like: Any = None) -> Any:
    """Type replicated operands, such as a shared bias, as varying if others vary under shard_map.

    JAX then sums their gradients over the devices.
    """
    return vary_like(operands, (operands, like))


def varies(x: Any) -> bool:
    """Return whether some array of the tree x varies over devices under shard_map."""
    return any(varying_axes(leaf) for leaf in jax.tree.leaves(x))


def vary_like(arrays: Any, like: Any) -> Any:
    """Type arrays as varying under shard_map over each axis that an array of `like` varies over."""
    axes = frozenset()
    for x in jax.tree.leaves(like):
        axes |= varying_axes(x)
    if not axes:
        return arrays

    def cast(x):
        missing = tuple(axes - varying_axes(x))
        if not missing:
            return x
        is_short = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        long = x.astype(jnp.float32) if is_short else x  # JAX sums gradients in this dtype
        return lax.pcast(long, missing, to="varying").astype(x.dtype)

    return jax.tree.map(cast, arrays)


def operand_spec(axes: Mapping[str, Any], x: Array, dims: str) -> PartitionSpec:
    """Return how x, whose dims have the letters `dims`, is sharded over the `axes` of each letter.

    Dims of size 1 are whole, and so are the columns of a mask or a bias.
    """
    entries = []
    for letter, size in zip(dims, x.shape, strict=True):
        is_column = letter == "s" and dims == "bnts"
        entries.append(None if is_column or size == 1 else axes.get(letter))
    return PartitionSpec(*entries)


def complete_specs(specs: Any) -> Any:
    """Return a tree with the spec of a whole array in the place of each leaf that is no spec."""

    def is_spec(x: Any) -> bool:
        return isinstance(x, PartitionSpec)

    return jax.tree.map(lambda x: x if is_spec(x) else PartitionSpec(), specs, is_leaf=is_spec)


def sharding_of_sum(total: Array | None) -> NamedSharding | None:
    """Return the sharding for a term of the sum `total`, or None off Explicit meshes.

    A product over sharded heads needs an explicit output sharding there.
    """
    if total is None or not _explicit(total):
        return None
    return jax.typeof(total).sharding


def _explicit(x: Array) -> bool:
    """Return True if the type of `x` has axes of an Explicit mesh."""
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def varying_axes(x: Array) -> frozenset:
    """Return the axes of shard_map over which `x` varies."""
    return frozenset(jax.typeof(x).mat.varying)


def axes_that_share(x: Any, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the `axes` of shard_map on whose devices x is the same, where JAX checks that."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    shared = []
    for axis in axes:
        checked = axis in manual and axis in varying_axes(lax.axis_index(axis))
        if checked and lax.axis_size(axis) > 1 and axis not in varying_axes(x):
            shared.append(axis)
    return tuple(shared)


def explicit_devices(x: Array, dim: int) -> int:
    """Return the number of devices of an Explicit mesh over which `dim` is sharded; 1 elsewhere."""
    sizes = jax.typeof(x).sharding.mesh.shape
    return math.prod(sizes[axis] for axis in explicit_axes(x, dim))


def explicit_axes(x: Array, dim: int) -> tuple[str, ...]:
    """Return the axes of an Explicit mesh over which `dim` is sharded; none elsewhere."""
    return _axes(jax.typeof(x).sharding, dim) if _explicit(x) else ()


def _devices(x: Array, dim: int) -> int:
    """Return the number of devices over which `dim` is sharded; 1 if the layout is unknown.

    The layout is in a concrete array, or else in the type (Explicit).
    """
    sharding = _sharding_of(x)
    if not isinstance(sharding, NamedSharding):
        return 1
    return math.prod(sharding.mesh.shape[axis] for axis in _axes(sharding, dim))


def _axes(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    """Return the axes of several devices over which `dim` is sharded."""
    axes = sharding.spec[dim] if dim < len(sharding.spec) else None
    if not isinstance(axes, tuple):
        axes = (axes,)
    return tuple(x for x in axes if isinstance(x, str) and sharding.mesh.shape[x] > 1)
