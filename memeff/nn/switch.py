"""Flax models that exist already compute with memeff: a switch for Linen and one for NNX.

A context is part of the key of JAX's caches (`jax.make_user_context`): a jitted function that was traced before is traced
again inside, and what was traced inside is not used outside. The price: what was jitted before `memeff.nn` was imported is
traced once more after it; import it at the top, while no other thread uses JAX.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator

import jax
from flax import linen, nnx
from jax import Array

from memeff.attention import dot_product_attention

_in_linen = jax.make_user_context(False)


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
