"""Define who may attend to whom: for a pair, for a tile, and as a range of keys."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from memeff.problem import Operands, Problem
from memeff.user_functions import PairIndices


class MaskInputs(NamedTuple):
    """What besides the window decides who sees whom; each broadcasts with the positions, None: it hides nobody."""

    q_offset: Any = None  # in the place of Problem.q_offset
    q_lengths: Any = None
    kv_lengths: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    mask: Any = None
    bias: Any = None


def query_positions(problem: Problem, q_offset, rows):
    """The positions of queries at `rows` among the keys; `q_offset` as an array, or None where the problem has it."""
    return rows + (problem.q_offset if q_offset is None else q_offset)


def mask_pairs(problem: Problem, sight: MaskInputs, rows: Array, cols: Array) -> Array:
    """May the query at `rows` look at the key at `cols`? Any shapes that broadcast."""
    keep = (rows >= 0) & (cols >= 0)
    at = query_positions(problem, sight.q_offset, rows)
    if problem.left is not None:
        keep &= at - problem.left <= cols
    if problem.right is not None:  # causal attention is right = 0: one rule, not two
        keep &= cols <= at + problem.right
    if sight.q_lengths is not None:
        keep &= rows < sight.q_lengths
    if sight.kv_lengths is not None:
        keep &= cols < sight.kv_lengths
    if sight.q_segments is not None and sight.kv_segments is not None:
        keep &= sight.q_segments == sight.kv_segments
    if sight.mask is not None:
        keep &= sight.mask
    # -inf, or the lowest finite number (a common stand-in for it), hides a key; NaN does not
    if sight.bias is not None:
        keep &= ~(sight.bias <= jnp.finfo(sight.bias.dtype).min)
    return keep


def as_column(x: Array | None) -> Array | None:
    return None if x is None else x[:, None]


def pair_indices(
    problem: Problem, here: Operands, like: Array, first, rows: Array, cols: Array
) -> PairIndices | None:
    """For functions of the user's: of a tile that begins with batch entry and key head `first`; `like` is B K G, laid out
    over devices as the tile is.
    """
    if not problem.calls_functions:
        return None
    b, k, g = (lax.broadcasted_iota(jnp.int32, like.shape, dim) for dim in range(3))
    batch, head = b + first[0], (k + first[1]) * like.shape[2] + g
    sharding = jax.typeof(like).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        lay = lambda x, spec: reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))
        batch, head = lay(batch[:, 0, 0], sharding.spec[:1]), lay(head[0], sharding.spec[1:])
    else:
        zero = jnp.zeros_like(like, jnp.int32)
        batch, head = (zero + batch)[:, 0, 0], (zero + head)[0]
    q_pos = query_positions(problem, as_column(here.q_offset), rows)
    return PairIndices(batch, head, q_pos, cols, here.score_rest, here.mask_params)


def mask_tile(
    problem: Problem, here: Operands, rows: Array, cols: Array, at: PairIndices | None = None
) -> Array:
    """`sees` for queries at `rows` [t] and keys at `cols` [c]. Broadcasts to B K G t c; `here` is cut to the tile."""
    mask = here.mask
    if problem.mask_fn is not None:
        assert at is not None
        floats = sum(problem.mask_fn.floats)
        of_places = problem.mask_fn(None, at, at.of_mask[:floats], at.of_mask[floats:])
        mask = of_places if mask is None else mask & of_places
    every = slice(None)
    batch, queries, keys = (
        (every, *[None] * 4),
        (every, None, None, every, None),
        (every, None, None, None, every),
    )
    of = lambda x, index: None if x is None else x[index]
    sight = MaskInputs(
        q_offset=of(here.q_offset, batch),
        q_lengths=of(here.q_lengths, batch),
        kv_lengths=of(here.kv_lengths, batch),
        q_segments=of(here.q_segments, queries),
        kv_segments=of(here.kv_segments, keys),
        mask=mask,
        bias=here.terms.bias,
    )
    return mask_pairs(
        problem, sight, rows[None, None, None, :, None], cols[None, None, None, None, :]
    )


def key_range(problem: Problem, q_offset, first, last):
    """Key positions that rows `first` to `last` may see: (some row sees from, to, every row sees from, to), `to` excluded.

    Only the window speaks here, unclipped (None: unbounded); offsets may be ints, NumPy or JAX integers.
    """
    left, right = problem.left, problem.right
    return (
        None if left is None else first + q_offset - left,
        None if right is None else last + q_offset + right + 1,
        None if left is None else last + q_offset - left,
        None if right is None else first + q_offset + right + 1,
    )
