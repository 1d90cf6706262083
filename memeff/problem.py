"""Hold what one call computes: its static choices (`Problem`) and its arrays (`Operands`)."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from memeff.block_mask import VisibleBlocks
from memeff.user_functions import TracedFunction, TracedTransform


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
    score_fn: TracedFunction | None = None
    mask_fn: TracedFunction | None = None
    blocks: VisibleBlocks | None = None  # of which mask_fn hides all; None: not known
    qk_transform: TracedTransform | None = None
    # of kernels: "split" in two, or "fused" in one; None: as "split" ("fastest": see dispatch)
    backward: str | None = None
    chunk_size: tuple[int, int] = (512, 512)  # rows and columns of a tile
    # the same for a forward with a fixed reference; None: without
    fixed_chunk_size: tuple[int, int] | None = None
    # and for a backward fused into its products (GPU); None: without
    fused_chunk_size: tuple[int, int] | None = None
    # of the last two, whole tiles are joined up to so many logits of a head; 0: never
    joined: int = 0
    # batch entries and key heads of a tile, divisors of B and K; None: all
    block: tuple[int, int] | None = None
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


class LogitParams(NamedTuple):
    """What shapes the logits besides the dot products, and gets a gradient: scalars, and bias [B|1, K|1, G|1, T|1, S|1]."""

    scale: Array | None = None
    soft_cap: Array | None = None
    bias: Array | None = None
    score: tuple[Array, ...] = ()  # params of score_fn that are floats, of any shapes
    transform: tuple[Array, ...] = ()  # and of qk_transform
    # K G, in nats: a column of the softmax without a key; only forwards see it
    sinks: Array | None = None


class Operands(NamedTuple):
    """The arrays of one call, or of one tile of it."""

    query: Array  # B T K G H; query head n = k * G + g
    key: Array  # B S K H
    value: Array  # B S K D
    terms: LogitParams = LogitParams()
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
    terms: LogitParams


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
