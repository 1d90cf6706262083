"""Sequences longer than other tests have, on a GPU: sampled rows and columns against float64."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_calls import normal_arrays, skip_without_kernels

import memeff

pytestmark = pytest.mark.gpu

# twice what cuDNN has at 512 tokens
LARGEST_ERROR = {"out": 4e-3, "lse": 1e-6, "dq": 6e-3, "dk": 6e-3, "dv": 5e-3}


class Results(NamedTuple):
    """Arrays of one call, forward and gradient."""

    q: jax.Array  # 1 T N H
    k: jax.Array  # 1 T K H
    v: jax.Array  # 1 T K H
    do: jax.Array  # 1 T N H
    out: jax.Array  # 1 T N H
    lse: jax.Array  # 1 T N
    dq: jax.Array  # 1 T N H
    dk: jax.Array  # 1 T K H
    dv: jax.Array  # 1 T K H


def wide(x) -> np.ndarray:
    return np.asarray(x, np.float64)


def sees(i, j, left: int | None):
    """Return True where query i sees key j, in causal order and in a window."""
    in_window = True if left is None else j >= i - left
    return (j <= i) & in_window


def run(T, N, K, H, left, **kwargs) -> Results:
    """Return the arrays of a causal call in bfloat16."""
    args = normal_arrays((1, T, N, H), (1, T, K, H), (1, T, K, H), (1, T, N, H))
    attend = functools.partial(
        memeff.dot_product_attention,
        is_causal=True,
        local_window_size=None if left is None else (left, 0),
        return_residual=True,
        **kwargs,
    )

    @jax.jit
    def both(q, k, v, do):
        (out, lse), pull = jax.vjp(attend, q, k, v)
        return out, lse, *pull((do, jnp.zeros_like(lse)))

    return Results(*args, *both(*args))


def true_row(query, keys, values, do):
    """Return out, lse and dq of a query that sees all of `keys`."""
    root = np.sqrt(query.size)
    s = keys @ query / root
    m = s.max()
    e = np.exp(s - m)
    l = e.sum()
    p = e / l
    out = p @ values
    ds = p * (values @ do - out @ do)
    return out, m + np.log(l), ds @ keys / root


def row_errors(results: Results, rows, left) -> dict[str, float]:
    """Return relative errors of the `rows` of out, lse and dq, of the last head."""
    _, T, N, _ = results.q.shape
    n = N - 1  # the last head, and the last of those that share its keys
    keys = wide(results.k[0, :, -1])
    values = wide(results.v[0, :, -1])
    actual = {"out": [], "lse": [], "dq": []}
    true = {"out": [], "lse": [], "dq": []}
    for i in rows:
        seen = np.flatnonzero(sees(i, np.arange(T), left))
        query = wide(results.q[0, i, n])
        do = wide(results.do[0, i, n])
        true_results = true_row(query, keys[seen], values[seen], do)
        for name, x in zip(true, true_results, strict=True):
            actual[name].append(wide(getattr(results, name)[0, i, n]))
            true[name].append(x)
    return {name: relative_error(actual[name], true[name]) for name in true}


def column_errors(results: Results, cols, left) -> dict[str, float]:
    """Return relative errors of the columns `cols` of dk and dv, of the last key head.

    Probabilities of a column are made from lse, which `row_errors` checks.
    """
    _, T, N, H = results.q.shape
    K = results.k.shape[2]
    root = np.sqrt(H)
    keys = wide(results.k[0, :, -1])[cols]
    values = wide(results.v[0, :, -1])[cols]
    seen = sees(np.arange(T)[:, None], cols, left)
    dk = np.zeros((len(cols), H))
    dv = np.zeros((len(cols), H))
    for n in range(N - N // K, N):
        queries = wide(results.q[0, :, n])
        do = wide(results.do[0, :, n])
        lse = wide(results.lse[0, :, n])
        delta = (do * wide(results.out[0, :, n])).sum(-1)
        p = np.exp(queries @ keys.T / root - lse[:, None])
        p *= seen
        ds = p * (do @ values.T - delta[:, None])
        dv += p.T @ do
        dk += ds.T @ queries / root
    return {
        "dk": relative_error(wide(results.dk[0, cols, K - 1]), dk),
        "dv": relative_error(wide(results.dv[0, cols, K - 1]), dv),
    }


def relative_error(actual, true) -> float:
    true = np.asarray(true)
    return np.linalg.norm(np.asarray(actual) - true) / np.linalg.norm(true)


def sampled_errors(T, N, K, H, left, samples=64, **kwargs) -> dict[str, float]:
    """Return relative errors of sampled rows of out, lse and dq, and columns of dk and dv."""
    results = run(T, N, K, H, left, **kwargs)
    rng = np.random.default_rng(0)
    rows = rng.choice(T, samples, replace=False)
    rows[0] = T - 1
    cols = np.append(rng.choice(T, samples - 1, replace=False), T - 1)
    return row_errors(results, rows, left) | column_errors(results, cols, left)


def assert_small(errors: dict[str, float]) -> None:
    assert all(error <= LARGEST_ERROR[name] for name, error in errors.items()), errors


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"backward": "fused"}, {"implementation": "xla"}],
    ids=["kernels", "fused", "xla"],
)
@pytest.mark.parametrize("T", [2**14, 2**15 + 1, 2**16, 2**17])
def test_long_sequences(T, kwargs):
    if "implementation" not in kwargs:
        skip_without_kernels()
    assert_small(sampled_errors(T, N=2, K=1, H=128, left=None, **kwargs))


@pytest.mark.parametrize(
    "N, left", [(130, 500), (2, None)], ids=["elements of the query", "logits"]
)
def test_more_than_32_bits_count(N, left):
    """More than 2^31 numbers in the query are right, and more than 2^32 logits.

    The former are under a window, because all pairs would take too much time.
    """
    skip_without_kernels()
    T = 2**17 if N > 2 else 2**16 + 8
    assert T * N * 128 > 2**31 or T * T > 2**32
    assert_small(sampled_errors(T, N=N, K=1, H=128, left=left, samples=16))
