"""Plain JAX in the place of the Hopper kernels, to test what happens around them.

use_plain_kernels(monkeypatch)      # causal attention, its gradient and its tangent
accept_all_calls(monkeypatch)       # why_not has no objection, whatever the device and the sizes
"""

import jax
import jax.numpy as jnp
import numpy as np
from hopper_cases import f32

from memeff import tile_sizes


def accept_all_calls(monkeypatch) -> None:
    """Make the kernels accept every call, and hand them float32 undivided."""
    implementation = "memeff.pallas.hopper.implementation"
    monkeypatch.setattr(f"{implementation}.why_not", lambda *_: None)
    monkeypatch.setattr(f"{implementation}.tangent_is_kernel", lambda *_: True)
    for module in ("calls", "layout", "parts"):
        monkeypatch.setattr(f"memeff.pallas.hopper.{module}.count_parts", lambda dtype: 1)


def let_arrays_be_sharded(monkeypatch) -> None:
    """Undo what conftest.py does for most tests, which ignore that there are eight devices."""

    def may_be_sharded() -> bool:
        return True

    monkeypatch.setattr(tile_sizes, "may_be_sharded", may_be_sharded)


def use_plain_kernels(monkeypatch) -> None:
    """Replace the kernels by functions in plain JAX that keep their contracts, for causal calls."""
    from memeff.pallas.hopper import backward_key, backward_query, calls

    monkeypatch.setattr(calls, "attend", attend)
    monkeypatch.setattr(calls, "tangents", tangents)
    monkeypatch.setattr(backward_query, "query_gradient", query_gradient)
    monkeypatch.setattr(backward_key, "key_value_gradient", key_value_gradient)


def attend(problem, lengths, arrays, scalars, want_lse, tiling, carried):
    query, key, value = cut_to_lengths(lengths, arrays)
    s = logits(problem, query, key)
    lse = jax.nn.logsumexp(s, -1)
    p = jnp.exp(s - lse[..., None]).astype(value.dtype)
    value = repeat_heads(value, query)
    out = jnp.einsum("bnts,bsnd->btnd", p, value)
    return (out,), pad_to_tiles(lse, tiling.rows) if want_lse else None


def query_gradient(problem, lengths, arrays, dlse, scalars, tiling, if_bad):
    *arrays, lse = arrays
    query, key, value, out, dout = cut_to_lengths(lengths, arrays)
    delta = -jnp.einsum("btnd,btnd->bnt", out.astype(f32), dout.astype(f32))
    delta = pad_rows(delta, lse.shape[-1])
    if dlse is not None:
        delta += dlse
    ds, _ = cotangent_of_logits(problem, query, key, value, dout, lse, delta)
    key = repeat_heads(key, query).astype(f32)
    return jnp.einsum("bnts,bsnh->btnh", ds, key).astype(query.dtype), delta


def key_value_gradient(problem, lengths, arrays, scalars, tiling, joined, if_bad):
    query, key, value, dout = cut_to_lengths(lengths, arrays[:4])
    lse, delta = arrays[4:]
    ds, p = cotangent_of_logits(problem, query, key, value, dout, lse, delta)

    def sum_groups(x):
        grouped = x.reshape(*key.shape[:3], -1, x.shape[-1])  # B S K G H
        return grouped.sum(3).astype(key.dtype)

    dk = jnp.einsum("bnts,btnh->bsnh", ds, query.astype(f32))
    dv = jnp.einsum("bnts,btnd->bsnd", p, dout.astype(f32))
    gradients = sum_groups(dk), sum_groups(dv)
    return (jnp.concatenate(gradients, axis=2),) if joined else gradients


def tangents(problem, lengths, arrays, scalars, tiling, shared):
    T, S = lengths
    G = arrays.query.shape[2] // arrays.key.shape[2]

    def of_queries(x):
        return None if x is None else x[:, :T]

    def of_keys(x):
        if x is None:
            return None
        return jnp.repeat(x[:, :S], G, 2)

    def product(x, y):
        if x is None or y is None:
            return 0
        return jnp.einsum("btnh,bsnh->bnts", x, y) * problem.scale

    def mix(p, x):
        if x is None:
            return 0
        return jnp.einsum("bnts,bsnd->btnd", p, x)

    q = of_queries(arrays.query)
    dq = of_queries(arrays.dq)
    out = of_queries(arrays.out)
    k = of_keys(arrays.key)
    dk = of_keys(arrays.dk)
    v = of_keys(arrays.value)
    dv = of_keys(arrays.dv)
    seen = jnp.tril(jnp.ones((T, S), bool))
    lse = arrays.lse[..., :T, None] / np.log2(np.e)
    p = jnp.exp(product(q, k) - lse)
    p = jnp.where(seen, p, 0)
    w = p * (product(dq, k) + product(q, dk))
    r = w.sum(-1)
    dout = mix(w, v) + mix(p, dv)
    if out is not None:
        of_rows = r.swapaxes(1, 2)[..., None]  # B T N 1
        dout -= of_rows * out
    r = pad_to_tiles(r, tiling.item_size)
    return dout.astype(q.dtype), r.astype(f32)


# ---- steps that they share


def cut_to_lengths(lengths, arrays):
    """Cut the padding of query, key, value and the other arrays [B, T, N, H] of queries."""
    T, S = lengths
    return [x[:, :S] if i in (1, 2) else x[:, :T] for i, x in enumerate(arrays)]


def repeat_heads(x, query):
    """Repeat the heads of keys or values [B, S, K, H] for each query head."""
    return jnp.repeat(x, query.shape[2] // x.shape[2], 2)


def pad_to_tiles(x, size):
    """Pad numbers of rows [B, N, T] to whole tiles of `size` rows."""
    T = x.shape[-1]
    return pad_rows(x, -(-T // size) * size)


def pad_rows(x, length):
    """Pad numbers of rows [B, N, T] to `length` rows."""
    T = x.shape[-1]
    return jnp.pad(x, [(0, 0), (0, 0), (0, length - T)])


def logits(problem, query, key):
    key = repeat_heads(key, query)
    s = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=f32)
    seen = jnp.tril(jnp.ones(s.shape[-2:], bool))
    return jnp.where(seen, s * problem.scale, -jnp.inf)


def cotangent_of_logits(problem, query, key, value, dout, lse, delta):
    """Return ds, times the scale, and p [B, N, T, S]."""
    T = query.shape[1]
    lse = lse[..., :T, None] * np.log(2.0).astype(f32)
    delta = delta[..., :T, None]
    p = jnp.exp(logits(problem, query, key) - lse)
    value = repeat_heads(value, query)
    dp = jnp.einsum("btnd,bsnd->bnts", dout, value, preferred_element_type=f32)
    ds = p * (dp + delta)
    return ds * problem.scale, p
