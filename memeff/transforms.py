"""Ready-made transforms of queries and keys.

Each is a `memeff.Transform`. Its result is computed for each tile, again in the backward, and
never stored for all tokens.

>>> import memeff
>>> x = jnp.ones((1, 5, 2, 4))
>>> transform = rms_norm(jnp.ones(4), jnp.ones(4)).then(rotary())
>>> memeff.dot_product_attention(x, x, x, qk_transform=transform).shape
(1, 5, 2, 4)
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from memeff.inputs import check_floats, check_number
from memeff.problem import sum_dtype
from memeff.user_functions import Transform


def rotary(base: float = 10000.0) -> Transform:
    """Rotate pairs (x[i], x[i + H/2]) by position * base^(-2 i / H). H must be even.

    It computes in float32 (float64 for float64).

    Source: Su et al. 2021 (arXiv:2104.09864), section 3.2, whose pairs are neighbours instead.
    """
    base = check_number("base", base)
    if base == 0:
        raise ValueError("base=0: it must be > 0.")
    return Transform(_Rotary(base))


@dataclasses.dataclass(frozen=True)
class _Rotary:
    base: float

    def __call__(self, x, position, which, params):
        if x.shape[0] % 2:
            raise ValueError(
                "transforms.rotary rotates pairs of features: H must be even, "
                f"but this call has H={x.shape[0]}."
            )
        half = x.shape[0] // 2
        dtype = sum_dtype(x.dtype)
        exponent = -jnp.arange(half, dtype=dtype) / half
        angle = position.astype(dtype) * self.base**exponent
        cos = jnp.cos(angle)
        sin = jnp.sin(angle)
        a = x[:half].astype(dtype)
        b = x[half:].astype(dtype)
        rotated = [a * cos - b * sin, b * cos + a * sin]
        return jnp.concatenate(rotated).astype(x.dtype)


def rms_norm(query_scale: ArrayLike, key_scale: ArrayLike, epsilon: float = 1e-6) -> Transform:
    """Return x / sqrt(mean(x^2) + epsilon) * scale, with scales [H].

    It computes in float32 (float64 for float64).

    Source: Zhang & Sennrich 2019 (arXiv:1910.07467); for queries and keys, Henry et al. 2020
    (arXiv:2010.04245).
    """
    scales = {
        "query": check_floats("query_scale", query_scale),
        "key": check_floats("key_scale", key_scale),
    }
    for which, scale in scales.items():
        if scale.ndim != 1:
            raise ValueError(f"{which}_scale must have shape [H]; got {scale.shape}.")
    return Transform(_RmsNorm(check_number("epsilon", epsilon)), scales)


@dataclasses.dataclass(frozen=True)
class _RmsNorm:
    epsilon: float

    def __call__(self, x, position, which, params):
        scale = params[which]
        if scale.shape != x.shape:
            raise ValueError(
                f"transforms.rms_norm has {which}_scale for H={len(scale)}, but this call has "
                f"H={len(x)}."
            )
        wide = x.astype(sum_dtype(x.dtype))
        normalised = wide * lax.rsqrt(jnp.square(wide).mean() + self.epsilon)
        scaled = normalised * scale.astype(wide.dtype)
        return scaled.astype(x.dtype)
