"""Switch existing Flax models to memeff: `switch_linen` for Linen, and `switch_nnx` for NNX.

A context is part of the key of JAX's caches (`jax.make_user_context`). So a function that was
jitted before is traced again inside, and programs traced inside are not used outside. The price:
functions that were jitted before the import of `memeff.nn` are traced once more after it. Import it
at the top, while no other thread uses JAX.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import linen, nnx
from jax import Array

from memeff.arguments import Strategy
from memeff.nn.attention_fn import attention_fn, is_memeff
from memeff.nn.options import check_no_cache, sequence_keywords
from memeff.sequence.keywords import SequenceOptions, check_sequence_options
from memeff.sequence.layout import Layout
from memeff.switch import tell_nothing_switched
from memeff.warn import warn

_choice = jax.make_user_context(None)  # the options of the innermost switch_linen; None outside
_switched_before: set[SequenceOptions] = set()  # JAX's cache may hold programs of these switches


@dataclasses.dataclass
class _Seen:
    """Modules that one `switch_linen` saw called inside."""

    switched: list[str] = dataclasses.field(default_factory=list)  # paths
    computes_with_memeff: bool = False  # some module did already, or an inner switch made it
    keeps_its_own: bool = False  # some module has an attention_fn of its own, as a warning said
    modules: set[str] = dataclasses.field(default_factory=set)  # names of classes


@contextlib.contextmanager
def switch_linen(
    *,
    strict: bool = False,
    sequence_axis: str | tuple[str, str] | None = None,
    sequence_layout: Layout = "contiguous",
    context_parallel: Strategy | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
) -> Iterator[list[str]]:
    """Make Flax Linen's attention modules compute with memeff, in `init` and `apply` alike.

    The switch holds for this thread and for every `linen.MultiHeadDotProductAttention` and its
    subclasses, inside any model and under any transformation. A module with an `attention_fn` of
    its own keeps it, and a warning says so. Functions jitted earlier are traced again inside.
    Switches may be nested: the innermost decides.

    Args:
      strict: raise an error, instead of a warning, if no module was switched.
      sequence_axis, sequence_layout, context_parallel, batch_axis, head_axis: as in
        `memeff.dot_product_attention`. With sequence_axis, the sequence of all attention modules
        inside is sharded over devices. This includes modules that compute with memeff already,
        unless they have a sequence_axis of their own. `init` needs no mesh: outside of one it makes
        the parameters on one device.

    Returns:
      A list of the paths of the modules that were switched, filled as they are traced. A function
      that was compiled in an earlier switch is not traced again, and its modules are not listed.

    Raises:
      ValueError: with `strict`, no module was switched, and none computes with memeff already. If
        an earlier switch of this process switched modules, JAX's cache may still hold their
        programs. Then there is no error, and a warning only if other modules of Linen were called.
      NotImplementedError: a module has decode=True, and sequence_axis is given.

    Example:
      >>> model = linen.MultiHeadDotProductAttention(num_heads=2)
      >>> x = jax.numpy.ones((2, 7, 8))
      >>> variables = model.init(jax.random.key(0), x)
      >>> with switch_linen() as switched:
      ...     out = model.apply(variables, x)
      >>> switched
      ['(root)']
    """
    options = SequenceOptions(
        sequence_axis, sequence_layout, context_parallel, batch_axis, head_axis
    )
    check_sequence_options(options)
    seen = _Seen()

    def intercept(next_fun, args, kwargs, context):
        module = context.module
        seen.modules.add(type(module).__name__)
        is_attention = isinstance(module, linen.MultiHeadDotProductAttention)
        if context.method_name != "__call__" or not is_attention:
            return next_fun(*args, **kwargs)
        if _choice.value != options:  # an inner switch decides
            seen.computes_with_memeff = True
            return next_fun(*args, **kwargs)
        path = "/".join(module.path) or "(root)"
        if not _can_switch(module, path, options):
            seen.computes_with_memeff |= is_memeff(module.attention_fn)
            seen.keeps_its_own |= not is_memeff(module.attention_fn)
            return next_fun(*args, **kwargs)

        check_no_cache(options, module.decode)
        original = module.attention_fn
        attend = original if is_memeff(original) else attention_fn

        @functools.wraps(attention_fn)
        def record_and_attend(query, *args, **kwargs):
            sequence = sequence_keywords(options, query, module.is_initializing())
            out = attend(query, *args, **sequence | kwargs)
            seen.switched.append(path)
            _switched_before.add(options)
            return out

        # The module is frozen, and bound to this trace alone.
        object.__setattr__(module, "attention_fn", record_and_attend)
        try:
            return next_fun(*args, **kwargs)
        finally:
            object.__setattr__(module, "attention_fn", original)

    with _choice(options), linen.intercept_methods(intercept):
        yield seen.switched
    if not seen.switched and not seen.computes_with_memeff:
        _tell_none_switched(seen, strict, options in _switched_before)


def _tell_none_switched(seen: _Seen, strict: bool, switched_before: bool) -> None:
    """Warn or raise, and say why no module was switched.

    `switched_before`: JAX's cache may hold programs of an earlier switch with the same options.
    """
    if seen.keeps_its_own:
        if strict:
            raise ValueError(
                "switch_linen: every attention module inside keeps its own attention_fn. Omit the "
                "attention_fn, or give the module memeff.nn.attention_fn."
            )
        return
    if not seen.modules:
        if switched_before:
            return
        reason = "no module of Linen was called inside. For NNX use switch_nnx(model)"
    else:
        attention_modules = sorted(name for name in seen.modules if "attention" in name.lower())
        names = f" (it calls {', '.join(attention_modules[:3])})" if attention_modules else ""
        reason = (
            "the model calls no linen.MultiHeadDotProductAttention that uses its "
            f"attention_fn{names}. If it calls jax.nn.dot_product_attention, use "
            "memeff.switch_jax_nn(). If it writes its attention out, use memeff.replace_attention"
        )
        if switched_before:  # no error, because a cached program may have run
            strict = False
            reason += ". (Programs that JAX compiled in an earlier switch compute with memeff)"
    tell_nothing_switched(f"switch_linen: no module was switched, because {reason}.", strict)


def switch_nnx(
    model: nnx.Module,
    *,
    sequence_axis: str | tuple[str, str] | None = None,
    sequence_layout: Layout = "contiguous",
    context_parallel: Strategy | None = None,
    batch_axis: str | tuple[str, ...] | None = None,
    head_axis: str | tuple[str, ...] | None = None,
) -> list[str]:
    """Make every `nnx.MultiHeadAttention` in `model` compute with memeff from now on.

    The model is changed in place. A module with an `attention_fn` of its own keeps it, and a
    warning says so.

    Args:
      model: a module that holds `nnx.MultiHeadAttention`, at any depth, or is one.
      sequence_axis, sequence_layout, context_parallel, batch_axis, head_axis: as in
        `memeff.dot_product_attention`. With sequence_axis, the sequence of all attention modules of
        the model is sharded over devices. This includes modules that compute with memeff already,
        unless they have a sequence_axis of their own.

    Returns:
      The paths of the modules that were switched.

    Raises:
      TypeError: `model` is not an `nnx.Module`.
      ValueError: `model` holds no attention that can be switched, or a choice is not known.
      NotImplementedError: a module has decode=True, and sequence_axis is given.

    Example:
      >>> model = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
      >>> switch_nnx(model)
      ['(root)']
    """
    if not isinstance(model, nnx.Module):
        is_linen = isinstance(model, linen.Module)
        cure = "use switch_linen()" if is_linen else "merge it first, if it was split"
        raise TypeError(f"model must be an nnx.Module, got {type(model).__name__}: {cure}.")
    options = SequenceOptions(
        sequence_axis, sequence_layout, context_parallel, batch_axis, head_axis
    )
    check_sequence_options(options)
    modules = [
        (".".join(map(str, path)) or "(root)", module)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.MultiHeadAttention)
    ]
    switched = [(path, module) for path, module in modules if _can_switch(module, path, options)]
    if not switched and not any(is_memeff(module.attention_fn) for _, module in modules):
        kept = "none without an attention_fn of its own" if modules else "none at all"
        raise ValueError(
            f"model holds no nnx.MultiHeadAttention to switch ({kept}): give "
            "attention_fn=memeff.nn.attention_fn to modules of your own. Run code that calls "
            "jax.nn.dot_product_attention in memeff.switch_jax_nn(). For a model that writes its "
            "attention out, use memeff.replace_attention."
        )
    for _, module in switched:
        check_no_cache(options, module.decode)
    for _, module in switched:
        attend = module.attention_fn if is_memeff(module.attention_fn) else attention_fn
        module.attention_fn = _with_options(attend, options)
    return [path for path, _ in switched]


@functools.cache  # one function for the same options, because nnx.jit compares attributes
def _with_options(attend: Callable[..., Array], options: SequenceOptions) -> Callable[..., Array]:
    """Return an attention_fn with the keywords of a sharded sequence bound to it."""
    keywords = options.keywords()
    return functools.partial(attend, **keywords) if keywords else attend


def _can_switch(module: Any, path: str, options: SequenceOptions) -> bool:
    """Return whether a switch changes a module's attention_fn; warn if the function is the user's.

    A function of memeff's changes if it gets keywords of a sharded sequence that it lacks.
    """
    function = module.attention_fn
    if function in (linen.dot_product_attention, nnx.dot_product_attention):
        return True
    if is_memeff(function):
        return bool(options.keywords()) and not _is_decided(module)
    warn(
        f"the attention module at '{path}' keeps its own attention_fn ({function}), because "
        "it was chosen on purpose. Give it attention_fn=memeff.nn.attention_fn to switch it."
    )
    return False


def _is_decided(module: Any) -> bool:
    """Return whether a module of memeff's has a sequence_axis, or another switch runs it."""
    function = module.attention_fn
    while isinstance(function, functools.partial):
        if function.keywords.get("sequence_axis") is not None:
            return True
        function = function.func
    own_axis = getattr(module, "sequence_axis", None)
    return own_axis is not None or function is not attention_fn
