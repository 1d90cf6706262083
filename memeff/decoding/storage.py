"""Check, quantise, write and move the tokens of a cache; what all caches share."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from memeff.block_mask import BlockMask
from memeff.inputs import (
    check_dtype,
    check_floats,
    check_integers,
    check_size,
    kind_of,
    known_values,
    to_array,
    to_int32,
)
from memeff.sharding import explicit_axes, explicit_devices, shard_like, without_idle_axes
from memeff.user_functions import positions_held

# [B, T] each: slots of each batch entry, or indices of the first two dims of an array
Places = tuple[Array] | tuple[Array, Array]
EIGHT_BITS = ("int8", "float8_e4m3fn")
# Under jit, the length of a sequence that no longer has what was asked of it. A larger one, but
# negative, is LOST + n, where the first n tokens are as they were.
LOST = -(2**30)


def check_cached_dtype(dtype: Any) -> Any:
    """Return the dtype of a cache: a float that attention computes in, or one of 8 bits."""
    dtype = check_dtype(dtype)
    wide = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1
    if not wide and dtype.name not in EIGHT_BITS:
        raise TypeError(
            f"dtype={dtype.name}: a cache holds bfloat16, float16, float32 or float64, or "
            f"{' or '.join(EIGHT_BITS)} with a scale for each token and head."
        )
    return dtype


def empty_arrays(
    slots: tuple[int, int], key_heads: Any, head_size: Any, value_size: Any, dtype: Any
) -> list[Any]:
    """Return keys [*slots, K, H], values [*slots, K, D], and scales of both or None, all zeros."""
    K = check_size("key_heads", key_heads)
    H = check_size("head_size", head_size)
    D = H if value_size is None else check_size("value_size", value_size)
    dtype = check_cached_dtype(dtype)
    arrays = [jnp.zeros((*slots, K, size), dtype) for size in (H, D)]
    if dtype.itemsize > 1:
        return [*arrays, None, None]
    first, tokens = slots
    return [*arrays, *(jnp.zeros((first, K, tokens), jnp.float32) for _ in range(2))]


def check_fields(cache: Any, names: tuple[str, str, str, str], *, paged: bool) -> None:
    """Refuse fields that do not fit each other, because a caller may make a cache by hand.

    `names` are those of keys, values and the scales of both.
    """
    key, value, *scales = (getattr(cache, name) for name in names)
    slots = ("pages", "page") if paged else ("B", "capacity")
    _check_field(names[0], key, (*slots, "K", "H"))
    A, P, K = key.shape[:3]
    _check_field(names[1], value, (A, P, K, "D"))
    for name, x, scale in zip(names[2:], (key, value), scales, strict=True):
        has_8_bits = x.dtype.name in EIGHT_BITS
        if has_8_bits != (scale is not None):
            need = "needs" if has_8_bits else "does not take"
            raise ValueError(f"a cache of {x.dtype} {need} {name}. Make it with `zeros`.")
        if scale is not None:
            _check_field(name, scale, (A, K, P))
            check_scales(f"{name} of the cache", scale)
    if value.dtype != key.dtype:
        raise TypeError(
            f"{names[1]} of the cache must be {key.dtype}, like {names[0]}; got {value.dtype}. "
            "Cast one of them."
        )
    B = A
    if paged:
        _check_field("page_table", cache.page_table, ("B", "n"), integers=True)
        B = cache.page_table.shape[0]
    _check_field("lengths", cache.lengths, (B,), integers=True)


def _check_field(name: str, x: Any, shape: tuple[Any, ...], integers: bool = False) -> None:
    """Refuse what is no array of `shape`, where a letter stands for any size, or no int32."""
    if not isinstance(x, jax.Array | np.ndarray):
        raise TypeError(f"{name} of the cache must be an array, got {kind_of(x)}. Convert it.")
    sizes = [n if isinstance(size, str) else size for size, n in zip(shape, x.shape, strict=False)]
    if x.ndim != len(shape) or tuple(sizes) != x.shape:
        text = ", ".join(map(str, shape))
        raise ValueError(f"{name} of the cache must have shape [{text}]; got {x.shape}.")
    if integers and x.dtype.name not in ("int32", "int64"):  # others wrap in sums and at -1
        raise TypeError(f"{name} of the cache must be int32; got {x.dtype}. Cast it.")


def check_scales(name: str, scales: Any) -> None:
    """Refuse scales that are not float32: 8-bit numbers are multiplied in their dtype."""
    if scales.dtype != jnp.float32:
        raise TypeError(f"{name} must be float32; got {scales.dtype}. Cast it.")


def check_tokens(
    key: ArrayLike, value: ArrayLike, stored: tuple[Array, Array], batch: int
) -> tuple[Array, Array]:
    """Return new keys and values [B, T, K, H] that fit the `stored` ones."""
    arrays = []
    for name, new, like in (("key", key, stored[0]), ("value", value, stored[1])):
        x = to_array(name, new)
        if x.ndim != 4 or x.shape[0] != batch or x.shape[2:] != like.shape[2:]:
            K, size = like.shape[2:]
            letter = "H" if name == "key" else "D"
            raise ValueError(
                f"{name} must have shape (B={batch}, T, K={K}, {letter}={size}), as in the cache; "
                f"got {x.shape}."
            )
        if like.dtype.itemsize > 1 and x.dtype != like.dtype:
            raise TypeError(f"{name} is {x.dtype} and the cache is {like.dtype}: cast one of them.")
        arrays.append(check_floats(name, x))
    T, T_of_value = (x.shape[1] for x in arrays)
    if T != T_of_value:
        raise ValueError(f"key has T={T} tokens and value {T_of_value}: pass as many of both.")
    return arrays[0], arrays[1]


def check_kept(lengths: ArrayLike, batch: int) -> Array:
    """Return how many tokens of each sequence to keep, int32; traced ones count as at least 0."""
    lengths = check_integers("lengths", lengths)
    check_per_sequence("lengths", lengths, batch)
    known = known_values(lengths)
    if known is not None and known.min() < 0:
        raise ValueError(f"lengths must be at least 0; got {known.min()}.")
    return to_int32(lengths, least=0)


def intact(lengths: Array) -> Array:
    """Return how many of its first tokens each sequence [B] surely has."""
    return jnp.where(lengths < 0, lengths - LOST, lengths)


def truncated(lengths: Array, kept: ArrayLike) -> Array:
    """Return `lengths` [B], at most `kept`; a lost sequence comes back if its rest is `intact`."""
    kept = check_kept(kept, lengths.shape[0])
    most = intact(lengths)
    # the minimum, not `kept`, because on an Explicit mesh it is sharded as lengths are
    return jnp.where(kept > most, lengths, jnp.minimum(most, kept))


def extended(lengths: Array, counts: Array) -> Array:
    """Return `lengths` [B] with `counts` more tokens; those of a lost sequence are not counted."""
    return jnp.where(lengths < 0, lengths, lengths + counts)


def check_per_sequence(name: str, x: Array, batch: int) -> None:
    """Refuse an array that has neither one number for each sequence nor is one for all."""
    if x.shape not in ((), (batch,)):
        raise ValueError(f"{name} must have shape (B={batch},); got {x.shape}.")


def query_length(query: ArrayLike) -> int:
    """Return T of a query [B, T, N, H]."""
    shape = to_array("query", query).shape
    if len(shape) != 4:
        raise ValueError(f"query must have shape [B, T, N, H]; got {shape}.")
    return shape[1]


def check_counts(
    counts: ArrayLike | None, batch: int, T: int, *, most: str = "T={}, the tokens that came"
) -> Array:
    """Return how many of the T tokens of each sequence are valid, int32 [B]; None: all.

    `most` names T in an error.
    """
    if counts is None:
        return jnp.full((batch,), T, jnp.int32)
    counts = to_array("counts", counts)
    if counts.dtype == bool:  # which sequences go on
        counts = jnp.where(counts, T, 0)
    counts = check_integers("counts", counts)
    check_per_sequence("counts", counts, batch)
    known = known_values(counts)
    if known is not None and (known.min() < 0 or known.max() > T):
        raise ValueError(
            f"counts must lie between 0 and {most.format(T)}; got {known.min()} to {known.max()}."
        )
    return jnp.broadcast_to(to_int32(counts, 0, T), (batch,))


def check_room(lengths: Array, capacity: ArrayLike, cure: str) -> None:
    """Raise an error if `lengths` [B] are known and exceed `capacity`, a number or [B]."""
    known = known_values(lengths)
    room = known_values(capacity)
    if known is None or room is None:
        return
    room = np.broadcast_to(room, known.shape)
    full = np.flatnonzero(known > room)
    if len(full):
        b = full[0]
        raise ValueError(
            f"the cache is full: sequence {b} has {known[b]} tokens, with those that came, and "
            f"room for {room[b]}. {cure}"
        )


def check_not_lost(lengths: Array, other: str = "") -> None:
    """Raise an error if a sequence is known to be `LOST`; `other` is what it also may have lost."""
    known = known_values(lengths)
    if known is not None and known.min() < 0:
        raise ValueError(
            f"sequence {known.argmin()} gave up {other}drafts that it did not have (see T and path "
            "of keep_drafts). Truncate it to 0, and read it again."
        )


def check_queries(query: ArrayLike, counts: ArrayLike | None, lengths: Array) -> Array:
    """Return how many queries of each sequence are valid, int32 [B].

    Raise an error if they are known to be more than the cached tokens.
    """
    counts = check_counts(counts, lengths.shape[0], query_length(query))
    known = known_values(lengths)
    queries = known_values(counts)
    if known is None or queries is None:
        return counts
    missing = np.flatnonzero(known < queries)
    if len(missing):
        b = missing[0]
        raise ValueError(
            f"query has {queries[b]} tokens of sequence {b}, and the cache has {known[b]}: append "
            "their keys and values first."
        )
    return counts


def lacks_positions(options: dict[str, Any], lengths: Array) -> Array:
    """Return which sequences [B] of a ring have more tokens than its mask has params.

    Refuse such sequences where lengths are known. `query_positions.py` checks all other calls, in
    which slots are positions.
    """
    mask = options.get("mask_fn")
    if isinstance(mask, BlockMask):
        mask = mask.mask
    most = positions_held(mask, options.get("mask_params"))
    if most is None:
        return jnp.zeros(lengths.shape, bool)
    known = known_values(lengths)
    if known is not None and known.max() > most:
        raise ValueError(
            f"mask_fn has params for {most} positions, and sequence {known.argmax()} has "
            f"{known.max()} tokens: give it params for as many."
        )
    return lengths > most


def check_drafts(
    T: ArrayLike, path: ArrayLike, counts: ArrayLike, lengths: Array
) -> tuple[Array, Array, Array]:
    """Return the numbers of drafts [B], which of them to keep, [B, n], and how many of n, [B].

    Values are checked where they are known.
    """
    B = lengths.shape[0]
    is_array = isinstance(T, jax.Array | np.ndarray | list | tuple)
    T = check_integers("T", T if is_array else check_size("T", T, 0))
    check_per_sequence("T", T, B)
    T = jnp.broadcast_to(T, (B,))
    path = check_integers("path", path)
    if path.ndim != 2 or path.shape[0] != B:
        raise ValueError(f"path must have shape [B, n] with B={B}; got {path.shape}.")
    counts = check_counts(
        to_array("counts", counts), B, path.shape[1], most="n={}, the drafts of a row of path"
    )
    known_T = known_values(T)
    if known_T is not None:
        _check_known_drafts(known_T, *(known_values(x) for x in (path, counts, lengths)))
    return to_int32(T, least=0), to_int32(path), counts


def _check_known_drafts(T: Any, path: Any, counts: Any, lengths: Any) -> None:
    """Refuse drafts that do not exist; what is not known is None, and `T` [B] is known."""
    if T.min() < 0:
        raise ValueError(f"T={T.min()}: it must be at least 0.")
    if path is not None and counts is not None:
        is_kept = np.arange(path.shape[1]) < counts[:, None]
        wrong = is_kept & ((path < 0) | (path >= T[:, None]))
        if wrong.any():
            b, n = np.argwhere(wrong)[0]
            drafts = f"has drafts from 0 to {T[b] - 1}" if T[b] else "has no drafts"
            raise ValueError(
                f"path names draft {path[b, n]} of sequence {b}, which {drafts} (T={T[b]})."
            )
    if lengths is not None:
        is_unused = (lengths == 0) & (counts is None or counts == 0)
        missing = np.flatnonzero((lengths < T) & ~is_unused)
        if len(missing):
            b = missing[0]
            raise ValueError(
                f"T={T[b]} drafts: sequence {b} has {lengths[b]} tokens. Append its drafts first. "
                "Where sequences have different numbers of drafts, pass T for each, [B]."
            )


def keep_drafts(cache: Any, T: ArrayLike, path: ArrayLike, counts: ArrayLike) -> tuple[Any, Array]:
    """Return a cache with some of its newest tokens, as `KVCache.keep_drafts`.

    `cache` is of either kind. Also return how many tokens each sequence [B] had before its drafts.
    """
    cache.check()
    T, path, counts = check_drafts(T, path, counts, cache.lengths)
    before = cache.lengths - T
    stays = cache.overflowed  # some of its drafts found no room
    first = before[:, None]
    token = jnp.arange(path.shape[1], dtype=jnp.int32)[None]
    kept = token < counts[:, None]
    is_draft = (first >= 0) & (path >= 0) & (path < T[:, None])
    lost = (kept & ~is_draft).any(axis=1)
    old = cache._places(first + path, is_draft)
    new = cache._places(first + token, kept & ~(stays | lost)[:, None])
    arrays = cache._arrays()
    bare, old = jax.tree.map(without_idle_axes, (arrays, old))
    moved = write_all(arrays, new, [None if x is None else read(x, old) for x in bare])
    is_unused = (cache.lengths == 0) & (counts == 0)
    lengths = jnp.where(lost, LOST + jnp.maximum(before, 0), before + counts)
    lengths = jnp.where(is_unused, 0, lengths)
    lengths = jnp.where(stays, cache.lengths, lengths)
    return cache._replace_arrays(moved, lengths), before


def write_new(cache: Any, key: Array, value: Array, counts: Array, lengths: Array) -> Any:
    """Return a cache of either kind and these `lengths`, with `counts` [B] of T more tokens."""
    arrays = cache._arrays()
    places = places_of_new(cache, counts, key.shape[1])
    new = stored_form(key, value, arrays[0].dtype)
    return cache._replace_arrays(write_all(arrays, places, new), lengths)


@functools.partial(jax.jit, static_argnums=2, inline=True)
def places_of_new(cache: Any, counts: Array, T: int) -> Places:
    """Return where the next T tokens lie, of which each sequence gets the first counts[b]."""
    token = jnp.arange(T, dtype=jnp.int32)[None]
    return cache._places(cache.lengths[:, None] + token, token < counts[:, None])


def quantise(x: Array, dtype: Any) -> tuple[Array, Array]:
    """Return x [B, T, K, H] in 8 bits, and the scales [B, T, K] that bring it back, in float32.

    The largest entry of each token and head becomes the largest number of `dtype`. So int8 errs by
    at most 1 / 254 of that entry, and float8_e4m3fn by 1 / 16 of each entry that is not tiny.
    """
    integers = dtype == jnp.int8
    most = 127.0 if integers else float(jnp.finfo(dtype).max)
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / most
    scaled = x / jnp.where(scale == 0, 1, scale)[..., None]
    # int8 has no NaN, so a token that is not finite is read as NaN by its scale
    if integers:
        finite = jnp.isfinite(scale)
        scaled = jnp.where(finite[..., None], jnp.round(scaled), 0)
        scale = jnp.where(finite, scale, jnp.nan)
    return scaled.astype(dtype), scale


@functools.partial(jax.jit, inline=True)  # outside of jit as one program, not a dozen
def write(x: Array, places: Places, new: Array) -> Array:
    """Return x [A, P, K, H] with `new` [B, T, K, H] at `places`; places outside are left out.

    x can also be scales [A, K, P], with new ones [B, T, K]. Slots are written under vmap, so that a
    sharded batch needs no communication.
    XLA writes in place where x is donated or carried through a loop. XLA:CPU converts a float8
    array to float16 and back for it, and before JAX 0.11 a bfloat16 array to float32.
    """
    options: Any = dict(mode="drop", unique_indices=True)
    if len(places) == 2:  # pages
        check_whole_pool(x, new, *places)
        return x.at[_in_pages(x, *places)].set(new, **options)
    _check_sharded_alike(x, *places, new)

    def write_tokens(x: Array, slots: Array, new: Array) -> Array:
        return x.at[slots].set(new, **options)

    def write_scales(x: Array, slots: Array, new: Array) -> Array:
        return x.at[:, slots].set(new.T, **options)

    return jax.vmap(write_scales if x.ndim == 3 else write_tokens)(x, *places, new)


def _in_pages(x: Array, page: Array, token: Array) -> tuple[Any, ...]:
    """Return the index of tokens in pages [A, P, K, H], or in their scales [A, K, P]."""
    return (page, slice(None), token) if x.ndim == 3 else (page, token)


def stored_form(key: Array, value: Array, dtype: Any) -> list[Array | None]:
    """Return key and value as a cache of `dtype` holds them, and their scales or None."""
    if dtype.itemsize > 1:
        return [key, value, None, None]
    # rounded numbers have no derivative, and that of their scales alone would be wrong
    key, value = lax.stop_gradient((key, value))
    key, key_scale = quantise(key, dtype)
    value, value_scale = quantise(value, dtype)
    return [key, value, key_scale, value_scale]


def write_all(
    arrays: list[Array | None], places: Places, new: list[Array | None]
) -> list[Array | None]:
    """Return `arrays` with `new` at `places`; None stays None."""
    written: list[Array | None] = []
    for x, y in zip(arrays, new, strict=True):
        if x is None or y is None:
            written.append(None)
            continue
        bare = jax.tree.map(without_idle_axes, (x, places, y))
        written.append(shard_like(write(*bare), x))
    return written


@functools.partial(jax.jit, inline=True)
def read(x: Array, places: Places) -> Array:
    """Return x [A, P, K, H] at `places`, clipped to x; of scales [A, K, P] as [B, T, K]."""
    if len(places) == 2:  # pages
        check_whole_pool(x, *places)
        return x.at[_in_pages(x, *places)].get(mode="clip")
    _check_sharded_alike(x, *places)

    def read_tokens(x: Array, slots: Array) -> Array:
        return x.at[slots].get(mode="clip")

    def read_scales(x: Array, slots: Array) -> Array:
        return x.at[:, slots].get(mode="clip").T

    return jax.vmap(read_scales if x.ndim == 3 else read_tokens)(x, *places)


def check_whole_pool(*arrays: Array) -> None:
    """Refuse pages, or arrays by sequence or by page, whose first dim an Explicit mesh shards."""
    if any(explicit_devices(x, 0) > 1 for x in arrays):
        raise NotImplementedError(
            "A PagedKVCache does not support a batch or pages that are sharded over an Explicit "
            "mesh. Use jax.shard_map, with a pool of pages for each device, or an Auto mesh."
        )


def _check_sharded_alike(x: Array, slots: Array, new: Array | None = None) -> None:
    """Refuse what an Explicit mesh shards in another way than a cache, and sharded tokens.

    x is [B, P, K, H], or scales [B, K, P]; new is [B, T, K, H] or [B, T, K], slots [B, T]. Heads
    that are not sharded suit any cache.
    """
    heads, tokens = (1, 2) if x.ndim == 3 else (2, 1)
    is_token_sharded = bool(explicit_axes(x, tokens))
    pairs = [("batch", explicit_axes(x, 0), explicit_axes(slots, 0))]
    if new is not None:
        is_token_sharded |= bool(explicit_axes(new, 1))
        pairs.append(("batch", explicit_axes(x, 0), explicit_axes(new, 0)))
        pairs.append(("heads", explicit_axes(x, heads), explicit_axes(new, 2)))
        if x.ndim == 4:
            pairs.append(("head dim", explicit_axes(x, 3), explicit_axes(new, 3)))
    for what, axes, other_axes in pairs:
        if other_axes != axes and (other_axes or what == "batch"):
            raise ValueError(
                f"On an Explicit mesh a cache has its {what} sharded over {_named(axes)}, and its "
                f"lengths or new arrays over {_named(other_axes)}: shard them alike, with "
                "jax.sharding.reshard."
            )
    if is_token_sharded:
        raise NotImplementedError(
            "A cache does not support tokens that are sharded over an Explicit mesh. Give each "
            "device a cache of its own inside jax.shard_map, and combine with memeff.merge."
        )


def _named(axes: tuple[str, ...]) -> str:
    return ", ".join(axes) or "no axis"
