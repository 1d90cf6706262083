"""The notebooks run top to bottom in their short form, and the committed .ipynb are their sources with outputs.

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
MISSING = [
    name
    for name in ("jupytext", "nbclient", "ipykernel", "matplotlib")
    if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install 'memeff[notebooks]'"
)


def execute(source: Path, short: bool, monkeypatch: pytest.MonkeyPatch):
    """The notebook with its outputs; the kernel finds this checkout whether or not memeff is installed."""
    with warnings.catch_warnings():
        # of jupyter's own libraries; the kernel's warnings are outputs
        warnings.simplefilter("ignore")
        import jupytext
        import nbclient

        monkeypatch.setenv("MEMEFF_NOTEBOOK_SHORT", "1" if short else "0")
        monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
        notebook = jupytext.read(source)
        at = {"metadata": {"path": str(source.parent)}}
        client = nbclient.NotebookClient(
            notebook, timeout=3600, kernel_name="python3", resources=at, record_timing=False
        )
        client.coalesce_streams = True
        return client.execute()


def cells(notebook) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_runs_top_to_bottom_in_its_short_form(source, monkeypatch):
    notebook = execute(source, True, monkeypatch)  # a cell that raises, raises here
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    assert not [out for cell in code for out in cell.outputs if out.get("name") == "stderr"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_committed_notebook_is_its_source_with_outputs(source):
    import jupytext
    import nbformat

    path = source.with_suffix(".ipynb")
    assert path.stat().st_size < 2**20
    committed = nbformat.read(path, as_version=4)
    assert cells(committed) == cells(jupytext.read(source)), "run: python tests/test_notebooks.py"
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert 10 <= len(code) <= 14
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [out for cell in code for out in cell.outputs]
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    assert [out for out in outputs if "image/png" in out.get("data", {})]
    kinds = [cell.cell_type for cell in committed.cells]
    assert all(
        before == "markdown"
        for before, kind in zip(kinds, kinds[1:], strict=False)
        if kind == "code"
    )


def write(names: list[str]) -> None:
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
        nbformat.write(notebook, source.with_suffix(".ipynb"))
        print(
            f"{source.with_suffix('.ipynb').relative_to(ROOT)}: {time.perf_counter() - start:.0f} s"
        )


if __name__ == "__main__":
    write(sys.argv[1:])
