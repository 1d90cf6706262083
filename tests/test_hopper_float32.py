"""Calls of the Hopper kernels in float32, whose products are three products of bfloat16 parts.

They must err less than JAX's float32 products on a Hopper GPU, which round factors to TF32. They
run in Mosaic's interpreter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import Result, cotangents, few, oracle_arguments, true_call
from hopper_cases import (
    CASES,
    assert_equal_bits,
    draw,
    f32,
    forward,
    needs_kernels,
    not_finite,
    position_arguments,
    run_kernels,
    small,
    unseen_filled,
)

import memeff
from memeff.device import pretend_device
from memeff.pallas.hopper.parts import merge_array, split_array

pytestmark = needs_kernels
DROPOUT = dict(
    dropout_rng=np.array([3, 4], np.uint32),
    dropout_rate=0.3,
    dropout_bits="mix32",
    broadcast_dropout=False,
)
FLOAT32_CASES = CASES | {"dropout": (small(T=130, S=200), DROPOUT | dict(is_causal=True))}


def in_tf32(x: np.ndarray) -> np.ndarray:
    """Return x with 10 bits of fraction, rounded."""
    return np.asarray(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10))


def assert_errs_less_than_tf32(result: Result, args, kwargs) -> None:
    """Check that each result errs at most an eighth of what rounding the inputs to TF32 costs.

    Products in TF32 lose more: they round p and ds, too. Gradients by numbers and lse have too few
    entries, or too small an error, to compare; they keep 14 bits.
    """
    truth = true_call(args, kwargs)
    rounded_args = [in_tf32(x) for x in args]
    dout, dlse = cotangents(args)
    call = oracle_arguments(rounded_args, kwargs)
    rounded_out, _ = oracle.attention(*rounded_args, **call)
    rounded_grads = oracle.gradients(*rounded_args, **call, dout=in_tf32(dout), dlse=dlse)
    np.testing.assert_allclose(result.lse, truth.lse, rtol=2.0**-14, atol=2.0**-14)

    def error(x, expected):
        return np.sqrt(np.mean(np.square(x.astype(np.float64) - expected)))

    results = {"out": (result.out, truth.out, rounded_out)}
    for name, x in result.grads.items():
        results[name] = x, truth.grads[name], rounded_grads[name]
    for name, (x, expected, rounded) in results.items():
        assert np.isfinite(x).all(), name
        if x.ndim > 1:
            allowed = error(rounded, expected) / 8
        else:
            allowed = 2.0**-14 * max(1.0, np.abs(expected).max())
        assert error(x, expected) <= allowed + 1e-7, name


@pytest.mark.parametrize("name", few(FLOAT32_CASES, ("causal, tails", "128")))
def test_values(name):
    z, kwargs = FLOAT32_CASES[name]
    args = draw(f32, z)
    assert_errs_less_than_tf32(run_kernels(args, kwargs, "float32"), args, kwargs)


@pytest.mark.slow
def test_gradient_of_divided_groups(monkeypatch):
    monkeypatch.setattr("memeff.pallas.hopper.backward_key.group_parts", lambda sizes, *_: sizes.G)
    args = draw(f32, small(T=66, S=100, K=2, G=3))
    kwargs = dict(is_causal=True)
    assert_errs_less_than_tf32(run_kernels(args, kwargs, "float32"), args, kwargs)


def test_a_function_of_logits():
    """Scores and the gradient by their params need no more than in 16 bits."""
    args = draw(f32, small(T=70, S=90, G=2))
    slopes = jnp.array([0.1, 0.7])
    kwargs = dict(is_causal=True, score_fn=memeff.scores.alibi(slopes))
    bias = slopes[:, None, None] * (np.arange(90) - np.arange(70)[:, None])
    out, lse = forward(args, **kwargs)
    expected = oracle.attention(*args, is_causal=True, bias=np.asarray(bias, np.float64)[None])
    np.testing.assert_allclose(out, expected[0], atol=1e-4)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5)


# ---- numbers that are not finite


@not_finite
@pytest.mark.parametrize("name", few(("129", "lengths", "keys masked, padded"), ("129",)))
def test_what_nobody_sees(name):
    """It changes no bit of out and lse, and the gradients by the last of their 16 bits at most.

    Tiles without masks are done again with masks there, and XLA fuses products and sums otherwise.
    """
    z, kwargs = CASES[name]
    args = draw(f32, z)
    cotangent = cotangents(args)
    seen = oracle.seen_by(*args[:2], **position_arguments(kwargs))
    dirty_args, dirty_cotangent, has_hidden = unseen_filled(args, seen, cotangent)
    assert has_hidden
    clean = run_kernels(args, kwargs, "float32", cotangent)
    dirty = run_kernels(dirty_args, kwargs, "float32", dirty_cotangent)
    assert_equal_bits(dirty[:2], clean[:2])
    for argument, x in clean.grads.items():
        difference = np.abs(dirty.grads[argument] - x).max()
        assert difference <= 2.0**-15 * np.abs(x).max(), argument


@not_finite
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it_in_its_column():
    query, key, value = draw(f32, small(T=200, S=200))
    value[:, 150, :, 5] = np.inf
    out, lse = forward((query, key, value), is_causal=True)
    expected = np.zeros(out.shape, bool)
    expected[:, 150:, :, 5] = True
    np.testing.assert_array_equal(~np.isfinite(out), expected)
    assert np.isfinite(lse).all()


def test_a_key_that_dwarfs_the_others():
    """Its rows are done again with a running maximum, from parts that are read back."""
    query, key, value = draw(f32, small(T=128, S=512))
    key[:, 400] *= 200
    args = query, key, value
    out, _ = forward(args)
    np.testing.assert_allclose(out, oracle.attention(*args)[0], atol=2e-3)


# ---- parts


def test_two_parts_hold_16_bits():
    rng = np.random.default_rng(0)
    x = f32(rng.standard_normal((1000, 8)) * 2.0 ** rng.integers(-90, 90, (1000, 8)))
    parts = np.asarray(jax.jit(split_array)(x))
    assert parts.dtype == jnp.bfloat16
    assert parts.shape == (1000, 16)
    both = np.asarray(merge_array(parts, jnp.float32))
    assert (np.abs(both - x) <= 2.0**-16 * np.abs(x)).all()


def test_parts_of_the_largest_numbers():
    """A number that rounds to infinity stays finite, and one that is not finite has no rest."""
    largest = float(np.finfo(f32).max)
    x = f32([[largest, -largest, np.inf, -np.inf, np.nan, 0]])
    first, second = np.split(np.asarray(split_array(x)).astype(np.float64), 2, axis=1)
    np.testing.assert_allclose((first + second)[0, :2], x[0, :2], rtol=2.0**-15)
    np.testing.assert_array_equal(first[0, 2:], x[0, 2:])
    np.testing.assert_array_equal(second[0, 2:], 0)


# ---- which calls


KERNELS_RUN = '"pallas" runs this call'


def explanation(dtype=jnp.float32, H: int = 64, **kwargs) -> str:
    x = jax.ShapeDtypeStruct((1, 256, 2, H), dtype)
    with pretend_device("gpu", "9.0"):
        return memeff.explain(x, x, x, **kwargs)


@pytest.mark.parametrize("precision", [None, "default", "high", "tensorfloat32", ("high", "high")])
def test_precisions_that_parts_have(precision):
    assert KERNELS_RUN in explanation(precision=precision)


HIGHER = "compute float32 to 16 bits, and this call asks for a higher precision"


FLOAT32_PRODUCTS = jax.lax.DotAlgorithm(f32, f32, f32)


@pytest.mark.parametrize("precision", ["highest", "float32", ("high", "highest"), FLOAT32_PRODUCTS])
def test_a_higher_precision_is_refused(precision):
    assert HIGHER in explanation(precision=precision)


def test_the_default_precision_of_jax_counts():
    with jax.default_matmul_precision("highest"):
        assert HIGHER in explanation()
        assert HIGHER not in explanation(precision="high")
    with jax.default_matmul_precision("tensorfloat32"):
        assert HIGHER not in explanation()


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(H=192), "heads of up to 128 in float32, and this call has H=192, D=192"),
        (
            dict(mask=jax.ShapeDtypeStruct((256, 256), jnp.bool_)),
            "support `bias` and dense masks in 16 bits, not in float32",
        ),
    ],
)
def test_what_float32_lacks(options, reason):
    assert reason in explanation(**options)


def test_the_gradient_in_one_kernel_takes_16_bits():
    x = jnp.zeros((1, 64, 1, 64))
    lacks = 'backward="fused" supports 16 bits, and this call has float32'
    with pretend_device("gpu", "9.0"), pytest.raises(NotImplementedError, match=lacks):
        memeff.dot_product_attention(x, x, x, backward="fused")


def test_tangents_take_the_chunked_path(monkeypatch):
    from memeff.pallas.hopper import calls, implementation
    from memeff.problem import Operands, Problem, Schedule

    monkeypatch.setattr(calls, "tangent", None)  # a call would raise
    x = jnp.ones((1, 8, 1, 4))
    operands = Operands(x, x, x)
    out = jnp.ones((1, 1, 1, 8, 4))
    lse = memeff.softmax.Lse(jnp.full((1, 1, 1, 8), 4 + np.log(8), f32), None)
    schedule = Schedule(chunk_size=(8, 8))
    dout, dlse = implementation.tangent(Problem(), schedule, operands, out, lse, operands)
    np.testing.assert_allclose(dout, 1, rtol=1e-5)
    np.testing.assert_allclose(dlse, 8, rtol=1e-5)
