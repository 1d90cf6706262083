"""Inputs that leave little room between what underflows and what overflows: right to rounding on every path.

Errors are measured against the largest number of each result, so that results of 1e-30 count as much as those of 1.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import EPS, _plain, accumulator

from memeff import dot_product_attention
from memeff.device import pretend_device

T, H, D = 128, 8, 3  # on GPUs fewer queries take another path
WIDE = (1e-30, 1e-6, 1.0, 1e6, 1e30)
SIZES = dict(float32=WIDE, bfloat16=WIDE, float16=(1e-3, 1.0, 1e3))
NAMES = ("out", "lse", "query", "key", "value")


def sink(rng, below: float, value: float, S: int = 2**11):
    """A key that takes nearly all, `S` keys `below` nats under it, and a long key orthogonal to all queries.

    The long key makes any bound on the largest logit loose, by its length.
    """
    q, k = np.zeros((T, H)), np.zeros((S + 2, H))
    q[:, 0] = np.sqrt(H)
    k[0, 0] = 8  # logits: 8, 8 - below, 0
    k[1:-1, 0] = 8 - below
    k[-1, 1] = 146
    v = value * np.concatenate([np.zeros((1, D)), 1 + rng.random((S, D)), np.ones((1, D))])
    return q, k, v


def equal(rng, value: float, S: int = 1024):
    """Equal keys, whose logits are what Cauchy and Schwarz allow: the answer is the mean of the values."""
    return np.full((T, H), 4.0), np.full((S, H), 4.0), value * (1 + rng.random((S, D)))


def one_hot(rng, value: float, S: int = 200):
    """Each row looks at one key, a hundred nats above the others."""
    q, k = np.zeros((T, H)), rng.standard_normal((S, H)) * 0.1
    q[np.arange(T), np.arange(T) % H] = 20
    k[np.arange(H), np.arange(H)] = 20
    return q, k, value * rng.standard_normal((S, D))


def gaussian(rng, value: float, S: int = 97):
    return (
        rng.standard_normal((T, H)),
        rng.standard_normal((S, H)),
        value * rng.standard_normal((S, D)),
    )


CASES = {
    f"sink, others {below} nats below": functools.partial(sink, below=below) for below in (18.5, 40)
}
CASES |= {"equal keys": equal, "one-hot rows": one_hot, "gaussian": gaussian}


def plain(args, dout):
    """Attention written out: differentiated by JAX, and with the usual backward from the saved out and lse."""
    q, k, v = args
    S, acc = k.shape[1], np.float32
    ones = jnp.ones((1, 1, 1, T, S), acc)
    folded = q[:, :, :, None], k, v, 0 * ones, ones > 0, ones, acc(H**-0.5)
    return _plain(*folded, None, None, dout[:, :, :, None], jnp.zeros((1, T, 1, 1), acc))


@functools.cache
def program(path: str, dtype: str):
    """out, lse and gradients of all cases, in one program."""

    implementation = "reference" if path == "reference" else "xla"
    f = functools.partial(
        dot_product_attention, return_residual=True, implementation=implementation
    )

    def result(args, dout):
        found, pull = jax.vjp(f, *args)
        return *found, *pull((dout, jnp.zeros_like(found[1])))

    result = plain if path == "plain" else result
    run = jax.jit(lambda inputs: {name: result(*x) for name, x in inputs.items()})
    device = pretend_device("gpu") if path == "gpu" else contextlib.nullcontext()
    with device:
        return run.lower(inputs(1.0, 1.0, dtype)).compile()


def inputs(value: float, cotangent: float, dtype: str, seed: int = 7):
    found = {}
    for name, case in CASES.items():
        rng = np.random.default_rng(seed)
        args = case(rng, value=value * (1 + rng.random()))
        args = [jnp.asarray(x[None, :, None], dtype) for x in args]
        dout = jnp.asarray(cotangent * rng.standard_normal((1, T, 1, D)), dtype)
        found[name] = args, dout
    return found


def truth_and_sizes(args, dout):
    """The same in float64, and how large each is where nothing cancels.

    What is summed up in float32 cannot be as good below 2^-126 / 2^-24, however small it is. Below 2^-14 float16 stores
    subnormal numbers, which have fewer bits.
    """
    least = 2.0**-14 if args[0].dtype == jnp.float16 else 2.0 ** (24 - 126)
    q, k, v, do = (np.float64(x)[0, :, 0] for x in (*args, dout))
    s = q @ k.T * H**-0.5  # T S
    m = s.max(-1, keepdims=True)
    lse = m + np.log(np.exp(s - m).sum(-1, keepdims=True))
    p, dp = np.exp(s - lse), do @ v.T
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * H**-0.5
    true = p @ v, lse[:, 0], ds @ k, ds.T @ q, p.T @ do
    terms = p * (np.abs(dp) + np.abs(p * dp).sum(-1, keepdims=True)) * H**-0.5
    sizes = [np.abs(x).max() for x in true]
    sizes[2], sizes[3] = (terms @ np.abs(k)).max(), (terms.T @ np.abs(q)).max()
    return true, np.maximum(sizes, least)


@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("path", ["cpu", "gpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_hard_inputs(path, dtype):
    """Values and cotangents of every size: errors are at most 1.5 times those of attention written out.

    Each size is another draw; compared are root mean squares of the largest error of each.
    """
    sizes = [(value, 1.0) for value in SIZES[dtype]] + [
        (1.0, x) for x in (SIZES[dtype][0], SIZES[dtype][-1])
    ]
    errors = {name: np.zeros((3, len(NAMES))) for name in CASES}
    for seed, size in enumerate(sizes):
        given = inputs(*size, dtype, seed)
        ours, written_out = (program(p, dtype)(given) for p in (path, "plain"))
        for name, x in given.items():
            true, scale = truth_and_sizes(*x)
            baselines = (
                (out, lse, *(grads[n] for n in NAMES[2:])) for out, lse, grads in written_out[name]
            )
            for n, results in enumerate((ours[name], *baselines)):
                for m, y in enumerate(results):
                    error = np.abs(np.float64(y).reshape(true[m].shape) - true[m]).max() / scale[m]
                    errors[name][n, m] += error**2 / len(sizes)
    for name, (of_ours, *of_plain) in ((name, np.sqrt(x)) for name, x in errors.items()):
        for what, error, base in zip(NAMES, of_ours, np.max(of_plain, 0), strict=True):
            eps = EPS[jnp.dtype(accumulator(dtype) if what == "lse" else dtype).name]
            assert error <= 1.5 * base + eps, (
                f"{name}: {what} errs {error:.3g}, written out {base:.3g}"
            )
