"""`memeff.find_attention` names each product that a softmax of another product reaches.

Each program is replaced, or left with a reason. None is missing from the report.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from replaced_checks import find, replace
from small_calls import assert_close

import memeff
from memeff.rewrite.scope import IN_DERIVATIVE

T, S, H, D = 7, 6, 4, 3
UNKNOWN = "a softmax meets what is not understood"
NO_PRODUCT = "the logits are not made of a product"
OTHER_SUM = "exponentials are not divided by their sum over the keys"
CUSTOM = "a function with a derivative of its own"


def make_arrays():
    rng = np.random.default_rng(0)
    shapes = ((T, H), (S, H), (S, D))
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    return *arrays, jnp.asarray(np.tril(np.ones((T, S), bool)))


def exponentials(s):
    return jnp.exp(s - s.max(-1, keepdims=True))


def fraction(e):
    return e / e.sum(-1, keepdims=True)


# ---- Replaced


def max_where(q, k, v, mask):
    s = q @ k.T
    highest = jnp.max(s, axis=-1, where=mask, initial=-jnp.inf, keepdims=True)
    return fraction(jnp.where(mask, jnp.exp(s - highest), 0)) @ v


def max_initial(q, k, v, mask):
    s = q @ k.T
    highest = jnp.max(s, axis=-1, where=mask, initial=-1e30, keepdims=True)
    return fraction(jnp.exp(s - highest) * mask) @ v


def sum_where(q, k, v, mask):
    s = q @ k.T
    e = jnp.exp(s - jnp.max(s, axis=-1, where=mask, initial=-jnp.inf, keepdims=True))
    return jnp.where(mask, e / jnp.sum(e, -1, where=mask, keepdims=True), 0) @ v


def finite_max(q, k, v, mask):
    s = jnp.where(mask, q @ k.T, -jnp.inf)
    highest = lax.stop_gradient(s.max(-1, keepdims=True))
    return fraction(jnp.exp(s - jnp.where(jnp.isfinite(highest), highest, 0))) @ v


def max_of_all(q, k, v, mask):
    s = q @ k.T
    return fraction(jnp.exp(s - s.max())) @ v


def constant_shift(q, k, v, mask):
    return fraction(jnp.exp(q @ k.T - 5.0)) @ v


def power(q, k, v, mask):
    s = q @ k.T
    return fraction(2.0 ** (s - s.max(-1, keepdims=True))) @ v


def inverse_power(q, k, v, mask):
    e = exponentials(q @ k.T)
    return (e * e.sum(-1, keepdims=True) ** -1) @ v


def remat_of_softmax(q, k, v, mask):
    return jax.checkpoint(jax.nn.softmax)(q @ k.T) @ v


def remat_of_probabilities(q, k, v, mask):
    return jax.checkpoint(lambda q, k: jax.nn.softmax(q @ k.T))(q, k) @ v


def names(q, k, v, mask):
    def attend(q, k, v):
        s = checkpoint_name(q @ k.T, "logits")
        return checkpoint_name(checkpoint_name(jax.nn.softmax(s), "probabilities") @ v, "out")

    policy = jax.checkpoint_policies.save_only_these_names("out")
    return jax.checkpoint(attend, policy=policy)(q, k, v)


def sharding_constraints(q, k, v, mask):
    """Constrain the sharding of the logits, of their mask and of the probabilities."""
    mesh = Mesh(np.array(jax.devices()[:1]), "data")

    def constrained(x):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec("data")))

    s = jnp.where(constrained(mask), constrained(q @ k.T), -1e9)
    return constrained(constrained(jax.nn.softmax(constrained(s / 2))) @ v)


def bias_of_buckets(q, k, v, mask):
    distance = jnp.arange(S) - jnp.arange(T)[:, None]
    buckets = jax.nn.one_hot(jnp.clip(distance + 2, 0, 4), 5)
    return jax.nn.softmax(q @ k.T + buckets @ q[0, jnp.array([0, 1, 2, 3, 0])]) @ v


def bias_of_vectors(q, k, v, mask):
    distance = jnp.arange(S) - jnp.arange(T)[:, None]
    vectors = jnp.sin(k[0] * distance[:, :, None])
    return jax.nn.softmax(q @ k.T + jnp.einsum("th,tsh->ts", q, vectors)) @ v


def tiled_positions(q, k, v, mask):
    visible = jnp.tile(jnp.arange(T)[:, None], S) >= jnp.tile(jnp.arange(S), (T, 1))
    return jax.nn.softmax(jnp.where(visible, q @ k.T, -1e9)) @ v


def scale_of_pairs(q, k, v, mask):
    return jax.nn.softmax(q @ k.T * jnp.exp(jnp.broadcast_to(q[0, 0], (T, S)))) @ v


def factor_of_pairs(q, k, v, mask):
    return (jax.nn.softmax(q @ k.T) * jnp.sin(jnp.broadcast_to(q[:, :1], (T, S)))) @ v


def sink_of_rows(q, k, v, mask):
    sink = jnp.sin(jnp.broadcast_to(q[0, 0], (T, 1)))
    return jax.nn.softmax(jnp.concatenate([q @ k.T, sink], -1))[:, :-1] @ v


def segments_of_pairs(q, k, v, mask):
    q_ids = jnp.broadcast_to(jnp.arange(T)[:, None] // mask.sum(-1, keepdims=True), (T, S)) + 1
    k_ids = jnp.broadcast_to(jnp.arange(S) // mask[-1].sum(), (T, S)) + 1
    return jax.nn.softmax(jnp.where(q_ids == k_ids, q @ k.T, -1e9)) @ v


def positions_as_bools(q, k, v, mask):
    """Hide the first key from the other queries; the number of the only head is false."""
    is_visible = lax.iota(jnp.int32, T).astype(bool)[:, None] <= lax.iota(jnp.int32, S).astype(bool)
    head = lax.iota(jnp.int32, 1).astype(bool)[:, None]
    return jax.nn.softmax(jnp.where(is_visible | head, q @ k.T, -1e9)) @ v


FAST = (
    positions_as_bools,
    scale_of_pairs,
    factor_of_pairs,
    sink_of_rows,
    segments_of_pairs,
    max_initial,
    names,
    sharding_constraints,
    bias_of_buckets,
    bias_of_vectors,
)
SLOW = (
    max_where,
    sum_where,
    finite_max,
    max_of_all,
    constant_shift,
    inverse_power,
    remat_of_softmax,
    power,
    remat_of_probabilities,
    tiled_positions,
)


@pytest.mark.parametrize("program", FAST + SLOW)
def test_other_spellings_are_found(program):
    report = find(program, *make_arrays())
    assert report.replaced and not report.left, report


@pytest.mark.parametrize(
    "program", [*FAST, *[pytest.param(x, marks=pytest.mark.slow) for x in SLOW]]
)
def test_other_spellings_are_the_same_function(program):
    *arrays, mask = make_arrays()

    def results_of(f):
        def loss(*arrays):
            out = f(*arrays, mask)
            return (jnp.sin(out) * jnp.arange(D)).sum(), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)

    assert_close(results_of(replace(program, strict=True)), results_of(program), atol=5e-6)


def test_positions_that_are_tiled_are_read():
    assert "causal" in str(find(tiled_positions, *make_arrays()))


# ---- Left


def two_softmaxes(q, k, v, mask):
    s = q @ k.T
    return jax.nn.softmax(s) @ v, jax.nn.softmax(s, axis=0).T @ q


def sum_with_constant(q, k, v, mask):
    e = exponentials(q @ k.T) * mask
    return e / (e.sum(-1, keepdims=True) + 1e-9) @ v


def sum_of_at_least(q, k, v, mask):
    e = exponentials(q @ k.T) * mask
    return e / jnp.maximum(e.sum(-1, keepdims=True), 1e-9) @ v


def softmax_and_one(q, k, v, mask):
    e = exponentials(q @ k.T)
    return e / (1 + e.sum(-1, keepdims=True)) @ v


def sum_by_product(q, k, v, mask):
    e = exponentials(q @ k.T)
    return e / (e @ jnp.ones((S, 1))) @ v


def column_of_ones(q, k, v, mask):
    out = exponentials(q @ k.T) @ jnp.concatenate([v, jnp.ones((S, 1))], -1)
    return out[:, :-1] / out[:, -1:]


def last_running_sum(q, k, v, mask):
    e = exponentials(q @ k.T)
    return e / jnp.cumsum(e, -1)[:, -1:] @ v


def mean(q, k, v, mask):
    e = exponentials(q @ k.T)
    return e / e.mean(-1, keepdims=True) / S @ v


def expm1(q, k, v, mask):
    s = q @ k.T
    return fraction(jnp.expm1(s - s.max(-1, keepdims=True)) + 1) @ v


def two_factors(q, k, v, mask):
    s = q @ k.T
    return fraction(jnp.exp(s) * jnp.exp(-s.max(-1, keepdims=True))) @ v


def loop_over_rows(q, k, v, mask):
    return lax.map(jax.nn.softmax, q @ k.T) @ v


def loop_over_rows_with_product(q, k, v, mask):
    return lax.map(lambda s: jax.nn.softmax(s) @ v, q @ k.T)


def loop_of_second_product(q, k, v, mask):
    p = jax.nn.softmax(q @ k.T)
    return lax.fori_loop(0, 3, lambda i, out: out + p @ v, jnp.zeros((T, D)))


def branches(q, k, v, mask):
    p = lax.cond(q.sum() > 0, jax.nn.softmax, lambda s: jax.nn.softmax(2 * s), q @ k.T)
    return p @ v


def own_softmax(q, k, v, mask):
    softmax = jax.custom_vjp(lambda s: jax.nn.softmax(s))
    softmax.defvjp(lambda s: (jax.nn.softmax(s),) * 2, lambda p, d: (p * d,))
    return softmax(q @ k.T) @ v


def own_attention(q, k, v, mask):
    attend = jax.custom_vjp(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v)
    attend.defvjp(lambda *x: (attend(*x), x), lambda arrays, d: arrays)
    return attend(q, k, v)


def composite_attention(q, k, v, mask):
    attend = lax.composite(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, "attention")
    return attend(q, k, v)


def custom_vmap_attention(q, k, v, mask):
    attend = custom_vmap(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v)
    attend.def_vmap(lambda size, is_mapped, q, k, v: (jnp.zeros((size, T, D)), True))
    return attend(q, k, v)


def composite_softmax(q, k, v, mask):
    return lax.composite(jax.nn.softmax, "softmax")(q @ k.T) @ v


def sum_of_multiplication(q, k, v, mask):
    p = jax.nn.softmax(q @ k.T)
    return (p[:, :, None] * v).sum(1)


def sums_of_multiplications(q, k, v, mask):
    p = jax.nn.softmax((q[:, None] * k).sum(-1))
    return (p[:, :, None] * v).sum(1)


def first_by_sum(q, k, v, mask):
    return jax.nn.softmax((q[:, None] * k).sum(-1)) @ v


def sorted_probabilities(q, k, v, mask):
    return jnp.sort(jax.nn.softmax(q @ k.T)) @ v


def largest(q, k, v, mask):
    p, keys = lax.top_k(jax.nn.softmax(q @ k.T), 3)
    return jnp.einsum("tk,tkd->td", p, v[keys])


def printed_logits(q, k, v, mask):
    s = q @ k.T
    jax.debug.callback(lambda x: None, s)
    return jax.nn.softmax(s) @ v


def relative_values(q, k, v, mask):
    """Use the probabilities of two heads for vectors of pairs too, which also give a bias."""
    vectors = jnp.sin(q[:, None] + k)
    q, k, v = (jnp.stack([x, 2 * x]) for x in (q, k, v))
    s = jnp.einsum("nth,nsh->nts", q, k) + jnp.einsum("nth,tsh->nts", q, vectors)
    p = jax.nn.softmax(s)
    return jnp.einsum("nts,nsd->ntd", p, v) + jnp.einsum("nts,tsh->nth", p, vectors)[..., :D]


def two_columns(q, k, v, mask):
    s = jnp.concatenate([q @ k.T, jnp.zeros((T, 2))], -1)
    return jax.nn.softmax(s)[:, :-2] @ v


def sink_of_a_query(q, k, v, mask):
    s = jnp.concatenate([q @ k.T, q[:, :1]], -1)
    return jax.nn.softmax(s)[:, :-1] @ v


def mask_of_a_column(q, k, v, mask):
    s = jnp.concatenate([q @ k.T, jnp.zeros((T, 1))], -1)
    return jax.nn.softmax(s + 1)[:, :-1] @ v


def shift_of_another_row(q, k, v, mask):
    s = q @ k.T
    highest = s.max(-1)
    e = jnp.exp(s - highest[:, None])
    return (e / (e.sum(-1) + jnp.exp(-highest[::-1]))[:, None]) @ v


def shift_of_another_axis(q, k, v, mask):
    x = q[:, None] * q
    s = jnp.einsum("bth,bsh->bts", x, x)
    highest = s.max(-1)
    e = jnp.exp(s - highest[..., None])
    return (e / (e.sum(-1) + jnp.exp(-highest.T))[..., None]) @ x


def sink_beside_another_maximum(q, k, v, mask):
    s = q @ k.T
    m = s.max(-1, keepdims=True)
    total = jnp.exp(s - m).sum(-1, keepdims=True) + jnp.exp(0.5 - s.max())
    return jnp.exp(s - jnp.log(total) - m) @ v


def logarithm_beside_another_axis(q, k, v, mask):
    x = q[:, None] * q
    s = jnp.einsum("bth,bsh->bts", x, x)
    highest = s.max(-1)
    total = jnp.exp(s - highest[..., None]).sum(-1)
    return jnp.exp(s - (highest.T + jnp.log(total))[..., None]) @ x


def column_that_hides(q, k, v, mask):
    s = jnp.pad(jnp.where(mask, q @ k.T, -1e9), ((0, 0), (0, 1)), constant_values=-1e9)
    return jax.nn.softmax(s)[:, :-1] @ v


def nan_of_a_factor(q, k, v, mask):
    return jnp.nan_to_num(jax.nn.softmax(q @ k.T) * q[:, :1]) @ v


def columns_between(q, k, v, mask):
    s = q @ k.T
    s = jnp.concatenate([s[:, :3], jnp.zeros((T, 1)), s[:, 4:], jnp.ones((T, 1))], -1)
    return jax.nn.softmax(s)[:, :-1] @ v


def padded_keys(q, k, v, mask):
    s = jnp.pad(q @ k.T, ((0, 0), (0, 4)), constant_values=-jnp.inf)
    return jax.nn.softmax(s) @ jnp.pad(v, ((0, 4), (0, 0)))


def keys_in_two_parts(q, k, v, mask):
    return jax.nn.softmax(jnp.concatenate([q @ k[:2].T, q @ k[2:].T], -1)) @ v


def talking_heads(q, k, v, mask):
    p = jax.nn.softmax(jnp.stack([q @ k.T, 2 * q @ k.T]))
    return jnp.einsum("hts,hg->gts", p, jnp.ones((2, 2))) @ v


def talking_logits(q, k, v, mask):
    s = jnp.einsum("hts,hg->gts", jnp.stack([q @ k.T, 2 * q @ k.T]), jnp.eye(2))
    return jax.nn.softmax(s) @ jnp.stack([v, 2 * v])


def divided_twice(q, k, v, mask):
    return fraction(jax.nn.softmax(q @ k.T) * mask) @ v


def softmax_of_softmax(q, k, v, mask):
    return jax.nn.softmax(jax.nn.softmax(q @ k.T)) @ v


def sinkhorn(q, k, v, mask):
    s = q @ k.T
    s = s - jax.nn.logsumexp(s, 0, keepdims=True)
    return jnp.exp(s - jax.nn.logsumexp(s, 1, keepdims=True)) @ v


def factor_after_the_maximum(q, k, v, mask):
    s = q @ k.T
    return fraction(jnp.exp((s - s.max(-1, keepdims=True)) / v[0, 0])) @ v


def square(q, k, v, mask):
    return jax.nn.softmax(q @ k.T) ** 2 @ v


def stopped_probabilities(q, k, v, mask):
    e = exponentials(q @ k.T)
    return (lax.stop_gradient(e) / e.sum(-1, keepdims=True)) @ v


def barrier(q, k, v, mask):
    return lax.optimization_barrier(jax.nn.softmax(q @ k.T)) @ v


def mean_of_heads(q, k, v, mask):
    s = jnp.einsum("th,nsh->nts", q, jnp.stack([k, 2 * k]))
    return jax.nn.softmax(s).mean(0) @ v


def mean_of_queries(q, k, v, mask):
    return jax.nn.softmax(q @ k.T).mean(0) @ v


def running_sum(q, k, v, mask):
    return jnp.cumsum(jax.nn.softmax(q @ k.T), -1) @ v


def first_row_of_zeros(q, k, v, mask):
    p = jax.nn.softmax(q @ k.T)
    return jnp.concatenate([jnp.zeros_like(p[:1]), p[1:]]) @ v


def rows_of_zeros(q, k, v, mask):
    p = jax.nn.softmax(jnp.where(mask, q @ k.T, -jnp.inf))
    return jnp.where(mask & (q[:, :1] > 0), p, 0) @ v


def exponentials_of_rows_of_zeros(q, k, v, mask):
    s = jnp.where(mask, q @ k.T, -jnp.inf)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return jnp.where(q[:, :1] > 0, e, 0) @ v / e.sum(-1, keepdims=True)


def integers(q, k, v, mask):
    return jax.nn.softmax(q.astype(int) @ k.astype(int).T / 2) @ v


def complex_values(q, k, v, mask):
    return jax.nn.softmax(q @ k.T) @ (1j * v)


def no_queries(q, k, v, mask):
    return jax.nn.softmax(q[:0] @ k.T) @ v


def no_head_size(q, k, v, mask):
    return jax.nn.softmax(q[:, :0] @ k[:, :0].T) @ v


def gradient_of_logsumexp(q, k, v, mask):
    return q + jax.grad(lambda q: jax.nn.logsumexp(q @ k.T, axis=-1).sum())(q)


def gradient_of_logarithm(q, k, v, mask):
    return q + jax.grad(lambda q: jnp.log(jnp.exp(q @ k.T).sum(-1)).sum())(q)


def gradients_in_a_loop(q, k, v, mask):
    return lax.scan(lambda q, _: (gradient_of_logsumexp(q, k, v, mask), None), q, length=2)[0]


def gradient_of_talking_heads(q, k, v, mask):
    return jax.grad(lambda q: talking_heads(q, k, v, mask).sum())(q)


LEFT = {
    sum_with_constant: OTHER_SUM,
    sum_of_at_least: "a small sum is replaced, and perhaps not only in rows that see no key",
    softmax_and_one: OTHER_SUM,
    sum_by_product: OTHER_SUM,
    column_of_ones: OTHER_SUM,
    last_running_sum: OTHER_SUM,
    mean: OTHER_SUM,
    expm1: UNKNOWN,
    two_factors: UNKNOWN,
    loop_over_rows: f"{UNKNOWN}.*between them stands `scan`",
    loop_over_rows_with_product: NO_PRODUCT,
    loop_of_second_product: f"{UNKNOWN}.*between them stands `scan`",
    branches: f"{UNKNOWN}.*between them stands `cond`",
    own_softmax: CUSTOM,
    own_attention: CUSTOM,
    composite_attention: "in `composite`, whose equations are not searched",
    custom_vmap_attention: "in `custom_vmap_call`, whose equations are not searched",
    composite_softmax: f"{UNKNOWN}.*between them stands `composite`",
    sum_of_multiplication: "written as a multiplication and a sum",
    sums_of_multiplications: "written as a multiplication and a sum",
    first_by_sum: f"{NO_PRODUCT}.*stops at `reduce_sum`",
    sorted_probabilities: f"{UNKNOWN}.*between them stands `sort`",
    largest: f"{UNKNOWN}.*between them stands `top_k`",
    two_columns: f"{NO_PRODUCT}.*stops at `concatenate`",
    sink_of_a_query: "a sink that differs from query to query",
    mask_of_a_column: "a column of the probabilities is left out, and is not joined to the logits",
    shift_of_another_row: "not divided by their sum over the keys, or not by that",
    shift_of_another_axis: "not divided by their sum over the keys, or not by that",
    sink_beside_another_maximum: "is not the logarithm of the sum of exp.s. over the keys",
    logarithm_beside_another_axis: "is not the logarithm of the sum of exp.s. over the keys",
    column_that_hides: "a column of -1e[+]09 beside the logits is no sink",
    nan_of_a_factor: "NaN or infinity is replaced after a factor that may make it",
    columns_between: "joined with parts other than one column",
    padded_keys: f"{NO_PRODUCT}.*stops at `pad`",
    keys_in_two_parts: f"{NO_PRODUCT}.*stops at `concatenate`",
    talking_heads: "divided by something that depends on the keys, as where the product sums over",
    talking_logits: "the keys of the first product differ from query to query",
    divided_twice: f"{UNKNOWN}.*a quotient by a sum",
    softmax_of_softmax: "the logits pass through `reduce_max`",
    sinkhorn: "the logits pass through `reduce_sum`, so a logit depends on other pairs$",
    factor_after_the_maximum: "multiply logits by an array before their maximum is subtracted",
    square: f"{UNKNOWN}.*the search stops at `integer_pow`",
    stopped_probabilities: f"{UNKNOWN}.*the search stops at `stop_gradient`",
    barrier: f"{UNKNOWN}.*between them stands `optimization_barrier`",
    mean_of_heads: f"{UNKNOWN}.*between them stands `reduce_sum`",
    printed_logits: "used by `debug_callback`",
    relative_values: r"used by (another product|`\w+`) at .*py:\d+$",
    two_softmaxes: "another product uses the same logits",
    mean_of_queries: f"{UNKNOWN}.*between them stands `reduce_sum`",
    running_sum: f"{UNKNOWN}.*between them stands `cumsum`",
    first_row_of_zeros: f"{UNKNOWN}.*between them stands `concatenate`",
    rows_of_zeros: "whole rows of the probabilities are set to 0 by a selection",
    exponentials_of_rows_of_zeros: "whole rows of the exponentials are set to 0 by a selection",
    integers: "a product of int32 and int32",
    complex_values: "a value of complex64",
    gradient_of_logsumexp: "a derivative that the program takes makes this softmax",
    gradient_of_logarithm: "a derivative that the program takes makes this softmax",
    gradients_in_a_loop: "a derivative that the program takes makes this softmax",
    gradient_of_talking_heads: "the program takes its derivative",
    no_queries: "an axis has no known size",
    no_head_size: "an axis has no known size",
}


@pytest.mark.parametrize("program", LEFT)
def test_what_is_left_has_a_reason(program):
    report = find(program, *make_arrays())
    assert not report.replaced
    for place in report.left:
        assert re.search(LEFT[program], place.reason, re.DOTALL), place
        assert re.search(r"test_replace_report.py:\d+$", place.source), place
    assert report.left


def sigmoid_of_product(q, k, v, mask):
    return jax.nn.sigmoid(q @ k.T) @ v


def silu_by_hand(q, k, v, mask):
    x = q @ k.T
    return (x / (1 + jnp.exp(-x))) @ v


def elu_and_layer_norm(q, k, v, mask):
    x = jax.nn.elu(q @ k.T)
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x @ v


def learned_temperature(q, k, v, mask):
    return jnp.exp(v[0, 0]) * (q @ k.T) @ v


def loss(q, k, v, mask):
    return (jax.nn.log_softmax(q @ k.T) * mask).sum()


def gradient_of_loss(q, k, v, mask):
    return jax.grad(lambda q: loss(q, k, v, mask))(q)


def call_of_memeff(q, k, v, mask):
    q, k, v = (x[None, :, None] for x in (q, k, v))
    return memeff.dot_product_attention(q, k, v, mask=mask, chunk_size=2)


@pytest.mark.parametrize(
    "program",
    [
        call_of_memeff,
        sigmoid_of_product,
        silu_by_hand,
        elu_and_layer_norm,
        learned_temperature,
        loss,
        gradient_of_loss,
    ],
)
def test_what_is_no_softmax_is_not_named(program):
    assert not find(program, *make_arrays()).places


@pytest.mark.parametrize("remat", [False, True])
def test_attention_in_a_gradient_is_named(remat):
    def attend(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    f = jax.checkpoint(attend) if remat else attend
    report = find(lambda q, k, v: jax.grad(lambda q: f(q, k, v).sum())(q), *make_arrays()[:3])
    assert {x.reason for x in report.left} == {IN_DERIVATIVE}


def test_a_gradient_that_makes_attention_is_kept():
    arrays = make_arrays()
    for program in (gradient_of_logsumexp, gradient_of_logarithm):
        np.testing.assert_array_equal(replace(program)(*arrays), jax.jit(program)(*arrays))


def test_symbolic_sizes_are_named():
    (length,) = jax.export.symbolic_shape("length")
    x = jax.ShapeDtypeStruct((length, H), jnp.float32)
    (place,) = find(lambda x: jax.nn.softmax(x @ x.T) @ x, x).left
    assert "an axis has no known size" in str(place)
