"""Decide which calls the Hopper kernels can run, and where they are faster."""

import jax
import jax.numpy as jnp
from jax import Array

from memeff.device import Device
from memeff.pallas.user_functions import calls
from memeff.problem import Operands, Problem

LARGEST_HEAD = 256
# beyond it the chunked path takes the gradient, from the kernel's out and lse
LARGEST_HEAD_BACKWARD = 128
# where kernels were seen to be faster; below, most of a tile of theirs is empty
FEWEST_QUERIES = 64


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
        f"its kernels take bfloat16 and float16, and this is {query.dtype}": query.dtype
        not in (jnp.bfloat16, jnp.float16),
        f"its kernels take heads of up to {LARGEST_HEAD}, and here H={H}, D={D}": max(H, D)
        > LARGEST_HEAD,
        "its kernels have no dropout": problem.dropout is not None,
        "its kernels read masks of keys or of queries, [B, 1, 1, S] or [B, 1, T, 1], no others": operands.mask
        is not None
        and not mask_is_of_tokens(operands.mask),
        "its kernels read a mask or segments, not both": operands.mask is not None
        and operands.q_segments is not None,
        "its kernels read no bias": terms.bias is not None,
        "its kernels call no qk_transform": problem.qk_transform is not None,
        "its kernels take scale and logits_soft_cap as numbers, not as arrays": terms.scale
        is not None
        or terms.soft_cap is not None,
        f'backward="fused" takes heads of up to {LARGEST_HEAD_BACKWARD}, and here H={H}, D={D}': problem.backward
        == "fused"
        and max(H, D) > LARGEST_HEAD_BACKWARD,
        'backward="fused" calls no score_fn and no mask_fn': problem.backward == "fused"
        and problem.calls_functions,
        "a size is 0": 0 in (*query.shape, *key.shape, *value.shape),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    return calls.why_not(problem, operands) if found is None else found


def mask_is_of_tokens(mask: Array) -> bool:
    """Does the mask, B|1 K|1 G|1 T|1 S|1, hide whole keys or whole queries?"""
    _, K, G, T, S = mask.shape
    return K == G == 1 and 1 in (T, S)


def slower(problem: Problem, operands: Operands) -> str | None:
    """Why the chunked path is taken where both can run; None: it is not."""
    T = operands.query.shape[1]
    return (
        f"with {T} queries a tile of theirs would be nearly empty" if T < FEWEST_QUERIES else None
    )


def backward_is_kernel(operands: Operands) -> bool:
    return max(operands.query.shape[-1], operands.value.shape[-1]) <= LARGEST_HEAD_BACKWARD


# Forward + gradient, H200, bfloat16 (README.md beside this has the cases): in all that were
# measured from these bounds on, one kernel was 1 to 37 % faster than two. With half the keys it was
# between 5 % slower and 6 % faster, with fewer mostly slower; with half the logits between 9 %
# slower and 7 % faster; with half the blocks 9 % slower. Of the whole call:
FUSED_KEYS = 4096  # that a query sees, on average
FUSED_LOGITS = 2**30  # that are seen, of all heads
FUSED_BLOCKS = 512  # of FUSED_OWN keys
FUSED_OWN = 128


def fused_is_faster(problem: Problem, operands: Operands) -> bool:
    """Was the gradient in one kernel measured to be faster than in two? Of what was not measured: no."""
    (B, T, K, G, H), (_, S, _, D), causal = (
        operands.query.shape,
        operands.value.shape,
        problem.right == 0,
    )
    given = (
        operands.mask,
        operands.q_lengths,
        operands.kv_lengths,
        operands.q_offset,
        operands.q_segments,
    )
    measured = not problem.calls_functions
    measured &= problem.left is None and problem.right in (None, 0) and problem.q_offset == 0
    measured &= all(x is None for x in given)
    measured &= (
        H == D
        and H in (64, 128)
        and (T == S or not causal)
        and (problem.soft_cap is None or H == 128)
    )
    keys, blocks = S / 2 if causal else S, B * K * -(-S // FUSED_OWN)
    enough = keys >= FUSED_KEYS and B * K * G * T * keys >= FUSED_LOGITS and blocks >= FUSED_BLOCKS
    return measured and enough
