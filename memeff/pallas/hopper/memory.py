"""Estimate the temporary memory of the Hopper kernels."""

from memeff.pallas.user_functions import calls
from memeff.problem import Operands, Problem


def temp_bytes(problem: Problem, operands: Operands) -> tuple[int, int]:
    """Of a forward for inference, and of forward and gradient in one call: rows, padded copies, sums of dq if fused, what
    functions have for each token and row.
    """
    (B, T, K, G, H), (_, S, _, D) = operands.query.shape, operands.value.shape
    up = lambda n, multiple: -(-n // multiple) * multiple
    width = up(max(H, D), 64)
    size = lambda length, heads: B * heads * length * width * operands.query.dtype.itemsize
    copy = lambda length, heads, dim: (
        size(up(length, 8), heads) if length % 8 or dim != width else 0
    )
    copies, out = copy(T, K * G, H) + copy(S, K, H) + copy(S, K, D), copy(T, K * G, D)
    sums = 4 * B * K * G * up(T, 8) * width if problem.backward == "fused" else 0
    # lse and delta, of whole blocks
    rows = 4 * B * K * G * (up(T, 128) + up(T, 192 if width == 64 else 128))
    of_tokens, of_differences, of_rows = calls.count_numbers(problem, operands)
    vectors = 4 * B * sum(n * up(length, 128) for n, length in zip(of_tokens, (T, S), strict=True))
    vectors += of_differences * 4 * B * K * G * (up(T, 128) + up(S, 128))
    rows += of_rows * 4 * B * K * G * up(T, 128)
    walk = extra_pass_bytes(problem, operands) if calls.needs_extra_pass(problem, operands) else 0
    return copies + out + vectors, 2 * (copies + out + vectors) + rows + sums + walk


def extra_pass_bytes(problem: Problem, operands: Operands) -> int:
    """Of the walk for params that kernels do not sum, wanted or not: two tiles of logits, a copy of the cotangent of out,
    and slices; copies of query, key and value have the room of their gradients. At 2k and 8k, with tiles of 2^19 to 2^21
    logits, it is 1.00 to 1.11 times what XLA reports for an H200.
    """
    (B, T, K, G, H), D, (t, c) = operands.query.shape, operands.value.shape[-1], problem.chunk_size
    b, k = problem.block or (B, K)
    return 8 * b * k * G * t * c + operands.query.dtype.itemsize * B * K * G * T * (D + H // 2)
