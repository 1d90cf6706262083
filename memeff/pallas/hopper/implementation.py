"""Present the Hopper kernels as an implementation, which imports a kernel only to run it."""

import jax
from jax import Array

# "x as x": x is a function of the family, defined elsewhere
from memeff.pallas.hopper.capability import backward_is_kernel as backward_is_kernel
from memeff.pallas.hopper.capability import for_device as for_device
from memeff.pallas.hopper.capability import fused_is_faster as fused_is_faster
from memeff.pallas.hopper.capability import (
    has_wide_heads,
    reads_bias,
    tangent_is_kernel,
    why_not_decode,
)
from memeff.pallas.hopper.capability import slower as slower
from memeff.pallas.hopper.capability import why_not as why_not
from memeff.pallas.hopper.memory import temp_bytes as temp_bytes
from memeff.pallas.hopper.vocabulary import implementation as vocabulary  # noqa: F401
from memeff.problem import Gradients, Operands, Problem, Schedule
from memeff.softmax import Lse, LseFor


def reads_entries(problem: Problem, operands: Operands) -> bool:
    """Return whether this call's kernels read `operands.entries`, and its forward carries."""
    if reads_bias(operands) or problem.dropout is not None or has_wide_heads(operands):
        return False
    return why_not_decode(problem, operands) is not None


def tile_shape(problem: Problem, operands: Operands) -> tuple[int, int]:
    """Return the rows and columns of the forward's tiles."""
    from memeff.pallas.hopper import calls, decode_calls

    if why_not_decode(problem, operands) is None:
        return decode_calls.tile_shape(operands)
    tiling = calls.forward_tiling(problem, operands)
    return tiling.rows, tiling.keys


def describe(problem: Problem, schedule: Schedule, operands: Operands) -> str:
    """Return a phrase that names the kernels and their tiles."""
    from memeff.pallas.hopper import calls, decode_calls

    if why_not_decode(problem, operands) is None:
        return decode_calls.describe(operands)
    return calls.describe(problem, schedule, operands)


def forward(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    lse_for: LseFor = "caller",
    carried: tuple[tuple[Array, ...], Array] | None = None,
) -> tuple[Array | tuple[Array, ...], Lse | None]:
    """Return out [B, K, G, T, D] and lse [B, K, G, T]; the kernels choose their own tiles.

    With `schedule.partial_out`, out is a tuple of arrays whose sum it is. With `carried`, such an
    out of other keys and its lse, both are those of all keys. It needs `reads_entries`.
    """
    from memeff.pallas.hopper import calls, decode_calls

    if carried is not None:
        return calls.forward(problem, operands, lse_for, schedule.partial_out, carried)
    module = decode_calls if why_not_decode(problem, operands) is None else calls
    return module.forward(problem, operands, lse_for, schedule.partial_out)


def backward(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    out: Array,
    lse: Lse,
    dout: Array,
    dlse: Array | None,
) -> Gradients:
    """Return gradients from `out`, `dout` [B, K, G, T, D] and `lse`, `dlse` [B, K, G, T].

    `dlse` is None if lse has no cotangent. The chunked path computes the gradient of heads beyond
    128 with a bias.
    """
    from memeff.chunked import implementation as chunked
    from memeff.pallas.hopper import calls

    module = calls if backward_is_kernel(operands) else chunked
    return module.backward(problem, schedule, operands, out, lse, dout, dlse)


def tangent(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    out: Array,
    lse: Lse,
    tangents: Operands,
    narrow: bool = True,
) -> tuple[Array, Array]:
    """Return the tangents of `out` [B, K, G, T, D] and `lse` [B, K, G, T].

    A tangent of `tangents` that is None is 0. The chunked path computes the tangents of larger
    heads, of calls with a bias, a dense mask, dropout or float32, those along `LogitParams`, and
    those that are not `narrow`, which JAX differentiates.
    """
    from memeff.chunked import implementation as chunked
    from memeff.chunked.tangent import tangent as differentiable_tangent
    from memeff.pallas.hopper import calls

    term_tangents = jax.tree.leaves(tangents.logit_params)
    array_tangents = jax.tree.leaves(tangents[:3])
    if not narrow:
        return differentiable_tangent(problem, schedule, operands, out, lse, tangents, narrow=False)
    if term_tangents or not array_tangents or not tangent_is_kernel(problem, operands):
        return chunked.tangent(problem, schedule, operands, out, lse, tangents)
    return calls.tangent(problem, operands, out, lse, tangents)
