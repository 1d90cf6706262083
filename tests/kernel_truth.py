"""The truth for the random calls of kernel_cases.py, plain attention in their dtype, and the law.

judge(draw(17))    # against the oracle, by the law of tolerance; its AssertionError says why
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import oracle
from baselines import mix32
from conftest import assert_as_good
from hopper_user_functions import t5_at
from kernel_cases import Case, draw, pairs, run
from kernel_functions import BIASES, BUCKETS

# The law compares two root mean squares. If kernels err as plain does, each by n independent
# numbers, then the square of their ratio has the distribution F(n, n). By chance the ratio is above
# 1.5 with a probability of 37 % for n = 1, 1 % for 32, 0.07 % for 64 and 3e-6 for 128. So one draw
# of a slope's gradient says nothing, and one of 128 numbers is a measure. A result of fewer numbers
# that exceeds the bound is drawn `TIMES` times, and judged by the errors of all of these draws, the
# first included. The bound remains the same.
FEW = 128
TIMES = 64
IN_FLOAT32 = ("lse", "tangent of lse")


# ---- the law


class Compared(NamedTuple):
    """One result of a call, and the numbers that the law compares it with."""

    actual: np.ndarray
    plain: tuple[np.ndarray, ...]
    truth: np.ndarray
    dtype: str
    size: float  # of the terms that it is the sum of

    @property
    def may_be_chance(self) -> bool:
        """Tell whether an excess of one draw is no measure.

        That is so if the numbers are few, and finite where they should be.
        """
        if np.shape(self.actual) != np.shape(self.truth):
            return False
        same_finite = np.array_equal(np.isfinite(self.actual), np.isfinite(self.truth))
        return self.truth.size < FEW and same_finite

    def excess(self, name: str) -> str:
        """Return what exceeds the law of tolerance, or an empty string."""
        try:
            assert_as_good(self.actual, self.plain, self.truth, self.dtype, name, self.size)
        except AssertionError as error:
            return str(error)
        return ""


def judge(case: Case, run_case: Callable[[Case], Any] = run) -> dict[str, str]:
    """Run a call and raise an AssertionError where the law of tolerance does not hold.

    Return, by name, what exceeded its bound in the first draw and not in all draws together; see
    `FEW`.
    """
    first = compare(case, run_case(case))
    excesses = {name: x.excess(name) for name, x in first.items()}
    excesses = {name: excess for name, excess in excesses.items() if excess}
    certain = [excess for name, excess in excesses.items() if not first[name].may_be_chance]
    assert not certain, "; ".join(certain)
    if excesses:
        _judge_together(case, first, run_case)
    return excesses


def _judge_together(
    case: Case, first: dict[str, Compared], run_case: Callable[[Case], Any]
) -> None:
    """Judge every result of few numbers by `TIMES` draws of the call."""
    draws = [first]
    for again in range(1, TIMES):
        other = draw(case.seed, case.small, again, case.static)
        draws.append(compare(other, run_case(other)))
    for name, x in first.items():
        if x.truth.size < FEW:
            excess = together([compared[name] for compared in draws]).excess(name)
            assert not excess, f"in {TIMES} draws: {excess}"


def together(draws: list[Compared]) -> Compared:
    """Return one result of several draws as one array, with a leading dim."""
    mean_square = np.mean([x.size**2 for x in draws])
    by_baseline = zip(*(x.plain for x in draws), strict=True)
    return Compared(
        actual=np.stack([x.actual for x in draws]),
        plain=tuple(map(np.stack, by_baseline)),
        truth=np.stack([x.truth for x in draws]),
        dtype=draws[0].dtype,
        size=float(np.sqrt(mean_square)),
    )


def compare(case: Case, results) -> dict[str, Compared]:
    """Return the results of a call by name, with the truth and plain attention's results."""
    call = call_of(case)
    truth = exact(call, case)
    plain = [plainly(call, case, saved) for saved in (False, True)]
    (out, lse), dfloats, gradients, tangents = results
    dq, dk, dv = gradients
    actual = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    for name, x in dfloats.items():
        if name != "keys":
            actual[f"d{name}"] = x
    if tangents is not None:
        d_out, d_lse = tangents
        actual["tangent of out"] = d_out
        actual["tangent of lse"] = d_lse
    compared = {}
    for name, x in actual.items():
        compared[name] = Compared(
            actual=np.asarray(x, np.float64),
            plain=tuple(results[name] for results in plain),
            truth=truth[name],
            dtype="float32" if name in IN_FLOAT32 else case.static.dtype,
            size=float(truth.get(f"size of {name}", 0.0)),
        )
    return compared


# ---- the definition and its derivatives, exactly and as plain attention rounds them


def call_of(case: Case) -> oracle.Call:
    """Return the call in float64, with its score as the bias that it adds."""
    static = case.static
    seen = case.seen
    floats = {name: np.asarray(x, np.float64) for name, x in case.floats.items()}
    bias = np.zeros(())
    if static.score is not None:
        _, b, n, i, j = pairs(static, case.arrays)
        bias = BIASES[static.score](floats.get(static.score), b, n, i, j)
    if "bias" in floats:
        bias = bias + floats["bias"]
    q, k, v = (_swap(np.asarray(x, np.float64)) for x in case.args)  # B N T H
    return oracle.Call(
        q=q,
        k=np.repeat(k, static.z.G, 1),
        v=np.repeat(v, static.z.G, 1),
        bias=np.where(seen, np.broadcast_to(bias, seen.shape), 0),
        seen=seen,
        z=_dropout_factors(case),
        scale=static.kwargs.get("scale", static.z.H**-0.5),
        cap=static.kwargs.get("logits_soft_cap"),
        sinks=floats.get("sinks"),
    )


def _dropout_factors(case: Case) -> np.ndarray:
    """Return the factor of each probability: 1, or what dropout makes of it."""
    if "dropout_rng" not in case.arrays:
        return np.ones(())
    kwargs = case.static.kwargs
    z = case.static.z
    shape = (z.T, z.S) if kwargs["broadcast_dropout"] else (z.B, z.N, z.T, z.S)
    keep_rate = 1 - kwargs["dropout_rate"]
    return mix32(case.arrays["dropout_rng"], keep_rate, shape) / keep_rate


class Rounding(NamedTuple):
    """The two roundings of a computation, and what its gradient starts from."""

    wide: Callable  # to the dtype of sums
    narrow: Callable  # to a number of the dtype of the arrays
    saved: bool  # the gradient starts from out and lse as they are stored


def exact(call: oracle.Call, case: Case) -> dict[str, np.ndarray]:
    """Compute the results in float64, by the formulas of the oracle."""

    def same(x):
        return x

    return _results(call, case, Rounding(same, same, saved=False))


def plainly(call: oracle.Call, case: Case, saved: bool) -> dict[str, np.ndarray]:
    """Compute the results in the dtype of the call.

    Products of 16-bit numbers are added in float32, and rounded where those of JAX are. With
    `saved`, the gradient starts from out and lse as they are stored.
    """

    def single(x):
        return np.asarray(x, np.float32)

    def narrow(x):
        return x.astype(case.static.dtype).astype(np.float32)

    call = call._replace(
        q=single(call.q),
        k=single(call.k),
        v=single(call.v),
        bias=single(call.bias),
        z=single(call.z),
        scale=single(call.scale),
        sinks=None if call.sinks is None else single(call.sinks),
    )
    return _results(call, case, Rounding(single, narrow, saved))


def _swap(x):
    """Return B T N ... as B N T ..., or the reverse."""
    return x.swapaxes(1, 2)


def _results(call: oracle.Call, case: Case, rounding: Rounding) -> dict[str, np.ndarray]:
    """Return every result of the call by name, and the sizes of the terms of some."""
    forward = _forward(call, rounding)
    results = {"out": _swap(forward.out), "lse": _swap(forward.lse)}
    results |= _gradients(call, case, rounding, forward)
    if case.static.jvp:
        results |= _tangents(call, case, rounding, forward)
    return results


class Forward(NamedTuple):
    """Intermediate results that derivatives need."""

    sees_any: np.ndarray  # B N T, boolean
    d_logit: Any  # derivative of the logit by the scaled dot product
    p: np.ndarray  # B N T S
    p_keys: np.ndarray  # B N T S: without the sink
    p_sink: np.ndarray | None  # B N T
    lse: np.ndarray  # B N T
    out: np.ndarray  # B N T D


def _forward(call: oracle.Call, rounding: Rounding) -> Forward:
    seen = call.seen
    sees_any = seen.any(-1)
    raw = np.where(seen, call.q @ call.k.mT, 0)
    s = call.scale * raw
    d_logit = 1
    if call.cap is not None:
        cap = rounding.wide(call.cap)
        tanh = np.tanh(s / cap)
        d_logit = 1 - tanh**2
        s = cap * tanh
    s = np.where(seen, s + call.bias, -np.inf)
    m = np.where(sees_any, s.max(-1, initial=-np.inf), 0)
    e = np.exp(s - m[..., None])
    l = e.sum(-1)
    if call.sinks is None:
        m_all = m  # the maximum with the sink
        total = np.where(sees_any, l, 1)
        p_sink = None
    else:
        sink = rounding.wide(call.sinks)[:, None]
        m_all = np.maximum(m, sink)
        e_sink = np.exp(sink - m_all)
        total = np.where(sees_any, l * np.exp(m - m_all) + e_sink, 1)
        p_sink = np.where(sees_any, e_sink / total, 0)
    with np.errstate(divide="ignore"):
        lse = np.where(sees_any, m + np.log(l), -np.inf)
    share = np.exp(m - m_all) / total
    l = np.where(sees_any, l, 1)
    p = e * share[..., None]
    p_keys = e / l[..., None]
    out = rounding.narrow(rounding.narrow(p * call.z) @ call.v)
    return Forward(sees_any, d_logit, p, p_keys, p_sink, lse, out)


def _gradients(
    call: oracle.Call, case: Case, rounding: Rounding, forward: Forward
) -> dict[str, np.ndarray]:
    """Return the gradients, and the sizes of the terms of those that are sums over all rows."""
    sees_any, d_logit, p, p_keys, p_sink, _, out = forward
    wide, narrow, saved = rounding
    dout, dlse = case.cotangents
    dout = np.where(sees_any[..., None], wide(_swap(np.asarray(dout, np.float32))), 0)
    dlse = np.where(sees_any, wide(_swap(dlse)), 0)
    dp = np.where(call.seen, dout @ call.v.mT, 0) * call.z
    if not saved:
        dp = narrow(dp)
    delta = (dout * out).sum(-1) if saved else (p * dp).sum(-1)
    ds = p * (dp - delta[..., None]) + p_keys * dlse[..., None]
    d_raw = ds * d_logit * wide(call.scale)

    def sum_of_group(x):
        grouped = x.reshape(x.shape[0], -1, case.static.z.G, *x.shape[2:])
        return _swap(narrow(grouped.sum(2)))

    results = {
        "dq": _swap(narrow(d_raw @ call.k)),
        "dk": sum_of_group(d_raw.mT @ call.q),
        "dv": sum_of_group(narrow(p * call.z).mT @ dout),
    }
    if p_sink is not None:
        dots = (dout * out).sum(-1)
        results["dsinks"] = -(p_sink * dots).sum((0, 2))
        terms = p_sink * (np.abs(dout) * np.abs(out)).sum(-1)
        results["size of dsinks"] = np.sqrt((terms**2).sum((0, 2))).max()
    if "bias" in case.floats:
        shape = case.floats["bias"].shape
        shared = tuple(dim for dim, size in enumerate(shape) if size == 1)
        squares = (np.float64(ds) ** 2).sum(shared)
        results["dbias"] = ds.sum(shared, keepdims=True)
        results["size of dbias"] = np.sqrt(squares.max())
    results |= _gradients_of_numbers(call, case, ds)
    return results | _gradient_of_params(case, ds)


def _gradients_of_numbers(call: oracle.Call, case: Case, ds) -> dict[str, np.ndarray]:
    """Return the gradients of a scale and a soft cap that are arrays, and their terms' sizes."""
    raw = np.where(call.seen, call.q @ call.k.mT, 0)
    terms = {"scale": raw}
    if call.cap is not None:
        x = call.scale * raw / call.cap
        slope = 1 - np.tanh(x) ** 2
        terms = {"scale": raw * slope, "logits_soft_cap": np.tanh(x) - x * slope}
    results = {}
    for name in case.static.traced:
        results[f"d{name}"] = (ds * terms[name]).sum()
        results[f"size of d{name}"] = np.sqrt((np.float64(ds * terms[name]) ** 2).sum())
    return results


def _gradient_of_params(case: Case, ds) -> dict[str, np.ndarray]:
    """Return the gradient of a score's params, and the size of its terms.

    `ds` is the gradient of the bias that the score is.
    """
    _, _, n, i, j = pairs(case.static, case.arrays)
    if case.static.score == "alibi":
        terms = -ds * np.abs(i - j)
        squares = np.float64(terms) ** 2
        size = np.sqrt(squares.sum((0, 2, 3)).max())
        return {"dalibi": terms.sum((0, 2, 3)), "size of dalibi": size}
    if case.static.score == "t5":
        N = case.static.z.N
        bucket, head, _ = np.broadcast_arrays(t5_at(n, i, j)[0], n, ds)
        entry = (bucket * N + head).ravel()

        def sum_by_entry(x):
            sums = np.bincount(entry, np.float64(x).ravel(), BUCKETS * N)
            return sums.reshape(BUCKETS, N)

        size = np.sqrt(sum_by_entry(np.float64(ds) ** 2).max())
        return {"dt5": sum_by_entry(ds), "size of dt5": size}
    return {}


def _tangents(
    call: oracle.Call, case: Case, rounding: Rounding, forward: Forward
) -> dict[str, np.ndarray]:
    """Return the tangents of out and lse, and the size of the terms of the tangent of lse."""
    sees_any, d_logit, p, p_keys, _, lse, out = forward
    wide, narrow, saved = rounding
    dq, dk, dv = (_swap(wide(np.asarray(x, np.float32))) for x in case.along)
    dk = np.repeat(dk, case.static.z.G, 1)
    dv = np.repeat(dv, case.static.z.G, 1)
    d_dots = dq @ call.k.mT + call.q @ dk.mT
    ds = np.where(call.seen, wide(call.scale) * d_logit * d_dots, 0)
    mean = (p * ds).sum(-1, keepdims=True)
    if saved:  # the mean is taken from the product, with out as it is stored
        d_out = narrow(p * ds) @ call.v + narrow(p) @ dv - mean * out
    else:
        d_out = narrow(p * (ds - mean)) @ call.v + narrow(p) @ dv
    d_lse = (p_keys * ds).sum(-1)
    # lse is one float in kernels: it errs by 1e-7 |lse|, and so does each probability
    lse = np.where(sees_any, lse, 0)
    size = 0.1 * np.abs(lse * d_lse).max()
    return {
        "tangent of out": _swap(narrow(d_out)),
        "tangent of lse": _swap(d_lse),
        "size of tangent of lse": size,
    }
