"""Provide small inputs of attention, and comparisons of two ways to the same number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxprs_in_params

f32 = np.float32


class Wrapped:
    """An object that JAX takes for an array, and NumPy does not."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


def assert_same(actual, expected, eps=2e-6):
    """Check that two trees of float32 differ at most as two orders of the same sums do."""
    structure = jax.tree.structure(actual)
    assert structure == jax.tree.structure(expected), f"a tree of other structure: {structure}"
    leaves = jax.tree.leaves_with_path(actual)
    for (path, x), y in zip(leaves, jax.tree.leaves(expected), strict=True):
        x = np.asarray(x, np.float64)
        y = np.asarray(y, np.float64)
        assert x.shape == y.shape, f"{x.shape} is not {y.shape}"
        assert not np.isnan(y).any(), "NaN is expected"
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        worst = np.abs(x[finite] - y[finite]).max(initial=0)
        size = np.abs(y[finite]).max(initial=0)
        assert worst <= eps * max(1, size), f"{jax.tree_util.keystr(path)} differs by {worst:.3g}"


def assert_close(actual, expected, **tolerance):
    """Check that two trees hold the same numbers, as `assert_allclose` does in 64 bits."""
    for pair in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        wide = np.complex128 if np.iscomplexobj(pair[1]) else np.float64
        np.testing.assert_allclose(*(np.asarray(x, wide) for x in pair), **tolerance)


def assert_bits(actual, expected):
    """Check that two trees of arrays have the same numbers, shapes and dtypes."""
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), actual, expected)


def assert_in_place(program, cache):
    """Check that a compiled program writes to its donated cache, and holds no copy of it."""
    memory = program.memory_analysis()
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 6


def equations(jaxpr):
    """Yield the equations of a jaxpr, and of all jaxprs inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def temp_bytes(function, arrays) -> int:
    """Return the bytes that a compiled function takes beyond its inputs and outputs."""
    return jax.jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def inputs(B=2, T=13, S=17, K=2, G=2, H=3, D=5, leads=None, dtype=f32):
    """Return query, key and value, the same at every call; `leads` take the place of B."""
    rng = np.random.default_rng(0)
    leads = (B,) if leads is None else leads
    shapes = (T, K * G, H), (S, K, H), (S, K, D)
    return tuple(jnp.asarray(rng.standard_normal((*leads, *shape)), dtype) for shape in shapes)
