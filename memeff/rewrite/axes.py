"""Follow the axes of arrays backward through equations that only move or map elements.

An axis of more than one element is a `Letter`. An index has, for each dim of an array, the letters
that count along it, the slowest first. A dim of size 1 has none. A reshape that splits an axis
splits its letter, so that every earlier index stays valid (`expand`).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from memeff.rewrite.graph import Equation, Value, first_equal
from memeff.rewrite.numbers import as_numpy, compute

# Each element of the result is computed from the elements of the operands at the same index.
ELEMENTWISE = frozenset(
    "abs add and atan2 cbrt ceil clamp convert_element_type copy cos cosh div eq erf erf_inv erfc "
    "exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg "
    "nextafter not or pow reduce_precision rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan "
    "tanh xor".split()
)
RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
# shard_map marks values as varying over devices, checkpoint_name names them for a remat, and a
# sharding constraint says on which devices they lie. None of them changes a number.
MARKS = frozenset({"pvary", "pcast", "name", "sharding_constraint"})
MOVES = RESHAPES | MARKS | {"broadcast_in_dim", "tile", "transpose", "slice", "dynamic_slice"}
SAME_NUMBER = RESHAPES | MARKS | {"broadcast_in_dim", "tile", "copy", "stop_gradient"}
JOINS = frozenset({"concatenate", "pad"})  # place arrays beside one another
MOST_STEPS = 100  # equations that make a mask which a loop receives


class NoMatch(Exception):
    """A place is not attention in a form that can be replaced. The text says why."""


class NoAttention(NoMatch):
    """The operand of a product is not a softmax, so there is nothing to report."""


@dataclasses.dataclass(eq=False, slots=True)
class Letter:
    """An axis: its size, and the two letters into which a reshape has split it."""

    size: int
    parts: tuple[Letter, Letter] | None = None

    def __repr__(self) -> str:
        return f"<{self.size}>"


Dim = tuple[Letter, ...]


@dataclasses.dataclass(frozen=True)
class Slice:
    """A dim of an array of which a slice reads the positions start + stride * i, of `size`."""

    start: int
    stride: int
    inner: Any  # Dim or Slice
    size: int


Index = tuple[Any, ...]  # of Dim or Slice
Element = tuple[Value, Index]


def new_index(shape: Sequence[int]) -> Index:
    """Return an index with a new letter for each dim of more than one element, () for others."""
    return tuple((Letter(size),) if size != 1 else () for size in shape)


def expand(dim: Any) -> Any:
    """Return a dim with the parts of its letters in the places of those that were split."""
    if isinstance(dim, Slice):
        return dataclasses.replace(dim, inner=expand(dim.inner))
    letters = []
    for letter in dim:
        if letter.parts is None:
            letters.append(letter)
        else:
            letters.extend(expand(letter.parts))
    return tuple(letters)


def expand_all(index: Index) -> Index:
    """Return an index with `expand` applied to each dim."""
    return tuple(expand(dim) for dim in index)


def letters_in(index: Iterable[Any]) -> list[Letter]:
    """Return the letters of all dims in their order."""
    letters = []
    for dim in index:
        letters.extend(letters_in([dim.inner]) if isinstance(dim, Slice) else expand(dim))
    return letters


def count_positions(letters: Iterable[Letter]) -> int:
    """Return how many positions letters count together."""
    return math.prod(letter.size for letter in letters)


def regroup(index: Index, shape: Sequence[int]) -> Index:
    """Return the index, into an array of `shape`, of the element that `index` has in a reshape.

    With letters a of size 6 and b of size 4, the index ((a,), (b,)) becomes ((a, b),) for the shape
    (24,), and ((a1,), (a2, b)) for (2, 12), which splits a into a1 of size 2 and a2 of size 3.
    """
    rest: list[Any] = []
    for dim in index:
        rest.extend([dim] if isinstance(dim, Slice) else expand(dim))
    dims = []
    for size in shape:
        dim: list[Any] = []
        have = 1
        while have < size:
            if not rest or size % have:
                raise NoMatch("a reshape mixes axes")
            item = rest.pop(0)
            need = size // have
            if isinstance(item, Letter) and item.size > need:
                if item.size % need:
                    raise NoMatch("a reshape splits an axis unevenly")
                item.parts = (Letter(need), Letter(item.size // need))
                rest.insert(0, item.parts[1])
                item = item.parts[0]
            dim.append(item)
            have *= item.size
        if have != size:
            raise NoMatch("a reshape mixes axes")
        if len(dim) == 1 and isinstance(dim[0], Slice):
            dims.append(dim[0])
        elif any(isinstance(item, Slice) for item in dim):
            dims.append(_merged(dim))
        else:
            dims.append(tuple(dim))
    if rest:
        raise NoMatch("a reshape mixes axes")
    return tuple(dims)


def _merged(dim: list[Any]) -> Slice:
    """Return the positions along an axis that a reshape merges from one position and letters."""
    positions = [x for x in dim if isinstance(x, Slice)]
    letters = tuple(x for x in dim if isinstance(x, Letter))
    one = positions[0]
    if len(positions) != 1 or one.inner != () or one not in (dim[0], dim[-1]):
        raise NoMatch("a reshape mixes a slice with other axes")
    count = count_positions(letters)
    if one is dim[0]:  # the slowest
        return Slice(one.start * count, 1, letters, one.size * count)
    return Slice(one.start, one.size, letters, one.size * count)


def fit(index: Index, value: Value) -> Index:
    """Return the index into an operand of an elementwise equation, which may be a scalar."""
    if not value.shape:
        return ()
    return tuple(() if n == 1 else dim for n, dim in zip(value.shape, index, strict=True))


def sources(equation: Equation, index: Index) -> list[tuple[Value, Index]] | None:
    """Return the elements from which the element `index` of the first result is computed.

    Return None for equations that do more than move or map elements, and for a reshape in which
    the axes of the index have no axes of their own.
    """
    name = equation.eqn.primitive.name
    params = equation.params
    first = equation.inputs[0] if equation.inputs else None
    if name in ELEMENTWISE:
        return [(x, fit(index, x)) for x in equation.inputs]
    if first is None:
        return None
    if name in MARKS:
        return [(first, index)] if len(equation.inputs) == 1 else None
    if name == "broadcast_in_dim" and len(equation.inputs) == 1:
        inner = tuple(index[d] for d in params["broadcast_dimensions"])
        return [(first, fit(inner, first))]
    if name == "tile":
        try:
            return [(first, _tiled(index, params["reps"], first.shape))]
        except NoMatch:
            return None
    if name == "transpose":
        permutation = list(params["permutation"])
        return [(first, tuple(index[permutation.index(d)] for d in range(len(index))))]
    if name in RESHAPES and params.get("dimensions") is None or name in ("squeeze", "expand_dims"):
        try:
            return [(first, regroup(index, first.shape))]
        except NoMatch:
            return None
    if name == "slice":
        strides = params["strides"] or (1,) * len(index)
        return [(first, _sliced(index, params["start_indices"], strides, first))]
    if name == "dynamic_slice":
        starts = _known_starts(equation)
        if starts is not None:
            return [(first, _sliced(index, starts, (1,) * len(index), first))]
    return None


def operands_of(value: Value, index: Index) -> list[Element]:
    """Return the operands of an elementwise equation."""
    inputs = sources(maker_of(value), index)
    assert inputs is not None
    return inputs


def is_cast(value: Value) -> bool:
    """Return True for a conversion between floats, or a copy."""
    if value.op == "copy":
        return True
    if value.op != "convert_element_type":
        return False
    return is_float(value.dtype) and is_float(maker_of(value).inputs[0].dtype)


def is_move(value: Value) -> bool:
    """Return True if each element is one of the operand, perhaps as another float."""
    return is_cast(value) or value.op in MOVES


def is_float(dtype: Any) -> bool:
    """Return True for the real floats that attention may have."""
    return str(dtype) in ("float64", "float32", "float16", "bfloat16")


def chain(value: Value, index: Index) -> list[Element]:
    """Return a value and those from which it differs by conversions and moves of elements."""
    elements = [(value, index)]
    while is_move(value):
        inputs = sources(maker_of(value), index)
        if inputs is None:
            break
        value, index = inputs[0]
        elements.append((value, index))
    return elements


def origin(element: Element) -> Element:
    """Return an element without moves, and without casts that keep all numbers."""
    value, index = element
    while is_move(value):
        inputs = sources(maker_of(value), index)
        if inputs is None:
            break
        if jnp.promote_types(inputs[0][0].dtype, value.dtype) != value.dtype:
            break
        value, index = inputs[0]
    return first_equal(value), expand_all(index)


def is_same(first: Element | None, second: Element) -> bool:
    """Return True for one element of one array, but for moves and casts that keep all numbers."""
    return first is not None and origin(first) == origin(second)


def maker_of(value: Value) -> Equation:
    """Return the equation of a value that is neither an input nor a constant."""
    assert value.maker is not None
    return value.maker


def _tiled(index: Index, reps: Sequence[int], shape: Sequence[int]) -> Index:
    """Return the index into the operand of a tile, which repeats it along each dim."""
    sizes = [x for pair in zip(reps, shape, strict=True) for x in pair]
    return regroup(index, sizes)[1::2]


def _sliced(index: Index, starts: Sequence[int], strides: Sequence[int], value: Value) -> Index:
    """Return the index into the operand of a slice."""
    dims: list[Any] = []
    for dim, start, stride, size in zip(index, starts, strides, value.shape, strict=True):
        is_whole = start == 0 and stride == 1 and count_positions(letters_in([dim])) == size
        dims.append(dim if is_whole else Slice(start, stride, dim, size))
    return tuple(dims)


def _known_starts(equation: Equation) -> list[int] | None:
    """Return where a dynamic slice begins, clipped as JAX clips it; None where it is traced."""
    shape = equation.inputs[0].shape
    sizes = equation.outputs[0].shape
    starts = []
    for start, size, whole in zip(equation.inputs[1:], sizes, shape, strict=True):
        number = known_number(start)
        if number is None:
            return None
        starts.append(min(max(int(number), 0), whole - size))
    return starts


def known_number(value: Value) -> Any:
    """Return the number that every element of a value is, or None where that is not known."""
    waiting = [value]
    while waiting:
        x = waiting[-1]
        missing = [] if x.known else [y for y in _of_same_number(x) if not y.known]
        if not missing:
            waiting.pop()
            x.known = x.known or [_known_number(x)]
        waiting.extend(missing)
    return value.known[0]


def _of_same_number(value: Value) -> list[Value]:
    """Return the values whose numbers decide whether every element of a value is one number."""
    if value.constant is not None or value.maker is None:
        return []
    if value.op in SAME_NUMBER:
        return value.maker.inputs[:1]
    return value.maker.inputs if value.op in ELEMENTWISE else []


def _known_number(value: Value) -> Any:
    """Return the number that every element of a value is, once those of its inputs are known."""
    if value.constant is not None:
        numbers = as_numpy(value.constant)
        if numbers is None or numbers.size == 0:
            return None
        first = numbers.reshape(-1)[0]
        return first if numbers.size == 1 or (numbers == first).all() else None
    inputs = [x.known[0] for x in _of_same_number(value)]
    if not inputs or any(x is None for x in inputs):
        return None
    return inputs[0] if value.op in SAME_NUMBER else compute(maker_of(value).eqn, inputs)


def take_factor(element: Element, factor: float) -> tuple[Element, float] | None:
    """Take a known number off a product or a quotient: of x / 4, times 2, return x and 0.5.

    Return x and c such that the element times `factor` is x times c. Return None if there is no
    such number, or if it is 0 or not finite.
    """
    value, index = element
    if value.op not in ("mul", "div"):
        return None
    inner, other = operands_of(value, index)
    if value.op == "mul" and known_number(other[0]) is None:
        inner, other = other, inner
    number = known_number(other[0])
    if not is_nonzero(number):
        return None
    return inner, factor * float(number) if value.op == "mul" else factor / float(number)


def is_nonzero(number: Any) -> bool:
    """Return True for a known number that is finite and not 0."""
    return number is not None and math.isfinite(number) and number != 0


def values_before(
    value: Value, most: int, through: Callable[[Value], bool] | None = None
) -> Iterator[Value]:
    """Visit a value and those from which it is computed, the nearest first, at most `most`.

    Go on from those for which `through` is True; None: from all.
    """
    waiting = collections.deque([value])
    for _ in range(most):
        if not waiting:
            return
        value = waiting.popleft()
        yield value
        if value.maker is not None and (through is None or through(value)):
            waiting.extend(value.maker.inputs)


def is_closed(value: Value) -> bool:
    """Return True if a value is computed from positions and known numbers alone."""
    seen = set()
    waiting = [value]
    while waiting:
        x = waiting.pop()
        if x in seen or x.is_closed or known_number(x) is not None or x.op == "iota":
            continue
        seen.add(x)
        if x.maker is None or x.op not in ELEMENTWISE | MOVES | JOINS:
            return False
        waiting.extend(x.maker.inputs)
    for x in seen:
        x.is_closed = True
    return True


def is_made_of_less(value: Value) -> bool:
    """Return True for an array that is computed element by element from smaller ones, or known.

    Masks and biases of positions are, and activations are not.
    """
    size = math.prod(value.shape)
    if len(value.shape) < 2 or value.maker is None and value.constant is None:
        return False
    waiting = [value]
    for _ in range(MOST_STEPS):
        if not waiting:
            return True
        x = waiting.pop()
        if x.op == "iota" or known_number(x) is not None or x.constant is not None:
            continue
        if x.op in JOINS and is_closed(x):
            continue
        if x.maker is not None and x.op in ELEMENTWISE | MOVES | {"cumsum"}:
            waiting.extend(x.maker.inputs)
        elif math.prod(x.shape) >= size:
            return False
    return False
