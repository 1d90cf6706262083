"""Print the errors of the TPU kernels in the interpreter, beside those of the chunked path.

python tests/tpu_errors.py

Each number is a root mean square error against float64, divided by the root mean square of the
result. The calls are causal, in bfloat16, with the default scale, which is a power of two for heads
of 64 and not for heads of 128.
"""

import numpy as np
from cases import Sizes, qkv
from conftest import root_mean_square, run_call, true_call
from tpu_calls import kernels

KWARGS = {"is_causal": True}


def errors(args, implementation: str) -> list[float]:
    """Return the errors of out, dq, dk and dv."""
    truth = true_call(args, KWARGS, "bfloat16")
    with kernels():
        found = run_call(args, KWARGS | {"implementation": implementation}, "bfloat16")
    pairs = [(found.out, truth.out)]
    pairs += [(found.grads[name], truth.grads[name]) for name in ("query", "key", "value")]
    return [root_mean_square(np.asarray(x, np.float64) - y) / root_mean_square(y) for x, y in pairs]


if __name__ == "__main__":
    print("| heads | | out | dq | dk | dv |")
    print("|---|---|---|---|---|---|")
    for H in (64, 128):
        sizes = Sizes(B=1, T=512, S=512, K=1, G=1, H=H, D=H)
        args = qkv(np.random.default_rng(0), "bfloat16", sizes)
        for title, name in (("chunked path", "xla"), ("TPU kernels", "pallas")):
            numbers = " | ".join(f"{x:.2e}" for x in errors(args, name))
            print(f"| {H} | {title} | {numbers} |", flush=True)
