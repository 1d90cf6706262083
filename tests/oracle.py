"""Compute attention and its gradients in float64, one formula a line, with masks by the row.

This file is the truth of the tests. It needs NumPy only: no memeff, no JAX.

With raw = q k', u = scale raw, s = cap tanh(u / cap) + bias, p = softmax(s) over the visible keys
of a query, and a dropout mask kept with rate r, z = kept / (1 - r):
    out = (p z) v                      lse = log sum exp s
    dv  = (p z)' dout                  dp  = (dout v') z
    ds  = p (dp - sum_j p dp + dlse)   dbias = ds summed where bias was broadcast
    du  = ds (1 - tanh^2(u / cap))     dscale = sum du raw
    dq  = scale du k                   dk  = scale du' q
    dcap = sum ds (tanh(u / cap) - (u / cap) (1 - tanh^2(u / cap)))
Tangents along dq, dk and dv, without dropout and with ds as the tangent of s, are
    dout = (p (ds - dlse)) v + p dv    dlse = sum_j p ds
A sink is one more column of the softmax, without a key. So p is smaller than p_keys = exp(s - lse):
    ds  = p (dp - sum_j p dp) + p_keys dlse      dsinks = - sum p_sink sum_j p dp
A hidden pair takes part in no product, so NaN in a hidden key or value reaches no result.
"""

import functools
from typing import NamedTuple

import numpy as np


class Call(NamedTuple):
    """One call with leading dims folded to one B and key heads repeated.

    Everything is [B, N, T, S] or smaller.
    """

    q: np.ndarray  # B N T H
    k: np.ndarray  # B N S H
    v: np.ndarray  # B N S D
    bias: np.ndarray  # B N T S
    seen: np.ndarray  # B N T S, boolean
    z: np.ndarray  # B N T S: 1, or kept / (1 - rate)
    scale: float
    cap: float | None
    sinks: np.ndarray | None = None  # N


def attention(query, key, value, bias=None, mask=None, **kwargs):
    """Return out [*B, T, N, D] and lse [*B, T, N]."""
    call = _call(query, key, value, bias, mask, **kwargs)
    leads = np.shape(query)[:-3]
    _, p, lse, _ = _softmax(call)
    out = _product(p * call.z, call.v, call.seen)  # B N T D
    return _unfold(out, leads), _unfold_rows(lse, leads)


def gradients(query, key, value, bias=None, mask=None, *, dout, dlse, **kwargs):
    """Return cotangents by name, in the shapes of the arguments.

    The names are query, key, value, scale and logits_soft_cap, and bias and sinks if present.
    """
    call = _call(query, key, value, bias, mask, **kwargs)
    leads = np.shape(query)[:-3]
    B, N, T, S = call.seen.shape
    K = np.shape(key)[-2]
    # Rows that see no key have constant results, so their cotangents count for nothing.
    sees_any = call.seen.any(-1)  # B N T
    dout = np.where(sees_any[..., None], _fold(dout), 0)  # B N T D
    dlse = np.where(sees_any, _fold_rows(dlse, call), 0)
    _, p, _, p_keys = _softmax(call)
    raw = _pairs(call.q, call.k, call.seen)
    u = call.scale * raw
    dv = _product((p * call.z).swapaxes(2, 3), dout, call.seen.swapaxes(2, 3))
    dp = _pairs(dout, call.v, call.seen) * call.z
    delta = np.where(call.seen, p * dp, 0).sum(-1, keepdims=True)
    ds = np.where(call.seen, p * (dp - delta) + p_keys * dlse[..., None], 0)
    du = ds
    dcap = 0.0
    if call.cap is not None:
        tanh = np.tanh(u / call.cap)
        du = ds * (1 - tanh**2)
        dcap = np.sum(ds * (tanh - u / call.cap * (1 - tanh**2)))
    dq = call.scale * _product(du, call.k, call.seen)
    dk = call.scale * _product(du.swapaxes(2, 3), call.q, call.seen.swapaxes(2, 3))
    grads = {
        "query": _unfold(dq, leads),
        "key": _unfold(dk.reshape(B, K, N // K, S, -1).sum(2), leads),
        "value": _unfold(dv.reshape(B, K, N // K, S, -1).sum(2), leads),
        "scale": np.sum(du * raw),
        "logits_soft_cap": dcap,
    }
    if call.sinks is not None:
        p_sink = 1 - p.sum(-1)
        grads["sinks"] = -(p_sink * np.where(sees_any, delta[..., 0], 0)).sum((0, 2))
    if bias is not None:
        grads["bias"] = _sum_to(ds.reshape(*leads, N, T, S), np.shape(bias))
    return grads


def tangent(query, key, value, bias=None, mask=None, *, along, **kwargs):
    """Return the tangents of out and lse for the tangents `along` of query, key and value."""
    call = _call(query, key, value, bias, mask, **kwargs)
    leads = np.shape(query)[:-3]
    G = np.shape(query)[-2] // np.shape(key)[-2]
    dq, dk, dv = (_fold(x) for x in along)
    dk = np.repeat(dk, G, axis=1)
    dv = np.repeat(dv, G, axis=1)
    _, p, _, p_keys = _softmax(call)
    ds = call.scale * (_pairs(dq, call.k, call.seen) + _pairs(call.q, dk, call.seen))
    if call.cap is not None:
        u = call.scale * _pairs(call.q, call.k, call.seen)
        ds = ds * (1 - np.tanh(u / call.cap) ** 2)
    dlse = np.where(call.seen, p_keys * ds, 0).sum(-1)
    mean = np.where(call.seen, p * ds, 0).sum(-1, keepdims=True)
    dout = _product(p * (ds - mean), call.v, call.seen) + _product(p, dv, call.seen)
    return _unfold(dout, leads), _unfold_rows(dlse, leads)


def scalar_sizes(query, key, value, bias=None, mask=None, *, dout, dlse, **kwargs):
    """Return the root of the sum of squares of the terms of a scalar's gradient, by name.

    The gradient is the sum of these terms over all pairs. A maximum over many errors can be
    compared with that of another computation, but the error of one number may be small by luck.
    """
    call = _call(query, key, value, bias, mask, **kwargs)
    _, p, _, _ = _softmax(call)
    raw = _pairs(call.q, call.k, call.seen)
    dout = np.abs(_fold(dout))
    dlse = np.abs(_fold_rows(dlse, call))
    dp = dout @ np.abs(call.v).swapaxes(2, 3) * call.z
    delta = (dout * np.abs((p * call.z) @ call.v)).sum(-1) + dlse
    ds = p * (dp + delta[..., None])
    return {
        "scale": np.sqrt(np.sum((ds * raw) ** 2)),
        "logits_soft_cap": np.sqrt(np.sum(ds**2)),  # because |tanh u - u sech^2 u| < 1
    }


def sees(
    T,
    S,
    *,
    is_causal=False,
    local_window_size=None,
    q_offset=0,
    query_length=None,
    key_length=None,
    query_segments=None,
    key_segments=None,
):
    """Return [T, S], True where query i of one sequence may attend to key j.

    This is the rule of every positional argument, a row at a time.
    """
    if isinstance(local_window_size, tuple):
        left, right = local_window_size
    else:
        left = right = local_window_size
    j = np.arange(S)
    keep = np.zeros((T, S), bool)
    for i in range(T if query_length is None else min(T, query_length)):
        position = i + q_offset
        row = np.ones(S, bool)
        if is_causal:
            row &= j <= position
        if left is not None:
            row &= j >= position - left
        if right is not None:
            row &= j <= position + right
        if key_length is not None:
            row &= j < key_length
        if query_segments is not None:
            row &= np.equal(query_segments[i], key_segments)
        keep[i] = row
    return keep


def seen_by(
    query,
    key,
    bias=None,
    mask=None,
    *,
    is_causal=False,
    local_window_size=None,
    q_offset=0,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
):
    """Return [B, N, T, S], all masks of a call combined.

    A `bias` hides a pair at -inf and at the lowest finite number of its dtype.
    """
    leads = np.shape(query)[:-3]
    T, N = np.shape(query)[-3:-1]
    S = np.shape(key)[-3]
    B = int(np.prod(leads))
    if query_segment_ids is not None and key_value_segment_ids is None:
        key_value_segment_ids = query_segment_ids
    positions = {
        "q_offset": _per_entry(q_offset, B),
        "query_length": _per_entry(query_seq_lengths, B),
        "key_length": _per_entry(key_value_seq_lengths, B),
        "query_segments": _ids_per_entry(query_segment_ids, leads, T),
        "key_segments": _ids_per_entry(key_value_segment_ids, leads, S),
    }
    rule = functools.partial(sees, T, S, is_causal=is_causal, local_window_size=local_window_size)
    rule = functools.cache(rule)  # batch entries often agree
    keep = np.zeros((B, N, T, S), bool)
    for b in range(B):
        keep[b] = rule(**{name: values[b] for name, values in positions.items()})
    if mask is not None:
        keep = keep & _full(mask, leads, N, T, S).astype(bool)
    if bias is not None:
        keep = keep & (_full(bias, leads, N, T, S) > _lowest(np.asarray(bias).dtype))
    return keep


def _per_entry(x, B):
    """Return an int for each batch entry, or None for each where x is None."""
    if x is None:
        return [None] * B
    return [int(y) for y in np.broadcast_to(np.reshape(x, -1), B)]


def _ids_per_entry(x, leads, size):
    """Return a tuple of `size` ids for each batch entry, or None for each where x is None."""
    B = int(np.prod(leads))
    if x is None:
        return [None] * B
    ids = np.broadcast_to(x, (*leads, size)).reshape(B, size)
    return [tuple(row) for row in ids.tolist()]


def _call(
    query,
    key,
    value,
    bias,
    mask,
    *,
    scale=None,
    logits_soft_cap=None,
    sinks=None,
    kept=None,
    dropout_rate=0.0,
    **positions,
):
    leads = np.shape(query)[:-3]
    T, N, H = np.shape(query)[-3:]
    S, K = np.shape(key)[-3:-1]
    q = _fold(query)
    k = np.repeat(_fold(key), N // K, axis=1)  # query head n reads key head n // G
    v = np.repeat(_fold(value), N // K, axis=1)
    seen = seen_by(query, key, bias, mask, **positions)
    bias64 = np.zeros(seen.shape)
    if bias is not None:
        bias64 = np.where(seen, _full(bias, leads, N, T, S).astype(np.float64), 0)
    z = np.ones(seen.shape)
    if kept is not None:
        z = _full(kept, leads, N, T, S) / (1.0 - dropout_rate)
    scale = 1 / np.sqrt(H) if scale is None else float(scale)
    cap = None if logits_soft_cap is None else float(logits_soft_cap)
    sinks = None if sinks is None else np.asarray(sinks, np.float64)
    return Call(q, k, v, bias64, seen, z, scale, cap, sinks)


def _softmax(call: Call):
    """Return s, p, lse and p_keys.

    lse [B, N, T] is of the keys alone. p and p_keys [B, N, T, S] differ only with a sink, which
    takes a share of p. A row that sees no key has p = 0 and lse = -inf.
    """
    s = call.scale * _pairs(call.q, call.k, call.seen)
    if call.cap is not None:
        s = call.cap * np.tanh(s / call.cap)
    s = np.where(call.seen, s + call.bias, -np.inf)
    m = s.max(-1, initial=-np.inf)
    shift = np.where(np.isneginf(m), 0, m)
    l = np.exp(s - shift[..., None]).sum(-1)
    with np.errstate(divide="ignore"):
        lse = shift + np.log(l)
    p_keys = _probabilities(call, s, lse)
    p = p_keys
    if call.sinks is not None:
        p = _probabilities(call, s, np.logaddexp(lse, call.sinks[:, None]))
    return s, p, lse, p_keys


def _probabilities(call: Call, s, lse):
    """Return exp(s - lse) at visible pairs, 0 elsewhere."""
    shift = np.where(np.isneginf(lse), 0, lse)
    return np.where(call.seen, np.exp(s - shift[..., None]), 0)


def _pairs(x, y, seen):
    """Return x y' at visible pairs, 0 elsewhere."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(seen, x @ y.swapaxes(2, 3), 0)


def _product(p, x, seen):
    """Return sum_j p_ij x_j over the visible j of each i, so that no NaN of a hidden x_j enters."""
    if np.isfinite(x).all():
        return p @ x
    with np.errstate(invalid="ignore"):
        return np.where(seen[..., None], p[..., None] * x[:, :, None], 0).sum(3)


def _fold(x):
    """Return x [*B, T, N, H] as [B, N, T, H] in float64."""
    x = np.asarray(x).astype(np.float64)
    return x.reshape(int(np.prod(x.shape[:-3])), *x.shape[-3:]).swapaxes(1, 2)


def _fold_rows(x, call: Call):
    """Return x [*B, T, N] as [B, N, T] in float64."""
    B, N, T, _ = call.seen.shape
    return np.asarray(x, np.float64).reshape(B, T, N).swapaxes(1, 2)


def _unfold(x, leads):
    """Return x [B, N, T, H] as [*B, T, N, H]."""
    return x.swapaxes(1, 2).reshape(*leads, x.shape[2], x.shape[1], x.shape[3])


def _unfold_rows(x, leads):
    """Return x [B, N, T] as [*B, T, N]."""
    return x.swapaxes(1, 2).reshape(*leads, x.shape[2], x.shape[1])


def _full(x, leads, N, T, S):
    """Broadcast x to [*B, N, T, S] and return it as [B, N, T, S].

    More leading dims of size 1 than *B are allowed.
    """
    x = np.asarray(x)
    while x.ndim > len(leads) + 3 and x.shape[0] == 1:
        x = x[0]
    return np.broadcast_to(x, (*leads, N, T, S)).reshape(int(np.prod(leads)), N, T, S)


def _sum_to(x, shape):
    """Transpose the broadcast of `shape` to x.shape: sum x to `shape`."""
    inner = shape[max(0, len(shape) - x.ndim) :]
    x = x.sum(tuple(range(x.ndim - len(inner))))
    summed = [axis for axis, size in enumerate(inner) if size == 1 and x.shape[axis] != 1]
    return x.sum(tuple(summed), keepdims=True).reshape(shape)


def _lowest(dtype):
    """Return the lowest finite number of a floating dtype.

    NumPy has no bfloat16, so its number is written out.
    """
    return -3.3895313892515355e38 if dtype.name == "bfloat16" else np.finfo(dtype).min
