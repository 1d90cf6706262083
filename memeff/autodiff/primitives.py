"""Functions that bring their own derivatives, as primitives of JAX's. Hides JAX's interface for those.

`jax.custom_jvp` would do but for partial evaluation, which forgets its rule (jax 0.10: in a scan), and linear functions that
bring their transpose are not to be had from JAX with batching. A function f is hashable and has
  f(*args)                         what it computes
  f.jvp(args, tangents)            the same and its tangent; None is a tangent of 0
and, if it is linear in its last argument,
  f.transposed(args, cotangents)   cotangents of what the last argument has, which is given as numbers
or, if the memory that it works in should not grow with the axis of a vmap,
  f.at_once(*axes)                 how many calls under a vmap may run at the same time; None: all. `axes` are the arguments
                                   with 0 in the place of each array that is mapped, and None in that of others
or, if it makes in one go what may be wanted at different times (a result, and its tangent),
  f.apart                          the same function, of calls that JAX may take apart; the first half of what they
                                   return does not depend on the last argument
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import jet
from jax.extend.core import Primitive, jaxpr_as_fun, set_current_trace
from jax.extend.core.primitives import jit_p
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe


class Vmap(NamedTuple):
    """One vmap of a call: the length of its axis, and of each array 0 if its first dim is that axis, or None."""

    size: int
    axes: tuple[int | None, ...]


def call(f, *args) -> Any:
    """f(*args), to be differentiated by f's rules."""
    arrays, structure = jax.tree.flatten(args)
    return jax.tree.unflatten(*_bind(arrays, f, structure, ())[::-1])


def _bind(arrays, f, structure, vmaps):
    """The results, and their structure."""
    avals = [*map(jax.typeof, arrays)]
    primitive = _joint if hasattr(f, "apart") else _call
    if not vmaps and hasattr(f, "types"):  # known without a trace
        found, of_found = jax.tree.flatten(f.types(*jax.tree.unflatten(structure, avals)))
        return primitive.bind(
            *arrays, f=f, structure=structure, vmaps=vmaps, jaxpr=None, types=tuple(found)
        ), of_found
    run = functools.partial(_called, f=f, structure=structure, vmaps=vmaps)
    # JAX looks into it for what wants to know of devices, and for effects (of kernels that are
    # interpreted).
    jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(*avals)
    types = tuple(jaxpr.out_avals)
    found = primitive.bind(*arrays, f=f, structure=structure, vmaps=vmaps, jaxpr=jaxpr, types=types)
    return found, jax.tree.structure(shapes)


def _called(*arrays, f, structure, vmaps):
    """Call `f` under `vmaps`, of which the last is the outermost."""
    if not vmaps:
        return f(*jax.tree.unflatten(structure, arrays))
    *inner, (size, axes) = vmaps
    run = functools.partial(_called, f=f, structure=structure, vmaps=tuple(inner))
    # jax.export: an axis may have any length
    known = all(isinstance(vmap.size, int) for vmap in vmaps)
    most = (
        f.at_once(*jax.tree.unflatten(structure, axes)) if known and hasattr(f, "at_once") else None
    )
    if most is not None:
        most //= math.prod(vmap.size for vmap in inner)
    if most is None or most >= size:
        return jax.vmap(run, in_axes=axes)(*arrays)
    return _some_at_a_time(run, vmaps[-1], largest_divisor(size, max(1, most)), arrays)


def _some_at_a_time(run, vmap: Vmap, some: int, arrays):
    """Return what `jax.vmap(run, vmap.axes)(*arrays)` returns, from `some` calls at the same time."""
    several = () if some == 1 else (some,)

    # without dims of size 1: XLA:CPU copies what a loop reads into a layout of its own if it has
    # any
    def pack(x, axis):
        lead, rest = ((), x.shape) if axis is None else ((vmap.size // some, *several), x.shape[1:])
        return x.reshape(*lead, *(size for size in rest if size != 1))

    def part(packed, x, axis, n):
        if axis is None:
            return packed.reshape(x.shape)
        return lax.dynamic_index_in_dim(packed, n, keepdims=False).reshape(*several, *x.shape[1:])

    packed = [*map(pack, arrays, vmap.axes)]

    def step(n):
        parts = (part(*of, n) for of in zip(packed, arrays, vmap.axes, strict=True))
        return jax.vmap(run, in_axes=vmap.axes)(*parts) if several else run(*parts)

    found = lax.map(step, jnp.arange(vmap.size // some, dtype=jnp.int32))
    return jax.tree.map(lambda x: lax.collapse(x, 0, 2), found) if several else found


def largest_divisor(n: int, limit: int) -> int:
    """Return the largest divisor of `n` up to `limit`."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


def _jvp(primals, tangents, *, f, structure, vmaps, **_):
    moving = [n for n, x in enumerate(tangents) if type(x) is not ad.Zero]

    def rule(vmaps, primals, tangents):
        if vmaps:
            of = vmaps[-1].axes
            mapped = jax.vmap(
                functools.partial(rule, vmaps[:-1]), in_axes=(list(of), [of[n] for n in moving])
            )
            return mapped(primals, tangents)
        along = [None] * len(primals)
        for n, x in zip(moving, tangents, strict=True):
            along[n] = x
        return f.jvp(*(jax.tree.unflatten(structure, x) for x in (primals, along)))

    found = rule(vmaps, list(primals), [tangents[n] for n in moving])
    return tuple(map(jax.tree.leaves, found))


def _linear(structure) -> int:
    """Leaves of the last argument."""
    return structure.children()[-1].num_leaves


def _transpose(cotangents, *args, f, structure, vmaps, **_):
    if not hasattr(f, "transposed"):
        raise NotImplementedError(
            "memeff: jax.linear_transpose of attention itself: use jax.vjp, or linearize it first."
        )
    fixed = len(args) - _linear(structure)
    cotangents = [None if type(x) is ad.Zero else x for x in cotangents]

    def back(vmaps, arrays, cotangents):
        if vmaps:
            of = list(vmaps[-1].axes[:fixed])
            return jax.vmap(functools.partial(back, vmaps[:-1]), in_axes=(of, 0))(
                arrays, cotangents
            )
        given = jax.tree.unflatten(structure, [*arrays, *range(len(args) - fixed)])
        return jax.tree.leaves(f.transposed(given, cotangents))

    found = back(vmaps, list(args[:fixed]), cotangents)
    return [None] * fixed + [
        x if ad.is_undefined_primal(y) else None for x, y in zip(found, args[fixed:], strict=True)
    ]


def _batch(axis_data, arrays, dims, *, f, structure, vmaps, **_):
    if all(axis is None for axis in dims):
        found, _ = _bind(arrays, f, structure, vmaps)
        return found, [None] * len(found)
    fixed = len(arrays) - (_linear(structure) if hasattr(f, "transposed") else 0)
    arrays, dims = batched(axis_data, arrays, dims, fixed)
    found, of_found = _bind(arrays, f, structure, (*vmaps, Vmap(axis_data.size, dims)))
    still = 0  # results in which nothing is mapped: jacfwd relies on it
    if hasattr(f, "apart") and all(
        axis is None for axis in dims[: len(arrays) - _linear(structure)]
    ):
        still = of_found.children()[0].num_leaves
    return [*(x[0] for x in found[:still]), *found[still:]], [None] * still + [0] * (
        len(found) - still
    )


def batched(axis_data, arrays, axes, fixed: int) -> tuple[list[Array], tuple[int | None, ...]]:
    """With the mapped dim first, in all arrays behind the first `fixed`: so that cotangents of what has none are summed."""
    move = lambda x, axis: x if axis is None else jnp.moveaxis(x, axis, 0)
    spread = lambda x, axis: (
        jnp.broadcast_to(x, (axis_data.size, *x.shape)) if axis is None else move(x, axis)
    )
    arrays = [*map(move, arrays[:fixed], axes[:fixed]), *map(spread, arrays[fixed:], axes[fixed:])]
    return arrays, (
        *(None if axis is None else 0 for axis in axes[:fixed]),
        *[0] * len(arrays[fixed:]),
    )


@functools.lru_cache
def _jitted(**params):
    return jax.jit(functools.partial(_called, **params))


def _run(*arrays, f, structure, vmaps, **_):
    return jax.tree.leaves(_jitted(f=f, structure=structure, vmaps=vmaps)(*arrays))


def _lowered(*arrays, f, structure, vmaps, jaxpr, **_):
    if jaxpr is not None:
        return jaxpr_as_fun(jaxpr)(*arrays)
    return jax.tree.leaves(_called(*arrays, f=f, structure=structure, vmaps=vmaps))


def _types(*_, jaxpr, types, **__):
    return types, frozenset() if jaxpr is None else jaxpr.effects


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(_run)
    primitive.def_effectful_abstract_eval(_types)
    mlir.register_lowering(primitive, mlir.lower_fun(_lowered, multiple_results=True))
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.fancy_primitive_batchers[primitive] = _batch
    return primitive


# ---- where JAX knows some arguments now and others later: in a gradient, or under jax.checkpoint


def _known_apart(trace, *tracers, f, structure, vmaps, **params):
    if all(x.is_known() for x in tracers):
        return trace.default_process_primitive(
            _joint, tracers, dict(f=f, structure=structure, vmaps=vmaps, **params)
        )
    with set_current_trace(trace):
        found = jax.tree.leaves(_called(*tracers, f=f.apart, structure=structure, vmaps=vmaps))
    return [*map(trace.to_jaxpr_tracer, found)]


def _equation_apart(saveable, unknown, instantiated, equation):
    """The rule of an equation that calls what `apart` does."""
    f, structure, vmaps = (equation.params[name] for name in ("f", "structure", "vmaps"))
    run = functools.partial(_called, f=f.apart, structure=structure, vmaps=vmaps)
    (call,) = jax.make_jaxpr(jax.jit(run))(*(x.aval for x in equation.invars)).eqns
    call = call.replace(
        invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info
    )
    return pe.partial_eval_jaxpr_custom_rules[jit_p](saveable, unknown, instantiated, call)


def _refuse_jet(*_, **__):
    raise NotImplementedError(
        "memeff does not support jax.experimental.jet, because attention has no Taylor rule. Nest jax.jvp instead."
    )


_call = _primitive("memeff_call")
_joint = _primitive("memeff_joint")
jet.jet_rules.update({_call: _refuse_jet, _joint: _refuse_jet})
pe.custom_partial_eval_rules[_joint] = _known_apart
pe.partial_eval_jaxpr_custom_rules[_joint] = _equation_apart
