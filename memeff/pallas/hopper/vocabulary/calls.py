"""Call the kernels of a vocabulary's logits, and put their results together."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array

from memeff.pallas.hopper.vocabulary.logit_tiles import (
    WORDS,
    CotangentPass,
    Pass,
    ProbabilityPass,
    SumPass,
    decode_probabilities,
    visit_logits,
)
from memeff.pallas.partitioning import in_32_bits
from memeff.sharding import vary_together
from memeff.softmax import Lse
from memeff.vocabulary.tile import Inputs, Settings, Sums, Tokens, Words, only_labels


def _visit(
    settings: Settings,
    what: Pass,
    operands: tuple[Array, Array, Array],
    bias: Array | None = None,
    rows: Sequence[Array] = (),
) -> list[Array]:
    """Return the outputs of a pass. `operands` are x [T, H], kernel [H, V] and labels [T].

    Calls under vmap run one after the other.
    """
    leaves, structure = jax.tree.flatten((operands, bias, list(rows)))

    @jax.custom_batching.sequential_vmap
    def run(*leaves):
        operands, bias, rows = jax.tree.unflatten(structure, leaves)
        return in_32_bits(visit_logits)(settings, what, operands, bias, rows)

    # Results of kernels lack the type that shard_map gives to arrays that vary over devices.
    return vary_together(run(*leaves), leaves)


def sums(
    settings: Settings, inputs: Inputs, labels: Array
) -> tuple[Array, Array, Array, Array | None]:
    """Return m, l, hit and total of all words, each [T]; total is None unless wanted."""
    bias = None if inputs.bias is None else inputs.bias.astype(jnp.float32)
    what = SumPass(settings.wants_total)
    (runs,) = _visit(settings, what, (inputs.x, inputs.kernel, labels), bias)
    m, l, hit, *total = _sums_of_runs(runs, len(labels))
    return m, l, hit, total[0] if total else None


def _sums_of_runs(runs: Array, T: int) -> list[Array]:
    """Return m, l, hit and total, each [T], from those of each run of words [rows, runs, T']."""
    m, l, *rest = runs[:, :, :T]
    top = m.max(0)
    shift = jnp.where(top == -jnp.inf, 0, top)
    return [top, (l * jnp.exp(m - shift)).sum(0), *[x.sum(0) for x in rest]]


def cotangents(settings: Settings, tokens: Tokens, words: Words, lse: Lse, dsums: Sums) -> Array:
    """Return d_raw [t, c] of a tile without bias, in the dtype of x."""
    assert lse.low is not None
    rows = [lse.high, lse.low, dsums.lse, dsums.hit]
    if dsums.total is not None:
        rows.append(dsums.total)
    if tokens.visible is not None:  # x is 0 there, so the logits are 0: exp(0 - inf) is 0
        hidden = [jnp.inf, 0, 0, 0, 0]
        pairs = zip(rows, hidden, strict=False)
        rows = [jnp.where(tokens.visible, x, y) for x, y in pairs]
    bias = None
    if words.visible is not None:
        bias = jnp.where(words.visible, 0, -jnp.inf).astype(jnp.float32)
    first = words.numbers[-1] - (len(words.numbers) - 1)  # the last word is in no tile before
    what = CotangentPass(dsums.total is not None, tokens.x.dtype)
    operands = tokens.x, words.kernel, tokens.labels - first
    (d_raw,) = _visit(settings, what, operands, bias, rows)
    return d_raw


def kept_probabilities(
    settings: Settings, tokens: Tokens, words: Words
) -> tuple[list[Array], Callable[[Lse, Sums], Array]]:
    """Return m, l, hit and total, each [t], and the function from lse and dsums to d_raw [t, V]."""
    what = ProbabilityPass(SumPass(settings.wants_total))
    runs, codes, maxima = _visit(settings, what, (tokens.x, words.kernel, tokens.labels))
    t = len(tokens.labels)
    m, l, hit, *total = _sums_of_runs(runs, t)
    cotangents = functools.partial(_cotangents_of_codes, tokens, words, codes, maxima[:, :t])
    return [m, l, hit, total[0] if total else l], cotangents


def _cotangents_of_codes(
    tokens: Tokens, words: Words, codes: Array, maxima: Array, lse: Lse, dsums: Sums
) -> Array:
    """Return d_raw [t, V] from exp(s - m) in 16 bits and the m [tiles, t] of each tile of words."""
    assert lse.low is not None
    V = codes.shape[1]
    factors = jnp.exp((maxima - lse.high) - lse.low) * dsums.lse
    factors = jnp.repeat(factors.T, WORDS, axis=1)[:, :V]
    ds = decode_probabilities(codes) * factors + only_labels(tokens, words, dsums.hit[:, None])
    if dsums.total is not None:
        ds = ds + dsums.total[:, None]
    if tokens.visible is not None:
        ds = jnp.where(tokens.visible[:, None], ds, 0)
    return ds.astype(tokens.x.dtype)
