"""Turn the arguments of `dot_product_attention` into a checked call, and run it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from memeff import (
    compiling,
    dispatch,
    implementations,
    sharding,
    tile_sizes,
    validate,
    validate_options,
)
from memeff.attention_ad import attend
from memeff.problem import Operands, Problem, check_sizes_known
from memeff.shape import CallShape, fold, unfold
from memeff.softmax import SEES_NOTHING
from memeff.units import parse_bytes


def run_attention(given: Mapping[str, Any], chosen: implementations.Chosen | None = None):
    """What `dot_product_attention` returns, for its arguments by name; `chosen`: in these tiles."""
    call = prepare(given, run_attention, chosen)
    how = call.module, call.problem, bool(given["return_residual"])
    out, lse = sharding.on_their_mesh(attend, how, call.operands)
    out = unfold(call.shape, out)
    if lse is None:
        return out
    return out, to_public_rows(call, lse)


class Call(NamedTuple):
    """A call in our own words."""

    shape: CallShape
    problem: Problem
    operands: Operands
    module: ModuleType  # the implementation


def prepare(
    given: Mapping[str, Any], run: Callable[..., Any], chosen: implementations.Chosen | None = None
) -> Call:
    """From the arguments of `dot_product_attention`, by name, each of them checked.

    `run(given, chosen)` is what is done with them: where a memory limit is near, it is compiled, to ask XLA for its bytes.
    """
    a = SimpleNamespace(**given)
    validate_options.check_not_flaxes(deterministic=a.deterministic, dtype=a.dtype, module=a.module)
    query, key, value = validate.check_arrays(a.query, a.key, a.value)
    sharding.check_layout(query, key, value)
    shape = CallShape.of(query, key, value)
    terms, (scale, soft_cap) = validate.check_logit_params(
        shape, a.bias, a.scale, a.logits_soft_cap
    )
    offset, static_offset = validate.check_offset(shape, a.q_offset)
    left, right = validate.check_window(a.local_window_size, a.is_causal)
    q_segments, kv_segments = validate.check_segments(
        shape, a.query_segment_ids, a.key_value_segment_ids
    )
    accumulator = jnp.float64 if query.dtype == jnp.float64 else jnp.float32
    score_fn, score_floats, score_rest = validate_options.check_function(
        shape, "score_fn", a.score_fn, a.score_params, accumulator
    )
    blocks, mask_fn = validate_options.check_blocks(shape, a.mask_fn, a.q_offset)
    mask_fn, *mask_params = validate_options.check_function(
        shape, "mask_fn", mask_fn, a.mask_params, accumulator
    )
    transform, transform_floats, transform_rest = validate_options.check_transform(
        a.qk_transform, a.qk_transform_params, query
    )
    sinks = validate.check_sinks(shape, a.sinks, accumulator)
    dropout, dropout_key = validate_options.check_dropout(
        a.dropout_rng, a.dropout_rate, a.broadcast_dropout
    )
    problem = Problem(
        left=left,
        right=right,
        q_offset=static_offset,
        scale=scale,
        soft_cap=soft_cap,
        dropout=dropout,
        precision=validate_options.check_precision(a.precision),
        score_fn=score_fn,
        mask_fn=mask_fn,
        blocks=blocks,
        qk_transform=transform,
        backward=validate_options.check_backward(a.backward),
    )
    operands = Operands(
        *fold(shape, query, key, value),
        terms=terms._replace(score=score_floats, transform=transform_floats, sinks=sinks),
        mask=validate.check_mask(shape, a.mask),
        q_lengths=validate.check_lengths(
            shape, "query_seq_lengths", a.query_seq_lengths, "T", shape.T
        ),
        kv_lengths=validate.check_lengths(
            shape, "key_value_seq_lengths", a.key_value_seq_lengths, "S", shape.S
        ),
        q_offset=offset,
        q_segments=q_segments,
        kv_segments=kv_segments,
        dropout_key=dropout_key,
        score_rest=score_rest,
        mask_params=tuple(lax.stop_gradient(x) for kind in mask_params for x in kind),
        transform_rest=transform_rest,
    )
    if dropout is not None:
        check_sizes_known(operands, "Dropout")
    if chosen is not None:
        return Call(shape, chosen.problem, operands, chosen.module)
    limit = parse_bytes("memory_limit", a.memory_limit) or tile_sizes.memory_limit_of_program.value
    chunks = validate_options.check_chunk_size(a.chunk_size)
    compiled = functools.partial(compiling.temp_bytes, run, given)
    chosen = dispatch.choose_implementation(
        problem, operands, a.implementation, chunks, limit, compiled
    )
    return Call(shape, chosen.problem, operands, chosen.module)


def to_public_rows(call: Call, rows: Array) -> Array:
    """[*B, T, N] of lse or the like B K G T; -inf for rows that see no key."""
    rows = unfold(call.shape, rows)
    return jnp.where(rows == SEES_NOTHING, -jnp.inf, rows)
