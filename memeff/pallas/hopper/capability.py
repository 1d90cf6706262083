"""Decide which calls the Hopper kernels can run, and where they are faster.

Each reason is a clause that stands behind "because": no capital letter, no period.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from memeff.device import Device
from memeff.masking import mask_is_of_tokens
from memeff.pallas.reasons import FEWEST_QUERIES, too_few_queries, unsupported_sizes
from memeff.pallas.user_functions import calls
from memeff.problem import Operands, Problem
from memeff.stored import StoredKeys

LARGEST_HEAD = 256
LARGEST_HEAD_FLOAT32 = 128
# Tangents, the fused gradient and that of a call with a bias support heads up to this. Beyond, the
# chunked path computes tangents and the gradients of a call with a bias, from the kernel's out and
# lse.
LARGEST_HEAD_NARROW = 128
BIAS_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
# Names of precisions that are coarser than three products in bfloat16, or are those.
COARSE_PRECISIONS = (
    "default",
    "fastest",
    "bfloat16",
    "bf16_bf16_f32",
    "tensorfloat32",
    "tf32_tf32_f32",
    "high",
    "bfloat16_3x",
    "bf16_bf16_f32_x3",
)
MOST_DECODE_ROWS = 128  # queries, times the heads of a group: two tiles of the decode kernel
# Tokens of a page must be a multiple of this, because a copy brings 8 rows of 16 bytes or more to
# shared memory, and 128 bytes or more of scales.
PAGE_MULTIPLE = 8
PAGE_MULTIPLE_OF_SCALES = 32
MOST_DECODE_VECTORS = 4  # numbers of user functions for each key, for which shared memory is left


def for_device(device: Device) -> str | None:
    """Return why the kernels do not run on `device`; None if they do."""
    if device.platform == "cpu":
        return "kernels need a GPU or a TPU, and this device is a cpu"
    if device.platform != "gpu":
        return f"the Hopper kernels need a Hopper GPU, and this device is a {device.platform}"
    if device.capability != "9.0":
        return (
            "the Hopper kernels need a GPU of compute capability 9.0 (H100, H200), and this one "
            f"has {device.capability}"
        )
    if jax.__version_info__[:2] < (0, 11):
        return f"the Hopper kernels need jax 0.11 or later, and this is jax {jax.__version__}"
    return None


def why_not(
    problem: Problem, operands: Operands, device: Device, fused: bool = False
) -> str | None:
    """Return why the kernels cannot run a call, forward and gradient; None if they can."""
    return (
        for_device(device)
        or _unsupported_shape(operands)
        or unsupported_option(problem, operands, "Hopper")
        or _unsupported_in_float32(problem, operands)
        or (unsupported_by_fused(problem, operands) if fused else None)
        or calls.why_not(problem, operands)
        or _unsupported_storage(problem, operands)
    )


def _unsupported_shape(operands: Operands) -> str | None:
    """Return a reason if the kernels do not support the lengths, the dtype or the head dims."""
    dtype = operands.query.dtype
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return (
            f"the Hopper kernels support bfloat16, float16 and float32, and this call has {dtype}"
        )
    return unsupported_sizes(operands, "Hopper", LARGEST_HEAD)


def _unsupported_in_float32(problem: Problem, operands: Operands) -> str | None:
    """Return a reason if the call is in float32 and asks for what only 16 bits have."""
    if operands.query.dtype != jnp.float32:
        return None
    H, D = operands.query.shape[-1], operands.value.shape[-1]
    if max(H, D) > LARGEST_HEAD_FLOAT32:
        return (
            f"the Hopper kernels support heads of up to {LARGEST_HEAD_FLOAT32} in float32, and "
            f"this call has H={H}, D={D}"
        )
    if asks_for_float32(problem.precision):
        return (
            "the Hopper kernels compute float32 to 16 bits, and this call asks for a higher "
            "precision"
        )
    if reads_bias(operands):
        return "the Hopper kernels support `bias` and dense masks in 16 bits, not in float32"
    return None


def asks_for_float32(precision: Any) -> bool:
    """Return whether a precision of products asks for more than three bfloat16 products give.

    A `lax.DotAlgorithm` of the caller's own, which has no name, counts as such.
    """
    if precision is None:
        config: Any = jax.config
        precision = config.jax_default_matmul_precision or "default"
    both = precision if isinstance(precision, tuple) else (precision,)
    names = (getattr(x, "name", x) for x in both)
    return not all(isinstance(x, str) and x.lower() in COARSE_PRECISIONS for x in names)


def unsupported_option(problem: Problem, operands: Operands, family: str) -> str | None:
    """Return a reason if the call has an argument that the kernels of `family` do not support."""
    kernels = f"the {family} kernels"
    if problem.dropout is not None and problem.dropout.bits != "mix32":
        return (
            f'{kernels} support dropout with dropout_bits="mix32", and this call draws Flax\'s own '
            "bits"
        )
    if operands.origin is not None:
        return f"{kernels} do not support functions in parts of a sharded call"
    if reason := _unsupported_bias(operands):
        return f"{kernels} support {reason}"
    if problem.qk_transform is not None:
        return f"{kernels} do not support `qk_transform`"
    return None


def _unsupported_bias(operands: Operands) -> str | None:
    """Return a reason if kernels do not support the bias, or the mask that becomes one.

    It stands behind "the kernels support".
    """
    bias = operands.logit_params.bias
    mask = operands.mask
    if bias is None:
        return None
    if bias.dtype not in BIAS_DTYPES:
        return f"a `bias` in bfloat16, float16 and float32, and this call has {bias.dtype}"
    if mask is None or not mask_becomes_bias(operands):
        return None
    if jnp.broadcast_shapes(mask.shape, bias.shape) == bias.shape:
        return None
    return (
        f"a `mask` that broadcasts to the shape of `bias`, and this call has mask {mask.shape} and "
        f"bias {bias.shape}"
    )


def unsupported_by_fused(problem: Problem, operands: Operands) -> str | None:
    """Return a reason if the kernels cannot compute the gradient as one."""
    H, D = operands.query.shape[-1], operands.value.shape[-1]
    if has_wide_heads(operands):
        return (
            f'backward="fused" supports heads of up to {LARGEST_HEAD_NARROW}, and this call has '
            f"H={H}, D={D}"
        )
    if operands.query.dtype == jnp.float32:
        return 'backward="fused" supports 16 bits, and this call has float32'
    if problem.has_pair_functions:
        return 'backward="fused" does not support `score_fn` and `mask_fn`'
    if problem.dropout is not None:
        return 'backward="fused" does not support dropout'
    if reads_bias(operands):
        return 'backward="fused" does not support `bias` and dense masks'
    terms = operands.logit_params
    if terms.scale is not None or terms.soft_cap is not None:
        return 'backward="fused" supports `scale` and `logits_soft_cap` as numbers, not as arrays'
    return None


def _unsupported_storage(problem: Problem, operands: Operands) -> str | None:
    """Return a reason if the kernels do not support how keys and values are stored."""
    if not isinstance(operands.key, StoredKeys):
        return None
    reason = why_not_decode(problem, operands)
    if reason is None:
        return None
    return (
        "keys in pages or in 8 bits are read by the Hopper kernels for decoding alone, and their "
        f"decode kernel {reason}"
    )


def mask_becomes_bias(operands: Operands) -> bool:
    """Return True if the kernels read the mask as a bias of 0 and -inf.

    They read a mask of keys or of queries as segment ids, unless the call has its own.
    """
    mask = operands.mask
    return mask is not None and (operands.q_segments is not None or not mask_is_of_tokens(mask))


def reads_bias(operands: Operands) -> bool:
    """Return True if the kernels read a bias, which may also stand for a mask."""
    return operands.logit_params.bias is not None or mask_becomes_bias(operands)


def slower(problem: Problem, operands: Operands) -> str | None:
    """Return why the chunked path is faster where both can run; None if it is not."""
    is_empty = too_few_queries(operands, "Hopper")
    reason = why_not_decode(problem, operands)
    if is_empty is None or reason is None:
        return None
    return f"{is_empty}, and their decode kernel {reason}"


def why_not_decode(problem: Problem, operands: Operands) -> str | None:
    """Return why the decode kernel cannot run a call that the other kernels can; None if it can.

    The reason stands behind "their decode kernel".
    """
    shape = operands.shape
    T, S, H, D = shape.T, shape.S, shape.H, shape.D
    rows = T * shape.G
    if T >= FEWEST_QUERIES or rows > MOST_DECODE_ROWS:
        return (
            f"supports up to {MOST_DECODE_ROWS} rows, queries times heads of a group, and this "
            f"call has {rows}"
        )
    if operands.query.dtype == jnp.float32:
        return "supports 16 bits, and this call has float32"
    if not {H, D} <= {64, 128}:
        return (
            f"reads keys and values in place and supports heads of 64 and 128, and this call has "
            f"H={H}, D={D}"
        )
    if S % 8:
        return (
            "reads keys and values in place and supports lengths that are multiples of 8, and this "
            f"call has S={S}"
        )
    if isinstance(operands.key, StoredKeys):
        reason = _why_not_stored(operands.query.dtype, operands.key, operands.value)
        if reason is not None:
            return reason
    if problem.dropout is not None:
        return "does not support dropout"
    if reads_bias(operands):
        return "does not support `bias` and dense masks"
    vectors, differences, _ = calls.count_numbers(problem, operands)
    if differences:
        return "does not support functions that read a table of distances"
    if vectors[1] > MOST_DECODE_VECTORS:
        return (
            f"supports {MOST_DECODE_VECTORS} numbers for each key, and this call has {vectors[1]}"
        )
    return None


def _why_not_stored(dtype: DTypeLike, key: StoredKeys, value: Any) -> str | None:
    """Return why the decode kernel cannot read these keys and values; None if it can."""
    has_scales = key.scales is not None
    if has_scales != (value.scales is not None):
        return "supports 8 bits for keys and values together, and this call has them for one alone"
    if has_scales and dtype != jnp.bfloat16:
        return f"supports keys in 8 bits for queries in bfloat16, and this call has {dtype}"
    if key.table is None:
        return None
    page = key.values.shape[1]
    multiple = PAGE_MULTIPLE_OF_SCALES if has_scales else PAGE_MULTIPLE
    if page % multiple:
        bits = " of 8 bits" if has_scales else ""
        return (
            f"supports pages{bits} whose size is a multiple of {multiple} tokens, and this call "
            f"has pages of {page}"
        )
    return None


def has_wide_heads(operands: Operands) -> bool:
    """Return whether heads are beyond LARGEST_HEAD_NARROW."""
    return max(operands.query.shape[-1], operands.value.shape[-1]) > LARGEST_HEAD_NARROW


def backward_is_kernel(operands: Operands) -> bool:
    """Return whether kernels compute the gradient. With wide heads they read no bias."""
    return not (has_wide_heads(operands) and reads_bias(operands))


def tangent_is_kernel(problem: Problem, operands: Operands) -> bool:
    """Return whether a kernel computes tangents by query, key and value."""
    in_16_bits = operands.query.dtype.itemsize == 2
    more = problem.dropout is not None or reads_bias(operands)
    return in_16_bits and not more and not has_wide_heads(operands)


# Forward + gradient, H200, bfloat16 (docs/kernels.md has the cases): in all that were measured from
# these bounds on, one kernel was 1 to 37 % faster than two. With half the keys it was between 3 %
# slower and 23 % faster, with fewer mostly slower. Calls with fewer logits were not measured.
FUSED_KEYS = 4096  # keys that a query sees on average
FUSED_LOGITS = 2**26  # visible logits of all heads
# thread blocks of a call in causal order with heads of 128; calls with half of them were 0 to 7 %
# slower in one kernel
FUSED_BLOCKS = 512
FUSED_BLOCK_KEYS = 128  # keys that a thread block owns


def fused_is_faster(problem: Problem, operands: Operands) -> bool:
    """Return whether the gradient in one kernel was measured to be faster than in two.

    Return False for what was not measured.
    """
    if not _fused_was_measured(problem, operands):
        return False
    shape = operands.shape
    is_causal = problem.right == 0
    keys = shape.S / 2 if is_causal else shape.S
    blocks = shape.B * shape.K * -(-shape.S // FUSED_BLOCK_KEYS)
    logits = shape.B * shape.N * shape.T * keys
    has_blocks = not is_causal or shape.H == 64 or blocks >= FUSED_BLOCKS
    return keys >= FUSED_KEYS and logits >= FUSED_LOGITS and has_blocks


def _fused_was_measured(problem: Problem, operands: Operands) -> bool:
    """Return whether calls of this kind were measured with the gradient in one kernel."""
    arrays = (
        operands.mask,
        operands.q_lengths,
        operands.kv_lengths,
        operands.q_offset,
        operands.q_segments,
        *operands.logit_params[:3],
    )
    if (
        operands.query.dtype == jnp.float32
        or problem.has_pair_functions
        or problem.dropout is not None
        or any(x is not None for x in arrays)
    ):
        return False
    if problem.left is not None or problem.right not in (None, 0) or problem.q_offset != 0:
        return False
    shape = operands.shape
    if problem.right == 0 and shape.T != shape.S:
        return False
    H = shape.H
    return H == shape.D and (H == 128 or H == 64 and problem.soft_cap is None)
