"""Random calls of the kernels in Mosaic's interpreter, and tests of the truth that judges them.

kernel_cases.py draws the calls, kernel_truth.py judges them. On a GPU `python tests/kernel_fuzz.py`
runs any number of calls.
"""

import jax
import kernel_cases
import kernel_truth
import numpy as np
import oracle
import pytest
from cases import Sizes
from kernel_functions import SCORES
from test_hopper_tangent import interpreted, jvp

from memeff import pallas
from memeff.device import Device, current_device
from memeff.pallas.ampere import capability
from memeff.pallas.hopper import implementation as hopper

NO_AMPERE = capability.for_device(Device("gpu", "8.0"))
needs_kernels = pytest.mark.skipif(
    jax.__version__.startswith("0.10."), reason="kernels need jax 0.11, and this is 0.10"
)
# NumPy and the interpreter warn of NaN that nobody sees.
ignores_not_finite = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in")


@pytest.mark.parametrize("seed", range(0, 90, kernel_cases.DRAWS))
def test_its_truth_is_the_oracle(seed):
    case = kernel_cases.draw(seed, small=True)
    call = kernel_truth.call_of(case)
    actual = kernel_truth.exact(call, case)
    kwargs = {"bias": call.bias, "mask": case.seen}
    for name in ("scale", "logits_soft_cap"):
        if name in case.static.kwargs:
            kwargs[name] = case.static.kwargs[name]
    if "dropout_rng" in case.arrays:
        kwargs["dropout_rate"] = case.static.kwargs["dropout_rate"]
        kwargs["kept"] = call.z > 0
    if "sinks" in case.floats:
        kwargs["sinks"] = case.floats["sinks"]
    out, lse = oracle.attention(*case.args, **kwargs)
    dout, dlse = case.cotangents
    gradients = oracle.gradients(*case.args, **kwargs, dout=dout, dlse=dlse)
    expected = {
        "out": out,
        "lse": lse,
        "dq": gradients["query"],
        "dk": gradients["key"],
        "dv": gradients["value"],
    }
    if "sinks" in kwargs:
        expected["dsinks"] = gradients["sinks"]
    for name in case.static.traced:
        expected[f"d{name}"] = gradients[name]
    if case.static.bias is not None:
        shared = tuple(dim for dim, size in enumerate(case.static.bias[1]) if size == 1)
        expected["dbias"] = gradients["bias"].sum(shared, keepdims=True)
    if case.static.jvp:
        d_out, d_lse = oracle.tangent(*case.args, **kwargs, along=case.along)
        expected["tangent of out"] = d_out
        expected["tangent of lse"] = d_lse
    _, _, value = case.args
    atol = 1e-9 * max(1, np.abs(value).max())
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, rtol=1e-9, atol=atol, err_msg=name)


class StandIn:
    """Plain attention in the place of kernels.

    A slope's gradient errs by random numbers of size `error`, but first by 3 times as much.
    """

    def __init__(self, error: float, wrong: str | None = None):
        self.error = error
        self.wrong = wrong
        self.calls = 0

    def __call__(self, case):
        call = kernel_truth.call_of(case)
        plain = kernel_truth.plainly(call, case, saved=True)
        slope = kernel_truth.exact(call, case)["dalibi"]
        noise = 3.0
        if self.calls:
            noise = np.random.default_rng(self.calls).standard_normal(slope.shape)
        slope = slope + self.error * noise
        if self.wrong == "NaN":
            slope = np.full_like(slope, np.nan)
        if self.wrong == "out":
            plain["out"] = plain["out"] * np.float32(1.02)
        self.calls += 1
        gradients = [plain[name] for name in ("dq", "dk", "dv")]
        return (plain["out"], plain["lse"]), {"alibi": slope}, gradients, None


SLOPE = 1139  # float16, one slope


def plain_error_of_a_slope() -> float:
    """Return the root mean square of many draws."""
    errors = []
    for again in range(kernel_truth.TIMES):
        case = kernel_cases.draw(SLOPE, small=True, again=again)
        call = kernel_truth.call_of(case)
        plain = kernel_truth.plainly(call, case, saved=True)["dalibi"]
        errors.append(plain - kernel_truth.exact(call, case)["dalibi"])
    return float(np.sqrt(np.mean(np.square(errors))))


def test_a_single_number_is_judged_by_many_draws():
    """A slope's gradient that errs as much as plain attention's passes.

    It passes though one draw exceeds the bound.
    """
    case = kernel_cases.draw(SLOPE, small=True)
    error = plain_error_of_a_slope()
    # eps allows as much as 1.1 times plain's error
    as_plain = StandIn(error)
    worse = StandIn(3 * error)
    assert list(kernel_truth.judge(case, as_plain)) == ["dalibi"]
    assert as_plain.calls == kernel_truth.TIMES
    message = f"in {kernel_truth.TIMES} draws: dalibi: root mean square"
    with pytest.raises(AssertionError, match=message):
        kernel_truth.judge(case, worse)


@pytest.mark.parametrize(
    ("wrong", "told"), [("NaN", "dalibi: 1 of 1 are not finite"), ("out", "out: root mean square")]
)
def test_what_is_no_chance_is_judged_by_one_draw(wrong, told):
    case = kernel_cases.draw(SLOPE, small=True)
    kernels = StandIn(0.0, wrong)
    with pytest.raises(AssertionError, match=told):
        kernel_truth.judge(case, kernels)
    assert kernels.calls == 1


FAST = (186,)  # alibi, sinks, offsets and lengths as arrays
SLOW = tuple(seed for seed in range(0, 60, kernel_cases.DRAWS) if seed not in FAST)
SLOW += tuple(kernel_cases.DECODING + seed for seed in range(0, 24, kernel_cases.DRAWS))


def run_interpreted(case):
    with interpreted(detect_races=case.static.kwargs["backward"] == "split"):
        return kernel_cases.run(case)


@needs_kernels
@ignores_not_finite
@pytest.mark.parametrize(
    "seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]
)
def test_random_calls(seed):
    case = kernel_cases.draw(seed, small=True)
    kernel_truth.judge(case, run_interpreted)


AMPERE_FAST = (489,)  # a bias of pairs, and a score whose params have no derivative
AMPERE_SLOW = (0, 21, 27, 39, 60, 111, 132, 147, 171, 234, 393, 438)


@pytest.mark.skipif(NO_AMPERE is not None, reason=str(NO_AMPERE))
@ignores_not_finite
@pytest.mark.parametrize(
    "seed", [*AMPERE_FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in AMPERE_SLOW)]
)
def test_random_calls_of_the_ampere_kernels(seed):
    case = kernel_cases.draw(seed, small=True)
    case.static.kwargs["backward"] = "split"
    with interpreted(capability=("8.0", "8.6", "12.0")[seed // 3 % 3]):
        kernel_truth.judge(case)


WITH_ALL_FUNCTIONS = 1002  # a block mask, a score_fn with params, a bias of pairs, arrays


@pytest.mark.parametrize(
    "seed",
    [
        WITH_ALL_FUNCTIONS,
        *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5000, 5045, 3)),
    ],
)
@pytest.mark.parametrize("compute_capability", ["8.0", "9.0"])
def test_random_calls_lower_for_cuda(seed, compute_capability):
    """Mosaic supports less than its interpreter, and several devices less than one."""
    device = Device("gpu", compute_capability)
    if reason := pallas.family_for(device).for_device(device):
        pytest.skip(reason)
    case = kernel_cases.draw(seed)
    if compute_capability == "8.0":
        if max(case.static.z.H, case.static.z.D) > capability.LARGEST_HEAD:
            pytest.skip("heads of this size have no Ampere kernels")
        case.static.kwargs["backward"] = "split"
    kernel_cases.lower(case, compute_capability)


FAR = kernel_cases.Static(
    z=Sizes(B=1, T=128, S=66, K=1, G=1, H=64, D=64),
    dtype="bfloat16",
    kwargs={"q_offset": 1000},
    array_names=(),
    score="pairs",  # logits of -18 for all keys of a row
    mask=None,
    jvp=True,
)


@needs_kernels
def test_the_rounding_of_lse_is_not_in_its_tangent():
    """The tangent of lse errs at most 1.5 times as much as plain attention's.

    The tangent's kernel first subtracts the mean of the last tile, which has two keys, and that is
    far from the mean of the row. If p sums to 1 only up to the rounding of lse, 1e-6 here, then
    that share of the difference would be left.
    """
    case = kernel_cases.draw(3, static=FAR)
    name = "tangent of lse"
    with interpreted():
        score_fn = SCORES["pairs"](None)
        _, (_, tangent) = jvp(case.args, case.along, FAR.kwargs, score_fn=score_fn)
    call = kernel_truth.call_of(case)
    truth = kernel_truth.exact(call, case)[name]
    plain = kernel_truth.plainly(call, case, saved=False)[name]
    error = np.sqrt(np.mean((tangent - truth) ** 2))
    plain_error = np.sqrt(np.mean((plain - truth) ** 2))
    assert error <= 1.5 * plain_error


@pytest.mark.gpu
@ignores_not_finite
@pytest.mark.parametrize("seed", range(30))
def test_random_calls_on_a_gpu(seed):
    if reason := hopper.for_device(current_device()):
        pytest.skip(reason)
    kernel_truth.judge(kernel_cases.draw(seed))
