"""Turn the arguments of `dot_product_attention` into a checked call, and run it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff import compiling, dispatch, sharding, tile_sizes, validate, validate_options
from memeff.arguments import Arguments
from memeff.attention_ad import attend
from memeff.implementations import Chosen, Request
from memeff.inputs import check_bool, refuse_symbolic
from memeff.problem import Operands, Problem, WholeCall, check_sizes_known, sum_dtype
from memeff.query_positions import check_query_positions
from memeff.sequence.batch_and_heads import (
    WHOLE,
    BatchAndHeads,
    Parts,
    batch_and_heads_of,
    check_inside,
    check_sharded,
    count_in_whole_call,
    find_on_mesh,
)
from memeff.sequence.call import (
    SequenceMesh,
    attend_here,
    check_tokens_sharded,
    enter_shard_map,
    find_sequence_mesh,
    locate,
    make_plan,
    stride_in,
)
from memeff.sequence.choose import Plan, Sizes
from memeff.sequence.layout import check_layout_name
from memeff.shape import CallShape
from memeff.softmax import LSE_OF_EMPTY_ROW
from memeff.units import parse_bytes


class Call(NamedTuple):
    """A checked call: sizes, problem, arrays, and the implementation and tiles that run it."""

    shape: CallShape
    problem: Problem
    operands: Operands
    chosen: Chosen


def run_attention(
    arguments: Arguments, chosen: Chosen | None = None
) -> Array | tuple[Array, Array]:
    """Return out [*B, T, N, D] and, with `return_residual`, lse [*B, T, N].

    With `chosen`, run in that implementation and its tiles.
    """
    axes = sharding.sequence_axes(arguments.sequence_axis, arguments.query)
    if axes:
        return _run_sharded(arguments, axes)
    call = prepare(arguments, run_attention, chosen)
    static = call.chosen, bool(arguments.return_residual)
    out, lse = sharding.on_mesh_of_operands(attend, static, call.operands)
    return to_public(call.shape, out, lse, arguments.query)


class ShardedCall(NamedTuple):
    """A checked call whose sequence is sharded over devices."""

    shape: CallShape  # of the arrays that came
    problem: Problem
    operands: Operands
    sequence_mesh: SequenceMesh
    plan: Plan
    sizes: Sizes  # of the whole sequence, and of the batch entries and heads of a device
    other_axes: BatchAndHeads  # besides those of the sequence


def prepare_sharded(arguments: Arguments, axes: tuple[str, ...]) -> ShardedCall:
    """Check each argument of a call whose sequence is sharded over the mesh axes `axes`."""
    sequence_mesh = find_sequence_mesh(axes, (arguments.query, arguments.key, arguments.value))
    other_axes = batch_and_heads_of(arguments)
    parts = Parts(sequence=1)
    if sequence_mesh.in_shard_map:
        parts = check_inside(other_axes)._replace(sequence=sequence_mesh.parts)
    shape, problem, operands = normalise(_without_idle_axes(arguments), parts)
    sizes = shape._replace(leads=shape.B)._asdict()
    refuse_symbolic("A sequence that is sharded over devices", **sizes)
    parts_of_device = WHOLE
    if not sequence_mesh.in_shard_map:
        mesh = sequence_mesh.mesh
        if mesh is None:
            mesh = jax.sharding.get_abstract_mesh()
        other_axes, parts_of_device = find_on_mesh(other_axes, axes, mesh, operands)
    plan, sizes = make_plan(arguments, axes, sequence_mesh, parts_of_device, problem, operands)
    whole = WholeCall(sizes.T, sizes.S, shape.N * parts.heads, stride_in(plan, sizes))
    problem, operands = locate(whole, problem, operands)
    if sequence_mesh.in_shard_map:
        check_sharded(other_axes, operands.query)
        operands = count_in_whole_call(other_axes, operands)
    return ShardedCall(shape, problem, operands, sequence_mesh, plan, sizes, other_axes)


def _run_sharded(arguments: Arguments, axes: tuple[str, ...]) -> Array | tuple[Array, Array]:
    """Return out, and lse with `return_residual`, of a sequence that is sharded over `axes`."""
    shape, problem, operands, sequence_mesh, plan, _, other_axes = prepare_sharded(arguments, axes)
    want_lse = bool(arguments.return_residual)
    if sequence_mesh.in_shard_map:
        check_tokens_sharded(axes, operands)
        out, lse = attend_here(plan, problem, want_lse, operands)
    else:
        static = plan, other_axes, sequence_mesh.mesh, problem, want_lse
        out, lse = sharding.on_mesh_of_operands(enter_shard_map, static, operands)
    return to_public(shape, out, lse, arguments.query)


def _without_idle_axes(arguments: Arguments) -> Arguments:
    """Return the arguments with types that name no mesh axes of one device."""
    return Arguments(*map(sharding.without_idle_axes, arguments))


def prepare(
    arguments: Arguments,
    run: Callable[..., Any],
    chosen: Chosen | None = None,
    *,
    warn: bool = True,
    stored: tuple[Any, Any] | None = None,
) -> Call:
    """Check each argument, choose an implementation unless one is `chosen`, and return the call.

    `run(arguments, chosen)` is the function that runs the call. Near a memory limit it is compiled,
    because XLA then reports its bytes. With `warn`, warn once where kernels would be faster but do
    not support the call. Key and value of `arguments` stand for the `StoredKeys` in `stored`.
    """
    check_layout_name(arguments.sequence_layout)
    if arguments.sequence_layout != "contiguous" or arguments.context_parallel is not None:
        raise ValueError(
            "sequence_layout and context_parallel are for a sequence that is sharded over devices: "
            "pass sequence_axis, the name of its mesh axis."
        )
    other_axes = batch_and_heads_of(arguments)
    parts = check_inside(other_axes)
    shape, problem, operands = normalise(_without_idle_axes(arguments), parts)
    if other_axes != BatchAndHeads():
        check_sharded(other_axes, operands.query)
        whole = WholeCall(shape.T, shape.S, shape.N * parts.heads)
        problem, operands = locate(whole, problem, operands)
        operands = count_in_whole_call(other_axes, operands)
    if stored is not None:
        operands = operands._replace(key=stored[0], value=stored[1])
    if chosen is None:
        chosen = dispatch.choose_implementation(
            problem,
            operands,
            request_of(arguments),
            functools.partial(compiling.temp_bytes, run, arguments),
            warn=warn,
        )
    return Call(shape, problem, operands, chosen)


def request_of(arguments: Arguments) -> Request:
    """Check how the caller wants the call to run."""
    limit = parse_bytes("memory_limit", arguments.memory_limit)
    return Request(
        validate_options.check_implementation(arguments.implementation),
        validate_options.check_backward(arguments.backward),
        validate_options.check_chunk_size(arguments.chunk_size),
        limit or tile_sizes.memory_limit_of_program.value,
    )


def normalise(arguments: Arguments, parts: Parts = WHOLE) -> tuple[CallShape, Problem, Operands]:
    """Check each argument.

    Return the sizes, the static choices, and the arrays with the leading dims as one B. The arrays
    hold one of `parts` of the whole call.
    """
    a = arguments
    check_bool("return_residual", a.return_residual)
    query, key, value = validate.check_arrays(a.query, a.key, a.value)
    is_sharded = parts.sequence is not None
    sharding.check_layout(query, key, value, sequence=is_sharded)
    shape = CallShape.of(query, key, value)
    count = parts.sequence or 1
    pairs = shape._replace(S=count * shape.S)  # a bias or a mask has all columns
    whole = pairs._replace(
        leads=(parts.batch, *shape.leads), T=count * shape.T, N=parts.heads * shape.N
    )
    validate.check_whole_lengths(whole.T, whole.S)
    float_dtype = sum_dtype(query.dtype)
    logit_params, (scale, soft_cap) = validate.check_logit_params(
        pairs, a.bias, a.scale, a.logits_soft_cap, float_dtype
    )
    q_offset, static_q_offset = validate.check_offset(shape, a.q_offset)
    left, right = validate.check_window(a.local_window_size, a.is_causal)
    q_segments, kv_segments = validate.check_segments(
        shape, a.query_segment_ids, a.key_value_segment_ids
    )
    q_lengths = validate.check_lengths(
        shape, "query_seq_lengths", a.query_seq_lengths, "T", whole.T
    )
    score_fn, score_floats, score_nonfloat_params = validate_options.check_function(
        whole, "score_fn", a.score_fn, a.score_params, float_dtype
    )
    blocks, mask_fn = validate_options.check_blocks(whole, a.mask_fn, a.q_offset)
    mask_fn, *mask_params = validate_options.check_function(
        whole, "mask_fn", mask_fn, a.mask_params, float_dtype
    )
    mask_positions = check_query_positions(
        (a.mask_fn, a.mask_params), a.q_offset, whole.T, a.query_seq_lengths, right
    )
    transform, transform_floats, transform_nonfloat_params = validate_options.check_transform(
        whole, a.qk_transform, a.qk_transform_params, query
    )
    sinks = validate.check_sinks(shape, a.sinks, float_dtype)
    dropout, dropout_key = validate_options.check_dropout(
        a.dropout_rng, a.dropout_rate, a.broadcast_dropout, a.dropout_bits
    )
    problem = Problem(
        left=left,
        right=right,
        q_offset=static_q_offset,
        scale=scale,
        soft_cap=soft_cap,
        dropout=dropout,
        precision=validate_options.check_precision(a.precision),
        score_fn=score_fn,
        mask_fn=mask_fn,
        mask_positions=mask_positions,
        blocks=None if is_sharded else blocks,  # a shard's tiles lie elsewhere
        qk_transform=transform,
    )
    operands = Operands(
        *(sharding.fold_leads(shape, x) for x in (query, key, value)),
        logit_params=logit_params._replace(
            score=score_floats, transform=transform_floats, sinks=sinks
        ),
        mask=validate.check_mask(pairs, a.mask),
        q_lengths=q_lengths,
        kv_lengths=validate.check_lengths(
            shape, "key_value_seq_lengths", a.key_value_seq_lengths, "S", whole.S
        ),
        q_offset=q_offset,
        q_segments=q_segments,
        kv_segments=kv_segments,
        dropout_key=dropout_key,
        score_nonfloat_params=score_nonfloat_params,
        mask_params=tuple(lax.stop_gradient(x) for kind in mask_params for x in kind),
        transform_nonfloat_params=transform_nonfloat_params,
    )
    if dropout is not None:
        check_sizes_known(operands, "Dropout")
    return shape, problem, operands


def to_public(
    shape: CallShape, out: Array, lse: Array | None, query: Any
) -> Array | tuple[Array, Array]:
    """Return out [B, K, G, T, D] as [*B, T, N, D], and with it lse, as rows, unless it is None.

    They have the axes of an Explicit mesh that the type of the caller's `query` names.
    """
    out = sharding.unfold(shape, out, query)
    return out if lse is None else (out, to_public_rows(shape, lse, query))


def to_public_rows(shape: CallShape, rows: Array, query: Any) -> Array:
    """Return rows [B, K, G, T], such as lse, as [*B, T, N], with -inf for rows without a key."""
    rows = sharding.unfold(shape, rows, query)
    return jnp.where(rows == LSE_OF_EMPTY_ROW, -jnp.inf, rows)
