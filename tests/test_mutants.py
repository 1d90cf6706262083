"""Tests of the tests: planted bugs, each of which a few of the fast tests must catch.

A mutant is a copy of memeff in which one piece of text is another. It is measured by what `test_numbers.test_float32` does
(the law of tolerance against the oracle) on named cases, or by fast tests named by their node id.
"""

import functools
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tomllib

import jax
import pytest

HERE = pathlib.Path(__file__).parent

NUMBERS = """
import sys
sys.path[:0] = [".", "tests"]
from conftest import assert_case, run_cases
for dtype, name in (word.split(":") for word in sys.argv[1:]):
    assert_case(run_cases((name,), dtype)[name], name, dtype)
"""

TABLE = tomllib.loads((HERE / "mutants.toml").read_text())["mutant"]
MUTANTS = {
    row["name"]: (row["file"], row["text"], row["instead"], row["caught_by"]) for row in TABLE
}


def copy_to(where: pathlib.Path) -> pathlib.Path:
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("memeff", "tests", "docs"):
        shutil.copytree(HERE.parent / folder, where / folder, ignore=ignore)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(HERE.parent / file, where)
    (where / "numbers_.py").write_text(NUMBERS)
    return where


def caught_by(where: pathlib.Path, tests: str) -> subprocess.CompletedProcess:
    """Runs the named cases or tests on the copy of memeff in `where`."""
    words = shlex.split(tests)
    if all(":" in word and "::" not in word for word in words):
        command = [sys.executable, "numbers_.py", *words]
    else:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    env = {**os.environ, "PYTHONPATH": str(where)}
    return subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, timeout=600)


@functools.cache
def _whole(tests: str, where: pathlib.Path) -> tuple[int, str]:
    done = caught_by(where, tests)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory):
    return copy_to(tmp_path_factory.mktemp("unharmed"))


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_has_its_place(name):
    file, text, instead, _ = MUTANTS[name]
    assert (HERE.parent / "memeff" / file).read_text().count(text) == 1, (
        f"{file} does not have this text exactly once: {text}"
    )
    assert text != instead


@pytest.mark.slow
def test_the_copy_is_what_runs(tmp_path):
    where = copy_to(tmp_path)
    (where / "memeff" / "version.py").write_text('__version__ = "a copy"\n')
    code = "import memeff; print(memeff.__version__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=where, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "a copy", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_caught(name, tmp_path, unharmed):
    """The same tests pass on memeff as it is, and fail on the mutant by an assertion (not because it does not run)."""
    file, text, instead, tests = MUTANTS[name]
    if file.startswith("pallas") and jax.__version__.startswith("0.10."):
        pytest.skip("kernels need jax 0.11, and this is 0.10")
    where = copy_to(tmp_path)
    source = where / "memeff" / file
    source.write_text(source.read_text().replace(text, instead))
    status, words = _whole(tests, unharmed)
    assert status == 0, words[-2000:]
    done = caught_by(where, tests)
    words = done.stdout + done.stderr
    assert done.returncode != 0, f"not caught by {tests}"
    assert "AssertionError" in words or "assert " in words, f"does not run:\n{words[-2000:]}"
