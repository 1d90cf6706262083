"""List the named calls: awkward sizes, every optional argument alone and in pairs.

Arrays are NumPy's, and nothing runs here.

args, kwargs = CASES["causal"].inputs(np.float32)  # of dot_product_attention; args are q, k, v
static, arrays = split(kwargs)  # arguments that jit must not trace, and arguments that it may
"""

import itertools
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class Sizes(NamedTuple):
    """Sizes by letter, all different and none a multiple of a chunk.

    `leads` replaces B where the batch is not one dim.
    """

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
        """Return (query, key, value) and keyword arguments, with floats rounded to `dtype`.

        Each case draws the same numbers every time.
        """
        seed = zlib.crc32(self.name.encode())
        return self.make(np.random.default_rng(seed), np.dtype(dtype))


def split(kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split keyword arguments into those that are fixed while tracing, and arrays."""
    arrays = {name: x for name, x in kwargs.items() if isinstance(x, np.ndarray)}
    static = {name: x for name, x in kwargs.items() if name not in arrays}
    return static, arrays


def qkv(rng: np.random.Generator, dtype, z: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    def normal(*shape):
        return rng.standard_normal((*z.batch, *shape)).astype(dtype)

    query = normal(z.T, z.N, z.H)
    key = normal(z.S, z.K, z.H)
    value = normal(z.S, z.K, z.D)
    return query, key, value


def accumulator(dtype):
    """Return the dtype of lse and of scalars."""
    return np.float64 if dtype == np.float64 else np.float32


# ---- features: each returns keyword arguments


def bias_full(rng, dtype, z):
    return {"bias": rng.standard_normal((*z.batch, z.N, z.T, z.S)).astype(dtype)}


def bias_row(rng, dtype, z):
    return {"bias": rng.standard_normal((z.N, 1, z.S)).astype(dtype)}  # one row a head, as ALiBi


def bias_hides(rng, dtype, z):
    bias = rng.standard_normal((z.T, z.S))
    lowest = float(ml_dtypes.finfo(dtype).min)
    hiding = rng.choice([-np.inf, lowest], bias.shape)  # both numbers commonly hide a key
    hidden = rng.random(bias.shape) < 0.3
    return {"bias": np.where(hidden, hiding, bias).astype(dtype)}


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
    lengths = np.linspace(z.T // 2, z.T, max(1, z.B)).astype(np.int32)
    return {"query_seq_lengths": rng.permutation(lengths)}


def key_lengths(rng, dtype, z):
    lengths = np.linspace(z.S // 2, z.S, max(1, z.B)).astype(np.int32)
    return {"key_value_seq_lengths": rng.permutation(lengths)}


def window(rng, dtype, z):
    return {"local_window_size": (9, 4)}


def window_left(rng, dtype, z):
    return {"local_window_size": (6, None)}


def soft_cap(rng, dtype, z):
    return {"logits_soft_cap": 1.5}


def soft_cap_array(rng, dtype, z):
    return {"logits_soft_cap": np.array(2.5, accumulator(dtype))}


def segments(rng, dtype, z):
    def ids(size):
        return np.sort(rng.integers(0, 4, (*z.batch, size)), -1).astype(np.int32)

    return {"query_segment_ids": ids(z.T), "key_value_segment_ids": ids(z.S)}


def q_offset(rng, dtype, z):
    return {"q_offset": z.S - z.T, "is_causal": True}


def q_offset_array(rng, dtype, z):
    offsets = np.arange(-5, -5 + 9 * z.B, 9)
    return {"q_offset": rng.permutation(offsets).astype(np.int32), "is_causal": True}


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
        args = qkv(rng, dtype, z)
        kwargs = {}
        for feature in features:
            kwargs |= feature(rng, dtype, z)
        if chunk_size is not None:
            kwargs["chunk_size"] = chunk_size
        return args, kwargs

    return Case(name, make)


def _mixes(features: tuple, size: int) -> list[tuple]:
    """Return few tuples of `size` features each, in which every pair of features meets."""
    pairs_left = dict.fromkeys(itertools.combinations(features, 2))

    def new_pairs(feature, mix):
        """Count the pairs of `feature` and a feature of `mix` that have not met."""
        pairs = [tuple(sorted((feature, other), key=features.index)) for other in mix]
        return sum(pair in pairs_left for pair in pairs)

    mixes = []
    while pairs_left:
        mix = list(next(iter(pairs_left)))
        while len(mix) < size:
            rest = [feature for feature in features if feature not in mix]
            mix.append(max(rest, key=lambda feature: new_pairs(feature, mix)))
        mixes.append(tuple(sorted(mix, key=features.index)))
        for pair in itertools.combinations(mixes[-1], 2):
            pairs_left.pop(pair, None)
    return mixes


def _all() -> list[Case]:
    same = Sizes(T=41, S=41)
    sizes = [
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
    alone = [_case(feature.__name__, feature) for feature in FEATURES]
    small = Sizes(B=2, T=19, S=29, K=2, G=2, H=3, D=4)
    pairs = []
    for f, g in itertools.combinations(PAIRED, 2):
        pairs.append(_case(f"{f.__name__}+{g.__name__}", f, g, z=small, chunk_size=(8, 12)))
    mixes = []
    for mix in _mixes(PAIRED, 4):
        name = "&".join(feature.__name__ for feature in mix)
        mixes.append(_case(name, *mix))
    everything = _case(
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
    )
    return [*sizes, *alone, *pairs, *mixes, everything]


CASES: dict[str, Case] = {case.name: case for case in _all()}
SINGLES = tuple(name for name in CASES if "+" not in name and "&" not in name)
# Calls of four features, in which every pair meets.
MIXES = tuple(name for name in CASES if "&" in name)
