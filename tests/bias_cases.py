"""Name calls with a bias, and with masks that become one, for the kernels of every family.

z, kwargs = CASES["pairs"]      # sizes, and keyword arguments
"""

import jax.numpy as jnp
import numpy as np
from hopper_cases import bf16, f32, i32, small

# Sizes, shape and dtype of the bias, the share of pairs that it hides, and keyword arguments.
_BIASES = {
    "pairs": (small(B=2, T=70, S=100, G=2), (1, 2, 70, 100), bf16, 0.1, {}),
    "pairs of each entry": (
        small(B=2, T=130, S=204, K=2),
        (2, 1, 130, 204),
        f32,
        0,
        dict(is_causal=True, q_offset=50),
    ),
    "pairs of all": (
        small(B=3, T=70, S=130, K=2),
        (1, 1, 70, 130),
        bf16,
        0.9,
        dict(key_value_seq_lengths=i32([130, 0, 60]), sinks=np.array([1.0, -np.inf], f32)),
    ),
    "128": (
        small(T=150, S=90, G=2, H=128, D=128),
        (1, 2, 150, 90),
        bf16,
        0,
        dict(logits_soft_cap=2.0, local_window_size=(60, 10)),
    ),
    "128, float32": (small(T=130, S=130, H=120, D=128), (1, 1, 130, 130), f32, 0.1, {}),
    "wide": (small(T=70, S=90, H=192, D=130), (1, 1, 70, 90), bf16, 0.1, {}),
    "keys": (small(B=2, T=130, S=204, G=2), (2, 2, 1, 204), bf16, 0.3, dict(is_causal=True)),
    "keys, 128": (small(T=70, S=140, H=128, D=40), (1, 1, 1, 140), f32, 0, {}),
    "queries": (small(B=2, T=130, S=70, K=2), (1, 2, 130, 1), f32, 0.3, {}),
    "heads": (small(B=2, T=70, S=70, K=2), (2, 2, 1, 1), f32, 0, {}),
    "segments": (
        small(T=140, S=140),
        (1, 1, 140, 140),
        bf16,
        0.1,
        dict(query_segment_ids=i32([[0] * 60 + [1] * 80])),
    ),
}


def _bias_of(name: str) -> np.ndarray:
    """Return the bias of a case. Where it hides a pair, it is -inf or the lowest number."""
    _, shape, dtype, share, _ = _BIASES[name]
    rng = np.random.default_rng(4)
    bias = rng.standard_normal(shape)
    lowest = float(jnp.finfo(dtype).min)
    hiding = rng.choice([-np.inf, lowest], shape)
    return np.where(rng.random(shape) < share, hiding, bias).astype(dtype)


CASES = {name: (z, kwargs | {"bias": _bias_of(name)}) for name, (z, *_, kwargs) in _BIASES.items()}


def mask_of(*shape: int) -> np.ndarray:
    """Return a mask that hides a third of the pairs, and all of some rows."""
    mask = np.random.default_rng(5).random(shape) < 0.7
    mask[..., :3, :] = False
    return mask


# Sizes, and keyword arguments.
MASKS = {
    "dense": (small(B=2, T=70, S=100, G=2), dict(mask=mask_of(2, 1, 70, 100))),
    "dense, with a bias": (
        small(B=2, T=130, S=130, K=2),
        dict(
            mask=mask_of(1, 2, 130, 130),
            bias=np.random.default_rng(6).standard_normal((1, 2, 130, 130)).astype(f32),
            is_causal=True,
        ),
    ),
    "of keys, with segments": (
        small(B=2, T=140, S=140),
        dict(
            mask=np.random.default_rng(5).random((2, 1, 1, 140)) < 0.7,
            query_segment_ids=i32([[0] * 60 + [1] * 80] * 2),
        ),
    ),
    "of queries, with segments and a bias": (
        small(T=140, S=140),
        dict(
            mask=(np.arange(140) % 5 > 1)[:, None],
            bias=np.random.default_rng(6).standard_normal((1, 1, 140, 1)).astype(f32),
            query_segment_ids=i32([[0] * 60 + [1] * 80]),
        ),
    ),
}
