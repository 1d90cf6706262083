"""One process of a call over the devices of several processes. This module has no test.

`python processes.py PORT PROCESSES NUMBER SECONDS` waits up to SECONDS before each step, and prints
"all right" at the end. tests/test_processes.py starts all of the processes.
"""

import functools
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memeff

BOUND = 2e-6  # of the largest number of a result
STEPS = 5
CALL = dict(is_causal=True)
SHARDED = dict(sequence_axis="seq", sequence_layout="zigzag", context_parallel="ring")


def gradients(static, q, k, v, dout, dlse):
    """Return out, lse, dq, dk and dv."""
    attend = functools.partial(memeff.dot_product_attention, **static, return_residual=True)
    results, pull = jax.vjp(attend, q, k, v)
    return *results, *pull((dout, dlse))


def whole_arrays(devices: int) -> list[np.ndarray]:
    """Return query, key, value, and the cotangents of out and lse, with tokens in their order."""
    rng = np.random.default_rng(0)
    T = 12 * devices
    shapes = (2, T, 4, 8), (2, T, 2, 8), (2, T, 2, 5), (2, T, 4, 5), (2, T, 4)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def global_array(mesh: Mesh, x: np.ndarray) -> jax.Array:
    """Return x [B, T, ...], of which this process holds its own tokens only."""
    sharding = NamedSharding(mesh, P(None, "seq"))
    mine = np.split(x, jax.process_count(), axis=1)[jax.process_index()]
    return jax.make_array_from_process_local_data(sharding, mine, x.shape)


def check_numbers(name: str, found: jax.Array, expected: np.ndarray) -> None:
    """Check that each part that this process holds has the numbers of one device."""
    assert not found.is_fully_addressable
    bound = BOUND * np.abs(expected).max()
    for shard in found.addressable_shards:
        assert shard.data.shape[1] * jax.device_count() == expected.shape[1], name
        error = np.abs(np.asarray(shard.data) - expected[shard.index]).max()
        assert error <= bound, f"{name} of {shard.device} is off by {error:.1e} of {bound:.1e}"


def check_bits(name: str, found: jax.Array, first: jax.Array) -> None:
    """Check that two steps gave the same bits."""
    for x, y in zip(found.addressable_shards, first.addressable_shards, strict=True):
        np.testing.assert_array_equal(np.asarray(x.data), np.asarray(y.data), err_msg=name)


def main(port: int, processes: int, number: int, seconds: float) -> None:
    """Run and check all steps of this process."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", num_processes=processes, process_id=number, initialization_timeout=60
    )
    assert jax.process_count() == processes
    devices = jax.device_count()
    assert devices == processes * jax.local_device_count()
    mesh = Mesh(np.array(jax.devices()), ("seq",))
    arrays = whole_arrays(devices)
    expected = jax.jit(functools.partial(gradients, CALL))(*arrays)
    expected = [memeff.to_zigzag(np.asarray(x), devices) for x in expected]
    arrays = [global_array(mesh, memeff.to_zigzag(x, devices)) for x in arrays]
    names = "out", "lse", "dq", "dk", "dv"
    rng = np.random.default_rng(number)
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(gradients, CALL | SHARDED))
        steps = []
        for _ in range(STEPS):
            time.sleep(rng.uniform(0, seconds))
            steps.append(run(*arrays))
        for name, x, truth in zip(names, steps[0], expected, strict=True):
            check_numbers(name, x, truth)
        for step in steps[1:]:
            for name, x, first in zip(names, step, steps[0], strict=True):
                check_bits(name, x, first)
        report = memeff.audit(None, *arrays[:3], **CALL, **SHARDED, samples=2 * devices)
        assert report.ok, str(report)
    print("all right")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
