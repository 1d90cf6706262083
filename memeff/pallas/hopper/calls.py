"""Call the Hopper kernels (H100, H200), which are written in Pallas with its Mosaic GPU backend.

decode_calls.py calls the kernel for few queries.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.logits import LOG2_E
from memeff.pallas.hopper import backward_bias, backward_common, backward_key, backward_query
from memeff.pallas.hopper.backward_bias import bias_gradient
from memeff.pallas.hopper.bias import (
    gradient_dims,
    has_pair_bias,
    merge_bias_gradient,
    unpad_bias_gradient,
)
from memeff.pallas.hopper.bias_work import SharedBias
from memeff.pallas.hopper.capability import backward_is_kernel, has_wide_heads
from memeff.pallas.hopper.forward import Tiling, attend
from memeff.pallas.hopper.forward_memory import Carried
from memeff.pallas.hopper.fused import fused_gradients, row_deltas
from memeff.pallas.hopper.layout import (
    DIMS,
    ROWS_MULTIPLE,
    dims_of,
    fold_heads,
    pad_operand,
    pad_rows,
    pad_scalars,
    pad_tokens,
    padded_width,
    replace_mask,
    scalars_of,
    split_query,
    unfold_heads,
    value_width,
)
from memeff.pallas.hopper.parts import count_parts, merge_array
from memeff.pallas.hopper.persistent import IfBad
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.tangent import tangents
from memeff.pallas.hopper.tangent_compute import TangentArrays
from memeff.pallas.hopper.tile_ranges import tiles_visited
from memeff.pallas.partitioning import partitioned
from memeff.pallas.user_functions import calls, extra_gradients
from memeff.pallas.user_functions.term_gradients import gradients_of_terms
from memeff.problem import Gradients, LogitParams, Operands, Problem, Schedule
from memeff.softmax import Lse, LseFor

TWO_WARPGROUPS_SPEED = 0.8  # logits a second of two computing warpgroups, relative to three


def describe(problem: Problem, schedule: Schedule, operands: Operands) -> str:
    """Return a phrase that names the kernels and their tiles."""
    tiling = forward_tiling(problem, operands)
    form = ", the gradient fused into one" if schedule.fused_backward else ""
    if not backward_is_kernel(operands):
        form = ", the gradient on the chunked path"
    return f"Hopper kernels, tiles of {tiling.rows} x {tiling.keys} logits{form}"


# ---- tilings


def forward_tiling(problem: Problem, operands: Operands) -> Tiling:
    """Return the fastest tiling of the forward that docs/kernels-log.md has for this head dim."""
    operands = jax.eval_shape(replace_mask, operands)  # `describe` gets the mask as it came
    width = padded_width(operands)
    if has_pair_bias(operands):
        return _forward_tiling_with_bias(width, operands)
    if count_parts(operands.query.dtype) == 2:
        return Tiling(2, 128 if width == 64 else 64, 2, 2 if width == 64 else 1, parts=2)
    if width > 128:
        return Tiling(2, 64, 2, 1)
    if width > 64:
        # Each of these takes registers that dropout lacks with 128 keys.
        more = problem.has_window, problem.has_pair_functions, problem.soft_cap is not None
        is_short = problem.dropout is not None and any(more)
        return Tiling(2, 64, 4, 2) if is_short else Tiling(2, 128, 2, 2)
    two = Tiling(2, 128, 3, 2)
    # Three warpgroups have 160 registers a thread, and would spill.
    if takes_registers(problem, operands):
        return two
    three = Tiling(3, 128, 3, 2)
    lengths = operands.query.shape[1], operands.key.shape[1]

    def logits(tiling: Tiling) -> int:
        return tiles_visited(problem, lengths, tiling.rows, tiling.keys).sum() * tiling.rows

    return two if logits(two) < TWO_WARPGROUPS_SPEED * logits(three) else three


def takes_registers(problem: Problem, operands: Operands) -> bool:
    """Return True if functions, a bias or dropout take registers that three warpgroups lack."""
    has_bias = operands.logit_params.bias is not None
    return problem.has_pair_functions or has_bias or problem.dropout is not None


def _forward_tiling_with_bias(width: int, operands: Operands) -> Tiling:
    """Return the tiling of the forward that leaves shared memory for tiles of a bias of pairs."""
    bias: Any = operands.logit_params.bias
    is_float32 = bias.dtype.itemsize == 4
    if width == 64:
        return Tiling(2, 64, 3, 2) if is_float32 else Tiling(2, 128, 2, 2)
    if width == 128:
        return Tiling(2, 64, 2, 2) if is_float32 else Tiling(2, 64, 3, 2)
    return Tiling(1, 64, 2, 1)


def backward_tilings(problem: Problem, operands: Operands) -> tuple[backward_common.Tiling, ...]:
    """Return the tilings of the kernel for dq, and of that for dk and dv or those for each."""
    if has_pair_bias(operands):
        return _backward_tilings_with_bias(operands)
    if count_parts(operands.query.dtype) == 2:
        return _backward_tilings_in_parts(problem, operands)
    if padded_width(operands) == 64:
        warpgroups = 2 if takes_registers(problem, operands) else 3
        tiling = backward_common.Tiling(warpgroups, 64, 4, 2)
        return tiling, tiling
    # Token vectors take shared memory. A soft cap, functions and a scale's gradient take registers.
    has_vectors = _has_vectors(problem, operands)
    if has_wide_heads(operands):
        return _backward_tilings_of_wide_heads(padded_width(operands), has_vectors)
    has_scale = operands.logit_params.scale is not None
    if has_vectors or has_scale or problem.soft_cap is not None:
        query_tiling = backward_common.Tiling(2, 64, 3, 1)
    else:
        query_tiling = backward_common.Tiling(2, 128, 2, 1)
    return query_tiling, backward_common.Tiling(2, 64, 3, 1 if has_vectors else 2)


def _backward_tilings_of_wide_heads(
    width: int, has_vectors: bool
) -> tuple[backward_common.Tiling, ...]:
    """Return the tilings of the kernels for dq, dk and dv, for each of which registers are left."""
    two = backward_common.Tiling(2, 64, 2, 1)
    if width <= 192:
        return two, two, two
    one = two._replace(stages=1 if has_vectors else 2, second_stages=1)
    return one, one, two


def _backward_tilings_in_parts(
    problem: Problem, operands: Operands
) -> tuple[backward_common.Tiling, backward_common.Tiling]:
    """Return the tilings of float32, which leave shared memory for two parts.

    They were timed on an H100, and no others beside them.
    """
    Tiling = functools.partial(backward_common.Tiling, parts=2)
    if padded_width(operands) == 64:
        return Tiling(2, 64, 3, 1), Tiling(2, 64, 4, 1)
    return Tiling(1, 64, 1 if _has_vectors(problem, operands) else 2, 1), Tiling(2, 64, 1, 1)


def _has_vectors(problem: Problem, operands: Operands) -> bool:
    """Return True if vectors of tokens take shared memory."""
    has_vectors = operands.q_segments is not None or problem.has_pair_functions
    return has_vectors or problem.dropout is not None


def _backward_tilings_with_bias(
    operands: Operands,
) -> tuple[backward_common.Tiling, backward_common.Tiling]:
    """Return the tilings that leave shared memory for tiles of a bias of pairs."""
    bias: Any = operands.logit_params.bias
    is_float32 = bias.dtype.itemsize == 4
    if padded_width(operands) == 64:
        stages = 2 if is_float32 else 3
        return backward_common.Tiling(2, 64, stages, 2), backward_common.Tiling(2, 64, 3, 2)
    if is_float32:
        return backward_common.Tiling(1, 64, 2, 1), backward_common.Tiling(2, 64, 2, 1)
    return backward_common.Tiling(2, 64, 2, 1), backward_common.Tiling(2, 64, 3, 1)


def bias_gradient_tiling(problem: Problem, operands: Operands) -> backward_bias.Tiling:
    """Return the tiling of the kernel for the gradient of the bias."""
    bias: Any = operands.logit_params.bias
    is_float32 = bias.dtype.itemsize == 4
    if bias.shape[2] == 1 and bias.shape[3] > 1:  # of keys: one warpgroup sums over rows
        return backward_bias.Tiling(1, 64, 2, 1)
    if padded_width(operands) == 64:
        arrays = operands.q_offset, operands.q_lengths, operands.kv_lengths, operands.q_segments
        hides = problem.has_window or problem.has_pair_functions or operands.shape.S % 128 != 0
        is_short = is_float32 or hides or problem.dropout is not None
        is_short = is_short or any(x is not None for x in arrays)  # these take registers
        return backward_bias.Tiling(2, 64 if is_short else 128, 2, 2)
    return backward_bias.Tiling(1, 64, 2, 2) if is_float32 else backward_bias.Tiling(2, 64, 2, 1)


def fused_tiling(operands: Operands) -> backward_common.Tiling:
    """Return the tiling of the gradient in one kernel."""
    tile_size = 128 if padded_width(operands) == 64 else 64
    return backward_common.Tiling(2, tile_size, 2, 1)


def tangent_tiling(problem: Problem, operands: Operands) -> backward_common.Tiling:
    """Return the tiling of the kernel for tangents."""
    if padded_width(operands) > 64:
        return backward_common.Tiling(2, 64, 2, 1)
    if problem.has_pair_functions:
        return backward_common.Tiling(2, 64, 4, 2)
    return backward_common.Tiling(3, 64, 3, 2)


# ---- calls


def forward(
    problem: Problem,
    operands: Operands,
    lse_for: LseFor = "caller",
    partial_out: bool = False,
    carried: tuple[tuple[Array, ...], Array] | None = None,
) -> tuple[Array | tuple[Array, ...], Lse | None]:
    """Return out [B, K, G, T, D], if partial perhaps as two arrays to add, and lse [B, K, G, T].

    With `carried`, partial out and lse of other keys, both are those of all keys.
    """
    operands = replace_mask(operands)
    scalars = scalars_of(problem, operands)
    leaves, structure = jax.tree.flatten(scalars)
    on_tiles = calls.tile_functions(problem, operands)
    is_rounded = count_parts(operands.query.dtype) == 1
    out_count = 2 if partial_out and is_rounded else 1

    def call(query, key, value, *more):
        _, T, K, G, _ = query.shape
        arrays = lax.collapse(query, 2, 4), key, value
        leaves = more[: structure.num_leaves]
        arrays = _pad_arrays(operands, *arrays)
        padded_scalars = pad_scalars(jax.tree.unflatten(structure, leaves))
        B = padded_scalars.batch_size(query)
        tiling = forward_tiling(problem, operands)._replace(out_in_parts=out_count == 2)
        lengths = T, key.shape[1]
        before = None
        if carried is not None:
            *parts, rows = more[structure.num_leaves :]
            rows = lax.collapse(rows, 1, 3)  # b n t
            rows = jnp.pad(rows, [(0, 0), (0, 0), (0, -T % tiling.rows)])
            parts = (pad_operand(fold_heads(x), value_width(operands)) for x in parts)
            before = Carried(tuple(parts), rows)
        want_lse = lse_for is not None
        outs, lse = attend(on_tiles, lengths, arrays, padded_scalars, want_lse, tiling, before)
        outs = (merge_array(out, value.dtype) for out in outs)
        outs = tuple(unfold_heads(out, (B, T, K, G), value.shape[-1]) for out in outs)
        if lse is None:
            return outs
        return *outs, lse[..., :T].reshape(B, K, G, T)

    dims_out = ("bkgtd",) * out_count + (("bkgt",) if lse_for else ())
    dims_in = (*DIMS, *dims_of(scalars))
    if carried is not None:
        dims_in += (*["bkgtd"] * len(carried[0]), "bkgt")
    run = partitioned(call, dims_in, dims_out)
    results = run(*split_query(operands, operands.shape.K), *leaves, *jax.tree.leaves(carried))
    outs = tuple(results[:out_count])
    return outs if partial_out else outs[0], Lse(results[-1], None) if lse_for else None


def _pad_arrays(
    operands: Operands, query, key, *of_values, in_place: bool = True
) -> tuple[Array, ...]:
    """Pad query, key, and arrays of the head dim of values, as kernels read them.

    `in_place`: kernels may read heads below 64 without padding.
    """
    pad = pad_operand if in_place else pad_tokens
    width = padded_width(operands)
    padded_values = (pad(x, value_width(operands)) for x in of_values)
    return pad(query, width), pad(key, width), *padded_values


class _GradientInputs(NamedTuple):
    """The arrays that the kernels of the gradient read, padded."""

    query: Array  # B T' N H'
    key: Array  # B S' K H'
    value: Array  # B S' K D'
    out: Array  # B T' N D'
    dout: Array  # B T' N D'
    lse: Array  # B N T', in base 2 and minus float16's lift
    dlse: Array | None = None  # B N T'


def backward(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    out: Array,
    lse: Lse,
    dout: Array,
    dlse: Array | None,
) -> Gradients:
    """Return gradients from `out`, `dout` [B, K, G, T, D] and `lse`, `dlse` [B, K, G, T].

    `dlse` is None if lse has no cotangent. With `operands.entries` these four have the batch
    entries of the query, and the gradients those of the call.
    """
    original = operands
    bias = operands.logit_params.bias
    bias_dims = None if bias is None else gradient_dims(bias, operands.shape)
    operands = replace_mask(operands)
    scalars = scalars_of(problem, operands)
    leaves, structure = jax.tree.flatten(scalars)
    query_functions = calls.tile_functions(problem, operands, "all")
    key_functions = calls.tile_functions(problem, operands, "score")
    tilings = backward_tilings(problem, operands)
    joined = schedule.joined_gradients and not schedule.fused_backward and len(tilings) == 2
    lift = backward_common.float16_lift(operands.query.dtype)
    rows = [lse.high * LOG2_E - lift]
    if dlse is not None:
        rows.append(dlse)

    def call(query, key, value, out, dout, *more):
        _, T, K, G, H = query.shape
        _, S, _, D = value.shape
        padded_scalars = pad_scalars(jax.tree.unflatten(structure, more[len(rows) :]))
        B = padded_scalars.batch_size(query)
        padded_rows = [pad_rows(x) for x in more[: len(rows)]]
        arrays = lax.collapse(query, 2, 4), key, value, fold_heads(out), fold_heads(dout)
        arrays = _pad_arrays(operands, *arrays, in_place=not schedule.fused_backward)
        inputs = _GradientInputs(*arrays, *padded_rows)
        split = functools.partial(
            _split_gradient,
            query_functions,
            key_functions,
            (T, S),
            inputs,
            padded_scalars,
            tilings,
            schedule.keys_first,
            joined,
        )
        bias_sums = []
        if schedule.fused_backward:
            tiling = fused_tiling(operands)
            dq, *key_gradients = _fused_gradient(
                problem, (T, S), inputs, padded_scalars, tiling, split
            )
            sums = []
        else:
            dq, delta, key_gradients, *sums = split()
            if bias_dims is not None:
                dbias = _bias_gradient(problem, operands, (T, S), inputs, delta, padded_scalars)
                bias_sums.append(unpad_bias_gradient(dbias, bias_dims, (T, K, G, S)))
        dq = merge_array(dq, query.dtype)[:, :T, :, :H].reshape(B, T, K, G, H)
        key_gradients = [x[:, :S] for x in key_gradients]
        key_gradients = [x[..., :width] for x, width in zip(key_gradients, (H, D), strict=False)]
        return dq, *key_gradients, *[x[..., :T].reshape(B, K, G, T) for x in sums], *bias_sums

    dims_in = *DIMS, "bkgtd", "bkgtd", *["bkgt"] * len(rows), *dims_of(scalars)
    sum_count = backward_common.count_term_gradients(query_functions, scalars)
    key_dims = ("bsnh",) if joined else DIMS[1:]
    term_dims = *["bkgt"] * sum_count, *([bias_dims] if bias_dims else [])
    run = partitioned(call, dims_in, (DIMS[0], *key_dims, *term_dims))
    dq, *more = run(*split_query(operands, operands.shape.K), out, dout, *rows, *leaves)
    key_gradients = more[: len(key_dims)]
    more = more[len(key_dims) :]
    sums = more[:sum_count]
    extra_pass = functools.partial(
        extra_gradients.extra_cotangents, problem, schedule, original, out, lse, dout, dlse
    )
    terms = gradients_of_terms(problem, operands, query_functions, sums, extra_pass)
    if bias is not None:
        terms = terms._replace(bias=merge_bias_gradient(more[-1], bias, operands.shape))
    dv = None if joined else key_gradients[1]
    return Gradients(lax.collapse(dq, 2, 4), key_gradients[0], dv, terms)


def _split_gradient(
    query_functions: Problem,
    key_functions: Problem,
    lengths: tuple[int, int],
    inputs: _GradientInputs,
    scalars: Scalars,
    tilings: tuple[backward_common.Tiling, ...],
    keys_first: bool,
    joined: bool,
    if_bad: tuple[IfBad | None, IfBad | None] = (None, None),
) -> tuple[Any, ...]:
    """Return padded dq, delta and [dk, dv] of two kernels, of which that of the keys may run first.

    dk and dv may be one array, `joined`. Sums over keys of cotangents of numbers follow. With three
    tilings, each gradient has a kernel. `if_bad` has one for dq and one for dk and dv.
    """
    query, key, value, out, dout, lse, dlse = inputs
    query_tiling, *key_tilings = tilings
    has_three = len(key_tilings) == 2

    def of_query(query, delta) -> tuple[Array, ...]:
        """Return dq, delta and sums. If each gradient has a kernel, `delta` is known."""
        arrays = query, key, value, None if has_three else out, dout, lse
        row_terms = delta if has_three else dlse
        dq, *more = backward_query.query_gradient(
            query_functions, lengths, arrays, row_terms, scalars, query_tiling, if_bad[0]
        )
        return (dq, delta, *more) if has_three else (dq, *more)

    def of_keys(delta) -> list[Array]:
        """Return [dk, dv], or [one array of both]."""
        arrays = query, key, value, dout, lse, delta
        call = key_functions, lengths, arrays, scalars
        if not has_three:
            return list(
                backward_key.key_value_gradient(
                    *call, key_tilings[0], joined=joined, if_bad=if_bad[1]
                )
            )
        (dk,) = backward_key.key_value_gradient(*call, key_tilings[0], "dk")
        (dv,) = backward_key.key_value_gradient(*call, key_tilings[1], "dv")
        return [dk, dv]

    delta = None
    if keys_first or has_three:
        delta = _row_deltas(lengths, inputs, scalars, query_tiling.parts)
    if keys_first:
        key_gradients = of_keys(delta)
        query, key_gradients = lax.optimization_barrier((query, key_gradients))
        dq, delta, *sums = of_query(query, delta)
    else:
        dq, delta, *sums = of_query(query, delta)
        key_gradients = of_keys(delta)
    return dq, delta, key_gradients, *sums


def _row_deltas(
    lengths: tuple[int, int], inputs: _GradientInputs, scalars: Scalars, parts: int
) -> Array:
    """Return delta [B, N, T'] of the batch entries of the call, from a kernel of its own."""
    delta = row_deltas(lengths, inputs.out, inputs.dout, inputs.dlse, parts)
    return delta if scalars.query_entries is None else delta[scalars.query_entries]


def _bias_gradient(
    problem: Problem,
    operands: Operands,
    lengths: tuple[int, int],
    inputs: _GradientInputs,
    delta: Array,
    scalars: Scalars,
) -> Array:
    """Return the padded gradient of the bias from `delta` of the kernel for dq."""
    bias: Any = operands.logit_params.bias
    shared = SharedBias.of(bias, operands.shape)
    arrays = *inputs[:3], inputs.dout, inputs.lse, delta
    on_tiles = calls.tile_functions(problem, operands)
    tiling = bias_gradient_tiling(problem, operands)
    return bias_gradient(on_tiles, lengths, arrays, scalars, shared, tiling)


def _fused_gradient(
    problem: Problem,
    lengths: tuple[int, int],
    inputs: _GradientInputs,
    scalars: Scalars,
    tiling: backward_common.Tiling,
    split: Callable[..., tuple[Any, ...]],
) -> tuple[Array, ...]:
    """Return padded dq, dk and dv of one kernel, or of `split` if a sum is not finite."""
    query, key, value, _, dout, lse, _ = inputs
    delta = _row_deltas(lengths, inputs, scalars, tiling.parts)
    dq, dk, dv, nan_if_bad = fused_gradients(
        problem, lengths, (query, key, value, dout, lse, delta), scalars, tiling
    )
    dq *= backward_common.Gradient(problem, LogitParams()).slope
    dq = backward_common.undo_lift(dq, query.dtype).astype(query.dtype)
    is_bad = jnp.isnan(nan_if_bad).any().astype(jnp.int32)[None]
    dq, _, (dk, dv) = split(if_bad=(IfBad(is_bad, (dq,)), IfBad(is_bad, (dk, dv))))
    return dq, dk, dv


def tangent(
    problem: Problem,
    operands: Operands,
    out: Array,
    lse: Lse,
    input_tangents: Operands,
) -> tuple[Array, Array]:
    """Return the tangents of out [B, K, G, T, D] and lse [B, K, G, T].

    `input_tangents` holds those of query, key and value; a tangent that is None is 0.
    """
    operands = replace_mask(operands)
    scalars = scalars_of(problem, operands)
    known_tangents = split_query(input_tangents, operands.shape.K)
    active = [dims for dims, x in zip(DIMS, known_tangents, strict=True) if x is not None]
    dims_in = *DIMS, "bkgtd", "bkgt", *active, *dims_of(scalars)
    leaves, structure = jax.tree.flatten((known_tangents, scalars))
    on_tiles = calls.tile_functions(problem, operands, "score")
    moves_logits = input_tangents.query is not None or input_tangents.key is not None
    # True with a sink, because lse then differs from that of these kernels' forward.
    shared = lse.low is not None

    def call(query, key, value, out, lse, *leaves):
        B, T, K, G, _ = query.shape
        (dq, dk, dv), scalars = jax.tree.unflatten(structure, leaves)
        lse = lax.collapse(lse, 1, 3)  # b n t
        out = fold_heads(out) if moves_logits else None
        query = lax.collapse(query, 2, 4)
        dq = None if dq is None else lax.collapse(dq, 2, 4)
        arrays = query, key, None, value if moves_logits else None, out, dq, dk, dv
        arrays = [None if x is None else pad_tokens(x, padded_width(operands)) for x in arrays]
        lse_padding = [(0, 0), (0, 0), (0, -T % ROWS_MULTIPLE)]
        inputs = TangentArrays(*arrays)._replace(lse=jnp.pad(lse, lse_padding))
        tiling = tangent_tiling(problem, operands)
        lengths = T, key.shape[1]
        dout, dlse = tangents(on_tiles, lengths, inputs, pad_scalars(scalars), tiling, shared)
        dout = unfold_heads(dout, (B, T, K, G), value.shape[-1])
        return dout, dlse[..., :T].reshape(B, K, G, T)

    run = partitioned(call, dims_in, ("bkgtd", "bkgt"))
    return run(*split_query(operands, operands.shape.K), out, lse.high * LOG2_E, *leaves)
