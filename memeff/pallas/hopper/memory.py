"""Estimate the temporary memory of the Hopper kernels."""

from memeff.pallas.user_functions import calls
from memeff.problem import Operands, Problem, Schedule


def temp_bytes(problem: Problem, schedule: Schedule, operands: Operands) -> tuple[int, int]:
    """Return the bytes of a forward for inference, and those of forward and gradient in one call.

    They hold padded copies, out, and the numbers that user functions precompute for tokens. The
    gradient adds rows, sums of dq if fused, and the extra pass for params.
    """
    (B,), T, S, N, K, H, D = operands.shape
    width = _round_up(max(H, D), 64)

    def copy(length: int, heads: int, dim: int) -> int:
        """Return the bytes of a padded copy, if padding is needed."""
        if length % 8 == 0 and dim == width:
            return 0
        return B * heads * _round_up(length, 8) * width * operands.query.dtype.itemsize

    arrays = copy(T, N, H) + copy(S, K, H) + copy(S, K, D) + copy(T, N, D)
    (query_vectors, key_vectors), differences, row_sums = calls.count_numbers(problem, operands)
    rows_128 = _round_up(T, 128)
    cols_128 = _round_up(S, 128)
    arrays += 4 * B * (query_vectors * rows_128 + key_vectors * cols_128)
    arrays += 4 * B * N * differences * (rows_128 + cols_128)

    # lse and delta, in whole tiles
    rows = 4 * B * N * (rows_128 + _round_up(T, 192 if width == 64 else 128))
    rows += 4 * B * N * row_sums * rows_128
    fused_sums = 4 * B * N * _round_up(T, 8) * width if schedule.fused_backward else 0
    extra_pass = 0
    if calls.needs_extra_pass(problem, operands):
        extra_pass = extra_pass_bytes(schedule, operands)
    return arrays, 2 * arrays + rows + fused_sums + extra_pass


def extra_pass_bytes(schedule: Schedule, operands: Operands) -> int:
    """Return the bytes of the pass for params whose cotangents kernels do not sum.

    It holds two tiles of logits, a copy of the cotangent of out, and slices. Copies of query, key
    and value reuse the memory of their gradients. At 2k and 8k, with tiles of 2^19 to 2^21 logits,
    the estimate is 1.00 to 1.11 times what XLA reports for an H200.
    """
    shape = operands.shape
    t, c = schedule.chunk_size
    b, k = schedule.heads_of_tile(shape.B, shape.K)
    tiles = 8 * b * k * shape.G * t * c
    rows = shape.B * shape.N * shape.T
    return tiles + operands.query.dtype.itemsize * rows * (shape.D + shape.H // 2)


def _round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple
