"""Compile decoding on the chunked path for an H200, without a GPU, and print what it holds.

test_sm90a.py runs this file. A line: the case, temporary bytes, bytes of the cache, and the bytes
of the largest array of the operands' dtype that some instruction makes.
"""

import math
import re

from described_h200 import mesh_of, set_environment

if __name__ == "__main__":
    set_environment()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import memeff  # noqa: E402
from memeff.device import pretend_device  # noqa: E402

CASES = {  # B, T, key heads, S, dtype of the cache
    "one token": (8, 1, 8, 32768, "bfloat16"),
    "four drafts": (8, 4, 8, 32768, "bfloat16"),
    "as many key heads": (8, 1, 32, 8192, "bfloat16"),
    "one sequence": (1, 1, 8, 131072, "bfloat16"),
    "8 bits": (8, 1, 8, 32768, "int8"),
}
N = 32
H = 128


def compiled(B: int, T: int, K: int, S: int, dtype: str):
    """Return the program that appends and attends T tokens, for a GPU without kernels."""
    mesh = mesh_of(1, "x")
    on_device = NamedSharding(mesh, PartitionSpec())

    def step(query, key, cache):
        cache = cache.append(key, key)
        return cache, cache.attend(query)

    query, key = (jax.ShapeDtypeStruct((B, T, n, H), "bfloat16") for n in (N, K))
    cache = jax.eval_shape(lambda: memeff.KVCache.zeros(B, S, K, H, dtype))
    with jax.set_mesh(mesh), pretend_device("gpu", "8.0"):
        jitted = jax.jit(step, in_shardings=on_device, out_shardings=on_device, donate_argnums=2)
        return jitted.trace(query, key, cache).lower().compile()


def largest_array(text: str) -> int:
    """Return the bytes of the largest bfloat16 array that a fusion or a copy makes.

    The scatter of new tokens writes into the cache itself.
    """
    text = re.sub(r".*scatter.*", "", text)
    made = re.findall(r"= bf16\[([\d,]+)\]\S* (?:fusion|copy|transpose)\(", text)
    return max(2 * math.prod(map(int, dims.split(","))) for dims in made)


if __name__ == "__main__":
    for name, sizes in CASES.items():
        program = compiled(*sizes)
        B, _, K, S, dtype = sizes
        cache = 2 * B * S * K * H * jnp.dtype(dtype).itemsize
        temporary = program.memory_analysis().temp_size_in_bytes
        print(f"{name}: {temporary} {cache} {largest_array(program.as_text())}", flush=True)
