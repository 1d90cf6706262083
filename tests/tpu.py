"""Compile calls for TPUs that are not here, and print what XLA reports of each.

test_tpu_chips.py runs this file, with its environment set before JAX starts.
"""

import functools
import sys
import time
from typing import Any

from described_tpus import CHIPS, compiled, device_of, set_environment

if __name__ == "__main__":
    set_environment()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import memeff  # noqa: E402
from memeff.device import pretend_device  # noqa: E402

I32 = jnp.int32
IDS = {
    "query_segment_ids": jax.ShapeDtypeStruct((1, 8200), I32),
    "key_value_segment_ids": jax.ShapeDtypeStruct((1, 8200), I32),
}
LENGTHS = {"key_value_seq_lengths": jax.ShapeDtypeStruct((1,), I32)}
CASES = {
    "causal": dict(T=16384, is_causal=True),
    "full": dict(T=4096),
    "grouped": dict(T=8192, K=2, is_causal=True, local_window_size=(1000, 0)),
    "documents": dict(T=8200, H=64, is_causal=True, arrays=IDS),
    "lengths": dict(T=4096, H=80, arrays=LENGTHS, logits_soft_cap=20.0),
    "float32": dict(T=2048, H=256, dtype="float32"),
    "128k": dict(T=131072, N=2, K=1, is_causal=True),
}


def case(T: int, H=128, N=8, K: Any = None, dtype="bfloat16", arrays: Any = None, **options):
    """Return the forward and the gradient of a call, their arguments, and its plan."""
    query = jax.ShapeDtypeStruct((1, T, N, H), dtype)
    key = jax.ShapeDtypeStruct((1, T, K or N, H), dtype)
    arrays = arrays or {}

    def forward(query, key, value, arrays):
        return memeff.dot_product_attention(query, key, value, **arrays, **options)

    def gradient(query, key, value, arrays, dout):
        out, pull = jax.vjp(functools.partial(forward, arrays=arrays), query, key, value)
        return out, pull(dout)

    args = query, key, key, arrays
    plan = memeff.plan(query, key, key, device="tpu", **arrays, **options)
    return {"forward": (forward, args), "gradient": (gradient, (*args, query))}, plan


def main(chip: str, names: list[str]) -> None:
    """Compile the named cases, or all, for a chip."""
    device = device_of(chip)
    for name in names or CASES:
        with pretend_device("tpu"):
            functions, plan = case(**dict[str, Any](CASES[name]))
            for what, (function, args) in functions.items():
                start = time.perf_counter()
                program: Any = compiled(function, args, device)
                seconds = time.perf_counter() - start
                temporary = program.memory_analysis().temp_size_in_bytes
                planned = plan.forward_bytes if what == "forward" else plan.gradient_bytes
                kernels = program.as_text().count('custom_call_target="tpu_custom_call"')
                print(f"{name}|{what}|{kernels}|{temporary}|{planned}|{seconds:.1f}", flush=True)


if __name__ == "__main__":
    assert sys.argv[1] in CHIPS
    main(sys.argv[1], sys.argv[2:])
