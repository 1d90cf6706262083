"""Check `memeff.audit`: it passes exact attention, and finds each planted defect."""

import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few

import memeff
from memeff import scores, transforms

pytestmark = pytest.mark.once

jax_attention = jax.nn.dot_product_attention


DTYPES = few(["float32", "bfloat16"], ["float32"])


def _inputs(dtype, T=150, S=170):
    rng = np.random.default_rng(0)
    shapes = (2, T, 4, 8), (2, S, 2, 8), (2, S, 2, 8)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [None, "reference"])
def test_audit_finds_nothing_where_nothing_is(implementation, dtype):
    options = dict(is_causal=True, q_offset=20, logits_soft_cap=3.0)
    # bfloat16 would round the rotated rows to 8 bits, which is no rounding of attention's
    if dtype != "bfloat16":
        options["qk_transform"] = transforms.rotary()
    score = scores.alibi(jnp.full(4, 0.1))
    report = memeff.audit(implementation, *_inputs(dtype), samples=16, score_fn=score, **options)
    assert report.ok, str(report)
    assert [x.name for x in report.findings] == ["lse", "out", "query", "key", "value"]
    assert report.findings[0].relative < 1e-6


# ---- planted defects


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _swap(q, k, v, options):
    """Compute attention whose gradients of keys and values are swapped."""
    return jax_attention(q, k, v, **dict(options))


def _swap_forward(q, k, v, options):
    return jax.vjp(functools.partial(jax_attention, **dict(options)), q, k, v)


def _swap_backward(options, pull, dout):
    dq, dk, dv = pull(dout)
    return dq, dv, dk


_swap.defvjp(_swap_forward, _swap_backward)


def dk_and_dv_swapped(q, k, v, **options):
    return _swap(q, k, v, tuple(options.items()))


def other_scale(q, k, v, **options):
    return jax_attention(q, k, v, scale=0.36, **options)


def last_keys_lost(q, k, v, **options):
    return jax_attention(q, k[:, :-9], v[:, :-9], **options)


def not_causal(q, k, v, **options):
    return jax_attention(q, k, v)


def gradient_of_keys_lost(q, k, v, **options):
    return jax_attention(q, jax.lax.stop_gradient(k), v, **options)


def groups_reversed(q, k, v, **options):
    return jax_attention(q, k[:, :, ::-1], v[:, :, ::-1], **options)


def one_nan(q, k, v, **options):
    return jax_attention(q, k, v, **options).at[1, 3].set(jnp.nan)


DEFECTS = [
    other_scale,
    last_keys_lost,
    not_causal,
    dk_and_dv_swapped,
    gradient_of_keys_lost,
    groups_reversed,
    one_nan,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_audit_finds_what_is_planted(dtype):
    q, k, v = _inputs(dtype, 150, 150)
    options = dict(is_causal=True, samples=150)
    assert memeff.audit(jax_attention, q, k, v, **options).ok
    # `backward` has no effect on a CPU
    assert memeff.audit(None, q, k, v, **options, backward="fastest").ok
    with pytest.raises(NotImplementedError, match='backward="fused" cannot run this call'):
        memeff.audit(None, q, k, v, is_causal=True, backward="fused")
    for defect in DEFECTS:
        report = memeff.audit(defect, q, k, v, **options)
        words = f"{defect.__name__}\n{report}"
        assert not report.ok, words
        assert "NOT ok" in str(report), words


def sinks_lost(q, k, v, *, sinks, **options):
    return memeff.dot_product_attention(q, k, v, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_audit_of_sinks(dtype):
    """One sink takes nearly all, one a part, one nothing; the first 20 rows see no key."""
    q, k, v = _inputs(dtype, 150, 150)
    N = q.shape[2]
    options = dict(is_causal=True, q_offset=-20, sinks=jnp.linspace(9, -2, N), samples=150)
    options["sinks"] = options["sinks"].at[-1].set(-jnp.inf)
    for implementation in (None, memeff.dot_product_attention):
        report = memeff.audit(implementation, q, k, v, **options)
        assert report.ok, str(report)
    assert not memeff.audit(sinks_lost, q, k, v, **options).ok


def test_audit_knows_how_far_large_logits_are_rounded():
    q, k, v = _inputs("float32", 150, 150)
    for implementation in (None, jax_attention):
        report = memeff.audit(implementation, 1e6 * q, k, v, is_causal=True, samples=64)
        assert report.ok, str(report)
    assert not memeff.audit(groups_reversed, 1e6 * q, k, v, is_causal=True, samples=64).ok


def test_audit_reports_nan_only_where_it_is_visible():
    q, k, v = _inputs("float32", 7, 9)
    v = v.at[:, 5].set(jnp.nan)
    for length, is_right in ((5, True), (6, False)):
        lengths = np.full(2, length)
        report = memeff.audit("xla", q, k, v, key_value_seq_lengths=lengths, samples=16)
        assert report.ok == is_right, str(report)


def test_a_wrong_lse_of_a_row_excuses_no_other_row(monkeypatch):
    def attend(*args, **kwargs):
        out, lse = memeff.dot_product_attention(*args, **kwargs)
        return 1.01 * out, lse.at[:, -1].add(1e9)

    module = importlib.import_module("memeff.diagnostics.audit")
    monkeypatch.setattr(module, "dot_product_attention", attend)
    assert not memeff.audit(None, *_inputs("float32", 150, 150), samples=4).ok


def test_audit_knows_gradients_that_cancel():
    """Equal keys and values make dq and dk 0, but for rounding."""
    x = jnp.ones((1, 200, 2, 16))
    report = memeff.audit("xla", x, x, x, samples=16)
    assert report.ok, str(report)


def test_statistics_and_audit_refuse():
    x = jnp.ones((1, 5, 1, 4))
    refusal = "attention_statistics does not take return_residual, sinks"
    with pytest.raises(TypeError, match=refusal):
        memeff.attention_statistics(x, x, x, sinks=jnp.ones(1), return_residual=True)
    with pytest.raises(ValueError, match="samples=0: it must be at least 1"):
        memeff.audit(None, x, x, x, samples=0)
    for samples in (1.5, True):
        with pytest.raises(TypeError, match=f"samples must be an int, got .* {samples}"):
            memeff.audit(None, x, x, x, samples=samples)
    for rng in (3, "key", np.ones(2), jax.random.split(jax.random.key(0), 2)):
        with pytest.raises(TypeError, match=r"rng must be one key of jax\.random\.key or PRNGKey"):
            memeff.audit(None, x, x, x, rng=rng)
    with pytest.raises(ValueError, match="key must have shape"):
        memeff.key_mass(x, 1.0)
    with pytest.raises(TypeError, match="memeff.audit runs outside jit"):
        jax.jit(lambda x: memeff.audit(None, x, x, x).samples)(x)
    sizes = np.where(np.eye(6, dtype=bool), 0, (2, 5, 6, 2, 2, 3))
    sizes[4, 3] = 0  # without key heads there are no query heads
    for B, T, S, N, K, D in sizes.tolist():
        arrays = jnp.ones((B, T, N, 4)), jnp.ones((B, S, K, 4)), jnp.ones((B, S, K, D))
        refusal = f"to sample: B={B}, T={T}, S={S}, N={N}, K={K}, D={D} must be at least 1"
        with pytest.raises(ValueError, match=refusal):
            memeff.audit(None, *arrays)
