"""`memeff.replace_attention` and `find_attention`: what is found, the same function remains."""

import dataclasses
import functools
import re

import exact
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_programs import (
    CHOICES,
    DECOYS,
    B,
    N,
    Program,
    S,
    T,
    make_arrays,
    results_and_gradients,
)
from conftest import few
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import SingleDeviceSharding
from small_calls import assert_close, temp_bytes

import memeff
from memeff.rewrite import assignment, axes, check
from memeff.rewrite.axes import known_number, new_index
from memeff.rewrite.element import Builder, Roles, tabulate
from memeff.rewrite.graph import Graph
from memeff.rewrite.reader import Reader
from memeff.rewrite.scope import Search
from memeff.rewrite.symbols import Choice
from memeff.rewrite.transform import MIN_LOGITS

find = functools.partial(memeff.find_attention, min_logits=0)
replace = functools.partial(memeff.replace_attention, min_logits=0)


def run_replaced(f, *arrays):
    """Run f with its attention replaced, as one program: compiling each equation takes longer."""
    return jax.jit(replace(f, strict=True))(*arrays)


def assert_replaced(f, *arrays, atol=1e-6):
    """Check that f with its attention replaced returns what f returns. Return that."""
    out = run_replaced(f, *arrays)
    assert_close(out, jax.jit(f)(*arrays), atol=atol)
    return out


# program: words that the report must contain
FOUND = {
    Program(): "scale 0.5",
    Program(order="hbnt", scale="root"): "scale 0.57735",
    Program(heads="grouped", mask="tril"): "causal",
    Program(heads="repeated", mask="iota"): "causal",
    Program(heads="folded", mask="constant"): "causal from position 1",
    Program(heads="vmapped", mask="window"): "window (3, 1)",
    Program(heads="keys_first", mask="distance"): "window (2, 2)",
    Program(scale="array", cap="tanh"): "soft cap 3, traced scale",
    Program(scale="after", cap="tanh"): "soft cap 3",
    Program(mask="padding"): "mask of queries or keys, rows that see no key give the mean",
    Program(mask="padding", hiding="added"): "bias of queries or keys",
    Program(mask="causal_padding"): "causal, mask of queries or keys, rows that see no key",
    Program(mask="causal_padding", hiding="added"): "all logits as numbers if some row sees no key",
    Program(mask="segments"): "segments",
    Program(mask="dense", hiding="where_not"): "an array as mask",
    Program(mask="blocks"): "mask_fn",
    Program(mask="tril", low=-1e4): "score_fn",
    Program(bias="alibi"): "score_fn",
    Program(bias="dense"): "an array as bias",
    Program(bias="both"): "an array as bias, score_fn",
    Program(softmax="plain", mask="tril", hiding="multiplied"): "causal",
    Program(softmax="lse", mask="tril"): "causal",
    Program(softmax="log_softmax"): "scale 0.5",
    Program(softmax="exp2", mask="tril"): "causal",
    Program(softmax="no_max"): "scale 0.5",
    Program(softmax="late"): "scale 0.5",
    Program(softmax="reciprocal"): "scale 0.5",
    Program(softmax="sink", mask="causal_padding", heads="grouped"): "causal, mask of queries",
    Program(softmax="sink", mask="empty_row", hiding="added", bias="both"): "an array as bias",
    Program(softmax="sink_first", mask="dense_empty", cap="tanh", low=-np.inf): "sinks, soft cap 3",
    Program(softmax="sink_added", mask="padding"): "mask of queries or keys, sinks",
    Program(softmax="one_added", mask="tril"): "causal, sinks",
    Program(softmax="sink_in_log", mask="causal_padding"): "causal, mask of queries or keys, sinks",
    Program(after="head_factor"): "scale 0.5",
    Program(after="head_einsum", mask="counted"): "causal",
    Program(after="zeros", mask="padding"): "mask of queries or keys",
    Program(after="nan_to_num", mask="empty_row", low=-np.inf): "mask of queries or keys",
    Program(after="nan_to_num", mask="dense_empty", bias="both", low=-np.inf): "an array as mask",
    Program(after="nan_and_zeros", mask="empty_row", low=-np.inf): "mask of queries or keys",
    Program(nesting="scan_mask", mask="causal_padding"): "causal, mask of queries or keys",
    Program(nesting="remat", mask="tril"): "causal",
    Program(nesting="cond", mask="tril"): "causal",
    Program(nesting="loop", mask="tril"): "causal",
    Program(nesting="vmap", mask="tril"): "causal",
}


def spelled(program):
    """Return the choices of a program that are not the usual ones."""
    usual = dataclasses.asdict(Program())
    chosen = dataclasses.asdict(program).items()
    return "-".join(f"{name}={x}" for name, x in chosen if x != usual[name]) or "usual"


@pytest.mark.parametrize("program", FOUND, ids=spelled)
def test_what_is_found(program):
    report = find(program, make_arrays())
    assert report.replaced and not report.left
    assert all(FOUND[program] in str(place) for place in report.replaced), report


HALF_ULP = 2.0**-24  # of a float64 from 2^29 to 2^30, where 1e9 is


def assert_same(program, arrays, limit=1e-9):
    """Compare a replaced program with the original: results, and gradients that are finite there.

    They are equal to `limit` times the largest number of each array. Or the program adds -1e9 to
    logits, so that each logit of a row that sees no key is rounded by 1e-7 and not by 1e-16. Then
    the replaced one is compared with the program in exact arithmetic. Each element may be off by
    what errors of `most_roundings` half units in those logits change at most, to first order, and
    by `limit`. The second order is 1e-14.

    A program that subtracts no maximum gives 0 / 0 in rows that see no key. The same function with
    a maximum is the original then.
    """
    replaced = replace(program, strict=True)
    if getattr(program, "softmax", None) == "no_max":
        program = dataclasses.replace(program, softmax="plain")
    before = run(program, arrays)
    after = run(replaced, arrays)
    bounds = [limit * np.abs(x[np.isfinite(x)]).max(initial=1e-3) for x in before]
    are_close = [
        np.all(errors_of(*x) <= bound) for *x, bound in zip(after, before, bounds, strict=True)
    ]
    if all(are_close):
        return
    truth = exact_numbers(program, arrays)
    for x, y, change, bound in zip(
        after, truth, changes_by_rounding(program, arrays), bounds, strict=True
    ):
        assert np.all(errors_of(x, y) <= change + bound)


def run(f, arrays):
    """Return the results and gradients of f; NaN where gradients are not finite."""
    results, gradients = jax.jit(results_and_gradients(f))(arrays)
    gradients = [np.where(np.isfinite(x), x, np.nan) for x in jax.tree.leaves(gradients)]
    return [*map(np.asarray, results), *gradients]


def errors_of(x, truth):
    """Return the differences where the truth is not NaN; infinity if x alone is NaN."""
    error = np.where(np.isnan(truth) | (x == truth), 0, np.abs(x - truth))
    return np.where(np.isnan(error), np.inf, error)


def exact_numbers(program, arrays):
    """Return the results and gradients of a program without rounding."""
    return [exact.to_float(x) for x in exact.evaluate(results_and_gradients(program), arrays)]


def most_roundings(program):
    """Return how often a replaced call may round a logit near -1e9. The program itself does once.

    The call adds biases of keys or heads to the number that hides, adds that to the product, adds a
    bias of pairs, and multiplies with log(2) / log(2) for exp2. Subtracting the maximum is exact
    between numbers that differ by less than a factor of 2 (Sterbenz).
    """
    of_pairs = program.bias in ("dense", "both")
    of_keys = program.bias in ("keys", "heads", "both", "alibi")
    return 1 + of_pairs + of_keys + (program.softmax == "exp2")


def changes_by_rounding(program, arrays):
    """Return how much rounding near -1e9 can change each result and gradient, to first order."""
    assert program.low == -1e9 and program.hiding in ("added", "multiplied")

    def numbers(errors):
        return jax.tree.leaves(results_and_gradients(program)({**arrays, "errors": errors}))

    derivatives = jax.jit(jax.jacfwd(numbers))(jnp.zeros((2, B, N, T, S)))  # of two evaluations
    changes = []
    for x in derivatives:
        change = np.abs(x).sum(axis=tuple(range(-5, 0)))
        changes.append(HALF_ULP * most_roundings(program) * np.nan_to_num(change))
    return changes


# Spellings that together have each choice that changes the call, and rows that see no key.
FAST = (
    Program(heads="folded", scale="array", cap="tanh", mask="constant", bias="alibi"),
    Program(heads="grouped", mask="causal_padding", hiding="added", nesting="scan_mask"),
    Program(order="tbnh", mask="dense", bias="both", softmax="late", after="head_einsum"),
    Program(mask="empty_row", hiding="added", low="min", softmax="exp2", nesting="remat"),
    Program(mask="tril", bias="both", nesting="vmap"),
    Program(softmax="sink", mask="empty_row", nesting="scan"),
)


@pytest.mark.parametrize("program", few((*FAST, *FOUND), FAST), ids=spelled)
def test_same_function(program):
    with jax.enable_x64(True):
        assert_same(program, make_arrays("float64"))


def programs():
    """Return a strategy of programs, one in eight of them a decoy."""
    choices = {name: st.sampled_from(values) for name, values in CHOICES.items()}
    choices["decoy"] = st.sampled_from((*[None] * 7 * len(DECOYS), *DECOYS))
    return st.builds(Program, **choices).map(_with_its_decoy)


def _with_its_decoy(program):
    """Return the program with a softmax in which its decoy can be: jax.nn's has no other sum."""
    return dataclasses.replace(program, softmax="plain") if program.decoy else program


@settings(max_examples=5, deadline=None, derandomize=True, database=None)
@given(programs())
def test_random_programs_are_replaced_or_left_with_a_reason(program):
    report = find(program, make_arrays())
    assert report.left or report.replaced and program.decoy is None


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(programs())
def test_random_programs_are_the_same_function(program):
    with jax.enable_x64(True):
        arrays = make_arrays("float64")
        report = find(program, arrays)
        if report.replaced:
            assert program.decoy is None
            assert_same(program, arrays)
        else:
            assert report.left


REASONS = {
    "wrong_axis": "divided by something that depends on the keys",
    "twice": "another product uses the same logits or probabilities",
    "returned": r"used by `reduce_sum` at .*attention_programs.py",
    "other_sum": "not divided by their sum over the keys",
    "values": "pass through `sort`",
    "transposed": "not made of a product",
    "zeros_after": "hides other keys than the mask before it",
}


@pytest.mark.parametrize("decoy", DECOYS)
@pytest.mark.parametrize("softmax", ["jax", "plain"])
def test_decoys_are_left(decoy, softmax):
    if decoy == "other_sum" and softmax == "jax":
        pytest.skip("the sum is inside jax.nn.softmax")
    program = Program(softmax=softmax, decoy=decoy)
    arrays = make_arrays()
    report = find(program, arrays)
    assert report.left and not report.replaced
    if softmax == "plain":
        assert re.search(REASONS[decoy], str(report)), report
    for place in report.left:
        file, line = place.source.rsplit(":", 1)
        assert file.endswith("attention_programs.py") and int(line) > 0
    with pytest.raises(ValueError, match="replaced nothing"):
        jax.eval_shape(replace(program, strict=True), arrays)


def plain(q, k, v):
    """Return causal attention of B T N H."""
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
    visible = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(visible, logits, -1e9))
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def qkv(length=16, dtype="float32"):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(1, length, 2, 4)).astype(dtype)) for _ in range(3)]


def qkv_of_one_head(length=16, dtype="float32"):
    """Return query, key and value of T H."""
    return [jnp.asarray(np.asarray(x)[0, :, 0]) for x in qkv(length, dtype)]


@pytest.mark.parametrize("first, last, is_left", [(0, -1, True), (3, 1, True), (-9, -9, False)])
def test_a_window_without_keys(first, last, is_left):
    """Key - query from 3 to 1 hides all keys, as no window of memeff does; -9 is in no row."""
    q, k, v = qkv(8)

    def attend(q):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k)
        distance = jnp.arange(8) - jnp.arange(8)[:, None]
        logits = jnp.where((first <= distance) & (distance <= last), logits, -1e9)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)

    report = find(attend, q)
    assert bool(report.left) == is_left and bool(report.replaced) != is_left
    assert ("hides all keys from all queries" in str(report)) == is_left
    out, expected = jax.jit(lambda q: (replace(attend)(q), attend(q)))(q)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-6)


def test_small_attention_is_left():
    report = memeff.find_attention(plain, *qkv())
    (place,) = report.left
    assert f"T x S = 16 x 16 is less than min_logits={MIN_LOGITS}" in place.reason
    one_query = memeff.find_attention(
        lambda q, k, v: plain(q[:, :1], k, v), *qkv(2**15), min_logits=0
    )
    assert "one query only" in one_query.left[0].reason
    one_key = memeff.find_attention(lambda q, k, v: plain(q, k[:, :1], v[:, :1]), *qkv())
    assert "one key only" in one_key.left[0].reason


def test_derivative_inside_is_refused():
    gradient = jax.grad(lambda q, k, v: plain(q, k, v).sum())
    with pytest.raises(ValueError, match=r"write jax.grad\(replace_attention\(f\)\)"):
        replace(gradient)(*qkv())
    assert "replace attention before" in str(find(gradient, *qkv()))


def test_arguments():
    q, k, v = qkv()

    def attend(arrays, *, flip: bool, name: str, scale=1.0):
        assert isinstance(flip, bool) and isinstance(name, str)
        out = plain(arrays["q"] * scale, arrays["k"], v)
        return {name: out[::-1] if flip else out}

    replaced = replace(attend, strict=True)
    arrays = {"q": q, "k": k}
    out = replaced(arrays, flip=False, name="x", scale=2.0)
    np.testing.assert_allclose(out["x"], plain(2.0 * q, k, v), atol=1e-6)
    assert replaced.__name__ == "attend"
    signs = replace(lambda x, zero: plain(x, k, v) * np.copysign(1, zero))
    np.testing.assert_array_equal(signs(q, 0.0), -signs(q, -0.0))
    with pytest.raises(TypeError, match="must be arrays or hashable"):
        replaced(arrays, flip=False, name={1, 2})
    with pytest.raises(TypeError, match="takes a function, got int"):
        memeff.replace_attention(3)
    for wrong in (None, np.nan):
        with pytest.raises(
            TypeError, match=rf"min_logits must be a number of pairs .* got {wrong}"
        ):
            find(plain, *qkv(), min_logits=wrong)


def test_errors_of_the_function_name_it():
    def decide(q, k, v):
        return q if plain(q, k, v).sum() > 0 else k

    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"tracing the function decide"):
        replace(decide)(*qkv())


def test_higher_derivatives():

    def second(f, q, k, v):
        g = jax.grad(lambda q: jnp.sin(f(q, k, v)).sum())
        return jax.jvp(g, (q,), (jnp.cos(q),))

    @jax.jit
    def both(q, k, v):
        return second(plain, q, k, v), second(replace(plain), q, k, v)

    expected, found = both(*qkv(5))
    assert_close(found, expected, atol=1e-5)


def test_narrow_floats():
    q, k, v = qkv(dtype="bfloat16")

    def attend(q, k, v):
        wide = [x.astype(jnp.float32) for x in (q, k)]
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", *wide) / 2)
        return jnp.einsum("bnts,bsnh->btnh", weights.astype(v.dtype), v)

    out = replace(attend, strict=True)(q, k, v)
    assert out.dtype == jnp.bfloat16
    error = np.abs(np.float32(out) - np.float32(attend(q, k, v))).max()
    assert error < 2e-2
    assert "bfloat16" in str(find(attend, q, k, v))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_precision_that_is_the_default_of_its_operands(dtype):
    """jax.nn asks for products of 16 bits that are added in float32, of the first product alone."""
    arrays = qkv(dtype=dtype)
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    out = run_replaced(attend, *arrays)
    error = np.abs(np.float32(out) - np.float32(attend(*arrays))).max()
    assert out.dtype == dtype and error < 2e-2

    def high(q, k, v):
        s = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    assert "have different precisions" in find(high, *arrays).left[0].reason


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "uint8"])
def test_positions_that_their_dtype_does_not_hold(dtype):
    """Above 256, bfloat16 rounds positions and 8 bits count from 0 again."""
    q, k, v = qkv_of_one_head(300)

    def attend(q, k, v):
        positions = lax.iota(dtype, 300)
        logits = jnp.where(positions[:, None] == positions, q @ k.T, -1e9)
        return jax.nn.softmax(logits) @ v

    expected = attend(q, k, v)
    assert jnp.abs(expected - v).max() > 0.1  # some query sees another key than its own
    np.testing.assert_allclose(run_replaced(attend, q, k, v), expected, atol=1e-5)


NUMBERS = np.arange(600)


@pytest.mark.parametrize(
    "rows, columns, words",
    [
        (NUMBERS[3:11, None], NUMBERS[:9], "causal from position 3"),
        (NUMBERS[3:11, None].astype("int16"), NUMBERS[None, :9].astype("int8"), "causal"),
        (NUMBERS[8:0:-1, None], NUMBERS[:9], "mask_fn"),
        (NUMBERS[3:11, None], NUMBERS[:9] ** 2, "mask_fn"),
        (NUMBERS[250:258, None], NUMBERS[250:259].astype("uint8"), "mask_fn"),
    ],
)
def test_positions_that_are_constants(rows, columns, words):
    def attend(q, k, v):
        visible = jnp.greater_equal(rows, columns).reshape(8, 9)
        return jax.nn.softmax(jnp.where(visible, q @ k.T, -1e9)) @ v

    x = qkv_of_one_head()[0]
    arrays = x[:8], x[1:10], x[2:11]
    (place,) = find(attend, *arrays).replaced
    assert words in str(place)
    assert_replaced(attend, *arrays)


LARGE_NUMBERS = (np.inf, -np.inf, np.nan, 3e9, -3.7, 2.5)


def test_numbers_that_a_cast_to_integers_cannot_hold_are_those_of_xla():
    """A window of an infinite number of tokens is no window."""

    def cast(zero):
        numbers = [zero + x for x in LARGE_NUMBERS]
        return [[x.astype(dtype) for x in numbers] for dtype in ("int32", "uint32", "int8")]

    jaxpr = jax.make_jaxpr(lambda: cast(lax.full((), 0.0) * 1))()
    read = [known_number(x) for x in Graph(jaxpr, ()).results]
    np.testing.assert_array_equal(read, jax.tree.leaves(jax.jit(cast)(jnp.float32(0))))

    def attend(x):
        window = jnp.exp(jnp.full((), 100.0)).astype(jnp.int32)
        distance = jnp.arange(16)[:, None] - jnp.arange(16)
        return jax.nn.softmax(jnp.where(distance < window, x @ x.T, -jnp.inf)) @ x

    x = qkv_of_one_head()[0]
    assert_replaced(attend, x)


@pytest.mark.parametrize("bias_dims, words", [("a1nts", "mask_fn"), ("11nts", "segments")])
def test_segments_that_differ_along_an_axis_that_becomes_heads(bias_dims, words):
    """The bias chooses the axes of heads, and segments are ids of batch entries alone."""
    sizes = dict(zip("abnts", (2, 3, 2, 8, 8), strict=True))
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 3, 2, 8, 4)).astype("float32")
    bias = rng.normal(size=[sizes.get(x, 1) for x in bias_dims]).astype("float32")
    ids = np.sort(rng.integers(0, 3, (2, 3, 1, 8)))

    def attend(q, k, v, bias, ids):
        same = ids[..., :, None] == ids[..., None, :]
        s = jnp.einsum("abnth,abnsh->abnts", q, k) + bias
        weights = jax.nn.softmax(jnp.where(same, s, -jnp.inf))
        return jnp.einsum("abnts,abnsh->abnth", weights, v)

    arrays = q, k, v, bias, ids
    assert words in str(find(attend, *arrays).replaced)
    assert_replaced(attend, *arrays, atol=1e-5)


def low_of_float32(s, visible):
    return jnp.where(visible, s.astype(jnp.float32), jnp.finfo("float32").min).astype("bfloat16")


def low_in_float16(s, visible):
    return jnp.where(visible, s, -1e30).astype("float16")


def added_in_float16(s, visible):
    return (s + jnp.where(visible, 0, -1e9)).astype("float16")


@pytest.mark.parametrize("logits", [low_of_float32, low_in_float16, added_in_float16])
def test_a_mask_that_a_cast_makes_infinite(logits):
    q, k, v = qkv_of_one_head()
    visible = jnp.tril(jnp.ones((16, 16), bool), -1)  # query 0 sees no key

    def attend(q, k, v, visible):
        return jax.nn.softmax(logits(q @ k.T, visible)).astype(v.dtype) @ v

    expected = attend(q, k, v, visible)
    assert jnp.isnan(expected[0]).all() and not jnp.isnan(expected[1:]).any()
    out = run_replaced(attend, q, k, v, visible)
    np.testing.assert_allclose(out, expected, atol=3e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_in_the_place_of_hidden_logits(dtype):
    q, k, v = qkv_of_one_head(dtype=dtype)

    def attend(q, k, v):
        visible = jnp.arange(16)[:, None] != 3
        return jax.nn.softmax(jnp.where(visible, q @ k.T, jnp.nan)) @ v

    isnan = np.isnan(run_replaced(attend, q, k, v))
    assert (isnan == np.isnan(jax.jit(attend)(q, k, v))).all() and isnan.any() and not isnan.all()


def test_branches_of_platforms():
    """A branch for other devices may not compile here."""

    def for_tpu(q, k, v):
        return pl.pallas_call(lambda q, o: None, out_shape=q)(q)

    def attend(q, k, v):
        return lax.platform_dependent(q, k, v, tpu=for_tpu, default=plain)

    out = run_replaced(attend, *qkv())
    np.testing.assert_allclose(out, jax.jit(plain)(*qkv()), atol=1e-6)


def test_bias_of_shifted_distances():
    """Transformer-XL shifts rows by a padded reshape, which no index follows."""
    q, k, v = qkv_of_one_head()

    def attend(q, k, v):
        T, H = q.shape
        distances = jnp.sin(jnp.arange(2 * T)[:, None] * (1 + jnp.arange(H)))
        shifted = jnp.pad(q @ distances.T, ((0, 0), (1, 0))).reshape(2 * T + 1, T)[1:]
        return jax.nn.softmax(q @ k.T + shifted.reshape(T, 2 * T)[:, :T]) @ v

    assert "an array as bias" in str(find(attend, q, k, v))
    assert_replaced(attend, q, k, v, atol=1e-5)


def test_dropout_has_the_same_bits():
    def attend(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        keep = jax.random.bernoulli(key, 0.7, weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.7, 0), v)

    def shared(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        keep = jax.random.bernoulli(key, 0.7, (1, 1, *weights.shape[2:]))
        weights = weights * (keep.astype(weights.dtype) / 0.7)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    key = jax.random.key(3)
    for f in (attend, shared):
        assert_replaced(f, key, *qkv(), atol=1e-5)

    def other_order(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->btns", q, k))
        keep = jax.random.bernoulli(key, 0.7, weights.shape)
        return jnp.einsum("btns,bsnh->btnh", jnp.where(keep, weights / 0.7, 0), v)

    assert "another order of axes" in find(other_order, key, *qkv()).left[0].reason

    def of_keys(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        keep = jax.random.bernoulli(key, 0.7, (*weights.shape[:2], 1, weights.shape[3]))
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.7, 0), v)

    assert "are shared by other axes" in find(of_keys, key, *qkv()).left[0].reason

    def inverse(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        drop = jax.random.bernoulli(key, 0.3, weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(drop, 0, weights / 0.7), v)

    assert "is not one jax.random.bernoulli" in find(inverse, key, *qkv()).left[0].reason

    def of_float32(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        keep = jax.random.bernoulli(key, jnp.float32(0.7), weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.7, 0), v)

    def rows_cut(key, q, k, v):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        keep = jax.random.bernoulli(key, 0.7, weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.7, 0)[:, :, 1:], v)

    def sink_dropped(key, q, k, v):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k)
        weights = jax.nn.softmax(jnp.pad(logits, [(0, 0)] * 3 + [(0, 1)]))
        keep = jax.random.bernoulli(key, 0.7, weights.shape)
        return jnp.einsum("bnts,bsnh->btnh", jnp.where(keep, weights / 0.7, 0)[..., :-1], v)

    for f in (rows_cut, sink_dropped):
        assert "for more rows or columns than are used" in find(f, key, *qkv()).left[0].reason

    with jax.enable_x64(True):
        assert "with the bits of float32 under x64" in find(of_float32, key, *qkv()).left[0].reason


def uniform_of(key, shape, difference, shift):
    """Return the equations of jax.random.uniform, with a difference and a shift of your own."""
    bits = shift(jax.random.bits(key, shape), jnp.full(shape, 9, "uint32")) | np.uint32(0x3F800000)
    floats = difference(lax.bitcast_convert_type(bits, jnp.float32), 1.0)
    return jnp.maximum(0.0, floats * 1.0 + 0.0)


SHIFT = lax.shift_right_logical


@pytest.mark.parametrize(
    "difference, shift, keep_rate, reason",
    [
        (lax.sub, SHIFT, 0.7, None),
        (lambda x, y: y - x, SHIFT, 0.7, "is not one jax.random.bernoulli"),
        (lax.sub, lambda x, y: SHIFT(y, x), 0.7, "is not one jax.random.bernoulli"),
        (lax.sub, SHIFT, 0.0, "keeps 0 of the probabilities"),
        (lax.sub, SHIFT, 1.5, "keeps 1.5 of the probabilities"),
        (lax.sub, SHIFT, np.nan, "keeps nan of the probabilities"),
    ],
)
def test_dropout_that_is_almost_a_bernoulli(difference, shift, keep_rate, reason):
    def attend(key, x):
        weights = jax.nn.softmax(x @ x.T)
        keep = uniform_of(key, weights.shape, difference, shift) < keep_rate
        return jnp.where(keep, weights, 0) @ x

    report = find(attend, jax.random.key(0), qkv_of_one_head()[0])
    assert len(report.replaced) == (reason is None)
    assert reason is None or reason in report.left[0].reason


def test_rows_that_see_no_key_beside_dropout():
    """Dropout leaves some of the values to a row that sees no key, and not the mean of all."""
    q, k, v = (jnp.concatenate([x, -x]) for x in qkv())
    visible = jnp.arange(k.shape[1]) < jnp.array([[k.shape[1]], [0]])
    visible_rows = jnp.arange(q.shape[1]) < jnp.array([[q.shape[1]], [0]])
    of_keys = visible[:, None, None]
    of_pairs = of_keys & visible_rows[:, None, :, None]

    def attend(q, k, v):
        outs = []
        for mask, low in ((of_keys, -1e9), (of_pairs, float(jnp.finfo(q.dtype).min))):
            logits = jnp.where(mask, jnp.einsum("btnh,bsnh->bnts", q, k), low)
            keep = jax.random.bernoulli(jax.random.key(3), 0.7, logits.shape)
            weights = jnp.where(keep, jax.nn.softmax(logits) / 0.7, 0)
            outs.append(jnp.einsum("bnts,bsnh->btnh", weights, v))
        return outs

    assert len(find(attend, q, k, v).replaced) == 2
    arrays = {"q": q, "k": k, "v": v}
    actual, expected = (
        jax.jit(results_and_gradients(lambda arrays, f=f: f(**arrays)))(arrays)
        for f in (replace(attend), attend)
    )
    assert_close(actual, expected, atol=1e-5)


def test_custom_derivatives_are_left():
    @jax.custom_vjp
    def attend(q, k, v):
        return plain(q, k, v)

    attend.defvjp(lambda *x: (plain(*x), x), lambda x, d: (d, d, d))
    (place,) = find(attend, *qkv()).left
    assert "a function with a derivative of its own" in str(place)

    def stopped(q, k, v):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k)
        weights = jnp.exp(logits) / lax.stop_gradient(jnp.exp(logits).sum(-1, keepdims=True))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    assert not find(stopped, *qkv()).replaced


def test_check_refuses_traced_arrays():
    with pytest.raises(TypeError, match="check=True compares numbers"):
        jax.jit(replace(plain, check=True))(*qkv())


# Spellings with rows that see no key, score functions, dropout-free factors, and bodies of loops.
CHECKED = (
    Program(mask="constant", bias="alibi", cap="tanh", softmax="exp2", nesting="remat"),
    Program(mask="empty_row", hiding="added", softmax="sink", nesting="scan_mask"),
)


@pytest.mark.parametrize("program", few((*CHECKED, *FOUND), CHECKED), ids=spelled)
def test_check(program):
    replace(program, check=True)(make_arrays())


def test_check_allows_the_rounding_of_a_program_with_two_dtypes():
    """The product of float32 is rounded before float64 is added; memeff does not round it."""

    def attend(q, k, v, bias):
        return jax.nn.softmax(q @ k.T + bias) @ v

    def in_float32(q, k, v, bias):
        s = (q @ k.T).astype(jnp.float64) + bias
        return jax.nn.softmax(s.astype(jnp.float32)).astype(v.dtype) @ v

    with jax.enable_x64(True):
        arrays = qkv_of_one_head()
        for f, dtype in ((attend, "float32"), (in_float32, "float64")):
            q, k, v = (x.astype(dtype) for x in arrays)
            replace(f, check=True, strict=True)(q, k, v, jnp.zeros((16, 16)))


def test_check_allows_the_rounding_of_large_logits():
    q, k, v = qkv(48)
    replace(plain, check=True, strict=True)(3e6 * q, k, v)


def test_a_sum_of_terms_of_16_bits_under_strict_promotion():
    def attend(q, k, v, bias):
        s = jnp.einsum("btnh,bsnh->bnts", q, k) + bias[None, None, None]
        s = jnp.where(s > 3, s, jnp.bfloat16(1)) + bias[None, None, None]
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    with jax.numpy_dtype_promotion("strict"):
        new = replace(attend, strict=True)
        bias = jnp.ones(16, jnp.bfloat16)
        assert jax.eval_shape(new, *qkv(dtype="bfloat16"), bias).dtype == jnp.bfloat16


def test_jax_checks_the_programs_of_replaced_attention():
    """The parts of a program that are left as written have names of no other program."""
    with jax.enable_checks(True):
        actual = result_and_gradients(replace(plain, strict=True), qkv())
    expected = result_and_gradients(plain, qkv())
    assert_close(actual, expected, atol=1e-5)


def test_check_finds_a_mask_that_was_read_wrongly(monkeypatch):
    right = assignment._window

    def window(low, high):
        q_offset, (left, _) = right(low, high)
        return q_offset, (left, 1)

    monkeypatch.setattr(assignment, "_window", window)
    place = r"attention at .*test_replace_attention.py:\d+ differs from the original by"
    with pytest.raises(AssertionError, match=f"check=True: the {place}.* in batch entry 0, query"):
        replace(plain, check=True)(*qkv())


def test_check_finds_a_call_that_is_computed_wrongly(monkeypatch):
    def wrong(implementation, query, key, value, **kwargs):
        def attend(*arrays, **options):
            return 1.01 * memeff.dot_product_attention(*arrays, **options)

        return memeff.audit(attend, query, key, value, **kwargs)

    monkeypatch.setattr(check, "audit", wrong)
    with pytest.raises(AssertionError, match=r"\.py:\d+ is computed with an error beyond rounding"):
        replace(plain, check=True)(*qkv())


@pytest.mark.slow
def test_check_takes_no_array_of_all_pairs():
    """Logits of 32,768 tokens would take 8 GiB."""
    q, k, v = qkv(32768)
    memeff.replace_attention(plain, check=True)(q, k, v)


def test_shard_map():
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("batch")
    attend = jax.shard_map(plain, mesh=mesh, in_specs=spec, out_specs=spec)
    assert "causal" in str(find(attend, *qkv()))
    out = run_replaced(attend, *qkv())
    np.testing.assert_allclose(out, jax.jit(plain)(*qkv()), atol=1e-6)


def test_shard_map_with_positions_of_devices():
    """A mask compares positions that vary over devices with others that do not."""
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.PartitionSpec(None, "seq")

    def attend(q, k, v):
        k, v = (lax.all_gather(x, "seq", axis=1, tiled=True) for x in (k, v))
        positions = lax.axis_index("seq") * q.shape[1] + jnp.arange(q.shape[1])
        visible = positions[:, None] >= jnp.arange(k.shape[1])
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(visible, logits, -1e9))
        return jnp.einsum("bnts,bsnh->btnh", weights, v)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)
    out = run_replaced(sharded, *qkv())
    np.testing.assert_allclose(out, jax.jit(plain)(*qkv()), atol=1e-6)


def test_numbers_among_the_results_keep_their_weak_type():
    out, number = replace(lambda *arrays: (plain(*arrays), 2.0), strict=True)(*qkv())
    assert number.weak_type and (number * out.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_arrays_of_weak_type_among_the_results():
    """They are closed over: an array, and a number that an outer jit traces."""
    array = jax.jit(lambda: lax.broadcast(2.0, (3,)))()
    assert array.weak_type

    @jax.jit
    def run(number):
        return replace(lambda *arrays: (plain(*arrays), array, number))(*qkv())[1:]

    array_out, number_out = run(2.0)
    assert array_out.weak_type and array_out.shape == (3,)
    assert number_out.weak_type and number_out == 2


def layers(count):
    """Return a function of count layers, written out one after the other."""

    def model(x, weights):
        for w in weights:
            q, k, v = jnp.split((x @ w).reshape(1, -1, 2, 12), 3, -1)
            x = x + plain(q, k, v).reshape(x.shape)
        return x

    weights = [jnp.ones((8, 24))] * count
    return model, jnp.ones((256, 8)), weights


def test_cost_of_tracing():
    """Each equation is visited once, and the call of equal layers is traced once."""
    model, x, weights = layers(24)
    jaxpr = jax.make_jaxpr(model)(x, weights)
    search = Search(jaxpr, 0)
    scope = search.scope(jaxpr)
    assert len(scope.replaced) == 24
    assert len({r.recipe for r in scope.replacements}) == 1
    assert search.visited == len(scope.graph.equations)

    def body(x, w):
        return model(x, [w]), None

    def scanned(x, weights):
        x, _ = lax.scan(body, x, jnp.stack(weights))
        return lax.scan(body, x, jnp.stack(weights))[0]

    twice = jax.make_jaxpr(scanned)(x, weights)
    search = Search(twice, 0)
    search.scope(twice)
    single = jax.make_jaxpr(lambda x, w: lax.scan(body, x, jnp.stack(w))[0])(x, weights)
    once = Search(single, 0)
    once.scope(single)
    assert search.visited < 1.9 * once.visited


STEPS = {  # of x, which a program repeats where it computes the array of this name
    "scale": lambda x: x * jnp.sin(x),
    "logits": lambda x: x * jnp.sin(x),
    "sum of logits": lambda x: x + x,
    "bias": lambda x: x * jnp.sin(x),
    "positions": lambda x: x + x % 7,
    "mask": lambda x: x | ~x & jnp.roll(x, 1, 0),
    "mask of positions": lambda x: x | ~x & (lax.iota("int32", 16) < 3),
    "maximum": lambda x: jnp.maximum(x, x * 0.9),
    "sum": lambda x: x * jnp.sin(x),
    "logarithm": lambda x: x + x,
}


def repeating(name, times):
    """Return attention that applies a step to one of its arrays many times, one after the other."""

    def repeat(where, x):
        for _ in range(times if where == name else 0):
            x = STEPS[where](x)
        return x

    def attend(q, k, v):
        distance = repeat("positions", jnp.arange(16)[:, None] - jnp.arange(16))
        visible = repeat("mask", repeat("mask of positions", distance >= 0))
        s = repeat("sum of logits", repeat("logits", q @ k.T)) * repeat("scale", q[0, 0])
        s = s + repeat("bias", distance * 0.1)
        s = jnp.where(visible, s, -1e9)
        if name == "logarithm":
            return jnp.exp(s - repeat("logarithm", jax.nn.logsumexp(s, -1, keepdims=True))) @ v
        e = jnp.exp(s - repeat("maximum", s.max(-1, keepdims=True)))
        total = repeat("sum", e.sum(-1, keepdims=True))
        return e / jnp.where(total == 0, 1, total) @ v

    return attend


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("times", [40, 400])
def test_programs_that_use_a_value_twice_or_are_long_are_searched(name, times):
    """A search that followed each use would visit 2^40 values, and recursion ends at 1,000."""
    jaxpr = jax.make_jaxpr(repeating(name, times))(*qkv_of_one_head())
    scope = Search(jaxpr, 0).scope(jaxpr)
    assert scope.replaced or scope.left


def test_the_search_of_a_chain_visits_each_equation_a_few_times(monkeypatch):
    visited = []

    def counted(value, known_number=axes.known_number):
        visited.append(value)
        return known_number(value)

    monkeypatch.setattr(axes, "known_number", counted)
    counts = []
    for length in (100, 200):

        def attend(x, length=length):
            rows = jnp.arange(16.0)[:, None]
            for n in range(length):
                rows = rows + jnp.float32(n)
            return jax.nn.softmax(jnp.where(jnp.arange(16) < rows, x @ x.T, -1e9)) @ x

        visited.clear()
        assert find(attend, qkv_of_one_head()[0]).replaced
        counts.append(len(visited))
    assert counts[1] < 2.2 * counts[0]


@pytest.mark.once
def test_memory_grows_with_the_length():
    def temp(length):
        model, x, weights = layers(2)
        x = jax.ShapeDtypeStruct((length, 8), x.dtype)
        loss = lambda x, w: memeff.replace_attention(model, strict=True)(x, w).sum()
        return temp_bytes(jax.grad(loss), (x, weights))

    assert temp(8192) <= 2.2 * temp(4096)


def added(s, bias, visible):
    return s + (bias + jnp.where(visible, 0, -1e9))


def replacing(s, bias, visible):
    return jnp.where(visible, s + bias, -1e9)


@pytest.mark.once
@pytest.mark.parametrize("logits,most", [(added, 3), (replacing, 4)])
def test_memory_of_a_bias_of_pairs_beside_a_mask(logits, most):
    """The call for a bias that hides all a row sees shares the bias and its gradient."""
    N, T = 4, 2048

    def attend(q, k, v, table):
        positions = jnp.arange(T)
        bias = table[:, abs(positions[:, None] - positions) // 64]
        visible = positions[:, None] >= positions
        weights = jax.nn.softmax(logits(jnp.einsum("tnh,snh->nts", q, k), bias, visible))
        return jnp.einsum("nts,snh->tnh", weights, v)

    x = jax.ShapeDtypeStruct((T, N, 8), jnp.float32)
    table = jax.ShapeDtypeStruct((N, T // 64), jnp.float32)
    (place,) = memeff.find_attention(attend, x, x, x, table).replaced
    assert place.pair_arrays == (("bias", N * T * T * 4),)
    replaced = memeff.replace_attention(attend, strict=True)
    gradient = jax.grad(lambda *arrays: (replaced(*arrays) ** 2).sum(), (0, 1, 2, 3))
    assert temp_bytes(gradient, (x, x, x, table)) < most * N * T * T * 4


def attend_without_padding(x, ids):
    """Hide padding (id 0) among the queries and among the keys, as packed batches do."""
    is_word = ids > 0
    visible = is_word[:, None] & is_word[None, :] & jnp.tril(jnp.ones((len(ids),) * 2, bool))
    logits = jnp.where(visible, x @ x.T / 3, -1e9)
    return jax.nn.softmax(logits) @ x


def test_padding_of_queries_and_keys_makes_no_array_of_pairs():
    replaced = memeff.replace_attention(attend_without_padding, strict=True)

    def temp(length):
        x = jax.ShapeDtypeStruct((length, 8), jnp.float32)
        ids = jax.ShapeDtypeStruct((length,), jnp.int32)
        return temp_bytes(jax.grad(lambda x, ids: replaced(x, ids).sum()), (x, ids))

    assert temp(8192) <= 2.2 * temp(4096)
    x = np.random.default_rng(0).standard_normal((200, 8))
    x = x.astype(np.float32)
    ids = np.arange(200, dtype=np.int32) % 7 * (np.arange(200) > 5)  # the first rows see no key
    expected = attend_without_padding(x, ids)
    np.testing.assert_allclose(replaced(x, ids), expected, atol=1e-5)


def gates(s, x):
    return s + x["rows"] + x["columns"]


def difference_of_sums(s, x):
    return s + ((1e4 + x["rows"]) - (1e4 + x["columns"]))


def causal_gates(s, x):
    return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s + x["rows"] - x["columns"], -1e9)


def gate_and_padding(s, x):
    return s + x["rows"] + jnp.where(x["columns"] < 1, 0, -1e9)


def pairs_and_padding(s, x):
    return s + jnp.where(x["columns"][:, :1] < 1, x["pairs"], -1e9)


def pairs_and_factor(s, x):
    return s + x["pairs"] * x["rows"][:, :1]


def pairs_and_segments(s, x):
    ids = x["ids"]
    visible = (ids[:, :, None] == ids[:, None])[:, None] & jnp.tril(jnp.ones(s.shape[-2:], bool))
    return jnp.where(visible, s + x["pairs"], -1e9)


def compared_pairs(s, x):
    return jnp.where(x["pairs"] > x["columns"][:, :1], s, -1e9)


OTHER_DIMS = (
    gates,
    difference_of_sums,
    causal_gates,
    gate_and_padding,
    pairs_and_padding,
    pairs_and_factor,
    pairs_and_segments,
    compared_pairs,
)


def attend_with_other_dims(functions, arrays, ids):
    """Return the results of functions of logits by name."""
    results = {}
    for logits in functions:
        x = {**arrays[logits.__name__], "ids": ids}
        weights = jax.nn.softmax(logits(jnp.einsum("btnh,bsnh->bnts", x["q"], x["k"]), x))
        results[logits.__name__] = jnp.einsum("bnts,bsnh->btnh", weights, x["v"])
    return results


def shapes_of_other_dims(T):
    B, N = 2, 3
    tokens = {name: (B, T, N, 4) for name in "qkv"}
    return {**tokens, "rows": (B, N, T, 1), "columns": (B, N, 1, T), "pairs": (1, N, T, T)}


def test_terms_of_other_dims_are_not_added_up_in_an_array_of_all():
    """Terms of [B, N, T, 1], [B, N, 1, S] and [1, N, T, S] stay apart."""
    T = 2048  # more than a tile
    shapes = shapes_of_other_dims(T)
    x = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    arrays = {logits.__name__: x for logits in OTHER_DIMS}
    ids = jax.ShapeDtypeStruct((2, T), jnp.int32)
    attend = functools.partial(attend_with_other_dims, OTHER_DIMS)
    assert len(find(attend, arrays, ids).replaced) == len(OTHER_DIMS)
    loss = lambda *arrays: sum(map(jnp.sum, replace(attend)(*arrays).values()))
    text = str(jax.make_jaxpr(jax.grad(loss))(arrays, ids))
    assert f"[1,3,{T},{T}]" in text
    assert f"[2,3,{T},{T}]" not in text


@pytest.mark.parametrize("logits", few(OTHER_DIMS, [difference_of_sums]), ids=lambda f: f.__name__)
def test_terms_of_other_dims_have_the_numbers_of_the_program(logits):
    rng = np.random.default_rng(0)
    shapes = shapes_of_other_dims(12)
    x = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    ids = jnp.asarray(rng.integers(0, 3, (2, 12)), jnp.int32)

    def attend(x):
        return attend_with_other_dims([logits], {logits.__name__: x}, ids)[logits.__name__]

    actual = result_and_gradients(replace(attend, strict=True), [x])
    expected = result_and_gradients(attend, [x])
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 * max(1, np.abs(y).max()))


def zeros_among_exponentials(s, visible):
    e = jnp.where(visible, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    return e / e.sum(-1, keepdims=True)


def zeros_before_and_after(s, visible):
    return jnp.where(visible, zeros_among_exponentials(s, visible), 0)


def zeros_after_infinity(s, visible):
    return jnp.where(visible, jax.nn.softmax(jnp.where(visible, s, -jnp.inf)), 0)


def zeros_of_jax(s, visible):
    return jax.nn.softmax(s, where=jnp.broadcast_to(visible, s.shape))


def weigh(probabilities, s, visible, v):
    return probabilities(s, visible) @ v


def zeros_before_the_division(s, visible, v):
    s = jnp.where(visible, s, -jnp.inf)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return (jnp.where(visible, e, 0) @ v) / e.sum(-1, keepdims=True)


def zeros_before_the_division_of_numbers(s, visible, v):
    e = jnp.exp(jnp.where(visible, s, -jnp.inf))
    return (jnp.where(visible, e, 0) @ v) / e.sum(-1, keepdims=True)


def zeros_in_product_and_sum(s, visible, v):
    e = jnp.where(visible, jnp.exp(s - s.max(-1, keepdims=True)), 0)
    return (e @ v) / e.sum(-1, keepdims=True)


# a program: what it gives in rows that see no key
ZEROS = {
    functools.partial(weigh, zeros_among_exponentials): np.nan,
    functools.partial(weigh, zeros_before_and_after): 0,
    functools.partial(weigh, zeros_after_infinity): 0,
    functools.partial(weigh, zeros_of_jax): 0,
    zeros_before_the_division: np.nan,
    zeros_before_the_division_of_numbers: np.nan,
    zeros_in_product_and_sum: np.nan,
}


@pytest.mark.parametrize("average", ZEROS)
def test_rows_of_zeros_are_zero_or_nan_as_in_the_program(average):
    """0 / 0 is NaN, and a selection after it makes it 0."""

    def attend(q, k, v, length):
        return average(q @ k.T, jnp.arange(len(k)) < length, v)

    run_both = jax.jit(lambda *x: (replace(attend, strict=True)(*x), attend(*x)))
    for length in (0, 5):
        out, expected = run_both(*qkv_of_one_head(), jnp.int32(length))
        if not length:
            np.testing.assert_array_equal(expected, ZEROS[average])
        np.testing.assert_allclose(out, expected, atol=1e-6)


# Probabilities in which rows are set to 0, in every order among other factors. `sees` is true for
# rows that see a key, and each of the first two is all that makes 0 of NaN.
ROWS_SET_TO_ZERO = (
    lambda p, sees, rows, count: jnp.where(sees, p, 0),
    lambda p, sees, rows, count: jnp.where(~sees, 0, p / count),
    lambda p, sees, rows, count: jnp.where(rows, jnp.nan_to_num(p), 0),
    lambda p, sees, rows, count: jnp.nan_to_num(jnp.where(rows, p, 0)),
    lambda p, sees, rows, count: jnp.where(rows, jnp.where(sees, p, 0) * 2, 0),
    lambda p, sees, rows, count: jnp.where(sees, p, 0) - jnp.where(rows, p, 0) / 2,
    lambda p, sees, rows, count: jnp.where(sees, p, 0) / count,  # 0 / 0 is NaN
)


@pytest.mark.parametrize("low", [-np.inf, -1e9])
def test_rows_are_set_to_zero_by_selections_after_the_softmax(low):
    visible = np.random.default_rng(3).random((16, 16)) < 0.5
    visible[2] = False

    def attend(q, k, v, visible):
        sees = visible.any(-1, keepdims=True)
        rows = jnp.arange(len(q))[:, None] % 3 > 0
        count = visible.sum(-1, keepdims=True)
        results = []
        for change in ROWS_SET_TO_ZERO:
            p = jax.nn.softmax(jnp.where(visible, q @ k.T, low))
            results.append(change(p, sees, rows, count) @ v)
        return jnp.stack(results)

    arrays = *qkv_of_one_head(), jnp.asarray(visible)
    assert not find(attend, *arrays).left
    out = assert_replaced(attend, *arrays, atol=2e-6)
    assert not out[:2, 2].any() and jnp.isnan(out[-1, 2]).all()


def finite_maximum(s):
    highest = s.max(-1, keepdims=True)
    return jnp.where(jnp.isneginf(highest), 0, highest)


def exponentials(s, highest):
    e = jnp.exp(s - highest)
    return e, e.sum(-1, keepdims=True)


def quotient_where_the_sum_is_not_0(s):
    e, total = exponentials(s, finite_maximum(s))
    return jnp.where(total == 0, 0, e / total)


def quotient_by_a_guarded_sum(s, guard=lambda total: jnp.where(total > 0, total, 1)):
    e, total = exponentials(s, finite_maximum(s))
    return e / guard(total)


def guarded_sum_of_nan(s):
    """Subtract -inf from -inf, so that the sum is NaN and not 0."""
    e, total = exponentials(s, s.max(-1, keepdims=True))
    return e / jnp.where(total == 0, 1, total)


# Probabilities of rows whose logits are all -inf are 0, as the logits or their sum tell.
EMPTY_ROWS_BY_LOGITS = (
    lambda s: jnp.where(~jnp.any(~(s == -jnp.inf), -1, keepdims=True), 0, jax.nn.softmax(s)),
    lambda s: jnp.where(jnp.isinf(s).all(-1, keepdims=True), 0, jax.nn.softmax(s) * 2),
    lambda s: jnp.where(s.max(-1, keepdims=True) > -jnp.inf, jax.nn.softmax(s), 0),
    lambda s: jnp.where(jnp.isneginf(s.max(-1, keepdims=True)), 0, jax.nn.softmax(s)) / 3,
    quotient_where_the_sum_is_not_0,
    quotient_by_a_guarded_sum,
    functools.partial(quotient_by_a_guarded_sum, guard=lambda total: jnp.maximum(total, 1e-9)),
    guarded_sum_of_nan,
)


@pytest.mark.parametrize("low", [-np.inf, -1e9])
def test_rows_are_empty_as_the_logits_tell(low):
    visible = np.random.default_rng(3).random((16, 16)) < 0.5
    visible[2] = False

    def attend(q, k, v, visible, bias):
        def logits():
            return jnp.where(visible, q @ k.T + bias, low)

        s = logits()
        e, total = exponentials(s, finite_maximum(s))
        late = e @ v / jnp.where(total == 0, 1, total)
        return jnp.stack([late, *(weigh(logits()) @ v for weigh in EMPTY_ROWS_BY_LOGITS)])

    arrays = *qkv_of_one_head(), jnp.asarray(visible), jnp.zeros(16).at[3].set(-jnp.inf)
    assert not find(attend, *arrays).left
    out = assert_replaced(attend, *arrays, atol=2e-6)
    if low == -np.inf:
        assert not out[:-1, 2].any() and jnp.isnan(out[-1, 2]).all()
    else:
        np.testing.assert_allclose(out[0, 2], arrays[2].mean(0), atol=1e-6)


def test_rows_that_are_empty_as_the_logits_tell_are_checked():
    visible = jnp.tril(jnp.ones((16, 16), bool), -1)

    def attend(q, k, v):
        return quotient_by_a_guarded_sum(jnp.where(visible, q @ k.T, -jnp.inf)) @ v

    out = replace(attend, check=True)(*qkv_of_one_head())
    assert not out[0].any() and not jnp.isnan(out).any()


def test_a_row_of_nan_is_0_where_a_test_of_its_logits_is_false_for_nan():
    def zero(s):
        return jnp.where(s.max(-1, keepdims=True) > -jnp.inf, jax.nn.softmax(s), 0)

    def nan(s):
        return jnp.where(s.max(-1, keepdims=True) == -jnp.inf, 0, jax.nn.softmax(s))

    def attend(q, k, v):
        return jnp.stack([zero(q @ k.T) @ v, nan(q @ k.T) @ v])

    q, k, v = qkv_of_one_head()
    q = q.at[3].set(jnp.nan)
    out = assert_replaced(attend, q, k, v)
    assert not out[0, 3].any() and jnp.isnan(out[1, 3]).all()


def no_maximum(s):
    e, total = exponentials(s, 0.0)
    return e / jnp.where(total == 0, 1, total)


def maximum_of_all_rows(s):
    e, total = exponentials(s, finite_maximum(s).max())
    return e / jnp.maximum(total, 1e-3)


def clamped_maximum(s):
    e, total = exponentials(s, jnp.maximum(s.max(-1, keepdims=True), -1e20))
    return jnp.where(total > 0, e / total, 0)


def sum_of_visible_keys(s):
    visible = jnp.tril(jnp.ones(s.shape, bool))
    e = jnp.where(visible, jnp.exp(s - finite_maximum(s)), 0)
    return e / jnp.maximum(e.sum(-1, keepdims=True), 1e-9)


GUARDED = "perhaps not only in rows that see no key"
USED = "the logits or probabilities are used by"
OTHER_TESTS_OF_LOGITS = (
    (no_maximum, GUARDED),
    (maximum_of_all_rows, GUARDED),
    (clamped_maximum, GUARDED),
    (sum_of_visible_keys, GUARDED),
    (lambda s: jnp.where((s == -jnp.inf).all(-1, keepdims=True), jax.nn.softmax(s), 0), USED),
    (lambda s: jnp.where((s > -5).any(-1, keepdims=True), jax.nn.softmax(s), 0), USED),
    (lambda s: jnp.where((s > -jnp.inf).all(-1, keepdims=True), jax.nn.softmax(s), 0), USED),
    (lambda s: jnp.where(jnp.isfinite(s).any(-1, keepdims=True), jax.nn.softmax(s), 0), USED),
    (lambda s: jnp.where((s == -jnp.inf).all(0)[:, None], 0, jax.nn.softmax(s)), USED),
)


def test_other_tests_of_logits_are_left():
    for weigh, reason in OTHER_TESTS_OF_LOGITS:
        left = find(lambda q, k, v: weigh(q @ k.T) @ v, *qkv_of_one_head()).left  # noqa: B023
        assert len(left) == 1 and reason in left[0].reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_of_16_bits_beside_a_score_function_are_not_rounded(dtype):
    """XLA rounds none of these logits on a CPU, so rounding would add to the error."""

    def attend(q, k, v):
        distance = jnp.abs(jnp.arange(len(q))[:, None] - jnp.arange(len(k))) / 4
        s = q @ k.T - distance.astype(q.dtype)
        return jax.nn.softmax(s.astype(v.dtype)) @ v

    arrays = qkv_of_one_head()
    q, k = (x.astype(dtype) for x in arrays[:2])
    report = find(attend, q, k, arrays[2])
    assert "score_fn" in str(report.replaced[0])
    out = run_replaced(attend, q, k, arrays[2])
    with jax.enable_x64(True):
        truth = attend(*(jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, arrays[2])))
    np.testing.assert_allclose(out, truth, atol=2e-6)


def zeros_by_selection(p, visible):
    return jnp.where(visible, p, 0)


def zeros_by_multiplication(p, visible):
    return p * visible


@pytest.mark.parametrize("zeros", [zeros_by_selection, zeros_by_multiplication])
@pytest.mark.parametrize("bias", [-1e4, 0.5])
def test_rows_of_zeros_beside_a_small_bias_are_zero(zeros, bias):
    def attend(q, k, v, length):
        columns = jnp.arange(len(k))
        visible = columns < length
        s = q @ k.T + jnp.where(columns % 3 == 0, bias, 0)
        return zeros(jax.nn.softmax(jnp.where(visible, s, -1e9)), visible) @ v

    arrays = qkv_of_one_head()
    run_both = jax.jit(lambda *x: (replace(attend, strict=True)(*x), attend(*x)))
    for length in (0, 5):
        out, expected = run_both(*arrays, jnp.int32(length))
        np.testing.assert_allclose(out, expected, atol=1e-6)


def test_sinks_of_other_bases():
    """exp2 of logits and of their sink, in a column and in a sum, and 2 in a sum."""

    def joined(q, k, v, sink):
        s = jnp.concatenate([q @ k.T, jnp.broadcast_to(sink, (len(q), 1))], -1)
        e = jnp.exp2(s - s.max(-1, keepdims=True))
        return (e / e.sum(-1, keepdims=True))[:, :-1] @ v

    def added(q, k, v, sink):
        s = q @ k.T
        highest = jnp.maximum(s.max(-1, keepdims=True), sink)
        e = jnp.exp2(s - highest)
        return (e / (e.sum(-1, keepdims=True) + jnp.exp2(sink - highest))) @ v

    def number(q, k, v, sink):
        e = jnp.exp2(q @ k.T)
        return (e / (2 + e.sum(-1, keepdims=True))) @ v

    arrays = [*qkv_of_one_head(), jnp.float32(1.5)]
    for attend in (joined, added, number):
        assert_replaced(attend, *arrays)


def column_dropped_before_the_product(s, v, sink):
    """As MaxText does: the division follows the product."""
    s = jnp.concatenate([s, jnp.broadcast_to(sink, (len(s), 1))], -1)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e[:, :-1] @ v / e.sum(-1, keepdims=True)


def column_of_log_softmax(s, v, sink):
    s = jnp.concatenate([jnp.broadcast_to(sink, (len(s), 1)), s], -1)
    return jnp.exp(jax.nn.log_softmax(s))[:, 1:] @ v


def added_after_the_product(s, v, sink):
    highest = jnp.maximum(s.max(-1, keepdims=True), sink)
    e = jnp.exp(s - highest)
    return e @ v / (e.sum(-1, keepdims=True) + jnp.exp(sink - highest))


def one_added_after_the_product(s, v, sink):
    e = jnp.exp(s)
    return e @ v * (1 / (1 + e.sum(-1, keepdims=True))) * sink


SINKS_AND_DIVISIONS = (
    column_dropped_before_the_product,
    column_of_log_softmax,
    added_after_the_product,
    one_added_after_the_product,
)


@pytest.mark.parametrize("average", SINKS_AND_DIVISIONS)
def test_a_sink_beside_exponentials_that_no_sum_divides_before_the_product(average):
    def attend(q, k, v, sink):
        visible = jnp.arange(len(k)) > jnp.arange(len(q))[:, None]  # not one in the last row
        return average(jnp.where(visible, q @ k.T, -1e9), v, sink)

    arrays = [*qkv_of_one_head(), jnp.float32(0.5)]
    (place,) = find(attend, *arrays).places
    assert "sinks" in place.found
    actual = result_and_gradients(replace(attend, strict=True), arrays)
    expected = result_and_gradients(attend, arrays)
    assert_close(actual, expected, atol=1e-5)


def sum_without_the_column(e):
    return e[:, :-1].sum(-1, keepdims=True)


def sum_of_half_the_column(e):
    return e.sum(-1, keepdims=True) - e[:, -1:] / 2


@pytest.mark.parametrize("is_everywhere", [True, False])
def test_a_maximum_that_is_rounded_in_one_place_alone_is_left(is_everywhere):
    """exp makes a factor of the rounding, which the softmax and its sink or its sum must share."""

    def attend(q, k, v, z):
        def parts(number):
            s = (q + number) @ k.T
            m = s.max(-1, keepdims=True)
            rounded = m.astype(jnp.bfloat16).astype(m.dtype)
            m = rounded if is_everywhere else m
            e = jnp.exp(s - m)
            return s, m, rounded, e, e.sum(-1, keepdims=True)

        _, _, rounded, e, total = parts(1)
        added = e / (total + jnp.exp(z - rounded))
        s, m, rounded, e, total = parts(2)
        in_log = jnp.exp(s - jnp.log(total + jnp.exp(z - rounded)) - m)
        s, m, rounded, e, total = parts(3)
        summed = jnp.exp(s - (jnp.log(total) + rounded))
        return [p @ v for p in (added, in_log, summed)]

    arrays = (*qkv_of_one_head(), jnp.float32(2))
    report = find(attend, *arrays)
    assert (len(report.replaced), len(report.left)) == ((3, 0) if is_everywhere else (0, 3))
    results = jax.jit(replace(attend))(*arrays)
    assert_close(results, jax.jit(attend)(*arrays), atol=1e-5)


@pytest.mark.parametrize("total", [sum_without_the_column, sum_of_half_the_column])
def test_a_column_that_the_division_after_the_product_lacks_is_left(total):
    def attend(q, k, v):
        s = jnp.concatenate([q @ k.T, jnp.ones((len(q), 1))], -1)
        e = jnp.exp(s)
        return e[:, :-1] @ v / total(e)

    (place,) = find(attend, *qkv_of_one_head()).places
    assert place.reason is not None and "not divided by their sum" in place.reason


def test_a_number_between_two_masks_counts_in_rows_that_see_no_key():
    """A row that sees no key attends to the keys that only the inner mask hides."""

    def attend(q, k, v, length):
        s = jnp.where(jnp.arange(len(k)) < length, q @ k.T, -1e9) + 1000
        visible = jnp.arange(len(q))[:, None] >= jnp.arange(len(k))
        return jax.nn.softmax(jnp.where(visible, s, -1e9)) @ v

    arrays = qkv_of_one_head()
    run_both = jax.jit(lambda *x: (replace(attend, strict=True)(*x), attend(*x)))
    for length in (0, 3):
        out, expected = run_both(*arrays, jnp.int32(length))
        np.testing.assert_allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize("sink", [False, True])
def test_infinite_scores_of_whole_rows(sink):
    """Such a row is NaN, and 0 beside a sink."""

    def attend(q, k, v, temperature):
        s = jnp.where(jnp.arange(len(q))[:, None] > jnp.arange(len(k)), q @ k.T, -jnp.inf)
        s = jnp.pad(s / temperature, ((0, 0), (1, 0)))
        return (jax.nn.softmax(s)[:, 1:] if sink else jax.nn.softmax(s[:, 1:])) @ v

    arrays = *qkv_of_one_head(), jnp.float32(1.3)
    expected = jax.jit(attend)(*arrays)
    assert jnp.isnan(expected[0]).all() != sink
    np.testing.assert_allclose(jax.jit(replace(attend))(*arrays), expected, atol=1e-6)


def mask_replaces(s, visible, low):
    return jnp.where(visible, s, low)


def mask_is_added(s, visible, low):
    return s + jnp.where(visible, 0, low)


@pytest.mark.parametrize(
    "low", few([-1e9, -1e30, float(np.finfo(np.float32).min)], [-1e9, float(np.finfo("f").min)])
)
@pytest.mark.parametrize("hide", [mask_replaces, mask_is_added])
def test_a_temperature_of_masked_logits(hide, low):
    """The logits of a row that sees no key are products, whose rounding exceeds other logits."""

    def attend(q, k, v, temperature, visible):
        return jax.nn.softmax(hide(q @ k.T, visible, low) / temperature) @ v

    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(16, 4)).astype(np.float32) for _ in range(3)]
    visible = np.ones((16, 16), bool)
    visible[3] = False
    dout = rng.normal(size=(16, 4)).astype(np.float32)

    def call(f):
        def both(temperature):
            out, pull = jax.vjp(lambda *x: f(*x, temperature, visible), *arrays)
            return [out, *pull(dout)]

        return jax.jit(both)(jnp.float32(1.3))

    assert_close(call(replace(attend, strict=True)), call(attend), rtol=0, atol=1e-5)


@pytest.mark.parametrize("T, S", few([(6, 8), (9, 6), (8, 8)], [(6, 8)]))
def test_positions_shifted_by_a_reshape_that_mixes_axes(T, S):
    """Transformer-XL shifts its term of positions: it pads a column, and reshapes T x (S + 1)."""

    def attend(q, k, v, positions):
        moved = jnp.pad(q @ positions.T, ((0, 0), (1, 0))).reshape(S + 1, T)[1:].reshape(T, S)
        visible = jnp.tril(jnp.ones((T, S), bool), S - T)
        return jax.nn.softmax(jnp.where(visible, q @ k.T + moved, -1e30)) @ v

    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        q, k, v, positions = (jnp.asarray(rng.normal(size=(n, 4))) for n in (T, S, S, S))
        arrays = {"q": q, "k": k, "v": v, "positions": positions}
        assert_same(lambda arrays: attend(**arrays), arrays)


def test_rows_and_columns_of_images_merged_behind_the_product():
    """Logits of [rows, columns, rows, columns] get biases of rows and of columns, as in SAM."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 4, 5, 6)).astype(np.float32)
    of_rows = rng.standard_normal((4, 5, 4, 1)).astype(np.float32)

    def attend(q, k, v, of_rows):
        s = jnp.einsum("bxyh,buwh->bxyuw", q, k) + of_rows
        return jax.nn.softmax(s.reshape(2, 20, 20)) @ v.reshape(2, 20, 6)

    places = find(attend, q, k, v, of_rows).replaced
    assert [x.sizes for x in places] == [(1, 2, 20, 20)] and not places[0].pair_arrays
    replaced = replace(attend, strict=True)
    expected = jax.jit(attend)(q, k, v, of_rows)
    np.testing.assert_allclose(replaced(q, k, v, of_rows), expected, atol=1e-6)
    gradients = []
    for function in (replaced, attend):
        loss = lambda *args, function=function: jnp.sin(function(*args)).sum()
        gradients.append(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, of_rows))
    assert_close(*gradients, atol=1e-5)


def attend_over_rows_and_columns(x, rows, columns, visible):
    """Attention of an image, [rows, columns, N, H], with vectors for distances, and padded rows."""
    s = jnp.einsum("xynh,uwnh->nxyuw", x, x) / 2
    s += jnp.einsum("xynh,xuh->nxyu", x, rows)[..., None]
    s += jnp.einsum("xynh,ywh->nxyw", x, columns)[..., None, :]
    s = jnp.where(visible[:, None], s, -1e9)
    p = jax.nn.softmax(s.reshape(*s.shape[:3], -1)).reshape(s.shape)
    return jnp.einsum("nxyuw,uwnh->xynh", p, x)


def arrays_of_image(height, width):
    rng = np.random.default_rng(0)
    shapes = [(height, width, 2, 4), (height, height, 4), (width, width, 4)]
    arrays = [jnp.asarray(rng.normal(size=x), jnp.float32) for x in shapes]
    return [*arrays, jnp.arange(height) < height - 1]


def test_distances_of_rows_and_of_columns():
    arrays = arrays_of_image(4, 5)
    (place,) = find(attend_over_rows_and_columns, *arrays).replaced
    assert place.sizes[2:] == (20, 20) and not place.pair_arrays, place

    def loss(f, *arrays):
        return jnp.sin(f(*arrays, arrays_of_image(4, 5)[-1])).sum()

    gradients = []
    for f in (replace(attend_over_rows_and_columns, strict=True), attend_over_rows_and_columns):
        gradient = jax.value_and_grad(functools.partial(loss, f), (0, 1, 2))
        gradients.append(jax.jit(gradient)(*arrays[:3]))
    assert_close(*gradients, atol=1e-4)


def test_rows_and_columns_take_no_array_of_pairs():
    def temp(height):
        *arrays, visible = arrays_of_image(height, 64)
        replaced = memeff.replace_attention(attend_over_rows_and_columns, strict=True)
        loss = lambda *arrays: replaced(*arrays, visible).sum()
        return temp_bytes(jax.grad(loss, (0, 1, 2)), arrays)

    assert temp(64) <= 2.2 * temp(32)


def causal_mask(rows, columns):
    return jnp.arange(rows)[:, None] >= jnp.arange(columns)


def joined_mask():
    return jnp.concatenate([jnp.ones((T, 2), bool), causal_mask(T, S - 2)], 1)


def joined_constants():
    return jnp.concatenate([np.ones((T, 2), bool), np.tril(np.ones((T, S - 2), bool))], 1)


def strided_mask():
    return jnp.concatenate([jnp.zeros((3, S), bool), causal_mask(2 * T, S)], 0)[1 : 2 * T + 1 : 2]


def blocks_of_numbers():
    numbers = [jnp.ones((T, 2)), jnp.where(causal_mask(T, S - 2), 1.0, 0.0)]
    rows = [jnp.concatenate(x, 1) for x in (numbers, numbers[::-1])]
    return jnp.concatenate(rows, 0)[1 : T + 1] > 0


def padded_mask():
    return jnp.pad(causal_mask(T - 1, S - 2), ((1, 0), (1, 1)), constant_values=True)


def cut_mask():
    return lax.pad(causal_mask(T, S - 2), True, ((0, 0, 0), (-1, 3, 0)))


def joined_rows_of_data():
    return jnp.concatenate([jnp.ones((T, 2), bool), jnp.cumsum(causal_mask(T, S - 2), 1) > 3], 1)


def running_counts(s):
    ones = jnp.ones((T, S), jnp.int32)
    return s - 0.3 * jnp.abs(jnp.cumsum(ones, 0) - lax.cumsum(ones, 1, reverse=True))


def padded_bias(s):
    return s + jnp.pad(jnp.zeros((T, 2)), ((0, 0), (3, S - 5)), constant_values=-1.0)


def masked_by(make_mask):
    return lambda s: jnp.where(make_mask(), s, -1e9)


MASKS_OF_PARTS = (joined_mask, joined_constants, strided_mask, blocks_of_numbers, padded_mask)
LOGITS_OF_POSITIONS = [*map(masked_by, MASKS_OF_PARTS), running_counts, padded_bias]
LOGITS_OF_ARRAYS = [masked_by(cut_mask), masked_by(joined_rows_of_data)]


def test_masks_and_biases_of_parts_and_counts_take_no_array_of_pairs():
    """Parts of masks that are joined or padded, and running counts in a bias, are positions."""

    def attend(forms, arrays):
        results = []
        for n, form in enumerate(forms):
            s = form(jnp.einsum("btnh,bsnh->bnts", (n + 1) * arrays["q"], arrays["k"]))
            results.append(jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(s), arrays["v"]))
        return results

    arrays = make_arrays()
    for place in find(functools.partial(attend, LOGITS_OF_POSITIONS), arrays).replaced:
        assert re.search("mask_fn|score_fn", str(place)) and not place.pair_arrays, place
    for place in find(functools.partial(attend, LOGITS_OF_ARRAYS), arrays).replaced:
        assert "an array as mask" in str(place), place
    program = functools.partial(attend, LOGITS_OF_POSITIONS + LOGITS_OF_ARRAYS)
    assert_replaced(program, arrays, atol=1e-5)


def test_a_mask_of_parts_that_a_loop_receives_takes_no_array_of_pairs():
    def model(x, weights):
        rows = jnp.arange(len(x))
        mask = jnp.concatenate([jnp.ones((len(x), 2), bool), rows[:, None] >= rows], 1)

        def layer(x, w):
            keys = jnp.concatenate([x[:2], x])
            logits = jnp.where(mask, (x @ w) @ keys.T, -1e9)
            return jax.nn.softmax(logits) @ keys, None

        return lax.scan(layer, x, weights)[0]

    x = jax.ShapeDtypeStruct((24, 4), jnp.float32)
    (place,) = find(model, x, jax.ShapeDtypeStruct((2, 4, 4), jnp.float32)).replaced
    assert "mask_fn" in str(place) and not place.pair_arrays, place


def test_a_mask_added_in_16_bits_leaves_the_logits_of_rows_that_see_no_key():
    """The program rounds such logits to the mask's number, and gives the mean of the values."""
    q, k, v = qkv_of_one_head(dtype="bfloat16")

    def attend(q, k, v, hidden):
        return jax.nn.softmax(q @ k.T + hidden * jnp.asarray(-1e4, q.dtype)) @ v

    out = run_replaced(attend, q, k, v, jnp.ones((1, len(k)), q.dtype)).astype(jnp.float32)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    np.testing.assert_allclose(out, jax.nn.softmax(q @ k.T) @ v, atol=0.02)


def test_a_number_added_to_the_logits_counts_beside_a_sink():
    """Without a sink, a number that is added to all logits changes nothing."""

    def joined(q, k, v, sink):
        s = jnp.concatenate([q @ k.T + 3, jnp.broadcast_to(sink, (len(q), 1))], -1)
        return jax.nn.softmax(s)[:, :-1] @ v

    def number(q, k, v, sink):
        e = jnp.exp(q @ k.T + sink + 3)
        return (e / (1 + e.sum(-1, keepdims=True))) @ v

    arrays = [*qkv_of_one_head(), jnp.float32(1.5)]
    for attend in (joined, number):
        assert_replaced(attend, *arrays)


@pytest.mark.parametrize("low", [-1e9, -np.inf])
def test_rows_of_nan_are_zero_where_the_program_makes_0_of_nan(low):
    def attend(q, k, v):
        logits = jnp.where(jnp.arange(len(k)) < 5, q @ k.T, low)
        return jnp.nan_to_num(jax.nn.softmax(logits)) @ v

    q, k, v = qkv_of_one_head()
    q = q.at[3].set(jnp.nan)
    out = run_replaced(attend, q, k, v)
    assert not out[3].any()
    np.testing.assert_allclose(out, jax.jit(attend)(q, k, v), atol=1e-6)


def test_zeros_by_multiplication_after_nan_are_left():
    """XLA may make a selection of NaN * 0, so the program itself gives NaN or 0."""

    def attend(q, k, v, length):
        visible = jnp.arange(len(k)) < length
        return (zeros_among_exponentials(q @ k.T, visible) * visible) @ v

    arrays = qkv_of_one_head()
    (place,) = find(attend, *arrays, jnp.int32(3)).left
    assert (
        "masks before and after the softmax give different results to rows that see no key"
        in str(place)
    )


def bias_within(s, bias, visible):
    return jnp.where(visible, s + bias, -1e9)


def bias_outside(s, bias, visible):
    return jnp.where(visible, s, -1e9) + bias


def infinity_outside(s, bias, visible):
    return jnp.where(visible, s + bias, -jnp.inf)


def score_within(s, bias, visible):
    return jnp.where(visible, jnp.where(bias < 0, -jnp.inf, s) * jnp.cosh(bias[0]), -1e9)


SLOW_HIDDEN_TWICE = [
    (bias_outside, False),
    (infinity_outside, False),
    (bias_outside, True),
    (infinity_outside, True),
    (score_within, True),
]
HIDDEN_TWICE = [
    (bias_within, False),
    (bias_within, True),
    (score_within, False),
    *[pytest.param(*x, marks=pytest.mark.slow) for x in SLOW_HIDDEN_TWICE],
]


@pytest.mark.parametrize("logits,of_pairs", HIDDEN_TWICE)
def test_a_bias_may_hide_keys_below_those_that_a_mask_hides(logits, of_pairs):
    """Padding on the left is added to the logits, and causal order replaces them."""

    def attend(q, k, v, bias):
        s = q @ k.T
        visible = jnp.tril(jnp.ones(s.shape, bool))
        return jax.nn.softmax(logits(s, bias, visible)) @ v

    def with_gradients(f):
        loss = lambda *arrays: ((jnp.sin(f(*arrays)) * jnp.arange(4)).sum(), f(*arrays))
        return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))

    arrays = qkv_of_one_head()
    T = len(arrays[0])
    run = with_gradients(attend)
    run_replaced = with_gradients(replace(attend, strict=True))
    for low in (-jnp.inf, float(jnp.finfo(jnp.float32).min), -1e9, -1e4, 0.0):
        bias = np.where(np.arange(T) < 3, np.float32(low), np.float32(0))
        if of_pairs:
            bias = np.where(np.arange(T)[:, None] % 5, bias, np.float32(0.1))
        expected, out = run(*arrays, bias)
        gradients, replaced_out = run_replaced(*arrays, bias)
        np.testing.assert_allclose(replaced_out, out, atol=1e-6, err_msg=f"{low}")
        for x, y in zip(gradients, expected, strict=True):
            is_finite = np.isfinite(y)
            np.testing.assert_allclose(x[is_finite], y[is_finite], atol=1e-5, err_msg=f"{low}")


MASKS_OF_POSITIONS = [
    lambda rows, columns: -(rows - columns) <= 0,
    lambda rows, columns: 2 * columns > 2 * rows - 3,
    lambda rows, columns: 2 >= jnp.abs(rows - columns),
    lambda rows, columns: rows == columns + 1,
    lambda rows, columns: rows != columns,
    lambda rows, columns: jnp.where(rows // 9 == 0, columns < rows, False),
]
TWO_CONDITIONS = [
    lambda a, b: a & ~b,
    lambda a, b: ~a | b,
    lambda a, b: (a ^ True) & b,
    lambda a, b: jnp.where(a, b, True),
    lambda a, b: jnp.where(a | b, 0.0, -1e9),
    lambda a, b: jnp.where(a, jnp.where(b, 0.0, -1e9), 0.0),
    lambda a, b: jnp.where(a, 0.0, jnp.where(b, -1e9, 0.0)),
    lambda a, b: jnp.where(a, jnp.where(b, -1e9, 0.0), -1e9),
    lambda a, b: (1 - a.astype(jnp.float32) * b) * -1e9,
    lambda a, b: jnp.minimum(1.0 - a, b) * -1e9,
]


def test_masks_are_read_as_formulas():
    def masks(of_keys):
        rows = jnp.arange(5)[:, None]
        columns = jnp.arange(7)
        results = [hide(rows, columns) for hide in MASKS_OF_POSITIONS]
        results.append(lax.dynamic_slice_in_dim(jnp.arange(9), 2, 7) <= rows)
        results.extend(combine(rows >= columns, of_keys) for combine in TWO_CONDITIONS)
        return results

    of_keys = jnp.arange(7) % 3 != 1
    graph = Graph(jax.make_jaxpr(masks)(of_keys), [None])
    symbols = []
    functions = []
    for value in graph.results:
        roles = Roles((), (), *new_index(value.shape))
        symbol = Reader().read(value, (roles.query, roles.keys))
        assert isinstance(symbol, Choice)
        builder = Builder(roles)
        builder.formula(symbol.condition)
        assert builder.leaves in ([], graph.inputs)
        symbols.append(symbol)
        functions.append(builder.function("mask"))

    @jax.jit
    def evaluate(of_keys):
        return [tabulate(f, (1, 1, 5, 7), [of_keys])[0, 0] for f in functions], masks(of_keys)

    for symbol, condition, expected in zip(symbols, *evaluate(of_keys), strict=True):
        np.testing.assert_array_equal(np.where(condition, symbol.yes, symbol.no), expected)


def test_loops_of_unknown_length_branches_and_jit_with_shardings():
    """A product in the condition of a loop is one in its body, too."""

    def attend(q, k, v):
        return jax.nn.softmax(q @ k.T / 2) @ v

    def loop(q, k, v):
        def goes_on(carry):
            return (jnp.abs(attend(carry[1], k, v)).max() > 1e-2) & (carry[0] < 3)

        return lax.while_loop(goes_on, lambda c: (c[0] + 1, attend(c[1], k, v)), (0, q))[1]

    def program(q, k, v, branch):
        attend_on_device = jax.jit(attend, out_shardings=SingleDeviceSharding(jax.devices()[0]))
        branches = [attend, loop, lambda q, k, v: attend_on_device(2 * q, k, v)]
        return lax.switch(branch, branches, q, k, v)

    arrays = qkv_of_one_head()
    report = find(program, *arrays, jnp.int32(0))
    assert (len(report.replaced), report.left) == (4, ())
    run = replace(program, strict=True)
    for branch in (1, 2):
        expected = jax.jit(program)(*arrays, jnp.int32(branch))
        np.testing.assert_allclose(run(*arrays, jnp.int32(branch)), expected, atol=1e-6)


def test_a_vmapped_loop_whose_entries_stop_one_after_the_other():
    def attend(x, times):
        def goes_on(carry):
            return carry[0] < times

        def step(carry):
            return carry[0] + 1, jax.nn.softmax(carry[1] @ x.T) @ x

        return lax.while_loop(goes_on, step, (0, x))

    arrays = jnp.stack(qkv_of_one_head()[:2]), jnp.array([3, 1])
    mapped = jax.vmap(attend)
    for actual, expected in zip(
        run_replaced(mapped, *arrays), jax.jit(mapped)(*arrays), strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def keys_added(s, pairs, keys, low):
    return s + pairs + keys


def keys_of_bools(s, pairs, keys, low):
    return s + jnp.where(pairs < 0, low, 0) + jnp.where(keys < 0, low, 0)


def causal_replaced(s, pairs, keys, low):
    return jnp.where(jnp.tril(jnp.ones(s.shape, bool)), s, low) + pairs


@pytest.mark.parametrize(
    "logits", few([keys_added, keys_of_bools, causal_replaced], [keys_of_bools, causal_replaced])
)
def test_two_masks_of_the_lowest_number_beside_each_other(logits):
    """In a row that sees no key, keys that either mask hides have equal logits."""

    def attend(q, k, v, pairs, keys, low):
        return jax.nn.softmax(logits(q @ k.T, pairs, keys, low)) @ v

    with jax.enable_x64(True):
        arrays = qkv_of_one_head(dtype="float64")
        T = len(arrays[0])
        for share in (1, 0.7):  # programs also write 0.7 of the lowest number
            low = share * float(jnp.finfo(jnp.float64).min)
            pairs = np.where((np.arange(T)[:, None] + np.arange(T)) % 3 == 1, 0.0, low)
            keys = np.where(np.arange(T) % 3 == 0, 0.0, low)
            run = functools.partial(attend, low=low)
            before = result_and_gradients(run, (*arrays, pairs, keys))
            after = result_and_gradients(replace(run, strict=True), (*arrays, pairs, keys))
            assert_close(after, before, atol=1e-12)


def test_a_bias_within_a_mask_before_zeros_is_left():
    def attend(q, k, v, bias):
        s = q @ k.T
        visible = jnp.tril(jnp.ones(s.shape, bool))
        p = jax.nn.softmax(jnp.where(visible, s + bias, -1e9))
        return jnp.where(visible, p, 0) @ v

    arrays = qkv_of_one_head()
    bias = jnp.zeros(len(arrays[0]))
    assert "may be as low as the mask" in find(attend, *arrays, bias).left[0].reason


def test_a_bias_where_no_exponential_is_left_is_0():
    def attend(q, k, v, bias):
        s = q @ k.T + bias
        e = jnp.exp(s - s.max(-1, keepdims=True)) * jnp.tril(jnp.ones(s.shape))
        return jnp.nan_to_num(e / e.sum(-1, keepdims=True)) @ v

    arrays = qkv_of_one_head()
    padding = jnp.zeros(len(arrays[0])).at[:2].set(-1e30)
    np.testing.assert_array_equal(jax.jit(replace(attend))(*arrays, padding)[:2], 0)
    assert "no exponential is left" in find(attend, *arrays, padding).left[0].reason


@pytest.mark.parametrize("zeros", [False, True])
def test_a_bias_beside_the_logarithm_of_the_sum_is_left(zeros):
    def attend(q, k, v, bias):
        s = q @ k.T + bias
        visible = jnp.tril(jnp.ones(s.shape, bool))
        if zeros:
            s = jnp.where(visible, s, -jnp.inf)
        p = jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True))
        return jnp.where(visible, p, 0) @ v if zeros else p @ v

    arrays = qkv_of_one_head()
    bias = jnp.zeros(len(arrays[0]))
    assert "loses the logarithm" in find(attend, *arrays, bias).left[0].reason


# ---- Sums of softmaxes


def logits_of(q, k, visible=None):
    """Return logits [B, N, T, S]; those that are not visible are -1e9."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) / 2
    return s if visible is None else jnp.where(visible, s, -1e9)


def average(p, v):
    return jnp.einsum("bnts,bsnh->btnh", p, v)


def distances(q, k):
    return jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])


def differential(q, k, v, x):
    """Subtract two causal softmaxes, with one number for each head."""
    visible = distances(q, k) >= 0
    p = jax.nn.softmax(logits_of(q, k, visible))
    lam = jnp.exp(x[:2]) - jnp.exp(x[2:]) + 0.8
    return average(p - lam[:, None, None] * jax.nn.softmax(logits_of(k, q, visible)), v)


def differential_layers(q, k, v, x):
    """Subtract with a scalar array that a scan over layers receives."""

    def layer(y, lam):
        p = jax.nn.softmax(logits_of(y, k)) - lam * jax.nn.softmax(logits_of(y, q))
        return y + average(p, v), None

    return lax.scan(layer, q, x)[0]


def mixture(q, k, v, x):
    """Mix global with local attention of the same logits, with a gate for each query."""
    s = logits_of(q, k)
    near = jnp.where(abs(distances(q, k)) < 4, s, -1e9)
    gate = jax.nn.sigmoid(jnp.einsum("btnh,h->bnt", q, x))[..., None]
    return average(gate * jax.nn.softmax(s) + (1 - gate) * jax.nn.softmax(near), v)


def differential_of_one_softmax(q, k, v, x):
    """Subtract every second head of one softmax from the head before it."""
    bias = x[:2, None, None] * distances(q, k)
    p = jax.nn.softmax(jnp.where(distances(q, k) >= 0, logits_of(q, k) + bias, -jnp.inf))
    p = p.reshape(1, 1, 2, *p.shape[2:])
    return average(p[:, :, 0] - x[3] * p[:, :, 1], v[:, :, :1])


def nested_sum(q, k, v, x):
    """Add three softmaxes in vmap, with signs and factors outside."""

    def attend(q, k, v, factor):
        terms = [jax.nn.softmax(s) for s in (q @ k.T, q @ v.T, k @ q.T)]
        return (-(terms[0] - (terms[1] - 0.5 * terms[2])) * factor / 3) @ v

    return jax.vmap(attend, in_axes=(1, 1, 1, 0), out_axes=1)(q[0], k[0], v[0], x[:2])


def hidden_difference(q, k, v, x):
    """Drop probabilities of the difference, so that both terms draw the same bits."""
    p = jax.nn.softmax(logits_of(q, k)) - 0.3 * jax.nn.softmax(logits_of(k, q))
    keep = jax.random.bernoulli(jax.random.key(0), jnp.float32(0.9), p.shape)
    return average(jnp.where(keep, p / 0.9, 0), v)


SUMS = {
    differential: 2,
    differential_layers: 2,
    mixture: 2,
    differential_of_one_softmax: 2,
    nested_sum: 3,
}


def result_and_gradients(f, arrays):
    """Return the result of f and its gradients for random cotangents."""

    def both(*arrays):
        out, pull = jax.vjp(f, *arrays)
        return out, pull(np.random.default_rng(1).normal(size=out.shape).astype(out.dtype))

    return jax.tree.leaves(jax.jit(both)(*arrays))


@pytest.mark.parametrize("program", SUMS, ids=lambda f: f.__name__)
def test_sums_of_softmaxes(program):
    with jax.enable_x64(True):
        arrays = [*qkv(dtype="float64"), jnp.asarray([0.3, -0.8, 0.5, 1.0])]
        report = find(program, *arrays)
        assert len(report.replaced) == SUMS[program] and not report.left, report
        assert all("test_replace_attention.py" in place.source for place in report.replaced)
        before = result_and_gradients(program, arrays)
        after = result_and_gradients(replace(program, strict=True), arrays)
        for x, y in zip(before, after, strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(y, x, rtol=0, atol=1e-12 * max(1, abs(x).max()))


def some_heads(p, v):
    return average(p[:, 1:], v[:, :, 1:])


def heads_of_pairs(p, v):
    """Take the second head of each pair."""
    p = p.reshape(1, 2, 2, *p.shape[2:])[:, :, 1]
    return average(p, v[:, :, 1::2])


def last_pair_of_heads(p, v):
    p = p.reshape(1, 2, 2, *p.shape[2:])[:, 1]
    return average(p, v[:, :, 2:])


def some_queries(p, v):
    return average(p[:, :, 1:12:3], v)


def some_keys(p, v):
    return average(p[..., :9], v[:, :9])


SLICES = {
    some_heads: "causal",
    heads_of_pairs: "causal",
    last_pair_of_heads: "causal",
    some_queries: "mask_fn",
    some_keys: "a slice of the keys is used",
}


@pytest.mark.parametrize("program", SLICES, ids=lambda f: f.__name__)
def test_slices_of_probabilities(program):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 16, 4, 4)), jnp.float32) for _ in range(3))

    def attend(q, k, v):
        return program(jax.nn.softmax(logits_of(q, k, distances(q, k) >= 0)), v)

    (place,) = find(attend, q, k, v).places
    assert SLICES[program] in str(place)
    before = result_and_gradients(attend, (q, k, v))
    after = result_and_gradients(replace(attend), (q, k, v))
    assert_close(after, before, rtol=0, atol=1e-5)


def test_a_sum_of_softmaxes_is_checked_and_differentiated_forward():
    arrays = [*qkv(), jnp.asarray([0.3, -0.8, 0.5, 1.0])]
    replace(mixture, check=True)(*arrays)
    directions = tuple(np.cos(x) for x in arrays)

    def tangents(f):
        return jax.jit(lambda *args: jax.jvp(f, args, directions))(*arrays)

    for program in (mixture, hidden_difference):
        after = tangents(replace(program, strict=True))
        assert_close(after, tangents(program), rtol=0, atol=1e-5)


def test_a_difference_in_bfloat16_is_as_exact_as_the_program():
    arrays = [*qkv(64), jnp.asarray([0.3, -0.8, 0.5, 1.0])]
    narrow = [np.asarray(x).astype(jnp.bfloat16) for x in arrays]
    truth = jax.jit(differential)(*(x.astype(np.float32) for x in narrow))
    errors = []
    for f in (differential, replace(differential, strict=True)):
        out = jax.jit(f)(*narrow)
        assert out.dtype == jnp.bfloat16
        errors.append(np.sqrt(((np.asarray(out, np.float32) - truth) ** 2).mean()))
    assert errors[1] <= 1.5 * errors[0]


def test_a_sum_of_softmaxes_takes_no_array_of_pairs():
    f = memeff.replace_attention(differential, strict=True)

    def temp(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32)
        numbers = jax.ShapeDtypeStruct((4,), jnp.float32)
        gradient = jax.grad(lambda *arrays: f(*arrays).sum(), (0, 1, 2, 3))
        return temp_bytes(gradient, (x, x, x, numbers))

    assert temp(8192) <= 2.2 * temp(4096)


def with_identity(q, k, v, x):
    return average(jax.nn.softmax(logits_of(q, k)) + jnp.eye(q.shape[1]), v)


def with_square(q, k, v, x):
    return average(jax.nn.softmax(logits_of(q, k)) - jax.nn.softmax(logits_of(k, q)) ** 2, v)


def with_constant_logits(q, k, v, x):
    fixed = jax.nn.softmax(jnp.exp(-abs(distances(q, k)) / x[0]))
    return average(jax.nn.softmax(logits_of(q, k)) + fixed, v)


def sum_returned(q, k, v, x):
    p = jax.nn.softmax(logits_of(q, k)) - jax.nn.softmax(logits_of(k, q))
    return average(p, v), p


def term_returned(q, k, v, x):
    p = jax.nn.softmax(logits_of(q, k))
    return average(jax.nn.softmax(logits_of(k, q)) - p, v), p


def divided_by_sum(q, k, v, x):
    p = jax.nn.softmax(logits_of(q, k)) - 0.3 * jax.nn.softmax(logits_of(k, q))
    return average(p / p.sum(-1, keepdims=True), v)


def one_denominator(q, k, v, x):
    e = jnp.exp(logits_of(q, k)) + jnp.exp(logits_of(k, q))
    return average(e / e.sum(-1, keepdims=True), v)


def doubled(q, k, v, x):
    p = jax.nn.softmax(logits_of(q, k))
    for _ in range(5):
        p = p + p
    return average(p, v)


SUMS_LEFT = {
    with_identity: "added to what is no softmax",
    with_square: "the search stops at `integer_pow`",
    with_constant_logits: "not made of a product",
    sum_returned: "are returned",
    term_returned: "are returned",
    divided_by_sum: "are used by `div`",
    one_denominator: "not divided by their sum",
    doubled: "more than 16 terms",
}


@pytest.mark.parametrize("program", SUMS_LEFT, ids=lambda f: f.__name__)
def test_sums_that_are_left(program):
    """One term that cannot be replaced leaves all as they are written."""
    arrays = [*qkv(), jnp.asarray([0.3, -0.8, 0.5, 1.0])]
    report = find(program, *arrays)
    (place,) = report.left
    assert not report.replaced and SUMS_LEFT[program] in place.reason, report
    assert "test_replace_attention.py" in place.source
    products = []
    both = (program, replace(program))
    for f in both:
        products.append(str(jax.make_jaxpr(f)(*arrays)).count("dot_general"))
    assert products[0] == products[1]
    results = jax.jit(lambda *x: [jax.tree.leaves(f(*x)) for f in both])(*arrays)
    assert_close(*results, rtol=0, atol=1e-6)


def test_report_names_what_stays():
    arrays = make_arrays()
    (place,) = find(Program(mask="dense", bias="dense"), arrays).replaced
    assert place.sizes == (B, N, T, S)
    assert ("bias", N * T * S * 4) in place.pair_arrays
    assert ("mask", B * T * S) in place.pair_arrays
    (place,) = find(Program(mask="tril", bias="alibi"), arrays).replaced
    assert not place.pair_arrays
    assert place.bytes_before is not None and place.bytes_after is not None

    def two_of_each(q, k, v, masks, biases):  # a call has one argument for each
        s = jnp.where(masks[0] & masks[1], q @ k.T + biases[0] + biases[1], -1e9)
        return jax.nn.softmax(s) @ v

    arrays = qkv_of_one_head()
    (place,) = find(
        two_of_each, *arrays, [jnp.ones((16, 16), bool)] * 2, [jnp.ones((16, 16))] * 2
    ).replaced
    assert sorted(place.pair_arrays) == [
        ("bias", 1024),
        ("bias", 1024),
        ("mask", 256),
        ("mask", 256),
    ]
    assert not dataclasses.asdict(find(lambda x: x, 1.0))["places"]


def latent(q, k, v, x):
    """As in DeepSeek's attention: part of the key is rotated, and shared by all heads."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k)
    s = s + jnp.einsum("btnh,bsh->bnts", x["rotated_query"], x["rotated_key"])
    return hidden_later(s * 0.3), v


def positions_apart(q, k, v, x):
    """Products of tokens and of positions, each with its scale. One is halved and subtracted."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.3
    return s - jnp.einsum("tnh,snh->nts", x["places"], x["places"]) * 0.15, v


def three_products(q, k, v, x):
    s = jnp.einsum("bsnh,btnh->btsn", k, q) - jnp.einsum("btnh,bsh->btsn", q, x["key"])
    s = (-s + jnp.einsum("btnh,snh->btsn", x["rotated_query"], x["rotated_places"])) / 2
    return hidden_later(3 * jnp.tanh(s.transpose(0, 3, 1, 2) / 3)), v


def product_of_keys(q, k, v, x):
    """The second product is the same for all queries."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k)
    return s + jnp.einsum("nh,bsnh->bns", x["places"][0], k)[:, :, None], v


def vectors_of_pairs(q, k, v, x):
    """The keys of the second product differ from query to query."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k)
    return s + jnp.einsum("btnh,tsh->bnts", q, x["pairs"]), v


def unequal_scales(q, k, v, x):
    """No power of two leads from one scale to the other."""
    s = jnp.einsum("btnh,bsnh->bnts", q, k) * 0.3
    return s + 0.2 * jnp.einsum("btnh,bsh->bnts", x["rotated_query"], x["rotated_key"]), v


def masked_apart(q, k, v, x):
    """A mask lies between the products."""
    s = hidden_later(jnp.einsum("btnh,bsnh->bnts", q, k))
    return s + jnp.einsum("btnh,bsh->bnts", x["rotated_query"], x["rotated_key"]), v


def hidden_later(s):
    return jnp.where(jnp.arange(s.shape[-1]) <= jnp.arange(s.shape[-2])[:, None], s, -1e30)


PRODUCTS = {
    latent: 2,
    positions_apart: 2,
    three_products: 3,
    product_of_keys: 1,
    vectors_of_pairs: 1,
    unequal_scales: 1,
    masked_apart: 1,
}


def arrays_of_products(length, dtype="float64"):
    B, N, H, R = 2, 3, 5, 2
    shapes = {
        "rotated_query": (B, length, N, R),
        "rotated_key": (B, length, R),
        "rotated_places": (length, N, R),
        "places": (length, N, H),
        "key": (B, length, H),
        "pairs": (length, length, H),
    }
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(B, length, N, size)) for size in (H, H, 4))
    x = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), [q, k, v, x])


def attend_by(logits):
    def attend(*arrays):
        s, v = logits(*arrays)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    return attend


def test_the_largest_product_is_that_of_query_and_key():
    """The other one, a bias of small rank, stays an array."""

    def attend(q, k, v):
        s = jnp.einsum("btnh,bsnh->bnts", q, k) / 3 + q[0, :, 0] @ k[0, :, 0].T
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    arrays = qkv()
    (place,) = find(attend, *arrays).replaced
    assert place.pair_arrays == (("bias", 16 * 16 * 4),)
    np.testing.assert_allclose(run_replaced(attend, *arrays), attend(*arrays), atol=1e-6)


@pytest.mark.parametrize("logits", PRODUCTS, ids=lambda f: f.__name__)
def test_logits_of_several_products(logits):
    """Products of queries and keys that are added become one product of joined vectors."""
    with jax.enable_x64(True):
        arrays = arrays_of_products(9)
        attend = attend_by(logits)
        (place,) = find(attend, *arrays).replaced
        count = PRODUCTS[logits]
        sums = [x for x in place.found if x.startswith("a sum")]
        assert sums == ([f"a sum of {count} products"] if count > 1 else []), place
        if count > 1:
            assert not place.pair_arrays
        replaced = replace(attend, strict=True)
        assert_close(*(result_and_gradients(f, arrays) for f in (replaced, attend)), atol=1e-12)


@pytest.mark.parametrize("logits", few(PRODUCTS, [three_products]), ids=lambda f: f.__name__)
def test_check_of_several_products(logits):
    replace(attend_by(logits), strict=True, check=True)(*arrays_of_products(9, "float32"))


@pytest.mark.parametrize(
    "logits", few([latent, three_products], [three_products]), ids=lambda f: f.__name__
)
def test_logits_of_several_products_take_no_array_of_pairs(logits):
    def temp(length):
        def with_length(x):
            shape = [length if size == 16 else size for size in x.shape]
            return jax.ShapeDtypeStruct(shape, x.dtype)

        arrays = jax.tree.map(with_length, arrays_of_products(16, "float32"))
        arrays[-1].pop("pairs")
        replaced = memeff.replace_attention(attend_by(logits), strict=True)
        return temp_bytes(lambda *arrays: result_and_gradients(replaced, arrays), arrays)

    assert temp(4096) <= 2.2 * temp(2048)


@pytest.mark.parametrize(
    "logits", few([latent, positions_apart], [latent]), ids=lambda f: f.__name__
)
def test_products_in_bfloat16_are_as_exact_as_the_program(logits):
    arrays = arrays_of_products(64, "bfloat16")
    attend = attend_by(logits)
    with jax.enable_x64(True):
        exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), arrays)
        truth = np.asarray(jax.jit(attend)(*exact))
    errors = []
    for f in (replace(attend, strict=True), attend):
        errors.append(np.abs(np.asarray(jax.jit(f)(*arrays), np.float64) - truth).max())
    assert errors[0] <= 1.5 * errors[1]


def test_gradients_that_are_sums_over_rows_are_not_summed_in_bfloat16():
    rng = np.random.default_rng(0)
    shapes = ((24, 2, 4), (400, 7, 2, 4), (400, 7, 2, 4), (2,), (600, 4), (9, 4))
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]

    def attend(latents, k, v, factors, q, values):
        weights = jax.nn.softmax(jnp.einsum("tnh,bsnh->bnts", latents, k) / 2)
        weighted = jnp.einsum("bnts,bsnh->btnh", weights * factors[:, None, None], v)
        hidden = jnp.where(q[0, 0] > 9, q @ values.T, -1e9)  # no row sees a key
        return weighted, jax.nn.softmax(hidden) @ values

    def gradients(f, arrays):
        out, pull = jax.vjp(f, *arrays)
        rng = np.random.default_rng(1)
        cotangents = [rng.normal(size=x.shape).astype(jnp.bfloat16).astype(x.dtype) for x in out]
        latents, _, _, factors, _, values = pull(tuple(map(jnp.asarray, cotangents)))
        return latents, factors, values

    replaced = jax.jit(functools.partial(gradients, replace(attend, strict=True)))(arrays)
    with jax.enable_x64(True):
        exact = [x.astype(jnp.float64) for x in arrays]
        truth = [np.asarray(x) for x in jax.jit(functools.partial(gradients, attend))(exact)]
    for x, y in zip(replaced, truth, strict=True):
        error = np.sqrt(((np.asarray(x, np.float64) - y) ** 2).mean())
        assert error <= 2**-8 * np.sqrt((y**2).mean())
