"""Write files that survive a crash and a full disk, and report failures in one sentence.

A replaced file has its old contents or its new ones, never a part of either. A file that grows by
lines may end in a part of a line after a crash, and its reader drops that part.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from models.data import Refused


@contextlib.contextmanager
def one_sentence(script: str) -> Iterator[None]:
    """End the script with one sentence, not a traceback, where the user or the system is at fault."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell closed it
            setattr(sys, name, open(os.devnull, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
    try:
        yield
        sys.stdout.flush()  # the output may go to a file on a full disk
    except Refused as refusal:
        raise SystemExit(f"{script}: {refusal}") from None
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = (str(error).splitlines() or ["MemoryError"])[0]
        raise SystemExit(
            f"{script}: out of memory ({reason}): choose smaller sizes, such as those of batch and context."
        ) from None
    except OSError as error:
        sys.stdout = None  # Python would flush it again at exit and complain a second time
        raise SystemExit(f"{script}: {error}") from None


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a refusal that names `path`, the reason and the cure."""
    try:
        yield
    except OSError as error:
        raise Refused(
            f"cannot write {path} ({error.strerror or error}): make room on the disk or make the folder "
            "writable; the same command then goes on from the last checkpoint."
        ) from error


def replace_file(path: Path, contents: bytes) -> None:
    """Give the file at `path` these contents: write a temporary file beside it, then rename that."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        if path.is_file() and path.read_bytes() == contents:
            return
        try:
            write_file(temporary, contents)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_file(path: Path, contents: bytes | memoryview) -> None:
    """Write a file in a folder made for it if need be, and wait until the contents are on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())  # a rename may reach the disk before the contents do


def append_line(path: Path, line: str) -> None:
    """Add one line to the end of a file."""
    with writing(path), path.open("a") as file:
        file.write(line + "\n")


def sync(path: Path) -> None:
    """Wait until what was appended to `path` is on the disk."""
    with writing(path), path.open("ab") as file:
        os.fsync(file.fileno())


def warn(sentence: str) -> None:
    """Print a warning where it does not mix with the output."""
    print(f"warning: {sentence}", file=sys.stderr, flush=True)
