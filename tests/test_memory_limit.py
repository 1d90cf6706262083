"""A memory limit is a contract: what is compiled keeps to it, or the call is refused."""

import functools
import random
import re

import drawn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec
from small_calls import temp_bytes

import memeff
from memeff import compiling, dot_product_attention, scores
from memeff.device import pretend_device

pytestmark = pytest.mark.filterwarnings("ignore:(bias|mask) of shape")
X = drawn.array((1, 300, 4, 16), np.float32)


def lowest_limit(call: drawn.Call) -> int:
    """Return the limit that a refusal names, or 1 if the call is not refused."""
    floats, rest, join = drawn.split(call)

    def limited(floats, rest):
        return dot_product_attention(**join(floats, rest), memory_limit=1)

    try:
        jax.eval_shape(limited, floats, rest)
    except ValueError as e:
        return int(re.search(r"^memory_limit=1 .* need up to (\d+) bytes", str(e))[1])
    return 1


def assert_kept(call: drawn.Call, limit: int) -> None:
    for name, program in drawn.programs(call, limit).items():
        compiled = temp_bytes(*program)
        assert compiled <= limit, (
            f"{name}: {compiled} bytes compiled, {limit} allowed, {compiled / limit:.3f} times"
        )


def check(call: drawn.Call, rng: random.Random) -> None:
    """Check a call at the limit that a refusal names, or at one up to six times as high.

    The higher limit may be accepted without a compilation.
    """
    with jax.enable_x64(call.x64):
        limit = lowest_limit(call)
        if rng.random() >= 0.4:
            limit = int(limit * 6 ** rng.random())
        assert_kept(call, limit)


@pytest.mark.once
def test_a_limit_is_kept():
    call = drawn.Call(dict(query=X, key=X, value=X, is_causal=True))
    assert_kept(call, lowest_limit(call))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_a_limit_is_kept_by_500_calls(block):
    @hypothesis.seed(block)
    @hypothesis.settings(max_examples=25, suppress_health_check=list(hypothesis.HealthCheck))
    @hypothesis.given(drawn.calls(), st.randoms(use_true_random=True))
    def run(call, rng):
        check(call, rng)

    run()


REPORTED = {
    "sinks": dict(is_causal=True, sinks=drawn.array((8,), np.float32)),
    "alibi, lengths and offsets": dict(
        is_causal=True,
        score_fn=drawn.abstract(scores.alibi(np.ones(8, np.float32))),
        key_value_seq_lengths=drawn.array((1,), np.int32),
        q_offset=drawn.array((1,), np.int32),
    ),
}


@pytest.mark.parametrize("name", REPORTED)
@pytest.mark.slow
def test_calls_that_once_exceeded_it(name):
    x = drawn.array((1, 2048, 8, 64), np.float32)
    call = drawn.Call(dict(query=x, key=x, value=x, **REPORTED[name]))
    assert_kept(call, lowest_limit(call))


@pytest.mark.slow
def test_a_limit_is_kept_where_tables_are_constants():
    """A call with constant tables keeps to the limit.

    The caller's program has the ids of documents as constants, and XLA keeps 192 bytes more than
    with ids as inputs.
    """
    call = drawn.call_of(random.Random(273))
    assert isinstance(call.arguments["mask_fn"], memeff.BlockMask)
    assert_kept(call, lowest_limit(call))


# ---- what is compiled, and when


@pytest.fixture
def compiled_queries(monkeypatch):
    """Collect the shape of the query each time that XLA is asked."""
    shapes = []
    compile_ = compiling._compiled

    def spy(forward, floats, rest, device):
        shapes.append(floats[-1].shape)  # in the order of their names: key, query, value
        return compile_(forward, floats, rest, device)

    monkeypatch.setattr(compiling, "_compiled", spy)
    monkeypatch.setattr(compiling, "_kept", {})
    return shapes


def test_far_below_the_limit_nothing_is_compiled(compiled_queries):
    jax.eval_shape(functools.partial(dot_product_attention, memory_limit="1GiB"), X, X, X)
    assert not compiled_queries


def test_like_calls_ask_once(compiled_queries):
    def layer(x):
        return dot_product_attention(x, x, x, memory_limit="8MiB")

    def layers(x):
        return [layer(x), layer(x), layer(x)]

    jax.eval_shape(layers, X)
    jax.eval_shape(jax.grad(lambda x: layers(x)[0].sum()), X)
    assert len(compiled_queries) == 1


@pytest.mark.slow
def test_it_is_asked_wherever_a_call_is_traced(compiled_queries):
    """A call is compiled for the shapes that it sees.

    Tracing, mapping and sharding stay with the caller.
    """
    x = jnp.ones((8, 300, 2, 16))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")

    def call(x):
        return dot_product_attention(x, x, x, memory_limit="8MiB")

    grad = jax.jit(jax.grad(lambda x: call(x).sum()))

    def in_grad():
        jax.eval_shape(grad, x)

    def in_vmap():
        jax.eval_shape(jax.vmap(call, axis_name="i"), x)

    def in_shard_map():
        jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec), x)

    def in_mesh():
        with jax.set_mesh(mesh):
            jax.eval_shape(grad, x)

    shapes = {}
    for trace in (in_grad, in_vmap, in_shard_map, in_mesh):
        compiled_queries.clear()
        compiling._kept.clear()
        trace()
        shapes[trace.__name__] = {*compiled_queries}
    whole_batch = (8, 300, 2, 16)
    one_entry = (300, 2, 16)
    assert shapes == {
        "in_grad": {whole_batch},
        "in_vmap": {one_entry},
        "in_shard_map": {(1, *one_entry)},
        "in_mesh": {whole_batch},
    }


@pytest.mark.slow
def test_statistics_keep_to_their_own_bytes():
    """Statistics compile their own programs, not attention's."""
    x = drawn.array((1, 700, 4, 16), np.float32)
    with pytest.raises(ValueError, match="need up to") as e:
        jax.eval_shape(functools.partial(memeff.attention_statistics, memory_limit=1), x, x, x)
    limit = int(re.search(r"need up to (\d+) bytes", str(e.value))[1])
    statistics = functools.partial(memeff.attention_statistics, memory_limit=limit)

    def gradient(q, k, v, cotangents):
        _, pull = jax.vjp(statistics, q, k, v)
        return pull(cotangents)

    types = drawn.abstract(jax.eval_shape(memeff.attention_statistics, x, x, x))
    assert temp_bytes(gradient, (x, x, x, types)) <= limit


def test_where_nobody_can_compile_an_estimate_decides_with_a_margin(compiled_queries):
    with pretend_device("gpu", "8.0"), pytest.raises(ValueError, match="need up to"):
        jax.eval_shape(functools.partial(dot_product_attention, memory_limit=1), X, X, X)
    assert not compiled_queries
