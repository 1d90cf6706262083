"""The forward with a fixed row reference (memeff.xla): exact for every input, by its check and its fall-back."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_as_good
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from memeff import dot_product_attention
from memeff.chunked import eligible, fixed_max
from memeff.chunked import implementation as chunked
from memeff.masking import mask_tile
from memeff.problem import LogitParams, Operands, Problem

B, T, S, K, G, H, D = 2, 75, 90, 2, 2, 16, 11


def draw(name: str, dtype):
    """query [B, T, K, G, H], key [B, S, K, H], value [B, S, K, D]; the named property planted."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(s) for s in ((B, T, K, G, H), (B, S, K, H), (B, S, K, D)))
    match name:
        # orthogonal: the bound is 10^5, the logits are small
        case "key far longer than what any query sees of it":
            q[..., 0] = 0
            k[1, 7, 0] = 0
            k[1, 7, 0, 0] = 1e5
        case "one row far below its bound":
            q[0, 40] *= 0.0
            q[0, 40, :, :, 0] = 300.0
            k[0, :, :, 0] = -abs(k[0, :, :, 0]) * 10
        case "logits of 10^4":
            q, k = q * 60, k * 40
        case "norm that overflows":
            q *= 1e-25
            q[0, 3] = 0
            k[1, 7, 0] *= 1e25
        case "outlier channel":
            q[..., 3] *= 30
            k[..., 3] *= 30
        case "constant 1000":
            q[:], k[:] = 1000 / 16, 1.0
        case "tiny":
            q *= 1e-20
        case "ordinary":
            pass
    return [jnp.asarray(x, dtype) for x in (q, k, v)]


FAR = (
    "key far longer than what any query sees of it",
    "one row far below its bound",
    "norm that overflows",
)
NEAR = ("ordinary", "logits of 10^4", "outlier channel", "constant 1000", "tiny")


def problem(causal: bool) -> Problem:
    where = dict(right=0, q_offset=20) if causal else {}
    return Problem(**where, scale=H**-0.5, chunk_size=(16, 24), fixed_chunk_size=(16, 24))


NAMES = ("inference", "out", "lse", "dq", "dk", "dv")


def both(p: Problem, operands, dout, dlse):
    """Calls (operands, dout, dlse) giving NAMES, with the fixed reference and online; and which rows of the first stand."""

    def run(p, operands, dout, dlse):
        forward = chunked.forward(p, operands)
        inference = chunked.forward(p, operands, None)[0]
        return (
            inference,
            forward[0],
            forward[1].high,
            *chunked.backward(p, operands, *forward, dout, dlse)[:3],
        )

    fixed, online = (
        jax.jit(functools.partial(run, p)).lower(operands, dout, dlse).compile()
        for p in (p, dataclasses.replace(p, fixed_chunk_size=None))
    )
    return (
        fixed,
        online,
        jax.jit(
            lambda operands: fixed_max.sums_in_range(
                p, operands, fixed_max.fixed_max_forward(p, operands, "caller")
            )
        ),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_fixed_reference_is_exact(dtype, causal):
    """Also for rows that it cannot serve: there the check says so, and the online form runs. That is the baseline."""
    rng = np.random.default_rng(5)
    dout, dlse = rng.standard_normal((B, K, G, T, D)), rng.standard_normal((B, K, G, T))
    p = problem(causal)
    dout, dlse = jnp.asarray(dout, dtype), jnp.asarray(dlse, jnp.float32)
    with_fixed, without, stands = both(p, Operands(*draw("ordinary", dtype)), dout, dlse)
    for name in (*NEAR, *FAR):
        q, k, v = draw(name, dtype)
        assert eligible.fixed_max_applies(p, Operands(q, k, v))
        fixed, online = (run(Operands(q, k, v), dout, dlse) for run in (with_fixed, without))
        ok = stands(Operands(q, k, v)).all()
        if name in FAR:
            assert not ok, f"{name}: the planted rows were meant to need the fall-back"
        if name in ("ordinary", "tiny"):
            assert ok, f"{name}: the fixed reference should have served"
        q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, k, v))
        call = dict(query=q64.reshape(B, T, K * G, H), key=k64, value=v64)
        call |= dict(scale=H**-0.5, is_causal=causal, q_offset=p.q_offset)
        out, lse = oracle.attention(**call)
        flat = np.moveaxis(np.asarray(dout, np.float64), 3, 1).reshape(B, T, K * G, D)
        grads = oracle.gradients(
            **call, dout=flat, dlse=np.moveaxis(dlse, 3, 1).reshape(B, T, K * G)
        )
        out = np.moveaxis(out.reshape(B, T, K, G, D), 1, 3)
        truth = [out, out, np.moveaxis(lse.reshape(B, T, K, G), 1, 3)]
        truth += [grads["query"].reshape(B, T, K, G, H), grads["key"], grads["value"]]
        for what, x, base, true in zip(NAMES, fixed, online, truth, strict=True):
            assert_as_good(
                x, [base], true, "float32" if what == "lse" else dtype, f"{name}: {what}"
            )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lse_for", [None, "gradient"])
def test_sums_of_ones_fall_back_too(lse_for, causal):
    """As on GPUs, where l comes from p [v 1]."""
    p = dataclasses.replace(problem(causal), fused_chunk_size=(16, 24))
    q, k, v = draw("one row far below its bound", jnp.bfloat16)
    k = k.at[1, 7, 0].set(jnp.nan)  # other rows are done again for a value that is not finite
    forward = jax.jit(lambda p: chunked.forward(p, Operands(q, k, v), lse_for), static_argnums=0)
    found, online = (
        forward(dataclasses.replace(p, fixed_chunk_size=size)) for size in ((16, 24), None)
    )
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(online), strict=True):
        np.testing.assert_array_equal(jnp.isnan(x), jnp.isnan(y))
    np.testing.assert_allclose(np.float32(found[0]), np.float32(online[0]), atol=0.03)


@pytest.mark.parametrize("name", FAR)
def test_rows_that_stand_stay(name):
    """Starting over for some rows changes no bit of the others."""
    p = problem(True)
    dout, dlse = jnp.ones((B, K, G, T, D)), jnp.zeros((B, K, G, T))
    operands = Operands(*draw(name, jnp.float32))
    fixed, online, stands = both(p, operands, dout, dlse)
    stands, without = (
        np.asarray(stands(operands)),
        jax.jit(lambda operands: fixed_max.fixed_max_forward(p, operands, "caller"))(operands),
    )
    assert not stands.all() and stands.any()
    found, wanted = fixed(operands, dout, dlse), online(operands, dout, dlse)
    np.testing.assert_array_equal(found[1][stands], (without.o / without.weight[..., None])[stands])
    np.testing.assert_array_equal(found[1][~stands], wanted[1][~stands])


@pytest.mark.parametrize("lse_for", [None, "gradient", "caller"])
def test_a_row_of_one_key_is_its_value(lse_for):
    """In bits: p is divided by itself as it was rounded. (XLA takes back a mere cast where the sum of p is wider.)"""
    q, k, v = draw("ordinary", jnp.bfloat16)
    p = dataclasses.replace(problem(True), q_offset=0)
    # b k g d
    out = jax.jit(lambda q, k, v: chunked.forward(p, Operands(q, k, v), lse_for)[0])(q, k, v)[
        :, :, :, 0
    ]
    np.testing.assert_array_equal(out, jnp.broadcast_to(v[:, 0, :, None], out.shape))


MASKS = {
    "full": Problem(),
    "causal": Problem(right=0),
    "window": Problem(left=20, right=3, q_offset=7),
    "rows that see nothing": Problem(right=0, q_offset=-30),
}


@pytest.mark.parametrize("mask", MASKS)
def test_fixed_reference_is_as_the_online_form(mask):
    """Out, lse, gradients under every mask that positions give; NaN where it belongs, and a hidden one changes no bit."""
    p = dataclasses.replace(MASKS[mask], scale=0.2, chunk_size=(16, 24), fixed_chunk_size=(16, 24))
    rng = np.random.default_rng(6)
    q, k, v = draw("ordinary", jnp.float32)
    dout, dlse = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((B, K, G, T, D), (B, K, G, T))
    )
    fixed, online, _ = both(p, Operands(q, k, v), dout, dlse)
    clean = fixed(Operands(q, k, v), dout, dlse)
    for what, x, y in zip(NAMES, clean, online(Operands(q, k, v), dout, dlse), strict=True):
        finite = np.abs(y).max(where=np.abs(y) < 1e30, initial=1)
        np.testing.assert_allclose(x, y, rtol=0, atol=4e-6 * finite, err_msg=what)
    keep = np.asarray(mask_tile(p, Operands(q, k, v), jnp.arange(T), jnp.arange(S)))[0, 0, 0]
    for at in {int(np.argmin(keep.any(0))), 41}:
        dirty = Operands(q, k.at[:, at].set(np.nan), v.at[:, at].set(np.nan))
        for what, x, y, before in zip(
            NAMES, fixed(dirty, dout, dlse), online(dirty, dout, dlse), clean, strict=True
        ):
            np.testing.assert_array_equal(np.isnan(x), np.isnan(y), err_msg=what)
            sees = keep[:, at]  # rows, and keys that share one with the planted
            if not sees.any():
                np.testing.assert_array_equal(x, before, err_msg=what)
                continue
            reached = keep[sees].any(0) if what in ("dk", "dv") else sees
            nan = np.moveaxis(np.isnan(x), 3 if what in NAMES[:3] else 1, 0)
            assert nan[at if what in ("dk", "dv") else sees].all(), what
            # p of a row whose lse is NaN is NaN everywhere
            assert what == "dv" or not nan[~reached].any(), what


def test_fixed_reference_serves_plain_calls_only():
    q, k, v = draw("ordinary", jnp.float32)
    plain, p = Operands(q, k, v), problem(True)
    assert eligible.fixed_max_applies(p, plain)
    assert not eligible.fixed_max_applies(dataclasses.replace(p, fixed_chunk_size=None), plain)
    ids, n = jnp.zeros((B, T), jnp.int32), jnp.full((B,), 5, jnp.int32)
    for refused in (
        plain._replace(logit_params=LogitParams(bias=jnp.zeros((1, 1, 1, 1, S)))),
        plain._replace(logit_params=LogitParams(scale=jnp.float32(1))),
        plain._replace(logit_params=LogitParams(soft_cap=jnp.float32(1))),
        plain._replace(mask=jnp.ones((1, 1, 1, 1, S), bool)),
        plain._replace(q_lengths=n),
        plain._replace(kv_lengths=n),
        plain._replace(q_offset=n),
        plain._replace(q_segments=ids, kv_segments=jnp.zeros((B, S), jnp.int32)),
        Operands(*(x.astype(jnp.float16) for x in plain[:3])),
    ):
        assert not eligible.fixed_max_applies(p, refused), refused
    assert not eligible.fixed_max_applies(dataclasses.replace(p, soft_cap=3.0), plain)
    # row 0 sees nothing
    assert not eligible.fixed_max_applies(dataclasses.replace(p, q_offset=-1), plain)


def test_hidden_keys_change_no_reference():
    q, k, v = draw("ordinary", jnp.float32)
    p, k = problem(True), k * 100
    m = fixed_max.max_bound(p, Operands(q, k, v))
    later = fixed_max.max_bound(p, Operands(q, k.at[:, 60:].mul(1e4), v))
    # row 39 sees key 59 and no later
    assert (m[..., :39] == later[..., :39]).all() and (later[..., 45] > m[..., 45]).any()
    p = dataclasses.replace(p, left=4)
    # row 0 sees key 16 and no earlier
    earlier = fixed_max.max_bound(p, Operands(q, k.at[:, :16].set(jnp.nan), v))
    assert (fixed_max.max_bound(p, Operands(q, k, v)) == earlier).all()


def test_one_column_that_overflows_is_enough():
    """Values of 10^6 in one column alone: the row does not stand, though its other columns are finite."""
    q = jnp.full((1, 1024, 1, 64), 4.0)
    v = jnp.zeros((1, 1024, 1, 3)).at[..., 1].set(1e6).at[..., 2].set(1.0)
    np.testing.assert_allclose(
        dot_product_attention(q, q, v)[0, :, 0], [[0, 1e6, 1]] * 1024, rtol=1e-5
    )


def test_a_batch_starts_over_as_one():
    """Under vmap the check is one for the whole batch: the loop's condition stays a scalar."""
    q, k, v = (jnp.stack([x, x]) for x in draw("ordinary", jnp.float32))
    run = jax.vmap(lambda q, k, v: chunked.forward(problem(True), Operands(q, k, v)))
    loops = [e for e in jax.make_jaxpr(run)(q, k, v).jaxpr.eqns if e.primitive.name == "while"]
    assert [loop.params["cond_jaxpr"].out_avals[0].shape for loop in loops] == [()]


@pytest.mark.parametrize("mapped", [False, True])
def test_sharded_check_is_one_boolean(monkeypatch, mapped):
    """Batch and heads sharded: under jit the check is an all-reduce of one boolean, under shard_map nothing."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    spec = PartitionSpec("x", None, "y", None)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    call = functools.partial(dot_product_attention, is_causal=True, chunk_size=64)
    if mapped:
        call = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    x = jax.ShapeDtypeStruct((4, 256, 4, 16), jnp.float32, sharding=NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        text = jax.jit(call).lower(x, x, x).compile().as_text()
    found = re.findall(r"= (\S+) (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", text)
    assert set(found) == (set() if mapped else {("pred[]", "all-reduce")})
