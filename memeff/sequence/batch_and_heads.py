"""Say over which mesh axes batch and heads are sharded, beside a sequence or without one."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType

from memeff.inputs import text_of
from memeff.problem import Operands
from memeff.sharding import varying_axes


class BatchAndHeads(NamedTuple):
    """The mesh axes over which batch and heads are sharded; () is none."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def devices(self, mesh: Any) -> "Parts":
        """Return over how many devices of a mesh each is sharded."""

        def count(axes: tuple[str, ...]) -> int:
            return math.prod(mesh.shape[axis] for axis in axes)

        return Parts(count(self.batch), count(self.heads))


class Parts(NamedTuple):
    """The number of equal parts of a whole call, along each dim; the arrays hold one part."""

    batch: int = 1
    heads: int = 1
    sequence: int | None = None  # None: the sequence is not sharded


WHOLE = Parts()


def batch_and_heads_of(options: Any) -> BatchAndHeads:
    """Return the axes that `options.batch_axis` and `.head_axis` name; refuse repeated names."""
    batch = _names("batch_axis", options.batch_axis)
    heads = _names("head_axis", options.head_axis)
    names = [*batch, *heads, *_as_tuple(options.sequence_axis)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"the mesh axis {name!r} is named twice among sequence_axis, batch_axis and "
                "head_axis. Name it where it shards a dim."
            )
    return BatchAndHeads(batch, heads)


def check_inside(axes: BatchAndHeads) -> Parts:
    """Return the parts inside `jax.shard_map`, and refuse axes that are not manual there."""
    mesh = jax.sharding.get_abstract_mesh()
    for argument, name in _named(axes):
        if name not in mesh.manual_axes:
            known = ", ".join(map(repr, mesh.manual_axes)) or "none"
            raise ValueError(
                f"{argument}={name!r} is no axis of a jax.shard_map around this call (its axes: "
                f"{known}). Omit {argument} where the arrays are whole, unless sequence_axis is "
                "given."
            )
    return axes.devices(mesh)


def find_on_mesh(
    axes: BatchAndHeads, sequence: tuple[str, ...], mesh: Any, operands: Operands
) -> tuple[BatchAndHeads, Parts]:
    """Return the axes over which whole operands lie on a mesh, and over how many devices.

    The query's type tells Explicit axes, and the arguments may not contradict it. Where it shards
    batch or heads over an axis of `sequence`, tokens take that axis.
    """
    query: Any = jax.typeof(operands.query)
    if AxisType.Explicit in query.sharding.mesh.axis_types:
        batch, _, heads, _ = query.sharding.spec
        others = [[x for x in _as_tuple(dim) if x not in sequence] for dim in (batch, heads)]
        typed = BatchAndHeads(*map(tuple, others))
        sizes = query.sharding.mesh.shape
        of_several = {name for name in query.sharding.mesh.explicit_axes if sizes[name] > 1}
        for named, of_type in zip(axes, typed, strict=True):
            if named and tuple(name for name in named if name in of_several) != of_type:
                raise ValueError(
                    f"batch_axis={axes.batch} and head_axis={axes.heads} contradict the type of "
                    f"query, {typed.batch} and {typed.heads}. Omit them, or name all axes of a dim."
                )
        axes = BatchAndHeads(axes.batch or typed.batch, axes.heads or typed.heads)
    for argument, name in _named(axes):
        if name not in mesh.axis_names:
            known = ", ".join(map(repr, mesh.axis_names))
            raise ValueError(
                f"{argument}={name!r} is no axis of the mesh of sequence_axis. Its axes: {known}."
            )
        if name in mesh.manual_axes:
            raise ValueError(
                f"{argument}={name!r} is an axis of a jax.shard_map around this call, and those of "
                f"sequence_axis are not. Make all of them axes of that shard_map, or omit "
                f"{argument}."
            )
    parts = axes.devices(mesh)
    shape = operands.shape
    if shape.B % parts.batch:
        raise ValueError(
            f"batch_axis={axes.batch} has {parts.batch} devices, which do not divide B={shape.B} "
            "batch entries. Omit batch_axis, or pad the batch."
        )
    if shape.N % parts.heads or (shape.K > 1 and shape.K % parts.heads):
        raise ValueError(
            f"head_axis={axes.heads} has {parts.heads} devices, which must divide N={shape.N} "
            f"query heads and K={shape.K} key heads. Omit head_axis, or repeat the key heads."
        )
    return axes, parts


def check_sharded(axes: BatchAndHeads, query: Array) -> None:
    """Refuse axes over which the query is not sharded, where the checks of shard_map tell."""
    for argument, name in _named(axes):
        checked = name in varying_axes(lax.axis_index(name))  # not with check_vma=False
        if checked and name not in varying_axes(query):
            raise ValueError(
                f"query is the same on all devices of {argument}={name!r}. Shard it over them by "
                f"in_specs, or omit {argument}."
            )


def count_in_whole_call(axes: BatchAndHeads, operands: Operands) -> Operands:
    """Return a device's operands whose origin has its first batch entry and head."""
    if operands.origin is None:
        return operands
    B, _, N, _ = operands.query.shape
    first_batch = _rank(axes.batch) * B
    first_head = _rank(axes.heads) * N
    return operands._replace(
        origin=operands.origin._replace(first_batch=first_batch, first_head=first_head)
    )


def _named(axes: BatchAndHeads) -> list[tuple[str, str]]:
    """Return (argument, name) of each axis."""
    batch = [("batch_axis", name) for name in axes.batch]
    return batch + [("head_axis", name) for name in axes.heads]


def _names(argument: str, value: Any) -> tuple[str, ...]:
    """Return the names of mesh axes as a tuple."""
    names = _as_tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"{argument} must be the name of a mesh axis, or a tuple of names, got "
            f"{text_of(value)}."
        )
    return names


def _as_tuple(names: Any) -> tuple[Any, ...]:
    """Return an entry of a PartitionSpec as a tuple of names."""
    if names is None:
        return ()
    return names if isinstance(names, tuple) else (names,)


def _rank(axes: tuple[str, ...]) -> Array:
    """Return the number of this device along the axes together, int32."""
    return lax.axis_index(axes) if axes else jnp.int32(0)
