"""Test the tests: plant bugs, each of which a few of the fast tests must catch.

A mutant is a copy of memeff in which one piece of text is replaced (mutants.toml). Either named
cases catch it, compared with the oracle by the law of tolerance as in `test_numbers.test_float32`.
Or fast tests catch it, named by their node ids.
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
from conftest import OLD_JAX

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


def copy_to(folder: pathlib.Path) -> pathlib.Path:
    """Copy memeff and its tests to `folder`, and return it."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("memeff", "tests", "docs"):
        shutil.copytree(HERE.parent / name, folder / name, ignore=ignore)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(HERE.parent / file, folder)
    (folder / "numbers_.py").write_text(NUMBERS)
    return folder


def run_tests(folder: pathlib.Path, tests: str) -> subprocess.CompletedProcess:
    """Run the named cases or tests on the copy of memeff in `folder`."""
    words = shlex.split(tests)
    if all(":" in word and "::" not in word for word in words):
        command = [sys.executable, "numbers_.py", *words]
    else:
        # the fast set of JAX 0.10, which has tests marked `once`
        fast = f"{'not slow' if OLD_JAX else '(once or not slow)'} and not gpu and not clients"
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", fast]
        command = [sys.executable, "-m", "pytest", *options, *words]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


@functools.cache
def run_unharmed(tests: str, folder: pathlib.Path) -> tuple[int, str]:
    """Run tests on an unharmed copy once for all mutants that name them.

    Return the exit status and the output.
    """
    process = run_tests(folder, tests)
    return process.returncode, process.stdout + process.stderr


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory):
    return copy_to(tmp_path_factory.mktemp("unharmed"))


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_has_its_place(name):
    file, text, instead, _ = MUTANTS[name]
    count = (HERE.parent / "memeff" / file).read_text().count(text)
    assert count == 1, f"{file} must have this text once, and has it {count} times: {text}"
    assert text != instead


@pytest.mark.slow
def test_the_copy_is_what_runs(tmp_path):
    folder = copy_to(tmp_path)
    (folder / "memeff" / "version.py").write_text('__version__ = "a copy"\n')
    code = "import memeff; print(memeff.__version__)"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert process.stdout.strip() == "a copy", process.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_is_caught(name, tmp_path, unharmed):
    """The same tests pass on memeff as it is, and fail on the mutant by an assertion.

    A mutant that merely does not run would not show that the tests catch it.
    """
    file, text, instead, tests = MUTANTS[name]
    folder = copy_to(tmp_path)
    source = folder / "memeff" / file
    source.write_text(source.read_text().replace(text, instead))
    status, output = run_unharmed(tests, unharmed)
    assert status == 0, output[-2000:]
    old_jax = jax.__version__.startswith("0.10.")  # newer ones run all kernels
    if old_jax and " skipped" in output and " passed" not in output:
        pytest.skip(f"here {tests} is skipped")
    process = run_tests(folder, tests)
    output = process.stdout + process.stderr
    assert process.returncode != 0, f"not caught by {tests}"
    by_assertion = any(x in output for x in ("AssertionError", "assert ", "DID NOT RAISE"))
    assert by_assertion, f"does not run:\n{output[-2000:]}"
