"""What is computed: the static choices, the arrays, who sees whom, and the logits. Nobody else defines these.

Everything speaks of one tile: queries at `rows`, keys at `cols` (absolute positions, -1 where a tile overhangs). The whole
problem is the tile that covers everything; a kernel's block is another one.
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec, reshard

from memeff.blocks import Blocks
from memeff.functions import Given, GivenTransform, Places

# lse of a row that sees no key, inside memeff: finite, and exp(s - it) is 0. At the door it is -inf.
SEES_NOTHING = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Drop a probability with chance `rate`; `shared`: one T x S mask for all batch entries and heads (Flax's default)."""

    rate: float
    shared: bool


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static choices of one call. Each implementation reads every field or refuses it in its `why_not`."""

    left: int | None = None  # tokens that a query sees to its left; None: all
    right: int | None = None  # and to its right; causal attention is right = 0
    q_offset: int = 0  # position of query row 0, unless Operands.q_offset has it as an array
    scale: float = 1.0  # unless Terms.scale has it as an array
    soft_cap: float | None = None  # unless Terms.soft_cap has it as an array
    dropout: Dropout | None = None
    precision: lax.PrecisionLike = None
    score_fn: Given | None = None
    mask_fn: Given | None = None
    blocks: Blocks | None = None  # of which mask_fn hides all; None: not known
    qk_transform: GivenTransform | None = None
    backward: str | None = None  # of kernels: "split" in two, or "fused" in one; None: as "split" ("fastest": see dispatch)
    chunk_size: tuple[int, int] = (512, 512)  # rows and columns of a tile
    fixed_chunk_size: tuple[int, int] | None = None  # the same for a forward with a fixed reference; None: without
    fused_chunk_size: tuple[int, int] | None = None  # and for a backward fused into its products (GPU); None: without
    joined: int = 0  # of the last two, whole tiles are joined up to so many logits of a head; 0: never
    block: tuple[int, int] | None = None  # batch entries and key heads of a tile, divisors of B and K; None: all
    together: bool = False  # are out and its tangent, where both are wanted, made in one walk?
    at_once: int | None = None  # calls under vmap whose tiles exist at the same time; None: all

    @property
    def windowed(self) -> bool:
        return (self.left, self.right) != (None, None)

    @property
    def calls_functions(self) -> bool:
        """Functions of the user's, of pairs."""
        return self.score_fn is not None or self.mask_fn is not None

    @property
    def extras(self) -> tuple[Any, ...]:
        """What makes more of logits and probabilities than plain ones; None: nothing."""
        return self.soft_cap, self.dropout, self.score_fn, self.mask_fn, self.qk_transform


class Device(NamedTuple):
    """What runs a call."""

    platform: str  # "cpu", "gpu", "tpu"
    capability: str | None = None  # of a CUDA GPU, "9.0"; None: another kind, or not known


class Terms(NamedTuple):
    """What shapes the logits besides the dot products, and gets a gradient: scalars, and bias [B|1, K|1, G|1, T|1, S|1]."""

    scale: Array | None = None
    soft_cap: Array | None = None
    bias: Array | None = None
    score: tuple[Array, ...] = ()  # params of score_fn that are floats, of any shapes
    transform: tuple[Array, ...] = ()  # and of qk_transform
    sinks: Array | None = None  # K G, in nats: a column of the softmax without a key; only forwards see it


class Operands(NamedTuple):
    """The arrays of one call, or of one tile of it."""

    query: Array  # B T K G H; query head n = k * G + g
    key: Array  # B S K H
    value: Array  # B S K D
    terms: Terms = Terms()
    mask: Array | None = None  # B|1 K|1 G|1 T|1 S|1, True = may attend
    q_lengths: Array | None = None  # B, int32, tokens
    kv_lengths: Array | None = None  # B
    q_offset: Array | None = None  # B|1
    q_segments: Array | None = None  # B T
    kv_segments: Array | None = None  # B S
    dropout_key: Array | None = None  # 2, uint32
    score_rest: tuple[Array, ...] = ()  # params of score_fn that are not floats
    mask_params: tuple[Array, ...] = ()
    transform_rest: tuple[Array, ...] = ()


class Gradients(NamedTuple):
    """Cotangents of `Operands`, in float32 (float64 for float64) and in the layout and shape of what they belong to."""

    query: Array
    key: Array
    value: Array
    terms: Terms


# Who will read lse: nobody (inference), our own backward, or the caller, to whom it must be as good as float32.
LseFor = Literal["gradient", "caller"] | None


class Lse(NamedTuple):
    """log-sum-exp of rows, B K G T, as the unevaluated sum of two floats.

    One would err by 6e-8 |lse|, and all probabilities that the backward recomputes from it by that factor.
    """

    high: Array  # lse itself; SEES_NOTHING for a row without a key
    low: Array | None  # None: 0


def log_sum_exp(m: Array, l: Array) -> Lse:
    """m + log l."""
    high = m + jnp.log(l)
    return Lse(high, (m - high) + jnp.log(l))


def sink_weights(m: Array, l: Array, sinks: Array) -> tuple[Array, Array]:
    """Return what multiplies the sums of a row and what divides them, where a sink takes its share of the softmax.

    `l` [B, K, G, T] is the row sum of exp(s - m) over the keys. With top = max(m, sink), the row sum with the
    sink is l exp(m - top) + exp(sink - top), which neither overflows nor loses the larger of the two.
    """
    empty, sink = l == 0, sinks.astype(l.dtype)[..., None]  # k g 1
    m = jnp.where(empty, 0, m)  # -inf where a row sees no key
    sink = jnp.where(empty, 0, sink)  # it may be NaN
    top = lax.stop_gradient(jnp.maximum(m, sink))
    share = jnp.exp(m - top)
    return share, jnp.where(empty, 1, l) * share + jnp.exp(sink - top)


def lse_with_sinks(lse: Lse, sinks: Array) -> tuple[Lse, Array]:
    """Return the log-sum-exp [B, K, G, T] of the keys and the sink of a row, and the probability of the sink.

    A row that sees no key keeps `SEES_NOTHING`, and its sink has probability 0, because it gives nothing to anybody.
    """
    sink, empty = sinks.astype(lse.high.dtype)[..., None], lse.high == SEES_NOTHING
    keys, sink = jnp.where(empty, 0, lse.high), jnp.where(empty, 0, sink)
    high = jnp.logaddexp(keys, sink)
    more = jnp.log1p(jnp.exp(-jnp.abs(keys - sink)))
    low = lax.stop_gradient((jnp.maximum(keys, sink) - high) + more)  # what rounding took from high
    if lse.low is not None:
        low += lse.low * jax.nn.sigmoid(keys - sink)
    p = jnp.exp((sink - high) - low)
    total = Lse(jnp.where(empty, SEES_NOTHING, high), jnp.where(empty, 0, low))
    return total, jnp.where(empty, 0, p)


def row_dots(out: Array, dout: Array, dtype) -> Array:
    """Return rowsum(dout * out), B K G T, of arrays B K G T D; in the layout in which they came, so that none is copied."""
    out, dout = (x.transpose(0, 3, 1, 2, 4).astype(dtype) for x in (out, dout))  # b t k g d
    return (out * dout).sum(-1).transpose(0, 2, 3, 1)


class Sight(NamedTuple):
    """What besides the window decides who sees whom; each broadcasts with the positions, None: it hides nobody."""

    q_offset: Any = None  # in the place of Problem.q_offset
    q_lengths: Any = None
    kv_lengths: Any = None
    q_segments: Any = None
    kv_segments: Any = None
    mask: Any = None
    bias: Any = None


def among_keys(problem: Problem, q_offset, rows):
    """The positions of queries at `rows` among the keys; `q_offset` as an array, or None where the problem has it."""
    return rows + (problem.q_offset if q_offset is None else q_offset)


def sees(problem: Problem, sight: Sight, rows: Array, cols: Array) -> Array:
    """May the query at `rows` look at the key at `cols`? Any shapes that broadcast."""
    keep = (rows >= 0) & (cols >= 0)
    at = among_keys(problem, sight.q_offset, rows)
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
    if sight.bias is not None:  # -inf, or the lowest finite number (a common stand-in for it), hides a key; NaN does not
        keep &= ~(sight.bias <= jnp.finfo(sight.bias.dtype).min)
    return keep


def _column(x: Array | None) -> Array | None:
    return None if x is None else x[:, None]


def places(problem: Problem, here: Operands, like: Array, first, rows: Array, cols: Array) -> Places | None:
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
    q_pos = among_keys(problem, _column(here.q_offset), rows)
    return Places(batch, head, q_pos, cols, here.score_rest, here.mask_params)


def transformed(problem: Problem, here: Operands, rows: Array, cols: Array) -> tuple[Array, Array]:
    """Queries B K G t H and keys B K c H as the products take them."""
    transform = problem.qk_transform
    if transform is None:
        return here.query, here.key
    q_pos = among_keys(problem, _column(here.q_offset), rows)
    params = here.terms.transform, here.transform_rest
    return transform("query", here.query, q_pos, *params), transform("key", here.key, cols, *params)


def visible(problem: Problem, here: Operands, rows: Array, cols: Array, at: Places | None = None) -> Array:
    """`sees` for queries at `rows` [t] and keys at `cols` [c]. Broadcasts to B K G t c; `here` is cut to the tile."""
    mask = here.mask
    if problem.mask_fn is not None:
        assert at is not None
        floats = sum(problem.mask_fn.floats)
        of_places = problem.mask_fn(None, at, at.of_mask[:floats], at.of_mask[floats:])
        mask = of_places if mask is None else mask & of_places
    every = slice(None)
    batch, queries, keys = (every, *[None] * 4), (every, None, None, every, None), (every, None, None, None, every)
    of = lambda x, index: None if x is None else x[index]
    sight = Sight(
        q_offset=of(here.q_offset, batch),
        q_lengths=of(here.q_lengths, batch),
        kv_lengths=of(here.kv_lengths, batch),
        q_segments=of(here.q_segments, queries),
        kv_segments=of(here.kv_segments, keys),
        mask=mask,
        bias=here.terms.bias,
    )
    return sees(problem, sight, rows[None, None, None, :, None], cols[None, None, None, None, :])


def finish(problem: Problem, raw: Array, terms: Terms, keep: Array | None, at: Places | None = None) -> Array:
    """Logits B K G t c from dot products: scale, soft cap, the user's function, bias, mask (`keep`; None: all visible), in
    this order.
    """
    cap = problem.soft_cap if terms.soft_cap is None else terms.soft_cap.astype(raw.dtype)
    if keep is not None and (cap is not None or terms.scale is not None or problem.score_fn is not None):
        raw = jnp.where(keep, raw, 0)  # so that NaN in what nobody sees reaches no gradient
    scale = problem.scale if terms.scale is None else terms.scale.astype(raw.dtype)
    s = raw * scale if cap is None else cap * jnp.tanh(raw * (scale / cap))
    if problem.score_fn is not None:
        assert at is not None
        s = problem.score_fn(s, at, terms.score, at.of_score)
    if terms.bias is not None:
        s = s + terms.bias.astype(raw.dtype)  # B|1 K|1 G|1 t|1 c|1
    return s if keep is None else jnp.where(keep, s, -jnp.inf)


LOG2_E = 1 / math.log(2)


def in_bits(problem: Problem) -> Problem:
    """The problem whose logits are these times log2 e, so that exp(s) is exp2 of them."""
    cap = problem.soft_cap
    return dataclasses.replace(problem, scale=problem.scale * LOG2_E, soft_cap=None if cap is None else cap * LOG2_E)


def finish_in_bits(problem: Problem, raw: Array, terms: Terms, keep: Array | None, at: Places | None = None) -> Array:
    """`finish` times log2 e; a function of the user's has its logits in nats."""
    if problem.score_fn is None:
        return finish(in_bits(problem), raw, terms, keep, at)
    return finish(problem, raw, terms, keep, at) * LOG2_E


def tile_range(problem: Problem, q_offset, first, last):
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


def accumulator_dtype(operands: Operands):
    """float32, or float64 for float64: of logits, lse, sums and gradients while they are accumulated."""
    return jnp.float64 if operands.query.dtype == jnp.float64 else jnp.float32


def check_sizes_known(operands: Operands, what: str) -> None:
    """Refuse lengths that jax.export leaves symbolic, for `what`."""
    T, S = operands.query.shape[1], operands.key.shape[1]
    if not (isinstance(T, int) and isinstance(S, int)):
        raise NotImplementedError(
            f"{what} does not support lengths that jax.export leaves symbolic (T={T}, S={S}). "
            "Export with lengths that are numbers."
        )


def part_of(x: Array, cuts: dict[int, tuple[Any, int]]) -> Array:
    """`x` sliced, {dim: (start, size)}, but for dims in which it is broadcast (size 1)."""
    cuts = {dim: cut for dim, cut in cuts.items() if x.shape[dim] not in (1, cut[1])}
    starts = [jnp.int32(cuts[dim][0] if dim in cuts else 0) for dim in range(x.ndim)]
    sizes = [cuts[dim][1] if dim in cuts else size for dim, size in enumerate(x.shape)]
    return lax.dynamic_slice(x, starts, sizes) if cuts else x


def number_heads(like: Array, K: int, first=(0, 0)) -> Array:
    """b N + n of each query head, laid out as `like` [B, K, G] is, which begins with batch entry and key head `first`."""
    zero = jnp.zeros_like(like, jnp.uint32)
    b, k, g = (lax.broadcasted_iota(jnp.uint32, like.shape, dim) for dim in range(3))
    b, k = (x + jnp.uint32(x0) for x, x0 in zip((b, k), first, strict=True))
    return zero + ((b * K + k) * like.shape[2] + g)


def kept_by_dropout(
    problem: Problem, operands: Operands, head: Array, lengths: tuple[int, int], rows: Array, cols: Array
) -> Array:
    """The keep-mask of a tile, 1|B 1|K 1|G t c, a function of coordinates alone: the same for any chunking.

    It is `jax.random.bernoulli(key, 1 - rate, [B, N, T, S])` (or [T, S], shared) with threefry's partitionable counters,
    which are flat indices: what Flax draws for the same key. `head` are the tile's `number_heads`, `lengths` T and S.
    """
    assert problem.dropout is not None and operands.dropout_key is not None
    T, S = lengths
    if problem.dropout.shared:
        head = jnp.zeros((1, 1, 1), jnp.uint32)
    high, low = _multiply_add(head[..., None], T, rows.astype(jnp.uint32))
    high, low = high[..., None] * jnp.uint32(S), low[..., None]
    carry, low = _multiply_add(low, S, cols.astype(jnp.uint32))
    return _uniform_below(operands.dropout_key, high + carry, low, 1.0 - problem.dropout.rate)


def _multiply_add(x: Array, size: int, y: Array) -> tuple[Array, Array]:
    """x * size + y as 64 bits in two uint32 (x64 may be off), from 16-bit halves; `size` < 2^32."""
    x, y = jnp.broadcast_arrays(x, y)
    half, mask = jnp.uint32(16), jnp.uint32(0xFFFF)
    s1, s0 = jnp.uint32(size >> 16), jnp.uint32(size & 0xFFFF)
    x1, x0 = x >> half, x & mask
    middle = x1 * s0 + ((x0 * s0) >> half)  # at most 2^32 - 1
    middle0 = (middle & mask) + x0 * s1
    high = x1 * s1 + (middle >> half) + (middle0 >> half)
    low = x * jnp.uint32(size)
    total = low + y
    return high + (total < low).astype(jnp.uint32), total


def _uniform_below(key: Array, high: Array, low: Array, p: float) -> Array:
    """bernoulli(p) at the 64-bit counters (high, low), bit for bit as `jax.random.bernoulli` at those flat indices."""
    from jax.extend.random import threefry2x32_p

    high, low = jnp.broadcast_arrays(high, low)
    k = key[0] + jnp.zeros_like(high), key[1] + jnp.zeros_like(high)  # sharded as `high` is, or XLA gathers `high`
    bits1, bits2 = threefry2x32_p.bind(*k, high, low)
    if jax.dtypes.canonicalize_dtype(float) == jnp.float64:  # bernoulli then draws float64
        bits = (bits1.astype(jnp.uint64) << jnp.uint64(32)) | bits2.astype(jnp.uint64)
        unit = lax.bitcast_convert_type((bits >> jnp.uint64(12)) | jnp.uint64(0x3FF << 52), jnp.float64) - 1.0
    else:
        bits = bits1 ^ bits2
        unit = lax.bitcast_convert_type((bits >> jnp.uint32(9)) | jnp.uint32(0x3F800000), jnp.float32) - jnp.float32(1)
    return unit < jnp.asarray(p, unit.dtype)


def only_kernels_fuse(problem: Problem) -> str | None:
    """Why what is not a kernel cannot run this."""
    return 'backward="fused" is a form that only kernels have' if problem.backward == "fused" else None
