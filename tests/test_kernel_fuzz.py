"""Random calls of the kernels (see kernel_cases.py) in Mosaic's interpreter, and the truth that they are held to. On a GPU
`python tests/kernel_fuzz.py` runs as many as one likes.
"""

import jax
import kernel_cases
import numpy as np
import oracle
import pytest
from test_hopper_tangent import interpreted

from memeff.device import current_device
from memeff.pallas.hopper import implementation as hopper

needs_kernels = pytest.mark.skipif(
    jax.__version__.startswith("0.10."), reason="kernels need jax 0.11, and this is 0.10"
)


@pytest.mark.parametrize("seed", range(0, 90, kernel_cases.DRAWS))
def test_its_truth_is_the_oracle(seed):
    case = kernel_cases.draw(seed, small=True)
    how = {name: x for name, x in case.static.how.items() if name in ("scale", "logits_soft_cap")}
    how |= {"sinks": case.floats["sinks"]} if "sinks" in case.floats else {}
    call, G = kernel_cases.call_of(case), case.static.z.G
    found = kernel_cases.exact(call, case, G)
    how |= {"bias": call.bias, "mask": case.seen}
    out, lse = oracle.attention(*case.args, **how)
    of = oracle.gradients(*case.args, **how, dout=case.cotangents[0], dlse=case.cotangents[1])
    expected = {"out": out, "lse": lse, "dq": of["query"], "dk": of["key"], "dv": of["value"]}
    expected |= {"dsinks": of["sinks"]} if "sinks" in how else {}
    if case.static.jvp:
        along = oracle.tangent(*case.args, **how, along=case.along)
        expected |= dict(zip(("tangent of out", "tangent of lse"), along, strict=True))
    for name, x in expected.items():
        np.testing.assert_allclose(
            found[name], x, rtol=1e-9, atol=1e-9 * max(1, np.abs(case.args[2]).max()), err_msg=name
        )


@pytest.mark.parametrize("seed", range(0, 30, kernel_cases.DRAWS))
def test_who_sees_whom_is_the_oracles(seed):
    case = kernel_cases.draw(seed, small=True)
    how = {
        name: x
        for name, x in (case.static.how | case.arrays).items()
        if name in kernel_cases.POSITIONS
    }
    expected = oracle.seen_by(*case.args[:2], **how)
    np.testing.assert_array_equal(kernel_cases.by_rows(*case.args[:2], **how), expected)


FAST = (186,)  # alibi, sinks, offsets and lengths as arrays
SLOW = tuple(seed for seed in range(0, 60, kernel_cases.DRAWS) if seed not in FAST)


@needs_kernels
# of NaN that nobody sees
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in")
@pytest.mark.parametrize(
    "seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]
)
def test_random_calls(seed):
    case = kernel_cases.draw(seed, small=True)
    with interpreted(detect_races=case.static.how["backward"] == "split"):
        found = kernel_cases.run(case)
    kernel_cases.check(case, found)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in")
@pytest.mark.parametrize("seed", range(30))
def test_random_calls_on_a_gpu(seed):
    if reason := hopper.for_device(current_device()):
        pytest.skip(reason)
    case = kernel_cases.draw(seed)
    kernel_cases.check(case, kernel_cases.run(case))
