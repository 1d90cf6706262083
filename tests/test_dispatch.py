"""Who runs a call, and the reason against each other one; what `import memeff` costs."""

import dataclasses
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, MIXES, SINGLES, split
from conftest import few, watch_dispatch
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import memeff
from memeff import dispatch, dot_product_attention, implementations, pallas, reference, tile_sizes
from memeff.chunked import implementation as chunked
from memeff.device import Device, current_device, pretend_device
from memeff.pallas.hopper import implementation as hopper
from memeff.shape import CallShape

f32 = np.float32
NO_KERNELS = "the Hopper kernels need a Hopper GPU, and this device is a cpu"
NOT_CUDNN = "memeff does not call cuDNN (jax.nn.dot_product_attention does)"

# ---- every call by every implementation: None where it can run, else the reason

CALLS = (*SINGLES, *MIXES)
TABLE = {(name, dtype): ("xla", NO_KERNELS) for name in CALLS for dtype in ("float32", "bfloat16")}
# a kernel that comes writes here what it can run, and what it says of the rest


class Handed(Exception):
    """Ends a trace once a call has reached dispatch, because the rest takes most of the time."""


def handed_to_dispatch(name, dtype):
    """Return the problem and operands that the call hands to dispatch, and the module that dispatch chose."""
    args, kwargs = CASES[name].inputs(jnp.dtype(dtype))
    static, arrays = split(kwargs)
    select = dispatch.choose_implementation

    def spy(problem, operands, *args, **kwargs):
        chosen = select(problem, operands, *args, **kwargs)
        raise Handed(chosen.problem, operands, chosen.module)

    def run(args, arrays):
        return dot_product_attention(*args, **arrays, **static)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Handed) as handed:
        patch.setattr(dispatch, "choose_implementation", spy)
        jax.eval_shape(run, args, arrays)
    return handed.value.args


def traced(name, dtype, implementation=None):
    """Trace a call and its gradient. Return what it hands to dispatch, the chosen module and the shapes of its results."""
    args, kwargs = CASES[name].inputs(jnp.dtype(dtype))
    static, arrays = split(kwargs)
    asked = []
    select = dispatch.choose_implementation

    def spy(problem, operands, *args, **kwargs):
        chosen = select(problem, operands, *args, **kwargs)
        asked.append((chosen.problem, operands, chosen.module))
        return chosen

    def run(args, arrays):
        call = lambda *args: dot_product_attention(
            *args, **arrays, **static, implementation=implementation
        )
        out, pull = jax.vjp(call, *args)
        return out, pull(out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "choose_implementation", spy)
        shapes = jax.eval_shape(run, args, arrays)
    (seen,) = asked
    return *seen, shapes


@pytest.mark.parametrize("name, dtype", TABLE)
def test_implementation_chosen_and_reasons(name, dtype):
    chosen, against_pallas = TABLE[name, dtype]
    problem, operands, module = handed_to_dispatch(name, dtype)
    assert module is {"xla": chunked, "reference": reference}[chosen]
    assert implementations.why_not("xla", problem, operands) is None
    assert implementations.why_not("reference", problem, operands) is None
    assert implementations.why_not("pallas", problem, operands) == against_pallas
    assert implementations.why_not("cudnn", problem, operands) == NOT_CUDNN


# The numbers of nearly all of these calls are compared elsewhere in the fast set; here are one of
# each form of arguments.
FORMS = (
    "plain",
    "one_of_each",
    "no_leads",
    "three_leads",
    "multi_query",
    "bias_row",
    "mask_heads",
    "scale_array",
    "sinks",
)
FORMS += ("soft_cap_array", "segments", "q_offset_array", "dropout_each", "everything")


@pytest.mark.parametrize(
    "name, dtype", few(TABLE, [(x, "float32") for x in FORMS] + [("plain", "bfloat16")])
)
def test_shapes_and_dtypes_of_results(name, dtype):
    """Dispatch is asked once, and out and gradients have the shapes and dtypes of their arguments."""
    _, _, module, (out, grads) = traced(name, dtype)
    assert module is {"xla": chunked, "reference": reference}[TABLE[name, dtype][0]]
    args = CASES[name].inputs(jnp.dtype(dtype))[0]
    assert (out.shape, out.dtype) == ((*args[0].shape[:-1], args[2].shape[-1]), args[0].dtype)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in args]


@pytest.mark.parametrize("name", ["plain", "everything", "three_leads", "q_offset_array"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_request_is_met_forward_and_backward(implementation, name):
    """An implementation that can run a call can run both directions of it."""
    _, _, module, (out, grads) = traced(name, "float32", implementation)
    assert module is {"xla": chunked, "reference": reference}[implementation]
    assert out.shape and len(grads) == 3


@pytest.mark.parametrize("name", implementations.IMPLEMENTATIONS + ("cudnn",))
def test_a_reason_is_a_piece_of_a_sentence(name):
    """It stands after a colon and before a full stop."""
    problem, operands, _ = handed_to_dispatch("plain", "float32")
    reason = implementations.why_not(name, problem, operands)
    assert reason is None or (reason and not reason.endswith(".") and "\n" not in reason)
    if reason is None:
        module = dispatch.choose_implementation(problem, operands, name).module
        assert module is {"xla": chunked, "reference": reference}[name]
    else:
        with pytest.raises(NotImplementedError) as e:
            dispatch.choose_implementation(problem, operands, name)
        assert str(e.value).startswith(
            f'implementation="{name}" cannot run this call: {reason}. Use implementation=None'
        )


def test_an_implementation_has_its_three_functions():
    for family in pallas.FAMILIES:
        assert callable(family.why_not) and callable(family.for_device)
    for module in (chunked, *pallas.FAMILIES):
        assert callable(module.forward) and callable(module.backward) and callable(module.tangent)
    assert callable(reference.forward)


# ---- kernels: what they run on a device that has them, and what they say of the rest

OLD = jax.__version__.startswith("0.10.")
TAKE_16_BITS = "the Hopper kernels support bfloat16 and float16, and this call has float32"
REFUSED = {
    "bias": "the Hopper kernels do not support `bias`",
    "mask": "the Hopper kernels support a `mask` of keys [B, 1, 1, S] or of queries [B, 1, T, 1], "
    "and no other",
    "scale_array": "the Hopper kernels support `scale` and `logits_soft_cap` as numbers, not as arrays",
    "soft_cap_array": "the Hopper kernels support `scale` and `logits_soft_cap` as numbers, not as arrays",
    "dropout": "the Hopper kernels do not support dropout",
}
KERNELS = {  # a case's features, in the order in which they are asked for
    "plain": None,
    "causal": None,
    "window": None,
    "window_left": None,
    "q_offset": None,
    "q_offset_array": None,
    "query_lengths": None,
    "key_lengths": None,
    "soft_cap": None,
    "scale": None,
    "precision": None,
    "head_97": None,
    "multi_query": None,
    "bias_full": "bias",
    "bias_row": "bias",
    "mask_dense": "mask",
    "mask_heads": "mask",
    "scale_array": "scale_array",
    "soft_cap_array": "soft_cap_array",
    "segments": None,
    "dropout": "dropout",
    "dropout_each": "dropout",
    "everything": "dropout",
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", KERNELS)
def test_what_kernels_can_run(name, dtype):
    problem, operands, _ = handed_to_dispatch(name, dtype)
    feature = KERNELS[name]
    reason = TAKE_16_BITS if dtype == "float32" else feature and REFUSED[feature]
    on = lambda *device: hopper.why_not(problem, operands, Device(*device))
    if OLD:
        reason = f"the Hopper kernels need jax 0.11 or later, and this is jax {jax.__version__}"
    assert on("gpu", "9.0") == reason
    needs = "the Hopper kernels need a GPU of compute capability 9.0 (H100, H200), and this one has"
    assert on("gpu", "8.0") == f"{needs} 8.0"
    assert on("gpu") == f"{needs} None"
    assert on("tpu") == "the Hopper kernels need a Hopper GPU, and this device is a tpu"


def chosen(shape=(1, 256, 2, 64), dtype=jnp.bfloat16, **how):
    x = jax.ShapeDtypeStruct(shape, dtype)
    with pretend_device("gpu", "9.0"):
        return memeff.explain(x, x, x, **how).split()[0].strip('"')


@pytest.mark.skipif(OLD, reason="kernels need jax 0.11")
def test_kernels_are_chosen_where_they_are_faster():
    assert chosen() == chosen(is_causal=True) == chosen(dtype=jnp.float16) == "pallas"
    assert chosen((1, 256, 2, 256)) == "pallas" and chosen((1, 256, 2, 257)) == "xla"
    assert chosen((1, 1, 2, 64)) == "xla"  # a tile of queries would be nearly empty
    assert chosen(query_segment_ids=jnp.zeros((1, 256), jnp.int32)) == "pallas"
    assert chosen(dtype=jnp.float32) == chosen(chunk_size=64) == "xla"
    assert chosen((0, 256, 2, 64)) == chosen((1, 0, 2, 64)) == "xla"


@pytest.mark.skipif(OLD, reason="kernels need jax 0.11")
def test_the_form_of_the_backward_is_what_is_asked_for():
    x, heads = (
        jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 256, 2, 192), jnp.bfloat16),
    )
    with pretend_device("gpu", "9.0"):
        assert "fused into one" in memeff.explain(x, x, x, backward="fused")
        assert "fused" not in memeff.explain(x, x, x, backward="split").split(".")[0]
        assert (
            memeff.explain(x, x, x, backward="split").split(".")[0]
            == memeff.explain(x, x, x).split(".")[0]
        )
        with pytest.raises(
            NotImplementedError,
            match='backward="fused" supports heads of up to 128, and this call has H=192',
        ):
            memeff.explain(heads, heads, heads, backward="fused")
        sums = 4 * 256 * 2 * 64
        gradient = lambda **how: memeff.plan(x, x, x, device="H200", **how).gradient_bytes
        assert gradient(backward="fused") == gradient() + sums
    x = jnp.ones((1, 5, 2, 3))
    assert (
        dot_product_attention(x, x, x, backward="split") == dot_product_attention(x, x, x)
    ).all()


LONG = (2, 8192, 16, 128)  # forward + gradient, causal, H200: 563 TFLOP/s in one kernel, 489 in two


@pytest.mark.skipif(OLD, reason="kernels need jax 0.11")
@pytest.mark.parametrize(
    "query, key, how, fused",
    [
        (LONG, LONG, {"is_causal": True}, True),
        (LONG, LONG, {"is_causal": True, "implementation": "pallas"}, True),
        (LONG, LONG, {"is_causal": True, "implementation": "xla"}, False),
        (LONG, LONG, {"is_causal": True, "memory_limit": "140MB"}, True),
        # 134 MB for the sums, 2 for rows
        (LONG, LONG, {"is_causal": True, "memory_limit": "130MB"}, False),
        ((4, 4096, 16, 128), (4, 4096, 16, 128), {}, True),
        # 2,048 keys a query: 5 % slower
        ((4, 4096, 16, 128), (4, 4096, 16, 128), {"is_causal": True}, False),
        ((8, 4096, 8, 64), (8, 4096, 8, 64), {}, True),
        # 2^29 logits: 4 % slower
        ((1, 8192, 16, 64), (1, 8192, 16, 64), {"is_causal": True}, False),
        ((2, 8192, 16, 128), (2, 8192, 4, 128), {"is_causal": True}, True),  # 512 blocks
        # 256 blocks: 9 % slower
        ((2, 8192, 16, 128), (2, 8192, 2, 128), {"is_causal": True}, False),
        ((1, 4096, 16, 128), (1, 32768, 16, 128), {}, True),
        (LONG, LONG, {"is_causal": True, "logits_soft_cap": 20.0}, True),
        ((2, 8192, 32, 64), (2, 8192, 32, 64), {"logits_soft_cap": 20.0}, False),  # not faster
        # not measured; or windows, where little is gained
        ((1, 8192, 32, 128), (1, 32768, 32, 128), {"is_causal": True}, False),
        ((2, 8192, 16, 96), (2, 8192, 16, 96), {"is_causal": True}, False),
        ((2, 8192, 16, 256), (2, 8192, 16, 256), {"is_causal": True}, False),
        (LONG, LONG, {"is_causal": True, "q_offset": 1}, False),
        (LONG, LONG, {"local_window_size": (4095, 0)}, False),
        (LONG, LONG, {"local_window_size": (None, 4)}, False),
        (LONG, LONG, {"key_value_seq_lengths": np.full(2, 8000, np.int32)}, False),
        (LONG, LONG, {"query_seq_lengths": np.full(2, 8000, np.int32)}, False),
        (LONG, LONG, {"q_offset": np.zeros(2, np.int32), "is_causal": True}, False),
        (LONG, LONG, {"query_segment_ids": np.zeros((2, 8192), np.int32)}, False),
        (LONG, LONG, {"mask": np.ones((2, 1, 1, 8192), bool)}, False),
        # where kernels do not run: refused if asked for one kernel, not if for the fastest
        (LONG, LONG, {"chunk_size": 512}, False),
        (LONG, LONG, {"bias": np.zeros((1, 1, 1, 8192), jnp.bfloat16)}, False),
    ],
)
def test_the_fastest_backward_is_fused_where_that_was_measured_to_be_faster(query, key, how, fused):
    """And what is not fused is what runs without the argument."""

    def form(**more):
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (query, key, key)]
        with pretend_device("gpu", "9.0"), watch_dispatch() as calls:
            jax.eval_shape(lambda *arrays: dot_product_attention(*arrays, **how | more), *arrays)
        return calls[0][0], calls[0][2]

    (problem, name), (usual, usual_name) = form(backward="fastest"), form()
    assert problem == dataclasses.replace(usual, backward="fused" if fused else None)
    assert name == usual_name and usual.backward is None


@pytest.mark.skipif(OLD, reason="kernels need jax 0.11")
def test_the_fastest_backward_is_told_and_planned():
    x = jax.ShapeDtypeStruct(LONG, jnp.bfloat16)
    with pretend_device("gpu", "9.0"):
        assert "fused into one" in memeff.explain(x, x, x, is_causal=True, backward="fastest")
    sums = 4 * 2 * 8192 * 16 * 128
    plan = lambda **how: memeff.plan(x, x, x, device="H200", is_causal=True, **how).gradient_bytes
    assert plan(backward="fastest") == plan(backward="fused") == plan() + sums


def test_the_fastest_backward_runs_where_there_are_no_kernels():
    x = jnp.ones((1, 5, 2, 3))
    for implementation in (None, "xla", "reference"):
        how = {"implementation": implementation}
        assert (
            dot_product_attention(x, x, x, backward="fastest", **how)
            == dot_product_attention(x, x, x, **how)
        ).all()


@pytest.mark.skipif(OLD, reason="kernels need jax 0.11")
def test_what_keeps_kernels_from_a_call_is_told_once(monkeypatch):
    monkeypatch.setattr("memeff.warn._warned", set())
    x, bias = jnp.ones((1, 64, 1, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    with pretend_device("gpu", "9.0"):
        with pytest.warns(
            UserWarning,
            match="instead of the GPU's kernels, because the Hopper kernels do not support `bias`",
        ) as record:
            dot_product_attention(x, x, x, bias)
        assert record[0].filename == __file__
        dot_product_attention(x, x, x, bias)  # warnings are errors
        dot_product_attention(*[x.astype(f32)] * 3)
        with pytest.raises(
            NotImplementedError,
            match='"pallas" cannot run this call: the Hopper kernels do not support `bias`',
        ):
            dot_product_attention(x, x, x, bias, implementation="pallas")
        with pytest.raises(
            NotImplementedError,
            match="the kernels choose their own tiles and do not support chunk_size",
        ):
            dot_product_attention(x, x, x, chunk_size=8, implementation="pallas")


def test_device_of_a_call():
    """That of the arrays, else of `jax.default_device`, else JAX's first."""
    here = Device("cpu")
    assert current_device() == current_device(jnp.ones(3)) == here
    with jax.default_device(jax.devices()[3]):
        assert current_device() == here
    with pretend_device("gpu", "9.0"):
        assert current_device(jnp.ones(3)) == Device("gpu", "9.0")


# ---- tiles

SIZES = [
    # backend, windowed, (B, T, S, N, K), requested, tile, block
    ("cpu", True, (1, 100_000, 100_000, 8, 8), (None, None), (512, 512), (1, 4)),
    ("cpu", False, (1, 100_000, 100_000, 8, 8), (None, None), (1024, 1024), (1, 1)),
    ("cpu", True, (4, 4096, 4096, 3, 3), (None, None), (512, 512), (1, 3)),
    ("cpu", True, (6, 4096, 4096, 2, 2), (None, None), (512, 512), (2, 2)),
    ("cpu", True, (1, 4096, 4096, 6, 6), (None, None), (512, 512), (1, 3)),
    ("cpu", True, (1, 4096, 4096, 16, 2), (None, None), (256, 512), (1, 1)),
    ("cpu", False, (1, 4096, 4096, 64, 1), (None, None), (128, 1024), (1, 1)),
    ("cpu", True, (3, 37, 53, 4, 2), (None, None), (37, 53), (3, 2)),
    ("cpu", True, (3, 37, 5300, 4, 2), (None, None), (37, 512), (3, 2)),
    ("cpu", False, (1, 1, 1, 1, 1), (None, None), (1, 1), (1, 1)),
    ("cpu", False, (0, 0, 53, 2, 2), (None, None), (1, 53), None),
    ("cpu", True, (2, 37, 53, 2, 2), (16, 24), (16, 24), (2, 2)),
    ("cpu", True, (2, 37, 53, 2, 2), (1000, 2000), (37, 53), (2, 2)),
    ("cpu", True, (2, 4096, 4096, 8, 8), (128, None), (128, 512), (2, 8)),
    ("cpu", True, (1, 4096, 4096, 8, 8), (None, 2048), (512, 2048), (1, 1)),
    ("cpu", True, (1, 8192, 8192, 8, 8), (4096, 4096), (4096, 4096), (1, 1)),
    ("tpu", False, (1, 4096, 4096, 8, 8), (None, None), (512, 512), None),
    ("gpu", True, (1, 100_000, 100_000, 8, 8), (None, None), tile_sizes.GPU_TILE, None),
    ("gpu", True, (8, 100_000, 100_000, 16, 16), (None, None), tile_sizes.GPU_TILE, (8, 1)),
    ("gpu", True, (8, 2048, 2048, 16, 16), (None, None), (512, 512), None),
    ("gpu", False, (8, 8192, 8192, 16, 4), (None, None), tile_sizes.GPU_TILE, (2, 1)),
    ("gpu", False, (8, 1, 32_768, 32, 8), (None, None), (1, 32_768), None),
    ("gpu", False, (1, 37, 53, 8, 8), (None, None), (37, 53), None),
    ("gpu", True, (1, 4096, 4096, 8, 8), (128, 64), (128, 64), None),
]


@pytest.mark.parametrize("backend, windowed, sizes, requested, tile, block", SIZES, ids=str)
def test_tile_sizes(monkeypatch, backend, windowed, sizes, requested, tile, block):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    chosen = tile_sizes.default_tiles(shape_of(*sizes), f32, requested, windowed, True)
    assert (chosen.chunk_size, chosen.block) == (tile, block)
    if chosen.fixed_chunk_size is not None:
        assert all(
            1 <= size <= max(1, n)
            for size, n in zip(chosen.fixed_chunk_size, sizes[1:3], strict=True)
        )


def shape_of(B, T, S, N, K):
    return CallShape((B,), T, S, N, K, 64, 64)


def test_what_is_chosen_where_arrays_may_be_sharded(monkeypatch):
    """The fixed reference: on GPUs always, on CPUs for float32 and where its check is no word between devices. Blocks: where
    no block can be spread over devices. That is with one device, or under shard_map.
    """

    def chosen(dtype=f32):
        tiles = tile_sizes.default_tiles(
            shape_of(1, 4096, 4096, 8, 8), dtype, (None, None), True, True
        )
        return tiles.fixed_chunk_size is not None, tiles.block is not None

    monkeypatch.undo()  # eight devices
    assert jax.device_count() > 1 and chosen() == (False, False)
    found = []
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    look = lambda x: found.append(chosen()) or x
    jax.jit(jax.shard_map(look, mesh=mesh, in_specs=P("x"), out_specs=P("x"))).lower(jnp.zeros(8))
    assert set(found) == {(True, True)}
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert chosen() == (True, True) and chosen(jnp.bfloat16) == (False, True)
    monkeypatch.undo()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert chosen() == chosen(jnp.bfloat16) == (True, False)


@pytest.mark.parametrize(
    "how, words",
    [
        (
            dict(is_causal=True),
            ": tiles of 512 x 512 logits, 36 of 64 visited; 4 of 8 heads at a time; softmax with a precomputed",
        ),
        (
            {},
            ": tiles of 1024 x 1024 logits, 16 of 16 visited; 1 of 8 heads at a time; softmax with a precomputed bound",
        ),
        (dict(local_window_size=(512, 0)), "15 of 64 visited"),
        (dict(chunk_size=64), "4096 of 4096 visited"),
        (
            dict(logits_soft_cap=3.0),
            "16 of 16 visited; 1 of 8 heads at a time; softmax with a running maximum",
        ),
        (
            dict(key_value_seq_lengths=jax.ShapeDtypeStruct((1,), np.int32)),
            "visited between bounds that are computed at run time",
        ),
    ],
    ids=str,
)
def test_explain(how, words):
    x = jax.ShapeDtypeStruct((1, 4096, 8, 64), f32)
    text = memeff.explain(x, x, x, **how)
    assert text.startswith('"xla" runs this call on cpu') and words in text
    assert f'"pallas": {NO_KERNELS}.' in text
    assert (
        '"reference": available with implementation="reference"; needs quadratic memory '
        "(8 x 4096 x 4096 logits)." in text
    )


def test_explain_tells_both_tiles_where_they_differ(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jax.ShapeDtypeStruct((2, 8192, 16, 128), jnp.bfloat16)
    text = memeff.explain(x, x, x)
    assert (
        "tiles of 2048 x 8192 logits, 4 of 4 visited; in the gradient tiles of 8192 x 2048 logits, 4 of 4"
        in text
    )
    assert "; 8 of 32 heads at a time;" in text
    text = memeff.explain(x, x, x, is_causal=True)
    assert (
        "tiles of 1024 x 1024 logits, 36 of 64 visited, merged into tiles of up to 2048 x 2048; 32 of 32 heads"
        in text
    )
    assert "in the gradient" not in memeff.explain(x, x, x, is_causal=True, chunk_size=512)


def test_explain_raises_as_the_call_does():
    x = jnp.ones((1, 5, 2, 3))
    with pytest.raises(ValueError, match="key"):
        memeff.explain(x, x[:, :, :, :2], x)
    with pytest.raises(TypeError, match="Omit `implementation`"):
        memeff.explain(x, x, x, implementation="xla")
    assert "runs this call" in memeff.explain(x, x, x, q_offset=np.array([3]), is_causal=True)


# ---- what is told of a fallback, and refused


def test_choosing_is_silent_where_nothing_is_lost():
    """On a CPU the chunked path is the fastest there is: no fallback, so no warning."""
    x = jnp.ones((1, 5, 2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dot_product_attention(x, x, x)
        dot_product_attention(x, x, x, implementation="xla")


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_pallas_raises_instead_of_falling_back(jit):
    x = jnp.ones((1, 5, 2, 3))
    call = lambda x: dot_product_attention(x, x, x, implementation="pallas")
    with pytest.raises(
        NotImplementedError, match=f'implementation="pallas" cannot run this call: {NO_KERNELS}'
    ):
        (jax.jit(call) if jit else call)(x)


# ---- import memeff


def python(code: str, **env) -> subprocess.CompletedProcess:
    import os

    code = textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_import_starts_no_backend():
    """On a platform that does not exist, any array would be an error; the import is none."""
    done = python("import memeff", JAX_PLATFORMS="nowhere")
    assert done.returncode == 0, done.stderr
    started = python("import memeff, jax.numpy as jnp; jnp.ones(1)", JAX_PLATFORMS="nowhere")
    assert started.returncode != 0 and "nowhere" in started.stderr


def test_import_is_light():
    done = python(
        """
        import sys
        import jax, jax.numpy
        before = {*sys.modules}
        import memeff
        new = {name.split(".")[0] for name in {*sys.modules} - before}
        heavy = [name for name in sys.modules if name.startswith(("flax", "optax", "jax.experimental.pallas", "memeff.nn"))]
        assert not heavy, heavy
        assert all(hasattr(memeff, name) for name in memeff.__all__)
        print(*sorted(new - {*sys.stdlib_module_names}))
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["jax", "memeff"] or done.stdout.split() == ["memeff"], (
        done.stdout
    )


def test_every_implementation_is_named_in_the_signature():
    """A name that dispatch knows and the type does not promise (or the other way round) is found here."""
    from typing import get_args

    from memeff.attention import Implementation

    assert get_args(Implementation) == implementations.IMPLEMENTATIONS
    assert np.all([isinstance(name, str) for name in implementations.IMPLEMENTATIONS])
