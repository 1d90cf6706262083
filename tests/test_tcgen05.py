"""Values of the sketch of a forward for Blackwell GPUs. test_sm90a.py compiles it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import assert_as_good

SCALE = 0.2
JAX = jax.__version_info__[:2]
needs_interpreter = pytest.mark.skipif(
    JAX < (0, 12), reason=f"tensor memory is interpreted from jax 0.12, and this is {JAX}"
)


@needs_interpreter
@pytest.mark.parametrize("H", [64, 128])
def test_values_are_those_of_attention_and_nothing_races(H):
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    import tcgen05_sketch

    rng = np.random.default_rng(0)
    args = [jnp.asarray(rng.standard_normal((1, 512, 2, H)), jnp.bfloat16) for _ in range(3)]
    out = tcgen05_sketch.forward(*args, SCALE, interpret=plgpu.InterpretGPUParams())
    wide = [np.asarray(x, np.float64) for x in args]
    plain = jax.jit(functools.partial(jax.nn.dot_product_attention, scale=SCALE))(*args)
    true, _ = oracle.attention(*wide, scale=SCALE)
    assert_as_good(out, [plain], true, "bfloat16")
