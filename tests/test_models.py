"""The models: one curve whoever computes attention, runs that resume, options that change nothing, data that is right."""

import contextlib
import dataclasses
import functools
import json
import os
import random
import re
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
from flax import nnx

from memeff import bench
from models import demo, generate, train
from models.data import Batch, ListOps, Refused, Text, expression
from models.train import Settings, loss_and_gradient, parse
from models.transformer import Config, Transformer, positions_in_document

ROOT = Path(__file__).parents[1]
# The same sizes wherever it does not matter: what is compiled once (some 3 s a gradient) then
# serves many tests.
TINY = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "feed_forward": 48}
RUN = TINY | {
    "context": 48,
    "batch": 2,
    "steps": 12,
    "warmup": 2,
    "eval_every": 8,
    "eval_batches": 1,
    "save_every": 5,
}


@functools.cache
def build(**settings):
    return nnx.split(Transformer(Config(**TINY | settings), rngs=nnx.Rngs(3)), nnx.Param)


@functools.cache
def listops() -> Batch:
    """Rows of unequal weight, with several documents in each."""
    batch = ListOps(48, 4).train_batch(0, 0)
    assert len(set(batch.weights.sum(1))) > 1 and batch.weights.sum() > 4
    return batch


@functools.partial(jax.jit, static_argnums=(0, 2))
def measure(graphdef, params, accumulate=1):
    return loss_and_gradient(graphdef, params, listops(), accumulate)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(graphdef, params, tokens, segment_ids=None):
    return nnx.merge(graphdef, params)(tokens, segment_ids)


def tokens_of(*shape, seed=5):
    return jnp.asarray(np.random.default_rng(seed).integers(1, 256, shape))


def curve(out: Path, name="loss") -> dict[int, float]:
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    pairs = [(line["step"], line[name]) for line in lines if name in line]
    assert len(dict(pairs)) == len(pairs), "a step was written twice"
    return dict(pairs)


def close(a, b, tolerance=2e-5):
    """Equal to `tolerance` of the largest entry, leaf by leaf."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1e-2, np.abs(y).max()))


@pytest.fixture(scope="module")
def novel(tmp_path_factory) -> str:
    """Text of our own, so that tests read the same on every machine: this repository's."""
    folder = tmp_path_factory.mktemp("novel")
    for file in sorted((ROOT / "memeff").glob("*.py")):
        (folder / file.name).write_bytes(file.read_bytes())
    return str(folder)


# ---- training


def test_same_curve_as_with_jax_nn_and_it_falls(tmp_path):
    """On Python's library; 528 tokens are more than a tile."""
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


@pytest.fixture(scope="module")
def settings(novel) -> Settings:
    """The same for all runs, each in a folder of its own, so that they are compiled once."""
    return Settings(**RUN, text=(novel,), out="run", minutes=1e6)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, settings) -> Path:
    """A run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    with contextlib.chdir(folder):
        assert train.train(settings)
    return folder / "run"


class Crash(Exception):
    pass


def interrupt(how, patch):
    if how == "crash":
        raise Crash
    if how == "minutes":
        patch.setattr(time, "perf_counter", lambda: 1e9)
    else:
        signal.raise_signal(how)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, "minutes", "crash"])
def test_interrupted_run_resumes_with_the_same_curve(
    how, tmp_path, settings, whole, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    read, handlers = (
        Text.train_batch,
        [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)],
    )
    with monkeypatch.context() as patch:

        def interrupted(self, seed, step):
            if step == 7:
                interrupt(how, patch)
            return read(self, seed, step)

        patch.setattr(Text, "train_batch", interrupted)
        if how == "crash":
            with pytest.raises(Crash):
                train.train(settings)
        else:
            assert not train.train(settings)
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert list(curve(out)) == list(range(1, 8 if how == "crash" else 9))
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # a line that the crash cut
    assert train.train(settings)
    assert f"step {5 if how == 'crash' else 8} of 12" in capsys.readouterr().out
    for name in ("loss", "gradient_norm", "eval_loss", "eval_accuracy"):
        assert curve(out, name) == curve(whole, name)
    assert train.train(settings), "a finished run has nothing left to do"
    assert curve(out) == curve(whole)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_killed_process_resumes_with_the_same_curve(number, tmp_path, novel, whole):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in RUN.items()]
    command = [
        sys.executable,
        "-m",
        "models.train",
        *flags,
        "--text",
        novel,
        "--out",
        str(tmp_path),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    while process.poll() is None and not (
        metrics.exists() and metrics.read_text().count("\n") >= 2
    ):
        time.sleep(0.001)
    process.send_signal(number)
    said = process.communicate()[1]
    if number == signal.SIGINT and process.returncode:  # 0: it was faster than the signal
        assert "the same command resumes where it was" in said
    subprocess.run(command, cwd=ROOT, check=True)
    assert curve(tmp_path) == curve(whole)


def test_damaged_checkpoint_resumes_with_the_same_curve(
    tmp_path, settings, whole, monkeypatch, capsys
):
    """tests/test_files.py damages every file at many places, with a smaller model."""
    shutil.copytree(whole, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    os.truncate("run/checkpoints/12/state.npz", 20_000)
    generate.load("run")
    assert "warning: checkpoint run/checkpoints/12 cannot be read" in capsys.readouterr().err
    assert train.train(settings)
    said = capsys.readouterr()
    assert "warning: checkpoint run/checkpoints/12 cannot be read" in said.err
    assert "step 10 of 12" in said.out
    for name in ("loss", "gradient_norm", "eval_loss", "eval_accuracy"):
        assert curve(tmp_path / "run", name) == curve(whole, name)


def test_metrics_say_what_they_measure(whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    first = lines[0]
    assert first.keys() == {
        "step",
        "loss",
        "accuracy",
        "gradient_norm",
        "tokens_per_second",
        "peak_bytes",
    }
    assert 0 <= first["accuracy"] < 0.1 and 2**26 < first["peak_bytes"] < 2**40
    assert [line["step"] for line in lines if "eval_loss" in line] == [8, 12]


def test_accumulation_equals_the_whole_batch():
    """With rows of unequal weight, where a mean of means would differ."""
    whole = measure(*build())
    assert float(whole[0][0]) > 1
    close(measure(*build(), 4), whole)


def test_optimiser_heeds_each_setting():
    params = {"kernel": jnp.ones((2, 3)), "scale": jnp.ones(3)}
    gradient = jax.tree.map(lambda x: 3 * x, params)

    def third(**changed):
        optimiser = train.make_optimiser(Settings(**{"warmup": 2, "steps": 10} | changed))
        state = optimiser.init(params)
        for scale in (1, 5, 0.2):  # a clipped gradient is another mixture
            update, state = optimiser.update(
                jax.tree.map(lambda x, s=scale: s * x, gradient), state, params
            )
        return update

    usual = third()
    for changed in ({"learning_rate": 1e-2}, {"warmup": 5}, {"clip": 9.0}, {"weight_decay": 0.5}):
        assert not np.allclose(third(**changed)["kernel"], usual["kernel"], rtol=1e-3), changed
    assert not np.allclose(
        third(steps=3, warmup=1)["kernel"], third(steps=30, warmup=1)["kernel"], rtol=1e-3
    )
    np.testing.assert_array_equal(third(weight_decay=0.5)["scale"], usual["scale"])  # matrices only


# ---- the model


def test_attention_by_name_is_one_function():
    """Loss and gradient of packed documents with a window, which is shorter than some of them."""
    ours, theirs = (measure(*build(attention=name, window=5)) for name in ("memeff", "jax.nn"))
    close(ours, theirs)
    reference = logits_of(*build(attention="reference", window=5), tokens_of(1, 20))
    close(reference, logits_of(*build(attention="jax.nn", window=5), tokens_of(1, 20)))


@pytest.mark.parametrize("attention", ["memeff", "jax.nn"])
def test_window_is_heeded(attention):
    """With one layer, a window of w shows w tokens back and no more."""
    tokens = tokens_of(1, 20)
    changed = tokens.at[0, 4].set(tokens[0, 4] % 255 + 1)
    a, b = logits_of(
        *build(layers=1, window=5, attention=attention), jnp.concatenate([tokens, changed])
    )
    assert (np.abs(a - b).max(-1) > 1e-6).nonzero()[0].tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    "options", [{"scan_layers": False}, {"remat": True}, {"remat": True, "scan_layers": False}]
)
def test_remat_and_scan_change_no_number(options):
    close(measure(*build(**options)), measure(*build()))


def test_remat_and_scan_are_heeded():
    def jaxpr(**options):
        graphdef, params = build(**options)
        return str(jax.make_jaxpr(lambda p: loss_and_gradient(graphdef, p, listops(), 1))(params))

    assert "unroll=2" in jaxpr(scan_layers=False) and "unroll=2" not in jaxpr()
    assert "remat" in jaxpr(remat=True) and "remat" not in jaxpr()


@pytest.mark.parametrize("attention", ["memeff", "jax.nn", "reference"])
def test_packed_documents_equal_documents_apart(attention):
    model, params = build(attention=attention)
    tokens = tokens_of(2, 15)
    packed = logits_of(
        model, params, tokens.reshape(1, 30), jnp.repeat(jnp.array([[4, 9]]), 15, axis=1)
    )
    close(packed.reshape(2, 15, -1), logits_of(model, params, tokens), 1e-6)


def test_positions_start_again_in_each_document():
    ids = jnp.array([[4, 4, 4, 7, 7, 2], [0, 1, 1, 1, 1, 1]])
    assert positions_in_document(ids).tolist() == [[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]]


def test_the_model_turns_by_positions_in_the_document(monkeypatch):
    """What distances alone cannot show."""

    def caught(config, positions):
        raise LookupError(positions.tolist())

    monkeypatch.setattr("models.transformer.rotation", caught)
    model = nnx.merge(*build())
    with pytest.raises(LookupError, match=re.escape("[[0, 1, 0]]")):
        model(tokens_of(1, 3), jnp.array([[1, 1, 2]]))


def test_decoding_equals_the_full_forward():
    """Token by token, and after a prompt that is read at once."""
    graphdef, params = build(window=4)
    tokens = tokens_of(2, 13)
    full = logits_of(graphdef, params, tokens)
    decode = jax.jit(
        lambda params, tokens, cache: nnx.merge(graphdef, params).decode(tokens, cache)
    )
    for pieces in ([1] * 13, [6] + [1] * 7):
        cache, at, logits = nnx.merge(graphdef, params).empty_cache(2, 17), 0, []
        for size in pieces:
            found, cache = decode(params, tokens[:, at : at + size], cache)
            logits.append(found)
            at += size
        assert cache.length == 13
        close(jnp.concatenate(logits, axis=1), full, 2e-6)


def test_bfloat16_computes_in_bfloat16_with_float32_parameters():
    graphdef, params = build(dtype="bfloat16")
    tokens = tokens_of(1, 30)
    logits = logits_of(graphdef, params, tokens)
    assert logits.dtype == jnp.bfloat16
    close(logits, logits_of(*build(), tokens), 0.03)
    _, gradient = jax.eval_shape(
        lambda params: loss_and_gradient(graphdef, params, listops(), 1), params
    )
    assert {x.dtype for x in jax.tree.leaves((params, gradient))} == {jnp.dtype("float32")}


def square_arrays(text: str, least: int) -> set[str]:
    """Shapes in HLO with two dims of `least` or more."""
    return {
        s
        for s in re.findall(r"\[(\d+(?:,\d+)+)\]", text)
        if sum(int(d) >= least for d in s.split(",")) >= 2
    }


@pytest.mark.parametrize("options", [{}, {"remat": True}, {"attention": "jax.nn"}])
def test_no_square_array_in_a_training_step(options):
    """No array of T times T; jax.nn shows that the test can fail."""
    settings = Settings(**TINY | options, context=1024)
    graphdef, params = nnx.split(Transformer(settings, rngs=nnx.Rngs(0)), nnx.Param)
    state = params, train.make_optimiser(settings).init(params)
    text = (
        train.train_step.lower(settings, graphdef, state, ListOps(1024, 1).train_batch(0, 0))
        .compile()
        .as_text()
    )
    assert bool(square_arrays(text, 1024)) == (options.get("attention") == "jax.nn")


@pytest.mark.slow
def test_trains_at_4096_tokens(tmp_path):
    settings = Settings(
        context=4096, steps=6, warmup=1, layers=2, eval_batches=1, out=str(tmp_path)
    )
    assert train.train(settings)
    losses = list(curve(tmp_path).values())
    assert losses[-1] < losses[0] - 1


# ---- settings


def test_every_setting_has_a_flag():
    given = {
        "layers": 1,
        "width": 16,
        "heads": 2,
        "kv_heads": 1,
        "feed_forward": 8,
        "window": 7,
        "attention": "jax.nn",
        "dtype": "bfloat16",
        "remat": True,
        "scan_layers": False,
        "out": "there",
        "task": "listops",
        "text": ("a", "b"),
        "context": 64,
        "batch": 6,
        "accumulate": 3,
        "steps": 9,
        "learning_rate": 0.5,
        "warmup": 4,
        "weight_decay": 0.25,
        "clip": 2.0,
        "eval_every": 3,
        "eval_batches": 2,
        "save_every": 8,
        "log_every": 11,
        "minutes": 1.5,
        "seed": 12,
    }
    flags = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", *(value if isinstance(value, tuple) else [str(value)])]
    assert dataclasses.asdict(parse(flags)) == given
    assert parse([]) == Settings()
    assert all(given[name] != value for name, value in dataclasses.asdict(Settings()).items())


REFUSED_SETTINGS = [
    ({"layers": 0}, "layers=0: it must be at least 1."),
    ({"heads": 4, "kv_heads": 3}, "heads=4 must be a multiple of kv_heads=3."),
    ({"width": 36}, "width=36 must be a multiple of 8, twice heads: rotary positions turn pairs."),
    (
        {"window": -1},
        "window=-1 counts tokens and must be >= 0; leave it out for the whole document.",
    ),
    ({"steps": 0}, "steps=0: it must be at least 1."),
    ({"batch": 4, "accumulate": 3}, "batch=4 must be a multiple of accumulate=3."),
    ({"warmup": 200}, "warmup=200 must be >= 0 and less than steps=200."),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED_SETTINGS)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(Refused) as refusal:
        Settings(**settings)
    assert str(refusal.value) == message


def test_the_script_refuses_in_a_sentence(tmp_path, novel, settings, whole):
    with pytest.raises(SystemExit) as exit:
        train.main(["--text", str(tmp_path / "none.txt"), "--out", str(tmp_path)])
    message = (
        f"--text {tmp_path}/none.txt: no such file or folder; give text files or folders of them."
    )
    assert str(exit.value) == "models.train: " + message
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (RUN | {"layers": 3}).items()]
    with pytest.raises(SystemExit) as exit:
        train.main([*flags, "--text", novel, "--out", str(whole)])
    assert str(exit.value) == (
        f"models.train: {whole} holds a run with layers=2, and this one has 3: "
        "give another --out to begin anew, or the same settings to resume."
    )
    with pytest.raises(SystemExit) as exit:
        generate.main(["--checkpoint", str(tmp_path / "nowhere")])
    assert "nowhere holds no run: give the folder that was --out of" in str(exit.value)


# ---- data


def test_rows_are_the_documents_end_to_end(tmp_path):
    """Against the stream written out: byte 0 and a file, byte 0 and the next; windows that cross several documents."""
    contents = [bytes([65 + i]) * size for i, size in enumerate((1, 300, 2, 1, 97, 800, 3))]
    for i, content in enumerate(contents):
        (tmp_path / f"{i}.txt").write_bytes(content)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_bytes(b"secret")
    text = Text((str(tmp_path),), 24, 3)
    stream = b"".join(b"\0" + path.read_bytes() for path in text.files)
    assert sorted(stream) == sorted(b"\0" * 7 + b"".join(contents))
    for start in range(len(stream) - 25 + 1):
        assert text._read(start).tobytes() == stream[start : start + 25]
    trained = {row.tobytes() for step in range(200) for row in text.train_batch(0, step).tokens}
    assert all(row in stream[: text.kept_from] for row in trained)
    kept = {row.tobytes() for i in range(20) for row in text.eval_batch(i).tokens}
    assert all(row in stream[text.kept_from :] for row in kept)
    assert (
        str(text)
        == f"{len(stream):,} bytes of text in 7 documents, one byte in 20 kept for evaluation"
    )


def test_batches_depend_on_seed_and_step_alone(novel):
    for make in (lambda: Text((novel,), 32, 2), lambda: ListOps(40, 2)):
        a, b = make().train_batch(1, 7), make().train_batch(1, 7)
        assert a.tokens.dtype == np.uint8 and a.weights.dtype == np.float32
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.weights, b.weights)
        for other in (make().train_batch(1, 8), make().train_batch(2, 7), make().eval_batch(7)):
            assert (a.tokens != other.tokens).any()


def test_default_text_is_the_library_of_this_python():
    text = Text((), 4096, 1)
    assert text.total > 5e6
    assert not any("site-packages" in path.parts or path.suffix == ".pyc" for path in text.files)
    assert {"json", "typing.py"} < {part for path in text.files for part in path.parts}


def test_text_that_cannot_be_learnt_from_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/picture").write_bytes(b"\0\1\2")
    cases = {
        "none": "no such file or folder; give text files or folders of them.",
        "empty.txt": "the file is empty; give a file with text in it.",
        "folder": "the folder holds no text; give a folder with text files in it.",
    }
    for name, message in cases.items():
        with pytest.raises(Refused) as refusal:
            Text((str(tmp_path / name),), 16, 1)
        assert str(refusal.value) == f"--text {tmp_path / name}: {message}"
    with pytest.raises(Refused) as refusal:
        Text((str(tmp_path / "short.txt"),), 16, 1)
    assert str(refusal.value) == (
        "the text has 11 bytes, and --context 16 needs 340, since one in 20 is kept for evaluation: "
        "give more with --text or a smaller --context."
    )
    with pytest.raises(
        Refused,
        match="--task listops needs --context 32 or more for an expression and its answer; got 16.",
    ):
        ListOps(16, 1)


def test_a_python_without_sources_is_told_to_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(Refused) as refusal:
        Text((), 16, 1)
    assert (
        str(refusal.value)
        == f"this Python keeps no sources in {tmp_path}: give text of your own with --text."
    )


def evaluate_listops(text: str) -> int:
    """A stack machine, written apart from `expression`."""
    stack: list[list] = [[]]
    for token in text:
        if token == "]":
            operator, *values = stack.pop()
            values = sorted(map(int, values))
            n = len(values)
            median = values[n // 2] if n % 2 else (values[n // 2 - 1] + values[n // 2]) // 2
            stack[-1].append(
                {"m": values[0], "M": values[-1], "D": median, "S": sum(values) % 10}[operator]
            )
        elif token.isdigit():
            stack[-1].append(token)
        else:
            stack.append([token])
    ((answer,),) = stack
    return int(answer)


def test_listops_answers_are_right():
    assert [evaluate_listops(x) for x in ("M29m47]0]", "D914]", "D1458]", "S787]")] == [9, 4, 4, 2]
    task = ListOps(2100, 3)
    batch = task.train_batch(0, 0)
    answers = []
    for row, weights in zip(batch.tokens, batch.weights, strict=True):
        documents = [d for d in row.tobytes().decode().split("\0") if d]
        places = weights.nonzero()[0]
        assert len(places) == len(documents) >= 1
        for document, place in zip(documents, places, strict=True):
            text, answer = document.split("=")
            assert 500 <= len(text) <= 2000
            assert evaluate_listops(text) == int(answer)
            assert chr(row[place]) == "=" and chr(row[place + 1]) == answer
            answers.append(answer)
    assert len(set(answers)) > 1
    text: list[str] = []
    for seed in range(300):
        text.clear()
        assert expression(random.Random(seed), text, 2000, 1) == evaluate_listops("".join(text))


# ---- generating, and the demonstration


def test_generates_from_a_checkpoint(whole, capsys):
    generate.main(
        [
            "--checkpoint",
            str(whole),
            "--prompt",
            "def ",
            "--length",
            "12",
            "--temperature",
            "1",
            "--top-k",
            "40",
        ]
    )
    assert capsys.readouterr().out.startswith("def ")
    graphdef, params = generate.load(str(whole))
    write = functools.partial(generate.write, graphdef, params, prompt="def ", length=12)
    assert write(temperature=0) == write(temperature=1.0, top_k=1, seed=7)
    assert len({write(temperature=2.0, seed=seed) for seed in range(3)}) == 3
    start = jnp.asarray(list(b"\0def "))
    greedy = generate.sample(graphdef, 12, params, start, jax.random.key(0), 0.0, 256)
    logits = logits_of(graphdef, params, jnp.concatenate([start, greedy])[None, :-1])
    assert jnp.argmax(logits[0, 4:], -1).tolist() == greedy.tolist()
    for wrong, message in (
        ({"length": 0}, "length=0: it must be at least 1 byte."),
        (
            {"temperature": -1.0},
            "temperature=-1.0: it must be >= 0; 0 takes the likeliest byte each time.",
        ),
        ({"top_k": 0}, "top_k=0: it must be at least 1; leave it out to choose among all bytes."),
    ):
        with pytest.raises(Refused) as refusal:
            write(**{"temperature": 1.0} | wrong)
        assert str(refusal.value) == message


def test_a_run_without_checkpoint_cannot_generate(tmp_path):
    train.check_same_run(Settings(**TINY, out=str(tmp_path)), "data")
    with pytest.raises(
        Refused,
        match="has no checkpoint yet: `python -m models.train` writes one every --save-every steps",
    ):
        generate.load(str(tmp_path))


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
    assert "nats per byte after" in run.stdout and "Done in" in run.stdout


def test_choosing_heeds_top_k_and_temperature():
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))
    draws = lambda temperature, top_k: {
        int(generate.choose(logits, jax.random.key(i), temperature, top_k)[0]) for i in range(40)
    }
    assert draws(1.0, 4) == {0, 1, 2, 3} and draws(1.0, 2) == {1, 3}
    assert draws(0.0, 4) == draws(0.01, 4) == {1}
