"""Test the settings of a run and its data, which are text and ListOps."""

import dataclasses
import functools
import math
import random

import numpy as np
import pytest
from model_cases import write_novel

from models.data import ListOps, Refused, Text, expression
from models.train import Settings, parse

# ---- settings


VALUES = {
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
    "feed_forward_chunk": 16,
    "devices": 1,
    "layout": None,
    "out": "there",
    "task": "listops",
    "text": (),
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


def as_flags(values: dict) -> list[str]:
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if value in (None, ()):  # the default
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            flags += [f"--{flag}", *value]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def test_every_setting_has_a_flag():
    """Some options refuse each other, so two lists of flags change all defaults."""
    on_devices = VALUES | {
        "attention": "memeff",
        "devices": 4,
        "layout": "contiguous",
        "task": "text",
        "text": ("a", "b"),
    }
    for values in (VALUES, on_devices):
        assert dataclasses.asdict(parse(as_flags(values))) == values
    assert parse([]) == Settings()
    for name, default in dataclasses.asdict(Settings()).items():
        assert VALUES[name] != default or on_devices[name] != default


REFUSED_SETTINGS = [
    ({"layers": 0}, "layers=0: it must be at least 1."),
    ({"heads": 4, "kv_heads": 3}, "heads=4 must be a multiple of kv_heads=3."),
    ({"width": 36}, "width=36 must be a multiple of 8, twice heads: rotary positions turn pairs."),
    (
        {"window": -1},
        "window=-1 counts tokens and must be >= 0 and below 2**31; "
        "leave it out for the whole document.",
    ),
    (
        {"window": 2**31},
        "window=2147483648 counts tokens and must be >= 0 and below 2**31; "
        "leave it out for the whole document.",
    ),
    (
        {"feed_forward_chunk": 0},
        "feed_forward_chunk=0 counts tokens and must be at least 1; leave it out for all.",
    ),
    ({"steps": 0}, "steps=0: it must be at least 1."),
    ({"batch": 4, "accumulate": 3}, "batch=4 must be a multiple of accumulate=3."),
    ({"warmup": 200}, "warmup=200 must be >= 0 and less than steps=200."),
    ({"learning_rate": -1.0}, "learning_rate=-1.0: it must be >= 0 and finite."),
    ({"learning_rate": math.nan}, "learning_rate=nan: it must be >= 0 and finite."),
    ({"weight_decay": math.inf}, "weight_decay=inf: it must be >= 0 and finite."),
    ({"clip": 0.0}, "clip=0.0: it must be above 0; inf clips nothing."),
    ({"clip": math.nan}, "clip=nan: it must be above 0; inf clips nothing."),
    ({"minutes": math.nan}, "minutes=nan: it must be >= 0; leave it out for no limit."),
    ({"seed": -1}, "seed=-1: it must be >= 0 and fit in 64 bits."),
    ({"seed": 2**63}, "seed=9223372036854775808: it must be >= 0 and fit in 64 bits."),
    (
        {"task": "listops", "text": ("a",)},
        "task=listops makes its own rows and reads no text: leave --text out, or use --task text.",
    ),
    (
        {"layout": "zigzag"},
        "layout=zigzag shares a row among several devices: with devices=1 leave it out.",
    ),
    ({"devices": 0}, "devices=0: it must be at least 1."),
    (
        {"devices": 2, "attention": "jax.nn"},
        "attention=jax.nn computes on one device: with devices=2 use memeff.",
    ),
    (
        {"devices": 2, "attention": "reference"},
        "attention=reference computes on one device: with devices=2 use memeff.",
    ),
    (
        {"devices": 2, "layout": "striped", "window": 7},
        "layout=striped has no window=7: use zigzag or contiguous, or leave window out.",
    ),
    (
        {"devices": 4, "context": 4100},
        "context=4100 must be a multiple of 8, so that devices=4 share a row (layout=zigzag).",
    ),
    (
        {"devices": 4, "context": 4102, "layout": "striped"},
        "context=4102 must be a multiple of 4, so that devices=4 share a row (layout=striped).",
    ),
    *(
        (
            {"devices": 4, "context": 96, "feed_forward_chunk": chunk},
            f"feed_forward_chunk={chunk} must divide context=96 and be a multiple of devices=4, "
            "so that no tokens move between devices; leave it out for all tokens.",
        )
        for chunk in (20, 6)
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED_SETTINGS)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(Refused) as refusal:
        Settings(**settings)
    assert str(refusal.value) == message


# ---- text


def test_a_wide_model_learns_at_a_lower_rate_by_default():
    assert Settings().highest_rate == Settings(width=64).highest_rate == 0.003
    assert math.isclose(Settings(width=1024).highest_rate, 0.003 / 8)
    assert Settings(width=1024, learning_rate=0.5).highest_rate == 0.5


def test_rows_are_the_documents_end_to_end(tmp_path):
    """Compare rows with the stream: byte 0 and a file, byte 0 and the next file, and so on.

    Some windows cross several documents.
    """
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
    for step in range(200):
        for row in text.train_batch(0, step).tokens:
            assert row.tobytes() in stream[: text.kept_from]
    for i in range(20):
        for row in text.eval_batch(i).tokens:
            assert row.tobytes() in stream[text.kept_from :]
    description = (
        f"{len(stream):,} bytes of text in 7 documents, one byte in 20 kept for evaluation"
    )
    assert str(text) == description


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    novel = write_novel(tmp_path)
    for make in (functools.partial(Text, (novel,), 32, 2), functools.partial(ListOps, 40, 2)):
        batch = make().train_batch(1, 7)
        again = make().train_batch(1, 7)
        assert batch.tokens.dtype == np.uint8
        assert batch.weights.dtype == np.float32
        np.testing.assert_array_equal(batch.tokens, again.tokens)
        np.testing.assert_array_equal(batch.weights, again.weights)
        for other in (make().train_batch(1, 8), make().train_batch(2, 7), make().eval_batch(7)):
            assert (batch.tokens != other.tokens).any()


def test_default_text_is_the_library_of_this_python():
    text = Text((), 4096, 1)
    assert text.total > 5e6
    for path in text.files:
        assert "site-packages" not in path.parts
        assert path.suffix != ".pyc"
    assert {"json", "typing.py"} < {part for path in text.files for part in path.parts}


def test_text_that_cannot_be_learnt_from_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/picture").write_bytes(b"\0\1\2")
    messages = {
        "none": "no such file or folder; give text files or folders of them.",
        "empty.txt": "the file is empty; give a file with text in it.",
        "folder": "the folder holds no text; give a folder with text files in it.",
    }
    for name, message in messages.items():
        with pytest.raises(Refused) as refusal:
            Text((str(tmp_path / name),), 16, 1)
        assert str(refusal.value) == f"--text {tmp_path / name}: {message}"
    with pytest.raises(Refused) as refusal:
        Text((str(tmp_path / "short.txt"),), 16, 1)
    assert str(refusal.value) == (
        "the text has 11 bytes, and --context 16 needs 340, "
        "since one in 20 is kept for evaluation: give more with --text or a smaller --context."
    )
    message = "--task listops needs --context 32 or more for an expression and its answer; got 16."
    with pytest.raises(Refused, match=message):
        ListOps(16, 1)


def test_a_python_without_sources_is_told_to_the_user(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(Refused) as refusal:
        Text((), 16, 1)
    message = f"this Python has no sources in {tmp_path}. Give text of your own with --text."
    assert str(refusal.value) == message


# ---- ListOps


def evaluate_listops(text: str) -> int:
    """Evaluate an expression with a stack machine, which shares no code with `expression`."""
    stack: list[list] = [[]]
    for token in text:
        if token == "]":
            operator, *values = stack.pop()
            stack[-1].append(apply_operator(operator, sorted(map(int, values))))
        elif token.isdigit():
            stack[-1].append(token)
        else:
            stack.append([token])
    ((answer,),) = stack
    return int(answer)


def apply_operator(operator: str, values: list[int]) -> int:
    """Apply minimum, maximum, median or sum modulo 10 to sorted values."""
    n = len(values)
    median = values[n // 2] if n % 2 else (values[n // 2 - 1] + values[n // 2]) // 2
    return {"m": values[0], "M": values[-1], "D": median, "S": sum(values) % 10}[operator]


def test_listops_answers_are_right():
    assert [evaluate_listops(x) for x in ("M29m47]0]", "D914]", "D1458]", "S787]")] == [9, 4, 4, 2]
    batch = ListOps(2100, 3).train_batch(0, 0)
    answers = []
    for row, weights in zip(batch.tokens, batch.weights, strict=True):
        documents = [document for document in row.tobytes().decode().split("\0") if document]
        places = weights.nonzero()[0]
        assert len(places) == len(documents) >= 1
        for document, place in zip(documents, places, strict=True):
            text, answer = document.split("=")
            assert 500 <= len(text) <= 2000
            assert evaluate_listops(text) == int(answer)
            assert chr(row[place]) == "="
            assert chr(row[place + 1]) == answer
            answers.append(answer)
    assert len(set(answers)) > 1
    tokens: list[str] = []
    for seed in range(300):
        tokens.clear()
        answer = expression(random.Random(seed), tokens, 2000, 1)
        assert answer == evaluate_listops("".join(tokens))
