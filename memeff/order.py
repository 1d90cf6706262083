"""Make XLA compute, cut and send arrays no earlier than they are needed.

XLA may run an operation as soon as its inputs exist. In a ring it would hold the keys of all steps
at once. `lax.optimization_barrier` prevents that on GPUs and TPUs. XLA:CPU drops barriers before it
assigns memory. There a condition that is never true makes arrays depend on what must come before
them.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from memeff.device import current_platform
from memeff.sharding import may_be_sharded, vary_like


def orders_by_condition() -> bool:
    """Return True if `hold` uses the condition: on one CPU device.

    The condition reads a number of each result, and to read it from a sharded array would take a
    message.
    """
    return current_platform() == "cpu" and not may_be_sharded()


def hold(tree: Any, results: Any) -> tuple[Any, Any]:
    """Return the results, and the arrays of a tree, which XLA reads only after the results."""
    results, tree = lax.optimization_barrier((results, tree))
    if not orders_by_condition():
        return results, tree
    arrays = [x for x in jax.tree.leaves(results) if x.size]
    if not arrays:
        return results, tree

    def read(arrays: list[Array]) -> Array:
        return functools.reduce(operator.add, map(_some_bits, arrays))

    # XLA does not know that the bits cannot be negative. If there are several arrays, it could
    # compute their first numbers alone, but what a branch may read it computes as a whole.
    bits = read(arrays)
    if len(arrays) > 1:
        bits = lax.cond(bits < 0, read, lambda arrays: 0 * read(arrays), arrays)
    never = bits < 0

    def held(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return jnp.where(never, jnp.ones_like(x), x)  # not 0, because x may be a constant 0

    return results, jax.tree.map(held, tree)


def zero_after(x: Array, dtype: DTypeLike) -> Array:
    """Return a scalar 0 that XLA cannot compute before x, and that varies over the axes of x.

    Sums that begin with it take memory only from then on. Otherwise XLA:CPU makes the zeros of all
    loops of a program before the first loop.
    """
    _, zero = hold(jnp.zeros((), dtype), x)
    return vary_like(zero, x)


def _some_bits(x: Array) -> Array:
    """Return up to 16 bits of the first number of x, as int32."""
    first = lax.slice(x, (0,) * x.ndim, (1,) * x.ndim).reshape(())
    if x.dtype == bool:
        return first.astype(jnp.int32)
    width = 8 * x.dtype.itemsize
    bits = lax.bitcast_convert_type(first, f"uint{width}")
    return (bits >> max(width - 16, 0)).astype(jnp.int32)
