"""Run the scripts of this folder in processes of their own, and read what they print."""

import os
import pathlib
import re
import subprocess
import sys


def output_of(script: str, *arguments: str, **environment: str) -> str:
    """Return what a script prints, errors included."""
    run = subprocess.run(
        [sys.executable, pathlib.Path(__file__).with_name(script), *arguments],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3000,
    )
    assert run.returncode == 0, run.stdout[-2000:]
    return run.stdout


def output_of_cases(script: str, *arguments: str) -> dict[str, str]:
    """Return what a script prints of each case, after a line "case NAME"."""
    _, *parts = re.split(r"^case (.*)\n", output_of(script, *arguments), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))
