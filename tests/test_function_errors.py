"""Check the refusals of wrong functions of the user, sentence by sentence, and count traces."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memeff
from memeff import dot_product_attention, masks, scores

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

WRONG = [  # keyword arguments, error, its words
    (
        dict(score_fn=3),
        TypeError,
        r"score_fn must be a function \(score, batch, head, q_pos, k_pos, params\), got int",
    ),
    (
        dict(score_fn=_score_of_three_arguments),
        TypeError,
        r"score_fn must be hashable and take \(score, batch, head, q_pos, k_pos",
    ),
    (
        dict(score_fn=_score_with_if),
        TypeError,
        r"score_fn needs the value .* use jnp\.where instead of if",
    ),
    (
        dict(score_fn=_score_of_shape_1),
        TypeError,
        r"must return one float32; got float32\[1\]",
    ),
    (
        dict(score_fn=_score_of_integers),
        TypeError,
        r"must return one float32; got int32\[\]",
    ),
    (
        dict(score_fn=_score_of_two),
        TypeError,
        r"must return one float32; got float32\[\], float32\[\]",
    ),
    (
        dict(score_fn=_score_of_shape_3),
        TypeError,
        r"is called with scalars, for one pair.*float32\[3\]",
    ),
    (
        dict(score_fn=scores.alibi(np.ones(3))),
        ValueError,
        r"score_fn has params for N=3 heads, but this call has N=4",
    ),
    (
        dict(score_fn=scores.soft_cap(1.0).then(_t5_of_two_heads)),
        ValueError,
        r"score_fn has params for N=2 heads",
    ),
    (
        dict(score_fn=scores.relative(np.ones((5, 9)))),
        ValueError,
        r"score_fn has params for N=5 heads",
    ),
    (
        dict(mask_fn=masks.causal() | masks.prefix(np.ones(3, int))),
        ValueError,
        r"mask_fn has params for B=3 batch entries, but this call has B=2",
    ),
    (
        dict(mask_fn=~_documents),
        ValueError,
        r"mask_fn has params for S=6 key positions, but this call has S=7",
    ),
    (
        dict(mask_fn=masks.documents(np.zeros(7, int)), q_offset=np.array([0, 3])),
        ValueError,
        r"params for Q=7 query positions \(q_offset \+ T\), but this call has Q=8",
    ),
    (
        dict(mask_fn=_one_batch_entry),
        ValueError,
        r"made with batch=1, and this call has B=2",
    ),
    (
        dict(mask_fn=_two_heads),
        ValueError,
        r"made with heads=2, and this call has N=4",
    ),
    (
        dict(score_params=1),
        ValueError,
        r"score_params came without score_fn: pass both",
    ),
    (
        dict(score_fn=scores.alibi(np.ones(4)), score_params=1),
        ValueError,
        r"Pass either score_params or a `memeff\.Score`, which carries its own params",
    ),
    (
        dict(mask_fn=_mask_of_integers),
        TypeError,
        r"mask_fn is called with scalars.* one bool; got int32\[\]",
    ),
    (
        dict(mask_params=1),
        ValueError,
        r"mask_params came without mask_fn: pass both",
    ),
    (
        dict(qk_transform=_transform_that_cuts),
        TypeError,
        r"qk_transform must return a row like that of a query",
    ),
    (
        dict(qk_transform=_transform_of_one_argument),
        TypeError,
        r"qk_transform must be hashable and take \(x, position, which, params\)",
    ),
    (
        dict(qk_transform_params=1),
        ValueError,
        r"qk_transform_params came without qk_transform: pass both",
    ),
    (
        dict(sinks=np.ones(3)),
        ValueError,
        r"sinks must be floats of shape \(N=4,\), a logit for each head",
    ),
    (
        dict(mask_fn=_other_lengths),
        ValueError,
        r"block mask of T, S = \(9, 9\), .*\(5, 7\)",
    ),
    (
        dict(mask_fn=_causal_blocks, q_offset=2),
        ValueError,
        r"block mask, whose positions begin at 0, and q_offset is given",
    ),
]


@pytest.mark.parametrize("i", range(len(WRONG)))
def test_wrong_functions_are_refused_in_a_sentence(i):
    kwargs, error, words = WRONG[i]
    q = np.ones((2, 5, 4, 8), f32)
    k = np.ones((2, 7, 2, 8), f32)
    v = np.ones((2, 7, 2, 6), f32)
    with pytest.raises(error, match=words):
        dot_product_attention(q, k, v, **kwargs)


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
