"""`memeff.replace_attention` and `find_attention`: what is found, the same function remains."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import CHOICES, DECOYS, B, N, Program, S, T, make_arrays
from conftest import few
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from replaced_checks import FOUND, assert_same, find, plain, qkv, qkv_of_one_head, replace, spelled
from small_calls import assert_close

import memeff
from memeff.rewrite.transform import MIN_LOGITS


@pytest.mark.parametrize("program", FOUND, ids=spelled)
def test_what_is_found(program):
    report = find(program, make_arrays())
    assert report.replaced and not report.left
    assert all(FOUND[program] in str(place) for place in report.replaced), report


# Spellings that together have each choice that changes the call, and rows that see no key.
FAST = (
    Program(heads="folded", scale="array", cap="tanh", mask="constant", bias="alibi"),
    Program(heads="grouped", mask="causal_padding", hiding="added", nesting="scan_mask"),
    Program(order="tbnh", mask="dense", bias="both", softmax="late", after="head_einsum"),
    Program(mask="empty_row", hiding="added", low="min", softmax="exp2", nesting="remat"),
    Program(mask="tril", bias="both", nesting="vmap"),
    Program(softmax="sink", mask="empty_row", nesting="scan"),
)


@pytest.mark.parametrize("program", few((*FAST, *FOUND), FAST), ids=spelled)
def test_same_function(program):
    with jax.enable_x64(True):
        assert_same(program, make_arrays("float64"))


def programs():
    """Return a strategy of programs, one in eight of them a decoy."""
    choices = {name: st.sampled_from(values) for name, values in CHOICES.items()}
    choices["decoy"] = st.sampled_from((*[None] * 7 * len(DECOYS), *DECOYS))
    return st.builds(Program, **choices).map(_with_its_decoy)


def _with_its_decoy(program):
    """Return the program with a softmax in which its decoy can be: jax.nn's has no other sum."""
    return dataclasses.replace(program, softmax="plain") if program.decoy else program


@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(programs())
def test_random_programs_are_replaced_or_left_with_a_reason(program):
    report = find(program, make_arrays())
    assert report.left or report.replaced and program.decoy is None


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(programs())
def test_random_programs_are_the_same_function(program):
    with jax.enable_x64(True):
        arrays = make_arrays("float64")
        report = find(program, arrays)
        if report.replaced:
            assert program.decoy is None
            assert_same(program, arrays)
        else:
            assert report.left


REASONS = {
    "wrong_axis": "divided by something that depends on the keys",
    "twice": "another product uses the same logits or probabilities",
    "returned": r"used by `reduce_sum` at .*attention_programs.py",
    "other_sum": "not divided by their sum over the keys",
    "values": "pass through `sort`",
    "transposed": "not made of a product",
    "zeros_after": "hides other keys than the mask before it",
}


@pytest.mark.parametrize("decoy", DECOYS)
@pytest.mark.parametrize("softmax", ["jax", "plain"])
def test_decoys_are_left(decoy, softmax):
    if decoy == "other_sum" and softmax == "jax":
        pytest.skip("the sum is inside jax.nn.softmax")
    program = Program(softmax=softmax, decoy=decoy)
    arrays = make_arrays()
    report = find(program, arrays)
    assert report.left and not report.replaced
    if softmax == "plain":
        assert re.search(REASONS[decoy], str(report)), report
    for place in report.left:
        file, line = place.source.rsplit(":", 1)
        assert file.endswith("attention_programs.py") and int(line) > 0
    with pytest.raises(ValueError, match="replaced nothing"):
        jax.eval_shape(replace(program, strict=True), arrays)


def test_small_attention_is_left():
    report = memeff.find_attention(plain, *qkv())
    (place,) = report.left
    assert f"T x S = 16 x 16 is less than min_logits={MIN_LOGITS}" in place.reason
    one_query = memeff.find_attention(
        lambda q, k, v: plain(q[:, :1], k, v), *qkv(2**15), min_logits=0
    )
    assert "one query only" in one_query.left[0].reason
    one_key = memeff.find_attention(lambda q, k, v: plain(q, k[:, :1], v[:, :1]), *qkv())
    assert "one key only" in one_key.left[0].reason


def test_derivative_inside_is_refused():
    gradient = jax.grad(lambda q, k, v: plain(q, k, v).sum())
    with pytest.raises(ValueError, match=r"write jax.grad\(replace_attention\(f\)\)"):
        replace(gradient)(*qkv())
    assert "replace attention before" in str(find(gradient, *qkv()))


def test_arguments():
    q, k, v = qkv()

    def attend(arrays, *, flip: bool, name: str, scale=1.0):
        assert isinstance(flip, bool) and isinstance(name, str)
        out = plain(arrays["q"] * scale, arrays["k"], v)
        return {name: out[::-1] if flip else out}

    replaced = replace(attend, strict=True)
    arrays = {"q": q, "k": k}
    out = replaced(arrays, flip=False, name="x", scale=2.0)
    np.testing.assert_allclose(out["x"], plain(2.0 * q, k, v), atol=1e-6)
    assert replaced.__name__ == "attend"
    signs = replace(lambda x, zero: plain(x, k, v) * np.copysign(1, zero))
    np.testing.assert_array_equal(signs(q, 0.0), -signs(q, -0.0))
    with pytest.raises(TypeError, match="must be arrays or hashable"):
        replaced(arrays, flip=False, name={1, 2})
    with pytest.raises(TypeError, match="takes a function, got int"):
        memeff.replace_attention(3)
    for wrong in (None, np.nan):
        with pytest.raises(
            TypeError, match=rf"min_logits must be a number of pairs .* got {wrong}"
        ):
            find(plain, *qkv(), min_logits=wrong)


def test_errors_of_the_function_name_it():
    def decide(q, k, v):
        return q if plain(q, k, v).sum() > 0 else k

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"tracing the function decide"):
        replace(decide)(*qkv())


def test_higher_derivatives():

    def second(f, q, k, v):
        g = jax.grad(lambda q: jnp.sin(f(q, k, v)).sum())
        return jax.jvp(g, (q,), (jnp.cos(q),))

    @jax.jit
    def both(q, k, v):
        return second(plain, q, k, v), second(replace(plain), q, k, v)

    expected, found = both(*qkv(5))
    assert_close(found, expected, atol=1e-5)


def test_custom_derivatives_are_left():
    @jax.custom_vjp
    def attend(q, k, v):
        return plain(q, k, v)

    attend.defvjp(lambda *x: (plain(*x), x), lambda x, d: (d, d, d))
    (place,) = find(attend, *qkv()).left
    assert "a function with a derivative of its own" in str(place)

    def stopped(q, k, v):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k)
        weights = jnp.exp(logits) / lax.stop_gradient(jnp.exp(logits).sum(-1, keepdims=True))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    assert not find(stopped, *qkv()).replaced


def test_report_names_what_stays():
    arrays = make_arrays()
    (place,) = find(Program(mask="dense", bias="dense"), arrays).replaced
    assert place.sizes == (B, N, T, S)
    assert ("bias", N * T * S * 4) in place.pair_arrays
    assert ("mask", B * T * S) in place.pair_arrays
    (place,) = find(Program(mask="tril", bias="alibi"), arrays).replaced
    assert not place.pair_arrays
    assert place.bytes_before is not None and place.bytes_after is not None

    def two_of_each(q, k, v, masks, biases):  # a call has one argument for each
        s = jnp.where(masks[0] & masks[1], q @ k.T + biases[0] + biases[1], -1e9)
        return jax.nn.softmax(s) @ v

    arrays = qkv_of_one_head()
    (place,) = find(
        two_of_each, *arrays, [jnp.ones((16, 16), bool)] * 2, [jnp.ones((16, 16))] * 2
    ).replaced
    assert sorted(place.pair_arrays) == [
        ("bias", 1024),
        ("bias", 1024),
        ("mask", 256),
        ("mask", 256),
    ]
    assert not dataclasses.asdict(find(lambda x: x, 1.0))["places"]
