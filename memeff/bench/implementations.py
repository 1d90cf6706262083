"""The implementations of attention that the bench compares, and the arguments each one takes.

An implementation has a name such as "memeff", "memeff:128@1GiB", "jax.nn:cudnn" or "torch".
"""

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

import memeff
from memeff.bench import caches
from memeff.bench.cases import Case
from memeff.bench.extras import extra_arguments, extra_as_array

STANDARD = ("memeff", "jax.nn:cudnn", "tokamax:xla_chunked", "torch", "jax.nn")
NAMES = (
    "memeff[:CHUNK|:IMPLEMENTATION|:fused|:fastest][@MEMORY], "
    "memeff:cache, memeff:pagesN, memeff:int8, memeff:fp8 (caches, for --decode), jax.nn[:cudnn], "
    "jax.pallas (for --decode alone), reference, torch[:cudnn], tokamax[:IMPLEMENTATION]"
)
MEMEFF_NAME = re.compile(
    r"memeff(?::(?:(?P<chunk>\d+)|(?P<implementation>xla|pallas)|(?P<backward>fused|fastest)))?"
    r"(?:@(?P<memory>[\w.]+))?"
)


TORCH_NAMES = ("torch", "torch:cudnn")  # the backend that PyTorch chooses, or that one


# Which implementations there are


def is_torch(name: str) -> bool:
    """Return True if PyTorch runs `name`."""
    return name in TORCH_NAMES


def why_not(name: str, dtype: str) -> str | None:
    """Return None if `name` can run on this machine, otherwise the reason.

    Raises:
      ValueError: the name is not known.
    """
    library, _, variant = name.partition(":")
    if library in ("torch", "tokamax") and importlib.util.find_spec(library) is None:
        return f"{library} is not installed"
    if variant == "cudnn":
        if jax.default_backend() != "gpu" or dtype not in ("bfloat16", "float16"):
            return "cuDNN needs an NVIDIA GPU and a 16-bit dtype"
    if is_torch(name):
        return None
    try:
        attention(name)
    except ImportError as error:
        return f"{library} does not import: {error}"
    return None


def attention(name: str) -> Callable[..., Any]:
    """Return the JAX function behind `name`; of a cache that of its keys as arrays."""
    if caches.is_cache(name):
        return memeff.dot_product_attention
    memeff_name = MEMEFF_NAME.fullmatch(name)
    if memeff_name:
        options = memeff_options(memeff_name)
        return functools.partial(memeff.dot_product_attention, **options)
    library, _, variant = name.partition(":")
    if library == "jax.nn" and variant in ("", "xla", "cudnn"):
        implementation: Any = variant or "xla"
        return functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    if name == "jax.pallas":
        return jax_pallas_decode
    if name == "reference":
        return functools.partial(memeff.dot_product_attention, implementation="reference")
    if library == "tokamax":
        tokamax = importlib.import_module(library)
        implementation = variant or None
        return functools.partial(tokamax.dot_product_attention, implementation=implementation)
    raise ValueError(f"implementation {name!r} is not known: use {NAMES}.")


def jax_pallas_decode(query: Array, key: Array, value: Array, *, is_causal: bool) -> Array:
    """Return the attention of one query [B, 1, N, H] to all keys, by JAX's Pallas operation."""
    if is_causal or query.shape[1] != 1:
        raise NotImplementedError("it decodes one query of each sequence: --decode")
    gpu = importlib.import_module("jax.experimental.pallas.ops.gpu.decode_attention")
    return gpu.gqa(query[:, 0], key, value)[:, None]


def memeff_options(name: re.Match[str]) -> dict[str, Any]:
    """Return the arguments of memeff's attention that a name such as "memeff:64@1GiB" asks for."""
    chunk = name["chunk"]
    options: dict[str, Any] = {"chunk_size": int(chunk) if chunk else None}
    if name["backward"]:
        options["backward"] = name["backward"]
    else:
        options["implementation"] = name["implementation"]
    memory = name["memory"]
    if memory:
        options["memory_limit"] = int(memory) if memory.isdecimal() else memory
    return options


def is_memeff(name: str) -> bool:
    """Return True if `name` takes memeff's arguments."""
    return name.startswith(("memeff", "reference"))


# The arguments of a case


def causal_arguments(name: str, case: Case) -> dict[str, Any]:
    """Return the arguments that hide later keys from the last `case.queries` positions."""
    offset = case.length - case.queries
    if case.mask != "causal" or not offset:
        return {"is_causal": case.mask == "causal"}
    if is_memeff(name):
        return {"is_causal": True, "q_offset": offset}
    if case.queries > 1:
        raise NotImplementedError("its causal order has no offset, and these queries are the last")
    return {"is_causal": False}  # the last query sees every key


def function_arguments(name: str, case: Case) -> dict[str, Any]:
    """Return the case's score or mask as memeff takes it; {} for other implementations."""
    if not is_memeff(name):
        return {}
    return extra_arguments(case.extra, case.heads, case.length)


def array_argument(name: str, case: Case) -> tuple[str, Callable[[], Array]] | None:
    """Return the name and the maker of the array that replaces the case's score or mask.

    Return None where no array is needed.
    """
    if case.extra == "plain" or is_memeff(name):
        return None
    if not name.startswith("jax.nn"):
        raise NotImplementedError("the bench passes it no scores and no masks")
    return extra_as_array(case.extra, case.heads, case.length, case.dtype)
