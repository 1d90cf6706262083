"""`memeff.replace_attention` of logits that are sums of several products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from replaced_checks import find, qkv, replace, result_and_gradients, run_replaced
from small_calls import assert_close, temp_bytes

import memeff


def latent(q, k, v, x):
    """As in DeepSeek's attention: part of the key is rotated, and shared by all heads."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k)
    s = s + jnp.einsum("btnh,bsh->bnts", x["rotated_query"], x["rotated_key"])
    return hidden_later(s * 0.3), v


def positions_apart(q, k, v, x):
    """Products of tokens and of positions, each with its scale. One is halved and subtracted."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.3
    return s - jnp.einsum("tnh,snh->nts", x["places"], x["places"]) * 0.15, v


def three_products(q, k, v, x):
    s = jnp.einsum("bsnh,btnh->btsn", k, q) - jnp.einsum("btnh,bsh->btsn", q, x["key"])
    s = (-s + jnp.einsum("btnh,snh->btsn", x["rotated_query"], x["rotated_places"])) / 2
    return hidden_later(3 * jnp.tanh(s.transpose(0, 3, 1, 2) / 3)), v


def product_of_keys(q, k, v, x):
    """The second product is the same for all queries."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k)
    return s + jnp.einsum("nh,bsnh->bns", x["places"][0], k)[:, :, None], v


def vectors_of_pairs(q, k, v, x):
    """The keys of the second product differ from query to query."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k)
    return s + jnp.einsum("btnh,tsh->bnts", q, x["pairs"]), v


def unequal_scales(q, k, v, x):
    """No power of two leads from one scale to the other."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.3
    return s + 0.2 * jnp.einsum("btnh,bsh->bnts", x["rotated_query"], x["rotated_key"]), v


def masked_apart(q, k, v, x):
    """A mask lies between the products."""
    s = hidden_later(jnp.einsum("btnh,bsnh->bnts", q, k))
    return s + jnp.einsum("btnh,bsh->bnts", x["rotated_query"], x["rotated_key"]), v


def hidden_later(s):
    return jnp.where(jnp.arange(s.shape[-1]) <= jnp.arange(s.shape[-2])[:, None], s, -1e30)


PRODUCTS = {
    latent: 2,
    positions_apart: 2,
    three_products: 3,
    product_of_keys: 1,
    vectors_of_pairs: 1,
    unequal_scales: 1,
    masked_apart: 1,
}


def arrays_of_products(length, dtype="float64"):
    B, N, H, R = 2, 3, 5, 2
    shapes = {
        "rotated_query": (B, length, N, R),
        "rotated_key": (B, length, R),
        "rotated_places": (length, N, R),
        "places": (length, N, H),
        "key": (B, length, H),
        "pairs": (length, length, H),
    }
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(B, length, N, size)) for size in (H, H, 4))
    x = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), [q, k, v, x])


def attend_by(logits):
    def attend(*arrays):
        s, v = logits(*arrays)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    return attend


def test_the_largest_product_is_that_of_query_and_key():
    """The other one, a bias of small rank, stays an array."""

    def attend(q, k, v):
        s = jnp.einsum("btnh,bsnh->bnts", q, k) / 3 + q[0, :, 0] @ k[0, :, 0].T
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    arrays = qkv()
    (place,) = find(attend, *arrays).replaced
    assert place.pair_arrays == (("bias", 16 * 16 * 4),)
    np.testing.assert_allclose(run_replaced(attend, *arrays), attend(*arrays), atol=1e-6)


@pytest.mark.parametrize("logits", PRODUCTS, ids=lambda f: f.__name__)
def test_logits_of_several_products(logits):
    """Products of queries and keys that are added become one product of joined vectors."""
    with jax.enable_x64(True):
        arrays = arrays_of_products(9)
        attend = attend_by(logits)
        (place,) = find(attend, *arrays).replaced
        count = PRODUCTS[logits]
        sums = [x for x in place.found if x.startswith("a sum")]
        assert sums == ([f"a sum of {count} products"] if count > 1 else []), place
        if count > 1:
            assert not place.pair_arrays
        replaced = replace(attend, strict=True)
        assert_close(*(result_and_gradients(f, arrays) for f in (replaced, attend)), atol=1e-12)


@pytest.mark.parametrize("logits", few(PRODUCTS, [three_products]), ids=lambda f: f.__name__)
def test_check_of_several_products(logits):
    replace(attend_by(logits), strict=True, check=True)(*arrays_of_products(9, "float32"))


@pytest.mark.parametrize(
    "logits", few([latent, three_products], [three_products]), ids=lambda f: f.__name__
)
def test_logits_of_several_products_take_no_array_of_pairs(logits):
    def temp(length):
        def with_length(x):
            shape = [length if size == 16 else size for size in x.shape]
            return jax.ShapeDtypeStruct(shape, x.dtype)

        arrays = jax.tree.map(with_length, arrays_of_products(16, "float32"))
        arrays[-1].pop("pairs")
        replaced = memeff.replace_attention(attend_by(logits), strict=True)
        return temp_bytes(lambda *arrays: result_and_gradients(replaced, arrays), arrays)

    assert temp(4096) <= 2.2 * temp(2048)


@pytest.mark.parametrize(
    "logits", few([latent, positions_apart], [latent]), ids=lambda f: f.__name__
)
def test_products_in_bfloat16_are_as_exact_as_the_program(logits):
    arrays = arrays_of_products(64, "bfloat16")
    attend = attend_by(logits)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), arrays)
        truth = np.asarray(jax.jit(attend)(*exact))
    errors = []
    for f in (replace(attend, strict=True), attend):
        errors.append(np.abs(np.asarray(jax.jit(f)(*arrays), np.float64) - truth).max())
    assert errors[0] <= 1.5 * errors[1]


def test_gradients_that_are_sums_over_rows_are_not_summed_in_bfloat16():
    rng = np.random.default_rng(0)
    shapes = ((24, 2, 4), (400, 7, 2, 4), (400, 7, 2, 4), (2,), (600, 4), (9, 4))
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]

    def attend(latents, k, v, factors, q, values):
        weights = jax.nn.softmax(jnp.einsum("tnh,bsnh->bnts", latents, k) / 2)
        weighted = jnp.einsum("bnts,bsnh->btnh", weights * factors[:, None, None], v)
        hidden = jnp.where(q[0, 0] > 9, q @ values.T, -1e9)  # no row sees a key
        return weighted, jax.nn.softmax(hidden) @ values

    def gradients(f, arrays):
        out, pull = jax.vjp(f, *arrays)
        rng = np.random.default_rng(1)
        cotangents = [rng.normal(size=x.shape).astype(jnp.bfloat16).astype(x.dtype) for x in out]
        latents, _, _, factors, _, values = pull(tuple(map(jnp.asarray, cotangents)))
        return latents, factors, values

    replaced = jax.jit(functools.partial(gradients, replace(attend, strict=True)))(arrays)
    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in arrays]
        truth = [np.asarray(x) for x in jax.jit(functools.partial(gradients, attend))(exact)]
    for x, y in zip(replaced, truth, strict=True):
        error = np.sqrt(((np.asarray(x, np.float64) - y) ** 2).mean())
        assert error <= 2**-8 * np.sqrt((y**2).mean())
