"""Keys in pages or in 8 bits: on each kind of device a call runs, or is refused in words."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from conftest import few

from memeff import paged_attention
from memeff.device import Device, pretend_device
from memeff.implementations import IMPLEMENTATIONS

B, N, K, H, PAGE, PAGES = 2, 4, 2, 128, 32, 8
DTYPES = (jnp.bfloat16, jnp.int8)
DEVICES = [Device("cpu"), Device("tpu"), Device("gpu", "8.0"), Device("gpu", "9.0")]


def attend(T: int, dtype, implementation, is_causal: bool):
    """Trace a call of T queries; without causal order no array but the pages is unusual."""
    query = jnp.ones((B, T, N, H), jnp.bfloat16)
    pages = jnp.ones((B * PAGES, PAGE, K, H), dtype)
    scales = jnp.ones((B * PAGES, K, PAGE)) if dtype == jnp.int8 else None
    table = jnp.arange(B * PAGES).reshape(B, PAGES)
    offset = None if is_causal else 0

    def call(query, pages, scales, table, lengths):
        return paged_attention(
            query,
            pages,
            pages,
            table,
            lengths,
            is_causal=is_causal,
            q_offset=offset,
            key_scales=scales,
            value_scales=scales,
            implementation=implementation,
        )

    lengths = jnp.array([250, 200])
    return jax.eval_shape(call, query, pages, scales, table, lengths)


@pytest.mark.filterwarnings("ignore:memeff. using the chunked path")
@pytest.mark.parametrize(
    "dtype, is_causal",
    few(itertools.product(DTYPES, [False, True]), [(jnp.bfloat16, False), (jnp.int8, True)]),
)
@pytest.mark.parametrize("T", [1, 64])  # the decode kernel, and what other kernels would take
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_every_device_runs_stored_keys_or_says_why_not(device, T, dtype, is_causal):
    with pretend_device(*device):
        assert attend(T, dtype, None, is_causal).shape == (B, T, N, H)
        for name in IMPLEMENTATIONS:
            try:
                out = attend(T, dtype, name, is_causal)
            except NotImplementedError as error:
                assert f'implementation="{name}" cannot run this call: ' in str(error)
                assert name != "xla"
            else:
                assert out.shape == (B, T, N, H)
                assert name != "reference"
