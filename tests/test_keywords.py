"""Every keyword does something; dtypes of results; lists and integers of any kind are arrays."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import AWKWARD, CASES, qkv
from conftest import few

from memeff import dot_product_attention

pytestmark = pytest.mark.once

f32 = np.float32

# ---- every keyword does something


def add_key_position(score, batch, head, q_pos, k_pos, params):
    return score + 0.1 * k_pos


def multiply_score(score, batch, head, q_pos, k_pos, params):
    return score * params


def hide_every_third_key(batch, head, q_pos, k_pos, params):
    return k_pos % 3 > 0


def hide_multiples(batch, head, q_pos, k_pos, params):
    return k_pos % params > 0


def double(x, position, which, params):
    return x * 2


def multiply(x, position, which, params):
    return x * params


RNG_KEY = np.array([0, 0], np.uint32)
DROPOUT = {"dropout_rate": 0.5, "dropout_rng": RNG_KEY}
ONE_SEGMENT = {
    "query_segment_ids": np.zeros((1, 37), int),
    "key_value_segment_ids": np.zeros((1, 53), int),
}
CHANGES = {  # by keyword: arguments that change the result of the case "plain"
    "bias": {"bias": np.linspace(-2, 2, 53, dtype=f32)},
    "mask": {"mask": np.arange(53) % 3 > 0},
    "scale": {"scale": 0.2},
    "is_causal": {"is_causal": True},
    "query_seq_lengths": {"query_seq_lengths": np.array([9, 20])},
    "key_value_seq_lengths": {"key_value_seq_lengths": np.array([9, 20])},
    "local_window_size": {"local_window_size": 4},
    "logits_soft_cap": {"logits_soft_cap": 0.5},
    "query_segment_ids": ONE_SEGMENT | {"query_segment_ids": np.arange(37)[None] // 9},
    "key_value_segment_ids": ONE_SEGMENT | {"key_value_segment_ids": np.arange(53)[None] // 9},
    "dropout_rng": {"dropout_rate": 0.5, "dropout_rng": np.array([0, 1], np.uint32)},
    "dropout_rate": {"dropout_rate": 0.4, "dropout_rng": RNG_KEY},
    "broadcast_dropout": DROPOUT | {"broadcast_dropout": False},
    "dropout_bits": DROPOUT | {"dropout_bits": "mix32"},
    "q_offset": {"is_causal": True, "q_offset": 3},
    "score_fn": {"score_fn": add_key_position},
    "score_params": {"score_fn": multiply_score, "score_params": 2.0},
    "mask_fn": {"mask_fn": hide_every_third_key},
    "mask_params": {"mask_fn": hide_multiples, "mask_params": 3},
    "sinks": {"sinks": np.ones(6, f32)},
    "qk_transform": {"qk_transform": double},
    "qk_transform_params": {"qk_transform": multiply, "qk_transform_params": np.float32(2)},
}
PLAIN = {}
AGAINST = {  # arguments to compare with, where a call without any would differ in other keywords
    "score_params": {"score_fn": multiply_score, "score_params": 1.0},
    "mask_params": {"mask_fn": hide_multiples, "mask_params": 4},
    "qk_transform_params": {"qk_transform": multiply, "qk_transform_params": np.float32(1)},
    "q_offset": CHANGES["is_causal"],
    "dropout_rng": DROPOUT,
    "dropout_rate": DROPOUT,
    "broadcast_dropout": DROPOUT,
    "dropout_bits": DROPOUT,
    "query_segment_ids": ONE_SEGMENT,
    "key_value_segment_ids": ONE_SEGMENT,
}
ELSEWHERE = {  # keywords that change no number, and the test that shows what they do
    "return_residual": "test_keywords_that_change_no_number",
    "chunk_size": "test_keywords_that_change_no_number",
    "memory_limit": "test_limit_keyword.py",
    "precision": "test_keywords_that_change_no_number",
    "implementation": "test_keywords_that_change_no_number",
    "backward": "test_fused_backward.py",
    "sequence_axis": "test_many_devices.py",
    "sequence_layout": "test_many_devices.py",
    "context_parallel": "test_many_devices.py",
    "batch_axis": "test_shard_map.py",
    "head_axis": "test_shard_map.py",
    "deterministic": "test_wrong_calls_are_cured_by_their_message",
    "dtype": "test_wrong_calls_are_cured_by_their_message",
    "module": "test_wrong_calls_are_cured_by_their_message",
}


def test_every_keyword_changes_the_result():
    parameters = list(inspect.signature(dot_product_attention).parameters)[3:]
    assert set(parameters) == set(CHANGES) | set(ELSEWHERE)
    args = CASES["plain"].inputs()[0]

    def attend(arguments):
        return dot_product_attention(*args, **arguments).astype(f32)

    @jax.jit
    def run():
        bases = {id(base): base for base in (PLAIN, *AGAINST.values())}  # each computed once
        with_keyword = {name: attend(change) for name, change in CHANGES.items()}
        return with_keyword, {key: attend(base) for key, base in bases.items()}

    with_keyword, without = run()
    for name, result in with_keyword.items():
        base = AGAINST.get(name, PLAIN)
        assert np.abs(result - without[id(base)]).max() > 1e-3, name


def test_keywords_that_change_no_number():
    args = CASES["plain"].inputs()[0]

    def program(**kwargs):
        def attend(query, key, value):
            return dot_product_attention(query, key, value, **kwargs)

        return jax.jit(attend).lower(*args).as_text()

    plain = program()
    assert program(chunk_size=16) != plain
    assert program(chunk_size=(16, 8)) != program(chunk_size=(8, 16))
    assert "HIGHEST" in program(precision="highest")
    assert "HIGHEST" not in plain
    assert program(implementation="reference") != plain
    assert program(implementation="xla") == plain
    out, lse = dot_product_attention(*args, return_residual=True)
    assert out.shape == (2, 37, 6, 11)
    assert lse.shape == (2, 37, 6)


# ---- dtypes and kinds of arguments


DTYPES = ["float32", "bfloat16", "float16", "float64"]


@pytest.mark.parametrize("dtype", few(DTYPES, ["bfloat16", "float64"]))
def test_dtypes_of_results(dtype):
    def loss(query, key, value, bias):
        return dot_product_attention(query, key, value, bias).astype(jnp.float32).sum()

    with jax.enable_x64(dtype == "float64"):
        drawn = qkv(np.random.default_rng(0), jnp.dtype(dtype), AWKWARD)
        args = tuple(jnp.asarray(x) for x in drawn)
        bias = jnp.zeros((53,), jnp.float32)
        out, lse = dot_product_attention(*args, bias, return_residual=True)
        grads = jax.grad(loss, (0, 1, 2, 3))(*args, bias)
    assert out.dtype == jnp.dtype(dtype)
    assert lse.dtype == (np.float64 if dtype == "float64" else f32)
    assert [x.dtype for x in grads] == [*[jnp.dtype(dtype)] * 3, f32]


def test_python_lists_are_arrays():
    args = CASES["one_key"].inputs()[0]
    lists = [x.tolist() for x in args]
    of_lists = dot_product_attention(*lists, key_value_seq_lengths=[1, 0])
    of_arrays = dot_product_attention(*args, key_value_seq_lengths=np.array([1, 0]))
    np.testing.assert_array_equal(of_lists, of_arrays)


def test_segment_ids_of_mixed_kinds():
    """Segment ids may differ in dtype, be one row for the batch, or come for the query alone."""
    args = CASES["square_causal"].inputs()[0]
    ids = np.arange(41) // 10
    plain = dot_product_attention(*args, query_segment_ids=np.stack([ids, ids]))
    for query_ids, key_ids in (
        (ids.astype(np.int8), ids.astype(np.uint32)),
        (ids[None], None),
        (ids.tolist(), None),
    ):
        out = dot_product_attention(
            *args, query_segment_ids=query_ids, key_value_segment_ids=key_ids
        )
        np.testing.assert_array_equal(out, plain)
