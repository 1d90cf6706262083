"""`models.generate` writes what the full forward would, alone and in a batch, in any chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_cases import TINY

from models import decode_speed, generate
from models.data import Refused
from models.transformer import Config, Transformer

pytestmark = pytest.mark.once

FIELDS = {name: x for name, x in TINY.items() if name in Config.__dataclass_fields__}


def build(**options):
    """Return a model with random parameters whose logits differ enough."""
    graphdef, params = nnx.split(
        Transformer(Config(**FIELDS | options), rngs=nnx.Rngs(1)), nnx.Param
    )
    return graphdef, jax.tree.map(lambda x: 2 * x, params)


PROMPTS = ["def f(x, y):", "", "é", "a" * 31]
SAMPLING = dict(temperature=0.9, top_k=60, top_p=0.95, seed=3)
LENGTH = 20


@functools.partial(jax.jit, static_argnums=0)
def next_token(graphdef, params, tokens, length, key):
    """Choose the token behind `length` tokens; causal: those behind change nothing."""
    logits = nnx.merge(graphdef, params)(tokens[None])[0, length - 1]
    return generate.choose(logits, key, generate.Sampling(0.9, 60, 0.95))


def by_full_forwards(graphdef, params, prompt, number):
    """Return the tokens that follow `prompt`, each from a forward of all tokens before it."""
    key = jax.random.fold_in(jax.random.key(SAMPLING["seed"]), number)
    start = generate.tokens_of(prompt)
    tokens = np.zeros(32 + LENGTH, np.int32)
    tokens[: len(start)] = start
    for step in range(LENGTH):
        length = len(start) + step
        tokens[length] = next_token(graphdef, params, tokens, length, jax.random.fold_in(key, step))
    return tokens[len(start) :][:LENGTH].tolist()


def generated(graphdef, params, prompts):
    """Return LENGTH tokens after each prompt."""
    state = generate.read_prompts(
        graphdef, params, [generate.tokens_of(prompt) for prompt in prompts], LENGTH
    )
    base = jax.random.key(SAMPLING["seed"])
    keys = jnp.stack([jax.random.fold_in(base, n) for n in range(len(prompts))])
    blocks = []
    for _ in range(0, LENGTH, generate.BLOCK):
        tokens, state = generate.write_block(
            graphdef, params, state, keys, generate.Sampling(0.9, 60, 0.95)
        )
        blocks.append(tokens)
    assert not any(cache.overflowed.any() for cache in state.caches)
    return np.concatenate(blocks, 1)[:, :LENGTH].tolist()


@pytest.mark.parametrize(
    "window, chunk",
    [
        (6, 5),
        *(pytest.param(*x, marks=pytest.mark.slow) for x in ((None, 2048), (None, 5), (6, 2048))),
    ],
)
def test_tokens_are_those_of_the_full_forward(window, chunk, monkeypatch):
    monkeypatch.setattr(generate, "CHUNK", chunk)
    graphdef, params = build(window=window)
    tokens = generated(graphdef, params, PROMPTS)
    for n, prompt in enumerate(PROMPTS):
        assert tokens[n] == by_full_forwards(graphdef, params, prompt, n)


def test_the_stream_is_the_text():
    graphdef, params = build()
    options = dict(length=LENGTH, **SAMPLING)
    pieces = list(generate.stream(graphdef, params, PROMPTS, **options))
    assert len(pieces) == 2
    tokens = generated(graphdef, params, PROMPTS)
    for n, row in enumerate(tokens):
        text = bytes(row).split(b"\0")[0].decode(errors="replace")
        assert "".join(piece[n] for piece in pieces) == text
    assert generate.write(graphdef, params, prompt=PROMPTS[0], **options) == "".join(
        piece[0] for piece in pieces
    )


@pytest.mark.slow
def test_prompts_are_read_within_a_memory_limit():
    graphdef, params = build()
    starts = [generate.tokens_of("x" * 1500)]
    whole = generate.read_prompts(graphdef, params, starts, 1)
    limit = 2**21
    pieces = []
    read = generate.read_chunk

    def record(*arguments):
        pieces.append(arguments[3].shape[1])
        return read(*arguments)

    record.lower = read.lower
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "read_chunk", record)
        state = generate.read_prompts(graphdef, params, starts, 1, limit)
    (chunk,) = set(pieces)
    assert chunk < 1501 and chunk * len(pieces) >= 1501
    np.testing.assert_allclose(state.logits, whole.logits, atol=1e-4)
    with pytest.raises(
        Refused, match="memory_limit=10 bytes: chunks of 1. tokens of 1 prompts need"
    ):
        generate.read_prompts(graphdef, params, starts, 1, 10)


def test_caches_beyond_the_memory_are_refused_in_a_sentence():
    graphdef, params = build()
    texts = generate.stream(graphdef, params, ["a", "b"], length=2_000_000_000, temperature=0)
    message = "the caches of 2 texts of 2000000256 bytes need .*iB of memory, and this machine has"
    with pytest.raises(Refused, match=message):
        next(texts)


@pytest.mark.parametrize("prompts", ["two", []])
def test_prompts_that_are_no_list_of_texts_are_refused(prompts):
    texts = generate.stream(None, None, prompts, length=1, temperature=0)
    with pytest.raises(Refused, match="prompts=.*: give a list of at least one text"):
        next(texts)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--heads", "3"), "width=4096 must be a multiple of 6, twice heads"),
        (("--batch", "1", "0"), "--context and --batch count tokens and sequences"),
        (("--context", "-1"), "--context and --batch count tokens and sequences"),
        (("--bandwidth", "0"), "--bandwidth 0.0: it must be above 0."),
    ],
)
def test_the_measurement_refuses_in_a_sentence(flags, message):
    with pytest.raises(SystemExit) as exit:
        decode_speed.main(["--kv-heads", "1", *flags])
    assert str(exit.value).startswith(f"models.decode_speed: {message}")


def test_layers_are_apart_in_the_dtype_of_the_computation():
    graphdef, params = build(dtype="bfloat16")
    kernels = generate.decoding_params(graphdef, params)["layers"]["gate"]["kernel"].get_value()
    stack = params["layers"]["gate"]["kernel"].get_value()
    assert len(kernels) == len(stack) > 1
    for kernel, stacked in zip(kernels, stack, strict=True):
        np.testing.assert_array_equal(kernel, stacked.astype(jnp.bfloat16))
    scales = generate.decoding_params(graphdef, params)["layers"]["feed_norm"]["scale"].get_value()
    assert scales[0].dtype == jnp.float32  # norms compute in float32
