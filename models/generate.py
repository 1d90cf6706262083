"""Write text with a trained model: read prompts in chunks into a cache, then generate token by token.

python -m models.generate --checkpoint runs/train --prompt "def main(" --length 200 --temperature 0.8 --top-p 0.95

Several --prompt make a batch. Each text is what the model would write for that prompt alone, because the random numbers
of text n depend on the seed and n only, and rows of a batch do not see each other. The text of a single prompt is printed
while it is written.
"""

import argparse
import codecs
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from memeff.diagnostics.plan import check_device
from memeff.units import format_bytes, parse_bytes
from models.data import START, VOCABULARY, Refused
from models.files import one_sentence
from models.train import read_settings, restore
from models.transformer import Caches, Transformer

CHUNK = 2048  # tokens of a prompt that are read at a time at most
LEAST_CHUNK = 16
BLOCK = 16  # tokens that are written before text is printed
ROUND = 256  # room in a cache is a multiple of this, of which GPUs read splits in place


class Sampling(NamedTuple):
    """The settings by which the next token is chosen."""

    temperature: Array | float  # 0 takes the likeliest
    top_k: Array | int = VOCABULARY  # among so many likeliest
    top_p: Array | float = 1.0  # among the fewest likeliest whose chances add up to this


class State(NamedTuple):
    """The state of generation after some tokens of each row."""

    logits: Array  # B VOCABULARY, of the token that comes next
    caches: Caches
    written: Array  # tokens after the prompt, which number the draws


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m models.generate", description="Write text with a trained model."
    )
    add = parser.add_argument
    add("--checkpoint", default="runs/train", help="--out of models.train (default: runs/train)")
    add("--prompt", action="append", help="what a text begins with; repeat it for a batch")
    add("--length", type=int, default=400, help="bytes to write at most (default: 400)")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest byte (default: 0.8)")
    add("--top-k", type=int, help="choose among this many likeliest bytes (default: all)")
    add(
        "--top-p",
        type=float,
        default=1.0,
        help="choose among the fewest likeliest bytes whose chances add up to this (default: 1, all)",
    )
    add("--seed", type=int, default=0, help="seed of the choices (default: 0)")
    add("--memory-limit", help='temporary memory for reading prompts, such as "512MiB"')
    options = vars(parser.parse_args(arguments))
    with one_sentence("models.generate"):
        prompts = options.pop("prompt") or [""]
        show(stream(*load(options.pop("checkpoint")), prompts, **options), prompts)


def show(pieces: Iterator[list[str]], prompts: list[str]) -> None:
    """Print one text as it is written, or several at the end, and tokens per second to stderr."""
    texts = list(prompts)
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
    began, counted = time.perf_counter(), 0
    for n, new in enumerate(pieces):
        if n == 0:  # with the prompt, and the compiler
            began = time.perf_counter()
        else:
            counted += BLOCK * len(prompts)
        texts = [text + piece for text, piece in zip(texts, new, strict=True)]
        if len(prompts) == 1:
            print(new[0], end="", flush=True)
    seconds = time.perf_counter() - began
    if len(prompts) == 1:
        print()
    else:
        print("\n----\n".join(texts))
    if counted:
        print(f"{counted / seconds:,.0f} tokens per second", file=sys.stderr)


def load(out: str) -> tuple[Any, Any]:
    """Return the model of the newest good checkpoint in folder `out`, as `nnx.split` gives it. Write nothing there."""
    # one device is enough, however many the run had
    settings = dataclasses.replace(read_settings(out), devices=1, layout=None)
    graphdef, like = nnx.split(Transformer(settings, rngs=nnx.Rngs(0)), nnx.Param)
    step, (params,) = restore(out, (like,))
    if step == 0:
        raise Refused(
            f"{out} has no checkpoint yet: `python -m models.train` writes one every --save-every steps."
        )
    return graphdef, params


def decoding_params(graphdef: Any, params: Any) -> Any:
    """Return parameters as decoding reads them: layers that are not stacked, and matrices in the computation's dtype.

    XLA for GPUs copies a layer's matrices out of a stack for each token. With one sequence, that was half of the time.
    """
    dtype = nnx.merge(graphdef, params).config.dtype

    def converted(x: Array) -> Array:
        return x.astype(dtype) if x.ndim == 2 else x

    def of_decoding(path: tuple[Any, ...], x: Array) -> Array | tuple[Array, ...]:
        is_stacked = path[0].key == "layers"
        return tuple(map(converted, x)) if is_stacked else converted(x)

    return jax.tree.map_with_path(of_decoding, params)


def write(graphdef: Any, params: Any, *, prompt: str, length: int, **options: Any) -> str:
    """Return the text that follows `prompt`: `length` bytes, or fewer where the model ends the document."""
    pieces = stream(graphdef, params, [prompt], length=length, **options)
    return "".join(piece for (piece,) in pieces)


def stream(
    graphdef: Any,
    params: Any,
    prompts: Sequence[str],
    *,
    length: int,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    memory_limit: int | str | None = None,
) -> Iterator[list[str]]:
    """Yield what is written after each of `prompts`, a few bytes at a time, until all end or have `length` bytes."""
    if isinstance(prompts, str) or not prompts:
        raise Refused(f"prompts={prompts!r}: give a list of at least one text.")
    check_choices(length, temperature, top_k, top_p, seed)
    limit = check_limit(memory_limit)
    starts = [tokens_of(prompt) for prompt in prompts]
    sampling = Sampling(temperature, min(top_k or VOCABULARY, VOCABULARY), top_p)
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(
        jnp.arange(len(prompts))
    )
    params = decoding_params(graphdef, params)
    state = read_prompts(graphdef, params, starts, length, limit)
    decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in prompts]
    ended = [False] * len(prompts)
    for first in range(0, length, BLOCK):
        tokens, state = write_block(graphdef, params, state, keys, sampling)
        new = np.asarray(tokens, np.uint8)[:, : length - first]
        last = first + BLOCK >= length
        pieces = []
        for n, row in enumerate(new):
            text, end, _ = row.tobytes().partition(START)
            done = ended[n]
            ended[n] = done or bool(end)
            pieces.append("" if done else decoders[n].decode(text, ended[n] or last))
        yield pieces
        if all(ended):
            return


def check_choices(
    length: int, temperature: float, top_k: int | None, top_p: float, seed: int
) -> None:
    """Refuse settings out of range."""
    if length < 1:
        raise Refused(f"length={length}: it must be at least 1 byte.")
    if not temperature >= 0:
        raise Refused(
            f"temperature={temperature}: it must be >= 0; 0 takes the likeliest byte each time."
        )
    if top_k is not None and top_k < 1:
        raise Refused(
            f"top_k={top_k}: it must be at least 1; leave it out to choose among all bytes."
        )
    if not 0 < top_p <= 1:
        raise Refused(f"top_p={top_p}: it must be above 0 and at most 1, which means all bytes.")
    if not -(2**63) <= seed < 2**63:
        raise Refused(f"seed={seed}: it must fit in 64 bits.")


def check_limit(memory_limit: int | str | None) -> int | None:
    """Return a memory limit in bytes."""
    try:
        return parse_bytes("memory_limit", memory_limit)
    except ValueError as error:
        raise Refused(str(error)) from error


def tokens_of(prompt: str) -> np.ndarray:
    """Return the tokens of a document that begins with `prompt`."""
    try:
        return np.frombuffer(START + prompt.encode(), np.uint8).astype(np.int32)
    except UnicodeEncodeError:
        raise Refused(f"prompt={ascii(prompt)} is not UTF-8: give it in UTF-8.") from None


def read_prompts(
    graphdef: Any, params: Any, starts: Sequence[np.ndarray], length: int, limit: int | None = None
) -> State:
    """Read prompts of different lengths into caches with room for `length` more tokens, a chunk at a time.

    Chunks have CHUNK tokens, or as many as keep the temporary memory of a chunk below `limit` bytes, as XLA reports it.
    """
    counts = np.array([len(start) for start in starts])
    longest = int(counts.max())
    room = longest + -(-length // BLOCK) * BLOCK
    if room > ROUND:
        room = -(-room // ROUND) * ROUND
    if room >= 2**31:
        raise Refused(f"length={length}: with the prompt it must be below 2**31 bytes.")
    chunk = min(CHUNK, longest)
    check_memory(graphdef, params, len(starts), room, chunk)
    while True:
        state, pieces = first_state(graphdef, params, starts, room, chunk)
        arguments = graphdef, params, state, pieces[0], jnp.asarray(counts)
        if limit is None:
            break
        compiled: Any = read_chunk.lower(*arguments).compile()
        needed = compiled.memory_analysis().temp_size_in_bytes
        if needed <= limit:
            break
        if chunk <= LEAST_CHUNK:
            raise Refused(
                f"memory_limit={limit} bytes: chunks of {chunk} tokens of {len(starts)} prompts need {needed}. Raise the "
                "limit to that, or give fewer prompts at a time."
            )
        chunk = max(LEAST_CHUNK, chunk // 2)
    for n, tokens in enumerate(pieces):
        valid = jnp.asarray(np.clip(counts - n * chunk, 0, chunk))
        state = read_chunk(graphdef, params, state, tokens, valid)
    return state


def check_memory(graphdef: Any, params: Any, batch: int, room: int, chunk: int) -> None:
    """Refuse caches that the device has no memory for."""

    def empty_cache(params: Any) -> Caches:
        return nnx.merge(graphdef, params).empty_cache(batch, room, chunk)

    caches = jax.tree.leaves(jax.eval_shape(empty_cache, params))
    needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in caches)
    _, memory = check_device(None, caches[0])
    if memory is not None and needed > memory:
        raise Refused(
            f"the caches of {batch} texts of {room} bytes need {format_bytes(needed)} of memory, and this machine has "
            f"{format_bytes(memory)}. Give a smaller length, or fewer prompts at a time."
        )


def first_state(
    graphdef: Any, params: Any, starts: Sequence[np.ndarray], room: int, chunk: int
) -> tuple[State, list[Array]]:
    """Return empty caches, and the prompts, padded and cut into chunks [B, chunk]."""
    B = len(starts)
    longest = max(map(len, starts))
    padded = np.zeros((B, -(-longest // chunk) * chunk), np.int32)
    for row, start in zip(padded, starts, strict=True):
        row[: len(start)] = start
    pieces = [jnp.asarray(x) for x in np.split(padded, padded.shape[1] // chunk, axis=1)]
    model: Transformer = nnx.merge(graphdef, params)
    caches = model.empty_cache(B, room, chunk)
    logits = jnp.zeros((B, VOCABULARY), jnp.float32)
    return State(logits, caches, jnp.int32(0)), pieces


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def read_chunk(graphdef: Any, params: Any, state: State, tokens: Array, counts: Array) -> State:
    """Append counts[b] of the tokens [B, chunk]; where there are some, keep the logits after the last of them."""
    model: Transformer = nnx.merge(graphdef, params)
    x, caches = model.decode_hidden(tokens, state.caches, counts)
    last = jnp.take_along_axis(x, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)  # B 1 C
    logits = model.head(last)[:, 0].astype(jnp.float32)
    return State(jnp.where((counts > 0)[:, None], logits, state.logits), caches, state.written)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def write_block(
    graphdef: Any, params: Any, state: State, keys: Array, sampling: Sampling
) -> tuple[Array, State]:
    """Return BLOCK more tokens of each row [B, BLOCK], and the state after them."""

    def next_token(state: State, _: None) -> tuple[State, Array]:
        model: Transformer = nnx.merge(graphdef, params)
        step_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, state.written)
        token = jax.vmap(choose, (0, 0, None))(state.logits, step_keys, sampling)
        logits, caches = model.decode(token[:, None], state.caches)
        return State(logits[:, 0].astype(jnp.float32), caches, state.written + 1), token

    state, tokens = lax.scan(next_token, state, length=BLOCK)
    return tokens.T, state


def choose(logits: Array, key: Array, sampling: Sampling) -> Array:
    """Return one token for `logits` [VOCABULARY]."""
    temperature, top_k, top_p = sampling
    logits = logits.astype(jnp.float32)
    order = jnp.argsort(logits, descending=True)
    ranked = logits[order] / jnp.maximum(temperature, 1e-6)
    chances = jax.nn.softmax(ranked)
    before = jnp.cumsum(chances) - chances  # of all that are likelier
    rank = jnp.arange(len(ranked))
    allowed = (rank < top_k) & ((before < top_p) | (rank == 0))
    drawn = jax.random.categorical(key, jnp.where(allowed, ranked, -jnp.inf))
    return order[jnp.where(temperature > 0, drawn, 0)]


if __name__ == "__main__":
    main()
