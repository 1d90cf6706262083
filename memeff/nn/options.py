"""Check what memeff adds to Flax's modules, and pass keywords to an `attention_fn`."""

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from memeff import validate
from memeff.block_mask import BlockMask
from memeff.inputs import check_number, check_size, kind_of, text_of
from memeff.sequence.keywords import SequenceOptions, check_sequence_options, lies_on_mesh
from memeff.user_functions import Score, Transform, check_result, trace_function


def check_heads(num_heads: Any, num_kv_heads: Any) -> int:
    """Return the number of key and value heads, K."""
    num_heads = check_size("num_heads", num_heads)
    if num_kv_heads is None:
        return num_heads
    num_kv_heads = check_size("num_kv_heads", num_kv_heads)
    if num_heads % num_kv_heads:
        divisors = ", ".join(str(k) for k in range(1, num_heads + 1) if num_heads % k == 0)
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}: "
            f"use one of {divisors}."
        )
    return num_kv_heads


def check_head_size(num_heads: int, qkv_features: int | None, features: int) -> int:
    """Return the size of one head, H, from `qkv_features` or else from the inputs' `features`."""
    total = qkv_features
    name = f"qkv_features={text_of(qkv_features)}"
    if qkv_features is None:
        total = features
        name = f"qkv_features={text_of(features)} (the inputs' features)"
    if isinstance(total, bool) or not isinstance(total, numbers.Integral):
        raise TypeError(f"{name} must be an int: it counts features.")
    if total < 1 or total % num_heads:
        raise ValueError(
            f"{name} does not divide into num_heads={num_heads} heads: make qkv_features a "
            "multiple of it."
        )
    return int(total) // num_heads


def check_options(
    attention_fn, dropout_rate, is_causal, local_window_size, logits_soft_cap
) -> None:
    """Refuse, when the module is made, values that the attention would refuse when it is called."""
    validate.check_window(local_window_size, is_causal)
    _, cap_array = validate.check_soft_cap(logits_soft_cap, jnp.result_type(float))
    if cap_array is not None:
        raise TypeError(
            "logits_soft_cap must be a number in a module, got an array: give float(...), or, for "
            "a gradient, call memeff.dot_product_attention yourself."
        )
    check_number("dropout_rate", dropout_rate, 1)
    if not callable(attention_fn):
        raise TypeError(
            f"attention_fn={text_of(attention_fn)} must be a function like memeff.nn.attention_fn."
        )
    bind(attention_fn, {"local_window_size": local_window_size, "logits_soft_cap": logits_soft_cap})


def sequence_options(module: Any) -> SequenceOptions:
    """Return the attributes of a module that are about a sharded sequence."""
    return SequenceOptions(*(getattr(module, name) for name in SequenceOptions._fields))


def check_sequence(attention_fn, options: SequenceOptions, decode: bool | None) -> None:
    """Refuse wrong keywords of a sharded sequence when the module is made."""
    check_sequence_options(options)
    check_no_cache(options, decode)
    bind(attention_fn, options.keywords())


def check_no_cache(options: SequenceOptions, decode: bool | None) -> None:
    """Refuse to decode with a cache while the sequence is sharded."""
    if decode and options.sequence_axis is not None:
        raise NotImplementedError(
            f"sequence_axis={options.sequence_axis!r} does not support decode=True, because a "
            "cache grows token by token on one device. Omit sequence_axis in the module that "
            "decodes: it has the same parameters."
        )


def sequence_keywords(options: SequenceOptions, query: Any, in_init: bool) -> dict[str, Any]:
    """Return the keywords of a sharded sequence for an `attention_fn`.

    `in_init`: this is the `init` of a module of Linen. Outside of the mesh there are none then,
    because `init` makes parameters, often from a few tokens on one device.
    """
    if in_init and not lies_on_mesh(options, query):
        return {}
    return options.keywords()


def check_functions(attention_fn, score, transform, mask_fn, sinks_init) -> None:
    """Refuse wrong user functions when the module is made.

    `score` and `transform` are (fn, init).
    """
    required = {
        "score_fn": _check_function("score_fn", Score, *score),
        "qk_transform": _check_function("qk_transform", Transform, *transform),
    }
    if mask_fn is not None:
        _check("mask_fn", without_blocks(mask_fn))
    if sinks_init is not None and not callable(sinks_init):
        raise TypeError(
            "sinks_init must be an initializer (key, shape, dtype), such as "
            f"jax.nn.initializers.zeros, got {kind_of(sinks_init)}."
        )
    bind(attention_fn, required | {"mask_fn": mask_fn, "sinks": sinks_init})


def _check_function(name: str, kind: type, fn: Any, init: Any) -> Any:
    """Check a user function or the function that makes it, and return the one that is not None."""
    if init is not None and fn is not None:
        raise ValueError(
            f"{_init_name(name)} and {name} were both given: pass {_init_name(name)}, which "
            f"learns, or {name}, which does not."
        )
    if init is not None:
        evaluate_init(name, kind, init)
        return init
    if fn is not None:
        _check(name, fn)
    return fn


def evaluate_init(name: str, kind: type, init: Callable) -> Any:
    """Return what `init` makes of a key, with its arrays as shapes."""
    expected = (
        f"{_init_name(name)} must be a function of a key that returns a memeff.{kind.__name__}"
    )
    if not callable(init):
        raise TypeError(f"{expected}, got {type(init).__name__}. Write lambda key: ...")

    def checked_init(key):
        function = init(key)
        if not isinstance(function, kind):
            raise TypeError(f"{expected}; it returned {type(function).__name__}.")
        _check(name, function)
        return function

    function = jax.eval_shape(checked_init, jax.random.key(0))
    leaves = jax.tree.leaves(function)
    if not leaves or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves):
        arrays = ", ".join(f"{x.dtype}{list(x.shape)}" for x in leaves) or "none"
        raise TypeError(
            f"{_init_name(name)} must return a memeff.{kind.__name__} whose arrays are floats, to "
            f"learn; got {arrays}."
        )
    return function


def without_blocks(mask_fn: Any) -> Any:
    """Return the mask of a block mask, or else `mask_fn` itself.

    Decoding needs it, because a block mask holds for one length of queries from position 0 on.
    """
    return mask_fn.mask if isinstance(mask_fn, BlockMask) else mask_fn


def _init_name(name: str) -> str:
    """Return the name of the argument whose function makes argument `name`."""
    return f"{name.removesuffix('_fn')}_init"


def _check(name: str, fn: Any) -> None:
    """Check a user function without shapes, for scores of the widest float type enabled."""
    if name != "qk_transform":
        trace_function(name, fn, None, jnp.result_type(float), {})
    elif isinstance(fn, Transform):
        check_result(name, fn.fn, fn.params)
    else:
        check_result(name, fn, None)


def bind(
    attention_fn: Callable,
    required: Mapping[str, Any],
    optional: Mapping[str, Any] = MappingProxyType({}),
) -> Callable:
    """Bind keywords to `attention_fn`.

    `required` keywords that are None or False are left out. `attention_fn` must name the others,
    because Flax silently drops a mask that its attention_fn does not name. `optional` keywords are
    bound if `attention_fn` names them.
    """
    names = inspect.signature(attention_fn).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    required = {name: x for name, x in required.items() if x is not None and x is not False}
    for name in required:
        if not takes_any and name not in names:
            function_name = getattr(attention_fn, "__qualname__", attention_fn)
            raise ValueError(
                f"attention_fn={function_name} does not take {name}, which is needed here: omit "
                "attention_fn, or give a function that takes it, like memeff.nn.attention_fn."
            )
    optional = {name: x for name, x in optional.items() if takes_any or name in names}
    if not required and not optional:
        return attention_fn
    bound = functools.partial(attention_fn, **required, **optional)
    return _naming_refused_keywords(bound) if takes_any else bound


def _naming_refused_keywords(bound: functools.partial) -> Callable:
    """Return `bound` with an error that says what to do if its function passes a keyword on.

    A function that takes any keyword may hand all of them to Flax's, which does not know them.
    """

    @functools.wraps(bound.func)  # with its signature, which Flax reads
    def attend(*arrays, **more):
        try:
            return bound(*arrays, **more)
        except TypeError as e:
            for name in bound.keywords:
                if f"unexpected keyword argument '{name}'" in str(e):
                    function_name = getattr(bound.func, "__qualname__", bound.func)
                    raise TypeError(
                        f"attention_fn={function_name} takes any keyword, and hands {name} to a "
                        "function that does not take it. Name the keywords that attention_fn "
                        "takes, or give a function that takes all, like memeff.nn.attention_fn."
                    ) from e
            raise

    return attend
