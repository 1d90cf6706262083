"""A memory limit is a contract: what is compiled keeps to it, for calls of every feature, or the call is refused."""

import functools
import random
import re

import drawn
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

import memeff
from memeff import compiling, dot_product_attention, scores
from memeff.device import pretend_device

pytestmark = pytest.mark.filterwarnings("ignore:(bias|mask) of shape")
X = drawn.array((1, 300, 4, 16), np.float32)


def least(call: drawn.Call) -> int:
    """The limit that a refusal names; 1 where nothing is refused."""
    try:
        jax.eval_shape(
            lambda *x: dot_product_attention(**drawn.split(call)[2](*x), memory_limit=1),
            *drawn.split(call)[:2],
        )
    except ValueError as e:
        return int(re.search(r"^memory_limit=1 .* need up to (\d+) bytes", str(e))[1])
    return 1


def assert_kept(call: drawn.Call, limit: int) -> None:
    for name, program in drawn.programs(call, limit).items():
        found = drawn.bytes_of(program)
        assert found <= limit, (
            f"{name}: {found} bytes compiled, {limit} allowed, {found / limit:.3f} times"
        )


def check(call: drawn.Call, rng: random.Random) -> None:
    """At the limit that a refusal names, or at one up to six times as high, which may be taken without a compilation."""
    with jax.enable_x64(call.x64):
        lowest = least(call)
        assert_kept(call, lowest if rng.random() < 0.4 else int(lowest * 6 ** rng.random()))


@hypothesis.settings(max_examples=3, suppress_health_check=list(hypothesis.HealthCheck))
@hypothesis.given(drawn.calls(), st.randoms(use_true_random=True))
def test_a_limit_is_kept(call, rng):
    check(call, rng)


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


@pytest.mark.parametrize("name", few(REPORTED, ["sinks"]))
def test_calls_that_once_exceeded_it(name):
    x = drawn.array((1, 2048, 8, 64), np.float32)
    call = drawn.Call(dict(query=x, key=x, value=x, **REPORTED[name]))
    assert_kept(call, least(call))


def test_a_limit_is_kept_where_tables_are_constants():
    """The caller's program has the ids of documents as constants, and XLA keeps 192 bytes more than with ids as inputs."""
    call = drawn.call_of(random.Random(273))
    assert isinstance(call.arguments["mask_fn"], memeff.BlockMask)
    assert_kept(call, least(call))


# ---- what is compiled, and when


@pytest.fixture
def asked(monkeypatch):
    """The shape of the query, each time that XLA is asked."""
    seen = []
    compile_ = compiling._compiled

    def spy(forward, floats, rest, device):
        seen.append(floats[-1].shape)  # in the order of their names: key, query, value
        return compile_(forward, floats, rest, device)

    monkeypatch.setattr(compiling, "_compiled", spy)
    monkeypatch.setattr(compiling, "_kept", {})
    return seen


def test_far_below_the_limit_nothing_is_compiled(asked):
    jax.eval_shape(functools.partial(dot_product_attention, memory_limit="1GiB"), X, X, X)
    assert not asked


def test_like_calls_ask_once(asked):
    layers = lambda x: [dot_product_attention(x, x, x, memory_limit="8MiB") for _ in range(3)]
    jax.eval_shape(layers, X)
    jax.eval_shape(jax.grad(lambda x: layers(x)[0].sum()), X)
    assert len(asked) == 1


def test_it_is_asked_wherever_a_call_is_traced(asked):
    """What the caller traces, maps or shards stays with the caller: the call is compiled for what it sees."""
    x = jnp.ones((8, 300, 2, 16))
    call = lambda x: dot_product_attention(x, x, x, memory_limit="8MiB")
    grad = jax.grad(lambda x: call(x).sum())
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(
        call, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")
    )
    of_all, of_one = (8, 300, 2, 16), (300, 2, 16)

    def in_mesh(x):
        with jax.set_mesh(mesh):
            return jax.eval_shape(jax.jit(grad), x)

    wheres = {
        "grad": (lambda x: jax.eval_shape(jax.jit(grad), x), of_all),
        "vmap": (lambda x: jax.eval_shape(jax.vmap(call, axis_name="i"), x), of_one),
        "shard_map": (lambda x: jax.eval_shape(sharded, x), (1, *of_one)),
        "set_mesh": (in_mesh, of_all),
    }
    found = {}
    for name, (run, _) in wheres.items():
        asked.clear()
        compiling._kept.clear()
        run(x)
        found[name] = {*asked}
    assert found == {name: {shape} for name, (_, shape) in wheres.items()}


def test_statistics_keep_to_their_own_bytes():
    """Their programs are compiled, not those of attention."""
    x = drawn.array((1, 700, 4, 16), np.float32)
    with pytest.raises(ValueError, match="need up to") as e:
        jax.eval_shape(functools.partial(memeff.attention_statistics, memory_limit=1), x, x, x)
    limit = int(re.search(r"need up to (\d+) bytes", str(e.value))[1])

    def gradient(q, k, v, cotangents):
        return jax.vjp(functools.partial(memeff.attention_statistics, memory_limit=limit), q, k, v)[
            1
        ](cotangents)

    types = drawn.abstract(jax.eval_shape(memeff.attention_statistics, x, x, x))
    assert drawn.bytes_of((gradient, (x, x, x, types))) <= limit


def test_where_nobody_can_compile_an_estimate_decides_with_a_margin(asked):
    with pretend_device("gpu", "8.0"), pytest.raises(ValueError, match="need up to"):
        jax.eval_shape(functools.partial(dot_product_attention, memory_limit=1), X, X, X)
    assert not asked
