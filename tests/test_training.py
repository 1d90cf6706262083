"""Train the model, interrupt and resume runs, and generate from them.

Runs have the same curve whichever function computes attention.
"""

import contextlib
import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from model_cases import ROOT, TINY, write_novel

from memeff import bench
from models import demo, generate, train
from models.data import Refused, Text
from models.train import Settings

pytestmark = pytest.mark.once

RUN = TINY | {
    "context": 48,
    "batch": 2,
    "steps": 12,
    "warmup": 2,
    "eval_every": 8,
    "eval_batches": 1,
    "save_every": 5,
}
CURVES = ("loss", "gradient_norm", "eval_loss", "eval_accuracy")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def curve(out: Path, name="loss") -> dict[int, float]:
    """Return the values of `name` in metrics.jsonl by step."""
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    pairs = [(record["step"], record[name]) for record in records if name in record]
    assert len(dict(pairs)) == len(pairs), "a step was written twice"
    return dict(pairs)


def as_flags(settings: dict) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


@pytest.fixture(scope="module")
def novel(tmp_path_factory) -> str:
    return write_novel(tmp_path_factory.mktemp("novel"))


@pytest.fixture(scope="module")
def settings(novel) -> Settings:
    """Return the settings of all runs. The runs have folders of their own, and compile once."""
    return Settings(**RUN, text=(novel,), out="run", minutes=1e6)


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, settings) -> Path:
    """Return the folder of a run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("full")
    with contextlib.chdir(folder):
        assert train.train(settings)
    return folder / "run"


# ---- learning


def test_same_curve_as_with_jax_nn_and_it_falls(tmp_path):
    """Learn Python's library. The context of 528 tokens is more than a tile."""
    curves = {}
    for attention in ("memeff", "jax.nn"):
        settings = Settings(
            **TINY | {"layers": 1, "heads": 1, "kv_heads": 1},
            context=528,
            steps=50,
            warmup=5,
            learning_rate=1e-2,
            eval_every=99,
            eval_batches=1,
            save_every=99,
            out=str(tmp_path / attention),
            attention=attention,
        )
        assert train.train(settings)
        curves[attention] = list(curve(tmp_path / attention).values())
    np.testing.assert_allclose(curves["memeff"], curves["jax.nn"], rtol=0, atol=1e-3)
    assert len(curves["memeff"]) == 50
    assert curves["memeff"][0] > 5.3
    assert np.mean(curves["memeff"][-10:]) < 3.2


@pytest.mark.slow
def test_trains_at_4096_tokens(tmp_path):
    settings = Settings(
        context=4096, steps=6, warmup=1, layers=2, eval_batches=1, out=str(tmp_path)
    )
    assert train.train(settings)
    losses = list(curve(tmp_path).values())
    assert losses[-1] < losses[0] - 1


def test_metrics_say_what_they_measure(full_run):
    lines = (full_run / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    first = records[0]
    assert first.keys() == {
        "step",
        "loss",
        "accuracy",
        "gradient_norm",
        "tokens_per_second",
        "peak_bytes",
    }
    assert 0 <= first["accuracy"] < 0.1
    assert 2**26 < first["peak_bytes"] < 2**40
    assert [record["step"] for record in records if "eval_loss" in record] == [8, 12]


def test_optimiser_heeds_each_setting():
    params = {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(3)}

    def third_update(**changed):
        optimiser = train.make_optimiser(Settings(**{"warmup": 2, "steps": 10} | changed))
        state = optimiser.init(params)
        for factor in (1, 5, 0.2):  # a clipped gradient is another mixture
            gradient = {name: factor * (3 * x) for name, x in params.items()}
            update, state = optimiser.update(gradient, state, params)
        return update

    usual = third_update()
    for changed in (
        {"learning_rate": 1e-2},
        {"width": 256},
        {"warmup": 5},
        {"clip": 9.0},
        {"weight_decay": 0.5},
    ):
        kernel = third_update(**changed)["kernel"]
        assert not np.allclose(kernel, usual["kernel"], rtol=1e-3), changed
    few_steps = third_update(steps=3, warmup=1)["kernel"]
    many_steps = third_update(steps=30, warmup=1)["kernel"]
    assert not np.allclose(few_steps, many_steps, rtol=1e-3)
    # weight decay is for matrices only
    np.testing.assert_array_equal(third_update(weight_decay=0.5)["scale"], usual["scale"])


# ---- interruption


class Crash(Exception):
    pass


def interrupt(cause, patch):
    if cause == "crash":
        raise Crash
    if cause == "minutes":
        patch.setattr(time, "perf_counter", lambda: 1e9)
    else:
        signal.raise_signal(cause)


CAUSES = [signal.SIGINT, signal.SIGTERM, "minutes", "crash"]


@pytest.mark.parametrize("cause", few(CAUSES, [signal.SIGTERM, "crash"]))
def test_interrupted_run_resumes_with_the_same_curve(
    cause, tmp_path, settings, full_run, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    train_batch = Text.train_batch
    handlers = [signal.getsignal(number) for number in SIGNALS]
    with monkeypatch.context() as patch:

        def interrupted(self, seed, step):
            if step == 7:
                interrupt(cause, patch)
            return train_batch(self, seed, step)

        patch.setattr(Text, "train_batch", interrupted)
        if cause == "crash":
            with pytest.raises(Crash):
                train.train(settings)
        else:
            assert not train.train(settings)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    assert list(curve(out)) == list(range(1, 8 if cause == "crash" else 9))
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # a line that the crash cut
    assert train.train(settings)
    assert f"step {5 if cause == 'crash' else 8} of 12" in capsys.readouterr().out
    for name in CURVES:
        assert curve(out, name) == curve(full_run, name)
    assert train.train(settings), "a finished run has nothing left to do"
    assert curve(out) == curve(full_run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_killed_process_resumes_with_the_same_curve(number, tmp_path, novel, full_run):
    command = [sys.executable, "-m", "models.train", *as_flags(RUN)]
    command += ["--text", novel, "--out", str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= 2:
            break
        time.sleep(0.001)
    process.send_signal(number)
    _, errors = process.communicate()
    if number == signal.SIGINT and process.returncode:  # 0: it was faster than the signal
        assert "the same command resumes where it was" in errors
    subprocess.run(command, cwd=ROOT, check=True)
    assert curve(tmp_path) == curve(full_run)


def test_damaged_checkpoint_resumes_with_the_same_curve(
    tmp_path, settings, full_run, monkeypatch, capsys
):
    """Damage one checkpoint. tests/test_damaged_files.py damages each file at many places."""
    shutil.copytree(full_run, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    os.truncate("run/checkpoints/12/state.npz", 20_000)
    generate.load("run")
    assert "warning: checkpoint run/checkpoints/12 cannot be read" in capsys.readouterr().err
    assert train.train(settings)
    printed = capsys.readouterr()
    assert "warning: checkpoint run/checkpoints/12 cannot be read" in printed.err
    assert "step 10 of 12" in printed.out
    for name in CURVES:
        assert curve(tmp_path / "run", name) == curve(full_run, name)


def test_the_script_refuses_in_a_sentence(tmp_path, novel, settings, full_run):
    with pytest.raises(SystemExit) as exit:
        train.main(["--text", str(tmp_path / "none.txt"), "--out", str(tmp_path)])
    message = (
        f"--text {tmp_path}/none.txt: no such file or folder; give text files or folders of them."
    )
    assert str(exit.value) == "models.train: " + message
    flags = as_flags(RUN | {"layers": 3})
    with pytest.raises(SystemExit) as exit:
        train.main([*flags, "--text", novel, "--out", str(full_run)])
    assert str(exit.value) == (
        f"models.train: {full_run} holds a run with layers=2, and this one has 3: "
        "give another --out to begin anew, or the same settings to resume."
    )
    with pytest.raises(SystemExit) as exit:
        generate.main(["--checkpoint", str(tmp_path / "nowhere")])
    assert "nowhere holds no run: give the folder that was --out of" in str(exit.value)


# ---- generating


@pytest.mark.slow
def test_generates_from_a_checkpoint(full_run, capsys):
    flags = ["--prompt", "def ", "--length", "40", "--temperature", "1", "--top-k", "40"]
    generate.main(["--checkpoint", str(full_run), *flags])
    printed = capsys.readouterr()
    assert printed.out.startswith("def ")  # a text may end before anything was timed
    generate.show(iter([["a"], ["b"]]), ["def "])
    printed = capsys.readouterr()
    assert printed.out == "def ab\n"
    assert printed.err.endswith(" tokens per second\n")
    generate.main(["--checkpoint", str(full_run), *flags, "--prompt", "x", "--top-p", "0.9"])
    first, second = capsys.readouterr().out.split("\n----\n")
    assert first.startswith("def ") and second.startswith("x")
    graphdef, params = generate.load(str(full_run))
    write = functools.partial(generate.write, graphdef, params, prompt="def ", length=12)
    assert write(temperature=0) == write(temperature=1.0, top_k=1, seed=7)
    assert write(temperature=0) == write(temperature=1.0, top_p=1e-6, seed=7)
    assert len({write(temperature=2.0, seed=seed) for seed in range(3)}) == 3
    for wrong, message in (
        ({"length": 0}, "length=0: it must be at least 1 byte."),
        (
            {"temperature": -1.0},
            "temperature=-1.0: it must be >= 0; 0 takes the likeliest byte each time.",
        ),
        ({"top_k": 0}, "top_k=0: it must be at least 1; leave it out to choose among all bytes."),
        (
            {"top_p": 0.0},
            "top_p=0.0: it must be above 0 and at most 1, which means all bytes.",
        ),
        (
            {"temperature": math.nan},
            "temperature=nan: it must be >= 0; 0 takes the likeliest byte each time.",
        ),
        ({"seed": 2**63}, "seed=9223372036854775808: it must fit in 64 bits."),
        ({"length": 2**31 - 9}, "length=2147483639: with the prompt it must be below 2**31 bytes."),
        ({"memory_limit": "0"}, "memory_limit=0: bytes must be > 0; use None for no limit."),
        (
            {"prompt": "\ud800"},
            "prompt='\\ud800' is not UTF-8: give it in UTF-8.",
        ),
    ):
        with pytest.raises(Refused) as refusal:
            write(**{"temperature": 1.0} | wrong)
        assert str(refusal.value) == message


def test_a_run_without_checkpoint_cannot_generate(tmp_path):
    train.check_same_run(Settings(**TINY, out=str(tmp_path)), "data")
    message = "has no checkpoint yet: `python -m models.train` writes one every --save-every steps"
    with pytest.raises(Refused, match=message):
        generate.load(str(tmp_path))


def test_choosing_heeds_top_k_top_p_and_temperature():
    logits = jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3]))

    def draws(*sampling):
        keys = jax.vmap(jax.random.key)(jnp.arange(40))
        choose = jax.vmap(generate.choose, (None, 0, None))
        return set(choose(logits, keys, generate.Sampling(*sampling)).tolist())

    assert draws(1.0) == {0, 1, 2, 3}
    assert draws(1.0, 2) == {1, 3}
    assert draws(1.0, 4, 0.8) == {1, 2, 3}
    assert draws(1.0, 4, 0.65) == {1, 3}
    assert draws(1.0, 4, 0.01) == {1}
    assert draws(0.0) == {1}
    assert draws(0.01) == {1}


# ---- the demonstration


def test_demonstration_plot(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    rows = bench.memory_table((256, 1024), [bench.Case(0, mode="gradient")])
    assert demo.plot(rows).stat().st_size > 10_000


@pytest.mark.slow
def test_demonstration_runs(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "models.demo"], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "nats per byte after" in run.stdout
    assert "Done in" in run.stdout
