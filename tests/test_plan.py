"""`memeff.plan`: its figures are near what XLA reports, and its longest sequence just fits."""

import dataclasses
import functools
import itertools
import os
import pathlib
import re
import subprocess
import sys
import types

import drawn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from small_calls import temp_bytes
from test_dispatch import OLD

import memeff
from memeff import dot_product_attention, scores, tile_sizes
from memeff.device import Device, pretend_device
from memeff.diagnostics import plan
from memeff.diagnostics.plan import DEVICES
from memeff.pallas.ampere import capability
from memeff.units import format_bytes

SIZES = {  # B, T, S, N, K, H, dtype
    "heads": (1, 16_384, 16_384, 8, 8, 64, "float32"),
    "grouped": (2, 10_000, 10_000, 4, 2, 128, "bfloat16"),
    "cross": (1, 30_000, 4096, 8, 2, 64, "float32"),
}
X = jax.ShapeDtypeStruct((1, 4096, 8, 64), np.float32)


def kinds(B, T, S, N, dtype):
    """Return the keyword arguments of every kind of call, by name; arrays as shapes."""
    array = jax.ShapeDtypeStruct
    lengths = array((B,), np.int32)
    segments = dict(
        query_segment_ids=array((B, T), np.int32),
        key_value_segment_ids=array((B, S), np.int32),
    )
    dropout = dict(is_causal=True, dropout_rate=0.1, dropout_rng=array((2,), np.uint32))
    return {
        "causal": dict(is_causal=True),
        "full": dict(),
        "window": dict(local_window_size=(300, 100)),
        "segments": dict(is_causal=True, **segments),
        "lengths": dict(is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths),
        "offset": dict(is_causal=True, q_offset=lengths),
        "bias row": dict(is_causal=True, bias=array((N, 1, S), dtype)),
        "bias": dict(bias=array((1, T, S), dtype)),
        "mask row": dict(mask=array((B, 1, 1, S), np.bool_)),
        "mask": dict(mask=array((1, T, S), np.bool_)),
        "dropout": dropout,
        "dropout each": dropout | dict(broadcast_dropout=False),
        "dropout mix32": dropout | dict(dropout_bits="mix32"),
        "soft cap": dict(is_causal=True, logits_soft_cap=30.0),
        "scale": dict(is_causal=True, scale=array((), np.float32)),
    }


KINDS = tuple(kinds(*SIZES["heads"][:4], np.float32))


def shapes_of(size, kind):
    """Return (query, key, value) and the keyword arguments of a call, arrays as shapes."""
    B, T, S, N, K, H, dtype = SIZES[size]
    query = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    key = jax.ShapeDtypeStruct((B, S, K, H), dtype)
    return (query, key, key), kinds(B, T, S, N, jnp.dtype(dtype))[kind]


def is_array(x):
    return isinstance(x, jax.ShapeDtypeStruct)


def compiled_bytes(args, kwargs):
    """Return XLA's bytes of a forward, and of forward and gradient in one call."""
    static = {}
    floats = {}
    arrays = {}
    for name, x in kwargs.items():
        if not is_array(x):
            static[name] = x
        elif name in ("bias", "scale"):
            floats[name] = x
        else:
            arrays[name] = x

    def forward(args, floats, arrays):
        return dot_product_attention(*args, **floats, **arrays, **static)

    def gradient(args, floats, arrays, dout):
        def attend(args, floats):
            return forward(args, floats, arrays)

        _, pull = jax.vjp(attend, args, floats)
        return pull(dout)

    forward_bytes = temp_bytes(forward, (args, floats, arrays))
    gradient_bytes = temp_bytes(gradient, (args, floats, arrays, args[0]))
    return forward_bytes, gradient_bytes


# ---- figures against what is compiled

# One call of each kind that the estimate distinguishes. Other kinds and sizes are in the slow set.
FAST = ("causal", "lengths", "bias", "dropout each")


@pytest.mark.filterwarnings("ignore:(bias|mask) of shape")
@pytest.mark.parametrize(
    "size, kind", few([*itertools.product(SIZES, KINDS)], [("heads", kind) for kind in FAST])
)
def test_plan_is_within_a_tenth_of_what_is_compiled(size, kind):
    args, kwargs = shapes_of(size, kind)
    plan = memeff.plan(*args, **kwargs)
    planned = plan.forward_bytes, plan.gradient_bytes
    for estimate, compiled in zip(planned, compiled_bytes(args, kwargs), strict=True):
        assert 0.9 * compiled <= estimate <= 1.1 * compiled, (
            f"{format_bytes(estimate)} planned, {format_bytes(compiled)} compiled, "
            f"tiles {plan.chunk_size}"
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("T", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_few_queries_take_no_array_as_long_as_the_keys(T, dtype):
    """They take the slices of keys and values that a step reads. The estimate is near."""
    query = jax.ShapeDtypeStruct((2, T, 8, 64), dtype)
    key = jax.ShapeDtypeStruct((2, 16384, 2, 64), dtype)
    args = query, key, key
    compiled = temp_bytes(dot_product_attention, args)
    assert 0.9 * compiled <= memeff.plan(*args).forward_bytes <= 1.1 * compiled
    assert compiled < key.size * key.dtype.itemsize / 2


ON_ONE_DEVICE = [
    ("heads", "causal"),
    ("grouped", "causal"),
    ("grouped", "dropout each"),
    ("cross", "scale"),
]


@pytest.mark.slow
def test_plan_on_one_device_is_within_a_tenth_too():
    """On one CPU device sums are made when they are needed, which the tests' eight do without."""
    script = f"""
import test_plan
for size, kind in {ON_ONE_DEVICE}:
    test_plan.test_plan_is_within_a_tenth_of_what_is_compiled(size, kind)
assert test_plan.jax.device_count() == 1
"""
    here = pathlib.Path(__file__).parent
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1"
    paths = os.pathsep.join([str(here), str(here.parent)])
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


# hypothesis seeds itself with this function's text: any change of it draws other calls.
@hypothesis.settings(max_examples=2, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(drawn.calls())
@pytest.mark.filterwarnings("ignore:(bias|mask) of shape")
@pytest.mark.slow
def test_a_compiled_plan_is_what_xla_reports(call):
    how = {name: x for name, x in call.arguments.items() if name != "implementation"}
    with jax.enable_x64(call.x64):
        assert_as_compiled(memeff.plan(**how, compile=True), how)


def assert_as_compiled(plan, arguments):
    """Check that a compiled plan has the bytes of the programs of a call."""
    programs = drawn.programs(drawn.Call(arguments))
    found = {name: temp_bytes(*program) for name, program in programs.items()}
    assert plan.compiled and plan.forward_bytes == found["forward"]
    assert plan.gradient_bytes == max(found["both"], found["gradient"])


def test_a_compiled_plan_says_so():
    x = jax.ShapeDtypeStruct((1, 300, 2, 16), np.float32)
    estimate = memeff.plan(x, x, x)
    exact = memeff.plan(x, x, x, compile=True)
    assert not estimate.compiled
    assert_as_compiled(exact, dict(query=x, key=x, value=x))
    assert "memeff, about" in str(estimate)
    assert str(estimate).endswith(plan.ABOUT)
    assert "memeff, about" not in str(exact)
    assert str(exact).endswith(plan.EXACT)
    assert estimate.longest == exact.longest
    assert estimate.chunk_size == exact.chunk_size
    assert estimate.flops == exact.flops


def test_what_cannot_be_compiled_here_is_refused():
    error = (
        "device='H200' is not present, and compile=True needs a device for which this process can"
    )
    with pytest.raises(ValueError, match=error):
        memeff.plan(X, X, X, device="H200", compile=True)


def test_plain_attention_is_told_about_right():
    """The estimate is within a third of jax.nn's compiled bytes. These differ by version."""
    x = jax.ShapeDtypeStruct((1, 2048, 8, 64), np.float32)
    plain = functools.partial(jax.nn.dot_product_attention, implementation="xla")

    def gradient(q, k, v, dout):
        _, pull = jax.vjp(plain, q, k, v)
        return pull(dout)

    plan = memeff.plan(x, x, x)
    compiled = temp_bytes(plain, (x, x, x))
    assert 0.7 * compiled <= plan.plain_forward_bytes <= 1.4 * compiled
    compiled = temp_bytes(gradient, (x, x, x, x))
    assert 0.7 * compiled <= plan.plain_gradient_bytes <= 1.4 * compiled


# ---- fields and text


def test_shapes_serve_for_any_array():
    """Shapes may stand for scalars and for params of functions, too."""
    alibi = scores.alibi(np.ones(8, np.float32))
    slopes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), alibi)
    x = jax.ShapeDtypeStruct((4096, 8, 64), np.float32)
    offset = jax.ShapeDtypeStruct((), np.int32)
    plan = memeff.plan(x, x, x, score_fn=slopes, q_offset=offset, is_causal=True)
    assert plan.tiles_visited is None
    assert "runs this call" in memeff.explain(x, x, x, score_fn=slopes)


def test_fields():
    plan = memeff.plan(X, X, X, is_causal=True, device="cpu", memory="16GiB")
    visited_logits = 36 * 512 * 512 * 8
    assert plan.implementation == "xla"
    assert plan.platform == "cpu"
    assert plan.chunk_size == (512, 512)
    assert (plan.tiles_visited, plan.tiles_total) == (36, 64)
    assert plan.flops == 4 * 64 * visited_logits
    assert plan.gradient_flops == 10 * 64 * visited_logits
    assert plan.memory == 2**34
    assert plan.longest > 40 * plan.plain_longest
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.memory = 1  # type: ignore


class Like:
    """A value that equals every text which a pattern matches."""

    def __init__(self, pattern):
        self.pattern = pattern

    def __eq__(self, text):
        return re.fullmatch(self.pattern, text) is not None


ROWS = (
    ("temporary memory", "forward", "forward . gradient"),
    ("memeff, about", r"[\d.]+ MiB", r"[\d.]+ MiB"),
    ("plain attention, about", "1 GiB", r"1\.\d\d GiB"),
    ("floating point operations", r"19\.3 G", r"67\.6 G"),
    (r"16 GiB hold the gradient of up to about \d+ tokens; with plain attention, of \d+\.",),
    (re.escape(plan.ABOUT),),
)


def test_text():
    text = str(memeff.plan(X, X, X, is_causal=True, device="cpu", memory="16GiB"))
    assert text.splitlines() == [
        '"xla" on cpu: tiles of 512 x 512 logits, 36 of 64 visited; 4 of 8 heads at a time; '
        "softmax with a precomputed bound on each row's maximum; rows where it fails are redone",
        *(Like(" *".join(row)) for row in ROWS),
    ]


def test_tiles_that_are_found_as_it_runs_are_all_counted():
    lengths = jax.ShapeDtypeStruct((1,), np.int32)
    plan = memeff.plan(X, X, X, key_value_seq_lengths=lengths)
    assert plan.tiles_visited is None
    assert plan.flops == 4 * 64 * 8 * 4096 * 4096


def test_nothing_is_computed():
    """A plan of lengths that no machine could run takes a moment."""
    x = jax.ShapeDtypeStruct((8, 2**17, 64, 128), jnp.bfloat16)
    plan = memeff.plan(x, x, x, is_causal=True, device="gpu")
    assert plan.gradient_bytes > 2**34


# ---- the longest sequence that fits


def test_a_plan_without_queries_names_no_longest_sequence():
    q, k = (jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32) for length in (0, 8))
    plan = memeff.plan(q, k, k, memory="1GB")
    assert plan.longest is None
    assert "None" not in str(plan)


def lengthen(x, T):
    """Return a shape of 10,000 tokens with T tokens instead."""
    shape = tuple(T if size == 10_000 else size for size in x.shape)
    return jax.ShapeDtypeStruct(shape, x.dtype)


def total_bytes(arrays):
    """Return the bytes of all arrays, as a float."""
    return sum(np.prod(x.shape, dtype=float) * x.dtype.itemsize for x in arrays)


@pytest.mark.filterwarnings("ignore:(bias|mask) of shape")
@pytest.mark.parametrize(
    "kind",
    ["causal", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bias", "segments"))],
)
@pytest.mark.parametrize("device, memory", [("cpu", "3GiB"), ("H200", None)])
def test_the_longest_sequence_just_fits(kind, device, memory):
    args, kwargs = shapes_of("grouped", kind)
    plan = memeff.plan(*args, **kwargs, device=device, memory=memory)
    assert plan.memory
    assert plan.longest
    assert plan.plain_longest

    def bytes_at(T):
        longer_args = [lengthen(x, T) for x in args]
        arrays = {name: lengthen(x, T) for name, x in kwargs.items() if is_array(x)}
        plan = memeff.plan(*longer_args, **(kwargs | arrays), device=device)
        inputs = total_bytes([*longer_args, *arrays.values()])
        gradients = total_bytes(longer_args)
        if "bias" in arrays:
            gradients += total_bytes([arrays["bias"]])
        out_and_its_cotangent = 2 * total_bytes(longer_args[:1])
        temporary = max(plan.forward_bytes, plan.gradient_bytes)
        return inputs + gradients + out_and_its_cotangent + temporary

    assert bytes_at(plan.longest) <= plan.memory * 1.001
    assert bytes_at(plan.longest + 16) > plan.memory * 0.999


# ---- devices and their kernels


def test_devices():
    on_gpu = memeff.plan(X, X, X, device="h200")
    assert on_gpu.platform == "gpu"
    assert on_gpu.memory == 141 * 10**9
    unknown_gpu = memeff.plan(X, X, X, device="gpu")
    assert unknown_gpu.memory is None
    assert unknown_gpu.chunk_size == tile_sizes.GPU_TILE
    assert "In " not in str(memeff.plan(X, X, X, device="gpu"))
    on_cpu = memeff.plan(X, X, X, device=jax.devices()[0])
    assert on_cpu == memeff.plan(X, X, X)
    assert on_cpu.platform == "cpu"
    assert on_cpu.memory > 2**28
    for name, (device, memory) in DEVICES.items():
        plan = memeff.plan(X, X, X, device=name)
        assert plan.platform == device.platform
        assert plan.memory == memory


@pytest.mark.parametrize("pretended", [None, "8.0", "9.0", "12.0"])
@pytest.mark.parametrize("sharded", [False, True])
def test_plans_what_explain_says(monkeypatch, pretended, sharded):
    """Without `device`, a plan is that of the call here, also where arrays may be sharded."""
    monkeypatch.setattr(tile_sizes, "may_be_sharded", lambda: sharded)
    x = jax.ShapeDtypeStruct((2, 4096, 8, 64), jnp.bfloat16)
    with pretend_device("gpu" if pretended else None, pretended):
        plan = memeff.plan(x, x, x, is_causal=True)
        text = memeff.explain(x, x, x, is_causal=True)
    said = f'"{plan.implementation}" runs this call on {plan.platform}: {plan.how}.'
    assert text.splitlines()[0] == said


def test_device_of_an_array(monkeypatch):
    """Arrays on a CPU are planned and explained there, although JAX's default is a GPU."""
    x = jnp.zeros((1, 64, 2, 8))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(platform="gpu")])
    for array, platform in ((x, "cpu"), (shape, "gpu")):
        assert f"on {platform}:" in memeff.explain(array, array, array)
        assert memeff.plan(array, array, array).platform == platform


def test_kernels_where_the_device_has_them():
    """Kernels take the rows of lse and delta, and padded copies where 64 does not divide H.

    Beyond 128 each gradient has a kernel. XLA for an H200 then reports copies of query, key, value
    and dout, and of one gradient at a time.
    """

    def plan(H, device="H200"):
        x = jax.ShapeDtypeStruct((2, 8192, 16, H), jnp.bfloat16)
        return memeff.plan(x, x, x, device=device)

    if OLD:
        assert plan(128).implementation == "xla"
        return
    usual = plan(128)
    assert usual.implementation == "pallas"
    assert usual.chunk_size == (128, 128)
    assert usual.forward_bytes == 0
    assert usual.gradient_bytes == 8 * 2 * 8192 * 16
    assert "Hopper kernels" in str(usual)
    has_mma = plan(128, "A100").implementation == "pallas"
    assert has_mma == (capability.for_device(Device("gpu", "8.0")) is None)
    assert plan(128, "gpu").implementation == "xla"
    assert plan(100).forward_bytes == 4 * 2 * 8192 * 16 * 128 * 2
    assert plan(256).gradient_bytes == usual.gradient_bytes
    assert plan(160).gradient_bytes == usual.gradient_bytes + 5 * 2 * 8192 * 16 * 192 * 2


@pytest.mark.skipif(OLD, reason="kernels need jax 0.11")
def test_kernels_keep_to_a_memory_limit():
    x = jax.ShapeDtypeStruct((2, 8192, 16, 100), jnp.bfloat16)
    needed = memeff.plan(x, x, x, device="H200").gradient_bytes
    enough = memeff.plan(x, x, x, device="H200", memory_limit=needed)
    assert enough.implementation == "pallas"
    less = memeff.plan(x, x, x, device="H200", memory_limit=needed - 1)
    assert less.implementation == "xla"
    assert less.gradient_bytes < needed

    def attend(x):
        return dot_product_attention(x, x, x, implementation="pallas", memory_limit=needed - 1)

    error = f"need up to {needed} bytes .* in kernels"
    with pretend_device("gpu", "9.0"), pytest.raises(ValueError, match=error):
        jax.eval_shape(attend, x)


@pytest.mark.skipif(OLD, reason="kernels need jax 0.11")
@pytest.mark.parametrize("head_dim, kernels_need_less", [(128, True), (100, False)])
def test_a_refused_limit_names_the_lower_figure(head_dim, kernels_need_less):
    """Kernels copy what they pad, and tiles of the chunked path have a least size."""
    x = jax.ShapeDtypeStruct((2, 8192, 16, head_dim), jnp.bfloat16)
    kernels = memeff.plan(x, x, x, device="H200").gradient_bytes
    with pytest.raises(ValueError, match="Raise the limit to that, or split the batch") as refusal:
        memeff.plan(x, x, x, device="H200", memory_limit=1)
    words = str(refusal.value)
    assert (f"up to {kernels} bytes" in words and "in kernels" in words) == kernels_need_less
    needed = int(words.partition("need up to ")[2].split()[0])
    assert needed <= kernels
    enough = memeff.plan(x, x, x, device="H200", memory_limit=needed)
    assert (enough.implementation == "pallas") == kernels_need_less


# ---- wrong plans


@pytest.mark.parametrize(
    "how, error, words",
    [
        (
            dict(device="abacus"),
            ValueError,
            "device='abacus' is not known: use one of cpu, gpu, tpu, A100",
        ),
        (dict(device=3), TypeError, "device must be one of cpu, gpu"),
        (dict(memory="much"), ValueError, "memory='much': write bytes as"),
        (dict(memory=10**400), ValueError, r"memory is more than 2\^63 bytes: make it smaller"),
        (
            dict(implementation="xla"),
            TypeError,
            "memeff.plan says what memeff would choose. Omit `implementation`",
        ),
        (dict(is_causal=3), TypeError, "is_causal must be True or False"),
        (dict(compile="no"), TypeError, "compile must be True or False"),
        (dict(bias=np.ones((4, 4), object)), TypeError, "bias has dtype object, which JAX"),
        (
            dict(key_value_seq_lengths=np.array([2**40])),
            ValueError,
            "key_value_seq_lengths has integers that do not fit in int32",
        ),
    ],
)
def test_wrong_plans(how, error, words):
    with pytest.raises(error, match=words):
        memeff.plan(X, X, X, **how)
