"""`switch_linen` and `switch_nnx` make Flax's attention modules compute with memeff."""

import functools

import jax
import numpy as np
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from flax_cases import (
    LINEN,
    NNX,
    SELF_MASK,
    F,
    N,
    T,
    X,
    assert_close,
    assert_equal,
    nnx_layer,
    quadratic,
)

from memeff import nn
from memeff.nn import switch

KEEPS = "keeps its own attention_fn"


def test_a_jitted_function_follows_the_linen_switch():
    model = LINEN[1](num_heads=N)
    variables = model.init(jax.random.key(0), X)
    # row 3 sees nothing: 0 from memeff, the mean of values from Flax
    mask = SELF_MASK & (np.arange(T) != 3)[:, None]

    @jax.jit
    def run(mask):
        return model.apply(variables, X, mask=mask)

    before = np.asarray(run(mask))
    assert np.abs(before[:, 3]).max() > 1e-3
    for traced in (1, 0):  # `run` is traced again inside, once
        with nn.switch_linen() as switched:
            inside = np.asarray(run(mask))
        assert len(switched) == traced
        assert np.abs(inside[:, 3]).max() == 0
        assert_close(np.delete(inside, 3, 1), np.delete(before, 3, 1))
        assert_equal(np.asarray(run(mask)), before)


def test_an_attention_fn_chosen_on_purpose_is_kept():
    model = LINEN[1](num_heads=N, attention_fn=quadratic)
    variables = model.init(jax.random.key(0), X)
    with nn.switch_linen() as switched, pytest.warns(UserWarning, match=KEEPS):
        jax.eval_shape(model.apply, variables, X)
    assert switched == []
    with nn.switch_linen() as switched:  # memeff's own and Flax's other modules: no warning
        ours = LINEN[0](num_heads=N, attention_fn=functools.partial(nn.attention_fn, chunk_size=2))
        jax.eval_shape(ours.apply, variables, X)
        jax.eval_shape(flax_linen.Dense(3).init, jax.random.key(0), X)
    assert switched == []

    first = nnx_layer(NNX[1], attention_fn=quadratic)
    second = nnx_layer(NNX[1], attention_fn=flax_nnx.dot_product_attention)
    with pytest.warns(UserWarning, match=f"'0' {KEEPS}") as record:
        assert nn.switch_nnx(flax_nnx.List([first, second])) == ["1"]
    assert record[0].filename == __file__
    assert first.attention_fn is quadratic
    assert second.attention_fn is nn.attention_fn
    message = "none without an attention_fn of its own"
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=message):
        nn.switch_nnx(first)


def test_nothing_to_switch_is_an_error():
    linear = flax_nnx.Linear(2, 3, rngs=flax_nnx.Rngs(0))
    message = r"no nnx.MultiHeadAttention to switch \(none at all\): .*replace_attention"
    with pytest.raises(ValueError, match=message):
        nn.switch_nnx(linear)
    message = "must be an nnx.Module, got MultiHeadDotProductAttention: use switch_linen"
    with pytest.raises(TypeError, match=message):
        nn.switch_nnx(LINEN[1](num_heads=N))  # pyright: ignore[reportArgumentType]


class WritesAttentionOut(flax_linen.Module):
    """A module that computes attention without Flax's attention."""

    @flax_linen.compact
    def __call__(self, x):
        q = flax_linen.Dense(F)(x)
        k = flax_linen.Dense(F)(x)
        v = flax_linen.Dense(F)(x)
        return jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v


class IgnoresItsAttentionFn(LINEN[1]):
    """A subclass of Flax's attention that computes none."""

    def __call__(self, x):
        return x


NONE_SWITCHED = r"switch_linen: no module was switched, because "


def trace(module):
    """Trace the module; None: trace nothing."""
    if module is not None:
        jax.eval_shape(lambda: module.init(jax.random.key(0), X))


@pytest.fixture
def nothing_switched_before(monkeypatch):
    """Let the test run as in a process in which no switch has switched a module."""
    monkeypatch.setattr(switch, "_switched_before", set())


@pytest.mark.usefixtures("nothing_switched_before")
def test_no_linen_module_switched_warns_or_raises():
    other_module = (
        r"the model calls no linen\.MultiHeadDotProductAttention .* attention_fn "
        r"\(it calls {}\)\. .* use memeff\.replace_attention"
    )
    no_module = r"no module of Linen was called inside\. For NNX use switch_nnx"
    reasons = (
        (WritesAttentionOut(), other_module.format("WritesAttentionOut")),
        (IgnoresItsAttentionFn(num_heads=N), other_module.format("IgnoresItsAttentionFn")),
        (None, no_module),
    )
    for module, reason in reasons:
        message = NONE_SWITCHED + reason
        with pytest.warns(UserWarning, match=message) as record, nn.switch_linen() as switched:
            trace(module)
        assert switched == []
        assert len(record) == 1
        assert record[0].filename == __file__
        with pytest.raises(ValueError, match=message), nn.switch_linen(strict=True):
            trace(module)
    keeps = LINEN[1](num_heads=N, attention_fn=quadratic)  # one warning says it already
    with pytest.warns(UserWarning, match=KEEPS) as record, nn.switch_linen():
        trace(keeps)
    assert len(record) == 1
    assert record[0].filename == __file__
    with pytest.warns(UserWarning), pytest.raises(ValueError, match=KEEPS):
        with nn.switch_linen(strict=True):
            trace(keeps)


@pytest.mark.usefixtures("nothing_switched_before")
def test_where_linen_computes_with_memeff_nothing_is_told():
    for strict in (False, True):
        with nn.switch_linen(strict=strict) as switched, nn.switch_linen(strict=strict) as inner:
            trace(LINEN[1](num_heads=N))
        assert switched + inner == ["(root)"]
        with nn.switch_linen(strict=strict) as switched:
            trace(LINEN[0](num_heads=N))
        assert switched == []
        with pytest.raises(ZeroDivisionError), nn.switch_linen(strict=strict):
            1 / 0  # noqa: B018


@pytest.mark.usefixtures("nothing_switched_before")
def test_linen_modules_from_jits_cache_are_not_taken_for_none():
    model = LINEN[1](num_heads=N)
    jitted = jax.jit(lambda: model.init_with_output(jax.random.key(0), X)[0])
    for traced in (1, 0, 0):
        with nn.switch_linen(strict=True) as switched:
            jitted()
        assert len(switched) == traced
    message = "compiled in an earlier switch compute with memeff"
    with pytest.warns(UserWarning, match=message), nn.switch_linen(strict=True):  # nobody can know
        trace(WritesAttentionOut())
