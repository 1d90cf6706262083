"""Call functions that bring their own derivatives, as primitives of JAX.

Two things of JAX's own are missing for this. `jax.custom_jvp` loses its rule in partial evaluation
(jax 0.10: in a scan), and JAX does not batch linear functions that bring their transpose.

A function f is hashable and has
  f(*args)                         results
  f.jvp(args, tangents)            results and their tangents; None stands for a tangent of 0
and, if it is linear in its last argument,
  f.transposed(args, cotangents)   cotangents of the last argument; its leaves are replaced by ints
and optionally
  f.types(*args)                   types of the results, so that they need no trace
  f.calls_at_once(*axes)           how many calls under a vmap may run at the same time, so that
                                   their memory does not grow with its axis; None: all. `axes` are
                                   the arguments with 0 for each mapped array, None for each other
  f.in_batch(size, axes, *args)    results under a vmap over an axis of `size`, which is the first
                                   dim of each; None: f has no own way to compute them
  f.sums_over_devices              present if some results are the same on devices of a shard_map
                                   whose arguments differ
  f.two_pass                       the same function in two passes, if f computes in one pass what
                                   JAX may need at different times (a result, and its tangent). The
                                   first half of its results does not depend on the last argument
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import jet
from jax.extend.core import Primitive, jaxpr_as_fun, set_current_trace
from jax.extend.core.primitives import jit_p
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from memeff.problem import sum_dtype
from memeff.sharding import vary_like


class Vmap(NamedTuple):
    """One vmap of a call."""

    size: int  # of its axis
    axes: tuple[int | None, ...]  # of each array: 0 if its first dim is that axis, else None


@dataclasses.dataclass(frozen=True)
class FlatFunction:
    """A function f under vmaps, as a function of the arrays in its arguments."""

    f: Any
    structure: Any  # of the arguments
    vmaps: tuple[Vmap, ...] = ()  # the last is the outermost

    def arguments(self, leaves) -> Any:
        """Return arguments of f with these leaves."""
        return jax.tree.unflatten(self.structure, leaves)

    @property
    def linear(self) -> int:
        """Return the number of leaves of the last argument."""
        return self.structure.children()[-1].num_leaves

    def in_two_passes(self) -> "FlatFunction":
        """Return the same function, computed by `f.two_pass`."""
        return dataclasses.replace(self, f=self.f.two_pass)

    def run(self, *arrays):
        """Return the results of f."""
        if not self.vmaps:
            results = self.f(*self.arguments(arrays))
            if hasattr(self.f, "sums_over_devices"):
                return results
            # jnp.where forgets over which devices an array without numbers varies
            return vary_like(results, arrays)
        *inner, vmap = self.vmaps
        run = dataclasses.replace(self, vmaps=tuple(inner)).run
        count = self.calls_of_group()
        if count is None:
            return jax.vmap(run, in_axes=vmap.axes)(*arrays)
        return _run_in_groups(run, vmap, count, arrays)

    def calls_of_group(self) -> int | None:
        """Return how many calls of the last vmap run at the same time; None: all."""
        *inner, vmap = self.vmaps
        limit = self._calls_at_once()
        if limit is None:
            return None
        limit //= math.prod(vmap.size for vmap in inner)
        return None if limit >= vmap.size else largest_divisor(vmap.size, max(1, limit))

    def _calls_at_once(self) -> int | None:
        """Return how many calls under all vmaps may run at the same time; None: all."""
        if not hasattr(self.f, "calls_at_once"):
            return None
        if not all(isinstance(vmap.size, int) for vmap in self.vmaps):  # symbolic, by jax.export
            return None
        return self.f.calls_at_once(*self.arguments(self.vmaps[-1].axes))


def call(f, *args) -> Any:
    """Return f(*args), which JAX differentiates by f's rules."""
    arrays, structure = jax.tree.flatten(args)
    results, result_structure = _bind(arrays, FlatFunction(f, structure))
    return jax.tree.unflatten(result_structure, results)


def _bind(arrays, flat: FlatFunction):
    """Return the results of a call as a list of arrays, and their structure."""
    avals = [jax.typeof(x) for x in arrays]
    primitive = _joint if hasattr(flat.f, "two_pass") else _call
    if not flat.vmaps and hasattr(flat.f, "types"):
        jaxpr = None
        types, result_structure = jax.tree.flatten(flat.f.types(*flat.arguments(avals)))
    else:
        # JAX searches the jaxpr for primitives that depend on devices, and for effects (of
        # interpreted kernels).
        jaxpr, shapes = jax.make_jaxpr(flat.run, return_shape=True)(*avals)
        types = jaxpr.out_avals
        result_structure = jax.tree.structure(shapes)
    results = primitive.bind(*arrays, flat=flat, jaxpr=jaxpr, types=tuple(types))
    return results, result_structure


def _run_in_groups(run, vmap: Vmap, count: int, arrays):
    """Return `jax.vmap(run, vmap.axes)(*arrays)`, with `count` calls at the same time."""
    run_group, groups = _groups(run, vmap, count, arrays)
    results = lax.map(run_group, groups)
    return results if count == 1 else jax.tree.map(_join_groups, results)


def _join_groups(x: Array) -> Array:
    """Return the results [groups, count, ...] of all calls as one dim."""
    return lax.collapse(x, 0, 2)


def _sum_in_groups(run, vmap: Vmap, count: int, arrays, shared: Sequence[bool]) -> list[Array]:
    """Return what `_run_in_groups` returns, but of each `shared` result the sum over all calls.

    Groups are added up one after the other, so that no array has the shared results of all calls.
    The sums are in float32 or float64.
    """
    run_group, groups = _groups(run, vmap, count, arrays)

    def sums_of_group(n):
        return _sum_shared(run_group(n), shared, count > 1)

    # Without the checkpoint a gradient of this loop keeps what each step computes.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(totals, n):
        results = sums_of_group(n)
        totals = [x + results[place] for place, x in zip(places, totals, strict=True)]
        return totals, put_at(results, places, [None] * len(places))

    places = [n for n, is_shared in enumerate(shared) if is_shared]
    types = jax.make_jaxpr(sums_of_group)(groups[0]).out_avals
    zeros = [ad.instantiate_zeros(ad.Zero(x)) for x in pick(types, places)]
    totals, results = lax.scan(step, zeros, groups)
    if count > 1:
        results = jax.tree.map(_join_groups, results)
    return put_at(results, places, totals)


def _sum_shared(results, shared: Sequence[bool], mapped: bool = True) -> list[Array]:
    """Return results, with each `shared` one added up over calls in float32 or float64.

    The first dim of `mapped` results is that of the calls. Other results are those of one call.
    """
    sums = []
    for x, is_shared in zip(results, shared, strict=True):
        if is_shared:
            x = x.astype(sum_dtype(x.dtype))
            x = x.sum(0) if mapped else x
        sums.append(x)
    return sums


def _groups(run, vmap: Vmap, count: int, arrays) -> tuple[Callable[[Array], Any], Array]:
    """Return a function that runs the calls of group n under `vmap`, and the numbers of groups."""
    axes = vmap.axes
    groups = vmap.size // count
    group = () if count == 1 else (count,)

    def pack(x, axis):
        """Return x without dims of size 1, and with its mapped axis, if any, cut to groups.

        XLA:CPU copies the inputs of a loop into a layout of its own if they have such dims.
        """
        lead = ()
        rest = x.shape
        if axis is not None:
            lead = (groups, *group)
            rest = rest[1:]
        rest = [size for size in rest if size != 1]
        return x.reshape(*lead, *rest)

    packed = list(map(pack, arrays, axes))

    def part(packed, x, axis, n):
        """Return group `n` of x, or all of x if it is not mapped."""
        if axis is None:
            return packed.reshape(x.shape)
        packed = lax.dynamic_index_in_dim(packed, n, keepdims=False)
        return packed.reshape(*group, *x.shape[1:])

    def run_group(n):
        parts = [part(*array, n) for array in zip(packed, arrays, axes, strict=True)]
        if group:
            return jax.vmap(run, in_axes=axes)(*parts)
        return run(*parts)

    return run_group, jnp.arange(groups, dtype=jnp.int32)


def largest_divisor(n: int, limit: int) -> int:
    """Return the largest divisor of `n` up to `limit`."""
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


def _jvp(primals, tangents, *, flat: FlatFunction, **_):
    """Return the results and their tangents by f.jvp, under the vmaps."""
    active = nonzero(tangents)

    def rule(vmaps, primals, active_tangents):
        if vmaps:
            *inner, (_, axes) = vmaps
            inner_rule = functools.partial(rule, inner)
            in_axes = list(axes), pick(axes, active)
            return jax.vmap(inner_rule, in_axes)(primals, active_tangents)
        tangents = put_at([None] * len(primals), active, active_tangents)
        return flat.f.jvp(flat.arguments(primals), flat.arguments(tangents))

    results, result_tangents = rule(flat.vmaps, list(primals), pick(tangents, active))
    return jax.tree.leaves(results), jax.tree.leaves(result_tangents)


def _transpose(cotangents, *args, flat: FlatFunction, **_):
    """Return the cotangents of the last argument by f.transposed, under the vmaps."""
    if not hasattr(flat.f, "transposed"):
        raise NotImplementedError(
            "memeff does not support jax.linear_transpose of attention itself. "
            "Use jax.vjp, or transpose the function that jax.linearize returns."
        )
    fixed = len(args) - flat.linear
    present = nonzero(cotangents)

    def rule(vmaps, *arrays):
        if not vmaps:
            known = flat.arguments([*arrays[:fixed], *range(flat.linear)])
            some = put_at([None] * len(cotangents), present, arrays[fixed:])
            return jax.tree.leaves(flat.f.transposed(known, some))
        *inner, (size, axes) = vmaps
        run = functools.partial(rule, inner)
        vmap = Vmap(size, (*axes[:fixed], *[0] * len(present)))
        shared = [axis is None for axis in axes[fixed:]]  # all calls have the same array
        count = dataclasses.replace(flat, vmaps=tuple(vmaps)).calls_of_group()
        if count is None or not any(shared):
            return _sum_shared(jax.vmap(run, in_axes=vmap.axes)(*arrays), shared)
        return _sum_in_groups(run, vmap, count, arrays, shared)

    transposed = rule(flat.vmaps, *args[:fixed], *pick(cotangents, present))
    results: list[Any] = [None] * fixed
    for x, arg in zip(transposed, args[fixed:], strict=True):
        is_unknown = ad.is_undefined_primal(arg)
        results.append(x.astype(arg.aval.dtype) if is_unknown else None)
    return results


def _batch(axis_data, arrays, axes, *, flat: FlatFunction, **_):
    """Call f under one more vmap."""
    if none_mapped(axes):
        results, _ = _bind(arrays, flat)
        return results, [None] * len(results)
    arrays, axes = mapped_axis_first(arrays, axes)
    if axis_data.size != 0:
        return _batch_calls(axis_data.size, arrays, axes, flat)
    # No call runs. One call gives the shapes of results, and the results that all calls share.
    one_call = []
    for x, axis in zip(arrays, axes, strict=True):
        padding = [(1, 0), *[(0, 0)] * (x.ndim - 1)]
        one_call.append(x if axis is None else jnp.pad(x, padding))
    results, axes = _batch_calls(1, one_call, axes, flat)
    return [x if axis is None else x[:0] for x, axis in zip(results, axes, strict=True)], axes


def _batch_calls(size, arrays, axes, flat: FlatFunction):
    """Call f under one more vmap of `size` > 0, whose axis is the first dim of mapped arrays."""
    if hasattr(flat.f, "in_batch") and not flat.vmaps:
        in_axes = flat.arguments(axes)
        results = flat.f.in_batch(size, in_axes, *flat.arguments(arrays))
        if results is not None:
            results = jax.tree.leaves(results)
            return results, [0] * len(results)
    vmaps = (*flat.vmaps, Vmap(size, axes))
    results, result_structure = _bind(arrays, dataclasses.replace(flat, vmaps=vmaps))
    count = 0  # of results that are the same in all calls: jacfwd relies on it
    if hasattr(flat.f, "two_pass") and none_mapped(axes[: len(arrays) - flat.linear]):
        count = result_structure.children()[0].num_leaves
    unmapped = [x[0] for x in results[:count]]
    mapped = results[count:]
    return [*unmapped, *mapped], [None] * count + [0] * len(mapped)


def mapped_axis_first(arrays, axes) -> tuple[list[Array], tuple[int | None, ...]]:
    """Move the mapped axis of each array to its front, and return the arrays and their axes."""
    moved = []
    for x, axis in zip(arrays, axes, strict=True):
        moved.append(x if axis is None else jnp.moveaxis(x, axis, 0))
    return moved, tuple(None if axis is None else 0 for axis in axes)


def none_mapped(axes: Iterable[int | None]) -> bool:
    """Return True if vmap maps no array."""
    return all(axis is None for axis in axes)


def nonzero(tangents: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of tangents, or cotangents, that JAX does not know to be zero."""
    return tuple(n for n, x in enumerate(tangents) if type(x) is not ad.Zero)


def or_zeros(x: Array, dx: Array | None) -> Array:
    """Return the tangent `dx` of `x`, as zeros if it is None."""
    return jnp.zeros_like(x) if dx is None else dx


def pick(values: Sequence[Any], indices: Iterable[int]) -> tuple[Any, ...]:
    """Return the values at `indices`."""
    return tuple(values[n] for n in indices)


def put_at(values: Sequence[Any], indices: Iterable[int], new_values: Iterable[Any]) -> list[Any]:
    """Return a copy of `values` with `new_values` at `indices`."""
    result = list(values)
    for n, x in zip(indices, new_values, strict=True):
        result[n] = x
    return result


@functools.lru_cache
def _jitted(flat: FlatFunction):
    """Return a compiled call."""
    return jax.jit(flat.run)


def _run_compiled(*arrays, flat: FlatFunction, **_):
    """Run a call outside of any trace."""
    return jax.tree.leaves(_jitted(flat)(*arrays))


def _lowered(*arrays, flat: FlatFunction, jaxpr, **_):
    """Trace a call for compilation."""
    if jaxpr is not None:
        return jaxpr_as_fun(jaxpr)(*arrays)
    return jax.tree.leaves(flat.run(*arrays))


def _types(*_, jaxpr, types, **__):
    """Return the types of the results, and their effects."""
    return types, frozenset() if jaxpr is None else jaxpr.effects


def _primitive(name: str) -> Primitive:
    """Return a primitive with all rules but those of partial evaluation."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(_run_compiled)
    primitive.def_effectful_abstract_eval(_types)
    mlir.register_lowering(primitive, mlir.lower_fun(_lowered, multiple_results=True))
    ad.primitive_jvps[primitive] = _jvp
    ad.primitive_transposes[primitive] = _transpose
    batching.fancy_primitive_batchers[primitive] = _batch
    return primitive


# ---- partial evaluation: in a gradient, or under jax.checkpoint, JAX knows some arguments earlier


def _partial_eval(trace, *tracers, flat: FlatFunction, **params):
    """Call f in one pass if all arguments are known, and in two passes otherwise."""
    if all(x.is_known() for x in tracers):
        return trace.default_process_primitive(_joint, tracers, dict(params, flat=flat))
    with set_current_trace(trace):
        results = jax.tree.leaves(flat.in_two_passes().run(*tracers))
    return [trace.to_jaxpr_tracer(x) for x in results]


def _partial_eval_equation(saveable, unknown, instantiated, equation):
    """Apply the rule of jit to an equation that calls `f.two_pass` in the place of f."""
    flat = equation.params["flat"].in_two_passes()
    avals = [x.aval for x in equation.invars]
    (jitted,) = jax.make_jaxpr(jax.jit(flat.run))(*avals).eqns
    jitted = jitted.replace(
        invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info
    )
    rule = pe.partial_eval_jaxpr_custom_rules[jit_p]
    return rule(saveable, unknown, instantiated, jitted)


def _refuse_jet(*_, **__):
    """Refuse Taylor mode."""
    raise NotImplementedError(
        "memeff does not support jax.experimental.jet, because attention has no Taylor rule. "
        "Nest jax.jvp instead."
    )


_call = _primitive("memeff_call")
_joint = _primitive("memeff_joint")
jet.jet_rules.update({_call: _refuse_jet, _joint: _refuse_jet})
pe.custom_partial_eval_rules[_joint] = _partial_eval
pe.partial_eval_jaxpr_custom_rules[_joint] = _partial_eval_equation
