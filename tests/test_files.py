"""Files of a run: every write cut short at every point, every file damaged, then the run resumes.

The model and its training step are replaced by a few numbers, so that a whole run takes milliseconds and each point can be
tried. The loss depends on all earlier steps. tests/test_models.py resumes runs of the real model.
"""

import contextlib
import errno
import io
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import demo, files, generate, train
from models.data import Refused, Text
from models.train import Settings

ROOT = Path(__file__).parents[1]
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
    state = jax.tree.map(lambda x: np.asarray(x) + np.asarray(batch.tokens.mean(), x.dtype), state)
    return state, {"loss": float(sum(np.sum(x) for x in jax.tree.leaves(state)))}


def evaluate(settings, graphdef, params, task):
    return {
        "eval_loss": float(sum(np.sum(x) for x in jax.tree.leaves(params))),
        "eval_accuracy": 0.5,
    }


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    """Enter an empty folder with a text, where training is cheap."""
    monkeypatch.chdir(tmp_path)
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
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["step"], line[name]) for line in lines if name in line]


def histories() -> tuple:
    return history("loss"), history("eval_loss")


@pytest.fixture
def whole(workplace) -> tuple:
    """The history of a run that nothing interrupts."""
    assert run()
    expected = histories()
    assert [step for step, _ in expected[0]] == [1, 2, 3, 4, 5, 6, 7]
    assert [step for step, _ in expected[1]] == [3, 6, 7]
    assert sorted(os.listdir("run/checkpoints")) == ["6", "7"]
    shutil.rmtree(OUT)
    return expected


def lines_of_the_checkpoint() -> set[bytes]:
    """Lines of metrics.jsonl that the newest checkpoint rests on: none may be lost."""
    newest = max(train.saved_steps("run"), default=0)
    lines = METRICS.read_bytes().splitlines() if METRICS.exists() else []
    whole = [
        line
        for line in lines
        if line.startswith(b'{"step": ') and line.endswith(b"}") and b"loss" in line
    ]
    return {line for line in whole if json.loads(line)["step"] <= newest}


def resumes(whole) -> None:
    """The run goes on to its end with the history of the uninterrupted run, and keeps the lines that it had."""
    before = lines_of_the_checkpoint()
    assert run()
    assert histories() == whole
    assert before <= set(METRICS.read_bytes().splitlines())
    # stopped just before it would have been removed
    left = {path.name for path in OUT.rglob("*")} - {"4"}
    assert left == {"6", "7", "checkpoints", "metrics.jsonl", "run.json", "state.npz"}


# ---- every point at which a run changes the disk


@contextlib.contextmanager
def watching(watcher, monkeypatch):
    """Call `watcher` before each change of the run's folder that Python makes, and before each wait for the disk."""

    opener = io.open

    def watched(function):
        def call(path, *arguments, **options):
            reads = function is opener and (arguments[:1] or ("r",))[0] in ("r", "rb")
            if not reads and ("run" in Path(path).parts or "dir_fd" in options):
                watcher()
            return function(path, *arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "mkdir", "unlink", "rmdir", "truncate"):
            patch.setattr(os, name, watched(getattr(os, name)))
        patch.setattr(io, "open", watched(io.open))  # pathlib calls it by this name
        patch.setattr(os, "fsync", lambda number: watcher())
        yield


def stop_after(step, monkeypatch):
    """Run until `step` and leave the folder as a crash would."""
    read = Text.train_batch

    def crash(self, seed, number):
        if number == step:
            raise KeyboardInterrupt
        return read(self, seed, number)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "train_batch", crash)
        with pytest.raises(KeyboardInterrupt):
            run()


def cut_unfinished_files():
    """Cut the files that a kill may leave in part: temporary ones, and the last line of metrics.jsonl."""
    for path in [*OUT.rglob("*.tmp"), *OUT.rglob("unfinished/*")]:
        os.truncate(path, path.stat().st_size // 2)
    if METRICS.exists():
        with METRICS.open("a") as file:
            file.write('{"step": 7, "lo')


@pytest.mark.parametrize("begun", [False, True])
def test_killed_at_any_point(begun, whole, monkeypatch):
    """A copy of the folder before each change is what kill -9 would leave there."""
    if begun:
        stop_after(5, monkeypatch)
    copies = []

    def copy():
        copies.append(Path(f"copy{len(copies)}"))
        if OUT.exists():
            shutil.copytree(OUT, copies[-1])

    with watching(copy, monkeypatch):
        run()
    assert len(copies) > (20 if begun else 40)
    for source in copies:
        for cut in (False, True):
            shutil.rmtree(OUT)
            if source.exists():
                shutil.copytree(source, OUT)
                if cut:
                    cut_unfinished_files()
            else:
                OUT.mkdir()
            resumes(whole)


@pytest.mark.parametrize("begun", [False, True])
def test_full_disk_at_any_point(begun, whole, monkeypatch, capsys):
    """The disk takes nothing from the n-th change on: one sentence, no line lost, and the run goes on when there is room."""
    if begun:
        stop_after(5, monkeypatch)
        shutil.copytree(OUT, "begun")
        assert len(history()) == 5 and train.saved_steps("run") == [4, 2]
    for n in range(1000):
        shutil.rmtree(OUT, ignore_errors=True)
        if begun:
            shutil.copytree("begun", OUT)
        before = lines_of_the_checkpoint()
        count = iter(range(1000))

        def full(n=n, count=count):
            if next(count) >= n:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with watching(full, monkeypatch):
            try:
                finished = run()
            except Refused as refusal:
                finished = False
                check_sentence(str(refusal), "cannot write run")
                assert "(No space left on device)" in str(refusal)
        if finished:
            break
        assert METRICS.exists() or not before
        assert not before or before <= set(METRICS.read_bytes().splitlines())
        resumes(whole)
    assert n > (20 if begun else 40)
    assert "Traceback" not in "".join(capsys.readouterr())


def check_sentence(text: str, *parts: str) -> None:
    assert "\n" not in text and text.endswith(".")
    for part in parts:
        assert part in text


@pytest.mark.parametrize("begun", [False, True])
def test_writes_that_the_system_cuts(begun, whole, monkeypatch, capsys):
    """The kernel takes `limit` bytes of a file and refuses the next, which leaves a part of it, as on a full disk.

    `capsys` keeps what is printed in memory, where the limit does not count.
    """
    if begun:
        stop_after(5, monkeypatch)
        shutil.copytree(OUT, "begun")
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for limit in (0, 1, 200, 400, 600, 900, 1200, 1500):
        shutil.rmtree(OUT, ignore_errors=True)
        if begun:
            shutil.copytree("begun", OUT)
        before = lines_of_the_checkpoint()
        assert bool(before) == begun
        with pytest.raises(Refused) as refusal:
            try:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
                run()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        check_sentence(str(refusal.value), "cannot write run/", "(File too large)", "then goes on")
        assert not begun or before <= set(METRICS.read_bytes().splitlines())
        resumes(whole)


def test_the_history_is_on_the_disk_before_the_checkpoint(workplace, monkeypatch):
    """Else a power cut leaves a checkpoint whose steps nobody measures again."""
    order = []
    monkeypatch.setattr(train, "sync", lambda path: order.append(path.name))
    monkeypatch.setattr(train, "save", lambda out, step, *rest: order.append(step))
    run()
    assert order == ["metrics.jsonl", 2, "metrics.jsonl", 4, "metrics.jsonl", 6, "metrics.jsonl", 7]
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number)))
    files.sync(METRICS)
    files.replace_file(Path("new"), b"contents")
    for found, path in zip(synced, (METRICS, Path("new")), strict=True):
        expected = path.stat()
        assert (found.st_ino, found.st_size) == (expected.st_ino, expected.st_size)


# ---- damaged files


def damaged(contents: bytes) -> list[bytes]:
    """The contents cut to several lengths, and with one bit turned at several places."""
    every = max(1, len(contents) // 23)
    lengths = {0, 1, len(contents) // 2, len(contents) - 2, *range(0, len(contents) - 1, every)}
    cut = [contents[:length] for length in sorted(lengths)]
    turned = []
    for place in range(0, len(contents), every):
        other = bytearray(contents)
        other[place] ^= 16
        turned.append(bytes(other))
    return [*cut, *turned, bytes(len(contents)), contents[:1000] + bytes(len(contents) - 1000)]


def test_damaged_checkpoint(whole, monkeypatch, capsys):
    """The checkpoint before it takes its place, with a warning that names the bad one, and nothing is removed."""
    stop_after(5, monkeypatch)
    newest = OUT / "checkpoints/4/state.npz"
    good = newest.read_bytes()
    like = train.restore("run", small_state())[1]
    cases = damaged(good)
    capsys.readouterr()
    warned = 0
    for contents in cases:
        newest.write_bytes(contents)
        step, state = train.restore("run", small_state())
        said = capsys.readouterr().err
        if step == 4:  # a bit that matters to nobody, such as the time of day in the zip file
            assert not said
            jax.tree.map(np.testing.assert_array_equal, state, like)
        else:
            assert step == 2
            warned += 1
            assert (
                said.startswith("warning: checkpoint run/checkpoints/4 cannot be read (")
                and said.count("\n") == 1
            )
            assert said.endswith("): trying the one before it.\n")
    assert warned >= len(cases) * 0.7
    for contents in (None, b"", good[:-1], good[: len(good) // 2]):
        shutil.copytree(OUT, "kept")
        newest.unlink(missing_ok=True)
        if contents is not None:
            newest.write_bytes(contents)
        tree = everything()
        generate.load("run")
        assert everything() == tree, "generating writes nothing"
        assert "run/checkpoints/4 cannot be read" in capsys.readouterr().err
        assert run()
        assert "run/checkpoints/4 cannot be read" in capsys.readouterr().err
        assert histories() == whole
        assert sorted(os.listdir("run/checkpoints")) == ["4.unreadable", "6", "7"]
        shutil.rmtree(OUT)
        os.rename("kept", OUT)


def test_one_bit_in_a_large_checkpoint():
    """Damage that leaves the file readable; the array is read in several pieces."""
    weights = np.random.default_rng(0).normal(size=300_000).astype(np.float32)
    for step in (1, 2):
        train.save("run", step, (weights,), {})
    path = OUT / "checkpoints/2/state.npz"
    good = path.read_bytes()
    for place in range(1000, len(good) - 1000, 100_003):
        turned = bytearray(good)
        turned[place] ^= 1
        path.write_bytes(turned)
        assert train.restore("run", (weights,))[0] == 1
    path.write_bytes(good)
    step, (found,) = train.restore("run", (weights,))
    assert step == 2
    np.testing.assert_array_equal(found, weights)


def small_state() -> tuple:
    params = nnx.split(Model(None, rngs=None), nnx.Param)[1]
    return params, train.make_optimiser(Settings(**SETTINGS)).init(params)


def everything() -> dict:
    return {str(path): path.stat().st_mtime_ns for path in sorted(OUT.rglob("*"))}


def test_a_checkpoint_of_another_shape_is_refused(whole, monkeypatch):
    stop_after(5, monkeypatch)
    params, optimiser = small_state()
    wrong = jax.tree.map(lambda x: np.zeros(36, x.dtype), params)
    with pytest.raises(Refused, match="no checkpoint in run can be read"):
        train.restore("run", (wrong, optimiser))


def test_no_readable_checkpoint(whole, monkeypatch, capsys):
    stop_after(5, monkeypatch)
    for path in OUT.rglob("state.npz"):
        os.truncate(path, 100)
    contents = {path: path.read_bytes() for path in OUT.rglob("*") if path.is_file()}
    for script in (run, lambda: generate.load("run")):
        with pytest.raises(Refused) as refusal:
            script()
        assert (
            str(refusal.value)
            == "no checkpoint in run can be read: give another --out to begin anew."
        )
        assert contents == {path: path.read_bytes() for path in OUT.rglob("*") if path.is_file()}


UNREADABLE_SETTINGS = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"3",
    b"\xff\xfe",
    bytes(300),
    b'{"steps": 7, "te',
]


def test_damaged_settings(whole, monkeypatch, capsys):
    """What run.json holds is in every checkpoint too."""
    stop_after(5, monkeypatch)
    path = OUT / "run.json"
    good = path.read_bytes()
    shutil.copytree(OUT, "kept")
    cut = [good[:length] for length in range(1, len(good) - 1, 60)]
    capsys.readouterr()
    for contents in [*UNREADABLE_SETTINGS, *cut, good[:-2], None]:
        path.unlink() if contents is None else path.write_bytes(contents)
        trouble = "missing" if contents is None else "damaged"
        warning = f"warning: run/run.json is {trouble}: the settings are taken from checkpoint 4.\n"
        assert train.read_settings("run") == Settings(**SETTINGS)
        assert capsys.readouterr().err == warning
        with pytest.raises(
            Refused, match="run holds a run with seed=0, and this one has 1: give another"
        ):
            run(seed=1)
        train.check_same_run(Settings(**SETTINGS), str(Text(("text.txt",), 8, 1)))
        assert path.read_bytes() == good
        capsys.readouterr()
    path.write_bytes(b"")
    os.truncate(OUT / "checkpoints/4/state.npz", 300)
    capsys.readouterr()
    assert run()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "warning: run/run.json is damaged: the settings are taken from checkpoint 2."
    assert said[1].startswith("warning: checkpoint run/checkpoints/4 cannot be read")
    assert histories() == whole
    assert path.read_bytes() == good


def test_damaged_settings_without_a_checkpoint():
    OUT.mkdir()
    for contents in UNREADABLE_SETTINGS:
        (OUT / "run.json").write_bytes(contents)
        for script in (run, lambda: generate.load("run")):
            with pytest.raises(Refused) as refusal:
                script()
            assert str(refusal.value) == (
                "run/run.json is damaged and no checkpoint holds the settings: remove run/run.json to begin anew."
            )
        assert (OUT / "run.json").read_bytes() == contents
    (OUT / "run.json").unlink()
    assert run()


OTHER_SETTINGS = [
    {},
    {"data": ""},
    {"data": "", "text": 3},
    {"data": "", "text": [], "bits": 1},
    {"data": "", "text": [], "layers": "2"},
    {"data": "", "text": [], "heads": 3},
]


@pytest.mark.parametrize("record", OTHER_SETTINGS)
def test_settings_of_another_version(record):
    OUT.mkdir()
    (OUT / "run.json").write_text(json.dumps(record))
    with pytest.raises(
        Refused, match="run/run.json does not hold the settings of this version of models.train"
    ):
        generate.load("run")
    with pytest.raises(Refused, match="run holds a run with [a-z_]+="):
        run()


def test_damaged_history(whole, monkeypatch, capsys):
    """Damaged lines go, wherever they are, and no others."""
    for junk in (
        b'{"step": 5, "lo',
        b"{}",
        b'{"step": "5"}',
        b"[1]",
        b"7",
        b"\xff\xfe",
        bytes(40),
        b"",
    ):
        stop_after(5, monkeypatch)
        lines = METRICS.read_bytes().splitlines()
        METRICS.write_bytes(b"\n".join([lines[0], junk, *lines[1:], junk]))
        capsys.readouterr()
        resumes(whole)
        assert (
            f"warning: {METRICS}: {2 - (junk == b'')} damaged line(s) dropped"
            in capsys.readouterr().err
        )
        shutil.rmtree(OUT)


# ---- one sentence for the rest


def refusal_of(script, *flags) -> str:
    """What a script says when it ends; the exit status of a text is 1."""
    with pytest.raises(SystemExit) as exit:
        script.main([*map(str, flags)])
    text = str(exit.value.code)
    check_sentence(text, script.__name__)
    return text


FLAGS = [
    f"--{name.replace('_', '-')}={value}"
    for name, value in SETTINGS.items()
    if name not in ("out", "text")
]


def test_run_folders_that_cannot_be():
    Path("file").touch()
    Path("folder/run.json").mkdir(parents=True)
    Path("occupied").mkdir()
    Path("occupied/checkpoints").touch()
    for out, said in (
        ("file", "cannot write file/run.json (Not a directory)"),
        ("file/run", "cannot write file/run/run.json (Not a directory)"),
        ("folder", "cannot read folder/run.json (Is a directory)"),
        ("occupied", "cannot write occupied/checkpoints/2 ("),
        ("n" * 300, "nnn/run.json (File name too long)"),
    ):
        assert said in refusal_of(train, *FLAGS, "--text", "text.txt", "--out", out)
    for out, said in (
        ("file", "file holds no run: give the folder that was --out of"),
        ("nowhere", "nowhere holds no run: give the folder that was --out of"),
        ("folder", "cannot read folder/run.json (Is a directory)"),
        ("occupied", "occupied has no checkpoint yet"),
        ("n" * 300, "nnn/run.json (File name too long)"),
    ):
        assert said in refusal_of(generate, "--checkpoint", out)
    assert sorted(os.listdir()) == ["file", "folder", "occupied", "text.txt"]


def test_a_run_whose_checkpoints_went_away():
    assert run()
    shutil.rmtree("run/checkpoints")
    assert "run has no checkpoint yet" in refusal_of(generate, "--checkpoint", "run")
    assert not Path("run/checkpoints").exists()


def test_text_that_cannot_be_read():
    Path("folder/below").mkdir(parents=True)
    shutil.copy("text.txt", "folder")
    os.mkfifo("folder/pipe")
    # a pipe is no text, and reading it would never end
    assert len(Text(("folder",), 8, 1).files) == 1
    Path("binary").write_bytes(b"some text\0" * 100)
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    flags = [*FLAGS, "--out", "run", "--text", "text.txt"]
    assert "--text binary: the file is binary, for it has a byte 0; give" in refusal_of(
        train, *flags, "binary"
    )
    for name in ("dangling", "loop"):
        assert f"--text {name}: no such file or folder" in refusal_of(train, *flags, name)
    assert "--text folder/pipe: no such file or folder" in refusal_of(train, *flags, "folder/pipe")
    assert "nnn: cannot be read (File name too long)" in refusal_of(train, *flags, "n" * 300)
    for target, reason in (
        ("nowhere", "No such file or directory"),
        ("link", "Too many levels of symbolic links"),
    ):
        Path("folder/below/link").symlink_to(target)
        message = f"--text folder/below/link: cannot be read ({reason}); repair it or leave it out."
        assert message in refusal_of(train, *flags, "folder")
        Path("folder/below/link").unlink()
    assert not OUT.exists()


def test_a_folder_that_cannot_be_listed(monkeypatch):
    """`os.walk` would leave it out, and the run would learn from other text without a word."""
    Path("folder/below").mkdir(parents=True)
    shutil.copy("text.txt", "folder")
    scan = os.scandir

    def refuse(path):
        if Path(path).name == "below":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        Refused,
        match=r"^--text folder/below: cannot be read \(Permission denied\); repair it or leave it",
    ):
        Text(("folder",), 8, 1)


def test_text_that_changes_during_the_run(monkeypatch):
    text = Text(("text.txt",), 8, 1)
    os.truncate("text.txt", 3)
    with pytest.raises(
        Refused,
        match="--text text.txt: the file became shorter while it was read; restore it and resume.",
    ):
        text.train_batch(0, 0)
    Path("text.txt").unlink()
    with pytest.raises(
        Refused, match=r"--text text.txt: cannot be read \(No such file or directory\)"
    ):
        text.train_batch(0, 0)


def test_a_library_with_dangling_links(tmp_path, monkeypatch):
    """Some systems' Python has them, and the user cannot help it."""
    (tmp_path / "sitecustomize.py").symlink_to("nowhere")
    shutil.copy("text.txt", tmp_path / "module.py")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert {path.name for path in Text((), 8, 1).files} == {"module.py", "text.txt"}


def test_a_prompt_that_is_not_utf_8():
    """The command line hands bytes on as surrogates."""
    assert run()
    said = refusal_of(generate, "--checkpoint", "run", "--prompt", os.fsdecode(b"caf\xe9"))
    assert said == r"models.generate: prompt='caf\udce9' is not UTF-8: give it in UTF-8."


def test_a_demonstration_without_a_folder(monkeypatch):
    Path("file").touch()
    monkeypatch.setattr(demo, "FOLDER", Path("file/demo"))
    with pytest.raises(SystemExit) as exit:
        demo.main()
    assert str(exit.value).startswith("models.demo: ") and "Not a directory" in str(exit.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
@pytest.mark.parametrize(("text", "flush"), [("a", False), ("a", True), ("\ufffd", False)])
def test_output_that_cannot_be_written(text, flush):
    """A script's output often goes to a file, and its disk may be full; a terminal may lack a character."""
    code = f"from models.files import one_sentence\nwith one_sentence('script'): print({ascii(text)}, flush={flush})"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", code]
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert process.returncode == 1
    assert process.stderr == "script: [Errno 28] No space left on device\n"
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout == text.replace("\ufffd", "?") + "\n"
