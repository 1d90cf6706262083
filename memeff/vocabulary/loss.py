"""Define the loss of a token from the sums over its logits."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from memeff.vocabulary.tile import Sums


class LossTerms(NamedTuple):
    """The numbers that the loss is made with."""

    label_smoothing: float
    z_loss: float


def token_losses(
    terms: LossTerms, sums: Sums, ignored: Array, valid: Array, words: Array | float
) -> tuple[Array, Array]:
    """Return loss and lse of each token.

    `ignored` tokens have 0. Tokens whose label is not `valid` have the loss NaN. `words` is the
    number of words that are not hidden.
    """
    lse = jnp.where(ignored, 0, sums.lse.high)
    target = sums.hit
    if terms.label_smoothing > 0:
        mean = sums.total / jnp.asarray(words, sums.total.dtype)
        target = (1 - terms.label_smoothing) * target + terms.label_smoothing * mean
    loss = (lse - target) + sums.lse.low  # in this order, because lse and target may be large
    loss = jnp.where(lse == -jnp.inf, jnp.inf, loss)  # of a token for which all words are hidden
    if terms.z_loss > 0:
        loss = loss + terms.z_loss * lse**2
    # times NaN, because the gradients must become NaN as well
    loss = jnp.where(ignored, 0, loss * jnp.where(ignored | valid, 1, jnp.nan))
    return loss, lse


def losses_that_count(weights: Array, losses: Array) -> Array:
    """Return the losses, with 0 instead of inf where the weight is 0, because 0 * inf is NaN."""
    return jnp.where((weights == 0) & (losses == jnp.inf), 0, losses)


def count_visible(bias: Array | None, words: int) -> Array | float:
    """Return the number of words that no bias hides."""
    if bias is None:
        return float(words)
    return jnp.sum(bias != -jnp.inf).astype(jnp.float32)
