"""Estimate the temporary memory of the TPU kernels."""

from memeff.pallas.tpu.tables import choose_side
from memeff.problem import Operands, Problem, Schedule
from memeff.shape import round_up

LANES = 128  # arrays are stored in tiles whose rows have so many numbers
SUBLANES = 8


def temp_bytes(problem: Problem, schedule: Schedule, operands: Operands) -> tuple[int, int]:
    """Return the bytes of a forward for inference, and those of forward and gradient in one call.

    They hold copies of the arrays in the layout of the kernels, and lse, which the forward stores
    128 times and the gradient 8 times for each row. For 16k to 64k tokens libtpu reports 0.56 to
    1.01 times the estimate of a forward for a v5e, and 0.74 to 1.13 times that of a gradient. For
    fewer, it reports less, because it keeps copies in vector memory.
    """
    (B,), T, S, N, K, H, D = operands.shape
    rows = round_up(T, choose_side(T))
    keys = round_up(S, choose_side(S))
    itemsize = operands.query.dtype.itemsize

    def copy(heads: int, length: int, dim: int, size: int = itemsize) -> int:
        """Return the bytes of a copy."""
        return B * heads * length * round_up(dim, LANES) * size

    arrays = copy(N, rows, H) + copy(K, keys, H) + copy(K, keys, D)
    out = copy(N, rows, D)
    stored_lse = copy(N, rows, 1, 4)
    row_vectors = 2 * B * N * rows * SUBLANES * 4
    forward = arrays + out
    return forward, 2 * forward + stored_lse + row_vectors
