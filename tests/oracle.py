"""The truth: attention and its gradients in float64, one formula a line, masks by loops. NumPy only, no memeff, no JAX.

With raw = q k', u = scale raw, s = cap tanh(u / cap) + bias, p = softmax(s) over the keys that a query sees, and a dropout
mask kept with rate r, z = kept / (1 - r):
    out = (p z) v                      lse = log sum exp s
    dv  = (p z)' dout                  dp  = (dout v') z
    ds  = p (dp - sum_j p dp + dlse)   dbias = ds summed where bias was broadcast
    du  = ds (1 - tanh^2(u / cap))     dcap  = sum ds (tanh(u / cap) - (u / cap) (1 - tanh^2(u / cap)))
    dscale = sum du raw                dq = scale du k        dk = scale du' q
and along dq, dk, dv (there a dot for tangents) dout = (p (ds - dlse)) v + p dv and dlse = sum_j p ds, without dropout.
A sink is one more column of the softmax, without a key: p is then smaller than p_keys = exp(s - lse), and
    ds  = p (dp - sum_j p dp) + p_keys dlse      dsinks = - sum p_sink sum_j p dp
A pair that is hidden takes part in no product at all, so NaN in what nobody sees stays where it is.
"""

import functools
from typing import NamedTuple

import numpy as np


class Call(NamedTuple):
    """One call with leading dims folded to one B and key heads repeated: everything [B, N, T, S] or smaller."""

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
    """out [*B, T, N, D] and lse [*B, T, N]."""
    call = _call(query, key, value, bias, mask, **kwargs)
    s, p, lse, _ = _softmax(call)
    out = _product(p * call.z, call.v, call.seen)  # B N T D
    leads = np.shape(query)[:-3]
    return _unfold(out, leads), lse.transpose(0, 2, 1).reshape(*leads, *lse.shape[:0:-1])


def gradients(query, key, value, bias=None, mask=None, *, dout, dlse, **kwargs):
    """{"query", "key", "value", "bias", "scale", "logits_soft_cap", "sinks"}: cotangents, in the shapes of these."""
    call = _call(query, key, value, bias, mask, **kwargs)
    leads, (B, N, T, S), K = np.shape(query)[:-3], call.seen.shape, np.shape(key)[-2]
    some = call.seen.any(-1)  # B N T: what a row that sees nothing is given counts for nothing
    dout = np.where(some[..., None], _fold(dout), 0)  # B N T D
    dlse = np.where(some, np.asarray(dlse, np.float64).reshape(B, T, N).transpose(0, 2, 1), 0)
    s, p, lse, p_keys = _softmax(call)
    raw = _pairs(call.q, call.k, call.seen)
    u = call.scale * raw
    dv = _product((p * call.z).swapaxes(2, 3), dout, call.seen.swapaxes(2, 3))
    dp = _pairs(dout, call.v, call.seen) * call.z
    delta = np.where(call.seen, p * dp, 0).sum(-1, keepdims=True)
    ds = np.where(call.seen, p * (dp - delta) + p_keys * dlse[..., None], 0)
    du, dcap = ds, 0.0
    if call.cap is not None:
        tanh = np.tanh(u / call.cap)
        du = ds * (1 - tanh**2)
        dcap = np.sum(ds * (tanh - u / call.cap * (1 - tanh**2)))
    dq = call.scale * _product(du, call.k, call.seen)
    dk = call.scale * _product(du.swapaxes(2, 3), call.q, call.seen.swapaxes(2, 3))
    of = {
        "query": _unfold(dq, leads),
        "key": _unfold(dk.reshape(B, K, N // K, S, -1).sum(2), leads),
        "value": _unfold(dv.reshape(B, K, N // K, S, -1).sum(2), leads),
        "scale": np.sum(du * raw),
        "logits_soft_cap": dcap,
    }
    if call.sinks is not None:
        of["sinks"] = -((1 - p.sum(-1)) * np.where(some, delta[..., 0], 0)).sum((0, 2))
    if bias is not None:
        of["bias"] = _sum_to(ds.reshape(*leads, N, T, S), np.shape(bias))
    return of


def tangent(query, key, value, bias=None, mask=None, *, along, **kwargs):
    """Tangents of out and lse, in their shapes, along those of query, key and value."""
    call = _call(query, key, value, bias, mask, **kwargs)
    leads, G = np.shape(query)[:-3], np.shape(query)[-2] // np.shape(key)[-2]
    dq, dk, dv = (np.repeat(_fold(x), n, axis=1) for x, n in zip(along, (1, G, G), strict=True))
    s, p, _, p_keys = _softmax(call)
    ds = call.scale * (_pairs(dq, call.k, call.seen) + _pairs(call.q, dk, call.seen))
    if call.cap is not None:
        ds = ds * (1 - np.tanh(call.scale * _pairs(call.q, call.k, call.seen) / call.cap) ** 2)
    dlse = np.where(call.seen, p_keys * ds, 0).sum(-1)
    mean = np.where(call.seen, p * ds, 0).sum(-1, keepdims=True)
    dout = _product(p * (ds - mean), call.v, call.seen) + _product(p, dv, call.seen)
    return _unfold(dout, leads), dlse.transpose(0, 2, 1).reshape(*leads, *dlse.shape[:0:-1])


def scalar_sizes(query, key, value, bias=None, mask=None, *, dout, dlse, **kwargs):
    """How large the terms are of which a scalar's gradient is the sum over all pairs: the root of their squares.

    A maximum over many errors can be compared with another computation's; one number's error may be small by luck.
    """
    call = _call(query, key, value, bias, mask, **kwargs)
    B, N, T, S = call.seen.shape
    _, p, _, _ = _softmax(call)
    raw, do = _pairs(call.q, call.k, call.seen), np.abs(_fold(dout))
    dlse = np.abs(np.asarray(dlse, np.float64)).reshape(B, T, N).swapaxes(1, 2)
    delta = (do * np.abs((p * call.z) @ call.v)).sum(-1) + dlse
    ds = p * (do @ np.abs(call.v).swapaxes(2, 3) * call.z + delta[..., None])
    root = lambda x: np.sqrt(np.sum(x**2))
    return {"scale": root(ds * raw), "logits_soft_cap": root(ds)}  # |tanh u - u sech^2 u| < 1


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
    """[T, S]: may query i of one sequence look at key j? The rule of every positional argument, spoken pair by pair."""
    left, right = (
        local_window_size
        if isinstance(local_window_size, tuple)
        else (local_window_size, local_window_size)
    )
    keep = np.zeros((T, S), bool)
    for i in range(T):
        for j in range(S):
            position = i + q_offset
            if is_causal and j > position:
                continue
            if left is not None and j < position - left:
                continue
            if right is not None and j > position + right:
                continue
            if query_length is not None and i >= query_length:
                continue
            if key_length is not None and j >= key_length:
                continue
            if query_segments is not None and query_segments[i] != key_segments[j]:
                continue
            keep[i, j] = True
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
    """[B, N, T, S]: every mask of a call together. A `bias` hides at -inf and at the lowest finite number of its dtype."""
    leads, (T, N), S = np.shape(query)[:-3], np.shape(query)[-3:-1], np.shape(key)[-3]
    B = int(np.prod(leads))
    same = functools.cache(
        functools.partial(sees, T, S, is_causal=is_causal, local_window_size=local_window_size)
    )
    per_batch = lambda x: (
        [None] * B if x is None else [int(y) for y in np.broadcast_to(np.reshape(x, -1), B)]
    )
    if query_segment_ids is not None and key_value_segment_ids is None:
        key_value_segment_ids = query_segment_ids
    rows = lambda x, size: map(tuple, np.broadcast_to(x, (*leads, size)).reshape(B, size).tolist())
    ids = lambda x, size: [None] * B if x is None else rows(x, size)
    columns = zip(
        per_batch(q_offset),
        per_batch(query_seq_lengths),
        per_batch(key_value_seq_lengths),
        ids(query_segment_ids, T),
        ids(key_value_segment_ids, S),
        strict=True,
    )
    keep = np.zeros((B, N, T, S), bool)
    for b, (offset, query_length, key_length, q_ids, k_ids) in enumerate(columns):
        keep[b] = same(
            q_offset=offset,
            query_length=query_length,
            key_length=key_length,
            query_segments=q_ids,
            key_segments=k_ids,
        )
    if mask is not None:
        keep = keep & _full(mask, leads, N, T, S).astype(bool)
    if bias is not None:
        keep = keep & (_full(bias, leads, N, T, S) > _lowest(np.asarray(bias).dtype))
    return keep


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
    leads, (T, N, H), (S, K) = np.shape(query)[:-3], np.shape(query)[-3:], np.shape(key)[-3:-1]
    q, k, v = (_fold(x) for x in (query, key, value))
    k, v = (np.repeat(x, N // K, axis=1) for x in (k, v))  # query head n reads key head n // G
    seen = seen_by(query, key, bias, mask, **positions)
    bias64 = (
        np.zeros(seen.shape) if bias is None else _full(bias, leads, N, T, S).astype(np.float64)
    )
    z = np.ones(seen.shape) if kept is None else _full(kept, leads, N, T, S) / (1.0 - dropout_rate)
    scale = 1 / np.sqrt(H) if scale is None else float(scale)
    cap = None if logits_soft_cap is None else float(logits_soft_cap)
    sinks = None if sinks is None else np.asarray(sinks, np.float64)
    return Call(q, k, v, np.where(seen, bias64, 0), seen, z, scale, cap, sinks)


def _softmax(call: Call):
    """s, p [B, N, T, S], lse [B, N, T] of the keys, p without the sink; a row that sees nothing has p = 0, lse = -inf."""
    s = call.scale * _pairs(call.q, call.k, call.seen)
    if call.cap is not None:
        s = call.cap * np.tanh(s / call.cap)
    s = np.where(call.seen, s + call.bias, -np.inf)
    m = s.max(-1, initial=-np.inf)
    shift = np.where(np.isneginf(m), 0, m)
    l = np.exp(s - shift[..., None]).sum(-1)
    with np.errstate(divide="ignore"):
        lse = shift + np.log(l)
    below = lambda lse: np.where(
        call.seen, np.exp(s - np.where(np.isneginf(lse), 0, lse)[..., None]), 0
    )
    p_keys = below(lse)
    p = p_keys if call.sinks is None else below(np.logaddexp(lse, call.sinks[:, None]))
    return s, p, lse, p_keys


def _pairs(x, y, seen):
    """x y' at the pairs that are seen, 0 elsewhere."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(seen, x @ y.swapaxes(2, 3), 0)


def _product(p, x, seen):
    """sum_j p_ij x_j over the j that i sees: a NaN in an x_j that it does not see is not in the sum."""
    if np.isfinite(x).all():
        return p @ x
    with np.errstate(invalid="ignore"):
        return np.where(seen[..., None], p[..., None] * x[:, :, None], 0).sum(3)


def _fold(x):
    """[*B, T, N, H] -> [B, N, T, H] in float64."""
    x = np.asarray(x).astype(np.float64)
    return x.reshape(int(np.prod(x.shape[:-3])), *x.shape[-3:]).swapaxes(1, 2)


def _unfold(x, leads):
    return x.swapaxes(1, 2).reshape(*leads, x.shape[2], x.shape[1], x.shape[3])


def _full(x, leads, N, T, S):
    """Broadcast to [*B, N, T, S], then [B, N, T, S]; more dims of size 1 than that may stand in front."""
    x = np.asarray(x)
    while x.ndim > len(leads) + 3 and x.shape[0] == 1:
        x = x[0]
    return np.broadcast_to(x, (*leads, N, T, S)).reshape(int(np.prod(leads)), N, T, S)


def _sum_to(x, shape):
    """The transpose of broadcasting `shape` to x.shape."""
    inner = shape[max(0, len(shape) - x.ndim) :]
    x = x.sum(tuple(range(x.ndim - len(inner))))
    x = x.sum(tuple(a for a, size in enumerate(inner) if size == 1 != x.shape[a]), keepdims=True)
    return x.reshape(shape)


def _lowest(dtype):
    """The lowest finite number, -max, of a floating dtype; bfloat16 is no dtype of NumPy's, so it is written out."""
    return -3.3895313892515355e38 if dtype.name == "bfloat16" else np.finfo(dtype).min
