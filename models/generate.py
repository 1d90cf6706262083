"""Writes text with a trained model.

python -m models.generate --checkpoint runs/train --prompt "def main(" --length 200 --temperature 0.8 --top-k 40
"""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from models.data import START, VOCABULARY, Refused
from models.files import one_sentence
from models.train import read_settings, restore
from models.transformer import Transformer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m models.generate", description="Writes text with a trained model."
    )
    parser.add_argument(
        "--checkpoint", default="runs/train", help="folder of the run, the --out of models.train"
    )
    parser.add_argument("--prompt", default="", help="what the text begins with")
    parser.add_argument(
        "--length", type=int, default=400, help="bytes to write at most; the model may end sooner"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest byte each time"
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=None,
        help="choose among this many likeliest bytes (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(arguments))
    with one_sentence("models.generate"):
        graphdef, params = load(options.pop("checkpoint"))
        print(options["prompt"] + write(graphdef, params, **options))


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


def write(
    graphdef: Any,
    params: Any,
    *,
    prompt: str,
    length: int,
    temperature: float,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Return the text that follows `prompt`: `length` bytes, or fewer where the model ends the document."""
    if length < 1:
        raise Refused(f"length={length}: it must be at least 1 byte.")
    if temperature < 0:
        raise Refused(
            f"temperature={temperature}: it must be >= 0; 0 takes the likeliest byte each time."
        )
    if top_k is not None and top_k < 1:
        raise Refused(
            f"top_k={top_k}: it must be at least 1; leave it out to choose among all bytes."
        )
    try:
        start = jnp.asarray(list(START + prompt.encode()), jnp.int32)
    except UnicodeEncodeError:
        raise Refused(f"prompt={ascii(prompt)} is not UTF-8: give it in UTF-8.") from None
    k = min(top_k or VOCABULARY, VOCABULARY)
    tokens = sample(graphdef, length, params, start, jax.random.key(seed), temperature, k)
    return bytes(tokens.tolist()).split(START)[0].decode(errors="replace")


@functools.partial(jax.jit, static_argnums=(0, 1))
def sample(
    graphdef: Any,
    length: int,
    params: Any,
    start: Array,
    key: Array,
    temperature: Array | float,
    top_k: Array | int,
) -> Array:
    """`length` tokens after `start` [T]; each is computed from the keys and values that the cache holds of the others."""
    model: Transformer = nnx.merge(graphdef, params)
    logits, cache = model.decode(start[None], model.empty_cache(1, len(start) + length))

    def next_token(carry, key):
        logits, cache = carry
        token = choose(logits[:, -1], key, temperature, top_k)
        return model.decode(token[:, None], cache), token[0]

    _, tokens = lax.scan(next_token, (logits[:, -1:], cache), jax.random.split(key, length))
    return tokens


def choose(logits: Array, key: Array, temperature: Array | float, top_k: Array | int) -> Array:
    """One token per row of `logits` [B, VOCABULARY]."""
    logits = logits.astype(jnp.float32)
    least = jnp.take(jnp.sort(logits, descending=True), top_k - 1, axis=-1)[:, None]  # B 1
    logits = jnp.where(logits >= least, logits, -jnp.inf)
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1))


if __name__ == "__main__":
    main()
