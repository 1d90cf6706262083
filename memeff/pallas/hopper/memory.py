"""Estimate the temporary memory of the Hopper kernels."""

from typing import TYPE_CHECKING, Any

from memeff.pallas.hopper.capability import (
    backward_is_kernel,
    has_wide_heads,
    mask_becomes_bias,
    reads_bias,
    why_not_decode,
)
from memeff.pallas.user_functions import calls
from memeff.problem import Operands, Problem, Schedule
from memeff.shape import round_up

if TYPE_CHECKING:
    from memeff.pallas.hopper.scheduler import KeyBlocks


def temp_bytes(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    key_blocks: "KeyBlocks | None" = None,
) -> tuple[int, int]:
    """Return the bytes of a forward for inference, and those of forward and gradient in one call.

    They hold padded copies, in float32 always, because the kernels read parts of its numbers, out,
    and the numbers that user functions precompute for tokens. The gradient adds rows, sums of dq
    if fused, dk and dv of parts of groups, and the extra pass for params. `key_blocks` are those of
    another family.
    """
    (B,), T, S, N, K, H, D = operands.shape
    width = round_up(max(H, D), 64)
    value_width = round_up(D, 64) if has_wide_heads(operands) else width
    itemsize = operands.query.dtype.itemsize

    def copy(length: int, heads: int, dim: int, padded_dim: int = width) -> int:
        """Return the bytes of a padded copy, if padding is needed."""
        if itemsize == 4:
            return 4 * B * heads * round_up(length, 8) * padded_dim
        if padded_dim == 64 and dim % 8 == 0 and not schedule.fused_backward:
            padded_dim = dim  # read in place
        if length % 8 == 0 and dim == padded_dim:
            return 0
        return B * heads * round_up(length, 8) * padded_dim * itemsize

    inputs = copy(T, N, H), copy(S, K, H), copy(S, K, D, value_width)  # query, key, value
    copies = sum(inputs) + copy(T, N, D, value_width)  # and out
    forward = copies
    (query_vectors, key_vectors), differences, row_sums = calls.count_numbers(problem, operands)
    rows = round_up(T, 128)
    cols = round_up(S, 128)
    forward += 4 * B * query_vectors * rows
    forward += 4 * B * key_vectors * cols
    if problem.dropout is not None:
        forward += 4 * B * (2 * rows + cols + 2 * N)
    forward += 4 * B * N * differences * (rows + cols)

    forward += _bias_bytes(operands)

    gradient = 2 * forward
    if has_wide_heads(operands):
        # each gradient has a kernel of its own, and is cut before the next kernel runs
        gradient -= copies - max(inputs)
    rows_of_tiles = round_up(T, 192) if width == 64 else rows
    gradient += 4 * B * N * (rows + rows_of_tiles)  # lse and delta, in whole tiles
    gradient += 4 * B * N * row_sums * rows
    if schedule.fused_backward:
        gradient += 4 * B * N * round_up(T, 8) * width
    key_blocks = key_blocks or _key_blocks(problem, schedule, operands)
    parts = _parts_of_groups(problem, operands, key_blocks)
    if parts > 1:
        gradient += 4 * parts * B * K * round_up(S, 8) * (width + value_width)
    if calls.needs_extra_pass(problem, operands):
        gradient += extra_pass_bytes(schedule, operands)
    if why_not_decode(problem, operands) is None:
        vectors = 4 * B * (query_vectors * round_up(T * N // K, 128) + key_vectors * cols)
        forward = decode_bytes(operands) + vectors
        gradient += forward
    return forward, gradient


def _key_blocks(problem: Problem, schedule: Schedule, operands: Operands) -> "KeyBlocks":
    """Return the thread blocks of the kernel for dk and dv."""
    from memeff.pallas.hopper import calls
    from memeff.pallas.hopper.scheduler import KeyBlocks

    if schedule.fused_backward:
        return KeyBlocks(calls.fused_tiling(operands).item_size)
    return KeyBlocks(calls.backward_tilings(problem, operands)[1].item_size)


def _parts_of_groups(problem: Problem, operands: Operands, key_blocks: "KeyBlocks") -> int:
    """Return into how many parts the kernels of keys divide the query heads of each key head."""
    from memeff.pallas.hopper.backward_common import group_parts
    from memeff.pallas.hopper.scheduler import CallSizes

    if not backward_is_kernel(operands):
        return 1
    shape = operands.shape
    sizes = CallSizes(shape.B, shape.T, shape.S, shape.K, shape.G)
    has_segments = operands.q_segments is not None
    return group_parts(sizes, problem, key_blocks, has_segments)


def _bias_bytes(operands: Operands) -> int:
    """Return the bytes of a copy of the bias that a mask or padding needs, or of its vectors."""
    if not reads_bias(operands):
        return 0
    bias = operands.logit_params.bias
    mask = operands.mask if mask_becomes_bias(operands) else None
    read: Any = mask if bias is None else bias
    itemsize = 2 if bias is None else bias.dtype.itemsize
    B, N, T, S = read.shape
    if T == 1 or S == 1:
        shape = operands.shape
        length = shape.T if S == 1 else shape.S
        return 4 * shape.B * shape.N * round_up(length, 384)
    rows = round_up(T, 8)
    cols = round_up(S, 128 // itemsize)
    if mask is None and (rows, cols) == (T, S):
        return 0
    return B * N * rows * cols * itemsize


def decode_bytes(operands: Operands) -> int:
    """Return the bytes of the decode kernel: partial results, lse, and padded queries."""
    from memeff.pallas.hopper.decode_work import ROWS, DecodeSizes
    from memeff.pallas.hopper.scheduler import CallSizes

    shape = operands.shape
    B, H, D = shape.B, shape.H, shape.D
    key: Any = operands.key
    dtype = key.dtype if getattr(key, "scales", None) is None else key.values.dtype
    call = CallSizes(B, shape.T, shape.S, shape.K, shape.G)
    sizes = DecodeSizes.of(call, H, D, None, dtype)
    rows = sizes.row_tiles * ROWS
    parts = sizes.parts * (sizes.rows_stored * D + 2 * rows)
    lse = sizes.rows * D
    queries = round_up(sizes.rows, 8) * H * operands.query.dtype.itemsize
    queries += 4 * rows if sizes.splits_query else 0
    return B * sizes.call.K * (4 * parts + 4 * lse + queries)


def extra_pass_bytes(schedule: Schedule, operands: Operands) -> int:
    """Return the bytes of the pass for params whose cotangents kernels do not sum.

    It holds two tiles of logits, a copy of the cotangent of out, and slices. Copies of query, key
    and value reuse the memory of their gradients. At 2k and 8k, with tiles of 2^19 to 2^21 logits,
    the estimate is 1.00 to 1.11 times what XLA reports for an H200.
    """
    shape = operands.shape
    t, c = schedule.chunk_size
    b, k = schedule.heads_of_tile(shape.B, shape.K)
    logits = b * k * shape.G * t * c  # of a tile
    rows = shape.B * shape.N * shape.T
    itemsize = operands.query.dtype.itemsize
    return 8 * logits + itemsize * rows * (shape.D + shape.H // 2)
