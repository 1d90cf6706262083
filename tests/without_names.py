"""Remove names that come from Python code from lowered programs."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path


def without_names(text: str) -> str:
    """Replace function names by their order of appearance, and drop other names from Python."""
    text = re.sub(r"module @\S+", "module", text)
    text = re.sub(r'jax\.result_info = "[^"]*"', "", text)
    numbers: dict[str, str] = {}

    def number(match: re.Match) -> str:
        return numbers.setdefault(match[0], f"@{len(numbers)}")

    return re.sub(r"(?<!custom_call )@[\w.$-]+", number, text)


def write_without_names(folder: Path, programs: Iterable[tuple[str, str]]) -> None:
    """Write the text of each program (name, text) to a file, and all digests to digests.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "digests.txt").open("w") as digests:
        for name, text in programs:
            text = without_names(text)
            file = re.sub(r"\W+", "_", name)
            (folder / file).with_suffix(".txt").write_text(text)
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            print(digest, name, file=digests, flush=True)
