"""Named calls of the Hopper kernels, and how to run and lower them without a GPU.

args = draw(bf16, z)                           # query, key, value of the sizes z
result = run_kernels(args, kwargs)             # in Mosaic's interpreter, which also looks for races
assert kernels(lowered(function, x)) == 1      # lowered for CUDA
"""

import contextlib
import functools
import inspect
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import Sizes, qkv
from conftest import (
    Result,
    assert_result,
    assert_truth,
    cotangents,
    plain_call,
    run_call,
    true_call,
)

from memeff import dot_product_attention
from memeff.device import pretend_device
from memeff.problem import Operands, Problem, Schedule

needs_kernels = pytest.mark.skipif(
    jax.__version__.startswith("0.10."), reason="kernels need jax 0.11, and this is 0.10"
)
# The interpreter computes in NumPy, which warns of NaN and Inf. Rows that are done again have them.
not_finite = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered in")
not_finite_products = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered in matmul"
)

f32 = np.float32
bf16 = jnp.bfloat16
i32 = functools.partial(np.array, dtype=np.int32)
small = functools.partial(Sizes, B=1, K=1, G=1, H=64, D=64)
RESULTS = ("out", "lse", "dq", "dk", "dv")


# ---- running


@contextlib.contextmanager
def interpreted(detect_races: bool = True, multiprocessors: int = 2, capability: str = "9.0"):
    """Run kernels in the interpreter, as on an H200 with a few multiprocessors.

    With `detect_races`, check that no race was found.
    """
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    from memeff.pallas.hopper import mosaic, persistent

    with (
        pytest.MonkeyPatch.context() as patch,
        pretend_device("gpu", capability),
        mosaic.interpreted(detect_races),
    ):
        patch.setattr(persistent, "multiprocessors", lambda: multiprocessors)
        interpret = functools.partial(interpret_once, interpreter.interpret_pallas_call)
        patch.setattr(interpreter, "interpret_pallas_call", interpret)
        try:
            yield
            assert not (detect_races and interpreter.get_races().races_found)
        finally:
            interpreter.reset_gpu_interpret_mode_state()


_programs = {}  # of the kernels that were interpreted last, by all that they depend on


def interpret_once(interpret, *args, **params):
    """Interpret a kernel with a program that all kernels of the same equations share.

    Otherwise the interpreter compiles each kernel again for each call that is traced. Kernels hold
    no arrays, so the text of `params` says all about them.
    """
    with np.printoptions(threshold=sys.maxsize):
        key = repr((params, *map(jax.typeof, args)))
    if key not in _programs:
        if len(_programs) == 20:
            del _programs[next(iter(_programs))]
        _programs[key] = jax.jit(functools.partial(interpret, **params))
    return _programs[key](*args)


def draw(dtype, z: Sizes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return query, key and value, which are always the same for a dtype and sizes."""
    return qkv(np.random.default_rng(0), dtype, z)


def run_kernels(
    args, kwargs, dtype="bfloat16", cotangent=None, detect_races: bool = True
) -> Result:
    """Return out, lse and gradients of a call."""
    with interpreted(detect_races):
        return run_call(args, kwargs | {"implementation": "pallas"}, dtype, cotangent)


def assert_kernels(name: str, call, dtype="bfloat16", detect_races: bool = True, **more) -> None:
    """Compare a call (sizes, kwargs) with the oracle; `more` keywords change no number."""
    z, kwargs = call
    args = draw(dtype, z)
    result = run_kernels(args, kwargs | more, dtype, detect_races=detect_races)
    assert_truth(result, name, args, kwargs, dtype)


def forward(args, **kwargs):
    """Return out and lse of a call."""
    call = functools.partial(
        dot_product_attention, **kwargs, implementation="pallas", return_residual=True
    )
    with interpreted():
        return jax.tree.map(np.asarray, jax.jit(call)(*args))


def forward_and_gradients(args, kwargs, dout, dlse, multiprocessors: int = 2):
    """Return the five `RESULTS` of a call in float32, on a GPU of so many multiprocessors."""
    call = functools.partial(
        dot_product_attention, **kwargs, implementation="pallas", return_residual=True
    )

    def both(query, key, value):
        results, pull = jax.vjp(call, query, key, value)
        return *results, *pull((dout, dlse))

    with interpreted(multiprocessors=multiprocessors):
        results = jax.jit(both)(*args)
        return jax.tree.map(lambda x: np.asarray(x, f32), results)


def assert_case(result: Result, name: str, args, kwargs, dtype: str) -> None:
    """Check the result of one of `CASES` by the law of tolerance."""
    truth = true_call(args, kwargs, dtype)
    plain = plain_call(args, kwargs, dtype)
    sizes = None
    if "sinks" in kwargs:
        sizes = {"sinks": size_of_sink_gradient_terms(args, kwargs, truth.out)}
    assert_result(result, plain, truth, dtype, name, sizes)


def size_of_sink_gradient_terms(args, kwargs, out) -> float:
    """Return how large the terms are whose sum over rows is the gradient of a sink."""
    call = oracle._call(*args, None, None, **kwargs)
    p = oracle._softmax(call)[1]  # of keys
    p_sink = 1 - p.sum(-1).swapaxes(1, 2)  # B T N
    dout, _ = cotangents(args, bf16)
    terms = p_sink * np.abs(dout * out).astype(f32).sum(-1)
    return np.sqrt((terms**2).sum((0, 1)).max())


def lowered(function, *shapes, **options) -> str:
    """Return the program of a function for a Hopper GPU, as text."""
    with pretend_device("gpu", "9.0"):
        traced = jax.jit(function, **options).trace(*shapes)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> int:
    """Return the number of kernels in a lowered program."""
    return len(re.findall(r"custom_call @mosaic_gpu", text))


def assert_fused_gradient_stays(monkeypatch, module, capability: str) -> None:
    """Check that dq, dk and dv of the kernel in `module` stay as they are if they are finite."""
    fused_gradients = module.fused_gradients

    def sevens(*args):
        dq, dk, dv, *rest = fused_gradients(*args)
        return *(jnp.full_like(x, 7) for x in (dq, dk, dv)), *rest

    monkeypatch.setattr(module, "fused_gradients", sevens)
    call = dict(implementation="pallas", backward="fused", scale=1.0)
    with interpreted(detect_races=False, capability=capability):
        grads = run_call(draw(bf16, small(T=61, S=91)), call, "bfloat16").grads
    assert all((x == 7).all() for x in grads.values())


def assert_partial_out_is_not_rounded(implementation, capability: str) -> None:
    """Check that partial out differs from out by what rounding takes, half of the last place."""
    args = draw(bf16, small(T=70, S=130))
    operands = Operands(*map(jnp.asarray, args))
    problem = Problem(right=0, q_offset=60, scale=args[0].shape[-1] ** -0.5)

    @jax.jit
    def both(operands):
        run = implementation.forward
        whole, _ = run(problem, Schedule(), operands)
        return whole, *run(problem, Schedule(partial_out=True), operands)

    with interpreted(capability=capability):
        whole, (high, low), lse = jax.tree.map(np.asarray, both(operands))
    np.testing.assert_array_equal(high, whole)
    partial = high.astype(f32) + low.astype(f32)
    assert np.isfinite(lse.high).all()
    taken = np.abs(partial - whole.astype(f32))
    assert (taken > 0).mean() > 0.9
    assert (taken <= 1.01 * 2.0**-8 * np.abs(partial)).all()


def assert_equal_bits(results, expected) -> None:
    """Check that two trees hold the same numbers; NaN equals NaN."""
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(expected)]
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    for name, (x, y) in zip(names, pairs, strict=True):
        np.testing.assert_array_equal(f32(x), f32(y), err_msg=name)


def unseen_filled(args, seen, cotangent):
    """Fill all tokens that are in no pair of `seen` [B, N, T, S] with NaN, Inf and huge numbers.

    Return query, key and value; the cotangents; and whether there was such a token.
    """
    rng = np.random.default_rng(3)
    query, key, value = args
    dout, dlse = cotangent
    B, N, T, S = seen.shape
    K = key.shape[2]
    rows = ~seen.any(3).swapaxes(1, 2)  # B T N
    cols = ~seen.reshape(B, K, N // K, T, S).any((2, 3)).swapaxes(1, 2)  # B S K

    def filled(x, hidden):
        choices = [np.nan, np.inf, -np.inf, float(jnp.finfo(x.dtype).max)]
        bad = rng.choice(choices, x.shape).astype(f32)
        hidden = hidden.reshape(*hidden.shape, *[1] * (x.ndim - hidden.ndim))
        return np.where(hidden, bad, x.astype(f32)).astype(x.dtype)

    args = filled(query, rows), filled(key, cols), filled(value, cols)
    cotangent = filled(dout, rows), filled(dlse, rows)
    return args, cotangent, rows.any() or cols.any()


# ---- the cases: sizes, and keyword arguments

SEGMENTS = np.random.default_rng(0).integers(0, 4, (2, 200))

CASES = {
    "plain": (small(T=128, S=256), {}),
    "causal, tails": (small(T=300, S=300, G=2), dict(is_causal=True)),
    "128": (small(T=150, S=200, H=128, D=128), dict(is_causal=True)),
    "other head dims": (small(B=2, T=70, S=90, K=2, H=40, D=120), {}),
    "one query, one key": (small(T=1, S=1, H=3, D=1), {}),
    "offsets": (small(B=2, T=130, S=200), dict(is_causal=True, q_offset=i32([-20, 61]))),
    "offset": (small(T=130, S=320), dict(is_causal=True, q_offset=190)),
    "window": (small(T=400, S=400), dict(local_window_size=(150, 10))),
    "narrow window": (small(T=200, S=200), dict(local_window_size=(0, 0))),
    "lengths": (
        small(B=2, T=200, S=300),
        dict(query_seq_lengths=i32([70, 200]), key_value_seq_lengths=i32([300, 0])),
    ),
    "soft cap": (small(T=130, S=130), dict(logits_soft_cap=1.5, is_causal=True)),
    "segments": (
        small(B=2, T=200, S=200, G=2),
        dict(query_segment_ids=np.sort(SEGMENTS).astype(np.int32), is_causal=True),
    ),
    "segments, long": (  # tiles without masks lie between masked tiles
        small(T=520, S=520),
        dict(
            query_segment_ids=np.repeat(i32([[2, 5]]), [300, 220], axis=1),
            local_window_size=(250, None),
        ),
    ),
    "segments, unsorted": (
        small(T=70, S=300, H=128, D=128),
        dict(
            query_segment_ids=i32([[1, 5] * 35]),
            key_value_segment_ids=i32([[5, 1, 2] * 100]),
            local_window_size=(None, 90),
        ),
    ),
    "keys masked, padded": (
        small(B=3, T=140, S=300, G=2),
        dict(
            mask=(np.arange(300) < i32([[300], [150], [0]]))[:, None, None],
            is_causal=True,
            q_offset=200,
        ),
    ),
    "keys masked, left and here and there": (
        small(B=2, T=70, S=300, H=128, D=128),
        dict(mask=np.stack([np.arange(300) >= 200, np.arange(300) % 7 < 3])[:, None, None]),
    ),
    "queries masked": (
        small(T=200, S=130),
        dict(mask=(np.arange(200) % 100 < 70)[:, None], is_causal=True),
    ),
    "scale": (small(T=64, S=130), dict(scale=-0.3)),
    "keys behind the last query": (small(T=70, S=140), dict(local_window_size=(30, 20))),
    "queries behind the last key": (
        small(T=140, S=70, H=128, D=128),
        dict(local_window_size=(20, 9), query_seq_lengths=i32([120]), is_causal=True),
    ),
    "129": (
        small(T=129, S=129),
        dict(
            is_causal=True,
            local_window_size=(40, 0),
            query_segment_ids=i32([[0] * 60 + [1] * 69]),
            key_value_segment_ids=i32([[0] * 60 + [1] * 50 + [2] * 18 + [0]]),
        ),
    ),
    # A sink as large as the logits, no sink, and one far above them. Some rows see nothing.
    "sinks": (
        small(T=70, S=140, G=3),
        dict(sinks=np.array([1.5, -np.inf, 200], f32), is_causal=True, q_offset=i32([-5])),
    ),
    "everything": (
        small(B=2, T=150, S=280, G=3, H=72, D=8),
        dict(
            local_window_size=(100, 30),
            q_offset=i32([0, 40]),
            key_value_seq_lengths=i32([280, 111]),
            query_seq_lengths=i32([150, 9]),
            logits_soft_cap=4.0,
            scale=0.2,
        ),
    ),
}
# Cases in which each query sees a key, and each key is seen by a query.
NOTHING_HIDDEN = (
    "plain",
    "causal, tails",
    "other head dims",
    "one query, one key",
    "offset",
    "window",
    "narrow window",
    "soft cap",
    "segments",
    "segments, long",
    "scale",
)


def position_arguments(kwargs: dict) -> dict:
    """Return the keyword arguments that decide who may attend to whom."""
    names = inspect.signature(oracle.seen_by).parameters
    return {name: x for name, x in kwargs.items() if name in names}


# Calls whose query heads of a group have a thread block each (small calls are not divided), and
# the kind of gradient.
DIVIDED = {
    "64": (small(T=66, S=100, K=2, G=2), dict(is_causal=True), "split"),
    "two tiles": (small(T=130, S=200, G=4, H=128, D=128), dict(logits_soft_cap=5.0), "split"),
    "wide": (small(T=66, S=100, K=2, G=2, H=192, D=128), {}, "split"),
    "64, fused": (small(T=66, S=100, K=2, G=2), dict(is_causal=True), "fused"),
    "two tiles, fused": (small(T=130, S=200, G=4, H=128, D=128), {}, "fused"),
}

# Calls whose gradient is computed in one kernel: sizes, keyword arguments, and whether one block of
# 128 keys runs. The interpreter takes blocks that add to
# the same dq for a race, so it looks for races only where there is one block.
FUSED = {
    "one block": (small(T=300, S=100, G=2), dict(is_causal=True), True),
    "one block, 128": (small(T=150, S=128, H=128, D=128), dict(local_window_size=(30, 7)), True),
    "blocks": (small(B=2, T=300, S=300, K=2, H=40, D=64), dict(is_causal=True), False),
    "segments": (
        small(B=1, T=150, S=100, H=128, D=128),
        dict(query_segment_ids=i32([[1, 5] * 75]), key_value_segment_ids=i32([[5, 1, 1, 2] * 25])),
        True,
    ),
    "soft cap, lengths": (
        small(B=2, T=150, S=300, G=2, H=128, D=100),
        dict(
            logits_soft_cap=2.0,
            query_seq_lengths=i32([150, 9]),
            key_value_seq_lengths=i32([290, 0]),
            q_offset=i32([40, 0]),
        ),
        False,
    ),
}
