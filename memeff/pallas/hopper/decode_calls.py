"""Call the decode kernel: few queries of each key head, and a cache that is read in place."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.pallas.hopper.decode import DecodeKernel
from memeff.pallas.hopper.decode_work import ROWS, Cache, DecodeSizes, Pages, keys_of_split
from memeff.pallas.hopper.fragments import permute_dims, split_query
from memeff.pallas.hopper.layout import (
    DIMS,
    ROWS_MULTIPLE,
    dims_of,
    replace_mask,
    scalars_of,
)
from memeff.pallas.hopper.scalars import Scalars
from memeff.pallas.hopper.scheduler import CallSizes
from memeff.pallas.partitioning import partitioned
from memeff.pallas.user_functions import calls
from memeff.problem import Operands, Problem, split_axis
from memeff.softmax import Lse, LseFor
from memeff.stored import StoredKeys

# Rows of a query are copied in groups of 8. If there are fewer than 8, the copy adds rows of zeros.
QUERY_GROUP = 8
# Dims of the arrays of a `Cache`, and of one whose keys lie in pages.
CACHE_DIMS = "bskh", "bskd", "bks", "bks"
PAGED_DIMS = "pekh", "pekd", "pke", "pke"


def tile_shape(operands: Operands) -> tuple[int, int]:
    """Return the rows and columns of a tile."""
    shape = operands.shape
    call = CallSizes(shape.B, shape.T, shape.S, shape.K, shape.G)
    sizes = DecodeSizes.of(call, shape.H, shape.D, None, _cache_of(operands)[0].key.dtype)
    return ROWS, sizes.tile


def describe(operands: Operands) -> str:
    """Return a phrase that names the kernel and its splits."""
    text = f"decode kernel, {keys_of_split(operands.key.shape[1])} keys a split"
    cache, table = _cache_of(operands)
    if table is not None:
        text += f", pages of {cache.key.shape[1]}"
    if cache.has_scales:
        text += f", keys in {cache.key.dtype}"
    return text


def _cache_of(operands: Operands) -> tuple[Cache, Array | None]:
    """Return keys and values as the kernel reads them, and the table of their pages or None."""
    key, value = operands.key, operands.value
    if not isinstance(key, StoredKeys):
        return Cache(key, value), None
    assert isinstance(value, StoredKeys)
    return Cache(key.values, value.values, key.scales, value.scales), key.table


def forward(
    problem: Problem, operands: Operands, lse_for: LseFor = "caller", partial_out: bool = False
) -> tuple[Array, Lse | None]:
    """Return out [B, K, G, T, D], in float32 if it is a partial result, and lse [B, K, G, T]."""
    operands = replace_mask(operands)
    cache, table = _cache_of(operands)
    scalars = scalars_of(problem, operands)._replace(page_table=table)
    leaves, structure = jax.tree.flatten((cache, scalars))
    on_tiles = calls.tile_functions(problem, operands)

    def call(query, *leaves):
        cache, scalars = jax.tree.unflatten(structure, leaves)
        B, T, K, G, H = query.shape
        heads = K, G
        S, D = cache.key.shape[1], cache.value.shape[-1]
        pages = None
        if table is not None:
            pages = Pages(*cache.key.shape[:2])
            S = scalars.page_table.shape[1] * pages.size
        sizes = DecodeSizes.of(CallSizes(B, T, S, K, G), H, D, pages, cache.key.dtype)
        K, G = sizes.call.K, sizes.call.G
        cache = cache.with_heads(K)
        scalars = _with_heads(scalars, K)
        rows = query.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4)
        rows = rows.reshape(B, K, G * T, H)  # b k r h
        if G * T > QUERY_GROUP:
            rows = jnp.pad(rows, [(0, 0), (0, 0), (0, -G * T % QUERY_GROUP), (0, 0)])
        row_scalars = _scalars_of_rows(scalars, T, G)
        row_scales = None
        if sizes.splits_query:
            rows, scales = split_query(rows)
            row_scales = _pad_rows(scales)
        elif cache.has_scales:
            rows = permute_dims(rows)
        kernel = DecodeKernel(
            on_tiles, sizes, cache, row_scalars, row_scales, query.dtype, lse_for is not None
        )
        out, lse = kernel.run(rows, jnp.float32 if partial_out else query.dtype)
        out = out.reshape(B, T, *heads, D).transpose(0, 2, 3, 1, 4)
        if lse is None:
            return (out,)
        return out, lse.reshape(B, T, *heads).transpose(0, 2, 3, 1)

    dims_out = ("bkgtd", "bkgt") if lse_for else ("bkgtd",)
    cache_dims = CACHE_DIMS if table is None else PAGED_DIMS
    if not cache.has_scales:
        cache_dims = cache_dims[:2]
    run = partitioned(call, (DIMS[0], *cache_dims, *dims_of(scalars)), dims_out)
    out, *lse = run(split_axis(operands.query, 2, operands.shape.K), *leaves)
    return out, Lse(lse[0], None) if lse else None


def _with_heads(scalars: Scalars, K: int) -> Scalars:
    """Return the scalars with arrays of heads [B, K', G'] as [B, K, G]."""

    def divided(x: Array) -> Array:
        return x.reshape(x.shape[0], K, -1)

    return scalars._replace(
        head_numbers=tuple(map(divided, scalars.head_numbers)),
        sinks=None if scalars.sinks is None else divided(scalars.sinks),
    )


def _scalars_of_rows(scalars: Scalars, T: int, G: int) -> Scalars:
    """Return the scalars with numbers of queries and of heads as numbers of rows, padded.

    Row g T + t of a key head is query t of head g of its group. Numbers of queries [B, T] become
    [B, R], those of heads [B, K, G] become [B, K, R], and sinks [B, N].
    """

    def of_query(x: Array) -> Array:
        return _pad_rows(jnp.tile(x, (1, G)))

    def of_head(x: Array) -> Array:
        return _pad_rows(jnp.repeat(x, T, axis=2))

    q_segments, kv_segments, sinks = scalars.q_segments, scalars.kv_segments, scalars.sinks
    return scalars._replace(
        q_segments=None if q_segments is None else of_query(q_segments),
        kv_segments=None if kv_segments is None else _pad_rows(kv_segments),
        head_numbers=tuple(map(of_head, scalars.head_numbers)),
        query_numbers=tuple(map(of_query, scalars.query_numbers)),
        key_numbers=tuple(map(_pad_rows, scalars.key_numbers)),
        sinks=None if sinks is None else lax.collapse(sinks, 1, 3),
    )


def _pad_rows(x: Array) -> Array:
    """Pad the last dim, of rows or keys, to whole copies."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % ROWS_MULTIPLE)]
    return jnp.pad(x, padding, mode="edge")
