"""The TPU kernels, in Pallas' interpreter: values, gradients, what they refuse, and devices."""

import functools
import subprocess
import sys
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES, SINGLES, Sizes, qkv
from conftest import assert_case, assert_truth, few, run_call
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_calls import assert_close
from tpu_calls import inputs, kernels, run_kernels

import memeff
from memeff import implementations
from memeff.arguments import bind_arguments
from memeff.device import Device, pretend_device
from memeff.diagnostics.bind import prepare_shapes
from memeff.pallas.tpu import implementation, splash
from memeff.pallas.tpu.tables import Visits
from memeff.problem import Problem

f32 = np.float32
TPU = Device("tpu")

# ---- which calls


def reason_against(args, kwargs) -> str | None:
    """Return why the kernels cannot run a call."""
    with pretend_device("tpu"):
        call = prepare_shapes("plan", bind_arguments("plan", *args, **kwargs))
        return implementations.why_not("pallas", call.chosen.problem, call.operands)


TAKE_TOKENS = (
    "the TPU kernels support a `mask` of keys [B, 1, 1, S] or of queries [B, 1, T, 1], and no other"
)
TAKE_NUMBERS = "the TPU kernels support `scale` and `logits_soft_cap` as numbers, not as arrays"
REFUSED = {
    "bias_full": "the TPU kernels do not support `bias`",
    "bias_row": "the TPU kernels do not support `bias`",
    "bias_hides": "the TPU kernels do not support `bias`",
    "mask_dense": TAKE_TOKENS,
    "mask_heads": TAKE_TOKENS,
    "scale_array": TAKE_NUMBERS,
    "soft_cap_array": TAKE_NUMBERS,
    "q_offset_array": "the TPU kernels support `q_offset` as a number, not as an array",
    "dropout": "the TPU kernels do not support dropout",
    "dropout_each": "the TPU kernels do not support dropout",
    "precision": "the TPU kernels multiply at the default precision and support no `precision`",
}
FEATURES_IN_SIZES = {"one_key", "no_leads", "three_leads", "chunk_too_large", "everything"}
RUN = tuple(name for name in SINGLES if name not in REFUSED.keys() | FEATURES_IN_SIZES)


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_is_refused_in_words(name):
    args, kwargs = inputs(name)
    assert reason_against(args, kwargs) == REFUSED[name]
    with pretend_device("tpu"):
        assert REFUSED[name] in memeff.explain(*args, **kwargs)
        with pytest.raises(NotImplementedError, match="cannot run this call: the TPU kernels"):
            memeff.dot_product_attention(*args, **kwargs, implementation="pallas")


def test_every_other_single_case_runs():
    for name in RUN:
        assert reason_against(*inputs(name)) is None, name


def shapes(T=256, S=None, N=2, H=64, dtype="bfloat16"):
    query = jax.ShapeDtypeStruct((1, T, N, H), dtype)
    key = jax.ShapeDtypeStruct((1, S or T, N, H), dtype)
    return query, key, key


@pytest.mark.parametrize(
    "args, kwargs, reason",
    [
        (shapes(dtype="float16"), {}, "support bfloat16 and float32, and this call has float16"),
        (shapes(H=257), {}, "support heads of up to 256, and this call has H=257, D=257"),
        (shapes(T=2**18), {}, "list up to 131072 tiles in scalar memory, and this call has 262144"),
        (shapes(), {"score_fn": memeff.scores.soft_cap(2.0)}, "do not support `score_fn` and"),
        (shapes(), {"backward": "fused"}, 'do not support backward="fused"'),
        (shapes(T=0, S=3), {}, "do not support sizes of 0"),
    ],
)
def test_limits_are_reasons(args, kwargs, reason):
    fused = kwargs.pop("backward", None) == "fused"
    with pretend_device("tpu"):
        call = prepare_shapes("plan", bind_arguments("plan", *args, **kwargs))
    assert reason in str(implementation.why_not(call.chosen.problem, call.operands, TPU, fused))


def test_only_a_tpu_has_them():
    args, kwargs = inputs("plain")
    for platform in ("cpu", "gpu"):
        device = Device(platform)
        expected = f"the TPU kernels need a TPU, and this device is a {platform}"
        assert implementation.for_device(device) == expected
    with pretend_device("cpu"):
        assert "kernels need a GPU or a TPU" in memeff.explain(*args)


def test_another_jax_is_refused(monkeypatch):
    """Parameters that are not as expected are a reason, and not an error while a kernel runs."""
    splash.why_not.cache_clear()
    assert splash.why_not() is None
    with monkeypatch.context() as patch:
        patch.setattr(splash, "VERSIONS", ())
        splash.why_not.cache_clear()
        assert f"and this is jax {jax.__version__}" in str(reason_against(*inputs("plain")))
    name = "_splash_attention_bwd_dq"
    monkeypatch.setitem(splash.EXPECTED, name, splash.EXPECTED[name][1:])
    splash.why_not.cache_clear()
    assert "has other parameters" in str(reason_against(*inputs("plain")))
    monkeypatch.setattr(splash, "MODULE", "jax.experimental.no_such_module")
    splash.why_not.cache_clear()
    assert f"which jax {jax.__version__} lacks" in str(reason_against(*inputs("plain")))
    splash.why_not.cache_clear()


def test_chosen_on_a_tpu_and_said_to_be_untimed():
    args = shapes()
    with pretend_device("tpu"):
        text = memeff.explain(*args, is_causal=True)
        assert text.startswith('"pallas" runs this call on tpu: the TPU kernels of JAX')
        assert "compiled for, never timed on a TPU" in text
        few_queries = memeff.explain(*shapes(T=8, S=256))
        assert few_queries.startswith('"xla"')
        assert "a tile of the TPU kernels would be mostly empty with 8 queries" in few_queries
        with pytest.warns(UserWarning, match="instead of the TPU's kernels, because the TPU"):
            jax.eval_shape(
                functools.partial(memeff.dot_product_attention, bias=jnp.ones(256)), *args
            )
    plan = memeff.plan(*args, device="tpu")
    assert plan.implementation == "pallas"
    assert plan.chunk_size == (256, 256)


def test_import_loads_no_kernel():
    code = "import sys, memeff.pallas; print([m for m in sys.modules if '.pallas.ops' in m])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# ---- values

FAST = ("multi_query", "segments", "sinks", "soft_cap")


@functools.cache
def results(names: tuple[str, ...], dtype="float32"):
    return run_kernels({name: inputs(name, dtype) for name in names}, dtype)


@pytest.mark.parametrize("name", FAST)
def test_numbers(name):
    assert_case(results(FAST)[name], name, "float32")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUN if name not in FAST])
def test_more_numbers(name):
    assert_case(results((name,))[name], name, "float32")


PAIRS = [name for name in CASES if name not in SINGLES]


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_features(name):
    """Each pair and mix of features is right, or refused with the reason of one of them."""
    reason = reason_against(*inputs(name))
    if reason is None:
        assert_case(results((name,))[name], name, "float32")
    else:
        assert reason in REFUSED.values()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "causal", "scale", "segments", "head_97", "sinks"])
def test_numbers_in_16_bits(name):
    assert_case(results((name,), "bfloat16")[name], name, "bfloat16")


# ---- many tiles

LONG = Sizes(B=1, T=300, S=411, K=1, G=2, H=16, D=24)
IDS = np.arange(LONG.S)[None] // 60
TILED = {
    "padding": {},
    "causal": {"is_causal": True},
    "offset": {"is_causal": True, "q_offset": 111},
    "window": {"local_window_size": (40, 20), "logits_soft_cap": 3.0},
    "rows that see nothing": {"local_window_size": (30, 0), "q_offset": 260},
    "documents": {
        "is_causal": True,
        "query_segment_ids": IDS[:, : LONG.T],
        "key_value_segment_ids": IDS,
        "key_value_seq_lengths": np.array([250]),
        "query_seq_lengths": np.array([290]),
    },
}


SLOW_TILED = ("offset", "window")
FAST_TILED = tuple(name for name in TILED if name not in SLOW_TILED)


@functools.cache
def tiled(names):
    args = qkv(np.random.default_rng(0), f32, LONG)
    return args, run_kernels({name: (args, TILED[name]) for name in names}, side=128)


@pytest.mark.parametrize("name", few(TILED, FAST_TILED))
def test_many_tiles(name):
    args, found = tiled(FAST_TILED if name in FAST_TILED else SLOW_TILED)
    assert_truth(found[name], name, args, TILED[name])


WINDOWS = [(None, 0, 0), (None, 0, 500), (100, None, -130), (90, 30, 50), (3, -2, 900), (64, 0, -9)]


@pytest.mark.parametrize(
    "T, S", few([(300, 700), (700, 300), (512, 512), (1, 900)], [(300, 700), (1, 900)])
)
def test_tables_name_each_visible_tile_once(T, S):
    tile = 64, 128
    pictures = []
    for left, right, offset in WINDOWS:
        problem = Problem(left=left, right=right, q_offset=offset)
        position = np.arange(T)[:, None] + offset
        cols = np.arange(S)
        sees = np.ones((T, S), bool)
        if left is not None:
            sees &= position - left <= cols
        if right is not None:
            sees &= cols <= position + right
        padded = np.pad(sees, [(0, -T % tile[0]), (0, -S % tile[1])])
        blocks: Any = padded.reshape(-(-T // tile[0]), tile[0], -(-S // tile[1]), tile[1]).any(
            (1, 3)
        )
        visits = Visits(problem, (T, S), tile)
        pictures.append((functools.partial(visits.table, prefetch=True), blocks))
        pictures.append((functools.partial(visits.mirrored().table, prefetch=False), blocks.T))
    tables = jax.jit(lambda: [make() for make, _ in pictures])()
    for table, (_, truth) in zip(tables, pictures, strict=True):
        if table is None:
            assert truth.all()
            continue
        assert len(table.blocks.T) == max(1, *np.sum(truth, axis=1))
        named = np.zeros_like(truth, int)
        for row, (numbers, visible) in enumerate(zip(*map(np.asarray, table), strict=True)):
            assert np.all((numbers >= 0) & (numbers < truth.shape[1]))
            np.add.at(named[row], numbers[visible == 1], 1)
        np.testing.assert_array_equal(named, truth)


def test_a_long_call_is_traced_without_its_mask():
    """At 131,072 tokens T x S booleans would be 17 GB, and the tables have 65,536 entries."""
    args = shapes(T=2**17, H=128)
    call = functools.partial(memeff.dot_product_attention, is_causal=True, implementation="pallas")
    with pretend_device("tpu"):
        jax.eval_shape(call, *shapes())  # imports
        tracemalloc.start()
        lowered = jax.jit(call).trace(*args).lower(lowering_platforms=("tpu",))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 2**26
    assert len(lowered.as_text()) < 2**21


# ---- NaN and Inf

EIGHTS = np.arange(64)[None].repeat(2, 0) // 8
SEEN = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (6, 3), "logits_soft_cap": 5.0},
    "segments": {"query_segment_ids": EIGHTS[:, :37], "key_value_segment_ids": EIGHTS[:, :53]},
    "lengths": {
        "query_seq_lengths": np.array([20, 37]),
        "key_value_seq_lengths": np.array([53, 27]),
    },
}


@pytest.mark.parametrize("name", few(SEEN, ("window",)))
def test_nan_reaches_what_sees_it(name):
    """NaN reaches the rows that see it, the keys that such a row sees, and nothing else."""
    args, _ = inputs("plain")
    hiding = {what: x for what, x in SEEN[name].items() if what != "logits_soft_cap"}
    seen = oracle.seen_by(args[0], args[1], **hiding)  # b n t s
    B, N, T, S = seen.shape
    i, j, n, k = 19, 16, 3, 1
    places = {"query": (0, i, n, 2), "key": (0, j, k, 1), "value": (0, j, k, 4)}
    for number, (what, place) in enumerate(places.items()):
        dirty = [x.copy() for x in args]
        dirty[number][place] = np.nan
        with kernels():
            found = run_call(tuple(dirty), SEEN[name] | {"implementation": "pallas"})
        rows = np.zeros((B, T, N), bool)
        if what == "query":
            rows[0, i, n] = seen[0, n, i].any()
        else:
            rows[0, :, 2 * k : 2 * k + 2] = seen[0, 2 * k : 2 * k + 2, :, j].T
        keys = np.zeros((B, S, N // 2), bool)
        for b, t, head in zip(*np.nonzero(rows), strict=True):
            keys[b, :, head // 2] |= seen[b, head, t]
        truths = {"out": rows, "query": rows, "key": keys, "value": keys}
        for array, truth in truths.items():
            numbers = found.out if array == "out" else found.grads[array]
            is_nan = np.isnan(numbers).any(-1)
            np.testing.assert_array_equal(is_nan, truth, err_msg=f"{array}, NaN in {what}")


@pytest.mark.parametrize("garbage", few((np.nan, np.inf, 1e38), (np.nan,)))
@pytest.mark.parametrize("name", few(("lengths", "window"), ("lengths",)))
def test_what_is_hidden_changes_no_bit(name, garbage):
    """Queries and keys that length or window hide altogether may hold anything."""
    from test_hidden_values import HIDDEN, _leaves, _run_filled

    hidden = HIDDEN[name]
    kwargs = {name: x for name, x in hidden.kwargs.items() if name != "bias"}
    kwargs["implementation"] = "pallas"
    with kernels():
        clean = _run_filled(hidden, kwargs, 0)
        dirty = _run_filled(hidden, kwargs, garbage)
    assert np.all(clean.out[hidden.rows] == 0)
    assert np.all(clean.lse[hidden.rows] == -np.inf)
    for what, x, y in _leaves(clean, dirty):
        np.testing.assert_array_equal(y, x, err_msg=what)


# ---- vmap and devices


def both(query, key, value, ids):
    """Return out, lse and gradients of a causal call with segments."""

    def call(*args):
        return memeff.dot_product_attention(
            *args,
            is_causal=True,
            query_segment_ids=ids,
            key_value_segment_ids=ids,
            implementation="pallas",
            return_residual=True,
        )

    results, pull = jax.vjp(call, query, key, value)
    return *results, *pull(jax.tree.map(jnp.cos, results))


def batch(B=4):
    rng = np.random.default_rng(5)
    args = qkv(rng, f32, Sizes(B=B, T=40, S=40, K=2, G=2, H=8, D=16))
    return *args, np.sort(rng.integers(0, 3, (B, 40)), 1).astype(np.int32)


@functools.cache
def on_one_device():
    with kernels():
        return jax.tree.map(np.asarray, jax.jit(both)(*batch()))


def test_vmap_adds_to_the_batch():
    nested = [x.reshape(2, 2, *x.shape[1:]) for x in batch()]
    with kernels():
        results = jax.jit(jax.vmap(both))(*nested)
    results = [np.asarray(x).reshape(4, *x.shape[2:]) for x in results]
    assert_close(results, on_one_device(), atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_each_device_runs_its_part(axis_type):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    specs = P("data", None, "model"), P("data", None, "model"), P("data", None, "model"), P("data")
    with kernels(), jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(batch(), specs, strict=True)
        ]
        program = jax.jit(both).lower(*placed).compile()
        results = program(*placed)
    assert_close(results, on_one_device(), atol=2e-6)
    assert "all-gather" not in str(program.as_text())


@pytest.mark.slow
def test_inside_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    in_parts = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    with kernels():
        results = jax.jit(in_parts(both, check_vma=False))(*batch())
        with pytest.raises(NotImplementedError, match="inside jax.shard_map need its check_vma=F"):
            in_parts(both)(*batch())
    assert_close(results, on_one_device(), atol=2e-6)


@pytest.mark.slow
def test_derivatives_of_the_kernels_are_those_of_the_chunked_path():
    """Tangents and second derivatives start from the kernels' out and lse."""
    query, key, value, _ = batch()

    def loss(implementation, query):
        out = memeff.dot_product_attention(
            query, key, value, is_causal=True, implementation=implementation
        )
        return jnp.sin(out).sum()

    results = {}
    with kernels():
        for name in ("pallas", "xla"):
            gradient = jax.grad(functools.partial(loss, name))
            results[name] = jax.jit(functools.partial(jax.jvp, gradient))((query,), (query,))
    assert_close(results["pallas"], results["xla"], atol=1e-5)  # of numbers of up to 4
