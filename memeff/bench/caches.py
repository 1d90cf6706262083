"""The caches of memeff that the bench of decoding compares: "memeff:pages64", "memeff:int8", ..."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import memeff
from memeff.bench.cases import Case

STANDARD = ("memeff:cache", "memeff:pages64", "memeff:int8")
NAME = re.compile(r"memeff:(?:(?P<cache>cache)|pages(?P<page>[1-9]\d*)|(?P<dtype>int8|fp8))")
DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}


def is_cache(name: str) -> bool:
    """Return True if `name` is one of a cache."""
    return NAME.fullmatch(name) is not None


def make_cache(name: str, case: Case) -> Callable[[Array, Array], Any]:
    """Return the function that puts key and value [B, S, K, H] into the cache called `name`.

    Lengths are arrays, as a server has them, and pages lie in a random order.

    Raises: NotImplementedError if the case does not decode.
    """
    match = NAME.fullmatch(name)
    assert match is not None
    if case.mode != "forward" or case.mask != "causal" or case.extra != "plain":
        raise NotImplementedError("caches run causal forwards of the newest queries: pass --decode")
    B, S, K, H = case.shapes[1]
    page = int(match["page"] or 1)
    if S % page:
        raise NotImplementedError(f"pages of {page} tokens do not divide {S} keys")

    def make(key: Array, value: Array) -> Any:
        if not match["page"]:
            dtype = DTYPES.get(match["dtype"] or "", key.dtype)
            return memeff.KVCache.zeros(B, S, K, H, dtype).append(key, value)
        table = np.random.default_rng(0).permutation(B * S // page).reshape(B, -1)
        cache = memeff.PagedKVCache.zeros(
            table.size, page, K, H, key.dtype, batch=B, pages_per_sequence=table.shape[1]
        )
        return cache.with_sequences(table, np.zeros(B, np.int32)).append(key, value)

    return make


def attend(query: Array, cache: Any) -> tuple[Array]:
    """Return out, as a tuple of one."""
    return (cache.attend(query),)


def shapes(name: str, case: Case) -> tuple[Any, Any]:
    """Return the shapes of the query and of the cache."""
    query, key, value = (jax.ShapeDtypeStruct(x, case.dtype) for x in case.shapes[:3])
    return query, jax.eval_shape(make_cache(name, case), key, value)
