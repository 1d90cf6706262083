"""Train a Llama of tunix on one long sequence, as it is or with `memeff.replace_attention`.

    python tests/replaced_llama.py --save docs/benchmarks/llama-32k.jsonl
    python tests/replaced_llama.py --unchanged --layers 1 --save docs/benchmarks/llama-32k.jsonl
    python -m memeff.bench report

The model is tunix's Llama 3.2 with 1B parameters, in bfloat16: 16 layers, 32 heads of 64, grouped
by 4, and 128,256 tokens of vocabulary. Its parameters are random. Three steps of AdamW on 32,768
random tokens are the shortest training that shows a loss that falls, and the memory of a step.
The two lines run in processes of their own, because an allocation that failed leaves its traces.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from tunix.models.llama3 import model as llama

import memeff
from memeff.bench.device import machine
from memeff.bench.results import read_lines, save_results

GIB = 2**30


def make_llama(layers):
    """Return the config, the parts of the model that are not trained, and its parameters."""
    config = dataclasses.replace(llama.ModelConfig.llama3p2_1b(), num_layers=layers)

    @nnx.jit
    def create():
        model = llama.Llama3(config, rngs=nnx.Rngs(0))
        for layer in model.layers:  # tunix begins with zeros, for it loads trained parameters
            for module in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
                shape = module.kernel.value.shape
                module.kernel.value = 0.01 * jax.random.normal(jax.random.key(shape[0]), shape)
        return model

    graph, params, rest = nnx.split(create(), nnx.Param, ...)
    params = jax.jit(lambda x: jax.tree.map(lambda y: y.astype(jnp.bfloat16), x))(params)
    return config, (graph, rest), params


def make_loss(fixed):
    """Return the mean loss of the next token, as a function of parameters and token ids [1, T]."""
    graph, rest = fixed

    def loss(params, ids):
        model = nnx.merge(graph, params, rest)
        tokens = ids.shape[1]
        positions = jnp.arange(tokens)[None]
        mask = jnp.tril(jnp.ones((tokens, tokens), bool))[None]
        logits, _ = model(ids, positions, None, mask)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits[:, :-1].astype(jnp.float32), ids[:, 1:]
        )
        return losses.mean()

    return loss


def make_step(loss, optimizer):
    """Return a function that takes one step of training."""

    def step(params, state, ids):
        value, gradient = jax.value_and_grad(loss)(params, ids)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


def train(args):
    """Train, and return the row of the table after each step."""
    config, fixed, params = make_llama(args.layers)
    loss = make_loss(fixed)
    ids = jax.random.randint(jax.random.key(1), (1, args.tokens), 0, config.vocab_size)
    if not args.unchanged:
        print(memeff.find_attention(loss, params, ids))
        loss = memeff.replace_attention(loss, strict=True)
    optimizer = optax.adamw(1e-3)
    state = jax.jit(optimizer.init)(params)
    row = {
        "the line": "none" if args.unchanged else "`loss = memeff.replace_attention(loss)`",
        "layers": str(args.layers),
        "tokens": f"{args.tokens:,}",
    }
    try:
        start = time.perf_counter()
        step = make_step(loss, optimizer).lower(params, state, ids).compile()
        memory = step.memory_analysis()
        assert memory is not None
        row["GiB of a step"] = (
            f"{(memory.temp_size_in_bytes + memory.argument_size_in_bytes) / GIB:.0f}"
        )
        print(f"a step takes {row['GiB of a step']} GiB", end=", ")
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
        losses = []
        for number in range(args.steps):
            start = time.perf_counter()
            params, state, value = step(params, state, ids)
            losses.append(float(value))
            seconds = time.perf_counter() - start
            print(f"step {number}: loss {losses[-1]:.4f}, {seconds:.2f} s", flush=True)
            row["loss"] = ", ".join(f"{x:.2f}" for x in losses)
            row["s a step"] = f"{seconds:.1f}"  # of the last step
            yield row
    except jax.errors.JaxRuntimeError as e:
        print(str(e)[:2000])
        yield {**row, "loss": "out of memory" if "RESOURCE_EXHAUSTED" in str(e) else "error"}


def parse(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--unchanged", action="store_true", help="leave attention as it is written")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save", type=Path, metavar="FILE", help="replace this row")
    return parser.parse_args(arguments)


def description():
    """Return the first line of the results: what they belong to."""
    packages = ("flax", "optax", "google-tunix")
    return {
        "table": "cells",
        "date": datetime.date.today().isoformat(),
        **machine(),
        "command": "python tests/replaced_llama.py",
        "packages": {name: importlib.metadata.version(name) for name in packages},
    }


def save(path, row):
    """Write a row to the results in place of that of the same line."""
    rows = {x["the line"]: x for x in read_lines(path)[1:]} if path.exists() else {}
    rows[row["the line"]] = row
    save_results(path, description(), rows.values())


def main():
    args = parse()
    for row in train(args):
        print(row)
        if args.save:
            save(args.save, row)


if __name__ == "__main__":
    main()
