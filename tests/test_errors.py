"""Wrong calls are cured by the sentence that refuses them; traced values and large arrays."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import AWKWARD, qkv
from small_calls import Wrapped
from test_function_errors import WRONG as WRONG_FUNCTIONS
from wrong_calls import RIGHT, WRONG

from memeff import dot_product_attention, linear_cross_entropy, masks, warn

f32 = np.float32

# ---- wrong calls


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_wrong_calls_are_cured_by_their_message(i):
    arguments, error, pattern = WRONG[i]
    with pytest.raises(error, match=pattern) as raised:
        jax.eval_shape(functools.partial(dot_product_attention, **RIGHT | arguments))
    assert type(raised.value) is error
    message = str(raised.value)
    assert any(name in message for name in arguments), "the argument as the user typed it"
    assert len(message) < 300 and "\n" not in message, "one sentence, two at most"


def argument_names(table):
    """Return the names of all arguments in a table of wrong calls."""
    return {name for arguments, *_ in table for name in arguments}


def test_enough_wrong_calls():
    assert len(WRONG) >= 40
    in_other_tables = {"memory_limit"} | argument_names(WRONG_FUNCTIONS)
    tested = argument_names(WRONG) | in_other_tables
    assert tested == set(inspect.signature(dot_product_attention).parameters)


def test_objects_that_jax_takes_for_arrays():
    """Their values are known too, also where NumPy finds no numbers in them."""
    numbers = {"query_seq_lengths": 6, "key_value_seq_lengths": 8, "q_offset": 2**29}
    for name, wrong in numbers.items():
        right = Wrapped(jnp.array([3, 4]))
        out = jax.eval_shape(functools.partial(dot_product_attention, **RIGHT, **{name: right}))
        assert out.shape == (2, 5, 4, 6)
        with pytest.raises(ValueError, match=f"{name}.* must lie between"):
            dot_product_attention(**RIGHT, **{name: Wrapped(jnp.array([3, wrong]))})


def test_a_sequence_beyond_32_bit_positions_is_refused():
    short, long = (jax.ShapeDtypeStruct((1, T, 1, 8), f32) for T in (8, 2**30))
    for arrays, name in (((long, short, short), "query"), ((short, long, long), "key")):
        with pytest.raises(ValueError, match=f"{name} has {2**30} tokens.*shorter than {2**30}"):
            jax.eval_shape(dot_product_attention, *arrays)

    def on_each_device(x):
        return dot_product_attention(x, x, x, sequence_axis="seq")

    mesh = jax.sharding.Mesh(jax.devices()[:4], ("seq",))
    spec = jax.sharding.PartitionSpec(None, "seq")
    sharded = jax.shard_map(on_each_device, mesh=mesh, in_specs=spec, out_specs=spec)
    with pytest.raises(ValueError, match=f"query has {2**30} tokens"):
        jax.eval_shape(sharded, long)


def test_an_error_names_the_type_of_what_came_once():
    x = jnp.ones((1, 5, 2, 8))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    with pytest.raises(TypeError, match=r"query must be an array, got ShapeDtypeStruct\(shape="):
        dot_product_attention(shape, x, x)
    with pytest.raises(TypeError, match=r"bias must be an array, got <function "):
        dot_product_attention(x, x, x, bias=argument_names)


def test_an_error_gives_the_shape_of_an_array_and_not_its_numbers():
    x = jnp.ones((1, 5, 2, 8))
    names = "implementation backward is_causal return_residual local_window_size chunk_size"
    names += " precision memory_limit score_fn mask_fn qk_transform dropout_rate dropout_bits"
    names += " broadcast_dropout sequence_axis"
    for name in names.split():
        for array in (jnp.zeros((20, 30)), np.zeros((20, 30))):
            with pytest.raises((TypeError, ValueError)) as raised:
                dot_product_attention(x, x, x, **{name: array})
            message = str(raised.value)
            assert name in message and "rray(shape=(20, 30), dtype=float" in message
            assert len(message) < 300 and "\n" not in message


def test_an_error_does_not_print_an_int_of_many_digits():
    x = jnp.ones((1, 5, 2, 8))
    attend = functools.partial(dot_product_attention, x, x, x)
    loss = functools.partial(linear_cross_entropy, x, x[0, 0].T, jnp.zeros((1, 5, 2), int))
    calls = (
        ("q_offset", attend),
        ("chunk_size", attend),
        ("memory_limit", attend),
        ("ignore_label", loss),
        ("step", masks.dilated),
    )
    for digits in (200, 5000):  # Python itself refuses to print more than 4300
        for name, call in calls:
            with pytest.raises(ValueError, match=name) as raised:
                call(**{name: -(10**digits)})
            assert len(str(raised.value)) < 300


# ---- traced values


@pytest.mark.parametrize("name", ["is_causal", "broadcast_dropout", "return_residual"])
def test_a_traced_choice_is_refused(name):
    args = qkv(np.random.default_rng(0), f32, AWKWARD)

    @jax.jit
    def attend(choice):
        return dot_product_attention(*args, **{name: choice})

    with pytest.raises(TypeError, match=rf"{name} must be True or False.*got a traced value"):
        attend(True)


@pytest.mark.parametrize("name", ["chunk_size", "backward", "batch_axis", "precision"])
def test_an_error_says_that_a_choice_was_traced(name):
    def attend(choice):
        return dot_product_attention(**RIGHT, **{name: choice})

    with pytest.raises((TypeError, ValueError), match=rf"{name}.*<traced int32\[\]>"):
        jax.eval_shape(attend, jax.ShapeDtypeStruct((), jnp.int32))


def test_traced_lengths_and_offsets_need_no_value():
    """Traced lengths cannot be checked, and count as at most S."""
    args = qkv(np.random.default_rng(0), f32, AWKWARD)

    @jax.jit
    def with_both_lengths(n):
        return dot_product_attention(*args, key_value_seq_lengths=n, query_seq_lengths=n)

    @jax.jit
    def with_key_lengths(n):
        return dot_product_attention(*args, key_value_seq_lengths=n)

    too_long = with_both_lengths(np.array([99, 1000]))
    np.testing.assert_allclose(too_long, dot_product_attention(*args), atol=2e-6)
    negative = with_key_lengths(np.array([-3, -1]))
    assert np.all(negative == 0)


# ---- large dense masks


@pytest.mark.parametrize(
    ("name", "dtype", "instead"),
    [
        ("mask", bool, "is_causal, local_window_size, key_value_seq_lengths or segment ids"),
        ("bias", jnp.bfloat16, "local_window_size, is_causal or segment ids"),
    ],
)
def test_a_large_dense_array_warns_once_and_names_what_replaces_it(
    name, dtype, instead, monkeypatch
):
    monkeypatch.setattr(warn, "_warned", set())
    x = jax.ShapeDtypeStruct((1, 32_768, 4, 64), jnp.bfloat16)

    def attend(q, array):
        return dot_product_attention(q, q, q, **{name: array})

    def trace(*shape):
        jax.eval_shape(attend, x, jax.ShapeDtypeStruct(shape, dtype))

    warning = rf"{name} of shape \(1, 1, 32768, 32768\) takes .* MiB.*: use {instead} instead"
    with pytest.warns(UserWarning, match=warning) as record:
        trace(1, 1, 32_768, 32_768)
    assert len(record) == 1
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(1, 1, 32_768, 32_768)
        warn._warned.clear()
        trace(1, 4, 1, 32_768)
        trace(32_768, 1)
