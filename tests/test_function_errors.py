"""Check the refusals of wrong functions of the user, sentence by sentence, and count traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import raising

import memeff
from memeff import dot_product_attention, masks, scores, transforms

f32 = np.float32

# ---- functions that are wrong


def _score_with_if(score, batch, head, q_pos, k_pos, params):
    return score if q_pos > k_pos else -score


def _score_of_three_arguments(s, b, h):
    return s


def _score_of_shape_1(s, *indices):
    return s[None]


def _score_of_shape_3(s, *indices):
    return s * jnp.ones(3)


def _score_of_integers(s, batch, head, q_pos, k_pos, params):
    return q_pos


def _score_of_two(s, *indices):
    return s, s


def _mask_of_integers(batch, head, q_pos, k_pos, params):
    return q_pos - k_pos


def _transform_that_cuts(x, position, which, params):
    return x[:2]


def _transform_of_one_argument(x):
    return x


def _after_batch_entry(b, h, i, j, p):
    return i > b


def _after_head(b, h, i, j, p):
    return i > h


_causal_blocks = memeff.block_mask(masks.causal(), 5, 7, block_size=4)
_other_lengths = memeff.block_mask(masks.causal(), 9, block_size=4)
_one_batch_entry = memeff.block_mask(_after_batch_entry, 5, 7)
_two_heads = memeff.block_mask(_after_head, 5, 7, heads=2)
_documents = masks.documents(np.zeros(7, int), np.zeros(6, int))
_t5_of_two_heads = scores.t5(np.ones((8, 2)))

WRONG = raising(
    ValueError,
    (
        dict(score_fn=scores.alibi(np.ones(3))),
        r"score_fn has params for N=3 heads, but this call has N=4",
    ),
    (
        dict(score_fn=scores.soft_cap(1.0).then(_t5_of_two_heads)),
        r"score_fn has params for N=2 heads",
    ),
    (dict(score_fn=scores.relative(np.ones((5, 9)))), r"score_fn has params for N=5 heads"),
    (
        dict(mask_fn=masks.causal() | masks.prefix(np.ones(3, int))),
        r"mask_fn has params for B=3 batch entries, but this call has B=2",
    ),
    (dict(mask_fn=~_documents), r"mask_fn has params for S=6 key positions, but this call has S=7"),
    (
        dict(mask_fn=masks.documents(np.zeros(7, int)), q_offset=np.array([0, 3])),
        r"params for Q=7 query positions \(q_offset \+ T\), but this call has Q=8",
    ),
    # a sum of 8 bits would wrap
    (
        dict(
            mask_fn=masks.documents(np.zeros(255, int), np.zeros(7, int)),
            q_offset=np.array([0, 252], np.uint8),
        ),
        r"params for Q=255 query positions \(q_offset \+ T\), but this call has Q=257",
    ),
    (dict(mask_fn=_one_batch_entry), r"made with batch=1, and this call has B=2"),
    (dict(mask_fn=_two_heads), r"made with heads=2, and this call has N=4"),
    (dict(score_params=1), r"score_params came without score_fn: pass both"),
    (
        dict(score_fn=scores.alibi(np.ones(4)), score_params=1),
        r"Pass either score_params or a `memeff\.Score`, which carries its own params",
    ),
    (dict(mask_params=1), r"mask_params came without mask_fn: pass both"),
    (dict(qk_transform_params=1), r"qk_transform_params came without qk_transform: pass both"),
    (dict(sinks=np.ones(3)), r"sinks must be floats of shape \(N=4,\), a logit for each head"),
    (dict(mask_fn=_other_lengths), r"block mask of T, S = \(9, 9\), .*\(5, 7\)"),
    (
        dict(mask_fn=_causal_blocks, q_offset=2),
        r"block mask, whose positions begin at 0, and q_offset is given",
    ),
)
WRONG += raising(
    TypeError,
    (
        dict(score_fn=3),
        r"score_fn must be a function \(score, batch, head, q_pos, k_pos, params\), got int",
    ),
    (
        dict(score_fn=_score_of_three_arguments),
        r"score_fn must be hashable and take \(score, batch, head, q_pos, k_pos",
    ),
    (dict(score_fn=_score_with_if), r"score_fn needs the value .* use jnp\.where instead of if"),
    (dict(score_fn=_score_of_shape_1), r"must return one float32; got float32\[1\]"),
    (dict(score_fn=_score_of_integers), r"must return one float32; got int32\[\]"),
    (dict(score_fn=_score_of_two), r"must return one float32; got float32\[\], float32\[\]"),
    (dict(score_fn=_score_of_shape_3), r"is called with scalars, for one pair.*float32\[3\]"),
    (dict(mask_fn=_mask_of_integers), r"mask_fn is called with scalars.* one bool; got int32\[\]"),
    (
        dict(qk_transform=_transform_that_cuts),
        r"qk_transform must return a row like that of a query",
    ),
    (
        dict(qk_transform=_transform_of_one_argument),
        r"qk_transform must be hashable and take \(x, position, which, params\)",
    ),
    # Python does not know the signatures of all that is built in
    (dict(score_fn=max), r"score_fn must be hashable and take \(score, .*: no signature found"),
)


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_wrong_functions_are_refused_in_a_sentence(i):
    kwargs, error, words = WRONG[i]
    q = np.ones((2, 5, 4, 8), f32)
    k = np.ones((2, 7, 2, 8), f32)
    v = np.ones((2, 7, 2, 6), f32)
    with pytest.raises(error, match=words):
        dot_product_attention(q, k, v, **kwargs)


# ---- arguments of ready-made functions

X = np.ones((1, 5, 2, 8), f32)
TABLE = np.ones((8, 2), f32)
NO_INTS = ["3", 2.0, True, None, 1j, np.array([1, 2])]  # where a size belongs
NO_ARRAYS = ["3", None, {"a": 1}, masks.causal]
KEY = jax.random.key(0)
SIZES = {
    "step": masks.dilated,
    "size": masks.block_causal,
    "heads": scores.alibi_slopes,
    "max_distance": lambda x: scores.t5(TABLE, max_distance=x),
    "query_length": lambda x: memeff.block_mask(masks.causal(), x),
    "batch": lambda x: memeff.block_mask(masks.causal(), 5, batch=x),
    "block_size": lambda x: memeff.block_mask(masks.causal(), 5, block_size=x),
}
ARRAYS = {
    "length": masks.prefix,
    "query_ids": masks.documents,
    "ancestors": lambda x: masks.tree(x, 0),
    "start": lambda x: masks.tree(np.zeros(5, int), x),
    "parents": masks.ancestors_of,
    "slopes": scores.alibi,
    "table": scores.relative,
    "cap": scores.soft_cap,
    "scale": scores.head_temperature,
    "query_scale": lambda x: transforms.rms_norm(x, np.ones(8)),
    "key_scale": lambda x: transforms.rms_norm(np.ones(8), x),
}
WRONG_ARGUMENTS = raising(
    ValueError,
    (lambda: masks.sliding_window(-1), r"\(left, right\)=\(-1, 0\): sides count tok"),
    (lambda: masks.prefix([[1]]), r"length must have shape \(\) or \[B\]; got \(1, 1\)"),
    (lambda: masks.prefix(np.int64(2**40)), "length has integers that do not fit"),
    (lambda: masks.documents(3), r"query_ids must have shape \[T\] or \[B, T\]"),
    (lambda: masks.documents([0, 1], [[[0]]]), "key_ids must have shape"),
    (lambda: masks.documents(np.array([2**32, 0])), "query_ids has integers that do"),
    (lambda: masks.tree(np.zeros(33, int), 0), "ancestors has 33 drafts"),
    (lambda: masks.ancestors_of(-1), r"parents must have shape \[B, T\] or \[T\]"),
    (lambda: masks.ancestors_of(np.full(33, -1)), "parents has 33 drafts"),
    (lambda: masks.ancestors_of([-1, -2]), "or be -1 where there is none; got -2"),
    (lambda: scores.alibi(1.0), r"slopes must have shape \[N\]; got \(\)"),
    (lambda: scores.relative(np.ones(3)), r"table must have shape \[N, 2 L \+ 1\]"),
    (lambda: scores.relative(np.ones((2, 4))), "an odd number; got"),
    (lambda: scores.t5(np.ones(8)), r"table must have shape \[buckets, N\]"),
    (lambda: scores.t5(TABLE[:3]), "table has 3 buckets: it must have at least 4"),
    (lambda: scores.t5(TABLE, max_distance=2), "max_distance=2: .* must be larger"),
    (lambda: scores.soft_cap(-1), "cap must be > 0 and finite; got -1"),
    (lambda: scores.soft_cap(1e-50), "cap must be > 0 and finite; got 1e-50"),
    (lambda: scores.soft_cap([2, np.inf]), "cap must be > 0 and finite; got inf"),
    (lambda: scores.soft_cap(jnp.zeros(2)), "cap must be > 0 and finite; got 0"),
    (lambda: scores.soft_cap(np.ones((1, 2))), r"cap must have shape \[N\]"),
    (lambda: transforms.rotary(0), "base=0: it must be > 0"),
    (lambda: transforms.rms_norm(1.0, 1.0), r"query_scale must have shape \[H\]"),
    (lambda: transforms.rms_norm(X[0, 0, 0], X[0, 0, 0], -1), "epsilon=-1: it must"),
    (
        lambda: dot_product_attention(
            X, X, X, qk_transform=transforms.rms_norm(np.ones(8), np.ones(2))
        ),
        "transforms.rms_norm has key_scale for H=2, but this call has H=8",
    ),
    (lambda: memeff.block_mask(masks.causal(), -1), "query_length=-1: it must be at"),
    (lambda: memeff.block_mask(masks.causal(), 5, heads=-1), "heads=-1: it must be at"),
    (
        lambda: memeff.switch_jax_nn(context_parallel=np.ones(2)).__enter__(),
        "context_parallel=.* is not known",
    ),
)
WRONG_ARGUMENTS += raising(
    TypeError,
    (lambda: masks.sliding_window(1.0), r"sides are ints \(tokens\) or None, got float"),
    (lambda: masks.sliding_window(1, True), "sides are ints .* got bool True"),
    (lambda: masks.prefix(1.5), "length must be integers, got float"),
    (lambda: masks.documents(np.ones(5)), "query_ids must be integers, got float"),
    (lambda: masks.tree(np.zeros(5, int), 0.5), "start must be integers"),
    (lambda: masks.causal() & 3, "memeff.Mask combines with another .* got int 3"),
    (lambda: masks.causal() | scores.alibi([1.0]), r"Wrap a function: memeff.Mask"),
    (lambda: scores.alibi([1.0]).then(None), "memeff.Score combines with another"),
    (lambda: transforms.rotary().then(2), "memeff.Transform combines with another"),
    (lambda: scores.t5(TABLE, bidirectional=1), "bidirectional must be True or False"),
    (lambda: transforms.rotary("a"), "base must be a number"),
    (lambda: memeff.block_mask(masks.causal(), 5, 5.0), "key_length must be an int"),
    (lambda: memeff.replace_attention(abs, strict=1), "strict must be True or False"),
    (lambda: memeff.replace_attention(abs, check="y"), "check must be True or False"),
    (lambda: memeff.replace_attention(abs, min_logits=True), "min_logits must be a num"),
    (lambda: memeff.switch_jax_nn(strict=1).__enter__(), "strict must be True or False"),
    (lambda: memeff.switch_jax_nn(np.ones(2)).__enter__(), "implementation must be a name or None"),
)


@pytest.mark.parametrize("i", range(len(WRONG_ARGUMENTS)))
def test_wrong_arguments_of_ready_made_functions(i):
    call, error, pattern = WRONG_ARGUMENTS[i]
    with pytest.raises(error, match=pattern) as raised:
        call()
    assert type(raised.value) is error


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_ints(name):
    for size in NO_INTS:
        with pytest.raises(TypeError, match=f"{name} must be an int, got "):
            SIZES[name](size)
    with pytest.raises(ValueError, match=f"{name}=-1: it must be at least"):
        SIZES[name](-1)
    with pytest.raises(ValueError, match=f"{name}=1099511627776: it must fit in 32 bits"):
        SIZES[name](2**40)


@pytest.mark.parametrize("name", ARRAYS)
def test_params_of_ready_made_functions_are_arrays_of_numbers(name):
    for x in NO_ARRAYS:
        with pytest.raises(TypeError, match=f"{name} must be an array, got "):
            ARRAYS[name](x)
    for x in (KEY, np.ones(8, np.complex64), np.ones(8, bool)):
        with pytest.raises(TypeError, match=rf"{name} must be .*, got (key<fry>|complex64|bool)\."):
            ARRAYS[name](x)


def test_values_known_inside_jit_are_checked_there():
    """JAX's own form of a NumPy array is traced inside jit, so what came is read."""

    @jax.jit
    def attend(x, cap):
        return dot_product_attention(x, x, x, logits_soft_cap=cap)

    wrong = np.array(-5.0, f32)
    with pytest.raises(ValueError, match="logits_soft_cap=-5: a cap must be > 0"):
        jax.jit(lambda x: dot_product_attention(x, x, x, logits_soft_cap=wrong))(X)
    with pytest.raises(ValueError, match="cap must be > 0 and finite; got -5"):
        jax.jit(lambda: scores.soft_cap(wrong).params)()
    assert attend(X, wrong).shape == X.shape  # traced: not known


# ---- tracing


def _times_params(s, batch, head, q_pos, k_pos, w):
    return s * w


def test_a_function_that_closes_over_a_tracer_is_refused():
    x = jnp.ones((1, 5, 1, 4))

    @jax.jit
    def closes_over_tracer(w):
        return dot_product_attention(x, x, x, score_fn=lambda s, *indices: s * w)

    refusal = r"score_fn closes over a traced array of shape \(\): pass it in score_params"
    with pytest.raises(ValueError, match=refusal):
        closes_over_tracer(2.0)
    out = dot_product_attention(x, x, x, score_fn=_times_params, score_params=2.0)
    np.testing.assert_allclose(out, x)

    @jax.jit
    def blocks_of_tracer(n):
        return memeff.block_mask(masks.prefix(n), 8).blocks.any_visible

    with pytest.raises(ValueError, match="block_mask: params are traced"):
        blocks_of_tracer(3)


def test_one_trace_for_params_that_differ_in_numbers_only():
    traces = []

    def score(s, batch, head, q_pos, k_pos, w):
        traces.append(1)
        return s * w

    @jax.jit
    def f(x, w):
        return dot_product_attention(x, x, x, score_fn=score, score_params=w)

    x = jnp.ones((1, 5, 1, 4))
    f(x, 1.0)
    count = len(traces)
    f(x, 2.0)
    assert len(traces) == count
