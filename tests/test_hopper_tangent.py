"""The tangent's Hopper kernel, against the oracle, by the law of tolerance; and transformations.

The kernel runs in Mosaic's interpreter. Plain is the reference, differentiated by JAX. Under
transformations and on several devices, plain JAX stands in for the kernel.
"""

import contextlib
import functools

import hopper_cases
import hopper_function_cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Sizes, accumulator
from conftest import assert_as_good, few, oracle_arguments
from hopper_cases import (
    bf16,
    draw,
    f32,
    kernels,
    lowered,
    needs_kernels,
    not_finite,
    small,
)
from hopper_stand_ins import accept_all_calls, let_arrays_be_sharded, use_plain_kernels
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_calls import assert_close

import memeff
from memeff import attention_ad, dot_product_attention, masks, scores
from memeff.device import pretend_device

pytestmark = needs_kernels
slow = pytest.mark.slow


# ---- running, and the law


@contextlib.contextmanager
def interpreted(**options):
    """Run kernels in the interpreter, without types that are known before a trace.

    The interpreter has effects, so its types are known only by tracing.
    """
    with hopper_cases.interpreted(**options), pytest.MonkeyPatch.context() as patch:
        patch.delattr(attention_ad.Tangent, "types")
        yield


def directions(args):
    """Return random tangents of query, key and value."""
    tangents = []
    for n, x in enumerate(args):
        rng = np.random.default_rng(7 + n)
        tangents.append(rng.standard_normal(x.shape).astype(x.dtype))
    return tuple(tangents)


def jvp(args, along, kwargs, implementation="pallas", **functions):
    """Return (out, lse), and their tangents; an argument that is None in `along` does not move."""
    moving = [n for n, dx in enumerate(along) if dx is not None]

    def call(*parts):
        moved = dict(zip(moving, parts, strict=True))
        query, key, value = (moved.get(n, x) for n, x in enumerate(args))
        options = dict(implementation=implementation, return_residual=True) | functions
        return dot_product_attention(query, key, value, **kwargs, **options)

    run = jax.jit(functools.partial(jax.jvp, call))
    primals = tuple(args[n] for n in moving)
    tangents = tuple(along[n] for n in moving)
    return jax.tree.map(np.asarray, run(primals, tangents))


def interpreted_tangents(args, along, kwargs, **functions):
    """Return the tangents of out and lse from the interpreter."""
    with interpreted():
        return jvp(args, along, kwargs, **functions)[1]


def assert_right(tangents, args, along, kwargs, dtype, name):
    """Compare the tangents of out and lse with the oracle."""
    along_all = []
    for x, dx in zip(args, along, strict=True):
        along_all.append(np.zeros_like(x) if dx is None else dx)
    options = oracle_arguments(args, kwargs, dtype)
    dout, dlse = oracle.tangent(*args, along=along_all, **options)
    _, lse, *_ = oracle.attention(*args, **options)
    _, (plain_dout, plain_dlse) = jvp(args, along, kwargs, "reference")
    assert_as_good(tangents[0], [plain_dout], dout, dtype, f"{name}: tangent of out")
    # lse is one float here: it errs by 1e-7 |lse|, and so does each probability
    finite_lse = np.where(np.isfinite(lse), lse, 0)
    size = 0.1 * np.abs(finite_lse * dlse).max()
    lse_dtype = accumulator(jnp.dtype(dtype))
    assert_as_good(tangents[1], [plain_dlse], dlse, lse_dtype, f"{name}: tangent of lse", size)


# ---- values

CASES = hopper_cases.CASES | {
    "full": (small(T=70, S=400), {}),  # c from a tile without a mask
    "few see something": (small(T=130, S=300, H=128, D=128), dict(is_causal=True, q_offset=-100)),
}


@pytest.mark.parametrize("name", few(CASES, ("128",)))
def test_values(name):
    z, kwargs = CASES[name]
    args = draw(bf16, z)
    along = directions(args)
    tangents = interpreted_tangents(args, along, kwargs)
    assert_right(tangents, args, along, kwargs, "bfloat16", name)


@slow
def test_float16():
    args = draw(np.float16, small(T=130, S=130, G=2))
    along = directions(args)
    kwargs = dict(is_causal=True)
    tangents = interpreted_tangents(args, along, kwargs)
    assert_right(tangents, args, along, kwargs, "float16", "float16")


SUBSETS = "value", "query", "key", "query value", "key value", "query key"


@slow
@pytest.mark.parametrize("moving", SUBSETS)
def test_what_does_not_move_has_no_part(moving):
    args = draw(bf16, small(T=70, S=130, G=2))
    along = [
        x if name in moving.split() else None
        for x, name in zip(directions(args), ("query", "key", "value"), strict=True)
    ]
    kwargs = dict(is_causal=True)
    tangents = interpreted_tangents(args, along, kwargs)
    assert_right(tangents, args, along, kwargs, "bfloat16", moving)


@pytest.mark.parametrize(
    "kwargs", [dict(is_causal=True), pytest.param({}, marks=slow)], ids=["causal", "full"]
)
def test_what_a_row_has_in_common_takes_no_bits(kwargs):
    """A direction that all keys share changes only lse, although it is by far the largest part."""
    query, key, value = draw(bf16, small(T=150, S=150))
    dq, dk, dv = directions((query, key, value))
    dk = (dk + 40 * dk[:, :1]).astype(bf16)
    tangents = interpreted_tangents((query, key, value), (dq, dk, dv), kwargs)
    assert_right(tangents, (query, key, value), (dq, dk, dv), kwargs, "bfloat16", "common")


# ---- functions of the user


@slow
@not_finite
@pytest.mark.parametrize("name", hopper_function_cases.CASES)
def test_functions_of_the_users(name):
    with interpreted():
        assert_function(name)


def assert_function(name):
    """Compare a case of hopper_function_cases.py with the oracle, on whatever device there is."""
    case = hopper_function_cases.CASES[name]
    args = draw(case.dtype, case.z)
    along = directions(args)
    indices = hopper_function_cases.pairs(case)
    kwargs = dict(case.kwargs)
    _, tangents = jvp(args, along, kwargs, **case.functions(case.params))
    if case.bias is not None:
        wide = np.asarray(case.params, np.float64)
        kwargs["bias"] = np.asarray(case.bias(wide, *indices), f32)
    if case.mask is not None:
        kwargs["mask"] = case.mask(*indices)
    assert_right(tangents, args, along, kwargs, jnp.dtype(case.dtype).name, name)


@slow
@not_finite
@pytest.mark.parametrize("name", hopper_function_cases.BLOCKED)
def test_block_masks_drive_the_loops(name):
    """A block mask gives what its mask gives in the chunked path."""
    mask, kwargs, z = hopper_function_cases.BLOCKED[name]
    args = draw(bf16, z)
    along = directions(args)
    block = memeff.block_mask(mask, z.T, z.S, block_size=64)
    tangents = interpreted_tangents(args, along, kwargs, mask_fn=block)
    _, expected = jvp(args, along, kwargs, "xla", mask_fn=mask)
    assert_close(tangents, expected, atol=2e-2)


@slow
def test_a_soft_cap_of_the_users():
    """A cap as score_fn, whose derivative is no number, gives what `logits_soft_cap` gives."""
    args = draw(bf16, small(T=70, S=140))
    along = directions(args)
    tangents = interpreted_tangents(args, along, {}, score_fn=scores.soft_cap(1.5))
    assert_right(tangents, args, along, dict(logits_soft_cap=1.5), "bfloat16", "soft cap")


# ---- transformations, and devices


def use_plain_tangents(monkeypatch):
    """Let plain JAX stand in for the kernels, and make the chunked path's tangent fail."""
    use_plain_kernels(monkeypatch)
    accept_all_calls(monkeypatch)
    monkeypatch.setattr("memeff.chunked.implementation.tangent", None)


def attend(*args, implementation):
    return dot_product_attention(
        *args, is_causal=True, return_residual=True, implementation=implementation
    )


def tangents_by_linearize(f, x, dx):
    return jax.linearize(f, *x)[1](*dx)


def tangents_of_scaled_directions(f, x, dx):
    def scaled(s):
        return jax.jvp(f, x, tuple(s * t for t in dx))

    return jax.vmap(scaled)(jnp.arange(3, dtype=x[0].dtype))


def tangents_of_two_queries(f, x, dx):
    query, key, value = x
    dq, _, _ = dx

    def of_query(query):
        return f(query, key, value)

    def along_query(query):
        return jax.jvp(of_query, (query,), (dq,))

    return jax.vmap(along_query)(jnp.stack([query, 2 * query]))


def jacobian_by_steps(f, x, dx):
    query, key, value = x
    dq, dk, _ = dx

    def step(s):
        return f(query + s[0] * dq, key + s[1] * dk, value)

    return jax.jacfwd(step)(jnp.ones(2, query.dtype))


def hessian_vector_product(f, x, dx):
    def loss(*x):
        return (f(*x)[0].astype(f32) ** 2).sum()

    return jax.jvp(jax.grad(loss, (0, 1, 2)), x, dx)


def tangents_of_checkpoint(f, x, dx):
    return jax.jvp(jax.checkpoint(f), x, dx)


def tangents_of_scan(f, x, dx):
    def twice(query, key, value):
        def step(query, _):
            return f(query, key, value)

        return jax.lax.scan(step, query, length=2)

    return jax.jvp(twice, x, dx)


TRANSFORMED = {  # functions of f, its arguments and their tangents
    "jvp": jax.jvp,
    "linearize": tangents_by_linearize,
    "vmap of tangents": tangents_of_scaled_directions,
    "vmap of queries": tangents_of_two_queries,
    "jacfwd": jacobian_by_steps,
    "hvp": hessian_vector_product,
    "remat": tangents_of_checkpoint,
    "scan": tangents_of_scan,
}


def transformed(name, implementation):
    """Return the jitted transformation of `attend`, a function of arguments and tangents."""
    f = functools.partial(attend, implementation=implementation)
    return jax.jit(functools.partial(TRANSFORMED[name], f))


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name, monkeypatch):
    args = draw(f32, Sizes(B=2, T=7, S=7, K=2, G=2, H=8, D=8))
    along = directions(args)
    expected = transformed(name, "xla")(args, along)
    use_plain_tangents(monkeypatch)
    with pretend_device("gpu", "9.0"):
        results = transformed(name, "pallas")(args, along)
    assert_close(results, expected, atol=3e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_devices_run_their_own_part(axis_type, monkeypatch):
    """Devices exchange nothing where batch and heads are sharded."""
    let_arrays_be_sharded(monkeypatch)
    args = draw(f32, Sizes(B=2, T=37, S=37, K=4, G=2, H=8, D=8))
    along = directions(args)
    expected = transformed("jvp", "xla")(args, along)
    use_plain_tangents(monkeypatch)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    arrays = jax.device_put((args, along), NamedSharding(mesh, P("x", None, "y")))
    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        run = transformed("jvp", "pallas")
        results = run(*arrays)
        text = run.lower(*arrays).compile().as_text()
    assert_close(results, expected, atol=3e-5)
    for x in jax.tree.leaves(results):
        assert x.sharding.spec[0] == "x"
    assert "all-" not in text
    assert "collective-" not in text


# ---- lowered for CUDA


def with_tangent(f):
    """Return a function that gives f and its tangent along the arguments themselves."""
    return lambda *x: jax.jvp(f, x, x)


def causal(query, key, value):
    return dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("H", [pytest.param(64, marks=slow), 128, pytest.param(200, marks=slow)])
def test_calls_lower_for_cuda(H):
    """Forward and tangent are kernels; the tangent of wide heads is the chunked path's."""
    x = jax.ShapeDtypeStruct((2, 1000, 4, H), bf16)
    assert kernels(lowered(with_tangent(causal), x, x, x)) == (2 if H <= 128 else 1)


@slow
def test_calls_with_functions_lower_for_cuda():
    """The tangent of moving scores is the chunked path's.

    So is the tangent of a gradient, except for the tangents of out and lse.
    """
    x = jax.ShapeDtypeStruct((2, 1000, 4, 64), bf16)
    slopes = jax.ShapeDtypeStruct((4,), f32)

    def scored(slopes, *x):
        return dot_product_attention(
            *x, mask_fn=masks.causal(), implementation="pallas", score_fn=scores.alibi(slopes)
        )

    def along_arrays(slopes, *x):
        return with_tangent(functools.partial(scored, slopes))(*x)

    def loss(*x):
        return dot_product_attention(*x).astype(f32).sum()

    assert kernels(lowered(along_arrays, slopes, x, x, x)) == 2
    assert kernels(lowered(with_tangent(scored), slopes, x, x, x)) == 1
    gradient = jax.grad(loss, (0, 1, 2))
    assert kernels(lowered(with_tangent(gradient), x, x, x)) == 4


@slow
def test_transformations_lower_for_cuda():
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), bf16)

    def of_tangents(query, key, value, dx):
        def attend(query):
            return dot_product_attention(query, key, value)

        def along_query(dq):
            return jax.jvp(attend, (query,), (dq,))[1]

        return jax.vmap(along_query)(dx)

    assert kernels(lowered(of_tangents, x, x, x, x.update(shape=(3, *x.shape)))) == 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    spec = P("x", None, "y")
    parts = jax.shard_map(with_tangent(causal), mesh=mesh, in_specs=spec, out_specs=(spec,) * 2)
    assert kernels(lowered(parts, x, x, x)) == 2

    @jax.checkpoint
    def step(x, _):
        return dot_product_attention(x, x, x), None

    def layers(x):
        return jax.lax.scan(step, x, length=5)[0]

    assert kernels(lowered(with_tangent(layers), x)) == 2
