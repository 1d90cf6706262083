"""Register attention with JAX's differentiation.

The rules are plain functions of an implementation. Attention has a rule for its tangent. The
tangent is linear and has a rule for its transpose: the implementation's backward. So one
registration serves both modes. JAX makes the tangent of the backward by transposing
`chunked.tangent`, a sum over tiles (autodiff/tile_sum.py). Therefore orders beyond the first need
no formulas, and they take linear memory as well.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from memeff.autodiff.primitives import call, or_zeros, pick, put_at
from memeff.chunked.tangent import forward_with_tangent
from memeff.implementations import Chosen
from memeff.order import hold
from memeff.problem import Gradients, Operands, accumulator_dtype
from memeff.query_positions import nan_without_params
from memeff.sharding import vary_like, vary_together, varying_axes
from memeff.softmax import Lse, LseFor, lse_with_sinks, row_dots, spread_sinks

# for jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
RESIDUAL_NAMES = ("memeff_out", "memeff_lse")


def attend(chosen: Chosen, want_lse: bool, operands: Operands) -> tuple[Array, Array | None]:
    """Return out [B, K, G, T, D] and lse [B, K, G, T], or None for lse unless `want_lse`.

    Inference need not store lse. Gradients come from the implementation's `backward`, or from JAX
    if it has none.
    """
    forward = Forward(chosen, "caller" if want_lse else None)
    if hasattr(chosen.module, "backward"):
        out, lse = call(forward, operands)
    else:
        out, lse = forward(operands)
    return nan_without_params(chosen.problem, operands, (out, lse and lse.high))


def _calls_at_once(chosen: Chosen, axes: Operands) -> int | None:
    """Return how many calls under vmap run at the same time; None: all.

    Calls that share query and key all run together, because they compute their logits once.
    """
    if axes.query is None and axes.key is None:
        return None
    return chosen.schedule.calls_at_once


@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(chosen, lse_for, operands):
    """Return out and lse of `operands`."""
    operands = _tie_to_query(vary_together(operands))
    out, lse = chosen.module.forward(chosen.problem, chosen.schedule, operands, lse_for)
    return out, lse if lse_for else None


def _tie_to_query(operands: Operands) -> Operands:
    """Make segment masks and the like depend on the query.

    Otherwise a scan over layers hoists them out and stores T x T of them.
    """
    return lax.optimization_barrier(operands)


def _without_sinks(operands: Operands) -> tuple[Array | None, Operands]:
    """Return the sinks, and the operands without them."""
    params = operands.logit_params
    return params.sinks, operands._replace(logit_params=params._replace(sinks=None))


@dataclasses.dataclass(frozen=True)
class Forward:
    """The function from operands to out and lse (None if nobody reads it)."""

    chosen: Chosen
    lse_for: LseFor

    def __call__(self, operands):
        return _forward(self.chosen, self.lse_for, operands)

    def calls_at_once(self, axes):
        """Return how many calls under vmap run at the same time."""
        return _calls_at_once(self.chosen, axes)

    def jvp(self, primals, tangents):
        """Return out and lse, and the tangents of both."""
        (operands,) = primals
        (tangents,) = tangents
        if self.chosen.schedule.one_pass_jvp and operands.logit_params.sinks is None:
            (out, lse), (dout, dlse) = call(OnePassJvp(self), operands, tangents)
        else:
            (out, lse), (dout, dlse) = TwoPassJvp(self)(operands, tangents)
        if self.lse_for is None:
            return (out, None), (dout, None)
        dlow = None if lse.low is None else jnp.zeros_like(lse.low)
        return (out, lse), (dout, Lse(dlse, dlow))


@dataclasses.dataclass(frozen=True)
class TwoPassJvp:
    """The function from operands and tangents to out, lse and their tangents, in two passes.

    The first pass is a forward, and the second starts from its lse.
    """

    forward: Forward

    def __call__(self, operands, tangents):
        lse_for = self.forward.lse_for or "gradient"
        out, lse = call(dataclasses.replace(self.forward, lse_for=lse_for), operands)
        out = checkpoint_name(out, RESIDUAL_NAMES[0])
        lse = jax.tree.map(lambda x: checkpoint_name(x, RESIDUAL_NAMES[1]), lse)
        tangent = Tangent(self.forward.chosen)
        return (out, lse), call(tangent, (operands, out, lse), tangents)


@dataclasses.dataclass(frozen=True)
class OnePassJvp:
    """The function from operands and tangents to out, lse and their tangents, in one pass.

    If JAX needs the tangents later, as in a gradient, it takes two passes (`two_pass`).
    """

    forward: Forward

    @property
    def two_pass(self) -> TwoPassJvp:
        """Return the function that JAX may split into forward and tangent."""
        return TwoPassJvp(self.forward)

    def __call__(self, operands, tangents):
        return _one_pass_jvp(self.forward.chosen, operands, tangents)

    def calls_at_once(self, operands, tangents):
        """Return how many calls under vmap run at the same time."""
        return _calls_at_once(self.forward.chosen, operands)

    def jvp(self, primals, tangents):
        """Return the results and their tangents, as JAX derives them from two passes."""
        return value_and_tangent(self.two_pass, primals, tangents)


@functools.partial(jax.jit, static_argnums=0)
def _one_pass_jvp(chosen, operands, tangents):
    """Return out and lse, and the tangents of both."""
    operands, tangents = vary_together((operands, tangents))
    operands = _tie_to_query(operands)
    return forward_with_tangent(chosen.problem, chosen.schedule, operands, tangents)


@dataclasses.dataclass(frozen=True)
class Tangent:
    """The function from tangents of the operands to those of out and lse; it is linear."""

    chosen: Chosen

    def __call__(self, known, tangents, narrow=True):
        operands, out, lse = known
        sinks, operands = _without_sinks(operands)
        if sinks is None:
            return self._over_keys((operands, out, lse), tangents, narrow)
        dsinks, tangents = _without_sinks(tangents)
        total, p = lse_with_sinks(lse, sinks)
        dout, _ = self._over_keys((operands, out, total), tangents, narrow)
        if dsinks is not None:
            from_sinks = (p * spread_sinks(dsinks, p))[..., None] * out.astype(p.dtype)
            dout = (dout.astype(p.dtype) - from_sinks).astype(out.dtype)
        if narrow:  # JAX need not transpose this; the two passes run in turn, as in `_backward`
            dout, lse = hold(lse, dout)
        # XLA drops this pass if its result is unused
        _, dlse = self._over_keys((operands, out, lse), tangents, narrow)
        return dout, dlse

    def _over_keys(self, known, tangents, narrow):
        """Return the tangents of a softmax over keys only.

        `narrow`: multiply 16-bit operands in 16 bits. Otherwise JAX can differentiate the result.
        """
        operands, out, lse = known
        operands, tangents = vary_together((operands, tangents), out)
        operands = _tie_to_query(operands)
        problem, schedule, module = self.chosen
        return module.tangent(problem, schedule, operands, out, lse, tangents, narrow)

    def calls_at_once(self, known, tangents):
        """Return how many calls under vmap run at the same time."""
        return _calls_at_once(self.chosen, known[0])

    def types(self, known, tangents):
        """Return the types of the results without a trace."""
        _, out, lse = known
        return out, lse.high

    def jvp(self, primals, tangents):
        """Return the tangents of out and lse, and the tangents of these."""
        known, first_tangents = primals
        dknown, dtangents = tangents
        result = call(self, *primals)
        if jax.tree.leaves(dknown):
            differentiable = functools.partial(self, narrow=False)
            return result, tangent_of(differentiable, primals, tangents)

        # linear: the tangent of the result is the same function of the tangent
        dtangents = jax.tree.map(or_zeros, first_tangents, dtangents)
        return result, call(self, known, dtangents)

    def transposed(self, args, cotangents):
        """Return cotangents of the operands' tangents, from those of out and lse."""
        known, tangents = args
        dout, dlse = cotangents
        dout = jnp.zeros_like(known[1]) if dout is None else dout
        gradients = call(Backward(self.chosen), known, (dout, dlse))
        result = tangents._replace(**gradients._asdict())
        # None stays None: what has no tangent has no cotangent
        return jax.tree.map(lambda g, x: None if x is None else g, result, tangents)


@dataclasses.dataclass(frozen=True)
class Backward:
    """The function from cotangents of out and lse to gradients like the operands; it is linear.

    Under shard_map, the gradient of an operand that all devices share is summed over them before it
    is rounded.
    """

    chosen: Chosen
    sums_over_devices = True

    def __call__(self, known, cotangents):
        return _backward(self.chosen, *known, *cotangents)

    def calls_at_once(self, known, cotangents):
        """Return how many calls under vmap run at the same time."""
        return _calls_at_once(self.chosen, known[0])

    def jvp(self, primals, tangents):
        """Return the gradients, and their tangents as those of the transposed `Tangent`."""

        def transposed(known, cotangents):
            operands, out, lse = known
            dout, dlse = cotangents
            like = jax.tree.map(lambda x: None, operands)
            like = like._replace(**_differentiable(operands)._asdict())

            def outputs_with_cotangents(tangents):
                tangent = Tangent(self.chosen)
                results = tangent((operands, out, lse), tangents, narrow=False)
                return results[0] if dlse is None else results

            transpose = jax.linear_transpose(outputs_with_cotangents, like)
            (result,) = transpose(dout if dlse is None else (dout, dlse))
            return _differentiable(result)

        return call(self, *primals), tangent_of(transposed, primals, tangents)

    def transposed(self, args, cotangents):
        """Return cotangents of those of out and lse, from cotangents of the gradients."""
        known, (_, dlse) = args
        operands = known[0]
        structure = jax.tree.structure(_differentiable(operands))
        gradients = jax.tree.unflatten(structure, cotangents)
        tangents = jax.tree.map(lambda x: None, operands)._replace(**gradients._asdict())
        results = call(Tangent(self.chosen), known, tangents)
        return results[0] if dlse is None else results


def _differentiable(operands: Operands) -> Gradients:
    """Return the operands that have gradients, each in the field of its gradient."""
    return Gradients(operands.query, operands.key, operands.value, operands.logit_params)


@functools.partial(jax.jit, static_argnums=0)
def _backward(chosen, operands, out, lse, dout, dlse) -> Gradients:
    """Return the gradients in the dtypes and layouts of the operands."""
    wanted = _differentiable(operands)
    operands = _tie_to_query(vary_together(operands, dout))
    sinks, bare = _without_sinks(operands)
    backward = functools.partial(chosen.module.backward, chosen.problem, chosen.schedule)
    if sinks is None:
        gradients = backward(operands, out, lse, dout, dlse)
    else:
        total, p = lse_with_sinks(lse, sinks)
        gradients = backward(bare, out, total, dout, None)
        # lse is over keys only: a sink far above them must not take their probabilities away
        if dlse is not None:
            # Otherwise XLA would interleave the two rings of a sharded sequence, and hold the
            # arrays of both.
            gradients, (lse, dlse) = hold((lse, dlse), gradients)
            zeros = jnp.zeros_like(out)
            from_lse = backward(bare, zeros, lse, zeros, dlse)
            gradients = jax.tree.map(operator.add, gradients, from_lse)
        dsinks = -jnp.where(p == 0, 0, p * row_dots(out, dout, p.dtype)).sum((0, 3))  # k g
        dparams = gradients.logit_params._replace(sinks=dsinks.reshape(sinks.shape))
        gradients = gradients._replace(logit_params=dparams)
    gradients = vary_like(gradients, (operands, dout))
    return jax.tree.map(functools.partial(_finish, accumulator_dtype(operands)), gradients, wanted)


def _finish(dtype, gradient: Array, like: Array) -> Array:
    """Return a device's gradient in the dtype of `like`, summed in `dtype` over devices.

    These are the devices that have the same `like`.
    """
    axes = tuple(varying_axes(gradient) - varying_axes(like))
    if axes:
        gradient = lax.psum(gradient.astype(dtype), axes)
    return gradient.astype(like.dtype)


def tangent_of(f, primals, tangents):
    """Return the tangent of f(*primals) as JAX derives it; a tangent of None is 0."""
    return value_and_tangent(f, primals, tangents)[1]


def value_and_tangent(f, primals, tangents):
    """Return f(*primals) and its tangent as JAX derives it; a tangent of None is 0."""
    arrays, structure = jax.tree.flatten(primals)
    tangents = structure.flatten_up_to(tangents)
    active = [n for n, dx in enumerate(tangents) if dx is not None]

    def f_of_active(*active_arrays):
        leaves = put_at(arrays, active, active_arrays)
        return f(*jax.tree.unflatten(structure, leaves))

    return jax.jvp(f_of_active, pick(arrays, active), pick(tangents, active))
