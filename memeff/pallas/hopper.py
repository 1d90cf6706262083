"""Attention on Hopper (H100, H200) by Pallas' Mosaic GPU kernels. Hides how they want arrays, and in which tiles.

Heads, those of values as well, are padded to one multiple of 64, lengths to multiples of 8.
"""

import jax.numpy as jnp
from jax import Array, lax

from memeff.pallas import hopper_backward, hopper_forward, hopper_fused
from memeff.pallas.mapped import mapped
from memeff.pallas.walk import Scalars, tiles_visited
from memeff.problem import LOG2_E, Gradients, Lse, LseFor, Operands, Problem, Terms

MULTIPLE = 64  # of head dims
ROWS_MULTIPLE = 128  # of lse and delta: what a block reads of them is there
TWO_THIRDS_DO = 0.8  # of the logits a second that three warpgroups do
DIMS = "btkgh", "bskh", "bskd"


def how(problem: Problem, operands: Operands) -> str:
    """The kernels in words."""
    tiling = forward_tiling(problem, operands)
    form = ", the gradient fused into one" if problem.backward == "fused" else ""
    return f"Hopper kernels, tiles of {tiling.rows} x {tiling.keys} logits{form}"


def forward_tiling(problem: Problem, operands: Operands) -> hopper_forward.Tiling:
    """The fastest of those that README.md beside this file tells of, at head dims 64 and 128."""
    largest = _width(operands)
    if largest > MULTIPLE:
        return hopper_forward.Tiling(2, 128, 2, 2) if largest == 128 else hopper_forward.Tiling(2, 64, 2, 1)
    three, two = (hopper_forward.Tiling(warpgroups, 128, 3, 2) for warpgroups in (3, 2))
    lengths = operands.query.shape[1], operands.key.shape[1]
    logits = lambda tiling: tiles_visited(problem, lengths, tiling.rows, tiling.keys).sum() * tiling.rows
    return two if logits(two) < TWO_THIRDS_DO * logits(three) else three


def backward_tilings(problem: Problem, operands: Operands) -> tuple[hopper_backward.Tiling, hopper_backward.Tiling]:
    """For dq, and for dk and dv."""
    largest = _width(operands)
    if largest == 64:
        return hopper_backward.Tiling(3, 64, 4, 2), hopper_backward.Tiling(3, 64, 4, 2)
    marked = operands.q_segments is not None  # which want some room, as a soft cap wants registers
    of_queries = (2, 64, 3, 1) if marked or problem.soft_cap is not None else (2, 128, 2, 1)
    return hopper_backward.Tiling(*of_queries), hopper_backward.Tiling(2, 64, 3, 1 if marked else 2)


def fused_tiling(operands: Operands) -> hopper_backward.Tiling:
    return hopper_backward.Tiling(2, 128 if _width(operands) == 64 else 64, 2, 1)


def _width(operands: Operands) -> int:
    """Of all heads, of values as well, in the kernels."""
    largest = max(operands.query.shape[-1], operands.value.shape[-1])
    return -(-largest // MULTIPLE) * MULTIPLE


def _padded(x: Array, width: int) -> Array:
    """B T N H with zeros, up to `width`, and to the next multiple of 8 tokens."""
    more = [(0, 0), (0, -x.shape[1] % 8), (0, 0), (0, width - x.shape[-1])]
    return jnp.pad(x, more) if any(map(any, more)) else x


def _segmented(operands: Operands) -> Operands:
    """A mask of keys or queries as segments: 0 may attend; hidden keys are -1 before the first of those and 1 behind it, so
    that padding leaves them in order, and hidden queries 2.
    """
    if operands.mask is None:
        return operands
    (B, T), S, mask = operands.query.shape[:2], operands.key.shape[1], operands.mask[:, 0, 0]  # B|1 T|1 S|1
    queries = keys = jnp.int32(0)
    if mask.shape[1] == 1:
        seen = mask[:, 0]
        before = jnp.arange(seen.shape[1]) < seen.argmax(axis=1, keepdims=True)
        keys = jnp.where(seen, 0, jnp.where(before, -1, 1))
    else:
        queries = jnp.where(mask[:, :, 0], 0, 2)
    of = lambda x, length: jnp.broadcast_to(x, (B, length))
    return operands._replace(mask=None, q_segments=of(queries, T), kv_segments=of(keys, S))


def _scalars(operands: Operands) -> tuple[list[Array], list[str], list[str]]:
    """Those that are given, their names, and their dims."""
    names = [name for name in Scalars._fields if getattr(operands, name, None) is not None]
    B, dims = operands.query.shape[0], {"q_segments": "bt", "kv_segments": "bs"}
    of = lambda name, x: x if name in dims else jnp.broadcast_to(x, (B,))
    return [of(name, getattr(operands, name)) for name in names], names, [dims.get(name, "b") for name in names]


def _named(names: list[str], scalars) -> Scalars:
    """Segments as whole tiles want them."""
    pad = lambda x: jnp.pad(x, [(0, 0), (0, -x.shape[1] % ROWS_MULTIPLE)]) if x.ndim == 2 else x
    return Scalars(**dict(zip(names, map(pad, scalars), strict=True)))


def forward(problem: Problem, operands: Operands, lse_for: LseFor = "caller") -> tuple[Array, Lse | None]:
    """out [B, K, G, T, D] in the query's dtype, lse [B, K, G, T]."""
    operands = _segmented(operands)
    given, names, dims_given = _scalars(operands)

    def call(query, key, value, *scalars):
        (B, T, K, G, H), D = query.shape, value.shape[-1]
        arrays, lengths = (query.reshape(B, T, K * G, H), key, value), (T, key.shape[1])
        arrays = tuple(_padded(x, _width(operands)) for x in arrays)
        scalars = _named(names, scalars)
        tiling = forward_tiling(problem, operands)
        out, lse = hopper_forward.attend(problem, lengths, arrays, scalars, lse_for is not None, tiling)
        out = out[:, :T, :, :D].reshape(B, T, K, G, D).transpose(0, 2, 3, 1, 4)
        return (out,) if lse is None else (out, lse[..., :T].reshape(B, K, G, T))

    dims_out = ("bkgtd", "bkgt") if lse_for else ("bkgtd",)
    found = mapped(call, (*DIMS, *dims_given), dims_out)(*operands[:3], *given)
    return found[0], Lse(found[1], None) if lse_for else None


def backward(problem: Problem, operands: Operands, out: Array, lse: Lse, dout: Array, dlse: Array | None) -> Gradients:
    """Gradients from `out`, `dout` [B, K, G, T, D] and `lse`, `dlse` [B, K, G, T] (None: no cotangent)."""
    operands = _segmented(operands)
    given, names, dims_given = _scalars(operands)
    of_rows = [lse.high * LOG2_E] + ([] if dlse is None else [dlse])

    def call(query, key, value, out, dout, *more):
        (B, T, K, G, H), (_, S, _, D) = query.shape, value.shape
        rows, scalars = more[: len(of_rows)], _named(names, more[len(of_rows) :])
        lse, *dlse = (jnp.pad(x.reshape(B, K * G, T), [(0, 0), (0, 0), (0, -T % ROWS_MULTIPLE)]) for x in rows)
        heads = lambda x: x.transpose(0, 3, 1, 2, 4).reshape(B, T, K * G, D)
        arrays = (query.reshape(B, T, K * G, H), key, value, heads(out), heads(dout))
        query_, key_, value_, out_, dout_ = (_padded(x, _width(operands)) for x in arrays)
        (dlse,) = dlse or (None,)

        def split():
            of_queries, of_keys = backward_tilings(problem, operands)
            arrays = (query_, key_, value_, out_, dout_, lse)
            dq, delta = hopper_backward.queries(problem, (T, S), arrays, dlse, scalars, of_queries)
            arrays = (query_, key_, value_, dout_, lse, delta)
            return dq, *hopper_backward.keys(problem, (T, S), arrays, scalars, of_keys)

        def fused():
            delta = hopper_fused.deltas((T, S), out_, dout_, dlse)
            arrays = (query_, key_, value_, dout_, lse, delta)
            dq, dk, dv, nan_if_bad = hopper_fused.gradients(problem, (T, S), arrays, scalars, fused_tiling(operands))
            found = (dq * hopper_backward.Gradient(problem).slope).astype(query.dtype), dk, dv
            # A loop that runs once or never, for it writes over what is bad; a cond would hold both.
            bad = jnp.isnan(nan_if_bad).any()
            return lax.while_loop(lambda state: state[0], lambda _: (jnp.bool_(False), split()), (bad, found))[1]

        dq, dk, dv = fused() if problem.backward == "fused" else split()
        return dq[:, :T, :, :H].reshape(query.shape), dk[:, :S, :, :H], dv[:, :S, :, :D]

    dims = *DIMS, "bkgtd", "bkgtd", *["bkgt"] * len(of_rows), *dims_given
    query, key, value = mapped(call, dims, DIMS)(*operands[:3], out, dout, *of_rows, *given)
    return Gradients(query, key, value, Terms())
