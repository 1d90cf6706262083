"""Define `linear_cross_entropy`, the loss of a large vocabulary without its logits."""

from __future__ import annotations  # help() then shows ArrayLike and not the nine types that it is

import functools
import math
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from memeff import pallas
from memeff.autodiff.primitives import call
from memeff.device import current_device
from memeff.inputs import (
    INT32_MAX,
    check_bool,
    check_choice,
    check_floats,
    check_int,
    check_integers,
    check_number,
    check_wide_floats,
    kind_of,
    known_values,
    text_of,
    to_int32,
)
from memeff.problem import sum_dtype
from memeff.sharding import (
    may_be_sharded,
    on_explicit_mesh,
    shard_like,
    vary_together,
    varying_axes,
    with_auto_axes,
)
from memeff.validate import check_soft_cap
from memeff.validate_options import check_chunk_size, check_precision
from memeff.vocabulary.derivatives import Forward
from memeff.vocabulary.loops import choose_tile, lse_of_sums
from memeff.vocabulary.loss import (
    LossTerms,
    count_visible,
    losses_that_count,
    token_losses,
)
from memeff.vocabulary.objective import Objective, one_pass_is_faster
from memeff.vocabulary.tile import ABSENT, IGNORED, Inputs, Settings, Sums


class LossOptions(TypedDict, total=False):
    """The keywords of `linear_cross_entropy`, except `return_lse`."""

    bias: ArrayLike | None
    ignore_label: int | None
    label_smoothing: float
    z_loss: float
    logits_soft_cap: ArrayLike | None
    chunk_size: int | tuple[int, int] | None
    vocab_axis: str | None
    reduction: Literal["mean", "sum"] | None
    weights: ArrayLike | None
    precision: lax.PrecisionLike


@overload
def linear_cross_entropy(
    x: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[LossOptions],
) -> Array: ...


@overload
def linear_cross_entropy(
    x: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[True],
    **options: Unpack[LossOptions],
) -> tuple[Array, Array]: ...


def linear_cross_entropy(
    x: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    ignore_label: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: ArrayLike | None = None,
    chunk_size: int | tuple[int, int] | None = None,
    vocab_axis: str | None = None,
    return_lse: bool = False,
    reduction: Literal["mean", "sum"] | None = None,
    weights: ArrayLike | None = None,
    precision: lax.PrecisionLike = None,
) -> Array | tuple[Array, Array]:
    r"""Compute the exact loss -log softmax(x kernel + bias)[label] without storing the logits.

    Memory: O(tokens * H) beyond inputs and outputs, for the forward and for the gradient. One tile
    of logits exists at a time. With `reduction` the gradient takes less time and more memory.

    Derivatives: in both modes, of every order, in linear memory, with respect to x, kernel, bias,
    and logits_soft_cap as an array.

    Args:
      x: [*B, H], float, with any number of leading dims; one row is one token.
      kernel: [H, V], in the dtype of `x`, one column for each word. Cast params that are kept in
        float32, as Flax's Dense does: `kernel.astype(x.dtype)`.
      labels: [*B], integers from 0 to V - 1. A label outside of that raises an error if its value
        is known. If it is traced, the token's loss and the gradients are NaN.
      bias: [V], float, added to the logits. -inf hides a word: its probability is 0, whatever its
        column of the kernel holds. A token whose label is hidden has the loss inf.
      ignore_label: tokens with this label have loss 0, lse 0 and no gradient, whatever their row of
        `x` holds. It may lie outside of 0 to V - 1.
      label_smoothing: a in [0, 1). The loss becomes 1 - a times the loss, plus a times the mean of
        -log p over all words that are not hidden.
      z_loss: the factor of lse^2, which is added to the loss.
      logits_soft_cap: c > 0. Logits become c * tanh(logits / c), after the bias.
      chunk_size: the largest numbers of tokens and words in the tile of logits that exists at a
        time; an int stands for both. Default: the fastest measured (memeff/vocabulary/loops.py). If
        it is omitted, kernels run on a Hopper GPU where they support the call (docs/limits.md), and
        choose their own tiles.
      vocab_axis: the axis of `jax.shard_map` along which the words of `kernel` and `bias` are
        sharded in equal parts. V is then the number of words of all devices together, and `labels`
        count all words. `x` and `labels` are the same on the devices of that axis.
      return_lse: also return lse.
      reduction: "sum" returns the sum of weight * loss over all tokens. "mean" divides it by the
        sum of the weights of tokens that are not ignored (0 if that sum is 0). The weight of each
        loss is then known in the forward, so a GPU makes the gradient together with the loss, in
        three products instead of four. That takes O(H * V) memory: a gradient of the kernel in
        float32, and a block of logits for all words, of about 2 GiB (docs/losses.md). The gradients
        of x and kernel are kept, in their dtypes, until the backward multiplies them by the
        cotangent. In other calls the gradient is computed as without `reduction`: on other devices,
        under vmap, where arrays may be sharded, and with `chunk_size`, `vocab_axis` or
        `return_lse`.
      weights: [*B], float, the weight of each token, for use with `reduction`. A token of weight 0
        adds nothing, even if its loss is inf. Default: 1.
      precision: of the products, as in `jax.lax.dot_general`.

    Returns:
      loss [*B], in nats, in float32 (float64 for float64), one number for each token. With
      `return_lse` also lse [*B], the natural logarithm of the sum of exp(logits), in the same
      dtype, differentiable. With `reduction` loss is one number.

    Raises:
      ValueError: if shapes or values disagree.
      TypeError: if an argument has the wrong dtype or kind.
      NotImplementedError: if sizes are symbolic (jax.export).

    Example:
      >>> x, kernel = jnp.ones((2, 7, 16)), jnp.zeros((16, 1000))
      >>> loss = memeff.linear_cross_entropy(x, kernel, jnp.zeros((2, 7), jnp.int32))
      >>> print(loss.shape, f"{loss.mean():.4f} = log 1000")
      (2, 7) 6.9078 = log 1000
      >>> mean = memeff.linear_cross_entropy(x, kernel, jnp.zeros((2, 7), int), reduction="mean")
      >>> print(f"{mean:.4f}")
      6.9078

    Source: Wijmans et al. 2024 (arXiv:2411.09009), section 4; Milakov & Gimelshein 2018
    (arXiv:1805.02867), section 3.
    """
    inputs, labels = _check_arrays(x, kernel, labels, bias)
    check_bool("return_lse", return_lse)
    token_weights = _check_weights(reduction, weights, inputs.x)
    cap, cap_array = check_soft_cap(logits_soft_cap, sum_dtype(inputs.x.dtype))
    inputs = inputs._replace(soft_cap=cap_array)
    smoothing = check_number("label_smoothing", label_smoothing, 1)
    V = inputs.kernel.shape[1]
    sides = check_chunk_size(chunk_size, "(tokens, words)", "tokens and words")
    tile, calls_at_once = choose_tile(sides, labels.size, V)
    precision = check_precision(precision)
    settings = Settings(
        soft_cap=cap if cap_array is None else None,
        has_ignored=ignore_label is not None,
        wants_total=smoothing > 0,
        tile=tile,
        calls_at_once=calls_at_once,
        precision=precision,
        kernels=_find_kernels(inputs, precision) if sides == (None, None) else None,
    )
    options = Options(
        ignore_label=_check_ignore_label(ignore_label),
        terms=LossTerms(smoothing, check_number("z_loss", z_loss)),
        vocab_axis=vocab_axis,
        devices=1 if vocab_axis is None else _check_vocab_axis(vocab_axis, inputs.kernel),
        settings=settings,
    )
    _check_labels(options, labels, V * options.devices)
    if token_weights is not None:
        one_pass = sides == (None, None) and vocab_axis is None and not return_lse
        one_pass = one_pass and one_pass_is_faster()
        arrays = inputs, labels, token_weights
        if one_pass and not may_be_sharded() and not on_explicit_mesh(arrays):
            return _objective(options, reduction, inputs, labels, token_weights)
    loss, lse = with_auto_axes(_loss, (options,), (inputs, labels), like=inputs.x)
    if token_weights is not None:
        loss = _reduce(options, reduction, loss, labels, token_weights)
    return (loss, lse) if return_lse else loss


class Options(NamedTuple):
    """The checked arguments that are no arrays."""

    ignore_label: int | None
    terms: LossTerms
    vocab_axis: str | None
    devices: int  # along that axis
    settings: Settings


def _find_kernels(inputs: Inputs, precision: lax.PrecisionLike) -> ModuleType | None:
    """Return the kernels that can compute the logits of x [*B, H], or None."""
    *leads, H = inputs.x.shape
    flat = inputs._replace(x=jax.ShapeDtypeStruct((math.prod(leads), H), inputs.x.dtype))
    device = current_device(inputs.x)
    kernels = pallas.family_for(device).vocabulary
    if kernels is None or kernels.why_not(flat, precision, device) is not None:
        return None
    return kernels


@functools.partial(jax.jit, static_argnums=0)
def _loss(options: Options, inputs: Inputs, labels: Array) -> tuple[Array, Array]:
    """Return loss and lse, both [*B], from x [*B, H] and labels [*B]."""
    V = inputs.kernel.shape[1]
    words = V * options.devices
    word, ignored, valid = _find_words(options, labels, V)
    if not _in_one_tile(options.settings, labels):
        inputs = inputs._replace(x=inputs.x.reshape(-1, inputs.x.shape[-1]))
        word = word.reshape(-1)
    sums: Sums = call(Forward(options.settings), *vary_together((inputs, word)))
    if options.vocab_axis is not None:
        sums = _sum_over_devices(sums, options.vocab_axis)
    sums = jax.tree.map(lambda x: x.reshape(labels.shape), sums)
    visible = count_visible(inputs.bias, words)
    if options.vocab_axis is not None and inputs.bias is not None:
        visible = lax.psum(visible, options.vocab_axis)
    return token_losses(options.terms, sums, ignored, valid, visible)


def _in_one_tile(settings: Settings, labels: Array) -> bool:
    """Return True if tokens in several dims, any of which may be sharded, are one tile.

    They keep their dims, because XLA gathers tokens for a reshape of dims of which it shards one.
    """
    return labels.ndim > 1 and may_be_sharded() and labels.size <= settings.tile[0]


def _find_words(options: Options, labels: Array, V: int) -> tuple[Array, Array, Array]:
    """Return each label's word of this device, and whether it is ignored, and valid; all [*B]."""
    word = to_int32(labels, -INT32_MAX)
    ignored = jnp.zeros_like(word, bool)
    if options.ignore_label is not None:
        ignored = word == options.ignore_label
    valid = (word >= 0) & (word < V * options.devices)
    if options.vocab_axis is not None:
        word = word - lax.axis_index(options.vocab_axis) * V
    on_device = valid & (word >= 0) & (word < V)
    word = jnp.where(ignored, IGNORED, jnp.where(on_device, word, ABSENT))
    return word, ignored, valid


@functools.partial(jax.jit, static_argnums=(0, 1))
def _reduce(
    options: Options, reduction: str | None, loss: Array, labels: Array, weights: Array
) -> Array:
    """Return the sum or mean of the losses of tokens; under jit, arrays may lack their mesh."""
    labels, weights = (shard_like(x, loss) for x in (labels, weights))
    factors = _normalized(options, reduction, labels, weights)
    return jnp.sum(factors * losses_that_count(factors, loss))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _objective(
    options: Options, reduction: str | None, inputs: Inputs, labels: Array, weights: Array
) -> Array:
    """Return the sum or mean of the losses, whose gradient is made together with it."""
    weights = _normalized(options, reduction, labels, weights).reshape(-1)
    word, _, _ = _find_words(options, labels, inputs.kernel.shape[1])
    inputs = inputs._replace(x=inputs.x.reshape(-1, inputs.x.shape[-1]))
    arrays = vary_together((inputs, word.reshape(-1), weights))
    return call(Objective(options.settings, options.terms), *arrays)


def _normalized(options: Options, reduction: str | None, labels: Array, weights: Array) -> Array:
    """Return the factor of each token's loss, [*B]."""
    if options.ignore_label is not None:
        weights = jnp.where(to_int32(labels, -INT32_MAX) == options.ignore_label, 0, weights)
    if reduction == "sum":
        return weights
    total = weights.sum()
    return jnp.where(total == 0, 0, weights / jnp.where(total == 0, 1, total))


def _check_weights(reduction: Any, weights: Any, x: Array) -> Array | None:
    """Return the weight of each token, [*B], or None without a reduction."""
    if reduction is None:
        if weights is not None:
            raise ValueError('weights need a reduction: pass reduction="mean" or "sum" as well.')
        return None
    check_choice("reduction", reduction, ("mean", "sum"), optional=True)
    dtype = sum_dtype(x.dtype)
    if weights is None:
        return jnp.ones(x.shape[:-1], dtype)
    weights = check_floats("weights", weights)
    if weights.shape != x.shape[:-1]:
        raise ValueError(
            f"weights must have shape {x.shape[:-1]}, the leading dims of x; got {weights.shape}."
        )
    return weights.astype(dtype)


def _check_arrays(x, kernel, labels, bias) -> tuple[Inputs, Array]:
    """Return x [*B, H], kernel [H, V] and bias [V] as inputs, and labels [*B]."""
    x = check_floats("x", x)
    kernel = check_floats("kernel", kernel)
    if bias is not None:
        bias = check_floats("bias", bias)
    if x.dtype != kernel.dtype:
        raise TypeError(
            f"kernel is {kernel.dtype} and x is {x.dtype}: they must have one dtype. Cast one of "
            "them, for example kernel.astype(x.dtype)."
        )
    check_wide_floats("x", x)
    if not all(isinstance(n, int) for n in (*x.shape, *kernel.shape)):
        raise NotImplementedError(
            f"x has shape {x.shape} and kernel {kernel.shape}: linear_cross_entropy does not "
            "support sizes that jax.export leaves symbolic. Export with sizes that are numbers."
        )
    if x.ndim < 1:
        raise ValueError("x must have shape [*B, H] with at least 1 dim; got ().")
    H = x.shape[-1]
    if H == 0:
        raise ValueError(
            f"x has H=0 (shape {x.shape}): the logits would be empty sums. Use H >= 1."
        )
    if kernel.ndim != 2 or kernel.shape[0] != H:
        cure = ""
        if kernel.ndim == 2 and kernel.shape[1] == H:
            cure = " Transpose it: kernel.T."
        raise ValueError(f"kernel must have shape (H={H}, V); got {kernel.shape}.{cure}")
    V = kernel.shape[1]
    if bias is not None and bias.shape != (V,):
        raise ValueError(
            f"bias must have shape (V={V},), one number for each word; got {bias.shape}."
        )
    labels = check_integers("labels", labels)
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels must have shape {x.shape[:-1]}, the leading dims of x; got {labels.shape}."
        )
    return Inputs(x, kernel, bias, None), labels


def _check_vocab_axis(axis: Any, kernel: Array) -> int:
    """Return the number of devices along the axis."""
    if not isinstance(axis, str):
        raise TypeError(
            f"vocab_axis must be the name of an axis of jax.shard_map, a str; got {kind_of(axis)}."
        )
    try:
        devices = lax.axis_size(axis)
    except NameError as e:
        raise ValueError(
            f"vocab_axis={axis!r}: there is no such axis around this call. Call it inside "
            "jax.shard_map over a mesh that has it, or omit vocab_axis."
        ) from e
    checked = axis in varying_axes(lax.axis_index(axis))  # not with check_vma=False
    if checked and axis not in varying_axes(kernel):
        raise ValueError(
            f"kernel is the same on all devices of vocab_axis={axis!r}. Shard its words over them "
            f"by in_specs, P(None, {axis!r}), or omit vocab_axis."
        )
    return devices


def _check_ignore_label(label: Any) -> int | None:
    """Return the label as an int of 32 bits, or None."""
    if label is None:
        return None
    label = check_int("ignore_label", label, " (it is fixed while tracing) or None")
    if abs(label) > INT32_MAX:
        raise ValueError(f"ignore_label={text_of(label)}: it must fit in 32 bits.")
    return label


def _check_labels(options: Options, labels: Array, words: int) -> None:
    """Raise an error if a label is known to be none of `words` words, and not ignored."""
    known = known_values(labels)
    if known is None:
        return
    wrong = known[((known < 0) | (known >= words)) & (known != options.ignore_label)]
    if wrong.size:
        cure = "" if options.ignore_label is not None else " Pass ignore_label to leave tokens out."
        raise ValueError(
            f"labels must lie between 0 and V - 1 = {words - 1}; got {wrong.flat[0]}.{cure}"
        )


def _sum_over_devices(sums: Sums, axis: str) -> Sums:
    """Return the sums over the words of all devices."""
    lse, hit, total = sums
    m = lax.pmax(lax.stop_gradient(lse.high), axis)
    shift = jnp.where(m == -jnp.inf, 0, m)
    l = lax.psum(jnp.exp((lse.high - shift) + lse.low), axis)
    return Sums(lse_of_sums(shift, l), lax.psum(hit, axis), lax.psum(total, axis))
