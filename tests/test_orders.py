"""Derivatives of every order: against the oracle, against the quadratic definition, and their memory.

float64, random directions, every argument that is an array. An order's truth is the oracle where it has one: the tangent is
the transpose of its gradient, and a difference of its gradients is their tangent.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import CASES, MIXES, SINGLES, Sizes, qkv, split
from conftest import GRADIENTS, cotangents, in_group, oracle_arguments, true_case
from jax.extend.core import jaxprs_in_params
from jax.test_util import check_grads
from test_memory import KINDS, MIB, _kinds, call, compiled, quadratic

import memeff

slow = pytest.mark.slow
EVERY = SINGLES + MIXES
FEW = tuple(
    name
    for name in EVERY
    if name in {*MIXES[::3], "everything", "bias_full", "scale_array", "q_offset_array"}
)
REST = tuple(name for name in EVERY if name not in FEW)


def floats_of(args, kwargs):
    """What has a derivative, as a dictionary, and the other keyword arguments."""
    floats = dict(zip(GRADIENTS, args, strict=False)) | {
        n: x for n, x in kwargs.items() if n in GRADIENTS[3:]
    }
    floats = {n: x for n, x in floats.items() if isinstance(x, np.ndarray)}
    return floats, {n: x for n, x in kwargs.items() if n not in floats}


def directions(floats, seed=0):
    rng = np.random.default_rng(seed)
    along = {n: np.asarray(rng.standard_normal(x.shape), x.dtype) for n, x in floats.items()}
    return {n: np.where(np.isfinite(floats[n]), x, 0).astype(x.dtype) for n, x in along.items()}


def attend(static, arrays, floats, **override):
    floats = dict(floats)
    args = [floats.pop(n) for n in GRADIENTS[:3]]
    return memeff.dot_product_attention(
        *args, **floats, **arrays, **static | override, return_residual=True
    )


def run(names, order, **override):
    """{name: order(attention, floats, directions, cotangents)}, in one program."""
    calls, statics = {}, {}
    for name in names:
        args, kwargs = CASES[name].inputs(np.float64)
        floats, rest = floats_of(args, kwargs)
        statics[name], arrays = split(rest)
        calls[name] = arrays, floats, directions(floats), cotangents(args, "float64")

    def program(calls):
        return {
            name: order(functools.partial(attend, statics[name], arrays, **override), *of)
            for name, (arrays, *of) in calls.items()
        }

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(program)(calls))


# ---- how much there is to do


def products(f, *args) -> int:
    """Multiplications in the matrix products of a program without loops."""

    def of(jaxpr):
        total = 0
        for eqn in jaxpr.eqns:
            assert (
                eqn.primitive.name not in ("while", "cond") and eqn.params.get("length", 1) == 1
            ), eqn.primitive
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                x = eqn.invars[0].aval.shape
                total += eqn.outvars[0].aval.size * int(np.prod([x[dim] for dim in contracted]))
            total += sum(of(inner) for inner in jaxprs_in_params(eqn.params))
        return total

    return of(jax.make_jaxpr(f)(*args).jaxpr)


def test_out_and_its_tangent_are_made_in_one_walk():
    """Of three times the products of the forward: (1) once, and its derivative by either factor; so for (5)."""
    x = jnp.ones((1, 32, 2, 8), jnp.bfloat16)  # one tile, and no check of a fixed reference
    f = functools.partial(memeff.dot_product_attention, is_causal=True)
    jvp = lambda *x: jax.jvp(f, x, x)
    wanted = 3 * products(f, x, x, x)
    assert products(jvp, x, x, x) == products(jax.jit(jvp), x, x, x) == wanted
    assert products(lambda *x: jax.jvp(jax.checkpoint(f), x, x), x, x, x) == wanted


# ---- first order, forward


def _tangent(f, floats, along, _):
    return jax.jvp(f, (floats,), (along,))[1]


@functools.cache
def tangents(names):
    return run(names, _tangent)


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=slow) for name in EVERY]
)
def test_tangent_is_the_transpose_of_the_oracles_gradient(name):
    """<cotangents, jvp(v)> = <gradients, v>."""
    dout, dlse = tangents(in_group(name, FEW if name in FEW else REST))[name]
    args, kwargs = CASES[name].inputs(np.float64)
    floats, _ = floats_of(args, kwargs)
    cout, clse = cotangents(args, "float64")
    gradients = true_case(name, "float64").grads
    pairs = [(gradients[n], x) for n, x in directions(floats).items()]
    terms = np.concatenate([(a * b).ravel() for a, b in pairs])
    back = np.concatenate([(cout * dout).ravel(), (clse * dlse).ravel()])
    assert np.isfinite(back).all()
    assert abs(back.sum() - terms.sum()) <= 1e-12 * (np.abs(back).sum() + np.abs(terms).sum())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("size", [1, 8])
def test_tangent_in_few_bits(dtype, size):
    """Errs at most 1.5 times as much as the plain computation's tangent in the same dtype."""
    z = Sizes(B=1, T=97, S=131, K=2, G=2, H=16, D=8)
    args = [
        x * s
        for x, s in zip(qkv(np.random.default_rng(0), np.float64, z), (size, 1, 1), strict=True)
    ]
    args = [np.asarray(x, jnp.dtype(dtype)) for x in args]
    along = [np.asarray(x, jnp.dtype(dtype)) for x in qkv(np.random.default_rng(1), np.float64, z)]

    def tangent(args, along, implementation):
        f = functools.partial(
            memeff.dot_product_attention, is_causal=True, implementation=implementation
        )
        f = functools.partial(f, return_residual=True, chunk_size=(32, 48))
        return [
            np.asarray(x, np.float64)
            for x in jax.jit(lambda x, dx: jax.jvp(f, x, dx)[1])(tuple(args), tuple(along))
        ]

    with jax.enable_x64(True):
        true = tangent(
            *([np.asarray(x, np.float64) for x in xs] for xs in (args, along)), "reference"
        )
    for actual, plain, exact in zip(
        tangent(args, along, None), tangent(args, along, "reference"), true, strict=True
    ):
        eps = {"float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}[dtype] * max(1, abs(exact).max())
        assert abs(actual - exact).max() <= 1.5 * abs(plain - exact).max() + eps


def test_what_nobody_sees_moves_nothing():
    """NaN and Inf in hidden keys and values, and in their tangents, reach no tangent; a seen one reaches its rows."""
    z = Sizes(B=1, T=9, S=13, K=1, G=2, H=3, D=5)
    q, k, v = qkv(np.random.default_rng(0), np.float32, z)
    dq, dk, dv = qkv(np.random.default_rng(1), np.float32, z)
    f = functools.partial(
        memeff.dot_product_attention, is_causal=True, key_value_seq_lengths=np.array([7])
    )
    clean = jax.jvp(f, (q, k, v), (dq, dk, dv))
    for x in (k, v, dk, dv):
        x[:, 7:] = np.array([np.nan, np.inf, -np.inf, np.nan, 1e38, np.nan]).reshape(6, 1, 1)
    for a, b in zip(clean, jax.jvp(f, (q, k, v), (dq, dk, dv)), strict=True):
        np.testing.assert_array_equal(a, b)
    for x in (k, v, dk, dv):
        x[:, 7:] = 0
    dv[:, 3, 0, 2] = np.nan
    bad = np.isnan(jax.jvp(f, (q, k, v), (dq, dk, dv))[1])
    assert bad[:, 3:, :, 2].all() and bad.sum() == bad[:, 3:, :, 2].size


# ---- second order


def _forward_over_reverse(f, floats, along, ct):
    return jax.jvp(lambda x: jax.vjp(f, x)[1](ct)[0], (floats,), (along,))[1]


def _reverse_over_forward(f, floats, along, ct):
    return jax.vjp(lambda x: jax.jvp(f, (x,), (along,))[1], floats)[1](ct)[0]


def _reverse_over_reverse(f, floats, along, ct):
    return jax.vjp(lambda x, ct: jax.vjp(f, x)[1](ct)[0], floats, ct)[1](along)


SECOND = {
    f.__name__[1:]: f for f in (_forward_over_reverse, _reverse_over_forward, _reverse_over_reverse)
}


@functools.cache
def second(names, order, implementation=None):
    return run(
        names,
        SECOND[order],
        **{} if implementation is None else dict(implementation=implementation),
    )


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=slow) for name in EVERY]
)
@pytest.mark.parametrize(
    "order", ["forward_over_reverse", *(pytest.param(x, marks=slow) for x in [*SECOND][1:])]
)
def test_second_order_against_the_definition(order, name):
    names = in_group(name, FEW, 4) if name in FEW else (name,)
    actual, plain = second(names, order)[name], second(names, order, "reference")[name]
    assert jax.tree.structure(actual) == jax.tree.structure(plain)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(plain), strict=True):
        assert np.abs(x - y).max(initial=0) <= 1e-9 * max(1, np.abs(y).max(initial=0))


@pytest.mark.parametrize("name", FEW)
def test_tangent_of_gradient_is_a_difference_of_the_oracles(name):
    """Fourth order in the step: with 1e-3 its own error is some 1e-10 of the third derivatives."""
    actual = second(in_group(name, FEW, 4), "forward_over_reverse")[name]
    args, kwargs = CASES[name].inputs(np.float64)
    floats, rest = floats_of(args, kwargs)
    along, (dout, dlse) = directions(floats), cotangents(args, "float64")

    def gradients(step):
        x = {n: value + step * along[n] for n, value in floats.items()}
        call = oracle_arguments(
            args, rest | {n: x[n] for n in x if n not in GRADIENTS[:3]}, "float64"
        )
        return oracle.gradients(*(x[n] for n in GRADIENTS[:3]), **call, dout=dout, dlse=dlse)

    h = 1e-3
    at = {step: gradients(step * h) for step in (-2, -1, 1, 2)}
    for n, x in actual.items():
        wanted = (8 * (at[1][n] - at[-1][n]) - (at[2][n] - at[-2][n])) / (12 * h)
        assert np.abs(x - wanted).max() <= 1e-7 * max(1, np.abs(wanted).max()), n


# ---- higher orders


def _tiny():
    rng = np.random.default_rng(3)
    q, k, v, *along = (
        rng.standard_normal(shape) for shape in [(1, 5, 2, 3), (1, 7, 1, 3), (1, 7, 1, 2)] * 2
    )
    bias, dbias = rng.standard_normal((2, 1, 1, 7))
    return dict(query=q, key=k, value=v, bias=bias), dict(
        zip(GRADIENTS, [*along, dbias], strict=False)
    )


def _along(modes: str, implementation):
    """d^n/ds^n of a loss at x + s v, each order in forward (f) or reverse (r) mode; the last letter is the innermost."""
    floats, along = _tiny()

    def loss(s):
        x = {n: x + s * along[n] for n, x in floats.items()}
        out, lse = attend(
            dict(is_causal=True, q_offset=1, chunk_size=(3, 4)),
            {},
            x,
            implementation=implementation,
        )
        return jnp.sin(out).sum() + jnp.cos(lse).sum()

    forward = lambda f: lambda s: jax.jvp(f, (s,), (jnp.ones_like(s),))[1]
    for mode in reversed(modes):
        loss = forward(loss) if mode == "f" else jax.grad(loss)
    with jax.enable_x64(True):
        return float(jax.jit(loss)(jnp.float64(0.1)))


THIRD = [x for x in map("".join, itertools.product("fr", repeat=3)) if x not in ("frf", "rrf")]


FIFTH = "fffff", "rfrfr", "frfrf", "ffrrr"


@pytest.mark.parametrize(
    "modes", ["frf", "rrf", *(pytest.param(modes, marks=slow) for modes in (*THIRD, *FIFTH))]
)
def test_orders_and_mixtures(modes):
    actual, plain = (_along(modes, implementation) for implementation in (None, "reference"))
    assert abs(actual - plain) <= 1e-9 * max(1, abs(plain))


def test_check_grads_to_second_order():
    floats, _ = _tiny()
    f = functools.partial(attend, dict(is_causal=True, q_offset=1, chunk_size=(3, 4)), {})
    with jax.enable_x64(True):
        check_grads(jax.jit(f), (floats,), order=2, modes=("fwd", "rev"), atol=1e-5, rtol=1e-5)


# ---- memory


def orders(forward):
    """Compiled calls take the query's shape for cotangents and directions as well."""

    def tangent(q, k, v, arrays):
        return jax.jvp(lambda *x: forward(*x, arrays), (q, k, v), (q, k, v))

    def gradient(q, k, v, arrays):
        return jax.vjp(lambda *x: forward(*x, arrays), q, k, v)[1](q)

    def over_reverse(q, k, v, arrays):
        return jax.jvp(lambda *x: gradient(*x, arrays), (q, k, v), (q, k, v))[1]

    def of_gradient(q, k, v, arrays):
        return jax.vjp(lambda *x: gradient(*x, arrays), q, k, v)[1]((q, k, v))

    return {"jvp": tangent, "hvp": over_reverse, "grad of grad": of_gradient}


@functools.cache
def program(kind, order, T, N=4):
    forward, shapes = call(T, **_kinds(T, N)[kind], N=N)
    return compiled(orders(forward)[order], shapes)


@pytest.mark.parametrize("order, limit", [("jvp", 30), ("hvp", 60), ("grad of grad", 140)])
def test_memory_of_one_head_at_32k(order, limit):
    found = program("causal", order, 32768, 1).memory_analysis().temp_size_in_bytes / MIB
    assert found <= limit, f"{found:.1f} MiB"


SOME = "causal", "bias row"


@pytest.mark.parametrize(
    "kind", [kind if kind in SOME else pytest.param(kind, marks=slow) for kind in KINDS]
)
@pytest.mark.parametrize(
    "order", [pytest.param("jvp", marks=slow), pytest.param("hvp", marks=slow), "grad of grad"]
)
def test_memory_of_orders_grows_with_the_sequence(kind, order):
    once, twice = (
        program(kind, order, T).memory_analysis().temp_size_in_bytes for T in (16384, 32768)
    )
    assert twice <= 2.15 * once, f"{once / MIB:.1f} MiB, twice the tokens {twice / MIB:.1f} MiB"
    found = quadratic(program(kind, order, 16384).as_text(), 16384)
    assert not found, found
