"""The code of the README and of docs/ runs, drawings and links are true; what the package tells of itself."""

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
from memeff.masking import mask_tile
from memeff.problem import Operands, Problem
from memeff.units import parse_bytes

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = {"README.md": README} | {
    f"docs/{path.name}": path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))
}
BENCHMARKS = PAGES["docs/benchmarks.md"]
LENGTHS = {"q_lengths": jnp.array([3]), "kv_lengths": jnp.array([4])}
SEGMENTS = {"q_segments": jnp.array([[0, 0, 1, 1]]), "kv_segments": jnp.array([[0, 0, 1, 1, 1]])}
DRAWN = [
    ("causal, T=4 S=5", Problem(right=0), {}),
    ("causal, q_offset=1", Problem(right=0, q_offset=1), {}),
    ("window (1, 0)", Problem(left=1, right=0), {}),
    ("lengths: query 3, key 4", Problem(), LENGTHS),
    ("segments 0 0 1 1 / 0 0 1 1 1", Problem(), SEGMENTS),
]


def python_blocks(page: str) -> list[tuple[str | None, str]]:
    """Return a page's blocks of Python: the package that each needs beside memeff's own, and the code."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGES[page], re.M | re.S)
    needs = [re.match(r"# needs (\w+)\n", block) for block in blocks]
    return [(need[1] if need else None, block) for need, block in zip(needs, blocks, strict=True)]


WITH_CODE = [page for page in PAGES if python_blocks(page)]
WITH_OTHER_PACKAGES = [
    page for page in WITH_CODE if any(package for package, _ in python_blocks(page))
]


def test_pages_have_code():
    assert len(python_blocks("README.md")) >= 2
    assert {
        "docs/adopting.md",
        "docs/derivatives.md",
        "docs/memory.md",
        "docs/scores-and-masks.md",
    } < set(WITH_CODE)


@pytest.mark.parametrize("page", WITH_CODE)
def test_python_blocks_run(page):
    """Those of a page, one after the other. What needs another package runs in `make clients`."""
    names: dict = {}
    for package, block in python_blocks(page):
        if package is None:
            exec(block, names)
    if page == "README.md":
        assert names["out"].shape == (1, 2048, 8, 64)


@pytest.mark.clients
@pytest.mark.filterwarnings("default")  # the packages' own
@pytest.mark.filterwarnings("error:.*(memeff|switch_jax_nn)")
@pytest.mark.parametrize(
    ("page", "package"),
    [
        (page, package)
        for page in WITH_OTHER_PACKAGES
        for package, _ in python_blocks(page)
        if package
    ],
)
def test_python_blocks_run_with_other_packages(page, package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}, which make clients installs")
    names = {"jax": jax, "jnp": jnp, "memeff": memeff}
    blocks = [block for needed, block in python_blocks(page) if needed == package]
    for block in blocks:
        exec(block, names)


@pytest.mark.parametrize(("title", "problem", "arrays"), DRAWN, ids=[d[0] for d in DRAWN])
def test_drawn_masks(title, problem, arrays):
    lines = README.splitlines()
    at = next(i for i, line in enumerate(lines) if title in line and "causal, T=4 S=5" in line)
    start = lines[at].index(title)
    drawn = [[c == "#" for c in line[start : start + 9 : 2]] for line in lines[at + 1 : at + 5]]
    here = Operands(
        jnp.zeros((1, 4, 1, 1, 1)), jnp.zeros((1, 5, 1, 1)), jnp.zeros((1, 5, 1, 1))
    )._replace(**arrays)
    keep = jnp.broadcast_to(mask_tile(problem, here, jnp.arange(4), jnp.arange(5)), (1, 1, 1, 4, 5))
    np.testing.assert_array_equal(keep[0, 0, 0], drawn)


def table(text: str, name: str) -> list[list[str]]:
    """Return the cells of a generated table, its header first."""
    _, found, rest = text.partition(f"<!-- table: {name} -->\n")
    assert found, name
    header, _, *rows = rest.partition("<!-- end -->")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *rows)]


def test_the_chart_is_the_tables():
    """`bench.chart` of the last columns of the table of memory."""
    rows = []
    for tokens, *_, plain, ours, _ in table(BENCHMARKS, "memory-causal")[1:]:
        length = int(tokens[:-1]) * {"k": 2**10, "M": 2**20}[tokens[-1]]
        for name, told in (("jax.nn", plain), ("memeff", ours)):
            size = parse_bytes("", told.removeprefix("~"))
            row = {"length": length, "implementation": name, "mask": "causal", "mode": "gradient"}
            rows.append(row | {"temp_bytes": size, "extrapolated": told.startswith("~")})
    assert len(rows) == 12
    assert bench.chart(rows) in README


def test_the_readmes_tables_are_rows_of_the_whole_ones():
    header, *memory = table(README, "readme-memory")
    whole_header, *whole = table(BENCHMARKS, "memory-causal")
    assert len(memory) == 3 and header == [whole_header[0], *whole_header[-3:]]
    assert all(row in [[cells[0], *cells[-3:]] for cells in whole] for row in memory)
    header, *speed = table(README, "readme-speed")
    assert len(speed) == 7 and header[0] == "device"
    for device, *row in speed:
        whole_header, *whole = table(
            BENCHMARKS, {"H200": "speed-h200-8k"}.get(device, "speed-cpu-amd")
        )
        columns = [whole_header.index(name) for name in header[1:]]
        assert row in [[cells[column] for column in columns] for cells in whole]


def slug(heading: str) -> str:
    """Return the anchor that GitHub and MkDocs make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    """In the repository; `make docs` checks those of the site."""
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
    listed = re.findall(r": (\S+\.(?:md|ipynb))$", (ROOT / "mkdocs.yml").read_text(), re.M)
    notebooks = [f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")]
    pages = [page.removeprefix("docs/") for page in PAGES if page != "README.md"]
    assert sorted(listed) == sorted(["index.md", *pages, *notebooks])


def test_nothing_in_the_readme_needs_the_repository_to_show():
    """PyPI renders pictures at absolute addresses alone: none that are relative, and no data: in the text."""
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)|<img[^>]*src=.([^\"' >]*)", README)
    assert all(address.startswith("https://") for pair in pictures for address in pair if address)


def test_what_the_package_tells_of_itself():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = project["tool"]["setuptools"]
    assert (ROOT / "memeff" / "py.typed").is_file()
    assert setuptools["package-data"] == {"memeff": ["py.typed"]}
    folders = {m.name for m in pkgutil.walk_packages(memeff.__path__, "memeff.") if m.ispkg}
    assert set(setuptools["packages"]) == {"memeff", *folders}
    urls = project["project"]["urls"]
    cited = (ROOT / "CITATION.cff").read_text()
    assert urls and all(url.startswith("https://") and url in cited for url in urls.values())
    assert all(len(label) <= 32 for label in urls)  # PyPI's limit
