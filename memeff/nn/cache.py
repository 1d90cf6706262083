"""Append tokens to the decode cache of a Flax module, at one position or one of each sequence."""

import jax.numpy as jnp
from jax import Array, lax
from jax.core import Tracer

from memeff.decoding.storage import write
from memeff.inputs import known_values


def append(
    cached: tuple[Array, Array], query: Array, new: tuple[Array, Array], start: Array
) -> tuple[Array, Array]:
    """Return the cached keys and values [*B, S, K, H] with new ones [*B, T, K, H] from `start` on.

    The query [*B, T, N, H] is that of the new tokens. If `start` is one number, all sequences are
    as long as each other. Tokens beyond S then overwrite the last ones, as in Flax. If it is [*B],
    such tokens are left out (see `nan_where_full`).

    Raises:
      ValueError: if shapes disagree, or a token is known to lie outside the cache.
      TypeError: if `start` is no integer of 32 or 64 bits.
    """
    keys, values = cached
    key, value = new
    if query.shape[:-2] != key.shape[:-2]:
        raise ValueError(
            f"decode: inputs give queries {query.shape} and keys {key.shape}. Both must have the "
            "same tokens."
        )
    *batch, T, K, H = key.shape
    *cached_batch, S, _, _ = keys.shape
    if keys.shape != (*batch, S, K, H) or T > S:
        raise ValueError(
            f"decode: the inputs give keys of shape {key.shape}, and the cache has {keys.shape}. "
            f"Pass inputs with 1 to {S} tokens and with leading dims {tuple(cached_batch)}, for "
            "which the cache was made."
        )
    if start.ndim and start.shape != tuple(batch):
        raise ValueError(
            f"decode: cache_index has shape {start.shape}. It must be one number, or one for each "
            f"sequence, {tuple(batch)}."
        )
    if not jnp.issubdtype(start.dtype, jnp.integer) or start.dtype.itemsize < 4:
        raise TypeError(
            f"decode: cache_index is {start.dtype}, which cannot count all tokens. Make it int32."
        )
    _check_room(start, T, S)
    return _write(keys, key, start), _write(values, value, start)


def nan_where_full(out: Array, start: Array, capacity: int) -> Array:
    """Return out [*B, T, N, D] with NaN for sequences whose tokens went outside the cache.

    One number as `start` is left to Flax's rule.
    """
    if start.ndim == 0:
        return out
    outside = (start < 0) | (start + out.shape[-3] > capacity)
    return jnp.where(outside[..., None, None, None], jnp.nan, out)


def _check_room(start: Array, T: int, S: int) -> None:
    """Refuse tokens outside the cache where the index is known."""
    known = None if isinstance(start, Tracer) else known_values(start)
    if known is not None and known.min() < 0:
        raise ValueError(f"decode: cache_index is {known.min()}. It must be at least 0.")
    if known is not None and known.max() + T > S:
        raise ValueError(
            f"decode: the cache has room for {S} tokens and holds {known.max()}, and {T} more "
            "came. Make it (init, init_cache) for more tokens."
        )


def _write(x: Array, new: Array, start: Array) -> Array:
    """Return x [*B, S, K, H] with `new` [*B, T, K, H] at `start`, a number or [*B]."""
    new = new.astype(x.dtype)
    if start.ndim == 0:
        return lax.dynamic_update_slice_in_dim(x, new, start, x.ndim - 3)
    T = new.shape[-3]
    S = x.shape[-3]
    flat = x.reshape(-1, *x.shape[-3:])
    B = flat.shape[0]
    slots = start.reshape(B, 1) + jnp.arange(T, dtype=start.dtype)[None]
    slots = jnp.where(slots < 0, S, slots)  # a negative index would count from the end
    return write(flat, (slots,), new.reshape(B, *new.shape[-3:])).reshape(x.shape)
