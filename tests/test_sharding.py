"""Calls whose batch and heads are sharded over eight CPU devices (see conftest.py).

They give the same numbers without a word between devices, and take an eighth of the memory each. A
sharded sequence is refused, or gathered. test_shard_map.py and test_unset_mesh.py have more.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import (
    BATCH,
    BOTH,
    CHUNK,
    EACH_MESH,
    FAST_KINDS,
    KINDS,
    MESHES,
    arrays,
    assert_near,
    assert_sharded_as,
    assert_silent,
    collectives,
    devices_by_dim,
    each_mesh_and_kind,
    expected,
    f32,
    mesh_context,
    mesh_of,
    program,
    put,
    second_order,
    slow,
    specs_of,
)
from small_calls import assert_close, temp_bytes

from memeff import (
    attention_statistics,
    dot_product_attention,
    explain,
    key_mass,
    masks,
    plan,
    to_zigzag,
)

pytestmark = pytest.mark.eight_devices


# ---- the ruler


def test_collectives_are_found():
    mesh = mesh_of(AxisType.Auto, x=8)
    replicated = NamedSharding(mesh, P())

    def two_sums(x):
        return x.sum(0), (x * 2).sum(0)

    def add_one(x):
        return x + 1

    def lines(function):
        program = jax.jit(function, out_shardings=replicated).lower(x).compile()
        return collectives(program.as_text())

    x = jax.ShapeDtypeStruct((8, 16), f32, sharding=NamedSharding(mesh, P("x")))
    assert any("all-reduce" in line for line in lines(two_sums))
    assert any("all-gather" in line for line in lines(add_one))


# ---- batch and heads


@pytest.mark.parametrize("where", [pytest.param("batch", marks=slow), "batch and heads"])
@each_mesh_and_kind(
    KINDS,
    [*(("Auto, set", x) for x in FAST_KINDS), ("Explicit", "functions"), ("Explicit", "lengths")],
)
def test_batch_and_heads(kind, axis_type, is_set, where):
    """Forward and gradient have the numbers of one device, and nothing is sent.

    Each result is sharded as its operand.
    """
    run, args = program(kind, axis_type, is_set, where)
    results = run(*args)
    assert_near(results, expected(kind))
    assert_sharded_as(results, args)
    assert_silent(run.as_text(), kind)


@slow
@EACH_MESH
@pytest.mark.parametrize("kind", ["causal", "segments", "lengths", "dropout"])
def test_second_order(kind, axis_type, is_set):
    run, args = program(kind, axis_type, is_set, "batch and heads", function=second_order)
    results = run(*args)
    assert_near(results, expected(kind, function=second_order), 2e-5)
    assert [*map(devices_by_dim, results)] == [*map(devices_by_dim, args[:3])] * 2
    assert_silent(run.as_text(), kind)


@each_mesh_and_kind(["causal"], [("Explicit", "causal")])
def test_heads_alone(axis_type, is_set, kind):
    run, args = program(kind, axis_type, is_set, "heads")
    results = run(*args)
    assert_near(results, expected("causal"))
    assert_sharded_as(results, args)
    assert_silent(run.as_text(), "causal")


@each_mesh_and_kind(["causal"], [("Auto, set", "causal")])
def test_grouped_heads(axis_type, is_set, kind):
    """Key heads are sharded as query heads: each device has whole groups."""
    run, args = program(kind, axis_type, is_set, "batch and heads", K=4)
    results = run(*args)
    assert_near(results, expected("causal", 4))
    assert_sharded_as(results, args)
    assert_silent(run.as_text(), "causal")


@pytest.mark.parametrize(
    "leads, key_heads, group",
    [
        pytest.param((2,), 1, 1, marks=slow),
        ((2,), 1, 2),
        ((1, 2), 2, 1),
        pytest.param((2, 1), 1, 2, marks=slow),
    ],
)
def test_axes_of_one_device(leads, key_heads, group):
    """A mesh on which an axis has one device runs the same program, and results keep their types.

    A reshape of a dim of size 1 would lose or move the axis.
    """
    mesh = mesh_of(AxisType.Explicit, x=leads[0], y=1)
    spec = P("x", *[None] * (len(leads) - 1), None, "y", None)
    numbers = np.random.default_rng(0)
    q, k = (
        numbers.normal(size=(*leads, 6, heads, 4)).astype(f32)
        for heads in (key_heads * group, key_heads)
    )

    def call(q, k):
        bias = np.ones((key_heads * group, 6, 6), f32)
        options = dict(bias=bias, mask_fn=masks.causal(), chunk_size=4)
        results = dot_product_attention(q, k, k, return_residual=True, **options)
        return results, attention_statistics(q, k, k, **options)

    def call_and_gradient(q, k):
        results, pull = jax.vjp(call, q, k)
        return results, pull(jax.tree.map(jnp.ones_like, results))

    expected = jax.jit(call_and_gradient)(q, k)
    for is_set in (True, False):
        with mesh_context(mesh, is_set):
            args = jax.device_put((q, k), NamedSharding(mesh, spec))
            results = jax.jit(call_and_gradient)(*args)
        assert_close(results, expected, rtol=2e-5, atol=2e-5)
        for x in jax.tree.leaves(results):
            assert jax.typeof(x).sharding.spec == P(*spec[: x.ndim])


LEADING = [  # specs, and keywords of the call
    (P(None, "x", None, None, None), {}),
    (P("x", "idle", "seq", None, None), dict(batch_axis=("x", "idle"))),
    (P("x", "y", None, None, None), {}),
    (P("idle", "y", None, None, None), {}),
    (P(None, "x", "seq", None, None), {}),
]


@pytest.mark.parametrize("places", [LEADING[:2], pytest.param(LEADING[2:], marks=slow)])
def test_several_leading_dims_that_an_explicit_mesh_shards(places):
    """Also behind a dim that is whole, or with axes of one device, and beside a sequence.

    Results and gradients have the types of their operands.
    """
    mesh = mesh_of(AxisType.Explicit, x=2, y=2, seq=2, idle=1)
    numbers = np.random.default_rng(0)
    q = numbers.normal(size=(4, 2, 8, 2, 3)).astype(f32)
    bias = numbers.normal(size=(4, 2, 1, 1, 8)).astype(f32)
    lengths = numbers.integers(3, 9, (4, 2))

    def mask(batch, head, q_pos, k_pos, params):
        return (batch + k_pos) % 3 != 0

    def call_and_gradient(how, q, bias, lengths):
        def call(q, bias):
            options = dict(mask_fn=mask, query_seq_lengths=lengths, return_residual=True)
            return dot_product_attention(q, q, q, bias, **options, **how)

        results, pull = jax.vjp(call, q, bias)
        return results, *pull(jax.tree.map(jnp.tanh, results))

    def of_all_places(arguments):
        pairs = zip(places, arguments, strict=True)
        return [call_and_gradient(how, *args) for (_, how), args in pairs]

    expected = jax.jit(functools.partial(call_and_gradient, {}))(q, bias, lengths)
    arguments = []
    for spec, _ in places:
        leads = P(*spec[:2])
        arguments.append((put(mesh, q, spec), put(mesh, bias, leads), put(mesh, lengths, leads)))
    with jax.set_mesh(mesh):
        found = jax.jit(of_all_places)(arguments)
    for (spec, _), results in zip(places, found, strict=True):
        assert_close(results, expected, rtol=2e-5, atol=2e-5)
        (out, lse), dq, _ = results
        for x in (out, lse, dq):
            assert jax.typeof(x).sharding.spec == P(*spec[: x.ndim])


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_a_last_dim_that_an_explicit_mesh_shards_is_refused(name):
    mesh = mesh_of(AxisType.Explicit, x=2)
    operands = {n: jnp.ones((1, 4, 2, 4)) for n in ("query", "key", "value")}
    operands[name] = put(mesh, operands[name], P(None, None, None, "x"))
    words = f"{name} is sharded along its last dim over 2 devices of an Explicit mesh. Shard batch"
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=words):
        dot_product_attention(**operands)


@pytest.mark.parametrize("spec", [P("x", "y", None, None), P("x", None, None, "y")])
def test_functions_beside_attention_take_axes_of_one_device(spec):
    """Such an axis shards no sequence, and no heads' dims, and results keep it."""
    mesh = mesh_of(AxisType.Explicit, x=2, y=1)
    x = np.random.default_rng(0).normal(size=(2, 8, 2, 4)).astype(f32)

    def call(x):
        return attention_statistics(x, x, x), key_mass(x, x), to_zigzag(x, 2)

    expected = jax.jit(call)(x)
    with mesh_context(mesh, True):
        results = jax.jit(call)(jax.device_put(x, NamedSharding(mesh, spec)))
    assert_close(results, expected, rtol=2e-5, atol=2e-5)
    for result in jax.tree.leaves(results):
        assert jax.typeof(result).sharding.spec[:3] == spec[:3]
    assert jax.typeof(results[-1]).sharding.spec == spec


def test_positions_beside_a_function_need_not_be_sharded_as_the_batch():
    mesh = mesh_of(AxisType.Explicit, x=2, y=4)
    q = np.random.default_rng(0).normal(size=(2, 6, 4, 4)).astype(f32)

    def call(q, q_offset, lengths):
        return dot_product_attention(
            q,
            q,
            q,
            q_offset=q_offset,
            key_value_seq_lengths=lengths,
            mask_fn=masks.documents(np.arange(9) // 4),
            return_residual=True,
        )

    positions = np.array([0, 3]), np.array([6, 5])
    expected = jax.jit(call)(q, *positions)
    with mesh_context(mesh, True):
        q = jax.device_put(q, NamedSharding(mesh, P("x", None, "y")))
        results = jax.jit(call)(q, *positions)
    assert_close(results, expected, rtol=2e-5, atol=2e-5)
    for result in results:
        assert devices_by_dim(result)[:3] == devices_by_dim(q)[:3]


@EACH_MESH
def test_one_key_head_for_sharded_query_heads(axis_type, is_set):
    """Every device has keys and values, and only the sum of their gradients is sent."""
    run, args = program("causal", axis_type, is_set, "batch and heads", K=1, spec_kv=BATCH)
    results = run(*args)
    assert_near(results, expected("causal", 1))
    assert_sharded_as(results, args)
    lines = collectives(run.as_text())
    assert lines and all("all-reduce" in line for line in lines), "\n".join(lines)


def test_key_heads_that_do_not_divide_are_refused_on_an_explicit_mesh():
    q, k, v, _, _ = arrays(K=2)
    mesh = mesh_of(AxisType.Explicit, x=2, y=4)
    words = (
        "query heads are sharded over 4 devices of an Explicit mesh and key has 2 heads.*shard_map"
    )
    for is_set in (True, False):
        with mesh_context(mesh, is_set), pytest.raises(ValueError, match=words):
            dot_product_attention(put(mesh, q, BOTH), put(mesh, k, BATCH), put(mesh, v, BATCH))


SIZED = ("causal", "segments", "shared bias", "dropout", "lengths")


@pytest.mark.parametrize("direction", [pytest.param("forward", marks=slow), "gradient"])
@each_mesh_and_kind(SIZED, [("Auto, set", "causal"), ("Explicit", "dropout")])
def test_memory_per_device_is_an_eighth(kind, axis_type, is_set, direction):
    T = 4096
    static, drawn = KINDS[kind]
    shapes = {"bias": (8, 1, T), "dropout_rng": (2,), "key_value_seq_lengths": (8,)}
    extra = {}
    for name, array in drawn.items():
        extra[name] = jax.ShapeDtypeStruct(shapes.get(name, (8, T)), array.dtype)
    x = jax.ShapeDtypeStruct((8, T, 8, 16), f32)

    def run(x, extra):
        def call(x):
            return dot_product_attention(x, x, x, **static, **extra)

        out, pull = jax.vjp(call, x)
        return pull(out)[0] if direction == "gradient" else out

    def bytes_on(mesh):
        def shard(x, spec):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        specs = specs_of(extra, "x")
        sharded = {name: shard(array, specs[name]) for name, array in extra.items()}
        with mesh_context(mesh, is_set):
            return temp_bytes(run, (shard(x, BOTH), sharded))

    first = np.array(jax.devices()[:1]).reshape(1, 1)
    whole = bytes_on(Mesh(first, ("x", "y"), axis_types=(axis_type,) * 2))
    each = bytes_on(mesh_of(axis_type, x=4, y=2))
    assert each <= whole / 8 * 1.25 + 2**20, (
        f"one device {whole / 2**20:.1f} MiB, each of eight {each / 2**20:.1f} MiB"
    )


def test_sharded_calls_compile_for_their_mesh_and_again_for_another():
    """The program is not taken from a cache that forgets the placement."""
    for where in ("batch", "batch and heads", "batch"):
        axes, spec = MESHES[where]
        mesh = mesh_of(AxisType.Auto, **axes)
        q, k, v = (put(mesh, x, spec) for x in arrays()[:3])
        out = dot_product_attention(q, k, v, is_causal=True, chunk_size=CHUNK)
        assert out.sharding.is_equivalent_to(q.sharding, 4)
        assert_near([out], expected("causal")[:1])


# ---- the sequence sharded

ALONG_SEQUENCE = P(None, "x", None, None)


def sequence_sharded(axis_type, which):
    """Return a mesh, and query, key and value on it; those named `which` by their sequence."""
    mesh = mesh_of(axis_type, x=8)
    rng = np.random.default_rng(0)
    args = []
    for name in ("query", "key and value", "key and value"):
        x = rng.standard_normal((1, 64, 2, 16)).astype(f32)
        args.append(put(mesh, x, ALONG_SEQUENCE if which in (name, "all") else P()))
    return mesh, tuple(args)


def causal(q, k, v):
    return dot_product_attention(q, k, v, is_causal=True, chunk_size=16)


@pytest.mark.parametrize(
    "axis_type, jit",
    [(AxisType.Auto, False), (AxisType.Explicit, False), (AxisType.Explicit, True)],
)
@pytest.mark.parametrize("which", ["query", "key and value", "all"])
def test_sequence_sharded_needs_sequence_axis_where_the_query_does_not_tell(which, axis_type, jit):
    """The layout is known on an Explicit mesh while tracing, else from concrete arrays."""
    mesh, args = sequence_sharded(axis_type, which)
    if axis_type == AxisType.Explicit and which != "key and value":
        wanted = np.asarray(causal(*map(np.asarray, args)))
        assert_near([(jax.jit(causal) if jit else causal)(*args)], [wanted])
        return
    words = r"(query|key) is sharded along the sequence .*Pass sequence_axis, .*Or gather"
    call = jax.jit(causal) if jit else causal
    for is_set in (True, False):
        with mesh_context(mesh, is_set), pytest.raises(NotImplementedError, match=words):
            call(*args)
    for tell in () if jit else (explain, plan):  # they promise what the call does
        with pytest.raises(NotImplementedError, match=words):
            tell(*args, is_causal=True)


@pytest.mark.parametrize("which", ["query", "key and value", "all"])
def test_sequence_sharded_under_jit_on_an_auto_mesh_is_gathered_and_right(which):
    """The numbers are right, although the layout is not known while tracing there.

    XLA gathers, as the README says.
    """
    mesh, args = sequence_sharded(AxisType.Auto, which)
    wanted = np.asarray(causal(*map(np.asarray, args)))
    for is_set in (True, False):
        with mesh_context(mesh, is_set):
            out = jax.jit(causal)(*args)
        assert_near([out], [wanted])
