"""Run a call whose sequence is sharded over devices: inside shard_map, or by entering it."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from memeff import dispatch, tile_sizes, validate_options
from memeff.arguments import Arguments
from memeff.attention_ad import attend
from memeff.implementations import Chosen, Request
from memeff.problem import (
    Operands,
    Origin,
    Problem,
    Schedule,
    WholeCall,
    map_operands,
)
from memeff.sequence.batch_and_heads import BatchAndHeads, Parts, count_in_whole_call
from memeff.sequence.choose import (
    Plan,
    Sizes,
    check_lengths,
    check_strategy,
    choose_strategy,
    sizes_of,
    why_not,
)
from memeff.sequence.exchange import exchange
from memeff.sequence.gathered import columns_in_order
from memeff.sequence.implementation import Sharded
from memeff.sequence.layout import check_layout_name, stride_of
from memeff.sequence.parts import Shards
from memeff.sharding import axes_that_share, complete_specs, mesh_of, operand_spec, vary_like


class SequenceMesh(NamedTuple):
    """The mesh over whose axes a sequence is sharded."""

    in_shard_map: bool  # the call is inside shard_map, over these axes
    mesh: Any  # None in shard_map, and for the mesh of the context
    devices: tuple[int, ...]  # along each axis

    @property
    def parts(self) -> int:
        """Return into how many parts shard_map has cut the tokens before the call."""
        return math.prod(self.devices) if self.in_shard_map else 1


def attend_here(
    plan: Plan, problem: Problem, want_lse: bool, operands: Operands
) -> tuple[Array, Array | None]:
    """Return out [B, K, G, T, D] and lse [B, K, G, T] or None, of this device's operands.

    The axes of `plan` are manual: this runs inside shard_map.
    """
    ranks = [lax.axis_index(axis) for axis in plan.axes]
    query, key, value = vary_like(operands[:3], ranks)  # an axis of one device may be unnamed
    operands = operands._replace(query=query, key=key, value=value)
    *ring_axes, last = plan.axes
    if ring_axes:  # all-to-all by ring
        ring = Plan(tuple(ring_axes), plan.layout, "ring", plan.request)

        def attend_ring(operands: Operands) -> tuple[Array, Array | None]:
            return attend_here(ring, problem, want_lse, operands)

        return exchange(Shards(last, "contiguous"), attend_ring, operands)
    shards = Shards(last, plan.layout)
    if plan.strategy == "all_to_all":

        def attend_heads(operands: Operands) -> tuple[Array, Array | None]:
            chosen = dispatch.choose_implementation(problem, operands, plan.request)
            return attend(chosen, want_lse, operands)

        return exchange(shards, attend_heads, operands)
    if plan.strategy == "all_gather":
        operands = columns_in_order(shards, operands)
    module: Any = Sharded(plan.strategy, shards, plan.request)
    return attend(Chosen(problem, Schedule(), module), want_lse, operands)


def check_tokens_sharded(axes: tuple[str, ...], operands: Operands) -> None:
    """Refuse tokens that all devices of an axis of shard_map share, where JAX checks that."""
    for name in ("query", "key", "value"):
        for axis in axes_that_share(getattr(operands, name), axes):
            raise ValueError(
                f"{name} is the same on all devices of sequence_axis={axis!r}. Shard its tokens "
                "over them by in_specs, or omit sequence_axis."
            )


def make_plan(
    arguments: Arguments,
    axes: tuple[str, ...],
    sequence_mesh: SequenceMesh,
    parts: Parts,
    problem: Problem,
    operands: Operands,
) -> tuple[Plan, Sizes]:
    """Check the arguments of a sharded sequence, and choose a strategy unless one is given.

    A device has one of `parts` of the batch entries and heads of `operands`.
    """
    layout = arguments.sequence_layout
    check_layout_name(layout)
    if arguments.memory_limit is not None or tile_sizes.memory_limit_of_program.value is not None:
        raise NotImplementedError(
            "memory_limit does not support a sequence that is sharded over devices. Omit it, and "
            "pass chunk_size for smaller tiles."
        )
    sizes = sizes_of(operands, sequence_mesh.parts, parts, sequence_mesh.devices)
    check_lengths(sizes, layout)
    request = Request(
        arguments.implementation,
        validate_options.check_backward(arguments.backward),
        validate_options.check_chunk_size(arguments.chunk_size),
    )
    strategy = arguments.context_parallel
    check_strategy(strategy)
    if strategy is None:
        strategy = choose_strategy(layout, sizes, problem, operands, request)
    reason = why_not(strategy, layout, sizes, problem, operands, request)
    if reason is not None:
        raise NotImplementedError(
            f'context_parallel="{strategy}" cannot run this call: {reason}. Use None to let memeff '
            "choose."
        )
    return Plan(axes, layout, strategy, request), sizes


def stride_in(plan: Plan, sizes: Sizes) -> int:
    """Return how many tokens lie from one position of a shard to the next."""
    if plan.strategy == "all_to_all" and len(plan.axes) == 1:
        return 1  # tokens come into their own order
    return stride_of(plan.layout, sizes.devices[0])


def locate(whole: WholeCall, problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Return a problem and operands that know the whole call, and begin at its first token."""
    origin = None
    if problem.names_positions:
        zero = jnp.int32(0)
        offset = operands.q_offset
        if offset is None:
            offset = jnp.full((1,), problem.q_offset, jnp.int32)
        origin = Origin(zero, zero, zero, zero, offset)
    return dataclasses.replace(problem, whole=whole), operands._replace(origin=origin)


def find_sequence_mesh(axes: tuple[str, ...], arrays: tuple[Any, ...]) -> SequenceMesh:
    """Return the mesh that has `axes`: that of the context, or else that of the arrays."""
    current = jax.sharding.get_abstract_mesh()
    if all(axis in current.axis_names for axis in axes):
        devices = tuple(current.shape[axis] for axis in axes)
        manual = [axis in current.manual_axes for axis in axes]
        if any(manual) and not all(manual):
            raise ValueError(
                f"sequence_axis={axes}: make all of these axes those of the jax.shard_map, or none."
            )
        return SequenceMesh(all(manual), None, devices)
    for x in arrays:
        mesh = mesh_of(x)
        if mesh is not None and all(axis in mesh.axis_names for axis in axes):
            return SequenceMesh(False, mesh, tuple(mesh.shape[axis] for axis in axes))
    known = ", ".join(map(repr, current.axis_names)) or "none"
    raise ValueError(
        f"sequence_axis={axes[0] if len(axes) == 1 else axes!r} is no axis of a mesh here (axes of "
        f"the context: {known}). Call under jax.set_mesh(mesh), inside jax.shard_map, or with "
        "arrays that lie on such a mesh."
    )


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def enter_shard_map(
    plan: Plan,
    other_axes: BatchAndHeads,
    mesh: Any,
    problem: Problem,
    want_lse: bool,
    operands: Operands,
) -> tuple[Array, Array | None]:
    """Return out [B, K, G, T, D] and lse [B, K, G, T] or None, from operands of the whole call.

    On a mesh with Explicit axes all axes become manual. On an Auto mesh those of the sequence and
    `other_axes` do, and XLA partitions batch and heads over the rest.
    """
    shape = operands.shape
    typed: Any = jax.typeof(operands.query).sharding.mesh
    if typed.empty:  # the query was made before the mesh was set
        typed = jax.sharding.get_abstract_mesh()
    is_explicit = AxisType.Explicit in typed.axis_types
    batch = other_axes.batch or None
    heads = other_axes.heads or None
    of_key_heads = None if shape.K == 1 else heads
    sequence = plan.axes[0] if len(plan.axes) == 1 else plan.axes
    axes = {"b": batch, "n": heads, "k": of_key_heads, "t": sequence, "s": sequence}
    spec = functools.partial(operand_spec, axes)

    def lay_out(x: Array, dims: str) -> Array:
        """Shard x by its spec over Explicit axes, where shard_map's transpose does not do it."""
        entries = [only_explicit(entry) for entry in spec(x, dims)]
        return reshard(x, NamedSharding(typed, PartitionSpec(*entries)))

    def only_explicit(entry: Any) -> tuple[str, ...] | None:
        """Return the Explicit axes of an entry of a spec; None if it has none."""
        axes = entry if isinstance(entry, tuple) else (entry,)
        return tuple(axis for axis in axes if axis in typed.explicit_axes) or None

    if is_explicit:
        operands = map_operands(lay_out, operands)
    specs = complete_specs(map_operands(spec, operands))
    of_group = heads if of_key_heads is None else None
    rows = PartitionSpec(batch, of_key_heads, of_group, sequence)

    def run(operands: Operands) -> tuple[Array, Array | None]:
        return attend_here(plan, problem, want_lse, count_in_whole_call(other_axes, operands))

    manual = {*plan.axes, *other_axes.batch, *other_axes.heads}
    sharded = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(rows, rows if want_lse else None),
        axis_names=set(typed.axis_names) if is_explicit else manual,
    )
    return sharded(operands)
