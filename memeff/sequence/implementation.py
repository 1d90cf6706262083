"""Compute attention for one device of a sharded sequence, by another implementation's parts.

  (1) forward:  out, lse = merge over parts of forward(queries here, keys that come), in float32
  (2) tangent:  the sum over parts of tangent(...), each from the final out and lse
  (3) backward: the sum over parts of backward(...), each from the final out and lse

So what a part supports, the whole supports, in both modes and every order.

In a causal zigzag ring whose parts run in the kernels (`joins`), the kernels are called once for
each step instead of once for each part. In the forward they update out and lse of all keys so far
(`carry`), so that no results are merged. In the backward the parts are batch entries of the call.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from memeff import dispatch
from memeff.arguments import Strategy
from memeff.chunked import tangent as chunked_tangent
from memeff.chunked.schedule import has_array_bounds
from memeff.implementations import Chosen, Request
from memeff.problem import Gradients, Operands, Problem, Schedule, accumulator_dtype
from memeff.sequence.gathered import MOST_BRANCHES, gathered_walk
from memeff.sequence.parts import (
    Part,
    Shards,
    add_logit_params,
    count_keys_seen,
    halve_rows,
    join_halves,
    join_parts,
    join_rows,
    keys_of,
    place_part,
    stack_keys,
)
from memeff.sequence.ring import is_balanced, ring_steps, ring_walk
from memeff.sequence.terms import (
    Term,
    add_term,
    add_values,
    combine_terms,
    merge_values,
    sum_terms,
)
from memeff.sharding import all_axes_manual
from memeff.softmax import Lse, LseFor, lse_with_sinks

# The operands that `join_parts` can give to a call of several parts
READ_IN_PLACE = dict.fromkeys(("query", "key", "value", "q_segments", "kv_segments"))


@dataclasses.dataclass(frozen=True)
class Sharded:
    """An implementation for the operands of one device, inside shard_map."""

    strategy: Strategy  # "ring" or "all_gather"
    shards: Shards
    request: Request  # how the parts run

    def forward(
        self,
        problem: Problem,
        schedule: Schedule,
        operands: Operands,
        lse_for: LseFor = "caller",
    ) -> tuple[Array, Lse]:
        """Return out [B, K, G, T, D] in the query's dtype, and lse [B, K, G, T]: (1)."""
        del schedule
        in_parts = self.strategy == "ring"  # each row gets its keys in several parts
        params = operands.logit_params
        sinks = params.sinks if in_parts else None
        if in_parts:
            lse_for = "caller"
            operands = operands._replace(logit_params=params._replace(sinks=None))

        def visit(terms, parts: tuple[Part, ...], inputs: Operands, _tangents, _rows):
            chosen, inputs = self.choose(parts, inputs)
            term = Term(tuple(part.rows for part in parts), _forward(chosen, lse_for, inputs))
            return add_term(merge_values, terms, term, 3), None

        if self.joins(problem, operands, join_rows) is not None:
            outs, lse = self.carry(problem, operands, partial_out=sinks is not None)
        else:
            terms, _ = self.walk(problem, operands, [], visit)
            outs, lse = combine_terms(merge_values, terms, 3)
        out = outs[0]
        if len(outs) > 1 or sinks is not None:
            out = functools.reduce(operator.add, [x.astype(lse.high.dtype) for x in outs])
        if sinks is not None:
            total, _ = lse_with_sinks(lse, sinks)
            assert lse.low is not None and total.low is not None  # both have two floats
            share = jnp.exp((lse.high - total.high) + (lse.low - total.low))
            out = out * share[..., None]
        return out.astype(operands.query.dtype), lse

    def carry(
        self, problem: Problem, operands: Operands, partial_out: bool
    ) -> tuple[tuple[Array, ...], Lse]:
        """Return arrays whose sum is out, and lse. The kernels of each step update both.

        There is one array, in the query's dtype, unless `partial_out`.
        """
        steps_left = iter(reversed(range(self.shards.devices)))

        def visit(carried, parts: tuple[Part, ...], inputs: Operands, _tangents, _rows):
            chosen, inputs = self.choose(parts, inputs)
            is_partial = next(steps_left) > 0 or partial_out
            schedule = dataclasses.replace(chosen.schedule, partial_out=is_partial)
            if carried is not None:
                inputs = inputs._replace(kv_lengths=count_keys_seen(parts, inputs))
                if carried[1].shape[0] < inputs.query.shape[0]:  # of the work at home
                    carried = jax.tree.map(halve_rows, carried)
            outs, lse = _forward(chosen._replace(schedule=schedule), "caller", inputs, carried)
            return (outs, lse.high), None

        (outs, lse), _ = self.walk(problem, operands, None, visit, join=join_rows)
        if self.shards.devices > 1:
            outs, lse = jax.tree.map(join_halves, (outs, lse))
        return outs, Lse(lse, jnp.zeros_like(lse))

    def backward(
        self,
        problem: Problem,
        schedule: Schedule,
        operands: Operands,
        out: Array,
        lse: Lse,
        dout: Array,
        dlse: Array | None,
    ) -> Gradients:
        """Return the gradients of the operands of this device: (3)."""
        del schedule
        dtype = accumulator_dtype(operands)
        home = self.joins(problem, operands, join_parts)
        joins = home is not None
        # One array for the gradients of keys and values. With more devices these are packed with
        # keys, and would take 10 % more memory.
        joins_gradients = joins and self.shards.devices == 2
        # The last gradients of keys travel beside dq of the same step, or beside work at home.
        keys_first = home is not None and not home.schedule.fused_backward
        steps_left = iter(reversed(range(self.shards.devices)))

        def visit(state, parts: tuple[Part, ...], inputs: Operands, _tangents, rows):
            dqueries, dparams = state
            chosen, inputs = self.choose(parts, inputs)
            schedule = dataclasses.replace(chosen.schedule, joined_gradients=joins_gradients)
            if keys_first and next(steps_left) == 0 and parts[1:]:
                schedule = dataclasses.replace(schedule, fused_backward=False, keys_first=True)
            chosen = chosen._replace(schedule=schedule)
            gradients = _backward(chosen, inputs, *_rows_of(parts, rows, joins))
            term = Term(tuple(part.rows for part in parts), gradients.query)
            dqueries = add_term(add_values, dqueries, term, 1)
            if not joins:
                dparams = add_logit_params(parts[0], dparams, gradients.logit_params)
            if joins_gradients:
                return (dqueries, dparams), _joined_gradients(gradients)
            return (dqueries, dparams), (gradients.key, gradients.value)

        def zeros(x: Array) -> Array:
            return jnp.zeros_like(x, dtype)

        dparams = jax.tree.map(zeros, operands.logit_params)
        rows = out, lse, dout, dlse
        (dqueries, dparams), key_gradients = self.walk(
            problem,
            operands,
            ([], dparams),
            visit,
            rows=rows,
            after=None if joins else (lse, dout),
            join=join_parts if joins else None,
            splits_home=not keys_first,
        )
        if joins_gradients:
            key_gradients = jnp.split(key_gradients, 2, axis=2)
        dkey, dvalue = key_gradients
        return Gradients(sum_terms(dqueries), dkey, dvalue, dparams)

    def tangent(
        self,
        problem: Problem,
        schedule: Schedule,
        operands: Operands,
        out: Array,
        lse: Lse,
        tangents: Operands,
        narrow: bool = True,
    ) -> tuple[Array, Array]:
        """Return the tangents of out and lse: (2). JAX can differentiate it unless `narrow`."""
        del schedule
        dtype = accumulator_dtype(operands)

        def visit(
            state, parts: tuple[Part, ...], inputs: Operands, input_tangents: Operands, _rows
        ):
            (part,) = parts
            chosen, inputs = self.choose(parts, inputs)
            out_rows, lse_rows = jax.tree.map(
                lambda x: part.rows.pick(x, 3), (out.astype(dtype), lse)
            )
            new = chunked_tangent.tangent(
                chosen.problem,
                chosen.schedule,
                inputs,
                out_rows,
                lse_rows,
                input_tangents,
                narrow,
            )
            return jax.tree.map(lambda x, y: part.rows.add(x, y, 3), state, new), None

        start = jnp.zeros_like(out, dtype), jnp.zeros_like(lse.high)
        after = (out, lse) if narrow else None
        (dout, dlse), _ = self.walk(
            problem, operands, start, visit, tangents, after=after, narrow=narrow
        )
        return dout.astype(out.dtype), dlse

    def joins(
        self, problem: Problem, operands: Operands, join: Callable[..., Operands]
    ) -> Chosen | None:
        """Return what runs the work on own keys if `join` can make one call of parts, else None."""
        shards = self.shards
        if self.strategy != "ring" or not is_balanced(shards, problem, operands):
            return None
        params = operands.logit_params._replace(sinks=None)  # `forward` applies sinks at the end
        rest = operands._replace(logit_params=params, **READ_IN_PLACE)
        if problem.names_positions or jax.tree.leaves(rest):
            return None
        if operands.key.shape != operands.value.shape or operands.key.dtype != operands.value.dtype:
            return None
        if not all_axes_manual():
            return None
        keys = stack_keys(keys_of(operands))
        steps = ring_steps(shards, problem, operands, splits_home=False)
        # the work at home, and a step: all others have the shape of that
        calls = [self.choose(x.parts, join(x.parts, operands, keys)) for x in steps[:2]]
        for chosen, inputs in calls:
            if chosen.name != "pallas" or not chosen.module.reads_entries(chosen.problem, inputs):
                return None
        return calls[0][0]

    def choose(self, parts: tuple[Part, ...], inputs: Operands) -> tuple[Chosen, Operands]:
        """Return what runs parts, and their operands with lengths, offset and origin."""
        problem, inputs = place_part(self.shards, parts[0], inputs)
        chosen = dispatch.choose_implementation(problem, inputs, self.request, warn=False)
        schedule = dataclasses.replace(chosen.schedule, partial_out=True)
        return chosen._replace(schedule=schedule), inputs

    def walk(
        self,
        problem: Problem,
        operands: Operands,
        state: Any,
        visit: Any,
        tangents: Operands | None = None,
        rows: Any = None,
        after: Any = None,
        narrow: bool = True,
        join: Callable[..., Operands] | None = None,
        splits_home: bool = False,
    ) -> tuple[Any, Any]:
        """Fold `visit` over the parts, as `ring_walk` and `gathered_walk` describe it."""
        if self.strategy == "ring":
            return ring_walk(
                self.shards,
                problem,
                operands,
                state,
                visit,
                tangents,
                rows,
                after,
                differentiable=not narrow,
                join=join,
                splits_home=splits_home,
            )
        branches = problem.has_window and not has_array_bounds(problem, operands)
        branches &= self.shards.devices <= MOST_BRANCHES
        return gathered_walk(self.shards, problem, operands, state, visit, tangents, rows, branches)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    chosen: Chosen, lse_for: LseFor, operands: Operands, carried: Any = None
) -> tuple[tuple[Array, ...], Lse]:
    """Return a tuple of arrays whose sum is out of a part, and its lse.

    With `carried`, both are those of all keys so far.
    """
    problem, schedule, module = chosen
    more = () if carried is None else (carried,)
    out, lse = module.forward(problem, schedule, operands, lse_for, *more)
    out = out if isinstance(out, tuple) else (out,)
    if lse is None:  # nobody reads it, and each row has one part
        rows = out[0][..., 0].astype(accumulator_dtype(operands))
        lse = Lse(jnp.zeros_like(rows), None)
    return out, Lse(lse.high, jnp.zeros_like(lse.high) if lse.low is None else lse.low)


def _rows_of(parts: tuple[Part, ...], rows: Any, joins: bool) -> Any:
    """Return the rows of the queries of parts; if `joins`, as batch entries of one call."""
    if not joins:
        return jax.tree.map(functools.partial(parts[0].rows.pick, dim=3), rows)
    return jax.tree.map(halve_rows, rows) if parts[0].rows.count == 2 else rows


def _joined_gradients(gradients: Gradients) -> Array:
    """Return the gradients of keys and values as one array [B, S, 2K, H]."""
    if gradients.value is None:
        return gradients.key  # the kernels have stored both there
    return jnp.concatenate((gradients.key, gradients.value), axis=2)


@functools.partial(jax.jit, static_argnums=0)
def _backward(chosen: Chosen, operands: Operands, out, lse, dout, dlse) -> Gradients:
    """Return the gradients of a part."""
    problem, schedule, module = chosen
    return module.backward(problem, schedule, operands, out, lse, dout, dlse)
