"""Read the bias of a tile of query-key pairs.

A bias that has a number for each pair comes to shared memory tile by tile, beside the keys or the
queries of a visit. A bias of queries alone, or of keys alone, is read from global memory.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.sharding import reshard

from memeff.masking import bias_hides
from memeff.pallas.hopper.mosaic import (
    COL,
    FLOATS,
    ROW,
    SHARED,
    WGMMA,
    Barrier,
    Ref,
    broadcast_vector,
    plgpu,
)
from memeff.pallas.hopper.scalars import Scalars
from memeff.problem import Operands, split_axis
from memeff.shape import CallShape, round_up
from memeff.sharding import sharding_of_sum

VECTOR_MULTIPLE = 384  # of which the tiles of every kernel, of 64, 128 or 192 tokens, are parts
ROW_BYTES = 128  # of a row of the tiles of SHARED and FLOATS, in which tiles of the bias are copied


def bias_scalars(bias: Array | None, shape: CallShape) -> dict[str, Array]:
    """Return the fields of `Scalars` for a bias [B|1, N|1, T|1, S|1]; the heads are K G.

    A bias of queries or of keys becomes float32, where -inf alone hides a key.
    """
    if bias is None:
        return {}
    if is_of_pairs(bias):
        return {"bias": split_axis(bias, 1, shape.K if bias.shape[1] > 1 else 1)}
    name = "query_bias" if bias.shape[3] == 1 else "key_bias"
    hidden = jnp.where(bias_hides(bias), -jnp.inf, bias.astype(jnp.float32))
    return {name: spread_vector(hidden, shape)}


def bias_dims(shape: tuple[int, ...]) -> str:
    """Return the dims, in letters, of a bias [B|1, K|1, G|1, T, S].

    A dim of size 1 that all batch entries or heads share has a letter of its own.
    """
    letters = ""
    for letter, shared_letter, size in zip("bkg", "uvw", shape[:3], strict=True):
        letters += shared_letter if size == 1 else letter
    return letters + "ts"


def is_of_pairs(bias: Array) -> bool:
    """Return True if a bias [B|1, N|1, T|1, S|1] has a number for each pair of a head."""
    return bias.shape[2] > 1 and bias.shape[3] > 1


def has_pair_bias(operands: Operands) -> bool:
    """Return True if the call has a bias of pairs, whose tiles take shared memory."""
    bias = operands.logit_params.bias
    return bias is not None and is_of_pairs(bias)


def spread_vector(bias: Array, shape: CallShape) -> Array:
    """Return a bias of queries [B|1, N|1, T|1, 1], or of keys [B|1, N|1, 1, S], for all heads.

    The result is [B, K, G, T], or [B, K, G, S].
    """
    vector = bias[..., 0] if bias.shape[3] == 1 else bias[:, :, 0]
    length = shape.T if bias.shape[3] == 1 else shape.S
    vector = jnp.broadcast_to(vector, (shape.B, shape.N, length))
    return split_axis(vector, 1, shape.K)


def gradient_dims(bias: Array, shape: CallShape) -> str:
    """Return the dims, in letters, in which the kernels return the gradient of `bias`."""
    if not is_of_pairs(bias):
        return "bkgt" if bias.shape[3] == 1 else "bkgs"
    split = split_shape(bias, shape.K)
    dims = bias_dims(split)
    # One batch entry is no sum over the batch: vmap may then fold calls into it.
    return "b" + dims[1:] if shape.B == 1 else dims


def split_shape(bias: Array, k: int) -> tuple[int, ...]:
    """Return the shape of a bias [B|1, N|1, T, S] whose heads are split: [B|1, K|1, G|1, T, S]."""
    return jax.eval_shape(lambda x: split_axis(x, 1, k if x.shape[1] > 1 else 1), bias).shape


def unpad_bias_gradient(x: Array, dims: str, sizes: tuple[int, int, int, int]) -> Array:
    """Return a gradient of the bias kernel without padding and with its heads split.

    `x` is [B|1, N|1, T", S"], [B, N, T'] or [B, N, S'], `sizes` are T, K, G and S.
    """
    T, K, G, S = sizes
    x = x[..., : T if dims[-1] == "t" else S]
    if dims.endswith("ts"):
        x = x[..., :T, :]
    heads = K if "k" in dims else 1, G if "g" in dims else 1
    return x.reshape(x.shape[0], *heads, *x.shape[2:])


def merge_bias_gradient(x: Array, bias: Array, shape: CallShape) -> Array:
    """Return the gradient of `bias` in its shape, from what `unpad_bias_gradient` returned."""
    if is_of_pairs(bias):
        gradient = lax.collapse(x, 1, 3)
    else:
        _, pull = jax.vjp(lambda b: spread_vector(b, shape), bias.astype(x.dtype))
        (gradient,) = pull(x)
    sharding = sharding_of_sum(bias)
    return gradient if sharding is None else reshard(gradient, sharding)


def pad_bias(bias: Array) -> Array:
    """Pad a bias [B|1, N|1, T, S] to whole tiles of its layout in shared memory."""
    T, S = padded_lengths(bias)
    if (T, S) == bias.shape[2:]:
        return bias
    return jnp.pad(bias, [(0, 0), (0, 0), (0, T - bias.shape[2]), (0, S - bias.shape[3])])


def padded_lengths(bias: Array) -> tuple[int, int]:
    """Return T and S of a bias of pairs, rounded up to tiles of 8 rows of 128 bytes."""
    T, S = bias.shape[2:]
    columns = ROW_BYTES // bias.dtype.itemsize
    return round_up(T, 8), round_up(S, columns)


def pad_bias_vector(vector: Array) -> Array:
    """Pad a bias of queries or keys [B, N, L] to whole tiles, which threads load by themselves."""
    return jnp.pad(vector, [(0, 0), (0, 0), (0, -vector.shape[-1] % VECTOR_MULTIPLE)])


def bias_tiles(scalars: Scalars, slots: int, rows: int, cols: int) -> Ref | None:
    """Return the type of `slots` tiles of the bias in shared memory; None without such a bias."""
    if scalars.bias is None:
        return None
    dtype = scalars.bias.dtype
    transforms = FLOATS if dtype == jnp.float32 else SHARED
    return plgpu.SMEM((slots, rows, cols), dtype, transforms=transforms)


def copy_bias(scalars: Scalars, n, rows, cols, shared: Ref | None, slot, ready: Barrier) -> None:
    """Copy the bias of head n for the pairs of `rows` and `cols` to `slot` of `shared`."""
    if shared is not None:
        plgpu.copy_gmem_to_smem(head_bias(scalars, n).at[rows, cols], shared.at[slot], ready)


def head_bias(scalars: Scalars, n) -> Ref:
    """Return the bias [T, S] of head n; `scalars` are those of one batch entry."""
    return scalars.bias.at[n if scalars.bias.shape[0] > 1 else 0]


def load_bias(
    scalars: Scalars,
    n,
    first: tuple,
    shape: tuple[int, int],
    query_dim: int,
    shared: Ref | None,
) -> Array | None:
    """Return the bias of a tile of `shape` in registers; None if the call has none.

    `first` are the first query and the first key, and `shared` is the tile [queries, keys] of a
    bias of pairs. Queries are along `query_dim`.
    """
    if shared is not None:
        return plgpu.load(shared.T if query_dim else shared, layout=WGMMA)
    vectors = (scalars.query_bias, query_dim, first[0]), (scalars.key_bias, 1 - query_dim, first[1])
    for vector, dim, start in vectors:
        if vector is not None:
            part = vector.at[n, pl.ds(start, shape[dim])]
            return broadcast_vector(
                plgpu.load(part, layout=(ROW, COL)[dim], optimized=False), shape, dim
            )
    return None
