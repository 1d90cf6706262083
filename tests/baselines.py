"""Compute what results are measured against: the oracle's answer, and plain attention.

Plain attention is the quadratic computation in the dtype of the call. Both take the arguments of
`dot_product_attention`, and `cotangents` gives the cotangents of a call. conftest.py exports the
names of this file, so that tests import everything from there.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import CASES, accumulator

WITHOUT_EFFECT = ("chunk_size", "precision", "implementation")  # on the exact result


class Result(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    grads: dict[str, np.ndarray]  # by argument, for each of GRADIENTS that is an array


def cotangents(args, dtype="float32", dlse=True) -> tuple[np.ndarray, np.ndarray]:
    """Return random cotangents of out and lse, the same for all calls of one shape.

    Without `dlse` the cotangent of lse is 0.
    """
    rng = np.random.default_rng(11)
    rows = args[0].shape[:-1]
    dout = rng.standard_normal((*rows, args[2].shape[-1])).astype(dtype)
    return dout, dlse * rng.standard_normal(rows).astype(accumulator(jnp.dtype(dtype)))


# ---- the oracle


def true_call(args, kwargs, dtype="float32", dlse=True) -> Result:
    """Return the oracle's answer. Without `dlse` the loss depends on out alone."""
    kwargs = oracle_arguments(args, kwargs, dtype)
    dout, dlse = cotangents(args, dtype, dlse)
    grads = oracle.gradients(*args, **kwargs, dout=dout, dlse=dlse)
    return Result(*oracle.attention(*args, **kwargs), grads)


@functools.cache
def true_case(name: str, dtype: str) -> Result:
    args, kwargs = CASES[name].inputs(jnp.dtype(dtype))
    return true_call(args, kwargs, dtype)


def oracle_arguments(args, kwargs, dtype="float32") -> dict[str, Any]:
    """Return the oracle's keyword arguments for those of a call.

    Omit arguments that change no number, and draw dropout's mask as Flax draws it: all at once.
    """
    kwargs = {name: x for name, x in kwargs.items() if name not in WITHOUT_EFFECT}
    key = kwargs.pop("dropout_rng", None)
    if key is None:
        return kwargs
    *leads, T, N, _ = args[0].shape
    S = args[1].shape[-3]
    shape = (T, S)
    if not kwargs.pop("broadcast_dropout", True):
        shape = (*leads, N, T, S)
    keep_rate = 1.0 - kwargs["dropout_rate"]
    if kwargs.pop("dropout_bits", "threefry") == "mix32":
        kwargs["kept"] = mix32(np.asarray(key), keep_rate, shape)
        return kwargs
    with jax.enable_x64(jnp.dtype(dtype) == np.float64):
        kept = jax.random.bernoulli(jnp.asarray(key), keep_rate, shape)
    kwargs["kept"] = np.asarray(kept)
    return kwargs


def threefry(key, x0, x1):
    """Return the two words of Threefry-2x32 with 20 rounds (Salmon et al. 2011)."""
    keys = (*key, key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
    x0 = x0 + keys[0]
    x1 = x1 + keys[1]
    for i in range(5):
        for r in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))) ^ x0
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x0, x1


def mix32(key, keep_rate: float, shape: tuple[int, ...]) -> np.ndarray:
    """Return the mask of dropout_bits="mix32", of `shape` [T, S] or [..., T, S]."""

    def words(domain, count):
        number = np.arange(count, dtype=np.uint32)
        return threefry(key, np.full_like(number, domain), number)

    *heads, T, S = shape
    a, b = words(0, T)
    c, _ = words(1, S)
    u, v = words(2, int(np.prod(heads))) if heads else np.zeros((2, 1), np.uint32)
    a = a ^ u[:, None]
    b = (b ^ v[:, None]) | np.uint32(1)
    x = a[..., None] + b[..., None] * c
    return (x.view(np.int32) < keep_rate * 2.0**32 - 2.0**31).reshape(shape)


# ---- plain attention


@functools.cache
def plain_case(name: str, dtype: str) -> tuple[Result, Result]:
    args, kwargs = CASES[name].inputs(jnp.dtype(dtype))
    return plain_call(args, kwargs, dtype)


def plain_call(args, kwargs, dtype="float32", dlse=True) -> tuple[Result, Result]:
    """Return two results of plain attention, which follows jax.nn step for step.

    The masks come from the oracle. JAX differentiates the first result. The backward of the second
    is written from the saved out and lse, because a backward in linear memory starts from them. It
    errs more where p (dp - rowsum(dout out)) is a small difference of large terms, because out is
    rounded.
    """
    acc = accumulator(jnp.dtype(dtype))
    none = {"bias": None, "mask": None}
    call = oracle._call(*args, **none | oracle_arguments(args, kwargs, dtype))
    T, N, H = args[0].shape[-3:]
    S, K, D = args[2].shape[-3:]
    B = call.seen.shape[0]
    G = N // K
    dout, dlse = cotangents(args, dtype, dlse)
    inputs = (
        args[0].reshape(B, T, K, G, H),
        args[1].reshape(B, S, K, H),
        args[2].reshape(B, S, K, D),
        call.bias.astype(acc).reshape(B, K, G, T, S),
        call.seen.reshape(B, K, G, T, S),
        call.z.astype(acc).reshape(B, K, G, T, S),
        acc(call.scale),
        None if call.cap is None else acc(call.cap),
        None if call.sinks is None else call.sinks.astype(acc).reshape(K, G),
        dout.reshape(B, T, K, G, D),
        dlse.reshape(B, T, K, G),
    )
    with jax.enable_x64(acc == np.float64):
        by_jax, from_saved = jax.device_get(_plain(*inputs))
    bias = kwargs.get("bias")
    return _unfold(*by_jax, args, bias), _unfold(*from_saved, args, bias)


def _unfold(out, lse, folded, args, bias) -> Result:
    """Return results and `folded` gradients of `_plain` in the shapes of the call's arguments."""
    *leads, T, N, _ = args[0].shape
    S, _, D = args[2].shape[-3:]
    shapes = {"query": args[0].shape, "key": args[1].shape, "value": args[2].shape}
    shapes |= {"scale": (), "logits_soft_cap": (), "sinks": (N,)}
    grads = {}
    for name, x in folded.items():
        if x is not None:
            grads[name] = x.reshape(shapes.get(name, x.shape))
    if bias is not None:
        full = grads["bias"].astype(np.float64).reshape(*leads, N, T, S)
        grads["bias"] = oracle._sum_to(full, np.shape(bias)).astype(bias.dtype)
    return Result(out.reshape(*leads, T, N, D), lse.reshape(*leads, T, N), grads)


@jax.jit
def _plain(query, key, value, bias, seen, z, scale, cap, sinks, dout, dlse):
    """Return out, lse and gradients by name of both forms of plain attention.

    Queries are [B, T, K, G, H], `bias`, `seen` and `z` are [B, K, G, T, S].
    """
    inputs = {"query": query, "bias": bias, "key": key, "value": value}
    inputs |= {"scale": scale, "logits_soft_cap": cap, "sinks": sinks}

    def result(mix):
        call = functools.partial(_all_groups, mix, seen, z)
        (out, lse), pull = jax.vjp(call, *inputs.values())
        return out, lse, dict(zip(inputs, pull((dout, dlse)), strict=True))

    return result(_mix), result(_mix_saved)


def _all_groups(mix, seen, z, query, bias, key, value, scale, cap, sinks):
    """Compute each group of query heads by itself, as jax.nn does."""
    grouped = (
        query.transpose(3, 0, 1, 2, 4),  # G B T K H
        *(jnp.moveaxis(x, 2, 0) for x in (bias, seen, z)),  # G B K T S
    )
    sink_axis = None if sinks is None else 1
    in_axes = (0, 0, 0, 0, sink_axis, None, None, None, None)
    call = jax.vmap(functools.partial(_group, mix), in_axes, out_axes=3)
    return call(*grouped, sinks, key, value, scale, cap)


def _group(mix, query, bias, seen, z, sink, key, value, scale, cap):
    """Return out [B, T, K, D] and lse [B, T, K] of one query head for each key head."""
    raw = jnp.einsum("btkh,bskh->bkts", query, key, preferred_element_type=bias.dtype)
    s = raw * scale
    if cap is not None:
        s = cap * jnp.tanh(s / cap)
    sees_any = seen.any(-1, keepdims=True)
    s = jnp.where(seen | ~sees_any, s + bias, -jnp.inf)
    return mix(s, sink, value, sees_any, z)


def _mix(s, sink, value, sees_any, z):
    """Return out [B, T, K, D] and lse [B, T, K] for the logits s [B, K, T, S].

    The sink [K] is one more column of the softmax.
    """
    p = jnp.where(sees_any, _softmax(s, sink), 0) * z
    lse = jnp.where(sees_any[..., 0], jax.nn.logsumexp(s, axis=-1), -jnp.inf)
    out = jnp.einsum("bkts,bskd->btkd", p.astype(value.dtype), value)
    return out, lse.swapaxes(1, 2)


def _softmax(s, sink):
    if sink is None:
        return jax.nn.softmax(s, axis=-1)
    column = jnp.broadcast_to(sink[:, None, None], (*s.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([s, column], -1), axis=-1)[..., :-1]


def _mix_fwd(s, sink, value, sees_any, z):
    out, lse = _mix(s, sink, value, sees_any, z)
    return (out, lse), (s, sink, value, sees_any, z, out, lse)


def _mix_bwd(saved, cotangents):
    s, sink, value, sees_any, z, out, lse = saved
    dout, dlse = cotangents
    lse = lse.swapaxes(1, 2)[..., None]
    dlse = dlse.swapaxes(1, 2)[..., None]
    total = lse if sink is None else jnp.logaddexp(lse, sink[:, None, None])
    p = jnp.where(sees_any, jnp.exp(s - total), 0)
    p_keys = jnp.where(sees_any, jnp.exp(s - lse), 0)  # without the sink
    dv = jnp.einsum("bkts,btkd->bskd", (p * z).astype(value.dtype), dout)
    dp = jnp.einsum("btkd,bskd->bkts", dout, value, preferred_element_type=s.dtype) * z
    delta = (dout.astype(s.dtype) * out.astype(s.dtype)).sum(-1)
    delta = delta.swapaxes(1, 2)[..., None]
    dsink = None
    if sink is not None:
        p_sink = jnp.exp(sink[:, None, None] - total)
        dsink = -jnp.where(sees_any, p_sink * delta, 0).sum((0, 2, 3))
    ds = p * (dp - delta) + p_keys * dlse
    return ds, dsink, dv, None, None


_mix_saved = jax.custom_vjp(_mix)
_mix_saved.defvjp(_mix_fwd, _mix_bwd)
