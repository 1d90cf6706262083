"""`memeff.replace_attention` computes the same in models that know nothing of memeff.

replaced_models.py has the models. `make clients` installs their packages and runs this.
"""

import functools

import jax
import pytest
from replaced_by_hand import HEADS, WIDTH, features
from replaced_models import MODELS
from replaced_results import MIB, gradient_bytes, largest_error, with_gradients

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
    report = memeff.find_attention(function, *args, min_logits=0)
    print(report)
    assert len(report.replaced) == model.replaced, str(report)
    replaced = memeff.replace_attention(function, strict=bool(model.replaced), min_logits=0)
    actual = jax.jit(with_gradients(replaced))(*args)
    expected = jax.jit(with_gradients(function))(*args)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert largest_error(actual, expected) < 1e-5


@pytest.mark.parametrize("name", REPLACED)
def test_memory(name):
    """The memory of a gradient is less than before, and twice as many tokens take twice as much.

    `quadratic` says which array of tokens x tokens stays, where one does.
    """
    model = MODELS[name]
    function, args = model.make(4096)
    before = gradient_bytes(function, args)
    after = gradient_bytes(memeff.replace_attention(function), args)
    sizes = f"{before / MIB:.0f} MiB before, {after / MIB:.0f} after"
    print(f"{name}: {sizes}")
    assert after < before / 2, sizes
    if not model.quadratic:
        function, args = model.make(8192)
        assert gradient_bytes(memeff.replace_attention(function), args) <= 2.2 * after


def test_modules_are_arguments():
    """Modules that hold their parameters need no splitting: Equinox's and NNX's are arguments."""
    eqx = pytest.importorskip("equinox")
    nnx = pytest.importorskip("flax.nnx")
    x = features(45, WIDTH)

    def run(layer, x):
        arguments = (x, x, x) if isinstance(layer, eqx.Module) else (x,)
        return layer(*arguments)

    def loss(function, layer, x):
        return (function(layer, x) ** 2).sum()

    replaced = memeff.replace_attention(run, strict=True, min_logits=0)
    equinox_layer = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=jax.random.key(0))
    nnx_layer = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=nnx.Rngs(0))
    for layer, grad in ((equinox_layer, eqx.filter_grad), (nnx_layer, nnx.grad)):
        gradients = []
        for function in (run, replaced):
            gradients.append(grad(functools.partial(loss, function))(layer, x))
        assert largest_error(gradients[1], gradients[0]) < 1e-5
