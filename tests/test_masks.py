"""Masks: typed pictures, rows that see no key, packed documents, lengths, and any small call."""

import functools

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
f32 = np.float32

# ---- pictures typed by hand; a row is a query, a column a key, # may attend


def picture(text, **arguments):
    """Return the arguments of a call, and the picture of its mask."""
    return arguments, text


PICTURES = {
    "causal": picture("#.... ##... ###.. ####.", is_causal=True),
    "causal, more queries": picture("#.. ##. ### ### ###", is_causal=True),
    "causal, offset 1": picture("##... ###.. ####. #####", is_causal=True, q_offset=1),
    "causal, bottom right": picture("###... ####.. #####. ######", is_causal=True, q_offset=2),
    "causal, offset -2": picture("..... ..... #.... ##...", is_causal=True, q_offset=-2),
    "causal, offset past the end": picture("##### ##### #####", is_causal=True, q_offset=9),
    "causal, offset as array": picture(
        "##... ###.. ####. #####", is_causal=True, q_offset=np.array([1])
    ),
    "window (1, 0)": picture("#.... ##... .##.. ..##.", local_window_size=(1, 0)),
    "window (0, 0)": picture("#.... .#... ..#.. ...#. ....# .....", local_window_size=(0, 0)),
    "window 1": picture("##... ###.. .###. ..###", local_window_size=1),
    "window (1, 2)": picture("###.. ####. .#### ..### ...##", local_window_size=(1, 2)),
    "window (2, None)": picture("##### ##### ##### .#### ..###", local_window_size=(2, None)),
    "window (None, 1)": picture("##... ###.. ####. #####", local_window_size=(None, 1)),
    "window wider than all": picture("##### ##### #####", local_window_size=(7, 9)),
    "window of 2 ** 40": picture("##### ##### #####", local_window_size=2**40, q_offset=2**29 - 1),
    "window just past the end": picture(
        "...## ....# ..... .....", local_window_size=(1, 1), q_offset=4
    ),
    "window far past the end": picture("..... .....", local_window_size=(1, 1), q_offset=2**29 - 1),
    "window before the start": picture(
        "..... #.... ##... ###..", local_window_size=(1, 1), q_offset=-2
    ),
    "window 1, causal": picture("#.... ##... .##.. ..##.", local_window_size=1, is_causal=True),
    "window (2, 1), causal, offset": picture(
        "##... ###.. .###. ..###", local_window_size=(2, 1), is_causal=True, q_offset=1
    ),
    "window (0, 0), offset 2": picture(
        "..#.. ...#. ....# .....", local_window_size=(0, 0), q_offset=2
    ),
    "window (1, 0), offset as array": picture(
        "..... #.... ##... .##..", local_window_size=(1, 0), q_offset=np.array([-1])
    ),
    "key length 3": picture("###.. ###.. ###..", key_value_seq_lengths=np.array([3])),
    "key length 3, causal": picture(
        "#.... ##... ###.. ###.. ###..", key_value_seq_lengths=np.array([3]), is_causal=True
    ),
    "query length 2": picture("##### ##### .....", query_seq_lengths=np.array([2])),
    "lengths 0": picture(
        "... ...", query_seq_lengths=np.array([0]), key_value_seq_lengths=np.array([0])
    ),
    "segments": picture(
        "##... ##... ..##. ..##. ....#", query_segment_ids=np.array([[0, 0, 1, 1, 2]])
    ),
    "segments, causal": picture(
        "#.... ##... ###.. ...#. ...##",
        query_segment_ids=np.array([[7, 7, 7, 1, 1]]),
        is_causal=True,
    ),
    "segments, window (1, 1)": picture(
        "##... ###.. .##.. ...## ...##",
        query_segment_ids=np.array([[0, 0, 0, 1, 1]]),
        local_window_size=1,
    ),
    "segments of keys": picture(
        "..##. ##... .....",
        query_segment_ids=np.array([[3, 1, 9]]),
        key_value_segment_ids=np.array([[1, 1, 3, 3, 2]]),
    ),
    "mask, causal": picture(
        "#... #... #.#. #.##", mask=np.array([[True, False, True, True]]), is_causal=True
    ),
    "bias, window": picture(
        "#.... #.#.. #.#.. ..#.#",
        bias=np.array([0, -np.inf, 3, np.finfo(np.float32).min, -1e30], np.float32),
        local_window_size=(2, 1),
    ),
}
SLOW_PICTURES = (  # the others have the same edges
    "causal, more queries",
    "causal, bottom right",
    "window (0, 0)",
    "window 1",
    "window wider than all",
    "window 1, causal",
    "key length 3",
    "query length 2",
    "segments",
    "segments, window (1, 1)",
)
FAST_PICTURES = tuple(name for name in PICTURES if name not in SLOW_PICTURES)


def _probabilities(implementation, chunk_size, T, S, kwargs):
    """Return probabilities [T, S] of equal logits: the output with unit vectors as values."""
    out = dot_product_attention(
        jnp.zeros((1, T, 1, 2)),
        jnp.zeros((1, S, 1, 2)),
        jnp.eye(S)[None, :, None],
        **kwargs,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    return out[0, :, 0]


def _lengths(text: str) -> tuple[int, int]:
    """Return T and S of a picture."""
    rows = text.split()
    return len(rows), len(rows[0])


@functools.cache
def _probabilities_by_name(names, implementation, chunk_size):
    """Return the probabilities of the named pictures, compiled as one program."""

    @jax.jit
    def run():
        probabilities = {}
        for name in names:
            kwargs, text = PICTURES[name]
            T, S = _lengths(text)
            probabilities[name] = _probabilities(implementation, chunk_size, T, S, kwargs)
        return probabilities

    return jax.device_get(run())


@pytest.mark.parametrize("name", few(PICTURES, FAST_PICTURES))
@pytest.mark.parametrize(
    "implementation, chunk_size",
    [pytest.param("reference", None, marks=pytest.mark.slow), ("xla", (3, 2))],
)
def test_pictures(name, implementation, chunk_size):
    kwargs, text = PICTURES[name]
    T, S = _lengths(text)
    expected = np.array([list(row) for row in text.split()]) == "#"
    seen = oracle.seen_by(np.zeros((1, T, 1, 1)), np.zeros((1, S, 1, 1)), **kwargs)
    np.testing.assert_array_equal(seen[0, 0], expected)
    names = FAST_PICTURES if name in FAST_PICTURES else SLOW_PICTURES
    p = _probabilities_by_name(names, implementation, chunk_size)[name]
    positive = p > 0
    if "bias" in kwargs:  # a probability may underflow
        np.testing.assert_array_equal(positive, expected & positive)
    else:
        np.testing.assert_array_equal(positive, expected)
    np.testing.assert_allclose(p.sum(1), expected.any(1), atol=1e-6)


def test_one_row_equals_its_row_of_the_full_call():
    """One query at offset t, as in decoding, sees what row t of the full call sees.

    `q_offset` is static, an array, and one array entry per batch entry.
    """
    query, key, value = qkv(np.random.default_rng(0), f32, Sizes(T=53, S=53))
    kwargs = {"is_causal": True, "local_window_size": (20, None), "chunk_size": 16}
    full = dot_product_attention(query, key, value, **kwargs)

    @jax.jit
    def row(query, offset):
        return dot_product_attention(query, key, value, q_offset=offset, **kwargs)

    for t in (0, 1, 15, 16, 52):
        out = row(query[:, t : t + 1], jnp.int32(t))
        np.testing.assert_allclose(out[:, 0], full[:, t], atol=2e-6)
    static = dot_product_attention(query[:, 16:17], key, value, q_offset=16, **kwargs)
    np.testing.assert_allclose(static[:, 0], full[:, 16], atol=2e-6)
    rows = np.stack([query[0, 3:5], query[1, 40:42]])
    offsets = np.array([3, 40])
    out = dot_product_attention(rows, key, value, q_offset=offsets, **kwargs)
    expected = np.stack([full[0, 3:5], full[1, 40:42]])
    np.testing.assert_allclose(out, expected, atol=2e-6)


# ---- rows that see no key

T = AWKWARD.T
S = AWKWARD.S
DEAD_ROWS = np.isin(np.arange(T), [0, 5, 17, 36])  # see no key, where a mask can say so
LOWEST = np.finfo(f32).min
ODD = np.arange(S) % 2 == 1


def _bias_that_hides(hidden):
    """Return a bias with the value `hidden` in dead rows."""
    bias = np.linspace(-1, 1, S)
    return np.where(DEAD_ROWS[:, None], hidden, bias).astype(f32)


NOTHING = {
    "mask": {"mask": np.broadcast_to(~DEAD_ROWS[:, None], (T, S))},
    "mask of all": {"mask": np.zeros((1, 1), bool)},
    "bias -inf": {"bias": _bias_that_hides(-np.inf)},
    "bias finfo.min": {"bias": _bias_that_hides(LOWEST)},
    "bias -inf of all": {"bias": np.full((T, 1), -np.inf, f32)},
    "bias of two kinds": {"bias": np.where(ODD, -np.inf, LOWEST).astype(f32)},
    "lengths": {"query_seq_lengths": np.array([20, 0]), "key_value_seq_lengths": np.array([53, 9])},
    "key length 0": {"key_value_seq_lengths": np.array([0, 17])},
    "segments": {
        "query_segment_ids": np.where(DEAD_ROWS, 99, 1)[None].repeat(2, 0),
        "key_value_segment_ids": np.array([[1], [2]]).repeat(S, 1),
    },
    "offset before": {"is_causal": True, "q_offset": -7},
    "offset past": {"local_window_size": (3, 3), "q_offset": 40},
    "offsets": {"local_window_size": (3, 0), "q_offset": np.array([-20, 51])},
    "mask against window": {"mask": np.tri(T, S, -5, dtype=bool), "local_window_size": (4, 1)},
    "mask against bias": {"mask": ~ODD, "bias": np.where(ODD, 0, -np.inf).astype(f32)},
}
SLOW_NOTHING = ("mask of all", "bias -inf of all", "mask against bias", "offset before")
FAST_NOTHING = tuple(name for name in NOTHING if name not in SLOW_NOTHING)


@functools.cache
def _run_nothing(names, implementation):
    """Return the named calls, and their results, compiled as one program."""
    calls = {}
    for name in names:
        kwargs = NOTHING[name]
        args, _ = CASES["plain"].inputs()
        calls[name] = args, {"scale": np.array(0.5, np.float32)} | kwargs
    return calls, run_calls(calls, implementation=implementation, chunk_size=(16, 24))


@pytest.mark.parametrize("name", few(NOTHING, FAST_NOTHING))
@pytest.mark.parametrize("implementation", few(IMPLEMENTATIONS, ["xla"]))
@pytest.mark.once
def test_rows_that_see_nothing(name, implementation):
    """A row that sees no key has output 0, lse -inf and gradient 0."""
    names = FAST_NOTHING if name in FAST_NOTHING else SLOW_NOTHING
    calls, results = _run_nothing(names, implementation)
    args, kwargs = calls[name]
    result = results[name]
    query, key, _ = args
    seen = oracle.seen_by(query, key, **NOTHING[name])  # b n t s
    dead = ~seen.any(-1).swapaxes(1, 2)  # b t n
    assert dead.any()
    assert np.all(result.out[dead] == 0)
    assert np.all(result.lse[dead] == -np.inf)
    assert np.all(result.grads["query"][dead] == 0)
    assert_truth(result, name, args, kwargs)


# ---- packed documents, lengths


def test_packed_documents_equal_documents_apart():
    """Documents packed into one row give the results of each document alone.

    Five more positions of padding, with an id of their own and NaN in them, change nothing.
    """
    rng = np.random.default_rng(4)
    lengths = [18, 1, 18]  # few, because each is a program
    ids = np.repeat([4, 1, 9], lengths)
    padded_ids = np.concatenate([ids, np.full(5, -1)])
    args = qkv(rng, f32, Sizes(B=1, T=37, S=37))
    query, key, value = args
    cotangent = cotangents(args)
    kwargs = {"is_causal": True, "chunk_size": (16, 12)}
    packed = run_call(args, kwargs | {"query_segment_ids": ids[None]}, cotangent=cotangent)
    padded = run_call(
        (query, _with_padding(key), _with_padding(value)),
        kwargs | {"query_segment_ids": ids[None], "key_value_segment_ids": padded_ids[None]},
        cotangent=cotangent,
    )
    start = 0
    for length in lengths:
        document = slice(start, start + length)
        start += length
        alone = run_call(
            _cut(args, document), {"is_causal": True}, cotangent=_cut(cotangent, document)
        )
        for result in (packed, padded):
            part = _cut(result, document)
            for what, expected, actual in _leaves(alone, part):
                np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-6, err_msg=what)


def _with_padding(x):
    padding = np.full_like(x[:, :5], np.nan)
    return np.concatenate([x, padding], 1)


def _cut(arrays, positions: slice):
    return jax.tree.map(lambda x: x[:, positions], arrays)


def _leaves(x: Result, y: Result):
    """Yield the name of each array of a result, and the arrays of two results."""
    yield "out", x.out, y.out
    yield "lse", x.lse, y.lse
    for name in x.grads:
        yield f"gradient of {name}", x.grads[name], y.grads[name]


@pytest.mark.parametrize("name", few(["queries", "keys", "both"], ["both"]))
def test_lengths_equal_a_shorter_call(name):
    args, _ = CASES["plain"].inputs()
    args = tuple(np.concatenate([x, x[::-1]]) for x in args)
    query, key, value = args
    q_lengths = np.array([0, 1, T, 19])
    kv_lengths = np.array([S, 0, 1, 31])
    kwargs = {"chunk_size": (16, 24)}
    if name == "keys":
        q_lengths = np.full(4, T)
    else:
        kwargs["query_seq_lengths"] = q_lengths
    if name == "queries":
        kv_lengths = np.full(4, S)
    else:
        kwargs["key_value_seq_lengths"] = kv_lengths
    result = run_call(args, kwargs)
    for b, (t, s) in enumerate(zip(q_lengths, kv_lengths, strict=True)):
        assert np.all(result.out[b, t:] == 0)
        assert np.all(result.lse[b, t:] == -np.inf)
        if s == 0:
            assert np.all(result.out[b] == 0)
        else:
            alone, _ = oracle.attention(query[b, :t], key[b, :s], value[b, :s])
            np.testing.assert_allclose(result.out[b, :t], alone, atol=4e-6)
        assert np.all(result.grads["key"][b, s:] == 0)
        assert np.all(result.grads["query"][b, t:] == 0)


@pytest.mark.parametrize(
    "length", [13, np.int64(13), np.array(13), np.array([13]), jnp.int32(13), [13]]
)
def test_length_of_an_unbatched_call(length):
    args, _ = CASES["plain"].inputs()
    query, key, value = (x[0] for x in args)
    out = dot_product_attention(
        query, key, value, key_value_seq_lengths=length, query_seq_lengths=length
    )
    expected = dot_product_attention(query[:13], key[:13], value[:13])
    np.testing.assert_allclose(out[:13], expected, atol=2e-6)
    assert np.all(out[13:] == 0)


# ---- any mask at all


@st.composite
def _calls(draw):
    """Draw the operands and keyword arguments of a small call."""

    def size(most, least=1):
        return draw(st.integers(least, most))

    z = Sizes(B=size(2), T=size(9), S=size(9), K=size(2), G=size(2), H=size(3), D=size(3))
    side = st.one_of(st.none(), st.integers(0, 5))
    window = st.one_of(st.none(), st.integers(0, 4), st.tuples(side, side))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kwargs = {
        "chunk_size": (size(6), size(6)),
        "is_causal": draw(st.booleans()),
        "local_window_size": draw(window),
    }

    def broadcast_shape():
        full = [rng.choice([1, n]) for n in (z.B, z.N, z.T, z.S)]
        return tuple(full[draw(st.integers(0, 4)) :])

    offset = draw(st.sampled_from(["none", "static", "array"]))
    if offset == "static":
        kwargs["q_offset"] = size(9, -9)
    if offset == "array":
        kwargs["q_offset"] = rng.integers(-9, 9, z.B)
    if draw(st.booleans()):
        kwargs["query_seq_lengths"] = rng.integers(0, z.T, z.B, endpoint=True)
    if draw(st.booleans()):
        kwargs["key_value_seq_lengths"] = rng.integers(0, z.S, z.B, endpoint=True)
    if draw(st.booleans()):
        kwargs["query_segment_ids"] = rng.integers(0, 2, (z.B, z.T))
        kwargs["key_value_segment_ids"] = rng.integers(0, 2, (z.B, z.S))
    if draw(st.booleans()):
        kwargs["mask"] = rng.random(broadcast_shape()) < 0.6
    if draw(st.booleans()):
        bias = rng.standard_normal(broadcast_shape())
        hidden = rng.random(bias.shape) < 0.2
        kwargs["bias"] = np.where(hidden, -np.inf, bias).astype(f32)
    return qkv(rng, f32, z), kwargs


def _assert_as_the_oracle(call):
    actual, truth = run_call(*call), true_call(*call)
    for what, x, y in _leaves(actual, truth):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=what)


@hypothesis.settings(max_examples=5)
@hypothesis.given(_calls())
def test_any_small_call(call):
    _assert_as_the_oracle(call)


@pytest.mark.slow
@hypothesis.settings(max_examples=100)
@hypothesis.given(_calls())
def test_many_small_calls(call):
    _assert_as_the_oracle(call)
