"""Present the kernels of a vocabulary's logits, which are imported only to run.

Each reason is a clause that stands behind "because": no capital letter, no period.
"""

import jax
import jax.numpy as jnp
from jax import Array

from memeff.device import Device
from memeff.pallas.hopper.capability import for_device
from memeff.sharding import may_be_sharded
from memeff.softmax import Lse
from memeff.vocabulary.tile import IGNORED, Inputs, Settings, Sums, Tokens, Words

MULTIPLE = 64  # of H and V, because an array is copied in tiles whose rows have 128 bytes
FEWEST_TOKENS = 64  # with fewer, most of a tile is empty


def why_not(inputs: Inputs, precision: jax.lax.PrecisionLike, device: Device) -> str | None:
    """Return why the kernels cannot compute the sums of all tokens; None if they can."""
    reason = for_device(device)
    if reason is not None:
        return reason
    T, H = inputs.x.shape
    V = inputs.kernel.shape[1]
    if inputs.x.dtype != jnp.bfloat16:
        return (
            f"the Hopper kernels of this loss support bfloat16, and this call has {inputs.x.dtype}"
        )
    if H % MULTIPLE or V % MULTIPLE or 0 in (H, V):
        return (
            f"the Hopper kernels of this loss need H and V that are multiples of {MULTIPLE}, and "
            f"this call has H={H}, V={V}"
        )
    if T < FEWEST_TOKENS:
        return f"a tile of the Hopper kernels would be mostly empty with {T} tokens"
    if inputs.soft_cap is not None:
        return "the Hopper kernels support `logits_soft_cap` as a number, not as an array"
    if precision is not None:
        return "the Hopper kernels support no `precision`"
    if may_be_sharded():
        return "the Hopper kernels of this loss run on one device, or inside jax.shard_map"
    return None


def sums(
    settings: Settings, inputs: Inputs, labels: Array
) -> tuple[Array, Array, Array, Array | None]:
    """Return m, l, hit and total of all words, each [T]; total is None unless wanted."""
    from memeff.pallas.hopper.vocabulary import calls

    m, l, hit, total = calls.sums(settings, inputs, labels)
    if not settings.has_ignored:
        return m, l, hit, total
    counts = labels != IGNORED  # others may hold NaN
    if total is not None:
        total = jnp.where(counts, total, 0)
    return jnp.where(counts, m, -jnp.inf), jnp.where(counts, l, 0), jnp.where(counts, hit, 0), total


def cotangents(settings: Settings, tokens: Tokens, words: Words, lse: Lse, dsums: Sums) -> Array:
    """Return d_raw [t, c] of a tile without bias, in the dtype of x."""
    from memeff.pallas.hopper.vocabulary import calls

    return calls.cotangents(settings, tokens, words, lse, dsums)


def keeps_probabilities(settings: Settings, inputs: Inputs) -> bool:
    """Return whether `kept_probabilities` supports a call."""
    return inputs.bias is None and settings.soft_cap is None


def kept_probabilities(settings: Settings, tokens: Tokens, words: Words):
    """Return m, l, hit and total, each [t], of all words, and a function.

    The function maps lse and the cotangents of the sums to d_raw [t, V], from probabilities that
    are kept in 16 bits.
    """
    from memeff.pallas.hopper.vocabulary import calls

    return calls.kept_probabilities(settings, tokens, words)
