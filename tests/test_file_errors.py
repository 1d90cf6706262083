"""Check that a script reports a file that it cannot read or write in one sentence."""

import errno
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from cheap_run import OUT, SETTINGS, check_sentence, enter_workplace, run
from conftest import few

from models import demo, generate, train
from models.data import Refused, Text

ROOT = Path(__file__).parents[1]
FLAGS = [
    f"--{name.replace('_', '-')}={value}"
    for name, value in SETTINGS.items()
    if name not in ("out", "text")
]


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    enter_workplace(tmp_path, monkeypatch)


def refusal_of(script, *flags) -> str:
    """Return the text with which a script ends; the exit status of a text is 1."""
    with pytest.raises(SystemExit) as exit:
        script.main([*map(str, flags)])
    text = str(exit.value.code)
    check_sentence(text, script.__name__)
    return text


def test_sizes_beyond_the_memory_end_in_a_sentence(monkeypatch):
    """Rows are allocated by NumPy, and all else by JAX."""
    flags = *FLAGS, "--text", "text.txt", "--out"
    assert "out of memory (" in refusal_of(train, *flags, "rows", "--batch=1000000000000")

    def train_step(*_):
        return jnp.zeros(2**44)

    monkeypatch.setattr(train, "train_step", train_step)
    assert "out of memory (RESOURCE_EXHAUSTED" in refusal_of(train, *flags, "steps")


# ---- folders of runs


def test_run_folders_that_cannot_be():
    Path("file").touch()
    Path("folder/run.json").mkdir(parents=True)
    Path("occupied").mkdir()
    Path("occupied/checkpoints").touch()
    for out, message in (
        ("file", "cannot write file/run.json (Not a directory)"),
        ("file/run", "cannot write file/run/run.json (Not a directory)"),
        ("folder", "cannot read folder/run.json (Is a directory)"),
        ("occupied", "cannot write occupied/checkpoints/2 ("),
        ("n" * 300, "nnn/run.json (File name too long)"),
        ("a\0", r"no folder can have the name 'a\x00': give another"),
        ("\ud800", r"no folder can have the name '\ud800': give another"),
    ):
        assert message in refusal_of(train, *FLAGS, "--text", "text.txt", "--out", out)
    for out, message in (
        ("file", "file holds no run: give the folder that was --out of"),
        ("nowhere", "nowhere holds no run: give the folder that was --out of"),
        ("folder", "cannot read folder/run.json (Is a directory)"),
        ("occupied", "occupied has no checkpoint yet"),
        ("n" * 300, "nnn/run.json (File name too long)"),
        ("a\0", r"no folder can have the name 'a\x00': give another"),
    ):
        assert message in refusal_of(generate, "--checkpoint", out)
    assert sorted(os.listdir()) == ["file", "folder", "occupied", "text.txt"]


def test_a_run_whose_checkpoints_went_away():
    assert run()
    shutil.rmtree("run/checkpoints")
    assert "run has no checkpoint yet" in refusal_of(generate, "--checkpoint", "run")
    assert not Path("run/checkpoints").exists()


# ---- text


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
    for name, message in (
        ("binary", "--text binary: the file is binary, because it has a byte 0. Give"),
        ("dangling", "--text dangling: no such file or folder"),
        ("loop", "--text loop: no such file or folder"),
        ("folder/pipe", "--text folder/pipe: no such file or folder"),
        ("n" * 300, "nnn: cannot be read (File name too long)"),
    ):
        assert message in refusal_of(train, *flags, name)
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
    """`os.walk` would omit the folder, and the run would learn from other text without a word."""
    Path("folder/below").mkdir(parents=True)
    shutil.copy("text.txt", "folder")
    scan = os.scandir

    def refuse(path):
        if Path(path).name == "below":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    message = r"^--text folder/below: cannot be read \(Permission denied\); repair it or leave it"
    with pytest.raises(Refused, match=message):
        Text(("folder",), 8, 1)


def test_text_that_changes_during_the_run(monkeypatch):
    text = Text(("text.txt",), 8, 1)
    os.truncate("text.txt", 3)
    message = "--text text.txt: the file became shorter while it was read; restore it and resume."
    with pytest.raises(Refused, match=message):
        text.train_batch(0, 0)
    Path("text.txt").unlink()
    message = r"--text text.txt: cannot be read \(No such file or directory\)"
    with pytest.raises(Refused, match=message):
        text.train_batch(0, 0)


def test_a_library_with_dangling_links(tmp_path, monkeypatch):
    """Dangling links in the library are ignored, because the user cannot help them.

    The Python of some systems has such links.
    """
    (tmp_path / "sitecustomize.py").symlink_to("nowhere")
    shutil.copy("text.txt", tmp_path / "module.py")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert {path.name for path in Text((), 8, 1).files} == {"module.py", "text.txt"}


# ---- prompts and output


def test_a_prompt_that_is_not_utf_8():
    """The command line hands bytes on as surrogates."""
    assert run()
    message = refusal_of(generate, "--checkpoint", "run", "--prompt", os.fsdecode(b"caf\xe9"))
    assert message == r"models.generate: prompt='caf\udce9' is not UTF-8: give it in UTF-8."


def test_a_demonstration_without_a_folder(monkeypatch):
    Path("file").touch()
    monkeypatch.setattr(demo, "FOLDER", Path("file/demo"))
    with pytest.raises(SystemExit) as exit:
        demo.main()
    assert str(exit.value).startswith("models.demo: ")
    assert "Not a directory" in str(exit.value)


def test_help_of_the_demonstration_runs_nothing(capsys):
    with pytest.raises(SystemExit) as exit:
        demo.main(["--help"])
    assert exit.value.code == 0
    assert not Path("runs").exists()
    assert "runs/demo, which is made anew each time" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is a device of Linux")
@pytest.mark.parametrize(
    ("text", "flush"), few([("a", False), ("a", True), ("\ufffd", False)], [("\ufffd", False)])
)
def test_output_that_cannot_be_written(text, flush):
    """A script reports a full disk in one sentence, because its output often goes to a file.

    It replaces a character that the terminal lacks.
    """
    code = (
        "from models.files import one_sentence\n"
        f"with one_sentence('script'): print({ascii(text)}, flush={flush})"
    )
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


def test_streams_that_the_shell_closed():
    """Python has no sys.stdout or sys.stderr then: a script runs, and what it prints is lost."""
    code = (
        "import sys\n"
        "from models.files import one_sentence, warn\n"
        "with one_sentence('script'): print('output'); warn('a'); sys.stderr.isatty()"
    )
    for closed, kept in ((">&-", ""), ("2>&-", "output\n")):
        command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {closed}"
        process = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
        assert process.returncode == 0
        assert process.stdout == kept
