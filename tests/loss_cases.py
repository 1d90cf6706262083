"""Calls of `linear_cross_entropy`, their truth in NumPy, and their plain computation.

This module has no test.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from memeff import linear_cross_entropy

f32 = np.float32
T, H, V = 37, 5, 53
CHUNK = (7, 11)  # tokens, words
IGNORE = -100
HIDDEN = (0, 11, 12, 52)  # words


# ---- cases: arrays and static arguments


def draw(words=V, leads=(T,)):
    """Return x, kernel, labels, bias, and the cotangents of loss and lse, in float64."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((*leads, H))
    kernel = rng.standard_normal((H, words))
    visible = np.setdiff1d(np.arange(words), HIDDEN)
    labels = rng.choice(visible, leads).astype(np.int32)
    bias = rng.standard_normal(words)
    return x, kernel, labels, bias, rng.standard_normal(leads), rng.standard_normal(leads)


OPTIONS = {  # of arrays, and static
    "bias": ({"bias": draw()[3]}, {}),
    "hidden": ({"bias": np.where(np.isin(np.arange(V), HIDDEN), -np.inf, draw()[3])}, {}),
    "ignore": ({}, {"ignore_label": IGNORE}),
    "smoothing": ({}, {"label_smoothing": 0.2}),
    "z_loss": ({}, {"z_loss": 0.3}),
    "cap": ({}, {"logits_soft_cap": 1.5}),
    "cap_array": ({"logits_soft_cap": np.array(1.5)}, {}),
}
PAIRED = ("hidden", "ignore", "smoothing", "z_loss", "cap_array")
PAIRS = tuple("&".join(pair) for pair in itertools.combinations(PAIRED, 2))
EVERYTHING = "&".join(PAIRED)
CASES = ("plain", *OPTIONS, *PAIRS, EVERYTHING)


@functools.cache
def case(name: str, dtype: str = "float64"):
    """Return x, kernel, labels, cotangents, arrays and static arguments of a case."""
    x, kernel, labels, _, *cotangents = draw()
    arrays = {}
    static = {}
    for option in name.split("&"):
        more_arrays, more_static = OPTIONS.get(option, ({}, {}))
        arrays |= more_arrays
        static |= more_static
    if "ignore_label" in static:
        labels = labels.copy()
        labels[[0, 7, 8, 36]] = IGNORE
    x = x.astype(dtype)
    kernel = kernel.astype(dtype)
    wide = np.float64 if dtype == "float64" else f32
    arrays = {name: array.astype(wide) for name, array in arrays.items()}
    return x, kernel, labels, [y.astype(wide) for y in cotangents], arrays, static


def both_ways(loss_fn, x, kernel, labels, cotangents, arrays):
    """Return loss, lse and the gradients by name."""

    def call(x, kernel, arrays):
        return loss_fn(x, kernel, labels, **arrays)

    (loss, lse), pull = jax.vjp(call, x, kernel, arrays)
    dx, dkernel, darrays = pull(tuple(cotangents))
    return {"loss": loss, "lse": lse, "x": dx, "kernel": dkernel, **darrays}


def ours(static, chunk_size=CHUNK):
    """Return the function that is tested, with its static arguments."""
    return functools.partial(linear_cross_entropy, **static, chunk_size=chunk_size, return_lse=True)


def plain(
    x,
    kernel,
    labels,
    bias=None,
    logits_soft_cap=None,
    ignore_label=None,
    label_smoothing=0.0,
    z_loss=0.0,
):
    """Return loss and lse by their definition, from all logits, in the dtype of accumulators."""
    wide = jnp.promote_types(x.dtype, f32)
    s = jnp.dot(x, kernel, preferred_element_type=wide)
    visible = np.ones(kernel.shape[1], bool) if bias is None else bias > -np.inf
    if bias is not None:
        s = s + jnp.where(visible, bias, 0)
    if logits_soft_cap is not None:
        s = logits_soft_cap * jnp.tanh(s / logits_soft_cap)
    s = jnp.where(visible, s, -np.inf)
    log_p = jax.nn.log_softmax(s)
    lse = jax.nn.logsumexp(s, -1)
    keep = labels != ignore_label
    nll = -jnp.take_along_axis(log_p, jnp.where(keep, labels, 0)[..., None], -1)[..., 0]
    mean = -jnp.where(visible, log_p, 0).sum(-1) / visible.sum()
    loss = (1 - label_smoothing) * nll + label_smoothing * mean + z_loss * lse**2
    return jnp.where(keep, loss, 0), jnp.where(keep, lse, 0)


def oracle(
    x,
    kernel,
    labels,
    cotangents,
    bias=None,
    logits_soft_cap=None,
    ignore_label=None,
    label_smoothing=0.0,
    z_loss=0.0,
):
    """Return loss, lse and gradients by name, in NumPy and float64, by formulas typed here."""
    x, kernel, dloss, dlse = (np.asarray(y, np.float64) for y in (x, kernel, *cotangents))
    words = kernel.shape[1]
    visible = np.ones(words, bool)
    u = x @ kernel
    if bias is not None:
        bias = np.asarray(bias, np.float64)
        visible = bias > -np.inf
        u = u + np.where(visible, bias, 0)
    s = u
    slope = np.ones_like(u)
    if logits_soft_cap is not None:
        cap = float(logits_soft_cap)
        s = cap * np.tanh(u / cap)
        slope = 1 - (s / cap) ** 2
    e = np.where(visible, np.exp(s - s.max(1, keepdims=True)), 0)
    p = e / e.sum(1, keepdims=True)
    lse = s.max(1) + np.log(e.sum(1))
    keep = labels != ignore_label
    target = np.zeros_like(u)
    target[np.arange(len(x)), np.where(keep, labels, 0)] = 1 - label_smoothing
    target += label_smoothing * visible / visible.sum()
    loss = lse - (target * np.where(visible, s, 0)).sum(1) + z_loss * lse**2
    dlse_total = dlse + dloss * (1 + 2 * z_loss * lse)
    ds = np.where(visible & keep[:, None], p * dlse_total[:, None] - target * dloss[:, None], 0)
    du = ds * slope
    truth = {"loss": loss * keep, "lse": lse * keep, "x": du @ kernel.T, "kernel": x.T @ du}
    if bias is not None:
        truth["bias"] = du.sum(0)
    if logits_soft_cap is not None:
        truth["logits_soft_cap"] = (ds * (s - u * slope) / cap).sum()
    return truth


@functools.cache
def results(names: tuple[str, ...], dtype: str, function="ours"):
    """Return {case: results by name}, compiled as one program."""

    def run(inputs):
        found = {}
        for name, arrays in inputs.items():
            static = case(name, dtype)[5]
            call = ours(static) if function == "ours" else functools.partial(plain, **static)
            found[name] = both_ways(call, *arrays)
        return found

    inputs = {name: case(name, dtype)[:5] for name in names}
    with jax.enable_x64(dtype == "float64"):
        return jax.tree.map(np.asarray, jax.jit(run)(inputs))


@functools.cache
def truth_of(name: str, dtype: str):
    """Return the oracle's results of a case, from inputs that have been rounded to `dtype`."""
    x, kernel, labels, cotangents, arrays, static = case(name, dtype)
    return oracle(x, kernel, labels, cotangents, **arrays, **static)
