"""Kernels, a file for each family of hardware (now `hopper`). Hides what they can run; imports none until it is needed."""

import jax
import jax.numpy as jnp
from jax import Array

from memeff.pallas import hoisted
from memeff.problem import Device, Gradients, Lse, LseFor, Operands, Problem

LARGEST_HEAD = 256
LARGEST_HEAD_BACKWARD = 128  # beyond it the chunked path takes the gradient, from the kernel's out and lse
FEWEST_QUERIES = 64  # where kernels were seen to be faster; below, most of a tile of theirs is empty


def for_device(device: Device) -> str | None:
    """None if there are kernels for `device`, else the reason."""
    if device.platform != "gpu":
        return f"its kernels run on Hopper GPUs, and this is a {device.platform}"
    if device.capability != "9.0":
        return f"its kernels run on GPUs of compute capability 9.0 (H100, H200), and this one's is {device.capability}"
    if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
        return f"its kernels need jax 0.11, and this is {jax.__version__}"
    return None


def why_not(problem: Problem, operands: Operands, device: Device) -> str | None:
    """None if kernels can run this call on `device`, forward and gradient, else the reason."""
    if (reason := for_device(device)) is not None:
        return reason
    query, key, value = operands[:3]
    H, D, terms = query.shape[-1], value.shape[-1], operands.terms
    if not all(isinstance(n, int) for n in (*query.shape, *key.shape)):
        return "its kernels want sizes that are known"
    reasons = {
        f"its kernels take bfloat16 and float16, and this is {query.dtype}": query.dtype not in (jnp.bfloat16, jnp.float16),
        f"its kernels take heads of up to {LARGEST_HEAD}, and here H={H}, D={D}": max(H, D) > LARGEST_HEAD,
        "its kernels have no dropout": problem.dropout is not None,
        "its kernels read masks of keys or of queries, [B, 1, 1, S] or [B, 1, T, 1], no others": operands.mask is not None
        and not of_tokens(operands.mask),
        "its kernels read a mask or segments, not both": operands.mask is not None and operands.q_segments is not None,
        "its kernels read no bias": terms.bias is not None,
        "its kernels call no qk_transform": problem.qk_transform is not None,
        "its kernels take scale and logits_soft_cap as numbers, not as arrays": terms.scale is not None
        or terms.soft_cap is not None,
        f'backward="fused" takes heads of up to {LARGEST_HEAD_BACKWARD}, and here H={H}, D={D}': problem.backward == "fused"
        and max(H, D) > LARGEST_HEAD_BACKWARD,
        'backward="fused" calls no score_fn and no mask_fn': problem.backward == "fused" and problem.calls_functions,
        "a size is 0": 0 in (*query.shape, *key.shape, *value.shape),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    return hoisted.why_not(problem, operands) if found is None else found


def of_tokens(mask: Array) -> bool:
    """Does the mask, B|1 K|1 G|1 T|1 S|1, hide whole keys or whole queries?"""
    _, K, G, T, S = mask.shape
    return K == G == 1 and 1 in (T, S)


def slower(problem: Problem, operands: Operands) -> str | None:
    """Why the chunked path is taken where both can run; None: it is not."""
    T = operands.query.shape[1]
    return f"with {T} queries a tile of theirs would be nearly empty" if T < FEWEST_QUERIES else None


def backward_is_kernel(operands: Operands) -> bool:
    return max(operands.query.shape[-1], operands.value.shape[-1]) <= LARGEST_HEAD_BACKWARD


# Forward + gradient, H200, bfloat16 (README.md beside this has the cases): in all that were measured from these bounds on,
# one kernel was 1 to 37 % faster than two. With half the keys it was between 5 % slower and 6 % faster, with fewer mostly
# slower; with half the logits between 9 % slower and 7 % faster; with half the blocks 9 % slower. Of the whole call:
FUSED_KEYS = 4096  # that a query sees, on average
FUSED_LOGITS = 2**30  # that are seen, of all heads
FUSED_BLOCKS = 512  # of FUSED_OWN keys
FUSED_OWN = 128


def fused_is_faster(problem: Problem, operands: Operands) -> bool:
    """Was the gradient in one kernel measured to be faster than in two? Of what was not measured: no."""
    (B, T, K, G, H), (_, S, _, D), causal = operands.query.shape, operands.value.shape, problem.right == 0
    given = operands.mask, operands.q_lengths, operands.kv_lengths, operands.q_offset, operands.q_segments
    measured = not problem.calls_functions
    measured &= problem.left is None and problem.right in (None, 0) and problem.q_offset == 0
    measured &= all(x is None for x in given)
    measured &= H == D and H in (64, 128) and (T == S or not causal) and (problem.soft_cap is None or H == 128)
    keys, blocks = S / 2 if causal else S, B * K * -(-S // FUSED_OWN)
    enough = keys >= FUSED_KEYS and B * K * G * T * keys >= FUSED_LOGITS and blocks >= FUSED_BLOCKS
    return measured and enough


def tile(problem: Problem, operands: Operands) -> tuple[int, int]:
    """Rows and columns of the forward's tiles."""
    from memeff.pallas import hopper

    tiling = hopper.forward_tiling(problem, operands)
    return tiling.rows, tiling.keys


def temp_bytes(problem: Problem, operands: Operands) -> tuple[int, int]:
    """Of a forward for inference, and of forward and gradient in one call: rows, padded copies, sums of dq if fused, what
    functions have for each token and row.
    """
    (B, T, K, G, H), (_, S, _, D) = operands.query.shape, operands.value.shape
    up = lambda n, multiple: -(-n // multiple) * multiple
    width = up(max(H, D), 64)
    size = lambda length, heads: B * heads * length * width * operands.query.dtype.itemsize
    copy = lambda length, heads, dim: size(up(length, 8), heads) if length % 8 or dim != width else 0
    copies, out = copy(T, K * G, H) + copy(S, K, H) + copy(S, K, D), copy(T, K * G, D)
    sums = 4 * B * K * G * up(T, 8) * width if problem.backward == "fused" else 0
    rows = 4 * B * K * G * (up(T, 128) + up(T, 192 if width == 64 else 128))  # lse and delta, of whole blocks
    of_tokens, of_differences, of_rows = hoisted.counts(problem, operands)
    vectors = 4 * B * sum(n * up(length, 128) for n, length in zip(of_tokens, (T, S), strict=True))
    vectors += of_differences * 4 * B * K * G * (up(T, 128) + up(S, 128))
    rows += of_rows * 4 * B * K * G * up(T, 128)
    walk = walk_bytes(problem, operands) if hoisted.walks(problem, operands) else 0
    return copies + out + vectors, 2 * (copies + out + vectors) + rows + sums + walk


def walk_bytes(problem: Problem, operands: Operands) -> int:
    """Of the walk for params that kernels do not sum, wanted or not: two tiles of logits, a copy of the cotangent of out,
    and slices; copies of query, key and value have the room of their gradients. At 2k and 8k, with tiles of 2^19 to 2^21
    logits, it is 1.00 to 1.11 times what XLA reports for an H200.
    """
    (B, T, K, G, H), D, (t, c) = operands.query.shape, operands.value.shape[-1], problem.chunk_size
    b, k = problem.block or (B, K)
    return 8 * b * k * G * t * c + operands.query.dtype.itemsize * B * K * G * T * (D + H // 2)


def how(problem: Problem, operands: Operands) -> str:
    """The kernels in words."""
    from memeff.pallas import hopper

    return hopper.how(problem, operands)


def forward(problem: Problem, operands: Operands, lse_for: LseFor = "caller") -> tuple[Array, Lse | None]:
    """out [B, K, G, T, D] in the query's dtype, lse [B, K, G, T]."""
    from memeff.pallas import hopper

    return hopper.forward(problem, operands, lse_for)


def backward(problem: Problem, operands: Operands, out: Array, lse: Lse, dout: Array, dlse: Array | None) -> Gradients:
    """Gradients from `out`, `dout` [B, K, G, T, D] and `lse`, `dlse` [B, K, G, T] (None: no cotangent)."""
    from memeff import xla
    from memeff.pallas import hopper

    module = hopper if backward_is_kernel(operands) else xla
    return module.backward(problem, operands, out, lse, dout, dlse)


def tangent(problem: Problem, operands: Operands, out: Array, lse: Lse, along: Operands) -> tuple[Array, Array]:
    """Tangents of `out` [B, K, G, T, D] and `lse` [B, K, G, T] along those of operands, `along` (None: 0)."""
    from memeff import tangent as chunked
    from memeff.pallas import hopper

    of_terms, moving = jax.tree.leaves(along.terms), jax.tree.leaves(along[:3])
    if of_terms or not moving or not backward_is_kernel(operands):
        return chunked.tangent(problem, operands, out, lse, along, narrow=True)
    return hopper.tangent(problem, operands, out, lse, along)
