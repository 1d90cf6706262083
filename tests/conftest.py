"""Eight CPU devices, the law of tolerance, and how a case is run: what more than one test file needs.

names, dtype = ("causal", "window"), "float32"
for name, result in run_cases(names, dtype).items():            # out, lse and gradients, compiled together
    assert_case(result, name, dtype)                            # against the oracle, by the law
"""

import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import os
import resource
from typing import Any, NamedTuple

# Before JAX starts. Compiling is most of what the tests do: level 0 of LLVM is four times as fast,
# XLA's older emitters of fused loops (jaxlib 0.10 has them still) twice; both leave HLO and memory
# alone. For what users get, set these flags to 3 and true.
_flags = os.environ.get("XLA_FLAGS", "")
_wanted = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _wanted.append("--xla_cpu_use_fusion_emitters=false")
_flags += "".join(f" {flag}" for flag in _wanted if flag.split("=")[0] not in _flags)
os.environ["XLA_FLAGS"] = _flags.strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import oracle  # noqa: E402
import pytest  # noqa: E402
from cases import CASES, accumulator, split  # noqa: E402

import memeff  # noqa: E402
from memeff import dispatch, tile_sizes  # noqa: E402

hypothesis.settings.register_profile(
    "memeff", max_examples=10, deadline=None, derandomize=True, database=None
)
hypothesis.settings.load_profile("memeff")

EPS = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 4e-3, "float16": 5e-4}
GRADIENTS = ("query", "key", "value", "bias", "scale", "logits_soft_cap", "sinks")


def pytest_configure(config):
    config.option.reportchars += "s"  # say why a test was skipped


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """What a call does where JAX has one device; the eight are for test_sharding.py."""
    monkeypatch.setattr(tile_sizes, "may_be_sharded", lambda: False)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """What is compiled for a CPU holds memory maps, of which Linux gives a process 65,530; then XLA dies without a word."""
    yield
    jax.clear_caches()


_after_clearing = [0]


@pytest.fixture(autouse=True)
def forget_much():
    """And memory: a module that has compiled half a GiB of programs, as the interpreter does in five tests, starts over."""
    yield
    if not 0 <= resident() - _after_clearing[0] < 2**29:
        jax.clear_caches()
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # glibc keeps what is freed
            libc.malloc_trim(0)
        _after_clearing[0] = resident()


def resident() -> int:
    """Bytes of this process in memory; 0 where no file says so."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


@functools.cache
def why_no_gpu() -> str | None:
    try:
        jax.devices("gpu")
    except RuntimeError as e:
        return f"needs a GPU: {str(e).splitlines()[0]}"
    return None


def few(cases, fast) -> list:
    """The `cases`, tuples where they have several values, as parameters: in the slow set but for those that are `fast`."""
    slow = lambda case: pytest.param(
        *(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow
    )
    return [case if case in fast else slow(case) for case in cases]


# ---- the law of tolerance


LAW = {
    "root mean square": (1.5, lambda x: np.sqrt(np.mean(np.square(x)))),
    "maximum": (3.0, lambda x: np.abs(x).max()),
}


def assert_as_good(actual, baselines, oracle, dtype, what="result", size=0.0):
    """`actual` errs at most 1.5 times as much as plain computations in the same dtype, plus eps (R).

    So is their root mean square; the largest error is at most 3 times plain's largest. One error is noise of rounding: it
    may be several times another CPU's, which adds in another order. The mean over many is a property of the computation, so
    inputs of which a few rows decide are drawn many times, along the batch.

    `size`: of the terms of a scalar, where that is more than the scalar's own (see `oracle.scalar_sizes`).
    """
    assert np.shape(actual) == np.shape(oracle), (
        f"{what}: shape {np.shape(actual)}, expected {np.shape(oracle)}"
    )
    actual, oracle, *baselines = (
        np.asarray(x).astype(np.float64) for x in (actual, oracle, *baselines)
    )
    finite = np.isfinite(oracle)  # lse of a row that sees nothing is -inf, and exactly that
    np.testing.assert_array_equal(actual[~finite], oracle[~finite], err_msg=what)
    if not finite.any():
        return
    actual, oracle, *baselines = (x[finite] for x in (actual, oracle, *baselines))
    assert np.isfinite(actual).all(), (
        f"{what}: {np.sum(~np.isfinite(actual))} of {actual.size} are not finite"
    )
    for name, (times, norm) in LAW.items():
        plain = max(norm(x - oracle) for x in baselines)
        allowed = times * plain + EPS[jnp.dtype(dtype).name] * max(1, norm(oracle), size)
        error = norm(actual - oracle)
        assert error <= allowed, (
            f"{what}: {name} of the error is {error:.3g}, {allowed:.3g} allowed, {plain:.3g} plain"
        )


# ---- running calls


class Result(NamedTuple):
    out: np.ndarray
    lse: np.ndarray
    grads: dict[str, np.ndarray]  # by argument, for those of GRADIENTS that came as arrays


def assert_result(
    actual: Result, baselines: tuple[Result, ...], truth: Result, dtype, name: str, sizes=None
):
    assert_as_good(actual.out, [x.out for x in baselines], truth.out, dtype, f"{name}: out")
    assert_as_good(
        actual.lse,
        [x.lse for x in baselines],
        truth.lse,
        accumulator(jnp.dtype(dtype)),
        f"{name}: lse",
    )
    for argument, grad in actual.grads.items():
        plain = [x.grads[argument] for x in baselines]
        size = 0.0 if sizes is None else sizes.get(argument, 0.0)
        assert_as_good(
            grad, plain, truth.grads[argument], dtype, f"{name}: gradient of {argument}", size
        )


def assert_case(actual: Result, name: str, dtype):
    sizes = None
    # `out` is saved in 16 bits
    if jnp.finfo(dtype).bits == 16 and {"scale", "logits_soft_cap"} & actual.grads.keys():
        args, kwargs = CASES[name].inputs(jnp.dtype(dtype))
        dout, dlse = cotangents(args, dtype)
        sizes = oracle.scalar_sizes(
            *args, **oracle_arguments(args, kwargs, dtype), dout=dout, dlse=dlse
        )
    assert_result(actual, plain_case(name, dtype), true_case(name, dtype), dtype, name, sizes)


def cotangents(args, dtype="float32", dlse=True) -> tuple[np.ndarray, np.ndarray]:
    """Random ones for out and for lse, the same for all calls of one shape."""
    rng = np.random.default_rng(11)
    rows = args[0].shape[:-1]
    dout = rng.standard_normal((*rows, args[2].shape[-1])).astype(dtype)
    return dout, dlse * rng.standard_normal(rows).astype(accumulator(jnp.dtype(dtype)))


def differentiate(static: dict[str, Any], args, arrays: dict[str, Any], dout, dlse):
    """out, lse and gradients of one call; to be traced."""
    floats = {n: x for n, x in arrays.items() if n in GRADIENTS}
    rest = {n: x for n, x in arrays.items() if n not in GRADIENTS}

    def call(floats, query, key, value):
        return memeff.dot_product_attention(
            query, key, value, **floats, **rest, **static, return_residual=True
        )

    (out, lse), pull = jax.vjp(call, floats, *args)
    floats, *of = pull((dout, dlse))
    return Result(out, lse, dict(zip(GRADIENTS, of, strict=False)) | floats)


def run_calls(calls: dict[str, tuple], dtype="float32", **override) -> dict[str, Result]:
    """{name: (args, kwargs)} to {name: Result}: all compiled as one program, which is much faster than one by one."""
    statics, inputs = {}, {}
    for name, (args, kwargs) in calls.items():
        statics[name], arrays = split(kwargs | override)
        inputs[name] = (args, arrays, *cotangents(args, dtype))

    def run(inputs):
        return {name: differentiate(statics[name], *of) for name, of in inputs.items()}

    with jax.enable_x64(jnp.dtype(dtype) == np.float64):
        return jax.tree.map(np.asarray, jax.jit(run)(inputs))


def run_call(args, kwargs, dtype="float32", cotangent=None) -> Result:
    """One call; compiled once for all that differ in their numbers only."""
    cotangent = cotangents(args, dtype) if cotangent is None else cotangent
    static, arrays = split(kwargs)
    with jax.enable_x64(jnp.dtype(dtype) == np.float64):
        run = _program(tuple(sorted(static.items())))
        return jax.tree.map(np.asarray, run(args, arrays, *cotangent))


@functools.cache
def _program(static: tuple):
    return jax.jit(functools.partial(differentiate, dict(static)))


def assert_truth(actual: Result, name: str, args, kwargs, dtype="float32"):
    """A call's result against the oracle, by the law."""
    assert_result(
        actual, plain_call(args, kwargs, dtype), true_call(args, kwargs, dtype), dtype, name
    )


def in_group(name: str, among: tuple[str, ...], size: int = 12) -> tuple[str, ...]:
    """The names that are compiled together with `name`, so that one test alone need not wait for all."""
    start = among.index(name) // size * size
    return among[start : start + size]


@functools.cache
def run_cases(names: tuple[str, ...], dtype: str, **override) -> dict[str, Result]:
    return run_calls(
        {name: CASES[name].inputs(jnp.dtype(dtype)) for name in names}, dtype, **override
    )


# ---- what they are measured against


def true_call(args, kwargs, dtype="float32", dlse=True) -> Result:
    """The oracle's answer; without `dlse` for a loss on out alone."""
    kwargs = oracle_arguments(args, kwargs, dtype)
    dout, dlse = cotangents(args, dtype, dlse)
    of = oracle.gradients(*args, **kwargs, dout=dout, dlse=dlse)
    return Result(*oracle.attention(*args, **kwargs), of)


@functools.cache
def true_case(name: str, dtype: str) -> Result:
    return true_call(*CASES[name].inputs(jnp.dtype(dtype)), dtype)


def oracle_arguments(args, kwargs, dtype="float32") -> dict[str, Any]:
    """Without what changes no number, and with dropout's mask drawn: as Flax draws it, all of it at once."""
    kwargs = {
        n: x for n, x in kwargs.items() if n not in ("chunk_size", "precision", "implementation")
    }
    if (key := kwargs.pop("dropout_rng", None)) is not None:
        (*leads, T, N, _), S = args[0].shape, args[1].shape[-3]
        shape = (*leads, N, T, S) if not kwargs.pop("broadcast_dropout", True) else (T, S)
        with jax.enable_x64(jnp.dtype(dtype) == np.float64):
            kept = jax.random.bernoulli(jnp.asarray(key), 1.0 - kwargs["dropout_rate"], shape)
        kwargs["kept"] = np.asarray(kept)
    return kwargs


def plain_call(args, kwargs, dtype="float32", dlse=True) -> tuple[Result, Result]:
    """The quadratic computation in the same dtype, step for step as jax.nn, its masks from the oracle.

    Twice: differentiated by JAX, and with its backward written from the saved out and lse, which a backward in linear memory
    starts from. The second errs more where p (dp - rowsum(dout out)) is a small difference of large terms: out is rounded.
    """
    call = oracle._call(
        *args, **{"bias": None, "mask": None} | oracle_arguments(args, kwargs, dtype)
    )
    acc = accumulator(jnp.dtype(dtype))
    (T, N, H), (S, K, D) = args[0].shape[-3:], args[2].shape[-3:]
    leads, G = args[0].shape[:-3], N // K
    fold = lambda x, *shape: x.reshape(call.seen.shape[0], *shape)
    tiles = (fold(x, K, G, T, S) for x in (call.bias.astype(acc), call.seen, call.z.astype(acc)))
    dout, dlse = cotangents(args, dtype, dlse)
    with jax.enable_x64(acc == np.float64):
        results = jax.device_get(
            _plain(
                fold(args[0], T, K, G, H),
                fold(args[1], S, K, H),
                fold(args[2], S, K, D),
                *tiles,
                acc(call.scale),
                None if call.cap is None else acc(call.cap),
                None if call.sinks is None else call.sinks.astype(acc).reshape(K, G),
                fold(dout, T, K, G, D),
                fold(dlse, T, K, G),
            )
        )
    shapes = {
        "query": args[0].shape,
        "key": args[1].shape,
        "value": args[2].shape,
        "scale": (),
        "logits_soft_cap": (),
    }
    shapes["sinks"] = (N,)

    def unfold(out, lse, grads):
        grads = {
            n: x.reshape(shapes[n]) if n != "bias" else x for n, x in grads.items() if x is not None
        }
        if (bias := kwargs.get("bias")) is not None:
            full = grads["bias"].astype(np.float64).reshape(*leads, N, T, S)
            grads["bias"] = oracle._sum_to(full, np.shape(bias)).astype(bias.dtype)
        return Result(out.reshape(*leads, T, N, D), lse.reshape(*leads, T, N), grads)

    by_jax, from_saved = (unfold(*result) for result in results)
    return by_jax, from_saved


@functools.cache
def plain_case(name: str, dtype: str) -> tuple[Result, Result]:
    return plain_call(*CASES[name].inputs(jnp.dtype(dtype)), dtype)


@jax.jit
def _plain(query, key, value, bias, seen, z, scale, cap, sinks, dout, dlse):
    """Queries B T K G H, tiles B K G T S, as jax.nn lays them out: each group by itself."""

    def group(mix, query, bias, seen, z, sink, key, value, scale, cap):
        s = jnp.einsum("btkh,bskh->bkts", query, key, preferred_element_type=bias.dtype) * scale
        if cap is not None:
            s = cap * jnp.tanh(s / cap)
        some = seen.any(-1, keepdims=True)
        return mix(jnp.where(seen | ~some, s + bias, -jnp.inf), sink, value, some, z)

    def call(mix, query, bias, key, value, scale, cap, sinks):
        each = (query.transpose(3, 0, 1, 2, 4), *(jnp.moveaxis(x, 2, 0) for x in (bias, seen, z)))
        in_axes = (0, 0, 0, 0, None if sinks is None else 1, None, None, None, None)
        return jax.vmap(functools.partial(group, mix), in_axes, out_axes=3)(
            *each, sinks, key, value, scale, cap
        )

    def result(mix):
        (out, lse), pull = jax.vjp(
            functools.partial(call, mix), query, bias, key, value, scale, cap, sinks
        )
        names = ("query", "bias", "key", "value", "scale", "logits_soft_cap", "sinks")
        return out, lse, dict(zip(names, pull((dout, dlse)), strict=True))

    return result(_mix), result(_mix_saved)


def _mix(s, sink, value, some, z):
    """out B T K D and lse B T K from logits B K T S and the sink K, one more column of the softmax."""
    p = jnp.where(some, _softmax(s, sink), 0) * z
    lse = jnp.where(some[..., 0], jax.nn.logsumexp(s, axis=-1), -jnp.inf)
    return jnp.einsum("bkts,bskd->btkd", p.astype(value.dtype), value), lse.swapaxes(1, 2)


def _softmax(s, sink):
    if sink is None:
        return jax.nn.softmax(s, axis=-1)
    column = jnp.broadcast_to(sink[:, None, None], (*s.shape[:-1], 1))
    return jax.nn.softmax(jnp.concatenate([s, column], -1), axis=-1)[..., :-1]


def _mix_fwd(s, sink, value, some, z):
    out, lse = _mix(s, sink, value, some, z)
    return (out, lse), (s, sink, value, some, z, out, lse)


def _mix_bwd(saved, cotangents):
    s, sink, value, some, z, out, lse = saved
    dout, dlse = cotangents
    lse, dlse = lse.swapaxes(1, 2)[..., None], dlse.swapaxes(1, 2)[..., None]
    total = lse if sink is None else jnp.logaddexp(lse, sink[:, None, None])
    p, p_keys = (jnp.where(some, jnp.exp(s - x), 0) for x in (total, lse))
    dv = jnp.einsum("bkts,btkd->bskd", (p * z).astype(value.dtype), dout)
    dp = jnp.einsum("btkd,bskd->bkts", dout, value, preferred_element_type=s.dtype) * z
    delta = (dout.astype(s.dtype) * out.astype(s.dtype)).sum(-1).swapaxes(1, 2)[..., None]
    dsink = None
    if sink is not None:
        dsink = -jnp.where(some, jnp.exp(sink[:, None, None] - total) * delta, 0).sum((0, 2, 3))
    return p * (dp - delta) + p_keys * dlse, dsink, dv, None, None


_mix_saved = jax.custom_vjp(_mix)
_mix_saved.defvjp(_mix_fwd, _mix_bwd)


@contextlib.contextmanager
def watch_dispatch():
    """Collect (problem, operands, name of the implementation) of each call that is dispatched, and do not warn."""
    choose = dispatch.choose_implementation
    calls = []

    def record(problem, operands, *args, **kwargs):
        chosen = choose(problem, operands, *args, **kwargs | {"warn": False})
        calls.append((chosen.problem, operands, chosen.name))
        return chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "choose_implementation", record)
        yield calls
