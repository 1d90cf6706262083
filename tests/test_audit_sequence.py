"""Check `memeff.audit` of a sequence over devices: it passes exact attention, names bad parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sequences import in_layout, make_call, mesh_of
from sharded import collectives

import memeff
from memeff.diagnostics import float64
from memeff.sequence.implementation import Sharded

pytestmark = [pytest.mark.once, pytest.mark.eight_devices]
slow = pytest.mark.slow
DEVICES = 4


def audit_call(kind: str, layout: str, strategy: str | None, implementation=None, **how):
    """Audit a call of tests/sequences.py, whose arrays are in the order of `layout`."""
    call = make_call(kind, DEVICES)
    arrays = in_layout(call, call.arrays, DEVICES, layout)
    how = dict(samples=32, sequence_layout=layout, context_parallel=strategy) | how
    with jax.set_mesh(mesh_of(DEVICES)):
        return memeff.audit(implementation, **arrays, **call.static, sequence_axis="seq", **how)


def by_one_device(q, k, v, *, sequence_axis, sequence_layout, context_parallel, **options):
    """Compute plain attention on one device, with tokens in their own order."""
    order = memeff.sequence_positions(q.shape[1], DEVICES, sequence_layout)
    back = np.argsort(order)
    q, k, v = (x[:, back] for x in (q, k, v))
    if "bias" in options:
        options["bias"] = options["bias"][:, :, back][..., back]
    if "mask" in options:
        options["mask"] = options["mask"][:, :, back][..., back]
    for name in ("query_segment_ids", "key_value_segment_ids"):
        if name in options:
            options[name] = options[name][:, back]
    out = memeff.dot_product_attention(q, k, v, implementation="reference", **options)
    return out[:, order]


RIGHT = [
    pytest.param("causal, bias, mask, segments", "zigzag", "all_gather", by_one_device, marks=slow),
    pytest.param(
        "wide window, offsets, score_fn, mask_fn, transform, lengths",
        "zigzag",
        "all_gather",
        None,
        marks=slow,
    ),
    ("causal, key bias, sinks", "striped", "ring", None),
    pytest.param("wide window, score_fn, mask_fn, lengths", "zigzag", "ring", None, marks=slow),
    pytest.param("causal, cross, shared mask, arrays", "contiguous", "ring", None, marks=slow),
    pytest.param("causal, bias, lengths", "striped", "all_to_all", None, marks=slow),
    pytest.param("mask_fn, score_fn", "striped", "ring", by_one_device, marks=slow),
    pytest.param("rotary, offset, causal", "zigzag", "all_gather", by_one_device, marks=slow),
    pytest.param("full, row bias, lengths", "contiguous", None, None, marks=slow),
]


@pytest.mark.parametrize("kind, layout, strategy, implementation", RIGHT)
def test_audit_finds_nothing_where_nothing_is(kind, layout, strategy, implementation):
    report = audit_call(kind, layout, strategy, implementation)
    assert report.ok, str(report)
    assert report.bad_devices == ()
    assert [x.name for x in report.findings] == ["lse", "out", "query", "key", "value"]
    assert all(len(x.device_errors) == DEVICES for x in report.findings)
    assert '8 on each of 4 devices along "seq"' in str(report)


@pytest.mark.parametrize(
    "kind, strategy, axes",
    [
        pytest.param(AxisType.Auto, "all_gather", ("data", "seq", "model"), marks=slow),
        pytest.param(AxisType.Auto, "ring", ("data", "seq", "model"), marks=slow),
        pytest.param(AxisType.Explicit, "ring", ("data", "seq"), marks=slow),
        pytest.param(AxisType.Explicit, "all_to_all", ("data", "seq"), marks=slow),
    ],
)
def test_arrays_tell_the_mesh(kind, strategy, axes):
    """Batch and heads are sharded as well."""
    mesh = jax.make_mesh((2,) * len(axes), axes, axis_types=(kind,) * len(axes))
    rng = np.random.default_rng(0)
    spec = NamedSharding(mesh, P(*axes))
    shapes = (2, 64, 4, 8), (2, 64, 2, 8), (2, 64, 2, 8)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    arrays = [jax.device_put(x, spec) for x in arrays]
    options = dict(is_causal=True, sequence_layout="zigzag", context_parallel=strategy, samples=15)
    if kind == AxisType.Auto:
        options["sequence_axis"] = "seq"
    report = memeff.audit(None, *arrays, **options)
    assert report.ok, str(report)
    assert report.samples == 16  # as many on each device


def one_head_wrong(q, k, v, *, sequence_axis):
    """Return attention whose last head is wrong in the last batch entry."""
    out = jax.nn.dot_product_attention(q, k, v)
    return out.at[1, :, 3].multiply(1.01)


def test_audit_names_the_batch_entry_and_the_head():
    """They lie on other devices than the first."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "model"), axis_types=(AxisType.Auto,) * 3)
    rng = np.random.default_rng(0)
    shapes = (2, 16, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    arrays = [jax.device_put(x, NamedSharding(mesh, P("data", "seq", "model"))) for x in arrays]
    report = memeff.audit(one_head_wrong, *arrays, sequence_axis="seq", samples=32)
    lse, out, query, key, value = report.findings
    assert lse.relative <= report.limit
    for finding, head in ((out, 3), (query, 3), (key, 1), (value, 1)):
        assert finding.relative > report.limit, str(report)
        assert finding.where[0] == 1, str(report)
        assert finding.where[2] == head, str(report)
    assert report.bad_devices == (0, 1)
    assert " on devices 0, 1" in str(report)


@slow
def test_two_axes():
    mesh = jax.make_mesh((2, 4), ("ring", "heads"), axis_types=(AxisType.Auto,) * 2)
    call = make_call("causal, score_fn, key bias", 8)
    arrays = in_layout(call, call.arrays, 2, "zigzag")
    options = dict(sequence_axis=("ring", "heads"), sequence_layout="zigzag", samples=32)
    with jax.set_mesh(mesh):
        report = memeff.audit(None, **arrays, **call.static, **options)
    assert report.ok, str(report)
    assert '4 on each of 8 devices along "ring" and "heads"' in str(report)


@slow
def test_bfloat16_and_leading_dims():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 2, 32, 2, 8)), jnp.bfloat16)
    with jax.set_mesh(mesh_of(DEVICES)):
        how = dict(sequence_axis="seq", sequence_layout="zigzag", context_parallel="all_gather")
        report = memeff.audit(None, x, x, x, is_causal=True, samples=8, **how)
    assert report.ok, str(report)
    assert report.dtype == "bfloat16"


# ---- planted errors


def on_device(self: Sharded, device: int, x, y):
    """Return y on one device of the ring, and x on the others."""
    return jnp.where(self.shards.rank == device, y, x)


def wrong_out(forward, self, *args, **kwargs):
    out, lse = forward(self, *args, **kwargs)
    return on_device(self, 2, out, out * 1.001), lse


def wrong_lse(forward, self, *args, **kwargs):
    out, lse = forward(self, *args, **kwargs)
    return out, lse._replace(high=on_device(self, 0, lse.high, lse.high + 1e-3))


def wrong_dkey(backward, self, *args, **kwargs):
    found = backward(self, *args, **kwargs)
    key = found.key.at[:, 1:].set(on_device(self, 1, found.key[:, 1:], found.key[:, :-1]))
    return found._replace(key=key)


def wrong_dvalue(backward, self, *args, **kwargs):
    found = backward(self, *args, **kwargs)
    return found._replace(value=on_device(self, 3, found.value, jnp.nan))


def wrong_dquery(backward, self, *args, **kwargs):
    found = backward(self, *args, **kwargs)
    return found._replace(query=on_device(self, 3, found.query, -found.query))


PLANTED = [
    pytest.param("forward", wrong_out, "out", 2, "ring", marks=slow),
    ("backward", wrong_dkey, "key", 1, "all_gather"),
    pytest.param("forward", wrong_lse, "lse", 0, "ring", marks=slow),
    pytest.param("backward", wrong_dvalue, "value", 3, "ring", marks=slow),
    pytest.param("backward", wrong_dquery, "query", 3, "ring", marks=slow),
]


@pytest.mark.parametrize("method, wrong, name, device, strategy", PLANTED)
def test_audit_names_the_device_of_a_planted_error(
    monkeypatch, method, wrong, name, device, strategy
):
    right = getattr(Sharded, method)
    monkeypatch.setattr(Sharded, method, functools.partialmethod(functools.partial(wrong, right)))
    jax.clear_caches()  # programs without the error
    report = audit_call("causal", "zigzag", strategy)
    jax.clear_caches()  # programs with the error
    assert not report.ok
    (line,) = (line for line in str(report).splitlines() if line.startswith(name))
    assert line.endswith(f"on device {device}"), str(report)
    assert device in report.bad_devices


def keys_of_others_lost(q, k, v, *, sequence_axis, sequence_layout, context_parallel):
    """Show each of 4 contiguous parts of queries only its own keys."""

    def parts(x):
        return x.reshape(-1, x.shape[1] // DEVICES, *x.shape[2:])

    out = jax.nn.dot_product_attention(*map(parts, (q, k, v)))
    return out.reshape(q.shape[:3] + v.shape[3:])


def order_ignored(q, k, v, *, sequence_axis, sequence_layout, context_parallel, is_causal):
    """Take the order of the layout for that of the tokens."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)


@pytest.mark.parametrize(
    "defect, kind, layout",
    [
        pytest.param(keys_of_others_lost, "full", "contiguous", marks=slow),
        pytest.param(order_ignored, "causal", "zigzag", marks=slow),
        pytest.param(order_ignored, "causal", "striped", marks=slow),
    ],
)
def test_audit_finds_a_wrong_function(defect, kind, layout):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 64, 2, 8)).astype(np.float32)
    how = dict(sequence_axis="seq", sequence_layout=layout, context_parallel=None, samples=32)
    how |= dict(is_causal=True) if kind == "causal" else {}
    with jax.set_mesh(mesh_of(DEVICES)):
        report = memeff.audit(defect, q, k, v, **how)
    assert not report.ok
    assert len(report.bad_devices) > 1
    assert " on devices " in str(report)


# ---- memory, and refusals


def test_no_device_gathers_the_sequence(monkeypatch):
    """Each device cuts its own tokens, and sends one row and sums of a row."""
    programs = []
    compute = float64.compute

    def record(*args):
        program = compute.lower(*args).compile()
        programs.append(program)
        return program(*args[3:])  # the others are static

    monkeypatch.setattr(float64, "compute", record)
    T = 2048
    x = np.random.default_rng(0).standard_normal((1, T, 2, 64)).astype(np.float32)
    with jax.set_mesh(mesh_of(DEVICES)):
        report = memeff.audit(None, x, x, x, sequence_axis="seq", samples=4, local_window_size=9)
    assert report.ok, str(report)
    assert len(programs) == 2
    for program in programs:
        lines = collectives(program.as_text())
        assert lines
        assert all("all-reduce" in line for line in lines)
        head = T // DEVICES * 64 * 8  # bytes, in float64, of the keys of a head that a device has
        assert program.memory_analysis().temp_size_in_bytes <= 8 * head


def test_audit_refuses():
    x = jnp.ones((1, 16, 2, 8))
    with jax.set_mesh(mesh_of(DEVICES)):
        with pytest.raises(TypeError, match="without dropout"):
            key = jax.random.key(0)
            memeff.audit(None, x, x, x, sequence_axis="seq", dropout_rng=key, dropout_rate=0.5)
        with pytest.raises(TypeError, match="memeff.audit runs outside jit"):
            jax.jit(lambda x: memeff.audit(None, x, x, x, sequence_axis="seq").samples)(x)
        with pytest.raises(ValueError, match="T=18 tokens.* pad to 20 tokens"):
            memeff.audit(None, *(jnp.ones((1, 18, 2, 8)),) * 3, sequence_axis="seq")
