"""Check scores, masks, transforms and sinks of the user: their numbers and gradients.

The oracle knows only biases, masks and rotated inputs: a score that adds something is a bias, with
its chain rule. Functions that bend the score are compared with the quadratic definition.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import PAIRED, Sizes, _case, split
from conftest import cotangents, few, oracle_arguments
from small_calls import assert_close, assert_same

from memeff import (
    Mask,
    attention_statistics,
    block_mask,
    dot_product_attention,
    key_mass,
    masks,
    paged_attention,
    scores,
    transforms,
)

pytestmark = pytest.mark.once

slow = pytest.mark.slow
f32 = np.float32
SIZES = Sizes(B=2, T=19, S=29, K=2, G=2, H=6, D=4)


def largest(x) -> float:
    """Return the largest absolute number of x."""
    return np.abs(x).max()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_complex_params(implementation):
    """Complex params, as of rotations, have the gradients that the formula written out has."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 4)).astype(f32)
    turns = np.exp(1j * np.arange(6)[:, None] * np.array([1, 0.3]))  # position, pair
    turns = turns.astype(np.complex64)
    w = np.array([1 + 2j, 0.5 - 1j], np.complex64)

    def rotate(x, position, which, turns):
        y = jax.lax.complex(x[:2], x[2:]) * turns[position]
        return jnp.concatenate([y.real, y.imag])

    def score(s, batch, head, q_pos, k_pos, w):
        return s + (w[head] * (1 + 1j)).real

    def loss(w, turns):
        out = dot_product_attention(
            q,
            k,
            v,
            implementation=implementation,
            score_fn=score,
            score_params=w,
            qk_transform=rotate,
            qk_transform_params=turns,
        )
        return (out**2).sum()

    def rotate_rows(x, turns):
        def rotate_head(x):
            rotate_each = jax.vmap(rotate, (0, 0, None, None))
            return rotate_each(x, jnp.arange(6), "", turns)

        return jax.vmap(rotate_head, 1, 1)(x[0])[None]

    def plain_loss(w, turns):
        rotated_q = rotate_rows(q, turns)
        rotated_k = rotate_rows(k, turns)
        raw = jnp.einsum("bthd,bshd->bhts", rotated_q, rotated_k)
        bias = (w * (1 + 1j)).real[:, None, None]
        p = jax.nn.softmax(raw / 2 + bias)
        return (jnp.einsum("bhts,bshd->bthd", p, v) ** 2).sum()

    actual = jax.jit(jax.grad(loss, (0, 1)))(w, turns)
    expected = jax.jit(jax.grad(plain_loss, (0, 1)))(w, turns)
    assert_close(actual, expected, atol=2e-5)


# ---- paired with each argument, against the oracle


BY_NAME = {feature.__name__: feature for feature in PAIRED}
# Each feature is in one call with another.
FEATURES = (
    "bias_row&causal",
    "mask_dense&soft_cap",
    "scale_array&segments",
    "query_lengths&window",
    "key_lengths&dropout_each",
    "q_offset_array&sinks",
)
assert sorted("&".join(FEATURES).split("&")) == sorted(BY_NAME)


def _paired_inputs(name):
    features = [BY_NAME[feature] for feature in name.split("&")]
    case = _case(name, *features, z=SIZES, chunk_size=(8, 12))
    return case.inputs(np.float64)


def _slopes(N):
    return np.linspace(0.1, 0.7, N)


def _rotate(x, position, back=False):
    """Rotate the halves of the last dim by position / 10000^(2 i / H), or back.

    `position` [..., T|S] broadcasts with the other dims of x.
    """
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-np.arange(half) / half)
    angle = position[..., None] * frequencies
    if back:
        angle = -angle
    a = x[..., :half]
    b = x[..., half:]
    new_a = a * np.cos(angle) - b * np.sin(angle)
    new_b = b * np.cos(angle) + a * np.sin(angle)
    return np.concatenate([new_a, new_b], -1)


def _positions(args, kwargs):
    """Return the positions of queries [B, T, 1] and of keys [1, S, 1]."""
    B, T, *_ = args[0].shape
    S = args[1].shape[1]
    offset = np.broadcast_to(np.asarray(kwargs.get("q_offset", 0)), (B,))
    q_pos = np.arange(T) + offset[:, None]
    k_pos = np.arange(S)
    return q_pos[..., None], k_pos[None, :, None]


@functools.cache
def paired_results(names):
    """Return {name: results} of calls with three functions, computed by one program.

    The functions are ALiBi, a mask that hides every third key, and rotary positions.
    """
    statics = {}
    inputs = {}
    for name in names:
        args, kwargs = _paired_inputs(name)
        statics[name], arrays = split(kwargs)
        inputs[name] = args, arrays, cotangents(args, "float64")

    def attend(name, arrays, slopes, q, k, v):
        return dot_product_attention(
            q,
            k,
            v,
            **arrays,
            **statics[name],
            score_fn=scores.alibi(slopes),
            mask_fn=~masks.dilated(3),
            qk_transform=transforms.rotary(),
            return_residual=True,
        )

    def run(inputs, slopes):
        results = {}
        for name, (args, arrays, cts) in inputs.items():
            f = functools.partial(attend, name, arrays)
            out_and_lse, pull = jax.vjp(f, slopes, *args)
            results[name] = out_and_lse, pull(cts)
        return results

    with jax.enable_x64(True):
        results = jax.jit(run)(inputs, _slopes(SIZES.N))
        return jax.tree.map(np.asarray, results)


@pytest.mark.parametrize("feature", few([*BY_NAME, *FEATURES], FEATURES))
def test_functions_beside_every_feature(feature):
    args, kwargs = _paired_inputs(feature)
    q_pos, k_pos = _positions(args, kwargs)
    distance = q_pos[:, None] - k_pos[:, None].swapaxes(2, 3)  # b 1 t s
    slopes = _slopes(SIZES.N)[:, None, None]
    options = oracle_arguments(args, kwargs, "float64")
    options["bias"] = options.get("bias", 0) - slopes * np.abs(distance)
    options["mask"] = (distance % 3 != 0) & options.get("mask", True)
    qkv = _rotate(args[0], q_pos), _rotate(args[1], k_pos), args[2]
    out, lse = oracle.attention(*qkv, **options)
    dout, dlse = cotangents(args, "float64")
    grads = oracle.gradients(*qkv, **options, dout=dout, dlse=dlse)
    expected_grads = [
        -(grads["bias"] * np.abs(distance)).sum((0, 2, 3)),
        _rotate(grads["query"], q_pos, back=True),
        _rotate(grads["key"], k_pos, back=True),
        grads["value"],
    ]
    names = FEATURES if feature in FEATURES else tuple(BY_NAME)
    (actual_out, actual_lse), actual_grads = paired_results(names)[feature]
    sees_nothing = np.isinf(lse)
    np.testing.assert_array_equal(np.isinf(actual_lse), sees_nothing)
    actual_lse = np.where(sees_nothing, 0, actual_lse)
    lse = np.where(sees_nothing, 0, lse)
    actual = [actual_out, actual_lse, *actual_grads]
    expected = [out, lse, *expected_grads]
    assert_same(actual, expected, 3e-6)  # the angles are of float32


# ---- scores and transforms by hand


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_counts_to_the_sides_that_may_be_seen(bidirectional):
    """Compare eight buckets up to 20 tokens with buckets typed by hand.

    Keys may be behind the query or ahead of it.
    """
    if bidirectional:  # four to each side: 0, 1, then from 2 and from 2 sqrt(10) on
        behind = [0, 1, *[2] * 5, *[3] * 14]
        ahead = [4 + bucket for bucket in behind[1:]]
    else:  # 0 to 3, then from 4, 6.0, 8.9 and 13.4 on; a key ahead is at distance 0
        behind = [0, 1, 2, 3, 4, 4, *[5] * 3, *[6] * 5, *[7] * 7]
        ahead = [0] * 20
    table = jnp.arange(8.0)[:, None]
    score = scores.t5(table, bidirectional=bidirectional, max_distance=20)
    actual = score.fn(jnp.zeros(41), 0, 0, 20, jnp.arange(41), table)
    np.testing.assert_array_equal(actual, [*behind[::-1], *ahead])


def test_rms_norm_divides_by_the_root_of_the_mean_square():
    """Queries and keys have different scales, and epsilon counts where all numbers are small."""
    x = np.random.default_rng(0).standard_normal(6)
    scales = {"query": np.arange(1.0, 7), "key": np.arange(6.0) - 2}
    norm = transforms.rms_norm(*scales.values(), epsilon=0.5)
    root = np.sqrt((x**2).mean() + 0.5)
    with jax.enable_x64(True):
        for which, scale in scales.items():
            actual = norm.fn(jnp.asarray(x), 3, which, norm.params)
            np.testing.assert_allclose(actual, x / root * scale, rtol=1e-12)


def test_rotary_turns_float64_by_angles_of_float64():
    x = np.random.default_rng(0).standard_normal((1, 3, 1, 4))
    position = 20_001 + np.arange(3)
    angle = position[:, None] * 10_000.0 ** (-np.arange(2) / 2)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[0, :, 0, :2], x[0, :, 0, 2:]
    rotated = np.concatenate([a * cos - b * sin, b * cos + a * sin], 1)
    with jax.enable_x64(True):
        fn = transforms.rotary().fn
        actual = [fn(row, i, "query", None) for row, i in zip(x[0, :, 0], position, strict=True)]
    assert largest(np.stack(actual) - rotated) <= 1e-11


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_alibi_measures_far_distances_in_full(dtype):
    """16 bits would round distances to multiples, and float16 would make these infinite."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 5, 2, 4)), f32)

    def run(slopes):
        score_fn = scores.alibi(slopes)
        return dot_product_attention(x, x, x, score_fn=score_fn, q_offset=70_001)

    slopes = jnp.array([0.25, 0], dtype)
    assert largest(run(slopes) - run(slopes.astype(f32))) <= 1e-6


def test_gradients_of_few_bits_are_summed_in_float32():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 400, 2, 4)), f32)
    params = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((8, 2), (2, 9))]

    @jax.jit
    @jax.grad
    def gradient(params):
        score_fn = scores.t5(params[0]).then(scores.relative(params[1]))
        return jnp.sin(dot_product_attention(x, x, x, score_fn=score_fn, chunk_size=400)).sum()

    wide = gradient([param.astype(f32) for param in params])
    for actual, expected in zip(gradient(params), wide, strict=True):
        assert actual.dtype == jnp.bfloat16
        assert largest(actual.astype(f32) - expected) <= 4e-3 * largest(expected)


@pytest.mark.slow
def test_ready_made_functions_under_strict_promotion():
    """They mix no dtypes, whatever floats and integers they are given."""
    q, k = jnp.ones((2, 5, 4, 2)), jnp.ones((2, 7, 2, 2))

    def run(**functions):
        def f(q, k):
            return dot_product_attention(q, k, k, **functions)

        jax.eval_shape(lambda: jax.vjp(f, q, k)[1](q))

    for x64 in (False, True):
        with (
            jax.enable_x64(x64),
            jax.numpy_dtype_promotion("strict"),
            jax.numpy_rank_promotion("raise"),
        ):
            for dtype in ("float32", "bfloat16"):
                table = jnp.ones((4, 4), dtype)
                run(score_fn=scores.alibi(table[0]).then(scores.head_temperature(table[0])))
                run(score_fn=scores.t5(table).then(scores.t5(table, bidirectional=False)))
                run(score_fn=scores.relative(table[:, :3]).then(scores.soft_cap(table[0])))
                norm = transforms.rms_norm(table[0, :2], table[0, :2])
                run(qk_transform=norm.then(transforms.rotary()))
            drafts = masks.ancestors_of(np.array([[-1, 0, 0, 1, 1]] * 2))
            run(mask_fn=masks.prefix(np.array([3, 5])) | masks.causal() & ~masks.dilated(2))
            run(mask_fn=masks.tree(drafts, np.array([2, 2])) & masks.block_causal(2))
            run(mask_fn=masks.documents(np.zeros((2, 7), int)) & masks.sliding_window(2))


def test_positions_of_masks_do_not_wrap():
    x = jnp.ones((1, 4, 1, 2))
    with jax.enable_x64(True):
        for length, seen in ((2**40 + 1, 4), (np.uint32(2**32 - 1), 4), (-(2**40), 0), (2, 2)):
            mask = block_mask(masks.prefix(np.asarray(length)), 4, block_size=1)
            assert str(mask).splitlines()[1].count("#") == seen
            out = dot_product_attention(x, x, x, mask_fn=masks.prefix(np.asarray(length)))
            assert (out == min(seen, 1)).all()


@pytest.mark.parametrize(
    "causal, lengths, wrong",
    [
        (False, None, [0, 0, 1, 1]),
        pytest.param(True, None, [0, 0, 1, 0], marks=slow),  # no key stands before position 0
        (False, [2, 2, 1, 0], [0, 0, 0, 1]),
    ],
)
def test_queries_without_ids_give_nan_where_their_positions_are_not_known(causal, lengths, wrong):
    """JAX reads another token's id for a position that has none."""
    q, x = jnp.ones((4, 2, 2, 4)), jnp.ones((4, 6, 1, 4))
    pages = x, x, jnp.arange(4)[:, None], jnp.full(4, 6)
    options = dict(mask_fn=masks.documents(np.arange(6) // 2), is_causal=causal)
    if lengths is not None:
        options["query_seq_lengths"] = np.array(lengths)

    def run(q_offset):
        return [
            dot_product_attention(q, x, x, return_residual=True, q_offset=q_offset, **options),
            paged_attention(q, *pages, q_offset=q_offset, **options),
            attention_statistics(q, x, x, q_offset=q_offset, **options),
            key_mass(q, x, q_offset=q_offset, **options),
        ]

    for results in jax.tree.leaves(jax.jit(run)(np.array([0, 4, 5, -1]))):
        found = np.isnan(results).reshape(4, -1).any(axis=1)
        np.testing.assert_array_equal(found, np.array(wrong, bool))


def test_queries_without_ids_are_refused_where_their_positions_are_known():
    q, x = jnp.ones((2, 2, 2, 4)), jnp.ones((2, 6, 1, 4))
    mask = masks.documents(np.arange(6) // 2)
    for call in (
        lambda **kw: dot_product_attention(q, x, x, mask_fn=mask, **kw),
        lambda **kw: paged_attention(q, x, x, [[0], [1]], [6, 6], mask_fn=mask, **kw),
    ):
        with pytest.raises(ValueError, match="but this call has Q=7"):
            call(is_causal=False, q_offset=np.array([0, 5]))
    with pytest.raises(ValueError, match="positions from 0 on, and q_offset is -1"):
        dot_product_attention(q, x, x, mask_fn=mask, q_offset=-1)

    def attend(lengths):
        return dot_product_attention(q, x, x, mask_fn=mask, q_offset=5, query_seq_lengths=lengths)

    found = np.isnan(jax.jit(attend)(np.array([1, 2]))).any(axis=(1, 2, 3))
    np.testing.assert_array_equal(found, [False, True])


def test_functions_see_only_positions_of_the_call():
    """7 tokens take two tiles of 4, whose rows and columns overlap."""
    x = jax.random.normal(jax.random.key(0), (1, 7, 2, 4))

    def score(s, batch, head, q_pos, k_pos, p):
        return s * p * jnp.log(q_pos + 1.0) + p * jnp.log(k_pos + 1.0)

    def transform(x, position, which, p):
        return x * (p + jnp.log(position + 1.0))

    def loss(implementation, x, p):
        out = dot_product_attention(
            x,
            x,
            x,
            score_fn=score,
            score_params=p,
            qk_transform=transform,
            qk_transform_params=p,
            implementation=implementation,
            chunk_size=None if implementation == "reference" else 4,
        )
        return jnp.sin(out).sum()

    gradient = jax.jit(jax.grad(loss, (1, 2)), static_argnums=0)
    gradients = [gradient(name, x, jnp.float32(0.7)) for name in ("xla", "reference")]
    assert_close(*gradients, rtol=1e-4, atol=1e-5)


# ---- functions that bend the score, in every order, against the definition


def _bent_loss(implementation, q, k, v, score, transform, sinks):
    prefix = masks.prefix(jnp.array([2, 5]))
    out, lse = dot_product_attention(
        q,
        k,
        v,
        score_fn=score,
        mask_fn=(masks.causal() & masks.sliding_window(9)) | prefix,
        qk_transform=transform,
        sinks=sinks,
        return_residual=True,
        chunk_size=(8, 12),
        implementation=implementation,
    )
    return jnp.sin(out).sum() + jnp.cos(lse).sum()


def _bent_inputs():
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape))

    q = draw(2, 21, 4, 6)
    k = draw(2, 21, 2, 6)
    v = draw(2, 21, 2, 3)
    score = scores.t5(draw(8, 4))
    score = score.then(scores.soft_cap(jnp.linspace(1.0, 3, 4)))
    score = score.then(scores.relative(draw(4, 9)))
    score = score.then(scores.head_temperature(1 + 0.1 * draw(4)))
    norm = transforms.rms_norm(1 + 0.1 * draw(6), 1 + 0.1 * draw(6))
    sinks = draw(4)
    return q, k, v, score, norm.then(transforms.rotary()), sinks


def _tangent(f):
    """Return the function that gives the tangent of f at its arguments, along them."""

    def tangent(*x):
        return jax.jvp(f, x, x)[1]

    return tangent


def _sum_of_sines(f):
    def total(*x):
        return sum(jnp.sin(y).sum() for y in jax.tree.leaves(f(*x)))

    return total


def _bent_derivative(order, implementation):
    x = _bent_inputs()
    arguments = tuple(range(len(x)))
    f = functools.partial(_bent_loss, implementation)
    gradient = jax.grad(f, arguments)
    orders = {
        "gradient": gradient,
        "jvp": _tangent(f),
        "hvp": _tangent(gradient),
        "grad of grad": jax.grad(_sum_of_sines(gradient), arguments),
    }
    return jax.jit(orders[order])(*x)


@pytest.mark.parametrize("order", few(["gradient", "jvp", "hvp", "grad of grad"], ["hvp"]))
def test_what_bends_the_score_against_the_definition(order):
    with jax.enable_x64(True):
        actual = _bent_derivative(order, None)
        plain = _bent_derivative(order, "reference")
    assert_same(actual, plain, 1e-9)


# ---- few bits


def _all_functions(implementation, params, q, k, v):
    slopes, (query_scales, key_scales) = params
    norm = transforms.rms_norm(query_scales, key_scales)
    return dot_product_attention(
        q,
        k,
        v,
        score_fn=scores.alibi(slopes).then(scores.soft_cap(2.0)),
        mask_fn=masks.causal() & ~masks.dilated(5),
        qk_transform=norm.then(transforms.rotary()),
        chunk_size=(16, 24),
        implementation=implementation,
    )


def _gradients(implementation, params, q, k, v, dout):
    f = functools.partial(_all_functions, implementation)
    _, pull = jax.vjp(f, params, q, k, v)
    return pull(dout)


def _wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16", "float16"], ["bfloat16"]))
def test_functions_in_few_bits(dtype):
    """Gradients err at most 1.5 times as much as the plain computation's in the same dtype."""
    rng = np.random.default_rng(0)
    shapes = (2, 61, 4, 16), (2, 61, 2, 16), (2, 61, 2, 8), (2, 61, 4, 8)
    arrays = [rng.standard_normal(shape) for shape in shapes]
    arrays = [np.asarray(x, jnp.dtype(dtype)) for x in arrays]
    slopes = np.linspace(0.02, 0.5, 4).astype(f32)
    norm_scales = 1 + 0.1 * rng.standard_normal((2, 16))
    params = slopes, norm_scales.astype(f32)

    def run(implementation, params, arrays):
        gradients = jax.jit(functools.partial(_gradients, implementation))
        return _wide(jax.tree.leaves(gradients(params, *arrays)))

    with jax.enable_x64(True):
        exact = run("reference", _wide(params), _wide(arrays))
        actual = run(None, params, arrays)
        plain = run("reference", params, arrays)
    eps = {"float32": 4e-6, "bfloat16": 4e-3, "float16": 5e-4}[dtype]
    for x, y, truth in zip(actual, plain, exact, strict=True):
        rounding = eps * max(1, largest(truth))
        assert largest(x - truth) <= 1.5 * largest(y - truth) + rounding


# ---- sinks


def test_sinks_take_what_a_key_without_a_value_would():
    rng = np.random.default_rng(0)
    shapes = (2, 9, 4, 5), (2, 7, 2, 5), (2, 7, 2, 5)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), f32) for shape in shapes)
    sinks = jnp.array([-1.0, 0.3, 2, 9])
    zero = jnp.zeros((2, 1, 2, 5))
    longer_k = jnp.concatenate([k, zero], 1)
    longer_v = jnp.concatenate([v, zero], 1)
    no_bias = jnp.zeros((4, 1, 8))

    def with_key(q, k, v, sinks):
        bias = no_bias.at[:, 0, 7].set(sinks)
        return dot_product_attention(q, longer_k, longer_v, bias)

    def with_sinks(q, k, v, sinks):
        return dot_product_attention(q, k, v, sinks=sinks)

    def gradients(f):
        """Return the gradients of query and sinks."""

        def loss(*args):
            return jnp.sin(f(*args)).sum()

        return jax.jit(jax.grad(loss, (0, 3)))(q, k, v, sinks)

    actual = with_sinks(q, k, v, sinks)
    np.testing.assert_allclose(actual, with_key(q, k, v, sinks), atol=1e-6)
    assert_close(gradients(with_sinks), gradients(with_key), atol=2e-6)
    hidden = dot_product_attention(q, k, v, mask=jnp.zeros((7,), bool), sinks=sinks)
    assert not np.asarray(hidden).any()


@pytest.mark.parametrize(
    "true, implementation",
    [
        (True, "xla"),
        (np.True_, "reference"),
        pytest.param(True, "reference", marks=slow),
        pytest.param(np.True_, "xla", marks=slow),
    ],
)
def test_a_mask_may_return_a_bool_that_is_no_array(true, implementation):
    """`True` for every pair is full attention, alone, in combinations and in a block mask."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 5, 2, 4)).astype(np.float32)
    everything = Mask(lambda batch, head, q_pos, k_pos, params: true)
    same = [everything, ~~everything, everything | masks.causal(), everything & everything]
    if implementation == "xla":
        same.append(block_mask(everything, 5, 5))

    @jax.jit
    def run(q, k, v):
        attend = functools.partial(dot_product_attention, q, k, v, implementation=implementation)
        causal = attend(mask_fn=everything & masks.causal()), attend(is_causal=True)
        nothing = attend(mask_fn=~everything)
        return attend(), [attend(mask_fn=mask) for mask in same], causal, nothing

    full, all_same, (causal, expected), nothing = run(q, k, v)
    for out in all_same:
        np.testing.assert_allclose(out, full, rtol=0, atol=1e-6)
    np.testing.assert_allclose(causal, expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(nothing, np.zeros_like(full))


def test_scores_of_minus_infinity_hide_keys():
    """A row whose first tile has only such scores, and a row that has no others."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(6, 1, 4)), jnp.float32) for _ in range(3)]
    dout = jnp.asarray(rng.normal(size=(6, 1, 4)), jnp.float32)
    visible = jnp.arange(6) >= jnp.array([0, 4, 6, 0, 1, 5])[:, None]

    def hide(score, batch, head, q_pos, k_pos, visible):
        return jnp.where(visible[q_pos, k_pos], score, -jnp.inf)

    def call(**options):
        @jax.jit
        def run(*arrays):
            out, pull = jax.vjp(functools.partial(dot_product_attention, **options), *arrays)
            return [out, *pull(dout)]

        return run(*arrays)

    expected = call(mask=visible)
    result = call(score_fn=hide, score_params=visible, chunk_size=2, implementation="xla")
    assert_close(result, expected, rtol=0, atol=1e-6)
