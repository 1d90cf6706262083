"""What memeff is for, in about two minutes on two CPU cores: `python -m models.demo`, or `make demo`.

A table of the memory that attention needs, a language model trained on real text at 4,096 bytes of context, a plot, and
a few lines that the model writes. Everything lands in runs/demo, which is made anew each time.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

import memeff
from models.generate import load, write
from models.train import Settings, train

FOLDER = Path("runs/demo")
LENGTHS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)
ATTENTION = {"jax.nn": jax.nn.dot_product_attention, "memeff": memeff.dot_product_attention}


def main() -> None:
    began = time.perf_counter()
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    print("1. Memory that attention needs beyond its inputs and outputs, forward and gradient")
    print("   (batch 1, 8 heads of 64, float32, causal; compiled, nothing allocated)\n")
    table = memory_table(LENGTHS)

    print("\n2. A language model learns the sources of Python's own library, byte by byte, with 4,096 bytes of context\n")
    settings = Settings(out=str(FOLDER / "model"), layers=2, steps=60, warmup=6, learning_rate=1e-2,
                        eval_every=30, log_every=5, minutes=1.25)  # fmt: skip
    finished = train(settings)
    losses = [line["loss"] for line in map(json.loads, (FOLDER / "model/metrics.jsonl").open()) if "loss" in line]
    note = "" if finished else f" (stopped at {settings.minutes} minutes: this machine is busy or slow)"
    print(f"   loss: {losses[0]:.2f} at first, {losses[-1]:.2f} nats per byte after {len(losses)} steps{note}")

    print(f"\n3. The table as a plot: {plot(LENGTHS, table)}")

    print("\n4. The model goes on from 'def ', after a minute of school:\n")
    text = "def " + write(*load(settings.out), prompt="def ", length=300, temperature=0.6, top_k=20)
    print("\n".join("   | " + line for line in text.splitlines()))
    print(f"\nDone in {time.perf_counter() - began:.0f} s. Next: python -m models.train --help")


def memory_table(lengths: tuple[int, ...]) -> dict[str, list[int | None]]:
    """Prints and gives the temporary bytes of each attention at each length; None where it does not compile."""
    print(f"   {'tokens':>9}" + "".join(f"{name:>13}" for name in ATTENTION) + f"{'jax.nn / memeff':>18}")
    table: dict[str, list[int | None]] = {name: [] for name in ATTENTION}
    for length in lengths:
        reasons = []
        for name, attention in ATTENTION.items():
            try:
                table[name].append(gradient_bytes(attention, length))
            except jax.errors.JaxRuntimeError as error:  # a length too large for the compiler is an answer too
                table[name].append(None)
                reasons.append(f"   {name}: {str(error).splitlines()[0]}")
        theirs, ours = (table[name][-1] for name in ATTENTION)
        times = f"{theirs / ours:,.0f}" if theirs and ours else ""
        print(f"   {length:>9,}{readable(theirs):>13}{readable(ours):>13}{times:>18}", *reasons, sep="\n", flush=True)
    return table


def gradient_bytes(attention: Callable[..., jax.Array], length: int) -> int:
    """Temporary bytes of forward and gradient of causal attention, as compiled."""
    x = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.float32)
    loss = lambda q, k, v: attention(q, k, v, is_causal=True).sum()
    memory = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(x, x, x).compile().memory_analysis()
    assert memory is not None, "every backend of JAX tells"
    return memory.temp_size_in_bytes


def readable(size: int | None) -> str:
    """1,536 MiB as `1.5 GiB`."""
    if size is None:
        return "-"
    power = max(2, min(4, (size.bit_length() - 1) // 10))
    number = size / 2 ** (10 * power)
    return f"{number:,.{0 if number >= 10 else 1}f} {['MiB', 'GiB', 'TiB'][power - 2]}"


def plot(lengths: tuple[int, ...], table: dict[str, list[int | None]]) -> Path:
    """The table as a picture; where it was written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for (name, sizes), style in zip(table.items(), ("o--", "o-"), strict=True):
        axes.loglog(lengths, [float("nan") if size is None else size / 2**30 for size in sizes], style, label=name)
    axes.axhline(80, color="gray", linewidth=0.8)
    axes.text(lengths[0], 80, "a GPU of 80 GiB", color="gray", va="bottom", size="small")
    axes.set(
        xlabel="tokens",
        ylabel="GiB, forward and gradient",
        title="Temporary memory of causal attention, 8 heads of 64, float32",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length // 1024}k" if length < 2**20 else "1M" for length in lengths])
    axes.minorticks_off()
    axes.legend()
    path = FOLDER / "memory_vs_length.png"
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
