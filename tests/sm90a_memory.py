"""Compile calls of the chunked path for an H200, without a GPU, and print their temporary bytes.

test_sm90a.py runs this file. A line: what the call has, its memory limit or 0, then bytes of the
forward and of forward with gradient, as XLA reports them and as memeff estimates them.
"""

from described_h200 import mesh_of, set_environment

if __name__ == "__main__":
    set_environment()

import jax  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

import memeff  # noqa: E402
from memeff.device import pretend_device  # noqa: E402

B, T, N, H = 2, 4096, 16, 64
LIMIT = 500_000_000


def calls(array) -> dict[str, tuple[dict, dict]]:
    """Return arrays and other keywords by name."""
    bias = {"bias": array(1, N, T, T)}
    bits = dict(dropout_rng=jax.random.key(0), dropout_rate=0.1, dropout_bits="mix32")
    return {
        "plain": ({}, {}),
        "causal": ({}, {"is_causal": True}),
        "mask": ({"mask": array(1, 1, T, T, dtype="bool")}, {}),
        "soft cap": ({"logits_soft_cap": array(dtype="float32")}, {}),
        "dropout": ({}, bits),
        "bias": (bias, {}),
        "bias of keys": ({"bias": array(1, N, 1, T)}, {}),
        "bias, causal": (bias, {"is_causal": True}),
        "bias, mask": (bias | {"mask": array(1, 1, T, T, dtype="bool")}, {}),
        "bias, soft cap": (bias, {"logits_soft_cap": 20.0}),
        "bias, scale": (bias | {"scale": array(dtype="float32")}, {}),
        "bias, dropout": (bias, bits),
    }


def compiled_bytes(x, arrays, keywords, limit) -> list[int]:
    """Return the temporary bytes of the forward, and of the forward with its gradient."""
    mask = {name: y for name, y in arrays.items() if name == "mask"}
    moved = {name: y for name, y in arrays.items() if name != "mask"}

    def forward(q, k, v, moved, mask):
        return memeff.dot_product_attention(
            *(q, k, v), **moved, **mask, **keywords, implementation="xla", memory_limit=limit
        )

    def with_gradient(q, k, v, moved, mask, dout):
        out, pull = jax.vjp(lambda *args: forward(*args, mask), q, k, v, moved)
        return out, pull(dout)

    args = x, x, x, moved, mask
    found = []
    for function, more in ((forward, ()), (with_gradient, (x,))):
        program = jax.jit(function).lower(*args, *more).compile()
        found.append(program.memory_analysis().temp_size_in_bytes)
    return found


def main() -> None:
    """Print a line for each call without a limit, and for those with a bias within one."""
    here = SingleDeviceSharding(mesh_of(1, "unused").devices.flat[0])

    def array(*shape: int, dtype: str = "bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    x = array(B, T, N, H)
    for name, (arrays, keywords) in calls(array).items():
        # the gradient of a bias beside a soft cap or a scale is a sum of 1 GiB in float32
        limits = [None, LIMIT] if name in ("bias", "bias, causal", "bias, mask") else [None]
        for limit in limits:
            with pretend_device("gpu", None):
                plan = memeff.plan(x, x, x, **arrays, **keywords, memory_limit=limit)
                found = compiled_bytes(x, arrays, keywords, limit)
            print(f"{name}: {limit or 0}", *found, plan.forward_bytes, plan.gradient_bytes)


if __name__ == "__main__":
    main()
