"""The user's functions in the Hopper kernels, without a GPU: in Mosaic's interpreter, against the oracle, which knows biases
and masks: what a score adds is a bias, with its chain rule. And what kernels refuse.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Sizes
from conftest import (
    assert_as_good,
    assert_result,
    cotangents,
    few,
    plain_call,
    true_call,
    watch_dispatch,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_hopper import (
    bf16,
    draw,
    f32,
    forward,
    i32,
    interpreted,
    kernels,
    lowered,
    not_finite,
    small,
    unseen_filled,
)

import memeff
from memeff import dot_product_attention, masks, scores, tile_sizes, transforms
from memeff.device import pretend_device
from memeff.problem import Problem
from memeff.softmax import Lse
from memeff.user_functions import Mask, Score

pytestmark = pytest.mark.skipif(
    jax.__version__.startswith("0.10."), reason="kernels need jax 0.11, and this is 0.10"
)


X = jax.ShapeDtypeStruct((1, 512, 2, 64), bf16)


class Case(NamedTuple):
    z: Sizes
    functions: Any  # of params: keyword arguments
    bias: Any = None  # of params, b, n, i, j: what is added, in NumPy
    mask: Any = None  # of b, n, i, j
    params: Any = ()  # floats
    slopes: Any = None  # of b, n, i, j: derivatives of bias by params, each [N or so, B N T S]
    how: dict[str, Any] = {}
    dtype: Any = bf16


def ids(B, length, seed=0):
    return np.sort(np.random.default_rng(seed).integers(0, 4, (B, length))).astype(np.int32)


def of_heads(slope):
    """Derivatives by the numbers of an array [N]."""
    return lambda b, n, i, j: np.stack(
        [np.where(n == h, slope(b, n, i, j), 0.0) for h in range(n.max() + 1)]
    )


def of_table(index, shape):
    """Derivatives by the numbers of an array, of which each pair has the one at `index(n, i, j)`."""

    def slopes(b, n, i, j):
        at = np.ravel_multi_index(np.broadcast_arrays(*index(n, i, j)), shape)
        return np.stack([(at == x).astype(f32) for x in range(np.prod(shape))])

    return slopes


def t5_at(n, i, j, bidirectional=True):
    """Of 32 buckets up to 100 tokens: the bounds of none that grow are near whole numbers."""
    exact, away = (8, np.abs(i - j)) if bidirectional else (16, np.maximum(i - j, 0))
    far = exact + (np.log(np.maximum(away, exact) / exact) / np.log(100 / exact) * exact).astype(
        int
    )
    bucket = np.where(away < exact, away, np.minimum(far, 2 * exact - 1))
    return bucket + np.where(bidirectional & (j > i), 16, 0), n


away = lambda b, n, i, j: -np.abs(i - j)
IDS, KEYS, QUERIES = (
    ids(2, 130),
    ids(2, 130, 1),
    np.random.default_rng(3).standard_normal(90).astype(f32),
)
OF_3 = i32([[0, 1, 2], [3, 4, 5]])
TABLE = np.random.default_rng(4).standard_normal((32, 4)).astype(f32)
ODD = np.random.default_rng(6).integers(0, 2, (2, 219)).astype(bool)
OF_KEYS = np.random.default_rng(2).integers(-3, 3, (2, 520)).astype(np.int32)

CASES = {
    "alibi": Case(
        small(T=100, S=150, K=2, G=2),
        lambda slopes: dict(score_fn=scores.alibi(slopes)),
        lambda slopes, b, n, i, j: -slopes[n] * np.abs(i - j),
        params=np.linspace(0.02, 0.3, 4).astype(f32),
        slopes=of_heads(away),
        how=dict(is_causal=True),
    ),
    "alibi, 128, float16": Case(
        small(T=130, S=130, H=128, D=100),
        lambda slopes: dict(score_fn=scores.alibi(slopes)),
        lambda slopes, b, n, i, j: -slopes[n] * np.abs(i - j),
        params=np.array([0.1], np.float16),
        slopes=of_heads(away),
        dtype=np.float16,
    ),
    "of pairs, offsets": Case(  # past the last query, too, where it is large
        small(B=2, T=70, S=200),
        lambda _: dict(
            score_fn=lambda s, b, h, i, j, p: jnp.where(
                i > j, s + 0.7 * (i - j), s - (j - i) / (h + 3)
            )
        ),
        lambda _, b, n, i, j: np.where(i > j, 0.7 * (i - j), (i - j) / (n + 3)),
        how=dict(is_causal=True, q_offset=i32([-20, 61])),
    ),
    "numbers of keys": Case(  # which come with values, also where no tile has a mask
        small(T=70, S=520),
        lambda _: dict(score_fn=Score(lambda s, b, h, i, j, p: s + p[b, j] * 0.3, OF_KEYS)),
        lambda _, b, n, i, j: OF_KEYS[b, j] * 0.3,
        how=dict(local_window_size=(None, 500)),
    ),
    "numbers of queries": Case(
        small(B=1, T=90, S=130, G=2),
        lambda numbers: dict(
            score_fn=lambda s, b, h, i, j, p: s + p[i] * jnp.sin(0.1 * j), score_params=numbers
        ),
        lambda numbers, b, n, i, j: numbers[i] * np.sin(0.1 * j),
        params=QUERIES,
        slopes=lambda b, n, i, j: np.stack(
            [np.where(i == q, np.sin(0.1 * j), 0.0) for q in range(90)]
        ),
        how=dict(local_window_size=(30, 40)),
    ),
    "t5": Case(  # with tiles before and behind the first
        small(T=70, S=400, G=2),
        lambda table: dict(score_fn=scores.t5(table, max_distance=100)),
        lambda table, b, n, i, j: table[t5_at(n, i, j)],
        params=TABLE[:, :2],
        slopes=of_table(t5_at, (32, 2)),
        how=dict(q_offset=150),
    ),
    "t5, causal, offsets": Case(
        small(B=2, T=130, S=300, K=2, G=2, H=100, D=128),
        lambda table: dict(score_fn=scores.t5(table, bidirectional=False, max_distance=100)),
        lambda table, b, n, i, j: table[t5_at(n, i, j, False)],
        params=TABLE.astype(bf16),
        slopes=of_table(functools.partial(t5_at, bidirectional=False), (32, 4)),
        how=dict(is_causal=True, q_offset=i32([-20, 161])),
    ),
    # params that the kernel for dq sums as well, and one mask that is read at them
    "differences, masked": Case(
        small(B=2, T=90, S=130, G=2),
        lambda p: dict(
            score_fn=lambda s, b, h, i, j, p: (
                s + p[5] * (0.02 * (i - j)) + (h + 1) * p[jnp.clip(i - j + 3, 0, 5)]
            ),
            score_params=p,
            mask_fn=masks.documents(IDS[:, :90], KEYS)
            | Mask(lambda b, h, i, j, p: p[b, j - i + 89], ODD),
        ),
        lambda p, b, n, i, j: p[5] * 0.02 * (i - j) + (n + 1) * p[np.clip(i - j + 3, 0, 5)],
        lambda b, n, i, j: (IDS[b, i] == KEYS[b, j]) | ODD[b, j - i + 89],
        params=TABLE[0, :1] * np.arange(1, 7, dtype=f32),
        slopes=lambda b, n, i, j: np.stack(
            [
                (n + 1) * (np.clip(i - j + 3, 0, 5) == x) + (x == 5) * 0.02 * (i - j)
                for x in range(6)
            ]
        ),
    ),
    "numbers of keys that learn": Case(
        small(T=70, S=130),
        lambda numbers: dict(
            score_fn=lambda s, b, h, i, j, p: s + p[j] * (1 + jnp.sin(0.1 * i)),
            score_params=numbers,
        ),
        lambda numbers, b, n, i, j: numbers[j] * (1 + np.sin(0.1 * i)),
        params=np.random.default_rng(5).standard_normal(130).astype(f32),
        slopes=lambda b, n, i, j: np.stack(
            [np.where(j == k, 1 + np.sin(0.1 * i), 0.0) for k in range(130)]
        ),
        how=dict(is_causal=True, q_offset=60),
    ),
    "documents": Case(
        small(B=2, T=130, S=130),
        lambda _: dict(mask_fn=masks.documents(IDS, KEYS)),
        mask=lambda b, n, i, j: IDS[b, i] == KEYS[b, j],
    ),
    "prefix": Case(
        small(B=2, T=70, S=140),
        lambda _: dict(mask_fn=masks.causal() | masks.prefix(i32([7, 100]))),
        mask=lambda b, n, i, j: (j <= i) | (j < np.array([7, 100])[b]),
    ),
    "composed": Case(
        small(T=140, S=200, H=128, D=128),
        lambda _: dict(
            mask_fn=(masks.sliding_window(40) & ~masks.dilated(3))
            | (masks.block_causal(50) & masks.dilated(7))
        ),
        mask=lambda b, n, i, j: (
            (i - 40 <= j) & (j <= i) & ((i - j) % 3 != 0)
            | (j // 50 <= i // 50) & ((i - j) % 7 == 0)
        ),
    ),
    "of heads": Case(  # the last row of the first head sees nothing
        small(T=70, S=130, G=2),
        lambda _: dict(mask_fn=lambda b, h, i, j, p: (j % (h + 2) == 1) & ((i < 69) | (h > 0))),
        mask=lambda b, n, i, j: (j % (n + 2) == 1) & ((i < 69) | (n > 0)),
    ),
    "everything": Case(
        small(B=2, T=70, S=280, G=3, H=40, D=8),
        lambda slopes: dict(
            score_fn=scores.alibi(slopes).then(
                Score(lambda s, b, h, i, j, p: s + p[b, i % 3] * h, OF_3)
            ),
            mask_fn=Mask(lambda b, h, i, j, p: p[b, j] | (j > i), OF_KEYS % 3 > 0),
        ),
        lambda slopes, b, n, i, j: -slopes[n] * np.abs(i - j) + OF_3[b, i % 3] * n,
        lambda b, n, i, j: (OF_KEYS % 3 > 0)[b, j] | (j > i),
        params=np.array([0.02, 0.1, 0.3], f32),
        slopes=of_heads(away),
        how=dict(
            local_window_size=(100, 30),
            q_offset=i32([0, 40]),
            key_value_seq_lengths=i32([280, 111]),
            query_seq_lengths=i32([70, 9]),
            logits_soft_cap=4.0,
            scale=0.2,
        ),
    ),
    "segments": Case(
        small(T=130, S=130),
        lambda _: dict(mask_fn=masks.dilated(2)),
        mask=lambda b, n, i, j: (i - j) % 2 == 0,
        how=dict(query_segment_ids=ids(1, 130, 5), is_causal=True),
    ),
}


FAST = "alibi", "t5", "everything"
BLOCKED = {  # some whole tiles, and with lengths none
    "documents": (masks.documents(np.repeat([0, 1], [330, 190])), {}, small(T=520, S=520)),
    "causal, 128": (
        masks.causal() & masks.documents(np.repeat([0, 1], [330, 70])),
        {},
        small(T=400, S=400, H=128, D=128),
    ),
    "lengths, window": (
        masks.causal() | masks.prefix(100),
        dict(key_value_seq_lengths=i32([250, 0]), local_window_size=(150, None)),
        small(B=2, T=140, S=300),
    ),
}


def call(case: Case, implementation, params, *args, **more):
    functions = case.functions(params)
    return dot_product_attention(
        *args, **functions, **case.how, **more, implementation=implementation, return_residual=True
    )


def run(case: Case, args):
    with interpreted():
        return differentiated(case, args)


def differentiated(case: Case, args, given=None):
    """out, lse, gradients by params and by query, key and value."""
    dout, dlse = cotangents(args, case.dtype) if given is None else given

    @jax.jit
    def both(params, args):
        results, pull = jax.vjp(functools.partial(call, case, "pallas"), params, *args)
        return results, pull((dout, dlse))

    return jax.tree.map(np.asarray, both(case.params, args))


def pairs(case: Case):
    """b, n, i and j of all pairs, [B, N, T, S]; i among the keys."""
    z, offset = case.z, np.broadcast_to(case.how.get("q_offset", 0), (case.z.B,))
    b, n, i, j = np.ogrid[: z.B, : z.N, : z.T, : z.S]
    return np.broadcast_arrays(b, n, i + offset[:, None, None, None], j)


# of rows that are done again
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul")
@pytest.mark.parametrize("name", few(CASES, FAST))
def test_values(name):
    with interpreted():
        assert_right(name, CASES[name])


def assert_right(name, case: Case):
    """On whatever device there is."""
    args, at, how = draw(case.dtype, case.z), pairs(case), dict(case.how)
    wide = np.asarray(case.params, np.float64)
    if case.bias is not None:
        how["bias"] = np.asarray(case.bias(wide, *at), f32)
    if case.mask is not None:
        how["mask"] = case.mask(*at)
    dtype = jnp.dtype(case.dtype).name
    truth, plain = true_call(args, how, dtype), plain_call(args, how, dtype)
    (out, lse), (of_params, *of) = differentiated(case, args)
    actual = truth._replace(
        out=out, lse=lse, grads=dict(zip(("query", "key", "value"), of, strict=True))
    )
    assert_result(actual, plain, truth, dtype, name)
    if case.slopes is not None:
        assert of_params.dtype == case.params.dtype and of_params.shape == case.params.shape
        slopes = case.slopes(*at)
        chained = lambda x: (np.asarray(x.grads["bias"], np.float64) * slopes).sum((1, 2, 3, 4))
        size = np.sqrt(((truth.grads["bias"] * slopes) ** 2).sum((1, 2, 3, 4))).max()
        assert_as_good(
            of_params.reshape(-1),
            [chained(x) for x in plain],
            chained(truth),
            dtype,
            f"{name}: params",
            size,
        )


@pytest.mark.parametrize(
    "cap",
    [pytest.param(1.5, marks=pytest.mark.slow), np.array([1.0, 4.0], f32)],
    ids=["one", "of heads"],
)
def test_a_soft_cap_of_the_users(cap):
    """Against the kernels' own; of heads, against each alone."""
    z = small(T=70, S=140, G=np.size(cap))
    args, cap = draw(bf16, z), jnp.asarray(cap, f32)
    case = Case(z, lambda cap: dict(score_fn=scores.soft_cap(cap)), params=cap)
    (out, lse), (dcap, *of) = run(case, args)
    for head in range(np.size(cap)):
        one = lambda x, head=head: x[:, :, head : head + 1] if x.shape[2] == z.N else x
        how = dict(logits_soft_cap=np.float64(cap if cap.ndim == 0 else cap[head]))
        dout, dlse = cotangents(args, "bfloat16")
        with_cap = lambda *x, how=how: dot_product_attention(
            *x, **how, implementation="reference", return_residual=True
        )
        (plain, plain_lse), pull = jax.vjp(with_cap, *map(one, args))
        dq = pull((one(dout), one(dlse)))[0]
        np.testing.assert_allclose(f32(one(out)), f32(plain), atol=8e-3)
        np.testing.assert_allclose(one(lse), plain_lse, atol=1e-5)
        np.testing.assert_allclose(f32(one(of[0])), f32(dq), atol=8e-3)
        wide = [f32(one(x)) for x in args]
        by_cap = lambda cap, wide=wide: dot_product_attention(
            *wide, logits_soft_cap=cap, return_residual=True
        )
        _, pull = jax.vjp(by_cap, jnp.float32(how["logits_soft_cap"]))
        (true,) = pull((f32(one(dout)), one(dlse)))
        np.testing.assert_allclose(
            dcap if cap.ndim == 0 else dcap[head], true, rtol=0.02, atol=0.02
        )


# in the interpreter
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul")
@pytest.mark.parametrize(
    "scored",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["masked", "masked and scored"],
)
def test_what_a_mask_hides_changes_no_bit(scored):
    hidden = np.isin(np.arange(200), [3, 77, 78, 150, 199])
    score = (
        dict(score_fn=scores.alibi(np.array([0.1], f32)).then(scores.t5(TABLE[:, :1])))
        if scored
        else {}
    )
    case = Case(
        small(T=70, S=200),
        lambda seen: dict(mask_fn=Mask(lambda b, h, i, j, p: p[j], ~hidden), **score),
    )
    query, key, value = draw(bf16, case.z)
    clean = run(case, (query, key, value))
    key[:, hidden], value[:, hidden] = np.nan, np.inf
    for x, y in zip(
        jax.tree.leaves(clean), jax.tree.leaves(run(case, (query, key, value))), strict=True
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@not_finite
@pytest.mark.parametrize("name", CASES)
def test_what_nobody_sees_changes_no_bit(name):
    """Whatever is in keys, values, queries and cotangents of no pair; params' gradients as well."""
    case = CASES[name]
    args, at = draw(case.dtype, case.z), pairs(case)
    positions = {
        name: x for name, x in case.how.items() if name not in ("logits_soft_cap", "scale")
    }
    seen = oracle.seen_by(*args[:2], **positions) & (True if case.mask is None else case.mask(*at))
    dirty, given, some = unseen_filled(args, seen, cotangents(args, case.dtype))
    if not some:
        return
    with interpreted():
        clean, found = differentiated(case, args), differentiated(case, dirty, given)
    for x, y in zip(jax.tree.leaves(clean), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul")
def test_a_key_that_dwarfs_the_others_under_a_score():
    """Rows that the fixed reference cannot serve are done again with the score as well."""
    query, key, value = draw(bf16, small(T=64, S=450))
    key[:, 300] *= bf16(200)
    score_fn = Score(lambda s, b, h, i, j, p: s + 0.01 * (i - j)).then(scores.t5(TABLE[:, :1]))
    how = dict(is_causal=True, q_offset=384, score_fn=score_fn)
    out, lse = forward((query, key, value), **how)
    plain, plain_lse = dot_product_attention(query, key, value, **how, return_residual=True)
    np.testing.assert_allclose(f32(out), f32(plain), atol=2e-2)
    np.testing.assert_allclose(lse, plain_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "axis_type, mapped", [(AxisType.Auto, False), (AxisType.Auto, True), (AxisType.Explicit, False)]
)
def test_each_device_has_the_numbers_of_its_heads(axis_type, mapped, monkeypatch):
    """And gives their gradients; kernels that say what they were given stand in."""
    from memeff.pallas.hopper import backward_key, backward_query, calls

    def attend(problem, lengths, arrays, scalars, want_lse, tiling):
        (slopes,), (of_query,) = scalars.of_heads, scalars.of_queries
        out = arrays[0] * slopes[:, None, :, None] + of_query[:, : arrays[0].shape[1], None, None]
        return out[..., : arrays[2].shape[-1]], jnp.zeros(
            (*slopes.shape, 128)
        ) if want_lse else None

    def queries(problem, lengths, arrays, dlse, scalars, tiling):
        sums = scalars.of_heads[0][..., None] * jnp.ones(128)
        return jnp.zeros_like(arrays[0]), jnp.zeros_like(sums), sums

    def keys(problem, lengths, arrays, scalars, tiling):
        return jnp.zeros_like(arrays[1]), jnp.zeros_like(arrays[2])

    gradients = (
        (backward_query, {"query_gradient": queries}),
        (backward_key, {"key_value_gradient": keys}),
    )
    for module, of in ((calls, {"attend": attend}), *gradients):
        for name, function in of.items():
            monkeypatch.setattr(module, name, function)
    monkeypatch.setattr(tile_sizes, "may_be_sharded", lambda: True)
    monkeypatch.setattr("memeff.pallas.hopper.implementation.why_not", lambda *_: None)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    ids, slopes = (
        np.arange(2 * 16, dtype=np.int32).reshape(2, 16),
        np.array([[1, 2, 3, 4], [5, 6, 7, 8]], f32),
    )
    query = np.ones((2, 16, 4, 64), f32)

    def loss(slopes, query):
        how = dict(
            score_fn=scores.alibi(slopes), mask_fn=Mask(lambda b, h, i, j, p: p[b, i] >= j, ids)
        )
        out = dot_product_attention(query, query, query, **how, implementation="pallas")
        return out.sum(), out

    def both(slopes, query):
        of = jax.value_and_grad(loss, has_aux=True)
        of = jax.vmap(of, (0, None)) if mapped else of
        (_, out), grad = of(slopes if mapped else slopes[0], query)
        return out, grad

    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        found, grad = jax.jit(both)(
            slopes, jax.device_put(query, NamedSharding(mesh, P("x", None, "y")))
        )
    expected = slopes[:, None, None, :, None] + ids[None, :, :, None, None] * np.ones(
        (2, 2, 16, 4, 64)
    )
    np.testing.assert_array_equal(found, expected if mapped else expected[0])
    np.testing.assert_array_equal(grad, (slopes if mapped else slopes[0]) * 2 * 16)


@pytest.fixture
def stand_ins(monkeypatch):
    """Kernels that have seen T5's numbers, and make nothing of keys."""
    from memeff.pallas.hopper import backward_key, backward_query, calls

    half = lambda x: x[..., : x.shape[-1] // 2]

    def attend(problem, lengths, arrays, scalars, want_lse, tiling):
        (query, _, value), (of_differences,) = arrays, scalars.of_differences
        return 0.5 * query[..., : value.shape[-1]], 9 + half(of_differences) if want_lse else None

    def queries(problem, lengths, arrays, dlse, scalars, tiling):
        return jnp.zeros_like(arrays[0]), half(scalars.of_differences[0])

    def keys(problem, lengths, arrays, scalars, tiling):
        return jnp.zeros_like(arrays[1]), jnp.zeros_like(arrays[2])

    monkeypatch.setattr(calls, "attend", attend)
    monkeypatch.setattr(backward_query, "query_gradient", queries)
    monkeypatch.setattr(backward_key, "key_value_gradient", keys)
    monkeypatch.setattr("memeff.pallas.hopper.implementation.why_not", lambda *_: None)
    with pretend_device("gpu", "9.0"):
        yield


def t5_loss(table, query):
    out = dot_product_attention(
        query, query, query, score_fn=scores.t5(table), is_causal=True, implementation="pallas"
    )
    return (out * jnp.cos(out)).sum()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_each_device_walks_its_heads(axis_type, stand_ins, monkeypatch):
    """For the gradient of T5's table."""
    monkeypatch.setattr(tile_sizes, "may_be_sharded", lambda: True)
    query = np.random.default_rng(0).standard_normal((2, 16, 4, 64)).astype(f32)
    gradient = jax.jit(jax.grad(t5_loss))
    expected, mesh = (
        gradient(TABLE, query),
        jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2),
    )
    with jax.set_mesh(mesh):
        found = gradient(TABLE, jax.device_put(query, NamedSharding(mesh, P("x", None, "y"))))
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("of, walks", [(0, True), (1, False)], ids=["table", "query"])
def test_a_table_that_nobody_differentiates_costs_no_walk(of, walks, stand_ins):
    shapes = jax.ShapeDtypeStruct((32, 4), f32), jax.ShapeDtypeStruct((1, 2048, 4, 64), bf16)
    text = jax.jit(jax.grad(t5_loss, of)).lower(*shapes).compile().as_text()
    assert (" while(" in text) == (" dot(" in text) == walks


def test_a_walk_for_params_makes_no_other_products():
    """Two of five."""
    from memeff.chunked import implementation as chunked

    case = CASES["t5"]
    args = draw(bf16, case.z)
    with watch_dispatch() as calls:
        jax.make_jaxpr(functools.partial(call, case, "xla", case.params))(*args)
    problem, operands, _ = calls[0]
    operands = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), operands)
    out, rows = (jnp.zeros((1, 1, 2, case.z.T, *dims)) for dims in ((64,), ()))
    of = lambda f: str(
        jax.make_jaxpr(functools.partial(f, problem, dlse=None))(
            operands, out, Lse(rows, None), out
        )
    )
    of_all, of_terms = (
        of(f).count("dot_general[") for f in (chunked.backward, chunked.logit_param_gradients)
    )
    assert (of_all, of_terms) == (5, 2)


def test_room_for_differences_is_counted():
    with pretend_device("gpu", "9.0"), watch_dispatch() as calls:
        jax.eval_shape(
            lambda x: dot_product_attention(
                x, x, x, score_fn=scores.t5(TABLE[:, :2]), implementation="pallas"
            ),
            X,
        )
        problem, operands, name = calls[0]
        differences, (t, c) = 4 * 2 * (512 + 512), problem.chunk_size
        forward, gradient = tile_sizes.temp_bytes(problem, operands, name)
        assert forward == differences
        assert gradient > 2 * differences + 8 * 2 * t * c


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in matmul")
@pytest.mark.parametrize("name", few(BLOCKED, ("documents",)))
def test_block_masks_drive_the_loops(name):
    """As the chunked path has it by the mask itself."""
    mask, how, z = BLOCKED[name]
    args, cotangent = draw(bf16, z), cotangents(draw(bf16, z), bf16)
    block = memeff.block_mask(mask, z.T, z.S, block_size=64)
    blocked = Case(z, lambda _: dict(mask_fn=block), how=how)
    plain, pull = jax.vjp(
        functools.partial(call, Case(z, lambda _: dict(mask_fn=mask), how=how), "xla", ()), *args
    )
    expected = plain, pull(cotangent)
    for x, y in zip(jax.tree.leaves(run(blocked, args)), jax.tree.leaves(expected), strict=True):
        finite = np.isfinite(f32(y))
        np.testing.assert_array_equal(np.isfinite(f32(x)), finite)
        np.testing.assert_allclose(f32(x)[finite], f32(y)[finite], atol=2e-2)


@pytest.mark.parametrize("how", [{}, dict(left=90), dict(right=0)], ids=str)
def test_tables_list_what_is_seen(how):
    """Every tile of which some pair is seen, once; whole ones last, and wholly seen; of queries and of keys."""
    from memeff.pallas.hopper import scalars, tile_ranges

    T, S, sides = 300, 410, (64, 128)
    mask = masks.documents(np.repeat([0, 1], [200, 100]), np.repeat([0, 1], [280, 130]))
    problem = Problem(blocks=memeff.block_mask(mask, T, S, block_size=16).blocks, **how)
    i, j = np.ogrid[:T, :S]
    seen = (i >= 200) == (j >= 280)
    seen &= (i - problem.left <= j) if problem.left is not None else True
    seen &= (j <= i + problem.right) if problem.right is not None else True
    whole_tiles = 0
    for keys, own, size, pairs in ((False, *sides, seen), (True, *sides[::-1], seen.T)):
        table = np.asarray(
            tile_ranges.with_lists(problem, scalars.Scalars(), (T, S), sides, keys).listed
        )
        for n in range(-(-pairs.shape[0] // own)):
            visits = tile_ranges.TileList.of(table, n)
            order = [int(visits.tile(m)) for m in range(visits.total)]
            tiles = [
                pairs[n * own : (n + 1) * own, m * size : (m + 1) * size]
                for m in range(-(-pairs.shape[1] // size))
            ]
            assert sorted(order) == [m for m, tile in enumerate(tiles) if tile.any()]
            for m in order[int(visits.masked) :]:
                assert tiles[m].all() and tiles[m].shape[1] == size
                whole_tiles += 1
    assert whole_tiles > 1


# ---- what is made before


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
        (
            "mask_fn",
            lambda b, h, i, j, p: (i // 8 + h) % 2 == 0,
            (1, 1, 0, 0),
        ),  # the quotient, and what follows in the kernel
        ("score_fn", scores.t5(TABLE[:, :2]), (0, 0, 0, 1)),
        ("score_fn", scores.relative(TABLE[:2, :3]), (0, 0, 0, 1)),
        (
            "score_fn",
            lambda s, b, h, i, j, p: s + jnp.log(1 + abs(i.astype(f32) - j.astype(f32) + 3)),
            (0, 0, 0, 0),
        ),  # can be there
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
    """So many numbers for each head, query, key, and difference of both."""
    from memeff.pallas.user_functions.calls import precomputed_numbers

    with pretend_device("gpu", "9.0"), watch_dispatch() as calls:
        jax.eval_shape(
            lambda x: dot_product_attention(x, x, x, implementation="pallas", **{name: fn}), X
        )
    problem, operands, _ = calls[0]
    assert (
        tuple(
            map(
                len,
                precomputed_numbers(
                    problem, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), operands)
                ),
            )
        )
        == before
    )


# ---- what is refused, and who runs


def why_not(**how):
    with pretend_device("gpu", "9.0"):
        with pytest.raises(NotImplementedError) as told:
            jax.eval_shape(
                lambda x: dot_product_attention(x, x, x, implementation="pallas", **how), X
            )
    return str(told.value)


REFUSED = {
    "cannot read an array at query and key positions together (score_fn)": dict(
        score_fn=Score(lambda s, b, h, i, j, p: s + p[i - j, j], TABLE)
    ),
    "cannot read an array at query and key positions together (mask_fn)": dict(
        mask_fn=Mask(lambda b, h, i, j, p: p[i, j], np.ones((512, 512), bool))
    ),
    "`erf` of the score (score_fn)": dict(score_fn=lambda s, b, h, i, j, p: jax.lax.erf(s)),
    "support 4 numbers for each difference of positions, and these functions need 5": dict(
        score_fn=Score(
            lambda s, b, h, i, j, p: s * sum(jnp.cos(p[i - j + n]) for n in range(5)), TABLE[0]
        )
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


def test_kernels_run_functions_where_they_can(monkeypatch):
    """And else the chunked path, with a warning, once."""
    monkeypatch.setattr("memeff.warn._warned", set())
    with pretend_device("gpu", "9.0"):
        assert memeff.explain(X, X, X, score_fn=scores.alibi(np.ones(2, f32))).startswith(
            '"pallas" runs this call'
        )
        strange = dict(score_fn=lambda s, b, h, i, j, p: jax.lax.erf(s))
        with pytest.warns(
            UserWarning,
            match="instead of the GPU's kernels, because .*cannot compute `erf` of the score",
        ):
            jax.eval_shape(lambda x: dot_product_attention(x, x, x, **strange), X)
        jax.eval_shape(lambda x: dot_product_attention(x, x, x, scale=2.0, **strange), X)


@pytest.mark.parametrize("H", [64, 128])
def test_functions_lower_for_cuda(H):
    """And what a function computes on tiles, with its derivative."""
    x = jax.ShapeDtypeStruct((2, 1000, 4, H), bf16)
    curves = [
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

    def score(s, b, h, i, j, p):
        t = 1 + jnp.abs(s)
        total = sum(f(t) for f in curves) / (t**3 + t**-2) + jnp.where(
            (i == j) ^ ~(j > 3), s, jnp.clip(s, -p[h], 1)
        )
        return (
            total
            + p[jnp.clip(i - j, 0, 3)]
            + jnp.sign(s) * ((i - j) % 7 + (i >> 1) + i // 3 - (j << 2))
            + jnp.maximum(s, jnp.round(t))
            + jnp.square(s)
        )

    def training(params, *args):
        f = lambda params, q, k, v: dot_product_attention(
            q,
            k,
            v,
            score_fn=score,
            score_params=params,
            mask_fn=masks.documents(ids(1, 1000)[0]),
            implementation="pallas",
        )
        out, pull = jax.vjp(f, params, *args[:3])
        return out, *pull(args[3])

    of_head = jax.ShapeDtypeStruct((4,), f32)
    assert kernels(lowered(training, of_head, x, x, x, x)) == 3
    if H == 64:
        mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
        specs = P(), *[P("x")] * 4
        parts = jax.shard_map(
            training, mesh=mesh, in_specs=specs, out_specs=(P("x"), P(), *[P("x")] * 3)
        )
        assert kernels(lowered(parts, of_head, x, x, x, x)) == 3
