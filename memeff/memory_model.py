"""Estimate the bytes that a call holds at its peak, beyond inputs and outputs, from shapes alone.

A call has phases: the loop of the forward, the division by l, the loop of the backward, and the
end, when sums take the layout and dtype of the gradients. The largest phase counts. It holds arrays
as long as the sequence (float32 sums, rows, the saved out), arrays as large as a tile of logits,
and slices of operands. XLA:CPU reuses the memory of outputs that are not yet written, one buffer
each.

The tables below say how many tiles are live at the same time. They were read from the reports of
XLA (`memory_analysis`) on some 750 compiled calls on jax 0.10, 0.11 and 0.12, on CPUs and for an
H200. tests/test_plan.py compiles calls of every kind on a CPU; no estimate may be off by over a
tenth. tests/sm90a_memory.py compiles calls for an H200.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from memeff.chunked import eligible, few_queries
from memeff.chunked.schedule import has_array_bounds, has_elementwise_mask
from memeff.order import orders_by_condition
from memeff.problem import Operands, Problem, Schedule, accumulator_dtype
from memeff.user_functions import PairIndices

JAX = jax.__version_info__[:2]


# ---- the fitted numbers (test_plan_is_within_a_tenth_of_what_is_compiled in tests/test_plan.py)


class CpuFit(NamedTuple):
    """Live tiles of logits on CPUs.

    A tile is "alone" if no output is so large that the tile can use its memory. "Exact" means that
    operands have the dtype of the sums, "half" float16, and "old" jax before 0.11. "Ordered" means
    that sums are made when they are needed (`order.orders_by_condition`), which saves memory on old
    jax alone. "More" marks tiles that are added to the others.
    """

    forward: float = 2
    forward_unmasked: float = 1.5  # neither exact nor alone
    forward_old_bfloat16: float = 1.25  # masked, and not alone
    forward_half_alone: float = 0.5  # more
    forward_dropout: float = 11
    fixed_max_spare: float = 1 / 8  # for a bound on each row's max; three times this if masked
    shared_dropout: int = 1  # more, of one head; in forward and backward
    shared_dropout_old: int = 10

    backward_exact: float = 2
    backward_exact_old: float = 2.5
    backward_exact_old_fixed: float = 3
    backward_exact_ordered_fixed: float = 2.25
    backward_half: float = 3
    backward: float = 2.5  # bfloat16
    backward_alone: float = 1  # more, except if exact on old jax
    backward_masked: float = 0.5  # more, not if exact; with half only if alone
    backward_scalars: float = 1  # more for arrays as scale or soft cap; twice if alone
    backward_bias: float = 1  # more
    backward_bias_exact_old: float = 0.5  # more
    backward_cap_old: float = 1.5  # more for a static soft cap, except in bfloat16
    backward_dropout: float = 9
    backward_dropout_old: float = 14
    backward_dropout_alone: float = 3  # more
    backward_dropout_exact: float = 10.25
    backward_dropout_exact_ungrouped: float = 7.25
    backward_dropout_exact_old: float = 16
    backward_dropout_exact_old_ungrouped: float = 11.5


class GpuFit(NamedTuple):
    """Bytes per element on GPUs, for operands of one width.

    They are rather too high, because XLA copies whole operands for some shapes and not for others.
    """

    forward_logits: float
    query: float  # in a gradient
    key: float
    logits: float
    fused_logits: float  # in a gradient that XLA fuses into its products
    bias: float


CPU = CpuFit()
GPU_16_BITS = GpuFit(5.5, query=6.5, key=6, logits=12.2, fused_logits=12, bias=4)
GPU_32_BITS = GpuFit(8, query=12, key=8, logits=16, fused_logits=16, bias=0)
GPU_FORWARD_OUT = 4  # bytes per element of out, and of the next two, at any width
GPU_FORWARD_KEY = 2
GPU_FORWARD_QUERY_SLICE = 24
GPU_FUSED_OUT = 4.25  # the same where XLA fuses the gradient into its products
GPU_FUSED_LOGITS = 6
GPU_FUSED_BIAS_LOGITS = 8  # bytes of a logit in a fused gradient with a bias
GPU_FUSED_QUERY = 1.4  # elements of the query's gradient, if heads are taken in blocks
GPU_FUSED_MARGIN = 1.05

MARGIN_CPU = 1.2
MARGIN_GPU_FUSED = 1.15
MARGIN_GPU = 1.3


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
    wide: int  # bytes of an element of a sum
    narrow: int  # bytes of an element of an operand

    @staticmethod
    def of(schedule: Schedule, operands: Operands) -> "Sizes":
        """Return the sizes of a call."""
        (B,), T, S, N, K, H, D = operands.shape
        G = operands.shape.G
        t, c = schedule.chunk_size
        b, k = schedule.heads_of_tile(B, K)
        rows = b * k * G * t  # of a tile, all its heads
        cols = b * k * c
        bias = operands.logit_params.bias
        return Sizes(
            q=B * N * T * H,
            k=B * S * K * H,
            v=B * S * K * D,
            o=B * N * T * D,
            row=B * N * T,
            bias=0 if bias is None else math.prod(bias.shape),
            logits=rows * c,
            shared=t * c,
            slices=(rows * H, cols * H, cols * D, rows * D),
            wide=jnp.dtype(accumulator_dtype(operands)).itemsize,
            narrow=operands.query.dtype.itemsize,
        )


def temp_bytes(
    problem: Problem, schedule: Schedule, operands: Operands, platform: str
) -> tuple[int, int]:
    """Return the bytes of the chunked path: of inference, and of forward with gradient."""
    estimate = _on_cpu if platform == "cpu" else _on_gpu
    forward, gradient = estimate(problem, schedule, operands)
    score_fn_bytes = _score_fn_bytes(problem, schedule, operands)
    return math.ceil(forward), math.ceil(gradient + score_fn_bytes)


def safety_margin(problem: Problem, schedule: Schedule, operands: Operands, platform: str) -> float:
    """Return the factor on the estimate when a limit is enforced and nothing can be compiled.

    The estimate is rougher for small tiles and, on GPUs, for masks and biases.
    """
    if platform == "cpu":
        return MARGIN_CPU
    fused = eligible.uses_gpu_fusion(problem, schedule, operands)
    return MARGIN_GPU_FUSED if fused else MARGIN_GPU


def quadratic_bytes(operands: Operands, platform: str) -> tuple[int, int]:
    """Estimate the bytes of plain attention (`jax.nn`'s XLA path), forward and gradient.

    It holds logits and probabilities, and in a gradient their cotangents.
    """
    shape = operands.shape
    logits = shape.B * shape.N * shape.T * shape.S
    if operands.query.dtype.itemsize == 2 and platform != "cpu":
        return 6 * logits, 10 * logits
    return 8 * logits, math.ceil(12.5 * logits)


def input_output_bytes(operands: Operands) -> int:
    """Return the bytes of the inputs and outputs of forward and gradient."""
    with_gradient = operands.query, operands.key, operands.value, operands.logit_params
    shape = operands.shape
    rows = shape.B * shape.T * shape.N
    total = 2 * rows * shape.D * operands.query.dtype.itemsize  # out and its cotangent
    for x in jax.tree.leaves((operands, with_gradient)):
        total += math.prod(x.shape) * x.dtype.itemsize
    return total


def _masked(problem: Problem, schedule: Schedule, operands: Operands) -> bool:
    """Return True if some tile needs a mask."""
    shape = operands.shape
    t, c = schedule.chunk_size
    if shape.T % t != 0 or shape.S % c != 0:
        return True
    if problem.mask_fn is not None or problem.has_window:
        return True
    return has_elementwise_mask(problem, operands) or has_array_bounds(problem, operands)


def _score_fn_bytes(problem: Problem, schedule: Schedule, operands: Operands) -> float:
    """Return the bytes that the derivative of score_fn keeps of a tile.

    It keeps the indices at which score_fn read its params, and half of them again while cotangents
    are added up. All floats together count as one tile, because XLA recomputes them in each loop.
    """
    score_fn = problem.score_fn
    if score_fn is None:
        return 0
    shape = operands.shape
    G = shape.G
    t, c = schedule.chunk_size
    b, k = schedule.heads_of_tile(shape.B, shape.K)

    def integers(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.int32)

    def derivative(score, indices, floats, rest):
        def new_score(score, floats):
            return score_fn(score, indices, floats, rest)

        _, pull = jax.vjp(new_score, score, floats)
        return pull

    indices = PairIndices(integers(b), integers(k, G), integers(t), integers(c), (), ())
    score = jax.ShapeDtypeStruct((b, k, G, t, c), accumulator_dtype(operands))
    floats = operands.logit_params.score
    kept = jax.eval_shape(derivative, score, indices, floats, operands.score_nonfloat_params)
    large = [x for x in jax.tree.leaves(kept) if x.size >= t * c]

    def count_bytes(kind: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in large if jnp.issubdtype(x.dtype, kind))

    tile_bytes = score.size * score.dtype.itemsize
    return 1.5 * count_bytes(jnp.integer) + min(count_bytes(jnp.floating), tile_bytes)


# ---- CPU: XLA lends the memory of outputs that are not yet written, to one buffer each


class _CpuCall:
    """The arrays of a call in bytes, and its traits, for XLA:CPU."""

    def __init__(self, problem: Problem, schedule: Schedule, operands: Operands):
        self.sizes = z = Sizes.of(schedule, operands)
        arrays = z.q, z.k, z.v, z.bias
        self.sums = [size * z.wide for size in arrays]
        self.outputs = [size * z.narrow for size in arrays]  # the gradients
        self.tile = z.logits * z.wide
        self.out = z.o * z.wide
        self.saved = z.o * z.narrow
        self.row = z.row * z.wide
        self.slices = [size * z.narrow for size in z.slices]  # query, key, value, dout

        self.masked = _masked(problem, schedule, operands)
        self.fixed = eligible.fixed_max_applies(problem, schedule, operands)
        self.grouped = operands.shape.G != 1
        self.exact = z.wide == z.narrow
        self.half = operands.query.dtype == jnp.float16
        self.old = JAX < (0, 11)
        self.old_bfloat16 = self.old and operands.query.dtype == jnp.bfloat16
        self.ordered = orders_by_condition()

        dropout = problem.dropout
        if dropout is not None and dropout.bits == "mix32":
            dropout = None  # XLA computes that mask where it is read
        shares_mask = dropout is not None and dropout.shared
        shared_count = 0
        if shares_mask:
            early = self.old and not self.ordered
            shared_count = CPU.shared_dropout_old if early else CPU.shared_dropout
        self.shared = [z.shared * z.wide] * shared_count
        self.dropout_each = dropout is not None and (not shares_mask or z.shared == z.logits)


def _on_cpu(problem: Problem, schedule: Schedule, operands: Operands) -> tuple[float, float]:
    """Return the bytes of a forward, and of forward and gradient, on a CPU."""
    call = _CpuCall(problem, schedule, operands)
    z = call.sizes
    sums = call.sums
    small_key = z.k < z.q
    forward_tile = _cpu_forward_tile(call)
    rows = [call.row] * (3 if call.fixed else 2)
    # With few queries the slices of keys and values are the largest. They have the sums' dtype.
    tiles = 2 if call.masked and not call.old_bfloat16 else 1
    few_queries = sum(z.slices[1:3]) * z.wide + call.tile * tiles
    if call.fixed:
        few_queries += 2 * math.prod(operands.key.shape[:3]) * z.wide  # bounds
    forward = call.out + sum(rows) + max(_unlent(forward_tile, [call.saved]), few_queries)

    alone = max(call.outputs) < call.tile
    count = _cpu_backward_count(call, alone)
    count += _cpu_params_count(call, problem, operands, alone)
    backward_tile = [*_tiles(call.tile, count), *call.slices, *call.shared]
    division = [call.out] * 2
    if call.half:
        division.append(call.out)
    if call.half and call.old and not call.ordered:
        division += [call.out, sums[1]]
    backward = [call.saved, *sums, *[call.row] * 3, *backward_tile]
    phases = [
        _unlent([call.out, *rows, *forward_tile], call.outputs),
        _unlent([*division, *rows], call.outputs),
        _unlent(backward, call.outputs if z.k <= z.q else []),
    ]
    has_params = bool(jax.tree.leaves(operands.logit_params))
    if call.exact and call.old and call.ordered and (small_key or not has_params):
        return forward, max(phases)
    phases.append(_cpu_end(call))
    # In two cases the sums' zeros are made before their time.
    if call.old_bfloat16 and not call.ordered:
        early = 2 * call.out + sum(sums)
        if small_key and not has_params:
            early += call.row - sums[2]
        phases.append(early)
    if call.exact and call.old:
        one_head = z.row == math.prod(operands.query.shape[:2])
        early = call.out + sum(rows) + sum(set(sums[:3]))
        if one_head or has_params:
            early += sum(forward_tile)
        phases.append(early)
    return forward, max(phases)


def _cpu_forward_tile(call: _CpuCall) -> list[float]:
    """Return the buffers that the forward's loop holds for a tile."""
    z = call.sizes
    alone = call.saved < call.tile
    if call.dropout_each:
        count = CPU.forward_dropout
    elif call.old_bfloat16 and call.masked and not alone:
        count = CPU.forward_old_bfloat16
    elif call.exact or call.masked or alone:
        count = CPU.forward
        if alone and call.half:
            count += CPU.forward_half_alone
    else:
        count = CPU.forward_unmasked
    spare = 0
    if call.fixed:
        spare = CPU.fixed_max_spare * call.tile
        if call.masked:
            spare *= 3
    query, key, value, _ = call.slices
    out = z.slices[3] * z.wide
    slices = max([query, key], [value, out, spare], key=sum)
    mask = z.shared if call.masked else 0
    return [*_tiles(call.tile, count), *slices, *call.shared, mask]


def _cpu_backward_count(call: _CpuCall, alone: bool) -> float:
    """Return how many tiles of logits are live in the backward of a call without `LogitParams`."""
    if call.dropout_each:
        if not call.exact:
            more = CPU.backward_dropout_alone if alone else 0
            old = call.old and not (call.old_bfloat16 and (call.ordered or alone))
            return (CPU.backward_dropout_old if old else CPU.backward_dropout) + more
        if call.old:
            if call.grouped and not call.ordered:
                return CPU.backward_dropout_exact_old
            return CPU.backward_dropout_exact_old_ungrouped
        if call.grouped:
            return CPU.backward_dropout_exact
        return CPU.backward_dropout_exact_ungrouped
    if call.exact and call.old:
        if not call.fixed:
            return CPU.backward_exact_old
        if call.ordered and not alone:
            return CPU.backward_exact_ordered_fixed
        return CPU.backward_exact_old_fixed
    count = CPU.backward_alone if alone else 0
    if call.exact:
        return count + CPU.backward_exact
    if call.masked and (alone or not call.half):
        count += CPU.backward_masked
    return count + (CPU.backward_half if call.half else CPU.backward)


def _cpu_params_count(call: _CpuCall, problem: Problem, operands: Operands, alone: bool) -> float:
    """Return how many more tiles the backward of scale, soft cap and bias needs."""
    count = 0.0
    terms = operands.logit_params
    if terms.scale is not None or terms.soft_cap is not None:
        count += CPU.backward_scalars * (2 if alone else 1)
    if terms.bias is not None:
        count += CPU.backward_bias
        if call.old and call.exact:
            count += CPU.backward_bias_exact_old
    if call.old and not call.old_bfloat16 and problem.soft_cap is not None:
        count += CPU.backward_cap_old
    return count


def _cpu_end(call: _CpuCall) -> float:
    """Return the bytes of the last phase, in which sums become gradients."""
    z = call.sizes
    sums = call.sums
    if not call.exact:
        more = sum(sums[:3]) if call.old and call.half and not call.ordered else 0
        return sum(sums) + more
    if z.slices[0] == z.slices[3] and z.k <= z.q:
        return sums[0] + min(sums[1:3])
    return sum(sums[:3])


def _tiles(size: int, count: float) -> list[float]:
    """Return `count` buffers of `size` bytes, the last one a fraction."""
    return [size] * int(count) + [size * (count % 1)]


def _unlent(buffers: Iterable[float], outputs: Sequence[float]) -> float:
    """Return the bytes of the buffers that can use no output's memory; the largest choose first."""
    free = sorted(outputs)
    total = 0.0
    for size in sorted(buffers, reverse=True):
        host = next((x for x in free if x >= size), None)
        if host is None:
            total += size
        else:
            free.remove(host)
    return total


# ---- GPU


def _on_gpu(problem: Problem, schedule: Schedule, operands: Operands) -> tuple[float, float]:
    """Return the bytes of a forward, and of forward and gradient, on a GPU."""
    z = Sizes.of(schedule, operands)
    if eligible.uses_gpu_fusion(problem, schedule, operands):
        return _with_gpu_fusion(problem, schedule, operands, z)
    fit = GPU_16_BITS if operands.query.dtype.itemsize == 2 else GPU_32_BITS
    forward = GPU_FORWARD_OUT * z.o + GPU_FORWARD_KEY * z.k
    tile = fit.forward_logits * z.logits
    if eligible.fixed_max_applies(problem, schedule, operands):
        tile = max(tile, _fixed_max_tile(problem, schedule, operands, z, linear=False))
    forward += tile
    forward += GPU_FORWARD_QUERY_SLICE * z.slices[0]
    if few_queries.reads_in_place(problem, schedule, operands):
        forward = GPU_FUSED_MARGIN * (z.wide + z.narrow) * z.row * operands.shape.S
    gradient = fit.query * z.q + fit.key * z.k
    gradient += fit.logits * z.logits
    gradient += fit.bias * z.bias
    if operands.logit_params.soft_cap is not None:
        gradient += z.wide * z.logits
    return forward, max(forward, gradient)


def _with_gpu_fusion(
    problem: Problem, schedule: Schedule, operands: Operands, z: Sizes
) -> tuple[float, float]:
    """Return what `_on_gpu` returns, for calls whose gradient XLA:GPU fuses into its products."""
    shape = operands.shape
    b, k = schedule.heads_of_tile(shape.B, shape.K)
    share = b * k / (shape.B * shape.K)  # of batch entries and heads, in a block
    blocks = share < 1
    half = operands.query.dtype.itemsize == 2
    fit = GPU_16_BITS if half else GPU_32_BITS

    copies = z.narrow * (z.q + z.k + z.v + z.o)
    out = z.narrow * z.o
    forward = share * (GPU_FUSED_OUT * z.o + copies - out)
    fixed_max_tile = _fixed_max_tile(problem, schedule, operands, z, linear=True)
    forward += max(fixed_max_tile, GPU_FUSED_LOGITS * z.logits)
    if blocks:
        forward += out
    sums = 4 * (z.q + z.k + z.v)
    operands_held = copies + (out if half else 0)
    if blocks and half:
        operands_held *= 2
    gradient = share * (sums + operands_held)
    if blocks:
        gradient += z.narrow * (GPU_FUSED_QUERY * z.q + z.o)
    general = fit.fused_logits  # the loop for what the fused one cannot do
    if operands.logit_params.bias is not None:
        general += z.wide
        tile = GPU_FUSED_BIAS_LOGITS
        if problem.dropout is not None:
            tile += z.narrow + 1
    else:
        ragged = not problem.has_window and _masked(problem, schedule, operands)
        tile = z.narrow * (3 if ragged else 2)
    tile *= _merged_tile(problem, schedule, operands, schedule.gpu_fused_chunk_size)
    gradient += max(tile, general * z.logits)
    return GPU_FUSED_MARGIN * forward, GPU_FUSED_MARGIN * max(forward, gradient)


def _fixed_max_tile(
    problem: Problem, schedule: Schedule, operands: Operands, z: Sizes, linear: bool
) -> int:
    """Return the bytes of a tile of the forward with a precomputed maximum on a GPU.

    XLA stores p alone, the logits of a soft cap alone, or both beside a bias.
    """
    each = z.narrow if linear else z.wide
    if operands.logit_params.bias is not None:
        each = z.wide + z.narrow
    return each * _merged_tile(problem, schedule, operands, schedule.fixed_max_chunk_size)


def _merged_tile(
    problem: Problem, schedule: Schedule, operands: Operands, size: tuple[int, int] | None
) -> int:
    """Return the logits of a tile of `size`, or of merged tiles, whichever are more."""
    shape = operands.shape
    merged = 0
    if problem.left is None and operands.logit_params.bias is None:
        merged = shape.T * shape.S // 4  # the largest square of unmasked tiles
        if merged <= schedule.max_merged_logits:
            merged //= 2  # it is the only one, and is cut in two
        merged = min(schedule.max_merged_logits, merged)
    b, k = schedule.heads_of_tile(shape.B, shape.K)
    logits = merged if size is None else max(merged, math.prod(size))
    return b * k * shape.G * logits
