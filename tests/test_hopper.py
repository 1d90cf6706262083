"""The Hopper kernels without a GPU: in Mosaic's interpreter, which plays warpgroups, barriers and copies and finds races,
against the oracle, by the law of tolerance; and lowered for CUDA.
"""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Sizes, qkv
from conftest import assert_result, assert_truth, cotangents, few, plain_call, run_call, true_call
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from memeff import dot_product_attention, tile_sizes
from memeff.device import pretend_device
from memeff.problem import Problem

pytestmark = pytest.mark.skipif(
    jax.__version__.startswith("0.10."), reason="kernels need jax 0.11, and this is 0.10"
)

f32, bf16 = np.float32, jnp.bfloat16


@contextlib.contextmanager
def interpreted(detect_races: bool = True, multiprocessors: int = 2):
    """As if on an H200 with a few multiprocessors; no race may be found."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    from memeff.pallas.hopper import mosaic, persistent

    with (
        pytest.MonkeyPatch.context() as patch,
        pretend_device("gpu", "9.0"),
        mosaic.interpreted(detect_races),
    ):
        patch.setattr(persistent, "multiprocessors", lambda: multiprocessors)
        try:
            yield
            assert not (detect_races and interpreter.get_races().races_found)
        finally:
            interpreter.reset_gpu_interpret_mode_state()


def draw(dtype, z: Sizes):
    return qkv(np.random.default_rng(0), dtype, z)


def both_ways(args, kwargs, dtype="bfloat16", detect_races=True):
    with interpreted(detect_races):
        return run_call(args, kwargs | {"implementation": "pallas"}, dtype)


# ---- values, forward and gradient

small = functools.partial(Sizes, B=1, K=1, G=1, H=64, D=64)
i32 = functools.partial(np.array, dtype=np.int32)
CASES = {
    "plain": (small(T=128, S=256), {}),
    "causal, tails": (small(T=300, S=300, G=2), dict(is_causal=True)),
    "128": (small(T=150, S=200, H=128, D=128), dict(is_causal=True)),
    "other head dims": (small(B=2, T=70, S=90, K=2, H=40, D=120), {}),
    "one query, one key": (small(T=1, S=1, H=3, D=1), {}),
    "offsets": (small(B=2, T=130, S=200), dict(is_causal=True, q_offset=i32([-20, 61]))),
    "offset": (small(T=130, S=320), dict(is_causal=True, q_offset=190)),
    "window": (small(T=400, S=400), dict(local_window_size=(150, 10))),
    "narrow window": (small(T=200, S=200), dict(local_window_size=(0, 0))),
    "lengths": (
        small(B=2, T=200, S=300),
        dict(query_seq_lengths=i32([70, 200]), key_value_seq_lengths=i32([300, 0])),
    ),
    "soft cap": (small(T=130, S=130), dict(logits_soft_cap=1.5, is_causal=True)),
    "segments": (
        small(B=2, T=200, S=200, G=2),
        dict(
            query_segment_ids=np.sort(np.random.default_rng(0).integers(0, 4, (2, 200))).astype(
                np.int32
            ),
            is_causal=True,
        ),
    ),
    "segments, long": (  # tiles without masks between others
        small(T=520, S=520),
        dict(
            query_segment_ids=np.repeat(i32([[2, 5]]), [300, 220], axis=1),
            local_window_size=(250, None),
        ),
    ),
    "segments, unsorted": (
        small(T=70, S=300, H=128, D=128),
        dict(
            query_segment_ids=i32([[1, 5] * 35]),
            key_value_segment_ids=i32([[5, 1, 2] * 100]),
            local_window_size=(None, 90),
        ),
    ),
    "keys masked, padded": (
        small(B=3, T=140, S=300, G=2),
        dict(
            mask=(np.arange(300) < i32([[300], [150], [0]]))[:, None, None],
            is_causal=True,
            q_offset=200,
        ),
    ),
    "keys masked, left and here and there": (
        small(B=2, T=70, S=300, H=128, D=128),
        dict(mask=np.stack([np.arange(300) >= 200, np.arange(300) % 7 < 3])[:, None, None]),
    ),
    "queries masked": (
        small(T=200, S=130),
        dict(mask=(np.arange(200) % 100 < 70)[:, None], is_causal=True),
    ),
    "scale": (small(T=64, S=130), dict(scale=-0.3)),
    "keys behind the last query": (small(T=70, S=140), dict(local_window_size=(30, 20))),
    "queries behind the last key": (
        small(T=140, S=70, H=128, D=128),
        dict(local_window_size=(20, 9), query_seq_lengths=i32([120]), is_causal=True),
    ),
    "129": (
        small(T=129, S=129),
        dict(
            is_causal=True,
            local_window_size=(40, 0),
            query_segment_ids=i32([[0] * 60 + [1] * 69]),
            key_value_segment_ids=i32([[0] * 60 + [1] * 50 + [2] * 18 + [0]]),
        ),
    ),
    "sinks": (  # as large as the logits, none, and far above them; rows that see nothing
        small(T=70, S=140, G=3),
        dict(sinks=np.array([1.5, -np.inf, 200], f32), is_causal=True, q_offset=i32([-5])),
    ),
    "everything": (
        small(B=2, T=150, S=280, G=3, H=72, D=8),
        dict(
            local_window_size=(100, 30),
            q_offset=i32([0, 40]),
            key_value_seq_lengths=i32([280, 111]),
            query_seq_lengths=i32([150, 9]),
            logits_soft_cap=4.0,
            scale=0.2,
        ),
    ),
}


# The interpreter takes ten seconds for each, most of them to compile.
FAST = "128", "segments, long", "keys masked, padded", "sinks"


@pytest.mark.parametrize("name", few(CASES, FAST))
def test_values(name):
    z, kwargs = CASES[name]
    args = draw(bf16, z)
    truth, sizes = true_call(args, kwargs, "bfloat16"), None
    if "sinks" in kwargs:  # whose gradient is a sum over rows: of terms as large as this
        # B T N
        p = 1 - oracle._softmax(oracle._call(*args, None, None, **kwargs))[1].sum(-1).swapaxes(1, 2)
        terms = p * np.abs(cotangents(args, bf16)[0] * truth.out).astype(f32).sum(-1)
        sizes = {"sinks": np.sqrt((terms**2).sum((0, 1)).max())}
    assert_result(
        both_ways(args, kwargs),
        plain_call(args, kwargs, "bfloat16"),
        truth,
        "bfloat16",
        name,
        sizes,
    )


@pytest.mark.slow
def test_float16():
    args = draw(np.float16, small(T=130, S=130))
    assert_truth(
        both_ways(args, dict(is_causal=True), "float16"),
        "float16",
        args,
        dict(is_causal=True),
        "float16",
    )


def test_gradient_of_wide_heads_is_taken_by_the_chunked_path():
    args = draw(bf16, small(T=70, S=90, H=192, D=130))
    assert_truth(both_ways(args, {}), "192", args, {}, "bfloat16")


# ---- the gradient in one kernel

# the interpreter takes blocks that add to the same dq for a race: it is asked where there is one
# block
FUSED = {
    "one block": (small(T=300, S=100, G=2), dict(is_causal=True), True),
    "one block, 128": (small(T=150, S=128, H=128, D=128), dict(local_window_size=(30, 7)), True),
    "blocks": (small(B=2, T=300, S=300, K=2, H=40, D=64), dict(is_causal=True), False),
    "segments": (
        small(B=1, T=150, S=100, H=128, D=128),
        dict(query_segment_ids=i32([[1, 5] * 75]), key_value_segment_ids=i32([[5, 1, 1, 2] * 25])),
        True,
    ),
    "soft cap, lengths": (
        small(B=2, T=150, S=300, G=2, H=128, D=100),
        dict(
            logits_soft_cap=2.0,
            query_seq_lengths=i32([150, 9]),
            key_value_seq_lengths=i32([290, 0]),
            q_offset=i32([40, 0]),
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", few(FUSED, ("one block",)))
def test_fused_gradient(name):
    z, kwargs, one = FUSED[name]
    args = draw(bf16, z)
    assert_truth(
        both_ways(args, kwargs | {"backward": "fused"}, detect_races=one),
        name,
        args,
        kwargs,
        "bfloat16",
    )


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul")
@pytest.mark.parametrize("hidden", few(("keys", "queries"), ("keys",)))
def test_fused_gradient_is_done_again_where_what_is_hidden_is_not_finite(hidden):
    args, how = (
        draw(bf16, small(T=100, S=200)),
        dict(key_value_seq_lengths=i32([150]), query_seq_lengths=i32([90])),
    )
    clean = both_ways(args, how | {"backward": "split"})
    query, key, value = (x.copy() for x in args)
    if hidden == "keys":
        key[:, 150:] = value[:, 150:] = np.nan
    else:
        query[:, 90:] = np.nan
    dirty = both_ways((query, key, value), how | {"backward": "fused"}, detect_races=False)
    for name, grad in clean.grads.items():
        np.testing.assert_array_equal(grad, dirty.grads[name], err_msg=name)


@pytest.mark.parametrize(
    "T, heads", [(512, 512), (2048, 128), (4096, 64), (8192, 32), (16384, 16), (32768, 8), (700, 6)]
)
def test_blocks_that_stay_have_equally_much_to_do(T, heads):
    """In causal order, where the last tile of queries takes as many times longer than the first as there are tiles."""
    from memeff.pallas.hopper import scheduler, tile_ranges

    blocks = 132
    tiles = -(-T // 128)
    visited = tile_ranges.tiles_visited(Problem(right=0), (T, T), 128, 128)
    np.testing.assert_array_equal(visited, np.arange(tiles, 0, -1))
    order = scheduler.balanced_order(heads, 1 + visited, blocks)
    index = np.arange(heads * tiles)
    head, tile = map(np.asarray, scheduler.work_item(heads, tiles, order, True, index))
    assert len({*zip(head.tolist(), tile.tolist(), strict=True)}) == heads * tiles
    turn, block = np.divmod(index, blocks)
    load = np.bincount(np.where(turn % 2, blocks - 1 - block, block), 2 + tile)
    assert load.mean() >= (0.969 if heads * tiles > blocks else 0) * load.max()


# ---- rows that the fixed reference cannot serve, and what nobody sees


def forward(args, **kwargs):
    call = functools.partial(
        dot_product_attention, **kwargs, implementation="pallas", return_residual=True
    )
    with interpreted():
        return jax.tree.map(np.asarray, jax.jit(call)(*args))


@pytest.mark.parametrize(
    "where", [400, pytest.param(3, marks=pytest.mark.slow)], ids=["late", "early"]
)
def test_a_key_that_dwarfs_the_others(where):
    """Its rows overflow their sums, for their reference is older, or all else vanishes beside it: they are one-hot.

    dq of those is a difference of large terms that cancel where out is a value, bit for bit. In plain attention it is, for
    the largest p is 1; here it is off by p's rounding where the fixed reference served (see the README's limits).
    """
    query, key, value = draw(bf16, small(T=128, S=512))
    key[:, where] *= bf16(200)
    args = query, key, value
    result, truth, plain = (
        both_ways(args, {}),
        true_call(args, {}, "bfloat16"),
        plain_call(args, {}, "bfloat16"),
    )
    worst = max(np.abs(x.grads["query"] - truth.grads["query"]).max() for x in plain)
    assert np.abs(result.grads.pop("query") - truth.grads["query"]).max() <= 8 * worst
    assert_result(result, plain, truth, "bfloat16", "far")


def test_a_row_that_fails_changes_no_bit_of_another():
    """Causality in bits: what the last key does to the rows that see it is nothing to the others of the tile."""
    query, key, value = draw(bf16, small(T=128, S=512))
    how = dict(is_causal=True, q_offset=384 - 64)
    before = forward((query, key, value), **how)
    key[:, 400] *= bf16(300)  # row 80 and later ones
    after = forward((query, key, value), **how)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[:, :80], new[:, :80])
        assert np.isfinite(new).all() and (old[:, 80:] != new[:, 80:]).any()


# in the interpreter
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul")
def test_what_nobody_sees_changes_no_bit_of_tiles_without_masks():
    """All rows are done again, for a tile with masks holds NaN: the others' numbers are those of the fast loop.

    With one tile in that loop: the interpreter cannot begin a sum with what is there, and adds that at the end. On a GPU
    (test_gpu.py) the order is the same for any number.
    """
    query, key, value = draw(bf16, small(T=128, S=256))
    how = dict(key_value_seq_lengths=i32([200]))
    clean = forward((query, key, value), **how)
    value[:, 200:] = np.nan
    for old, new in zip(clean, forward((query, key, value), **how), strict=True):
        np.testing.assert_array_equal(old, new)


# in the interpreter
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul")
def test_rows_that_fail_leave_the_others_as_they_were():
    """A key that 48 of 128 rows feel, and only after their reference stands: their sums overflow.

    With one tile after the first, as above.
    """
    query, key, value = draw(bf16, small(T=128, S=256))
    query[:, :80, :, 0], query[:, 80:, :, 0] = 0, 1
    before = forward((query, key, value))
    key[:, 100, :, 0] = 3000
    after = forward((query, key, value))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[:, :80], new[:, :80])
        assert np.isfinite(new).all() and (old[:, 80:] != new[:, 80:]).any()


def unseen_filled(args, seen, cotangent):
    """Return query, key, value, and the cotangents, with NaN, Inf and the largest number in what is in no pair of `seen`;
    and whether anything is.
    """
    rng, (_, N, _, _), K = np.random.default_rng(3), seen.shape, args[1].shape[2]
    rows = ~seen.any(3).swapaxes(1, 2)  # B T N
    # B S K
    cols = ~seen.reshape(seen.shape[0], K, N // K, *seen.shape[2:]).any((2, 3)).swapaxes(1, 2)

    def filled(x, where):
        bad = rng.choice([np.nan, np.inf, -np.inf, float(jnp.finfo(x.dtype).max)], x.shape).astype(
            f32
        )
        return np.where(
            where.reshape(*where.shape, *[1] * (x.ndim - where.ndim)), bad, x.astype(f32)
        ).astype(x.dtype)

    (query, key, value), (dout, dlse) = args, cotangent
    args = filled(query, rows), filled(key, cols), filled(value, cols)
    return args, (filled(dout, rows), filled(dlse, rows)), rows.any() or cols.any()


HIDDEN = ("129", "split"), ("keys behind the last query", "fused")  # the others are slow
# in the interpreter
not_finite = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in")


def with_hidden():
    for name in CASES:
        for backward in ("split", "fused"):
            marks = () if (name, backward) in HIDDEN else pytest.mark.slow
            yield pytest.param(name, backward, marks=marks)


@not_finite
@pytest.mark.parametrize("name, backward", [*with_hidden()])
def test_what_nobody_sees_changes_no_bit(name, backward):
    """Whatever is in keys, values, queries and cotangents of no pair. The fused form is done again, as two kernels."""
    z, kwargs = CASES[name]
    args, dtype = draw(bf16, z), "bfloat16"
    masks = {
        name: x for name, x in kwargs.items() if name not in ("logits_soft_cap", "scale", "sinks")
    }
    given = cotangents(args, dtype)
    dirty, dirty_given, some = unseen_filled(args, oracle.seen_by(*args[:2], **masks), given)
    if not some:
        return
    clean = run_both(args, kwargs | {"backward": "split"}, given, dtype)
    found = run_both(
        dirty, kwargs | {"backward": backward}, dirty_given, dtype, detect_races=backward == "split"
    )
    for (path, old), new in zip(
        jax.tree.leaves_with_path(clean), jax.tree.leaves(found), strict=True
    ):
        np.testing.assert_array_equal(old, new, err_msg=jax.tree_util.keystr(path))


def run_both(args, kwargs, cotangent, dtype, detect_races=True):
    with interpreted(detect_races):
        found = run_call(args, kwargs | {"implementation": "pallas"}, dtype, cotangent)
    return jax.tree.map(lambda x: x.astype(f32), found)


def test_a_tile_that_fails_is_done_again_among_more_than_a_block_can_tell_apart():
    """Tiles 1 and 17 of one block share a bit: both are done again, and only what sees the NaN changes."""
    query, key, value = draw(bf16, small(T=60, S=60, K=20))
    dout, dlse = cotangents((query, key, value), "bfloat16")
    dirty = key.copy()
    dirty[:, 59, 17] = np.nan
    clean, found = (
        run((query, x, value), dict(is_causal=True), dout, dlse, 1) for x in (key, dirty)
    )
    for name, old, new in zip(("out", "lse", "dq", "dk", "dv"), clean, found, strict=True):
        np.testing.assert_array_equal(np.delete(old, 17, 2), np.delete(new, 17, 2), err_msg=name)
        if name in ("out", "lse", "dq"):
            np.testing.assert_array_equal(old[:, :59], new[:, :59], err_msg=name)
            assert np.isnan(new[:, 59, 17]).all()


def run(args, how, dout, dlse, multiprocessors=2):
    def both(query, key, value):
        call = functools.partial(
            dot_product_attention, **how, implementation="pallas", return_residual=True
        )
        results, pull = jax.vjp(call, query, key, value)
        return *results, *pull((dout, dlse))

    with interpreted(multiprocessors=multiprocessors):
        return jax.tree.map(lambda x: np.asarray(x, f32), jax.jit(both)(*args))


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it_in_its_column():
    query, key, value = draw(bf16, small(T=200, S=200))
    value[:, 150, :, 5] = np.nan
    out, lse = forward((query, key, value), is_causal=True)
    expected = np.zeros(out.shape, bool)
    expected[:, 150:, :, 5] = True
    np.testing.assert_array_equal(np.isnan(out), expected)
    assert np.isfinite(lse).all()


# ---- inference stores no lse; vmap, and devices


def lowered(function, *shapes, **how) -> str:
    with pretend_device("gpu", "9.0"):
        return jax.jit(function, **how).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> int:
    return len(re.findall(r"custom_call @mosaic_gpu", text))


def training(query, key, value, dout):
    out, pull = jax.vjp(lambda *x: dot_product_attention(*x, is_causal=True), query, key, value)
    return out, *pull(dout)


@pytest.mark.parametrize("H", [64, 128, 200])
def test_calls_lower_for_cuda(H):
    x = jax.ShapeDtypeStruct((2, 1000, 4, H), bf16)
    inference = lowered(lambda *x: dot_product_attention(*x, is_causal=True), x, x, x)
    (kernel,) = [line for line in inference.splitlines() if "custom_call @mosaic_gpu" in line]
    assert "f32" not in kernel.split("->")[-1]  # no lse
    assert kernels(lowered(training, x, x, x, x)) == (3 if H <= 128 else 1)


def test_transformations_lower_for_cuda():
    x = jax.ShapeDtypeStruct((3, 2, 256, 4, 64), bf16)
    assert (
        kernels(lowered(jax.vmap(training, (0, None, 0, 0)), x, x.update(shape=x.shape[1:]), x, x))
        == 3
    )
    ids = jax.ShapeDtypeStruct((3, 2, 256), np.int32)
    packed = lambda q, ids: dot_product_attention(
        q, q, q, query_segment_ids=ids, implementation="pallas"
    )
    assert kernels(lowered(jax.vmap(packed), x, ids)) == 1
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    spec = P("x", None, "y")
    y = jax.ShapeDtypeStruct((2, 256, 4, 64), bf16)
    assert (
        kernels(
            lowered(
                jax.shard_map(training, mesh=mesh, in_specs=spec, out_specs=(spec,) * 4), y, y, y, y
            )
        )
        == 3
    )
    loss = jax.checkpoint(lambda q: dot_product_attention(q, q, q).astype(f32).sum())
    # the forward, called twice, stands there once
    assert kernels(lowered(jax.value_and_grad(loss), y)) == 3

    def layers(x):
        step = lambda x, _: (dot_product_attention(x, x, x), None)
        return jax.lax.scan(step, x, length=5)[0].astype(f32).sum()

    assert kernels(lowered(jax.grad(layers), y)) == 3


def stand_in(monkeypatch):
    """The kernels' contracts in plain JAX, for what happens around them."""
    from memeff.pallas.hopper import backward_key, backward_query, calls

    def cut(lengths, arrays):
        return [x[:, : lengths[1] if i in (1, 2) else lengths[0]] for i, x in enumerate(arrays)]

    def logits(problem, query, key):
        s = jnp.einsum(
            "btnh,bsnh->bnts",
            query,
            jnp.repeat(key, query.shape[2] // key.shape[2], 2),
            preferred_element_type=f32,
        )
        return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s * problem.scale, -jnp.inf)

    def attend(problem, lengths, arrays, scalars, want_lse, tiling):
        (T, S), (query, key, value) = lengths, arrays
        query, key, value = query[:, :T], key[:, :S], value[:, :S]
        s = logits(problem, query, key)
        lse = jax.nn.logsumexp(s, -1)
        p = jnp.exp(s - lse[..., None]).astype(value.dtype)
        out = jnp.einsum(
            "bnts,bsnd->btnd", p, jnp.repeat(value, query.shape[2] // value.shape[2], 2)
        )
        return out, jnp.pad(
            lse, [(0, 0), (0, 0), (0, -lse.shape[-1] % tiling.rows)]
        ) if want_lse else None

    def queries(problem, lengths, arrays, dlse, scalars, tiling):
        *arrays, lse = arrays
        query, key, value, out, dout = cut(lengths, arrays)
        delta = -jnp.einsum("btnd,btnd->bnt", out.astype(f32), dout.astype(f32))
        delta = jnp.pad(delta, [(0, 0), (0, 0), (0, lse.shape[-1] - delta.shape[-1])]) + (
            0 if dlse is None else dlse
        )
        ds, _ = cotangents_of(problem, query, key, value, dout, lse, delta)
        key = jnp.repeat(key, query.shape[2] // key.shape[2], 2).astype(f32)
        return jnp.einsum("bnts,bsnh->btnh", ds, key).astype(query.dtype), delta

    def cotangents_of(problem, query, key, value, dout, lse, delta):
        T, G = query.shape[1], query.shape[2] // key.shape[2]
        p = jnp.exp(logits(problem, query, key) - lse[..., :T, None] * np.log(2.0).astype(f32))
        dp = jnp.einsum(
            "btnd,bsnd->bnts", dout, jnp.repeat(value, G, 2), preferred_element_type=f32
        )
        return p * (dp + delta[..., :T, None]) * problem.scale, p

    def keys(problem, lengths, arrays, scalars, tiling):
        query, key, value, dout = cut(lengths, arrays[:4])
        ds, p = cotangents_of(problem, query, key, value, dout, *arrays[4:])
        total = lambda x: x.reshape(*key.shape[:3], -1, x.shape[-1]).sum(3).astype(key.dtype)
        return total(jnp.einsum("bnts,btnh->bsnh", ds, query.astype(f32))), total(
            jnp.einsum("bnts,btnd->bsnd", p, dout.astype(f32))
        )

    monkeypatch.setattr(calls, "attend", attend)
    monkeypatch.setattr(backward_query, "query_gradient", queries)
    monkeypatch.setattr(backward_key, "key_value_gradient", keys)


def of_all(query, key, value, dout, dlse, implementation):
    call = functools.partial(
        dot_product_attention, is_causal=True, return_residual=True, implementation=implementation
    )
    results, pull = jax.vjp(call, query, key, value)
    return *results, *pull((dout, dlse))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("K", [4, 2, 1])
def test_devices_run_their_own_part(K, axis_type, monkeypatch):
    """Batch and heads sharded; only query heads on other devices than their keys' sums take a word."""
    monkeypatch.setattr(tile_sizes, "may_be_sharded", lambda: True)
    stand_in(monkeypatch)
    args = draw(f32, Sizes(B=2, T=37, S=37, K=K, G=4 // K, H=8, D=8))
    dout, dlse = cotangents(args)
    expected = jax.jit(functools.partial(of_all, implementation="xla"))(*args, dout, dlse)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    spec = P("x", None, "y")
    place = lambda x, spec=spec: jax.device_put(x, NamedSharding(mesh, spec))
    keys = spec if K > 1 else P("x")
    arrays = place(args[0]), place(args[1], keys), place(args[2], keys), place(dout), place(dlse)
    monkeypatch.setattr("memeff.pallas.hopper.implementation.why_not", lambda *_: None)
    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        call = jax.jit(functools.partial(of_all, implementation="pallas"))
        found, text = call(*arrays), call.lower(*arrays).compile().as_text()
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
        assert x.sharding.spec[0] == "x"
    collectives = set(re.findall(r"(all-\w+|collective-\w+)\(", text))
    assert collectives == ({"all-reduce"} if K == 1 else set())


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ["q_offset", "key_value_seq_lengths", "query_segment_ids", "mask"])
def test_small_operands_may_lie_whole_on_each_device(name, axis_type, monkeypatch):
    """Gradients lie as the query does. (The stand-in looks at none of these; what they hide is tested above.)"""
    monkeypatch.setattr(tile_sizes, "may_be_sharded", lambda: True)
    stand_in(monkeypatch)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    arrays = [
        place(x, P("x", None, "y")) for x in draw(f32, Sizes(B=2, T=37, S=37, K=4, G=1, H=8, D=8))
    ]
    small = {
        "q_offset": i32(3),
        "mask": np.ones((1, 1, 1, 37), bool),
        "query_segment_ids": np.zeros((2, 37), np.int32),
    }
    monkeypatch.setattr("memeff.pallas.hopper.implementation.why_not", lambda *_: None)

    def total(query, key, value, small):
        return dot_product_attention(
            query, key, value, is_causal=True, implementation="pallas", **{name: small}
        ).sum()

    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        found = jax.jit(jax.grad(total))(*arrays, place(small.get(name, i32([30, 20])), P()))
    assert found.sharding.spec[:3] == ("x", None, "y")


@pytest.mark.parametrize("batched", [(0, None, None), (None, 0, 0), (0, 0, 0)], ids=str)
def test_vmap_folds_into_the_batch(batched, monkeypatch):
    stand_in(monkeypatch)
    monkeypatch.setattr("memeff.pallas.hopper.implementation.why_not", lambda *_: None)
    args = draw(f32, Sizes(B=2, T=7, S=7, K=2, G=2, H=8, D=8))
    dout, dlse = cotangents(args)
    args = [
        x if axis is None else np.stack([x, 2 * x, -x])
        for x, axis in zip(args, batched, strict=True)
    ]
    with pretend_device("gpu", "9.0"):
        found = jax.jit(
            jax.vmap(functools.partial(of_all, implementation="pallas"), (*batched, None, None))
        )(*args, dout, dlse)
    for i in range(3):
        one = [x if axis is None else x[i] for x, axis in zip(args, batched, strict=True)]
        for x, y in zip(found, of_all(*one, dout, dlse, "xla"), strict=True):
            np.testing.assert_allclose(x[i], y, atol=2e-5)


# ---- which tiles are visited


@pytest.mark.parametrize("size", [4, 6])
def test_visits_are_what_the_picture_has(size):
    """Every tile with a pair that is seen, once; the masked ones first; those behind them wholly seen."""
    from memeff.masking import MaskInputs, mask_pairs
    from memeff.pallas.hopper import tile_ranges

    T, S, rows = 19, 23, 5
    kinds = [
        (None, None, 0),
        (None, 0, 0),
        (None, 0, 7),
        (None, 0, -6),
        (3, 2, 0),
        (0, 0, 1),
        (4, None, 2),
        (None, 9, -3),
    ]
    for left, right, offset in kinds:
        problem = Problem(left=left, right=right, q_offset=offset)
        for kv_end, q_end in ((S, T), (11, T), (S, 8), (0, T)):
            sight = MaskInputs(q_lengths=q_end, kv_lengths=kv_end)
            whole = np.asarray(
                mask_pairs(problem, sight, np.arange(T)[:, None], np.arange(S)[None])
            )
            for find, own, seen in (
                (tile_ranges.keys_seen, T, whole),
                (tile_ranges.queries_seeing, S, whole.T),
            ):
                for first in range(0, own, rows):
                    last = min(first + rows, own) - 1
                    visits = find(problem, offset, first, last, (q_end, kv_end), size)
                    order = [int(visits.tile(n)) for n in range(int(visits.total))]
                    tiles = [
                        seen[first : last + 1, j * size : (j + 1) * size]
                        for j in range(-(-seen.shape[1] // size))
                    ]
                    assert sorted(order) == list(range(int(visits.low), int(visits.high)))
                    assert {j for j, tile in enumerate(tiles) if tile.any()} <= set(order)
                    for n, j in enumerate(order):
                        assert n < visits.masked or (tiles[j].all() and tiles[j].shape[1] == size)
                    masked, at = int(visits.masked), first + 2 + offset
                    near = visits.nearest_first(at, size)
                    there = [int(near.tile(n)) for n in range(int(visits.total))]
                    assert there[:masked] == order[:masked] and sorted(there) == sorted(order)
                    assert there[masked:] == [] or all(
                        abs(j - at // size) >= abs(there[masked] - at // size)
                        for j in there[masked:]
                    )
                    for row in range(first, last + 1):
                        hidden = int(
                            visits.hidden(find(problem, offset, row, row, (q_end, kv_end), size))
                        )
                        assert 0 <= hidden <= visits.masked and not any(
                            tiles[j][row - first].any() for j in order[:hidden]
                        )
                    if visits.covers and visits.right > 0 and find is tile_ranges.keys_seen:
                        behind = seen[first : last + 1, int(visits.high - visits.right) * size :]
                        assert (behind.any(1) | ~seen[first : last + 1].any(1)).all()


@pytest.mark.parametrize("keys", [False, True], ids=["by queries", "by keys"])
def test_visits_of_segments_in_order(keys):
    """All that is seen is visited; without masks only what is wholly seen, and long segments have such tiles."""
    from memeff.masking import MaskInputs, mask_pairs
    from memeff.pallas.hopper import tile_ranges
    from memeff.pallas.hopper.scalars import Scalars, with_ranges

    T, S, rows, size, without_masks = 40, 44, 5, 4, 0
    ids = [
        np.sort(np.random.default_rng(i).integers(0, 3, n)).astype(np.int32)
        for i, n in enumerate((T, S))
    ]
    scalars = with_ranges(
        Scalars(q_segments=ids[0][None], kv_segments=ids[1][None]), (T, S), rows, keys
    )
    for left, right, offset in [(None, None, 0), (None, 0, 4), (9, 2, 0)]:
        problem = Problem(left=left, right=right, q_offset=offset)
        sight = MaskInputs(q_segments=ids[0][:, None], kv_segments=ids[1][None])
        seen = np.asarray(mask_pairs(problem, sight, np.arange(T)[:, None], np.arange(S)[None]))
        seen, find = (seen.T, tile_ranges.queries_seeing) if keys else (seen, tile_ranges.keys_seen)
        for i, first in enumerate(range(0, seen.shape[0], rows)):
            last = min(first + rows, seen.shape[0]) - 1
            visits = find(problem, offset, first, last, (T, S), size)
            visits = visits.within(
                *(x[0, i] for x in (scalars.first, scalars.behind, scalars.alone)), size
            )
            order = [int(visits.tile(n)) for n in range(int(visits.total))]
            tiles = [
                seen[first : last + 1, j * size : (j + 1) * size]
                for j in range(-(-seen.shape[1] // size))
            ]
            assert {j for j, tile in enumerate(tiles) if tile.any()} <= set(order) and len(
                set(order)
            ) == len(order)
            for j in order[int(visits.masked) :]:
                assert tiles[j].all() and tiles[j].shape[1] == size
                without_masks += 1
    assert without_masks > 20


@pytest.mark.parametrize(
    "axis_type, mapped", [(AxisType.Auto, False), (AxisType.Auto, True), (AxisType.Explicit, False)]
)
def test_each_device_has_the_sinks_of_its_heads(axis_type, mapped, monkeypatch):
    """A kernel that says what it was given stands in."""
    from memeff.logits import LOG2_E
    from memeff.pallas.hopper import calls

    def attend(problem, lengths, arrays, scalars, want_lse, tiling):
        return arrays[0][..., : arrays[2].shape[-1]] * (scalars.sinks / LOG2_E)[
            :, None, :, None
        ], None

    monkeypatch.setattr(calls, "attend", attend)
    monkeypatch.setattr(tile_sizes, "may_be_sharded", lambda: True)
    monkeypatch.setattr("memeff.pallas.hopper.implementation.why_not", lambda *_: None)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    query, sinks = np.ones((2, 16, 4, 64), f32), np.array([[1, 2, 3, 4], [5, 6, 7, 8]], f32)
    call = lambda sinks, query: dot_product_attention(
        query, query, query, sinks=sinks, implementation="pallas"
    )
    call = jax.vmap(call, (0, None)) if mapped else call
    sinks = sinks if mapped else sinks[0]
    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        found = jax.jit(call)(sinks, jax.device_put(query, NamedSharding(mesh, P("x", None, "y"))))
    expected = np.broadcast_to(sinks[..., None, None, :, None], (*sinks.shape[:-1], *query.shape))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
