"""Attention on Hopper (H100, H200) by Pallas' Mosaic GPU kernels. Hides how they want arrays, and in which tiles.

Heads, those of values as well, are padded to one multiple of 64, lengths to multiples of 8.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import reshard

from memeff.logits import LOG2_E
from memeff.pallas.hopper import backward_common, backward_key, backward_query
from memeff.pallas.hopper.forward import Tiling, attend
from memeff.pallas.hopper.fused import deltas, gradients
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.tangent import Arrays, tangents
from memeff.pallas.hopper.tile_ranges import tiles_visited
from memeff.pallas.partitioning import partitioned
from memeff.pallas.user_functions import calls, extra_gradients
from memeff.problem import Gradients, LogitParams, Operands, Problem
from memeff.sharding import sharding_of_sum, vary_together
from memeff.softmax import Lse, LseFor

MULTIPLE = 64  # of head dims
ROWS_MULTIPLE = 128  # of lse and delta: what a block reads of them is there
TWO_THIRDS_DO = 0.8  # of the logits a second that three warpgroups do
DIMS = "btkgh", "bskh", "bskd"


def describe(problem: Problem, operands: Operands) -> str:
    """The kernels in words."""
    tiling = forward_tiling(problem, operands)
    form = ", the gradient fused into one" if problem.backward == "fused" else ""
    return f"Hopper kernels, tiles of {tiling.rows} x {tiling.keys} logits{form}"


def forward_tiling(problem: Problem, operands: Operands) -> Tiling:
    """The fastest of those that README.md beside this file tells of, at head dims 64 and 128."""
    largest = _width(operands)
    if largest > MULTIPLE:
        return Tiling(2, 128, 2, 2) if largest == 128 else Tiling(2, 64, 2, 1)
    three, two = (Tiling(warpgroups, 128, 3, 2) for warpgroups in (3, 2))
    lengths = operands.query.shape[1], operands.key.shape[1]
    if problem.calls_functions:  # three have 160 registers a thread, and would spill
        return two
    logits = lambda tiling: (
        tiles_visited(problem, lengths, tiling.rows, tiling.keys).sum() * tiling.rows
    )
    return two if logits(two) < TWO_THIRDS_DO * logits(three) else three


def backward_tilings(
    problem: Problem, operands: Operands
) -> tuple[backward_common.Tiling, backward_common.Tiling]:
    """For dq, and for dk and dv."""
    largest = _width(operands)
    if largest == 64:
        both = backward_common.Tiling(2 if problem.calls_functions else 3, 64, 4, 2)
        return both, both
    # What belongs to tokens wants some room, a soft cap and functions want registers.
    marked = operands.q_segments is not None or problem.calls_functions
    of_queries = (2, 64, 3, 1) if marked or problem.soft_cap is not None else (2, 128, 2, 1)
    return backward_common.Tiling(*of_queries), backward_common.Tiling(2, 64, 3, 1 if marked else 2)


def fused_tiling(operands: Operands) -> backward_common.Tiling:
    return backward_common.Tiling(2, 128 if _width(operands) == 64 else 64, 2, 1)


def tangent_tiling(problem: Problem, operands: Operands) -> backward_common.Tiling:
    if _width(operands) == 64:
        return (
            backward_common.Tiling(2, 64, 4, 2)
            if problem.calls_functions
            else backward_common.Tiling(3, 64, 3, 2)
        )
    return backward_common.Tiling(2, 64, 2, 1)


def _width(operands: Operands) -> int:
    """Of all heads, of values as well, in the kernels."""
    largest = max(operands.query.shape[-1], operands.value.shape[-1])
    return -(-largest // MULTIPLE) * MULTIPLE


def _padded(x: Array, width: int) -> Array:
    """B T N H with zeros, up to `width`, and to the next multiple of 8 tokens."""
    more = [(0, 0), (0, -x.shape[1] % 8), (0, 0), (0, width - x.shape[-1])]
    return jnp.pad(x, more) if any(map(any, more)) else x


def _mask_as_segments(operands: Operands) -> Operands:
    """A mask of keys or queries as segments: 0 may attend; hidden keys are -1 before the first of those and 1 behind it, so
    that padding leaves them in order, and hidden queries 2.
    """
    if operands.mask is None:
        return operands
    # B|1 T|1 S|1
    (B, T), S, mask = operands.query.shape[:2], operands.key.shape[1], operands.mask[:, 0, 0]
    queries = keys = jnp.int32(0)
    if mask.shape[1] == 1:
        seen = mask[:, 0]
        before = jnp.arange(seen.shape[1]) < seen.argmax(axis=1, keepdims=True)
        keys = jnp.where(seen, 0, jnp.where(before, -1, 1))
    else:
        queries = jnp.where(mask[:, :, 0], 0, 2)
    of = lambda x, length: jnp.broadcast_to(x, (B, length))
    return operands._replace(mask=None, q_segments=of(queries, T), kv_segments=of(keys, S))


def _scalars(problem: Problem, operands: Operands) -> Scalars:
    """As operands have them: heads are still B K G."""
    B, given = operands.query.shape[0], operands._asdict()
    of_batch = {
        name: given[name]
        for name in ("q_offset", "q_lengths", "kv_lengths")
        if given[name] is not None
    }
    of_batch = {name: jnp.broadcast_to(x, (B,)) for name, x in of_batch.items()}
    numbers = vary_together(calls.precomputed_numbers(problem, operands), operands.query)
    segments = dict(q_segments=operands.q_segments, kv_segments=operands.kv_segments)
    sinks = operands.terms.sinks
    if sinks is not None:
        sinks = vary_together(jnp.broadcast_to(sinks * LOG2_E, (B, *sinks.shape)), operands.query)
    return Scalars(**of_batch, **segments, **numbers._asdict(), sinks=sinks)


def _dims(scalars: Scalars) -> tuple[str, ...]:
    """Of each array of it."""
    of = dict(
        q_segments="bt",
        kv_segments="bs",
        of_heads="bkg",
        sinks="bkg",
        of_queries="bt",
        of_keys="bs",
    )
    of |= dict(of_differences="bkgx")
    return tuple(
        of.get(name, "b") for name, x in scalars._asdict().items() for _ in jax.tree.leaves(x)
    )


def _pad_scalars(scalars: Scalars) -> Scalars:
    """What belongs to tokens as whole tiles want it, and heads in one dim."""
    pad = lambda x: (
        jnp.pad(x, [(0, 0), (0, -x.shape[1] % ROWS_MULTIPLE)], mode="edge") if x.ndim == 2 else x
    )
    return jax.tree.map(lambda x: lax.collapse(x, 1, 3) if x.ndim > 2 else pad(x), scalars)


def forward(
    problem: Problem, operands: Operands, lse_for: LseFor = "caller"
) -> tuple[Array, Lse | None]:
    """out [B, K, G, T, D] in the query's dtype, lse [B, K, G, T]."""
    operands = _mask_as_segments(operands)
    given, structure = jax.tree.flatten(scalars := _scalars(problem, operands))
    on_tiles = calls.tile_functions(problem, operands)

    def call(query, key, value, *more):
        (B, T, K, G, H), D = query.shape, value.shape[-1]
        arrays, lengths = (query.reshape(B, T, K * G, H), key, value), (T, key.shape[1])
        arrays = tuple(_padded(x, _width(operands)) for x in arrays)
        scalars = _pad_scalars(jax.tree.unflatten(structure, more))
        tiling = forward_tiling(problem, operands)
        out, lse = attend(on_tiles, lengths, arrays, scalars, lse_for is not None, tiling)
        out = out[:, :T, :, :D].reshape(B, T, K, G, D).transpose(0, 2, 3, 1, 4)
        return (out,) if lse is None else (out, lse[..., :T].reshape(B, K, G, T))

    dims_out = ("bkgtd", "bkgt") if lse_for else ("bkgtd",)
    found = partitioned(call, (*DIMS, *_dims(scalars)), dims_out)(*operands[:3], *given)
    return found[0], Lse(found[1], None) if lse_for else None


def backward(
    problem: Problem, operands: Operands, out: Array, lse: Lse, dout: Array, dlse: Array | None
) -> Gradients:
    """Gradients from `out`, `dout` [B, K, G, T, D] and `lse`, `dlse` [B, K, G, T] (None: no cotangent)."""
    as_given, operands = operands, _mask_as_segments(operands)
    given, structure = jax.tree.flatten(scalars := _scalars(problem, operands))
    of_queries, of_keys = (
        calls.tile_functions(problem, operands, slopes) for slopes in ("all", "score")
    )
    moving = backward_common.count_score_gradients(of_queries)
    of_rows = [lse.high * LOG2_E - backward_common.float16_lift(operands.query.dtype)] + (
        [] if dlse is None else [dlse]
    )

    def call(query, key, value, out, dout, *more):
        (B, T, K, G, H), (_, S, _, D) = query.shape, value.shape
        rows, scalars = (
            more[: len(of_rows)],
            _pad_scalars(jax.tree.unflatten(structure, more[len(of_rows) :])),
        )
        lse, *dlse = (
            jnp.pad(x.reshape(B, K * G, T), [(0, 0), (0, 0), (0, -T % ROWS_MULTIPLE)]) for x in rows
        )
        heads = lambda x: x.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, D)
        arrays = (query.reshape(B, T, K * G, H), key, value, heads(out), heads(dout))
        query_, key_, value_, out_, dout_ = (_padded(x, _width(operands)) for x in arrays)
        (dlse,) = dlse or (None,)

        def split():
            tilings = backward_tilings(problem, operands)
            arrays = (query_, key_, value_, out_, dout_, lse)
            dq, delta, *sums = backward_query.query_gradient(
                of_queries, (T, S), arrays, dlse, scalars, tilings[0]
            )
            arrays = (query_, key_, value_, dout_, lse, delta)
            return (
                dq,
                *backward_key.key_value_gradient(of_keys, (T, S), arrays, scalars, tilings[1]),
                *sums,
            )

        def fused():
            delta = deltas((T, S), out_, dout_, dlse)
            arrays = (query_, key_, value_, dout_, lse, delta)
            dq, dk, dv, nan_if_bad = gradients(
                problem, (T, S), arrays, scalars, fused_tiling(operands)
            )
            dq = backward_common.undo_lift(
                dq * backward_common.Gradient(problem).slope, query.dtype
            )
            found = dq.astype(query.dtype), dk, dv
            # A loop that runs once or never, for it writes over what is bad; a cond would hold
            # both.
            bad = jnp.isnan(nan_if_bad).any()
            return lax.while_loop(
                lambda state: state[0], lambda _: (jnp.bool_(False), split()), (bad, found)
            )[1]

        dq, dk, dv, *sums = fused() if problem.backward == "fused" else split()
        sums = (x[..., :T].reshape(B, K, G, T) for x in sums)
        return dq[:, :T, :, :H].reshape(query.shape), dk[:, :S, :, :H], dv[:, :S, :, :D], *sums

    dims = *DIMS, "bkgtd", "bkgtd", *["bkgt"] * len(of_rows), *_dims(scalars)
    found = partitioned(call, dims, (*DIMS, *["bkgt"] * moving))(
        *operands[:3], out, dout, *of_rows, *given
    )
    query, key, value, *sums = found
    walk = functools.partial(
        extra_gradients.extra_cotangents, problem, as_given, out, lse, dout, dlse
    )
    return Gradients(
        query, key, value, LogitParams(score=_of_params(problem, operands, of_queries, sums, walk))
    )


def tangent(
    problem: Problem, operands: Operands, out: Array, lse: Lse, along: Operands
) -> tuple[Array, Array]:
    """Tangents of out [B, K, G, T, D] and lse [B, K, G, T] along those of query, key and value (None: 0)."""
    operands = _mask_as_segments(operands)
    given, structure = jax.tree.flatten((along[:3], _scalars(problem, operands)))
    on_tiles = calls.tile_functions(problem, operands, "score")
    moves_logits = along.query is not None or along.key is not None
    # with a sink, whose lse is not what a forward of these kernels found
    shared = lse.low is not None

    def call(query, key, value, out, lse, *more):
        (B, T, K, G, _), S, D = query.shape, key.shape[1], value.shape[-1]
        (dq, dk, dv), scalars = jax.tree.unflatten(structure, more)
        heads = lambda x: None if x is None else x.reshape(B, T, K * G, x.shape[-1])
        by_head = lse.reshape(B, K * G, T)
        rest = (value, heads(out.transpose(0, 3, 1, 2, 4))) if moves_logits else (None, None)
        arrays = heads(query), key, None, *rest, heads(dq), dk, dv
        arrays = Arrays(*(None if x is None else _padded(x, _width(operands)) for x in arrays))
        arrays = arrays._replace(lse=jnp.pad(by_head, [(0, 0), (0, 0), (0, -T % ROWS_MULTIPLE)]))
        tiling = tangent_tiling(problem, operands)
        dout, dlse = tangents(on_tiles, (T, S), arrays, _pad_scalars(scalars), tiling, shared)
        dout = dout[:, :T, :, :D].reshape(B, T, K, G, D).transpose(0, 2, 3, 1, 4)
        return dout, dlse[..., :T].reshape(B, K, G, T)

    moving = (dims for dims, x in zip(DIMS, along[:3], strict=True) if x is not None)
    dims = *DIMS, "bkgtd", "bkgt", *moving, *_dims(_scalars(problem, operands))
    dout, dlse = partitioned(call, dims, ("bkgtd", "bkgt"))(
        *operands[:3], out, lse.high * LOG2_E, *given
    )
    return dout, dlse


def _of_params(
    problem: Problem,
    operands: Operands,
    on_tiles: Problem,
    sums: Sequence[Array],
    walk: Callable[[], Sequence[Array]],
) -> tuple[Array, ...]:
    """Gradients of floats of score_params, from sums over keys, B K G T, of cotangents of what was made of those, and from a
    walk for those that kernels do not sum. XLA drops it where nobody wants what it makes.
    """
    if problem.score_fn is None:
        return ()
    of: Any = lambda floats: calls.differentiable_numbers(
        problem, operands._replace(terms=operands.terms._replace(score=floats))
    )
    made, pull = jax.vjp(of, operands.terms.score)
    over = {"of_heads": 3, "of_queries": (1, 2)}
    score_fn: Any = on_tiles.score_fn
    totals = [x.sum(over[side]) for x, (side, _) in zip(sums, score_fn.moving, strict=True)]
    totals += walk() if calls.needs_extra_pass(problem, operands) else ()
    lay = lambda x, like: x if (there := sharding_of_sum(like)) is None else reshard(x, there)
    (found,) = pull(tuple(map(lay, totals, made)))
    return found
