"""`python -m memeff.bench hard`: inputs that are hard to be exact on, and memeff's errors there over plain attention's.

Truth is float64. Plain attention is the quadratic computation in the call's own dtype, step for step as `jax.nn` has it
(logits and softmax in float32, probabilities rounded for their product, gradients by JAX), on the same device. A cell is
the largest error of memeff over the largest error of plain attention, of all entries of that array; nothing is added to
either. Where plain attention errs nowhere, a cell is memeff's error in roundings of the largest entry ("0.5 ulp").
In brackets, where it is more than is allowed: over plain attention's whose gradient starts from out and lse as stored, which
a gradient in linear memory has to: p (dp - rowsum(dout out)) feels the rounding of out where terms cancel.
"""

import argparse
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import memeff
from memeff.device import current_device, pretend_device

ARRAYS = "out", "lse", "dq", "dk", "dv"
ALLOWED = 1.5  # times plain attention's error; beyond it a cell is bold
CHUNKED, AS_ON_A_GPU, KERNELS, FUSED, PLAIN = (
    "chunked",
    "chunked, as on a GPU",
    "kernels",
    "kernels, fused",
    "plain",
)
SAVED = "plain, from out and lse as stored"
T, S, H = 128, 4096, 64  # of a case that names no others
Row = dict[str, Any]


class Case(NamedTuple):
    """One head: `make` gives query [T, H], key and value [S, H] and the cotangents of out and lse, in float64."""

    make: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")


def _normal(
    rng: np.random.Generator,
    T: int = T,
    S: int = S,
    value: float = 1.0,
    dout: float = 1.0,
    dlse: float = 0.0,
):
    draw = lambda *shape: rng.standard_normal(shape)
    return draw(T, H), draw(S, H), draw(S, H) * value, draw(T, H) * dout, draw(T) * dlse


def _below_a_sink(nats: float, S: int = 16384, value: float = 1.0):
    """One key that has the largest logit, all others `nats` below it, and one that is long and orthogonal to all queries."""

    def make(rng):
        query, key, value_, dout, dlse = _normal(rng, S=S, value=value)
        query[:, :2], key[:, :2] = [1.0, 0.0], 0.0
        query[:, 2:] *= 0.01
        key[0] = 0
        key[0, 0] = nats * H**0.5
        key[-1] = 0
        key[-1, 1] = 4096.0
        return query, key, value_, dout, dlse

    return make


def _equal_keys(value: float, S: int = S):
    """Keys and queries of which each number is 4, and values about `value`; the truth of dq is then 0."""

    def make(rng):
        _, _, noise, dout, dlse = _normal(rng, S=S)
        return np.full((T, H), 4.0), np.full((S, H), 4.0), value * (1 + noise / 16), dout, dlse

    return make


def _one_hot(where: int, size: float):
    def make(rng):
        query, key, *rest = _normal(rng)
        key[where] *= size
        return query, key, *rest

    return make


WIDE = "float32", "bfloat16"  # float16 holds neither
CASES = {
    "normal": Case(lambda rng: _normal(rng, dlse=1.0)),
    "64k keys": Case(lambda rng: _normal(rng, S=65536, dlse=1.0)),
    "64k queries": Case(lambda rng: _normal(rng, T=65536, S=128, dlse=1.0)),
    **{
        f"values of {x:g}": Case(lambda rng, x=x: _normal(rng, value=x), WIDE)
        for x in (1e-30, 1e-6, 1e6, 1e30)
    },
    **{
        f"values of {x:g}": Case(lambda rng, x=x: _normal(rng, value=x), ("float16",))
        for x in (1e-3, 1e3)
    },
    **{
        f"cotangents of {x:g}": Case(lambda rng, x=x: _normal(rng, dout=x), WIDE)
        for x in (1e-30, 1e30)
    },
    **{f"cotangents of {x:g}": Case(lambda rng, x=x: _normal(rng, dout=x)) for x in (1e-3, 1e-6)},
    "values of 1e-30, cotangents of 1e30": Case(
        lambda rng: _normal(rng, value=1e-30, dout=1e30), WIDE
    ),
    **{f"16k keys {x:g} nats below a sink key": Case(_below_a_sink(x)) for x in (10, 18.5, 30, 60)},
    "the same at 18.5 nats, 64k keys": Case(_below_a_sink(18.5, S=65536)),
    "the same at 18.5 nats, values of 1e-6": Case(_below_a_sink(18.5, value=1e-6), WIDE),
    "equal keys, values of 1e6": Case(_equal_keys(1e6), WIDE),
    "equal keys, values of 1e30": Case(_equal_keys(1e30), WIDE),
    "equal keys, values of 4e4": Case(_equal_keys(4e4), ("float16",)),
    "64k equal keys": Case(_equal_keys(1.0, S=65536)),
    "one-hot rows, an early key": Case(_one_hot(3, 200.0)),
    "one-hot rows, a late key": Case(_one_hot(400, 200.0)),
}


def table(names: Sequence[str], paths: Sequence[str]) -> Iterator[Row]:
    """A row for each case, dtype and path, as it is found."""
    for name in names:
        case = CASES[name]
        for dtype in case.dtypes:
            arrays = case.make(np.random.default_rng(0))
            arrays = tuple(
                x.astype(jnp.dtype(dtype) if n < 4 else np.float32) for n, x in enumerate(arrays)
            )
            truth: tuple[np.ndarray, ...] = exact(*arrays)
            plain, saved = run(PLAIN, arrays), run(SAVED, arrays)
            for path in paths:
                if dtype == "float32" and path in (KERNELS, FUSED):
                    continue
                found = run(path, arrays)
                of_all = zip(ARRAYS, found, plain, saved, truth, strict=True)
                errors = {name: _errors(x, y, z, true, dtype) for name, x, y, z, true in of_all}
                yield {"table": "hard", "case": name, "dtype": dtype, "path": path} | errors


def _errors(found, plain, saved, truth, dtype) -> dict[str, float | None]:
    """The largest errors of all, and one rounding of the largest entry; None: not finite, or no number of the dtype."""
    kind = jnp.finfo(jnp.float32 if truth.ndim == 1 else dtype)  # lse
    largest = float(np.abs(truth).max())
    worst = lambda x: (
        float(np.abs(np.asarray(x, np.float64) - truth).max()) if np.isfinite(x).all() else None
    )
    holds = float(kind.tiny) <= largest <= float(kind.max) or largest == 0
    rounding = max(float(kind.eps) * largest, float(kind.smallest_subnormal))
    errors = {
        name: worst(np.asarray(x, np.float64))
        for name, x in (("error", found), ("plain", plain), ("saved", saved))
    }
    return errors | {"rounding": rounding, "largest": largest if holds else None}


def exact(query, key, value, dout, dlse) -> tuple[np.ndarray, ...]:
    """out, lse, dq, dk and dv in float64, 4,096 queries at a time."""
    q, k, v, do, dl = (np.asarray(x, np.float64) for x in (query, key, value, dout, dlse))
    rows, dk, dv = [], np.zeros_like(k), np.zeros_like(v)
    for at in (slice(n, n + 4096) for n in range(0, len(q), 4096)):
        s = q[at] @ k.T * H**-0.5
        m = s.max(-1, keepdims=True)
        e = np.exp(s - m)
        l = e.sum(-1, keepdims=True)
        p, dp = e / l, do[at] @ v.T
        ds = p * (dp - (p * dp).sum(-1, keepdims=True) + dl[at, None]) * H**-0.5
        rows.append((p @ v, (m + np.log(l))[:, 0], ds @ k))
        dk += ds.T @ q[at]
        dv += p.T @ do[at]
    out, lse, dq = (np.concatenate(x) for x in zip(*rows, strict=True))
    return out, lse, dq, dk, dv


def _plain(query, key, value):
    """Of B T N H, as `jax.nn.dot_product_attention`, and lse."""
    s = jnp.einsum("btnh,bsnh->bnts", query, key, preferred_element_type=jnp.float32) * H**-0.5
    p = jax.nn.softmax(s, axis=-1).astype(value.dtype)
    return jnp.einsum("bnts,bsnh->btnh", p, value), jax.nn.logsumexp(s, axis=-1).swapaxes(1, 2)


@jax.custom_vjp
def _plain_saved(query, key, value):
    return _plain(query, key, value)


def _plain_forward(query, key, value):
    results = _plain(query, key, value)
    return results, (query, key, value, *results)


def _plain_backward(saved, cotangents):
    (query, key, value, out, lse), (dout, dlse) = saved, cotangents
    single = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    heads_first = lambda x: x.swapaxes(1, 2)[..., None]
    p = jnp.exp(single("btnh,bsnh->bnts", query, key) * H**-0.5 - heads_first(lse))
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1) - dlse
    ds = p * (single("btnh,bsnh->bnts", dout, value) - heads_first(delta)) * H**-0.5
    dq, dk = single("bnts,bsnh->btnh", ds, key), single("bnts,btnh->bsnh", ds, query)
    dv = single("bnts,btnh->bsnh", p.astype(value.dtype), dout)
    return tuple(x.astype(query.dtype) for x in (dq, dk, dv))


_plain_saved.defvjp(_plain_forward, _plain_backward)


@functools.cache
def program(path: str) -> Callable[..., tuple]:
    """One function for each path, so that calls of one shape share a compilation."""
    how: dict[str, Any] = {"implementation": "pallas" if path in (KERNELS, FUSED) else "xla"}
    how |= {"backward": "fused"} if path == FUSED else {}
    own = functools.partial(memeff.dot_product_attention, return_residual=True, **how)
    attend = {PLAIN: _plain, SAVED: _plain_saved}.get(path, own)

    @jax.jit
    def both(query, key, value, dout, dlse):
        results, pull = jax.vjp(attend, query, key, value)
        return *results, *pull((dout, dlse))

    return both


def run(path: str, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """out, lse, dq, dk and dv by `path`, on the first device."""
    with contextlib.ExitStack() as stack:
        if path == AS_ON_A_GPU:
            stack.enter_context(pretend_device("gpu"))
        # else a GPU's float32 products have 10 bits
        stack.enter_context(jax.default_matmul_precision("highest"))
        found = jax.device_get(program(path)(*(x[None, :, None] for x in arrays)))
    return tuple(np.asarray(x)[0, :, 0] for x in found)


# ---- what people see


def markdown(rows: Sequence[Row]) -> str:
    """A table for each machine, of the latest row of each call, in Markdown."""
    parts = []
    for machine in dict.fromkeys((row["device"], row["jax"]) for row in rows):
        own = {
            (r["case"], r["dtype"], r["path"]): r
            for r in rows
            if (r["device"], r["jax"]) == machine
        }
        header = ["case", "dtype", "path", *ARRAYS]
        lines = [[*call, *(cell(row[name]) for name in ARRAYS)] for call, row in own.items()]
        cells = [header, ["---"] * 3 + ["---:"] * len(ARRAYS), *lines]
        parts += [
            f"{machine[0]}, jax {machine[1]}:",
            "\n".join("| " + " | ".join(x) + " |" for x in cells),
        ]
    return "\n\n".join(parts)


def cell(of: dict[str, float | None]) -> str:
    """A ratio; bold if it is beyond what is allowed."""
    error, plain, rounding, largest = (
        of[name] for name in ("error", "plain", "rounding", "largest")
    )
    if largest is None:
        return "-"
    if error is None:
        return "not finite, as plain" if plain is None else "**not finite**"
    if plain is None:
        return "plain: not finite"
    assert rounding is not None
    if plain == 0:
        told = f"{error / rounding:.2g} ulp"
        return "0" if error == 0 else told if error <= rounding else f"**{told}**"
    ratio, saved = error / plain, of["saved"]
    if ratio <= ALLOWED:
        return f"{ratio:.2f}"
    return f"**{ratio:.3g}**" + (f" ({error / saved:.2g})" if saved else "")


ABOUT = """<!-- Written by `python -m memeff.bench hard --report docs/hard_cases.jsonl docs/hard_cases.md`. -->
Largest error of memeff over that of plain attention in the same dtype, against float64, at T = {T} queries and S = {S:,}
keys of one head of {H} where a case names no others. Bold: more than {allowed}, or not finite. "ulp": plain attention errs
nowhere, and memeff by so many roundings of the largest entry. "-": the truth is no number that the dtype holds. In brackets:
over plain attention whose gradient starts from out and lse as they are stored, as every gradient in linear memory does."""


def report(source: str, target: str) -> None:
    """Write the Markdown file `target` from the JSON lines of `source`."""
    rows = [json.loads(line) for line in Path(source).read_text().splitlines()]
    about = ABOUT.format(T=T, S=S, H=H, allowed=ALLOWED)
    Path(target).write_text(f"{about}\n\n{markdown(rows)}\n")


def main(arguments: Sequence[str], machine: Callable[[], Row]) -> None:
    parser = argparse.ArgumentParser(prog="python -m memeff.bench hard", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--only", nargs="+", choices=CASES, metavar="CASE", help="these cases: " + "; ".join(CASES)
    )
    parser.add_argument("--json", metavar="FILE", help="append a JSON line for each row")
    parser.add_argument(
        "--report",
        nargs=2,
        metavar=("JSON", "MARKDOWN"),
        help="run nothing: write a table from JSON lines",
    )
    options = parser.parse_args(arguments)
    if options.report:
        report(*options.report)
        return
    paths = [CHUNKED, AS_ON_A_GPU] if jax.default_backend() == "cpu" else [CHUNKED]
    from memeff.pallas.hopper import implementation as hopper

    if hopper.for_device(current_device()) is None:
        paths += [KERNELS, FUSED]
    about, rows = machine(), []
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(options.json, "a")) if options.json else None
        for row in table(options.only or list(CASES), paths):
            rows.append(about | row)
            if file is not None:
                print(json.dumps(rows[-1]), file=file, flush=True)
    print(markdown(rows))
