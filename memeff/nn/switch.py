"""Flax models that exist already compute with memeff: a switch for Linen and one for NNX.

A context is part of the key of JAX's caches (`jax.make_user_context`): a jitted function that was traced before is traced
again inside, and what was traced inside is not used outside. The price: what was jitted before `memeff.nn` was imported is
traced once more after it; import it at the top, while no other thread uses JAX.
"""

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator

import jax
from flax import linen, nnx
from jax import Array

from memeff.nn.attention_fn import attention_fn
from memeff.switch import tell_nothing_switched

_in_linen = jax.make_user_context(False)
_switched_before = threading.Event()  # JAX's cache may hold programs of an earlier switch_linen


@dataclasses.dataclass
class _Seen:
    """What one `switch_linen` saw of the modules that were called inside."""

    switched: list[str] = dataclasses.field(default_factory=list)
    computes_with_memeff: bool = False  # a module did already, or an inner switch made it
    keeps_its_own: bool = False  # a module was given an attention_fn, and a warning said so
    modules: set[str] = dataclasses.field(default_factory=set)  # their classes


@contextlib.contextmanager
def switch_linen(*, strict: bool = False) -> Iterator[list[str]]:
    """Make Flax Linen's attention modules compute with memeff, in `init` and `apply` alike.

    It holds for this thread, for every `linen.MultiHeadDotProductAttention` and its subclasses,
    inside any model and under any transformation. A module that was given an `attention_fn` of its
    own keeps it, and a warning says so. Functions jitted earlier are traced again inside.

    Args:
      strict: raise where no module was switched, instead of a warning.

    Returns:
      A list of the paths of the modules that were switched, filled as they are traced. A function
      that was compiled in an earlier switch is not traced again, and its modules are not listed.

    Raises:
      ValueError: with `strict`, no module was switched, and none computes with memeff already. Where
        an earlier switch of this process switched some, JAX's cache may hold what ran. Then there is
        no error, and a warning only where other modules of Linen were called.

    Example:
      >>> model = linen.MultiHeadDotProductAttention(num_heads=2)
      >>> x = jax.numpy.ones((2, 7, 8))
      >>> variables = model.init(jax.random.key(0), x)
      >>> with switch_linen() as switched:
      ...     out = model.apply(variables, x)
      >>> switched
      ['(root)']
    """
    seen = _Seen()

    def intercept(next_fun, args, kwargs, context):
        module = context.module
        seen.modules.add(type(module).__name__)
        is_attention = isinstance(module, linen.MultiHeadDotProductAttention)
        if context.method_name != "__call__" or not is_attention:
            return next_fun(*args, **kwargs)
        path = "/".join(module.path) or "(root)"
        if not _is_default(module.attention_fn, path):
            seen.computes_with_memeff |= _is_memeff(module.attention_fn)
            seen.keeps_its_own |= not _is_memeff(module.attention_fn)
            return next_fun(*args, **kwargs)

        @functools.wraps(attention_fn)
        def recorded(*args, **kwargs):
            out = attention_fn(*args, **kwargs)
            seen.switched.append(path)
            _switched_before.set()
            return out

        flaxes = module.attention_fn
        object.__setattr__(module, "attention_fn", recorded)  # frozen; bound to this trace alone
        try:
            return next_fun(*args, **kwargs)
        finally:
            object.__setattr__(module, "attention_fn", flaxes)

    with _in_linen(True), linen.intercept_methods(intercept):
        yield seen.switched
    if not seen.switched and not seen.computes_with_memeff:
        _tell_none_switched(seen, strict)


def _tell_none_switched(seen: _Seen, strict: bool) -> None:
    if seen.keeps_its_own:
        if strict:
            raise ValueError(
                "switch_linen: every attention module inside keeps its own attention_fn."
            )
        return
    if not seen.modules:
        if _switched_before.is_set():
            return
        reason = "no module of Linen was called inside. For NNX use switch_nnx(model)"
    else:
        written_out = sorted(name for name in seen.modules if "attention" in name.lower())
        names = f" (it calls {', '.join(written_out[:3])})" if written_out else ""
        reason = (
            "the model calls no linen.MultiHeadDotProductAttention that uses its attention_fn"
            f"{names}. If it writes its attention out, call memeff.dot_product_attention there; if it "
            "calls jax.nn.dot_product_attention, use memeff.switch_jax_nn()"
        )
        if _switched_before.is_set():  # of which nobody can know, so that it is no error
            strict = False
            reason += ". (Programs that JAX compiled in an earlier switch compute with memeff)"
    tell_nothing_switched(f"switch_linen: no module was switched, because {reason}.", strict, 5)


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
        cure = (
            "use switch_linen()"
            if isinstance(model, linen.Module)
            else "merge it first, if it was split"
        )
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
            f"model holds no nnx.MultiHeadAttention to switch ({kept}): give attention_fn=memeff.nn.attention_fn to "
            "modules of your own, or run what calls jax.nn.dot_product_attention in switch_jax_nn()."
        )
    for _, module in switched:
        module.attention_fn = attention_fn
    return [path for path, _ in switched]


def _is_default(given: Callable[..., Array], path: str) -> bool:
    """Is it Flax's own? Warns if it is the user's."""
    if given in (linen.dot_product_attention, nnx.dot_product_attention):
        return True
    if not _is_memeff(given):
        warnings.warn(
            f"the attention module at '{path}' keeps its own attention_fn ({given}): it was chosen on purpose. "
            "Give it attention_fn=memeff.nn.attention_fn to switch it.",
            stacklevel=3,
        )
    return False


def _is_memeff(given: Callable[..., Array]) -> bool:
    while isinstance(given, functools.partial):
        given = given.func
    return inspect.unwrap(given) is attention_fn
