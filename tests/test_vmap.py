"""Compare vmap of attention, and of its derivatives, with a loop over the same calls."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from small_calls import assert_same, f32, inputs

from memeff import dot_product_attention, tile_sizes

pytestmark = pytest.mark.once

# Each argument is a stack of 3, for a call of B=2 T=13 S=17 N=4. Floats get a gradient.
STACK = 3
_rng = np.random.default_rng(7)


def _normal(*shape):
    return _rng.standard_normal((STACK, *shape)).astype(f32)


def _segment_ids(length):
    ids = _rng.integers(0, 3, (STACK, 2, length))
    return np.sort(ids, -1).astype(np.int32)


def _int32(numbers):
    return np.array(numbers, np.int32)


FLOATS = {
    "query": _normal(2, 13, 4, 3),
    "key": _normal(2, 17, 2, 3),
    "value": _normal(2, 17, 2, 5),
    "bias": _normal(4, 1, 17),
    "scale": np.array([0.3, -0.7, 1.1], f32),
    "logits_soft_cap": np.array([1.5, 3.0, 0.7], f32),
}
NOT_FLOATS = {
    "mask": _rng.random((STACK, 2, 1, 13, 17)) < 0.7,
    "query_seq_lengths": _int32([[13, 4], [7, 12], [0, 13]]),
    "key_value_seq_lengths": _int32([[17, 4], [7, 16], [5, 0]]),
    "query_segment_ids": _segment_ids(13),
    "key_value_segment_ids": _segment_ids(17),
    "q_offset": _int32([[0, 4], [-3, 9], [5, 5]]),
    "dropout_rng": np.arange(6, dtype=np.uint32).reshape(STACK, 2),
}
STATIC = dict(
    is_causal=True,
    dropout_rate=0.3,
    broadcast_dropout=False,
    chunk_size=(4, 6),
    return_residual=True,
)
ARGUMENTS = FLOATS | NOT_FLOATS
PAIRS = [*itertools.combinations(ARGUMENTS, 2)]
SUBSETS = [{*ARGUMENTS}, {*NOT_FLOATS}, {"query", "bias"}, {"q_offset"}]
SLOW_SUBSETS = [{*FLOATS}, {"key", "value", "mask"}, {"bias"}]
ALONE = [{name} for name in ARGUMENTS]


def everything(arrays):
    """Return out and lse of the call with all arguments at once."""
    rest = dict(arrays)
    q = rest.pop("query")
    k = rest.pop("key")
    v = rest.pop("value")
    return dot_product_attention(q, k, v, **rest, **STATIC)


def weighted_sum(x):
    """Return the sum of x with another weight for each entry, so that no error cancels."""
    weights = jnp.cos(jnp.arange(x.size, dtype=f32))
    return (x * weights.reshape(x.shape)).sum()


def loss_of(arrays):
    """Return a scalar of out and lse. The lse of a row that sees no key counts as 0."""
    out, lse = everything(arrays)
    lse = jnp.where(jnp.isfinite(lse), lse, 0)
    return weighted_sum(out) + weighted_sum(lse)


def take(arrays, names):
    return {name: arrays[name] for name in names}


def gradients(arrays):
    """Return the gradients of the loss to all floats."""
    rest = take(arrays, NOT_FLOATS)

    def loss(floats):
        return loss_of(floats | rest)

    return jax.grad(loss)(take(arrays, FLOATS))


def values_and_gradients(arrays):
    """Return (out, lse) and the gradients of the loss."""
    return everything(arrays), gradients(arrays)


def shared(mapped):
    """Return entry 1 of the stack of each argument that is not mapped."""
    return {name: x[1] for name, x in ARGUMENTS.items() if name not in mapped}


def arguments_of_call(mapped, b):
    """Return the arguments of call `b`: entry `b` of the stacks in `mapped`, and what is shared."""
    entries = {name: ARGUMENTS[name][b] for name in mapped}
    return entries | shared(mapped)


def axes_and_arrays(mapped):
    """Return vmap's axes of all arguments, and the arguments: a stack of each that is mapped."""
    arrays = ARGUMENTS | shared(mapped)
    axes = dict.fromkeys(ARGUMENTS) | dict.fromkeys(mapped, 0)
    return axes, arrays


@functools.cache
def _compiled():
    return jax.jit(everything), jax.jit(gradients)


def loop(function, mapped):
    """Call the function on one entry of the stack at a time, and stack its results."""
    results = [function(arguments_of_call(mapped, b)) for b in range(STACK)]
    return jax.tree.map(lambda *x: np.stack(x), *results)


def assert_vmap_is_loop(mapped):
    """Compare vmap over the arguments in `mapped` with a loop: values, and gradients inside it."""
    axes, arrays = axes_and_arrays(mapped)
    run = jax.vmap(values_and_gradients, in_axes=(axes,))
    values, grads = jax.jit(run)(arrays)
    forward, grad = _compiled()
    assert_same(values, loop(forward, mapped))
    assert_same(grads, loop(grad, mapped), 1e-5)


def subset_id(names):
    if len(names) < 5:
        return ",".join(sorted(names))
    return str(len(names))


@pytest.mark.parametrize("mapped", [*SUBSETS, *few(SLOW_SUBSETS + ALONE, ())], ids=subset_id)
def test_vmap_and_vmap_of_grad(mapped):
    """Map each argument alone and share the rest; map all, and a few that belong together."""
    assert_vmap_is_loop(mapped)


@pytest.mark.slow
@pytest.mark.parametrize("mapped", PAIRS, ids="+".join)
def test_vmap_over_pairs(mapped):
    assert_vmap_is_loop({*mapped})


def test_grad_of_vmap_sums_what_is_shared():
    """Shared bias and scale get the sum of the stack's gradients; a mapped argument gets each."""
    mapped = {"query", "key", "value", "mask"}
    axes, arrays = axes_and_arrays(mapped)
    rest = take(arrays, NOT_FLOATS)

    def loss(floats):
        losses = jax.vmap(loss_of, in_axes=(axes,))
        return losses(floats | rest).sum()

    grads = jax.jit(jax.grad(loss))(take(arrays, FLOATS))
    _, grad = _compiled()
    stacked = loop(grad, mapped)
    expected = {name: x if name in mapped else x.sum(0) for name, x in stacked.items()}
    assert_same(grads, expected, 1e-5)


@pytest.mark.parametrize(
    "in_axes, out_axes",
    [
        ((1, 0, 2), 1),
        ((-1, None, 0), -1),
        pytest.param((None, 3, None), 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_vmap_over_other_axes(in_axes, out_axes):
    call = functools.partial(dot_product_attention, is_causal=True, chunk_size=(4, 6))
    arrays = []
    for x, axis in zip(inputs(), in_axes, strict=True):
        arrays.append(x if axis is None else jnp.stack([x, 2 * x, -x], axis))

    def call_alone(b):
        args = []
        for x, axis in zip(arrays, in_axes, strict=True):
            args.append(x if axis is None else jnp.take(x, b, axis))
        return call(*args)

    @jax.jit
    def both():
        one_by_one = jnp.stack([call_alone(b) for b in range(3)], out_axes)
        return jax.vmap(call, in_axes, out_axes)(*arrays), one_by_one

    assert_same(*both())


def test_gradient_of_a_vmap_over_values_alone():
    """The reference's tangents are mapped where its probabilities are not; JAX refuses that."""
    q, k, v = inputs()
    values = jnp.stack([v, 2 * v, -v])

    def gradients(implementation):
        call = functools.partial(
            dot_product_attention, is_causal=True, implementation=implementation
        )
        out, pull = jax.vjp(jax.vmap(jax.jit(call), (None, None, 0)), q, k, values)
        return pull(jnp.cos(out))

    assert_same(gradients("reference"), gradients("xla"), 1e-5)


def test_vmap_of_vmap():
    q, k, v = inputs(leads=(3, 2, 1))
    call = functools.partial(dot_product_attention, local_window_size=(3, 2), chunk_size=(4, 6))
    assert_same(jax.jit(jax.vmap(jax.vmap(call)))(q, k, v), call(q, k, v))


@pytest.mark.parametrize("mapped", few([{*ARGUMENTS}, {"query", "bias"}], [{*ARGUMENTS}]), ids=len)
def test_vmap_of_one_call_at_a_time(monkeypatch, mapped):
    """Calls under vmap wait for each other where all their tiles together would be large."""
    monkeypatch.setattr(tile_sizes, "CPU_LOGITS", 1)
    assert_vmap_is_loop(mapped)


@pytest.mark.parametrize("at_once", few([1, 3, 12], [3]))  # of 6 calls in each of 4
def test_vmap_of_vmap_of_some_calls_at_a_time(monkeypatch, at_once):
    monkeypatch.setattr(tile_sizes, "_calls_at_once", lambda *_: at_once)
    arrays = inputs(leads=(4, 6, 1), T=5, S=7)
    tangents = tuple(jnp.cos(x) for x in arrays)
    call = functools.partial(dot_product_attention, local_window_size=(3, 2), chunk_size=(4, 6))

    def derivatives(f):
        out, tangent = jax.jvp(f, arrays, tangents)
        _, pull = jax.vjp(f, *arrays)
        return out, tangent, pull(jnp.sin(out))

    def both():
        return derivatives(jax.vmap(jax.vmap(call))), derivatives(call)

    actual, expected = jax.jit(both)()
    assert_same(actual, expected)


def test_jacrev_and_linear_transpose():
    """Compare jacrev, which is vmap of the transpose, with one gradient for each entry of out."""
    q, k, v = inputs(B=1, T=3, S=4, K=1, G=1, H=2, D=2)
    call = functools.partial(dot_product_attention, is_causal=True, chunk_size=2)

    @jax.jit
    def gradients_of_entries(*args):
        def gradient(t, d):
            return jax.grad(lambda *args: call(*args)[0, t, 0, d], (0, 1, 2))(*args)

        gradients = [gradient(t, d) for t, d in np.ndindex(3, 2)]
        return [jnp.stack(rows) for rows in zip(*gradients, strict=True)]

    jacobians = jax.jit(jax.jacrev(call, (0, 1, 2)))(q, k, v)
    for jacobian, rows in zip(jacobians, gradients_of_entries(q, k, v), strict=True):
        assert_same(jacobian.reshape(rows.shape), rows)


@pytest.mark.parametrize(
    "sizes, bits",
    few(
        itertools.product([(13, 17), (5, 1), (1, 9)], ["mix32", "threefry"]),
        [((13, 17), "mix32"), ((1, 9), "threefry")],
    ),
)
def test_keys_of_dropout_and_offsets_under_two_vmaps(bits, sizes):
    T, S = sizes
    rng = np.random.default_rng(1)
    query = rng.standard_normal((2, T, 2, 3)).astype(f32)
    key, value = rng.standard_normal((2, 2, S, 1, 3)).astype(f32)
    seeds = np.arange(6, dtype=np.uint32).reshape(3, 2)
    offsets = _int32([[0, 4], [2, 9]])

    @jax.jit
    def gradient(seed, offset):
        def loss(query):
            out = dot_product_attention(
                query,
                key,
                value,
                is_causal=True,
                q_offset=offset,
                dropout_rng=seed,
                dropout_rate=0.4,
                dropout_bits=bits,
                chunk_size=(4, 6),
            )
            return jnp.sum(out**2)

        return jax.grad(loss)(query)

    both = jax.vmap(jax.vmap(gradient, (None, 0)), (0, None))(seeds, offsets)
    for seed, gradients in zip(seeds, both, strict=True):
        for offset, x in zip(offsets, gradients, strict=True):
            np.testing.assert_allclose(x, gradient(seed, offset), rtol=0, atol=4e-6)


COLUMN_SIZES = ((2, 64, 2, 2, 8), (3, 16, 4, 4, 16), (2, 128, 4, 1, 32))
FIXED = ((), ("T",), ("B",), ("N",), ("B", "T"), ("N", "T"))


@pytest.mark.parametrize(
    "sizes, fixed",
    few(itertools.product(COLUMN_SIZES, FIXED), [*zip(COLUMN_SIZES, FIXED[::2], strict=True)]),
)
def test_cotangents_equal_in_all_columns(sizes, fixed):
    """The gradient of a sum over columns is that of its cotangent written out, under vmap too."""
    B, T, N, K, D = sizes
    rng = np.random.default_rng(2)

    def normal(*shape):
        return rng.standard_normal(shape).astype(f32)

    arrays = normal(B, T, N, 4), normal(B, T, K, 4), normal(B, T, K, D)
    lengths = {"B": B, "T": T, "N": N}
    cotangents = normal(3, *(1 if name in fixed else size for name, size in lengths.items()), 1)

    def gradients(cotangent):
        out, pull = jax.vjp(dot_product_attention, *arrays)
        return pull(jnp.broadcast_to(cotangent, out.shape))

    written_out = np.broadcast_to(cotangents, (3, B, T, N, D)).copy()
    actual = jax.jit(jax.vmap(gradients))(cotangents)
    one_by_one = jax.jit(gradients)
    wanted = [one_by_one(x) for x in written_out]
    for x, *y in zip(actual, *wanted, strict=True):
        np.testing.assert_allclose(x, np.stack(y), rtol=0, atol=4e-6 * np.abs(y).max())
