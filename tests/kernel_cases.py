"""Random calls of the Hopper kernels: every argument that they take, any sizes. No test is here.

    case = draw(17)    # the same call for the same seed, anywhere; `small=True` for the interpreter
    results = run(case)

kernel_truth.py has the truth for each call, and judges the results. `DRAWS` neighbouring seeds
share all that is fixed while tracing, so that one compilation serves them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cases import Sizes
from hopper_cases import position_arguments, unseen_filled
from kernel_functions import MASKS, OFFSET_MASKS, PAIR_MASKS, PARAMS, SCORES, SEEN

import memeff
from memeff.device import pretend_device

DRAWS = 3
DECODING = 10**6  # seeds from here on are calls of few queries
MOST_PAIRS = 2**21  # of all heads
MOST_PAIRS_SMALL = 2**14


class Static(NamedTuple):
    """Properties of a call that are fixed while tracing."""

    z: Sizes
    dtype: str
    kwargs: dict[str, Any]  # keyword arguments that are no arrays
    array_names: tuple[str, ...]  # of arguments that come as arrays
    score: str | None
    mask: str | None
    jvp: bool
    bias: tuple[str, tuple[int, ...]] | None = None  # dtype and shape
    traced: tuple[str, ...] = ()  # numbers of kwargs that come as arrays and are differentiated


class Case(NamedTuple):
    """One call with all its numbers."""

    seed: int
    small: bool
    static: Static
    arrays: dict[str, Any]  # keyword arguments, by name
    floats: dict[str, Any]  # params of the score that are differentiated, sinks, and bias
    args: tuple  # query, key, value
    cotangents: tuple  # of out, and of lse
    along: tuple  # tangents of query, key, value
    seen: np.ndarray  # B N T S
    dirty: tuple  # args, cotangents and along with NaN and Inf in what takes part in no pair


# ---- drawing what is fixed while tracing


class Dice:
    """Random choices from one generator. The order of the throws decides what a seed draws."""

    def __init__(self, seed: list):
        self.rng = np.random.default_rng(seed)

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def whole(self, low: int, high: int) -> int:
        """Return a whole number from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def pick(self, choices: list, p: list[float] | None = None):
        return self.rng.choice(choices, p=p)


def _draw_static(dice: Dice, small: bool, decodes: bool = False) -> Static:
    z = _draw_decoding_sizes(dice, small) if decodes else _draw_sizes(dice, small)
    kwargs, array_names, blocked = _draw_positions(dice, z)
    has_offset = "q_offset" in array_names or kwargs.get("q_offset", 0) != 0
    array_names += _draw_lengths_and_masks(dice, z)
    if dice.chance(0.2):
        kwargs["logits_soft_cap"] = float(dice.pick([1.5, 5.0, 30.0]))
    if dice.chance(0.2):
        kwargs["scale"] = float(dice.pick([-0.2, 0.05, 0.125]))
    if dice.chance(0.3):
        array_names.append("sinks")
    score = str(dice.pick([*SCORES])) if dice.chance(0.35) else None
    mask = "blocks" if blocked else None
    if dice.chance(0.3) and not blocked:
        mask = str(dice.pick(OFFSET_MASKS if has_offset else PAIR_MASKS))
    may_be_fused = score is None and mask is None and max(z.H, z.D) <= 128
    kwargs["backward"] = "fused" if may_be_fused and dice.chance(0.5) else "split"
    dtype = str(dice.pick(["bfloat16", "bfloat16", "float16"]))
    jvp = dice.chance(0.4)
    bias = _draw_bias(dice, z, dtype) if dice.chance(0.35) and not decodes else None
    if bias is not None:
        kwargs["backward"] = "split"
    # The throws of later years stand last, so that a seed keeps its other choices.
    traced = tuple(x for x in ("scale", "logits_soft_cap") if x in kwargs and dice.chance(0.5))
    drops = dice.chance(0.2) and not decodes
    if drops:
        array_names.append("dropout_rng")
        rate = float(dice.pick([0.1, 0.5]))
        kwargs |= dict(dropout_rate=rate, dropout_bits="mix32", broadcast_dropout=dice.chance(0.3))
    if drops or traced:
        kwargs["backward"] = "split"
    jvp = jvp and not drops
    return Static(z, dtype, kwargs, tuple(array_names), score, mask, jvp, bias, traced)


def _draw_bias(dice: Dice, z: Sizes, dtype: str) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape of a bias, of pairs in most draws."""
    B = dice.pick([1, z.B])
    N = dice.pick([1, z.N])
    T, S = dice.pick([[z.T, z.S], [1, z.S], [z.T, 1], [1, 1]], [0.7, 0.1, 0.1, 0.1])
    return str(dice.pick([dtype, "float32"])), tuple(map(int, (B, N, T, S)))


def _draw_sizes(dice: Dice, small: bool) -> Sizes:
    common = [64, 128, 59, 40] if small else [64, 128, 64, 128, 59, 160, 256]
    H = dice.whole(1, 16) * 8 if dice.chance(0.4) else int(dice.pick(common))
    D = H if dice.chance(0.6) else dice.whole(1, 128 if H <= 128 else 256)
    T = _draw_length(dice, small)
    S = T if dice.chance(0.3) else _draw_length(dice, small)
    most_heads = (MOST_PAIRS_SMALL if small else MOST_PAIRS) // (T * S)
    B, K, G = (dice.whole(1, 3) for _ in range(3))
    while B * K * G > max(1, most_heads):
        B, K, G = (_one_less_perhaps(dice, size) for size in (B, K, G))
    return Sizes(B=B, T=T, S=S, K=K, G=G, H=H, D=D)


def _draw_decoding_sizes(dice: Dice, small: bool) -> Sizes:
    """Draw few queries, and keys that the decode kernel reads in place."""
    H, D = (int(dice.pick([64, 128])) for _ in range(2))
    T = dice.whole(1, 8)
    S = 8 * dice.whole(1, 160 if small else 1000)
    B, G = (dice.whole(1, 3) for _ in range(2))
    return Sizes(B=B, T=T, S=S, K=dice.whole(1, 2 if small else 5), G=G, H=H, D=D)


def _one_less_perhaps(dice: Dice, size: int) -> int:
    return max(1, size - 1) if dice.chance(0.5) else size


def _draw_length(dice: Dice, small: bool) -> int:
    if small:
        return dice.whole(1, 150)
    return int(64 * (1700 / 64) ** dice.rng.random())


def _draw_positions(dice: Dice, z: Sizes) -> tuple[dict[str, Any], list[str], bool]:
    """Return keyword arguments, names of arrays, and whether the mask is a block mask."""
    kwargs: dict[str, Any] = {}
    array_names = []
    if dice.chance(0.45):
        kwargs["is_causal"] = True
    if dice.chance(0.35):
        kwargs["local_window_size"] = _draw_side(dice, z), _draw_side(dice, z)
    blocked = dice.chance(0.12)
    if dice.chance(0.4) and not blocked:
        if dice.chance(0.5):
            array_names.append("q_offset")
        else:
            kwargs["q_offset"] = dice.whole(-z.T // 3, z.S)
    return kwargs, array_names, blocked


def _draw_side(dice: Dice, z: Sizes) -> int | None:
    """Return one side of a window."""
    return None if dice.chance(0.25) else dice.whole(0, max(z.T, z.S) // 2)


def _draw_lengths_and_masks(dice: Dice, z: Sizes) -> list[str]:
    """Return names of arguments that hide tokens and come as arrays."""
    lengths = ("query_seq_lengths", "key_value_seq_lengths")
    array_names = [name for name in lengths if dice.chance(0.25)]
    kind = dice.pick(["none", "segments", "one id", "keys", "queries"], [0.5, 0.2, 0.1, 0.1, 0.1])
    if kind == "segments":
        array_names += ["query_segment_ids", "key_value_segment_ids"]
    if kind == "one id" and z.T == z.S:
        array_names.append("query_segment_ids")
    if kind in ("keys", "queries"):
        array_names.append(f"mask of {kind}")
    return array_names


# ---- drawing numbers


def draw(seed: int, small: bool = False, again: int = 0, static: Static | None = None) -> Case:
    """Return the call of a seed, or numbers for the call `static`.

    With `again` > 0 only query, key, value, cotangents and tangents are new.
    """
    if static is None:
        static = _draw_static(Dice([7, seed // DRAWS, small]), small, seed >= DECODING)
    z = static.z
    dtype = static.dtype
    rng = np.random.default_rng([8, seed, small])
    arrays = {}
    for name in static.array_names:
        if name != "sinks":
            arrays[name] = _array(rng, name, z)
    floats = {}
    if "sinks" in static.array_names:
        floats["sinks"] = _sinks(rng, z)
    for name in static.traced:
        floats[name] = np.array(static.kwargs[name], np.float32)
    if static.bias is not None:
        floats["bias"] = _bias(np.random.default_rng([10, seed, small]), static)
    if static.score in PARAMS:
        floats[static.score] = PARAMS[static.score](rng, z)
    fresh = np.random.default_rng([9, seed, small, again])

    def normal(*shape):
        numbers = rng.standard_normal(shape)  # also where `again` replaces them: choices follow
        return (fresh.standard_normal(shape) if again else numbers).astype(np.float32)

    size = rng.choice([0.3, 1.0, 2.0])
    query = normal(z.B, z.T, z.N, z.H) * size
    key = normal(z.B, z.S, z.K, z.H)
    value = normal(z.B, z.S, z.K, z.D)
    value = value * rng.choice([1.0, 1.0, 1e-3, 30.0])
    args = tuple(x.astype(dtype) for x in (query, key, value))
    dout = normal(z.B, z.T, z.N, z.D).astype(dtype)
    dlse = normal(z.B, z.T, z.N)
    dlse = dlse * np.float32(rng.choice([0.0, 1.0], p=[0.3, 0.7]))
    cotangents = dout, dlse
    along = tuple(normal(*x.shape).astype(dtype) for x in args)
    seen = _seen(static, arrays, args)
    if "bias" in floats:
        seen = seen & ~bias_hides(floats["bias"])
    dirty = args, cotangents, along
    if rng.random() < 0.6:
        dirty_args, dirty_cotangents, _ = unseen_filled(args, seen, cotangents)
        dirty_along, _, _ = unseen_filled(along, seen, cotangents)
        dirty = dirty_args, dirty_cotangents, dirty_along
    return Case(seed, small, static, arrays, floats, args, cotangents, along, seen, dirty)


def _array(rng, name: str, z: Sizes):
    """Return the argument `name`."""
    match name:
        case "dropout_rng":
            return rng.integers(2**32, size=2, dtype=np.uint32)
        case "q_offset":
            return rng.integers(-z.T // 3, z.S + 1, z.B).astype(np.int32)
        case "query_seq_lengths":
            return rng.integers(0, z.T + 1, z.B).astype(np.int32)
        case "key_value_seq_lengths":
            return rng.integers(0, z.S + 1, z.B).astype(np.int32)
        case "query_segment_ids":
            return _segment_ids(rng, z.B, z.T)
        case "key_value_segment_ids":
            return _segment_ids(rng, z.B, z.S)
        case "mask of keys":
            if rng.random() < 0.5:
                keep = _scattered(rng, z.B, z.S)
            else:
                keep = np.arange(z.S) < rng.integers(0, z.S + 1, (z.B, 1))
            return keep[:, None, None]
        case "mask of queries":
            return _scattered(rng, z.B, z.T)[:, None, :, None]
    raise ValueError(name)


def _segment_ids(rng, B: int, length: int) -> np.ndarray:
    """Return ids [B, length], sorted in most draws."""
    ids = rng.integers(0, 4, (B, length)).astype(np.int32)
    return np.sort(ids, 1) if rng.random() < 0.7 else ids


def _scattered(rng, B: int, length: int) -> np.ndarray:
    """Return a mask [B, length] of few or of many tokens."""
    return rng.random((B, length)) < rng.choice([0.3, 0.9])


def _sinks(rng, z: Sizes) -> np.ndarray:
    """Return a sink for each head, some of them -inf."""
    absent = rng.random(z.N) < 0.15
    sinks = rng.choice([1.0, 8.0]) * rng.standard_normal(z.N)
    return np.where(absent, -np.inf, sinks).astype(np.float32)


def _bias(rng, static: Static) -> np.ndarray:
    """Return a bias, which in half of the draws hides some pairs or many."""
    dtype, shape = static.bias
    bias = rng.choice([0.5, 3.0]) * rng.standard_normal(shape)
    hidden = rng.random(shape) < rng.choice([0, 0, 0.1, 0.9])
    lowest = float(jnp.finfo(dtype).min)
    return np.where(hidden, rng.choice([-np.inf, lowest], shape), bias).astype(dtype)


def bias_hides(bias: np.ndarray) -> np.ndarray:
    """Return True where a bias is -inf or the lowest finite number."""
    return bias.astype(np.float64) <= float(jnp.finfo(bias.dtype).min)


# ---- who sees whom


def pairs(static: Static, arrays):
    """Return row, b, n, i, j of all pairs, to be broadcast; i is row's position among the keys."""
    z = static.z
    b, n, row, j = np.ogrid[: z.B, : z.N, : z.T, : z.S]
    kwargs = static.kwargs | arrays
    offset = np.reshape(kwargs.get("q_offset", 0), (-1, 1, 1, 1))
    return row, b, n, row + offset, j


def _seen(static: Static, arrays, args) -> np.ndarray:
    row, _, n, i, j = pairs(static, arrays)
    query, key, _ = args
    seen = oracle.seen_by(query, key, **position_arguments(static.kwargs | arrays))
    for name, x in arrays.items():
        if name.startswith("mask of"):
            seen = seen & x
    if static.mask is not None:
        seen = seen & SEEN[static.mask](row, n, i, j)
    return seen


# ---- running


def run(case: Case):
    """Return (out, lse), gradients of floats, gradients of query, key and value, and tangents.

    The tangents are those of out and lse, or None if the call does not ask for them.
    """
    args, cotangents, along = case.dirty
    program = _program(case.seed // DRAWS, Whole(case.static))
    results = program(args, case.arrays, case.floats, cotangents, along)
    return jax.tree.map(np.asarray, results)


def lower(case: Case, capability: str) -> None:
    """Lower a call for a GPU of a compute capability, which need not be there."""
    args, cotangents, along = case.dirty
    with pretend_device("gpu", capability):
        program = _program.__wrapped__(0, Whole(case.static))
        traced = program.trace(args, case.arrays, case.floats, cotangents, along)
        traced.lower(lowering_platforms=("cuda",))


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
        kwargs: dict[str, Any] = dict(static.kwargs)
        for name, x in arrays.items():
            kwargs["mask" if name.startswith("mask of") else name] = x
        if static.score is not None:
            kwargs["score_fn"] = SCORES[static.score](floats.get(static.score))
        if static.mask is not None:
            kwargs["mask_fn"] = MASKS[static.mask](static.z)
        for name in ("sinks", "bias", *static.traced):
            if name in floats:
                kwargs[name] = floats[name]
        return memeff.dot_product_attention(
            *args, **kwargs, implementation="pallas", return_residual=True
        )

    @jax.jit
    def both(args, arrays, floats, cotangents, along):
        results, pull = jax.vjp(functools.partial(attend, arrays), floats, *args)
        dfloats, *gradients = pull(cotangents)
        tangents = None
        if static.jvp:
            _, tangents = jax.jvp(functools.partial(attend, arrays, floats), args, along)
        return results, dfloats, gradients, tangents

    return both


# ---- words


def features(case: Case) -> list[str]:
    """Return the features of a call, in words."""
    static = case.static
    words = [static.dtype, *static.array_names]
    words += [name for name in static.kwargs if name != "backward"]
    words += [f"{name}, an array" for name in static.traced]
    words.append(static.kwargs["backward"])
    if static.score:
        words.append(f"score {static.score}")
    if static.mask:
        words.append(f"mask {static.mask}")
    if static.jvp:
        words.append("jvp")
    if static.bias:
        dtype, shape = static.bias
        of = {(True, True): "pairs", (True, False): "queries", (False, True): "keys"}
        words.append(f"bias of {of.get((shape[2] > 1, shape[3] > 1), 'heads')}, {dtype}")
    if max(static.z.H, static.z.D) > 128:
        words.append("heads beyond 128")
    if case.dirty[0] is not case.args:
        words.append("what nobody sees filled")
    T = static.z.T
    S = static.z.S
    if T < S:
        words.append("T < S")
    elif T > S:
        words.append("T > S")
    else:
        words.append("T = S")
    return words
