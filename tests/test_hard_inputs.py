"""Inputs that leave little room between underflow and overflow: right to rounding on every path.

Errors are measured against the largest number of each result, so that results of 1e-30 count as
much as results of 1.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EPS, _plain, accumulator, few

from memeff import dot_product_attention
from memeff.device import pretend_device

T = 128  # on GPUs fewer queries take another path
H = 8
D = 3
WIDE = (1e-30, 1e-6, 1.0, 1e6, 1e30)
SIZES = dict(float32=WIDE, bfloat16=WIDE, float16=(1e-3, 1.0, 1e3))
NAMES = ("out", "lse", "query", "key", "value")


# ---- cases: q [T, H], k [S, H] and v [S, D] from a generator and the size of the values


def sink(rng, below: float, value: float):
    """Return a key that takes nearly all, keys `below` nats under it, and a long key.

    The long key is orthogonal to all queries. Its length makes bounds on the largest logit loose.
    """
    S = 2**11
    q = np.zeros((T, H))
    k = np.zeros((S + 2, H))
    q[:, 0] = np.sqrt(H)
    k[0, 0] = 8  # logits: 8, 8 - below, 0
    k[1:-1, 0] = 8 - below
    k[-1, 1] = 146
    v = np.concatenate([np.zeros((1, D)), 1 + rng.random((S, D)), np.ones((1, D))])
    return q, k, value * v


def equal(rng, value: float):
    """Return equal keys, whose logits reach the bound of Cauchy and Schwarz.

    The output is the mean of the values.
    """
    S = 1024
    q = np.full((T, H), 4.0)
    k = np.full((S, H), 4.0)
    return q, k, value * (1 + rng.random((S, D)))


def one_hot(rng, value: float):
    """Return rows that each look at one key, whose logit is a hundred nats above the rest."""
    S = 200
    q = np.zeros((T, H))
    k = rng.standard_normal((S, H)) * 0.1
    q[np.arange(T), np.arange(T) % H] = 20
    k[np.arange(H), np.arange(H)] = 20
    return q, k, value * rng.standard_normal((S, D))


def gaussian(rng, value: float):
    S = 97
    q = rng.standard_normal((T, H))
    k = rng.standard_normal((S, H))
    return q, k, value * rng.standard_normal((S, D))


CASES = {
    "sink, others 18.5 nats below": functools.partial(sink, below=18.5),
    "sink, others 40 nats below": functools.partial(sink, below=40),
    "equal keys": equal,
    "one-hot rows": one_hot,
    "gaussian": gaussian,
}


def inputs(value: float, cotangent: float, dtype: str, seed: int = 7):
    """Return (query, key, value) and the cotangent of out for each case, of the given sizes."""
    operands = {}
    for name, case in CASES.items():
        rng = np.random.default_rng(seed)
        q, k, v = case(rng, value=value * (1 + rng.random()))
        args = [jnp.asarray(x[None, :, None], dtype) for x in (q, k, v)]
        dout = jnp.asarray(cotangent * rng.standard_normal((1, T, 1, D)), dtype)
        operands[name] = args, dout
    return operands


# ---- results


def plain(args, dout):
    """Return the results of attention written out, with two backward passes.

    The first is JAX's, the second the usual one from the saved out and lse.
    """
    q, k, v = args
    S = k.shape[1]
    acc = np.float32
    ones = jnp.ones((1, 1, 1, T, S), acc)
    dlse = jnp.zeros((1, T, 1, 1), acc)
    return _plain(
        q[:, :, :, None],
        k,
        v,
        0 * ones,  # bias
        ones > 0,  # seen
        ones,
        acc(H**-0.5),
        None,
        None,
        dout[:, :, :, None],
        dlse,
    )


def attend(args, dout, *, implementation):
    """Return out, lse and gradients."""
    f = functools.partial(
        dot_product_attention, return_residual=True, implementation=implementation
    )
    (out, lse), pull = jax.vjp(f, *args)
    return out, lse, *pull((dout, jnp.zeros_like(lse)))


@functools.cache
def program(path: str, dtype: str):
    """Return a function of all cases that returns their out, lse and gradients.

    Cases of one shape share a program.
    """
    if path == "plain":
        result = plain
    else:
        implementation = "reference" if path == "reference" else "xla"
        result = functools.partial(attend, implementation=implementation)

    programs = {}
    device = pretend_device("gpu") if path == "gpu" else contextlib.nullcontext()
    with device:
        for args, dout in inputs(1.0, 1.0, dtype).values():
            shapes = tuple(x.shape for x in args)
            if shapes not in programs:
                programs[shapes] = jax.jit(result).lower(args, dout).compile()

    def run(operands):
        found = {}
        for name, (args, dout) in operands.items():
            found[name] = programs[tuple(x.shape for x in args)](args, dout)
        return found

    return run


def truth_and_sizes(args, dout):
    """Return the results in float64, and how large each is where nothing cancels.

    A sum in float32 cannot be as good below 2^-126 / 2^-24, however small it is. Below 2^-14,
    float16 stores subnormal numbers, which have fewer bits.
    """
    least = 2.0**-14 if args[0].dtype == jnp.float16 else 2.0 ** (24 - 126)
    q, k, v, do = (np.float64(x)[0, :, 0] for x in (*args, dout))
    scale = H**-0.5
    s = q @ k.T * scale  # T S
    m = s.max(-1, keepdims=True)
    lse = m + np.log(np.exp(s - m).sum(-1, keepdims=True))
    p = np.exp(s - lse)
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
    truth = p @ v, lse[:, 0], ds @ k, ds.T @ q, p.T @ do
    sizes = [np.abs(x).max() for x in truth]
    terms = p * (np.abs(dp) + np.abs(p * dp).sum(-1, keepdims=True)) * scale
    sizes[2] = (terms @ np.abs(k)).max()
    sizes[3] = (terms.T @ np.abs(q)).max()
    return truth, np.maximum(sizes, least)


def largest_errors(results, truth, sizes) -> np.ndarray:
    """Return the largest error of each result, divided by its size."""
    errors = []
    for x, y, size in zip(results, truth, sizes, strict=True):
        error = np.float64(x).reshape(y.shape) - y
        errors.append(np.abs(error).max() / size)
    return np.array(errors)


@pytest.mark.parametrize("dtype", few(SIZES, ["float32"]))
@pytest.mark.parametrize("path", ["cpu", "gpu", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.once
def test_hard_inputs(path, dtype):
    """Errors are at most 1.5 times the errors of attention written out.

    Values and cotangents have every size, and each size is another draw. Root mean squares over the
    sizes of each draw's largest error are compared.
    """
    smallest = SIZES[dtype][0]
    largest = SIZES[dtype][-1]
    sizes = [(value, 1.0) for value in SIZES[dtype]]
    sizes += [(1.0, smallest), (1.0, largest)]
    squares = {name: np.zeros((3, len(NAMES))) for name in CASES}  # ours, and the two of plain
    for seed, (value, cotangent) in enumerate(sizes):
        operands = inputs(value, cotangent, dtype, seed)
        ours = program(path, dtype)(operands)
        written_out = program("plain", dtype)(operands)
        for name, (args, dout) in operands.items():
            truth, scales = truth_and_sizes(args, dout)
            results = [ours[name]]
            for out, lse, grads in written_out[name]:
                results.append((out, lse, *(grads[argument] for argument in NAMES[2:])))
            for n, x in enumerate(results):
                squares[name][n] += largest_errors(x, truth, scales) ** 2 / len(sizes)
    for name, square in squares.items():
        errors, *plain_errors = np.sqrt(square)
        bases = np.max(plain_errors, 0)
        for what, error, base in zip(NAMES, errors, bases, strict=True):
            eps = EPS[jnp.dtype(accumulator(dtype) if what == "lse" else dtype).name]
            assert error <= 1.5 * base + eps, (
                f"{name}: {what} errs {error:.3g}, written out {base:.3g}"
            )
