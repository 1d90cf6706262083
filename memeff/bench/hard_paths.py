"""The ways in which the hard cases are computed: memeff's, plain attention's, and float64."""

import contextlib
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import memeff
from memeff.bench.cases import Case
from memeff.bench.hard_inputs import H, HardInputs
from memeff.bench.truth import exact_attention
from memeff.device import current_device, pretend_device
from memeff.pallas import family_for

CHUNKED = "chunked"
AS_ON_A_GPU = "chunked, as on a GPU"
KERNELS = "kernels"
FUSED = "kernels, fused"
PLAIN = "plain"
SAVED = "plain, from out and lse as stored"
SCALE = H**-0.5
EXACT_ROWS = 4096  # queries at a time in float64


class HardResults(NamedTuple):
    """The arrays by which a case is compared."""

    out: np.ndarray  # [T, H]
    lse: np.ndarray  # [T]
    dq: np.ndarray  # [T, H]
    dk: np.ndarray  # [S, H]
    dv: np.ndarray  # [S, H]


def memeff_paths() -> list[str]:
    """Return memeff's ways that this machine can run."""
    paths = [CHUNKED]
    if jax.default_backend() == "cpu":
        paths.append(AS_ON_A_GPU)
    if family_for(current_device()).for_device(current_device()) is None:
        paths += [KERNELS, FUSED]
    return paths


def exact(inputs: HardInputs) -> HardResults:
    """Compute a case in float64, some queries at a time."""
    q, k, v, dout, dlse = (x[None, :, None] for x in inputs)
    case = Case(k.shape[1], head_dim=H, mask="full")
    truths = []
    for start in range(0, q.shape[1], EXACT_ROWS):
        rows = slice(start, start + EXACT_ROWS)
        arrays = q[:, rows], k, v, dout[:, rows], dlse[:, rows, ..., None]
        truths.append(exact_attention(arrays, case, np.arange(q.shape[1])[rows]))
    lse, out, dq, dk, dv, _ = zip(*truths, strict=True)
    lse, out, dq = (np.concatenate(parts, 1)[0, :, 0] for parts in (lse, out, dq))
    dk, dv = (np.sum(parts, 0)[0, :, 0] for parts in (dk, dv))
    return HardResults(out, lse[:, 0], dq, dk, dv)


def run_path(path: str, inputs: HardInputs) -> HardResults:
    """Compute a case in the dtype of its inputs on the first device."""
    arrays = [x[None, :, None] for x in inputs]  # B T N H, and dlse B T N
    with contextlib.ExitStack() as stack:
        if path == AS_ON_A_GPU:
            stack.enter_context(pretend_device("gpu"))
        # By default a GPU's float32 products have 10 bits.
        stack.enter_context(jax.default_matmul_precision("highest"))
        results = jax.device_get(compiled_path(path)(*arrays))
    return HardResults(*(np.asarray(x)[0, :, 0] for x in results))


@functools.cache
def compiled_path(path: str) -> Callable[..., tuple]:
    """Return one jitted function for each path, so that calls of one shape share a compilation."""
    attend = attention_of_path(path)

    @jax.jit
    def forward_and_gradient(query: Array, key: Array, value: Array, dout: Array, dlse: Array):
        results, pull = jax.vjp(attend, query, key, value)
        return *results, *pull((dout, dlse))

    return forward_and_gradient


def attention_of_path(path: str) -> Callable[..., tuple[Array, Array]]:
    """Return the function of query, key and value that gives out and lse."""
    if path == PLAIN:
        return plain_attention
    if path == SAVED:
        return plain_attention_from_saved
    attend = functools.partial(memeff.dot_product_attention, return_residual=True)
    if path == FUSED:
        return functools.partial(attend, implementation="pallas", backward="fused")
    if path == KERNELS:
        return functools.partial(attend, implementation="pallas")
    return functools.partial(attend, implementation="xla")


def plain_attention(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Compute out as `jax.nn.dot_product_attention` does, and lse [B, T, N]."""
    s = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * SCALE
    p = jax.nn.softmax(s, axis=-1).astype(value.dtype)
    out = jnp.einsum("bnts,bsnh->btnh", p, value)
    lse = jax.nn.logsumexp(s, axis=-1)  # B N T
    return out, lse.swapaxes(1, 2)


@jax.custom_vjp
def plain_attention_from_saved(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Compute plain attention whose gradient starts from out and lse as they are stored."""
    return plain_attention(query, key, value)


def _forward_and_saved(query: Array, key: Array, value: Array):
    results = plain_attention(query, key, value)
    return results, (query, key, value, *results)


def _backward_from_saved(saved: tuple[Array, ...], cotangents: tuple[Array, Array]):
    query, key, value, out, lse = saved
    dout, dlse = cotangents
    einsum = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    s = einsum("btnh,bsnh->bnts", query, key) * SCALE
    lse = lse.swapaxes(1, 2)[..., None]  # B N T 1
    p = jnp.exp(s - lse)
    dp = einsum("btnh,bsnh->bnts", dout, value)
    terms = dout.astype(jnp.float32) * out.astype(jnp.float32)
    delta = terms.sum(-1) - dlse  # B T N
    delta = delta.swapaxes(1, 2)[..., None]  # B N T 1
    d_raw = p * (dp - delta) * SCALE
    dq = einsum("bnts,bsnh->btnh", d_raw, key)
    dk = einsum("bnts,btnh->bsnh", d_raw, query)
    dv = einsum("bnts,btnh->bsnh", p.astype(value.dtype), dout)
    return tuple(x.astype(query.dtype) for x in (dq, dk, dv))


plain_attention_from_saved.defvjp(_forward_and_saved, _backward_from_saved)
