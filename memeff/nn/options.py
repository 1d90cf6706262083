"""What the Linen and the NNX modules share: the checks of what memeff adds, and how an `attention_fn` gets its keywords."""

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from memeff import validate, validate_options
from memeff.block_mask import BlockMask
from memeff.shape import CallShape
from memeff.user_functions import Score, Transform, check_result, trace_function

_ANY = CallShape((), 1, 1, 1, 1, 1, 1)  # where only the values are checked


def check_heads(num_heads: Any, num_kv_heads: Any) -> int:
    """The number of key and value heads, K."""
    for name, count in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if count is None and name == "num_kv_heads":
            continue
        if isinstance(count, bool) or not isinstance(count, numbers.Integral):
            raise TypeError(f"{name}={count!r} must be an int: it counts heads.")
        if count < 1:
            raise ValueError(f"{name}={count} must be at least 1: it counts heads.")
    if num_kv_heads is None:
        return num_heads
    if num_heads % num_kv_heads:
        fit = ", ".join(str(k) for k in range(1, num_heads + 1) if num_heads % k == 0)
        raise ValueError(
            f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}: use one of {fit}."
        )
    return num_kv_heads


def check_head_size(num_heads: int, qkv_features, features: int) -> int:
    """The size of one head, H, from `qkv_features` or, where it is None, the `features` of the inputs."""
    total, origin = (
        (features, " (the inputs' features)") if qkv_features is None else (qkv_features, "")
    )
    given = f"qkv_features={total!r}{origin}"
    if isinstance(total, bool) or not isinstance(total, numbers.Integral):
        raise TypeError(f"{given} must be an int.")
    if total < 1 or total % num_heads:
        raise ValueError(
            f"{given} does not divide into num_heads={num_heads} heads: make qkv_features a multiple of it."
        )
    return int(total) // num_heads


def check_options(
    attention_fn, dropout_rate, is_causal, local_window_size, logits_soft_cap
) -> None:
    """Refuses, when the module is made, what the attention would refuse when it is called."""
    validate.check_window(local_window_size, is_causal)
    if validate.check_logit_params(_ANY, None, None, logits_soft_cap)[0].soft_cap is not None:
        raise TypeError(
            "logits_soft_cap must be a number in a module, got an array: give float(...), or, for a gradient, call "
            "memeff.dot_product_attention yourself."
        )
    validate_options.check_dropout_rate(dropout_rate)
    if not callable(attention_fn):
        raise TypeError(
            f"attention_fn={attention_fn!r} must be a function like memeff.nn.attention_fn."
        )
    bind(attention_fn, {"local_window_size": local_window_size, "logits_soft_cap": logits_soft_cap})


def check_functions(attention_fn, score, transform, mask_fn, sinks_init) -> None:
    """The same of what a user's own functions are given by; `score` and `transform` are (fn, init)."""
    given = {}
    for name, (fn, init), kind in (
        ("score_fn", score, Score),
        ("qk_transform", transform, Transform),
    ):
        given[name] = fn if init is None else init
        if init is not None and fn is not None:
            raise ValueError(
                f"{_init(name)} came beside {name}: give the one that learns, or the one that does not."
            )
        if init is not None:
            made(name, kind, init)
        elif fn is not None:
            _check(name, fn)
    if mask_fn is not None:
        _check("mask_fn", without_blocks(mask_fn))
    if sinks_init is not None and not callable(sinks_init):
        cure = "an initializer (key, shape, dtype), such as jax.nn.initializers.zeros"
        raise TypeError(f"sinks_init must be {cure}, got {type(sinks_init).__name__}.")
    bind(attention_fn, given | {"mask_fn": mask_fn, "sinks": sinks_init})


def made(name: str, kind: type, init: Callable) -> Any:
    """What `init` makes of a key, its arrays as shapes."""
    wanted = f"{_init(name)} must be a function of a key that returns a memeff.{kind.__name__}"
    if not callable(init):
        raise TypeError(f"{wanted}, got {type(init).__name__}: lambda key: ... makes it one.")

    def checked(key):
        found = init(key)
        if not isinstance(found, kind):
            raise TypeError(f"{wanted}; it returned {type(found).__name__}.")
        _check(name, found)
        return found

    found = jax.eval_shape(checked, jax.random.key(0))
    leaves = jax.tree.leaves(found)
    if not leaves or not all(jnp.issubdtype(x.dtype, jnp.floating) for x in leaves):
        got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in leaves) or "none"
        raise TypeError(
            f"{_init(name)} must return a memeff.{kind.__name__} whose arrays are floats, to learn; got {got}."
        )
    return found


def without_blocks(mask_fn: Any) -> Any:
    """A block mask is of one length of queries, from position 0 on: where they come one by one, its mask alone."""
    return mask_fn.mask if isinstance(mask_fn, BlockMask) else mask_fn


def _init(name: str) -> str:
    return f"{name.removesuffix('_fn')}_init"


def _check(name: str, fn: Any) -> None:
    """What can be said before shapes are known; scores in the widest float that there is."""
    if name != "qk_transform":
        trace_function(name, fn, None, jnp.result_type(float), {})
        return
    fn, params = (fn.fn, fn.params) if isinstance(fn, Transform) else (fn, None)
    check_result(name, fn, params)


def bind(
    attention_fn: Callable, said: Mapping[str, Any], quiet: Mapping[str, Any] = MappingProxyType({})
) -> Callable:
    """`attention_fn` with the keywords in `said` that are not None or False, and those in `quiet` that it names.

    It must name what is said: Flax drops a mask that its attention_fn does not name, without a word.
    """
    names = inspect.signature(attention_fn).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in names.values())
    said = {name: x for name, x in said.items() if x is not None and x is not False}
    for name in said:
        if not any_name and name not in names:
            raise ValueError(
                f"attention_fn={getattr(attention_fn, '__qualname__', attention_fn)} does not take {name}, which is needed "
                "here: leave attention_fn at memeff.nn.attention_fn, or give a function that takes it."
            )
    quiet = {name: x for name, x in quiet.items() if any_name or name in names}
    return functools.partial(attention_fn, **said, **quiet) if said or quiet else attention_fn
