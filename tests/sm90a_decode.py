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
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import memeff  # noqa: E402
from memeff.device import pretend_device  # noqa: E402

CASES = {  # B, T, key heads, S
    "one token": (8, 1, 8, 32768),
    "four drafts": (8, 4, 8, 32768),
    "as many key heads": (8, 1, 32, 8192),
    "one sequence": (1, 1, 8, 131072),
}
N = 32
H = 128


def compiled(B: int, T: int, K: int, S: int):
    """Return the program of T queries of each sequence, for a GPU without kernels."""
    mesh = mesh_of(1, "x")
    on_device = NamedSharding(mesh, PartitionSpec())

    def attend(query, key, value, lengths):
        cache = memeff.KVCache(key, value, lengths)
        return cache.attend(query)

    shapes = [jax.ShapeDtypeStruct((B, *s, H), "bfloat16") for s in ((T, N), (S, K), (S, K))]
    lengths = jax.ShapeDtypeStruct((B,), np.int32)
    with jax.set_mesh(mesh), pretend_device("gpu", "8.0"):
        jitted = jax.jit(attend, in_shardings=on_device, out_shardings=on_device)
        return jitted.trace(*shapes, lengths).lower().compile()


def largest_array(text: str) -> int:
    """Return the bytes of the largest bfloat16 array that a fusion or a copy makes."""
    made = re.findall(r"= bf16\[([\d,]+)\]\S* (?:fusion|copy|transpose)\(", text)
    return max(2 * math.prod(map(int, dims.split(","))) for dims in made)


if __name__ == "__main__":
    for name, sizes in CASES.items():
        program = compiled(*sizes)
        B, _, K, S = sizes
        cache = 2 * B * S * K * H * 2
        temporary = program.memory_analysis().temp_size_in_bytes
        print(f"{name}: {temporary} {cache} {largest_array(program.as_text())}", flush=True)
