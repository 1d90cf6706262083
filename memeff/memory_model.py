"""What a call holds at its highest point beyond inputs and outputs, told from shapes. Hides how XLA lays out its buffers.

A call goes through phases: the forward's walk, its division, the backward's walk, and the end, where sums take the layout
and dtype of the gradients; the highest counts. Live in it are what is as long as the sequence (sums in float32, rows, the
saved out), what is as large as a tile of logits, and slices of operands. XLA:CPU lends the memory of outputs that are not
yet written, one buffer each. How many tiles are live was read from what XLA reports (`memory_analysis`) of some 700
compiled calls on jax 0.10, 0.11 and 0.12, on CPUs and for an H200; tests/test_plan.py holds the figures to it.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memeff.chunked import eligible
from memeff.problem import Operands, Problem, accumulator_dtype
from memeff.user_functions import PairIndices

JAX = tuple(map(int, jax.__version__.split(".")[:2]))


class Sizes(NamedTuple):
    """Elements of whole arrays, of a tile, and of a tile's slices; bytes of an element."""

    q: int
    k: int
    v: int
    o: int
    row: int  # B N T
    bias: int
    logits: int  # of a tile, all its heads
    shared: int  # of a tile, one head
    slices: tuple[int, int, int, int]  # query, key, value, out
    wide: int  # bytes where sums are gathered
    narrow: int  # and of an operand

    @staticmethod
    def of(problem: Problem, operands: Operands) -> "Sizes":
        (B, T, K, G, H), (_, S, _, D), (t, c) = (
            operands.query.shape,
            operands.value.shape,
            problem.chunk_size,
        )
        b, k = problem.block or (B, K)
        bias = operands.terms.bias
        return Sizes(
            *(B * K * G * T * H, B * S * K * H, B * S * K * D, B * K * G * T * D, B * K * G * T),
            bias=0 if bias is None else math.prod(bias.shape),
            logits=b * k * G * t * c,
            shared=t * c,
            slices=(b * k * G * t * H, b * k * c * H, b * k * c * D, b * k * G * t * D),
            wide=jnp.dtype(accumulator_dtype(operands)).itemsize,
            narrow=operands.query.dtype.itemsize,
        )


def temp_bytes(problem: Problem, operands: Operands, platform: str) -> tuple[int, int]:
    """Of the chunked path: of a forward for inference, and of forward and gradient in one call."""
    find = _on_cpu if platform == "cpu" else _on_gpu
    forward, gradient = find(problem, operands, eligible.fixed_max_applies(problem, operands))
    return math.ceil(forward), math.ceil(gradient + _of_score_fn(problem, operands))


def safety_margin(problem: Problem, operands: Operands, platform: str) -> float:
    """What is told times this stays below a limit: small tiles, and on GPUs masks and biases, are told less well."""
    if platform == "cpu":
        return 1.2
    return 1.15 if eligible.uses_gpu_fusion(problem, operands) else 1.3


def quadratic_bytes(operands: Operands, platform: str) -> tuple[int, int]:
    """About what plain attention (`jax.nn`'s XLA path) holds: logits, probabilities, in a gradient their cotangents."""
    (B, T, K, G, _), S = operands.query.shape, operands.key.shape[1]
    half = operands.query.dtype.itemsize == 2
    forward, gradient = (6, 10) if half and platform != "cpu" else (8, 12.5)
    return B * K * G * T * S * forward, math.ceil(B * K * G * T * S * gradient)


def input_output_bytes(operands: Operands) -> int:
    """Of inputs and outputs of forward and gradient."""
    with_gradient = jax.tree.leaves((operands.query, operands.key, operands.value, operands.terms))
    (B, T, K, G, _), D = operands.query.shape, operands.value.shape[-1]
    out = B * T * K * G * D * operands.query.dtype.itemsize  # and its cotangent
    return 2 * out + sum(
        math.prod(x.shape) * x.dtype.itemsize for x in (*jax.tree.leaves(operands), *with_gradient)
    )


def _masked(problem: Problem, operands: Operands) -> bool:
    """Does some tile need a mask?"""
    T, S, (t, c) = operands.query.shape[1], operands.key.shape[1], problem.chunk_size
    arrays = (
        operands.mask,
        operands.q_segments,
        operands.terms.bias,
        operands.q_lengths,
        operands.kv_lengths,
        operands.q_offset,
    )
    functions = problem.mask_fn is not None
    return (
        functions
        or problem.windowed
        or T % t != 0
        or S % c != 0
        or any(x is not None for x in arrays)
    )


def _of_score_fn(problem: Problem, operands: Operands) -> float:
    """What its derivative keeps of a tile: the indices by which it read its params, as they are and half of them once more
    where cotangents are added up; of all floats one tile, for XLA makes them again in the loops that want them.
    """
    score_fn = problem.score_fn
    if score_fn is None:
        return 0
    (B, _, K, G, _), (t, c) = operands.query.shape, problem.chunk_size
    b, k = problem.block or (B, K)
    of: Any = jax.ShapeDtypeStruct
    at = PairIndices(
        of((b,), jnp.int32), of((k, G), jnp.int32), of((t,), jnp.int32), of((c,), jnp.int32), (), ()
    )

    def pull(score, at, floats, rest):
        return jax.vjp(lambda score, floats: score_fn(score, at, floats, rest), score, floats)[1]

    like = of((b, k, G, t, c), accumulator_dtype(operands))
    floats, rest = (
        jax.tree.map(lambda x: of(x.shape, x.dtype), x)
        for x in (operands.terms.score, operands.score_rest)
    )
    kept = [
        x for x in jax.tree.leaves(jax.eval_shape(pull, like, at, floats, rest)) if x.size >= t * c
    ]
    size = lambda kind: sum(
        x.size * x.dtype.itemsize for x in kept if jnp.issubdtype(x.dtype, kind)
    )
    return 1.5 * size(jnp.integer) + min(
        size(jnp.floating), math.prod(like.shape) * like.dtype.itemsize
    )


# ---- CPU: XLA lends the memory of outputs that are not yet written, to one buffer each


def _left(buffers: Iterable[float], outputs: Sequence[float]) -> float:
    """What of `buffers` finds no output to lend it memory, the largest first."""
    outputs, left = sorted(outputs), 0.0
    for size in sorted(buffers, reverse=True):
        host = next((x for x in outputs if x >= size), None)
        if host is None:
            left += size
        else:
            outputs.remove(host)
    return left


def _on_cpu(problem: Problem, operands: Operands, fixed: bool) -> tuple[float, float]:
    z, masked, terms = Sizes.of(problem, operands), _masked(problem, operands), operands.terms
    old, half, exact = JAX < (0, 11), operands.query.dtype == jnp.float16, z.wide == z.narrow
    logits, o, saved, row = z.logits * z.wide, z.o * z.wide, z.o * z.narrow, z.row * z.wide
    sums, outputs = ([size * n for size in (z.q, z.k, z.v, z.bias)] for n in (z.wide, z.narrow))
    query, key, value, dout = (size * z.narrow for size in z.slices)
    shared = (
        [z.shared * z.wide] * 10 if problem.dropout is not None and problem.dropout.shared else []
    )
    each = problem.dropout is not None and (not shared or z.shared == z.logits)
    held = old and operands.query.dtype == jnp.bfloat16  # operands in float32, whole

    def tiles(count: float) -> list[float]:
        return [logits] * int(count) + [logits * (count % 1)]

    alone = saved < logits
    count = 11 if each else 2 + alone * half / 2 if exact or masked or alone else 1.5
    spare = logits * (1 + 2 * masked) / 8 * fixed
    slices = max([query, key], [value, z.slices[3] * z.wide, spare], key=sum)
    forward_tile = [*tiles(count), *slices, *shared, z.shared * masked]
    rows = [row] * (3 if fixed else 2)
    whole = held * (sum(sums) - sums[2] * (z.k < z.q))
    forward = o + sum(rows) + whole + _left(forward_tile, [saved])

    alone = max(outputs) < logits
    if each:
        count = 16 if exact else 14 + 3 * alone
        # jax 0.12 needs less; tests/test_plan.py compares
        if exact and not old and operands.query.shape[3] == 1:
            count = 9.25
    elif exact:
        count = (3 if fixed else 2.5) if old else 2 + alone
    elif half:
        count = 3 + alone + masked * alone / 2
    else:
        count = 2.5 + masked / 2 + alone
    scalars = terms.scale is not None or terms.soft_cap is not None
    count += (1 + alone) * scalars + (1 + old * exact / 2) * (terms.bias is not None)
    count += 1.5 * old * (problem.soft_cap is not None)
    backward_tile = [*tiles(count), query, key, value, dout, *shared]
    if held:
        end = sums[0] - sums[1] * (z.k < z.q)
        return forward, 2 * sum(sums) + 2 * o + 3 * row + max(
            end, (sum(backward_tile) - logits) * alone
        )
    division = [o] * (2 + half * (1 + old)) + [sums[1]] * (old and half)
    phases = [
        _left([o, *rows, *forward_tile], outputs),
        _left([*division, *rows], outputs),
        _left([saved, *sums, *[row] * 3, *backward_tile], outputs if z.k <= z.q else []),
    ]
    if not exact:
        phases.append(sum(sums) + sum(sums[:3]) * (old and half))
    elif z.slices[0] == z.slices[3] and z.k <= z.q:
        phases.append(sums[0] + min(sums[1:3]))
    else:
        phases.append(sum(sums[:3]))
    if exact and old:  # the sums' zeros are made before their time
        one_head = z.row == math.prod(operands.query.shape[:2])
        phases.append(
            o
            + sum(rows)
            + sum(set(sums[:3]))
            + sum(forward_tile) * (one_head or bool(jax.tree.leaves(terms)))
        )
    return forward, max(phases)


# ---- GPU


def _on_gpu(problem: Problem, operands: Operands, fixed: bool) -> tuple[float, float]:
    """Fitted to compiled calls, rather too much, for copies of whole operands come and go with shapes."""
    z, half = Sizes.of(problem, operands), operands.query.dtype.itemsize == 2
    if not eligible.uses_gpu_fusion(problem, operands):
        forward = 4 * z.o + 2 * z.k + z.logits * (5.5 if half else 8) + 24 * z.slices[0]
        gradient = (
            (6.5 if half else 12) * z.q
            + (6 if half else 8) * z.k
            + z.logits * (12.2 if half else 16)
        )
        return forward, max(forward, gradient + 4 * z.bias * half)
    B, _, K = operands.query.shape[:3]
    b, k = problem.block or (B, K)
    share = b * k / (B * K)  # of batch entries and heads, in a block
    blocks = share < 1
    # the largest square in a stair; alone, it is cut in two
    quarter = operands.query.shape[1] * operands.key.shape[1] // 4
    joined = (
        0
        if problem.left is not None
        else min(problem.joined, quarter // 2 if quarter <= problem.joined else quarter)
    )
    fixed_tile, fused_tile = (
        z.narrow * b * k * operands.query.shape[3] * max(joined, math.prod(size or (0, 0)))
        for size in (problem.fixed_chunk_size, problem.fused_chunk_size)
    )
    ragged = not problem.windowed and _masked(problem, operands)
    copies = z.narrow * (z.q + z.k + z.v + z.o)
    forward = (
        share * (4.25 * z.o + copies - z.narrow * z.o)
        + max(fixed_tile, 6 * z.logits)
        + blocks * z.narrow * z.o
    )
    sums, halves = 4 * (z.q + z.k + z.v), z.narrow * z.o * half
    gradient = share * (sums + (copies + halves) * (1 + blocks * half)) + blocks * z.narrow * (
        1.4 * z.q + z.o
    )
    gradient += max((2 + ragged) * fused_tile, z.logits * (12 if half else 16))
    return 1.05 * forward, 1.05 * max(forward, gradient)
