"""Present the Ampere kernels as an implementation, which imports them only to run one."""

from jax import Array

# "x as x": x is a function of the family, defined elsewhere
from memeff.chunked.tangent import tangent as tangent  # from the kernels' out and lse
from memeff.pallas.ampere.capability import backward_is_kernel as backward_is_kernel
from memeff.pallas.ampere.capability import for_device as for_device
from memeff.pallas.ampere.capability import fused_is_faster as fused_is_faster
from memeff.pallas.ampere.capability import slower as slower
from memeff.pallas.ampere.capability import why_not as why_not
from memeff.pallas.hopper import memory
from memeff.problem import Gradients, Operands, Problem, Schedule
from memeff.softmax import Lse, LseFor

vocabulary = None  # plain JAX computes the loss of a large vocabulary


def reads_entries(problem: Problem, operands: Operands) -> bool:
    """Return False: the kernels do not read `operands.entries`."""
    return False


def tile_shape(problem: Problem, operands: Operands) -> tuple[int, int]:
    """Return the rows and columns of the forward's tiles."""
    from memeff.pallas.ampere import calls

    rows, keys = calls.forward_tiling(operands)
    return rows, keys


def describe(problem: Problem, schedule: Schedule, operands: Operands) -> str:
    """Return a phrase that names the kernels and their tiles."""
    from memeff.pallas.ampere import calls

    return calls.describe(schedule, operands)


def temp_bytes(problem: Problem, schedule: Schedule, operands: Operands) -> tuple[int, int]:
    """Return the temporary bytes of a forward, and those of forward and gradient in one call."""
    from memeff.pallas.ampere.backward import KEY_BLOCKS

    return memory.temp_bytes(problem, schedule, operands, KEY_BLOCKS)


def forward(
    problem: Problem, schedule: Schedule, operands: Operands, lse_for: LseFor = "caller"
) -> tuple[Array | tuple[Array, ...], Lse | None]:
    """Return out [B, K, G, T, D] and lse [B, K, G, T]; the kernels choose their own tiles.

    With `schedule.partial_out`, out is a tuple of arrays whose sum it is.
    """
    from memeff.pallas.ampere import calls

    return calls.forward(problem, operands, lse_for, schedule.partial_out)


def backward(
    problem: Problem,
    schedule: Schedule,
    operands: Operands,
    out: Array,
    lse: Lse,
    dout: Array,
    dlse: Array | None,
) -> Gradients:
    """Return gradients from `out`, `dout` [B, K, G, T, D] and `lse`, `dlse` [B, K, G, T]."""
    from memeff.pallas.ampere import calls

    return calls.backward(problem, schedule, operands, out, lse, dout, dlse)
