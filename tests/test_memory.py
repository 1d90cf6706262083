"""What attention costs, from the compiler's own account: nothing here allocates an array of length T or runs a long call.

Tiles that are visited, memory of the gradient of bias and of masks, compilations, and what the backward is given.
"""

import functools
import gc
import itertools
import math
import re
import time

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from jax.ad_checkpoint import print_saved_residuals

import memeff
from memeff import dot_product_attention
from memeff.chunked import fixed_max, forward, schedule
from memeff.chunked.tile import tile_logits
from memeff.masking import mask_tile
from memeff.problem import LogitParams, Operands, Problem

MIB = 2**20
f32 = np.float32


# ---- calls by kind: extra operands, static arguments, key heads


def _kinds(T: int, N: int = 8):
    array = jax.ShapeDtypeStruct
    lengths, ids = array((1,), np.int32), array((1, T), np.int32)
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


def call(T, N=8, K=None, H=64, B=1, dtype=f32, implementation=None, **kwargs):
    """A function of (query, key, value, arrays), and the shapes that it takes."""
    arrays = {n: x for n, x in kwargs.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {n: x for n, x in kwargs.items() if n not in arrays}
    q, kv = (jax.ShapeDtypeStruct((B, T, n, H), dtype) for n in (N, K or N))

    def forward(q, k, v, arrays):
        return dot_product_attention(q, k, v, **arrays, **static, implementation=implementation)

    return forward, (q, kv, kv, arrays)


def gradient(forward):
    """All gradients there are, for the cotangent that stands in the query's place."""

    def backward(q, k, v, arrays):
        bias = {n: x for n, x in arrays.items() if n == "bias"}
        rest = {n: x for n, x in arrays.items() if n != "bias"}
        return jax.vjp(lambda q, k, v, bias: forward(q, k, v, bias | rest), q, k, v, bias)[1](q)

    return backward


def compiled(function, shapes):
    return jax.jit(function).lower(*shapes).compile()


@functools.cache
def cost(kind: str, direction: str, T: int, N: int = 8) -> tuple[int, float]:
    """Bytes beyond inputs and outputs, and CPU seconds of compilation (other work on the machine does not count, nor does
    the collection of what hundreds of tests before have left).
    """
    forward, shapes = call(T, **_kinds(T, N)[kind], N=N)
    gc.collect()
    start = time.process_time()
    program = compiled(forward if direction == "forward" else gradient(forward), shapes)
    return program.memory_analysis().temp_size_in_bytes, time.process_time() - start


# ---- linear, and how much


slow = pytest.mark.slow


# at 32k what does not grow hides least
@pytest.mark.parametrize("T", [pytest.param(4096, marks=slow), 32768])
@pytest.mark.parametrize("direction", [pytest.param("forward", marks=slow), "gradient"])
@pytest.mark.parametrize("kind", few(KINDS, ("causal", "lengths", "segments", "dropout")))
def test_memory_grows_with_the_sequence_and_compile_time_does_not(kind, direction, T):
    (once, seconds), (twice, longer) = cost(kind, direction, T), cost(kind, direction, 2 * T)
    assert twice <= 2.15 * once, (
        f"{T} tokens {once / MIB:.1f} MiB, {2 * T} tokens {twice / MIB:.1f} MiB"
    )
    assert longer <= 1.5 * seconds + 0.5, (
        f"{T} tokens {seconds:.1f} s, {2 * T} tokens {longer:.1f} s"
    )


def test_memory_at_32k():
    forward, grad = cost("causal", "forward", 32768)[0], cost("causal", "gradient", 32768)[0]
    one_head = cost("causal", "gradient", 32768, N=1)[0]
    assert forward <= 230 * MIB, f"forward {forward / MIB:.1f} MiB"
    assert grad <= 320 * MIB, f"gradient {grad / MIB:.1f} MiB"
    assert one_head <= 35 * MIB, f"gradient of one head {one_head / MIB:.1f} MiB"


def test_heads_and_batch_share_one_tile():
    """On a CPU more of them cost their own rows alone: 8 x 16 heads not 128 tiles of logits (of 1 to 4 MiB), but one."""
    few, many = (call(1024, B=B, N=N, H=8) for B, N in ((1, 2), (8, 16)))
    few, many = ((compiled(forward, shapes), shapes[0].size * 4) for forward, shapes in (few, many))
    more = (
        many[0].memory_analysis().temp_size_in_bytes - few[0].memory_analysis().temp_size_in_bytes
    )
    assert more <= 2.5 * many[1], (
        f"{more / MIB:.1f} MiB more, the query has {many[1] / MIB:.1f} MiB"
    )


@pytest.mark.parametrize(
    "axes, direction",
    [
        ("heads", "forward"),
        ("batch and heads", "gradient of each"),
        pytest.param("heads", "jvp", marks=pytest.mark.slow),
        pytest.param("batch and heads", "gradient", marks=pytest.mark.slow),
    ],
)
def test_vmap_shares_one_tile(axes, direction):
    """Heads, and examples, as a mapped axis take the memory of leading dims, and copies as long as the sequence."""
    B, T, N, H = 2, 2048, 8, 16
    calls = {"heads": 1, "batch and heads": 2}[axes]
    shape = jax.ShapeDtypeStruct((B, N, T, H)[2 - calls :], f32)

    def one(q, k, v):
        return dot_product_attention(*(x[:, None] for x in (q, k, v)), is_causal=True)[:, 0]

    def mapped(f):
        return functools.reduce(lambda f, _: jax.vmap(f), range(calls), f)

    def leading(q, k, v):
        q, k, v = (jnp.moveaxis(x, -3, -2) for x in (q, k, v))
        return dot_product_attention(q, k, v, is_causal=True)

    def squared(f):
        return lambda *x: (f(*x) ** 2).sum()

    def derivative(f, each):
        match direction:
            case "forward":
                return f
            case "jvp":
                return lambda *x: jax.jvp(f, x, x)
            case "gradient of each" if each:
                return each(jax.grad(squared(one), (0, 1, 2)))
        return jax.grad(squared(f), (0, 1, 2))

    def temp_bytes(f, each=None):
        program = jax.jit(derivative(f, each)).lower(shape, shape, shape).compile()
        return program.memory_analysis().temp_size_in_bytes

    inside, outside = temp_bytes(mapped(one), mapped), temp_bytes(leading)
    copies = 4 * shape.size * 4
    assert inside <= outside + copies, (
        f"{inside / MIB:.1f} MiB, leading dims {outside / MIB:.1f} MiB"
    )


def test_vmap_keeps_a_memory_limit():
    """A limit of one call holds for all calls of a vmap, beside copies as long as the sequence."""
    limit, shape = 2 * MIB, jax.ShapeDtypeStruct((8, 1, 2048, 1, 16), f32)
    call = lambda q, k, v: dot_product_attention(q, k, v, is_causal=True, memory_limit=limit)
    program = jax.jit(jax.vmap(call)).lower(shape, shape, shape).compile()
    assert program.memory_analysis().temp_size_in_bytes <= limit + 4 * shape.size * 4


def test_the_account_knows_quadratic_memory():
    """The reference, by the same ruler: or the ruler would measure nothing."""
    once, twice = (
        compiled(*call(T, N=1, H=8, implementation="reference")).memory_analysis()
        for T in (512, 1024)
    )
    assert twice.temp_size_in_bytes > 3.5 * once.temp_size_in_bytes


# ---- shapes in the optimised program


def shapes_in(text: str) -> set[tuple[int, ...]]:
    """Shapes of all arrays in HLO."""
    found = re.findall(r"\b(?:pred|[suf]\d+|bf16|f8\w+)\[([\d,]+)\]", text)
    return {tuple(int(d) for d in dims.split(",")) for dims in found}


def quadratic(text: str, T: int) -> set[tuple[int, ...]]:
    """Shapes with two dims of T or more, also folded into one dim."""
    return {
        shape
        for shape in shapes_in(text)
        if sum(d >= T for d in shape) >= 2 or math.prod(shape) >= T * T
    }


def test_shapes_in_hlo_finds_the_quadratic_array():
    text = compiled(*call(1031, N=1, H=8, implementation="reference")).as_text()
    assert quadratic(text, 1031)


def _layers(forward, wrap=lambda f: f):
    def run(q, k, v, arrays):
        body = wrap(lambda q, _: (forward(q, k, v, arrays), None))
        return jax.lax.scan(body, q, None, length=3)[0]

    return run


def _vmapped(forward):
    return lambda q, k, v, arrays: jax.vmap(
        lambda q, k, v: forward(q[None], k[None], v[None], arrays)[0]
    )(q, k, v)


CONTEXTS = {
    "plain": lambda f: f,
    "gradient": gradient,
    "vmap": lambda f: gradient(_vmapped(f)),
    "remat": lambda f: gradient(jax.checkpoint(f)),
    "scan over layers": lambda f: gradient(_layers(f)),
    "scan over layers with remat": lambda f: gradient(_layers(f, jax.checkpoint)),
}


SOME = [*(("causal", context) for context in CONTEXTS), ("lengths", "vmap"), ("segments", "remat")]


@pytest.mark.parametrize("kind, context", few(itertools.product(KINDS, CONTEXTS), SOME))
def test_nothing_of_size_T_times_T(kind, context):
    T = 4099
    forward, shapes = call(T, **_kinds(T, N=2)[kind], N=2, H=8)
    found = quadratic(compiled(CONTEXTS[context](forward), shapes).as_text(), T)
    assert not found, found


@pytest.mark.parametrize(
    "kwargs",
    [{}, dict(is_causal=True), dict(key_value_seq_lengths=jax.ShapeDtypeStruct((2,), "i4"))],
)
def test_grouped_heads_repeat_no_key(kwargs):
    """Letters are told apart by their sizes: nothing with columns (c or S) and head dims (H or D) has room for N heads."""
    B, T, S, K, G, H, D, c = 2, 37, 53, 3, 7, 5, 11, 23
    q, k, v = (
        jax.ShapeDtypeStruct((B, n, h, d), f32) for n, h, d in ((T, K * G, H), (S, K, H), (S, K, D))
    )
    arrays = {n: x for n, x in kwargs.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {n: x for n, x in kwargs.items() if n not in arrays}

    def run(q, k, v, arrays):
        forward = lambda q, k, v: dot_product_attention(
            q, k, v, **arrays, **static, chunk_size=(13, c)
        )
        out, pull = jax.vjp(forward, q, k, v)
        return pull(out)

    shapes = shapes_in(compiled(run, (q, k, v, arrays)).as_text())
    columns, heads = {c, S}, {H, D}
    assert any(columns & {*shape} and heads & {*shape} for shape in shapes), (
        "the sizes tell nothing"
    )
    most = {(a, b): a * b * B * K for a, b in itertools.product(columns, heads)}
    repeated = [
        shape
        for shape in shapes
        for a, b in most
        if a in shape
        and b in shape
        and not {T, 13} & {*shape}
        and math.prod(shape) >= G * most[a, b]
    ]
    assert not repeated, repeated


# ---- compile time, and how often


@pytest.mark.parametrize(
    "kind", ["causal", *(pytest.param(kind, marks=slow) for kind in KINDS if kind != "causal")]
)
def test_compile_time_at_64k_is_that_at_4k(kind):
    cost(kind, "gradient", 1024)  # what only a first compilation pays
    short, long = cost(kind, "gradient", 4096)[1], cost(kind, "gradient", 65536)[1]
    assert long <= 1.5 * short + 0.5, f"4k: {short:.2f} s, 64k: {long:.2f} s"


def test_a_million_tokens_compile():
    forward, shapes = call(2**20, is_causal=True)
    start = time.process_time()
    program = compiled(gradient(forward), shapes)
    seconds, bytes_ = time.process_time() - start, program.memory_analysis().temp_size_in_bytes
    assert seconds < 30, f"{seconds:.1f} s"
    assert bytes_ < 12 * 1024 * MIB, f"{bytes_ / MIB:.0f} MiB"


@pytest.fixture
def compilations():
    """Seconds of each compilation, as they happen."""
    seen = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("lengths", [False, True])
def test_five_calls_compile_once(compilations, lengths):
    """Outside jit too, for calls that differ in their numbers only."""
    rng = np.random.default_rng(0)
    extra = [dict(key_value_seq_lengths=jnp.array([i, 3])) if lengths else {} for i in range(5)]
    inputs = [jnp.asarray(rng.standard_normal((2, 19, 3, 4)), f32) for _ in range(5)]
    grad = jax.grad(lambda x, extra: dot_product_attention(x, x, x, **extra, is_causal=True).sum())
    jax.block_until_ready(grad(inputs[0], extra[0]))
    assert compilations
    compilations.clear()
    for x, kwargs in zip(inputs[1:], extra[1:], strict=True):
        jax.block_until_ready(grad(x, kwargs))
    assert not compilations, f"{len(compilations)} more"


# ---- what bias and mask cost


@pytest.mark.parametrize("shape", [(1, 1, 2048, 2048), (2048,), (8, 1, 2048), (8, 2048, 1)])
def test_gradient_of_bias_costs_its_own_size(shape):
    """Beyond the same call without a gradient for bias: that gradient, at most once again for a copy, and two tiles."""
    T = 2048
    array = jax.ShapeDtypeStruct(shape, f32)
    forward, shapes = call(T, is_causal=True, bias=array, H=16)

    def bytes_(function):
        account = compiled(function, shapes).memory_analysis()
        return account.temp_size_in_bytes + account.output_size_in_bytes

    without = lambda q, k, v, arrays: jax.vjp(lambda q, k, v: forward(q, k, v, arrays), q, k, v)[1](
        q
    )
    more = bytes_(gradient(forward)) - bytes_(without)
    tile = 8 * 512 * 512 * 4  # all heads: a sixteenth of what N T S would take
    own = math.prod(shape) * 4
    assert more <= 2 * own + 2 * tile, f"{more / MIB:.1f} MiB for {own / MIB:.1f} MiB of bias"


@pytest.mark.parametrize("B, N, K", [(1, 8, 8), (2, 8, 8), (1, 8, 4)])
def test_bias_and_mask_are_not_copied(B, N, K):
    T = 2048
    for name, x in (
        ("bias", jax.ShapeDtypeStruct((N, T, T), f32)),
        ("mask", jax.ShapeDtypeStruct((B, N, T, T), bool)),
    ):
        temp = compiled(*call(T, N=N, K=K, B=B, **{name: x})).memory_analysis().temp_size_in_bytes
        own = x.size * x.dtype.itemsize
        assert temp <= own / 2, (
            f"{name} has {own / MIB:.1f} MiB, the call takes {temp / MIB:.1f} more"
        )


def test_mask_causes_no_gradient_buffer():
    """A dense boolean mask: nothing of its shape in any other dtype, and no copy of it worth speaking of."""
    T = 2053
    forward, shapes = call(T, mask=jax.ShapeDtypeStruct((1, 1, T, T), np.bool_), H=16, N=2)
    program = compiled(gradient(forward), shapes)
    arrays = re.findall(r"\b(pred|[suf]\d+|bf16)\[([\d,]+)\]", program.as_text())
    dtypes = {dtype for dtype, dims in arrays if dims.count(str(T)) >= 2}
    assert dtypes == {"pred"}, dtypes
    plain, plain_shapes = call(T, H=16, N=2)
    more = program.memory_analysis().temp_size_in_bytes
    more -= compiled(gradient(plain), plain_shapes).memory_analysis().temp_size_in_bytes
    assert more <= 1.25 * T * T, f"{more / MIB:.1f} MiB for {T * T / MIB:.1f} MiB of mask"


# ---- which tiles are visited


def picture(problem: Problem, operands: Operands) -> np.ndarray:
    """Who sees whom, T S, by `visible` on all positions."""
    T, S = operands.query.shape[1], operands.key.shape[1]
    keep = mask_tile(problem, operands, jnp.arange(T), jnp.arange(S))
    return np.broadcast_to(np.asarray(keep), (1, 1, 1, T, S)).any((0, 1, 2))


def operands_of(T, S, **kwargs) -> Operands:
    return Operands(
        jnp.zeros((1, T, 1, 1, 2)), jnp.zeros((1, S, 1, 2)), jnp.zeros((1, S, 1, 2)), **kwargs
    )


def blocks(seen: np.ndarray, t: int, c: int):
    """(i, j): the part of the picture that belongs to query tile i and key tile j."""
    T, S = seen.shape
    return {
        (i, j): seen[i * t : i * t + t, j * c : j * c + c]
        for i in range(-(-T // t))
        for j in range(-(-S // c))
    }


WINDOWS = {
    "full": {},
    "causal": dict(right=0),
    "window": dict(left=9, right=4),
    "left": dict(left=5),
    "right": dict(right=7),
    "one": dict(left=0, right=0),
    "wide": dict(left=1000, right=1000),
    "ahead": dict(right=0, q_offset=16),
    "behind": dict(right=0, q_offset=-20),
    "window ahead": dict(left=6, right=0, q_offset=21),
    "window past the end": dict(left=6, right=0, q_offset=50),
    "nobody": dict(left=3, right=0, q_offset=1000),
    "nobody before": dict(right=0, q_offset=-1000),
}
SIZES = [
    (37, 53, 16, 24),
    (53, 37, 7, 13),
    (48, 48, 16, 16),
    (41, 41, 8, 8),
    (1, 53, 1, 7),
    (37, 1, 5, 1),
    (31, 33, 31, 33),
]


@pytest.mark.parametrize("T, S, t, c", SIZES)
@pytest.mark.parametrize("window", WINDOWS)
def test_tiles_are_those_of_the_picture(window, T, S, t, c):
    problem, operands = Problem(**WINDOWS[window], chunk_size=(t, c)), operands_of(T, S)
    parts = blocks(picture(problem, operands), t, c)
    whole, edge = (
        ({(int(i), int(j)) for i, j in pairs}, len(pairs))
        for pairs in schedule.tiles_by_mask(problem, operands)
    )
    assert len(whole[0]) == whole[1] and len(edge[0]) == edge[1], "a tile is visited twice"
    assert not whole[0] & edge[0]
    assert whole[0] | edge[0] == {at for at, part in parts.items() if part.any()}
    full_size = {at for at, part in parts.items() if part.all() and part.shape == (t, c)}
    assert whole[0] == full_size, "tiles that need no mask"


@pytest.mark.parametrize("term", ["mask", "segments", "bias"])
def test_no_tile_goes_unmasked_where_elements_decide(term):
    T, S = 37, 53
    extra = {
        "mask": dict(mask=jnp.ones((1, 1, 1, T, S), bool)),
        "segments": dict(q_segments=jnp.zeros((1, T), int), kv_segments=jnp.zeros((1, S), int)),
        "bias": dict(logit_params=LogitParams(bias=jnp.zeros((1, 1, 1, T, S)))),
    }[term]
    problem, operands = Problem(right=0, chunk_size=(16, 24)), operands_of(T, S, **extra)
    whole, edge = schedule.tiles_by_mask(problem, operands)
    parts = blocks(picture(problem, operands), 16, 24)
    assert len(whole) == 0
    assert {(int(i), int(j)) for i, j in edge} == {at for at, part in parts.items() if part.any()}


def test_skip_false_lists_every_tile():
    problem, operands = Problem(right=0, chunk_size=(16, 24)), operands_of(37, 53)
    skipped, every = (
        schedule.tiles_by_mask(problem, operands, skip=skip) for skip in (True, False)
    )
    pairs = {(int(i), int(j)) for pairs in every for i, j in pairs}
    assert pairs == set(blocks(picture(problem, operands), 16, 24))
    np.testing.assert_array_equal(skipped[0], every[0])
    assert len(skipped[1]) < len(every[1])


def _both_ways(T=37, S=53, **kwargs):
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, n, h, d)), f32)
        for n, h, d in ((T, 4, 5), (S, 2, 5), (S, 2, 7))
    )
    bias = jnp.asarray(rng.standard_normal((4, 1, S)), f32)
    call = lambda q, k, v, bias: dot_product_attention(
        q, k, v, bias, return_residual=True, chunk_size=(8, 12), **kwargs
    )
    (out, lse), pull = jax.jit(lambda *args: jax.vjp(call, *args))(q, k, v, bias)
    dout, dlse = (jnp.asarray(rng.standard_normal(x.shape), f32) for x in (out, lse))
    return out, lse, jax.jit(pull)((dout, jnp.where(jnp.isfinite(lse), dlse, 0)))


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(is_causal=True),
        dict(local_window_size=(9, 4)),
        dict(is_causal=True, q_offset=-11),
        # Not T = 5: that is one tile, a program without a loop. Its bits are the same with this
        # file's flags and on jaxlib 0.12, but on 0.10 with LLVM's optimisations XLA contracts it
        # otherwise, and dq differs by rounding (4e-7).
        dict(local_window_size=(0, 0), T=21),
    ],
    ids=str,
)
def test_skipping_changes_no_bit(monkeypatch, kwargs):
    skipped = _both_ways(**kwargs)
    visited = []

    def every(problem, operands):
        visited.append(sum(map(len, tiles(problem, operands, skip=False))))
        return tiles(problem, operands, skip=False)

    tiles = schedule.tiles_by_mask
    monkeypatch.setattr(schedule, "tiles_by_mask", every)
    jax.clear_caches()
    everything = _both_ways(**kwargs)
    jax.clear_caches()
    assert len(visited) >= 2, "forward and backward did not ask"
    assert len({*visited}) == 1
    jax.tree.map(np.testing.assert_array_equal, skipped, everything)


def int32(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(is_causal=True),
        dict(key_value_seq_lengths=int32(13, 2)),
        dict(query_seq_lengths=int32(9, 17)),
        dict(key_value_seq_lengths=int32(13, 2), query_seq_lengths=int32(1, 8)),
        dict(key_value_seq_lengths=int32(0, 0), is_causal=True),
        dict(q_offset=int32(0, 0), is_causal=True),
        dict(q_offset=int32(-40, -40), is_causal=True),
        dict(q_offset=int32(60, 70), local_window_size=(9, 0)),
        dict(q_offset=int32(3, 20), local_window_size=(4, 2)),
        dict(q_offset=int32(3, 20), local_window_size=(4, 2), key_value_seq_lengths=int32(31, 5)),
    ],
    ids=lambda kwargs: ", ".join(
        f"{n}={x.tolist() if hasattr(x, 'tolist') else x}" for n, x in kwargs.items()
    ),
)
def test_tiles_visited_as_it_runs(kwargs):
    """Counted in the walk, also where lengths and offsets are arrays: from the first to the last tile that anyone needs."""
    T, S, t, c = 37, 53, 8, 12
    visited = visits(T, S, t, c, kwargs)
    needed = {
        at
        for seen in _picture_of(T, S, kwargs)
        for at, part in blocks(seen, t, c).items()
        if part.any()
    }
    between = {
        (i, j) for i in range(-(-T // t)) for j in _between([b for a, b in needed if a == i])
    }
    assert len(visited) == len(set(visited)), "a tile is visited twice"
    assert needed <= set(visited), "a tile that sees something is not visited"
    assert set(visited) <= between, "a tile that sees nothing is visited"


def _between(js):
    return range(min(js), max(js) + 1) if js else ()


def _picture_of(T, S, kwargs):
    """Who sees whom, T S, for each of two batch entries; not by `visible`."""
    rows, cols = np.arange(T)[:, None], np.arange(S)[None]
    pictures = []
    for b in range(2):
        at = rows + (kwargs["q_offset"][b] if "q_offset" in kwargs else 0)
        seen = np.ones((T, S), bool)
        if kwargs.get("is_causal"):
            seen &= cols <= at
        if (window := kwargs.get("local_window_size")) is not None:
            seen &= (at - window[0] <= cols) & (cols <= at + window[1])
        if "key_value_seq_lengths" in kwargs:
            seen &= cols < kwargs["key_value_seq_lengths"][b]
        if "query_seq_lengths" in kwargs:
            seen &= rows < kwargs["query_seq_lengths"][b]
        pictures.append(seen)
    return pictures


def visits(T, S, t, c, kwargs) -> list[tuple[int, int]]:
    """(i, j) of every tile of logits that the forward makes, as it runs."""
    seen = []

    def spy(problem, tile, **how):
        jax.debug.callback(
            lambda row, col: seen.append((int(row), int(col))), tile.row_start, tile.col_start
        )
        return tile_logits(problem, tile, **how)

    with pytest.MonkeyPatch.context() as patch:
        for module in (forward, fixed_max):
            patch.setattr(module, "tile_logits", spy)
        jax.clear_caches()
        ones = lambda n: jnp.ones((2, n, 1, 2))
        arrays = {n: x for n, x in kwargs.items() if isinstance(x, np.ndarray)}
        static = {n: x for n, x in kwargs.items() if n not in arrays}
        run = jax.jit(
            lambda q, k, arrays: dot_product_attention(
                q, k, k, chunk_size=(t, c), **static, **arrays
            )
        )
        jax.block_until_ready(run(ones(T), ones(S), arrays))
        jax.effects_barrier()
    jax.clear_caches()
    return [(-(-row // t), -(-col // c)) for row, col in seen]  # the last tile starts early


# ---- what is saved for the backward


def saved(function, *args, capsys) -> list[str]:
    print_saved_residuals(function, *args)
    return [line for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_backward_saves_operands_out_and_lse(capsys):
    """And nothing else: no probabilities, no maxima, no copy of the keys for each head."""
    B, T, S, K, G, H, D = 2, 37, 53, 3, 2, 5, 11
    q, k, v = jnp.ones((B, T, K * G, H)), jnp.ones((B, S, K, H)), jnp.ones((B, S, K, D))
    bias, lengths = jnp.ones((K * G, 1, S)), jnp.array([S, 7])
    call = lambda q, k, v, bias: dot_product_attention(
        q, k, v, bias, is_causal=True, key_value_seq_lengths=lengths
    )
    lines = saved(call, q, k, v, bias, capsys=capsys)
    elements = [
        math.prod(map(int, re.match(r"\w+\[([\d,]+)\]", line)[1].split(","))) for line in lines
    ]
    # lse is two floats
    allowed = [q.size, k.size, v.size, bias.size, B * T * K * G * D, *[B * T * K * G] * 2, B]
    for size in elements:
        assert size in allowed, f"{size} elements are saved:\n" + "\n".join(lines)
        allowed.remove(size)


@pytest.mark.parametrize("return_residual", [False, True])
def test_inference_keeps_no_lse(return_residual):
    """Outside jit: the compiled forward gives lse only to who asks."""
    q = jax.ShapeDtypeStruct((1, 37, 2, 5), f32)
    call = lambda q: dot_product_attention(q, q, q, is_causal=True, return_residual=return_residual)
    inner = [
        e
        for e in jax.make_jaxpr(call)(q).eqns
        if "jit" in e.primitive.name or "memeff" in e.primitive.name
    ]
    assert inner
    given = [
        x.aval.shape
        for e in inner
        for x in e.outvars
        if x.aval.shape and math.prod(x.aval.shape) == 37 * 2
    ]
    assert bool(given) == return_residual


# ---- logits are the same in both directions


LOGITS = ({}, dict(logits_soft_cap=3.0), dict(scale=0.37), dict(precision="highest"))
EACH_DTYPE = [*itertools.product(("float32", "bfloat16", "float16"), LOGITS)]


# of float16 the first alone
@pytest.mark.parametrize("dtype, extra", few(EACH_DTYPE, EACH_DTYPE[:9]), ids=str)
def test_logits_are_identical_in_both_directions(dtype, extra):
    """Each query sees one key: then lse is its logit and exp(s - lse) is 1. p is the gradient of lse to bias."""
    T, N, H = 96, 3, 40
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(3 * rng.standard_normal((1, T, N, H)), dtype) for _ in range(3))
    mask = np.eye(T, dtype=bool)[rng.permutation(T)]
    bias = jnp.zeros((N, T, T), f32)

    def lse(bias):
        return dot_product_attention(
            q, k, v, bias, mask, return_residual=True, chunk_size=(32, 48), **extra
        )[1]

    s, pull = jax.vjp(lse, bias)
    (p,) = pull(jnp.ones_like(s))
    assert np.all(np.asarray(p)[:, ~mask] == 0)
    np.testing.assert_array_equal(np.asarray(p)[:, mask], 1)  # mask has one key in each row


def test_residual_names_are_public():
    assert (
        memeff.RESIDUAL_NAMES == tuple(dict.fromkeys(memeff.RESIDUAL_NAMES))
        and len(memeff.RESIDUAL_NAMES) == 2
    )
