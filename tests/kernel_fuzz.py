"""Random calls of the kernels for this machine's GPU against float64.

kernel_cases.py draws the calls, kernel_truth.py judges them. A line for each
failure, with its seed, and a summary are printed. The exit code is 1 if a call fails:

    python tests/kernel_fuzz.py --first 0 --count 63
    python tests/kernel_fuzz.py --first 17 --count 1      # a seed is the same call in every run
    python tests/kernel_fuzz.py --only bias               # calls with a word of `features` alone
    python tests/kernel_fuzz.py --ampere                  # the Ampere kernels, on any GPU

Each compilation prints a line before it begins, because it takes seconds.

Several of these run side by side on one GPU with XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import argparse
import collections
import contextlib
import os
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
# NumPy reads these when it starts. One thread each, because other processes want the other cores.
for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import conftest  # noqa: E402, F401
import jax  # noqa: E402
import kernel_cases  # noqa: E402
import kernel_truth  # noqa: E402

from memeff import pallas  # noqa: E402
from memeff.device import current_device  # noqa: E402
from memeff.pallas.ampere import capability as ampere  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--count", type=int, default=30, help="how many; neighbours share a compilation, by threes"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no other call after so many"
    )
    parser.add_argument("--only", default="", help="skip calls of which no feature has this text")
    parser.add_argument(
        "--ampere", action="store_true", help="run the Ampere kernels, also on a Hopper GPU"
    )
    parser.add_argument("--verbose", action="store_true", help="say what was drawn")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    chosen = ampere.chosen() if options.ampere else contextlib.nullcontext()
    with chosen:
        return run_seeds(options)


def run_seeds(options: argparse.Namespace) -> int:
    """Run the calls, print a summary, and return 1 if one fails."""
    device = current_device()
    family = pallas.family_for(device)
    is_ampere = family is pallas.ampere_family
    if reason := family.for_device(device):
        print(f"nothing to test: {reason}")
        return 1
    warnings.simplefilter("ignore")  # NumPy's, of NaN that nobody sees
    start = time.monotonic()
    failed = []
    drawn = collections.Counter()
    compiled = set()
    drawn_again = 0
    for seed in range(options.first, options.first + options.count):
        if time.monotonic() - start > options.seconds:
            break
        case = kernel_cases.draw(seed)
        if is_ampere and max(case.static.z.H, case.static.z.D) > ampere.LARGEST_HEAD:
            continue
        features = kernel_cases.features(case)
        if not any(options.only in feature for feature in features):
            continue
        drawn.update(["calls", *features])
        if seed // kernel_cases.DRAWS not in compiled:
            seconds = time.monotonic() - start
            print(f"{seconds:.0f} s: compile seed {seed}: {', '.join(features)}", flush=True)
        compiled.add(seed // kernel_cases.DRAWS)
        if options.verbose:
            print(f"seed {seed}: {case.static}", flush=True)
        try:
            for excess in kernel_truth.judge(case).values():
                drawn_again += 1
                kept = f"{kernel_truth.TIMES} draws keep the law"
                print(f"seed {seed}: {excess}, in one draw; {kept}", flush=True)
        except Exception as error:
            failed.append(seed)
            message = " ".join(str(error).split())[:300] or traceback.format_exc(limit=-2)
            print(f"FAILED seed {seed}: {type(error).__name__}: {message}\n  {case.static}")
            sys.stdout.flush()
    calls = drawn.pop("calls", 0)
    features = ", ".join(f"{name} {count}" for name, count in sorted(drawn.items()))
    seeds = f"seeds from {options.first} on"
    kind = jax.devices()[0].device_kind
    took = f"{len(compiled)} compilations, {time.monotonic() - start:.0f} s on {kind}"
    print(f"{seeds}: {calls} calls, {len(failed)} failed; {took}")
    print(
        f"  {drawn_again} results of few numbers exceeded the bound in one draw, "
        f"and kept it in {kernel_truth.TIMES}"
    )
    print(f"  with {features}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
