"""Code that calls jax.nn.dot_product_attention computes the same with memeff in `switch_jax_nn`."""

import inspect
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import memeff
from memeff import dispatch, nn, switch

B = 2
T = 7
S = 9
N = 4
K = 2
H = 6
f32 = np.float32
i32 = np.int32
rng = np.random.default_rng(0)
X = rng.standard_normal((B, T, N, H)).astype(f32)
Y = rng.standard_normal((B, S, K, H)).astype(f32)
Z = rng.standard_normal((B, S, K, H)).astype(f32)
QKV = (X, Y, Z)
MASK = (rng.random((B, 1, T, S)) < 0.7) & (np.arange(T) != 3)[:, None]  # row 3 sees nothing
BIAS = rng.standard_normal((1, N, T, S)).astype(f32)


@pytest.fixture(autouse=True)
def nothing_ran_before(monkeypatch):
    """Let each test run as in a process in which no switch has run anything."""
    monkeypatch.setattr(switch, "_ran", set())


def blind_row():
    """Return the largest number of row 3: 0 from memeff, that of a mean of values from JAX."""
    out = jax.nn.dot_product_attention(X, Y, Z, mask=MASK)
    return np.abs(np.asarray(out)[:, 3]).max()


# ---- what jax.nn takes


def kinds_and_defaults(parameters):
    return [(p.name, p.kind, p.default) for p in parameters.values()]


def test_the_signature_is_jax_nns():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(switch._as_jax_nn).parameters
    assert kinds_and_defaults(theirs) == kinds_and_defaults(ours)
    with switch.switch_jax_nn(strict=True):
        assert inspect.signature(jax.nn.dot_product_attention).parameters == theirs
        # a keyword of memeff's that JAX lacks
        with pytest.raises(TypeError, match="unexpected keyword argument 'chunk_size'"):
            jax.nn.dot_product_attention(*QKV, chunk_size=4)
        jax.nn.dot_product_attention(*QKV)


HALF = tuple(x.astype(jnp.bfloat16) for x in QKV)
CALLS = {
    "plain": (QKV, {}),
    "positions": ((*QKV, BIAS, MASK), {}),
    "names": ((X,), {"mask": MASK, "bias": BIAS, "value": Z, "key": Y}),
    "3 dims": ((X[0], Y[0], Z[0], BIAS, MASK[:1]), {}),
    "3 dims beside 4": ((X[:1], Y[0], Z[0]), {"query_seq_lengths": np.array([4], i32)}),
    "2 dims": ((X[0, 0], Y[0], Z[0]), {"return_residual": True}),
    "bias of ints": ((*QKV, rng.integers(-2, 3, (1, 1, T, S))), {}),
    "bias of bools": ((*QKV, rng.random((1, 1, 1, S)) < 0.5), {}),
    "bias in 16 bits": ((*QKV, BIAS.astype(jnp.bfloat16)), {}),
    "bias beside 16 bits": ((*HALF, BIAS), {}),
    "lists": ((X.tolist(), Y.tolist(), Z.tolist()), {"mask": MASK.tolist()}),
    "scale": (QKV, {"scale": 0.3}),
    "scale that is an array": (QKV, {"scale": f32(0.3)}),
    "is_causal": (QKV, {"is_causal": 1}),
    "window": (QKV, {"local_window_size": 2}),
    "window with sides": (QKV, {"local_window_size": (1, 3), "is_causal": np.True_}),
    "lengths": (
        QKV,
        {
            "query_seq_lengths": np.array([3, T], i32),
            "key_value_seq_lengths": np.array([S, 1], i32),
        },
    ),
    "lengths beyond": (QKV, {"key_value_seq_lengths": np.array([99, 4], i32)}),
    "lengths below 0": (QKV, {"query_seq_lengths": np.array([99, -1], i32)}),
    "residual": (QKV, {"mask": MASK, "return_residual": True}),
    "residual in 16 bits": (HALF, {"return_residual": True}),
    "xla": (QKV, {"implementation": "xla"}),
}
DERIVATIVE = "derivative of the residual"


def run_all_calls():
    """Return the results of all CALLS by name, and the derivative of a call with its residual."""
    results = {}
    for name, (args, kwargs) in CALLS.items():
        results[name] = jax.nn.dot_product_attention(*args, **kwargs)

    def with_residual(x):
        return jax.nn.dot_product_attention(x, Y, Z, return_residual=True)

    results[DERIVATIVE] = jax.jvp(with_residual, (X,), (X + 1,))
    return results


def rows_that_see(name):
    """Return True for each row of a call that sees a key: memeff and JAX differ elsewhere."""
    args, kwargs = CALLS.get(name, (QKV, {}))
    sees = np.ones((B, T), bool)
    if kwargs.get("mask") is not None or len(args) == 5:
        sees = MASK.any((1, 3))
    if "query_seq_lengths" in kwargs:
        sees = sees & (np.arange(T) < kwargs["query_seq_lengths"][:, None])
    batch = 1 if "dims" in name else B
    return sees[:batch].reshape(-1)


def test_what_jax_nn_takes_means_the_same():
    theirs = jax.jit(run_all_calls)()
    with memeff.switch_jax_nn(strict=True) as calls:
        ours = jax.jit(run_all_calls)()
    shapes = [np.shape(args[0]) for args, _ in CALLS.values()]
    assert calls == [*shapes, X.shape]
    for name in ours:
        rows = rows_that_see(name)
        tolerance = 2e-2 if "16 bits" in name and name != "bias in 16 bits" else 4e-6
        our_arrays = jax.tree.leaves(ours[name])
        their_arrays = jax.tree.leaves(theirs[name])
        assert len(our_arrays) == len(their_arrays)
        for x, y in zip(our_arrays, their_arrays, strict=True):
            assert x.dtype == y.dtype, name
            assert x.shape == y.shape, name
            x = np.asarray(x, f32)
            y = np.asarray(y, f32)
            if name != "2 dims":
                x = x.reshape(len(rows), -1)[rows]
                y = y.reshape(len(rows), -1)[rows]
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=name)


# ---- implementation=


@pytest.mark.parametrize("name", ["cudnn", "triton", "xla", "of the future"])
def test_a_callers_implementation_is_no_request(name, monkeypatch):
    requested = []
    choose = dispatch.choose_implementation

    def record(problem, operands, request, *args, **kwargs):
        requested.append(request.implementation)
        return choose(problem, operands, request, *args, **kwargs)

    monkeypatch.setattr(dispatch, "choose_implementation", record)
    shape = (B, T, N, H)

    def trace():
        def call(x):  # a new function, which JAX's cache does not know
            return jax.nn.dot_product_attention(x, x, x, implementation=name)

        jax.eval_shape(call, jax.ShapeDtypeStruct(shape, f32))

    with memeff.switch_jax_nn() as calls:
        trace()
    with memeff.switch_jax_nn("reference") as reference_calls:
        trace()
        with memeff.switch_jax_nn(implementation="xla") as inner_calls:
            trace()
        trace()
    assert calls == [shape]
    assert reference_calls == [shape] * 2
    assert inner_calls == [shape]
    assert requested == [None, "reference", "xla", "reference"]


def test_the_implementation_of_the_switch_is_part_of_jits_key():
    @jax.jit
    def run(x):
        return jax.nn.dot_product_attention(x, x, x)

    for implementation in (None, "xla", "reference"):
        for traced in (1, 0):
            with memeff.switch_jax_nn(implementation) as calls:
                run(X)
            assert len(calls) == traced
    unknown = r"switch_jax_nn: implementation='cudnn' is not known: use None or one of 'xla', "
    with pytest.raises(ValueError, match=unknown):
        with memeff.switch_jax_nn("cudnn"):  # pyright: ignore[reportArgumentType]
            raise AssertionError("inside")
    assert not switch._inside


# ---- what the list counts, and whom the switch reaches


def test_a_jitted_function_follows_the_switch():
    jaxs = jax.nn.dot_product_attention

    @jax.jit
    def run(mask):
        return jax.nn.dot_product_attention(*QKV, mask=mask)

    before = np.asarray(run(MASK))
    with memeff.switch_jax_nn() as calls:
        inside = np.asarray(run(MASK))
        with memeff.switch_jax_nn() as inner_calls:
            jax.eval_shape(lambda x: jax.nn.dot_product_attention(x, x, x), X)
        assert jax.nn.dot_product_attention is not jaxs
    assert calls == [X.shape]
    assert inner_calls == [X.shape]
    assert jax.nn.dot_product_attention is jaxs
    assert np.abs(before[:, 3]).max() > 1e-3
    assert np.abs(inside[:, 3]).max() == 0
    np.testing.assert_allclose(np.delete(inside, 3, 1), np.delete(before, 3, 1), atol=2e-6)
    np.testing.assert_array_equal(run(MASK), before)


def test_a_call_that_raised_is_not_counted():
    with memeff.switch_jax_nn() as calls:
        with pytest.raises(TypeError, match="mask must be boolean"):
            jax.nn.dot_product_attention(*QKV, mask=MASK.astype(f32))
        with pytest.raises(ValueError, match="key must have the head size"):
            jax.nn.dot_product_attention(X, Y[..., :2], Z[..., :2])
        assert calls == []
        jax.nn.dot_product_attention(*QKV)
    assert calls == [X.shape]


def test_nnx_attention_is_reached_where_it_drops_nothing():
    module = nnx.MultiHeadAttention(N, 8, decode=False, rngs=nnx.Rngs(0))
    x = X.reshape(B, T, -1)[..., :8]

    @nnx.jit
    def run(module):
        return module(x, is_causal=True)

    expected = run(module)
    with nn.switch_jax_nn() as calls:
        np.testing.assert_allclose(run(module), expected, atol=2e-6)
    assert calls == [(B, T, N, 8 // N)]


def test_other_threads_and_other_patches_are_left_alone(monkeypatch):
    results = []
    with memeff.switch_jax_nn() as calls:
        other = threading.Thread(target=lambda: results.append(blind_row()))
        other.start()
        other.join()
        assert calls == []
        assert blind_row() == 0
        assert calls == [X.shape]
    assert results[0] > 1e-3

    jaxs = jax.nn.dot_product_attention
    context = memeff.switch_jax_nn()
    monkeypatch.setattr(jax.nn, "dot_product_attention", jaxs)  # restored at the end
    context.__enter__()
    routed = jax.nn.dot_product_attention

    def wrapper(*args, **kwargs):
        return routed(*args, **kwargs)

    jax.nn.dot_product_attention = wrapper
    assert blind_row() == 0
    context.__exit__(None, None, None)
    # the patch on top of memeff's stays, or leaves memeff's where it was
    for patch in (wrapper, routed):
        jax.nn.dot_product_attention = patch
        assert blind_row() > 1e-3
        with memeff.switch_jax_nn():
            assert blind_row() == 0
        assert jax.nn.dot_product_attention is patch
        assert blind_row() > 1e-3


# ---- where nothing is switched


NOTHING = (
    r"switch_jax_nn: memeff ran nothing, because nothing called jax\.nn\.dot_product_attention "
    r".* memeff\.replace_attention reaches both"
)


def write_attention_out():
    return jax.nn.softmax(X[0, 0] @ Y[0, :, 0].T) @ Z[0, :, 0]


def test_nothing_switched_warns_or_raises():
    with pytest.warns(UserWarning, match=NOTHING) as record, memeff.switch_jax_nn() as calls:
        write_attention_out()
    assert calls == []
    assert len(record) == 1
    assert record[0].filename == __file__
    with pytest.raises(ValueError, match=NOTHING), memeff.switch_jax_nn(strict=True):
        write_attention_out()
    raised = "because every call of jax.nn.dot_product_attention inside raised an error"
    with pytest.warns(UserWarning, match=raised), memeff.switch_jax_nn():
        with pytest.raises(TypeError):
            jax.nn.dot_product_attention(*QKV, mask=BIAS)
    assert not switch._inside
    assert blind_row() > 1e-3


def test_an_exception_inside_is_not_masked():
    jaxs = jax.nn.dot_product_attention
    for strict in (False, True):
        with (
            warnings.catch_warnings(),
            pytest.raises(ZeroDivisionError),
            memeff.switch_jax_nn(strict=strict),
        ):
            warnings.simplefilter("error")
            1 / 0  # noqa: B018
    assert jax.nn.dot_product_attention is jaxs


def test_an_outer_switch_counts_what_an_inner_one_ran():
    with (
        memeff.switch_jax_nn(strict=True) as calls,
        memeff.switch_jax_nn("xla", strict=True) as inner_calls,
    ):
        jax.nn.dot_product_attention(*QKV)
    assert calls == []
    assert inner_calls == [X.shape]
    with pytest.raises(ValueError, match=NOTHING):
        with memeff.switch_jax_nn("reference", strict=True):  # which ran nothing
            pass


def test_calls_from_jits_cache_are_not_taken_for_none():
    @jax.jit
    def run(x):
        return jax.nn.dot_product_attention(x, Y, Z)

    for traced in (1, 0, 0):
        with memeff.switch_jax_nn(strict=True) as calls:
            run(X)
        assert len(calls) == traced


# ---- the package


def test_it_needs_no_flax_and_changes_nothing_when_imported():
    code = """
import sys
sys.modules["flax"] = None  # as if it were not installed
import jax
theirs = jax.nn.dot_product_attention
import memeff
from jax._src import xla_bridge
assert jax.nn.dot_product_attention is theirs
assert not xla_bridge._backends
assert not any(name.split(".")[0] == "flax" and module for name, module in sys.modules.items())
x = jax.numpy.ones((1, 2, 1, 4))
with memeff.switch_jax_nn(strict=True) as calls:
    jax.nn.dot_product_attention(x, x, x)
assert calls == [x.shape]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
