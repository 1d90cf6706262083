"""Damage every file of a run at many places, and resume the run."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
from cheap_run import (
    METRICS,
    OUT,
    SETTINGS,
    Model,
    assert_resumes,
    enter_workplace,
    histories,
    run,
    run_uninterrupted,
    stop_after,
)
from flax import nnx

from models import generate, train
from models.data import Refused, Text
from models.train import Settings


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    enter_workplace(tmp_path, monkeypatch)


@pytest.fixture
def uninterrupted(workplace) -> tuple:
    return run_uninterrupted()


def small_state() -> tuple:
    """Return parameters and the state of the optimiser, in the shapes of a checkpoint."""
    _, params = nnx.split(Model(None, rngs=None), nnx.Param)
    return params, train.make_optimiser(Settings(**SETTINGS)).init(params)


def modification_times() -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(OUT.rglob("*"))}


def file_contents() -> dict:
    return {path: path.read_bytes() for path in OUT.rglob("*") if path.is_file()}


def generate_from_run():
    return generate.load("run")


# ---- checkpoints


def damaged(contents: bytes) -> list[bytes]:
    """Return the contents cut to several lengths, and with one bit turned at several places."""
    every = max(1, len(contents) // 23)
    lengths = {0, 1, len(contents) // 2, len(contents) - 2, *range(0, len(contents) - 1, every)}
    cut = [contents[:length] for length in sorted(lengths)]
    turned = []
    for place in range(0, len(contents), every):
        changed = bytearray(contents)
        changed[place] ^= 16
        turned.append(bytes(changed))
    zeros = bytes(len(contents))
    zeros_at_the_end = contents[:1000] + bytes(len(contents) - 1000)
    return [*cut, *turned, zeros, zeros_at_the_end]


def test_damaged_checkpoint(uninterrupted, monkeypatch, capsys):
    """The checkpoint before a damaged one takes its place, and nothing is removed.

    A warning names the damaged one.
    """
    stop_after(5, monkeypatch)
    newest = OUT / "checkpoints/4/state.npz"
    good = newest.read_bytes()
    _, expected = train.restore("run", small_state())
    cases = damaged(good)
    capsys.readouterr()
    warned = 0
    for contents in cases:
        newest.write_bytes(contents)
        step, state = train.restore("run", small_state())
        warning = capsys.readouterr().err
        if step == 4:  # a bit that matters to nobody, such as the time of day in the zip file
            assert not warning
            jax.tree.map(np.testing.assert_array_equal, state, expected)
        else:
            assert step == 2
            warned += 1
            assert warning.startswith("warning: checkpoint run/checkpoints/4 cannot be read (")
            assert warning.count("\n") == 1
            assert warning.endswith("): trying the one before it.\n")
    assert warned >= len(cases) * 0.7
    for contents in (None, b"", good[:-1], good[: len(good) // 2]):
        shutil.copytree(OUT, "kept")
        newest.unlink(missing_ok=True)
        if contents is not None:
            newest.write_bytes(contents)
        times = modification_times()
        generate_from_run()
        assert modification_times() == times, "generating writes nothing"
        assert "run/checkpoints/4 cannot be read" in capsys.readouterr().err
        assert run()
        assert "run/checkpoints/4 cannot be read" in capsys.readouterr().err
        assert histories() == uninterrupted
        assert sorted(os.listdir("run/checkpoints")) == ["4.unreadable", "6", "7"]
        shutil.rmtree(OUT)
        os.rename("kept", OUT)


def test_one_bit_in_a_large_checkpoint():
    """Damage that leaves the file readable is noticed; the array is read in several pieces."""
    weights = np.random.default_rng(0).normal(size=300_000).astype(np.float32)
    for step in (1, 2):
        train.save("run", step, (weights,), {})
    path = OUT / "checkpoints/2/state.npz"
    good = path.read_bytes()
    for place in range(1000, len(good) - 1000, 100_003):
        turned = bytearray(good)
        turned[place] ^= 1
        path.write_bytes(turned)
        step, _ = train.restore("run", (weights,))
        assert step == 1
    path.write_bytes(good)
    step, (restored,) = train.restore("run", (weights,))
    assert step == 2
    np.testing.assert_array_equal(restored, weights)


def test_a_checkpoint_of_another_shape_is_refused(uninterrupted, monkeypatch):
    stop_after(5, monkeypatch)
    params, optimiser = small_state()
    wrong = jax.tree.map(lambda x: np.zeros(36, x.dtype), params)
    with pytest.raises(Refused, match="no checkpoint in run can be read"):
        train.restore("run", (wrong, optimiser))


def test_no_readable_checkpoint(uninterrupted, monkeypatch, capsys):
    stop_after(5, monkeypatch)
    for path in OUT.rglob("state.npz"):
        os.truncate(path, 100)
    contents = file_contents()
    message = "no checkpoint in run can be read: give another --out to begin anew."
    for script in (run, generate_from_run):
        with pytest.raises(Refused) as refusal:
            script()
        assert str(refusal.value) == message
        assert contents == file_contents()


# ---- settings


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


def test_settings_that_an_earlier_version_wrote_into_a_checkpoint(uninterrupted, monkeypatch):
    """They are text there, not bytes."""
    stop_after(5, monkeypatch)
    path = OUT / "checkpoints/4/state.npz"
    with np.load(path) as file:
        arrays = dict(file)
    arrays["run"] = np.array(arrays["run"].item().decode())
    np.savez(path, **arrays)
    (OUT / "run.json").unlink()
    assert train.read_settings("run") == Settings(**SETTINGS)


def test_damaged_settings(uninterrupted, monkeypatch, capsys):
    """Checkpoints replace a damaged run.json, because each holds the settings too."""
    stop_after(5, monkeypatch)
    path = OUT / "run.json"
    good = path.read_bytes()
    shutil.copytree(OUT, "kept")
    cut = [good[:length] for length in range(1, len(good) - 1, 60)]
    capsys.readouterr()
    for contents in [*UNREADABLE_SETTINGS, *cut, good[:-2], None]:
        if contents is None:
            path.unlink()
        else:
            path.write_bytes(contents)
        trouble = "missing" if contents is None else "damaged"
        warning = f"warning: run/run.json is {trouble}: the settings are taken from checkpoint 4.\n"
        assert train.read_settings("run") == Settings(**SETTINGS)
        assert capsys.readouterr().err == warning
        message = "run holds a run with seed=0, and this one has 1: give another"
        with pytest.raises(Refused, match=message):
            run(seed=1)
        train.check_same_run(Settings(**SETTINGS), str(Text(("text.txt",), 8, 1)))
        assert path.read_bytes() == good
        capsys.readouterr()
    path.write_bytes(b"")
    os.truncate(OUT / "checkpoints/4/state.npz", 300)
    capsys.readouterr()
    assert run()
    warnings = capsys.readouterr().err.splitlines()
    message = "warning: run/run.json is damaged: the settings are taken from checkpoint 2."
    assert warnings[0] == message
    assert warnings[1].startswith("warning: checkpoint run/checkpoints/4 cannot be read")
    assert histories() == uninterrupted
    assert path.read_bytes() == good


def test_damaged_settings_without_a_checkpoint():
    OUT.mkdir()
    path = OUT / "run.json"
    message = (
        "run/run.json is damaged and no checkpoint holds the settings: "
        "remove run/run.json to begin anew."
    )
    for contents in UNREADABLE_SETTINGS:
        path.write_bytes(contents)
        for script in (run, generate_from_run):
            with pytest.raises(Refused) as refusal:
                script()
            assert str(refusal.value) == message
        assert path.read_bytes() == contents
    path.unlink()
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
    message = "run/run.json does not hold the settings of this version of models.train"
    with pytest.raises(Refused, match=message):
        generate_from_run()
    with pytest.raises(Refused, match="run holds a run with [a-z_]+="):
        run()


# ---- history


def test_damaged_history(uninterrupted, monkeypatch, capsys):
    """Damaged lines go wherever they are, and no other lines do."""
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
        first, *rest = METRICS.read_bytes().splitlines()
        METRICS.write_bytes(b"\n".join([first, junk, *rest, junk]))
        capsys.readouterr()
        assert_resumes(uninterrupted)
        dropped = 1 if junk == b"" else 2
        warning = f"warning: {METRICS}: {dropped} damaged line(s) dropped"
        assert warning in capsys.readouterr().err
        shutil.rmtree(OUT)
