"""Memory of attention, from the compiler's own account.

No test here allocates an array of length T or runs a long call.
"""

import functools
import gc
import itertools
import math
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes
from conftest import few
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from small_calls import temp_bytes

from memeff import dot_product_attention, linear_cross_entropy

MIB = 2**20
f32 = np.float32
slow = pytest.mark.slow


def mib(size: float) -> str:
    """Return a number of bytes as text."""
    return f"{size / MIB:.1f} MiB"


# ---- calls by kind: extra operands, static arguments, key heads


def _kinds(T: int, N: int = 8):
    array = jax.ShapeDtypeStruct
    lengths = array((1,), np.int32)
    ids = array((1, T), np.int32)
    return {
        "causal": dict(is_causal=True),
        "full": dict(),
        "window": dict(local_window_size=(300, 100)),
        "segments": dict(is_causal=True, query_segment_ids=ids, key_value_segment_ids=ids),
        "lengths": dict(is_causal=True, query_seq_lengths=lengths, key_value_seq_lengths=lengths),
        "offset": dict(is_causal=True, q_offset=lengths),
        "bias row": dict(is_causal=True, bias=array((N, 1, T), f32)),
        "mask row": dict(is_causal=True, mask=array((1, 1, 1, T), np.bool_)),
        "dropout": dict(
            is_causal=True,
            dropout_rate=0.1,
            dropout_rng=array((2,), np.uint32),
            broadcast_dropout=False,
        ),
        "grouped": dict(is_causal=True, K=max(1, N // 4)),
        "soft cap": dict(is_causal=True, logits_soft_cap=30.0),
    }


KINDS = tuple(_kinds(1))


def split_shapes(kwargs):
    """Return the keyword arguments that are shapes of arrays, and the static ones."""
    arrays = {name: x for name, x in kwargs.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {name: x for name, x in kwargs.items() if name not in arrays}
    return arrays, static


def call(T, N=8, K=None, H=64, B=1, dtype=f32, implementation=None, **kwargs):
    """Return a function of (query, key, value, arrays), and the shapes that it takes."""
    arrays, static = split_shapes(kwargs)
    query = jax.ShapeDtypeStruct((B, T, N, H), dtype)
    key = jax.ShapeDtypeStruct((B, T, K or N, H), dtype)

    def forward(q, k, v, arrays):
        return dot_product_attention(q, k, v, **arrays, **static, implementation=implementation)

    return forward, (query, key, key, arrays)


def gradient(forward):
    """Return a function of all gradients; the query serves as the cotangent of the output."""

    def backward(q, k, v, arrays):
        bias = {name: x for name, x in arrays.items() if name == "bias"}
        rest = {name: x for name, x in arrays.items() if name != "bias"}

        def differentiable(q, k, v, bias):
            return forward(q, k, v, bias | rest)

        _, pull = jax.vjp(differentiable, q, k, v, bias)
        return pull(q)

    return backward


def compiled(function, shapes):
    return jax.jit(function).lower(*shapes).compile()


@functools.cache
def cost(kind: str, direction: str, T: int, N: int = 8) -> tuple[int, float]:
    """Return bytes beyond inputs and outputs, and CPU seconds of compilation.

    CPU seconds leave out other work on the machine. Garbage is collected first, because hundreds of
    earlier tests leave some, and its collection takes time too.
    """
    forward, shapes = call(T, **_kinds(T, N)[kind], N=N)
    gc.collect()
    start = time.process_time()
    program = compiled(forward if direction == "forward" else gradient(forward), shapes)
    seconds = time.process_time() - start
    return program.memory_analysis().temp_size_in_bytes, seconds


# ---- linear memory


# 32k, because constant memory hides a faster growth least there
@pytest.mark.parametrize("T", [pytest.param(4096, marks=slow), 32768])
@pytest.mark.parametrize("direction", [pytest.param("forward", marks=slow), "gradient"])
@pytest.mark.parametrize("kind", few(KINDS, ("causal", "lengths")))
@pytest.mark.once
def test_memory_grows_with_the_sequence_and_compile_time_does_not(kind, direction, T):
    once, seconds = cost(kind, direction, T)
    twice, longer = cost(kind, direction, 2 * T)
    assert twice <= 2.15 * once, f"{T} tokens {mib(once)}, {2 * T} tokens {mib(twice)}"
    assert longer <= 1.5 * seconds + 0.5, (
        f"{T} tokens {seconds:.1f} s, {2 * T} tokens {longer:.1f} s"
    )


def test_memory_at_32k():
    forward, _ = cost("causal", "forward", 32768)
    grad, _ = cost("causal", "gradient", 32768)
    one_head, _ = cost("causal", "gradient", 32768, N=1)
    assert forward <= 230 * MIB, f"forward {mib(forward)}"
    assert grad <= 320 * MIB, f"gradient {mib(grad)}"
    assert one_head <= 35 * MIB, f"gradient of one head {mib(one_head)}"


def test_bfloat16_takes_the_memory_of_float32_for_long_keys_and_many_words():
    """XLA:CPU before JAX 0.11 would convert whole operands to float32 before a loop."""

    def run(q, k, x, kernel, labels):
        out = dot_product_attention(q, k, k, is_causal=True, q_offset=2**15)
        return out, linear_cross_entropy(x, kernel, labels)

    sizes = (1, 128, 2, 32), (1, 2**15, 2, 32), (128, 32), (32, 2**16)
    labels = jax.ShapeDtypeStruct((128,), np.int32)

    def taken(dtype) -> int:
        return temp_bytes(run, [*(jax.ShapeDtypeStruct(size, dtype) for size in sizes), labels])

    half, full = taken(jnp.bfloat16), taken(f32)
    assert half <= 1.1 * full, f"bfloat16 {mib(half)}, float32 {mib(full)}"


@pytest.mark.once
def test_several_calls_of_a_program_need_the_memory_of_one():
    """XLA:CPU makes zeros for the sums of a loop early, unless they depend on what comes before.

    They do on one device, which the tests have inside shard_map alone.
    """
    mesh = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def chain(calls):
        def run(q, k, v):
            for _ in range(calls):
                q = dot_product_attention(q, k, v, is_causal=True, chunk_size=64)
            return q

        shape = jax.ShapeDtypeStruct((1, 1024, 2, 32), f32)
        on_one_device = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P())
        return temp_bytes(on_one_device, [shape] * 3)

    two, five = chain(2), chain(5)
    assert five < 1.1 * two, f"{mib(two)} for two calls, {mib(five)} for five"


def test_heads_and_batch_share_one_tile():
    """More heads and batch entries cost only their own rows on a CPU.

    8 x 16 heads take one tile of logits (of 1 to 4 MiB), not 128 tiles.
    """
    few_heads = temp_bytes(*call(1024, B=1, N=2, H=8))
    forward, shapes = call(1024, B=8, N=16, H=8)
    more = temp_bytes(forward, shapes) - few_heads
    query_bytes = shapes[0].size * 4
    assert more <= 2.5 * query_bytes, f"{mib(more)} more, the query has {mib(query_bytes)}"


@pytest.mark.parametrize(
    "axes, direction",
    [
        pytest.param("heads", "forward", marks=slow),
        ("batch and heads", "gradient of each"),
        pytest.param("heads", "jvp", marks=slow),
        pytest.param("batch and heads", "gradient", marks=slow),
    ],
)
@pytest.mark.once
def test_vmap_shares_one_tile(axes, direction):
    """Mapped heads and examples take the memory of leading dims, and copies of q, k, v and out."""
    shape = {"heads": (8, 2048, 16), "batch and heads": (2, 8, 2048, 16)}[axes]  # (B) N T H
    x = jax.ShapeDtypeStruct(shape, f32)

    def one_head(q, k, v):
        q, k, v = (x[:, None] for x in (q, k, v))
        return dot_product_attention(q, k, v, is_causal=True)[:, 0]

    def with_leading_dims(q, k, v):
        q, k, v = (jnp.moveaxis(x, -3, -2) for x in (q, k, v))
        return dot_product_attention(q, k, v, is_causal=True)

    def mapped(f):
        for _ in shape[:-2]:
            f = jax.vmap(f)
        return f

    def tangents(f):
        return lambda *args: jax.jvp(f, args, args)

    def gradients(f):
        return jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2))

    match direction:
        case "forward":
            functions = mapped(one_head), with_leading_dims
        case "jvp":
            functions = tangents(mapped(one_head)), tangents(with_leading_dims)
        case "gradient of each":
            functions = mapped(gradients(one_head)), gradients(with_leading_dims)
        case "gradient":
            functions = gradients(mapped(one_head)), gradients(with_leading_dims)
    inside, outside = (temp_bytes(f, (x, x, x)) for f in functions)
    copies = 4 * x.size * 4
    assert inside <= outside + copies, f"{mib(inside)}, leading dims {mib(outside)}"


@pytest.mark.parametrize(
    "order", ["gradient", pytest.param("hvp", marks=slow), pytest.param("rr", marks=slow)]
)
@pytest.mark.once
def test_calls_of_a_vmap_that_share_a_bias_keep_one_gradient_of_it(order):
    """The gradients of 8 calls are added up as they come, also in derivatives of that sum."""
    x = jax.ShapeDtypeStruct((8, 1, 2048, 1, 8), f32)
    bias = jax.ShapeDtypeStruct((1, 2048, 2048), f32)

    def forward(q, k, v, bias):
        return dot_product_attention(q, k, v, bias=bias)

    def gradients(*arrays):
        _, pull = jax.vjp(jax.vmap(forward, (0, 0, 0, None)), *arrays)
        return pull(arrays[0])

    def tangents(*arrays):
        return jax.jvp(gradients, arrays, arrays)

    def gradients_of_gradients(*arrays):
        _, pull = jax.vjp(gradients, *arrays)
        return pull(arrays)

    function = {"gradient": gradients, "hvp": tangents, "rr": gradients_of_gradients}[order]
    temp = temp_bytes(function, (x, x, x, bias))
    assert temp <= 4 * bias.size * 4 + 8 * MIB, mib(temp)


def test_vmap_keeps_a_memory_limit():
    """The limit of one call holds for all calls of a vmap, apart from copies of q, k, v and out."""
    limit = 2 * MIB
    x = jax.ShapeDtypeStruct((8, 1, 2048, 1, 16), f32)

    def limited(q, k, v):
        return dot_product_attention(q, k, v, is_causal=True, memory_limit=limit)

    copies = 4 * x.size * 4
    assert temp_bytes(jax.vmap(limited), (x, x, x)) <= limit + copies


def test_the_account_knows_quadratic_memory():
    """The compiler's account shows that the reference takes quadratic memory.

    Otherwise the account would measure nothing.
    """
    once = temp_bytes(*call(96, N=1, H=8, implementation="reference"))
    twice = temp_bytes(*call(192, N=1, H=8, implementation="reference"))
    assert twice > 3.5 * once


# ---- shapes in the optimised program


def shapes_in(text: str) -> set[tuple[int, ...]]:
    """Return the shapes of all arrays in HLO."""
    shapes = re.findall(r"\b(?:pred|[suf]\d+|bf16|f8\w+)\[([\d,]+)\]", text)
    return {tuple(map(int, dims.split(","))) for dims in shapes}


def quadratic(text: str, T: int) -> set[tuple[int, ...]]:
    """Return the shapes in HLO with two dims of T or more, also folded into one dim."""
    return {shape for shape in shapes_in(text) if _is_quadratic(shape, T)}


def _is_quadratic(shape: tuple[int, ...], T: int) -> bool:
    long_dims = [size for size in shape if size >= T]
    return len(long_dims) >= 2 or math.prod(shape) >= T * T


def test_shapes_in_hlo_finds_the_quadratic_array():
    text = compiled(*call(131, N=1, H=8, implementation="reference")).as_text()
    assert quadratic(text, 131)


def _layers(forward, *, remat: bool):
    """Return a scan over three layers, each of which attends with the last one's output."""

    def run(q, k, v, arrays):
        def layer(q, _):
            return forward(q, k, v, arrays), None

        body = jax.checkpoint(layer) if remat else layer
        out, _ = jax.lax.scan(body, q, None, length=3)
        return out

    return run


def _vmapped(forward):
    """Return `forward` mapped over the batch."""

    def run(q, k, v, arrays):
        def one_entry(q, k, v):
            return forward(q[None], k[None], v[None], arrays)[0]

        return jax.vmap(one_entry)(q, k, v)

    return run


CONTEXTS = ("plain", "gradient", "vmap", "remat", "scan over layers", "scan over layers with remat")


def in_context(context: str, forward):
    """Return the call in its context: the gradient of it, or of what surrounds it."""
    match context:
        case "plain":
            return forward
        case "gradient":
            return gradient(forward)
        case "vmap":
            return gradient(_vmapped(forward))
        case "remat":
            return gradient(jax.checkpoint(forward))
        case "scan over layers":
            return gradient(_layers(forward, remat=False))
        case "scan over layers with remat":
            return gradient(_layers(forward, remat=True))


FAST = [("causal", "gradient"), ("causal", "scan over layers with remat")]
FAST += [("lengths", "vmap"), ("segments", "remat")]


@pytest.mark.parametrize("kind, context", few(itertools.product(KINDS, CONTEXTS), FAST))
def test_nothing_of_size_T_times_T(kind, context):
    T = 4099
    forward, shapes = call(T, **_kinds(T, N=2)[kind], N=2, H=8)
    program = compiled(in_context(context, forward), shapes)
    too_large = quadratic(program.as_text(), T)
    assert not too_large, too_large


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({}, marks=slow),
        dict(is_causal=True),
        dict(key_value_seq_lengths=jax.ShapeDtypeStruct((2,), "i4")),
    ],
)
def test_grouped_heads_repeat_no_key(kwargs):
    """No array with columns (c or S) and head dims (H or D) has room for N heads.

    The sizes of the letters differ, so that a dim tells its letter.
    """
    z = Sizes(B=2, T=37, S=53, K=3, G=7, H=5, D=11)
    t = 13
    c = 23
    query = jax.ShapeDtypeStruct((z.B, z.T, z.N, z.H), f32)
    key = jax.ShapeDtypeStruct((z.B, z.S, z.K, z.H), f32)
    value = jax.ShapeDtypeStruct((z.B, z.S, z.K, z.D), f32)
    arrays, static = split_shapes(kwargs)

    def run(q, k, v, arrays):
        def forward(q, k, v):
            return dot_product_attention(q, k, v, **arrays, **static, chunk_size=(t, c))

        out, pull = jax.vjp(forward, q, k, v)
        return pull(out)

    program = compiled(run, (query, key, value, arrays))
    shapes = shapes_in(program.as_text())
    columns = {c, z.S}
    head_dims = {z.H, z.D}
    assert any(columns & {*shape} and head_dims & {*shape} for shape in shapes), (
        "the sizes tell nothing"
    )
    repeated = []
    for column, head_dim in itertools.product(columns, head_dims):
        elements = z.B * column * z.N * head_dim
        for shape in shapes:
            has_both = column in shape and head_dim in shape
            has_rows = z.T in shape or t in shape
            if has_both and not has_rows and math.prod(shape) >= elements:
                repeated.append(shape)
    assert not repeated, repeated
