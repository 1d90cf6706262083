"""What the Linen and the NNX modules share: the checks of what memeff adds, and how an `attention_fn` gets its keywords."""

import functools
import inspect
import numbers
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from memeff import arguments

_ANY = arguments.Shape((), 1, 1, 1, 1, 1, 1)  # where only the values are checked


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
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}: use one of {fit}.")
    return num_kv_heads


def check_head_size(num_heads: int, qkv_features, features: int) -> int:
    """The size of one head, H, from `qkv_features` or, where it is None, the `features` of the inputs."""
    total, origin = (features, " (the inputs' features)") if qkv_features is None else (qkv_features, "")
    given = f"qkv_features={total!r}{origin}"
    if isinstance(total, bool) or not isinstance(total, numbers.Integral):
        raise TypeError(f"{given} must be an int.")
    if total < 1 or total % num_heads:
        raise ValueError(f"{given} does not divide into num_heads={num_heads} heads: make qkv_features a multiple of it.")
    return int(total) // num_heads


def check_options(attention_fn, dropout_rate, is_causal, local_window_size, logits_soft_cap) -> None:
    """Refuses, when the module is made, what the attention would refuse when it is called."""
    arguments.check_window(local_window_size, is_causal)
    if arguments.check_terms(_ANY, None, None, logits_soft_cap)[0].soft_cap is not None:
        raise TypeError(
            "logits_soft_cap must be a number in a module, got an array: give float(...), or, for a gradient, call "
            "memeff.dot_product_attention yourself."
        )
    arguments.check_dropout(None, dropout_rate, True, True)
    if not callable(attention_fn):
        raise TypeError(f"attention_fn={attention_fn!r} must be a function like memeff.dot_product_attention.")
    bind(attention_fn, {"local_window_size": local_window_size, "logits_soft_cap": logits_soft_cap})


def bind(attention_fn: Callable, said: Mapping[str, Any], quiet: Mapping[str, Any] = MappingProxyType({})) -> Callable:
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
                "here: leave attention_fn at memeff.dot_product_attention, or give a function that takes it."
            )
    quiet = {name: x for name, x in quiet.items() if any_name or name in names}
    return functools.partial(attention_fn, **said, **quiet) if said or quiet else attention_fn
