"""Attention in float64 with NumPy, and how far a result is from it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from memeff.bench.cases import Case, input_arrays
from memeff.bench.extras import extra_logits

SAMPLED_ROWS = 32


class Truth(NamedTuple):
    """The results of one call in float64, in the layout B T N H."""

    lse: np.ndarray  # B T N 1
    out: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    tangent: np.ndarray  # of out, along query, key and value themselves


def exact_attention(arrays: Sequence[Any], case: Case, rows: np.ndarray) -> Truth:
    """Compute attention and its derivatives in float64.

    `arrays` are query, key, value, the cotangent of out, and perhaps that of lse, [B, T, N, 1].
    `rows` [T] are the queries' positions.
    """
    q, k, v, dout, *dlse = (as_float64(x).swapaxes(1, 2) for x in arrays)  # B N T H
    B, K, S, H = k.shape
    group = q.shape[1] // K
    k = k.repeat(group, axis=1)
    v = v.repeat(group, axis=1)

    def row_sum(x):
        return x.sum(-1, keepdims=True)

    def sum_of_group(x):  # B N S H -> B K S H
        return x.reshape(B, K, group, S, H).sum(2)

    scale = H**-0.5
    raw = scale * q @ k.mT
    s, slope = extra_logits(case.extra, case.heads, case.length, raw, rows)
    if case.mask == "causal":
        keep = np.arange(S) <= rows[:, None]
        s = np.where(keep, s, -np.inf)
    m = s.max(-1, keepdims=True)
    p = np.exp(s - m)
    l = row_sum(p)
    p /= l
    out = p @ v

    dp = dout @ v.mT
    ds = p * (dp - row_sum(p * dp) + (dlse[0] if dlse else 0))
    d_raw = scale * slope * ds
    dq = d_raw @ k
    dk = sum_of_group(d_raw.mT @ q)
    dv = sum_of_group(p.mT @ dout)

    s_tangent = slope * 2 * raw  # raw is bilinear, and the directions are query and key
    w = p * s_tangent
    tangent = w @ v + out - row_sum(w) * out
    results = m + np.log(l), out, dq, dk, dv, tangent
    return Truth(*(x.swapaxes(1, 2) for x in results))


def as_float64(array: Any) -> np.ndarray:
    """Return a JAX, NumPy or torch array as float64 of NumPy."""
    if hasattr(array, "cpu"):  # torch, which has no conversion from bfloat16 to NumPy
        array = array.double().cpu()
    return np.asarray(array, np.float64)


def largest_relative_error(result: Any, expected: np.ndarray, least: float = 0.0) -> float:
    """Return the largest error, relative to the largest exact entry or `least`."""
    error = np.abs(as_float64(result) - expected).max()
    size = max(least, np.abs(expected).max())
    return float(error / size)


def error_of(result: tuple, case: Case) -> float | None:
    """Return the largest error of a result, relative to the largest exact entry.

    32 rows of the last head are compared: out and dq, or out's tangent. Return None for modes
    whose exact result is not computed here.
    """
    if case.mode == "grad-of-grad":
        return None
    rows = np.linspace(0, case.queries - 1, SAMPLED_ROWS)
    rows = np.unique(rows.astype(int))
    query, key, value, dout = (x[-1:, :, -1:] for x in input_arrays(case))
    sample = query[:, rows], key, value, dout[:, rows]
    first_position = case.length - case.queries
    truth = exact_attention(sample, case, first_position + rows)
    if case.mode == "hvp":
        gradients = result[0]
        pairs = [(gradients[0], truth.dq)]
    else:
        pairs = [(result[0], truth.out)]
        if case.mode == "gradient":
            pairs.append((result[1], truth.dq))
        if case.mode == "jvp":
            pairs.append((result[1], truth.tangent))
    errors = []
    for array, expected in pairs:
        errors.append(largest_relative_error(array[-1:, rows, -1:], expected))
    return max(errors)
