"""The README's Python blocks run top to bottom, and its drawn masks are what `visible` says."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from memeff.problem import Operands, Problem, visible

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
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
    here = Operands(jnp.zeros((1, 4, 1, 1, 1)), jnp.zeros((1, 5, 1, 1)), jnp.zeros((1, 5, 1, 1)))._replace(**arrays)
    keep = jnp.broadcast_to(visible(problem, here, jnp.arange(4), jnp.arange(5)), (1, 1, 1, 4, 5))
    np.testing.assert_array_equal(keep[0, 0, 0], drawn)
