"""Compile the Ampere kernels for a chip, without a GPU, and print what ptxas says.

python tests/ampere_chips.py sm_80 [case ...]      # test_ampere_chips.py runs it

Each chip needs a process of its own, because Mosaic compiles for the first one alone.
"""

import functools
import sys

from described_h200 import set_environment

if __name__ == "__main__":
    set_environment()

import jax  # noqa: E402
import numpy as np  # noqa: E402
from described_gpus import CHIPS, described  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import memeff  # noqa: E402
from memeff import masks, scores  # noqa: E402
from memeff.device import pretend_device  # noqa: E402
from memeff.pallas.ampere import capability  # noqa: E402

B = 2
T = 8192
N = 16
IDS = np.arange(B * T).reshape(B, T) // 3000
CASES = {
    "full": dict(H=128),
    "causal": dict(H=64, K=4, is_causal=True),
    "one key head": dict(H=128, K=1, is_causal=True),
    "one key head, fused": dict(H=64, K=1, is_causal=True, backward="fused"),
    "fused": dict(H=128, is_causal=True, backward="fused"),
    "fused, 64": dict(H=64, T=8200, logits_soft_cap=20.0, backward="fused"),
    "window": dict(H=128, T=8200, local_window_size=(1000, 0), logits_soft_cap=20.0),
    "documents": dict(H=64, mask_fn=masks.documents(IDS) & masks.causal()),
    "bias": dict(H=64, bias="bfloat16"),
    "bias, 128": dict(H=128, bias="bfloat16"),
    "bias, float32": dict(H=64, bias="float32", is_causal=True),
    "bias, 128, float32": dict(H=128, bias="float32"),
    "bias, tails": dict(H=64, T=200, bias="bfloat16"),
    "bias, score": dict(H=64, bias="bfloat16", score_fn=scores.alibi(scores.alibi_slopes(N))),
    "array, 64": dict(H=64, numbers=("scale",), is_causal=True),
    "array, 128": dict(H=128, numbers=("scale",)),
    "arrays, 64": dict(H=64, numbers=("scale", "logits_soft_cap")),
    "arrays, 128": dict(H=128, numbers=("scale", "logits_soft_cap"), is_causal=True),
}


def compiled(
    chip: str,
    H: int,
    K: int = N,
    T: int = T,
    bias: str | None = None,
    numbers: tuple[str, ...] = (),
    **options,
):
    """Return the compiled forward and gradient of a call.

    `bias` is the dtype of one of pairs. `numbers` names the arguments that are scalar arrays.
    """

    def attend(query, key, value, *more):
        call = functools.partial(memeff.dot_product_attention, implementation="pallas", **options)
        given = dict(zip(numbers, more, strict=False))
        return call(query, key, value, *more[len(numbers) :], **given)

    def both(dout, *args):
        out, pull = jax.vjp(attend, *args)
        return out, *pull(dout)

    shapes = [jax.ShapeDtypeStruct((B, T, n, H), "bfloat16") for n in (N, N, K, K)]
    shapes += [jax.ShapeDtypeStruct((), "float32")] * len(numbers)
    if bias is not None:
        shapes.append(jax.ShapeDtypeStruct((1, N, T, T), bias))
    with (
        described(chip) as mesh,
        pretend_device("gpu", CHIPS[chip].capability),
        capability.chosen(),
    ):
        on_device = NamedSharding(mesh, PartitionSpec())
        jitted = jax.jit(both, in_shardings=on_device, out_shardings=on_device)
        return jitted.trace(*shapes).lower().compile()


if __name__ == "__main__":
    chip, *names = sys.argv[1:]
    for name in names or CASES:
        print("case", chip, name, flush=True)
        memory = compiled(chip, **CASES[name]).memory_analysis()
        assert memory is not None
        print("temporary bytes", memory.temp_size_in_bytes, flush=True)
