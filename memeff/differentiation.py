"""The registration with JAX's differentiation, and nothing else: the rules are the plain functions of an implementation."""

import functools
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from memeff.problem import Gradients, Operands, Problem
from memeff.sharding import vary_alike

NO_FORWARD_MODE = (
    "memeff.dot_product_attention: forward-mode derivatives (jvp, linearize, jacfwd, hessian) are not there yet in linear "
    'memory. Use reverse mode, or implementation="reference" (quadratic memory), which has both.'
)
RESIDUAL_NAMES = ("memeff_out", "memeff_lse")  # for jax.checkpoint_policies.save_only_these_names(*RESIDUAL_NAMES)


def attend(implementation: ModuleType, problem: Problem, want_lse: bool, operands: Operands) -> tuple[Array, Array | None]:
    """out [B, K, G, T, D] and lse [B, K, G, T] (None unless `want_lse`, so that inference need not store it).

    Gradients come from the implementation's `backward`, or from JAX if it has none.
    """
    if not hasattr(implementation, "backward"):
        out, lse = _forward(implementation, problem, "caller" if want_lse else None, operands)
        return out, lse and lse.high
    operands = jax.tree.map(lambda x: _reverse_only(x) if jnp.issubdtype(x.dtype, jnp.floating) else x, operands)
    try:
        return _attend(implementation, problem, want_lse, vary_alike(operands))
    except TypeError as e:  # JAX is first to refuse under vmap of jvp
        if "forward-mode" not in str(e):
            raise
        raise NotImplementedError(NO_FORWARD_MODE) from e


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(implementation, problem, want_lse, operands):
    out, lse = _forward(implementation, problem, "caller" if want_lse else None, operands)
    return out, lse and lse.high


def _attend_fwd(implementation, problem, want_lse, operands):
    out, lse = _forward(implementation, problem, "caller" if want_lse else "gradient", operands)
    out, lse = checkpoint_name(out, RESIDUAL_NAMES[0]), jax.tree.map(lambda x: checkpoint_name(x, RESIDUAL_NAMES[1]), lse)
    return (out, lse.high if want_lse else None), (operands, out, lse)


def _attend_bwd(implementation, problem, want_lse, saved, cotangents):
    del want_lse  # its cotangent is None where it was not wanted
    operands, out, lse = saved
    gradients = _backward(implementation, problem, operands, out, lse, *cotangents)
    of = jax.tree.map(lambda x: None, operands)  # no cotangent for what is not differentiable
    return (of._replace(**gradients._asdict()),)


_attend.defvjp(_attend_fwd, _attend_bwd)


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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(implementation, problem, operands, out, lse, dout, dlse) -> Gradients:
    """Gradients in the dtypes and layouts of the operands."""
    operands = _as_one(operands)
    gradients = implementation.backward(problem, operands, out, lse, dout, dlse)
    like = Gradients(operands.query, operands.key, operands.value, operands.terms)
    return jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, like)


@_backward.defjvp
def _no_second_order(implementation, problem, primals, tangents):
    del implementation, problem, primals, tangents
    raise NotImplementedError(
        "memeff.dot_product_attention: derivatives of second order are not there yet in linear memory. "
        'Use implementation="reference" (quadratic memory), which has every order.'
    )


# Forward mode: the identity, with a tangent that reverse mode transposes away and that refuses to be computed. (JAX's own
# error for custom_vjp speaks of no cure, and under jit comes from outside our frames.)


@jax.custom_jvp
def _reverse_only(x: Array) -> Array:
    return x


_reverse_only.defjvp(lambda primals, tangents: (primals[0], _tangent.bind(tangents[0])))


def _no_forward_mode(*args, **kwargs):
    del args, kwargs
    raise NotImplementedError(NO_FORWARD_MODE)


_tangent = Primitive("memeff_tangent")
_tangent.def_abstract_eval(lambda x: x)
_tangent.def_impl(_no_forward_mode)
mlir.register_lowering(_tangent, _no_forward_mode)
ad.deflinear2(_tangent, lambda cotangent, x: [cotangent])
batching.primitive_batchers[_tangent] = lambda args, dims: (_tangent.bind(*args), dims[0])
