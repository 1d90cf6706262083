"""Values and gradients of the Hopper kernels with the user's functions, against the oracle.

The kernels run in Mosaic's interpreter.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import (
    assert_as_good,
    assert_result,
    cotangents,
    few,
    plain_call,
    true_call,
)
from hopper_cases import (
    assert_equal_bits,
    bf16,
    draw,
    f32,
    forward,
    interpreted,
    needs_kernels,
    not_finite,
    not_finite_products,
    position_arguments,
    small,
    unseen_filled,
)
from hopper_function_cases import BLOCKED, CASES, Case, call, differentiated, pairs, run
from hopper_user_functions import TABLE, mask_of_keys, no_functions, soft_cap

import memeff
from memeff import dot_product_attention, scores
from memeff.device import pretend_device
from memeff.user_functions import Score

pytestmark = needs_kernels

FAST = ("alibi", "t5", "everything")


@not_finite_products
@pytest.mark.parametrize("name", few(CASES, FAST))
def test_values(name):
    with interpreted():
        assert_right(name, CASES[name])


def assert_right(name, case: Case):
    """Compare a case with the oracle, on whatever device there is."""
    args = draw(case.dtype, case.z)
    indices = pairs(case)
    kwargs = dict(case.kwargs)
    if case.bias is not None:
        wide = np.asarray(case.params, np.float64)
        kwargs["bias"] = np.asarray(case.bias(wide, *indices), f32)
    if case.mask is not None:
        kwargs["mask"] = case.mask(*indices)
    dtype = jnp.dtype(case.dtype).name
    truth = true_call(args, kwargs, dtype)
    plain = plain_call(args, kwargs, dtype)
    (out, lse), (dparams, dq, dk, dv) = differentiated(case, args)
    actual = truth._replace(out=out, lse=lse, grads={"query": dq, "key": dk, "value": dv})
    assert_result(actual, plain, truth, dtype, name)
    if case.slopes is not None:
        assert_params_gradient_right(name, case, dparams, plain, truth)


def assert_params_gradient_right(name, case: Case, dparams, plain, truth):
    """Compare the gradient of params with the gradient of the bias, by the chain rule."""
    assert dparams.dtype == case.params.dtype
    assert dparams.shape == case.params.shape
    slopes = case.slopes(*pairs(case))

    def chained(result):
        dbias = np.asarray(result.grads["bias"], np.float64)
        return (dbias * slopes).sum((1, 2, 3, 4))

    terms = truth.grads["bias"] * slopes
    assert_as_good(
        dparams.reshape(-1),
        [chained(x) for x in plain],
        chained(truth),
        jnp.dtype(case.dtype).name,
        f"{name}: params",
        np.sqrt((terms**2).sum((1, 2, 3, 4))).max(),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "cap",
    [1.5, np.array([1.0, 4.0], f32)],
    ids=["one", "of heads"],
)
def test_a_soft_cap_of_the_users(cap):
    """A cap as score_fn gives what `logits_soft_cap` gives, one head at a time."""
    z = small(T=70, S=140, G=np.size(cap))
    args = draw(bf16, z)
    cotangent = cotangents(args, "bfloat16")
    cap = jnp.asarray(cap, f32)
    case = Case(z, soft_cap, params=cap)
    (out, lse), (dcap, dq, _, _) = run(case, args)
    for head in range(z.N):

        def of_head(x, head=head):
            return x[:, :, head : head + 1] if x.shape[2] == z.N else x

        cap_of_head = np.float64(cap if cap.ndim == 0 else cap[head])
        dcap_of_head = dcap if cap.ndim == 0 else dcap[head]
        one_head = [of_head(x) for x in args]
        one_cotangent = tuple(of_head(x) for x in cotangent)
        capped = functools.partial(
            dot_product_attention,
            logits_soft_cap=cap_of_head,
            implementation="reference",
            return_residual=True,
        )
        (plain, plain_lse), pull = jax.vjp(capped, *one_head)
        plain_dq = pull(one_cotangent)[0]
        np.testing.assert_allclose(f32(of_head(out)), f32(plain), atol=8e-3)
        np.testing.assert_allclose(of_head(lse), plain_lse, atol=1e-5)
        np.testing.assert_allclose(f32(of_head(dq)), f32(plain_dq), atol=8e-3)
        true = gradient_of_soft_cap(one_head, cap_of_head, one_cotangent)
        np.testing.assert_allclose(dcap_of_head, true, rtol=0.02, atol=0.02)


def gradient_of_soft_cap(args, cap, cotangent):
    """Return the gradient of `logits_soft_cap` in float32."""
    wide = [f32(x) for x in args]
    dout, dlse = cotangent

    def by_cap(cap):
        return dot_product_attention(*wide, logits_soft_cap=cap, return_residual=True)

    _, pull = jax.vjp(by_cap, jnp.float32(cap))
    (dcap,) = pull((f32(dout), dlse))
    return dcap


@not_finite_products
@pytest.mark.parametrize("name", few(BLOCKED, ("documents",)))
def test_block_masks_drive_the_loops(name):
    """A block mask gives what its mask gives in the chunked path."""
    mask, kwargs, z = BLOCKED[name]
    args = draw(bf16, z)
    block = memeff.block_mask(mask, z.T, z.S, block_size=64)
    blocked = Case(z, no_functions, kwargs=kwargs | dict(mask_fn=block))
    unblocked = Case(z, no_functions, kwargs=kwargs | dict(mask_fn=mask))
    plain, pull = jax.vjp(functools.partial(call, unblocked, "xla", ()), *args)
    expected = jax.tree.leaves((plain, pull(cotangents(args, bf16))))
    results = jax.tree.leaves(run(blocked, args))
    for x, y in zip(results, expected, strict=True):
        finite = np.isfinite(f32(y))
        np.testing.assert_array_equal(np.isfinite(f32(x)), finite)
        np.testing.assert_allclose(f32(x)[finite], f32(y)[finite], atol=2e-2)


# ---- numbers that nobody sees, and rows that are done again


@not_finite_products
@pytest.mark.parametrize(
    "scored",
    few((False, True), (False,)),
    ids=["masked", "masked and scored"],
)
def test_what_a_mask_hides_changes_no_bit(scored):
    hidden = np.isin(np.arange(200), [3, 77, 78, 150, 199])
    kwargs = dict(mask_fn=mask_of_keys(~hidden))
    if scored:
        alibi = scores.alibi(np.array([0.1], f32))
        kwargs["score_fn"] = alibi.then(scores.t5(TABLE[:, :1]))
    case = Case(small(T=70, S=200), no_functions, kwargs=kwargs)
    query, key, value = draw(bf16, case.z)
    clean = run(case, (query, key, value))
    key[:, hidden] = np.nan
    value[:, hidden] = np.inf
    assert_equal_bits(run(case, (query, key, value)), clean)


NOTHING_HIDDEN = (
    "alibi, 128, float16",
    "numbers of keys",
    "numbers of queries",
    "t5",
    "differences, masked",
    "numbers of keys that learn",
    "documents",
    "segments",
)


@pytest.mark.slow
@not_finite
@pytest.mark.parametrize("name", [name for name in CASES if name not in NOTHING_HIDDEN])
def test_what_nobody_sees_changes_no_bit(name):
    """Hidden numbers in keys, values, queries and cotangents change no bit of any result.

    The gradients of params are among the results.
    """
    case = CASES[name]
    args = draw(case.dtype, case.z)
    seen = oracle.seen_by(*args[:2], **position_arguments(case.kwargs))
    if case.mask is not None:
        seen = seen & case.mask(*pairs(case))
    dirty, cotangent, has_hidden = unseen_filled(args, seen, cotangents(args, case.dtype))
    assert has_hidden
    with interpreted():
        clean_results = differentiated(case, args)
        dirty_results = differentiated(case, dirty, cotangent)
    assert_equal_bits(dirty_results, clean_results)


@pytest.mark.slow
@not_finite_products
def test_a_key_that_dwarfs_the_others_under_a_score():
    """Rows whose fixed maximum fails are done again with the score as well."""
    query, key, value = draw(bf16, small(T=64, S=450))
    key[:, 300] *= bf16(200)
    line = Score(lambda s, b, h, i, j, p: s + 0.01 * (i - j))
    score_fn = line.then(scores.t5(TABLE[:, :1]))
    kwargs = dict(is_causal=True, q_offset=384, score_fn=score_fn)
    out, lse = forward((query, key, value), **kwargs)
    plain, plain_lse = dot_product_attention(query, key, value, **kwargs, return_residual=True)
    np.testing.assert_allclose(f32(out), f32(plain), atol=2e-2)
    np.testing.assert_allclose(lse, plain_lse, rtol=1e-5, atol=1e-5)


def in_a_circle(batch, head, q_pos, k_pos, params):
    """Return True for pixels of an image of 16 x 16 that are at most 5 apart."""
    rows = q_pos // 16 - k_pos // 16
    cols = q_pos % 16 - k_pos % 16
    return jnp.sqrt((rows * rows + cols * cols).astype(jnp.float32)) <= 5


def in_a_band(batch, head, q_pos, k_pos, params):
    return (q_pos - k_pos) // 4 < 3


@pytest.mark.parametrize(("mask_fn", "approximate"), [(in_a_circle, False), (in_a_band, True)])
def test_a_mask_is_never_computed_from_approximations(mask_fn, approximate):
    """A root that is 5 must not become 5.0000005."""
    x = jax.ShapeDtypeStruct((1, 256, 1, 64), bf16)
    call = functools.partial(dot_product_attention, mask_fn=mask_fn, implementation="pallas")
    with pretend_device("gpu", "9.0"):
        traced = str(jax.make_jaxpr(lambda *args: jax.vjp(call, *args)[1](args[0]))(x, x, x))
    found = re.findall(r"approx_math=(\w+)", traced)
    assert found == [str(approximate)] * 3
