"""Check jit, remat, scan, donation, forward mode and second order: two ways to the same number.

vmap, export, debug and promotion flags, and sizes of 0 have test files of their own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, SINGLES, split
from conftest import few
from jax.experimental import checkify, jet
from small_calls import assert_bits, assert_same, equations, f32, inputs

import memeff
from memeff import dot_product_attention

FAST_CASES = ("default_chunk", "key_lengths", "everything")


@pytest.mark.parametrize("name", few(SINGLES, FAST_CASES))
def test_jit_equals_eager(name):
    """The results are equal, up to the last bits, because the compiled loops inside are the same.

    The last bits may differ where XLA fuses the way to the loops differently.
    """
    args, kwargs = CASES[name].inputs(f32)
    static, arrays = split(kwargs)

    def call(args, arrays):
        return dot_product_attention(*args, **arrays, **static, return_residual=True)

    assert_same(jax.jit(call)(args, arrays), call(args, arrays), 5e-7)


# ---- layers: scan and remat


def layer(x, w, **kwargs):
    y = x @ w
    out = dot_product_attention(y, y, y, is_causal=True, chunk_size=(4, 6), **kwargs)
    return x + out


def layers(x, weights, checkpoint=None, **kwargs):
    """Apply a few attention layers by scan, each wrapped by `checkpoint` if given."""

    def step(x, w):
        return layer(x, w, **kwargs), None

    if checkpoint is not None:
        step = checkpoint(step)
    x, _ = jax.lax.scan(step, x, weights)
    return x


def layers_unrolled(x, weights, **kwargs):
    for w in weights:
        x = layer(x, w, **kwargs)
    return x


def layer_inputs():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 13, 2, 5))
    weights = rng.standard_normal((3, 5, 5))
    return jnp.asarray(x, f32), jnp.asarray(weights, f32)


_policies = jax.checkpoint_policies
POLICIES = {
    "everything_saveable": _policies.everything_saveable,
    "nothing_saveable": _policies.nothing_saveable,
    "dots_saveable": _policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": _policies.dots_with_no_batch_dims_saveable,
    "save_only_these_names": _policies.save_only_these_names(*memeff.RESIDUAL_NAMES),
    "save_any_names_but_these": _policies.save_any_names_but_these(*memeff.RESIDUAL_NAMES),
}
FAST_POLICIES = ("save_only_these_names",)


@pytest.mark.parametrize("policy", [None, *few(POLICIES, FAST_POLICIES)])
def test_scan_over_layers_with_remat(policy):
    checkpoint = None
    if policy:
        checkpoint = functools.partial(jax.checkpoint, policy=POLICIES[policy])
    run = functools.partial(layers, checkpoint=checkpoint)
    assert_same(gradients_with_and_without_lengths(run), unrolled_gradients(), 1e-5)


def gradients_with_and_without_lengths(run):
    """Return gradients of two losses on layers, without lengths and with them, by one program."""
    lengths = jnp.array([9, 13])

    def gradient(x, w, **kwargs):
        def loss(x, w):
            return (run(x, w, **kwargs) ** 2).sum()

        return jax.grad(loss, (0, 1))(x, w)

    def both(x, w):
        return gradient(x, w), gradient(x, w, key_value_seq_lengths=lengths)

    return jax.jit(both)(*layer_inputs())


@functools.cache
def unrolled_gradients():
    """Return the expected gradients, which are the same for every policy."""
    return gradients_with_and_without_lengths(layers_unrolled)


def walks_of_gradient(**remat) -> int:
    """Count the walks over tiles in the gradient of a small call, under remat if options come."""

    def call(q, k, v):
        return jnp.sin(dot_product_attention(jnp.sin(q), k, v, chunk_size=(4, 17)))

    wrapped = jax.checkpoint(call, **remat) if remat else call

    def loss(q, k, v):
        return wrapped(q, k, v).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    jaxpr = jax.make_jaxpr(gradient)(*inputs()).jaxpr
    return sum(eqn.primitive.name == "memeff_call" for eqn in equations(jaxpr))


def test_policy_by_name_spares_the_second_forward():
    """A policy that keeps out and lse by name walks the tiles forward once, and backward.

    With remat alone the walks are forward, again forward, and backward.
    """
    plain = walks_of_gradient()
    again = walks_of_gradient(policy=_policies.nothing_saveable)
    by_name = walks_of_gradient(policy=POLICIES["save_only_these_names"])
    other_policy = _policies.save_only_these_names("something_else")
    by_other_name = walks_of_gradient(policy=other_policy)
    assert again > plain, "remat recomputed nothing: the count tells nothing"
    assert by_name == plain
    assert by_other_name == again


# ---- donation


def test_donation():
    """The query's buffer may become out's, and the result is the same."""
    q, k, v = inputs(H=5)
    call = functools.partial(dot_product_attention, is_causal=True)
    expected = call(q, k, v)
    donated = jnp.array(q)
    run = jax.jit(call, donate_argnums=0)
    assert_same(run(donated, k, v), expected, 5e-7)
    assert donated.is_deleted()


# ---- forward mode and second order


def attention_loss(implementation, q):
    _, k, v = inputs()
    out = dot_product_attention(
        q, k, v, is_causal=True, implementation=implementation, chunk_size=(4, 6)
    )
    return (out**2).sum()


def layers_loss(implementation, q):
    weights = jnp.full((2, 3, 3), 0.2)
    return (layers(q, weights, implementation=implementation) ** 2).sum()


def jvp(f):
    """Return the function that gives the tangent of f(q) along cos(q)."""

    def tangent(q):
        return jax.jvp(f, (q,), (jnp.cos(q),))[1]

    return tangent


def linearize(f):
    """Return the function that gives the tangent of f(q) along q, by jax.linearize."""

    def tangent(q):
        _, linear = jax.linearize(f, q)
        return linear(q)

    return tangent


def hessian_vector(grad):
    """Return the function that multiplies the Hessian by cos(q), by reverse over reverse."""

    def product(q):
        return (grad(q) * jnp.cos(q)).sum()

    def gradient(q):
        return jax.grad(product)(q)

    return gradient


def at_stack(f):
    """Return f of q with one more dim in front."""

    def call(q):
        return f(q[None])

    return call


def sum_of_vmap(f):
    def total(q):
        return jax.vmap(f)(q).sum()

    return total


def at_broadcast(f):
    """Return f of q broadcast to the shape of a whole query."""

    def call(q):
        return f(jnp.broadcast_to(q, (2, 13, 4, 3)))

    return call


# Transformations of the loss, the outermost first. With "scan" the loss is that of layers.
FORWARD = {
    "jvp": [jvp],
    "jit(jvp)": [jax.jit, jvp],
    "jvp(jit)": [jvp, jax.jit],
    "jvp(vmap)": [at_stack, jvp, jax.vmap],
    "vmap(jvp)": [at_stack, jax.vmap, jvp],
    "jvp(remat)": [jvp, jax.checkpoint],
    "jvp(scan)": [jvp],
    "linearize": [linearize],
    "jit(linearize)": [jax.jit, linearize],
    "jacfwd": [jax.jacfwd],
    "jit(jacfwd)": [jax.jit, jax.jacfwd],
}
SECOND = {
    "grad(jvp)": [jax.grad, jvp],
    "grad(grad)": [hessian_vector, jax.grad],
    "jit(grad(grad))": [jax.jit, hessian_vector, jax.grad],
    "grad(jit(grad))": [hessian_vector, jax.jit, jax.grad],
    "grad(vmap(grad))": [at_stack, hessian_vector, jax.vmap, jax.grad],
    "grad(grad(vmap))": [at_stack, hessian_vector, jax.grad, sum_of_vmap],
    "jvp(grad)": [jvp, jax.grad],
    "vmap(jvp(grad))": [at_stack, jax.vmap, jvp, jax.grad],
    "hessian": [jax.hessian, at_broadcast],
    "grad(grad(remat))": [hessian_vector, jax.grad, jax.checkpoint],
    "grad(grad(scan))": [hessian_vector, jax.grad],
    "jvp(grad(scan(remat)))": [jvp, jax.grad, jax.checkpoint],
}
MODES = FORWARD | SECOND
FAST_MODES = {"jvp(jit)", "jvp(vmap)", "vmap(jvp)", "jvp(remat)", "jvp(scan)", "linearize"}
FAST_MODES |= {"grad(jvp)", "jvp(grad(scan(remat)))"}


def transformed_loss(mode, implementation):
    loss = layers_loss if "scan" in mode else attention_loss
    f = functools.partial(loss, implementation)
    for transform in reversed(MODES[mode]):
        f = transform(f)
    return f


@pytest.mark.parametrize("mode", few(MODES, FAST_MODES))
def test_forward_mode_and_second_order(mode):
    q, _, _ = inputs(K=2, G=2)
    if mode == "hessian":
        q = q[:1, :1, :1]
    actual = transformed_loss(mode, None)(q)
    expected = jax.jit(transformed_loss(mode, "reference"))(q)
    assert_same(actual, expected, 2e-5)


def test_linearize_then_transpose_is_reverse_mode():
    q, k, v = inputs()
    loss = functools.partial(attention_loss, None)
    _, linear = jax.linearize(loss, q)
    (actual,) = jax.linear_transpose(linear, q)(jnp.ones(()))
    assert_bits(actual, jax.grad(loss)(q))
    attend_to = functools.partial(dot_product_attention, q, k)
    refusal = "jax.linear_transpose of attention itself. Use jax.vjp"
    with pytest.raises(NotImplementedError, match=refusal):
        jax.linear_transpose(attend_to, v)(q[..., :1] * jnp.ones(5))


def test_transposed_gradient_is_the_tangent():
    """Solvers for implicit gradients transpose twice, also under vmap."""
    q, k, v = inputs()
    sinks = jnp.linspace(-1.0, 1.0, q.shape[2])
    q_all = jnp.stack([q, 2 * q])
    args = k, v, sinks
    directions = jnp.cos(k), jnp.sin(v), 1 + sinks

    def attend_to(k, v, sinks):
        def attend(q):
            return dot_product_attention(q, k, v, sinks=sinks, is_causal=True, return_residual=True)

        return jax.vmap(attend)(q_all)

    @jax.jit
    def both(args, directions):
        out, tangents = jax.jvp(attend_to, args, directions)
        _, pull = jax.vjp(attend_to, *args)
        (transposed,) = jax.linear_transpose(pull, out)(directions)
        return transposed, tangents

    assert_same(*both(args, directions), 1e-6)


def test_transposed_gradients_of_a_cotangent_that_calls_share():
    q, k, v = inputs()
    q_all = jnp.stack([q, 2 * q])
    v_all = jnp.stack([v, jnp.cos(v)])

    def gradient(q, dout):
        _, pull = jax.vjp(functools.partial(dot_product_attention, q, k), v)
        return pull(dout)[0]

    def gradients(dout):
        return jax.vmap(gradient, (0, None))(q_all, dout)

    outs = jax.vmap(dot_product_attention, (0, None, 0))(q_all, k, v_all)
    (transposed,) = jax.linear_transpose(gradients, outs[0])(v_all)
    assert_same(transposed, outs.sum(0), 1e-6)


def test_jet_is_refused_in_words():
    x = jnp.ones((1, 4, 2, 8))

    def attend_to_itself(x):
        return dot_product_attention(x, x, x)

    refusal = "does not support jax.experimental.jet.*Nest jax.jvp"
    with pytest.raises(NotImplementedError, match=refusal):
        jet.jet(attend_to_itself, (x,), ((x,),))


def test_checkify_does_not_look_inside():
    x = jnp.ones((1, 4, 2, 8))

    def divide_by_position(score, batch, head, q_pos, k_pos, params):
        return score / q_pos

    def check(score, *indices):
        checkify.check(score < 1, "a large score")
        return score

    def attend(x, score_fn=None):
        return dot_product_attention(x, x, x, score_fn=score_fn)

    checked = checkify.checkify(attend, checkify.all_checks)
    for score_fn in (None, divide_by_position):
        error, out = checked(x, score_fn)
        assert error.get() is None
        np.testing.assert_array_equal(out, attend(x, score_fn))
    with pytest.raises(ValueError, match="checkify.check which was not functionalized"):
        checked(x, check)
