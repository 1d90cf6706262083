"""`memeff.replace_attention` computes the same in models that know nothing of memeff.

replaced_models.py has the models. `make clients` installs their packages and runs this.
"""

import jax
import jax.numpy as jnp
import pytest
from conftest import watch_dispatch
from replaced_models import MODELS
from replaced_results import MIB, largest_error, temp_bytes, with_gradients

import memeff
from memeff import tile_sizes

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # the packages' own warnings
    pytest.mark.filterwarnings("error:.*(memeff|replace_attention)"),
]

TOKENS = 45
REPLACED = {name: model for name, model in MODELS.items() if model.replaced}


@pytest.fixture
def small_tiles(monkeypatch):
    """Let the few tokens of these tests take several tiles."""
    monkeypatch.setattr(tile_sizes, "CPU_SIDES", {"windowed": (16, 16), "full": (16, 16)})


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(small_tiles, name):
    model = MODELS[name]
    function, args = model.make(TOKENS)
    expected = jax.jit(with_gradients(function))(*args)
    replaced = memeff.replace_attention(function)
    with watch_dispatch() as calls:
        jax.eval_shape(replaced, *args)
    assert len(calls) == model.replaced
    actual = jax.jit(with_gradients(replaced))(*args)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert largest_error(actual, expected) < 1e-5


@pytest.mark.parametrize("name", REPLACED)
def test_memory(name):
    """The memory of a gradient grows with the tokens, and is less than before."""
    model = MODELS[name]
    sizes = {}
    for tokens in (4096, 8192):
        function, args = model.make(tokens)
        sizes[tokens] = temp_bytes(memeff.replace_attention(function), args)
    function, args = model.make(4096)
    before = temp_bytes(function, args)
    text = f"{before / MIB:.0f} MiB before, {sizes[4096] / MIB:.0f} after"
    print(f"{name}: {text}")
    assert sizes[4096] < before / 2, text
    if not model.quadratic:
        assert sizes[8192] <= 2.2 * sizes[4096]
