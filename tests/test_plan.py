"""The budget and the plan: limits are kept, figures are near what XLA reports, and what does not fit is told."""

import dataclasses
import functools
import itertools
import re

import drawn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few, watch_dispatch

import memeff
from memeff import dot_product_attention, scores, tile_sizes
from memeff.device import pretend_device
from memeff.diagnostics import plan
from memeff.diagnostics.plan import DEVICES
from memeff.units import format_bytes

SIZES = {  # B, T, S, N, K, H, dtype
    "heads": (1, 16_384, 16_384, 8, 8, 64, "float32"),
    "grouped": (2, 10_000, 10_000, 4, 2, 128, "bfloat16"),
    "cross": (1, 30_000, 4096, 8, 2, 64, "float32"),
}


def kinds(B, T, S, N, dtype):
    array = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32)
    segments = dict(query_segment_ids=array((B, T)), key_value_segment_ids=array((B, S)))
    rng = jax.ShapeDtypeStruct((2,), np.uint32)
    return {
        "causal": dict(is_causal=True),
        "full": dict(),
        "window": dict(local_window_size=(300, 100)),
        "segments": dict(is_causal=True, **segments),
        "lengths": dict(
            is_causal=True, query_seq_lengths=array((B,)), key_value_seq_lengths=array((B,))
        ),
        "offset": dict(is_causal=True, q_offset=array((B,))),
        "bias row": dict(is_causal=True, bias=jax.ShapeDtypeStruct((N, 1, S), dtype)),
        "bias": dict(bias=jax.ShapeDtypeStruct((1, T, S), dtype)),
        "mask row": dict(mask=jax.ShapeDtypeStruct((B, 1, 1, S), np.bool_)),
        "mask": dict(mask=jax.ShapeDtypeStruct((1, T, S), np.bool_)),
        "dropout": dict(is_causal=True, dropout_rate=0.1, dropout_rng=rng),
        "dropout each": dict(
            is_causal=True, dropout_rate=0.1, dropout_rng=rng, broadcast_dropout=False
        ),
        "soft cap": dict(is_causal=True, logits_soft_cap=30.0),
        "scale": dict(is_causal=True, scale=jax.ShapeDtypeStruct((), np.float32)),
    }


KINDS = tuple(kinds(*SIZES["heads"][:4], np.float32))


def compiled(function, shapes):
    return jax.jit(function).lower(*shapes).compile()


def arrays_of(size, kind):
    B, T, S, N, K, H, dtype = SIZES[size]
    how = kinds(B, T, S, N, jnp.dtype(dtype))[kind]
    q, kv = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((B, T, N, H), (B, S, K, H)))
    return (q, kv, kv), how


def bytes_of_compiled(args, how):
    """XLA's own account of a forward, and of forward and gradient in one call."""
    arrays = {n: x for n, x in how.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {n: x for n, x in how.items() if n not in arrays}
    floats = {n: arrays.pop(n) for n in ("bias", "scale") if n in arrays}

    def forward(args, floats, arrays):
        return dot_product_attention(*args, **floats, **arrays, **static)

    def gradient(args, floats, arrays, dout):
        return jax.vjp(lambda args, floats: forward(args, floats, arrays), args, floats)[1](dout)

    calls = (forward, (args, floats, arrays)), (gradient, (args, floats, arrays, args[0]))
    return [compiled(call, shapes).memory_analysis().temp_size_in_bytes for call, shapes in calls]


def least(args, how):
    """The limit that a refusal names."""
    with pytest.raises(ValueError, match="memory_limit=1 ") as e:
        memeff.plan(*args, **how, memory_limit=1)
    return int(re.search(r"need up to (\d+) bytes", str(e.value))[1])


# One of each kind that the estimate knows apart; the rest, and other sizes, are in the slow set.
FAST = ("causal", "full", "window", "segments", "lengths", "bias", "mask", "dropout each")


@pytest.mark.filterwarnings("ignore:(bias|mask) of shape")
@pytest.mark.parametrize(
    "size, kind", few([*itertools.product(SIZES, KINDS)], [("heads", kind) for kind in FAST])
)
def test_plan_is_within_a_tenth_of_what_is_compiled(size, kind):
    args, how = arrays_of(size, kind)
    plan = memeff.plan(*args, **how)
    found = bytes_of_compiled(args, how)
    for told, is_ in zip((plan.forward_bytes, plan.gradient_bytes), found, strict=True):
        assert 0.9 * is_ <= told <= 1.1 * is_, (
            f"{format_bytes(told)} told, {format_bytes(is_)} compiled, tiles {plan.chunk_size}"
        )


@hypothesis.settings(max_examples=2, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(drawn.calls())
@pytest.mark.filterwarnings("ignore:(bias|mask) of shape")
def test_a_compiled_plan_is_what_xla_reports(call):
    how = {name: x for name, x in call.arguments.items() if name != "implementation"}
    with jax.enable_x64(call.x64):
        plan = memeff.plan(**how, compile=True)
        found = {
            name: drawn.bytes_of(program)
            for name, program in drawn.programs(drawn.Call(how)).items()
        }
    assert plan.compiled and plan.forward_bytes == found["forward"]
    assert plan.gradient_bytes == max(found["both"], found["gradient"])


def test_a_compiled_plan_says_so():
    x = jax.ShapeDtypeStruct((1, 300, 2, 16), np.float32)
    told, exact = memeff.plan(x, x, x), memeff.plan(x, x, x, compile=True)
    assert (told.compiled, exact.compiled) == (False, True)
    assert "memeff, about" in str(told) and str(told).endswith(plan.ABOUT)
    assert "memeff, about" not in str(exact) and str(exact).endswith(plan.EXACT)
    assert (told.longest, told.chunk_size, told.flops) == (
        exact.longest,
        exact.chunk_size,
        exact.flops,
    )


def test_what_cannot_be_compiled_here_is_refused():
    with pytest.raises(
        ValueError,
        match="device='H200' is not present, and compile=True needs a device for which this process can",
    ):
        memeff.plan(X, X, X, device="H200", compile=True)


def test_shapes_serve_for_any_array():
    """Scalars and params of functions, too."""
    slopes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), scores.alibi(np.ones(8, np.float32))
    )
    x = jax.ShapeDtypeStruct((4096, 8, 64), np.float32)
    plan = memeff.plan(
        x, x, x, score_fn=slopes, q_offset=jax.ShapeDtypeStruct((), np.int32), is_causal=True
    )
    assert plan.tiles_visited is None
    assert "runs this call" in memeff.explain(x, x, x, score_fn=slopes)


# ---- the limit


X = jax.ShapeDtypeStruct((1, 4096, 8, 64), np.float32)


def test_what_cannot_fit_is_refused_with_the_figure_that_would():
    lowest = least((X, X, X), dict(is_causal=True))
    with pytest.raises(
        ValueError,
        match=r"in tiles of 64 x 64 logits. Raise the limit to that, or split the batch or the",
    ):
        memeff.plan(X, X, X, is_causal=True, memory_limit=lowest - 1)
    assert memeff.plan(X, X, X, is_causal=True, memory_limit=lowest).gradient_bytes > 0


def test_a_limit_above_the_default_changes_nothing():
    assert memeff.plan(X, X, X, memory_limit="1GiB") == memeff.plan(X, X, X)


def test_tiles_shrink_with_the_limit():
    x = jax.ShapeDtypeStruct((1, 300, 8, 64), np.float32)  # so short that tiles are most of it
    top, lowest = memeff.plan(x, x, x, compile=True).gradient_bytes, least((x, x, x), {})
    limits = top, (top + lowest) // 2, lowest
    plans = [memeff.plan(x, x, x, memory_limit=limit, compile=True) for limit in limits]
    taken = [max(plan.forward_bytes, plan.gradient_bytes) for plan in plans]
    assert all(bytes_ <= limit for bytes_, limit in zip(taken, limits, strict=True))
    assert taken == sorted(taken, reverse=True) and taken[-1] < taken[0] / 2
    assert plans[0].chunk_size == memeff.plan(x, x, x).chunk_size != plans[2].chunk_size


def test_chunk_size_is_kept_and_refused_over_the_limit():
    assert memeff.plan(X, X, X, chunk_size=(96, 160), memory_limit="1GiB").chunk_size == (96, 160)
    with pytest.raises(
        ValueError,
        match="in tiles of 2048 x 2048 logits. Raise the limit to that, or omit `chunk_size`",
    ):
        memeff.plan(X, X, X, chunk_size=2048, memory_limit="24MiB")


def test_a_quadratic_call_is_held_to_the_limit_too():
    x = jax.ShapeDtypeStruct((1, 512, 8, 16), np.float32)
    attend = functools.partial(dot_product_attention, implementation="reference")
    with pytest.raises(
        ValueError,
        match="beyond inputs and outputs, at once. Raise the limit to that, or omit `implementation`",
    ):
        jax.eval_shape(functools.partial(attend, memory_limit="4MiB"), x, x, x)
    jax.eval_shape(functools.partial(attend, memory_limit="400MiB"), x, x, x)


def test_the_same_numbers_within_any_limit():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 700, 4, 16)) for i in range(3))
    loss = lambda q, k, v, limit: (
        dot_product_attention(q, k, v, is_causal=True, memory_limit=limit) ** 2
    ).sum()
    grads = [
        jax.grad(loss, (0, 1, 2))(q, k, v, limit)
        for limit in (None, least((q, k, v), dict(is_causal=True)))
    ]
    for x, y in zip(*grads, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_a_limit_for_the_whole_program_retraces_what_jit_keeps():
    chosen = []
    x = jnp.ones((1, 300, 2, 16))

    @jax.jit
    def f(x):
        with watch_dispatch() as calls:
            out = dot_product_attention(x, x, x)
        chosen.append(calls[0][0].chunk_size)
        return out

    f(x)
    with memeff.memory_limit(least((x, x, x), {})):
        f(x)
        f(x)
        with memeff.memory_limit("1GiB"):
            f(x)
    f(x)
    assert chosen == [(300, 300), (64, 64), (300, 300)]  # three traces of five calls


def test_a_call_s_own_limit_counts_before_the_program_s():
    with memeff.memory_limit(1):
        assert memeff.plan(X, X, X, memory_limit="1GiB").chunk_size == (1024, 1024)
        with pytest.raises(ValueError, match="memory_limit=1 "), memeff.memory_limit("1 B"):
            memeff.plan(X, X, X)
        with memeff.memory_limit(None):
            memeff.plan(X, X, X)


@pytest.mark.parametrize(
    "text, bytes_", [("512MiB", 2**29), ("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("7", 7), (9, 9)]
)
def test_bytes_in_words(text, bytes_):
    assert memeff.plan(X, X, X, device="cpu", memory=text).memory == bytes_


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        ("512 miles", ValueError, 'memory_limit=\'512 miles\': write bytes as "512MiB" or "2GB"'),
        ("-1MiB", ValueError, "write bytes as"),
        (0, ValueError, "memory_limit=0: bytes must be > 0; use None for no limit"),
        (
            1.5,
            TypeError,
            "memory_limit must be bytes, an int or a text such as .512MiB., got float 1.5",
        ),
        (True, TypeError, "memory_limit must be bytes"),
    ],
)
def test_wrong_limits(wrong, error, words):
    x = jnp.ones((1, 5, 1, 4))
    with pytest.raises(error, match=words):
        dot_product_attention(x, x, x, memory_limit=wrong)
    with pytest.raises(error, match=words):
        memeff.memory_limit(wrong)


def test_a_limit_wants_known_lengths():
    T, S = jax.export.symbolic_shape("T, S")
    q, kv = (jax.ShapeDtypeStruct((1, n, 2, 8), np.float32) for n in (T, S))
    with pytest.raises(
        ValueError,
        match=r"memory_limit does not support sizes .* symbolic \(B=1, T=T, S=S\)\. Pass chunk_size",
    ):
        jax.eval_shape(functools.partial(dot_product_attention, memory_limit="1GiB"), q, kv, kv)


# ---- the plan


def test_fields():
    plan = memeff.plan(X, X, X, is_causal=True, device="cpu", memory="16GiB")
    tiles = 36 * 512 * 512 * 8
    assert (plan.implementation, plan.platform, plan.chunk_size) == ("xla", "cpu", (512, 512))
    assert (plan.tiles_visited, plan.tiles_total) == (36, 64)
    assert (plan.flops, plan.gradient_flops) == (4 * 64 * tiles, 10 * 64 * tiles)
    assert plan.memory == 2**34 and plan.longest > 40 * plan.plain_longest
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.memory = 1  # type: ignore


def test_text():
    assert str(memeff.plan(X, X, X, is_causal=True, device="cpu", memory="16GiB")).splitlines() == [
        '"xla" on cpu: tiles of 512 x 512 logits, 36 of 64 visited; 4 of 8 heads at a time; '
        "softmax with a precomputed bound on each row's maximum; rows where it fails are redone",
        *ANY_TABLE,
    ]


class Like:
    """Equal to every text that the pattern matches."""

    def __init__(self, pattern):
        self.pattern = pattern

    def __eq__(self, text):
        return re.fullmatch(self.pattern, text) is not None


ANY_TABLE = [
    Like(" *".join(line))
    for line in (
        ("temporary memory", "forward", "forward . gradient"),
        ("memeff, about", r"[\d.]+ MiB", r"[\d.]+ MiB"),
        ("plain attention, about", "1 GiB", r"1\.\d\d GiB"),
        ("floating point operations", r"19\.3 G", r"67\.6 G"),
        (r"In 16 GiB fits the gradient of up to about \d+ tokens, of \d+ with plain attention\.",),
        (re.escape(plan.ABOUT),),
    )
]


def test_tiles_that_are_found_as_it_runs_are_all_counted():
    lengths = jax.ShapeDtypeStruct((1,), np.int32)
    plan = memeff.plan(X, X, X, key_value_seq_lengths=lengths)
    assert plan.tiles_visited is None and plan.flops == 4 * 64 * 8 * 4096 * 4096


@pytest.mark.filterwarnings("ignore:(bias|mask) of shape")
@pytest.mark.parametrize(
    "kind",
    ["causal", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("bias", "segments"))],
)
@pytest.mark.parametrize("device, memory", [("cpu", "3GiB"), ("H200", None)])
def test_the_longest_sequence_just_fits(kind, device, memory):
    args, how = arrays_of("grouped", kind)
    plan = memeff.plan(*args, **how, device=device, memory=memory)
    assert plan.memory and plan.longest and plan.plain_longest

    def bytes_at(T):
        def longer(x):
            return jax.ShapeDtypeStruct(tuple(T if n == 10_000 else n for n in x.shape), x.dtype)

        there, more = (
            jax.tree.map(longer, x)
            for x in (args, {n: x for n, x in how.items() if hasattr(x, "shape")})
        )
        at = memeff.plan(*there, **(how | more), device=device)
        differentiable = (*there, *([more["bias"]] if "bias" in more else []))
        inputs = sum(
            np.prod(x.shape, dtype=float) * x.dtype.itemsize for x in (*there, *more.values())
        )
        outputs = sum(np.prod(x.shape, dtype=float) * x.dtype.itemsize for x in differentiable)
        out_and_its_cotangent = 2 * np.prod(there[0].shape, dtype=float) * there[0].dtype.itemsize
        return inputs + outputs + out_and_its_cotangent + max(at.forward_bytes, at.gradient_bytes)

    assert bytes_at(plan.longest) <= plan.memory * 1.001
    assert bytes_at(plan.longest + 16) > plan.memory * 0.999


def test_plain_attention_is_told_about_right():
    """Within a third of jax.nn's compiled bytes: they differ by version."""
    x = jax.ShapeDtypeStruct((1, 2048, 8, 64), np.float32)
    plain = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    gradient = lambda q, k, v, dout: jax.vjp(plain, q, k, v)[1](dout)
    plan = memeff.plan(x, x, x)
    for told, function, n in (
        (plan.plain_forward_bytes, plain, 3),
        (plan.plain_gradient_bytes, gradient, 4),
    ):
        found = compiled(function, (x,) * n).memory_analysis().temp_size_in_bytes
        assert 0.7 * found <= told <= 1.4 * found


def test_devices():
    on_gpu = memeff.plan(X, X, X, device="h200")
    assert on_gpu.platform == "gpu" and on_gpu.memory == 141 * 10**9
    assert on_gpu.chunk_size == tile_sizes.GPU_TILE
    assert memeff.plan(X, X, X, device="gpu").memory is None
    assert "In " not in str(memeff.plan(X, X, X, device="gpu"))
    here = memeff.plan(X, X, X, device=jax.devices()[0])
    assert here == memeff.plan(X, X, X) and here.platform == "cpu" and here.memory > 2**28
    for name, (device, bytes_) in DEVICES.items():
        plan = memeff.plan(X, X, X, device=name)
        assert (plan.platform, plan.memory) == (device.platform, bytes_)


def test_kernels_where_the_device_has_them():
    """Rows of lse and delta; padded copies where 64 does not divide a head dim; beyond 128 the chunked path's gradient."""
    of = lambda H, device="H200": memeff.plan(
        *[jax.ShapeDtypeStruct((2, 8192, 16, H), jnp.bfloat16)] * 3, device=device
    )
    if jax.__version__.startswith("0.10."):
        assert of(128).implementation == "xla"
        return
    plan = of(128)
    assert (plan.implementation, plan.chunk_size, plan.forward_bytes) == ("pallas", (128, 128), 0)
    assert plan.gradient_bytes == 8 * 2 * 8192 * 16 and "Hopper kernels" in str(plan)
    assert of(128, "A100").implementation == of(128, "gpu").implementation == "xla"
    assert of(100).forward_bytes == 4 * 2 * 8192 * 16 * 128 * 2
    assert of(256).gradient_bytes > 100 * of(256).forward_bytes


@pytest.mark.skipif(jax.__version__.startswith("0.10."), reason="kernels need jax 0.11")
def test_kernels_keep_to_a_memory_limit():
    x = jax.ShapeDtypeStruct((2, 8192, 16, 100), jnp.bfloat16)
    needed = memeff.plan(x, x, x, device="H200").gradient_bytes
    of = lambda limit: memeff.plan(x, x, x, device="H200", memory_limit=limit)
    assert of(needed).implementation == "pallas"
    less = of(needed - 1)
    assert less.implementation == "xla" and less.gradient_bytes < needed
    call = lambda x: memeff.dot_product_attention(
        x, x, x, implementation="pallas", memory_limit=needed - 1
    )
    with (
        pretend_device("gpu", "9.0"),
        pytest.raises(ValueError, match=f"need up to {needed} bytes .* in kernels"),
    ):
        jax.eval_shape(call, x)


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
        (
            dict(implementation="xla"),
            TypeError,
            "memeff.plan tells what memeff would choose. Omit `implementation`",
        ),
        (dict(is_causal=3), TypeError, "is_causal must be True or False"),
    ],
)
def test_wrong_plans(how, error, words):
    with pytest.raises(error, match=words):
        memeff.plan(X, X, X, **how)


def test_nothing_is_computed():
    """Lengths that no machine could run, in a moment."""
    x = jax.ShapeDtypeStruct((8, 2**17, 64, 128), jnp.bfloat16)
    plan = memeff.plan(x, x, x, is_causal=True, device="gpu")
    assert plan.gradient_bytes > 2**34
