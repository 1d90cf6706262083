"""Hold one call: what it computes (`Problem`), how (`Schedule`), and its arrays (`Operands`)."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from memeff.block_mask import VisibleBlocks
from memeff.inputs import refuse_symbolic
from memeff.shape import CallShape
from memeff.user_functions import TracedFunction, TracedTransform


@dataclasses.dataclass(frozen=True)
class Dropout:
    """Drop each probability with chance `rate`.

    If `shared`, one T x S mask serves all batch entries and heads (Flax's default).
    """

    rate: float
    shared: bool
    bits: str = "threefry"  # or "mix32", see dropout.py


class WholeCall(NamedTuple):
    """The sizes of a whole call, if the operands are a shard of it."""

    T: int
    S: int
    N: int
    stride: int = 1  # tokens from one position of a shard to the next


@dataclasses.dataclass(frozen=True)
class Problem:
    """The static choices of what one call computes.

    Each implementation reads every field or refuses it in its `why_not`.
    """

    left: int | None = None  # tokens that a query sees to its left; None: no bound
    right: int | None = None  # and to its right; causal attention is right = 0
    q_offset: int = 0  # position of query row 0; Operands.q_offset takes precedence
    scale: float = 1.0  # LogitParams.scale takes precedence
    soft_cap: float | None = None  # LogitParams.soft_cap takes precedence
    approximates_cap: bool = False  # only kernels set this, see `logits.approximates_cap`
    dropout: Dropout | None = None
    precision: lax.PrecisionLike = None
    score_fn: TracedFunction | None = None
    mask_fn: TracedFunction | None = None
    # positions of queries for which mask_fn has params, from 0 on; None: for those of all queries
    mask_positions: int | None = None
    blocks: VisibleBlocks | None = None  # blocks in which mask_fn shows some pair; None: unknown
    qk_transform: TracedTransform | None = None
    whole: WholeCall | None = None  # None: the operands are the whole call

    @property
    def has_window(self) -> bool:
        """Return True if a window or causal order bounds the keys of a query."""
        return (self.left, self.right) != (None, None)

    @property
    def has_pair_functions(self) -> bool:
        """Return True if the user gave a function of query-key pairs."""
        return self.score_fn is not None or self.mask_fn is not None

    @property
    def names_positions(self) -> bool:
        """Return True if positions in the whole call matter, beyond the distance of a pair."""
        return self.has_pair_functions or bool(self.dropout or self.qk_transform)

    @property
    def extras(self) -> tuple[Any, ...]:
        """Return the choices that change logits or probabilities; all are None in a plain call."""
        return self.soft_cap, self.dropout, self.score_fn, self.mask_fn, self.qk_transform


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The static choices of how one call is computed."""

    chunk_size: tuple[int, int] = (512, 512)  # rows and columns of a tile
    # the same in a forward with a precomputed bound on each row's maximum; None: no such forward
    fixed_max_chunk_size: tuple[int, int] | None = None
    # the same in a backward that XLA:GPU fuses into its products; None: no such backward
    gpu_fused_chunk_size: tuple[int, int] | None = None
    # These two loops merge unmasked tiles into tiles of so many logits per head; 0: never
    max_merged_logits: int = 0
    # batch entries and key heads of a tile, which divide B and K; None: all
    head_block: tuple[int, int] | None = None
    one_pass_jvp: bool = False  # compute out and its tangent in one pass if both are needed
    # calls under vmap whose tiles exist at the same time; None: all
    calls_at_once: int | None = None
    fused_backward: bool = False  # one kernel for the whole gradient instead of two
    # of those two, that of the keys runs first, so that a message of its results can travel beside
    # the other
    keys_first: bool = False
    # dk and dv may be one array [B, S, 2 K, H], `Gradients.key`, which can be sent as it is
    joined_gradients: bool = False
    # keys of a split in a forward that reads keys in place for few queries; None: loop over tiles
    split_keys: int | None = None
    # out will be merged: it stays in the accumulators' dtype, or is a tuple of arrays to be added
    partial_out: bool = False

    def heads_of_tile(self, B: int, K: int) -> tuple[int, int]:
        """Return the batch entries and key heads of a tile, of B and K."""
        return self.head_block or (B, K)


class LogitParams(NamedTuple):
    """Differentiable arrays that shape the logits besides the dot products."""

    scale: Array | None = None  # scalar
    soft_cap: Array | None = None  # scalar
    bias: Array | None = None  # B|1 N|1 T|1 S|1
    score: tuple[Array, ...] = ()  # float params of score_fn, of any shapes
    transform: tuple[Array, ...] = ()  # float params of qk_transform, of any shapes
    # N, in nats: a column of the softmax without a key; only forwards read it
    sinks: Array | None = None
    ratio: Array | None = None  # scalar, scale / soft_cap; only kernels give it, see `with_ratio`


class Origin(NamedTuple):
    """The place of a shard in the whole call (`Problem.whole`); int32, in tokens.

    The window, lengths and segments of `Operands` count within the shard. What names a head or a
    position (functions, `qk_transform`, dropout) counts from here.
    """

    first_batch: Array  # scalar: number of the first batch entry
    first_head: Array  # scalar: number of the first query head
    first_query: Array  # scalar: number of the first query
    first_key: Array  # scalar: number of the first key
    q_offset: Array  # B|1: position of query 0 of the whole call among its keys


class Entries(NamedTuple):
    """The batch entries of the arrays that each batch entry of the call reads, [B], int32."""

    query: Array  # of the query, and of out, lse and their cotangents
    key: Array
    value: Array


class Operands(NamedTuple):
    """The arrays of one call.

    A `Tile` holds the parts of one tile, with the heads split (`split_heads`). In a forward of the
    chunked path or of the decode kernel `key` and `value` may be `stored.StoredKeys`.
    """

    query: Array  # B T N H; query head n = k * G + g
    key: Array  # B S K H
    value: Array  # B S K D
    logit_params: LogitParams = LogitParams()
    mask: Array | None = None  # B|1 N|1 T|1 S|1, True = may attend
    q_lengths: Array | None = None  # B, int32, tokens
    kv_lengths: Array | None = None  # B
    q_offset: Array | None = None  # B|1
    q_segments: Array | None = None  # B T
    kv_segments: Array | None = None  # B S
    dropout_key: Array | None = None  # 2, uint32
    score_nonfloat_params: tuple[Array, ...] = ()  # params of score_fn that are not floats
    mask_params: tuple[Array, ...] = ()
    transform_nonfloat_params: tuple[Array, ...] = ()  # params of qk_transform that are not floats
    origin: Origin | None = None
    # Batch entry b of the call reads entry entries.query[b] of the query, and so on. All other
    # arrays, and all results, have the batch entries of the call. None: they are the same.
    entries: Entries | None = None

    @property
    def shape(self) -> CallShape:
        """Return the sizes of the call."""
        shape = CallShape.of(self.query, self.key, self.value)
        return shape if self.entries is None else shape._replace(leads=self.entries.query.shape)


# The letters of each operand's dims; a dim of a mask or a bias may have size 1 instead. Operands
# without an entry are whole in every tile.
OPERAND_DIMS = {
    "query": "btnh",
    "key": "bskh",
    "value": "bskd",
    "bias": "bnts",
    "sinks": "n",
    "mask": "bnts",
    "q_lengths": "b",
    "kv_lengths": "b",
    "q_offset": "b",
    "q_segments": "bt",
    "kv_segments": "bs",
}


def map_operands(f: Callable[[Any, str], Any], operands: Operands) -> Operands:
    """Apply `f(array, dims)` to each array that has an entry in OPERAND_DIMS.

    Return the operands with the results in the places of these arrays.
    """

    def map_fields(arrays: Any) -> Any:
        present = {name: x for name, x in arrays._asdict().items() if x is not None}
        mapped = {
            name: f(x, OPERAND_DIMS[name]) for name, x in present.items() if name in OPERAND_DIMS
        }
        return arrays._replace(**mapped)

    origin = operands.origin
    operands = operands._replace(
        logit_params=map_fields(operands.logit_params),
        origin=None if origin is None else map_fields(origin),
    )
    return map_fields(operands)


def split_heads(operands: Operands, k: int) -> Operands:
    """Return operands in the layout of a tile that has `k` key heads.

    That is query B K G t H, key B K c H, value B K c D, mask and bias B|1 K|1 G|1 t|1 c|1.
    """

    def split(x: Array, dims: str) -> Array:
        if dims == "btnh":
            return split_axis(x, 2, k).transpose(0, 2, 3, 1, 4)
        if dims == "bnts":
            return split_axis(x, 1, 1 if x.shape[1] == 1 else k)
        return x.swapaxes(1, 2) if dims in ("bskh", "bskd") else x

    return map_operands(split, operands)


def split_axis(x: Array, axis: int, k: int) -> Array:
    """Split the query heads at `axis` of `x` into `k` key heads and the heads of a group."""
    shape = x.shape
    group = shape[axis] // k if k else 1
    return x.reshape(*shape[:axis], k, group, *shape[axis + 1 :])


class Gradients(NamedTuple):
    """Cotangents of `Operands`, in the shapes and layouts of their primals.

    They are accumulated in float32, or in float64 for float64 operands.
    """

    query: Array
    key: Array
    value: Any  # Array; None where its heads follow those of `key`: `Schedule.joined_gradients`
    logit_params: LogitParams


def accumulator_dtype(operands: Operands):
    """Return the dtype of logits, lse, sums and accumulated gradients: float32, or float64."""
    return sum_dtype(operands.query.dtype)


def sum_dtype(dtype: Any) -> Any:
    """Return the dtype of sums of numbers of `dtype`: float32, or float64 for float64.

    `dtype` may be a name. jnp.promote_types would be refused under strict promotion.
    """
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def out_dtype(schedule: Schedule, operands: Operands):
    """Return the dtype in which a forward returns out."""
    return accumulator_dtype(operands) if schedule.partial_out else operands.query.dtype


def check_sizes_known(operands: Operands, what: str) -> None:
    """Raise an error that names `what` if jax.export leaves the lengths T or S symbolic."""
    refuse_symbolic(what, T=operands.shape.T, S=operands.shape.S)
