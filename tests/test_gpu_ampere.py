"""The Ampere kernels on a GPU, which may be a Hopper GPU: against the oracle, and equal bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import term_cases
from bias_cases import CASES as BIASES
from bias_cases import MASKS
from cases import qkv
from conftest import assert_truth, run_call
from gpu_calls import HOPPER, normal_arrays
from hopper_cases import FUSED

import memeff
from memeff.device import current_device
from memeff.pallas.ampere import capability

pytestmark = pytest.mark.gpu
CASES = {name: call for name, call in HOPPER.items() if call[0].H <= capability.LARGEST_HEAD}
CALLS_WITH_BIAS = {
    name: call
    for name, call in (BIASES | MASKS).items()
    if max(call[0].H, call[0].D) <= capability.LARGEST_HEAD
}


@pytest.fixture(autouse=True, scope="module", params=[False, True], ids=["many", "few"])
def ampere(request):
    """Choose the Ampere kernels, with tiles for many or for few thread blocks.

    Skip the test with the reason why they cannot run.
    """
    with capability.chosen(), pytest.MonkeyPatch.context() as patch:
        if reason := capability.for_device(current_device()):
            pytest.skip(reason)
        from memeff.pallas.ampere import calls

        patch.setattr(calls, "has_few_blocks", lambda operands: request.param)
        jax.clear_caches()  # of the other tiles
        yield


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CASES)
def test_ampere(name, dtype):
    sizes, arguments = CASES[name]
    args = qkv(np.random.default_rng(0), dtype, sizes)
    result = run_call(args, arguments | dict(implementation="pallas"), jnp.dtype(dtype).name)
    assert_truth(result, name, args, arguments, jnp.dtype(dtype).name)


@pytest.mark.parametrize("name", FUSED)
def test_fused_gradient(name):
    sizes, arguments, _ = FUSED[name]
    args = qkv(np.random.default_rng(0), jnp.bfloat16, sizes)
    kwargs = dict(implementation="pallas", backward="fused")
    result = run_call(args, arguments | kwargs, "bfloat16")
    assert_truth(result, name, args, arguments, "bfloat16")


@pytest.mark.parametrize("name", CALLS_WITH_BIAS)
def test_bias(name):
    sizes, arguments = CALLS_WITH_BIAS[name]
    args = qkv(np.random.default_rng(0), jnp.bfloat16, sizes)
    result = run_call(args, arguments | dict(implementation="pallas"), "bfloat16")
    assert_truth(result, name, args, arguments, "bfloat16")


@pytest.mark.parametrize("name", term_cases.CASES)
def test_gradients_of_scale_and_soft_cap(name):
    def run(args, kwargs):
        return run_call(args, kwargs | dict(implementation="pallas"), "bfloat16")

    term_cases.assert_case(name, run)


@pytest.mark.parametrize("score_fn", ["alibi", "t5"])
def test_gradients_of_a_score_fn_beside_them(score_fn):
    """On a GPU the chunked path keeps probabilities in 16 bits, too."""
    term_cases.assert_score_gradients(score_fn, np.float16, 1e-2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("queries", [1, 500], ids=["keys", "pairs"])
def test_nan_of_keys_that_a_bias_hides_changes_no_bit(queries, H, dtype):
    """The hidden keys are in tiles without other masks, too."""
    query, key, value = normal_arrays(*[(1, 500, 2, H)] * 3)
    bias = jax.random.normal(jax.random.key(3), (queries, 500), dtype)
    bias = bias.at[:, 100:300].set(-jnp.inf)

    @jax.jit
    def attend(query, key, value):
        call = functools.partial(memeff.dot_product_attention, bias=bias, return_residual=True)
        return call(query, key, value, implementation="pallas")

    dirty = query, key.at[:, 100:300].set(jnp.nan), value.at[:, 100:300].set(jnp.inf)
    for found, expected in zip(attend(*dirty), attend(query, key, value), strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(expected))


@pytest.mark.parametrize("H", [64, 128])
def test_values_that_nobody_sees_change_no_bit(H):
    args = normal_arrays(*[(1, 512, 2, H)] * 3)
    call = functools.partial(
        memeff.dot_product_attention,
        is_causal=True,
        key_value_seq_lengths=jnp.array([300]),
        implementation="pallas",
        return_residual=True,
    )
    attend = jax.jit(call)
    query, key, value = args
    dirty = query, key.at[:, 300:].set(jnp.nan), value.at[:, 300:].set(jnp.nan)
    for found, expected in zip(attend(*dirty), attend(*args), strict=True):
        np.testing.assert_array_equal(np.float32(found), np.float32(expected))


@pytest.mark.parametrize("H", [64, 128])
def test_two_runs_have_the_same_bits(H):
    args = normal_arrays(*[(2, 1000, 4, H)] * 4, (1, 4, 1000, 1000))

    @jax.jit
    def both(query, key, value, dout, bias):
        call = functools.partial(
            memeff.dot_product_attention, is_causal=True, implementation="pallas"
        )
        out, pull = jax.vjp(call, query, key, value, bias)
        return out, *pull(dout)

    for first, second in zip(both(*args), both(*args), strict=True):
        np.testing.assert_array_equal(np.float32(first), np.float32(second))
