"""The one table of named calls: awkward sizes, every optional argument alone and in pairs. NumPy arrays; nothing runs here.

args, kwargs = CASES["causal"].inputs(np.float32)      # (query, key, value), keyword arguments of dot_product_attention
static, arrays = split(kwargs)                         # what jit must not trace, and what it may
"""

import itertools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class Sizes(NamedTuple):
    """The letters; every one different, none a multiple of a chunk. `leads` stand in for B where it is not one dim."""

    B: int = 2
    T: int = 37
    S: int = 53
    K: int = 3
    G: int = 2
    H: int = 5
    D: int = 11
    leads: tuple[int, ...] | None = None

    @property
    def batch(self) -> tuple[int, ...]:
        return (self.B,) if self.leads is None else self.leads

    @property
    def N(self) -> int:
        return self.K * self.G


AWKWARD = Sizes()


class Case(NamedTuple):
    name: str
    make: Callable[[np.random.Generator, np.dtype], tuple[tuple, dict[str, Any]]]

    def inputs(self, dtype=np.float32) -> tuple[tuple, dict[str, Any]]:
        """(query, key, value) and keyword arguments, always the same; floats are rounded to `dtype`."""
        return self.make(np.random.default_rng(zlib.crc32(self.name.encode())), np.dtype(dtype))


def split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments that are fixed while tracing, and arrays."""
    arrays = {name: x for name, x in kwargs.items() if isinstance(x, np.ndarray)}
    return {name: x for name, x in kwargs.items() if name not in arrays}, arrays


def qkv(rng: np.random.Generator, dtype, z: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shapes = (z.T, z.N, z.H), (z.S, z.K, z.H), (z.S, z.K, z.D)
    query, key, value = (rng.standard_normal((*z.batch, *shape)).astype(dtype) for shape in shapes)
    return query, key, value


def accumulator(dtype):
    """The dtype of lse and of scalars."""
    return np.float64 if dtype == np.float64 else np.float32


# ---- features: keyword arguments from (rng, dtype, sizes)


def bias_full(rng, dtype, z):
    return {"bias": rng.standard_normal((*z.batch, z.N, z.T, z.S)).astype(dtype)}


def bias_row(rng, dtype, z):
    return {"bias": rng.standard_normal((z.N, 1, z.S)).astype(dtype)}  # as ALiBi: one row per head


def bias_hides(rng, dtype, z):
    bias = rng.standard_normal((z.T, z.S))
    # both are in use as "never look here"
    hides = rng.choice([-np.inf, float(ml_dtypes.finfo(dtype).min)], bias.shape)
    return {"bias": np.where(rng.random(bias.shape) < 0.3, hides, bias).astype(dtype)}


def mask_dense(rng, dtype, z):
    return {"mask": rng.random((*z.batch, 1, z.T, z.S)) < 0.6}


def mask_heads(rng, dtype, z):
    return {"mask": rng.random((z.N, z.T, 1)) < 0.8}


def scale(rng, dtype, z):
    return {"scale": 0.7}


def scale_array(rng, dtype, z):
    return {"scale": np.array(-0.9, accumulator(dtype))}


def causal(rng, dtype, z):
    return {"is_causal": True}


def query_lengths(rng, dtype, z):
    return {
        "query_seq_lengths": rng.permutation(
            np.linspace(z.T // 2, z.T, max(1, z.B)).astype(np.int32)
        )
    }


def key_lengths(rng, dtype, z):
    return {
        "key_value_seq_lengths": rng.permutation(
            np.linspace(z.S // 2, z.S, max(1, z.B)).astype(np.int32)
        )
    }


def window(rng, dtype, z):
    return {"local_window_size": (9, 4)}


def window_left(rng, dtype, z):
    return {"local_window_size": (6, None)}


def soft_cap(rng, dtype, z):
    return {"logits_soft_cap": 1.5}


def soft_cap_array(rng, dtype, z):
    return {"logits_soft_cap": np.array(2.5, accumulator(dtype))}


def segments(rng, dtype, z):
    ids = lambda size: np.sort(rng.integers(0, 4, (*z.batch, size)), -1).astype(np.int32)
    return {"query_segment_ids": ids(z.T), "key_value_segment_ids": ids(z.S)}


def q_offset(rng, dtype, z):
    return {"q_offset": z.S - z.T, "is_causal": True}


def q_offset_array(rng, dtype, z):
    return {
        "q_offset": rng.permutation(np.arange(-5, -5 + 9 * z.B, 9)).astype(np.int32),
        "is_causal": True,
    }


def dropout(rng, dtype, z):
    return {"dropout_rng": np.array([3, 1 << 31], np.uint32), "dropout_rate": 0.25}


def dropout_each(rng, dtype, z):
    return {
        "dropout_rng": np.array([5, 8], np.uint32),
        "dropout_rate": 0.5,
        "broadcast_dropout": False,
    }


def sinks(rng, dtype, z):
    return {"sinks": (3 * rng.standard_normal(z.N)).astype(dtype)}


def precision(rng, dtype, z):
    return {"precision": "highest"}


FEATURES = (
    bias_full,
    bias_row,
    bias_hides,
    mask_dense,
    mask_heads,
    scale,
    scale_array,
    causal,
    query_lengths,
    key_lengths,
    window,
    window_left,
    soft_cap,
    soft_cap_array,
    segments,
    q_offset,
    q_offset_array,
    dropout,
    dropout_each,
    sinks,
    precision,
)
PAIRED = (  # one feature of each kind that reaches other code
    bias_row,
    mask_dense,
    scale_array,
    causal,
    query_lengths,
    key_lengths,
    window,
    soft_cap,
    segments,
    q_offset_array,
    dropout_each,
    sinks,
)


def _case(name: str, *features, z: Sizes = AWKWARD, chunk_size: Any = (16, 24)) -> Case:
    def make(rng, dtype):
        args, kwargs = qkv(rng, dtype, z), {}
        for feature in features:
            kwargs |= feature(rng, dtype, z)
        if chunk_size is not None:
            kwargs["chunk_size"] = chunk_size
        return args, kwargs

    return Case(name, make)


def _mixes(features: tuple, size: int) -> list[tuple]:
    """Few calls of `size` features each in which every pair of features meets."""
    order = lambda f, g: tuple(sorted((f, g), key=features.index))
    left = dict.fromkeys(itertools.combinations(features, 2))
    mixes = []
    while left:
        mix = [*next(iter(left))]
        while len(mix) < size:
            rest = [f for f in features if f not in mix]
            mix.append(max(rest, key=lambda f: sum(order(f, g) in left for g in mix)))
        mixes.append(tuple(sorted(mix, key=features.index)))
        for pair in itertools.combinations(mixes[-1], 2):
            left.pop(pair, None)
    return mixes


def _all() -> list[Case]:
    same = Sizes(T=41, S=41)
    one = [
        _case("plain"),
        _case("default_chunk", chunk_size=None),
        _case("one_token", z=Sizes(T=1, S=1)),
        _case("one_query", key_lengths, z=Sizes(T=1, S=97)),
        _case("one_key", bias_full, z=Sizes(T=7, S=1)),
        _case("one_of_each", causal, z=Sizes(1, 1, 1, 1, 1, 1, 1)),
        _case("many_rows", causal, z=Sizes(B=1, T=97, S=7, K=1, G=1)),
        _case("head_97", z=Sizes(B=1, T=7, S=11, K=1, G=3, H=97, D=1)),
        _case("no_leads", causal, bias_row, z=Sizes(B=1, leads=())),
        _case("three_leads", mask_dense, bias_full, segments, z=Sizes(B=6, leads=(3, 1, 2))),
        _case("multi_query", window, z=Sizes(K=1, G=6)),
        _case("plain_heads", causal, z=Sizes(K=5, G=1, T=31, S=31), chunk_size=8),
        _case("square_causal", causal, z=same, chunk_size=(8, 8)),
        _case("square_window", causal, window_left, z=same, chunk_size=(7, 13)),
        _case("chunk_divides", causal, z=Sizes(T=32, S=48)),
        _case("chunk_too_large", causal, bias_full, chunk_size=(1000, 2000)),
        _case("one_row_chunks", window, z=Sizes(B=1, T=9, S=13), chunk_size=(1, 5)),
        _case("one_column_chunks", causal, z=Sizes(B=1, T=9, S=13), chunk_size=(5, 1)),
    ]
    alone = [_case(f.__name__, f) for f in FEATURES]
    pairs = [
        _case(
            f"{f.__name__}+{g.__name__}",
            f,
            g,
            z=Sizes(B=2, T=19, S=29, K=2, G=2, H=3, D=4),
            chunk_size=(8, 12),
        )
        for f, g in itertools.combinations(PAIRED, 2)
    ]
    mixes = [_case("&".join(f.__name__ for f in mix), *mix) for mix in _mixes(PAIRED, 4)]
    everything = [
        _case(
            "everything",
            mask_dense,
            bias_row,
            scale_array,
            soft_cap_array,
            key_lengths,
            query_lengths,
            segments,
            window,
            q_offset_array,
            dropout_each,
        ),
    ]
    return one + alone + pairs + mixes + everything


CASES: dict[str, Case] = {case.name: case for case in _all()}
SINGLES = tuple(name for name in CASES if "+" not in name and "&" not in name)
# calls of four features in which every pair meets
MIXES = tuple(name for name in CASES if "&" in name)
