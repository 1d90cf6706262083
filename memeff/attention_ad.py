"""The registration with JAX's differentiation, and nothing else: the rules are the plain functions of an implementation.

Attention has a rule for its tangent, and that tangent, linear, has a rule for its transpose: the backward of the
implementation. So one registration serves both modes. The tangent of the backward is that of the tangent's transpose as JAX
makes it of tiles.py, so orders beyond the first need no formulas and take linear memory as well.
"""

import dataclasses
import functools
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from memeff.autodiff.primitives import call
from memeff.chunked.tangent import forward_with_tangent, tangent
from memeff.problem import Gradients, Operands, Problem
from memeff.sharding import vary_together
from memeff.softmax import Lse, LseFor, lse_with_sinks, row_dots

# for jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)
RESIDUAL_NAMES = ("memeff_out", "memeff_lse")


def attend(
    implementation: ModuleType, problem: Problem, want_lse: bool, operands: Operands
) -> tuple[Array, Array | None]:
    """out [B, K, G, T, D] and lse [B, K, G, T] (None unless `want_lse`, so that inference need not store it).

    Gradients come from the implementation's `backward`, or from JAX if it has none.
    """
    forward = Forward(implementation, problem, "caller" if want_lse else None)
    own = hasattr(implementation, "backward")
    out, lse = call(forward, vary_together(operands)) if own else forward(operands)
    return out, lse and lse.high


def _at_once(problem: Problem, axes: Operands) -> int | None:
    """Return how many calls under vmap work at the same time; all, where they share their logits and so make them once."""
    return None if (axes.query, axes.key) == (None, None) else problem.at_once


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _forward(implementation, problem, lse_for, operands):
    operands = _as_one(operands)
    out, lse = implementation.forward(problem, operands, lse_for)
    return out, lse if lse_for else None


def _as_one(operands: Operands) -> Operands:
    """Ties what depends on layer-independent arrays alone (segments: the masks of all tiles) to the query.

    Else a scan over layers would compute those masks once, before it, and keep them: T x T. Query, mask and bias go with one
    dim of heads, which they had at the door: XLA:CPU would copy them for a dim G = 1.
    """
    heads = operands.query, operands.mask, operands.terms.bias
    flat = (lax.collapse(heads[0], 2, 4), *jax.tree.map(lambda x: lax.collapse(x, 1, 3), heads[1:]))
    rest = operands._replace(query=None, mask=None, terms=operands.terms._replace(bias=None))
    flat, rest = lax.optimization_barrier((flat, rest))
    query, mask, bias = jax.tree.map(lambda x, like: x.reshape(like.shape), flat, heads)
    return rest._replace(query=query, mask=mask, terms=rest.terms._replace(bias=bias))


def _without_sinks(operands: Operands) -> tuple[Array | None, Operands]:
    return operands.terms.sinks, operands._replace(terms=operands.terms._replace(sinks=None))


@dataclasses.dataclass(frozen=True)
class Forward:
    """out and lse (None unless it is for somebody) of operands."""

    implementation: ModuleType
    problem: Problem
    lse_for: LseFor

    def __call__(self, operands):
        return _forward(self.implementation, self.problem, self.lse_for, operands)

    def at_once(self, axes):
        return _at_once(self.problem, axes)

    def jvp(self, primals, tangents):
        (operands,), (along,) = primals, tangents
        if self.problem.together and operands.terms.sinks is None:
            (out, lse), (dout, dlse) = call(OnePassJvp(self), operands, along)
        else:
            (out, lse), (dout, dlse) = TwoPassJvp(self)(operands, along)
        if self.lse_for is None:
            return (out, None), (dout, None)
        return (out, lse), (dout, Lse(dlse, None if lse.low is None else jnp.zeros_like(lse.low)))


@dataclasses.dataclass(frozen=True)
class TwoPassJvp:
    """out and lse, and tangents of both: of a forward, and then from its lse."""

    of: Forward

    def __call__(self, operands, along):
        out, lse = call(
            dataclasses.replace(self.of, lse_for=self.of.lse_for or "gradient"), operands
        )
        out = checkpoint_name(out, RESIDUAL_NAMES[0])
        lse = jax.tree.map(lambda x: checkpoint_name(x, RESIDUAL_NAMES[1]), lse)
        return (out, lse), call(
            Tangent(self.of.implementation, self.of.problem), (operands, out, lse), along
        )


@dataclasses.dataclass(frozen=True)
class OnePassJvp:
    """The same from one walk; where JAX wants the tangent later, as in a gradient, from two."""

    of: Forward

    @property
    def apart(self) -> TwoPassJvp:
        return TwoPassJvp(self.of)

    def __call__(self, operands, along):
        return _together(self.of.problem, operands, along)

    def at_once(self, operands, along):
        return _at_once(self.of.problem, operands)

    def jvp(self, primals, tangents):
        return value_and_tangent(self.apart, primals, tangents)


@functools.partial(jax.jit, static_argnums=0)
def _together(problem, operands, along):
    return forward_with_tangent(problem, _as_one(operands), along)


@dataclasses.dataclass(frozen=True)
class Tangent:
    """Tangents of out and lse, linear in those of the operands."""

    implementation: ModuleType
    problem: Problem

    def __call__(self, known, along, narrow=True):
        operands, out, lse = known
        sinks, operands = _without_sinks(operands)
        if sinks is None:
            return self.of_keys((operands, out, lse), along, narrow)
        dsinks, along = _without_sinks(along)
        total, p = lse_with_sinks(lse, sinks)
        dout, _ = self.of_keys((operands, out, total), along, narrow)
        if dsinks is not None:
            dout = (dout - (p * dsinks[..., None])[..., None] * out).astype(out.dtype)
        # XLA drops the walk whose result nobody wants
        return dout, self.of_keys((operands, out, lse), along, narrow)[1]

    def of_keys(self, known, along, narrow):
        """Return tangents where all of the softmax belongs to keys."""
        operands, out, lse = known
        if narrow:
            return self.implementation.tangent(self.problem, _as_one(operands), out, lse, along)
        # for JAX to differentiate
        return tangent(self.problem, _as_one(operands), out, lse, along, narrow=False)

    def at_once(self, known, along):
        return _at_once(self.problem, known[0])

    def types(self, known, along):
        _, out, lse = known
        return out, lse.high

    def jvp(self, primals, tangents):
        (known, along), (dknown, dalong) = primals, tangents
        found = call(self, *primals)
        if not jax.tree.leaves(dknown):
            still = lambda x, dx: None if x is None else jnp.zeros_like(x) if dx is None else dx
            return found, call(
                self, known, jax.tree.map(still, along, dalong, is_leaf=lambda x: x is None)
            )
        return found, tangent_of(functools.partial(self, narrow=False), primals, tangents)

    def transposed(self, args, cotangents):
        (known, along), (dout, dlse) = args, cotangents
        dout = jnp.zeros_like(known[1]) if dout is None else dout
        gradients = call(Backward(self.implementation, self.problem), *known, dout, dlse)
        found = along._replace(**gradients._asdict())
        return jax.tree.map(
            lambda x, g: None if x is None else g, along, found, is_leaf=lambda x: x is None
        )


@dataclasses.dataclass(frozen=True)
class Backward:
    """Gradients in the dtypes and layouts of the operands."""

    implementation: ModuleType
    problem: Problem

    def __call__(self, operands, out, lse, dout, dlse):
        return _backward(self.implementation, self.problem, operands, out, lse, dout, dlse)

    def at_once(self, operands, *rows):
        return _at_once(self.problem, operands)

    def jvp(self, primals, tangents):
        def transposed(operands, out, lse, dout, dlse):
            query, key, value, terms = operands[:4]
            like = jax.tree.map(lambda x: None, operands)._replace(
                query=query, key=key, value=value, terms=terms
            )
            tangent = functools.partial(
                Tangent(self.implementation, self.problem), (operands, out, lse), narrow=False
            )
            some = tangent if dlse is not None else lambda along: tangent(along)[0]
            (back,) = jax.linear_transpose(some, like)(dout if dlse is None else (dout, dlse))
            return Gradients(back.query, back.key, back.value, back.terms)

        return call(self, *primals), tangent_of(transposed, primals, tangents)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(implementation, problem, operands, out, lse, dout, dlse) -> Gradients:
    operands = _as_one(operands)
    sinks, bare = _without_sinks(operands)
    if sinks is None:
        gradients = implementation.backward(problem, operands, out, lse, dout, dlse)
    else:
        total, p = lse_with_sinks(lse, sinks)
        gradients = implementation.backward(problem, bare, out, total, dout, None)
        # of the keys alone: a sink far above them must not take their probabilities away
        if dlse is not None:
            nothing = jnp.zeros_like(out)
            of_lse = implementation.backward(problem, bare, nothing, lse, nothing, dlse)
            gradients = jax.tree.map(lambda x, y: x + y, gradients, of_lse)
        dsinks = -jnp.where(p == 0, 0, p * row_dots(out, dout, p.dtype)).sum((0, 3))
        gradients = gradients._replace(terms=gradients.terms._replace(sinks=dsinks))
    like = Gradients(operands.query, operands.key, operands.value, operands.terms)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, like)


def tangent_of(f, primals, tangents):
    """The tangent of f(*primals) as JAX makes it; None is a tangent of 0."""
    return value_and_tangent(f, primals, tangents)[1]


def value_and_tangent(f, primals, tangents):
    """f(*primals) as well."""
    at, structure = jax.tree.flatten(primals)
    along = structure.flatten_up_to(tangents)
    moving = [n for n, dx in enumerate(along) if dx is not None]

    def of(*parts):
        put = dict(zip(moving, parts, strict=True))
        return f(*jax.tree.unflatten(structure, [put.get(n, x) for n, x in enumerate(at)]))

    return jax.jvp(of, tuple(at[n] for n in moving), tuple(along[n] for n in moving))
