"""What JAX does to functions, done to attention: vmap, grad, jit, remat, scan, donation, export, debug and promotion flags.

Numbers themselves are measured elsewhere; here two ways to the same number are compared.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, SINGLES, split
from conftest import few
from jax import export
from jax.experimental import jet

import memeff
from memeff import dot_product_attention, tile_sizes

f32 = np.float32


def assert_same(actual, expected, eps=2e-6):
    """Two orders of the same sums, in float32."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape, f"{x.shape} is not {y.shape}"
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        worst = np.abs(x[finite] - y[finite]).max(initial=0)
        assert worst <= eps * max(1, np.abs(y[finite]).max(initial=0)), f"differ by {worst:.3g}"


def assert_bits(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def inputs(B=2, T=13, S=17, K=2, G=2, H=3, D=5, leads=None, dtype=f32):
    rng = np.random.default_rng(0)
    leads = (B,) if leads is None else leads
    shapes = (T, K * G, H), (S, K, H), (S, K, D)
    return tuple(jnp.asarray(rng.standard_normal((*leads, *shape)), dtype) for shape in shapes)


# ---- vmap

# Each argument as a stack of 3, for a call of B=2 T=13 S=17 N=4; floats get a gradient.
STACK = 3
_rng = np.random.default_rng(7)
FLOATS = {
    "query": _rng.standard_normal((STACK, 2, 13, 4, 3)).astype(f32),
    "key": _rng.standard_normal((STACK, 2, 17, 2, 3)).astype(f32),
    "value": _rng.standard_normal((STACK, 2, 17, 2, 5)).astype(f32),
    "bias": _rng.standard_normal((STACK, 4, 1, 17)).astype(f32),
    "scale": np.array([0.3, -0.7, 1.1], f32),
    "logits_soft_cap": np.array([1.5, 3.0, 0.7], f32),
}
OTHERS = {
    "mask": _rng.random((STACK, 2, 1, 13, 17)) < 0.7,
    "query_seq_lengths": np.array([[13, 4], [7, 12], [0, 13]], np.int32),
    "key_value_seq_lengths": np.array([[17, 4], [7, 16], [5, 0]], np.int32),
    "query_segment_ids": np.sort(_rng.integers(0, 3, (STACK, 2, 13)), -1).astype(np.int32),
    "key_value_segment_ids": np.sort(_rng.integers(0, 3, (STACK, 2, 17)), -1).astype(np.int32),
    "q_offset": np.array([[0, 4], [-3, 9], [5, 5]], np.int32),
    "dropout_rng": np.arange(6, dtype=np.uint32).reshape(STACK, 2),
}
STATIC = dict(
    is_causal=True,
    dropout_rate=0.3,
    broadcast_dropout=False,
    chunk_size=(4, 6),
    return_residual=True,
)
ARGUMENTS = FLOATS | OTHERS
PAIRS = [*itertools.combinations(ARGUMENTS, 2)]
SUBSETS = [
    {*ARGUMENTS},
    {*FLOATS},
    {*OTHERS},
    {"query", "bias"},
    {"key", "value", "mask"},
    {"bias"},
    {"q_offset"},
]
ALONE = [{name} for name in ARGUMENTS]


def everything(arrays):
    """out and lse of the call with all arguments at once."""
    rest = {n: x for n, x in arrays.items() if n not in ("query", "key", "value")}
    return dot_product_attention(arrays["query"], arrays["key"], arrays["value"], **rest, **STATIC)


def weighted(arrays):
    """A scalar with other weights for each entry of out and lse, so that no error cancels; what sees nothing counts as 0."""
    out, lse = everything(arrays)
    wave = lambda x: jnp.cos(jnp.arange(x.size, dtype=f32)).reshape(x.shape)
    return (out * wave(out)).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * wave(lse)).sum()


def gradients(arrays):
    others = {n: arrays[n] for n in OTHERS}
    return jax.grad(lambda floats: weighted(floats | others))({n: arrays[n] for n in FLOATS})


def _given(mapped, b):
    return {n: x[b if n in mapped else 1] for n, x in ARGUMENTS.items()}


@functools.cache
def _programs():
    return jax.jit(everything), jax.jit(gradients)


def _loop(function, mapped):
    each = [function(_given(mapped, b)) for b in range(STACK)]
    return jax.tree.map(lambda *x: np.stack(x), *each)


def _vmap(function, mapped):
    axes = {n: 0 if n in mapped else None for n in ARGUMENTS}
    arrays = {n: x if n in mapped else x[1] for n, x in ARGUMENTS.items()}
    return jax.jit(jax.vmap(function, in_axes=(axes,)))(arrays)


@pytest.mark.parametrize(
    "mapped",
    [*SUBSETS, *(pytest.param(names, marks=pytest.mark.slow) for names in ALONE)],
    ids=lambda names: ",".join(sorted(names)) if len(names) < 5 else str(len(names)),
)
def test_vmap_and_vmap_of_grad(mapped):
    """Each argument alone mapped, the others shared; all; and a few that belong together."""
    forward, grad = _programs()
    both = lambda arrays: (everything(arrays), gradients(arrays))
    values, grads = _vmap(both, mapped)
    assert_same(values, _loop(forward, mapped))
    assert_same(grads, _loop(grad, mapped), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", PAIRS, ids="+".join)
def test_vmap_over_pairs(mapped):
    test_vmap_and_vmap_of_grad({*mapped})


def test_grad_of_vmap_sums_what_is_shared():
    """Shared bias and scale get the sum of the gradients of the stack, mapped ones their own."""
    mapped = {"query", "key", "value", "mask"}
    axes = {n: 0 if n in mapped else None for n in ARGUMENTS}
    arrays = {n: x if n in mapped else x[1] for n, x in ARGUMENTS.items()}
    others = {n: arrays[n] for n in OTHERS}

    def loss(floats):
        return jax.vmap(weighted, in_axes=(axes,))(floats | others).sum()

    grads = jax.jit(jax.grad(loss))({n: arrays[n] for n in FLOATS})
    each = _loop(_programs()[1], mapped)
    assert_same(grads, {n: x if n in mapped else x.sum(0) for n, x in each.items()}, 1e-5)


@pytest.mark.parametrize(
    "in_axes, out_axes", [((1, 0, 2), 1), ((-1, None, 0), -1), ((None, 3, None), 2)], ids=str
)
def test_vmap_over_other_axes(in_axes, out_axes):
    q, k, v = inputs()
    stacked = [
        x if axis is None else jnp.stack([x, 2 * x, -x], axis)
        for x, axis in zip((q, k, v), in_axes, strict=True)
    ]
    call = lambda q, k, v: dot_product_attention(q, k, v, is_causal=True, chunk_size=(4, 6))
    actual = jax.vmap(call, in_axes, out_axes)(*stacked)
    take = lambda x, axis, b: x if axis is None else jnp.take(x, b, axis)
    each = [
        call(*(take(x, axis, b) for x, axis in zip(stacked, in_axes, strict=True)))
        for b in range(3)
    ]
    assert_same(actual, jnp.stack(each, out_axes))


def test_vmap_of_vmap():
    q, k, v = inputs(leads=(3, 2, 1))
    call = lambda q, k, v: dot_product_attention(
        q, k, v, local_window_size=(3, 2), chunk_size=(4, 6)
    )
    assert_same(jax.vmap(jax.vmap(call))(q, k, v), call(q, k, v))


@pytest.mark.parametrize("mapped", [{*ARGUMENTS}, {"query", "bias"}], ids=len)
def test_vmap_of_one_call_at_a_time(monkeypatch, mapped):
    """Calls under vmap wait for each other where all their tiles together would be large."""
    monkeypatch.setattr(tile_sizes, "CPU_LOGITS", 1)
    test_vmap_and_vmap_of_grad(mapped)


@pytest.mark.parametrize("at_once", few([1, 3, 12], [3]))  # of 6 in each of 4
def test_vmap_of_vmap_of_some_calls_at_a_time(monkeypatch, at_once):
    monkeypatch.setattr(tile_sizes, "_calls_at_once", lambda *_: at_once)
    arrays = inputs(leads=(4, 6, 1), T=5, S=7)
    along = tuple(jnp.cos(x) for x in arrays)

    def call(q, k, v):
        return dot_product_attention(q, k, v, local_window_size=(3, 2), chunk_size=(4, 6))

    def derivatives(f):
        out, tangent = jax.jvp(f, arrays, along)
        return out, tangent, jax.vjp(f, *arrays)[1](jnp.sin(out))

    def both():
        return derivatives(jax.vmap(jax.vmap(call))), derivatives(call)

    actual, expected = jax.jit(both)()
    assert_same(actual, expected)


def test_jacrev_and_linear_transpose():
    """jacrev is vmap of the transpose: one row for each entry of out, against as many gradients."""
    q, k, v = inputs(B=1, T=3, S=4, K=1, G=1, H=2, D=2)
    call = lambda q, k, v: dot_product_attention(q, k, v, is_causal=True, chunk_size=2)
    jacobians = jax.jacrev(call, (0, 1, 2))(q, k, v)
    rows = list(np.ndindex(3, 2))
    for argument, jacobian in enumerate(jacobians):
        each = [
            jax.grad(lambda *x, t=t, d=d: call(*x)[0, t, 0, d], argument)(q, k, v) for t, d in rows
        ]
        assert_same(jacobian.reshape(6, *each[0].shape), jnp.stack(each))


# ---- jit, remat, scan, policies, donation, export


slow = pytest.mark.slow
SOME = (
    "plain",
    "default_chunk",
    "causal",
    "key_lengths",
    "bias_row",
    "segments",
    "dropout_each",
    "everything",
)


@pytest.mark.parametrize(
    "name", [name if name in SOME else pytest.param(name, marks=slow) for name in SINGLES]
)
def test_jit_equals_eager(name):
    """The same compiled loops inside: the same bits, or the last ones where XLA fuses the way to them differently."""
    args, kwargs = CASES[name].inputs(f32)
    static, arrays = split(kwargs)
    call = lambda args, arrays: dot_product_attention(
        *args, **arrays, **static, return_residual=True
    )
    assert_same(jax.jit(call)(args, arrays), call(args, arrays), 5e-7)


def layers(q, weights, checkpoint=lambda f: f, **kwargs):
    """A few attention layers by scan."""

    def layer(x, w):
        y = x @ w
        return x + dot_product_attention(y, y, y, is_causal=True, chunk_size=(4, 6), **kwargs), None

    return jax.lax.scan(checkpoint(layer), q, weights)[0]


def layers_unrolled(q, weights, **kwargs):
    for w in weights:
        y = q @ w
        q = q + dot_product_attention(y, y, y, is_causal=True, chunk_size=(4, 6), **kwargs)
    return q


def layer_inputs(count=3):
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((2, 13, 2, 5)), rng.standard_normal((count, 5, 5))
    return jnp.asarray(x, f32), jnp.asarray(w, f32)


POLICIES = {
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "save_only_these_names": jax.checkpoint_policies.save_only_these_names(*memeff.RESIDUAL_NAMES),
    "save_any_names_but_these": jax.checkpoint_policies.save_any_names_but_these(
        *memeff.RESIDUAL_NAMES
    ),
}


@pytest.mark.parametrize(
    "policy",
    [None, *(n if n.startswith("save_") else pytest.param(n, marks=slow) for n in POLICIES)],
)
def test_scan_over_layers_with_remat(policy):
    wrap = functools.partial(jax.checkpoint, policy=POLICIES[policy]) if policy else lambda f: f
    actual = gradients_with_and_without_lengths(functools.partial(layers, checkpoint=wrap))
    for x, y in zip(actual, unrolled_gradients(), strict=True):
        assert_same(x, y, 1e-5)


def gradients_with_and_without_lengths(run):
    """Gradients of two losses on layers, without lengths and with them, compiled as one program."""
    lengths = jnp.array([9, 13])

    def gradient(x, w, **kwargs):
        return jax.grad(lambda x, w: (run(x, w, **kwargs) ** 2).sum(), (0, 1))(x, w)

    def both(x, w):
        return gradient(x, w), gradient(x, w, key_value_seq_lengths=lengths)

    return jax.jit(both)(*layer_inputs())


@functools.cache
def unrolled_gradients():
    """The same for every policy."""
    return gradients_with_and_without_lengths(layers_unrolled)


def calls_of_gradient(**remat) -> int:
    q, k, v = inputs()
    call = lambda q, k, v: jnp.sin(dot_product_attention(jnp.sin(q), k, v, chunk_size=(4, 17)))
    wrapped = jax.checkpoint(call, **remat) if remat else call
    return count_calls(
        jax.make_jaxpr(jax.grad(lambda *x: wrapped(*x).sum(), (0, 1, 2)))(q, k, v).jaxpr
    )


def count_calls(jaxpr) -> int:
    """Walks over tiles, in a jaxpr and all that is inside."""
    count = 0
    for eqn in jaxpr.eqns:
        count += eqn.primitive.name == "memeff_call"
        for value in jax.tree.leaves(
            eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                count += count_calls(inner)
    return count


def test_policy_by_name_spares_the_second_forward():
    """remat alone walks the tiles forward, again forward, backward; with out and lse kept by name once forward."""
    plain = calls_of_gradient()
    again = calls_of_gradient(policy=jax.checkpoint_policies.nothing_saveable)
    named = calls_of_gradient(policy=POLICIES["save_only_these_names"])
    others = calls_of_gradient(
        policy=jax.checkpoint_policies.save_only_these_names("something_else")
    )
    assert again > plain, "remat recomputed nothing: the count tells nothing"
    assert named == plain
    assert others == again


def test_donation():
    """The query's buffer may become out's, and the result is the same."""
    q, k, v = inputs(H=5)
    expected = dot_product_attention(q, k, v, is_causal=True)
    given = jnp.array(q)
    run = jax.jit(lambda q, k, v: dot_product_attention(q, k, v, is_causal=True), donate_argnums=0)
    assert_same(run(given, k, v), expected, 5e-7)
    assert given.is_deleted()


EXPORTS = ("causal", "key_lengths", "bias_row", "dropout_each")


def _exported(function, *args):
    return export.deserialize(export.export(jax.jit(function))(*args).serialize(vjp_order=1))


@pytest.mark.parametrize("name", EXPORTS)
def test_export(name):
    """A round trip through bytes, with its gradient."""
    args, kwargs = CASES[name].inputs(f32)
    static, arrays = split(kwargs)
    floats = {n: arrays.pop(n) for n in ("bias", "logits_soft_cap") if n in arrays}
    call = lambda args, floats, arrays: dot_product_attention(*args, **floats, **arrays, **static)
    there = _exported(call, args, floats, arrays)

    def value_and_gradient(f, args, floats):
        loss = lambda args, floats: (f(args, floats, arrays) ** 2).sum()
        return f(args, floats, arrays), jax.grad(loss, (0, 1))(args, floats)

    def both(args, floats):
        return value_and_gradient(there.call, args, floats), value_and_gradient(call, args, floats)

    (out, grads), (expected_out, expected_grads) = jax.jit(both)(args, floats)
    assert_same(out, expected_out, 5e-7)
    assert_same(grads, expected_grads, 1e-5)


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(is_causal=True, chunk_size=8),
        *(pytest.param(x, marks=slow) for x in ({}, dict(local_window_size=(3, 2)))),
    ],
    ids=str,
)
def test_export_with_symbolic_lengths(kwargs):
    """Exported once, called at lengths below, at and above a tile, with its gradient."""
    b, t, s = export.symbolic_shape("b, t, s")
    shapes = [
        jax.ShapeDtypeStruct(dims, f32) for dims in ((b, t, 4, 3), (b, s, 2, 3), (b, s, 2, 5))
    ]
    call = lambda q, k, v: dot_product_attention(q, k, v, **kwargs)
    there = _exported(call, *shapes)

    def value_and_gradient(f, *args):
        return f(*args), jax.grad(lambda *args: (f(*args) ** 2).sum(), (0, 1, 2))(*args)

    @jax.jit
    def both(*args):
        return value_and_gradient(there.call, *args), value_and_gradient(call, *args)

    for B, T, S in ((2, 13, 17), (1, 8, 8), (3, 1, 5), (1, 600, 520)):
        (out, grads), (expected_out, expected_grads) = both(*inputs(B, T, S))
        assert_same(out, expected_out)
        assert_same(grads, expected_grads, 1e-5)


def test_export_symbolic_batch_of_lengths():
    b, t = export.symbolic_shape("b, t")
    x, n = jax.ShapeDtypeStruct((b, t, 2, 3), f32), jax.ShapeDtypeStruct((b,), np.int32)
    call = lambda x, n: dot_product_attention(
        x, x, x, key_value_seq_lengths=n, query_seq_lengths=n, is_causal=True
    )
    there = _exported(call, x, n)
    for B, T in ((2, 13), (1, 5)):
        x, n = inputs(B, T, K=2, G=1)[0], jnp.arange(3, 3 + B, dtype=jnp.int32)
        assert_same(*jax.jit(lambda x, n: (there.call(x, n), call(x, n)))(x, n))


@pytest.mark.parametrize("sizes", ["b", "b, 4", "4, b"])
def test_export_vmap_over_a_symbolic_axis(monkeypatch, sizes):
    """Whose length is not known, so that all calls run at the same time."""
    monkeypatch.setattr(tile_sizes, "CPU_LOGITS", 1)
    x = jax.ShapeDtypeStruct((*export.symbolic_shape(sizes), 5, 2, 3), f32)
    call = lambda x: dot_product_attention(x, x, x, is_causal=True)
    mapped = functools.reduce(lambda f, _: jax.vmap(f), range(x.ndim - 3), call)
    there = _exported(mapped, x)
    x = inputs(leads=(4,) * (x.ndim - 3), T=5, K=2, G=1)[0]
    assert_same(*jax.jit(lambda x: (there.call(x), call(x)))(x))


SYMBOLIC = {
    "Dropout": lambda x: dot_product_attention(
        x, x, x, dropout_rate=0.5, dropout_rng=jax.random.key(0)
    ),
    "memeff.attention_statistics": lambda x: memeff.attention_statistics(x, x, x),
    "key_mass": lambda x: memeff.key_mass(x, x),
    "a jvp": lambda x: jax.jvp(lambda x: dot_product_attention(x, x, x), (x,), (x,)),
    "a second derivative": lambda x: jax.grad(lambda x: jax.grad(_squares)(x).sum())(x),
}


def _squares(x):
    return (dot_product_attention(x, x, x) ** 2).sum()


@pytest.mark.parametrize("what", SYMBOLIC)
def test_symbolic_lengths_are_refused_in_words(what):
    x = jax.ShapeDtypeStruct((2, export.symbolic_shape("t")[0], 2, 4), f32)
    with pytest.raises(
        NotImplementedError, match=rf"(?s){what}.* does not support lengths that jax.export leaves"
    ):
        export.export(jax.jit(SYMBOLIC[what]))(x)


def test_jet_is_refused_in_words():
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(
        NotImplementedError, match="does not support jax.experimental.jet.*Nest jax.jvp"
    ):
        jet.jet(lambda x: dot_product_attention(x, x, x), (x,), ((x,),))


# ---- integers of every width


@pytest.mark.parametrize(
    "number",
    [np.int64(2**31), np.uint32(2**32 - 1), np.uint8(255), np.int64(-(2**40)), np.int8(-100)],
)
def test_traced_lengths_and_offsets_of_every_width(number):
    """What is more than S counts as S, less than 0 as 0, in every integer dtype; an offset keeps its sign."""
    with jax.enable_x64(number.dtype.itemsize == 8):
        x = jax.random.normal(jax.random.key(0), (1, 9, 2, 4), f32)

        @jax.jit
        def run(n):
            call = lambda **how: dot_product_attention(x, x, x, **how)
            by_length = call(key_value_seq_lengths=n), call(query_seq_lengths=n)
            return *by_length, call(is_causal=True, q_offset=n), call()

        *found, full = run(np.asarray([number]))
        for y in found:
            assert_same(y, full if number > 0 else jnp.zeros_like(full))


def test_segment_ids_that_would_wrap_are_refused():
    x, ids = jnp.ones((1, 4, 2, 8)), np.zeros((1, 4), np.uint32)
    call = lambda a, b: dot_product_attention(x, x, x, query_segment_ids=a, key_value_segment_ids=b)
    assert_same(call(ids, ids.astype(np.int32)), call(ids, ids))  # known, and small
    with pytest.raises(
        TypeError, match="query_segment_ids is uint32 .* would wrap its largest numbers. Cast both"
    ):
        jax.jit(call)(ids, ids.astype(np.int32))


# ---- flags

FLAGGED = {
    "full": {},
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(3, 2)),
    "lengths": dict(
        key_value_seq_lengths=np.array([0, 9], np.int32),
        query_seq_lengths=np.array([5, 13], np.int32),
    ),
    "offset": dict(q_offset=np.array([0, -4], np.int32), is_causal=True),
    "bias": dict(bias=np.zeros((4, 13, 17), f32)),
    "mask": dict(mask=np.tri(13, 17, -1, dtype=bool)),
    "segments": dict(
        query_segment_ids=np.repeat([[0, 1]], 13, 0).T.astype(np.int32),
        key_value_segment_ids=np.ones((2, 17), np.int32),
    ),
    "small segments": dict(
        query_segment_ids=np.repeat([[0, 1]], 13, 0).T.astype(np.int8),
        key_value_segment_ids=np.ones((2, 17), np.int8),
    ),
    "soft cap": dict(logits_soft_cap=3.0),
    "scalars": dict(logits_soft_cap=np.float32(3), scale=np.float32(0.3)),
    "arrays": dict(logits_soft_cap=np.array(3, f32), scale=np.array(0.3, f32)),
    "shared dropout": dict(dropout_rng=np.array([0, 1], np.uint32), dropout_rate=0.5),
    "dropout": dict(
        dropout_rng=np.array([0, 1], np.uint32), dropout_rate=0.5, broadcast_dropout=False
    ),
}
# in these some row sees no key
SEES_NOTHING = ("lengths", "offset", "mask", "segments", "small segments")


def _flagged(kwargs, dtype=f32, residual=True, **extra):
    args = inputs(dtype=dtype)
    kwargs = {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in kwargs.items()}
    call = lambda *args: dot_product_attention(
        *args, **kwargs, **extra, chunk_size=(4, 6), return_residual=residual
    )
    result, pull = jax.vjp(call, *args)
    return result, pull(jax.tree.map(jnp.ones_like, result))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=slow)])
@pytest.mark.parametrize("name", FLAGGED)
def test_strict_promotion(name, dtype, implementation):
    """Forward and gradient promote nothing without saying so: neither dtypes nor ranks."""
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        shape = lambda: _flagged(FLAGGED[name], dtype, implementation=implementation)
        (out, lse), grads = jax.eval_shape(shape)
    assert out.dtype == dtype and lse.dtype == f32
    assert [g.dtype for g in grads] == [dtype] * 3


def test_strict_promotion_of_the_two_bfloat16_terms():
    """bias, scale and cap in the dtype of the model."""
    bf16 = lambda x: jnp.asarray(x, jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        terms = dict(bias=bf16(np.zeros((4, 1, 17))), scale=bf16(0.3), logits_soft_cap=bf16(3.0))
        (out, _), _ = jax.eval_shape(lambda: _flagged(terms, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16


def test_strict_promotion_keeps_refusing_what_the_user_mixes():
    q, k, v = inputs()
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(TypeError, match="key is bfloat16 and query is float32"),
    ):
        dot_product_attention(q, k.astype(jnp.bfloat16), v)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("flag", ["jax_debug_nans", "jax_debug_infs"])
@pytest.mark.parametrize(
    "name",
    ["causal", "lengths", "mask", *(pytest.param(n, marks=slow) for n in ("full", "offset"))],
)
def test_debug_flags(name, flag, jit):
    """out and its gradients raise no alarm, even where rows see nothing. lse of such a row is -inf: the only exception."""
    residual = flag == "jax_debug_nans" or name not in SEES_NOTHING
    run = lambda: _flagged(FLAGGED[name], residual=residual)
    with jax.debug_nans(flag == "jax_debug_nans"), jax.debug_infs(flag == "jax_debug_infs"):
        result = jax.jit(run)() if jit else run()
    assert jax.tree.all(jax.tree.map(lambda x: bool(np.isfinite(x).all()), result[1]))


@pytest.mark.parametrize(
    "name", ["lengths", *(pytest.param(n, marks=slow) for n in ("causal", "bias", "dropout"))]
)
def test_no_tracer_leaks(name):
    with jax.checking_leaks():
        _, grads = jax.jit(lambda: _flagged(FLAGGED[name]))()
    assert all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("dtype", ["float64", "float32", pytest.param("bfloat16", marks=slow)])
@pytest.mark.parametrize(
    "name",
    [
        n if n in ("bias", "lengths", "arrays") else pytest.param(n, marks=slow)
        for n in FLAGGED
        if "dropout" not in n
    ],
)
def test_x64_changes_no_dtype_and_no_number(name, dtype):
    """With x64 on: results in the dtypes of the inputs, and for 32 bits and less the numbers that they have with x64 off."""
    with jax.enable_x64(True):
        (out, lse), grads = jax.jit(lambda: _flagged(FLAGGED[name], dtype))()
    assert out.dtype == dtype and lse.dtype == (np.float64 if dtype == "float64" else f32)
    assert [g.dtype for g in grads] == [dtype] * 3
    eps = 4e-3 if dtype == "bfloat16" else 1e-5
    if dtype != "float64":
        expected = jax.jit(lambda: _flagged(FLAGGED[name], dtype))()
        assert_same(((out, lse), grads), expected, eps)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "name", ["bias", "lengths", *(pytest.param(n, marks=slow) for n in ("segments", "arrays"))]
)
def test_x64_takes_64_bit_operands(name, x64):
    """Integers and terms of 64 bits (NumPy's own) serve as well."""
    integer = lambda x: getattr(x, "dtype", None) in (np.int32, np.int8)
    kwargs = {n: x.astype(np.int64) if integer(x) else x for n, x in FLAGGED[name].items()}
    with jax.enable_x64(x64):
        call = lambda *args: dot_product_attention(*args, **kwargs, chunk_size=(4, 6))
        q, k, v = inputs()
        out, pull = jax.vjp(call, q, k, v)
        grads = pull(out)
    assert out.dtype == f32 and all(np.isfinite(g).all() for g in grads)


# ---- sizes of 0

ZEROS = {
    "B": dict(B=0),
    "T": dict(T=0),
    "S": dict(S=0),
    "N": dict(K=2, G=0),
    "N and K": dict(K=0, G=0),
    "D": dict(D=0),
    "T and S": dict(T=0, S=0),
    "a leading dim": dict(leads=(2, 0)),
}
WITH = {
    "plain": lambda leads, T, S, N: {},
    "causal": lambda leads, T, S, N: dict(is_causal=True),
    "lengths": lambda leads, T, S, N: dict(
        key_value_seq_lengths=jnp.full(leads, min(S, 3)),
        query_seq_lengths=jnp.full(leads, min(T, 3)),
    ),
    "offset": lambda leads, T, S, N: dict(q_offset=jnp.full(leads, 2), is_causal=True),
    "bias": lambda leads, T, S, N: dict(bias=jnp.ones((*leads, N, T, S))),
    "mask": lambda leads, T, S, N: dict(mask=jnp.ones((*leads, 1, T, S), bool)),
    "segments": lambda leads, T, S, N: dict(
        query_segment_ids=jnp.zeros((*leads, T), int),
        key_value_segment_ids=jnp.zeros((*leads, S), int),
    ),
    "dropout": lambda leads, T, S, N: dict(
        dropout_rng=jax.random.key(0), dropout_rate=0.5, broadcast_dropout=False
    ),
}


def _of_zero(size, extra, implementation):
    """out, lse and gradients of a call with a size of 0."""
    q, k, v = inputs(**ZEROS[size])
    *leads, T, N, _ = q.shape
    kwargs = WITH[extra](tuple(leads), T, k.shape[-3], N)
    call = lambda *args: dot_product_attention(
        *args, **kwargs, implementation=implementation, return_residual=True
    )
    (out, lse), pull = jax.vjp(call, q, k, v)
    return out, lse, pull((jnp.ones_like(out), jnp.ones_like(lse)))


# In jit: every size alone and with causal, and all of WITH with a batch, queries or keys of 0. The
# slow set has every pair, outside jit.
IN_JIT = {
    "xla": {
        size: [*WITH] if size in ("B", "T", "S", "T and S") else ["plain", "causal"]
        for size in ZEROS
    },
    "reference": {size: [*WITH] if size == "S" else ["plain"] for size in ZEROS},
}


@functools.cache
def _all_of_zero(size, implementation):
    """The calls of IN_JIT with this size of 0, compiled as one program."""
    return jax.jit(
        lambda: {
            extra: _of_zero(size, extra, implementation) for extra in IN_JIT[implementation][size]
        }
    )()


@pytest.mark.parametrize(
    "size, extra, implementation",
    [
        (size, extra, name)
        for name, sizes in IN_JIT.items()
        for size, extras in sizes.items()
        for extra in extras
    ],
)
def test_sizes_of_zero(size, extra, implementation):
    """out is 0 and lse -inf where no key is; gradients are there, empty or 0."""
    assert_of_zero(size, *_all_of_zero(size, implementation)[extra])


EAGER = [*itertools.product(ZEROS, WITH, ["xla", "reference"])]
FAST_EAGER = [
    ("S", "plain", "xla"),
    ("T", "causal", "xla"),
    ("B", "lengths", "xla"),
    ("S", "plain", "reference"),
]


@pytest.mark.parametrize("size, extra, implementation", few(EAGER, FAST_EAGER))
def test_sizes_of_zero_outside_jit(size, extra, implementation):
    assert_of_zero(size, *_of_zero(size, extra, implementation))


def assert_of_zero(size, out, lse, grads):
    q, k, v = inputs(**ZEROS[size])
    *leads, T, N, _ = q.shape
    S, D = k.shape[-3], v.shape[-1]
    assert out.shape == (*leads, T, N, D) and lse.shape == (*leads, T, N)
    if S == 0:
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert all(np.isfinite(g).all() for g in grads)
    if 0 in out.shape and D != 0:
        assert all(not np.asarray(g).any() for g in grads)


def test_head_size_zero_is_refused():
    with pytest.raises(ValueError, match="query has head size H=0"):
        dot_product_attention(*inputs(H=0))


# ---- forward mode and second order


def _loss(implementation, q):
    _, k, v = inputs()
    return (
        dot_product_attention(
            q, k, v, is_causal=True, implementation=implementation, chunk_size=(4, 6)
        )
        ** 2
    ).sum()


def _layers_loss(implementation, q):
    return (layers(q, jnp.full((2, 3, 3), 0.2), implementation=implementation) ** 2).sum()


def _jvp(f):
    return lambda q: jax.jvp(f, (q,), (jnp.cos(q),))[1]


def _hessian_vector(grad):
    """Reverse over reverse."""
    return lambda q: jax.grad(lambda q: (grad(q) * jnp.cos(q)).sum())(q)


FORWARD = {  # of a loss f, and of the same with layers
    "jvp": lambda f, _: _jvp(f),
    "jit(jvp)": lambda f, _: jax.jit(_jvp(f)),
    "jvp(jit)": lambda f, _: _jvp(jax.jit(f)),
    "jvp(vmap)": lambda f, _: lambda q: _jvp(jax.vmap(f))(q[None]),
    "vmap(jvp)": lambda f, _: lambda q: jax.vmap(_jvp(f))(q[None]),
    "jvp(remat)": lambda f, _: _jvp(jax.checkpoint(f)),
    "jvp(scan)": lambda _, f: _jvp(f),
    "linearize": lambda f, _: lambda q: jax.linearize(f, q)[1](q),
    "jit(linearize)": lambda f, _: jax.jit(lambda q: jax.linearize(f, q)[1](q)),
    "jacfwd": lambda f, _: jax.jacfwd(f),
    "jit(jacfwd)": lambda f, _: jax.jit(jax.jacfwd(f)),
}
SECOND = {
    "grad(jvp)": lambda f, _: jax.grad(_jvp(f)),
    "grad(grad)": lambda f, _: _hessian_vector(jax.grad(f)),
    "jit(grad(grad))": lambda f, _: jax.jit(_hessian_vector(jax.grad(f))),
    "grad(jit(grad))": lambda f, _: _hessian_vector(jax.jit(jax.grad(f))),
    "grad(vmap(grad))": lambda f, _: lambda q: _hessian_vector(jax.vmap(jax.grad(f)))(q[None]),
    "grad(grad(vmap))": lambda f, _: (
        lambda q: _hessian_vector(jax.grad(lambda q: jax.vmap(f)(q).sum()))(q[None])
    ),
    "jvp(grad)": lambda f, _: _jvp(jax.grad(f)),
    "vmap(jvp(grad))": lambda f, _: lambda q: jax.vmap(_jvp(jax.grad(f)))(q[None]),
    "hessian": lambda f, _: jax.hessian(lambda q: f(jnp.broadcast_to(q, (2, 13, 4, 3)))),
    "grad(grad(remat))": lambda f, _: _hessian_vector(jax.grad(jax.checkpoint(f))),
    "grad(grad(scan))": lambda _, f: _hessian_vector(jax.grad(f)),
    "jvp(grad(scan(remat)))": lambda _, f: _jvp(jax.grad(jax.checkpoint(f))),
}


FAST = {mode for mode in FORWARD if not mode.startswith("jit")}
FAST |= {"grad(jvp)", "jit(grad(grad))", "jvp(grad)", "jvp(grad(scan(remat)))"}


@pytest.mark.parametrize("mode", few(FORWARD | SECOND, FAST))
def test_forward_mode_and_second_order(mode):
    q = inputs(K=2, G=2)[0]
    q = q[:1, :1, :1] if mode == "hessian" else q
    losses = (
        [functools.partial(loss, name) for loss in (_loss, _layers_loss)]
        for name in (None, "reference")
    )
    actual, plain = ((FORWARD | SECOND)[mode](*both) for both in losses)
    assert_same(actual(q), jax.jit(plain)(q), 2e-5)


def test_linearize_then_transpose_is_reverse_mode():
    q, loss = inputs()[0], functools.partial(_loss, None)
    _, linear = jax.linearize(loss, q)
    (actual,) = jax.linear_transpose(linear, q)(jnp.ones(()))
    assert_bits(actual, jax.grad(loss)(q))
    _, k, v = inputs()
    with pytest.raises(
        NotImplementedError, match="jax.linear_transpose of attention itself. Use jax.vjp"
    ):
        jax.linear_transpose(lambda v: dot_product_attention(q, k, v), v)(q[..., :1] * jnp.ones(5))
