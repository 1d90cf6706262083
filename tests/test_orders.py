"""Compare derivatives of every order with the oracle and with the quadratic definition.

All in float64, along random directions, for every argument that is an array. The truth of an order
is the oracle where it has one: the tangent is the transpose of its gradient, and a difference of
its gradients is their tangent. test_memory_of_orders.py measures the memory.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES, MIXES, SINGLES, Sizes, qkv, split
from conftest import GRADIENTS, cotangents, few, in_group, oracle_arguments, true_case
from jax.test_util import check_grads
from small_calls import assert_bits, assert_same, equations

import memeff

EVERY = SINGLES + MIXES
_fast = {*MIXES[::5], "everything", "bias_full", "scale_array", "q_offset_array"}
FAST = tuple(name for name in EVERY if name in _fast)
REST = tuple(name for name in EVERY if name not in FAST)


def floats_of(args, kwargs):
    """Return the arrays that have a derivative, by argument, and the other keyword arguments."""
    named = dict(zip(GRADIENTS, args, strict=False))
    named |= {n: x for n, x in kwargs.items() if n in GRADIENTS[3:]}
    floats = {n: x for n, x in named.items() if isinstance(x, np.ndarray)}
    rest = {n: x for n, x in kwargs.items() if n not in floats}
    return floats, rest


def directions(floats, seed=0):
    """Return a random tangent of each array, 0 where the array is not finite."""
    rng = np.random.default_rng(seed)
    along = {}
    for name, x in floats.items():
        tangent = np.asarray(rng.standard_normal(x.shape), x.dtype)
        along[name] = np.where(np.isfinite(x), tangent, 0).astype(x.dtype)
    return along


def attend(static, arrays, floats, **override):
    """Return out and lse of the call whose differentiable arrays are `floats`."""
    floats = dict(floats)
    args = [floats.pop(n) for n in GRADIENTS[:3]]
    options = static | override
    return memeff.dot_product_attention(*args, **floats, **arrays, **options, return_residual=True)


def run(names, order, **override):
    """Return {name: order(attention, floats, directions, cotangents)}, computed by one program."""
    calls = {}
    statics = {}
    for name in names:
        args, kwargs = CASES[name].inputs(np.float64)
        floats, rest = floats_of(args, kwargs)
        statics[name], arrays = split(rest)
        calls[name] = arrays, floats, directions(floats), cotangents(args, "float64")

    def program(calls):
        results = {}
        for name, (arrays, floats, along, cts) in calls.items():
            f = functools.partial(attend, statics[name], arrays, **override)
            results[name] = order(f, floats, along, cts)
        return results

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(program)(calls))


def largest(x) -> float:
    """Return the largest absolute number of x, and 0 if x is empty."""
    return np.abs(x).max(initial=0)


def move(floats, along, distance):
    """Return x + distance * direction for each array."""
    return {n: x + distance * along[n] for n, x in floats.items()}


# ---- the number of products


def count_products(f, *args) -> int:
    """Count the multiplications in the matrix products of a program without loops."""
    total = 0
    for eqn in equations(jax.make_jaxpr(f)(*args).jaxpr):
        assert eqn.primitive.name not in ("while", "cond"), eqn.primitive
        assert eqn.params.get("length", 1) == 1, eqn.primitive
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            contracted_size = np.prod([shape[dim] for dim in contracted])
            total += eqn.outvars[0].aval.size * int(contracted_size)
    return total


def test_out_and_its_tangent_are_made_in_one_walk():
    """Out and its tangent take three times the products of the forward.

    The forward's equation (1) runs once, and its derivative by either factor; the same holds for
    (5).
    """
    x = jnp.ones((1, 32, 2, 8), jnp.bfloat16)  # one tile, and no check of a fixed reference
    f = functools.partial(memeff.dot_product_attention, is_causal=True)

    def jvp(*x):
        return jax.jvp(f, x, x)

    def jvp_of_remat(*x):
        return jax.jvp(jax.checkpoint(f), x, x)

    expected = 3 * count_products(f, x, x, x)
    assert count_products(jvp, x, x, x) == expected
    assert count_products(jax.jit(jvp), x, x, x) == expected
    assert count_products(jvp_of_remat, x, x, x) == expected


# ---- first order, forward


def _tangent(f, floats, along, _):
    return jax.jvp(f, (floats,), (along,))[1]


@functools.cache
def tangents(names):
    return run(names, _tangent)


def products(xs, ys):
    """Return the products of all entries of two lists of arrays."""
    return np.concatenate([(x * y).ravel() for x, y in zip(xs, ys, strict=True)])


@pytest.mark.parametrize("name", few(EVERY, FAST))
def test_tangent_is_the_transpose_of_the_oracles_gradient(name):
    """<cotangents, jvp(v)> = <gradients, v>."""
    group = in_group(name, FAST if name in FAST else REST)
    dout, dlse = tangents(group)[name]
    args, kwargs = CASES[name].inputs(np.float64)
    floats, _ = floats_of(args, kwargs)
    ct_out, ct_lse = cotangents(args, "float64")
    gradients = true_case(name, "float64").grads
    along = directions(floats)
    left = products([ct_out, ct_lse], [dout, dlse])
    right = products([gradients[n] for n in along], along.values())
    assert np.isfinite(left).all()
    size = np.abs(left).sum() + np.abs(right).sum()
    assert abs(left.sum() - right.sum()) <= 1e-12 * size


def cast(arrays, dtype):
    return tuple(np.asarray(x, dtype) for x in arrays)


@functools.partial(jax.jit, static_argnums=2)
def _causal_tangent(args, along, implementation):
    f = functools.partial(
        memeff.dot_product_attention,
        is_causal=True,
        implementation=implementation,
        return_residual=True,
        chunk_size=(32, 48),
    )
    return jax.jvp(f, args, along)[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.once
def test_tangent_in_few_bits(dtype, size):
    """The tangent errs at most 1.5 times as much as the plain computation's in the same dtype."""
    z = Sizes(B=1, T=97, S=131, K=2, G=2, H=16, D=8)
    q, k, v = qkv(np.random.default_rng(0), np.float64, z)
    along = qkv(np.random.default_rng(1), np.float64, z)

    def tangent(args, along, implementation):
        return cast(_causal_tangent(args, along, implementation), np.float64)

    args = cast((size * q, k, v), jnp.dtype(dtype))
    along = cast(along, jnp.dtype(dtype))
    with jax.enable_x64(True):
        wide_args = cast(args, np.float64)
        wide_along = cast(along, np.float64)
        truth = tangent(wide_args, wide_along, "reference")
    actual = tangent(args, along, None)
    plain = tangent(args, along, "reference")
    eps = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}[dtype]
    for x, y, exact in zip(actual, plain, truth, strict=True):
        rounding = eps * max(1, largest(exact))
        assert largest(x - exact) <= 1.5 * largest(y - exact) + rounding


def test_what_nobody_sees_moves_nothing():
    """NaN and Inf in hidden keys and values, and in their tangents, reach no tangent.

    A NaN that is seen reaches the tangents of its rows.
    """
    z = Sizes(B=1, T=9, S=13, K=1, G=2, H=3, D=5)
    q, k, v = qkv(np.random.default_rng(0), np.float32, z)
    dq, dk, dv = qkv(np.random.default_rng(1), np.float32, z)
    lengths = np.array([7])
    f = functools.partial(
        memeff.dot_product_attention, is_causal=True, key_value_seq_lengths=lengths
    )

    def out_and_tangent():
        return jax.jvp(f, (q, k, v), (dq, dk, dv))

    clean = out_and_tangent()
    poison = np.array([np.nan, np.inf, -np.inf, np.nan, 1e38, np.nan])
    for x in (k, v, dk, dv):
        x[:, 7:] = poison.reshape(6, 1, 1)
    assert_bits(clean, out_and_tangent())
    for x in (k, v, dk, dv):
        x[:, 7:] = 0
    dv[:, 3, 0, 2] = np.nan
    _, tangent = out_and_tangent()
    is_nan = np.isnan(tangent)
    must_be_nan = is_nan[:, 3:, :, 2]
    assert must_be_nan.all()
    assert is_nan.sum() == must_be_nan.size


# ---- second order


def pull_back(f, x, ct):
    """Return the gradient of <f(x), ct>."""
    _, pull = jax.vjp(f, x)
    return pull(ct)[0]


def forward_over_reverse(f, floats, along, ct):
    def gradient(x):
        return pull_back(f, x, ct)

    return jax.jvp(gradient, (floats,), (along,))[1]


def reverse_over_forward(f, floats, along, ct):
    def tangent(x):
        return jax.jvp(f, (x,), (along,))[1]

    return pull_back(tangent, floats, ct)


def reverse_over_reverse(f, floats, along, ct):
    def gradient(x, ct):
        return pull_back(f, x, ct)

    _, pull = jax.vjp(gradient, floats, ct)
    return pull(along)


SECOND = {
    "forward_over_reverse": forward_over_reverse,
    "reverse_over_forward": reverse_over_forward,
    "reverse_over_reverse": reverse_over_reverse,
}


@functools.cache
def second(names, order, **override):
    return run(names, SECOND[order], **override)


@pytest.mark.parametrize("name", few(EVERY, FAST))
@pytest.mark.parametrize("order", few(SECOND, ["forward_over_reverse"]))
def test_second_order_against_the_definition(order, name):
    names = in_group(name, FAST, 4) if name in FAST else (name,)
    actual = second(names, order)[name]
    plain = second(names, order, implementation="reference")[name]
    assert_same(actual, plain, 1e-9)


@pytest.mark.parametrize("name", FAST)
def test_tangent_of_gradient_is_a_difference_of_the_oracles(name):
    """Compare with a difference of the oracle's gradients, of fourth order in the step.

    With a step of 1e-3 its error is some 1e-10 of the third derivatives.
    """
    actual = second(in_group(name, FAST, 4), "forward_over_reverse")[name]
    args, kwargs = CASES[name].inputs(np.float64)
    floats, rest = floats_of(args, kwargs)
    along = directions(floats)
    dout, dlse = cotangents(args, "float64")

    def gradients(distance):
        moved = move(floats, along, distance)
        qkv = [moved.pop(n) for n in GRADIENTS[:3]]
        options = oracle_arguments(args, rest | moved, "float64")
        return oracle.gradients(*qkv, **options, dout=dout, dlse=dlse)

    h = 1e-3
    after = gradients(h)
    before = gradients(-h)
    far_after = gradients(2 * h)
    far_before = gradients(-2 * h)
    for n, x in actual.items():
        near_difference = after[n] - before[n]
        far_difference = far_after[n] - far_before[n]
        expected = (8 * near_difference - far_difference) / (12 * h)
        assert largest(x - expected) <= 1e-7 * max(1, largest(expected)), n


# ---- higher orders


STATIC = dict(is_causal=True, q_offset=1, chunk_size=(3, 4))


def _tiny():
    """Return query, key, value and bias of a tiny call, and a direction of each."""
    rng = np.random.default_rng(3)
    shapes = [(1, 5, 2, 3), (1, 7, 1, 3), (1, 7, 1, 2)]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    along = [rng.standard_normal(shape) for shape in shapes]
    bias, dbias = rng.standard_normal((2, 1, 1, 7))
    names = ["query", "key", "value", "bias"]
    floats = dict(zip(names, [*arrays, bias], strict=True))
    return floats, dict(zip(names, [*along, dbias], strict=True))


def derivative_along(modes: str, implementation):
    """Return d^n/ds^n of a loss at x + s v, each order in forward (f) or reverse (r) mode.

    The last letter is the innermost order.
    """
    floats, along = _tiny()

    def loss(s):
        moved = move(floats, along, s)
        out, lse = attend(STATIC, {}, moved, implementation=implementation)
        return jnp.sin(out).sum() + jnp.cos(lse).sum()

    def forward(f):
        def tangent(s):
            return jax.jvp(f, (s,), (jnp.ones_like(s),))[1]

        return tangent

    derivative = loss
    for mode in reversed(modes):
        differentiate = forward if mode == "f" else jax.grad
        derivative = differentiate(derivative)
    with jax.enable_x64(True):
        return float(jax.jit(derivative)(jnp.float64(0.1)))


THIRD = ["".join(letters) for letters in itertools.product("fr", repeat=3)]
FIFTH = ["fffff", "rfrfr", "frfrf", "ffrrr"]


@pytest.mark.parametrize("modes", few(THIRD + FIFTH, ["rrf"]))
def test_orders_and_mixtures(modes):
    actual = derivative_along(modes, None)
    plain = derivative_along(modes, "reference")
    assert_same(actual, plain, 1e-9)


@pytest.mark.once
def test_check_grads_to_second_order():
    floats, _ = _tiny()
    f = functools.partial(attend, STATIC, {})
    with jax.enable_x64(True):
        check_grads(jax.jit(f), (floats,), order=2, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)
