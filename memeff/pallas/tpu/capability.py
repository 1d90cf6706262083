"""Decide which calls the TPU kernels can run.

Each reason is a clause that stands behind "because": no capital letter, no period.
"""

import jax.numpy as jnp
from jax import lax

from memeff.device import Device
from memeff.masking import mask_is_of_tokens
from memeff.pallas.reasons import too_few_queries, unsupported_sizes
from memeff.pallas.tpu import splash
from memeff.pallas.tpu.tables import choose_side
from memeff.problem import Operands, Problem
from memeff.shape import ceil_div
from memeff.sharding import varies
from memeff.stored import StoredKeys

LARGEST_HEAD = 256
MOST_BLOCK_PAIRS = 2**17  # entries of a table, which lies in scalar memory


def for_device(device: Device) -> str | None:
    """Return why the kernels do not run on `device`; None if they do."""
    if device.platform != "tpu":
        return f"the TPU kernels need a TPU, and this device is a {device.platform}"
    return None


def why_not(
    problem: Problem, operands: Operands, device: Device, fused: bool = False
) -> str | None:
    """Return why the kernels cannot run a call, forward and gradient; None if they can."""
    return (
        for_device(device)
        or ('the TPU kernels do not support backward="fused"' if fused else None)
        or _unsupported_shape(operands)
        or _unsupported_array(operands)
        or _unsupported_option(problem, operands)
        or splash.why_not()
    )


def _unsupported_shape(operands: Operands) -> str | None:
    """Return a reason if the kernels do not support the lengths, the dtype or the head dims."""
    query, key, value = operands[:3]
    if isinstance(key, StoredKeys):
        return "the TPU kernels do not read keys that are stored in pages or in 8 bits"
    dtypes = {x.dtype for x in (query, key, value)}
    if len(dtypes) > 1 or query.dtype not in (jnp.bfloat16, jnp.float32):
        names = " and ".join(sorted(map(str, dtypes)))
        return f"the TPU kernels support bfloat16 and float32, and this call has {names}"
    reason = unsupported_sizes(operands, "TPU", LARGEST_HEAD)
    if reason is not None:
        return reason
    T, S = query.shape[1], key.shape[1]
    blocks = ceil_div(T, choose_side(T)) * ceil_div(S, choose_side(S))
    if blocks > MOST_BLOCK_PAIRS:
        return (
            f"the TPU kernels list up to {MOST_BLOCK_PAIRS} tiles in scalar memory, and this call "
            f"has {blocks}"
        )
    return None


def _unsupported_array(operands: Operands) -> str | None:
    """Return a reason if the call has an array that the kernels do not support."""
    terms = operands.logit_params
    if terms.bias is not None:
        return "the TPU kernels do not support `bias`"
    if terms.scale is not None or terms.soft_cap is not None:
        return "the TPU kernels support `scale` and `logits_soft_cap` as numbers, not as arrays"
    if operands.q_offset is not None:
        return "the TPU kernels support `q_offset` as a number, not as an array"
    mask = operands.mask
    if mask is not None and not mask_is_of_tokens(mask):
        return (
            "the TPU kernels support a `mask` of keys [B, 1, 1, S] or of queries [B, 1, T, 1], and "
            "no other"
        )
    return None


def _unsupported_option(problem: Problem, operands: Operands) -> str | None:
    """Return a reason if the call has an option that the kernels do not support."""
    if problem.dropout is not None:
        return "the TPU kernels do not support dropout"
    if problem.score_fn is not None or problem.mask_fn is not None:
        return "the TPU kernels do not support `score_fn` and `mask_fn`"
    if problem.qk_transform is not None:
        return "the TPU kernels do not support `qk_transform`"
    if varies(operands):  # they do not type their results
        return "the TPU kernels inside jax.shard_map need its check_vma=False"
    if operands.origin is not None:
        return "the TPU kernels do not support functions in parts of a sharded call"
    if problem.precision not in (None, lax.Precision.DEFAULT):
        return "the TPU kernels multiply at the default precision and support no `precision`"
    return None


def slower(problem: Problem, operands: Operands) -> str | None:
    """Return why the chunked path is expected to be faster; None if it is not."""
    return too_few_queries(operands, "TPU")


def backward_is_kernel(operands: Operands) -> bool:
    """Return True: kernels compute the gradient of every call whose forward they compute."""
    return True


def fused_is_faster(problem: Problem, operands: Operands) -> bool:
    """Return False: the gradient has two kernels."""
    return False
