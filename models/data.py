"""Make the bytes that the model learns from: text files packed into rows, or ListOps made on the fly.

A batch is a function of (seed, step) and of nothing else, so a resumed run sees what the uninterrupted one would have seen.
Byte 0, which text does not contain, starts a document: the model's vocabulary is the 256 bytes.
"""

import bisect
import contextlib
import itertools
import os
import random
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

VOCABULARY = 256
START = b"\0"  # starts a document
EVAL_SHARE = 20  # one byte in so many, at the end of the shuffled documents, is kept for evaluation
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
# absent on some systems; tables of characters
LIBRARY_SKIPPED = {"test", "tests", "idle_test", "encodings"}


class Refused(ValueError):
    """The user's mistake, said in one sentence with its cure; the scripts print it without a traceback."""


class Batch(NamedTuple):
    # B T+1, uint8: the model reads all but the last and predicts all but the first
    tokens: np.ndarray
    weights: np.ndarray  # B T, float32: 1 where the prediction counts, else 0


class Task(Protocol):
    def __str__(self) -> str: ...
    def train_batch(self, seed: int, step: int) -> Batch: ...
    def eval_batch(self, index: int) -> Batch: ...


# ---- text


class Text:
    """Rows of `context` bytes, each from a random place in the documents laid end to end; a file is a document."""

    def __init__(self, paths: tuple[str, ...], context: int, rows: int):
        self.files = find_files(paths) if paths else python_library()
        random.Random(0).shuffle(self.files)  # so that the kept share is like the rest
        self.ends = list(itertools.accumulate(1 + path.stat().st_size for path in self.files))
        self.length, self.rows = context + 1, rows
        self.total = self.ends[-1]
        self.kept_from = self.total - self.total // EVAL_SHARE
        if self.total - self.kept_from < self.length:
            raise Refused(
                f"the text has {self.total:,} bytes, and --context {context} needs {EVAL_SHARE * self.length:,}, since one "
                f"in {EVAL_SHARE} is kept for evaluation: give more with --text or a smaller --context."
            )

    def __str__(self) -> str:
        return f"{self.total:,} bytes of text in {len(self.files):,} documents, one byte in {EVAL_SHARE} kept for evaluation"

    def train_batch(self, seed: int, step: int) -> Batch:
        starts = np.random.default_rng((seed, step)).integers(
            0, self.kept_from - self.length, self.rows, endpoint=True
        )
        return self._batch(starts)

    def eval_batch(self, index: int) -> Batch:
        """Return rows spread over the kept share, the same for every run."""
        starts = np.random.default_rng(index).integers(
            self.kept_from, self.total - self.length, self.rows, endpoint=True
        )
        return self._batch(starts)

    def _batch(self, starts: np.ndarray) -> Batch:
        tokens = np.stack([self._read(int(start)) for start in starts])
        return Batch(tokens, np.ones((self.rows, self.length - 1), np.float32))

    def _read(self, start: int) -> np.ndarray:
        """Return `length` bytes of the stream from `start`: byte 0 and the file, byte 0 and the next file, ..."""
        row = np.zeros(self.length, np.uint8)
        document = bisect.bisect_right(self.ends, start)
        filled = 0
        while filled < self.length:
            begin = self.ends[document - 1] if document else 0
            skip = start + filled - begin  # in this document, whose first byte is the 0
            take = min(self.length - filled, self.ends[document] - begin - skip)
            inside = max(skip, 1)
            contents = read(self.files[document], inside - 1, skip + take - 1)
            row[filled + inside - skip : filled + take] = contents
            filled += take
            document += 1
        return row


def read(path: Path, begin: int, end: int) -> np.ndarray:
    """Return the bytes from `begin` to `end` of a file. Refuse one that has become shorter or is gone."""
    with reading(path), path.open("rb") as file:
        file.seek(begin)
        contents = file.read(end - begin)
    if len(contents) < end - begin:
        raise Refused(
            f"--text {path}: the file became shorter while it was read; restore it and resume."
        )
    return np.frombuffer(contents, np.uint8)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError into a refusal that names the text file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise Refused(
            f"--text {path}: cannot be read ({reason}); repair it or leave it out."
        ) from error


def find_files(paths: tuple[str, ...]) -> list[Path]:
    """Return the files named and all text in the folders named, each once; a folder's files are sorted."""
    files = []
    for name in paths:
        with reading(Path(name)):
            files += find_text(name)
    return list(dict.fromkeys(files))


def find_text(name: str) -> list[Path]:
    """Return the file, or all text in the folder, that `--text` names."""
    path = Path(name)
    if path.is_dir():
        files = [file for file in walk(path) if is_text(file)]
        if not files:
            raise Refused(
                f"--text {name}: the folder holds no text; give a folder with text files in it."
            )
        return files
    if not path.is_file():
        raise Refused(f"--text {name}: no such file or folder; give text files or folders of them.")
    if path.stat().st_size == 0:
        raise Refused(f"--text {name}: the file is empty; give a file with text in it.")
    if not is_text(path):
        raise Refused(
            f"--text {name}: the file is binary, because it has a byte 0. Give a file with text."
        )
    return [path]


def python_library() -> list[Path]:
    """Collect the sources and prose of Python's standard library, some ten million bytes on every machine."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = (".py", ".txt", ".rst")
    paths = [path for path in walk(folder, LIBRARY_SKIPPED) if path.suffix in names]
    # some systems leave dangling links
    files = [path for path in paths if path.exists() and is_text(path)]
    if not files:
        raise Refused(f"this Python has no sources in {folder}. Give text of your own with --text.")
    return files


def walk(folder: Path, skipped: set[str] = SKIPPED_FOLDERS) -> list[Path]:
    """Return all files below a folder, in the order of their names, without hidden ones."""
    paths = []
    for parent, folders, names in os.walk(folder, onerror=refuse_folder):
        folders[:] = [
            name
            for name in folders
            if name not in skipped | SKIPPED_FOLDERS and not name.startswith(".")
        ]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def refuse_folder(error: OSError) -> None:
    """Refuse a folder that cannot be listed, which `os.walk` would leave out without a word."""
    with reading(Path(error.filename)):
        raise error


def is_text(path: Path) -> bool:
    """Return whether a file is not empty and has no byte 0 in its first 8,000 bytes, which is also what git goes by."""
    with reading(path):
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its other end
            return False
        with path.open("rb") as file:
            head = file.read(8000)
    return bool(head) and START not in head


# ---- ListOps


class ListOps:
    """Nested lists of digits under MIN, MAX, MED (median) and SM (sum modulo 10); only the answer counts for the loss.

    A row packs documents such as `M29m47]0]=9`: MAX(2, 9, MIN(4, 7), 0) = 9. One byte is one token of the original task:
    m, M, D and S open MIN, MAX, MED and SM. Expressions have 500 to 2,000 tokens where the context allows, depth up to 10
    and 2 to 10 arguments, as in Long Range Arena (Tay et al. 2020, arXiv:2011.04006).
    """

    def __init__(self, context: int, rows: int):
        if context < 32:
            raise Refused(
                f"--task listops needs --context 32 or more for an expression and its answer; got {context}."
            )
        self.context, self.rows = context, rows
        # beside the byte 0 and "="; the answer may be the last target
        self.longest = min(2000, context - 2)
        self.shortest = self.longest // 4

    def __str__(self) -> str:
        return (
            f"ListOps made on the fly, {self.shortest:,} to {self.longest:,} tokens an expression"
        )

    def train_batch(self, seed: int, step: int) -> Batch:
        return self._batch(f"train {seed} {step}")

    def eval_batch(self, index: int) -> Batch:
        return self._batch(f"eval {index}")

    def _batch(self, name: str) -> Batch:
        rows = [self._row(random.Random(f"{name} {row}")) for row in range(self.rows)]
        tokens, weights = (np.stack(part) for part in zip(*rows, strict=True))
        return Batch(tokens, weights)

    def _row(self, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and weights of a row: documents until the next does not fit, then byte 0."""
        tokens, weights = np.zeros(self.context + 1, np.uint8), np.zeros(self.context, np.float32)
        filled = 0
        while filled + len(document := self._document(rng)) <= len(tokens):
            tokens[filled : filled + len(document)] = np.frombuffer(document, np.uint8)
            filled += len(document)
            weights[filled - 2] = 1  # what is read there is "=", what is predicted the answer
        return tokens, weights

    def _document(self, rng: random.Random) -> bytes:
        while True:
            text: list[str] = []
            answer = expression(rng, text, self.longest, depth=1)
            if self.shortest <= len(text) <= self.longest:
                return START + f"{''.join(text)}={answer}".encode()


OPERATORS = {
    "m": min,
    "M": max,
    "D": lambda values: int(np.median(values)),
    "S": lambda values: sum(values) % 10,
}


def expression(rng: random.Random, text: list[str], longest: int, depth: int) -> int:
    """Append a random expression to `text` and return its value; past `longest` tokens, only end it."""
    if depth > 1 and (depth >= 10 or rng.random() > 0.25 or len(text) > longest):
        value = rng.randint(0, 9)
        text.append(str(value))
        return value
    operator = rng.choice(list(OPERATORS))
    text.append(operator)
    values = [expression(rng, text, longest, depth + 1) for _ in range(rng.randint(2, 10))]
    text.append("]")
    return OPERATORS[operator](values)
