"""Ready-made transforms of queries and keys: `memeff.Transform`, made of each tile and again in the backward, never stored.

>>> import memeff
>>> x = jnp.ones((1, 5, 2, 4))
>>> memeff.dot_product_attention(x, x, x, qk_transform=rms_norm(jnp.ones(4), jnp.ones(4)).then(rotary())).shape
(1, 5, 2, 4)
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from memeff.user_functions import Transform


def rotary(base: float = 10000.0) -> Transform:
    """Turns pairs (x[i], x[i + H/2]) by position * base^(-2 i / H), in float32. H must be even.

    Source: Su et al. 2021 (arXiv:2104.09864), section 3.2, with halves for neighbours.
    """
    return Transform(_Rotary(base))


@dataclasses.dataclass(frozen=True)
class _Rotary:
    base: float

    def __call__(self, x, position, which, params):
        if x.shape[0] % 2:
            raise ValueError(
                f"transforms.rotary turns pairs: heads must be of an even size, and here H={x.shape[0]}."
            )
        half = x.shape[0] // 2
        angle = position * self.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
        cos, sin = (f(angle).astype(wide) for f in (jnp.cos, jnp.sin))
        a, b = x[:half].astype(cos.dtype), x[half:].astype(cos.dtype)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin]).astype(x.dtype)


def rms_norm(query_scale: ArrayLike, key_scale: ArrayLike, epsilon: float = 1e-6) -> Transform:
    """x / sqrt(mean x^2 + epsilon) * scale, scales [H], in float32 (query/key normalisation).

    Source: Zhang & Sennrich 2019 (arXiv:1910.07467); Henry et al. 2020 (arXiv:2010.04245) of queries and keys.
    """
    return Transform(
        _RmsNorm(epsilon), {"query": jnp.asarray(query_scale), "key": jnp.asarray(key_scale)}
    )


@dataclasses.dataclass(frozen=True)
class _RmsNorm:
    epsilon: float

    def __call__(self, x, position, which, params):
        wide = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
        size = lax.rsqrt(jnp.square(wide).mean() + self.epsilon)
        return (wide * size * params[which].astype(wide.dtype)).astype(x.dtype)
