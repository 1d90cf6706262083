"""Calls of `linear_cross_entropy` that run in the Hopper kernels' interpreter. It has no test."""

import contextlib
import importlib

import hopper_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memeff.vocabulary import loops, objective

f32 = np.float32
T, H, V = 150, 64, 320
IGNORE = -100
HIDDEN = (0, 63, 64, 319)  # words

OPTIONS = {  # of arrays, and static
    "plain": ({}, {}),
    "bias": ({"bias": None}, {}),
    "ignore": ({}, {"ignore_label": IGNORE}),
    "smoothing": ({}, {"label_smoothing": 0.2}),
    "z_loss": ({}, {"z_loss": 0.3}),
    "cap": ({}, {"logits_soft_cap": 1.5}),
}
OPTIONS["hidden"] = OPTIONS["bias"]
EVERYTHING = "hidden&ignore&smoothing&z_loss&cap"


def case(name: str, sizes: tuple[int, int, int] = (T, H, V)):
    """Return x, kernel, labels, cotangents, arrays and static arguments of a case, in bfloat16."""
    tokens, features, words = sizes
    rng = np.random.default_rng(3)
    x = (0.5 * rng.standard_normal((tokens, features))).astype(jnp.bfloat16)
    kernel = (2.4 * features**-0.5 * rng.standard_normal((features, words))).astype(jnp.bfloat16)
    labels = rng.choice(np.setdiff1d(np.arange(words), HIDDEN), tokens).astype(np.int32)
    cotangents = list(rng.standard_normal((2, tokens)).astype(f32))
    arrays = {}
    static = {}
    for option in name.split("&"):
        more_arrays, more_static = OPTIONS[option]
        arrays |= more_arrays
        static |= more_static
    if "bias" in arrays:
        bias = rng.standard_normal(words).astype(f32)
        hidden = "hidden" in name and np.isin(np.arange(words), HIDDEN)
        arrays["bias"] = np.where(hidden, f32(-np.inf), bias)
    if "ignore_label" in static:
        labels[[0, 7, 64, -1]] = IGNORE
        x[[0, 64]] = np.nan
    return x, kernel, labels, cotangents, arrays, static


@contextlib.contextmanager
def interpreted(detect_races: bool = True):
    """Run the kernels of the loss in the interpreter, as on an H200 with three multiprocessors.

    A call has two blocks of tokens, and two by two tiles in the gradient.
    """
    from memeff.pallas.hopper.vocabulary import implementation, logit_tiles

    modules = (importlib.import_module("memeff.linear_cross_entropy"), loops, implementation)
    with pytest.MonkeyPatch.context() as patch, hopper_cases.interpreted(detect_races):
        for module in modules:
            patch.setattr(module, "may_be_sharded", lambda: False)
        patch.setattr(loops, "GPU_TILE", (128, 192))
        patch.setattr(objective, "block_tokens", lambda *_: 128)
        patch.setattr(logit_tiles, "multiprocessors", lambda: 3)
        yield


def kernels_of(function, *args) -> set[str]:
    """Return the names of the kernels that a program has."""
    text = str(jax.make_jaxpr(function)(*args))
    names = ("sum", "probability", "cotangent")
    return {name for name in names if f"memeff_vocabulary_{name}" in text}
