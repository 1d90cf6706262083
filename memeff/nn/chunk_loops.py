"""Apply a module or function of the user to chunks of tokens, one after the other, in a loop.

  loop, finish = make_loop(f, first)
  results, counts = loop(numbers, chunks, prevent_cse)    # arrays are stacked: [n, ...]
  finish(counts)

Each step computes f again in the backward. `numbers` [n] count the chunks, `first` is one of them.
Counts are NNX's counts of the random numbers that one chunk drew.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, linen, nnx
from flax.core.tracers import current_trace
from jax import Array, lax

from memeff.sharding import varies, vary_like

_TRANSFORMS_WRITE = (
    "nnx.jit and nnx.remat write all variables: use jax.jit and jax.checkpoint in f."
)

Loop = Callable[[Array, Any, bool], tuple[Any, Any]]


def make_loop(f: Callable[..., Any], first: Any) -> tuple[Loop, Callable[[Any], None]]:
    """Return `loop` and `finish` of `f`.

    Under shard_map the arrays that f holds are typed as varying over devices as `first` does.
    JAX would otherwise sum their gradients over the devices once per chunk.
    """
    args: tuple = ()
    kwargs: dict[str, Any] = {}
    while isinstance(f, functools.partial):
        args = (*f.args, *args)
        kwargs = f.keywords | kwargs
        f = f.func
    args, kwargs = _vary_floats((args, kwargs), first)
    owner: Any = f
    method = None
    if inspect.ismethod(f):
        owner = f.__self__
        method = f.__func__

    def run(owner, chunk):
        if method is None:
            return owner(*args, chunk, **kwargs)
        return method(owner, *args, chunk, **kwargs)

    if isinstance(owner, linen.Module) and owner.scope is not None:
        return _linen_loop(owner, owner.scope.rng_counters, run, first), _no_finish
    if isinstance(owner, nnx.Module):
        return _nnx_loop(owner, run, first), functools.partial(nnx.update, owner)
    return _function_loop(functools.partial(run, owner)), _no_finish


def _loop_of(call: Callable[[Any, Any], tuple[Any, Any]]) -> Loop:
    """Return the loop of a pure function: (number, chunk) to (results, counts)."""

    def loop(numbers, chunks, prevent_cse):
        recomputed = _recompute(jax.checkpoint, call, prevent_cse)

        def step(carry, numbered_chunk):
            return carry, recomputed(*numbered_chunk)

        _, (results, counts) = lax.scan(step, None, (numbers, chunks))
        return results, jax.tree.map(lambda stacked: stacked[0], counts)

    return loop


def _recompute(remat: Callable, f: Callable, prevent_cse: bool) -> Callable:
    """Return f, which a gradient computes again, and so does a gradient of that gradient.

    Each gradient of a loop uses up one remat of its body.
    """
    return remat(remat(f, prevent_cse=False), prevent_cse=prevent_cse)


def _no_finish(counts: Any) -> None:
    """Do nothing: there are no counts."""
    del counts


def _vary_floats(tree: Any, like: Any) -> Any:
    """Type the float arrays of a tree as varying under shard_map where arrays of `like` vary.

    Other leaves stay as they are: integers and keys have no gradient.
    """

    def cast(leaf):
        is_array = isinstance(leaf, jax.Array | np.ndarray)
        is_float = is_array and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return vary_like(leaf, like) if is_float else leaf

    return jax.tree.map(cast, tree)


# ---- functions


def _function_loop(run: Callable[[Any], Any]) -> Loop:
    """Return the loop of a function, which may read variables of NNX modules but write none."""

    def call(number, chunk):
        del number
        inside = current_trace()

        def check_module(next_fun, args, kwargs, context):
            # Parameters would be made, and random numbers drawn, within the trace of one chunk.
            scope = context.module.scope
            if scope is not None and scope.root.trace_level not in (inside, current_trace()):
                name = type(context.module).__name__
                raise ValueError(
                    f"f calls {name}, a module of Linen, and is no module itself: give blockwise "
                    "the module, a method of a module, or functools.partial of one of these."
                )
            return next_fun(*args, **kwargs)

        try:
            with linen.intercept_methods(check_module):
                return run(chunk), ()
        except errors.TraceContextError as e:
            raise ValueError(
                f"f writes variables of a module that it closes over ({e}). Give blockwise the "
                "module itself, or a method of it: then it may draw random numbers. Other "
                f"variables cannot be written chunk by chunk. {_TRANSFORMS_WRITE}"
            ) from e

    return _loop_of(call)


# ---- Linen


def _linen_loop(
    module: linen.Module, counters: dict[str, Any], run: Callable[..., Any], first: Any
) -> Loop:
    """Return the loop of a bound module of Linen; in `init` make its variables first.

    `counters` count the random numbers that the module has drawn, by stream.
    """
    if module.is_initializing():
        run(module, first)
    before = dict(counters)

    def step(module, carry, numbered_chunk):
        return carry, run(module, numbered_chunk[1])

    def loop(numbers, chunks, prevent_cse):
        lifted = _recompute(linen.remat, step, prevent_cse)
        lifted = linen.scan(lifted, variable_broadcast=True, split_rngs={True: True})
        if varies(first):
            cast = functools.partial(_vary_floats, like=first)
            lifted = linen.map_variables(lifted, True, trans_in_fn=cast)
        try:
            results = lifted(module, None, (numbers, chunks))[1]
        except ValueError as e:
            if "data dependency" in str(e):
                mutable = module.scope and module.scope.mutable
                raise ValueError(_refusal(f"mutable={mutable}")) from e
            raise
        if module.is_initializing():  # parameters made later are those of a model without chunks
            counters.update(before)
        return results, ()

    return loop


# ---- NNX


def _nnx_loop(module: nnx.Module, run: Callable[..., Any], first: Any) -> Loop:
    """Return the loop of a module of NNX, which runs a copy of the module on each chunk."""
    graph, keys, state = nnx.split(module, nnx.RngKey, ...)
    leaves, treedef = jax.tree.flatten(_vary_floats(state, first))

    def call(number, chunk):
        keys_of_chunk = jax.tree.map(lambda key: _fold_in(key, number), keys)
        # New variables, because those of another trace cannot be written.
        copy = nnx.merge(graph, keys_of_chunk, jax.tree.unflatten(treedef, leaves))
        before = dict(nnx.to_flat_state(nnx.state(copy)))
        values = {path: jax.tree.leaves(variable) for path, variable in before.items()}
        attributes = _plain_attributes(copy)
        results = run(copy, chunk)
        counts = {}
        for path, variable in nnx.to_flat_state(nnx.state(copy)):
            if _same(jax.tree.leaves(variable), values.get(path)):
                continue
            if not isinstance(variable, nnx.RngCount):
                raise ValueError(_refusal(".".join(map(str, path))))
            counts[path] = variable
        for path, value in _plain_attributes(copy).items():
            if path not in attributes or not _is_kept(attributes[path], value):
                raise ValueError(_refusal(".".join(map(str, path))))
        return results, nnx.from_flat_state(counts)

    return _loop_of(call)


def _plain_attributes(module: nnx.Module) -> dict[tuple, Any]:
    """Return the attributes, by path, that are no variables. Leave out those that Python caches."""
    attributes = {}
    for path, part in nnx.iter_graph(module):
        if not isinstance(part, nnx.Pytree):
            continue
        for name, value in vars(part).items():
            is_cached = isinstance(getattr(type(part), name, None), functools.cached_property)
            is_internal = is_cached or name.startswith("_pytree__")
            if not is_internal and not isinstance(value, nnx.Variable):
                attributes[*path, name] = value
    return attributes


def _is_kept(old: Any, new: Any) -> bool:
    """Return whether a plain attribute has its old value. Arrays must be the same object."""
    is_array = any(isinstance(value, jax.Array | np.ndarray) for value in (old, new))
    return old is new or (not is_array and old == new)


def _fold_in(key: Array, number: Any) -> Array:
    """Fold a number into each of the keys of an array of any shape."""
    fold_in = jax.random.fold_in
    for _ in range(jnp.ndim(key)):
        fold_in = jax.vmap(fold_in, (0, None))
    return fold_in(key, number)


def _same(new: list, old: list | None) -> bool:
    """Return whether two lists hold the same objects."""
    if old is None or len(new) != len(old):
        return False
    return all(x is y for x, y in zip(new, old, strict=True))


def _refusal(name: str) -> str:
    """Return the sentence for a variable or an attribute that f writes."""
    return (
        f"f writes a variable or an attribute ({name}), which would get the value of one chunk "
        "alone. Move what writes it out of f, or keep it from writing: give BatchNorm "
        "use_running_average=True, sow nothing, and give capture_intermediates a filter without "
        "the modules in f. "
        f"{_TRANSFORMS_WRITE}"
    )
