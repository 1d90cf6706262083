"""The notebooks run top to bottom in their short form; the .ipynb are their sources with outputs.

`python tests/test_notebooks.py [NAME ...]` executes them in full and writes the .ipynb.
"""

import importlib.util
import os
import sys
import time
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "notebooks").glob("*.py"))
NEEDED = ("jupytext", "nbclient", "ipykernel", "matplotlib")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install 'memeff[notebooks]'"
)


def notebook_name(path: Path) -> str:
    return path.stem


each_source = pytest.mark.parametrize("source", SOURCES, ids=notebook_name)


def execute(source: Path, short: bool, monkeypatch: pytest.MonkeyPatch):
    """Return the notebook with its outputs.

    The kernel finds this checkout whether or not memeff is installed.
    """
    with warnings.catch_warnings():
        # warnings of jupyter's own libraries; the kernel's warnings are outputs
        warnings.simplefilter("ignore")
        import jupytext
        import nbclient

        monkeypatch.setenv("MEMEFF_NOTEBOOK_SHORT", "1" if short else "0")
        monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        client = nbclient.NotebookClient(
            jupytext.read(source),
            timeout=3600,
            kernel_name="python3",
            resources={"metadata": {"path": str(source.parent)}},
            record_timing=False,
        )
        client.coalesce_streams = True
        return client.execute()


def cells(notebook) -> list[tuple[str, str]]:
    """Return the kind and the source of each cell."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook) -> list:
    """Return the outputs of all cells of code."""
    return [output for cell in code_cells(notebook) for output in cell.outputs]


@pytest.mark.slow
@each_source
def test_runs_top_to_bottom_in_its_short_form(source, monkeypatch):
    notebook = execute(source, True, monkeypatch)  # a cell that raises, raises here
    assert all(cell.execution_count for cell in code_cells(notebook))
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]


@each_source
def test_committed_notebook_is_its_source_with_outputs(source):
    import jupytext
    import nbformat

    path = source.with_suffix(".ipynb")
    assert path.stat().st_size < 2**20
    committed = nbformat.read(path, as_version=4)
    assert cells(committed) == cells(jupytext.read(source)), "run: python tests/test_notebooks.py"
    counts = [cell.execution_count for cell in code_cells(committed)]
    assert 10 <= len(counts) <= 14
    assert counts == list(range(1, len(counts) + 1))
    pictures = 0
    for output in outputs(committed):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"
        pictures += "image/png" in output.get("data", {})
    assert pictures
    kinds = [cell.cell_type for cell in committed.cells]
    for before, kind in zip(kinds, kinds[1:], strict=False):
        assert kind != "code" or before == "markdown"


def write(names: list[str]) -> None:
    """Execute the named notebooks, or all of them, and write the .ipynb."""
    import nbformat

    for source in SOURCES:
        if names and source.stem not in names:
            continue
        start = time.perf_counter()
        with pytest.MonkeyPatch.context() as monkeypatch:
            notebook = execute(source, False, monkeypatch)
        for number, cell in enumerate(notebook.cells):
            cell.id = f"cell-{number}"  # no random names in the diff
        notebook.metadata.pop("widgets", None)
        path = source.with_suffix(".ipynb")
        nbformat.write(notebook, path)
        print(f"{path.relative_to(ROOT)}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    write(sys.argv[1:])
