"""Functions of the user and sinks in memeff's Flax modules: as parameters that learn, or fixed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from flax import serialization
from flax_cases import (
    LINEN,
    NNX,
    SELF_MASK,
    B,
    F,
    N,
    T,
    X,
    assert_close,
    assert_equal,
    build,
    family,
    init_linen_model,
    largest_difference,
    linen_loss,
    linen_model,
    nnx_layer,
    nnx_loss,
    nnx_model,
    quadratic,
    uniform,
)

import memeff
from memeff import masks, scores, transforms

H = F // N


def score_init(key):
    """Return ALiBi, then a soft cap: its params are an array and a number."""
    return scores.alibi(scores.alibi_slopes(N)).then(scores.soft_cap(2.0))


def qk_transform_init(key):
    """Return a norm, then a rotation: its params are a tuple with a dict and a None."""
    scales = jnp.array([[1.0] * H, [2.0] * H])
    return transforms.rms_norm(*scales).then(transforms.rotary())


# every kind of tree that params may be: an array, a tuple with a None in it, a dictionary
LEARNT = {
    "score_init": score_init,
    "qk_transform_init": qk_transform_init,
    "sinks_init": jax.nn.initializers.constant(0.5),
}
LEARNT_FUNCTIONS = {"score_init": score_init, "qk_transform_init": qk_transform_init}
DOCUMENT = np.array([0, 0, 0, 1, 1, 1, 1])
SAME_DOCUMENT = masks.documents(DOCUMENT) | masks.prefix(2)
SEEN = (DOCUMENT[:, None] == DOCUMENT) | (np.arange(T) < 2)


def split_learnt(ours, params):
    """Return (slopes, cap), scales by name, sinks, and the tree of params without them."""
    rest = dict(params)
    sinks = rest.pop("sinks")
    if ours is LINEN[0]:
        score = rest.pop("score_params")
        scales = rest.pop("qk_transform_params")[0]
        return score, scales, sinks, rest
    score = rest.pop("score_fn")["params"]
    scales = rest.pop("qk_transform")["params"][0]
    return (score[0], score[1]), scales, sinks, rest


def normalised_and_rotated(x, scale):
    """Apply RMS norm and rotary positions, as short as the formulas."""
    x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale
    frequencies = 10000.0 ** (-np.arange(H // 2) / (H // 2))
    angle = np.arange(T)[:, None, None] * frequencies
    a = x[..., : H // 2]
    b = x[..., H // 2 :]
    rotated_a = a * np.cos(angle) - b * np.sin(angle)
    rotated_b = b * np.cos(angle) + a * np.sin(angle)
    return jnp.concatenate([rotated_a, rotated_b], -1)


def written_out(query, key, value, mask=None, *, score, scales, sinks, **flax_arguments):
    """Compute what LEARNT asks for, as short as the formulas."""
    query = normalised_and_rotated(query, scales["query"])
    key = normalised_and_rotated(key, scales["key"])
    slopes, cap = score
    positions = np.arange(T)
    distance = np.abs(positions[:, None] - positions)
    s = jnp.einsum("bqhd,bkhd->bhqk", query, key) / H**0.5
    s = s - slopes[:, None, None] * distance
    s = jnp.where(mask, cap * jnp.tanh(s / cap), -jnp.inf)
    sink_column = jnp.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1))
    p = jax.nn.softmax(jnp.concatenate([s, sink_column], -1))
    return jnp.einsum("bhqk,bkhd->bqhd", p[..., :-1], value)


@family
def test_what_learns_is_a_parameter_with_its_gradient(ours, flaxes):
    mask = SELF_MASK & SEEN
    params, run = build(ours, X, kernel_init=uniform, mask_fn=SAME_DOCUMENT, **LEARNT)
    score, scales, sinks, rest = split_learnt(ours, params)
    flax_params, _ = build(flaxes, X, kernel_init=uniform)
    assert_equal(rest, flax_params)
    assert_close(score, (scores.alibi_slopes(N), jnp.float32(2)))
    assert_close(scales, {"query": jnp.ones(H), "key": 2 * jnp.ones(H)})
    assert_close(sinks, jnp.full(N, 0.5))

    def actual(params):
        return run(params, X, mask=SELF_MASK)

    def expected(params):
        score, scales, sinks, rest = split_learnt(ours, params)
        attention_fn = functools.partial(written_out, score=score, scales=scales, sinks=sinks)
        _, flax_run = build(flaxes, X, attention_fn=attention_fn, call={"mask": mask})
        return flax_run(rest, X, mask=mask)

    cotangent = np.random.default_rng(1).standard_normal(X.shape).astype(np.float32)

    def with_gradient(forward):
        def weighted(params):
            return (forward(params) * cotangent).sum()

        def both(params):
            return forward(params), jax.grad(weighted)(params)

        return jax.jit(both)(params)

    out, gradient = with_gradient(actual)
    assert_close((out, gradient), with_gradient(expected), 1e-5)
    learnt_gradients = split_learnt(ours, gradient)[:3]
    for x in jax.tree.leaves(learnt_gradients):
        assert np.abs(x).max() > 1e-3


def test_one_offset_for_a_whole_batch_reaches_every_function():
    """A cache gives its position as an array, the same for all batch entries."""
    x = np.random.default_rng(2).standard_normal((B, T, N, H)).astype(np.float32)
    functions = {
        "score_fn": scores.alibi([1.0] * 4),
        "mask_fn": masks.sliding_window(2),
        "qk_transform": transforms.rotary(),
    }

    def run(**offset):
        return memeff.dot_product_attention(x, x, x, **functions, **offset)

    first = run(q_offset=3)
    assert np.abs(first - run()).max() > 1e-3
    for offset in (jnp.int32(3), jnp.full(B, 3)):
        assert_close(run(q_offset=offset), first)


def score_by_head(score, batch, head, q_pos, k_pos, params):
    return score * (1 + head)


def mask_by_head(batch, head, q_pos, k_pos, params):
    return k_pos <= q_pos + head


def double_query(x, position, which, params):
    return x * (2 if which == "query" else 1)


def quadratic_by_head(query, key, value, mask=None, **flax_arguments):
    """Compute attention with `score_by_head` and `double_query`, as a scale of each query head."""
    scale = 2 * (1 + np.arange(N))
    return quadratic(query * scale[:, None], key, value, mask)


@family
def test_what_is_given_whole_is_constant(ours, flaxes):
    """Fixed functions give the numbers of functions that learn, and add no parameter to Flax's.

    A block mask, and functions without params, are fixed functions too.
    """
    params, run = build(
        ours,
        X,
        kernel_init=uniform,
        mask_fn=memeff.block_mask(SAME_DOCUMENT, T, block_size=2),
        score_fn=score_init(None),
        qk_transform=qk_transform_init(None),
    )
    flax_params, _ = build(flaxes, X, kernel_init=uniform)
    assert_equal(params, flax_params)
    learning_params, learning_run = build(
        ours, X, kernel_init=uniform, mask_fn=SAME_DOCUMENT, **LEARNT_FUNCTIONS
    )
    assert_close(run(params, X), learning_run(learning_params, X))

    functions = {
        "score_fn": score_by_head,
        "mask_fn": mask_by_head,
        "qk_transform": double_query,
    }
    _, run = build(ours, X, kernel_init=uniform, **functions)
    out = run(params, X)
    positions = np.arange(T)
    last_seen = positions[:, None] + np.arange(N)[:, None, None]
    mask = np.broadcast_to(last_seen >= positions, (B, N, T, T))
    _, flax_run = build(flaxes, X, kernel_init=uniform, attention_fn=quadratic_by_head)
    assert_close(out, flax_run(params, X, mask=mask))


def test_linen_modules_with_what_learns_can_be_hashed_saved_and_stacked():
    module = LINEN[0](num_heads=N, **LEARNT)
    twin = LINEN[0](num_heads=N, **LEARNT)
    assert hash(module) == hash(twin)
    assert module == twin
    params = module.init(jax.random.key(0), X)
    zeros = jax.tree.map(jnp.zeros_like, params)
    loaded = serialization.from_bytes(zeros, serialization.to_bytes(params))
    assert_equal(loaded, params)

    model = linen_model(functools.partial(LINEN[0], **LEARNT))
    variables = init_linen_model(model)
    assert variables["params"]["attention"]["sinks"].shape == (2, N)
    loss = functools.partial(linen_loss, model)
    gradient = jax.jit(jax.grad(loss))(variables)["params"]["attention"]
    for x in jax.tree.leaves(gradient["score_params"]):
        largest_of_block = np.abs(x).reshape(2, -1).max(1)
        assert largest_of_block.min() > 0


@pytest.mark.slow
def test_nnx_modules_with_what_learns_can_be_split_trained_and_stacked():
    attention = functools.partial(NNX[0], **LEARNT, mask_fn=SAME_DOCUMENT)
    model = nnx_model(attention)
    assert model.attention.sinks.shape == (2, N)
    gradient = flax_nnx.jit(flax_nnx.grad(nnx_loss))(model, X)
    slopes = gradient["attention"]["score_fn"]["params"][0]
    assert np.abs(slopes[...]).max(1).min() > 0

    module = nnx_layer(attention)
    graph, params, rest = flax_nnx.split(module, flax_nnx.Param, ...)
    assert {"score_fn", "qk_transform", "sinks"} <= set(params)
    assert set(rest) == {"mask_fn"}
    before = module(X)
    again = flax_nnx.merge(graph, params, rest, copy=True)
    flax_nnx.update(module, jax.tree.map(lambda x: x + 1, params))
    assert largest_difference(before, module(X)) > 1e-3
    assert_close(again(X), before)
