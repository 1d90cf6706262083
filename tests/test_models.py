"""Test the model: attention, options that change no number, decoding, and a training step.

tests/test_training.py trains it. tests/test_settings_and_data.py tests what it learns from.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from flax import nnx
from model_cases import TINY, compute_logits

from models import train
from models.data import ListOps
from models.devices import Rows, lay_out
from models.train import Settings, loss_and_gradient
from models.transformer import Config, Transformer, positions_in_document

pytestmark = pytest.mark.once


@functools.cache
def build(**settings):
    """Return the graph and the parameters of a tiny model."""
    return nnx.split(Transformer(Config(**TINY | settings), rngs=nnx.Rngs(3)), nnx.Param)


@functools.cache
def listops() -> Rows:
    """Return rows of unequal weight, with several documents in each."""
    batch = ListOps(48, 4).train_batch(0, 0)
    assert len(set(batch.weights.sum(1))) > 1
    assert batch.weights.sum() > 4
    return lay_out(Config(), batch)


def listops_loss_and_gradient(graphdef, params, accumulate=1):
    return jitted_loss_and_gradient(graphdef, params, listops(), accumulate)


jitted_loss_and_gradient = jax.jit(loss_and_gradient, static_argnums=(0, 3))


def draw_tokens(*shape):
    return jnp.asarray(np.random.default_rng(5).integers(1, 256, shape))


def assert_close(actual, expected, tolerance=2e-5):
    """Check that trees are equal to `tolerance` of the largest entry, leaf by leaf."""
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        x = np.asarray(x, np.float64)
        y = np.asarray(y, np.float64)
        largest = max(1e-2, np.abs(y).max())
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * largest)


# ---- attention


def test_attention_by_name_is_one_function():
    """Loss and gradient agree on packed documents, some of them longer than the window."""
    memeff_model = build(attention="memeff", window=5)
    jax_nn_model = build(attention="jax.nn", window=5)
    reference_model = build(attention="reference", window=5)
    expected = listops_loss_and_gradient(*jax_nn_model)
    assert_close(listops_loss_and_gradient(*memeff_model), expected)
    tokens = draw_tokens(1, 20)
    expected = compute_logits(*jax_nn_model, tokens)
    assert_close(compute_logits(*reference_model, tokens), expected)


@pytest.mark.parametrize("attention", few(["memeff", "jax.nn"], ["memeff"]))
def test_window_is_heeded(attention):
    """One layer with a window of w sees w tokens back and no more."""
    tokens = draw_tokens(1, 20)
    changed = tokens.at[0, 4].set(tokens[0, 4] % 255 + 1)
    model = build(layers=1, window=5, attention=attention)
    logits, changed_logits = compute_logits(*model, jnp.concatenate([tokens, changed]))
    difference = np.abs(logits - changed_logits).max(-1)
    assert (difference > 1e-6).nonzero()[0].tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("attention", few(["memeff", "jax.nn", "reference"], ["memeff"]))
def test_packed_documents_equal_documents_apart(attention):
    graphdef, params = build(attention=attention)
    tokens = draw_tokens(2, 15)
    segment_ids = jnp.repeat(jnp.array([[4, 9]]), 15, axis=1)
    packed = compute_logits(graphdef, params, tokens.reshape(1, 30), segment_ids)
    separate = compute_logits(graphdef, params, tokens)
    assert_close(packed.reshape(2, 15, -1), separate, 1e-6)


def test_positions_start_again_in_each_document():
    ids = jnp.array([[4, 4, 4, 7, 7, 2], [0, 1, 1, 1, 1, 1]])
    positions = positions_in_document(ids).tolist()
    assert positions == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]


def test_the_model_turns_by_positions_in_the_document(monkeypatch):
    """Rotations get the positions themselves, which distances alone cannot show."""

    def raise_positions(config, positions):
        raise LookupError(positions.tolist())

    monkeypatch.setattr("models.transformer.rotation", raise_positions)
    model = nnx.merge(*build())
    with pytest.raises(LookupError, match=re.escape("[[0, 1, 0]]")):
        model(draw_tokens(1, 3), jnp.array([[1, 1, 2]]))


# ---- remat, scan, dtype and accumulation


REMAT_AND_SCAN = [{"scan_layers": False}, {"remat": True}, {"remat": True, "scan_layers": False}]


@pytest.mark.parametrize("options", few(REMAT_AND_SCAN, REMAT_AND_SCAN[2:]))
def test_remat_and_scan_change_no_number(options):
    actual = listops_loss_and_gradient(*build(**options))
    assert_close(actual, listops_loss_and_gradient(*build()))


def test_remat_and_scan_are_heeded():
    def jaxpr(**options):
        graphdef, params = build(**options)

        def differentiate(params):
            return loss_and_gradient(graphdef, params, listops(), 1)

        return str(jax.make_jaxpr(differentiate)(params))

    usual = jaxpr()
    assert "unroll=2" in jaxpr(scan_layers=False)
    assert "unroll=2" not in usual
    assert "remat" in jaxpr(remat=True)
    assert "remat" not in usual


@pytest.mark.parametrize("remat", few([False, True], [True]))
def test_feed_forward_in_chunks_changes_no_number(remat):
    """48 tokens in chunks of 20 leave a rest; with remat, chunks are computed again inside it."""
    actual = listops_loss_and_gradient(*build(feed_forward_chunk=20, remat=remat))
    assert_close(actual, listops_loss_and_gradient(*build()))


def test_feed_forward_chunk_is_heeded():
    """No array has all tokens and the width inside the feed-forward part, unless it is not cut."""
    hidden = "[4,48,40]"

    def jaxpr(**options):
        graphdef, params = build(feed_forward=40, **options)

        def differentiate(params):
            return loss_and_gradient(graphdef, params, listops(), 1)

        return str(jax.make_jaxpr(differentiate)(params))

    assert hidden in jaxpr()
    assert hidden not in jaxpr(feed_forward_chunk=20)


def test_accumulation_equals_the_whole_batch():
    """Accumulation weighs rows of unequal weight rightly; a mean of means would differ."""
    whole_batch = listops_loss_and_gradient(*build())
    loss = whole_batch[0][0]
    assert float(loss) > 1
    assert_close(listops_loss_and_gradient(*build(), 4), whole_batch)


def test_bfloat16_computes_in_bfloat16_with_float32_parameters():
    graphdef, params = build(dtype="bfloat16")
    tokens = draw_tokens(1, 30)
    logits = compute_logits(graphdef, params, tokens)
    assert logits.dtype == jnp.bfloat16
    float32_logits = compute_logits(*build(), tokens)
    assert_close(logits, float32_logits, 0.03)

    def differentiate(params):
        return loss_and_gradient(graphdef, params, listops(), 1)

    _, gradient = jax.eval_shape(differentiate, params)
    dtypes = {x.dtype for x in jax.tree.leaves((params, gradient))}
    assert dtypes == {jnp.dtype("float32")}


def test_the_gradient_of_the_embedding_adds_up_in_float32():
    graphdef, params = build(dtype="bfloat16")
    tokens = jnp.zeros((1, 4096), jnp.int32)

    def total(params):
        return jnp.sum(nnx.merge(graphdef, params).vectors(tokens), dtype=jnp.float32)

    gradient = jax.grad(total)(params)["embedding"]["embedding"].get_value()
    np.testing.assert_array_equal(gradient[0], 4096)  # in bfloat16 a sum of ones ends at 256


# ---- decoding


def test_decoding_equals_the_full_forward():
    """Decode token by token, after a prompt that is read at once, and in rings."""
    graphdef, params = build(window=4)
    tokens = draw_tokens(2, 13)
    full = compute_logits(graphdef, params, tokens)

    @jax.jit
    def decode(params, tokens, cache):
        return nnx.merge(graphdef, params).decode(tokens, cache)

    for sizes, chunk, capacity in (
        ([1] * 13, 17, 17),
        ([6] + [1] * 7, 17, 17),
        ([3, 3, 1] + [2] * 3, 3, 7),
    ):
        cache = nnx.merge(graphdef, params).empty_cache(2, 17, chunk)
        assert {x.capacity for x in cache} == {capacity}
        start = 0
        pieces = []
        for size in sizes:
            logits, cache = decode(params, tokens[:, start : start + size], cache)
            pieces.append(logits)
            start += size
        assert [x.lengths.tolist() for x in cache] == [[13, 13]] * 2
        assert_close(jnp.concatenate(pieces, axis=1), full, 2e-6)


# ---- memory


def square_arrays(text: str, least: int) -> set[str]:
    """Return the shapes in HLO that have two dims of `least` or more."""
    shapes = set()
    for shape in re.findall(r"\[(\d+(?:,\d+)+)\]", text):
        large_dims = sum(int(dim) >= least for dim in shape.split(","))
        if large_dims >= 2:
            shapes.add(shape)
    return shapes


STEPS = [{}, {"remat": True}, {"attention": "jax.nn"}]


@pytest.mark.parametrize("options", few(STEPS, STEPS[1:]))
def test_no_square_array_in_a_training_step(options):
    """No array has T times T entries. With jax.nn one has, so the test can fail."""
    settings = Settings(**TINY | options, context=1024)
    graphdef, params = nnx.split(Transformer(settings, rngs=nnx.Rngs(0)), nnx.Param)
    state = (params, train.make_optimiser(settings).init(params))
    rows = lay_out(settings, ListOps(1024, 1).train_batch(0, 0))
    program = train.train_step.lower(settings, graphdef, state, rows).compile()
    found_square = bool(square_arrays(program.as_text(), 1024))
    assert found_square == (options.get("attention") == "jax.nn")
