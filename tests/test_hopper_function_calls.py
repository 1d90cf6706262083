"""Calls of the Hopper kernels with the user's functions, without running the kernels.

The tests check what is precomputed and refused, several devices, and lowering for CUDA. Where
numbers are compared, functions in plain JAX stand in for the kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few, watch_dispatch
from hopper_cases import bf16, draw, f32, i32, kernels, lowered, needs_kernels
from hopper_function_cases import CASES, call
from hopper_stand_ins import accept_all_calls, let_arrays_be_sharded
from hopper_user_functions import TABLE, sorted_ids
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import memeff
from memeff import dot_product_attention, masks, scores, tile_sizes, transforms
from memeff.device import pretend_device
from memeff.softmax import Lse
from memeff.user_functions import Mask, Score

pytestmark = needs_kernels

X = jax.ShapeDtypeStruct((1, 512, 2, 64), bf16)


def self_attention(x, **kwargs):
    return dot_product_attention(x, x, x, **kwargs)


def trace(**kwargs):
    """Trace a call on `X`."""
    jax.eval_shape(functools.partial(self_attention, **kwargs), X)


def zeros_like_tree(tree):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


# ---- what is computed before the kernel


@pytest.mark.parametrize(
    "name, fn, before",
    [
        ("score_fn", scores.alibi(np.ones(2, f32)), (1, 0, 0, 0)),  # slopes[head]
        ("score_fn", scores.soft_cap(2.0), (2, 0, 0, 0)),  # cap, and 1 / cap
        # h > 0
        ("score_fn", lambda s, b, h, i, j, p: s + jnp.where(h > 0, i - j, 0), (1, 0, 0, 0)),
        ("mask_fn", masks.causal() & masks.sliding_window(9), (0, 0, 0, 0)),
        ("mask_fn", masks.documents(np.zeros((1, 512), np.int32)), (0, 1, 1, 0)),
        ("mask_fn", masks.block_causal(16), (0, 1, 1, 0)),  # quotients
        ("mask_fn", masks.dilated(3) | masks.prefix(i32([4])), (1, 0, 0, 0)),
        # the quotient; the kernel computes what follows from it
        ("mask_fn", lambda b, h, i, j, p: (i // 8 + h) % 2 == 0, (1, 1, 0, 0)),
        ("score_fn", scores.t5(TABLE[:, :2]), (0, 0, 0, 1)),
        ("score_fn", scores.relative(TABLE[:2, :3]), (0, 0, 0, 1)),
        # the kernel can compute all of it
        (
            "score_fn",
            lambda s, b, h, i, j, p: s + jnp.log(1 + abs(i.astype(f32) - j.astype(f32) + 3)),
            (0, 0, 0, 0),
        ),
        (
            "score_fn",
            Score(lambda s, b, h, i, j, p: s + h * p[abs(i - 2 - (j + h))], TABLE[0]),
            (0, 0, 0, 1),
        ),
        (
            "score_fn",
            Score(lambda s, b, h, i, j, p: s + p[jnp.where(i >= j + 1, i - j, 0)], TABLE[0]),
            (0, 0, 0, 1),
        ),
        ("mask_fn", Mask(lambda b, h, i, j, p: p[-(j - i)] & (i > 3), TABLE[0] > 0), (0, 0, 0, 1)),
    ],
)
def test_what_is_made_before(name, fn, before):
    """Count the precomputed numbers of each head, query, key, and difference of positions."""
    from memeff.pallas.user_functions.calls import precomputed_numbers

    with pretend_device("gpu", "9.0"), watch_dispatch() as calls:
        trace(implementation="pallas", **{name: fn})
    chosen, operands = calls[0]
    numbers = precomputed_numbers(chosen.problem, zeros_like_tree(operands))
    assert tuple(map(len, numbers)) == before


def test_room_for_differences_is_counted():
    with pretend_device("gpu", "9.0"), watch_dispatch() as calls:
        trace(score_fn=scores.t5(TABLE[:, :2]), implementation="pallas")
        chosen, operands = calls[0]
        problem, schedule, _ = chosen
        differences = 4 * 2 * (512 + 512)
        t, c = schedule.chunk_size
        forward, gradient = tile_sizes.temp_bytes(problem, schedule, operands, chosen.name)
        assert forward == differences
        assert gradient > 2 * differences + 8 * 2 * t * c


# ---- which calls are refused, and which implementation runs


def why_not(**kwargs) -> str:
    """Return why the kernels refuse a call on `X`."""
    with pretend_device("gpu", "9.0"):
        with pytest.raises(NotImplementedError) as error:
            trace(implementation="pallas", **kwargs)
    return str(error.value)


def five_differences(s, b, h, i, j, p):
    total = 0
    for n in range(5):
        total += jnp.cos(p[i - j + n])
    return s * total


def erf(s, b, h, i, j, p):
    return jax.lax.erf(s)


REFUSED = {
    "cannot read an array at query and key positions together (score_fn)": dict(
        score_fn=Score(lambda s, b, h, i, j, p: s + p[i - j, j], TABLE)
    ),
    "cannot read an array at query and key positions together (mask_fn)": dict(
        mask_fn=Mask(lambda b, h, i, j, p: p[i, j], np.ones((512, 512), bool))
    ),
    "`erf` of the score (score_fn)": dict(score_fn=erf),
    "support 4 numbers for each difference of positions, and these functions need 5": dict(
        score_fn=Score(five_differences, TABLE[0])
    ),
    "for each query, and not for each query and head": dict(
        score_fn=Score(lambda s, b, h, i, j, p: s + p[i, h], TABLE)
    ),
    "`eq` in int8 of query and key positions together (mask_fn)": dict(
        mask_fn=masks.documents(np.zeros(512, np.int8))
    ),
    'backward="fused" does not support `score_fn` and `mask_fn`': dict(
        mask_fn=masks.causal(), backward="fused"
    ),
    "support 16 numbers for each token, and these functions need 18": dict(
        mask_fn=functools.reduce(Mask.__and__, [masks.documents(np.zeros(512, np.int32))] * 9)
    ),
    "do not support `qk_transform`": dict(qk_transform=transforms.rotary()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_say_what_kernels_cannot(reason):
    assert reason in why_not(**REFUSED[reason])


def test_reasons_name_no_other_family():
    with pretend_device("gpu", "8.0"):
        explanation = memeff.explain(X, X, X, score_fn=erf)
    assert "the GPU kernels cannot compute `erf` of the score" in explanation
    assert "Hopper" not in explanation


def tanh(score, batch, head, q_pos, k_pos, params):
    return jnp.tanh(score)


def test_kernels_run_functions_where_they_can(monkeypatch):
    """Other functions run in the chunked path, with one warning."""
    monkeypatch.setattr("memeff.warn._warned", set())
    with pretend_device("gpu", "9.0"):
        for score_fn in (scores.alibi(np.ones(2, f32)), jax.jit(tanh), jax.checkpoint(tanh)):
            explanation = memeff.explain(X, X, X, score_fn=score_fn)
            assert explanation.startswith('"pallas" runs this call')
        reason = "instead of the GPU's kernels, because .*cannot compute `erf` of the score"
        with pytest.warns(UserWarning, match=reason):
            trace(score_fn=erf)
        trace(scale=2.0, score_fn=erf)


# ---- devices


@pytest.fixture
def echoing_kernels(monkeypatch):
    """Replace the kernels by functions that return the numbers of heads and queries they got."""
    from memeff.pallas.hopper import backward_key, backward_query, calls

    def attend(problem, lengths, arrays, scalars, want_lse, tiling, carried):
        query, _, value = arrays
        (slopes,) = scalars.head_numbers
        (ids,) = scalars.query_numbers
        T = query.shape[1]
        D = value.shape[-1]
        out = query * slopes[:, None, :, None] + ids[:, :T, None, None]
        lse = jnp.zeros((*slopes.shape, 128)) if want_lse else None
        return (out[..., :D],), lse

    def query_gradient(problem, lengths, arrays, dlse, scalars, tiling, if_bad):
        sums = scalars.head_numbers[0][..., None] * jnp.ones(128)
        return jnp.zeros_like(arrays[0]), jnp.zeros_like(sums), sums

    monkeypatch.setattr(calls, "attend", attend)
    monkeypatch.setattr(backward_query, "query_gradient", query_gradient)
    monkeypatch.setattr(backward_key, "key_value_gradient", no_key_value_gradient)


def no_key_value_gradient(problem, lengths, arrays, scalars, tiling, joined, if_bad):
    return jnp.zeros_like(arrays[1]), jnp.zeros_like(arrays[2])


def place(x, mesh):
    """Shard the batch and heads of an array [B, T, N, H]."""
    return jax.device_put(x, NamedSharding(mesh, P("x", None, "y")))


@pytest.mark.parametrize(
    "axis_type, mapped", [(AxisType.Auto, False), (AxisType.Auto, True), (AxisType.Explicit, False)]
)
def test_each_device_has_the_numbers_of_its_heads(axis_type, mapped, echoing_kernels, monkeypatch):
    """Each head gets its own numbers, and each number its gradient."""
    let_arrays_be_sharded(monkeypatch)
    accept_all_calls(monkeypatch)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    T = 64  # with fewer queries the decode kernel would run
    ids = np.arange(2 * T, dtype=np.int32).reshape(2, T)
    slopes = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], f32)
    if not mapped:
        slopes = slopes[0]
    query = np.ones((2, T, 4, 64), f32)

    def loss(slopes, query):
        mask_fn = Mask(lambda b, h, i, j, p: p[b, i] >= j, ids)
        score_fn = scores.alibi(slopes)
        out = self_attention(query, score_fn=score_fn, mask_fn=mask_fn, implementation="pallas")
        return out.sum(), out

    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if mapped:
        value_and_grad = jax.vmap(value_and_grad, (0, None))
    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        (_, out), grad = jax.jit(value_and_grad)(slopes, place(query, mesh))
    of_heads = slopes[..., None, None, :, None]
    of_queries = ids[:, :, None, None]
    expected = of_heads + of_queries * np.ones(query.shape)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(grad, slopes * 2 * T)


def first_half(x):
    return x[..., : x.shape[-1] // 2]


@pytest.fixture
def difference_kernels(monkeypatch):
    """Replace the kernels by functions that return the numbers of differences they got.

    Their gradients of keys are 0.
    """
    from memeff.pallas.hopper import backward_key, backward_query, calls

    def attend(problem, lengths, arrays, scalars, want_lse, tiling, carried):
        query, _, value = arrays
        (of_differences,) = scalars.difference_numbers
        lse = 9 + first_half(of_differences) if want_lse else None
        return (0.5 * query[..., : value.shape[-1]],), lse

    def query_gradient(problem, lengths, arrays, dlse, scalars, tiling, if_bad):
        return jnp.zeros_like(arrays[0]), first_half(scalars.difference_numbers[0])

    monkeypatch.setattr(calls, "attend", attend)
    monkeypatch.setattr(backward_query, "query_gradient", query_gradient)
    monkeypatch.setattr(backward_key, "key_value_gradient", no_key_value_gradient)
    accept_all_calls(monkeypatch)
    with pretend_device("gpu", "9.0"):
        yield


def t5_loss(table, query):
    out = self_attention(query, score_fn=scores.t5(table), is_causal=True, implementation="pallas")
    return (out * jnp.cos(out)).sum()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_each_device_walks_its_heads(axis_type, difference_kernels, monkeypatch):
    """The walk for the gradient of T5's table gives the same on several devices."""
    let_arrays_be_sharded(monkeypatch)
    query = np.random.default_rng(0).standard_normal((2, 16, 4, 64)).astype(f32)
    gradient = jax.jit(jax.grad(t5_loss))
    expected = gradient(TABLE, query)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    with jax.set_mesh(mesh):
        dtable = gradient(TABLE, place(query, mesh))
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(dtable, expected, rtol=1e-5, atol=1e-6)


# ---- the walk for params


@pytest.mark.parametrize("argument, walks", [(0, True), (1, False)], ids=["table", "query"])
def test_a_table_that_nobody_differentiates_costs_no_walk(argument, walks, difference_kernels):
    table = jax.ShapeDtypeStruct((32, 4), f32)
    query = jax.ShapeDtypeStruct((1, 2048, 4, 64), bf16)
    text = jax.jit(jax.grad(t5_loss, argument)).lower(table, query).compile().as_text()
    assert (" while(" in text) == (" dot(" in text) == walks


def test_a_walk_for_params_makes_no_other_products():
    """The walk makes two of the five products of a gradient."""
    from memeff.chunked import implementation as chunked

    case = CASES["t5"]
    args = draw(bf16, case.z)
    with watch_dispatch() as calls:
        jax.make_jaxpr(functools.partial(call, case, "xla", case.params))(*args)
    (problem, schedule, _), operands = calls[0]
    operands = zeros_like_tree(operands)
    out = jnp.zeros((1, 1, 2, case.z.T, 64))
    lse = Lse(jnp.zeros((1, 1, 2, case.z.T)), None)

    def count_products(function):
        function = functools.partial(function, problem, schedule, dlse=None)
        return str(jax.make_jaxpr(function)(operands, out, lse, out)).count("dot_general[")

    assert count_products(chunked.backward) == 5
    assert count_products(chunked.logit_param_gradients) == 2


# ---- lowered for CUDA

CURVES = [
    jnp.exp,
    jnp.tanh,
    jnp.log,
    jax.nn.sigmoid,
    jnp.sqrt,
    jnp.sin,
    jnp.cos,
    jax.lax.rsqrt,
    jnp.exp2,
    jnp.log2,
]


def everything_that_kernels_compute(s, b, h, i, j, p):
    """Return a score of every step that kernels compute on tiles."""
    t = 1 + jnp.abs(s)
    total = sum(curve(t) for curve in CURVES) / (t**3 + t**-2)
    total += jnp.where((i == j) ^ ~(j > 3), s, jnp.clip(s, -p[h], 1))
    total += p[jnp.clip(i - j, 0, 3)]
    total += jnp.sign(s) * ((i - j) % 7 + (i >> 1) + i // 3 - (j << 2))
    total += jnp.maximum(s, jnp.round(t))
    total += jnp.square(s)
    return total


@pytest.mark.parametrize("H", few((64, 128), (128,)))
def test_functions_lower_for_cuda(H):
    """Every step that kernels compute on tiles lowers, with its derivative."""
    x = jax.ShapeDtypeStruct((2, 1000, 4, H), bf16)

    def attend(params, query, key, value):
        return dot_product_attention(
            query,
            key,
            value,
            score_fn=everything_that_kernels_compute,
            score_params=params,
            mask_fn=masks.documents(sorted_ids(1, 1000)[0]),
            implementation="pallas",
        )

    def training(params, query, key, value, dout):
        out, pull = jax.vjp(attend, params, query, key, value)
        return out, *pull(dout)

    of_head = jax.ShapeDtypeStruct((4,), f32)
    assert kernels(lowered(training, of_head, x, x, x, x)) == 3
    if H == 64:
        mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
        specs = P(), *[P("x")] * 4
        out_specs = P("x"), P(), *[P("x")] * 3
        parts = jax.shard_map(training, mesh=mesh, in_specs=specs, out_specs=out_specs)
        assert kernels(lowered(parts, of_head, x, x, x, x)) == 3
