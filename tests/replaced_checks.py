"""Replace the attention of programs, and compare with the programs as they are written."""

import dataclasses
import functools

import exact
import jax
import jax.numpy as jnp
import numpy as np
from attention_programs import B, N, Program, S, T, results_and_gradients
from small_calls import assert_close

import memeff

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


def result_and_gradients(f, arrays):
    """Return the result of f and its gradients for random cotangents."""

    def both(*arrays):
        out, pull = jax.vjp(f, *arrays)
        return out, pull(np.random.default_rng(1).normal(size=out.shape).astype(out.dtype))

    return jax.tree.leaves(jax.jit(both)(*arrays))
