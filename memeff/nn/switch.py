"""Models that exist already compute with memeff: three switches, for Linen, NNX, and whatever calls jax.nn.

A context is part of the key of JAX's caches (`jax.make_user_context`): a jitted function that was traced before is traced
again inside, and what was traced inside is not used outside. The price: what was jitted before `memeff.nn` was imported is
traced once more after it; import it at the top, while no other thread uses JAX.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator

import jax
from flax import linen, nnx
from jax import Array

from memeff.attention import dot_product_attention

_in_linen = jax.make_user_context(False)
_in_jax_nn = jax.make_user_context(False)


@contextlib.contextmanager
def switch_linen() -> Iterator[list[str]]:
    """Inside, Flax Linen's attention modules compute with memeff, `init` and `apply` alike.

    Holds for this thread, for every `linen.MultiHeadDotProductAttention` and its subclasses, inside any model and under any
    transformation. A module that was given an `attention_fn` of its own keeps it, and a warning says so. Functions jitted
    earlier are traced again inside.

    Returns:
      A list of the paths of the modules that were switched, filled as they are traced.

    Example:
      >>> model = linen.MultiHeadDotProductAttention(num_heads=2)
      >>> x = jax.numpy.ones((2, 7, 8))
      >>> variables = model.init(jax.random.key(0), x)
      >>> with switch_linen() as switched:
      ...     out = model.apply(variables, x)
      >>> switched
      ['(root)']
    """
    switched: list[str] = []

    def intercept(next_fun, args, kwargs, context):
        module = context.module
        if context.method_name != "__call__" or not isinstance(module, linen.MultiHeadDotProductAttention):
            return next_fun(*args, **kwargs)
        path = "/".join(module.path) or "(root)"
        if not _is_default(module.attention_fn, path):
            return next_fun(*args, **kwargs)
        switched.append(path)
        flaxes = module.attention_fn
        object.__setattr__(module, "attention_fn", dot_product_attention)  # frozen; bound to this trace alone
        try:
            return next_fun(*args, **kwargs)
        finally:
            object.__setattr__(module, "attention_fn", flaxes)

    with _in_linen(True), linen.intercept_methods(intercept):
        yield switched


def switch_nnx(model: nnx.Module) -> list[str]:
    """From now on every `nnx.MultiHeadAttention` in `model` computes with memeff. Changes the model in place.

    A module that was given an `attention_fn` of its own keeps it, and a warning says so.

    Returns:
      The paths of the modules that were switched.

    Raises:
      ValueError: `model` holds no attention that can be switched.

    Example:
      >>> model = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
      >>> switch_nnx(model)
      ['(root)']
    """
    if not isinstance(model, nnx.Module):
        cure = "use switch_linen()" if isinstance(model, linen.Module) else "merge it first, if it was split"
        raise TypeError(f"model must be an nnx.Module, got {type(model).__name__}: {cure}.")
    found = [
        (".".join(map(str, path)) or "(root)", module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.MultiHeadAttention)
    ]
    switched = [(path, module) for path, module in found if _is_default(module.attention_fn, path)]
    if not switched and not any(_is_memeff(module.attention_fn) for _, module in found):
        kept = "none without an attention_fn of its own" if found else "none at all"
        raise ValueError(
            f"model holds no nnx.MultiHeadAttention to switch ({kept}): give attention_fn=memeff.dot_product_attention to "
            "modules of your own, or run what calls jax.nn.dot_product_attention in switch_jax_nn()."
        )
    for _, module in switched:
        module.attention_fn = dot_product_attention
    return [path for path, _ in switched]


def _is_default(attention_fn: Callable[..., Array], path: str) -> bool:
    """Is it Flax's own? Warns if it is the user's."""
    if attention_fn in (linen.dot_product_attention, nnx.dot_product_attention):
        return True
    if not _is_memeff(attention_fn):
        warnings.warn(
            f"the attention module at '{path}' keeps its own attention_fn ({attention_fn}): it was chosen on purpose. "
            "Give it attention_fn=memeff.dot_product_attention to switch it.",
            stacklevel=3,
        )
    return False


def _is_memeff(attention_fn: Callable[..., Array]) -> bool:
    while isinstance(attention_fn, functools.partial):
        attention_fn = attention_fn.func
    return attention_fn is dot_product_attention


# ---- jax.nn


class _Calls(threading.local):
    """The list of the innermost `switch_jax_nn` of this thread."""

    shapes: list[tuple[int, ...]] | None = None


_calls, _lock, _inside, _jaxs = _Calls(), threading.Lock(), 0, jax.nn.dot_product_attention


@functools.wraps(jax.nn.dot_product_attention)
def _routed(query, *args, **kwargs):
    if not _in_jax_nn.value:  # another thread's
        return _jaxs(query, *args, **kwargs)
    if _calls.shapes is not None:
        _calls.shapes.append(jax.numpy.shape(query))
    return dot_product_attention(query, *args, **kwargs)


@contextlib.contextmanager
def switch_jax_nn() -> Iterator[list[tuple[int, ...]]]:
    """Inside, `jax.nn.dot_product_attention` is `memeff.dot_product_attention`.

    Holds for this thread: the name is replaced for the whole process, and calls from other threads reach JAX's function as
    before. May be nested; the last to leave restores the name, also after an exception. Functions jitted earlier are traced
    again inside. Reaches every call by the full name, Flax NNX's attention included (without dropout; `switch_nnx` reaches
    all of it); code that has said `from jax.nn import dot_product_attention` keeps what it has.

    Returns:
      A list of the shapes of `query` in the calls, filled as they are traced.

    Example:
      >>> x = jax.numpy.ones((2, 7, 4, 8))
      >>> with switch_jax_nn() as calls:
      ...     out = jax.nn.dot_product_attention(x, x, x)
      >>> calls
      [(2, 7, 4, 8)]
    """
    global _inside, _jaxs
    with _lock:
        if not _inside:
            _jaxs, jax.nn.dot_product_attention = jax.nn.dot_product_attention, _routed
        _inside += 1
    outer, _calls.shapes = _calls.shapes, []
    try:
        with _in_jax_nn(True):
            yield _calls.shapes
    finally:
        _calls.shapes = outer
        with _lock:
            _inside -= 1
            if not _inside and jax.nn.dot_product_attention is _routed:
                jax.nn.dot_product_attention = _jaxs
