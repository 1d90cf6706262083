"""The oracle is independent: it imports NumPy only, and its gradients are finite differences."""

import ast
import pathlib
import re
import subprocess
import sys

import numpy as np
import oracle
from cases import CASES
from conftest import run_calls

TESTS = pathlib.Path(__file__).parent


def test_the_oracle_imports_numpy_only():
    tree = ast.parse((TESTS / "oracle.py").read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported - sys.stdlib_module_names == {"numpy"}
    assert not re.search(r"__import__|importlib", ast.unparse(tree))


def test_the_oracle_runs_without_jax():
    code = "import sys, oracle; assert not {'jax', 'memeff', 'jaxlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=TESTS, check=True)


def test_the_oracle_derives_itself():
    """The oracle's hand-made gradients are finite differences of its own forward."""
    rng = np.random.default_rng(0)
    shapes = (1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 3), (2, 1, 4)
    args = [rng.standard_normal(shape) for shape in shapes]
    kept = rng.random((3, 4)) < 0.7
    dout = rng.standard_normal((1, 3, 2, 3))
    dlse = rng.standard_normal((1, 3, 2))
    kwargs = {"is_causal": True, "q_offset": 1, "kept": kept, "dropout_rate": 0.3}
    scalars = {"scale": 0.8, "logits_soft_cap": 1.3}

    def loss(query, key, value, bias, scale, logits_soft_cap):
        out, lse = oracle.attention(
            query, key, value, bias, scale=scale, logits_soft_cap=logits_soft_cap, **kwargs
        )
        return (out * dout).sum() + (lse * dlse).sum()

    point = [*args, *map(np.array, scalars.values())]

    def shifted_loss(i, index, step):
        shifted = [x.copy() for x in point]
        shifted[i][index] += step
        return loss(*shifted)

    grads = oracle.gradients(*args, **scalars, **kwargs, dout=dout, dlse=dlse)
    for i, name in enumerate(("query", "key", "value", "bias", "scale", "logits_soft_cap")):
        for index in np.ndindex(point[i].shape):
            up = shifted_loss(i, index, 1e-6)
            down = shifted_loss(i, index, -1e-6)
            actual = np.asarray(grads[name])[index]
            np.testing.assert_allclose(actual, (up - down) / 2e-6, atol=1e-8, err_msg=name)


def test_run_calls_gives_the_names_back():
    args, kwargs = CASES["one_key"].inputs()
    assert set(run_calls({"a": (args, kwargs)})["a"].grads) == {"query", "key", "value", "bias"}
