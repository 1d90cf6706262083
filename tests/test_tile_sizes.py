"""The default tiles and blocks of the chunked path, by backend and by shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from memeff import tile_sizes
from memeff.shape import CallShape

f32 = np.float32

SIZES = [
    # backend, windowed, (B, T, S, N, K), requested, tile, block
    ("cpu", True, (1, 100_000, 100_000, 8, 8), (None, None), (512, 512), (1, 4)),
    ("cpu", False, (1, 100_000, 100_000, 8, 8), (None, None), (1024, 1024), (1, 1)),
    ("cpu", True, (4, 4096, 4096, 3, 3), (None, None), (512, 512), (1, 3)),
    ("cpu", True, (6, 4096, 4096, 2, 2), (None, None), (512, 512), (2, 2)),
    ("cpu", True, (1, 4096, 4096, 6, 6), (None, None), (512, 512), (1, 3)),
    ("cpu", True, (1, 4096, 4096, 16, 2), (None, None), (256, 512), (1, 1)),
    ("cpu", False, (1, 4096, 4096, 64, 1), (None, None), (128, 1024), (1, 1)),
    ("cpu", True, (3, 37, 53, 4, 2), (None, None), (37, 53), (3, 2)),
    ("cpu", True, (3, 37, 5300, 4, 2), (None, None), (37, 512), (3, 2)),
    ("cpu", False, (1, 1, 1, 1, 1), (None, None), (1, 1), (1, 1)),
    ("cpu", False, (0, 0, 53, 2, 2), (None, None), (1, 53), None),
    ("cpu", True, (2, 37, 53, 2, 2), (16, 24), (16, 24), (2, 2)),
    ("cpu", True, (2, 37, 53, 2, 2), (1000, 2000), (37, 53), (2, 2)),
    ("cpu", True, (2, 4096, 4096, 8, 8), (128, None), (128, 512), (2, 8)),
    ("cpu", True, (1, 4096, 4096, 8, 8), (None, 2048), (512, 2048), (1, 1)),
    ("cpu", True, (1, 8192, 8192, 8, 8), (4096, 4096), (4096, 4096), (1, 1)),
    ("tpu", False, (1, 4096, 4096, 8, 8), (None, None), (512, 512), None),
    ("gpu", True, (1, 100_000, 100_000, 8, 8), (None, None), tile_sizes.GPU_TILE, None),
    ("gpu", True, (8, 100_000, 100_000, 16, 16), (None, None), tile_sizes.GPU_TILE, (8, 1)),
    ("gpu", True, (8, 2048, 2048, 16, 16), (None, None), (512, 512), None),
    ("gpu", False, (8, 8192, 8192, 16, 4), (None, None), tile_sizes.GPU_TILE, (2, 1)),
    ("gpu", False, (8, 1, 32_768, 32, 8), (None, None), (1, 32_768), None),
    ("gpu", False, (1, 37, 53, 8, 8), (None, None), (37, 53), None),
    ("gpu", True, (1, 4096, 4096, 8, 8), (128, 64), (128, 64), None),
]


def shape_of(B, T, S, N, K):
    """Return the shape of a call with heads of 64."""
    return CallShape((B,), T, S, N, K, 64, 64)


@pytest.mark.parametrize("backend, windowed, sizes, requested, tile, block", SIZES, ids=str)
def test_tile_sizes(monkeypatch, backend, windowed, sizes, requested, tile, block):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    schedule = tile_sizes.default_schedule(shape_of(*sizes), f32, requested, windowed, True)
    assert schedule.chunk_size == tile
    assert schedule.head_block == block
    if schedule.fixed_max_chunk_size is not None:
        for size, length in zip(schedule.fixed_max_chunk_size, sizes[1:3], strict=True):
            assert 1 <= size <= max(1, length)


@pytest.mark.parametrize(
    "sizes, requested, tile, block",
    [
        ((2, 2048, 2048, 4, 4), (None, None), (256, 512), (2, 4)),  # one draw, not eight
        ((1, 4096, 4096, 32, 32), (None, None), (256, 256), (1, 16)),
        ((8, 1024, 1024, 4, 4), (None, None), (1024, 1024), (1, 1)),  # XLA draws them once
        ((2, 2048, 2048, 4, 4), (512, None), (512, 1024), (1, 2)),
    ],
)
def test_tiles_of_heads_that_share_the_bits_of_dropout(monkeypatch, sizes, requested, tile, block):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    shape = shape_of(*sizes)
    schedule = tile_sizes.default_schedule(shape, f32, requested, False, True)
    schedule = tile_sizes._sharing_bits(schedule, shape, requested)
    assert schedule.chunk_size == tile
    assert schedule.head_block == block


def test_what_is_chosen_where_arrays_may_be_sharded(monkeypatch):
    """Arrays that may be sharded get no blocks and, on CPUs, no precomputed maximum.

    The precomputed maximum is used on GPUs always. On CPUs it is used for float32, and only where
    its check needs no word between devices. Blocks are used only where no block can be spread over
    devices. Both conditions hold with one device, and under shard_map.
    """

    def choices(dtype=f32):
        shape = shape_of(1, 4096, 4096, 8, 8)
        schedule = tile_sizes.default_schedule(shape, dtype, (None, None), True, True)
        fixed_max = schedule.fixed_max_chunk_size is not None
        blocks = schedule.head_block is not None
        return fixed_max, blocks

    monkeypatch.undo()  # eight devices
    assert jax.device_count() > 1
    assert choices() == (False, False)

    traced_choices = []

    def record(x):
        traced_choices.append(choices())
        return x

    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(record, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    jax.jit(sharded).lower(jnp.zeros(8))
    assert set(traced_choices) == {(True, True)}

    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert choices() == (True, True)
    assert choices(jnp.bfloat16) == (False, True)
    monkeypatch.undo()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert choices() == (True, False)
    assert choices(jnp.bfloat16) == (True, False)


@pytest.mark.parametrize("T, S, chunk_size", [(512, 512, None), (1, 1024, None), (96, 80, 128)])
def test_a_single_tile_on_a_cpu_has_its_true_maximum(monkeypatch, T, S, chunk_size):
    """A bound would compile a second loop, which redoes rows, and take longer."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)

    def schedule(T, S):
        shape = shape_of(2, T, S, 8, 8)
        return tile_sizes.default_schedule(shape, f32, (chunk_size, chunk_size), False, True)

    assert schedule(T, S).fixed_max_chunk_size is None
    several = schedule(T, 4 * S)
    assert several.fixed_max_chunk_size == several.chunk_size
