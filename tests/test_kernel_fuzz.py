"""Random calls of the kernels (see kernel_cases.py) in Mosaic's interpreter, and the truth that they are held to. On a GPU
`python tests/kernel_fuzz.py` runs as many as one likes.
"""

import jax
import kernel_cases
import numpy as np
import oracle
import pytest
from cases import Sizes
from test_hopper_tangent import interpreted, jvp

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


class StandIn:
    """Plain attention in the place of kernels. A slope's gradient errs by random numbers of size `error`, but first by 3
    times as much.
    """

    def __init__(self, error: float, wrong: str | None = None):
        self.error = error
        self.wrong = wrong
        self.calls = 0

    def __call__(self, case):
        call, G = kernel_cases.call_of(case), case.static.z.G
        plain = kernel_cases.plainly(call, case, G, saved=True)
        slope = kernel_cases.exact(call, case, G)["dalibi"]
        noise = (
            np.random.default_rng(self.calls).standard_normal(slope.shape) if self.calls else 3.0
        )
        slope = slope + self.error * noise
        if self.wrong == "NaN":
            slope = np.full_like(slope, np.nan)
        if self.wrong == "out":
            plain["out"] = plain["out"] * np.float32(1.02)
        self.calls += 1
        of = [plain[name] for name in ("dq", "dk", "dv")]
        return (plain["out"], plain["lse"]), {"alibi": slope}, of, None


SLOPE = 1139  # float16, one slope


def plain_error_of_a_slope() -> float:
    """Return the root mean square of many draws."""
    errors = []
    for again in range(kernel_cases.TIMES):
        case = kernel_cases.draw(SLOPE, small=True, again=again)
        call, G = kernel_cases.call_of(case), case.static.z.G
        plain = kernel_cases.plainly(call, case, G, saved=True)["dalibi"]
        errors.append(plain - kernel_cases.exact(call, case, G)["dalibi"])
    return float(np.sqrt(np.mean(np.square(errors))))


def test_a_single_number_is_judged_by_many_draws():
    """A slope's gradient that errs as much as plain attention's passes, though one draw exceeds the bound."""
    case, error = kernel_cases.draw(SLOPE, small=True), plain_error_of_a_slope()
    # eps allows as much as 1.1 times plain's error
    as_plain, worse = StandIn(error), StandIn(3 * error)
    assert list(kernel_cases.judge(case, as_plain)) == ["dalibi"]
    assert as_plain.calls == kernel_cases.TIMES
    with pytest.raises(
        AssertionError, match=f"in {kernel_cases.TIMES} draws: dalibi: root mean square"
    ):
        kernel_cases.judge(case, worse)


@pytest.mark.parametrize(
    ("wrong", "told"), [("NaN", "dalibi: 1 of 1 are not finite"), ("out", "out: root mean square")]
)
def test_what_is_no_chance_is_judged_by_one_draw(wrong, told):
    case, kernels = kernel_cases.draw(SLOPE, small=True), StandIn(0.0, wrong)
    with pytest.raises(AssertionError, match=told):
        kernel_cases.judge(case, kernels)
    assert kernels.calls == 1


FAST = (186,)  # alibi, sinks, offsets and lengths as arrays
SLOW = tuple(seed for seed in range(0, 60, kernel_cases.DRAWS) if seed not in FAST)


def run_interpreted(case):
    with interpreted(detect_races=case.static.how["backward"] == "split"):
        return kernel_cases.run(case)


@needs_kernels
# of NaN that nobody sees
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in")
@pytest.mark.parametrize(
    "seed", [*FAST, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)]
)
def test_random_calls(seed):
    case = kernel_cases.draw(seed, small=True)
    kernel_cases.judge(case, run_interpreted)


FAR = kernel_cases.Static(
    z=Sizes(B=1, T=128, S=66, K=1, G=1, H=64, D=64),
    dtype="bfloat16",
    how={"q_offset": 1000},
    names=(),
    score="pairs",  # logits of -18 for all keys of a row
    mask=None,
    jvp=True,
)


@needs_kernels
def test_the_rounding_of_lse_is_not_in_its_tangent():
    """The mean that the tangent takes off first is of the last tile, which has two keys: far from that of the row.

    Where p sums to 1 but for the rounding of lse, 1e-6 here, that much of the difference would be left.
    """
    case = kernel_cases.draw(3, static=FAR)
    with interpreted():
        tangent = jvp(
            case.args, case.along, FAR.how, score_fn=kernel_cases.SCORES["pairs"](None, FAR.z)
        )[1][1]
    call = kernel_cases.call_of(case)
    truth, plain = (
        kernel_cases.exact(call, case, 1),
        kernel_cases.plainly(call, case, 1, saved=False),
    )
    name = "tangent of lse"
    error, of_plain = (np.sqrt(np.mean((x - truth[name]) ** 2)) for x in (tangent, plain[name]))
    assert error <= 1.5 * of_plain


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in")
@pytest.mark.parametrize("seed", range(30))
def test_random_calls_on_a_gpu(seed):
    if reason := hopper.for_device(current_device()):
        pytest.skip(reason)
    kernel_cases.judge(kernel_cases.draw(seed))
