"""`memeff.KVCache`: decoding equals the full call; what happens at the edges; memory."""

import dataclasses
import functools
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import few, raising
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from sharded import collectives
from small_calls import assert_bits, assert_close, assert_in_place

import memeff
from memeff import KVCache, dot_product_attention, masks, scores

f32 = np.float32
slow = pytest.mark.slow
K, G, H, D, S = 2, 2, 8, 5, 21
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(monkeypatch):
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


def tokens(*leads, dtype=f32):
    """Return queries, keys and values with the leading dims [B, T]."""
    shapes = ((K * G, H), (K, H), (K, D))
    return tuple(RNG.standard_normal((*leads, *shape)).astype(dtype) for shape in shapes)


# ---- decoding equals the full call


@pytest.mark.parametrize("T", few(range(1, 9), [5]))
def test_rows_at_every_offset_are_those_of_the_full_causal_call(T):
    q, k, v = tokens(1, S)
    full, full_lse = oracle.attention(q, k, v, is_causal=True)
    offsets = np.arange(S - T + 1)
    window = offsets[:, None] + np.arange(T)  # b t: positions of the new tokens
    # entries from the length on are other keys, which nobody may see
    written = (np.arange(S) < offsets[:, None])[..., None, None]
    keys, values = (jnp.asarray(np.where(written, x, 9 * x)) for x in (k, v))
    before = KVCache(keys, values, jnp.int32(offsets))
    cache = before.append(k[0, window], v[0, window])
    out, lse = cache.attend(q[0, window], return_residual=True)
    np.testing.assert_allclose(out, full[0, window], atol=3e-6)
    np.testing.assert_allclose(lse, full_lse[0, window], atol=3e-6)


def ragged(dtype, fill):
    """Return a cache of sequences of 0, 1, 5 and 21 tokens, filled up with `fill`, and queries."""
    rng = np.random.default_rng(1)
    lengths = np.array([0, 1, 5, S], np.int32)
    q = rng.standard_normal((4, 3, K * G, H)).astype(dtype)
    k, v = (rng.standard_normal((4, S, K, d)).astype(dtype) for d in (H, D))
    seen = (np.arange(S) < lengths[:, None])[..., None, None]
    k, v = (np.where(seen, x, np.asarray(fill, dtype)) for x in (k, v))
    return KVCache(jnp.asarray(k), jnp.asarray(v), jnp.asarray(lengths)), q


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=slow)])
def test_what_is_not_written_changes_no_bit(dtype):
    counts = np.array([0, 1, 3, 3])

    @jax.jit
    def attend(cache, q):
        return cache.attend(q, counts=counts, return_residual=True)

    cache, q = ragged(dtype, 0)
    results = attend(cache, q)
    for fill in (np.nan, np.inf, 1e30):
        assert_bits(results, attend(ragged(dtype, fill)[0], q))
    out, lse = (np.asarray(x, np.float64) for x in results)
    assert (out[0] == 0).all() and (lse[0] == -np.inf).all()
    assert (out[1, 1:] == 0).all()  # rows beyond counts
    for b in range(1, 4):
        first = int(cache.lengths[b]) - counts[b]
        length = int(cache.lengths[b])
        row, _ = oracle.attention(
            *(q[b : b + 1, : counts[b]], cache.key[b : b + 1, :length]),
            cache.value[b : b + 1, :length],
            is_causal=True,
            q_offset=first,
        )
        np.testing.assert_allclose(out[b, : counts[b]], row[0], atol=3e-6 if dtype == f32 else 2e-2)


@slow
def test_a_ragged_prompt_then_single_tokens():
    """Prompts of 2, 0 and 4 tokens, then one token for each: as the full calls of each sequence."""
    q, k, v = tokens(3, 8)
    counts = np.array([2, 0, 4])
    cache = KVCache.zeros(3, 6, K, H, value_size=D).append(k[:, :4], v[:, :4], counts)
    assert cache.lengths.tolist() == [2, 0, 4]
    cache = cache.append(k[:, 4:5], v[:, 4:5])
    out = cache.attend(q[:, 4:5])
    for b, count in enumerate(counts):
        rows = [*range(count), 4]
        full, _ = oracle.attention(*(x[b : b + 1, rows] for x in (q, k, v)), is_causal=True)
        np.testing.assert_allclose(out[b, 0], full[0, -1], atol=3e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=slow)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype):
    rng = np.random.default_rng(2)
    S, B, T = 300, 64, 2
    q = rng.standard_normal((B, T, 8, 16)).astype(dtype)
    k, v = (rng.standard_normal((B, S, 2, 16)).astype(dtype) for _ in range(2))
    lengths = rng.integers(2, S + 1, B).astype(np.int32)

    @jax.jit
    def attend(q, k, v, lengths):
        return KVCache(k, v, lengths).attend(q, return_residual=True)

    whole = attend(q, k, v, lengths)
    for size in (1, 7):
        rows = slice(5, 5 + size)
        part = attend(*(x[rows] for x in (q, k, v, lengths)))
        for x, y in zip(whole, part, strict=True):
            assert_bits(x[rows], y)


# ---- a full cache


def test_a_full_cache_is_refused_where_lengths_are_known():
    _, k, v = tokens(2, 5)
    cache = KVCache.zeros(2, 6, K, H, value_size=D).append(k, v, [5, 3])
    with pytest.raises(ValueError, match="sequence 0 has 8 tokens.*room for 6.*larger capacity"):
        cache.append(k[:, :3], v[:, :3])
    assert cache.append(k[:, :3], v[:, :3], [1, 3]).lengths.tolist() == [6, 6]


def test_under_jit_a_full_cache_overwrites_nothing_and_says_so():
    q, k, v = tokens(2, 5)
    cache = KVCache.zeros(2, 6, K, H, value_size=D).append(k, v, [5, 3])

    @jax.jit
    def step(cache, q, k, v):
        cache = cache.append(k, v)
        return cache, cache.attend(q)

    after, out = step(cache, q[:, :3], k[:, :3], v[:, :3])
    assert after.overflowed.tolist() == [True, False]
    assert after.lengths.tolist() == [8, 6]
    assert_bits(after.key[0, :5], k[0])
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
    full, _ = oracle.attention(
        *(np.concatenate([x[1:, :3], x[1:, :3]], 1) for x in (q, k, v)), is_causal=True
    )
    np.testing.assert_allclose(out[1], full[0, 3:], atol=3e-6)
    with pytest.raises(ValueError, match="the cache is full: sequence 0 has 8 tokens"):
        after.check()
    with pytest.raises(ValueError, match="the cache is full"):
        after.attend(q[:, :1])
    cache.check()


# ---- rings


@pytest.mark.parametrize(
    "T, capacity", [(3, 6), *(pytest.param(*x, marks=slow) for x in ((1, 4), (2, 9)))]
)
def test_a_ring_equals_the_full_call_with_a_window(T, capacity):
    q, k, v = tokens(2, S)
    options = dict(
        score_fn=scores.alibi(scores.alibi_slopes(K * G)),
        mask_fn=masks.prefix([9, 30]) | ~masks.dilated(3),
        logits_soft_cap=5.0,
        sinks=np.linspace(-1, 1, K * G, dtype=f32),
    )
    full = dot_product_attention(q, k, v, is_causal=True, local_window_size=(3, 0), **options)
    cache = KVCache.zeros(2, capacity, K, H, value_size=D, window=3)

    @jax.jit
    def step(cache, q, k, v):
        cache = cache.append(k, v)
        return cache, cache.attend(q, **options)

    for first in range(0, S - T + 1, T):
        new = slice(first, first + T)
        cache, out = step(cache, q[:, new], k[:, new], v[:, new])
        np.testing.assert_allclose(out, full[:, new], atol=3e-6)
    assert not cache.overflowed.any()


@slow
def test_a_ring_takes_plain_functions_and_ragged_counts():
    q, k, v = tokens(2, 12)
    cache = KVCache.zeros(2, 6, K, H, value_size=D, window=2)
    for first, counts in ((0, [4, 1]), (4, [3, 4]), (8, [2, 4])):
        new = slice(first, first + 4)
        cache = cache.append(k[:, new], v[:, new], counts)
        out = cache.attend(q[:, new], counts=counts, score_fn=distance, score_params=jnp.float32(2))
    for b, rows in enumerate(([0, 1, 2, 3, 4, 5, 6, 8, 9], [0, *range(4, 12)])):
        call = [x[b : b + 1, rows] for x in (q, k, v)]
        full = dot_product_attention(
            *call, is_causal=True, local_window_size=(2, 0), score_fn=distance, score_params=2.0
        )
        count = (2, 4)[b]
        np.testing.assert_allclose(out[b, :count], full[0, -count:], atol=3e-6)


def distance(score, batch, head, q_pos, k_pos, params):
    return score - params * (q_pos - k_pos) * (k_pos % 3)


def test_a_ring_gives_up_what_it_still_has_and_no_more():
    """Of 6 slots and a window of 3, three tokens; under jit a fourth makes the sequence NaN."""
    q, k, v = tokens(2, 13)
    ring = KVCache.zeros(2, 6, K, H, value_size=D, window=3)
    for t in range(12):
        ring = ring.append(k[:, t : t + 1], v[:, t : t + 1])
    with pytest.raises(ValueError, match="sequence 1 gave up more than capacity - window = 3"):
        ring.truncate([9, 8])
    truncate = jax.jit(lambda ring, lengths: ring.truncate(lengths))
    ring = truncate(ring, jnp.array([9, 8])).append(k[:, 12:], v[:, 12:])
    assert ring.overflowed.tolist() == [False, True]
    out = jax.jit(lambda ring, q: ring.attend(q))(ring, q[:, 12:])
    rows = [6, 7, 8, 12]
    expected, _ = oracle.attention(q[:1, 12:], k[:1, rows], v[:1, rows])
    np.testing.assert_allclose(out[0], expected[0], atol=3e-6)
    assert np.isnan(out[1]).all()
    short = KVCache.zeros(2, 6, K, H, value_size=D, window=3).append(k[:, :6], v[:, :6])
    assert short.truncate([1, 0]).lengths.tolist() == [1, 0]  # nothing was replaced yet


def test_a_ring_that_gives_up_tokens_twice():
    """What newer tokens replaced stays replaced, also when those were given up before."""
    q, k, v = tokens(2, 13)
    ring = KVCache.zeros(2, 6, K, H, value_size=D, window=3)
    for t in range(12):
        ring = ring.append(k[:, t : t + 1], v[:, t : t + 1])
    once = ring.truncate([10, 10])
    assert once.truncate([10, 9]).lengths.tolist() == [10, 9]
    with pytest.raises(ValueError, match="sequence 1 gave up more than capacity - window = 3"):
        once.truncate([9, 8])
    longer = once.append(k[:, 10:11], v[:, 10:11])  # token 11 is still replaced by itself alone
    with pytest.raises(ValueError, match="sequence 0 gave up"):
        longer.truncate([8, 9])
    lengths = jnp.array([9, 8])

    @jax.jit
    def attend(ring):
        ring = ring.truncate(lengths).append(k[:, 12:], v[:, 12:])
        return ring.overflowed, ring.attend(q[:, 12:])

    overflowed, out = attend(once)
    assert overflowed.tolist() == [False, True]
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()


@pytest.mark.parametrize("window", [None, 3])
def test_a_row_of_the_batch_is_emptied_for_a_new_sequence(window):
    """The old sequence overflowed, filled the ring several times, or lost its drafts."""
    q, k, v = tokens(3, 6)

    @jax.jit
    def start_anew(cache):
        for _ in range(4):
            cache = cache.append(k[:, :3], v[:, :3], [3, 1, 1])
        wrong = cache.keep_drafts(3, np.array([[0, 1, 2], [7, 0, 0], [0, 1, 2]]), [3, 1, 3])
        emptied = wrong.truncate([0, 0, 9])
        return wrong.overflowed, emptied.append(k[:, 3:5], v[:, 3:5], [2, 2, 0])

    def attend(cache):
        return cache.append(k[:, 5:], v[:, 5:]).attend(q[:, 5:])

    cache = KVCache.zeros(3, 6, K, H, value_size=D, window=window)
    overflowed, cache = start_anew(cache)
    assert overflowed.tolist() == [window is None, True, False]
    assert cache.lengths.tolist() == [2, 2, 4]
    alone, _ = oracle.attention(*(x[:2, 3:] for x in (q, k, v)), is_causal=True)
    for out in (attend(cache), jax.jit(attend)(cache)):
        np.testing.assert_allclose(out[:2], alone[:, 2:], atol=3e-6)


def test_lost_drafts_leave_the_tokens_before_them():
    """Three drafts after two tokens are lost under jit, and two tokens are appended in vain."""
    _, k, v = tokens(2, 5)
    cache = KVCache.zeros(2, 8, K, H, value_size=D).append(k, v)

    @jax.jit
    def lose(cache, lengths):
        cache = cache.keep_drafts(3, np.full((2, 1), 3), [1, 1]).append(k[:, :2], v[:, :2])
        return cache.truncate(lengths)

    kept = lose(cache, np.array([2, 3]))
    assert kept.lengths[0] == 2 and kept.overflowed.tolist() == [False, True]
    assert_bits(kept.key[0, :2], k[0, :2])


def test_a_ring_that_gave_up_tokens_attends_to_what_it_still_has():
    """Of 6 slots and a window of 3: token 8 sees token 5, which token 11 replaced."""
    q, k, v = tokens(2, 12)
    ring = KVCache.zeros(2, 6, K, H, value_size=D, window=3)
    for t in range(12):
        ring = ring.append(k[:, t : t + 1], v[:, t : t + 1])
    ring = ring.truncate([10, 9])
    attend = jax.jit(lambda ring, q, counts: ring.attend(q, counts=counts))
    out = ring.attend(q[:, 9:10], counts=[1, 0])
    expected, _ = oracle.attention(q[:1, 9:10], k[:1, 6:10], v[:1, 6:10])
    np.testing.assert_allclose(out[0], expected[0], atol=3e-6)
    with pytest.raises(ValueError, match="tokens of sequence 1 that see tokens which the ring"):
        ring.attend(q[:, 8:9])
    out = attend(ring, q[:, 9:10], jnp.array([1, 1]))
    np.testing.assert_allclose(out[0], expected[0], atol=3e-6)
    assert np.isnan(out[1]).all()
    ring = ring.truncate(9).append(k[:, 9:10], v[:, 9:10])
    assert np.isfinite(ring.attend(q[:, 9:10])).all()
    assert np.isnan(attend(ring, q[:, 8:10], jnp.array([2, 2]))).all()
    kept = ring.keep_drafts(1, [[0], [0]], 1)
    with pytest.raises(ValueError, match="tokens of sequence 0 that see tokens which the ring"):
        kept.attend(q[:, 8:10])


@slow
@pytest.mark.parametrize("from_arrays", [False, True])
def test_a_ring_in_any_history_is_right_or_refuses(from_arrays):
    """Appended tokens, truncations and kept drafts; the text of the sequence is kept beside it."""
    rng = np.random.default_rng(6)
    capacity, window = 6, 3
    refusals = []
    for _ in range(2):
        ring = KVCache.zeros(1, capacity, 1, H, value_size=D, window=window)
        if from_arrays:
            ring = KVCache(ring.key, ring.value, ring.lengths, window=window)
        text = np.zeros((0, H + D), f32)
        for action in rng.choice(["append", "append", "truncate", "keep_drafts"], 20):
            T = int(rng.choice([1, capacity - window]))
            if action == "append":
                new = rng.standard_normal((T, H + D)).astype(f32)
                text = np.concatenate([text, new])
                ring = ring.append(new[None, :, None, :H], new[None, :, None, H:])
                q = rng.standard_normal((1, T, 1, H)).astype(f32)
                expected, _ = oracle.attention(
                    *(q, text[None, :, None, :H], text[None, :, None, H:]),
                    is_causal=True,
                    local_window_size=(window, 0),
                    q_offset=len(text) - T,
                )
                np.testing.assert_allclose(ring.attend(q), expected, atol=3e-6)
                continue
            T = min(T + 1, len(text))
            path = rng.permutation(T)[: rng.integers(T + 1)]
            rows = np.arange(len(text) - T)
            try:
                if action == "truncate":
                    ring = ring.truncate([len(rows)])
                elif T:
                    padded = np.pad(path, (0, T - len(path)))
                    ring = ring.keep_drafts(T, padded[None], [len(path)])
                    rows = np.concatenate([rows, rows.size + path])
            except ValueError as error:
                assert "gave up more than capacity - window = 3 tokens" in str(error)
                refusals.append(action)
            else:
                text = text[rows]
    assert set(refusals) == {"truncate", "keep_drafts"}


def test_a_ring_checks_functions_as_every_call_does():
    _, k, v = tokens(2, 1)
    q = k[:, :, :1]
    options = [
        dict(score_fn=scores.alibi(jnp.ones(3))),
        dict(mask_fn=masks.causal() | masks.prefix([1, 2, 3])),
        dict(score_fn=scores.alibi(jnp.ones(1)), score_params=1.0),
        dict(mask_fn=masks.causal(), mask_params=1.0),
        dict(score_params=1.0),
        dict(mask_params=1.0),
        dict(score_fn=lambda score, batch, head, q_pos, k_pos: score),
        dict(mask_fn=3),
        dict(batch_axis="x"),
    ]
    for option in options:
        messages = []
        for window in (None, 3):
            cache = KVCache.zeros(2, 6, K, H, value_size=D, window=window).append(k, v)
            with pytest.raises((TypeError, ValueError)) as error:
                cache.attend(jnp.repeat(q, K, axis=2), **option)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize("paged", [False, True])
def test_lengths_to_keep_that_are_no_lengths(paged):
    """Negative ones are refused where they are known, and unsigned ones do not wrap."""
    _, k, v = tokens(2, 3)
    cache = KVCache.zeros(2, 6, K, H, value_size=D)
    if paged:
        cache = memeff.PagedKVCache.zeros(2, 6, K, H, value_size=D, batch=2, pages_per_sequence=1)
        cache = cache.with_sequences([[0], [1]], [0, 0])
    cache = cache.append(k, v)
    with pytest.raises(ValueError, match="lengths must be at least 0; got -3"):
        cache.truncate([-3, 1])
    truncate = jax.jit(lambda cache, lengths: cache.truncate(lengths).lengths)
    assert truncate(cache, jnp.array([-3, 1])).tolist() == [0, 1]
    assert truncate(cache, np.array([2**32 - 1, 2], np.uint32)).tolist() == [3, 2]


# ---- transforms and memory


def test_scan_and_vmap_and_gradients():
    q, k, v = (x[:, :6] for x in tokens(2, 6))

    def decoded(q, k, v):
        """Decode token by token in a scan, under vmap over two groups of sequences."""

        def group(q, k, v):
            def step(cache, qkv):
                q, k, v = (x[:, None] for x in qkv)
                cache = cache.append(k, v)
                return cache, cache.attend(q)[:, 0]

            cache = KVCache.zeros(1, 6, K, H, value_size=D)
            _, out = jax.lax.scan(step, cache, [x.swapaxes(0, 1) for x in (q, k, v)])
            return out.swapaxes(0, 1)

        return jax.vmap(group)(*(x[:, None] for x in (q, k, v)))[:, 0]

    def full(q, k, v):
        return dot_product_attention(q, k, v, is_causal=True)

    dout = np.random.default_rng(3).standard_normal((2, 6, K * G, D)).astype(f32)
    run = jax.jit(with_gradients, static_argnums=0)
    assert_close(*(run(f, dout, q, k, v) for f in (decoded, full)), atol=1e-5)


def with_gradients(f, dout, *arguments):
    """Return the result of f and its gradients."""
    out, pull = jax.vjp(f, *arguments)
    return out, *pull(dout)


CONVERTS = importlib.metadata.version("jaxlib").startswith("0.10.")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("loop", [True, pytest.param(False, marks=slow)])
def test_append_is_in_place_and_attention_copies_nothing_of_the_cache(dtype, loop):
    """Donated and in a scan: outputs alias inputs; temporary memory is far below the cache's."""
    if CONVERTS and dtype == jnp.bfloat16:
        pytest.skip("XLA:CPU before JAX 0.11 converts a bfloat16 array that a scatter writes to")
    wide = jnp.float32 if dtype == jnp.int8 else dtype
    q, k = (jax.ShapeDtypeStruct((2, 1, n, 64), wide) for n in (8, 2))
    cache = jax.eval_shape(lambda: KVCache.zeros(2, 16384, 2, 64, dtype))

    def step(cache, q, k):
        cache = cache.append(k, k)
        return cache, cache.attend(q)

    def steps(cache, q, k):
        def body(cache, _):
            return step(cache, q, k)

        return jax.lax.scan(body, cache, None, length=3)

    program = jax.jit(steps if loop else step, donate_argnums=0).lower(cache, q, k).compile()
    assert_in_place(program, cache)


def test_attention_converts_no_cache_of_8_bits():
    """XLA:CPU computes float8 in float16, and would convert the whole before a loop over tiles."""
    dtype = jnp.float8_e4m3fn
    q = jax.ShapeDtypeStruct((2, 1, 8, 64), f32)
    plain = jax.eval_shape(lambda: KVCache.zeros(2, 16384, 2, 64, dtype))
    paged = jax.eval_shape(
        lambda: memeff.PagedKVCache.zeros(512, 64, 2, 64, dtype, batch=2, pages_per_sequence=256)
    )
    attend = jax.jit(lambda caches, q: [cache.attend(q) for cache in caches])
    program = attend.lower([plain, paged], q).compile()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(plain))
    assert program.memory_analysis().temp_size_in_bytes < size / 4


@pytest.mark.parametrize(
    "kind, dtype, window",
    [
        (AxisType.Auto, f32, None),
        (AxisType.Explicit, f32, None),
        (AxisType.Auto, jnp.int8, None),
        pytest.param(AxisType.Auto, jnp.int8, 7, marks=slow),
        pytest.param(AxisType.Explicit, f32, 7, marks=slow),
    ],
)
def test_batch_and_heads_over_devices_need_no_message_but_lengths(kind, dtype, window):
    """The longest length, and for a ring all lengths."""
    mesh = jax.make_mesh(
        (2, 2), ("batch", "heads"), axis_types=(kind,) * 2, devices=jax.devices()[:4]
    )
    lay_out = functools.partial(shard, mesh)
    q, k, v = tokens(4, 3)
    counts = np.array([2, 0, 1, 2])
    cache = KVCache.zeros(4, 9, K, H, dtype, value_size=D, window=window)
    cache = cache.append(k[:, :2], v[:, :2], counts)

    @jax.jit
    def step(cache, q, k, v):
        cache = cache.append(k, v)
        return cache, cache.attend(q)

    new = [x[:, 2:] for x in (q, k, v)]
    expected = step(cache, *new)
    text = step.lower(*jax.tree.map(lay_out, (cache, *new))).compile().as_text()
    messages = [line.split(" = ")[1].split()[0] for line in collectives(text)]
    assert messages
    if window is None:
        assert set(messages) <= {"s32[]", "pred[]"}
    assert all(name.startswith("s32[") or name == "pred[]" for name in messages), messages
    result = step(*jax.tree.map(lay_out, (cache, *new)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-6), result, expected)


def on_explicit_mesh(cache: KVCache, *dims: str | None, devices: int = 2) -> KVCache:
    """Return a cache whose dims [batch, token, head, head dim] lie on axes of an Explicit mesh."""
    mesh = jax.make_mesh((devices, devices), ("x", "y"), devices=jax.devices()[: devices**2])
    batch, token, head, head_dim = (*dims, None, None, None, None)[:4]
    specs = {
        1: PartitionSpec(batch),
        3: PartitionSpec(batch, head, token),  # scales
        4: PartitionSpec(batch, token, head, head_dim),
    }
    return jax.tree.map(lambda x: jax.device_put(x, jax.NamedSharding(mesh, specs[x.ndim])), cache)


WRITTEN = [
    (("x",), ("x",)),
    (("x", None, "y"), ("x", None, "y")),
    ((None, None, "y"), ()),
]
REFUSED = [
    ((), ("x",)),
    (("x",), ()),
    (("x",), ("y",)),
    ((), (None, None, "y")),
    ((None, None, "x"), (None, None, "y")),
    ((), (None, None, None, "y")),
]


@pytest.mark.parametrize(
    "dtype, dims, given",
    [
        *(("float32", *x) for x in WRITTEN + REFUSED),
        ("int8", *WRITTEN[1]),
        *(pytest.param("int8", *x, marks=slow) for x in (WRITTEN[0], WRITTEN[2], *REFUSED)),
    ],
)
def test_a_cache_on_an_explicit_mesh(dtype, dims, given):
    """Tokens that are sharded as the cache is are written to it, others refused in words."""
    x = np.random.default_rng(0).normal(size=(2, 2, 4, 8)).astype(np.float32)

    def append_and_keep(cache, x):
        path = np.zeros((2, 1), int)
        return cache.append(x, x).truncate([4, 3]).keep_drafts(1, path, cache.lengths - 1)

    whole = jax.jit(lambda x: KVCache.zeros(2, 9, 4, 8, dtype).append(x, x))(x)
    cache = on_explicit_mesh(whole, *dims)
    new = on_explicit_mesh(x, *given)
    if dims == given or not given and dims[0] is None:
        run = jax.jit(append_and_keep) if given else append_and_keep
        jax.tree.map(np.testing.assert_array_equal, run(cache, new), run(whole, x))
        return
    one, other = ("".join(filter(None, x)) or "no axis" for x in (dims, given))
    with pytest.raises(ValueError, match=f"sharded over {one}, .* over {other}: shard them alike"):
        cache.append(new, new)


@pytest.mark.parametrize("dims, given", [((), ("x", None, "y")), ((None, "x"), ("y",))])
def test_a_cache_on_a_mesh_of_one_device(dims, given):
    """Axes of one device need not agree, and the cache keeps its type, as a scan requires."""
    whole = KVCache.zeros(2, 9, 1, 8)
    x = X[:, :2, :1]
    cache = on_explicit_mesh(whole, *dims, devices=1)
    new = on_explicit_mesh(x, *given, devices=1)
    found = cache.append(new, new)
    assert jax.typeof(found.key) == jax.typeof(cache.key)
    jax.tree.map(np.testing.assert_array_equal, found, whole.append(x, x))
    np.testing.assert_array_equal(found.attend(new), whole.append(x, x).attend(x))


@pytest.mark.parametrize("dims, given", [((None, "x"), ()), ((), (None, "x"))])
def test_tokens_on_an_explicit_mesh_are_refused_in_words(dims, given):
    cache = on_explicit_mesh(KVCache.zeros(2, 8, K, H), *dims)
    new = on_explicit_mesh(X[:, :2], *given)
    with pytest.raises(NotImplementedError, match="tokens that are sharded over an Explicit mesh"):
        cache.append(new, new)


def test_a_ring_counts_batch_entries_and_heads_of_the_whole_call():
    """Under shard_map with the names of its axes; the sequences went round differently often."""
    mesh = jax.make_mesh(
        (2, 2), ("batch", "heads"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    q, k, v = tokens(4, 13)
    lengths = np.array([3, 12, 8, 13])
    cache = KVCache.zeros(4, 6, K, H, value_size=D, window=4)
    for t in range(13):
        cache = cache.append(k[:, t : t + 1], v[:, t : t + 1], lengths > t)
    options = dict(
        score_fn=scores.alibi(jnp.arange(K * G) / 3),
        mask_fn=masks.prefix([2, 3, 4, 11]) | masks.dilated(2),
    )
    spec = jax.tree.map(
        lambda x: PartitionSpec(*(("batch",) if x.ndim == 1 else ("batch", None, "heads"))), cache
    )
    attend = jax.shard_map(
        lambda cache, q: cache.attend(q, batch_axis="batch", head_axis="heads", **options),
        mesh=mesh,
        in_specs=(spec, PartitionSpec("batch", None, "heads")),
        out_specs=PartitionSpec("batch", None, "heads"),
    )
    expected = cache.attend(q[:, :1], **options)
    np.testing.assert_allclose(jax.jit(attend)(cache, q[:, :1]), expected, atol=2e-6)


def shard(mesh, x):
    """Lay out an array [B], [B, heads, T] or [B, T, heads, H] over batch and heads."""
    spec = {1: ("batch",), 3: ("batch", "heads"), 4: ("batch", None, "heads")}[x.ndim]
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))


# ---- 8 bits


def test_a_cache_of_8_bits_checks_each_call_anew():
    """Although 1 == True, so that the two calls would be one for a table of earlier calls."""
    q, k, v = tokens(2, 1)
    cache = KVCache.zeros(2, 6, K, H, jnp.int8, value_size=D).append(k, v)
    cache.attend(q, is_causal=True)
    with pytest.raises(TypeError, match="is_causal must be True or False .* got int 1"):
        cache.attend(q, is_causal=1)


@pytest.mark.parametrize(
    "dtype, bound",
    [(jnp.int8, 0.011), pytest.param(jnp.float8_e4m3fn, 0.042, marks=slow)],
)
def test_the_error_of_a_cache_of_8_bits(dtype, bound):
    """Of Gaussian numbers, as |out - true| / |true| over all entries; bfloat16 errs by 0.004."""
    rng = np.random.default_rng(4)
    B, T, S = 2, 4, 160
    q = rng.standard_normal((B, T, 8, 64)).astype(f32)
    k, v = (rng.standard_normal((B, S, 2, 64)).astype(f32) for _ in range(2))
    true, _ = oracle.attention(q, k, v, is_causal=True, q_offset=S - T)

    def error(cache_dtype, dtype):
        cache = KVCache.zeros(B, S, 2, 64, cache_dtype)
        cache = cache.append(k.astype(dtype), v.astype(dtype))
        out = cache.attend(q.astype(dtype))
        assert out.dtype == dtype
        return np.linalg.norm(np.asarray(out, np.float64) - true) / np.linalg.norm(true)

    plain = error(jnp.bfloat16, jnp.bfloat16)
    assert plain < 0.0045
    for query_dtype in (jnp.float32, jnp.bfloat16):
        assert 1.5 * plain < error(dtype, query_dtype) < bound


@slow
def test_numbers_that_are_not_finite_stay_so_in_8_bits():
    q, k, v = tokens(2, 4)
    v[0, 1, 0, 0] = np.nan
    v[1, 2, 1, 0] = np.inf
    for dtype in (jnp.int8, jnp.float8_e4m3fn):
        cache = KVCache.zeros(2, 5, K, H, dtype, value_size=D).append(k, v)
        out = np.isnan(np.asarray(cache.attend(q)))
        assert out[0, 1:, :G].any(-1).all() and not out[0, 0].any() and not out[0, :, G:].any()
        assert out[1, 2:, G:].any(-1).all() and not out[1, :2].any() and not out[1, :, :G].any()


@slow
def test_gradients_and_large_and_tiny_numbers_in_8_bits():
    q, k, v = tokens(2, 4)
    cache = KVCache.zeros(2, 5, K, H, jnp.int8, value_size=D).append(1e-3 * k, 1e6 * v)

    def plain(q):
        return dot_product_attention(q, 1e-3 * k, 1e6 * v, is_causal=True)

    dout = 1e-6 * RNG.standard_normal((2, 4, K * G, D)).astype(f32)
    results = with_gradients(cache.attend, dout, q)
    for x, y in zip(results, with_gradients(plain, dout, q), strict=True):
        assert np.linalg.norm(x - y) < 0.02 * np.linalg.norm(y)


@pytest.mark.parametrize("dtype", few([jnp.int8, jnp.float8_e4m3fn], [jnp.int8]))
def test_tokens_in_8_bits_have_no_gradient(dtype):
    """Neither through their scales nor through numbers of 8 bits."""

    def decode(q, k, v):
        return KVCache.zeros(2, 3, K, H, dtype, value_size=D).append(k, v).attend(q)

    q, k, v = tokens(2, 3)
    out, dq, dk, dv = with_gradients(jax.jit(decode), jnp.ones((2, 3, K * G, D)), q, k, v)
    assert np.isfinite(out).all() and np.asarray(dq).any()
    assert not np.asarray(dk).any() and not np.asarray(dv).any()


# ---- drafts


@slow
def test_rejected_drafts_are_forgotten():
    q, k, v = tokens(2, 7)
    cache = KVCache.zeros(2, 8, K, H, value_size=D).append(k[:, :5], v[:, :5])
    cache = cache.truncate([3, 2])
    cache = cache.append(k[:, 5:], v[:, 5:])
    out = cache.attend(q[:, 5:])
    for b, kept in enumerate((3, 2)):
        rows = [*range(kept), 5, 6]
        full, _ = oracle.attention(*(x[b : b + 1, rows] for x in (q, k, v)), is_causal=True)
        np.testing.assert_allclose(out[b], full[0, -2:], atol=3e-6)


@pytest.mark.parametrize("paged", [False, True])
def test_drafts_that_found_no_room_are_not_kept(paged):
    """The sequence keeps all its tokens, and stays one that overflowed."""
    _, k, v = tokens(2, 7)
    cache = KVCache.zeros(2, 6, K, H, value_size=D)
    if paged:
        cache = memeff.PagedKVCache.zeros(2, 6, K, H, value_size=D, batch=2, pages_per_sequence=1)
        cache = cache.with_sequences([[0], [1]], [0, 0])
    cache = cache.append(k[:, :4], v[:, :4], [4, 3])
    full = jax.jit(lambda cache: cache.append(k[:, 4:], v[:, 4:]))(cache)
    keep = jax.jit(lambda cache, path, counts: cache.keep_drafts(3, path, counts))
    kept = keep(full, np.array([[2, 0], [2, 0]]), np.array([1, 2]))
    assert kept.lengths.tolist() == [7, 5] and kept.overflowed.tolist() == [True, False]
    before, after = (jax.tree.leaves(x)[0] for x in (full, kept))  # keys, [2, 6, K, H] in both
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1, 3:5], k[1, [6, 4]])
    with pytest.raises(ValueError, match="the cache is full: sequence 0 has 7 tokens"):
        full.keep_drafts(3, [[2], [2]], [1, 1])


@pytest.mark.parametrize("kind", few(["plain", "ring", "paged"], ["plain", "paged"]))
def test_under_jit_a_sequence_gives_nan_where_it_lacks_what_it_is_asked_for(kind):
    """Three drafts of two tokens, and drafts that do not exist; but three queries of two tokens."""
    q, k, v = tokens(2, 5)
    cache = KVCache.zeros(2, 8, K, H, value_size=D, window=3 if kind == "ring" else None)
    if kind == "paged":
        cache = memeff.PagedKVCache.zeros(4, 4, K, H, value_size=D, batch=2, pages_per_sequence=2)
        cache = cache.with_sequences([[0, 1], [2, 3]], [0, 0])
    cache = cache.append(k, v, [2, 5])
    keep = jax.jit(lambda cache, path, counts: cache.keep_drafts(3, path, counts))
    keep_each = jax.jit(lambda cache, T, path, counts: cache.keep_drafts(T, path, counts))
    attend = jax.jit(lambda cache, q: cache.append(k[:, :2], v[:, :2]).attend(q))
    for count in (1, 0):
        kept = keep(cache, np.array([[2], [2]]), np.array([count, 1]))
        assert kept.overflowed.tolist() == [True, False]
    out = attend(kept, q[:, :1])
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
    with pytest.raises(ValueError, match="sequence 0 gave up .*drafts that it did not have"):
        kept.check()

    longer = cache.append(k, v, [3, 0])
    for path, count, lost in ((3, 1, True), (-1, 1, True), (-1, 0, False)):
        kept = keep(longer, np.array([[path], [0]]), np.array([count, 1]))
        assert kept.overflowed.tolist() == [lost, False]
        assert kept.lengths[1] == 3
    kept = keep_each(longer, np.array([1, 3]), np.array([[1], [2]]), np.array([1, 1]))
    assert kept.overflowed.tolist() == [True, False]

    out = jax.jit(lambda cache, q: cache.attend(q))(
        cache, q[:, :3]
    )  # as a call whose rows see less
    assert np.isfinite(out).all()


@pytest.mark.parametrize("kind", few(["plain", "ring", "paged"], ["ring", "paged"]))
def test_a_mask_with_ids_for_fewer_tokens_is_refused_or_gives_nan(kind):
    """JAX reads the last id behind the last one, also of a ring, whose positions have no end."""
    q, k, v = tokens(2, 6)
    cache = KVCache.zeros(2, 6, K, H, value_size=D, window=2 if kind == "ring" else None)
    if kind == "paged":
        cache = memeff.PagedKVCache.zeros(4, 3, K, H, value_size=D, batch=2, pages_per_sequence=2)
        cache = cache.with_sequences([[0, 1], [2, 3]], [0, 0])
    cache = cache.append(k, v, [6, 4])
    ids = jnp.arange(6) // 2
    short = [masks.documents(ids[:5], ids) & masks.causal()]
    if kind == "ring":
        short += [masks.documents(ids, ids[:5]), memeff.block_mask(masks.documents(ids[:5]), 1, 5)]
    for mask in short:
        with pytest.raises(ValueError, match=r"params for (5 positions.* has 6 tokens|Q=5.* Q=6)"):
            cache.attend(q[:, :1], mask_fn=mask)
        out = jax.jit(lambda cache, q, mask=mask: cache.attend(q, mask_fn=mask))(cache, q[:, :1])
        assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
    out = cache.attend(q[:, :1], mask_fn=masks.documents(ids))
    expected, _ = oracle.attention(q[:1, :1], k[:1, 4:], v[:1, 4:])
    np.testing.assert_allclose(out[:1], expected, atol=3e-6)


# ---- wrong calls

X = np.ones((2, 3, K, H), f32)
CACHE = KVCache.zeros(2, 6, K, H)
RING = KVCache.zeros(2, 6, K, H, window=3).append(X, X)
QUERY = np.ones((2, 1, K * G, H), f32)
WRONG = raising(
    ValueError,
    (lambda: KVCache.zeros(2, 0, K, H), "capacity=0: it must be at least 1"),
    (lambda: KVCache.zeros(2, 4, K, H, window=4), "capacity=4 and window=4: a ring"),
    (lambda: CACHE.append(X[:1], X[:1]), r"key must have shape \(B=2, T, K=2, H=8\)"),
    (lambda: CACHE.append(X, X[..., :2]), "value must have shape .*, D="),
    (lambda: CACHE.append(X, X[:, :1]), "key has T=3 tokens and value 1: pass as many"),
    (lambda: CACHE.append(X, X, [1, 4]), "counts must lie between 0 and T=3"),
    (lambda: CACHE.append(X, X, [1, 2, 3]), r"counts must have shape \(B=2,\)"),
    (lambda: CACHE.append(X, X, [1]), r"counts must have shape \(B=2,\); got \(1,\)"),
    (lambda: CACHE.append(X, X).truncate([1]), r"lengths must have shape \(B=2,\)"),
    (
        lambda: CACHE.append(X, X).keep_drafts(1, [[0], [0]], [1]),
        r"counts must have shape \(B=2,\)",
    ),
    (lambda: CACHE.append(X, X, np.array([2**32, 1])), "counts has integers that do"),
    (lambda: CACHE.append(X, X).truncate(np.array([2**32, 1])), "lengths has integers"),
    (lambda: KVCache.zeros(2, 2**31, K, H), "capacity=.*: it must fit in 32 bits"),
    (lambda: CACHE.attend(QUERY, key=X), "key comes from the cache: omit it"),
    (
        lambda: (
            KVCache.zeros(2, 4, K, H, jnp.int8)
            .append(X, X)
            .attend(QUERY, logits_soft_cap=np.float32(-1) * np.ones(1))
        ),
        "logits_soft_cap=-1: a cap must be > 0",
    ),
    (lambda: CACHE.attend(QUERY, q_offset=3), "q_offset comes from the cache: omit"),
    (lambda: RING.append(*(np.ones((2, 7, K, H), f32),) * 2), "at most 3 at a time"),
    (lambda: RING.append(X, X).attend(np.ones((2, 4, 4, H), f32)), "capacity >= window"),
    (lambda: CACHE.attend(QUERY), "query has 1 tokens of sequence 0, and the cache has 0"),
    (lambda: CACHE.append(X, X).keep_drafts(3, [[0, 3], [0, 1]], [2, 2]), "from 0 to 2"),
    (lambda: CACHE.append(X, X).keep_drafts(4, [[0], [3]], [1, 1]), "has 3 tokens"),
    (lambda: CACHE.append(X, X).keep_drafts(3, [[0]], [1]), r"\[B, n\] with B=2; got"),
    (lambda: CACHE.append(X, X).truncate([1, 2, 3]), r"lengths must have shape \(B=2,"),
    (lambda: CACHE.attend(QUERY[0]), r"query must have shape \[B, T, N, H\]; got"),
    (
        lambda: CACHE.append(X, X).keep_drafts(3, [[0], [1]], [1, 2]),
        "between 0 and n=1, the drafts of a row of path; got 1 to 2",
    ),
)
WRONG += raising(
    TypeError,
    (lambda: KVCache.zeros(2, 4.0, K, H), "capacity must be an int, got float 4.0"),
    (lambda: KVCache.zeros(2, 4, K, H, jnp.int32), "dtype=int32: a cache holds"),
    (lambda: CACHE.append(X, X.astype(np.float16)), "value is float16 and the cache"),
    (lambda: CACHE.append(X, X, [1.0, 2]), "counts must be integers"),
    (
        lambda: CACHE.append(X, X).keep_drafts(1, [[0], [0]], None),
        "counts must be an array, got None",
    ),
    (lambda: KVCache.zeros(2, 4, K, H, None), "dtype must be a dtype .*, got None"),
    (lambda: KVCache.zeros(2, 4, K, H, "f99"), "dtype must be a dtype .*, got str"),
    (
        lambda: CACHE.attend(QUERY, windw=3),
        "memeff.KVCache.attend got an unexpected keyword argument: windw",
    ),
    (lambda: CACHE.append(None, X), "key must be an array, got None"),
    (lambda: CACHE.append(X, X).keep_drafts(3.0, [[0], [0]], [1, 1]), "T must be an int"),
    (lambda: CACHE.attend([[1.0], [1.0, 2.0]]), r"query must be an array, got list"),
    (lambda: RING.attend(QUERY, is_causal=np.ones(2, bool)), "is_causal must be True or False"),
)
WRONG += raising(
    NotImplementedError,
    (lambda: RING.attend(QUERY, bias=np.ones((1, 6), f32)), "not support bias"),
    (lambda: RING.attend(QUERY, is_causal=False), "does not support is_causal=False"),
    (
        lambda: (
            KVCache.zeros(2, 4, K, H, jnp.int8)
            .append(X, X)
            .attend(QUERY, implementation="reference")
        ),
        'implementation="reference" cannot run this call: it does not read keys that are stored in',
    ),
)


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_wrong_calls_are_cured_by_their_message(i):
    call, error, pattern = WRONG[i]
    with pytest.raises(error, match=pattern):
        call()


EIGHT_BITS = KVCache.zeros(2, 6, K, H, jnp.int8)
BY_HAND = [
    (CACHE, dict(lengths=[3, 3]), "lengths of the cache must be an array, got list"),
    (CACHE, dict(lengths=3), "lengths of the cache must be an array, got int 3"),
    (
        CACHE,
        dict(lengths=np.zeros(3, int)),
        r"lengths of the cache must have shape \[2\]; got \(3,\)",
    ),
    (CACHE, dict(lengths=np.zeros(2, np.uint32)), "lengths of the cache must be int32; got uint32"),
    (CACHE, dict(key=CACHE.key[0]), r"key of the cache must have shape \[B, capacity, K, H\]; got"),
    (
        CACHE,
        dict(value=CACHE.value[:, :3]),
        r"value of the cache must have shape \[2, 6, 2, D\]; got",
    ),
    (CACHE, dict(key_scale=EIGHT_BITS.key_scale), "a cache of float32 does not take key_scale"),
    (EIGHT_BITS, dict(value_scale=None), "a cache of int8 needs value_scale. Make it with `zeros`"),
    (EIGHT_BITS, dict(key_scale=CACHE.key), r"key_scale of the cache must have shape \[2, 2, 6\]"),
    (
        EIGHT_BITS,
        dict(key_scale=EIGHT_BITS.key_scale.astype(jnp.bfloat16)),
        "key_scale of the cache must be float32; got bfloat16. Cast it",
    ),
    (
        EIGHT_BITS,
        dict(value=CACHE.value, value_scale=None),
        "value of the cache must be int8, like key; got float32",
    ),
    (RING, dict(window=-1), "window=-1: it must be at least 0"),
    (RING, dict(window=3.0), "window must be an int, got float 3.0"),
]


@pytest.mark.parametrize("i", range(len(BY_HAND)))
def test_fields_that_do_not_fit_each_other_are_refused_by_each_method(i):
    cache, fields, pattern = BY_HAND[i]
    cache = dataclasses.replace(cache, **fields)
    for call in (
        lambda: cache.append(X, X),
        lambda: cache.attend(QUERY),
        lambda: cache.truncate(0),
        lambda: cache.keep_drafts(1, [[0], [0]], 1),
        cache.check,
    ):
        with pytest.raises((TypeError, ValueError), match=pattern):
            call()


def test_booleans_say_which_sequences_go_on_with_all_tokens():
    assert CACHE.append(X, X, np.array([True, False])).lengths.tolist() == [3, 0]
    assert CACHE.append(X, X, 2).lengths.tolist() == [2, 2]
