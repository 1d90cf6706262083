"""Dispatch: the implementation that runs a call, and the reason against each other one."""

import functools
import warnings
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, MIXES, SINGLES, split
from conftest import few

import memeff
from memeff import dispatch, dot_product_attention, implementations, pallas, reference
from memeff.attention import Implementation
from memeff.chunked import implementation as chunked
from memeff.device import Device, current_device, pretend_device
from memeff.pallas.hopper import implementation as hopper

f32 = np.float32
NO_KERNELS = "kernels need a GPU or a TPU, and this device is a cpu"
NOT_CUDNN = "memeff does not call cuDNN (jax.nn.dot_product_attention does)"
MODULES = {"xla": chunked, "reference": reference}

# ---- every call: the chosen implementation, and why the kernels cannot run it

CALLS = (*SINGLES, *MIXES)
TABLE = {(name, dtype): ("xla", NO_KERNELS) for name in CALLS for dtype in ("float32", "bfloat16")}
# A new kernel adds to this table the calls that it can run, and its reasons against the rest.


class ReachedDispatch(Exception):
    """A call at dispatch, where its trace ends because the rest takes most of the time."""


def handed_to_dispatch(name, dtype):
    """Return (problem, operands) of the call as dispatch receives it, and the chosen module."""
    args, kwargs = CASES[name].inputs(jnp.dtype(dtype))
    static, arrays = split(kwargs)
    choose = dispatch.choose_implementation

    def choose_and_stop(problem, operands, *args, **kwargs):
        choice = choose(problem, operands, *args, **kwargs)
        raise ReachedDispatch(choice.problem, operands, choice.module)

    def run(args, arrays):
        return dot_product_attention(*args, **arrays, **static)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ReachedDispatch) as reached:
        patch.setattr(dispatch, "choose_implementation", choose_and_stop)
        jax.eval_shape(run, args, arrays)
    return reached.value.args


def traced(name, dtype, implementation=None):
    """Trace a call and its gradient. Return the chosen module and the shapes of (out, gradients).

    Dispatch must be asked exactly once.
    """
    args, kwargs = CASES[name].inputs(jnp.dtype(dtype))
    static, arrays = split(kwargs)
    modules = []
    choose = dispatch.choose_implementation

    def choose_and_record(*args, **kwargs):
        choice = choose(*args, **kwargs)
        modules.append(choice.module)
        return choice

    def run(args, arrays):
        def attend(*args):
            return dot_product_attention(*args, **arrays, **static, implementation=implementation)

        out, pull = jax.vjp(attend, *args)
        return out, pull(out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "choose_implementation", choose_and_record)
        shapes = jax.eval_shape(run, args, arrays)
    (module,) = modules
    return module, shapes


@pytest.mark.parametrize("name, dtype", TABLE)
def test_implementation_chosen_and_reasons(name, dtype):
    chosen, against_pallas = TABLE[name, dtype]
    problem, operands, module = handed_to_dispatch(name, dtype)
    assert module is MODULES[chosen]
    assert implementations.why_not("xla", problem, operands) is None
    assert implementations.why_not("reference", problem, operands) is None
    assert implementations.why_not("pallas", problem, operands) == against_pallas
    assert implementations.why_not("cudnn", problem, operands) == NOT_CUDNN


# One call of each form of arguments. Other tests of the fast set compare the numbers of nearly all
# calls of the table.
FORMS = (
    "plain",
    "one_of_each",
    "no_leads",
    "three_leads",
    "multi_query",
    "bias_row",
    "mask_heads",
    "scale_array",
    "sinks",
    "soft_cap_array",
    "segments",
    "q_offset_array",
    "dropout_each",
    "everything",
)
FAST = [("plain", "bfloat16"), *((name, "float32") for name in FORMS)]


@pytest.mark.parametrize("name, dtype", few(TABLE, FAST))
def test_shapes_and_dtypes_of_results(name, dtype):
    """Dispatch is asked once, and results have the shapes and dtypes of their arguments."""
    module, (out, grads) = traced(name, dtype)
    assert module is MODULES[TABLE[name, dtype][0]]
    args, _ = CASES[name].inputs(jnp.dtype(dtype))
    query, _, value = args
    assert out.shape == (*query.shape[:-1], value.shape[-1])
    assert out.dtype == query.dtype
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in args]


@pytest.mark.parametrize("name", ["plain", "everything", "three_leads", "q_offset_array"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_request_is_met_forward_and_backward(implementation, name):
    """An implementation that can run a call can run both directions of it."""
    module, (out, grads) = traced(name, "float32", implementation)
    assert module is MODULES[implementation]
    assert out.shape
    assert len(grads) == 3


@pytest.mark.parametrize("name", implementations.IMPLEMENTATIONS + ("cudnn",))
def test_a_reason_is_a_piece_of_a_sentence(name):
    """A reason stands after a colon and before a full stop."""
    problem, operands, _ = handed_to_dispatch("plain", "float32")
    request = implementations.Request(name)
    reason = implementations.why_not(name, problem, operands)
    if reason is None:
        assert dispatch.choose_implementation(problem, operands, request).module is MODULES[name]
        return
    assert reason
    assert not reason.endswith(".")
    assert "\n" not in reason
    with pytest.raises(NotImplementedError) as raised:
        dispatch.choose_implementation(problem, operands, request)
    message = f'implementation="{name}" cannot run this call: {reason}. Use implementation=None'
    assert str(raised.value).startswith(message)


def test_an_implementation_has_its_three_functions():
    for family in pallas.FAMILIES:
        assert callable(family.why_not)
        assert callable(family.for_device)
    for module in (chunked, *pallas.FAMILIES):
        assert callable(module.forward)
        assert callable(module.backward)
        assert callable(module.tangent)
    assert callable(reference.forward)


def test_every_implementation_is_named_in_the_signature():
    """Dispatch knows exactly the names that the type of `implementation` promises."""
    assert get_args(Implementation) == implementations.IMPLEMENTATIONS
    assert all(isinstance(name, str) for name in implementations.IMPLEMENTATIONS)


# ---- kernels: which calls they run on a device that has them, and their reasons against others

OLD = jax.__version__.startswith("0.10.")
FLAX_BITS = (
    'the Hopper kernels support dropout with dropout_bits="mix32", '
    "and this call draws Flax's own bits"
)
REFUSED = {
    "dropout": FLAX_BITS,
}
NOT_IN_FLOAT32 = "the Hopper kernels support `bias` and dense masks in 16 bits, not in float32"
REFUSED_IN_FLOAT32 = {
    "bias_full": NOT_IN_FLOAT32,
    "bias_row": NOT_IN_FLOAT32,
    "mask_dense": NOT_IN_FLOAT32,
    "mask_heads": NOT_IN_FLOAT32,
    "precision": (
        "the Hopper kernels compute float32 to 16 bits, and this call asks for a higher precision"
    ),
}
KERNELS = {  # by case: the feature that the kernels refuse first, or None where they can run it
    "plain": None,
    "causal": None,
    "window": None,
    "window_left": None,
    "q_offset": None,
    "q_offset_array": None,
    "query_lengths": None,
    "key_lengths": None,
    "soft_cap": None,
    "scale": None,
    "precision": None,
    "head_97": None,
    "multi_query": None,
    "bias_full": None,
    "bias_row": None,
    "mask_dense": None,
    "mask_heads": None,
    "scale_array": None,
    "soft_cap_array": None,
    "segments": None,
    "dropout": "dropout",
    "dropout_each": "dropout",
    "everything": "dropout",
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", KERNELS)
def test_what_kernels_can_run(name, dtype):
    problem, operands, _ = handed_to_dispatch(name, dtype)
    feature = KERNELS[name]
    reason = None if feature is None else REFUSED[feature]
    if dtype == "float32":
        reason = reason or REFUSED_IN_FLOAT32.get(name)
    if OLD:
        reason = f"the Hopper kernels need jax 0.11 or later, and this is jax {jax.__version__}"

    def why_not(*device):
        return hopper.why_not(problem, operands, Device(*device))

    assert why_not("gpu", "9.0") == reason
    needs = "the Hopper kernels need a GPU of compute capability 9.0 (H100, H200), and this one has"
    assert why_not("gpu", "8.0") == f"{needs} 8.0"
    assert why_not("gpu") == f"{needs} None"
    assert why_not("tpu") == "the Hopper kernels need a Hopper GPU, and this device is a tpu"


def chosen_on_hopper(shape=(1, 256, 2, 64), dtype=jnp.bfloat16, **kwargs):
    """Return the name of the implementation that a Hopper GPU runs a call of this shape with."""
    x = jax.ShapeDtypeStruct(shape, dtype)
    with pretend_device("gpu", "9.0"):
        return memeff.explain(x, x, x, **kwargs).split()[0].strip('"')


@pytest.mark.skipif(OLD, reason="kernels need jax 0.11")
def test_kernels_are_chosen_where_they_are_faster():
    assert chosen_on_hopper() == "pallas"
    assert chosen_on_hopper(is_causal=True) == "pallas"
    assert chosen_on_hopper(dtype=jnp.float16) == "pallas"
    assert chosen_on_hopper((1, 256, 2, 256)) == "pallas"
    assert chosen_on_hopper((1, 256, 2, 257)) == "xla"
    assert chosen_on_hopper((1, 1, 2, 64)) == "xla"  # a tile of queries would be nearly empty
    assert chosen_on_hopper(query_segment_ids=jnp.zeros((1, 256), jnp.int32)) == "pallas"
    bias = jnp.ones((256, 256), jnp.bfloat16)
    assert chosen_on_hopper(bias=bias) == "pallas"
    mask = jnp.ones((1, 2, 256, 256), bool)
    assert chosen_on_hopper(mask=mask) == "pallas"
    assert chosen_on_hopper(mask=mask, bias=jnp.ones((1, 2, 256, 256))) == "pallas"
    wide_bias = jax.ShapeDtypeStruct((256, 256), np.float64)
    with jax.enable_x64(True):
        assert chosen_on_hopper(bias=wide_bias) == "xla"
        assert chosen_on_hopper(dtype=jnp.float64) == "xla"
    assert chosen_on_hopper(mask=mask, bias=bias) == "xla"  # it would become larger than it is
    assert chosen_on_hopper((1, 63, 2, 64), bias=bias[:63, :63]) == "xla"
    assert chosen_on_hopper(dtype=jnp.float32) == "pallas"
    assert chosen_on_hopper(dtype=jnp.float32, precision="highest") == "xla"
    assert chosen_on_hopper(chunk_size=64) == "xla"
    assert chosen_on_hopper((0, 256, 2, 64)) == "xla"
    assert chosen_on_hopper((1, 0, 2, 64)) == "xla"


@pytest.mark.parametrize("device", [("tpu",), ("gpu", "9.0"), ("gpu", "8.0")])
def test_kernels_run_with_x64_but_for_arrays_of_64_bits(device):
    if OLD and device[0] == "gpu":
        pytest.skip("these kernels need jax 0.11")
    platform = {"gpu": "cuda"}.get(device[0], device[0])
    x = jnp.ones((1, 256, 2, 64), jnp.bfloat16)

    def gradient(x, lengths):
        call = functools.partial(
            dot_product_attention, key_value_seq_lengths=lengths, implementation="pallas"
        )
        return jax.vjp(lambda x: call(x, x, x), x)[1](x)

    with pretend_device(*device), jax.enable_x64(True):
        traced = jax.jit(gradient).trace(x, np.array([200]))
        assert "custom_call" in traced.lower(lowering_platforms=(platform,)).as_text()
        for ids, dtype in ((jnp.arange(256), "int64"), (jnp.arange(256, dtype=jnp.int32), "int32")):
            text = memeff.explain(x, x, x, query_segment_ids=ids[None] // 100)
            assert ("do not support arrays of 64 bits" in text) == (dtype == "int64")


# ---- devices


def test_device_of_a_call():
    """The device is that of the arrays, else `jax.default_device`, else JAX's first."""
    cpu = Device("cpu")
    assert current_device() == cpu
    assert current_device(jnp.ones(3)) == cpu
    with jax.default_device(jax.devices()[3]):
        assert current_device() == cpu
    with pretend_device("gpu", "9.0"):
        assert current_device(jnp.ones(3)) == Device("gpu", "9.0")


# ---- falling back: when it warns, and when it is refused


def test_choosing_is_silent_where_nothing_is_lost():
    """No warning is given on a CPU, because the chunked path is the fastest there."""
    x = jnp.ones((1, 5, 2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dot_product_attention(x, x, x)
        dot_product_attention(x, x, x, implementation="xla")


@pytest.mark.skipif(OLD, reason="kernels need jax 0.11")
def test_what_keeps_kernels_from_a_call_is_told_once(monkeypatch):
    monkeypatch.setattr("memeff.warn._warned", set())
    x = jnp.ones((1, 64, 1, 64), jnp.bfloat16)
    dropout = dict(dropout_rng=jax.random.key(0), dropout_rate=0.1)
    no_chunk_size = "the kernels choose their own tiles and do not support chunk_size"
    with pretend_device("gpu", "9.0"):
        warning = f"instead of the GPU's kernels, because {FLAX_BITS}"
        with pytest.warns(UserWarning, match=warning) as record:
            dot_product_attention(x, x, x, **dropout)
        assert record[0].filename == __file__
        dot_product_attention(x, x, x, **dropout)  # warnings are errors
        dot_product_attention(*[x.astype(f32)] * 3, precision="highest")
        error = f'"pallas" cannot run this call: {FLAX_BITS}'
        with pytest.raises(NotImplementedError, match=error):
            dot_product_attention(x, x, x, **dropout, implementation="pallas")
        with pytest.raises(NotImplementedError, match=no_chunk_size):
            dot_product_attention(x, x, x, chunk_size=8, implementation="pallas")


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_pallas_raises_instead_of_falling_back(jit):
    x = jnp.ones((1, 5, 2, 3))

    def attend(x):
        return dot_product_attention(x, x, x, implementation="pallas")

    if jit:
        attend = jax.jit(attend)
    error = f'implementation="pallas" cannot run this call: {NO_KERNELS}'
    with pytest.raises(NotImplementedError, match=error):
        attend(x)
