"""Values of the Ampere kernels against the oracle, by the law of tolerance, and what they refuse.

The kernels run in Mosaic's interpreter, which finds races. It does not run `cp.async`, `ldmatrix`
and `mma`: memeff/pallas/ampere/mosaic.py has other forms of them for it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import term_cases
from bias_cases import CASES as BIASES
from bias_cases import MASKS
from conftest import assert_truth, few, run_call
from hopper_cases import (
    CASES,
    DIVIDED,
    FUSED,
    assert_case,
    assert_equal_bits,
    assert_fused_gradient_stays,
    assert_partial_out_is_not_rounded,
    bf16,
    draw,
    i32,
    interpreted,
    kernels,
    not_finite,
    small,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_calls import assert_close

import memeff
from memeff import pallas
from memeff.device import Device, pretend_device
from memeff.pallas.ampere import calls, capability, implementation

SUPPORTED = capability.for_device(Device("gpu", "8.0")) is None
needs_kernels = pytest.mark.skipif(not SUPPORTED, reason="the kernels need jax 0.11.2")

FUNCTIONS = {
    "score_fn": (
        small(T=130, S=200),
        dict(score_fn=memeff.scores.alibi(np.array([0.5])), is_causal=True),
    ),
    "mask_fn": (small(T=130, S=200), dict(mask_fn=memeff.masks.sliding_window(70))),
    "dropout": (
        small(T=130, S=200),
        dict(
            dropout_rng=jax.random.PRNGKey(1),
            dropout_rate=0.3,
            dropout_bits="mix32",
        ),
    ),
}
FAST = ("128", "causal, tails", "everything")
CALLS_WITH_BIAS = {
    name: call
    for name, call in (BIASES | MASKS).items()
    if max(call[0].H, call[0].D) <= capability.LARGEST_HEAD
}


def run_kernels(args, kwargs, dtype="bfloat16", capability_of="8.0", detect_races=True):
    """Return out, lse and gradients of a call, on a GPU of a compute capability."""
    with interpreted(detect_races, capability=capability_of):
        return run_call(args, kwargs | {"implementation": "pallas"}, dtype)


@needs_kernels
@pytest.mark.parametrize("name", few(CASES, FAST))
def test_values(name):
    z, kwargs = CASES[name]
    args = draw(bf16, z)
    assert_case(run_kernels(args, kwargs), name, args, kwargs, "bfloat16")


@needs_kernels
@pytest.mark.parametrize("name", few(CASES, ("128",)))
def test_values_in_small_tiles(name):
    """GPUs with 100 KiB of shared memory have tiles of 64 queries for heads beyond 64."""
    z, kwargs = CASES[name]
    args = draw(np.float16, z)
    assert_case(run_kernels(args, kwargs, "float16", "8.6"), name, args, kwargs, "float16")


DIVIDED_HERE = {
    name: call for name, call in DIVIDED.items() if call[0].H <= capability.LARGEST_HEAD
}


@needs_kernels
@pytest.mark.parametrize("name", few(DIVIDED_HERE, ("64", "64, fused")))
def test_gradient_of_divided_groups(name, monkeypatch):
    monkeypatch.setattr("memeff.pallas.ampere.backward.group_parts", lambda sizes, *_: sizes.G)
    z, kwargs, backward = DIVIDED[name]
    args = draw(bf16, z)
    result = run_kernels(args, kwargs | {"backward": backward}, detect_races=backward == "split")
    assert_truth(result, name, args, kwargs, "bfloat16")


IN_ONE_BLOCK = small(T=150, S=60, G=2, H=40, D=100), dict(is_causal=True, q_offset=-20), True
FUSED_HERE = {name: (*call[:2], False) for name, call in FUSED.items()}  # blocks own 64 keys
FUSED_HERE |= {"one block of 64": IN_ONE_BLOCK}


@needs_kernels
@pytest.mark.parametrize("name", few(FUSED_HERE, ("one block of 64", "soft cap, lengths")))
def test_fused_gradient(name):
    z, kwargs, one_block = FUSED_HERE[name]
    args = draw(bf16, z)
    fused = kwargs | {"backward": "fused"}
    assert_truth(run_kernels(args, fused, detect_races=one_block), name, args, kwargs, "bfloat16")


@needs_kernels
@not_finite
def test_fused_gradient_is_done_again_where_what_is_hidden_is_not_finite():
    """The gradient has the bits of the two kernels, which compute it again."""
    args = draw(bf16, small(T=100, S=200))
    kwargs = dict(key_value_seq_lengths=i32([150]), query_seq_lengths=i32([90]))
    clean = run_kernels(args, kwargs)
    query, key, value = (x.copy() for x in args)
    query[:, 90:] = np.nan
    key[:, 150:] = np.inf
    dirty = (query, key, value), kwargs | {"backward": "fused"}
    assert_equal_bits(run_kernels(*dirty, detect_races=False).grads, clean.grads)


@needs_kernels
def test_fused_gradient_stays_where_it_is_finite(monkeypatch):
    assert_fused_gradient_stays(monkeypatch, calls, "8.0")


@needs_kernels
@not_finite
@pytest.mark.parametrize("name", few(CALLS_WITH_BIAS, ("pairs", "keys")))
def test_bias(name):
    z, kwargs = CALLS_WITH_BIAS[name]
    args = draw(bf16, z)
    assert_truth(run_kernels(args, kwargs), name, args, kwargs, "bfloat16")


@needs_kernels
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    """They have the values of the chunked path, which has its own tests."""
    z, kwargs = FUNCTIONS[name]
    args = draw(bf16, z)
    attend = functools.partial(memeff.dot_product_attention, **kwargs, return_residual=True)
    expected = attend(*args, implementation="xla")
    with interpreted(capability="8.0"):
        results = attend(*args, implementation="pallas")
    assert_close(results, expected, atol=2e-2)


@needs_kernels
def test_params_of_a_score_without_a_derivative():
    """Their gradient is 0, and the others are those of the chunked path."""

    def score(s, b, h, i, j, params):
        return s + 0.3 * jax.lax.stop_gradient(params["seen"])[j]

    query, key, value = draw(bf16, small(T=70, S=90))
    params = {"seen": np.arange(90, dtype=np.float32) % 5, "unread": np.ones(3, np.float32)}

    def gradients(implementation):
        def loss(params, query, key, value):
            out = memeff.dot_product_attention(
                query,
                key,
                value,
                score_fn=score,
                score_params=params,
                implementation=implementation,
            )
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.grad(loss, (0, 1, 2, 3))(params, query, key, value)

    of_params, *expected = gradients("xla")
    with interpreted(capability="8.0"):
        kernels_of_params, *results = gradients("pallas")
    assert_equal_bits(kernels_of_params, jax.tree.map(np.zeros_like, params))
    assert_equal_bits(of_params, kernels_of_params)
    assert_close(results, expected, rtol=2e-2, atol=3e-2)


@needs_kernels
@not_finite
def test_values_that_a_row_does_not_see_change_no_bit():
    args = draw(bf16, small(T=200, S=200))
    kwargs = dict(is_causal=True, key_value_seq_lengths=i32([150]), return_residual=True)
    dirty = args[0], *(x.copy() for x in args[1:])
    dirty[1][:, 150:] = np.nan
    dirty[2][:, 150:] = np.inf
    dirty[2][:, 120] = np.nan  # seen by later queries
    with interpreted(capability="8.0"):
        attend = jax.jit(functools.partial(memeff.dot_product_attention, **kwargs))
        clean_results = attend(*args)
        results = attend(*dirty)
    rows = [x[:, :120] for x in results], [x[:, :120] for x in clean_results]
    assert_equal_bits(*rows)
    assert np.isnan(np.float32(results[0][:, 120:])).all()


@needs_kernels
@not_finite
def test_nan_of_keys_that_a_bias_hides_changes_no_bit():
    args = draw(bf16, small(T=70, S=140))
    bias = np.random.default_rng(4).standard_normal((1, 1, 70, 140)).astype(bf16)
    bias[..., 30:60] = -np.inf
    clean = run_kernels(args, dict(bias=bias))
    query, key, value = (x.copy() for x in args)
    key[:, 30:60] = np.nan
    value[:, 30:60] = np.inf
    dirty = run_kernels((query, key, value), dict(bias=bias))
    assert_equal_bits((dirty.out, dirty.lse, dirty.grads), (clean.out, clean.lse, clean.grads))


@needs_kernels
@not_finite
@pytest.mark.parametrize("hidden", ["keys", "queries"])
def test_what_nobody_sees_changes_no_bit_of_a_gradient(hidden):
    args = draw(bf16, small(T=100, S=200))
    kwargs = dict(key_value_seq_lengths=i32([150]), query_seq_lengths=i32([90]))
    clean = run_kernels(args, kwargs)
    query, key, value = (x.copy() for x in args)
    if hidden == "keys":
        key[:, 150:] = np.nan
        value[:, 150:] = np.inf
    else:
        query[:, 90:] = np.nan
    dirty = run_kernels((query, key, value), kwargs)
    assert_equal_bits(dirty.grads, clean.grads)


@needs_kernels
@pytest.mark.parametrize("name", few(term_cases.CASES, ("scale", "soft cap")))
def test_gradients_of_scale_and_soft_cap(name):
    term_cases.assert_case(name, run_kernels)


@needs_kernels
@pytest.mark.parametrize("score_fn", ["alibi", pytest.param("t5", marks=pytest.mark.slow)])
def test_gradients_of_a_score_fn_beside_them(score_fn):
    """The chunked path also sums what the kernels do not: the gradient of T5's table.

    In float16, because these kernels take delta from out as it is rounded.
    """
    on_kernels = functools.partial(interpreted, capability="8.0")
    term_cases.assert_score_gradients(score_fn, np.float16, 4e-3, on_kernels)


@needs_kernels
@pytest.mark.parametrize(
    "expected, kwargs",
    [
        (3, dict(scale=0.3)),
        (3, dict(scale=jnp.float32(0.3))),
        (4, dict(backward="fused")),  # two of them are for sums that are not finite
    ],
)
def test_number_of_kernels(expected, kwargs):
    def loss(query, key, value):
        call = functools.partial(memeff.dot_product_attention, implementation="pallas")
        return call(query, key, value, **kwargs).astype(jnp.float32).sum()

    shape = jax.ShapeDtypeStruct((1, 256, 2, 64), bf16)
    with pretend_device("gpu", "8.0"):
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(shape, shape, shape)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert kernels(text) == expected
    assert "stablehlo.while" not in text  # for which a GPU waits for the host


@needs_kernels
def test_partial_out_is_not_rounded_to_16_bits():
    assert_partial_out_is_not_rounded(implementation, "8.0")


@needs_kernels
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_steps_of_a_ring_run_on_kernels(layout):
    """None falls to the chunked path, which has loops. Steps with equal sizes share a kernel."""
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "seq"))
    shape = jax.ShapeDtypeStruct((1, 512, 2, 64), bf16, sharding=sharding)

    def attend(query, key, value):
        return memeff.dot_product_attention(
            *(query, key, value),
            is_causal=layout == "zigzag",
            sequence_axis="seq",
            sequence_layout=layout,
            context_parallel="ring",
            implementation="pallas",
        )

    with pretend_device("gpu", "8.0"), jax.set_mesh(mesh):
        traced = jax.jit(attend).trace(shape, shape, shape)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" not in text
    assert kernels(text) == (1 if layout == "contiguous" else 2)


REASONS = {
    "bias": dict(bias=np.zeros((1, 1, 1, 90), bf16), mask=np.ones((70, 90), bool)),
    "fused": dict(backward="fused", bias=np.zeros((1, 1, 1, 90), bf16)),
    "bits": dict(dropout_rng=jax.random.PRNGKey(1), dropout_rate=0.3),
}


@needs_kernels
@pytest.mark.parametrize("name", REASONS)
def test_refused(name):
    args = draw(bf16, small(T=70, S=90))
    with pretend_device("gpu", "8.0"):
        with pytest.raises(NotImplementedError, match='the Ampere kernels|backward="fused"'):
            memeff.dot_product_attention(*args, **REASONS[name], implementation="pallas")


@needs_kernels
@pytest.mark.parametrize("device", ["8.0", "8.6", "8.9", "10.0", "12.0"])
def test_chosen_on_every_gpu_since_ampere_but_hopper(device):
    assert pallas.family_for(Device("gpu", device)) is implementation
    with pretend_device("gpu", device):
        said = memeff.explain(*draw(bf16, small(T=70, S=90)))
    assert "Ampere kernels" in said and "compiled for, never timed on this GPU" in said


@needs_kernels
def test_hopper_gpus_have_kernels_of_their_own():
    hopper = Device("gpu", "9.0")
    reason = "the Ampere kernels are for GPUs that have none of their own, as Hopper GPUs have"
    assert capability.for_device(hopper) == reason
    assert pallas.family_for(hopper) is not implementation
    with capability.chosen():
        assert pallas.family_for(hopper) is implementation
        assert pallas.family_for(Device("tpu")) is not implementation


@pytest.mark.parametrize("device", ["7.5", "gfx942", None])
def test_devices_without_mma(device):
    reason = capability.for_device(Device("gpu", device))
    assert reason is not None and reason.startswith("the Ampere kernels need a GPU of compute")
    if device is not None:
        assert pallas.family_for(Device("gpu", device)) is implementation  # to say why


def test_old_jax(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.11.1")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    reason = pallas.family_for(Device("gpu", "8.0")).for_device(Device("gpu", "8.0"))
    assert reason == "the Ampere kernels need jax 0.11.2 or later, and this is jax 0.11.1"
