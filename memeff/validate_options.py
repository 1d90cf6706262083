"""Check the arguments that choose how attention is computed, and the user's functions."""

import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.block_mask import BlockMask
from memeff.inputs import (
    check_bool,
    check_choice,
    check_number,
    check_sides,
    kind_of,
    text_of,
    to_array,
)
from memeff.problem import Dropout
from memeff.shape import CallShape
from memeff.user_functions import (
    check_pair_function,
    check_row_function,
    trace_function,
    trace_transform,
)

MAKE_KEY = 'Make it with jax.random.key(seed, impl="threefry2x32").'


def check_function(shape: CallShape, name: str, fn, params, dtype):
    """Return the traced function, or None, and the leaves of its params: floats, and others.

    A call without pairs needs no function.
    """
    if fn is None and params is None:
        return None, (), ()
    sizes = {"B": shape.B, "N": shape.N, "T": shape.T, "Q": shape.T, "S": shape.S}
    if _has_no_pair(shape):
        check_pair_function(name, fn, params, sizes)
        return None, (), ()
    return trace_function(name, fn, params, dtype, sizes)


def _has_no_pair(shape: CallShape) -> bool:
    """Return True if no function is needed; JAX does not index params of size 0."""
    return 0 in (shape.B, shape.N, shape.T, shape.S)


def check_blocks(shape: CallShape, mask_fn, q_offset):
    """Return the blocks of a block mask, or None, and the mask itself."""
    if not isinstance(mask_fn, BlockMask):
        return None, mask_fn
    blocks = mask_fn.blocks
    if blocks.lengths != (shape.T, shape.S):
        raise ValueError(
            f"mask_fn is a block mask of T, S = {blocks.lengths}, and this call has "
            f"{(shape.T, shape.S)}: make a block mask of these lengths."
        )
    made_for = ("batch", blocks.batch, "B", shape.B), ("heads", blocks.heads, "N", shape.N)
    for name, made, letter, size in made_for:
        if made not in (None, size):
            raise ValueError(
                f"mask_fn is a block mask made with {name}={made}, and this call has "
                f"{letter}={size}: make one with {name}={size}."
            )
    if not (isinstance(q_offset, numbers.Integral) and q_offset == 0):
        raise ValueError(
            "mask_fn is a block mask, whose positions begin at 0, and q_offset is given: pass the "
            "memeff.Mask itself."
        )
    return blocks, mask_fn.mask


def check_transform(shape: CallShape, fn, params, query):
    """Return the traced qk_transform, or None, and the leaves of its params: floats, and others.

    A call without pairs needs no function.
    """
    if fn is None and params is None:
        return None, (), ()
    if _has_no_pair(shape):
        check_row_function(fn, params)
        return None, (), ()
    return trace_transform(fn, params, jax.ShapeDtypeStruct(query.shape[-1:], query.dtype))


def check_chunk_size(
    chunk_size, pair: str = "(query, key) in tokens", unit: str = "tokens"
) -> tuple[int | None, int | None]:
    """Return (rows, columns) of a tile, None: a default; `pair` and `unit` name them in errors."""
    if chunk_size is None:
        return None, None
    cure = "omit it for the default"
    rows, columns = check_sides("chunk_size", chunk_size, pair, unit, least=1, cure=cure)
    return operator.index(rows), operator.index(columns)


def check_precision(precision: Any) -> lax.PrecisionLike:
    """Return the precision in a hashable form that `jax.lax` takes."""
    if precision is None:
        return None
    if isinstance(precision, list):
        precision = tuple(precision)
    try:  # lax knows which values are valid
        jax.eval_shape(
            lambda x: lax.dot(x, x, precision=precision), jax.ShapeDtypeStruct((1,), jnp.float32)
        )
    except (ValueError, TypeError) as e:
        raise ValueError(
            f'precision={text_of(precision)} must be None, "default", "high", "highest", a '
            "jax.lax.Precision, a pair of these, or a jax.lax.DotAlgorithmPreset."
        ) from e
    return precision


def check_backward(backward: Any) -> str | None:
    """Return `backward` if it is a known form."""
    check_choice("backward", backward, ("split", "fused", "fastest"), optional=True)
    return backward


def check_implementation(implementation: Any) -> str | None:
    """Return `implementation` if it is a name or None. Dispatch checks if it is known."""
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(
            "implementation must be a name or None (it is fixed while tracing), got "
            f"{kind_of(implementation)}."
        )
    return implementation


def check_dropout(rng, rate, shared, bits) -> tuple[Dropout | None, Array | None]:
    """Return the static choice, and the key as two uint32 words; (None, None) without dropout."""
    rate = check_number("dropout_rate", rate, 1)
    check_bool("broadcast_dropout", shared)
    check_choice("dropout_bits", bits, ("threefry", "mix32"))
    if rate == 0:
        return None, None
    if rng is None:
        raise ValueError(
            f"dropout_rate={rate:g} came without dropout_rng: pass a key, or omit dropout_rate."
        )
    if hasattr(rng, "dtype") and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        rng = _two_words(rng, bits)
    rng = to_array("dropout_rng", rng)
    config: Any = jax.config
    if rng.shape == (4,) and "rbg" in config.jax_default_prng_impl:  # made by PRNGKey
        rng = _two_words(jax.random.wrap_key_data(rng), bits)
    if rng.shape != (2,) or rng.dtype != jnp.uint32:
        raise TypeError(
            f"dropout_rng must be one key of jax.random.key or PRNGKey, got {rng.dtype} of shape "
            f"{rng.shape}. {MAKE_KEY}"  # the key may be one of rbg, of shape (4,)
        )
    return Dropout(rate, bool(shared), bits), rng


def _two_words(key: Array, bits: str) -> Array:
    """Return two uint32 words that stand for a key of any generator of JAX."""
    impl = str(jax.random.key_impl(key))
    if "threefry2x32" in impl:
        return jax.random.key_data(key)
    if bits == "threefry":
        raise NotImplementedError(
            f'dropout_rng is a key of {impl}, and dropout_bits="threefry" draws from threefry2x32. '
            f'{MAKE_KEY} Or pass dropout_bits="mix32", which takes any key.'
        )
    return jax.random.bits(key, (2,), jnp.uint32) if key.ndim == 0 else jax.random.key_data(key)


def check_flax_hooks(**hooks: Any) -> None:
    """Refuse Flax's hooks.

    Linen passes the hooks that a signature names, so the signature names one that Linen always
    passes.
    """
    for name, hook in hooks.items():
        if hook is not None:
            raise TypeError(
                f"{name}= is a hook of Flax's modules, and dot_product_attention takes none of "
                "those: give the modules attention_fn=memeff.nn.attention_fn. In a call of your "
                "own, omit it (dropout_rate=0 drops nothing), and cast arrays before."
            )
