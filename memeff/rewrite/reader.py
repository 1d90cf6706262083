"""Read what one element of an array is, as a symbol of the positions along its axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from memeff.rewrite.axes import (
    ELEMENTWISE,
    JOINS,
    Index,
    Letter,
    NoMatch,
    Slice,
    count_positions,
    expand,
    expand_all,
    known_number,
    letters_in,
    maker_of,
    sources,
)
from memeff.rewrite.graph import Equation, Value, first_equal
from memeff.rewrite.numbers import as_numpy
from memeff.rewrite.symbol_operations import combine, decide, is_exact, select
from memeff.rewrite.symbols import (
    Affine,
    AtLeastZero,
    Choice,
    Formula,
    Known,
    Number,
    Opaque,
    Symbol,
    both,
    move,
)

MOST_VALUES = 400  # that are followed to find on which axes a value depends
DEEPEST = 100  # equations, one made of the other, through which a symbol is read
MOST_READ = 1_000  # elements: a join of parts reads each part anew, and within it other joins
LARGEST_CONSTANT = 2**28  # elements of a constant mask that is compared with a band


class Reader:
    """Read symbols, and remember those that were read."""

    def __init__(self):
        self._known: dict[Any, Symbol] = {}
        self._depth = 0

    def read(self, value: Value, index: Index) -> Symbol:
        """Return what the element of `value` at `index` is.

        That of arange(T)[:, None] >= arange(S) is a choice between True and False, whose condition
        is that row - column is at least 0.
        """
        index = expand_all(index)
        key = id(value), index
        if key in self._known:
            return self._known[key]
        if self._depth >= DEEPEST or len(self._known) >= MOST_READ:
            return Opaque(value, index)
        self._depth += 1
        self._known[key] = self._read(value, index)
        self._depth -= 1
        return self._known[key]

    def _read(self, value: Value, index: Index) -> Symbol:
        number = known_number(value)
        if number is not None:
            return Number(number)
        opaque = Opaque(first_equal(value), index)
        equation = value.maker
        if value.constant is not None:
            return self._band(value.constant, index) or _positions(value, index) or opaque
        if equation is None:
            return opaque
        if value.op == "iota":
            position = position_along(index[equation.params["dimension"]])
            return position if is_exact(position, value.dtype) else opaque
        if value.op == "cumsum":
            return running_count(equation, index) or opaque
        if value.op in JOINS:
            return self._joined(equation, index) or opaque
        inputs = sources(equation, index)
        if inputs is None:
            return opaque
        if value.op not in ELEMENTWISE:
            symbol = self.read(*inputs[0])
            is_slice = value.op in ("slice", "dynamic_slice")
            return opaque if is_slice and isinstance(symbol, Opaque) else symbol
        symbols = [self.read(*source) for source in inputs]
        return combine(equation, symbols) or opaque

    def _joined(self, equation: Equation, index: Index) -> Symbol | None:
        """Return an element of joined or padded arrays, each of which is made of positions."""
        symbol: Symbol | None = None
        for part, starts in _parts(equation):
            try:
                inside, of_part = self._placed(part, starts, index)
            except NoMatch:
                return None
            is_first = symbol is None
            symbol = of_part if is_first else select([inside, symbol, of_part])
            if symbol is None:
                return None
        return symbol

    def _placed(self, part: Value, starts: tuple[int, ...], index: Index) -> tuple[Choice, Symbol]:
        """Return whether `index` lies in a part that begins at `starts`, and its element there.

        A part without starts is one number, which lies everywhere.
        """
        inside: list[Formula] = []
        inner = []
        positions: dict[Letter, Affine] = {}
        for dim, start, size in zip(index if starts else (), starts, part.shape, strict=True):
            position = position_along(dim).plus(Affine((), -start))
            to_end = position.times(-1).plus(Affine((), size - 1))
            inside.extend([decide(AtLeastZero(position)), decide(AtLeastZero(to_end))])
            if not start and inside[-1] == Known(True):
                inner.append(dim)
                continue
            letter = Letter(size)
            positions[letter] = position
            inner.append((letter,) if size != 1 else ())
        symbol = move(self.read(part, tuple(inner)), positions)
        return Choice(both(*inside), True, False), symbol

    def _band(self, constant: Any, index: Index) -> Choice | None:
        """Return an array of two numbers as a choice, if one of them fills a band of diagonals."""
        array = as_numpy(constant)
        dims = [d for d, dim in enumerate(index) if letters_in([dim])]
        if array is None or len(dims) != 2 or array.size > LARGEST_CONSTANT:
            return None
        for d, dim in enumerate(index):
            if isinstance(dim, Slice) and not isinstance(dim.inner, Slice):
                count = count_positions(dim.inner)
                array = array.take(dim.start + dim.stride * np.arange(count), axis=d)
            elif isinstance(dim, Slice):
                return None
        array = array.reshape([array.shape[d] for d in dims])
        yes = array.max()
        no = array.min()
        if not ((array == yes) | (array == no)).all():
            return None
        rows, columns = (position_within(index[d]) for d in dims)
        for visible, first, second in ((array == yes, yes, no), (array == no, no, yes)):
            band = _band_of(visible)
            if band is None:
                continue
            low, high = band
            distance = columns.plus(rows, -1)
            above = AtLeastZero(distance.plus(Affine((), -low)))
            below = AtLeastZero(distance.times(-1).plus(Affine((), high)))
            return Choice(both(decide(above), decide(below)), first, second)
        return None


def running_count(equation: Equation, index: Index) -> Affine | None:
    """Return a running sum of equal integers, as some programs count positions."""
    (summed,) = equation.inputs
    number = known_number(summed)
    if number is None or not np.isfinite(number) or number != int(number):
        return None
    axis = equation.params["axis"]
    position = position_along(index[axis]).plus(Affine((), 1))
    if equation.params["reverse"]:
        position = Affine((), summed.shape[axis] + 1).plus(position, -1)
    total = position.times(int(number))
    return total if is_exact(total, summed.dtype) else None


def _parts(equation: Equation) -> list[tuple[Value, tuple[int, ...]]]:
    """Return the arrays of a join, and where each begins, or [] where they are not contiguous.

    Where two overlap, the later one counts. The number of a padding is the first.
    """
    params = equation.params
    if equation.eqn.primitive.name == "pad":
        array, number = equation.inputs
        config = params["padding_config"]
        if any(min(low, high) < 0 or between for low, high, between in config):
            return []
        return [(number, ()), (array, tuple(low for low, _, _ in config))]
    axis = params["dimension"]
    rank = len(equation.outputs[0].shape)
    parts = []
    start = 0
    for array in equation.inputs:
        parts.append((array, tuple(start if d == axis else 0 for d in range(rank))))
        start += array.shape[axis]
    return parts


def _positions(value: Value, index: Index) -> Affine | None:
    """Return integers of a constant as positions, if they are equally spaced along one dim."""
    array = as_numpy(value.constant)
    dims = [d for d, size in enumerate(value.shape) if size != 1]
    if array is None or len(dims) != 1 or not np.issubdtype(array.dtype, np.integer):
        return None
    first, *rest = array.ravel().tolist()
    step = rest[0] - first
    if rest != [first + step * n for n in range(1, array.size)]:
        return None
    return position_along(index[dims[0]]).times(step).plus(Affine((), first))


def position_within(dim: Any) -> Affine:
    """Return the position along a dim, within the slice if it is one."""
    return position_along(dim.inner if isinstance(dim, Slice) else dim)


def position_along(dim: Any) -> Affine:
    """Return the position along a dim, which its letters count together."""
    if isinstance(dim, Slice):
        return position_along(dim.inner).times(dim.stride).plus(Affine((), dim.start))
    terms = []
    stride = 1
    for letter in reversed(expand(dim)):
        terms.append((letter, stride))
        stride *= letter.size
    return Affine(tuple(terms), 0)


def _band_of(visible: np.ndarray) -> tuple[int, int] | None:
    """Return (low, high) if [T, S] is True where low <= column - row <= high, else None."""
    T, S = visible.shape
    if not visible.any():
        return None
    rows, columns = visible.nonzero()
    distances = columns - rows
    low = int(distances.min())
    high = int(distances.max())
    everywhere = np.arange(S) - np.arange(T)[:, None]
    band = (everywhere >= low) & (everywhere <= high)
    return (low, high) if (band == visible).all() else None


def letters_of(value: Value, index: Index) -> set[Letter]:
    """Return the letters on which the element of `value` at `index` depends, or a few more."""
    letters: set[Letter] = set()
    seen: set[Any] = set()
    waiting = [(value, expand_all(index))]
    while waiting:
        value, index = waiting.pop()
        if (value, index) in seen or known_number(value) is not None:
            continue
        seen.add((value, index))
        if value.op == "iota":
            assert value.maker is not None
            index = (index[value.maker.params["dimension"]],)
        elif value.op == "cumsum" and running_count(maker_of(value), index) is not None:
            index = (index[maker_of(value).params["axis"]],)
        elif value.maker is not None and len(seen) < MOST_VALUES:
            inputs = sources(value.maker, index)
            if inputs is not None:
                waiting.extend((x, expand_all(x_index)) for x, x_index in inputs)
                continue
        letters.update(letters_in(index))
    return letters
