"""Provide a run that takes milliseconds to the tests of its files. No test is here.

A few numbers replace the model and its training step, so that each point of a run can be tried.
The loss depends on all earlier steps. tests/test_training.py resumes runs of the real model.
"""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import generate, train
from models.data import Text
from models.train import Settings

OUT = Path("run")
METRICS = OUT / "metrics.jsonl"
SETTINGS = {
    "out": "run",
    "text": ("text.txt",),
    "context": 8,
    "steps": 7,
    "warmup": 1,
    "eval_every": 3,
    "eval_batches": 1,
    "save_every": 2,
    "log_every": 99,
}


class Model(nnx.Module):
    def __init__(self, config, *, rngs):
        self.weights = nnx.Param(jnp.zeros(37))


def train_step(settings, graphdef, state, batch):
    mean = batch.tokens.mean()
    state = jax.tree.map(lambda x: np.asarray(x) + np.asarray(mean, x.dtype), state)
    return state, {"loss": sum_of_leaves(state)}


def evaluate(settings, graphdef, params, task):
    return {"eval_loss": sum_of_leaves(params), "eval_accuracy": 0.5}


def sum_of_leaves(tree) -> float:
    return float(sum(np.sum(x) for x in jax.tree.leaves(tree)))


def enter_workplace(folder, monkeypatch) -> None:
    """Enter an empty folder, write a text there, and make training cheap."""
    monkeypatch.chdir(folder)
    Path("text.txt").write_bytes(bytes(range(32, 127)) * 6)
    monkeypatch.setattr(train, "Transformer", Model)
    monkeypatch.setattr(generate, "Transformer", Model)
    monkeypatch.setattr(train, "train_step", train_step)
    monkeypatch.setattr(train, "evaluate", evaluate)
    # waiting for the disk is most of the time
    monkeypatch.setattr(os, "fsync", lambda number: None)


def run(**changed) -> bool:
    return train.train(Settings(**SETTINGS | changed))


def history(name="loss", path=METRICS) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [(record["step"], record[name]) for record in records if name in record]


def histories() -> tuple:
    return history("loss"), history("eval_loss")


def run_uninterrupted() -> tuple:
    """Return the histories of a run that nothing interrupts, and remove its folder."""
    assert run()
    expected = histories()
    losses, eval_losses = expected
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, _ in eval_losses] == [3, 6, 7]
    assert sorted(os.listdir("run/checkpoints")) == ["6", "7"]
    shutil.rmtree(OUT)
    return expected


def lines_of_the_checkpoint() -> set[bytes]:
    """Return the lines of metrics.jsonl that the newest checkpoint rests on; none may be lost."""
    newest = max(train.saved_steps("run"), default=0)
    lines = METRICS.read_bytes().splitlines() if METRICS.exists() else []
    needed = set()
    for line in lines:
        complete = line.startswith(b'{"step": ') and line.endswith(b"}") and b"loss" in line
        if complete and json.loads(line)["step"] <= newest:
            needed.add(line)
    return needed


def assert_resumes(expected) -> None:
    """Check that the run goes on to its end, and keeps the lines that it had.

    `expected` are the histories of the uninterrupted run.
    """
    before = lines_of_the_checkpoint()
    assert run()
    assert histories() == expected
    assert before <= set(METRICS.read_bytes().splitlines())
    # checkpoint 4 remains if the run was stopped just before its removal
    names = {path.name for path in OUT.rglob("*")} - {"4"}
    assert names == {"6", "7", "checkpoints", "metrics.jsonl", "run.json", "state.npz"}


def stop_after(step, monkeypatch):
    """Run until `step` and leave the folder as a crash would."""
    train_batch = Text.train_batch

    def crash(self, seed, number):
        if number == step:
            raise KeyboardInterrupt
        return train_batch(self, seed, number)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "train_batch", crash)
        with pytest.raises(KeyboardInterrupt):
            run()


def check_sentence(text: str, *parts: str) -> None:
    assert "\n" not in text
    assert text.endswith(".")
    for part in parts:
        assert part in text
