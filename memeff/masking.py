"""Define who may attend to whom: for a pair, for a tile, and as a range of keys."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from memeff.problem import Operands, Problem
from memeff.user_functions import PairIndices


class MaskInputs(NamedTuple):
    """Arrays that decide, besides the window, who may attend to whom.

    Each broadcasts with the positions. None hides no pair.
    """

    q_offset: Any = None  # takes precedence over Problem.q_offset
    q_lengths: Any = None
    kv_lengths: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    mask: Any = None
    bias: Any = None


def query_positions(problem: Problem, q_offset, rows):
    """Return the positions, among the keys, of the queries at `rows`.

    `q_offset` is an array, or None to take the static offset of the problem.
    """
    return rows + (problem.q_offset if q_offset is None else q_offset)


def pair_positions(
    problem: Problem, operands: Operands, rows: Array, cols: Array
) -> tuple[Array, Array]:
    """Return the positions, in the whole call, of queries ([t] or [B|1, t]) and keys ([c]).

    Rows and columns of -1, which `mask_pairs` hides, get the first position instead: the user's
    functions need not be finite outside of the call.
    """
    rows, cols = jnp.maximum(rows, 0), jnp.maximum(cols, 0)
    origin = operands.origin
    if origin is None or problem.whole is None:
        offset = as_column(operands.q_offset)
        rows = rows if offset is None else rows[None]  # ranks that differ may be refused
        return query_positions(problem, offset, rows), cols
    stride = problem.whole.stride
    first = origin.q_offset[:, None] + origin.first_query
    return first + stride * rows[None], origin.first_key + stride * cols


def window_pairs(left: int | None, right: int | None, position, cols) -> Any:
    """Return True where a window lets the query at `position` see the key at `cols`.

    The shapes broadcast. Without a window the result is the number True.
    """
    keep = True
    if left is not None:
        keep &= position - left <= cols
    if right is not None:  # causal attention is right = 0: one rule, not two
        keep &= cols <= position + right
    return keep


def mask_pairs(problem: Problem, inputs: MaskInputs, rows: Array, cols: Array) -> Array:
    """Return True where the query at `rows` may attend to the key at `cols`; shapes broadcast."""
    keep = (rows >= 0) & (cols >= 0)
    position = query_positions(problem, inputs.q_offset, rows)
    keep &= window_pairs(problem.left, problem.right, position, cols)
    if inputs.q_lengths is not None:
        keep &= rows < inputs.q_lengths
    if inputs.kv_lengths is not None:
        keep &= cols < inputs.kv_lengths
    if inputs.q_segments is not None and inputs.kv_segments is not None:
        keep &= inputs.q_segments == inputs.kv_segments
    if inputs.mask is not None:
        keep &= inputs.mask
    if inputs.bias is not None:
        keep &= bias_hides(inputs.bias) ^ True  # kernels know no "not"
    return keep


def bias_hides(bias: Array) -> Array:
    """Return True where `bias` is -inf or the lowest finite number of its dtype.

    Both commonly hide a key. NaN does not.
    """
    return bias <= jnp.finfo(bias.dtype).min


def mask_is_of_tokens(mask: Array) -> bool:
    """Return whether a mask [B|1, N|1, T|1, S|1] hides whole keys or whole queries."""
    _, N, T, S = mask.shape
    return N == 1 and 1 in (T, S)


def as_column(x: Array | None) -> Array | None:
    """Return x [B] as [B, 1], and None as None."""
    return None if x is None else x[:, None]


def pair_indices(
    problem: Problem,
    operands: Operands,
    like: Array,
    first,
    rows: Array,
    cols: Array,
) -> PairIndices | None:
    """Return the indices that the user's functions receive for a tile; None without functions.

    `first` holds the first batch entry and key head of the tile. `like` [B, K, G] gives the
    sharding of the indices.
    """
    if not problem.has_pair_functions:
        return None
    b, k, g = (lax.broadcasted_iota(jnp.int32, like.shape, dim) for dim in range(3))
    batch = b + first[0]
    head = (k + first[1]) * like.shape[2] + g
    if operands.origin is not None:
        batch = batch + operands.origin.first_batch
        head = head + operands.origin.first_head
    sharding = jax.typeof(like).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:

        def shard(x, spec):
            return reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))

        batch = shard(batch[:, 0, 0], sharding.spec[:1])
        head = shard(head[0], sharding.spec[1:])
    else:
        zero = jnp.zeros_like(like, jnp.int32)  # varies under shard_map as `like` does
        batch = (zero + batch)[:, 0, 0]
        head = (zero + head)[0]
    q_pos, k_pos = pair_positions(problem, operands, rows, cols)
    return PairIndices(
        batch, head, q_pos, k_pos, operands.score_nonfloat_params, operands.mask_params
    )


def mask_tile(
    problem: Problem,
    operands: Operands,
    rows: Array,
    cols: Array,
    indices: PairIndices | None = None,
) -> Array:
    """Apply `mask_pairs` to the queries at `rows` [t] and the keys at `cols` [c] of a tile.

    `operands` are cut to the tile. The result broadcasts to [B, K, G, t, c].
    """
    mask = operands.mask
    if problem.mask_fn is not None:
        assert indices is not None
        floats = sum(problem.mask_fn.is_float)
        params = indices.mask_params
        function_mask = problem.mask_fn(None, indices, params[:floats], params[floats:])
        mask = function_mask if mask is None else mask & function_mask
    inputs = MaskInputs(
        q_offset=_spread(operands.q_offset, "b"),
        q_lengths=_spread(operands.q_lengths, "b"),
        kv_lengths=_spread(operands.kv_lengths, "b"),
        q_segments=_spread(operands.q_segments, "bt"),
        kv_segments=_spread(operands.kv_segments, "bc"),
        mask=mask,
        bias=operands.logit_params.bias,
    )
    return mask_pairs(
        problem, inputs, rows[None, None, None, :, None], cols[None, None, None, None, :]
    )


def _spread(x: Array | None, dims: str) -> Array | None:
    """Return `x`, which has the dims named in `dims`, as [B|1, 1, 1, t|1, c|1]."""
    if x is None:
        return None
    return x[tuple(slice(None) if dim in dims else None for dim in "bkgtc")]


def key_range(problem: Problem, q_offset, first, last):
    """Return the key positions that rows `first` to `last` may see inside the window.

    The result is (start of what any row sees, its end, start of what all rows see, its end). Ends
    are excluded. Bounds are not clipped to the sequence, and None is no bound. Positions and offset
    may be ints, NumPy or JAX integers.
    """
    left = problem.left
    right = problem.right
    return (
        None if left is None else first + q_offset - left,
        None if right is None else last + q_offset + right + 1,
        None if left is None else last + q_offset - left,
        None if right is None else first + q_offset + right + 1,
    )
