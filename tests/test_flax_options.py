"""Options that memeff's Flax modules add to Flax's, against dense masks, and wrong values."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few, raising
from flax import nnx as flax_nnx
from flax_cases import (
    LINEN,
    MASK,
    NNX,
    B,
    F,
    N,
    T,
    X,
    Y,
    assert_close,
    assert_equal,
    build,
    family,
    largest_difference,
    nnx_layer,
    quadratic,
    uniform,
)

from memeff import scores, transforms

OPTIONS = {
    "is_causal": {"is_causal": True},
    "window": {"local_window_size": (2, 1)},
    "window, one number": {"local_window_size": 1},
    "cap": {"logits_soft_cap": 0.2},
    "grouped": {"num_kv_heads": 2},
    "all": {
        "is_causal": True,
        "local_window_size": (3, None),
        "logits_soft_cap": 0.3,
        "num_kv_heads": 1,
    },
}


def dense_mask(length, is_causal=False, local_window_size=None):
    """Return the mask by loops, for T = S = length."""
    left, right = local_window_size or (None, None)
    mask = np.ones((1, 1, length, length), bool)
    for i, j in itertools.product(range(length), repeat=2):
        after_query = is_causal and j > i
        too_far_left = left is not None and j < i - left
        too_far_right = right is not None and j > i + right
        mask[0, 0, i, j] = not (after_query or too_far_left or too_far_right)
    return mask


def repeat_key_heads(params, groups):
    """Repeat each key head for every query head of its group: Linen has as many of both."""
    repeated = dict(params)
    for name in ("key", "value"):
        repeated[name] = jax.tree.map(lambda x: np.repeat(x, groups, -2), params[name])
    return repeated


@pytest.mark.parametrize("name", few(OPTIONS, ["window, one number", "all"]))
@family
def test_options(ours, flaxes, name):
    constructor = dict(OPTIONS[name])
    rng = np.random.default_rng(1)
    mask = (rng.random((B, N, T, T)) < 0.8) | np.eye(T, dtype=bool)
    params, run = build(ours, X, **constructor, kernel_init=uniform)
    out = run(params, X, mask=mask)
    plain_params, plain_run = build(ours, X, kernel_init=uniform)
    assert largest_difference(out, plain_run(plain_params, X, mask=mask)) > 1e-3

    K = constructor.pop("num_kv_heads", N)
    window = constructor.pop("local_window_size", None)
    if isinstance(window, int):
        window = (window, window)
    mask = mask & dense_mask(T, constructor.pop("is_causal", False), window)
    heads = {"num_kv_heads": K} if ours is NNX[0] else {}
    if ours is LINEN[0]:
        params = repeat_key_heads(params, N // K)
    attention_fn = functools.partial(quadratic, **constructor)
    _, oracle = build(flaxes, X, attention_fn=attention_fn, **heads)
    assert_close(out, oracle(params, X, mask=mask))


def test_is_causal_of_an_nnx_call_takes_precedence():
    module = nnx_layer(NNX[0], is_causal=True, kernel_init=uniform)
    full = nnx_layer(NNX[1], kernel_init=uniform)(X)
    assert_close(module(X, is_causal=False), full)
    assert largest_difference(module(X), full) > 1e-3


def second_largest_dim(f, *inputs):
    """Return the largest of the second largest dims of the arrays in a compiled program."""
    program = jax.jit(f).lower(*inputs).compile().as_text()
    shapes = re.findall(r"\w+\[([\d,]+)\]", program)
    dims = [sorted(map(int, shape.split(","))) for shape in shapes if "," in shape]
    return max(sizes[-2] for sizes in dims)


@family
def test_no_array_of_length_squared(ours, flaxes):
    del flaxes
    length = 1024
    x = jax.ShapeDtypeStruct((1, length, F), jnp.float32)
    constructor = {
        "dropout_rate": 0.1,
        "deterministic": False,
        "is_causal": True,
        "local_window_size": (700, 0),
        "num_kv_heads": 2,
    }
    params, run = build(ours, X, **constructor)

    def total(params, x):
        return run(params, x).sum()

    def square(x):
        return x[0] @ x[0].T

    assert second_largest_dim(jax.grad(total), params, x) < length
    assert second_largest_dim(square, x) == length  # the measure measures


# ---- wrong values


def score_without_indices(score):
    return score


def mask_of_numbers(*indices):
    return indices[3]


def transform_without_which(x, position):
    return x


def alibi_init(key):
    return ALIBI


def array_init(key):
    return jnp.ones(4)


def rotary_init(key):
    return transforms.rotary()


def t5_init_of_ints(key):
    return scores.t5(jnp.ones((4, 4), int))


def function_of_three(query, key, value):
    return query


ALIBI = scores.alibi([1.0] * 4)
# An error of the core is quoted up to the argument: test_errors has the rest.
WRONG = raising(
    ValueError,
    ({"num_heads": 0}, "num_heads=0: it must be at least 1"),
    ({"num_kv_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3: use one of 1, 2, 4"),
    ({"num_kv_heads": 0}, "num_kv_heads=0: it must be at least 1"),
    ({"qkv_features": 10}, "qkv_features=10 does not divide into num_heads=4 heads"),
    ({"local_window_size": (-1, 0)}, "local_window_size=(-1, 0)"),
    ({"local_window_size": (1, 2, 3)}, "local_window_size=(1, 2, 3)"),
    ({"logits_soft_cap": 0.0}, "logits_soft_cap=0"),
    ({"logits_soft_cap": 1e-50}, "logits_soft_cap=1e-50: a cap must be > 0, also in float32"),
    ({"dropout_rate": 1.0}, "dropout_rate=1"),
    (
        {"attention_fn": flax_nnx.dot_product_attention, "local_window_size": 3},
        "attention_fn=dot_product_attention does not take local_window_size, which is needed here",
    ),
    (
        {"score_fn": ALIBI, "score_init": alibi_init},
        "score_init and score_fn were both given: pass score_init, which learns, or score_fn",
    ),
    (
        {"attention_fn": flax_nnx.dot_product_attention, "sinks_init": jax.nn.initializers.zeros},
        "attention_fn=dot_product_attention does not take sinks, which is needed here",
    ),
)
WRONG += raising(
    TypeError,
    ({"num_heads": 2.0}, "num_heads must be an int, got float 2.0"),
    ({"num_kv_heads": "2"}, "num_kv_heads must be an int, got str '2'"),
    ({"qkv_features": True}, "qkv_features=True must be an int"),
    ({"is_causal": 1}, "is_causal must be"),
    ({"logits_soft_cap": "30"}, "logits_soft_cap"),
    (
        {"logits_soft_cap": jnp.ones(())},
        "logits_soft_cap must be a number in a module, got an array",
    ),
    ({"attention_fn": None}, "attention_fn=None must be a function like memeff.nn.attention_fn"),
    (
        {"score_fn": 3},
        "score_fn must be a function (score, batch, head, q_pos, k_pos, params), got int",
    ),
    ({"score_fn": score_without_indices}, "score_fn must be hashable and take (score, batch,"),
    ({"mask_fn": scores.alibi([1.0])}, "mask_fn must be hashable and take (batch, head,"),
    (
        {"mask_fn": mask_of_numbers},
        "mask_fn is called with scalars, for one pair, and must return one bool",
    ),
    (
        {"qk_transform": transform_without_which},
        "qk_transform must be hashable and take (x, position, which,",
    ),
    (
        {"score_init": ALIBI},
        "score_init must be a function of a key that returns a memeff.Score, got Score. "
        "Write lambda key: ...",
    ),
    (
        {"score_init": array_init},
        "score_init must be a function of a key that returns a memeff.Score; it returned",
    ),
    (
        {"qk_transform_init": rotary_init},
        "qk_transform_init must return a memeff.Transform whose arrays are floats, to learn; "
        "got none",
    ),
    (
        {"score_init": t5_init_of_ints},
        "score_init must return a memeff.Score whose arrays are floats, to learn; got int32[4, 4]",
    ),
    ({"sinks_init": True}, "sinks_init must be an initializer (key, shape, dtype), such as"),
)


@family
def test_wrong_constructor_values(ours, flaxes):
    del flaxes
    constructor = {"num_heads": 4}
    if ours is NNX[0]:
        constructor |= {"in_features": F, "rngs": flax_nnx.Rngs(0)}
    for wrong, error, message in WRONG:
        with pytest.raises(error, match=re.escape(message)):
            ours(**(constructor | wrong))


def test_wrong_linen_calls():
    layer = LINEN[0](num_heads=4)
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="inputs_v came without inputs_k"):
        layer.init(key, X, None, Y)
    with pytest.raises(ValueError, match="inputs_kv came with inputs_k or inputs_v"):
        layer.init(key, X, Y, inputs_kv=Y)
    message = r"qkv_features=6 \(the inputs' features\) does not divide"
    with pytest.raises(ValueError, match=message):
        layer.init(key, X[..., :6])
    without_mask = LINEN[0](num_heads=4, attention_fn=function_of_three)
    with pytest.raises(ValueError, match="does not take mask"):  # Flax would silently drop it
        without_mask.init(key, X, mask=MASK)
    assert_equal(layer.init_with_output(key, X, inputs_kv=Y), layer.init_with_output(key, X, Y))
