"""Few queries on a GPU read keys in place (memeff/chunked/few_queries.py); here it runs on CPUs."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import few

import memeff
from memeff import dot_product_attention, masks, scores
from memeff.chunked import few_queries
from memeff.device import pretend_device

f32 = np.float32
slow = pytest.mark.slow
B, T, S, K, G, H, D = 3, 2, 96, 2, 3, 16, 11
LENGTHS = np.array([0, 37, S], np.int32)
RNG = np.random.default_rng(0)
Q, KEY, VALUE, DOUT = (
    RNG.standard_normal((B, n, heads, d)).astype(f32)
    for n, heads, d in ((T, K * G, H), (S, K, H), (S, K, D), (T, K * G, D))
)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Choose as for a GPU without kernels, with three splits."""
    monkeypatch.setattr(few_queries, "SPLIT", 64)
    monkeypatch.setattr(few_queries, "LEAST_SPLIT", 32)
    monkeypatch.setattr(few_queries, "STEP", 32)
    with pretend_device("gpu", "8.0"):
        yield


IDS = RNG.integers(0, 2, (B, S))
CALLS = {
    "plain": {},
    "lengths": dict(key_value_seq_lengths=LENGTHS, query_seq_lengths=np.array([2, 2, 1])),
    "decoding": dict(is_causal=True, q_offset=LENGTHS - T, key_value_seq_lengths=LENGTHS),
    "window": dict(local_window_size=(20, 3), q_offset=50, logits_soft_cap=2.0),
    "segments": dict(query_segment_ids=IDS[:, :T], key_value_segment_ids=IDS),
    "bias": dict(
        bias=RNG.standard_normal((K * G, 1, S)).astype(f32), scale=0.3, sinks=np.ones(K * G, f32)
    ),
    "mask": dict(mask=RNG.integers(0, 2, (B, 1, T, S)).astype(bool)),
}
FUNCTIONS = {
    "score_fn": dict(
        score_fn=scores.alibi(scores.alibi_slopes(K * G)), is_causal=True, q_offset=60
    ),
    "mask_fn": dict(mask_fn=masks.documents(IDS), q_offset=7),
    "dropout": dict(dropout_rng=jax.random.key(1), dropout_rate=0.3),
}


def explained(**options):
    return memeff.explain(Q, KEY, VALUE, **options)


# Decoding has lengths, too, and the mask hides pairs as segments do.
FAST = [(name, jnp.float32) for name in ("plain", "decoding", "window", "bias", "mask")]


@pytest.mark.parametrize(
    "name, dtype", few(itertools.product(CALLS, [jnp.float32, jnp.bfloat16]), FAST)
)
def test_every_feature_is_as_good_as_plain_attention(name, dtype):
    assert "few queries: keys are read in place, in splits of 32" in explained(**CALLS[name])
    arrays = [x.astype(dtype) for x in (Q, KEY, VALUE)]
    results = dot_product_attention(*arrays, return_residual=True, **CALLS[name])
    truth = oracle.attention(*(np.asarray(x, np.float64) for x in arrays), **CALLS[name])
    atol = 3e-6 if dtype == f32 else 2e-2
    for x, y in zip(results, truth, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, atol=atol, rtol=1e-6)


@slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_dropout_are_those_of_the_loop(name):
    assert "few queries" in explained(**FUNCTIONS[name])
    out = dot_product_attention(Q, KEY, VALUE, **FUNCTIONS[name])
    loop = dot_product_attention(Q, KEY, VALUE, chunk_size=32, **FUNCTIONS[name])
    assert "few queries" not in explained(chunk_size=32, **FUNCTIONS[name])
    np.testing.assert_allclose(out, loop, atol=2e-6)


def test_gradients():
    call = functools.partial(dot_product_attention, **CALLS["decoding"])
    out, pull = jax.vjp(call, Q, KEY, VALUE)
    dq, dk, dv = pull(DOUT)
    truth = oracle.gradients(
        Q, KEY, VALUE, dout=DOUT, dlse=np.zeros((B, T, K * G)), **CALLS["decoding"]
    )
    for x, name in ((dq, "query"), (dk, "key"), (dv, "value")):
        np.testing.assert_allclose(x, truth[name], atol=3e-6)


def run(q, k, v):
    return jax.jit(
        functools.partial(dot_product_attention, return_residual=True, **CALLS["decoding"])
    )(q, k, v)


@pytest.mark.parametrize("fill", [np.nan, *(pytest.param(x, marks=slow) for x in (np.inf, 1e38))])
def test_what_nobody_sees_reaches_no_result(fill):
    """In keys it changes no bit. In values its rows are computed again, to within rounding."""
    hidden = (np.arange(S) >= LENGTHS[:, None])[..., None, None]
    clean = run(Q, *(np.where(hidden, 0, x) for x in (KEY, VALUE)))
    dirty = run(Q, np.where(hidden, fill, KEY), np.where(hidden, 0, VALUE))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    dirty = run(Q, KEY, np.where(hidden, f32(fill), VALUE))
    for x, y in zip(clean, dirty, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)
        np.testing.assert_array_equal(x[2], y[2])  # the sequence that hides nothing


def test_nan_reaches_the_rows_and_heads_that_see_it_and_no_others():
    clean = run(Q, KEY, VALUE)[0]
    key, value = KEY.copy(), VALUE.copy()
    key[1, 5, 0, 3] = np.nan
    value[2, S - 1, 1, 4] = np.nan
    out = np.asarray(run(Q, key, value)[0])
    wrong = np.zeros(out.shape, bool)
    wrong[1, :, :G] = True
    wrong[2, -1, G:, 4] = True  # only the last row sees the last key
    np.testing.assert_array_equal(np.isnan(out), wrong)
    np.testing.assert_allclose(out[~wrong], clean[~wrong], atol=2e-6)


def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    whole = run(Q, KEY, VALUE)
    lengths = dict(q_offset=LENGTHS[1:2] - T, key_value_seq_lengths=LENGTHS[1:2])
    alone = dot_product_attention(
        *(x[1:2] for x in (Q, KEY, VALUE)), is_causal=True, return_residual=True, **lengths
    )
    for x, y in zip(whole, alone, strict=True):
        np.testing.assert_array_equal(x[1:2], y)


@slow
def test_when_the_loop_runs_instead():
    for sizes, options in (
        ((T, S + 1), {}),  # S has no divisor that serves
        ((22, S), {}),  # too many rows: 264
        ((T, S), dict(chunk_size=16)),
        ((T, S), dict(qk_transform=memeff.transforms.rotary())),
    ):
        t, s = sizes
        q = np.ones((B, t, 12, H), f32)
        k = np.ones((B, s, K, H), f32)
        assert "few queries" not in memeff.explain(q, k, k, **options)
        out = dot_product_attention(q, k, k, **options)
        np.testing.assert_allclose(out, 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.int8, pytest.param(jnp.float8_e4m3fn, marks=slow)])
def test_8_bits_are_read_in_place_and_pages_by_the_loop(dtype):
    """Both read the same numbers, so they agree to within rounding."""
    page = 32
    plain = memeff.KVCache.zeros(B, S, K, H, dtype, value_size=D).append(KEY, VALUE, LENGTHS)
    paged = memeff.PagedKVCache.zeros(
        B * S // page, page, K, H, dtype, batch=B, pages_per_sequence=S // page, value_size=D
    )
    table = np.random.default_rng(0).permutation(B * S // page).reshape(B, -1)
    paged = paged.with_sequences(table, np.zeros(B, int)).append(KEY, VALUE, LENGTHS)
    attend = jax.jit(lambda cache, q: cache.attend(q, counts=np.minimum(LENGTHS, T)))
    out = attend(plain, Q)
    np.testing.assert_allclose(out, attend(paged, Q), atol=2e-6)
    exact = dot_product_attention(
        Q, KEY, VALUE, query_seq_lengths=np.minimum(LENGTHS, T), **CALLS["decoding"]
    )
    assert 1e-4 < np.abs(out - exact).max() < 0.2
    text = attend.lower(plain, Q).as_text()
    assert f"tensor<{B}x{K * G * T}x{K * H}xf32>" in text  # queries in the columns of their heads
    dirty = dataclasses.replace(plain, value_scale=plain.value_scale.at[1, :, 40].set(np.nan))
    np.testing.assert_allclose(attend(dirty, Q), out, atol=2e-6)
