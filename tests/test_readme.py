"""The README's Python blocks run, its drawings are true and show anywhere; what the package tells of itself."""

import pathlib
import pkgutil
import re
import tomllib

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
LENGTHS = {"q_lengths": jnp.array([3]), "kv_lengths": jnp.array([4])}
SEGMENTS = {"q_segments": jnp.array([[0, 0, 1, 1]]), "kv_segments": jnp.array([[0, 0, 1, 1, 1]])}
DRAWN = [
    ("causal, T=4 S=5", Problem(right=0), {}),
    ("causal, q_offset=1", Problem(right=0, q_offset=1), {}),
    ("window (1, 0)", Problem(left=1, right=0), {}),
    ("lengths: query 3, key 4", Problem(), LENGTHS),
    ("segments 0 0 1 1 / 0 0 1 1 1", Problem(), SEGMENTS),
]


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 2
    names: dict = {}
    for block in blocks:
        exec(block, names)
    assert names["out"].shape == (1, 4096, 8, 64)


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


def test_the_chart_is_the_tables():
    """`bench.chart` of the last columns of the table of memory."""
    rows, table = [], README.partition("| tokens | query, key, value |")[2].partition("\n\n")[0]
    cells = re.findall(r"^\| +(\d+)([kM]) \|" + r"([^|\n]*)\|" * 7 + "$", table, re.M)
    for number, unit, *_, plain, ours, _ in cells:
        length = int(number) * {"k": 2**10, "M": 2**20}[unit]
        for name, told in (("jax.nn", plain.strip()), ("memeff", ours.strip())):
            size = parse_bytes("", told.removeprefix("~"))
            row = {"length": length, "implementation": name, "mask": "causal", "mode": "gradient"}
            rows.append(row | {"temp_bytes": size, "extrapolated": told.startswith("~")})
    assert len(rows) == 12
    assert bench.chart(rows) in README


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
