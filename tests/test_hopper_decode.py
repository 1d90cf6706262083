"""The decode kernel: few queries of each sequence against a long cache that is read in place.

It runs in Mosaic's interpreter, which has no counters in global memory. So it merges in a second
kernel there, and only the tests on a GPU see one kernel.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_hopper_tangent
from cases import Sizes
from conftest import Result, assert_result, few, plain_call, true_call
from decode_cases import CASES, FUNCTIONS, SPLIT, filled
from hopper_cases import (
    assert_equal_bits,
    assert_kernels,
    bf16,
    draw,
    f32,
    i32,
    interpreted,
    kernels,
    lowered,
    needs_kernels,
    not_finite,
)

import memeff
from memeff.device import pretend_device

pytestmark = needs_kernels

FUNCTION_ARGUMENTS = ("score_fn", "mask_fn")


def attend(*args, **kwargs):
    """Return out and lse of the kernels."""
    return memeff.dot_product_attention(
        *args, **kwargs, implementation="pallas", return_residual=True
    )


def arrays_of(kwargs: dict) -> dict:
    """Return the keyword arguments that are arrays."""
    return {name: x for name, x in kwargs.items() if isinstance(x, np.ndarray)}


def run_all(inputs: list, **static) -> list:
    """Return out and lse of calls (args, kwargs) that share one compilation."""
    run = jax.jit(lambda args, kwargs: attend(*args, **kwargs, **static))
    with interpreted():
        return [jax.tree.map(np.asarray, run(args, kwargs)) for args, kwargs in inputs]


def assert_right(name: str, dtype, z: Sizes, kwargs: dict, instead: dict | None = None) -> None:
    """Compare out and lse with the oracle, which has `instead` of functions; on any device."""
    args = draw(dtype, z)
    out, lse = jax.tree.map(np.asarray, jax.jit(functools.partial(attend, **kwargs))(*args))
    known = {key: x for key, x in kwargs.items() if key not in FUNCTION_ARGUMENTS}
    known |= instead or {}
    dtype = jnp.dtype(dtype).name
    truth = true_call(args, known, dtype)
    assert_result(Result(out, lse, {}), plain_call(args, known, dtype), truth, dtype, name)


# ---- values


@pytest.mark.parametrize("name", few(CASES, ("drafts",)))
def test_values(name):
    with interpreted():
        assert_right(name, bf16, *CASES[name])


@pytest.mark.parametrize("name", few(FUNCTIONS, ("alibi",)))
def test_functions(name):
    with interpreted():
        assert_right(name, bf16, *FUNCTIONS[name])


@pytest.mark.slow
def test_float16():
    with interpreted():
        assert_right("float16", np.float16, *CASES["ragged"])


@pytest.mark.slow
def test_gradient():
    assert_kernels("ragged", CASES["ragged"])


@pytest.mark.slow
def test_tangent():
    z, kwargs = CASES["ragged"]
    args = draw(bf16, z)
    along = test_hopper_tangent.directions(args)
    tangents = test_hopper_tangent.interpreted_tangents(args, along, kwargs)
    test_hopper_tangent.assert_right(tangents, args, along, kwargs, "bfloat16", "ragged")


@pytest.mark.slow
def test_vmap_adds_to_the_batch():
    z = Sizes(B=1, T=1, S=600, K=2, G=1, H=64, D=64)
    args = [np.stack([x, x[..., ::-1]]) for x in draw(bf16, z)]
    lengths = i32([[600], [130]])

    def call(query, key, value, lengths):
        return attend(query, key, value, key_value_seq_lengths=lengths)

    with interpreted():
        mapped = jax.jit(jax.vmap(call))(*args, lengths)
        for n in range(2):
            alone = jax.jit(call)(*(x[n] for x in args), lengths[n])
            assert_equal_bits(jax.tree.map(lambda x, n=n: x[n], mapped), alone)


# ---- bits

BITS = Sizes(B=7, T=1, S=1088, K=2, G=2, H=64, D=64)  # two whole splits, and one tile


@not_finite
@pytest.mark.parametrize("H, K", [(64, 1), (64, 2), (128, 2)])  # queries first; joined; keys first
def test_the_rest_of_the_cache_changes_no_bit(H, K):
    """Neither numbers behind a sequence's end nor NaN do, in tiles that are read or not."""
    z = Sizes(B=4, T=1, S=1088, K=K, G=2, H=H, D=H)
    lengths = [0, 3, 640, 1088]
    query, key, value = draw(bf16, z)
    behind = np.arange(z.S)[:, None, None] >= np.reshape(lengths, (-1, 1, 1, 1))
    arrays = arrays_of(filled(lengths))
    calls = [((query, key, value), arrays)]
    for bad in (np.nan, np.inf, 7.0):
        dirty = (np.where(behind, bad, x.astype(f32)).astype(bf16) for x in (key, value))
        calls.append(((query, *dirty), arrays))
    clean, *dirty = run_all(calls, is_causal=True)
    for results in dirty:
        assert_equal_bits(results, clean)


@pytest.mark.slow
def test_a_row_has_the_same_bits_alone_and_in_a_batch():
    lengths = i32([1088, 1, 512, 513, 0, 1000, 64])
    args = draw(bf16, BITS)
    (together,) = run_all([(args, arrays_of(filled(lengths)))], is_causal=True)
    inputs = []
    for b in range(BITS.B):
        row = tuple(x[b : b + 1] for x in args)
        inputs.append((row, arrays_of(filled(lengths[b : b + 1]))))
    for b, alone in enumerate(run_all(inputs, is_causal=True)):
        assert_equal_bits(alone, jax.tree.map(lambda x, b=b: x[b : b + 1], together))


@pytest.mark.slow
@pytest.mark.parametrize("H, T", [(64, 2), (128, 4)])
def test_drafts_have_the_bits_of_single_tokens(H, T):
    """Row t of T queries is the row of a call with that query alone.

    A CPU adds in another order beyond the eight rows to which a tile of keys as first factors is
    padded, where heads are of 128 or two of 64;
    tests/test_gpu_hopper_decode.py has more.
    """
    z = BITS._replace(B=2, T=T, H=H, D=H)
    ends = i32([1080, 515])
    args = draw(bf16, z)
    (together,) = run_all([(args, arrays_of(filled(ends, T)))], is_causal=True)
    query, key, value = args
    inputs = []
    for t in range(T):
        row = query[:, t : t + 1], key, value
        inputs.append((row, arrays_of(filled(ends - T + 1 + t))))
    for t, alone in enumerate(run_all(inputs, is_causal=True)):
        assert_equal_bits(alone, jax.tree.map(lambda x, t=t: x[:, t : t + 1], together))


@pytest.mark.slow
def test_rows_are_those_of_the_full_causal_call():
    """T queries from 1 to 8 at several offsets, by the law of tolerance."""
    z = Sizes(B=1, T=648, S=648, K=1, G=2, H=64, D=64)
    query, key, value = draw(bf16, z)
    kwargs = dict(is_causal=True)
    truth = true_call((query, key, value), kwargs, "bfloat16")
    plain = plain_call((query, key, value), kwargs, "bfloat16")
    for T in range(1, 9):
        ends = (T, 65, 513, 648)
        inputs = []
        for end in ends:
            part = query[:, end - T : end], key, value
            inputs.append((part, arrays_of(filled([end], T))))
        for end, (out, lse) in zip(ends, run_all(inputs, is_causal=True), strict=True):
            rows = slice(end - T, end)
            baselines = tuple(Result(x.out[:, rows], x.lse[:, rows], {}) for x in plain)
            expected = Result(truth.out[:, rows], truth.lse[:, rows], {})
            assert_result(Result(out, lse, {}), baselines, expected, "bfloat16", f"{T} to {end}")


@not_finite
@pytest.mark.parametrize("D", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_nan_reaches_the_rows_that_see_it_alone(D):
    """A value that is NaN in one column makes that column NaN, for the queries that see the key."""
    z = Sizes(B=1, T=4, S=600, K=1, G=2, H=64, D=D)
    query, key, value = draw(bf16, z)
    arrays = arrays_of(filled([580], T=4))
    bad = value.copy()
    bad[0, 578, 0, D - 3] = np.nan  # only the last two queries see it
    (out, lse), (dirty_out, dirty_lse) = run_all(
        [((query, key, value), arrays), ((query, key, bad), arrays)], is_causal=True
    )
    expected = out.copy()
    expected[:, 2:, :, D - 3] = np.nan
    assert_equal_bits((dirty_out, dirty_lse), (expected, lse))


@not_finite
def test_nan_of_a_head_stays_in_it():
    """Two key heads of 64 are one of 128 in the kernel. A key and a value are NaN in the second."""
    z = Sizes(B=1, T=2, S=600, K=2, G=3, H=64, D=64)
    query, key, value = draw(bf16, z)
    arrays = arrays_of(filled([580], T=2))
    bad_key, bad_value = key.copy(), value.copy()
    bad_key[0, 17, 1, 5] = np.nan
    bad_value[0, 18, 1, 6] = np.inf
    clean, of_key, of_value = run_all(
        [((query, *x), arrays) for x in ((key, value), (bad_key, value), (key, bad_value))],
        is_causal=True,
    )
    for out, lse in (of_key, of_value):
        assert_equal_bits((out[:, :, :3], lse[:, :, :3]), (clean[0][:, :, :3], clean[1][:, :, :3]))
    assert np.isnan(of_key[0][:, :, 3:].astype(f32)).all() and np.isnan(of_key[1][:, :, 3:]).all()
    bad = ~np.isfinite(of_value[0][:, :, 3:].astype(f32))
    assert bad[..., 6].all() and bad.sum() == 6


@not_finite
def test_values_hidden_from_a_head_may_be_nan_in_it():
    """Each of two joined heads sees keys at which the other's values are NaN."""
    z = Sizes(B=1, T=2, S=600, K=2, G=1, H=64, D=64)
    query, key, value = draw(bf16, z)
    bad = value.copy()
    bad[0, 1::2, 0] = np.nan  # head 0 sees even positions
    bad[0, 1::3, 1] = np.nan
    calls = [((query, key, x), dict(q_offset=i32([500]))) for x in (value, bad)]
    clean, dirty = run_all(calls, mask_fn=lambda b, h, i, j, _: j % (h + 2) != 1)
    assert_equal_bits(dirty, clean)


# ---- the choice

LONG = Sizes(B=2, T=1, S=8192, K=4, G=2, H=128, D=128)


def explain(z: Sizes, **kwargs) -> str:
    """Return what `memeff.explain` says of a call in bfloat16 on an H200."""
    shapes = [(z.B, z.T, z.K * z.G, z.H), (z.B, z.S, z.K, z.H), (z.B, z.S, z.K, z.D)]
    args = [jax.ShapeDtypeStruct(shape, bf16) for shape in shapes]
    with pretend_device("gpu", "9.0"):
        return str(memeff.explain(*args, **kwargs))


@pytest.mark.parametrize("S, keys", [(8192, 512), (32768, 1024), (131072, 4096)])
def test_explain_names_the_kernel(S, keys):
    text = explain(LONG._replace(S=S), is_causal=True)
    assert f'"pallas" runs this call on gpu: decode kernel, {keys} keys a split.' in text


@pytest.mark.parametrize(
    "change, kwargs, reason",
    [
        (dict(T=33, G=4), {}, "their decode kernel supports up to 128 rows, queries times heads"),
        (dict(H=96, D=96), {}, "supports heads of 64 and 128, and this call has H=96, D=96"),
        (dict(S=8188), {}, "supports lengths that are multiples of 8, and this call has S=8188"),
        (
            {},
            dict(score_fn=memeff.scores.relative(np.zeros((8, 5), f32))),
            "does not support functions that read a table of distances",
        ),
    ],
)
def test_explain_says_why_the_chunked_path_runs_instead(change, kwargs, reason):
    text = explain(LONG._replace(**change), **kwargs)
    assert text.startswith('"xla" runs this call')
    assert reason in text


def test_the_call_is_one_kernel_that_reads_the_cache_in_place():
    """Nothing else reads or writes an array as long as the cache."""
    shapes = [(2, 1, 8, 128), (2, 8192, 4, 128), (2, 8192, 4, 128)]
    args = [jax.ShapeDtypeStruct(shape, bf16) for shape in shapes]
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

    def call(query, key, value, lengths):
        return memeff.dot_product_attention(
            query, key, value, is_causal=True, q_offset=lengths - 1, key_value_seq_lengths=lengths
        )

    text = lowered(call, *args, lengths)
    assert kernels(text) == 1
    for line in text.splitlines():
        if "x8192x" in line and "mosaic_gpu" not in line:
            assert re.search(r"func\.func|call @|optimization_barrier|return", line), line


# ---- the work of thread blocks


@pytest.mark.parametrize("window", [(None, 0), (700, 0), (90, 40), (None, None)])
def test_items_visit_each_tile_that_is_seen_once(window):
    """Split n holds the tiles from n times its length on, whatever the window and the blocks."""
    from memeff.pallas.hopper.decode_work import DecodeSizes, for_each_item, visits_of
    from memeff.pallas.hopper.scalars import Scalars
    from memeff.pallas.hopper.scheduler import CallSizes
    from memeff.problem import Problem

    B, T, S, K = 5, 3, 2000, 3
    lengths = jnp.array([0, 1, 600, 1024, 2000])
    offset = lengths - T
    sizes = DecodeSizes.of(CallSizes(B, T, S, K, 2), 64, 64, None, bf16)
    problem = Problem(left=window[0], right=window[1])
    scalars = Scalars(q_offset=offset, kv_lengths=lengths)
    tiles = np.arange(-(-S // sizes.tile))

    def count(item, _next_item, _is_last, visited):
        assert sizes.consumers == 2
        for consumer in range(2):
            visits = visits_of(sizes, item, consumer)
            n = (tiles - visits.first) // visits.step
            is_visited = (tiles - visits.first) % visits.step == 0
            is_visited &= (n >= 0) & (n < visits.total)
            is_visited &= tiles // sizes.tiles_of_split == item.split
            visited = visited.at[item.b, visits.heads[0], :-1].add(is_visited.astype(jnp.int32))
            visited = visited.at[item.b, visits.heads[0], -1].add(visits.total)
        return visited

    @jax.jit
    def run(block, visited):
        return for_each_item(problem, sizes, scalars, 4, block, count, visited)

    visited = jnp.zeros((B, K, len(tiles) + 1), jnp.int32)
    for block in range(4):
        visited = run(jnp.int32(block), visited)
    q_pos, k_pos = np.arange(T)[:, None] + np.reshape(offset, (-1, 1, 1)), np.arange(S)
    seen = k_pos < np.reshape(lengths, (-1, 1, 1))
    if window[0] is not None:
        seen = seen & (k_pos >= q_pos - window[0])
    if window[1] is not None:
        seen = seen & (k_pos <= q_pos + window[1])
    seen = np.pad(seen.any(axis=1), [(0, 0), (0, -S % sizes.tile)])
    expected = seen.reshape(B, -1, sizes.tile).any(axis=2)
    expected = np.repeat(expected[:, None], K, axis=1)
    np.testing.assert_array_equal(visited[..., :-1], expected)
    np.testing.assert_array_equal(visited[..., -1], expected.sum(axis=2))


def test_the_length_of_a_split_depends_on_the_capacity_alone():
    from memeff.pallas.hopper.decode_work import keys_of_split

    assert SPLIT == keys_of_split(1) == keys_of_split(16384)
    assert keys_of_split(16392) == keys_of_split(32768) == 1024
    assert keys_of_split(32776) == keys_of_split(65536) == 2048
    assert keys_of_split(131072) == 4096
