"""Call the TPU kernels: scale, pad and lay out the arrays, and correct what the kernels do not do.

1. The query is multiplied by a power of two, which rounds nothing. The kernels multiply the logits
   by the rest of the scale (splash.py).
2. Lengths are padded to whole tiles. Padded keys are hidden by their position.
3. Rows that see no key are found by their lse, or by their length. They give 0, and p = 0.
4. NaN and Inf reach only the rows that see them (nonfinite.py).
5. delta = rowsum(dout * out) - dlse makes the cotangent of lse exact.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.masking import key_range, window_pairs
from memeff.pallas.partitioning import partitioned
from memeff.pallas.tpu import nonfinite
from memeff.pallas.tpu.splash import HIDDEN_LOGIT, Kernels, interpreting
from memeff.pallas.tpu.tables import Visits, tile_shape
from memeff.pallas.tpu.tokens import Tokens, tokens_of
from memeff.problem import Gradients, LogitParams, Operands, Problem, split_axis
from memeff.shape import round_up
from memeff.sharding import vary_together
from memeff.softmax import LSE_OF_EMPTY_ROW, Lse, LseFor, lse_with_sinks, row_dots

DIMS = "btkgh", "bskh", "bskd"  # of query, key and value, in letters


def describe(problem: Problem, operands: Operands) -> str:
    """Return a phrase that names the kernels and their tiles."""
    t, c = tile_shape(operands.shape.T, operands.shape.S)
    return (
        f"the TPU kernels of JAX's splash attention, tiles of {t} x {c} logits; compiled for, "
        "never timed on a TPU"
    )


def kernels_of(problem: Problem, lengths: tuple[int, int], interpret: bool) -> Kernels:
    """Return the kernels for `lengths`, T queries and S keys."""
    T, S = lengths
    tile = tile_shape(T, S)
    _, end, _, _ = key_range(problem, problem.q_offset, 0, T - 1)
    hides_padding = S % tile[1] > 0 and (end is None or end > S)
    may_see = None
    positions = None
    if problem.has_window or hides_padding:
        may_see = functools.partial(_may_see, problem, S if hides_padding else None)
        positions = problem.q_offset, problem.q_offset + round_up(T, tile[0])
    visits = Visits(problem, (T, S), tile)
    _, scale = split_scale(problem.scale)
    return Kernels(tile, visits, positions, may_see, scale, problem.soft_cap, interpret)


def _may_see(problem: Problem, keys: int | None, position: Array, cols: Array) -> Array:
    """Return True where the query at `position` may see the key at `cols`, of `keys`."""
    keep = window_pairs(problem.left, problem.right, position, cols)
    return keep if keys is None else keep & (cols < keys)


class _Layout(NamedTuple):
    """The sizes of one device's part of a call, with T and S padded to whole tiles."""

    T: int
    S: int
    rows: int  # T'
    keys: int  # S'

    @classmethod
    def of(cls, query: Array, key: Array, tile: tuple[int, int]) -> "_Layout":
        """Return the layout of a query [B, T, K, G, H] and a key [B, S, K, H]."""
        T, S = query.shape[1], key.shape[1]
        return cls(T, S, round_up(T, tile[0]), round_up(S, tile[1]))

    def query(self, x: Array) -> Array:
        """Return x [B, T, K, G, H] as [B, N, T', H]."""
        x = lax.collapse(x.transpose(0, 2, 3, 1, 4), 1, 3)
        return _pad(x, self.rows)

    def rows_with_dim(self, x: Array) -> Array:
        """Return x [B, K, G, T, D] as [B, N, T', D]."""
        return _pad(lax.collapse(x, 1, 3), self.rows)

    def row_vector(self, x: Array, fill: float) -> Array:
        """Return x [B, K, G, T] as [B, N, T'], with `fill` behind it."""
        x = lax.collapse(x, 1, 3)
        return jnp.pad(x, [(0, 0), (0, 0), (0, self.rows - self.T)], constant_values=fill)

    def key(self, x: Array) -> Array:
        """Return x [B, S, K, H] as [B, K, S', H]."""
        return _pad(x.transpose(0, 2, 1, 3), self.keys)

    def segments(self, tokens: Tokens) -> tuple[Array | None, Array | None]:
        """Return the segment ids, padded by repeating the last one."""
        if tokens.q_segments is None or tokens.kv_segments is None:
            return None, None
        q_padding = [(0, 0), (0, self.rows - self.T)]
        kv_padding = [(0, 0), (0, self.keys - self.S)]
        return (
            jnp.pad(tokens.q_segments, q_padding, mode="edge"),
            jnp.pad(tokens.kv_segments, kv_padding, mode="edge"),
        )


def _pad(x: Array, length: int) -> Array:
    """Pad x [B, N, T, H] with zeros to `length` tokens."""
    return jnp.pad(x, [(0, 0), (0, 0), (0, length - x.shape[2]), (0, 0)])


def split_scale(scale: float) -> tuple[float, float]:
    """Return a power of two, perhaps negative, and a factor in [1/2, 1], with product `scale`."""
    factor, exponent = math.frexp(scale)
    if factor in (0, 0.5, -0.5):
        return scale, 1.0
    return math.copysign(2.0**exponent, factor), abs(factor)


def _hide_unseen(problem: Problem, tokens: Tokens, T: int, x: Array) -> Array:
    """Return keys or values x [B, S, K, H] with zeros where the window or `tokens` hide a key.

    The kernels multiply them by 0 and must not overflow.
    """
    S = x.shape[1]
    hidden = tokens.hidden_keys
    first, count = Visits(problem, (T, S), (T, 1)).ranges()
    if count[0] < S:
        keys = jnp.arange(S)
        outside = ((keys < first[0]) | (keys >= first[0] + count[0]))[None]
        hidden = outside if hidden is None else hidden | outside
    return x if hidden is None else jnp.where(hidden[..., None, None], 0, x)


def _all_rows_see(problem: Problem, operands: Operands, tokens: Tokens) -> bool:
    """Return whether every query is known to see a key."""
    if any(x is not None for x in tokens):
        return False
    T, S = operands.shape.T, operands.shape.S
    _, count = Visits(problem, (T, S), (1, S)).ranges()
    return bool((count > 0).all())


def forward(
    problem: Problem, operands: Operands, lse_for: LseFor = "caller", partial_out: bool = False
) -> tuple[Array, Lse | None]:
    """Return out [B, K, G, T, D], in float32 if partial, and lse [B, K, G, T] if wanted."""
    tokens = tokens_of(operands)
    leaves, structure = jax.tree.flatten(tokens)
    interpret = interpreting()  # here, because XLA's partitioner calls `call` in its own thread
    sinks = operands.logit_params.sinks
    want_lse = (
        lse_for is not None or sinks is not None or not _all_rows_see(problem, operands, tokens)
    )
    shape = operands.shape

    def call(query, key, value, *leaves):
        B, T, K, G, _ = query.shape
        tokens = jax.tree.unflatten(structure, leaves)
        kernels = kernels_of(problem, (T, key.shape[1]), interpret)
        layout = _Layout.of(query, key, kernels.block)
        query = query * split_scale(problem.scale)[0]
        key, value = (_hide_unseen(problem, tokens, T, x) for x in (key, value))
        if partial_out:  # the kernels return out in the query's dtype
            query = query.astype(jnp.float32)
        arrays = layout.query(query), layout.key(key), layout.key(value)
        out, lse = nonfinite.forward(kernels, arrays, layout.segments(tokens), want_lse)
        out = out[:, :, :T].reshape(B, K, G, T, -1)
        if lse is None:
            return (out,)
        lse = lse[:, :, :T].reshape(B, K, G, T)
        empty = lse < HIDDEN_LOGIT / 2
        if tokens.hidden_rows is not None:
            empty |= tokens.hidden_rows[:, None, None]
        out = jnp.where(empty[..., None], 0, out)
        return out, jnp.where(empty, LSE_OF_EMPTY_ROW, lse)

    dims_out = ("bkgtd", "bkgt") if want_lse else ("bkgtd",)
    run = partitioned(call, (*DIMS, *tokens.dims), dims_out)
    query = split_axis(operands.query, 2, shape.K)
    leaves = vary_together(leaves, operands.query)
    out, *lses = run(query, operands.key, operands.value, *leaves)
    if not lses:
        return out, None
    lse = Lse(lses[0], None)
    if sinks is not None:
        _, p = lse_with_sinks(lse, sinks)
        out = (out * (1 - p)[..., None]).astype(out.dtype)
    return out, lse


def backward(
    problem: Problem,
    operands: Operands,
    out: Array,
    lse: Lse,
    dout: Array,
    dlse: Array | None,
) -> Gradients:
    """Return gradients from `out`, `dout` [B, K, G, T, D] and `lse`, `dlse` [B, K, G, T].

    `dlse` is None if lse has no cotangent.
    """
    tokens = tokens_of(operands)
    leaves, structure = jax.tree.flatten(tokens)
    interpret = interpreting()  # here, because XLA's partitioner calls `call` in its own thread
    delta = row_dots(out, dout, jnp.float32)
    if dlse is not None:
        delta -= dlse

    def call(query, key, value, dout, lse, delta, *leaves):
        _, T, K, G, H = query.shape
        B, S, _, _ = value.shape
        tokens = jax.tree.unflatten(structure, leaves)
        kernels = kernels_of(problem, (T, S), interpret)
        layout = _Layout.of(query, key, kernels.block)
        empty = lse == LSE_OF_EMPTY_ROW  # b k g t
        dout = jnp.where(empty[..., None], 0, dout)
        delta = jnp.where(empty, 0, delta)
        query = query * split_scale(problem.scale)[0]
        query = jnp.where(empty.transpose(0, 3, 1, 2)[..., None], 0, query)
        key, value = (_hide_unseen(problem, tokens, T, x) for x in (key, value))
        arrays = nonfinite.GradientArrays(
            layout.query(query),
            layout.key(key),
            layout.key(value),
            layout.row_vector(lse, LSE_OF_EMPTY_ROW),
            layout.rows_with_dim(dout),
            layout.row_vector(delta, 0),
        )
        dq, dk, dv = nonfinite.backward(kernels, arrays, layout.segments(tokens))
        dq = dq[:, :, :T].reshape(B, K, G, T, H).transpose(0, 3, 1, 2, 4)
        dk, dv = (x[:, :, :S].transpose(0, 2, 1, 3) for x in (dk, dv))
        return dq, dk, dv

    missing = kernels_of(problem, (operands.shape.T, operands.shape.S), interpret).gradient_scale
    run = partitioned(call, (*DIMS, "bkgtd", "bkgt", "bkgt", *tokens.dims), DIMS)
    query = split_axis(operands.query, 2, operands.shape.K)
    leaves = vary_together(leaves, operands.query)
    one_lse = lse.high if lse.low is None else lse.high + lse.low
    dq, dk, dv = run(query, operands.key, operands.value, dout, one_lse, delta, *leaves)
    power, _ = split_scale(problem.scale)
    dq = dq.astype(jnp.float32) * (power * missing)
    dk = dk.astype(jnp.float32) * missing
    return Gradients(lax.collapse(dq, 2, 4), dk, dv, LogitParams())
