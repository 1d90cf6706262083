"""Random calls of a sequence that is sharded over this machine's devices, beside one of them.

A line for each failure, with its seed, and a summary are printed. The exit code is 1 if a call
fails:

    python tests/sequence_fuzz.py --first 0 --count 30
    python tests/sequence_fuzz.py --first 17 --count 1 --verbose  # a seed is the same call again

The truth is the chunked path of one device in float32. A result may err by 1.6 times what one
device errs in the dtype of the call, because partial gradients in 16 bits are rounded once more.
Results of few numbers may err by more, up to 6.4 times for one number.

Several of these run side by side on the same GPUs with XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import argparse
import collections
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import conftest  # noqa: E402, F401
import jax  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import sequences  # noqa: E402

import memeff  # noqa: E402

DTYPES = ml_dtypes.bfloat16, ml_dtypes.bfloat16, np.float16, np.float32
# of each row one feature or none is drawn
FEATURES = (
    ("causal", "causal", "causal", "window", "wide window"),
    ("lengths", "segments", "", ""),
    ("offset", "offsets", "", "", ""),
    ("bias", "row bias", "key bias", "", "", "", ""),
    ("mask", "shared mask", "mask_fn", "", "", "", "", ""),
    ("soft cap", "arrays", "", "", ""),
    ("sinks", "", "", ""),
    ("dropout", "shared dropout", "", "", "", ""),
    ("score_fn", "alibi", "", "", "", ""),
    ("rotary", "transform", "", "", "", ""),
)
COMPUTE = sequences.gradients, sequences.gradients, sequences.forward, sequences.both_modes


class Drawn(NamedTuple):
    """A call and how it is sharded."""

    kind: str
    dtype: Any
    sizes: dict[str, Any]
    layout: str
    strategy: str | None
    compute: Any
    inside: bool  # the call is made inside shard_map


def draw(seed: int) -> Drawn:
    """Return the call of a seed."""
    rng = np.random.default_rng(seed)

    def pick(*options):
        return options[rng.integers(len(options))]

    plain = rng.random() < 0.4
    chosen = [pick(*options) for options in FEATURES[: 1 if plain else None]]
    kind = ", ".join(name for name in chosen if name) or "full"
    if rng.random() < 0.1:
        kind = f"cross, {kind}"
    K = pick(1, 2, 4)
    H = pick(8, 24, 32, 40, 64, 64, 80, 128, 128, 192, 256)
    D = H if rng.random() < 0.7 else pick(16, 64, 128)
    sizes = dict(
        N=max(K, pick(2, 4, 6)) // K * K,
        K=K,
        tokens=pick(2, 32, 64, 66, 128, 130, 200, 256, 256, 384, 640),
        head_dims=(H, D),
    )
    return Drawn(
        kind,
        np.dtype(pick(*DTYPES)),
        sizes,
        layout=pick("contiguous", "zigzag", "zigzag", "zigzag", "striped"),
        strategy=pick("ring", "ring", "ring", "all_gather", "all_to_all", None),
        compute=pick(*COMPUTE),
        inside=rng.random() < 0.7,
    )


def judge(drawn: Drawn, devices: int) -> str | None:
    """Return why devices refuse the call, or None if its results are right, and raise if not."""
    call = sequences.make_call(drawn.kind, devices, dtype=drawn.dtype, **drawn.sizes)
    where = devices, drawn.layout, drawn.strategy
    try:
        found = sequences.run_sharded(call, drawn.compute, *where, inside=drawn.inside)
    except (NotImplementedError, ValueError) as error:
        where_raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if Path(memeff.__file__).parent not in where_raised.parents:
            raise
        return str(error)
    alone = sequences.run_whole(call, drawn.compute)
    wide = {name: widen(x) for name, x in call.arrays.items()}
    how = dict(implementation="xla", precision="highest")
    truth = sequences.run_whole(call._replace(arrays=wide), drawn.compute, **how)
    for name, exact in truth.items():
        compare(name, found[name], alone[name], exact, drawn.dtype)
    return None


def widen(x: np.ndarray) -> np.ndarray:
    """Return an array of floats in float32."""
    return x.astype(np.float32) if sequences.is_float(x) else x


def compare(name: str, found, alone, exact, dtype: np.dtype) -> None:
    """Raise an error if a result errs by more than that of one device may."""
    found, alone = (np.asarray(x, np.float64) for x in (found, alone))
    finite = np.isfinite(exact)
    if not np.array_equal(found[~finite], exact[~finite]):
        raise AssertionError(f"{name}: numbers that are not finite differ")
    found, alone, exact = (x[finite] for x in (found, alone, exact))
    if not found.size:
        return
    eps = float(ml_dtypes.finfo(dtype).eps)
    if dtype == np.float32 and jax.default_backend() == "gpu":
        eps = 2.0**-8  # the chunked path multiplies in TF32, and each factor errs by 2^-11
    unit = eps * rms(exact)
    few = 1 + 3 / np.sqrt(found.size)
    for what, of, factor, floor in (
        ("rms", rms, 1.6, unit / 4),
        ("largest", largest, 2.0, 4 * unit),
    ):
        allowed = factor * few * of(alone - exact) + max(floor, 2e-6 * of(exact))
        error = of(found - exact)
        if not error <= allowed:
            raise AssertionError(f"{name}: {what} error {error:.2e}, allowed {allowed:.2e}")


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(x**2)))


def largest(x: np.ndarray) -> float:
    return float(np.abs(x).max())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=30, help="how many")
    parser.add_argument("--devices", type=int, help="of how many devices (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no other call after so many"
    )
    parser.add_argument("--verbose", action="store_true", help="say what was drawn")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    warnings.simplefilter("ignore")
    devices = options.devices or jax.device_count()
    start = time.monotonic()
    failed, refused = [], collections.Counter()
    done = 0
    for seed in range(options.first, options.first + options.count):
        if time.monotonic() - start > options.seconds:
            break
        drawn = draw(seed)
        if options.verbose:
            print(f"{time.monotonic() - start:.0f} s: seed {seed}: {drawn}", flush=True)
        done += 1
        try:
            if reason := judge(drawn, devices):
                refused[" ".join(reason.split())[:200]] += 1
        except Exception as error:
            failed.append(seed)
            message = " ".join(str(error).split())[:400] or traceback.format_exc(limit=-2)
            print(f"FAILED seed {seed}: {type(error).__name__}: {message}\n  {drawn}", flush=True)
    kind = jax.devices()[0].device_kind
    took = f"{time.monotonic() - start:.0f} s on {devices} of {kind}"
    print(f"{done} calls from seed {options.first} on: {len(failed)} failed; {took}")
    for reason, count in refused.most_common():
        print(f"  {count} refused: {reason}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
