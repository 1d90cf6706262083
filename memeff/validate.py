"""Check each array argument of the public functions, in the user's words, and return it in the form that memeff uses."""

import math
import numbers
import operator
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from memeff.inputs import check_choice, kind_of, to_array
from memeff.problem import LogitParams
from memeff.shape import CallShape, fold_leads

LARGE = 256 * 2**20  # bytes; a dense mask or bias beyond this defeats the purpose
FAR = 2**29  # positions stay below it, so that position + window fits into int32
_warned: set[str] = set()


def check_arrays(query, key, value) -> tuple[Array, Array, Array]:
    """The three as arrays of one dtype, with shapes that fit."""
    arrays = {
        name: to_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))
    }
    for name, x in arrays.items():
        if x.ndim < 3:
            letters = "[*B, T, N, H]" if name == "query" else "[*B, S, K, H]"
            raise ValueError(
                f"{name} must have shape {letters} with at least 3 dims; got {x.shape}."
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be a floating-point array, got {x.dtype}. Cast it.")
    query, key, value = arrays.values()
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(
                f"{name} is {x.dtype} and query is {query.dtype}: they must have one dtype. Cast one of them."
            )
    if jnp.finfo(query.dtype).bits < 16:
        raise TypeError(
            f"query is {query.dtype}: supported are bfloat16, float16, float32 and float64. Cast it first."
        )
    given = key.shape, value.shape
    key, value = (_same_rank(x, query.ndim) for x in (key, value))
    *leads, _, N, H = query.shape
    if key.ndim != query.ndim or list(key.shape[:-3]) != leads:
        wanted = ", ".join([*map(str, leads), "S", "K", f"H={H}"])
        raise ValueError(
            f"key must have shape ({wanted}), with the leading dims of query; got {given[0]}."
        )
    *_, S, K, _ = key.shape
    if key.shape[-1] != H:
        raise ValueError(
            f"key must have the head size of query, H={H}; got {key.shape[-1]} (shape {given[0]})."
        )
    if value.ndim != key.ndim or value.shape[:-1] != key.shape[:-1]:
        wanted = ", ".join([*map(str, leads), f"S={S}", f"K={K}", "D"])
        raise ValueError(f"value must have shape ({wanted}), like key; got {given[1]}.")
    if H == 0:
        raise ValueError("query has head size H=0: the logits would be empty sums. Use H >= 1.")
    if (K == 0 and N != 0) or (K and N % K):
        raise ValueError(
            f"query has {N} heads and key has {K}: query heads (N) must be a multiple of key heads (K)."
        )
    return query, key, value


def check_logit_params(
    shape: CallShape, bias, scale, soft_cap
) -> tuple[LogitParams, tuple[float, float | None]]:
    """Arrays that get a gradient, and the numbers (scale, soft cap) that stand in where they are none."""
    bias = _grouped(shape, "bias", bias, "local_window_size, is_causal or segment ids")
    if bias is not None and jnp.issubdtype(bias.dtype, jnp.integer):  # as jax.nn
        bias = bias.astype(jnp.float32)
    if bias is not None and not jnp.issubdtype(bias.dtype, jnp.floating):
        cure = "Pass a boolean one as mask=." if bias.dtype == bool else "Cast it."
        raise TypeError(
            f"bias must be floating point (it is added to the logits), got {bias.dtype}. {cure}"
        )
    scale, scale_array = _number("scale", 1 / math.sqrt(shape.H) if scale is None else scale)
    cap, cap_array = (None, None) if soft_cap is None else _number("logits_soft_cap", soft_cap)
    if cap_array is None and cap is not None and not cap > 0:
        raise ValueError(f"logits_soft_cap={cap:g}: a cap must be > 0; use None for no cap.")
    return LogitParams(scale_array, cap_array, bias), (scale if scale_array is None else 1.0, cap)


def _number(name: str, x) -> tuple[float, None] | tuple[float, Array]:
    """A Python number stays static; an array stays an array, and gets a gradient."""
    if isinstance(x, bool | np.bool_ | str) or not (
        isinstance(x, numbers.Real) or hasattr(x, "dtype")
    ):
        raise TypeError(f"{name} must be a number or a scalar array, got {kind_of(x)}.")
    if isinstance(x, numbers.Real) and not isinstance(x, jax.Array):
        if not math.isfinite(x):
            raise ValueError(f"{name}={x}: it must be finite.")
        return float(x), None
    x = to_array(name, x)
    if x.size != 1:
        raise ValueError(
            f"{name} must be a number or a scalar array, got shape {x.shape}. Scale query per head instead."
        )
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.float32)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be floating point, got an array of {x.dtype}. Cast it.")
    return 1.0, x.reshape(())


def check_mask(shape: CallShape, mask) -> Array | None:
    """Boolean B|1 K|1 G|1 T|1 S|1."""
    if mask is None:
        return None
    mask = to_array("mask", mask)
    if mask.dtype != bool:
        raise TypeError(
            f"mask must be boolean (True = may attend), got {mask.dtype}. Pass an additive term as bias=, or mask != 0."
        )
    return _grouped(
        shape, "mask", mask, "is_causal, local_window_size, key_value_seq_lengths or segment ids"
    )


def _grouped(shape: CallShape, name: str, x, instead: str) -> Array | None:
    """Checks that `x` broadcasts to [*B, N, T, S] and folds it to B|1 K|1 G|1 T|1 S|1."""
    if x is None:
        return None
    x, full = to_array(name, x), (*shape.leads, shape.N, shape.T, shape.S)
    given, x = x.shape, _same_rank(x, len(full))
    if not _broadcasts(x.shape, full):
        wanted = ", ".join([*map(str, shape.leads), f"N={shape.N}", f"T={shape.T}", f"S={shape.S}"])
        raise ValueError(f"{name} must be broadcastable to ({wanted}); got {given}.")
    *leads, N, T, S = x.shape
    bytes_ = (
        math.prod(x.shape) * x.dtype.itemsize if all(isinstance(d, int) for d in x.shape) else 0
    )
    if bytes_ > LARGE and T != 1 and S != 1 and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} of shape {given} takes {bytes_ / 2**20:.0f} MiB, more than attention itself needs: "
            f"say it with {instead} where you can.",
            stacklevel=6,
        )
    if all(d == 1 for d in leads):
        leads = [1]
    else:
        x = jnp.broadcast_to(x, (*shape.leads, N, T, S))
        leads = [shape.B]
    heads = (shape.K, shape.G) if N == shape.N and N != 1 else (1, 1)
    return x.reshape(*leads, *heads, T, S)


def check_window(window, is_causal) -> tuple[int | None, int | None]:
    """(left, right) in tokens; causal is right = 0."""
    check_choice("is_causal", is_causal)
    if window is None:
        sides = (None, None)
    elif isinstance(window, tuple | list):
        if len(window) != 2:
            raise ValueError(
                f"local_window_size={window!r}: give (left, right), or one int for both sides."
            )
        sides = tuple(window)
    else:
        sides = (window, window)
    for side in sides:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, numbers.Integral):
            raise TypeError(
                f"local_window_size={window!r}: sides are ints (tokens) or None, got {kind_of(side)}."
            )
        if side < 0:
            raise ValueError(
                f"local_window_size={window!r}: sides count tokens and must be >= 0; use None for an unbounded side."
            )
    # beyond any position: no bound
    left, right = (None if side is None or side >= 2 * FAR else int(side) for side in sides)
    return left, 0 if is_causal else right


def check_offset(shape: CallShape, q_offset) -> tuple[Array | None, int]:
    """(array, 0) or (None, int). Values are checked where they are known."""
    if q_offset is None or isinstance(q_offset, bool | str):
        raise TypeError(
            f"q_offset must be an int or integers [*B] (positions), got {kind_of(q_offset)}."
        )
    if isinstance(q_offset, numbers.Integral):
        array, static = None, operator.index(q_offset)
    else:
        array, static = _per_batch(shape, "q_offset", q_offset, 1 - FAR, FAR - 1), 0
    if (known := _known(q_offset)) is not None:
        least, most = int(known.min()), int(known.max())
        if max(-least, most) >= FAR:
            raise ValueError(
                f"q_offset={most if most >= FAR else least}: positions must lie between {1 - FAR} and {FAR - 1}."
            )
    return array, static


def check_lengths(shape: CallShape, name: str, lengths, letter: str, most) -> Array | None:
    """int32 [B]. Values are checked where they are known."""
    if lengths is None:
        return None
    array = _per_batch(shape, name, lengths, 0, most if isinstance(most, int) else FAR)
    if (
        isinstance(most, int)
        and (known := _known(lengths)) is not None
        and (known.min() < 0 or known.max() > most)
    ):
        raise ValueError(
            f"{name} must lie between 0 and {letter}={most}; got {known.min()} to {known.max()}."
        )
    return jnp.broadcast_to(array, (shape.B,))


def check_segments(shape: CallShape, query_ids, kv_ids) -> tuple[Array | None, Array | None]:
    """Integers [B, T] and [B, S]."""
    if query_ids is None and kv_ids is None:
        return None, None
    if query_ids is None:
        raise ValueError(
            "key_value_segment_ids came without query_segment_ids: pass both (or the query's alone if T = S)."
        )
    if kv_ids is None:
        if shape.T != shape.S:
            raise ValueError(
                f"query_segment_ids came without key_value_segment_ids, and T={shape.T} is not S={shape.S}: pass both."
            )
        kv_ids = query_ids
    query_ids = _segment_ids(shape, "query_segment_ids", query_ids, "T", shape.T)
    kv_ids = _segment_ids(shape, "key_value_segment_ids", kv_ids, "S", shape.S)
    if query_ids.dtype != kv_ids.dtype:  # strict promotion would refuse to compare them
        common = jax.dtypes.canonicalize_dtype(np.int64)  # int32 unless x64 is on
        for name, ids in (("query_segment_ids", query_ids), ("key_value_segment_ids", kv_ids)):
            known = _known(ids)
            fits = jnp.iinfo(ids.dtype).max <= jnp.iinfo(common).max
            if not fits and (known is None or known.max() > jnp.iinfo(common).max):
                raise TypeError(
                    f"{name} is {ids.dtype} and the other segment ids are not: {common} would wrap its largest numbers. "
                    "Cast both to one dtype."
                )
        query_ids, kv_ids = query_ids.astype(common), kv_ids.astype(common)
    return query_ids, kv_ids


def _segment_ids(shape: CallShape, name: str, ids, letter: str, size) -> Array:
    ids, full = _integers(name, ids), (*shape.leads, size)
    given, ids = ids.shape, _same_rank(ids, len(full))
    if given[-1:] != (size,) or not _broadcasts(ids.shape, full):
        wanted = ", ".join([*map(str, shape.leads), f"{letter}={size}"])
        raise ValueError(f"{name} must have shape ({wanted}); got {given}.")
    return fold_leads(shape, jnp.broadcast_to(ids, full))


def _per_batch(shape: CallShape, name: str, x, least: int, most: int) -> Array:
    """Return int32 [B] or [1], clipped to `least` and `most`, from integers that broadcast to the leading dims."""
    x = _integers(name, x)
    limits = jnp.iinfo(x.dtype)  # clipped before the cast, because int64 and uint32 wrap
    x = jnp.clip(x, max(least, int(limits.min)), min(most, int(limits.max)))
    given, x = x.shape, _same_rank(x, len(shape.leads))
    if not _broadcasts(x.shape, shape.leads):
        raise ValueError(
            f"{name} must have the leading dims of query, {shape.leads}; got shape {given}."
        )
    if x.size == 1:
        return x.reshape(1).astype(jnp.int32)
    return jnp.broadcast_to(x, shape.leads).reshape(shape.B).astype(jnp.int32)


def check_sinks(shape: CallShape, sinks, dtype) -> Array | None:
    """Return sinks [K, G] in `dtype` from floats [N]."""
    if sinks is None:
        return None
    sinks = to_array("sinks", sinks)
    if sinks.shape != (shape.N,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks must be floats of shape (N={shape.N},), a logit for each head; got {sinks.dtype}{sinks.shape}."
        )
    return sinks.astype(dtype).reshape(shape.K, shape.G)


def _known(x) -> np.ndarray | None:
    """The values, if there are any and they are not being traced."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x)):
        return None
    values = np.asarray(x)
    return values if values.size else None


def _integers(name: str, x) -> Array:
    x = to_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {x.dtype}.")
    return x


def _same_rank(x: Array, ndim: int) -> Array:
    """Adds or drops leading dims of size 1 (jax.nn takes a 4-dim bias for a 3-dim query)."""
    extra = x.ndim - ndim
    if extra < 0:
        return x.reshape((1,) * -extra + x.shape)
    return x.reshape(x.shape[extra:]) if all(d == 1 for d in x.shape[:extra]) else x


def _broadcasts(shape: tuple, full: tuple) -> bool:
    return len(shape) == len(full) and all(
        a == 1 or a == b for a, b in zip(shape, full, strict=True)
    )
