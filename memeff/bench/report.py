"""`python -m memeff.bench report`: write the tables of README.md and docs/*.md from results.

A table stands between the lines `<!-- table: NAME -->` and `<!-- end -->`. Its figures are in
docs/benchmarks/NAME.jsonl, whose format `memeff/bench/results.py` describes.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from memeff.bench.options import new_parser
from memeff.bench.results import FOLDER, ResultsError, read_results, results_markdown

TABLE = re.compile(r"^<!-- table: (?P<name>\S+) -->\n.*?^<!-- end -->$", re.M | re.S)
MARKER = re.compile(r"^<!-- (?:table: (?P<name>\S+)|end) -->$", re.M)


def main(arguments: Sequence[str]) -> None:
    """Run the command line; exit with 1 if a table is wrong."""
    options = parse(arguments)
    problems = write_report(Path(options.root), check=options.check)
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(1 if problems else 0)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = new_parser("report", __doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit with 1 if a table differs"
    )
    parser.add_argument(
        "--root", default=".", metavar="FOLDER", help="the repository (default: this folder)"
    )
    return parser.parse_args(arguments)


def write_report(root: Path, *, check: bool) -> list[str]:
    """Rewrite the tables of all pages, or with `check` only compare them; return what is wrong.

    Problems are a table that differs (only with `check`), a table without usable results, a marker
    without a partner, and a file of results that no page shows.
    """
    problems = []
    shown = set()
    for path in pages(root):
        text = path.read_text()
        page = rewrite_page(text, root / FOLDER)
        label = path.relative_to(root)
        problems += [f"{label}: {problem}" for problem in page.problems]
        shown.update(page.tables)
        if check:
            problems += [f"{label}: table {name} differs." for name in page.changed]
        elif page.text != text:
            path.write_text(page.text)
    for path in sorted((root / FOLDER).glob("*.jsonl")):
        if path.stem not in shown:
            problems.append(f"{path.relative_to(root)}: no page shows this table.")
    return problems


class Page(NamedTuple):
    """A page with its tables written anew."""

    text: str
    tables: list[str]  # the names of all tables
    changed: list[str]  # of those that were different before
    problems: list[str]


def rewrite_page(text: str, folder: Path) -> Page:
    """Return the text of a page with all tables replaced by those of the results in `folder`."""
    markers = [match["name"] for match in MARKER.finditer(text)]
    tables = [name for name in markers[::2] if name is not None]
    ends = [name for name in markers[1::2] if name is None]
    if len(tables) + len(ends) != len(markers) or len(tables) != len(ends):
        return Page(text, tables, [], ["a marker of a table has no partner."])
    changed = []
    problems = []

    def replaced(old: re.Match[str]) -> str:
        name = old["name"]
        try:
            table = results_markdown(read_results(folder, name))
        except ResultsError as error:
            problems.append(f"table {name}: {error}")
            return old[0]
        new = f"<!-- table: {name} -->\n{table}\n<!-- end -->"
        if new != old[0]:
            changed.append(name)
        return new

    return Page(TABLE.sub(replaced, text), tables, changed, problems)


def pages(root: Path) -> list[Path]:
    """Return the pages that may have tables."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]
