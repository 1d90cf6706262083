"""Check each array argument of the public functions, and return it as memeff uses it.

Errors are in the user's words.
"""

import math
import numbers
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from memeff.inputs import (
    check_bool,
    check_floats,
    check_integers,
    check_sides,
    check_wide_floats,
    kind_of,
    known_values,
    text_of,
    to_array,
    to_float,
    to_int32,
)
from memeff.problem import LogitParams
from memeff.shape import CallShape
from memeff.sharding import fold_leads
from memeff.warn import warn_once

LARGE = 256 * 2**20  # bytes; a dense mask or bias beyond this defeats the purpose
POSITION_LIMIT = 2**29  # positions stay below it, so that position + window fits into int32
TOO_LONG = 2 * POSITION_LIMIT  # tokens


def check_arrays(query, key, value) -> tuple[Array, Array, Array]:
    """Return query, key and value as arrays of one dtype whose shapes fit."""
    arrays = []
    letters = ("[*B, T, N, H]", "[*B, S, K, H]", "[*B, S, K, D]")
    for name, x, dims in zip(("query", "key", "value"), (query, key, value), letters, strict=True):
        x = to_array(name, x)
        if x.ndim < 3:
            raise ValueError(f"{name} must have shape {dims} with at least 3 dims; got {x.shape}.")
        check_floats(name, x)
        arrays.append(x)
    query, key, value = arrays
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(
                f"{name} is {x.dtype} and query is {query.dtype}: they must have one dtype. Cast "
                "one of them."
            )
    check_wide_floats("query", query)
    key_shape = key.shape  # as the user gave it
    value_shape = value.shape
    key = _same_rank(key, query.ndim)
    value = _same_rank(value, query.ndim)
    *leads, _, N, H = query.shape
    if key.ndim != query.ndim or list(key.shape[:-3]) != leads:
        wanted = ", ".join([*map(str, leads), "S", "K", f"H={H}"])
        raise ValueError(
            f"key must have shape ({wanted}), with the leading dims of query; got {key_shape}."
        )
    *_, S, K, _ = key.shape
    if key.shape[-1] != H:
        raise ValueError(
            f"key must have the head size of query, H={H}; got {key.shape[-1]} (shape {key_shape})."
        )
    if value.ndim != key.ndim or value.shape[:-1] != key.shape[:-1]:
        wanted = ", ".join([*map(str, leads), f"S={S}", f"K={K}", "D"])
        raise ValueError(f"value must have shape ({wanted}), like key; got {value_shape}.")
    check_head_size(H)
    if (K == 0 and N != 0) or (K and N % K):
        raise ValueError(
            f"query has {N} heads and key has {K}: query heads (N) must be a multiple of key heads "
            "(K)."
        )
    return query, key, value


def check_whole_lengths(T, S) -> None:
    """Refuse sequences, of all devices, whose positions do not fit."""
    for name, length in (("query", T), ("key", S)):
        if isinstance(length, int) and length >= TOO_LONG:
            raise ValueError(
                f"{name} has {length} tokens, and positions are 32-bit integers: a sequence must "
                f"be shorter than {TOO_LONG}. Split it, and combine the parts with memeff.merge."
            )


def check_head_size(H: int) -> None:
    """Refuse queries and keys of no numbers."""
    if H == 0:
        raise ValueError("query has head size H=0: the logits would be empty sums. Use H >= 1.")


def check_logit_params(
    shape: CallShape, bias, scale, soft_cap, dtype
) -> tuple[LogitParams, tuple[float, float | None]]:
    """Return the arrays that get a gradient, and (scale, soft cap) as numbers.

    A number counts where no array was given. Logits are computed in `dtype`.
    """
    bias = _fold_pairs(shape, "bias", bias, "local_window_size, is_causal or segment ids")
    if bias is not None and jnp.issubdtype(bias.dtype, jnp.integer):  # as jax.nn
        bias = bias.astype(jnp.float32)
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        cure = "Pass a boolean one as mask=." if bias.dtype == bool else "Cast it."
        raise TypeError(
            f"bias must be floating point (it is added to the logits), got {bias.dtype}. {cure}"
        )
    if scale is None:
        if not isinstance(shape.H, int):
            raise NotImplementedError(
                f"scale is by default 1 / sqrt(H), a number, and jax.export leaves the head size "
                f"symbolic (H={shape.H}). Pass scale=."
            )
        scale = 1 / math.sqrt(shape.H)
    scale, scale_array = _number("scale", scale, dtype)
    cap, cap_array = check_soft_cap(soft_cap, dtype)
    return LogitParams(scale_array, cap_array, bias), (scale, cap)


def check_soft_cap(soft_cap, dtype) -> tuple[float | None, Array | None]:
    """Return the cap as a number, and as an array if it came as one (the number is 1 then).

    Logits are computed in `dtype`.
    """
    if soft_cap is None:
        return None, None
    cap, cap_array = _number("logits_soft_cap", soft_cap, dtype)
    known = known_values(soft_cap)
    if known is not None and not known >= jnp.finfo(dtype).tiny:
        also = f", also in {jnp.dtype(dtype)}" if known > 0 else ""
        raise ValueError(
            f"logits_soft_cap={known.item():g}: a cap must be > 0{also}; use None for no cap."
        )
    return cap, cap_array


def _number(name: str, x, dtype) -> tuple[float, None] | tuple[float, Array]:
    """Return a Python number, which stays static, as (number, None), and an array as (1, array).

    Its value must be finite in `dtype`, if it is known.
    """
    is_number = isinstance(x, numbers.Real) or hasattr(x, "dtype")
    if isinstance(x, bool | np.bool_ | str) or not is_number:
        raise TypeError(f"{name} must be a number or a scalar array, got {kind_of(x)}.")
    if isinstance(x, numbers.Real) and not isinstance(x, jax.Array):
        number = to_float(name, x)
        _check_finite(name, number, dtype)
        return number, None
    original = x
    x = to_array(name, x)
    if x.size != 1:
        raise ValueError(
            f"{name} must be a number or a scalar array, got shape {x.shape}."
            + (" Scale query per head instead." if name == "scale" else "")
        )
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.float32)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got an array of {x.dtype}. Cast it.")
    known = known_values(original)  # of what came, because under jit JAX's own array is traced
    if known is not None:
        _check_finite(name, known.item(), dtype)
    return 1.0, x.reshape(())


def _check_finite(name: str, number: float, dtype) -> None:
    """Refuse a number that is NaN, or is infinite in `dtype`."""
    if not abs(number) <= float(jnp.finfo(dtype).max):
        raise ValueError(f"{name}={number}: it must be finite in {jnp.dtype(dtype)}.")


def check_mask(shape: CallShape, mask) -> Array | None:
    """Return the mask, boolean, as [B|1, N|1, T|1, S|1]."""
    if mask is None:
        return None
    mask = to_array("mask", mask)
    if mask.dtype != bool:
        raise TypeError(
            f"mask must be boolean (True = may attend), got {mask.dtype}. Pass an additive term as "
            "bias=, or mask != 0."
        )
    return _fold_pairs(
        shape, "mask", mask, "is_causal, local_window_size, key_value_seq_lengths or segment ids"
    )


def _fold_pairs(shape: CallShape, name: str, x, instead: str) -> Array | None:
    """Check that `x` broadcasts to [*B, N, T, S], and fold it to [B|1, N|1, T|1, S|1]."""
    if x is None:
        return None
    x = to_array(name, x)
    full = (*shape.leads, shape.N, shape.T, shape.S)
    given_shape = x.shape
    x = _same_rank(x, len(full))
    if not _broadcasts(x.shape, full):
        wanted = ", ".join([*map(str, shape.leads), f"N={shape.N}", f"T={shape.T}", f"S={shape.S}"])
        raise ValueError(f"{name} must be broadcastable to ({wanted}); got {given_shape}.")
    *leads, N, T, S = x.shape
    sizes_known = all(isinstance(size, int) for size in x.shape)
    bytes_ = math.prod(x.shape) * x.dtype.itemsize if sizes_known else 0
    if bytes_ > LARGE and T != 1 and S != 1:
        mib = bytes_ / 2**20
        message = (
            f"{name} of shape {given_shape} takes {mib:.0f} MiB, more than attention itself needs: "
        )
        warn_once(name, message + f"use {instead} instead where you can.")
    if any(d != 1 for d in leads):
        return fold_leads(shape, jnp.broadcast_to(x, (*shape.leads, N, T, S)))
    return x.reshape(1, N, T, S)


def check_window(
    window, is_causal=False, name: str = "local_window_size"
) -> tuple[int | None, int | None]:
    """Return (left, right) in tokens, None for no bound; causal is right = 0."""
    check_bool("is_causal", is_causal)
    cure = (
        "use None for an unbounded side, and a mask_fn for a window beside the query's own position"
    )
    pair = "(left, right)"
    sides = check_sides(name, window, pair, "tokens", least=0, cure=cure, optional=True)
    # A side beyond any position is no bound.
    left, right = (None if side is None or side >= TOO_LONG else int(side) for side in sides)
    return left, 0 if is_causal else right


def check_offset(shape: CallShape, q_offset) -> tuple[Array | None, int]:
    """Return (array, 0) or (None, int). Check the values where they are known."""
    if q_offset is None or isinstance(q_offset, bool | str):
        raise TypeError(
            f"q_offset must be an int or integers [*B] (positions), got {kind_of(q_offset)}."
        )
    if isinstance(q_offset, numbers.Integral):
        array = None
        static = operator.index(q_offset)
    else:
        array = _per_batch(shape, "q_offset", q_offset, 1 - POSITION_LIMIT, POSITION_LIMIT - 1)
        static = 0
    known = known_values(q_offset)
    if known is not None:
        for value in (int(known.max()), int(known.min())):
            if abs(value) >= POSITION_LIMIT:
                raise ValueError(
                    f"q_offset={text_of(value)}: positions must lie between "
                    f"{1 - POSITION_LIMIT} and {POSITION_LIMIT - 1}."
                )
    return array, static


def check_lengths(shape: CallShape, name: str, lengths, letter: str, most) -> Array | None:
    """Return lengths as int32 [B], or None. Check the values where they are known."""
    if lengths is None:
        return None
    most_is_known = isinstance(most, int)
    array = _per_batch(shape, name, lengths, 0, most if most_is_known else POSITION_LIMIT)
    known = known_values(lengths)
    if most_is_known and known is not None and (known.min() < 0 or known.max() > most):
        raise ValueError(
            f"{name} must lie between 0 and {letter}={most}; got {known.min()} to {known.max()}."
        )
    return jnp.broadcast_to(array, (shape.B,))


def check_segments(shape: CallShape, query_ids, kv_ids) -> tuple[Array | None, Array | None]:
    """Return segment ids as integers [B, T] and [B, S] of one dtype, or (None, None)."""
    if query_ids is None and kv_ids is None:
        return None, None
    if query_ids is None:
        raise ValueError(
            "key_value_segment_ids came without query_segment_ids: pass both (or the query's "
            "alone if T = S)."
        )
    if kv_ids is None:
        if shape.T != shape.S:
            raise ValueError(
                f"query_segment_ids came without key_value_segment_ids, and T={shape.T} is not "
                f"S={shape.S}: pass both."
            )
        kv_ids = query_ids
    given_ids = query_ids, kv_ids  # their values are known: under jit JAX's own arrays are traced
    query_ids = _segment_ids(shape, "query_segment_ids", query_ids, "T", shape.T)
    kv_ids = _segment_ids(shape, "key_value_segment_ids", kv_ids, "S", shape.S)
    if query_ids.dtype != kv_ids.dtype:  # strict promotion would refuse to compare them
        common = jax.dtypes.canonicalize_dtype(np.int64)  # int32 unless x64 is on
        names = "query_segment_ids", "key_value_segment_ids"
        for name, given, ids in zip(names, given_ids, (query_ids, kv_ids), strict=True):
            known = known_values(given)
            fits = jnp.iinfo(ids.dtype).max <= jnp.iinfo(common).max or 0 in ids.shape
            if not fits and (known is None or known.max() > jnp.iinfo(common).max):
                raise TypeError(
                    f"{name} is {ids.dtype} and the other segment ids are not: {common} would wrap "
                    "its largest numbers. Cast both to one dtype."
                )
        query_ids, kv_ids = query_ids.astype(common), kv_ids.astype(common)
    return query_ids, kv_ids


def _segment_ids(shape: CallShape, name: str, ids, letter: str, size) -> Array:
    """Return segment ids [B, size]; `letter` names the size in an error."""
    ids = check_integers(name, ids)
    full = (*shape.leads, size)
    given_shape = ids.shape
    ids = _same_rank(ids, len(full))
    if given_shape[-1:] != (size,) or not _broadcasts(ids.shape, full):
        wanted = ", ".join([*map(str, shape.leads), f"{letter}={size}"])
        raise ValueError(f"{name} must have shape ({wanted}); got {given_shape}.")
    return fold_leads(shape, jnp.broadcast_to(ids, full))


def _per_batch(shape: CallShape, name: str, x, least: int, most: int) -> Array:
    """Return int32 [B] or [1], clipped to `least` and `most`.

    `x` are integers that broadcast to the leading dims.
    """
    x = to_int32(check_integers(name, x), least, most)
    given_shape = x.shape
    x = _same_rank(x, len(shape.leads))
    if not _broadcasts(x.shape, shape.leads):
        raise ValueError(
            f"{name} must have the leading dims of query, {shape.leads}; got shape {given_shape}."
        )
    if x.size == 1:
        return x.reshape(1)
    return fold_leads(shape, jnp.broadcast_to(x, shape.leads))


def check_sinks(shape: CallShape, sinks, dtype) -> Array | None:
    """Return sinks [N] in `dtype`."""
    if sinks is None:
        return None
    sinks = to_array("sinks", sinks)
    if sinks.shape != (shape.N,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks must be floats of shape (N={shape.N},), a logit for each head; got "
            f"{sinks.dtype}{sinks.shape}."
        )
    return sinks.astype(dtype)


def _same_rank(x: Array, ndim: int) -> Array:
    """Add or drop leading dims of size 1, because jax.nn takes a 4-dim bias for a 3-dim query."""
    extra = x.ndim - ndim
    if extra < 0:
        return x.reshape((1,) * -extra + x.shape)
    return x.reshape(x.shape[extra:]) if all(d == 1 for d in x.shape[:extra]) else x


def _broadcasts(shape: tuple, full: tuple) -> bool:
    """Return True if `shape`, of the same rank, broadcasts to `full`."""
    if len(shape) != len(full):
        return False
    return all(size in (1, wanted) for size, wanted in zip(shape, full, strict=True))
