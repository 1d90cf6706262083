"""Check each replaced place on its own arrays, even where its logits would not fit into memory.

Each place is checked with the arrays of its first run:

  (1) `memeff.audit` compares sampled rows and columns of the call, forward and gradient, with
      float64.
  (2) Sampled rows of its output are compared with the program's own equations, pair by pair. This
      finds a mask or a bias that was read wrongly, although memeff computes the wrong call
      correctly.

Both take O(T + S) for each sample.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from memeff.diagnostics.audit import absolute_errors, audit
from memeff.rewrite import element_function
from memeff.rewrite.recipe import Recipe, attend
from memeff.rewrite.rows import Equations, compute_rows
from memeff.rewrite.terms import HIDDEN
from memeff.rewrite.translate import Replacement
from memeff.rewrite.versions import source_line

SAMPLES = 32  # rows of each place
# The largest error, relative to the largest number of the rows, that counts as rounding. The
# program may round logits and probabilities to its own dtype, and memeff does not.
LIMITS = {"float64": 1e-9, "float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}


class Recorder:
    """Keep the arrays that each replaced place gets in its first run."""

    def __init__(self):
        self._kept: dict[int, tuple[Replacement, list[np.ndarray]]] = {}

    def __call__(self, replacement: Replacement, inputs: list[Any]) -> None:
        """Keep the arrays of a place when they are computed."""
        plain = []
        for x in inputs:
            is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            plain.append(jax.random.key_data(x) if is_key else x)
        jax.debug.callback(functools.partial(self._keep, replacement), *plain)

    def _keep(self, replacement: Replacement, *inputs: Any) -> None:
        if id(replacement) not in self._kept:
            self._kept[id(replacement)] = replacement, [np.asarray(x) for x in inputs]

    def check(self) -> None:
        """Raise an error that names a place if the place is wrong."""
        jax.effects_barrier()
        for replacement, inputs in self._kept.values():
            source = source_line(replacement.match.second.eqn)
            recipe = dataclasses.replace(replacement.recipe, dropout=None)
            exact = recipe.if_some_row_is_empty
            if exact is not None:
                exact = dataclasses.replace(exact, dropout=None)
                recipe = dataclasses.replace(recipe, if_some_row_is_empty=exact)
            arrays = [jnp.asarray(x) for x in inputs]
            rounding = _check_call(source, recipe, arrays)
            _check_rows(source, recipe, replacement, arrays, rounding)


def _check_call(source: str, recipe: Recipe, inputs: list[Any]) -> float:
    """Raise if the call of a recipe differs from float64; return what its logits are rounded by."""
    query, key, value = recipe.operands(inputs)
    keywords = recipe.keywords(inputs)
    # A float32 keeps no digit of a logit beside -1e9, which float64 would. Such keys are hidden.
    if "bias" in keywords:
        keywords["bias"] = _without_lows(keywords["bias"])
    if "score_fn" in keywords:
        keywords["score_fn"] = functools.partial(_score_without_lows, keywords["score_fn"])
    result = audit(None, query, key, value, samples=SAMPLES, **keywords)
    limit = LIMITS[recipe.dtype] + result.rounding_of_logits
    if not all(x.relative <= limit for x in result.findings):
        raise AssertionError(
            f"check=True: the attention at {source} is computed with an error beyond rounding. "
            f"Please report the program.\n{result}"
        )
    return result.rounding_of_logits


def _without_lows(logits: Any) -> Any:
    """Return logits or a bias with -inf where a number hides the key."""
    return jnp.where(logits <= HIDDEN, -jnp.inf, logits)


def _score_without_lows(score_fn: Any, *arguments: Any) -> Any:
    return _without_lows(score_fn(*arguments))


def _limit(recipe: Recipe, equations: Equations) -> float:
    """Return the limit of the narrowest float to which the program rounds its logits."""
    dtypes = [recipe.dtype]
    for step, *arguments in equations.logits.function.steps:
        if step is element_function.score:
            (dtype,) = arguments
            dtypes.append(dtype)
        elif step is element_function.bind:
            _, params, _ = arguments
            dtypes.append(str(dict(params).get("new_dtype")))
    return max(LIMITS.get(x, 0) for x in dtypes)


def _check_rows(
    source: str, recipe: Recipe, replacement: Replacement, inputs: list[Any], rounding: float
) -> None:
    """Raise if sampled rows of the output differ from the program's equations."""
    assert replacement.equations is not None
    B, N, T, _ = recipe.sizes
    rng = np.random.default_rng(0)
    b, t, n = (rng.integers(0, size, SAMPLES) for size in (B, T, N))
    t[:2] = 0, T - 1  # where masks of positions begin and end
    out = jax.jit(attend, static_argnums=0)(recipe, inputs)
    actual = np.asarray(out.reshape(B, T, N, -1)[b, t, n])
    rows = functools.partial(compute_rows, recipe, replacement.equations)
    with jax.enable_x64(True):
        truth = np.asarray(jax.jit(rows)(inputs, [jnp.asarray(x) for x in (b, t, n)]))
    error = absolute_errors(actual, truth).max(axis=1)
    largest = np.abs(truth[np.isfinite(truth)]).max(initial=0)
    worst = error.argmax()
    limit = _limit(recipe, replacement.equations) + rounding
    if error[worst] > limit * largest:
        raise AssertionError(
            f"check=True: the attention at {source} differs from the original by "
            f"{error[worst]:.3g} in batch entry {b[worst]}, query {t[worst]}, head {n[worst]}, "
            f"where the largest number is {largest:.3g}. Please report the program."
        )
