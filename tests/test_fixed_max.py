"""Test the forward with a bound on each row's maximum (memeff/chunked/fixed_max.py).

It is exact for every input, because a check finds the rows in which the bound fails. The online
form, with its running maximum, redoes these rows.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_as_good, few
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from memeff import dot_product_attention
from memeff.chunked import eligible, fixed_max
from memeff.chunked import implementation as chunked
from memeff.masking import mask_tile
from memeff.problem import Dropout, LogitParams, Operands, Problem, Schedule

pytestmark = pytest.mark.once

B, T, S, K, G, H, D = 2, 75, 90, 2, 2, 16, 11

FAR = (  # some rows need the online form
    "key far longer than what any query sees of it",
    "one row far below its bound",
    "norm that overflows",
)
NEAR = ("ordinary", "logits of 10^4", "outlier channel", "constant 1000", "tiny")

RESULTS = ("inference", "out", "lse", "dq", "dk", "dv")


def draw(name: str, dtype):
    """Return query, key and value with the named property.

    Their shapes are [B, T, N, H], [B, S, K, H] and [B, S, K, D].
    """
    rng = np.random.default_rng(3)
    q = rng.standard_normal((B, T, K, G, H))
    k = rng.standard_normal((B, S, K, H))
    v = rng.standard_normal((B, S, K, D))
    match name:
        case "key far longer than what any query sees of it":
            # The key is orthogonal to all queries: the bound is 10^5, the logits are small.
            q[..., 0] = 0
            k[1, 7, 0] = 0
            k[1, 7, 0, 0] = 1e5
        case "one row far below its bound":
            q[0, 40] *= 0.0
            q[0, 40, :, :, 0] = 300.0
            k[0, :, :, 0] = -abs(k[0, :, :, 0]) * 10
        case "logits of 10^4":
            q *= 60
            k *= 40
        case "norm that overflows":
            q *= 1e-25
            q[0, 3] = 0
            k[1, 7, 0] *= 1e25
        case "outlier channel":
            q[..., 3] *= 30
            k[..., 3] *= 30
        case "constant 1000":
            q[:] = 1000 / 16
            k[:] = 1.0
        case "tiny":
            q *= 1e-20
        case "ordinary":
            pass
    return [x.astype(dtype) for x in (q.reshape(B, T, K * G, H), k, v)]


def with_entry(x, index, value):
    """Return a copy of x with other entries at an index."""
    x = np.array(x)
    x[index] = value
    return x


def make_problem(causal: bool) -> Problem:
    window = dict(right=0, q_offset=20) if causal else {}
    return Problem(**window, scale=H**-0.5)


ONLINE = Schedule((16, 24))
FIXED = Schedule((16, 24), fixed_max_chunk_size=(16, 24))
ON_GPU = dataclasses.replace(FIXED, gpu_fused_chunk_size=(16, 24))


@functools.cache
def results_of(p: Problem, schedule: Schedule = FIXED):
    """Return a jitted function from (operands, dout, dlse) to the RESULTS."""

    def run(operands, dout, dlse):
        inference, _ = chunked.forward(p, schedule, operands, None)
        out, lse = chunked.forward(p, schedule, operands)
        grads = chunked.backward(p, schedule, operands, out, lse, dout, dlse)
        return (inference, out, lse.high, *grads[:3])

    return jax.jit(run)


@functools.cache
def valid_rows(p: Problem):
    """Return a compiled function from operands to whether the bound holds in a row [B, K, G, T]."""

    def run(operands):
        return fixed_max.fixed_max_forward(p, FIXED, operands, "caller")[1]

    return jax.jit(run)


def true_results(causal: bool, operands: Operands, dout, dlse):
    """Return the oracle's RESULTS, in the shapes of the chunked functions."""
    q, k, v = (np.asarray(x, np.float64) for x in operands[:3])
    call = dict(query=q, key=k, value=v)
    call |= dict(scale=H**-0.5, is_causal=causal, q_offset=make_problem(causal).q_offset)
    out, lse = oracle.attention(**call)
    dout = np.moveaxis(np.asarray(dout, np.float64), 3, 1).reshape(B, T, K * G, D)
    dlse = np.moveaxis(dlse, 3, 1).reshape(B, T, K * G)
    grads = oracle.gradients(**call, dout=dout, dlse=dlse)
    out = np.moveaxis(out.reshape(B, T, K, G, D), 1, 3)
    lse = np.moveaxis(lse.reshape(B, T, K, G), 1, 3)
    return out, out, lse, grads["query"], grads["key"], grads["value"]


# ---- rows in which the bound fails


@pytest.mark.parametrize("dtype", few(["float32", "bfloat16"], ["float32"]))
@pytest.mark.parametrize("causal", few([False, True], [True]))
def test_fixed_max_is_exact(dtype, causal):
    """The results are as good as those of the online form, the baseline here.

    This holds also for rows in which the bound fails, because the check finds them.
    """
    rng = np.random.default_rng(5)
    dout = rng.standard_normal((B, K, G, T, D)).astype(dtype)
    dlse = rng.standard_normal((B, K, G, T)).astype(np.float32)
    p = make_problem(causal)
    run_fixed = results_of(p)
    run_online = results_of(p, ONLINE)
    valid = valid_rows(p)
    for name in (*NEAR, *FAR):
        operands = Operands(*draw(name, dtype))
        assert eligible.fixed_max_applies(p, FIXED, operands)
        all_valid = valid(operands).all()
        if name in FAR:
            assert not all_valid, f"{name}: the planted rows were meant to need the fall-back"
        if name in ("ordinary", "tiny"):
            assert all_valid, f"{name}: the bound should have held in all rows"
        fixed = run_fixed(operands, dout, dlse)
        online = run_online(operands, dout, dlse)
        truth = true_results(causal, operands, dout, dlse)
        for what, x, base, true in zip(RESULTS, fixed, online, truth, strict=True):
            result_dtype = "float32" if what == "lse" else dtype
            assert_as_good(x, [base], true, result_dtype, f"{name}: {what}")


@pytest.mark.parametrize(
    "lse_for, causal",
    few(itertools.product([None, "gradient"], [False, True]), [(None, True), ("gradient", False)]),
)
def test_sums_of_ones_fall_back_too(lse_for, causal):
    """Rows fall back also where l comes from p [v 1], as on GPUs."""
    p = make_problem(causal)
    q, k, v = draw("one row far below its bound", jnp.bfloat16)
    k = with_entry(k, (1, 7, 0), np.nan)  # other rows are redone because they see NaN

    @jax.jit
    def both():
        schedules = ON_GPU, dataclasses.replace(ON_GPU, fixed_max_chunk_size=None)
        return [chunked.forward(p, x, Operands(q, k, v), lse_for) for x in schedules]

    fixed, online = both()
    for x, y in zip(jax.tree.leaves(fixed), jax.tree.leaves(online), strict=True):
        np.testing.assert_array_equal(jnp.isnan(x), jnp.isnan(y))
    np.testing.assert_allclose(np.float32(fixed[0]), np.float32(online[0]), atol=0.03)


@pytest.mark.parametrize("name", few(FAR, FAR[:1]))
def test_rows_that_stand_stay(name):
    """Redoing some rows changes no bit of the valid rows."""
    p = make_problem(True)
    dout = np.ones((B, K, G, T, D), np.float32)
    dlse = np.zeros((B, K, G, T), np.float32)
    operands = Operands(*draw(name, jnp.float32))
    valid = np.asarray(valid_rows(p)(operands))
    assert not valid.all() and valid.any()
    run = jax.jit(lambda operands: fixed_max.fixed_max_forward(p, FIXED, operands, "caller"))
    sums, _ = run(operands)
    before = sums.o / sums.weight[..., None]
    fixed = results_of(p)(operands, dout, dlse)
    online = results_of(p, ONLINE)(operands, dout, dlse)
    np.testing.assert_array_equal(fixed[1][valid], before[valid])
    np.testing.assert_array_equal(fixed[1][~valid], online[1][~valid])


def test_one_column_that_overflows_is_enough():
    """A row is redone if a single column of o overflows, here because of values of 10^6."""
    q = np.full((1, 1024, 1, 64), 4, np.float32)
    v = np.broadcast_to(np.array([0, 1e6, 1], np.float32), (1, 1024, 1, 3))
    run = jax.jit(
        lambda q, v: chunked.forward(Problem(scale=0.125), FIXED, Operands(q, q, v), None)
    )
    out, _ = run(q, v)  # B K G T D
    np.testing.assert_allclose(out[:, :, 0], v.swapaxes(1, 2), rtol=1e-5)


@pytest.mark.parametrize("lse_for", few([None, "gradient", "caller"], [None, "gradient"]))
def test_a_row_of_one_key_is_its_value(lse_for):
    """The result has the bits of the value, because p is divided by itself as it was rounded.

    (XLA takes back a mere cast where the sum of p is wider.)
    """
    p = dataclasses.replace(make_problem(True), q_offset=0)

    @jax.jit
    def run(q, k, v):
        return chunked.forward(p, FIXED, Operands(q, k, v), lse_for)[0]

    q, k, v = draw("ordinary", jnp.bfloat16)
    first_row = run(q, k, v)[:, :, :, 0]  # b k g d
    np.testing.assert_array_equal(first_row, jnp.broadcast_to(v[:, 0, :, None], first_row.shape))


# ---- masks

MASKS = {
    "full": Problem(),
    "causal": Problem(right=0),
    "window": Problem(left=20, right=3, q_offset=7),
    "rows that see nothing": Problem(right=0, q_offset=-30),
}


@pytest.mark.parametrize("mask", few(MASKS, ["rows that see nothing"]))  # it hides keys, too
def test_fixed_max_is_as_the_online_form(mask):
    """Out, lse and gradients are those of the online form under every mask that positions give.

    NaN of a key reaches the same results, and NaN of a hidden key changes no bit.
    """
    p = dataclasses.replace(MASKS[mask], scale=0.2)
    rng = np.random.default_rng(6)
    q, k, v = draw("ordinary", jnp.float32)
    dout = rng.standard_normal((B, K, G, T, D)).astype(np.float32)
    dlse = rng.standard_normal((B, K, G, T)).astype(np.float32)
    operands = Operands(q, k, v)
    run_fixed = results_of(p)
    run_online = results_of(p, ONLINE)
    clean = run_fixed(operands, dout, dlse)
    online = run_online(operands, dout, dlse)
    for what, x, y in zip(RESULTS, clean, online, strict=True):
        largest = np.abs(y).max(where=np.abs(y) < 1e30, initial=1)
        np.testing.assert_allclose(x, y, rtol=0, atol=4e-6 * largest, err_msg=what)
    keep = np.asarray(mask_tile(p, operands, jnp.arange(T), jnp.arange(S)))[0, 0, 0]  # t s
    least_seen = int(np.argmin(keep.any(0)))
    for key in {least_seen, 41}:
        at_key = np.s_[:, key]
        dirty = Operands(q, with_entry(k, at_key, np.nan), with_entry(v, at_key, np.nan))
        fixed = run_fixed(dirty, dout, dlse)
        online = run_online(dirty, dout, dlse)
        for what, x, y, before in zip(RESULTS, fixed, online, clean, strict=True):
            np.testing.assert_array_equal(np.isnan(x), np.isnan(y), err_msg=what)
            assert_nan_where_seen(what, x, before, keep, key)


def assert_nan_where_seen(what: str, x, before, keep, key: int) -> None:
    """Check that NaN of one key reaches the rows that see it, and the keys that these rows see.

    `x` is the result named `what`, and `before` the same without NaN. `keep` [T, S] is the mask.
    """
    rows = keep[:, key]
    if not rows.any():
        np.testing.assert_array_equal(x, before, err_msg=what)
        return
    row_axis = 3 if what in ("inference", "out", "lse") else 1
    nan = np.moveaxis(np.isnan(x), row_axis, 0)
    if what in ("dk", "dv"):
        planted = key
        reached = keep[rows].any(0)  # keys that share a row with the planted key
    else:
        planted = rows
        reached = rows
    assert nan[planted].all(), what
    if what != "dv":  # p of a row whose lse is NaN is NaN for all keys
        assert not nan[~reached].any(), what


@functools.partial(jax.jit, static_argnums=0)
def bound(p: Problem, operands: Operands):
    """Return the bound of each row's maximum."""
    norms = fixed_max._key_norm(operands)
    return fixed_max.max_bound(p, operands, *fixed_max.largest_seen(p, FIXED, operands, (norms,)))


def test_hidden_keys_change_no_bound():
    q, k, v = draw("ordinary", jnp.float32)
    k = k * 100
    p = make_problem(True)
    m = bound(p, Operands(q, k, v))
    later = bound(p, Operands(q, with_entry(k, np.s_[:, 60:], 1e4 * k[:, 60:]), v))
    assert (m[..., :39] == later[..., :39]).all()  # row 39 sees key 59 and no later
    assert (later[..., 45] > m[..., 45]).any()
    p = dataclasses.replace(p, left=4)
    m = bound(p, Operands(q, k, v))
    earlier = bound(p, Operands(q, with_entry(k, np.s_[:, :16], np.nan), v))
    assert (m == earlier).all()  # row 0 sees key 16 and no earlier


def test_calls_that_fixed_max_serves():
    """On CPUs those with plain logits alone."""
    plain = Operands(*draw("ordinary", jnp.float32))
    p = make_problem(True)
    assert eligible.fixed_max_applies(p, FIXED, plain)
    assert not eligible.fixed_max_applies(p, ONLINE, plain)
    q_ids = np.zeros((B, T), np.int32)
    kv_ids = np.zeros((B, S), np.int32)
    each = np.full(B, 5, np.int32)
    for served in (
        plain._replace(logit_params=LogitParams(bias=np.zeros((1, 1, 1, S), np.float32))),
        plain._replace(logit_params=LogitParams(scale=jnp.float32(1))),
        plain._replace(logit_params=LogitParams(soft_cap=jnp.float32(1))),
        plain._replace(mask=np.ones((1, 1, 1, S), bool)),
        plain._replace(q_segments=q_ids, kv_segments=kv_ids),
    ):
        assert eligible.fixed_max_applies(p, ON_GPU, served)
        assert not eligible.fixed_max_applies(p, FIXED, served)
    for refused in (
        plain._replace(q_lengths=each),
        plain._replace(kv_lengths=each),
        plain._replace(q_offset=each),
        Operands(*(x.astype(jnp.float16) for x in plain[:3])),
    ):
        assert not eligible.fixed_max_applies(p, ON_GPU, refused), refused
    capped = dataclasses.replace(p, soft_cap=3.0)
    assert eligible.fixed_max_applies(capped, ON_GPU, plain)
    assert not eligible.fixed_max_applies(capped, FIXED, plain)
    # Row 0 sees no key.
    assert not eligible.fixed_max_applies(dataclasses.replace(p, q_offset=-1), ON_GPU, plain)


# ---- masks, dropout and terms of the logits, as on GPUs


def pair_mask() -> np.ndarray:
    """Return a mask [B, 1, T, S] with rows that see nothing, and a key that nobody sees."""
    mask = np.random.default_rng(8).random((B, 1, T, S)) < 0.6
    mask[:, :, 3:6] = False
    mask[..., 41] = False
    return mask


def bias_of(*shape: int, hides: bool = False, far: bool = False) -> LogitParams:
    """Return params with a bias of that shape.

    `hides`: it hides what `pair_mask` hides. `far`: the largest logit of rows from 20 to 29 lies
    150 nats above what `sampled_max` sees of them.
    """
    bias = 3 * np.random.default_rng(9).standard_normal(shape)
    if far:
        bias[:, :, 20:30, 7] = 150
    if hides:
        bias = np.where(pair_mask(), bias, -np.inf)
    return LogitParams(bias=bias.astype(np.float32))


SEGMENTS = np.repeat([0, 1, 2], [T // 3, T // 3, T - 2 * (T // 3)])[None].repeat(B, 0)
KEY_SEGMENTS = np.repeat([0, 1, 5], [S // 3, S // 3, S - 2 * (S // 3)])[None].repeat(B, 0)
DROPS = Dropout(0.4, shared=False, bits="mix32")
DROPOUT_KEY = np.array([3, 5], np.uint32)
MANY = dict(
    mask=pair_mask(),
    dropout_key=DROPOUT_KEY,
    q_segments=SEGMENTS,
    kv_segments=KEY_SEGMENTS,
)
# Fields of a problem, and of operands.
FEATURES = {
    "mask": ({}, dict(mask=pair_mask())),
    "mask of keys": ({}, dict(mask=pair_mask()[:, :, :1])),
    "segments": ({}, dict(q_segments=SEGMENTS, kv_segments=KEY_SEGMENTS)),
    "scale": ({}, dict(logit_params=LogitParams(scale=np.float32(-0.3)))),
    "soft cap": (dict(soft_cap=2.0), {}),
    "soft cap as an array": ({}, dict(logit_params=LogitParams(soft_cap=np.float32(2)))),
    "dropout": (dict(dropout=DROPS), dict(dropout_key=DROPOUT_KEY)),
    "all": (
        dict(dropout=DROPS, right=0, q_offset=S - T),
        dict(MANY, logit_params=LogitParams(scale=np.float32(0.3))),
    ),
    "bias": ({}, dict(logit_params=bias_of(B, 1, T, S, hides=True))),
    "bias, one tile": ({}, dict(logit_params=bias_of(B, 1, T, S, hides=True))),
    "bias of heads": ({}, dict(logit_params=bias_of(1, K * G, T, S, far=True))),
    "bias of keys": (dict(soft_cap=2.0), dict(logit_params=bias_of(1, 1, 1, S))),
    "bias of queries": (dict(left=3, right=3), dict(logit_params=bias_of(1, K * G, T, 1))),
    "bias and all": (
        dict(dropout=DROPS, right=0, q_offset=S - T),
        dict(MANY, logit_params=bias_of(B, K * G, T, S)),
    ),
}


# one that sees no key
EMPTY_ROWS = {name: 4 for name in ("mask", "all", "bias", "bias, one tile", "bias and all")}
EMPTY_ROWS |= {"segments": T - 1}
ONE_TILE = dataclasses.replace(ON_GPU, fixed_max_chunk_size=(T, S), gpu_fused_chunk_size=(T, S))
# tiles that cover the arrays without an overlap, so that the bias' gradient is only written
EVEN = dataclasses.replace(ON_GPU, fixed_max_chunk_size=(15, 18), gpu_fused_chunk_size=(15, 18))
FAST_FEATURES = ("mask", "all", "bias", "bias, one tile", "bias of heads")
SCHEDULES = {"bias, one tile": ONE_TILE, "bias of heads": EVEN}


def train(p: Problem, schedule: Schedule):
    """Return a compiled function from (operands, dout, dlse) to the RESULTS, d_scale and d_bias."""

    def run(operands, dout, dlse):
        inference, _ = chunked.forward(p, schedule, operands, None)
        out, lse = chunked.forward(p, schedule, operands, "gradient")
        grads = chunked.backward(p, schedule, operands, out, lse, dout, dlse)
        params = grads.logit_params.scale, grads.logit_params.bias
        params = [jnp.zeros(()) if x is None else x for x in params]
        return (inference, out, lse.high, *grads[:3], *params)

    return jax.jit(run)


@pytest.mark.parametrize("feature", few(FEATURES, FAST_FEATURES))
def test_gpu_form_is_as_the_online_form(feature):
    """Out, lse and gradients, where the bound holds and where it fails, in float32 and bfloat16.

    NaN of a key and Inf of its value reach the same results, and if hidden change no bit. Neither
    do NaN of the query and Inf of dout in a row that sees no key.
    """
    fields, arrays = FEATURES[feature]
    p = Problem(**{"scale": 0.2} | fields)
    rng = np.random.default_rng(6)
    dout = rng.standard_normal((B, K, G, T, D)).astype(np.float32)
    dlse = rng.standard_normal((B, K, G, T)).astype(np.float32)
    fused, online = train(p, SCHEDULES.get(feature, ON_GPU)), train(p, ONLINE)

    def operands_of(name: str, dtype=jnp.float32) -> Operands:
        return Operands(*draw(name, dtype))._replace(**arrays)

    assert eligible.fixed_max_applies(p, ON_GPU, operands_of("ordinary"))
    names = (*RESULTS, "d_scale", "d_bias")
    draws = [(name, jnp.float32, 4e-6) for name in ("ordinary", *FAR[:2])]
    draws += [(name, jnp.bfloat16, 2**-6) for name in ("ordinary", FAR[0])]
    for name, dtype, error in draws:
        operands = operands_of(name, dtype)
        cotangents = dout.astype(dtype), dlse
        found = fused(operands, *cotangents)
        expected = online(operands, *cotangents)
        products = abs(np.float32(operands.query) * np.float32(expected[3]))  # d_scale sums them
        for what, x, y in zip(
            names, map(np.float32, found), map(np.float32, expected), strict=True
        ):
            finite = abs(y) < 1e30
            np.testing.assert_array_equal(abs(x) < 1e30, finite, err_msg=what)
            size = products.sum() if what == "d_scale" else abs(y).max(where=finite, initial=1)
            np.testing.assert_allclose(
                x[finite], y[finite], rtol=0, atol=error * size, err_msg=f"{name} {what}"
            )
    operands = operands_of("ordinary")
    clean = fused(operands, dout, dlse)
    if row := EMPTY_ROWS.get(feature):
        query = with_entry(operands.query, np.s_[:, row], np.nan)
        dirty_dout = with_entry(dout, np.s_[:, :, :, row], np.inf)
        found = fused(operands._replace(query=query), dirty_dout, dlse)
        for what, x, before in zip(names, found, clean, strict=True):
            np.testing.assert_array_equal(x, before, err_msg=what)
    for key in (7, 41):
        at_key = np.s_[:, key]
        dirty_value = operands._replace(value=with_entry(operands.value, at_key, np.inf))
        dirty = dirty_value._replace(key=with_entry(operands.key, at_key, np.nan))
        for dirty_operands in (dirty_value, dirty):
            found = fused(dirty_operands, dout, dlse)
            expected = online(dirty_operands, dout, dlse)
            for what, x, y, before in zip(names, found, expected, clean, strict=True):
                if key == 41 and EMPTY_ROWS.get(feature) == 4:  # hidden from all
                    np.testing.assert_array_equal(x, before, err_msg=what)
                elif what != "dv":  # p of a row whose lse is NaN is NaN for all keys
                    np.testing.assert_array_equal(np.isfinite(x), np.isfinite(y), err_msg=what)


def test_infinite_values_reach_rows_whose_keys_are_all_dropped():
    p = Problem(scale=0.2, dropout=dataclasses.replace(DROPS, rate=0.99))
    q, k, v = draw("ordinary", jnp.float32)
    operands = Operands(q, k, with_entry(v, (1, 7, 0), np.inf), dropout_key=DROPOUT_KEY)
    fused, online = (
        np.asarray(jax.jit(lambda x, s=s: chunked.forward(p, s, x, "gradient")[0])(operands))
        for s in (ON_GPU, ONLINE)
    )
    assert (online == 0).all(-1).any()
    np.testing.assert_array_equal(np.isnan(fused), np.isnan(online))


def test_rows_far_above_their_sample_are_redone():
    """No other rows are, nor those that see no key, or none of the sample."""
    q, k, v = draw("ordinary", jnp.float32)

    def valid(params: LogitParams, **window) -> np.ndarray:
        p = Problem(scale=0.2, **window)
        run = jax.jit(lambda x: fixed_max.fixed_max_forward(p, ON_GPU, x, "gradient")[1])
        return np.asarray(run(Operands(q, k, v, params)))

    found = valid(bias_of(1, 1, T, S, far=True))
    assert not found[:, :, :, 20:30].any()
    assert found[:, :, :, :20].all() and found[:, :, :, 30:].all()
    assert valid(bias_of(B, 1, T, S, hides=True)).all()
    assert valid(bias_of(1, 1, T, S), left=0, right=0).all()  # odd keys are not in the sample


# ---- one check for a batch and for all devices


def test_a_batch_starts_over_as_one():
    """The check is one for the whole batch under vmap: the loop's condition stays a scalar."""
    q, k, v = (np.stack([x, x]) for x in draw("ordinary", jnp.float32))
    run = jax.vmap(lambda q, k, v: chunked.forward(make_problem(True), FIXED, Operands(q, k, v)))
    equations = jax.make_jaxpr(run)(q, k, v).jaxpr.eqns
    loops = [equation for equation in equations if equation.primitive.name == "while"]
    assert [loop.params["cond_jaxpr"].out_avals[0].shape for loop in loops] == [()]


@pytest.mark.parametrize("mapped", [False, True])
def test_sharded_check_is_one_boolean(monkeypatch, mapped):
    """Devices exchange one boolean for the check under jit, and nothing under shard_map.

    The batch and the heads are sharded.
    """
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
    collective = r"= (\S+) (all-\w+|collective-permute|reduce-scatter)(?:-start)?\("
    expected = set() if mapped else {("pred[]", "all-reduce")}
    assert set(re.findall(collective, text)) == expected


@functools.cache
def gradients_with_a_bias(call, is_mapped: bool, sharding=None):
    """Return gradients of query, key, value and bias. The bias is that of all batch entries.

    `is_mapped`: each entry has a copy of it.
    """
    rng = np.random.default_rng(2)
    x = rng.standard_normal((4, 128, 4, 16)).astype(np.float32)
    bias = rng.standard_normal((1, 4, 128, 128)).astype(np.float32)
    bias = np.repeat(bias, 4, 0) if is_mapped else bias

    def loss(q, k, v, bias):
        return (call(q, k, v, bias) * np.cos(x)).sum()

    y = x if sharding is None else jax.device_put(x, sharding)
    return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(y, y, y, bias)


call_with_a_bias = functools.partial(dot_product_attention, chunk_size=64)


@pytest.mark.parametrize("how", few(("vmap", "shard_map", "jit"), ("vmap",)))
def test_a_bias_mapped_and_sharded(monkeypatch, how):
    """The gradients with a bias, in the form for GPUs, are those of a CPU under each of these."""
    is_mapped = how == "vmap"
    expected = gradients_with_a_bias(call_with_a_bias, is_mapped)
    sampled = []
    original = fixed_max.sampled_max
    monkeypatch.setattr(
        fixed_max, "sampled_max", lambda *args: sampled.append(1) or original(*args)
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.clear_caches()
    spec = PartitionSpec("x", None, "y", None)
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    call = functools.partial(dot_product_attention, chunk_size=64)
    if how == "shard_map":
        specs = (spec, spec, spec, PartitionSpec(None, "y"))
        call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=spec)
    elif is_mapped:
        call_one = call
        call = jax.vmap(lambda *entry: call_one(*(x[None] for x in entry))[0])
    with jax.set_mesh(mesh):
        sharding = None if is_mapped else NamedSharding(mesh, spec)
        found = gradients_with_a_bias(call, is_mapped, sharding)
    assert sampled
    for x_gpu, x_cpu in zip(found, expected, strict=True):
        np.testing.assert_allclose(x_gpu, x_cpu, rtol=0, atol=1e-5)
