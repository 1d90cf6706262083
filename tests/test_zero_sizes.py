"""Check calls in which a size is 0: no batch entry, no query, no key, no head, no value dim."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from small_calls import inputs

from memeff import (
    KVCache,
    block_mask,
    dot_product_attention,
    linear_cross_entropy,
    masks,
    paged_attention,
)

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
EXTRAS = [
    "plain",
    "causal",
    "lengths",
    "offset",
    "bias",
    "mask",
    "segments",
    "functions",
    "dropout",
]


def extra_arguments(extra, leads, T, S, N):
    """Return the keyword arguments named `extra`, one of EXTRAS, for a call of these sizes."""
    match extra:
        case "plain":
            return {}
        case "causal":
            return dict(is_causal=True)
        case "lengths":
            return dict(
                key_value_seq_lengths=jnp.full(leads, min(S, 3)),
                query_seq_lengths=jnp.full(leads, min(T, 3)),
            )
        case "offset":
            return dict(q_offset=jnp.full(leads, 2), is_causal=True)
        case "bias":
            return dict(bias=jnp.ones((*leads, N, T, S)))
        case "mask":
            return dict(mask=jnp.ones((*leads, 1, T, S), bool))
        case "segments":
            return dict(
                query_segment_ids=jnp.zeros((*leads, T), int),
                key_value_segment_ids=jnp.zeros((*leads, S), int),
            )
        case "functions":
            B = math.prod(leads)
            ids = jnp.zeros((B, T), int), jnp.zeros((B, S), int)
            return dict(
                mask_fn=masks.documents(*ids), score_fn=add_number, score_params=jnp.ones((B, N))
            )
        case "dropout":
            return dict(
                dropout_rng=jax.random.key(0),
                dropout_rate=0.5,
                broadcast_dropout=False,
            )
    raise ValueError(extra)


def add_number(score, batch, head, q_pos, k_pos, params):
    return score + params[batch, head]


def run_zero(size, extra, implementation):
    """Return out, lse and gradients of a call with a size of 0."""
    q, k, v = inputs(**ZEROS[size])
    *leads, T, N, _ = q.shape
    S = k.shape[-3]
    kwargs = extra_arguments(extra, tuple(leads), T, S, N)
    call = functools.partial(
        dot_product_attention, **kwargs, implementation=implementation, return_residual=True
    )
    (out, lse), pull = jax.vjp(call, q, k, v)
    cotangents = jnp.ones_like(out), jnp.ones_like(lse)
    return out, lse, pull(cotangents)


def assert_zero(size, out, lse, grads):
    """Check that out is 0 and lse -inf without keys, and that gradients are empty or 0."""
    q, k, v = inputs(**ZEROS[size])
    *leads, T, N, _ = q.shape
    S = k.shape[-3]
    D = v.shape[-1]
    assert out.shape == (*leads, T, N, D)
    assert lse.shape == (*leads, T, N)
    if S == 0:
        np.testing.assert_array_equal(out, 0)
        np.testing.assert_array_equal(lse, -np.inf)
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert all(np.isfinite(g).all() for g in grads)
    if 0 in out.shape and D != 0:
        assert all(not np.asarray(g).any() for g in grads)


# ---- in jit


def extras_in_jit(size, implementation):
    """Return the extras that run in jit with this size of 0; the slow set has all, outside jit.

    The default implementation runs all of them with queries or keys of 0.
    """
    if implementation == "reference":
        return EXTRAS if size == "S" else ["plain", "bias"]
    return EXTRAS if size in ("T", "S") else ["plain", "causal"]


IN_JIT = []
for implementation, size in itertools.product(["xla", "reference"], ZEROS):
    for extra in extras_in_jit(size, implementation):
        IN_JIT.append((size, extra, implementation))


@functools.cache
def run_in_jit(size, implementation):
    """Run all calls of `extras_in_jit`, compiled as one program."""
    extras = extras_in_jit(size, implementation)

    def run():
        return {extra: run_zero(size, extra, implementation) for extra in extras}

    return jax.jit(run)()


@pytest.mark.parametrize("size, extra, implementation", IN_JIT)
def test_sizes_of_zero(size, extra, implementation):
    """The output is 0 and lse -inf where no key is; gradients exist, and are empty or 0."""
    assert_zero(size, *run_in_jit(size, implementation)[extra])


# ---- outside jit


EAGER = [*itertools.product(ZEROS, EXTRAS, ["xla", "reference"])]
FAST_EAGER = [
    ("S", "plain", "xla"),
    ("T", "causal", "xla"),
    ("B", "lengths", "xla"),
    ("S", "plain", "reference"),
]


@pytest.mark.parametrize("size, extra, implementation", few(EAGER, FAST_EAGER))
def test_sizes_of_zero_outside_jit(size, extra, implementation):
    assert_zero(size, *run_zero(size, extra, implementation))


def test_a_ring_of_no_sequences():
    x = jnp.ones((0, 1, 2, 8))
    ring = KVCache.zeros(0, 4, 2, 8, window=2).append(x, x)
    assert ring.attend(x, mask_fn=masks.prefix(jnp.zeros(0, int))).shape == x.shape


def test_a_tree_of_no_drafts():
    x = jnp.ones((2, 3, 2, 8))
    tree = masks.tree(masks.ancestors_of(jnp.zeros((2, 0), int)), 3)
    assert dot_product_attention(x[:, :0], x, x, mask_fn=tree, q_offset=3).shape == (2, 0, 2, 8)


@pytest.mark.parametrize(("B", "T", "S"), [(2, 0, 3), (2, 3, 0), (2, 0, 0), (0, 3, 3)])
def test_params_of_size_zero(B, T, S):
    """A call without pairs evaluates no function, because JAX does not index empty params."""
    query, key = jnp.ones((B, T, 2, 4)), jnp.ones((B, S, 2, 4))
    documents = masks.documents(jnp.zeros((B, T), int), jnp.zeros((B, S), int))
    table = {"query": jnp.ones(T), "key": jnp.ones(S)}

    def positions(x, position, which, params):
        return x * params[which][position]

    block = block_mask(documents, T, S, batch=B)
    for mask in (block, block_mask(masks.causal(), T, S, batch=B)):
        assert mask.sparsity == (0 if 0 in (T, S) else 1)
        out = dot_product_attention(
            query, key, key, mask_fn=mask, qk_transform=positions, qk_transform_params=table
        )
        assert out.shape == query.shape and not out.any()
    if not B:  # it hides all pairs, so that it suits no other batch
        with pytest.raises(ValueError, match="made with batch=0, and this call has B=1"):
            x = jnp.ones((1, T, 2, 4))
            dot_product_attention(x, x, x, mask_fn=block)
    for call, name in (
        (lambda: block_mask(None, T, S, batch=B), "mask_fn"),
        (lambda: dot_product_attention(query, key, key, qk_transform=3), "qk_transform"),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a function"):
            call()


def test_vmap_over_no_calls():
    """The results have the shapes of the calls and no entries, also in derivatives."""

    def attend(x):
        return dot_product_attention(x, x, x, is_causal=True)

    def loss(x):
        return linear_cross_entropy(x[..., 0, :], jnp.ones((2, 4)), jnp.zeros((2, 3), int))

    def gradient(x):
        return jax.grad(lambda x: attend(x).sum())(x)

    one = jax.ShapeDtypeStruct((2, 3, 1, 2), jnp.float32)
    for call, sizes in ((attend, (3, 0)), (gradient, (0,)), (gradient, (3, 0)), (loss, (0,))):
        shape = jax.eval_shape(call, one).shape
        for _ in sizes:
            call = jax.vmap(call)
        x = jax.ShapeDtypeStruct((*sizes, *one.shape), one.dtype)
        assert jax.eval_shape(call, x).shape == (*sizes, *shape)


def test_derivatives_along_no_direction():
    """A Jacobian with no columns is made, and beside no tangent stands the output."""
    x = jnp.ones((1, 3, 2, 4))
    empty = {"query": x[:, :0], "value": x[..., :0], "score_params": jnp.zeros(0)}
    for name, argument in empty.items():

        def attend(argument, name=name):
            arguments = dict(query=x, key=x, value=x, score_params=jnp.ones(1)) | {name: argument}
            return dot_product_attention(**arguments, score_fn=add_sum)

        out = jax.eval_shape(attend, argument)
        for jacobian in (jax.jacfwd, jax.jacrev):
            result = jax.eval_shape(jacobian(attend), argument)
            assert result.shape == (*out.shape, *argument.shape)

    def with_tangent(dx):
        return jax.jvp(functools.partial(dot_product_attention, key=x, value=x), (x,), (dx,))

    out, tangents = jax.vmap(with_tangent, out_axes=(None, 0))(jnp.zeros((0, *x.shape)))
    np.testing.assert_allclose(out, x, rtol=1e-6)
    assert tangents.shape == (0, *x.shape)


def add_sum(score, batch, head, q_pos, k_pos, params):
    return score + params.sum()


def test_head_size_zero_is_refused():
    with pytest.raises(ValueError, match="query has head size H=0"):
        dot_product_attention(*inputs(H=0))


def test_pages_without_a_number_are_refused():
    def call(pages, H):
        x = jnp.ones((pages, 4, 2, H))
        return paged_attention(jnp.ones((1, 1, 2, H)), x, x, [[-1]], [0], q_offset=0)

    with pytest.raises(ValueError, match="query has head size H=0"):
        call(3, 0)
    with pytest.raises(ValueError, match=r"key_pages has no page \(shape \(0, 4, 2, 8\)\)"):
        call(0, 8)
