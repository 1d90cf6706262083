"""The Hopper kernels on a GPU, forward and gradient: against the oracle, and bits that repeat."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_hopper_float32
import test_hopper_functions
from cases import Sizes, qkv, split
from conftest import assert_truth, run_call
from gpu_calls import HOPPER, normal_arrays, skip_without_kernels

import memeff
from memeff import masks, scores

pytestmark = pytest.mark.gpu


def assert_right(name, **kwargs):
    """Check the call `HOPPER[name]` against the oracle; `kwargs` choose how it is computed."""
    skip_without_kernels()
    sizes, arguments = HOPPER[name]
    args = qkv(np.random.default_rng(0), jnp.bfloat16, sizes)
    result = run_call(args, arguments | kwargs, "bfloat16")
    assert_truth(result, name, args, arguments, "bfloat16")


@pytest.mark.parametrize("name", HOPPER)
def test_hopper(name):
    assert_right(name, implementation="pallas")


@pytest.mark.parametrize("backward", ["split", "fused"])
@pytest.mark.parametrize("name", ["everything", "segments", "head 40"])
def test_x64_changes_no_bit(name, backward):
    """The gradient in one kernel adds in any order, so its query gradient is only near."""
    skip_without_kernels()
    sizes, arguments = HOPPER[name]
    query, key, value = map(jnp.asarray, qkv(np.random.default_rng(0), jnp.bfloat16, sizes))
    static, arrays = split(arguments)

    def run(query, key, value, arrays):
        call = functools.partial(
            memeff.dot_product_attention, **static, **arrays, backward=backward
        )
        out, pull = jax.vjp(functools.partial(call, implementation="pallas"), query, key, value)
        return out, *pull(out)

    expected = jax.jit(run)(query, key, value, arrays)
    with jax.enable_x64(True):
        results = jax.jit(run)(query, key, value, arrays)
    for n, (x, y) in enumerate(zip(results, expected, strict=True)):
        if backward == "fused" and n == 1:
            np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=2e-2, atol=1e-3)
        else:
            np.testing.assert_array_equal(np.float32(x), np.float32(y))


def may_be_fused(name) -> bool:
    """Tell whether the fused gradient takes the call; of the calls by length, only two."""
    sizes, _ = HOPPER[name]
    return sizes.H <= 128 and (sizes.K > 1 or name in ("length 63", "length 1087"))


@pytest.mark.parametrize("name", [name for name in HOPPER if may_be_fused(name)])
def test_hopper_fused(name):
    assert_right(name, backward="fused")


IN_FLOAT32 = [name for name, (sizes, _) in HOPPER.items() if sizes.H <= 128]


@pytest.mark.parametrize("name", IN_FLOAT32)
def test_hopper_in_float32(name):
    skip_without_kernels()
    sizes, arguments = HOPPER[name]
    args = qkv(np.random.default_rng(0), np.float32, sizes)
    result = run_call(args, arguments | dict(implementation="pallas"), "float32")
    test_hopper_float32.assert_errs_less_than_tf32(result, args, arguments)


FUNCTIONS = test_hopper_functions.CASES


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hopper_functions_of_the_users(name):
    skip_without_kernels()
    test_hopper_functions.assert_right(name, FUNCTIONS[name])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("H", [64, 128])
def test_hopper_t5(H, causal):
    """Results are as the chunked path has them, the gradient of the table included.

    Two runs have the same bits.
    """
    skip_without_kernels()
    table = jax.random.normal(jax.random.key(9), (32, 4))
    q, k, v, do = normal_arrays(*[(2, 2100, n, H) for n in (4, 2, 2, 4)])

    def both(implementation):
        def attend(table, *args):
            return memeff.dot_product_attention(
                *args,
                score_fn=scores.t5(table),
                is_causal=causal,
                q_offset=np.array([0, -70], np.int32),
                implementation=implementation,
            )

        @jax.jit
        def run(*args):
            out, pull = jax.vjp(attend, *args)
            return out, pull(do)

        out, (dtable, *gradients) = run(table, q, k, v)
        return [np.asarray(x, np.float32) for x in (out, *gradients, dtable)]

    actual = both("pallas")
    again = both("pallas")
    expected = both("xla")
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=0.02 * np.abs(y).max())
    for x, y in zip(actual[:-1], again[:-1], strict=True):  # XLA may add to a table in any order
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("H", [64, 128])
def test_hopper_block_masks(H):
    skip_without_kernels()
    mask = masks.causal() & masks.documents(np.arange(1000) // 300)
    q, k, v, do = normal_arrays(*[(2, 1000, 4, H)] * 4)

    def both(mask_fn, implementation):
        attend = functools.partial(
            memeff.dot_product_attention, mask_fn=mask_fn, implementation=implementation
        )
        out, pull = jax.vjp(attend, q, k, v)
        return [np.asarray(x, np.float32) for x in (out, *pull(do))]

    actual = both(memeff.block_mask(mask, 1000), "pallas")
    expected = both(mask, "xla")
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=0.02 * np.abs(y).max())


@pytest.mark.parametrize("where", [400, 3], ids=["late", "early"])
def test_hopper_rows_that_are_done_again(where):
    skip_without_kernels()
    sizes = Sizes(B=2, T=700, S=900, K=2, G=1, H=128, D=128)
    query, key, value = qkv(np.random.default_rng(0), jnp.bfloat16, sizes)
    key[:, where] *= jnp.bfloat16(200)
    dirty = value.copy()
    dirty[:, 850] = np.nan  # nobody sees it
    kwargs = dict(key_value_seq_lengths=np.array([850, 600], np.int32))
    result = run_call((query, key, dirty), kwargs | {"implementation": "pallas"}, "bfloat16")
    # a difference of large terms, in rows that are nearly one-hot: see tests/test_hopper_redone.py
    result.grads.pop("query")
    assert_truth(result, "far", (query, key, value), kwargs, "bfloat16")


@pytest.mark.parametrize("what", ["full", "causal", "alibi"])
@pytest.mark.parametrize("H", [64, 128])
def test_hopper_is_deterministic(H, what):
    """250 runs are equal in bits, the slopes' gradient as well."""
    skip_without_kernels()
    q, k, v, do = normal_arrays(*[(2, 1000, 4, H)] * 4)
    args = q, k, v, jnp.linspace(0.1, 1, 4)

    def attend(q, k, v, slopes):
        scored = {"score_fn": scores.alibi(slopes)} if what == "alibi" else {}
        return memeff.dot_product_attention(
            q, k, v, is_causal=what != "full", implementation="pallas", **scored
        )

    @jax.jit
    def both(args, do):
        out, pull = jax.vjp(attend, *args)
        return out, *pull(do)

    @jax.jit
    def same(first, second):
        equal = []
        for a, b in zip(first, second, strict=True):
            equal.append((a.view(jnp.uint16) == b.view(jnp.uint16)).all())
        return jnp.array(equal).all()

    first = both(args, do)
    assert all(same(first, both(args, do)) for _ in range(250))
