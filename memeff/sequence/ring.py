"""Send keys and values round a ring of devices.

With P devices, at step s device r has the keys of device r - s. Gradients of keys are sent one step
after their keys, and at the end to the device of the keys (Liu, Zaharia & Abbeel 2023,
arXiv:2310.01889, section 3). Sums of several steps are sent in float32, gradients of one step in
their own dtype.

Every device sends at every step, even if nobody needs the data, so that no collective is inside a
branch. Each step has one message with keys and gradients. It is sent before the work of the step,
so that it travels while the device computes. Without a barrier XLA:GPU would send all messages
first and wait for them.

In a causal zigzag, two of the four pairs of chunks are visible at a step s > 0, both wholly: late
queries with early keys, and early with early if r >= s, else late with late. The work on the
device's own keys (s = 0) comes first, beside the first message. It is a causal call of all tokens,
or it has two halves: late with early, which is visible wholly, and the two other pairs, which are
causal. The backward has halves unless the gradient of the keys is computed first. The second half
comes last, so that the last gradients are also sent beside work. There are also halves where
positions matter, because the positions of all tokens of a device are not consecutive.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from memeff.order import hold, orders_by_condition
from memeff.problem import Operands, Problem
from memeff.sequence.layout import Layout, chunks_of_device
from memeff.sequence.messages import open_parcels, send_both
from memeff.sequence.parts import (
    Chunk,
    Part,
    Shards,
    cut_part,
    keys_of,
    stack_keys,
)
from memeff.sequence.terms import Term, shorten, sum_terms
from memeff.shape import ceil_div
from memeff.sharding import all_axes_manual

EARLY = Chunk(0, 2)
LATE = Chunk(1, 2)
WHOLE = Chunk()


class Step(NamedTuple):
    """The work between two messages, on the keys of the device that is `distance` before."""

    distance: int  # 0: the keys of this device
    parts: tuple[Part, ...]


def ring_steps(
    shards: Shards, problem: Problem, operands: Operands, splits_home: bool
) -> list[Step]:
    """Return the work of this device, in order.

    With `splits_home`, a causal zigzag ends with half of the work at home.
    """
    P = shards.devices
    r = shards.rank
    shape = operands.shape

    def part(problem: Problem, rows: Chunk, cols: Chunk, s: int) -> Part:
        owner = (r - s) % P
        keys = shape.S // cols.count
        aligned = s == 0 and shape.T == shape.S and rows == cols
        return Part(
            problem,
            rows,
            cols,
            first_query=shards.start(r, rows, shape.T // rows.count),
            first_key=shards.start(owner, cols, keys),
            distance=0 if aligned else None,
            column=owner * shape.S + cols.number * keys,
        )

    lengths = operands.q_lengths is not None or operands.kv_lengths is not None
    if is_balanced(shards, problem, operands):
        free = dataclasses.replace(problem, left=None, right=None)
        splits_home = splits_home or problem.names_positions or lengths
        home = part(free, LATE, EARLY, 0) if splits_home else part(problem, WHOLE, WHOLE, 0)
        steps = [Step(0, (home,))]
        for s in range(1, P):
            same = _matching_chunk(r, s)
            steps.append(Step(s, (part(free, LATE, EARLY, s), part(free, same, same, s))))
        if splits_home:
            diagonal = part(problem, EARLY, EARLY, 0), part(problem, LATE, LATE, 0)
            steps.append(Step(0, diagonal))
        return steps
    pairs = [(WHOLE, WHOLE)]
    if problem.has_window or problem.names_positions or lengths:
        if chunks_of_device(shards.layout) == 2:
            pairs = [(rows, cols) for rows in (EARLY, LATE) for cols in (EARLY, LATE)]
    steps = []
    aligned = shape.T == shape.S and operands.q_offset is None
    for s in ring_distances(shards.layout, P, problem, shape.T if aligned else None):
        parts = [part(problem, rows, cols, s) for rows, cols in pairs]
        steps.append(Step(s, tuple(parts)))
    return steps


def _matching_chunk(rank: Array, distance: int) -> Chunk:
    """Return the chunk, early or late, whose queries on device `rank` see keys of the same chunk.

    The keys are those of the device that is `distance` before, in a causal zigzag.
    """
    return Chunk((distance > rank).astype(jnp.int32), 2)


def is_balanced(shards: Shards, problem: Problem, operands: Operands) -> bool:
    """Return True if every device sees two pairs of chunks in each step: in a causal zigzag."""
    causal = (problem.left, problem.right, problem.q_offset) == (None, 0, 0)
    square = operands.shape.T == operands.shape.S and operands.q_offset is None
    return shards.layout == "zigzag" and causal and square


def ring_distances(layout: Layout, P: int, problem: Problem, T: int | None) -> list[int]:
    """Return the distances, in devices, of keys that the window shows to some of P devices.

    A negative distance is reached against the direction of the ring. T is the number of queries of
    a device, or None if it has another number of keys, or q_offset is an array.
    """
    whole_ring = list(range(P))
    if layout != "contiguous" or not T:
        return whole_ring
    # at distance d, q_pos - k_pos is at least d T + q_offset - (T - 1), at most that + 2 (T - 1)
    first = 1 - P
    last = P - 1
    if problem.right is not None:
        first = max(first, -ceil_div(problem.right + problem.q_offset, T))
    if problem.left is not None:
        last = min(last, ceil_div(problem.left - problem.q_offset, T))
    if first > 0 or last < 0 or last - first + 1 >= P:
        return whole_ring
    return [*range(last + 1), *range(-1, first - 1, -1)]


class Inputs(NamedTuple):
    """The arrays of this device that a visit reads besides the keys that it has received."""

    operands: Operands
    tangents: Operands | None
    rows: Any  # in a backward out, lse and their cotangents, else None


class Results(NamedTuple):
    """The results of the visits so far."""

    state: Any
    new_terms: list[Term]  # of gradients of the keys that this step has received
    kept: list[Term]  # of gradients of this device's own keys


def ring_walk(
    shards: Shards,
    problem: Problem,
    operands: Operands,
    state: Any,
    visit: Any,
    tangents: Operands | None,
    rows: Any,
    after: Any,
    *,
    differentiable: bool,
    join: Callable[..., Operands] | None,
    splits_home: bool,
) -> tuple[Any, Any]:
    """Fold `visit(state, parts, operands, tangents, rows)` over all parts of this device's work.

    In a backward, `rows` are out, lse and their cotangents. Then `visit` returns the new state and
    the gradients of the parts' keys, else the new state and None. Return the state, and the sums of
    these gradients at home, on the device of the keys. Nothing is cut or sent before the arrays
    `after` are known. `differentiable`: JAX can differentiate what this does. `join(parts,
    operands, keys)` makes a call of all parts of a step; without it, a visit has one part.
    `splits_home` is that of `ring_steps`.

    With 3 devices, device r sends and visits:

      step 0   send its own keys to r + 1;                        visit its own keys
      step 1   send the keys of r - 1 to r + 1;                   visit the keys of r - 1
      step 2   send the gradients of the keys of r - 1 to r + 1;  visit the keys of r - 2
      end      send the gradients of the keys of r - 2, of all devices together, to r - 2
    """
    P = shards.devices
    # Where XLA partitions other dims, it would gather them for a message of one dim.
    all_manual = all_axes_manual()
    send = functools.partial(send_both, shards, all_manual and not differentiable)
    assert not join or all_manual and tangents is None

    def visit_group(
        results: Results, distance: int, group: tuple[Part, ...], inputs: Inputs, arrived: Any
    ) -> Results:
        """Visit parts, and add the gradients of their keys to the terms."""
        state, new_terms, kept = results
        keys, key_tangents = arrived
        operands = (join or _cut)(group, inputs.operands, keys)
        input_tangents = None
        if inputs.tangents is not None and key_tangents is not None:
            input_tangents = _cut(group, inputs.tangents, key_tangents, keys)
        state, key_gradients = visit(state, group, operands, input_tangents, inputs.rows)
        if key_gradients is None:
            return Results(state, new_terms, kept)
        term = Term(tuple(part.cols for part in group), key_gradients, distance)
        if distance == 0:
            return Results(state, new_terms, [*kept, term])
        return Results(state, [*new_terms, term], kept)

    def own_keys(inputs: Inputs) -> Any:
        keys = keys_of(inputs.operands)
        tangents = None if inputs.tangents is None else keys_of(inputs.tangents)
        return stack_keys(keys) if join else keys, tangents

    steps = ring_steps(shards, problem, operands, splits_home)
    inputs = later = Inputs(operands, tangents, rows)
    if after is not None:
        # Otherwise XLA would use chunks and messages of the forward again, and keep them until then
        # in every layer.
        _, later = hold(later._replace(rows=None), after)
    if join or any(part.rows.count > 1 for step in steps for part in step.parts):
        inputs = later._replace(rows=rows)  # where nothing is cut, XLA:CPU would copy the operands
    local, first_sent = own_keys(inputs), own_keys(later)
    coming = local  # the keys of the next step
    behind = []  # terms of gradients of keys that travel behind them
    previous = 0  # the distance at which `behind` was computed
    sent = None
    kept = []
    for n, (s, parts) in enumerate(steps):
        is_last = n + 1 == len(steps)
        arrived = coming if s else local
        ahead = 0 if is_last else steps[n + 1].distance
        outgoing, hops = _next_keys(s, ahead, arrived if s else first_sent, first_sent)
        target = s if s * previous > 0 else 0  # where `behind` goes: to its keys, or home
        came = sent if s and outgoing is arrived else None
        travelling = shorten(behind)
        values = [term.value for term in travelling]
        sent, stored = send((outgoing, hops % P), (values, (target - previous) % P), came)
        if came is not None:  # the message holds these keys, and the one that came need not stay
            arrived = stored
        results = Results(state, [], kept)
        for number, group in enumerate([parts] if join else [(part,) for part in parts]):
            # Else XLA:CPU would cut the chunks of all parts before the first. On other devices a
            # barrier would only make it copy the keys out of the message.
            if number and not differentiable and orders_by_condition():
                results, (inputs, arrived) = hold((inputs, arrived), results)
            results = visit_group(results, s, group, inputs, arrived)
        # A barrier would make primals depend on tangents, and JAX could not transpose it. Behind
        # the last step it would only keep XLA from one pass over the new terms.
        if not differentiable and not is_last:
            # queries and rows too, or XLA would cut the chunks of all steps before the first
            results, (sent, inputs) = hold((sent, inputs), results)
        state, behind, kept = results
        previous = s
        values, coming = open_parcels(sent)
        (behind if target else kept).extend(_terms_from(shards, travelling, values, target))
    if behind:
        travelling = shorten(behind)
        values = [term.value for term in travelling]
        sent, _ = send((None, 0), (values, -previous % P))
        kept.extend(_terms_from(shards, travelling, open_parcels(sent)[0], 0))
    return state, sum_terms(kept) if kept else None


def _terms_from(shards: Shards, sent: list[Term], values: list[Any], target: int) -> list[Term]:
    """Return the terms that another device has `sent`, from their values, which came here.

    They belong to the keys of the device that is `target` before this one. The numbers of their
    chunks are those of the device that computed them. They follow from its rank, so nobody sends
    them.
    """
    terms = []
    for term, value in zip(sent, values, strict=True):
        computed_by = (shards.rank - target + term.distance) % shards.devices
        chunks = []
        for chunk in term.chunks:
            known = isinstance(chunk.number, int)
            chunks.append(chunk if known else _matching_chunk(computed_by, term.distance))
        terms.append(Term(tuple(chunks), value, term.distance))
    return terms


def _next_keys(s: int, ahead: int, arrived: Any, local: Any) -> tuple[Any, int]:
    """Return the keys to send between distances `s` and `ahead`, and by how many devices."""
    if ahead == 0:
        return None, 0
    goes_on = s * ahead >= 0  # in the same direction
    return (arrived, ahead - s) if goes_on else (local, ahead)


def _cut(parts: tuple[Part, ...], operands: Operands, keys: Any, primals: Any = None) -> Operands:
    """Return the operands of one part, or their tangents; keys may lack these, not `primals`."""
    (part,) = parts
    size = (primals or keys).key.shape[1] // part.cols.count
    return cut_part(part, operands, keys, size)
