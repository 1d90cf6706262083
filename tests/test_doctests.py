"""The examples in memeff's docstrings run."""

import doctest
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few

import memeff

MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(memeff.__path__, "memeff.")
    if not name.endswith("__main__")
]


# The examples of Flax's modules compile many small programs; test_flax_*.py run these modules, too.
FAST = [name for name in ("memeff", *MODULES) if not name.startswith("memeff.nn.")]


@pytest.mark.parametrize("name", few(["memeff", *MODULES], FAST))
def test_docstring_examples(name):
    module = importlib.import_module(name)
    known = {
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "memeff": memeff,
        "dot_product_attention": memeff.dot_product_attention,
    }
    failed, _ = doctest.testmod(
        module, extraglobs=known, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0, f"{failed} examples of {name} fail; run with -s to see them"


def test_there_is_an_example():
    assert ">>>" in (memeff.dot_product_attention.__doc__ or "")
