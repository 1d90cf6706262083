"""The recipes of docs/decoding.md: trees of drafts, shared prefixes, prefill in chunks, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, PartitionSpec
from sharded import collectives
from small_calls import assert_in_place

import memeff
from memeff import KVCache, PagedKVCache, dot_product_attention, masks

pytestmark = pytest.mark.once

f32 = np.float32
slow = pytest.mark.slow
K, G, H = 2, 2, 8
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(monkeypatch):
    monkeypatch.setitem(globals(), "RNG", np.random.default_rng(0))


def tokens(B, T):
    return tuple(RNG.standard_normal((B, T, n, H)).astype(f32) for n in (K * G, K, K))


# ---- trees of drafts

PARENTS = np.array([[-1, 0, 0, 1, 1, 2, 5], [-1, -1, 1, 0, 3, 4, -1]])


def path_to(parents, draft):
    """Return the drafts from the root to `draft`."""
    path = [draft]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def caches(B, k, v):
    """Return a plain and a paged cache, both with the prompt k and v."""
    plain = KVCache.zeros(B, 20, K, H).append(k, v)
    paged = PagedKVCache.zeros(12, 4, K, H, batch=B, pages_per_sequence=5)
    table = np.array([[3, 1, 2, 11, 10], [0, 5, 4, 8, 9]])
    return {"plain": plain, "paged": paged.with_sequences(table, [0, 0]).append(k, v)}


@pytest.mark.parametrize("kind", ["paged", pytest.param("plain", marks=slow)])
def test_a_tree_equals_its_paths_decoded_one_by_one(kind):
    """In one call, under jit, with prompts of 3 and 5 tokens; then the best path is kept."""
    B, T = PARENTS.shape
    prompt = tokens(B, 5)
    counts = np.array([3, 5])
    q, k, v = tokens(B, T)

    @jax.jit
    def verify(cache, q, k, v, parents):
        cache = cache.append(k, v)
        tree = masks.tree(masks.ancestors_of(parents), cache.lengths - T)
        return cache, cache.attend(q, mask_fn=tree)

    cache = caches(B, *prompt[1:])[kind].truncate(counts)
    cache, out = verify(cache, q, k, v, PARENTS)
    for b in range(B):
        for draft in range(T):
            path = path_to(PARENTS[b], draft)
            texts = [
                np.concatenate([x[b : b + 1, : counts[b]], y[b : b + 1, path]], 1)
                for x, y in zip(prompt[1:], (k, v), strict=True)
            ]
            alone, _ = oracle.attention(q[b : b + 1, draft : draft + 1], *texts)
            np.testing.assert_allclose(out[b, draft], alone[0, 0], atol=2e-6)

    accepted = np.array([path_to(PARENTS[0], 6), [*path_to(PARENTS[1], 3), 0, 0]])  # 4 and 2
    cache = jax.jit(
        KVCache.keep_drafts if kind == "plain" else PagedKVCache.keep_drafts, static_argnums=1
    )(cache, T, accepted, np.array([4, 2]))
    assert cache.lengths.tolist() == [7, 7]
    new = tokens(B, 1)
    cache = cache.append(*new[1:])
    out = cache.attend(new[0])
    for b, kept in enumerate((accepted[0], accepted[1, :2])):
        texts = [
            np.concatenate([x[b : b + 1, : counts[b]], y[b : b + 1, kept], z[b : b + 1]], 1)
            for x, y, z in zip(prompt[1:], (k, v), new[1:], strict=True)
        ]
        alone, _ = oracle.attention(new[0][b : b + 1], *texts)
        np.testing.assert_allclose(out[b], alone[0], atol=2e-6)


def verify_and_keep(cache, q, k, v, parents):
    """Keep the two drafts with the largest first number in their result, as a server keeps some."""
    T = q.shape[1]
    cache = cache.append(k, v)
    tree = masks.tree(masks.ancestors_of(parents), cache.lengths - T)
    out = cache.attend(q, mask_fn=tree)
    path = jnp.argsort(-out[:, :, 0, 0])[:, :2]
    return cache.keep_drafts(T, path, 2), out


@pytest.mark.parametrize("kind", ["paged", pytest.param("plain", marks=slow)])
def test_drafts_are_kept_in_place(kind):
    B, T = PARENTS.shape
    q, k = (jax.ShapeDtypeStruct((B, T, n, 64), f32) for n in (K * G, K))
    make = {
        "plain": lambda: KVCache.zeros(B, 16384, K, 64),
        "paged": lambda: PagedKVCache.zeros(512, 64, K, 64, batch=B, pages_per_sequence=256),
    }
    cache = jax.eval_shape(make[kind])
    program = jax.jit(verify_and_keep, donate_argnums=0).lower(cache, q, k, k, PARENTS).compile()
    assert_in_place(program, cache)


@pytest.mark.parametrize("kind", ["paged", pytest.param("plain", marks=slow)])
def test_heads_over_devices_need_no_message(kind):
    B, T = PARENTS.shape
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def shard(x):
        dims = (None, None, "heads") if x.ndim == 4 else ()
        return jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec(*dims)))

    arguments = caches(B, *tokens(B, 5)[1:])[kind], *tokens(B, T), PARENTS
    sharded = jax.tree.map(shard, arguments)
    program = jax.jit(verify_and_keep).lower(*sharded).compile()
    assert len(collectives(program.as_text())) == 1  # the first number of each draft's result
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=2e-6),
        program(*sharded),
        jax.jit(verify_and_keep)(*arguments),
    )


@pytest.mark.parametrize("hold", [lambda f: f, jax.jit], ids=["known", "jit"])
def test_each_sequence_has_its_own_number_of_drafts(hold):
    """Four, none and two, after 5, 1 and 3 tokens; the second shares its page with another."""
    before, drafts, kept = np.array([5, 1, 3, 1]), np.array([4, 0, 2, 0]), np.array([3, 0, 1, 0])
    parents = np.array([[-1, 0, 0, 1], [-1] * 4, [-1, -1, 0, 0], [-1] * 4])
    path = np.array([[0, 1, 3], [0, 0, 0], [1, 9, 9], [0, 0, 0]])
    q, k, v = tokens(4, 10)
    k[3], v[3] = k[1], v[1]
    cache = PagedKVCache.zeros(8, 4, K, H, batch=4, pages_per_sequence=3)
    table = [[3, 1, 2], [0, -1, -1], [4, 5, -1], [6, -1, -1]]
    cache = cache.with_sequences(table, [0] * 4).append(k[:, :5], v[:, :5], before)
    cache = cache.with_sequences([*table[:3], table[1]], before)  # the last one forks the second
    plain = KVCache.zeros(4, 12, K, H).append(k[:, :5], v[:, :5], before)

    @hold
    def verify(cache, drafts):
        cache = cache.append(k[:, 5:9], v[:, 5:9], drafts)
        tree = masks.tree(masks.ancestors_of(parents), cache.lengths - drafts)
        out = cache.attend(q[:, 5:9], counts=drafts, mask_fn=tree)
        return cache.keep_drafts(drafts, path, kept), out

    for kind in (cache, plain) if hold is jax.jit else (cache,):
        after, out = verify(kind, drafts)
        assert after.lengths.tolist() == [8, 1, 4, 1] and not after.overflowed.any()
        next_out = after.attend(q[:, 9:])
        for b in range(4):
            for draft in range(drafts[b]):
                rows = [*range(before[b]), *(5 + np.array(path_to(parents[b], draft)))]
                alone, _ = oracle.attention(
                    q[b : b + 1, [5 + draft]], k[b : b + 1, rows], v[b : b + 1, rows]
                )
                np.testing.assert_allclose(out[b, draft], alone[0, 0], atol=2e-6)
            rows = [*range(before[b]), *(5 + path[b, : kept[b]])]
            alone, _ = oracle.attention(q[b : b + 1, 9:], k[b : b + 1, rows], v[b : b + 1, rows])
            np.testing.assert_allclose(next_out[b], alone[0], atol=2e-6)


def test_drafts_that_a_sequence_lacks_are_refused_in_words():
    _, k, v = tokens(2, 3)
    cache = KVCache.zeros(2, 6, K, H).append(k, v, [3, 1])
    for T, path, counts, pattern in (
        (2, [0, 0], [1, 0], "T=2 drafts: sequence 1 has 1 tokens.*pass T for each"),
        ([2, 0], [0, 0], [1, 1], r"draft 0 of sequence 1, which has no drafts \(T=0\)"),
        ([1, 1], [1, 0], [1, 0], "draft 1 of sequence 0, which has drafts from 0 to 0"),
        ([1, -1], [0, 0], [0, 0], "T=-1: it must be at least 0"),
        (-1, [0, 0], [0, 0], "T=-1: it must be at least 0"),
        ([1, 1, 1], [0, 0], [0, 0], r"T must have shape \(B=2,\); got \(3,\)"),
    ):
        with pytest.raises(ValueError, match=pattern):
            cache.keep_drafts(T, np.array(path)[:, None], counts)


@slow
def test_32_drafts_use_every_bit():
    q, k, v = tokens(1, 32)
    chain = np.arange(32)[None] - 1
    assert masks.ancestors_of(chain)[0, 31] == 2**31 - 1
    mask = masks.tree(masks.ancestors_of(chain), 0)
    out = dot_product_attention(q, k, v, mask_fn=mask)
    np.testing.assert_allclose(out, dot_product_attention(q, k, v, is_causal=True), atol=2e-6)
    siblings = masks.tree(np.zeros(32, np.int32), 0)
    np.testing.assert_allclose(
        dot_product_attention(q, k, v, mask_fn=siblings), np.repeat(v, G, 2), atol=2e-6
    )


def test_wrong_trees_are_refused():
    q, k, v = tokens(2, 4)
    for bits, start, error, pattern in (
        (np.zeros((2, 33), int), 0, ValueError, "33 drafts, and a tree has at most 32"),
        (np.zeros((2, 4)), 0, TypeError, "ancestors must be integers"),
        (np.zeros((2, 3), int), 0, ValueError, "params for T=3 query positions.*T=4"),
        (np.zeros((3, 4), int), 0, ValueError, "params for B=3 batch entries.*B=2"),
        (np.zeros((2, 4), int), np.zeros(3, int), ValueError, "batch sizes must be equal"),
    ):
        with pytest.raises(error, match=pattern):
            dot_product_attention(q, k, v, mask_fn=masks.tree(bits, start))
    with pytest.raises(ValueError, match="draft 0 has parent 0"):
        masks.ancestors_of([[0, 0]])


# ---- a shared prefix is read once


def attend_with_prefix(cache, q, prefix_key, prefix_value):
    """Return attention of each sequence to a prefix [P, K, H] of all, and to its own keys."""
    B, T, N, H = q.shape
    folded = q.reshape(1, B * T, N, H)  # the rows of all sequences see all of the prefix
    out, lse = dot_product_attention(
        folded, prefix_key[None], prefix_value[None], return_residual=True
    )
    of_prefix = out.reshape(B, T, N, -1), lse.reshape(B, T, N)
    return memeff.merge(of_prefix, cache.attend(q, return_residual=True))[0]


@slow
def test_a_shared_prefix_and_own_keys_are_the_whole():
    B, P, T = 3, 9, 2
    _, pk, pv = tokens(1, P)
    q, k, v = tokens(B, 6)
    counts = np.array([4, 0, 2])
    cache = KVCache.zeros(B, 8, K, H).append(k[:, :4], v[:, :4], counts)
    cache = cache.append(k[:, 4:], v[:, 4:])
    dout = RNG.standard_normal((B, T, K * G, H)).astype(f32)

    def in_parts(q, pk, pv):
        return attend_with_prefix(cache, q, pk[0], pv[0])

    def whole(q, pk, pv):
        outs = []
        for b in range(B):
            rows = np.array([*range(counts[b]), 4, 5])
            texts = [jnp.concatenate([p, x[b : b + 1, rows]], 1) for p, x in ((pk, k), (pv, v))]
            first = P + counts[b]
            outs.append(
                dot_product_attention(q[b : b + 1], *texts, is_causal=True, q_offset=int(first))
            )
        return jnp.concatenate(outs)

    results = []
    for f in (in_parts, whole):
        out, pull = jax.vjp(f, q[:, 4:], pk, pv)
        results.append((out, *pull(dout)))
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, atol=5e-6)


# ---- prompts in chunks


@slow
@pytest.mark.parametrize("window", [None, 4])
def test_a_prompt_in_chunks_is_the_prompt(window):
    q, k, v = tokens(2, 13)
    sides = None if window is None else (window, 0)
    full = dot_product_attention(q, k, v, is_causal=True, local_window_size=sides)
    cache = KVCache.zeros(2, 16 if window is None else 9, K, H, window=window)
    outs = []
    for first in range(0, 13, 5):
        chunk = slice(first, first + 5)
        cache = cache.append(k[:, chunk], v[:, chunk])
        outs.append(cache.attend(q[:, chunk]))
    np.testing.assert_allclose(np.concatenate(outs, 1), full, atol=3e-6)


# ---- keys over devices


@pytest.mark.parametrize("devices", [8, pytest.param(2, marks=slow)])
def test_each_device_has_its_part_of_the_cache(devices):
    """One token for each of three sequences: written where it belongs, and merged by lse."""
    B, S = 3, 16
    mesh = jax.make_mesh((devices,), ("keys",), axis_types=(AxisType.Auto,))
    part = S // devices
    spec = KVCache(PartitionSpec(None, "keys"), PartitionSpec(None, "keys"), PartitionSpec())

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(spec, PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=(spec, PartitionSpec()),
        check_vma=False,  # each device computes the same from what all of them gathered
    )
    def step(cache, q, k, v):
        first = jax.lax.axis_index("keys") * part
        here = cache.lengths - first  # tokens of the part, or more, or less than none
        own = KVCache(cache.key, cache.value, jnp.clip(here, 0, part))
        own = own.append(k, v, counts=(0 <= here) & (here < part))
        results = dot_product_attention(
            q,
            own.key,
            own.value,
            key_value_seq_lengths=own.lengths,
            return_residual=True,
        )
        outs, logs = jax.lax.all_gather(results, "keys")
        out, _ = memeff.merge(*zip(outs, logs, strict=True))
        return KVCache(own.key, own.value, cache.lengths + 1), out

    q, k, v = tokens(B, S)
    lengths = np.array([0, 7, 15], np.int32)
    cache = KVCache(jnp.asarray(k), jnp.asarray(v), jnp.asarray(lengths))
    plain = cache
    _, new_k, new_v = tokens(B, 1)
    cache, out = step(cache, q[:, :1], new_k, new_v)
    plain = plain.append(new_k, new_v)
    np.testing.assert_allclose(out, plain.attend(q[:, :1]), atol=2e-6)
    jax.tree.map(np.testing.assert_array_equal, cache, plain)
