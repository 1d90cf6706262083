"""Show what memeff is for, in about two minutes on two CPU cores: `python -m models.demo`, or `make demo`.

The demo prints a table of the memory that attention needs, trains a language model on real text at 4,096 bytes of context,
draws the table, and lets the model write a few lines. All files are in runs/demo, which is made anew each time.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from memeff import bench
from models.files import one_sentence
from models.generate import load, write
from models.train import Settings, train

FOLDER = Path("runs/demo")
LENGTHS = (1024, 4096, 16_384, 65_536, 262_144, 1_048_576)


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m models.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(arguments)  # there are no options but --help
    with one_sentence("models.demo"):
        demonstrate()


def demonstrate() -> None:
    began = time.perf_counter()
    if FOLDER.exists():
        shutil.rmtree(FOLDER)
    FOLDER.mkdir(parents=True)
    print(
        "1. Memory that attention needs beyond its inputs and outputs (batch 1, 8 heads of 64, float32; compiled, nothing"
    )
    print("   allocated; ~: too large to compile, from the growth up to there)\n")
    rows = bench.memory_table(LENGTHS, [bench.Case(0, mode="gradient")])
    print(bench.memory_markdown(rows))

    print(
        "\n2. A language model learns the sources of Python's own library, byte by byte, with 4,096 bytes of context\n"
    )
    settings = Settings(out=str(FOLDER / "model"), layers=2, heads=2, kv_heads=1, steps=130, warmup=8,
                        learning_rate=1e-2, eval_every=65, log_every=10, minutes=1.5)  # fmt: skip
    finished = train(settings)
    lines = [json.loads(line) for line in (FOLDER / "model/metrics.jsonl").open()]
    losses = [line["loss"] for line in lines if "loss" in line]
    note = ""
    if not finished:
        note = f" (stopped at {settings.minutes} minutes: this machine is busy or slow)"
    print(
        f"   loss: {losses[0]:.2f} at first, {losses[-1]:.2f} nats per byte after {len(losses)} steps{note}"
    )

    print(f"\n3. The table as a plot: {plot(rows)}")

    print("\n4. The model goes on from 'def ', after a minute of school:\n")
    text = "def " + write(*load(settings.out), prompt="def ", length=300, temperature=0.7, top_k=20)
    print("\n".join("   | " + line for line in text.splitlines()))
    print(f"\nDone in {time.perf_counter() - began:.0f} s. Next: python -m models.train --help")


def plot(rows: list[bench.Row]) -> Path:
    """Draw the table as a picture, and return where it was written."""
    path = FOLDER / "memory_vs_length.png"
    bench.figure(rows, "temp_bytes").savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    main(sys.argv[1:])
