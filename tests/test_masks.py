"""Who sees whom: drawn pictures, rows that see nothing, what hidden garbage may not touch."""

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import AWKWARD, CASES, Sizes, qkv
from conftest import Result, assert_truth, cotangents, few, run_call, run_calls, true_call

from memeff import dot_product_attention

IMPLEMENTATIONS = ("xla", "reference")

# ---- pictures typed by hand; a row is a query, a column a key, # may attend

PICTURES = {
    "causal": ({"is_causal": True}, "#.... ##... ###.. ####."),
    "causal, more queries": ({"is_causal": True}, "#.. ##. ### ### ###"),
    "causal, offset 1": ({"is_causal": True, "q_offset": 1}, "##... ###.. ####. #####"),
    "causal, bottom right": ({"is_causal": True, "q_offset": 2}, "###... ####.. #####. ######"),
    "causal, offset -2": ({"is_causal": True, "q_offset": -2}, "..... ..... #.... ##..."),
    "causal, offset past the end": ({"is_causal": True, "q_offset": 9}, "##### ##### #####"),
    "causal, offset as array": (
        {"is_causal": True, "q_offset": np.array([1])},
        "##... ###.. ####. #####",
    ),
    "window (1, 0)": ({"local_window_size": (1, 0)}, "#.... ##... .##.. ..##."),
    "window (0, 0)": ({"local_window_size": (0, 0)}, "#.... .#... ..#.. ...#. ....# ....."),
    "window 1": ({"local_window_size": 1}, "##... ###.. .###. ..###"),
    "window (1, 2)": ({"local_window_size": (1, 2)}, "###.. ####. .#### ..### ...##"),
    "window (2, None)": ({"local_window_size": (2, None)}, "##### ##### ##### .#### ..###"),
    "window (None, 1)": ({"local_window_size": (None, 1)}, "##... ###.. ####. #####"),
    "window wider than all": ({"local_window_size": (7, 9)}, "##### ##### #####"),
    "window of 2 ** 40": ({"local_window_size": 2**40, "q_offset": 2**29 - 1}, "##### ##### #####"),
    "window just past the end": (
        {"local_window_size": (1, 1), "q_offset": 4},
        "...## ....# ..... .....",
    ),
    "window far past the end": (
        {"local_window_size": (1, 1), "q_offset": 2**29 - 1},
        "..... .....",
    ),
    "window before the start": (
        {"local_window_size": (1, 1), "q_offset": -2},
        "..... #.... ##... ###..",
    ),
    "window 1, causal": ({"local_window_size": 1, "is_causal": True}, "#.... ##... .##.. ..##."),
    "window (2, 1), causal, offset": (
        {"local_window_size": (2, 1), "is_causal": True, "q_offset": 1},
        "##... ###.. .###. ..###",
    ),
    "window (0, 0), offset 2": (
        {"local_window_size": (0, 0), "q_offset": 2},
        "..#.. ...#. ....# .....",
    ),
    "window (1, 0), offset as array": (
        {"local_window_size": (1, 0), "q_offset": np.array([-1])},
        "..... #.... ##... .##..",
    ),
    "key length 3": ({"key_value_seq_lengths": np.array([3])}, "###.. ###.. ###.."),
    "key length 3, causal": (
        {"key_value_seq_lengths": np.array([3]), "is_causal": True},
        "#.... ##... ###.. ###.. ###..",
    ),
    "query length 2": ({"query_seq_lengths": np.array([2])}, "##### ##### ....."),
    "lengths 0": (
        {"query_seq_lengths": np.array([0]), "key_value_seq_lengths": np.array([0])},
        "... ...",
    ),
    "segments": (
        {"query_segment_ids": np.array([[0, 0, 1, 1, 2]])},
        "##... ##... ..##. ..##. ....#",
    ),
    "segments, causal": (
        {"query_segment_ids": np.array([[7, 7, 7, 1, 1]]), "is_causal": True},
        "#.... ##... ###.. ...#. ...##",
    ),
    "segments, window (1, 1)": (
        {"query_segment_ids": np.array([[0, 0, 0, 1, 1]]), "local_window_size": 1},
        "##... ###.. .##.. ...## ...##",
    ),
    "segments of keys": (
        {
            "query_segment_ids": np.array([[3, 1, 9]]),
            "key_value_segment_ids": np.array([[1, 1, 3, 3, 2]]),
        },
        "..##. ##... .....",
    ),
    "mask, causal": (
        {"mask": np.array([[True, False, True, True]]), "is_causal": True},
        "#... #... #.#. #.##",
    ),
    "bias, window": (
        {
            "bias": np.array([0, -np.inf, 3, np.finfo(np.float32).min, -1e30], np.float32),
            "local_window_size": (2, 1),
        },
        "#.... #.#.. #.#.. ..#.#",
    ),
}


def _picture(call, T, S):
    """[T, S]: the probabilities, with equal logits and the unit vectors as values."""
    value = jnp.eye(S)[None, :, None]
    return call(jnp.zeros((1, T, 1, 2)), jnp.zeros((1, S, 1, 2)), value)[0, :, 0]


@functools.cache
def _pictures(implementation, chunk_size):
    def draw():
        of = {}
        for name, (kwargs, text) in PICTURES.items():
            T, S = len(text.split()), len(text.split()[0])
            call = functools.partial(
                dot_product_attention,
                **kwargs,
                chunk_size=chunk_size,
                implementation=implementation,
            )
            of[name] = _picture(call, T, S)
        return of

    return jax.device_get(jax.jit(draw)())


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name):
    kwargs, text = PICTURES[name]
    expected = np.array([[c == "#" for c in row] for row in text.split()])
    T, S = expected.shape
    named = kwargs.get("bias"), kwargs.get("mask")
    rest = {n: x for n, x in kwargs.items() if n not in ("bias", "mask")}
    np.testing.assert_array_equal(
        oracle.seen_by(np.zeros((1, T, 1, 1)), np.zeros((1, S, 1, 1)), *named, **rest)[0, 0],
        expected,
    )
    for implementation, chunk_size in (("reference", None), ("xla", (3, 2))):
        p = _pictures(implementation, chunk_size)[name]
        np.testing.assert_array_equal(p > 0, expected & (p > 0) if "bias" in kwargs else expected)
        np.testing.assert_allclose(p.sum(1), expected.any(1), atol=1e-6)


def test_one_row_equals_its_row_of_the_full_call():
    """Decoding: one query at offset t sees what row t sees; `q_offset` static, as an array, and one per batch entry."""
    query, key, value = qkv(np.random.default_rng(0), np.float32, Sizes(T=53, S=53))
    kwargs = {"is_causal": True, "local_window_size": (20, None), "chunk_size": 16}
    full = dot_product_attention(query, key, value, **kwargs)
    row = jax.jit(lambda q, t: dot_product_attention(q, key, value, q_offset=t, **kwargs))
    for t in (0, 1, 15, 16, 52):
        np.testing.assert_allclose(
            row(query[:, t : t + 1], jnp.int32(t))[:, 0], full[:, t], atol=2e-6
        )
    static = dot_product_attention(query[:, 16:17], key, value, q_offset=16, **kwargs)
    np.testing.assert_allclose(static[:, 0], full[:, 16], atol=2e-6)
    two = dot_product_attention(
        np.stack([query[0, 3:5], query[1, 40:42]]), key, value, q_offset=np.array([3, 40]), **kwargs
    )
    np.testing.assert_allclose(two, np.stack([full[0, 3:5], full[1, 40:42]]), atol=2e-6)


# ---- every way to broadcast

PATTERNS = list(itertools.product((True, False), repeat=4))
SMALL = Sizes(B=2, T=11, S=13, K=3, G=2, H=3, D=4)


def _broadcast_calls():
    full = (SMALL.B, SMALL.N, SMALL.T, SMALL.S)
    shape = lambda pattern: tuple(
        size if keep else 1 for keep, size in zip(pattern, full, strict=True)
    )
    shapes = {
        str(shape(p)): (shape(p), shape(PATTERNS[(5 * i + 3) % 16])) for i, p in enumerate(PATTERNS)
    }
    fewer = [full[1:], full[2:], full[3:], (), (SMALL.N, 1, 1), (1, SMALL.S), (SMALL.T, 1)]
    shapes |= {str(s): (s, fewer[(2 * i + 1) % len(fewer)]) for i, s in enumerate(fewer)}
    shapes["more dims"] = (1, *full), (1, 1, 1, *full[2:])
    calls = {}
    for i, (name, (bias, mask)) in enumerate(shapes.items()):
        rng = np.random.default_rng(i)
        kwargs = {
            "bias": rng.standard_normal(bias).astype(np.float32),
            "mask": rng.random(mask) < 0.7,
            "chunk_size": (4, 5),
        }
        calls[name] = qkv(rng, np.float32, SMALL), kwargs
    for leads, shape in (((), (6, 11, 13)), ((3, 2), (3, 1, 1, 11, 13)), ((3, 2), (2, 6, 1, 13))):
        rng = np.random.default_rng(len(calls))
        z = SMALL._replace(B=int(np.prod(leads)), leads=leads)
        kwargs = {
            "bias": rng.standard_normal(shape).astype(np.float32),
            "mask": rng.random(shape[-2:]) < 0.7,
        }
        calls[f"{leads} {shape}"] = qkv(rng, np.float32, z), kwargs
    return calls


BROADCAST = _broadcast_calls()


@functools.cache
def _run_broadcast(half: int):
    return run_calls({name: BROADCAST[name] for name in list(BROADCAST)[half::2]})


HALVES = [
    name if n % 2 else pytest.param(name, marks=pytest.mark.slow)
    for n, name in enumerate(BROADCAST)
]


@pytest.mark.parametrize("name", HALVES)
def test_bias_and_mask_of_every_broadcast_pattern(name):
    result = _run_broadcast(list(BROADCAST).index(name) % 2)[name]
    assert result.grads["bias"].shape == BROADCAST[name][1]["bias"].shape
    assert_truth(result, name, *BROADCAST[name])


# ---- rows that see nothing

T, S = AWKWARD.T, AWKWARD.S
ROWS = np.isin(np.arange(T), [0, 5, 17, 36])  # these see nothing, where a mask can say so
NOTHING = {
    "mask": {"mask": np.broadcast_to(~ROWS[:, None], (T, S))},
    "mask of all": {"mask": np.zeros((1, 1), bool)},
    "bias -inf": {
        "bias": np.where(ROWS[:, None], -np.inf, np.linspace(-1, 1, S)).astype(np.float32)
    },
    "bias finfo.min": {
        "bias": np.where(ROWS[:, None], np.finfo(np.float32).min, np.linspace(-1, 1, S)).astype(
            np.float32
        )
    },
    "bias -inf of all": {"bias": np.full((T, 1), -np.inf, np.float32)},
    "bias of two kinds": {
        "bias": np.where(np.arange(S) % 2, -np.inf, np.finfo(np.float32).min).astype(np.float32)
    },
    "lengths": {"query_seq_lengths": np.array([20, 0]), "key_value_seq_lengths": np.array([53, 9])},
    "key length 0": {"key_value_seq_lengths": np.array([0, 17])},
    "segments": {
        "query_segment_ids": np.where(ROWS, 99, 1)[None].repeat(2, 0),
        "key_value_segment_ids": np.array([[1], [2]]).repeat(S, 1),
    },
    "offset before": {"is_causal": True, "q_offset": -7},
    "offset past": {"local_window_size": (3, 3), "q_offset": 40},
    "offsets": {"local_window_size": (3, 0), "q_offset": np.array([-20, 51])},
    "mask against window": {"mask": np.tri(T, S, -5, dtype=bool), "local_window_size": (4, 1)},
    "mask against bias": {
        "mask": np.arange(S) % 2 == 0,
        "bias": np.where(np.arange(S) % 2, 0, -np.inf).astype(np.float32),
    },
}


@functools.cache
def _run_nothing(implementation):
    calls = {}
    for name, kwargs in NOTHING.items():
        calls[name] = CASES["plain"].inputs()[0], {"scale": np.float32(0.5) * np.ones(())} | kwargs
    return calls, run_calls(calls, implementation=implementation, chunk_size=(16, 24))


@pytest.mark.parametrize("name", NOTHING)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_see_nothing(name, implementation):
    calls, results = _run_nothing(implementation)
    result, (args, kwargs) = results[name], calls[name]
    positions = {n: x for n, x in kwargs.items() if n != "scale"}
    dead = ~oracle.seen_by(*args[:2], **positions).any(-1).swapaxes(1, 2)  # b t n
    assert dead.any()
    assert np.all(result.out[dead] == 0) and np.all(result.lse[dead] == -np.inf)
    assert np.all(result.grads["query"][dead] == 0)
    assert_truth(result, name, args, kwargs)


# ---- what nobody sees may hold anything

GARBAGE = (np.nan, np.inf, -np.inf, 1e38)


def _hidden_calls():
    """name: (kwargs, the rows [B, T] that see nothing, the keys [B, S] that nobody sees)."""
    rows, keys = np.arange(T)[None].repeat(2, 0), np.arange(S)[None].repeat(2, 0)
    odd = np.array([1, 16, 29, 30, 52])
    bias = np.random.default_rng(1).standard_normal((2, 6, T, S)).astype(np.float32)
    hides = bias.copy()
    hides[..., odd] = -np.inf
    hides[:, :, [2, 20], :] = np.finfo(np.float32).min
    of_bias = np.isin(rows, [2, 20]), np.isin(keys, odd)
    masks = np.ones((2, 1, T, S), bool)
    masks[..., odd] = False
    masks[:, :, [2, 20], :] = False
    q_ids, k_ids = np.where(rows < 30, rows // 9, -1), np.where(keys < 40, keys // 11, -2)
    return {
        "lengths": (
            {
                "query_seq_lengths": np.array([20, 35]),
                "key_value_seq_lengths": np.array([30, 17]),
                "bias": bias,
            },
            (rows >= np.array([[20], [35]]), keys >= np.array([[30], [17]])),
        ),
        "mask": ({"mask": masks, "bias": bias}, of_bias),
        "bias": ({"bias": hides}, of_bias),
        "segments": (
            {"query_segment_ids": q_ids, "key_value_segment_ids": k_ids},
            (rows >= 30, keys >= 44),
        ),
        "causal": ({"is_causal": True}, (rows < 0, keys >= T)),
        "window": (
            {"local_window_size": (3, 2), "q_offset": 10},
            (rows < 0, (keys < 7) | (keys > 48)),
        ),
        "offset": (
            {"is_causal": True, "q_offset": np.array([-4, 3])},
            (rows + [[-4], [3]] < 0, keys > [[32], [39]]),
        ),
    }


HIDDEN = [
    *itertools.product(("xla",), _hidden_calls()),
    ("reference", "mask"),
    ("reference", "lengths"),
]


@pytest.mark.parametrize(
    "implementation, name", few(itertools.product(IMPLEMENTATIONS, _hidden_calls()), HIDDEN)
)
def test_hidden_garbage_changes_no_bit(name, implementation):
    kwargs, (rows, keys) = _hidden_calls()[name]
    kwargs |= {
        "implementation": implementation,
        "chunk_size": (16, 24),
        "logits_soft_cap": np.float32(5) * np.ones(()),
    }
    query, key, value = CASES["plain"].inputs()[0]
    dout, dlse = cotangents((query, key, value))
    fill = lambda x, where, garbage: np.where(
        where.reshape(*where.shape, *(1,) * (x.ndim - 2)), garbage, x
    ).astype(x.dtype)

    def run(garbage):
        filled = dict(kwargs)
        if "mask" in kwargs:  # what a mask hides, a bias may not betray
            filled["bias"] = np.where(kwargs["mask"], kwargs["bias"], np.float32(garbage))
        args = fill(query, rows, garbage), fill(key, keys, garbage), fill(value, keys, garbage)
        return run_call(
            args, filled, cotangent=(fill(dout, rows, garbage), fill(dlse, rows, garbage))
        )

    clean = run(0)
    assert np.all(clean.out[rows] == 0) and np.all(clean.lse[rows] == -np.inf)
    assert all(np.isfinite(x).all() for x in clean.grads.values())
    assert np.all(clean.grads["query"][rows] == 0)
    assert np.all(clean.grads["key"][keys] == 0) and np.all(clean.grads["value"][keys] == 0)
    for garbage in GARBAGE:
        dirty = run(garbage)
        for what, x, y in _leaves(clean, dirty):
            np.testing.assert_array_equal(y, x, err_msg=f"{garbage} changed {what}")


def _leaves(x: Result, y: Result):
    yield "out", x.out, y.out
    yield "lse", x.lse, y.lse
    for name in x.grads:
        yield f"gradient of {name}", x.grads[name], y.grads[name]


# ---- what somebody sees, reaches who sees it

EIGHTS = np.tile(np.arange(64) // 8, (2, 1))
SEEN = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (6, 3)},
    "mask": {"mask": np.random.default_rng(2).random((2, 6, T, S)) < 0.5},
    "segments": {"query_segment_ids": EIGHTS[:, :T], "key_value_segment_ids": EIGHTS[:, :S]},
    "lengths": {
        "query_seq_lengths": np.array([20, 37]),
        "key_value_seq_lengths": np.array([53, 27]),
    },
}


# The quadratic definition has no tiles to skip, so of it two kinds: by position and by element.
FAST_SEEN = [*itertools.product(("xla",), SEEN), ("reference", "window"), ("reference", "mask")]
EACH_SEEN = pytest.mark.parametrize(
    "implementation, name", few(itertools.product(IMPLEMENTATIONS, SEEN), FAST_SEEN)
)


@EACH_SEEN
def test_nan_reaches_exactly_the_rows_that_see_it(name, implementation):
    kwargs = SEEN[name] | {"implementation": implementation, "chunk_size": (16, 24)}
    (query, key, value), j = CASES["plain"].inputs()[0], 25
    seen = oracle.seen_by(query, key, **SEEN[name])  # b n t s
    for what in ("key", "value", "both"):
        dirty_key, dirty_value = key.copy(), value.copy()
        if what != "value":
            dirty_key[0, j, 1] = np.nan  # read by heads 2 and 3
        if what != "key":
            dirty_value[0, j, 1, 4] = np.nan
        out = np.asarray(dot_product_attention(query, dirty_key, dirty_value, **kwargs))
        hit = np.isnan(out).any(-1).swapaxes(1, 2)
        expected = np.zeros_like(hit)
        expected[0, 2:4] = seen[0, 2:4, :, j]
        np.testing.assert_array_equal(hit, expected, err_msg=what)
        # a key: all of the row
        assert what != "key" or np.isnan(out).any(-1).sum() * 11 == np.isnan(out).sum()


@EACH_SEEN
def test_nan_in_each_operand_reaches_what_sees_it(name, implementation):
    """Rows that see it, keys that such a row sees, and nothing else: in out, lse and every gradient."""
    kwargs = SEEN[name] | {"implementation": implementation, "chunk_size": (16, 24)}
    args = CASES["plain"].inputs()[0]
    seen = oracle.seen_by(*args[:2], **SEEN[name])  # b n t s
    (B, N, T, S), (i, j, n, k) = seen.shape, (19, 16, 3, 1)
    clean = dict(zip(("query", "key", "value"), args, strict=True))
    clean |= dict(bias=np.zeros((B, N, T, S), np.float32), sinks=np.zeros(N, np.float32))
    rows = {name: np.zeros((B, N, T), bool) for name in clean}  # where out is NaN
    group = slice(2 * k, 2 * k + 2)
    rows["query"][0, n, i] = seen[0, n, i].any()
    rows["key"][0, group] = rows["value"][0, group] = seen[0, group, :, j]
    rows["bias"][0, n, i] = seen[0, n, i, j]
    rows["sinks"][:, n] = seen[:, n].any(-1)
    places = {
        "query": (0, i, n, 2),
        "key": (0, j, k, 1),
        "value": (0, j, k, 4),
        "bias": (0, n, i, j),
        "sinks": n,
    }
    for what, at in places.items():
        dirty = {name: x.copy() for name, x in clean.items()}
        dirty[what][at] = np.nan
        args = tuple(dirty.pop(name) for name in ("query", "key", "value"))
        found = run_call(args, kwargs | dirty)
        hit = rows[what]
        keys = (hit[..., None] & seen).any(2).reshape(B, -1, 2, S).any(2).swapaxes(1, 2)  # b s k
        of_lse = np.zeros_like(hit) if what in ("value", "sinks") else hit
        expected = {
            "out": hit.swapaxes(1, 2),
            "lse": of_lse.swapaxes(1, 2),
            "query": hit.swapaxes(1, 2),
            "key": keys,
        }
        expected |= {
            "value": np.zeros_like(keys) if what == "value" else keys,
            "bias": hit[..., None] & seen,
        }
        expected["sinks"] = hit.any((0, 2))
        for name, x in {"out": found.out, "lse": found.lse, **found.grads}.items():
            nan = np.isnan(x)
            nan = nan.any(-1) if nan.ndim > expected[name].ndim else nan
            np.testing.assert_array_equal(nan, expected[name], err_msg=f"NaN in {what}: {name}")


# ---- causality, in bits

CAUSAL = (
    "square_causal",
    "causal&window&soft_cap&segments",
    "scale_array&causal&key_lengths&sinks",
    "scale_array&causal&query_lengths&dropout_each",
    "bias_row&mask_dense&scale_array&causal",
    "q_offset",
    "everything",
)


@pytest.mark.parametrize("name", few(CAUSAL, CAUSAL[::2]))
def test_causality_in_bits(name):
    args, kwargs = CASES[name].inputs()
    (query, key, value), t = args, 17
    offset = kwargs.get("q_offset", 0)
    # b s
    future = np.broadcast_to(
        np.arange(key.shape[1]) >= t + np.reshape(offset, (-1, 1)), key.shape[:2]
    )
    dout, dlse = cotangents(args)
    dout[:, t:], dlse[:, t:] = 0, 0  # of out[:t] alone
    rng = np.random.default_rng(3)
    results = []
    for _ in range(2):
        changed = [
            np.where(future[..., None, None], rng.standard_normal(x.shape) * 7, x).astype(
                np.float32
            )
            for x in (key, value)
        ]
        results.append(run_call((query, *changed), kwargs, cotangent=(dout, dlse)))
    one, other = results
    np.testing.assert_array_equal(one.out[:, :t], other.out[:, :t])
    np.testing.assert_array_equal(one.lse[:, :t], other.lse[:, :t])
    np.testing.assert_array_equal(one.grads["query"][:, :t], other.grads["query"][:, :t])
    assert np.all(one.grads["key"][future] == 0) and np.all(one.grads["value"][future] == 0)
    assert np.any(one.grads["key"][~future] != 0) and future.any()


# ---- packed documents, lengths


def test_packed_documents_equal_documents_apart():
    rng = np.random.default_rng(4)
    lengths = [1, 13, 20, 3]
    ids = np.repeat([4, 1, 9, 2], lengths)
    args = qkv(rng, np.float32, Sizes(B=1, T=37, S=37))
    cotangent = cotangents(args)
    pad = [
        np.concatenate([x, np.full_like(x[:, :5], np.nan)], 1) for x in args
    ]  # five positions of padding, with an id of their own
    kwargs = {"is_causal": True, "chunk_size": (16, 12)}
    packed = run_call(args, kwargs | {"query_segment_ids": ids[None]}, cotangent=cotangent)
    ids = np.concatenate([ids, np.full(5, -1)])
    padded = run_call(
        (args[0], *pad[1:]),
        kwargs | {"query_segment_ids": ids[None, :37], "key_value_segment_ids": ids[None]},
        cotangent=cotangent,
    )
    for start, size in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        cut = lambda x, start=start, size=size: x[:, start : start + size]
        alone = run_call(
            tuple(map(cut, args)), {"is_causal": True}, cotangent=tuple(map(cut, cotangent))
        )
        for result in (packed, padded):
            result = Result(
                cut(result.out), cut(result.lse), {n: cut(x) for n, x in result.grads.items()}
            )
            for what, x, y in _leaves(alone, result):
                np.testing.assert_allclose(y, x, rtol=0, atol=5e-6, err_msg=what)


@pytest.mark.parametrize("name", ["queries", "keys", "both"])
def test_lengths_equal_a_shorter_call(name):
    args = CASES["plain"].inputs()[0]
    kwargs = {"query_seq_lengths": np.array([0, 1, T, 19])} if name != "keys" else {}
    kwargs |= {"key_value_seq_lengths": np.array([S, 0, 1, 31])} if name != "queries" else {}
    args = tuple(np.concatenate([x, x[::-1]]) for x in args)
    result = run_call(args, kwargs | {"chunk_size": (16, 24)})
    for b in range(4):
        t, s = (
            kwargs.get("query_seq_lengths", [T] * 4)[b],
            kwargs.get("key_value_seq_lengths", [S] * 4)[b],
        )
        assert np.all(result.out[b, t:] == 0) and np.all(result.lse[b, t:] == -np.inf)
        if s == 0:
            assert np.all(result.out[b] == 0)
        else:
            alone = oracle.attention(args[0][b, :t], args[1][b, :s], args[2][b, :s])[0]
            np.testing.assert_allclose(result.out[b, :t], alone, atol=4e-6)
        assert np.all(result.grads["key"][b, s:] == 0) and np.all(result.grads["query"][b, t:] == 0)


@pytest.mark.parametrize(
    "length", [13, np.int64(13), np.array(13), np.array([13]), jnp.int32(13), [13]]
)
def test_length_of_an_unbatched_call(length):
    query, key, value = (x[0] for x in CASES["plain"].inputs()[0])
    out = dot_product_attention(
        query, key, value, key_value_seq_lengths=length, query_seq_lengths=length
    )
    np.testing.assert_allclose(
        out[:13], dot_product_attention(query[:13], key[:13], value[:13]), atol=2e-6
    )
    assert np.all(out[13:] == 0)


# ---- any mask at all


@st.composite
def _calls(draw):
    size = lambda most, least=1: draw(st.integers(least, most))
    z = Sizes(B=size(2), T=size(9), S=size(9), K=size(2), G=size(2), H=size(3), D=size(3))
    side = st.one_of(st.none(), st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kwargs = {
        "chunk_size": (size(6), size(6)),
        "is_causal": draw(st.booleans()),
        "local_window_size": draw(st.one_of(st.none(), st.integers(0, 4), st.tuples(side, side))),
    }
    offset = draw(st.sampled_from(["none", "static", "array"]))
    if offset != "none":
        kwargs["q_offset"] = size(9, -9) if offset == "static" else rng.integers(-9, 9, z.B)
    if draw(st.booleans()):
        kwargs["query_seq_lengths"] = rng.integers(0, z.T, z.B, endpoint=True)
    if draw(st.booleans()):
        kwargs["key_value_seq_lengths"] = rng.integers(0, z.S, z.B, endpoint=True)
    if draw(st.booleans()):
        kwargs["query_segment_ids"] = rng.integers(0, 2, (z.B, z.T))
        kwargs["key_value_segment_ids"] = rng.integers(0, 2, (z.B, z.S))
    shape = lambda: tuple(rng.choice([1, n]) for n in (z.B, z.N, z.T, z.S))[
        draw(st.integers(0, 4)) :
    ]
    if draw(st.booleans()):
        kwargs["mask"] = rng.random(shape()) < 0.6
    if draw(st.booleans()):
        bias = rng.standard_normal(shape())
        kwargs["bias"] = np.where(rng.random(bias.shape) < 0.2, -np.inf, bias).astype(np.float32)
    return qkv(rng, np.float32, z), kwargs


@hypothesis.given(_calls())
def test_any_small_call(call):
    actual, truth = run_call(*call), true_call(*call)
    for what, x, y in _leaves(actual, truth):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=what)
