"""Evaluate a function of JAX with 40 decimal digits, as the truth to measure rounding by.

The function is traced, and each equation on floats is computed with Python's decimals. So the
result has the rounding of no float, and shares no code with memeff. Integers and booleans are
computed as JAX computes them, and so is what moves elements.
"""

import decimal
import functools
import operator

import jax
import numpy as np
from jax.extend.core import Literal

from memeff.rewrite.versions import closed, scan_counts

CONTEXT = decimal.Context(prec=40, traps=[], Emin=-(10**12), Emax=10**12)
MOVES = {
    "broadcast_in_dim",
    "concatenate",
    "copy",
    "expand_dims",
    "reshape",
    "slice",
    "squeeze",
    "stack",
    "stop_gradient",
    "transpose",
    "unstack",
}
CALLS = {"jit", "pjit", "remat", "remat2", "checkpoint", "closed_call", "custom_jvp_call"}


def evaluate(f, *arguments):
    """Return the leaves of f(*arguments) as NumPy arrays; floats are arrays of decimals."""
    jaxpr = jax.make_jaxpr(f)(*arguments)
    inputs = [from_float(x) for x in jax.tree.leaves(arguments)]
    with decimal.localcontext(CONTEXT):
        return _run(jaxpr, inputs)


def from_float(x):
    """Return an array with its floats as decimals of the same value."""
    x = np.asarray(x)
    if not np.issubdtype(x.dtype, np.floating):
        return x
    return _each(lambda number: decimal.Decimal(float(number)), x)


def to_float(x):
    """Return an array with its decimals rounded to float64."""
    return x.astype(np.float64) if x.dtype == object else x


def _each(function, *arrays):
    """Return the array of the results of a function of numbers."""
    result = np.frompyfunc(function, len(arrays), 1)(*arrays)
    return np.asarray(result, object)


def _run(jaxpr, inputs):
    """Return the results of a closed jaxpr."""
    values = dict(zip(jaxpr.jaxpr.invars, inputs, strict=True))
    for variable, constant in zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True):
        values[variable] = from_float(constant)

    def read(atom):
        return from_float(atom.val) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.jaxpr.eqns:
        outputs = _equation(eqn, [read(x) for x in eqn.invars])
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(x) for x in jaxpr.jaxpr.outvars]


def _equation(eqn, inputs):
    """Return the results of one equation."""
    name = eqn.primitive.name
    params = eqn.params
    if name in CALLS:
        return _run(closed(params.get("call_jaxpr", params.get("jaxpr"))), inputs)
    if name == "scan":
        return _scan(eqn, inputs)
    if name == "while":
        return _while(eqn, inputs)
    if name == "cond":
        return _run(closed(params["branches"][int(inputs[0])]), inputs[1:])
    is_float = [np.issubdtype(x.aval.dtype, np.floating) for x in (*eqn.invars, *eqn.outvars)]
    if not any(is_float):
        return [np.asarray(x) for x in _bind(eqn, inputs)]
    if name in MOVES:
        return _move(eqn, inputs)
    return [np.asarray(_compute(eqn, inputs))]


def _bind(eqn, inputs):
    """Return the results that JAX gives for other arrays of the same shapes."""
    results = eqn.primitive.bind(*map(np.asarray, inputs), **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


def _move(eqn, inputs):
    """Return the results of an equation that moves elements: find which, and take them."""
    elements = np.concatenate([x.reshape(-1) for x in inputs])
    places = []
    first = 0
    for x in inputs:
        places.append(np.arange(first, first + x.size).reshape(x.shape))
        first += x.size
    return [elements[np.asarray(x)] for x in _bind(eqn, places)]


def _scan(eqn, inputs):
    constants, carried = scan_counts(eqn)
    fixed = inputs[:constants]
    carry = inputs[constants : constants + carried]
    stacked = inputs[constants + carried :]
    steps = range(eqn.params["length"])
    results = {}
    for step in reversed(steps) if eqn.params["reverse"] else steps:
        outputs = _run(closed(eqn.params["jaxpr"]), [*fixed, *carry, *(x[step] for x in stacked)])
        carry = outputs[:carried]
        results[step] = outputs[carried:]
    return [*carry, *(np.stack(x) for x in zip(*(results[step] for step in steps), strict=True))]


def _while(eqn, inputs):
    first = eqn.params["cond_nconsts"]
    second = first + eqn.params["body_nconsts"]
    carry = inputs[second:]
    while _run(closed(eqn.params["cond_jaxpr"]), [*inputs[:first], *carry])[0]:
        carry = _run(closed(eqn.params["body_jaxpr"]), [*inputs[first:second], *carry])
    return carry


def _compute(eqn, inputs):
    """Return the result of an equation that computes with decimals."""
    name = eqn.primitive.name
    params = eqn.params
    if name in _OF_NUMBERS:
        return _each(_OF_NUMBERS[name], *inputs)
    if name in _COMPARISONS:
        return _each(_COMPARISONS[name], *inputs).astype(bool)
    if name in ("reduce_sum", "reduce_max"):
        add = np.frompyfunc(operator.add if name == "reduce_sum" else _OF_NUMBERS["max"], 2, 1)
        axes = sorted(params["axes"], reverse=True)
        return functools.reduce(add.reduce, axes, inputs[0])
    if name == "integer_pow":
        return _each(lambda x: x ** params["y"], inputs[0])
    if not inputs:  # an iota, or an array that is filled later
        (result,) = _bind(eqn, inputs)
        return from_float(result)
    if name == "convert_element_type":
        is_float = np.issubdtype(params["new_dtype"], np.floating)
        assert is_float, "a float that becomes an integer"
        return inputs[0] if inputs[0].dtype == object else from_float(inputs[0].astype(float))
    if name == "select_n":
        cases = np.broadcast_arrays(*inputs)
        return np.where(cases[0], cases[2], cases[1])
    if name == "pad":
        return _pad(*inputs, params["padding_config"])
    if name == "dot_general":
        return _dot_general(*inputs, params["dimension_numbers"])
    raise NotImplementedError(name)


def _pad(x, number, config):
    low, high, inner = zip(*config, strict=True)
    assert min(*low, *high, *inner, 0) == 0
    shape = []
    places = []
    for size, before, after, between in zip(x.shape, low, high, inner, strict=True):
        length = size + between * max(size - 1, 0)
        shape.append(before + length + after)
        places.append(slice(before, before + length, between + 1))
    result = np.full(shape, number.item(), object)
    result[tuple(places)] = x
    return result


def _dot_general(x, y, numbers):
    contracted, batch = numbers
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    names = [[""] * x.ndim, [""] * y.ndim]
    for pairs in (batch, contracted):
        for first, second in zip(*pairs, strict=True):
            names[0][first] = names[1][second] = next(letters)
    free = []
    for own in names:
        free.append([d for d, letter in enumerate(own) if not letter])
        for d in free[-1]:
            own[d] = next(letters)
    out = [names[0][d] for d in batch[0]]
    out += [names[0][d] for d in free[0]] + [names[1][d] for d in free[1]]
    return np.einsum(f"{''.join(names[0])},{''.join(names[1])}->{''.join(out)}", x, y)


def _exp2(x):
    return (x * decimal.Decimal(2).ln()).exp()


def _tanh(x):
    e = (-2 * abs(x)).exp()
    return ((1 - e) / (1 + e)).copy_sign(x)


def _sign(x):
    return decimal.Decimal((x > 0) - (x < 0))


def _maximum(x, y):
    return x if x.is_nan() or x >= y else y


_OF_NUMBERS = {
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "abs": abs,
    "max": _maximum,
    "sign": _sign,
    "one_minus_square": lambda x: 1 - x * x,
    "exp": decimal.Decimal.exp,
    "exp2": _exp2,
    "log": decimal.Decimal.ln,
    "sqrt": decimal.Decimal.sqrt,
    "tanh": _tanh,
}
_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "is_finite": lambda x: x.is_finite(),
}
