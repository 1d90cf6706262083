"""The tangent's Hopper kernel without a GPU: in Mosaic's interpreter, against the oracle, by the law of tolerance.

Plain is the reference, differentiated by JAX. Around the kernel (vmap, devices, other transformations) plain JAX stands in
for it.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_hopper
import test_hopper_functions
from cases import Sizes, accumulator
from conftest import assert_as_good, oracle_arguments
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_hopper import bf16, draw, f32, i32, kernels, lowered, small, stand_in

import memeff
from memeff import attention_ad, dot_product_attention, masks, scores, tile_sizes
from memeff.device import pretend_device
from memeff.user_functions import Mask

pytestmark = pytest.mark.skipif(
    jax.__version__.startswith("0.10."), reason="kernels need jax 0.11, and this is 0.10"
)
slow = pytest.mark.slow
# in the interpreter
infinite = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in")


@contextlib.contextmanager
def interpreted(**how):
    """Without types that are known before a trace, for the interpreter has effects."""
    with test_hopper.interpreted(**how), pytest.MonkeyPatch.context() as patch:
        patch.delattr(attention_ad.Tangent, "types")
        yield


def directions(args):
    return tuple(
        np.random.default_rng(7 + n).standard_normal(x.shape).astype(x.dtype)
        for n, x in enumerate(args)
    )


def jvp(args, along, kwargs, implementation="pallas", **functions):
    """out and lse, and their tangents; what is None in `along` does not move."""
    moving = [n for n, dx in enumerate(along) if dx is not None]

    def call(*parts):
        put = dict(zip(moving, parts, strict=True))
        how = dict(implementation=implementation, return_residual=True) | functions
        return dot_product_attention(*(put.get(n, x) for n, x in enumerate(args)), **kwargs, **how)

    run = jax.jit(lambda x, dx: jax.jvp(call, x, dx))
    return jax.tree.map(np.asarray, run(*(tuple(x[n] for n in moving) for x in (args, along))))


def assert_right(found, args, along, kwargs, dtype, name):
    """Tangents `found`, by the law."""
    zeros = [np.zeros_like(x) if dx is None else dx for x, dx in zip(args, along, strict=True)]
    how = oracle_arguments(args, kwargs, dtype)
    (dout, dlse), lse = oracle.tangent(*args, along=zeros, **how), oracle.attention(*args, **how)[1]
    _, plain = jvp(args, along, kwargs, "reference")
    assert_as_good(found[0], [plain[0]], dout, dtype, f"{name}: tangent of out")
    # lse is one float here: it errs by 1e-7 |lse|, and so does each probability
    size = 0.1 * np.abs(np.where(np.isfinite(lse), lse, 0) * dlse).max()
    assert_as_good(
        found[1], [plain[1]], dlse, accumulator(jnp.dtype(dtype)), f"{name}: tangent of lse", size
    )


CASES = test_hopper.CASES | {
    "full": (small(T=70, S=400), {}),  # c from a tile without a mask
    "few see something": (small(T=130, S=300, H=128, D=128), dict(is_causal=True, q_offset=-100)),
}


@pytest.mark.parametrize("name", [x if x == "128" else pytest.param(x, marks=slow) for x in CASES])
def test_values(name):
    z, kwargs = CASES[name]
    args = draw(bf16, z)
    along = directions(args)
    with interpreted():
        found = jvp(args, along, kwargs)[1]
    assert_right(found, args, along, kwargs, "bfloat16", name)


@slow
def test_float16():
    args = draw(np.float16, small(T=130, S=130, G=2))
    along = directions(args)
    with interpreted():
        found = jvp(args, along, dict(is_causal=True))[1]
    assert_right(found, args, along, dict(is_causal=True), "float16", "float16")


@slow
@infinite
@pytest.mark.parametrize("name", CASES)
def test_what_nobody_sees_changes_no_bit_of_any_case(name):
    """Whatever is in keys, values and queries of no pair, and in their tangents."""
    z, kwargs = CASES[name]
    args = draw(bf16, z)
    along, masks = (
        directions(args),
        {x: y for x, y in kwargs.items() if x not in ("logits_soft_cap", "scale", "sinks")},
    )
    seen, given = oracle.seen_by(*args[:2], **masks), test_hopper.cotangents(args, bf16)
    dirty, _, some = test_hopper.unseen_filled(args, seen, given)
    if not some:
        return
    dirty_along = test_hopper.unseen_filled(along, seen, given)[0]
    with interpreted():
        clean, found = jvp(args, along, kwargs), jvp(dirty, dirty_along, kwargs)
    for x, y in zip(jax.tree.leaves(clean), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(f32(x), f32(y))


SUBSETS = "value", "query", "key", "query value", "key value", "query key"


@slow
@pytest.mark.parametrize("moving", SUBSETS)
def test_what_does_not_move_has_no_part(moving):
    args = draw(bf16, small(T=70, S=130, G=2))
    along = [
        x if name in moving.split() else None
        for x, name in zip(directions(args), ("query", "key", "value"), strict=True)
    ]
    with interpreted():
        found = jvp(args, along, dict(is_causal=True))[1]
    assert_right(found, args, along, dict(is_causal=True), "bfloat16", moving)


@slow
@infinite
@pytest.mark.parametrize("name", test_hopper_functions.CASES)
def test_functions_of_the_users(name):
    with interpreted():
        assert_function(name)


def assert_function(name):
    """On whatever device there is."""
    case = test_hopper_functions.CASES[name]
    args, at, how = draw(case.dtype, case.z), test_hopper_functions.pairs(case), dict(case.how)
    along = directions(args)
    _, found = jvp(args, along, how, **case.functions(case.params))
    if case.bias is not None:
        how["bias"] = np.asarray(case.bias(np.asarray(case.params, np.float64), *at), f32)
    if case.mask is not None:
        how["mask"] = case.mask(*at)
    assert_right(found, args, along, how, jnp.dtype(case.dtype).name, name)


@slow
@infinite
@pytest.mark.parametrize("name", test_hopper_functions.BLOCKED)
def test_block_masks_drive_the_loops(name):
    """As the chunked path has it by the mask itself."""
    mask, how, z = test_hopper_functions.BLOCKED[name]
    args = draw(bf16, z)
    along, block = directions(args), memeff.block_mask(mask, z.T, z.S, block_size=64)
    with interpreted():
        found = jvp(args, along, how, mask_fn=block)[1]
    for x, y in zip(found, jvp(args, along, how, "xla", mask_fn=mask)[1], strict=True):
        np.testing.assert_allclose(f32(x), f32(y), atol=2e-2)


@slow
def test_a_soft_cap_of_the_users():
    """Whose derivative is no number: against the kernels' own."""
    args = draw(bf16, small(T=70, S=140))
    along = directions(args)
    with interpreted():
        found = jvp(args, along, {}, score_fn=scores.soft_cap(1.5))[1]
    assert_right(found, args, along, dict(logits_soft_cap=1.5), "bfloat16", "soft cap")


@pytest.mark.parametrize(
    "how", [dict(is_causal=True), pytest.param({}, marks=slow)], ids=["causal", "full"]
)
def test_what_a_row_has_in_common_takes_no_bits(how):
    """All keys move along one direction, far more than each by itself: only lse feels it."""
    query, key, value = draw(bf16, small(T=150, S=150))
    dq, dk, dv = directions((query, key, value))
    dk = (dk + 40 * dk[:, :1]).astype(bf16)
    with interpreted():
        found = jvp((query, key, value), (dq, dk, dv), how)[1]
    assert_right(found, (query, key, value), (dq, dk, dv), how, "bfloat16", "common")


# ---- what nobody sees, and what is seen


def hide(arrays, hidden, bad):
    """Copies, with what is `bad` in hidden tokens."""
    found = [x.copy() for x in arrays]
    for x in found:
        x[hidden] = bf16(bad)
    return found


@infinite
@pytest.mark.parametrize(
    "bad", [np.nan, pytest.param(np.inf, marks=slow), pytest.param(3e38, marks=slow)]
)
def test_what_nobody_sees_changes_no_bit(bad):
    args = query, key, value = draw(bf16, small(T=60, S=200))
    along = dq, dk, dv = directions(args)
    how = dict(
        query_seq_lengths=i32([50]), key_value_seq_lengths=i32([145]), is_causal=True, q_offset=120
    )
    hidden = np.s_[:, 145:], np.s_[:, 50:]
    (key, dk, value, dv), (query, dq) = (
        hide((key, dk, value, dv), hidden[0], bad),
        hide((query, dq), hidden[1], bad),
    )
    with interpreted():
        clean, found = jvp(args, along, how), jvp((query, key, value), (dq, dk, dv), how)
    for x, y in zip(jax.tree.leaves(clean), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(f32(x), f32(y))


@slow
@infinite
def test_what_a_mask_hides_changes_no_bit():
    hidden = np.isin(np.arange(200), [3, 77, 78, 150, 199])
    how = dict(
        score_fn=scores.alibi(np.array([0.1], f32)),
        mask_fn=Mask(lambda b, h, i, j, p: p[j], ~hidden),
    )
    args = query, key, value = draw(bf16, small(T=70, S=200))
    along = dq, dk, dv = directions(args)
    key, dk, value, dv = hide((key, dk, value, dv), np.s_[:, hidden], np.nan)
    with interpreted():
        clean, found = (
            jvp(args, along, {}, **how),
            jvp((query, key, value), (dq, dk, dv), {}, **how),
        )
    for x, y in zip(jax.tree.leaves(clean), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(f32(x), f32(y))


@slow
@infinite
@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_a_tangent_that_is_not_finite_reaches_who_sees_it(what):
    args = draw(bf16, small(T=200, S=200))
    along = directions(args)
    along[("query", "key", "value").index(what)][:, 150, :, 5] = np.nan
    with interpreted():
        dout, dlse = map(np.isnan, jvp(args, along, dict(is_causal=True))[1])
    rows = {"query": np.s_[:, 150:151], "key": np.s_[:, 150:], "value": np.s_[:, 150:, :, 5]}[what]
    expected = np.zeros(dout.shape, bool)
    expected[rows] = True
    np.testing.assert_array_equal(dout, expected)
    np.testing.assert_array_equal(dlse, expected[..., 0])


# ---- around the kernel


def plain_stands_in(monkeypatch):
    """The contracts of the kernels that a jvp runs, in plain JAX, causal."""
    from memeff.pallas.hopper import calls

    def tangents(problem, lengths, arrays, scalars, tiling, shared):
        (T, S), G = lengths, arrays.query.shape[2] // arrays.key.shape[2]
        of_queries = [
            None if x is None else x[:, :T] for x in (arrays.query, arrays.dq, arrays.out)
        ]
        of_keys = (arrays.key, arrays.dk, arrays.value, arrays.dv)
        (q, dq, out), (k, dk, v, dv) = (
            of_queries,
            (None if x is None else jnp.repeat(x[:, :S], G, 2) for x in of_keys),
        )
        product = lambda x, y: (
            0 if x is None or y is None else jnp.einsum("btnh,bsnh->bnts", x, y) * problem.scale
        )
        mix = lambda p, x: 0 if x is None else jnp.einsum("bnts,bsnd->btnd", p, x)
        seen = jnp.tril(jnp.ones((T, S), bool))
        p = jnp.where(seen, jnp.exp(product(q, k) - arrays.lse[..., :T, None] / np.log2(np.e)), 0)
        w = p * (product(dq, k) + product(q, dk))
        r = w.sum(-1)
        dout = mix(w, v) + mix(p, dv) - (0 if out is None else r.swapaxes(1, 2)[..., None] * out)
        return dout.astype(q.dtype), jnp.pad(r, [(0, 0), (0, 0), (0, -T % tiling.own)]).astype(f32)

    stand_in(monkeypatch)
    monkeypatch.setattr(calls, "tangents", tangents)
    monkeypatch.setattr("memeff.pallas.hopper.implementation.why_not", lambda *_: None)
    monkeypatch.setattr("memeff.chunked.implementation.tangent", None)  # not taken


ALWAYS = Sizes(B=2, T=7, S=7, K=2, G=2, H=8, D=8)


def attend(*args, implementation):
    return dot_product_attention(
        *args, is_causal=True, return_residual=True, implementation=implementation
    )


TRANSFORMED = {
    "jvp": lambda f: lambda x, dx: jax.jvp(f, x, dx),
    "linearize": lambda f: lambda x, dx: jax.linearize(f, *x)[1](*dx),
    "vmap of tangents": lambda f: (
        lambda x, dx: jax.vmap(lambda s: jax.jvp(f, x, jax.tree.map(lambda t: s * t, dx)))(
            jnp.arange(3, dtype=x[0].dtype)
        )
    ),
    "vmap of queries": lambda f: (
        lambda x, dx: jax.vmap(
            lambda q: jax.jvp(lambda q: f(q, *x[1:]), (q,), (dx[0],)),
        )(jnp.stack([x[0], 2 * x[0]]))
    ),
    "jacfwd": lambda f: (
        lambda x, dx: jax.jacfwd(lambda s: f(x[0] + s[0] * dx[0], x[1] + s[1] * dx[1], x[2]))(
            jnp.ones(2, x[0].dtype)
        )
    ),
    "hvp": lambda f: (
        lambda x, dx: jax.jvp(
            jax.grad(lambda *x: (f(*x)[0].astype(f32) ** 2).sum(), (0, 1, 2)), x, dx
        )
    ),
    "remat": lambda f: lambda x, dx: jax.jvp(jax.checkpoint(f), x, dx),
    "scan": lambda f: (
        lambda x, dx: jax.jvp(
            lambda *x: jax.lax.scan(lambda q, _: f(q, *x[1:]), x[0], length=2), x, dx
        )
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name, monkeypatch):
    args = draw(f32, ALWAYS)
    along = directions(args)
    transformed = lambda implementation: TRANSFORMED[name](
        functools.partial(attend, implementation=implementation)
    )
    expected = jax.jit(transformed("xla"))(args, along)
    plain_stands_in(monkeypatch)
    with pretend_device("gpu", "9.0"):
        found = jax.jit(transformed("pallas"))(args, along)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_devices_run_their_own_part(axis_type, monkeypatch):
    """Batch and heads sharded: without a word."""
    monkeypatch.setattr(tile_sizes, "may_be_sharded", lambda: True)
    args = draw(f32, Sizes(B=2, T=37, S=37, K=4, G=2, H=8, D=8))
    along = directions(args)
    expected = jax.jit(TRANSFORMED["jvp"](functools.partial(attend, implementation="xla")))(
        args, along
    )
    plain_stands_in(monkeypatch)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    arrays = jax.device_put((args, along), NamedSharding(mesh, P("x", None, "y")))
    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        run = jax.jit(TRANSFORMED["jvp"](functools.partial(attend, implementation="pallas")))
        found, text = run(*arrays), run.lower(*arrays).compile().as_text()
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5)
        assert x.sharding.spec[0] == "x"
    assert "all-" not in text and "collective-" not in text


def along(f):
    return lambda *x: jax.jvp(f, x, x)


@pytest.mark.parametrize("H", [pytest.param(64, marks=slow), 128, pytest.param(200, marks=slow)])
def test_calls_lower_for_cuda(H):
    """Forward and tangent; of wide heads, the tangent is the chunked path's."""
    x = jax.ShapeDtypeStruct((2, 1000, 4, H), bf16)
    assert kernels(
        lowered(along(functools.partial(dot_product_attention, is_causal=True)), x, x, x)
    ) == 1 + (H <= 128)


@slow
def test_calls_with_functions_lower_for_cuda():
    """Of what moves scores the tangent is the chunked path's; and that of a gradient, but for those of out and lse."""
    x, slopes = jax.ShapeDtypeStruct((2, 1000, 4, 64), bf16), jax.ShapeDtypeStruct((4,), f32)
    how = dict(mask_fn=masks.causal(), implementation="pallas")
    scored = lambda slopes, *x: dot_product_attention(*x, **how, score_fn=scores.alibi(slopes))
    assert (
        kernels(
            lowered(
                lambda slopes, *x: along(functools.partial(scored, slopes))(*x), slopes, x, x, x
            )
        )
        == 2
    )
    assert kernels(lowered(along(scored), slopes, x, x, x)) == 1
    gradient = jax.grad(lambda *x: dot_product_attention(*x).astype(f32).sum(), (0, 1, 2))
    assert kernels(lowered(along(gradient), x, x, x)) == 4


@slow
def test_transformations_lower_for_cuda():
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), bf16)
    tangent = along(functools.partial(dot_product_attention, is_causal=True))
    of_tangents = lambda q, k, v, dx: jax.vmap(
        lambda dq: jax.jvp(lambda q: dot_product_attention(q, k, v), (q,), (dq,))[1]
    )(dx)
    assert kernels(lowered(of_tangents, x, x, x, x.update(shape=(3, *x.shape)))) == 2
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    spec = P("x", None, "y")
    assert (
        kernels(
            lowered(
                jax.shard_map(tangent, mesh=mesh, in_specs=spec, out_specs=(spec,) * 2), x, x, x
            )
        )
        == 2
    )

    def layers(x):
        step = jax.checkpoint(lambda x, _: (dot_product_attention(x, x, x), None))
        return jax.lax.scan(step, x, length=5)[0]

    assert kernels(lowered(along(layers), x)) == 2
