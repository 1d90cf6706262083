"""Call the Ampere kernels."""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from memeff.device import current_device
from memeff.logits import LOG2_E
from memeff.pallas.ampere import forward as forward_kernel
from memeff.pallas.ampere.backward import (
    ROWS,
    Arrays,
    GradientCall,
    Tiling,
    fused_gradients,
    key_value_gradient,
    query_gradient,
)
from memeff.pallas.ampere.backward_bias import bias_gradient
from memeff.pallas.hopper.backward_common import (
    Gradient,
    count_term_gradients,
    float16_lift,
    undo_lift,
)
from memeff.pallas.hopper.bias import (
    gradient_dims,
    is_of_pairs,
    merge_bias_gradient,
    unpad_bias_gradient,
)
from memeff.pallas.hopper.bias_work import SharedBias
from memeff.pallas.hopper.layout import (
    DIMS,
    dims_of,
    fold_heads,
    head_dim_to_read,
    pad_rows,
    pad_scalars,
    pad_tokens,
    padded_width,
    replace_mask,
    scalars_of,
    split_query,
    unfold_heads,
)
from memeff.pallas.hopper.persistent import IfBad
from memeff.pallas.partitioning import partitioned
from memeff.pallas.user_functions import calls
from memeff.pallas.user_functions.extra_gradients import extra_cotangents
from memeff.pallas.user_functions.term_gradients import gradients_of_terms
from memeff.problem import Gradients, LogitParams, Operands, Problem, Schedule
from memeff.softmax import Lse, LseFor, row_dots

# KiB of shared memory of a multiprocessor, by compute capability. The others, such as 8.6, 8.9 and
# 12.0, have 100.
SHARED_KIB = {"8.0": 164, "8.7": 164, "9.0": 228, "10.0": 228, "10.3": 228, "11.0": 228}
LEAST_SHARED_KIB = 100
OTHER_KIB = 4  # of a thread block, beside its tiles


def forward_tiling(operands: Operands) -> forward_kernel.Tiling:
    """Return the tiling of the forward."""
    tiling = tiling_for(padded_width(operands), bias_itemsize(operands))
    return tiling._replace(rows=ROWS) if has_few_blocks(operands) else tiling


def backward_tiling(operands: Operands) -> Tiling:
    """Return the tiling of the gradient."""
    tiling = gradient_tiling(padded_width(operands), bias_itemsize(operands))
    # cotangents of these are summed in the loop, and 128 queries leave no registers for that
    summed = jax.tree.leaves((operands.logit_params.soft_cap, operands.logit_params.score))
    return tiling._replace(query_rows=ROWS) if summed or has_few_blocks(operands) else tiling


def has_few_blocks(operands: Operands) -> bool:
    """Return whether a multiprocessor gets at most one thread block with 128 queries.

    Blocks of 64 queries then finish earlier (docs/kernels-log.md). The answer is no where the
    device has no multiprocessors.
    """
    B, T, N = operands.query.shape[:3]
    blocks = B * N * pl.cdiv(T, 2 * ROWS)
    return blocks <= (getattr(jax.devices()[0], "core_count", None) or 0)


def tiling_for(width: int, itemsize: int = 0) -> forward_kernel.Tiling:
    """Return the tiling of the forward for a padded head dim, by what was timed on an H100.

    `itemsize` is that of a bias of pairs. Tiles have 128 queries if two thread blocks of such tiles
    fit into a multiprocessor.
    """
    keys = ROWS
    rows = 2 * ROWS
    kib = (2 * width * (rows + 2 * keys) + itemsize * rows * keys) // 1024
    return forward_kernel.Tiling(rows if _two_blocks_fit(kib) else ROWS, keys)


def gradient_tiling(width: int, itemsize: int = 0) -> Tiling:
    """Return the tiling of the gradient for a padded head dim, by what was timed on an H100.

    There are two visited tiles if a multiprocessor then still has room for two thread blocks.
    `itemsize` is that of a bias of pairs.
    """

    def kib(stages: int, query_rows: int) -> int:
        numbers = 2 * 2 * width * (query_rows + stages * ROWS)
        return (numbers + itemsize * stages * query_rows * ROWS) // 1024

    if width <= 64 and _shared_kib() > LEAST_SHARED_KIB and _two_blocks_fit(kib(2, 2 * ROWS)):
        return Tiling(2, 2 * ROWS)
    return Tiling(2 if _two_blocks_fit(kib(2, ROWS)) else 1, ROWS)


def bias_gradient_stages(width: int, itemsize: int) -> int:
    """Return how many visited tiles the kernel for the gradient of the bias has in shared memory.

    `itemsize` is that of a bias of pairs.
    """

    def kib(stages: int) -> int:
        return (4 * 2 * width * stages * ROWS + itemsize * ROWS * ROWS) // 1024

    return 2 if _two_blocks_fit(kib(2)) else 1


def bias_itemsize(operands: Operands) -> int:
    """Return the bytes of a number of the bias of pairs that the kernels read; 0 without one."""
    read = jax.eval_shape(replace_mask, operands)
    bias = read.logit_params.bias
    return bias.dtype.itemsize if bias is not None and is_of_pairs(bias) else 0


def _two_blocks_fit(kib: int) -> bool:
    """Return whether two thread blocks whose tiles take `kib` KiB fit into a multiprocessor."""
    return 2 * (kib + OTHER_KIB) <= _shared_kib()


def _shared_kib() -> int:
    """Return the KiB of shared memory of a multiprocessor of the device."""
    return SHARED_KIB.get(current_device().capability or "", LEAST_SHARED_KIB)


def describe(schedule: Schedule, operands: Operands) -> str:
    """Return a phrase that names the kernels and their tiles."""
    rows, keys = forward_tiling(operands)
    capability = current_device().capability
    form = ", the gradient fused into one" if schedule.fused_backward else ""
    known = "" if capability == "9.0" else ", compiled for, never timed on this GPU"
    return f"Ampere kernels, tiles of {rows} x {keys} logits{form}{known}"


def forward(
    problem: Problem, operands: Operands, lse_for: LseFor = "caller", partial_out: bool = False
) -> tuple[Array | tuple[Array, ...], Lse | None]:
    """Return out [B, K, G, T, D], if partial as two arrays to add, and lse [B, K, G, T]."""
    operands = replace_mask(operands)
    scalars = scalars_of(problem, operands)
    leaves, structure = jax.tree.flatten(scalars)
    on_tiles = calls.tile_functions(problem, operands)
    want_lse = lse_for is not None
    tiling = forward_tiling(operands)
    out_count = 2 if partial_out else 1

    def call(query, key, value, *leaves):
        B, T, K, G, _ = query.shape
        arrays = lax.collapse(query, 2, 4), key, value
        width = padded_width(operands)
        arrays = tuple(pad_tokens(x, head_dim_to_read(x.shape[-1], width)) for x in arrays)
        lengths = T, key.shape[1]
        padded_scalars = pad_scalars(jax.tree.unflatten(structure, leaves))
        outs, lse = forward_kernel.attend(
            on_tiles, lengths, arrays, padded_scalars, want_lse, tiling, out_count
        )
        outs = tuple(unfold_heads(out, (B, T, K, G), value.shape[-1]) for out in outs)
        return outs if lse is None else (*outs, lse[..., :T].reshape(B, K, G, T))

    dims_out = ("bkgtd",) * out_count + (("bkgt",) if want_lse else ())
    run = partitioned(call, (*DIMS, *dims_of(scalars)), dims_out)
    results = run(*split_query(operands, operands.shape.K), *leaves)
    outs = tuple(results[:out_count])
    return outs if partial_out else outs[0], Lse(results[-1], None) if want_lse else None


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

    `dlse` is None if lse has no cotangent.
    """
    original = operands
    bias = operands.logit_params.bias
    bias_dims = None if bias is None else gradient_dims(bias, operands.shape)
    operands = replace_mask(operands)
    scalars = scalars_of(problem, operands)
    leaves, structure = jax.tree.flatten(scalars)
    query_functions = calls.tile_functions(problem, operands, "all")
    on_tiles = calls.tile_functions(problem, operands, "score")
    delta = -row_dots(out, dout, jnp.float32)
    if dlse is not None:
        delta = delta + dlse
    lse_bits = lse.high * LOG2_E - float16_lift(operands.query.dtype)
    width = padded_width(operands)
    tiling = backward_tiling(operands)

    def call(query, key, value, dout, lse, delta, *leaves):
        _, T, K, G, H = query.shape
        B, S, _, D = value.shape

        def pad(x: Array) -> Array:
            return pad_tokens(x, head_dim_to_read(x.shape[-1], width))

        query = lax.collapse(query, 2, 4)
        rows = pad_rows(lse), pad_rows(delta)
        inputs = Arrays(pad(query), pad(key), pad(value), pad(fold_heads(dout)), *rows)
        padded_scalars = pad_scalars(jax.tree.unflatten(structure, leaves))
        gradient = GradientCall(on_tiles, (T, S), inputs, padded_scalars, tiling)
        if schedule.fused_backward:
            (dq, dk, dv), sums = _fused_gradient(gradient._replace(problem=problem)), []
        else:
            dq, *sums = query_gradient(gradient._replace(problem=query_functions))
            dk, dv = key_value_gradient(gradient)
        dq = dq[:, :T, :, :H].reshape(B, T, K, G, H)
        gradients = dq, dk[:, :S, :, :H], dv[:, :S, :, :D]
        gradients += tuple(x[..., :T].reshape(B, K, G, T) for x in sums)
        if bias is None or bias_dims is None:
            return gradients
        shared = SharedBias.of(bias, operands.shape)
        stages = bias_gradient_stages(width, bias_itemsize(operands))
        # this kernel takes no derivative of `score_fn`
        values_only = calls.tile_functions(problem, operands)
        dbias = bias_gradient(values_only, (T, S), inputs, padded_scalars, shared, stages)
        return *gradients, unpad_bias_gradient(dbias, bias_dims, (T, K, G, S))

    dims_in = *DIMS, "bkgtd", "bkgt", "bkgt", *dims_of(scalars)
    sum_count = count_term_gradients(query_functions, scalars)
    dims_out = *DIMS, *["bkgt"] * sum_count, *([bias_dims] if bias_dims else [])
    run = partitioned(call, dims_in, dims_out)
    arrays = split_query(operands, operands.shape.K)
    dq, dk, dv, *more = run(*arrays, dout, lse_bits, delta, *leaves)
    extra_pass = functools.partial(
        extra_cotangents, problem, schedule, original, out, lse, dout, dlse
    )
    terms = gradients_of_terms(problem, operands, query_functions, more[:sum_count], extra_pass)
    if bias is not None:
        terms = terms._replace(bias=merge_bias_gradient(more[-1], bias, operands.shape))
    return Gradients(lax.collapse(dq, 2, 4), dk, dv, terms)


def _fused_gradient(call: GradientCall) -> tuple[Array, ...]:
    """Return padded dq, dk and dv of one kernel, or of two if a number is not finite."""
    dtype = call.arrays.query.dtype
    dq, dk, dv = fused_gradients(call)
    dq = undo_lift(dq * Gradient(call.problem, LogitParams()).slope, dtype).astype(dtype)
    is_finite = jnp.stack([jnp.isfinite(x).all() for x in (dq, dk, dv)]).all()
    is_bad = (~is_finite).astype(jnp.int32)[None]
    (dq,) = query_gradient(call, IfBad(is_bad, (dq,)))
    return dq, *key_value_gradient(call, IfBad(is_bad, (dk, dv)))
