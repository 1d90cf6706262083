"""Calls of the Hopper kernels under vmap, on several devices and lowered for CUDA.

Where numbers are compared, plain JAX stands in for the kernels (see hopper_stand_ins.py).
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes
from conftest import cotangents, few
from hopper_cases import bf16, draw, f32, i32, kernels, lowered, needs_kernels
from hopper_stand_ins import accept_all_calls, let_arrays_be_sharded, use_plain_kernels
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from small_calls import assert_close

from memeff import block_mask, dot_product_attention, explain, masks, scores
from memeff.device import pretend_device

pytestmark = needs_kernels

AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]
BATCH_AND_HEADS = P("x", None, "y")


def devices_2x2(axis_type):
    """Return a mesh of two devices for the batch and two for heads."""
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)


# ---- lowered for CUDA


def causal(query, key, value):
    return dot_product_attention(query, key, value, is_causal=True)


def training(query, key, value, dout):
    out, pull = jax.vjp(causal, query, key, value)
    return out, *pull(dout)


@pytest.mark.parametrize("H", few((64, 128, 200), (128,)))
def test_calls_lower_for_cuda(H):
    """Inference stores no lse. Beyond 128, dq, dk, dv and delta have a kernel each."""
    x = jax.ShapeDtypeStruct((2, 1000, 4, H), bf16)
    inference = lowered(causal, x, x, x)
    (kernel,) = [line for line in inference.splitlines() if "custom_call @mosaic_gpu" in line]
    assert "f32" not in kernel.split("->")[-1]  # no lse
    assert kernels(lowered(training, x, x, x, x)) == (3 if H <= 128 else 5)


def test_explain_says_where_the_gradient_of_wide_heads_runs():
    x = jax.ShapeDtypeStruct((1, 256, 2, 192), bf16)
    bias = jax.ShapeDtypeStruct((1, 2, 256, 256), bf16)
    with pretend_device("gpu", "9.0"):
        assert "chunked path" not in str(explain(x, x, x)).splitlines()[0]
        text = str(explain(x, x, x, bias=bias))
    assert "Hopper kernels, tiles of 64 x 64 logits, the gradient on the chunked path" in text


def test_a_block_mask_lowers_for_cuda():
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), bf16)
    mask_fn = block_mask(masks.prefix(70), 256, block_size=64)
    call = functools.partial(dot_product_attention, mask_fn=mask_fn, implementation="pallas")
    assert kernels(lowered(call, x, x, x)) == 1


def lowered_ring(query, value) -> str:
    """Return a causal ring of three devices and its gradient, lowered for CUDA."""
    mesh = jax.make_mesh((3,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    tokens = P(None, "seq")
    ring = dict(sequence_axis="seq", sequence_layout="zigzag", context_parallel="ring")

    def run(query, key, value, dout):
        attend = functools.partial(dot_product_attention, is_causal=True, **ring)
        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(dout)

    run = jax.shard_map(run, mesh=mesh, in_specs=tokens, out_specs=tokens)
    return lowered(run, query, query, value, value)


@pytest.mark.parametrize("dtype", [bf16, f32])
@pytest.mark.parametrize("H", few((24, 32, 64, 128), (32,)))
def test_a_ring_lowers_for_cuda(H, dtype):
    """The gradient of the last step computes delta by a kernel of its own."""
    x = jax.ShapeDtypeStruct((1, 768, 2, H), dtype)
    text = lowered_ring(x, x)
    assert kernels(text) == 10 and text.count("memeff_delta") >= 1


@pytest.mark.slow
def test_a_ring_of_wide_heads_lowers_for_cuda():
    query = jax.ShapeDtypeStruct((1, 768, 2, 192), bf16)
    value = jax.ShapeDtypeStruct((1, 768, 2, 128), bf16)
    text = lowered_ring(query, value)
    for kernel in ("forward", "delta", "dq", "dk", "dv"):
        assert f"memeff_{kernel}" in text
    assert "memeff_dkdv" not in text


@pytest.mark.parametrize("tokens", [16, 64, 66])
def test_a_ring_of_few_tokens_traces(tokens):
    """Kernels may run the work at home, and another implementation its halves."""
    mesh = jax.make_mesh((3,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    x = jax.ShapeDtypeStruct((1, 3 * tokens, 2, 64), bf16)
    ring = dict(sequence_axis="seq", sequence_layout="zigzag", context_parallel="ring")

    def run(query, key, value):
        attend = functools.partial(dot_product_attention, is_causal=True, **ring)
        return jax.vjp(attend, query, key, value)[1](query)

    run = jax.shard_map(run, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    with pretend_device("gpu", "9.0"):
        assert [y.shape for y in jax.eval_shape(run, x, x, x)] == [x.shape] * 3


OPTIONS = {
    "plain": dict(),
    "sinks": dict(sinks=np.ones(4, f32)),
    "soft cap": dict(logits_soft_cap=5.0),
    "window": dict(local_window_size=(100, 0)),
    "fastest": dict(backward="fastest"),
    "lengths": dict(key_value_seq_lengths=i32([2])),
}


@pytest.mark.parametrize("seed", few(range(60), range(6)))
def test_random_calls_of_many_devices_trace(seed):
    """Whatever kernel a part of the work takes, a call runs or is refused in words."""
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]
    count = pick(2, 3, 4)
    layout = pick("contiguous", "zigzag", "zigzag", "striped")
    options = OPTIONS[pick(*OPTIONS)] | {
        "is_causal": bool(rng.random() < 0.8),
        "sequence_axis": "seq",
        "sequence_layout": layout,
        "context_parallel": pick("ring", "ring", "all_gather", "all_to_all", None),
    }
    B, L, H, K = 1, pick(2, 16, 64, 66, 200), pick(8, 24, 32, 64, 96, 128, 192), pick(1, 2, 4)
    x = jax.ShapeDtypeStruct((B, count * L, 4, H), pick(bf16, f32, np.float16))
    key = x.update(shape=(B, count * L, K, H))
    attend = functools.partial(dot_product_attention, **options)

    def run(query, key, value):
        if seed % 3 == 0:
            return jax.jvp(attend, (query, key, value), (query, key, value))[1]
        return jax.vjp(attend, query, key, value)[1](query)[0]

    devices = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("seq",), axis_types=(AxisType.Auto,), devices=devices)
    if seed % 2:
        run = jax.shard_map(run, mesh=mesh, in_specs=P(None, "seq"), out_specs=P(None, "seq"))
    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        try:
            assert jax.eval_shape(run, x, key, key).shape == x.shape
        except NotImplementedError as error:
            assert "cannot run this call" in str(error)


@pytest.mark.parametrize("capability", ["9.0", "8.0"])
@pytest.mark.parametrize("dtype", [bf16, f32])
def test_params_of_a_score_beside_a_bias_trace(capability, dtype):
    """On a machine of several devices JAX refuses kernels that close over a param, cast or not."""
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), bf16)
    bias = jax.ShapeDtypeStruct((1, 1, 1, 256), bf16)
    slopes = jax.ShapeDtypeStruct((2,), dtype)

    def run(query, bias, slopes):
        def attend(query, bias, slopes):
            how = dict(bias=bias, score_fn=scores.alibi(slopes), implementation="pallas")
            return dot_product_attention(query, query, query, **how)

        out, pull = jax.vjp(attend, query, bias, slopes)
        return pull(out)

    with pretend_device("gpu", capability):
        shapes = jax.eval_shape(run, x, bias, slopes)
    assert [y.shape for y in shapes] == [x.shape, bias.shape, slopes.shape]


@pytest.mark.slow
def test_transformations_lower_for_cuda():
    x = jax.ShapeDtypeStruct((3, 2, 256, 4, 64), bf16)
    one_key = x.update(shape=x.shape[1:])
    mapped = jax.vmap(training, (0, None, 0, 0))
    assert kernels(lowered(mapped, x, one_key, x, x)) == 3

    def packed(q, ids):
        return dot_product_attention(q, q, q, query_segment_ids=ids, implementation="pallas")

    ids = jax.ShapeDtypeStruct((3, 2, 256), np.int32)
    assert kernels(lowered(jax.vmap(packed), x, ids)) == 1

    x = jax.ShapeDtypeStruct((2, 256, 4, 64), bf16)
    mesh = devices_2x2(AxisType.Auto)
    spec = BATCH_AND_HEADS
    parts = jax.shard_map(training, mesh=mesh, in_specs=spec, out_specs=(spec,) * 4)
    assert kernels(lowered(parts, x, x, x, x)) == 3

    @jax.checkpoint
    def loss(q):
        return dot_product_attention(q, q, q).astype(f32).sum()

    # the text has the forward once, and calls it twice
    assert kernels(lowered(jax.value_and_grad(loss), x)) == 3

    def step(x, _):
        return dot_product_attention(x, x, x), None

    def layers(x):
        return jax.lax.scan(step, x, length=5)[0].astype(f32).sum()

    assert kernels(lowered(jax.grad(layers), x)) == 3


# ---- several devices, and vmap


def results_and_gradients(query, key, value, dout, dlse, implementation):
    """Return out, lse, dq, dk and dv of a causal call."""
    call = functools.partial(
        dot_product_attention, is_causal=True, return_residual=True, implementation=implementation
    )
    results, pull = jax.vjp(call, query, key, value)
    return *results, *pull((dout, dlse))


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_devices_have_the_tiles_of_a_block_mask(axis_type, monkeypatch):
    """The list of tiles is a constant inside of what is partitioned."""
    from memeff.pallas.hopper import calls, tile_ranges

    tables = []

    def attend(problem, lengths, arrays, scalars, want_lse, tiling, carried):
        query, _, value = arrays
        table = tile_ranges.with_lists(problem, scalars, lengths, (64, 64)).tile_table
        tables.append(table.shape)
        return (jnp.zeros_like(query) + value[0, 0, 0, 0] + table.sum(),), None

    monkeypatch.setattr(calls, "attend", attend)
    let_arrays_be_sharded(monkeypatch)
    accept_all_calls(monkeypatch)
    mask_fn = block_mask(masks.prefix(70), 256, block_size=64)
    mesh = devices_2x2(axis_type)
    x = jax.device_put(np.zeros((2, 256, 4, 64), f32), NamedSharding(mesh, BATCH_AND_HEADS))
    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        call = functools.partial(dot_product_attention, mask_fn=mask_fn, implementation="pallas")
        out = jax.jit(call)(x, x, x)
    # of four tiles of queries: start, masked, length; each sees tile 1 in part and tile 0
    assert set(tables) == {(4 * 3 + 4 * 2,)}
    lists = np.array([[12 + 2 * i, 1, 2] for i in range(4)]).sum() + 4 * 1
    np.testing.assert_array_equal(np.asarray(out), lists)


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("K", [4, 2, 1])
def test_devices_run_their_own_part(K, axis_type, monkeypatch):
    """Devices exchange nothing where batch and heads are sharded, except for sums over query heads.

    Only query heads on other devices than their keys have such sums.
    """
    let_arrays_be_sharded(monkeypatch)
    use_plain_kernels(monkeypatch)
    args = draw(f32, Sizes(B=2, T=37, S=37, K=K, G=4 // K, H=8, D=8))
    dout, dlse = cotangents(args)
    chunked = functools.partial(results_and_gradients, implementation="xla")
    expected = jax.jit(chunked)(*args, dout, dlse)
    mesh = devices_2x2(axis_type)

    def place(x, spec=BATCH_AND_HEADS):
        return jax.device_put(x, NamedSharding(mesh, spec))

    query, key, value = args
    keys = BATCH_AND_HEADS if K > 1 else P("x")
    arrays = [
        place(query),
        place(key, keys),
        place(value, keys),
        place(dout),
        place(dlse),
    ]
    accept_all_calls(monkeypatch)
    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        call = jax.jit(functools.partial(results_and_gradients, implementation="pallas"))
        results = call(*arrays)
        text = call.lower(*arrays).compile().as_text()
    assert_close(results, expected, atol=2e-5)
    for x in results:
        assert x.sharding.spec[0] == "x"
    collectives = set(re.findall(r"(all-\w+|collective-\w+)\(", text))
    assert collectives == ({"all-reduce"} if K == 1 else set())


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
@pytest.mark.parametrize("name", ["q_offset", "key_value_seq_lengths", "query_segment_ids", "mask"])
def test_small_operands_may_lie_whole_on_each_device(name, axis_type, monkeypatch):
    """Gradients are sharded as the query is.

    The stand-in reads none of these operands. test_hopper.py checks what they hide.
    """
    let_arrays_be_sharded(monkeypatch)
    use_plain_kernels(monkeypatch)
    mesh = devices_2x2(axis_type)

    def place(x, spec):
        return jax.device_put(x, NamedSharding(mesh, spec))

    args = draw(f32, Sizes(B=2, T=37, S=37, K=4, G=1, H=8, D=8))
    arrays = [place(x, BATCH_AND_HEADS) for x in args]
    small_operands = {
        "q_offset": i32(3),
        "key_value_seq_lengths": i32([30, 20]),
        "mask": np.ones((1, 1, 1, 37), bool),
        "query_segment_ids": np.zeros((2, 37), np.int32),
    }
    accept_all_calls(monkeypatch)

    def total(query, key, value, operand):
        kwargs = {name: operand}
        out = dot_product_attention(
            query, key, value, is_causal=True, implementation="pallas", **kwargs
        )
        return out.sum()

    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        operand = place(small_operands[name], P())
        dq = jax.jit(jax.grad(total))(*arrays, operand)
    assert dq.sharding.spec[:3] == ("x", None, "y")


@pytest.mark.parametrize("batched", [(0, None, None), (None, 0, 0), (0, 0, 0)], ids=str)
def test_vmap_folds_into_the_batch(batched, monkeypatch):
    use_plain_kernels(monkeypatch)
    accept_all_calls(monkeypatch)
    args = draw(f32, Sizes(B=2, T=7, S=7, K=2, G=2, H=8, D=8))
    dout, dlse = cotangents(args)
    stacked = [
        x if axis is None else np.stack([x, 2 * x, -x])
        for x, axis in zip(args, batched, strict=True)
    ]
    call = functools.partial(results_and_gradients, implementation="pallas")
    mapped = jax.vmap(call, (*batched, None, None))
    with pretend_device("gpu", "9.0"):
        results = jax.jit(mapped)(*stacked, dout, dlse)
    for i in range(3):
        one = [x if axis is None else x[i] for x, axis in zip(stacked, batched, strict=True)]
        expected = results_and_gradients(*one, dout, dlse, "xla")
        assert_close([x[i] for x in results], expected, atol=2e-5)


def attend_times_sinks(problem, lengths, arrays, scalars, want_lse, tiling, carried):
    """Stand in for the forward kernel: return the query times the sink of its head."""
    from memeff.logits import LOG2_E

    query, _, value = arrays
    D = value.shape[-1]
    sinks = scalars.sinks[:, None, :, None] / LOG2_E
    return (query[..., :D] * sinks,), None


@pytest.mark.parametrize(
    "axis_type, mapped", [(AxisType.Auto, False), (AxisType.Auto, True), (AxisType.Explicit, False)]
)
def test_each_device_has_the_sinks_of_its_heads(axis_type, mapped, monkeypatch):
    """Each head gets its own sink, by a kernel that writes sinks to its output."""
    from memeff.pallas.hopper import calls

    monkeypatch.setattr(calls, "attend", attend_times_sinks)
    let_arrays_be_sharded(monkeypatch)
    accept_all_calls(monkeypatch)
    mesh = devices_2x2(axis_type)
    query = np.ones((2, 64, 4, 64), f32)  # with fewer queries the decode kernel would run
    sinks = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], f32)

    def call(sinks, query):
        return dot_product_attention(query, query, query, sinks=sinks, implementation="pallas")

    if mapped:
        call = jax.vmap(call, (0, None))
    else:
        sinks = sinks[0]
    with pretend_device("gpu", "9.0"), jax.set_mesh(mesh):
        placed = jax.device_put(query, NamedSharding(mesh, BATCH_AND_HEADS))
        out = jax.jit(call)(sinks, placed)
    shape = *sinks.shape[:-1], *query.shape
    expected = np.broadcast_to(sinks[..., None, None, :, None], shape)
    np.testing.assert_allclose(out, expected, rtol=1e-6)
