"""A bias in the Hopper kernels, of every form, and its gradient: interpreted, by the oracle."""

import functools

import jax
import numpy as np
import pytest
from bias_cases import CASES, MASKS
from conftest import cotangents, few
from hopper_cases import (
    assert_equal_bits,
    assert_kernels,
    bf16,
    draw,
    f32,
    forward_and_gradients,
    interpreted,
    kernels,
    lowered,
    needs_kernels,
    not_finite,
    run_kernels,
    small,
)

from memeff import dot_product_attention, explain, plan
from memeff.device import pretend_device
from memeff.pallas.hopper import calls

pytestmark = needs_kernels


@not_finite
@pytest.mark.parametrize("name", few(CASES, ("pairs",)))
def test_values(name):
    assert_kernels(name, CASES[name])


@pytest.mark.slow
@not_finite
@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    """A dense mask, and any mask beside segments, is read as a bias."""
    assert_kernels(name, MASKS[name])


@pytest.mark.slow
@not_finite
def test_float16():
    bias = np.random.default_rng(4).standard_normal((70, 140))
    bias[:, ::3] = np.finfo(np.float16).min
    call = small(T=70, S=140), dict(bias=bias.astype(np.float16))
    assert_kernels("float16", call, "float16")


@pytest.mark.slow
@not_finite
@pytest.mark.parametrize("row_of_bias", [1, 70])
def test_nan_of_keys_that_a_bias_hides_changes_no_bit(row_of_bias):
    # Two tiles of 128 keys. With a third one, the interpreter would add in another order in the
    # second round: it starts each accumulator at zero.
    query, key, value = draw(bf16, small(T=70, S=200))
    bias = np.zeros((row_of_bias, 200), bf16)
    bias[:, 30:60] = -np.inf
    dout, dlse = cotangents((query, key, value), bf16)
    results = []
    for hidden in (1, np.nan):
        key, value = key.copy(), value.copy()
        key[:, 30:60] = hidden
        value[:, 30:60] = hidden
        args = query, key, value
        results.append(forward_and_gradients(args, dict(bias=bias), dout, dlse))
    clean, dirty = results
    for x in clean:
        assert np.isfinite(x).all()
    assert_equal_bits(dirty, clean)


@pytest.mark.slow
def test_a_bias_that_all_entries_share_has_the_sum_of_their_gradients():
    """The gradient of a shared bias is the sum of those of a bias for each entry."""
    args = draw(bf16, small(B=3, T=70, S=100, K=1, G=2))
    bias = np.random.default_rng(4).standard_normal((70, 100)).astype(f32)
    shared = run_kernels(args, dict(bias=bias)).grads["bias"]
    each = np.broadcast_to(bias, (3, 2, 70, 100))
    own = run_kernels(args, dict(bias=each)).grads["bias"]
    np.testing.assert_allclose(shared, own.sum((0, 1)), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("entries", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_vmap(shared, entries):
    """Calls under vmap have their own gradients, also of a bias that they share."""
    query, key, value = draw(bf16, small(B=2 * entries, T=70, S=100))
    bias = np.random.default_rng(4).standard_normal((2, 1, 1, 70, 100)).astype(f32)

    def gradients(bias, query, key, value):
        attend = functools.partial(dot_product_attention, implementation="pallas")
        out, pull = jax.vjp(lambda *args: attend(*args, bias=bias), query, key, value)
        _, pull_bias = jax.vjp(lambda bias: attend(query, key, value, bias=bias), bias)
        return out, *pull(out), *pull_bias(out)

    args = tuple(x.reshape(2, entries, *x.shape[1:]) for x in (query, key, value))
    with interpreted(detect_races=False):
        axes = (None if shared else 0, 0, 0, 0)
        mapped = jax.jit(jax.vmap(gradients, axes))(bias[0] if shared else bias, *args)
        one = jax.jit(gradients)
        single = [one(bias[0 if shared else n], *(x[n] for x in args)) for n in range(2)]
    assert_equal_bits(mapped, jax.tree.map(lambda *x: np.stack(x), *single))


@pytest.mark.slow
@pytest.mark.parametrize("along_bias", [True, False])
def test_tangents_are_those_of_the_chunked_path(along_bias):
    """Along a bias, and of calls with one, the chunked path computes tangents."""
    args = draw(bf16, small(T=70, S=100))
    bias = np.random.default_rng(4).standard_normal((70, 100)).astype(f32)

    def tangent(implementation):
        attend = functools.partial(dot_product_attention, implementation=implementation)
        if along_bias:
            return jax.jvp(lambda bias: attend(*args, bias=bias), (bias,), (bias,))[1]
        return jax.jvp(lambda *args: attend(*args, bias=bias), args, args)[1]

    with interpreted():
        actual = tangent("pallas")
    expected = tangent("xla")
    one_bit = 2.0**-7  # of bfloat16, relative
    np.testing.assert_allclose(f32(actual), f32(expected), rtol=one_bit, atol=2e-2)


def test_kernels_of_a_gradient():
    """One kernel more computes the gradient of a bias, and only if somebody reads it."""
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), bf16)
    bias = jax.ShapeDtypeStruct((1, 2, 128, 128), bf16)

    def gradients(of):
        def loss(query, bias):
            return dot_product_attention(query, query, query, bias=bias).astype(f32).sum()

        return lowered(jax.grad(loss, of), x, bias)

    assert kernels(gradients((0, 1))) == 4
    assert "memeff_dbias" in gradients(1)


def test_explain_names_the_tiles_of_a_mask_that_is_read_as_a_bias(monkeypatch):
    args = draw(bf16, small(T=256, S=256, H=128, D=128))
    kwargs = dict(mask=np.tri(256, dtype=bool)[None, None])
    tilings = []

    def attend(*args):
        tilings.append(args[5])
        return forward_kernel(*args)

    forward_kernel = calls.attend
    monkeypatch.setattr(calls, "attend", attend)
    lowered(functools.partial(dot_product_attention, **kwargs), *args)
    (tiling,) = tilings
    with pretend_device("gpu", "9.0"):
        text = str(explain(*args, **kwargs))
        assert plan(*args, **kwargs).chunk_size == (tiling.rows, tiling.keys)
    assert f"tiles of {tiling.rows} x {tiling.keys} logits" in text
