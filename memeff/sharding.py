"""Hides what sharded operands want: refusals, small operands laid out like the query, and types that agree under shard_map.

Auto meshes need nothing of this: XLA lays out everything after the query. Explicit meshes and shard_map type each array.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, reshard

from memeff.problem import Operands


def check_layout(query: Array, key: Array, value: Array) -> None:
    """Refuses a sharded sequence, and query heads over more devices than key heads divide, where the layout is known."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        length = x.ndim - 3
        if _devices(x, length) > 1:
            raise NotImplementedError(
                f"{name} is sharded along the sequence (dim {length}) over {_devices(x, length)} devices: memeff has no "
                "ring yet. Shard batch or heads instead, or gather it first: jax.device_put or jax.sharding.reshard."
            )
    heads, K, N = _devices(query, query.ndim - 2), key.shape[-2], query.shape[-2]
    if _explicit(query) and K not in (1, N) and K % heads:
        raise ValueError(
            f"query heads are sharded over {heads} devices of an Explicit mesh and key has {K} heads, which that does not "
            "divide: use shard_map, an Auto mesh, or repeat the key heads."
        )


def may_be_sharded() -> bool:
    """Can an array be laid out over several devices? Not inside a shard_map over all axes of its mesh."""
    types = jax.sharding.get_abstract_mesh().axis_types
    return jax.device_count() > 1 and not (types and all(t == AxisType.Manual for t in types))


def _like_query(operands: Operands) -> Operands:
    """On an Explicit mesh, bias and mask laid out over batch and heads as the query is; else XLA gathers their tiles."""
    if not _explicit(operands.query):
        return operands
    mesh = jax.typeof(operands.query).sharding.mesh
    B, _, K, G, _ = jax.typeof(operands.query).sharding.spec

    def spread(x):
        if x is None:
            return None
        spec = (
            axis if size > 1 else None
            for axis, size in zip((B, K, G, None, None), x.shape, strict=True)
        )
        return reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))

    sinks = operands.terms.sinks
    if sinks is not None:
        sinks = reshard(sinks, NamedSharding(mesh, PartitionSpec(K, G)))
    terms = operands.terms._replace(bias=spread(operands.terms.bias), sinks=sinks)
    return operands._replace(mask=spread(operands.mask), terms=terms)


def on_their_mesh(f: Callable, how: tuple, operands: Operands) -> Any:
    """Return f(*how, operands), traced within the mesh of the operands' types where `jax.set_mesh` has set none.

    Arrays made from nothing, also by `jnp.zeros_like`, have no mesh then, and from JAX 0.11 on a product or a slice
    refuses to combine them with sharded ones. Equations remember the mesh within which they were traced, so derivatives
    and vmap have it too. `how` is static. A mesh known by its type alone needs `jax.jit`, because it has no devices.
    """
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(operands))
    mesh = next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return f(*how, _like_query(operands))
    return _on_mesh(f, how, mesh, operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _on_mesh(f: Callable, how: tuple, mesh: AbstractMesh, operands: Operands) -> Any:
    with jax.sharding.use_abstract_mesh(mesh):
        return f(*how, _like_query(operands))


def shard_like(x: Array, like: Array) -> Array:
    """Return x laid out over devices as `like` is, where types say it."""
    return reshard(x, jax.typeof(like).sharding) if _explicit(like) else x


def on_auto_mesh(arrays: Any) -> Any:
    """Return the same arrays, on the same devices, without the types of an Explicit mesh. Not inside `jax.jit`."""

    def put(x):
        if not (isinstance(x.sharding, NamedSharding) and _explicit(x)):
            return x
        mesh = x.sharding.mesh
        mesh = Mesh(
            np.asarray(mesh.devices),
            mesh.axis_names,
            axis_types=(AxisType.Auto,) * len(mesh.axis_names),
        )
        return jax.device_put(x, NamedSharding(mesh, x.sharding.spec))

    return jax.tree.map(put, arrays)


def vary_together(operands: Any, like: Any = None) -> Any:
    """Under shard_map: replicated operands (a shared bias, say) typed as varying, so that JAX sums their gradients."""
    axes = frozenset().union(*(_varying(x) for x in jax.tree.leaves((operands, like))))

    def cast(x):
        missing = tuple(axes - _varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, operands) if axes else operands


def sharding_of_sum(total: Array | None) -> NamedSharding | None:
    """The layout of what is added to `total`: on an Explicit mesh a product over sharded heads must be told."""
    return jax.typeof(total).sharding if total is not None and _explicit(total) else None


def _explicit(x: Array) -> bool:
    return AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def _varying(x: Array) -> frozenset:
    return frozenset(jax.typeof(x).mat.varying)


def _devices(x: Array, dim: int) -> int:
    """Over how many devices `dim` is sharded, as far as is known: from the type (Explicit), or from a concrete array."""
    sharding = jax.typeof(x).sharding
    if not _explicit(x):
        sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if not isinstance(sharding, NamedSharding) or dim >= len(sharding.spec):
        return 1
    axes = sharding.spec[dim]
    axes = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return math.prod(sharding.mesh.shape[a] for a in axes if isinstance(a, str))
