"""Models of other packages give the same numbers with memeff, in less memory.

Each client of client_models.py runs three times: with memeff, as the package has it in float32, and
with attention written out in float64, which is the truth. The law of tolerance compares them.
`make clients` installs the packages and runs this.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from client_models import CLIENTS, block, block_params, tokens, written_out
from conftest import assert_as_good, watch_dispatch
from small_calls import temp_bytes

from memeff import dot_product_attention, switch_jax_nn, tile_sizes

pytestmark = [
    pytest.mark.clients,
    pytest.mark.filterwarnings("default"),  # the packages' own warnings
    pytest.mark.filterwarnings("error:.*(memeff|switch_jax_nn)"),
]

MIB = 2**20


@pytest.fixture
def small_tiles(monkeypatch):
    """Let the few tokens of these tests take several tiles."""
    monkeypatch.setattr(tile_sizes, "CPU_SIDES", {"windowed": (16, 16), "full": (16, 16)})


@pytest.mark.parametrize("name", CLIENTS)
def test_outputs_and_gradients(small_tiles, name):
    make_client, expected_calls = CLIENTS[name]

    def run(dtype, attention):
        client = make_client(dtype, attention)
        with client.context(attention) as switched:
            results = jax.jit(client.function)(client.params, client.x)
        return [np.asarray(x) for x in jax.tree.leaves(results)], switched

    with watch_dispatch() as calls:
        actual, switched = run("float32", dot_product_attention)
    if expected_calls is None:
        assert calls
    else:
        assert len(calls) == expected_calls
    assert switched is None or len(switched) == expected_calls
    with watch_dispatch() as calls:
        plain, _ = run("float32", None)
        with jax.enable_x64(True):
            truth, _ = run("float64", written_out)
    assert not calls  # the baselines are not memeff
    # A gradient may cancel to 0, as the gradient of a bias of all keys does. Its terms are as large
    # as another gradient.
    size = max(np.abs(x).max() for x in truth)
    for n, x in enumerate(truth):
        assert x.dtype == np.float64
        assert_as_good(actual[n], [plain[n]], x, "float32", f"{name}: result {n}", size)


@pytest.mark.parametrize("name", CLIENTS)
def test_memory(name):
    make_client, _ = CLIENTS[name]

    def bytes_with(attention):
        client = make_client("float32", attention)
        batch, _, *features = client.x.shape
        x = jax.ShapeDtypeStruct((batch, 2048, *features), client.x.dtype)
        with client.context(attention):
            return temp_bytes(client.function, (client.params, x))

    ours = bytes_with(dot_product_attention)
    plain = bytes_with(None)
    sizes = f"{ours / MIB:.0f} MiB, {plain / MIB:.0f} MiB without memeff"
    print(f"{name}: {sizes}")
    assert ours <= plain / 3, sizes


def test_optax_lbfgs(small_tiles):
    """Ten steps of L-BFGS in float64 are the same, step by step.

    The loops and branches of its line search hold the value and the gradient.
    """
    optax = pytest.importorskip("optax")

    def minimise(attention):
        params = block_params(np.float64)
        x = tokens(np.float64)
        optimiser = optax.lbfgs()

        def loss(params):
            error = block(attention)(params, x) - jnp.roll(x, 1, axis=1)
            return (error**2).mean()

        value_and_grad = optax.value_and_grad_from_state(loss)

        def step(carry, _):
            params, state = carry
            value, gradient = value_and_grad(params, state=state)
            updates, state = optimiser.update(
                gradient, state, params, value=value, grad=gradient, value_fn=loss
            )
            return (optax.apply_updates(params, updates), state), value

        (params, _), values = jax.lax.scan(step, (params, optimiser.init(params)), length=10)
        return values, params

    with jax.enable_x64(True):
        run = jax.jit(minimise, static_argnums=0)
        actual = run(dot_product_attention)
        expected = run(written_out)
        values, _ = actual
        assert values[-1] < 0.8 * values[0]
        assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
        jax.tree.map(assert_close, actual, expected)


@pytest.mark.parametrize("name", ["equinox, subclass", "haiku"])
def test_switch_says_what_it_cannot_reach(monkeypatch, name):
    """Modules that write attention out make the switch an error."""
    # as in a process in which no switch has run anything
    monkeypatch.setattr("memeff.switch._ran", set())
    make_client, _ = CLIENTS[name]
    client = make_client("float32", None)
    message = "memeff ran nothing, because nothing called jax.nn.dot_product_attention"
    with pytest.raises(ValueError, match=message), switch_jax_nn(strict=True):
        jax.eval_shape(client.function, client.params, client.x)
