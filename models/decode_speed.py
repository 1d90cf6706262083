"""Measure tokens per second of `models.generate` at a long context, beside the same model with jax.nn.

python -m models.decode_speed --context 32768 --batch 1 32 --json generate.jsonl

Parameters and caches are random, because the time does not depend on their values. The limit is the time in which the
device's memory reads all parameters and all cached keys and values once, at --bandwidth bytes per second, the rate of a
copy.
"""

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import memeff
from memeff.bench import machine
from models import generate, transformer
from models.data import Refused
from models.files import one_sentence
from models.transformer import Caches, Config, Transformer

ROOM = 256  # tokens of the cache behind the context
BLOCKS = 4  # of generate.BLOCK tokens, each timed


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m models.decode_speed")
    add = parser.add_argument
    add("--context", type=int, default=32768, help="tokens that each sequence has read")
    add("--batch", type=int, nargs="+", default=[1, 32], help="sequences")
    add("--layers", type=int, default=8)
    add("--width", type=int, default=4096)
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--feed-forward", type=int, default=14336)
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--bandwidth", type=float, default=4.4e12, help="bytes per second of the device's memory")
    add("--json", metavar="FILE", help="append a JSON line for each result")
    options = parser.parse_args(arguments)
    with one_sentence("models.decode_speed"):
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Print a line for each batch and attention, and append it to --json."""
    if min(options.context, *options.batch) < 1:
        raise Refused("--context and --batch count tokens and sequences: each must be at least 1.")
    if not options.bandwidth > 0:
        raise Refused(f"--bandwidth {options.bandwidth}: it must be above 0.")
    names = ("layers", "width", "heads", "kv_heads", "feed_forward", "dtype")
    config = Config(**{name: getattr(options, name) for name in names})
    for batch in options.batch:
        for attention in ("memeff", "jax.nn"):
            row = measured(config, attention, batch, options.context, options.bandwidth)
            print(text_of(row), flush=True)
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps(row | machine()) + "\n")


def measured(
    config: Config, attention: str, batch: int, context: int, bandwidth: float
) -> dict[str, Any]:
    """Return tokens per second of `batch` sequences that have read `context` tokens, and the limit."""
    graphdef, params = random_model(config)
    caches = filled_caches(config, batch, context)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    size += sum(x.nbytes for x in jax.tree.leaves(caches)) * context // (context + ROOM)
    logits = jnp.zeros((batch, transformer.VOCABULARY), jnp.float32)
    state = generate.State(logits, caches, jnp.int32(0))
    keys = jax.random.split(jax.random.key(0), batch)
    sampling = generate.Sampling(0.8)
    seconds = []
    with attended_by(attention):
        jax.clear_caches()
        for _ in range(1 + BLOCKS):  # the first compiles
            start = time.perf_counter()
            tokens, state = generate.write_block(graphdef, params, state, keys, sampling)
            tokens.block_until_ready()
            seconds.append(time.perf_counter() - start)
    best = min(seconds[1:]) / generate.BLOCK
    return dataclasses.asdict(config) | {
        "attention": attention,
        "batch": batch,
        "context": context,
        "seconds_per_token": best,
        "tokens_per_second": batch / best,
        "bytes": size,
        "limit_tokens_per_second": batch * bandwidth / size,
    }


def text_of(row: dict[str, Any]) -> str:
    """Return a result in one line."""
    rate, limit = row["tokens_per_second"], row["limit_tokens_per_second"]
    return (
        f"{row['batch']} x {row['context']} tokens, {row['attention']}: {rate:,.0f} tokens/s, "
        f"{rate / limit:.0%} of the limit of {limit:,.0f} ({row['bytes'] / 1e9:.1f} GB a token)"
    )


def random_model(config: Config) -> tuple[Any, Any]:
    """Return a model as `nnx.split` gives it, with parameters as decoding reads them."""

    @jax.jit
    def make() -> Any:
        model = Transformer(config, rngs=nnx.Rngs(0))
        params = nnx.split(model, nnx.Param)[1]
        return jax.tree.map(lambda x: x.astype(config.dtype), params)

    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    graphdef = nnx.split(model, nnx.Param)[0]
    return graphdef, generate.decoding_params(graphdef, make())


def filled_caches(config: Config, batch: int, context: int) -> Caches:
    """Return caches of `context` random tokens of each sequence, with room for ROOM more."""
    shape = batch, context + ROOM, config.kv_heads, config.width // config.heads
    lengths = jnp.full((batch,), context, jnp.int32)

    @jax.jit
    def tokens(n: int) -> Array:
        return jax.random.normal(jax.random.key(n), shape, config.dtype)

    return tuple(
        memeff.KVCache(tokens(2 * n), tokens(2 * n + 1), lengths + 0) for n in range(config.layers)
    )


@contextlib.contextmanager
def attended_by(name: str) -> Iterator[None]:
    """Let models attend to their caches by memeff or by jax.nn (with cuDNN on GPUs)."""
    if name == "memeff":
        yield
        return
    with mock.patch.object(transformer, "attend_cached", attend_by_jax_nn):
        yield


def attend_by_jax_nn(
    config: Config, q: Array, cache: memeff.KVCache, counts: Array | None
) -> Array:
    """Attend from one token of each sequence to its cache."""
    is_16_bit = cache.key.dtype.itemsize == 2
    implementation: Any = "cudnn" if jax.default_backend() == "gpu" and is_16_bit else None
    return jax.nn.dot_product_attention(
        q,
        cache.key,
        cache.value,
        key_value_seq_lengths=cache.lengths,
        implementation=implementation,
    )


if __name__ == "__main__":
    main()
