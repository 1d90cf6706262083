"""Keys in pages: `paged_attention` has the bits of the contiguous call; `PagedKVCache`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import few, raising
from small_calls import assert_bits, assert_close, assert_in_place, temp_bytes

from memeff import (
    KVCache,
    PageAllocator,
    PagedKVCache,
    dot_product_attention,
    masks,
    paged_attention,
    scores,
)

pytestmark = pytest.mark.once

f32 = np.float32
slow = pytest.mark.slow
B, K, G, H, D, S, T = 3, 2, 2, 8, 5, 128, 3
LENGTHS = np.array([7, S, 0], np.int32)
OPTIONS = {
    "causal": dict(is_causal=True),
    "all": dict(
        is_causal=True,
        local_window_size=(40, 0),
        logits_soft_cap=3.0,
        sinks=np.linspace(-1, 1, K * G, dtype=f32),
        score_fn=scores.alibi(scores.alibi_slopes(K * G)),
        scale=0.3,
    ),
}


def contiguous(dtype=f32):
    """Return queries, keys and values, where every sequence begins with the same 64 tokens."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((B, T, K * G, H))
    k, v = (rng.standard_normal((B, S, K, d)) for d in (H, D))
    k[:, :64], v[:, :64] = k[:1, :64], v[:1, :64]
    return tuple(x.astype(dtype) for x in (q, k, v))


def in_pages(page, k, v, fill):
    """Return shuffled pages of k and v, and their table; the first 64 tokens are shared.

    Pages that nobody has, and tokens beyond a sequence's end, are `fill`.
    """
    rng = np.random.default_rng(page)
    n = S // page
    shared = 64 // page
    count = B * n + 3
    order = rng.permutation(count)
    table = order[: B * n].reshape(B, n)
    table[:, :shared] = table[:1, :shared]
    pools = []
    for x in (k, v):
        hidden = np.arange(S) >= LENGTHS[:, None]
        hidden[:, :64] = np.arange(64) >= LENGTHS.max()
        x = np.where(hidden[..., None, None], np.asarray(fill, x.dtype), x)
        pool = np.full((count, page, *x.shape[2:]), fill, x.dtype)
        pool[table] = x.reshape(B, n, page, *x.shape[2:])
        pools.append(pool)
    return *pools, np.where(np.arange(n) * page < LENGTHS[:, None], table, -1)


def test_lengths_of_any_integers_place_the_newest_tokens():
    """Unsigned lengths below T do not wrap; traced ones count at most as the pages' tokens."""
    rng = np.random.default_rng(0)
    q, pages = (rng.standard_normal(shape).astype(f32) for shape in ((2, 3, 2, 4), (5, 4, 1, 4)))
    attend = functools.partial(
        paged_attention, q, pages, pages, [[3, 0], [1, 4]], is_causal=True, return_residual=True
    )
    few, many = np.array([1, 5]), np.array([8, 5])
    expected = attend(few)
    assert np.isneginf(expected[1][0, :2]).all()
    for dtype in (np.uint8, np.uint32, np.int8):
        assert_bits(attend(few.astype(dtype)), expected)
    assert_bits(jax.jit(attend)(many + [3, 0]), jax.jit(attend)(many))


@pytest.mark.parametrize(
    "page, dtype",
    [
        (1, jnp.float32),
        (16, jnp.bfloat16),
        *(pytest.param(*x, marks=slow) for x in ((1, jnp.bfloat16), (16, f32))),
        *(pytest.param(64, x, marks=slow) for x in (jnp.float32, jnp.bfloat16)),
    ],
)
def test_pages_have_the_bits_of_the_contiguous_call(page, dtype):
    q, k, v = contiguous(dtype)
    for name, options in OPTIONS.items():

        @jax.jit
        def plain(q, k, v, options=options):
            return dot_product_attention(
                q,
                k,
                v,
                q_offset=LENGTHS - T,
                key_value_seq_lengths=LENGTHS,
                return_residual=True,
                implementation="xla",
                **options,
            )

        whole = plain(q, k, v)
        for fill in (np.nan, 1e30):
            pages = in_pages(page, k, v, fill)
            result = paged_attention(q, *pages, LENGTHS, return_residual=True, **options)
            assert_bits(whole, result)
        traced = jax.jit(functools.partial(paged_attention, return_residual=True, **options))
        assert_bits(whole, traced(q, *pages, LENGTHS))
        assert name == "all" or (np.asarray(result[1])[2] == -np.inf).all()


@slow
def test_gradients_of_pages_are_those_of_their_tokens():
    q, k, v = contiguous()
    key_pages, value_pages, table = in_pages(16, k, v, 0)
    dout = np.random.default_rng(1).standard_normal((B, T, K * G, D)).astype(f32)

    def paged(q, key_pages, value_pages):
        return paged_attention(q, key_pages, value_pages, table, LENGTHS, is_causal=True)

    def plain(q, key_pages, value_pages):
        k, v = (x[table].reshape(B, S, K, -1) for x in (key_pages, value_pages))
        return dot_product_attention(
            q, k, v, is_causal=True, q_offset=LENGTHS - T, key_value_seq_lengths=LENGTHS
        )

    results = []
    for f in (paged, plain):
        out, pull = jax.vjp(f, q, key_pages, value_pages)
        tangent = jax.jvp(f, (q, key_pages, value_pages), (q, key_pages, value_pages))[1]
        results.append((out, *pull(dout), tangent))
    assert_close(*results, atol=2e-6)


def test_missing_pages_raise_no_alarm_of_debug_nans():
    q = np.ones((2, 1, 4, H), f32)
    pages = np.ones((3, 4, K, H), f32)

    def total(q, pages, table, lengths, window, **options):
        call = functools.partial(paged_attention, is_causal=True, local_window_size=window)
        return call(q, pages, pages, np.array(table), lengths, **options).sum()

    strict = jax.numpy_dtype_promotion("strict")
    with strict, jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        gradients = jax.grad(total, (0, 1))(q, pages, [[0, 2], [1, -1]], [5, 2], None)
        hidden = jax.grad(total, 1)(q, pages, [[-1, 2], [1, -1]], [8, 2], (2, 0))
        # only rows behind the last query would see the pages that are missing
        q = np.ones((2, 3, 4, H), f32)
        rows = dict(q_offset=np.int32([3, 3]), query_seq_lengths=np.int32([1, 0]))
        jax.grad(total, 1)(q, pages, [[0, -1], [-1, -1]], [8, 8], None, **rows)
    assert (hidden[:, :, 0, 0] != 0).astype(int).tolist() == [[0] * 4, [1, 1, 0, 0], [0, 1, 1, 1]]
    seen = [gradients[1][page, token, 0, 0] != 0 for page in range(3) for token in range(4)]
    assert seen == [True] * 4 + [True, True, False, False] + [True] + [False] * 3


@slow
def test_pages_under_vmap():
    q, k, v = contiguous()
    *pages, table = in_pages(16, k, v, 0)
    result = jax.vmap(
        lambda q, table, length: paged_attention(
            q[None], *pages, table[None], length[None], is_causal=True
        )[0]
    )(q, table, jnp.asarray(LENGTHS))
    whole = paged_attention(q, *pages, table, LENGTHS, is_causal=True)
    np.testing.assert_allclose(result, whole, atol=1e-6)


def test_no_buffer_of_the_size_of_the_cache():
    page = jax.ShapeDtypeStruct((600, 64, 2, 64), f32)
    query = jax.ShapeDtypeStruct((4, 1, 8, 64), f32)
    table = jax.ShapeDtypeStruct((4, 128), np.int32)
    lengths = jax.ShapeDtypeStruct((4,), np.int32)
    call = functools.partial(paged_attention, is_causal=True)
    gathered = 4 * 128 * 64 * 2 * 64 * 4
    assert temp_bytes(call, (query, page, page, table, lengths)) < gathered / 4


def test_a_page_that_is_missing_gives_nan_where_it_cannot_be_refused():
    q, k, v = contiguous()
    *pages, table = in_pages(16, k, v, 0)
    whole = paged_attention(q, *pages, table, LENGTHS, is_causal=True)
    for wrong in (-1, 1000):
        bad = table.copy()
        bad[1, 2] = wrong
        out = jax.jit(functools.partial(paged_attention, is_causal=True))(q, *pages, bad, LENGTHS)
        assert np.isnan(out[1]).all()
        assert_bits(out[0], whole[0])


def test_pages_that_no_query_sees_may_be_missing():
    """A call is refused outside jit if and only if it gives NaN under jit."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 4, H)).astype(f32)
    pages = rng.standard_normal((9, 2, K, H)).astype(f32)
    refused = []
    for options in (
        dict(local_window_size=(3, 0)),
        dict(local_window_size=(2, 1)),
        dict(is_causal=True),
        {},
    ):
        call = functools.partial(paged_attention, q, pages, pages, **options)
        traced = jax.jit(call)
        for _ in range(12):
            table = rng.permutation(8).reshape(2, 4) + 1
            table[rng.random((2, 4)) < 0.2] = -1
            lengths = rng.integers(0, 9, 2)
            positions = dict(
                q_offset=lengths - rng.integers(1, 6, 2), query_seq_lengths=rng.integers(0, 4, 2)
            )
            out = traced(table, lengths, **positions)
            refused.append(bool(np.isnan(out).any()))
            if refused[-1]:
                with pytest.raises(ValueError, match="Name a page for each token that a query see"):
                    call(table, lengths, **positions)
            else:
                assert_bits(call(table, lengths, **positions), out)
    assert 5 < sum(refused) < 43


# ---- the cache


@pytest.mark.parametrize("dtype", [jnp.int8, pytest.param(jnp.float32, marks=slow)])
def test_a_paged_cache_has_the_bits_of_a_plain_one(dtype):
    """Ragged prompts, then single tokens, under jit, in pages that fill up on the way."""
    rng = np.random.default_rng(2)
    page, n = 4, 5
    paged = PagedKVCache.zeros(40, page, K, H, dtype, batch=B, pages_per_sequence=n, value_size=D)
    plain = KVCache.zeros(B, page * n, K, H, dtype, value_size=D)
    allocator = PageAllocator(40, page)
    for b in range(B):
        allocator.add(b)

    @jax.jit
    def step(paged, plain, q, k, v, counts):
        caches = [cache.append(k, v, counts) for cache in (paged, plain)]
        return *caches, *(cache.attend(q, counts=counts) for cache in caches)

    for counts in ([4, 1, 0], [1, 3, 4], [1, 1, 1], [4, 4, 4]):
        q, k, v = (rng.standard_normal((B, 4, *x)).astype(f32) for x in ((4, H), (K, H), (K, D)))
        for b in np.random.default_rng(3).permutation(B):
            assert allocator.extend(b, counts[b]) == []
        paged = paged.with_sequences(allocator.table(range(B), n), paged.lengths)
        paged, plain, x, y = step(paged, plain, q, k, v, np.array(counts))
        assert_bits(x, y)
        assert_bits(paged.lengths, plain.lengths)
    assert paged.lengths.tolist() == allocator.lengths(range(B)).tolist() == [10, 9, 9]


@pytest.mark.parametrize("hold", [lambda f: f, jax.jit], ids=["known", "jit"])
def test_an_unused_row_keeps_no_drafts(hold):
    """A server whose batch has a free row takes drafts, and goes on."""
    q, k, v = (np.ones((2, 3, n, 4), f32) for n in (2, 1, 1))
    cache = PagedKVCache.zeros(3, 4, 1, 4, batch=2, pages_per_sequence=2)
    cache = cache.with_sequences([[2, 0], [-1, -1]], [0, 0])

    @hold
    def verify(cache):
        cache = cache.append(k, v, [3, 0])
        tree = masks.tree(masks.ancestors_of(np.array([[-1, 0, 0]] * 2)), cache.lengths - 3)
        out = cache.attend(q, counts=[3, 0], mask_fn=tree)
        return cache.keep_drafts(3, [[0, 2], [0, 0]], [2, 0]), out

    cache, out = verify(cache)
    np.testing.assert_allclose(out, np.stack([q[0], 0 * q[1]]), atol=1e-6)
    assert cache.lengths.tolist() == [2, 0] and not cache.overflowed.any()
    cache.with_sequences([[2, 0], [1, -1]], cache.lengths)
    with pytest.raises(ValueError, match="T=3 drafts: sequence 1 has 0 tokens"):
        cache.truncate(0).append(k, v, [3, 0]).keep_drafts(3, [[0], [0]], [1, 1])


def test_samples_share_a_prompt_until_they_write():
    """One prompt, two samples and a later fork: each as if it had been computed alone."""
    rng = np.random.default_rng(4)
    page, n = 4, 4
    k, v = (rng.standard_normal((1, 6, K, d)).astype(f32) for d in (H, D))
    allocator = PageAllocator(7, page)
    cache = PagedKVCache.zeros(7, page, K, H, batch=1, pages_per_sequence=n, value_size=D)
    allocator.add("a")
    allocator.extend("a", 6)
    cache = cache.with_sequences(allocator.table(["a"], n), [0]).append(k, v)
    allocator.fork("a", "b")
    names = ["a", "b"]
    texts = {name: (k[0], v[0]) for name in names}
    cache = cache.with_sequences(allocator.table(names, n), [6, 6])
    one = np.ones((2, 1, K, H), f32)
    with pytest.raises(ValueError, match="sequence 0 would write into page 1, which another"):
        cache.append(one, one[..., :D])
    with pytest.raises(ValueError, match="sequence 0 would write into page 1, which another"):
        cache.keep_drafts(2, [[1], [1]], [1, 1])
    for step in range(4):
        if step == 2:
            allocator.fork("b", "c", tokens=7)
            names.append("c")
            texts["c"] = tuple(x[:7] for x in texts["b"])
        copies = [pair for name in names for pair in allocator.extend(name, 1)]
        if copies:
            cache = cache.copy_pages(*np.array(copies).T)
        lengths = [allocator.length(name) - 1 for name in names]
        cache = cache.with_sequences(allocator.table(names, n), lengths)
        q, k, v = (
            rng.standard_normal((len(names), 1, *x)).astype(f32) for x in ((4, H), (K, H), (K, D))
        )
        cache = cache.append(k, v)
        out = np.asarray(cache.attend(q))
        for b, name in enumerate(names):
            texts[name] = tuple(
                np.concatenate([x, y[b]]) for x, y in zip(texts[name], (k, v), strict=True)
            )
            alone, _ = oracle.attention(q[b], *texts[name])
            np.testing.assert_allclose(out[b], alone, atol=2e-6)
    assert allocator.free_pages == 0  # one page is shared by all, and each has two of its own
    copied = np.asarray(cache.copy_pages(np.array([-1, 0]), np.array([-1, 5])).key_pages)
    pages = np.asarray(cache.key_pages)
    assert_bits(copied[5], pages[0])
    assert_bits(copied[:5], pages[:5])


def test_a_window_gives_back_the_pages_behind_it():
    """Two sequences of 12 tokens, in a pool with room for 5 tokens of each."""
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((2, 12, *x)).astype(f32) for x in ((4, H), (K, H), (K, D)))
    full, _ = oracle.attention(q, k, v, is_causal=True, local_window_size=(3, 0))
    allocator = PageAllocator(6, 2)
    cache = PagedKVCache.zeros(6, 2, K, H, batch=2, pages_per_sequence=3, value_size=D)
    for b in range(2):
        allocator.add(b)

    @jax.jit
    def step(cache, q, k, v):
        cache = cache.append(k, v)
        return cache, cache.attend(q, local_window_size=(3, 0))

    for t in range(12):
        for b in range(2):
            allocator.extend(b, 1)
        cache = cache.with_sequences(allocator.table(range(2), 3), allocator.lengths(range(2)) - 1)
        cache, out = step(cache, *(x[:, t : t + 1] for x in (q, k, v)))
        np.testing.assert_allclose(out[:, 0], full[:, t], atol=2e-6)
        for b in range(2):
            allocator.drop_oldest(b, max(0, allocator.length(b) - 3))
    assert allocator.lengths(range(2)).tolist() == [4, 4] and allocator.free_pages == 2


def test_a_sequence_without_a_page_for_its_token():
    cache = PagedKVCache.zeros(4, 2, K, H, batch=2, pages_per_sequence=3)
    cache = cache.with_sequences([[2, -1, -1], [0, 3, -1]], [0, 0])
    x = np.ones((2, 3, K, H), f32)
    with pytest.raises(ValueError, match="sequence 0 has 3 tokens.*room for 2. Give it more pages"):
        cache.append(x, x)
    after = jax.jit(lambda cache: cache.append(x, 2 * x))(cache)
    assert after.overflowed.tolist() == [True, False]
    assert after.lengths.tolist() == [3, 3]
    assert np.asarray(after.key_pages[..., 0, 0]).tolist() == [[1, 1], [0, 0], [1, 1], [1, 0]]
    out = jax.jit(lambda cache, q: cache.attend(q))(after, np.ones((2, 1, 4, H), f32))
    assert np.isnan(out[0]).all() and (np.asarray(out[1]) == 2).all()
    with pytest.raises(ValueError, match="the cache is full.*truncate it to its room"):
        after.check()


@jax.jit
def overflow_and_move(cache, x, table, lengths):
    """Append a token, keep the last of it, and name the sequences anew."""
    full = cache.append(x, x)
    moved = full.with_sequences(table, lengths)
    return moved.overflowed, moved.with_sequences(table[::-1], lengths[::-1]).overflowed


def test_a_sequence_that_overflowed_is_known_by_its_pages():
    """Of three samples of a page, one has no page of its own; a fourth one waits elsewhere."""
    cache = PagedKVCache.zeros(8, 2, K, H, batch=3, pages_per_sequence=3)
    cache = cache.with_sequences([[0, 1, -1], [0, -1, -1], [0, 2, -1]], [2, 2, 2])
    x = np.ones((3, 1, K, H), f32)
    for table, lengths, lost in (
        # moved, with a page now, beside its sisters; too late; truncated; and gone
        ([[0, 3, -1], [0, 2, -1], [0, 1, -1]], [3, 3, 3], [True, False, False]),
        ([[0, 3, -1], [0, 2, -1], [0, 1, -1]], [2, 3, 3], [False, False, False]),
        ([[0, 4, -1], [5, 6, -1], [0, 1, -1]], [2, 3, 3], [False, False, False]),
    ):
        overflowed = overflow_and_move(cache, x, np.array(table), np.array(lengths))
        assert [y.tolist() for y in overflowed] == [lost, lost[::-1]]

    @jax.jit
    def lose_drafts(cache, table, lengths):
        cache = cache.append(x, x).keep_drafts(2, np.full((3, 1), 7), [1, 0, 0])
        return cache.with_sequences(table, lengths)

    cache = cache.with_sequences([[0, 1, -1], [0, 2, -1], [0, 3, -1]], [3, 3, 3])
    table = np.array([[5, -1], [0, 1], [0, 2]])
    for lengths, lost in (([2, 3, 2], True), ([2, 2, 2], False)):
        moved = lose_drafts(cache, table, np.array(lengths))
        assert moved.overflowed.tolist() == [False, lost, False]


def test_pages_do_not_bring_back_what_was_lost():
    """Under jit a table with more pages is given to sequences of which tokens were dropped."""
    x = np.ones((3, 3, K, H), f32)
    cache = PagedKVCache.zeros(8, 2, K, H, batch=3, pages_per_sequence=3)
    cache = cache.with_sequences([[0, -1, -1], [1, 2, -1], [3, 4, -1]], [0, 0, 0])
    cache = jax.jit(lambda cache: cache.append(x, x, [3, 2, 3]))(cache)
    assert cache.lengths.tolist() == [3, 2, 3]

    @jax.jit
    def go_on(cache, table, lengths):
        cache = cache.keep_drafts(3, np.zeros((3, 1), int), 1)
        same = cache.with_sequences(table, cache.lengths)
        other = cache.with_sequences(table, lengths)
        return same, other, same.attend(np.ones((3, 1, 4, H), f32))

    table = np.array([[0, 5, -1], [1, 2, 6], [3, 4, 7]])
    same, other, out = go_on(cache, table, np.array([2, 0, 1]))
    assert same.overflowed.tolist() == [True, True, False]
    assert np.isnan(out[:2]).all() and np.isfinite(out[2]).all()
    assert other.lengths.tolist() == [2, 0, 1] and not other.overflowed.any()
    with pytest.raises(ValueError, match="gave up tokens that had no page, or drafts that it did"):
        same.attend(np.ones((3, 1, 4, H), f32))


@pytest.mark.parametrize("dtype", [f32, jnp.int8])
def test_a_pair_that_copies_nothing_raises_no_alarm_of_debug_nans(dtype):
    cache = PagedKVCache.zeros(3, 2, K, H, dtype, batch=1, pages_per_sequence=1)
    cache = cache.with_sequences([[0]], [0]).append(np.ones((1, 2, K, H)), np.ones((1, 2, K, H)))
    with jax.debug_nans(True):
        copied = cache.copy_pages([0, -1, 1], [2, -1, 2])  # the last pair replaces the first
        copied = copied.copy_pages([0, -1], [1, -1]).copy_pages([], [])
    assert (np.asarray(copied.key_pages[..., 0, 0]) != 0).tolist() == [[1, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize("dtype", [f32, jnp.int8])
def test_a_cache_of_numpy_arrays(dtype):
    """jax.device_get and checkpoints give NumPy's arrays."""
    cache = PagedKVCache.zeros(4, 2, K, H, dtype, batch=2, pages_per_sequence=2)
    cache = cache.with_sequences([[0, 1], [2, 3]], [0, 0])
    x = np.random.default_rng(1).standard_normal((2, 3, K, H)).astype(f32)

    def history(cache, hold):
        cache = hold(hold(cache).append(x, x))
        cache = hold(cache.keep_drafts(2, [[1], [0]], 1).copy_pages([1], [3]))
        return cache.attend(x[:, :1])

    assert_bits(history(cache, jax.device_get), history(cache, lambda cache: cache))


def test_pages_are_copied_in_the_order_of_the_pairs():
    """A fork of a sequence that was extended, and a page that was freed and given again."""
    allocator = PageAllocator(5, 2)
    allocator.add("a")
    allocator.extend("a", 1)
    allocator.fork("a", "b")
    pairs = allocator.extend("b", 1)
    allocator.fork("b", "c", 1)
    pairs += allocator.extend("c", 1)
    assert pairs == [(0, 1), (1, 2)]
    cache = PagedKVCache.zeros(5, 2, K, H, batch=1, pages_per_sequence=1)
    cache = dataclasses.replace(
        cache, key_pages=cache.key_pages + jnp.arange(5.0)[:, None, None, None]
    )
    rng = np.random.default_rng(7)
    jitted = jax.jit(lambda cache, sources, targets: cache.copy_pages(sources, targets))
    for _ in range(30):
        texts = list(range(5))
        pairs = rng.integers(-1, 5, (6, 2))
        pairs[pairs.min(axis=1) < 0] = -1
        for source, target in pairs:
            if target >= 0:
                texts[target] = texts[source]
        for copied in (cache.copy_pages(*pairs.T), jitted(cache, *pairs.T)):
            assert copied.key_pages[:, 0, 0, 0].tolist() == texts


@pytest.mark.parametrize("dtype", few([f32, jnp.int8, jnp.float8_e4m3fn], [jnp.int8]))
def test_a_page_that_is_not_there_is_copied_as_nan_under_jit(dtype):
    cache = PagedKVCache.zeros(3, 2, K, H, dtype, batch=3, pages_per_sequence=1)
    cache = cache.with_sequences([[0], [1], [2]], [0, 0, 0])
    x = np.ones((3, 2, K, H), f32)
    cache = cache.append(x, x)
    copy = jax.jit(lambda cache, sources: cache.copy_pages(sources, jnp.array([1, 2, -1])))
    out = copy(cache, jnp.array([-1, 3, -1])).attend(np.ones((3, 1, 4, H), f32))
    assert np.isnan(out[1:]).all() and np.isfinite(out[0]).all()


def test_append_to_pages_is_in_place():
    cache = jax.eval_shape(
        lambda: PagedKVCache.zeros(512, 64, 2, 64, batch=4, pages_per_sequence=64)
    )
    x = jax.ShapeDtypeStruct((4, 1, 2, 64), f32)
    q = jax.ShapeDtypeStruct((4, 1, 8, 64), f32)

    def steps(cache, q, k):
        def body(cache, _):
            cache = cache.append(k, k)
            return cache, cache.attend(q)

        return jax.lax.scan(body, cache, None, length=3)

    program = jax.jit(steps, donate_argnums=0).lower(cache, q, x).compile()
    assert_in_place(program, cache)


# ---- wrong calls

QUERY = np.ones((2, 1, 4, H), f32)
PAGES = np.ones((5, 4, K, H), f32)
TABLE = np.array([[0, 1], [2, -1]])
CALL = dict(query=QUERY, key_pages=PAGES, value_pages=PAGES, page_table=TABLE, lengths=[8, 4])
CACHE = PagedKVCache.zeros(5, 4, K, H, batch=2, pages_per_sequence=2)
KEYS = np.ones((2, 1, K, H), f32)
WRONG = raising(
    ValueError,
    (dict(query=QUERY[0]), r"query must have shape \[B, T, N, H\]; got \(1, 4, 8\)"),
    (dict(key_pages=PAGES[0]), r"key_pages must have shape \[pages, page, K, H\]"),
    (dict(value_pages=PAGES[:3]), "value_pages must have shape .*like key_pages"),
    (dict(key_pages=np.ones((1, 257, K, H), f32)), "pages of 257 tokens"),
    (dict(page_table=TABLE[:1]), r"page_table must have shape \(B=2, pages"),
    (dict(page_table=TABLE + 4), "page_table names page 6, and key_pages has 5"),
    (dict(lengths=[8, 5]), "sequence 1 see tokens 0 to 4, .*page_table names no page for token 4"),
    (dict(lengths=[9, 4]), "lengths must lie between 0 and n . page=8; got 4 to 9"),
    (dict(lengths=[-1, 4]), "lengths must lie between 0 and n . page=8; got -1 to 4"),
    (dict(lengths=[8]), r"lengths must have shape \(B=2,\)"),
    (dict(key_scales=np.ones(3)), "key_pages is float32, which does not take key_sc"),
    (dict(key_pages=PAGES.astype(np.int8)), "int8, which needs key_scales"),
    (
        dict(key_pages=PAGES.astype(np.int8), key_scales=np.ones((5, 4))),
        r"key_scales must have shape \(5, 2, 4\)",
    ),
    (dict(key_value_seq_lengths=[1, 2]), "is the argument `lengths` here"),
    (dict(bias=np.ones((3, 1, 8))), "bias must be broadcastable"),
    (
        dict(mask_fn=masks.documents(np.ones(7, int), np.ones(8, int))),
        "params for Q=7 query positions",
    ),
    ({"query_seq_lengths": np.array([9, 9])}, "query_seq_lengths must lie between 0 and T="),
    ({"q_offset": np.array([2**29, 0])}, "q_offset=536870912: positions must lie between"),
    ({"lengths": np.full(2, 2**32)}, "lengths has integers that do not fit in int32"),
    ({"page_table": np.full((2, 2), 2**32)}, "page_table has integers that do not"),
    ({"logits_soft_cap": jnp.float32(0)}, "logits_soft_cap=0: a cap must be > 0"),
    ({"key": 1}, "key is the argument `key_pages` here: omit it"),
)
WRONG += raising(
    TypeError,
    (dict(page_table=TABLE / 1), "page_table must be integers, got float"),
    (dict(query=QUERY.astype(np.float16)), "key_pages is float32 and query is float16"),
    (
        dict(key_pages=PAGES.astype(np.int8), key_scales=np.ones((5, 2, 4), np.int32)),
        "key_scales must be float32; got int32. Cast it",
    ),
    ({"is_causal": {1}}, "is_causal must be True or False .* got set {1}"),
    ({"chunk_size": {2}}, "chunk_size must be an array or hashable"),
    ({"scale": np.array(None)}, "scale has dtype object, which JAX does not support"),
    ({"windw": 1}, "memeff.paged_attention got an unexpected keyword argument: windw"),
)
WRONG += raising(
    NotImplementedError,
    (
        dict(implementation="reference"),
        'implementation="reference" cannot run this call: it does not read keys that are stored in',
    ),
    (dict(implementation="pallas"), 'implementation="pallas" cannot run'),
    (dict(sequence_axis="x"), "sequence_axis does not support keys that are"),
    (dict(backward="fused"), 'backward="fused" cannot run this call: kernels need a GPU'),
)
WRONG_CACHES = [
    (lambda: PagedKVCache.zeros(4, 300, K, H, batch=1, pages_per_sequence=1), "page_size=300"),
    (
        lambda: CACHE.with_sequences([[0, 9], [1, 2]], [0, 0]),
        "names page 9, and the cache has pages 0 to 4",
    ),
    (lambda: CACHE.with_sequences([[0, 1]], [9]), "sequence 0 has 9 tokens"),
    (lambda: CACHE.with_sequences([0, 1], [9]), r"page_table must have shape \[B, n\]"),
    (
        lambda: dataclasses.replace(CACHE, value_pages=PAGES[:3]).append(KEYS, KEYS),
        r"value_pages of the cache must have shape \[5, 4, 2, D\]; got \(3,",
    ),
    (
        lambda: dataclasses.replace(CACHE, page_table=TABLE[:1]).truncate(0),
        r"lengths of the cache must have shape \[1\]; got \(2,\)",
    ),
    (lambda: CACHE.attend(QUERY, q_offset=1), "q_offset comes from the cache"),
    (lambda: CACHE.attend(QUERY, page_table=[[0]]), "page_table comes from the cache"),
    (lambda: CACHE.with_sequences(np.full((2, 2), 2**32), [0, 0]), "page_table has integers that"),
    (lambda: CACHE.copy_pages(np.array([2**32]), [1]), "sources has integers that do not fit"),
    (lambda: CACHE.attend(QUERY), "query has 1 tokens of sequence 0, and the cache has 0"),
    (lambda: CACHE.keep_drafts(1, [0], [1]), r"path must have shape \[B, n\] with B=2; got"),
    (lambda: CACHE.attend(QUERY[0]), r"query must have shape \[B, T, N, H\]; got"),
    (lambda: CACHE.truncate([0, 0, 0]), r"lengths must have shape \(B=2,\); got \(3,\)"),
    (lambda: CACHE.copy_pages([-1], [2]), "copy_pages got -1 to copy over 2"),
    (lambda: CACHE.copy_pages([0, 1], [2, 5]), "1 to copy over 5, and the cache has pages 0 to 4"),
    (lambda: CACHE.copy_pages([0, 1], [2]), r"must both have shape \[n\]; got \(2,\) and \(1,\)"),
]


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_wrong_calls_are_cured_by_their_message(i):
    arguments, error, pattern = WRONG[i]
    with pytest.raises(error, match=pattern):
        paged_attention(**CALL | arguments)


def test_arguments_of_kinds_that_do_not_compare():
    """NumPy compares a number with a range entry by entry, and jit asks for one boolean."""
    paged_attention(**CALL, chunk_size=np.int32(2))
    with pytest.raises(TypeError, match="chunk_size=range.* sides are ints"):
        paged_attention(**CALL, chunk_size=range(3))


@pytest.mark.parametrize("i", range(len(WRONG_CACHES)))
def test_wrong_calls_of_the_cache(i):
    call, pattern = WRONG_CACHES[i]
    with pytest.raises(ValueError, match=pattern):
        call()


def test_a_batch_or_pages_over_an_explicit_mesh_are_refused_in_words():
    mesh = jax.make_mesh((2,), ("batch",), devices=jax.devices()[:2])  # axes are Explicit
    spec = jax.NamedSharding(mesh, jax.P("batch"))
    x = np.ones((2, 1, 2, 8), f32)
    cache = PagedKVCache.zeros(4, 4, 2, 8, batch=2, pages_per_sequence=2)
    cache = cache.with_sequences([[0, 1], [2, 3]], [1, 1])
    calls = {
        "append": lambda cache, x, ones, ids: cache.append(x, x, ones),
        "attend": lambda cache, x, ones, ids: cache.attend(x, counts=ones),
        "keep_drafts": lambda cache, x, ones, ids: cache.keep_drafts(1, ids[:, None] * 0, ones),
        "copy_pages": lambda cache, x, ones, ids: cache.copy_pages(ids, ids),
    }
    inputs = cache, jnp.asarray(x), jnp.ones(2, int), jnp.arange(2)
    leaves, structure = jax.tree.flatten(inputs)
    reads = {
        "append": ("key_pages", "page_table", "lengths", "x", "ones"),
        "attend": ("key_pages", "page_table", "lengths", "x", "ones"),
        "keep_drafts": ("key_pages", "page_table", "lengths", "ones", "ids"),
        "copy_pages": ("key_pages", "ids"),
    }
    names = ("key_pages", "value_pages", "page_table", "lengths", "x", "ones", "ids")
    for call, f in calls.items():
        for name in reads[call]:
            n = names.index(name)
            sharded = [*leaves[:n], jax.device_put(leaves[n], spec), *leaves[n + 1 :]]
            with pytest.raises(NotImplementedError, match="Use jax.shard_map.* or an Auto mesh"):
                f(*jax.tree.unflatten(structure, sharded))


# ---- the allocator


def test_any_history_keeps_each_text_and_counts_each_owner():
    """Random calls, with the tokens of each sequence kept beside it and in numbered pages."""
    rng = np.random.default_rng(5)
    page = 3
    for _ in range(20):
        allocator = PageAllocator(9, page)
        texts: dict = {}
        pool = np.zeros((9, page), int)
        for name in range(60):
            names = list(texts)
            action = rng.choice(
                ["add", "extend", "extend", "fork", "free", "truncate", "drop_oldest"]
            )
            if action == "add" or not names:
                allocator.add(name)
                texts[name] = []
                continue
            other = names[rng.integers(len(names))]
            size = int(rng.integers(len(texts[other]) + 1))
            if action == "fork":
                allocator.fork(other, name, size)
                texts[name] = texts[other][:size]
            elif action == "free":
                allocator.free(other)
                del texts[other]
            elif action == "truncate":
                allocator.truncate(other, size)
                texts[other] = texts[other][:size]
            elif action == "drop_oldest":
                dropped = allocator.drop_oldest(other, size)
                assert dropped == size - size % page
                texts[other] = texts[other][dropped:]
            else:
                before = allocator.table([other], 9).tolist(), allocator.free_pages
                new = [int(x) for x in rng.integers(1, 1000, rng.integers(1, 6))]
                try:
                    copies = allocator.extend(other, len(new))
                except MemoryError:
                    assert before == (allocator.table([other], 9).tolist(), allocator.free_pages)
                    continue
                for source, target in copies:
                    pool[target] = pool[source]
                first = len(texts[other])
                texts[other] = texts[other] + new
                own = allocator.table([other], 9)[0]
                for position in range(first, len(texts[other])):
                    pool[own[position // page], position % page] = texts[other][position]
            tables = [allocator.table([name], 9)[0] for name in texts]
            for text, table in zip(texts.values(), tables, strict=True):
                own = table[table >= 0]
                assert len(own) == -(-len(text) // page)
                assert pool[own].ravel()[: len(text)].tolist() == text
            owners = np.bincount([x for t in tables for x in t if x >= 0], minlength=9)
            assert owners.tolist() == [allocator.owners(x) for x in range(9)]
            assert allocator.free_pages == (owners == 0).sum()
            assert allocator.sequences == list(texts)


def test_an_allocator_says_in_words_what_cannot_be_done():
    allocator = PageAllocator(2, 4)
    allocator.add("a")
    with pytest.raises(MemoryError, match="9 more tokens of sequence 'a' need 3 pages of 4 tokens"):
        allocator.extend("a", 9)
    allocator.extend("a", 5)
    for call, pattern in (
        (lambda: allocator.add("a"), "there is a sequence 'a' already: free it first"),
        (lambda: allocator.fork("b", "c"), "there is no sequence 'b': add it first"),
        (lambda: allocator.fork("a", "b", 6), "tokens=6: sequence 'a' has 5"),
        (lambda: allocator.truncate("a", 6), "tokens=6: sequence 'a' has 5"),
        (lambda: allocator.drop_oldest("a", 6), "tokens=6: sequence 'a' has 5"),
        (lambda: allocator.drop_oldest("b", 1), "there is no sequence 'b': add it first"),
        (lambda: allocator.table(["a"], 1), "sequence 'a' has 2 pages, and pages_per_sequence=1"),
        (lambda: PageAllocator(0, 4), "pages=0: it must be at least 1"),
        (lambda: allocator.owners(2), "page=2: the pool has pages 0 to 1"),
        (lambda: allocator.owners(-1), "page=-1: it must be at least 0"),
        (lambda: allocator.table(["a"], -1), "pages_per_sequence=-1: it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=pattern):
            call()
    for call, pattern in (
        (lambda: allocator.table(["a"], 2.0), "pages_per_sequence must be an int, got float"),
        (lambda: allocator.table("a", 2), "names must be a list of names of sequences, got str"),
        (lambda: allocator.lengths(np.array(3)), "names must be a list of names .* got ndarray"),
        (lambda: allocator.lengths(3), "names must be a list of names of sequences, got int"),
        (lambda: allocator.add(["a"]), "the name of a sequence must be hashable, got list"),
        (lambda: allocator.free({}), "the name of a sequence must be hashable, got dict"),
        (lambda: allocator.add(("a", [])), "the name of a sequence must be hashable, got tuple"),
    ):
        with pytest.raises(TypeError, match=pattern):
            call()
    allocator.fork("a", "b")
    with pytest.raises(MemoryError, match="need 1 pages .* and 0 of 2 are free"):
        allocator.extend("b", 1)  # a copy needs a page, too
