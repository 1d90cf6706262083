"""Check that programs which jax.export writes as bytes compute the same when they are read."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, split
from conftest import few
from jax import export
from small_calls import assert_same, f32, inputs

import memeff
from memeff import dot_product_attention, tile_sizes
from memeff.device import pretend_device

slow = pytest.mark.slow


def _exported(function, *args):
    """Return the function, with its gradient, after a round trip through bytes."""
    exported = export.export(jax.jit(function))(*args)
    return export.deserialize(exported.serialize(vjp_order=1))


@pytest.mark.parametrize(
    "name",
    few(["causal", "key_lengths", "bias_row", "dropout_each"], ["bias_row", "dropout_each"]),
)
def test_export(name):
    """A program and its gradient survive a round trip through bytes."""
    args, kwargs = CASES[name].inputs(f32)
    static, arrays = split(kwargs)
    float_names = [n for n in ("bias", "logits_soft_cap") if n in arrays]
    floats = {n: arrays.pop(n) for n in float_names}

    def call(args, floats, arrays):
        return dot_product_attention(*args, **floats, **arrays, **static)

    exported = _exported(call, args, floats, arrays)

    def value_and_gradient(f, args, floats):
        def loss(args, floats):
            return (f(args, floats, arrays) ** 2).sum()

        return f(args, floats, arrays), jax.grad(loss, (0, 1))(args, floats)

    def both(args, floats):
        actual = value_and_gradient(exported.call, args, floats)
        return actual, value_and_gradient(call, args, floats)

    (out, grads), (expected_out, expected_grads) = jax.jit(both)(args, floats)
    assert_same(out, expected_out, 5e-7)
    assert_same(grads, expected_grads, 1e-5)


@pytest.mark.once
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(is_causal=True, chunk_size=8),
        pytest.param({}, marks=slow),
        pytest.param(dict(local_window_size=(3, 2)), marks=slow),
    ],
    ids=str,
)
def test_export_with_symbolic_lengths(kwargs):
    """Export once, then call at lengths below and above a tile, with the gradient.

    The longer queries are whole tiles, and the longer keys are not.
    """
    b, t, s = export.symbolic_shape("b, t, s")
    query = jax.ShapeDtypeStruct((b, t, 4, 3), f32)
    key = jax.ShapeDtypeStruct((b, s, 2, 3), f32)
    value = jax.ShapeDtypeStruct((b, s, 2, 5), f32)
    call = functools.partial(dot_product_attention, **kwargs)
    exported = _exported(call, query, key, value)

    def value_and_gradient(f, *args):
        def loss(*args):
            return (f(*args) ** 2).sum()

        return f(*args), jax.grad(loss, (0, 1, 2))(*args)

    @jax.jit
    def both(*args):
        return value_and_gradient(exported.call, *args), value_and_gradient(call, *args)

    for B, T, S in ((3, 1, 5), (2, 600, 523)):
        (out, grads), (expected_out, expected_grads) = both(*inputs(B, T, S))
        assert_same(out, expected_out)
        assert_same(grads, expected_grads, 1e-5)


def _assert_exported_is_same(exported, call, *args):
    """Compare the exported program with the call, both in one program."""

    @jax.jit
    def both(*args):
        return exported.call(*args), call(*args)

    actual, expected = both(*args)
    assert_same(actual, expected)


def test_export_symbolic_batch_of_lengths():
    b, t = export.symbolic_shape("b, t")
    x = jax.ShapeDtypeStruct((b, t, 2, 3), f32)
    lengths = jax.ShapeDtypeStruct((b,), np.int32)

    def call(x, n):
        return dot_product_attention(
            x, x, x, key_value_seq_lengths=n, query_seq_lengths=n, is_causal=True
        )

    exported = _exported(call, x, lengths)
    x, _, _ = inputs(2, 13, K=2, G=1)
    _assert_exported_is_same(exported, call, x, jnp.arange(3, 5, dtype=jnp.int32))


def _attend_to_itself(x, **kwargs):
    return dot_product_attention(x, x, x, **kwargs)


@pytest.mark.parametrize("sizes", few(["b", "b, 4", "4, b"], ["b, 4"]))
def test_export_vmap_over_a_symbolic_axis(monkeypatch, sizes):
    """Calls along an axis of unknown length run all at the same time."""
    monkeypatch.setattr(tile_sizes, "CPU_LOGITS", 1)
    mapped_dims = export.symbolic_shape(sizes)
    call = functools.partial(_attend_to_itself, is_causal=True)
    for _ in mapped_dims:
        call = jax.vmap(call)
    exported = _exported(call, jax.ShapeDtypeStruct((*mapped_dims, 5, 2, 3), f32))
    x, _, _ = inputs(leads=(4,) * len(mapped_dims), T=5, K=2, G=1)
    _assert_exported_is_same(exported, call, x)


# ---- calls that need lengths


def _dropout(x):
    return _attend_to_itself(x, dropout_rate=0.5, dropout_rng=jax.random.key(0))


def _statistics(x):
    return memeff.attention_statistics(x, x, x)


def _key_mass(x):
    return memeff.key_mass(x, x)


def _jvp(x):
    return jax.jvp(_attend_to_itself, (x,), (x,))


def _squares(x):
    return (_attend_to_itself(x) ** 2).sum()


def _second_derivative(x):
    def sum_of_gradient(x):
        return jax.grad(_squares)(x).sum()

    return jax.grad(sum_of_gradient)(x)


NEED_LENGTHS = {
    "Dropout": _dropout,
    "memeff.attention_statistics": _statistics,
    "key_mass": _key_mass,
    "a jvp": _jvp,
    "a second derivative": _second_derivative,
}


@pytest.mark.parametrize("what", NEED_LENGTHS)
def test_symbolic_lengths_are_refused_in_words(what):
    (t,) = export.symbolic_shape("t")
    x = jax.ShapeDtypeStruct((2, t, 2, 4), f32)
    refusal = rf"(?s){what}.* does not support sizes that jax.export leaves"
    with pytest.raises(NotImplementedError, match=refusal):
        export.export(jax.jit(NEED_LENGTHS[what]))(x)


@pytest.mark.parametrize("sizes", ["b, 8, 2, 4", "2, t, 2, 4", "2, 8, n, 4"])
def test_symbolic_sizes_of_a_sharded_sequence_are_refused_in_words(sizes):
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    attend = functools.partial(_attend_to_itself, sequence_axis="seq")
    x = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), f32)
    refusal = "sharded over devices does not support sizes that jax.export leaves"
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=refusal):
        export.export(jax.jit(attend))(x)


@pytest.mark.parametrize(
    "what",
    few(NEED_LENGTHS, ("Dropout", "memeff.attention_statistics", "a jvp")),
)
def test_a_symbolic_batch_is_supported(what):
    (b,) = export.symbolic_shape("b")

    call = NEED_LENGTHS[what]
    exported = _exported(call, jax.ShapeDtypeStruct((b, 6, 2, 4), f32))
    x = np.random.default_rng(0).uniform(-1, 1, (3, 6, 2, 4)).astype(f32)
    _assert_exported_is_same(exported, call, x)


@pytest.mark.parametrize("device", [("cpu",), ("gpu", "8.0"), ("gpu", "9.0")], ids=str)
@pytest.mark.filterwarnings("ignore:memeff. using the chunked path")
def test_a_symbolic_head_size_of_values_is_supported(device):
    (d,) = export.symbolic_shape("d")
    x, v = (jax.ShapeDtypeStruct((1, 128, 4, size), jnp.bfloat16) for size in (64, d))
    with pretend_device(*device):
        exported = export.export(jax.jit(dot_product_attention), platforms=["cpu"])(x, x, v)
    exported = export.deserialize(exported.serialize(vjp_order=1))
    x, v = np.random.default_rng(0).uniform(-1, 1, (2, 1, 128, 4, 64)).astype(jnp.bfloat16)
    out, pull = jax.vjp(exported.call, x, x, v[..., :3])
    expected_out, expected_pull = jax.vjp(dot_product_attention, x, x, v[..., :3])
    assert_same((out, pull(out)), (expected_out, expected_pull(out)), 2e-2)


def test_a_symbolic_head_size_needs_a_scale():
    (h,) = export.symbolic_shape("h")
    x = jax.ShapeDtypeStruct((2, 6, 2, h), f32)
    with pytest.raises(NotImplementedError, match=r"scale is by default .*H=h.*\. Pass scale=\."):
        export.export(jax.jit(dot_product_attention))(x, x, x)


def test_a_plan_of_symbolic_sizes_is_refused_in_words():
    (b,) = export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((b, 6, 2, 4), f32)
    with pytest.raises(NotImplementedError, match="memeff.plan does not support sizes"):
        memeff.plan(x, x, x)


# ---- caches


def _cache(kind, dtype):
    if kind == "pages":
        cache = memeff.PagedKVCache.zeros(6, 4, 2, 4, dtype, batch=2, pages_per_sequence=2)
        return cache.with_sequences([[0, 1], [2, 3]], [0, 0])
    return memeff.KVCache.zeros(2, 8, 2, 4, dtype, window=3 if kind == "ring" else None)


def _step(cache, x):
    cache = cache.append(x, x).truncate(2)
    cache = cache.keep_drafts(2, jnp.ones((x.shape[0], 1), jnp.int32), 1)
    if isinstance(cache, memeff.PagedKVCache):
        cache = cache.copy_pages(jnp.array([0]), jnp.array([4]))
        cache = cache.with_sequences(cache.page_table, cache.lengths)
    return cache.attend(x[:, :1]), cache


def _symbolic(cache, **sizes):
    """Return the types of a cache whose fields have other sizes at the given dims."""

    def of_field(path, x):
        shape = list(x.shape)
        for dim, size in sizes.get(path[0].name, {}).items():
            shape[dim] = size
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree_util.tree_map_with_path(of_field, cache)


@pytest.mark.parametrize(
    "kind, dtype",
    few(
        itertools.product(["plain", "ring", "pages"], [f32, jnp.int8]),
        [("plain", jnp.int8), ("ring", f32), ("pages", jnp.int8)],
    ),
)
def test_caches_with_a_symbolic_batch(kind, dtype):
    """A program that is read from bytes takes and returns caches."""
    b, pages = export.symbolic_shape("b, pages")
    cache = _cache(kind, dtype)
    names = ["page_table", "lengths"]
    if kind != "pages":
        names = ["key", "value", "lengths", "key_scale", "value_scale", "most_read"]
    sizes = {name: {0: b} for name in names}
    for name in ("key_pages", "value_pages", "key_scales", "value_scales"):
        sizes[name] = {0: pages}
    x = jax.ShapeDtypeStruct((b, 2, 2, 4), f32)
    exported = export.export(jax.jit(_step))(_symbolic(cache, **sizes), x)
    exported = export.deserialize(exported.serialize())
    x = np.random.default_rng(0).standard_normal((2, 2, 2, 4)).astype(f32)
    assert_same(exported.call(cache, x), jax.jit(_step)(cache, x))


@pytest.mark.parametrize(
    "kind, dtype, names, dim, refusal",
    [
        ("ring", f32, ("key", "value"), 1, "A ring does not support sizes"),
        ("plain", jnp.int8, ("key", "value"), 1, "in pages or in 8 bits does not support"),
        ("pages", f32, ("page_table",), 1, "in pages or in 8 bits does not support"),
        (
            "pages",
            f32,
            ("key_pages", "value_pages"),
            1,
            r"key_pages does not support sizes .* \(page=n\)",
        ),
    ],
)
def test_symbolic_capacities_are_refused_in_words(kind, dtype, names, dim, refusal):
    (n,) = export.symbolic_shape("n")
    sizes = {name: {dim: n} for name in names}
    if dtype == jnp.int8:
        sizes |= {"key_scale": {2: n}, "value_scale": {2: n}}
    cache = _symbolic(_cache(kind, dtype), **sizes)
    with pytest.raises(NotImplementedError, match=refusal):
        export.export(jax.jit(_step))(cache, jax.ShapeDtypeStruct((2, 2, 2, 4), f32))


def test_a_ring_refuses_a_symbolic_number_of_tokens():
    (t,) = export.symbolic_shape("t")
    cache = _cache("ring", f32)
    with pytest.raises(NotImplementedError, match="A ring does not support sizes .*T=t"):
        export.export(jax.jit(cache.append))(*[jax.ShapeDtypeStruct((2, t, 2, 4), f32)] * 2)
