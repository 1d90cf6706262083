"""Plain JAX in the place of the Hopper kernels, to test what happens around them.

use_plain_kernels(monkeypatch)      # causal attention, its gradient and its tangent
accept_all_calls(monkeypatch)       # why_not has no objection, whatever the device and the sizes
"""

import jax
import jax.numpy as jnp
import numpy as np
from hopper_cases import f32


def accept_all_calls(monkeypatch) -> None:
    """Make `why_not` of the kernels accept every call."""
    monkeypatch.setattr("memeff.pallas.hopper.implementation.why_not", lambda *_: None)


def use_plain_kernels(monkeypatch) -> None:
    """Replace the kernels by functions in plain JAX that keep their contracts, for causal calls."""
    from memeff.pallas.hopper import backward_key, backward_query, calls

    monkeypatch.setattr(calls, "attend", attend)
    monkeypatch.setattr(calls, "tangents", tangents)
    monkeypatch.setattr(backward_query, "query_gradient", query_gradient)
    monkeypatch.setattr(backward_key, "key_value_gradient", key_value_gradient)


def attend(problem, lengths, arrays, scalars, want_lse, tiling):
    query, key, value = cut_to_lengths(lengths, arrays)
    s = logits(problem, query, key)
    lse = jax.nn.logsumexp(s, -1)
    p = jnp.exp(s - lse[..., None]).astype(value.dtype)
    value = repeat_heads(value, query)
    out = jnp.einsum("bnts,bsnd->btnd", p, value)
    return out, pad_rows(lse, tiling.rows) if want_lse else None


def query_gradient(problem, lengths, arrays, dlse, scalars, tiling):
    *arrays, lse = arrays
    query, key, value, out, dout = cut_to_lengths(lengths, arrays)
    delta = -jnp.einsum("btnd,btnd->bnt", out.astype(f32), dout.astype(f32))
    delta = jnp.pad(delta, [(0, 0), (0, 0), (0, lse.shape[-1] - delta.shape[-1])])
    if dlse is not None:
        delta += dlse
    ds, _ = cotangent_of_logits(problem, query, key, value, dout, lse, delta)
    key = repeat_heads(key, query).astype(f32)
    return jnp.einsum("bnts,bsnh->btnh", ds, key).astype(query.dtype), delta


def key_value_gradient(problem, lengths, arrays, scalars, tiling):
    query, key, value, dout = cut_to_lengths(lengths, arrays[:4])
    lse, delta = arrays[4:]
    ds, p = cotangent_of_logits(problem, query, key, value, dout, lse, delta)

    def sum_groups(x):
        return x.reshape(*key.shape[:3], -1, x.shape[-1]).sum(3).astype(key.dtype)

    dk = jnp.einsum("bnts,btnh->bsnh", ds, query.astype(f32))
    dv = jnp.einsum("bnts,btnd->bsnd", p, dout.astype(f32))
    return sum_groups(dk), sum_groups(dv)


def tangents(problem, lengths, arrays, scalars, tiling, shared):
    T, S = lengths
    G = arrays.query.shape[2] // arrays.key.shape[2]

    def of_queries(x):
        return None if x is None else x[:, :T]

    def of_keys(x):
        return None if x is None else jnp.repeat(x[:, :S], G, 2)

    def product(x, y):
        if x is None or y is None:
            return 0
        return jnp.einsum("btnh,bsnh->bnts", x, y) * problem.scale

    def mix(p, x):
        return 0 if x is None else jnp.einsum("bnts,bsnd->btnd", p, x)

    q, dq, out = map(of_queries, (arrays.query, arrays.dq, arrays.out))
    k, dk, v, dv = map(of_keys, (arrays.key, arrays.dk, arrays.value, arrays.dv))
    seen = jnp.tril(jnp.ones((T, S), bool))
    lse = arrays.lse[..., :T, None] / np.log2(np.e)
    p = jnp.where(seen, jnp.exp(product(q, k) - lse), 0)
    w = p * (product(dq, k) + product(q, dk))
    r = w.sum(-1)
    dout = mix(w, v) + mix(p, dv)
    if out is not None:
        dout -= r.swapaxes(1, 2)[..., None] * out
    return dout.astype(q.dtype), pad_rows(r, tiling.own).astype(f32)


# ---- steps that they share


def cut_to_lengths(lengths, arrays):
    """Cut the padding of query, key, value and the other arrays [B, T, N, H] of queries."""
    T, S = lengths
    query, key, value, *arrays = arrays
    return [query[:, :T], key[:, :S], value[:, :S], *(x[:, :T] for x in arrays)]


def repeat_heads(x, query):
    """Repeat the heads of keys or values [B, S, K, H] for each query head."""
    return jnp.repeat(x, query.shape[2] // x.shape[2], 2)


def pad_rows(x, size):
    """Pad numbers of rows [B, N, T] to whole tiles of `size` rows."""
    return jnp.pad(x, [(0, 0), (0, 0), (0, -x.shape[-1] % size)])


def logits(problem, query, key):
    key = repeat_heads(key, query)
    s = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=f32)
    seen = jnp.tril(jnp.ones(s.shape[-2:], bool))
    return jnp.where(seen, s * problem.scale, -jnp.inf)


def cotangent_of_logits(problem, query, key, value, dout, lse, delta):
    """Return ds, times the scale, and p [B, N, T, S]."""
    T = query.shape[1]
    lse = lse[..., :T, None] * np.log(2.0).astype(f32)
    p = jnp.exp(logits(problem, query, key) - lse)
    value = repeat_heads(value, query)
    dp = jnp.einsum("btnd,bsnd->bnts", dout, value, preferred_element_type=f32)
    return p * (dp + delta[..., :T, None]) * problem.scale, p
