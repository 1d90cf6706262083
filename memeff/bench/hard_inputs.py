"""Inputs of one attention head on which it is hard to be exact."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

T = 128  # queries of a case that names no other number
S = 4096  # keys
H = 64
ALL_DTYPES = ("float32", "bfloat16", "float16")
WIDE_DTYPES = ("float32", "bfloat16")  # for numbers that float16 cannot hold


class HardInputs(NamedTuple):
    """The arrays of a case in float64, or in the dtype of a call."""

    query: np.ndarray  # [T, H]
    key: np.ndarray  # [S, H]
    value: np.ndarray  # [S, H]
    dout: np.ndarray  # [T, H]
    dlse: np.ndarray  # [T]


class HardCase(NamedTuple):
    """A case: a function that makes its inputs, and the dtypes that hold them."""

    make: Callable[[np.random.Generator], HardInputs]
    dtypes: tuple[str, ...] = ALL_DTYPES


def normal(
    rng: np.random.Generator,
    *,
    T: int = T,
    S: int = S,
    value: float = 1.0,
    dout: float = 1.0,
    dlse: float = 0.0,
) -> HardInputs:
    """Draw normal numbers; `value`, `dout` and `dlse` are the scales of their arrays."""
    return HardInputs(
        query=rng.standard_normal((T, H)),
        key=rng.standard_normal((S, H)),
        value=rng.standard_normal((S, H)) * value,
        dout=rng.standard_normal((T, H)) * dout,
        dlse=rng.standard_normal(T) * dlse,
    )


def below_a_sink(
    rng: np.random.Generator, *, nats: float, S: int = 16384, value: float = 1.0
) -> HardInputs:
    """Give the first key a logit that is larger by `nats` than those of the other keys.

    The last key is long, and orthogonal to all queries.
    """
    inputs = normal(rng, S=S, value=value)
    query = inputs.query
    key = inputs.key
    query[:, :2] = [1.0, 0.0]
    query[:, 2:] *= 0.01
    key[:, :2] = 0.0
    key[0] = 0.0
    key[0, 0] = nats * H**0.5
    key[-1] = 0.0
    key[-1, 1] = 4096.0
    return inputs


def equal_keys(rng: np.random.Generator, *, value: float, S: int = S) -> HardInputs:
    """Set every number of queries and keys to 4; values are near `value`. The exact dq is 0."""
    inputs = normal(rng, S=S)
    return inputs._replace(
        query=np.full((T, H), 4.0), key=np.full((S, H), 4.0), value=value * (1 + inputs.value / 16)
    )


def one_long_key(rng: np.random.Generator, *, index: int, length: float) -> HardInputs:
    """Make one key `length` times as long, so that it takes nearly all of many rows."""
    inputs = normal(rng)
    inputs.key[index] *= length
    return inputs


CASES = {
    "normal": HardCase(partial(normal, dlse=1.0)),
    "64k keys": HardCase(partial(normal, S=65536, dlse=1.0)),
    "64k queries": HardCase(partial(normal, T=65536, S=128, dlse=1.0)),
    "values of 1e-30": HardCase(partial(normal, value=1e-30), WIDE_DTYPES),
    "values of 1e-06": HardCase(partial(normal, value=1e-6), WIDE_DTYPES),
    "values of 1e+06": HardCase(partial(normal, value=1e6), WIDE_DTYPES),
    "values of 1e+30": HardCase(partial(normal, value=1e30), WIDE_DTYPES),
    "values of 0.001": HardCase(partial(normal, value=1e-3), ("float16",)),
    "values of 1000": HardCase(partial(normal, value=1e3), ("float16",)),
    "cotangents of 1e-30": HardCase(partial(normal, dout=1e-30), WIDE_DTYPES),
    "cotangents of 1e+30": HardCase(partial(normal, dout=1e30), WIDE_DTYPES),
    "cotangents of 0.001": HardCase(partial(normal, dout=1e-3)),
    "cotangents of 1e-06": HardCase(partial(normal, dout=1e-6)),
    "values of 1e-30, cotangents of 1e30": HardCase(
        partial(normal, value=1e-30, dout=1e30), WIDE_DTYPES
    ),
    "16k keys 10 nats below a sink key": HardCase(partial(below_a_sink, nats=10)),
    "16k keys 18.5 nats below a sink key": HardCase(partial(below_a_sink, nats=18.5)),
    "16k keys 30 nats below a sink key": HardCase(partial(below_a_sink, nats=30)),
    "16k keys 60 nats below a sink key": HardCase(partial(below_a_sink, nats=60)),
    "the same at 18.5 nats, 64k keys": HardCase(partial(below_a_sink, nats=18.5, S=65536)),
    "the same at 18.5 nats, values of 1e-6": HardCase(
        partial(below_a_sink, nats=18.5, value=1e-6), WIDE_DTYPES
    ),
    "equal keys, values of 1e6": HardCase(partial(equal_keys, value=1e6), WIDE_DTYPES),
    "equal keys, values of 1e30": HardCase(partial(equal_keys, value=1e30), WIDE_DTYPES),
    "equal keys, values of 4e4": HardCase(partial(equal_keys, value=4e4), ("float16",)),
    "64k equal keys": HardCase(partial(equal_keys, value=1.0, S=65536)),
    "one-hot rows, an early key": HardCase(partial(one_long_key, index=3, length=200.0)),
    "one-hot rows, a late key": HardCase(partial(one_long_key, index=400, length=200.0)),
}
