"""README and docs/ are true: code runs, drawings and tables match, links lead somewhere."""

import importlib.util
import pathlib
import pkgutil
import re
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import memeff
from memeff import bench
from memeff.bench.cases import case_row
from memeff.masking import mask_tile
from memeff.problem import Operands, Problem
from memeff.units import parse_bytes

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {"README.md": README}
for path in sorted((ROOT / "docs").glob("*.md")):
    PAGES[f"docs/{path.name}"] = path.read_text()
BENCHMARKS = PAGES["docs/benchmarks.md"]


# ---- code


def python_blocks(page: str) -> list[tuple[str | None, str]]:
    """Return a page's blocks of Python: the package that each needs, or None, and the code."""
    blocks = []
    for block in re.findall(r"^```python\n(.*?)^```$", PAGES[page], re.M | re.S):
        package = re.match(r"# needs (\w+)\n", block)
        blocks.append((package[1] if package else None, block))
    return blocks


def packages(page: str) -> list[str]:
    """Return the package that each block of a page needs, for the blocks that need one."""
    return [package for package, _ in python_blocks(page) if package]


WITH_CODE = [page for page in PAGES if python_blocks(page)]
PAGE_AND_PACKAGE = [(page, package) for page in WITH_CODE for package in packages(page)]


def test_pages_have_code():
    assert len(python_blocks("README.md")) >= 2
    assert {
        "docs/adopting.md",
        "docs/derivatives.md",
        "docs/memory.md",
        "docs/scores-and-masks.md",
    } < set(WITH_CODE)


def pages_with_code() -> list:
    """Return parameters: the README, and the pages, whose code CI runs among the slow tests."""
    slow = pytest.mark.slow
    return [x if x == "README.md" else pytest.param(x, marks=slow) for x in WITH_CODE]


@pytest.mark.parametrize("page", pages_with_code())
@pytest.mark.once
def test_python_blocks_run(page):
    """The blocks of a page run one after the other, in the same names.

    Blocks that need another package run in `make clients`.
    """
    names: dict = {}
    for package, block in python_blocks(page):
        if package is None:
            exec(block, names)
    if page == "README.md":
        assert names["out"].shape == (1, 2048, 8, 64)


@pytest.mark.clients
@pytest.mark.filterwarnings("default")  # the packages' own
@pytest.mark.filterwarnings("error:.*(memeff|switch_jax_nn)")
@pytest.mark.parametrize(("page", "package"), PAGE_AND_PACKAGE)
def test_python_blocks_run_with_other_packages(page, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which make clients installs")
    names = {"jax": jax, "jnp": jnp, "memeff": memeff}
    for needed, block in python_blocks(page):
        if needed == package:
            exec(block, names)


# ---- drawings and tables


LENGTHS = {"q_lengths": jnp.array([3]), "kv_lengths": jnp.array([4])}
SEGMENTS = {"q_segments": jnp.array([[0, 0, 1, 1]]), "kv_segments": jnp.array([[0, 0, 1, 1, 1]])}
DRAWN = [
    ("causal, T=4 S=5", Problem(right=0), {}),
    ("causal, q_offset=1", Problem(right=0, q_offset=1), {}),
    ("window (1, 0)", Problem(left=1, right=0), {}),
    ("lengths: query 3, key 4", Problem(), LENGTHS),
    ("segments 0 0 1 1 / 0 0 1 1 1", Problem(), SEGMENTS),
]


def read_drawing(title: str) -> list[list[bool]]:
    """Return the mask that the README draws under a title."""
    lines = README.splitlines()
    is_title = [title in line and "causal, T=4 S=5" in line for line in lines]
    line_number = is_title.index(True)
    start = lines[line_number].index(title)
    drawn = []
    for line in lines[line_number + 1 : line_number + 5]:
        drawn.append([character == "#" for character in line[start : start + 9 : 2]])
    return drawn


@pytest.mark.parametrize(("title", "problem", "arrays"), DRAWN, ids=[row[0] for row in DRAWN])
def test_drawn_masks(title, problem, arrays):
    query = jnp.zeros((1, 4, 1, 1))
    key = jnp.zeros((1, 5, 1, 1))
    operands = Operands(query, key, key)._replace(**arrays)
    mask = mask_tile(problem, operands, jnp.arange(4), jnp.arange(5))
    keep = jnp.broadcast_to(mask, (1, 1, 1, 4, 5))
    np.testing.assert_array_equal(keep[0, 0, 0], read_drawing(title))


def table(text: str, name: str) -> list[list[str]]:
    """Return the cells of a generated table, its header first."""
    _, marker, rest = text.partition(f"<!-- table: {name} -->\n")
    assert marker, name
    header, _, *rows = rest.partition("<!-- end -->")[0].strip().splitlines()
    cells = []
    for line in (header, *rows):
        cells.append([cell.strip() for cell in line.strip("|").split("|")])
    return cells


def test_the_chart_is_the_tables():
    """The chart is `bench.chart` of the last columns of the table of memory."""
    rows = []
    for tokens, *_, plain, ours, _ in table(BENCHMARKS, "memory-causal")[1:]:
        length = int(tokens[:-1]) * {"k": 2**10, "M": 2**20}[tokens[-1]]
        for name, size in (("jax.nn", plain), ("memeff", ours)):
            row = case_row(name, bench.Case(length, mode="gradient"))
            row["temp_bytes"] = parse_bytes("", size.removeprefix("~"))
            row["extrapolated"] = size.startswith("~")
            rows.append(row)
    assert len(rows) == 12
    assert bench.chart(rows) in README


def test_the_readmes_tables_are_rows_of_the_whole_ones():
    header, *memory = table(README, "readme-memory")
    whole_header, *whole = table(BENCHMARKS, "memory-causal")
    assert len(memory) == 3
    assert header == [whole_header[0], *whole_header[-3:]]
    short_rows = [[cells[0], *cells[-3:]] for cells in whole]
    assert all(row in short_rows for row in memory)

    header, *speed = table(README, "readme-speed")
    assert len(speed) == 7
    assert header[0] == "device"
    tables = {"H200": "speed-h200-8k"}
    for device, *row in speed:
        whole_header, *whole = table(BENCHMARKS, tables.get(device, "speed-cpu-amd"))
        columns = [whole_header.index(name) for name in header[1:]]
        short_rows = []
        for cells in whole:
            short_rows.append([cells[column] for column in columns])
        assert row in short_rows


# ---- links and the menu


def slug(heading: str) -> str:
    """Return the anchor that GitHub and MkDocs make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """Links inside the repository lead to files and headings; `make docs` checks the site's."""
    text = re.sub(r"^```.*?^```$", "", PAGES[page], flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert anchor in [slug(heading) for heading in headings], target


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": (\S+\.(?:md|ipynb))$", menu, re.M)
    notebooks = [f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")]
    pages = [page.removeprefix("docs/") for page in PAGES if page != "README.md"]
    assert sorted(listed) == sorted(["index.md", *pages, *notebooks])


def test_the_api_shows_every_public_name_and_no_module_in_its_place():
    """MkDocs reads files: the module memeff/merge.py hides the function memeff.merge from it."""
    modules = {module.name for module in pkgutil.walk_packages(memeff.__path__, "memeff.")}
    entry = r"^::: (\S+)\n(?:    options:\n(?:      heading: (.*)\n)?)?(?:      members: \[(.*)])?"
    shown = set()
    for name, heading, members in re.findall(entry, PAGES["docs/api.md"], re.M):
        title = heading or name
        read = pkgutil.resolve_name(name if name in modules else ":".join(name.rsplit(".", 1)))
        assert read is pkgutil.resolve_name(title.replace(".", ":", 1)), name
        shown.add(title)
        for member in members.split(", "):
            assert f"{name}.{member}" not in modules
    names = {f"memeff.{name}" for name in memeff.__all__}
    assert names - shown == {"memeff.RESIDUAL_NAMES", "memeff.__version__"}


def test_nothing_in_the_readme_needs_the_repository_to_show():
    """Pictures have absolute addresses, because PyPI shows no relative ones and no data: URLs."""
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)|<img[^>]*src=.([^\"' >]*)", README)
    for pair in pictures:
        for address in pair:
            assert not address or address.startswith("https://")


# ---- the package


def test_what_the_package_tells_of_itself():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    assert (ROOT / "memeff" / "py.typed").is_file()
    assert setuptools["package-data"] == {"memeff": ["py.typed"]}
    modules = pkgutil.walk_packages(memeff.__path__, "memeff.")
    folders = {module.name for module in modules if module.ispkg}
    assert set(setuptools["packages"]) == {"memeff", *folders}
    urls = project["project"]["urls"]
    assert urls
    cited = (ROOT / "CITATION.cff").read_text()
    for label, url in urls.items():
        assert url.startswith("https://")
        assert url in cited
        assert len(label) <= 32  # PyPI's limit
