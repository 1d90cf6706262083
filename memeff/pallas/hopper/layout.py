"""Bring the arrays of a call into the layout of the Hopper kernels.

All head dims, also that of the values, are padded to one multiple of 64, and lengths to multiples
of 8. Beyond 128, the head dim of values is padded to a multiple of its own.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.dropout import head_words, key_words, query_words
from memeff.logits import LOG2_E, with_ratio
from memeff.pallas.hopper.bias import bias_dims, bias_scalars, pad_bias, pad_bias_vector
from memeff.pallas.hopper.capability import has_wide_heads, mask_becomes_bias
from memeff.pallas.hopper.parts import count_parts, split_array
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.partitioning import entries_of
from memeff.pallas.user_functions import calls
from memeff.problem import Operands, Problem, split_axis
from memeff.shape import round_up
from memeff.sharding import vary_together

HEAD_MULTIPLE = 64  # of padded head dims
ROWS_MULTIPLE = 128  # of padded rows and token vectors, because a thread block reads whole tiles

# Dims of query, key and value, in letters.
DIMS = "btkgh", "bskh", "bskd"
# Dims of the fields of `Scalars`; fields without an entry are [B].
SCALAR_DIMS = {
    "q_segments": "bt",
    "kv_segments": "bs",
    "head_numbers": "bkg",
    "sinks": "bkg",
    "query_bias": "bkgt",
    "key_bias": "bkgs",
    "query_dropout": "bt",
    "key_dropout": "bs",
    "head_dropout": "bkg",
    "query_numbers": "bt",
    "key_numbers": "bs",
    "difference_numbers": "bkgx",
    "page_table": "bn",
    "query_entries": entries_of(0),
    "key_entries": entries_of(1),
    "value_entries": entries_of(2),
}


def padded_width(operands: Operands) -> int:
    """Return the padded head dim of queries and keys, and of values up to `value_width`."""
    largest = max(operands.query.shape[-1], operands.value.shape[-1])
    return round_up(largest, HEAD_MULTIPLE)


def value_width(operands: Operands) -> int:
    """Return the padded head dim of values: that of keys, or less where heads are wide."""
    if not has_wide_heads(operands):
        return padded_width(operands)
    return round_up(operands.value.shape[-1], HEAD_MULTIPLE)


def split_query(operands: Operands, K: int) -> tuple[Array | None, Array, Array]:
    """Return the query as [B, T, K, G, H], the key and the value, with the dims of DIMS.

    A mesh may shard the key heads along one axis and the heads of their groups along another.
    """
    query = None if operands.query is None else split_axis(operands.query, 2, K)
    return query, operands.key, operands.value


def head_dim_to_read(H: int, width: int) -> int:
    """Return the padded head dim of an array that kernels read by `head_rows`.

    A head dim below 64 needs no padding if `width` is 64 and copies of vectors begin at 16 bytes.
    """
    return H if width == HEAD_MULTIPLE and H % 8 == 0 else width


def pad_tokens(x: Array, width: int) -> Array:
    """Pad x [B, T, N, H] with zeros to head dim `width` and to the next multiple of 8 tokens."""
    _, T, _, H = x.shape
    if T % 8 == 0 and H == width:
        return x
    return jnp.pad(x, [(0, 0), (0, -T % 8), (0, 0), (0, width - H)])


def pad_operand(x: Array, width: int) -> Array:
    """Pad x [B, T, N, H] as kernels read it by `head_rows`, and split float32 into its parts."""
    if count_parts(x.dtype) == 1:
        return pad_tokens(x, head_dim_to_read(x.shape[-1], width))
    return split_array(pad_tokens(x, width))


def pad_rows(x: Array) -> Array:
    """Merge the heads of row sums x [B, K, G, T], and pad them to whole tiles: [B, N, T']."""
    x = lax.collapse(x, 1, 3)  # b n t
    return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[2] % ROWS_MULTIPLE)])


def fold_heads(x: Array) -> Array:
    """Return x [B, K, G, T, D] as [B, T, N, D]."""
    return lax.collapse(x.transpose(0, 3, 1, 2, 4), 2, 4)


def unfold_heads(x: Array, shape: tuple[int, ...], D: int) -> Array:
    """Return x [B, T', N, D'] without its padding as [B, K, G, T, D]; `shape` is B T K G."""
    B, T, K, G = shape
    x = x[:, :T, :, :D].reshape(B, T, K, G, D)
    return x.transpose(0, 2, 3, 1, 4)


def replace_mask(operands: Operands) -> Operands:
    """Replace a mask by segment ids or by a bias, which the kernels read."""
    if operands.mask is None:
        return operands
    return mask_as_bias(operands) if mask_becomes_bias(operands) else mask_as_segments(operands)


def mask_as_bias(operands: Operands) -> Operands:
    """Put -inf into the bias where the mask hides a pair. Without a bias, one of 16 bits begins."""
    params = operands.logit_params
    bias = jnp.zeros((), jnp.bfloat16) if params.bias is None else params.bias
    mask: Any = operands.mask
    bias = jnp.where(mask, bias, jnp.array(-jnp.inf, bias.dtype))
    return operands._replace(mask=None, logit_params=params._replace(bias=bias))


def mask_as_segments(operands: Operands) -> Operands:
    """Replace a mask of keys or of queries by segment ids.

    Id 0 may attend. Hidden keys get -1 before the first visible key and 1 behind it, so that
    padding leaves the ids of keys in order. Hidden queries get 2.
    """
    shape = operands.shape
    mask: Any = operands.mask
    mask = mask[:, 0]  # B|1 T|1 S|1
    q_segments = kv_segments = jnp.int32(0)
    if mask.shape[1] == 1:
        visible = mask[:, 0]  # B|1 S
        before = jnp.arange(visible.shape[1]) < visible.argmax(axis=1, keepdims=True)
        kv_segments = jnp.where(visible, 0, jnp.where(before, -1, 1))
    else:
        q_segments = jnp.where(mask[:, :, 0], 0, 2)
    return operands._replace(
        mask=None,
        q_segments=jnp.broadcast_to(q_segments, (shape.B, shape.T)),
        kv_segments=jnp.broadcast_to(kv_segments, (shape.B, shape.S)),
    )


def scalars_of(problem: Problem, operands: Operands) -> Scalars:
    """Return the numbers that the kernels read besides query, key and value; heads are K G."""
    B = operands.shape.B

    def for_each_batch_entry(x: Array | None) -> Array | None:
        return None if x is None else jnp.broadcast_to(x, (B,))

    terms = with_ratio(problem, operands.logit_params)
    scalars = Scalars(
        q_offset=for_each_batch_entry(operands.q_offset),
        q_lengths=for_each_batch_entry(operands.q_lengths),
        kv_lengths=for_each_batch_entry(operands.kv_lengths),
        scale=for_each_batch_entry(terms.scale),
        soft_cap=for_each_batch_entry(terms.soft_cap),
        ratio=for_each_batch_entry(terms.ratio),
        q_segments=operands.q_segments,
        kv_segments=operands.kv_segments,
    )
    if operands.entries is not None:
        entries = operands.entries
        scalars = scalars._replace(
            query_entries=entries.query, key_entries=entries.key, value_entries=entries.value
        )
    numbers = vary_together(calls.precomputed_numbers(problem, operands), operands.query)
    sinks = operands.logit_params.sinks
    if sinks is not None:
        sinks = split_axis(sinks * LOG2_E, 0, operands.shape.K)
        sinks = jnp.broadcast_to(sinks, (B, *sinks.shape))
        sinks = vary_together(sinks, operands.query)
    bias = bias_scalars(operands.logit_params.bias, operands.shape)
    bias = vary_together(bias, operands.query)
    dropout = vary_together(dropout_scalars(problem, operands), operands.query)
    return scalars._replace(**numbers._asdict(), sinks=sinks, **bias, **dropout)


def dropout_scalars(problem: Problem, operands: Operands) -> dict[str, tuple[Array, ...]]:
    """Return the fields of `Scalars` for dropout; the heads are K G."""
    key = operands.dropout_key
    if problem.dropout is None or key is None:
        return {}
    (B,), T, S, N, K, _, _ = operands.shape
    by_query = query_words(key, jnp.arange(T))
    fields = {
        "query_dropout": tuple(jnp.broadcast_to(x, (B, T)) for x in by_query),
        "key_dropout": (jnp.broadcast_to(key_words(key, jnp.arange(S)), (B, S)),),
    }
    if not problem.dropout.shared:
        heads = jnp.arange(B * N).reshape(B, K, N // K)
        fields["head_dropout"] = tuple(head_words(key, heads))
    return fields


def dims_of(scalars: Scalars) -> tuple[str, ...]:
    """Return the dims, in letters, of each array in `scalars`."""
    dims = []
    for name, arrays in scalars._asdict().items():
        if name == "bias" and arrays is not None:
            dims.append(bias_dims(arrays.shape))
        else:
            dims += [SCALAR_DIMS.get(name, "b")] * len(jax.tree.leaves(arrays))
    return tuple(dims)


def pad_scalars(scalars: Scalars) -> Scalars:
    """Pad token vectors to whole tiles, and merge the dims of heads into one."""

    def pad(x: Array) -> Array:
        if x.ndim > 2:
            return lax.collapse(x, 1, 3)  # B N, or B N X
        if x.ndim == 2:
            return jnp.pad(x, [(0, 0), (0, -x.shape[1] % ROWS_MULTIPLE)], mode="edge")
        return x

    padded = jax.tree.map(pad, scalars)
    if padded.bias is not None:
        padded = padded._replace(bias=pad_bias(padded.bias))
    for name in ("query_bias", "key_bias"):
        vector = getattr(padded, name)
        if vector is not None:
            padded = padded._replace(**{name: pad_bias_vector(vector)})
    return padded
