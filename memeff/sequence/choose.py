"""Choose how a sequence that is sharded over devices is computed, and explain the choice."""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

from memeff.arguments import Strategy
from memeff.device import COPIED_MESSAGES, copies_messages, current_platform
from memeff.implementations import Request
from memeff.inputs import check_choice
from memeff.problem import Operands, Problem
from memeff.sequence.batch_and_heads import Parts
from memeff.sequence.exchange import why_not_exchange
from memeff.sequence.layout import Layout, chunks_of_device
from memeff.sequence.ring import ring_distances
from memeff.shape import round_up
from memeff.units import format_bytes

STRATEGIES: tuple[Strategy, ...] = ("ring", "all_gather", "all_to_all")

# Two H200s with NVLink 4 (18 links), jax 0.11.2: GB/s of one message between neighbours, and those
# that a device receives in an all-gather, by MiB. An all-to-all counts as an all-gather.
MESSAGE_MIB = (4, 16, 64, 256, 512)
NEIGHBOUR_GBPS = (115, 198, 258, 295, 336)
GATHER_GBPS = (33, 120, 218, 242, 259)
# FLOP/s of a forward: the kernels in 16 bits, and what else runs (one H200, heads of 128)
KERNEL_FLOPS = 650e12
OTHER_FLOPS = 60e12


def check_strategy(strategy: Any) -> None:
    """Refuse an unknown strategy; None leaves the choice to memeff."""
    check_choice("context_parallel", strategy, STRATEGIES, optional=True)


class Plan(NamedTuple):
    """The static choices of how a call runs on the devices of a sharded sequence."""

    axes: tuple[str, ...]  # of the mesh, along the sequence, the slowest first
    layout: Layout
    strategy: Strategy
    request: Request  # how each device's parts run


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that matter for the choice: a whole sequence, some batch entries and heads of it.

    `devices` are those along each axis of the sequence.
    """

    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    D: int
    itemsize: int
    devices: tuple[int, ...]

    @property
    def all_devices(self) -> int:
        """Return the number of devices along the sequence."""
        return math.prod(self.devices)


def why_not(
    strategy: Strategy,
    layout: Layout,
    sizes: Sizes,
    problem: Problem,
    operands: Operands,
    request: Request,
) -> str | None:
    """Return None if a strategy can run this call, or else the reason in words."""
    if len(sizes.devices) == 2:
        if strategy != "all_to_all":
            return "of two axes in sequence_axis the first is a ring, and the second all-to-all"
    elif strategy == "all_gather" and layout == "striped":
        return 'gathered keys need sequence_layout="contiguous" or "zigzag"'
    elif strategy == "all_gather" and sizes.S == 0:
        return "there are no keys to gather"
    if strategy != "all_to_all" or len(sizes.devices) == 2:
        if request.implementation == "reference":
            return 'implementation="reference" has no parts: it needs all keys of a head at once'
        if layout == "striped" and problem.left is not None:
            return 'a ring in sequence_layout="striped" supports no left side of a window'
    if strategy != "all_to_all":
        return None
    reason = why_not_exchange(sizes.devices[-1], sizes.N, sizes.K)
    pairs = operands.mask is not None or operands.logit_params.bias is not None
    if reason is None and pairs and sizes.T == sizes.all_devices > 1:
        return "a bias or mask with one query for each device cannot be told from a broadcast one"
    return reason


def choose_strategy(
    layout: Layout,
    sizes: Sizes,
    problem: Problem,
    operands: Operands,
    request: Request,
) -> Strategy:
    """Return the strategy with the least estimated time of those that can run this call.

    Raises: NotImplementedError if none can.
    """
    reasons = {}
    times = {}
    for strategy in STRATEGIES:
        reason = why_not(strategy, layout, sizes, problem, operands, request)
        if reason is None:
            times[strategy] = estimate(strategy, layout, sizes, problem, operands)
        else:
            reasons[strategy] = reason
    if not times:
        lines = "\n".join(f'  "{name}": {reason}.' for name, reason in reasons.items())
        raise NotImplementedError(f"no strategy can run this call on a sharded sequence:\n{lines}")
    return min(times, key=lambda strategy: times[strategy].seconds)


class Estimate(NamedTuple):
    """An estimate of what one forward takes on each device."""

    work: float  # seconds of products
    sending: float  # seconds of messages
    seconds: float  # in all: the ring sends beside its work
    bytes_sent: int


def estimate(
    strategy: Strategy, layout: Layout, sizes: Sizes, problem: Problem, operands: Operands
) -> Estimate:
    """Estimate the time of one forward, from measured bandwidths."""
    P = sizes.all_devices
    pairs = sizes.T * sizes.S
    causal = problem.right is not None
    if problem.left is not None:
        right = sizes.S if problem.right is None else problem.right
        pairs = min(pairs, sizes.T * (problem.left + right + 1))
    elif causal:
        pairs //= 2
    fast = sizes.itemsize == 2
    flops = 2 * sizes.B * sizes.N * pairs * (sizes.H + sizes.D)
    work = flops / (KERNEL_FLOPS if fast else OTHER_FLOPS) / P
    if causal and problem.left is None and layout == "contiguous" and strategy != "all_to_all":
        work *= 2 - 1 / P  # the last device sees all keys
    keys = sizes.B * sizes.S * sizes.K * (sizes.H + sizes.D) * sizes.itemsize // P
    queries = sizes.B * sizes.T * sizes.N * (sizes.H + sizes.D) * sizes.itemsize // P
    match strategy:
        case "ring":
            message = keys / (1e9 * _bandwidth(NEIGHBOUR_GBPS, keys))
            aligned = sizes.T == sizes.S and operands.q_offset is None
            steps = len(ring_distances(layout, P, problem, sizes.T // P if aligned else None))
            beside = max(work / steps, message)
            seconds = work / steps + (steps - 1) * beside
            return Estimate(work, (steps - 1) * message, seconds, (steps - 1) * keys)
        case "all_gather":
            sent = (P - 1) * keys
        case _:
            last = sizes.devices[-1]
            sent = (keys + queries) * (last - 1) // last
            sent += sum(
                _bytes_of_pairs(x, sizes) for x in (operands.mask, operands.logit_params.bias)
            )
    sending = sent / (1e9 * _bandwidth(GATHER_GBPS, sent))
    return Estimate(work, sending, work + sending, sent)


def _bytes_of_pairs(x: Any, sizes: Sizes) -> int:
    """Return the bytes of a mask or a bias that a device receives in an all-to-all.

    It has rows of some tokens for all heads, and needs rows of all tokens for some heads. Rows that
    all heads share are needed whole on every device.
    """
    if x is None or x.shape[2] == 1:
        return 0
    entries, heads, _, columns = x.shape
    last = sizes.devices[-1]
    rows = sizes.T // (sizes.all_devices // last)  # of the devices that exchange heads for tokens
    count = min(entries, sizes.B) * rows * columns
    if heads > 1:
        count = count * sizes.N // last
    return count * x.dtype.itemsize * (last - 1) // last


def _bandwidth(gbps: tuple[int, ...], message: float) -> float:
    """Return the measured GB/s of a message of so many bytes."""
    mib = max(message, 1) / 2**20
    return float(np.interp(math.log(mib), np.log(MESSAGE_MIB), gbps))


def explain_plan(
    plan: Plan, sizes: Sizes, problem: Problem, operands: Operands, chosen: bool
) -> str:
    """Return in words how a sharded sequence is computed, and why not otherwise."""
    over = " and ".join(
        f'{count} devices along "{axis}"'
        for axis, count in zip(plan.axes, sizes.devices, strict=True)
    )
    lines = [
        f'The sequence is sharded over {over}, in layout "{plan.layout}"; '
        f'context_parallel="{plan.strategy}" '
        + ("has the least estimated time." if chosen else "was asked for.")
    ]
    for strategy in STRATEGIES:
        reason = why_not(strategy, plan.layout, sizes, problem, operands, plan.request)
        if reason is not None:
            lines.append(f'"{strategy}": cannot run this call, because {reason}.')
            continue
        took = estimate(strategy, plan.layout, sizes, problem, operands)
        beside = "while it computes" if strategy == "ring" else "before and after that"
        lines.append(
            f'"{strategy}": about {1e3 * took.seconds:.3g} ms a forward on H200s with NVLink; each '
            f"device computes {1e3 * took.work:.3g} ms and sends {format_bytes(took.bytes_sent)} "
            f"in {1e3 * took.sending:.3g} ms, {beside}."
        )
    if plan.layout == "contiguous" and (problem.left, problem.right) == (None, 0):
        lines.append(
            'In causal order the last device has the most work: sequence_layout="zigzag" gives all '
            "devices the same."
        )
    if plan.strategy == "ring" and current_platform() == "gpu" and not copies_messages():
        lines.append(
            "NCCL's kernel takes multiprocessors from the attention kernels. With "
            f"XLA_FLAGS={COPIED_MESSAGES}, set before JAX starts, the GPUs of a process copy "
            "messages instead."
        )
    return "\n".join(lines)


def sizes_of(operands: Operands, shards: int, parts: Parts, devices: tuple[int, ...]) -> Sizes:
    """Return the sizes of a whole sequence, and the batch entries and heads of a device.

    `operands` hold one of `shards` parts of the sequence, and a device has one of `parts` of their
    batch entries and heads. One key head serves all.
    """
    shape = operands.shape
    itemsize: Any = operands.query.dtype.itemsize
    return Sizes(
        shape.B // parts.batch,
        shards * shape.T,
        shards * shape.S,
        shape.N // parts.heads,
        shape.K if shape.K == 1 else shape.K // parts.heads,
        shape.H,
        shape.D,
        itemsize,
        devices,
    )


def check_lengths(sizes: Sizes, layout: Layout) -> None:
    """Refuse lengths that the devices cannot share equally."""
    # of two axes, all-to-all leaves the first to the layout
    parts = chunks_of_device(layout) * sizes.devices[0]
    parts = math.lcm(parts, sizes.all_devices)
    for letter, name, length in (("T", "query", sizes.T), ("S", "key", sizes.S)):
        if length % parts:
            raise ValueError(
                f'{name} has {letter}={length} tokens, and sequence_layout="{layout}" over '
                f"{sizes.all_devices} devices needs a multiple of {parts}: pad to "
                f"{round_up(length, parts)} tokens, and hide the padding with "
                "query_seq_lengths and key_value_seq_lengths."
            )
