"""Gather the keys and values of the whole sequence on every device.

Queries stay where they are. Each row meets the keys in the order in which one device would visit
them, so `out` has the bits of one device (Llama 3, arXiv:2407.21783, section 3.3.2). The keys and
values of one layer exist whole on each device, and in the backward their gradients in float32.
"""

from typing import Any

import jax
from jax import Array, lax

from memeff.order import hold
from memeff.problem import Operands, Problem, map_operands
from memeff.sequence.layout import chunks_of_device, layout_order, natural_order
from memeff.sequence.parts import Chunk, Keys, Part, Shards, cut_part, keys_of
from memeff.sequence.terms import Term, sum_terms

MOST_BRANCHES = 16  # devices; each has a branch of its own, which is compiled


def gathered_walk(
    shards: Shards,
    problem: Problem,
    operands: Operands,
    state: Any,
    visit: Any,
    tangents: Operands | None,
    rows: Any,
    branches: bool,
) -> tuple[Any, Any]:
    """Fold `visit(state, parts, operands, tangents, rows)` over the chunks of the device's queries.

    The columns of a mask or a bias are in the order of positions (`columns_in_order`). Each visit
    has one part. `visit` returns the new state, and the gradients of all keys or None. Return the
    state, and the sums of these gradients, each on the device of its keys. With `branches`, each
    device runs a branch in which its positions are numbers, so that it visits the tiles that one
    device would.
    """
    P = shards.devices
    keys = keys_of(operands)
    if rows is not None:
        # Otherwise XLA would keep what the forward gathered, in every layer, for the backward.
        _, lse, dout, _ = rows
        _, keys = hold(keys, (lse, dout))
    whole_keys = _gather(shards, keys)
    whole_tangents = None if tangents is None else _gather(shards, keys_of(tangents))
    size = whole_keys.key.shape[1]
    count = chunks_of_device(shards.layout)

    def visit_chunks(rank: Any, state: Any) -> tuple[Any, Any]:
        terms = []
        for number in range(count):
            chunk = Chunk(number, count)
            first = shards.start(rank, chunk, operands.query.shape[1] // count)
            distance = first if isinstance(first, int) else None
            part = Part(problem, chunk, Chunk(), first, 0, distance)
            inputs = cut_part(part, operands, whole_keys, size)
            input_tangents = None
            if tangents is not None and whole_tangents is not None:
                input_tangents = cut_part(part, tangents, whole_tangents, size)
            state, key_gradients = visit(state, (part,), inputs, input_tangents, rows)
            if key_gradients is not None:
                terms.append(Term((Chunk(),), key_gradients))
        return state, sum_terms(terms) if terms else None

    if branches:

        def branch(rank: int):
            return lambda state: visit_chunks(rank, state)

        state, sums = lax.switch(shards.rank, [branch(rank) for rank in range(P)], state)
    else:
        state, sums = visit_chunks(shards.rank, state)

    def send_home(x: Array) -> Array:
        x = layout_order(x, shards.layout, P, 1)
        return lax.psum_scatter(x, shards.axis, scatter_dimension=1, tiled=True)

    return state, jax.tree.map(send_home, sums)


def _gather(shards: Shards, keys: Keys) -> Keys:
    """Return the arrays of all devices' keys, in the order of their positions."""

    def gather(x: Array) -> Array:
        x = lax.all_gather(x, shards.axis, axis=1, tiled=True)
        return natural_order(x, shards.layout, shards.devices, 1)

    return jax.tree.map(gather, keys)


def columns_in_order(shards: Shards, operands: Operands) -> Operands:
    """Return operands whose mask and bias have their columns in the order of positions."""

    def reorder(x: Array, dims: str) -> Array:
        if dims != "bnts" or x.shape[3] == 1:
            return x
        return natural_order(x, shards.layout, shards.devices, 3)

    return map_operands(reorder, operands)
