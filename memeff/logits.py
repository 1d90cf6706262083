"""Define the logits of a tile from its dot products."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from memeff.masking import as_column, query_positions
from memeff.problem import LogitParams, Operands, Problem
from memeff.user_functions import PairIndices


def transform_query_key(
    problem: Problem, here: Operands, rows: Array, cols: Array
) -> tuple[Array, Array]:
    """Queries B K G t H and keys B K c H as the products take them."""
    transform = problem.qk_transform
    if transform is None:
        return here.query, here.key
    q_pos = query_positions(problem, as_column(here.q_offset), rows)
    params = here.terms.transform, here.transform_rest
    return transform("query", here.query, q_pos, *params), transform("key", here.key, cols, *params)


def logits_from_dots(
    problem: Problem,
    raw: Array,
    terms: LogitParams,
    keep: Array | None,
    at: PairIndices | None = None,
) -> Array:
    """Logits B K G t c from dot products: scale, soft cap, the user's function, bias, mask (`keep`; None: all visible), in
    this order.
    """
    cap = problem.soft_cap if terms.soft_cap is None else terms.soft_cap.astype(raw.dtype)
    if keep is not None and (
        cap is not None or terms.scale is not None or problem.score_fn is not None
    ):
        raw = jnp.where(keep, raw, 0)  # so that NaN in what nobody sees reaches no gradient
    scale = problem.scale if terms.scale is None else terms.scale.astype(raw.dtype)
    s = raw * scale if cap is None else cap * jnp.tanh(raw * (scale / cap))
    if problem.score_fn is not None:
        assert at is not None
        s = problem.score_fn(s, at, terms.score, at.of_score)
    if terms.bias is not None:
        s = s + terms.bias.astype(raw.dtype)  # B|1 K|1 G|1 t|1 c|1
    return s if keep is None else jnp.where(keep, s, -jnp.inf)


LOG2_E = 1 / math.log(2)


def base2(problem: Problem) -> Problem:
    """The problem whose logits are these times log2 e, so that exp(s) is exp2 of them."""
    cap = problem.soft_cap
    return dataclasses.replace(
        problem, scale=problem.scale * LOG2_E, soft_cap=None if cap is None else cap * LOG2_E
    )


def logits_base2(
    problem: Problem,
    raw: Array,
    terms: LogitParams,
    keep: Array | None,
    at: PairIndices | None = None,
) -> Array:
    """`finish` times log2 e; a function of the user's has its logits in nats."""
    if problem.score_fn is None:
        return logits_from_dots(base2(problem), raw, terms, keep, at)
    return logits_from_dots(problem, raw, terms, keep, at) * LOG2_E
