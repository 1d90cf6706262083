"""One process of several, with a GPU each: a ring's steps under random delays. It has no test.

`python delayed_processes.py PORT COUNT NUMBER SECONDS` takes steps for SECONDS, and prints how many
had other bits than the first. tests/test_gpu_processes.py starts all processes.
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import memeff

TOKENS = 16_384  # of a device
DELAYS = (0, 0.05, 0.3)  # seconds, at most, in 5, 4 and 1 of 10 steps
RING = dict(sequence_axis="seq", sequence_layout="zigzag", context_parallel="ring")


def step(query, key, value, dout):
    """Return out, lse, dq, dk and dv."""
    attend = functools.partial(
        memeff.dot_product_attention, is_causal=True, **RING, return_residual=True
    )
    (out, lse), pull = jax.vjp(attend, query, key, value)
    return out, lse, *pull((dout, jnp.zeros_like(lse)))


@jax.jit
def count_of_other_bits(results, first):
    """Return how many numbers differ in a bit."""

    def bits(x):
        return x.view(jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)

    pairs = zip(results, first, strict=True)
    return sum((bits(x) != bits(y)).sum(dtype=jnp.int32) for x, y in pairs)


def main(port: int, count: int, number: int, seconds: float) -> None:
    """Take steps until all processes have done so for `seconds`."""
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, count, number, local_device_ids=[number])
    mesh = Mesh(np.array(jax.devices()), ("seq",))
    rng = np.random.default_rng(number)

    def shard(mine, spec):
        shape = tuple(count * n if axis else n for n, axis in zip(mine.shape, spec, strict=True))
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_process_local_data(sharding, mine, shape)

    def draw(heads):
        mine = rng.standard_normal((1, TOKENS, heads, 128)).astype(jnp.bfloat16)
        return shard(mine, P(None, "seq", None, None))

    arrays = draw(8), draw(2), draw(2), draw(8)
    total = jax.jit(jnp.sum)
    end = time.monotonic() + seconds
    steps = wrong = 0
    with jax.set_mesh(mesh):
        run = jax.jit(step)
        first = run(*arrays)
        # The sum is the same in all, so that all take the same number of steps.
        while total(shard(np.array([time.monotonic() < end], np.int32), P("seq"))) == count:
            results = []
            for _ in range(8):
                time.sleep(rng.uniform(0, rng.choice(DELAYS, p=[0.5, 0.4, 0.1])))
                results.append(run(*arrays))
            for result in results:
                wrong += count_of_other_bits(result, first) > 0
                steps += 1
    print(f"{steps} steps, {wrong} with other bits", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), float(sys.argv[4]))
