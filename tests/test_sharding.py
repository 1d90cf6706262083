"""Eight devices (CPU ones, see conftest): batch and heads sharded give the same numbers without a word between devices, and
an eighth of the memory each.
"""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memeff
from memeff import dot_product_attention, masks, scores, transforms

f32 = np.float32
B, T, S, N, H, D = 8, 37, 41, 8, 3, 5
CHUNK = (8, 12)
BATCH = P("x", None, None, None)
BOTH = P("x", None, "y", None)


def _draw():
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((N, 1, S)).astype(f32)
    return {
        "plain": ({}, {}),
        "causal": (dict(is_causal=True), {}),
        "window": (dict(local_window_size=(9, 4)), {}),
        "segments": (
            {},
            dict(
                query_segment_ids=np.sort(rng.integers(0, 3, (B, T))).astype(np.int32),
                key_value_segment_ids=np.sort(rng.integers(0, 3, (B, S))).astype(np.int32),
            ),
        ),
        "mask of each": ({}, dict(mask=rng.random((B, 1, T, S)) < 0.7)),
        "scale array": ({}, dict(scale=np.array(0.3, f32))),
        "shared bias": ({}, dict(bias=bias)),
        "dropout": (
            dict(dropout_rate=0.3, broadcast_dropout=False),
            dict(dropout_rng=np.array([1, 2], np.uint32)),
        ),
        "functions": (
            dict(
                score_fn=scores.alibi(np.linspace(0.1, 0.4, N, dtype=f32)),
                mask_fn=masks.causal() & ~masks.dilated(3),
                qk_transform=transforms.rms_norm(np.ones(H, f32), np.full(H, 2, f32)),
            ),
            {},
        ),
        "lengths": ({}, dict(key_value_seq_lengths=np.arange(3, 3 + 5 * B, 5).astype(np.int32))),
        "offset": (dict(is_causal=True), dict(q_offset=np.arange(B).astype(np.int32))),
        "sinks": (dict(is_causal=True), dict(sinks=rng.standard_normal(N).astype(f32))),
        "block mask": (
            dict(mask_fn=memeff.block_mask(masks.causal() & ~masks.dilated(3), T, S)),
            {},
        ),
    }


KINDS = _draw()
# leading dim B
OF_BATCH = (
    "query_segment_ids",
    "key_value_segment_ids",
    "mask",
    "key_value_seq_lengths",
    "q_offset",
)
SCALAR_MAX = ("lengths", "offset")  # bounds of the walk are shared by the batch: one int32 each


def arrays(K=N):
    rng = np.random.default_rng(1)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, D), (B, T, N, D), (B, T, N)
    return tuple(rng.standard_normal(shape).astype(f32) for shape in shapes)


def both_ways(static, q, k, v, dout, dlse, extra):
    """out, lse, dq, dk, dv."""
    call = lambda q, k, v: dot_product_attention(
        q, k, v, **static, **extra, chunk_size=CHUNK, return_residual=True
    )
    results, pull = jax.vjp(call, q, k, v)
    return *results, *pull((dout, dlse))


def second_order(static, q, k, v, dout, dlse, extra):
    """Of the gradients: tangents along the operands, and the transpose of that."""
    gradients = lambda q, k, v: both_ways(static, q, k, v, dout, dlse, extra)[2:]
    return *jax.jvp(gradients, (q, k, v), (q, k, v))[1], *jax.vjp(gradients, q, k, v)[1]((q, k, v))


@functools.cache
def expected(kind: str, K: int = N, of=both_ways):
    """On one device."""
    static, extra = KINDS[kind]
    return jax.tree.map(np.asarray, jax.jit(functools.partial(of, static))(*arrays(K), extra))


def mesh_of(axis_type, **axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(axis_type,) * len(axes))


MESHES = {
    "batch": (dict(x=8), BATCH),
    "batch and heads": (dict(x=4, y=2), BOTH),
    "heads": (dict(y=8), P(None, None, "y", None)),
}


def specs_of(extra, batch_axis):
    return {
        n: P(batch_axis, *[None] * (x.ndim - 1)) if n in OF_BATCH else P() for n, x in extra.items()
    }


def collectives(text: str) -> list[str]:
    """Lines of HLO that talk to other devices."""
    names = (
        "all-reduce|all-gather|collective-permute|all-to-all|reduce-scatter|collective-broadcast"
    )
    return [
        line.strip()[:120]
        for line in re.findall(rf"^.*= .*\b(?:{names})(?:-start)?\(.*$", text, re.M)
    ]


def mesh_context(mesh, is_set: bool):
    """Either `jax.set_mesh`, or nothing: then arrays alone know their mesh."""
    return jax.set_mesh(mesh) if is_set else contextlib.nullcontext()


def program(kind, axis_type, is_set, where, K=N, spec_kv=None, of=both_ways):
    """The compiled function with its arguments placed on the mesh, and the mesh."""
    axes, spec = MESHES[where]
    spec_kv = spec if spec_kv is None else spec_kv
    mesh, (static, extra) = mesh_of(axis_type, **axes), KINDS[kind]
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    args = map(put, arrays(K), (spec, spec_kv, spec_kv, spec, P(*spec[:3])))
    extra = {
        n: put(x, s)
        for (n, x), s in zip(extra.items(), specs_of(extra, spec[0]).values(), strict=True)
    }
    args = (*args, extra)
    with mesh_context(mesh, is_set):
        return jax.jit(functools.partial(of, static)).lower(*args).compile(), args, mesh


def assert_near(actual, wanted, eps=5e-6):
    for x, y in zip(actual, wanted, strict=True):
        x = np.asarray(x)
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        worst = np.abs(x[finite] - y[finite]).max()
        assert worst <= eps * max(1, np.abs(y[finite]).max()), f"differ by {worst:.3g}"


def assert_sharded_as(results, args):
    """out and lse as query, gradients as their operands."""
    q, k, v = args[:3]
    for x, like in zip(results, (q, q, q, k, v), strict=True):
        share = lambda y: [
            a / b for a, b in zip(y.shape[:3], y.sharding.shard_shape(y.shape)[:3], strict=True)
        ]
        assert share(x)[: min(x.ndim, 3)] == share(like)[: min(x.ndim, 3)], (
            f"{x.sharding} is not as {like.sharding}"
        )


def assert_silent(text: str, kind: str):
    talk = collectives(text)
    if kind in SCALAR_MAX:
        talk = [line for line in talk if not re.search(r"= s32\[\] all-reduce\(", line)]
    assert not talk, "\n".join(talk)


@pytest.fixture(autouse=True)
def one_device():
    """Here there are eight."""


slow = pytest.mark.slow
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
NAMES = "axis_type, is_set"
ALL_WAYS = {
    "Auto, set": (AUTO, True),
    "Auto": (AUTO, False),
    "Explicit, set": (EXPLICIT, True),
    "Explicit": (EXPLICIT, False),
}
FAST_WAYS = "Auto, set", "Explicit"
# Equations are traced within the mesh in either case, so one case of each kind of mesh is fast.
EACH_MESH = pytest.mark.parametrize(
    NAMES,
    [pytest.param(*way, id=x, marks=[] if x in FAST_WAYS else slow) for x, way in ALL_WAYS.items()],
)


# ---- the ruler


def test_collectives_are_found():
    mesh = mesh_of(AxisType.Auto, x=8)
    place = lambda *spec: NamedSharding(mesh, P(*spec))
    total = jax.jit(lambda x: (x.sum(0), (x * 2).sum(0)), out_shardings=place())
    gather = jax.jit(lambda x: x + 1, out_shardings=place())
    x = jax.ShapeDtypeStruct((8, 16), f32, sharding=place("x"))
    assert any("all-reduce" in line for line in collectives(total.lower(x).compile().as_text()))
    assert any("all-gather" in line for line in collectives(gather.lower(x).compile().as_text()))


# ---- batch and heads


FAST = ("causal", "shared bias", "dropout", "lengths", "functions")
EACH_KIND = [pytest.param(kind, marks=[] if kind in FAST else slow) for kind in KINDS]


@pytest.mark.parametrize("where", [pytest.param("batch", marks=slow), "batch and heads"])
@EACH_MESH
@pytest.mark.parametrize("kind", EACH_KIND)
def test_batch_and_heads(kind, axis_type, is_set, where):
    """Forward and gradient: the numbers of one device, nothing sent, results where their operands are."""
    run, args, _ = program(kind, axis_type, is_set, where)
    results = run(*args)
    assert_near(results, expected(kind))
    assert_sharded_as(results, args)
    assert_silent(run.as_text(), kind)


@EACH_MESH
@pytest.mark.parametrize(
    "kind", ["causal", *(pytest.param(k, marks=slow) for k in ("segments", "lengths", "dropout"))]
)
def test_second_order(kind, axis_type, is_set):
    run, args, _ = program(kind, axis_type, is_set, "batch and heads", of=second_order)
    results = run(*args)
    assert_near(results, expected(kind, of=second_order), 2e-5)
    share = lambda x: [
        a / b for a, b in zip(x.shape[:3], x.sharding.shard_shape(x.shape)[:3], strict=True)
    ]
    assert [*map(share, results)] == [*map(share, args[:3])] * 2
    assert_silent(run.as_text(), kind)


@EACH_MESH
@pytest.mark.parametrize(
    "kind", ["causal", pytest.param("shared bias", marks=slow), pytest.param("lengths", marks=slow)]
)
def test_second_order_in_shard_map(kind, axis_type, is_set):
    where = "batch" if kind == "shared bias" else "batch and heads"
    axes, spec = MESHES[where]
    static, extra = KINDS[kind]
    of, rows = functools.partial(second_order, static), P(*spec[:3])
    specs = (spec, spec, spec, spec, rows, specs_of(extra, spec[0]))
    mesh, given = mesh_of(axis_type, **axes), (*arrays(), extra)
    run, args = shard_mapped(of, mesh, is_set, specs, (spec,) * 6, given, check_vma=True)
    assert not collectives(run.as_text())
    assert_near(run(*args), expected(kind, of=second_order), 2e-5)


@EACH_MESH
def test_heads_alone(axis_type, is_set):
    run, args, _ = program("causal", axis_type, is_set, "heads")
    results = run(*args)
    assert_near(results, expected("causal"))
    assert_sharded_as(results, args)
    assert_silent(run.as_text(), "causal")


@EACH_MESH
def test_grouped_heads(axis_type, is_set):
    """Key heads sharded as query heads: each device has whole groups."""
    run, args, _ = program("causal", axis_type, is_set, "batch and heads", K=4)
    results = run(*args)
    assert_near(results, expected("causal", 4))
    assert_sharded_as(results, args)
    assert_silent(run.as_text(), "causal")


@EACH_MESH
def test_one_key_head_for_sharded_query_heads(axis_type, is_set):
    """Keys and values on every device: only the sum of their gradients is sent."""
    run, args, _ = program("causal", axis_type, is_set, "batch and heads", K=1, spec_kv=BATCH)
    results = run(*args)
    assert_near(results, expected("causal", 1))
    assert_sharded_as(results, args)
    talk = collectives(run.as_text())
    assert talk and all("all-reduce" in line for line in talk), "\n".join(talk)


def test_key_heads_that_do_not_divide_are_refused_on_an_explicit_mesh():
    q, k, v, _, _ = arrays(K=2)
    mesh = mesh_of(AxisType.Explicit, x=2, y=4)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    words = (
        "query heads are sharded over 4 devices of an Explicit mesh and key has 2 heads.*shard_map"
    )
    for is_set in (True, False):
        with mesh_context(mesh, is_set), pytest.raises(ValueError, match=words):
            dot_product_attention(place(q, BOTH), place(k, BATCH), place(v, BATCH))


def shard_mapped(function, mesh, is_set, in_specs, out_specs, args, **kwargs):
    """Compiled, with its arguments in place, and these."""
    is_spec = lambda x: isinstance(x, P)
    place = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))
    args = jax.tree.map(place, in_specs, args, is_leaf=is_spec)
    with mesh_context(mesh, is_set):
        run = jax.jit(
            jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **kwargs)
        )
        return run.lower(*args).compile(), args


# slopes of all heads: refused
@pytest.mark.parametrize("kind", [x for x in EACH_KIND if x.values != ("functions",)])
@EACH_MESH
def test_shard_map(kind, axis_type, is_set):
    """With its checks on; each device runs its own call, so nothing at all is sent, not even the bounds."""
    of_all_heads = kind in ("shared bias", "dropout", "sinks")  # and cannot be cut
    where = "batch" if of_all_heads else "batch and heads"
    axes, spec = MESHES[where]
    static, extra = KINDS[kind]
    rows = P(*spec[:3])
    run, args = shard_mapped(
        functools.partial(both_ways, static),
        mesh_of(axis_type, **axes),
        is_set,
        (spec, spec, spec, spec, rows, specs_of(extra, spec[0])),
        (spec, rows, spec, spec, spec),
        (*arrays(), extra),
        check_vma=True,
    )
    results = run(*args)
    assert not collectives(run.as_text())
    wanted = expected(kind)
    if kind == "dropout":  # by coordinates within the device: there, the batch entry is the first
        wanted, results = ([np.asarray(x)[:1] for x in of] for of in (wanted, results))
    assert_near(results, wanted)


@EACH_MESH
def test_shard_map_sums_gradients_of_what_is_shared(axis_type, is_set):
    """Keys, values, bias, scale and soft cap on every device: their gradients are the sums over devices."""
    q, k, v, dout, _ = arrays(K=1)
    bias, scale, cap = KINDS["shared bias"][1]["bias"][:1], np.float32(0.3), np.float32(1.5)

    def grads(q, k, v, bias, scale, cap, dout):
        call = lambda q, k, v, bias, scale, cap: dot_product_attention(
            q, k, v, bias, scale=scale, logits_soft_cap=cap, is_causal=True, chunk_size=CHUNK
        )
        return jax.vjp(call, q, k, v, bias, scale, cap)[1](dout)

    args = (q, k[:1], v[:1], bias, scale, cap, dout)
    tiled = lambda q, k, v, *rest: grads(q, jnp.repeat(k, B, 0), jnp.repeat(v, B, 0), *rest)
    alone = lambda q, k, v, *rest: grads(
        q, jnp.repeat(k, B // 4, 0), jnp.repeat(v, B // 4, 0), *rest
    )
    wanted = list(jax.jit(tiled)(*args))
    wanted[1:3] = [x.sum(0, keepdims=True) for x in wanted[1:3]]
    one = (P(), P(), P(), P(), P())
    sums = lambda *args: [
        x.sum(0, keepdims=True) if i in (1, 2) else x for i, x in enumerate(alone(*args))
    ]
    mesh = mesh_of(axis_type, x=4, y=2)
    run, args = shard_mapped(
        sums, mesh, is_set, (BOTH, *one, BOTH), [BOTH, *one], args, check_vma=True
    )
    assert_near(run(*args), [np.asarray(x) for x in wanted], 1e-5)
    assert all("all-reduce" in line for line in collectives(run.as_text()))


def test_shard_map_without_check():
    axes, spec = MESHES["batch"]
    run = jax.shard_map(
        lambda q, k, v: dot_product_attention(q, k, v, is_causal=True, chunk_size=CHUNK),
        mesh=mesh_of(AxisType.Auto, **axes),
        in_specs=(spec, spec, spec),
        out_specs=spec,
        check_vma=False,
    )
    assert_near([jax.jit(run)(*arrays()[:3])], expected("causal")[:1])


SIZED = ("causal", "segments", "shared bias", "dropout", "lengths")


@pytest.mark.parametrize("direction", [pytest.param("forward", marks=slow), "gradient"])
@EACH_MESH
@pytest.mark.parametrize(
    "kind", [k if k in ("causal", "dropout") else pytest.param(k, marks=slow) for k in SIZED]
)
def test_memory_per_device_is_an_eighth(kind, axis_type, is_set, direction):
    T = 4096
    static, extra = KINDS[kind]
    shape = {"bias": (8, 1, T), "dropout_rng": (2,), "key_value_seq_lengths": (8,)}
    extra = {n: jax.ShapeDtypeStruct(shape.get(n, (8, T)), x.dtype) for n, x in extra.items()}
    x = jax.ShapeDtypeStruct((8, T, 8, 16), f32)

    def run(x, extra):
        call = lambda x: dot_product_attention(x, x, x, **static, **extra)
        out, pull = jax.vjp(call, x)
        return pull(out)[0] if direction == "gradient" else out

    def temp(mesh):
        place = lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        )
        on_mesh = {
            n: place(y, s)
            for (n, y), s in zip(extra.items(), specs_of(extra, "x").values(), strict=True)
        }
        with mesh_context(mesh, is_set):
            program = jax.jit(run).lower(place(x, P("x", None, "y", None)), on_mesh).compile()
        return program.memory_analysis().temp_size_in_bytes

    one = jax.sharding.Mesh(
        np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"), axis_types=(axis_type,) * 2
    )
    whole, each = temp(one), temp(mesh_of(axis_type, x=4, y=2))
    assert each <= whole / 8 * 1.25 + 2**20, (
        f"one device {whole / 2**20:.1f} MiB, each of eight {each / 2**20:.1f} MiB"
    )


def test_sharded_calls_compile_for_their_mesh_and_again_for_another():
    """The program is not taken from a cache that forgets the placement."""
    for where in ("batch", "batch and heads", "batch"):
        axes, spec = MESHES[where]
        mesh = mesh_of(AxisType.Auto, **axes)
        q, k, v = (jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays()[:3])
        out = dot_product_attention(q, k, v, is_causal=True, chunk_size=CHUNK)
        assert out.sharding.is_equivalent_to(q.sharding, 4)
        assert_near([out], expected("causal")[:1])


# ---- a mesh as jax.make_mesh gives it, which only arrays know


def _put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_mesh_that_is_not_set(implementation):
    """The smallest example, as most would write it: eager and jitted, forward and gradient."""
    mesh = jax.make_mesh((4,), ("data",))
    args = tuple(_put(mesh, x, "data") for x in arrays())
    run = functools.partial(
        both_ways, dict(is_causal=True, implementation=implementation), extra={}
    )
    for call in (run, jax.jit(run)):
        results = call(*args)
        assert_near(results, expected("causal"))
        assert_sharded_as(results, args)


def _typed(of, *args) -> list[tuple]:
    """Specs of the results' types, known without a compilation."""
    spec = lambda x: tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec))
    return [spec(x) for x in jax.tree.leaves(jax.eval_shape(of, *args))]


def _on_explicit_mesh(kind):
    """Arguments of `both_ways` over batch and heads."""
    axes, spec = MESHES["batch and heads"]
    mesh, extra = mesh_of(EXPLICIT, **axes), KINDS[kind][1]
    args = (_put(mesh, x, *spec[: x.ndim]) for x in arrays())
    return mesh, (*args, {n: _put(mesh, x, *specs_of(extra, spec[0])[n]) for n, x in extra.items()})


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_every_kind_has_types_on_a_mesh_that_is_not_set(implementation):
    """Traced, not compiled: out and lse are typed as the query is, gradients as what they belong to."""
    for kind, (static, _) in KINDS.items():
        _, args = _on_explicit_mesh(kind)
        found = _typed(
            functools.partial(both_ways, {**static, "implementation": implementation}), *args
        )
        assert found == [tuple(BOTH), tuple(BOTH)[:3], *[tuple(BOTH)] * 3], kind


def _lse_alone(q, k, v):
    """Its gradient has no cotangent for out, nor any for value."""
    lse = lambda q, k: dot_product_attention(q, k, v, chunk_size=CHUNK, return_residual=True)[1]
    return jax.vjp(lse, q, k)[1](lse(q, k))


def _mixed_second(q, k, v):
    out = lambda q, k, v: dot_product_attention(q, k, v, chunk_size=CHUNK)
    to_value = lambda q: jax.vjp(functools.partial(out, q, k), v)[1](out(q, k, v))[0]
    return jax.vjp(to_value, q)[1](v)


def _statistics(q, k, v):
    call = lambda *args: tuple(memeff.attention_statistics(*args, is_causal=True, chunk_size=CHUNK))
    found, pull = jax.vjp(call, q, k, v)
    return *found, *pull(found)


def _key_mass(q, k, v):
    found, pull = jax.vjp(lambda q, k: memeff.key_mass(q, k, chunk_size=CHUNK), q, k)
    return found, *pull(found)


def _over_queries(q, k, v):
    call = jax.vmap(lambda q: dot_product_attention(q, k, v, is_causal=True, chunk_size=CHUNK))
    out, pull = jax.vjp(call, jnp.stack([q, 2 * q]))
    return out, pull(out)


def _arrays_without_a_mesh(q, k, v):
    rng = np.random.default_rng(2)
    bias, mask, sinks = (
        rng.standard_normal((N, 1, S)).astype(f32),
        rng.random((1, 1, T, S)) < 0.7,
        np.ones(N, f32),
    )
    call = lambda q, bias, sinks: dot_product_attention(
        q, k, v, bias, mask, sinks=sinks, chunk_size=CHUNK
    )
    out, pull = jax.vjp(call, q, jnp.asarray(bias), jnp.asarray(sinks))
    return out, *pull(out)


ROWS, FULL, EACH = tuple(BOTH)[:3], tuple(BOTH), (None, *BOTH)
OTHERS = {
    _lse_alone: [FULL, FULL],
    _mixed_second: [FULL],
    _statistics: [FULL, *[ROWS] * 4, *[FULL] * 3],
    _key_mass: [ROWS, FULL, FULL],
    _over_queries: [EACH, EACH],
}


def test_other_functions_have_types_on_a_mesh_that_is_not_set():
    _, args = _on_explicit_mesh("plain")
    for of, wanted in OTHERS.items():
        assert _typed(of, *args[:3]) == wanted, of.__name__


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("of", [*OTHERS, _arrays_without_a_mesh])
def test_other_functions_have_the_numbers_of_one_device(of, jit):
    _, args = _on_explicit_mesh("plain")
    wanted = jax.tree.map(np.asarray, jax.tree.leaves(jax.jit(of)(*arrays()[:3])))
    assert_near(jax.tree.leaves((jax.jit(of) if jit else of)(*args[:3])), wanted, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("of", [both_ways, second_order])
@pytest.mark.parametrize("kind", KINDS)
def test_eager_calls(kind, of):
    """Without jit around them, on a mesh that is not set."""
    _, args = _on_explicit_mesh(kind)
    results = of(KINDS[kind][0], *args)
    assert_near(results, expected(kind, of=of), 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_set", [True, False], ids=["set", "not set"])
@pytest.mark.parametrize(
    "axis_types", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)], ids=["Explicit, Auto", "Auto, Explicit"]
)
def test_mesh_of_both_types(axis_types, is_set):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=axis_types)
    args = tuple(_put(mesh, x, *BOTH[: x.ndim]) for x in arrays())
    with mesh_context(mesh, is_set):
        results = jax.jit(functools.partial(both_ways, dict(is_causal=True), extra={}))(*args)
    assert_near(results, expected("causal"))
    assert_sharded_as(results, args)


@pytest.mark.slow
def test_mesh_of_one_device():
    mesh = jax.make_mesh((1,), ("x",))
    args = tuple(_put(mesh, x, "x") for x in arrays())
    results = jax.jit(functools.partial(both_ways, dict(is_causal=True), extra={}))(*args)
    assert_near(results, expected("causal"))


@pytest.mark.slow
@pytest.mark.parametrize("is_set", [True, False], ids=["set", "not set"])
def test_audit(is_set):
    mesh, (q, k, v, *_) = _on_explicit_mesh("plain")
    with mesh_context(mesh, is_set):
        assert memeff.audit("xla", q, k, v, is_causal=True, samples=4).ok


def test_modules_and_switches_on_a_mesh_that_is_not_set():
    linen, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
    from memeff import nn

    mesh = jax.make_mesh((4,), ("data",))
    whole = np.random.default_rng(0).standard_normal((4, 9, 8)).astype(f32)
    x = _put(mesh, whole, "data")

    def nnx_module(of):
        return of.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))

    def of_linen(module, switch=contextlib.nullcontext):
        params = jax.jit(module.init)(jax.random.key(0), whole)
        with switch():
            return [module.apply(params, y) for y in (x, whole)]

    switched = nnx_module(nnx)
    nn.switch_nnx(switched)
    own = nnx_module(nn.nnx)
    heads = lambda y: y.reshape(4, 9, 2, 4)
    with nn.switch_jax_nn() as calls:
        by_switch = [jax.nn.dot_product_attention(*[heads(y)] * 3) for y in (x, whole)]
    assert len(calls) == 2
    results = {
        "linen": of_linen(nn.linen.MultiHeadDotProductAttention(num_heads=2)),
        "switch_linen": of_linen(linen.MultiHeadDotProductAttention(num_heads=2), nn.switch_linen),
        "nnx": [own(y) for y in (x, whole)],
        "switch_nnx": [switched(y) for y in (x, whole)],
        "switch_jax_nn": by_switch,
    }
    for name, (found, wanted) in results.items():
        assert found.sharding.spec[0] == "data", name
        assert_near([found], [np.asarray(wanted)])


# ---- the sequence sharded

ALONG_SEQUENCE = P(None, "x", None, None)


def _sequence_sharded(axis_type, which):
    mesh = mesh_of(axis_type, x=8)
    rng = np.random.default_rng(0)
    draw = lambda: rng.standard_normal((1, 64, 2, 16)).astype(f32)
    spec = lambda name: ALONG_SEQUENCE if which in (name, "all") else P()
    names = ("query", "key and value", "key and value")
    return mesh, tuple(jax.device_put(draw(), NamedSharding(mesh, spec(name))) for name in names)


def _causal(q, k, v):
    return dot_product_attention(q, k, v, is_causal=True, chunk_size=16)


@pytest.mark.parametrize(
    "axis_type, jit",
    [(AxisType.Auto, False), (AxisType.Explicit, False), (AxisType.Explicit, True)],
)
@pytest.mark.parametrize("which", ["query", "key and value", "all"])
def test_sequence_sharded_is_refused_where_the_layout_is_known(which, axis_type, jit):
    """On an Explicit mesh while tracing, else from concrete arrays."""
    mesh, args = _sequence_sharded(axis_type, which)
    words = r"(query|key) is sharded along the sequence .*Shard batch"
    for is_set in (True, False):
        with mesh_context(mesh, is_set), pytest.raises(NotImplementedError, match=words):
            (jax.jit(_causal) if jit else _causal)(*args)


@pytest.mark.parametrize("which", ["query", "key and value", "all"])
def test_sequence_sharded_under_jit_on_an_auto_mesh_is_gathered_and_right(which):
    """The layout is not known while tracing there: XLA gathers, as the README says; the numbers are right."""
    mesh, args = _sequence_sharded(AxisType.Auto, which)
    for is_set in (True, False):
        with mesh_context(mesh, is_set):
            out = jax.jit(_causal)(*args)
        assert_near([out], [np.asarray(_causal(*map(np.asarray, args)))])
