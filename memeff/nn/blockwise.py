"""Apply a token-wise function chunk by chunk, and compute it again in the backward.

  (1) cut the T tokens into n chunks of c tokens, and the rest
  (2) for each chunk: y = f(chunk); only the chunk is saved
  (3) in the gradient, for each chunk: compute f(chunk) again, and add its part to the gradients of
      the weights
Source: Liu and Abbeel 2023, arXiv:2305.19370, section 3.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import lax

from memeff import sharding
from memeff.inputs import check_int, kind_of, refuse_symbolic, text_of, to_array
from memeff.nn.chunk_loops import Loop, make_loop


def blockwise(f: Callable[..., Any], x: Any, chunk_size: int, *, axis: int = -2) -> Any:
    """Return f(x) of a token-wise function or module `f`, `chunk_size` tokens at a time.

    A feed-forward network keeps its hidden activations, [*B, T, hidden], until the backward. With
    `blockwise` they exist for one chunk of tokens at a time, in the forward and in the gradient.
    The backward computes `f` again, as under `jax.checkpoint`. Inputs, outputs and their gradients
    are held whole, and copied where there is more than one sequence. Gradients of weights are added
    up in the dtype of the weights. So keep weights in float32, and convert them inside `f`, as
    modules of Flax with a `dtype` do: in 16 bits the sum is rounded for each chunk.

    The result equals f(x) up to rounding, because products of other sizes may add in another order.
    It works under jit, vmap, scan, remat and derivatives of every order.

    Args:
      f: a function of [*B, c, C] whose results, an array or a tree of arrays, are [*B, c, ...].
        Each token's result must depend on that token alone, which is not checked. `f` may be a
        Linen module that belongs to the module that calls `blockwise`, an NNX module, a method of
        either, or a function. `functools.partial` of these fixes further arguments.
      x: array, or tree of arrays, with T tokens along `axis`.
      chunk_size: tokens at a time, c. Any T works: the tokens that remain are one more, smaller
        chunk. If chunk_size is T or more, there is one chunk, which the backward computes again
        too.
      axis: dim of the tokens in each array of x. The results have their tokens at the same place,
        counted from the first dim.

    Modules and random numbers:

    * Linen: `init` makes the same parameters as f(x). NNX: parameters have their gradients.
    * Dropout inside a module draws new numbers in each chunk, from the module's own keys. They are
      not the numbers of f(x), and they change with `chunk_size`. A function that closes over a key
      draws the same numbers in each chunk.
    * A module that writes variables or attributes is refused: the means of BatchNorm, `sow`, and
      Linen's `capture_intermediates` without a filter. `nnx.jit` and `nnx.remat` inside write
      all: use `jax.jit` and `jax.checkpoint` there. Counts of NNX's random numbers advance as in
      one call.

    Several devices: chunks need no communication, also where tokens are sharded, if all devices
    together divide `chunk_size` and `chunk_size` divides T. Under jit, replicated weights take one
    all-reduce of their gradient for each chunk. Under `shard_map` it is one in all, if `f` is a
    module or a `functools.partial` that holds the weights.

    Raises:
      TypeError: `f` is not callable, or `chunk_size` or `axis` is not an int.
      ValueError: `chunk_size` is below 1, x has no axis of tokens, or `f` changes the number of
        tokens, writes variables or attributes, or uses modules of Linen without being one.

    Example:
      >>> def feed_forward(x, up, down):
      ...     return jax.nn.gelu(x @ up) @ down
      >>> x, up, down = jnp.ones((2, 10, 3)), jnp.ones((3, 12)), jnp.ones((12, 3))
      >>> network = functools.partial(feed_forward, up=up, down=down)
      >>> blockwise(network, x, chunk_size=4).shape  # chunks of 4, 4 and 2 tokens
      (2, 10, 3)

      A module of Linen, and one of NNX:

      >>> from flax import linen, nnx
      >>> class Layer(linen.Module):
      ...     @linen.compact
      ...     def __call__(self, x):
      ...         network = linen.Sequential([linen.Dense(12), linen.gelu, linen.Dense(3)])
      ...         return x + blockwise(network, x, chunk_size=4)
      >>> y, variables = Layer().init_with_output(jax.random.key(0), x)
      >>> linear = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
      >>> y.shape, blockwise(linear, x, chunk_size=4).shape
      ((2, 10, 3), (2, 10, 5))

    Source: Liu and Abbeel 2023, arXiv:2305.19370, section 3.
    """
    if not callable(f):
        raise TypeError(f"f must be a module or a function, got {kind_of(f)}.")
    if isinstance(f, type) and issubclass(f, linen.Module | nnx.Module):
        name = f.__name__
        raise TypeError(f"f is {name}, a class of modules. Pass a module of it: {name}(...).")
    chunk_size = check_int("chunk_size", chunk_size, " (it is fixed while tracing)")
    axis = check_int("axis", axis, " (it is fixed while tracing)")
    if chunk_size < 1:
        raise ValueError(f"chunk_size={text_of(chunk_size)} counts tokens and must be at least 1.")
    x = jax.tree.map(functools.partial(to_array, "x"), x)
    axis, T = _find_tokens(x, axis)
    c = min(chunk_size, T)
    _check_sharded_tokens(x, axis, T, c)
    loop, finish = make_loop(f, _slice_tokens(x, axis, 0, c))
    rest = T % c if c else 0
    whole = T - rest  # tokens in whole chunks
    pieces = []
    counts: Any = ()
    if whole > 0 or T == 0:
        result, counts = _run_loop(loop, _slice_tokens(x, axis, 0, whole), axis, 0, c)
        pieces.append(result)
    if rest > 0:
        last_tokens = _slice_tokens(x, axis, whole, T)
        pieces.append(_run_loop(loop, last_tokens, axis, whole // c, rest)[0])
    finish(counts)
    if len(pieces) == 1:
        return pieces[0]
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *pieces)


def _run_loop(loop: Loop, x: Any, axis: int, number: int, c: int) -> tuple[Any, Any]:
    """Return the results for chunks of c tokens, and the counts of one chunk.

    `number` is that of the first chunk. Chunks are neighbours where arrays are not sharded, because
    one sequence is then cut without a copy. Otherwise chunk i of n has the tokens i, i + n, ...:
    each device has a part of each chunk, also where tokens are sharded.
    """
    n = max(1, jax.tree.leaves(x)[0].shape[axis] // max(1, c))
    n_axis = axis + 1 if sharding.may_be_sharded() else axis
    c_axis = axis if sharding.may_be_sharded() else axis + 1

    def cut(leaf):
        shape = list(leaf.shape)
        shape.insert(n_axis, n)
        shape[c_axis] = c
        return jnp.moveaxis(leaf.reshape(shape), n_axis, 0)

    def join(leaf):
        _check_tokens_kept(leaf.shape[1:], axis, c)
        shape = list(leaf.shape[1:])
        shape[axis] *= n
        return jnp.moveaxis(leaf, 0, n_axis).reshape(shape)

    numbers = number + jnp.arange(n, dtype=jnp.int32)
    # XLA inlines a loop of one step, and would then keep what the backward should compute again.
    results, counts = loop(numbers, jax.tree.map(cut, x), n == 1)
    return jax.tree.map(join, results), counts


def _slice_tokens(x: Any, axis: int, start: int, stop: int) -> Any:
    """Return the tokens from `start` to `stop`, without the latter."""
    return jax.tree.map(lambda leaf: lax.slice_in_dim(leaf, start, stop, axis=axis), x)


# ---- checks


def _find_tokens(x: Any, axis: int) -> tuple[int, int]:
    """Return the dim of the tokens, counted from the first, and their number T."""
    leaves = jax.tree.leaves(x)
    if not leaves:
        raise ValueError("x holds no array. Pass an array with tokens, or a tree of such.")
    places = set()
    for leaf in leaves:
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ValueError(
                f"x has an array of shape {leaf.shape}, which has no dim {text_of(axis)} for the "
                "tokens: give the dim of the tokens as axis."
            )
        dim = axis % leaf.ndim
        places.add((dim, leaf.shape[dim]))
    if len(places) > 1:
        shapes = ", ".join(str(leaf.shape) for leaf in leaves)
        raise ValueError(
            f"x has arrays of shapes {shapes}, whose tokens (axis={axis}) differ in number or in "
            "place: all must have T tokens at the same dim. Count axis from the first dim if the "
            "arrays have different numbers of dims."
        )
    dim, T = places.pop()
    refuse_symbolic("blockwise", T=T)
    return dim, T


def _check_sharded_tokens(x: Any, axis: int, T: int, c: int) -> None:
    """Refuse chunks that an Explicit mesh cannot hold where tokens are sharded."""
    devices = max(sharding.explicit_devices(leaf, axis) for leaf in jax.tree.leaves(x))
    if devices == 1 or c >= T or (T % c == 0 and c % devices == 0):
        return
    raise ValueError(
        f"x has T={T} tokens, sharded over {devices} devices of an Explicit mesh, and "
        f"chunk_size={c}: it must be a multiple of {devices} and divide T."
    )


def _check_tokens_kept(shape: tuple[int, ...], axis: int, c: int) -> None:
    """Refuse a result that does not have the c tokens of its chunk."""
    if len(shape) <= axis or shape[axis] != c:
        raise ValueError(
            f"f must keep the tokens: for a chunk of {c} tokens (dim {axis}) it returned an array "
            f"of shape {shape}."
        )
