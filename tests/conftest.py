"""Configure pytest, run calls, and compare their results with the oracle by the law of tolerance.

names = ("causal", "window")
dtype = "float32"
for name, result in run_cases(names, dtype).items():  # compiled together
    assert_case(result, name, dtype)
"""

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import os
import resource
from typing import Any

OLD_JAX = importlib.metadata.version("jaxlib").startswith("0.10.")


def set_xla_flags() -> None:
    """Add the flags of the tests to XLA_FLAGS, except those that the environment already sets.

    There are eight CPU devices. Compiling is most of what the tests do: level 0 of LLVM compiles
    four times as fast, XLA's older emitters of fused loops (still in jaxlib 0.10) twice as fast,
    and programs that are one module for LLVM a twentieth faster than in parts for many threads.
    None changes HLO or memory. Users get level 3, the new emitters (true) and several parts.
    """
    flags = [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
    if OLD_JAX:
        flags.append("--xla_cpu_use_fusion_emitters=false")
    present = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in flags if flag.split("=")[0] not in present]
    os.environ["XLA_FLAGS"] = " ".join([present, *missing]).strip()


set_xla_flags()  # before JAX starts
# Before NumPy starts: threads of OpenBLAS would wait in loops between products, where two processes
# share two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import oracle  # noqa: E402
import pytest  # noqa: E402
from baselines import (  # noqa: E402, F401
    Result,
    _plain,
    cotangents,
    oracle_arguments,
    plain_call,
    plain_case,
    true_call,
    true_case,
)
from cases import CASES, accumulator, split  # noqa: E402

import memeff  # noqa: E402
from memeff import dispatch, tile_sizes  # noqa: E402

# Source lines in the lowered programs would take an eighth of the tests' time.
jax.config.update("jax_traceback_in_locations_limit", 0)
gc.set_threshold(100_000, 20, 20)  # collecting garbage would take a fifteenth

hypothesis.settings.register_profile(
    "memeff", max_examples=10, deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("memeff")

EPS = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}
GRADIENTS = ("query", "key", "value", "bias", "scale", "logits_soft_cap", "sinks")


def pytest_configure(config):
    config.option.reportchars += "s"  # say why a test was skipped


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items):
    """Move tests marked `once` to the slow set on new versions of JAX.

    XLA compiles at half the speed there, and the kernels are tested as well.
    """
    if OLD_JAX:
        return
    for item in items:
        if item.get_closest_marker("once"):
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") is None:
        return
    reason = why_no_gpu()
    if reason:
        pytest.skip(reason)


@functools.cache
def why_no_gpu() -> str | None:
    try:
        jax.devices("gpu")
    except RuntimeError as e:
        return f"needs a GPU: {str(e).splitlines()[0]}"
    return None


@pytest.fixture(autouse=True)
def one_device(request, monkeypatch):
    """Let calls behave as where JAX has one device, except in tests that need all eight."""
    if request.node.get_closest_marker("eight_devices") is None:
        monkeypatch.setattr(tile_sizes, "may_be_sharded", lambda: False)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Drop all compiled programs after each module.

    Programs for a CPU hold memory maps, of which Linux gives a process 65,530. With no map left,
    XLA dies without a message.
    """
    yield
    jax.clear_caches()


_after_clearing = [0]  # bytes in memory


@pytest.fixture(autouse=True)
def forget_much():
    """Drop all compiled programs once they have grown by half a GiB.

    Five tests of the kernels in the interpreter compile as much.
    """
    yield
    growth = resident() - _after_clearing[0]
    if 0 <= growth < 2**29:
        return
    jax.clear_caches()
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc keeps freed memory
        libc.malloc_trim(0)
    _after_clearing[0] = resident()


def resident() -> int:
    """Return the bytes of this process in memory, or 0 where the system has no /proc."""
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
    except OSError:
        return 0
    return pages * resource.getpagesize()


def few(cases, fast) -> list:
    """Return `cases` as parameters, of which all but the `fast` ones are marked slow.

    A case is one value, or a tuple of several.
    """
    parameters = []
    for case in cases:
        if case not in fast:
            values = case if isinstance(case, tuple) else (case,)
            case = pytest.param(*values, marks=pytest.mark.slow)
        parameters.append(case)
    return parameters


def raising(error: type[Exception], *calls) -> list[tuple]:
    """Return (call, error, pattern) of each (call, pattern): lines of a table of wrong calls."""
    return [(call, error, pattern) for call, pattern in calls]


# ---- the law of tolerance


def root_mean_square(x: np.ndarray):
    return np.sqrt(np.mean(np.square(x)))


def maximum(x: np.ndarray):
    return np.abs(x).max()


LAW = {"root mean square": (1.5, root_mean_square), "maximum": (3.0, maximum)}


def assert_as_good(actual, baselines, oracle, dtype, what="result", size=0.0):
    """Check that `actual` errs at most 1.5 times as much as plain computations do, plus eps.

    The plain computations, `baselines`, are in the same dtype. The law compares the root mean
    square of the error with theirs, and allows the largest error 3 times their largest. One error
    is noise of rounding: it may be several times that of another CPU, which adds in another order.
    The mean over many errors is a property of the computation. So inputs in which a few rows decide
    are drawn many times, along the batch.

    `size` is that of the terms of a scalar, where it exceeds the scalar's own (see
    `oracle.scalar_sizes`).
    """
    assert np.shape(actual) == np.shape(oracle), (
        f"{what}: shape {np.shape(actual)}, expected {np.shape(oracle)}"
    )
    actual = np.asarray(actual).astype(np.float64)
    oracle = np.asarray(oracle).astype(np.float64)
    finite = np.isfinite(oracle)  # lse of a row that sees no key is exactly -inf
    np.testing.assert_array_equal(actual[~finite], oracle[~finite], err_msg=what)
    if not finite.any():
        return
    actual = actual[finite]
    oracle = oracle[finite]
    baselines = [np.asarray(x).astype(np.float64)[finite] for x in baselines]
    nonfinite = np.sum(~np.isfinite(actual))
    assert nonfinite == 0, f"{what}: {nonfinite} of {actual.size} are not finite"
    eps = EPS[jnp.dtype(dtype).name]
    for name, (times, norm) in LAW.items():
        plain = max(norm(x - oracle) for x in baselines)
        allowed = times * plain + eps * max(1, norm(oracle), size)
        error = norm(actual - oracle)
        assert error <= allowed, (
            f"{what}: {name} of the error is {error:.3g}, {allowed:.3g} allowed, {plain:.3g} plain"
        )


def assert_result(
    actual: Result, baselines: tuple[Result, ...], truth: Result, dtype, name: str, sizes=None
):
    """Compare out, lse and each gradient of `actual` with the truth, by the law."""
    outs = [x.out for x in baselines]
    assert_as_good(actual.out, outs, truth.out, dtype, f"{name}: out")
    lses = [x.lse for x in baselines]
    lse_dtype = accumulator(jnp.dtype(dtype))
    assert_as_good(actual.lse, lses, truth.lse, lse_dtype, f"{name}: lse")
    for argument, grad in actual.grads.items():
        plain = [x.grads[argument] for x in baselines]
        size = 0.0 if sizes is None else sizes.get(argument, 0.0)
        what = f"{name}: gradient of {argument}"
        assert_as_good(grad, plain, truth.grads[argument], dtype, what, size)


def assert_case(actual: Result, name: str, dtype):
    """Compare the result of a named case with the oracle, by the law."""
    sizes = None
    scalars = {"scale", "logits_soft_cap"} & actual.grads.keys()
    if scalars and jnp.finfo(dtype).bits == 16:  # `out` is saved in 16 bits
        args, kwargs = CASES[name].inputs(jnp.dtype(dtype))
        kwargs = oracle_arguments(args, kwargs, dtype)
        dout, dlse = cotangents(args, dtype)
        sizes = oracle.scalar_sizes(*args, **kwargs, dout=dout, dlse=dlse)
    assert_result(actual, plain_case(name, dtype), true_case(name, dtype), dtype, name, sizes)


def assert_truth(actual: Result, name: str, args, kwargs, dtype="float32"):
    """Compare the result of any call with the oracle, by the law."""
    plain = plain_call(args, kwargs, dtype)
    assert_result(actual, plain, true_call(args, kwargs, dtype), dtype, name)


# ---- running calls


def differentiate(static: dict[str, Any], args, arrays: dict[str, Any], dout, dlse):
    """Return out, lse and gradients of one call. This function is meant to be traced."""
    floats = {name: x for name, x in arrays.items() if name in GRADIENTS}
    rest = {name: x for name, x in arrays.items() if name not in GRADIENTS}

    def call(floats, query, key, value):
        return memeff.dot_product_attention(
            query, key, value, **floats, **rest, **static, return_residual=True
        )

    (out, lse), pull = jax.vjp(call, floats, *args)
    float_grads, dq, dk, dv = pull((dout, dlse))
    return Result(out, lse, {"query": dq, "key": dk, "value": dv} | float_grads)


def run_calls(calls: dict[str, tuple], dtype="float32", **override) -> dict[str, Result]:
    """Run `calls` {name: (args, kwargs)} and return their results by name.

    All are compiled as one program, which is much faster than one by one.
    """
    statics = {}
    inputs = {}
    for name, (args, kwargs) in calls.items():
        statics[name], arrays = split(kwargs | override)
        inputs[name] = (args, arrays, *cotangents(args, dtype))

    def run(inputs):
        return {name: differentiate(statics[name], *x) for name, x in inputs.items()}

    with jax.enable_x64(jnp.dtype(dtype) == np.float64):
        return jax.tree.map(np.asarray, jax.jit(run)(inputs))


def run_call(args, kwargs, dtype="float32", cotangent=None) -> Result:
    """Run one call. Calls that differ in their numbers only share one compiled program."""
    if cotangent is None:
        cotangent = cotangents(args, dtype)
    static, arrays = split(kwargs)
    with jax.enable_x64(jnp.dtype(dtype) == np.float64):
        run = _program(tuple(sorted(static.items())))
        return jax.tree.map(np.asarray, run(args, arrays, *cotangent))


@functools.cache
def _program(static: tuple):
    return jax.jit(functools.partial(differentiate, dict(static)))


@functools.cache
def run_cases(names: tuple[str, ...], dtype: str, **override) -> dict[str, Result]:
    """Run the named cases, compiled as one program."""
    calls = {name: CASES[name].inputs(jnp.dtype(dtype)) for name in names}
    return run_calls(calls, dtype, **override)


def in_group(name: str, among: tuple[str, ...], size: int = 12) -> tuple[str, ...]:
    """Return the names that are compiled together with `name`.

    A test that runs alone then need not wait for all of `among`.
    """
    start = among.index(name) // size * size
    return among[start : start + size]


@contextlib.contextmanager
def watch_dispatch():
    """Collect (`Chosen`, operands) of each dispatched call.

    Calls do not warn meanwhile.
    """
    choose = dispatch.choose_implementation
    calls = []

    def record(problem, operands, *args, **kwargs):
        kwargs["warn"] = False
        chosen = choose(problem, operands, *args, **kwargs)
        calls.append((chosen, operands))
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "choose_implementation", record)
        yield calls
