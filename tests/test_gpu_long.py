"""Sequences longer than other tests have, on a GPU: sampled rows and columns against float64."""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_calls import normal_arrays, skip_without_kernels

import memeff
from memeff.device import current_device
from memeff.pallas.ampere import capability as ampere

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


class Seen(NamedTuple):
    """Which keys a query of a causal call sees: those of its window and of its document."""

    left: int | None = None  # the window reaches so far
    starts: tuple[int, ...] = ()  # of documents, without the first

    def pairs(self, i, j):
        """Return True where query i sees key j."""
        in_window = True if self.left is None else j >= i - self.left
        return (j <= i) & in_window & (self.document(i) == self.document(j))

    def document(self, i) -> np.ndarray:
        return np.searchsorted(np.array(self.starts, np.int32), i, side="right")

    def kwargs(self, T) -> dict:
        window = None if self.left is None else (self.left, 0)
        ids = jnp.asarray(self.document(np.arange(T))[None], jnp.int32)
        return dict(local_window_size=window, query_segment_ids=ids if self.starts else None)


EVERYTHING = Seen()


def run(T, N, K, H, seen: Seen, **kwargs) -> Results:
    """Return the arrays of a causal call in bfloat16."""
    args = normal_arrays((1, T, N, H), (1, T, K, H), (1, T, K, H), (1, T, N, H))
    attend = functools.partial(
        memeff.dot_product_attention,
        is_causal=True,
        **seen.kwargs(T),
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


def row_errors(results: Results, rows, seen: Seen) -> dict[str, float]:
    """Return relative errors of the `rows` of out, lse and dq, of the last head."""
    _, T, N, _ = results.q.shape
    n = N - 1  # the last head, and the last of those that share its keys
    keys = wide(results.k[0, :, -1])
    values = wide(results.v[0, :, -1])
    actual = {"out": [], "lse": [], "dq": []}
    true = {"out": [], "lse": [], "dq": []}
    for i in rows:
        cols = np.flatnonzero(seen.pairs(i, np.arange(T)))
        query = wide(results.q[0, i, n])
        do = wide(results.do[0, i, n])
        true_results = true_row(query, keys[cols], values[cols], do)
        for name, x in zip(true, true_results, strict=True):
            actual[name].append(wide(getattr(results, name)[0, i, n]))
            true[name].append(x)
    return {name: relative_error(actual[name], true[name]) for name in true}


def column_errors(results: Results, cols, seen: Seen) -> dict[str, float]:
    """Return relative errors of the columns `cols` of dk and dv, of the last key head.

    Probabilities of a column are made from lse, which `row_errors` checks.
    """
    _, T, N, H = results.q.shape
    K = results.k.shape[2]
    root = np.sqrt(H)
    keys = wide(results.k[0, :, -1])[cols]
    values = wide(results.v[0, :, -1])[cols]
    pairs = seen.pairs(np.arange(T)[:, None], cols)
    dk = np.zeros((len(cols), H))
    dv = np.zeros((len(cols), H))
    for n in range(N - N // K, N):
        queries = wide(results.q[0, :, n])
        do = wide(results.do[0, :, n])
        lse = wide(results.lse[0, :, n])
        delta = (do * wide(results.out[0, :, n])).sum(-1)
        p = np.exp(queries @ keys.T / root - lse[:, None])
        p *= pairs
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


def sampled_errors(T, N, K, H, seen=EVERYTHING, samples=64, **kwargs) -> dict[str, float]:
    """Return relative errors of sampled rows of out, lse and dq, and columns of dk and dv."""
    results = run(T, N, K, H, seen, **kwargs)
    rng = np.random.default_rng(0)
    rows = rng.choice(T, samples, replace=False)
    rows[0] = T - 1
    cols = np.append(rng.choice(T, samples - 1, replace=False), T - 1)
    return row_errors(results, rows, seen) | column_errors(results, cols, seen)


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
    assert_small(sampled_errors(T, N=2, K=1, H=128, **kwargs))


@pytest.mark.parametrize(
    "seen", [EVERYTHING, Seen(starts=(1023, 6000))], ids=["causal", "documents"]
)
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("family", ["hopper", "ampere"])
def test_few_key_heads(family, backward, H, seen):
    """The gradient divides the query heads of the one key head among thread blocks."""
    with ampere.chosen() if family == "ampere" else contextlib.nullcontext():
        if family == "hopper":
            skip_without_kernels()
        elif reason := ampere.for_device(current_device()):
            pytest.skip(reason)
        kwargs = dict(implementation="pallas", backward=backward)
        assert_small(sampled_errors(2**13, N=8, K=1, H=H, seen=seen, **kwargs))


@pytest.mark.parametrize("starts", [(16017, 28711), (300, 600, 1000, 20000)])
def test_documents(starts):
    """The forward has a thread block for each tile, because times of tiles are not known before."""
    skip_without_kernels()
    assert_small(sampled_errors(2**15 + 1, N=4, K=2, H=128, seen=Seen(starts=starts)))


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
    assert_small(sampled_errors(T, N=N, K=1, H=128, seen=Seen(left), samples=16))
