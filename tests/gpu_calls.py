"""Calls of the Hopper kernels for tests on a GPU, and helpers. This module has no test."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Sizes

from memeff.device import current_device
from memeff.pallas.hopper import implementation as hopper


def skip_without_kernels() -> None:
    """Skip the test, with the reason, where the Hopper kernels cannot run."""
    if reason := hopper.for_device(current_device()):
        pytest.skip(reason)


def normal_arrays(*shapes, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    """Return normal arrays; the i-th is drawn with the key i."""
    return [jax.random.normal(jax.random.key(i), s, dtype) for i, s in enumerate(shapes)]


def _lengths() -> dict[str, tuple[Sizes, dict]]:
    """Return causal calls at lengths around multiples of 64, and at some that need care."""
    causal = dict(is_causal=True)
    calls = {}
    for k in range(1, 18):
        sizes = Sizes(B=1, T=64 * k - 1, S=64 * k + 1, K=1, G=2, H=64, D=64)
        calls[f"length {64 * k - 1}"] = sizes, causal
    # a warpgroup's rows end behind those of its block
    uneven = Sizes(B=2, T=130, S=200, K=2, G=1, H=64, D=64)
    calls["offsets, uneven"] = uneven, causal | dict(q_offset=np.array([-20, 61], np.int32))
    return calls


def _head_dims() -> dict[str, tuple[Sizes, dict]]:
    calls = {}
    for H in (32, 40, 59, 64, 72, 80, 96, 104, 128, 160, 192, 256):
        calls[f"head {H}"] = Sizes(B=2, T=130, S=190, K=2, G=1, H=H, D=H), {}
    return calls


def _many_heads() -> dict[str, tuple[Sizes, dict]]:
    """Return calls in which the last block's rows end behind those of lse."""
    calls = {}
    for T in (64, 192, 320):
        sizes = Sizes(B=3, T=T, S=T, K=4, G=2, H=64, D=64)
        calls[f"length {T}, heads"] = sizes, dict(is_causal=True)
    return calls


def _masks() -> dict[str, tuple[Sizes, dict]]:
    """Return calls with every kind of mask that the kernels support."""
    grouped = Sizes(B=2, T=300, S=400, K=2, G=3, H=128, D=64)
    lengths = dict(
        query_seq_lengths=np.array([300, 7], np.int32),
        key_value_seq_lengths=np.array([129, 400], np.int32),
    )
    q_ids = np.random.default_rng(0).integers(0, 4, (2, 300))
    k_ids = np.random.default_rng(1).integers(0, 4, (2, 400))
    segments = dict(
        query_segment_ids=np.sort(q_ids).astype(np.int32),
        key_value_segment_ids=np.sort(k_ids).astype(np.int32),
    )
    unsorted = dict(
        query_segment_ids=np.random.default_rng(0).integers(0, 4, (2, 300), np.int32),
        key_value_segment_ids=np.random.default_rng(1).integers(0, 4, (2, 400), np.int32),
    )
    keys = (np.arange(400) < np.array([[300], [7]]))[:, None, None]
    queries = (np.arange(300) % 100 < 70)[:, None]
    everything = dict(
        local_window_size=(90, 9), q_offset=np.array([0, 40], np.int32), logits_soft_cap=5.0
    )
    kwargs: dict[str, dict[str, Any]] = {
        "offset": dict(is_causal=True, q_offset=100),
        "offsets": dict(is_causal=True, q_offset=np.array([-50, 111], np.int32)),
        "window": dict(local_window_size=(70, 20)),
        "lengths": lengths,
        "soft cap": dict(logits_soft_cap=2.0, is_causal=True),
        "segments": segments,
        "segments, unsorted": unsorted | dict(is_causal=True),
        "keys masked": dict(mask=keys),
        "queries masked": dict(mask=queries, is_causal=True),
        "everything": everything | lengths,
    }
    return {name: (grouped, arguments) for name, arguments in kwargs.items()}


# {name: (sizes, keyword arguments)}
HOPPER = _lengths() | _head_dims() | _many_heads() | _masks()
