"""Random calls of the Hopper kernels: every argument that they take, any sizes, and the truth beside each. No test is here.

case = draw(17)                 # the same call for the same seed, anywhere; `small=True` for the interpreter
judge(case)                     # against the oracle, by the law of tolerance; an AssertionError names what is wrong

`DRAWS` neighbouring seeds share all that is fixed while tracing, so that one compilation serves them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import Sizes
from conftest import assert_as_good
from hopper_cases import unseen_filled
from hopper_user_functions import t5_at

import memeff
from memeff import masks, scores

DRAWS = 3
# The law compares two root mean squares. If kernels err as plain does, each by n independent
# numbers, then the square of their ratio has the distribution F(n, n). By chance the ratio is above
# 1.5 with a probability of 37 % for n = 1, 1 % for 32, 0.07 % for 64 and 3e-6 for 128. So one draw
# of a slope's gradient says nothing, and one of 128 numbers is a measure. A result of fewer numbers
# that exceeds the bound is drawn `TIMES` times, and judged by the errors of all of these draws, the
# first included. The bound remains the same.
FEW = 128
TIMES = 64
MOST_PAIRS = 2**21  # of all heads
MOST_PAIRS_SMALL = 2**14
BUCKETS = 32


class Static(NamedTuple):
    """What is fixed while tracing."""

    z: Sizes
    dtype: str
    how: dict[str, Any]
    names: tuple[str, ...]  # of arguments that come as arrays
    score: str | None
    mask: str | None
    jvp: bool


class Case(NamedTuple):
    seed: int
    small: bool
    static: Static
    arrays: dict[str, Any]  # positional arguments, by name
    floats: dict[str, Any]  # params of the score that are differentiated, and sinks
    args: tuple  # query, key, value
    cotangents: tuple  # of out, and of lse
    along: tuple
    seen: np.ndarray  # B N T S
    dirty: tuple  # args, cotangents and along with NaN and Inf in what takes part in no pair


# ---- drawing


def draw(seed: int, small: bool = False, again: int = 0, static: Static | None = None) -> Case:
    """Return the call of a seed, or numbers for the call `static`.

    With `again` > 0 only query, key, value, cotangents and tangents are new.
    """
    if static is None:
        static = _static(np.random.default_rng([7, seed // DRAWS, small]), small)
    rng, z, dtype = np.random.default_rng([8, seed, small]), static.z, static.dtype
    arrays = {name: _array(rng, name, z) for name in static.names if name != "sinks"}
    floats = {"sinks": _sinks(rng, z)} if "sinks" in static.names else {}
    floats |= {name: make(rng, z) for name, make in PARAMS.items() if name == static.score}
    fresh = np.random.default_rng([9, seed, small, again])

    def normal(*shape):
        found = rng.standard_normal(shape)
        return (fresh.standard_normal(shape) if again else found).astype(np.float32)

    size = rng.choice([0.3, 1.0, 2.0])
    query, key = normal(z.B, z.T, z.N, z.H) * size, normal(z.B, z.S, z.K, z.H)
    value = normal(z.B, z.S, z.K, z.D) * rng.choice([1.0, 1.0, 1e-3, 30.0])
    args = tuple(x.astype(dtype) for x in (query, key, value))
    dout = normal(z.B, z.T, z.N, z.D).astype(dtype)
    given = dout, normal(z.B, z.T, z.N) * np.float32(rng.choice([0.0, 1.0], p=[0.3, 0.7]))
    along = tuple(normal(*x.shape).astype(dtype) for x in args)
    seen = _seen(static, arrays, args)
    dirty = args, given, along
    if rng.random() < 0.6:
        dirty = *unseen_filled(args, seen, given)[:2], unseen_filled(along, seen, given)[0]
    return Case(seed, small, static, arrays, floats, args, given, along, seen, dirty)


def _static(rng, small: bool) -> Static:
    chance = lambda p: bool(rng.random() < p)
    whole = lambda low, high: int(rng.integers(low, high + 1))
    common = [64, 128, 59, 40] if small else [64, 128, 64, 128, 59, 160, 256]
    H = whole(1, 16) * 8 if chance(0.4) else int(rng.choice(common))
    D = H if chance(0.6) else whole(1, 128 if H <= 128 else 256)
    lengths = (lambda: whole(1, 150)) if small else (lambda: int(64 * (1700 / 64) ** rng.random()))
    T = lengths()
    S = T if chance(0.3) else lengths()
    most = (MOST_PAIRS_SMALL if small else MOST_PAIRS) // (T * S)
    B, K, G = (whole(1, 3) for _ in range(3))
    while B * K * G > max(1, most):
        B, K, G = (max(1, n - 1) if chance(0.5) else n for n in (B, K, G))
    z, how = Sizes(B=B, T=T, S=S, K=K, G=G, H=H, D=D), {}
    names = []
    if chance(0.45):
        how["is_causal"] = True
    if chance(0.35):
        side = lambda: None if chance(0.25) else whole(0, max(T, S) // 2)
        how["local_window_size"] = side(), side()
    blocked = chance(0.12)
    if chance(0.4) and not blocked:
        if chance(0.5):
            names.append("q_offset")
        else:
            how["q_offset"] = whole(-T // 3, S)
    offset = "q_offset" in names or how.get("q_offset", 0) != 0
    names += [name for name in ("query_seq_lengths", "key_value_seq_lengths") if chance(0.25)]
    kind = rng.choice(
        ["none", "segments", "one id", "keys", "queries"], p=[0.5, 0.2, 0.1, 0.1, 0.1]
    )
    if kind == "segments":
        names += ["query_segment_ids", "key_value_segment_ids"]
    if kind == "one id" and T == S:
        names.append("query_segment_ids")
    if kind in ("keys", "queries"):
        names.append(f"mask of {kind}")
    if chance(0.2):
        how["logits_soft_cap"] = float(rng.choice([1.5, 5.0, 30.0]))
    if chance(0.2):
        how["scale"] = float(rng.choice([-0.2, 0.05, 0.125]))
    names += ["sinks"] if chance(0.3) else []
    score = str(rng.choice([*SCORES])) if chance(0.35) else None
    by_pairs = ANYWHERE if offset else BY_PAIRS
    mask = (
        str(rng.choice(by_pairs)) if chance(0.3) and not blocked else "blocks" if blocked else None
    )
    fused = score is None and mask is None and max(H, D) <= 128
    how["backward"] = "fused" if fused and chance(0.5) else "split"
    return Static(
        z,
        str(rng.choice(["bfloat16", "bfloat16", "float16"])),
        how,
        tuple(names),
        score,
        mask,
        chance(0.4),
    )


def _array(rng, name: str, z: Sizes):
    ids = lambda size: rng.integers(0, 4, (z.B, size)).astype(np.int32)
    some = lambda size: rng.random((z.B, size)) < rng.choice([0.3, 0.9])
    match name:
        case "q_offset":
            return rng.integers(-z.T // 3, z.S + 1, z.B).astype(np.int32)
        case "query_seq_lengths":
            return rng.integers(0, z.T + 1, z.B).astype(np.int32)
        case "key_value_seq_lengths":
            return rng.integers(0, z.S + 1, z.B).astype(np.int32)
        case "query_segment_ids" | "key_value_segment_ids":
            found = ids(z.T if name.startswith("q") else z.S)
            return np.sort(found, 1) if rng.random() < 0.7 else found
        case "mask of keys":
            return (
                some(z.S)
                if rng.random() < 0.5
                else np.arange(z.S) < rng.integers(0, z.S + 1, (z.B, 1))
            )[:, None, None]
        case "mask of queries":
            return some(z.T)[:, None, :, None]
    raise ValueError(name)


def _sinks(rng, z: Sizes):
    return np.where(
        rng.random(z.N) < 0.15, -np.inf, rng.choice([1.0, 8.0]) * rng.standard_normal(z.N)
    ).astype(np.float32)


# ---- scores and masks: as memeff has them, and in NumPy; b, n, i, j of all pairs, i among the keys

PARAMS = {
    "alibi": lambda rng, z: rng.uniform(0.002, 0.3, z.N).astype(np.float32),
    "t5": lambda rng, z: rng.standard_normal((BUCKETS, z.N)).astype(np.float32),
    "keys": lambda rng, z: rng.standard_normal((z.B, z.S)).astype(np.float32),
}
SCORES = {
    "alibi": lambda p, z: scores.alibi(p),
    "t5": lambda p, z: scores.t5(p, max_distance=100),
    "keys": lambda p, z: memeff.Score(
        lambda s, b, h, i, j, p: s + 0.3 * jax.lax.stop_gradient(p)[b, j], p
    ),
    "pairs": lambda p, z: memeff.Score(
        lambda s, b, h, i, j, _: s - jnp.where(i > j, 0.02 * (i - j), (j - i) * 0.1 / (h + 3))
    ),
}
BIASES = {
    "alibi": lambda p, b, n, i, j: -p[n] * np.abs(i - j),
    "t5": lambda p, b, n, i, j: p[t5_at(n, i, j)],
    "keys": lambda p, b, n, i, j: 0.3 * p[b, j] + 0 * i,
    "pairs": lambda p, b, n, i, j: -np.where(i > j, 0.02 * (i - j), (j - i) * 0.1 / (n + 3)),
}
PREFIX, WINDOW, LONGEST = 90, 200, 1700
DOCUMENTS = np.arange(LONGEST) // 190
MASKS = {
    "documents": lambda z: masks.documents(DOCUMENTS[: z.T], DOCUMENTS[: z.S]),
    "prefix": lambda z: masks.causal() | masks.prefix(PREFIX),
    "dilated": lambda z: masks.dilated(3) & masks.sliding_window(WINDOW, WINDOW),
    "heads": lambda z: lambda b, h, i, j, _: j % (h + 2) != 1,
    "blocks": lambda z: _block_mask(z.T, z.S),
}
BY_PAIRS = [name for name in MASKS if name != "blocks"]
# where an offset leads outside of the ids
ANYWHERE = [name for name in BY_PAIRS if name != "documents"]
SEEN = {
    "documents": lambda row, n, i, j: DOCUMENTS[row] == DOCUMENTS[j],
    "prefix": lambda row, n, i, j: (j <= i) | (j < PREFIX),
    "dilated": lambda row, n, i, j: ((i - j) % 3 == 0) & (np.abs(i - j) <= WINDOW),
    "heads": lambda row, n, i, j: j % (n + 2) != 1,
    "blocks": lambda row, n, i, j: (j <= i) & (DOCUMENTS[row] == DOCUMENTS[j]) | (j < PREFIX // 3),
}


@functools.cache
def _block_mask(T: int, S: int):
    mask = masks.causal() & masks.documents(DOCUMENTS[:T], DOCUMENTS[:S]) | masks.prefix(
        PREFIX // 3
    )
    return memeff.block_mask(mask, T, S, block_size=64)


def _pairs(static: Static, arrays):
    """row, b, n, i, j of all pairs, to be broadcast; i among the keys."""
    z = static.z
    b, n, row, j = np.ogrid[: z.B, : z.N, : z.T, : z.S]
    offset = np.reshape(arrays.get("q_offset", static.how.get("q_offset", 0)), (-1, 1, 1, 1))
    return row, b, n, row + offset, j


def _seen(static: Static, arrays, args) -> np.ndarray:
    how = {name: x for name, x in (static.how | arrays).items() if name in POSITIONS}
    row, _, n, i, j = _pairs(static, arrays)
    seen = by_rows(*args[:2], **how)
    for name, x in arrays.items():
        if name.startswith("mask of"):
            seen = seen & x
    return seen & SEEN[static.mask](row, n, i, j) if static.mask else seen


POSITIONS = (
    "is_causal",
    "local_window_size",
    "q_offset",
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_segment_ids",
    "key_value_segment_ids",
)


def by_rows(query, key, **how) -> np.ndarray:
    """`oracle.seen_by`, [B, N, T, S], a row at a time: its loops over pairs would take a second a case."""
    (B, T, N, _), S = query.shape, key.shape[1]
    left, right = how.get("local_window_size", (None, None))
    per_batch = lambda name, default: np.broadcast_to(how.get(name, default), B)
    q_ids, k_ids = (
        how.get("query_segment_ids"),
        how.get("key_value_segment_ids", how.get("query_segment_ids")),
    )
    j, seen = np.arange(S), np.zeros((B, 1, T, S), bool)
    for b in range(B):
        for i in range(min(T, per_batch("query_seq_lengths", T)[b])):
            position = i + per_batch("q_offset", 0)[b]
            keep = j < per_batch("key_value_seq_lengths", S)[b]
            if how.get("is_causal"):
                keep &= j <= position
            if left is not None:
                keep &= j >= position - left
            if right is not None:
                keep &= j <= position + right
            if q_ids is not None:
                keep &= q_ids[b, i] == k_ids[b]
            seen[b, 0, i] = keep
    return np.broadcast_to(seen, (B, N, T, S))


# ---- running


def run(case: Case):
    """(out, lse), gradients of floats and of query, key and value, and the tangents of out and lse (None: not asked for)."""
    args, given, along = case.dirty
    found = _program(case.seed // DRAWS, Whole(case.static))(
        args, case.arrays, case.floats, given, along
    )
    return jax.tree.map(np.asarray, found)


class Whole:
    """A Static that can be a key: all with one seed are the same."""

    def __init__(self, static: Static):
        self.static = static

    def __eq__(self, other):
        return repr(self.static) == repr(other.static)

    def __hash__(self):
        return hash(repr(self.static))


@functools.lru_cache(maxsize=1)
def _program(number: int, whole: Whole):
    static = whole.static

    def attend(arrays, floats, *args):
        how = {
            name: x for name, x in (static.how | arrays).items() if not name.startswith("mask of")
        }
        for name in arrays:
            if name.startswith("mask of"):
                how["mask"] = arrays[name]
        if static.score is not None:
            how["score_fn"] = SCORES[static.score](floats.get(static.score), static.z)
        if static.mask is not None:
            how["mask_fn"] = MASKS[static.mask](static.z)
        how |= {"sinks": floats["sinks"]} if "sinks" in floats else {}
        return memeff.dot_product_attention(
            *args, **how, implementation="pallas", return_residual=True
        )

    @jax.jit
    def both(args, arrays, floats, given, along):
        results, pull = jax.vjp(functools.partial(attend, arrays), floats, *args)
        of_floats, *of = pull(given)
        tangents = (
            jax.jvp(functools.partial(attend, arrays, floats), args, along)[1]
            if static.jvp
            else None
        )
        return results, of_floats, of, tangents

    return both


# ---- the truth, and what plain attention has


class Compared(NamedTuple):
    """One result of a call, and what the law holds it to."""

    actual: np.ndarray
    plain: tuple[np.ndarray, ...]
    truth: np.ndarray
    dtype: str
    size: float  # of the terms that it is the sum of

    @property
    def may_be_chance(self) -> bool:
        """Tell whether an excess of one draw is no measure: numbers are few, and finite where they should be."""
        if np.shape(self.actual) != np.shape(self.truth):
            return False
        return self.truth.size < FEW and np.array_equal(
            np.isfinite(self.actual), np.isfinite(self.truth)
        )

    def excess(self, name: str) -> str:
        """Return what exceeds the law of tolerance, or an empty string."""
        try:
            assert_as_good(self.actual, self.plain, self.truth, self.dtype, name, self.size)
        except AssertionError as error:
            return str(error)
        return ""


def judge(case: Case, run_case: Callable[[Case], Any] | None = None) -> dict[str, str]:
    """Run a call and raise an AssertionError where the law of tolerance does not hold.

    Return what exceeded its bound in the first draw and not in all draws together (see `FEW`), by name.
    """
    run_case = run if run_case is None else run_case
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
    actual = np.stack([x.actual for x in draws])
    truth = np.stack([x.truth for x in draws])
    plain = tuple(np.stack(arrays) for arrays in zip(*(x.plain for x in draws), strict=True))
    size = float(np.sqrt(np.mean([x.size**2 for x in draws])))
    return Compared(actual, plain, truth, draws[0].dtype, size)


def compare(case: Case, found) -> dict[str, Compared]:
    """Return the results `found` of a call by name, with the truth and those of plain attention."""
    call, G = call_of(case), case.static.z.G
    truth = exact(call, case, G)
    plain = [plainly(call, case, G, saved) for saved in (False, True)]
    (out, lse), of_floats, of, tangents = found
    actual = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), of, strict=True))}
    actual |= {f"d{name}": x for name, x in of_floats.items() if name != "keys"}
    if tangents is not None:
        actual |= dict(zip(("tangent of out", "tangent of lse"), tangents, strict=True))
    compared = {}
    for name, x in actual.items():
        in_float32 = name == "lse" or name == "tangent of lse"
        dtype = "float32" if in_float32 else case.static.dtype
        size = float(truth.get(f"size of {name}", 0.0))
        x = np.asarray(x, np.float64)
        compared[name] = Compared(x, tuple(y[name] for y in plain), truth[name], dtype, size)
    return compared


def call_of(case: Case) -> oracle.Call:
    """In float64, the score as the bias that it adds."""
    static = case.static
    _, b, n, i, j = _pairs(static, case.arrays)
    wide = {name: np.asarray(x, np.float64) for name, x in case.floats.items()}
    bias = (
        BIASES[static.score](wide.get(static.score), b, n, i, j)
        if static.score is not None
        else np.zeros(())
    )
    bias = np.where(case.seen, np.broadcast_to(bias, case.seen.shape), 0)
    how = {name: x for name, x in static.how.items() if name in ("scale", "logits_soft_cap")}
    fold = lambda x: np.asarray(x, np.float64).swapaxes(1, 2)  # B N T H
    q, *rest = map(fold, case.args)
    k, v = (np.repeat(x, static.z.G, 1) for x in rest)
    scale, cap = how.get("scale", static.z.H**-0.5), how.get("logits_soft_cap")
    return oracle.Call(q, k, v, bias, case.seen, np.ones(()), scale, cap, wide.get("sinks"))


def exact(call: oracle.Call, case: Case, G: int) -> dict[str, np.ndarray]:
    """In float64, by the formulas of the oracle."""
    return _results(call, case, G, lambda x: x, lambda x: x, False)


def plainly(call: oracle.Call, case: Case, G: int, saved: bool) -> dict[str, np.ndarray]:
    """In the dtype of the call: products of 16-bit numbers, added in float32, and rounded where those of JAX are.

    `saved`: the gradient starts from out and lse as they are stored.
    """
    narrow = lambda x: x.astype(case.static.dtype).astype(np.float32)
    single = lambda x: None if x is None else np.asarray(x, np.float32)
    call = oracle.Call(*(x if x is call.seen or x is call.cap else single(x) for x in call))
    return _results(call, case, G, single, narrow, saved)


def _results(
    call: oracle.Call, case: Case, G: int, wide, narrow, saved: bool
) -> dict[str, np.ndarray]:
    """The definition and its derivatives. `wide`: to the dtype of sums; `narrow`: rounds to that of the arrays."""
    seen, swap = call.seen, lambda x: x.swapaxes(1, 2)
    some = seen.any(-1)
    raw = np.where(seen, call.q @ call.k.mT, 0)
    u = call.scale * raw
    tanh = None if call.cap is None else np.tanh(u / wide(call.cap))
    s = np.where(seen, (u if tanh is None else wide(call.cap) * tanh) + call.bias, -np.inf)
    m = np.where(some, s.max(-1, initial=-np.inf), 0)
    e = np.exp(s - m[..., None])
    l = e.sum(-1)
    sink = None if call.sinks is None else wide(call.sinks)[:, None]
    top = m if sink is None else np.maximum(m, sink)
    total = l * np.exp(m - top) + (0 if sink is None else np.exp(sink - top))
    total = np.where(some, total, 1)
    with np.errstate(divide="ignore"):
        lse = np.where(some, m + np.log(l), -np.inf)
    p = e * (np.exp(m - top) / total)[..., None]
    p_keys = e / np.where(some, l, 1)[..., None]
    out = narrow(narrow(p) @ call.v)
    dout = np.where(some[..., None], wide(swap(np.asarray(case.cotangents[0], np.float32))), 0)
    dlse = np.where(some, wide(swap(case.cotangents[1])), 0)
    dp = np.where(seen, dout @ call.v.mT, 0)
    if not saved:
        dp = narrow(dp)
    delta = (dout * out).sum(-1) if saved else (p * dp).sum(-1)
    ds = p * (dp - delta[..., None]) + p_keys * dlse[..., None]
    slope = 1 if tanh is None else 1 - tanh**2
    d_raw = ds * slope * wide(call.scale)
    grouped = lambda x: swap(narrow(x.reshape(x.shape[0], -1, G, *x.shape[2:]).sum(2)))
    found = {
        "out": swap(out),
        "lse": swap(lse),
        "dq": swap(narrow(d_raw @ call.k)),
        "dk": grouped(d_raw.mT @ call.q),
        "dv": grouped(narrow(p).mT @ dout),
    }
    if sink is not None:
        share = np.where(some, np.exp(sink - top) / total, 0)
        found["dsinks"] = -(share * (dout * out).sum(-1)).sum((0, 2))
        found["size of dsinks"] = (
            np.sqrt((share * (np.abs(dout) * np.abs(out)).sum(-1)) ** 2).sum((0, 2)).max()
        )
    found |= _of_params(case, ds)
    if case.static.jvp:
        dq, dk, dv = (swap(wide(np.asarray(x, np.float32))) for x in case.along)
        dk, dv = (np.repeat(x, G, 1) for x in (dk, dv))
        ds = np.where(seen, wide(call.scale) * slope * (dq @ call.k.mT + call.q @ dk.mT), 0)
        w = p * (ds - (p * ds).sum(-1, keepdims=True))
        less = 0
        if saved:  # the mean is taken from the product, with out as it is stored
            w, less = p * ds, (p * ds).sum(-1, keepdims=True) * out
        found["tangent of out"] = swap(narrow(narrow(w) @ call.v + narrow(p) @ dv - less))
        found["tangent of lse"] = swap((p_keys * ds).sum(-1))
        # lse is one float in kernels: it errs by 1e-7 |lse|, and so does each probability
        found["size of tangent of lse"] = (
            0.1 * np.abs(np.where(some, lse, 0) * (p_keys * ds).sum(-1)).max()
        )
    return found


def _of_params(case: Case, ds) -> dict[str, np.ndarray]:
    """Gradients of a score's params, and the size of their terms, from that of the bias that it is."""
    _, _, n, i, j = _pairs(case.static, case.arrays)
    if case.static.score == "alibi":
        terms = -ds * np.abs(i - j)
        return {
            "dalibi": terms.sum((0, 2, 3)),
            "size of dalibi": np.sqrt((np.float64(terms) ** 2).sum((0, 2, 3)).max()),
        }
    if case.static.score == "t5":
        bucket, n = np.broadcast_arrays(t5_at(n, i, j)[0], n, ds)[:2]
        flat, N = (bucket * case.static.z.N + n).ravel(), case.static.z.N
        total = lambda x: np.bincount(flat, np.float64(x).ravel(), BUCKETS * N).reshape(BUCKETS, N)
        return {"dt5": total(ds), "size of dt5": np.sqrt(total(np.float64(ds) ** 2).max())}
    return {}


def features(case: Case) -> list[str]:
    """What a call has, in words."""
    static = case.static
    found = [
        static.dtype,
        *static.names,
        *(name for name in static.how if name != "backward"),
        static.how["backward"],
    ]
    found += [f"score {static.score}"] * bool(static.score) + [f"mask {static.mask}"] * bool(
        static.mask
    )
    found += ["jvp"] * static.jvp + ["what nobody sees filled"] * (case.dirty[0] is not case.args)
    return found + [
        "T < S" if static.z.T < static.z.S else "T > S" if static.z.T > static.z.S else "T = S"
    ]
