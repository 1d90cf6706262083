"""Name and type the arguments of `dot_product_attention` for all functions that take a call."""

from __future__ import annotations  # help() then shows ArrayLike and not the nine types that it is

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict

from jax import lax
from jax.typing import ArrayLike

from memeff.block_mask import BlockMask
from memeff.sequence.layout import Layout
from memeff.user_functions import Mask, Score, Transform

Implementation = Literal["xla", "reference", "pallas"]
Backward = Literal["split", "fused", "fastest"]
DropoutBits = Literal["threefry", "mix32"]
Strategy = Literal["all_gather", "ring", "all_to_all"]


class CachedOptions(TypedDict, total=False):
    """Keywords of `dot_product_attention` that a cache leaves to its caller."""

    scale: ArrayLike | None
    local_window_size: int | tuple[int | None, int | None] | None
    implementation: Implementation | None
    backward: Backward | None
    logits_soft_cap: ArrayLike | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    score_fn: Callable[..., Any] | Score | None
    score_params: Any
    mask_fn: Callable[..., Any] | Mask | BlockMask | None
    mask_params: Any
    sinks: ArrayLike | None
    qk_transform: Callable[..., Any] | Transform | None
    qk_transform_params: Any
    chunk_size: int | tuple[int, int] | None
    memory_limit: int | str | None
    sequence_axis: str | tuple[str, str] | None
    sequence_layout: Layout
    context_parallel: Strategy | None
    batch_axis: str | tuple[str, ...] | None
    head_axis: str | tuple[str, ...] | None


class AttentionOptions(CachedOptions, total=False):
    """Keywords of `dot_product_attention` that Flax's attention functions do not have."""

    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    q_offset: ArrayLike
    dropout_bits: DropoutBits


class AttentionKwargs(AttentionOptions, total=False):
    """The keywords of `dot_product_attention`, except `return_residual`."""

    precision: lax.PrecisionLike
    dropout_rng: ArrayLike | None
    dropout_rate: float
    broadcast_dropout: bool


class Arguments(NamedTuple):
    """The arguments of one call, as the user gave them; `dot_product_attention` describes each."""

    query: ArrayLike
    key: ArrayLike
    value: ArrayLike
    bias: ArrayLike | None = None
    mask: ArrayLike | None = None
    scale: ArrayLike | None = None
    is_causal: bool = False
    query_seq_lengths: ArrayLike | None = None
    key_value_seq_lengths: ArrayLike | None = None
    local_window_size: int | tuple[int | None, int | None] | None = None
    implementation: Implementation | None = None
    backward: Backward | None = None
    return_residual: bool = False
    logits_soft_cap: ArrayLike | None = None
    query_segment_ids: ArrayLike | None = None
    key_value_segment_ids: ArrayLike | None = None
    q_offset: ArrayLike = 0
    score_fn: Callable[..., Any] | Score | None = None
    score_params: Any = None
    mask_fn: Callable[..., Any] | Mask | BlockMask | None = None
    mask_params: Any = None
    sinks: ArrayLike | None = None
    qk_transform: Callable[..., Any] | Transform | None = None
    qk_transform_params: Any = None
    chunk_size: int | tuple[int, int] | None = None
    memory_limit: int | str | None = None
    precision: lax.PrecisionLike = None
    dropout_rng: ArrayLike | None = None
    dropout_rate: float = 0.0
    broadcast_dropout: bool = True
    dropout_bits: DropoutBits = "threefry"
    sequence_axis: str | tuple[str, str] | None = None
    sequence_layout: Layout = "contiguous"
    context_parallel: Strategy | None = None
    batch_axis: str | tuple[str, ...] | None = None
    head_axis: str | tuple[str, ...] | None = None


def bind_arguments(name: str, *arrays: Any, **kwargs: Any) -> Arguments:
    """Return the arguments of a call, for the public function `name`; refuse other keywords."""
    unknown = kwargs.keys() - set(Arguments._fields[len(arrays) :])
    if unknown:
        words = ", ".join(sorted(unknown))
        raise TypeError(f"memeff.{name} got an unexpected keyword argument: {words}.")
    return Arguments(*arrays, **kwargs)
