"""Compute a weighted sum of losses and its gradient in one pass over blocks of tokens.

The weights are known when the sum is computed, so the gradient can be computed with it. All logits
of a block of t tokens exist at a time, and are not computed again. That takes three products
instead of four, and the memory of t x V logits and of the kernel's gradient in float32. For one
block:
  (1) to (3) for all words, as in __init__.py; loss and its cotangents dlse, dhit, dtotal
  (4) (5) d_raw;  (6) dx_i = d_raw k';  dk += x_i' d_raw
Other derivatives, and the gradient of many sums under vmap, are those of the losses of tokens.

Source: Hsu et al. 2024 (arXiv:2410.10989), section 3.2.
"""

import dataclasses
import functools
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from memeff.attention_ad import tangent_of
from memeff.autodiff.primitives import call
from memeff.chunked.floats import lift_float16
from memeff.device import current_platform
from memeff.problem import sum_dtype
from memeff.sharding import vary_together
from memeff.slicing import add_slice, write_slice
from memeff.softmax import Lse
from memeff.vocabulary.derivatives import Forward, Function
from memeff.vocabulary.loops import Tiles, lse_of_sums, online_step, transpose_logits
from memeff.vocabulary.loss import LossTerms, count_visible, losses_that_count, token_losses
from memeff.vocabulary.tile import (
    ABSENT,
    IGNORED,
    Inputs,
    Settings,
    Sums,
    Tokens,
    Words,
    dot,
    words_of_tile,
)

# Logits of a block, at most. Where kernels keep probabilities in 16 bits, 2^29 take 1 GiB, and as
# much again for d_raw; 2^30 were no faster (H200, bfloat16, 32,768 tokens, 131,072 words, H = 1,024
# and 4,096). Elsewhere 2^28 take 1 GiB in float32, and 0.5 GiB for d_raw.
KERNEL_LOGITS = 2**29
GPU_LOGITS = 2**28
LEAST_TOKENS = 1024  # of a block; with fewer, adding to dk takes longer than the products


def one_pass_is_faster() -> bool:
    """Return whether making the gradient with the loss was found to be faster on this device.

    On a CPU it was 14 % slower (two cores, float32, 4,096 tokens, 32,000 words, H = 512), because
    a tile of logits stays in the caches, and a block of tokens with all words does not.
    """
    return current_platform() == "gpu"


def block_tokens(T: int, V: int, keeps_probabilities: bool) -> int:
    """Return the tokens of a block, such that all blocks are of nearly the same size."""
    most = KERNEL_LOGITS if keeps_probabilities else GPU_LOGITS
    limit = max(LEAST_TOKENS, most // max(1, V) // 128 * 128)
    count = max(1, math.ceil(T / limit))
    return min(T, math.ceil(T / count / 128) * 128)


@dataclasses.dataclass(frozen=True)
class Objective(Function):
    """The function from inputs, labels [T] and weights [T] to the weighted sum of the losses."""

    terms: LossTerms

    def losses(self, inputs: Inputs, labels: Array) -> Array:
        """Return the loss of each token, [T]."""
        sums = call(Forward(self.settings), inputs, labels)
        return self.losses_of(inputs, labels, sums)

    def losses_of(self, inputs: Inputs, labels: Array, sums: Sums) -> Array:
        """Return the loss of each token from its sums, [T]."""
        words = count_visible(inputs.bias, inputs.kernel.shape[1])
        return token_losses(self.terms, sums, labels == IGNORED, labels != ABSENT, words)[0]

    def __call__(self, inputs: Inputs, labels: Array, weights: Array) -> Array:
        return jnp.sum(weights * losses_that_count(weights, self.losses(inputs, labels)))

    def jvp(self, primals, tangents):
        """Return the sum and its tangent, which is the product of gradient and tangents."""
        dinputs, _, dweights = tangents
        wanted = tuple(dx is not None for dx in dinputs)
        losses, gradients = call(ValueAndGradient(self.settings, self.terms, wanted), *primals)
        weights = primals[2]
        losses = losses_that_count(weights, losses)
        tangent = jnp.zeros((), weights.dtype)
        if any(wanted):
            tangent = call(InnerProduct(weights.dtype), gradients, dinputs)
        if dweights is not None:
            tangent = tangent + jnp.sum(losses * dweights)
        return jnp.sum(weights * losses), tangent

    def in_batch(self, size, axes, inputs, labels, weights):
        """Return the sums under vmap from the losses of tokens, whose gradient is not batched."""
        input_axes, label_axis, _ = axes
        call_losses: Any = self.losses
        if any(axis is not None for axis in (*input_axes, label_axis)):
            call_losses = jax.vmap(call_losses, (input_axes, label_axis), axis_size=size)
        losses = losses_that_count(weights, call_losses(inputs, labels))
        return jnp.sum(losses * weights, -1)


@dataclasses.dataclass(frozen=True)
class ValueAndGradient(Function):
    """The function from inputs, labels and weights to losses, and the gradients of their sum."""

    terms: LossTerms
    wanted: tuple[bool, ...]  # which inputs have a gradient; it is None for all others

    def calls_at_once(self, *_):
        """Return that calls under vmap run one after the other."""
        return 1

    def __call__(self, inputs: Inputs, labels: Array, weights: Array):
        return _value_and_gradient(self, inputs, labels, weights)

    def jvp(self, primals, tangents):
        """Return losses and gradients, and their tangents by way of the losses of tokens."""

        def from_tokens(inputs, labels, weights):
            def losses_of(inputs):
                return Objective(self.settings, self.terms).losses(inputs, labels)

            losses, pull = jax.vjp(losses_of, inputs)
            (gradients,) = pull(weights)
            return losses, self.only_wanted(gradients)

        return call(self, *primals), tangent_of(from_tokens, primals, tangents)

    def only_wanted(self, arrays: Inputs) -> Inputs:
        """Return inputs or gradients, with None where no gradient is wanted."""
        pairs = zip(arrays, self.wanted, strict=True)
        return Inputs(*[x if wanted else None for x, wanted in pairs])


@dataclasses.dataclass(frozen=True)
class InnerProduct:
    """The function from gradients and tangents to the sum of their products; it is linear."""

    dtype: Any  # of the sum

    def __call__(self, gradients: Inputs, tangents: Inputs) -> Array:
        total = jnp.zeros((), self.dtype)
        for g, dx in zip(jax.tree.leaves(gradients), jax.tree.leaves(tangents), strict=True):
            total = total + jnp.sum(g.astype(self.dtype) * dx.astype(self.dtype))
        return total

    def jvp(self, primals, tangents):
        """Return the sum, and its tangent."""
        return call(self, *primals), tangent_of(self, primals, tangents)

    def transposed(self, args, cotangents):
        """Return the cotangents of the tangents: the gradients times a number."""
        gradients, _ = args
        (cotangent,) = cotangents
        leaves = jax.tree.leaves(gradients)
        return [(g.astype(self.dtype) * cotangent).astype(g.dtype) for g in leaves]


@functools.partial(jax.jit, static_argnums=0)
def _value_and_gradient(
    function: ValueAndGradient, inputs: Inputs, labels: Array, weights: Array
) -> tuple[Array, Inputs]:
    """Return the loss of each token, [T], and the gradients of their weighted sum."""
    settings = function.settings
    wants_x, wants_kernel, *_ = function.wanted
    T = len(labels)
    V = inputs.kernel.shape[1]
    t = block_tokens(T, V, _kernels_that_keep(settings, inputs) is not None)
    tiles = Tiles(settings, inputs, labels, t, V)
    words = words_of_tile(*inputs[1:], jnp.arange(V, dtype=jnp.int32), False)
    dtype = sum_dtype(inputs.x.dtype)

    def zeros(x: Array, dtype=dtype) -> Array:
        return vary_together(jnp.zeros_like(x, dtype), (inputs, labels, weights))

    def visit(carry, start, tokens: Tokens):
        losses, (dx, dk, *dterms) = carry
        block = tiles.of_tokens((labels, weights), start)
        new_losses, d_raw, more_dterms = _block(function, inputs, words, tokens, *block)
        if tokens.visible is not None:
            old_losses = tiles.of_tokens(losses, start)
            new_losses = jnp.where(tokens.visible, new_losses, old_losses)
        losses = write_slice(losses, new_losses, (start,))
        d_raw, lift = lift_float16(d_raw, tokens.x.dtype, (0, 1))
        d_raw = lax.optimization_barrier(d_raw)  # computed once, for two products
        lift = 1 if lift is None else lift
        if wants_x:  # tokens of the block before have 0
            more_dx = dot(settings, "tc,hc->th", d_raw, words.kernel) / lift
            dx = add_slice(dx, more_dx, (start, 0))
        if wants_kernel:
            dk = dk + dot(settings, "th,tc->hc", tokens.x, d_raw) / lift
        pairs = zip(dterms, more_dterms, strict=True)
        dterms = [None if old is None else old + new for old, new in pairs]
        return losses, Inputs(dx, dk, *dterms)

    # dx in the dtype of x, because a token is in one block
    start = Inputs(zeros(inputs.x, inputs.x.dtype), *jax.tree.map(zeros, inputs[1:]))
    losses, gradients = tiles.fold_tokens(visit, (zeros(labels), function.only_wanted(start)))
    inputs = function.only_wanted(inputs)
    return losses, jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, inputs)


def _kernels_that_keep(settings: Settings, inputs: Inputs) -> ModuleType | None:
    """Return the kernels that keep the probabilities of a block in 16 bits, if there are some."""
    kernels = settings.kernels
    keep = kernels is not None and kernels.keeps_probabilities(settings, inputs)
    return kernels if keep else None


def _block(
    function: ValueAndGradient,
    inputs: Inputs,
    words: Words,
    tokens: Tokens,
    labels: Array,
    weights: Array,
) -> tuple[Array, Array, tuple[Array | None, Array | None]]:
    """Return losses [t], d_raw [t, V] and (dbias, dcap) of a block of tokens."""
    settings = function.settings
    kernels = _kernels_that_keep(settings, inputs)
    if kernels is not None:
        rows, cotangents = kernels.kept_probabilities(settings, tokens, words)
        m, l, hit, total = rows

        def transposed(lse: Lse, dsums: Sums) -> Any:
            return cotangents(lse, dsums), (None, None)

    else:
        raw = dot(settings, "th,hc->tc", tokens.x, words.kernel)  # (1)
        zeros = jnp.zeros_like(weights)
        m, l, hit, total = online_step(
            settings, tokens, words, raw, (zeros - jnp.inf, zeros, zeros, zeros)
        )

        def transposed(lse: Lse, dsums: Sums) -> Any:
            return transpose_logits(settings, tokens, words, raw, lse, dsums)

    lse = lse_of_sums(m, l)
    sums = Sums(lse, hit, total if settings.wants_total else None)
    objective = Objective(settings, function.terms)
    losses, pull = jax.vjp(functools.partial(objective.losses_of, inputs, labels), sums)
    (dsums,) = pull(weights)
    dsums = dsums._replace(lse=dsums.lse.high)
    visible = tokens.visible
    if visible is not None:
        dsums = jax.tree.map(lambda x: jnp.where(visible, x, 0), dsums)
    d_raw, dterms = transposed(Lse(*lse), dsums)
    return losses, d_raw, dterms
