"""On a GPU: every case against the oracle, the fixed reference where it serves, and bits that repeat beside other work.

python -m pytest -m gpu
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_hopper_functions
import test_hopper_tangent as jvps
from cases import SINGLES, Sizes, qkv
from conftest import assert_as_good, assert_case, assert_truth, run_call, run_cases

import memeff
from memeff import masks, scores
from memeff.chunked import implementation as chunked
from memeff.device import current_device
from memeff.pallas.hopper import implementation as hopper
from memeff.problem import Operands, Problem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cases(dtype):
    # float32 products in float32, here and in the plain computation
    with jax.default_matmul_precision("highest"):
        for name, result in run_cases(SINGLES, dtype).items():
            assert_case(result, name, dtype)


@pytest.mark.parametrize("length", [4096 - 3, 4096 + 5])
@pytest.mark.parametrize("causal", [False, True])
def test_sampled_rows_at_default_tiles(length, causal):
    """64 rows of out and lse in float64, at lengths that no tile divides; bfloat16, grouped heads."""
    q, k, v = (
        jax.random.normal(jax.random.key(i), (1, length, n, 128), jnp.bfloat16)
        for i, n in enumerate((4, 2, 2))
    )
    out, lse = jax.jit(
        functools.partial(memeff.dot_product_attention, is_causal=causal, return_residual=True)
    )(q, k, v)
    rows = np.random.default_rng(0).choice(length, 64, replace=False)
    q, k, v, out, lse = (np.asarray(x, np.float64)[0] for x in (q, k, v, out, lse))
    for n in range(4):
        s = q[rows, n] @ k[:, n // 2].T / np.sqrt(128)
        if causal:
            s = np.where(np.arange(length) <= rows[:, None], s, -np.inf)
        m = s.max(-1, keepdims=True)
        e = np.exp(s - m)
        true = e @ v[:, n // 2] / e.sum(-1, keepdims=True)
        np.testing.assert_allclose(
            lse[rows, n], (m + np.log(e.sum(-1, keepdims=True)))[:, 0], atol=1e-5
        )
        # out is rounded to 8 bits, and so is every probability before its product
        np.testing.assert_allclose(out[rows, n], true, atol=2.0**-8 * abs(v).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 10, 30])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_is_as_good_as_step_by_step(causal, size, dtype):
    """The gradient whose cotangents leave their product's epilogue, after a forward that sums rounded probabilities; logits
    up to some `size` squared.
    """
    B, T, K, H = 1, 2048, 2, 64
    shapes = (B, T, K, 1, H), (B, T, K, H), (B, T, K, H), (B, K, 1, T, H)
    arrays = [
        jax.random.normal(jax.random.key(i), s) * (size if i < 2 else 1)
        for i, s in enumerate(shapes)
    ]
    arrays = [x.astype(dtype) for x in arrays]
    general = Problem(
        right=0 if causal else None, scale=H**-0.5, precision="highest", chunk_size=(512, 512)
    )
    fused = dataclasses.replace(general, fixed_chunk_size=(512, 512), fused_chunk_size=(512, 512))

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(p, q, k, v, dout):
        operands = Operands(q, k, v)
        return chunked.backward(p, operands, *chunked.forward(p, operands, "gradient"), dout, None)[
            :3
        ]

    q, k, v, dout = (np.asarray(x, np.float64) for x in arrays)
    s = np.einsum("btkh,bskh->bkts", q[:, :, :, 0], k) * H**-0.5
    s = np.where(np.tril(np.ones((T, T), bool)), s, -np.inf) if causal else s
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bktd,bskd->bkts", dout[:, :, 0], v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * H**-0.5
    true = (
        np.einsum("bkts,bskh->btkh", ds, k)[:, :, :, None],
        np.einsum("bkts,btkh->bskh", ds, q[:, :, :, 0]),
    )
    true += (np.einsum("bkts,bktd->bskd", p, dout[:, :, 0]),)
    for name, found, baseline, exact in zip(
        "qkv", gradients(fused, *arrays), gradients(general, *arrays), true, strict=True
    ):
        assert_as_good(found, [baseline], exact, dtype, f"d{name}")


def test_250_runs_beside_other_work_are_equal_in_bits():
    q, k, v, do = (
        jax.random.normal(jax.random.key(i), (1, 2048, 4, 64), jnp.bfloat16) for i in range(4)
    )
    other = jax.random.normal(jax.random.key(9), (2048, 2048))
    busy = jax.jit(lambda x: x @ x)

    @jax.jit
    def both(q, k, v, do):
        out, pull = jax.vjp(
            functools.partial(memeff.dot_product_attention, is_causal=True), q, k, v
        )
        return out, *pull(do)

    first = jax.tree.map(np.asarray, both(q, k, v, do))
    for _ in range(250):
        busy(other)
        for a, b in zip(first, both(q, k, v, do), strict=True):
            assert (a == np.asarray(b)).all()


def test_fall_back_runs_on_the_gpu():
    """A key that the queries do not feel makes the bound useless: the result is right all the same, and the same in vmap."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 700, 2, 64)) for i in range(3))
    q, k = q.at[..., 0].set(0), k.at[:, 5].set(0).at[:, 5, :, 0].set(1e5)
    with jax.default_matmul_precision("highest"):
        out = memeff.dot_product_attention(q, k, v)
        mapped = jax.vmap(lambda q: memeff.dot_product_attention(q, k, v))(jnp.stack([q, q]))[1]
        true = memeff.dot_product_attention(q, k, v, implementation="reference")
    np.testing.assert_allclose(out, true, atol=2e-6)
    np.testing.assert_allclose(mapped, true, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("limit", [None, "256MiB"])
def test_plan_and_limit(causal, limit):
    """Bytes told are right to a factor of two, and a limit is kept."""
    x = jax.ShapeDtypeStruct((1, 8192, 8, 128), jnp.bfloat16)
    attend = functools.partial(memeff.dot_product_attention, is_causal=causal, memory_limit=limit)
    plan = memeff.plan(x, x, x, is_causal=causal, memory_limit=limit)
    gradient = jax.jit(lambda q, k, v, dout: jax.vjp(attend, q, k, v)[1](dout)).lower(x, x, x, x)
    for told, lowered in (
        (plan.forward_bytes, jax.jit(attend).lower(x, x, x)),
        (plan.gradient_bytes, gradient),
    ):
        found = lowered.compile().memory_analysis().temp_size_in_bytes
        # kernels: nothing for a forward, and XLA has 24 bytes
        assert 0.5 * (found - 64) <= told <= 2 * found
        assert limit is None or found <= 256 * 2**20


def test_what_float16_cannot_hold_goes_the_general_way():
    """Queries whose cotangent is 2^-40 of others', and keys that only they see."""
    q, k, v, dout = (
        jax.random.normal(jax.random.key(i), (1, 2048, 2, 64), jnp.bfloat16) for i in range(4)
    )
    small = dout.at[:, 1024:].multiply(2.0**-40)
    pull = jax.jit(
        lambda dout: jax.vjp(
            functools.partial(memeff.dot_product_attention, is_causal=True), q, k, v
        )[1](dout)
    )
    late = [np.asarray(x[:, 1024:], np.float32) for x in (pull(small)[2], pull(dout)[2])]
    np.testing.assert_allclose(late[0] * 2.0**40, late[1], atol=0.02 * abs(late[1]).max())


# ---- the Hopper kernels


def hopper_calls():
    """Lengths around multiples of 64, every head dim up to 256, all that kernels know of masks."""
    calls = {}
    for k in range(1, 18):
        calls[f"length {64 * k - 1}"] = (
            Sizes(B=1, T=64 * k - 1, S=64 * k + 1, K=1, G=2, H=64, D=64),
            dict(is_causal=True),
        )
    # a warpgroup's rows end behind those of its block
    uneven = Sizes(B=2, T=130, S=200, K=2, G=1, H=64, D=64)
    calls["offsets, uneven"] = uneven, dict(is_causal=True, q_offset=np.array([-20, 61], np.int32))
    for H in (32, 40, 59, 64, 72, 80, 96, 104, 128, 160, 192, 256):
        calls[f"head {H}"] = (Sizes(B=2, T=130, S=190, K=2, G=1, H=H, D=H), {})
    grouped = Sizes(B=2, T=300, S=400, K=2, G=3, H=128, D=64)
    lengths = dict(
        query_seq_lengths=np.array([300, 7], np.int32),
        key_value_seq_lengths=np.array([129, 400], np.int32),
    )
    for T in (64, 192, 320):  # the last block's rows end behind those of lse
        calls[f"length {T}, heads"] = (
            Sizes(B=3, T=T, S=T, K=4, G=2, H=64, D=64),
            dict(is_causal=True),
        )
    masks = {
        "offset": dict(is_causal=True, q_offset=100),
        "offsets": dict(is_causal=True, q_offset=np.array([-50, 111], np.int32)),
        "window": dict(local_window_size=(70, 20)),
        "lengths": lengths,
        "soft cap": dict(logits_soft_cap=2.0, is_causal=True),
        "segments": dict(
            query_segment_ids=np.sort(np.random.default_rng(0).integers(0, 4, (2, 300))).astype(
                np.int32
            )
        )
        | dict(
            key_value_segment_ids=np.sort(np.random.default_rng(1).integers(0, 4, (2, 400))).astype(
                np.int32
            )
        ),
        "segments, unsorted": dict(
            query_segment_ids=np.random.default_rng(0).integers(0, 4, (2, 300), np.int32),
            key_value_segment_ids=np.random.default_rng(1).integers(0, 4, (2, 400), np.int32),
            is_causal=True,
        ),
        "keys masked": dict(mask=(np.arange(400) < np.array([[300], [7]]))[:, None, None]),
        "queries masked": dict(mask=(np.arange(300) % 100 < 70)[:, None], is_causal=True),
        "everything": dict(
            local_window_size=(90, 9), q_offset=np.array([0, 40], np.int32), logits_soft_cap=5.0
        )
        | lengths,
    }
    return calls | {name: (grouped, how) for name, how in masks.items()}


HOPPER = hopper_calls()


@pytest.mark.parametrize("name", HOPPER)
def test_hopper(name):
    assert_right(name, implementation="pallas")


def assert_right(name, **how):
    if reason := hopper.for_device(current_device()):
        pytest.skip(reason)
    z, kwargs = HOPPER[name]
    args = qkv(np.random.default_rng(0), jnp.bfloat16, z)
    assert_truth(run_call(args, kwargs | how, "bfloat16"), name, args, kwargs, "bfloat16")


FUNCTIONS = test_hopper_functions.CASES


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hopper_functions_of_the_users(name):
    if reason := hopper.for_device(current_device()):
        pytest.skip(reason)
    test_hopper_functions.assert_right(name, FUNCTIONS[name])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("H", [64, 128])
def test_hopper_t5(H, causal):
    """As the chunked path has it, the gradient of its table as well; twice the same bits."""
    if reason := hopper.for_device(current_device()):
        pytest.skip(reason)
    table = jax.random.normal(jax.random.key(9), (32, 4))
    q, k, v, do = (
        jax.random.normal(jax.random.key(i), (2, 2100, n, H), jnp.bfloat16)
        for i, n in enumerate((4, 2, 2, 4))
    )

    def both(implementation):
        how = dict(
            is_causal=causal, q_offset=np.array([0, -70], np.int32), implementation=implementation
        )
        attend = lambda table, *args: memeff.dot_product_attention(
            *args, score_fn=scores.t5(table), **how
        )
        out, (dtable, *of) = jax.jit(
            lambda *args: (lambda out, pull: (out, pull(do)))(*jax.vjp(attend, *args))
        )(table, q, k, v)
        return [np.asarray(x, np.float32) for x in (out, *of, dtable)]

    found, again, expected = (
        both(implementation) for implementation in ("pallas", "pallas", "xla")
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=0.02 * np.abs(y).max())
    for x, y in zip(found[:-1], again[:-1], strict=True):  # XLA may add to a table in any order
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("H", [64, 128])
def test_hopper_block_masks(H):
    if reason := hopper.for_device(current_device()):
        pytest.skip(reason)
    mask = masks.causal() & masks.documents(np.arange(1000) // 300)
    q, k, v, do = (
        jax.random.normal(jax.random.key(i), (2, 1000, 4, H), jnp.bfloat16) for i in range(4)
    )

    def both(mask_fn, implementation):
        attend = functools.partial(
            memeff.dot_product_attention, mask_fn=mask_fn, implementation=implementation
        )
        out, pull = jax.vjp(attend, q, k, v)
        return [np.asarray(x, np.float32) for x in (out, *pull(do))]

    for x, y in zip(both(memeff.block_mask(mask, 1000), "pallas"), both(mask, "xla"), strict=True):
        np.testing.assert_allclose(x, y, atol=0.02 * np.abs(y).max())


TANGENT = [name for name, (z, _) in HOPPER.items() if z.H <= 128]


def no_kernels() -> str | None:
    return hopper.for_device(current_device())


@pytest.mark.parametrize("name", TANGENT)
def test_hopper_jvp(name):
    if reason := no_kernels():
        pytest.skip(reason)
    z, kwargs = HOPPER[name]
    args = qkv(np.random.default_rng(0), jnp.bfloat16, z)
    along = jvps.directions(args)
    found = jvps.jvp(args, along, kwargs)[1]
    jvps.assert_right(found, args, along, kwargs, "bfloat16", name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_hopper_jvp_of_functions_of_the_users(name):
    if reason := no_kernels():
        pytest.skip(reason)
    jvps.assert_function(name)


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("moving", jvps.SUBSETS)
def test_hopper_jvp_of_what_moves(moving, H):
    if reason := no_kernels():
        pytest.skip(reason)
    args = qkv(np.random.default_rng(0), jnp.float16, Sizes(B=2, T=300, S=500, K=2, G=2, H=H, D=H))
    along = jvps.directions(args)
    along = [
        x if name in moving.split() else None
        for x, name in zip(along, ("query", "key", "value"), strict=True)
    ]
    how = dict(is_causal=True, q_offset=150)
    found = jvps.jvp(args, along, how)[1]
    jvps.assert_right(found, args, along, how, "float16", moving)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("H", [64, 128])
def test_hopper_jvp_of_what_a_row_has_in_common(H, causal):
    """All keys move along one direction, far more than each by itself."""
    if reason := no_kernels():
        pytest.skip(reason)
    args = qkv(np.random.default_rng(0), jnp.bfloat16, Sizes(B=1, T=700, S=700, K=2, G=2, H=H, D=H))
    dq, dk, dv = jvps.directions(args)
    along = dq, (dk + 40 * dk[:, :1]).astype(dk.dtype), dv
    found = jvps.jvp(args, along, dict(is_causal=causal))[1]
    jvps.assert_right(found, args, along, dict(is_causal=causal), "bfloat16", "common")


@pytest.mark.parametrize("H", [64, 128])
def test_hopper_jvp_is_deterministic_and_blind(H):
    """100 runs are equal in bits, beside another product; and NaN that nobody sees changes none."""
    if reason := no_kernels():
        pytest.skip(reason)
    args = qkv(
        np.random.default_rng(0), jnp.bfloat16, Sizes(B=2, T=900, S=1000, K=2, G=2, H=H, D=H)
    )
    (q, k, v), (dq, dk, dv) = args, jvps.directions(args)
    how = dict(
        key_value_seq_lengths=np.array([850, 600], np.int32),
        is_causal=True,
        q_offset=100,
        implementation="pallas",
    )
    attend = functools.partial(memeff.dot_product_attention, **how, return_residual=True)
    both, busy = jax.jit(lambda x, dx: jax.jvp(attend, x, dx)), jax.jit(lambda x: x @ x)
    hidden = [x.copy() for x in (k, dk, v, dv)]
    for x in hidden:
        x[0, 850:] = x[1, 600:] = np.nan
    first = jax.tree.map(np.asarray, both((q, k, v), (dq, dk, dv)))
    for n in range(100):
        busy(jnp.ones((2048, 2048)))
        k, dk, v, dv = hidden if n == 99 else (k, dk, v, dv)
        for x, y in zip(
            jax.tree.leaves(first), jax.tree.leaves(both((q, k, v), (dq, dk, dv))), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("name", jvps.TRANSFORMED)
def test_hopper_jvp_under_transformations(name):
    """As the chunked path has them."""
    if reason := no_kernels():
        pytest.skip(reason)
    args = qkv(
        np.random.default_rng(0), jnp.bfloat16, Sizes(B=2, T=200, S=200, K=2, G=2, H=64, D=64)
    )
    along, of = (
        jvps.directions(args),
        lambda x: jvps.TRANSFORMED[name](functools.partial(jvps.attend, implementation=x)),
    )
    found, expected = (jax.tree.leaves(jax.jit(of(x))(args, along)) for x in ("pallas", "xla"))
    for x, y in zip(found, expected, strict=True):
        x, y = (np.asarray(x, np.float32) for x in (x, y))
        np.testing.assert_allclose(x, y, atol=0.03 * np.abs(y).max())


FUSED = [
    name
    for name, (z, _) in HOPPER.items()
    if z.H <= 128 and (z.K > 1 or name in ("length 63", "length 1087"))
]


@pytest.mark.parametrize("name", FUSED)
def test_hopper_fused(name):
    assert_right(name, backward="fused")


@pytest.mark.parametrize("where", [400, 3], ids=["late", "early"])
def test_hopper_rows_that_are_done_again(where):
    if reason := hopper.for_device(current_device()):
        pytest.skip(reason)
    query, key, value = qkv(
        np.random.default_rng(0), jnp.bfloat16, Sizes(B=2, T=700, S=900, K=2, G=1, H=128, D=128)
    )
    key[:, where] *= jnp.bfloat16(200)
    how, dirty = dict(key_value_seq_lengths=np.array([850, 600], np.int32)), value.copy()
    dirty[:, 850] = np.nan  # nobody sees it
    result = run_call((query, key, dirty), how | {"implementation": "pallas"}, "bfloat16")
    # a difference of large terms, in rows that are nearly one-hot: see tests/test_hopper_redone.py
    result.grads.pop("query")
    assert_truth(result, "far", (query, key, value), how, "bfloat16")


@pytest.mark.parametrize("what", ["full", "causal", "alibi"])
@pytest.mark.parametrize("H", [64, 128])
def test_hopper_is_deterministic(H, what):
    """250 runs are equal in bits, the slopes' gradient as well."""
    if reason := hopper.for_device(current_device()):
        pytest.skip(reason)
    q, k, v, do = (
        jax.random.normal(jax.random.key(i), (2, 1000, 4, H), jnp.bfloat16) for i in range(4)
    )
    args = q, k, v, jnp.linspace(0.1, 1, 4)

    @jax.jit
    def both(args, do):
        def attend(q, k, v, slopes):
            scored = {"score_fn": scores.alibi(slopes)} if what == "alibi" else {}
            return memeff.dot_product_attention(
                q, k, v, is_causal=what != "full", implementation="pallas", **scored
            )

        out, pull = jax.vjp(attend, *args)
        return out, *pull(do)

    @jax.jit
    def same(x, y):
        return jnp.array(
            [(a.view(jnp.uint16) == b.view(jnp.uint16)).all() for a, b in zip(x, y, strict=True)]
        ).all()

    first = both(args, do)
    assert all(same(first, both(args, do)) for _ in range(250))


# ---- beyond what others test


def sampled_errors(T, N, K, H, left, samples=64, **how):
    """Relative errors of sampled rows of out and dq, of sampled columns of dk and dv, in float64; causal order, bfloat16.

    Probabilities of a column are made from lse, which the sampled rows check.
    """
    q, do = (jax.random.normal(jax.random.key(i), (1, T, N, H), jnp.bfloat16) for i in (0, 3))
    k, v = (jax.random.normal(jax.random.key(i), (1, T, K, H), jnp.bfloat16) for i in (1, 2))

    @jax.jit
    def both(q, k, v, do):
        call = functools.partial(
            memeff.dot_product_attention, is_causal=True, return_residual=True, **how
        )
        call = functools.partial(call, local_window_size=None if left is None else (left, 0))
        (out, lse), pull = jax.vjp(call, q, k, v)
        return out, lse, *pull((do, jnp.zeros_like(lse)))

    out, lse, dq, dk, dv = both(q, k, v, do)
    wide = lambda x: np.asarray(x, np.float64)
    rng = np.random.default_rng(0)
    n = N - 1  # the last head, and the last of those that share its keys
    rows, cols = (
        rng.choice(T, samples, replace=False),
        np.append(rng.choice(T, samples - 1, replace=False), T - 1),
    )
    rows[0] = T - 1
    keys, values = wide(k[0, :, K - 1]), wide(v[0, :, K - 1])
    sees = lambda i, j: (j <= i) & (True if left is None else j >= i - left)
    found, true = ({name: [] for name in ("out", "lse", "dq")} for _ in range(2))
    for i in rows:
        seen = np.flatnonzero(sees(i, np.arange(T)))
        s = keys[seen] @ wide(q[0, i, n]) / np.sqrt(H)
        m = s.max()
        e = np.exp(s - m)
        p, g = e / e.sum(), wide(do[0, i, n])
        o = p @ values[seen]
        ds = p * (values[seen] @ g - o @ g)
        for name, x, y in (
            ("out", out[0, i, n], o),
            ("lse", lse[0, i, n], m + np.log(e.sum())),
            ("dq", dq[0, i, n], ds @ keys[seen] / np.sqrt(H)),
        ):
            found[name].append(wide(x)), true[name].append(y)
    heads = range(N - N // K, N)
    dk_true, dv_true = np.zeros((samples, H)), np.zeros((samples, H))
    for n in heads:
        queries, g, z = wide(q[0, :, n]), wide(do[0, :, n]), wide(lse[0, :, n])
        delta = (g * wide(out[0, :, n])).sum(-1)
        p = np.exp(queries @ keys[cols].T / np.sqrt(H) - z[:, None])
        p *= sees(np.arange(T)[:, None], cols)
        dv_true += p.T @ g
        dk_true += (p * (g @ values[cols].T - delta[:, None])).T @ queries / np.sqrt(H)
    found |= {"dk": wide(dk[0, cols, K - 1]), "dv": wide(dv[0, cols, K - 1])}
    true |= {"dk": dk_true, "dv": dv_true}
    norm = lambda x: np.linalg.norm(np.asarray(x))
    return {name: norm(np.asarray(found[name]) - true[name]) / norm(true[name]) for name in true}


# twice what cuDNN has at 512 tokens
LARGEST_ERROR = {"out": 4e-3, "lse": 1e-6, "dq": 6e-3, "dk": 6e-3, "dv": 5e-3}


@pytest.mark.parametrize(
    "how", [{}, {"backward": "fused"}, {"implementation": "xla"}], ids=["kernels", "fused", "xla"]
)
@pytest.mark.parametrize("T", [2**14, 2**15 + 1, 2**16, 2**17])
def test_long_sequences(T, how):
    if "implementation" not in how and (reason := hopper.for_device(current_device())):
        pytest.skip(reason)
    errors = sampled_errors(T, N=2, K=1, H=128, left=None, **how)
    assert all(errors[name] <= LARGEST_ERROR[name] for name in errors), errors


@pytest.mark.parametrize(
    "N, left", [(130, 500), (2, None)], ids=["elements of the query", "logits"]
)
def test_more_than_32_bits_count(N, left):
    """More than 2^31 numbers in the query (under a window, for the time it takes); more than 2^32 logits."""
    if reason := hopper.for_device(current_device()):
        pytest.skip(reason)
    T = 2**17 if N > 2 else 2**16 + 8
    assert T * N * 128 > 2**31 or T * T > 2**32
    errors = sampled_errors(T, N=N, K=1, H=128, left=left, samples=16)
    assert all(errors[name] <= LARGEST_ERROR[name] for name in errors), errors


# ---- several GPUs


@pytest.mark.parametrize("implementation", ["pallas", "xla"])
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("count", [2, 4])
def test_gpus_equal_one(count, axis_type, implementation):
    """Batch, then heads over devices: out and gradients are those of one device, and lie where the query does."""
    if jax.device_count() < count:
        pytest.skip(
            f"wants {count} GPUs, and here {'is 1' if jax.device_count() == 1 else f'are {jax.device_count()}'}"
        )
    if implementation == "pallas" and (reason := hopper.for_device(current_device())):
        pytest.skip(reason)
    q, k, v, do = (
        jax.random.normal(jax.random.key(i), (4, 1000, n, 64), jnp.bfloat16)
        for i, n in enumerate((8, 4, 4, 8))
    )

    def both(q, k, v, do):
        out, pull = jax.vjp(
            functools.partial(
                memeff.dot_product_attention, is_causal=True, implementation=implementation
            ),
            q,
            k,
            v,
        )
        return out, *pull(do)

    alone = jax.tree.map(np.asarray, jax.jit(both)(q, k, v, do))
    mesh = jax.make_mesh((count,), ("x",), axis_types=(getattr(jax.sharding.AxisType, axis_type),))
    for spec in (jax.P("x"), jax.P(None, None, "x")):
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x in (q, k, v, do)
            ]
            together = jax.jit(both)(*placed)
        for x, y, like in zip(together, alone, (q, q, k, v), strict=True):
            # see the limits in README.md
            gathered = implementation == "xla" and axis_type == "Auto"
            assert x.shape == like.shape and (
                gathered or x.sharding.is_equivalent_to(placed[0].sharding, 4)
            )
            if implementation == "pallas":
                np.testing.assert_array_equal(np.asarray(x), y)
            else:  # tiles differ
                np.testing.assert_allclose(
                    np.asarray(x, np.float32), np.asarray(y, np.float32), atol=0.03
                )
