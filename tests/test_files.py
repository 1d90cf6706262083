"""Cut every write of a run short at every point, and resume the run.

tests/test_damaged_files.py damages the files. tests/test_file_errors.py reads the error messages.
"""

import contextlib
import errno
import io
import os
import resource
import shutil
from pathlib import Path

import pytest
from cheap_run import (
    METRICS,
    OUT,
    assert_resumes,
    check_sentence,
    enter_workplace,
    history,
    lines_of_the_checkpoint,
    run,
    run_uninterrupted,
    stop_after,
)

from models import files, train
from models.data import Refused


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    enter_workplace(tmp_path, monkeypatch)


@pytest.fixture
def uninterrupted(workplace) -> tuple:
    return run_uninterrupted()


@contextlib.contextmanager
def watching(watcher, monkeypatch):
    """Call `watcher` before each change that Python makes to the run's folder.

    Call it before each wait for the disk, too.
    """
    open_file = io.open

    def watched(function):
        def call(path, *arguments, **options):
            mode = arguments[0] if arguments else "r"
            reads = function is open_file and mode in ("r", "rb")
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


def cut_unfinished_files():
    """Cut temporary files and the last line of metrics.jsonl, which a kill may leave in part."""
    for path in [*OUT.rglob("*.tmp"), *OUT.rglob("unfinished/*")]:
        os.truncate(path, path.stat().st_size // 2)
    if METRICS.exists():
        with METRICS.open("a") as file:
            file.write('{"step": 7, "lo')


@pytest.mark.parametrize("begun", [False, True])
def test_killed_at_any_point(begun, uninterrupted, monkeypatch):
    """Copy the folder before each change. The copy is what kill -9 would leave."""
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
            assert_resumes(uninterrupted)


@pytest.mark.parametrize("begun", [False, True])
def test_full_disk_at_any_point(begun, uninterrupted, monkeypatch, capsys):
    """A disk that takes nothing from the n-th change on costs one sentence and no line.

    The run goes on when there is room.
    """
    if begun:
        stop_after(5, monkeypatch)
        shutil.copytree(OUT, "begun")
        assert len(history()) == 5
        assert train.saved_steps("run") == [4, 2]
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
        assert_resumes(uninterrupted)
    assert n > (20 if begun else 40)
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("begun", [False, True])
def test_writes_that_the_system_cuts(begun, uninterrupted, monkeypatch, capsys):
    """The kernel takes `limit` bytes of a file and refuses the next.

    A part of the file is left, as on a full disk. `capsys` keeps what is printed in memory, where
    the limit does not count.
    """
    if begun:
        stop_after(5, monkeypatch)
        shutil.copytree(OUT, "begun")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
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
        assert_resumes(uninterrupted)


def test_the_history_is_on_the_disk_before_the_checkpoint(workplace, monkeypatch):
    """Otherwise a power cut leaves a checkpoint whose steps nobody measures again."""
    order = []

    def sync(path):
        order.append(path.name)

    def save(out, step, *rest):
        order.append(step)

    monkeypatch.setattr(train, "sync", sync)
    monkeypatch.setattr(train, "save", save)
    run()
    assert order == ["metrics.jsonl", 2, "metrics.jsonl", 4, "metrics.jsonl", 6, "metrics.jsonl", 7]
    synced = []

    def fsync(number):
        synced.append(os.fstat(number))

    monkeypatch.setattr(os, "fsync", fsync)
    files.sync(METRICS)
    files.replace_file(Path("new"), b"contents")
    for status, path in zip(synced, (METRICS, Path("new")), strict=True):
        expected = path.stat()
        assert (status.st_ino, status.st_size) == (expected.st_ino, expected.st_size)
