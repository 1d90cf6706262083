"""Define the logits of a tile from its dot products, and what other files may assume of them.

A new term in `logits_from_dots` must be added to the functions that state its properties.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.masking import pair_positions
from memeff.problem import LogitParams, Operands, Problem
from memeff.user_functions import PairIndices

LOG2_E = 1 / math.log(2)

# `cap_by_exp2` errs by up to 1.2 x 2^-22 times the cap, so by 1.8e-5 with this one.
LARGEST_APPROXIMATE_CAP = 64


def transform_query_key(
    problem: Problem, operands: Operands, rows: Array, cols: Array
) -> tuple[Array, Array]:
    """Return queries [B, K, G, t, H] and keys [B, K, c, H] after `qk_transform`."""
    transform = problem.qk_transform
    if transform is None:
        return operands.query, operands.key
    q_pos, k_pos = pair_positions(problem, operands, rows, cols)
    params = operands.logit_params.transform, operands.transform_nonfloat_params
    query = transform("query", operands.query, q_pos, *params)
    key = transform("key", operands.key, k_pos, *params)
    return query, key


def logits_from_dots(
    problem: Problem,
    raw: Array,
    terms: LogitParams,
    keep: Array | None,
    indices: PairIndices | None = None,
    soft_cap: Callable[..., Array] | None = None,
) -> Array:
    """Return logits [B, K, G, t, c] from the dot products `raw` of the same shape.

    The order is scale, soft cap, score_fn, bias, mask. If `keep` is None, every pair is visible.
    `soft_cap` is `cap_by_tanh`, the default, or an approximation of it.
    """
    cap = problem.soft_cap if terms.soft_cap is None else terms.soft_cap.astype(raw.dtype)
    if keep is not None and (
        cap is not None or terms.scale is not None or problem.score_fn is not None
    ):
        raw = jnp.where(keep, raw, 0)  # NaN of a hidden pair must not reach a gradient
    scale = problem.scale if terms.scale is None else terms.scale.astype(raw.dtype)
    if cap is None:
        s = raw * scale
    else:
        ratio = scale / cap if terms.ratio is None else terms.ratio
        s = (soft_cap or cap_by_tanh)(raw, cap, ratio)
    if problem.score_fn is not None:
        assert indices is not None
        s = problem.score_fn(s, indices, terms.score, indices.score_params)
    if terms.bias is not None:
        s = s + terms.bias.astype(raw.dtype)  # B|1 K|1 G|1 t|1 c|1
    return s if keep is None else jnp.where(keep, s, -jnp.inf)


def cap_by_tanh(raw: Array, cap, ratio) -> Array:
    """Return cap tanh(ratio raw)."""
    return cap * jnp.tanh(raw * ratio)


def cap_by_exp2(raw: Array, cap: float, ratio: float) -> Array:
    """Return cap tanh(ratio raw) from exp2 and rsqrt, which GPUs compute in one instruction each.

    tanh(x) = 1 - 2 u with u = 1 / (1 + exp(2 x)). The error is relative to the cap.
    """
    return cap - 2 * cap * _falling(raw, ratio)


def _falling(raw: Array, ratio: float) -> Array:
    """Return u = 1 / (1 + exp(2 ratio raw)), which falls from 1 to 0."""
    x = jnp.minimum(raw * (2 * LOG2_E * ratio), 60.0)  # 2^60 is not infinite
    inverse = 1 + jnp.exp2(x)
    u = lax.square(lax.rsqrt(inverse))
    return u + u * (1 - inverse * u)  # a step of Newton's, because rsqrt loses two bits


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def differentiable_cap_by_exp2(raw: Array, cap: float, ratio: float) -> Array:
    """Return `cap_by_exp2`. Its derivative is written out, because JAX's divides."""
    return cap_by_exp2(raw, cap, ratio)


@differentiable_cap_by_exp2.defjvp
def _(cap: float, ratio: float, primals, tangents):
    (raw,), (d_raw,) = primals, tangents
    u = _falling(raw, ratio)
    return cap - 2 * cap * u, 4 * cap * ratio * (u - u * u) * d_raw


def approximates_cap(problem: Problem, operands: Operands) -> bool:
    """Return True if kernels use `cap_by_exp2`: in 16 bits, with a cap that is known and small."""
    cap = problem.soft_cap
    terms = operands.logit_params
    if cap is None or terms.soft_cap is not None or terms.scale is not None:
        return False
    return cap <= LARGEST_APPROXIMATE_CAP and operands.query.dtype.itemsize == 2


def wide_terms(terms: LogitParams, dtype: Any) -> LogitParams:
    """Return the terms with scale, soft cap and bias in `dtype`, that of the logits.

    Their cotangents are sums of many numbers, which then are not rounded to 16 bits before they are
    added up.
    """

    def widen(x: Array) -> Array:
        return x.astype(dtype)

    return _map_terms(widen, terms)


def _map_terms(f: Callable[[Array], Array], terms: LogitParams) -> LogitParams:
    """Return the terms with f applied to scale, soft cap and bias where they are arrays."""
    scale, soft_cap, bias = jax.tree.map(f, (terms.scale, terms.soft_cap, terms.bias))
    return terms._replace(scale=scale, soft_cap=soft_cap, bias=bias)


def with_ratio(problem: Problem, terms: LogitParams) -> LogitParams:
    """Return the scale and the soft cap, where they are arrays, in the form that kernels read.

    Where the soft cap is an array, `ratio` stands for the scale, because kernels have no
    instruction for the derivative of a quotient.
    """
    cap = None if terms.soft_cap is None else terms.soft_cap.astype(jnp.float32)
    scale = None if terms.scale is None else terms.scale.astype(jnp.float32)
    if cap is None:
        return LogitParams(scale=scale)
    return LogitParams(soft_cap=cap, ratio=(problem.scale if scale is None else scale) / cap)


def logits_linear(problem: Problem) -> bool:
    """Return True if logits are linear in raw: d_raw = ds times a factor that all pairs share."""
    return problem.soft_cap is None and problem.score_fn is None


def logits_increasing(problem: Problem, terms: LogitParams) -> bool:
    """Return True if it is known that a larger raw never gives a smaller logit.

    A scale that is an array may be negative, and a score_fn may do anything. Scale and soft cap
    keep the order. A bias differs from pair to pair, so a caller must exclude it itself.
    """
    return terms.scale is None and problem.scale >= 0 and problem.score_fn is None


def logits_plain(problem: Problem, operands: Operands) -> bool:
    """Return True if the logits of all visible pairs are raw times a static scale.

    Such logits can be bounded beforehand, by |scale| |q| |k|. A call may have sinks, because they
    are not logits of pairs. It may not have dropout, although that changes probabilities only, or
    arrays that hide pairs without a rule on positions.
    """
    params = operands.logit_params._replace(sinks=None)
    extras = (*problem.extras, *jax.tree.leaves(params), operands.mask, operands.q_segments)
    return all(x is None for x in extras)


def allow_approx_math(problem: Problem) -> bool:
    """Return True if a kernel may use a GPU's approximate exp2 and rsqrt.

    With tanh, log and other functions in its logits or masks it may not, because those would be
    inexact too. A mask that compares a root with a number would hide other pairs.
    """
    functions: Any = problem.score_fn, problem.mask_fn  # in kernels each is a TileFunction
    if any(x is not None and x.is_nonlinear for x in functions):
        return False
    return problem.soft_cap is None or problem.approximates_cap


def base2(problem: Problem) -> Problem:
    """Return the problem whose logits are log2(e) times larger, so exp2 of them is exp(s)."""
    cap = problem.soft_cap
    return dataclasses.replace(
        problem, scale=problem.scale * LOG2_E, soft_cap=None if cap is None else cap * LOG2_E
    )


def logits_base2(
    problem: Problem,
    raw: Array,
    terms: LogitParams,
    keep: Array | None,
    indices: PairIndices | None = None,
    differentiable: bool = False,
) -> Array:
    """Return `logits_from_dots` times log2(e); score_fn receives its scores in nats.

    `differentiable`: JAX can differentiate this. If not, kernels can lower it as it is.
    """
    soft_cap = None
    if problem.approximates_cap:
        soft_cap = differentiable_cap_by_exp2 if differentiable else cap_by_exp2

    def to_base2(x: Array) -> Array:
        return x.astype(raw.dtype) * LOG2_E

    if problem.score_fn is None:
        terms = _map_terms(to_base2, terms)
        return logits_from_dots(base2(problem), raw, terms, keep, indices, soft_cap)
    return logits_from_dots(problem, raw, terms, keep, indices, soft_cap) * LOG2_E
